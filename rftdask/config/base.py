"""What every section of the configuration is made of: frozen models, frozen dicts and the state of a key.

What is special about a key stands in its annotation (`Annotated[str, Later("SwanLab", ("swanlab",))]`) and nowhere
else: the checks, the tests and the documentation read it from there. A key without a mark does what its docstring says;
keys of the reference system without effect are no fields (reference_keys.py). This module knows no key.
Invariant: a validated section cannot be changed, down to the items of its dicts and lists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Later:
    """These values are refused: the feature is not there yet. They are not in the type of the key."""

    feature: str
    """What is missing, as it ends the sentence "not available in this release: ..."."""
    values: tuple[str, ...]


@dataclass(frozen=True)
class Filled:
    """None or absent means: computed from other keys when the configuration is loaded. Afterwards it has a value."""

    rule: str
    zero: bool = False
    """0 means the same as None."""


@dataclass(frozen=True)
class Aliases:
    """Old values: each is replaced by a new one, with a warning that gives the reason."""

    values: Mapping[str, str] = field(hash=False)
    reason: str


@dataclass(frozen=True)
class Named:
    """The key names a part by the one rule of plugins.py: a registered name, package.module.Name, or a plug-in."""

    kind: str
    """What the part is, in messages: "cluster"."""
    registered: Callable[[], Mapping[str, Any]] = field(hash=False)
    """The package's own parts by name, each a `RegisteredPart` unless it has been imported."""
    arguments: str = ""
    """Key beside it with the part's arguments; "": it has none that are checked."""
    default_from: str = ""
    """Key beside it that names another part, whose class attribute called as this key is the name in place of None."""
    supplied: int = 0
    """Leading arguments that are no configuration's: the response, truth and task of a reward function."""
    also: tuple[str, ...] = ()
    """Arguments that are accepted beside the part's own: they are those of another key, given in this place."""
    complete: bool = True
    """Whether an argument that the part requires has to be among those given."""
    needed: bool = False
    """Whether checks of a configuration read class attributes of the part, so that a plug-in is imported for them."""


@dataclass(frozen=True)
class Completed:
    """The text may say ${oc.env:NAME} for a secret: whoever uses it completes it (`fill_from_environment`)."""


Mark = Later | Filled | Aliases | Named | Completed


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed after it was made. Pickles; equal to a plain dict with the same items."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("a configuration cannot be changed; make a new one with rftdask.config.replace")

    # pydantic freezes fields, not what they hold; these are all the ways to change a dict in place.
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]  # of its items, which are frozen, too
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        # Else pickle would fill it item by item, which is refused.
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Dicts become FrozenDict and lists become tuples, at every depth; anything else is returned as it is."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


Free = Annotated[dict[str, Any], AfterValidator(freeze)]
"""A dict whose keys belong to somebody else: a workflow, a reward function, a loss."""


def no_items() -> Any:
    """An empty Free, as a default that cannot be changed either."""
    return Field(default_factory=FrozenDict)


def absent(**bounds: Any) -> Any:
    """The default of a key marked Filled: None until the configuration is complete. `bounds` as for pydantic.Field."""
    return Field(default=None, **bounds)


NAME = r"^[^/\\\x00-\x1f\x7f-\x9f]+$"
"""Pattern of a name that becomes a part of file names and of lines on a terminal."""
Count = Annotated[int, Field(ge=1)]
"""A whole number, at least 1."""
Natural = Annotated[int, Field(ge=0)]
"""A whole number, at least 0."""
Seconds = Annotated[float, Field(gt=0)]
"""A duration in seconds, more than 0."""


class Section(BaseModel):
    """Base of all sections. Unknown keys fail; nothing can be changed after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def marks_of(info: FieldInfo) -> list[Mark]:
    """The marks in a key's annotation, in the order written. Usually none or one."""
    return [item for item in info.metadata if isinstance(item, Mark)]


def default_of(info: FieldInfo) -> Any:
    """The default of a key, made anew; None for a key that must be given."""
    return None if info.is_required() else info.get_default(call_default_factory=True)


def takes_none(info: FieldInfo) -> bool:
    """True for a key of which None is a value: X | None."""
    return type(None) in get_args(info.annotation)


def child_of(info: FieldInfo) -> tuple[str, type[Section]] | None:
    """("section" | "list" | "dict", class) when the key holds a section, a list or a dict of them; else None."""
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


def plain(value: Any) -> Any:
    """Sections and frozen containers as plain dicts and lists."""
    if isinstance(value, Section):
        return {key: plain(getattr(value, key)) for key in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
