"""The experience log as tables of a database, SQLite or PostgreSQL, which people can query during the run.

`experiences` has one row per experience, with scalars as columns and arrays as little-endian blobs. `shards` has one
row per commit, unique in (log, explore step, batch, writer, part). Quarantined shards are in `quarantined_*`, and the
names of shards removed by retention in `removed_shards`. A commit is one transaction. A file of the run folder holds
the id of its log in the database, so a run that is removed and started again does not find the rows of the first.

SQLite works on one machine only: its write-ahead log needs memory that all processes share.
"""

from __future__ import annotations

import json
import math
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from rftdask.buffer.log.columns import SCHEMA, experiences_to_table, to_lines
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import Part, ShardName
from rftdask.data.database import database_url, open_engine, shown
from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage
from rftdask.storage.base import MAX_TRIES, Patience

FILE = "experiences.sqlite"
"""Default database, in the run folder."""
_MARKER = "DATABASE.json"
_BUSY_S = 30  # Seconds that a SQLite writer waits for another; a commit takes milliseconds.
_FEW_TRIES = 5  # Tries of a transaction in SQLite, which waits by itself, and of the check before a run starts.
_CREATE_LOCK = 7_237_231  # Id of the PostgreSQL advisory lock for creating tables: an arbitrary constant.
_DTYPES = {pa.int16(): "<i2", pa.int32(): "<i4", pa.float32(): "<f4"}  # Element types of arrays in blobs.

_Result = TypeVar("_Result")
_Work = Callable[[sa.Connection], _Result]
_INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite only auto-increments INTEGER
_metadata = sa.MetaData()


def _sql_type(kind: pa.DataType) -> sa.types.TypeEngine[Any]:
    if pa.types.is_integer(kind):
        return sa.BigInteger()
    if pa.types.is_floating(kind):
        return sa.Double()
    # Maps and lists of structs are JSON.
    return sa.LargeBinary() if pa.types.is_list(kind) and kind.value_type in _DTYPES else sa.Text()


