"""TRL: GRPOTrainer._compute_loss with a fake trainer whose forward pass returns the logprobs of the batch, and the loss
of GKDTrainer."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rftdask.testing.conformance import trl_preferences
from rftdask.testing.conformance.cases import MAX_TOKENS, NOT_EXTREME, Batch, Case, loss_of

TRL_SETTINGS: dict[str, Any] = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}


def cases() -> list[Case]:
    """Raises: ImportError: TRL is not installed."""
    from trl.experimental.gkd import GKDTrainer  # heavy and optional
    from trl.trainer.grpo_trainer import GRPOTrainer

    def trl(loss_type: str, **settings: Any) -> Callable[[Batch], Tensor]:
        def theirs(batch: Batch) -> Tensor:
            ids = torch.zeros(batch.mask.shape, dtype=torch.int64)
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1] + 1,
                "completion_ids": ids,
                "completion_mask": batch.float_mask,
                "advantages": batch.advantages[:, 0],
                "old_per_token_logps": batch.old,
                "ref_per_token_logps": batch.ref,
                "num_items_in_batch": batch.mask.sum(),
            }
            trainer = _trainer(batch, loss_type, get_gamma_weights=GRPOTrainer.get_gamma_weights, **settings)
            loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
            return loss

        return theirs

    def gkd(beta: float, temperature: float = 1.0) -> Case:
        def theirs(b: Batch) -> Tensor:
            labels = b.mask.long() - 100 * (~b.mask).long()
            given = {"labels": labels, "beta": beta, "temperature": temperature}
            loss: Tensor = GKDTrainer.generalized_jsd_loss(b.policy_logits, b.teacher_logits, **given)
            return loss

        ours = loss_of(
            "jsd", loss_agg_mode="token-mean", policy_loss_fn_args={"beta": beta, "temperature": temperature}
        )
        return Case(f"generalized_jsd_loss of GKD, beta {beta}, temperature {temperature}", ours, theirs)

    not_empty = ("padded", "holes", "short", "extreme")
    no_dual: dict[str, Any] = {"policy_loss_fn_args": {"clip_ratio_c": None}}
    clip: dict[str, Any] = {"policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.2}}
    k3: dict[str, Any] = {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.1}}
    corrected_k3 = {**k3, "kl_loss_fn": "corrected_k3"}

    grpo = loss_of(**no_dual, loss_agg_mode="seq-mean-token-mean")
    cispo = loss_of("cispo", policy_loss_fn_args={"clip_range_low": 1.0, "clip_range_high": 0.28})
    cap = "epsilon_high is the cap itself, not a distance from 1; give ours 1 less"
    counted = "a row without trained tokens counts in the mean over sequences; ours does not"
    return [
        Case("grpo loss", grpo, trl("grpo"), not_empty),
        Case("bnpo loss", loss_of("bnpo", **no_dual), trl("bnpo")),
        Case("dapo loss", loss_of("dapo", **no_dual), trl("dapo", high=0.28)),
        Case("dr_grpo loss", loss_of("dr_grpo", **no_dual), trl("dr_grpo"), not_empty),
        Case("two-sided clip (delta) is our dual clip", loss_of("bnpo"), trl("bnpo", delta=3.0)),
        Case("cispo loss, cap 1.28", cispo, trl("cispo", high=1.28)),
        Case("cispo loss, epsilon_high 0.28 as a distance", loss_of("cispo"), trl("cispo", high=0.28), differs=cap),
        Case("sapo loss", loss_of("sapo"), trl("sapo"), not_empty, tolerance_64=1e-7),  # its 1.05 is a float32
        Case("vespo loss", loss_of("vespo"), trl("vespo"), NOT_EXTREME),
        Case("gspo loss (sequence level)", loss_of("gspo", **clip), trl("grpo", level="sequence"), not_empty),
        Case("grpo loss with empty rows", grpo, trl("grpo"), ("empty",), differs=counted),
        Case("k3 penalty in the loss", loss_of("bnpo", **no_dual, **k3), trl("bnpo", beta=0.1)),
        Case(
            "corrected_k3 penalty in the loss",
            loss_of("bnpo", **no_dual, **corrected_k3),
            trl("bnpo", beta=0.1, use_bias_correction_kl=True),
            NOT_EXTREME,  # for extreme values both subtract large numbers, whose rounding exceeds the tolerance
        ),
        *(gkd(*args) for args in ((0.0,), (0.1,), (0.5,), (0.9, 2.5), (1.0,))),
        *trl_preferences.cases(),
    ]


def _trainer(
    batch: Batch,
    loss_type: str,
    *,
    get_gamma_weights: Callable[..., Tensor],
    high: float = 0.2,
    beta: float = 0.0,
    level: str = "token",
    **settings: Any,
) -> Any:
    """Fake trainer with the attributes that `_compute_loss` reads."""
    alone = {name: lambda value, *_, **__: value for name in ("gather", "gather_for_metrics", "reduce")}
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, **alone)
    return SimpleNamespace(
        args=SimpleNamespace(**{**TRL_SETTINGS, **settings}),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=0.2,
        epsilon_high=high,
        beta=beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        get_gamma_weights=get_gamma_weights,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy, torch.zeros_like(batch.policy), None),
    )
