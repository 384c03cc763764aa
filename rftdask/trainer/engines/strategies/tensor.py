"""Tensor parallelism: the ranks of a group hold parts of each layer, split by the model's plan (`tp_plan` of
transformers), and compute the same rows together; different groups compute different rows.

A column-wise layer gives each rank some heads or inner features; the row-wise layer after it sums them. Weights outside
the plan (norms, embeddings) are replicated. Gradients are summed over the groups once per update, as with ddp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from rftdask.errors import DataError
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import Strategy, add_up, give_back, local, take_read

_EXPERTS = "grouped_gemm"  # style of experts' weights, of which each rank holds some experts
_DEALT_SINCE = (5, 19)
"""First release of transformers that computes the whole gradient of routers if experts are dealt to ranks."""
_CUT = {
    *("colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input"),
    *(_EXPERTS, "ep_router", "moe_tp_experts"),
}
_LEFT_WHOLE = "embedding_rowwise"
"""Style of embeddings, which are replicated: lookups cost nothing, and the output layer may share the weights."""
_PARTIAL = "replicated_with_grad_allreduce"
"""Style of replicated weights that each rank uses for its own heads, so that each has a part of the gradient.
transformers sums them after every backward pass, which would count accumulated gradients twice; we sum once."""


class TensorParallel(Strategy):
    """Splits layers within a group of neighbors."""

    sharded = True

    def __init__(self, ranks: Ranks, group: Ranks, across: Ranks, device: torch.device) -> None:
        """group: neighbors that share a model with this rank. across: ranks that hold the same part of it."""
        super().__init__(ranks)
        self.group = self._group = group
        self._across = across
        everybody = ranks.group or dist.group.WORLD
        assert everybody is not None, "ranks have met before they share a model"
        groups = [across.group or everybody, group.group or everybody]
        numbers = torch.tensor(dist.get_process_group_ranks(everybody)).view(-1, group.size)
        self.whole_mesh = DeviceMesh.from_group(groups, device.type, mesh=numbers, mesh_dim_names=("dp", "tp"))
        """All ranks, with a row for each group of neighbors."""
        self.across_mesh, self.mesh = self.whole_mesh["dp"], self.whole_mesh["tp"]
        self._partial: set[int] = set()

    def spread(self, model: PreTrainedModel) -> None:
        """See Strategy. Raises: DataError: see `plan_of`."""
        self._cut_weights(model, plan_of(model, self.mesh.size()))

    def prepare(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """See Strategy; weights laid out by `spread` keep their data. Raises: DataError: see `plan_of`."""
        read = take_read(module)
        self.cut(module)
        give_back(read)
        self.note_partial(module)

    def cut(self, module: torch.nn.Module) -> None:
        """Split weights and forward methods of the model in `module`. Raises: DataError: see `plan_of`."""
        model = _model_in(module)
        plan = plan_of(model, self.mesh.size())
        self._cut_weights(model, plan)
        for name, part in model.named_modules():
            if (style := plan.get(replace_layer_number_by_wildcard(name))) in _CUT:
                ALL_PARALLEL_STYLES[style].install_forward(part, self.mesh)

    def _cut_weights(self, model: PreTrainedModel, plan: Mapping[str, str]) -> None:
        for name, module in model.named_modules():
            for weight, _ in list(module.named_parameters(recurse=False)):
                if (style := _style_of(f"{name}.{weight}", plan)) in _CUT:
                    ALL_PARALLEL_STYLES[style].shard_param(module, weight, self.mesh)

    def note_partial(self, module: torch.nn.Module) -> None:
        """Remember the weights whose gradients `add_partial` sums."""
        model = _model_in(module)
        plan = plan_of(model, self.mesh.size())
        for name, parameter in model.named_parameters():
            if _style_of(name, plan) == _PARTIAL:
                # By identity: `reduce` gets parameters without names.
                self._partial.add(id(parameter))

    def add_partial(self, parameters: Sequence[Tensor]) -> None:
        """Sum, over the neighbors, the gradients of which each has only the part of its heads."""
        add_up(self._group, [local(_gradient(p)) for p in parameters if id(p) in self._partial])

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """See Strategy; partial gradients over the neighbors, then all gradients over the groups."""
        for parameter in parameters:
            # All ranks must sum the same tensors, so a missing gradient becomes zeros.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                # A partial sum takes the layout of its parameter.
                gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad = gradient
        self.add_partial(parameters)
        add_up(self._across, [local(_gradient(p)) for p in parameters])

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """See Strategy; squares of split weights are summed over the neighbors, those of whole ones are complete."""
        gradients = [_gradient(p) for p in parameters]
        cut = [local(g) for g in gradients if is_cut(g)]
        whole = [local(g) for g in gradients if not is_cut(g)]
        squares = self._group.all_reduce(get_total_norm(cut).square())
        return clip_parts(cut + whole, (squares + get_total_norm(whole).square()).sqrt(), max_norm)


def clip_parts(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> float:
    """Scale this rank's gradients as PyTorch's clip_grads_with_norm_ does, which cannot mix split and whole tensors.

    Returns: the norm before; if it is not finite, nothing is scaled.
    """
    if torch.isfinite(norm):
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def _model_in(module: torch.nn.Module) -> PreTrainedModel:
    return next(part for part in module.modules() if isinstance(part, PreTrainedModel))


def _style_of(parameter: str, plan: Mapping[str, str]) -> str | None:
    name = replace_layer_number_by_wildcard(parameter)
    return plan.get(name, plan.get(name.rpartition(".")[0]))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "reduce gives every parameter a gradient"
    return parameter.grad


def is_cut(tensor: Tensor) -> bool:
    """True if neighbors have different parts of the tensor."""
    return (
        isinstance(tensor, DTensor)
        and "tp" in (tensor.device_mesh.mesh_dim_names or ())
        and tensor.placements[-1].is_shard()
    )


def plan_of(model: PreTrainedModel, num_parts: int) -> dict[str, str]:
    """Return style by name of module or weight, without weights that two modules share, which are replicated.

    Each expert of a mixture belongs to one rank. Raises: DataError: the model has no plan, or an unsupported one.
    """
    plan, name = dict(model.tp_plan), type(model).__name__
    if not plan:
        raise DataError(f"{name} has no tp_plan, so its layers cannot be split; leave trainer.tensor_parallel_size out")
    config = model.config.get_text_config()
    sizes = {key: getattr(config, key) for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for path, experts in model.named_modules():
        weights = dict(experts.named_parameters(recurse=False))
        if not path.endswith(".experts") or not weights:
            continue
        block = path.removesuffix(".experts")
        wildcard = replace_layer_number_by_wildcard(block)
        routers = [n for n, child in model.get_submodule(block).named_children() if is_router(child)]
        dealt = {f"{wildcard}.experts.{weight}": _EXPERTS for weight in weights}
        if tuple(map(int, transformers.__version__.split(".")[:2])) < _DEALT_SINCE:
            raise DataError(
                f"transformers {transformers.__version__} omits a part of the gradient of {name}'s routers if experts "
                "are dealt to ranks; install 5.19, or leave trainer.tensor_parallel_size out"
            )
        if len(routers) != 1 or any((model._ep_plan or {}).get(key) != _EXPERTS for key in dealt):
            raise DataError(f"the experts of {name} cannot be dealt to ranks; leave trainer.tensor_parallel_size out")
        # Not split along their inner width, as in the plan: rows of different ranks would alternate.
        plan = {key: style for key, style in plan.items() if not key.startswith(f"{wildcard}.experts")} | dealt
        plan |= {f"{wildcard}.experts": "moe_tp_experts", f"{wildcard}.{routers[0]}": "ep_router"}
        sizes["num_experts"] = len(next(iter(weights.values())))
    unknown = sorted(set(plan.values()) - _CUT - {_PARTIAL, _LEFT_WHOLE})
    if unknown:
        raise DataError(
            f"the tp_plan of {name} has unsupported styles: {', '.join(unknown)}; "
            "leave trainer.tensor_parallel_size out"
        )
    for key, size in sizes.items():
        if size % num_parts:
            raise DataError(
                f"{name} has {key} {size}, which {num_parts} ranks cannot share evenly; "
                f"lower trainer.tensor_parallel_size {num_parts}"
            )
    # A weight that is used twice (embeddings and head) would have to be split in two ways.
    named = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in named)
    shared = {replace_layer_number_by_wildcard(n.rpartition(".")[0]) for n, p in named if uses[id(p)] > 1}
    if config.vocab_size % num_parts:
        shared.add("lm_head")  # gathering its logits needs parts of equal size
    return {module: style for module, style in plan.items() if module not in shared}


def is_router(module: torch.nn.Module) -> bool:
    """True if the module returns logits, scores and indices of the chosen experts, as dealt experts need them."""
    return type(module).__name__.endswith("TopKRouter")
