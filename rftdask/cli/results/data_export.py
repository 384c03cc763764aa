"""Export: writes the experience log of a run as a dataset for offline training: SFT rows, DPO pairs, or scored tasks.

Invariant: every row names the experience that it was made from (`run`, `uid`, `step`), and omitted experiences are
counted by reason. It reads a run by SQL (reports/lineage/) and writes one file.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow.parquet as pq
import typer

from rftdask.buffer.log.schema import Status
from rftdask.cli.common import Run, say
from rftdask.cli.results.data_refine import table_of
from rftdask.config import Config
from rftdask.data.tasksets import Taskset
from rftdask.data.tokenizer import Tokenizer, load_tokenizer
from rftdask.errors import DataError, UserError
from rftdask.reports.lineage.sql import query
from rftdask.reports.lineage.tables import RunTables
from rftdask.storage import open_storage

Kind = Literal["sft", "dpo", "tasks"]
USE: Mapping[str, str] = {
    "sft": "format: {prompt_type: raw, prompt_key: prompt, response_key: response}",
    "dpo": "format: {prompt_type: raw, prompt_key: prompt, chosen_key: chosen, rejected_key: rejected}",
    "tasks": "data_selector: {selector_type: offline_easy2hard, feature_keys: [mean_reward]}",
}
"""Configuration that reads such a file, in addition to its `path`."""
_ROWS = """
with last as (select stage, shard, row, any_value(state) as state, max(step) as step, max(reason) as reason
              from states group by all)
select e.*, last.state as state, last.step as step from experiences e left join last using (stage, shard, row)
where coalesce(last.reason, '') <> 'repeat' and ({where}) order by e.stage, e.explore_step, e.uid
"""
_Rows = list[dict[str, Any]]


def data_export(
    run: Run,
    path: Annotated[str, typer.Argument(metavar="FILE", help="Output file: .jsonl or .parquet")],
    kind: Annotated[
        str, typer.Option("--as", help="Kind of rows: sft, dpo (best and worst of a group) or tasks (with scores)")
    ] = "sft",
    where: Annotated[str, typer.Option(help="SQL condition over the experiences, such as reward >= 1")] = "",
) -> None:
    """Write the experiences of a run as a dataset.

    The dataset is for offline training. Each row names the experience it comes from.
    """
    if kind not in USE:
        raise UserError(f"--as {kind!r}: unknown kind; use one of {', '.join(USE)}")
    num_rows, dropped = export(run, path, kind, where)  # type: ignore[arg-type]
    say(f"{num_rows:,} rows in {path}")
    for reason, count in dropped.items():
        say(f"  left out: {count:,} {reason}")
    say(f"in a configuration: {{path: {path}, {USE[kind]}}}")


def export(run: str, path: str, kind: Kind, where: str = "") -> tuple[int, Counter[str]]:
    """Write the rows of `run` that match the SQL condition `where` to `path`, a .jsonl or .parquet file.

    where: over the columns of table experiences, and its `state` and `step` (docs/lineage.md); "": all rows.
    Returns: the number of rows written, and the number of omitted experiences (dpo, tasks: groups) by reason.
    Raises: UserError: the condition is invalid, or nothing remains; DataError: `run` is not a run.
    """
    if not path.endswith((".jsonl", ".parquet")):
        raise UserError(f"{path!r} must end in .jsonl or .parquet")
    tables = RunTables(run)
    configs = {stage.name: stage.config for stage in tables.stages}
    rows: _Rows = query(tables, _ROWS.format(where=where or "true")).to_pylist()
    dropped: Counter[str] = Counter()
    good = []
    for row in rows:
        is_greedy = row["rollout"] >= configs[row["stage"]].algorithm.repeat_times
        reason = _reason(row, kind) or ("the greedy rollout of a task" if is_greedy and kind != "sft" else "")
        dropped.update([reason] if reason else [])
        good += [] if reason else [row]
    make: Callable[..., Iterator[dict[str, Any]]] = {"sft": _answers, "dpo": _pairs, "tasks": _tasks}[kind]
    made = [{**row, "run": run} for row in make(good, configs, dropped)]
    if not made:
        omitted = "; ".join(f"{count} {reason}" for reason, count in dropped.items()) or "no experience matches"
        raise UserError(f"nothing to write: {omitted}")
    _write(path, made)
    return len(made), dropped


def _reason(row: Mapping[str, Any], kind: Kind) -> str:
    """Return why an experience cannot be part of such a dataset; "": it can."""
    if row["reward"] is None:
        return "without a reward (failed, timed out or filtered)"
    if row["status"] == Status.TRUNCATED and kind != "tasks":
        return "cut at the token limit: the answer has no end to learn"
    return ""


def _lineage(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"uid": row["uid"], "policy_version": row["max_policy_version"], "step": row["step"]}


def _answers(rows: _Rows, configs: Mapping[str, Config], dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer of the policy; its prompt is the whole conversation before it."""
    tokenizers = cache(lambda stage: load_tokenizer(configs[stage]))
    for row in rows:
        for prompt, response in _turns(row, tokenizers):
            yield {"prompt": prompt, "response": response, "reward": row["reward"], **_lineage(row)}


