"""Critic: a value model beside the policy, and its update. It knows neither advantages nor policy losses.

The body is that of a language model, the head one number per position, 0 at the start. The value of a token is what
the model says before it sees the token. Letters: as in packing.py; H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rftdask.config.schema.optimizer import OptimizerConfig
from rftdask.config.schema.trainer import CriticConfig
from rftdask.errors import RoleError
from rftdask.storage.base import Data
from rftdask.synchronizer.published import MODEL_FILE, model_file
from rftdask.trainer.attention import hidden_states
from rftdask.trainer.engines.micro_batches import BatchRows, Passes
from rftdask.trainer.engines.optimizer import ModelOptimizer
from rftdask.trainer.engines.strategies.base import Strategy, distinct_state, layers_of
from rftdask.trainer.engines.tensor_files import SavedTensors, stage_tensors
from rftdask.trainer.model import check_model
from rftdask.trainer.packing import PackedRows

_OPTIMIZER = "critic/optim.safetensors"


class ValueModel(torch.nn.Module):
    """A language model's body and a head of one number."""

    def __init__(self, body: torch.nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(hidden_size, 1)
        # Values begin at 0, so that the first advantages are the returns and no noise of an untrained head.
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, rows: PackedRows) -> Tensor:
        """[B, T] float32 values before the response tokens, 0 beyond their end."""
        hidden_QH = hidden_states(self.body, rows).index_select(0, rows.before_Q)
        return rows.aligned(self.head(hidden_QH).float()[:, 0])


class Critic:
    """The value model on one rank, and its optimizer."""

    def __init__(
        self,
        policy: PreTrainedModel,
        section: CriticConfig,
        optimizer: OptimizerConfig,
        grad_clip: float,
        strategy: Strategy,
        plugin_dirs: Sequence[str] = (),
        num_splits: int = 1,
    ) -> None:
        """policy: a model whose body it begins with. optimizer: that of the policy, which gives all but the rate.
        num_splits: as of `load_policy`.
        """
        # The language model without its head: what it says of a position goes to a head of one number.
        body: Any = policy.base_model
        self.model = ValueModel(body, policy.config.hidden_size).to(device=policy.device, dtype=policy.dtype)
        self._cliprange_value = section.cliprange_value
        self._strategy = strategy
        strategy.prepare(self.model, layers_of(body, policy._no_split_modules or ()))
        if strategy.reads_parts:
            strategy.within(self.model, lambda: check_model(policy, num_splits, has_logits=False))
        # A rate of its own, and no schedule: values have to follow a policy that moves to the end.
        constant = {"lr": section.lr, "lr_warmup_steps": 0, "lr_scheduler_type": "constant"}
        own = optimizer.model_copy(update=constant)
        self.optimizer = ModelOptimizer(self.model, own, grad_clip, strategy, None, plugin_dirs)

    def values(self, rows: BatchRows, passes: Passes) -> Tensor:
        """[Q] float32 values before every response token."""
        return passes.scored(rows, self.model)

    def update(
        self,
        rows: BatchRows,
        passes: Passes,
        members: np.ndarray,
        old_Q: Tensor,
        returns_Q: Tensor,
        *,
        update: int,
        step: int,
    ) -> dict[str, float]:
        """One update toward the returns over the trained tokens of these rows, which the passes are over.

        old_Q: the values the returns were made with. update, step: as of `ModelOptimizer.step`.

        Raises: RoleError: the loss or its gradient is not finite.
        """
        # A mean over the trained tokens of the mini-batch; parts of it add up over passes and ranks.
        weights_Q = rows.loss_mask_Q / rows.counts()[torch.from_numpy(members)].sum().clamp(min=1)
        total = 0.0
        for part in passes.own:
            values_BT = self.model(**rows.model_inputs(part))
            old_BT, returns_BT = rows.part(old_Q, part), rows.part(returns_Q, part)
            loss_BT = value_loss(values_BT, old_BT, returns_BT, self._cliprange_value)
            loss = (loss_BT * rows.part(weights_Q, part)).sum()
            loss.backward()
            total += float(loss.detach())
        passes.idle_backward(rows, self.model)
        # Of the tokens of own rows, in float64; what the others have is added.
        own_M = torch.from_numpy(rows.tokens_of(np.concatenate([members[:0], *passes.own]))).to(weights_Q.device)
        weights_M, returns_M = weights_Q[own_M].double(), returns_Q[own_M].double()
        residual_M = returns_M - old_Q[own_M]
        sums = passes.add_metrics(
            {
                "loss": total,
                "returns": float((returns_M * weights_M).sum()),
                "residual": float((residual_M * weights_M).sum()),
                "error": float((residual_M.square() * weights_M).sum()),
            }
        )
        if not math.isfinite(sums["loss"]):
            raise RoleError(f"step {step}: the loss of the critic is {sums['loss']}; lower trainer.critic.lr")
        metrics = {f"critic_{name}": value for name, value in self.optimizer.step(update, step).items()}
        # 1: the values are the returns, but for a constant; 0: as good as a constant. Of returns that are all equal
        # there is nothing to explain.
        variances = passes.add_metrics(
            {
                name: float(((values_M - sums[name]).square() * weights_M).sum())
                for name, values_M in (("returns", returns_M), ("residual", residual_M))
            }
        )
        left, variance = variances["residual"], variances["returns"]
        return {
            "critic_loss": sums["loss"],
            "critic_error": sums["error"],
            "critic_explained_variance": 1.0 - left / variance if variance > 0 else 0.0,
            **metrics,
        }

    def state_files(self, spare: Mapping[str, Data]) -> dict[str, Data]:
        """As of `TrainEngine.state_files`. spare: what an earlier call gave, whose memory is used again."""
        files = self.optimizer.state_files(_OPTIMIZER, spare)
        ranks = self._strategy.ranks
        name = f"critic/{model_file(ranks.rank, ranks.size)}"
        model = stage_tensors(distinct_state(self.model), ranks, shared=True, spare=spare.get(name, b""))
        return {**files, name: model} if model else files

    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """As of `TrainEngine.load_state_files`."""
        self.optimizer.load_state_files(_OPTIMIZER, files)
        SavedTensors(f"critic/{MODEL_FILE}", files, self._strategy.ranks).load(distinct_state(self.model))


def value_loss(values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, cliprange: float) -> Tensor:
    """0.5 max((v - R)^2, (clip(v, old +- cliprange) - R)^2) of every token. PPO as in Baselines; arXiv:2005.12729."""
    # A value beyond the range that moved toward its return has no gradient left; one that moved away from it has.
    near_BT = old_BT + (values_BT - old_BT).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square())
