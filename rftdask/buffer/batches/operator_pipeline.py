"""Experience pipeline: the operators of the config, run over rows of the experience log.

They run where the config says: when a train batch is formed (trainer/rank.py), or in the explorer before a
work unit is committed (`filter_experiences`). Operators look at single rows or at groups, and both hold whole
groups, so both places drop the same rows. Invariant: nothing is lost silently: a dropped row is committed, or named in
the ledger, with its reason; an operator that fails is an error that names it and the task.
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
from rftdask.buffer.log.schema import Experience, Status, experiences_to_table
from rftdask.config import Config, fill_from_environment
from rftdask.config.base import plain
from rftdask.errors import OperatorError, UserError

TEXTS = ("prompt_text", "response_text", "truth")
"""Columns that operators see where rows are whole: before the commit."""
UNSHAPED_REWARD = "unshaped_reward"
"""Metric of an experience whose reward an operator changed before it was committed: the reward it was given."""


def operators_of(config: Config) -> list[Operator]:
    """The experience operators of the config, in order. Raises: UserError: a name or arguments that do not exist."""
    operators = []
    for number, entry in enumerate(config.data_processor.experience_pipeline.operators):
        where = f"data_processor.experience_pipeline.operators[{number}]"
        unknown = sorted(set(entry) - {"name", "args"})
        if unknown or "name" not in entry:
            raise UserError(f"{where}: takes name and args, " + (f"not {', '.join(unknown)}" if unknown else "no name"))
        try:
            # Plain dicts and lists: operators are pure Python of anybody, and a frozen dict would surprise them.
            arguments = plain(fill_from_environment(entry.get("args") or {}))
            if entry["name"] == DataJuicer.operator_name:
                arguments.setdefault("server_url", config.service.data_juicer.server_url)
            operators.append(make_part("operator", entry["name"], arguments, config.explorer.plugin_dirs))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return operators


def run_pipeline(operators: Sequence[Operator], table: pa.Table) -> tuple[ExperienceTable, list[str]]:
    """The rows (schema of experiences, with rewards) after all operators; and which operator dropped each, or "".

    Raises: OperatorError: one failed.
    """
    current = experience_table(table)
    dropped_by = [""] * len(table)
    for operator in operators:
        # By what changed: an operator says which rows stay, and not that it was the one.
        was = current.keep_N
        try:
            current, _ = operator(current)
        except Exception as error:
            # The first task on which the operator fails by itself, or else all of them.
            keys = list(zip(*(table.column(name).to_pylist() for name in GROUP_KEY), strict=True))
            what, cause = f"the {len(set(keys))} tasks together, none alone", error
            if len(set(keys)) == 1:
                what = f"task {'/'.join(map(str, keys[0]))}"
            for key in dict.fromkeys(keys) if len(set(keys)) > 1 else ():
                try:
                    operator(experience_table(table.filter(pa.array([other == key for other in keys]))))
                except Exception as alone:
                    what, cause = f"task {'/'.join(map(str, key))}", alone
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
    """The experiences of whole groups as they are to be committed, in their order: dropped ones with status filtered
    and the reason, others with the rewards and masks that the operators made, and what they measured as metrics.

    baseline_rollout: number of the greedy rollouts, which are no samples. Raises: OperatorError.
    """
    result = list(experiences)
    # Failed rollouts have no reward to look at, and the greedy one is the baseline of the others.
    places = [i for i, e in enumerate(experiences) if e.status.trainable and e.rollout != baseline_rollout]
    if not operators or not places:
        return result
    after, dropped_by = run_pipeline(operators, experiences_to_table([experiences[i] for i in places]))
    rewards = after.rewards_N.numpy().astype(np.float32)
    masked = [False] * len(places) if after.masked_N is None else after.masked_N.tolist()
    # As float32, in which they went in: otherwise rounding alone would look like a new number.
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
        # As float32, the precision of the log: otherwise rounding alone would look like shaping.
        elif experience.reward is not None and reward != np.float32(experience.reward):
            metrics = {**experience.metrics, UNSHAPED_REWARD: experience.reward}
            result[place] = replace(experience, reward=float(reward), metrics=metrics)
    return result


def operator_name(operator: Operator) -> str:
    """The name that the configuration uses: the registered one, or the class's."""
    return getattr(operator, "operator_name", type(operator).__name__)


def experience_table(table: pa.Table) -> ExperienceTable:
    """Rewards, groups, truncation and the metrics that every row may carry, as operators take them."""
    batch = batch_from_table(table)
    truncated = [status == Status.TRUNCATED for status in table.column("status").to_pylist()]
    rows = [dict(pairs) for pairs in table.column("metrics").to_pylist()]
    names = sorted({name for row in rows for name in row})
    return ExperienceTable(
        rewards_N=torch.tensor(batch.rewards),
        group_N=torch.tensor(batch.groups),
        truncated_N=torch.tensor(truncated, dtype=torch.bool),
        rollout_N=torch.tensor(batch.rollouts),
        # By name over all rows, nan where a row has no such number.
        stats={name: torch.tensor([row.get(name, float("nan")) for row in rows]) for name in names},
        texts={name: table.column(name).to_pylist() for name in TEXTS if name in table.column_names},
    )
