"""Runs the rollouts of a work unit concurrently: tasks in, experiences out.

Workflows and rewards of this package run as coroutines on the event loop. Any other workflow runs in its own process
(sandbox/), unless it is declared `in_process`. A failure of the engine ends the unit, which then runs again elsewhere.
This module does not know engines or storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import fill_from_environment
from rftdask.config.plugins import load_plugin_folders, module_of, requires, runs_in_process
from rftdask.config.schema.explorer import ExplorerConfig, OverRolloutConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import ImageProcessor
from rftdask.data.task import Task
from rftdask.data.tokenizer import Tokenizer
from rftdask.engines.base import SamplingParams
from rftdask.engines.spec import model_sampling
from rftdask.errors import UserError
from rftdask.rollouts.concurrency_limits import SLOT, SharedSlots
from rftdask.rollouts.loop_watchdog import BlockedLoopTimeout, Watchdog
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.recording import LogprobsBatch, ModelUse, RecordingModel, Served, ServedModel, ServedRemote
from rftdask.rollouts.policy.remote_model import RemoteModel
from rftdask.rollouts.policy.request_queues import (
    GenerateBatch,
    LockstepQueue,
    RequestQueue,
    RolloutKey,
    Streaming,
    StreamingQueue,
)
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.rollout import Rollout, RolloutTimes, max_block_s
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer, SandboxPool
from rftdask.rollouts.workflows.base import WorkflowFn
from rftdask.rollouts.workflows.registry import FoundWorkflow, find_workflow
from rftdask.synchronizer.published import Published

_SANDBOX = "sandbox"
"""Kind of slots of sandbox processes. Other kinds are workflow names and the engine's slots."""
Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextEngine:
    """An engine with its tokenizer: the policy, or a frozen auxiliary model."""

    generate: GenerateBatch | Streaming
    """Takes one call of several requests at a time, or requests as they come."""
    tokenizer: Tokenizer
    logprobs: LogprobsBatch | None = None
    """None: the engine cannot score tokens."""
    parser: AnswerParser | None = None
    """Parser of tool calls and reasoning in responses. None: detected from the chat template."""
    is_guided: bool = False
    """See EngineTraits.guides_sampling."""
    images: ImageProcessor | None = None
    """None: chats have no images."""


@dataclass(frozen=True)
class UnitOutcome:
    experiences: list[Experience]
    """Ordered by (task, rollout, turn)."""
    times: list[RolloutTimes]
    """Times of the rollouts, in order."""
    task_times_s: list[float]
    """Seconds from a task's first rollout to the end of its last, of the tasks without cancelled rollouts."""
    engine_s: float
    """Seconds in which the policy's engine was busy."""
    uses: Mapping[str, ModelUse] = field(default_factory=dict)
    """Use of each auxiliary model by name."""


