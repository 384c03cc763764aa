"""TRL: the losses of its trainers, called with a fake trainer whose forward pass returns the logprobs of the batch.
Imported late, since it may be missing."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rftdask.testing.conformance.cases import MAX_TOKENS, NOT_EMPTY, NOT_EXTREME, Batch, Case, loss_of

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
            loss: Tensor = GRPOTrainer._compute_loss(_grpo_trainer(batch, loss_type, **settings), None, inputs)
            return loss

        return theirs

    def gkd(beta: float, temperature: float = 1.0) -> Case:
        def theirs(b: Batch) -> Tensor:
            labels = b.mask.long() - 100 * (~b.mask).long()
            arguments = {"labels": labels, "beta": beta, "temperature": temperature}
            loss: Tensor = GKDTrainer.generalized_jsd_loss(b.policy_logits, b.teacher_logits, **arguments)
            return loss

        ours = loss_of(
            "jsd", loss_agg_mode="token-mean", policy_loss_fn_args={"beta": beta, "temperature": temperature}
        )
        return Case(f"generalized_jsd_loss of GKD, beta {beta}, temperature {temperature}", ours, theirs)

    no_dual: dict[str, Any] = {"policy_loss_fn_args": {"clip_ratio_c": None}}
    clip: dict[str, Any] = {"policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.2}}
    k3: dict[str, Any] = {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.1}}
    corrected_k3 = {**k3, "kl_loss_fn": "corrected_k3"}

    grpo = loss_of(**no_dual, loss_agg_mode="seq-mean-token-mean")
    cispo = loss_of("cispo", policy_loss_fn_args={"clip_range_low": 1.0, "clip_range_high": 0.28})
    cap = "epsilon_high is the cap itself, not a distance from 1; give ours 1 less"
    counted = "a row without trained tokens counts in the mean over sequences; ours does not"
    return [
        Case("grpo loss", grpo, trl("grpo"), NOT_EMPTY),
        Case("bnpo loss", loss_of("bnpo", **no_dual), trl("bnpo")),
        Case("dapo loss", loss_of("dapo", **no_dual), trl("dapo", high=0.28)),
        Case("dr_grpo loss", loss_of("dr_grpo", **no_dual), trl("dr_grpo"), NOT_EMPTY),
        Case("two-sided clip (delta) is our dual clip", loss_of("bnpo"), trl("bnpo", delta=3.0)),
        Case("cispo loss, cap 1.28", cispo, trl("cispo", high=1.28)),
        Case("cispo loss, epsilon_high 0.28 as a distance", loss_of("cispo"), trl("cispo", high=0.28), differs=cap),
        Case("sapo loss", loss_of("sapo"), trl("sapo"), NOT_EMPTY, tolerance_64=1e-7),  # its 1.05 is a float32
        Case("vespo loss", loss_of("vespo"), trl("vespo"), NOT_EXTREME),
        Case("gspo loss (sequence level)", loss_of("gspo", **clip), trl("grpo", level="sequence"), NOT_EMPTY),
        Case("grpo loss with empty rows", grpo, trl("grpo"), ("empty",), differs=counted),
        Case("k3 penalty in the loss", loss_of("bnpo", **no_dual, **k3), trl("bnpo", beta=0.1)),
        Case(
            "corrected_k3 penalty in the loss",
            loss_of("bnpo", **no_dual, **corrected_k3),
            trl("bnpo", beta=0.1, use_bias_correction_kl=True),
            NOT_EXTREME,  # for extreme values both subtract large numbers, whose rounding exceeds the tolerance
        ),
        *(gkd(*args) for args in ((0.0,), (0.1,), (0.5,), (0.9, 2.5), (1.0,))),
        *_preference_cases(),
    ]


def _preference_cases() -> list[Case]:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.reward_trainer import RewardTrainer

    def simpo(batch: Batch) -> Tensor:
        trainer = _trainer(loss_type="simpo", beta=2.0, simpo_gamma=1.0, label_smoothing=0.0, alpha=0.0)
        means = _means(batch)
        loss: Tensor = CPOTrainer.cpo_loss(trainer, means[::2], means[1::2])[0].mean()
        return loss

    def orpo(sft: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        def theirs(batch: Batch) -> Tensor:
            means = _means(batch)
            trainer = _trainer(
                beta=0.1, concatenated_forward=lambda *_: (means[::2], means[1::2], means, means, sft(batch))
            )
            trainer.odds_ratio_loss = lambda *logprobs: ORPOTrainer.odds_ratio_loss(trainer, *logprobs)
            loss: Tensor = ORPOTrainer.get_batch_loss_metrics(trainer, None, {})[0]
            return loss

        return theirs

    def dpo(loss_type: str) -> Callable[[Batch], Tensor]:
        def theirs(batch: Batch) -> Tensor:
            trainer = _trainer(
                loss_types=[loss_type],
                loss_weights=[1.0],
                beta=0.1,
                ld_alpha=None,
                f_divergence_type="reverse_kl",
                use_weighting=False,
                precompute_ref_logps=True,
            )
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # all chosen rows come first
            refs = _sums(batch, batch.ref)
            inputs = _inputs(batch, order, ref_chosen_logps=refs[::2], ref_rejected_logps=refs[1::2])
            loss: Tensor = DPOTrainer._compute_loss(trainer, _model(batch, order), inputs, False)
            return loss

        return theirs

    def our_dpo(loss_type: str) -> Callable[[Batch], Tensor]:
        return loss_of("dpo", policy_loss_fn_args={"loss_type": loss_type})

    def kto(batch: Batch) -> Tensor:
        trainer = _trainer(
            loss_type="kto",
            beta=0.1,
            desirable_weight=1.3,
            undesirable_weight=0.8,
            calculate_KL=True,
            precompute_ref_logps=True,
            _compute_kl_logps=lambda *_: batch.mismatched[0],
        )
        more = {"label": batch.rewards > 0, "ref_logps": _sums(batch, batch.ref), "ref_KL_logps": batch.mismatched[1]}
        loss: Tensor = KTOTrainer._compute_loss(trainer, _model(batch), _inputs(batch, **more), False)
        return loss

    def reward_model(batch: Batch) -> Tensor:
        scores = _means(batch)
        trainer = _trainer(args=SimpleNamespace(center_rewards_coefficient=None))
        output = SimpleNamespace(logits=torch.cat([scores[::2], scores[1::2]])[:, None])
        inputs = {"attention_mask": batch.mask}
        loss: Tensor = RewardTrainer.compute_loss(trainer, lambda **_: output, inputs)
        return loss

    weighted = loss_of("kto", policy_loss_fn_args={"desirable_weight": 1.3, "undesirable_weight": 0.8})
    by_token = "SFT's part is a mean over all chosen tokens, prompts too; ours is the paper's, by response"
    return [
        Case("dpo loss", our_dpo("sigmoid"), dpo("sigmoid"), NOT_EMPTY),
        Case("dpo loss, hinge", our_dpo("hinge"), dpo("hinge"), NOT_EMPTY),
        Case("ipo loss", our_dpo("ipo"), dpo("ipo"), NOT_EMPTY),
        Case("kto loss, weights 1.3 and 0.8", weighted, kto, NOT_EMPTY),
        Case("reward model loss", loss_of("reward_model"), reward_model, NOT_EMPTY),
        Case("simpo loss, beta 2, gamma 1", loss_of("simpo"), simpo, NOT_EMPTY),
        Case(
            "orpo loss, SFT's part by response", loss_of("orpo"), orpo(_sft_by_response), NOT_EMPTY, float32_only=True
        ),
        Case("orpo loss", loss_of("orpo"), orpo(_sft_by_token), ("padded",), differs=by_token),
    ]


def _model(batch: Batch, order: Any = slice(None)) -> Callable[..., Any]:
    """Output of a model with TRL's fused head for the rows of a batch."""
    output = {name: batch.entropy[order] for name in ("entropy", "mean_logits")}
    output |= {"log_probs": (batch.policy * batch.mask)[order], "is_top1": batch.mask[order]}
    return lambda **_: SimpleNamespace(**output)


