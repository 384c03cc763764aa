"""Trainer: the loop. sample -> train -> publish -> checkpoint -> record, once per optimizer step, on every rank.

All ranks run the same loop. Rank 0 alone decides what its next turn is, forms the batches and writes ledger, pointers,
manifests and metrics, so ranks cannot disagree. It consumes batches from a source, which writes each into the ledger
before handing it out; it produces weights (pointer moved last), checkpoints (manifest last) and metrics. Weights and
checkpoints are copied, and written by threads while the next step trains; a checkpoint exists only after the
publication that it tells of. It waits only for its source, with a deadline, and no rank waits for another one
meanwhile. It knows neither Dask nor how its parts are configured; everything it holds can be lost at any line: a new
one resumes from the newest valid checkpoint and is handed the very same batches again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal, Protocol, TypeAlias

import numpy as np
from safetensors.numpy import load, save

from rftdask.buffer.batches.batch import TrainingBatch, join_batches
from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.buffer.batches.source import BatchSource, NotYet
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.errors import StorageError
from rftdask.monitor.events import Alive, CheckpointSaved, Ended, Event, Published, Started, Step
from rftdask.processes.device_lock import DeviceLock
from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.published import (
    WEIGHTS_HASH,
    fingerprint_extra,
    held_versions,
    published_versions,
    remove_weights_below,
    restore_pointer,
)
from rftdask.synchronizer.published import Published as PublishedWeights
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from rftdask.trainer.background import Background
from rftdask.trainer.checkpoint import HF_FOLDER, Checkpoints, checkpoint_steps
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.ranks import Ranks

log = logging.getLogger(__name__)

_LOGGED = ("loss", "reward", "grad_norm", "num_rows", "staleness_max", "wait_s", "train_s")
_PATIENCE_S = 0.2
"""Rank 0 waits so long for a batch before it looks whether it is to stop or to publish, and tells the others."""
_SIGN_OF_LIFE_S = 5.0
_TURN_LOOK_S = 0.02
_LOOK_AHEAD_S = 0.1
"""Shortest pause between two looks for the next batch while one trains."""
_TEXTS = ("uids", "images")

Turn: TypeAlias = tuple[Literal["train", "publish", "whole", "wait", "stop", "end"], str]
"""What all ranks do next, and for "train" the ledger entry as JSON. whole: write all of what was published last; stop:
end on request; end: all is trained."""


class MetricsSink(Protocol):
    """Where rank 0 writes the numbers of each step; `flush` makes them durable."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of a step; a step that is written again replaces its row."""

    def flush(self) -> None:
        """Make the rows durable. Raises: StorageError."""


