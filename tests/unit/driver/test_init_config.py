"""Promises of the first steps: the schema explains every key and takes what runs take, `rftdask init` writes a
configuration that loads, and what comes with the package is found, described and copied.
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rftdask.cli.environment import check_environment
from rftdask.cluster.slurm_commands import Capacity
from rftdask.config import load_config
from rftdask.driver.init_config import SCHEMA_FILE, FirstConfig, bundled, copy_bundled, describe, json_schema
from rftdask.errors import DataError, UserError
from tests.integration.run_cases import call_cli

CONFIGS = Path(__file__).parents[3] / "config"


def test_the_schema_explains_every_key() -> None:
    schema = json_schema()
    sections = {"": schema, **schema["$defs"]}
    keys = {f"{name}.{key}": value for name, found in sections.items() for key, value in found["properties"].items()}
    assert len(keys) > 200
    assert [name for name, value in keys.items() if not value.get("description") and "$ref" not in value] == []


def test_the_schema_beside_the_configurations_is_that_of_the_code() -> None:
    told = "rftdask schema > config/rftdask.schema.json"
    assert json.loads((CONFIGS / SCHEMA_FILE).read_text()) == json_schema(), f"write it again: {told}"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_a_configuration_names_the_schema_and_keeps_to_it(path: Path) -> None:
    above = "../" * (len(path.relative_to(CONFIGS).parts) - 1)
    assert path.read_text().startswith(f"# yaml-language-server: $schema={above}{SCHEMA_FILE}\n")
    jsonschema.validate(yaml.safe_load(path.read_text()), json_schema())


@pytest.mark.parametrize(
    "mistake",
    [
        {"trainer": {"num_rank": 2}},
        {"trainer": {"num_ranks": "two"}},
        {"buffer": {"total_epochs": [1]}},
        {"synchronizer": {"sync_style": 3}},
    ],
)
def test_the_schema_sees_mistakes(mistake: dict[str, Any]) -> None:
    tree = yaml.safe_load((CONFIGS / "sft.yaml").read_text())
    for section, keys in mistake.items():
        tree[section] = {**tree.get(section, {}), **keys}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, json_schema())


@pytest.mark.parametrize("where", ["laptop", "gpus", "slurm"])
def test_a_first_configuration_loads_and_names_its_columns(tmp_path: Path, where: str) -> None:
    tasks = tmp_path / "my tasks.jsonl"
    tasks.write_text('{"id": 1, "problem": "1+1", "solution": "2"}\n')
    config = FirstConfig(str(tasks), "a/model", where, partition="gpu-long", name="mine").write(tmp_path / "run.yaml")
    taskset = config.buffer.explorer_input.train_tasksets[0]
    assert (taskset.path, taskset.format.prompt_key, taskset.format.response_key) == (str(tasks), "problem", "solution")
    assert (config.name, config.model.model_path) == ("mine", "a/model")
    assert config.buffer.batch_size == 1, "no more than there are tasks, which a run would refuse"
    assert config.cluster.slurm.trainer.partition == ("gpu-long" if where == "slurm" else None)
    text = (tmp_path / "run.yaml").read_text()
    jsonschema.validate(yaml.safe_load(text), json.loads((tmp_path / SCHEMA_FILE).read_text()))
    with pytest.raises(UserError, match="is there already"):
        FirstConfig(str(tasks), "a/model", where).write(tmp_path / "run.yaml")
    assert (tmp_path / "run.yaml").read_text() == text


def test_the_columns_of_a_csv_file_are_read_in_any_case(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.csv"
    tasks.write_text('Id,Question,Answer\n1,"one,\nand one",2\n')
    config = FirstConfig(str(tasks), "a/model", "laptop").write(tmp_path / "run.yaml")
    taskset = config.buffer.explorer_input.train_tasksets[0]
    assert (taskset.format.prompt_key, taskset.format.response_key) == ("Question", "Answer")
    assert config.buffer.batch_size == 1


@pytest.mark.parametrize(
    ("node", "walltime", "asked"),
    [
        (Capacity("main", 4, 8, 1, 16384, "1-00:00:00"), "08:00:00", ("gpu:1", 4, "12288MiB")),
        (Capacity("main", 2, 96, 8, 2_000_000, "04:00:00"), "04:00:00", ("gpu:1", 4, "32000MiB")),
        (Capacity("cpus", 2, 4, 0, 8000, "infinite"), "08:00:00", (None, 3, "6000MiB")),
    ],
)
def test_a_first_configuration_asks_for_no_more_than_a_node_of_its_partition_has(
    tmp_path: Path, node: Capacity, walltime: str, asked: tuple[str | None, int, str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1", "answer": "2"}\n')
    config = FirstConfig(str(tasks), "a/model", "slurm", node.partition, node).write(tmp_path / "run.yaml")
    for job in (config.cluster.slurm.trainer, config.cluster.slurm.explorer):
        assert (job.gres, job.cpus, job.memory) == asked and job.walltime == walltime


@pytest.mark.parametrize(
    ("file", "row", "told"),
    [
        ("tasks.jsonl", '{"text": "x", "answer": 1}', "has the columns text, answer"),
        ("tasks.jsonl", "3", "no JSON object"),
        ("tasks.jsonl", "", "no JSON"),
        ("tasks.csv", "text,answer\nx,1\n", "has the columns text, answer"),
        ("tasks.csv", "", "its first line has no columns"),
    ],
)
def test_tasks_without_a_question_are_told_and_nothing_is_written(
    tmp_path: Path, file: str, row: str, told: str
) -> None:
    tasks = tmp_path / file
    tasks.write_text(row)
    with pytest.raises(DataError, match=told):
        FirstConfig(str(tasks), "a/model", "laptop").write(tmp_path / "run.yaml")
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(("sinfo", "cpus"), [("echo 'main*|2|8|gpu:2|64000|1-00:00:00'", 3), ("exit 1", 4), (None, 4)])
def test_init_asks_slurm_for_what_a_node_has_where_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sinfo: str | None, cpus: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # so that this machine's SLURM, if it has one, is not asked
    if sinfo is not None:
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{sinfo}\n")
        (tmp_path / "sinfo").chmod(0o755)
    ended = call_cli("init", "--yes", "--slurm", "main", "a.yaml")
    assert ended.code == 0, ended
    assert ("what a node of main has is not known here" in ended.err) == (sinfo == "exit 1")
    assert load_config("a.yaml").cluster.slurm.explorer.cpus == cpus


def test_init_asks_for_what_it_was_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = call_cli("init", "--yes", "--slurm", "main", "a.yaml")
    assert ended.code == 0 and "rftdask submit a.yaml" in ended.out, ended
    assert load_config("a.yaml").cluster.type == "slurm"
    assert call_cli("init", "--yes", "a.yaml").code == 2
    asked = [sys.executable, "-m", "rftdask", "init", "b.yaml"]
    silent = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert silent.returncode == 2 and b"Traceback" not in silent.stderr and b"--yes" in silent.stderr, silent
    assert not Path("b.yaml").exists()


def test_what_comes_with_the_package_is_described_and_copied(tmp_path: Path) -> None:
    files = bundled()
    assert {"config/sft.yaml", "examples/quickstart.py", "notebooks/quickstart.ipynb"} <= set(files)
    assert all(describe(path).strip() for path in files.values())
    [copied] = copy_bundled("sft", tmp_path / "new")
    assert copied.read_text() == files["config/sft.yaml"].read_text()
    with pytest.raises(UserError, match="is there already"):
        copy_bundled("sft.yaml", tmp_path / "new")
    with pytest.raises(UserError, match=r"no one file 'quickstart'; there are: config/quickstart\.yaml, examples"):
        copy_bundled("quickstart", tmp_path)
    assert "main" in runpy.run_path(str(files["examples/quickstart.py"]))  # as `rftdask quickstart` does


def test_a_configuration_of_the_package_is_copied_by_the_command_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config/none.yaml", "sft.yaml"):
        ended = call_cli("validate", name)
        assert (ended.code, "of the package" in ended.err) == (2, False), ended
    for name in ("config/sft.yaml", "config/gpus/gpus-8.yaml"):
        ended = call_cli("validate", name)
        told = re.search(r"there is no file \S+; `rftdask (.*)` writes the package's there", ended.err)
        assert ended.code == 2 and told, ended
        assert call_cli(*told[1].split()).code == 0
        assert call_cli("validate", name).code == 0


def test_a_folder_is_copied_with_all_that_is_in_it(tmp_path: Path) -> None:
    for name in ("agents", "examples/agents"):
        copied = {str(path.relative_to(tmp_path / name)) for path in copy_bundled(name, tmp_path / name)}
        assert {
            "learn.py",
            "tool_loop.yaml",
            "with_openai/tool_loop.py",
            "over_http/agent.sh",
            "over_http/agent.mjs",
        } <= copied
        assert (tmp_path / name / "with_openai" / "tool_loop.py").is_file()
    for name in (".", "", "langgraph"):
        with pytest.raises(UserError, match="no one file"):
            copy_bundled(name, tmp_path)


def test_the_doctor_of_a_machine_tells_what_is_there() -> None:
    found = {finding.part: finding for finding in check_environment()}
    assert found["torch"].state == "ok" and found["rftdask"].text.startswith("0.")
    # Of SLURM it tells what is so: where its commands are and nobody answers them, it is broken.
    assert {finding.state for part, finding in found.items() if part != "SLURM"} <= {"ok", "missing"}


def test_a_command_that_asked_in_sql_ends_in_silence() -> None:
    asks = "import sys, duckdb; from rftdask.cli.app import main; sys.argv = ['rftdask', '--version']; main()"
    ended = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert ended.stderr == "", "DuckDB takes what Python has not collected for leaks"


def test_the_version_is_told() -> None:
    ended = call_cli("--version")
    assert ended.code == 0 and ended.out.startswith("rftdask 0.")
