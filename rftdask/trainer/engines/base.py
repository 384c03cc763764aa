"""Train engine: trains one batch as one step of one or more updates. It does not know storage, ledgers or Dask.

Promise: in deterministic mode on a CPU, the same state and the same batch give the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.config import Config
from rftdask.errors import MismatchError
from rftdask.processes.ranks import Ranks
from rftdask.storage.base import Data
from rftdask.synchronizer.fingerprint import Fingerprint

MAX_MISMATCH_SHARE = 0.2
"""Largest `mismatch_share` of the first update. Rounding in bfloat16 moves few logprobs by a factor of two
(docs/engines.md); other weights move most of them."""
_MIN_COMPARED_TOKENS = 64
"""Sampled tokens of the first update below which its share means nothing."""
_MEANS = {"mismatch_kl": "mismatch_tokens", "mismatch_share": "mismatch_tokens", "router_agreement": "routed_choices"}
"""Metrics that are means over a count of their own, by the name of the count; both are sums until `finish_means`."""


class TrainEngine(ABC):
    """Holds the policy and its optimizer on one rank."""

    trainer_type: ClassVar[str] = ""
    """Name in a configuration. A class with an empty name is selected as `package.module.Name`."""
    has_model: ClassVar[bool] = True
    """True if the engine trains a local model: its folder must exist, and torch and transformers are imported."""
    is_hosted: ClassVar[bool] = False
    """True if a service trains the model: the tokenizer is local, the weights are not, and no GPU is needed."""
    compares_first_update: bool = False
    """True until the first update, if its rollouts must have the logprobs of the weights that training begins with."""

    @classmethod
    def from_config(cls, config: Config, algorithm: Algorithm, total_steps: int | None, ranks: Ranks) -> TrainEngine:
        """Build the engine of one rank. Called by all ranks. total_steps: steps of the run; None: unknown."""
        return cls()

    @abstractmethod
    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Train on `batch` as step `step` (1-based), and return the metrics of the step.

        Raises: RoleError: a loss or gradient is not finite, naming the step. MismatchError: see `check_mismatch`.
        """

    def check_mismatch(self, sums: Mapping[str, float], batch: TrainingBatch, step: int) -> None:
        """Check the rollouts of the first update, before it changes any weight. Later calls do nothing.

        Args: sums: those of `mismatch` over all rows of the update, the same on all ranks.
        Raises: MismatchError: engine and trainer compute different policies.
        """
        is_first, self.compares_first_update = self.compares_first_update, False
        tokens = sums.get("mismatch_tokens", 0.0)
        # The weights of a later version belong to another trainer.
        if not is_first or tokens < _MIN_COMPARED_TOKENS or (batch.min_policy_versions >= step).any():
            return
        if (share := sums["mismatch_share"] / tokens) > MAX_MISMATCH_SHARE:
            raise MismatchError(
                f"step {step}: for {share:.0%} of the {tokens:.0f} tokens of the first update the probabilities of "
                f"engine and trainer differ by more than a factor of 2 (at most {MAX_MISMATCH_SHARE:.0%} may), so the "
                "engine samples from another policy than the trainer begins with. Nothing was trained. Likely causes, "
                "the most frequent first: the engine has loaded other weights (an adapter, a resized vocabulary, a "
                "merged or quantized checkpoint); it computes the model by other code (position scaling, images); it "
                "does not report logprobs of softmax(logits / temperature); its data type is too coarse "
                "(docs/engines.md). Correct the cause, then run again under another name: the rollouts of this folder "
                "stay those of the other policy"
            )

    def rows_to_compute(self, batch: TrainingBatch, step: int) -> np.ndarray | None:
        """Return the [M] row numbers whose tokens this rank needs for `train_step`; None: all rows. `batch` has no
        tokens yet. Called by all ranks if there are several."""
        return None

    def evaluate(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        """Return means of loss and metrics over all batches, without training; {}: nothing is measured. Called by all
        ranks."""
        return {}

    @abstractmethod
    def weights(self) -> Mapping[str, Data]:
        """Return a copy of the weights that explorers load, file name -> bytes: the policy's state dict in safetensors
        format, tied tensors once, in the data type in which engines compute; or only the adapters, if only they are
        trained. Called by all ranks; each gets the files that it must write. If several have a file, that of the lowest
        rank is written."""

    def reuse(self, files: Mapping[str, Data]) -> None:  # noqa: B027 (an engine may make new memory each time)
        """Take back files of `weights` or `state_files` that are no longer read; their memory may be overwritten."""

    def fingerprint(self) -> Fingerprint | None:
        """Return what these weights compute, for engines to reproduce; None: no local model. Called by all ranks."""
        return None

    @abstractmethod
    def state_files(self) -> Mapping[str, Data]:
        """Return a copy of policy, optimizer and random state, from which `load_state_files` restores the same bits.
        Called by all ranks; each gets the files that it must write."""

    @abstractmethod
    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """Restore from the files of all ranks, whatever their number was. Called by all ranks."""

    def keep_only(self, versions: Collection[int], checkpoints: Collection[int]) -> None:  # noqa: B027
        """Allow a hosted engine to delete older versions and checkpoints than these, which the run folder names."""

    def leave_device(self) -> None:  # noqa: B027 (an engine may have nothing on a device)
        """Free the memory of the device until `return_to_device`. Called between steps."""

    def return_to_device(self) -> None:  # noqa: B027
        """Restore the state of `leave_device`, to the bit."""

    @abstractmethod
    def export_files(self) -> Mapping[str, bytes]:
        """Return the policy as a Hugging Face folder: file name -> bytes, with tokenizer and generation config."""


# ---- metrics of a step, computed from those of its updates; shared by the train engines


def finish_means(metrics: dict[str, float]) -> None:
    """Divide the sums of an update by their counts, in place, and remove the counts."""
    counts = {count: metrics.pop(count) for count in {*_MEANS.values()} & metrics.keys()}
    for name in _MEANS.keys() & metrics.keys():
        metrics[name] /= max(counts[_MEANS[name]], 1.0)


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the updates that have it; counts (num_...) are summed."""
    columns = {name: [update[name] for update in updates if name in update] for update in updates for name in update}
    return {name: sum(values) / (1 if "num_" in name else len(values)) for name, values in columns.items()}


def next_kl_coefs(
    algorithm: Algorithm, coefs: Sequence[float], metrics: Mapping[str, float], num_rows: int
) -> list[float]:
    """Return the coefficients of KL loss and KL penalty for the next step, from the metrics of this one."""
    loss, penalty = coefs
    if "kl" in metrics:
        # The loss term is weighted by tokens; divided by their weights it is the mean KL that the controller aims at.
        loss = algorithm.kl_loss_fn.next_coef(loss, metrics["kl"] / max(metrics["weight_sum"], 1e-12), num_rows)
    if "kl_penalty" in metrics:
        penalty = algorithm.kl_penalty_fn.next_coef(penalty, metrics["kl_penalty"], num_rows)
    return [loss, penalty]


@torch.no_grad()
def mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Return sums over the sampled tokens that are trained: mismatch_kl, mismatch_share, and mismatch_tokens, their
    number.

    mismatch_kl sums w - 1 - log w with w = p_trainer / p_sampler. Its mean estimates KL(sampler, trainer) and is never
    negative (Schulman, "Approximating KL Divergence", 2020). mismatch_share counts tokens with w outside [1/2, 2], so
    that a few outliers cannot dominate it.
    """
    # Demonstrations were not sampled, so they have no mismatch.
    mask_BT = inputs.loss_mask_BT
    if inputs.expert_mask_B is not None:
        mask_BT = mask_BT & ~inputs.expert_mask_B[:, None]
    # Clamped: exp of a single outlier would dominate the sum.
    gap_BT = (inputs.policy_logprobs_BT - inputs.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch_kl": (torch.expm1(gap_BT) - gap_BT).masked_fill(~mask_BT, 0.0).sum(),
        "mismatch_share": ((gap_BT.abs() > math.log(2)) & mask_BT).sum(),
        "mismatch_tokens": mask_BT.sum(),
    }