async def run_work_unit(
    tasks: Sequence[Task],
    *,
    repeat_times: int,
    explore_step: int,
    policy: TextEngine | RemoteModel,
    explorer: ExplorerConfig,
    model: ModelConfig,
    sampling: Mapping[str, SamplingParams],
    weights: Published,
    auxiliary: Mapping[str, TextEngine | RemoteModel] | None = None,
    max_wait_s: float = 0.02,
    greedy_baseline: bool = False,
    on_group: Callable[[int, list[Experience]], None] = lambda number, experiences: None,
    fork_server: Callable[[SandboxSpec], ForkServer] | None = None,
    shared_slots: SharedSlots | None = None,
    on_admitted: Callable[[], None] = lambda: None,
) -> UnitOutcome:
    """Run `repeat_times` rollouts of each task concurrently.

    Args:
        model: limits of prompts, and defaults of the lengths and the temperature of auxiliary models.
        sampling: sampling parameters of the policy by the name of the taskset.
        max_wait_s: seconds that a call of the engine waits for rollouts that do something else.
        greedy_baseline: one more rollout of each task, the last, at temperature 0.
        on_group: called with the number of a task and its experiences when all its rollouts have ended; must not block.
        fork_server: returns a running fork server of a spec and owns it. None: the unit starts its own.
        shared_slots: slots that other units may share. None: the unit has its own, one per rollout.
        on_admitted: called once every rollout has its slots.
    Raises: UserError: a task names a workflow or a reward function that does not exist. Errors of the engines.
    """
    plan = _Plan.of(tasks, explorer)
    queues: list[RequestQueue] = []
    remotes = [model for model in (policy, *(auxiliary or {}).values()) if isinstance(model, RemoteModel)]

    # Requests to an engine go through a queue of this unit, requests to a model behind an API directly.
    def serve(
        engine: TextEngine | RemoteModel, wait_s: float, limits: ModelConfig, use: ModelUse
    ) -> Callable[[SamplingParams], Served]:
        if isinstance(engine, RemoteModel):
            return partial(ServedRemote, engine, use=use)
        generate = engine.generate
        queue = StreamingQueue(generate) if isinstance(generate, Streaming) else LockstepQueue(generate, wait_s)
        queues.append(queue)
        parser = engine.parser or AnswerParser(engine.tokenizer)
        return lambda sampling: ServedModel(
            queue, engine.tokenizer, sampling, limits, engine.logprobs, parser, engine.is_guided, engine.images, use
        )

    serve_policy = serve(policy, max_wait_s, model, ModelUse())
    queue = queues[0] if queues else None
    auxiliary_limits = {section.asked_name: section.own_model(model) for section in explorer.auxiliary_models}
    # Requests to auxiliary models do not wait for other rollouts.
    served, uses = dict[str, Served](), dict[str, ModelUse]()
    for name, engine in (auxiliary or {}).items():
        limits, uses[name] = auxiliary_limits.get(name, model), ModelUse()
        served[name] = serve(engine, 0.0, limits, uses[name])(model_sampling(limits))

    def engine_failure() -> Exception | None:
        failures = [*(queue.failure for queue in queues), *(remote.failure for remote in remotes)]
        return next((failure for failure in failures if failure is not None), None)

    def new_model(rollout: Rollout) -> RecordingModel:
        group_id, run_seed = rollout.task.group_id, explorer.rollout_model.seed
        policy = serve_policy(rollout.sampling)
        return RecordingModel(policy, served, key=rollout.key, group_id=group_id, run_seed=run_seed)

    greedy = {name: replace(params, temperature=0.0) for name, params in sampling.items()}
    pool = None
    closing = contextlib.AsyncExitStack()
    for close in (*(remote.close for remote in remotes), *(queue.close for queue in queues)):
        closing.push_async_callback(close)
    try:
        if plan.spec is not None:
            # In a thread, because importing plug-ins may take long.
            server = await asyncio.to_thread(fork_server or ForkServer, plan.spec)
            if fork_server is None:
                closing.callback(server.close)
            pool = SandboxPool(server)
            closing.callback(pool.close)
        # Make all rollouts before any runs, so that slots and calls of the engine take all of them into account.
        rollouts = [
            Rollout(
                task=task,
                key=RolloutKey(number, rollout),
                explore_step=explore_step,
                workflow=plan.workflow_of(task, pool),
                engine_failure=engine_failure,
                new_model=new_model,
                explorer=explorer,
                sampling=greedy[task.taskset] if rollout == repeat_times else sampling[task.taskset],
                weights=weights,
            )
            for number, task in enumerate(tasks)
            # The greedy one comes last, as number `repeat_times`, and differs from its siblings only in its sampling.
            for rollout in range(repeat_times + greedy_baseline)
        ]
        # The watchdog interrupts only workflows that block the loop, not the package's code: see _Plan.workflow_of.
        with Watchdog(max_block_s(explorer), only_within="run_in_process"):
            outcome = await _RunningUnit(rollouts, plan, queue, explorer, on_group, shared_slots, on_admitted).run()
            return replace(outcome, uses=uses)
    except ExceptionGroup as group:
        # Prefer the engine's error, because errors of rollouts follow from it.
        failure = engine_failure() or group.exceptions[0]
    finally:
        await closing.aclose()
    # Outside the handler: an error whose context is the group that contains it cannot be pickled.
    raise failure