@dataclass
class Trainer:
    """Runs the loop on one rank.

    Example: Trainer(engine, source, checkpoints, storage, metrics, config.trainer, ...).run() == Ended(40, False)
    """

    engine: TrainEngine
    source: BatchSource
    checkpoints: Checkpoints
    storage: Storage
    metrics: MetricsSink
    section: TrainerConfig
    total_steps: int | None
    """None: until the source ends."""
    lineage: str
    publish_due: Callable[[int, int], bool] | None
    """(step, last published step) -> whether to publish now; it may become true while a batch is waited for, once an
    explorer asks for newer weights. None: nobody loads the weights."""
    should_stop: Callable[[], bool]
    """Whether to end with a checkpoint; asked by rank 0 before every batch, and while it waits."""
    emit: Callable[[Event], None]
    """Takes events for whoever watches, best effort."""
    whole_interval: int = 1
    """Publications from one of the whole weights to the next; those between are of what has changed."""
    whole_asked: Callable[[int], bool] = lambda version: False
    """(last published step) -> whether somebody asks for all of these weights, who cannot make them of what they are
    made of: once. Asked by rank 0 before every batch, and while it waits."""
    holder: InMemoryPublisher | None = None
    """Takes what is published, in place of files; None: it is written."""
    max_weights_to_keep: int = 0
    """Published versions that stay, for a trainer without an explorer beside it; 0: the explorer removes them."""
    ranks: Ranks = field(default_factory=Ranks)
    publishers: Ranks | None = None
    """The same ranks over a process group of their own, since its calls are made from a thread: each writes its part of
    the weights. None: rank 0 writes all, and has all."""
    readers: Ranks | None = None
    """The same ranks once more, for the thread that reads ahead. None: rank 0 alone looks ahead."""
    held_out: Sequence[TrainingBatch] = ()
    """Rows that are not trained, the same on all ranks: what the weights say of them is measured before the first step,
    every `eval_interval` steps and after the last."""
    turn: DeviceLock | None = None
    """The turn on a device that this rank shares with an engine, which it has when it is made; None: it shares none."""
    turn_timeout_s: float = 3600.0
    """Seconds to wait for it."""
    eval_metrics: MetricsSink | None = None
    """Where rank 0 writes that, by the step whose weights they are; with `held_out`."""

    def __post_init__(self) -> None:
        # A checkpoint exists when its manifest is written, which is in the thread of the saver and after `_save`
        # returned.
        self.checkpoints.on_commit = lambda step: self.emit(CheckpointSaved(step))
        # Of the weights after a step.
        self._fingerprint: tuple[int, Fingerprint | None] = (0, None)
        # The steps whose weights were published and saved last; what rank 0 says of them counts.
        self._published = self._saved = 0
        self._saved_s = time.monotonic()
        self._publishing = Background("publisher")
        self._publisher = Publisher(self.storage, self.lineage, self.whole_interval, self.publishers, self.holder)
        self._again: list[int] = []
        """What the trainer before published after its checkpoint, and held: it went with it; on rank 0."""
        # The step that was published last in this life, and what became of it; on rank 0.
        self._publication: tuple[int, Future[PublishedWeights]] | None = None
        self._evaluated = -1
        self.doing = "the trainer resumes"
        """What it does now, as the error of a lack of memory says it."""
        self._spoke_s = time.monotonic()

    def run(self) -> Ended:
        """Train to the end of the steps or of the data, or until asked to stop; the last step done.

        Raises: WaitTimeout: a batch did not come; what the engine, the source or the storage raise.
        """
        # Whatever ends it: no thread of this trainer is at work when another one may begin.
        with self._publishing:
            # Every rank loads; rank 0 alone says which checkpoint is the newest valid one.
            step = self._resume()
            self.emit(Started(step))
            if step == 0:
                self._evaluate(step)
            began = time.perf_counter()
            while True:
                # In every turn, also while a batch is waited for: who explores may wait for the weights that failed.
                self._publishing.check()
                # What all ranks do now. While rank 0 waits for data the message comes several times a second, so that
                # no rank runs into the deadline of the process group.
                action, entry_json = self.ranks.broadcast(self._next_turn(step) if self.ranks.is_rank0 else None)
                # Whoever supervises takes a rank that says nothing for half an hour for hung, and only rank 0 has steps
                # to tell.
                if time.monotonic() - self._spoke_s > _SIGN_OF_LIFE_S:
                    self._spoke_s = time.monotonic()
                    self.emit(Alive())
                if action == "wait":
                    self._leave_device()  # the batch that is waited for has to be sampled
                    continue
                if self.turn is not None and not self.turn.held:
                    take_turn(self.turn, self.ranks, self.turn_timeout_s, lambda: self.emit(Alive()))
                    self.doing = "the trainer returns to its GPU"
                    self.engine.return_to_device()
                if action in ("stop", "end"):
                    break
                if action in ("publish", "whole"):
                    asked = time.perf_counter()
                    (self._publish if action == "publish" else self._publish_whole)(step)
                    began += time.perf_counter() - asked  # no waiting for data
                    continue

                self.doing = f"step {step + 1} is trained"
                # Out of the message and not from storage: where a new file shows up late, ranks would not see the same.
                entry = LedgerEntry.from_json(entry_json.encode())
                failed: list[Exception] = []
                try:
                    batch = read_together(
                        entry, self.ranks, self.source.read, partial(self.engine.rows_to_compute, step=step + 1)
                    )
                    got = time.perf_counter()
                    # Nothing may be left of a batch; the step is made all the same, since others count steps.
                    with self._looking_ahead(step + 2, failed):
                        metrics = self.engine.train_step(batch, step + 1) if len(batch) else {}
                except Exception as error:  # the end of what is told of it
                    way_out = f"rftdask skip {self.storage.url} {step + 1} --because WHY"
                    error.add_note(f"while training step {step + 1}; if that can never be trained: {way_out}")
                    raise
                if failed:  # not of this step, which is trained, but of those after it
                    raise failed[0]
                step += 1
                trained = time.perf_counter()

                # Published before it is saved: explorers wait for weights, and nobody waits for a checkpoint.
                # Rank 0 says what is due, by its clock and by what it knows of explorers: both are calls of all ranks.
                publishes, saves = self.ranks.broadcast(self._what_is_due(step) if self.ranks.is_rank0 else None)
                if publishes:
                    self._publish(step)
                published = time.perf_counter()

                if saves:
                    self._save(step, last=self._is_last(step))
                saved = time.perf_counter()

                if self.ranks.is_rank0:
                    # Times last: a metric of a plug-in loss cannot take the place of one of these names. In seconds of
                    # rank 0; wait_s counts from the end of the step before, tokens_per_s is over all of the step.
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
                    # After the checkpoint: a step that is made again after a crash writes its row again, and the newer
                    # row wins.
                    self.metrics.write(step, row)
                    self.emit(Step("trainer", step, row))
                if self.section.eval_interval and step % self.section.eval_interval == 0:
                    self._evaluate(step)
                # Here, once a step: a write that failed ends the run within a step, and not at the next checkpoint.
                self.checkpoints.check()  # raises what the writing in the background has raised
                began = time.perf_counter()
            self._finish(step, stopped=action == "stop")
            return Ended(step, stopped=action == "stop")

    def _leave_device(self) -> None:
        """Let the engines that share the device have it. On all ranks."""
        if self.turn is not None and self.turn.held:
            self.engine.leave_device()
            self.turn.release()

    def _next_turn(self, step: int) -> Turn:
        """What comes after `step`. On rank 0; the entry of a batch is in the ledger when this returns it."""
        if (self.whole_interval > 1 or self.holder is not None) and self.whole_asked(self._published):
            return "whole", ""
        if self._is_last(step):
            return "end", ""
        # Before a batch is formed: one that is in the ledger has to be trained, by this life or the next.
        if self.should_stop():
            return "stop", ""
        try:
            entry = self.source.entry(step + 1, _PATIENCE_S)
        except NotYet:
            # Whoever explores may wait for the weights that there are, and the batch for who explores.
            return "publish" if self._is_publish_due(step) else "wait", ""
        return ("end", "") if entry is None else ("train", entry.to_json().decode())

    @contextmanager
    def _looking_ahead(self, step: int, failed: list[Exception]) -> Iterator[None]:
        """Find and read what the batch of `step`, the next, may be made of, while another one trains; no other call of
        the source is made meanwhile. What went wrong goes to `failed`.

        Rank 0 alone forms batches: it tells the others what the next would be; each reads what it will be asked for.
        If the batch becomes another one, what is missing is read then.
        """
        readers = self.readers or Ranks()
        if self._is_last(step - 1) or not (self.ranks.is_rank0 or self.readers):
            yield
            return
        trained = threading.Event()

        def look() -> None:
            try:
                found: LedgerEntry | None = None
                try:
                    if self.ranks.is_rank0:
                        found = self._next_entry(step, trained)
                finally:  # the others wait for a word, whatever it is
                    told = readers.broadcast(None if found is None else found.to_json().decode())
                if told is not None:
                    entry = LedgerEntry.from_json(told.encode())
                    alone = self.ranks.size == 1
                    places = None if alone else places_of(entry, self.ranks.rank, self.ranks.size)
                    # In its own turn it is read again, and then the error says which step cannot be trained.
                    with suppress(StorageError):
                        self.source.read_ahead(entry, places)
            except Exception as error:  # carried to the thread that trains, and raised there
                failed.append(error)

        # Daemon: a process that must end ends.
        thread = threading.Thread(target=look, name="look-ahead", daemon=True)
        thread.start()
        try:
            yield
        finally:
            trained.set()
        # Not after an error: the word that it may wait for comes from a rank that may wait for this one.
        thread.join()  # it ends: storage has its retries, and rank 0 speaks when it has trained

    def _next_entry(self, step: int, trained: threading.Event) -> LedgerEntry | None:
        """What the batch of `step` would be made of, once enough is there; None: not until the one before it was
        `trained`. On rank 0."""
        while True:
            looked = time.monotonic()
            entry = self.source.look_ahead(step)
            # Looking takes a twentieth of the time at most.
            if entry is not None or trained.wait(max(_LOOK_AHEAD_S, 20 * (time.monotonic() - looked))):
                return entry

    def _is_last(self, step: int) -> bool:
        return self.total_steps is not None and step >= self.total_steps

    def _is_publish_due(self, step: int) -> bool:
        if self.publish_due is None or self._published >= step:
            return False
        return step in self._again or self.publish_due(step, self._published)

    def _what_is_due(self, step: int) -> tuple[bool, bool]:
        """Whether the weights after `step` are to be published, and saved."""
        is_late = time.monotonic() - self._saved_s >= 60 * self.section.save_minutes > 0
        # The last step is saved when the run ends.
        saves = self._is_of_interval(step) or (is_late and not self._is_last(step))
        return self._is_publish_due(step), saves

    def _is_of_interval(self, step: int) -> bool:
        return self.section.save_interval > 0 and step % self.section.save_interval == 0

    def _resume(self) -> int:
        """Load the newest checkpoint; the step that it is of, 0: there is none."""
        found = self.checkpoints.load_newest()
        if self.ranks.is_rank0 and self.publish_due is not None:
            self._again = held_versions(self.storage, 0 if found is None else found[0])
        if found is None:
            return 0
        step, state, files = found
        self.engine.load_state_files(files)
        # The cursor goes with the weights: entries after it are replayed from the ledger, before any new one is formed.
        self.source.load_state_dict(state["source"])
        log.info("resumes from checkpoint %d", step)
        self._saved = step
        self._published = min(step, state["published"])
        # A kill between manifest and pointer leaves the pointer behind, and explorers would wait for what is there.
        mends = self.ranks.is_rank0 and self.publish_due is not None and self._published > 0
        if mends and not restore_pointer(self.storage, self._published):
            self._published = 0  # what was published is damaged: publish as if it never was
        return step

    def _publish(self, step: int) -> None:
        """Copy the weights; a thread of each rank writes its part, and that of rank 0 moves the pointer. All ranks
        bring them together.
        """
        self.doing = f"version {step} is published"
        self._publishing.flush()  # before the copy: no more than one is held
        self.engine.reuse(self._publisher.take_spare())
        self._tell_named()
        weights, fingerprint = self.engine.weights(), self._fingerprint_of(step)
        self._published = step  # on all ranks: each asks it, when the run ends, whether the last weights are out
        if self._writes:
            write = partial(self._write_weights, step, weights, fingerprint)
            self._publication = (step, self._publishing.start(write))

    def _tell_named(self) -> None:
        if self.engine.is_hosted:
            self.engine.keep_only(published_versions(self.storage), checkpoint_steps(self.storage))

    def _publish_whole(self, step: int) -> None:
        """Let the threads write all of what was published last, and not only what had changed, or was held."""
        if self._writes:
            self._publishing.start(partial(self._publisher.write_whole, self._published))
            self._write_held()

    def _write_held(self) -> Future[None] | None:
        """Let the threads write what is held; None: this rank holds nothing."""
        return self._publishing.start(self._publisher.write_held) if self._writes and self.holder is not None else None

    @property
    def _writes(self) -> bool:
        """Whether this rank has a part of what is published."""
        return self.ranks.is_rank0 or self.publishers is not None

    def _write_weights(
        self, step: int, weights: Mapping[str, Data], fingerprint: Fingerprint | None
    ) -> PublishedWeights:
        """Write the weights, then move the pointer. Beside the training."""
        published = self._publisher.publish(step, weights, fingerprint)
        if not self.ranks.is_rank0:
            return published
        if self.max_weights_to_keep:
            # Explorers that are other commands read these at their own pace; only their number bounds what lies here.
            kept = published_versions(self.storage)[-self.max_weights_to_keep :]
            remove_weights_below(self.storage, kept[0])
        self.emit(Published(step, published.content_hash))
        return published

    def _fingerprint_of(self, step: int) -> Fingerprint | None:
        """Of the weights as they are, which are those after `step`; computed once, by all ranks."""
        if self._fingerprint[0] != step:
            self._fingerprint = (step, self.engine.fingerprint())
        return self._fingerprint[1]

    def _save(self, step: int, *, last: bool, interim: bool = True) -> None:
        """Write a checkpoint; each rank what it holds, rank 0 the manifest.

        interim: it may go when there are newer ones, unless it is one of the interval.
        """
        self.doing = f"checkpoint {step} is saved"
        self.checkpoints.flush()  # before the copy: no more than one is held
        self.engine.reuse(self.checkpoints.take_spare())
        self._tell_named()
        # A copy of the state: the next step changes the weights while these bytes are still being written.
        files = dict(self.engine.state_files())
        if self.section.save_hf_checkpoint == "always" or (last and self.section.save_hf_checkpoint == "last"):
            files.update(self._export())
        progress = {"step": step, "lineage": self.lineage, "published": self._published}
        # Rank 0 alone forms batches and writes the manifest: its cursor is the one that is kept.
        state = {**progress, "source": self.source.state_dict(), **fingerprint_extra(self._fingerprint_of(step))}
        # Goes on in the background; `flush` waits for it.
        # Also what is held: who resumes makes again what comes after this step, and nothing before it.
        relies_on = partial(_wait_for, step, self._publication, self._write_held())
        self.checkpoints.save(step, files, state, relies_on, interim=interim and not self._is_of_interval(step))
        self._saved, self._saved_s = step, time.monotonic()

    def _evaluate(self, step: int) -> None:
        """Measure the weights after `step` on the held-out rows, once."""
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
        """Publish the last weights and save a last checkpoint, also after a stop on request; else evaluate before."""
        if not stopped:
            self._evaluate(step)
        # Whatever the interval says: who explores or evaluates after the end is to have the last weights.
        if self.ranks.broadcast(self.publish_due is not None and self._published < step):
            self._publish(step)
        unsaved = step > self._saved
        if unsaved:
            self._save(step, last=True, interim=stopped)
        else:
            self._write_held()  # what was published after the checkpoint
        # Durable before the trainer says that it has ended, for then nobody waits for it any more.
        self._publishing.flush()
        self.checkpoints.flush()
        if not unsaved and step:  # the step was saved before it was known to be the last
            exported = self._export() if self.section.save_hf_checkpoint == "last" else {}
            if self.ranks.is_rank0:
                self.checkpoints.complete(step, exported, interim=stopped)
        if self.ranks.is_rank0:
            self.metrics.flush()


