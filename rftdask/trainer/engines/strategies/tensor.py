"""Tensor parallel: the ranks of a group hold a part of each layer's weights, gradients and optimizer state, cut as the
model's own plan says (`tp_plan` of transformers), and compute the same rows together; groups compute other rows.

A column-wise layer gives each rank some heads or inner features, the row-wise layer after it adds them up. What the
plan leaves out (norms, embeddings) every rank holds. Gradients are added over the groups once a step, as with ddp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from rftdask.errors import DataError
from rftdask.trainer.engines.strategies.base import Strategy, local
from rftdask.trainer.engines.strategies.ddp import add_up
from rftdask.trainer.ranks import Ranks

_CUT = {"colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep"}
_LEFT_WHOLE = "embedding_rowwise"
"""Embeddings, which every rank then holds: looking up costs nothing, and the output layer may share them."""
_PARTIAL = "replicated_with_grad_allreduce"
"""Weights that all ranks hold and use for their own heads, so that each has a part of the gradient. transformers adds
them up after every backward pass, which counts earlier passes of a step again; we do it once, at its end."""


class TensorParallel(Strategy):
    """Cuts layers within a group of neighbors."""

    sharded = True

    def __init__(self, ranks: Ranks, group: Ranks, across: Ranks, device: torch.device) -> None:
        """group: the neighbors that share a model with this rank; across: the ranks that hold the same part of it."""
        super().__init__(ranks)
        self.group = self._group = group
        self._across = across
        members = group.group or dist.group.WORLD
        assert members is not None, "ranks have met before they share a model"
        self._mesh = DeviceMesh.from_group(members, device.type)
        self._partial: set[int] = set()

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Raises: DataError: the model has no plan, one that we do not know, or sizes that it does not divide."""
        model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
        plan = plan_of(model, self._mesh.size())
        for name, parameter in model.named_parameters():
            if plan.get(replace_layer_number_by_wildcard(name.rpartition(".")[0])) == _PARTIAL:
                # By identity: the plan goes by names, and `reduce` is given parameters.
                self._partial.add(id(parameter))
        apply_tensor_parallelism(model, self._mesh, {n: style for n, style in plan.items() if style in _CUT})

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """See Strategy; over the neighbors what each has only its part of, then everything over the groups."""
        for parameter in parameters:
            # All ranks give the same tensors to the sums below, so one without a gradient gives zeros.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                # A gradient that is a partial sum becomes what its parameter is: cut, or whole on every rank.
                gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad = gradient
        add_up(self._group, [local(_gradient(p)) for p in parameters if id(p) in self._partial])
        add_up(self._across, [local(_gradient(p)) for p in parameters])

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """See Strategy; of a cut weight each rank has some of the squares, of a whole one every rank has all."""
        gradients = [_gradient(p) for p in parameters]
        cut = [local(g) for g in gradients if _is_cut(g)]
        whole = [local(g) for g in gradients if not _is_cut(g)]
        squares = self._group.all_reduce(torch.nn.utils.get_total_norm(cut).square())
        norm = (squares + torch.nn.utils.get_total_norm(whole).square()).sqrt()
        if torch.isfinite(norm):
            # As clip_grads_with_norm_ of PyTorch does, which cannot mix cut tensors and whole ones.
            torch._foreach_mul_(cut + whole, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "reduce gives every parameter a gradient"
    return parameter.grad


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def plan_of(model: PreTrainedModel, num_parts: int) -> dict[str, str]:
    """Style by name of module, without weights that two modules share, which every rank holds. Raises: DataError."""
    plan, name = dict(model.tp_plan), type(model).__name__
    if not plan:
        raise DataError(f"{name} has no tp_plan, so it cannot be cut over ranks; use trainer_strategy fsdp2")
    unknown = sorted(set(plan.values()) - _CUT - {_PARTIAL, _LEFT_WHOLE})
    if unknown:
        raise DataError(
            f"the tp_plan of {name} has {', '.join(unknown)}, not trained so here; use trainer_strategy fsdp2"
        )
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, key) % num_parts:
            raise DataError(
                f"{name} has {key} {getattr(config, key)}, which {num_parts} ranks cannot share evenly; "
                f"lower trainer.tensor_parallel_size {num_parts}"
            )
    # A weight with two places in the model (embeddings and head) would have to be cut in two ways.
    places = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in places)
    shared = {replace_layer_number_by_wildcard(n.rpartition(".")[0]) for n, p in places if uses[id(p)] > 1}
    if config.vocab_size % num_parts:
        shared.add("lm_head")  # its logits are brought together, which takes parts of one size
    return {module: style for module, style in plan.items() if module not in shared}
