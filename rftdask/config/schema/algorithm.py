"""Section `algorithm`: the objective, and the parts of algorithms by the keys that name them.

Names, arguments and traits of the parts are read from the source of rftdask.algorithm, so torch is not imported and no
table is kept by hand. A user's own part is imported.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args

from rftdask.config.base import (
    Aliases,
    Computed,
    Count,
    OpenDict,
    PluginName,
    Problem,
    Section,
    absent,
    is_natural,
    is_number,
    reading,
)
from rftdask.config.plugins import RegisteredPart, argument_problems, find_part, lookup_part, read_parts, trait
from rftdask.config.schema.optimizer import OptimizerConfig

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
EXPERT_RATIO = 0.5
"""Default share of demonstrations in a batch of strategy mix."""

LABELS = {
    "algorithm_type": "algorithm_type",
    "advantage_fn": "advantage_name",
    "policy_loss_fn": "loss_name",
    "kl_penalty_fn": "kl_name",
    "kl_loss_fn": "kl_name",
    "entropy_loss_fn": "entropy_name",
    "operator": "operator_name",
    "selector": "selector_name",
    "rollout_correction": "correction_name",
}
"""Configuration key -> class attribute with which a class of rftdask.algorithm registers its name."""


def registered_parts(key: str) -> Mapping[str, RegisteredPart]:
    """Return the package's own parts for a key of `LABELS`, by name."""
    return read_parts("rftdask.algorithm", LABELS[key])


@cache
def old_names(key: str) -> Mapping[str, str]:
    """Return deprecated name -> name, of the parts for a key."""
    parts = registered_parts(key).items()
    return {old: name for name, part in parts for old in part.traits.get("deprecated_names", ())}


def load_part(key: str, name: str, plugin_dirs: Sequence[str] = ()) -> Any:
    """Import and return the class that a name means. A deprecated name warns once per process.

    Raises: UserError: no such part, see `find_part`.
    """
    # A configuration has been rid of old names when it was loaded; this is for callers of the package.
    if name in old_names(key):
        warn_once(f"{key} {name!r} is deprecated: it is {old_names(key)[name]!r}")
        name = old_names(key)[name]
    return find_part(key, name, registered_parts(key), plugin_dirs)


@cache
def warn_once(message: str) -> None:
    """Issue a FutureWarning once per process."""
    warnings.warn(message, FutureWarning, stacklevel=4)


def misfit(
    parts: Mapping[str, tuple[str, Any]], chosen: Collection[str], active: Collection[str], loss_agg_mode: str
) -> tuple[str, str] | None:
    """Return the key and the reason, with the remedy, of the first parts that cannot be combined; None: all can.

    Args:
        parts: key -> (name, part), registered or imported, of algorithm_type, policy_loss_fn and, if there is one,
            advantage_fn.
        chosen: keys of the section that are not left to the algorithm type.
        active: those of kl_penalty_fn, kl_loss_fn, entropy_loss_fn and rollout_correction that contribute.
        loss_agg_mode: the mode that applies.
    """
    (type_name, kind), (loss_name, loss) = parts["algorithm_type"], parts["policy_loss_fn"]
    advantage_name, advantage = parts.get("advantage_fn", ("", None))
    type_of, uses = f"algorithm_type {type_name!r}", bool(trait(loss, "uses_advantages", True))
    schema, read = trait(kind, "schema"), trait(loss, "schema", "experience")
    # The advantage function may select the rollouts to imitate.
    reads = uses or (advantage is not None and bool(trait(advantage, "only_selects")))
    surplus = [key for key in ("advantage_fn", "advantage_fn_args") if key in chosen and not reads]
    if surplus:
        why = f"policy_loss_fn {loss_name!r} takes no advantages; remove {surplus[0]} from {type_of}"
        return surplus[0], f"{why} (its arguments are policy_loss_fn_args)"
    if uses and advantage is None:
        return "policy_loss_fn", f"policy_loss_fn {loss_name!r} needs an advantage_fn; {type_of} has none"
    if reads and trait(advantage, "uses_critic") and not trait(kind, "has_critic"):
        why = f"advantage_fn {advantage_name!r} needs a critic and {type_of} has none"
        return "advantage_fn", f"{why}; use algorithm_type 'ppo'"
    if read not in ("any", schema):
        return "policy_loss_fn", f"policy_loss_fn {loss_name!r} reads {read!r} rows, {type_of} has {schema!r}"
    if (only := trait(loss, "only_agg_mode")) not in (None, loss_agg_mode):
        return "loss_agg_mode", f"policy_loss_fn {loss_name!r} needs loss_agg_mode {only!r}, not {loss_agg_mode!r}"
    useless = [key for key in ("kl_penalty_fn", "rollout_correction") if key in active and schema != "experience"]
    if useless:
        why = f"{schema!r} rows have neither rewards nor recorded logprobs"
        return useless[0], f"{why}: {type_of} takes neither kl_penalty_fn nor rollout_correction"
    terms = [key for key in ("kl_loss_fn", "kl_penalty_fn", "entropy_loss_fn") if key in active]
    if trait(loss, "scores_sequences") and (terms or trait(loss, "uses_reference")):
        why = f"policy_loss_fn {loss_name!r} trains a reward model, which has no logprobs"
        return (terms or ["policy_loss_fn"])[0], f"{why}; remove {' and '.join(terms or ['its uses_reference'])}"
    if "kl_penalty_fn" in active and not uses:
        return "kl_penalty_fn", f"kl_penalty_fn changes rewards, and {type_of} reads none; use kl_loss_fn"
    return None


