"""From names and arguments to an algorithm whose parts go together.

A part is named as everywhere: a registered name, `package.module.Name`, or a name in a file of a plug-in folder.
Invariant: what `make_algorithm` returns can run; every name, argument or combination that cannot is an error here.
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
from rftdask.config.schema.algorithm import load_part, warn_once
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
"""Key -> the class that a part named there is a subclass of."""
PARTS = ("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn")
"""The keys of section `algorithm` that name a part."""


def find_class(key: str, name: str, plugin_dirs: Sequence[str] = ()) -> Any:
    """The class named under a key of `BASES`. Raises: UserError: there is none, or it is of another kind."""
    found = load_part(key, name, plugin_dirs)
    base = BASES[key]
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{key} {name!r} is no subclass of {base.__module__}.{base.__name__}")
    return found


def make_part(key: str, name: str, args: Args | None = None, plugin_dirs: Sequence[str] = ()) -> Any:
    """The part named under a key of `BASES`, with its arguments; those left out keep their defaults.

    Example: make_part("policy_loss_fn", "ppo", {"clip_range": 0.1})
    Raises: UserError: unknown name, an argument it does not take, a value of another type or out of range.
    """
    return _construct(f"{key} {name!r}", find_class(key, name, plugin_dirs), args or {})


def _construct(what: str, cls: Any, args: Args) -> Any:
    ignored = sorted(set(args) & set(getattr(cls, "ignored_args", ())))
    for argument in ignored:
        warn_once(f"{what} argument {argument!r} is ignored: the whole batch is known here, nothing is rescaled")
    args = {key: value for key, value in args.items() if key not in ignored}
    # Before the call, since this tells of an unknown argument which ones there are.
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
    """The algorithm of that name, with the given parts in place of its defaults.

    parts: names and arguments as section `algorithm` has them, `policy_loss_fn` and `policy_loss_fn_args` and so on for
    each of `PARTS`; None: the type's own. Arguments are merged over the type's own for that part, if the part is the
    type's default, and over the part's defaults. `loss_agg_mode` in `policy_loss_fn_args` is the same as outside.

    Raises: UserError: an unknown name (near matches), arguments a part does not take, a value out of range, parts that
        do not go together.
    """
    if unknown := parts.keys() - {key for part in PARTS for key in (part, f"{part}_args")}:
        raise TypeError(f"make_algorithm takes no {', '.join(sorted(unknown))}")
    kind: type[AlgorithmType] = find_class("algorithm_type", algorithm_type, plugin_dirs)
    type_name = getattr(kind, "algorithm_type", algorithm_type)
    given = {part: dict(parts.get(f"{part}_args") or {}) for part in PARTS}
    names: dict[str, Any] = {part: parts.get(part) or getattr(kind, part, None) for part in PARTS}

    def make(part: str) -> Any:
        # The type's arguments are for its own part: another part of the same kind may have none of that name.
        own = getattr(kind, f"{part}_args", {}) if names[part] == getattr(kind, part, None) else {}
        return make_part(part, names[part] or "none", {**own, **given[part]}, plugin_dirs)

    # Files of the reference system have it among the arguments of the loss.
    inner_mode = given["policy_loss_fn"].pop("loss_agg_mode", None)
    if None not in (inner_mode, loss_agg_mode) and inner_mode != loss_agg_mode:
        raise UserError(f"loss_agg_mode is {loss_agg_mode!r}, but policy_loss_fn_args say {inner_mode!r}; give it once")
    mode = loss_agg_mode or inner_mode
    if mode not in (None, *AGGREGATIONS):
        raise UserError(f"loss_agg_mode is {mode!r}; allowed: {', '.join(AGGREGATIONS)}")

    loss: PolicyLoss = make("policy_loss_fn")
    reads_advantages = loss.uses_advantages
    if names["advantage_fn"] is not None and not reads_advantages:
        # It then says which rollouts are imitated.
        reads_advantages = find_class("advantage_fn", names["advantage_fn"], plugin_dirs).selects_alone
    if not reads_advantages and (parts.get("advantage_fn") or given["advantage_fn"]):
        raise UserError(
            f"policy_loss_fn {names['policy_loss_fn']!r} takes no advantages; "
            f"remove advantage_fn from algorithm_type {type_name!r} (its arguments are policy_loss_fn_args)"
        )
    if loss.uses_advantages and names["advantage_fn"] is None:
        raise UserError(
            f"policy_loss_fn {names['policy_loss_fn']!r} needs an advantage_fn; algorithm_type {type_name!r} has none"
        )
    algorithm = Algorithm(
        name=type_name,
        schema=kind.schema,
        repeat_times=kind.repeat_times,
        loss_agg_mode=mode or loss.only_agg_mode or kind.loss_agg_mode,
        sample_strategy=kind.sample_strategy,
        advantage_fn=make("advantage_fn") if reads_advantages else None,
        policy_loss_fn=loss,
        kl_loss_fn=make("kl_loss_fn"),
        kl_penalty_fn=make("kl_penalty_fn"),
        entropy_loss_fn=make("entropy_loss_fn"),
        correction=_construct("rollout_correction", Correction, rollout_correction or {}),
    )
    if problem := _mismatch(algorithm, kind, names["policy_loss_fn"], names["advantage_fn"]):
        raise UserError(problem)
    return algorithm


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of the config. Raises: UserError: parts that do not exist, do not go together or cannot be fed."""
    section = config.algorithm
    # Every part with its arguments, as the section has them; None leaves the algorithm type's own.
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


def _mismatch(algorithm: Algorithm, kind: type[AlgorithmType], loss_name: str, advantage_name: str | None) -> str:
    """Why the parts do not go together, with what to change; "" where they do."""
    # One reason is told at a time.
    loss, name, schema = algorithm.policy_loss_fn, algorithm.name, algorithm.schema
    if algorithm.use_critic and not kind.has_critic:
        return (
            f"advantage_fn {advantage_name!r} needs a critic and algorithm_type {name!r} has none; "
            "use algorithm_type 'ppo'"
        )
    if loss.schema not in ("any", schema):
        return f"policy_loss_fn {loss_name!r} reads {loss.schema!r} rows, algorithm_type {name!r} has {schema!r}"
    if loss.only_agg_mode not in (None, algorithm.loss_agg_mode):
        return (
            f"policy_loss_fn {loss_name!r} needs loss_agg_mode {loss.only_agg_mode!r}, not {algorithm.loss_agg_mode!r}"
        )
    if schema != "experience" and (algorithm.kl_penalty_fn.is_active or algorithm.correction.is_active):
        return (
            f"{schema!r} rows have neither rewards nor recorded logprobs: algorithm_type {name!r} takes neither "
            "kl_penalty_fn nor rollout_correction"
        )
    if loss.scores_sequences and (algorithm.use_reference or algorithm.use_entropy):
        return f"policy_loss_fn {loss_name!r} trains a reward model, which has no logprobs: no kl_loss_fn, no entropy"
    if algorithm.kl_penalty_fn.is_active and not loss.uses_advantages:
        return f"kl_penalty_fn changes rewards, and algorithm_type {name!r} reads none; use kl_loss_fn"
    return ""
