"""Plug-ins by name: tables of named functions, dotted paths, and folders of modules. Nothing is copied anywhere.

A plug-in that is this package's own is trusted to be quick and to stop when it is cancelled, so it runs on the event
loop; any other runs in a process of its own (sandbox.py) unless it says `in_process = True`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftdask.errors import UserError


def find_plugin(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """`known[name]`, or the object at the dotted path `name` ("package.module.function").

    Raises: UserError: no such name, module or attribute, with what comes nearest; or the module raises when it is
    imported, with its traceback.
    """
    if name in known:
        return _installed(kind, name, known[name])
    if "." not in name:
        near = ", ".join(_nearest(name, known)) or ", ".join(sorted(known))
        raise UserError(f"unknown {kind} {name!r}; nearest: {near}; or give a dotted path such as my_module.{name}")
    module_name, _, attribute = name.rpartition(".")
    module = _import(module_name, f"{kind} {name!r}")
    if not hasattr(module, attribute):
        near = ", ".join(_nearest(attribute, dir(module))) or "nothing similar"
        raise UserError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}; it has {near}")
    return getattr(module, attribute)


def _installed(kind: str, name: str, plugin: Any) -> Any:
    """The plug-in, if what it needs is there: `requires`, module -> extra of this package."""
    for module, extra in requires(plugin).items():
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"{kind} {name!r} needs the package {package!r}; install it: pip install 'rftdask[{extra}]'"
            )
    return plugin


def load_plugin_folders(folders: Sequence[str]) -> None:
    """Import every module (*.py but for those that begin with _) of `folders`, so that what they register is known by
    its name; from then on the folders are on sys.path, where processes started later find them, too.

    Raises: UserError: a folder is not there, or a module raises, with its traceback.
    """
    importlib.invalidate_caches()  # for what was written a moment ago
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise UserError(f"plugin folder {folder!r} does not exist or is no folder (explorer.plugin_dirs)")
        if str(path) not in sys.path:
            sys.path.append(str(path))
        for file in sorted(path.glob("[!_]*.py")):
            module = _import(file.stem, f"plugin {file}")
            if Path(module.__file__ or "") != file:
                raise UserError(
                    f"plugin {file}: another module is called {file.stem!r}: {module.__file__}; rename yours"
                )


def runs_in_process(plugin: Any) -> bool:
    """Whether it runs on the event loop: what it says itself, else whether it is this package's own."""
    declared = getattr(plugin, "in_process", None)
    return module_of(plugin).startswith("rftdask.") if declared is None else bool(declared)


def requires(plugin: Any) -> Mapping[str, str]:
    """Optional modules that the plug-in imports -> the extra of this package that installs them."""
    needed: Mapping[str, str] = getattr(plugin, "requires", {})
    return needed


def module_of(plugin: Any) -> str:
    """The module that has to be imported for the plug-in to be there."""
    return str(getattr(plugin, "__module__", None) or type(plugin).__module__)


def _import(module_name: str, what: str) -> Any:
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


def _nearest(name: str, known: Any) -> list[str]:
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
