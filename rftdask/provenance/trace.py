"""Trace: the whole life of one experience: who sampled it and with which weights, in which step it was trained or why
not, and what came of that step. From the files of the run alone.

It does not know which worker it was: a shard carries the random name of its writer, and no host.
Invariant: what is not on storage any more is said to be gone, never guessed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rftdask.buffer.batches.audit import REPEAT
from rftdask.buffer.batches.selection import staleness
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DataError
from rftdask.provenance.states import DROPPED, TRAINED, row_states
from rftdask.provenance.tables import RunTables
from rftdask.provenance.text import cell, printable
from rftdask.run.view import Stage

_STEP_METRICS = ("loss", "reward", "grad_norm", "ppo_kl", "clip_frac", "staleness", "lr")
_NUM_NEAREST = 5
_MOST_TEXT = 2000


@dataclass(frozen=True)
class Evaluation:
    """One look at the policy."""

    version: int
    taskset: str
    accuracy: float | None
    reward: float | None


@dataclass(frozen=True)
class Use:
    """One line of the ledger that names the experience, and what came of that step."""

    step: int
    lineage: str
    reason: str = ""
    """Why it was dropped; empty if it was trained."""
    place: int | None = None
    batch_rows: int = 0
    """Rows trained at the step; `place` counts them from 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the trainer measured at the step; empty until it was trained, or if its numbers are gone."""
    checkpoint: tuple[int, str, str] | None = None
    """(step, folder, content hash) of the first checkpoint that has learned from it, of those on storage."""
    evaluations: tuple[tuple[Evaluation | None, Evaluation], ...] = ()
    """By taskset: the last one before the step, and the first one of weights that have learned from it."""


@dataclass(frozen=True)
class Copy:
    """One committed row of the uid; there are several when its work unit ran twice."""

    shard: ShardName
    row: int
    state: str
    reason: str
    experience: Mapping[str, Any]
    """The row, as its shard has it."""
    weights: str
    """What is known of the weights that sampled it."""
    uses: tuple[Use, ...] = ()
    lost_to: tuple[int, str] | None = None
    """(step, lineage) that settled its group by a copy that cannot be read any more."""


@dataclass(frozen=True)
class Sibling:
    """Another row of the same group, in the shard of the first copy."""

    uid: str
    status: str
    reward: float | None
    state: str
    response_text: str


@dataclass(frozen=True)
class Trace:
    """Example: print(trace("runs/project/name", "gsm8k/0/17/3/0").render())"""

    uid: str
    stage: str
    copies: tuple[Copy, ...]
    """The one that was trained, or else the first, in front."""
    siblings: tuple[Sibling, ...]
    """All of the group, itself included."""
    problems: tuple[str, ...] = ()
    """Files that could not be read."""

    def render(self) -> str:
        """The trace for a terminal."""
        lines = [f"{self.uid}  (stage {self.stage})"]
        for copy in self.copies:
            lines += ["", *_copy_lines(copy)]
        lines += ["", *_sibling_lines(self)]
        lines += [f"left out: {problem}" for problem in self.problems]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.render()


def trace(url: str | Path, uid: str) -> Trace:
    """The life of the experience `uid` of the run at `url`.

    Raises: DataError: the run has no such experience; the message names the nearest uids.
    """
    tables = RunTables(url)
    seen: set[str] = set()
    for stage in tables.stages:
        rows = _find(tables, stage, uid, seen)
        if rows is not None:
            return _trace(tables, stage, uid, rows)
    nearest = nearest_uids(uid, seen)
    known = f"; the nearest of {len(seen):,}:\n  " + "\n  ".join(nearest) if nearest else ": it has none at all"
    raise DataError(f"the run has no experience {uid!r} (taskset/epoch/task/rollout/turn){known}")


def nearest_uids(uid: str, known: set[str], count: int = _NUM_NEAREST) -> list[str]:
    """The `count` of `known` that a person who typed `uid` may have meant; a part of a uid means the first below it."""
    wanted = _parse(uid)

    def distance(other: str) -> tuple[Any, ...]:
        taskset, numbers = _parse(other)
        apart = [abs(a - b) for a, b in zip(numbers, wanted[1], strict=True)]
        return (taskset != wanted[0], apart[1], apart[0], *apart[2:], other)

    return heapq.nsmallest(count, known, key=distance)


def _parse(uid: str) -> tuple[str, list[int]]:
    """(taskset, [epoch, task index, rollout, turn]); numbers that are missing are 0. A taskset's name may hold "/"."""
    parts = uid.split("/")
    numbers: list[int] = []
    while parts and len(numbers) < 4 and parts[-1].isdecimal():
        numbers.insert(0, int(parts.pop()))
    return "/".join(parts), (numbers + [0] * 4)[:4]


