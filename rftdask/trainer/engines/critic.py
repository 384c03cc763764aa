"""Critic: the value model of an actor-critic algorithm, and its update. It knows neither advantages nor policy losses.

The body is that of a language model; the head gives one number per position, 0 at the start. The value of a token is
predicted before the model sees the token. Letters: as in packing.py; H hidden size.
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
from rftdask.trainer.engines.micro_batches import DeviceBatch, MicroBatchPlan
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
        # Values begin at 0, so that the first advantages are the returns, without noise from an untrained head.
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, rows: PackedRows) -> Tensor:
        """Returns [B, T] float32 values before the response tokens, 0 beyond their end."""
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
        """policy: the model whose body the critic starts from. optimizer: the policy's, for all but the rate."""
        body: Any = policy.base_model
        self.model = ValueModel(body, policy.config.hidden_size).to(device=policy.device, dtype=policy.dtype)
        self._cliprange_value = section.cliprange_value
        self._strategy = strategy
        strategy.prepare(self.model, layers_of(body, policy._no_split_modules or ()))
        if strategy.sharded:
            strategy.within(self.model, lambda: check_model(policy, num_splits, has_logits=False))
        # A constant rate: values must follow a policy that moves until the end of the run.
        constant = {"lr": section.lr, "lr_warmup_steps": 0, "lr_scheduler_type": "constant"}
        optimizer = optimizer.model_copy(update=constant)
        self.optimizer = ModelOptimizer(self.model, optimizer, grad_clip, strategy, None, plugin_dirs)

    def update(
        self,
        batch: DeviceBatch,
        plan: MicroBatchPlan,
        indices: np.ndarray,
        old_Q: Tensor,
        returns_Q: Tensor,
        *,
        update: int,
        step: int,
    ) -> dict[str, float]:
        """Make one update toward the returns, over the trained tokens of a mini-batch.

        Args: plan: micro-batches of the rows `indices`. old_Q: the values that the returns were computed with.
        Raises: RoleError: the loss or its gradient is not finite.
        """
        # A mean over the trained tokens of the mini-batch, whose terms add up over micro-batches and ranks.
        weights_Q = batch.loss_mask_Q / batch.num_trained_N[torch.from_numpy(indices)].sum().clamp(min=1)
        total = 0.0
        for micro_batch in plan.micro_batches:
            values_BT = self.model(**batch.model_inputs(micro_batch))
            old_BT, returns_BT = batch.select(old_Q, micro_batch), batch.select(returns_Q, micro_batch)
            loss_BT = value_loss(values_BT, old_BT, returns_BT, self._cliprange_value)
            loss = (loss_BT * batch.select(weights_Q, micro_batch)).sum()
            loss.backward()
            total += float(loss.detach())
        plan.idle_backward(batch, self.model)
        # Float64 sums over this rank's tokens; `add_metrics` adds those of the other ranks.
        own_rows = np.concatenate([indices[:0], *plan.micro_batches])
        own_M = torch.from_numpy(batch.token_indices(own_rows)).to(weights_Q.device)
        weights_M, returns_M = weights_Q[own_M].double(), returns_Q[own_M].double()
        residual_M = returns_M - old_Q[own_M]
        sums = plan.add_metrics(
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
        # Explained variance: 1 if values equal returns up to a constant, 0 if a constant does as well.
        variances = plan.add_metrics(
            {
                name: float(((values_M - sums[name]).square() * weights_M).sum())
                for name, values_M in (("returns", returns_M), ("residual", residual_M))
            }
        )
        variance = variances["returns"]
        return {
            "critic_loss": sums["loss"],
            "critic_error": sums["error"],
            "critic_explained_variance": 1.0 - variances["residual"] / variance if variance > 0 else 0.0,
            **metrics,
        }

    def state_files(self, spare: Mapping[str, Data]) -> dict[str, Data]:
        """See `TrainEngine.state_files`. spare: files of an earlier call, whose memory is reused."""
        files = self.optimizer.state_files(_OPTIMIZER, spare)
        ranks = self._strategy.ranks
        name = f"critic/{model_file(ranks.rank, ranks.size)}"
        model = stage_tensors(distinct_state(self.model), ranks, shared=True, spare=spare.get(name, b""))
        return {**files, name: model} if model else files

    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """See `TrainEngine.load_state_files`."""
        self.optimizer.load_state_files(_OPTIMIZER, files)
        SavedTensors(f"critic/{MODEL_FILE}", files, self._strategy.ranks).load(distinct_state(self.model))


def value_loss(values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, cliprange: float) -> Tensor:
    """Clipped value loss, 0.5 max((v - R)^2, (clip(v, old +- cliprange) - R)^2), per token.

    Source: PPO as in OpenAI Baselines; arXiv:2005.12729.
    """
    # A value beyond the range has a gradient only if it moved away from its return.
    near_BT = old_BT + (values_BT - old_BT).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square())
