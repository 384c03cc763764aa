"""Sources: the user's own code of a run: plug-ins, workflows, rewards, and what they import of it.

Python's own modules, installed packages and this package have versions, which `run.json` says. A batch system runs
the copies that were submitted: its scripts set SUBMITTED, and every process of the run imports from there
(config/plugins.py).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rftdask.config import Config
from rftdask.config.parts import named_parts
from rftdask.config.plugins import MODULES, PLUGINS, SUBMITTED, find_part, is_own_code, module_of, plugin_folders
from rftdask.errors import UserError

SOURCES_FOLDER = "sources"
"""In the run's private folder: the copies for its jobs."""
_GIT_FILE = "git.json"
_GIT_TIMEOUT_S = 5.0


def find_sources(stage: Config, modules: Iterable[str]) -> dict[str, Path]:
    """Module -> file: those of plug-in folders, those that the config names, `modules`, and the user's own that they
    import, wherever in their text.

    modules: names of further ones, imported.
    """
    folders = stage.explorer.plugin_dirs
    found = {
        file.stem: file for folder in plugin_folders(folders) for file in sorted(folder.glob("*.py")) if file.is_file()
    }
    names = set(modules)
    for use in named_parts(stage):
        if use.registered is None:
            try:
                names.add(module_of(find_part(use.named.kind, use.name, use.named.registered(), folders)))
            except UserError:
                continue  # not installed on this machine, which was said
    # The modules are imported, so they themselves say where they are from.
    for name in sorted(names):
        path = str(getattr(sys.modules.get(name), "__file__", None) or "")
        if path.endswith(".py") and name.partition(".")[0] != "rftdask":
            found.setdefault(name, Path(path))
    # What they import of the user's own, and so on; `seen` has also what is installed, so that each name is looked up
    # once.
    waiting, seen = list(found), set(found)
    while waiting:
        name = waiting.pop()
        for imported in _imports(name, found[name]) - seen:
            seen.add(imported)
            spec = _spec(imported)
            if spec is not None and is_own_code(spec.origin or ""):
                found[imported] = Path(spec.origin or "")
                waiting.append(imported)
    return dict(sorted(found.items()))


def _imports(name: str, file: Path) -> set[str]:
    """What a module may import by its text, with the packages above."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    # Also each package above: importing a.b.c runs the __init__ of a and of a.b. A name after "from" may be a module or
    # an attribute; what is none has no spec.
    names = {package}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {".".join(parts[:end]) for parts in (n.split(".") for n in names) for end in range(1, len(parts) + 1)} - {""}


def _spec(name: str) -> ModuleSpec | None:
    """Where a module would come from; imports nothing."""
    if (module := sys.modules.get(name)) is not None:
        return module.__spec__
    # importlib.util.find_spec("a.b") would import a; its own search places say as much.
    parent, _, _ = name.rpartition(".")
    try:
        if not parent:
            return importlib.util.find_spec(name)
        above = _spec(parent)
        places = above.submodule_search_locations if above is not None else None
        return PathFinder.find_spec(name, places) if places is not None else None
    except (ImportError, ValueError):
        return None


def copy_for_jobs(sources: Mapping[str, Path], plugin_dirs: Sequence[str], folder: Path) -> None:
    """Copy the user's own sources to `folder`, for the jobs of a run. What lies beside them is linked, so that a module
    finds its data; what an earlier submission left is replaced.
    """
    # Whole: a module that was deleted since must not be found in the old copies.
    shutil.rmtree(folder, ignore_errors=True)
    plugins = plugin_folders(plugin_dirs)
    for part in (PLUGINS, MODULES):
        (folder / part).mkdir(parents=True)
    beside: dict[Path, Path] = {}
    for name, file in sources.items():
        if not is_own_code(str(file)):
            continue
        below = [*name.split("."), "__init__"] if file.name == "__init__.py" else name.split(".")
        part = PLUGINS if any(file.resolve().is_relative_to(each) for each in plugins) else MODULES
        copy = folder.joinpath(part, *below).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        # A module may open a file next to it; such files may be large, so they are linked where they are.
        beside[copy.parent] = file.resolve().parent
    for place, original in beside.items():
        for other in original.iterdir():
            is_source = other.suffix == ".py" or other.name == "__pycache__" or other.name.startswith(".")
            if not is_source and not (place / other.name).exists():
                (place / other.name).symlink_to(other)
    (folder / _GIT_FILE).write_text(json.dumps(git_states(sources.values())))


def git_states(files: Iterable[Path]) -> dict[str, Any]:
    """{"commit", "is_dirty"} of the git repositories of the working directory and of `files`, by their top folders; in
    a job, as they were when it was submitted. Dirty: what git knows differs from the commit, or it does not know one of
    `files`.
    """
    if SUBMITTED in os.environ:
        try:
            told: dict[str, Any] = json.loads(Path(os.environ[SUBMITTED], _GIT_FILE).read_bytes())
            return told
        except (OSError, ValueError):
            return {}
    own = [file.resolve() for file in files if is_own_code(str(file))]
    return dict(_git_states(own))


def _git_states(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    def ask(folder: Path | str, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    seen = set()
    for folder in dict.fromkeys((Path.cwd(), *(file.parent for file in files))):
        try:
            top = ask(folder, "rev-parse", "--show-toplevel")
            if top in seen:
                continue
            seen.add(top)
            commit = ask(top, "rev-parse", "HEAD")
            # Of the run's own sources: an untracked file elsewhere in the repository says nothing about the run.
            known = [str(file) for file in files if file.is_relative_to(top)]
            unknown = ask(top, "ls-files", "--others", "--", *known) if known else ""
            yield top, {"commit": commit, "is_dirty": bool(unknown or ask(top, "status", "--porcelain", "-uno"))}
        except (OSError, subprocess.SubprocessError):
            continue  # no git here, or no commit yet
