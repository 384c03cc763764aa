"""Promises of datasets in a database, here SQLite."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from rftdask.data.datasets import Dataset, open_dataset
from rftdask.errors import DataError, UserError

ROWS = ((2, "1+2?", "3", '["b"]'), (1, "1+1?", "2", '[{"role": "user"}]'))


def execute(folder: Path, *statements: str) -> str:
    """Run the statements in a database of the folder; return its URL."""
    url = f"sqlite:///{folder}/rows.db"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()
    return url


def fill(folder: Path, key: str = "primary key", table: str = "sums") -> str:
    values = ", ".join(f"({number}, '{q}', '{a}', '{chat}')" for number, q, a, chat in ROWS)
    create = f"create table {table} (id integer {key}, question text, answer decimal(4, 1), chat json)"
    return execute(folder, create, f"insert into {table} values {values}")


def questions(dataset: Dataset) -> list[str]:
    return [dataset[index]["question"] for index in range(len(dataset))]


def test_rows_are_ordered_by_primary_key_with_plain_values(tmp_path: Path) -> None:
    dataset = open_dataset(fill(tmp_path), table="sums")
    assert questions(dataset) == ["1+1?", "1+2?"]
    assert dataset[0] == {"id": 1, "question": "1+1?", "answer": 2, "chat": [{"role": "user"}]}
    assert dataset.columns == ("id", "question", "answer", "chat")


def test_a_table_without_key_is_ordered_and_a_view_is_not(tmp_path: Path) -> None:
    url = fill(tmp_path, key="")
    assert questions(open_dataset(url, table="sums")) == ["1+2?", "1+1?"]
    execute(tmp_path, "create view hard as select * from sums")
    with pytest.raises(DataError, match="'hard' has no primary key, so its rows have no order"):
        open_dataset(url, table="hard")


def test_a_changed_table_is_another_dataset(tmp_path: Path) -> None:
    url = fill(tmp_path)
    before = open_dataset(url, table="sums").fingerprint
    (tmp_path / "b").mkdir()
    assert open_dataset(fill(tmp_path / "b", table="again"), table="again").fingerprint == before
    execute(tmp_path, "update sums set answer = 4 where id = 2")
    assert open_dataset(url, table="sums").fingerprint != before


def test_unreadable_tables_are_named(tmp_path: Path) -> None:
    url = fill(tmp_path)
    execute(
        tmp_path, "create table nobody (id integer primary key)", "create table raw (id integer primary key, x blob)"
    )
    execute(tmp_path, "insert into raw values (1, x'00ff')", "update sums set chat = '[' where id = 2")
    for table, message in {
        "sum": "the table does not exist; the database has sums",
        "nobody": "has no rows",
        "raw": "column 'x' holds bytes",
        "sums": "cannot be read: ",
    }.items():
        with pytest.raises(DataError, match=message) as failure:
            open_dataset(url, table=table)
        assert f"dataset {url}, table {table!r}" in str(failure.value)


def test_a_missing_database_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(f"sqlite:///{tmp_path}/none.db", table="sums")
    assert list(tmp_path.iterdir()) == []


def test_a_password_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS_URL", "postgresql://me:hunter2@127.0.0.1:9/none?connect_timeout=5")
    with pytest.raises(DataError, match=r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:9/none, table 'sums'") as failure:
        open_dataset("${oc.env:ROWS_URL}", table="sums")
    assert "hunter2" not in str(failure.value)
    with pytest.raises(UserError, match=r"sums\.db is not the URL of a database"):
        open_dataset("sums.db", table="sums")
