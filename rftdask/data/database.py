"""Database: the URL of one, as a config gives it, and an engine for it. What is in the database, its users know.

Invariant: a password comes from the environment, and is in no message.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from rftdask.config import fill_from_environment
from rftdask.errors import UserError


def database_url(text: str) -> sa.URL:
    """`text` completed from the environment. Raises: UserError: a variable is not set, or it is no URL."""
    try:
        url = sa.make_url(fill_from_environment(text))
    except ArgumentError:
        raise UserError(f"{text} is not the URL of a database; use postgresql://user@host/name") from None
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def open_engine(url: sa.URL, **options: Any) -> sa.Engine:
    """An engine that hides what it is given. Raises: UserError: no driver for the database is installed."""
    try:
        return sa.create_engine(url, hide_parameters=True, **options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f"no driver for {url.drivername} is installed ({error}); run `pip install 'rftdask[postgresql]'` for "
            "PostgreSQL, or use SQLite"
        ) from error


def shown(url: sa.URL) -> str:
    """The URL for a message: no password, and nothing of its query, which may have one."""
    return url.set(query={}).render_as_string(hide_password=True)
