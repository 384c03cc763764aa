"""Trainer: the loop. sample -> train -> publish -> checkpoint -> record, once per optimizer step, on every rank.

Rank 0 decides the next action, forms the batches, and writes ledger, pointers, manifests and metrics, so ranks cannot
disagree. The source writes each batch to the ledger before it returns it. Weights (pointer moved last) and checkpoints
(manifest last) are copied, and written by threads while the next step trains; a checkpoint exists only after the
publication that it refers to. A trainer may die at any line: the next one resumes from the newest valid checkpoint and
gets the same batches again. The loop knows neither Dask nor the configuration.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from safetensors.numpy import load, save

from rftdask.buffer.batches.batch import TrainingBatch, join_batches
from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.buffer.batches.source import BatchNotReady, BatchSource
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.errors import MismatchError, StorageError
from rftdask.monitor.events import Alive, CheckpointSaved, Ended, Event, Started, StepFinished, WeightsPublished
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.device_lock import DeviceLock
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer import published as publications
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.published import WEIGHTS_POINTER, Published
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from rftdask.trainer.checkpoint import HF_FOLDER, Background, Checkpoints, checkpoint_steps
from rftdask.trainer.engines.base import TrainEngine

log = logging.getLogger(__name__)

_LOGGED = ("loss", "reward", "grad_norm", "num_rows", "staleness_max", "wait_s", "train_s")
_BATCH_POLL_S = 0.2
"""Seconds that rank 0 waits for a batch before it checks for stop or publish requests and broadcasts the result."""
_HEARTBEAT_INTERVAL_S = 5.0
_DEVICE_POLL_S = 0.02
_PREFETCH_POLL_S = 0.1  # shortest pause between two searches for the next batch while one trains
_TEXTS = ("uids", "images")
_TOKEN_ARRAYS = ("tokens", "rollout_logprobs", "loss_mask")
"""Arrays that a rank only has for the rows that it computes; so are experts, which may be missing."""

Action: TypeAlias = tuple[Literal["train", "publish", "whole", "wait", "stop", "end"], str]
"""Next action of all ranks, with the ledger entry as JSON for "train" and the version for "whole". whole: write that
publication in full; stop: end on request; end: all steps are trained."""


@dataclass
class Trainer:
    """Runs the loop on one rank."""

    engine: TrainEngine
    source: BatchSource
    checkpoints: Checkpoints
    storage: Storage
    metrics: MetricsWriter | None
    """Metrics of each step, written by rank 0. None: they are not recorded."""
    section: TrainerConfig
    total_steps: int | None
    """None: until the source ends."""
    lineage: str
    publish_due: Callable[[int, int], bool] | None
    """(step, last published step) -> True to publish now; it may become True while the trainer waits for a batch, once
    an explorer requests newer weights. None: the weights are not used by engines."""
    should_stop: Callable[[], bool]
    """Returns True to end with a checkpoint; called by rank 0 before every batch, and while it waits."""
    emit: Callable[[Event], None]
    """Sends an event to observers, best effort."""
    full_publish_interval: int = 1
    """Publications from one with whole weights to the next; those between contain deltas."""
    whole_requested: Callable[[int], int] = lambda version: 0
    """(last published step) -> version that an engine has requested in full, because it cannot apply the delta; 0: none
    since the last call. Called as `should_stop` is."""
    holder: InMemoryPublisher | None = None
    """Holds publications in memory instead of files; None: they are written."""
    max_weights_to_keep: int = 0
    """Published versions to keep if the run has no explorer; 0: the explorer removes them."""
    ranks: Ranks = field(default_factory=Ranks)
    publishers: Ranks | None = None
    """The same ranks over a separate process group, used by the publishing thread; each writes its part of the weights.
    None: rank 0 has and writes all weights."""
    readers: Ranks | None = None
    """The same ranks over a third process group, used by the prefetching thread. None: only rank 0 prefetches."""
    held_out: Sequence[TrainingBatch] = ()
    """Evaluation rows, the same on all ranks; evaluated before the first step, every `eval_interval` steps and after
    the last."""
    device_lock: DeviceLock | None = None
    """Lock on a GPU shared with an engine, already held at construction. None: the GPU is not shared."""
    device_timeout_s: float = 3600.0
    """Seconds to wait for the lock."""
    eval_metrics: MetricsWriter | None = None
    """Metrics of the held-out rows, by the step of the weights."""

    def __post_init__(self) -> None:
        # Emitted by the saving thread once the manifest is written, after `_save` has returned.
        self.checkpoints.on_commit = lambda step: self.emit(CheckpointSaved(step))
        self._fingerprint: tuple[int, Fingerprint | None] = (0, None)  # step and that of the weights after it
        self._published = self._saved = 0  # last steps; those of rank 0 are used
        self._saved_s = time.monotonic()
        self._publishing, self._prefetching = Background("publisher"), Background("prefetch")
        self._publisher = Publisher(
            self.storage, self.lineage, self.full_publish_interval, self.publishers, self.holder
        )
        self._lost_versions: list[int] = []
        """Versions that the previous trainer held in memory after its checkpoint, to be published again; on rank 0."""
        # The last published step of this process, and its result; on rank 0.
        self._publication: tuple[int, Future[Published]] | None = None
        self._evaluated = -1
        self.doing = "the trainer resumes"
        """Current activity, for the text of an out-of-memory error."""
        self._heartbeat_s = time.monotonic()

    def run(self) -> Ended:
        """Train until the steps or the data end, or until asked to stop; returns the last step.

        Raises: WaitTimeout: a batch did not come; errors of the engine, the source or the storage.
        """
        # On any exit: no thread of this trainer is publishing when the next one may start.
        with self._publishing:
            step = self._resume()
            self.emit(Started(step))
            if step == 0:
                self._evaluate(step)
            began = time.perf_counter()
            while True:
                # Also while waiting for a batch: the explorer may wait for weights whose publication failed.
                self._publishing.check()
                # Several times a second while rank 0 waits for data: no rank reaches the deadline of the group.
                action, entry_json = self.ranks.broadcast(self._next_action(step) if self.ranks.is_rank0 else None)
                # The supervisor ends a rank without messages, and only rank 0 reports steps.
                if time.monotonic() - self._heartbeat_s > _HEARTBEAT_INTERVAL_S:
                    self._heartbeat_s = time.monotonic()
                    self.emit(Alive())
                if action == "wait":
                    self._leave_device()  # engines need it to sample the batch
                    continue
                if self.device_lock is not None and not self.device_lock.held:
                    acquire_device(self.device_lock, self.ranks, self.device_timeout_s, lambda: self.emit(Alive()))
                    self.doing = "the trainer returns to its GPU"
                    self.engine.return_to_device()
                if action in ("stop", "end"):
                    break
                if action in ("publish", "whole"):
                    requested = time.perf_counter()
                    self._publish(step) if action == "publish" else self._publish_whole(int(entry_json))
                    began += time.perf_counter() - requested  # does not count as waiting for data
                    continue

                self.doing = f"step {step + 1} is trained"
                # From the message: in storage a new file may become visible to some ranks later than to others.
                entry = LedgerEntry.from_json(entry_json.encode())
                try:
                    batch = read_together(
                        entry, self.ranks, self.source.read, partial(self.engine.rows_to_compute, step=step + 1)
                    )
                    got = time.perf_counter()
                    # A batch may be empty after drops; it still counts as a step.
                    with self._prefetch(step + 2):
                        metrics = self.engine.train_step(batch, step + 1) if len(batch) else {}
                except Exception as error:
                    if not isinstance(error, MismatchError):  # then the rollouts of all steps are of the other policy
                        error.add_note(
                            f"while training step {step + 1}; if that can never be trained: "
                            f"rftdask skip {self.storage.url} {step + 1} --because WHY"
                        )
                    raise
                self._prefetching.check()  # after the try: an error concerns the next step
                step += 1
                trained = time.perf_counter()

                # Published before saving, since explorers wait for weights. Rank 0 decides, by its clock and by the
                # explorer's requests, because all ranks must make both calls.
                due = (self._should_publish(step), self._should_save(step)) if self.ranks.is_rank0 else None
                should_publish, should_save = self.ranks.broadcast(due)
                if should_publish:
                    self._publish(step)
                published = time.perf_counter()

                if should_save:
                    self._save(step, last=self._is_last(step))
                saved = time.perf_counter()

                if self.ranks.is_rank0:
                    # In seconds of rank 0; wait_s begins at the end of the previous step, tokens_per_s is over the
                    # whole step. Last, so that metrics of a plug-in loss cannot replace them.
                    row = {
                        **metrics,
                        **batch_metrics(step, entry, batch),
                        "wait_s": got - began,
                        "train_s": trained - got,
                        "publish_s": published - trained,
                        "checkpoint_s": saved - published,
                        "step_s": saved - began,
                        "tokens_per_s": float(batch.lengths.sum()) / (saved - began),
                    }
                    log.info(
                        "step %d: %s", step, ", ".join(f"{name} {row[name]:.4g}" for name in _LOGGED if name in row)
                    )
                    # After the checkpoint: a step repeated after a crash writes its row again, and the newer row wins.
                    if self.metrics is not None:
                        self.metrics.write(step, row)
                    self.emit(StepFinished("trainer", step, row))
                if self.section.eval_interval and step % self.section.eval_interval == 0:
                    self._evaluate(step)
                # A failed write ends the run within a step instead of at the next checkpoint.
                self.checkpoints.check()
                began = time.perf_counter()
            self._finish(step, stopped=action == "stop")
            return Ended(step, stopped=action == "stop")

    def _leave_device(self) -> None:
        if self.device_lock is not None and self.device_lock.held:
            self.engine.leave_device()
            self.device_lock.release()

    def _next_action(self, step: int) -> Action:
        """Decide what follows `step`, on rank 0; the entry of a batch is in the ledger before it is returned."""
        sends_parts = self.full_publish_interval > 1 or self.holder is not None
        if sends_parts and (version := self.whole_requested(self._published)):
            return "whole", str(version)
        if self._is_last(step):
            return "end", ""
        # Before a batch is formed: a batch in the ledger must be trained, by this process or the next.
        if self.should_stop():
            return "stop", ""
        try:
            entry = self.source.entry(step + 1, _BATCH_POLL_S)
        except BatchNotReady:
            # The explorer may need these weights to sample the batch.
            return "publish" if self._should_publish(step) else "wait", ""
        return ("end", "") if entry is None else ("train", entry.to_json().decode())

    @contextmanager
    def _prefetch(self, step: int) -> Iterator[None]:
        """Read the probable batch of `step`, as rank 0 broadcasts it, while the block trains the one before.

        If the actual batch differs, the missing rows are read later. `_prefetching.check` raises an error. The block
        must not call the source.
        """
        readers = self.readers or Ranks()
        if self._is_last(step - 1) or not (self.ranks.is_rank0 or self.readers):
            yield
            return
        trained = threading.Event()

        def read() -> None:
            entry_json: str | None = None
            try:
                if self.ranks.is_rank0 and (entry := self._next_entry(step, trained)) is not None:
                    entry_json = entry.to_json().decode()
            finally:  # also after an error: the other ranks wait for a message
                entry_json = readers.broadcast(entry_json)
            if entry_json is not None:
                entry = LedgerEntry.from_json(entry_json.encode())
                rows = None if self.ranks.size == 1 else rows_of_rank(entry, self.ranks.rank, self.ranks.size)
                # The step itself reads it again, and its error then names the step.
                with suppress(StorageError):
                    self.source.read_ahead(entry, rows)

        reading = self._prefetching.start(read)
        try:
            yield
        finally:
            trained.set()
        # Not after an error: the thread may wait for a message of a rank that waits for this one. Otherwise it ends:
        # storage has retries, and rank 0 sends a message once it has trained.
        wait([reading])

    def _next_entry(self, step: int, trained: threading.Event) -> LedgerEntry | None:
        """Wait until there is enough for the batch of `step`, and return its probable entry; None: not before the
        previous batch was `trained`. On rank 0."""
        while True:
            began = time.monotonic()
            entry = self.source.look_ahead(step)
            # The search takes at most a twentieth of the time.
            if entry is not None or trained.wait(max(_PREFETCH_POLL_S, 20 * (time.monotonic() - began))):
                return entry

    def _is_last(self, step: int) -> bool:
        return self.total_steps is not None and step >= self.total_steps

    def _should_publish(self, step: int) -> bool:
        if self.publish_due is None or self._published >= step:
            return False
        return step in self._lost_versions or self.publish_due(step, self._published)

    def _should_save(self, step: int) -> bool:
        is_late = time.monotonic() - self._saved_s >= 60 * self.section.save_minutes > 0
        # The last step is saved when the run ends.
        return self._is_of_interval(step) or (is_late and not self._is_last(step))

    def _is_of_interval(self, step: int) -> bool:
        return self.section.save_interval > 0 and step % self.section.save_interval == 0

    def _resume(self) -> int:
        """Load the newest checkpoint, and return its step; 0: no checkpoint exists."""
        newest = self.checkpoints.load_newest()
        if self.ranks.is_rank0 and self.publish_due is not None:
            self._lost_versions = publications.held_versions(self.storage, 0 if newest is None else newest[0])
        if newest is None:
            return 0
        step, state, files = newest
        self.engine.load_state_files(files)
        self.engine.compares_first_update = False  # it was made before the checkpoint
        # The cursor belongs to the weights: later ledger entries are replayed before a new one is formed.
        self.source.load_state_dict(state["source"])
        log.info("resumes from checkpoint %d", step)
        self._saved = step
        self._published = min(step, state["published"])
        # After a kill between manifest and pointer, explorers would wait for a version that exists.
        if self.ranks.is_rank0 and self.publish_due is not None and self._published > 0:
            if publications.is_loadable(self.storage, self._published):
                publications.move_pointer(self.storage, WEIGHTS_POINTER, self._published)
            else:
                self._published = 0  # the publication is damaged: publish again
        return step

    def _publish(self, step: int) -> None:
        """Copy the weights, and write them in a thread of each rank; that of rank 0 moves the pointer."""
        self.doing = f"version {step} is published"
        self._publishing.flush()  # before the copy, so that only one is in memory
        self.engine.reuse(self._publisher.take_spare())
        self._delete_unnamed()
        weights, fingerprint = self.engine.weights(), self._fingerprint_of(step)
        self._published = step  # on all ranks, each of which checks it when the run ends
        if self._has_weights:
            write = partial(self._write_weights, step, weights, fingerprint)
            self._publication = (step, self._publishing.start(write))

    def _delete_unnamed(self) -> None:
        if self.engine.is_hosted:
            self.engine.keep_only(publications.published_versions(self.storage), checkpoint_steps(self.storage))

    def _publish_whole(self, version: int) -> None:
        """Write a publication in full, instead of its delta or a copy in memory."""
        if self._has_weights:
            self._publishing.start(partial(self._publisher.write_whole, version))
            self._write_held()

    def _write_held(self) -> Future[None] | None:
        """Write the publications that are held in memory; None: this rank has none."""
        if not self._has_weights or self.holder is None:
            return None
        return self._publishing.start(self._publisher.write_held)

    @property
    def _has_weights(self) -> bool:
        """True if this rank has a part of the published weights."""
        return self.ranks.is_rank0 or self.publishers is not None

    def _write_weights(self, step: int, weights: Mapping[str, Data], fingerprint: Fingerprint | None) -> Published:
        published = self._publisher.publish(step, weights, fingerprint)
        if not self.ranks.is_rank0:
            return published
        if self.max_weights_to_keep:
            # Explorers of other runs read at their own pace, so only the number of versions is bounded.
            kept = publications.published_versions(self.storage)[-self.max_weights_to_keep :]
            publications.remove_weights_below(self.storage, kept[0])
        self.emit(WeightsPublished(step, published.content_hash))
        return published

    def _fingerprint_of(self, step: int) -> Fingerprint | None:
        """Return the fingerprint of the weights after `step`; computed once, by all ranks."""
        if self._fingerprint[0] != step:
            self._fingerprint = (step, self.engine.fingerprint())
        return self._fingerprint[1]

    def _save(self, step: int, *, last: bool, interim: bool = True) -> None:
        """Write a checkpoint. interim: it may go when newer ones exist, unless it belongs to the interval."""
        self.doing = f"checkpoint {step} is saved"
        self.checkpoints.flush()  # before the copy, so that only one is in memory
        self.engine.reuse(self.checkpoints.take_spare())
        self._delete_unnamed()
        files = dict(self.engine.state_files())
        if self.section.save_hf_checkpoint == "always" or (last and self.section.save_hf_checkpoint == "last"):
            files.update(self._export())
        progress = {"step": step, "lineage": self.lineage, "published": self._published}
        state = {**progress, "source": self.source.state_dict()}
        state |= publications.fingerprint_extra(self._fingerprint_of(step))
        # Held publications are written too: a resumed trainer only repeats those after this step.
        written, publication = self._write_held(), self._publication

        def relies_on() -> dict[str, str]:
            if written is not None:
                written.result()
            if publication is None:
                return {}
            published = publication[1].result()
            # Weights in a checkpoint may have another data type, and so another hash.
            return {publications.WEIGHTS_HASH: published.content_hash} if publication[0] == step else {}

        self.checkpoints.save(step, files, state, relies_on, interim=interim and not self._is_of_interval(step))
        self._saved, self._saved_s = step, time.monotonic()

    def _evaluate(self, step: int) -> None:
        """Evaluate the weights after `step` on the held-out rows, once."""
        if not self.held_out or self._evaluated == step:
            return
        self._evaluated, self.doing = step, "held-out rows are evaluated"
        row = {f"eval_{name}": value for name, value in self.engine.evaluate(self.held_out).items()}
        if self.ranks.is_rank0 and self.eval_metrics is not None:
            log.info("step %d, held out: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
            self.eval_metrics.write(step, row)
            self.eval_metrics.flush()

    def _export(self) -> dict[str, bytes]:
        return {f"{HF_FOLDER}/{name}": data for name, data in self.engine.export_files().items()}

    def _finish(self, step: int, *, stopped: bool) -> None:
        if not stopped:
            self._evaluate(step)
        # Regardless of the interval: later explorers and evaluations need the last weights.
        if self.ranks.broadcast(self.publish_due is not None and self._published < step):
            self._publish(step)
        # In full, because an engine that finds a damaged delta later has no trainer to request it from.
        self._publish_whole(self._published)
        if unsaved := step > self._saved:
            self._save(step, last=True, interim=stopped)
        # Durable before the end is reported.
        self._publishing.flush()
        self.checkpoints.flush()
        if not unsaved and step:  # saved before it was known to be the last step
            exported = self._export() if self.section.save_hf_checkpoint == "last" else {}
            if self.ranks.is_rank0:
                self.checkpoints.complete(step, exported, interim=stopped)
        if self.ranks.is_rank0 and self.metrics is not None:
            self.metrics.flush()


def batch_metrics(step: int, entry: LedgerEntry, batch: TrainingBatch) -> dict[str, float]:
    """Return metrics of the rows: rewards and lengths of rollouts, each counted once whatever its number of rows, and
    staleness of rows relative to the trained weights (version step - 1)."""
    # Optimizer step s turns version s - 1 into version s.
    staleness = step - 1 - batch.min_policy_versions
    metrics = {
        "num_rows": float(len(batch)),
        "num_tokens": float(batch.lengths.sum()),
        "num_trained_tokens": float(batch.num_trained.sum()),
    }
    trained = batch.num_trained
    if len(batch):
        # Tokens between turns are not trained, and do not count; in masked rows they cannot be distinguished.
        lengths = np.where(trained > 0, trained, batch.response_lengths)
        metrics["response_length"] = float(lengths.sum()) / len(np.unique(batch.rollouts))
        metrics["num_turns"] = len(batch.turns) / len(np.unique(batch.rollouts))
    if num_masked := int((trained == 0).sum()):
        metrics["num_masked"] = float(num_masked)  # such as truncated responses that an operator masks
    if batch.sampled:
        is_sampled = ~batch.experts  # demonstrations have no version
        rewards, _ = batch.rollout_rewards()
        stds = batch.group_reward_stds()
        metrics.update(
            num_rollouts=float(len(rewards)),
            reward=float(rewards.mean()),
            reward_std=float(stds.mean()),
            staleness=float(np.mean(staleness[is_sampled])),
            staleness_max=float(np.max(staleness[is_sampled])),
        )
        # A model behind an API may not report logprobs.
        if (logprobs := batch.trained_logprobs[is_sampled]).any():
            metrics["rollout_entropy"] = -float(logprobs.sum() / trained[is_sampled].sum())
        if len(rewards) > len(stds):  # groups of one rollout are always flat
            metrics["flat_groups"] = float((stds == 0.0).mean())
    # Notes that are counts, such as num_missing_groups of a partial batch.
    metrics.update({name: value for name, value in entry.notes.items() if name.startswith("num_")})
    for rows in entry.drop:
        key = f"num_dropped_{rows.reason.partition(':')[0]}"  # for "skipped: WHY" only "skipped"
        metrics[key] = metrics.get(key, 0.0) + len(rows.rows)
    return metrics


def acquire_device(lock: DeviceLock, ranks: Ranks, timeout_s: float, send_heartbeat: Callable[[], None]) -> None:
    """Wait until every rank has locked its device. Called by all ranks.

    Raises: WaitTimeout: an engine did not release a device.
    """
    began = heartbeat_s = time.monotonic()
    # All ranks poll together: a rank that waited without them would block the others in a collective call, which has a
    # different deadline. Acquired locks are kept.
    while not all(ranks.all_gather(lock.try_acquire())):
        now = time.monotonic()
        if now - heartbeat_s > _HEARTBEAT_INTERVAL_S:
            heartbeat_s = now
            send_heartbeat()
        if ranks.broadcast(now - began > timeout_s):
            raise lock.timeout(timeout_s)
        time.sleep(_DEVICE_POLL_S)


def rows_of_rank(entry: LedgerEntry, rank: int, size: int) -> range:
    """Return the positions in an entry of the rows that a rank reads: neighbors, which are often in the same shard.

    Groups of rollouts are not split; rows of a dataset may be split anywhere.
    """
    # Possible ends: after each group of rollouts, and after each row of a dataset.
    ends = [0]
    for rows in entry.use:
        last = ends[-1]
        ends += [last + 1 + i for i in range(len(rows.rows))] if rows.of_dataset else [last + len(rows.rows)]
    # The last end at or before an even share; neighboring ranks compute the same one.
    first, after = (ends[bisect_right(ends, ends[-1] * part // size) - 1] for part in (rank, rank + 1))
    return range(first, after)


def read_together(
    entry: LedgerEntry,
    ranks: Ranks,
    read: Callable[[LedgerEntry, Sequence[int] | None], TrainingBatch],
    rows_to_compute: Callable[[TrainingBatch], np.ndarray | None] = lambda batch: None,
) -> TrainingBatch:
    """Read the batch of an entry: each rank reads some rows, so that storage serves each shard about once, then the
    ranks exchange them. Called by all ranks.

    Every rank receives metadata for all rows, so that baselines and denominators are those of the whole batch. Apart
    from state numbers, which are only compared within a group, the result has the bits of a batch read by one rank.

    Args: read: `BatchSource.read`. rows_to_compute: from the batch without tokens, the row numbers whose tokens this
    rank needs; None: all.
    """
    if ranks.size == 1:  # nothing to exchange
        return read(entry, None)
    positions = rows_of_rank(entry, ranks.rank, ranks.size)
    # Rank 0 reads an entry without rows, for the shapes of its arrays.
    is_empty = not any(rows.rows for rows in entry.use)
    own = read(entry, positions) if len(positions) or (ranks.is_rank0 and is_empty) else None
    metadata = ranks.all_gather_bytes(b"" if own is None else to_bytes(own.holding([])))
    parts = [from_bytes(data) if data else None for data in metadata]
    batch = join_batches([part for part in parts if part is not None])

    rows = rows_to_compute(batch) if len(batch) else None
    rows = np.arange(len(batch)) if rows is None else np.unique(rows)
    needed = [np.frombuffer(data, np.int64) for data in ranks.all_gather_bytes(rows.astype(np.int64).tobytes())]
    first = sum(len(part) for part in parts[: ranks.rank] if part is not None)
    # One at a time, so that only their bytes are kept.
    held_parts = (None if own is None else own.holding(numbers - first) for numbers in needed)
    names = (*_TOKEN_ARRAYS, "routed_experts")
    sent = [_arrays_to_bytes({name: getattr(p, name) for name in names}) if p is not None else b"" for p in held_parts]
    # By rank, which is also the order of the rows.
    received = [load(data) for data in ranks.exchange_bytes(sent) if data]
    experts = batch.routed_experts
    if experts is not None:
        # -1 for parts without recorded experts, such as demonstrations.
        missing = [np.full((len(part["tokens"]), experts.shape[1]), -1, np.int16) for part in received]
        experts = np.concatenate([p.get("routed_experts", none) for p, none in zip(received, missing, strict=True)])
    tokens = {name: np.concatenate([part[name] for part in received]) for name in _TOKEN_ARRAYS}
    return replace(batch, **tokens, routed_experts=experts, held=np.isin(np.arange(len(batch)), rows))


def _arrays_to_bytes(arrays: Mapping[str, np.ndarray | None]) -> bytes:
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None})


def to_bytes(batch: TrainingBatch) -> bytes:
    """Serialize a batch as safetensors, with its texts as JSON in byte arrays."""
    values = {f.name: getattr(batch, f.name) for f in fields(TrainingBatch)}
    return _arrays_to_bytes(
        values | {name: np.frombuffer(json.dumps(values[name]).encode(), np.uint8) for name in _TEXTS}
    )


def from_bytes(data: bytes) -> TrainingBatch:
    """Deserialize a batch from `to_bytes`."""
    arrays = load(data)
    uids, images = (json.loads(arrays.pop(name).tobytes()) for name in _TEXTS)
    return TrainingBatch(**arrays, uids=tuple(uids), images=None if images is None else tuple(map(tuple, images)))
