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
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from rftdask.errors import NotInstalledError, UserError

SUBMITTED = "RFTDASK_SUBMITTED"
"""Environment variable of a submitted run's processes: folder with copies of the user's sources, which are imported
instead of the originals."""
PLUGINS, MODULES = "plugins", "modules"
"""What is there: the modules of plug-in folders, and those of elsewhere on sys.path."""
if SUBMITTED in os.environ:
    sys.path[:0] = [os.path.join(os.environ[SUBMITTED], part) for part in (PLUGINS, MODULES)]

# ---- finding a part by its name


def find_part(kind: str, name: str, registered: Mapping[str, Any], plugin_dirs: Sequence[str] = ()) -> Any:
    """The part called `name`, imported if it was not: a registered one, one of a plug-in folder, or a dotted path.

    Args:
        kind: what the part is, as it appears in messages: "policy loss".
        registered: name -> the part, or its `RegisteredPart`. A plug-in may add to it when it is imported.
        plugin_dirs: folders to import before the name is said to be unknown; those that this process has loaded
            already count, too. See `load_plugin_folders`.
    Raises: UserError: no such name, module or attribute, with what comes nearest; what the part needs is not installed;
        or its module raises when it is imported, with the file and line.
    """
    # Only then: loading folders imports the user's modules, which a registered name has no need of.
    if name not in registered:
        load_plugin_folders(plugin_dirs)
    if name in registered:
        part = registered[name]
        part = part.load() if isinstance(part, RegisteredPart) else part
        for needed, extra in requires(part).items():
            package = needed.partition(".")[0]
            if importlib.util.find_spec(package) is None:
                raise NotInstalledError(
                    f"{kind} {name!r} needs the package {package!r}; install it: pip install 'rftdask[{extra}]'"
                )
        return _as_ours(part)
    # What the module itself defines, rather than imports.
    owners = [m for m in _plugin_modules if getattr(getattr(m, name, None), "__module__", None) == m.__name__]
    # An error and no choice: which file was loaded first depends on names and places.
    if len(owners) > 1:
        files = " and ".join(str(module.__file__) for module in owners)
        raise UserError(f"{kind} {name!r} is defined by {files}; name one of them as {owners[0].__name__}.{name}")
    if owners:
        return _as_ours(getattr(owners[0], name))
    if "." not in name:
        raise UserError(f"unknown {kind} {name!r}; {what_instead(name, registered)}")
    module_name, _, attribute = name.rpartition(".")
    module = _import(module_name, f"{kind} {name!r}")
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, dir(module)) or "; is it the right module?"
        raise UserError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}{near}")
    return _as_ours(getattr(module, attribute))


def _as_ours(part: Any) -> Any:
    """A part written for another system says itself what stands for it here (compat/)."""
    make = getattr(part, "__rftdask_part__", None)
    return part if make is None else make()


def known_part(kind: str, name: str, registered: Mapping[str, Any]) -> Any:
    """The part called `name`, to ask for its traits: a `RegisteredPart`, which imports nothing, or a plug-in, whose
    folder has been loaded (`load_plugin_folders`).

    Raises: UserError: no such part, see `find_part`.
    """
    return registered[name] if name in registered else find_part(kind, name, registered)


class _FromSource(SourceFileLoader):
    """Compiles a file whenever it is imported. Python tells by the second, and the size, whether bytecode is of a file,
    and a reward may be changed twice in one.
    """

    def path_stats(self, path: Any) -> Any:
        """Without a time there is no bytecode, read or written. Raises: OSError, always."""
        raise OSError(f"no bytecode of {path}")


