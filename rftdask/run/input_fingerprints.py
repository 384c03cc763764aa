"""What a run is made of beside its config: sources of plug-ins and rewards, rows of tasksets, files of models.

`run.json` says what the first start found, and `sources/` has copies. A later start that finds something else is
refused, unless it is told to accept that: then `control/accepted-<n>.json`, numbered and create-only, says what changed
and after which step. Only what both found is compared: two commands of a run, such as explore and train, see different
parts of it. It knows neither what the parts mean nor who may start a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rftdask.buffer.batches.ledger import Ledger
from rftdask.config import Config
from rftdask.data.hub import is_model_name, local_model
from rftdask.errors import DamagedError, DataError
from rftdask.run.run_folder import RUN_FILE, read_run
from rftdask.run.sources import find_sources, git_states
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import next_number, numbers_in
from rftdask.storage.checked_json import parse_object

_ACCEPTED = "control/accepted-{}.json"
_COPY = "sources/{}-{}.py"
"""Of a module, by its name and the beginning of its hash."""
_COMPARED = ("sources", "tasksets", "models")
MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".tiktoken", ".jinja", ".py"}
"""Suffixes of the files that a model may be loaded from."""
_WHOLE_BYTES = 16 << 20
"""Longest file of a model that is read whole; of a longer one, `_NUM_PIECES` spread over it."""
_NUM_PIECES, _PIECE_BYTES = 16, 1 << 18
_CHUNK_BYTES = 1 << 20
_EVALUATES = "eval/"
"""Beginning of the names of tasksets that only evaluate."""

log = logging.getLogger(__name__)


class Inputs(Protocol):
    """What the checks of a stage found (preflight.Inputs)."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Content hashes of what is trained on, by the name of the dataset."""

    @property
    def modules(self) -> Iterable[str]:
        """Names of the modules that define its workflows and rewards."""


@dataclass(frozen=True)
class MadeOf:
    """What one start of a stage found."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the file of each module of the user's (sources.py)."""
    tasksets: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints by the name of the taskset; of a supervised dataset as "dataset"."""
    models: Mapping[str, str] = field(default_factory=dict)
    """"<bytes> <hash>" by "<key of the config>/<file>", recipes of operator data_juicer among them. The hash is the one
    under which the Hub's cache stores it, or else of its content: all of a small file, pieces of a large one, of which
    training changes every one and whose whole content `WholeContents` hashes beside the run."""
    files: Mapping[str, Path] = field(default_factory=dict, repr=False)
    """Where the sources are; not written down."""
    large: Mapping[str, Path] = field(default_factory=dict, repr=False)
    """Where the files of models are of which `models` has a hash of pieces, by the same names; not written down."""

    @classmethod
    def of(cls, stage: Config, modules: Iterable[str], tasksets: Mapping[str, str], *, is_first: bool) -> MadeOf:
        """Read what `stage` is made of.

        Args:
            modules: names of those that have the workflows and rewards of its tasks; imported.
            tasksets: their fingerprints.
            is_first: False: its model is what an earlier stage makes.
        """
        files = find_sources(stage, modules)
        hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
        # Models by the key that names them. The policy only of the first stage: later ones train what the run itself
        # made.
        found = {"model.critic_model_path": stage.model.critic_model_path}
        for number, model in enumerate(stage.explorer.auxiliary_models):
            found[f"explorer.auxiliary_models[{number}]"] = None if model.traits.is_external else model.model_path
        found |= {"model.model_path": stage.model.model_path} if is_first and not stage.is_external else {}
        paths = {f"{key}/{file.name}": file for key, path in found.items() for file in _model_files(path)}
        # What a recipe says decides what is dropped, as a model does that somebody else has made.
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
        """As `run.json` has it, with the machine and the state of the user's git repositories."""
        compared = {kind: dict(getattr(self, kind)) for kind in _COMPARED}
        return {**compared, "host": socket.gethostname(), "git": git_states(self.files.values())}


def copy_sources(storage: Storage, made_of: MadeOf) -> None:
    """Keep the sources in the run folder, under names that a changed one does not have."""
    for module, digest in made_of.sources.items():
        storage.put_new(_COPY.format(module, digest[:12]), made_of.files[module].read_bytes())


def check_made_of(stages: Sequence[Config], inputs: Sequence[Inputs], *, accept: bool = False) -> list[MadeOf]:
    """Hold what a start found against what the run was made of before; what each stage is made of now.

    Raises: DataError: something changed and `accept` is False; names all of it.
    """
    found = []
    for number, (stage, read) in enumerate(zip(stages, inputs, strict=True)):
        found.append(MadeOf.of(stage, read.modules, read.fingerprints, is_first=number == 0))
        _check(open_storage(stage.checkpoint_job_dir), found[-1], accept)
    return found


def _check(storage: Storage, made_of: MadeOf, accept: bool) -> None:
    # What it was made of at last, by kind; a run of before this was written down has nothing to compare with.
    was = dict[str, dict[str, str]]()
    first = read_run(storage).get("made_of") or {} if storage.exists(RUN_FILE) else {}
    for each in (_told(storage, RUN_FILE, first), *_accepted(storage)):
        for kind in _COMPARED:
            was.setdefault(kind, {}).update(each.get(kind) or {})
    changes = [text for kind in _COMPARED for text in _changes(kind, was.get(kind, {}), getattr(made_of, kind))]
    refused = [text for text in changes if not text.startswith(f"taskset {_EVALUATES}")]
    if not changes:
        return
    # Other rows for evaluation change no weights: they are told and written down, and refuse nothing.
    if refused and not accept:
        raise DataError(_refusal(storage, refused))
    for text in (text for text in changes if text not in refused):
        log.warning("%s: what is evaluated from now on does not compare with what was; written down", text)
    _write_accepted(storage, made_of, changes)


