"""Runner: a batch of tasks in, experiences out. Runs the workflows, bounds them in time, and retries them.

Invariant: every (task, rollout) gives at least one experience, whatever its workflow does: one per call of the policy
if it ended well, else one that says why not, without tokens and without a reward. A failure of the engine is nobody's
rollout's: it ends the batch, which somebody else then runs again. This module knows neither engines nor storage.
"""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rftdask.buffer.experience import Experience, Status
from rftdask.buffer.task import Task
from rftdask.explorer.batcher import Batcher, GenerateBatch, RolloutKey
from rftdask.explorer.engines.base import SamplingParams
from rftdask.explorer.model import Call, PromptLimits, PromptTooLongError, RecordingModel, Tokenizer, rollout_seed
from rftdask.explorer.rewards.registry import get_reward
from rftdask.explorer.workflows.base import Reward, Step, WorkflowFn
from rftdask.explorer.workflows.registry import get_workflow

_MAX_ERROR_LENGTH = 500


@dataclass(frozen=True)
class RolloutDefaults:
    """How rollouts are run, unless the taskset says otherwise."""

    sampling: SamplingParams
    limits: PromptLimits = field(default_factory=PromptLimits)
    taskset_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of SamplingParams by name of taskset (its `rollout_args`)."""
    max_timeout_s: float = 1800.0
    """For one attempt, the wait for the engine included."""
    max_retry_times: int = 2
    """Attempts after the first."""
    stop_grace_s: float = 1.0
    """For a cancelled attempt to clean up; one that ignores its cancellation is left behind, without a model."""
    run_seed: int = 42

    def sampling_of(self, task: Task) -> SamplingParams:
        return replace(self.sampling, **self.taskset_sampling.get(task.taskset, {}))


@dataclass(frozen=True)
class ServedWeights:
    """Identity of the weights an engine serves."""

    version: int
    hash: str


async def run_rollout_batch(
    tasks: Sequence[Task],
    *,
    repeat_times: int,
    explore_step: int,
    generate_batch: GenerateBatch,
    tokenizer: Tokenizer,
    defaults: RolloutDefaults,
    weights: ServedWeights,
    max_wait_s: float = 0.02,
    greedy_baseline: bool = False,
    on_group: Callable[[int, list[Experience]], None] = lambda number, experiences: None,
) -> list[Experience]:
    """`repeat_times` rollouts of each task, side by side; with `greedy_baseline` one more, the last, at temperature 0.

    on_group: told the number of a task and its experiences as soon as all its rollouts have ended; must not block.
    Returns: experiences ordered by (task, rollout, turn).
    Raises: UserError: a task names a workflow or a reward function that does not exist. What `generate_batch` raises.
    """
    workflows = {name: get_workflow(name) for name in sorted({task.workflow for task in tasks})}
    for name in sorted({task.reward_fn for task in tasks} - {""}):
        get_reward(name)
    batcher = Batcher(generate_batch, max_wait_s)
    rollouts = [
        _Rollout(
            task=task,
            key=RolloutKey(number, rollout),
            explore_step=explore_step,
            workflow=workflows[task.workflow],
            batcher=batcher,
            tokenizer=tokenizer,
            defaults=defaults,
            weights=weights,
            greedy=rollout == repeat_times,
        )
        for number, task in enumerate(tasks)
        for rollout in range(repeat_times + greedy_baseline)
    ]
    for rollout in rollouts:
        batcher.enter(rollout.key)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(rollout.run()) for rollout in rollouts]
            size = repeat_times + greedy_baseline
            for number in range(len(tasks)):
                group.create_task(_report(number, running[number * size : (number + 1) * size], on_group))
    except ExceptionGroup:
        if batcher.failure is None:
            raise
    finally:
        await batcher.close()
    if batcher.failure is not None:
        # Not in the handler: an error whose context is the group that holds it cannot be pickled for the way home.
        raise batcher.failure
    return [experience for ended in running for experience in ended.result()]


async def _report(
    number: int,
    rollouts: Sequence[asyncio.Task[list[Experience]]],
    on_group: Callable[[int, list[Experience]], None],
) -> None:
    on_group(number, [experience for ended in await asyncio.gather(*rollouts) for experience in ended])


@dataclass(frozen=True)
class _Rollout:
    task: Task
    key: RolloutKey
    explore_step: int
    workflow: WorkflowFn
    batcher: Batcher
    tokenizer: Tokenizer
    defaults: RolloutDefaults
    weights: ServedWeights
    greedy: bool = False

    @property
    def sampling(self) -> SamplingParams:
        sampling = self.defaults.sampling_of(self.task)
        return replace(sampling, temperature=0.0) if self.greedy else sampling

    async def run(self) -> list[Experience]:
        try:
            return await self._attempts()
        finally:
            self.batcher.leave(self.key)

    async def _attempts(self) -> list[Experience]:
        for attempt in range(self.defaults.max_retry_times + 1):
            model = self._new_model()
            try:
                reward = await _run_attempt(self.workflow, self.task, model, self.defaults)
                self._check(reward, model)
            except Exception as error:  # a workflow may raise anything; all of it becomes a typed, counted result
                if self.batcher.failure is not None:
                    raise self.batcher.failure from None
                final = isinstance(error, (PromptTooLongError, _WillNotStopError))
                if final or attempt == self.defaults.max_retry_times:
                    return [self._failure(error, attempt)]
            else:
                if self.batcher.failure is not None:  # the workflow swallowed it
                    raise self.batcher.failure
                return [self._success(call, turn, attempt, reward) for turn, call in enumerate(model.calls)]
        raise AssertionError("unreachable: the last attempt returns")

    def _new_model(self) -> RecordingModel:
        return RecordingModel(
            self.batcher,
            self.tokenizer,
            key=self.key,
            group_id=self.task.group_id,
            run_seed=self.defaults.run_seed,
            sampling=self.sampling,
            limits=self.defaults.limits,
        )

    def _check(self, reward: Reward, model: RecordingModel) -> None:
        where = f"workflow {self.task.workflow}, task {self.task.group_id}"
        value = reward.value
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"reward is {value!r:.100}, not a finite number ({where})")
        for name, metric in reward.metrics.items():
            if not isinstance(metric, numbers.Real):
                raise ValueError(f"metric {name} is {metric!r:.100}, not a number ({where})")
        if not model.calls:
            raise ValueError(f"the policy was never called, so there is nothing to train ({where})")
        if reward.steps and len(reward.steps) != len(model.calls):
            raise ValueError(f"{len(reward.steps)} steps told for {len(model.calls)} calls of the policy ({where})")
        for turn, step in enumerate(reward.steps):
            _check_step(step, turn, where)

    def _success(self, call: Call, turn: int, attempt: int, reward: Reward) -> Experience:
        generation = call.generation
        step = reward.steps[turn] if reward.steps else Step()
        return replace(
            self._blank(turn, attempt, call.request.sampling, call.request.seed),
            status=Status.TRUNCATED if generation.finish_reason == "length" else Status.OK,
            # Arrays, made here, one by one while others are sampled: the commit then only joins them.
            tokens=np.array((*call.request.prompt_tokens, *generation.tokens), np.int32),
            prompt_length=len(call.request.prompt_tokens),
            rollout_logprobs=np.array(generation.logprobs, np.float32),
            reward=float(reward.value),
            min_policy_version=generation.min_policy_version,
            max_policy_version=generation.max_policy_version,
            # Of other weights than those named when the batch began, the hash is not known here.
            weights_hash=self.weights.hash if generation.max_policy_version == self.weights.version else "",
            prompt_text=call.prompt_text,
            response_text=call.response.text,
            env_state=step.state,
            turn_reward=None if step.reward is None else float(step.reward),
            metrics={
                **{name: float(value) for name, value in reward.metrics.items()},
                "num_prompt_tokens": float(len(call.request.prompt_tokens)),
                "num_response_tokens": float(len(generation.tokens)),
                "prompt_truncated": float(call.prompt_truncated),
            },
        )

    def _failure(self, error: Exception, attempt: int) -> Experience:
        sampling = self.sampling
        seed = rollout_seed(self.defaults.run_seed, self.task.group_id, self.key.rollout, 0)
        return replace(
            self._blank(0, attempt, sampling, seed),
            status=Status.TIMEOUT if isinstance(error, _AttemptTimeout) else Status.FAILED,
            error=_one_line(error),
            prompt_text=self.task.prompt,
        )

    def _blank(self, turn: int, attempt: int, sampling: SamplingParams, seed: int) -> Experience:
        return Experience(
            taskset=self.task.taskset,
            epoch=self.task.epoch,
            task_index=self.task.index,
            rollout=self.key.rollout,
            explore_step=self.explore_step,
            turn=turn,
            attempt=attempt,
            status=Status.FAILED,
            min_policy_version=self.weights.version,
            max_policy_version=self.weights.version,
            weights_hash=self.weights.hash,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            truth=self.task.truth,
        )


def _check_step(step: Step, turn: int, where: str) -> None:
    if step.state is not None and not isinstance(step.state, str):
        raise ValueError(f"state of step {turn} is {step.state!r:.100}, not a text ({where})")
    value = step.reward
    if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
        raise ValueError(f"reward of step {turn} is {value!r:.100}, not a finite number ({where})")


class _AttemptTimeout(Exception):
    """The attempt's deadline passed, and the attempt has stopped."""


