"""The optimizer of one model's trained parameters: a clipped step, and its state as files. It knows no losses.

Which class it is says the section: one of torch.optim, or any other that keeps to its interface. Invariant: a state
that was saved and loaded goes on to the same bits, whatever it is made of.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rftdask.config.plugins import find_part
from rftdask.config.schema.optimizer import OPTIMIZERS, OptimizerConfig
from rftdask.errors import RoleError, UserError
from rftdask.storage.base import Data
from rftdask.trainer.engines.learning_rate import learning_rate
from rftdask.trainer.engines.strategies.base import Strategy, local
from rftdask.trainer.engines.tensor_files import SavedTensors, save_tensors

MAX_SKIPPED_IN_A_ROW = 3
"""Updates with a gradient that is not finite: one may be chance, this many are not."""
_LEAST_IN_BLOCKS = 4096
"""Numbers of which torchao keeps the state in blocks, if they are a whole number of them."""
_LEAST_BLOCK = 32
"""Numbers of a block that still saves memory: each has a scale of four bytes."""
_NUM_SKIPPED = "num_skipped_in_a_row"
_SPARES = "spares_norms_biases_embeddings"
"""In the files of an optimizer that may decay less than all weights; those of older versions decayed all of them."""


class ModelOptimizer:
    """Steps a model by the gradients it holds."""

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
        Args:
            grad_clip: largest norm of the gradient; 0: no limit, the norm is measured all the same.
            total_steps: as of `learning_rate`, which raises where it has to be known.
        Raises: UserError: there is no such optimizer, it refuses its arguments, or ranks cannot share its state.
        """
        self._rate = learning_rate(section, total_steps)
        self._max_norm = grad_clip if grad_clip > 0 else math.inf
        self._strategy, self._section = strategy, section
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # Spread ones last: PyTorch steps many tensors by one call if all are spread or none is.
        self._parameters = sorted(self._trained.values(), key=lambda parameter: isinstance(parameter, DTensor))
        self._num_skipped_in_a_row = 0
        # torchao's tensors of few bits lose their type within a DTensor: such an optimizer is given this rank's parts.
        in_parts = section.optimizer_type.startswith("torchao.")
        self._parts = {
            name: torch.nn.Parameter(local(weight).detach())
            for name, weight in self._trained.items()
            if in_parts and isinstance(weight, DTensor)
        }
        stepped = self._trained | self._parts
        self._optimizers = list(_optimizers(model, self._trained, stepped, section, plugin_dirs))
        self._check_blocks()
        # What the configuration gives a new optimizer, too: only what differs from it is saved.
        self._began = self._group_state()

    def step(self, update: int, step: int) -> dict[str, float]:
        """Update number `update` of the run, counted from 1, as a part of `step`; the gradients are gone after it. A
        gradient that is not finite changes nothing, and is counted.

        Raises: RoleError: too many of them in a row.
        """
        # Summed first: the norm to clip is that of the batch's gradient, and not of a rank's share.
        self._strategy.reduce(self._parameters)
        norm = self._strategy.clip(self._parameters, self._max_norm)
        lr = self._rate(update)
        # The norm is the same on all ranks, so that they all make this step or none does.
        finite = math.isfinite(norm)
        if finite:
            self._step(lr)
        # Also where the step was skipped: a gradient that is not finite must not be added to the next.
        self._drop_gradients()
        self._num_skipped_in_a_row = 0 if finite else self._num_skipped_in_a_row + 1
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RoleError(
                f"step {step}: the gradient norm is {norm}, and was not finite in the {MAX_SKIPPED_IN_A_ROW - 1} "
                "updates before; lower the learning rate or look at the batches in the ledger"
            )
        return {**({"grad_norm": norm} if finite else {}), "lr": lr, "num_skipped_steps": float(not finite)}

    def tensors(self) -> Iterator[Tensor]:
        """Its state as it lies in memory, but for the parameters."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (tensor for value in state.values() for tensor in _held(value))

    def state_files(self, name: str, spare: Mapping[str, Data] | None = None) -> dict[str, Data]:
        """Its state by names of parameters, as `save_tensors` does. Called by all ranks.

        Raises: UserError: the optimizer keeps something that is no tensor and no number.
        """
        # A resumed run counts on: else a crash every few steps would hide that none of them is taken.
        tensors = {_NUM_SKIPPED: torch.tensor(self._num_skipped_in_a_row), _SPARES: torch.tensor(True)}
        # What some classes count beside the parameters; what is as it was made comes from the configuration.
        now = self._group_state()
        tensors |= {name: torch.tensor(now[name]) for name in now if now[name] != self._began.get(name)}
        # By names of parameters and not by their numbers, which depend on how they are sorted here.
        for parameter, state in self._states():
            for key, value in state.items():
                tensors |= self._flat(parameter, key, value)
        return save_tensors(name, tensors, self._strategy.ranks, spread=self._strategy.sharded, spare=spare)

    def load_state_files(self, name: str, files: Mapping[str, Data]) -> None:
        """Restore what `state_files` gave, to the bit, however many ranks wrote it and read it; the weights may change
        in the sign of a zero, so they are loaded after it. Called by all ranks.

        Raises: RoleError: it is not the state of this model's optimizer. UserError: it was made with another decay.
        """
        saved = SavedTensors(name, files, self._strategy.ranks)
        if _SPARES not in saved.names and self._section.weight_decay and not self._section.decay_all_weights:
            raise UserError(
                "the checkpoint was made with weight decay of all weights, and norms, biases and embeddings are spared "
                "now; set algorithm.optimizer.decay_all_weights: true to go on as before"
            )
        num_skipped = torch.tensor(self._num_skipped_in_a_row)
        tensors = {_NUM_SKIPPED: num_skipped}
        if _SPARES in saved.names:
            tensors[_SPARES] = torch.tensor(True)
        # The class itself makes its state, by a step that moves nothing: where a tensor lies, over which ranks it is
        # spread and what it is made of are its own. A parameter that has not been stepped yet has none.
        held = {full_name.rpartition("/")[0] for full_name in saved.names}
        for parameter, weight in self._trained.items():
            if parameter in held:
                # One after the other: the gradients of all would take as much memory as the weights.
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
                elif full_name in self._began:
                    for group in optimizer.param_groups:
                        group[key] = self._began[full_name]
        saved.load(tensors)
        for state, key, tensor in numbers:
            # Plain numbers were read into tensors of their own, since only tensors can be filled in place.
            state[key] = type(state[key])(tensor.item())
        self._num_skipped_in_a_row = int(num_skipped)

    def _step(self, lr: float) -> None:
        for name, part in self._parts.items():
            weight = self._trained[name]
            # Where it lies may have changed since: PyTorch lays parts out anew before the first pass.
            part.data = local(weight).detach()
            part.grad = None if weight.grad is None else local(weight.grad)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):  # of classes that are compiled
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            # torchao's compile their step; on a CPU that takes a compiler of C++, and half a minute for each shape.
            on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                optimizer.step()

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name of the parameter, its state) of those that have one."""
        for name, parameter in (self._trained | self._parts).items():
            for optimizer in self._optimizers:
                if parameter in optimizer.state:
                    yield name, optimizer.state[parameter]

    def _flat(self, parameter: str, key: str, value: Any) -> dict[str, Tensor]:
        """A part of a parameter's state as plain tensors, sharing memory, spread as the parameter is."""
        name, part, weight = f"{parameter}/{key}", self._parts.get(parameter), self._trained[parameter]
        if part is None or not isinstance(value, Tensor) or not isinstance(weight, DTensor):
            return _flat(name, value)
        if not hasattr(value, "__tensor_flatten__"):
            return {name: _spread_as(weight, value, weight.shape) if value.shape == part.shape else value}
        found: dict[str, Tensor] = {}
        for own in ("codes", "scale"):  # of blocks, of which each row has some (`_check_blocks`)
            tensor = getattr(value, own)
            shape: tuple[int, ...] = (weight.numel() // part.numel() * tensor.numel(),)
            if part.dim() > 1:
                tensor = tensor.view(len(part), -1)
                shape = len(weight), weight.numel() // len(weight) * tensor.shape[1] // (part.numel() // len(part))
            found[f"{name}.{own}"] = _spread_as(weight, tensor, shape)
        return found

    def _check_blocks(self) -> None:
        """Whether any other number of ranks could read the state of blocks. Raises: UserError: it could not."""
        block = getattr(self._optimizers[0], "block_size", 0) if self._parts else 0
        sizes = self._strategy.ranks.all_gather([part.numel() for part in self._parts.values()]) if block else []
        for number, (name, part) in enumerate(self._parts.items()):
            told = {rank[number] for rank in sizes}
            in_blocks = {size >= _LEAST_IN_BLOCKS and size % block == 0 for size in told}
            if not block or in_blocks == {False}:
                continue
            row = math.prod(part.shape[1:]) if part.dim() > 1 else math.gcd(*told)
            if in_blocks == {True} and row % block == 0 and (part.dim() > 1 or len(told) == 1):
                continue
            fits = math.gcd(row, block)
            remedy = f"set optimizer_args: {{block_size: {fits}}}" if fits >= _LEAST_BLOCK else "use fewer ranks"
            raise UserError(
                f"algorithm.optimizer: the state of {name} lies in blocks of {block} numbers, of which the rows that "
                f"ranks hold of it ({', '.join(map(str, sorted(told)))} numbers, {row} in a row) are no whole number: "
                f"{remedy if row % block else 'use fewer ranks'}"
            )

    def _group_state(self, *numbers: int) -> dict[str, int | float]:
        """Numbers that a class keeps in its groups, the same in all of them, of all optimizers or of some."""
        return {
            f"param_groups/{number}/{key}": value
            for number in numbers or range(len(self._optimizers))
            for key, value in self._optimizers[number].param_groups[0].items()
            # The rate is set at each step, and the decay differs between groups.
            if isinstance(value, int | float) and key not in ("lr", "weight_decay")
        }

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            # None and not 0: the memory is free during the next forward pass.
            parameter.grad = None
        for part in self._parts.values():
            part.grad = None


def _flat(name: str, value: Any) -> dict[str, Tensor]:
    """A part of an optimizer's state as plain tensors, sharing memory; a number is a tensor of its own."""
    if isinstance(value, int | float):
        return {name: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)}
    inside: Any = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(value, Tensor) and not hasattr(inside, "__tensor_flatten__"):
        return {name: value}
    if isinstance(value, Tensor) and not isinstance(value, DTensor):  # such as torchao's of 8 bits, with their scales
        found: dict[str, Tensor] = {}
        for part in inside.__tensor_flatten__()[0]:
            found |= _flat(f"{name}.{part}", getattr(inside, part))
        return found
    if value is None:
        return {}
    raise UserError(
        f"the optimizer keeps {name} as {type(inside).__name__}, which cannot be saved"
        + (" where ranks hold parts of it; use trainer_strategy ddp" if isinstance(value, DTensor) else "")
    )


