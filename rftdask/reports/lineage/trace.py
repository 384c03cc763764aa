"""Trace: the history of one experience, from the files of the run: the weights that sampled it, the step that trained
it or the reason why none did, and the results of that step.

The worker is unknown, because a shard contains the random name of its writer, but no host.
Invariant: missing files are reported as missing, never guessed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rftdask.buffer.batches.audit import REPEAT
from rftdask.buffer.batches.selection import staleness
from rftdask.buffer.log.schema import conversation, sampled_spans, token_versions
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DataError
from rftdask.reports.lineage.tables import DROPPED, TRAINED, WAITING, RunTables, row_states
from rftdask.reports.run_reader import StageReader
from rftdask.run.input_fingerprints import accepted_changes
from rftdask.storage.safe_text import cell, printable

_STEP_METRICS = ("loss", "reward", "grad_norm", "ppo_kl", "clip_frac", "staleness", "lr")
_NUM_NEAREST = 5
_MOST_TEXT = 2000


@dataclass(frozen=True)
class Evaluation:
    version: int
    taskset: str
    accuracy: float | None
    reward: float | None


@dataclass(frozen=True)
class Use:
    """One line of the ledger that names the experience, and the results of that step."""

    step: int
    lineage: str
    reason: str = ""
    """Why it was dropped; empty if the step trains it."""
    is_complete: bool = True
    """False if the experience still waits for the step."""
    place: int | None = None
    batch_rows: int = 0
    """Rows trained at the step; `place` counts them from 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Trainer metrics of the step; empty until it is complete, or if they were removed."""
    checkpoint: tuple[int, str, str] | None = None
    """(step, folder, content hash) of the first stored checkpoint that includes the step."""
    evaluations: tuple[tuple[Evaluation | None, Evaluation], ...] = ()
    """Last evaluation before the step and first one that includes it, for each taskset."""


@dataclass(frozen=True)
class Copy:
    """One committed row of the uid. A work unit that ran twice committed several."""

    shard: ShardName
    row: int
    state: str
    reason: str
    experience: Mapping[str, Any]
    weights: str
    """Comparison of the recorded weights hash with the stored weights."""
    uses: tuple[Use, ...] = ()
    lost_to: tuple[int, str] | None = None
    """(step, lineage) that settled the group with another copy, which cannot be read any more."""


@dataclass(frozen=True)
class Trace:
    """Example: print(trace("runs/project/name", "gsm8k/0/17/3/0").render())"""

    uid: str
    stage: str
    copies: tuple[Copy, ...]
    """Copies, starting with the trained one."""
    siblings: tuple[Mapping[str, Any], ...]
    """Rows of the group in the shard of the first copy, including the experience, each with its "fate"."""
    problems: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    """Changes of rewards, workflows, tasksets and models that a user accepted during the run."""

    def render(self) -> str:
        lines = [f"{self.uid}  (stage {self.stage})"]
        for copy in self.copies:
            lines.append("")
            for label, text in _copy_lines(copy):
                # Further lines of a text are aligned below the first.
                lines += [f"  {label * (n == 0):<12}{line}" for n, line in enumerate(text.split("\n")) if text]
        rewards = [s["reward"] for s in self.siblings if s["reward"] is not None]
        mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
        lines += ["", f"  group of {len(self.siblings)}{mean}"]
        width = max(len(s["uid"]) for s in self.siblings)
        for s in self.siblings:
            mark = "*" if s["uid"] == self.uid else " "
            reward = "-" if s["reward"] is None else f"{s['reward']:.4g}"
            fate = f"{s['status']:<9}  {s['fate']:<9}  {cell(s['response_text'])}"
            lines.append(f"  {mark} {s['uid']:<{width}}  {reward:>8}  {fate}")
        lines += [f"  accepted  {change}" for change in self.accepted]
        lines += [f"left out: {problem}" for problem in self.problems]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.render()


def trace(url: str | Path, uid: str) -> Trace:
    """Read the history of an experience.

    Args: uid: uid of the experience, or the name of a served session, which means its first experience.
    Raises: DataError: the run has no such experience; the message lists the nearest uids.
    """
    tables = RunTables(url)
    named = "uid" if "/" in uid else "session"
    seen: set[str] = set()
    for stage in tables.stages:
        unit: tuple[int, int] | None = None
        shards: list[pa.Table] = []
        for name, table in tables.read_shards(stage):
            if unit is None:
                seen.update(table.column("uid").to_pylist())
                if len(rows := _where(table, **{named: uid})):
                    uid, unit = rows["uid"][0].as_py(), (name.explore_step, name.unit)
            elif (name.explore_step, name.unit) != unit:
                break  # all copies of a group belong to one work unit
            if unit is not None:
                shards.append(table)
        if shards:
            return _trace(tables, stage, uid, pa.concat_tables(shards, promote_options="default"))
    nearest = nearest_uids(uid, seen)
    known = f"; the nearest of {len(seen):,}:\n  " + "\n  ".join(nearest) if nearest else "; it has no experiences"
    raise DataError(f"the run has no experience {uid!r} (taskset/epoch/task/rollout/row, or a served session){known}")


def nearest_uids(uid: str, known: set[str], count: int = _NUM_NEAREST) -> list[str]:
    """Return the `count` known uids nearest to `uid`. Missing parts of a uid count as 0."""
    wanted = _parse(uid)

    def distance(other: str) -> tuple[Any, ...]:
        taskset, numbers = _parse(other)
        apart = [abs(a - b) for a, b in zip(numbers, wanted[1], strict=True)]
        return (taskset != wanted[0], apart[1], apart[0], *apart[2:], other)

    return heapq.nsmallest(count, known, key=distance)


def _parse(uid: str) -> tuple[str, list[int]]:
    """Return (taskset, [epoch, task index, rollout, row]). A taskset's name may contain "/"."""
    parts = uid.split("/")
    numbers: list[int] = []
    while parts and len(numbers) < 4 and parts[-1].isdecimal():
        numbers.insert(0, int(parts.pop()))
    return "/".join(parts), (numbers + [0] * 4)[:4]


