"""What the algorithm and the operators of the config drop of a batch, and the rewards they make of those recorded.

It looks at rewards and statistics of the rows alone, never at a model, so that the ledger can name every drop before
the batch is trained. Invariant: that of `BatchFilter`; only `reward_shaping_mapper` changes rewards, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.operators import MaskResponseTruncated, Operator, RewardShapingMapper
from rftdask.buffer.batches.batch import batch_from_table, column_of, numbers_of
from rftdask.buffer.batches.operator_pipeline import run_pipeline
from rftdask.buffer.batches.source import BASELINE, BatchFilter, with_rewards
from rftdask.trainer.engines.micro_batches import BatchRows

NO_BASELINE = "no_baseline"
"""Reason of rollouts whose greedy sibling failed."""


class AlgorithmFilter(BatchFilter):
    """The greedy baselines, then the operators in order, then the algorithm's advantage function."""

    def __init__(self, algorithm: Algorithm, operators: Sequence[Operator], baseline_rollout: int | None) -> None:
        """baseline_rollout: number of the rollout whose reward is the baseline of its group; None: there is none."""
        self._algorithm = algorithm
        self._operators = tuple(operators)
        self._shaping = tuple(operator for operator in operators if isinstance(operator, RewardShapingMapper))
        self._baseline_rollout = baseline_rollout
        self.columns = ("metrics",) if self._operators else ()

    def reasons(self, table: pa.Table, step: int) -> list[str]:
        """See BatchFilter; the baselines, then operators, then the advantage function, each on what the one before
        left.
        """
        reasons = [""] * len(table)
        if self._baseline_rollout is not None:
            # The rollout numbered `repeat_times` was sampled at temperature 0: a baseline and no sample.
            greedy = numbers_of(table.column("rollout")) == self._baseline_rollout
            groups = batch_from_table(table).groups
            there = np.isin(groups, groups[greedy])
            both = zip(greedy, there, strict=True)
            reasons = [BASELINE if is_greedy else "" if ok else NO_BASELINE for is_greedy, ok in both]
        # Each stage sees what the one before has left: a dropped rollout is in nobody's baseline.
        for stage in (self._operator_drops, self._advantage_drops):
            kept = np.array([i for i, reason in enumerate(reasons) if not reason], dtype=np.int64)
            codes = stage(table.take(column_of(kept)), step) if len(kept) else []
            for row, code in zip(kept, codes, strict=True):
                reasons[row] = "" if code == DropReason.KEPT else DropReason(code).name.lower()
        return reasons

    def rewards(self, table: pa.Table) -> np.ndarray:
        """See BatchFilter; those recorded, shaped by the operators that do so."""
        if not self._shaping:
            return super().rewards(table)
        shaped, _ = run_pipeline(self._shaping, table)
        return shaped.rewards_N.numpy().astype(np.float32)

    def masked(self, table: pa.Table) -> np.ndarray:
        """See BatchFilter; what the operators that mask take out of the loss."""
        masking = [operator for operator in self._operators if isinstance(operator, MaskResponseTruncated)]
        masked_N = run_pipeline(masking, table)[0].masked_N if masking else None
        return super().masked(table) if masked_N is None else masked_N.numpy()

    def _operator_drops(self, table: pa.Table, step: int) -> list[int]:
        if not self._operators:
            return [DropReason.KEPT] * len(table)
        return [int(code) for code in run_pipeline(self._operators, table)[0].reasons_N]

    def _advantage_drops(self, table: pa.Table, step: int) -> list[int]:
        advantage = self._algorithm.advantage_fn
        # Most drop nothing, and then no advantage is computed just to find that out.
        if advantage is None or advantage.without_filtering() == advantage:
            return [DropReason.KEPT] * len(table)
        # With the rewards that are trained: a flat group may not be flat any more once they were shaped, or the
        # reverse.
        batch = batch_from_table(with_rewards(table, self.rewards(table)))
        rows = BatchRows(batch, torch.device("cpu"))
        inputs = replace(rows.advantage_inputs(step), **rows.token_inputs(rows, {}))
        # The advantages are made again when the batch is trained, by all ranks; here only the drops count.
        return [int(code) for code in advantage(inputs).drops_N]
