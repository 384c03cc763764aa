"""The source of a configuration: YAML, interpolations, and the profiles and templates of a site."""

from pathlib import Path
from typing import Any

import pytest
from config_cases import config, grpo, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.config import load_config
from rftdask.config.base import Problem
from rftdask.config.yaml_source import escape, read_tree

TREES: list[tuple[str, dict[str, Any]]] = [
    ("a: 1e-3\nb: 2.5E+10\nc: 1e5\nd: -0.5\ne: .5", {"a": 1e-3, "b": 2.5e10, "c": 1e5, "d": -0.5, "e": 0.5}),
    ("a: -5\nb: +3\nc: 1_000\nd: 0x1f\ne: 010\nf: 1:30", {"a": -5, "b": 3, "c": 1000, "d": 31, "e": 8, "f": 90}),
    ("a: yes\nb: No\nc: ~\nd:\ne: '3'", {"a": True, "b": False, "c": None, "d": None, "e": "3"}),
    ("a: 2001-01-01\nb: 2001/01/01\nc: ./x\n1: 2", {"a": "2001-01-01", "b": "2001/01/01", "c": "./x", "1": 2}),
    (
        "a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: {<<: *x}\ne: *x",
        {"a": {"b": 1}, "c": {"b": 2}, "d": {"b": 1}, "e": {"b": 1}},
    ),
    (
        "a: [1, '${b}', {c: '${d.e}/x'}]\nb: z\nd: {e: '${b} q'}",
        {"a": [1, "z", {"c": "z q/x"}], "b": "z", "d": {"e": "z q"}},
    ),
    ("a: ${b}\nb: 3\nc: x${b}\nd: x${e}\ne:", {"a": 3, "b": 3, "c": "x3", "d": "xNone", "e": None}),
    ("a: ${b}\nb: {c: [1, '${d}']}\nd: true", {"a": {"c": [1, True]}, "b": {"c": [1, True]}, "d": True}),
    ("a: ${b[0].c}\nb: [{c: 1}]\nd: ${b.0.c}", {"a": 1, "b": [{"c": 1}], "d": 1}),
    ("a: ${b.c}\nb: ${d}\nd: {c: '${ e }'}\ne: 4", {"a": 4, "b": {"c": 4}, "d": {"c": 4}, "e": 4}),
    ("a: {x: 1, y: '${.x}', z: {w: '${..x}'}}", {"a": {"x": 1, "y": 1, "z": {"w": 1}}}),
    ("a: ${b.${c}}\nb: {k: 5}\nc: k", {"a": 5, "b": {"k": 5}, "c": "k"}),
    ("a: ${oc.env:SET}\nb: 'x${oc.env: SET }${oc.env:UNSET,./x-y}'", {"a": "bar", "b": "xbar./x-y"}),
    ("a: ${oc.env:UNSET,${b}}\nb: k\nc: ${oc.env:UNSET, 'q r' }", {"a": "k", "b": "k", "c": "q r"}),
    ("a: ${oc.env:UNSET,null}\nb: ${oc.env:UNSET,}\nc: ${oc.env:UNSET,4}", {"a": None, "b": "", "c": "4"}),
    ("a: ${oc.decode:${oc.env:UNSET,4}}", {"a": 4}),
    ("a: '\\${b}'\nb: z\nc: '\\\\${b}'\nd: ${a}", {"a": "${b}", "b": "z", "c": "\\z", "d": "${b}"}),
    ("a: $b {${b}}\nb: '}'", {"a": "$b {}}", "b": "}"}),
    ("", {}),
]
"""YAML -> tree. SET is "bar" in the environment."""
PROBLEMS = [
    ("a: ${b}\nb: [x, '${a}']", [(key, "cannot be resolved: it refers to itself") for key in ("a", "b[1]")]),
    ("a: ${b}\nb: '???'", [("a", "cannot be resolved: b is given as ???"), ("b", "required, and given as ???")]),
    ("a: [1, '${b.c}']\nb: {}", [("a[1]", "cannot be resolved: Interpolation key 'b.c' not found")]),
    ("a: {b: '${oc.env:UNSET}'}", [("a.b", "cannot be resolved: the environment variable 'UNSET' is not set")]),
    ("a: ${b", [("a", "cannot be resolved: '${b' has a ${ without a closing brace")]),
    ("a: ${x:1}", [("a", "cannot be resolved: ${x:1} is not ${key}, ${oc.env:NAME} or ${oc.decode:text}")]),
    ("a: 1\na: 2", [("", "not valid YAML: line 2, column 1: found duplicate key a")]),
    ("~: 1", [("", "not valid YAML: None is not a key; put it in quotes")]),
    ("a: !!set {x}", [("", "not valid YAML: {'x'} is neither text nor a number, list or section")]),
    ("a: &a [*a]", [("", "not valid YAML: it nests too deep")]),
    ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
     [("", "not valid YAML: it has more than 100,000 values")]),
    ("- 1", [("", "the file must hold sections (key: value), not a list")]),
    ("x", [("", "the file must hold sections (key: value), not a text")]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "bar")
    monkeypatch.delenv("UNSET", raising=False)


