"""Promises of the sync styles: a table for each; none deadlocks; every trained token is within the staleness bound."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_simulation import Outcome, Simulation

from rftdask.buffer.batches.backpressure import UnreadLimit
from rftdask.buffer.batches.replay_priority import DecayLimitRandomization, Replay
from rftdask.config import load_config
from rftdask.synchronizer.styles import DEFAULT_MAX_STALENESS, SyncRules, SyncStyle, WeightRequirement, make_sync_rules
from tests.unit.config.config_cases import grpo

FIXED, EXPLORER, TRAINER, ASYNC = SyncStyle


def fixed(explorer: int = 1, trainer: int = 1, offset: int = 0, per_step: int = 8, batch: int = 8) -> SyncRules:
    return SyncRules(FIXED, explorer, trainer, offset, per_step, batch)


@pytest.mark.parametrize(
    ("rules", "versions"),
    [
        (fixed(), [0, 1, 2, 3, 4, 5, 6]),  # on policy: step s runs with the weights trained on steps 1..s-1
        (fixed(offset=1), [0, 0, 1, 2, 3, 4, 5]),  # one step off policy
        (fixed(offset=3), [0, 0, 0, 0, 1, 2, 3]),
        (fixed(2, 2), [0, 0, 2, 2, 4, 4, 6]),
        (fixed(2, 2, offset=1), [0, 0, 0, 2, 2, 4, 4]),
        (fixed(3, 1), [0, 0, 0, 3, 3, 3, 6]),
        (fixed(1, 2), [0, 0, 2, 2, 4, 4, 6]),  # the trainer publishes every other version
        (fixed(per_step=16), [0, 2, 4, 6, 8, 10, 12]),  # two batches a step
        (fixed(batch=16), [0, 0, 1, 1, 2, 2, 3]),  # two steps a batch
        (fixed(per_step=8, batch=12), [0, 0, 1, 2, 2, 3, 4]),
    ],
)
def test_fixed_runs_each_step_with_one_known_version(rules: SyncRules, versions: list[int]) -> None:
    assert [rules.weights_for(step) for step in range(1, 8)] == [WeightRequirement(v, exact=True) for v in versions]


@pytest.mark.parametrize(
    ("rules", "bound"),
    [
        (fixed(), 0),
        (fixed(offset=1), 1),
        (fixed(2, 2), 1),
        (fixed(2, 2, offset=1), 2),
        (fixed(per_step=16), 1),  # the second batch of a step is one version off
        (fixed(batch=16), 0),
    ],
)
def test_fixed_implies_its_bound(rules: SyncRules, bound: int) -> None:
    assert rules.staleness_bound == bound
    assert dataclasses.replace(rules, max_staleness=9).staleness_bound == 9


def other(style: SyncStyle, explorer: int = 1, trainer: int = 1, **fields: Any) -> SyncRules:
    return dataclasses.replace(fixed(explorer, trainer), style=style, **fields)


def test_explorer_driven_requests_trainable_versions() -> None:
    assert [other(EXPLORER).weights_for(s).version for s in range(1, 6)] == [0, 1, 2, 3, 4]
    assert [other(EXPLORER, 2).weights_for(s).version for s in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    # Two steps fill a batch, so at most one version per two steps can be requested.
    assert [other(EXPLORER, train_batch_size=16).weights_for(s).version for s in range(1, 6)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("style", [TRAINER, ASYNC])
def test_trainer_driven_styles_wait_only_for_staleness(style: SyncStyle) -> None:
    versions = [other(style).weights_for(s).version for s in range(1, 9)]
    assert versions == [max(0, s - 1 - DEFAULT_MAX_STALENESS) for s in range(1, 9)]
    tight = other(style, max_staleness=1)
    assert [tight.weights_for(s).version for s in range(1, 6)] == [0, 0, 1, 2, 3]
    assert not tight.weights_for(5).exact


def test_new_weights_are_taken_at_boundaries_or_always() -> None:
    assert [s for s in range(1, 9) if other(TRAINER, 3).takes_newest_at(s)] == [1, 4, 7]
    assert [s for s in range(1, 9) if other(TRAINER, 3, sync_offset=2).takes_newest_at(s)] == [3, 6]
    assert [s for s in range(1, 4) if other(ASYNC, 3).takes_newest_at(s)] == [1, 2, 3]


def test_the_trainer_publishes_at_intervals_or_on_request() -> None:
    assert [s for s in range(1, 8) if other(TRAINER, trainer=3).publish_due(s, 0, 0)] == [3, 6]
    asked = other(EXPLORER, trainer=3)
    assert [s for s in range(1, 8) if asked.publish_due(s, 0, requested=4)] == [4, 5, 6, 7]
    assert not asked.publish_due(5, published=4, requested=4)


@pytest.mark.parametrize(
    ("section", "versions", "published"),
    [
        ({}, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
        ({"sync_offset": 2}, [0, 0, 0, 1, 2, 3], [1, 2, 3, 4, 5, 6]),
        ({"sync_interval": 3}, [0, 0, 0, 3, 3, 3], [3, 6]),
        ({"explorer_sync_interval": 3}, [0, 0, 0, 3, 3, 3], [1, 2, 3, 4, 5, 6]),
        ({"trainer_sync_interval": 3}, [0, 0, 0, 3, 3, 3], [3, 6]),
        ({"sync_style": "fully_async", "max_staleness": 3}, [0, 0, 0, 0, 1, 2], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_each_key_of_the_section_reaches_the_rules(
    section: dict[str, Any], versions: list[int], published: list[int]
) -> None:
    loaded = load_config(grpo(synchronizer={"sync_style": "fixed", "sync_offset": 0, **section}))
    rules, steps = make_sync_rules(loaded), range(1, 7)
    assert [rules.weights_for(step).version for step in steps] == versions
    assert [step for step in steps if rules.publish_due(step, published=0, requested=0)] == published


@pytest.mark.parametrize(("rules", "steps"), [(fixed(batch=16), 2), (fixed(per_step=16), 1), (fixed(per_step=6), 2)])
def test_explore_steps_for_a_version_fill_its_batch(rules: SyncRules, steps: int) -> None:
    assert rules.explore_steps_for(1) == steps
    assert rules.explore_steps_for(0) == 0
    assert rules.num_steps_from(steps) >= 1 > rules.num_steps_from(steps - 1)


@st.composite
def any_rules(draw: Any, min_groups: int = 1) -> tuple[SyncRules, int]:
    repeat_times = draw(st.sampled_from((1, 3)))
    tasks, groups = draw(st.integers(1, 12)), draw(st.integers(min_groups, 14))
    rules = SyncRules(
        style=draw(st.sampled_from(SyncStyle)),
        explorer_sync_interval=draw(st.integers(1, 5)),
        trainer_sync_interval=draw(st.integers(1, 5)),
        sync_offset=draw(st.integers(0, 4)),
        experiences_per_step=tasks * repeat_times,
        train_batch_size=groups * repeat_times,
    )
    return rules, repeat_times


@given(any_rules(), st.integers(1, 300), st.none() | st.integers(0, 3))
def test_no_style_needs_an_unusable_version(drawn: tuple[SyncRules, int], step: int, max_staleness: int | None) -> None:
    rules = dataclasses.replace(drawn[0], max_staleness=max_staleness)
    wanted = rules.weights_for(step).version
    assert wanted <= rules.num_steps_from(step - 1)
    assert rules.style is EXPLORER or wanted % rules.trainer_sync_interval == 0, "it will be published"
    assert rules.weights_for(step + 1).version >= wanted


@settings(max_examples=100)
@given(any_rules())
def test_the_bound_of_fixed_holds_and_is_tight(drawn: tuple[SyncRules, int]) -> None:
    rules = dataclasses.replace(drawn[0], style=FIXED)
    count, batch = rules.experiences_per_step, rules.train_batch_size
    ages = [-(-step * count // batch) - 1 - rules.weights_for(step).version for step in range(1, 3000)]
    assert max(ages) == rules.staleness_bound


def simulated(drawn: tuple[SyncRules, int], seed: int, explore_steps: int = 30, **options: Any) -> Outcome:
    """Run a simulation, which must neither deadlock nor train a token beyond the bound."""
    rules, repeat_times = drawn
    simulation = Simulation(rules, repeat_times=repeat_times, explore_steps=explore_steps, seed=seed, **options)
    outcome = simulation.run()
    assert outcome.stuck == ""
    assert outcome.max_staleness <= rules.staleness_bound
    assert len(set(outcome.settled)) == len(outcome.settled)
    return outcome


seeds, windows, empty_shares = st.integers(0, 2**32), st.integers(1, 4), st.sampled_from((0.0, 0.1))


@settings(max_examples=200)
@given(any_rules(), seeds, st.booleans())
def test_no_style_deadlocks(drawn: tuple[SyncRules, int], seed: int, ahead: bool) -> None:
    rules, outcome = drawn[0], simulated(drawn, seed, window=1, sampling_ahead=ahead)
    assert outcome.train_steps == rules.num_steps_from(30)
    assert outcome.num_stale_groups == 0, "groups sampled within the rules are not dropped"
    if rules.style is FIXED:
        assert outcome.versions == [rules.weights_for(s).version for s in range(1, len(outcome.versions) + 1)]


@settings(max_examples=200)
@given(any_rules(min_groups=5), seeds, windows, empty_shares)
def test_failed_or_late_groups_do_not_stop_a_run(
    drawn: tuple[SyncRules, int], seed: int, window: int, empty_share: float
) -> None:
    simulated(drawn, seed, window=window, empty_share=empty_share)


@settings(max_examples=60)
@given(any_rules(), seeds, windows, empty_shares)
def test_partial_batches_stop_nothing(drawn: tuple[SyncRules, int], seed: int, window: int, empty_share: float) -> None:
    rules, repeat_times = drawn
    outcome = simulated(drawn, seed, window=window, empty_share=empty_share, partial_share=0.05)
    groups, size = 30 * rules.experiences_per_step // repeat_times, rules.train_batch_size // repeat_times
    assert len(outcome.settled) >= groups - groups % size, "as many groups as with full batches"
    if rules.style is FIXED:
        assert outcome.num_partial_batches == 0


@settings(max_examples=60)
@given(
    drawn=any_rules(),
    seed=seeds,
    shares=st.fixed_dictionaries({"empty_share": empty_shares, "partial_share": st.sampled_from((0.0, 0.03))}),
    decay=st.sampled_from((0.5, 2.0)),
    limit=st.none() | st.integers(1, 3),
    bound=st.none() | st.integers(0, 9),
)
def test_replay_stops_no_style_and_keeps_the_bound(
    drawn: tuple[SyncRules, int],
    seed: int,
    shares: dict[str, float],
    decay: float,
    limit: int | None,
    bound: int | None,
) -> None:
    rules, repeat_times = drawn
    if bound is not None:
        rules = dataclasses.replace(rules, max_staleness=max(bound, rules.smallest_staleness_bound))
    replay = Replay(DecayLimitRandomization(decay, limit, sigma=0.3), reuse_cooldown_s=0.0)
    simulated((rules, repeat_times), seed, explore_steps=20, replay=replay, **shares)


@settings(max_examples=60)
@given(any_rules(), seeds, windows, st.integers(1, 40), st.booleans())
def test_limits_stop_no_style(drawn: tuple[SyncRules, int], seed: int, window: int, limit: int, in_bytes: bool) -> None:
    rules, repeat_times = drawn
    size = rules.train_batch_size // repeat_times
    unread_limit = UnreadLimit(None if in_bytes else limit, 100 * limit if in_bytes else None, always=size)
    outcome = simulated(drawn, seed, window=window, unread_limit=unread_limit)
    assert outcome.train_steps == rules.num_steps_from(30)
    assert outcome.max_unread_groups < max(limit, size)
