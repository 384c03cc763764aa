"""The PyTorch train engine: the models of one rank, AdamW, and a strategy by which the ranks share them.

Every rank is given the whole batch, and computes its own rows of it. A step: what frozen models and the critic say of
the rows, brought together; then the advantages over the whole batch, on every rank the same; then one update of the
policy and one of the critic, by gradients added over the ranks. Letters: N rows of the batch; B rows of a micro-batch;
T response tokens of the longest response.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.errors import DataError
from rftdask.models.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    Lora,
    adapter_names,
    add_adapter,
    begin,
    load_adapter,
    merged,
    settings_bytes,
    without_adapters,
)
from rftdask.trainer.engines.adam import Adam, AdamOptions, CriticOptions
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.engines.critic import Critic
from rftdask.trainer.engines.padding import PaddedRows
from rftdask.trainer.engines.passes import Passes, plan_passes
from rftdask.trainer.engines.strategies.base import Single, Strategy, distinct_state, layers_of
from rftdask.trainer.engines.tensor_files import SavedTensors
from rftdask.trainer.model import dtype_at_rest, entropy_signals, export_hf, load_policy, state_bytes, token_logprobs
from rftdask.trainer.packing import pack_rows
from rftdask.trainer.ranks import Ranks
from rftdask.weights.fingerprint import Fingerprint, fixed_sequences
from rftdask.weights.published import CHECKPOINT_ADAPTER_FOLDER, CHECKPOINT_MODEL_FILE, MODEL_FILE

_OPTIMIZER = "actor/optim.safetensors"
_COEFS = "actor/kl_coefs.safetensors"


@dataclass(frozen=True)
class TorchOptions:
    """What the engine is built from."""

    model_path: str
    dtype: str
    device: str
    adam: AdamOptions
    max_tokens_per_micro_batch: float
    """Tokens of a forward pass; a longer row goes alone."""
    max_response_tokens: int | None
    micro_batch_size: int | None
    """Rows of a forward pass; None: as many as the tokens allow."""
    seed: int
    deterministic: bool
    lora: Lora | None = None
    """Adapters to train in place of all weights."""
    trust_remote_code: bool = False
    teacher_path: str | None = None
    """Frozen model whose logprobs the advantages compare with; None: no teacher."""
    critic: CriticOptions | None = None
    critic_warmup: int = 0
    """First steps, which train the critic alone."""
    recompute_old_logprobs: bool = False
    """Ratios to the weights before the step in place of those that sampled."""
    gradient_checkpointing: bool = False
    """Activations of the policy are computed again in the backward pass."""
    torch_compile: bool = False
    """The policy's layers are compiled."""


@dataclass(frozen=True)
class _Scores:
    """[N, T] of what is known before the update; None where the algorithm does not ask."""

    ref_NT: Tensor | None
    teacher_NT: Tensor | None
    entropy_NT: Tensor | None
    values_NT: Tensor | None
    policy_NT: Tensor | None = None
    necs_NT: Tensor | None = None


