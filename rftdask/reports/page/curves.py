"""Curves: the metrics of runs as plain values for JSON, and the differences between runs.

Pure: stages and configs in, values out. Invariant: every number was written by a role, or is the mean of neighboring
rows if there are more than `MAX_POINTS`; gaps are not filled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from rftdask.config import Config
from rftdask.config.base import plain
from rftdask.monitor.metrics import MACHINE
from rftdask.reports.metric_table import DIRECTIONS, METRICS, Metric, explain
from rftdask.reports.run_reader import Accuracy, StageReader

MAX_POINTS = 1000
"""Points per curve, about twice the pixels of a chart."""

_EITHER = ("trainer", "explorer")
"""The trainer's value takes precedence, because it counts the rollouts that were trained."""
_MACHINE_KEYS = ("gpu_busy", "gpu_memory", "host_cpu", "host_free_gib", "cpu_cores", "process_gib")
SECTIONS: Mapping[str, Sequence[str]] = {
    "Does it learn?": ("eval.accuracy", "reward", "eval.eval_loss", "trainer.loss", "flat_groups", "reward_std"),
    "Is it stable?": (
        *("entropy", "rollout_entropy", "kl", "ppo_kl", "clip_frac"),
        *("mismatch_kl", "grad_norm", "critic_loss", "lr"),
    ),
    "What does it train on?": (
        *("response_length", "truncated", "failed", "num_rows"),
        *("staleness", "staleness_max", "dropped/total", "num_turns"),
    ),
    "Where is the bottleneck?": (
        *("trainer.step_s", "trainer.wait_s", "explorer.wait_s", "trainer.train_s", "explorer.generate_s"),
        *("trainer.tokens_per_s", "explorer.tokens_per_s", "explorer.occupancy"),
    ),
    "How busy are the machines?": tuple(f"{MACHINE}.{name}" for name in _MACHINE_KEYS),
}
"""Title -> "<role>.<metric>" of each chart, in the order of the page. Without a role: the first of `_EITHER` that has
the metric."""
REST = "Everything else"
_IDENTITY = {"project", "group", "name", "checkpoint_root_dir", "monitor", "cluster", "log", "private"}
"""Keys of location and monitoring, which do not affect training."""
_SEED = "seed"


def charts_of(stages: Sequence[StageReader]) -> list[dict[str, Any]]:
    """Return the charts of a page in order: {"key", "role", "metric", "section"} and the fields of `Metric`. The key is
    "<role>.<metric>".
    """
    measured: dict[tuple[str, str], None] = {}
    for stage in stages:
        for role, rows in stage.metrics.groupby("role") if len(stage.metrics) else ():
            columns = rows.select_dtypes("number").dropna(axis="columns", how="all").columns
            measured |= dict.fromkeys((str(role), str(c)) for c in columns if c not in ("step", "time_s"))
    charts: dict[tuple[str, str], str] = {}
    for section, names in SECTIONS.items():
        for name in names:
            role, _, metric = name.rpartition(".")
            roles = (role,) if role else _EITHER
            drawn = next(((role, metric) for role in roles if (role, metric) in measured), None)
            if drawn is not None:
                charts.setdefault(drawn, section)
    order = {name: number for number, name in enumerate(METRICS)}
    rest = sorted(measured.keys() - charts.keys(), key=lambda k: (k[0], order.get(k[1], len(order)), k[1]))
    return [_chart(*key, charts.get(key, REST)) for key in (*charts, *rest)]


def _chart(role: str, metric: str, section: str) -> dict[str, Any]:
    chart = {"key": f"{role}.{metric}", "role": role, "metric": metric, "section": section}
    explained = explain(metric)
    if explained is None:
        formula = "written by a workflow, a reward function or an operator"
        return {**chart, **asdict(Metric(metric, formula, "", "watch", "")), "direction": ""}
    return {**chart, **asdict(explained), "direction": DIRECTIONS[explained.direction]}


