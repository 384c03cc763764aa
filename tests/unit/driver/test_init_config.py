"""Promises of the first steps: the schema explains every key and accepts valid configurations, `rftdask init` writes a
configuration that loads, and bundled files are found, described and copied.
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

from rftdask.cluster.job_shapes import Capacity
from rftdask.config import load_config
from rftdask.driver.init_config import SCHEMA_FILE, FirstConfig, bundled, copy_bundled, describe, json_schema
from rftdask.errors import DataError, UserError
from tests.integration.run_cases import call_cli

CONFIGS = Path(__file__).parents[3] / "config"
SCHEMA = json_schema()
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


def test_the_schema_explains_every_key() -> None:
    sections = {"": SCHEMA, **SCHEMA["$defs"]}
    keys = {f"{name}.{key}": value for name, result in sections.items() for key, value in result["properties"].items()}
    assert len(keys) > 200
    assert [name for name, value in keys.items() if not value.get("description") and "$ref" not in value] == []


def test_the_bundled_schema_is_up_to_date() -> None:
    lines = "rftdask schema > config/rftdask.schema.json"
    assert json.loads((CONFIGS / SCHEMA_FILE).read_text()) == SCHEMA, f"write it again: {lines}"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_bundled_configurations_satisfy_the_schema(path: Path) -> None:
    above = "../" * (len(path.relative_to(CONFIGS).parts) - 1)
    assert path.read_text().startswith(f"# yaml-language-server: $schema={above}{SCHEMA_FILE}\n")
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "mistake",
    [
        {"trainer": {"num_rank": 2}},
        {"trainer": {"num_ranks": "two"}},
        {"buffer": {"total_epochs": [1]}},
        {"synchronizer": {"sync_style": 3}},
    ],
)
def test_the_schema_rejects_mistakes(mistake: dict[str, Any]) -> None:
    tree = yaml.safe_load((CONFIGS / "sft.yaml").read_text())
    for section, keys in mistake.items():
        tree[section] = {**tree.get(section, {}), **keys}
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(tree)


@pytest.mark.parametrize("where", ["laptop", "gpus", "slurm"])
def test_a_first_configuration_loads_with_its_columns(tmp_path: Path, where: str) -> None:
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
    with pytest.raises(UserError, match="already exists"):
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
def test_a_first_configuration_fits_the_nodes_of_its_partition(
    tmp_path: Path, node: Capacity, walltime: str, asked: tuple[str | None, int, str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1", "answer": "2"}\n')
    config = FirstConfig(str(tasks), "a/model", "slurm", node.partition, node).write(tmp_path / "run.yaml")
    for job in (config.cluster.slurm.trainer, config.cluster.slurm.explorer):
        assert (job.gres, job.cpus, job.memory) == asked and job.walltime == walltime


@pytest.mark.parametrize(
    ("file", "row", "lines"),
    [
        ("tasks.jsonl", '{"text": "x", "answer": 1}', "has the columns text, answer"),
        ("tasks.jsonl", "3", "where an object"),
        ("tasks.jsonl", "", "has no rows"),
        ("tasks.csv", "text,answer\nx,1\n", "has the columns text, answer"),
        ("tasks.csv", "", "has no rows"),
    ],
)
def test_tasks_without_a_question_are_rejected(tmp_path: Path, file: str, row: str, lines: str) -> None:
    tasks = tmp_path / file
    tasks.write_text(row)
    with pytest.raises(DataError, match=lines):
        FirstConfig(str(tasks), "a/model", "laptop").write(tmp_path / "run.yaml")
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(("sinfo", "cpus"), [("echo 'main*|2|8|gpu:2|64000|1-00:00:00'", 3), ("exit 1", 4), (None, 4)])
def test_init_reads_node_capacity_from_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sinfo: str | None, cpus: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # so that this machine's SLURM, if it has one, is not asked
    if sinfo is not None:
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{sinfo}\n")
        (tmp_path / "sinfo").chmod(0o755)
    ended = call_cli("init", "--yes", "--slurm", "main", "a.yaml")
    assert ended.code == 0, ended
    assert ("the nodes of partition main are not known here" in ended.err) == (sinfo == "exit 1")
    assert load_config("a.yaml").cluster.slurm.explorer.cpus == cpus


def test_init_prompts_for_missing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_init_shows_the_rewards_of_expected_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    ended = call_cli("init", "--yes", "--tasks", "tasks.jsonl")
    assert ended.code == 0 and ": reward of the expected answer: 1 on 1 row" in ended.out, ended


def test_bundled_files_are_described_and_copied(tmp_path: Path) -> None:
    files = bundled()
    assert {"config/sft.yaml", "examples/quickstart.py", "notebooks/quickstart.ipynb"} <= set(files)
    assert all(describe(path).strip() for path in files.values())
    assert describe(files["config/slurm/no-hetjobs.yaml"]).endswith("for engines of four GPUs each."), (
        "a whole sentence"
    )
    listed = call_cli("examples").out
    assert [name for name in files if listed.count(f"  {name}\n") != 1] == [], "in one group"
    assert re.match(r"On a laptop .*:\n  config/quickstart\.yaml\n", listed), listed
    [copied] = copy_bundled("sft", tmp_path / "new")
    assert copied.read_text() == files["config/sft.yaml"].read_text()
    with pytest.raises(UserError, match="already exists"):
        copy_bundled("sft.yaml", tmp_path / "new")
    with pytest.raises(UserError, match=r"'quickstart' matches several files: config/quickstart\.yaml, examples"):
        copy_bundled("quickstart", tmp_path)
    assert "main" in runpy.run_path(str(files["examples/quickstart.py"]))  # as `rftdask quickstart` does


def test_the_error_for_a_bundled_file_names_the_copy_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config/none.yaml", "sft.yaml"):
        ended = call_cli("validate", name)
        assert (ended.code, "bundled" in ended.err) == (2, False), ended
    for name in ("config/sft.yaml", "config/gpus/gpus-8.yaml"):
        ended = call_cli("validate", name)
        lines = re.search(r"does not exist here; `rftdask (.*)` copies the bundled file there", ended.err)
        assert ended.code == 2 and lines, ended
        assert call_cli(*lines[1].split()).code == 0
        assert call_cli("validate", name).code == 0


def test_a_bundled_folder_is_copied_completely(tmp_path: Path) -> None:
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
        with pytest.raises(UserError, match="no bundled file matches"):
            copy_bundled(name, tmp_path)
