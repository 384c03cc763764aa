"""Names on the Hub, without the Hub: a complete cached model needs no request, any other name exactly one."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from rftdask.data import hub
from rftdask.data.datasets import open_dataset
from rftdask.data.hub import local_model, require_hub, require_model
from rftdask.errors import DataError
from rftdask.models.model_shape import read_shape
from rftdask.models.toy import build_toy_model

MODEL = "rftdask-tests/no-such-model"


class Server:
    """A local socket in place of the Hub that refuses connections, or accepts them and stays silent."""

    def __init__(self, listens: bool) -> None:
        self.listens = listens
        self.taken: list[socket.socket] = []
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        if listens:
            self.socket.listen()
            threading.Thread(target=self._take, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self.socket.accept()[0])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # set for all tests
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_silence", ("", 0.0, ""))
    return tmp_path / "cache"


@pytest.fixture(params=["refuses", "hangs"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(listens=request.param == "hangs")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(hub, "_ANSWER_TIMEOUT_S", 1.0)
    yield server
    server.socket.close()


def put_in_cache(cache: Path, name: str, *, whole: bool) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123"
    build_toy_model(snapshot, hidden_size=16, intermediate_size=16, num_heads=2)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    if not whole:
        (snapshot / "model.safetensors").unlink()
    return snapshot


def test_a_cached_model_is_its_folder_in_the_cache(cache: Path, silent: Server) -> None:
    snapshot = put_in_cache(cache, MODEL, whole=True)
    assert local_model(MODEL) == str(snapshot)
    require_model(MODEL, "model.model_path")
    assert read_shape(MODEL).num_parameters == read_shape(str(snapshot)).num_parameters
    assert len(silent.taken) == 0


def test_an_incomplete_cached_model_is_requested(cache: Path, silent: Server) -> None:
    put_in_cache(cache, MODEL, whole=False)
    assert local_model(MODEL) == MODEL
    with pytest.raises(DataError, match=r"^model.model_path: 'rftdask-tests/no-such-model' is not on this machine"):
        require_model(MODEL, "model.model_path")
    assert read_shape(MODEL).num_parameters > 0, "the shape follows from config.json"


def test_a_model_that_is_nowhere_is_one_line_after_one_request(silent: Server) -> None:
    with pytest.raises(DataError) as caught:
        require_model(MODEL, "model.model_path")
    with pytest.raises(DataError, match=r"config\.json"):
        read_shape(MODEL)
    (line,) = str(caught.value).splitlines()
    assert f"{silent.url} does not answer (" in line
    assert line.endswith(
        "pass a local copy (run hf download rftdask-tests/no-such-model --local-dir DIR on a machine with a network)"
    )
    assert len(silent.taken) == silent.listens


def test_a_dataset_that_is_nowhere_is_one_line_after_one_request(silent: Server) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset("rftdask-tests/no-such-rows", split="test", subset_name="main")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        "dataset rftdask-tests/no-such-rows (split 'test', subset 'main') is not on this machine, and "
        f"{silent.url} does not answer ("
    )
    assert "hf download rftdask-tests/no-such-rows --repo-type dataset --local-dir DIR" in line
    assert len(silent.taken) == silent.listens


def test_any_answer_of_the_hub_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    require_hub("a model", "nothing to do")
    server.close()


def test_a_path_that_is_not_a_hub_name_is_unchanged(tmp_path: Path) -> None:
    for path in ("/no/such/folder", "./folder", "~/folder", "gpt2", "a/b/c", str(tmp_path)):
        assert local_model(path) == path
