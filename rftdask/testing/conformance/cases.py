"""Random batches, and cases that pair one of our functions with a function of a peer.

Independent of any peer. Invariant: both sides of a case get the same numbers in the same dtype, and neither sees the
result of the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs, AdvantageResult
from rftdask.algorithm.compose import make_algorithm, make_part
from rftdask.algorithm.losses.base import LossInputs
from rftdask.trainer.engines.critic import value_loss

NOT_EMPTY = ("padded", "holes", "short", "extreme")
"""Kinds of batches without empty rows, for peers that leave their mean logprob undefined."""
NOT_EXTREME = ("padded", "holes", "short", "empty")
"""Kinds of batches for peers that do not bound log-ratios."""
STEP = 3
"""Training step of every batch."""
MAX_TOKENS = 12
"""Width of the batches, which is the longest response."""


@dataclass(frozen=True)
class Batch:
    """Tensors of one comparison, [B, T] unless stated otherwise. `policy` requires grad."""

    policy: Tensor
    old: Tensor
    """Logprobs of the trainer before the update."""
    sampler: Tensor
    """Logprobs of the inference engine."""
    ref: Tensor
    mask: Tensor
    """bool."""
    advantages: Tensor
    """Advantages, constant along a row."""
    rewards: Tensor
    """[B]"""
    groups: Tensor
    """[B] int64 group of each row; every group has at least two rows."""
    values: Tensor

    @property
    def entropy(self) -> Tensor:
        """Not negative."""
        return self.values.abs()

    @property
    def mismatched(self) -> tuple[Tensor, Tensor]:
        """[B] policy and reference logprobs of responses to other prompts, without gradient."""
        policy, ref = ((logprobs * self.mask).sum(-1) for logprobs in (self.sampler, self.ref))
        return policy, ref

    @property
    def entropy_change(self) -> Tensor:
        """Change of the entropy, of either sign."""
        return self.values.flip(0)

    @property
    def policy_logits(self) -> Tensor:
        """[B, T, MAX_TOKENS] logits. Each vocabulary entry depends on another number of `policy`, so that the gradient
        distinguishes the entries."""
        return torch.stack([self.policy.roll(word, dims=1) for word in range(MAX_TOKENS)], dim=-1)

    @property
    def teacher_logits(self) -> Tensor:
        """Like `policy_logits`, computed from `ref`."""
        return torch.stack([self.ref.roll(word, dims=1) for word in range(MAX_TOKENS)], dim=-1)

    @property
    def experts(self) -> Tensor:
        """[B] bool, True for the two rows of a group that are the demonstrations of a mixture."""
        return self.groups == 1

    @property
    def rollouts(self) -> Tensor:
        """[B] int64 rollout of each row: two per group; two of the six have two turns, in order."""
        return torch.tensor([0, 1, 0, 2, 3, 3, 4, 5])

    @property
    def turns(self) -> Tensor:
        """[B] int64, turn of the row in its rollout."""
        return torch.tensor([0, 0, 1, 0, 0, 1, 0, 0])

    @property
    def states(self) -> Tensor:
        """[B] int64 state of each row: some occur in one group, some in two, and one is unknown."""
        return torch.tensor([0, 0, 1, -1, 2, 1, 2, 0])

    @property
    def turn_rewards(self) -> Tensor:
        """[B] distinct integers. Peers divide by a spread in float32, which for nearly equal rewards is mostly
        rounding."""
        return self.values[:, 0].argsort().argsort().to(self.rewards.dtype)

    @property
    def float_mask(self) -> Tensor:
        """Mask in the dtype of the numbers, as most peers require."""
        return self.mask.to(self.policy.dtype)


def sample_batch(seed: int, dtype: torch.dtype, *, kind: str) -> Batch:
    """Random batch of 8 rows. kind: "padded" (right padding), "holes" (tool output within), "short" (one-token rows),
    "empty" (two rows without a trained token), "extreme" (log-ratios up to +-15)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (8, MAX_TOKENS)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(2, MAX_TOKENS + 1, (8, 1), generator=generator)
    if kind == "short":
        lengths[:4] = 1
    mask = torch.arange(MAX_TOKENS)[None] < lengths
    if kind == "holes":
        mask = mask & (torch.rand(shape, generator=generator) > 0.3)
        mask[:, 0] = True
    if kind == "empty":
        mask[2:4] = False
    policy = -draw(1.0).abs() - 0.01
    advantages = draw(1.0)[:, :1].expand(shape)
    spread = 5.0 if kind == "extreme" else 0.3
    fields = {
        "policy": policy,
        "old": policy + draw(spread).clamp(-15.0, 15.0),
        "ref": policy + draw(spread),
        "advantages": advantages.clone(),
        "values": draw(1.0),
    }
    fields["sampler"] = fields["old"] + draw(0.2)
    cast = {name: value.to(dtype) for name, value in fields.items()}
    cast["policy"] = cast["policy"].requires_grad_()
    rewards = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    return Batch(mask=mask, rewards=rewards, groups=torch.tensor([0, 1, 0, 1, 2, 2, 2, 0]), **cast)