def _where(table: pa.Table, **values: object) -> pa.Table:
    for name, value in values.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def _trace(tables: RunTables, stage: StageReader, uid: str, unit: pa.Table) -> Trace:
    mine = _where(unit, uid=uid).slice(0, 1).to_pylist()[0]
    group = _where(unit, taskset=mine["taskset"], epoch=mine["epoch"], task_index=mine["task_index"])
    ledger = _where(tables.table("ledger"), stage=stage.name)
    # Only for this group: the table `states` would read every shard of the run.
    states = row_states(group, ledger, tables.positions, tables.completed_steps).to_pylist()
    rows = {(row["shard"], row["row"]): row for row in group.to_pylist()}
    copies = []
    for (shard, number), row in rows.items():
        if row["uid"] != uid:
            continue
        # One state per ledger line that names the row, otherwise one.
        states_of_row = [s for s in states if (s["shard"], s["row"]) == (shard, number)]
        uses = tuple(_use(tables, stage, ledger, state) for state in states_of_row if state["step"])
        lost_to = None
        # If no entry names a readable copy, another copy may have been taken.
        if not any(state["step"] for state in states):
            place = {"stage": stage.name, "explore_step": row["explore_step"], "slot": row["slot"]}
            settled = _where(tables.positions, **place).to_pylist()
            lost_to = min(((line["step"], line["lineage"]) for line in settled), default=None)
        name = ShardName.try_parse(shard)
        assert name is not None  # listings contain valid names only
        weights = _weights_verdict(tables, stage, row)
        first = states_of_row[0]
        copies.append(Copy(name, number, first["state"], first["reason"] or "", row, weights, uses, lost_to))
    copies.sort(key=lambda copy: (copy.state != TRAINED, copy.reason == REPEAT))
    fates = {(s["shard"], s["row"]): s["reason"] or s["state"] for s in states}
    siblings = tuple({**row, "fate": fates[p]} for p, row in rows.items() if row["shard"] == copies[0].shard.text)
    accepted = tuple(accepted_changes(stage.storage))
    return Trace(uid, stage.name, tuple(copies), siblings, tuple(tables.problems), accepted)


def _weights_verdict(tables: RunTables, stage: StageReader, row: Mapping[str, Any]) -> str:
    version, mine = row["max_policy_version"], row["weights_hash"]
    if not mine:
        return "no hash was recorded"
    # The initial model is outside the run, and its files are hashed differently.
    if version == 0:
        return f"hash {mine}: the model the stage began with, {stage.config.model.model_path}"
    known = _where(tables.table("weights"), stage=stage.name, version=version).to_pylist()
    for weights in known:
        if weights["content_hash"] == mine:
            return f"hash {mine}: matches {weights['folder']}, lineage {weights['lineage']}"
    if not known:
        return f"hash {mine}: not verified, because weights/{version} is no longer on storage"
    others = ", ".join(f"{w['content_hash']} of {w['folder']}" for w in known)
    return f"hash {mine} DIFFERS from the stored weights of this version: {others}"


