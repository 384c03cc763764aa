"""The train engine of a model at the Tinker service: it computes the losses of this package here, from the logprobs
that the service tells, and sends their gradients back; model, adapter and optimizer are there.

What is published and what is saved are small files that name what the service has saved. What of it the run folder does
not name any more is deleted there, once something newer is published or saved.
Letters: N rows of the batch; Q response tokens of all of them; B rows of an update; T of the longest response of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

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
    Answer,
    ask,
    open_sampler,
    open_service,
    require_key,
    response_logprobs,
    result_of,
    sampler_file,
    sampler_path,
)
from rftdask.storage.base import Data
from rftdask.synchronizer.published import CHECKPOINT_ADAPTER_FOLDER, CHECKPOINT_FOLDER
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.engines.learning_rate import learning_rate
from rftdask.trainer.engines.micro_batches import BatchRows, keeps_proximal, updates_of
from rftdask.trainer.engines.step_metrics import finish_means, mismatch, next_kl_coefs, over_updates
from rftdask.trainer.ranks import Ranks

if TYPE_CHECKING:
    from tinker import SamplingClient, TrainingClient, types

STATE_FILE = f"{CHECKPOINT_FOLDER}/tinker_state.json"
_EPS = 1e-8
"""Of AdamW, as in PyTorch; the service's own is 1e-12."""
_DELETE_TIMEOUT_S = 60.0
"""For what a run can do without."""
_CPU = torch.device("cpu")
T = TypeVar("T")

log = logging.getLogger(__name__)


def check_algorithm(config: Config, algorithm: Algorithm) -> None:
    """Raises: UserError: the algorithm asks for more than logprobs of the policy and of the base model."""
    loss, advantage = algorithm.policy_loss_fn, algorithm.advantage_fn
    needs = () if advantage is None else advantage.needs
    others = {
        "algorithm.entropy_loss_fn: entropies; set none": algorithm.use_entropy,
        "algorithm.advantage_fn: entropies of the policy": {"entropy_Q", "necs_Q"} & set(needs),
        "algorithm.policy_loss_fn: a teacher": algorithm.use_teacher,
        "algorithm.policy_loss_fn: a KL baseline over other prompts": loss.uses_kl_baseline,
        "algorithm.policy_loss_fn: a reward model": loss.scores_sequences,
        "algorithm.advantage_fn: a critic": algorithm.use_critic,
    }
    for what, is_asked in others.items():
        if is_asked:
            raise UserError(
                f"{what}. {config.algorithm.algorithm_type} cannot have it at the Tinker service, which tells "
                "logprobs alone; choose another, or trainer_type torch"
            )


