"""Strategy: how the ranks share a model. It knows neither batches nor losses.

Every rank computes the gradient of its own rows; the loss has one denominator over the whole batch, so the gradient of
the batch is the sum over the ranks. A strategy says where weights lie, and where that sum is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rftdask.trainer.ranks import Ranks


class Strategy(ABC):
    """What an engine asks of it, in the order of a step: `prepare` once; forward and backward passes; `reduce`; `clip`.

    All calls but `passes_together` are made by all ranks.
    """

    passes_together: bool = False
    """Whether a pass moves weights between ranks, so that every rank must make the same number of them."""
    sharded: bool = False
    """Whether a rank holds only a part of weights and optimizer state."""
    group: Ranks | None = None
    """The ranks that compute the same rows with this one; None: no other."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def num_parts(self) -> int:
        """Into how many parts the optimizer state is cut; the first so many ranks hold all of them."""
        return self.ranks.size if self.sharded else 1

    @abstractmethod
    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Lay out the weights of `module`, all of whose passes are calls of itself; in place.

        layers: its repeated parts, each of which may be laid out by itself.
        """

    @abstractmethod
    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Make each gradient the sum over the ranks, after the last backward pass of a step."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Scale the gradients down to `max_norm`; their norm before, the same on all ranks. Not finite: no scaling."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = full(norm)
        if torch.isfinite(total):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(total)

    def full_state(self, module: torch.nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The whole state dict on the CPU, of tied tensors the first name only; of it, `names` alone unless None.
        Empty on ranks other than 0.
        """
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) in seen or (names is not None and name not in names):
                continue
            seen.add(id(tensor))
            whole = full(tensor.detach())
            if self.ranks.leads:
                tensors[name] = whole.cpu().contiguous()
        return tensors

    def load_full_state(self, module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> set[str]:
        """Give the module these weights, of which a rank keeps its part; names of the module that are not in it."""
        own = module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in tensors.items():
                local(own[name]).copy_(part_of(own[name], tensor))
        return own.keys() - tensors.keys()


class Single(Strategy):
    """One rank with the whole model."""

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        pass

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        pass


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over the ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `tensor`, which has the same shape."""
    return whole[box_of(tensor)]


def spread_like(tensor: Tensor, part: Tensor) -> Tensor:
    """This rank's `part` of a tensor that is spread over the ranks as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part.to(tensor.to_local().device),
        tensor.device_mesh,
        tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def box_of(tensor: Tensor) -> tuple[slice, ...]:
    """Which part this rank holds, by dimension: of n places over W ranks, ceil(n / W) each until none are left."""
    box = [slice(0, count) for count in tensor.shape]
    for placement in tensor.placements if isinstance(tensor, DTensor) else ():
        if isinstance(placement, Shard):
            assert isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1
            count, mesh = tensor.shape[placement.dim], tensor.device_mesh
            each = -(-count // mesh.size())
            start = min(count, mesh.get_local_rank() * each)
            box[placement.dim] = slice(start, min(count, start + each))
    return tuple(box)


def layers_of(module: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    """The parts of a model whose class has one of these names."""
    wanted = set(names)
    return [part for part in module.modules() if type(part).__name__ in wanted]
