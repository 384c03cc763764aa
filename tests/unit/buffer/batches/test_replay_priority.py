"""Promises of priority replay: no row is trained more often than allowed or beyond the staleness bound."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.buffer.batches.audit import Audit
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.replay_priority import (
    DecayLimitRandomization,
    LinearDecay,
    Replay,
    UseCounts,
    make_replay,
    select_with_reuse,
)
from rftdask.buffer.batches.selection import Cursor, Group, SampleRule, UsedGroup
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Status
from rftdask.errors import WaitTimeout
from rftdask.storage import Storage
from tests.unit.buffer import buffer_cases
from tests.unit.buffer.buffer_cases import batch_of, entries, make_source, take, uids
from tests.unit.config.config_cases import config, grpo

REUSE = Replay(LinearDecay(decay=2.0), reuse_cooldown_s=0.0)


committed = partial(buffer_cases.committed, versions=(0, 1))  # step s was sampled by version s - 1


def replaying(storage: Storage, rule: Replay = REUSE, **options: Any) -> LogSource:
    return make_source(storage, replay=rule, **{"ordered": False, **options})


def audit(storage: Storage, max_uses: int | None = None) -> Audit:
    return buffer_cases.audit(storage, max_uses)


def test_linear_decay_is_the_version_less_decay_times_uses() -> None:
    assert Replay(LinearDecay(decay=2.0)).priorities([5, 5, 9], [0, 3, 1], step=1).tolist() == [5.0, -1.0, 7.0]


def test_noise_is_a_function_of_seed_and_step() -> None:
    rule = Replay(DecayLimitRandomization(decay=0.0, sigma=1.0), seed=7)
    assert rule.priorities([0] * 4, [0] * 4, 3).tolist() == rule.priorities([0] * 4, [0] * 4, 3).tolist()
    assert rule.priorities([0] * 4, [0] * 4, 3).tolist() != rule.priorities([0] * 4, [0] * 4, 4).tolist()
    other = Replay(DecayLimitRandomization(decay=0.0, sigma=1.0), seed=8)
    assert rule.priorities([0] * 4, [0] * 4, 3).tolist() != other.priorities([0] * 4, [0] * 4, 3).tolist()


def test_untrainable_groups_only_replace_fresh_ones() -> None:
    failed, good = Group((1, 0), "s", ()), Group((1, 1), "s", (0, 1), min_policy_version=3)
    used = UsedGroup("r", (0, 1), 3, 1, 0.0)
    rule = SampleRule(groups_per_batch=2, tasks_per_step=4, ordered=False)
    waiting = {g.position: g for g in (failed, good, Group((1, 2), "s", (2, 3), min_policy_version=2))}
    selection = select_with_reuse(waiting, [used], Cursor(), 4, rule, REUSE)
    assert selection is not None
    assert (selection.empty, selection.use, selection.reuse) == ((failed,), (good,), (used,))
    assert selection.settled == ((1, 1), (1, 0)), "two fresh groups: a batch settles no more"


def test_groups_are_selected_by_priority() -> None:
    storage = committed()
    source = replaying(storage, Replay(LinearDecay(decay=0.75), reuse_cooldown_s=0.0), max_staleness=9)
    # Groups 4-7 are of version 1, 0-3 of version 0; a use costs 0.75.
    assert take(source, [1, 2]) == [uids(4, 5), uids(6, 7)]
    assert take(source, [3, 4]) == [uids(4, 5), uids(6, 7)], "1 - 0.75 is more than 0"
    assert take(source, [5, 6]) == [uids(0, 1), uids(2, 3)]
    assert [entry.notes for entry in entries(storage)] == [{}, {}, *[{"num_reused_groups": 2}] * 2, {}, {}]
    assert [len(entry.positions) for entry in entries(storage)] == [2, 2, 0, 0, 2, 2]
    assert audit(storage) == Audit(committed=16, trained=16, waiting=0, reused=8)


def test_the_config_sets_the_cost_of_a_use_and_the_cooldown() -> None:
    at = "buffer.trainer_input.experience_buffer.replay_buffer"
    settings = (f"{at}.enable=true", f"{at}.reuse_cooldown_time=30", f"{at}.priority_fn_args={{decay: 0.75}}")
    rule = make_replay(config(grpo(), "synchronizer.sync_style=fully_async", *settings))
    assert rule is not None
    now = [100.0]
    source = replaying(committed(), rule, max_staleness=9, clock=lambda: now[0])
    assert take(source, [1]) == [uids(4, 5)]
    now[0] = 129.0
    assert take(source, [2, 3]) == [uids(6, 7), uids(0, 1)], "the first are cooling down"
    now[0] = 130.0
    assert take(source, [4]) == [uids(4, 5)], "1 - 0.75 is more than 0"


def test_without_a_cooldown_time_groups_are_used_once() -> None:
    storage = committed()
    ParquetLog(storage).seal(2)
    source = replaying(storage, Replay())
    assert take(source, [1, 2, 3, 4]) == [uids(4, 5), uids(6, 7), uids(0, 1), uids(2, 3)]
    assert batch_of(source, 5) is None
    assert audit(storage, max_uses=1) == Audit(committed=16, trained=16, waiting=0)


def test_a_group_is_trained_up_to_its_limit() -> None:
    storage = committed()
    ParquetLog(storage).seal(2)
    rule = Replay(DecayLimitRandomization(decay=0.5, use_count_limit=3), reuse_cooldown_s=0.0, after_the_end=True)
    source = replaying(storage, rule)
    batches = take(source, range(1, 13))
    assert batch_of(source, 13) is None
    assert set(Counter(uid for batch in batches for uid in batch).values()) == {3}
    assert audit(storage, max_uses=3) == Audit(committed=16, trained=16, waiting=0, reused=32)


def test_after_the_explorers_end_used_groups_form_no_batch() -> None:
    storage = committed()
    ParquetLog(storage).seal(2)
    source = replaying(storage)
    step = 0
    while batch_of(source, step + 1) is not None:
        step += 1
    assert step >= 4
    assert audit(storage).waiting == 0, "everything was trained before it ended"


def test_a_group_is_not_used_again_beyond_the_staleness_bound() -> None:
    storage = committed([(1, 0)])  # of version 0
    source = replaying(storage, max_staleness=2)
    assert take(source, [1, 2, 3]) == [uids(0, 1)] * 3
    with pytest.raises(WaitTimeout):
        batch_of(source, 4)


def test_a_cooldown_is_measured_between_the_stamps_of_the_ledger() -> None:
    storage = committed([(1, 0)])
    now = [100.0]
    source = replaying(storage, Replay(reuse_cooldown_s=30.0), clock=lambda: now[0])
    take(source, [1])
    now[0] = 129.0
    with pytest.raises(WaitTimeout):
        batch_of(source, 2)
    now[0] = 130.0
    assert take(source, [2]) == [uids(0, 1)]
    assert [entry.notes["time_s"] for entry in entries(storage)] == [100.0, 130.0]


def test_a_use_trains_the_rows_that_were_trained_before() -> None:
    storage = committed(statuses=lambda task, rollout: Status.FAILED if (task, rollout) == (6, 1) else Status.OK)
    source = replaying(storage, Replay(LinearDecay(decay=0.1), reuse_cooldown_s=0.0))
    batches = take(source, range(1, 7))
    assert batches[1] == batches[3] == batches[5] == ("t/0/6/0/0", *uids(7))
    assert audit(storage).dropped == {"failed": 1}
    assert audit(storage).problems == ()


@settings(max_examples=40)
@given(
    ordered=st.booleans(),
    size=st.integers(1, 3),
    bound=st.none() | st.integers(1, 6),
    limit=st.none() | st.integers(1, 3),
    sigma=st.sampled_from([0.0, 1.5]),
    cooldown=st.sampled_from([0.0, 2.0]),
    saved_at=st.integers(0, 9),
    killed_at=st.integers(0, 9),
)
def test_a_resumed_source_forms_the_same_batches(
    ordered: bool,
    size: int,
    bound: int | None,
    limit: int | None,
    sigma: float,
    cooldown: float,
    saved_at: int,
    killed_at: int,
) -> None:
    rule = Replay(DecayLimitRandomization(0.6, limit, sigma), reuse_cooldown_s=cooldown, seed=3, after_the_end=True)

    def source_of(storage: Storage) -> LogSource:
        ledger = Ledger(storage)
        return replaying(
            storage,
            rule,
            ordered=ordered,
            groups_per_batch=size,
            max_staleness=bound,
            clock=lambda: float(ledger.last_step()),  # time passes with the batches
        )

    def sealed() -> Storage:
        # All is there from the start, so it is of the initial weights: no trainer meets rows of weights that it has not
        # made, and the fold over the newest entries relies on that.
        storage = committed(versions=(0, 0))
        ParquetLog(storage).seal(2)
        return storage

    def run(source: LogSource, first: int, last: int) -> list[tuple[str, ...]]:
        batches = []
        for step in range(first, last + 1):
            try:
                found = batch_of(source, step)
            except WaitTimeout:  # all are cooling, and no clock goes on
                break
            if found is None:
                break
            batches.append(found[1].uids)
        return batches

    whole = sealed()
    expected = run(source_of(whole), 1, 10)
    saved_at = min(saved_at, len(expected))
    killed_at = min(max(saved_at, killed_at), len(expected))
    storage = sealed()
    first = source_of(storage)
    run(first, 1, saved_at)
    state = first.state_dict()
    run(first, saved_at + 1, killed_at)
    second = source_of(storage)
    second.load_state_dict(state)
    assert run(second, saved_at + 1, 10) == expected[saved_at:]
    strip = [(e.use, e.drop, e.positions, e.notes) for e in entries(storage)]
    if ordered or cooldown == 0.0:
        names = {n.text: (n.explore_step, n.unit) for s in (whole, storage) for n in ParquetLog(s).shards()}
        assert _by_place(strip, names) == _by_place(
            [(e.use, e.drop, e.positions, e.notes) for e in entries(whole)], names
        )
    buffer_cases.sound_audit(storage, max_uses=limit)


def _by_place(rows: list[Any], names: dict[str, tuple[int, int]]) -> list[Any]:
    """Entries with shards named by their unit instead of their writer."""
    return [
        (
            [(names[part.source], part.rows) for part in use],
            [(names[part.source], part.rows, part.reason) for part in drop],
            positions,
            notes,
        )
        for use, drop, positions, notes in rows
    ]


def test_a_resumed_source_reads_only_entries_within_the_bound() -> None:
    uses = UseCounts(REUSE, max_staleness=4)
    assert list(range(uses.first_step(1000), 1000)) == [996, 997, 998, 999]
    assert UseCounts(REUSE, max_staleness=None).first_step(1000) == 1


def test_the_audit_finds_rows_that_were_trained_too_often() -> None:
    storage = committed([(1, 0)])
    take(replaying(storage), [1, 2, 3])
    assert audit(storage, max_uses=3).problems == ()
    (problem,) = audit(storage, max_uses=2).problems
    assert "rows [0, 1, 2, 3] of 00000001-0000-" in problem
    assert problem.endswith("more often than the replay buffer allows")


def test_the_audit_finds_rows_that_are_used_twice() -> None:
    storage = committed([(1, 0)])
    take(replaying(storage), [1])
    use = entries(storage)[0].use
    Ledger(storage).write(LedgerEntry(2, "main", (use[0], use[0])))
    dropped = type(use[1])(use[1].source, use[1].rows, "stale")
    Ledger(storage).write(LedgerEntry(3, "main", (), (dropped,)))
    problems = audit(storage).problems
    assert any("step 2 trains row 0 of" in line and "more than once" in line for line in problems)
    assert any("rows [2, 3] of" in line for line in problems)
