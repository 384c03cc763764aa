"""Fingerprints of a run's inputs that its config does not contain: the user's source files, rows of tasksets, files of
models.

`run.json` has those of the first start, and `sources/` has copies of the sources. A later start with other inputs is
refused unless the user accepts the changes; `control/accepted-<n>.json`, numbered and create-only, then records them
and the step before. Only inputs that both starts found are compared, since commands such as explore and train see
different ones. Python, installed packages and this package have versions in `run.json`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rftdask.buffer.batches.ledger import Ledger
from rftdask.config import Config
from rftdask.config.parts import named_parts
from rftdask.config.plugins import (
    MODULES,
    PLUGINS,
    SUBMITTED,
    find_part,
    is_own_code,
    module_of,
    parse_python,
    plugin_folders,
)
from rftdask.data.hub import is_model_name, local_model
from rftdask.errors import DamagedError, DataError, UserError
from rftdask.run.run_folder import RUN_FILE, read_run
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import next_number, numbers_in
from rftdask.storage.checked_json import parse_object

MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".tiktoken", ".jinja", ".py"}
"""Suffixes of the files that loading a model may read."""
_GIT_FILE = "git.json"
_GIT_TIMEOUT_S = 5.0
_ACCEPTED = "control/accepted-{}.json"
_COPY = "sources/{}-{}.py"
"""Copy of a source: module and beginning of its hash."""
_COMPARED = ("sources", "tasksets", "models")
_WHOLE_BYTES = 16 << 20
"""Model files up to this size are hashed completely, larger ones in `_NUM_PIECES` pieces."""
_NUM_PIECES, _PIECE_BYTES = 16, 1 << 18
_CHUNK_BYTES = 1 << 20
_EVALUATES = "eval/"
"""Prefix of the names of tasksets that are only evaluated."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a stage that its checks have read (driver/preflight.py)."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Number of rows by taskset name; a supervised dataset is "dataset"."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Content hashes by the same names, with the prefix "eval/" for evaluation data."""
    modules: set[str] = field(default_factory=set)
    """Names of the modules of workflows and rewards."""


@dataclass(frozen=True)
class InputFingerprints:
    """Fingerprints of a stage at one start."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the file of each of the user's modules."""
    tasksets: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints by the name of the taskset; a supervised dataset is "dataset"."""
    models: Mapping[str, str] = field(default_factory=dict)
    """"<bytes> <hash>" by "<config key>/<file>", including recipes of the operator data_juicer. The hash is the name in
    the cache of the Hub, or the hash of the content. Large files are hashed in pieces, each of which training changes;
    `BackgroundHasher` hashes them completely during the run."""
    files: Mapping[str, Path] = field(default_factory=dict, repr=False)
    """Paths of `sources`; not stored."""
    large: Mapping[str, Path] = field(default_factory=dict, repr=False)
    """Paths of the model files that are hashed in pieces, by the names in `models`; not stored."""

    @classmethod
    def of(
        cls, stage: Config, modules: Iterable[str], tasksets: Mapping[str, str], *, is_first: bool
    ) -> InputFingerprints:
        """Compute the fingerprints of a stage.

        Args: modules: names of the imported modules with its workflows and rewards. is_first: False: an earlier stage
        makes its model.
        """
        files = find_sources(stage, modules)
        hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
        folders = {"model.critic_model_path": stage.model.critic_model_path}
        for number, lora in enumerate(stage.model.lora_configs or ()):
            folders[f"model.lora_configs[{number}].path"] = lora.path
        for number, model in enumerate(stage.explorer.auxiliary_models):
            folders[f"explorer.auxiliary_models[{number}]"] = None if model.traits.is_external else model.model_path
        if is_first and not stage.is_external:
            folders["model.model_path"] = stage.model.model_path
        paths = {f"{key}/{file.name}": file for key, path in folders.items() for file in _model_files(path)}
        # A recipe decides which experiences are dropped.
        for number, operator in enumerate(stage.data_processor.experience_pipeline.operators):
            recipe = Path(str((operator.get("args") or {}).get("config_path") or "")).expanduser()
            if operator.get("name") == "data_juicer" and recipe.is_file():
                paths[f"data_processor.experience_pipeline.operators[{number}]/{recipe.name}"] = recipe
        large = {
            name: file for name, file in paths.items() if not _stored_hash(file) and file.stat().st_size > _WHOLE_BYTES
        }
        models = {
            name: f"{file.stat().st_size} {_stored_hash(file) or _content_hash(file)}" for name, file in paths.items()
        }
        return cls(hashes, tasksets, models, files, large)

    def to_json(self) -> dict[str, Any]:
        """Content of `run.json`, with the machine and the states of the user's git repositories."""
        compared = {kind: dict(getattr(self, kind)) for kind in _COMPARED}
        return {**compared, "host": socket.gethostname(), "git": git_states(self.files.values())}


