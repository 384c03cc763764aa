"""Promises of the logs: a file per role, warnings on stderr, and calling it again duplicates nothing."""

import logging

import pytest

from rftdask.monitor.logs import setup_logging


@pytest.fixture(autouse=True)
def no_handlers_left():
    yield
    logger = logging.getLogger("rftdask")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)


def test_records_go_to_the_role_s_file_and_warnings_to_stderr_too(tmp_path, capsys):
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