@dataclass(frozen=True)
class _Plan:
    """Placement of the unit's workflows: on the event loop, or in sandboxes."""

    workflows: Mapping[str, FoundWorkflow]
    sandboxed: frozenset[tuple[str, str]]
    """(workflow, reward function) of the tasks that run in sandboxes. "": the workflow's default reward."""
    spec: SandboxSpec | None
    """Spec of the sandboxes. None: no task runs in one."""

    @classmethod
    def of(cls, tasks: Sequence[Task], explorer: ExplorerConfig) -> _Plan:
        """Raises: UserError: a workflow or reward does not exist, or cannot be imported in a sandbox."""
        # First, because plug-ins may define the names below.
        load_plugin_folders(explorer.plugin_dirs)
        kinds = sorted({(task.workflow, task.reward_fn) for task in tasks})
        workflows = {name: find_workflow(name) for name in sorted({workflow for workflow, _ in kinds})}
        rewards = {name: get_reward(name) for name in sorted({reward for _, reward in kinds} - {""})}
        safe = {name for name, entry in workflows.items() if entry.in_process}
        safe |= {name for name, function in rewards.items() if runs_in_process(function)} | {""}
        mode = explorer.sandbox.mode
        # By pairs: a workflow of this package is not safe with a user's reward function.
        sandboxed = {kind for kind in kinds if mode == "always" or (mode == "auto" and not safe.issuperset(kind))}
        if not sandboxed:
            return cls(workflows, frozenset(), None)
        needed = {name for kind in sandboxed for name in kind if name}
        modules = {workflows[n].module if n in workflows else module_of(rewards[n]) for n in needed}
        modules |= {m for n in needed for m in (workflows[n].requires if n in workflows else requires(rewards[n]))}
        if "__main__" in modules:
            text = "is defined in a script or notebook, so no other process can import it"
            advice = "move it to a module, or declare it in_process=True"
            raise UserError(f"one of {', '.join(sorted(needed))} {text}; {advice}")
        memory_gb = explorer.sandbox.max_memory_gb
        spec = SandboxSpec(
            workflows=tuple(sorted({workflow for workflow, _ in sandboxed})),
            rewards=tuple(sorted({reward for _, reward in sandboxed} - {""})),
            modules=tuple(sorted(modules)),
            plugin_dirs=explorer.plugin_dirs,
            max_memory_bytes=None if memory_gb is None else int(memory_gb * 2**30),
            env=tuple(sorted(fill_from_environment(explorer.env_vars).items())),
            bubblewrap=explorer.sandbox.bubblewrap,
            network=explorer.sandbox.bubblewrap_network or not explorer.sandbox.bubblewrap,
        )
        return cls(workflows, frozenset(sandboxed), spec)

    def kinds(self, task: Task) -> tuple[str, ...]:
        sandboxed = (task.workflow, task.reward_fn) in self.sandboxed
        return (SLOT, task.workflow, _SANDBOX) if sandboxed else (SLOT, task.workflow)

    def workflow_of(self, task: Task, pool: SandboxPool | None) -> WorkflowFn:
        """Function that runs the task's workflow where it is safe: in this process, or in one of `pool`."""
        if _SANDBOX not in self.kinds(task):
            run = self.workflows[task.workflow].run

            async def run_in_process(task: Task, model: Any) -> Any:
                # The watchdog interrupts only code that this function calls; it looks for the name.
                return await run(task, model)

            return run_in_process
        assert pool is not None
        return partial(pool.attempt, task.workflow)