def _spread_as(weight: DTensor, part: Tensor, shape: Sequence[int]) -> DTensor:
    """A rank's part of something of this shape whose rows are spread as those of `weight` are."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _held(value: Any) -> Iterator[Tensor]:
    """The plain tensors that a part of an optimizer's state is made of."""
    inside = value.to_local() if isinstance(value, DTensor) else value
    if hasattr(inside, "__tensor_flatten__"):
        for name in inside.__tensor_flatten__()[0]:
            yield from _held(getattr(inside, name))
    elif isinstance(value, Tensor):
        yield inside


def _optimizers(
    model: torch.nn.Module,
    trained: Mapping[str, Tensor],
    stepped: Mapping[str, Tensor],
    section: OptimizerConfig,
    plugin_dirs: Sequence[str],
) -> Iterator[torch.optim.Optimizer]:
    """The optimizer that the section names; of muon two, since it moves matrices of hidden layers alone.

    stepped: what it is given of each trained parameter.
    """
    if section.optimizer_type.lower() != "muon":
        yield _optimizer(section.optimizer_type, model, trained, stepped, section, plugin_dirs)
        return
    # Layers are numbered: embeddings, the output layer and a head of a critic stand outside of them.
    # Muon makes the update of a matrix orthogonal, which means nothing for a vector or a table of rows.
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
    """Raises: UserError."""
    kind = find_part("optimizer", name, OPTIMIZERS, plugin_dirs)
    takes = inspect.signature(kind).parameters
    usual = {"betas": section.betas, "weight_decay": section.weight_decay}
    own = section.optimizer_args or {}
    if name.lower() in ("adam", "adamw") and not own.get("fused"):
        usual["foreach"] = True  # one call for all tensors, also on a CPU
    elif name == "muon":
        # Its steps are then as large as those of AdamW, so that one rate is good for both (arXiv:2502.16982).
        usual["adjust_lr_fn"] = "match_rms_adamw"
    if "block_size" in takes and any(stepped[key] is not parameter for key, parameter in parameters.items()):
        usual["block_size"] = 128  # which divides the rows of more models than 256 does
    arguments = {**{key: value for key, value in usual.items() if key in takes}, **own}
    if any(parameter.dtype == torch.bfloat16 for parameter in parameters.values()):
        if "bf16_stochastic_round" not in takes:
            raise UserError(
                f"trainer.master_weights: bfloat16 does not go with {name}, which has no bf16_stochastic_round and so "
                "loses small steps; use torchao.optim.AdamW8bit"
            )
        arguments["bf16_stochastic_round"] = True
    tables = {
        id(each) for part in model.modules() if isinstance(part, torch.nn.Embedding) for each in part.parameters()
    }
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for full_name, parameter in parameters.items():
        # Norms and biases are vectors. To pull them or rare rows of an embedding to 0 fits nothing better.
        decays = section.decay_all_weights or (parameter.ndim > 1 and id(parameter) not in tables)
        # Weights that are whole, spread, or cut and spread in groups of their own: one call of PyTorch steps only
        # tensors of one mesh.
        given = stepped[full_name]
        num_spread = given.device_mesh.ndim if isinstance(given, DTensor) else 0
        groups.setdefault((num_spread, decays), []).append(given)
    listed = [
        {"params": part, **({} if decays or "weight_decay" not in takes else {"weight_decay": 0.0})}
        for (_, decays), part in sorted(groups.items(), key=lambda item: item[0])
    ]
    if name.lower() == "adafactor" and any(num_spread for num_spread, _ in groups):
        raise UserError(
            "algorithm.optimizer.optimizer_type: adafactor of PyTorch cannot step weights that are spread over ranks; "
            "use trainer.trainer_strategy ddp"
        )
    try:
        optimizer: torch.optim.Optimizer = kind(listed, lr=section.lr, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"algorithm.optimizer: {name} refuses its arguments: {error}") from error
    return optimizer
