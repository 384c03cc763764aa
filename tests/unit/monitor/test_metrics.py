"""Metrics files: a reader always sees complete rows, and a crash loses only unflushed rows."""

import json
import math
import threading

import pytest

from rftdask.errors import DamagedError, StorageError
from rftdask.monitor.metrics import MetricsFollower, MetricsRow, MetricsWriter, read_metrics


def test_rows_are_read_as_a_table_sorted_by_step(storage, clock):
    with MetricsWriter(storage, "trainer", clock=clock) as trainer:
        trainer.write(2, {"loss": 0.5}, stage="rl")
        trainer.write(1, {"loss": 1.0, "grad_norm": 3}, stage="rl")
    with MetricsWriter(storage, "eval", clock=clock) as evaluation:
        evaluation.write(1, {"accuracy": 0.25}, taskset="gsm8k")
    table = read_metrics(storage)
    assert list(table.columns) == ["role", "step", "time_s", "stage", "taskset", "accuracy", "grad_norm", "loss"]
    assert table[["role", "step", "taskset"]].values.tolist() == [
        ["eval", 1, "gsm8k"],
        ["trainer", 1, ""],
        ["trainer", 2, ""],
    ]
    assert table["loss"].tolist()[1:] == [1.0, 0.5]
    assert math.isnan(table["grad_norm"].iloc[2])
    assert read_metrics(storage, "eval")["accuracy"].tolist() == [0.25]


def test_a_run_without_metrics_reads_as_an_empty_table(storage):
    assert read_metrics(storage).empty
    assert list(read_metrics(storage, "trainer").columns) == ["role", "step", "time_s"]


def test_the_later_row_replaces_a_repeated_step(storage, clock):
    with MetricsWriter(storage, "trainer", clock=clock) as first:
        first.write(5, {"loss": 1.0, "only_first": 1.0})
    clock.now_s += 60
    with MetricsWriter(storage, "trainer", clock=clock) as resumed:
        resumed.write(5, {"loss": 2.0})
    table = read_metrics(storage)
    assert table["loss"].tolist() == [2.0]
    assert "only_first" not in table


def test_with_equal_times_the_row_of_the_later_part_wins(storage, clock):
    for loss in (3.0, 1.0, 2.0):
        MetricsWriter(storage, "trainer", clock=clock).write(5, {"loss": loss})
    assert read_metrics(storage)["loss"].tolist() == [2.0]


def test_rows_with_different_tags_are_separate(storage, clock):
    with MetricsWriter(storage, "eval", clock=clock) as writer:
        writer.write(5, {"accuracy": 0.1}, taskset="a")
        writer.write(5, {"accuracy": 0.2}, taskset="b")
    assert read_metrics(storage)["accuracy"].tolist() == [0.1, 0.2]


def test_nan_and_infinity_are_stored_as_json_and_read_as_nan(storage, clock):
    with MetricsWriter(storage, "trainer", clock=clock) as writer:
        writer.write(1, {"loss": math.nan, "kl": math.inf, "lr": -math.inf})
    line = json.loads(storage.get(storage.puts[0]), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert line["loss"] is None
    assert read_metrics(storage)[["loss", "kl", "lr"]].isna().all(axis=None)


def test_a_resumed_role_opens_a_new_part(storage, clock):
    MetricsWriter(storage, "trainer", clock=clock).write(1, {"loss": 1.0})
    before = storage.get("metrics/trainer/00000001-000001.jsonl")
    with MetricsWriter(storage, "trainer", clock=clock) as resumed:
        resumed.write(1, {"loss": 2.0})
        clock.now_s += 10
        resumed.write(2, {"loss": 2.0})
    assert storage.list("metrics/trainer") == ["00000001-000001.jsonl", "00000001-000002.jsonl"]
    assert storage.get("metrics/trainer/00000001-000001.jsonl") == before


def test_two_writers_of_one_role_never_share_a_part(storage, clock):
    writers = [MetricsWriter(storage, "run", clock=clock, rows_per_part=3) for _ in range(4)]

    def write(number: int) -> None:
        for step in range(10):
            writers[number].write(10 * number + step, {"x": float(number)})
        writers[number].close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert read_metrics(storage)["step"].tolist() == list(range(40))


def test_a_writer_that_loses_the_race_for_a_part_takes_the_next(storage, clock):
    class SlowLister(type(storage)):
        def list(self, folder=""):
            names = super().list(folder)
            MetricsWriter(storage, "run", clock=clock).write(1, {"x": 1.0})  # between our listing and our put
            return names

    slow = SlowLister(storage.url)
    MetricsWriter(slow, "run", clock=clock).write(1, {"x": 2.0})
    assert [storage.get(f"metrics/run/00000001-00000{n}.jsonl").count(b"2.0") for n in (1, 2)] == [0, 1]


def test_the_open_part_is_put_once_per_interval_and_at_close(storage, clock):
    writer = MetricsWriter(storage, "trainer", flush_interval_s=1.0, clock=clock)
    for step in range(30):  # 3 s
        writer.write(step, {"loss": 1.0})
        clock.now_s += 0.125
    assert len(storage.puts) == 4
    writer.close()
    writer.close()
    assert len(storage.puts) == 5
    assert len(read_metrics(storage)) == 30


def test_a_part_ends_after_its_number_of_rows(storage, clock):
    with MetricsWriter(storage, "trainer", rows_per_part=10, clock=clock) as writer:
        for step in range(1, 26):
            writer.write(step, {"loss": 1.0})
    sizes = [len(storage.get(f"metrics/trainer/{name}").splitlines()) for name in storage.list("metrics/trainer")]
    assert storage.list("metrics/trainer")[1] == "00000011-000002.jsonl"
    assert sizes == [10, 10, 5]


def test_setting_the_clock_back_does_not_stop_flushing(storage, clock):
    writer = MetricsWriter(storage, "trainer", clock=clock)
    writer.write(1, {"loss": 1.0})
    clock.now_s -= 3600
    writer.write(2, {"loss": 1.0})
    assert len(read_metrics(storage)) == 2


def test_a_crash_keeps_all_flushed_rows(storage, clock):
    writer = MetricsWriter(storage, "trainer", rows_per_part=4, clock=clock)
    for step in range(1, 11):
        writer.write(step, {"loss": 1.0})
        seen = read_metrics(storage)["step"].tolist()
        assert seen == list(range(1, len(seen) + 1))
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]  # never closed: the open part's rows after its last put are lost


