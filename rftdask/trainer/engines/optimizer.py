"""Optimizer of one model's trained parameters: rate, clipped step, and state as files. It knows no losses.

The section selects the class: one of torch.optim, or another one with the same interface. Invariant: training from a
saved and loaded state gives the same bits, whatever the state consists of.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rftdask.config.plugins import find_part
from rftdask.config.schema.optimizer import OPTIMIZERS, OptimizerConfig
from rftdask.errors import RoleError, UserError
from rftdask.storage.base import Data
from rftdask.trainer.engines.strategies.base import Strategy, local
from rftdask.trainer.engines.tensor_files import SavedTensors, save_tensors

MAX_SKIPPED_IN_A_ROW = 3
"""Consecutive updates whose gradient is not finite; so many are an error."""
# Smallest number of elements whose state torchao stores in blocks, if it is a multiple of the block size.
_LEAST_IN_BLOCKS = 4096
_LEAST_BLOCK = 32  # smallest block size that still saves memory: each block has a scale of four bytes
_NUM_SKIPPED = "num_skipped_in_a_row"
_SPARES = "spares_norms_biases_embeddings"
"""Key in the files of an optimizer that may decay only some weights; older versions decayed all of them."""


def learning_rate(section: OptimizerConfig, total_steps: int | None) -> Callable[[int], float]:
    """Return the rate as a function of the update's number, counted from 1, as `transformers.get_scheduler` does.

    Args: total_steps: updates of the run, where a decay ends; later updates keep its last rate. None: unknown.
    Raises: ValueError: the schedule needs `total_steps`, or transformers rejects the arguments.
    """
    name, lr, warmup = section.lr_scheduler_type, section.lr, section.lr_warmup_steps
    if warmup < 0:
        if section.lr_warmup_steps_ratio and total_steps is None:
            raise ValueError("lr_warmup_steps_ratio needs a known number of steps: set trainer.total_steps")
        warmup = int(section.lr_warmup_steps_ratio * (total_steps or 0))
    if name in ("constant", "constant_with_warmup"):
        # The schedulers of transformers count from 0, so update 1 of a warm-up has rate 0.
        return lambda step: lr * min(1.0, (step - 1) / warmup) if warmup else lr
    # Late: the module imports half of transformers, and most runs have a constant rate.
    from transformers.optimization import get_scheduler

    arguments: dict[str, Any] = dict(section.lr_scheduler_args or {})
    if section.min_lr_ratio and name == "linear":
        name, arguments = "polynomial", {"lr_end": lr * section.min_lr_ratio}
    elif section.min_lr_ratio:
        name, arguments = "cosine_with_min_lr", {**arguments, "min_lr_rate": section.min_lr_ratio}
    # A scheduler needs an optimizer; this one is never stepped.
    weightless = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    try:
        # Only the function of the step is used: a scheduler that is stepped would be state to save.
        shape = get_scheduler(name, weightless, warmup, total_steps, arguments).lr_lambdas[0]
    except (TypeError, ValueError) as error:
        if total_steps is None:
            text = f"lr_scheduler_type {section.lr_scheduler_type} needs a known number of steps"
            raise ValueError(f"{text}: set trainer.total_steps") from error
        raise ValueError(f"algorithm.optimizer.lr_scheduler_args: {error}") from error
    # Clamped at the end, beyond which some schedules rise again and others divide by 0.
    return lambda step: lr * shape(min(step, total_steps or step) - 1)


class ModelOptimizer:
    """Updates a model from its gradients."""

    def __init__(
        self,
        model: torch.nn.Module,
        section: OptimizerConfig,
        grad_clip: float,
        strategy: Strategy,
        total_steps: int | None = None,
        plugin_dirs: Sequence[str] = (),
    ) -> None:
        """
        Args: grad_clip: largest norm of the gradient; 0: no limit. total_steps: as in `learning_rate`, which raises.
        Raises: UserError: the optimizer does not exist, rejects its arguments, or ranks cannot share its state.
        """
        self._rate = learning_rate(section, total_steps)
        self._max_norm = grad_clip if grad_clip > 0 else math.inf
        self._strategy, self._section = strategy, section
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # DTensors last: PyTorch updates many tensors by one call only if all of them or none are DTensors.
        self._parameters = sorted(self._trained.values(), key=lambda parameter: isinstance(parameter, DTensor))
        self._num_skipped_in_a_row = 0
        # torchao's low-bit tensors lose their type within a DTensor, so its optimizers get this rank's local parts.
        in_parts = section.optimizer_type.startswith("torchao.")
        self._parts = {
            name: torch.nn.Parameter(local(weight).detach())
            for name, weight in self._trained.items()
            if in_parts and isinstance(weight, DTensor)
        }
        stepped = self._trained | self._parts
        self._optimizers = list(_optimizers(model, self._trained, stepped, section, plugin_dirs))
        self._check_blocks()
        # Only group values that differ from these are saved: the configuration sets the others again.
        self._initial_groups = self._group_state()

    def step(self, update: int, step: int) -> dict[str, float]:
        """Make update number `update` of the run, counted from 1, as a part of `step`, and free the gradients.

        A gradient that is not finite skips the update, which is counted.

        Raises: RoleError: too many consecutive updates were skipped.
        """
        # Before clipping, which needs the norm of the batch's gradient.
        self._strategy.reduce(self._parameters)
        norm = self._strategy.clip(self._parameters, self._max_norm)
        lr = self._rate(update)
        # The norm is the same on all ranks, so all of them skip the update or none does.
        finite = math.isfinite(norm)
        if finite:
            self._step(lr)
        # Also if the update was skipped: its gradient must not be added to the next.
        self._drop_gradients()
        self._num_skipped_in_a_row = 0 if finite else self._num_skipped_in_a_row + 1
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RoleError(
                f"step {step}: the gradient norm is {norm}, and was not finite in the {MAX_SKIPPED_IN_A_ROW - 1} "
                "updates before; lower the learning rate or look at the batches in the ledger"
            )
        return {**({"grad_norm": norm} if finite else {}), "lr": lr, "num_skipped_steps": float(not finite)}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of its state, sharing memory, without the parameters."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (tensor for value in state.values() for tensor in _plain_tensors(value))

    def state_files(self, name: str, spare: Mapping[str, Data] | None = None) -> dict[str, Data]:
        """Save its state with `save_tensors`. Called by all ranks. Raises: UserError: a value is neither a tensor nor a
        number."""
        # Saved so that a crash every few steps does not hide that every update is skipped.
        tensors = {_NUM_SKIPPED: torch.tensor(self._num_skipped_in_a_row), _SPARES: torch.tensor(True)}
        # Some classes keep counters in their groups.
        groups = self._group_state()
        tensors |= {key: torch.tensor(groups[key]) for key in groups if groups[key] != self._initial_groups.get(key)}
        # By names, since the numbers of parameters depend on their order here.
        for parameter, state in self._states():
            for key, value in state.items():
                tensors |= self._flat(parameter, key, value)
        return save_tensors(name, tensors, self._strategy.ranks, spread=self._strategy.sharded, spare=spare)

    def load_state_files(self, name: str, files: Mapping[str, Data]) -> None:
        """Restore the state of `state_files`, to the bit, whatever the number of ranks was. Called by all ranks.

        This may flip the sign of zeros in the weights, so load the weights afterwards.

        Raises: RoleError: the state belongs to another optimizer or model. UserError: it was made with another decay.
        """
        saved = SavedTensors(name, files, self._strategy.ranks)
        if _SPARES not in saved.names and self._section.weight_decay and not self._section.decay_all_weights:
            raise UserError(
                "the checkpoint was made with weight decay of all weights, and this version excludes norms, biases and "
                "embeddings; set algorithm.optimizer.decay_all_weights: true to continue as before"
            )
        num_skipped = torch.tensor(self._num_skipped_in_a_row)
        tensors = {_NUM_SKIPPED: num_skipped}
        if _SPARES in saved.names:
            tensors[_SPARES] = torch.tensor(True)
        # The class creates its state in a step of rate 0, which decides device, layout and type of each tensor. A
        # parameter that was never updated has no state.
        parameters_with_state = {full_name.rpartition("/")[0] for full_name in saved.names}
        for parameter, weight in self._trained.items():
            if parameter in parameters_with_state:
                # One by one: the gradients of all would take as much memory as the weights.
                weight.grad = torch.zeros_like(weight)
                self._step(0.0)
                self._drop_gradients()
        numbers: list[tuple[dict[str, Any], str, Tensor]] = []
        for parameter, state in self._states():
            for key, value in state.items():
                flat = self._flat(parameter, key, value)
                tensors |= flat
                if isinstance(value, int | float):
                    numbers += [(state, key, tensor) for tensor in flat.values()]
        for number, optimizer in enumerate(self._optimizers):
            for full_name, value in self._group_state(number).items():
                key = full_name.rpartition("/")[2]
                if full_name in saved.names:
                    tensors[full_name] = torch.tensor(value)
                    numbers += [(group, key, tensors[full_name]) for group in optimizer.param_groups]
                elif full_name in self._initial_groups:
                    for group in optimizer.param_groups:
                        group[key] = self._initial_groups[full_name]
        saved.load(tensors)
        for state, key, tensor in numbers:  # read into tensors, since only tensors can be filled in place
            state[key] = type(state[key])(tensor.item())
        self._num_skipped_in_a_row = int(num_skipped)

    def _step(self, lr: float) -> None:
        for name, part in self._parts.items():
            weight = self._trained[name]
            # The storage may have changed: PyTorch lays out parts again before the first pass.
            part.data = local(weight).detach()
            part.grad = None if weight.grad is None else local(weight.grad)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):  # in classes that compile their step
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            # torchao compiles its step; on a CPU that needs a C++ compiler and half a minute for each shape.
            on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                optimizer.step()

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, state) of the parameters that have a state."""
        for name, parameter in (self._trained | self._parts).items():
            for optimizer in self._optimizers:
                if parameter in optimizer.state:
                    yield name, optimizer.state[parameter]

    def _flat(self, parameter: str, key: str, value: Any) -> dict[str, Tensor]:
        """Return an entry of a parameter's state as plain tensors, sharing memory, sharded like the parameter."""
        name, part, weight = f"{parameter}/{key}", self._parts.get(parameter), self._trained[parameter]
        if part is None or not isinstance(value, Tensor) or not isinstance(weight, DTensor):
            return _flat(name, value)
        if not hasattr(value, "__tensor_flatten__"):
            return {name: _spread_as(weight, value, weight.shape) if value.shape == part.shape else value}
        flat: dict[str, Tensor] = {}
        for field in ("codes", "scale"):  # each row consists of whole blocks (`_check_blocks`)
            tensor = getattr(value, field)
            shape: tuple[int, ...] = (weight.numel() // part.numel() * tensor.numel(),)
            if part.dim() > 1:
                tensor = tensor.view(len(part), -1)
                shape = len(weight), weight.numel() // len(weight) * tensor.shape[1] // (part.numel() // len(part))
            flat[f"{name}.{field}"] = _spread_as(weight, tensor, shape)
        return flat

    def _check_blocks(self) -> None:
        """Raises: UserError: another number of ranks could not read the state, because blocks cross rows."""
        block = getattr(self._optimizers[0], "block_size", 0) if self._parts else 0
        sizes = self._strategy.ranks.all_gather([part.numel() for part in self._parts.values()]) if block else []
        for number, (name, part) in enumerate(self._parts.items()):
            part_sizes = {rank[number] for rank in sizes}
            in_blocks = {size >= _LEAST_IN_BLOCKS and size % block == 0 for size in part_sizes}
            if not block or in_blocks == {False}:
                continue
            row = math.prod(part.shape[1:]) if part.dim() > 1 else math.gcd(*part_sizes)
            if in_blocks == {True} and row % block == 0 and (part.dim() > 1 or len(part_sizes) == 1):
                continue
            fits = math.gcd(row, block)
            remedy = f"set optimizer_args: {{block_size: {fits}}}" if fits >= _LEAST_BLOCK else "use fewer ranks"
            raise UserError(
                f"algorithm.optimizer: the state of {name} is stored in blocks of {block} numbers, but the parts that "
                f"ranks hold ({', '.join(map(str, sorted(part_sizes)))} numbers, {row} per row) are not a multiple of "
                f"it: {remedy if row % block else 'use fewer ranks'}"
            )

    def _group_state(self, *numbers: int) -> dict[str, int | float]:
        """Return numbers that a class keeps in its groups, equal in all groups, of some optimizers or of all."""
        return {
            f"param_groups/{number}/{key}": value
            for number in numbers or range(len(self._optimizers))
            for key, value in self._optimizers[number].param_groups[0].items()
            # The rate is set in each update, and the decay differs between groups.
            if isinstance(value, int | float) and key not in ("lr", "weight_decay")
        }

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            # None instead of 0 frees the memory during the next forward pass.
            parameter.grad = None
        for part in self._parts.values():
            part.grad = None


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    """Return an entry of an optimizer's state as plain tensors, sharing memory; a number becomes a tensor."""
    if isinstance(value, int | float):
        return {name: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)}
    inside: Any = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(value, Tensor) and not hasattr(inside, "__tensor_flatten__"):
        return {name: value}
    if isinstance(value, Tensor) and not isinstance(value, DTensor):  # such as torchao's of 8 bits, with their scales
        flat: dict[str, Tensor] = {}
        for field in inside.__tensor_flatten__()[0]:
            flat |= _flat(f"{name}.{field}", getattr(inside, field))
        return flat
    if value is None:
        return {}
    raise UserError(
        f"the optimizer keeps {name} as {type(inside).__name__}, which cannot be saved"
        + (" if ranks hold parts of it; use trainer_strategy ddp" if isinstance(value, DTensor) else "")
    )


