"""Operators over a batch of experiences, between sampling and training: filters, reward shaping, statistics.

An operator maps a table to a table with the same rows; a dropped row carries a reason. Knows nothing of storage or
tasksets. Invariant: an operator reads only kept rows, so a failed or dropped rollout has no influence.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import group_stats, group_sums, ranks_in_group
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.data.juicer import check_juicer, open_juicer
from rftdask.data.juicer.base import Juicer, OperatorResult, RowResult, make_pipeline, read_recipe
from rftdask.errors import ProcessLostError

SHAPING_OPS = ("ADD", "SUB", "MUL", "DIV")


@dataclass(frozen=True)
class ExperienceTable:
    """Table of N experiences. Example: `ExperienceTable(tensor([1., 0.]), tensor([0, 0]), truncated_N=tensor([False,
    True]))`."""

    rewards_N: Tensor
    """[N] float. nan: no reward."""
    group_N: Tensor
    """[N] int64, index of the task, 0..G-1."""
    drops_N: Tensor | None = None
    """[N] int8, `DropReason` codes. None: all kept."""
    truncated_N: Tensor | None = None
    """[N] bool, True if the response reached the length limit."""
    rollout_N: Tensor | None = None
    """[N] int64, index of the rollout of the row, 0..R-1. None: each row is a rollout."""
    masked_N: Tensor | None = None
    """[N] bool, True for rows in the baseline of their task whose tokens are not trained. None: no such rows."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [N] float statistic of each experience, nan if missing, for example {"accuracy": ...}."""
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name -> [N] texts: prompt_text, response_text and truth. Empty if operators run while a batch is formed."""
    details: Mapping[int, str] = field(default_factory=dict)
    """Row -> name of the inner operator that dropped it, in addition to its reason."""

    @property
    def reasons_N(self) -> Tensor:
        """[N] int8 `DropReason` codes."""
        return torch.zeros_like(self.group_N, dtype=torch.int8) if self.drops_N is None else self.drops_N

    @property
    def keep_N(self) -> Tensor:
        """[N] bool."""
        return self.reasons_N == DropReason.KEPT

    @property
    def counted_N(self) -> Tensor:
        """[N] bool, True for the first kept row of each rollout, so that a rollout counts once in its task."""
        if self.rollout_N is None:
            return self.keep_N
        # Kept rows rank before dropped ones, then by position.
        return self.keep_N & (ranks_in_group((~self.keep_N).long(), self.rollout_N) == 0)

    @property
    def num_groups(self) -> int:
        """G."""
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    def dropping(self, rows_N: Tensor, reason: DropReason) -> tuple["ExperienceTable", dict[str, float]]:
        """(table in which the kept rows of `rows_N` are dropped, counter of them). A row keeps its first reason."""
        rows_N = rows_N & self.keep_N
        table = replace(self, drops_N=self.reasons_N.masked_fill(rows_N, int(reason)))
        return table, {f"dropped/{reason.name.lower()}": float(rows_N.sum())}


class Operator(ABC):
    """Base of operators. The fields of the frozen dataclass are its arguments.

    Usage: `table, metrics = operator(table)`. A custom operator is a subclass with `__call__`, in a separate file:

        @dataclass(frozen=True)
        class DropTruncated(Operator):
            def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
                return table.dropping(table.truncated_N, DropReason.TRUNCATED)
    """

    operator_name: ClassVar[str]
    """Name in a configuration. An operator without one is named by its class."""
    only_at_commit: ClassVar[bool] = False
    """True if it cannot run while a batch is formed, since it reads texts or is not deterministic."""

    def check(self) -> None:  # noqa: B027 -- most have nothing to check
        """Check external requirements before a run starts. Raises: UserError."""

    def close(self) -> None:  # noqa: B027 -- most have nothing to release
        """Release resources. Idempotent."""

    @abstractmethod
    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        """Mark rows as dropped or change their rewards. Returns: the table with all of its rows; metrics by name.

        Metrics that begin with "dropped/" add up over operators.
        """


@dataclass(frozen=True)
class RewardFilter(Operator):
    """Drop experiences with a reward below the threshold."""

    threshold: float = 0.0

    operator_name = "reward_filter"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        return table.dropping(table.rewards_N < self.threshold, DropReason.REWARD_RANGE)


@dataclass(frozen=True)
class InvalidRewardFilter(Operator):
    """Drop experiences whose reward is missing, nan or infinite."""

    operator_name = "invalid_reward_filter"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        return table.dropping(~torch.isfinite(table.rewards_N), DropReason.INVALID_ROLLOUT)


@dataclass(frozen=True)
class RewardStdFilter(Operator):
    """Drop tasks whose rewards have a population standard deviation at or below the threshold, including single
    rollouts."""

    threshold: float = 0.0

    operator_name = "reward_std_filter"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        stats = group_stats(table.rewards_N, table.group_N, table.counted_N, table.num_groups, sample=False)
        # A single rollout cannot be compared, also with a threshold below 0.
        flat_G = (stats.std_G <= self.threshold) | (stats.count_G < 2)
        table, metrics = table.dropping(flat_G[table.group_N], DropReason.LOW_STD)
        return table, {**stats.metrics(), **metrics}


@dataclass(frozen=True)
class DapoDynamicSampling(Operator):
    """Keep a task only if some but not all of its rollouts are correct. DAPO, arXiv:2503.14476, section 3.2.

    Correct: the statistic `metric_key` (or the reward, if missing) is above the threshold.
    """

    metric_key: str = "accuracy"
    correct_threshold: float = 0.0

    operator_name = "dapo_dynamic_sampling"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        scores_N = table.rewards_N
        if self.metric_key in table.stats:
            given_N = table.stats[self.metric_key]
            # nan: this experience lacks the statistic.
            scores_N = torch.where(torch.isnan(given_N), scores_N, given_N)
        counted_N = table.counted_N
        # [G] remaining rollouts of each task, and the number of correct ones.
        size_G = group_sums(counted_N, table.group_N, table.num_groups)
        correct_G = group_sums(counted_N & (scores_N > self.correct_threshold), table.group_N, table.num_groups)
        # Groups whose rows were all dropped before satisfy both; the counts exclude them.
        none_G, all_G = correct_G == 0, correct_G == size_G
        counts = {"all_wrong": none_G & (size_G > 0), "all_correct": all_G & (size_G > 0)}
        metrics = {f"num_groups_{name}": float(groups_G.sum()) for name, groups_G in counts.items()}
        table, dropped = table.dropping((none_G | all_G)[table.group_N], DropReason.LOW_STD)
        return table, {**metrics, **dropped}


@dataclass(frozen=True)
class MaskResponseTruncated(Operator):
    """Mask truncated responses in the loss, while their rewards stay in the baselines. DAPO's overlong filtering,
    arXiv:2503.14476, section 3.4.

    Without their rewards the mean of a task would be that of its short responses only.
    """

    operator_name = "mask_response_truncated"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        require(table.truncated_N is not None, "mask_response_truncated needs truncated_N")
        assert table.truncated_N is not None
        masked_N = table.truncated_N & table.keep_N
        return replace(table, masked_N=masked_N), {"num_masked": float(masked_N.sum())}


@dataclass(frozen=True)
class RewardShapingMapper(Operator):
    """Apply reward <- reward (+ - * /) weight * statistic, rule by rule. Without the statistic the reward is unchanged.

    Example: `reward_shaping_configs=[{"stats_key": "quality", "op_type": "ADD", "weight": 0.5}]`. Division by 0
    changes nothing.
    """

    reward_shaping_configs: list[dict[str, Any]] | tuple[dict[str, Any], ...] | None = None

    operator_name = "reward_shaping_mapper"

    def __post_init__(self) -> None:
        for rule in self.reward_shaping_configs or ():
            unknown = set(rule) - {"stats_key", "op_type", "weight"}
            require(not unknown, f"a reward shaping rule accepts stats_key, op_type and weight, not {sorted(unknown)}")
            require(bool(rule.get("stats_key")), "a reward shaping rule needs a stats_key")
            one_of("op_type", rule.get("op_type", "ADD"), SHAPING_OPS)

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        rewards_N = table.rewards_N
        for rule in self.reward_shaping_configs or ():
            given_N = table.stats.get(rule["stats_key"])
            if given_N is None:
                continue
            value_N = rule.get("weight", 1.0) * given_N
            results = {
                "ADD": rewards_N + value_N,
                "SUB": rewards_N - value_N,
                "MUL": rewards_N * value_N,
                # All four results are computed and one is selected, so a division by 0 may be discarded.
                "DIV": torch.where(value_N == 0, rewards_N, rewards_N / value_N),
            }
            shaped_N = results[rule.get("op_type", "ADD")]
            # nan: the experience lacks the statistic
            rewards_N = torch.where(torch.isnan(value_N), rewards_N, shaped_N)
        # Only kept rows with a reward, since one nan would make the mean nan.
        change_N = (rewards_N - table.rewards_N)[table.keep_N & torch.isfinite(table.rewards_N)]
        mean = float(change_N.mean()) if len(change_N) else 0.0
        return replace(table, rewards_N=rewards_N), {"reward_change_mean": mean}


class DataJuicer(Operator):
    """Operators of Data-Juicer over the rollouts of a task, as rows of prompt_text, response_text, truth and reward.

    Rows that they drop are dropped. Their measurements become statistics for later operators, and a changed `reward`
    replaces the reward. Changed texts are only visible to later operators of Data-Juicer; training uses the sampled
    tokens.

    Example: `operators=[{"words_num_filter": {"min_num": 5}}]`. Data-Juicer starts with the first row, in a child
    process or a session of a service, and keeps running. A process that died is restarted once.
    """

    operator_name = "data_juicer"
    only_at_commit = True

    def __init__(
        self,
        operators: list[Any] | tuple[Any, ...] | None = None,
        config_path: str | None = None,
        num_process: int = 1,
        timeout_s: float = 600.0,
        server_url: str | None = None,
    ) -> None:
        """
        Args:
            operators: [{name: args}, ...], run in this order.
            config_path: Data-Juicer recipe (YAML) instead of `operators`.
            num_process: maximum number of processes per operator.
            timeout_s: seconds without output of the process, or for a response of the service.
            server_url: URL of the service. None: a child process.
        Raises: ValueError: neither operators nor a recipe. UserError: the recipe is unreadable or an entry is invalid.
        """
        require(bool(operators) != bool(config_path), "data_juicer needs exactly one of operators and config_path")
        require(num_process >= 1 and timeout_s > 0, "num_process and timeout_s must be > 0")
        recipe = read_recipe(config_path, "config_path") if config_path else {}
        text_key = (recipe.get("text_keys") or ["response_text"])[0]
        entries = recipe.get("process") or operators or ()
        self._pipeline = make_pipeline(entries, "operators", recipe, text_key, num_process)
        self._timeout_s, self._server_url = timeout_s, server_url
        self._juicer: Juicer | None = None

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        why = "data_juicer needs the texts of experiences, which exist only when groups are committed"
        require(bool(table.texts), why)
        kept = table.keep_N.nonzero().flatten().tolist()
        rows = [{name: texts[row] for name, texts in table.texts.items()} for row in kept]
        for row, reward in zip(rows, table.rewards_N[kept].tolist(), strict=True):
            row["reward"] = reward if math.isfinite(reward) else None
        results, dropped_by = self._run(rows) if rows else ([], {})
        rewards_N, stats = table.rewards_N.clone(), dict(table.stats)
        measured: dict[str, dict[int, float]] = {}
        for result in results:
            place = kept[result.row]
            if isinstance(reward := result.changed.get("reward"), int | float):
                rewards_N[place] = reward
            for name, value in result.stats.items():
                if isinstance(value, int | float):  # some values are texts or lists
                    measured.setdefault(name, {})[place] = float(value)
        for name, by_place in measured.items():
            was_N = stats.get(name, torch.full_like(table.rewards_N, math.nan))
            stats[name] = was_N.to(torch.float64, copy=True)
            stats[name][list(by_place)] = torch.tensor(list(by_place.values()), dtype=torch.float64)
        gone_N = torch.zeros_like(table.keep_N)
        gone_N[[kept[row] for row in dropped_by]] = True
        details = {**table.details, **{kept[row]: name for row, name in dropped_by.items()}}
        return replace(table, rewards_N=rewards_N, stats=stats, details=details).dropping(gone_N, DropReason.LEFT_OUT)

    def check(self) -> None:
        """See Operator. Only checks the names and arguments of its operators."""
        check_juicer(self._pipeline, f"operator {self.operator_name}", server_url=self._server_url)

    def close(self) -> None:
        """End the process or the session."""
        juicer, self._juicer = self._juicer, None
        if juicer is not None:
            juicer.close()

    def _run(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[RowResult], dict[int, str]]:
        """(remaining rows, dropped row -> name of the operator that dropped it)."""
        for is_last in (False, True):
            done: list[OperatorResult] = []
            try:
                if self._juicer is None:
                    what, url = f"operator {self.operator_name}", self._server_url
                    self._juicer = open_juicer(self._pipeline, what, server_url=url, silence_s=self._timeout_s)
                results = self._juicer.run(rows, done.append)
                return results, {row: result.operator for result in done for row in result.dropped}
            except BaseException as error:
                self.close()
                if is_last or not isinstance(error, ProcessLostError):
                    raise
        raise AssertionError


@dataclass(frozen=True)
class PassRateCalculator(Operator):
    """Mean reward of the kept rollouts of each task, for selectors that learn. Changes no row.

    Metrics: shares of tasks with a pass rate within (0, 1), below 1, above 0. For the rates see `pass_rates`.
    """

    operator_name = "pass_rate_calculator"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        _, rates_K = pass_rates(table)
        shares = {
            "pass_rate_mean": rates_K,
            "pass_rate_valid_frac": ((rates_K > 0) & (rates_K < 1)).double(),
            "pass_rate_below_one_frac": (rates_K < 1).double(),
            "pass_rate_above_zero_frac": (rates_K > 0).double(),
        }
        return table, {name: float(value.mean()) if len(rates_K) else 0.0 for name, value in shares.items()}


def pass_rates(table: ExperienceTable) -> tuple[Tensor, Tensor]:
    """(group indices [K] with kept rows that have a finite reward, their mean rewards [K] in float64)."""
    used_N = table.counted_N & torch.isfinite(table.rewards_N)
    stats = group_stats(table.rewards_N, table.group_N, used_N, table.num_groups)
    groups_K = (stats.count_G > 0).nonzero().squeeze(-1)
    return groups_K, stats.mean_G[groups_K]
