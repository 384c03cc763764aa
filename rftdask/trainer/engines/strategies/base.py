"""Strategy: how the ranks share a model. It knows neither batches nor losses.

Every rank computes the gradient of its own rows; the loss has one denominator over the whole batch, so the gradient of
the batch is the sum over the ranks. A strategy places the weights and makes that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rftdask.processes.ranks import Ranks

_BUCKET = 2**25  # Elements summed in one call: 128 MiB of float32. Fixed, since the order of additions depends on it.


class Strategy:
    """Layout of a model on the ranks; this base class is one rank with the whole model.

    An engine calls `prepare` once, then `reduce` and `clip` after the passes of each update; all ranks make all calls.
    """

    passes_together: bool = False
    """True if a pass moves weights between ranks, so that all ranks must make the same number of passes."""
    sharded: bool = False
    """True if a rank reads and holds only a part of weights and optimizer state: `spread` lays models out before their
    files are read."""
    group: Ranks | None = None
    """Ranks that compute the same rows as this one; None: only this rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def reading(self) -> Callable[[PreTrainedModel], None] | None:
        """`spread` if a rank only reads its part; None: it reads everything."""
        return self.spread if self.sharded else None

    def spread(self, model: PreTrainedModel) -> None:
        """Turn weights on the meta device into this rank's parts (DTensors), in place."""

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Lay out the weights of `module` in place; only `module` itself may be called afterwards.

        layers: its repeated layers, which may be laid out separately.
        """

    def within(self, module: torch.nn.Module, call: Callable[[], object]) -> None:
        """Run `call`, which calls submodules of a prepared `module`, as a pass of `module`. Called by all ranks."""
        call()

    def offload(self, module: torch.nn.Module) -> None:
        """Free weights that a pass gathered and that would stay gathered until the next one."""

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Sum each gradient over the ranks, after the last backward pass of an update."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """Scale the gradients down to `max_norm`, and return their norm before, the same on all ranks.

        A norm that is not finite leaves them unscaled.
        """
        # The norm of sharded gradients is a DTensor, which `full` sums.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = full(norm)
        # A factor of NaN or 0 would destroy the gradients; the caller skips and counts the update.
        if torch.isfinite(total):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(total)

    def full_state(self, module: torch.nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the `distinct_state`, or only `names`, on the CPU; empty except on rank 0. Called by all ranks."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in distinct_state(module).items():
            if names is None or name in names:
                whole = full(tensor)
                if self.ranks.is_rank0:
                    tensors[name] = whole.cpu().contiguous()
        return tensors


class DDP(Strategy):
    """All ranks hold equal weights: same files, same seed, same sums, once per step after its last backward pass."""

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """See Strategy; bucket by bucket in the order of the parameters, so that sums repeat to the bit."""
        for bucket in _buckets(parameters):
            # A parameter without a gradient here may have one on another rank.
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            for parameter, total in zip(bucket, _sums(self.ranks, gradients), strict=True):
                # Views of one flat tensor save a copy of all gradients.
                parameter.grad = total.view_as(parameter)


def add_up(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in place."""
    for bucket in _buckets(tensors) if ranks.size > 1 else ():
        for tensor, total in zip(bucket, _sums(ranks, bucket), strict=True):
            tensor.copy_(total.view_as(tensor))


def _sums(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # One large message is faster than hundreds of small ones.
    flat = ranks.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    sums: tuple[Tensor, ...] = flat.split([tensor.numel() for tensor in tensors])
    return sums


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and (
            # Of one dtype: the tensors of a bucket are sent as one.
            sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET or parameter.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def distinct_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the state dict, sharing memory, with tied tensors under their first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        # keep_vars returns the parameters themselves, so tied ones have the same id.
        tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


def full(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded over the ranks."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1:
        # Rows first, as PyTorch does itself, with a warning that it takes two calls.
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def take_read(module: torch.nn.Module) -> Sequence[tuple[torch.nn.Module, str, DTensor]]:
    """Replace weights that were read in the layout of `spread` by meta tensors; tied ones stay tied. Returns: (module,
    name in the module, the DTensor that was read) for each."""
    read = [
        (owner, name, weight)
        for owner in module.modules()
        for name, weight in owner.named_parameters(recurse=False)
        if isinstance(weight, DTensor)
    ]
    empty: dict[int, torch.nn.Parameter] = {}
    for owner, name, weight in read:
        if id(weight) not in empty:
            meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            empty[id(weight)] = torch.nn.Parameter(meta, requires_grad=weight.requires_grad)
        setattr(owner, name, empty[id(weight)])
    return read


def give_back(read: Iterable[tuple[torch.nn.Module, str, DTensor]], device: torch.device | None = None) -> None:
    """Put the local data of `take_read`, moved to `device`, into the weights now in their place, without
    communication."""
    filled: dict[int, torch.nn.Parameter] = {}
    for owner, name, weight in read:
        if id(weight) not in filled:
            target, data = getattr(owner, name), weight.to_local().detach()
            shape = target.to_local().shape
            assert data.shape == shape, f"{name}: {data.shape} was read, {shape} is the layout"
            whole = DTensor(data.to(device or data.device), target._spec, requires_grad=weight.requires_grad)
            filled[id(weight)] = torch.nn.Parameter(whole, requires_grad=weight.requires_grad)
        setattr(owner, name, filled[id(weight)])


def layers_of(module: torch.nn.Module, names: Iterable[str]) -> list[torch.nn.Module]:
    """Return the submodules whose class has one of these names."""
    class_names = set(names)
    return [part for part in module.modules() if type(part).__name__ in class_names]
