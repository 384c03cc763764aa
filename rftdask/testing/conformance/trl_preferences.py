"""TRL: preference losses, called with a fake trainer that returns the outputs of a model."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rftdask.testing.conformance.cases import Batch, Case, loss_of

_KINDS = ("padded", "holes", "short", "extreme")
"""Kinds of batches without empty rows, whose mean logprob is undefined in TRL."""


def cases() -> list[Case]:
    """Raises: ImportError: TRL is not installed."""
    from trl.experimental.cpo import CPOTrainer  # heavy and optional, as all of it
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
                beta=0.1,
                concatenated_forward=lambda *_: (means[::2], means[1::2], means, means, sft(batch)),
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
        more = {
            "label": batch.rewards > 0,
            "ref_logps": _sums(batch, batch.ref),
            "ref_KL_logps": batch.mismatched[1],
        }
        loss: Tensor = KTOTrainer._compute_loss(trainer, _model(batch), _inputs(batch, **more), False)
        return loss

    def reward_model(batch: Batch) -> Tensor:
        scores = _means(batch)
        trainer = _trainer(
            args=SimpleNamespace(center_rewards_coefficient=None),
        )
        said = SimpleNamespace(logits=torch.cat([scores[::2], scores[1::2]])[:, None])
        inputs = {"attention_mask": batch.mask}
        loss: Tensor = RewardTrainer.compute_loss(trainer, lambda **_: said, inputs)
        return loss

    weighted = loss_of("kto", policy_loss_fn_args={"desirable_weight": 1.3, "undesirable_weight": 0.8})
    by_token = "SFT's part is a mean over all chosen tokens, prompts too; ours is the paper's, by response"
    return [
        Case("dpo loss", our_dpo("sigmoid"), dpo("sigmoid"), _KINDS),
        Case("dpo loss, hinge", our_dpo("hinge"), dpo("hinge"), _KINDS),
        Case("ipo loss", our_dpo("ipo"), dpo("ipo"), _KINDS),
        Case("kto loss, weights 1.3 and 0.8", weighted, kto, _KINDS),
        Case("reward model loss", loss_of("reward_model"), reward_model, _KINDS),
        Case("simpo loss, beta 2, gamma 1", loss_of("simpo"), simpo, _KINDS),
        Case("orpo loss, SFT's part by response", loss_of("orpo"), orpo(_sft_by_response), _KINDS, float32_only=True),
        Case("orpo loss", loss_of("orpo"), orpo(_sft_by_token), ("padded",), differs=by_token),
    ]


def _model(batch: Batch, order: Any = slice(None)) -> Callable[..., Any]:
    """Output of a model with TRL's fused head for the rows of a batch."""
    said = {name: batch.entropy[order] for name in ("entropy", "mean_logits")}
    said |= {"log_probs": (batch.policy * batch.mask)[order], "is_top1": batch.mask[order]}
    return lambda **_: SimpleNamespace(**said)


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


def _trainer(**settings: Any) -> Any:
    """Fake trainer with the attributes that the losses read."""
    accelerator = SimpleNamespace(
        device="cpu", **{name: lambda value, *_: value for name in ("gather", "gather_for_metrics")}
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
