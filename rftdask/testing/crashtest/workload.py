"""Workload: the short run that crash tests disturb, with the real log, ledger, checkpoints, weights and trainer loop,
but without Dask, rollouts and gradients.

Every experience is a pure function of its position, so any process may run a work unit any number of times. Some
rollouts fail and some groups are too stale, so that some rows are dropped. It does not know about crashes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import MAIN_LINEAGE, Ledger, LedgerEntry
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
"""Maximum explore steps that writers are ahead of the trainer."""
_REPEAT_SHARE = 0.15
"""Share of finished work units that a writer runs again."""


@dataclass(frozen=True)
class Plan:
    """Size of a run and content of each experience.

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
        """(explore step, unit) of all work units up to a step, in order."""
        per_step = self.tasks_per_step // self.tasks_per_unit
        return [(step, unit) for step in range(1, last_explore_step + 1) for unit in range(per_step)]

    def experiences(self, explore_step: int, unit: int) -> list[Experience]:
        """Rows of a work unit: a pure function of their position."""
        first = (explore_step - 1) * self.tasks_per_step + unit * self.tasks_per_unit
        made = []
        for task, rollout in itertools.product(range(first, first + self.tasks_per_unit), range(self.repeat_times)):
            # Every fifth group is sampled by the first weights, so that some are too stale when trained.
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
            # Coprime periods, so that failed and stale groups meet in every combination.
            if (task * self.repeat_times + rollout) % 7 == 3 or task % 11 == 10:
                made.append(make(status=Status.FAILED, error="planned"))
                continue
            # The content follows from the position, so that any copy of a row can be checked.
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
        """Reason why the row is dropped; "" if it is trained. None: depends on the order of arrival."""
        if not experience.status.trainable:
            return experience.status
        if not self.ordered:
            return None
        version = experience.task_index // self.groups_per_batch
        return "stale" if version - experience.min_policy_version > MAX_STALENESS else ""


@dataclass(frozen=True)
class Parts:
    """Parts of the product that a crash test can replace to disable a protection."""

    log: Callable[[Storage], FileLog] = ParquetLog
    ledger: Callable[[Storage], Ledger] = Ledger


@dataclass
class Witness:
    """Record of a run's events that survives crashes: in memory, or in a file outside the run."""

    file: Path | None = None
    lines: list[str] = field(default_factory=list)

    def trained(self, step: int, digest: str) -> None:
        """Record an optimizer step and the digest of its batch."""
        self._note(f"trained {step} {digest} {os.getpid()}")

    def acknowledged(self, path: str) -> None:
        """Record that a commit has returned: the shard must not be lost from now on."""
        self._note(f"acknowledged {path}")

    def steps_trained(self, process: int | None = None) -> list[tuple[int, str]]:
        """(step, digest of its batch) of every training, in all processes or in one."""
        words = [line.split() for line in self._read() if line.startswith("trained")]
        return [(int(step), digest) for _, step, digest, pid in words if process in (None, int(pid))]

    def shards_acknowledged(self) -> list[str]:
        """Paths of acknowledged shards, in the order of their commits."""
        return [line.split()[1] for line in self._read() if line.startswith("acknowledged")]

    def num_trained_again(self) -> int:
        """Number of batches trained again because of a crash before their checkpoint."""
        steps = [step for step, _ in self.steps_trained()]
        return len(steps) - len(set(steps))

    def copy(self) -> Witness:
        return Witness(None, self._read().copy())

    def _note(self, line: str) -> None:
        if self.file is None:
            self.lines.append(line)
            return
        with self.file.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())  # one call, so that lines of processes do not mix

    def _read(self) -> list[str]:
        if self.file is None:
            return self.lines
        return self.file.read_text().splitlines() if self.file.exists() else []


class WitnessedEngine(FakeTrainEngine):
    """Fake engine that records every trained batch in the witness."""

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
    """Runs and commits work units. Several writers may race for the same units."""

    def __init__(
        self, storage: Storage, plan: Plan, parts: Parts, witness: Witness, rng: random.Random, name: str = ""
    ) -> None:
        """name: hexadecimal. None: random, as in separate processes."""
        self._plan = plan
        self._log = parts.log(storage)
        self._log.writer = name or self._log.writer  # a fixed name gives the same shard names in every run
        self._ledger = parts.ledger(storage)
        self._witness = witness
        self._rng = rng
        self._sealed = False

    def work(self) -> bool:
        """Commit an unfinished work unit, or sometimes a finished one; seal the log when all are done.

        Returns: False if there was nothing to do.
        """
        plan = self._plan
        done = {(name.explore_step, name.unit) for name in self._log.shards()}
        # Writers stay some steps ahead of the trainer, so that crashes find unused shards.
        explored = self._ledger.last_step() * plan.groups_per_batch // plan.tasks_per_step
        waiting = [b for b in plan.units(min(explored + _LEAD, plan.num_explore_steps)) if b not in done]
        if not waiting:
            if not self._sealed and done.issuperset(plan.units(plan.num_explore_steps)):
                self._log.seal(plan.num_explore_steps)
                self._sealed = True
            return False
        chosen = self._rng.choice(waiting[:3])
        # A unit whose shard exists runs again, as after a lost acknowledgment.
        if done and self._rng.random() < _REPEAT_SHARE:
            chosen = self._rng.choice(sorted(done))
        name = self._log.commit(plan.experiences(*chosen), explore_step=chosen[0], unit=chosen[1])
        self._witness.acknowledged(self._log.path(name))
        return True


class _OneLook(LogSource):
    """Source that reads the log once per call. With polling, the places of a run would depend on the machine."""

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
    """Run a trainer from the newest checkpoint to the end of the log."""
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
        # Few checkpoints, so that every run also removes some.
        Checkpoints(storage, MAIN_LINEAGE, max_to_keep=2),
        storage,
        None,  # metrics do not affect exactness
        TrainerConfig(save_interval=plan.save_interval),
        total_steps=None,
        lineage=MAIN_LINEAGE,
        max_weights_to_keep=3,
        full_publish_interval=3,
        # After each step: publishing adds places to be killed at.
        publish_due=lambda step, published: True,
        should_stop=should_stop,
        emit=lambda event: None,
    )
    trainer.run()


def run_all(storages: Callable[[], Storage], plan: Plan, parts: Parts, witness: Witness, seed: int) -> None:
    """Run all roles in turn in this process, from the state on storage to the end.

    The same seed on the same storage makes the same calls. Another process needs another seed, so that it does not
    reuse shard names.
    """
    # One random generator for all roles, so that the order of work is the same in every run of a seed.
    rng = random.Random(seed)
    writers = [Writer(storages(), plan, parts, witness, rng, f"{rng.getrandbits(48):012x}") for _ in range(2)]

    def let_writers_work() -> bool:
        for _ in range(2):
            rng.choice(writers).work()
        return False

    let_writers_work()
    train(storages(), plan, parts, witness, let_writers_work, _OneLook)
