"""Promises of a gang. Ranks are threads that communicate in memory; processes over gloo are in tests/e2e."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.batches.batch import TrainingBatch, join_batches, supervised_batch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import StorageError
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import Checkpoints, newest_valid_checkpoint, turns_of
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.engines.micro_batches import deal, plan_micro_batches, row_costs, rows_of_units
from rftdask.trainer.trainer import from_bytes, read_together, rows_of_rank, to_bytes
from tests.thread_ranks import in_threads
from tests.unit.trainer.trainer_cases import fill_log, make_trainer, new_storage, source_of

NUM_STEPS = 5


@given(st.lists(st.floats(0.1, 1000.0), min_size=0, max_size=40), st.integers(1, 9))
def test_units_are_dealt_once_and_evenly(costs: list[float], size: int) -> None:
    parts = deal(np.array(costs), size)
    assert sorted(unit for part in parts for unit in part) == list(range(len(costs)))
    loads = [sum(costs[unit] for unit in part) for part in parts]
    assert max(loads) <= sum(costs) / size + max(costs, default=0.0) + 1e-6
    assert all(list(part) == sorted(part) for part in parts)


def test_a_long_row_costs_more_than_short_rows_of_as_many_tokens() -> None:
    long, short = row_costs(np.array([1000, 500, 500]), 64)[0], row_costs(np.array([500, 500]), 64).sum()
    assert long == 1000 * (12 * 64 + 1000)
    assert short == 2 * 500 * (12 * 64 + 500)
    assert rows_of_units(np.array([0, 2]), 2).tolist() == [0, 1, 4, 5]


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=12), st.integers(1, 6))
def test_every_place_is_read_by_one_rank_and_no_group_is_parted(uses: list[tuple[int, bool]], size: int) -> None:
    use = tuple(Rows("dataset:x" if data else f"shard{i}", tuple(range(n))) for i, (n, data) in enumerate(uses))
    entry = LedgerEntry(1, "main", use)
    ranges = [rows_of_rank(entry, rank, size) for rank in range(size)]
    assert [place for part in ranges for place in part] == list(range(sum(n for n, _ in uses)))
    begin = 0
    for count, data in uses:
        owners = {rank for rank, part in enumerate(ranges) for place in range(begin, begin + count) if place in part}
        assert data or len(owners) <= 1
        begin += count


def rows_of(numbers: Sequence[int], first: int = 0) -> TrainingBatch:
    rows = [([7, 8, *range(2 + n % 3)], 2, None) for n in numbers]
    batch = supervised_batch(rows, [f"t/0/{n // 2}/{n % 2}/0" for n in numbers], 2)
    logprobs = np.concatenate([-5.0 * n - np.arange(2 + n % 3) for n in numbers])
    return replace(
        batch,
        experts=np.zeros(len(rows), bool),
        rewards=np.array(numbers, np.float32),
        rollout_logprobs=logprobs.astype(np.float32),
        loss_mask=logprobs % 3 != 0,
    )


def test_joined_parts_equal_the_batch_of_one_rank() -> None:
    shown = [supervised_batch([([1, 2, n], 1, None)], [f"dataset:x/{n}/{n}"]) for n in (3, 4)]
    whole = join_batches([rows_of(range(6)), *shown])
    parts = [rows_of([0, 1]), join_batches([rows_of([2, 3, 4, 5]), shown[0]]), shown[1]]
    joined = join_batches([from_bytes(to_bytes(part)) for part in parts])
    for name, value in vars(whole).items():
        assert np.array_equal(getattr(joined, name), value), name
    assert joined.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 4]


def test_joined_parts_keep_their_states_distinct() -> None:
    known = TrainingBatch(
        **{**vars(rows_of([0, 1])), "states": np.array([0, 1]), "turn_rewards": np.ones(2, np.float32)}
    )
    other = TrainingBatch(**{**vars(rows_of([4, 5])), "states": np.array([-1, 0])})
    joined = join_batches([known, rows_of([2, 3]), other])
    assert joined.states is not None and joined.turn_rewards is not None
    assert joined.states.tolist() == [0, 1, -1, -1, -1, 2]
    assert joined.turn_rewards.tolist() == [1, 1, 0, 0, 0, 0]
    assert joined.baselines is None


@given(st.data(), st.integers(2, 3), st.booleans())
def test_ranks_get_requested_tokens_and_all_metadata(data: st.DataObject, size: int, replayed: bool) -> None:
    entry = LedgerEntry(1, "main", (Rows("shard", (0, 1)), Rows("other", (0, 1)), Rows("dataset:x", (0, 1, 2))))
    wishes = [data.draw(st.none() | st.lists(st.integers(0, 6), unique=True)) for _ in range(size)]

    def read(entry: LedgerEntry, places: Sequence[int] | None) -> TrainingBatch:
        own, shown = [p for p in places or () if p < 4], [p for p in places or () if p >= 4]
        parts = [rows_of(own)] if own else []
        if replayed and own:  # demonstrations have no experts
            experts = np.repeat(own, parts[0].lengths).astype(np.int16)
            parts = [replace(parts[0], routed_experts=np.stack([experts, experts + 1], -1))]
        parts += [supervised_batch([([1, 2, p], 1, None) for p in shown], [f"x/{p}" for p in shown])] if shown else []
        return join_batches(parts)

    whole = read(entry, range(7))

    def rank(ranks: Ranks) -> TrainingBatch:
        wish = wishes[ranks.rank]
        return read_together(entry, ranks, read, lambda batch: None if wish is None else np.array(wish, int))

    for found, wish in zip(in_threads(size, rank), wishes, strict=True):
        expected = whole.holding(range(7) if wish is None else wish)
        for name, value in vars(expected).items():
            assert np.array_equal(getattr(found, name), value), name
        assert found.num_trained.tolist() == [mask.sum() for mask in whole.row_masks()]
        for of_row in (TrainingBatch.row_tokens, TrainingBatch.row_logprobs, TrainingBatch.row_masks):
            for row, (values, wanted) in enumerate(zip(of_row(found), of_row(whole), strict=True)):
                assert values.tolist() == (wanted.tolist() if wish is None or row in wish else [])


def saving(storage: Storage, ranks: Ranks, writers: Ranks, strategy: str = "unrestricted") -> Checkpoints:
    return Checkpoints(storage, "main", ranks=ranks, writers=writers, strategy=strategy)


def run_gang(storage: Storage, size: int, engines: list[FakeTrainEngine], reads: list[list[int]]) -> None:
    def rank(ranks: Ranks, writers: Ranks) -> None:
        engine, source = engines[ranks.rank], source_of(storage)
        read_whole = source.read

        def read(entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
            reads[ranks.rank] += [] if places is None else list(places)
            return read_whole(entry, places)

        source.read = read  # type: ignore[method-assign]  # records the reads of each rank
        saver = saving(storage, ranks, writers)
        make_trainer(storage, engine=engine, source=source, checkpoints=saver, ranks=ranks).run()

    in_threads(size, rank, num_groups=2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gang_trains_the_same_as_one_rank(size: int) -> None:
    alone, storage = new_storage(), new_storage()
    results: list[tuple[bytes, list[Any]]] = []
    for store, number in ((alone, 1), (storage, size)):
        fill_log(store, NUM_STEPS)
        engines, reads = [FakeTrainEngine() for _ in range(number)], [[] for _ in range(number)]
        run_gang(store, number, engines, reads)
        weights = store.get(f"global_step_{NUM_STEPS}/actor/model.safetensors")
        assert all(engine.weights()["model.safetensors"] == weights for engine in engines)
        assert newest_valid_checkpoint(store) == NUM_STEPS
        results.append((weights, [Ledger(store).read(step) for step in range(1, NUM_STEPS + 1)]))
        if number > 1:
            assert sorted(place for part in reads for place in part) == sorted([0, 1] * NUM_STEPS)
            assert sum(bool(part) for part in reads) == 1, "two rollouts of one group are read by one rank"
    assert results[0][0] == results[1][0]


def test_a_resumed_gang_loads_the_checkpoint_on_every_rank() -> None:
    storage = new_storage()
    fill_log(storage, 2)
    run_gang(storage, 2, [FakeTrainEngine(), FakeTrainEngine()], [[], []])
    engines = [FakeTrainEngine(), FakeTrainEngine()]
    run_gang(storage, 2, engines, [[], []])  # nothing is left to train
    assert engines[0].weights() == engines[1].weights() != FakeTrainEngine().weights()


class SlowEngine(FakeTrainEngine):
    """Trains each batch until its rank has prefetched the next one, if there is one. Sets `begun` at the first."""

    def __init__(self, num_steps: int, begun: threading.Event) -> None:
        super().__init__()
        self.num_steps, self.begun, self.has_read = num_steps, begun, threading.Event()

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        self.begun.set()
        if step < self.num_steps:
            assert self.has_read.wait(60), f"the batch after step {step} was not read while it was trained"
            self.has_read.clear()
        return super().train_step(batch, step)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_every_rank_prefetches_its_rows_of_the_next_batch(size: int, is_late: bool) -> None:
    storage, num_steps = new_storage(), 4
    fill_log(storage, 1 if is_late else num_steps, is_finished=not is_late)
    loads: list[list[tuple[bool, str]]] = [[] for _ in range(size)]
    begun = threading.Event()

    def rank(ranks: Ranks, writers: Ranks, readers: Ranks) -> None:
        engine, source = SlowEngine(num_steps, begun), source_of(storage)
        read, read_ahead, entry_of, batch_of = source.log.read, source.read_ahead, source.entry, source.read
        asked = threading.Event()  # while the loop waits for a batch

        def noted(name: ShardName, columns: Sequence[str]) -> pa.Table:
            loads[ranks.rank].append((not asked.is_set(), name.text))
            return read(name, columns)

        def in_loop(call: Callable[..., Any], *given: Any) -> Any:
            asked.set()
            try:
                return call(*given)
            finally:
                asked.clear()

        def told(entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
            read_ahead(entry, places)
            engine.has_read.set()

        seen: Any = source  # whose calls are watched
        seen.log.read, seen.read_ahead = noted, told
        seen.entry, seen.read = partial(in_loop, entry_of), partial(in_loop, batch_of)
        saver = saving(storage, ranks, writers)
        given = {"ranks": ranks, "readers": readers if size > 1 else None, "total_steps": num_steps}
        make_trainer(storage, engine=engine, source=source, checkpoints=saver, **given).run()

    def fill_late() -> None:
        if begun.wait(60):
            fill_log(storage, num_steps, first=2)

    if is_late:  # data that arrives while the first step trains is also found
        threading.Thread(target=fill_late).start()
    in_threads(size, rank, num_groups=3)
    # Rank 0 reads all shards to find the data; another rank reads those that it trains. Each shard holds one group.
    assert sorted(map(len, loads)) == [0] * (size - 2) + [num_steps] * min(size, 2)
    for number, read_by in enumerate(loads):
        assert len({name for _, name in read_by}) == len(read_by), "once"
        prefetched = [is_prefetched for is_prefetched, _ in sorted(read_by, key=lambda load: load[1])]
        if number == 0:
            # Data of the start is found when the first batch is formed.
            assert prefetched[:2] == [False, is_late]
        else:
            assert prefetched[:1] == [False][: len(prefetched)] and all(prefetched[1:])


def test_an_error_of_prefetching_ends_the_run_on_all_ranks() -> None:
    storage = new_storage()
    fill_log(storage, 3)

    def rank(ranks: Ranks, writers: Ranks, readers: Ranks) -> None:
        source = source_of(storage)
        if ranks.is_rank0:

            def look_ahead(step: int) -> LedgerEntry | None:
                raise StorageError("no route to the storage")

            source.look_ahead = look_ahead  # type: ignore[method-assign]
        saver = saving(storage, ranks, writers)
        make_trainer(storage, source=source, checkpoints=saver, ranks=ranks, readers=readers).run()

    with pytest.raises(StorageError, match="no route"):
        in_threads(2, rank, num_groups=3)


def test_turns_follow_the_save_strategy() -> None:
    hosts = ["a", "a", "b", "b"]
    assert turns_of("unrestricted", hosts) == [0, 0, 0, 0]
    assert turns_of("single_node", hosts) == [0, 0, 1, 1]
    assert turns_of("single_process", hosts) == turns_of("single_thread", hosts) == [0, 1, 2, 3]


@pytest.mark.parametrize("strategy", ["unrestricted", "single_process", "single_thread"])
def test_one_manifest_names_the_files_of_all_ranks(strategy: str) -> None:
    storage = new_storage()
    order: list[str] = []
    lock = threading.Lock()

    def note(verb: str, path: str, stage: str) -> None:
        if verb == "put" and stage == "before" and path.endswith("part-0"):
            time.sleep(0.02)  # a rank that does not wait for its turn is first
        if verb == "put" and stage == "after":
            with lock:
                order.append(path.removeprefix("global_step_7/"))

    def rank(ranks: Ranks, writers: Ranks) -> None:
        saver = saving(FaultyStorage(storage, note), ranks, writers, strategy)
        saver.save(7, {f"part-{ranks.rank}": b"x"}, {"step": 7})
        saver.flush()

    in_threads(3, rank, num_groups=2)
    found = Checkpoints(storage, "main").load_newest()
    assert found is not None
    assert [found[2][f"part-{i}"] for i in range(3)] == [b"x"] * 3
    assert set(order[:3]) == {"part-0", "part-1", "part-2"}
    assert order[3:5] == ["trainer_state.json", "MANIFEST.json"]
    if strategy != "unrestricted":
        assert order[:3] == ["part-0", "part-1", "part-2"]


def test_a_failed_write_of_one_rank_fails_on_all_ranks() -> None:
    storage = new_storage()

    def fail(verb: str, path: str, stage: str) -> None:
        if verb == "put" and path.endswith("part-1"):
            raise StorageError("disk full")

    def rank(ranks: Ranks, writers: Ranks) -> str:
        saver = saving(FaultyStorage(storage, fail), ranks, writers)
        saver.save(7, {f"part-{ranks.rank}": b"x"}, {"step": 7})
        with pytest.raises(StorageError) as caught:
            saver.flush()
        return str(caught.value)

    texts = in_threads(2, rank, num_groups=2)
    assert texts == ["rank 1 could not write its part of checkpoint 7: disk full"] * 2
    assert newest_valid_checkpoint(storage) is None


def test_training_continues_while_a_checkpoint_is_written() -> None:
    storage = new_storage()
    release, events = threading.Event(), []

    def hold(verb: str, path: str, stage: str) -> None:
        if verb == "put" and path == "global_step_2/model" and stage == "before":
            assert release.wait(30)

    files: Mapping[str, bytes] = {"model": b"x"}
    saver = Checkpoints(FaultyStorage(storage, hold), "main", strategy="unrestricted")
    saver.on_commit = events.append
    saver.save(2, files, {})
    saver.check()
    assert events == []
    release.set()
    saver.save(4, files, {})
    assert events[0] == 2
    saver.flush()
    assert events == [2, 4]


class OneOf(Ranks):
    """One of several ranks, for calls that need no communication."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


