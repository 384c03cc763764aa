"""Damage: every file of a run is truncated, emptied, flipped in one bit, swapped with another of its kind or removed,
and the run goes on. Folders of checkpoints and of weights are swapped, too.

Two outcomes are right. Healed: the run ends as if nothing had happened. Told: a typed error, or the audit, names the
file; allowed only where nobody can know what was there, which are ledger entries, shards whose rows the ledger names,
and the seal; and the file put back, the run must end well, so nothing else was lost meanwhile.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rftdask.buffer.batches.ledger import Ledger
from rftdask.storage import Storage
from rftdask.testing.crashtest.ending import (
    Ending,
    Undisturbed,
    check_ending,
    new_memory,
    read_tree,
    run_undisturbed,
    try_to_end,
)
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all
from rftdask.testing.storage_faults import FaultyStorage

_KINDS = {
    "shard": r"experiences/\d+/.*",
    "seal": r"experiences/SEALED.json",
    "ledger entry": r"ledger/.*",
    "checkpoint manifest": r"global_step_\d+/MANIFEST.json",
    "checkpoint file": r"global_step_\d+/(?P<name>.*)",
    "weights manifest": r"weights/\d+/MANIFEST.json",
    "weights": r"weights/\d+/.*",
    "pointer": r"[^/]*\.txt",
}
_NEXT_SEED = 1_000_003
"""Seed of the life after the damage: none that a run was made with."""
_FOLDERS = r"(global_step_|weights/)\d+"

Tree = dict[str, bytes]


@dataclass(frozen=True)
class _Case:
    """A damaged run folder."""

    what: str
    tree: Tree
    paths: tuple[str, ...]
    """Files or folders that were damaged."""
    kind: str


@dataclass(frozen=True)
class _State:
    """A run folder to be damaged."""

    name: str
    tree: Tree
    witness: Witness
    in_ledger: set[str] = field(default_factory=set)
    """Names of shards that the ledger names."""


def damage_files(
    plan: Plan, seed: int, *, num_flips: int = 3, kinds: str = ".*", parts: Parts | None = None, every: int = 1
) -> Figures:
    """Damage all files of `kinds` (a pattern) of a run that was killed in its middle, and of one that has ended.

    num_flips: bits flipped in each file, one at a time. parts: a protection can be taken away there.
    """
    began = time.monotonic()
    figures = Figures("damage", "files truncated, emptied, flipped in a bit, swapped, removed; folders swapped")
    undisturbed = run_undisturbed(plan)
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    storage, witness = new_memory(), Witness()
    run_all(lambda: storage, plan, Parts(), witness, seed)
    for state in (_killed(plan, seed), _state("ended", storage, witness)):
        figures.num_operations += len(state.tree)
        cases = [case for case in _cases(state.tree, rng, num_flips) if re.fullmatch(kinds, case.kind)]
        for case in cases[::every]:
            outcome, ending = _go_on(case, state, plan, parts or Parts(), undisturbed)
            outcomes[f"{case.kind} {outcome}"] += 1
            figures.num_tried += 1
            figures.add(f"{state.name}, {case.what}", ending)
    figures.notes = [", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))]
    figures.duration_s = time.monotonic() - began
    return figures


class _Killed(BaseException):
    """The process is gone here."""


def _killed(plan: Plan, seed: int) -> _State:
    """Kill a run when the entry after the next checkpoint's was written: one step to replay, one not yet trained,
    and shards that were not used at all.
    """
    storage, witness = new_memory(), Witness()
    last = f"ledger/main/{plan.num_steps // plan.save_interval // 2 * plan.save_interval + 2:08d}.json"

    def kill(verb: str, path: str, stage: str) -> None:
        if (path, stage) == (last, "after") and verb == "put_new":
            raise _Killed

    try:
        run_all(lambda: FaultyStorage(storage, kill), plan, Parts(), witness, seed)
    except _Killed:
        return _state("killed", storage, witness)
    raise AssertionError("unreachable")


def _state(name: str, storage: Storage, witness: Witness) -> _State:
    ledger = Ledger(storage)
    entries = [ledger.read(step) for step in range(1, ledger.last_step() + 1)]
    named = {rows.source for entry in entries if entry for rows in (*entry.use, *entry.drop)}
    # A shard removed by us was not lost by the run: only what was trained is asked of the witness.
    trained = Witness(None, [line for line in witness.lines if line.startswith("trained")])
    return _State(name, read_tree(storage), trained, named)


def _cases(tree: Tree, rng: random.Random, num_flips: int) -> Iterator[_Case]:
    """Damage each file in every way, alone or with one other, then swap folders."""
    # Without its newest entry a ledger is that of an earlier moment: only the counts of the audit can tell.
    newest_entry = max(path for path in tree if path.startswith("ledger/"))
    for path, data in tree.items():
        kind, name = _kind(path)
        damages = {"truncated": data[: len(data) // 2], "emptied": b""}
        for _ in range(num_flips):
            bit = rng.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            damages[f"flipped bit {bit}"] = bytes(flipped)
        for what, damaged in damages.items():
            yield _Case(f"{what}: {path}", {**tree, path: damaged}, (path,), kind)
        if path != newest_entry:
            yield _Case(f"removed: {path}", {p: d for p, d in tree.items() if p != path}, (path,), kind)
        # With one other is enough: what refuses it, a checksum or a version, would refuse the next.
        others = [p for p in tree if _kind(p) == (kind, name) and tree[p] != data and p > path]
        for other in others[:1]:
            swapped = {**tree, path: tree[other], other: data}
            yield _Case(f"swapped: {path} and {other}", swapped, (path, other), kind)
    folders = sorted({match[0] for path in tree if (match := re.match(_FOLDERS, path))})
    for one, other in itertools.pairwise(folders):
        if one.rstrip("0123456789") != other.rstrip("0123456789"):
            continue  # a checkpoint and published weights
        swapped = {}
        for path, data in tree.items():
            if path.startswith(f"{one}/"):
                path = other + path.removeprefix(one)
            elif path.startswith(f"{other}/"):
                path = one + path.removeprefix(other)
            swapped[path] = data
        yield _Case(f"swapped: {one} and {other}", swapped, (one, other), "folder")


def _kind(path: str) -> tuple[str, str]:
    """(kind, which file of its kind: only files that stand for the same may be swapped)."""
    for kind, pattern in _KINDS.items():
        if match := re.fullmatch(pattern, path):
            return kind, match.groupdict().get("name", "")
    raise AssertionError(f"{path} is of no kind")


def _go_on(case: _Case, state: _State, plan: Plan, parts: Parts, undisturbed: Undisturbed) -> tuple[str, Ending]:
    """Go on with the damaged run: (healed, told or broken; what is wrong)."""
    storage = new_memory()
    for path, data in case.tree.items():
        storage.put(path, data)
    witness = state.witness.copy()
    names = [path.rpartition("/")[2] for path in case.paths]
    ending = _end(storage, witness, plan, parts, undisturbed)
    if not ending.problems:
        return "healed", ending
    # Telling is right only where nobody can know what was there, and only if the file is named.
    may_be_told = case.kind in ("ledger entry", "seal") or (
        case.kind == "shard" and any(name in state.in_ledger for name in names)
    )
    if not may_be_told or not any(name in problem for problem in ending.problems for name in names):
        return "broken", ending
    for path in case.paths:
        storage.put(path, state.tree[path])
    ending = _end(storage, witness, plan, parts, undisturbed)
    if ending.problems:
        return "broken", Ending([f"put back, and yet: {p}" for p in ending.problems], ending.num_lost)
    return "told", Ending()


def _end(storage: Storage, witness: Witness, plan: Plan, parts: Parts, undisturbed: Undisturbed) -> Ending:
    failed = try_to_end(lambda: run_all(lambda: storage, plan, parts, witness, seed=_NEXT_SEED))
    return failed or check_ending(storage, plan, witness, undisturbed)