def load_plugin_folders(folders: Sequence[str]) -> None:
    """Import every module (*.py but for those that begin with _) of `folders`, so that what they define or register is
    known by its name; from then on the folders are on sys.path, where processes started later find them, too.

    Raises: UserError: a folder is not there, or a module raises, with its file and line.
    """
    for tries_left in reversed(range(_INVALIDATE_TRIES)):
        try:
            importlib.invalidate_caches()  # for what was written a moment ago
            break
        # "dictionary changed size", or an entry is gone: another thread imported meanwhile, and once more it is good.
        except (RuntimeError, KeyError):
            if not tries_left:
                raise
    for path in plugin_folders(folders):
        if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            raise UserError(
                f"plugin folder {str(path)!r} does not exist, is no folder or may not be read (plugin_dirs)"
            )
        loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_FromSource, SOURCE_SUFFIXES)
        sys.path_importer_cache[str(path)] = FileFinder(str(path), *loaders)
        if str(path) not in sys.path:
            # At the end: a file of the user's must not take the place of a library that others import.
            sys.path.append(str(path))
        for file in sorted(path.glob("[!_]*.py")):
            module = _import(file.stem, f"plugin {file}")
            if Path(module.__file__ or "") != file:
                raise UserError(
                    f"plugin {file}: another module is called {file.stem!r}: {module.__file__}; rename yours"
                )
            if module not in _plugin_modules:
                _plugin_modules.append(module)


def plugin_folders(folders: Sequence[str]) -> list[Path]:
    """The folders, resolved; in a job of a batch system the one with the copies that were submitted."""
    if folders and SUBMITTED in os.environ:
        folders = [os.path.join(os.environ[SUBMITTED], PLUGINS)]
    return [Path(folder).expanduser().resolve() for folder in folders]


_plugin_modules: list[ModuleType] = []
"""Modules of the folders that this process has loaded."""


def what_instead(name: str, registered: Iterable[str]) -> str:
    """The end of a message on an unknown name: what comes nearest, and how to name a part of one's own."""
    near = nearest(name, registered)
    names = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(registered))}"
    return f"{names}; one of your own is given as package.module.Name, or by its name in a file of plugin_dirs"


def register(kind: str, registered: dict[str, Any], name: str, part: Any, **declared: Any) -> None:
    """Make `part` known as `name`, and give it the attributes that it declares, but for None.

    Raises: ValueError: the name is that of another.
    """
    known = registered.get(name, part)
    if isinstance(known, RegisteredPart) and known.module == getattr(part, "__module__", ""):
        known = part  # this package's own, whose module is imported just now
    if known is not part:
        raise ValueError(f"{kind} {name!r} exists already; choose another name")
    registered[name] = part
    for attribute, value in declared.items():
        if value is not None:
            # On the part itself, where `requires`, `runs_in_process` and a sandbox find it, by whatever name it is
            # called.
            setattr(part, attribute, value)


def _import(module_name: str, what: str) -> ModuleType:
    try:
        if not all(module_name.split(".")):  # "a..b"
            raise ModuleNotFoundError("an empty name", name=module_name)
        if module_name not in sys.modules and _is_of_trinity(module_name):
            # By its name: it is above this module, and only files of Trinity-RFT need it, and torch with it.
            importlib.import_module("rftdask.compat.trinity").install()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        # What is missing is the module itself or a package above it, and not something that it imports.
        if f"{module_name}.".startswith(f"{missing}."):
            raise NotInstalledError(
                f"{what}: cannot import {module_name!r}: {error}; is it in explorer.plugin_dirs, or on PYTHONPATH?"
            ) from error
        raise NotInstalledError(f"{what}: {module_name!r} needs {missing!r}, which is not installed") from error
    # A script without a main guard ends its import by sys.exit.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Where the user's own code was last; what it called elsewhere says less.
        at = next((f"{f.filename}:{f.lineno}: " for f in reversed(frames) if is_own_code(f.filename)), "")
        if isinstance(error, SyntaxError) and error.filename:
            at = f"{error.filename}:{error.lineno}: "
            error.filename = error.lineno = None  # which its text would repeat
        # An ImportError may be a library that this machine has not.
        kind = NotInstalledError if isinstance(error, ImportError) else UserError
        raise kind(f"{what}: importing {module_name!r} raised: {at}{type(error).__name__}: {error}") from error


