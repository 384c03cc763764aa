"""fsdp2: every rank holds a part of each weight, gradient and optimizer state (PyTorch's `fully_shard`).

The weights of a layer are gathered for its forward pass, and again for its backward pass; those outside the layers
(embeddings, head) stay gathered from the forward to the backward pass. Gradients are reduced and scattered in each
backward pass, so a rank never holds all of them. With tensor parallelism (tensor.py) each part of a split weight is
sharded over the ranks that have the same part: a mesh of two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from rftdask.config.schema.trainer import TrainerConfig
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import Strategy, give_back, local, take_read
from rftdask.trainer.engines.strategies.tensor import TensorParallel, clip_parts, is_cut


class FSDP2(Strategy):
    """Shards each weight along its first dimension."""

    passes_together = True
    sharded = True

    def __init__(
        self, ranks: Ranks, device: torch.device, section: TrainerConfig, cut: TensorParallel | None = None
    ) -> None:
        """cut: tensor parallelism within groups of neighbors; None: layers are not split."""
        super().__init__(ranks)
        self._section, self._cut = section, cut
        if cut is None:
            group = ranks.group or dist.group.WORLD
            assert group is not None, "ranks have met before they share a model"
            self._mesh = DeviceMesh.from_group(group, device.type)
        else:
            # Split weights use both dimensions of the mesh, the others only its first.
            self.group, self._mesh = cut.group, cut.across_mesh
        # Stored weights keep their dtype; on a GPU they are gathered in bfloat16.
        gathered = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._precision = MixedPrecisionPolicy(
            param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # Weights of a CPU are in host memory already.
        self._offload = CPUOffloadPolicy() if section.offload_policy and device.type != "cpu" else OffloadPolicy()

    def spread(self, model: PreTrainedModel) -> None:
        """See Strategy; rows of each weight, or of this rank's part of a split weight.

        Raises: DataError: see `TensorParallel.cut`.
        """
        if self._cut is not None:
            self._cut.spread(model)
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                cuts, num_cuts = (
                    (weight.placements, self._cut.mesh.size()) if self._cut and isinstance(weight, DTensor) else ((), 1)
                )
                whole = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                # Strided: a weight that is split along its rows is split first, then sharded.
                rows_are_cut = any(placement.is_shard(0) for placement in cuts)
                along: Placement = _StridedShard(0, split_factor=num_cuts) if rows_are_cut else Shard(0)
                mesh = self._cut.whole_mesh if self._cut and cuts else self._mesh
                spread = distribute_tensor(whole, mesh, [along, *cuts], src_data_rank=None)
                setattr(module, name, torch.nn.Parameter(spread, requires_grad=weight.requires_grad))

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """See Strategy; shards each layer, then the rest. Weights laid out by `spread` keep their data.

        Raises: DataError: see `TensorParallel.cut`.
        """
        # PyTorch would shard them a second time: it gets meta tensors, which then get the data.
        read = take_read(module)
        if self._cut is not None:
            self._cut.cut(module)
        for layer in layers:
            self._shard(layer, self._section.reshard_after_forward)
        # Not resharded after the forward pass: these weights are needed first in the backward pass.
        self._shard(module, False)
        give_back(read, torch.device("cpu") if self._section.offload_policy else None)
        if self._cut is not None:
            self._cut.note_partial(module)
        for number, layer in enumerate(layers if self._section.prefetch_layers else ()):
            assert isinstance(layer, FSDPModule)
            # While a layer computes, the weights of the next layers are gathered; in the backward pass the previous.
            ahead = layers[number + 1 : number + 1 + self._section.prefetch_layers]
            behind = layers[max(0, number - self._section.prefetch_layers) : number][::-1]
            layer.set_modules_to_forward_prefetch([other for other in ahead if isinstance(other, FSDPModule)])
            layer.set_modules_to_backward_prefetch([other for other in behind if isinstance(other, FSDPModule)])

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """See Strategy; only for partial gradients of tensor parallelism, since backward passes sum the others."""
        if self._cut is not None:
            self._cut.add_partial(parameters)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """See Strategy; from local parts if layers are split, since PyTorch does not mix tensors of two meshes."""
        if self._cut is None:
            return super().clip(parameters, max_norm)
        gradients = [p.grad for p in parameters if p.grad is not None]
        cut = [local(g) for g in gradients if is_cut(g)]
        # Every neighbor has the same part of these, hence the division.
        whole = [local(g) for g in gradients if not is_cut(g)]
        squares = get_total_norm(cut).square() + get_total_norm(whole).square() / self._cut.mesh.size()
        return clip_parts(cut + whole, self.ranks.all_reduce(squares).sqrt(), max_norm)

    def within(self, module: torch.nn.Module, call: Callable[[], object]) -> None:
        """See Strategy; all weights are resharded afterwards."""
        vars(module)["forward"] = call  # runs between PyTorch's hooks before and after a pass
        try:
            module()
        finally:
            del vars(module)["forward"]
        self.offload(module)

    def offload(self, module: torch.nn.Module) -> None:
        """See Strategy; weights outside the layers stay gathered after a forward pass without a backward pass."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _shard(self, module: torch.nn.Module, reshard_after_forward: bool) -> None:
        sharded = fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=self._precision,
            offload_policy=self._offload,
        )
        # Sum instead of PyTorch's mean: the loss already has its denominator.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
