"""Checkpoint: everything a run resumes from, in `global_step_<N>/`; it exists once its manifest is written.

Invariants: the pointer moves only after the manifest; the newest valid checkpoint is never removed; an invalid folder
is not a checkpoint, and the next older one is used.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rftdask.buffer.log.retention import ResumePoint
from rftdask.errors import DamagedError, NotFoundError, RftError
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage
from rftdask.storage.base import Data, in_daemon, numbers_in
from rftdask.storage.checked_json import parse_object
from rftdask.synchronizer import manifest as manifests
from rftdask.synchronizer.manifest import Manifest, is_valid, put_files, read_file, read_manifest
from rftdask.synchronizer.published import CHECKPOINT_POINTER, move_pointer

INTERIM = "interim"
"""Key in the manifest of a checkpoint that is removed when newer ones exist."""
STATE_FILE = "trainer_state.json"
HF_FOLDER = "actor/huggingface"
Result = TypeVar("Result")


def checkpoint_folder(step: int) -> str:
    """Return the folder of a step's checkpoint, below that of the run."""
    return f"global_step_{step}"


def checkpoint_steps(storage: Storage) -> list[int]:
    """Return the steps of all checkpoint folders, valid or not, ascending."""
    return numbers_in(storage.list(), "global_step_", "/")


def newest_valid_checkpoint(storage: Storage) -> int | None:
    """Return the step of the newest checkpoint after verifying every byte of it; None: no valid checkpoint exists."""
    return next(
        (s for s in reversed(checkpoint_steps(storage)) if is_valid(storage, checkpoint_folder(s), version=s)), None
    )


def oldest_resume_point(storage: Storage) -> ResumePoint | None:
    """Return the resume point of the oldest checkpoint, valid or not, since an earlier one does no harm; None: no
    checkpoint exists. Raises: DamagedError: it cannot be read."""
    for step in checkpoint_steps(storage):
        manifest = read_manifest(storage, checkpoint_folder(step))
        if manifest is not None:  # otherwise half written or half removed
            state = parse_object(read_file(storage, checkpoint_folder(step), manifest, STATE_FILE))
            return ResumePoint(step, int(state["source"]["low"]))
    return None


