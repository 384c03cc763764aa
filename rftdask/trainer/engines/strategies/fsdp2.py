"""fsdp2: every rank holds a part of each weight, gradient and optimizer state (PyTorch's `fully_shard`).

The weights of a layer are brought together for its forward pass, and again for its backward pass; those outside of the
layers (embeddings, head) stay together from the forward to the backward pass. A gradient is added up and cut in each
backward pass, so a rank never holds all of it. Where neighbors cut layers among them (tensor.py), what a rank has of a
cut weight is spread over the ranks that have the same part of it: a mesh of two dimensions.
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
from rftdask.trainer.engines.strategies.base import Strategy, give_back, local, take_read
from rftdask.trainer.engines.strategies.tensor import TensorParallel, clip_parts, is_cut
from rftdask.trainer.ranks import Ranks


class FSDP2(Strategy):
    """Cuts each weight along its first dimension."""

    passes_together = True
    sharded = True

    reads_parts = True

    def __init__(
        self, ranks: Ranks, device: torch.device, section: TrainerConfig, cut: TensorParallel | None = None
    ) -> None:
        """cut: how neighbors cut layers among them, of which each then holds some rows only; None: they do not."""
        super().__init__(ranks)
        self._section, self._cut = section, cut
        if cut is None:
            group = ranks.group or dist.group.WORLD
            assert group is not None, "ranks have met before they share a model"
            self._mesh = DeviceMesh.from_group(group, device.type)
        else:
            # Weights that are cut lie on both dimensions of the mesh, the others on its first.
            self.group, self._mesh = cut.group, cut.across_mesh
        # Weights stay as they are where they lie (float32, or of 16 bits if they are frozen), and are brought together
        # in bfloat16 where a GPU multiplies.
        multiply = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._precision = MixedPrecisionPolicy(
            param_dtype=multiply, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # On a CPU it is in host memory already.
        self._offload = CPUOffloadPolicy() if section.offload_policy and device.type != "cpu" else OffloadPolicy()

    def spread(self, model: PreTrainedModel) -> None:
        """See Strategy; rows of each weight, where layers are cut of the part that this rank has of it.

        Raises: DataError: as of `TensorParallel.cut`.
        """
        if self._cut is not None:
            self._cut.spread(model)
        for module in model.modules():
            for name, laid in list(module.named_parameters(recurse=False)):
                cuts, num_cuts = (
                    (laid.placements, self._cut.mesh.size()) if self._cut and isinstance(laid, DTensor) else ((), 1)
                )
                whole = torch.empty(laid.shape, dtype=laid.dtype, device="meta")
                # A weight that is cut along its rows is cut first: a rank has some rows of its part.
                rows_are_cut = any(placement.is_shard(0) for placement in cuts)
                along: Placement = _StridedShard(0, split_factor=num_cuts) if rows_are_cut else Shard(0)
                mesh = self._cut.whole_mesh if self._cut and cuts else self._mesh
                read = distribute_tensor(whole, mesh, [along, *cuts], src_data_rank=None)
                setattr(module, name, torch.nn.Parameter(read, requires_grad=laid.requires_grad))

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """See Strategy; each layer by itself, then what is outside of the layers. What was read as `spread` says stays
        where it is. Raises: DataError: as of `TensorParallel.cut`.
        """
        # PyTorch would cut them a second time: it is given weights without a byte, and then the rows as its parts.
        read = take_read(module)
        if self._cut is not None:
            self._cut.cut(module)
        for layer in layers:
            self._shard(layer, self._section.reshard_after_forward)
        # Last, and not put apart again after the forward pass: its weights are needed first in the backward pass.
        self._shard(module, False)
        give_back(read, torch.device("cpu") if self._section.offload_policy else None)
        if self._cut is not None:
            self._cut.note_partial(module)
        for number, layer in enumerate(layers if self._section.prefetch_layers else ()):
            assert isinstance(layer, FSDPModule)
            # While a layer computes, the weights of the next ones travel; in the backward pass those before it.
            ahead = layers[number + 1 : number + 1 + self._section.prefetch_layers]
            behind = layers[max(0, number - self._section.prefetch_layers) : number][::-1]
            layer.set_modules_to_forward_prefetch([other for other in ahead if isinstance(other, FSDPModule)])
            layer.set_modules_to_backward_prefetch([other for other in behind if isinstance(other, FSDPModule)])

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """See Strategy; backward passes have added up all but what neighbors have only their heads' part of."""
        if self._cut is not None:
            self._cut.add_partial(parameters)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """See Strategy; by the ranks' own parts where layers are cut, since PyTorch mixes no tensors of two meshes."""
        if self._cut is None:
            return super().clip(parameters, max_norm)
        gradients = [p.grad for p in parameters if p.grad is not None]
        cut = [local(g) for g in gradients if is_cut(g)]
        # Neighbors hold the same part of these, which all of them count.
        whole = [local(g) for g in gradients if not is_cut(g)]
        squares = get_total_norm(cut).square() + get_total_norm(whole).square() / self._cut.mesh.size()
        return clip_parts(cut + whole, self.ranks.all_reduce(squares).sqrt(), max_norm)

    def within(self, module: torch.nn.Module, call: Callable[[], object]) -> None:
        """See Strategy; the weights are apart again after it, those outside of the layers, too."""
        vars(module)["forward"] = call  # between what PyTorch does before and after a pass
        try:
            module()
        finally:
            del vars(module)["forward"]
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def put_apart(self, module: torch.nn.Module) -> None:
        """See Strategy: what is outside of the layers stays together after a pass without a way back."""
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
        # The sum over the ranks, where PyTorch takes the mean: the loss has its denominator already.
        # Each backward pass makes it, so that `reduce` has nothing left to do.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
