"""The rows of a batch as tensors: their response side padded to [N, T], their token side packed. It knows neither
models nor losses. No model computes a padded position: [N, T] holds one number per response token.

Letters: N rows of the batch; B rows of a micro-batch; T response tokens of the longest response of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.trainer.packing import PackedRows, pack_rows
from rftdask.trainer.ranks import Ranks


class PaddedRows:
    """The response side of a batch padded to [N, T], and its token side packed one micro-batch at a time."""

    def __init__(self, batch: TrainingBatch, device: torch.device, sequence: Ranks | None = None) -> None:
        """sequence: as of `pack_rows`."""
        self._batch = batch
        self._sequence = sequence
        self._device = device
        self._tokens = batch.row_tokens()
        self.rollout_logprobs_NT = pad(batch.row_logprobs(), np.float32).to(device)
        self.loss_mask_NT = pad(batch.row_masks(), np.bool_).to(device)
        self.experts_N = _tensor(batch.experts).to(device)

    def uids(self, members: np.ndarray) -> list[str]:
        """The names of some rows."""
        return [self._batch.uids[i] for i in members]

    def model_inputs(self, members: np.ndarray) -> dict[str, PackedRows]:
        """The token side of some rows, as `token_logprobs` takes it."""
        batch = self._batch
        tokens = [self._tokens[i] for i in members]
        lengths, temperatures = batch.prompt_lengths[members], batch.temperatures[members]
        return {"rows": pack_rows(tokens, lengths, temperatures, self._device, sequence=self._sequence)}

    @torch.no_grad()
    def scored(self, parts: Sequence[np.ndarray], score: Callable[..., Tensor]) -> Tensor:
        """[N, T], or [N, T, K], float32 of what `score` says of every response token, given `model_inputs` of one part
        at a time."""
        values_NT = torch.zeros_like(self.rollout_logprobs_NT)
        for members in parts:
            values_BT = score(**self.model_inputs(members))
            if values_NT.ndim < values_BT.ndim:
                values_NT = values_NT.new_zeros((*values_NT.shape, *values_BT.shape[2:]))
            values_NT[torch.from_numpy(members).to(self._device), : values_BT.shape[1]] = values_BT
        return values_NT

    def advantage_inputs(self, step: int) -> AdvantageInputs:
        """What the rows themselves say, on the CPU; what models say of them is to be added."""
        batch = self._batch
        mask_NT = self.loss_mask_NT.cpu()
        return AdvantageInputs(
            rewards_N=_tensor(batch.rewards),
            group_N=_tensor(batch.groups),
            lengths_N=mask_NT.sum(-1),
            expert_mask_N=_tensor(batch.experts),
            rollout_N=_tensor(batch.rollouts),
            turn_N=_tensor(batch.turns),
            state_N=None if batch.states is None else _tensor(batch.states),
            turn_rewards_N=None if batch.turn_rewards is None else _tensor(batch.turn_rewards),
            baseline_rewards_N=None if batch.baselines is None else _tensor(batch.baselines),
            loss_mask_NT=mask_NT,
            rollout_logprobs_NT=self.rollout_logprobs_NT.cpu(),
            step=step,
            uids=batch.uids,
        )


def pad(rows: list[np.ndarray], dtype: type) -> Tensor:
    """[rows, longest] zeros after each row's end."""
    padded: np.ndarray = np.zeros((len(rows), max((len(row) for row in rows), default=0)), dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return torch.from_numpy(padded)


def _tensor(values: np.ndarray) -> Tensor:
    """A copy: arrays over the memory of a table cannot be written to, which torch does not know of."""
    return torch.from_numpy(values.copy())
