"""Promises of every backend of the experience log, on every storage. PostgreSQL is tested if RFTDASK_TEST_POSTGRESQL
names a database, postgresql://user@host/name, in which tables are created and stay.
"""

import os
import pickle
import sqlite3
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.columns import SCHEMA, experiences_to_table
from rftdask.buffer.log.file_log import FileLog, JsonlLog, ParquetLog
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience, Status, Turn
from rftdask.buffer.log.shard import Part, ShardName, done_units
from rftdask.buffer.log.sql_log import SqlLog
from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage, open_storage
from tests.unit.buffer.buffer_cases import (
    all_ok,
    batch_of,
    commit_batch,
    experience,
    find_whole,
    make_source,
    new_storage,
)

POSTGRESQL = "RFTDASK_TEST_POSTGRESQL"


class Backend(ABC):
    """One kind of log on an empty storage, with a way to damage it that does not use the log."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @abstractmethod
    def open(self, folder: str = "experiences") -> ExperienceLog:
        """The log as another process opens it."""

    @abstractmethod
    def damage(self, name: ShardName) -> None:
        """Change a value in the rows of a shard."""


class Files(Backend):
    def __init__(self, storage: Storage, kind: type[FileLog]) -> None:
        super().__init__(storage)
        self.kind = kind

    def open(self, folder: str = "experiences") -> FileLog:
        return self.kind(self.storage, folder, "run")

    def damage(self, name: ShardName) -> None:
        path = self.open().path(name)
        data = self.storage.get(path)
        if self.kind is JsonlLog:  # lines as good as before, and other
            self.storage.put(path, data.replace(b'"reward": 1.0', b'"reward": 2.0'))
        else:
            self.storage.put(path, data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])


class Database(Backend):
    def __init__(self, storage: Storage, url: str | None) -> None:
        super().__init__(storage)
        self.url = url

    def open(self, folder: str = "experiences") -> SqlLog:
        return SqlLog(self.storage, self.url, folder, "run")

    def damage(self, name: ShardName) -> None:
        where = f"where shard = (select id from shards where writer = '{name.writer}' and batch = {name.unit})"
        engine = sa.create_engine(
            self.url.replace("postgresql:", "postgresql+psycopg:")
            if self.url
            else f"sqlite:///{self.storage.url}/experiences.sqlite"
        )
        with engine.begin() as connection:
            connection.execute(sa.text(f"update experiences set reward = reward + 1 {where} and row = 1"))
        engine.dispose()


def make_backend(kind: str, folder: Path, request: pytest.FixtureRequest) -> Backend:
    if kind == "postgresql":
        if not (url := os.environ.get(POSTGRESQL)):
            pytest.skip(f"{POSTGRESQL} names no database")
        return Database(open_storage(folder), url)
    if kind == "s3-parquet":
        return Files(open_storage(request.getfixturevalue("s3_url")), ParquetLog)
    made: dict[str, Callable[[], Backend]] = {
        "memory-parquet": lambda: Files(new_storage(), ParquetLog),
        "local-parquet": lambda: Files(open_storage(folder), ParquetLog),
        "local-jsonl": lambda: Files(open_storage(folder), JsonlLog),
        "sqlite": lambda: Database(open_storage(folder), None),
    }
    return made[kind]()


KINDS = ("memory-parquet", "local-parquet", "local-jsonl", "sqlite", "s3-parquet", "postgresql")


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make_backend(request.param, tmp_path, request)


@pytest.mark.slow
def test_a_database_that_is_away_for_seconds_is_waited_for(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The server on this machine refuses connections and closes those that are open, as while it starts again."""
    backend = make_backend("postgresql", tmp_path, request)
    assert isinstance(backend, Database) and backend.url
    host = str(sa.make_url(backend.url).query.get("host", ""))
    if not (sockets := list(Path(host).glob(".s.PGSQL.*[0-9]"))):
        pytest.skip(f"the socket of the server is not in {host or 'a folder'}")
    [socket] = sockets
    away, log = socket.with_name("away"), backend.open()
    first = log.commit([experience(0)], explore_step=1, unit=0)
    engine = sa.create_engine(backend.url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        socket.rename(away)
        threading.Timer(4.0, away.rename, (socket,)).start()
        others = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
        connection.execute(sa.text(f"{others} and usename = current_user"))
        second = log.commit([experience(0)], explore_step=1, unit=1)
    engine.dispose()
    assert socket.exists() and backend.open().shards() == [first, second]


class TestLog:
    def test_an_empty_log_has_nothing(self, backend: Backend) -> None:
        log = backend.open()
        assert (log.shards(), find_whole(log, 1, 0), log.num_quarantined(), log.sealed_at()) == ([], None, 0, None)
        assert backend.storage.list() == []  # reading creates nothing

    def test_a_committed_shard_is_listed_found_and_read(self, backend: Backend) -> None:
        name = backend.open().commit([experience(3, 1), experience(3, 2)], explore_step=5, unit=1)
        log = backend.open()
        assert log.shards() == [name] and ShardName.try_parse(name.text) == name
        assert (find_whole(log, 5, 1), find_whole(log, 5, 0), find_whole(log, 6, 1)) == (name, None, None)
        assert log.read(name).column("uid").to_pylist() == ["t/0/3/1/0", "t/0/3/2/0"]
        assert (name.num_rows, name.explore_step, name.unit) == (2, 5, 1)

    def test_added_columns_read_back_to_the_bit_or_are_null(self, backend: Backend) -> None:
        failed = experience(3, status=Status.FAILED, tokens=(), prompt_length=0, rollout_logprobs=())
        recorded = experience(
            2,
            min_policy_version=3,
            max_policy_version=2**40,
            routed_experts=np.array([[0, 299], [7, 1], [3, 4], [5, 6]], np.int16),
            version_starts=((0, 3), (1, 2**40)),
            session="ticket-4711",
        )
        rows = [conversation(0), experience(1), recorded, failed]
        name = backend.open().commit(rows, explore_step=1, unit=0)
        table = backend.open().read(name)
        assert table.select(SCHEMA.names).equals(experiences_to_table(rows).cast(SCHEMA))
        starts = [{"start": 0, "policy_version": 3}, {"start": 1, "policy_version": 2**40}]
        assert table.column("version_starts").to_pylist() == [None, None, starts, None]
        assert table.column("routed_experts").to_pylist() == [None, None, [0, 299, 7, 1, 3, 4, 5, 6], None]
        assert table.column("session").to_pylist() == [None, None, "ticket-4711", None]

    def test_shards_are_sorted_and_begin_at_the_requested_step(self, backend: Backend) -> None:
        log = backend.open()
        for step in (65, 1, 64):
            for batch in (1, 0):
                log.commit([experience(step=step)], explore_step=step, unit=batch)
        listed = [(name.explore_step, name.unit) for name in log.shards()]
        assert listed == [(1, 0), (1, 1), (64, 0), (64, 1), (65, 0), (65, 1)]
        assert [n.explore_step for n in log.shards(64)] == [64, 64, 65, 65]

    def test_a_batch_without_a_row_is_done(self, backend: Backend) -> None:
        name = backend.open().commit([], explore_step=1, unit=0)
        assert find_whole(backend.open(), 1, 0) == name
        assert backend.open().read(name).num_rows == 0

    def test_a_batch_in_parts_is_done_with_the_last_of_them(self, backend: Backend) -> None:
        log = backend.open()
        first = log.commit([experience(1)], explore_step=1, unit=0, part=Part((1,), 2))
        assert (find_whole(log, 1, 0), log.find_all(1, 0), done_units(log.shards())) == (None, [first], set())
        last = log.commit([experience(0)], explore_step=1, unit=0, part=Part((0,), 2))
        assert ShardName.try_parse(last.text) == last and log.read(last).num_rows == 1
        assert set(backend.open().find_all(1, 0)) == {first, last}
        assert done_units(backend.open().shards()) == {(1, 0)}

    def test_removed_shards_are_listed_by_name(self, backend: Backend) -> None:
        log = backend.open()
        names = [commit_batch(log, step, 0) for step in (1, 2, 3)]
        log.remove(names[:2])
        log.remove(names[:2])
        assert (backend.open().shards(), backend.open().removed(), log.removed(2)) == (names[2:], names[:2], names[1:2])
        with pytest.raises(NotFoundError):
            log.read(names[0])

    def test_two_writers_of_one_batch_leave_two_shards(self, backend: Backend) -> None:
        names = {commit_batch(backend.open(), 1, 0) for _ in range(2)}
        assert len(names) == 2 and set(backend.open().shards()) == names

    def test_a_writer_that_commits_again_leaves_one_shard(self, backend: Backend) -> None:
        log = backend.open()
        assert commit_batch(log, 1, 0) == commit_batch(log, 1, 0)
        (name,) = backend.open().shards()
        assert log.read(name).num_rows == name.num_rows == 4

    def test_writers_side_by_side_lose_nothing(self, backend: Backend) -> None:
        with ThreadPoolExecutor(4) as pool:
            names = list(pool.map(lambda batch: commit_batch(backend.open(), 1, batch, tasks_per_step=99), range(8)))
        assert backend.open().shards() == sorted(names)

    def test_a_log_pickles(self, backend: Backend) -> None:
        log = backend.open()
        name = commit_batch(log, 1, 0)
        again = pickle.loads(pickle.dumps(log))
        assert again.shards() == [name] and again.writer == log.writer

    def test_a_damaged_shard_raises_and_its_unit_runs_again(self, backend: Backend) -> None:
        log = backend.open()
        name, other = commit_batch(log, 1, 0), commit_batch(log, 1, 1)
        backend.damage(name)
        with pytest.raises(DamagedError, match=name.writer):
            backend.open().read(name)
        log.quarantine(name, "crc32 does not match")
        log.quarantine(name, "again")
        assert (find_whole(log, 1, 0), log.shards(), log.num_quarantined()) == (None, [other], 1)
        assert log.quarantined() == [name]
        with pytest.raises(NotFoundError):
            log.read(name)
        again = commit_batch(log, 1, 0)  # the same writer, byte-identical
        assert backend.open().read(again).num_rows == 4
        assert backend.open().read(other).num_rows == 4

    def test_a_log_is_sealed_and_opened_again(self, backend: Backend) -> None:
        log = backend.open()
        log.seal(7)
        log.seal(8)
        assert backend.open().sealed_at() == 8
        log.unseal()
        log.unseal()
        assert backend.open().sealed_at() is None

    def test_logs_of_other_folders_are_not_seen(self, backend: Backend) -> None:
        evals = backend.open("eval/gsm8k")
        name = evals.commit([experience(step=0)], explore_step=0, unit=0)
        evals.seal(3)
        log = backend.open()
        assert (log.shards(0), log.sealed_at(), find_whole(log, 0, 0)) == ([], None, None)
        assert backend.open("eval/gsm8k").shards(0) == [name]
        with pytest.raises(NotFoundError):
            log.read(name)

    def test_the_source_reads_it_exactly_once(self, backend: Backend) -> None:
        failing = {(5, 0): Status.FAILED}
        for step in (1, 2):
            for batch in (0, 1):
                commit_batch(
                    backend.open(), step, batch, statuses=lambda task, k: failing.get((task, k), all_ok(task, k))
                )
        commit_batch(backend.open(), 1, 1)  # ran twice
        backend.open().seal(2)
        backend.damage(next(n for n in backend.open().shards() if (n.explore_step, n.unit) == (2, 0)))
        first = make_source(backend.storage, log=backend.open())
        batches = [batch_of(first, step) for step in (1, 2)]
        commit_batch(backend.open(), 2, 0)  # the explorer repeats the damaged unit
        after = make_source(backend.storage, log=backend.open())  # a new trainer
        for step in (1, 2):
            replayed = batch_of(after, step)
            assert replayed is not None and batches[step - 1] is not None
            assert replayed[1].uids == batches[step - 1][1].uids  # type: ignore[index]
        uids = [uid for found in batches for uid in found[1].uids]  # type: ignore[index]
        while (found := batch_of(after, len(uids) // 4 + 1)) is not None:
            uids += found[1].uids
        assert len(uids) == len(set(uids)) == 16
        audit = audit_log(backend.open(), Ledger(backend.storage), tasks_per_unit=2)
        assert (audit.committed, audit.trained, audit.waiting, audit.problems) == (20, 16, 0, ())


BITS = st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0])
NUMBERS = BITS.filter(lambda value: value == value)  # of NaN only that it is one is kept
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    num_prompt, num_response = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    size = num_prompt + num_response
    return experience(
        draw(st.integers(0, 2**40)),
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)),
        prompt_length=num_prompt,
        rollout_logprobs=draw(st.lists(NUMBERS, min_size=num_response, max_size=num_response)),
        loss_mask=draw(st.none() | st.lists(st.booleans(), min_size=num_response, max_size=num_response)),
        reward=draw(NUMBERS),
        temperature=draw(NUMBERS),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        prompt_text=draw(TEXTS),
        response_text=draw(TEXTS),
        truth=draw(TEXTS),
        metrics=draw(st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=3)),
    )


