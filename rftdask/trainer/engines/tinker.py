"""Train engine for a model hosted by the Tinker service.

Losses are computed locally from the logprobs that the service returns, and their gradients are sent back; model,
adapter and optimizer stay at the service. Published and saved files only name weights stored at the service. Weights
that the run folder no longer names are deleted there once something newer is published or saved.
Letters: N rows of the batch; Q response tokens of all rows; B rows of an update; T tokens of its longest response.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.config import Config
from rftdask.errors import DataError, RftError, RoleError, UserError
from rftdask.models.tinker_service import (
    ANSWER_TIMEOUT_S,
    SAMPLER_FILE,
    SEEDS,
    TinkerService,
    require_key,
    sampler_file,
    sampler_path,
)
from rftdask.processes.ranks import Ranks
from rftdask.storage.base import Data
from rftdask.synchronizer.published import CHECKPOINT_ADAPTER_FOLDER, CHECKPOINT_FOLDER
from rftdask.trainer.engines.base import TrainEngine, finish_means, mismatch, next_kl_coefs, over_updates
from rftdask.trainer.engines.micro_batches import DeviceBatch, keeps_proximal, split_mini_batches
from rftdask.trainer.engines.optimizer import learning_rate

if TYPE_CHECKING:
    from tinker import SamplingClient, TrainingClient, types

STATE_FILE = f"{CHECKPOINT_FOLDER}/tinker_state.json"
_EPS = 1e-8  # epsilon of AdamW, as in PyTorch; the service's default is 1e-12
_DELETE_TIMEOUT_S = 60.0  # short, since a run does not depend on deletion
_CPU = torch.device("cpu")

log = logging.getLogger(__name__)


def check_algorithm(config: Config, algorithm: Algorithm) -> None:
    """Raises: UserError: the algorithm needs more than logprobs of the policy and of the base model."""
    loss, advantage = algorithm.policy_loss_fn, algorithm.advantage_fn
    needs = () if advantage is None else advantage.needs
    unsupported = {
        "algorithm.entropy_loss_fn: entropies; set none": algorithm.use_entropy,
        "algorithm.advantage_fn: entropies of the policy": {"entropy_Q", "necs_Q"} & set(needs),
        "algorithm.policy_loss_fn: a teacher": algorithm.use_teacher,
        "algorithm.policy_loss_fn: a KL baseline over other prompts": loss.uses_kl_baseline,
        "algorithm.policy_loss_fn: a reward model": loss.scores_sequences,
        "algorithm.advantage_fn: a critic": algorithm.use_critic,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise UserError(
                f"{feature}. {config.algorithm.algorithm_type} cannot use it at the Tinker service, which only returns "
                "logprobs; choose another one, or trainer_type torch"
            )


class TinkerTrainEngine(TrainEngine):
    """Trains a LoRA adapter of `model.model_path`.

    Args: timeout_s: seconds to wait for one answer of the service.
    Raises: UserError: the service rejects a request, or cannot run the algorithm.
    """

    trainer_type: ClassVar[str] = "tinker"
    has_model: ClassVar[bool] = False
    is_hosted: ClassVar[bool] = True

    @classmethod
    def from_config(
        cls, config: Config, algorithm: Algorithm, total_steps: int | None, ranks: Ranks
    ) -> TinkerTrainEngine:
        """See TrainEngine."""
        if ranks.size > 1:
            raise UserError(
                f"trainer.num_ranks: {ranks.size}, but the Tinker service is used by one rank; leave it out"
            )
        return cls(config, algorithm, total_steps=total_steps)

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        *,
        total_steps: int | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        check_algorithm(config, algorithm)
        self._config, self._section, self._timeout_s = config, config.model.tinker, timeout_s
        # Rows that the advantage function drops were dropped when the batch was formed.
        self._algorithm = algorithm.without_filtering()
        per_step = config.trainer.ppo_epochs * config.num_mini_batches
        self._optimizer = config.algorithm.optimizer
        self._rate = learning_rate(self._optimizer, None if total_steps is None else total_steps * per_step)
        self._kl_coefs = [algorithm.kl_loss_fn.kl_coef, algorithm.kl_penalty_fn.kl_coef]
        self._service = TinkerService(self._section.base_url, timeout_s=timeout_s)
        self._base_model = config.model.model_path
        self._trained: TrainingClient | None = None
        self._reference: SamplingClient | None = None
        if algorithm.use_reference:
            self._reference = self._service.open_sampler(base_model=self._base_model)
        self._step = 0
        # Paths that this process saved at the service, or resumed from, by step.
        self._samplers: dict[int, str] = {}
        self._states: dict[int, str] = {}

    @property
    def _client(self) -> TrainingClient:
        # Created on first use: a resumed run creates it from a checkpoint.
        if self._trained is None:
            section = self._section
            created = self._service.client.create_lora_training_client(
                self._base_model,
                rank=section.rank,
                seed=self._config.seed % SEEDS if section.seed is None else section.seed,
                train_mlp=section.train_mlp,
                train_attn=section.train_attn,
                train_unembed=section.train_unembed,
            )
            self._trained = self._service.result_of(f"creating an adapter of {self._base_model}", created)
        return self._trained

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Score the batch, compute its advantages, then make its updates."""
        self._check(batch)
        algorithm, device_batch = self._algorithm, DeviceBatch(batch, _CPU)
        for number, kl in enumerate((algorithm.kl_loss_fn, algorithm.kl_penalty_fn)):
            self._kl_coefs[number] = kl.coef_at(step, self._kl_coefs[number])
        scores = self._scores(batch)
        metrics: dict[str, float] = {}
        advantages: Callable[[np.ndarray], Tensor] | None = None
        if algorithm.advantage_fn is not None:
            advantages, _, metrics = device_batch.advantages(algorithm, scores, step, self._kl_coefs[1])
        updates: list[dict[str, float]] = []
        unit = 2 if algorithm.schema == "dpo" else 1  # pairs are never separated
        for update, indices in split_mini_batches(batch, self._config, step, unit):
            weights_N = device_batch.row_weights(self._config, algorithm, indices, step)
            loss_metrics: dict[str, Tensor] = {}

            def compute_loss(
                data: list[types.Datum],
                logprobs: list[Tensor],
                indices: np.ndarray = indices,
                weights_N: Tensor = weights_N,
                loss_metrics: dict[str, Tensor] = loss_metrics,
                is_first: bool = not updates,
            ) -> tuple[Tensor, dict[str, float]]:
                inputs = self._loss_inputs(batch, device_batch, indices, logprobs, weights_N, scores, advantages)
                loss, metrics = algorithm.compute_loss(inputs)
                if not math.isfinite(value := float(loss.detach())):
                    raise RoleError(f"step {step}: the loss is {value}; look at the batch in the ledger")
                loss_metrics.update(metrics)
                if algorithm.schema == "experience" and is_first:
                    loss_metrics.update(mismatch(inputs))
                    # An error here also cancels the update, which is already requested.
                    self.check_mismatch({name: float(value) for name, value in loss_metrics.items()}, batch, step)
                return loss, {}

            lr = self._rate(update)
            # Both are sent before waiting: the service works in cycles, and both fit into one.
            gradient = self._client.forward_backward_custom(self._data(batch, indices), compute_loss)
            stepped = self._client.optim_step(self._adam(lr))
            self._service.result_of(f"computing step {step}", gradient)
            self._service.result_of(f"updating the weights of step {step}", stepped)
            update_metrics = {name: float(value) for name, value in loss_metrics.items()}
            finish_means(update_metrics)
            updates.append(update_metrics | {"lr": lr})
        metrics |= over_updates(updates)
        self._kl_coefs = next_kl_coefs(algorithm, self._kl_coefs, metrics, len(batch))
        self._step = step
        return metrics

    def evaluate(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        """See TrainEngine."""
        totals, total = defaultdict[str, float](float), 0.0
        for batch in batches:
            self._check(batch)
            device_batch, indices = DeviceBatch(batch, _CPU), np.arange(len(batch))
            weights_N = device_batch.row_weights(self._config, self._algorithm)
            logprobs, scores = self._policy_logprobs(batch), self._scores(batch)
            inputs = self._loss_inputs(batch, device_batch, indices, logprobs, weights_N, scores, None)
            # Weighted so that the mean over all batches equals that of one batch of all rows.
            share = float(batch.num_trained.sum() if self._algorithm.loss_agg_mode == "token-mean" else len(batch))
            total += share
            for name, value in self._algorithm.compute_loss(inputs)[1].items():
                totals[name] += share * float(value)
        return {name: value / total for name, value in totals.items() if name != "weight_sum"}

    def _check(self, batch: TrainingBatch) -> None:
        if batch.images is not None:
            raise UserError("rows with images cannot be trained at the Tinker service; use trainer_type torch")
        hot = np.flatnonzero((batch.temperatures != 1) & ~batch.experts)
        if len(hot):
            raise DataError(
                f"{batch.uids[hot[0]]} was sampled at temperature {batch.temperatures[hot[0]]:g}, but the Tinker "
                "service only trains logprobs of temperature 1; sample at 1 (model.temperature, rollout_args)"
            )

    def _scores(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Return [Q] logprobs of the base model and of the policy before the update, for `DeviceBatch.advantages`."""
        scores: dict[str, Tensor] = {}
        if self._reference is not None:
            pairs = [
                (tokens[:start].tolist(), tokens[start:].tolist())
                for tokens, start in zip(batch.row_tokens(), batch.prompt_lengths, strict=True)
            ]
            logprobs = self._service.response_logprobs(self._reference, pairs)
            scores["ref_logprobs_Q"] = torch.tensor([value for row in logprobs for value in row])
        if keeps_proximal(self._config, self._algorithm):
            rows = zip(self._policy_logprobs(batch), batch.response_lengths, strict=True)
            scores["policy_logprobs_Q"] = torch.cat([row[-length:] for row, length in rows])
        return scores

    def _policy_logprobs(self, batch: TrainingBatch) -> list[Tensor]:
        """Return the logprobs of each row's tokens but the first."""
        answer = self._client.forward(self._data(batch, np.arange(len(batch))), "cross_entropy")
        output = self._service.result_of("scoring a batch", answer)
        return [torch.tensor(row["logprobs"].data, dtype=torch.float32) for row in output.loss_fn_outputs]

    @staticmethod
    def _data(batch: TrainingBatch, indices: np.ndarray) -> list[types.Datum]:
        from tinker import types  # late: an optional package

        tokens = batch.row_tokens()
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[i][:-1].tolist()),
                # The weights are required, but belong to a loss of the service that is not used.
                loss_fn_inputs={
                    "target_tokens": tokens[i][1:].astype(np.int64),
                    "weights": np.zeros(len(tokens[i]) - 1, np.float32),
                },
            )
            for i in indices
        ]

    def _adam(self, lr: float) -> types.AdamParams:
        from tinker import types  # late, as above

        section = self._optimizer
        return types.AdamParams(
            learning_rate=lr,
            beta1=section.betas[0],
            beta2=section.betas[1],
            eps=float((section.optimizer_args or {}).get("eps", _EPS)),
            weight_decay=section.weight_decay,
            grad_clip_norm=self._config.trainer.grad_clip,
        )

    def _loss_inputs(
        self,
        batch: TrainingBatch,
        device_batch: DeviceBatch,
        indices: np.ndarray,
        logprobs: Sequence[Tensor],
        weights_N: Tensor,
        scores: Mapping[str, Tensor],
        advantages: Callable[[np.ndarray], Tensor] | None,
    ) -> LossInputs:
        """logprobs: those of each row's tokens but the first."""
        lengths = batch.response_lengths[indices]
        policy_BT = pad_sequence([row[-n:] for row, n in zip(logprobs, lengths, strict=True)], batch_first=True)
        return device_batch.loss_inputs(
            self._config, self._algorithm, indices, policy_BT, weights_N, scores, advantages, kl_coef=self._kl_coefs[0]
        )

    def weights(self) -> Mapping[str, Data]:
        """See TrainEngine; a file with the path of sampler weights."""
        if self._step not in self._samplers:
            saved = self._client.save_weights_for_sampler(f"step-{self._step}")
            self._samplers[self._step] = self._service.result_of(f"saving version {self._step}", saved).path
        return sampler_file(self._samplers[self._step])

    def state_files(self) -> Mapping[str, Data]:
        """See TrainEngine; the path of adapter and optimizer, and that of `weights` to evaluate the checkpoint."""
        files = {f"{CHECKPOINT_ADAPTER_FOLDER}/{name}": data for name, data in self.weights().items()}
        if self._step not in self._states:
            saved = self._client.save_state(f"step-{self._step}", overwrite=True)
            self._states[self._step] = self._service.result_of(f"saving checkpoint {self._step}", saved).path
        state = {"step": self._step, "path": self._states[self._step], "kl_coefs": self._kl_coefs}
        return {**files, STATE_FILE: json.dumps(state).encode()}

    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """See TrainEngine. Creates a new adapter at the service from the saved one and its optimizer."""
        state = json.loads(bytes(files[STATE_FILE]))
        path = state["path"]
        created = self._service.client.create_training_client_from_state_with_optimizer(path)
        self._trained = self._service.result_of(f"resuming from {path}", created)
        self._step, self._kl_coefs = int(state["step"]), list(state["kl_coefs"])
        # This process now deletes them once newer ones exist.
        self._states[self._step] = path
        self._samplers[self._step] = sampler_path(bytes(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{SAMPLER_FILE}"]))

    def export_files(self) -> Mapping[str, bytes]:
        """Return {}: the model is at the service; `tinker checkpoint download` fetches its adapter."""
        return {}

    def keep_only(self, versions: Collection[int], checkpoints: Collection[int]) -> None:
        """See TrainEngine; deletes weights that this process saved at the service."""
        newest = max(versions, default=0), max(checkpoints, default=0)
        # Newer steps are kept: the run folder does not name them until they are written.
        states = [step for step in self._states if step not in checkpoints and step < newest[1]]
        named = {*versions, *checkpoints}
        samplers = [step for step in self._samplers if step not in named and step < newest[step in self._states]]
        for path in [self._samplers.pop(step) for step in samplers] + [self._states.pop(step) for step in states]:
            timeout_s = min(self._timeout_s, _DELETE_TIMEOUT_S)
            try:
                self._service.ask(f"deleting {path}", partial(self._delete, path), timeout_s)
            except RftError as error:  # costs storage at the service, but does not affect the run
                log.warning("could not delete %s at the service: %s", path, error)

    def _delete(self, path: str) -> None:
        from tinker import RestClient  # late, as above

        rest = RestClient(base_url=self._section.base_url, api_key=require_key())
        rest.delete_checkpoint_from_tinker_path(path).result()
