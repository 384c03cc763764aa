"""Form: a configuration as one text field per key of the schema, and back; its plan, memory and problems.

It starts nothing and writes nothing. Invariants: `load_config` reads the result of a form, so a form allows nothing
that a file does not; its runs are always below the studio's folder; no user code is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from yaml import YAMLError

from rftdask.cluster.layout import TRAINER_RESOURCE, plan_machines
from rftdask.config import Config, load_config, make_plan
from rftdask.config.base import Computed, PluginName, Section, child_of, default_of, marks_of, plain
from rftdask.config.check import allowed_values
from rftdask.config.yaml_source import escape, load_yaml, to_yaml
from rftdask.driver.init_config import explanations
from rftdask.driver.memory_estimate import can_be_sized, format_memory_report
from rftdask.errors import ConfigError, RftError, UserError

ROOT = "checkpoint_root_dir"
"""The only key that the user cannot set; it is always the studio's folder."""
FIRST = (
    "name",
    "model.model_path",
    "buffer.explorer_input.taskset.path",
    "buffer.explorer_input.taskset.format.prompt_key",
    "buffer.explorer_input.taskset.format.response_key",
    "buffer.explorer_input.default_workflow_type",
    "buffer.explorer_input.default_reward_fn_type",
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "algorithm.optimizer.lr",
    "buffer.batch_size",
    "buffer.total_epochs",
    "trainer.total_steps",
    "trainer.save_interval",
    "model.max_prompt_tokens",
    "model.max_response_tokens",
    "explorer.eval_interval",
    "buffer.explorer_input.eval_tasksets",
    "cluster.type",
)
"""Keys of nearly every configuration, in the order of the first section of the form."""


@dataclass(frozen=True)
class Key:
    """A field of the form. Its text is "" if the configuration does not set the key."""

    path: str
    kind: Literal["text", "number", "bool", "choice", "yaml"]
    text: str
    default: str
    choices: tuple[str, ...] = ()
    """All values of a choice; for other kinds suggested values."""

    @property
    def section(self) -> str:
        """First part of the path; "" for a top-level key."""
        return self.path.partition(".")[0] if "." in self.path else ""

    def value(self, text: str) -> Any:
        """Parse a text of the form. Raises: ValueError: not valid YAML (except for kind "text")."""
        if self.kind == "text" or ("${" in text and self.kind != "yaml"):
            return text
        try:
            return load_yaml(text)
        except YAMLError as error:
            raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from error

    def show(self, value: Any) -> str:
        """Format a value as a text of the form; inverse of `value`."""
        if isinstance(value, str) and (self.kind == "text" or "${" in value):
            return value
        return _as_yaml(value)


@cache
def form_keys() -> Mapping[str, Key]:
    """Return every key by its path. A list of sections, such as tasksets or stages, is one key of kind "yaml"."""
    return {key.path: key for key in _keys(Config, "")}


