"""Operators over a batch of experiences, between sampling and training: filters, reward shaping, statistics.

Table in, table out: every row stays, a dropped one carries a reason. Knows nothing of storage or tasksets.
Invariant: an operator looks only at rows that are still kept, so a failed or dropped rollout influences nothing.
"""

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import group_stats, group_sums, ranks_in_group
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.data.juicer.base import Juicer, OperatorResult, Pipeline, RowResult, as_list, read_operators, read_recipe
from rftdask.data.juicer.session import check_juicer, open_juicer
from rftdask.errors import ProcessLostError

SHAPING_OPS = ("ADD", "SUB", "MUL", "DIV")


@dataclass(frozen=True)
class ExperienceTable:
    """N experiences. Example: `ExperienceTable(tensor([1., 0.]), tensor([0, 0]), truncated_N=tensor([False,
    True]))`."""

    rewards_N: Tensor
    """[N] float; nan: no reward."""
    group_N: Tensor
    """[N] int64, index of the task, 0..G-1."""
    drops_N: Tensor | None = None
    """[N] int8, `DropReason` codes; None: all kept."""
    truncated_N: Tensor | None = None
    """[N] bool, the response hit the length limit."""
    rollout_N: Tensor | None = None
    """[N] int64, index of the rollout the row is a turn of, 0..R-1. None: each row is a rollout."""
    masked_N: Tensor | None = None
    """[N] bool, kept for the baseline of its task: its reward counts, and none of its tokens is trained. None: none."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] float numbers of each experience by name, nan where it has none, for example {"accuracy": ...}."""
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """[N] texts by name, prompt_text, response_text and truth; none where operators run as a batch is formed."""
    details: Mapping[int, str] = field(default_factory=dict)
    """Row -> what dropped it within an operator that is several, beside the code of its reason."""

    @property
    def reasons_N(self) -> Tensor:
        """[N] int8 codes."""
        return torch.zeros_like(self.group_N, dtype=torch.int8) if self.drops_N is None else self.drops_N

    @property
    def keep_N(self) -> Tensor:
        """[N] bool."""
        return self.reasons_N == DropReason.KEPT

    @property
    def counted_N(self) -> Tensor:
        """[N] bool, the first kept row of each rollout: one of nine turns would else count nine times in its task."""
        if self.rollout_N is None:
            return self.keep_N
        # Kept rows rank before dropped ones, and among themselves by position.
        return self.keep_N & (ranks_in_group((~self.keep_N).long(), self.rollout_N) == 0)

    @property
    def num_groups(self) -> int:
        """G."""
        return int(self.group_N.max()) + 1 if len(self.group_N) else 0

    def dropping(self, rows_N: Tensor, reason: DropReason) -> tuple["ExperienceTable", dict[str, float]]:
        """The table without the rows that are kept so far and in `rows_N`, and a counter of them."""
        # A row keeps its first reason, and is counted once.
        rows_N = rows_N & self.keep_N
        table = replace(self, drops_N=self.reasons_N.masked_fill(rows_N, int(reason)))
        return table, {f"dropped/{reason.name.lower()}": float(rows_N.sum())}


