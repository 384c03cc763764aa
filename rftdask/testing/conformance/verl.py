"""verl: the functions of verl.trainer.ppo.core_algos."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.compose import make_part
from rftdask.testing.conformance.cases import (
    NOT_EXTREME,
    Batch,
    Case,
    advantages_of,
    kl_term,
    loss_of,
    token_rewards,
    value_loss_of,
)


def cases() -> list[Case]:
    """Raises: ImportError: verl is not installed."""
    from verl.trainer.ppo import core_algos  # heavy and optional
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28
    )

    loose: dict[str, Any] = {"tolerance_64": 1e-7}  # its denominators have 1e-8 added

    def loss(name: str, mode: str = "token-mean") -> Callable[[Batch], Tensor]:
        function = core_algos.get_policy_loss_fn(name)
        return lambda b: function(b.old, b.policy, b.advantages, b.float_mask, mode, config)[0]

    def kl(name: str) -> Callable[[Batch], Tensor]:
        return lambda b: core_algos.agg_loss(
            core_algos.kl_penalty(b.policy, b.ref, name), b.float_mask, "token-mean", batch_num_tokens=b.mask.sum()
        )

    clip = {"clip_range_low": 0.2, "clip_range_high": 0.28}
    dppo = loss_of("dppo", policy_loss_fn_args={"mask_low": 0.2, "mask_high": 0.28, "kl_tau": 0.0})
    tau = 0.1
    with_kl = loss_of("dppo", policy_loss_fn_args={"mask_low": 0.2, "mask_high": 0.28, "kl_tau": tau})

    def dppo_and_kl(b: Batch) -> Tensor:
        # (log r)^2, of which its k2 is the half.
        squares = 2 * core_algos.kl_penalty(b.policy, b.old, "k2")
        mean: Tensor = core_algos.agg_loss(squares, b.float_mask, "token-mean", batch_num_tokens=b.mask.sum())
        return loss("dppo_tv")(b) + tau * mean

    def value(clip: float) -> Callable[[Batch], Tensor]:
        return lambda b: core_algos.compute_value_loss(
            b.policy, b.ref, b.old, b.float_mask, clip, batch_num_tokens=b.mask.sum()
        )[0]

    gspo = loss_of("gspo", policy_loss_fn_args=clip), loss("gspo", "seq-mean-token-mean")
    return [
        *(
            Case(
                f"ppo loss, {mode}",
                loss_of(policy_loss_fn_args=clip, loss_agg_mode=mode),
                loss("vanilla", mode),
                **loose,
            )
            for mode in AGGREGATIONS
        ),
        Case("gspo loss, as its paper aggregates", *gspo, NOT_EXTREME, **loose),
        Case("sapo loss", loss_of("sapo"), loss("sapo"), **loose),
        Case("cispo loss", loss_of("cispo", policy_loss_fn_args=clip), loss("cispo")),
        Case("gradient of dppo without its KL term", dppo, loss("dppo_tv"), NOT_EXTREME, compare_value=False),
        Case("gradient of dppo with its KL term", with_kl, dppo_and_kl, NOT_EXTREME, compare_value=False),
        *(Case(f"value loss, clipped at {clip}", value_loss_of(clip), value(clip)) for clip in (0.2, 5.0)),
        Case("adaptive KL coefficient, eight steps", _our_coefs, partial(_their_coefs, core_algos)),
        *(Case(f"{name} estimate in a loss", kl_term(name), kl(name)) for name in ("k1", "k2", "abs", "low_var_kl")),
        Case("k3 estimate in a loss", kl_term("k3"), kl("k3"), differs="k3 is bounded to +-10; ours is low_var_kl"),
        *_advantage_cases(core_algos),
    ]


_CONTROL: dict[str, float] = {"target_kl": 0.5, "horizon": 100}


def _our_coefs(batch: Batch) -> Tensor:
    controller = make_part("kl_loss_fn", "k2", {"kl_coef": 0.3, "adaptive": True, **_CONTROL})
    coefs = [0.3]
    for kl in batch.rewards.abs().tolist():
        coefs.append(controller.next_coef(coefs[-1], kl, 32))
    return torch.tensor(coefs, dtype=torch.float64)


def _their_coefs(core_algos: Any, batch: Batch) -> Tensor:
    controller = core_algos.AdaptiveKLController(0.3, **_CONTROL)
    coefs = [0.3]
    for kl in batch.rewards.abs().tolist():
        controller.update(kl, 32)
        coefs.append(controller.value)
    return torch.tensor(coefs, dtype=torch.float64)


Compute = Callable[[Batch, Tensor], tuple[Tensor, Any]]
"""Advantages and returns of a batch and its rewards by token."""


def _advantage_cases(core_algos: Any) -> list[Case]:
    def index(batch: Batch) -> Any:
        return np.array(batch.groups.tolist(), dtype=object)

    def case(
        what: str, ours: Callable[[Batch], Tensor], compute: Callable[[Batch, Tensor], tuple[Tensor, Any]]
    ) -> Case:
        def theirs(b: Batch) -> Tensor:
            return compute(b, token_rewards(b))[0] * b.mask

        return Case(what, ours, theirs, ("padded", "holes", "short"), float32_only=True)

    def grpo(scale: bool) -> Compute:
        compute = core_algos.compute_grpo_outcome_advantage
        return lambda b, rewards: compute(rewards, b.float_mask, index(b), norm_adv_by_std_in_grpo=scale)

    rloo, remax = core_algos.compute_rloo_outcome_advantage, core_algos.compute_remax_outcome_advantage
    gae = core_algos.compute_gae_advantage_return
    ours_gae = advantages_of("ppo", {"gamma": 0.9, "lam": 0.8})
    return [
        case("grpo advantage", advantages_of("grpo"), grpo(True)),
        case("dr_grpo advantage", advantages_of("grpo", {"std": "none"}), grpo(False)),
        case("rloo advantage", advantages_of("rloo"), lambda b, rewards: rloo(rewards, b.float_mask, index(b))),
        case("GAE with tool output within", ours_gae, lambda b, r: gae(r, b.values, b.float_mask, 0.9, 0.8)),
        case("remax advantage", advantages_of("remax"), lambda b, r: remax(r, b.rewards.flip(0), b.float_mask)),
    ]
