"""Promises about the keys of a configuration.

- Every key of the reference system is a key of ours, with its default unless OUR_DEFAULTS says otherwise.
- A key whose feature is missing is refused when set; one without effect is warned about; a derived one is refused.
- Nothing of this depends on the order of keys, and every key explains itself.
"""

import ast
import inspect
from types import ModuleType

import pytest
from config_cases import another_value, config, grpo, problems, reachable, with_key
from config_reference_keys import DERIVED_KEYS, NONE_GIVEN, OUR_DEFAULTS, OUR_KEYS, REFERENCE_KEYS

from rftdask.config import Config
from rftdask.config.base import Derived, Filled, Ignored, Later, Renamed, Secret, child_of, default_of, marks_of, plain
from rftdask.config.schema import algorithm, buffer, explorer, model, run, trainer
from rftdask.config.schema.walk import walk

KEYS = dict(walk(Config))
SCHEMAS = [algorithm, buffer, explorer, model, run, trainer]


def marked(kind: type) -> list[str]:
    return [path for path, info in KEYS.items() if any(isinstance(mark, kind) for mark in marks_of(info))]


def refused_keys() -> list[str]:
    """Keys marked Later for every value but the default, and keys without a mark in sections marked so."""
    whole = [
        path for path in marked(Later) if any(isinstance(m, Later) and m.values is None for m in marks_of(KEYS[path]))
    ]
    sections = [path for path in whole if child_of(KEYS[path]) and child_of(KEYS[path])[0] == "section"]
    inside = [
        path
        for path, info in KEYS.items()
        if not marks_of(info) and not child_of(info) and any(path.startswith(section + ".") for section in sections)
    ]
    return sorted(path for path in {*whole, *inside} - set(sections) if reachable(path))


@pytest.mark.parametrize("path", REFERENCE_KEYS)
def test_every_key_of_the_reference_is_known_and_has_its_default(path: str) -> None:
    expected = OUR_DEFAULTS.get(path, REFERENCE_KEYS[path])
    assert path in KEYS
    if expected is not NONE_GIVEN:
        assert plain(default_of(KEYS[path])) == expected


def test_every_key_of_ours_is_of_the_reference_or_listed_as_ours() -> None:
    leaves = {path for path, info in KEYS.items() if not child_of(info) and reachable(path)}
    strange = leaves - set(REFERENCE_KEYS) - OUR_KEYS - {path for path in leaves if is_not_settable(path)}
    names = {path.rsplit(".", 1)[-1] for path in strange}
    assert names == {
        "flush_age_s",
        "max_memory_gb",
        "max_processes",
        "mode",
        "plugin_dirs",
        "keep",
        "keep_steps",
        "keep_share",
        "dataset_args",
        "default_workflow_type",
        "default_reward_fn_type",
        "name",
        "model_path",
    }


def is_not_settable(path: str) -> bool:
    return any(isinstance(mark, Derived | Secret | Renamed) for mark in marks_of(KEYS[path]))


@pytest.mark.parametrize(
    "path", [path for path, value in REFERENCE_KEYS.items() if value is not NONE_GIVEN and reachable(path)]
)
def test_every_key_may_be_given_with_its_default(path: str) -> None:
    value = plain(default_of(KEYS[path]))
    if path.endswith(".taskset"):
        value = {"path": "tasks.jsonl"}  # mode both needs one
    assert config(with_key(path, value)).warnings == ()


def test_the_top_level_sections_are_those_of_the_reference() -> None:
    assert {path.split(".")[0].removesuffix("[]") for path in REFERENCE_KEYS} <= set(Config.model_fields)


@pytest.mark.parametrize("path", refused_keys())
def test_a_key_whose_feature_is_missing_is_refused_when_set(path: str) -> None:
    lines = problems(with_key(path, another_value(KEYS[path])))
    where = path.replace("[]", "[0]")
    assert [line for line in lines if line.startswith(f"{where}: ") and "is not available in this release (" in line]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (path, value)
        for path in marked(Later)
        for mark in marks_of(KEYS[path])
        if isinstance(mark, Later) and reachable(path)
        for value in mark.values or ()
    ],
)
def test_a_value_whose_feature_is_missing_is_refused_with_what_to_use(path: str, value: str) -> None:
    lines = problems(with_key(path, value))
    where = path.replace("[]", "[0]")
    assert [line for line in lines if line.startswith(f"{where}: {value!r} is not available in this release (")]
    assert any("; use " in line for line in lines)


@pytest.mark.parametrize("path", [path for path in marked(Ignored) if reachable(path)])
def test_an_ignored_key_is_warned_about_once_with_the_reason(path: str) -> None:
    reason = next(mark.reason for mark in marks_of(KEYS[path]) if isinstance(mark, Ignored))
    loaded = config(with_key(path, another_value(KEYS[path])))
    where = path.replace("[]", "[0]")
    assert [line for line in loaded.warnings if line == f"{where}: ignored: {reason}"] == [
        f"{where}: ignored: {reason}"
    ]


@pytest.mark.parametrize("path", [path for path in DERIVED_KEYS if reachable(path)])
def test_a_derived_key_cannot_be_set(path: str) -> None:
    assert problems(with_key(path, 8)) == [f"{path}: derived, cannot be set"]


def test_every_derived_key_is_marked_so() -> None:
    for path in DERIVED_KEYS[1:]:
        assert any(isinstance(mark, Derived) for mark in marks_of(KEYS[path])), path


@pytest.mark.parametrize(
    "path",
    [path for path in marked(Filled) if reachable(path) and "tasksets[]" not in path and path != "model.max_model_len"],
)
def test_null_in_a_filled_key_means_that_it_is_computed(path: str) -> None:
    assert config(with_key(path, None)) == config(grpo())


@pytest.mark.parametrize("module", SCHEMAS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_key_is_followed_by_its_meaning(module: ModuleType) -> None:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            pairs = zip(node.body, [*node.body[1:], None], strict=True)
            fields = [
                (a, b) for a, b in pairs if isinstance(a, ast.AnnAssign) and not ast.unparse(a.target).startswith("_")
            ]
            for field, after in fields:
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(field.target)
