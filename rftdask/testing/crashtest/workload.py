"""Workload: the short run that crash tests disturb. Real log, ledger, checkpoints, weights and trainer loop; what is
left out are Dask, rollouts and gradients.

Every experience is a pure function of its place, so a work unit may run any number of times, by anybody. Some rollouts
fail and some groups are too stale, so that rows are dropped, too. It knows nothing of crashes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.batches.lineage import MAIN_LINEAGE
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.selection import SampleRule
from rftdask.buffer.log.file_log import FileLog, ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.storage import Storage
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.trainer import Trainer

MAX_STALENESS = 1
_MAX_READ_TIMEOUT_S = 30.0
_LEAD = 3
"""Explore steps that writers may be ahead of the trainer."""
_REPEAT_SHARE = 0.15
"""Share of the work units a writer runs although they are done."""


@dataclass(frozen=True)
class Plan:
    """The size of a run, and what each of its experiences is.

    Example: Plan(num_explore_steps=6) has 12 work units of 2 groups of 2 rollouts, and 8 optimizer steps of 3
    groups: a shard is used by several steps, and a step uses several shards.
    """

    num_explore_steps: int = 3
    ordered: bool = True
    tasks_per_step: int = 4
    tasks_per_unit: int = 2
    repeat_times: int = 2
    groups_per_batch: int = 3
    save_interval: int = 2

    def __post_init__(self) -> None:
        if self.num_explore_steps * self.tasks_per_step % self.groups_per_batch:
            raise ValueError(f"{self}: its groups do not fill its batches")

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return self.num_explore_steps * self.tasks_per_step // self.groups_per_batch

    def units(self, last_explore_step: int) -> list[tuple[int, int]]:
        """List (explore step, unit) of all work units up to a step, in order."""
        per_step = self.tasks_per_step // self.tasks_per_unit
        return [(step, unit) for step in range(1, last_explore_step + 1) for unit in range(per_step)]

    def experiences(self, explore_step: int, unit: int) -> list[Experience]:
        """The rows of a work unit, the same whoever runs it: a pure function of their place."""
        first = (explore_step - 1) * self.tasks_per_step + unit * self.tasks_per_unit
        made = []
        for task, rollout in itertools.product(range(first, first + self.tasks_per_unit), range(self.repeat_times)):
            # Every fifth group is sampled by the first weights, so that some are stale when their turn comes.
            version = 0 if task % 5 == 4 else task // self.groups_per_batch
            make = functools.partial(
                Experience,
                taskset="crash",
                epoch=0,
                task_index=task,
                rollout=rollout,
                explore_step=explore_step,
                min_policy_version=version,
            )
            # Primes without a common factor, so that failed and stale groups meet in every combination.
            if (task * self.repeat_times + rollout) % 7 == 3 or task % 11 == 10:
                made.append(make(status=Status.FAILED, error="planned"))
                continue
            # The content follows from the place, so that any copy of a row is known to be right or wrong.
            digest = hashlib.sha256(f"{task}/{rollout}".encode()).digest()
            made.append(
                make(
                    tokens=tuple(digest[:12]),
                    prompt_length=4,
                    rollout_logprobs=tuple(-byte / 256 for byte in digest[12:20]),
                    reward=digest[20] / 256,
                    max_policy_version=version,
                )
            )
        return made

    def fate(self, experience: Experience) -> str | None:
        """Why it is dropped, "" if it is trained; None where it depends on the order of arrival."""
        if not experience.status.trainable:
            return experience.status
        if not self.ordered:
            return None
        version = experience.task_index // self.groups_per_batch
        return "stale" if version - experience.min_policy_version > MAX_STALENESS else ""


@dataclass(frozen=True)
class Parts:
    """The product's parts, at the seam where a crash test can take a protection away."""

    log: Callable[[Storage], FileLog] = ParquetLog
    ledger: Callable[[Storage], Ledger] = Ledger


@dataclass
class Witness:
    """Record of what the lives of a run have seen, out of reach of a crash: in memory, or in a file beside the run."""

    file: Path | None = None
    lines: list[str] = field(default_factory=list)

    def trained(self, step: int, digest: str) -> None:
        """An optimizer step was taken with the batch of this digest."""
        self._note(f"trained {step} {digest} {os.getpid()}")

    def acknowledged(self, path: str) -> None:
        """A commit has returned: from now on this shard may not be lost."""
        self._note(f"acknowledged {path}")

    def steps_trained(self, process: int | None = None) -> list[tuple[int, str]]:
        """(step, digest of its batch) each time one was trained, by all lives or by one process."""
        words = [line.split() for line in self._read() if line.startswith("trained")]
        return [(int(step), digest) for _, step, digest, pid in words if process in (None, int(pid))]

    def shards_acknowledged(self) -> list[str]:
        """Paths, in the order of their commits."""
        return [line.split()[1] for line in self._read() if line.startswith("acknowledged")]

    def num_trained_again(self) -> int:
        """Batches that were trained more than once, because a crash came before their checkpoint."""
        steps = [step for step, _ in self.steps_trained()]
        return len(steps) - len(set(steps))

    def copy(self) -> Witness:
        return Witness(None, self._read().copy())

    def _note(self, line: str) -> None:
        if self.file is None:
            self.lines.append(line)
            return
        with self.file.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())  # one call: no line of another process comes between

    def _read(self) -> list[str]:
        if self.file is None:
            return self.lines
        return self.file.read_text().splitlines() if self.file.exists() else []