def _refusal(storage: Storage, changes: Sequence[str]) -> str:
    return (
        f"{storage.url} was made of something else; put it back (copies of sources are in {storage.url}/sources), "
        "choose another name, or accept the change with --accept-changes, which is written down:\n"
        + "\n".join(f"  - {text}" for text in changes)
    )


def _write_accepted(storage: Storage, made_of: MadeOf, changes: Sequence[str]) -> int:
    number = next_number(storage.list("control"), "accepted-", ".json")
    copy_sources(storage, made_of)
    said = {"changes": changes, "after_step": Ledger(storage).last_step(), "time_s": time.time(), **made_of.to_json()}
    if not storage.put_new(_ACCEPTED.format(number), json.dumps(said, indent=1).encode()):
        raise DataError(f"another process has just accepted changes of {storage.url}; start again")
    return number


class WholeContents:
    """Hashes all of the large files of models in a thread, while a stage runs, and holds them against what an earlier
    start found: `control/contents-<mode>-<n>.json`, after `n` accepted changes.

    Example: contents = WholeContents(storage, "both", made_of); contents.check(); ...; contents.close()
    """

    def __init__(self, storage: Storage, mode: str, made_of: MadeOf, *, accept: bool = False) -> None:
        self._storage, self._mode, self._made_of, self._accept = storage, mode, made_of, accept
        self._error: BaseException | None = None
        self._closed = threading.Event()
        # Daemon: a run that ends does not wait for the hash of a hundred gigabytes.
        self._thread = threading.Thread(target=self._run, name="contents", daemon=True)
        if made_of.large:
            self._thread.start()

    def check(self) -> None:
        """Waits for nothing. Raises: DataError: a file has another content than at an earlier start; what the thread
        met.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give up what is left to do. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        try:
            now = {name: self._hash(file) for name, file in self._made_of.large.items()}
            # Given up half-way, it has hashed parts of files, which compare with nothing.
            if not self._closed.is_set():
                self._settle({name: said for name, said in now.items() if said})
        except BaseException as error:  # raised by `check`, in the thread of the run
            self._error = error

    def _hash(self, file: Path) -> str:
        digest, size = hashlib.sha256(), 0
        with file.open("rb") as opened:
            while not self._closed.is_set() and (piece := opened.read(_CHUNK_BYTES)):
                digest.update(piece)  # a long one lets other threads run
                size += len(piece)
        return f"{size} {digest.hexdigest()}"

    def _settle(self, now: Mapping[str, str]) -> None:
        storage, names = self._storage, self._storage.list("control")
        # Only what was hashed since the last accepted change compares with what is there now.
        number = max(numbers_in(names, "accepted-", ".json"), default=0)
        was: dict[str, str] = {}
        for path in (f"control/{name}" for name in names if re.fullmatch(rf"contents-\w+-{number}\.json", name)):
            was |= _told(storage, path, storage.get(path)).get("models") or {}
        if changes := list(_changes("models", was, now)):
            if not self._accept:
                raise DataError(_refusal(storage, changes))
            number = _write_accepted(storage, self._made_of, changes)
        said = json.dumps({"models": now}, indent=1).encode()
        storage.put_new(f"control/contents-{self._mode}-{number}.json", said)


def accepted_changes(storage: Storage) -> list[str]:
    """What was accepted, in its order: "after step 12: source my_reward changed". Raises: DamagedError."""
    return [f"after step {said.get('after_step')}: {text}" for said in _accepted(storage) for text in said["changes"]]


def _accepted(storage: Storage) -> list[dict[str, Any]]:
    paths = [_ACCEPTED.format(n) for n in sorted(numbers_in(storage.list("control"), "accepted-", ".json"))]
    return [_told(storage, path, storage.get(path)) for path in paths]


def _told(storage: Storage, path: str, data: bytes | Mapping[str, Any]) -> dict[str, Any]:
    """What was found, as it was written down. Raises: DamagedError: it has another shape."""
    try:
        # accepted-<n>.json has changes; the other files that come here have none.
        said = {"changes": [], **(parse_object(data) if isinstance(data, bytes) else data)}
        texts = [*said["changes"], *(text for kind in _COMPARED for text in dict(said.get(kind) or {}).values())]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("it holds something else than texts")
    except (TypeError, ValueError) as error:
        raise DamagedError(f"{storage.url}/{path} is damaged: {error}") from error
    return said


def _changes(kind: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    # What only one start found says nothing: two commands of a run see different parts of it.
    for name in sorted(was.keys() & now.keys()):
        if was[name] == now[name]:
            continue
        if kind == "tasksets":
            yield f"taskset {name}: other rows, or another order (fingerprint {was[name][:12]}, now {now[name][:12]})"
        elif kind == "sources":
            yield f"source {name}: another content (sha256 {was[name][:12]}, now {now[name][:12]})"
        else:
            yield f"{name}: another content (was {was[name]:.40}, is {now[name]:.40}; bytes and hash)"


def _model_files(path: str | None) -> list[Path]:
    """The files of a model folder, or of a name's copy on this machine."""
    # A name of the Hub is looked up in this machine's cache, and never fetched for this.
    folder = Path(local_model(path) if is_model_name(path) else path).expanduser() if path else Path()
    files = sorted(folder.iterdir()) if path and folder.is_dir() else []
    return [file for file in files if file.suffix in MODEL_FILES and file.is_file()]


def _stored_hash(file: Path) -> str:
    """That under which the Hub's cache stores the content, as the name of a blob; empty: it is no file of it."""
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
