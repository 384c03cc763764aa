"""Promise: a simple file gives the tree that OmegaConf gives, value by value."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rftdask.config.yaml_source import Problem, read_tree

CONFIGS = sorted((Path(__file__).parents[3] / "config").rglob("*.yaml"))
SIMPLE = (
    "a: 1e-3\nb: -5\nc: 0\nd: -0.5\ne: 2.5E+10\nf: +3\ng: 12",
    "a: ./x\nb: yes\nc: No\nd: ~\ne:\nf: '3'\ng: !!str 3\nh: 2001/01/01\ni: '010'",
    "a: [1, '${b}', {c: '${d.e}/x'}]\nb: z\nd: {e: '${b} q'}",
    "a: ${oc.env:SET}\nb: ${oc.env:UNSET,./x-y}\nc: ${oc.env:UNSET,/x}y${oc.env:SET}\nd: ${a}-${b}",
    "a: |\n  x ${b}\n  y\nb: q\n",
    "a: '${b}: \"x\" # y @ % ( ) [ ] , = ? | * + '\nb: '\"'",
)
LEFT_TO_OMEGACONF = (
    "? [1, 2]\n: 3",
    *(
        f"a: {number}"
        for number in ("1_0.0", ".5", "-.5", "0x1f", "010", "0o10", "1:30", "1:30.5", ".inf", "2001-01-01")
    ),
    "a: ${b}\nb: 3",
    "a: x${b}\nb: 3.0",
    "a: ${b}\nb: true",
    "a: ${b}\nb: {c: 1}",
    "a: ${b}\nb:",
    "a: ${b}\nb: ${a}",
    "a: ${b}\nb: '???'",
    "a: ${.b}\nb: z",
    "a: $b {${b}}\nb: '}'",
    "a: ${b.0}\nb: [z]",
    "a: ${oc.env:UNSET}",
    "a: ${oc.env:UNSET,x}",
    "a: ${oc.env:UNSET,/\u00e9}",
    "a: '\\${b}'\nb: z",
    "a: 1\na: 2",
    "a: &x {b: 1}\nc: *x",
    "a: {b: 1}\nc: {<<: {d: 1}}",
    "1: 2",
    "a: ???",
    "- 1",
    "x",
    "",
    "a: [",
)


def read(file: Path, stays: bool, *overrides: str) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    tree = read_tree(file, overrides, problems, lambda path, value: stays)
    if overrides and tree is not None:
        del tree["by_override"]
    return tree, problems


def check(file: Path) -> None:
    for stays in (False, True):
        # An override makes OmegaConf read the file. repr also compares the types of values and the order of keys.
        assert repr(read(file, stays)) == repr(read(file, stays, "by_override=1"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "bar")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize("text", [*SIMPLE, *LEFT_TO_OMEGACONF])
def test_both_readers_give_the_same_tree(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text, encoding="utf-8")
    check(file)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_both_readers_give_the_same_bundled_config(file: Path) -> None:
    check(file)


@pytest.mark.parametrize("text", SIMPLE)
def test_simple_files_need_no_omegaconf(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # an import of it raises
    assert read(file, stays=False)[1] == []