class _WillNotStopError(_AttemptTimeout):
    """The attempt's deadline passed, and it ignored its cancellation: a retry would run beside it."""


async def _run_attempt(workflow: WorkflowFn, task: Task, model: RecordingModel, limits: RolloutDefaults) -> Reward:
    """The workflow's reward. Raises: what the workflow raises; _AttemptTimeout after `max_timeout_s` seconds."""
    attempt = asyncio.create_task(_guarded(workflow, task, model))
    try:
        await asyncio.wait({attempt}, timeout=limits.max_timeout_s)
        if attempt.cancelled():
            raise RuntimeError("the workflow cancelled itself")
        if attempt.done():
            reward = attempt.result()
            return reward if isinstance(reward, Reward) else Reward(reward)
    finally:
        model.close()
        stopped = await _stop(attempt, limits.stop_grace_s)
    message = (
        f"not finished after max_timeout {limits.max_timeout_s:g} s (workflow {task.workflow}, task {task.group_id})"
    )
    raise _AttemptTimeout(message) if stopped else _WillNotStopError(f"{message}, and it ignored its cancellation")


async def _guarded(workflow: WorkflowFn, task: Task, model: RecordingModel) -> float | Reward:
    try:
        return await workflow(task, model)
    except SystemExit as error:  # would end the event loop, and with it every other rollout
        raise RuntimeError(f"the workflow called sys.exit({error.code!r})") from error


async def _stop(attempt: asyncio.Task[Any], grace_s: float) -> bool:
    """Cancel the attempt and wait for its end; False if it has not ended after `grace_s` seconds."""
    if not attempt.done():
        attempt.cancel()
        await asyncio.wait({attempt}, timeout=grace_s)
    if attempt.done() and not attempt.cancelled():
        attempt.exception()  # marks an error on the way out as seen; the deadline is what counts
    return attempt.done()


def _one_line(error: Exception) -> str:
    name = "TimeoutError" if isinstance(error, _AttemptTimeout) else type(error).__name__
    return " ".join(f"{name}: {error}".split())[:_MAX_ERROR_LENGTH]
