"""Batch: the bookkeeping of generating for several requests at once. Knows no model.

Prompts are padded on the left, so that the next token of every row is the last column.

Shapes: N = requests, B = rows (requests not dropped), D = distinct prompts, P = longest prompt, T = longest response,
L = P + T, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rftdask.explorer.engines.base import GenerateRequest, Generation
from rftdask.explorer.engines.sampling import SamplingRows, draw_uniforms, sample_tokens


@dataclass
class _Rows:
    """What each row of the batch carries; `select` keeps some of them."""

    request_B: Tensor
    """Index of the request."""
    uniforms_BT: Tensor
    prompt_length_B: Tensor
    max_tokens_B: Tensor
    ignore_end_B: Tensor
    mask_BL: Tensor | None
    """Attention mask of all P + T columns; None when no prompt is padded."""
    seen_BV: Tensor | None
    """Tokens that occurred; None when no row has a repetition penalty."""
    sampling: SamplingRows

    def select(self, index_B: Tensor) -> _Rows:
        return _Rows(
            request_B=self.request_B[index_B],
            uniforms_BT=self.uniforms_BT[index_B],
            prompt_length_B=self.prompt_length_B[index_B],
            max_tokens_B=self.max_tokens_B[index_B],
            ignore_end_B=self.ignore_end_B[index_B],
            mask_BL=None if self.mask_BL is None else self.mask_BL[index_B],
            seen_BV=None if self.seen_BV is None else self.seen_BV[index_B],
            sampling=self.sampling.select(index_B),
        )


class Batch:
    """Padded prompts, sampled tokens, who has finished.

    Finished rows go on sampling until they are dropped; `generations` cuts what came after their end.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], end_ids: Tensor, vocab_size: int, device: torch.device
    ) -> None:
        self.end_ids = end_ids
        self.step = 0
        """Tokens sampled so far."""
        self._set_prompts(requests, device)
        self.rows = self._make_rows(requests, vocab_size, device)
        num_requests, longest = self.rows.uniforms_BT.shape
        self.tokens_NT = torch.zeros(num_requests, longest, dtype=torch.int64, device=device)
        self.logprobs_NT = torch.zeros(num_requests, longest, dtype=torch.float32, device=device)
        self.length_N = torch.zeros(num_requests, dtype=torch.int64, device=device)
        self.stopped_N = torch.zeros(num_requests, dtype=torch.bool, device=device)
        self.done_B = torch.zeros(num_requests, dtype=torch.bool, device=device)
        self.bad_B = self.done_B

    def _set_prompts(self, requests: Sequence[GenerateRequest], device: torch.device) -> None:
        index_of: dict[tuple[int, ...], int] = {}
        prompt_N = [index_of.setdefault(request.prompt_tokens, len(index_of)) for request in requests]
        self.longest_prompt = max(map(len, index_of))
        prompts_DP = np.zeros((len(index_of), self.longest_prompt), dtype=np.int64)
        mask_DP = np.zeros(prompts_DP.shape, dtype=np.int64)
        for prompt, index in index_of.items():
            prompts_DP[index, -len(prompt) :] = prompt
            mask_DP[index, -len(prompt) :] = 1
        positions_DP = np.maximum(mask_DP.cumsum(axis=1) - 1, 0)
        self.prompt_N = torch.tensor(prompt_N, device=device)
        self.prompts_DP = torch.from_numpy(prompts_DP).to(device)
        self.prompt_positions_DP = torch.from_numpy(positions_DP).to(device)
        # No mask is the fast path of attention; it is exact when nothing is padded.
        self.prompt_mask_DP = None if mask_DP.all() else torch.from_numpy(mask_DP).to(device)

    def _make_rows(self, requests: Sequence[GenerateRequest], vocab_size: int, device: torch.device) -> _Rows:
        params = [request.sampling for request in requests]
        longest = max(param.max_tokens for param in params)
        uniforms_BT = np.zeros((len(requests), longest))
        for row, request in enumerate(requests):
            if request.sampling.temperature > 0:
                uniforms_T = draw_uniforms(request.seed, request.sampling.max_tokens)
                uniforms_BT[row, : len(uniforms_T)] = uniforms_T
        mask_BL = seen_BV = None
        if self.prompt_mask_DP is not None:
            mask_BL = torch.nn.functional.pad(self.prompt_mask_DP[self.prompt_N], (0, longest), value=1)
        sampling = SamplingRows.stack(params, device)
        if sampling.uses_penalty:
            seen = np.zeros((len(requests), vocab_size), dtype=bool)
            for row, request in enumerate(requests):
                seen[row, list(request.prompt_tokens)] = True
            seen_BV = torch.from_numpy(seen).to(device)
        return _Rows(
            request_B=torch.arange(len(requests), device=device),
            uniforms_BT=torch.from_numpy(uniforms_BT).to(device),
            prompt_length_B=torch.tensor([len(request.prompt_tokens) for request in requests], device=device),
            max_tokens_B=torch.tensor([param.max_tokens for param in params], device=device),
            ignore_end_B=torch.tensor([param.ignore_eos for param in params], device=device),
            mask_BL=mask_BL,
            seen_BV=seen_BV,
            sampling=sampling,
        )

    def sample(self, logits_BV: Tensor) -> Tensor:
        """[B] the next token of each row, recorded."""
        rows, step = self.rows, self.step
        tokens_B, logprobs_B = sample_tokens(
            logits_BV, rows.uniforms_BT[:, step], rows.sampling, step=step, end_ids=self.end_ids, seen_BV=rows.seen_BV
        )
        self.step = step + 1
        if rows.seen_BV is not None:
            rows.seen_BV[torch.arange(len(tokens_B), device=tokens_B.device), tokens_B] = True
        self.tokens_NT[rows.request_B, step] = tokens_B
        self.logprobs_NT[rows.request_B, step] = logprobs_B
        ended_B = torch.isin(tokens_B, self.end_ids) & ~rows.ignore_end_B & ~self.done_B
        finished_B = (ended_B | (rows.max_tokens_B <= self.step)) & ~self.done_B
        self.length_N[rows.request_B] += self.step * finished_B
        self.stopped_N[rows.request_B] |= ended_B
        self.bad_B = logprobs_B.isnan() & ~self.done_B
        self.done_B = self.done_B | finished_B
        return tokens_B

    def counts(self) -> tuple[int, int]:
        """Rows that have finished, rows whose newest logprob is not a number. The one wait for the device per step."""
        num_done, num_bad = torch.stack([self.done_B.sum(), self.bad_B.sum()]).tolist()
        return num_done, num_bad

    def drop_done(self) -> Tensor:
        """Keep the unfinished rows; returns their indices among the former ones."""
        index_B = (~self.done_B).nonzero()[:, 0]
        self.rows = self.rows.select(index_B)
        self.done_B = self.done_B[index_B]
        return index_B

    def mask(self) -> Tensor | None:
        mask_BL = self.rows.mask_BL
        return None if mask_BL is None else mask_BL[:, : self.longest_prompt + self.step]

    def positions(self) -> Tensor:
        """[B] position of the newest token in its own sequence."""
        return self.rows.prompt_length_B + (self.step - 1)

    def generations(self, policy_version: int) -> list[Generation]:
        columns = (self.tokens_NT.tolist(), self.logprobs_NT.tolist(), self.length_N.tolist(), self.stopped_N.tolist())
        return [
            Generation(
                tokens=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                finish_reason="stop" if stopped else "length",
                min_policy_version=policy_version,
                max_policy_version=policy_version,
            )
            for tokens, logprobs, length, stopped in zip(*columns, strict=True)
        ]
