"""PyTorch train engine: the models of one rank, an optimizer, and a strategy by which the ranks share them.

Every rank receives metadata for all rows of the batch, and tokens only of the rows that it computes. A step scores the
rows by the frozen models and the critic, computes advantages over the whole batch, then makes one update of the policy
and one of the critic for each mini-batch of each epoch, with gradients summed over the ranks.
Letters: N rows of the batch; B rows of a micro-batch; T response tokens of the longest response.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch, mismatched
from rftdask.buffer.batches.ledger import parent_storage, read_parent
from rftdask.config import Config
from rftdask.config.schema.model import LoraConfig
from rftdask.data.images import ImageProcessor
from rftdask.data.seeds import derived_seed
from rftdask.data.tokenizer import configured_template
from rftdask.errors import DataError, UserError
from rftdask.models import lora as adapters
from rftdask.models.host_copy import HostCopy
from rftdask.models.routers import RouterLoss, Routers
from rftdask.processes.gpus import use_device
from rftdask.processes.ranks import Ranks
from rftdask.storage import open_storage
from rftdask.storage.base import Data
from rftdask.storage.temporary import TemporaryFolder
from rftdask.synchronizer.fingerprint import Fingerprint, fixed_sequences
from rftdask.synchronizer.published import CHECKPOINT_ADAPTER_FOLDER, CHECKPOINT_FOLDER, MODEL_FILE, model_file
from rftdask.trainer import model as policies
from rftdask.trainer.attention import PACKED
from rftdask.trainer.engines.base import TrainEngine, finish_means, mismatch, next_kl_coefs, over_updates
from rftdask.trainer.engines.critic import Critic
from rftdask.trainer.engines.micro_batches import (
    DeviceBatch,
    MicroBatchPlan,
    keeps_proximal,
    plan_micro_batches,
    split_mini_batches,
    takes_parts,
)
from rftdask.trainer.engines.optimizer import ModelOptimizer
from rftdask.trainer.engines.strategies.base import DDP, Strategy, distinct_state, layers_of
from rftdask.trainer.engines.strategies.fsdp2 import FSDP2
from rftdask.trainer.engines.strategies.tensor import TensorParallel
from rftdask.trainer.engines.tensor_files import SavedTensors, stage_tensors
from rftdask.trainer.packing import PackedRows, pack_rows

_OPTIMIZER = "actor/optim.safetensors"
_COEFS = "actor/kl_coefs.safetensors"
Scores = tuple[Tensor, Tensor | None]
"""[B, T] logprobs, and the second result of `token_logprobs`."""


class Scorer(torch.nn.Module):
    """`token_logprobs` of a model as one module, so that a strategy sees where a pass begins and ends. routers: replay
    the experts recorded in the rows; None: they choose."""

    def __init__(self, model: torch.nn.Module, routers: Routers | None = None) -> None:
        super().__init__()
        self.model, self.routers = model, routers

    def forward(self, *, states_alone: bool = False, **inputs: Any) -> Scores | Tensor:
        """Return `token_logprobs` of packed rows; with `states_alone` only `predicting_states`, [Q, H]."""
        if self.routers is not None:
            # Not reset afterwards: the backward pass may recompute layers.
            self.routers.give(inputs["rows"].experts_SX)
        score = policies.predicting_states if states_alone else policies.token_logprobs
        return score(self.model, **inputs)


class RowScorer(Scorer):
    """`row_scores` of a reward model in place of logprobs."""

    def forward(self, **inputs: Any) -> Scores:
        """Return ([B, T] score of the row at every response token, None)."""
        return policies.row_scores(self.model, inputs["rows"]), None


class TorchEngine(TrainEngine):
    """Trains the policy of `model.model_path` by an algorithm."""

    trainer_type: ClassVar[str] = "torch"

    @classmethod
    def from_config(cls, config: Config, algorithm: Algorithm, total_steps: int | None, ranks: Ranks) -> TorchEngine:
        """See TrainEngine; the strategy follows from the section and the number of ranks."""
        trainer, device = config.trainer, torch.device(use_device())
        strategy: Strategy = Strategy(ranks) if ranks.size == 1 else DDP(ranks)
        cut = None
        if (size := trainer.tensor_parallel_size) > 1:
            strategy = cut = TensorParallel(ranks, ranks.neighbors(size), ranks.across(size), device)
        # Also for a single rank whose weights are offloaded, or stored in another data type than they compute in.
        converts = trainer.offload_policy or trainer.master_weights != "float32"
        if trainer.trainer_strategy == "fsdp2" and (ranks.size > 1 or converts):
            strategy = FSDP2(ranks, device, trainer, cut)
        size = trainer.ulysses_sequence_parallel_size
        sequence = ranks.neighbors(size) if size > 1 else None
        return cls(config, algorithm, strategy, sequence, device=device.type, total_steps=total_steps)

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        strategy: Strategy | None = None,
        sequence: Ranks | None = None,
        *,
        device: str = "cpu",
        total_steps: int | None = None,
    ) -> None:
        """
        Args:
            strategy: None: one rank with the whole model.
            sequence: neighboring ranks that split each sequence with this one; None: sequences are not split.
            total_steps: see TrainEngine.
        Raises: DataError: a model cannot be loaded or split, or a teacher has another vocabulary.
        """
        self._config, self._trainer, self._path = config, config.trainer, config.model.model_path
        self._strategy = strategy or Strategy(Ranks())
        self._ranks, self._sequence = self._strategy.ranks, sequence
        # New adapters are random, and must be the same on every rank.
        torch.manual_seed(config.seed)
        # An operation without a deterministic implementation then raises.
        torch.use_deterministic_algorithms(device == "cpu" if config.deterministic is None else config.deterministic)
        # Rows that the advantage function drops were dropped when the batch was formed.
        self._algorithm = algorithm.without_filtering()
        advantage = self._algorithm.advantage_fn
        self._needs = () if advantage is None else advantage.needs
        # A pair (chosen, rejected) is one term of the loss: both rows must be in the same micro-batch.
        self._unit = 2 if algorithm.schema == "dpo" else 1
        self._device = torch.device(device)
        self._num_splits = 1 if sequence is None else sequence.size
        trusted = config.model.trust_remote_code
        # In the data type of the weights that the optimizer moves; frozen models: `_load_base`.
        self._load = partial(
            policies.load_policy,
            dtype=self._trainer.master_weights,
            device=device,
            trust_remote_code=trusted,
            num_splits=self._num_splits,
            scalar_head=algorithm.policy_loss_fn.scores_sequences,
        )
        self._lora = config.model.lora_configs[0] if config.model.lora_configs else None
        self._model, self._tokenizer = (
            self._load(self._path, spread=self._strategy.reading)
            if self._lora is None
            else self._load_base(self._path, self._lora)
        )
        # The data type in which engines compute, which may be narrower than the trainer's float32.
        engine_dtype = config.explorer.rollout_model.dtype_on(device)
        self._published_dtype = torch.float32 if self._lora is not None else getattr(torch, engine_dtype)
        self._dtype_at_rest = policies.dtype_at_rest(self._path, trust_remote_code=trusted)
        # Read now: the folder may be gone when the run ends.
        self._read_only_files = (
            policies.read_only_files(self._path, configured_template(config)) if self._ranks.is_rank0 else {}
        )
        self._check_export()
        self._adapter_settings = {} if self._lora is None else adapters.begin(self._model, self._lora)
        # Tensor names in the model -> in the adapter file; empty if all weights are trained.
        self._adapter = {} if self._lora is None else adapters.adapter_names(self._model)
        self._model.train()
        if algorithm.schema not in ("sft", "cpt"):
            # Logprobs are compared with those of other models: the noise of dropout would be in every ratio and margin.
            policies.turn_off_dropout(self._model)
        if self._trainer.gradient_checkpointing:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        coef = self._trainer.router_aux_loss_coef
        self._router_loss = RouterLoss(self._model, coef) if coef else None
        self._routers = Routers(self._model) if config.algorithm.enable_router_replay else None
        # After adapters are added, and before the optimizer sees the parameters.
        self._policy = self._prepared(self._model, self._routers)
        if self._routers is not None and self._model.config._attn_implementation != PACKED:
            name = type(self._model).__name__
            raise DataError(f"algorithm.enable_router_replay: {name} does not compute packed rows; leave it out")
        if self._trainer.torch_compile:
            for layer in layers_of(self._model, self._model._no_split_modules or ()):
                # Layer by layer: they are alike, so one compilation serves all of them. Lengths differ in every pass.
                layer.compile(dynamic=True)
        optimizer, grad_clip = config.algorithm.optimizer, self._trainer.grad_clip
        per_step = self._trainer.ppo_epochs * config.num_mini_batches
        total_updates = None if total_steps is None else total_steps * per_step
        folders = config.explorer.plugin_dirs
        self._optimizer = ModelOptimizer(self._model, optimizer, grad_clip, self._strategy, total_updates, folders)
        self._frozen: list[Scorer] = []  # reference and teachers
        self._host_copy: HostCopy | None = None
        self._reference = self._load_reference() if algorithm.use_reference else None
        models = config.explorer.auxiliary_models if algorithm.use_teacher else ()
        self._teachers = [self._load_frozen(model.model_path or "") for model in models]
        # Memory of written publications and checkpoints, by file name.
        self._spare: dict[str, Data] = {}
        self._critic: Critic | None = None
        if algorithm.use_critic:
            body, _ = self._load(config.model.critic_model_path or self._path, spread=self._strategy.reading)
            policies.turn_off_dropout(body)  # values are compared with those before the update
            self._critic = Critic(
                body, self._trainer.critic, optimizer, grad_clip, self._strategy, folders, self._num_splits
            )
        # [2] float64: coefficients of KL loss and KL penalty, which change if they are adaptive.
        kls = (algorithm.kl_loss_fn, algorithm.kl_penalty_fn)
        self._kl_coefs = torch.tensor([kl.kl_coef for kl in kls], dtype=torch.float64)

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor(self._path, trust_remote_code=self._config.model.trust_remote_code)

    def _device_batch(self, batch: TrainingBatch) -> DeviceBatch:
        if batch.images is not None:
            if isinstance(self._strategy, FSDP2 | TensorParallel) and self._ranks.size > 1:
                text = "ranks that hold parts of a model cannot compute rows with images"
                raise UserError(f"{text}; set trainer.trainer_strategy: ddp")
            storage = open_storage(self._config.checkpoint_job_dir)
            while read_parent(storage) is not None:  # a lineage trains experiences of the run that it is in
                storage = parent_storage(storage)
            row_images = [names for names, is_held in zip(batch.images, batch.is_held, strict=True) if is_held]
            self._images.folder.fetch(storage, [name for names in row_images for name in names])
        processor = None if batch.images is None else self._images
        return DeviceBatch(batch, self._device, self._sequence, lean=self._lean, processor=processor, ranks=self._ranks)

    def rows_to_compute(self, batch: TrainingBatch, step: int) -> np.ndarray | None:
        """See TrainEngine; the rows of all passes over the batch and over the mini-batches of the step."""
        # A KL baseline combines prompts with responses of other rows.
        if self._algorithm.policy_loss_fn.uses_kl_baseline or not takes_parts(self._algorithm.advantage_fn):
            return None
        mini_batches = [indices for _, indices in split_mini_batches(batch, self._config, step, self._unit)]
        plans = []
        for indices in [np.arange(len(batch)), *mini_batches]:
            plan = self._plan(batch, indices)
            plans += [plan, *(teacher_plan for _, teacher_plan in self._teacher_plans(batch, indices, plan))]
        return np.unique(np.concatenate([rows for plan in plans for rows in (*plan.micro_batches, plan.filler)]))

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Score the batch, compute its advantages, then make its updates of policy and critic."""
        algorithm, device = self._algorithm, self._device
        _check_experts(batch, self._routers)
        device_batch = self._device_batch(batch)
        batch_plan = self._plan(batch, np.arange(len(batch)))
        # Random numbers of a step depend only on seed and step, so no random state is saved.
        torch.manual_seed(derived_seed(self._config.seed, "train_step", step))
        for number, kl in enumerate((algorithm.kl_loss_fn, algorithm.kl_penalty_fn)):
            self._kl_coefs[number] = kl.coef_at(step, float(self._kl_coefs[number]))
        updates: list[dict[str, float]] = []
        # Weights and optimizer stay float32, so that a small step is not rounded away; a GPU multiplies in bfloat16.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Once for all updates, which are compared with the weights before the step.
            scores = self._scores(batch, device_batch, batch_plan)
            metrics: dict[str, float] = {}
            advantages: Callable[[np.ndarray], Tensor] | None = None
            returns_Q: Tensor | None = None
            if algorithm.advantage_fn is not None:
                kl_coef = float(self._kl_coefs[1])
                advantages, returns_Q, metrics = device_batch.advantages(
                    algorithm, scores, step, kl_coef, batch_plan.computed_rows
                )
            for update, indices in split_mini_batches(batch, self._config, step, self._unit):
                plan = batch_plan if len(indices) == len(batch) else self._plan(batch, indices)
                update_metrics: dict[str, float] = {}
                # Until the critic has learned the scale of returns, advantages are noise to the policy.
                if self._critic is None or step > self._trainer.critic_warmup:
                    # One denominator for the mini-batch, so gradients of micro-batches and ranks add up to its own.
                    weights_N = device_batch.row_weights(self._config, algorithm, indices, step)
                    sums: dict[str, Tensor] = {}
                    for teacher, teacher_plan in self._teacher_plans(batch, indices, plan):
                        for micro_batch in teacher_plan.micro_batches:
                            with nullcontext() if self._router_loss is None else self._router_loss.listening():
                                inputs = self._loss_inputs(
                                    device_batch, micro_batch, teacher, weights_N, scores, advantages
                                )
                            loss, loss_metrics = algorithm.compute_loss(inputs)
                            if self._router_loss is not None:
                                # Weighted by tokens, so the terms add up to a mean over the update.
                                share = batch.lengths[micro_batch].sum() / batch.lengths[indices].sum()
                                term = self._router_loss.term(share)
                                loss, loss_metrics = loss + term, loss_metrics | {"router_aux_loss": term.detach()}
                            loss_metrics |= {} if self._routers is None else self._routers.agreement()
                            loss.backward()
                            # Only in the first update: later ones have weights that differ from the sampler's.
                            if algorithm.schema == "experience" and not updates:
                                loss_metrics |= mismatch(inputs)
                            # Kept as tensors: converting to float would wait for the device in every pass.
                            for name, value in loss_metrics.items():
                                sums[name] = sums[name] + value if name in sums else value
                        # Ranks with fewer passes take part in the communication of the others, with gradient 0.
                        teacher_plan.idle_backward(
                            device_batch, lambda model=teacher, **inputs: self._update_scores(model, **inputs)[0]
                        )
                    # Every loss weighs its tokens by the whole mini-batch, so these sums are its means.
                    update_metrics = plan.add_metrics({name: float(value) for name, value in sums.items()})
                    self.check_mismatch(update_metrics, batch, step)
                    finish_means(update_metrics)
                    update_metrics |= self._optimizer.step(update, step)
                if self._critic is not None:
                    assert returns_Q is not None
                    update_metrics |= self._critic.update(
                        device_batch, plan, indices, scores["values_Q"], returns_Q, update=update, step=step
                    )
                updates.append(update_metrics)
        metrics |= over_updates(updates)
        # The metrics are the same on all ranks, and so are the coefficients of the next step.
        coefs = next_kl_coefs(algorithm, self._kl_coefs.tolist(), metrics, len(batch))
        self._kl_coefs = torch.tensor(coefs, dtype=torch.float64)
        return metrics

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        """See TrainEngine; in evaluation mode, without dropout."""
        algorithm, device = self._algorithm, self._device
        totals, total = defaultdict[str, float](float), 0.0
        self._model.eval()
        for batch in batches:
            indices = np.arange(len(batch))
            device_batch, plan = self._device_batch(batch), self._plan(batch, indices)
            sums = defaultdict[str, float](float)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                scores = self._scores(batch, device_batch, plan)
                weights_N = device_batch.row_weights(self._config, algorithm)
                for teacher, teacher_plan in self._teacher_plans(batch, indices, plan):
                    for micro_batch in teacher_plan.micro_batches:
                        inputs = self._loss_inputs(device_batch, micro_batch, teacher, weights_N, scores, None)
                        for name, value in algorithm.compute_loss(inputs)[1].items():
                            sums[name] += float(value)
                    for _ in range(teacher_plan.num_idle):  # all ranks must take part in each pass
                        self._update_scores(teacher, **device_batch.model_inputs(teacher_plan.filler))
            # Weighted so that the mean over all batches equals that of one batch of all rows.
            share = float(batch.num_trained.sum()) if algorithm.loss_agg_mode == "token-mean" else float(len(batch))
            total += share
            for name, mean in plan.add_metrics(sums).items():
                totals[name] += share * mean
        self._model.train()
        return {name: value / total for name, value in totals.items() if name != "weight_sum"}

    @property
    def _lean(self) -> bool:
        """See `pack_rows`; False if scores are read at a row's last token, or routers need all tokens' experts."""
        return not (self._algorithm.policy_loss_fn.scores_sequences or self._router_loss or self._routers)

    def _plan(self, batch: TrainingBatch, indices: np.ndarray) -> MicroBatchPlan:
        return plan_micro_batches(
            batch.lengths,
            indices,
            self._ranks,
            hidden_size=self._model.config.get_text_config().hidden_size,
            max_tokens=self._trainer.max_tokens_per_micro_batch * self._num_splits,
            max_rows=self._trainer.max_rows_per_micro_batch,
            unit=self._unit,
            together=self._strategy.passes_together,
            group=self._sequence or self._strategy.group,
            siblings=batch.groups if self._lean else None,  # rollouts of a task share its prompt
        )

    def _teacher_plans(
        self, batch: TrainingBatch, indices: np.ndarray, plan: MicroBatchPlan
    ) -> list[tuple[Scorer | None, MicroBatchPlan]]:
        """Return each teacher with the plan for its rows; without teachers [(None, plan)]. plan: for all `indices`."""
        if len(self._teachers) < 2:
            return [(self._teachers[0] if self._teachers else None, plan)]
        # All ranks know all rows, so they call the same teachers in the same order.
        numbers = teachers_of(batch, self._config)[indices]
        rows = [(teacher, indices[numbers == number]) for number, teacher in enumerate(self._teachers)]
        return [(teacher, self._plan(batch, taught)) for teacher, taught in rows if len(taught)]

    def _kl_baseline(self, batch: TrainingBatch) -> float:
        """Return the mean of log p_policy - log p_ref over the sequences of a batch, at least 0: an estimate of a KL
        divergence if the responses belong to other prompts."""
        device_batch, plan = self._device_batch(batch), self._plan(batch, np.arange(len(batch)))
        assert self._reference is not None, "a loss with a KL baseline has a reference"
        policy_Q, ref_Q = (
            plan.score_tokens(device_batch, lambda model=model, **inputs: model(**inputs)[0])
            for model in (self._policy, self._reference)
        )
        drift_N = device_batch.row_sums((policy_Q - ref_Q) * device_batch.loss_mask_Q)
        return max(0.0, float(drift_N.mean()))

    def _scores(self, batch: TrainingBatch, device_batch: DeviceBatch, plan: MicroBatchPlan) -> dict[str, Tensor]:
        """Return [Q] values of frozen models, policy and critic before the update, by their names in `AdvantageInputs`.

        Also sets `device_batch.kl_baseline` for losses that use one.
        """

        def score(model: Callable[..., Any], plan: MicroBatchPlan = plan, number: int = 0, **options: Any) -> Tensor:
            return plan.score_tokens(device_batch, lambda **inputs: model(**inputs, **options)[number])

        scores: dict[str, Tensor] = {}
        if self._reference is not None:
            scores["ref_logprobs_Q"] = score(self._reference)
        if "teacher_logprobs_Q" in self._needs:
            # Each teacher scores its own rows; the others are 0.
            teacher_plans = self._teacher_plans(batch, np.arange(len(batch)), plan)
            first, *others = [score(teacher, teacher_plan) for teacher, teacher_plan in teacher_plans if teacher]
            scores["teacher_logprobs_Q"] = sum(others, first)
        if "necs_Q" in self._needs:
            signals_Q3 = plan.score_tokens(device_batch, partial(policies.entropy_signals, self._policy))
            names = ("policy_logprobs_Q", "entropy_Q", "necs_Q")
            scores |= dict(zip(names, signals_Q3.unbind(-1), strict=True))
        elif "entropy_Q" in self._needs:
            scores["entropy_Q"] = score(self._policy, number=1, with_entropy=True)
        if keeps_proximal(self._config, self._algorithm) and "policy_logprobs_Q" not in scores:
            scores["policy_logprobs_Q"] = score(self._policy)
        if self._critic is not None:
            scores["values_Q"] = plan.score_tokens(device_batch, self._critic.model)
        if self._algorithm.policy_loss_fn.uses_kl_baseline:
            device_batch.kl_baseline = self._kl_baseline(mismatched(batch, self._config.model.max_model_len))
        return scores

    def _update_scores(self, teacher: Scorer | None, **inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return [B, T] logprobs, entropies and divergences from the teacher; None for those that the loss ignores."""
        loss, use_entropy, states = self._algorithm.policy_loss_fn, self._algorithm.use_entropy, None
        if loss.uses_teacher:
            assert teacher is not None, "an algorithm with a teacher has loaded it"
            with torch.no_grad():
                states_QH = teacher(**inputs, states_alone=True)
            # Hidden states instead of logits: [Q, V] of the teacher for a whole micro-batch would not fit.
            causal: Any = teacher.model
            states = policies.TeacherStates(states_QH, causal.get_output_embeddings(), loss.divergence)
        logprobs_BT, extra = self._policy(**inputs, with_entropy=use_entropy, teacher=states)
        if states is None:
            return logprobs_BT, extra, None
        divergence_BT, entropy_BT = extra.unbind(-1)
        return logprobs_BT, entropy_BT if use_entropy else None, divergence_BT

    def _loss_inputs(
        self,
        device_batch: DeviceBatch,
        indices: np.ndarray,
        teacher: Scorer | None,
        weights_N: Tensor,
        scores: Mapping[str, Tensor],
        advantages: Callable[[np.ndarray], Tensor] | None,
    ) -> LossInputs:
        """Make one forward pass of the policy over some rows, and return the inputs of their loss."""
        policy_BT, entropy_BT, divergence_BT = self._update_scores(teacher, **device_batch.model_inputs(indices))
        return device_batch.loss_inputs(
            self._config,
            self._algorithm,
            indices,
            policy_BT,
            weights_N,
            scores,
            advantages,
            entropy_BT=entropy_BT,
            divergence_BT=divergence_BT,
            kl_coef=float(self._kl_coefs[0]),
        )

    def weights(self) -> Mapping[str, Data]:
        """See TrainEngine. Adapters keep PEFT's tensor names and their data type."""
        return self._staged("", None if self._adapter else self._published_dtype)

    def reuse(self, files: Mapping[str, Data]) -> None:
        """See TrainEngine. Allocating new pages takes longer than the copy into them."""
        self._spare |= {name: data for name, data in files.items() if isinstance(data, memoryview)}

    def _staged(self, folder: str, dtype: torch.dtype | None) -> dict[str, Data]:
        """Return this rank's files of the trained weights; rank 0 has all adapters. Called by all ranks.

        Args: folder: prefix of the file names. dtype: None: the data type of the optimizer's weights.
        """
        state, ranks = distinct_state(self._model), self._ranks
        name = folder + (adapters.ADAPTER_FILE if self._adapter else model_file(ranks.rank, ranks.size))
        if self._adapter:
            state = {self._adapter[name]: state[name] for name in state if name in self._adapter}
        file = stage_tensors(state, ranks, dtype, shared=not self._adapter, spare=self._spare.pop(name, b""))
        if not file:
            return {}
        if not self._adapter:
            return {name: file}
        settings = json.dumps(self._adapter_settings, indent=1, sort_keys=True).encode()
        return {name: file, folder + adapters.ADAPTER_CONFIG_FILE: settings}

    @torch.no_grad()
    def fingerprint(self) -> Fingerprint:
        """See TrainEngine; its data type is the narrower one of these weights and of those that engines load."""
        sequences = fixed_sequences(self._model.config.get_text_config().vocab_size)
        rows = pack_rows(
            [np.array(sequence) for sequence in sequences],
            # A prompt of one token, so that all others are scored; temperature 1.
            np.ones(len(sequences), np.int64),
            np.ones(len(sequences), np.float32),
            self._device,
            sequence=self._sequence,
        )
        self._model.eval()  # an engine has no dropout
        logprobs_BT, _ = self._policy(rows=rows)
        self._model.train()
        # If weights are gathered in bfloat16, the logprobs contain their rounding.
        bfloat16 = self._strategy.sharded and self._device.type == "cuda"
        logprobs = tuple(tuple(row) for row in logprobs_BT.cpu().tolist())
        dtype = torch.bfloat16 if bfloat16 else self._published_dtype
        return Fingerprint(sequences, logprobs, str(dtype).removeprefix("torch."))

    def state_files(self) -> Mapping[str, Data]:
        """See TrainEngine; rank 0 has the adapters and coefficients, all ranks have the rest."""
        files = self._optimizer.state_files(_OPTIMIZER, self._spare)
        if self._critic is not None:
            files |= self._critic.state_files(self._spare)
        files |= self._staged(f"{CHECKPOINT_ADAPTER_FOLDER if self._adapter else CHECKPOINT_FOLDER}/", None)
        for name in files:
            self._spare.pop(name, None)  # in use
        if self._ranks.is_rank0:
            files[_COEFS] = save({"kl": self._kl_coefs})
        return files

    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """See TrainEngine. Raises: RoleError: the files are of another model or version."""
        name, tensors = f"{CHECKPOINT_FOLDER}/{MODEL_FILE}", distinct_state(self._model)
        if self._adapter:
            name = f"{CHECKPOINT_ADAPTER_FOLDER}/{adapters.ADAPTER_FILE}"
            tensors = {self._adapter[n]: tensor for n, tensor in tensors.items() if n in self._adapter}
        # Before the weights: creating the optimizer's state takes a step of rate 0, which may flip the sign of a zero.
        self._optimizer.load_state_files(_OPTIMIZER, files)
        SavedTensors(name, files, self._ranks).load(tensors)
        if self._critic is not None:
            self._critic.load_state_files(files)
        self._kl_coefs = load(bytes(files[_COEFS]))["kl"]

    def leave_device(self) -> None:
        """See TrainEngine; weights, gradients, frozen models and optimizer states move to host memory."""
        for module in self._modules():
            self._strategy.offload(module)
        self._host_copy = HostCopy(self._tensors(), self._device)

    def return_to_device(self) -> None:
        if self._host_copy is not None:
            self._host_copy.back()
            self._host_copy = None

    def _tensors(self) -> Iterator[Tensor]:
        """Yield everything that stays on the device between steps."""
        for module in self._modules():
            yield from module.parameters()
            yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
            yield from module.buffers()
        yield from self._optimizer.tensors()
        if self._critic is not None:
            yield from self._critic.optimizer.tensors()

    def _modules(self) -> list[torch.nn.Module]:
        return [self._policy, *self._frozen, *([] if self._critic is None else [self._critic.model])]

    def export_files(self) -> Mapping[str, bytes]:
        """See TrainEngine; adapters are merged into a copy of the model. In the data type of the model's files."""
        tensors = self._strategy.full_state(self._model, self._adapter or None)
        if not self._ranks.is_rank0:
            return {}
        model = self._model
        if self._adapter:
            # Into a model of its own: merging cannot be undone to the bit, and the one here may be spread over ranks.
            model, _ = self._load(self._path, device="cpu", num_splits=1)
            adapters.add_adapter(model, self._adapter_settings | {"inference_mode": False})
            named = {self._adapter[name]: tensor for name, tensor in tensors.items()}
            adapters.load_adapter(model, named, "the trainer")
            tensors = {}
            adapters.merged(model)
        with TemporaryFolder("export") as folder:
            self._export(model, Path(folder), tensors or None)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def _check_export(self) -> None:
        """Export everything but the weights on rank 0, to report what would end the run at its last step."""
        # transformers saves only on the first rank of all processes, which is another one if ranks form several gangs.
        if not self._ranks.is_rank0 or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
            return
        try:
            with TemporaryFolder("export") as folder:
                self._export(self._model, Path(folder), {})
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"model.model_path {self._path} cannot be saved after training: {error}; correct this first"
            ) from error

    def _export(self, model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor] | None) -> None:
        policies.export_hf(
            model, self._tokenizer, folder, tensors, dtype=self._dtype_at_rest, files=self._read_only_files
        )

    def _load_reference(self) -> Callable[..., Scores]:
        """Load the initial policy; with new adapters it is the policy with its adapters turned off."""
        if self._lora is None or self._lora.path is not None:
            return self._load_frozen(self._path, self._lora)

        def without(*, rows: PackedRows, **inputs: Any) -> Scores:
            with adapters.without_adapters(self._model):
                # The reference chooses its experts, as it does if it is a separate model.
                scores: Scores = self._policy(rows=replace(rows, experts_SX=None), **inputs)
                return scores

        return without

    def _load_frozen(self, model_path: str, lora: LoraConfig | None = None) -> Scorer:
        model, _ = self._load_base(model_path, lora)
        if lora is not None:
            adapters.begin(model, lora)
        ours, theirs = self._model.config.vocab_size, model.config.vocab_size
        if ours != theirs:
            raise DataError(
                f"{model_path} has a vocabulary of {theirs} tokens, the policy {self._path} one of {ours}; "
                "only a model of the same tokens can score its responses"
            )
        model.eval().requires_grad_(False)
        self._frozen.append(self._prepared(model))
        return self._frozen[-1]

    def _load_base(self, model_path: str, lora: LoraConfig | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load a model with frozen weights, in the data type of its files if possible."""
        whole = lora is not None and adapters.needs_weights(lora)  # such adapters are initialized from the weights
        # `compute_wide` goes neither with cut layers nor with compiled ones, so those are loaded in float32.
        narrow = not whole and not isinstance(self._strategy, TensorParallel)
        narrow &= self._strategy.sharded or not self._trainer.torch_compile
        dtype = policies.frozen_dtype(model_path) if narrow else "float32"
        return self._load(model_path, dtype=dtype, spread=None if whole else self._strategy.reading)

    def _prepared(self, model: PreTrainedModel, routers: Routers | None = None) -> Scorer:
        # Frozen models are laid out like the policy: they take as much memory.
        scores_sequences = self._algorithm.policy_loss_fn.scores_sequences
        scorer = (RowScorer if scores_sequences else Scorer)(model, routers)
        self._strategy.prepare(scorer, layers_of(model, model._no_split_modules or ()))
        if not self._strategy.sharded:
            policies.compute_wide(model)
        else:  # the strategy converts weights as it gathers them
            self._strategy.within(
                scorer, lambda: policies.check_model(model, self._num_splits, has_logits=not scores_sequences)
            )
        return scorer


def teachers_of(batch: TrainingBatch, config: Config) -> np.ndarray:
    """Return [N]: the number of each row's auxiliary model. Raises: DataError: a row has no teacher."""
    rows = zip(batch.uids, batch.experts, strict=True)
    names = [config.dataset_name if expert else uid.partition("/")[0] for uid, expert in rows]
    numbers = {name: config.explorer.teacher_of(name) for name in dict.fromkeys(names)}
    if untaught := [name for name, number in numbers.items() if number is None]:
        raise DataError(
            f"the rows of {untaught[0]!r} have no teacher; name it in `teacher_for` of an explorer.auxiliary_models"
        )
    return np.array([numbers[name] for name in names])


def _check_experts(batch: TrainingBatch, routers: Routers | None) -> None:
    """Raises: DataError: a rollout has no recorded experts, or another number per token than the policy."""
    if routers is None:
        return
    rows, num_choices = batch.row_experts(), routers.num_choices
    remedy = "set algorithm.enable_router_replay in the run that samples, or leave it out here"
    for number in np.flatnonzero(~batch.experts & (batch.lengths > 1) & batch.is_held):
        if rows is None or rows[number][0, 0] < 0:
            raise DataError(f"{batch.uids[number]} has no record of the experts that its tokens took; {remedy}")
    if batch.routed_experts is not None and (recorded := batch.routed_experts.shape[1]) != num_choices:
        raise DataError(f"the rollouts record {recorded} experts per token, the policy takes {num_choices}; {remedy}")
