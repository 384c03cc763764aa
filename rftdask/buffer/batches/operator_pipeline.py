"""Experience pipeline: the operators of the config, run over rows of the experience log.

The config chooses where they run: when a training batch is formed (trainer/rank.py), or in the explorer before
a work unit is committed (`filter_experiences`). Operators see single rows or whole groups, so both drop the same rows.
Invariant: nothing is lost silently. A dropped row is committed, or named in the ledger, with its reason, and a failing
operator raises an error that names the operator and the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from rftdask.algorithm.compose import make_part
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.operators import DataJuicer, ExperienceTable, Operator
from rftdask.buffer.batches.batch import GROUP_KEY, batch_from_table
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import Config, fill_from_environment
from rftdask.config.base import plain
from rftdask.errors import OperatorError, UserError

TEXTS = ("prompt_text", "response_text", "truth")
"""Columns that operators see before the commit, when rows are complete."""
UNSHAPED_REWARD = "unshaped_reward"
"""Metric of an experience whose reward an operator changed before the commit: its original reward."""


def operators_of(config: Config) -> list[Operator]:
    """Make the experience operators of the config, in order. Raises: UserError: an unknown name or argument."""
    operators = []
    for number, entry in enumerate(config.data_processor.experience_pipeline.operators):
        where = f"data_processor.experience_pipeline.operators[{number}]"
        unknown = sorted(set(entry) - {"name", "args"})
        if unknown or "name" not in entry:
            raise UserError(f"{where}: takes name and args, " + (f"not {', '.join(unknown)}" if unknown else "no name"))
        try:
            # Plain dicts and lists: the code of an operator may not expect a frozen dict.
            arguments = plain(fill_from_environment(entry.get("args") or {}))
            if entry["name"] == DataJuicer.operator_name:
                arguments.setdefault("server_url", config.service.data_juicer.server_url)
            operators.append(make_part("operator", entry["name"], arguments, config.explorer.plugin_dirs))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return operators


def run_pipeline(operators: Sequence[Operator], table: pa.Table) -> tuple[ExperienceTable, list[str]]:
    """Run all operators over `table` (schema of experiences, with rewards).

    Returns: the rows after all operators, and for each row the name of the operator that dropped it, or "".
    Raises: OperatorError: an operator failed.
    """
    current = experience_table(table)
    dropped_by = [""] * len(table)
    for operator in operators:
        was = current.keep_N
        try:
            current, _ = operator(current)
        except Exception as error:
            # Name the first task on which the operator fails separately, or else all of them.
            keys = list(zip(*(table.column(name).to_pylist() for name in GROUP_KEY), strict=True))
            what, cause = f"the {len(set(keys))} tasks together, none alone", error
            if len(set(keys)) == 1:
                what = f"task {'/'.join(map(str, keys[0]))}"
            for key in dict.fromkeys(keys) if len(set(keys)) > 1 else ():
                try:
                    operator(experience_table(table.filter(pa.array([other == key for other in keys]))))
                except Exception as error_of_task:
                    what, cause = f"task {'/'.join(map(str, key))}", error_of_task
                    break
            raise OperatorError(
                f"operator {operator_name(operator)} failed on {what}: {type(cause).__name__}: {cause}"
            ) from error
        for row in (was & ~current.keep_N).nonzero().flatten().tolist():
            dropped_by[row] = operator_name(operator)
    return current, dropped_by


def filter_experiences(
    operators: Sequence[Operator], experiences: Sequence[Experience], baseline_rollout: int | None
) -> list[Experience]:
    """Run the operators over the experiences of whole groups, before they are committed.

    Args: baseline_rollout: number of the greedy rollouts, which are skipped; None: there are none.
    Returns: the experiences in their order. Dropped ones have status filtered and the reason; the others have the
    rewards, masks and metrics from the operators.
    Raises: OperatorError: an operator failed.
    """
    result = list(experiences)
    # Failed rollouts have no reward, and the greedy one is the baseline of the others.
    places = [i for i, e in enumerate(experiences) if e.status.trainable and e.rollout != baseline_rollout]
    if not operators or not places:
        return result
    after, dropped_by = run_pipeline(operators, experiences_to_table([experiences[i] for i in places]))
    rewards = after.rewards_N.numpy().astype(np.float32)
    masked = [False] * len(places) if after.masked_N is None else after.masked_N.tolist()
    # Compared as float32, the type of the input: otherwise rounding would look like a new value.
    stats = {name: values_N.tolist() for name, values_N in after.stats.items()}
    for row, (place, reward, code, name, is_masked) in enumerate(
        zip(places, rewards, after.reasons_N.tolist(), dropped_by, masked, strict=True)
    ):
        experience = result[place]
        was = {stat: np.float32(experience.metrics.get(stat, math.nan)) for stat in stats}
        measured = {
            stat: values[row]
            for stat, values in stats.items()
            if not math.isnan(values[row]) and np.float32(values[row]) != was[stat]
        }
        if measured:
            experience = result[place] = replace(experience, metrics={**experience.metrics, **measured})
        if is_masked:
            none = np.zeros(len(experience.tokens) - experience.prompt_length, bool)
            experience = result[place] = replace(experience, loss_mask=none)
        if code != DropReason.KEPT:
            reason = f"operator {name}: {DropReason(code).name.lower()}"
            detail = f" ({after.details[row]})" if row in after.details else ""
            result[place] = replace(experience, status=Status.FILTERED, error=reason + detail)
        # As float32, the precision of the log: otherwise rounding would look like shaping.
        elif experience.reward is not None and reward != np.float32(experience.reward):
            metrics = {**experience.metrics, UNSHAPED_REWARD: experience.reward}
            result[place] = replace(experience, reward=float(reward), metrics=metrics)
    return result


def operator_name(operator: Operator) -> str:
    """Return the name of an operator in the configuration: the registered one, or that of the class."""
    return getattr(operator, "operator_name", type(operator).__name__)


def experience_table(table: pa.Table) -> ExperienceTable:
    """Convert rows of the schema of experiences to the input of operators."""
    batch = batch_from_table(table)
    truncated = [status == Status.TRUNCATED for status in table.column("status").to_pylist()]
    rows = [dict(pairs) for pairs in table.column("metrics").to_pylist()]
    names = sorted({name for row in rows for name in row})
    return ExperienceTable(
        rewards_N=torch.tensor(batch.rewards),
        group_N=torch.tensor(batch.groups),
        truncated_N=torch.tensor(truncated, dtype=torch.bool),
        rollout_N=torch.tensor(batch.rollouts),
        stats={name: torch.tensor([row.get(name, float("nan")) for row in rows]) for name in names},
        texts={name: table.column(name).to_pylist() for name in TEXTS if name in table.column_names},
    )