def as_read(rows: list[Experience]) -> str:
    return repr(experiences_to_table(rows).to_pylist())


@pytest.mark.parametrize("kind", ["local-jsonl", "sqlite", "postgresql"])
def test_a_form_for_people_keeps_every_bit(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    backend = make_backend(kind, tmp_path, request)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(experiences(), max_size=3))
    @example([experience(response_text="a\0b"), experience(reward=-0.0), experience(reward=float("inf"))])
    def holds(rows: list[Experience]) -> None:
        log = backend.open()
        name = log.commit(rows, explore_step=1, unit=0)
        assert repr(log.read(name).to_pylist()) == as_read(rows)

    holds()


def test_a_line_is_an_experience_that_a_person_can_read(tmp_path: Path) -> None:
    log = JsonlLog(open_storage(tmp_path), run="r")
    name = log.commit(
        [experience(3, 1, loss_mask=(True, False, True), response_text="4 \u00b1 1")], explore_step=1, unit=0
    )
    line = (tmp_path / log.path(name)).read_text()
    assert line.startswith(
        '{"schema": "1.5", "run": "r", "uid": "t/0/3/1/0", "taskset": "t", "epoch": 0, "task_index": 3'
    )
    assert '"tokens": [1, 2, 3, 1, 9], "prompt_length": 2, "rollout_logprobs": [-0.5, -0.25, -1.0]' in line
    assert '"loss_mask_runs": [1, 1, 1], "reward": 1.0' in line and "4 \u00b1 1" in line


