"""Building blocks of every configuration section: frozen models, frozen dicts, and marks on keys.

What is special about a key is in its annotation (`Annotated[str, Later("SwanLab", ("swanlab",))]`) and nowhere else:
checks, tests and documentation read it from there. A key without a mark does what its docstring describes. Keys of
Trinity-RFT without effect are not fields (trinity/reference_keys.py). This module knows no key.
A rule between the keys of one section is a method of its class, marked `reading`. Invariant: a validated section cannot
be changed, down to the items of its dicts and lists.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType, ModuleType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from rftdask.storage.safe_text import mask

Location = tuple[str | int, ...]
"""Keys and list positions from the top, for example ("buffer", "tasksets", 0, "path")."""
Problem = tuple[str, str]
"""(path of the key, message with what is wrong and what is allowed)."""
_LONGEST_SHOWN = 60


def join(loc: Location) -> str:
    """Return a location as a path: ("tasksets", 0, "path") -> "tasksets[0].path"."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Later:
    """Values that are refused because the feature is missing in this release. The type of the key lacks them."""

    feature: str
    """Missing feature, as it ends the sentence "not available in this release: ..."."""
    values: tuple[str, ...]


@dataclass(frozen=True)
class Computed:
    """None or absent: the value is computed from other keys when the configuration is loaded."""

    rule: str
    zero: bool = False
    """True: 0 means the same as None."""


@dataclass(frozen=True)
class Aliases:
    """Old values. Each is replaced by a new one, with a warning that gives the reason."""

    values: Mapping[str, str] = field(hash=False)
    reason: str


@dataclass(frozen=True)
class PluginName:
    """The key names a part by the rule of plugins.py: a registered name, package.module.Name, or a plug-in."""

    kind: str
    """Kind of the part, for messages: "cluster"."""
    registered: Callable[[], Mapping[str, Any]] = field(hash=False)
    """Returns the package's own parts by name, each a `RegisteredPart` unless it has been imported."""
    arguments: str = ""
    """Key of the part's arguments in the same section; "": no arguments are checked."""
    default_from: str = ""
    """Key in the same section that names another part, whose class attribute of this key's name replaces None."""
    supplied: int = 0
    """Leading arguments that the caller passes: the response, truth and task of a reward function."""
    also: tuple[str, ...] = ()
    """Further accepted arguments, which belong to another key."""
    complete: bool = True
    """True: an argument that the part requires must be configured."""
    needed: bool = False
    """True: checks read class attributes of the part, so a plug-in is imported for them."""


@dataclass(frozen=True)
class EnvInterpolated:
    """The text may contain ${oc.env:NAME} for a secret; the process that uses it fills it in
    (`fill_from_environment`)."""


@dataclass(frozen=True)
class MayChange:
    """A later start of a run may change the value; of a section, all its keys. It affects the length, speed, limits,
    place or output of a run, and of what is trained only the rounding. A key without this mark must stay."""


Mark = Later | Computed | Aliases | PluginName | EnvInterpolated | MayChange


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed. Pickles; equals a plain dict with the same items."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("a configuration cannot be changed; make a new one with rftdask.config.replace")

    # pydantic freezes fields, not their values; these are all methods that change a dict.
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]  # items are frozen as well
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        # By default, pickle sets item by item, which is refused.
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return a value with FrozenDicts for dicts and tuples for lists, at every depth."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


OpenDict = Annotated[dict[str, Any], AfterValidator(freeze)]
"""A dict whose keys the schema does not know: arguments of a workflow, a reward function, a loss."""


def empty_dict() -> Any:
    """Return the default {} of an OpenDict, frozen as well."""
    return Field(default_factory=FrozenDict)


def absent(**bounds: Any) -> Any:
    """Return the default of a Computed key, None. `bounds` as for pydantic.Field."""
    return Field(default=None, **bounds)


NAME = r"^[^/\\\x00-\x1f\x7f-\x9f]+$"
"""Pattern of a name that becomes a part of file names and of lines on a terminal."""
Count = Annotated[int, Field(ge=1)]
"""A whole number, at least 1."""
Natural = Annotated[int, Field(ge=0)]
"""A whole number, at least 0."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A seed, which is sent to other processes as an integer of 64 bits."""
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A duration in seconds, more than 0. Locks of Python raise OverflowError above 9.2e9."""


class Section(BaseModel):
    """Base of all sections. Unknown keys fail; nothing can be changed after validation.

    Validators are built at the first validation. The default of a section is therefore `X.model_construct()`, because
    `X()` would validate, and importing the schema would build a validator for every section.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    def changed(self, *keys: str) -> list[str]:
        """Return those of `keys` whose value is not the default."""
        return [key for key in keys if getattr(self, key) != default_of(type(self).model_fields[key])]


# ---- rules between keys

Rule = Callable[[Any], Iterator[Problem]]
"""Takes a section and yields (key, message) for every refusal. The key is relative to it; "": the section itself."""


