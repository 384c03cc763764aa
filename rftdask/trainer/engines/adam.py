"""AdamW over the trained parameters of one model: a clipped step, and its state as bytes. It knows no losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from rftdask.errors import RoleError
from rftdask.trainer.schedule import LearningRate


@dataclass(frozen=True)
class AdamOptions:
    learning_rate: LearningRate
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    """Largest gradient norm; 0 or less: no clipping, the norm is measured all the same."""


@dataclass(frozen=True)
class CriticOptions:
    """What a critic is built from; here, so that the options can be written without importing transformers."""

    model_path: str
    """Of the body."""
    adam: AdamOptions
    cliprange_value: float


class Adam:
    """Steps a model by the gradients it holds."""

    def __init__(self, model: torch.nn.Module, options: AdamOptions) -> None:
        self._options = options
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names = list(trained)
        self._parameters = list(trained.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=options.learning_rate.lr,
            betas=options.betas,
            weight_decay=options.weight_decay,
            foreach=True,
        )

    def step(self, step: int) -> dict[str, float]:
        """Optimizer step number `step`; the gradients are gone after it. Raises: RoleError: they are not finite."""
        clip = self._options.grad_clip if self._options.grad_clip > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, clip))
        if not norm < float("inf"):
            raise RoleError(
                f"step {step}: the gradient norm is {norm}; lower the learning rate or look at the batch in the ledger"
            )
        lr = self._options.learning_rate.at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr}

    def state(self) -> bytes:
        """Its state in safetensors format, by names of parameters."""
        states: Mapping[int, Mapping[str, Tensor]] = self._optimizer.state_dict()["state"]
        tensors = {
            f"{self._names[index]}/{key}": torch.as_tensor(value).contiguous()
            for index, state in states.items()
            for key, value in state.items()
        }
        return save(tensors)

    def load_state(self, data: bytes) -> None:
        """Restore what `state` gave, to the bit."""
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in load(data).items():
            parameter, _, key = name.rpartition("/")
            states.setdefault(self._names.index(parameter), {})[key] = tensor
        self._optimizer.load_state_dict({"state": states, "param_groups": self._optimizer.state_dict()["param_groups"]})