class _RunningUnit:
    """The rollouts of a running unit: admits them, collects their experiences, and cancels late ones."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        plan: _Plan,
        queue: RequestQueue | None,
        explorer: ExplorerConfig,
        on_group: Callable[[int, list[Experience]], None],
        shared_slots: SharedSlots | None,
        on_admitted: Callable[[], None],
    ) -> None:
        """queue: None for a model behind an API; shared_slots: None if the unit has its own slots."""
        self._rollouts, self._plan, self._queue = rollouts, plan, queue
        self._over_rollout, self._on_group = explorer.over_rollout, on_group
        limits = {name: entry.max_concurrent for name, entry in plan.workflows.items() if entry.max_concurrent}
        self._shares_slots = shared_slots is not None
        self._slots, self._on_admitted = shared_slots or SharedSlots({}), on_admitted
        self._slots.limit(limits | {_SANDBOX: explorer.sandbox.max_processes})
        # One event per rollout, so that rollouts run in the order of the slots, not in that of wake-ups.
        self._admitted = {rollout.key: asyncio.Event() for rollout in rollouts}
        self._num_admitted, self._all_admitted = 0, asyncio.Event()
        self._task_began: dict[int, float] = {}
        """Time at which the first rollout of each task was admitted."""
        self._of_task: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            self._of_task.setdefault(rollout.key.task_number, []).append(rollout)
        self._experiences: dict[int, dict[RolloutKey, list[Experience]]] = {number: {} for number in self._of_task}
        """Experiences of the rollouts that have ended, by task."""
        self._task_times_s: list[float] = []
        self._num_needed = num_tasks_needed(self._over_rollout, len(self._of_task))
        self._enough = asyncio.Event()
        """Set when so many tasks are done that the deadline of the others starts."""

    async def run(self) -> UnitOutcome:
        """Raises: ExceptionGroup: an engine, or the process that starts sandboxes, is gone."""
        # Enter all rollouts first, so that the first call of the engine waits for all of them.
        for rollout in self._rollouts:
            kinds = self._plan.kinds(rollout.task)
            self._slots.enter((self, rollout.key), kinds, partial(self._admit, rollout.key))
        try:
            await self._run_all()
        finally:  # also for rollouts that were cancelled before they began
            for rollout in self._rollouts:
                self._slots.leave((self, rollout.key))
        # By number and not by the order in which they ended, so that the rows of a unit repeat.
        experiences = [row for number in sorted(self._experiences) for row in self._group(number)]
        times = [rollout.times for rollout in self._rollouts]
        engine_s = 0.0 if self._queue is None else self._queue.busy_s
        return UnitOutcome(experiences, times, self._task_times_s, engine_s)

    async def _run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(rollout)) for rollout in self._rollouts]
            if self._over_rollout.ratio > 0:
                await self._enough.wait()
                if self._shares_slots:
                    # Rollouts that still wait for slots of other units would be cancelled before they began.
                    await self._all_admitted.wait()
                # Enough tasks are done: the others have wait_s seconds left.
                wait_s = self._over_rollout.wait_after_min
                await asyncio.wait(running, timeout=wait_s)
                done = f"{self._num_needed} of {len(self._of_task)} tasks were done"
                for rollout, task in zip(self._rollouts, running, strict=True):
                    if not task.done():
                        # Set the reason first: the rollout then returns a result when it is cancelled.
                        rollout.cancel_reason = f"cancelled {wait_s:g} s after {done} (explorer.over_rollout)"
                        task.cancel()

    def _admit(self, key: RolloutKey) -> None:
        if self._queue is not None:
            self._queue.enter(key)
        self._task_began.setdefault(key.task_number, time.perf_counter())
        self._admitted[key].set()
        self._num_admitted += 1
        if self._num_admitted == len(self._rollouts):
            self._all_admitted.set()
            self._on_admitted()

    async def _run(self, rollout: Rollout) -> None:
        try:
            experiences = await rollout.run(self._admitted[rollout.key])
        finally:
            # Admit the next rollouts first, so that calls of the engine wait for them.
            self._slots.leave((self, rollout.key))
            if self._queue is not None:
                self._queue.leave(rollout.key)
        number = rollout.key.task_number
        ended, siblings = self._experiences[number], self._of_task[number]
        ended[rollout.key] = experiences
        # A group is passed on as a whole, because advantages compare siblings.
        if len(ended) < len(siblings):
            return
        group_reward = self._plan.workflows[rollout.task.workflow].group_reward
        if group_reward is not None:
            ended.update(await rollout.reward_group(group_reward, ended))
        if not any(sibling.cancel_reason for sibling in siblings):
            self._task_times_s.append(time.perf_counter() - self._task_began[number])
            if len(self._task_times_s) >= self._num_needed:
                self._enough.set()
        elif not self._over_rollout.return_partial_tasks:
            # Siblings that ended before the cancellation are recorded, but not trained.
            reason = "other rollouts of its task were cancelled, and over_rollout.return_partial_tasks is off"
            for key, rows in ended.items():
                ended[key] = [
                    replace(row, status=Status.FILTERED, error=reason) if row.status.trainable else row for row in rows
                ]
        # From here on the group may be committed, even if the rest of the unit is lost.
        self._on_group(number, self._group(number))

    def _group(self, number: int) -> list[Experience]:
        ended = self._experiences[number]
        return [experience for key in sorted(ended) for experience in ended[key]]


def num_tasks_needed(over_rollout: OverRolloutConfig, num_tasks: int) -> int:
    """Number of tasks of a work unit that must be done before the deadline of the others starts, as in Trinity-RFT."""
    return math.ceil(num_tasks * (1 - over_rollout.ratio))


class SharedLoop:
    """Event loop in a thread that ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="rollouts", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel the coroutines on the loop, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its exit cancels the remaining tasks
            runner.get_loop()
            asyncio.set_event_loop(self._loop)
            while True:
                try:
                    return self._loop.run_forever()
                # The watchdog raised it after the blocking code had returned: the other rollouts go on.
                except BlockedLoopTimeout:
                    log.warning("a workflow blocked the event loop, and returned before it could be interrupted")