def _inputs(batch: Batch, order: Any = slice(None), **more: Any) -> dict[str, Any]:
    """Inputs with one prompt token followed by the scored tokens."""
    prompted = torch.nn.functional.pad(batch.mask[order].long(), (1, 0))
    names = ("input_ids", "attention_mask", "completion_mask")
    return {**dict.fromkeys(names, prompted), **more}


def _sums(batch: Batch, logprobs: Tensor) -> Tensor:
    """[B] logprob of each row."""
    return (logprobs * batch.mask).sum(-1)


def _means(batch: Batch) -> Tensor:
    """[B] mean logprob of each row."""
    return _sums(batch, batch.policy) / batch.mask.sum(-1)


def _sft_by_response(batch: Batch) -> Tensor:
    return -_means(batch)[::2].mean()


def _sft_by_token(batch: Batch) -> Tensor:
    return -batch.policy[::2][batch.mask[::2]].mean()


def _grpo_trainer(
    batch: Batch, loss_type: str, high: float = 0.2, beta: float = 0.0, level: str = "token", **settings: Any
) -> Any:
    from trl.trainer.grpo_trainer import GRPOTrainer

    return _trainer(
        args=SimpleNamespace(**{**TRL_SETTINGS, **settings}),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=0.2,
        epsilon_high=high,
        beta=beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy, torch.zeros_like(batch.policy), None),
    )


def _trainer(**settings: Any) -> Any:
    """Fake trainer with the attributes that the losses read."""
    alone = {name: lambda value, *_, **__: value for name in ("gather", "gather_for_metrics", "reduce")}
    return SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", num_processes=1, sync_gradients=True, **alone),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
