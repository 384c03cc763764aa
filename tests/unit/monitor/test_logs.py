"""Logs. Promises: a file per role, warnings on stderr, no duplicates after a second call."""

import logging

import pytest

from rftdask.errors import StorageError
from rftdask.monitor.logs import LogFolder, setup_logging
from rftdask.storage import open_storage
from rftdask.testing.storage_faults import FaultyStorage


@pytest.fixture(autouse=True)
def no_handlers_left():
    yield
    logger = logging.getLogger("rftdask")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)


def test_records_go_to_the_role_s_file_warnings_also_to_stderr(tmp_path, capsys):
    path = setup_logging("trainer", "INFO", tmp_path / "log")
    assert path == tmp_path / "log" / "trainer.log"
    log = logging.getLogger("rftdask.trainer")
    log.debug("hidden")
    log.info("step 1")
    log.warning("slow disk")
    lines = path.read_text().splitlines()
    assert [line.partition("]: ")[2] for line in lines] == ["step 1", "slow disk"]
    assert capsys.readouterr().err == "WARNING trainer: slow disk\n"


def test_a_second_call_replaces_the_first(tmp_path, capsys):
    first = setup_logging("trainer", "INFO", tmp_path / "a")
    second = setup_logging("explorer", "INFO", tmp_path / "b")
    logging.getLogger("rftdask").warning("once")
    assert first.read_text() == ""
    assert len(second.read_text().splitlines()) == 1
    assert capsys.readouterr().err == "WARNING explorer: once\n"


def test_without_a_local_folder_there_is_stderr_only(capsys):
    assert setup_logging("trainer") is None
    logging.getLogger("rftdask").warning("here")
    assert capsys.readouterr().err == "WARNING trainer: here\n"


def test_a_local_run_logs_into_its_folder(tmp_path):
    folder = LogFolder(open_storage(tmp_path))
    folder.close()
    assert folder.path == tmp_path / "log" and not folder.path.exists()


def test_copy_the_logs_of_a_remote_run_to_a_folder_per_start():
    storage = open_storage("memory://logs")
    folder = LogFolder(storage)
    (folder.path / "engine.log").write_text("loaded\n")
    folder.poll()
    assert storage.list("log") == []  # not yet
    folder.close()
    (start,) = storage.list("log")
    assert storage.get(f"log/{start}engine.log") == b"loaded\n"
    (folder.path / "engine.log").write_text("loaded\nserved\n")
    folder.close()
    assert storage.get(f"log/{start}engine.log") == b"loaded\nserved\n"


def test_a_failed_copy_of_a_log_is_a_warning(caplog):
    def fail(verb, path, stage):
        if fails and verb == "put":
            raise StorageError("no network")

    fails = [True]
    storage = FaultyStorage(open_storage("memory://logs-fail"), fail)
    folder = LogFolder(storage)
    (folder.path / "driver.log").write_text("a line\n")
    folder.close()
    assert "driver.log is not copied to the run yet: no network" in caplog.text
    fails.clear()
    folder.close()
    (start,) = storage.list("log")
    assert storage.list(f"log/{start.rstrip('/')}") == ["driver.log"]
