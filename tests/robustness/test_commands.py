"""Promise: a mistyped command, or one given a folder that is not a run or is damaged, reports it in one message with
the right exit code.
"""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import LONGEST_MESSAGE, assert_mendable

from tests.integration.run_cases import Ended, call_cli, finish, run_folder, write_config

DEEP = 5_000
READERS: dict[str, tuple[str, ...]] = {
    "status": ("status", "RUN"),
    "status --json": ("status", "RUN", "--json"),
    "report": ("report", "RUN"),
    "logs": ("logs", "RUN"),
    "cancel": ("cancel", "RUN", "--timeout", "2"),
    "attach": ("attach", "RUN"),
    "convert": ("convert", "RUN", "OUT"),
    "experiences": ("experiences", "RUN"),
    "trace": ("trace", "RUN", "taskset_0/0/0/0/0"),
    "view": ("view", "RUN", "--html", "OUT.html"),
    "compact": ("compact", "RUN"),
    "replay": ("replay", "RUN", "--from", "0"),
    "skip": ("skip", "RUN", "3", "--because", "why"),
}


def ask(command: str, run: Path, out: Path) -> Ended:
    words = {"RUN": str(run), "OUT": str(out / "converted"), "OUT.html": str(out / "page.html")}
    return call_cli(*(words.get(word, word) for word in READERS[command]))


def a_file(path: Path) -> None:
    path.write_text("no run")


def torn(path: Path) -> None:
    path.mkdir()
    (path / "run.json").write_text('{"config": {')


def a_list(path: Path) -> None:
    path.mkdir()
    (path / "run.json").write_text("[]")


def nested(path: Path) -> None:
    path.mkdir()
    (path / "run.json").write_text("[" * DEEP + "]" * DEEP)


def of_another_shape(path: Path) -> None:
    path.mkdir()
    (path / "run.json").write_text('{"config": 7, "stages": "x"}')


def a_fifo(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "run.json")


NO_RUNS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "an empty folder": lambda path: path.mkdir(),
    "a file": a_file,
    "run.json is torn": torn,
    "run.json is a list": a_list,
    "run.json nests": nested,
    "run.json has another shape": of_another_shape,
    "run.json is a FIFO": a_fifo,
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("make", NO_RUNS.values(), ids=NO_RUNS.keys())
@pytest.mark.timeout(120)
def test_a_folder_that_is_no_run_is_refused_by_name(command: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "no_run")
    before = sorted(tmp_path.rglob("*"))
    ended = ask(command, tmp_path / "no_run", tmp_path)
    if (
        tmp_path / "no_run" / "run.json"
    ).exists():  # otherwise the file is damaged, which is a failure rather than a user error
        assert ended.code in (1, 2), ended  # `logs` of a local folder does not read run.json, and finds no log
        ended = replace(ended, code=2)
    assert_mendable(ended, "no_run")
    assert sorted(tmp_path.rglob("*")) == before, "a command that refuses leaves nothing behind"


