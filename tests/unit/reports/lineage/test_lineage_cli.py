"""The commands experiences, trace, view and doctor. Promise: each prints the result of its function, and the exit code
shows success.
"""

import json

from typer.testing import CliRunner

from rftdask.cli.app import app
from rftdask.errors import DataError
from rftdask.reports.lineage.browse import Browser
from rftdask.reports.page.rendering import render_experiences

SQL = "select step, count(*) as n from ledger group by all order by all"


def test_experiences_prints_a_table_csv_or_json(case):
    call = ["experiences", case.url, "--sql", SQL]
    assert CliRunner().invoke(app, call).output.split()[-4:] == ["1", "4", "2", "4"]
    assert CliRunner().invoke(app, [*call, "--csv"]).output == "step,n\n1,4\n2,4\n"
    assert json.loads(CliRunner().invoke(app, [*call, "--json"]).output) == [{"step": 1, "n": 4}, {"step": 2, "n": 4}]


def test_experiences_without_sql_is_an_overview(case):
    done = CliRunner().invoke(app, ["experiences", case.url])
    assert done.exit_code == 0
    heads = ["stage", "explored", "version", "rows", "trained", "dropped", "waiting", "reward", "tokens", "step"]
    assert done.output.split()[: len(heads)] == heads


def test_experiences_lists_unreadable_files(case):
    case.storage.put("ledger/main/00000002.json", b"damaged")
    done = CliRunner().invoke(app, ["experiences", case.url, "--sql", SQL, "--csv"])
    assert done.stdout == "step,n\n1,4\n"
    assert done.stderr.startswith("warning: left out: ledger/main/00000002.json is damaged")


def test_trace_prints_the_history_of_an_experience(case):
    done = CliRunner().invoke(app, ["trace", case.url, "sums/0/2/0/0"])
    assert done.output.startswith("sums/0/2/0/0  (stage run)\n")
    assert isinstance(CliRunner().invoke(app, ["trace", case.url, "nope"]).exception, DataError)


def test_view_writes_a_page(case, tmp_path):
    file = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["view", case.url, "--html", str(file), "--limit", "3"])
    assert done.output == f"{file}\n"
    assert file.read_text(encoding="utf-8") == render_experiences(Browser(case.url), 3)


def test_doctor_says_what_a_storage_keeps():
    done = CliRunner().invoke(app, ["doctor", "memory://doctor-cli"])
    assert done.exit_code == 0
    assert done.output.startswith("storage memory://doctor-cli: nothing broken")


def test_doctor_fails_on_a_storage_that_is_not_safe(tmp_path):
    (tmp_path / "file").write_text("no folder can be made below a file")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "file" / "runs")])
    assert done.exit_code == 1
    assert "BROKEN: write and read" in done.output