def copy_sources(storage: Storage, inputs: InputFingerprints) -> None:
    """Copy the sources to the run folder, a changed source under a new name."""
    for module, digest in inputs.sources.items():
        storage.put_new(_COPY.format(module, digest[:12]), inputs.files[module].read_bytes())


def check_inputs_unchanged(
    stages: Sequence[Config], checked: Sequence[Inputs], *, accept: bool = False
) -> list[InputFingerprints]:
    """Compute the fingerprints of all stages. Raises: DataError: lists inputs that changed since earlier starts."""
    fingerprints = []
    for number, (stage, inputs) in enumerate(zip(stages, checked, strict=True)):
        fingerprints.append(InputFingerprints.of(stage, inputs.modules, inputs.fingerprints, is_first=number == 0))
        _check(open_storage(stage.checkpoint_job_dir), fingerprints[-1], accept)
    return fingerprints


def _check(storage: Storage, inputs: InputFingerprints, accept: bool) -> None:
    # A run of an older version has no fingerprints.
    newest = dict[str, dict[str, str]]()
    first = read_run(storage).get("fingerprints") or {} if storage.exists(RUN_FILE) else {}
    for record in (_parse_record(storage, RUN_FILE, first), *_accepted(storage)):
        for kind in _COMPARED:
            newest.setdefault(kind, {}).update(record.get(kind) or {})
    changes = [text for kind in _COMPARED for text in _changes(kind, newest.get(kind, {}), getattr(inputs, kind))]
    # Changed rows for evaluation affect no weights.
    refused = [text for text in changes if not text.startswith(f"taskset {_EVALUATES}")]
    if not changes:
        return
    if refused and not accept:
        raise DataError(_refusal(storage, refused))
    for text in (text for text in changes if text not in refused):
        log.warning("%s: new evaluation results do not compare with earlier ones; the change is recorded", text)
    _write_accepted(storage, inputs, changes)


def _refusal(storage: Storage, changes: Sequence[str]) -> str:
    return (
        f"the inputs of {storage.url} changed; restore them (copies of sources are in {storage.url}/sources), choose "
        "another name, or accept and record the changes with --accept-changes:\n"
        + "\n".join(f"  - {text}" for text in changes)
    )


def _write_accepted(storage: Storage, inputs: InputFingerprints, changes: Sequence[str]) -> int:
    number = next_number(storage.list("control"), "accepted-", ".json")
    copy_sources(storage, inputs)
    record = {"changes": changes, "after_step": Ledger(storage).last_step(), "time_s": time.time(), **inputs.to_json()}
    if not storage.put_new(_ACCEPTED.format(number), json.dumps(record, indent=1).encode()):
        raise DataError(f"another process has just accepted changes of {storage.url}; start again")
    return number