def reading(*keys: str) -> Callable[[Rule], Rule]:
    """Return a decorator for a rule: a method of a section, or a function of a Config (cross_checks). The rule is
    skipped if one of these keys is broken."""

    def mark(rule: Rule) -> Rule:
        vars(rule)["reads"] = keys
        return rule

    return mark


@cache
def rules_of(owner: type[Section] | ModuleType) -> list[tuple[tuple[str, ...], Rule]]:
    """Return (keys it reads, rule) of a section's class or of a module, in the order written."""
    owners = reversed(owner.__mro__) if isinstance(owner, type) else [owner]
    functions = [item for holder in owners for item in vars(holder).values() if isinstance(item, FunctionType)]
    return [(vars(function)["reads"], function) for function in functions if "reads" in vars(function)]


def is_natural(value: object) -> bool:
    """Return True for an integer of at least 0, but not for `True`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """Return True for an integer or float, but not for `True`."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def show(value: Any) -> str:
    """Return a value as YAML writes it, short and without secrets; of a list, only its length."""
    if isinstance(value, Mapping):
        return "a section" if value else "{}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "[]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = mask(value)
        return repr(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")
    return str(value)


# ---- reading a schema


def marks_of(info: FieldInfo) -> list[Mark]:
    """Return the marks in a key's annotation, in the order written. Usually none or one."""
    return [item for item in info.metadata if isinstance(item, Mark)]


def default_of(info: FieldInfo) -> Any:
    """Return a new copy of a key's default; None: the key is required."""
    return None if info.is_required() else info.get_default(call_default_factory=True)


def child_of(info: FieldInfo) -> tuple[str, type[Section]] | None:
    """Return ("section" | "list" | "dict", class) if the key holds a section, a list or a dict of them; else None."""
    # X | None is X, and Annotated[X, ...] is X; then a section, or a tuple or a dict of them.
    annotation: Any = info.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(item for item in get_args(annotation) if item is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section", annotation
    for origin, kind, position in ((tuple, "list", 0), (dict, "dict", 1)):
        if get_origin(annotation) is origin:
            item = get_args(annotation)[position]
            if isinstance(item, type) and issubclass(item, Section):
                return kind, item
    return None


def sections_of(section: Section, place: Location = ()) -> Iterator[tuple[Location, Section]]:
    """Yield a section and those below it, each with its location."""
    yield place, section
    for key in _section_keys(type(section)):
        value = getattr(section, key)
        items: list[tuple[Location, Any]] = [((*place, key), value)]
        if isinstance(value, tuple | dict):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            items = [((*place, key, name), item) for name, item in pairs]
        for at, item in items:
            if isinstance(item, Section):
                yield from sections_of(item, at)


@cache
def _section_keys(cls: type[Section]) -> list[str]:
    """Return the keys that hold a section, or a list or dict of them."""
    return [key for key, info in cls.model_fields.items() if child_of(info)]


def types_of(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, and those of the items of a tuple."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from types_of(part)
    elif get_origin(annotation) in (Annotated, tuple):
        yield from types_of(get_args(annotation)[0])
    else:
        yield annotation


def field_at(schema: type[Section], loc: Location) -> tuple[Location, FieldInfo]:
    """Return the deepest key of the schema along `loc`, and its location."""
    deepest: tuple[Location, FieldInfo] | None = None
    cls: type[Section] | None = schema
    for depth, part in enumerate(loc):
        if cls is None:  # below a key that holds no section
            break
        if isinstance(part, str) and part in cls.model_fields:
            deepest = loc[: depth + 1], cls.model_fields[part]
            child = child_of(deepest[1])
            cls = child[1] if child else None
    assert deepest is not None, loc
    return deepest


def is_user_defined(schema: type[Section], path: str) -> bool:
    """True if the value at a path is in an OpenDict: an argument of a workflow, a reward, a loss, a tracker."""
    info = _info_at(schema, path)
    return info is not None and any(get_origin(kind) is dict for kind in types_of(info.annotation))


def is_env_interpolated(schema: type[Section], path: str) -> bool:
    """True if the process that uses the text at a path fills in environment variables (`fill_from_environment`)."""
    info = _info_at(schema, path)
    marked = info is not None and any(isinstance(mark, EnvInterpolated) for mark in marks_of(info))
    return marked or is_user_defined(schema, path)


def _info_at(schema: type[Section], path: str) -> FieldInfo | None:
    # A stage has sections of the top level.
    loc = tuple(re.findall(r"[^.\[\]]+", re.sub(r"^stages\[\d+\]\.", "", path)))
    return field_at(schema, loc)[1] if loc and loc[0] in schema.model_fields else None


def plain(value: Any, without: Mark | None = None) -> Any:
    """Return sections and frozen containers as plain dicts and lists, without the keys that have the mark `without`."""
    if isinstance(value, Section):
        keys = [key for key, info in type(value).model_fields.items() if without not in info.metadata]
        return {key: plain(getattr(value, key), without) for key in keys}
    if isinstance(value, dict):
        return {key: plain(item, without) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, without) for item in value]
    return value
