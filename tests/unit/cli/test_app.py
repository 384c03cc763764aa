"""Promises of the command line: quick commands import little, and the tables show the help of the commands."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.cli.app import COMMANDS, LazyGroup, app
from rftdask.config import load_config
from rftdask.monitor.metrics import MetricsWriter
from rftdask.run.run_folder import open_run
from rftdask.storage import open_storage
from tests.integration.run_cases import call_cli
from tests.unit.buffer.buffer_cases import experience

ROOT = Path(__file__).parents[3]
GROUP: Any = typer.main.get_command(app)
PROGRAM = """
import sys
from rftdask.__main__ import main
sys.argv = ["rftdask", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
heavy = {"pydantic", "rftdask.config", "distributed", "numpy", "pandas", "pyarrow", "dask", "torch"}
heavy |= {"transformers", "vllm"}
print("imported:", *sorted(heavy & sys.modules.keys()))
"""


def imported(*arguments: str, **environment: str) -> list[str]:
    """The output of a command, with a last line that lists imported modules."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env={**os.environ, **environment}
    )
    return done.stdout.splitlines()


def commands(group: LazyGroup, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str, Any]]:
    """(names, listed help, imported command) of every command of a group and its subgroups."""
    loaded = [((*path, name), text, group.load(name)) for name, (_, text) in group.table.items()]
    return loaded + [
        row for names, _, command in loaded if isinstance(command, LazyGroup) for row in commands(command, names)
    ]


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_import_no_configuration(option: str) -> None:
    assert imported(option)[-1] == "imported:"


def test_completion_of_a_command_name_imports_no_configuration() -> None:
    shell = {"_RFTDASK_COMPLETE": "complete_bash", "COMP_WORDS": "rftdask va", "COMP_CWORD": "1"}
    assert imported(**shell) == ["validate", "imported:"]


def test_logs_do_not_import_dask(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "driver.log").write_text("a line\n")
    assert imported("logs", str(tmp_path)) == ["==> driver.log <==", "a line", "imported: pydantic rftdask.config"]


def test_status_imports_no_library_of_tables(tmp_path: Path) -> None:
    config = load_config(
        {
            "checkpoint_root_dir": str(tmp_path),
            "model": {"model_path": "tiny", "max_model_len": 64},
            "algorithm": {"repeat_times": 2},
            "buffer": {"batch_size": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        }
    )
    storage = open_storage(config.checkpoint_job_dir)
    open_run(storage, config)
    ParquetLog(storage).commit([experience(0, rollout) for rollout in range(2)], explore_step=1, unit=0)
    with MetricsWriter(storage, "eval") as metrics:
        metrics.write(0, {"accuracy": 0.5, "num_rollouts": 2.0})
    *lines, last = imported("status", storage.url)
    assert any("2 committed, 0 trained, 2 waiting" in line for line in lines), lines
    assert any(line.split() == ["accuracy", "50.0%"] for line in lines), lines
    assert last == "imported: pydantic rftdask.config"


def test_validate_imports_no_library_of_tables(tmp_path: Path) -> None:
    *lines, last = imported("validate", str(ROOT / "config" / "quickstart.yaml"), RFTDASK_RUNS=str(tmp_path))
    assert any(line.split() == ["stage", "quickstart/grpo"] for line in lines), lines
    assert last == "imported: pydantic rftdask.config"


def test_the_tables_list_the_help_of_their_commands() -> None:
    rows = commands(GROUP)
    assert {("run",), ("examples", "toy"), ("data", "refine")} <= {names for names, _, _ in rows}
    for names, text, command in rows:
        first = inspect.cleandoc(command.help).partition("\n\n")[0].replace("\n", " ")
        assert (names, first) == (names, text)


def test_help_lists_all_commands_except_the_alias() -> None:
    listed = call_cli("--help").out
    assert [name for name in COMMANDS if f"\n  {name} " not in listed] == ["log"]


def test_an_unknown_command_is_an_error_with_a_suggestion() -> None:
    ended = call_cli("validat", "run.yaml")
    assert ended.code == 2 and "validate" in ended.err, ended


def test_the_alias_of_trinity_users_works(tmp_path: Path) -> None:
    logs, log = call_cli("logs", str(tmp_path)), call_cli("log", str(tmp_path))
    assert logs == log and logs.code == 2 and "is not a run folder" in logs.err


def test_the_version_is_printed() -> None:
    ended = call_cli("--version")
    assert ended.code == 0 and ended.out.startswith("rftdask 0.")


def test_a_process_that_imported_duckdb_ends_without_output() -> None:
    asks = "import sys, duckdb; from rftdask.cli.app import main; sys.argv = ['rftdask', '--version']; main()"
    ended = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert ended.stderr == "", "DuckDB reports objects that Python has not collected as leaks"