class CheckpointFiles(Mapping[str, bytes]):
    """Files of a checkpoint, which are read and verified on access; only heads are held in memory.

    All blocks of a file but its last have one length. Raises: NotFoundError, DamagedError: on any read, as `read_file`.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, heads: Mapping[str, bytes]) -> None:
        """heads: verified heads of tensor files, by file name; other heads are read on demand."""
        self._storage, self._folder, self._manifest, self._heads = storage, folder, manifest, heads
        self.blocks = manifests.blocks_of(manifest)
        """(file, number) of every block; block i belongs to rank i % size, which has the head of its file."""

    def __getitem__(self, name: str) -> bytes:
        return read_file(self._storage, self._folder, self._manifest, name)

    def head(self, name: str) -> bytes:
        """Return the beginning of a tensor file, up to the first byte of its tensors."""
        entry, head = self._manifest.files[name], self._heads.get(name)
        return manifests.verify_block(self._storage, f"{self._folder}/{name}", entry, 0) if head is None else head

    def span(self, name: str, number: int) -> tuple[int, int]:
        """Return the first byte of a block in its file, and the byte after its last."""
        return manifests.block_span(self._manifest.files[name], number)

    def stream(self, blocks: Sequence[tuple[str, int]]) -> Iterator[Data]:
        """Yield blocks one after another, each in pieces of PIECE_BYTES; damage is raised before the last piece."""
        return manifests.stream_blocks(self._storage, self._folder, self._manifest, blocks)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest.files  # the inherited one would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.files)

    def __len__(self) -> int:
        return len(self._manifest.files)


def turns_of(strategy: str, hosts: Sequence[str]) -> list[int]:
    """Return the turn in which each rank writes, by `trainer.save_strategy`. hosts: host name of each rank."""
    if strategy == "unrestricted":
        return [0] * len(hosts)
    # One turn per machine, in the order of first ranks; otherwise one per rank.
    order = list(dict.fromkeys(hosts))
    return [order.index(host) for host in hosts] if strategy == "single_node" else list(range(len(hosts)))


class Background:
    """Runs one job at a time in a daemon thread next to the training.

    The error of a job is raised by every later call, so no job starts after it and the run ends with its cause. A
    ThreadPoolExecutor does not fit: the interpreter joins its threads at exit, and a job may wait for a dead rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Start a job after the previous one has ended. Raises: the error of the previous one."""
        self.flush()
        self._last = future = in_daemon(job, self._name)
        return future

    def check(self) -> None:
        """Raise the error of the job if it has failed, without waiting."""
        if self._last.done():
            self._last.result()

    def flush(self) -> None:
        """Wait for the job. Raises: its error."""
        self._last.result()  # it ends: storage has retries, a process group a deadline

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        self._last.exception()  # waits, without replacing an error of the block


class Checkpoints:
    """Writes and reads the checkpoints of one lineage: each rank writes its files, then rank 0 the manifest.

    `save` returns once a thread has started writing in the background. The next `save` waits for the previous one, and
    `flush` for all. If a write fails on any rank, no manifest is written, and the next call raises the error on every
    rank. All ranks make all calls except those that read.
    """

    def __init__(
        self,
        storage: Storage,
        lineage: str,
        max_to_keep: int = 0,
        *,
        ranks: Ranks | None = None,
        writers: Ranks | None = None,
        strategy: str = "single_thread",
    ) -> None:
        """
        Args:
            max_to_keep: 0: all checkpoints are kept.
            ranks: None: a single rank.
            writers: the same ranks over a separate process group, which the writing thread uses.
            strategy: `trainer.save_strategy`; single_thread writes in the caller's thread.
        """
        self._storage, self._lineage, self._max_to_keep = storage, lineage, max_to_keep
        self.ranks = ranks or Ranks()
        self._writers = writers or self.ranks
        self._turns = turns_of(strategy, self.ranks.all_gather(socket.gethostname()))
        self._in_background = strategy != "single_thread"
        self._background = Background("saver")
        self._spare: Mapping[str, Data] = {}
        self._interim: dict[int, bool] = {}  # step -> value in its manifest, cached
        self.on_commit: Callable[[int], None] = lambda step: None
        """Called with the step of every written checkpoint, from any thread."""

    def save(
        self,
        step: int,
        files: Mapping[str, Data],
        state: Mapping[str, Any],
        relies_on: Callable[[], Mapping[str, Any]] = dict,
        *,
        interim: bool = False,
    ) -> None:
        """Write this rank's `files` and, on rank 0, the manifest with `state`; then remove the oldest checkpoints.

        Args:
            state: JSON types.
            relies_on: called before the manifest is written; waits until the files that `state` refers to are written.
                Its result is added to the manifest.
            interim: the checkpoint is removed when newer ones exist, whatever the limit.
        Raises: RftError: this checkpoint or the previous one could not be written.
        """
        self.flush()
        # A resumed trainer repeats steps that were saved before it died; rank 0 decides for all ranks.
        exists = self.ranks.is_rank0 and is_valid(self._storage, checkpoint_folder(step), version=step)
        if exists:
            self._settle(step)
        # All ranks or none: a rank that wrote would wait for the reports of the others.
        if self.ranks.broadcast(exists):
            self._spare = files
            return  # a valid checkpoint is never overwritten
        write = partial(self._write, step, files, state, relies_on, {INTERIM: True} if interim else {})
        if self._in_background:
            self._background.start(write)
        else:
            write()

    def take_spare(self) -> Mapping[str, Data]:
        """Return the files of the last `save` for reuse, once. Call after `flush`."""
        spare, self._spare = self._spare, {}
        return spare

    def check(self) -> None:
        """See `Background`."""
        self._background.check()

    def flush(self) -> None:
        """See `Background`."""
        self._background.flush()

    def _write(
        self,
        step: int,
        files: Mapping[str, Data],
        state: Mapping[str, Any],
        relies_on: Callable[[], Mapping[str, Any]],
        extra: dict[str, Any],
    ) -> None:
        folder = checkpoint_folder(step)
        report: dict[str, Any] = {}
        for turn in range(max(self._turns) + 1):
            if turn:
                self._writers.all_gather(None)  # waits for the ranks of the previous turn; a call of all ranks
            if turn == self._turns[self._writers.rank]:
                try:
                    report = {"files": manifests.entries_to_json(put_files(self._storage, folder, files))}
                except RftError as error:
                    if self.ranks.size == 1:
                        raise
                    report = manifests.failure(error)
        # Also waits until all ranks have written.
        reports = self._writers.all_gather(report)
        self._spare = files
        manifests.check_reports(reports, f"checkpoint {step}")
        if not self.ranks.is_rank0:
            return
        all_entries = manifests.entries_from_json(*(report["files"] for report in reports))
        # State, manifest, pointer: a kill in between leaves the previous checkpoint as the newest.
        all_entries |= put_files(self._storage, folder, {STATE_FILE: json.dumps(state, sort_keys=True).encode()})
        # Engines that evaluate the checkpoint read the fingerprint from the manifest.
        extra |= {key: value for key, value in state.items() if key == "fingerprint"} | dict(relies_on())
        manifests.commit_folder(self._storage, folder, Manifest(self._lineage, step, all_entries, extra))
        self._settle(step)
        self.on_commit(step)

    def files(self, step: int) -> CheckpointFiles | None:
        """Return the files of a checkpoint; None: it does not exist."""
        folder = checkpoint_folder(step)
        manifest = read_manifest(self._storage, folder)
        return None if manifest is None else CheckpointFiles(self._storage, folder, manifest, {})

    def complete(self, step: int, files: Mapping[str, Data], *, interim: bool) -> None:
        """Add missing files to a checkpoint and mark it permanent, unless `interim`. Called on rank 0."""
        manifest = read_manifest(self._storage, checkpoint_folder(step))
        if manifest is None:
            return
        missing = {name: data for name, data in files.items() if name not in manifest.files}
        extra = {key: value for key, value in manifest.extra.items() if interim or key != INTERIM}
        if missing or extra != manifest.extra:
            manifests.write_folder(self._storage, checkpoint_folder(step), replace(manifest, extra=extra), missing)

    def load_newest(self) -> tuple[int, dict[str, Any], Mapping[str, bytes]] | None:
        """Return (step, state, files) of the newest valid checkpoint, the same on all ranks; None: none exists.

        Raises: DamagedError: it belongs to another lineage.
        """
        # All ranks together verify it before anything changes. Loading reads it again, which saves memory.
        steps = self.ranks.broadcast(checkpoint_steps(self._storage) if self.ranks.is_rank0 else None)
        for step in reversed(steps):
            files = self._try_read(step)
            if all(self.ranks.all_gather(files is not None)):
                break
        else:
            return None
        assert files is not None
        state = self.ranks.broadcast(parse_object(files[STATE_FILE]) if self.ranks.is_rank0 else None)
        if self.ranks.is_rank0:
            self._settle(step)  # its writer may have been killed before this
        return step, state, files

    def _try_read(self, step: int) -> CheckpointFiles | None:
        """Verify this rank's share of a checkpoint and return its files; None: the checkpoint is damaged.

        Raises: DamagedError: it belongs to another lineage.
        """
        folder = checkpoint_folder(step)
        try:
            manifest = read_manifest(self._storage, folder)
            if manifest is None or manifest.version != step:
                return None
            own = manifests.blocks_of(manifest)[self.ranks.rank :: self.ranks.size]
            verified = zip(own, manifests.verify_blocks(self._storage, folder, manifest, own), strict=True)
            heads = {name: head for (name, _), head in verified if head}
        except (NotFoundError, DamagedError):
            return None
        # Equal step numbers of two lineages mean different weights.
        if manifest.lineage != self._lineage:
            raise DamagedError(f"{folder} is of lineage {manifest.lineage}, this trainer works on {self._lineage}")
        return CheckpointFiles(self._storage, folder, manifest, heads)

    def _settle(self, newest: int) -> None:
        """Move the pointer to `newest`, which is valid, and remove the oldest checkpoints beyond the limit."""
        # Before anything is removed, so that the pointer never names a missing folder.
        move_pointer(self._storage, CHECKPOINT_POINTER, newest)
        # Later folders do not count: they are invalid, and will be written again.
        older = [step for step in checkpoint_steps(self._storage) if step < newest]
        surplus = older[: max(0, len(older) + 1 - self._max_to_keep)] if self._max_to_keep > 0 else []
        # One interim checkpoint stays, in case the newest one is damaged.
        surplus += [step for step in older if self._is_interim(step)][:-1]
        for step in dict.fromkeys(surplus):
            manifests.remove_folder(self._storage, checkpoint_folder(step))

    def _is_interim(self, step: int) -> bool:
        if step not in self._interim:
            manifest = None
            with suppress(DamagedError):  # an unreadable checkpoint is kept
                manifest = read_manifest(self._storage, checkpoint_folder(step))
            self._interim[step] = manifest is not None and bool(manifest.extra.get(INTERIM))
        return self._interim[step]
