"""Curves: the metrics of runs as a page draws them, and what sets runs apart.

Pure: stages and configs in, plain values for JSON out. Invariant: every number is one that a role wrote, or, of more
than `MOST_POINTS` rows, the mean of neighbors; nothing is filled in where a role wrote nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rftdask.config import Config
from rftdask.config.base import plain
from rftdask.monitor.metrics import MACHINE
from rftdask.reports.metric_table import DIRECTIONS, METRICS, explain
from rftdask.reports.run_reader import Accuracy, Stage

MOST_POINTS = 1000
"""Of a curve; more than twice the pixels of a chart tell nobody more."""

_EITHER = ("trainer", "explorer")
"""Of a metric of both, the trainer's counts the rollouts that were trained, and is drawn in front."""
SECTIONS: Mapping[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "Does it learn?": (
        (("eval",), "accuracy"),
        (_EITHER, "reward"),
        (("eval",), "eval_loss"),
        (("trainer",), "loss"),
        (_EITHER, "flat_groups"),
        (_EITHER, "reward_std"),
    ),
    "Is it stable?": tuple(
        (_EITHER, name)
        for name in (
            "entropy",
            "rollout_entropy",
            "kl",
            "ppo_kl",
            "clip_frac",
            "mismatch_kl",
            "grad_norm",
            "critic_loss",
            "lr",
        )
    ),
    "What is it fed?": tuple(
        (_EITHER, name)
        for name in (
            "response_length",
            "truncated",
            "failed",
            "num_rows",
            "staleness",
            "staleness_max",
            "dropped/total",
            "num_turns",
        )
    ),
    "Who waits for whom?": (
        (("trainer",), "step_s"),
        (("trainer",), "wait_s"),
        (("explorer",), "wait_s"),
        (("trainer",), "train_s"),
        (("explorer",), "generate_s"),
        (("trainer",), "tokens_per_s"),
        (("explorer",), "tokens_per_s"),
        (("explorer",), "occupancy"),
    ),
    "What do machines have in use?": tuple(
        ((MACHINE,), name)
        for name in ("gpu_busy", "gpu_memory", "host_cpu", "host_free_gib", "cpu_cores", "process_gib")
    ),
}
"""Title -> (roles, the first of which that has it is drawn; metric), in the order of a page."""
REST = "Everything else"
_IDENTITY = {"project", "group", "name", "checkpoint_root_dir", "monitor", "cluster", "log", "private"}
"""Keys that say where a run is and who watches it, and change no step of it."""
_SEED = "seed"


