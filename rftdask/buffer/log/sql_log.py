"""The experience log as tables of a database, SQLite or PostgreSQL, for people to query while the run goes on.

`experiences` has a row for each experience, its scalars as columns, its arrays as little-endian blobs; `shards` has a
row for each commit, unique in (log, explore step, batch, writer, part). What was set aside is in `quarantined_*`, the
names of what retention removed in `removed_shards`. A commit is one transaction. Which log of a database belongs to a
run folder is told by a file of the folder, so a run that is removed and begun again does not find the rows of the one
before.

SQLite is for one machine: its write-ahead log needs memory that all processes share.
"""

from __future__ import annotations

import json
import math
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from rftdask.buffer.log.file_log import to_lines
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.schema import SCHEMA, Experience, experiences_to_table
from rftdask.buffer.log.shard import Part, ShardName, shard_name
from rftdask.data.database import database_url, open_engine, shown
from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage
from rftdask.storage.base import Patience

FILE = "experiences.sqlite"
"""The database of a run that names none, in its folder."""
_MARKER = "DATABASE.json"
_SUFFIX = "sql"
_BUSY_S = 30  # A writer waits so long for another; a commit takes milliseconds.
_MAX_TRIES = 5  # Of a transaction, when the database is busy or the connection was lost.
_CREATE_LOCK = 7_237_231  # Number of the PostgreSQL lock under which tables are made; any constant will do.
_DTYPES = {pa.int16(): "<i2", pa.int32(): "<i4", pa.float32(): "<f4"}  # Elements of an array in a blob.

_Result = TypeVar("_Result")
_Work = Callable[[sa.Connection], _Result]
_INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # only INTEGER counts up by itself there
_metadata = sa.MetaData()


def _sql_type(kind: pa.DataType) -> sa.types.TypeEngine[Any]:
    if pa.types.is_integer(kind):
        return sa.BigInteger()
    if pa.types.is_floating(kind):
        return sa.Double()
    # Maps and lists of structs are JSON.
    return sa.LargeBinary() if pa.types.is_list(kind) and kind.value_type in _DTYPES else sa.Text()