@dataclass(frozen=True)
class Case:
    """One of our functions and one of a peer. Both return a tensor: a loss, whose gradients are compared as well, or
    advantages."""

    what: str
    ours: Callable[[Batch], Tensor]
    theirs: Callable[[Batch], Tensor]
    kinds: tuple[str, ...] = (*NOT_EXTREME, "extreme")
    differs: str = ""
    """How the peer differs. Empty: both must agree."""
    tolerance_64: float = 1e-10
    """Absolute and relative tolerance in float64 (float32: 1e-6). Peers that add 1e-8 to denominators need more."""
    float32_only: bool = False
    """True if the peer always computes in float32."""
    compare_value: bool = True
    """False if only the gradients should agree."""


def loss_of(algorithm_type: str = "grpo", *, correct: bool = False, **parts: Any) -> Callable[[Batch], Tensor]:
    """Our loss of a batch, without KL and entropy terms by default. correct: use the recorded rollout logprobs."""
    algorithm = make_algorithm(algorithm_type, **{"kl_loss_fn": "none", **parts})

    def ours(batch: Batch) -> Tensor:
        divergence_BT = None
        if algorithm.use_teacher:
            both = (logits.flatten(0, 1) for logits in (batch.policy_logits, batch.teacher_logits))
            divergence_BT = algorithm.policy_loss_fn.divergence(*both).view_as(batch.policy)
        inputs = LossInputs(
            policy_logprobs_BT=batch.policy,
            rollout_logprobs_BT=batch.sampler if correct else batch.old,
            loss_mask_BT=batch.mask,
            token_weights_BT=algorithm.token_weights(
                batch.mask, max_tokens=MAX_TOKENS, expert_mask_B=batch.experts, step=STEP, dtype=batch.policy.dtype
            ),
            advantages_BT=batch.advantages,
            ref_logprobs_BT=batch.ref,
            expert_mask_B=batch.experts,
            proximal_logprobs_BT=batch.old if correct else None,
            divergence_BT=divergence_BT,
            rewards_B=batch.rewards,
            kl_baseline=max(0.0, float((batch.mismatched[0] - batch.mismatched[1]).mean())),
        )
        return algorithm.compute_loss(inputs)[0]

    return ours


def kl_term(name: str) -> Callable[[Batch], Tensor]:
    """Our KL term of a batch: mean of an estimate over its tokens."""
    ours = loss_of("sft", kl_loss_fn=name, kl_loss_fn_args={"kl_coef": 1.0})
    plain = loss_of("sft")
    return lambda batch: ours(batch) - plain(batch)


def value_loss_of(clip: float) -> Callable[[Batch], Tensor]:
    """Our critic loss, with `policy` as values, `old` as values before the update, and `ref` as returns."""

    def ours(batch: Batch) -> Tensor:
        loss_BT = value_loss(batch.policy, batch.old, batch.ref, clip)
        return (loss_BT * batch.mask).sum() / batch.mask.sum()

    return ours


def advantages_of(
    name: str, args: Mapping[str, Any] | None = None, *, turns: bool = False
) -> Callable[[Batch], Tensor]:
    """Our advantages of a batch, [B, T]. turns: True if some rows are turns of one rollout."""
    function = make_part("advantage_fn", name, args)

    def ours(batch: Batch) -> Tensor:
        inputs = AdvantageInputs(
            rewards_N=batch.rewards,
            group_N=batch.groups,
            lengths_N=batch.mask.sum(-1),
            # Padding tokens are not trained.
            tokens_N=torch.full_like(batch.groups, batch.mask.shape[1]),
            loss_mask_Q=batch.mask.flatten(),
            values_Q=batch.values.flatten(),
            rollout_logprobs_Q=batch.old.flatten(),
            policy_logprobs_Q=batch.old.flatten(),
            teacher_logprobs_Q=batch.ref.flatten(),
            entropy_Q=batch.entropy.flatten(),
            necs_Q=batch.entropy_change.flatten(),
            baseline_rewards_N=batch.rewards.flip(0),
            rollout_N=batch.rollouts if turns else None,
            turn_N=batch.turns if turns else None,
            state_N=batch.states if turns else None,
            turn_rewards_N=batch.turn_rewards if turns else None,
        )
        result: AdvantageResult = function(inputs)
        kept_Q = result.per_token(inputs) * (1 if result.keep_Q is None else result.keep_Q)
        return kept_Q.view_as(batch.mask)

    return ours


def token_rewards(batch: Batch) -> Tensor:
    """[B, T] reward on the last trained token of each row."""
    lengths_N = torch.full_like(batch.groups, batch.mask.shape[1])
    inputs = AdvantageInputs(batch.rewards, batch.groups, tokens_N=lengths_N, loss_mask_Q=batch.mask.flatten())
    return inputs.token_rewards().view_as(batch.mask)


@dataclass(frozen=True)
class Peer:
    """Installed framework: name of its distribution ("": none required), and a function that imports it and returns its
    cases."""

    name: str
    distribution: str
    cases: Callable[[], list[Case]] = field(repr=False)