def conversation(task: int) -> Experience:
    """A row of two turns with all fields of a turn."""
    turns = (Turn(0, 0, 1, 0, 4, "user", 2**62), Turn(1, 2, 3, 6, 8, "tool", 7, 3, 4, "attic \u00e9", 0.1))
    return experience(task, loss_mask=(True, False, True), turns=turns)


def test_a_database_of_an_earlier_schema_is_read_and_extended(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    names = [SqlLog(storage).commit([experience(0)], explore_step=1, unit=0)]
    database = sqlite3.connect(tmp_path / "experiences.sqlite")
    for table in ("experiences", "quarantined_experiences"):
        database.execute(f"alter table {table} drop column turns")
    database.commit()
    assert SqlLog(storage).read(names[0]).column("turns").to_pylist() == [None]
    names.append(SqlLog(storage).commit([conversation(1)], explore_step=2, unit=0))
    log = SqlLog(storage)
    assert [log.read(name).column("uid").to_pylist() for name in names] == [["t/0/0/0/0"], ["t/0/1/0/0"]]
    assert log.read(names[1]).column("turns").to_pylist()[0][1]["env_state"] == "attic \u00e9"
    log.quarantine(names[0], "a test")
    database.close()


def test_a_person_can_query_the_database_while_the_run_writes(tmp_path: Path) -> None:
    log = SqlLog(open_storage(tmp_path), run="r")
    for step in (1, 2):
        commit_batch(log, step, 0)
    with sqlite3.connect(f"file:{tmp_path}/experiences.sqlite?mode=ro", uri=True) as database:
        query = "select explore_step, count(*), avg(reward) from experiences where folder = 'experiences' group by 1"
        assert database.execute(query).fetchall() == [(1, 4, 0.5), (2, 4, 0.5)]
        assert database.execute("pragma journal_mode").fetchone() == ("wal",)
    database.close()


def test_a_recreated_run_does_not_see_the_rows_of_the_first(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.sqlite"
    for folder in ("one", "two"):
        assert SqlLog(open_storage(tmp_path / folder), url).shards() == []
        commit_batch(SqlLog(open_storage(tmp_path / folder), url), 1, 0)
    (tmp_path / "one" / "experiences" / "DATABASE.json").unlink()
    assert find_whole(SqlLog(open_storage(tmp_path / "one"), url), 1, 0) is None


def test_a_writer_cannot_commit_other_rows_as_the_same_unit(tmp_path: Path) -> None:
    log = SqlLog(open_storage(tmp_path))
    name = commit_batch(log, 1, 0)
    with pytest.raises(StorageError, match=r"could not commit unit 0 of explore step 1 \(it committed others"):
        log.commit([experience(9)], explore_step=1, unit=0)
    assert log.shards() == [name]


def test_a_commit_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    log = SqlLog(open_storage(tmp_path))
    commit_batch(log, 1, 0)
    with sqlite3.connect(tmp_path / "experiences.sqlite") as database:
        when, then = "before insert on experiences when new.row = 3", "select raise(fail, 'no space')"
        database.execute(f"create trigger full {when} begin {then}; end")
    database.close()
    with pytest.raises(StorageError, match="no space"):
        commit_batch(log, 1, 1)
    assert find_whole(log, 1, 1) is None
    with sqlite3.connect(tmp_path / "experiences.sqlite") as database:
        assert database.execute("select count(*) from experiences").fetchone() == (4,)
    database.close()


def test_passwords_are_in_no_pickle_and_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_URL", "postgresql://me:hunter2@127.0.0.1:9/none?password=hunter2&connect_timeout=1")
    log = SqlLog(open_storage(tmp_path), "${oc.env:SECRET_URL}")
    assert b"hunter2" not in pickle.dumps(log)
    with pytest.raises(StorageError, match=r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:9/none failed") as failure:
        log.check()
    assert "hunter2" not in str(failure.value)