def _turns(row: Mapping[str, Any], tokenizers: Callable[[str], Tokenizer]) -> Iterator[tuple[str, str]]:
    if row["turns"] is None:
        yield row["prompt_text"], row["response_text"]
        return
    # From the tokens, because texts of a conversation lack the special tokens that end its answers.
    tokenizer = tokenizers(row["stage"])
    for turn in row["turns"]:
        start, end = (row["prompt_length"] + turn[key] for key in ("start", "end"))
        prompt = tokenizer.decode(row["tokens"][:start], skip_special_tokens=False)
        yield prompt, tokenizer.decode(row["tokens"][start:end], skip_special_tokens=True)


def _groups(rows: _Rows) -> Iterator[_Rows]:
    groups: dict[tuple[Any, ...], _Rows] = {}
    for row in rows:
        key = (row["stage"], row["taskset"], row["epoch"], row["task_index"], row["explore_step"])
        groups.setdefault(key, []).append(row)
    yield from groups.values()


def _pairs(rows: _Rows, configs: Mapping[str, Config], dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst answer of each group, the first among equal ones."""
    for group in _groups(rows):
        best, worst = (choose(group, key=lambda row: row["reward"]) for choose in (max, min))
        if best["reward"] <= worst["reward"]:
            dropped["groups whose rewards are all the same"] += 1
        elif any(row["turns"] is not None or row["turn"] for row in group):
            dropped["groups of several turns, which answer different prompts"] += 1
        elif best["prompt_text"] != worst["prompt_text"]:
            dropped["groups whose best and worst answer different prompts"] += 1
        else:
            rewards = {"chosen_reward": best["reward"], "rejected_reward": worst["reward"]}
            texts = {"chosen": best["response_text"], "rejected": worst["response_text"]}
            yield {"prompt": best["prompt_text"], **texts, **rewards, **_lineage(best), "rejected_uid": worst["uid"]}


def _tasks(rows: _Rows, configs: Mapping[str, Config], dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the dataset row of each task, with statistics of the rewards of its rollouts in all epochs."""
    tasks: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        # All rows of a rollout have the same reward.
        rollouts = tasks.setdefault((row["stage"], row["taskset"], row["task_index"]), {})
        rollouts[f"{row['explore_step']}/{row['uid'].rpartition('/')[0]}"] = row
    tasksets = {
        (stage, taskset.name): taskset
        for stage, config in configs.items()
        for taskset in config.buffer.explorer_input.train_tasksets
    }
    opened = cache(lambda key: Taskset(tasksets[key]))
    for (stage, name, index), rollouts in tasks.items():
        last = list(rollouts.values())[-1]
        rewards = [row["reward"] for row in rollouts.values()]
        mean = sum(rewards) / len(rewards)
        spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        task = dict(opened((stage, name)).dataset[index])
        scores = {"mean_reward": mean, "std_reward": spread, "num_rollouts": len(rewards)}
        scores |= {"task": f"{name}/{index}", "step": last["step"], "run": ""}
        if taken := sorted(task.keys() & scores.keys()):
            raise DataError(f"taskset {name} has columns {', '.join(taken)} already; rename them to export scores")
        yield {**task, **scores}


def _write(path: str, rows: _Rows) -> None:
    if path.endswith(".jsonl"):
        data = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()
    else:
        sink = io.BytesIO()
        pq.write_table(table_of(rows), sink)
        data = sink.getvalue()
    folder, _, name = path.rpartition("/")
    open_storage(folder or Path.cwd()).put(name, data)
