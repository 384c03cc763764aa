"""Promises of the tour: every link leads to an existing function, and each path has at most six calls."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs/tour.md").read_text()
LINKS = sorted(set(re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/.]+)\)", TOUR)))


def functions_of(path: Path) -> set[str]:
    """Names of the functions of a module and, as Class.method, of its classes."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("name", "path"), LINKS)
def test_every_link_leads_to_an_existing_function(name: str, path: str) -> None:
    assert name in functions_of(ROOT / path)


@pytest.mark.parametrize("title", ["From the command to the ranks", "From a rank to the loss"])
def test_a_path_in_the_tour_has_at_most_six_calls(title: str) -> None:
    section = TOUR.split(f"## {title}")[1].split("\n## ")[0]
    calls = re.findall(r"^\| \[`", section, flags=re.M)
    assert 0 < len(calls) + ("loss" in title) <= 6
