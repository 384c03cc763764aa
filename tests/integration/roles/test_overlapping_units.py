"""Work units that overlap in an engine, with real processes and signal 9, with style fully_async."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from tests.integration import run_cases as runs
from tests.integration.serving.slow_served_engine import CALLS, most_under_way

pytestmark = pytest.mark.slow

STEPS = 10
SETTINGS = (
    f"trainer.total_steps={STEPS}",
    "trainer.save_interval=4",
    "explorer.eval_interval=100",
    "explorer.max_commit_delay_s=0.01",
    "explorer.sandbox.mode=never",
    "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.tailed",
    "--progress",
    "plain",
)
ASYNC = ("synchronizer.sync_style=fully_async", "synchronizer.max_staleness=6")


def start(config: Path, *more: str) -> runs.RunProcess:
    return runs.RunProcess("run", str(config), *SETTINGS, *more)


def wait_for_overlap(run: runs.RunProcess, folder: Path) -> None:
    """Wait until this process of the run has several units in progress."""
    before = runs.num_shards(folder)
    run.wait_until(lambda: runs.num_shards(folder) > before and runs.num_half_done(folder) >= 2)


def assert_all_once(folder: Path) -> None:
    """Assert that every rollout of the trained steps is in the ledger exactly once."""
    status = runs.assert_sound(folder)
    assert status["step"] == STEPS
    settled = Counter((step, unit, row) for entry in runs.ledger_of(folder) for step, unit, row, _ in entry)
    assert set(settled.values()) == {1}, [row for row, count in settled.items() if count > 1]
    assert len(settled) == STEPS * runs.BATCH_SIZE * runs.REPEAT_TIMES


def test_killing_overlapping_units_loses_and_repeats_nothing(folder: Path, config: Path) -> None:
    for _ in range(2):
        with start(config, *ASYNC) as run:
            wait_for_overlap(run, folder)
            run.kill()
            run.wait_for_no_survivors()
    with start(config, *ASYNC) as run:
        wait_for_overlap(run, folder)
        (engine,) = run.children(runs.ENGINE)
        engine.kill()
        run.wait_until(lambda: engine not in run.children(runs.ENGINE) and bool(run.children(runs.ENGINE)))
        wait_for_overlap(run, folder)
        (engine,) = run.children(runs.ENGINE)
        runs.worker_of(engine).kill()
        ended = run.end(code=0)
    assert "crashed its workers" not in ended.out and "task by task" not in ended.out, ended.out
    assert_all_once(folder)
    occupancy = read_metrics(open_storage(str(folder)), "explorer")["occupancy"]
    assert occupancy.between(0.0, 1.0).all()


def test_responses_spanning_versions_are_trained_once_in_bounds(folder: Path, config: Path) -> None:
    turns = (
        "synchronizer.load_in_flight=true",
        "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.two_turns",
        "buffer.explorer_input.default_eval_workflow_type=tests.integration.roles.slow_workflow.examined",
        "explorer.eval_interval=2",
    )
    with start(config, *ASYNC, *turns) as run:
        wait_for_overlap(run, folder)
        run.kill()
        run.wait_for_no_survivors()
    with start(config, *ASYNC, *turns) as run:
        run.end(code=0)
    assert_all_once(folder)
    log = ParquetLog(open_storage(str(folder)))
    found = [row for name in log.shards() for row in rows(log, name)]
    spans = {(row["min_policy_version"], row["max_policy_version"]) for row in found}
    assert any(oldest < newest for oldest, newest in spans), spans
    for row in found:
        told = {version["policy_version"] for version in row["version_starts"] or ()}
        several = {row["min_policy_version"], row["max_policy_version"]}
        assert several <= told if len(several) > 1 else not told, "each token of such a row knows its own"
    # An evaluation uses one version, whatever is loaded for concurrent units.
    exams = ParquetLog(open_storage(str(folder)), "eval/held_out")
    versions = [
        (row["min_policy_version"], row["max_policy_version"]) for n in exams.shards() for row in rows(exams, n)
    ]
    assert len(versions) >= 3 * runs.NUM_EVAL_TASKS and all(oldest == newest for oldest, newest in versions), versions
    trained = read_metrics(open_storage(str(folder)), "trainer")
    assert trained["staleness_max"].max() <= 6


def rows(log: ParquetLog, name: ShardName) -> list[dict[str, Any]]:
    return log.read(name, ["min_policy_version", "max_policy_version", "version_starts"]).to_pylist()


def test_cancelled_rollouts_are_in_the_ledger_with_the_reason(folder: Path, config: Path) -> None:
    enough = (
        "explorer.tasks_per_batch=4",
        "explorer.over_rollout.ratio=0.25",
        "explorer.over_rollout.wait_after_min=0.4",
        "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.one_late",
    )
    for _ in range(2):
        with start(config, *ASYNC, *enough) as run:
            before = runs.num_shards(folder)
            run.wait_until(lambda seen=before: runs.num_shards(folder) > seen + 1 and runs.num_half_done(folder) > 0)
            run.kill()
            run.wait_for_no_survivors()
    with start(config, *ASYNC, *enough) as run:
        run.end(code=0)
    assert_all_once(folder)
    storage = open_storage(str(folder))
    log, ledger = ParquetLog(storage), Ledger(storage)
    tables = {name.text: log.read(name, ["status", "task_index", "explore_step"]).to_pylist() for name in log.shards()}
    reasons, groups = Counter[str](), dict[tuple[int, int], set[str]]()
    for step in range(1, STEPS + 1):
        entry = ledger.read(step)
        assert entry is not None and len(entry.positions) == runs.BATCH_SIZE, "as many groups are settled as ever"
        for part in (*entry.use, *entry.drop):
            for number in part.rows:
                row = tables[part.source][number]
                assert part.reason == ("" if row["status"] == "ok" else row["status"]), (part, row)
                reasons[part.reason] += 1
                groups.setdefault((row["explore_step"], row["task_index"]), set()).add(part.reason)
    assert reasons["timeout"] and reasons["filtered"] and set(reasons) == {"", "timeout", "filtered"}, reasons
    assert all("" not in found or found == {""} for found in groups.values()), "a group is trained whole, or not"
    again = runs.call_cli("replay", str(folder), "--from", "4", "--progress", "none")
    assert (again.code, again.out.splitlines()[-1:]) == (0, [f"bit-equal with lineage main at step {STEPS}"]), again


def test_units_of_style_fixed_do_not_overlap(folder: Path, config: Path) -> None:
    seen = set()

    def has_ended() -> bool:
        seen.add(runs.num_half_done(folder))
        return run.process.poll() is not None

    with start(config, "trainer.total_steps=4") as run:
        run.wait_until(has_ended)
        run.end(code=0)
    assert max(seen) == 1


@pytest.mark.parametrize(("slots", "most"), [("null", runs.BATCH_SIZE // 2 * runs.REPEAT_TIMES), ("memory", 8)])
def test_as_many_rollouts_are_under_way_as_there_are_slots(config: Path, tmp_path: Path, slots: str, most: int) -> None:
    # The engine has room for 100 tokens; a prompt has 4 or 5, an answer 8.
    (tmp_path / "calls").mkdir()
    settings = ("mode=explore", "buffer.total_steps=8", "explorer.eval_on_startup=false", "--progress", "none")
    engine = (
        "explorer.rollout_model.engine_type=tests.integration.serving.slow_served_engine.SlowEngine",
        f"explorer.slots_per_engine={slots}",
    )
    environment = {CALLS: str(tmp_path / "calls")}
    with runs.RunProcess("run", str(config), *settings, *engine, ASYNC[0], env=environment) as run:
        run.end(code=0)
    [told] = (tmp_path / "calls").iterdir()
    assert most_under_way(told) == most
    assert 0.5 < read_metrics(open_storage(str(runs.run_folder(config))), "explorer").occupancy.mean() <= 1.0
