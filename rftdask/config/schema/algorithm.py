"""Section `algorithm`: what is optimized and by which rule; and the parts of algorithms, by the keys that name them.

Names, arguments and traits of the parts are read from the source of rftdask.algorithm: no table is kept by hand, and
torch is not imported. A part of the user's own is imported.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal

from rftdask.config.base import Aliases, Computed, Count, OpenDict, PluginName, Section, absent
from rftdask.config.plugins import RegisteredPart, find_part, lookup_part, read_parts, trait
from rftdask.config.schema.optimizer import OptimizerConfig

EXPERT_RATIO = 0.5
"""Share of demonstrations in a batch of strategy mix, where sample_strategy_args say nothing."""

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
"""Key of the configuration -> the class attribute with which a class of rftdask.algorithm registers its name."""


def registered_parts(key: str) -> Mapping[str, RegisteredPart]:
    """The package's own parts for a key of `LABELS`, by name."""
    return read_parts("rftdask.algorithm", LABELS[key])


@cache
def old_names(key: str) -> Mapping[str, str]:
    """Deprecated name -> name, of the parts for a key."""
    parts = registered_parts(key).items()
    return {old: name for name, part in parts for old in part.traits.get("deprecated_names", ())}


def load_part(key: str, name: str, plugin_dirs: Sequence[str] = ()) -> Any:
    """The class that a name means, imported; an old name gives the part it stands for and one warning per process.

    Raises: UserError: no such part, see `find_part`.
    """
    # A configuration has been rid of old names when it was loaded; this is for callers of the package.
    if name in old_names(key):
        warn_once(f"{key} {name!r} is deprecated: it is {old_names(key)[name]!r}")
        name = old_names(key)[name]
    return find_part(key, name, registered_parts(key), plugin_dirs)


@cache
def warn_once(message: str) -> None:
    """A FutureWarning, once per process."""
    warnings.warn(message, FutureWarning, stacklevel=4)


registered_strategies = partial(read_parts, "rftdask.buffer.batches.selection", "sample_strategy")


def takes_demonstrations(sample_strategy: str | None) -> bool:
    """Whether a batch of this strategy holds rows of a dataset beside its rollouts."""
    part = registered_strategies().get(sample_strategy or "")
    return part is not None and bool(part.traits.get("takes_demonstrations", False))


def is_share(value: object) -> bool:
    """Whether it is a number of [0, 1)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _part(kind: str, key: str, **more: Any) -> PluginName:
    """The mark of a key that names a part of an algorithm; where it is absent, the algorithm type's own is meant."""
    arguments = "" if key == "algorithm_type" else f"{key}_args"
    return PluginName(kind, partial(registered_parts, key), arguments=arguments, **more)


_OLD_TYPES = Aliases(old_names("algorithm_type"), "the *_verl twins are deprecated")
_OLD_ADVANTAGES = Aliases(old_names("advantage_fn"), "the *_verl twins are deprecated")


