"""Promises of the one rule by which a configuration names its parts, and of reading parts from their source."""

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rftdask.config import Config, check_plugins, load_config, plugins
from rftdask.config.plugins import (
    Parameter,
    RegisteredPart,
    accepts,
    argument_problems,
    bind_arguments,
    find_part,
    parameters_of,
    parse_python,
)
from rftdask.errors import ConfigError, UserError
from rftdask.monitor.trackers import NoTracker, make_tracker


@dataclass(frozen=True)
class ClipLoss:
    clip_range: float = 0.2
    level: str = "token"


def test_a_concurrent_import_by_another_thread_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [RuntimeError("dictionary changed size during iteration"), KeyError("/python311.zip"), None]

    def invalidate_caches() -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.setattr(importlib, "invalidate_caches", invalidate_caches)
    plugins.load_plugin_folders(())
    assert outcomes == []


def test_a_parse_that_another_thread_disturbs_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, errors = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * 3

    def disturbed(*args: object, **options: object) -> ast.Module:
        if errors:
            raise errors.pop()
        return parse(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(ast, "parse", disturbed)
    assert accepts("int", 3) and isinstance(parse_python("a = 1"), ast.Module) and not errors


def test_registered_names_come_before_plugins() -> None:
    assert find_part("loss", "clip", {"clip": ClipLoss}, ["/nowhere"]) is ClipLoss


def test_a_dotted_path_is_imported() -> None:
    assert find_part("loss", "collections.OrderedDict", {}).__name__ == "OrderedDict"


def test_a_name_that_a_file_of_a_plugin_folder_defines_is_found(folder: Path) -> None:
    (folder / "losses_of_a_folder.py").write_text("from collections import Counter\nclass OwnLoss:\n    pass\n")
    assert find_part("loss", "OwnLoss", {}, [str(folder)]).__module__ == "losses_of_a_folder"
    assert find_part("loss", "losses_of_a_folder.OwnLoss", {}).__name__ == "OwnLoss"
    with pytest.raises(UserError, match="unknown loss 'Counter'"):  # the file only imports it
        find_part("loss", "Counter", {})


def test_a_name_that_a_plugin_registers_is_found(folder: Path) -> None:
    table: dict[str, object] = {}
    (folder / "registers.py").write_text("import sys\nsys.table['own'] = int\n")
    sys.table = table  # type: ignore[attr-defined]
    try:
        assert find_part("loss", "own", table, [str(folder)]) is int
    finally:
        del sys.table  # type: ignore[attr-defined]


def test_a_name_that_two_files_define_is_refused(folder: Path) -> None:
    for name in ("first_twin", "second_twin"):
        (folder / f"{name}.py").write_text("class Twin:\n    pass\n")
    with pytest.raises(UserError, match=r"'Twin' is defined by .*name one of them as first_twin\.Twin"):
        find_part("loss", "Twin", {}, [str(folder)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clpi", "unknown loss 'clpi'; did you mean clip?"),
        ("zzz", "unknown loss 'zzz'; there are clip, sft; give your own as package.module.Name"),
        ("no_such_module.Loss", "cannot import 'no_such_module'"),
        ("collections.OrderdDict", "module 'collections' has no 'OrderdDict'; did you mean OrderedDict"),
        ("a..b", "cannot import"),
    ],
)
def test_an_unknown_name_lists_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        find_part("loss", name, {"clip": ClipLoss, "sft": ClipLoss})
    assert message in str(caught.value)


BROKEN = {
    "a division": ("x = 1\n1 / 0\n", ":2: ZeroDivisionError: division by zero"),
    "in a function": ("def f():\n    return 1 / 0\nf()\n", ":2: ZeroDivisionError: division by zero"),
    "in the library": ("import json\njson.loads('{')\n", ":2: JSONDecodeError: "),
    "no Python": ("def f(a b):\n    pass\n", ":1: SyntaxError: invalid syntax"),
    "a NUL byte": ("x = 1\0\n", "SyntaxError: source code string cannot contain null bytes"),
    "no indentation": ("def f():\npass\n", ":2: IndentationError: expected an indented block"),
    "the end": ("import sys\nsys.exit(3)\n", ":2: SystemExit: 3"),
    "a missing library": ("import no_such_library\n", " needs 'no_such_library', which is not installed"),
    "no such name in a module": ("from json import no_such\n", ":1: ImportError: cannot import name 'no_such'"),
}


@pytest.mark.parametrize(("source", "told"), BROKEN.values(), ids=BROKEN.keys())
def test_a_raising_plugin_is_reported_in_one_line_with_its_place(source: str, told: str, folder: Path) -> None:
    name = f"broken_{abs(hash((folder, source)))}"
    (folder / f"{name}.py").write_text(source)
    with pytest.raises(UserError) as caught:
        find_part("loss", "Any", {}, [str(folder)])
    text = str(caught.value)
    assert (f"{name}.py{told}" if told.startswith(":") else told) in text and len(text.splitlines()) == 1, text


def test_wrong_arguments_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        bind_arguments("algorithm.policy_loss_fn_args", ClipLoss, {"clip_rnage": 1, "level": 2})
    assert str(caught.value).splitlines() == [
        "algorithm.policy_loss_fn_args.clip_rnage: unknown argument; did you mean clip_range?; ClipLoss takes "
        "clip_range, level",
        "algorithm.policy_loss_fn_args.level: 2 is not str",
    ]


def test_arguments_that_fit_bind() -> None:
    bind_arguments("x", ClipLoss, {"clip_range": 1})


def test_types_are_checked_for_annotations_kept_as_text(folder: Path) -> None:
    text = "from __future__ import annotations\nclass Late:\n    def __init__(self, level: int | None = None): ...\n"
    (folder / "late.py").write_text(text)
    part = find_part("loss", "Late", {}, [str(folder)])
    assert list(argument_problems(part, {"level": "high"})) == [("level", "'high' is not int | None")]
    assert list(argument_problems(part, {"level": 3})) == []


def test_arguments_that_the_caller_fills_in_are_not_required() -> None:
    def reward(response: str, truth: str, task: object, target: int, scale: float = 1.0) -> float:
        return scale * target

    assert list(argument_problems(reward, {"target": 3}, supplied=3)) == []
    assert list(argument_problems(reward, {}, supplied=3)) == [("target", "required by reward, and not given")]


def test_a_part_that_takes_any_argument_is_not_checked() -> None:
    assert list(argument_problems(lambda **anything: None, {"x": 1})) == []


@pytest.mark.parametrize(
    ("annotation", "fits", "does_not"),
    [
        ("float", 1, True),
        ("int", 3, 3.0),
        ("bool", True, 1),
        ("str", "a", 1),
        ("float | None", None, "1"),
        ("Optional[int]", None, "x"),
        ("Literal['a', 'b']", "b", "c"),
        ("typing.Literal[2]", 2, 3),
        ("tuple[float, ...]", (1.0, 2), 1.0),
        ("Mapping[str, Any]", {}, []),
    ],
)
def test_a_type_is_read_as_it_is_written(annotation: str, fits: object, does_not: object) -> None:
    assert accepts(annotation, fits)
    assert not accepts(annotation, does_not)


def test_a_type_that_is_not_known_takes_anything() -> None:
    assert accepts("Tensor", 3) and accepts("", 3)


OWN_TRACKER = """
from rftdask.monitor.trackers import NoTracker

class OwnTracker(NoTracker):
    def __init__(self, run, address: str = "here") -> None: ...
"""


def tracked(*overrides: str) -> Config:
    return load_config({"model": {"model_path": "m", "max_model_len": 64}, "mode": "train", **DATASET}, overrides)


DATASET = {
    "algorithm": {"algorithm_type": "sft"},
    "buffer": {"trainer_input": {"experience_buffer": {"path": "rows.jsonl"}}},
}


def test_a_part_of_a_missing_library_takes_any_argument() -> None:
    part = RegisteredPart("sgd", "not_installed.optim", "SGD")
    assert part.parameters is None and part.traits == {}


ROLLOUTS = {
    "model": {"model_path": "m", "max_model_len": 64},
    "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("algorithm.policy_loss_fn=my.X", "algorithm.policy_loss_fn: policy loss 'my.X': cannot import 'my'"),
        (
            "data_processor.experience_pipeline.operators=[{name: reward_filer}]",
            "data_processor.experience_pipeline.operators[0].name: unknown operator 'reward_filer'; did you mean",
        ),
        (  # also of the taskset, and reported once
            "buffer.explorer_input.default_reward_fn_type=no_such_module.reward",
            "buffer.explorer_input.default_reward_fn_type: reward function 'no_such_module.reward': cannot import "
            "'no_such_module': No module named 'no_such_module'; is it in explorer.plugin_dirs, or on PYTHONPATH?",
        ),
    ],
)
def test_check_plugins_reports_parts_that_cannot_be_imported(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_plugins(load_config(ROLLOUTS, [override]))
    (line,) = caught.value.problems
    assert line.startswith(problem)


def test_only_check_plugins_imports_and_binds_plugins(folder: Path) -> None:
    (folder / "own_tracker.py").write_text(OWN_TRACKER)
    here = f"explorer.plugin_dirs=[{folder}]"
    check_plugins(tracked(here, "monitor={monitor_type: OwnTracker, monitor_args: {address: there}}"))
    wrong = tracked(here, "monitor={monitor_type: OwnTracker, monitor_args: {adress: there}}")
    with pytest.raises(ConfigError, match=r"monitor_args\.adress: unknown argument; did you mean address\?"):
        check_plugins(wrong)
    missing = tracked(here, "monitor.monitor_type=OwnTrackr")
    with pytest.raises(ConfigError, match=r"monitor\.monitor_type: unknown monitor 'OwnTrackr'"):
        check_plugins(missing)
    assert isinstance(
        make_tracker("OwnTracker", folder=folder, project="p", name="n", plugin_dirs=[str(folder)]), NoTracker
    )


SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

class Base:
    needs_gpu = False
    label = None

@dataclass(frozen=True)
class Common(Base):
    scale: float = 1.0

@dataclass(frozen=True)
class Fast(Common):
    label: ClassVar[str] = "fast"
    needs_gpu: ClassVar[bool] = True
    limit: int | None = None

class Slow(Base):
    label = ("slow", "slower")

    def __init__(self, path: str, *, retries: int = 3) -> None: ...
"""


def test_registered_parts_are_read_from_their_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "parts_package").mkdir()
    (folder / "parts_package/all.py").write_text(SOURCE)
    (folder / "parts_package/__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    parts = plugins.read_parts("parts_package", "label")
    assert sorted(parts) == ["fast", "slow", "slower"]
    assert parts["fast"].parameters == {
        "scale": Parameter("float", required=False),
        "limit": Parameter("int | None", required=False),
    }
    assert parts["slow"].parameters == {"path": Parameter("str"), "retries": Parameter("int", required=False)}
    assert parts["fast"].traits["needs_gpu"] is True and parts["slow"].traits["needs_gpu"] is False
    assert "parts_package" not in sys.modules
    fast = find_part("engine", "fast", parts)
    assert fast(limit=3).scale == 1.0
    assert list(parts["fast"].parameters) == list(parameters_of(fast) or ())


def test_a_folder_left_of_a_removed_package_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "moved_parts" / "losses" / "__pycache__").mkdir(parents=True)
    (folder / "moved_parts" / "__init__.py").touch()
    (folder / "moved_parts" / "losses.py").write_text('@loss("mine")\ndef mine():\n    pass\n')
    assert set(plugins.read_functions("moved_parts.losses", "loss")) == {"mine"}
