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
from rftdask.trainer.attention import hidden_states
from rftdask.trainer.engines.micro_batches import PaddedRows, Passes
from rftdask.trainer.engines.optimizer import ModelOptimizer
from rftdask.trainer.engines.strategies.base import Strategy, distinct_state, layers_of
from rftdask.trainer.engines.tensor_files import SavedTensors
from rftdask.trainer.model import state_bytes
from rftdask.trainer.packing import PackedRows

_MODEL = "critic/model.safetensors"
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
        hidden_QH = hidden_states(self.body, rows).index_select(0, rows.place_Q - 1)
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
    ) -> None:
        """policy: a model whose body it begins with. optimizer: that of the policy, which gives all but the rate."""
        # The language model without its head: what it says of a position goes to a head of one number.
        body: Any = policy.base_model
        self._model = ValueModel(body, policy.config.hidden_size).to(device=policy.device, dtype=policy.dtype)
        self._cliprange_value = section.cliprange_value
        self._strategy = strategy
        strategy.prepare(self._model, layers_of(body, policy._no_split_modules or ()))
        constant = {"lr": section.lr, "lr_warmup_steps": 0, "lr_scheduler_type": "constant"}
        own = optimizer.model_copy(update=constant)
        self._optimizer = ModelOptimizer(self._model, own, grad_clip, strategy, None, plugin_dirs)

    def values(self, rows: PaddedRows, passes: Passes) -> Tensor:
        """[N, T] float32 values before every response token."""
        return passes.scored(rows, self._model)

    def update(
        self,
        rows: PaddedRows,
        passes: Passes,
        mask_NT: Tensor,
        old_NT: Tensor,
        returns_NT: Tensor,
        *,
        update: int,
        step: int,
    ) -> dict[str, float]:
        """One update toward the returns over the tokens of `mask_NT`, which are in `passes`.

        old_NT: the values the returns were made with. update, step: as of `ModelOptimizer.step`.

        Raises: RoleError: the loss or its gradient is not finite.
        """
        # A mean over the trained tokens of the mini-batch; parts of it add up over passes and ranks.
        weights_NT = mask_NT / mask_NT.sum().clamp(min=1)
        total = 0.0
        for members in passes.own:
            part = torch.from_numpy(members).to(weights_NT.device)
            values_BT = self._model(**rows.model_inputs(members))
            width = values_BT.shape[1]
            loss_BT = value_loss(values_BT, old_NT[part, :width], returns_NT[part, :width], self._cliprange_value)
            loss = (loss_BT * weights_NT[part, :width]).sum()
            loss.backward()
            total += float(loss.detach())
        passes.idle_backward(rows, self._model)
        total = passes.add_metrics({"loss": total})["loss"]
        if not math.isfinite(total):
            raise RoleError(f"step {step}: the loss of the critic is {total}; lower trainer.critic.lr")
        metrics = {f"critic_{name}": value for name, value in self._optimizer.step(update, step).items()}
        residual_NT = returns_NT - old_NT
        # 1: the values are the returns, but for a constant; 0: as good as a constant. Of returns that are all equal
        # there is nothing to explain.
        left, variance = (_weighted_variance(each_NT, weights_NT) for each_NT in (residual_NT, returns_NT))
        return {
            "critic_loss": total,
            "critic_error": float((residual_NT.square() * weights_NT).sum()),
            "critic_explained_variance": 1.0 - left / variance if variance > 0 else 0.0,
            **metrics,
        }

    def state_files(self) -> dict[str, bytes]:
        """As of `TrainEngine.state_files`."""
        files = self._optimizer.state_files(_OPTIMIZER)
        tensors = self._strategy.full_state(self._model)
        return {**files, _MODEL: state_bytes(tensors)} if self._strategy.ranks.is_rank0 else files

    def load_state_files(self, files: Mapping[str, bytes]) -> None:
        """As of `TrainEngine.load_state_files`."""
        self._optimizer.load_state_files(_OPTIMIZER, files)
        SavedTensors(_MODEL, files, self._strategy.ranks).load(distinct_state(self._model))


def _weighted_variance(values_NT: Tensor, weights_NT: Tensor) -> float:
    mean = (values_NT * weights_NT).sum()
    return float(((values_NT - mean).square() * weights_NT).sum())


def value_loss(values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, cliprange: float) -> Tensor:
    """0.5 max((v - R)^2, (clip(v, old +- cliprange) - R)^2) of every token. PPO as in Baselines; arXiv:2005.12729."""
    near_BT = old_BT + (values_BT - old_BT).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square())