_INVALIDATE_TRIES = 10
_IMPORTS_TRINITY = re.compile(r"^\s*(from|import)\s+trinity\b", re.MULTILINE)


def _is_of_trinity(module_name: str) -> bool:
    """Whether the source of a module that is not imported yet imports names of Trinity-RFT."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py") or not is_own_code(spec.origin):
        return False
    return bool(_IMPORTS_TRINITY.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace")))


def is_own_code(file: str) -> bool:
    """Whether a source file is the user's own: neither Python's, nor installed, nor of this package."""
    path = Path(file)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    of_others = (Path(__file__).parents[1], Path(os.__file__).parent)
    return path.suffix == ".py" and not is_installed and not any(path.is_relative_to(each) for each in of_others)


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
    """An argument that a part takes. Example: Parameter("float", required=False)"""

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

    def written(annotation: Any) -> str:
        # A text already where its module has `from __future__ import annotations`.
        return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    return {
        parameter.name: Parameter(
            "" if parameter.annotation is parameter.empty else written(parameter.annotation),
            required=parameter.default is parameter.empty,
        )
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def argument_problems(part: Any, arguments: Mapping[str, Any], supplied: int = 0) -> Iterator[tuple[str, str]]:
    """(argument, what is wrong) for every argument that the part does not take, misses or takes as another type.

    Args: as for `parameters_of`.
    """
    takes = parameters_of(part, supplied)
    if takes is None:
        return
    owner = part.name if isinstance(part, RegisteredPart) else getattr(part, "__name__", type(part).__name__)
    for name, value in arguments.items():
        if name not in takes:
            known = ", ".join(takes) or "no arguments"
            yield name, f"unknown argument{did_you_mean(name, takes)}; {owner} takes {known}"
        elif not accepts(takes[name].annotation, value):
            yield name, f"{value!r} is not {takes[name].annotation}"
    for name, parameter in takes.items():
        if parameter.required and name not in arguments:
            yield name, f"required by {owner}, and not given"


def bind_arguments(what: str, part: Any, arguments: Mapping[str, Any], supplied: int = 0) -> None:
    """Raises: UserError: the part does not take `arguments`; every mistake, each as `what.argument: message`.

    Args: what: the key of the configuration they stand in, "algorithm.policy_loss_fn_args"; others as above.
    """
    problems = [f"{what}.{name}: {message}" for name, message in argument_problems(part, arguments, supplied)]
    if problems:
        raise UserError("\n".join(problems))


def check_call(kind: str, name: str, function: Callable[..., Any], *given: str) -> None:
    """Raises: UserError: the function does not take the positional arguments `given`, named for the message."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C, which tells nothing
    try:
        signature.bind_partial(*given)
    except TypeError as error:
        called = ", ".join(word for word in given if word != "self")
        raise UserError(f"{kind} {name!r} is called with ({called}), and takes {signature}: {error}") from None


