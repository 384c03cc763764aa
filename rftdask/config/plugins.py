"""Plug-ins: finds every part that a configuration names (losses, workflows, engines, clusters) by one rule.

A name is a registered one (`grpo`), a dotted path (`package.module.Name`), or a name that a file of a plug-in folder
defines or registers (`MyLoss`). `find_part` applies the rule, and `bind_arguments` checks the configured arguments
against the part's signature, so that a mistake is reported with "did you mean" before anything starts.

Names and arguments of registered parts are read from the source (`read_parts`), because their modules may need torch.
Plug-ins are imported.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Subfolders of that folder: modules of plug-in folders, and modules found elsewhere on sys.path."""
if SUBMITTED in os.environ:
    sys.path[:0] = [os.path.join(os.environ[SUBMITTED], part) for part in (PLUGINS, MODULES)]

# ---- finding a part by its name


def find_part(kind: str, name: str, registered: Mapping[str, Any], plugin_dirs: Sequence[str] = ()) -> Any:
    """Return the part called `name`, imported: a registered one, one of a plug-in folder, or a dotted path.

    Args:
        kind: what the part is, for messages: "policy loss".
        registered: name -> the part, or its `RegisteredPart`. Importing a plug-in may add to it.
        plugin_dirs: folders to import if the name is not registered. Folders that this process has loaded before
            always count. See `load_plugin_folders`.
    Raises: UserError: no such name, module or attribute, with the nearest names; a package that the part needs is not
        installed; or importing its module raises, with file and line.
    """
    # Loading folders imports the user's modules, which a registered name does not need.
    if name not in registered:
        load_plugin_folders(plugin_dirs)
    if name in registered:
        part = registered[name]
        part = part.load() if isinstance(part, RegisteredPart) else part
        packages = {needed.partition(".")[0]: extra for needed, extra in requires(part).items()}
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            extra = packages[missing[0]]
            raise NotInstalledError(
                f"{kind} {name!r} needs the extra {extra!r}, of which {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'rftdask[{extra}]'"
            )
        return adapt_part(part)
    # Modules that define the name, and do not only import it.
    owners = [m for m in _plugin_modules if getattr(getattr(m, name, None), "__module__", None) == m.__name__]
    # Choosing one would depend on the order of files.
    if len(owners) > 1:
        files = " and ".join(str(module.__file__) for module in owners)
        raise UserError(f"{kind} {name!r} is defined by {files}; name one of them as {owners[0].__name__}.{name}")
    if owners:
        return adapt_part(getattr(owners[0], name))
    if "." not in name:
        raise UserError(f"unknown {kind} {name!r}; {suggest_names(name, registered)}")
    module_name, _, attribute = name.rpartition(".")
    module = _import(module_name, f"{kind} {name!r}")
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, dir(module)) or "; is it the right module?"
        raise UserError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}{near}")
    return adapt_part(getattr(module, attribute))


def adapt_part(part: Any) -> Any:
    """Return what stands for a part written for another system (`__rftdask_part__`, see compat/), else the part."""
    make = getattr(part, "__rftdask_part__", None)
    return part if make is None else make()


def lookup_part(kind: str, name: str, registered: Mapping[str, Any]) -> Any:
    """Return the part called `name`, to read its traits: a `RegisteredPart`, which is not imported, or a plug-in whose
    folder has been loaded (`load_plugin_folders`).

    Raises: UserError: no such part, see `find_part`.
    """
    return registered[name] if name in registered else find_part(kind, name, registered)


class _UncachedLoader(SourceFileLoader):
    """Compiles a file at each import: bytecode is matched by size and whole seconds, and a reward may change twice in
    one."""

    def path_stats(self, path: Any) -> Any:
        """Raises: OSError: always, so that bytecode is neither read nor written."""
        raise OSError(f"no bytecode of {path}")


def load_plugin_folders(folders: Sequence[str]) -> None:
    """Import every module of `folders` (*.py, without those that begin with _), so that the names they define or
    register are known. The folders stay on sys.path, where child processes find them.

    Raises: UserError: a folder does not exist, or a module raises, with its file and line.
    """
    for tries_left in reversed(range(_INVALIDATE_TRIES)):
        try:
            importlib.invalidate_caches()  # for files written a moment ago
            break
        # Another thread imported meanwhile: "dictionary changed size", or a missing entry. The next try succeeds.
        except (RuntimeError, KeyError):
            if not tries_left:
                raise
    for path in plugin_folders(folders):
        if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            raise UserError(
                f"plugin folder {str(path)!r} does not exist, is not a folder or may not be read (plugin_dirs)"
            )
        loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_UncachedLoader, SOURCE_SUFFIXES)
        sys.path_importer_cache[str(path)] = FileFinder(str(path), *loaders)
        if str(path) not in sys.path:
            # At the end, so that a file of the user's cannot replace a library that others import.
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
    """Return the folders, resolved; in the jobs of a submitted run, the folder with their copies."""
    if folders and SUBMITTED in os.environ:
        folders = [os.path.join(os.environ[SUBMITTED], PLUGINS)]
    return [Path(folder).expanduser().resolve() for folder in folders]