def _keys(section: type[Section], path: str) -> Iterator[Key]:
    texts = explanations(section)
    for name, info in section.model_fields.items():
        where, child = f"{path}.{name}" if path else name, child_of(info)
        if child is not None and child[0] == "section":
            yield from _keys(child[1], where)
            continue
        marks, text = marks_of(info), re.sub(r"(?<!\n)\n(?!\n)", " ", texts.get(name, ""))
        kinds = {kind for kind in _leaves(info.annotation) if kind is not type(None)}
        choices = [str(value) for value in allowed_values(info.annotation)]
        names = [known for mark in marks if isinstance(mark, PluginName) for known in mark.registered()]
        filled = next((mark.rule for mark in marks if isinstance(mark, Computed)), "")
        default = f"computed: {filled}" if filled else "" if info.is_required() else _as_yaml(plain(default_of(info)))
        if child is not None:
            text += f"\n\nFields of an item: {', '.join(child[1].model_fields)}."
        kind: Literal["text", "number", "bool", "choice", "yaml"] = "yaml"
        if choices and kinds <= {str}:
            kind = "choice"
        elif kinds == {bool}:
            kind = "bool"
        elif kinds and kinds <= {int, float}:
            kind = "number"
        elif kinds == {str}:
            kind = "text"
        yield Key(where, kind, text, default, tuple(choices or sorted(names)))


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value may have; for a Literal, the types of its values."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    elif getattr(annotation, "__metadata__", None):
        yield from _leaves(parts[0])
    elif not isinstance(parts[0], type) and isinstance(parts[0], str | int | float):
        yield from map(type, parts)
    elif isinstance(getattr(annotation, "__origin__", None), type):
        yield annotation  # a list or a dict
    else:
        for part in parts:
            yield from _leaves(part)


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, Mapping | list | tuple):
        return str(value)
    return to_yaml(value).strip() if value else "{}" if isinstance(value, Mapping) else "[]"  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fields:
    """Contents of a form: texts by path, and other keys as YAML, such as Trinity-RFT's names."""

    texts: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Fields:
        """Convert the contents of a file, read without resolving interpolations."""
        texts, rest = dict[str, str](), dict[str, Any]()
        keys = form_keys()

        def take(node: Mapping[str, Any], path: str) -> None:
            for name, value in node.items():
                where = f"{path}.{name}" if path else str(name)
                if where in keys:
                    if value is not None and where != ROOT:
                        texts[where] = keys[where].show(value)
                elif isinstance(value, Mapping) and any(key.startswith(f"{where}.") for key in keys):
                    take(value, where)
                else:
                    _put(rest, where, value)

        take(tree, "")
        return cls(texts, to_yaml(rest) if rest else "")

    @classmethod
    def of_file(cls, text: str) -> Fields:
        """Convert the text of a file. Raises: UserError: not valid YAML."""
        try:
            tree = load_yaml(text) or {}
        except YAMLError as error:
            raise UserError(f"not valid YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(tree, dict):
            raise UserError("the top level of a configuration must be a mapping (key: value)")
        return cls.of_tree(tree)

    @classmethod
    def of_run(cls, config: Config) -> Fields:
        """Convert a configuration to the fields that a user must set to get it: those that differ from the defaults."""
        tree = config.to_dict()
        changed, computed = dict[str, Any](), dict[str, Any]()
        for path, key in form_keys().items():
            value = _get(tree, path)
            if value is None or path == ROOT or _as_yaml(value) == key.default:
                continue
            (computed if key.default.startswith("computed: ") else changed)[path] = value
        # Keep a computed value only if the rule would compute another one.
        try:
            recomputed = load_config(_tree_of(changed), was_checked=True).to_dict()
        except ConfigError:
            recomputed = {}
        changed |= {path: value for path, value in computed.items() if _get(recomputed, path) != value}
        return cls.of_tree(_tree_of(changed))

    def tree(self, root: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the contents of a configuration file with its runs below `root`, and the problems of texts by path."""
        problems, tree = dict[str, str](), dict[str, Any]()
        if self.rest.strip():
            try:
                rest = load_yaml(self.rest) or {}
                if not isinstance(rest, dict):
                    raise ValueError("not a mapping of keys")
                tree = rest
            except (YAMLError, ValueError) as error:
                problems[""] = f"the other keys are not valid YAML: {str(error).splitlines()[0]}"
        # In the order of the schema, so that the root follows the name.
        for path, key in form_keys().items():
            if path == ROOT:
                tree[ROOT] = escape(root)
            elif (text := self.texts.get(path, "")).strip():
                try:
                    # Pasted lines may have spaces around them; texts of several lines keep their end.
                    _put(tree, path, key.value(text if "\n" in text.strip() else text.strip()))
                except ValueError as error:
                    problems[path] = str(error)
        for path in self.texts.keys() - form_keys().keys():
            problems[path] = "unknown key"
        return tree, problems


def _get(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split(".")
    node = tree
    for part in sections:
        below = node.setdefault(part, {})
        if not isinstance(below, dict):
            raise ValueError(f"{part} is a section, but the other keys set it to a value")
        node = below
    node[last] = value


def _tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    tree = dict[str, Any]()
    for path, value in values.items():
        _put(tree, path, value)
    return tree


@dataclass(frozen=True)
class Checked:
    yaml: str
    problems: Mapping[str, str]
    """Problems by key; "" for the form as a whole."""
    warnings: tuple[str, ...] = ()
    plan: str = ""
    memory: str = ""


def check_form(fields: Fields, root: str, gpu: str = "") -> Checked:
    """Read the form like a file, and return its plan and problems. gpu: GPU model or memory size to estimate for, or
    "".
    """
    tree, problems = fields.tree(root)
    text = f"# Written by rftdask studio; `rftdask validate` shows its plan.\n{to_yaml(tree)}"
    config: Config | None = None
    try:
        config = load_config(tree)
    except ConfigError as error:
        for line in error.problems:
            # "path: problem", after the stage if the problem is in one.
            match = re.match(r"(?:stages\[\d+\] \([^)]*\): )?([\w.\[\]]+): (.*)", line, re.DOTALL)
            path, problem = (re.sub(r"\[.*", "", match[1]), match[2]) if match else ("", line)
            if path not in form_keys():
                path, problem = "", line
            problems[path] = f"{problems[path]}\n{problem}" if path in problems else problem
    if problems or config is None:
        return Checked(text, problems)
    try:
        layout = plan_machines(config)
        plan = f"{make_plan(config, layout.num_workers(TRAINER_RESOURCE)).render()}\nplacement  {layout.describe()}"
    except UserError as error:
        return Checked(text, {"": str(error)}, config.warnings, make_plan(config).render())
    try:
        sized = can_be_sized(config)
        memory = format_memory_report(config, gpu) if sized else "not known: the model is not on this machine"
    except (RftError, OSError, ValueError) as error:  # the model is not here, or has no sizes
        memory = f"not known: {error}"
    return Checked(text, {}, config.warnings, plan, memory)