def _spread_as(weight: DTensor, part: Tensor, shape: Sequence[int]) -> DTensor:
    """Return a DTensor of this shape from this rank's part, sharded like `weight`."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that an entry of an optimizer's state consists of."""
    inside = value.to_local() if isinstance(value, DTensor) else value
    if hasattr(inside, "__tensor_flatten__"):
        for name in inside.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(inside, name))
    elif isinstance(value, Tensor):
        yield inside


def _optimizers(
    model: torch.nn.Module,
    trained: Mapping[str, Tensor],
    stepped: Mapping[str, Tensor],
    section: OptimizerConfig,
    plugin_dirs: Sequence[str],
) -> Iterator[torch.optim.Optimizer]:
    """Yield the section's optimizer; with muon also AdamW for everything but the matrices of hidden layers. stepped:
    the tensor that is updated for each trained parameter."""
    if section.optimizer_type.lower() != "muon":
        yield _optimizer(section.optimizer_type, model, trained, stepped, section, plugin_dirs)
        return
    # Muon orthogonalizes the update of a matrix, which makes no sense for vectors and embeddings. Names of layers have
    # a number; embeddings, the output layer and the critic's head do not.
    hidden = {n: p for n, p in trained.items() if p.ndim == 2 and any(part.isdigit() for part in n.split("."))}
    if hidden:
        yield _optimizer("muon", model, hidden, stepped, section, plugin_dirs)
    if rest := {name: parameter for name, parameter in trained.items() if name not in hidden}:
        others = section.model_copy(update={"optimizer_args": None})
        yield _optimizer("adamw", model, rest, stepped, others, plugin_dirs)


