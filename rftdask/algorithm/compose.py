"""The algorithm types by name, and `make_algorithm`: from names and arguments to a checked composition.

Knows nothing of config files. Invariant: what it returns can run; every name, argument or combination that cannot
raises ValueError here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftdask.algorithm.advantages import ADVANTAGE_FNS, DEPRECATED_ADVANTAGE_FNS
from rftdask.algorithm.advantages.base import AdvantageFn
from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.correction import Correction
from rftdask.algorithm.entropy import ENTROPY_FNS
from rftdask.algorithm.kl import KL_FNS
from rftdask.algorithm.losses.base import PolicyLoss
from rftdask.algorithm.losses.policy_losses import POLICY_LOSS_FNS
from rftdask.algorithm.names import build, one_of, require, resolve

Args = Mapping[str, Any]


@dataclass(frozen=True)
class Defaults:
    """The parts of an algorithm type; each can be overridden by name and arguments."""

    advantage_fn: str | None = "grpo"
    policy_loss_fn: str = "ppo"
    kl_loss_fn: str = "k2"
    entropy_loss_fn: str = "default"
    repeat_times: int = 8
    schema: str = "experience"
    sample_strategy: str = "default"
    loss_agg_mode: str = "token-mean"
    advantage_fn_args: Args = field(default_factory=dict)
    policy_loss_fn_args: Args = field(default_factory=dict)
    has_critic: bool = False


def _no_reference(**parts: Any) -> Defaults:
    return Defaults(kl_loss_fn="none", **parts)


def _imitation(schema: str, **parts: Any) -> Defaults:
    bare: dict[str, Any] = {"advantage_fn": None, "policy_loss_fn": "sft", "repeat_times": 1, "entropy_loss_fn": "none"}
    return Defaults(schema=schema, **{"kl_loss_fn": "none", **bare, **parts})


ALGORITHMS: dict[str, Defaults] = {
    "ppo": Defaults("ppo", repeat_times=1, has_critic=True),
    "grpo": Defaults(),
    "dr_grpo": _no_reference(advantage_fn_args={"std": "none"}, loss_agg_mode="seq-mean-token-sum-norm"),
    "bnpo": _no_reference(),
    "dapo": _no_reference(
        repeat_times=16,
        advantage_fn_args={"std_threshold": 0.0},
        policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
    ),
    "drpo": _no_reference(advantage_fn="drpo"),
    "reinforceplusplus": Defaults("reinforceplusplus"),
    "rloo": Defaults("rloo"),
    "remax": Defaults("remax", repeat_times=1),
    "opmd": Defaults("opmd", "opmd"),
    "asymre": _no_reference(advantage_fn="asymre", policy_loss_fn="opmd", entropy_loss_fn="none"),
    "topr": Defaults("reinforce", "topr"),
    "cispo": Defaults("grpo", "cispo"),
    "gspo": Defaults("grpo", "gspo", loss_agg_mode="seq-mean-token-mean"),
    "sapo": Defaults("grpo", "sapo", loss_agg_mode="seq-mean-token-mean"),
    "vespo": _no_reference(policy_loss_fn="vespo"),
    "sppo": _no_reference(advantage_fn="opmd", policy_loss_fn="sppo", entropy_loss_fn="none"),
    "rec": Defaults("rec", "rec"),
    "m2po": _no_reference(policy_loss_fn="m2po"),
    "dppo": _no_reference(policy_loss_fn="dppo"),
    "decoupled_ppo": _no_reference(policy_loss_fn="decoupled_ppo"),
    "multi_step_grpo": Defaults("step_wise_grpo"),
    "gigpo": Defaults("gigpo"),
    "mix": Defaults(policy_loss_fn="mix", entropy_loss_fn="mix", sample_strategy="mix"),
    "mix_chord": Defaults(policy_loss_fn="mix_chord", entropy_loss_fn="mix", sample_strategy="mix"),
    "raft": _imitation("experience"),
    "sft": _imitation("sft"),
    "cpt": _imitation("cpt"),
    "dpo": _imitation("dpo", policy_loss_fn="dpo", repeat_times=2, loss_agg_mode="seq-mean-token-mean"),
    "on_policy_distill": _no_reference(advantage_fn="on_policy_distill", entropy_loss_fn="none"),
    "jsd": _no_reference(advantage_fn="jsd", entropy_loss_fn="none"),
}

DEPRECATED_ALGORITHMS = {"grpo_verl": "grpo", "opmd_verl": "opmd", "asymre_verl": "asymre"}


def make_algorithm(
    algorithm_type: str,
    *,
    advantage_fn: str | None = None,
    advantage_fn_args: Args | None = None,
    policy_loss_fn: str | None = None,
    policy_loss_fn_args: Args | None = None,
    kl_penalty_fn: str | None = None,
    kl_penalty_fn_args: Args | None = None,
    kl_loss_fn: str | None = None,
    kl_loss_fn_args: Args | None = None,
    entropy_loss_fn: str | None = None,
    entropy_loss_fn_args: Args | None = None,
    loss_agg_mode: str | None = None,
    rollout_correction: Args | None = None,
) -> Algorithm:
    """The algorithm of that name, with the given parts in place of its defaults.

    A part's `_args` are merged over the type's own arguments for that part, if the part is the type's default, and
    over the part's defaults. `loss_agg_mode` inside `policy_loss_fn_args` is the same setting as outside.

    Raises: ValueError: an unknown name (near matches, all names), arguments a part does not take, a value out of range,
        parts that do not go together.
    """
    name = resolve("algorithm_type", algorithm_type, ALGORITHMS, DEPRECATED_ALGORITHMS)
    defaults = ALGORITHMS[name]
    loss_args, agg_mode = _take_agg_mode(policy_loss_fn_args, loss_agg_mode)
    loss_name = policy_loss_fn or defaults.policy_loss_fn
    if loss_name == defaults.policy_loss_fn:
        loss_args = {**defaults.policy_loss_fn_args, **loss_args}
    loss = build("policy_loss_fn", loss_name, POLICY_LOSS_FNS, loss_args)
    algorithm = Algorithm(
        name=name,
        schema=defaults.schema,
        repeat_times=defaults.repeat_times,
        loss_agg_mode=agg_mode or loss.only_agg_mode or defaults.loss_agg_mode,
        sample_strategy=defaults.sample_strategy,
        advantage_fn=_advantage(name, defaults, loss, loss_name, advantage_fn, advantage_fn_args),
        policy_loss_fn=loss,
        kl_loss_fn=build("kl_loss_fn", kl_loss_fn or defaults.kl_loss_fn, KL_FNS, kl_loss_fn_args),
        kl_penalty_fn=build("kl_penalty_fn", kl_penalty_fn or "none", KL_FNS, kl_penalty_fn_args),
        entropy_loss_fn=build(
            "entropy_loss_fn", entropy_loss_fn or defaults.entropy_loss_fn, ENTROPY_FNS, entropy_loss_fn_args
        ),
        correction=build("rollout_correction", "correction", {"correction": Correction}, rollout_correction),
    )
    _check(algorithm, loss_name)
    return algorithm


def _take_agg_mode(policy_loss_fn_args: Args | None, loss_agg_mode: str | None) -> tuple[dict[str, Any], str | None]:
    """The loss's arguments without loss_agg_mode, and the mode from either place."""
    args = dict(policy_loss_fn_args or {})
    inner = args.pop("loss_agg_mode", None)
    require(
        inner is None or loss_agg_mode is None or inner == loss_agg_mode,
        f"loss_agg_mode is {loss_agg_mode!r}, but policy_loss_fn_args say {inner!r}; give it once",
    )
    mode = loss_agg_mode or inner
    if mode is not None:
        one_of("loss_agg_mode", mode, AGGREGATIONS)
    return args, mode