registered_strategies = partial(read_parts, "rftdask.buffer.batches.selection", "sample_strategy")


def takes_demonstrations(sample_strategy: str | None) -> bool:
    """Return True if a batch of this strategy also holds rows of a dataset."""
    part = registered_strategies().get(sample_strategy or "")
    return part is not None and bool(part.traits.get("takes_demonstrations", False))


def is_share(value: Any) -> bool:
    """Return True for a number in [0, 1)."""
    return is_number(value) and 0 <= value < 1


def _part(kind: str, key: str, **more: Any) -> PluginName:
    """Mark of a key that names a part of an algorithm. If the key is absent, the algorithm type chooses the part."""
    arguments = "" if key == "algorithm_type" else f"{key}_args"
    return PluginName(kind, partial(registered_parts, key), arguments=arguments, **more)


_OLD_TYPES = Aliases(old_names("algorithm_type"), "the *_verl twins are deprecated")
_OLD_ADVANTAGES = Aliases(old_names("advantage_fn"), "the *_verl twins are deprecated")


class AlgorithmConfig(Section):
    """`algorithm`: the name chooses defaults for all other keys of the section. None: the algorithm's default."""

    algorithm_type: Annotated[str, _part("algorithm type", "algorithm_type", needed=True), _OLD_TYPES] = "grpo"
    """Name of the algorithm; docs/algorithms.md lists them."""
    repeat_times: Annotated[Count, Computed("the algorithm's default")] = absent()
    """Rollouts of each task, the group size. None: the algorithm's default (grpo 8)."""
    optimizer: OptimizerConfig = OptimizerConfig.model_construct()
    """Optimizer and learning rate schedule."""
    sample_strategy: Annotated[
        str,
        PluginName("sample strategy", registered_strategies, arguments="sample_strategy_args"),
        Computed("the algorithm's default"),
        Aliases({"warmup": "default"}, "warmup is deprecated"),
    ] = absent()
    """How batches are formed. default: oldest rollouts first. staleness_control: none too old. mix (for mix, mix_chord
    and, if requested, jsd): rollouts with demonstrations of `buffer.trainer_input.auxiliary_buffers`. Or a class of
    your own (docs/buffer.md)."""
    sample_strategy_args: OpenDict | None = None
    """staleness_control and mix: {max_staleness: int}, in policy versions. mix: {expert_data_ratio: 0.5,
    sft_dataset_name: sft_dataset}, the share of demonstrations in a batch and the auxiliary buffer that holds them (the
    first one if none has that name)."""
    advantage_fn: Annotated[
        str | None,
        _part("advantage function", "advantage_fn", default_from="algorithm_type", needed=True),
        _OLD_ADVANTAGES,
    ] = None
    """Name of the advantage function."""
    advantage_fn_args: OpenDict | None = None
    """Arguments of the advantage function; the others keep their defaults."""
    kl_penalty_fn: Annotated[str | None, _part("KL estimate", "kl_penalty_fn")] = None
    """Name of the KL estimate subtracted from the reward. "none": no penalty."""
    kl_penalty_fn_args: OpenDict | None = None
    """Arguments of the KL estimate, for example {kl_coef: 0.001}."""
    policy_loss_fn: Annotated[
        str | None, _part("policy loss", "policy_loss_fn", default_from="algorithm_type", also=("loss_agg_mode",))
    ] = None
    """Name of the policy loss."""
    policy_loss_fn_args: OpenDict | None = None
    """Arguments of the policy loss, for example {clip_range: 0.2}; the others keep their defaults."""
    kl_loss_fn: Annotated[str | None, _part("KL estimate", "kl_loss_fn", default_from="algorithm_type")] = None
    """Name of the KL estimate added to the loss. "none": no such term, and no reference model is loaded."""
    kl_loss_fn_args: OpenDict | None = None
    """Arguments of the KL estimate, for example {kl_coef: 0.001}."""
    entropy_loss_fn: Annotated[str | None, _part("entropy term", "entropy_loss_fn", default_from="algorithm_type")] = (
        None
    )
    """Name of the entropy term. "none": no such term."""
    entropy_loss_fn_args: OpenDict | None = None
    """Arguments of the entropy term, for example {entropy_coef: 0.0}."""
    loss_agg_mode: AggregationMode | None = None
    """How token losses are reduced to one number. None: as in the algorithm's paper."""
    bypass_old_logprobs: bool = True
    """True: use the rollout logprobs as old logprobs in ratios. False: recompute them with the trainer's weights before
    the step, so that every ratio starts at 1. They stay fixed for all updates of the step."""
    enable_router_replay: bool = False
    """Mixture of experts: store the experts that the engine chose for each token, and use the same experts in the
    trainer (docs/trainer.md). Refused for engines that cannot report them."""
    rollout_correction: OpenDict | None = None
    """Importance correction between engine and trainer, for example {method: truncate, level: token, high: 2.0}."""

    @reading("rollout_correction")
    def _correction_takes_its_arguments(self) -> Iterator[Problem]:
        [part] = registered_parts("rollout_correction").values()  # there is one, which the key names by being there
        for argument, message in argument_problems(part, self.rollout_correction or {}):
            yield f"rollout_correction.{argument}", message

    @reading("algorithm_type", "sample_strategy", "sample_strategy_args")
    def _strategy_fits(self) -> Iterator[Problem]:
        mixes, shown = takes_demonstrations(self.usual_sample_strategy), takes_demonstrations(self.sample_strategy)
        # A loss without advantages is the same for a rollout and for a row of a dataset.
        takes_both = self.schema_type == "experience" and not self.takes_advantages
        if mixes != shown and not takes_both:
            why = f"{self.sample_strategy} does not go with {self.algorithm_type}"
            remedy = "mix is for mix, mix_chord and rollouts without advantages, such as jsd"
            yield "sample_strategy", f"{why}; {'leave it out' if mixes else remedy}"
        args = self.sample_strategy_args or {}
        if shown and not is_share(ratio := args.get("expert_data_ratio", EXPERT_RATIO)):
            yield "sample_strategy_args.expert_data_ratio", f"{ratio!r} is not a number in [0, 1)"
        if not is_natural(bound := args.get("max_staleness", 0)):
            yield "sample_strategy_args.max_staleness", f"{bound!r} is not a whole number of at least 0"

    @reading("loss_agg_mode", "policy_loss_fn_args")
    def _one_aggregation(self) -> Iterator[Problem]:
        inner, ours = (self.policy_loss_fn_args or {}).get("loss_agg_mode"), self.loss_agg_mode
        if inner not in (None, *(modes := get_args(AggregationMode))):
            yield "policy_loss_fn_args.loss_agg_mode", f"{inner!r} is not one of {', '.join(modes)}"
        elif inner is not None and ours not in (None, inner):
            yield "policy_loss_fn_args.loss_agg_mode", f"{inner} differs from loss_agg_mode {ours}; give one of them"

    @property
    def schema_type(self) -> str:
        """Training data of the algorithm: experience, sft, dpo, kto or cpt."""
        return str(self._of_type("schema"))

    def _of_type(self, name: str) -> Any:
        """Class attribute of the algorithm type. Raises: UserError: no such type."""
        return trait(lookup_part("algorithm_type", self.algorithm_type, registered_parts("algorithm_type")), name)

    def _of_advantage(self, own: str | None, name: str, default: Any = None) -> Any:
        """Class attribute of the advantage function `own`, or of the algorithm type's if None. default: it has no such
        attribute."""
        chosen = own or self._of_type("advantage_fn")
        registered = registered_parts("advantage_fn")
        return trait(lookup_part("advantage_fn", chosen, registered), name, default) if chosen else default

    @property
    def misfit(self) -> tuple[str, str] | None:
        """Key and reason why the parts cannot be combined; None: they can, or one is the user's own."""
        kind = registered_parts("algorithm_type").get(self.algorithm_type)
        names = {key: getattr(self, key) or (kind and trait(kind, key)) for key in ("policy_loss_fn", "advantage_fn")}
        found = {key: (name, registered_parts(key).get(name)) for key, name in names.items() if name}
        if kind is None or any(part is None for _, part in found.values()):
            return None
        mode = self.loss_agg_mode or (self.policy_loss_fn_args or {}).get("loss_agg_mode")
        mode = mode or trait(found["policy_loss_fn"][1], "only_agg_mode") or trait(kind, "loss_agg_mode")
        chosen = [key for key in ("advantage_fn", "advantage_fn_args") if getattr(self, key)]
        active = [key for key in ("kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn") if self._contributes(key, kind)]
        if (self.rollout_correction or {}).get("method", "none") != "none":
            active.append("rollout_correction")
        return misfit({"algorithm_type": (self.algorithm_type, kind), **found}, chosen, active, mode)

    def _contributes(self, key: str, kind: RegisteredPart) -> bool:
        """True if a term is part of the objective. A user's own term counts as none."""
        usual = trait(kind, key, "none")
        name = getattr(self, key) or usual
        part = registered_parts(key).get(name)
        if part is None or name == "none":
            return False
        usual_args = trait(kind, f"{key}_args", {}) if name == usual else {}
        args = {**part.traits, **usual_args, **(getattr(self, f"{key}_args") or {})}
        coefs = ("entropy_coef",) if key == "entropy_loss_fn" else ("kl_coef", "adaptive", "final_coef")
        return any(args.get(coef) for coef in coefs)

    @property
    def usual_repeat_times(self) -> int:
        """Default number of rollouts per task."""
        return int(self._of_type("repeat_times"))

    @property
    def usual_sample_strategy(self) -> str:
        """Default sample strategy."""
        return str(self._of_type("sample_strategy"))

    @property
    def adds_entropy(self) -> bool:
        """True if an entropy term of this package is part of the objective."""
        kind = registered_parts("algorithm_type").get(self.algorithm_type)
        return kind is not None and self._contributes("entropy_loss_fn", kind)

    @property
    def needs_entropy(self) -> bool:
        """True if the advantage is computed from entropies of the policy."""
        return not {"entropy_Q", "necs_Q"}.isdisjoint(self._of_advantage(self.advantage_fn, "needs", ()))

    @property
    def uses_kl_baseline(self) -> bool:
        """True if the loss compares with a KL over other prompts. A user's own loss is not inspected."""
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        return loss is not None and bool(trait(loss, "uses_kl_baseline"))

    @property
    def trains_critic(self) -> bool:
        """True if the algorithm type trains a value model with the policy."""
        return bool(self._of_advantage(None, "uses_critic"))

    @property
    def compares_groups(self) -> bool:
        """True if the advantage compares the rollouts of one task, so that a single rollout gives no gradient."""
        return bool(self._of_advantage(None, "uses_groups"))

    @property
    def compares_reference(self) -> bool:
        """True if the policy is compared with the frozen initial weights, unless the coefficient is 0: by a KL loss, a
        KL penalty or a policy loss. A user's own loss is not inspected."""
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        estimates = self.kl_loss_fn or self._of_type("kl_loss_fn"), self.kl_penalty_fn or "none"
        return estimates != ("none", "none") or (loss is not None and bool(trait(loss, "uses_reference")))

    @property
    def trains_reward_model(self) -> bool:
        """True if the trained model scores whole sequences through a head with one output. A user's own loss is not
        inspected."""
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        return loss is not None and bool(trait(loss, "scores_sequences"))

    @property
    def expert_ratio(self) -> float:
        """Share of demonstrations in a batch of strategy mix; the default if the configured value is not in [0, 1)."""
        ratio = (self.sample_strategy_args or {}).get("expert_data_ratio", EXPERT_RATIO)
        return float(ratio) if is_share(ratio) else EXPERT_RATIO

    @property
    def takes_advantages(self) -> bool:
        """True if the algorithm type weights tokens by advantages, which rows of a dataset lack."""
        return self._of_type("advantage_fn") is not None

    @property
    def needs_teacher(self) -> bool:
        """True if the algorithm learns from a second model's log-probabilities of the tokens or of the whole
        vocabulary. A user's own loss is not imported here; only `Algorithm.use_teacher` knows it."""
        needs = self._of_advantage(self.advantage_fn, "needs", ())
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        return "teacher_logprobs_Q" in needs or (loss is not None and bool(loss.traits["uses_teacher"]))

    @property
    def greedy_baseline(self) -> bool:
        """True if every task has one more, greedy rollout, whose reward is the baseline of the others."""
        return "baseline_rewards_N" in self._of_advantage(self.advantage_fn, "needs", ())
