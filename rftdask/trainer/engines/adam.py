"""AdamW over the trained parameters of one model: a clipped step, and its state as files. It knows no losses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rftdask.config.schema.optimizer import OptimizerConfig
from rftdask.errors import RoleError
from rftdask.trainer.engines.learning_rate import learning_rate
from rftdask.trainer.engines.strategies.base import Strategy
from rftdask.trainer.engines.tensor_files import SavedTensors, save_tensors

MAX_SKIPPED_IN_A_ROW = 3
"""Updates with a gradient that is not finite: one may be chance, this many are not."""
_NUM_SKIPPED = "num_skipped_in_a_row"


class Adam:
    """Steps a model by the gradients it holds."""

    def __init__(
        self,
        model: torch.nn.Module,
        section: OptimizerConfig,
        grad_clip: float,
        strategy: Strategy,
        total_steps: int | None = None,
    ) -> None:
        """
        Args:
            grad_clip: largest norm of the gradient; 0: no limit, the norm is measured all the same.
            total_steps: as of `learning_rate`, which raises where it has to be known.
        """
        self._rate = learning_rate(section, total_steps)
        self._max_norm = grad_clip if grad_clip > 0 else math.inf
        self._strategy = strategy
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        # Spread ones last: PyTorch steps many tensors by one call if all are spread or none is.
        trained.sort(key=lambda named: isinstance(named[1], DTensor))
        self._trained = dict(trained)
        self._parameters = list(self._trained.values())
        parts = [[p for p in self._parameters if isinstance(p, DTensor) is spread] for spread in (False, True)]
        self._num_skipped_in_a_row = 0
        self._optimizer = torch.optim.AdamW(
            [{"params": part} for part in parts if part],
            lr=section.lr,
            betas=section.betas,
            weight_decay=section.weight_decay,
            foreach=True,
        )

    def step(self, update: int, step: int) -> dict[str, float]:
        """Update number `update` of the run, counted from 1, as a part of `step`; the gradients are gone after it. A
        gradient that is not finite changes nothing, and is counted.

        Raises: RoleError: too many of them in a row.
        """
        self._strategy.reduce(self._parameters)
        norm = self._strategy.clip(self._parameters, self._max_norm)
        lr = self._rate(update)
        # The norm is the same on all ranks, so that they all make this step or none does.
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        # Also where the step was skipped: a gradient that is not finite must not be added to the next.
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = 0 if finite else self._num_skipped_in_a_row + 1
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RoleError(
                f"step {step}: the gradient norm is {norm}, and was not finite in the {MAX_SKIPPED_IN_A_ROW - 1} "
                "updates before; lower the learning rate or look at the batches in the ledger"
            )
        return {**({"grad_norm": norm} if finite else {}), "lr": lr, "num_skipped_steps": float(not finite)}

    def state_files(self, name: str) -> dict[str, bytes]:
        """Its state by names of parameters, as `save_tensors` does. Called by all ranks."""
        # By names of parameters and not by their numbers, which depend on how they are sorted here.
        states: Mapping[int, Mapping[str, Tensor]] = self._optimizer.state_dict()["state"]
        # A resumed run counts on: else a crash every few steps would hide that none of them is taken.
        tensors = {_NUM_SKIPPED: torch.tensor(self._num_skipped_in_a_row)}
        for index, parameter in enumerate(self._trained):
            tensors |= {f"{parameter}/{key}": value for key, value in states.get(index, {}).items()}
        return save_tensors(name, tensors, self._strategy.ranks, spread=self._strategy.sharded)

    def load_state_files(self, name: str, files: Mapping[str, bytes]) -> None:
        """Restore what `state_files` gave, to the bit, however many ranks wrote it and read it. Called by all ranks.

        Raises: RoleError: it is not the state of this model's optimizer.
        """
        saved = SavedTensors(name, files, self._strategy.ranks)
        num_skipped = torch.tensor(self._num_skipped_in_a_row)
        held: dict[str, dict[str, Tensor]] = {parameter: {} for parameter in self._trained}
        tensors = {_NUM_SKIPPED: num_skipped}
        for full_name in saved.names:
            parameter, _, key = full_name.rpartition("/")
            if parameter in held:
                tensors[full_name] = held[parameter][key] = saved.empty_like(full_name, self._trained[parameter])
        saved.load(tensors)
        self._num_skipped_in_a_row = int(num_skipped)
        # torch's optimizers number their parameters; on storage they go by name, which no change of the order moves.
        states = {index: own for index, own in enumerate(held.values()) if own}
        self._optimizer.load_state_dict({"state": states, "param_groups": self._optimizer.state_dict()["param_groups"]})
