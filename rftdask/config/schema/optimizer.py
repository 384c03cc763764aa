"""Section `algorithm.optimizer`: optimizer and learning rate schedule. Steps are updates, counted from 1; one batch may
make several (`trainer.ppo_epochs`).

Schedules are those of transformers. Their arguments are read from its source, so that checking a configuration does not
import it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from rftdask.config.base import Computed, Later, OpenDict, PluginName, Problem, Section, absent, reading
from rftdask.config.plugins import RegisteredPart, argument_problems

_SUPPLIED = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
SCHEDULES = {
    name: RegisteredPart(name, "transformers.optimization", f"get_{function}", supplied=_SUPPLIED)
    for name, function in {
        "constant": "constant_schedule",
        "constant_with_warmup": "constant_schedule_with_warmup",
        "linear": "linear_schedule_with_warmup",
        "cosine": "cosine_schedule_with_warmup",
        "cosine_with_restarts": "cosine_with_hard_restarts_schedule_with_warmup",
        "polynomial": "polynomial_decay_schedule_with_warmup",
        "inverse_sqrt": "inverse_sqrt_schedule",
        "cosine_with_min_lr": "cosine_with_min_lr_schedule_with_warmup",
        "cosine_warmup_with_min_lr": "cosine_with_min_lr_schedule_with_warmup_lr_rate",
        "warmup_stable_decay": "wsd_schedule",
    }.items()
}
"""Names of `transformers.get_scheduler` whose rate depends only on the step, so that a resumed run computes the same.
"""


OWN_KEYS = ("betas", "weight_decay")
"""Keys of the section that not every optimizer takes."""
_CLASSES = {
    "AdamW": "adamw",
    "Adafactor": "_adafactor",
    "Adagrad": "adagrad",
    "Adadelta": "adadelta",
    "Adamax": "adamax",
    "ASGD": "asgd",
    "Muon": "_muon",
    "NAdam": "nadam",
    "RAdam": "radam",
    "RMSprop": "rmsprop",
    "Rprop": "rprop",
    "SGD": "sgd",
}
"""Classes of torch.optim and their files. Without LBFGS, which evaluates the loss several times a step, and SparseAdam.
"""
OPTIMIZERS = {
    name: RegisteredPart(name, f"torch.optim.{file}", attribute, supplied=("params", "lr", *OWN_KEYS, "foreach"))
    for attribute, file in _CLASSES.items()
    # AdamW is called adam, as in Trinity-RFT. torch.optim.Adam is named by its path.
    for name in (attribute.lower(), attribute, *["adam"] * (attribute == "AdamW"))
}
"""Optimizers by the names of their classes, also in lower case."""


class OptimizerConfig(Section):
    """`algorithm.optimizer`: optimizer and learning rate schedule. Steps are updates; one batch may make several."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    lr_warmup_steps: int = Field(default=-1, ge=-1)
    """Steps of linear warm-up from 0. -1: `lr_warmup_steps_ratio` decides."""
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps, if `lr_warmup_steps` is -1."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final rate of the schedules linear and cosine, as a share of `lr`. Other schedules have arguments for it."""
    lr_scheduler_type: Annotated[
        Literal[
            "constant",
            "constant_with_warmup",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
        ],
        Later("a rate that follows a measured loss", ("reduce_lr_on_plateau", "greedy")),
    ] = "constant"
    """Schedule, by its name in `transformers.get_scheduler`. constant also warms up if warm-up steps are set."""
    lr_scheduler_args: OpenDict | None = None
    """Arguments of the schedule, named as in transformers, for example {num_cycles: 2} for cosine_with_restarts. None:
    defaults."""
    optimizer_type: Annotated[
        str, PluginName("optimizer", lambda: OPTIMIZERS, arguments="optimizer_args", complete=False)
    ] = "adam"
    """adamw (also called adam), adafactor, muon, sgd and others of torch.optim (docs/trainer.md); or
    package.module.Name, such as torchao.optim.AdamW8bit."""
    optimizer_args: OpenDict | None = None
    """Arguments of the optimizer that are not keys of this section, for example {momentum: 0.9} for sgd. None:
    defaults."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the first and second moment, for optimizers that have them."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay, for optimizers that have it; adamw, muon and adafactor decouple it from the gradient."""
    decay_all_weights: bool = False
    """Apply weight decay also to norms, biases and embeddings."""
    clip_grad: Annotated[float, Computed("trainer.grad_clip")] = absent(ge=0)
    """Maximum gradient norm. Same quantity as `trainer.grad_clip`; set one of them."""

    @reading("lr_scheduler_type", "lr_scheduler_args", "min_lr_ratio")
    def _schedule_takes_its_arguments(self) -> Iterator[Problem]:
        name = self.lr_scheduler_type
        for argument, message in argument_problems(SCHEDULES[name], self.lr_scheduler_args or {}):
            yield f"lr_scheduler_args.{argument}", message
        if self.min_lr_ratio and name not in ("constant", "constant_with_warmup", "linear", "cosine"):
            yield "min_lr_ratio", f"only for linear and cosine; {name} takes lr_scheduler_args"

    @reading("optimizer_type", *OWN_KEYS)
    def _optimizer_takes_its_settings(self) -> Iterator[Problem]:
        name = self.optimizer_type
        # muon uses AdamW for weights other than hidden matrices. `ModelOptimizer` checks optimizers not listed here.
        if name not in OPTIMIZERS or name.lower() == "muon":
            return
        takes = replace(OPTIMIZERS[name], supplied=()).parameters
        if takes is None:  # PyTorch is not on this machine
            return
        for key in self.changed(*OWN_KEYS):
            if key not in takes:
                yield key, f"optimizer {name} does not have it; leave it out"