class TinkerTrainEngine(TrainEngine):
    """Trains a LoRA adapter of `model.model_path`, which is there from the first step on.

    Args: timeout_s: for one answer of the service.
    Raises: UserError: the service refuses, or cannot do what the algorithm asks for.
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
            raise UserError(f"trainer.num_ranks: {ranks.size} ranks, and one asks the Tinker service; leave it out")
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
        # What an advantage function drops was dropped when the batch was formed, and is in the ledger.
        self._algorithm = algorithm.without_filtering()
        per_step = config.trainer.ppo_epochs * config.num_mini_batches
        self._optimizer = config.algorithm.optimizer
        self._rate = learning_rate(self._optimizer, None if total_steps is None else total_steps * per_step)
        self._kl_coefs = [algorithm.kl_loss_fn.kl_coef, algorithm.kl_penalty_fn.kl_coef]
        self._service = open_service(self._section.base_url, timeout_s=timeout_s)
        self._base_model = config.model.model_path
        self._trained: TrainingClient | None = None
        self._reference: SamplingClient | None = None
        if algorithm.use_reference:
            self._reference = open_sampler(self._service, base_model=self._base_model, timeout_s=timeout_s)
        self._step = 0
        # What this process has saved at the service, or began with, by the step.
        self._samplers: dict[int, str] = {}
        self._states: dict[int, str] = {}

    def _result(self, doing: str, answer: Answer[T]) -> T:
        return result_of(doing, answer, timeout_s=self._timeout_s)

    @property
    def _client(self) -> TrainingClient:
        # Made when it is first needed: who resumes makes it of what was saved.
        if self._trained is None:
            own = self._section
            made = self._service.create_lora_training_client(
                self._base_model,
                rank=own.rank,
                seed=self._config.seed if own.seed is None else own.seed,
                train_mlp=own.train_mlp,
                train_attn=own.train_attn,
                train_unembed=own.train_unembed,
            )
            self._trained = self._result(f"an adapter of {self._base_model} is made", made)
        return self._trained

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Score the batch, make its advantages, then its updates."""
        self._check(batch)
        algorithm, rows = self._algorithm, BatchRows(batch, _CPU)
        for number, kl in enumerate((algorithm.kl_loss_fn, algorithm.kl_penalty_fn)):
            self._kl_coefs[number] = kl.coef_at(step, self._kl_coefs[number])
        scores = self._scores(batch)
        metrics: dict[str, float] = {}
        advantages: Callable[[np.ndarray], Tensor] | None = None
        if algorithm.advantage_fn is not None:
            advantages, _, metrics = rows.advantages(algorithm, scores, step, self._kl_coefs[1])
        updates: list[dict[str, float]] = []
        unit = 2 if algorithm.schema == "dpo" else 1  # a pair is never parted
        for number, members in updates_of(batch, self._config, step, unit):
            weights_N = rows.row_weights(self._config, algorithm, members, step)
            told: dict[str, Tensor] = {}

            def loss_of(
                data: list[types.Datum],
                logprobs: list[Tensor],
                members: np.ndarray = members,
                weights_N: Tensor = weights_N,
                told: dict[str, Tensor] = told,
                is_first: bool = not updates,
            ) -> tuple[Tensor, dict[str, float]]:
                inputs = self._loss_inputs(batch, rows, members, logprobs, weights_N, scores, advantages)
                loss, more = algorithm.compute_loss(inputs)
                if not math.isfinite(value := float(loss.detach())):
                    raise RoleError(f"step {step}: the loss is {value}; look at the batch in the ledger")
                told.update(more)
                if algorithm.schema == "experience" and is_first:
                    told.update(mismatch(inputs))
                return loss, {}

            lr = self._rate(number)
            # Both are sent before either is waited for: the service works in beats, and one is enough for both.
            gradient = self._client.forward_backward_custom(self._data(batch, members), loss_of)
            moved = self._client.optim_step(self._adam(lr))
            self._result(f"step {step} is computed", gradient)
            self._result(f"step {step} is taken", moved)
            of_update = {name: float(value) for name, value in told.items()}
            finish_means(of_update)
            updates.append(of_update | {"lr": lr})
        metrics |= over_updates(updates)
        self._kl_coefs = next_kl_coefs(algorithm, self._kl_coefs, metrics, len(batch))
        self._step = step
        return metrics

    def evaluate(self, batches: Sequence[TrainingBatch]) -> dict[str, float]:
        """See TrainEngine."""
        totals: dict[str, float] = {}
        total = 0.0
        for batch in batches:
            self._check(batch)
            rows, members = BatchRows(batch, _CPU), np.arange(len(batch))
            weights_N = rows.row_weights(self._config, self._algorithm)
            logprobs, scores = self._policy_logprobs(batch), self._scores(batch)
            inputs = self._loss_inputs(batch, rows, members, logprobs, weights_N, scores, None)
            # So that the mean over all batches is that of one batch of all rows.
            share = (
                float(batch.num_trained.sum()) if self._algorithm.loss_agg_mode == "token-mean" else float(len(batch))
            )
            total += share
            for name, value in self._algorithm.compute_loss(inputs)[1].items():
                totals[name] = totals.get(name, 0.0) + share * float(value)
        return {name: value / total for name, value in totals.items() if name != "weight_sum"}

    def _check(self, batch: TrainingBatch) -> None:
        if batch.images is not None:
            raise UserError("rows with images are not trained at the Tinker service here; use trainer_type torch")
        hot = np.flatnonzero((batch.temperatures != 1) & ~batch.experts)
        if len(hot):
            raise DataError(
                f"{batch.uids[hot[0]]} was sampled at temperature {batch.temperatures[hot[0]]:g}, and the Tinker "
                "service trains logprobs of temperature 1 alone; sample at 1 (model.temperature, rollout_args)"
            )

    def _scores(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """[Q] of what the base model, and the policy before the update, say, as `BatchRows.advantages` takes it."""
        scores: dict[str, Tensor] = {}
        if self._reference is not None:
            starts = batch.prompt_lengths
            pairs = [
                (tokens[:start].tolist(), tokens[start:].tolist())
                for tokens, start in zip(batch.row_tokens(), starts, strict=True)
            ]
            told = response_logprobs(self._reference, pairs, timeout_s=self._timeout_s)
            scores["ref_logprobs_Q"] = torch.tensor([value for row in told for value in row])
        if keeps_proximal(self._config, self._algorithm):
            parts = zip(self._policy_logprobs(batch), batch.response_lengths, strict=True)
            scores["policy_logprobs_Q"] = torch.cat([row[-length:] for row, length in parts])
        return scores

    def _policy_logprobs(self, batch: TrainingBatch) -> list[Tensor]:
        """Of each row those of all tokens but the first."""
        asked = self._client.forward(self._data(batch, np.arange(len(batch))), "cross_entropy")
        output = self._result("a batch is scored", asked)
        return [torch.tensor(row["logprobs"].data, dtype=torch.float32) for row in output.loss_fn_outputs]

    @staticmethod
    def _data(batch: TrainingBatch, members: np.ndarray) -> list[types.Datum]:
        from tinker import types  # late: an optional package

        tokens = batch.row_tokens()
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[i][:-1].tolist()),
                # The weights are of the service's own loss, which nobody asks for.
                loss_fn_inputs={
                    "target_tokens": tokens[i][1:].astype(np.int64),
                    "weights": np.zeros(len(tokens[i]) - 1, np.float32),
                },
            )
            for i in members
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
        rows: BatchRows,
        members: np.ndarray,
        logprobs: Sequence[Tensor],
        weights_N: Tensor,
        scores: Mapping[str, Tensor],
        advantages: Callable[[np.ndarray], Tensor] | None,
    ) -> LossInputs:
        """logprobs: of each of these rows, of all tokens but the first."""
        lengths = batch.response_lengths[members]
        policy_BT = pad_sequence([row[-n:] for row, n in zip(logprobs, lengths, strict=True)], batch_first=True)
        return rows.loss_inputs(
            self._config,
            self._algorithm,
            members,
            policy_BT,
            weights_N,
            scores,
            advantages,
            kl_coef=self._kl_coefs[0],
        )

    def weights(self) -> Mapping[str, Data]:
        """See TrainEngine: the path of what engines sample with."""
        if self._step not in self._samplers:
            saved = self._client.save_weights_for_sampler(f"step-{self._step}")
            self._samplers[self._step] = self._result(f"version {self._step} is saved", saved).path
        return sampler_file(self._samplers[self._step])

    def state_files(self) -> Mapping[str, Data]:
        """See TrainEngine: the path of adapter and optimizer, and that of `weights`, for who evaluates a checkpoint."""
        files = {f"{CHECKPOINT_ADAPTER_FOLDER}/{name}": data for name, data in self.weights().items()}
        if self._step not in self._states:
            saved = self._client.save_state(f"step-{self._step}", overwrite=True)
            self._states[self._step] = self._result(f"checkpoint {self._step} is saved", saved).path
        state = {"step": self._step, "path": self._states[self._step], "kl_coefs": self._kl_coefs}
        return {**files, STATE_FILE: json.dumps(state).encode()}

    def load_state_files(self, files: Mapping[str, Data]) -> None:
        """See TrainEngine. A new adapter at the service begins with what was saved, its optimizer included."""
        state = json.loads(bytes(files[STATE_FILE]))
        path = state["path"]
        made = self._service.create_training_client_from_state_with_optimizer(path)
        self._trained = self._result(f"training goes on from {path}", made)
        self._step, self._kl_coefs = int(state["step"]), list(state["kl_coefs"])
        # They are this process's now, and go when newer ones are there.
        self._states[self._step] = path
        self._samplers[self._step] = sampler_path(bytes(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{SAMPLER_FILE}"]))

    def export_files(self) -> Mapping[str, bytes]:
        """Nothing: the model is at the service, and `tinker checkpoint download` brings its adapter."""
        return {}

    def keep_only(self, versions: Collection[int], checkpoints: Collection[int]) -> None:
        """See TrainEngine: what this process has saved at the service is deleted there."""
        newest = max(versions, default=0), max(checkpoints, default=0)
        # What is not written yet is not named either; it is newer than all that is there.
        states = [step for step in self._states if step not in checkpoints and step < newest[1]]
        samplers = [
            step
            for step in self._samplers
            if step not in (*versions, *checkpoints) and step < newest[step in self._states]
        ]
        gone = [self._samplers.pop(step) for step in samplers] + [self._states.pop(step) for step in states]
        for path in gone:
            timeout_s = min(self._timeout_s, _DELETE_TIMEOUT_S)
            try:
                ask(f"{path} is deleted", partial(self._delete, path), timeout_s=timeout_s)
            except RftError as error:  # it costs storage there, and nothing here
                log.warning("%s stays at the service: %s", path, error)

    def _delete(self, path: str) -> None:
        from tinker import RestClient  # late, as above

        rest = RestClient(base_url=self._section.base_url, api_key=require_key())
        rest.delete_checkpoint_from_tinker_path(path).result()