def _find(tables: RunTables, stage: Stage, uid: str, seen: set[str]) -> pa.Table | None:
    """The rows of the group of `uid`, of all copies. A group is in one work unit, so the search ends with that."""
    found: list[pa.Table] = []
    batch: tuple[int, int] | None = None
    for name, table in tables.read_shards(stage):
        if batch is not None and (name.explore_step, name.unit) != batch:
            break
        if batch is None:
            seen.update(table.column("uid").to_pylist())
            batch = (name.explore_step, name.unit) if uid in seen else None
        if batch is not None:
            found.append(table)
    if batch is None:
        return None
    rows = pa.concat_tables(found, promote_options="default")
    group = rows.filter(pc.equal(rows["uid"], uid)).slice(0, 1).to_pylist()[0]
    keys = ("taskset", "epoch", "task_index")
    same = [pc.equal(rows[key], group[key]) for key in keys]
    return rows.filter(pc.and_(pc.and_(same[0], same[1]), same[2]))


def _trace(tables: RunTables, stage: Stage, uid: str, group: pa.Table) -> Trace:
    ledger = tables.table("ledger")
    positions = tables.positions()
    states = row_states(group, ledger, positions).to_pylist()
    lines = ledger.filter(pc.and_(pc.equal(ledger["stage"], stage.name), pc.is_in(ledger["shard"], _shards(group))))
    placed = {(line["shard"], line["row"], line["lineage"], line["step"]): line["place"] for line in lines.to_pylist()}
    rows = {(row["shard"], row["row"]): row for row in group.to_pylist()}
    copies = []
    for place, row in rows.items():
        if row["uid"] == uid:
            mine = [s for s in states if (s["shard"], s["row"]) == place]
            uses = [_use(tables, stage, s, placed[(*place, s["lineage"], s["step"])]) for s in mine if s["step"]]
            copies.append(_copy(tables, stage, row, mine[0], tuple(uses)))
    if not any(state["step"] for state in states):
        copies = [replace(copy, lost_to=_settled_by(positions, stage, copy)) for copy in copies]
    copies.sort(key=lambda copy: (copy.state != TRAINED, copy.reason == REPEAT))
    first = copies[0].shard.text
    state_of = {(s["shard"], s["row"]): s["reason"] or s["state"] for s in states}
    siblings = tuple(
        Sibling(row["uid"], row["status"], row["reward"], state_of[place], row["response_text"])
        for place, row in rows.items()
        if row["shard"] == first
    )
    return Trace(uid, stage.name, tuple(copies), siblings, tuple(tables.problems))


def _settled_by(positions: pa.Table, stage: Stage, copy: Copy) -> tuple[int, str] | None:
    """The first (step, lineage) that settled the group of the copy."""
    place = {"stage": stage.name, "explore_step": copy.experience["explore_step"], "slot": copy.experience["slot"]}
    for name, value in place.items():
        positions = positions.filter(pc.equal(positions[name], value))
    return min(((row["step"], row["lineage"]) for row in positions.to_pylist()), default=None)


def _shards(group: pa.Table) -> pa.Array:
    return group.column("shard").combine_chunks().unique()