def _use(tables: RunTables, stage: StageReader, ledger: pa.Table, state: Mapping[str, Any]) -> Use:
    step, lineage, name = state["step"], state["lineage"], stage.name
    if state["reason"]:
        return Use(step, lineage, state["reason"])
    batch = _where(ledger, lineage=lineage, step=step)
    place = _where(batch, shard=state["shard"], row=state["row"])["place"][0].as_py()
    measured = _where(tables.table("steps"), stage=name, step=step).to_pylist()
    checkpoints = _where(tables.table("checkpoints"), stage=name, lineage=lineage).to_pylist()
    # The first checkpoint at or after the step is the first that includes it.
    later = [(c["step"], c["folder"], c["content_hash"]) for c in checkpoints if c["step"] >= step]
    looks = sorted(_where(tables.table("evals"), stage=name).to_pylist(), key=lambda row: row["version"])
    evaluations = []
    for taskset in sorted({row["taskset"] for row in looks}):
        seen = [
            Evaluation(row["version"], taskset, row.get("accuracy"), row.get("reward"))
            for row in looks
            if row["taskset"] == taskset
        ]
        # Version N has the weights after step N, so version `step` is the first that includes the step.
        before = [None, *(look for look in seen if look.version < step)]
        evaluations += [(before[-1], look) for look in seen if look.version >= step][:1]
    return Use(
        step,
        lineage,
        is_complete=state["state"] == TRAINED,
        place=place,
        batch_rows=batch.num_rows - batch["reason"].drop_null().length(),
        metrics={n: float(v) for row in measured for n, v in row.items() if isinstance(v, float) and n != "time_s"},
        checkpoint=min(later, default=None),
        evaluations=tuple(evaluations),
    )


def _copy_lines(copy: Copy) -> list[tuple[str, str]]:
    row = copy.experience
    num_sampled = sum(end - start for start, end in sampled_spans(row))
    num_added = len(row["rollout_logprobs"]) - num_sampled
    top_k = row["top_k"] if row["top_k"] > 0 else "off"
    mean = f", mean logprob {sum(row['rollout_logprobs']) / num_sampled:.3f}" if num_sampled else ""
    added = f", {num_added} tokens added between turns" if num_added else ""
    reward = "none (a failure has no reward)" if row["reward"] is None else f"{row['reward']:.4g}"
    lines = [
        *((printable(label), _short(text)) for label, text in conversation(row)),
        ("expected", _short(row["truth"])),
        ("reward", reward),
        ("status", f"{row['status']}{', ' + _short(row['error']) if row['error'] else ''} (attempt {row['attempt']})"),
        ("session", printable(row["session"] or "")),
        ("sampled", f"explore step {row['explore_step']}, batch {copy.shard.unit}, by writer {copy.shard.writer}"),
        ("", f"temperature {row['temperature']:.4g}, top_p {row['top_p']:.4g}, top_k {top_k}, seed {row['seed']}"),
        ("", f"{row['prompt_length']} prompt tokens, {num_sampled} response tokens{mean}{added}"),
        ("weights", f"policy version {_versions_text(row)}"),
        ("", copy.weights),
        ("shard", f"{copy.shard.text}, row {copy.row}"),
    ]
    if copy.reason == REPEAT and copy.lost_to:
        step, lineage = copy.lost_to
        lines.append((DROPPED, f"its work unit ran twice; step {step} used the other copy (lineage {lineage})"))
        lines.append(("", "which cannot be read any more: it was damaged and quarantined, or removed"))
    elif copy.reason == REPEAT and not copy.uses:
        lines.append((DROPPED, "its work unit ran twice; the other copy counts"))
    elif not copy.uses:
        lines.append((WAITING, "no ledger entry names it yet"))
    for use in copy.uses:
        if use.reason:
            when = f"when the batch of step {use.step} was formed (lineage {use.lineage})"
            lines.append((DROPPED, f"{use.reason}, {when}"))
            continue
        place = "" if use.place is None else f", row {use.place + 1} of {use.batch_rows}"
        which = f"step {use.step}{place} (lineage {use.lineage})"
        if not use.is_complete:
            lines.append((WAITING, f"for {which}, which is not complete yet"))
            continue
        lines.append((TRAINED, f"{which}, staleness {staleness(use.step - 1, row['min_policy_version'])}"))
        shown = [f"{name} {cell(use.metrics[name])}" for name in _STEP_METRICS if name in use.metrics]
        lines.append(("", ", ".join(shown) or "the trainer has not reported this step"))
        since = "none yet"
        if use.checkpoint:
            step, folder, content_hash = use.checkpoint
            since = f"{folder}, {step - use.step} steps later, hash {content_hash}"
        lines.append(("checkpoint", since))
        for before, after in use.evaluations:
            kind = "reward" if after.accuracy is None else "accuracy"
            looks = [look for look in (before, after) if look is not None]
            change = " -> ".join(f"{cell(getattr(look, kind))} at version {look.version}" for look in looks)
            lines.append(("evaluation", f"{printable(after.taskset)}: {kind} {change}"))
        if not use.evaluations:
            lines.append(("evaluation", "none yet"))
    return lines


def _versions_text(row: Mapping[str, Any]) -> str:
    """Format the policy versions that sampled a row; if there are several, with the response tokens of each."""
    low, high = row["min_policy_version"], row["max_policy_version"]
    if low == high:
        return str(low)
    spans, end = list[str](), 0
    for version, tokens in groupby(token_versions(row)):
        start, end = end, end + len(list(tokens))
        if version is not None:
            spans.append(f"{version} (tokens {start} to {end - 1})")
    return f"{low} to {high}: {', '.join(spans) or 'the version of each token is not known'}"


def _short(text: str) -> str:
    return printable(text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}...", keep="\n")