def test_the_next_flush_retries_a_failed_put(storage, clock):
    writer = MetricsWriter(storage, "trainer", rows_per_part=2, clock=clock)
    writer.write(1, {"loss": 1.0})
    storage.is_down = True
    with pytest.raises(StorageError):
        writer.write(2, {"loss": 1.0})
    storage.is_down = False
    writer.write(3, {"loss": 1.0})
    assert read_metrics(storage)["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("metrics", "tags"), [({"step": 1.0}, {}), ({"a": 1.0}, {"a": "x"}), ({}, {"role": "x"}), ({"time_s": 1.0}, {})]
)
def test_a_name_cannot_be_taken_twice(storage, metrics, tags):
    with pytest.raises(ValueError, match="names already taken"):
        MetricsWriter(storage, "trainer").write(1, metrics, **tags)


def test_a_damaged_part_is_named(storage):
    storage.put("metrics/trainer/00000001-000001.jsonl", b'{"role": "trainer", "st')
    with pytest.raises(DamagedError, match=r"metrics/trainer/00000001-000001\.jsonl"):
        read_metrics(storage)


def test_a_follower_returns_each_row_once(storage, clock):
    follower = MetricsFollower(storage)
    assert follower.poll() == []
    writer = MetricsWriter(storage, "trainer", rows_per_part=7, clock=clock)
    rows: list[MetricsRow] = []
    for step in range(1, 41):
        writer.write(step, {"loss": 1.0})
        clock.now_s += 0.3
        if step % 3 == 0:
            rows += follower.poll()
        if step == 20:  # the role dies with unflushed rows and starts again
            writer = MetricsWriter(storage, "trainer", rows_per_part=7, clock=clock)
    writer.close()
    rows += follower.poll()
    assert [row.step for row in rows] == read_metrics(storage)["step"].tolist()
    assert follower.poll() == []


def test_a_follower_returns_rows_of_two_eval_writers(storage, clock):
    follower = MetricsFollower(storage)
    held_out, tasks = (MetricsWriter(storage, "eval", clock=clock) for _ in range(2))
    rows: list[MetricsRow] = []
    for step in range(3):
        held_out.write(step, {"eval_loss": 1.0})
        tasks.write(step, {"accuracy": 0.5}, taskset="held")
        held_out.flush(), tasks.flush()
        rows += follower.poll()
    assert [(row.step, bool(row.tags)) for row in rows] == [(step, tag) for step in range(3) for tag in (False, True)]


def test_a_follower_continues_from_a_cursor(storage, clock):
    writer = MetricsWriter(storage, "trainer", clock=clock)
    writer.write(1, {"loss": 1.0})
    first = MetricsFollower(storage)
    first.poll()
    writer.write(2, {"loss": 1.0})
    writer.close()
    assert [row.step for row in MetricsFollower(storage, first.cursor).poll()] == [2]


def test_a_follower_does_not_reread_ended_parts(storage, clock):
    follower = MetricsFollower(storage)
    with MetricsWriter(storage, "trainer", rows_per_part=2, clock=clock) as writer:
        for step in range(1, 8):
            writer.write(step, {"loss": 1.0})
    follower.poll()
    storage.gets.clear()
    follower.poll()
    assert storage.gets == ["metrics/trainer/00000007-000004.jsonl"]