_plugin_modules: list[ModuleType] = []
"""Modules of the folders that this process has loaded."""


def suggest_names(name: str, registered: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the nearest names, and how to name a part of your own."""
    near = nearest(name, registered)
    names = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(registered))}"
    return f"{names}; give your own as package.module.Name, or by its name in a file of plugin_dirs"


def register(kind: str, registered: dict[str, Any], name: str, part: Any, **declared: Any) -> None:
    """Add `part` to `registered` as `name`, and set the `declared` values that are not None as attributes on it.

    Raises: ValueError: another part has the name.
    """
    known = registered.get(name, part)
    if isinstance(known, RegisteredPart) and known.module == getattr(part, "__module__", ""):
        known = part  # a part of this package, whose module is being imported
    if known is not part:
        raise ValueError(f"{kind} {name!r} exists already; choose another name")
    registered[name] = part
    for attribute, value in declared.items():
        if value is not None:
            # On the part itself, so that `requires`, `runs_in_process` and a sandbox find it under any name.
            setattr(part, attribute, value)


def _import(module_name: str, subject: str) -> ModuleType:
    try:
        if not all(module_name.split(".")):  # "a..b"
            raise ModuleNotFoundError("an empty name", name=module_name)
        if module_name not in sys.modules:
            _install_adapters(module_name)
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        # The module itself or a package above it is missing, and not something that it imports.
        if f"{module_name}.".startswith(f"{missing}."):
            raise NotInstalledError(
                f"{subject}: cannot import {module_name!r}: {error}; is it in explorer.plugin_dirs, or on PYTHONPATH?"
            ) from error
        raise NotInstalledError(f"{subject}: {module_name!r} needs {missing!r}, which is not installed") from error
    # A script without a main guard ends its import by sys.exit.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The last line of the user's own code, whatever it called elsewhere.
        at = next((f"{f.filename}:{f.lineno}: " for f in reversed(frames) if is_own_code(f.filename)), "")
        if isinstance(error, SyntaxError) and error.filename:
            at = f"{error.filename}:{error.lineno}: "
            error.filename = error.lineno = None  # which its text would repeat
        # An ImportError may be a library that this machine lacks.
        kind = NotInstalledError if isinstance(error, ImportError) else UserError
        raise kind(f"{subject}: importing {module_name!r} raised: {at}{type(error).__name__}: {error}") from error


_INVALIDATE_TRIES = 10
_PARSE_TRIES = 5


def _install_adapters(module_name: str) -> None:
    """Install the adapters of the systems whose packages a user's module imports (adapters.toml)."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py") or not is_own_code(spec.origin):
        return
    text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    adapters = tomllib.loads(Path(__file__).parents[1].joinpath("adapters.toml").read_text(encoding="utf-8"))
    for package, adapter in adapters.items():
        if re.search(rf"^\s*(from|import)\s+{package}\b", text, re.MULTILINE):
            importlib.import_module(adapter).install()


def is_own_code(file: str) -> bool:
    """True for a source file of the user's: neither Python's, nor installed, nor of this package."""
    path = Path(file)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    others = (Path(__file__).parents[1], Path(os.__file__).parent)
    return path.suffix == ".py" and not is_installed and not any(path.is_relative_to(folder) for folder in others)


def nearest(word: str, words: Iterable[str], count: int = 3) -> list[str]:
    """Return the words most like `word`, best first."""
    return difflib.get_close_matches(word, list(words), n=count, cutoff=0.5)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the end of a message, "; did you mean clip_range?", or "" if no word is like `word`."""
    near = nearest(word, words)
    return f"; did you mean {' or '.join(near)}?" if near else ""


# ---- arguments


@dataclass(frozen=True)
class Parameter:
    """An argument of a part. Example: Parameter("float", required=False)"""

    annotation: str = ""
    """Type as written in the source; "": the argument has no annotation."""
    required: bool = True


def parameters_of(part: Any, supplied: int = 0) -> dict[str, Parameter] | None:
    """Return the arguments that a configuration may pass to a part. None: it takes **kwargs or has no signature.

    Args:
        part: a class, a function or a `RegisteredPart`.
        supplied: number of leading arguments that the caller passes, such as the response, truth and task of a reward.
    """
    if isinstance(part, RegisteredPart):
        return None if part.parameters is None else dict(list(part.parameters.items())[supplied:])
    try:
        parameters = list(inspect.signature(part).parameters.values())[supplied:]
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None

    def written(annotation: Any) -> str:
        # Modules with `from __future__ import annotations` have texts already.
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
    """Yield (argument, message) for every argument that is unknown, missing or of the wrong type. If there is none, for
    the first value that a registered part refuses.

    Args: see `parameters_of`.
    """
    parameters = parameters_of(part, supplied)
    if parameters is None:
        return
    owner = part.name if isinstance(part, RegisteredPart) else getattr(part, "__name__", type(part).__name__)
    are_bound = True
    for name, value in arguments.items():
        are_bound &= name in parameters and accepts(parameters[name].annotation, value)
        if name not in parameters:
            known = ", ".join(parameters) or "no arguments"
            yield name, f"unknown argument{did_you_mean(name, parameters)}; {owner} takes {known}"
        elif not accepts(parameters[name].annotation, value):
            yield name, f"{value!r} is not {parameters[name].annotation}"
    for name, parameter in parameters.items():
        if parameter.required and name not in arguments:
            are_bound = False
            yield name, f"required by {owner}, and not given"
    if are_bound and arguments and isinstance(part, RegisteredPart) and (why := part.refusal(arguments)):
        yield next((name for name in arguments if re.search(rf"\b{name}\b", why)), next(iter(arguments))), why


def bind_arguments(key: str, part: Any, arguments: Mapping[str, Any], supplied: int = 0) -> None:
    """Raises: UserError: the part does not take `arguments`; one line `key.argument: message` per mistake.

    Args: key: configuration key of the arguments, "algorithm.policy_loss_fn_args"; others as for `parameters_of`.
    """
    problems = [f"{key}.{name}: {message}" for name, message in argument_problems(part, arguments, supplied)]
    if problems:
        raise UserError("\n".join(problems))


def check_call(kind: str, name: str, function: Callable[..., Any], *positional: str) -> None:
    """Raises: UserError: the function does not take these positional arguments, which are named for the message."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # functions written in C have no signature
    try:
        signature.bind_partial(*positional)
    except TypeError as error:
        called = ", ".join(word for word in positional if word != "self")
        raise UserError(f"{kind} {name!r} is called with ({called}), and takes {signature}: {error}") from None


_TYPES: dict[str, Callable[[Any], bool]] = {
    # True is an int in Python, and a mistake where a number is meant.
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "None": lambda value: value is None,
    **dict.fromkeys(("list", "tuple", "Sequence", "Iterable"), lambda value: isinstance(value, list | tuple)),
    **dict.fromkeys(("dict", "Mapping"), lambda value: isinstance(value, Mapping)),
}


def parse_python(source: str | bytes, mode: str = "exec") -> Any:
    """Parse Python source like `ast.parse`, also while other threads parse.

    Python 3.11 keeps the depth of its recursion per process, so that a thread that is interrupted by another one may
    fail with SystemError.
    """
    for _ in range(_PARSE_TRIES - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(source, mode=mode)
    return ast.parse(source, mode=mode)


def accepts(annotation: str, value: Any) -> bool:
    """True if a value fits a type as written in Python. Types that are not known here accept any value.

    >>> accepts("float | None", 1), accepts("float | None", "1"), accepts("Literal['a', 'b']", "c")
    (True, False, False)
    """
    try:
        return _fits(parse_python(annotation, "eval").body, value)
    except SyntaxError:
        return True


def _fits(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.BinOp):  # a union
        return _fits(node.left, value) or _fits(node.right, value)
    outer = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).rpartition(".")[2]
    if isinstance(node, ast.Subscript) and outer == "Literal":
        return value in ast.literal_eval(node.slice if isinstance(node.slice, ast.Tuple) else ast.List([node.slice]))
    if isinstance(node, ast.Subscript) and outer == "Optional":
        return value is None or _fits(node.slice, value)
    return _TYPES[outer](value) if outer in _TYPES else True


# ---- registered parts, read from their source

_DEFINITION = re.compile(
    # Decorators, the line with the name, then every line that is empty, indented or closes a bracket.
    r"^(?:@.*\n(?:[ )].*\n)*)*(?:class|def|async def) (?P<name>\w+).*\n(?:(?:[ )].*)?\n)*",
    re.MULTILINE,
)


@dataclass(frozen=True)
class RegisteredPart:
    """A class or function that a configuration can name. Its source is parsed when its arguments are needed.

    Example: RegisteredPart("sgd", "torch.optim.sgd", "SGD", supplied=("params", "lr"))
    """

    name: str
    module: str
    """It may be one of a library, which need not be installed."""
    attribute: str
    package: str = ""
    """Package whose classes count as bases."""
    supplied: tuple[str, ...] = ()
    """Arguments that the caller passes, which are not parameters."""

    @property
    def parameters(self) -> Mapping[str, Parameter] | None:
        """Arguments by name: the fields of a dataclass, else the arguments of __init__. None: any.

        Raises: NotInstalledError: the installed library has no such attribute.
        """
        parameters = _read(self.module, self.attribute, self.package)[0]
        if parameters is None:
            return None
        return {name: parameter for name, parameter in parameters.items() if name not in self.supplied}

    @property
    def traits(self) -> Mapping[str, Any]:
        """Class attributes that are constants, including those of base classes in the same package."""
        return _read(self.module, self.attribute, self.package)[1]

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Return why the __post_init__ of the class refuses arguments of the right types. None: it accepts them, or
        needs its module."""
        if not self.package:
            return None
        instance = _rules(self.module, self.attribute, self.package)()
        vars(instance).update({**self.traits, **arguments})
        try:
            instance.__post_init__()
        except ValueError as error:
            return str(error)
        except (NameError, AttributeError):
            pass
        return None

    def load(self) -> Any:
        """Import the module and return the class or function."""
        return getattr(importlib.import_module(self.module), self.attribute)


def _place(module: str) -> Path | None:
    """Return the folder or file of a module, without importing it or its package; None: it is not installed."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*inner)
    # A folder may be left of a removed package, with nothing but an old __pycache__.
    return path if (path / "__init__.py").exists() else path.with_suffix(".py")


@cache
def _definitions(file: Path) -> Mapping[str, str]:
    """Return name -> source of the classes and functions at the top of a file; parsing it takes 20 times as long."""
    return {match["name"]: match[0] for match in _DEFINITION.finditer(file.read_text(encoding="utf-8"))}


@cache
def _definitions_below(package: str) -> list[tuple[str, str, str]]:
    """Return (module, name, source) of the classes and functions below `package`, which may also be a module."""
    root = _place(package)
    assert root is not None
    modules = {root: package}
    if root.is_dir():
        below = {file: file.relative_to(root).with_suffix("").parts for file in sorted(root.rglob("*.py"))}
        modules = {file: ".".join((package, *parts)).removesuffix(".__init__") for file, parts in below.items()}
    return [(module, name, source) for file, module in modules.items() for name, source in _definitions(file).items()]


@cache
def read_parts(package: str, label: str) -> Mapping[str, RegisteredPart]:
    """Return name -> part for every class in the modules below `package` (dotted) with an attribute `label` = "name".

    Files are read; nothing is imported, not even the package. A tuple of names registers the class under each.
    """
    assignment = re.compile(rf"^    {label}(?:: .*?)? = (.*)$", re.MULTILINE)
    parts = {}
    for module, attribute, source in _definitions_below(package):
        names: Any = None
        if match := assignment.search(source):
            with contextlib.suppress(ValueError, SyntaxError):  # not a literal: a field of another class
                names = ast.literal_eval(match[1])
        # An empty name, which base classes have, is not a part.
        for name in filter(None, (names,) if isinstance(names, str) else names or ()):
            parts[name] = RegisteredPart(name, module, attribute, package)
    return parts


@cache
def read_functions(package: str, decorator: str) -> Mapping[str, RegisteredPart]:
    """Return name -> part for every function in the modules below `package` decorated as @decorator("name", ...)."""
    call = re.compile(rf'^@{decorator}\(\s*"([^"]+)"', re.MULTILINE)
    return {
        name: RegisteredPart(name, module, attribute)
        for module, attribute, source in _definitions_below(package)
        for name in call.findall(source)
    }


@cache
def function_registry(package: str, decorator: str) -> dict[str, Any]:
    """Return the parts of `read_functions` in a dict to which modules add when they are imported (`register`)."""
    return dict(read_functions(package, decorator))


@cache
def _read(
    module: str, attribute: str, package: str
) -> tuple[Mapping[str, Parameter] | None, dict[str, Any], dict[str, Parameter]]:
    """Return (arguments, constants, fields) of a class or function. Classes of `package` count as bases."""
    file = _place(module)
    if file is None:
        return None, {}, {}
    if attribute not in (found := _definitions(file / "__init__.py" if file.is_dir() else file)):
        raise NotInstalledError(f"the installed {module.partition('.')[0]!r} has no {module}.{attribute}")
    node = parse_python(found[attribute]).body[0]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _read_arguments(node.args), {}, {}
    assert isinstance(node, ast.ClassDef)
    parameters: Mapping[str, Parameter] | None = {}
    constants: dict[str, Any] = {}
    fields: dict[str, Parameter] = {}
    modules = {name: module for module, name, _ in (_definitions_below(package) if package else ())}
    for base in (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in reversed(node.bases)):
        if base in modules and base != attribute:
            parameters, base_constants, base_fields = _read(modules[base], base, package)
            constants |= base_constants
            fields |= base_fields
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            parameters = _read_arguments(item.args, skip=1)
        target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
        if not isinstance(item, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
            continue
        if item.value is not None:
            with contextlib.suppress(ValueError):  # not a literal
                constants[target.id] = ast.literal_eval(item.value)
        if isinstance(item, ast.AnnAssign) and not re.match(r"(typing\.)?ClassVar", ast.unparse(item.annotation)):
            fields[target.id] = Parameter(ast.unparse(item.annotation), required=item.value is None)
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    return fields if is_dataclass else parameters, constants, fields


class _Rules:
    def __post_init__(self) -> None:
        """Accept everything."""


@cache
def _rules(module: str, attribute: str, package: str) -> type[_Rules]:
    """Return a class with only the __post_init__ and the properties of a class of `package`, and those of its bases."""
    sources = {
        name: (at, source) for at, name, source in _definitions_below(package) if (at, name) != (module, attribute)
    }
    [node] = parse_python(
        next(text for *place, text in _definitions_below(package) if place == [module, attribute])
    ).body
    names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    bases = {name: _rules(sources[name][0], name, package) for name in names if name in sources} or {"_Rules": _Rules}
    node.bases, node.keywords, node.decorator_list = [ast.Name(name, ast.Load()) for name in bases], [], []
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    is_property = [item for item in functions if [*map(ast.unparse, item.decorator_list)] == ["property"]]
    node.body = [item for item in functions if item.name == "__post_init__"] + is_property or [ast.Pass()]
    namespace = {**_constants(package), **bases}
    code = compile(ast.fix_missing_locations(ast.Module([node], [])), module, "exec", annotations.compiler_flag)
    exec(code, namespace)  # of this package's own source
    rules: type[_Rules] = namespace[attribute]
    return rules


@cache
def _constants(package: str) -> dict[str, Any]:
    """Return the literals that modules below `package` assign to names in capitals, and the functions of `checks`."""
    root, constants = _place(package), dict[str, Any]()
    for file in sorted(root.rglob("*.py")) if root is not None else ():
        for name, text in re.findall(r"^([A-Z_]+) = (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            with contextlib.suppress(ValueError, SyntaxError):  # not a literal
                constants[name] = ast.literal_eval(text)
    for module, _, source in _definitions_below(package):
        if module == f"{package}.checks":
            exec(source, constants)
    return constants


def _read_arguments(arguments: ast.arguments, skip: int = 0) -> dict[str, Parameter] | None:
    """Return the arguments without the first `skip`; None: there is a **kwargs."""
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


# ---- attributes of a part


def trait(part: Any, name: str, default: Any = None) -> Any:
    """Return a class attribute of a part, registered or imported."""
    return part.traits.get(name, default) if isinstance(part, RegisteredPart) else getattr(part, name, default)


def runs_in_process(plugin: Any) -> bool:
    """True if a workflow or reward runs on the event loop, by its attribute `in_process`.

    Without the attribute only those of this package do: they are trusted to be quick and to stop when cancelled. All
    others run in a sandbox.
    """
    declared = getattr(plugin, "in_process", None)
    return module_of(plugin).startswith("rftdask.") if declared is None else bool(declared)


def requires(plugin: Any) -> Mapping[str, str]:
    """Return the optional modules that a plug-in imports, each with the extra of this package that installs it."""
    needed: Mapping[str, str] = getattr(plugin, "requires", {})
    return needed


def module_of(plugin: Any) -> str:
    """Return the module that defines the plug-in."""
    return str(getattr(plugin, "__module__", None) or type(plugin).__module__)