def _shards_table(name: str, *items: sa.schema.SchemaItem, autoincrement: bool = False) -> sa.Table:
    """autoincrement: the database numbers the shards; a shard that moves to another table keeps its number."""
    numbers = ("explore_step", "batch", "num_rows", "min_policy_version", "max_policy_version", "crc32")
    return sa.Table(
        name,
        _metadata,
        sa.Column("id", _INTEGER, primary_key=True, autoincrement="auto" if autoincrement else False),
        sa.Column("log", sa.String(32), nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("writer", sa.String(32), nullable=False),
        sa.Column("part", sa.Text, nullable=False),  # as in a file name; empty for a whole work unit
        *(sa.Column(number, sa.BigInteger, nullable=False) for number in numbers),
        *items,
    )


def _rows_table(name: str, *items: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(
        name,
        _metadata,
        sa.Column("shard", _INTEGER, primary_key=True, autoincrement=False),
        sa.Column("row", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        *(sa.Column(field.name, _sql_type(field.type), nullable=field.nullable) for field in SCHEMA),
        # The whole row as a JSON line, if a column cannot hold its value, such as a text with NUL or a NaN.
        sa.Column("exact", sa.LargeBinary),
        *items,
    )


# One copy of a unit per writer: a commit that is retried after a lost confirmation cannot be there twice.
_once = sa.UniqueConstraint("log", "explore_step", "batch", "writer", "part")
_shards = _shards_table("shards", _once, autoincrement=True)
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

    Example: SqlLog(storage, "postgresql://me@host/experiments"); the URL may contain ${oc.env:NAME}.
    """

    suffix = "sql"

    def __init__(self, storage: Storage, url: str | None = None, folder: str = EXPERIENCES, run: str = "") -> None:
        """url: None uses a SQLite file in the run folder, which must be local.

        Raises: UserError: a variable in the URL is not set, or no driver for the database is installed.
        """
        super().__init__(folder, run)
        self._storage = storage
        self._url = url
        self._log = ""
        self._is_made = False  # True after this object has created all tables and columns.
        _ = self._engine  # now, so that a wrong URL is reported before anything begins

    def __getstate__(self) -> dict[str, Any]:
        # Without connections, and without the completed URL, which may contain a password.
        return {name: value for name, value in self.__dict__.items() if name != "_engine"}

    @cached_property
    def _engine(self) -> sa.Engine:
        if self._url is None:
            return _engine(sa.URL.create("sqlite", database=f"{self._storage.url}/{FILE}"))
        return _engine(database_url(self._url))

    def check(self) -> None:
        """Query a server. For SQLite do nothing: a query would create the file."""
        if self._engine.dialect.name != "sqlite":
            self._run("check", lambda connection: connection.execute(sa.select(1)), max_tries=_FEW_TRIES)

    def commit(
        self, experiences: Sequence[Experience], *, explore_step: int, unit: int, part: Part | None = None
    ) -> ShardName:
        """Insert the row of the shard and the rows of its experiences in one transaction."""
        table = experiences_to_table(experiences)
        data = to_lines(table)
        name = self._name(experiences, data, explore_step, unit, part)
        place = {"run": self.run, "folder": self.folder}
        shard = {**_columns_of(name), **place, "log": self._make_log()}
        rows = [{**row, **place} for row in _rows_of(table, data)]

        def insert(connection: sa.Connection) -> None:
            # The shard first: its unique constraint refuses a second copy.
            number = connection.execute(_shards.insert().returning(_shards.c.id), shard).scalar_one()
            if rows:
                connection.execute(_experiences.insert(), [{**row, "shard": number} for row in rows])

        try:
            self._run("commit", insert, write=True)
        except IntegrityError as error:
            # The shard exists if an earlier try succeeded and only its confirmation was lost.
            committed = self.find_all(explore_step, unit)
            if name not in committed:
                same = any((n.writer, n.part) == (self.writer, part) for n in committed)
                before = " (it committed others as this unit before)" * same
                raise StorageError(
                    f"{self._where()}: writer {self.writer} could not commit unit {unit} of explore step "
                    f"{explore_step}{before}: {error.orig}"
                ) from error
        return name

    def find_all(self, explore_step: int, unit: int) -> list[ShardName]:
        return self._names(_shards, _shards.c.explore_step == explore_step, _shards.c.batch == unit)

    def shards(self, first_step: int = 1) -> list[ShardName]:
        """Query all shards; [] while nothing was written, when the database may not exist."""
        return self._names(_shards, _shards.c.explore_step >= first_step)

    def read(self, name: ShardName, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all columns, because the checksum covers them. Raises: NotFoundError; DamagedError."""

        def select(connection: sa.Connection) -> Sequence[Mapping[str, Any]] | None:
            number = self._number(connection, name)
            # Reading does not alter tables: a column that an earlier version did not create has no values.
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
        # The checksum of a JSON lines file with these rows, which depends only on the values.
        crc32 = zlib.crc32(to_lines(table))
        if crc32 != name.crc32 or len(rows) != name.num_rows:
            raise DamagedError(
                f"shard {name.text} of {self._where()}: its {len(rows)} rows have crc32 {crc32:08x}: rows were changed"
            )
        return table

    def quarantine(self, name: ShardName, reason: str) -> None:
        """Move the shard and its rows to `quarantined_*`, with the reason, in one transaction."""
        self._move("quarantine", [name], _bad_shards, _bad_experiences, reason=reason)

    def _move(
        self, verb: str, names: Sequence[ShardName], shards_to: sa.Table, rows_to: sa.Table | None = None, **values: str
    ) -> None:
        """Move shards, with `values` of further columns, to another table in one transaction.

        rows_to: table for their rows; None: the rows are deleted.
        """

        def move(connection: sa.Connection) -> None:
            for name in names:
                number = self._number(connection, name)
                of_shard, of_rows = _shards.c.id == number, _experiences.c.shard == number
                shard = sa.select(_shards, *(sa.literal(value, sa.Text) for value in values.values())).where(of_shard)
                connection.execute(shards_to.insert().from_select([*_shards.c.keys(), *values], shard))
                if rows_to is not None:
                    rows = sa.select(_experiences).where(of_rows)
                    connection.execute(rows_to.insert().from_select(_experiences.c.keys(), rows))
                connection.execute(_experiences.delete().where(of_rows))
                connection.execute(_shards.delete().where(of_shard))

        if self._find_log():
            self._make_log()
            self._run(verb, move, write=True)

    def quarantined(self) -> list[ShardName]:
        return self._names(_bad_shards)

    def remove(self, names: Sequence[ShardName]) -> None:
        """Delete the rows; the shard moves to `removed_shards`, so that counts still add up."""
        self._move("remove", names, _removed_shards)

    def removed(self, first_step: int = 1) -> list[ShardName]:
        return self._names(_removed_shards, _removed_shards.c.explore_step >= first_step)

    def seal(self, num_explore_steps: int) -> None:
        log = self._make_log()

        def write(connection: sa.Connection) -> None:
            # Delete and insert work alike in every database, unlike an upsert.
            connection.execute(_seals.delete().where(_seals.c.log == log))
            connection.execute(_seals.insert(), {"log": log, "num_explore_steps": num_explore_steps})

        self._run("seal", write, write=True)

    def unseal(self) -> None:
        if log := self._find_log():
            self._run("unseal", lambda c: c.execute(_seals.delete().where(_seals.c.log == log)), write=True)

    def sealed_at(self) -> int | None:
        query = sa.select(_seals.c.num_explore_steps).where(_seals.c.log == self._find_log())
        return self._run("read", lambda c: c.execute(query).scalar()) if self._find_log() else None

    def _names(self, table: sa.Table, *where: sa.ColumnElement[bool]) -> list[ShardName]:
        if not self._find_log():
            return []
        query = sa.select(table).where(table.c.log == self._log, *where)
        return sorted(_name_of(row) for row in self._run("list", lambda c: c.execute(query).all()))

    def _number(self, connection: sa.Connection, name: ShardName) -> int | None:
        # All fields of the name, including the checksum, identify a shard.
        same = [_shards.c[column] == value for column, value in _columns_of(name).items()]
        return connection.execute(sa.select(_shards.c.id).where(_shards.c.log == self._log, *same)).scalar()

    def _find_log(self) -> str:
        """Return the id of this log in the database; "" while nothing was written to it."""
        if not self._log:
            try:
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
            # Of two concurrent writers one creates the id, and the other reads it below. The tables exist by then.
            self._storage.put_new(f"{self.folder}/{_MARKER}", json.dumps({"log": uuid.uuid4().hex}).encode())
        return self._find_log()

    def _run(self, verb: str, work: _Work[_Result], write: bool = False, max_tries: int = MAX_TRIES) -> _Result:
        """Run `work` in one transaction; retry while the database is busy or unreachable, for about a minute.

        Raises: IntegrityError: a unique constraint is violated; StorageError.
        """

        def once() -> _Result:
            with self._engine.connect().execution_options(rftdask_write=write) as connection, connection.begin():
                return work(connection)

        if self._engine.dialect.name == "sqlite":
            max_tries = _FEW_TRIES
        patience = Patience(
            f"{verb} in {self._where()}", lambda error: isinstance(error, OperationalError), max_tries=max_tries
        )
        try:
            return patience.call(once)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise StorageError(
                f"{verb} in {self._where()} failed ({patience.tries} tries): {str(error).partition(chr(10))[0]}; check "
                "that the database of the run can be reached and that this user may write to it"
            ) from error

    def _where(self) -> str:
        return shown(self._engine.url)


@cache
def _engine(url: sa.URL) -> sa.Engine:
    """Return the engine for all logs of this process. Raises: UserError: no driver is installed."""
    if url.drivername != "sqlite":
        return open_engine(url, pool_size=2, pool_pre_ping=True)
    # A connection per transaction: cheap for a file, and nothing stays open when the run folder is removed.
    engine = open_engine(url, poolclass=NullPool, connect_args={"timeout": _BUSY_S})

    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # otherwise the driver begins transactions implicitly
        connection.execute("PRAGMA journal_mode=WAL")  # readers and a writer do not wait for each other
        connection.execute("PRAGMA synchronous=FULL")  # a commit survives a power loss, as a put does

    def begin(connection: sa.Connection) -> None:
        # A transaction that reads first fails if another one writes before it does, so a writer locks from the start.
        write = connection.get_execution_options().get("rftdask_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    sa.event.listen(engine, "connect", prepare)
    sa.event.listen(engine, "begin", begin)
    return engine


def _create(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":  # two that create the same table concurrently would both fail
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))
    _metadata.create_all(connection)
    for table in (_experiences, _bad_experiences):
        for column in _missing(connection, table):  # all are nullable
            kind = column.type.compile(connection.dialect)
            connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}"))


def _missing(connection: sa.Connection, table: sa.Table) -> set[sa.Column[Any]]:
    """Return the columns that a table of an earlier minor version lacks."""
    existing = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
    return {column for column in table.c if column.name not in existing}


# ---- rows and tables

_SAME = ("explore_step", "writer", "num_rows", "min_policy_version", "max_policy_version", "crc32")
"""Columns of a shard with the same names as the fields of `ShardName`."""


def _columns_of(name: ShardName) -> dict[str, Any]:
    same = {column: getattr(name, column) for column in _SAME}
    return {**same, "batch": name.unit, "part": "" if name.part is None else name.part.text}


def _name_of(row: Any) -> ShardName:
    same = {column: getattr(row, column) for column in _SAME}
    part = Part.parse(*row.part.removeprefix("p").split("-")) if row.part else None
    return ShardName(**same, unit=row.batch, suffix=SqlLog.suffix, part=part)


def _rows_of(table: pa.Table, lines: bytes) -> list[dict[str, Any]]:
    """Return the rows for table `experiences`; `lines` are the same rows as JSON lines."""

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
        # Rare, so only such a row costs double. Queries see the plain values, `read` the exact ones.
        exact = None if all(map(_is_plain, values)) else line
        plain = [value.replace("\0", "") if isinstance(value, str) else value for value in values]
        rows.append({**dict(zip(columns, plain, strict=True)), "row": number, "exact": exact})
    return rows


def _is_plain(value: Any) -> bool:
    """Return True if every database stores the value exactly: no NUL in a text, no -0.0, infinity or NaN."""
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, float):
        return math.isfinite(value) and (value != 0.0 or math.copysign(1.0, value) > 0.0)
    return True


def _table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Inverse of `_rows_of`. Raises: ValueError, TypeError, KeyError, AttributeError, ArrowException: damaged rows."""
    exact = [None if row["exact"] is None else json.loads(row["exact"]) for row in rows]

    def from_sql(row: Mapping[str, Any], line: Mapping[str, Any] | None, field: pa.Field) -> Any:
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
