"""Ending: what must hold of a run when it has ended, whatever was done to it.

It asks the audit, and counts again on its own, by the uids that the plan says there are: an audit that is wrong would
otherwise prove itself. It does not know what happened to the run.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import RftError
from rftdask.storage import Storage
from rftdask.storage.memory import MemoryStorage
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all, train
from rftdask.trainer.checkpoint import checkpoint_folder
from rftdask.weights.manifest import is_valid, read_file, read_manifest
from rftdask.weights.published import (
    CHECKPOINT_MODEL_FILE,
    CHECKPOINT_POINTER,
    MODEL_FILE,
    WEIGHTS_POINTER,
    read_pointer,
    weights_folder,
)


@dataclass(frozen=True)
class Ending:
    """`problems` is empty if every promise holds."""

    problems: list[str] = field(default_factory=list)
    num_lost: int = 0
    """Experiences that are nowhere, acknowledged or planned."""
    num_twice: int = 0
    """Experiences that were trained or dropped more than once."""


@dataclass(frozen=True)
class Undisturbed:
    """Result of a run of the same plan to which nothing happens."""

    weights: bytes
    batches: dict[int, str]
    """Optimizer step -> digest of its batch."""


def run_undisturbed(plan: Plan) -> Undisturbed:
    storage, witness = new_memory(), Witness()
    run_all(lambda: storage, plan, Parts(), witness, seed=0)
    return Undisturbed(storage.get(f"{weights_folder(plan.num_steps)}/{MODEL_FILE}"), dict(witness.steps_trained()))


def check_ending(storage: Storage, plan: Plan, witness: Witness, undisturbed: Undisturbed) -> Ending:
    """Read everything, and compare. The product's own parts do it, also where the run went without some of them."""
    try:
        log, ledger = ParquetLog(storage), Ledger(storage)
        audit = audit_log(log, ledger, plan.tasks_per_unit)
        problems = [f"audit: {problem}" for problem in audit.problems]
        if audit.waiting:
            problems.append(f"audit: {audit.waiting} experiences still wait")
        missing, repeated, more = _count_uids(ledger, plan)
        # A commit had returned for these, and they are neither in the log nor in quarantine.
        aside = set(storage.list("experiences/quarantine"))
        gone = [
            path
            for path in witness.shards_acknowledged()
            if path.rpartition("/")[2] not in aside and not storage.exists(path)
        ]
        problems += [*more, *(f"acknowledged and lost: {path}" for path in gone)]
        problems += _compare_batches(plan, witness, undisturbed)
        problems += _compare_weights(storage, plan, undisturbed)
    except (RftError, ValueError) as error:
        return Ending([f"{type(error).__name__}: {error}"])
    num_lost = len(missing) + sum(num_rows(path) for path in gone)
    return Ending(problems, num_lost, len(repeated))


def try_to_end(run: Callable[[], None]) -> Ending | None:
    """Run to the end; None if `run` returns, else what it raised. An error outside our tree is called a bug."""
    try:
        run()
    except RftError as error:
        return Ending([f"{type(error).__name__}: {error}"])
    except Exception as error:
        return Ending([f"a bug, {type(error).__name__}: {error}"])
    return None


def num_rows(path: str) -> int:
    name = ShardName.try_parse(path.rpartition("/")[2])
    return name.num_rows if name else 0


def _count_uids(ledger: Ledger, plan: Plan) -> tuple[list[str], list[str], list[str]]:
    """Count by the plan: (uids that no entry names, uids that several name, these and wrong reasons as sentences)."""
    planned = {e.uid: e for e in plan.all_experiences()}
    named: Counter[str] = Counter()
    problems = []
    entries = [entry for step in range(1, ledger.last_step() + 1) if (entry := ledger.read(step)) is not None]
    for rows in (r for entry in entries for r in (*entry.use, *entry.drop)):
        name = ShardName.try_parse(rows.source)
        if name is None:
            continue  # the audit has said so
        experiences = plan.experiences(name.explore_step, name.unit)
        for row in rows.rows:
            uid = experiences[row].uid
            named[uid] += 1
            fate = plan.fate(planned[uid])
            if fate is not None and rows.reason != fate:
                problems.append(f"{uid} was {rows.reason or 'trained'}, not {fate or 'trained'}")
    missing = [uid for uid in planned if uid not in named]
    repeated = [uid for uid, count in named.items() if count > 1]
    problems += [f"lost: {uid}" for uid in missing] + [f"twice: {uid}" for uid in repeated]
    return missing, repeated, problems


def _compare_batches(plan: Plan, witness: Witness, undisturbed: Undisturbed) -> list[str]:
    problems = []
    batches: dict[int, str] = {}
    for step, digest in witness.steps_trained():
        if batches.setdefault(step, digest) != digest:
            problems.append(f"step {step} was trained with two different batches")
    if plan.ordered and batches != undisturbed.batches:
        differing = sorted(s for s, digest in undisturbed.batches.items() if batches.get(s) != digest)
        problems.append(f"steps {differing} were trained with other batches than without a crash")
    return problems


def _compare_weights(storage: Storage, plan: Plan, undisturbed: Undisturbed) -> list[str]:
    expected = undisturbed.weights if plan.ordered else _replayed_weights(storage, plan)
    last = plan.num_steps
    problems = []
    for folder, name in ((weights_folder(last), MODEL_FILE), (checkpoint_folder(last), CHECKPOINT_MODEL_FILE)):
        manifest = read_manifest(storage, folder) if is_valid(storage, folder) else None
        if manifest is None:
            problems.append(f"{folder} is not valid")
        elif read_file(storage, folder, manifest, name) != expected:
            problems.append(f"the weights in {folder} are not those of an undisturbed run")
    for pointer in (WEIGHTS_POINTER, CHECKPOINT_POINTER):
        if (found := read_pointer(storage, pointer)) != last:
            problems.append(f"{pointer} says {found}, not {last}")
    return problems


def _replayed_weights(storage: Storage, plan: Plan) -> bytes:
    """Train what the ledger says in one undisturbed life; its final weights."""
    replay = new_memory()
    for path, data in read_tree(storage).items():
        if path.startswith(("experiences/", "ledger/")):
            replay.put(path, data)
    train(replay, plan, Parts(), Witness())
    return replay.get(f"{weights_folder(plan.num_steps)}/{MODEL_FILE}")


def new_memory() -> MemoryStorage:
    return MemoryStorage(f"memory://crashtest-{uuid.uuid4().hex}")


def read_tree(storage: Storage, folder: str = "") -> dict[str, bytes]:
    """Path -> bytes of every file."""
    found = {}
    for name in storage.list(folder):
        path = f"{folder}/{name}" if folder else name
        if name.endswith("/"):
            found.update(read_tree(storage, path[:-1]))
        else:
            found[path] = storage.get(path)
    return found