def _optimizer(
    name: str,
    model: torch.nn.Module,
    parameters: Mapping[str, Tensor],
    stepped: Mapping[str, Tensor],
    section: OptimizerConfig,
    plugin_dirs: Sequence[str],
) -> torch.optim.Optimizer:
    kind = find_part("optimizer", name, OPTIMIZERS, plugin_dirs)
    takes = inspect.signature(kind).parameters
    usual = {"betas": section.betas, "weight_decay": section.weight_decay}
    section_arguments = section.optimizer_args or {}
    if name.lower() in ("adam", "adamw") and not section_arguments.get("fused"):
        usual["foreach"] = True  # one call for all tensors, also on a CPU
    elif name == "muon":
        # Scales updates to the size of AdamW's, so that one rate suits both (arXiv:2502.16982).
        usual["adjust_lr_fn"] = "match_rms_adamw"
    if "block_size" in takes and any(stepped[key] is not parameter for key, parameter in parameters.items()):
        usual["block_size"] = 128  # divides the rows of more models than 256 does
    arguments = {**{key: value for key, value in usual.items() if key in takes}, **section_arguments}
    if any(parameter.dtype == torch.bfloat16 for parameter in parameters.values()):
        if "bf16_stochastic_round" not in takes:
            raise UserError(
                f"trainer.master_weights: bfloat16 does not go with {name}, which has no bf16_stochastic_round and "
                "loses small updates; use torchao.optim.AdamW8bit"
            )
        arguments["bf16_stochastic_round"] = True
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    tables = {id(table) for module in embeddings for table in module.parameters()}
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for full_name, parameter in parameters.items():
        # Decay of norms and biases (vectors) or of rare embedding rows does not reduce overfitting.
        decays = section.decay_all_weights or (parameter.ndim > 1 and id(parameter) not in tables)
        # Groups by number of mesh dimensions: one call of PyTorch updates only tensors of one mesh.
        tensor = stepped[full_name]
        num_spread = tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0
        groups.setdefault((num_spread, decays), []).append(tensor)
    group_arguments = [
        {"params": tensors, **({} if decays or "weight_decay" not in takes else {"weight_decay": 0.0})}
        for (_, decays), tensors in sorted(groups.items(), key=lambda item: item[0])
    ]
    if name.lower() == "adafactor" and any(num_spread for num_spread, _ in groups):
        raise UserError(
            "algorithm.optimizer.optimizer_type: PyTorch's adafactor cannot update weights sharded over ranks; "
            "use trainer.trainer_strategy ddp"
        )
    try:
        optimizer: torch.optim.Optimizer = kind(group_arguments, lr=section.lr, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"algorithm.optimizer: {name} rejects its arguments: {error}") from error
    return optimizer
