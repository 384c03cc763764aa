"""How a run reads its experiences, according to its config."""

from pathlib import Path

import pytest

from rftdask.buffer.batches.ledger import Ledger
from rftdask.storage import open_storage
from tests.integration import run_cases as runs

AT = "buffer.trainer_input.experience_buffer"
PIPELINE = "data_processor.experience_pipeline"
STEPS = 12
CAPACITY = runs.BATCH_SIZE * runs.REPEAT_TIMES
"""One train batch, the smallest possible value."""


@pytest.mark.slow
def test_replay_back_pressure_and_operators_work_together(config: Path) -> None:
    runs.finish(
        config,
        f"buffer.total_steps={STEPS}",
        f"trainer.total_steps={2 * STEPS}",
        "synchronizer.sync_style=fully_async",
        "synchronizer.max_staleness=8",
        f"{AT}.capacity={CAPACITY}",
        f"{AT}.replay_buffer={{enable: true, priority_fn: decay_limit_randomization, reuse_cooldown_time: 0}}",
        f"{PIPELINE}={{stage: commit, operators: [{{name: reward_filter, args: {{threshold: 0.5}}}}]}}",
        "buffer.explorer_input.eval_tasksets=[]",
        "buffer.explorer_input.default_reward_fn_type=tests.e2e.toy_reward.varied_reward",
    )
    folder = runs.run_folder(config)
    experiences = runs.assert_sound(folder)["experiences"]
    # With reused groups, the trainer may end before the explorers.
    assert CAPACITY < experiences["committed"] <= STEPS * runs.BATCH_SIZE * runs.REPEAT_TIMES
    assert experiences["filtered"] > 0 and experiences["trained"] > 0
    assert {reason for step in runs.ledger_of(folder) for *_, reason in step} <= {"", "filtered", "stale"}
    assert_within_the_bound(folder)


def assert_within_the_bound(folder: Path) -> None:
    """Assert from the times of the files that unread data was below the bound before each commit of a shard."""
    ledger = Ledger(open_storage(folder))
    settled = []
    for step in range(1, ledger.last_step() + 1):
        entry = ledger.read(step)
        assert entry is not None
        settled.append(((folder / ledger.path(step)).stat().st_mtime, len(entry.positions)))
    for shard in folder.glob("experiences/0*/*.parquet"):
        explore_step, batch = (int(part) for part in shard.name.split("-")[:2])
        before = (explore_step - 1) * runs.BATCH_SIZE + batch * 2
        read = sum(count for time_s, count in settled if time_s <= shard.stat().st_mtime)
        assert (before - read) * runs.REPEAT_TIMES < CAPACITY, shard.name


def test_a_failing_operator_ends_the_run_with_its_name(config: Path) -> None:
    wrong = "[{name: reward_shaping_mapper, args: {reward_shaping_configs: [{stats_key: accuracy, weight: much}]}}]"
    ended = runs.call_cli(
        "run", str(config), f"{PIPELINE}={{stage: commit, operators: {wrong}}}", "--progress", "plain"
    )
    assert ended.code == 1, ended
    assert "failed 4 times; the last time: OperatorError: operator reward_shaping_mapper failed on task " in ended.err
