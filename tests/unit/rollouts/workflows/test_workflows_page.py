"""Promise: docs/workflows.md works as written. Its Python runs in the order of the page, in a folder where blocks with
file=NAME are modules; the text after a block is its output; its YAML is part of a valid config.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdask.config import load_config
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.workflows.registry import find_workflow

PAGE = (Path(__file__).parents[4] / "docs/workflows.md").read_text()
BLOCKS = re.findall(r"```(\w+)(?: file=(\S+))?\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.guides
def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec("from rftdask.rollouts.workflows.base import Task", names)
    printed, num_checked = "", 0
    for kind, file, text in BLOCKS:
        if kind == "python" and file:
            (tmp_path / file).write_text(text)
        elif kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(text, names)
            printed = out.getvalue()
        elif kind == "text":
            assert printed == text
            num_checked += 1
    assert num_checked == 5
    find_workflow("my_workflows.short_answer")


def test_the_configuration_on_the_page_is_valid() -> None:
    text = next(text for kind, _, text in BLOCKS if kind == "yaml")
    tree = {"model": {"model_path": "tiny", "max_model_len": 64}, **yaml.safe_load(text)}
    [taskset] = load_config(tree).buffer.explorer_input.train_tasksets
    assert taskset.default_workflow_type == "my_workflows.short_answer"


NAMED = set(re.findall(r"`(\w+_(?:workflow|reward))`", PAGE))
WITH_EXTRAS = {
    *("reasoning_gym_reward", "verifiers_workflow", "sciworld_workflow", "textarena_workflow"),
    "openenv_workflow",
    *("agentscope_react_workflow", "agentscope_react_math_workflow"),
}
"""Names that need packages outside the default extras."""


COMPILED = {"alfworld_workflow", "step_wise_alfworld_workflow"}
"""Names of an extra whose packages are compiled at installation; no test installs it."""


def find(name: str) -> object:
    return (find_workflow if name.endswith("_workflow") else get_reward)(name)


def test_every_name_in_the_tables_exists() -> None:
    assert len(NAMED) > 15
    for name in sorted(NAMED - WITH_EXTRAS - COMPILED):
        assert find(name) is not None


@pytest.mark.extras
@pytest.mark.parametrize("name", sorted(WITH_EXTRAS))
def test_names_of_other_extras_exist(name: str) -> None:
    assert name in NAMED and find(name) is not None