@given(
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 4) | st.none(), st.sampled_from([1, 2]), st.booleans(),
    st.none() | st.integers(1, 4),
)  # fmt: skip
def test_plans_cover_every_row_once_with_equal_passes(
    num_units: int, size: int, max_rows: int | None, unit: int, together: bool, group_size: int | None
) -> None:
    lengths = np.arange(3, 3 + num_units * unit) ** 2 % 17 + 1
    limits: dict[str, Any] = {"hidden_size": 8, "max_tokens": 40, "max_rows": max_rows, "unit": unit}
    if group_size is not None:
        limits["siblings"] = np.arange(len(lengths)) // group_size
    members = np.arange(len(lengths))[num_units // 2 * unit :]  # the last of them, as a mini-batch may have
    plans = [
        plan_micro_batches(lengths, members, OneOf(rank, size), **limits, together=together) for rank in range(size)
    ]
    rows = [int(row) for plan in plans for part in plan.micro_batches for row in part]
    assert sorted(rows) == members.tolist()
    counts = [len(plan.micro_batches) + plan.num_idle for plan in plans]
    assert min(counts) >= 1
    assert not together or len(set(counts)) == 1
    for plan in plans:
        assert all(
            sorted(part // unit) == sorted(np.repeat(np.unique(part // unit), unit)) for part in plan.micro_batches
        )
        assert len(plan.filler) == unit
        for part in plan.micro_batches:
            assert len(part) == unit or (lengths[part].sum() <= 40 and (max_rows is None or len(part) <= max_rows))


def test_siblings_share_passes_and_ranks_cost_the_same() -> None:
    groups, lengths = np.arange(16).repeat(8), np.arange(128) % 7 + 20
    limits: dict[str, Any] = {"hidden_size": 8, "max_tokens": 400, "max_rows": None, "unit": 1, "together": True}
    plans = [
        [plan_micro_batches(lengths, np.arange(128), OneOf(rank, 4), **limits, siblings=known) for rank in range(4)]
        for known in (groups, None)
    ]
    # [passes] prompts that are computed, with siblings known and without.
    computed = [sum(len(np.unique(groups[part])) for plan in ranks for part in plan.micro_batches) for ranks in plans]
    assert 1.5 * computed[0] <= computed[1]
    costs = [lengths[np.concatenate(plan.micro_batches)].sum() for plan in plans[0]]
    assert max(costs) <= 1.15 * min(costs)
