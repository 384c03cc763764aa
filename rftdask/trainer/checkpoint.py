"""Checkpoint: everything a run resumes from, in `global_step_<N>/`, made to exist by its manifest.

Invariants: the pointer moves only after the manifest; the newest valid checkpoint is never removed; a folder that is
not valid is not a checkpoint, and the next older one is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rftdask.buffer.log.retention import ResumePoint
from rftdask.errors import DamagedError
from rftdask.storage import Storage
from rftdask.weights.manifest import (
    FileEntry,
    Manifest,
    commit_folder,
    extend_folder,
    is_valid,
    put_files,
    read_file,
    read_manifest,
    remove_folder,
)
from rftdask.weights.published import CHECKPOINT_POINTER, move_pointer

STATE_FILE = "trainer_state.json"
HF_FOLDER = "actor/huggingface"


def checkpoint_folder(step: int) -> str:
    return f"global_step_{step}"


def checkpoint_steps(storage: Storage) -> list[int]:
    """Steps of all checkpoint folders, ascending; a folder may not be valid."""
    names = (n.removesuffix("/").removeprefix("global_step_") for n in storage.list() if n.startswith("global_step_"))
    return sorted(int(n) for n in names if n.isdigit())


def newest_valid_checkpoint(storage: Storage) -> int | None:
    """Step of the newest checkpoint whose every byte is verified; None if there is none."""
    return next(
        (s for s in reversed(checkpoint_steps(storage)) if is_valid(storage, checkpoint_folder(s), version=s)), None
    )


def oldest_resume_point(storage: Storage) -> ResumePoint | None:
    """Of the oldest checkpoint there is, valid or not: an earlier one than needed does no harm. None: there is none.

    Raises: DamagedError: it cannot be read.
    """
    for step in checkpoint_steps(storage):
        manifest = read_manifest(storage, checkpoint_folder(step))
        if manifest is not None:
            state = json.loads(read_file(storage, checkpoint_folder(step), manifest, STATE_FILE))
            return ResumePoint(step, int(state["source"]["low"]))
    return None


class CheckpointFiles(Mapping[str, bytes]):
    """The files that a manifest names, each read and verified when it is asked for.

    Raises: NotFoundError, DamagedError: by `[name]`, as `read_file`.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._storage, self._folder, self._manifest = storage, folder, manifest

    def __getitem__(self, name: str) -> bytes:
        return read_file(self._storage, self._folder, self._manifest, name)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest.files  # the inherited one would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.files)

    def __len__(self) -> int:
        return len(self._manifest.files)


class Checkpoints:
    """Writes and reads the checkpoints of one lineage."""

    def __init__(self, storage: Storage, lineage: str, max_to_keep: int = 0) -> None:
        """max_to_keep: 0 keeps all."""
        self._storage = storage
        self._lineage = lineage
        self._max_to_keep = max_to_keep
        self.on_commit: Callable[[int], None] = lambda step: None
        """Told of every checkpoint that was made to exist; from any thread."""

    def save(self, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> None:
        """Write and commit the checkpoint of `step`, then drop the oldest ones beyond the limit. `state` is JSON."""
        if not self.is_there(step):
            self.commit(step, self.put_files(step, files), state)

    def is_there(self, step: int) -> bool:
        """Whether `step` has a valid checkpoint, which then is what the pointer names."""
        valid = is_valid(self._storage, checkpoint_folder(step), version=step)
        if valid:
            self._settle(step)
        return valid

    def put_files(self, step: int, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
        """Write some of the files of `step`; without a manifest they are no checkpoint yet."""
        return put_files(self._storage, checkpoint_folder(step), files)

    def commit(self, step: int, entries: Mapping[str, FileEntry], state: Mapping[str, Any]) -> None:
        """Make files that were put the checkpoint of `step`, then drop the oldest ones beyond the limit."""
        folder = checkpoint_folder(step)
        own = put_files(self._storage, folder, {STATE_FILE: json.dumps(state, sort_keys=True).encode()})
        # What an engine that evaluates the checkpoint must compute stands where it looks, in the manifest.
        extra = {key: value for key, value in state.items() if key == "fingerprint"}
        commit_folder(self._storage, folder, Manifest(self._lineage, step, {**entries, **own}, extra))
        self._settle(step)
        self.on_commit(step)

    def check(self) -> None:
        """Look after what is written in the background. Raises: what went wrong there."""

    def flush(self) -> None:
        """Wait until all is written. Raises: as `check`."""

    def files(self, step: int) -> CheckpointFiles | None:
        """The files of a checkpoint; None if it is not there."""
        folder = checkpoint_folder(step)
        manifest = read_manifest(self._storage, folder)
        return None if manifest is None else CheckpointFiles(self._storage, folder, manifest)

    def add_files(self, step: int, files: Mapping[str, bytes]) -> None:
        """Add files to a checkpoint, unless it has them already; its manifest grows in one atomic step."""
        manifest = read_manifest(self._storage, checkpoint_folder(step))
        if manifest is not None and not set(files) <= set(manifest.files):
            extend_folder(self._storage, checkpoint_folder(step), manifest, files)

    def load_newest(self) -> tuple[int, dict[str, Any], Mapping[str, bytes]] | None:
        """(step, state, files) of the newest valid checkpoint; None if there is none."""
        step = newest_valid_checkpoint(self._storage)
        if step is None:
            return None
        found = self.load(step)
        self._settle(step)  # whoever saved it may have been killed before it could
        return found

    def load(self, step: int) -> tuple[int, dict[str, Any], Mapping[str, bytes]]:
        """(step, state, files) of a valid checkpoint. Raises: DamagedError: it went away, or is of another lineage."""
        folder = checkpoint_folder(step)
        manifest = read_manifest(self._storage, folder)
        if manifest is None:
            raise DamagedError(f"{folder} lost its manifest while it was read")
        if manifest.lineage != self._lineage:
            raise DamagedError(f"{folder} is of lineage {manifest.lineage}, this trainer works on {self._lineage}")
        state = json.loads(read_file(self._storage, folder, manifest, STATE_FILE))
        return step, state, CheckpointFiles(self._storage, folder, manifest)

    def _settle(self, newest: int) -> None:
        """Point to `newest`, which was verified or written just now, and drop the oldest before it beyond the limit."""
        move_pointer(self._storage, CHECKPOINT_POINTER, newest)
        older = [step for step in checkpoint_steps(self._storage) if step < newest]
        if self._max_to_keep > 0:
            for step in older[: max(0, len(older) + 1 - self._max_to_keep)]:
                remove_folder(self._storage, checkpoint_folder(step))