class Scorer(torch.nn.Module):
    """`token_logprobs` of a model as one module, so that a strategy sees where a pass begins and ends."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(self.model, **inputs)


class TorchEngine(TrainEngine):
    """Trains the policy of `options.model_path` by `algorithm`."""

    trainer_type: ClassVar[str] = "torch"
    built_by_rank: ClassVar[bool] = True

    def __init__(
        self,
        options: TorchOptions,
        algorithm: Algorithm,
        strategy: Strategy | None = None,
        sequence: Ranks | None = None,
    ) -> None:
        """
        Args:
            strategy: None is one rank with the whole model.
            sequence: the ranks, all neighbors of this one, that split each sequence with it; None: nobody does.
        Raises: DataError: a model cannot be loaded or split, or the teacher has another vocabulary.
        """
        self._strategy = strategy or Single(Ranks())
        self._ranks = self._strategy.ranks
        self._sequence = sequence
        torch.manual_seed(options.seed)
        torch.use_deterministic_algorithms(options.deterministic)
        self._options = options
        # What an advantage function drops was dropped when the batch was formed, and is in the ledger.
        self._algorithm = algorithm.without_drops()
        self._needs = () if algorithm.advantage_fn is None else algorithm.advantage_fn.needs
        self._device = torch.device(options.device)
        self._num_splits = 1 if sequence is None else sequence.size
        self._model, self._tokenizer = load_policy(
            options.model_path,
            options.dtype,
            options.device,
            trust_remote_code=options.trust_remote_code,
            num_splits=self._num_splits,
        )
        self._dtype_at_rest = dtype_at_rest(options.model_path, trust_remote_code=options.trust_remote_code)
        self._adapter_settings = {} if options.lora is None else begin(self._model, options.lora)
        # Names of the adapters' tensors here -> in their file; empty where all weights are trained.
        self._adapter = adapter_names(self._model) if options.lora is not None else {}
        self._model.train()
        if options.gradient_checkpointing:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.torch_compile:
            for layer in layers_of(self._model, self._model._no_split_modules or ()):
                layer.compile(dynamic=True)
        self._policy = self._prepared(self._model)
        self._adam = Adam(self._model, options.adam, self._strategy)
        self._reference = self._load_reference() if algorithm.use_reference else None
        self._teacher = self._load_frozen(options.teacher_path) if options.teacher_path else None
        self._critic: Critic | None = None
        if options.critic is not None:
            self._critic = Critic(
                options.critic,
                options.dtype,
                options.device,
                self._strategy,
                trust_remote_code=options.trust_remote_code,
                num_splits=self._num_splits,
            )
        # [2] float64: coefficients of the KL loss and of the KL penalty, which change if they are adaptive.
        self._kl_coefs = torch.tensor(
            [algorithm.kl_loss_fn.kl_coef, algorithm.kl_penalty_fn.kl_coef], dtype=torch.float64
        )

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        rows = PaddedRows(batch, self._device, self._sequence)
        passes = plan_passes(
            batch.lengths,
            self._ranks,
            hidden_size=self._model.config.get_text_config().hidden_size,
            max_tokens=self._options.max_tokens_per_micro_batch * self._num_splits,
            max_rows=self._options.micro_batch_size,
            unit=2 if self._algorithm.schema == "dpo" else 1,
            together=self._strategy.passes_together,
            group=self._sequence or self._strategy.group,
        )
        # What is drawn at a step depends on the seed and the step alone, so there is no random state to keep.
        torch.manual_seed(self._options.seed * 2**32 + step)
        # Weights and optimizer stay float32, so that a small step is not rounded away; a GPU multiplies in bfloat16.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            scores = self._score(rows, passes)
            advantages_NT, returns_NT, metrics = self._advantages(rows, scores, step)
            if self._critic is None or step > self._options.critic_warmup:
                weights_NT = self._algorithm.token_weights(
                    rows.loss_mask_NT,
                    max_tokens=self._options.max_response_tokens,
                    expert_mask_B=rows.experts_N,
                    step=step,
                )
                sums: dict[str, Tensor] = {}
                for members in passes.own:
                    inputs = self._loss_inputs(rows, members, weights_NT, scores.ref_NT, advantages_NT)
                    loss, more = self._algorithm.compute_loss(inputs)
                    loss.backward()
                    if self._algorithm.schema == "experience":
                        more |= _mismatch(inputs)
                    for name, value in more.items():
                        sums[name] = sums[name] + value if name in sums else value
                passes.idle_backward(rows, lambda **inputs: self._policy(**inputs)[0])
                sums_of_ranks = passes.add_metrics({name: float(value) for name, value in sums.items()})
                if "mismatch_kl" in sums_of_ranks:
                    sums_of_ranks["mismatch_kl"] /= max(sums_of_ranks.pop("mismatch_tokens"), 1.0)
                metrics |= {**sums_of_ranks, **self._adam.step(step)}
            if self._critic is not None:
                assert scores.values_NT is not None and returns_NT is not None
                metrics |= self._critic.update(rows, passes, scores.values_NT, returns_NT, step)
        self._adapt_kl(metrics, len(batch))
        return metrics

    def weights(self) -> Mapping[str, bytes]:
        tensors = self._strategy.full_state(self._model, self._adapter or None)
        if not self._ranks.is_rank0:
            return {}
        if not self._adapter:
            return {MODEL_FILE: state_bytes(tensors)}
        files = {self._adapter[name]: tensor for name, tensor in tensors.items()}
        return {ADAPTER_FILE: state_bytes(files), ADAPTER_CONFIG_FILE: settings_bytes(self._adapter_settings)}

    @torch.no_grad()
    def fingerprint(self) -> Fingerprint:
        """In float32 also where training multiplies in bfloat16, unless the strategy brings weights together so."""
        sequences = fixed_sequences(self._model.config.get_text_config().vocab_size)
        rows = pack_rows(
            [np.array(sequence) for sequence in sequences],
            np.ones(len(sequences), np.int64),
            np.ones(len(sequences), np.float32),
            self._device,
            sequence=self._sequence,
        )
        self._model.eval()  # an engine has no dropout
        logprobs_BT, _ = self._policy(rows=rows)
        self._model.train()
        bfloat16 = self._strategy.sharded and self._device.type == "cuda"
        logprobs = tuple(tuple(row) for row in logprobs_BT.cpu().tolist())
        return Fingerprint(sequences, logprobs, "bfloat16" if bfloat16 else "float32")

    def state_files(self) -> dict[str, bytes]:
        files = self._adam.state_files(_OPTIMIZER)
        if self._critic is not None:
            files |= self._critic.state_files()
        for name, data in self.weights().items():
            files[f"{CHECKPOINT_ADAPTER_FOLDER}/{name}" if self._adapter else CHECKPOINT_MODEL_FILE] = data
        if self._ranks.is_rank0:
            files[_COEFS] = save({"kl": self._kl_coefs})
        return files

    def load_state_files(self, files: Mapping[str, bytes]) -> None:
        name, own = CHECKPOINT_MODEL_FILE, distinct_state(self._model)
        if self._adapter:
            name = f"{CHECKPOINT_ADAPTER_FOLDER}/{ADAPTER_FILE}"
            own = {self._adapter[n]: tensor for n, tensor in own.items() if n in self._adapter}
        SavedTensors(name, files, self._ranks).load(own)
        self._adam.load_state_files(_OPTIMIZER, files)
        if self._critic is not None:
            self._critic.load_state_files(files)
        self._kl_coefs = load(files[_COEFS])["kl"]

    def export_files(self) -> Mapping[str, bytes]:
        tensors = self._strategy.full_state(self._model, self._adapter or None)
        if not self._ranks.is_rank0:
            return {}
        model = self._model
        if self._adapter:
            # Merged into weights of its own: the sum could not be taken out of the policy's again to the bit.
            options = self._options
            model, _ = load_policy(
                options.model_path, options.dtype, "cpu", trust_remote_code=options.trust_remote_code
            )
            add_adapter(model, self._adapter_settings | {"inference_mode": False})
            load_adapter(model, {self._adapter[name]: tensor for name, tensor in tensors.items()}, "the trainer")
            tensors = {}
            merged(model)
        with tempfile.TemporaryDirectory(prefix="rftdask-export-") as folder:
            export_hf(model, self._tokenizer, Path(folder), tensors or None, dtype=self._dtype_at_rest)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def _load_reference(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The policy as it began: the policy without its adapters, where they began by changing nothing."""
        lora = self._options.lora
        if lora is None or lora.path is not None:
            return self._load_frozen(self._options.model_path, lora)

        def without(**inputs: Any) -> tuple[Tensor, Tensor | None]:
            with without_adapters(self._model):
                scores: tuple[Tensor, Tensor | None] = self._policy(**inputs)
                return scores

        return without

    def _load_frozen(self, model_path: str, lora: Lora | None = None) -> Scorer:
        options = self._options
        model, _ = load_policy(
            model_path,
            options.dtype,
            options.device,
            trust_remote_code=options.trust_remote_code,
            num_splits=self._num_splits,
        )
        if lora is not None:
            begin(model, lora)
        ours, theirs = self._model.config.vocab_size, model.config.vocab_size
        if ours != theirs:
            raise DataError(
                f"{model_path} has a vocabulary of {theirs} tokens, the policy {options.model_path} one of {ours}; "
                "only a model of the same tokens can score its responses"
            )
        model.eval().requires_grad_(False)
        return self._prepared(model)

    def _prepared(self, model: Any) -> Scorer:
        scorer = Scorer(model)
        self._strategy.prepare(scorer, layers_of(model, model._no_split_modules or ()))
        return scorer

    def _score(self, rows: PaddedRows, passes: Passes) -> _Scores:
        def by(scorer: Callable[..., tuple[Tensor, Tensor | None]] | None) -> Tensor | None:
            return None if scorer is None else passes.scored(rows, lambda **inputs: scorer(**inputs)[0])

        def entropy(**inputs: Any) -> Tensor:
            entropy_BT: Tensor | None = self._policy(**inputs, with_entropy=True)[1]
            assert entropy_BT is not None
            return entropy_BT

        all_three = "necs_NT" in self._needs
        scores = _Scores(
            ref_NT=by(self._reference),
            teacher_NT=by(self._teacher),
            entropy_NT=passes.scored(rows, entropy) if "entropy_NT" in self._needs and not all_three else None,
            values_NT=None if self._critic is None else self._critic.values(rows, passes),
        )
        if not all_three:
            return scores
        policy_NT, entropy_NT, necs_NT = passes.scored(rows, partial(entropy_signals, self._policy)).unbind(-1)
        return replace(scores, policy_NT=policy_NT, entropy_NT=entropy_NT, necs_NT=necs_NT)

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
            policy_logprobs_NT=_on_cpu(scores.policy_NT),
            entropy_NT=_on_cpu(scores.entropy_NT),
            necs_NT=_on_cpu(scores.necs_NT),
            values_NT=_on_cpu(scores.values_NT),
        )
        result = self._algorithm.compute_advantages(inputs, kl_coef=float(self._kl_coefs[1]))
        if result.keep_NT is not None:
            rows.loss_mask_NT &= result.keep_NT.to(self._device)
        advantages_NT = result.advantages_NT if result.advantages_NT is not None else result.advantages_N[:, None]
        returns_NT = None if result.returns_NT is None else result.returns_NT.to(self._device)
        return advantages_NT.to(self._device), returns_NT, {k: float(v) for k, v in result.metrics.items()}

    def _loss_inputs(
        self,
        rows: PaddedRows,
        members: np.ndarray,
        weights_NT: Tensor,
        ref_NT: Tensor | None,
        advantages_NT: Tensor | None,
    ) -> LossInputs:
        part = torch.from_numpy(members).to(self._device)
        policy_BT, entropy_BT = self._policy(**rows.model_inputs(members), with_entropy=self._algorithm.use_entropy)
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


@torch.no_grad()
def _mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Sums over the sampled tokens that are trained: mismatch_kl, of w - 1 - log w with w = p_trainer / p_sampler,
    whose mean estimates KL(sampler, trainer) and is never negative (Schulman, "Approximating KL Divergence", 2020);
    and mismatch_tokens, their number.
    """
    mask_BT = inputs.loss_mask_BT
    if inputs.expert_mask_B is not None:
        mask_BT = mask_BT & ~inputs.expert_mask_B[:, None]
    gap_BT = (inputs.policy_logprobs_BT - inputs.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch_kl": (torch.expm1(gap_BT) - gap_BT).masked_fill(~mask_BT, 0.0).sum(),
        "mismatch_tokens": mask_BT.sum(),
    }


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
