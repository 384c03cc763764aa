"""fsdp2: every rank holds a part of each weight, gradient and optimizer state (PyTorch's `fully_shard`).

The weights of a layer are brought together for its forward pass, and again for its backward pass; those outside of the
layers (embeddings, head) stay together from the forward to the backward pass. A gradient is added up and cut in each
backward pass, so a rank never holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rftdask.config.schema.trainer import TrainerConfig
from rftdask.trainer.engines.strategies.base import Strategy
from rftdask.trainer.ranks import Ranks


class FSDP2(Strategy):
    """Cuts each weight along its first dimension."""

    passes_together = True
    sharded = True

    def __init__(self, ranks: Ranks, device: torch.device, section: TrainerConfig) -> None:
        super().__init__(ranks)
        self._section = section
        group = ranks.group or dist.group.WORLD
        assert group is not None, "ranks have met before they share a model"
        self.mesh = self._mesh = DeviceMesh.from_group(group, device.type)
        # Weights stay as they are where they lie (float32, or of 16 bits if they are frozen), and are brought together
        # in bfloat16 where a GPU multiplies.
        multiply = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._precision = MixedPrecisionPolicy(
            param_dtype=multiply, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # On a CPU it is in host memory already.
        self._offload = CPUOffloadPolicy() if section.offload_policy and device.type != "cpu" else OffloadPolicy()

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """See Strategy; each layer by itself, then what is outside of the layers. Rows that were read as `mesh` says
        stay where they are.
        """
        # PyTorch would cut them a second time: it is given weights without a byte, and then the rows as its parts.
        read = [
            (part, name, rows)
            for part in module.modules()
            for name, rows in part.named_parameters(recurse=False)
            if isinstance(rows, DTensor)
        ]
        like = {id(rows): torch.empty(rows.shape, dtype=rows.dtype, device="meta") for _, _, rows in read}
        empty = {id(r): torch.nn.Parameter(like[id(r)], requires_grad=r.requires_grad) for _, _, r in read}
        for part, name, rows in read:  # by identity: tied weights stay tied
            setattr(part, name, empty[id(rows)])
        for layer in layers:
            self._shard(layer, self._section.reshard_after_forward)
        # Last, and not put apart again after the forward pass: its weights are needed first in the backward pass.
        self._shard(module, False)
        filled: dict[int, torch.nn.Parameter] = {}
        for part, name, rows in read:
            if id(rows) not in filled:
                laid = getattr(part, name)
                held = rows.to_local().detach().to("cpu" if self._section.offload_policy else rows.device)
                # Laid out as PyTorch has decided, with the rows that this rank has read: ranks send each other none.
                filled[id(rows)] = torch.nn.Parameter(
                    DTensor(held, laid._spec, requires_grad=rows.requires_grad), requires_grad=rows.requires_grad
                )
            setattr(part, name, filled[id(rows)])
        for number, layer in enumerate(layers if self._section.prefetch_layers else ()):
            assert isinstance(layer, FSDPModule)
            # While a layer computes, the weights of the next ones travel; in the backward pass those before it.
            ahead = layers[number + 1 : number + 1 + self._section.prefetch_layers]
            behind = layers[max(0, number - self._section.prefetch_layers) : number][::-1]
            layer.set_modules_to_forward_prefetch([other for other in ahead if isinstance(other, FSDPModule)])
            layer.set_modules_to_backward_prefetch([other for other in behind if isinstance(other, FSDPModule)])

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
