"""Padding: the rows of a batch as tensors, and the cut into micro-batches. It knows neither models nor losses.

Letters: N rows of the batch; B rows of a micro-batch; L tokens of its longest row; T response tokens of the longest
response of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftdask.algorithm import AdvantageInputs
from rftdask.buffer.batch import Batch


class PaddedRows:
    """The response side of a batch padded to [N, T], and its token side padded one micro-batch at a time."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._tokens = batch.row_tokens()
        self.rollout_logprobs_NT = pad(batch.row_logprobs(), np.float32).to(device)
        self.loss_mask_NT = pad(batch.row_masks(), np.bool_).to(device)
        self.experts_N = _tensor(batch.experts).to(device)

    def uids(self, members: np.ndarray) -> list[str]:
        """The names of some rows."""
        return [self._batch.uids[i] for i in members]

    def model_inputs(self, members: np.ndarray) -> dict[str, Any]:
        """The token side of some rows, right-padded, as `token_logprobs` takes it."""
        lengths_B = _tensor(self._batch.lengths[members])
        ids_BL = pad([self._tokens[i] for i in members], np.int64)
        mask_BL = torch.arange(ids_BL.shape[1])[None, :] < lengths_B[:, None]
        inputs = {
            "input_ids_BL": ids_BL,
            "attention_mask_BL": mask_BL,
            "prompt_lengths_B": _tensor(self._batch.prompt_lengths[members]),
            "lengths_B": lengths_B,
            "temperature_B": _tensor(self._batch.temperatures[members]),
        }
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}

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


def micro_batches(lengths: np.ndarray, *, max_tokens: int, max_rows: int | None, unit: int = 1) -> list[np.ndarray]:
    """Row numbers of each forward pass: rows of like length together, within the limits on padded tokens and rows.

    unit: neighbors that are never parted (2: pairs), which a limit may be exceeded for.
    """
    longest_U = lengths.reshape(-1, unit).max(axis=1)
    order = np.argsort(-longest_U, kind="stable")
    parts: list[list[int]] = []
    for number in order:
        longest = longest_U[parts[-1][0]] if parts else 0
        size = (len(parts[-1]) + 1) * unit if parts else 0
        if parts and size * longest <= max_tokens and (max_rows is None or size <= max_rows):
            parts[-1].append(int(number))
        else:
            parts.append([int(number)])
    return [(np.array(part)[:, None] * unit + np.arange(unit)).reshape(-1) for part in parts]
