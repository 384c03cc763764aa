"""The PyTorch train engine: one rank, whole model, AdamW.

A step: what frozen models and the critic say of the rows, then the advantages over the whole batch, then one update of
the policy and one of the critic. Letters: N rows of the batch; B rows of a micro-batch; T response tokens of the
longest response.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from rftdask.algorithm import Algorithm, LossInputs
from rftdask.buffer.batch import Batch
from rftdask.errors import DataError, RoleError
from rftdask.synchronizer.weights import CHECKPOINT_MODEL_FILE
from rftdask.trainer.engines.adam import Adam, AdamOptions, CriticOptions
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.engines.critic import Critic
from rftdask.trainer.engines.padding import PaddedRows, micro_batches
from rftdask.trainer.model import export_hf, load_policy, state_dict_bytes, token_logprobs

_OPTIMIZER = "actor/optim.safetensors"
_RNG = "rng.safetensors"


@dataclass(frozen=True)
class TorchOptions:
    """What the engine is built from."""

    model_path: str
    dtype: str
    device: str
    adam: AdamOptions
    max_tokens_per_micro_batch: int
    """Padded tokens of a forward pass; a longer row goes alone."""
    max_response_tokens: int | None
    micro_batch_size: int | None
    """Rows of a forward pass; None: as many as the tokens allow."""
    seed: int
    deterministic: bool
    trust_remote_code: bool = False
    teacher_path: str | None = None
    """Frozen model whose logprobs the advantages compare with; None: no teacher."""
    critic: CriticOptions | None = None
    critic_warmup: int = 0
    """First steps, which train the critic alone."""
    recompute_old_logprobs: bool = False
    """Ratios to the weights before the step in place of those that sampled."""


@dataclass(frozen=True)
class _Scores:
    """[N, T] of what is known before the update; None where the algorithm does not ask."""

    ref_NT: Tensor | None
    teacher_NT: Tensor | None
    entropy_NT: Tensor | None
    values_NT: Tensor | None


class TorchEngine(TrainEngine):
    """Trains the policy of `options.model_path` by `algorithm`."""

    def __init__(self, options: TorchOptions, algorithm: Algorithm) -> None:
        """Raises: DataError: a model cannot be loaded, or the teacher has another vocabulary."""
        torch.manual_seed(options.seed)
        torch.use_deterministic_algorithms(options.deterministic)
        self._options = options
        # What an advantage function drops was dropped when the batch was formed, and is in the ledger.
        self._algorithm = algorithm.without_drops()
        self._needs = () if algorithm.advantage_fn is None else algorithm.advantage_fn.needs
        self._device = torch.device(options.device)
        self._model, self._tokenizer = load_policy(
            options.model_path, options.dtype, options.device, trust_remote_code=options.trust_remote_code
        )
        self._model.train()
        self._adam = Adam(self._model, options.adam)
        self._reference = self._load_frozen(options.model_path) if algorithm.use_reference else None
        self._teacher = self._load_frozen(options.teacher_path) if options.teacher_path else None
        self._critic: Critic | None = None
        if options.critic is not None:
            self._critic = Critic(
                options.critic, options.dtype, options.device, trust_remote_code=options.trust_remote_code
            )
        # [2] float64: coefficients of the KL loss and of the KL penalty, which change if they are adaptive.
        self._kl_coefs = torch.tensor(
            [algorithm.kl_loss_fn.kl_coef, algorithm.kl_penalty_fn.kl_coef], dtype=torch.float64
        )

    def train_step(self, batch: Batch, step: int) -> dict[str, float]:
        rows = PaddedRows(batch, self._device)
        parts = micro_batches(
            batch.lengths,
            max_tokens=self._options.max_tokens_per_micro_batch,
            max_rows=self._options.micro_batch_size,
            unit=2 if self._algorithm.schema == "dpo" else 1,
        )
        # Weights and optimizer stay float32, so that a small step is not rounded away; a GPU multiplies in bfloat16.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            metrics = self._train(rows, parts, step)
        self._adapt_kl(metrics, len(batch))
        return metrics

    def _train(self, rows: PaddedRows, parts: Sequence[np.ndarray], step: int) -> dict[str, float]:
        try:
            scores = self._score(rows, parts)
            advantages_NT, returns_NT, metrics = self._advantages(rows, scores, step)
            if self._critic is None or step > self._options.critic_warmup:
                metrics |= self._update(rows, parts, scores.ref_NT, advantages_NT, step)
        except ValueError as error:
            raise RoleError(f"step {step}: {error}") from error
        if self._critic is not None:
            assert scores.values_NT is not None and returns_NT is not None
            metrics |= self._critic.update(rows, parts, scores.values_NT, returns_NT, step)
        return metrics

    def weights(self) -> bytes:
        return state_dict_bytes(self._model)

    def state_files(self) -> dict[str, bytes]:
        return {
            CHECKPOINT_MODEL_FILE: self.weights(),
            _OPTIMIZER: self._adam.state(),
            _RNG: save({"torch": torch.get_rng_state(), "kl_coefs": self._kl_coefs}),
            **(self._critic.state_files() if self._critic is not None else {}),
        }

    def load_state_files(self, read: Callable[[str], bytes]) -> None:
        missing, unexpected = self._model.load_state_dict(load(read(CHECKPOINT_MODEL_FILE)), strict=False)
        lacking = set(missing) - set(getattr(self._model, "all_tied_weights_keys", None) or ())
        if lacking or unexpected:
            raise RoleError(
                f"checkpoint does not fit the model: missing {sorted(lacking)}, unexpected {sorted(unexpected)}"
            )
        self._adam.load_state(read(_OPTIMIZER))
        if self._critic is not None:
            self._critic.load_state_files(read)
        state = load(read(_RNG))
        torch.set_rng_state(state["torch"])
        self._kl_coefs = state["kl_coefs"]

    def export_files(self) -> Mapping[str, bytes]:
        with tempfile.TemporaryDirectory(prefix="rftdask-export-") as folder:
            export_hf(self._model, self._tokenizer, Path(folder))
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def _load_frozen(self, model_path: str) -> torch.nn.Module:
        options = self._options
        model, _ = load_policy(model_path, options.dtype, options.device, trust_remote_code=options.trust_remote_code)
        ours, theirs = self._model.config.vocab_size, model.config.vocab_size
        if ours != theirs:
            raise DataError(
                f"{model_path} has a vocabulary of {theirs} tokens, the policy {options.model_path} one of {ours}; "
                "only a model of the same tokens can score its responses"
            )
        model.eval().requires_grad_(False)
        return model

    def _score(self, rows: PaddedRows, parts: Sequence[np.ndarray]) -> _Scores:
        def by(model: torch.nn.Module | None) -> Tensor | None:
            if model is None:
                return None
            return rows.scored(parts, lambda **inputs: token_logprobs(model, **inputs)[0])

        def entropy(**inputs: Any) -> Tensor:
            entropy_BT = token_logprobs(self._model, **inputs, with_entropy=True)[1]
            assert entropy_BT is not None
            return entropy_BT

        return _Scores(
            ref_NT=by(self._reference),
            teacher_NT=by(self._teacher),
            entropy_NT=rows.scored(parts, entropy) if "entropy_NT" in self._needs else None,
            values_NT=None if self._critic is None else self._critic.values(rows, parts),
        )

    def _advantages(
        self, rows: PaddedRows, scores: _Scores, step: int
    ) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
        """[N, T] or [N, 1] advantages and [N, T] returns, None where there are none; over the whole batch, so groups
        are whole. Tokens that the function takes out of the loss leave the mask of `rows`.
        """
        if self._algorithm.advantage_fn is None:
            return None, None, {}
        inputs = replace(
            rows.advantage_inputs(step),
            ref_logprobs_NT=_on_cpu(scores.ref_NT),
            teacher_logprobs_NT=_on_cpu(scores.teacher_NT),
            entropy_NT=_on_cpu(scores.entropy_NT),
            values_NT=_on_cpu(scores.values_NT),
        )
        result = self._algorithm.compute_advantages(inputs, kl_coef=float(self._kl_coefs[1]))
        if result.keep_NT is not None:
            rows.loss_mask_NT &= result.keep_NT.to(self._device)
        advantages_NT = result.advantages_NT if result.advantages_NT is not None else result.advantages_N[:, None]
        returns_NT = None if result.returns_NT is None else result.returns_NT.to(self._device)
        return advantages_NT.to(self._device), returns_NT, {k: float(v) for k, v in result.metrics.items()}

    def _update(
        self,
        rows: PaddedRows,
        parts: Sequence[np.ndarray],
        ref_NT: Tensor | None,
        advantages_NT: Tensor | None,
        step: int,
    ) -> dict[str, float]:
        """One optimizer step of the policy. Raises: ValueError: nan or infinity at a trained position."""
        weights_NT = self._algorithm.token_weights(
            rows.loss_mask_NT,
            max_tokens=self._options.max_response_tokens,
            expert_mask_B=rows.experts_N,
            step=step,
        )
        sums: dict[str, Tensor] = {}
        for members in parts:
            loss, more = self._algorithm.compute_loss(
                self._loss_inputs(rows, members, weights_NT, ref_NT, advantages_NT)
            )
            loss.backward()
            for name, value in more.items():
                sums[name] = sums[name] + value if name in sums else value
        return {**{name: float(value) for name, value in sums.items()}, **self._adam.step(step)}

    def _loss_inputs(
        self,
        rows: PaddedRows,
        members: np.ndarray,
        weights_NT: Tensor,
        ref_NT: Tensor | None,
        advantages_NT: Tensor | None,
    ) -> LossInputs:
        part = torch.from_numpy(members).to(self._device)
        policy_BT, entropy_BT = token_logprobs(
            self._model, **rows.model_inputs(members), with_entropy=self._algorithm.use_entropy
        )
        width = policy_BT.shape[1]
        # One update per batch: the weights before it are the current ones.
        current_BT = policy_BT.detach()
        sampled_BT = rows.rollout_logprobs_NT[part, :width]
        return LossInputs(
            policy_logprobs_BT=policy_BT,
            rollout_logprobs_BT=sampled_BT if self._algorithm.schema == "experience" else current_BT,
            loss_mask_BT=rows.loss_mask_NT[part, :width],
            token_weights_BT=weights_NT[part, :width],
            advantages_BT=None
            if advantages_NT is None
            else advantages_NT[part, : max(1, min(width, advantages_NT.shape[1]))],
            ref_logprobs_BT=None if ref_NT is None else ref_NT[part, :width],
            entropy_BT=entropy_BT,
            expert_mask_B=rows.experts_N[part],
            proximal_logprobs_BT=current_BT if self._options.recompute_old_logprobs else None,
            kl_coef=float(self._kl_coefs[0]),
            uids=rows.uids(members),
        )

    def _adapt_kl(self, metrics: Mapping[str, float], num_rows: int) -> None:
        """Move the coefficients that follow a target."""
        loss_fn, penalty_fn = self._algorithm.kl_loss_fn, self._algorithm.kl_penalty_fn
        if "kl" in metrics:
            measured = metrics["kl"] / max(metrics["weight_sum"], 1e-12)
            self._kl_coefs[0] = loss_fn.next_coef(float(self._kl_coefs[0]), measured, num_rows)
        if "kl_penalty" in metrics:
            self._kl_coefs[1] = penalty_fn.next_coef(float(self._kl_coefs[1]), metrics["kl_penalty"], num_rows)


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
