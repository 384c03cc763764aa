"""Trinity-RFT: its policy loss classes, KL functions and trainer-side advantage functions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rftdask.testing.conformance.cases import Batch, Case, advantages_of, loss_of, token_rewards

LOOSE = 1e-7
"""Its means add 1e-8 to the denominator."""


def cases() -> list[Case]:
    """Raises: ImportError: Trinity-RFT or what its algorithm package imports (verl, ray) is not installed."""
    from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN  # heavy and optional

    def loss(name: str, **settings: Any) -> Callable[[Batch], Tensor]:
        cls = POLICY_LOSS_FN.get(name)
        module = cls(**{**cls.default_args(), **settings})
        return lambda b: module(
            log_prob=b.policy,
            old_log_probs=b.old,
            ref_log_prob=b.ref,
            response_mask=b.float_mask,
            advantages=b.advantages,
        )[0]

    near = ("padded", "holes", "short", "empty")
    same = [
        Case(f"{name} loss", loss_of(policy_loss_fn=name), loss(name), near, tolerance_64=LOOSE)
        for name in ("ppo", "cispo", "topr", "opmd", "sppo", "rec", "importance_sampling")
    ]
    rec = [
        Case(
            f"rec loss, {clip} clip, weight {weight}, {regularizer}",
            loss_of(policy_loss_fn="rec", policy_loss_fn_args=args),
            loss("rec", **args),
            near,
            tolerance_64=LOOSE,
        )
        for clip, weight, regularizer in (
            ("one-side", "importance_sampling", "k2"),
            ("two-side", "advantage", "forward-kl"),
            ("ring", "none", "none"),
        )
        for args in [{"clip_mode": clip, "weight": weight, "regularizer": regularizer, "regularizer_coef": 0.1}]
    ]
    sft = [
        Case(f"{name} loss", loss_of("sft", policy_loss_fn=name), loss(name), tolerance_64=LOOSE) for name in ("sft",)
    ]
    masking = {"enable_sequence_masking": True}
    return [
        *same,
        *rec,
        *sft,
        Case(
            "ppo loss, sequence masking",
            loss_of(policy_loss_fn_args=masking),
            loss("ppo", **masking),
            near,
            tolerance_64=LOOSE,
        ),
        Case("gspo loss", loss_of("gspo"), loss("gspo"), ("padded", "holes", "short"), tolerance_64=LOOSE),
        Case(
            "sapo loss",
            loss_of(policy_loss_fn="sapo"),
            loss("sapo"),
            near,
            differs="the gate is detached and multiplies log p: its gradient grows with the ratio, nothing is clipped",
        ),
        Case(
            "dpo loss",
            loss_of("dpo", kl_loss_fn="none"),
            loss("dpo"),
            ("padded", "holes"),
            differs="all pairs of a micro-batch are summed into one logit; ours has one per pair",
        ),
        Case(
            "seq-mean-token-sum-norm",
            loss_of(loss_agg_mode="seq-mean-token-sum-norm"),
            loss("ppo", loss_agg_mode="seq-mean-token-sum-norm"),
            ("padded",),
            differs="divides by the padded width, not also by the number of sequences",
        ),
        *_advantage_cases(),
    ]


def _advantage_cases() -> list[Case]:
    from trinity.algorithm.advantage_fn.clipb_advantage import ClipBAdvantageFn
    from trinity.algorithm.advantage_fn.clipv_advantage import ClipVAdvantageFn
    from trinity.algorithm.advantage_fn.grpo_advantage import GRPOAdvantageFn
    from trinity.algorithm.advantage_fn.jsd_advantage import JSDAdvantage
    from trinity.algorithm.advantage_fn.on_policy_distill_advantage import OnPolicyDistillAdvantage
    from trinity.algorithm.advantage_fn.ppo_advantage import PPOAdvantageFn
    from trinity.algorithm.advantage_fn.reinforce_plus_plus_advantage import REINFORCEPLUSPLUSAdvantageFn
    from trinity.algorithm.advantage_fn.rloo_advantage import RLOOAdvantageFn

    def theirs(function: Any) -> Callable[[Batch], Tensor]:
        def advantages(b: Batch) -> Tensor:
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
            advantages_NT: Tensor = after["advantages"] * after["response_mask"]  # which some take tokens out of
            return advantages_NT

        return advantages

    whole = ("padded", "short")
    return [
        Case("grpo advantage", advantages_of("grpo"), theirs(GRPOAdvantageFn()), whole, float32_only=True),
        Case("rloo advantage", advantages_of("rloo"), theirs(RLOOAdvantageFn()), whole, float32_only=True),
        Case(
            "reinforceplusplus advantage",
            advantages_of("reinforceplusplus"),
            theirs(REINFORCEPLUSPLUSAdvantageFn()),
            whole,
            float32_only=True,
        ),
        Case(
            "on_policy_distill advantage",
            advantages_of("on_policy_distill"),
            theirs(OnPolicyDistillAdvantage()),
            whole,
            float32_only=True,
        ),
        Case("jsd advantage", advantages_of("jsd"), theirs(JSDAdvantage()), whole, float32_only=True),
        Case(
            "clipb advantage, mu 0.5",
            advantages_of("clipb", {"mu": 0.5}),
            theirs(ClipBAdvantageFn(mu=0.5)),
            ("padded", "holes"),
            float32_only=True,
        ),
        *(
            Case(
                f"clipv advantage, mu 0.1, at most {share} of the tokens",
                advantages_of("clipv", {"mu": 0.1, "max_frac": share}),
                theirs(ClipVAdvantageFn(mu=0.1, max_frac=share)),
                ("padded", "holes"),
                float32_only=True,
            )
            for share in (0.1, 1.0)
        ),
        Case(
            "GAE advantage",
            advantages_of("ppo", {"gamma": 0.9}),
            theirs(PPOAdvantageFn(gamma=0.9)),
            ("holes",),
            float32_only=True,
            differs="tool output and padding enter the recursion; ours steps over them",
        ),
    ]
