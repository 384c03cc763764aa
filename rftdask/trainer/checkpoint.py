"""Checkpoint: everything a run resumes from, in `global_step_<N>/`, made to exist by its manifest.

Invariants: the pointer moves only after the manifest; the newest valid checkpoint is never removed; a folder that is
not valid is not a checkpoint, and the next older one is taken.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rftdask.buffer.log.retention import ResumePoint
from rftdask.errors import DamagedError, NotFoundError, RftError
from rftdask.storage import Storage
from rftdask.storage.base import Data, numbers_in
from rftdask.storage.checked_json import parse_object
from rftdask.synchronizer.manifest import (
    BLOCK_BYTES,
    FileEntry,
    Manifest,
    block_numbers,
    block_span,
    blocks_of,
    check_reports,
    commit_folder,
    extend_folder,
    failure,
    is_valid,
    put_files,
    read_block,
    read_blocks,
    read_file,
    read_manifest,
    remove_folder,
    stream_block,
    stream_blocks,
)
from rftdask.synchronizer.published import CHECKPOINT_POINTER, move_pointer
from rftdask.synchronizer.tensor_heads import head_bytes
from rftdask.trainer.background import Background
from rftdask.trainer.ranks import Ranks

INTERIM = "interim"
"""In the manifest of a checkpoint that goes when there are newer ones."""
STATE_FILE = "trainer_state.json"
HF_FOLDER = "actor/huggingface"


def checkpoint_folder(step: int) -> str:
    """The folder of the checkpoint of an optimizer step, below the run's."""
    return f"global_step_{step}"


def checkpoint_steps(storage: Storage) -> list[int]:
    """Steps of all checkpoint folders, ascending; a folder may not be valid."""
    return numbers_in(storage.list(), "global_step_", "/")


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
        # A folder without one is half written or half removed, and so no checkpoint to resume from.
        if manifest is not None:
            state = parse_object(read_file(storage, checkpoint_folder(step), manifest, STATE_FILE))
            return ResumePoint(step, int(state["source"]["low"]))
    return None