def _wait_for(
    step: int, publication: tuple[int, Future[PublishedWeights]] | None, written: Future[None] | None
) -> dict[str, str]:
    """Wait until what is published is there, so that who resumes from a checkpoint finds what it tells of; what the
    manifest of the checkpoint of `step` says of it. Raises: what went wrong with it.
    """
    if written is not None:
        written.result()
    if publication is None:
        return {}
    published = publication[1].result()
    # Of the same weights: those of a checkpoint may be of another data type, and so have another hash.
    return {WEIGHTS_HASH: published.content_hash} if publication[0] == step else {}


def batch_metrics(step: int, entry: LedgerEntry, batch: TrainingBatch) -> dict[str, float]:
    """What the rows of a batch say by themselves: rewards and lengths of rollouts, each once, whatever its rows;
    staleness of rows, against the weights that were trained (version step - 1).
    """
    # Version v is what optimizer step v leaves behind, so step s trains the weights of version s - 1.
    staleness = step - 1 - batch.min_policy_versions
    metrics = {
        "num_rows": float(len(batch)),
        "num_tokens": float(batch.lengths.sum()),
        "num_trained_tokens": float(batch.num_trained.sum()),
    }
    trained = batch.num_trained
    if len(batch):
        # What was added between turns is not trained; of a row that is masked all counts, since nothing tells it apart.
        lengths = np.where(trained > 0, trained, batch.response_lengths)
        metrics["response_length"] = float(lengths.sum()) / len(np.unique(batch.rollouts))
        metrics["num_turns"] = len(batch.turns) / len(np.unique(batch.rollouts))
    if num_masked := int((trained == 0).sum()):
        metrics["num_masked"] = float(num_masked)  # such as truncated responses that an operator masks
    if batch.sampled:
        # Demonstrations are of no version, so they have no staleness.
        own = ~batch.experts
        rewards, _ = batch.rollout_rewards()
        stds = batch.group_reward_stds()
        metrics.update(
            num_rollouts=float(len(rewards)),
            reward=float(rewards.mean()),
            reward_std=float(stds.mean()),
            staleness=float(np.mean(staleness[own])),
            staleness_max=float(np.max(staleness[own])),
        )
        # Of what the engine has said of its tokens; a model behind an API may say nothing.
        if (logprobs := batch.trained_logprobs[own]).any():
            metrics["rollout_entropy"] = -float(logprobs.sum() / trained[own].sum())
        if len(rewards) > len(stds):  # a lone rollout has nothing to differ from
            metrics["flat_groups"] = float((stds == 0.0).mean())
    # Of the notes those that are counts, such as num_missing_groups of a partial batch.
    metrics.update({name: value for name, value in entry.notes.items() if name.startswith("num_")})
    for rows in entry.drop:
        key = f"num_dropped_{rows.reason.partition(':')[0]}"  # "skipped", without the user's words
        metrics[key] = metrics.get(key, 0.0) + len(rows.rows)
    return metrics


