"""Strategy: how the ranks share a model. It knows neither batches nor losses.

Every rank computes the gradient of its own rows; the loss has one denominator over the whole batch, so the gradient of
the batch is the sum over the ranks. A strategy says where weights lie, and where that sum is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rftdask.trainer.ranks import Ranks


class Strategy:
    """How a model lies on the ranks; this base is one rank with the whole of it.

    An engine calls `prepare` once, then in each step `reduce` and `clip` after its passes; all ranks make all calls.
    """

    passes_together: bool = False
    """Whether a pass moves weights between ranks, so that every rank must make the same number of them."""
    sharded: bool = False
    """Whether a rank holds only a part of weights and optimizer state."""
    reads_parts: bool = False
    """Whether a rank reads its part of the weights alone: models are laid out by `spread` before their files are read,
    and then by `prepare`."""
    group: Ranks | None = None
    """The ranks that compute the same rows with this one; None: no other."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def reading(self) -> Callable[[PreTrainedModel], None] | None:
        """`spread` where a rank reads its part alone; None: it reads all."""
        return self.spread if self.reads_parts else None

    def spread(self, model: PreTrainedModel) -> None:
        """Make weights that have no memory yet into parts of this rank (DTensors), in place."""

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Lay out the weights of `module`, all of whose passes are calls of itself; in place.

        layers: its repeated parts, each of which may be laid out by itself.
        """

    def within(self, module: torch.nn.Module, call: Callable[[], object]) -> None:
        """Call, as a pass of a prepared `module`, what makes passes of its parts. Called by all ranks."""
        call()

    def put_apart(self, module: torch.nn.Module) -> None:
        """Let go of weights that a pass brought together and that stay so for the next one."""

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Make each gradient the sum over the ranks, after the last backward pass of a step."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Scale the gradients down to `max_norm`; their norm before, the same on all ranks. Not finite: no scaling."""
        # Of spread gradients it is spread as well, and `full` puts the ranks' parts together.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = full(norm)
        # A factor of NaN or 0 would destroy the gradients; the caller skips the step and counts it.
        if torch.isfinite(total):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(total)

    def full_state(self, module: torch.nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The whole state dict on the CPU, of tied tensors the first name only; of it, `names` alone unless None.
        Empty on ranks other than 0.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in distinct_state(module).items():
            if names is None or name in names:
                # A call of all ranks where a tensor is spread, so it stands before the look at the rank.
                whole = full(tensor)
                if self.ranks.is_rank0:
                    tensors[name] = whole.cpu().contiguous()
        return tensors


def distinct_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict, sharing memory, of tied tensors the first name only."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        # keep_vars gives the parameters themselves, so that tied ones have one id; detached they are new objects.
        tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over the ranks."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1:
        # Rows first, which were spread last; PyTorch does so too, and warns that it takes two calls.
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def take_read(module: torch.nn.Module) -> Sequence[tuple[torch.nn.Module, str, DTensor]]:
    """Take the parts that were read as `spread` laid them out, and leave weights without a byte in their place, tied
    ones tied. Returns: (its module, its name there, the part).
    """
    read = [
        (part, name, rows)
        for part in module.modules()
        for name, rows in part.named_parameters(recurse=False)
        if isinstance(rows, DTensor)
    ]
    empty: dict[int, torch.nn.Parameter] = {}
    for part, name, rows in read:
        if id(rows) not in empty:  # by identity
            whole = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
            empty[id(rows)] = torch.nn.Parameter(whole, requires_grad=rows.requires_grad)
        setattr(part, name, empty[id(rows)])
    return read


def give_back(read: Iterable[tuple[torch.nn.Module, str, DTensor]], device: torch.device | None = None) -> None:
    """Put what `take_read` took into the weights in whose place they are now, laid out as those are: ranks send each
    other none. device: where they are to lie; None: where they are.
    """
    filled: dict[int, torch.nn.Parameter] = {}
    for part, name, rows in read:
        if id(rows) not in filled:
            laid, held = getattr(part, name), rows.to_local().detach()
            assert held.shape == laid.to_local().shape, f"{name}: {held.shape} was read, {laid.to_local().shape} laid"
            whole = DTensor(held.to(device or held.device), laid._spec, requires_grad=rows.requires_grad)
            filled[id(rows)] = torch.nn.Parameter(whole, requires_grad=rows.requires_grad)
        setattr(part, name, filled[id(rows)])


def layers_of(module: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    """The parts of a model whose class has one of these names."""
    wanted = set(names)
    return [part for part in module.modules() if type(part).__name__ in wanted]
