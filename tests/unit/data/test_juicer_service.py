"""Promises of `service.data_juicer.server_url`. The service of the reference system is tested if it is installed."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from rftdask.config import load_config
from rftdask.data.juicer.base import OperatorResult, Pipeline, RowResult
from rftdask.data.juicer.environment import PLACE
from rftdask.data.juicer.service import JuicerService
from rftdask.data.task_pipeline import REPORT, check_pipeline, make_datasets
from rftdask.errors import ConfigError, DataError, NotInstalledError, ProcessLostError, RftError, UserError, WaitTimeout
from rftdask.storage import open_storage
from tests.unit.data.fake_data_juicer.fake_service import serving

ROWS = [{"q": "why", "n": 1}, {"q": "no"}, {"q": "how many", "n": 2.5}]
SHORT = {"text_length_filter": {"min_len": 3}}


def test_rows_come_back_with_their_changes() -> None:
    told: list[OperatorResult] = []
    with serving() as service, JuicerService(service.url, Pipeline([SHORT, {"upper_mapper": {}}], "q")) as juicer:
        assert juicer.run(ROWS, told.append) == [
            RowResult(0, {"q": "WHY"}, [], {"text_len": 3}),
            RowResult(2, {"q": "HOW MANY"}, [], {"text_len": 8}),
        ]
        assert juicer.run([{"q": "a"}]) == []
        assert told == [OperatorResult("text_length_filter, upper_mapper", 2, [1])]
        assert len(service.sessions) == 1
    assert service.sessions == {}
    assert service.asked == ["/health", "/create", "/process_experience", "/process_experience", "/close"]


def test_a_lost_session_is_created_again() -> None:
    with serving() as service, JuicerService(service.url, Pipeline([SHORT], "q")) as juicer:
        service.sessions.clear()
        assert [result.row for result in juicer.run(ROWS)] == [0, 2]
        assert service.asked[2:] == ["/process_experience", "/create", "/process_experience"]


@pytest.mark.parametrize(
    ("operator", "error", "told"),
    [
        ("fails_mapper", DataError, r"process_experience: status 500: (.*\n)*RuntimeError: no such verb"),
        ("hangs_mapper", WaitTimeout, "process_experience: no answer after 0 s"),
        (
            "counts_aggregator",
            UserError,
            "one of the operators counts_aggregator of Data-Juicer at .*: it makes new rows, which is not supported",
        ),
    ],
)
def test_invalid_answers_raise_typed_errors(operator: str, error: type[RftError], told: str) -> None:
    with serving() as service:
        with (
            JuicerService(service.url, Pipeline([{operator: {}}], "q"), silence_s=0.2) as juicer,
            pytest.raises(error, match=told),
        ):
            juicer.run(ROWS)
        with pytest.raises(UserError, match=r"/create: status 400: Failed to parse config"):
            JuicerService(service.url, Pipeline([], "q"))
        with pytest.raises(UserError, match=r"custom_operator_paths of a recipe: the protocol of service.data_juicer"):
            JuicerService(service.url, Pipeline([SHORT], "q", custom_operator_paths=["mine.py"]))
        with (
            JuicerService(service.url, Pipeline([SHORT], "q")) as juicer,
            pytest.raises(DataError, match="of one type"),
        ):
            juicer.run([{"q": "why"}, {"q": 3}])
    with pytest.raises(ProcessLostError, match=r"health does not answer: .*refused.*service.data_juicer.server_url"):
        JuicerService(service.url, Pipeline([SHORT], "q"))


def tree(folder: Path, url: str, **pipeline: Any) -> dict[str, Any]:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    taskset = {"path": str(folder / "tasks.jsonl"), "format": {"prompt_key": "q", "response_key": "n"}}
    pipeline = {"operators": [{"name": "text_length_filter", "args": {"min_len": 3}}], **pipeline}
    return {
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
        "data_processor": {"task_pipeline": pipeline},
        "service": {"data_juicer": {"server_url": url}},
    }


def test_the_service_makes_a_dataset_without_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, "/nowhere")
    with serving() as service:
        stage = load_config(tree(tmp_path, service.url))
        check_pipeline(stage)
        assert service.asked == ["/health", "/create", "/process_experience", "/close"]
        assert make_datasets([stage], lambda line: None)
        wrong = load_config(tree(tmp_path, service.url, operators=[{"name": "txt"}]), ["name=wrong"])
        with pytest.raises(DataError, match=r"status 500: ValueError: no txt\nmore$"):
            check_pipeline(wrong)
    folder = open_storage(stage.checkpoint_job_dir)
    assert [json.loads(line) for line in folder.get("dataset/rows.jsonl").splitlines()] == [
        {"source_row": "tasks.jsonl#0", "q": "why", "n": 1, "text_len": 3},
        {"source_row": "tasks.jsonl#2", "q": "how many", "n": 2.5, "text_len": 8},
    ]
    told = json.loads(folder.get(REPORT))
    assert (told["service"], told["packages"]) == (service.url, {})
    assert told["dropped"][0]["why"] == "by text_length_filter (operator 1)"
    other = load_config(tree(tmp_path, service.url), ["name=other"])
    with pytest.raises(
        NotInstalledError, match=r"does not answer: .*; start the service, or leave service.data_juicer.server"
    ):
        check_pipeline(other)


def test_keys_of_the_reference_are_used_or_reported(tmp_path: Path) -> None:
    source = tree(tmp_path, "http://there:5005")
    source["service"]["data_juicer"] |= {"auto_start": False, "port": 5005}
    told = load_config(source)
    assert told.service.data_juicer.server_url == "http://there:5005"
    assert "service.data_juicer.port: ignored: no service is started" in "\n".join(told.warnings)
    source["service"]["data_juicer"] |= {"auto_start": True}
    assert load_config(source).service.data_juicer.server_url is None
    for url in ("there:5005", "file:///etc", "http://"):
        with pytest.raises(ConfigError, match=r"service.data_juicer.server_url: "):
            load_config(tree(tmp_path, url))


@pytest.mark.extras
def test_the_service_of_the_reference_understands_the_client(tmp_path: Path) -> None:
    """Its own server, over fake_data_juicer and a stub of the config parser."""
    try:
        assert version("trinity-rft") == "0.6.0"
    except PackageNotFoundError:
        pytest.skip("trinity-rft is not installed; tests/conformance/install_peers.sh does it")
    pytest.importorskip("flask", reason="the service needs flask: pip install flask")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = (
        "import data_juicer.as_the_service_imports_it\n"
        "from trinity.service.data_juicer.server.server import main\n"
        f"main('127.0.0.1', {port})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "fake_data_juicer"), "FAKE_INSTALLED": ""}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                juicer = JuicerService(f"http://127.0.0.1:{port}", Pipeline([SHORT, {"upper_mapper": {}}], "q"))
                break
            except ProcessLostError:
                assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
        with juicer:
            first, second = juicer.run(ROWS)
            assert (first.row, first.changed) == (0, {"q": "WHY"})
            assert (second.row, second.stats) == (2, {"text_len": 8, "alnum_ratio": 7 / 8})
            assert juicer.run([{"q": "a"}]) == []
        with (
            JuicerService(f"http://127.0.0.1:{port}", Pipeline([{"fails_mapper": {}}], "q")) as juicer,
            pytest.raises(DataError, match=r"status 500: (?s:.*)RuntimeError: no such verb"),
        ):
            juicer.run(ROWS)
        with pytest.raises(UserError, match=r"/create: status 400: Failed to parse config"):
            JuicerService(f"http://127.0.0.1:{port}", Pipeline([], "q"))
    finally:
        server.kill()
        server.wait(10)