class CheckpointFiles(Mapping[str, bytes]):
    """The files that a manifest names, of which nothing but heads is held: what is asked for is read, and verified on
    the way.

    Raises: NotFoundError, DamagedError: by all that reads, as `read_file`.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, heads: Mapping[str, bytes]) -> None:
        """heads: of files of tensors, by name, that were verified; those of others are read."""
        self._storage, self._folder, self._manifest, self._heads = storage, folder, manifest, heads
        self.blocks = blocks_of(manifest)
        """(file, number) of all of them."""

    def __getitem__(self, name: str) -> bytes:
        path, entry = f"{self._folder}/{name}", self._manifest.files[name]
        return b"".join(read_block(self._storage, path, entry, number) for number in block_numbers(entry))

    def head(self, name: str) -> bytes:
        """The beginning of a file of tensors, up to their first byte."""
        held = self._heads.get(name)
        return _verify(self._storage, f"{self._folder}/{name}", self._manifest.files[name], 0) if held is None else held

    def span(self, name: str, number: int) -> tuple[int, int]:
        """First byte of a block in its file, and the byte after its last."""
        return block_span(self._manifest.files[name], number)

    def stream(self, blocks: Sequence[tuple[str, int]]) -> Iterator[Data]:
        """Blocks one after the other, in pieces, as `stream_blocks`."""
        return stream_blocks(self._storage, self._folder, self._manifest, blocks)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest.files  # the inherited one would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.files)

    def __len__(self) -> int:
        return len(self._manifest.files)


def _verify(storage: Storage, path: str, entry: FileEntry, number: int) -> bytes:
    """As `verify_block`; the head of the file, if it is one of tensors and this is its first block."""
    head, size = bytearray(), BLOCK_BYTES if number == 0 and path.endswith(".safetensors") else 0
    for piece in stream_block(storage, path, entry, number):
        if len(head) < size:
            head += piece
            size = min(size, head_bytes(bytes(head[:8])))
            del head[size:]
    return bytes(head)


def turns_of(strategy: str, hosts: Sequence[str]) -> list[int]:
    """When each rank writes, by `trainer.save_strategy`; those of one turn write at once. hosts: of each rank."""
    if strategy == "unrestricted":
        return [0] * len(hosts)
    # One turn for each machine, in the order of its first rank: its ranks share a disk, machines do not.
    if strategy == "single_node":
        order = list(dict.fromkeys(hosts))
        return [order.index(host) for host in hosts]
    return list(range(len(hosts)))


class Checkpoints:
    """Writes and reads the checkpoints of one lineage: each rank what it holds, rank 0 the manifest when all have
    written.

    `save` returns when it was given the state; a thread writes it beside the training. The next `save` waits for the
    last, and `flush` for all. A write that failed on any rank is the error of the next call, on every rank, and no
    checkpoint: it has no manifest. All calls but those that read are made by all ranks.
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
            max_to_keep: 0 keeps all.
            ranks: None: this one is alone.
            writers: the same ranks over a process group of their own, since its calls are made from a thread.
            strategy: `trainer.save_strategy`; single_thread writes in the caller's thread.
        """
        self._storage, self._lineage, self._max_to_keep = storage, lineage, max_to_keep
        self.ranks = ranks or Ranks()
        self._writers = writers or self.ranks
        self._turns = turns_of(strategy, self.ranks.all_gather(socket.gethostname()))
        self._in_background = strategy != "single_thread"
        self._background = Background("saver")
        self._spare: Mapping[str, Data] = {}
        self._interim: dict[int, bool] = {}
        """By step, what was read in its manifest."""
        self.on_commit: Callable[[int], None] = lambda step: None
        """Told of every checkpoint that was made to exist; from any thread."""

    def save(
        self,
        step: int,
        files: Mapping[str, Data],
        state: Mapping[str, Any],
        relies_on: Callable[[], Mapping[str, Any]] = dict,
        *,
        interim: bool = False,
    ) -> None:
        """Write this rank's `files` and, on rank 0, the manifest with `state`, which is JSON; then drop the oldest
        checkpoints beyond the limit.

        relies_on: waits, before the manifest is written, until what `state` says of other files is true; what it
            returns is added to the manifest.
        interim: it goes when there are newer ones, whatever the limit.

        Raises: RftError: this checkpoint or the one before could not be written.
        """
        self.flush()
        # A resumed trainer repeats steps that were saved before it died; rank 0 says so for all.
        is_there = self.ranks.is_rank0 and is_valid(self._storage, checkpoint_folder(step), version=step)
        if is_there:
            self._settle(step)
        # All or none: a rank that went on to write would wait for the reports of those that returned.
        if self.ranks.broadcast(is_there):
            self._spare = files
            return  # its files are what the manifest says, and must stay so
        write = partial(self._write, step, files, state, relies_on, {INTERIM: True} if interim else {})
        if self._in_background:
            self._background.start(write)
        else:
            write()

    def take_spare(self) -> Mapping[str, Data]:
        """What was given to `save` and is needed no more; once. All was flushed."""
        spare, self._spare = self._spare, {}
        return spare

    def check(self) -> None:
        """Look after what is written in the background, without waiting. Raises: what went wrong there."""
        self._background.check()

    def flush(self) -> None:
        """Wait until all is written. Raises: as `check`."""
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
        # All ranks go through all turns, also those that write in another one: `all_gather` is a call of everybody.
        for turn in range(max(self._turns) + 1):
            if turn:
                self._writers.all_gather(None)  # all of the turn before have written
            if turn == self._turns[self._writers.rank]:
                try:
                    # Without a manifest they are no checkpoint yet.
                    entries = put_files(self._storage, folder, files)
                    report = {"files": {name: entry.to_json() for name, entry in entries.items()}}
                except RftError as error:
                    if self.ranks.size == 1:
                        raise
                    report = failure(error)
        # Also the sign that all have written: the manifest below names files of every rank.
        reports = self._writers.all_gather(report)
        self._spare = files
        check_reports(reports, f"checkpoint {step}")
        if not self.ranks.is_rank0:
            return
        all_entries = {name: FileEntry.from_json(entry) for told in reports for name, entry in told["files"].items()}
        # The state, then the manifest, then the pointer: a kill at any line leaves the checkpoint before as the newest.
        all_entries |= put_files(self._storage, folder, {STATE_FILE: json.dumps(state, sort_keys=True).encode()})
        # What an engine that evaluates the checkpoint must compute stands where it looks, in the manifest.
        extra |= {key: value for key, value in state.items() if key == "fingerprint"} | dict(relies_on())
        commit_folder(self._storage, folder, Manifest(self._lineage, step, all_entries, extra))
        self._settle(step)
        self.on_commit(step)

    def files(self, step: int) -> CheckpointFiles | None:
        """The files of a checkpoint; None if it is not there."""
        folder = checkpoint_folder(step)
        manifest = read_manifest(self._storage, folder)
        return None if manifest is None else CheckpointFiles(self._storage, folder, manifest, {})

    def complete(self, step: int, files: Mapping[str, Data], *, interim: bool) -> None:
        """Add files to a checkpoint, unless it has them already, and keep it for good unless it is interim; its
        manifest changes in one atomic step. On rank 0.
        """
        manifest = read_manifest(self._storage, checkpoint_folder(step))
        if manifest is None:
            return
        missing = {name: data for name, data in files.items() if name not in manifest.files}
        extra = {key: value for key, value in manifest.extra.items() if interim or key != INTERIM}
        if missing or extra != manifest.extra:
            extend_folder(self._storage, checkpoint_folder(step), replace(manifest, extra=extra), missing)

    def load_newest(self) -> tuple[int, dict[str, Any], Mapping[str, bytes]] | None:
        """(step, state, files) of the newest valid checkpoint, on all ranks what rank 0 found; None if there is none.

        Raises: DamagedError: it is of another lineage.
        """
        # Read and verified by all ranks together, before anything is changed by it. It is read again by who loads it,
        # since to hold what was verified would take as much memory as the state itself.
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
            self._settle(step)  # whoever saved it may have been killed before it could
        return step, state, files

    def _try_read(self, step: int) -> CheckpointFiles | None:
        """A checkpoint whose share of this rank is verified; None: something of it is not what it must be.

        Raises: DamagedError: it is of another lineage.
        """
        folder = checkpoint_folder(step)
        try:
            manifest = read_manifest(self._storage, folder)
            if manifest is None or manifest.version != step:
                return None
            found = read_blocks(_verify, self._storage, folder, manifest, self.ranks.rank, self.ranks.size)
            heads = {name: head for (name, _), head in found if head}
        except (NotFoundError, DamagedError):
            return None
        # Step numbers of two lineages mean different weights; one must not resume from the other's.
        if manifest.lineage != self._lineage:
            raise DamagedError(f"{folder} is of lineage {manifest.lineage}, this trainer works on {self._lineage}")
        return CheckpointFiles(self._storage, folder, manifest, heads)

    def _settle(self, newest: int) -> None:
        """Point to `newest`, which was verified or written just now, and drop the oldest before it beyond the limit."""
        # Before anything is removed, so that the pointer never names a folder that is gone.
        move_pointer(self._storage, CHECKPOINT_POINTER, newest)
        # Those after it stay out of the count: they are not valid, and are written again when their step comes.
        older = [step for step in checkpoint_steps(self._storage) if step < newest]
        surplus = older[: max(0, len(older) + 1 - self._max_to_keep)] if self._max_to_keep > 0 else []
        # One stays, to fall back to where a disk gives the newest back damaged.
        surplus += [step for step in older if self._is_interim(step)][:-1]
        for step in dict.fromkeys(surplus):
            remove_folder(self._storage, checkpoint_folder(step))

    def _is_interim(self, step: int) -> bool:
        if step not in self._interim:
            manifest = None
            with suppress(DamagedError):  # nothing is removed by what cannot be read
                manifest = read_manifest(self._storage, checkpoint_folder(step))
            self._interim[step] = manifest is not None and bool(manifest.extra.get(INTERIM))
        return self._interim[step]
