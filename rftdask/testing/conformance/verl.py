"""verl: the functions of verl.trainer.ppo.core_algos."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.testing.conformance.cases import Batch, Case, advantages_of, loss_of, token_rewards


def cases() -> list[Case]:
    """Raises: ImportError: verl is not installed."""
    from verl.trainer.ppo import core_algos  # heavy and optional
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28
    )

    def loss(name: str, mode: str = "token-mean") -> Callable[[Batch], Tensor]:
        function = core_algos.get_policy_loss_fn(name)
        return lambda b: function(b.old, b.policy, b.advantages, b.float_mask, mode, config)[0]

    def kl(name: str) -> Callable[[Batch], Tensor]:
        return lambda b: core_algos.agg_loss(
            core_algos.kl_penalty(b.policy, b.ref, name), b.float_mask, "token-mean", batch_num_tokens=b.mask.sum()
        )

    clip = {"clip_range_low": 0.2, "clip_range_high": 0.28}
    near = ("padded", "holes", "short", "empty")
    return [
        *(
            Case(
                f"ppo loss, {mode}",
                loss_of(policy_loss_fn_args=clip, loss_agg_mode=mode),
                loss("vanilla", mode),
                tolerance_64=1e-7,
            )
            for mode in AGGREGATIONS
        ),
        Case(
            "gspo loss, as its paper aggregates",
            loss_of("gspo", policy_loss_fn_args=clip),
            loss("gspo", "seq-mean-token-mean"),
            near,
            tolerance_64=1e-7,
        ),
        Case("sapo loss", loss_of("sapo"), loss("sapo"), tolerance_64=1e-7),
        Case("cispo loss", loss_of("cispo", policy_loss_fn_args=clip), loss("cispo")),
        Case(
            "gradient of dppo without its KL term",
            loss_of("dppo", policy_loss_fn_args={"mask_low": 0.2, "mask_high": 0.28, "kl_tau": 0.0}),
            loss("dppo_tv"),
            near,
            compare_value=False,
        ),
        *(
            Case(f"{ours} estimate in a loss", _kl(ours), kl(theirs))
            for ours, theirs in (("k1", "k1"), ("k2", "k2"), ("abs", "abs"), ("low_var_kl", "low_var_kl"))
        ),
        Case("k3 estimate in a loss", _kl("k3"), kl("k3"), differs="k3 is bounded to +-10; ours is low_var_kl"),
        *_advantage_cases(core_algos),
    ]


def _kl(name: str) -> Callable[[Batch], Tensor]:
    ours = loss_of("sft", kl_loss_fn=name, kl_loss_fn_args={"kl_coef": 1.0})
    plain = loss_of("sft")
    return lambda batch: ours(batch) - plain(batch)


def _advantage_cases(core_algos: Any) -> list[Case]:
    def index(batch: Batch) -> Any:
        return np.array(batch.groups.tolist(), dtype=object)

    def grpo(scale: bool) -> Callable[[Batch], Tensor]:
        return lambda b: core_algos.compute_grpo_outcome_advantage(
            token_rewards(b), b.float_mask, index(b), norm_adv_by_std_in_grpo=scale
        )[0]

    def rloo(b: Batch) -> Tensor:
        advantages_NT: Tensor = core_algos.compute_rloo_outcome_advantage(token_rewards(b), b.float_mask, index(b))[0]
        return advantages_NT

    def gae(b: Batch) -> Tensor:
        advantages_NT: Tensor = core_algos.compute_gae_advantage_return(
            token_rewards(b), b.values, b.float_mask, 0.9, 0.8
        )[0]
        return advantages_NT * b.mask

    def remax(b: Batch) -> Tensor:
        advantages_NT: Tensor = core_algos.compute_remax_outcome_advantage(
            token_rewards(b), b.rewards.flip(0), b.float_mask
        )[0]
        return advantages_NT * b.mask

    whole = ("padded", "holes", "short")
    return [
        Case("grpo advantage", advantages_of("grpo"), grpo(True), whole, float32_only=True),
        Case("dr_grpo advantage", advantages_of("grpo", {"std": "none"}), grpo(False), whole, float32_only=True),
        Case("rloo advantage", advantages_of("rloo"), rloo, whole, float32_only=True),
        Case(
            "GAE with tool output within",
            advantages_of("ppo", {"gamma": 0.9, "lam": 0.8}),
            gae,
            whole,
            float32_only=True,
        ),
        Case("remax advantage", advantages_of("remax"), remax, whole, float32_only=True),
    ]