def _copy(tables: RunTables, stage: Stage, row: Mapping[str, Any], state: Mapping[str, Any], uses: Any) -> Copy:
    name = ShardName.try_parse(row["shard"])
    assert name is not None  # it came out of a listing of such names
    weights = _weights_verdict(tables, stage, row)
    return Copy(name, row["row"], state["state"], state["reason"] or "", row, weights, uses)


def _weights_verdict(tables: RunTables, stage: Stage, row: Mapping[str, Any]) -> str:
    """Compare the hash in the row with the weights that the run has of that version."""
    version, mine = row["max_policy_version"], row["weights_hash"]
    if not mine:
        return "no hash was recorded"
    if version == 0:
        return f"hash {mine}: the model the stage began with, {stage.config.model.model_path}"
    known = [w for w in tables.table("weights").to_pylist() if (w["stage"], w["version"]) == (stage.name, version)]
    for weights in known:
        if weights["content_hash"] == mine:
            return f"hash {mine}: that of {weights['folder']}, lineage {weights['lineage']}"
    if not known:
        return f"hash {mine}: weights/{version} is not on storage any more to compare it with"
    others = ", ".join(f"{w['content_hash']} of {w['folder']}" for w in known)
    return f"hash {mine} DIFFERS from what the run has of this version: {others}"


def _use(tables: RunTables, stage: Stage, state: Mapping[str, Any], place: int | None) -> Use:
    step, lineage, reason = state["step"], state["lineage"], state["reason"] or ""
    if reason:
        return Use(step, lineage, reason)
    rows = tables.table("ledger")
    batch = [("stage", stage.name), ("lineage", lineage), ("step", step)]
    for name, value in batch:
        rows = rows.filter(pc.equal(rows[name], value))
    num_trained = rows.num_rows - rows["reason"].drop_null().length()
    measured = [s for s in tables.table("steps").to_pylist() if (s["stage"], s["step"]) == (stage.name, step)]
    metrics = {n: float(v) for m in measured for n, v in m.items() if isinstance(v, float) and n != "time_s"}
    later = [
        (c["step"], c["folder"], c["content_hash"])
        for c in tables.table("checkpoints").to_pylist()
        if c["stage"] == stage.name and c["lineage"] == lineage and c["step"] >= step
    ]
    evaluations = _evaluations(tables, stage, step)
    return Use(step, lineage, "", place, num_trained, metrics, min(later, default=None), evaluations)


def _evaluations(tables: RunTables, stage: Stage, step: int) -> tuple[tuple[Evaluation | None, Evaluation], ...]:
    """The evaluations before and after a step, by taskset. Version N is the weights after step N, so version `step` is
    the first that has learned from it.
    """
    rows = [row for row in tables.table("evals").to_pylist() if row["stage"] == stage.name]
    found = []
    for taskset in sorted({row["taskset"] for row in rows}):
        looks = sorted((row for row in rows if row["taskset"] == taskset), key=lambda row: row["version"])
        before = [_evaluation(row) for row in looks if row["version"] < step]
        after = [_evaluation(row) for row in looks if row["version"] >= step]
        if after:
            found.append((before[-1] if before else None, after[0]))
    return tuple(found)


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    return Evaluation(row["version"], row["taskset"], row.get("accuracy"), row.get("reward"))


# ---- what a person reads


