"""Promise: the examples of docs/extending.md work. Each file of the page lies in a plug-in folder; the YAML after it is
part of a valid configuration whose plug-ins bind; the Python after it runs, and the text after that is what it prints.
A misspelled argument of each part that has some is an error with its key.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdask.config import Config, check_plugins, load_config
from rftdask.config.parts import named_parts
from rftdask.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
BLOCKS = re.findall(r"```(\w+)(?: file=(\S+))?\n(.*?)```", PAGE, re.DOTALL)
FILES = {file: text for _, file, text in BLOCKS if file}
SECTIONS = [re.findall(r"```(\w+)(?: file=\S+)?\n(.*?)```", part, re.DOTALL) for part in PAGE.split("\n## ")[1:]]
TITLES = [part.partition("\n")[0] for part in PAGE.split("\n## ")[1:]]
BASE: dict[str, Any] = {
    "model": {"model_path": "m", "max_model_len": 64},
    "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
}


@pytest.fixture
def folder(folder: Path) -> Path:
    for file, text in FILES.items():
        (folder / file).write_text(text)
    return folder


def configured(text: str, folder: Path) -> Config:
    tree = merged(BASE, yaml.safe_load(text))
    return load_config(merged(tree, {"explorer": {"plugin_dirs": [str(folder)]}}))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], value) for key, value in over.items() if isinstance(base.get(key), dict)}
    return {**base, **over, **both}


@pytest.mark.parametrize("blocks", SECTIONS, ids=TITLES)
def test_every_example_runs_as_written(blocks: list[tuple[str, str]], folder: Path) -> None:
    [config] = [configured(text, folder) for kind, text in blocks if kind == "yaml"]
    check_plugins(config)
    names: dict[str, Any] = {"config": config, "folder": str(folder / "out")}
    printed = io.StringIO()
    for kind, text in blocks[2:]:
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(text, names)
        else:
            assert printed.getvalue() == text


@pytest.mark.parametrize("blocks", SECTIONS, ids=TITLES)
def test_a_misspelled_argument_of_an_example_is_refused(blocks: list[tuple[str, str]], folder: Path) -> None:
    [text] = [text for kind, text in blocks if kind == "yaml"]
    own = [use for use in named_parts(configured(text, folder)) if use.registered is None and use.arguments]
    for use in own:
        argument = next(iter(use.arguments))
        with pytest.raises(ConfigError, match=f"{argument}x: unknown argument; did you mean {argument}"):
            check_plugins(configured(re.sub(rf"\b{argument}:", f"{argument}x:", text), folder))


def test_examples_have_10_to_30_lines() -> None:
    assert {file: text.count("\n") for file, text in FILES.items() if text.count("\n") > 30} == {}
