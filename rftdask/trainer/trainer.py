"""Trainer: the loop. batch -> train -> publish -> checkpoint -> record, once per optimizer step.

It consumes batches from a source, which writes each into the ledger before handing it out; it produces weights (pointer
moved last), checkpoints (manifest last) and metrics. It waits only for its source, with a deadline. It knows neither
Dask nor config; everything it holds can be lost at any line: a new one resumes from the newest valid checkpoint and is
handed the very same batches again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.buffer.batches.source import BatchSource
from rftdask.monitor.events import CheckpointSaved, Event, Published, Started, Step
from rftdask.storage import Storage
from rftdask.trainer.checkpoint import HF_FOLDER, Checkpoints
from rftdask.trainer.engines.base import TrainEngine
from rftdask.weights.fingerprint import Fingerprint
from rftdask.weights.published import (
    fingerprint_extra,
    publish_weights,
    published_versions,
    remove_weights_below,
    restore_pointer,
)

log = logging.getLogger(__name__)

_LOGGED = ("loss", "reward", "grad_norm", "num_rows", "staleness_max", "wait_s", "train_s")


class MetricsSink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...


@dataclass(frozen=True)
class TrainerOptions:
    """What the loop itself decides by."""

    total_steps: int | None
    """None: until the source ends."""
    save_interval: int
    """Checkpoint every so many steps; 0: only the last."""
    save_hf_checkpoint: str
    """last, always or never."""
    lineage: str
    publish: bool
    """Whether anybody loads the weights."""
    max_weights_to_keep: int = 0
    """Published versions that stay, for a trainer without an explorer beside it; 0: the explorer removes what it is
    done with.
    """


@dataclass(frozen=True)
class TrainResult:
    step: int
    """The last optimizer step done."""
    stopped: bool
    """True: ended by request, with work left."""


class Trainer:
    """Runs the loop on rank 0.

    Example: Trainer(engine, source, checkpoints, storage, sink, options, publish_due, should_stop, emit).run()
    """

    def __init__(
        self,
        engine: TrainEngine,
        source: BatchSource,
        checkpoints: Checkpoints,
        storage: Storage,
        metrics: MetricsSink,
        options: TrainerOptions,
        *,
        publish_due: Callable[[int, int], bool],
        should_stop: Callable[[], bool],
        emit: Callable[[Event], None],
    ) -> None:
        """publish_due: (step, last published) -> bool; emit: events for whoever watches, best effort."""
        self._engine = engine
        self._source = source
        self._checkpoints = checkpoints
        self._storage = storage
        self._metrics = metrics
        self._options = options
        self._publish_due = publish_due
        self._should_stop = should_stop
        self._emit = emit
        checkpoints.on_commit = lambda step: emit(CheckpointSaved(step))
        self._step = 0
        self._fingerprint: tuple[int, Fingerprint | None] = (0, None)
        """Of the weights after a step."""
        self._published = 0
        self._saved = 0

    def run(self) -> TrainResult:
        step = self._step = self._resume()
        self._emit(Started(step))
        stopped = False
        while not self._reached(step):
            began = time.perf_counter()
            found = self._source.batch(step + 1)
            if found is None:
                stopped = self._should_stop()
                break
            entry, batch = found
            got = time.perf_counter()
            # Nothing may be left of a batch; the step is made all the same, since others count steps.
            metrics = self._engine.train_step(batch, step + 1) if len(batch) else {}
            trained = time.perf_counter()
            step = self._step = step + 1
            self._publish_if_due(step)
            published = time.perf_counter()
            if self._options.save_interval and step % self._options.save_interval == 0:
                self._save(step, last=self._reached(step))
            ended = time.perf_counter()
            times = {
                "wait_s": got - began,
                "train_s": trained - got,
                "publish_s": published - trained,
                "checkpoint_s": ended - published,
                "step_s": ended - began,
                "tokens_per_s": len(batch.tokens) / (ended - began),
            }
            self._record(step, entry, batch, {**metrics, **times})
            self._checkpoints.check()
            stopped = not self._reached(step) and self._should_stop()
            if stopped:
                break
        self._finish(step)
        return TrainResult(step, stopped)

    def publish_if_due_now(self) -> None:
        """For a trainer that waits for data: publish the weights it has if somebody asked for them meanwhile."""
        self._publish_if_due(self._step)

    def _publish_if_due(self, step: int) -> None:
        if self._options.publish and self._published < step and self._publish_due(step, self._published):
            self._publish(step)

    def _reached(self, step: int) -> bool:
        return self._options.total_steps is not None and step >= self._options.total_steps

    def _resume(self) -> int:
        found = self._checkpoints.load_newest()
        if found is None:
            return 0
        step, state, files = found
        self._engine.load_state_files(files)
        self._source.load_state_dict(state["source"])
        log.info("resumes from checkpoint %d", step)
        self._saved = step
        self._published = min(step, state["published"])
        if self._options.publish and self._published and not restore_pointer(self._storage, self._published):
            self._published = 0  # what was published is damaged: publish as if it never was
        return step

    def _publish(self, step: int) -> None:
        weights, fingerprint = self._engine.weights(), self._fingerprint_of(step)
        published = publish_weights(self._storage, step, weights, self._options.lineage, fingerprint)
        self._published = step
        if self._options.max_weights_to_keep:
            kept = published_versions(self._storage)[-self._options.max_weights_to_keep :]
            remove_weights_below(self._storage, kept[0])
        self._emit(Published(step, published.content_hash))

    def _fingerprint_of(self, step: int) -> Fingerprint | None:
        """Of the weights as they are, which are those after `step`; computed once."""
        if self._fingerprint[0] != step:
            self._fingerprint = (step, self._engine.fingerprint())
        return self._fingerprint[1]

    def _save(self, step: int, last: bool) -> None:
        files = self._engine.state_files()
        if self._options.save_hf_checkpoint == "always" or (last and self._options.save_hf_checkpoint == "last"):
            files.update({f"{HF_FOLDER}/{name}": data for name, data in self._engine.export_files().items()})
        state = {
            "step": step,
            "lineage": self._options.lineage,
            "source": self._source.state_dict(),
            "published": self._published,
        }
        state |= fingerprint_extra(self._fingerprint_of(step))
        self._checkpoints.save(step, files, state)
        self._saved = step

    def _finish(self, step: int) -> None:
        """The last weights and a last checkpoint, also after a stop on request."""
        if self._options.publish and self._published < step:
            self._publish(step)
        last = step > self._saved
        if last:
            self._save(step, last=True)
        self._checkpoints.flush()
        if not last and step and self._options.save_hf_checkpoint == "last":
            # The step was saved before it was known to be the last.
            self._checkpoints.add_files(
                step, {f"{HF_FOLDER}/{n}": data for n, data in self._engine.export_files().items()}
            )
        self._metrics.flush()

    def _record(self, step: int, entry: LedgerEntry, batch: TrainingBatch, metrics: Mapping[str, float]) -> None:
        row = {**batch_metrics(step, entry, batch), **metrics}
        log.info("step %d: %s", step, ", ".join(f"{name} {row[name]:.4g}" for name in _LOGGED if name in row))
        self._metrics.write(step, row)
        self._emit(Step("trainer", step, row))


def batch_metrics(step: int, entry: LedgerEntry, batch: TrainingBatch) -> dict[str, float]:
    """What the rows of a batch say by themselves; staleness is against the weights that were trained (version step -
    1).
    """
    staleness = step - 1 - batch.min_policy_versions
    metrics = {
        "num_rows": float(len(batch)),
        "num_tokens": float(len(batch.tokens)),
        "num_trained_tokens": float(batch.loss_mask.sum()),
    }
    if len(batch):
        metrics["response_length"] = float(batch.response_lengths.mean())
    if batch.sampled:
        own = ~batch.experts
        metrics.update(
            reward=float(batch.rewards[own].mean()),
            reward_std=float(batch.group_reward_stds().mean()),
            staleness=float(np.mean(staleness[own])),
            staleness_max=float(np.max(staleness[own])),
        )
    metrics.update({name: value for name, value in entry.notes.items() if name.startswith("num_")})
    for rows in entry.drop:
        key = f"num_dropped_{rows.reason}"
        metrics[key] = metrics.get(key, 0.0) + len(rows.rows)
    return metrics
