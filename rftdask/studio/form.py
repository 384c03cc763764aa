"""Form: a configuration as fields, one for each key of the schema, and back; what it comes to, and what is wrong.

Starts nothing and writes nothing. Invariants: what a form gives is what `load_config` reads, so nothing is allowed here
that a file may not say; its runs are below the studio's folder, whatever it says; no code of the user's is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rftdask.cluster.layout import TRAINER_RESOURCE, plan_machines
from rftdask.config import Config, load_config, make_plan
from rftdask.config.base import Filled, Named, Section, child_of, default_of, marks_of, plain
from rftdask.config.error_text import allowed_values
from rftdask.config.yaml_source import escape, to_yaml
from rftdask.driver.init_config import explanations
from rftdask.driver.memory_estimate import can_be_sized, format_memory_report
from rftdask.errors import ConfigError, RftError, UserError

ROOT = "checkpoint_root_dir"
"""The one key that is not the user's here."""
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
"""Keys that nearly every configuration has, in the order in which somebody thinks of them."""


@dataclass(frozen=True)
class Key:
    """A field of the form. Its text is "" where the configuration does not say it."""

    path: str
    kind: Literal["text", "number", "bool", "choice", "yaml"]
    text: str
    """What the key does."""
    default: str
    """What holds where nothing is said."""
    choices: tuple[str, ...] = ()
    """All values of a choice; of another kind values that there are names for."""

    @property
    def section(self) -> str:
        """First part of its path; "" at the top."""
        return self.path.partition(".")[0] if "." in self.path else ""

    def value(self, text: str) -> Any:
        """What a text of the form stands for. Raises: ValueError: no YAML, where it has to be."""
        if self.kind == "text":
            return text
        if "${" in text and self.kind != "yaml":
            return text
        try:
            value: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from error
        return value["value"]

    def show(self, value: Any) -> str:
        """The text for a value: the inverse of `value`."""
        if isinstance(value, str) and (self.kind == "text" or "${" in value):
            return value
        return _as_yaml(value)


@cache
def form_keys() -> Mapping[str, Key]:
    """Every key by its path. What has sections for items, such as tasksets and stages, is one key of YAML."""
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
        names = [known for mark in marks if isinstance(mark, Named) for known in mark.registered()]
        filled = next((mark.rule for mark in marks if isinstance(mark, Filled)), "")
        default = f"computed: {filled}" if filled else "" if info.is_required() else _as_yaml(plain(default_of(info)))
        if child is not None:
            text += f"\n\nEach has: {', '.join(child[1].model_fields)}."
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
    """The types that a value may have; of a Literal those of its values."""
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
    """What a form holds: texts by path, and as YAML what no key stands for, such as names of another system's."""

    texts: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Fields:
        """The fields of a file's content, as OmegaConf reads it without resolving anything."""
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
        """Raises: UserError: it is no YAML."""
        try:
            tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        except (OmegaConfBaseException, YAMLError) as error:
            raise UserError(f"not valid YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(tree, dict):
            raise UserError("a configuration holds sections (key: value)")
        return cls.of_tree({str(key): value for key, value in tree.items()})

    @classmethod
    def of_run(cls, config: Config) -> Fields:
        """What somebody must have said to get this configuration: what differs from the defaults."""
        tree = config.to_dict()
        said = dict[str, Any]()
        computed = dict[str, Any]()
        for path, key in form_keys().items():
            value = _get(tree, path)
            if value is None or path == ROOT or _as_yaml(value) == key.default:
                continue
            (computed if key.default.startswith("computed: ") else said)[path] = value
        # Of computed values those that do not come by themselves.
        try:
            again = load_config(_tree_of(said), was_checked=True).to_dict()
        except ConfigError:
            again = {}
        said |= {path: value for path, value in computed.items() if _get(again, path) != value}
        return cls.of_tree(_tree_of(said))

    def tree(self, root: str) -> tuple[dict[str, Any], dict[str, str]]:
        """(the configuration as a file would hold it, with runs below `root`; what is wrong with texts, by path)."""
        problems, tree = dict[str, str](), dict[str, Any]()
        if self.rest.strip():
            try:
                rest = OmegaConf.to_container(OmegaConf.create(self.rest), resolve=False)
                if not isinstance(rest, dict):
                    raise ValueError("it holds no keys")
                tree = {str(key): value for key, value in rest.items()}
            except (OmegaConfBaseException, YAMLError, ValueError) as error:
                problems[""] = f"the other keys are not valid YAML: {str(error).splitlines()[0]}"
        # In the order of the schema, the root beside the name.
        for path, key in form_keys().items():
            if path == ROOT:
                tree[ROOT] = escape(root)
            elif (text := self.texts.get(path, "")).strip():
                try:
                    # A line may have been pasted with spaces around it; a text of several keeps its end.
                    _put(tree, path, key.value(text if "\n" in text.strip() else text.strip()))
                except ValueError as error:
                    problems[path] = str(error)
        for path in self.texts.keys() - form_keys().keys():
            problems[path] = "there is no such key"
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
            raise ValueError(f"{part} holds a value among the other keys, and no section")
        node = below
    node[last] = value


def _tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    tree = dict[str, Any]()
    for path, value in values.items():
        _put(tree, path, value)
    return tree


@dataclass(frozen=True)
class Checked:
    """What a form comes to."""

    yaml: str
    problems: Mapping[str, str]
    """By the key that is wrong; of the whole at ""."""
    warnings: tuple[str, ...] = ()
    plan: str = ""
    memory: str = ""
    config: Config | None = None
    """None: something is wrong with it."""


def check_form(fields: Fields, root: str, gpu: str = "") -> Checked:
    """Read the form as a file would be read, and say what it would do. gpu: what is to have room for it, or ""."""
    tree, problems = fields.tree(root)
    text = f"# Written by rftdask studio; `rftdask validate` explains what it comes to.\n{to_yaml(tree)}"
    config: Config | None = None
    try:
        config = load_config(tree)
    except ConfigError as error:
        for line in error.problems:
            # "path: what is wrong", with the stage in front where it is of one.
            found = re.match(r"(?:stages\[\d+\] \([^)]*\): )?([\w.\[\]]+): (.*)", line, re.DOTALL)
            path, told = (re.sub(r"\[.*", "", found[1]), found[2]) if found else ("", line)
            if path not in form_keys():
                path, told = "", line
            problems[path] = f"{problems[path]}\n{told}" if path in problems else told
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
    return Checked(text, {}, config.warnings, plan, memory, config)
