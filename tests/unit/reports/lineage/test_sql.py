"""SQL over the tables of a run. Promises:

- queries over shards, ledger, metrics and manifests return the contents of the files, on any storage;
- every experience is trained, dropped for a reason, or waiting, and the counts equal those of the audit;
- a query reads only the tables it names; unreadable files are left out and reported;
- a moved run is read in its new place, with or without stages.
"""

import shutil
from collections import Counter

import duckdb
import pyarrow as pa
import pytest
from lineage_cases import EVIL, Case, experience, group, make_config, make_run, new_root
from rich.console import Console

from rftdask import Experiment
from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.errors import UserError
from rftdask.reports.lineage.sql import OVERVIEW, open_tables, query, to_csv, to_json, to_terminal
from rftdask.reports.lineage.tables import LEDGER_SCHEMA, POSITION_SCHEMA, TABLES, RunTables, row_states
from rftdask.reports.lineage.trace import trace
from rftdask.reports.run_reader import open_stages
from rftdask.run.run_folder import open_run, record_run
from rftdask.storage import open_storage
from rftdask.synchronizer.published import WEIGHTS_POINTER, move_pointer


def ask(url: str, sql: str) -> list[tuple]:
    tables = RunTables(url)
    rows = [tuple(row.values()) for row in query(tables, sql).to_pylist()]
    assert tables.problems == []
    return rows


def test_ledger_joined_with_experiences_gives_a_step_s_rows(case):
    rows = ask(
        case.url,
        "select uid, place from ledger join experiences using (stage, shard, row) "
        "where step = 2 and reason is null order by place",
    )
    assert rows == [("sums/0/2/0/0", 0), ("sums/0/2/1/0", 1), ("sums/0/3/0/0", 2)]
    dropped = ask(case.url, "select step, shard, row, place, reason from ledger where reason is not null")
    assert dropped == [(2, case.second.text, 3, None, "failed")], "a dropped row has a reason, but no place"


def test_experiences_have_all_columns_of_the_shards(case):
    rows = ask(
        case.url,
        "select stage, row, uid, status, reward, tokens, rollout_logprobs, error "
        f"from experiences where shard = '{case.second.text}' and row > 1",
    )
    assert rows == [
        ("run", 2, "sums/0/3/0/0", "ok", 0.0, [63, 68, 48], [-0.5, -2.5], ""),
        ("run", 3, "sums/0/3/1/0", "failed", None, [], [], "ValueError: no number"),
    ]


def test_the_other_tables_hold_metrics_and_manifests(case):
    assert ask(case.url, 'select stage, step, loss, "dropped/total" from steps') == [
        ("run", 1, 0.5, 0.0),
        ("run", 2, 0.25, 1.0),
    ]
    assert ask(case.url, "select stage, version, taskset, accuracy from evals") == [
        ("run", 0, "held_out", 0.1),
        ("run", 2, "held_out", 0.9),
    ]
    assert ask(case.url, "select stage, step, lineage, folder, num_files, size_bytes from checkpoints") == [
        ("run", 2, "main", "global_step_2", 2, 13)
    ]
    assert ask(case.url, "select version, lineage, folder, size_bytes from weights") == [
        (1, "main", "weights/1", 11),
        (2, "main", "weights/2", 11),
    ]


def test_a_checkpoint_identifies_removed_weights(case):
    (published,) = ask(case.url, "select content_hash from weights where version = 2")
    case.storage.remove("weights/2")
    rows = ask(case.url, "select folder, content_hash from weights where version = 2")
    assert rows == [("global_step_2", *published)]


def test_experiences_contain_the_hash_of_their_weights(case):
    rows = ask(
        case.url,
        "select uid, content_hash is not null from experiences left join weights "
        "on weights.content_hash = weights_hash and version = max_policy_version "
        "where explore_step = 2 order by uid",
    )
    assert rows == [("sums/0/4/0/0", True), ("sums/0/4/1/0", True), ("sums/0/5/0/0", True), ("sums/0/5/1/0", False)]


def test_experience_states_sum_up_to_the_audit(case):
    rows = ask(case.url, "select state, reason, count(*) from states group by all order by all")
    assert rows == [("dropped", "failed", 1), ("dropped", "repeat", 4), ("trained", None, 7), ("waiting", None, 4)]
    audit = audit_log(ParquetLog(case.storage), Ledger(case.storage), tasks_per_unit=2)
    assert (audit.trained, audit.waiting, audit.dropped) == (7, 4, {"failed": 1, "repeat": 4})


def counts_of(url: str) -> Counter[str]:
    return Counter(s["reason"] or s["state"] for s in RunTables(url).table("states").to_pylist())


def audited(case: Case) -> Counter[str]:
    counts = dict(open_stages(case.url)[0].counts)
    del counts["committed"]
    return +Counter(counts)


