"""The one rule by which a configuration names its parts, for every kind of part: losses, workflows, engines, clusters.

A name is a registered one (`grpo`), a dotted path (`package.module.Name`), or a name that a file of a plug-in folder
defines or registers (`MyLoss`). `find_part` applies the rule and `bind_arguments` holds the arguments beside a name
against the part's signature, so that a wrong one is told with "did you mean" before anything starts.

Registered parts are read from the source (`read_parts`): their names and arguments are known without importing their
modules, which may need torch. Plug-ins are imported. Nothing is copied anywhere.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import gc
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rftdask.errors import UserError

# ---- finding a part by its name


def find_part(kind: str, name: str, registered: Mapping[str, Any], plugin_dirs: Sequence[str] = ()) -> Any:
    """The part called `name`, imported if it was not: a registered one, one of a plug-in folder, or a dotted path.

    Args:
        kind: what the part is, as it appears in messages: "policy loss".
        registered: name -> the part, or its `RegisteredPart`. A plug-in may add to it when it is imported.
        plugin_dirs: folders to import before the name is said to be unknown; those that this process has loaded
            already count, too. See `load_plugin_folders`.
    Raises: UserError: no such name, module or attribute, with what comes nearest; what the part needs is not installed;
        or its module raises when it is imported, with the traceback.
    """
    if name not in registered:
        load_plugin_folders(plugin_dirs)
    if name in registered:
        part = registered[name]
        return _installed(kind, name, part.load() if isinstance(part, RegisteredPart) else part)
    owners = [module for module in _plugin_modules if _defines(module, name)]
    if len(owners) > 1:
        files = " and ".join(str(module.__file__) for module in owners)
        raise UserError(f"{kind} {name!r} is defined by {files}; name one of them as {owners[0].__name__}.{name}")
    if owners:
        return getattr(owners[0], name)
    if "." not in name:
        raise UserError(f"unknown {kind} {name!r}; {what_instead(name, registered)}")
    module_name, _, attribute = name.rpartition(".")
    module = _import(module_name, f"{kind} {name!r}")
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, dir(module)) or "; is it the right module?"
        raise UserError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}{near}")
    return getattr(module, attribute)


def load_plugin_folders(folders: Sequence[str]) -> None:
    """Import every module (*.py but for those that begin with _) of `folders`, so that what they define or register is
    known by its name; from then on the folders are on sys.path, where processes started later find them, too.

    Raises: UserError: a folder is not there, or a module raises, with its traceback.
    """
    importlib.invalidate_caches()  # for what was written a moment ago
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise UserError(f"plugin folder {folder!r} does not exist or is no folder (plugin_dirs)")
        if str(path) not in sys.path:
            sys.path.append(str(path))
        for file in sorted(path.glob("[!_]*.py")):
            module = _import(file.stem, f"plugin {file}")
            if Path(module.__file__ or "") != file:
                raise UserError(
                    f"plugin {file}: another module is called {file.stem!r}: {module.__file__}; rename yours"
                )
            if module not in _plugin_modules:
                _plugin_modules.append(module)


_plugin_modules: list[ModuleType] = []
"""Modules of the folders that this process has loaded."""


def _defines(module: ModuleType, name: str) -> bool:
    """Whether the module itself defines a class or function of this name, rather than importing it."""
    return getattr(getattr(module, name, None), "__module__", None) == module.__name__


def what_instead(name: str, registered: Iterable[str]) -> str:
    """The end of a message on an unknown name: what comes nearest, and how to name a part of one's own."""
    near = nearest(name, registered)
    names = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(registered))}"
    return f"{names}; one of your own is given as package.module.Name, or by its name in a file of plugin_dirs"


def _installed(kind: str, name: str, part: Any) -> Any:
    """The part, if what it needs is there: `requires`, module -> extra of this package."""
    for module, extra in requires(part).items():
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"{kind} {name!r} needs the package {package!r}; install it: pip install 'rftdask[{extra}]'"
            )
    return part