def read(source: Any, *overrides: str, stays: bool = False) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    return read_tree(source, overrides, problems, lambda path, value: stays), problems


@pytest.mark.parametrize(("text", "tree"), TREES)
def test_a_file_gives_its_tree(text: str, tree: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    # repr also compares the types of values and the order of keys.
    assert repr(read(file)) == repr((tree, []))


@pytest.mark.parametrize(("text", "problems"), PROBLEMS)
def test_what_cannot_be_read_is_reported(text: str, problems: list[Problem], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert read(file)[1] == problems


def test_only_environment_variables_stay_as_written() -> None:
    tree = {"a": "x${oc.env:SET}", "b": "${oc.env:SET}${c}", "c": "\\${oc.env:SET}", "d": "${c}", "e": "${a}"}
    assert read(tree, stays=True) == (
        {"a": "x${oc.env:SET}", "b": "bar${oc.env:SET}", "c": "${oc.env:SET}", "d": "${oc.env:SET}", "e": "xbar"},
        [],
    )


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text().filter(lambda x: x != "???")
PARTS = st.recursive(
    LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(min_size=1), part, max_size=3)
)


@given(st.dictionaries(st.text(min_size=1), PARTS, max_size=4))
@settings(max_examples=50)
def test_escaped_data_is_read_literally(tree: dict[str, Any]) -> None:
    assert read(escape(tree)) == (tree, [])


PROFILE = """
cluster:
  type: slurm
  interface: ib0
  slurm:
    template: wrap.sh
    controller: {partition: small, walltime: "08:00:00"}
    trainer: {partition: gpus, gres: "gpu:h100:4", account: group7}
"""
WRAP = "{% extends 'job.sh' %}{% block command %}nice {{ command }}; echo ${HOME}{% endblock %}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rftdask"
    folder.mkdir()
    (folder / "leonardo.yaml").write_text(PROFILE)
    (folder / "wrap.sh").write_text(WRAP)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return folder


@pytest.mark.parametrize("by_path", [False, True])
def test_a_profile_lies_below_the_keys_of_a_configuration(site: Path, by_path: bool) -> None:
    name = str(site / "leonardo.yaml") if by_path else "leonardo"
    loaded = config(grpo(), f"cluster.slurm.profile={name}", "cluster.slurm.trainer.account=mine")
    cluster = loaded.cluster
    assert (cluster.type, cluster.interface, cluster.slurm.controller.partition) == ("slurm", "ib0", "small")
    assert (cluster.slurm.trainer.gres, cluster.slurm.trainer.account) == ("gpu:h100:4", "mine")
    assert cluster.slurm.template == WRAP


def test_a_loaded_config_does_not_read_site_files_again(site: Path, tmp_path: Path) -> None:
    loaded = config(grpo(), "cluster.slurm.profile=leonardo")
    for file in site.iterdir():
        file.unlink()
    assert loaded.cluster.slurm.profile is None
    submitted = tmp_path / "submitted.yaml"
    submitted.write_text(loaded.to_yaml())
    assert load_config(submitted).cluster == loaded.cluster
    assert load_config(loaded.to_dict()).cluster == loaded.cluster


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("trainer: {num_ranks: 4}", "a profile has only the section cluster, and not trainer"),
        ("cluster: {slurm: {profile: other}}", "cluster.slurm.profile: a profile must not name another profile"),
        ("cluster: [", "not valid YAML"),
        ("cluster: {slurm: {template: none.sh}}", "none.sh cannot be read"),
    ],
)
def test_a_profile_with_other_keys_is_an_error(site: Path, profile: str, message: str) -> None:
    (site / "leonardo.yaml").write_text(profile)
    assert message in "\n".join(problems(grpo(), "cluster.slurm.profile=leonardo"))


def test_a_missing_profile_is_reported_with_the_searched_places(site: Path) -> None:
    [problem] = problems(grpo(), "cluster.slurm.profile=marconi")
    assert f"profile 'marconi' does not exist: neither {site}/marconi.yaml nor /etc/rftdask/marconi.yaml" in problem
