"""Composition of an algorithm from names and arguments.

A part is named by a registered name, `package.module.Name`, or a name in a file of a plug-in folder. Invariant: an
algorithm that `make_algorithm` returns can run; every invalid name, argument or combination is an error here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rftdask.algorithm.advantages.base import AdvantageFn
from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.correction import Correction
from rftdask.algorithm.entropy import EntropyBonus
from rftdask.algorithm.kl import KlFn
from rftdask.algorithm.losses.base import PolicyLoss
from rftdask.algorithm.operators import Operator
from rftdask.config import Config, fill_from_environment
from rftdask.config.plugins import bind_arguments
from rftdask.config.schema.algorithm import load_part, misfit, warn_once
from rftdask.errors import NotInstalledError, UserError

Args = Mapping[str, Any]

BASES: Mapping[str, type] = {
    "algorithm_type": AlgorithmType,
    "advantage_fn": AdvantageFn,
    "policy_loss_fn": PolicyLoss,
    "kl_penalty_fn": KlFn,
    "kl_loss_fn": KlFn,
    "entropy_loss_fn": EntropyBonus,
    "operator": Operator,
}
"""Key -> base class of the parts named by it."""
PARTS = ("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn")
"""Keys of section `algorithm` that name a part."""


def find_class(key: str, name: str, plugin_dirs: Sequence[str] = ()) -> Any:
    """Class named by a key of `BASES`. Raises: UserError: it does not exist or has another base class."""
    part = load_part(key, name, plugin_dirs)
    base = BASES[key]
    if not (isinstance(part, type) and issubclass(part, base)):
        raise UserError(f"{key} {name!r} is not a subclass of {base.__module__}.{base.__name__}")
    return part


def make_part(key: str, name: str, args: Args | None = None, plugin_dirs: Sequence[str] = ()) -> Any:
    """Part named by a key of `BASES`, constructed with `args`; omitted arguments keep their defaults.

    Example: make_part("policy_loss_fn", "ppo", {"clip_range": 0.1})
    Raises: UserError: unknown name, unknown argument, or a value of another type or out of range.
    """
    return _construct(f"{key} {name!r}", find_class(key, name, plugin_dirs), args or {})


def _construct(what: str, cls: Any, args: Args) -> Any:
    ignored = sorted(set(args) & set(getattr(cls, "ignored_args", ())))
    for argument in ignored:
        warn_once(
            f"{what} argument {argument!r} is ignored: weights are computed over the whole batch, without rescaling"
        )
    args = {key: value for key, value in args.items() if key not in ignored}
    # Before the call, for an error that lists the valid arguments.
    bind_arguments(what, cls, args)
    try:
        return cls(**args)
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error


def make_algorithm(
    algorithm_type: str,
    *,
    loss_agg_mode: str | None = None,
    rollout_correction: Args | None = None,
    plugin_dirs: Sequence[str] = (),
    **parts: Any,
) -> Algorithm:
    """Algorithm of a type, with `parts` instead of its defaults.

    parts: names and arguments as in section `algorithm`: `policy_loss_fn`, `policy_loss_fn_args` and so on for each of
    `PARTS`. None: the default of the type. Arguments override those of the type, if the part is the type's default,
    and the defaults of the part. `loss_agg_mode` may also be given in `policy_loss_fn_args`.

    Raises: UserError: an unknown name (with near matches), an unknown argument, a value out of range, or parts that
        cannot be combined.
    """
    if unknown := parts.keys() - {key for part in PARTS for key in (part, f"{part}_args")}:
        raise TypeError(f"make_algorithm got unknown arguments: {', '.join(sorted(unknown))}")
    kind: type[AlgorithmType] = find_class("algorithm_type", algorithm_type, plugin_dirs)
    type_name = getattr(kind, "algorithm_type", algorithm_type)
    arguments = {part: dict(parts.get(f"{part}_args") or {}) for part in PARTS}
    names: dict[str, Any] = {part: parts.get(part) or getattr(kind, part, None) for part in PARTS}

    def make(part: str) -> Any:
        # The arguments of the type apply only to its default part; another part may not have them.
        defaults = getattr(kind, f"{part}_args", {}) if names[part] == getattr(kind, part, None) else {}
        return make_part(part, names[part] or "none", {**defaults, **arguments[part]}, plugin_dirs)

    # Trinity-RFT has it among the arguments of the loss.
    inner_mode = arguments["policy_loss_fn"].pop("loss_agg_mode", None)
    if None not in (inner_mode, loss_agg_mode) and inner_mode != loss_agg_mode:
        raise UserError(f"loss_agg_mode is {loss_agg_mode!r}, but {inner_mode!r} in policy_loss_fn_args; set it once")
    mode = loss_agg_mode or inner_mode
    if mode not in (None, *AGGREGATIONS):
        raise UserError(f"loss_agg_mode is {mode!r}; allowed: {', '.join(AGGREGATIONS)}")

    loss: PolicyLoss = make("policy_loss_fn")
    classes: dict[str, tuple[str, Any]] = {
        "algorithm_type": (type_name, kind),
        "policy_loss_fn": (names["policy_loss_fn"], loss),
    }
    if (name := names["advantage_fn"]) is not None:
        classes["advantage_fn"] = (name, find_class("advantage_fn", name, plugin_dirs))
    terms: dict[str, Any] = {key: make(key) for key in ("kl_loss_fn", "kl_penalty_fn", "entropy_loss_fn")}
    correction = _construct("rollout_correction", Correction, rollout_correction or {})
    active = [key for key, term in {**terms, "rollout_correction": correction}.items() if term.is_active]
    chosen = [key for key in ("advantage_fn", "advantage_fn_args") if parts.get(key)]
    mode = mode or loss.only_agg_mode or kind.loss_agg_mode
    # Before the advantage function is made, whose arguments may be meant for the loss.
    if problem := misfit(classes, chosen, active, mode):
        raise UserError(problem[1])
    reads_advantages = loss.uses_advantages or ("advantage_fn" in classes and classes["advantage_fn"][1].only_selects)
    return Algorithm(
        name=type_name,
        schema=kind.schema,
        repeat_times=kind.repeat_times,
        loss_agg_mode=mode,
        sample_strategy=kind.sample_strategy,
        advantage_fn=make("advantage_fn") if reads_advantages else None,
        policy_loss_fn=loss,
        correction=correction,
        **terms,
    )


def build_algorithm(config: Config) -> Algorithm:
    """Algorithm of a config. Raises: UserError: parts that do not exist or cannot be combined."""
    section = config.algorithm
    # None keeps the default of the algorithm type.
    choices = {name: fill_from_environment(getattr(section, name)) for part in PARTS for name in (part, f"{part}_args")}
    try:
        return make_algorithm(
            section.algorithm_type,
            loss_agg_mode=section.loss_agg_mode,
            rollout_correction=section.rollout_correction,
            plugin_dirs=config.explorer.plugin_dirs,
            **choices,
        )
    except NotInstalledError as error:
        raise NotInstalledError(f"algorithm: {error}") from error
    except UserError as error:
        raise UserError(f"algorithm: {error}") from error
