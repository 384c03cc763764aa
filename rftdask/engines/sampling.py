"""Sampling: logits in, tokens and their logprobs out. Rows with different parameters share one batch.

Invariant: every operation is per row, and each row has its own seed, so with the same logits a row draws the same
tokens whatever the other rows are.

Shapes: B = rows, V = vocabulary, T = tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftdask.engines.base import SamplingParams
from rftdask.errors import RoleError, UserError

_ONE = 2**40
"""Probability 1 in fixed point. Integer sums are exact in any order, so a draw is the same on every device and run;
float cumulative sums are not deterministic on CUDA. A token less likely than 2**-40 (1e-12) is never drawn."""


class Uniforms:
    """Random numbers of requests. For one thread."""

    def __init__(self) -> None:
        # One generator that is reset for each seed, which takes a sixth of the time of creating one.
        self._philox = np.random.Philox(key=0)
        self._generator, self._begin = np.random.Generator(self._philox), self._philox.state

    def draw(self, seed: int, num_tokens: int) -> np.ndarray:
        """[num_tokens] float64 in [0, 1), number t for token t. seed: any int64."""
        # Philox is counter-based: a longer stream begins with the shorter one.
        self._begin["state"]["key"][0] = seed & (2**64 - 1)
        self._philox.state = self._begin
        return self._generator.random(num_tokens)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of B rows as tensors on one device. `uses_*`: True if any row needs the step."""

    temperature_B: Tensor
    """float32, 1 in greedy rows."""
    greedy_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    """int64; V or more keeps all tokens."""
    min_tokens_B: Tensor
    penalty_B: Tensor
    uses_sampling: bool
    uses_greedy: bool
    uses_top: bool
    uses_penalty: bool
    longest_min_tokens: int

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingRows:
        """Parameters of `rows`, in order, as tensors on `device`."""

        def tensor(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            # 1, since greedy rows are divided by it as well; their tokens are chosen by argmax.
            temperature_B=tensor([row.temperature or 1.0 for row in rows], torch.float32),
            greedy_B=tensor([row.temperature == 0 for row in rows], torch.bool),
            top_p_B=tensor([row.top_p for row in rows], torch.float64),
            top_k_B=tensor([row.top_k if row.top_k > 0 else 2**62 for row in rows], torch.int64),
            min_tokens_B=tensor([row.min_tokens for row in rows], torch.int64),
            penalty_B=tensor([row.repetition_penalty for row in rows], torch.float32),
            # Computed once on the host; a tensor would require a wait in each step.
            uses_sampling=any(row.temperature > 0 for row in rows),
            uses_greedy=any(row.temperature == 0 for row in rows),
            uses_top=any(row.temperature > 0 and (row.top_k > 0 or row.top_p < 1) for row in rows),
            uses_penalty=any(row.repetition_penalty != 1 for row in rows),
            longest_min_tokens=max((row.min_tokens for row in rows), default=0),
        )


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """Logits of seen tokens divided by the penalty if positive, else multiplied. Source: CTRL, arXiv:1909.05858."""
    penalty_BV = torch.where(seen_BV, penalty_B[:, None], 1.0)
    return torch.where(logits_BV > 0, logits_BV / penalty_BV, logits_BV * penalty_BV)


def forbid_tokens(logits_BV: Tensor, token_ids: Tensor, forbidden_B: Tensor) -> Tensor:
    """Set `token_ids` to -inf in the rows where `forbidden_B`."""
    logits_BV = logits_BV.clone()
    logits_BV[:, token_ids] = logits_BV[:, token_ids].masked_fill(forbidden_B[:, None], -torch.inf)
    return logits_BV


