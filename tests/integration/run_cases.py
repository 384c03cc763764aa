"""Small runs for tests: a config with a fake engine and a fake trainer, runs as processes, and readers of run folders.

A run is a process group of its own, whose processes carry a mark in their environment, so a test can kill all of it and
check that nothing outlives it. Every wait has a deadline and waits for an event, not for a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rftdask.buffer.batches.ledger import MAIN_LINEAGE, Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName, done_units
from rftdask.cli import app as cli
from rftdask.processes.zygote import requester_of
from rftdask.storage import open_storage

DEADLINE_S = 300.0
"""Seconds for one run on a busy machine: many times its duration on an idle one."""
MARK = "RFTDASK_TEST_RUN"
ENGINE = "rftdask.engines.server:serve"
TRAINER = "rftdask.trainer.rank:serve"

BATCH_SIZE = 4
REPEAT_TIMES = 2
NUM_EVAL_TASKS = 3


def write_config(folder: Path, num_tasks: int = 16) -> Path:
    """Write `config.yaml` of a GRPO run with fakes, and its tasks; the run folder will be
    `<folder>/runs/rftdask/fake`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("tasks", num_tasks), ("held_out", NUM_EVAL_TASKS)):
        rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"}
    tree: dict[str, Any] = {
        "name": "fake",
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": "none", "max_prompt_tokens": 16, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": REPEAT_TIMES, "kl_loss_fn": "none"},
        "cluster": {"num_cpus": 2},
        "buffer": {
            "batch_size": BATCH_SIZE,
            "total_epochs": 100,
            "explorer_input": {
                "taskset": {"path": str(folder / "tasks.jsonl"), "format": columns},
                "eval_tasksets": [{"name": "held_out", "path": str(folder / "held_out.jsonl"), "format": columns}],
                "default_reward_fn_type": "exact_reward",
            },
        },
        # Two work units per step, so that steps end out of order.
        "explorer": {"tasks_per_batch": 2, "eval_interval": 5, "rollout_model": {"engine_type": "fake"}},
        "trainer": {"trainer_type": "fake", "total_steps": 10, "save_interval": 4},
        "synchronizer": {"sync_offset": 1},
        "monitor": {"monitor_type": "none"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run_folder(config: Path) -> Path:
    return config.parent / "runs" / "rftdask" / "fake"


# ---- the command line


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def call_cli(*arguments: str, main: Callable[[], None] = cli.main) -> Ended:
    """Run a command in this process, like its entry point."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["rftdask", *arguments])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Ended(code, out.getvalue(), err.getvalue())


class RunProcess:
    """`rftdask <arguments>` as a process group.

    Example:
        with RunProcess("run", str(config)) as run:
            run.wait_until(lambda: num_steps(folder) >= 3)
            run.kill()
    """

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, program: tuple[str, ...] | None = None
    ) -> None:
        """program: program to run instead of the command line, for example a script."""
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, *(program or ("-m", "rftdask")), *arguments],
            env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1", **(env or {}), MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> RunProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def wait_until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Wait until the condition holds, while the run lives."""
        for _ in _ticks(deadline_s):
            if condition():
                return
            if self.process.poll() is not None:
                pytest.fail(f"the run ended too early, with code {self.process.returncode}: {self.end()}")
        pytest.fail(f"what was waited for did not happen in {deadline_s} s: {self.kill_and_read()}")

    def end(self, deadline_s: float = DEADLINE_S, *, code: int | None = None) -> Ended:
        """Wait for the end of the run. With `code`, it must have this exit code, and no process may outlive it."""
        try:
            out, err = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {deadline_s} s: {self.kill_and_read()}")
        ended = Ended(self.process.returncode, out, err)
        if code is not None:
            assert ended.code == code, ended
            self.wait_for_no_survivors()
        return ended

    def interrupt(self) -> None:
        """Send SIGINT to all processes of the group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to every process of the run, anywhere in the process tree, as SLURM does."""
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                process.terminate()

    def pause(self) -> None:
        """Stop all processes of the group; engines and ranks are in other groups and wait for it."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def kill_and_read(self) -> Ended:
        self.kill()
        return self.end()

    def children(self, target: str) -> list[psutil.Process]:
        """Return its living child processes that serve `target`, ENGINE or TRAINER."""
        return [p for p in self.survivors() if target in _command_line(p)]

    def survivors(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def wait_for_no_survivors(self, deadline_s: float = 120.0) -> None:
        """Wait for the end of all its processes. Raises: AssertionError: a process outlived the run."""
        left: list[psutil.Process] = []
        for _ in _ticks(deadline_s, every_s=0.1):
            if not (left := self.survivors()):
                return
        raise AssertionError(f"still alive {deadline_s} s later: {[_command_line(p) for p in left]}")

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def worker_of(process: psutil.Process) -> psutil.Process:
    return psutil.Process(requester_of(process.cmdline()) or process.ppid())


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _ticks(deadline_s: float, every_s: float = 0.01) -> Iterator[None]:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        yield
        time.sleep(every_s)


def finish(config: Path | str, *overrides: str) -> Ended:
    """Run to the end in this process, whose fork server all such runs share. The run must succeed."""
    ended = call_cli("run", str(config), *overrides, "--progress", "plain")
    assert ended.code == 0, ended
    return ended


def finish_alone(config: Path, *overrides: str) -> Ended:
    """Run to the end in a separate process with the current environment. The run must succeed."""
    with RunProcess("run", str(config), *overrides, "--progress", "plain") as run:
        return run.end(code=0)


# ---- contents of run folders


def num_steps(folder: Path) -> int:
    """Return the number of optimizer steps in the ledger."""
    return Ledger(open_storage(folder), MAIN_LINEAGE).last_step() if folder.exists() else 0


def num_shards(folder: Path) -> int:
    return len(list(folder.glob("experiences/0*/*.parquet")))


def num_half_done(folder: Path) -> int:
    """Return the number of partly committed work units."""
    names = ParquetLog(open_storage(folder)).shards()
    return len({(name.explore_step, name.unit) for name in names} - done_units(names))


def read_number(path: Path) -> int:
    return int(path.read_text())


def final_weights(folder: Path) -> bytes:
    """Return the files of all ranks in the newest checkpoint."""
    step = read_number(folder / "latest_checkpointed_iteration.txt")
    files = sorted((folder / f"global_step_{step}" / "actor").glob("model*.safetensors"))
    assert files
    return b"".join(file.read_bytes() for file in files)


def ledger_of(folder: Path) -> list[list[tuple[int, int, int, str]]]:
    """Return, for each step, the rows used and dropped: (explore step, work unit, row of the batch, reason), sorted.

    Rows are named by their place in the whole work unit, because the writer of a shard differs between runs, and, on a
    busy machine, also whether a batch was committed whole or in parts.
    """
    ledger = Ledger(open_storage(folder), MAIN_LINEAGE)
    steps = []
    for step in range(1, ledger.last_step() + 1):
        entry = ledger.read(step)
        assert entry is not None, f"step {step} is missing in the ledger"
        rows = []
        for part in (*entry.use, *entry.drop):
            name = ShardName.try_parse(part.source)
            assert name is not None, part
            rows += [(name.explore_step, name.unit, row_of_batch(name, row), part.reason) for row in part.rows]
        steps.append(sorted(rows))
    return steps


def row_of_batch(name: ShardName, row: int) -> int:
    """Return the place in its work unit of a row of a shard; every group has the same number of rows."""
    if name.part is None:
        return row
    group_size = name.num_rows // len(name.part.slots)
    return name.part.slots[row // group_size] * group_size + row % group_size


def status_of(folder: Path) -> dict[str, Any]:
    """Return `rftdask status --json` of a run without stages."""
    ended = call_cli("status", str(folder), "--json")
    assert ended.code == 0, ended
    (stage,) = json.loads(ended.out)["stages"]
    return dict(stage)


def assert_sound(folder: Path) -> dict[str, Any]:
    """Assert that the audit finds no problem and each experience is in one state. Returns the status."""
    status = status_of(folder)
    counts = dict(status["experiences"])
    committed = counts.pop("committed")
    assert status["problems"] == []
    assert committed == sum(counts.values()), status["experiences"]
    return status


def assert_same_run(folder: Path, expected: Path) -> dict[str, Any]:
    """Assert that a run is sound and has the ledger and the weights of another run. Returns the status."""
    status = assert_sound(folder)
    assert ledger_of(folder) == ledger_of(expected)
    assert final_weights(folder) == final_weights(expected)
    return status


def interrupt_when(condition: Callable[[], bool], config: Path, *overrides: str) -> None:
    """Run until the condition holds, then press Ctrl-C. The run must end with a checkpoint and exit code 130."""
    with RunProcess("run", str(config), *overrides) as run:
        run.wait_until(condition)
        run.interrupt()
        run.end(code=130)