MISTYPED = {
    "no such command": ("trian", "x.yaml"),
    "no such option": ("run", "x.yaml", "--quik"),
    "no configuration": ("run",),
    "no such configuration": ("run", "no-such.yaml"),
    "a configuration that is a URL": ("run", "http://127.0.0.1:9/x.yaml"),
    "a patience below 0": ("run", "x.yaml", "--patience", "-1"),
    "a patience that is a word": ("run", "x.yaml", "--patience", "long"),
    "a progress that is none": ("run", "CONFIG", "--progress", "loud"),
    "a GPU that nobody makes": ("estimate", "CONFIG", "--gpu", "banana"),
    "a GPU of nothing": ("estimate", "CONFIG", "--gpu", "0GB"),
    "rounds below 1": ("submit", "CONFIG", "--offline", "--rounds", "0"),
    "offline in one allocation": ("submit", "CONFIG", "--offline", "--single-allocation"),
    "a role that is none": ("join", "CONFIG", "--role", "king"),
    "a cluster that is not joined": ("join", "CONFIG"),
    "a run of a name that is not known yet": (
        *("join", "CONFIG", "cluster.type=joined", "continue_from_checkpoint=false"),
    ),
    "lines below 1": ("logs", "RUN", "-n", "0"),
    "a role without a log": ("logs", "RUN", "king"),
    "a timeout of 0": ("cancel", "RUN", "--timeout", "0"),
    "no place to convert to": ("convert", "RUN"),
    "a step that is not there": ("convert", "RUN", "OUT", "--step", "999"),
    "a step below 0": ("convert", "RUN", "OUT", "--step", "-1"),
    "a step that is a word": ("replay", "RUN", "--from", "yesterday"),
    "a replay from nowhere": ("replay", "RUN", "--from", "999"),
    "a replay from below 0": ("replay", "RUN", "--from", "-1"),
    "a lineage with a slash": ("replay", "RUN", "--from", "0", "--lineage", "../x"),
    "a replay without a name": ("replay", "RUN", "--from", "0", "algorithm.optimizer.lr=1"),
    "no SQL": ("experiences", "RUN", "--sql", "hello"),
    "SQL over no table": ("experiences", "RUN", "--sql", "select * from nowhere"),
    "SQL over no column": ("experiences", "RUN", "--sql", "select nothing from experiences"),
    "SQL that deletes": ("experiences", "RUN", "--sql", "drop table experiences"),
    "a uid that is none": ("trace", "RUN", "hello"),
    "a uid of letters": ("trace", "RUN", "taskset_0/a/b/c/d"),
    "a uid that nobody has": ("trace", "RUN", "taskset_0/0/999999/0/0"),
    "a uid with an escape": ("trace", "RUN", "\x1b[31m/0/0/0/0"),
    "no uid": ("trace", "RUN"),
    "a port that is none": ("view", "RUN", "--port", "99999", "--no-browser"),
    "a port below 0": ("view", "RUN", "--port", "-1", "--no-browser"),
    "a page below a file": ("view", "RUN", "--html", "CONFIG/page.html"),
    "a page of nothing": ("view", "RUN", "--html", "page.html", "--limit", "0"),
    "a storage nobody knows": ("doctor", "gopher://x/y"),
    "no kills": ("crashtest", "--kills", "0"),
    "a part that is none": ("crashtest", "--only", "lunch"),
    "every 0th place": ("crashtest", "--every", "0"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_config(tmp_path_factory.mktemp("finished"))
    finish(config)
    return config


@pytest.mark.parametrize("words", MISTYPED.values(), ids=MISTYPED.keys())
@pytest.mark.timeout(120)
def test_a_command_that_is_mistyped(
    words: tuple[str, ...], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(run_folder(finished)), "OUT": str(tmp_path / "out"), "CONFIG": str(finished)}
    words = tuple(places.get(word, word.replace("CONFIG/", f"{finished}/")) for word in words)
    assert_mendable(call_cli(*words))
    assert not list(tmp_path.iterdir())


def spoil(pattern: str, text: bytes | str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        paths = sorted(path for path in run.glob(pattern) if path.is_file())
        assert paths, f"the run has no {pattern}"
        paths[-1].chmod(0o600)
        paths[-1].write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def without(pattern: str) -> Callable[[Path], None]:
    def remove(run: Path) -> None:
        paths = sorted(run.glob(pattern))
        assert paths, f"the run has no {pattern}"
        shutil.rmtree(paths[-1]) if paths[-1].is_dir() else paths[-1].unlink()

    return remove


def beside(name: str, text: str) -> Callable[[Path], None]:
    def add(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    return add


LEASE = {"host": socket.gethostname(), "pid": -5, "started_s": 1.0, "time_s": 1.0, "released": False}
NESTED = "[" * DEEP + "]" * DEEP
DAMAGES: dict[str, Callable[[Path], None]] = {
    "a ledger entry is torn": spoil("ledger/main/*.json", '{"step": 1, "'),
    "a ledger entry is empty": spoil("ledger/main/*.json", ""),
    "a ledger entry is a list": spoil("ledger/main/*.json", "[]"),
    "a ledger entry nests": spoil("ledger/main/*.json", NESTED),
    "a ledger entry has another shape": spoil("ledger/main/*.json", '{"step": "x", "rows": 7}'),
    "a stranger in the ledger": beside("ledger/main/hello.txt", "hello"),
    "an entry of an absurd step": beside("ledger/main/99999999999999999999.json", "{}"),
    "the ledger is gone": without("ledger/main"),
    "a shard is torn": spoil("experiences/*/*.parquet", b"PAR1"),
    "a shard is text": spoil("experiences/*/*.parquet", "hello"),
    "a shard is gone": without("experiences/*/*.parquet"),
    "a stranger among the shards": beside("experiences/00000000/hello.txt", "hello"),
    "the checkpoint pointer is a word": spoil("latest_checkpointed_iteration.txt", "ten"),
    "the checkpoint pointer is below 0": spoil("latest_checkpointed_iteration.txt", "-1"),
    "the checkpoint pointer is absurd": spoil("latest_checkpointed_iteration.txt", "9" * 400),
    "the checkpoint pointer is binary": spoil("latest_checkpointed_iteration.txt", b"\xff\xfe"),
    "the weights pointer is a word": spoil("latest_state_dict_iteration.txt", "ten"),
    "the weights pointer is absurd": spoil("latest_state_dict_iteration.txt", "9" * 400),
    "the pointers are gone": without("latest_checkpointed_iteration.txt"),
    "a manifest is torn": spoil("global_step_*/MANIFEST.json", "{"),
    "a manifest is a list": spoil("global_step_*/MANIFEST.json", "[]"),
    "a manifest nests": spoil("global_step_*/MANIFEST.json", NESTED),
    "a manifest is gone": without("global_step_*/MANIFEST.json"),
    "the newest checkpoint is gone": without("global_step_*"),
    "the weights are gone": without("weights/*"),
    "the end is a list": beside("control/END.json", "[1]"),
    "the end is of no process": beside("control/END.json", json.dumps({**LEASE, "status": "begun"})),
    "the jobs are an object": beside("control/jobs-both.json", '{"a": 1}'),
    "the jobs nest": beside("control/jobs-both.json", NESTED),
    "the jobs of a submission have another shape": beside("control/submitted.json", '[{"role": 7}]'),
    "a lease is a list": beside("control/lease-trainer-7.json", "[]"),
    "a lease nests": beside("control/lease-trainer-7.json", NESTED),
    "a lease of no process": beside("control/lease-trainer-7.json", json.dumps(LEASE)),
    "a lease of an absurd process": beside("control/lease-trainer-7.json", json.dumps({**LEASE, "pid": 10**30})),
    "a lease of an absurd number": beside("control/lease-trainer-99999999999999999999999.json", json.dumps(LEASE)),
    "the last lease that there can be": beside("control/lease-trainer-999999999999999.json", "{}"),
    "accepted changes are a list": beside("control/accepted-1.json", "[]"),
    "accepted changes have another shape": beside("control/accepted-1.json", '{"changes": [7], "sources": {"a": []}}'),
    "metrics are torn": spoil("metrics/**/*", "{"),
    "an evaluation is torn": spoil("eval/**/*", "{"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.timeout(120)
def test_a_damaged_run_ends_without_a_traceback(damage: Callable[[Path], None], finished: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder(finished), tmp_path / "run", symlinks=True)
    damage(tmp_path / "run")
    for command in sorted(READERS.keys() - {"replay", "attach", "cancel"}):
        ended = ask(command, tmp_path / "run", tmp_path)
        assert ended.code in (0, 1, 2), (command, ended)
        assert "Traceback" not in ended.err and len(ended.err) <= LONGEST_MESSAGE, (command, ended)
        if ended.code == 2 or (ended.code == 1 and command != "status"):
            assert re.match("error: |problem: ", ended.err) or ended.out, (command, ended)