class Operator(ABC):
    """The base of the operators: the fields of a frozen dataclass are its arguments.

    Usage: `table, metrics = operator(table)`. One of your own is a subclass with `__call__`, in a file of its own:

        @dataclass(frozen=True)
        class DropTruncated(Operator):
            def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
                return table.dropping(table.truncated_N, DropReason.TRUNCATED)
    """

    operator_name: ClassVar[str]
    """The name by which a configuration chooses it; one without is chosen by its class."""
    only_at_commit: ClassVar[bool] = False
    """Whether it cannot run when a batch is formed: it reads texts, or does not repeat what it says of a row."""

    def check(self) -> None:  # noqa: B027 -- most have nothing to look at
        """Look whether all that it needs beside this process is there, before a run starts. Raises: UserError."""

    def close(self) -> None:  # noqa: B027 -- most have nothing to release
        """Let go of what it holds; idempotent."""

    @abstractmethod
    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        """The table with as many rows, some of them dropped or with another reward; and metrics by name, of which those
        that begin with "dropped/" add up over operators.
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
    """Drop tasks whose rewards have a population standard deviation at or below the threshold, lone rollouts
    included."""

    threshold: float = 0.0

    operator_name = "reward_std_filter"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        stats = group_stats(table.rewards_N, table.group_N, table.counted_N, table.num_groups, sample=False)
        # A lone rollout has nothing to be compared with, also under a threshold below 0.
        flat_G = (stats.std_G <= self.threshold) | (stats.count_G < 2)
        table, metrics = table.dropping(flat_G[table.group_N], DropReason.LOW_STD)
        return table, {**stats.metrics(), **metrics}


@dataclass(frozen=True)
class DapoDynamicSampling(Operator):
    """Keep a task only if some but not all of its rollouts are correct. DAPO, arXiv:2503.14476, section 3.2.

    Correct: the statistic `metric_key` (the reward, where an experience has none) is above the threshold.
    """

    metric_key: str = "accuracy"
    correct_threshold: float = 0.0

    operator_name = "dapo_dynamic_sampling"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        scores_N = table.rewards_N
        if self.metric_key in table.stats:
            given_N = table.stats[self.metric_key]
            # nan: this experience has no such number.
            scores_N = torch.where(torch.isnan(given_N), scores_N, given_N)
        counted_N = table.counted_N
        # [G] rollouts that are left of each task, and how many of them are correct.
        size_G = group_sums(counted_N, table.group_N, table.num_groups)
        correct_G = group_sums(counted_N & (scores_N > self.correct_threshold), table.group_N, table.num_groups)
        # Groups whose rows were all dropped before are both; the counts leave them out.
        none_G, all_G = correct_G == 0, correct_G == size_G
        counts = {"all_wrong": none_G & (size_G > 0), "all_correct": all_G & (size_G > 0)}
        metrics = {f"num_groups_{name}": float(groups_G.sum()) for name, groups_G in counts.items()}
        table, dropped = table.dropping((none_G | all_G)[table.group_N], DropReason.LOW_STD)
        return table, {**metrics, **dropped}


@dataclass(frozen=True)
class MaskResponseTruncated(Operator):
    """Train no token of truncated responses; their rewards stay in the baselines of their tasks. DAPO's overlong
    filtering, arXiv:2503.14476, section 3.4.

    A task's mean without them would be that of its short answers: the others would be compared with a policy that
    never runs out of room.
    """

    operator_name = "mask_response_truncated"

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        require(table.truncated_N is not None, "mask_response_truncated needs truncated_N")
        assert table.truncated_N is not None
        masked_N = table.truncated_N & table.keep_N
        return replace(table, masked_N=masked_N), {"num_masked": float(masked_N.sum())}


@dataclass(frozen=True)
class RewardShapingMapper(Operator):
    """reward <- reward (+ - * /) weight * statistic, rule after rule; an experience without the statistic keeps its
    reward.

    Example: `reward_shaping_configs=[{"stats_key": "quality", "op_type": "ADD", "weight": 0.5}]`. Division by 0
    changes nothing.
    """

    reward_shaping_configs: list[dict[str, Any]] | tuple[dict[str, Any], ...] | None = None

    operator_name = "reward_shaping_mapper"

    def __post_init__(self) -> None:
        for rule in self.reward_shaping_configs or ():
            unknown = set(rule) - {"stats_key", "op_type", "weight"}
            require(not unknown, f"a reward shaping rule takes stats_key, op_type and weight, not {sorted(unknown)}")
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
                # All four are computed, one is taken; the branch not taken of a division by 0 is discarded.
                "DIV": torch.where(value_N == 0, rewards_N, rewards_N / value_N),
            }
            shaped_N = results[rule.get("op_type", "ADD")]
            rewards_N = torch.where(torch.isnan(value_N), rewards_N, shaped_N)  # nan: the experience has no such number
        # Over the rows that were kept and had a reward: one nan would make the whole mean nan.
        change_N = (rewards_N - table.rewards_N)[table.keep_N & torch.isfinite(table.rewards_N)]
        mean = float(change_N.mean()) if len(change_N) else 0.0
        return replace(table, rewards_N=rewards_N), {"reward_change_mean": mean}


class DataJuicer(Operator):
    """Operators of Data-Juicer over the rollouts of a task, as rows of prompt_text, response_text, truth and reward.

    A row that they drop is dropped, and the numbers that they measure of the others become statistics, for operators
    behind this one. A `reward` that they change is the reward. Texts that they change are for the operators behind
    them: what is trained are the tokens that were sampled.

    Example: `operators=[{"words_num_filter": {"min_num": 5}}]`. What has Data-Juicer starts with the first row, in a
    process of its own or in a session of a service, and is kept; a process that died is started once more.
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
            config_path: a recipe of Data-Juicer (YAML) in place of them.
            num_process: processes of each operator, at most.
            timeout_s: longest silence of the process, or longest answer of the service.
            server_url: the service; None: a process of its own.
        Raises: ValueError: neither operators nor a recipe; UserError: the recipe cannot be read, or an entry is wrong.
        """
        require(bool(operators) != bool(config_path), "data_juicer takes operators or config_path, one of them")
        require(num_process >= 1 and timeout_s > 0, "num_process and timeout_s are more than 0")
        recipe = read_recipe(config_path, "config_path") if config_path else {}
        self._pipeline = Pipeline(
            operators=read_operators(recipe.get("process") or operators or (), "operators"),
            text_key=(as_list(recipe.get("text_keys")) or ["response_text"])[0],
            num_process=int(recipe.get("np") or num_process),
            custom_operator_paths=as_list(recipe.get("custom_operator_paths")),
        )
        self._timeout_s, self._server_url = timeout_s, server_url
        self._juicer: Juicer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        require(bool(table.texts), "data_juicer needs the texts of experiences, which are there at the commit")
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
                if isinstance(value, int | float):  # some are texts or lists
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
        """See Operator; nothing is loaded but the names and arguments of its operators."""
        with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
            what = f"operator {self.operator_name}"
            check_juicer(self._pipeline, Path(folder, "log"), what, server_url=self._server_url)

    def close(self) -> None:
        """End its process or its session."""
        juicer, folder, self._juicer, self._folder = self._juicer, self._folder, None, None
        if juicer is not None:
            juicer.close()
        if folder is not None:
            folder.cleanup()

    def _run(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[RowResult], dict[int, str]]:
        """What became of the rows that are left; and row -> the operator that dropped it, of the others."""
        for is_last in (False, True):
            done: list[OperatorResult] = []
            try:
                if self._juicer is None:
                    self._folder = tempfile.TemporaryDirectory(prefix="rftdask-")
                    self._juicer = open_juicer(
                        self._pipeline,
                        Path(self._folder.name, "log"),
                        f"operator {self.operator_name}",
                        server_url=self._server_url,
                        silence_s=self._timeout_s,
                    )
                results = self._juicer.run(rows, done.append)
                return results, {row: each.operator for each in done for row in each.dropped}
            except BaseException as error:
                self.close()
                if is_last or not isinstance(error, ProcessLostError):
                    raise
        raise AssertionError


@dataclass(frozen=True)
class PassRateCalculator(Operator):
    """Mean reward of each task's kept rollouts, for selectors that learn; changes no row.

    Metrics: shares of tasks with a pass rate within (0, 1), below 1, above 0. The rates themselves: `pass_rates`.
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
    """Group indices [K] that have kept rows with a finite reward, and their mean rewards [K], float64."""
    used_N = table.counted_N & torch.isfinite(table.rewards_N)
    stats = group_stats(table.rewards_N, table.group_N, used_N, table.num_groups)
    groups_K = (stats.count_G > 0).nonzero().squeeze(-1)
    return groups_K, stats.mean_G[groups_K]
