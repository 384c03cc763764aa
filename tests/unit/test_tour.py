"""Promises of the tour: its functions exist, each table has at most six calls, and the calls are in the code."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs/tour.md").read_text()
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/.]+)\)")
STORAGE = "On storage:"
"""Begins a step between a function that writes files and one that reads them, often in another process."""
PATHS = {
    "A prompt": ("Explorer.run", "TorchEngine.train_step"),
    "A weight": ("Trainer.run", "Engine.load_verified"),
    "A configuration key": ("run", "read_config"),
    "A submit": ("submit", "main"),
}
"""Heading -> the first and the last function on the path."""


def functions_of(path: Path) -> set[str]:
    """Names of the functions of a module and, as Class.method, of its classes."""
    names: set[str] = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, kinds):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, kinds)}
    return names


def section_of(title: str) -> str:
    return TOUR.split(f"## {title}\n")[1].split("\n## ")[0]


def uses(source: str, name: str, path: str) -> bool:
    """True if the source names the function or its module, or the class or the call of the method."""
    owner, _, method = name.rpartition(".")
    other = rf"\.{method}\(" if owner else rf"\b{Path(path).stem}\b"
    return re.search(rf"\b{owner or method}\b|{other}", source) is not None


@pytest.mark.parametrize(("name", "path"), sorted(set(LINK.findall(TOUR))))
def test_a_link_leads_to_a_function_that_exists(name: str, path: str) -> None:
    assert name in functions_of(ROOT / path)


@pytest.mark.parametrize("title", ["From the command to the ranks", "From a rank to the loss"])
def test_a_table_has_at_most_six_calls_with_the_loss(title: str) -> None:
    calls = re.findall(r"^\| \[`", section_of(title), flags=re.M)
    assert 0 < len(calls) + ("loss" in title) <= 6


@pytest.mark.parametrize("title", PATHS)
def test_each_function_is_used_earlier_on_its_path(title: str) -> None:
    steps = re.split(r"^\d+\. ", section_of(title), flags=re.M)[1:]
    sources = list[str]()
    names = list[str]()
    for step in steps:
        if step.startswith(STORAGE):
            sources.clear()
        for name, path in LINK.findall(step):
            assert not sources or any(uses(source, name, path) for source in sources), f"{name} comes out of order"
            sources.append((ROOT / path).read_text())
            names.append(name)
    assert (names[0], names[-1]) == PATHS[title]
    assert len(names) >= 6
