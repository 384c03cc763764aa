"""Break each loss and advantage in one place, at run time, and check that its case violates a bound.

    python -m tests.learning.mutants [NAME...] [--seed 0]

Prints one line per mutant: the broken part, the case, and the metric that shows it. The exit code is 1 if a mutant
survives, because then no test checks that part. No file changes. The mutations:

- sign: the loss, or every advantage, times -1.
- baseline: the baseline of the rewards (the mean of the task, the greedy rollout, the critic's value) is 0.
- coefficient: the KL costs nothing.
- clip: no bound on the distance of the policy from the sampling policy.
- schedule: its start or its end value throughout, or hard tasks first.
- mask: masked tokens are trained.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from rftdask.algorithm import entropy, kl, selectors
from rftdask.algorithm.advantages import group, tokens, turns
from rftdask.algorithm.losses import imitation, preference, ratio, reinforce
from rftdask.buffer.batches import source
from rftdask.config.schema.buffer import RolloutArgs
from tests.learning.cases import CASES, Patch, crossed, instead, learn

FREE = {"clip_range": 1.0, "clip_range_low": 1.0, "clip_range_high": 1e9}

# Class -> its case, and the arguments that remove its clip: None if the bound is soft (sapo, cispo) or has no effect on
# the only update of a batch (decoupled_ppo).
LOSSES: Mapping[type, tuple[str, Mapping[str, Any]]] = {
    ratio.Ppo: ("grpo", FREE | {"clip_ratio_c": None}),
    ratio.Gspo: ("gspo", FREE),
    ratio.Dppo: ("dppo", {"mask_low": 1.0, "mask_high": 1.0}),
    ratio.M2po: ("m2po", {"m2_threshold": 1e9}),
    ratio.Sapo: ("sapo", {}),
    ratio.DecoupledPpo: ("decoupled_ppo", {}),
    ratio.ImportanceSampling: ("on_policy_distill-importance_sampling", {}),
    reinforce.Cispo: ("cispo", {}),
    reinforce.Opmd: ("opmd", {}),
    reinforce.Rec: ("rec", {}),
    reinforce.Sppo: ("sppo", {"epsilon": 1e9}),
    reinforce.Topr: ("topr", {"advantage_threshold": -1e9}),
    reinforce.Vespo: ("vespo", {"k_pos": 1e-6, "lambda_pos": 1e-6, "k_neg": 1e-6, "lambda_neg": 1e-6}),
    imitation.Jsd: ("jsd", {}),
    imitation.Mix: ("mix", {}),
    imitation.MixChord: ("mix_chord", {}),
    imitation.Sft: ("sft", {}),
    imitation.SftIs: ("sft-sft_is", {}),
    imitation.SftPhi: ("sft-sft_phi", {}),
    preference.Dpo: ("dpo", {}),
    preference.Kto: ("kto", {}),
    preference.Orpo: ("orpo", {}),
    preference.SimPo: ("simpo", {}),
    preference.BradleyTerry: ("reward_model", {}),
}

# Class -> its case, and the module of the baseline that is removed.
ADVANTAGES: Mapping[type, tuple[str, Any]] = {
    group.Grpo: ("grpo", group),
    group.Rloo: ("rloo", group),
    group.OpmdAdvantage: ("opmd", group),
    group.Asymre: ("asymre", group),
    group.Drpo: ("drpo", group),
    group.RecAdvantage: ("rec", group),
    group.Reinforce: ("topr", None),
    turns.StepWiseGrpo: ("multi_step_grpo", group),
    turns.Gigpo: ("gigpo", turns),
    tokens.Gae: ("ppo", "values_Q"),
    tokens.Remax: ("remax", "baseline_rewards_N"),
    tokens.ReinforcePlusPlus: ("reinforceplusplus", None),
    tokens.OnPolicyDistill: ("on_policy_distill", None),
    tokens.ClipB: ("grpo-clipb", group),
    tokens.ClipV: ("grpo-clipv", group),
}


@dataclass(frozen=True)
class Mutant:
    """A mutation; `broken` applies it within its context."""

    name: str
    case: str
    broken: Patch


def _sign_of_loss(cls: type) -> Patch:
    @instead(cls, "__call__")
    def mutant(original: Any, self: Any, inputs: Any) -> Any:
        loss_BT, metrics = original(self, inputs)
        return -loss_BT, metrics

    return mutant


def _without_clip(cls: type, loose: Mapping[str, Any]) -> Patch:
    return instead(cls, "__call__")(lambda original, self, inputs: original(replace(self, **loose), inputs))


def _sign_of_advantage(cls: type) -> Patch:
    @instead(cls, "__call__")
    def mutant(original: Any, self: Any, inputs: Any) -> Any:
        result = original(self, inputs)
        tokens_Q = result.advantages_Q
        return replace(result, advantages_N=-result.advantages_N, advantages_Q=None if tokens_Q is None else -tokens_Q)

    return mutant


def _without_baseline(cls: type, place: Any) -> Patch:
    @instead(*((cls, "compute") if isinstance(place, str) else (place, "group_stats")))
    def mutant(original: Any, *args: Any, **options: Any) -> Any:
        if isinstance(place, str):  # a field of the inputs
            self, inputs = args
            return original(self, replace(inputs, **{place: torch.zeros_like(getattr(inputs, place))}))
        stats = original(*args, **options)
        return replace(stats, mean_G=torch.zeros_like(stats.mean_G))

    return mutant


@instead(group.BestOfN, "compute")
def _worst_of_n(original: Any, self: Any, inputs: Any) -> Any:
    return original(self, replace(inputs, rewards_N=-inputs.rewards_N))


@instead(source, "supervised_batch")
def _all_trained(original: Any, rows: Any, *args: Any) -> Any:
    return original([(row_tokens, prompt, None) for row_tokens, prompt, _ in rows], *args)


@instead(imitation, "expert_mask")
def _nobody_shown(original: Any, expert_mask_B: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(expert_mask_B)


@instead(tokens, "filtered")
def _inverted_filter(original: Any, inputs: Any, grpo: Any, dropped_Q: torch.Tensor) -> Any:
    return original(inputs, grpo, ~dropped_Q)


def _sign_of_kl(cls: type) -> Patch:
    return instead(cls, "per_token")(lambda original, self, *given: -original(self, *given))


def _no_penalty() -> AbstractContextManager[Any]:
    return mock.patch.object(kl.KlFn, "is_active", False)


@instead(selectors.EasyToHard, "order")
def _hard_first(original: Any, self: Any, features_NF: Any, *more: Any) -> Any:
    return original(self, -features_NF, *more)


def _one_temperature(name: str) -> Patch:
    @instead(RolloutArgs, "temperature_at")
    def stays(original: Any, self: Any, explore_step: int) -> float:
        return float(self.temperature if self.final_temperature is None else getattr(self, name))

    return stays


def _one_coefficient(name: str) -> Patch:
    @instead(kl.KlFn, "coef_at")
    def stays(original: Any, self: Any, step: int, coef: float) -> float:
        return float(coef if self.final_coef is None else getattr(self, name))

    return stays


def mutants() -> Iterator[Mutant]:
    for cls, (case, loose) in LOSSES.items():
        yield Mutant(f"{cls.__name__}: sign", case, _sign_of_loss(cls))
        if loose:
            yield Mutant(f"{cls.__name__}: clip", case, _without_clip(cls, loose))
    for cls, (case, place) in ADVANTAGES.items():
        yield Mutant(f"{cls.__name__}: sign", case, _sign_of_advantage(cls))
        if place is not None:
            yield Mutant(f"{cls.__name__}: baseline", case, _without_baseline(cls, place))
    for name in ("hinge", "ipo", "ipo_sum"):
        yield Mutant(f"Dpo: sign of {name}", f"dpo-{name}", _sign_of_loss(preference.Dpo))
    yield Mutant("BestOfN: sign", "raft", _worst_of_n)
    yield Mutant("Sft: mask", "sft", _all_trained)
    yield Mutant("Mix: mask", "mix", _nobody_shown)
    yield Mutant("MixChord: mask", "mix_chord", _nobody_shown)
    yield Mutant("ClipB: mask", "grpo-clipb", _inverted_filter)
    yield Mutant("ClipV: mask", "grpo-clipv", _inverted_filter)
    for fn in (kl.K2, kl.K3, kl.LowVarKl, kl.AbsKl, kl.CorrectedK3):
        yield Mutant(f"{fn.__name__}: sign", f"grpo-{fn.kl_name}", _sign_of_kl(fn))
    for case in ("grpo-k1", "reinforceplusplus-k1"):
        yield Mutant(f"K1: sign in {case}", case, _sign_of_kl(kl.K1))
        yield Mutant(f"K1: coefficient 0 in {case}", case, _no_penalty)
    yield Mutant("EasyToHard: sign", "grpo-curriculum", _hard_first)
    for name in ("temperature", "final_temperature"):
        yield Mutant(f"RolloutArgs: {name} alone", "grpo-cooling", _one_temperature(name))
    for name in ("kl_coef", "final_coef"):
        yield Mutant(f"KlFn: {name} alone", "grpo-letting_go", _one_coefficient(name))
    yield Mutant("EntropyBonus: sign", "grpo-entropy", _sign_of_kl(entropy.EntropyBonus))


def killed_by(mutant: Mutant, seed: int) -> list[str]:
    """Return the bounds that the mutant violates in its case; [] if it survives."""
    case = next(case for case in CASES if case.name == mutant.case)
    with mutant.broken():
        try:
            return crossed(case, learn(case, seed).after)
        except Exception as error:  # training failed, which is always noticed
            return [f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0][:80]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help='such as "Ppo: clip"; all of them if none is named')
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_survivors = 0
    for mutant in mutants():
        if args.names and mutant.name not in args.names:
            continue
        found = killed_by(mutant, args.seed)
        num_survivors += not found
        print(f"{mutant.name:36} {'; '.join(found) or f'SURVIVES in {mutant.case}'}", flush=True)
    print(f"{num_survivors} survive")
    return bool(num_survivors)


if __name__ == "__main__":
    raise SystemExit(main())
