"""One rollout of a task: attempts that are bounded in time and retried, and the experiences they yield.

Invariant: a rollout yields at least one experience, whatever its workflow does: one for each sequence of calls of the
policy, or one that contains the error, without tokens and reward. Failures of the engine are raised instead. This
module does not know engines, processes or storage.
"""

from __future__ import annotations

import asyncio
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rftdask.buffer.log.schema import Experience, Status, Turn
from rftdask.config.schema.explorer import ExplorerConfig
from rftdask.data.seeds import derived_seed
from rftdask.data.task import Task
from rftdask.engines.base import SamplingParams
from rftdask.errors import DataError
from rftdask.rollouts.loop_watchdog import BlockedLoopTimeout
from rftdask.rollouts.policy.recording import Call, RecordingModel
from rftdask.rollouts.policy.request_queues import RolloutKey
from rftdask.rollouts.sandbox.pool import SandboxError, SandboxLostError
from rftdask.rollouts.workflows.base import GroupReward, PromptTooLongError, Reward, Step, WorkflowFn, as_reward
from rftdask.storage.safe_text import encodable, mask
from rftdask.synchronizer.published import Published

STOP_GRACE_S = 1.0
"""Seconds that a cancelled attempt has to clean up. One that ignores its cancellation is abandoned, without a model."""
_MAX_ERROR_LENGTH = 500
_MAX_BLOCK_S = 30.0
_LARGEST = float(np.finfo(np.float32).max)


def max_block_s(explorer: ExplorerConfig) -> float:
    """Seconds that code on the event loop may run between two awaits, while all other rollouts wait."""
    return min(_MAX_BLOCK_S, explorer.max_timeout / 2)


@dataclass
class RolloutTimes:
    """Seconds that one rollout took over all its attempts. Not part of an experience, whose bits must repeat."""

    queue_s: float = 0.0
    """Wait for a slot."""
    generate_s: float = 0.0
    """Calls of models, including the wait for the engine; the sum of concurrent calls."""
    tool_s: float = 0.0
    """Time that the workflow counted as "tool"."""
    reward_s: float = 0.0
    """Time that the workflow counted as "reward"."""
    total_s: float = 0.0
    """Time from its first attempt to its end."""
    num_retries: int = 0


class _AttemptTimeout(Exception):
    """The attempt's deadline passed, and the attempt has stopped."""


class _WillNotStopError(_AttemptTimeout):
    """The attempt's deadline passed, and it ignored its cancellation: a retry would run concurrently with it."""


class _CancelledEarly(Exception):
    """Enough other tasks are done."""


