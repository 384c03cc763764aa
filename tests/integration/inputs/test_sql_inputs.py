"""Tasks and supervised rows from database tables, in whole runs with fakes."""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from rftdask.buffer.batches.ledger import Ledger
from rftdask.reports.lineage.tables import RunTables
from rftdask.storage import open_storage
from tests.integration.run_cases import call_cli, finish, run_folder

SHORT = ("buffer.explorer_input.eval_tasksets=[]", "trainer.total_steps=3", "trainer.save_interval=3")
SFT = (
    "algorithm={algorithm_type: sft}",
    "mode=train",
    "buffer.batch_size=4",
    "trainer.save_interval=1",
    "buffer.trainer_input.experience_buffer.format={prompt_type: raw, prompt_key: question, response_key: answer}",
)


def to_table(file: Path, name: str) -> str:
    """Copy the rows of a JSON lines file to a table next to it, in reverse order; return the URL of the database."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    url = f"sqlite:///{file.parent}/rows.db"
    engine = sa.create_engine(url)
    text = [sa.Column(key, sa.Text) for key in rows[0]]
    table = sa.Table(name, sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), *text)
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(table.insert(), [{**row, "id": number} for number, row in enumerate(rows)][::-1])
    engine.dispose()
    return url


def trained(folder: Path) -> list[tuple[str, str]]:
    """Return (uid, prompt) in the order of training."""
    rows = RunTables(folder)
    experiences = {(r["shard"], r["row"]): r for r in rows.table("experiences").to_pylist()}
    order = sorted(rows.table("ledger").to_pylist(), key=lambda r: (r["step"], r["place"]))
    trained_rows = [experiences[line["shard"], line["row"]] for line in order]
    return [(row["uid"], row["prompt_text"]) for row in trained_rows]


@pytest.mark.slow
def test_a_taskset_in_a_table_is_run_row_by_row(config: Path, tmp_path: Path) -> None:
    at = "buffer.explorer_input.taskset"
    url = to_table(tmp_path / "tasks.jsonl", "sums")
    finish(config, *SHORT, f"{at}.name=sums", f"{at}.storage_type=sql", f"{at}.path={url}")
    assert trained(run_folder(config)) == [(f"sums/0/{n}/{k}/0", f"{n}+1=") for n in range(12) for k in range(2)]


@pytest.mark.slow
def test_sft_reads_a_table_and_refuses_a_changed_one(config: Path, tmp_path: Path) -> None:
    at = "buffer.trainer_input.experience_buffer"
    url = to_table(tmp_path / "tasks.jsonl", "shown")
    table = (*SFT, f"{at}.storage_type=sql", f"{at}.path={url}", f"{at}.subset_name=shown")
    finish(config, *SHORT[:1], *table, "trainer.total_steps=2")
    ledger = Ledger(open_storage(run_folder(config)))
    assert [entry.use[0].rows for step in (1, 2) if (entry := ledger.read(step))] == [(0, 1, 2, 3), (4, 5, 6, 7)]

    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("update shown set answer = '0' where id = 1")
    engine.dispose()
    again = call_cli("run", str(config), *SHORT[:1], *table, "trainer.total_steps=3")
    assert again.code == 2 and "taskset dataset: rows or their order changed" in again.err