def _shards_table(name: str, *more: sa.schema.SchemaItem, counts: bool = False) -> sa.Table:
    """counts: whether the database numbers the shards; a shard that is set aside keeps its number."""
    numbers = ("explore_step", "batch", "num_rows", "min_policy_version", "max_policy_version", "crc32")
    return sa.Table(
        name,
        _metadata,
        sa.Column("id", _INTEGER, primary_key=True, autoincrement="auto" if counts else False),
        sa.Column("log", sa.String(32), nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("writer", sa.String(32), nullable=False),
        sa.Column("part", sa.Text, nullable=False),  # as in the name of a file; empty for a whole work unit
        *(sa.Column(number, sa.BigInteger, nullable=False) for number in numbers),
        *more,
    )


def _rows_table(name: str, *more: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(
        name,
        _metadata,
        sa.Column("shard", _INTEGER, primary_key=True, autoincrement=False),
        sa.Column("row", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        *(sa.Column(field.name, _sql_type(field.type), nullable=field.nullable) for field in SCHEMA),
        # The row as a JSON line where a column cannot hold all of it: a NUL in a text, a number that is none.
        sa.Column("exact", sa.LargeBinary),
        *more,
    )


# One copy of a unit by each writer: a commit that is tried again after a lost confirmation cannot stand there twice.
_once = sa.UniqueConstraint("log", "explore_step", "batch", "writer", "part")
_shards = _shards_table("shards", _once, counts=True)
_experiences = _rows_table("experiences", sa.Index("experiences_uid", "uid"))
_bad_shards = _shards_table("quarantined_shards", sa.Column("reason", sa.Text, nullable=False))
_bad_experiences = _rows_table("quarantined_experiences")
_removed_shards = _shards_table("removed_shards")
_seals = sa.Table(
    "seals",
    _metadata,
    sa.Column("log", sa.String(32), primary_key=True),
    sa.Column("num_explore_steps", sa.BigInteger, nullable=False),
)


class SqlLog(ExperienceLog):
    """The log `folder` of a run in a database.

    Example: SqlLog(storage, "postgresql://me@host/experiments"); the URL may name variables of the environment.
    """

    def __init__(self, storage: Storage, url: str | None = None, folder: str = EXPERIENCES, run: str = "") -> None:
        """url: None for a SQLite file in the run folder, which must then be local.

        Raises: UserError: a variable that the URL names is not set, or no driver for the database is installed.
        """
        super().__init__(folder, run)
        self._storage = storage
        self._url = url
        self._log = ""
        self._is_made = False  # Whether this object has seen to it that the tables have all columns.
        _ = self._engine  # now, so that a wrong URL is told before anything begins

    def __getstate__(self) -> dict[str, Any]:
        """Without the connections, and without the URL as it was completed, which may have a password."""
        return {name: value for name, value in self.__dict__.items() if name != "_engine"}

    @cached_property
    def _engine(self) -> sa.Engine:
        if self._url is None:
            return _engine(sa.URL.create("sqlite", database=f"{self._storage.url}/{FILE}"))
        return _engine(database_url(self._url))

    def check(self) -> None:
        """One query of a server; nothing for SQLite, which makes its file at the first write."""
        # SQLite would make the file.
        if self._engine.dialect.name != "sqlite":
            self._run("check", lambda connection: connection.execute(sa.select(1)))

    def commit(
        self, experiences: Sequence[Experience], *, explore_step: int, unit: int, part: Part | None = None
    ) -> ShardName:
        """One transaction: the row of the shard and the rows of its experiences."""
        table = experiences_to_table(experiences)
        data = to_lines(table)
        name = shard_name(experiences, data, explore_step=explore_step, unit=unit, writer=self.writer, suffix=_SUFFIX)
        name = replace(name, part=part)
        place = {"run": self.run, "folder": self.folder}
        shard = {**_columns_of(name), **place, "log": self._make_log()}
        rows = [{**row, **place} for row in _rows_of(table, data)]

        def insert(connection: sa.Connection) -> None:
            # The shard first: its unique constraint refuses a second copy before any row is written.
            number = connection.execute(_shards.insert().returning(_shards.c.id), shard).scalar_one()
            if rows:
                connection.execute(_experiences.insert(), [{**row, "shard": number} for row in rows])

        try:
            self._run("commit", insert, write=True)
        except IntegrityError as error:
            # Ours, if an earlier try was done and only its confirmation was lost: a writer commits a unit once.
            found = self.find_all(explore_step, unit)
            if name not in found:
                same = any((n.writer, n.part) == (self.writer, part) for n in found)
                before = " (it committed others as this unit before)" * same
                raise StorageError(
                    f"{self._where()}: writer {self.writer} could not commit unit {unit} of explore step "
                    f"{explore_step}{before}: {error.orig}"
                ) from error
        return name

    def find_all(self, explore_step: int, unit: int) -> list[ShardName]:
        """One query, by the explore step and the unit (column `batch`, as it was called first)."""
        return self._names(_shards, _shards.c.explore_step == explore_step, _shards.c.batch == unit)

    def shards(self, first_step: int = 1) -> list[ShardName]:
        """One query; empty while nothing was written, and the database need not exist then."""
        return self._names(_shards, _shards.c.explore_step >= first_step)

    def read(self, name: ShardName, columns: Sequence[str] | None = None) -> pa.Table:
        """Always all columns: the checksum is over all the fields. Raises: NotFoundError; DamagedError: rows were
        changed.
        """

        def select(connection: sa.Connection) -> Sequence[Mapping[str, Any]] | None:
            number = self._number(connection, name)
            # Who only reads changes no table: a column that an earlier version did not make has no values.
            missing = set() if self._is_made else _missing(connection, _experiences)
            columns = [column for column in _experiences.c if column not in missing]
            query = sa.select(*columns).where(_experiences.c.shard == number).order_by(_experiences.c.row)
            return None if number is None else connection.execute(query).mappings().all()  # type: ignore[return-value]

        rows = self._run("read", select) if self._find_log() else None
        if rows is None:
            raise NotFoundError(f"{self._where()} has no shard {name.text}")
        try:
            table = _table_of(rows)
        except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException) as error:
            raise DamagedError(f"shard {name.text} of {self._where()}: {error!r}") from error
        # The same checksum as of a JSON file with these rows: it is over the values, whatever the database made of
        # them.
        crc32 = zlib.crc32(to_lines(table))
        if crc32 != name.crc32 or len(rows) != name.num_rows:
            raise DamagedError(
                f"shard {name.text} of {self._where()}: its {len(rows)} rows have crc32 {crc32:08x}: rows were changed"
            )
        return table

    def quarantine(self, name: ShardName, reason: str) -> None:
        """Move shard and rows to `quarantined_*`, with the reason, in one transaction."""
        self._move("quarantine", [name], _bad_shards, _bad_experiences, reason=reason)

    def _move(
        self, verb: str, names: Sequence[ShardName], shards_to: sa.Table, rows_to: sa.Table | None = None, **more: str
    ) -> None:
        """Move shards into another table, all in one transaction; their rows too, or they go."""

        def move(connection: sa.Connection) -> None:
            for name in names:
                number = self._number(connection, name)
                of_shard, of_rows = _shards.c.id == number, _experiences.c.shard == number
                shard = sa.select(_shards, *(sa.literal(value, sa.Text) for value in more.values())).where(of_shard)
                connection.execute(shards_to.insert().from_select([*_shards.c.keys(), *more], shard))
                if rows_to is not None:
                    rows = sa.select(_experiences).where(of_rows)
                    connection.execute(rows_to.insert().from_select(_experiences.c.keys(), rows))
                # Rows first, and both in this transaction: a shard without its rows is never seen.
                connection.execute(_experiences.delete().where(of_rows))
                connection.execute(_shards.delete().where(of_shard))

        if self._find_log():
            self._make_log()
            self._run(verb, move, write=True)

    def quarantined(self) -> list[ShardName]:
        """The rows of `quarantined_shards` that are of this log."""
        return self._names(_bad_shards)

    def remove(self, names: Sequence[ShardName]) -> None:
        """Delete the rows; the shard itself moves to `removed_shards`, so that counts still add up."""
        self._move("remove", names, _removed_shards)

    def removed(self, first_step: int = 1) -> list[ShardName]:
        """The rows of `removed_shards` from this explore step on."""
        return self._names(_removed_shards, _removed_shards.c.explore_step >= first_step)

    def seal(self, num_explore_steps: int) -> None:
        """One row; a log that is sealed again has the later number."""
        log = self._make_log()

        def write(connection: sa.Connection) -> None:
            # Delete and insert, which every database knows alike; together they are one transaction.
            connection.execute(_seals.delete().where(_seals.c.log == log))
            connection.execute(_seals.insert(), {"log": log, "num_explore_steps": num_explore_steps})

        self._run("seal", write, write=True)

    def unseal(self) -> None:
        """Deletes the row of this log."""
        if log := self._find_log():
            self._run("unseal", lambda c: c.execute(_seals.delete().where(_seals.c.log == log)), write=True)

    def sealed_at(self) -> int | None:
        """None while this log has no row in `seals`."""
        query = sa.select(_seals.c.num_explore_steps).where(_seals.c.log == self._find_log())
        return self._run("read", lambda c: c.execute(query).scalar()) if self._find_log() else None

    def _names(self, table: sa.Table, *where: sa.ColumnElement[bool]) -> list[ShardName]:
        if not self._find_log():
            return []
        # A database may hold many runs; `log` is the id in this run's folder.
        query = sa.select(table).where(table.c.log == self._log, *where)
        return sorted(_name_of(row) for row in self._run("list", lambda c: c.execute(query).all()))

    def _number(self, connection: sa.Connection, name: ShardName) -> int | None:
        # By all fields of the name, the checksum with them: a name is the identity of a shard in every kind of log.
        same = [_shards.c[column] == value for column, value in _columns_of(name).items()]
        return connection.execute(sa.select(_shards.c.id).where(_shards.c.log == self._log, *same)).scalar()

    def _find_log(self) -> str:
        """The id of this log in the database; empty while nobody has written to it."""
        if not self._log:
            try:
                # Kept from then on: the id of a log never changes.
                self._log = str(json.loads(self._storage.get(f"{self.folder}/{_MARKER}"))["log"])
            except NotFoundError:
                return ""
            except (ValueError, KeyError, TypeError) as error:
                raise DamagedError(
                    f"{self._storage.url}/{self.folder}/{_MARKER} is damaged; it must be "
                    f'{{"log": "<as in the table shards>"}}'
                ) from error
        return self._log

    def _make_log(self) -> str:
        if not self._is_made:
            self._run("create", _create, write=True)
            self._is_made = True
        if not self._find_log():
            # Two writers may both come here first: one id wins, and the other reads it below. The tables exist by then.
            self._storage.put_new(f"{self.folder}/{_MARKER}", json.dumps({"log": uuid.uuid4().hex}).encode())
        return self._find_log()

    def _run(self, verb: str, work: _Work[_Result], write: bool = False) -> _Result:
        """`work` as one transaction, tried again while the database is busy or not reached.

        Raises: IntegrityError: what it writes exists; StorageError.
        """

        def once() -> _Result:
            with self._engine.connect().execution_options(rftdask_write=write) as connection, connection.begin():
                return work(connection)

        patience = Patience(verb, lambda error: isinstance(error, OperationalError), max_tries=_MAX_TRIES)
        try:
            return patience.call(once)  # a transaction that was cut off left nothing, or all of what it wrote
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise StorageError(
                f"{verb} in {self._where()} failed: {str(error).partition(chr(10))[0]}; check that the database of "
                "the run is there and that this user may write to it"
            ) from error

    def _where(self) -> str:
        return shown(self._engine.url)


@cache
def _engine(url: sa.URL) -> sa.Engine:
    """One for all logs of a process. Raises: UserError: no driver is installed."""
    if url.drivername != "sqlite":
        return open_engine(url, pool_size=2, pool_pre_ping=True)
    # A connection for each transaction: cheap for a file, and nothing stays open when the run folder goes.
    engine = open_engine(url, poolclass=NullPool, connect_args={"timeout": _BUSY_S})

    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # else the driver begins transactions as it likes
        connection.execute("PRAGMA journal_mode=WAL")  # readers and a writer do not wait for each other
        connection.execute("PRAGMA synchronous=FULL")  # a commit survives a power loss, as a put does

    def begin(connection: sa.Connection) -> None:
        # A transaction that reads first and then writes fails at once if another wrote in between; so it writes from
        # the start, and waits its turn.
        write = connection.get_execution_options().get("rftdask_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    sa.event.listen(engine, "connect", prepare)
    sa.event.listen(engine, "begin", begin)
    return engine


def _create(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":  # two that make the same table at once would both fail
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))
    _metadata.create_all(connection)
    for table in (_experiences, _bad_experiences):
        for column in _missing(connection, table):  # all of them may be null
            kind = column.type.compile(connection.dialect)
            connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}"))


def _missing(connection: sa.Connection, table: sa.Table) -> set[sa.Column[Any]]:
    """The columns that a table lacks, which an earlier minor version has made."""
    there = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
    return {column for column in table.c if column.name not in there}


# ---- rows and tables

_SAME = ("explore_step", "writer", "num_rows", "min_policy_version", "max_policy_version", "crc32")
"""Columns of a shard that are called as the fields of its name."""


def _columns_of(name: ShardName) -> dict[str, Any]:
    same = {column: getattr(name, column) for column in _SAME}
    return {**same, "batch": name.unit, "part": "" if name.part is None else name.part.text}


def _name_of(row: Any) -> ShardName:
    same = {column: getattr(row, column) for column in _SAME}
    part = Part.parse(*row.part.removeprefix("p").split("-")) if row.part else None
    return ShardName(**same, unit=row.batch, suffix=_SUFFIX, part=part)


def _rows_of(table: pa.Table, lines: bytes) -> list[dict[str, Any]]:
    """The rows for `experiences`; `lines` are the same as JSON lines."""

    def to_sql(column: pa.ChunkedArray) -> list[Any]:
        if pa.types.is_map(column.type):
            return [json.dumps(dict(pairs)) for pairs in column.to_pylist()]
        if not pa.types.is_list(column.type):
            return list(column.to_pylist())
        if column.type.value_type not in _DTYPES:
            return [None if value is None else json.dumps(value) for value in column.to_pylist()]
        dtype = _DTYPES[column.type.value_type]
        return [None if not value.is_valid else np.asarray(value.values).astype(dtype).tobytes() for value in column]

    columns = {field.name: to_sql(table.column(field.name)) for field in SCHEMA}
    rows = []
    for number, (line, *values) in enumerate(zip(lines.split(b"\n")[:-1], *columns.values(), strict=True)):
        # Rare, so the row costs double only then; queries see the plain values, `read` the exact ones.
        exact = None if all(map(_is_plain, values)) else line
        plain = [value.replace("\0", "") if isinstance(value, str) else value for value in values]
        rows.append({**dict(zip(columns, plain, strict=True)), "row": number, "exact": exact})
    return rows


def _is_plain(value: Any) -> bool:
    """True if every database gives the value back as it is: no NUL in a text, no -0.0, no infinity, no NaN."""
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, float):
        return math.isfinite(value) and (value != 0.0 or math.copysign(1.0, value) > 0.0)
    return True


def _table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Inverse of `_rows_of`. Raises: ValueError, TypeError, KeyError, AttributeError, ArrowException: it cannot be."""
    exact = [None if row["exact"] is None else json.loads(row["exact"]) for row in rows]

    def from_sql(row: Mapping[str, Any], line: Mapping[str, Any] | None, field: pa.Field) -> Any:
        # A row that a column could not hold as it was has all of it in `exact`.
        value: Any = row.get(field.name) if line is None else line.get(field.name)
        if pa.types.is_map(field.type):
            return list((json.loads(value) if line is None else value).items())
        if line is None and pa.types.is_list(field.type):
            if field.type.value_type in _DTYPES:
                return None if value is None else np.frombuffer(value, _DTYPES[field.type.value_type])
            return None if value is None else json.loads(value)
        return value

    columns = {
        field.name: pa.array([from_sql(row, line, field) for row, line in zip(rows, exact, strict=True)], field.type)
        for field in SCHEMA
    }
    return pa.table(columns, schema=SCHEMA)
