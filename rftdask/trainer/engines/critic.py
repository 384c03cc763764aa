"""Critic: a value model beside the policy, and its update. It knows neither advantages nor policy losses.

The body is that of a language model, the head one number per position, 0 at the start. The value of a token is what
the model says before it sees the token. Letters: as in packing.py; H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rftdask.config.schema.optimizer import OptimizerConfig
from rftdask.config.schema.trainer import CriticConfig
from rftdask.errors import RoleError
from rftdask.storage.base import Data
from rftdask.trainer.attention import hidden_states
from rftdask.trainer.engines.micro_batches import BatchRows, Passes
from rftdask.trainer.engines.optimizer import ModelOptimizer
from rftdask.trainer.engines.strategies.base import Strategy, distinct_state, layers_of
from rftdask.trainer.engines.tensor_files import SavedTensors, stage_tensors
from rftdask.trainer.model import check_model
from rftdask.trainer.packing import PackedRows
from rftdask.weights.published import MODEL_FILE, model_file

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
        mask_Q: Tensor,
        old_Q: Tensor,
        returns_Q: Tensor,
        *,
        update: int,
        step: int,
    ) -> dict[str, float]:
        """One update toward the returns over the tokens of `mask_Q`, which are in `passes`.

        old_Q: the values the returns were made with. update, step: as of `ModelOptimizer.step`.

        Raises: RoleError: the loss or its gradient is not finite.
        """
        # A mean over the trained tokens of the mini-batch; parts of it add up over passes and ranks.
        weights_Q = mask_Q / mask_Q.sum().clamp(min=1)
        total = 0.0
        for members in passes.own:
            values_BT = self.model(**rows.model_inputs(members))
            old_BT, returns_BT = rows.part(old_Q, members), rows.part(returns_Q, members)
            loss_BT = value_loss(values_BT, old_BT, returns_BT, self._cliprange_value)
            loss = (loss_BT * rows.part(weights_Q, members)).sum()
            loss.backward()
            total += float(loss.detach())
        passes.idle_backward(rows, self.model)
        total = passes.add_metrics({"loss": total})["loss"]
        if not math.isfinite(total):
            raise RoleError(f"step {step}: the loss of the critic is {total}; lower trainer.critic.lr")
        metrics = {f"critic_{name}": value for name, value in self.optimizer.step(update, step).items()}
        residual_Q = returns_Q - old_Q
        # 1: the values are the returns, but for a constant; 0: as good as a constant. Of returns that are all equal
        # there is nothing to explain.
        left, variance = (_weighted_variance(each_Q, weights_Q) for each_Q in (residual_Q, returns_Q))
        return {
            "critic_loss": total,
            "critic_error": float((residual_Q.square() * weights_Q).sum()),
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


def _weighted_variance(values_Q: Tensor, weights_Q: Tensor) -> float:
    mean = (values_Q * weights_Q).sum()
    return float(((values_Q - mean).square() * weights_Q).sum())


def value_loss(values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, cliprange: float) -> Tensor:
    """0.5 max((v - R)^2, (clip(v, old +- cliprange) - R)^2) of every token. PPO as in Baselines; arXiv:2005.12729."""
    # A value beyond the range that moved toward its return has no gradient left; one that moved away from it has.
    near_BT = old_BT + (values_BT - old_BT).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square())