class AlgorithmConfig(Section):
    """`algorithm`: a name chooses defaults for everything else in the section; None means the algorithm's default."""

    algorithm_type: Annotated[str, _part("algorithm type", "algorithm_type", needed=True), _OLD_TYPES] = "grpo"
    """Name of the algorithm; docs/algorithms.md lists them."""
    repeat_times: Annotated[Count, Computed("the algorithm's default")] = absent()
    """Rollouts of each task, the size of a group. None: the algorithm's default (grpo 8)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate schedule."""
    sample_strategy: Annotated[
        str,
        PluginName("sample strategy", registered_strategies, arguments="sample_strategy_args"),
        Computed("the algorithm's default"),
        Aliases({"warmup": "default"}, "warmup is deprecated"),
    ] = absent()
    """How batches are made: default (oldest rollouts first), staleness_control (none too old), mix (mix, mix_chord, and
    where asked for jsd: demonstrations of `buffer.trainer_input.auxiliary_buffers` beside the rollouts), or a class of
    your own (docs/buffer.md)."""
    sample_strategy_args: OpenDict | None = None
    """staleness_control and mix: {max_staleness: int}, in policy versions. mix: {expert_data_ratio: 0.5,
    sft_dataset_name: sft_dataset}, the share of demonstrations in a batch and the auxiliary buffer they are in (if
    there is none of that name, the first)."""
    advantage_fn: Annotated[
        str | None,
        _part("advantage function", "advantage_fn", default_from="algorithm_type", needed=True),
        _OLD_ADVANTAGES,
    ] = None
    """Name of the advantage function."""
    advantage_fn_args: OpenDict | None = None
    """Its arguments; those not given keep their defaults."""
    kl_penalty_fn: Annotated[str | None, _part("KL estimate", "kl_penalty_fn")] = None
    """Name of the KL estimate subtracted from the reward; "none" for no penalty."""
    kl_penalty_fn_args: OpenDict | None = None
    """Its arguments, for example {kl_coef: 0.001}."""
    policy_loss_fn: Annotated[
        str | None, _part("policy loss", "policy_loss_fn", default_from="algorithm_type", also=("loss_agg_mode",))
    ] = None
    """Name of the policy loss."""
    policy_loss_fn_args: OpenDict | None = None
    """Its arguments, for example {clip_range: 0.2}; those not given keep their defaults."""
    kl_loss_fn: Annotated[str | None, _part("KL estimate", "kl_loss_fn", default_from="algorithm_type")] = None
    """Name of the KL estimate added to the loss; "none" for no such term, then no reference model is loaded."""
    kl_loss_fn_args: OpenDict | None = None
    """Its arguments, for example {kl_coef: 0.001}."""
    entropy_loss_fn: Annotated[str | None, _part("entropy term", "entropy_loss_fn", default_from="algorithm_type")] = (
        None
    )
    """Name of the entropy term; "none" for no such term."""
    entropy_loss_fn_args: OpenDict | None = None
    """Its arguments, for example {entropy_coef: 0.0}."""
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    ) = None
    """How token losses become one number; None: as the algorithm's paper does."""
    bypass_old_logprobs: bool = True
    """True: ratios are taken to the log-probabilities recorded in the rollout. False: to those of the trainer's weights
    before the step, so that every ratio begins at 1. Either is kept for all updates of the step."""
    enable_router_replay: bool = False
    """Mixture of experts: the experts that the engine's tokens took are stored with the experience, and the trainer's
    passes take the same (docs/trainer.md). An engine that cannot tell them is refused."""
    rollout_correction: OpenDict | None = None
    """Importance correction between engine and trainer, for example {method: truncate, level: token, high: 2.0}."""

    @property
    def schema_type(self) -> str:
        """What the algorithm trains on: experience, sft, dpo, kto or cpt."""
        return str(self._of_type("schema"))

    def _of_type(self, name: str) -> Any:
        """A class attribute of the algorithm type. Raises: UserError: there is no such type."""
        return trait(lookup_part("algorithm_type", self.algorithm_type, registered_parts("algorithm_type")), name)

    def _of_advantage(self, own: str | None, name: str, default: Any = None) -> Any:
        """A class attribute of the advantage function `own`, else of the type's; `default`: it has none."""
        chosen = own or self._of_type("advantage_fn")
        registered = registered_parts("advantage_fn")
        return trait(lookup_part("advantage_fn", chosen, registered), name, default) if chosen else default

    @property
    def usual_repeat_times(self) -> int:
        """Rollouts per task when the user gives none."""
        return int(self._of_type("repeat_times"))

    @property
    def usual_sample_strategy(self) -> str:
        """How batches are taken when the user says nothing."""
        return str(self._of_type("sample_strategy"))

    @property
    def trains_critic(self) -> bool:
        """Whether the type trains a value model beside the policy."""
        return bool(self._of_advantage(None, "uses_critic"))

    @property
    def compares_groups(self) -> bool:
        """Whether the type's advantage compares the rollouts of one task, so that a lone rollout teaches nothing."""
        return bool(self._of_advantage(None, "uses_groups"))

    @property
    def compares_reference(self) -> bool:
        """Whether the policy is compared with the frozen initial weights, unless the coefficient is 0: by a KL loss, a
        KL penalty or a policy loss that needs them; a loss of the user's own is not asked.
        """
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        estimates = self.kl_loss_fn or self._of_type("kl_loss_fn"), self.kl_penalty_fn or "none"
        return estimates != ("none", "none") or (loss is not None and bool(trait(loss, "uses_reference")))

    @property
    def trains_reward_model(self) -> bool:
        """Whether what is trained scores whole sequences, with a head of one number; a loss of the user's own is not
        asked.
        """
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        return loss is not None and bool(trait(loss, "scores_sequences"))

    @property
    def expert_ratio(self) -> float:
        """Share of demonstrations in a batch of strategy mix; the default where it is no number of [0, 1)."""
        ratio = (self.sample_strategy_args or {}).get("expert_data_ratio", EXPERT_RATIO)
        return float(ratio) if is_share(ratio) else EXPERT_RATIO

    @property
    def takes_advantages(self) -> bool:
        """Whether the type weighs tokens by advantages, which rows of a dataset do not have."""
        return self._of_type("advantage_fn") is not None

    @property
    def needs_teacher(self) -> bool:
        """Whether it learns from what a second model says: log-probabilities of the tokens, or of all words. Of a loss
        of the user's own, which is not imported here, only the algorithm itself knows (`Algorithm.use_teacher`)."""
        needs = self._of_advantage(self.advantage_fn, "needs", ())
        loss = registered_parts("policy_loss_fn").get(self.policy_loss_fn or self._of_type("policy_loss_fn"))
        return "teacher_logprobs_Q" in needs or (loss is not None and bool(loss.traits["uses_teacher"]))

    @property
    def greedy_baseline(self) -> bool:
        """Whether every task has one more, greedy rollout, whose reward is the baseline of the others."""
        return "baseline_rewards_N" in self._of_advantage(self.advantage_fn, "needs", ())
