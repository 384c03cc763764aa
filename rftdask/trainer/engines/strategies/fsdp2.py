"""fsdp2: every rank holds a part of each weight, gradient and optimizer state (PyTorch's `fully_shard`).

The weights of a layer are brought together for its forward pass, and again for its backward pass; those outside of the
layers (embeddings, head) stay together from the forward to the backward pass. A gradient is added up and cut in each
backward pass, so a rank never holds all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

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
        self._mesh = DeviceMesh.from_group(group, device.type)
        # Weights stay float32 where they lie, and are brought together in bfloat16 where a GPU multiplies.
        multiply = torch.bfloat16 if device.type == "cuda" else None
        self._precision = MixedPrecisionPolicy(
            param_dtype=multiply, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # On a CPU it is in host memory already.
        self._offload = CPUOffloadPolicy() if section.offload_policy and device.type != "cpu" else OffloadPolicy()

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """See Strategy; each layer by itself, then what is outside of the layers."""
        for layer in layers:
            self._shard(layer, self._section.reshard_after_forward)
        # Last, and not put apart again after the forward pass: its weights are needed first in the backward pass.
        self._shard(module, False)
        for number, layer in enumerate(layers if self._section.prefetch_layers else ()):
            assert isinstance(layer, FSDPModule)
            # While a layer computes, the weights of the next ones travel; in the backward pass those before it.
            ahead = layers[number + 1 : number + 1 + self._section.prefetch_layers]
            behind = layers[max(0, number - self._section.prefetch_layers) : number][::-1]
            layer.set_modules_to_forward_prefetch([other for other in ahead if isinstance(other, FSDPModule)])
            layer.set_modules_to_backward_prefetch([other for other in behind if isinstance(other, FSDPModule)])

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
