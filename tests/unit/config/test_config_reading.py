"""Promises about the keys of reading: replay by priority, deadlines and back-pressure."""

from typing import Any

import pytest
from config_cases import config, grpo, problems, sft

from rftdask.buffer.batches.backpressure import UnreadLimit, unread_limit
from rftdask.buffer.batches.replay_priority import (
    DecayLimitRandomization,
    LinearDecay,
    Replay,
    make_replay,
    max_uses,
)

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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            (*ON, f"{AT}.replay_buffer.priority_fn_args={{sigma: 1}}"),
            "sigma: unknown argument; linear_decay takes decay",
        ),
        ((*ON, f"{AT}.replay_buffer.priority_fn_args={{decay: -1}}"), "decay: -1 is not a number of at least 0"),
        (
            (*LIMITED, f"{AT}.replay_buffer.priority_fn_args={{use_count_limit: 0}}"),
            "use_count_limit: 0 is not a whole number of at least 1",
        ),
        (
            (
                *ON,
                f"{AT}.replay_buffer.priority_fn_args={{decay: 0}}",
                f"{AT}.replay_buffer.reuse_cooldown_time=1",
            ),
            "decay: 0 would train the newest groups for ever; use more than 0",
        ),
        ((*ON, f"{AT}.replay_buffer.reuse_cooldown_time=3600"), "is not below max_read_timeout 1800.0 s"),
        (
            (*ON, f"{AT}.replay_buffer.reuse_cooldown_time=1", f"{AT}.retention.keep=thin"),
            "thin removes experiences that replay_buffer may use again; use all",
        ),
        ((*ON, f"{AT}.replay_buffer.reuse_cooldown_time=-1"), "reuse_cooldown_time: "),
        (
            (ON[0], f"{AT}.replay_buffer.reuse_cooldown_time=1"),
            "style fixed repeats a run bit by bit, which a clock prevents",
        ),
        (
            (*ON, f"{AT}.replay_buffer.reuse_cooldown_time=1", "algorithm.algorithm_type=remax"),
            "compares with a greedy rollout",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], problem: str) -> None:
    lines = problems(grpo(), *overrides)
    assert len(lines) == 1 and problem in lines[0], lines


def test_datasets_are_not_replayed() -> None:
    (line,) = problems(sft(), ON[0])
    assert "sft learns from a dataset" in line


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
def test_limits_of_what_lies_unread(section: dict[str, Any], limit: UnreadLimit | None) -> None:
    overrides = [f"{AT}.{key}={value}" for key, value in section.items()]
    assert unread_limit(config(grpo(), "algorithm.repeat_times=8", *overrides)) == limit
    assert unread_limit(config(grpo(), "mode=explore", *overrides)) is None


OF_ROWS = ["tools_key", "chosen_key", "rejected_key", "enable_concatenated_multi_turn"]


@pytest.mark.parametrize(
    ("base", "path", "keys", "why"),
    [
        (grpo, "buffer.explorer_input.taskset", OF_ROWS, "it belongs to supervised rows, and these are tasks"),
        (sft, AT, ["workflow_key", "reward_fn_key"], "it belongs to tasks, and these are supervised rows"),
    ],
)
def test_a_column_that_nothing_reads_is_told(base: Any, path: str, keys: list[str], why: str) -> None:
    for key in keys:
        value = "true" if key.startswith("enable") else "other"
        assert f"{path}.format.{key}: ignored: {why}" in config(base(), f"{path}.format.{key}={value}").warnings


def test_feature_keys_of_supervised_rows_give_a_warning() -> None:
    of_rows = f"{AT}.data_selector={{selector_type: shuffle, feature_keys: [a]}}"
    assert any("feature_keys: ignored: only tasks" in line for line in config(sft(), of_rows).warnings)


def test_only_tasks_have_images_and_selector_arguments() -> None:
    for override, why in (
        (f"{AT}.format.image_key=image", "only tasks may have"),
        (f"{AT}.data_selector={{selector_type: shuffle, kwargs: {{tau: 1}}}}", "shuffle takes no arguments"),
    ):
        (line,) = problems(sft(), override)
        assert why in line


def test_an_order_of_rollouts_is_told_to_be_ignored() -> None:
    of_rows = f"{AT}.data_selector.selector_type=shuffle"
    told = f"{AT}.data_selector.selector_type: ignored: rollouts are read from the log of the run"
    assert told in config(grpo(), of_rows).warnings
    assert told not in config(sft(), of_rows).warnings