def _copy_lines(copy: Copy) -> list[str]:
    row = copy.experience
    num_response = len(row["tokens"]) - row["prompt_length"]
    versions = {row["min_policy_version"], row["max_policy_version"]}
    top_k = row["top_k"] if row["top_k"] > 0 else "off"
    logprobs = row["rollout_logprobs"]
    mean = f", mean logprob {sum(logprobs) / len(logprobs):.3f}" if logprobs else ""
    reward = "none: a failure is not a reward of zero" if row["reward"] is None else f"{row['reward']:.4g}"
    pairs = [
        ("prompt", _short(row["prompt_text"])),
        ("response", _short(row["response_text"])),
        ("expected", _short(row["truth"])),
        ("reward", reward),
        ("status", f"{row['status']}{', ' + _short(row['error']) if row['error'] else ''} (attempt {row['attempt']})"),
        ("sampled", f"explore step {row['explore_step']}, batch {copy.shard.unit}, by writer {copy.shard.writer}"),
        ("", f"temperature {row['temperature']:.4g}, top_p {row['top_p']:.4g}, top_k {top_k}, seed {row['seed']}"),
        ("", f"{row['prompt_length']} prompt tokens, {num_response} response tokens{mean}"),
        ("weights", f"policy version {' to '.join(str(v) for v in sorted(versions))}"),
        ("", copy.weights),
        ("shard", f"{copy.shard.text}, row {copy.row}"),
        *_fate_lines(copy),
    ]
    return [line for label, text in pairs if text for line in _hang(label, text)]


def _fate_lines(copy: Copy) -> list[tuple[str, str]]:
    if copy.reason == REPEAT and copy.lost_to:
        step, lineage = copy.lost_to
        return [
            (
                "dropped",
                f"its work unit ran twice; the other copy counts, which step {step} used (lineage {lineage})",
            ),
            ("", "and which cannot be read any more: it was damaged and set aside, or removed"),
        ]
    if copy.reason == REPEAT and not copy.uses:
        return [("dropped", "its work unit ran twice; the other copy is the one that counts")]
    if not copy.uses:
        return [("waiting", "no ledger entry names it yet")]
    lines: list[tuple[str, str]] = []
    for use in copy.uses:
        if use.reason:
            lines.append(
                (DROPPED, f"{use.reason}, when the batch of step {use.step} was formed (lineage {use.lineage})")
            )
        else:
            lines += _use_lines(use, copy.experience["min_policy_version"])
    return lines


def _use_lines(use: Use, oldest_version: int) -> list[tuple[str, str]]:
    place = "" if use.place is None else f", row {use.place + 1} of {use.batch_rows}"
    stale = staleness(use.step - 1, oldest_version)
    lines = [(TRAINED, f"step {use.step}{place} (lineage {use.lineage}), staleness {stale}")]
    shown = [f"{name} {cell(use.metrics[name])}" for name in _STEP_METRICS if name in use.metrics]
    lines.append(("", ", ".join(shown) or "the trainer has not reported this step"))
    if use.checkpoint:
        step, folder, content_hash = use.checkpoint
        lines.append(("checkpoint", f"{folder}, {step - use.step} steps later, hash {content_hash}"))
    else:
        lines.append(("checkpoint", "none since"))
    for before, after in use.evaluations:
        lines.append(("evaluation", f"{printable(after.taskset)}: {_change(before, after)}"))
    if not use.evaluations:
        lines.append(("evaluation", "none since"))
    return lines


def _change(before: Evaluation | None, after: Evaluation) -> str:
    name = "reward" if after.accuracy is None else "accuracy"
    looks = [look for look in (before, after) if look is not None]
    return f"{name} " + " -> ".join(f"{cell(getattr(look, name))} at version {look.version}" for look in looks)


def _sibling_lines(trace: Trace) -> list[str]:
    rewards = [s.reward for s in trace.siblings if s.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    width = max(len(s.uid) for s in trace.siblings)
    lines = [f"  group of {len(trace.siblings)}{mean}"]
    for s in trace.siblings:
        mark = "*" if s.uid == trace.uid else " "
        reward = "-" if s.reward is None else f"{s.reward:.4g}"
        lines.append(f"  {mark} {s.uid:<{width}}  {reward:>8}  {s.status:<9}  {s.state:<9}  {cell(s.response_text)}")
    return lines


def _short(text: str) -> str:
    return printable(text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}...", keep="\n")


def _hang(label: str, text: str) -> list[str]:
    """`text` behind its label; its further lines below its first."""
    return [f"  {label * (number == 0):<12}{line}" for number, line in enumerate(text.split("\n"))]