def keep_top(logprobs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Set logits outside the top k tokens to -inf, then those outside the smallest set with probability >= top_p.

    The most likely token is always kept; ties go to the lower id. Not renormalized.
    """
    # Stable, so that ties are decided by token id and not by the kernel.
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logprobs_BV.shape[-1], device=logprobs_BV.device)
    sorted_BV = sorted_BV.masked_fill(rank_V >= top_k_B[:, None], -torch.inf)
    weights_BV = _fixed_point(sorted_BV)
    cumulative_BV = weights_BV.cumsum(dim=-1)
    share_B1 = top_p_B[:, None] * cumulative_BV[:, -1:]
    # A token is dropped if the tokens before it reach top_p, so the first token is always kept.
    drop_BV = (cumulative_BV - weights_BV >= share_B1) & (rank_V > 0)
    sorted_BV = sorted_BV.masked_fill(drop_BV, -torch.inf)
    return torch.empty_like(sorted_BV).scatter_(-1, order_BV, sorted_BV)


def sample_inverse_cdf(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """[B] int64 token at which the cumulative probability exceeds the uniform number.

    Args:
        logprobs_BV: float32, at most 0, up to a constant per row; -inf is never drawn.
        uniforms_B: float64 in [0, 1).
    """
    cumulative_BV = _fixed_point(logprobs_BV).cumsum(dim=-1)
    total_B = cumulative_BV[:, -1]
    # [B] int64, kept below the total: for rows that are not normalized, rounding may reach the total, beyond any token.
    target_B = torch.minimum((uniforms_B * total_B).long(), total_B - 1)
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]


def _fixed_point(logprobs_BV: Tensor) -> Tensor:
    return (logprobs_BV.exp() * _ONE).long()


def sample_tokens(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    rows: SamplingRows,
    *,
    num_sampled_B: Tensor | None = None,
    end_ids: Tensor | None = None,
    seen_BV: Tensor | None = None,
    may_come_BV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits_BV: any float dtype; computation is in float32.
        uniforms_B: float64 in [0, 1); unused in greedy rows.
        num_sampled_B: int64, tokens sampled so far; end tokens are forbidden while it is below min_tokens. None: 0.
        end_ids: [E] int64. None: there are no end tokens.
        seen_BV: bool, tokens of prompt and response so far; needed only if rows.uses_penalty.
        may_come_BV: bool, allowed tokens, at least one per row. None: all are allowed.
    Returns:
        tokens_B int64, and logprobs_B float32 of softmax(logits / temperature), before repetition penalty, min_tokens,
        grammar, top-k and top-p, since a trainer recomputes them from the tokens. NaN if logits are NaN.
    """
    logits_BV = logits_BV.float()
    all_logprobs_BV = torch.log_softmax(logits_BV / rows.temperature_B[:, None], dim=-1)
    allowed_BV = logits_BV
    if rows.uses_penalty and seen_BV is not None:
        allowed_BV = penalize_repetition(allowed_BV, seen_BV, rows.penalty_B)
    if rows.longest_min_tokens and end_ids is not None:
        # Per row, since each has its own number of tokens.
        forbidden_B = rows.min_tokens_B > (0 if num_sampled_B is None else num_sampled_B)
        allowed_BV = forbid_tokens(allowed_BV, end_ids, forbidden_B)
    if may_come_BV is not None:
        allowed_BV = allowed_BV.masked_fill(~may_come_BV, -torch.inf)
    tokens_B = torch.zeros_like(rows.top_k_B)
    if rows.uses_sampling:
        # Without penalty and forbidden tokens both use the same logits, which saves a softmax.
        choice_BV = all_logprobs_BV
        if allowed_BV is not logits_BV:
            choice_BV = torch.log_softmax(allowed_BV / rows.temperature_B[:, None], dim=-1)
        if rows.uses_top:
            choice_BV = keep_top(choice_BV, rows.top_k_B, rows.top_p_B)
        # NaN logits give index V here; the caller detects them by the logprobs.
        tokens_B = sample_inverse_cdf(choice_BV, uniforms_B).clamp_(0, logits_BV.shape[-1] - 1)
    if rows.uses_greedy:
        tokens_B = torch.where(rows.greedy_B, allowed_BV.argmax(dim=-1), tokens_B)
    return tokens_B, all_logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


class Guides:
    """Creates guides for responses of one model. num_tokens: V, rows of the embedding."""

    def __init__(self, tokenizer: Any, num_tokens: int, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._num_tokens, self._end_ids = tokenizer, num_tokens, list(end_ids)
        self._for_grammars: Any = None

    def guide(self, sampling: SamplingParams) -> Guide:
        """Guide for a new response. Raises: RoleError: invalid grammar; UserError: llguidance is missing."""
        matcher = None
        if sampling.grammar:
            try:
                import llguidance  # late: few runs ask for answers of a form
                import llguidance.hf
            except ImportError as error:
                raise UserError(f"a guided answer needs llguidance: pip install 'rftdask[train]' ({error})") from error
            if self._for_grammars is None:  # takes a second with a large vocabulary
                self._for_grammars = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._num_tokens)
            grammar = llguidance.LLMatcher.grammar_from_lark(sampling.grammar)
            matcher = llguidance.LLMatcher(self._for_grammars, grammar, log_level=0)
            if matcher.is_error():
                raise RoleError(f"invalid grammar: {matcher.get_error()}")
        return Guide(matcher, sampling.bad_tokens, self._num_tokens, self._end_ids)


class Guide:
    """Allowed continuations of one response."""

    def __init__(
        self, matcher: Any, bad_tokens: Sequence[Sequence[int]], num_tokens: int, end_ids: Sequence[int]
    ) -> None:
        self._matcher, self._bad_tokens, self._num_tokens, self._end_ids = matcher, bad_tokens, num_tokens, end_ids
        self._taken: list[int] = []

    def allowed(self) -> np.ndarray:
        """[V] bool, True for allowed next tokens. At least one: if nothing else is allowed, the response may end."""
        allowed_V = np.ones(self._num_tokens, bool)
        # A limit of llguidance was reached, so the response cannot continue.
        if self._matcher is not None and self._matcher.is_error():
            allowed_V[:] = False
        elif self._matcher is not None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._num_tokens].astype(bool)
            allowed_V[:] = False
            allowed_V[: len(found)] = found
            # llguidance knows only one end token, while a model may have several.
            allowed_V[self._end_ids] = self._matcher.is_accepting()
        for tokens in self._bad_tokens:
            before = list(tokens[:-1])
            if self._taken[len(self._taken) - len(before) :] == before:
                allowed_V[tokens[-1]] = False
        if not allowed_V.any():
            allowed_V[self._end_ids] = True
        return allowed_V

    def take(self, token: int) -> None:
        """Advance by an allowed token."""
        self._taken.append(token)
        if self._matcher is not None and token not in self._end_ids:
            self._matcher.consume_token(token)
