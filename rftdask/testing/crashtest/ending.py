"""Ending: the promises that must hold when a run has ended, whatever happened to it.

It runs the audit and counts again by the uids of the plan, since a wrong audit would confirm itself. It does not know
what happened to the run.
"""

from __future__ import annotations

import functools
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import NotFoundError, RftError
from rftdask.storage import Storage
from rftdask.storage.memory import MemoryStorage
from rftdask.synchronizer.manifest import is_valid, read_file, read_manifest
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import (
    CHECKPOINT_MODEL_FILE,
    CHECKPOINT_POINTER,
    WEIGHTS_POINTER,
    is_loadable,
    read_pointer,
    read_published,
    weights_folder,
)
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all, train
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import checkpoint_folder

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ending:
    """Result of checking a run. `problems` is empty if every promise holds."""

    problems: list[str] = field(default_factory=list)
    num_lost: int = 0
    """Acknowledged or planned experiences that are missing."""
    num_twice: int = 0
    """Experiences trained or dropped more than once."""


@functools.cache
def run_undisturbed(plan: Plan) -> tuple[bytes, dict[int, str]]:
    """Run the plan in memory, once per process; forks inherit the result.

    Returns: (last weights, digest of the batch of each optimizer step).
    """
    storage, witness = new_memory(), Witness()
    run_all(lambda: storage, plan, Parts(), witness, seed=0)
    return read_weights(storage, plan.num_steps), dict(witness.steps_trained())


def go_on(
    storages: Callable[[], Storage], plan: Plan, witness: Witness, seed: int, parts: Parts | None = None
) -> Ending:
    """Continue a run from storage to its end and check it. An error outside the package's error tree is a bug."""
    try:
        run_all(storages, plan, parts or Parts(), witness, seed)
    except RftError as error:
        return Ending([f"{type(error).__name__}: {error}"])
    except Exception as error:
        return Ending([f"a bug, {type(error).__name__}: {error}"])
    return check_ending(storages(), plan, witness)


def check_ending(storage: Storage, plan: Plan, witness: Witness) -> Ending:
    """Read everything and compare it, with the complete parts even if the run lacked some of them."""
    try:
        ledger = Ledger(storage)
        audit = audit_log(ParquetLog(storage), ledger, plan.tasks_per_unit)
        problems = [f"audit: {problem}" for problem in audit.problems]
        if audit.waiting:
            problems.append(f"audit: {audit.waiting} experiences still wait")

        # The ledger must name every planned experience once, with the reason that the plan expects.
        units = plan.units(plan.num_explore_steps)
        planned = {experience.uid: experience for unit in units for experience in plan.experiences(*unit)}
        named: Counter[str] = Counter()
        entries = [entry for step in range(1, ledger.last_step() + 1) if (entry := ledger.read(step)) is not None]
        for rows in (rows for entry in entries for rows in (*entry.use, *entry.drop)):
            name = ShardName.try_parse(rows.source)
            if name is None:
                continue  # already reported by the audit
            experiences = plan.experiences(name.explore_step, name.unit)
            for uid in (experiences[row].uid for row in rows.rows):
                named[uid] += 1
                fate = plan.fate(planned[uid])
                if fate is not None and rows.reason != fate:
                    problems.append(f"{uid} was {rows.reason or 'trained'}, not {fate or 'trained'}")
        missing = [uid for uid in planned if uid not in named]
        repeated = [uid for uid, count in named.items() if count > 1]
        problems += [f"lost: {uid}" for uid in missing] + [f"twice: {uid}" for uid in repeated]

        # Their commits had returned, but they are neither in the log nor in quarantine.
        aside = set(storage.list("experiences/quarantine"))
        acknowledged = [path for path in witness.shards_acknowledged() if path.rpartition("/")[2] not in aside]
        gone = [path for path in acknowledged if not storage.exists(path)]
        problems += [f"acknowledged and lost: {path}" for path in gone]
        problems += _compare(storage, plan, witness)
    except (RftError, ValueError) as error:
        return Ending([f"{type(error).__name__}: {error}"])
    return Ending(problems, len(missing) + sum(map(num_rows, gone)), len(repeated))


def _compare(storage: Storage, plan: Plan, witness: Witness) -> list[str]:
    """Differences from the undisturbed run in batches, final weights and pointers."""
    expected, usual = run_undisturbed(plan)
    last, problems = plan.num_steps, []
    batches: dict[int, str] = {}
    for step, digest in witness.steps_trained():
        # A killed trainer repeats its last steps with the batches in the ledger.
        if batches.setdefault(step, digest) != digest:
            problems.append(f"step {step} was trained with two different batches")
    if plan.ordered and batches != usual:
        differing = sorted(step for step, digest in usual.items() if batches.get(step) != digest)
        problems.append(f"steps {differing} were trained with other batches than without a crash")
    if not plan.ordered:
        # The order of arrival decides the batches, so the expected weights come from training the ledger's batches.
        replay = new_memory()
        for path, data in read_tree(storage).items():
            if path.startswith(("experiences/", "ledger/")):
                replay.put(path, data)
        train(replay, plan, Parts(), Witness())
        expected = read_weights(replay, last)
    folder = checkpoint_folder(last)
    manifest = read_manifest(storage, folder) if is_valid(storage, folder) else None
    kept = None if manifest is None else read_file(storage, folder, manifest, CHECKPOINT_MODEL_FILE)
    published = read_weights(storage, last) if is_loadable(storage, last) else None
    for place, weights in ((weights_folder(last), published), (folder, kept)):
        if weights is None:
            problems.append(f"{place} is not valid")
        elif weights != expected:
            problems.append(f"the weights in {place} are not those of an undisturbed run")
    for pointer in (WEIGHTS_POINTER, CHECKPOINT_POINTER):
        if (found := read_pointer(storage, pointer)) != last:
            problems.append(f"{pointer} says {found}, not {last}")
    return problems


def read_weights(storage: Storage, version: int) -> bytes:
    """Weights of a published version, as an engine reads them."""
    published = read_published(storage, version)
    if published is None:
        raise NotFoundError(f"{weights_folder(version)} is not there")
    copy = NodeCache(_NoFolder(storage, lambda verb, path, stage: None), published, _TIMEOUT_S)
    try:
        return copy.files[0].read_bytes()
    finally:
        copy.close()


class _NoFolder(FaultyStorage):
    """Storage without local files, such as a simulated disk."""

    def local_file(self, path: str) -> None:
        return None


def num_rows(path: str) -> int:
    """Number of experiences in a shard, read from its name."""
    name = ShardName.try_parse(path.rpartition("/")[2])
    return name.num_rows if name else 0


def new_memory() -> MemoryStorage:
    return MemoryStorage(f"memory://crashtest-{uuid.uuid4().hex}")


def read_tree(storage: Storage, folder: str = "") -> dict[str, bytes]:
    """All files: path -> bytes."""
    found = {}
    for name in storage.list(folder):
        path = f"{folder}/{name}" if folder else name
        found.update(read_tree(storage, path[:-1]) if name.endswith("/") else {path: storage.get(path)})
    return found
