"""Trinity-RFT: policy loss classes and trainer-side advantage functions. Imported late, since it may be missing."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rftdask.testing.conformance.cases import (
    NOT_EXTREME,
    STEP,
    Batch,
    Case,
    advantages_of,
    kl_term,
    loss_of,
    token_rewards,
)


def cases() -> list[Case]:
    """Raises: ImportError: Trinity-RFT or what its algorithm package imports (verl, ray) is not installed."""
    from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN  # heavy and optional

    def case(what: str, name: str, kinds: tuple[str, ...] = NOT_EXTREME, differs: str = "", **args: Any) -> Case:
        """Compare the losses of this name with the same arguments."""
        cls = POLICY_LOSS_FN.get(name)
        module = cls(**{**cls.default_args(), **args})

        def theirs(b: Batch) -> Tensor:
            arguments = {"log_prob": b.policy, "old_log_probs": b.old, "ref_log_prob": b.ref}
            loss: Tensor = module(**arguments, advantages=b.advantages, response_mask=b.float_mask)[0]
            return loss

        kind = "sft" if name.startswith("sft") else name if name in ("gspo", "dpo") else "grpo"
        ours = loss_of(kind, policy_loss_fn=name, policy_loss_fn_args=args)
        # Its means add 1e-8 to the denominator. Real differences are far larger.
        return Case(what, ours, theirs, kinds, differs=differs, tolerance_64=1e-10 if differs else 1e-7)

    def rec(clip: str, weight: str, regularizer: str) -> Case:
        args: dict[str, Any] = {
            "clip_mode": clip,
            "weight": weight,
            "regularizer": regularizer,
            "regularizer_coef": 0.1,
        }
        return case(f"rec loss, {clip} clip, weight {weight}, {regularizer}", "rec", **args)

    def mixture(what: str, name: str, **args: Any) -> Case:
        # Sizes that make its weights of the parts 1: a batch is one micro-batch.
        sizes = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8}
        sizes |= {"train_batch_size_usual": 6, "train_batch_size_expert": 2}
        module = POLICY_LOSS_FN.get(name)(**{"clip_range": 0.2, **args, **sizes})

        def theirs(b: Batch) -> Tensor:
            arguments = {"log_prob": b.policy, "old_log_probs": b.old, "advantages": b.advantages}
            arguments |= {"expert_mask": b.experts, "response_mask": b.float_mask}
            loss: Tensor = module(**arguments, step=torch.full((8,), STEP))[0]
            return loss

        return Case(what, loss_of(name, policy_loss_fn_args=args), theirs, NOT_EXTREME, tolerance_64=1e-7)

    chord = {"mu_warmup_steps": 2, "mu_decay_steps": 4, "mu_peak": 0.9, "mu_valley": 0.1}
    warming = {"mu_warmup_steps": 5, "mu_peak": 0.9, "enable_phi_function": False}
    same = ("ppo", "cispo", "topr", "opmd", "sppo", "rec", "importance_sampling")
    detached = "the gate is detached and multiplies log p: its gradient grows with the ratio, nothing is clipped"
    one_logit = "all pairs of a micro-batch are summed into one logit; ours has one per pair"
    by_width = "divides by the padded width, not also by the number of sequences"
    norm = "seq-mean-token-sum-norm"
    return [
        *(case(f"{name} loss", name) for name in same),
        rec("one-side", "importance_sampling", "k2"),
        rec("two-side", "advantage", "forward-kl"),
        rec("ring", "none", "none"),
        case("sft loss", "sft", (*NOT_EXTREME, "extreme")),
        case("sft_is loss", "sft_is"),
        case("sft_phi loss", "sft_phi"),
        case("sft_phi loss, nothing above 0.5", "sft_phi", cutoff_prob=0.5),
        case("ppo loss, sequence masking", "ppo", enable_sequence_masking=True),
        case("gspo loss", "gspo", ("padded", "holes", "short")),
        case("sapo loss", "sapo", differs=detached),
        case("dpo loss", "dpo", ("padded", "holes"), one_logit),
        case(norm, "ppo", ("padded",), by_width, loss_agg_mode=norm),
        mixture("mix loss, mu 0.3", "mix", mu=0.3),
        mixture("mix_chord loss, its mu in decay", "mix_chord", **chord),
        mixture("mix_chord loss, warming up, without phi", "mix_chord", **warming),
        *_kl_cases(),
        *_advantage_cases(),
        *_group_cases(),
    ]


def _kl_cases() -> list[Case]:
    from trinity.algorithm.kl_fn import KL_FN

    ours, function = kl_term("corrected_k3"), KL_FN.get("corrected_k3")(kl_coef=1.0)

    def theirs(b: Batch) -> Tensor:
        loss: Tensor = function.calculate_kl_loss(b.policy, b.ref, b.float_mask, "token-mean", b.old)[0]
        return loss

    def apart(side: Callable[[Batch], Tensor], least: float, most: float) -> Callable[[Batch], Tensor]:
        """The same comparison for a batch whose log-ratios are between `least` and `most`."""

        def of_apart(b: Batch) -> Tensor:
            old = b.policy.detach() + (b.old - b.policy.detach()).clamp(-most, -least)
            return side(replace(b, old=old))

        return of_apart

    name, bounded = "corrected_k3 penalty in the loss", "the ratio that corrects is 2 at most; ours is not bounded"
    near, far = (-0.6, 0.6), (1.0, 2.0)
    return [
        Case(f"{name}, ratios up to 1.8", apart(ours, *near), apart(theirs, *near), NOT_EXTREME, tolerance_64=1e-7),
        Case(name, apart(ours, *far), apart(theirs, *far), ("padded",), differs=bounded, tolerance_64=1e-7),
    ]


def _advantage_cases() -> list[Case]:
    from trinity.algorithm.advantage_fn.clipb_advantage import ClipBAdvantageFn
    from trinity.algorithm.advantage_fn.clipv_advantage import ClipVAdvantageFn
    from trinity.algorithm.advantage_fn.grpo_advantage import GRPOAdvantageFn
    from trinity.algorithm.advantage_fn.on_policy_distill_advantage import OnPolicyDistillAdvantage
    from trinity.algorithm.advantage_fn.ppo_advantage import PPOAdvantageFn
    from trinity.algorithm.advantage_fn.reinforce_plus_plus_advantage import REINFORCEPLUSPLUSAdvantageFn
    from trinity.algorithm.advantage_fn.rloo_advantage import RLOOAdvantageFn

    def case(
        what: str, name: str, cls: Callable[..., Any], kinds: tuple[str, ...], differs: str = "", **args: Any
    ) -> Case:
        function = cls(**args)

        def theirs(b: Batch) -> Tensor:
            batch = {
                "token_level_rewards": token_rewards(b),
                "response_mask": b.float_mask,
                "values": b.values,
                "old_log_probs": b.old,
                "rollout_log_probs": b.old,
                "teacher_logprobs": b.ref,
                "entropys": b.entropy,
                "necs": b.entropy_change,
            }
            rows = SimpleNamespace(batch=batch, non_tensor_batch={"uid": b.groups.tolist()})
            after = function(rows)[0].batch
            advantages_BT: Tensor = after["advantages"] * after["response_mask"]  # some of them exclude tokens
            return advantages_BT

        return Case(what, advantages_of(name, args), theirs, kinds, differs=differs, float32_only=True)

    whole, holes = ("padded", "short"), ("padded", "holes")
    enters = "tool output and padding enter the recursion; ours steps over them"
    return [
        case("grpo advantage", "grpo", GRPOAdvantageFn, whole),
        case("rloo advantage", "rloo", RLOOAdvantageFn, whole),
        case("reinforceplusplus advantage", "reinforceplusplus", REINFORCEPLUSPLUSAdvantageFn, whole),
        case("on_policy_distill advantage", "on_policy_distill", OnPolicyDistillAdvantage, whole),
        case("clipb advantage, mu 0.5", "clipb", ClipBAdvantageFn, holes, mu=0.5),
        *(
            case(f"clipv advantage, {args}", "clipv", ClipVAdvantageFn, holes, mu=0.1, max_frac=share)
            for share, args in ((x, f"mu 0.1, at most {x} of the tokens") for x in (0.1, 1.0))
        ),
        case("GAE advantage", "ppo", PPOAdvantageFn, ("holes",), enters, gamma=0.9),
    ]


def _group_cases() -> list[Case]:
    """Advantages that its explorer computes from lists of experiences."""
    from trinity.algorithm.advantage_fn.asymre_advantage import ASYMREGroupAdvantage
    from trinity.algorithm.advantage_fn.gigpo_advantage import GiGPOAdvantageFn
    from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn
    from trinity.algorithm.advantage_fn.opmd_advantage import OPMDGroupAdvantage
    from trinity.algorithm.advantage_fn.rec_advantage import RECGroupedAdvantage

    def info_of(batch: Batch, row: int) -> dict[str, Any]:
        state = {} if batch.states[row] < 0 else {"env_state_hash": int(batch.states[row])}
        return {**state, "step_reward": float(batch.turn_rewards[row])}

    def case(
        what: str,
        name: str,
        cls: Callable[..., Any],
        differs: str = "",
        turns: bool = False,
        ours: dict[str, Any] | None = None,
        **args: Any,
    ) -> Case:
        def theirs(b: Batch) -> Tensor:
            rows = [
                SimpleNamespace(
                    eid=SimpleNamespace(
                        tid=int(b.groups[row]),
                        rid=int(b.rollouts[row]) if turns else row,
                        step=int(b.turns[row]) if turns else 0,
                    ),
                    reward=float(b.rewards[row]),
                    info=info_of(b, row) if turns else {},
                    action_mask=b.float_mask[row],
                )
                for row in range(len(b.rewards))
            ]
            cls(**args).process(rows)
            return torch.stack([row.advantages for row in rows])

        mine = advantages_of(name, {**args, **(ours or {})}, turns=turns)
        return Case(what, mine, theirs, ("padded", "holes", "short"), differs=differs, float32_only=True)

    def with_rewards(case: Case, rewards: Callable[[Batch], Tensor]) -> Case:
        """The same comparison with other rewards on both sides."""
        ours, theirs = (lambda b, side=side: side(replace(b, rewards=rewards(b))) for side in (case.ours, case.theirs))
        return replace(case, ours=ours, theirs=theirs)

    def sums_of_turns(b: Batch) -> Tensor:
        sums_R = torch.zeros(6, dtype=b.rewards.dtype).index_add_(0, b.rollouts, b.turn_rewards)
        return sums_R[b.rollouts]

    def step_wise(what: str, **args: Any) -> Case:
        name = f"step_wise_grpo advantage (multi_step_grpo){what}"
        return with_rewards(
            case(name, "step_wise_grpo", StepWiseGRPOAdvantageFn, turns=True, **args), lambda b: b.turn_rewards
        )

    def gigpo(what: str, differs: str = "", **args: Any) -> Case:
        args = {"gamma": 0.9, "omega": 0.7, **args}
        return case(f"gigpo advantage, {what}", "gigpo", GiGPOAdvantageFn, differs, turns=True, **args)

    batch_wide: dict[str, Any] = {"ours": {"anchor_scope": "batch"}}
    rest = "what a rollout's reward is beyond its turns' is dropped; ours is the last turn's"
    all_tasks = "turns of all tasks from one state are compared; the paper's groups, and ours, are within a task"
    return [
        *(
            case(f"opmd advantage (sppo's, too), {base}", "opmd", OPMDGroupAdvantage, opmd_baseline=base, tau=0.7)
            for base in ("mean", "logavgexp")
        ),
        case("asymre advantage, shift -0.3", "asymre", ASYMREGroupAdvantage, baseline_shift=-0.3),
        case("rec advantage", "rec", RECGroupedAdvantage),
        case("rec advantage, divided by sigma", "rec", RECGroupedAdvantage, std_normalize=True),
        step_wise(""),
        step_wise(", by the number of turns", enable_step_norm=True),
        step_wise(", sigma of the batch", std_cal_level="batch"),
        *(
            with_rewards(gigpo(f"states of the batch, fnorm {norm}", fnorm=norm, **batch_wide), sums_of_turns)
            for norm in ("none", "std")
        ),
        with_rewards(gigpo("states of a task", all_tasks), sums_of_turns),
        gigpo("rewards beyond the turns'", rest, **batch_wide),
    ]
