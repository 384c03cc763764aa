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
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rftdask.buffer.batches.ledger import Ledger
from rftdask.storage import Storage
from rftdask.testing.crashtest.ending import Ending, go_on, new_memory, read_tree
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


class _Case(NamedTuple):
    """A damaged run folder; `paths` are the files or folders that were damaged."""

    what: str
    tree: Tree
    paths: tuple[str, ...]
    kind: str


class _Killed(BaseException):
    """The process is gone here."""


def damage_files(
    plan: Plan, seed: int, *, num_flips: int = 3, kinds: str = ".*", parts: Parts | None = None, every: int = 1
) -> Figures:
    """Damage all files of `kinds` (a pattern) of a run that was killed in its middle, and of one that has ended.

    num_flips: bits flipped in each file, one at a time. parts: a protection can be taken away there.
    """
    figures = Figures("damage", "files truncated, emptied, flipped in a bit, swapped, removed; folders swapped")
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    # Killed when the entry after the next checkpoint's was written: one step to replay, one not yet trained, and shards
    # that were not used at all.
    last = f"ledger/main/{plan.num_steps // plan.save_interval // 2 * plan.save_interval + 2:08d}.json"
    for state, last_entry in (("killed", last), ("ended", "")):
        storage, witness = _run_until(last_entry, plan, seed)
        tree, ledger = read_tree(storage), Ledger(storage)
        entries = [ledger.read(step) for step in range(1, ledger.last_step() + 1)]
        in_ledger = {rows.source for entry in entries if entry for rows in (*entry.use, *entry.drop)}
        figures.num_operations += len(tree)
        cases = [case for case in _cases(tree, rng, num_flips) if re.fullmatch(kinds, case.kind)]
        for case in cases[::every]:
            outcome, ending = _go_on(case, tree, in_ledger, plan, witness.copy(), parts)
            outcomes[f"{case.kind} {outcome}"] += 1
            figures.add(f"{state}, {case.what}", ending)
    figures.notes = [", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))]
    return figures


def _run_until(last_entry: str, plan: Plan, seed: int) -> tuple[Storage, Witness]:
    """Run until this entry of the ledger was written, "" for to the end: its storage, and what it has trained."""
    storage, witness = new_memory(), Witness()

    def kill(verb: str, path: str, stage: str) -> None:
        if (verb, path, stage) == ("put_new", last_entry, "after"):
            raise _Killed

    try:
        run_all(lambda: FaultyStorage(storage, kill), plan, Parts(), witness, seed)
        assert not last_entry, f"{last_entry} was never written"
    except _Killed:
        pass
    # A shard removed by us was not lost by the run: only what was trained is asked of the witness.
    return storage, Witness(None, [line for line in witness.lines if line.startswith("trained")])


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
        swap, swapped = {one: other, other: one}, {}
        for path, data in tree.items():
            folder = match[0] if (match := re.match(_FOLDERS, path)) else ""
            swapped[swap.get(folder, folder) + path.removeprefix(folder)] = data
        yield _Case(f"swapped: {one} and {other}", swapped, (one, other), "folder")


def _kind(path: str) -> tuple[str, str]:
    """(kind, which file of its kind: only files that stand for the same may be swapped)."""
    for kind, pattern in _KINDS.items():
        if match := re.fullmatch(pattern, path):
            return kind, match.groupdict().get("name", "")
    raise AssertionError(f"{path} is of no kind")


def _go_on(
    case: _Case, sound: Tree, in_ledger: set[str], plan: Plan, witness: Witness, parts: Parts | None
) -> tuple[str, Ending]:
    """Go on with the damaged run: (healed, told or broken; what is wrong).

    Args: sound: the files before the damage; in_ledger: names of shards that the ledger names.
    """
    storage = new_memory()
    for path, data in case.tree.items():
        storage.put(path, data)
    names = [path.rpartition("/")[2] for path in case.paths]
    ending = go_on(lambda: storage, plan, witness, _NEXT_SEED, parts)
    if not ending.problems:
        return "healed", ending
    # Telling is right only where nobody can know what was there, and only if the file is named.
    may_be_told = case.kind in ("ledger entry", "seal") or (case.kind == "shard" and not in_ledger.isdisjoint(names))
    if not may_be_told or not any(name in problem for problem in ending.problems for name in names):
        return "broken", ending
    for path in case.paths:
        storage.put(path, sound[path])
    ending = go_on(lambda: storage, plan, witness, _NEXT_SEED, parts)
    if ending.problems:
        return "broken", Ending([f"put back, and yet: {p}" for p in ending.problems], ending.num_lost)
    return "told", Ending()