def test_counts_equal_the_audit_with_a_quarantined_shard(case):
    log = ParquetLog(case.storage)
    Ledger(case.storage).write(LedgerEntry(3, "main", (Rows(case.waiting.text, (0, 1)),), positions=((2, 0),)))
    case.storage.put(log.path(case.waiting), b"rotten")
    move_pointer(case.storage, WEIGHTS_POINTER, 3)  # the step is complete
    rest = {"trained": 9, "failed": 1, "repeat": 4}
    assert counts_of(case.url) == audited(case) == {**rest, "waiting": 2}, "nobody has looked yet"

    log.quarantine(case.waiting, "rotten")
    assert counts_of(case.url) == audited(case) == {**rest, "damaged": 2}

    versions = {"explore_step": 2, "min_policy_version": 1, "max_policy_version": 1}
    log.commit([*group(4, **versions), *group(5, **versions)], explore_step=2, unit=0)
    assert counts_of(case.url) == audited(case) == {**rest, "damaged": 2, "repeat": 6, "waiting": 2}
    lost = ask(case.url, f"select row, uid, state, step from states where shard = '{case.waiting.text}' order by row")
    assert lost == [
        (0, None, "trained", 3),
        (1, None, "trained", 3),
        (2, None, "dropped", None),
        (3, None, "dropped", None),
    ]

    assert "step 3 used the other copy (lineage main)" in trace(case.url, "sums/0/4/0/0").render()
    assert "waiting     no ledger entry names it yet" in trace(case.url, "sums/0/5/0/0").render()


@pytest.mark.parametrize("lost", ["taken", "repeated", "second"])
def test_counts_equal_the_audit_with_a_lost_shard(case, lost):
    log = ParquetLog(case.storage)
    if lost == "second":
        log.remove([case.second])  # by retention
    else:
        case.storage.put(log.path(getattr(case, lost)), b"rotten")
    assert counts_of(case.url) == audited(case) == {"trained": 7, "failed": 1, "repeat": 4, "waiting": 4}


def test_the_first_of_two_untaken_copies_is_waiting():
    def rows(shard: str) -> pa.Table:
        columns = {name: [getattr(e, name) for e in group(0)] for name in ("uid", "taskset", "epoch", "task_index")}
        places = {"stage": ["s"] * 2, "shard": [shard] * 2, "row": [0, 1], "explore_step": [1, 1], "slot": [0, 0]}
        return pa.table({**places, **columns})

    both = pa.concat_tables([rows("b"), rows("a")])
    states = row_states(both, LEDGER_SCHEMA.empty_table(), POSITION_SCHEMA.empty_table(), {}).to_pylist()
    assert [(s["shard"], s["row"], s["state"], s["reason"]) for s in states] == [
        ("b", 0, "dropped", "repeat"),
        ("b", 1, "dropped", "repeat"),
        ("a", 0, "waiting", None),
        ("a", 1, "waiting", None),
    ]


def test_the_copy_taken_by_the_trainer_counts(tmp_path):
    case = make_run(new_root("memory", tmp_path))
    case.storage.remove("ledger/main/00000001.json")
    Ledger(case.storage).write(LedgerEntry(1, "main", (Rows(case.repeated.text, (0, 1, 2, 3)),)))
    rows = ask(case.url, "select shard, state, reason from states where uid = 'sums/0/0/0/0' order by shard")
    assert rows == [(case.taken.text, "dropped", "repeat"), (case.repeated.text, "trained", None)]


def test_each_lineage_has_its_own_ledger_lines(case):
    Ledger(case.storage, "fork").write(LedgerEntry(2, "fork", (Rows(case.waiting.text, (0, 1)),)))
    rows = ask(case.url, "select lineage, step, count(*) from ledger group by all order by all")
    assert rows == [("fork", 2, 2), ("main", 1, 4), ("main", 2, 4)]
    assert ask(case.url, "select distinct state from states where uid = 'sums/0/4/0/0'") == [("trained",)]


def test_the_overview_has_a_line_for_each_explore_step(case):
    lines = query(RunTables(case.url), OVERVIEW).to_pylist()
    counts = [{name: row[name] for name in ("explored", "version", "rows", "trained", "dropped")} for row in lines]
    assert counts == [
        {"explored": 1, "version": 0, "rows": 12, "trained": 7, "dropped": 5},
        {"explored": 2, "version": 1, "rows": 4, "trained": 0, "dropped": 0},
    ]
    assert [(row["waiting"], row["step"]) for row in lines] == [(0, 2), (4, None)]


def test_eval_answers_have_their_own_table(case):
    log = ParquetLog(case.storage, "eval/held_out")
    log.commit([experience(9, 0, taskset="held_out", explore_step=0)], explore_step=0, unit=0)
    assert ask(case.url, "select uid from eval_experiences") == [("held_out/0/9/0/0",)]
    assert ask(case.url, "select count(*) from experiences where taskset = 'held_out'") == [(0,)]


def test_a_query_reads_only_the_tables_it_names(case):
    case.storage.put("ledger/main/00000002.json", b"damaged")
    assert ask(case.url, "select count(*) from experiences") == [(16,)]


