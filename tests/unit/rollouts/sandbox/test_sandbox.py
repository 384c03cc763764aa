"""Promises of the sandbox: a hostile workflow affects only its own rollout, and its processes end with it."""

import asyncio
import math
import os
import pickle
import random
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.base import FrozenDict
from rftdask.config.schema.explorer import SandboxConfig
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.rollout import STOP_GRACE_S
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.sandbox import pool
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer, SandboxLostError, pickled
from tests.living import lives, wait_until
from tests.unit.rollouts.rollout_cases import CharTokenizer, keep, outcome, replies, run, task

LIMITS = SandboxConfig(max_processes=8, max_memory_gb=0.25)
HERE = "sandbox_workflows"


def does(index: int, what: str, **row: Any) -> Task:
    return task(index, f"{HERE}.whatever_the_row_says", row={"does": what, **row})


def one(what: str, row: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Experience:
    """The last experience of a workflow that calls the policy once and then does `what`."""
    settings = {"max_retry_times": 0, "max_timeout": 20.0, "sandbox": LIMITS, **changes}
    return run([does(0, what, **row)], replies("4"), **settings)[-1]


LIMIT_BYTES = 1 << 28
HOSTILE = ("hangs", "dies", "eats_memory", "prints_without_end", "blocks")


def test_hostile_workflows_affect_only_their_own_rollouts() -> None:
    tasks = [does(index, HOSTILE[index // 13] if index % 13 == 6 else "good") for index in range(64)]
    bad = {index: HOSTILE[index // 13] for index in range(64) if index % 13 == 6}
    assert len(bad) == 5
    max_timeout_s = 3.0
    ended_s: dict[int, float] = {}
    unit = outcome(
        tasks,
        TextEngine(replies("4"), CharTokenizer()),
        {"on_group": lambda number, experiences: ended_s.update({number: time.monotonic()})},
        max_timeout=max_timeout_s,
        max_retry_times=0,
        sandbox=LIMITS,
    )
    last = {experience.task_index: experience for experience in unit.experiences}
    good = {index for index, e in last.items() if e.status is Status.OK and e.reward == 1.0}
    assert good == set(range(64)) - bad.keys()
    results = {bad[index]: (last[index].status, last[index].error) for index in bad}
    assert all(last[index].reward is None and not last[index].tokens for index in bad)
    assert results["hangs"][0] is results["blocks"][0] is Status.TIMEOUT
    assert results["hangs"][1].endswith("[state: turn=7]")
    how = "the workflow's process exited with code 3; it printed last: about to die"
    assert results["dies"] == (Status.FAILED, how)
    assert results["eats_memory"][0] is Status.FAILED and results["eats_memory"][1].startswith("MemoryError")
    assert results["prints_without_end"][0] is not Status.OK
    # The time to stop a process on this machine is bounded by the time of a good task from fork to end.
    slowest_legal_s = max(unit.times[index].total_s for index in range(64) if index not in bad)
    longest_s = max_timeout_s + STOP_GRACE_S + slowest_legal_s
    assert all(unit.times[index].total_s < longest_s for index in bad), "none kept its slot beyond its timeout"
    last_legal_s = max(ended_s[index] for index in range(64) if index not in bad)
    assert max(ended_s.values()) - last_legal_s < longest_s, "they are not awaited one after another"


@pytest.mark.slow
def test_the_output_of_a_process_is_limited() -> None:
    assert one("prints_without_end").error == "it printed more than 16777216 bytes"


def test_the_output_of_a_workflow_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert one("prints").status is Status.OK
    assert "printed in a rollout: not flushed" in caplog.messages


@pytest.mark.parametrize("what", ["sleeps_without_yielding", "ignores_its_cancellation"])
def test_an_attempt_that_will_not_stop_is_killed_and_retried(what: str) -> None:
    experience = one(what, max_timeout=0.4, max_retry_times=1)
    assert (experience.status, experience.attempt) == (Status.TIMEOUT, 1)
    assert "ignored its cancellation" not in experience.error


def test_the_watchdog_does_not_interrupt_a_slow_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    # The watchdog of in-process workflows must not mistake a slow kill for a workflow.
    kill, ended = ForkServer.kill, []

    def slow_kill(self: ForkServer, pid: int) -> None:
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            time.sleep(0.01)
        kill(self, pid)
        ended.append(pid)

    monkeypatch.setattr(ForkServer, "kill", slow_kill)
    experience = one("sleeps_without_yielding", max_timeout=0.4)
    assert experience.error.startswith("TimeoutError: not finished after max_timeout 0.4 s")
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("what", "row", "error"),
    [
        ("raises", {}, "KeyError: 'no such key' (sandbox_workflows.py:"),
        ("exits", {}, "RuntimeError: the workflow called sys.exit(4)"),
        ("returns", {"value": None}, "TypeError: reward is None, not a number (workflow sandbox_workflows."),
        ("returns", {"value": math.nan}, "ValueError: reward is nan, not a finite number"),
        ("returns", {"value": "1.0"}, "TypeError: reward is '1.0', not a number"),
        ("returns_too_much", {}, "MemoryError"),
        ("writes_to_the_stream", {}, "its process sent an invalid message"),
        ("asks_without_end", {}, "RuntimeError: this attempt has called its models more than 1000 times"),
    ],
)
def test_a_failure_has_a_type_and_a_location(what: str, row: dict[str, Any], error: str) -> None:
    experience = one(what, row)
    assert (experience.status, experience.reward) == (Status.FAILED, None)
    assert experience.error.startswith(error)


def test_equal_failures_are_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    # Other limits start a new fork server, which has logged nothing.
    fresh = SandboxConfig(max_processes=8, max_memory_gb=0.3)
    run([does(index, "raises") for index in range(25)], replies("4"), max_retry_times=0, sandbox=fresh)
    first, tenth = (record.message for record in caplog.records)
    assert 'raise KeyError("no such key")' in first
    assert tenth == "a workflow raised KeyError 10 times at the same place, now: 'no such key'"


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_processes_of_a_workflow_end_with_it(tmp_path: Path, session: bool, ends: bool) -> None:
    file = tmp_path / "pid"
    experience = one("starts_a_program", {"file": str(file), "session": session, "ends": ends}, max_timeout=1.0)
    assert experience.status is (Status.OK if ends else Status.TIMEOUT)
    wait_until(lambda: not lives(int(file.read_text())))


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_rollouts_do_not_see_changes_by_other_rollouts(tmp_path: Path) -> None:
    few_processes = LIMITS.model_copy(update={"max_processes": 4})
    row = {"folder": str(tmp_path), "drawn": random.Random(3).random()}
    tasks = [does(index, "changes_its_process", **row) for index in range(6)]
    experiences = run(tasks, replies("4"), repeat_times=8, sandbox=few_processes)
    built_in = {"num_prompt_tokens", "num_response_tokens", "prompt_truncated"}
    traces = [{name for name, value in e.metrics.items() if value and name not in built_in} for e in experiences]
    assert traces == [set()] * 48
    assert {e.status for e in experiences} == {Status.OK}


def test_a_fork_imports_nothing_to_read_its_task() -> None:
    # A pickled FrozenDict made every fork import the package's configuration: 16 forks took seconds in place of
    # milliseconds.
    arguments = FrozenDict({"depth": 2, "nested": FrozenDict({"names": ["a", FrozenDict({"b": 1})]})})
    configured = task(0, f"{HERE}.tells_what_it_imported", workflow_args=arguments, reward_fn_args=FrozenDict())
    [experience] = run([configured], replies("4"), sandbox=LIMITS)
    always = {"num_prompt_tokens", "num_response_tokens", "prompt_truncated"}
    assert (experience.status, experience.metrics.keys() - always) == (Status.OK, set())
    read = pickle.loads(pickled(configured))
    assert read == configured and type(read.workflow_args["nested"]["names"][1]) is dict


def test_a_sandbox_does_not_change_samples() -> None:
    tasks = [task(index, "math_workflow") for index in range(3)]
    free, boxed = (
        run(tasks, replies("it is 4"), repeat_times=2, sandbox=SandboxConfig(mode=mode)) for mode in ("never", "always")
    )
    assert experiences_to_table(free).equals(experiences_to_table(boxed))


def test_a_plain_function_runs_with_a_model_that_blocks() -> None:
    result = outcome([task(0, f"{HERE}.blocking")], TextEngine(replies("4"), CharTokenizer()), {})
    assert [(e.reward, e.env_state, e.turn_reward) for e in result.experiences] == [(1.0, "a", 0.0), (1.0, "b", 1.0)]
    assert result.times[0].tool_s >= 0.01 and result.times[0].generate_s > 0


def test_a_class_with_turns_runs_in_a_sandbox() -> None:
    experiences = run([task(0, f"{HERE}.Guess")], replies(lambda request: str(len(request.prompt_tokens) - 2)))
    assert [e.prompt_text for e in experiences] == ["turn 0"] and experiences[0].reward == 1.0
    experiences = run([task(0, f"{HERE}.Guess", truth="5")], replies("4"))
    assert [e.prompt_text for e in experiences] == ["turn 0", "turn 1", "turn 2"]
    assert {e.reward for e in experiences} == {0.0}


def test_a_user_reward_function_runs_in_a_sandbox() -> None:
    [good] = run([task(0, "simple_workflow", reward_fn=f"{HERE}.slow_reward")], replies("4"))
    assert (good.status, good.reward) == (Status.OK, 1.0)


def test_a_failed_plugin_import_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"importing 'broken_plugin' raised: .*broken_plugin.py:1: SyntaxError: "):
        run([task()], replies("4"), plugin_dirs=(str(tmp_path),))


def test_workflows_of_a_plugin_folder_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder_plugin.py").write_text(
        "from rftdask.rollouts.workflows.registry import workflow\n"
        "@workflow('test_of_a_folder')\n"
        "async def mine(task, model):\n"
        "    return float((await model.chat(task.messages)).text == task.truth)\n"
    )
    [experience] = run([task(0, "test_of_a_folder")], replies("4"), plugin_dirs=(str(tmp_path),))
    assert experience.reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_fork_server_is_replaced(tmp_path: Path, number: int) -> None:
    file = tmp_path / "pid"
    tasks = [does(0, "signals_its_fork_server", file=str(file), signal=number), does(1, "good")]
    limits = LIMITS.model_copy(update={"max_memory_gb": 0.26})  # a new fork server
    began = time.monotonic()
    with pytest.raises(SandboxLostError, match="the process that starts sandboxes is gone"):
        run(tasks, replies("4"), max_retry_times=0, max_timeout=60.0, sandbox=limits)
    assert time.monotonic() - began < 20, "waits do not last until max_timeout"
    assert not lives(int(file.read_text())), "processes of its forks survive"
    assert {e.status for e in run(tasks, replies("4"), sandbox=limits)} == {Status.OK}


def test_a_fork_that_does_not_begin_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BEGIN_TIMEOUT_S", 0.5)
    server = keep(SandboxSpec(("simple_workflow",), max_memory_bytes=1 << 30))
    try:
        os.kill(server._process.pid, signal.SIGSTOP)  # the guard of the fork server
        [server_pid] = children(server._process.pid)
        os.kill(server_pid, signal.SIGSTOP)
        with pytest.raises(SandboxLostError, match=r"no sandbox process began within 0\.5 s"):
            asyncio.run(pool._Process.start(server))
        assert not server.alive()
        wait_until(lambda: not lives(server_pid))
    finally:
        server.close()


def test_child_processes_share_the_memory_limit_of_a_rollout() -> None:
    def fill(share: float) -> Experience:
        row = {"bytes": int(share * LIMIT_BYTES), "wait_s": 20.0 if share >= 0.5 else 0.5}
        return one("fills_memory_with_its_children", row, max_timeout=60.0)

    assert fill(0.1).status is Status.OK
    too_much = fill(0.5)
    assert too_much.status is Status.FAILED
    matched = re.fullmatch(
        r"MemoryError: its (\d) processes together use (\d\.\d{3}) GB beyond the imports, over the 0\.25 GB of "
        r"explorer\.sandbox\.max_memory_gb",
        too_much.error,
    )
    assert matched and int(matched[1]) <= 5 and 0.25 <= float(matched[2]) < 0.6, too_much.error


def test_forks_end_with_their_fork_server_and_its_guard() -> None:
    async def hang(fork_server: ForkServer) -> int:
        process = await pool._Process.start(fork_server)
        pid = process._pid
        fork_server._process.kill()
        while lives(pid):
            await asyncio.sleep(0.01)
        process.kill()
        return pid

    fork_server = ForkServer(SandboxSpec(("simple_workflow",)))
    assert asyncio.run(asyncio.wait_for(hang(fork_server), 20)) != os.getpid()
    assert not fork_server.alive()
    fork_server.close()
    fork_server.close()