def take_turn(turn: DeviceLock, ranks: Ranks, timeout_s: float, tell_alive: Callable[[], None]) -> None:
    """Wait until every rank has its device. Called by all ranks. Raises: WaitTimeout: an engine does not leave one."""
    began = spoke = time.monotonic()
    # In short looks, which all ranks make together: one that waited alone would keep the others in a call of torch's,
    # whose deadline is of another kind. What a rank has it keeps.
    while not all(ranks.all_gather(turn.try_acquire())):
        now = time.monotonic()
        if now - spoke > _SIGN_OF_LIFE_S:
            spoke = now
            tell_alive()
        if ranks.broadcast(now - began > timeout_s):
            raise turn.timeout(timeout_s)
        time.sleep(_TURN_LOOK_S)


# ---- a batch is read by all ranks

Read = Callable[[LedgerEntry, Sequence[int] | None], TrainingBatch]
"""As `BatchSource.read`."""


def places_of(entry: LedgerEntry, rank: int, size: int) -> range:
    """The places in an entry that a rank reads: a run of neighbors, who often lie in the same shard, and whole groups,
    each of which is one item of `use`. Rows of a dataset may be parted anywhere.
    """
    # Where a cut may be: after each group of rollouts, and after each single row of a dataset.
    ends = [0]
    for rows in entry.use:
        last = ends[-1]
        ends += [last + 1 + i for i in range(len(rows.rows))] if rows.of_dataset else [last + len(rows.rows)]
    # The last such place at or before an even share. Two neighbors compute the same place, so none is read twice.
    first, after = (ends[bisect_right(ends, ends[-1] * part // size) - 1] for part in (rank, rank + 1))
    return range(first, after)


def read_together(
    entry: LedgerEntry,
    ranks: Ranks,
    read: Read,
    rows_to_compute: Callable[[TrainingBatch], np.ndarray | None] = lambda batch: None,
) -> TrainingBatch:
    """The batch of an entry: each rank reads its own rows from storage, then they give each other what they read.

    So every shard is read about once. Every rank knows all rows and how many of their tokens are trained, so that
    baselines and denominators are those of the whole batch. Tokens, and all that is said of each, which may be hundreds
    of bytes, go to the ranks that compute them alone. The batch is, to the bit, what one rank would have read, but for
    the numbers of states, which are compared within a group alone. Called by all ranks.

    Args:
        rows_to_compute: numbers of the rows whose tokens this rank is to hold, given the batch without any; None: all.
    """
    # Alone there is nobody to share the reading with, and no copy through bytes to make.
    if ranks.size == 1:
        return read(entry, None)
    # Read once by somebody, not by everybody: storage serves each shard about once, however many ranks there are.
    places = places_of(entry, ranks.rank, ranks.size)
    # An entry without rows is read by rank 0, for the shapes of nothing.
    nothing = not any(rows.rows for rows in entry.use)
    own = read(entry, places) if len(places) or (ranks.is_rank0 and nothing) else None
    told = ranks.all_gather_bytes(b"" if own is None else to_bytes(own.holding([])))
    parts = [from_bytes(data) if data else None for data in told]
    batch = join_batches([part for part in parts if part is not None])

    # The rows that each rank wants, and of those the ones that were read here.
    rows = rows_to_compute(batch) if len(batch) else None
    rows = np.arange(len(batch)) if rows is None else np.unique(rows)
    wanted = [np.frombuffer(data, np.int64) for data in ranks.all_gather_bytes(rows.astype(np.int64).tobytes())]
    first = sum(len(part) for part in parts[: ranks.rank] if part is not None)
    sent = [b"" if own is None else _tokens_to_bytes(own.holding(each - first)) for each in wanted]
    # In the order of the ranks, and so in that of the rows.
    found = [load(data) for data in ranks.exchange_bytes(sent) if data]
    experts = batch.routed_experts
    if experts is not None:
        # Of rows that do not tell theirs, such as demonstrations, beside those of others that do.
        unknown = [np.full((len(part["tokens"]), experts.shape[1]), -1, np.int16) for part in found]
        experts = np.concatenate([part.get("routed_experts", none) for part, none in zip(found, unknown, strict=True)])
    own_tokens = {name: np.concatenate([part[name] for part in found]) for name in _OF_TOKENS}
    return replace(batch, **own_tokens, routed_experts=experts, held=np.isin(np.arange(len(batch)), rows))


_OF_TOKENS = ("tokens", "rollout_logprobs", "loss_mask")
"""What a rank has of its own rows alone, beside experts, which may be unknown."""


def _tokens_to_bytes(batch: TrainingBatch) -> bytes:
    arrays = {name: getattr(batch, name) for name in (*_OF_TOKENS, "routed_experts")}
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None})


def to_bytes(batch: TrainingBatch) -> bytes:
    """A batch as safetensors, its texts as JSON among the arrays."""
    values = {f.name: getattr(batch, f.name) for f in fields(TrainingBatch)}
    texts = {name: np.frombuffer(json.dumps(values.pop(name)).encode(), np.uint8) for name in _TEXTS}
    arrays = {name: np.ascontiguousarray(array) for name, array in values.items() if array is not None}
    return save({**arrays, **texts})


def from_bytes(data: bytes) -> TrainingBatch:
    """The batch that `to_bytes` was given."""
    arrays = load(data)
    uids, images = (json.loads(arrays.pop(name).tobytes()) for name in _TEXTS)
    return TrainingBatch(**arrays, uids=tuple(uids), images=None if images is None else tuple(map(tuple, images)))