def _advantage(
    name: str, defaults: Defaults, loss: PolicyLoss, loss_name: str, given: str | None, args: Args | None
) -> AdvantageFn | None:
    """The advantage function; None for a loss without advantages."""
    if not loss.uses_advantages:
        require(
            given is None and not args,
            f"policy_loss_fn {loss_name!r} takes no advantages; remove advantage_fn from algorithm_type {name!r}",
        )
        return None
    chosen = given or defaults.advantage_fn
    if chosen is None:
        raise ValueError(f"policy_loss_fn {loss_name!r} needs an advantage_fn; algorithm_type {name!r} has none")
    if chosen == defaults.advantage_fn:
        args = {**defaults.advantage_fn_args, **(args or {})}
    advantage = build("advantage_fn", chosen, ADVANTAGE_FNS, args, DEPRECATED_ADVANTAGE_FNS)
    require(
        defaults.has_critic or not advantage.uses_critic,
        f"advantage_fn {chosen!r} needs a critic and algorithm_type {name!r} has none; use algorithm_type 'ppo'",
    )
    return advantage


def _check(algorithm: Algorithm, loss_name: str) -> None:
    """Raise ValueError unless the parts go together."""
    loss, schema = algorithm.policy_loss_fn, algorithm.schema
    fits = loss.schema in ("any", schema)
    require(
        fits,
        f"policy_loss_fn {loss_name!r} reads {loss.schema!r} rows, algorithm_type {algorithm.name!r} has {schema!r}",
    )
    require(
        loss.only_agg_mode in (None, algorithm.loss_agg_mode),
        f"policy_loss_fn {loss_name!r} needs loss_agg_mode {loss.only_agg_mode!r}, not {algorithm.loss_agg_mode!r}",
    )
    online = schema == "experience"
    require(
        online or not (algorithm.kl_penalty_fn.is_active or algorithm.correction.is_active),
        f"{schema!r} rows have neither rewards nor recorded logprobs: algorithm_type {algorithm.name!r} takes neither "
        "kl_penalty_fn nor rollout_correction",
    )
    require(
        not algorithm.kl_penalty_fn.is_active or algorithm.advantage_fn is not None,
        f"kl_penalty_fn changes rewards, and algorithm_type {algorithm.name!r} reads none; use kl_loss_fn",
    )