def curves_of(stages: Sequence[StageReader]) -> list[dict[str, Any]]:
    """Return the curves of each stage with metrics.

    {"stage", "mean_of", "x": {line: {"step", "time", "tokens"}}, "y": {"<role>.<metric>": {line: values}}, "error"}

    - A line is a role, "eval/<taskset>" or "machine/<process>".
    - time: seconds since the first metrics of the run. tokens: tokens trained until then, over all stages.
    - y: floats or None, one per x of the line; each is the mean of `mean_of` rows.
    - error: like y, but for accuracies only: standard errors computed from the numbers of answers.
    """
    begun = [stage for stage in stages if len(stage.metrics)]
    # A run without stages is named after its algorithm, which makes it comparable to a stage of another run.
    names = [stage.name if len(stages) > 1 else stage.config.algorithm.algorithm_type for stage in begun]
    start, tokens, curves = min((stage.span[0] for stage in begun), default=0.0), 0.0, []
    for name, stage in zip(names, begun, strict=True):
        trainer = stage.rows("trainer")
        steps = trainer if len(trainer) else stage.rows("explorer")
        spent = trainer["num_tokens"].fillna(0.0).cumsum() + tokens if "num_tokens" in trainer else None
        x: dict[str, Any] = {}
        y: dict[str, dict[str, Any]] = {}
        error: dict[str, dict[str, Any]] = {}
        mean_of = 1
        for role, rows in stage.metrics.groupby("role", sort=False):
            # The column of the tag is missing if no row of the stage has it.
            tag = "process" if role == MACHINE else "taskset"
            parts = rows.groupby(tag) if tag in rows else [("", rows)]
            for tag_value, part in parts:
                line = f"{role}/{tag_value}" if tag_value else str(role)
                part = part.sort_values("step")
                part = part.assign(time=part["time_s"] - start, tokens=math.nan)
                if role == MACHINE:
                    # A process has no steps: use the number of steps done at that time.
                    part["step"] = np.interp(part["time_s"], steps["time_s"], steps["step"]) if len(steps) else 0.0
                if spent is not None:
                    part["tokens"] = np.interp(part["time_s"], trainer["time_s"], spent, left=tokens)
                every = -(-len(part) // MAX_POINTS)
                mean_of = max(mean_of, every)
                part = part.select_dtypes("number").dropna(axis="columns", how="all")
                if every > 1:
                    part = part.groupby(np.arange(len(part)) // every).mean()
                x[line] = {axis: _values(part[axis].tolist()) for axis in ("step", "time", "tokens") if axis in part}
                if every == 1 and {"accuracy", "num_rollouts"} <= set(part.columns):
                    counts = part.get("accuracy/count", part["num_rollouts"]).fillna(part["num_rollouts"])
                    pairs = zip(part["accuracy"].tolist(), counts.tolist(), strict=True)
                    errors = [Accuracy(value, int(count)).error if count > 0 else math.nan for value, count in pairs]
                    error.setdefault(f"{role}.accuracy", {})[line] = _values(errors)
                for metric in part.columns.difference(["step", "time", "time_s", "tokens"]):
                    y.setdefault(f"{role}.{metric}", {})[line] = _values(part[metric].tolist())
        tokens = float(spent.max()) if spent is not None and len(spent) else tokens
        curves.append({"stage": name, "mean_of": mean_of, "x": x, "y": y, "error": error})
    return curves


def _values(column: list[float]) -> list[float | None]:
    # Six digits: more are invisible and would double the size.
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in column]


class Span(NamedTuple):
    """An activity of a role. Times are seconds since the start of the timeline."""

    activity: str
    start: float
    end: float
    step: int


def timeline_of(stage: StageReader, num_steps: int = 24) -> tuple[dict[str, list[Span]], float]:
    """Return the activities of each role during the last trainer steps by lane, and their duration in seconds.

    The trainer writes its row at the end of a step, which consists of waiting, training, publishing and checkpointing,
    in this order. An explorer's row sums the waiting, loading and generating of overlapping work units, so these sums
    are scaled down to the elapsed time.
    """
    trainer, explorer = stage.rows("trainer").tail(num_steps), stage.rows("explorer")
    if not len(trainer) or "step_s" not in trainer:
        return {}, 0.0
    start, end = float((trainer["time_s"] - trainer["step_s"]).min()), float(trainer["time_s"].max())
    lanes: dict[str, list[Span]] = {"trainer": [], "explorer": []}
    for role, rows, activities in (
        ("trainer", trainer, ("checkpoint", "publish", "train", "wait")),
        ("explorer", explorer[explorer["time_s"] > start], ("generate", "load", "wait")),
    ):
        for row in rows.to_dict("records"):
            # False for NaN as well, if the role did not measure it.
            parts = {name: seconds for name in activities if (seconds := row.get(f"{name}_s", 0.0)) > 0}
            total, until = sum(parts.values()), row["time_s"]
            for activity, seconds in parts.items():
                seconds *= min(1.0, row["step_s"] / total)
                if until - seconds < end and until > start:
                    begin = max(until - seconds, start) - start
                    lanes[role].append(Span(activity, begin, min(until, end) - start, int(row["step"])))
                until -= seconds
    lanes["evaluation"] = [
        Span("evaluate", at - start, at - start, int(step))
        for at, step in stage.rows("eval")[["time_s", "step"]].itertuples(index=False)
        if start <= at <= end
    ]
    return {name: spans for name, spans in lanes.items() if spans}, end - start


def trace_events(stages: Sequence[StageReader]) -> list[dict[str, Any]]:
    """Return the timelines of stages as Chrome trace events: one process per stage and one thread per role, with times
    in microseconds since the first step of the stage. A stage without steps has no events.
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
                events.append({**length, **place, "name": span.activity, "args": {"step": span.step}})
    return events


def differing_settings(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Return {key: value in each config} for the keys whose values differ, in the order of the configuration; None if a
    config lacks the key. Keys of location and monitoring are left out, and so are keys that repeat another one, such
    as a selector's seed that follows the run's.
    """
    trees = [_flat(plain(config)) for config in configs]
    keys = dict.fromkeys(key for tree in trees for key in tree if key.partition(".")[0] not in _IDENTITY)
    differing: dict[str, list[Any]] = {}
    seen = set[tuple[str, str]]()
    for key in keys:
        values = [tree.get(key) for tree in trees]
        name_and_values = key.rpartition(".")[2], repr(values)
        if any(value != values[0] for value in values) and name_and_values not in seen:
            seen.add(name_and_values)
            differing[key] = values
    return differing


def differing_contents(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the input fingerprints that differ: user code, rows, models and package versions.

    Args: runs: {kind: {name: hash or version}} of each run, see `Folder.fingerprints`. A name that only one run
    has is ignored.
    """
    differing: dict[str, list[Any]] = {}
    for kind in ("sources", "tasksets", "models", "versions"):
        parts = [run.get(kind, {}) for run in runs]
        for name in dict.fromkeys(name for part in parts for name in part):
            values = [part.get(name) for part in parts]
            if len({value for value in values if value is not None}) > 1:
                # Hashes are shortened; versions are shorter than 12 characters.
                differing[f"{kind}.{name}"] = [None if value is None else str(value)[:12] for value in values]
    return differing


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping) and tree:
        items = [(str(name), value) for name, value in tree.items()]
    elif isinstance(tree, list | tuple) and any(isinstance(value, Mapping) for value in tree):
        # Stages and tasksets are keyed by name, so that inserting one does not change the keys of the others.
        items = [(_name_of(value, n), value) for n, value in enumerate(tree)]
    else:
        return {key: list(tree) if isinstance(tree, tuple) else tree}
    parts = [_flat(value, f"{key}.{name}".lstrip(".")) for name, value in items]
    return {name: value for part in parts for name, value in part.items()}


def _name_of(value: Any, number: int) -> str:
    names = [value.get(key) for key in ("stage_name", "name")] if isinstance(value, Mapping) else []
    return next((str(name) for name in names if name), str(number))


def arms_of(names: Sequence[str], differing: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the arm of each run. Runs that differ only in their seed form one arm. Without such runs, or if two runs
    also share a seed, each run is its own arm, named after the run.
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
        # A long list of settings is not a useful name; the page shows it as a table.
        labels.setdefault(key, label if len(label) <= 60 else f"like {names[n]}")
    return [labels[key] for key in chosen]
