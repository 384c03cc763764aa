"""Bundled files, the JSON Schema with which editors complete a configuration, and a first configuration from a few
answers.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import textwrap
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from rftdask.cluster.job_shapes import Capacity, hours
from rftdask.config import Config, load_config
from rftdask.config.base import Section
from rftdask.errors import DataError, UserError

SCHEMA_FILE = "rftdask.schema.json"
GSM8K = "openai/gsm8k"
"""Default tasks: 7,473 questions of school mathematics."""
_QUESTIONS = ("question", "prompt", "problem", "instruction", "query", "input")
_ANSWERS = ("answer", "response", "solution", "target", "output", "completion", "label")
"""Usual column names of datasets, in any letter case, the most likely first."""


def bundled() -> dict[str, Path]:
    """Return the bundled files by name: "config/sft.yaml", "examples/quickstart.py", "notebooks/..."."""
    package = Path(__file__).parent.parent
    # In a wheel they are in the package; in a checkout at its top.
    top = package / "bundled" if (package / "bundled").exists() else package.parent
    return {
        str(path.relative_to(top)): path
        for kind in ("config", "examples", "notebooks")
        for path in sorted((top / kind).rglob("*"))
        if path.suffix in (".yaml", ".py", ".ipynb", ".sh", ".mjs")
    }


def describe(path: Path) -> str:
    """Return the first sentence of a bundled file."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return "".join(cells[0]["source"]).splitlines()[0].lstrip("# ") if cells else ""
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
    else:
        lines = [line for line in path.read_text().splitlines() if "$schema" not in line]
        comment = takewhile(_is_comment, dropwhile(lambda line: not _is_comment(line), lines))
        text = " ".join(line.lstrip("#/ ") for line in comment)
    return re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0]


def _is_comment(line: str) -> bool:
    return line.startswith(("# ", "// "))


def copy_bundled(name: str, folder: Path) -> list[Path]:
    """Copy bundled files into `folder`, and return the copies.

    name: name of a file or its last part; a stem, for all files of that stem in one folder; or a folder. Raises:
    UserError: `name` matches no file or several folders, or a target exists.
    """
    files = bundled()
    matches = [key for key in files if name in (key, Path(key).name, Path(key).stem, str(Path(key).with_suffix("")))]
    tops = {Path(key).parent for key in matches}
    if not matches:
        folders = {folder for key in files for folder in Path(key).parents if folder.name}  # except "."
        tops = {folder for folder in folders if name in (str(folder), folder.name)}
        matches = [key for key in files if tops & set(Path(key).parents)]
    if not matches:
        raise UserError(f"no bundled file matches {name!r}; use one of: {', '.join(files)}")
    if len(tops) != 1:
        raise UserError(f"{name!r} matches several files: {', '.join(matches)}; use a longer name")
    [top] = tops
    targets = [folder / Path(key).relative_to(top) for key in matches]
    for target in targets:
        if target.exists():
            raise UserError(f"{target} already exists; name another folder, or remove it")
    for key, target in zip(matches, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[key], target)
    return targets


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration, with the explanation of each key. Values may be interpolations."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
        "title": "rftdask configuration",
    }
    sections: list[type[Section]] = [Config, *_sections(Section)]
    for section in sections:
        node = schema if section is Config else schema["$defs"].get(section.__name__, {})
        for key, text in explanations(section).items():
            if key in node.get("properties", {}):
                node["properties"][key]["description"] = text
    return {key: _or_interpolated(value) for key, value in schema.items()}


def _sections(section: type[Section]) -> list[type[Section]]:
    return [child for subclass in section.__subclasses__() for child in (subclass, *_sections(subclass))]