@dataclass
class Rollout:
    task: Task
    key: RolloutKey
    explore_step: int
    workflow: WorkflowFn
    engine_failure: Callable[[], Exception | None]
    """Returns the error because of which the engine will not answer, which is raised whatever the workflow does. None:
    the engine works."""
    new_model: Callable[[Rollout], RecordingModel]
    explorer: ExplorerConfig
    """Its max_timeout bounds an attempt, including the wait for the engine."""
    sampling: SamplingParams
    """Sampling parameters of the policy; the workflow may override them."""
    weights: Published
    """Weights that the engine serves."""
    times: RolloutTimes = field(default_factory=RolloutTimes)
    cancel_reason: str = ""
    """Set before a cancellation that ends the rollout with a result. "": a cancellation is raised."""

    async def run(self, admitted: asyncio.Event) -> list[Experience]:
        """Run the rollout once `admitted` is set. Returns: its experiences, ordered by their first calls.

        Raises: RoleError: the engine, or the process that starts sandboxes, is gone.
        """
        began = time.perf_counter()
        try:
            await admitted.wait()
            # Outside of the attempt's time: the workflow cannot shorten the wait for a slot.
            self.times.queue_s = time.perf_counter() - began
            while (experiences := await self._attempt(self.times.num_retries)) is None:
                self.times.num_retries += 1
            return experiences
        except asyncio.CancelledError:
            if not self.cancel_reason:
                raise
            return [self._failure(_CancelledEarly(self.cancel_reason), self.times.num_retries, {})]
        finally:
            self.times.total_s = time.perf_counter() - began - self.times.queue_s

    async def _attempt(self, attempt: int) -> list[Experience] | None:
        """Run one attempt. Returns: its experiences, or one with its error if it was the last. None: try again."""
        if self.task.problem:  # another attempt would not change the row
            return [self._failure(DataError(self.task.problem), attempt, {})]
        # Each attempt has its own model, which records only the calls of this attempt and is closed at its end.
        model = self.new_model(self)
        try:
            reward = await self._call_workflow(model)
            self._check(reward, model)
        except Exception as error:  # a workflow may raise anything; all of it becomes a typed, counted result
            # The engine first: its failure is not the rollout's, whatever the workflow raised because of it.
            if (failure := self.engine_failure()) is not None:
                raise failure from None
            # Without the process that starts sandboxes, no attempt of any rollout can end well.
            if isinstance(error, SandboxLostError):
                raise
            # A prompt stays too long, and an attempt that will not stop would run concurrently with its retry.
            is_final = isinstance(error, (PromptTooLongError, _WillNotStopError))
            if is_final or attempt == self.explorer.max_retry_times:
                return [self._failure(error, attempt, model.state)]
            return None
        else:
            if (failure := self.engine_failure()) is not None:  # the workflow swallowed it
                raise failure
            return [self._success(calls, n, attempt, reward) for n, calls in enumerate(model.sequences)]
        finally:
            self.times.generate_s += model.times.get("generate", 0.0)
            self.times.tool_s += model.times.get("tool", 0.0)
            self.times.reward_s += model.times.get("reward", 0.0)

    async def _call_workflow(self, model: RecordingModel) -> Reward:
        """Run the workflow. Raises: its error; _AttemptTimeout: it took more than `max_timeout` seconds."""
        timeout_s = self.explorer.max_timeout
        attempt = asyncio.create_task(self._contained(model))
        deadline = time.monotonic() + timeout_s
        try:
            # Not wait_for, which would wait forever for an attempt that ignores its cancellation.
            await asyncio.wait({attempt}, timeout=timeout_s)
            if not attempt.done() and (late_s := time.monotonic() - deadline) > 0:
                # Another rollout blocked the event loop past the deadline: this one gets that time back.
                await asyncio.wait({attempt}, timeout=min(late_s, timeout_s))
            # A rollout that is cancelled from outside leaves by the wait above.
            if attempt.cancelled():
                raise RuntimeError("the workflow cancelled itself")
            if attempt.done():
                return as_reward(attempt.result())
        finally:
            model.close()  # an attempt that will not stop must not go on next to its retry
            if not attempt.done():
                attempt.cancel()
                # Time for its `finally` blocks: an environment closes its connection, a tool removes its files.
                await asyncio.wait({attempt}, timeout=STOP_GRACE_S)
            if attempt.done() and not attempt.cancelled():
                attempt.exception()  # mark the error as retrieved; the deadline takes precedence
        message = f"not finished after max_timeout {timeout_s:g} s {self._where}"
        if not attempt.done():
            raise _WillNotStopError(f"{message}, and it ignored its cancellation")
        raise _AttemptTimeout(message)

    async def _contained(self, model: RecordingModel) -> Any:
        # Turn exceptions that would end more than this attempt into errors of it.
        try:
            return await self.workflow(self.task, model)
        except SystemExit as error:  # would end the event loop, and with it every other rollout
            raise RuntimeError(f"the workflow called sys.exit({error.code!r})") from error
        except BlockedLoopTimeout:
            blocked = f"blocked the event loop for {max_block_s(self.explorer):g} s {self._where}"
            raise _AttemptTimeout(f"{blocked}; it is declared in_process and must not block") from None

    @property
    def _where(self) -> str:
        return f"(workflow {self.task.workflow}, task {self.task.group_id})"

    def rewarded(self, model: RecordingModel, reward: Reward) -> list[Experience]:
        """Experiences of the calls that `model` recorded. Raises: TypeError, ValueError: they cannot be trained."""
        self._check(reward, model)
        return [self._success(calls, n, 0, reward) for n, calls in enumerate(model.sequences)]

    async def reward_group(
        self, group_reward: GroupReward, ended: Mapping[RolloutKey, list[Experience]]
    ) -> dict[RolloutKey, list[Experience]]:
        """Rows of the task's trainable rollouts with the rewards of the group; failed rows if the rewards cannot be
        computed. Raises: RoleError: the engine is gone.
        """
        good = {key: rows for key, rows in sorted(ended.items()) if rows and all(row.status.trainable for row in rows)}
        if not good:
            return {}
        model = self.new_model(self)
        try:
            texts = [rows[-1].response_text for rows in good.values()]
            rewards = list(await asyncio.wait_for(group_reward(self.task, texts, model), self.explorer.max_timeout))
            if len(rewards) != len(texts) or model.calls:
                raise ValueError(f"it must return one reward for each of {len(texts)} rollouts and not call the policy")
            for reward in rewards:
                self._check_reward(reward)
        except Exception as error:  # a judge may raise anything; all of it becomes a typed, counted result
            if (failure := self.engine_failure()) is not None:
                raise failure from None
            text = mask(" ".join(f"reward of the group: {type(error).__name__}: {error}".split()))[:_MAX_ERROR_LENGTH]
            failed: dict[str, Any] = {"status": Status.FAILED, "reward": None, "error": text}
            return {key: [replace(row, **failed) for row in rows] for key, rows in good.items()}
        finally:
            model.close()
            self.times.reward_s += model.times.get("reward", 0.0)
        for rows, reward in zip(good.values(), rewards, strict=True):
            value, metrics = float(reward.value), _floats(reward.metrics)
            rows[:] = [replace(row, reward=value, metrics={**row.metrics, **metrics}) for row in rows]
        return good

    def _check(self, reward: Reward, model: RecordingModel) -> None:
        """Raises: TypeError, ValueError: the workflow's result cannot be trained on; names workflow and task."""
        self._check_reward(reward)
        if not model.calls:
            raise ValueError(f"the policy was never called, so there is nothing to train {self._where}")
        # Steps and calls are matched by position only.
        if reward.steps and len(reward.steps) != len(model.calls):
            counts = f"{len(reward.steps)} steps returned for {len(model.calls)} calls"
            raise ValueError(f"{counts} of the policy {self._where}")
        for turn, step in enumerate(reward.steps):
            if step.state is not None and not isinstance(step.state, str):
                raise ValueError(f"state of step {turn} is {step.state!r:.100}, not a string {self._where}")
            if step.reward is not None:
                self._check_storable(f"reward of step {turn}", step.reward)

    def _check_storable(self, name: str, value: object) -> None:
        """Raises: ValueError: the log's float32 cannot hold the value: 1e39 would be stored as infinity."""
        with suppress(OverflowError):  # an integer of hundreds of digits
            if isinstance(value, numbers.Real) and abs(float(value)) <= _LARGEST:
                return
        raise ValueError(f"{name} is {value!r:.100}, not a finite number in float32 {self._where}")

    def _check_reward(self, reward: Reward) -> None:
        """Raises: TypeError, ValueError: the log or the loss cannot take the reward or a metric."""
        if not isinstance(reward.value, numbers.Real):
            raise TypeError(f"reward is {reward.value!r:.100}, not a number {self._where}")
        self._check_storable("reward", reward.value)
        for name, metric in reward.metrics.items():
            if not isinstance(name, str) or encodable(name) != name:
                raise ValueError(f"the name of a metric is {name!r:.100}, not a text in UTF-8 {self._where}")
            if not isinstance(metric, numbers.Real):
                raise ValueError(f"metric {name} is {metric!r:.100}, not a number {self._where}")
            try:
                float(metric)
            except OverflowError:
                raise ValueError(f"metric {name} is {metric!r:.60}, which float64 cannot hold {self._where}") from None

    def _success(self, calls: Sequence[tuple[int, Call]], ordinal: int, attempt: int, reward: Reward) -> Experience:
        # calls: (number among all calls of the rollout, call) of one sequence, which becomes a row.
        number_of_first, first = calls[0]
        last = calls[-1][1]
        prompt_length = len(first.request.prompt_tokens)
        # Build arrays here, while other rollouts are sampled, so that the commit only has to join them.
        tokens = np.array((*last.request.prompt_tokens, *last.generation.tokens), np.int32)
        logprobs = np.zeros(len(tokens) - prompt_length, np.float32)
        mask = np.zeros(len(logprobs), bool)
        text, turns, experts, versions = "", list[Turn](), list[bytes](), list[tuple[int, int]]()
        for number, call in calls:
            generation = call.generation
            start = len(call.request.prompt_tokens) - prompt_length
            end = start + len(generation.tokens)
            logprobs[start:end], mask[start:end] = generation.logprobs, True
            mask[start + call.forced.start : start + call.forced.stop] = False
            versions += [(start + token, version) for token, version in generation.versions]
            # Each call repeats the experts of its prompt; keep those of the call that sampled the tokens.
            experts += generation.routed_experts[len(experts) :]
            text_start = len(text) + len(call.added_text)
            text += call.added_text + call.response.text
            step = reward.steps[number] if reward.steps else Step()
            turns.append(
                Turn(
                    *(number, start, end, text_start, len(text), call.source, call.request.seed),
                    # Per request, because weights may change while a request runs.
                    generation.min_policy_version,
                    generation.max_policy_version,
                    step.state,
                    None if step.reward is None else float(step.reward),
                )
            )
        oldest, newest = min(turn.min_policy_version for turn in turns), max(turn.max_policy_version for turn in turns)
        version_starts = None
        if oldest != newest and all(call.generation.versions for _, call in calls):
            changes = (after for before, after in pairwise(versions) if after[1] != before[1])
            version_starts = (versions[0], *changes)
        num_sampled = sum(call.num_response_tokens for _, call in calls)
        truncated = any(call.generation.finish_reason == "length" for _, call in calls)
        is_turn = len(calls) == 1 and number_of_first == ordinal
        return self._row(
            *(ordinal, attempt, first.request.sampling, first.request.seed),
            status=Status.TRUNCATED if truncated else Status.OK,
            tokens=tokens,
            prompt_length=prompt_length,
            rollout_logprobs=logprobs,
            loss_mask=None if mask.all() else mask,
            reward=float(reward.value),
            min_policy_version=oldest,
            max_policy_version=newest,
            # Only the hash of the weights at the start of the unit is known here.
            weights_hash=self.weights.content_hash if newest == self.weights.version else "",
            prompt_text=first.prompt_text,
            response_text=text,
            env_state=turns[0].env_state if is_turn else None,
            turn_reward=turns[0].turn_reward if is_turn else None,
            turns=None if is_turn else tuple(turns),
            routed_experts=np.frombuffer(b"".join(experts), np.int16).reshape(len(experts), -1) if experts else None,
            images=last.request.images or None,
            version_starts=version_starts,
            metrics={
                **_floats(reward.metrics),
                "num_prompt_tokens": float(last.num_prompt_tokens + last.num_response_tokens - num_sampled),
                "num_response_tokens": float(num_sampled),
                "prompt_truncated": float(any(call.prompt_truncated for _, call in calls)),
                **({} if first.branch is None else {f"branches/{first.branch}": 1.0}),
            },
        )

    def _failure(self, error: Exception, attempt: int, state: Mapping[str, Any]) -> Experience:
        if isinstance(error, (SandboxError, _CancelledEarly)):
            text = str(error)  # it contains the name of the original error
        else:
            text = f"{'TimeoutError' if isinstance(error, _AttemptTimeout) else type(error).__name__}: {error}"
        where = "".join(f" {name}={value!r:.40}" for name, value in state.items())
        seed = derived_seed(self.explorer.rollout_model.seed, self.task.group_id, self.key.rollout, 0)
        return self._row(
            *(0, attempt, self.sampling, seed),
            status=Status.TIMEOUT if isinstance(error, (_AttemptTimeout, _CancelledEarly)) else Status.FAILED,
            # Masked, because it is stored, and errors of HTTP clients contain URLs.
            error=mask(" ".join(f"{text}{f' [state:{where}]' if where else ''}".split()))[:_MAX_ERROR_LENGTH],
            prompt_text=self.task.prompt,
            min_policy_version=self.weights.version,
            max_policy_version=self.weights.version,
            weights_hash=self.weights.content_hash,
        )

    def _row(self, turn: int, attempt: int, sampling: SamplingParams, seed: int, **fields: Any) -> Experience:
        return Experience(
            taskset=self.task.taskset,
            epoch=self.task.epoch,
            task_index=self.task.index,
            rollout=self.key.rollout,
            explore_step=self.explore_step,
            turn=turn,
            attempt=attempt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            truth=self.task.truth,
            **fields,
        )


def _floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