def test_a_damaged_file_is_left_out_and_reported(case):
    case.storage.put("ledger/main/00000002.json", b"damaged")
    path = ParquetLog(case.storage).path(case.waiting)
    case.storage.put(path, case.storage.get(path)[:-9])
    tables = RunTables(case.url)
    sql = "select count(*) as n, count(uid) as readable from states"
    assert query(tables, sql).to_pylist() == [{"n": 16, "readable": 12}]
    assert [problem.split(" ")[0] for problem in tables.problems] == ["shard", "ledger/main/00000002.json"]
    with pytest.warns(UserWarning, match="left out: ledger/main/00000002.json is damaged"):
        Experiment(case.config).sql("select * from ledger")


def test_reading_changes_nothing(case):
    path = ParquetLog(case.storage).path(case.waiting)
    case.storage.put(path, b"damaged")
    RunTables(case.url).table("states")
    assert case.storage.get(path) == b"damaged"
    assert "quarantine/" not in case.storage.list("experiences")


def test_a_new_run_has_all_tables_without_rows(tmp_path):
    config = make_config(new_root("memory", tmp_path))
    open_run(open_storage(config.checkpoint_job_dir), config)
    connection = open_tables(config.checkpoint_job_dir)
    assert Counter(connection.sql(f"from {name}").fetchall() == [] for name in TABLES) == {True: len(TABLES)}
    assert query(RunTables(config.checkpoint_job_dir), OVERVIEW).num_rows == 0


def test_a_sql_error_is_a_user_error_that_lists_the_tables(case):
    with pytest.raises(UserError, match=r"(?s)nope.*tables: experiences, ledger, steps"):
        query(RunTables(case.url), "select * from nope")


def test_python_variables_are_not_tables(case):
    secret = pa.table({"a": [1]})
    with pytest.raises(duckdb.CatalogException, match="secret does not exist"):
        open_tables(case.url).sql("select * from secret")
    assert secret.num_rows == 1


def test_a_confined_statement_reaches_no_file(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.csv").write_text("secret")
    names = ("allowed_directories", "allowed_paths", "temp_directory", "memory_limit", "threads", "lock_configuration")
    settings = ", ".join(f"current_setting('{name}') as {name}" for name in names)
    [row] = query(RunTables(case.url), f"select {settings}", confined=True).to_pylist()
    assert (row["allowed_directories"], row["allowed_paths"], row["temp_directory"]) == ([], [], "")
    assert (row["memory_limit"], row["lock_configuration"]) == ("3.7 GiB", True) and row["threads"] <= 4
    for sql in ("select * from 'secret.csv'", "copy (select 1) to 'new.csv'"):
        with pytest.raises(UserError, match="disabled by configuration"):
            query(RunTables(case.url), sql, confined=True)
    assert [file.name for file in tmp_path.rglob("*.csv")] == ["secret.csv"]


def test_a_moved_run_with_stages_is_read_in_its_new_place(tmp_path):
    stages = [{"stage_name": "first"}, {"stage_name": "second"}]
    config = make_config(str(tmp_path / "old"), stages=stages)
    record_run(open_storage(config.checkpoint_job_dir), config)
    make_run("", config.stage_configs()[1])
    shutil.move(tmp_path / "old", tmp_path / "new")
    url = str(tmp_path / "new" / "p" / "run")
    assert ask(url, "select stage, count(*) from experiences group by all") == [("second", 16)]
    assert ask(f"{url}/second", "select stage, count(*) from experiences group by all") == [("second", 16)]


def test_an_experiment_gives_a_frame(case):
    frame = Experiment(case.config).sql("select uid, reward from experiences where explore_step = 2 order by uid")
    assert frame["uid"].tolist() == ["sums/0/4/0/0", "sums/0/4/1/0", "sums/0/5/0/0", "sums/0/5/1/0"]
    assert frame["reward"].tolist() == [0.0, 1.0, 0.0, 1.0]


# ---- output formats


def test_csv_and_json_contain_all_rows():
    table = pa.table({"a": [1, 2], "b": [[1.5], []], "c": [float("nan"), None]})
    assert to_csv(table) == "a,b,c\n1,[1.5],nan\n2,[],\n"
    expected = '[\n {\n  "a": 1,\n  "b": [\n   1.5\n  ],\n  "c": null\n },\n'
    assert to_json(table) == expected + ' {\n  "a": 2,\n  "b": [],\n  "c": null\n }\n]'


def test_escape_control_codes_in_model_text():
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(to_terminal(pa.table({"text": [EVIL, "[red]no markup[/red]"]})))
    shown = capture.get()
    assert "<script>alert('x')</script>\\x1b[2J\\u202e" in shown
    assert "[red]no markup[/red]" in shown
    assert "\x1b" not in shown


def test_a_long_table_is_cut_on_a_terminal():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(to_terminal(pa.table({"n": list(range(1001))}), max_rows=3))
    heads, _, *rows = capture.get().splitlines()
    assert [line.strip() for line in (heads, *rows)] == ["n", "0", "1", "2", "3 of 1,001 rows; --csv prints all"]
