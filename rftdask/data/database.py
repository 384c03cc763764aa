"""Databases: URLs from the config, engines for them, and tables as datasets.

Invariants: passwords come from the environment and are in no message. `read_table` only reads, in one transaction, and
never creates a database.
"""

from __future__ import annotations

import datetime
import decimal
import difflib
import json
import uuid
from hashlib import blake2b
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from rftdask.config import fill_from_environment
from rftdask.errors import DataError, UserError


def database_url(text: str) -> sa.URL:
    """Parse `text`, completed from the environment. Raises: UserError: a variable is not set, or it is not a URL."""
    try:
        url = sa.make_url(fill_from_environment(text))
    except ArgumentError:
        raise UserError(f"{text} is not the URL of a database; use postgresql://user@host/name") from None
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def open_engine(url: sa.URL, **options: Any) -> sa.Engine:
    """Make an engine whose errors hide parameters. Raises: UserError: no driver for the database is installed."""
    try:
        return sa.create_engine(url, hide_parameters=True, **options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f"no driver for {url.drivername} is installed ({error}); run `pip install 'rftdask[postgresql]'` for "
            "PostgreSQL, or use SQLite"
        ) from error


def shown(url: sa.URL) -> str:
    """Format the URL for a message, without password and without query, which may contain one."""
    return url.set(query={}).render_as_string(hide_password=True)


def read_table(path: str, table: str) -> tuple[list[dict[str, Any]], str]:
    """Read the rows of `table`; return them with the fingerprint of their content.

    Args: path: URL of the database, with ${oc.env:NAME} in place of a password.
    Raises: DataError: it cannot be read, has no such table, or the table has no rows or no order; UserError: not a URL,
    or no driver.
    """
    url = database_url(path)
    where = f"dataset {shown(url)}, table {table!r}"
    if url.drivername == "sqlite":
        if not Path(url.database or "").is_file():
            raise DataError(f"{where}: the file {url.database} does not exist")
        # Read-only: the database is not ours.
        url = url.set(database=Path(url.database or "").absolute().as_uri(), query={"mode": "ro", "uri": "true"})
    engine = open_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            columns, rows = _read(connection, table, where)
    except (SQLAlchemyError, ValueError) as error:  # ValueError: invalid JSON in a JSON column
        first_line = str(error).partition("\n")[0]
        raise DataError(f"{where} cannot be read: {first_line}") from error
    if not rows:
        raise DataError(f"{where} has no rows")
    digest = blake2b(json.dumps([columns, [list(row.values()) for row in rows]], default=str).encode(), digest_size=16)
    return rows, digest.hexdigest()


def _read(connection: sa.Connection, name: str, where: str) -> tuple[list[str], list[dict[str, Any]]]:
    inspector = sa.inspect(connection)
    schema, _, bare = name.rpartition(".")
    known = [*inspector.get_table_names(schema or None), *inspector.get_view_names(schema or None)]
    if bare not in known:
        near = ", ".join(difflib.get_close_matches(bare, known) or sorted(known)[:5])
        raise DataError(f"{where}: the table does not exist; the database has {near or 'no tables'}")
    table = sa.Table(bare, sa.MetaData(), schema=schema or None, autoload_with=connection)
    order: list[Any] = list(table.primary_key.columns)
    if not order and connection.dialect.name == "sqlite" and bare in inspector.get_table_names():
        # SQLite numbers the rows of tables, but not of views.
        order = [sa.text("rowid")]
    if not order:
        raise DataError(f"{where} has no primary key, so its rows have no order; give it one")

    def plain(value: Any, column: str) -> Any:
        # As in a JSON file.
        if isinstance(value, decimal.Decimal):
            return int(value) if value == value.to_integral_value() else float(value)
        if isinstance(value, datetime.date | datetime.time | datetime.timedelta | uuid.UUID):
            return str(value)
        if isinstance(value, bytes | memoryview):
            raise DataError(f"{where}: column {column!r} holds bytes; leave it out with a view, or store text or JSON")
        return value

    rows = connection.execute(sa.select(table).order_by(*order)).mappings()
    return list(table.columns.keys()), [{key: plain(value, key) for key, value in row.items()} for row in rows]
