"""Keys of reading: replay by priority, deadlines and back-pressure; and the configurations in config/."""

from pathlib import Path
from typing import Any

import pytest
from config_cases import config, grpo

from rftdask.buffer.batches.backpressure import UnreadLimit, unread_limit
from rftdask.buffer.batches.replay_priority import DecayLimitRandomization, LinearDecay, Replay, make_replay, max_uses
from rftdask.config import load_config, make_plan

AT = "buffer.trainer_input.experience_buffer"
ON = (f"{AT}.replay_buffer.enable=true", "synchronizer.sync_style=fully_async")
LIMITED = (*ON, f"{AT}.replay_buffer.priority_fn=decay_limit_randomization")


def test_replay_is_off_by_default() -> None:
    assert make_replay(config(grpo())) is None
    assert max_uses(config(grpo())) == 1


def test_priority_functions_have_the_reference_defaults() -> None:
    cool = f"{AT}.replay_buffer.reuse_cooldown_time=30"
    assert make_replay(config(grpo(), *ON, cool)) == Replay(LinearDecay(2.0), 30.0, seed=42)
    assert max_uses(config(grpo(), *ON, cool)) is None
    limited = config(grpo(), *LIMITED, cool, f"{AT}.replay_buffer.priority_fn_args={{sigma: 0.5}}")
    assert make_replay(limited) == Replay(DecayLimitRandomization(2.0, 3, 0.5), 30.0, seed=42)
    assert max_uses(limited) == 3


def test_without_a_cooldown_time_nothing_is_used_twice() -> None:
    assert max_uses(config(grpo(), *ON)) == 1


def test_style_fixed_may_replay_without_a_clock() -> None:
    assert make_replay(config(grpo(), ON[0], f"{AT}.replay_buffer.reuse_cooldown_time=0")) is not None


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ((), 20),
        (("trainer.total_steps=30",), 20),
        (("synchronizer.sync_style=fully_async",), None),  # partial batches may need more steps
        (("synchronizer.sync_style=fully_async", "trainer.total_steps=30"), 30),
        ((*ON, "trainer.total_steps=99"), 99),
        (ON, None),
    ],
)
def test_a_trainer_ends_with_its_steps_or_with_the_data(overrides: tuple[str, ...], limit: int | None) -> None:
    assert config(grpo(), *overrides).train_step_limit(planned=20) == limit


@pytest.mark.parametrize(
    ("section", "limit"),
    [
        ({}, None),
        ({"capacity": 100}, UnreadLimit(100, None, always=32)),
        ({"max_unread_bytes": 10**6}, UnreadLimit(None, 10**6, always=32)),
    ],
)
def test_limits_of_unread_experiences(section: dict[str, Any], limit: UnreadLimit | None) -> None:
    overrides = [f"{AT}.{key}={value}" for key, value in section.items()]
    assert unread_limit(config(grpo(), "algorithm.repeat_times=8", *overrides)) == limit
    assert unread_limit(config(grpo(), "mode=explore", *overrides)) is None


FOLDER = Path(__file__).parents[3] / "config"
FILES = sorted(FOLDER.rglob("*.yaml"))


def test_there_are_configurations_to_check() -> None:
    assert {file.stem for file in FILES} >= {"gsm8k-grpo", "offline", "sft"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_without_a_warning_and_is_planned(file: Path) -> None:
    loaded = load_config(file)
    assert loaded.warnings == ()
    assert make_plan(loaded).render()


def test_gsm8k_reads_the_answer_after_the_mark() -> None:
    loaded = load_config(FOLDER / "gsm8k.yaml")  # its short name
    taskset = loaded.buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.path, taskset.subset_name) == ("openai/gsm8k", "main")
    assert (taskset.format.prompt_key, taskset.format.response_key) == ("question", "answer")
    assert (taskset.default_workflow_type, taskset.default_reward_fn_type) == ("math_workflow", "math_reward")


def test_both_modes_of_the_offline_example_share_one_folder() -> None:
    explore, train = (load_config(FOLDER / "offline.yaml", [f"mode={mode}"]) for mode in ("explore", "train"))
    assert explore.checkpoint_job_dir == train.checkpoint_job_dir