def _import(module_name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: an empty part, as in "a..b"
        missing = getattr(error, "name", None) or module_name
        if module_name == missing or module_name.startswith(f"{missing}.") or isinstance(error, ValueError):
            raise UserError(f"{what}: cannot import {module_name!r}: {error}; is it on PYTHONPATH?") from error
        raise UserError(f"{what}: {module_name!r} needs {missing!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        lines = "".join(traceback.format_exception(error)).rstrip()
        raise UserError(f"{what}: importing {module_name!r} raised {type(error).__name__}: {error}\n{lines}") from error


def nearest(word: str, words: Iterable[str], count: int = 3) -> list[str]:
    """The words most like `word`, best first."""
    return difflib.get_close_matches(word, list(words), n=count, cutoff=0.5)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The end of a message, "; did you mean clip_range?", or "" where nothing is like `word`."""
    near = nearest(word, words)
    return f"; did you mean {' or '.join(near)}?" if near else ""


# ---- arguments


@dataclass(frozen=True)
class Parameter:
    """An argument that a part takes.

    Example: Parameter("clip_range", "float", required=False)
    """

    name: str
    annotation: str = ""
    """Its type as written in the source; "" where none is."""
    required: bool = True


def parameters_of(part: Any, supplied: int = 0) -> dict[str, Parameter] | None:
    """The arguments that a configuration may give a part, by name; None: any, it takes **kwargs or tells nothing.

    Args:
        part: a class, a function or a `RegisteredPart`.
        supplied: leading arguments that the caller gives itself, such as the response, truth and task of a reward.
    """
    if isinstance(part, RegisteredPart):
        return None if part.parameters is None else dict(list(part.parameters.items())[supplied:])
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())[supplied:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: Parameter(
            parameter.name,
            "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation),
            required=parameter.default is parameter.empty,
        )
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def argument_problems(
    part: Any, arguments: Mapping[str, Any], supplied: int = 0, given: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """(argument, what is wrong) for every argument that the part does not take, misses or takes as another type.

    Args: as for `parameters_of`; given: arguments by name that the caller gives itself.
    """
    takes = parameters_of(part, supplied)
    if takes is None:
        return
    takes = {name: parameter for name, parameter in takes.items() if name not in given}
    for name, value in arguments.items():
        if name not in takes:
            known = ", ".join(takes) or "no arguments"
            yield name, f"unknown argument{did_you_mean(name, takes)}; {_name_of(part)} takes {known}"
        elif not accepts(takes[name].annotation, value):
            yield name, f"{value!r} is not {takes[name].annotation}"
    for name, parameter in takes.items():
        if parameter.required and name not in arguments:
            yield name, f"required by {_name_of(part)}, and not given"


def bind_arguments(
    what: str, part: Any, arguments: Mapping[str, Any], supplied: int = 0, given: Collection[str] = ()
) -> None:
    """Raises: UserError: the part does not take `arguments`; every mistake, each as `what.argument: message`.

    Args: what: the key of the configuration they stand in, "algorithm.policy_loss_fn_args"; others as above.
    """
    problems = [f"{what}.{name}: {message}" for name, message in argument_problems(part, arguments, supplied, given)]
    if problems:
        raise UserError("\n".join(problems))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "None": lambda value: value is None,
    **dict.fromkeys(("list", "tuple", "Sequence", "Iterable"), lambda value: isinstance(value, list | tuple)),
    **dict.fromkeys(("dict", "Mapping"), lambda value: isinstance(value, Mapping)),
}


def accepts(annotation: str, value: Any) -> bool:
    """Whether a value of a configuration fits a type as it is written in Python; a type that is not known fits.

    >>> accepts("float | None", 1), accepts("float | None", "1"), accepts("Literal['a', 'b']", "c")
    (True, False, False)
    """
    try:
        return _fits(ast.parse(annotation, mode="eval").body, value)
    except SyntaxError:
        return True


def _fits(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.BinOp):  # a union
        return _fits(node.left, value) or _fits(node.right, value)
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rpartition(".")[2]
        if outer == "Literal":
            return value in ast.literal_eval(
                node.slice if isinstance(node.slice, ast.Tuple) else ast.List([node.slice])
            )
        if outer == "Optional":
            return value is None or _fits(node.slice, value)
        return _TYPES[outer](value) if outer in _TYPES else True
    name = ast.unparse(node).rpartition(".")[2]
    return _TYPES[name](value) if name in _TYPES else True


def _name_of(part: Any) -> str:
    return part.name if isinstance(part, RegisteredPart) else str(getattr(part, "__name__", type(part).__name__))


# ---- registered parts, read from their source


@dataclass(frozen=True)
class RegisteredPart:
    """A class of this package that a configuration can name, as its source shows it; `load` imports it.

    Example: RegisteredPart("slurm", "rftdask.cluster.slurm", "SlurmCluster", None, {"is_batch": True})
    """

    name: str
    module: str
    attribute: str
    parameters: Mapping[str, Parameter] | None
    """What it takes by name: the fields of a dataclass, else the arguments of __init__. None: any."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Its class attributes that are constants, those of its bases in the same files included."""

    def load(self) -> Any:
        """The class. Imports its module."""
        return getattr(importlib.import_module(self.module), self.attribute)


@cache
def read_parts(package: str, label: str) -> Mapping[str, RegisteredPart]:
    """name -> part for every class in the modules below `package` (dotted) with a class attribute `label` = "name".

    Reads files and imports nothing, not even the package. A tuple of names registers the class under each.
    """
    classes = _read_classes(package)
    found: dict[str, RegisteredPart] = {}
    for attribute, node in classes.items():
        own = node.constants.get(label)  # its own: a subclass has another name or none
        for name in (own,) if own and isinstance(own, str) else own or ():
            line = list(_line_of(attribute, classes))
            traits = {key: value for known in reversed(line) for key, value in known.constants.items()}
            found[name] = RegisteredPart(name, node.module, attribute, _parameters_of_line(line), traits)
    return found


@cache
def read_functions(package: str, decorator: str) -> Mapping[str, RegisteredPart]:
    """name -> part for every function in the modules below `package` (dotted) decorated as @decorator("name", ...).

    Reads files and imports nothing, not even the package. Several decorators register a function under each name.
    """
    found: dict[str, RegisteredPart] = {}
    for module, body in _read_modules(package):
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator and call.args:
                    name = ast.literal_eval(call.args[0])
                    parameters = None if node.args.kwarg else _read_arguments(node.args)
                    found[name] = RegisteredPart(name, module, node.name, parameters)
    return found


@dataclass(frozen=True)
class _ReadClass:
    """What the source of a class says that a configuration may ask for."""

    module: str
    bases: tuple[str, ...]
    constants: Mapping[str, Any]
    """Class attributes with literal values; of a dataclass's fields they are the defaults."""
    is_dataclass: bool
    fields: Mapping[str, Parameter]
    """Annotated attributes, but for class variables."""
    has_init: bool
    init: Mapping[str, Parameter] | None
    """Arguments of its own __init__ but self; None: any."""


@cache  # a package is read under many labels, and parsing it is what costs
def _read_classes(package: str) -> Mapping[str, _ReadClass]:
    """The classes at the top of the modules below `package`, by their bare names."""
    found = {}
    for module, body in _read_modules(package):
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = _read_class(module, node)
    return found


def _read_class(module: str, node: ast.ClassDef) -> _ReadClass:
    constants: dict[str, Any] = {}
    fields: dict[str, Parameter] = {}
    init: ast.arguments | None = None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            init = item.args
        if not isinstance(item, ast.Assign | ast.AnnAssign):
            continue
        target = item.targets[0] if isinstance(item, ast.Assign) else item.target
        if not isinstance(target, ast.Name):
            continue
        if item.value is not None:
            with contextlib.suppress(ValueError):  # no literal
                constants[target.id] = ast.literal_eval(item.value)
        if isinstance(item, ast.AnnAssign):
            annotation = ast.unparse(item.annotation)
            if not annotation.startswith(("ClassVar", "typing.ClassVar")):
                fields[target.id] = Parameter(target.id, annotation, required=item.value is None)
    return _ReadClass(
        module,
        tuple(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases),
        constants,
        any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list),
        fields,
        init is not None,
        None if init is None or init.kwarg else _read_arguments(init, skip=1),
    )


def _read_modules(package: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """(dotted name, statements) of the modules below `package`, or of the module of that name."""
    above = Path(__file__).parents[2]
    root = above.joinpath(*package.split("."))
    for file in sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]:
        name = ".".join(file.relative_to(above).with_suffix("").parts).removesuffix(".__init__")
        # A syntax tree is tens of thousands of objects and no cycle; looking for cycles takes as long as parsing.
        collects = gc.isenabled()
        gc.disable()
        try:
            body = ast.parse(file.read_text(encoding="utf-8"), str(file)).body
        finally:
            if collects:
                gc.enable()
        yield name, body


def _line_of(name: str, classes: Mapping[str, _ReadClass]) -> Iterator[_ReadClass]:
    """The class and its bases among `classes`, nearest first."""
    yield classes[name]
    for base in classes[name].bases:
        if base in classes and base != name:
            yield from _line_of(base, classes)


def _parameters_of_line(line: Sequence[_ReadClass]) -> Mapping[str, Parameter] | None:
    """The fields of a dataclass, those of its bases first; else the arguments of the nearest __init__ but self."""
    if line[0].is_dataclass:
        return {name: parameter for known in reversed(line) for name, parameter in known.fields.items()}
    return next((known.init for known in line if known.has_init), {})


def _read_arguments(arguments: ast.arguments, skip: int = 0) -> dict[str, Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=True)][skip:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        argument.arg: Parameter(
            argument.arg, ast.unparse(argument.annotation) if argument.annotation else "", required=default is None
        )
        for argument, default in pairs
    }


# ---- what a part says about itself


def trait(part: Any, name: str, default: Any = None) -> Any:
    """A class attribute of a part, registered or imported."""
    return part.traits.get(name, default) if isinstance(part, RegisteredPart) else getattr(part, name, default)


def runs_in_process(plugin: Any) -> bool:
    """Whether a workflow or reward runs on the event loop: what it says itself, else whether it is this package's own,
    which is trusted to be quick and to stop when it is cancelled. Any other runs in a sandbox.
    """
    declared = getattr(plugin, "in_process", None)
    return module_of(plugin).startswith("rftdask.") if declared is None else bool(declared)


def requires(plugin: Any) -> Mapping[str, str]:
    """Optional modules that the plug-in imports -> the extra of this package that installs them."""
    needed: Mapping[str, str] = getattr(plugin, "requires", {})
    return needed


def module_of(plugin: Any) -> str:
    """The module that has to be imported for the plug-in to be there."""
    return str(getattr(plugin, "__module__", None) or type(plugin).__module__)