class BackgroundHasher:
    """Hashes large model files completely in a thread during a stage and compares them with those of earlier starts, in
    `control/contents-<mode>-<n>.json` after `n` accepted changes.
    """

    def __init__(self, storage: Storage, mode: str, inputs: InputFingerprints, *, accept: bool = False) -> None:
        self._storage, self._mode, self._inputs, self._accept = storage, mode, inputs, accept
        self._error: BaseException | None = None
        self._closed = threading.Event()
        # Daemon: a run does not wait at its end for the hash of a hundred gigabytes.
        self._thread = threading.Thread(target=self._run, name="contents", daemon=True)
        if inputs.large:
            self._thread.start()

    def check(self) -> None:
        """Raise the error of the thread, without waiting. Raises: DataError: a file changed since an earlier start."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        try:
            hashes = {name: self._hash(file) for name, file in self._inputs.large.items()}
            if not self._closed.is_set():  # else they are hashes of parts
                self._compare(hashes)
        except BaseException as error:  # `check` raises it in the thread of the run
            self._error = error

    def _hash(self, file: Path) -> str:
        digest, size = hashlib.sha256(), 0
        with file.open("rb") as opened:
            while not self._closed.is_set() and (piece := opened.read(_CHUNK_BYTES)):
                digest.update(piece)  # releases the GIL
                size += len(piece)
        return f"{size} {digest.hexdigest()}"

    def _compare(self, hashes: Mapping[str, str]) -> None:
        storage, names = self._storage, self._storage.list("control")
        # Hashes from before the last accepted change no longer count.
        number = max(numbers_in(names, "accepted-", ".json"), default=0)
        earlier: dict[str, str] = {}
        for path in (f"control/{name}" for name in names if re.fullmatch(rf"contents-\w+-{number}\.json", name)):
            earlier |= _parse_record(storage, path, storage.get(path)).get("models") or {}
        if changes := list(_changes("models", earlier, hashes)):
            if not self._accept:
                raise DataError(_refusal(storage, changes))
            number = _write_accepted(storage, self._inputs, changes)
        record = json.dumps({"models": hashes}, indent=1).encode()
        storage.put_new(f"control/contents-{self._mode}-{number}.json", record)


def accepted_changes(storage: Storage) -> list[str]:
    """Accepted changes in order: "after step 12: source my_reward: ...". Raises: DamagedError."""
    return [f"after step {row.get('after_step')}: {text}" for row in _accepted(storage) for text in row["changes"]]


def _accepted(storage: Storage) -> list[dict[str, Any]]:
    paths = [_ACCEPTED.format(n) for n in sorted(numbers_in(storage.list("control"), "accepted-", ".json"))]
    return [_parse_record(storage, path, storage.get(path)) for path in paths]


def _parse_record(storage: Storage, path: str, data: bytes | Mapping[str, Any]) -> dict[str, Any]:
    """Stored fingerprints, with "changes". Raises: DamagedError: not the expected types."""
    try:
        record = {"changes": [], **(parse_object(data) if isinstance(data, bytes) else data)}
        texts = [*record["changes"], *(text for kind in _COMPARED for text in dict(record.get(kind) or {}).values())]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("all values must be texts")
    except (TypeError, ValueError) as error:
        raise DamagedError(f"{storage.url}/{path} is damaged: {error}") from error
    return record


def _changes(kind: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(was.keys() & now.keys()):
        if was[name] == now[name]:
            continue
        if kind == "tasksets":
            yield f"taskset {name}: rows or their order changed (fingerprint {was[name][:12]}, now {now[name][:12]})"
        elif kind == "sources":
            yield f"source {name}: content changed (sha256 {was[name][:12]}, now {now[name][:12]})"
        else:
            yield f"{name}: content changed (was {was[name]:.40}, is {now[name]:.40}; bytes and hash)"


def _model_files(path: str | None) -> list[Path]:
    """Files of a model folder, or of the local copy of a Hub model, which is never downloaded here."""
    folder = Path(local_model(path) if is_model_name(path) else path).expanduser() if path else Path()
    files = sorted(folder.iterdir()) if path and folder.is_dir() else []
    return [file for file in files if file.suffix in MODEL_FILES and file.is_file()]


def _stored_hash(file: Path) -> str:
    """Name of the blob in the cache of the Hub, which is the hash of its content; empty: not a file of that cache."""
    return file.resolve().name if file.is_symlink() and file.resolve().parent.name == "blobs" else ""


def _content_hash(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        if size <= _WHOLE_BYTES:
            digest.update(opened.read())
        else:
            for piece in range(_NUM_PIECES):
                # Spread evenly, from the first byte to the last.
                opened.seek((size - _PIECE_BYTES) * piece // (_NUM_PIECES - 1))
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()


def find_sources(stage: Config, modules: Iterable[str]) -> dict[str, Path]:
    """Find the user's own source files, by module name: plug-in folders, parts that the config names, `modules`, and
    all that these import of the user's code, also inside functions.

    modules: names of further modules, already imported.
    """
    folders = stage.explorer.plugin_dirs
    sources = {
        file.stem: file for folder in plugin_folders(folders) for file in sorted(folder.glob("*.py")) if file.is_file()
    }
    names = set(modules)
    for use in named_parts(stage):
        if use.registered is None:
            try:
                names.add(module_of(find_part(use.named.kind, use.name, use.named.registered(), folders)))
            except UserError:
                continue  # not installed on this machine, which was reported
    for name in sorted(names):
        path = str(getattr(sys.modules.get(name), "__file__", None) or "")
        if path.endswith(".py") and name.partition(".")[0] != "rftdask":
            sources.setdefault(name, Path(path))
    # `seen` includes installed modules, so that each name is looked up once.
    waiting, seen = list(sources), set(sources)
    while waiting:
        name = waiting.pop()
        for imported in _imports(name, sources[name]) - seen:
            seen.add(imported)
            spec = _spec(imported)
            if spec is not None and is_own_code(spec.origin or ""):
                sources[imported] = Path(spec.origin or "")
                waiting.append(imported)
    return dict(sorted(sources.items()))


def _imports(name: str, file: Path) -> set[str]:
    """Names of modules that a source file may import, with their parent packages."""
    try:
        tree = parse_python(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    # Importing a.b.c also runs the __init__ of a and a.b. A name after "from" may be an attribute, without a spec.
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
    """Spec of a module, without importing anything."""
    if (module := sys.modules.get(name)) is not None:
        return module.__spec__
    # importlib.util.find_spec("a.b") would import a.
    parent, _, _ = name.rpartition(".")
    try:
        if not parent:
            return importlib.util.find_spec(name)
        above = _spec(parent)
        locations = above.submodule_search_locations if above is not None else None
        return PathFinder.find_spec(name, locations) if locations is not None else None
    except (ImportError, ValueError):
        return None


def copy_for_jobs(sources: Mapping[str, Path], plugin_dirs: Sequence[str], folder: Path) -> None:
    """Copy the user's own sources to `folder` for the jobs of a run, and link the other files next to them, so that a
    module finds its data. Replaces the copies of an earlier submission.

    Scripts of jobs set SUBMITTED, and every process of the run imports the copies (config/plugins.py).
    """
    # A module that was deleted since must not remain as an old copy.
    shutil.rmtree(folder, ignore_errors=True)
    plugins = plugin_folders(plugin_dirs)
    for part in (PLUGINS, MODULES):
        (folder / part).mkdir(parents=True)
    originals: dict[Path, Path] = {}
    for name, file in sources.items():
        if not is_own_code(str(file)):
            continue
        below = [*name.split("."), "__init__"] if file.name == "__init__.py" else name.split(".")
        part = PLUGINS if any(file.resolve().is_relative_to(plugin) for plugin in plugins) else MODULES
        copy = folder.joinpath(part, *below).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        originals[copy.parent] = file.resolve().parent
    for copied, original in originals.items():
        for other in original.iterdir():
            is_source = other.suffix == ".py" or other.name == "__pycache__" or other.name.startswith(".")
            if not is_source and not (copied / other.name).exists():
                (copied / other.name).symlink_to(other)
    (folder / _GIT_FILE).write_text(json.dumps(git_states(sources.values())))


def git_states(files: Iterable[Path]) -> dict[str, Any]:
    """State {"commit", "is_dirty"} of the git repositories of the working directory and of `files`, by top folder. In a
    job: the states at its submission. Dirty: tracked files differ from the commit, or one of `files` is untracked.
    """
    if SUBMITTED in os.environ:
        try:
            return dict(json.loads(Path(os.environ[SUBMITTED], _GIT_FILE).read_bytes()))
        except (OSError, ValueError):
            return {}
    return dict(_git_states([file.resolve() for file in files if is_own_code(str(file))]))


def _git_states(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    def git(folder: Path | str, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    seen = set()
    for folder in dict.fromkeys((Path.cwd(), *(file.parent for file in files))):
        try:
            top = git(folder, "rev-parse", "--show-toplevel")
            if top in seen:
                continue
            seen.add(top)
            commit = git(top, "rev-parse", "HEAD")
            # Other untracked files of the repository do not matter to the run.
            sources = [str(file) for file in files if file.is_relative_to(top)]
            untracked = git(top, "ls-files", "--others", "--", *sources) if sources else ""
            yield top, {"commit": commit, "is_dirty": bool(untracked or git(top, "status", "--porcelain", "-uno"))}
        except (OSError, subprocess.SubprocessError):
            continue  # no git on this machine, or no commit yet