@cache
def explanations(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each key of a section, including the sections it extends."""
    texts: dict[str, str] = {}
    # Bases first, so that a section that redefines a key also replaces its explanation.
    for base in reversed([base for base in section.__mro__ if issubclass(base, Section) and base is not Section]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for key, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, ast.Expr):
                texts[key.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def _or_interpolated(node: Any) -> Any:
    if isinstance(node, list):
        return [_or_interpolated(item) for item in node]
    if not isinstance(node, dict):
        return node
    # A default is a value, even if it looks like a schema.
    node = {key: value if key == "default" else _or_interpolated(value) for key, value in node.items()}
    if node.get("type") in ("integer", "number", "boolean") or "enum" in node:
        # Editors show these texts for both alternatives.
        text = {key: node.pop(key) for key in ("description", "default", "title") if key in node}
        return {**text, "anyOf": [node, {"type": "string", "pattern": r"^\$\{.*\}$"}]}
    return node


@dataclass(frozen=True)
class FirstConfig:
    """Answers to the questions of `rftdask init`."""

    tasks: str
    """Task file (jsonl, json, csv, parquet), or a dataset on the Hub."""
    model: str
    where: str
    partition: str = ""
    node: Capacity | None = None
    """Capacity of a node of the partition. None: not known here."""
    name: str = "first"

    def render(self) -> str:
        """Return the configuration as YAML with comments. Raises: DataError: the task columns cannot be determined."""
        question, answer, num_rows = _columns(self.tasks)
        small = self.where == "laptop"
        batch_size = min(num_rows, 2 if small else 32)
        subset = "\n      subset_name: main" if self.tasks == GSM8K else ""
        text = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# Written by `rftdask init`. `rftdask validate` prints the plan of the run, `rftdask schema` every key.
name: {self.name}
checkpoint_root_dir: ./runs            # where runs are kept: a folder, s3://bucket/runs, ...

algorithm:
  algorithm_type: grpo
  repeat_times: {4 if small else 8}                     # answers to each task, compared with each other
  optimizer: {{lr: 1.0e-6}}

model:
  model_path: {json.dumps(self.model)}
  max_prompt_tokens: {256 if small else 1024}
  max_response_tokens: {256 if small else 1024}

buffer:
  batch_size: {batch_size:<26}# tasks in a step
  total_epochs: 1
  explorer_input:
    taskset:
      name: tasks
      path: {json.dumps(self.tasks)}{subset}
      format: {{prompt_key: {json.dumps(question)}, response_key: {json.dumps(answer)}}}
      data_selector: {{selector_type: shuffle}}
    default_workflow_type: simple_workflow
    default_reward_fn_type: math_reward   # or one of yours: my_module.my_reward (docs/workflows.md)

trainer:
  save_interval: 20                   # steps between checkpoints, which is the most that a loss costs
  max_checkpoints_to_keep: 3
"""
        if self.where == "slurm":
            job, role = self._jobs()
            text += f"""
cluster:
  type: slurm
  slurm:                              # what a job of each role asks for (docs/slurm.md)
    controller: {{{job}, memory: 2GB}}
    trainer: {{{job}, {role}}}
    explorer: {{{job}, {role}}}
"""
        return text

    def _jobs(self) -> tuple[str, str]:
        """Return the settings of every job, and the additional settings of rank and engine jobs."""
        job, node = f"partition: {json.dumps(self.partition)}", self.node
        if node is None:
            return f'{job}, walltime: "08:00:00"', 'gres: "gpu:1", cpus: 4, memory: 32GB'
        short = hours(node.time_limit) < 8
        # The share of a node per GPU, minus what the controller needs.
        share = max(1, node.gpus)
        cpus, memory = max(1, min(4, node.cpus // share - 1)), min(32000, node.memory_mb * 3 // 4 // share)
        gpu = 'gres: "gpu:1", ' * bool(node.gpus)
        return (
            f'{job}, walltime: "{node.time_limit if short else "08:00:00"}"',
            f"{gpu}cpus: {cpus}, memory: {memory}MiB",
        )

    def write(self, path: Path) -> Config:
        """Write the file, and next to it the schema. Returns: the loaded configuration.

        Raises: UserError: the file exists; ConfigError: the answers do not make a valid configuration.
        """
        if path.exists():
            raise UserError(f"{path} already exists; name another file, or remove it")
        text = self.render()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / SCHEMA_FILE).write_text(json.dumps(json_schema(), indent=1) + "\n")
        return load_config(str(path))

    def next_commands(self, path: Path) -> list[tuple[str, str]]:
        """Return (purpose, command) in the order to type them."""
        start = "submit" if self.where == "slurm" else "run"
        return [
            ("print the plan, and check data, model and reward", f"rftdask validate --data {path}"),
            ("start the run; the same command continues it", f"rftdask {start} {path}"),
            ("print its progress", f"rftdask status runs/rftdask/{self.name}"),
        ]


def _columns(tasks: str) -> tuple[str, str, int]:
    """Return the columns of question and answer, and the number of rows."""
    from rftdask.data.datasets import SUFFIXES, open_dataset  # late: loads pyarrow

    if not (tasks.endswith(SUFFIXES) and Path(tasks).is_file()):
        return "question", "answer", 32  # `rftdask validate --data` checks these columns
    dataset = open_dataset(tasks)
    keys = dataset.columns
    question = next((key for name in _QUESTIONS for key in keys if key.lower() == name), None)
    answer = next((key for name in _ANSWERS for key in keys if key.lower() == name), None)
    if question is None or answer is None:
        raise DataError(
            f"{tasks} has the columns {', '.join(keys)}, but needs one of {', '.join(_QUESTIONS)} and one of "
            f"{', '.join(_ANSWERS)}; rename two columns, or name them in a copy of config/gsm8k.yaml (rftdask examples)"
        )
    return question, answer, len(dataset)
