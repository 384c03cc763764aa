"""Rollout: one rollout of a task, whose attempts are bounded in time and retried, and give experiences.

Invariant: a rollout gives at least one experience, whatever its workflow does: one per sequence of calls of the policy
if it ended well, else one that says why not, without tokens and without a reward. A failure of the engine is nobody's
rollout's: it rises. This module knows neither engines nor processes nor storage.
"""

from __future__ import annotations

import asyncio
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rftdask.buffer.log.schema import Experience, Status, Turn
from rftdask.config.schema.explorer import ExplorerConfig
from rftdask.data.task import Task
from rftdask.engines.base import SamplingParams
from rftdask.rollouts.loop_watchdog import BlockedLoopTimeout
from rftdask.rollouts.policy.lockstep_queue import RolloutKey
from rftdask.rollouts.policy.recording import Call, RecordingModel, rollout_seed
from rftdask.rollouts.sandbox.pool import SandboxError, SandboxLostError
from rftdask.rollouts.workflows.base import GroupReward, PromptTooLongError, Reward, Step, WorkflowFn, as_reward
from rftdask.storage.safe_text import mask
from rftdask.synchronizer.published import Published

STOP_GRACE_S = 1.0
"""Time that a cancelled attempt has to clean up; one that ignores its cancellation is left behind, without a model."""
_MAX_ERROR_LENGTH = 500
_MAX_BLOCK_S = 30.0
_LARGEST = float(np.finfo(np.float32).max)


def max_block_s(explorer: ExplorerConfig) -> float:
    """Seconds that code on the event loop may take between two awaits; the others wait meanwhile."""
    return min(_MAX_BLOCK_S, explorer.max_timeout / 2)


@dataclass
class RolloutTimes:
    """Seconds that one rollout took, by what it did, over all its attempts. Not part of an experience: the same
    rollout is the same row, however long it took."""

    queue_s: float = 0.0
    """Wait for a place."""
    generate_s: float = 0.0
    """Calls of models, the wait for the engine included; of several at once the sum."""
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
    """The attempt's deadline passed, and it ignored its cancellation: a retry would run beside it."""


class _CalledOff(Exception):
    """Enough other tasks are done."""


