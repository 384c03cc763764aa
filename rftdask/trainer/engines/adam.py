"""AdamW over the trained parameters of one model: a clipped step, and its state as bytes. It knows no losses.

Its state at rest is our own: safetensors files, one for each rank that holds a part, whose heads say in JSON where
each tensor begins in the whole. So any number of ranks can read what any other number wrote, to the bit. (The format of
`torch.distributed.checkpoint` keeps its index as a pickle, which we keep none of, and wants a file system.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor

from rftdask.errors import RoleError
from rftdask.trainer.engines.strategies.base import Strategy, box_of, local, spread_like
from rftdask.trainer.schedule import LearningRate

MAX_SKIPPED_IN_A_ROW = 3
"""Steps with a gradient that is not finite: one may be chance, this many are not."""
_HEAD = "rftdask"


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

    def __init__(self, model: torch.nn.Module, options: AdamOptions, strategy: Strategy) -> None:
        self._options = options
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
            lr=options.learning_rate.lr,
            betas=options.betas,
            weight_decay=options.weight_decay,
            foreach=True,
        )

    def step(self, step: int) -> dict[str, float]:
        """Optimizer step number `step`; the gradients are gone after it. A gradient that is not finite changes nothing,
        and is counted.

        Raises: RoleError: too many of them in a row.
        """
        self._strategy.reduce(self._parameters)
        clip = self._options.grad_clip if self._options.grad_clip > 0 else math.inf
        norm = self._strategy.clip(self._parameters, clip)
        lr = self._options.learning_rate.at(step)
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = 0 if finite else self._num_skipped_in_a_row + 1
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RoleError(
                f"step {step}: the gradient norm is {norm}, and was not finite in the {MAX_SKIPPED_IN_A_ROW - 1} steps "
                "before; lower the learning rate or look at the batches in the ledger"
            )
        return {**({"grad_norm": norm} if finite else {}), "lr": lr, "num_skipped_steps": float(not finite)}

    def state_files(self, name: str) -> dict[str, bytes]:
        """Its state by names of parameters, in safetensors format: `name`, and if it is spread over ranks each rank's
        part. A rank gives what it is to write.
        """
        ranks = self._strategy.ranks
        if ranks.rank >= self._strategy.num_parts:
            return {}
        states: Mapping[int, Mapping[str, Tensor]] = self._optimizer.state_dict()["state"]
        tensors: dict[str, Tensor] = {}
        starts: dict[str, list[int]] = {}
        for index, parameter in enumerate(self._trained):
            for key, value in states.get(index, {}).items():
                tensors[f"{parameter}/{key}"] = local(torch.as_tensor(value)).cpu().contiguous()
                starts[f"{parameter}/{key}"] = [part.start for part in box_of(torch.as_tensor(value))]
        head = {
            "num_files": self._strategy.num_parts,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
            "starts": starts,
        }
        # One entry: the library writes several in any order, and the same state should give the same bytes.
        return {_file_name(name, ranks.rank): save(tensors, {_HEAD: json.dumps(head, sort_keys=True)})}

    def load_state_files(self, name: str, read: Callable[[str], bytes]) -> None:
        """Restore what `state_files` gave, to the bit, however many ranks wrote it and read it."""
        held: dict[str, Tensor] = {}
        number, num_files = 0, 1
        while number < num_files:
            data = read(_file_name(name, number))
            head = _head(data)
            num_files = head["num_files"]
            self._num_skipped_in_a_row = head["num_skipped_in_a_row"]
            for key, tensor in load(data).items():
                self._take(held, key, tensor, head["starts"][key])
            number += 1
        states: dict[int, dict[str, Tensor]] = {}
        for index, (parameter, like) in enumerate(self._trained.items()):
            own = {key.rpartition("/")[2]: value for key, value in held.items() if key.rpartition("/")[0] == parameter}
            if own:
                states[index] = {key: spread_like(like, value) if value.dim() else value for key, value in own.items()}
        self._optimizer.load_state_dict({"state": states, "param_groups": self._optimizer.state_dict()["param_groups"]})

    def _take(self, held: dict[str, Tensor], key: str, tensor: Tensor, starts: Sequence[int]) -> None:
        """Of a file's tensor, which begins at `starts` in the whole, the part that this rank holds."""
        parameter = self._trained[key.rpartition("/")[0]]
        if not tensor.dim():
            held[key] = tensor  # a count of steps, the same in all files
            return
        box = box_of(parameter)
        part = held.setdefault(key, torch.empty([own.stop - own.start for own in box], dtype=tensor.dtype))
        low = [max(own.start, start) for own, start in zip(box, starts, strict=True)]
        ends = [min(own.stop, start + size) for own, start, size in zip(box, starts, tensor.shape, strict=True)]
        if all(first < end for first, end in zip(low, ends, strict=True)):
            begins = [own.start for own in box]
            part[_within(low, ends, begins)] = tensor[_within(low, ends, starts)]


def _within(low: Sequence[int], ends: Sequence[int], begins: Sequence[int]) -> tuple[slice, ...]:
    """A box of the whole as one of a part that begins at `begins`."""
    return tuple(slice(a - begin, b - begin) for a, b, begin in zip(low, ends, begins, strict=True))


def _file_name(name: str, number: int) -> str:
    """optim.safetensors, then optim-1.safetensors and so on."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{number}.{ending}" if number else name


def _head(data: bytes) -> dict[str, Any]:
    """What `state_files` put into the head of a safetensors file, which is its size in 8 bytes, then JSON."""
    size = int.from_bytes(data[:8], "little")
    return dict(json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_HEAD]))
