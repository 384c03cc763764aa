"""Damage: every file of a run is truncated, emptied, flipped in one bit, swapped with another of its kind or removed,
and the run continues. Folders of checkpoints and of weights are swapped as well.

Two outcomes are correct. Healed: the run ends as if nothing had happened. Reported: a typed error or the audit names
the file. That is allowed only if the content cannot be known: ledger entries, shards with rows in the ledger, and the
seal. After the file is restored the run must end well, so nothing else was lost meanwhile.
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
"""Seed of the process after the damage; differs from the seed of every run."""
_FOLDERS = r"(global_step_|weights/)\d+"

Tree = dict[str, bytes]


class _Case(NamedTuple):
    """Damaged run folder. paths: damaged files or folders."""

    what: str
    tree: Tree
    paths: tuple[str, ...]
    kind: str


class _Killed(BaseException):
    """Raised where the process dies."""


def damage_files(
    plan: Plan, seed: int, *, num_flips: int = 3, kinds: str = ".*", parts: Parts | None = None, every: int = 1
) -> Figures:
    """Damage all files of `kinds` (a pattern) of a run killed half-way, and of a finished run.

    num_flips: bits flipped per file, one at a time. parts: replacement parts without a protection.
    """
    figures = Figures("damage", "files truncated, emptied, flipped in a bit, swapped, removed; folders swapped")
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    # Killed after the entry that follows the next checkpoint: one step to replay, one not trained, and unused shards.
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
    """Run until this ledger entry is written ("": to the end). Returns its storage and the trained batches."""
    storage, witness = new_memory(), Witness()

    def kill(verb: str, path: str, stage: str) -> None:
        if (verb, path, stage) == ("put_new", last_entry, "after"):
            raise _Killed

    try:
        run_all(lambda: FaultyStorage(storage, kill), plan, Parts(), witness, seed)
        assert not last_entry, f"{last_entry} was never written"
    except _Killed:
        pass
    # A shard removed by the test was not lost by the run, so the witness keeps only trained batches.
    return storage, Witness(None, [line for line in witness.lines if line.startswith("trained")])


def _cases(tree: Tree, rng: random.Random, num_flips: int) -> Iterator[_Case]:
    """Damage each file in every way, swap it with one other file, then swap folders."""
    # A ledger without its newest entry is a valid earlier ledger, so that entry is not removed.
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
        # One swap is enough: the checksum or version that rejects it would reject any other.
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
    """(kind, name within the kind); only files with the same pair are swapped."""
    for kind, pattern in _KINDS.items():
        if match := re.fullmatch(pattern, path):
            return kind, match.groupdict().get("name", "")
    raise AssertionError(f"{path} matches no pattern in _KINDS")


def _go_on(
    case: _Case, sound: Tree, in_ledger: set[str], plan: Plan, witness: Witness, parts: Parts | None
) -> tuple[str, Ending]:
    """Continue the damaged run. Returns ("healed", "reported" or "broken", its ending).

    Args: sound: files before the damage. in_ledger: shards with rows in the ledger.
    """
    storage = new_memory()
    for path, data in case.tree.items():
        storage.put(path, data)
    names = [path.rpartition("/")[2] for path in case.paths]
    ending = go_on(lambda: storage, plan, witness, _NEXT_SEED, parts)
    if not ending.problems:
        return "healed", ending
    # A report is correct only if the content cannot be known, and only if it names the file.
    is_trained_shard = case.kind == "shard" and not in_ledger.isdisjoint(names)
    may_be_reported = case.kind in ("ledger entry", "seal") or is_trained_shard
    if not may_be_reported or not any(name in problem for problem in ending.problems for name in names):
        return "broken", ending
    for path in case.paths:
        storage.put(path, sound[path])
    ending = go_on(lambda: storage, plan, witness, _NEXT_SEED, parts)
    if ending.problems:
        return "broken", Ending([f"after restoring the file: {p}" for p in ending.problems], ending.num_lost)
    return "reported", Ending()