class WitnessedEngine(FakeTrainEngine):
    """The fake engine, telling the witness of every batch it has trained."""

    def __init__(self, witness: Witness, after_step: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._witness = witness
        self._after_step = after_step

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        metrics = super().train_step(batch, step)
        content = "\n".join(batch.uids).encode() + batch.tokens.tobytes() + batch.rewards.tobytes()
        self._witness.trained(step, hashlib.sha256(content).hexdigest()[:16])
        self._after_step()
        return metrics


class Writer:
    """Runs work units and commits them; several may race for the same ones."""

    def __init__(
        self, storage: Storage, plan: Plan, parts: Parts, witness: Witness, rng: random.Random, name: str = ""
    ) -> None:
        """name: hexadecimal; by default a random one, as every process has that is really another one."""
        self._plan = plan
        self._log = parts.log(storage)
        self._log.writer = name or self._log.writer  # a given name makes the same shard names in every run
        self._ledger = parts.ledger(storage)
        self._witness = witness
        self._rng = rng
        self._sealed = False

    def work(self) -> bool:
        """Commit one work unit that is not done, or now and then one that is; seal the log when all are done.

        Returns: False: there was nothing to do.
        """
        plan = self._plan
        done = {(name.explore_step, name.unit) for name in self._log.shards()}
        # Writers keep some steps ahead of the trainer, so that crashes find shards that are not used yet.
        explored = self._ledger.last_step() * plan.groups_per_batch // plan.tasks_per_step
        waiting = [b for b in plan.units(min(explored + _LEAD, plan.num_explore_steps)) if b not in done]
        if not waiting:
            if not self._sealed and done.issuperset(plan.units(plan.num_explore_steps)):
                self._log.seal(plan.num_explore_steps)
                self._sealed = True
            return False
        chosen = self._rng.choice(waiting[:3])
        # As after a lost acknowledgment: a unit runs again although its shard is there.
        if done and self._rng.random() < _REPEAT_SHARE:
            chosen = self._rng.choice(sorted(done))
        name = self._log.commit(plan.experiences(*chosen), explore_step=chosen[0], unit=chosen[1])
        self._witness.acknowledged(self._log.path(name))
        return True


class _NoMetrics:
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics say nothing of exactness."""

    def flush(self) -> None: ...


class _OneLook(LogSource):
    """A source that looks at the log once each time it is asked: how often it could in a while depends on the machine,
    and so would the places that a run passes.
    """

    def entry(self, step: int, patience_s: float = 0.0) -> LedgerEntry | None:
        return super().entry(step, 0.0)


def train(
    storage: Storage,
    plan: Plan,
    parts: Parts,
    witness: Witness,
    should_stop: Callable[[], bool] = lambda: False,
    source: type[LogSource] = LogSource,
) -> None:
    """One life of the trainer, from the newest checkpoint to the end of the log."""
    rule = SampleRule(plan.groups_per_batch, plan.tasks_per_step, plan.ordered, MAX_STALENESS)
    ledger = parts.ledger(storage)
    trainer = Trainer(
        WitnessedEngine(witness, getattr(ledger, "write_late", lambda: None)),
        source(
            parts.log(storage),
            ledger,
            rule,
            tasks_per_unit=plan.tasks_per_unit,
            max_read_timeout_s=_MAX_READ_TIMEOUT_S,
            poll_interval_s=0.005,
        ),
        # Few, so that every run also removes some.
        Checkpoints(storage, MAIN_LINEAGE, max_to_keep=2),
        storage,
        _NoMetrics(),
        TrainerConfig(save_interval=plan.save_interval),
        total_steps=None,
        lineage=MAIN_LINEAGE,
        max_weights_to_keep=3,
        full_publish_interval=3,
        # After each step: publishing is one more place to be killed at.
        publish_due=lambda step, published: True,
        should_stop=should_stop,
        emit=lambda event: None,
    )
    trainer.run()


def run_all(storages: Callable[[], Storage], plan: Plan, parts: Parts, witness: Witness, seed: int) -> None:
    """The rest of a run, all roles in turn in this process: from whatever is on storage to the end.

    The same seed on the same storage makes the same calls. Another life needs another seed, lest it reuse names of
    shards.
    """
    # One source of randomness for all roles: who works next, and on what, is the same in every run of a seed.
    rng = random.Random(seed)
    writers = [Writer(storages(), plan, parts, witness, rng, f"{rng.getrandbits(48):012x}") for _ in range(2)]

    def let_writers_work() -> bool:
        for _ in range(2):
            rng.choice(writers).work()
        return False

    let_writers_work()
    train(storages(), plan, parts, witness, let_writers_work, _OneLook)