_TYPES: dict[str, Callable[[Any], bool]] = {
    # True is an int to Python, and a mistake where a number is meant.
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

    def line_of(name: str) -> Iterator[_ReadClass]:
        """The class and its bases in the package, nearest first."""
        yield classes[name]
        for base in classes[name].bases:
            if base in classes and base != name:
                yield from line_of(base)

    found: dict[str, RegisteredPart] = {}
    for attribute, own in classes.items():
        names = own.constants.get(label) or ()  # its own: a subclass has another name or none
        for name in (names,) if isinstance(names, str) else names:
            line = list(line_of(attribute))
            parameters: Mapping[str, Parameter] | None
            if own.is_dataclass:  # takes its fields, those of its bases first
                parameters = {key: value for known in reversed(line) for key, value in known.fields.items()}
            else:
                parameters = next((known.inits[0] for known in line if known.inits), {})
            traits = {key: value for known in reversed(line) for key, value in known.constants.items()}
            found[name] = RegisteredPart(name, own.module, attribute, parameters, traits)
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
                    # A literal, by convention of this package: nothing is evaluated here.
                    name = ast.literal_eval(call.args[0])
                    found[name] = RegisteredPart(name, module, node.name, _read_arguments(node.args))
    return found


@cache
def function_registry(package: str, decorator: str) -> dict[str, Any]:
    """name -> function or its RegisteredPart, of `read_functions`; what is imported later adds itself (`register`)."""
    return dict(read_functions(package, decorator))


@dataclass(frozen=True)
class LibraryParts(Mapping[str, RegisteredPart]):
    """Classes and functions of installed libraries by the names of a configuration, each read from its source when it
    is asked for; the library is found, not imported.

    Example: LibraryParts({"sgd": "torch.optim.sgd.SGD"}, supplied=("params", "lr"))["sgd"].parameters
    """

    places: Mapping[str, str]
    """Name -> file and attribute, dotted."""
    supplied: tuple[str, ...]
    """Arguments that the caller gives itself."""

    def __getitem__(self, name: str) -> RegisteredPart:
        """Raises: KeyError: no such name. NotInstalledError: the library has no such attribute."""
        module, _, attribute = self.places[name].rpartition(".")
        # From the source: importing torch to check a file would take seconds.
        takes = _read_signature(module, attribute)
        given = None if takes is None else {key: takes[key] for key in takes if key not in self.supplied}
        return RegisteredPart(name, module, attribute, given)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@cache
def _read_signature(module: str, attribute: str) -> Mapping[str, Parameter] | None:
    """The arguments of a function, or of the __init__ of a class, at the top of a library's module; None: any, and any
    where the library is not installed: then nothing runs here, and they are checked where it does.
    """
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)  # of a module below, it would import the package
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*inner).with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return _read_arguments(node.args)
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            own = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
            return _read_arguments(own.args, skip=1)
    raise NotInstalledError(f"the installed {package!r} has no {module}.{attribute}")


@dataclass
class _ReadClass:
    """What the source of a class says that a configuration may ask for."""

    module: str
    bases: list[str]
    is_dataclass: bool
    constants: dict[str, Any] = field(default_factory=dict)
    """Class attributes with literal values; of a dataclass's fields they are the defaults."""
    fields: dict[str, Parameter] = field(default_factory=dict)
    """Annotated attributes, but for class variables."""
    inits: list[Mapping[str, Parameter] | None] = field(default_factory=list)
    """Arguments of its own __init__, if it has one; None: any."""


@cache  # a package is read under many labels, and parsing it is what costs
def _read_classes(package: str) -> Mapping[str, _ReadClass]:
    """The classes at the top of the modules below `package`, by their bare names."""
    found = {}
    for module, body in _read_modules(package):
        for node in body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
            is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            read = found[node.name] = _ReadClass(module, bases, is_dataclass)
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    read.inits.append(_read_arguments(item.args, skip=1))
                if not isinstance(item, ast.Assign | ast.AnnAssign):
                    continue
                target = item.targets[0] if isinstance(item, ast.Assign) else item.target
                if not isinstance(target, ast.Name):
                    continue
                if item.value is not None:
                    with contextlib.suppress(ValueError):  # no literal
                        read.constants[target.id] = ast.literal_eval(item.value)
                if isinstance(item, ast.AnnAssign):
                    annotation = ast.unparse(item.annotation)
                    if not annotation.startswith(("ClassVar", "typing.ClassVar")):
                        read.fields[target.id] = Parameter(annotation, required=item.value is None)
    return found


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


def _read_arguments(arguments: ast.arguments, skip: int = 0) -> dict[str, Parameter] | None:
    """The arguments but for the first `skip`; None: any, there is a **kwargs."""
    if arguments.kwarg:
        return None
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=True)][skip:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        argument.arg: Parameter(ast.unparse(argument.annotation) if argument.annotation else "", default is None)
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
