"""Inputs for the tests of the algorithms: from short lists, and seeded random batches with holes, short and empty
rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.aggregation import row_weights
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.config.schema.algorithm import registered_parts
from tests.numerics import shifted_seed

Numbers = Sequence[float]


def token_weights(mask_BT: Tensor, mode: str, **given: Any) -> Tensor:
    """[B, T] of `row_weights`."""
    return mask_BT * row_weights(mask_BT.sum(-1), mode, **given)[:, None]


def side_by_side(**padded_NT: Tensor | None) -> dict[str, Any]:
    """Token values [N, T] in the form of `AdvantageInputs`; padding is not trained."""
    given = {name.replace("_NT", "_Q"): None if value is None else value.flatten() for name, value in padded_NT.items()}
    shape = next(value.shape for value in padded_NT.values() if value is not None)
    return {"tokens_N": torch.full(shape[:1], shape[1]), **given}


def load_all(key: str) -> dict[str, Any]:
    """Name -> class of every registered part for a key of the configuration."""
    return {name: part.load() for name, part in registered_parts(key).items()}


ALGORITHMS = load_all("algorithm_type")
ADVANTAGE_FNS = load_all("advantage_fn")
POLICY_LOSS_FNS = load_all("policy_loss_fn")
KL_FNS = load_all("kl_loss_fn")
ENTROPY_FNS = load_all("entropy_loss_fn")
# All pure functions of the rows; `data_juicer`, which has a process, is tested in test_operator_pipeline_juicer.py.
OPERATORS = {name: cls for name, cls in load_all("operator").items() if name != "data_juicer"}


def rows(values: Numbers | Sequence[Numbers] | Tensor) -> Tensor:
    """[B, T] float64; one row if `values` is flat."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    return tensor if tensor.dim() == 2 else tensor[None]


def inputs(
    policy: Numbers | Sequence[Numbers] | Tensor,
    rollout: Numbers | Sequence[Numbers] | Tensor | None = None,
    advantages: Numbers | Sequence[Numbers] | Tensor | None = None,
    mask: Any = None,
    mode: str = "token-mean",
    **more: Any,
) -> LossInputs:
    """LossInputs in float64, trained everywhere and on policy by default."""
    logprobs = rows(policy).clone().requires_grad_()
    loss_mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    loss_mask = loss_mask if loss_mask.dim() == 2 else loss_mask[None]
    return LossInputs(
        policy_logprobs_BT=logprobs,
        rollout_logprobs_BT=logprobs.detach().clone() if rollout is None else rows(rollout),
        loss_mask_BT=loss_mask,
        token_weights_BT=token_weights(loss_mask, mode, max_tokens=logprobs.shape[1], dtype=torch.float64),
        advantages_BT=None if advantages is None else rows(advantages),
        **more,
    )


def from_ratios(ratios: Numbers, advantages: Numbers, **more: Any) -> LossInputs:
    """One row whose tokens have the given ratios to the sampler."""
    log_ratios = torch.tensor(ratios, dtype=torch.float64).log()
    rollout = torch.full_like(log_ratios, -1.0)
    return inputs(rollout + log_ratios, rollout, advantages, **more)


def random_batch(seed: int, num_rows: int = 6, width: int = 7, dtype: torch.dtype = torch.float64) -> LossInputs:
    """A batch with every field: masks with holes, a single-token row (1) and an empty row (2), some far ratios;
    weights token-mean."""
    generator = torch.Generator().manual_seed(shifted_seed(seed))

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(num_rows, width, generator=generator, dtype=dtype)

    policy = -draw().abs() - 0.05
    mask = torch.rand(num_rows, width, generator=generator) > 0.3
    mask[0, 0] = True
    mask[1] = False
    mask[1, width // 2] = True
    mask[2] = False
    far = torch.where(torch.rand(num_rows, width, generator=generator) > 0.9, 6.0, 0.4)
    return LossInputs(
        policy_logprobs_BT=policy.clone().requires_grad_(),
        rollout_logprobs_BT=policy + far * draw(),
        loss_mask_BT=mask,
        token_weights_BT=token_weights(mask, "token-mean", dtype=dtype),
        advantages_BT=draw()[:, :1].expand(num_rows, width).clone(),
        ref_logprobs_BT=policy + draw(0.3),
        entropy_BT=draw().abs().requires_grad_(),
        expert_mask_B=torch.arange(num_rows) % 3 == 0,
        proximal_logprobs_BT=policy + draw(0.2),
        rewards_B=(torch.arange(num_rows) % 2).to(dtype),
        kl_baseline=0.3,
    )


WIDTH = 5
"""Tokens of each row of `random_advantage_inputs`."""


def random_advantage_inputs(seed: int, num_rows: int = 24, num_groups: int = 5) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(shifted_seed(seed))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    group = torch.randint(0, num_groups, (num_rows // 2,), generator=generator)
    mask = torch.rand(num_rows, WIDTH, generator=generator) > 0.3
    return AdvantageInputs(
        rewards_N=draw(num_rows // 2).round(decimals=1).repeat_interleave(2),
        group_N=group.repeat_interleave(2),
        lengths_N=mask.sum(-1),
        rollout_N=torch.arange(num_rows) // 2,
        turn_N=torch.arange(num_rows) % 2,
        state_N=torch.randint(-1, 3, (num_rows,), generator=generator),
        baseline_rewards_N=draw(num_rows),
        **side_by_side(
            loss_mask_NT=mask,
            values_NT=draw(num_rows, WIDTH),
            rollout_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            policy_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            ref_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            teacher_logprobs_NT=-draw(num_rows, WIDTH).abs(),
            entropy_NT=draw(num_rows, WIDTH).abs(),
            necs_NT=draw(num_rows, WIDTH),
        ),
    )


def with_weights(batch: LossInputs, algorithm: Any, max_tokens: int = 16) -> LossInputs:
    """Batch with the token weights of the algorithm."""
    weights = algorithm.token_weights(
        batch.loss_mask_BT,
        max_tokens=max_tokens,
        expert_mask_B=batch.expert_mask_B,
        dtype=batch.policy_logprobs_BT.dtype,
    )
    return replace(batch, token_weights_BT=weights)


def take(batch: LossInputs, index: Any) -> LossInputs:
    """Rows of a batch with their weights; logprobs stay connected to those of the batch."""
    changes: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            changes[name] = value[index]
    return replace(batch, **changes)


def gradient(batch: LossInputs, algorithm: Any) -> tuple[Tensor, Tensor]:
    """Loss and its gradient with respect to the policy's logprobs."""
    loss, _ = algorithm.compute_loss(batch)
    (result,) = torch.autograd.grad(loss, batch.policy_logprobs_BT)
    return loss.detach(), result


def type_for(loss: str) -> str:
    """An algorithm type that takes the named policy loss: the one of its name, or of its rows."""
    if loss in ALGORITHMS:
        return loss
    return "dpo" if POLICY_LOSS_FNS[loss].schema == "dpo" else "grpo"


def loss_only(name: str, **args: Any) -> Any:
    """An algorithm that has the named policy loss and no KL or entropy term."""
    return make_algorithm(type_for(name), policy_loss_fn=name, policy_loss_fn_args=args, kl_loss_fn="none")