@dataclass
class Rollout:
    """One rollout; `run` is called once.

    engine_failure: why no engine will answer any more, which is then raised here, whatever the workflow makes of it.
    """

    task: Task
    key: RolloutKey
    explore_step: int
    workflow: WorkflowFn
    engine_failure: Callable[[], Exception | None]
    new_model: Callable[[Rollout], RecordingModel]
    explorer: ExplorerConfig
    """Its max_timeout bounds an attempt, the wait for the engine included."""
    sampling: SamplingParams
    """How the policy samples, unless the workflow says otherwise."""
    weights: Published
    """Those that the engine serves."""
    times: RolloutTimes = field(default_factory=RolloutTimes)
    called_off: str = ""
    """Reason why it is cancelled; "": it is not. Set before the cancellation, which is then a result like others."""

    async def run(self, admitted: asyncio.Event) -> list[Experience]:
        """Run the rollout once `admitted` is set. Returns: its experiences, ordered by their first calls. Raises:
        RoleError: the engine, or what starts sandboxes, is gone.
        """
        began = time.perf_counter()
        try:
            await admitted.wait()
            # Not counted in the attempt's time: the wait for a place is not the workflow's.
            self.times.queue_s = time.perf_counter() - began
            return await self._attempts()
        except asyncio.CancelledError:
            if not self.called_off:
                raise
            return [self._failure(_CalledOff(self.called_off), self.times.num_retries, {})]
        finally:
            self.times.total_s = time.perf_counter() - began - self.times.queue_s

    async def _attempts(self) -> list[Experience]:
        # Attempt it until an attempt ends well, cannot be repeated, or was the last.
        for attempt in range(self.explorer.max_retry_times + 1):
            self.times.num_retries = attempt
            # A new model for each attempt: its calls are those of this attempt alone, and the old one answers no more.
            model = self.new_model(self)
            try:
                reward = await self._attempt(model)
                self._check(reward, model)
            except Exception as error:  # a workflow may raise anything; all of it becomes a typed, counted result
                # The engine first: what it broke is not the rollout's failure, however the workflow dressed it up.
                if (failure := self.engine_failure()) is not None:
                    raise failure from None
                # What starts sandboxes is gone: no attempt of any rollout could end well here.
                if isinstance(error, SandboxLostError):
                    raise
                # A prompt stays too long, and an attempt that will not stop would run beside its retry.
                final = isinstance(error, (PromptTooLongError, _WillNotStopError))
                if final or attempt == self.explorer.max_retry_times:
                    return [self._failure(error, attempt, model.state)]
            else:
                if (failure := self.engine_failure()) is not None:  # the workflow swallowed it
                    raise failure
                return [self._success(calls, n, attempt, reward) for n, calls in enumerate(model.sequences)]
            finally:
                # Of failed attempts, too: they have kept the engine busy.
                self.times.generate_s += model.times.get("generate", 0.0)
                self.times.tool_s += model.times.get("tool", 0.0)
                self.times.reward_s += model.times.get("reward", 0.0)
        raise AssertionError("unreachable: the last attempt returns")

    async def _attempt(self, model: RecordingModel) -> Reward:
        """Run one attempt. Raises: what the workflow raises; _AttemptTimeout after `max_timeout` seconds."""
        where = f"(workflow {self.task.workflow}, task {self.task.group_id})"
        timeout_s = self.explorer.max_timeout

        async def guarded() -> Any:
            # What would end more than this attempt becomes an error of it.
            try:
                return await self.workflow(self.task, model)
            except SystemExit as error:  # would end the event loop, and with it every other rollout
                raise RuntimeError(f"the workflow called sys.exit({error.code!r})") from error
            except BlockedLoopTimeout:
                raise _AttemptTimeout(
                    f"blocked the event loop for {max_block_s(self.explorer):g} s {where}; "
                    "it is declared in_process and must not block"
                ) from None

        attempt = asyncio.create_task(guarded())
        deadline = time.monotonic() + timeout_s
        try:
            # Not wait_for, which would wait without end for an attempt that ignores its cancellation.
            await asyncio.wait({attempt}, timeout=timeout_s)
            if not attempt.done() and (late_s := time.monotonic() - deadline) > 0:
                # The event loop was blocked over the deadline, by another rollout: that time it gets now.
                await asyncio.wait({attempt}, timeout=min(late_s, timeout_s))
            # It was not us: a rollout that is called off leaves by the wait above.
            if attempt.cancelled():
                raise RuntimeError("the workflow cancelled itself")
            if attempt.done():
                return as_reward(attempt.result())
        finally:
            model.close()  # an attempt that will not stop must not go on beside its retry
            if not attempt.done():
                attempt.cancel()
                # Time for its `finally` blocks: an environment closes its connection, a tool removes its files.
                await asyncio.wait({attempt}, timeout=STOP_GRACE_S)
            if attempt.done() and not attempt.cancelled():
                attempt.exception()  # marks an error on the way out as seen; the deadline is what counts
        message = f"not finished after max_timeout {timeout_s:g} s {where}"
        if not attempt.done():
            raise _WillNotStopError(f"{message}, and it ignored its cancellation")
        raise _AttemptTimeout(message)

    def rewarded(self, model: RecordingModel, reward: Reward) -> list[Experience]:
        """The experiences of what `model` was asked. Raises: TypeError, ValueError: they cannot be trained."""
        self._check(reward, model)
        return [self._success(calls, n, 0, reward) for n, calls in enumerate(model.sequences)]

    async def reward_group(
        self, group_reward: GroupReward, ended: Mapping[RolloutKey, list[Experience]]
    ) -> dict[RolloutKey, list[Experience]]:
        """The rows of the task's rollouts that may be trained, with the rewards that they get together; as failures
        where those cannot be had. Raises: RoleError: the engine is gone.
        """
        good = {key: rows for key, rows in sorted(ended.items()) if rows and all(row.status.trainable for row in rows)}
        if not good:
            return {}
        model = self.new_model(self)
        try:
            texts = [rows[-1].response_text for rows in good.values()]
            asked = group_reward(self.task, texts, model)
            rewards = list(await asyncio.wait_for(asked, self.explorer.max_timeout))
            if len(rewards) != len(texts) or model.calls:
                raise ValueError(f"a reward for each of {len(texts)} rollouts is wanted, and the policy is not asked")
            for reward in rewards:
                self._check_reward(reward)
        except Exception as error:  # a judge may say anything; all of it becomes a typed, counted result
            if (failure := self.engine_failure()) is not None:
                raise failure from None
            told = mask(" ".join(f"reward of the group: {type(error).__name__}: {error}".split()))[:_MAX_ERROR_LENGTH]
            return {
                key: [replace(row, status=Status.FAILED, reward=None, error=told) for row in rows]
                for key, rows in good.items()
            }
        finally:
            model.close()
            self.times.reward_s += model.times.get("reward", 0.0)
        return {
            key: [
                replace(row, reward=float(reward.value), metrics={**row.metrics, **_floats(reward.metrics)})
                for row in rows
            ]
            for (key, rows), reward in zip(good.items(), rewards, strict=True)
        }

    def _check(self, reward: Reward, model: RecordingModel) -> None:
        """Raises: TypeError, ValueError: what the workflow returned cannot be trained on, naming workflow and task."""
        where = f"workflow {self.task.workflow}, task {self.task.group_id}"
        self._check_reward(reward)
        if not model.calls:
            raise ValueError(f"the policy was never called, so there is nothing to train ({where})")
        # One step for each call, by position: nothing else ties them together.
        if reward.steps and len(reward.steps) != len(model.calls):
            raise ValueError(f"{len(reward.steps)} steps told for {len(model.calls)} calls of the policy ({where})")
        for turn, step in enumerate(reward.steps):
            if step.state is not None and not isinstance(step.state, str):
                raise ValueError(f"state of step {turn} is {step.state!r:.100}, not a text ({where})")
            if step.reward is not None and not _is_storable(step.reward):
                raise ValueError(
                    f"reward of step {turn} is {step.reward!r:.100}, not a finite number in float32 ({where})"
                )

    def _check_reward(self, reward: Reward) -> None:
        """Raises: TypeError, ValueError: as _check, of the number and the metrics."""
        where = f"workflow {self.task.workflow}, task {self.task.group_id}"
        value = reward.value
        # Everything that the log or the loss could not take, with the words of who wrote the workflow.
        if not isinstance(value, numbers.Real):
            raise TypeError(f"reward is {value!r:.100}, not a number ({where})")
        if not _is_storable(value):
            raise ValueError(f"reward is {value!r:.100}, not a finite number in float32 ({where})")
        for name, metric in reward.metrics.items():
            if not isinstance(metric, numbers.Real):
                raise ValueError(f"metric {name} is {metric!r:.100}, not a number ({where})")

    def _success(self, calls: Sequence[tuple[int, Call]], ordinal: int, attempt: int, reward: Reward) -> Experience:
        # One sequence of calls, each with its place among all of the rollout, as a row.
        place, first = calls[0]
        last = calls[-1][1]
        prompt_length = len(first.request.prompt_tokens)
        # Arrays, made here, one by one while others are sampled: the commit then only joins them.
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
            # Of what stood there before, those of the call that sampled by them.
            experts += generation.routed_experts[len(experts) :]
            text_start = len(text) + len(call.added_text)
            text += call.added_text + call.response.text
            step = reward.steps[number] if reward.steps else Step()
            turns.append(
                Turn(
                    *(number, start, end, text_start, len(text), call.source, call.request.seed),
                    # As the engine says, request by request: weights may have changed while it was answered.
                    generation.min_policy_version,
                    generation.max_policy_version,
                    step.state,
                    None if step.reward is None else float(step.reward),
                )
            )
        oldest, newest = min(turn.min_policy_version for turn in turns), max(turn.max_policy_version for turn in turns)
        are_told = oldest != newest and all(call.generation.versions for _, call in calls)
        num_sampled = sum(call.num_response_tokens for _, call in calls)
        truncated = any(call.generation.finish_reason == "length" for _, call in calls)
        is_turn = len(calls) == 1 and place == ordinal
        return self._row(
            *(ordinal, attempt, first.request.sampling, first.request.seed),
            # Trainable all the same; an operator may drop it.
            status=Status.TRUNCATED if truncated else Status.OK,
            tokens=tokens,
            prompt_length=prompt_length,
            rollout_logprobs=logprobs,
            loss_mask=None if mask.all() else mask,
            reward=float(reward.value),
            min_policy_version=oldest,
            max_policy_version=newest,
            # Of other weights than those named when the unit began, the hash is not known here.
            weights_hash=self.weights.content_hash if newest == self.weights.version else "",
            prompt_text=first.prompt_text,
            response_text=text,
            env_state=turns[0].env_state if is_turn else None,
            turn_reward=turns[0].turn_reward if is_turn else None,
            turns=None if is_turn else tuple(turns),
            routed_experts=np.frombuffer(b"".join(experts), np.int16).reshape(len(experts), -1) if experts else None,
            images=last.request.images or None,
            version_starts=_without_repeats(versions) if are_told else None,
            metrics={
                **_floats(reward.metrics),
                "num_prompt_tokens": float(last.num_prompt_tokens + last.num_response_tokens - num_sampled),
                "num_response_tokens": float(num_sampled),
                "prompt_truncated": float(any(call.prompt_truncated for _, call in calls)),
                **({} if first.branch is None else {f"branches/{first.branch}": 1.0}),
            },
        )

    def _failure(self, error: Exception, attempt: int, state: Mapping[str, Any]) -> Experience:
        # The one experience of a rollout that failed; `state`: what the workflow said of where it stood.
        if isinstance(error, (SandboxError, _CalledOff)):
            text = str(error)  # it names the error it stands for
        else:
            text = f"{'TimeoutError' if isinstance(error, _AttemptTimeout) else type(error).__name__}: {error}"
        where = "".join(f" {name}={value!r:.40}" for name, value in state.items())
        seed = rollout_seed(self.explorer.rollout_model.seed, self.task.group_id, self.key.rollout, 0)
        return self._row(
            *(0, attempt, self.sampling, seed),
            status=Status.TIMEOUT if isinstance(error, (_AttemptTimeout, _CalledOff)) else Status.FAILED,
            # It stays beside the run, and an error of an HTTP client quotes its URL.
            error=mask(" ".join(f"{text}{f' [state:{where}]' if where else ''}".split()))[:_MAX_ERROR_LENGTH],
            prompt_text=self.task.prompt,
            min_policy_version=self.weights.version,
            max_policy_version=self.weights.version,
            weights_hash=self.weights.content_hash,
        )

    def _row(self, turn: int, attempt: int, sampling: SamplingParams, seed: int, **found: Any) -> Experience:
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
            **found,
        )


def _is_storable(value: object) -> bool:
    """Whether it is a number that the log's float32 holds: 1e39 would be stored as infinity."""
    try:
        return isinstance(value, numbers.Real) and bool(abs(float(value)) <= _LARGEST)
    except OverflowError:
        return False  # an integer of hundreds of digits


def _without_repeats(versions: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Those of (token, policy version), in their order, at which the version is another than before."""
    return (versions[0], *(after for before, after in pairwise(versions) if after[1] != before[1]))


def _floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