def charts_of(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """What can be drawn, in the order of a page: {"key", "role", "metric", "section"} and the texts of its `Metric`.
    The key is "<role>.<metric>".
    """
    measured: dict[tuple[str, str], None] = {}
    for stage in stages:
        for role, rows in stage.metrics.groupby("role") if len(stage.metrics) else ():
            columns = rows.select_dtypes("number").dropna(axis="columns", how="all").columns
            measured |= dict.fromkeys((str(role), str(c)) for c in columns if c not in ("step", "time_s"))
    charts: dict[tuple[str, str], str] = {}
    for section, wanted in SECTIONS.items():
        for roles, metric in wanted:
            found = next(((role, metric) for role in roles if (role, metric) in measured), None)
            if found is not None:
                charts.setdefault(found, section)
    order = {name: number for number, name in enumerate(METRICS)}
    rest = sorted(measured.keys() - charts.keys(), key=lambda k: (k[0], order.get(k[1], len(order)), k[1]))
    return [_chart(*key, charts.get(key, REST)) for key in (*charts, *rest)]


def _chart(role: str, metric: str, section: str) -> dict[str, Any]:
    told = explain(metric)
    return {
        "key": f"{role}.{metric}",
        "role": role,
        "metric": metric,
        "section": section,
        "label": told.label if told else metric,
        "unit": told.unit if told else "",
        "direction": DIRECTIONS[told.direction] if told else "",
        "formula": told.formula if told else "written by a workflow, a reward function or an operator",
        "advice": told.advice if told else "",
        "source": told.source if told else "",
    }


def curves_of(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """The curves of a run, for each stage that has some.

    {"stage", "mean_of", "x": {line: {"step", "time", "tokens"}}, "y": {"<role>.<metric>": {line: values}}, "error"}: a
    line is a role, "eval/<taskset>" or "machine/<process>"; values are floats or None, as many as its x has; time in
    seconds since the run's first number, tokens that the trainer had trained by then, over all stages; each value is
    the mean of `mean_of` rows. The error is like y, of accuracies alone: their standard error, from the number of
    answers.
    """
    begun = [stage for stage in stages if len(stage.metrics)]
    # A run without stages is called by its algorithm, so that it can stand beside another one's stage.
    names = [stage.name if len(stages) > 1 else stage.config.algorithm.algorithm_type for stage in begun]
    start, tokens, found = min((stage.span[0] for stage in begun), default=0.0), 0.0, []
    for name, stage in zip(names, begun, strict=True):
        trainer = stage.rows("trainer")
        steps = trainer if len(trainer) else stage.rows("explorer")
        spent = trainer["num_tokens"].fillna(0.0).cumsum() + tokens if "num_tokens" in trainer else None
        x: dict[str, Any] = {}
        y: dict[str, dict[str, Any]] = {}
        error: dict[str, dict[str, Any]] = {}
        mean_of = 1
        for role, rows in stage.metrics.groupby("role", sort=False):
            # No row of a stage without evaluations has the tag; else it is "" where it is missing.
            tag = "process" if role == MACHINE else "taskset"
            parts = rows.groupby(tag) if tag in rows else [("", rows)]
            for of, part in parts:
                line = f"{role}/{of}" if of else str(role)
                part = part.sort_values("step")
                part = part.assign(time=part["time_s"] - start, tokens=math.nan)
                if role == MACHINE:
                    # A process has no steps: those that the run had made by then.
                    part["step"] = np.interp(part["time_s"], steps["time_s"], steps["step"]) if len(steps) else 0.0
                if spent is not None:
                    # What was trained when the row was written.
                    part["tokens"] = np.interp(part["time_s"], trainer["time_s"], spent, left=tokens)
                every = -(-len(part) // MOST_POINTS)
                mean_of = max(mean_of, every)
                part = part.select_dtypes("number").dropna(axis="columns", how="all")
                if every > 1:
                    part = part.groupby(np.arange(len(part)) // every).mean()
                x[line] = {axis: _values(part[axis].tolist()) for axis in ("step", "time", "tokens") if axis in part}
                if every == 1 and {"accuracy", "num_rollouts"} <= set(part.columns):
                    pairs = zip(part["accuracy"].tolist(), part["num_rollouts"].tolist(), strict=True)
                    errors = [Accuracy(value, int(count)).error if count > 0 else math.nan for value, count in pairs]
                    error.setdefault(f"{role}.accuracy", {})[line] = _values(errors)
                for metric in part.columns.difference(["step", "time", "time_s", "tokens"]):
                    y.setdefault(f"{role}.{metric}", {})[line] = _values(part[metric].tolist())
        tokens = float(spent.max()) if spent is not None and len(spent) else tokens
        found.append({"stage": name, "mean_of": mean_of, "x": x, "y": y, "error": error})
    return found


def _values(column: list[float]) -> list[float | None]:
    # Six digits: more would double what is sent, and no pixel shows them.
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in column]


class Span(NamedTuple):
    """What a role did for a while. Seconds since the beginning of its timeline."""

    what: str
    start: float
    end: float
    step: int


def timeline_of(stage: Stage, num_steps: int = 24) -> tuple[dict[str, list[Span]], float]:
    """What each role did in the last trainer steps, lane by lane, and how many seconds that were.

    A trainer's row is written at the end of its step, whose parts come in the order waiting, training, publishing,
    checkpoint. Of an explorer's units, which overlap, the row tells sums, which are cut to the time that passed:
    waiting for weights, loading them, generating.
    """
    lanes: dict[str, list[Span]] = {}
    rows = stage.rows("trainer").tail(num_steps)
    if not len(rows) or "step_s" not in rows:
        return {}, 0.0
    start, end = float((rows["time_s"] - rows["step_s"]).min()), float(rows["time_s"].max())
    lanes["trainer"] = []
    for row in rows.to_dict("records"):
        until = row["time_s"]
        for what in ("checkpoint", "publish", "train", "wait"):
            took = row.get(f"{what}_s", 0.0)
            if took == took and took > 0:  # NaN where the role did not measure it
                lanes["trainer"].append(Span(what, max(until - took, start) - start, until - start, int(row["step"])))
                until -= took
    explorer = stage.rows("explorer")
    if "generate_s" in explorer:
        lanes["explorer"] = []
        for row in explorer[explorer["time_s"] > start].to_dict("records"):
            parts = [(what, row.get(f"{what}_s", 0.0)) for what in ("generate", "load", "wait")]
            parts = [(what, took) for what, took in parts if took > 0]  # nor NaN, where it was not measured
            total = sum(took for _, took in parts)
            until = row["time_s"]
            for what, took in parts:
                took *= min(1.0, row["step_s"] / total)
                if until - took < end and until > start:
                    span = Span(what, max(until - took, start) - start, min(until, end) - start, int(row["step"]))
                    lanes["explorer"].append(span)
                until -= took
    lanes["evaluation"] = [
        Span("evaluate", at - start, at - start, int(step))
        for at, step in stage.rows("eval")[["time_s", "step"]].itertuples(index=False)
        if start <= at <= end
    ]
    return {name: spans for name, spans in lanes.items() if spans}, end - start


def trace_events(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """The timelines of whole stages as Chrome's trace events: a process for each stage, a thread for each role, times
    in microseconds since the stage's first step. A stage that has made no step gives none.
    """
    events: list[dict[str, Any]] = []
    for process, stage in enumerate(stages, start=1):
        lanes, _ = timeline_of(stage, num_steps=len(stage.rows("trainer")))
        if lanes:
            named = {"name": stage.name or "run"}
            events.append({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": named})
        for thread, (lane, spans) in enumerate(lanes.items(), start=1):
            place = {"pid": process, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": lane}})
            for span in spans:
                length = {"ph": "X", "ts": round(span.start * 1e6), "dur": round((span.end - span.start) * 1e6)}
                events.append({**length, **place, "name": span.what, "args": {"step": span.step}})
    return events


def differing_settings(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Key -> value of each config, of the keys whose values differ, in the order of the configuration; None where a
    config has no such key. Left out is what names a run and says where it is, and what repeats another key: the seed of
    a selector is the run's where nobody says otherwise.
    """
    trees = [_flat(plain(config)) for config in configs]
    keys = dict.fromkeys(key for tree in trees for key in tree if key.partition(".")[0] not in _IDENTITY)
    found: dict[str, list[Any]] = {}
    told = set[tuple[str, str]]()
    for key in keys:
        values = [tree.get(key) for tree in trees]
        what = key.rpartition(".")[2], repr(values)
        if any(value != values[0] for value in values) and what not in told:
            told.add(what)
            found[key] = values
    return found


def differing_contents(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What runs are made of beside their settings, where it differs: the user's code, rows, models, versions.

    runs: {kind: {name: hash or version}} of each, see `Folder.made_of`. Only what two of them have is compared.
    """
    found: dict[str, list[Any]] = {}
    for kind in ("sources", "tasksets", "models", "versions"):
        parts = [run.get(kind, {}) for run in runs]
        for name in dict.fromkeys(name for part in parts for name in part):
            values = [part.get(name) for part in parts]
            if len({value for value in values if value is not None}) > 1:
                # Beginnings of hashes; a version is shorter.
                found[f"{kind}.{name}"] = [None if value is None else str(value)[:12] for value in values]
    return found


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping) and tree:
        items = [(str(name), value) for name, value in tree.items()]
    elif isinstance(tree, list | tuple) and any(isinstance(value, Mapping) for value in tree):
        # Stages and tasksets by their names, so that one more in front makes no difference of all others.
        items = [(_name_of(value, n), value) for n, value in enumerate(tree)]
    else:
        return {key: list(tree) if isinstance(tree, tuple) else tree}
    parts = [_flat(value, f"{key}.{name}".lstrip(".")) for name, value in items]
    return {name: value for part in parts for name, value in part.items()}


def _name_of(value: Any, number: int) -> str:
    names = [value.get(key) for key in ("stage_name", "name")] if isinstance(value, Mapping) else []
    return next((str(name) for name in names if name), str(number))


def arms_of(names: Sequence[str], differing: Mapping[str, Sequence[Any]]) -> list[str]:
    """The arm of each run: those that differ in nothing but their seed are one arm. Where no two runs are, or two have
    the same seed, too, each run is an arm of its own, by its name.
    """
    seeds = differing.get(_SEED, [None] * len(names))
    settings = {key: values for key, values in differing.items() if key != _SEED}
    chosen = [tuple(repr(values[n]) for values in settings.values()) for n in range(len(names))]
    is_repeated = len(set(zip(chosen, map(repr, seeds), strict=True))) < len(names)
    if is_repeated or len(set(chosen)) == len(names):
        return list(names)
    labels: dict[tuple[str, ...], str] = {}
    for n, key in enumerate(chosen):
        label = ", ".join(f"{name.rpartition('.')[2]}={values[n]}" for name, values in settings.items()) or "all seeds"
        # A long list of settings names nothing; the page has it as a table.
        labels.setdefault(key, label if len(label) <= 60 else f"like {names[n]}")
    return [labels[key] for key in chosen]
