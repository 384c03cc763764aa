"""Runner: the tasks of a work unit in, experiences out. Runs the rollouts side by side, where they are safe to run, and
waits no longer for them than it is told to.

A workflow of this package, with a reward of this package, runs as a coroutine on the event loop; any other in a process
of its own (sandbox/), unless it is declared `in_process`. A failure of the engine is nobody's rollout's: it ends the
unit, which somebody else then runs again. This module knows neither engines nor storage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.plugins import load_plugin_folders, module_of, requires, runs_in_process
from rftdask.config.schema.explorer import OverRolloutConfig
from rftdask.data.task import Task
from rftdask.data.tokenizer import Tokenizer
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.errors import UserError
from rftdask.rollouts.attempt import Rollout, RolloutDefaults, RolloutTimes, ServedWeights
from rftdask.rollouts.concurrency import ConcurrencyLimiter
from rftdask.rollouts.loop_watchdog import Watchdog
from rftdask.rollouts.policy.lockstep_queue import GenerateBatch, LockstepQueue, RequestQueue, RolloutKey
from rftdask.rollouts.policy.recording import LogprobsBatch, PromptLimits, RecordingModel, ServedModel
from rftdask.rollouts.policy.remote import RemoteModel, ServedRemote
from rftdask.rollouts.policy.streaming_queue import Streaming, StreamingQueue
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.sandbox.pool import ForkServer, SandboxOptions, SandboxPool, SandboxSpec
from rftdask.rollouts.timeouts import num_tasks_needed
from rftdask.rollouts.workflows.base import WorkflowFn
from rftdask.rollouts.workflows.registry import FoundWorkflow, find_workflow

_SANDBOX = "sandbox"
"""Kind of place of the ConcurrencyLimiter for processes, beside those named by workflows."""


@dataclass(frozen=True)
class Engines:
    """The models that answer the rollouts of a work unit."""

    generate: GenerateBatch | Streaming | None
    """The policy: in calls, one at a time, or as requests come. None: `remote` is the policy."""
    tokenizer: Tokenizer | None
    logprobs: LogprobsBatch | None = None
    auxiliary: Mapping[str, AuxiliaryEngine | ServedRemote] = field(default_factory=dict)
    remote: RemoteModel | None = None
    """The policy, for evaluations, in place of the first three."""

    @property
    def remotes(self) -> tuple[RemoteModel, ...]:
        policy = () if self.remote is None else (self.remote,)
        return (*policy, *(each.model for each in self.auxiliary.values() if isinstance(each, ServedRemote)))


@dataclass(frozen=True)
class AuxiliaryEngine:
    """A frozen model beside the policy."""

    generate: GenerateBatch | Streaming
    tokenizer: Tokenizer
    sampling: SamplingParams
    limits: PromptLimits = field(default_factory=PromptLimits)
    logprobs: LogprobsBatch | None = None


@dataclass(frozen=True)
class UnitOutcome:
    """Experiences and times of a work unit."""

    experiences: list[Experience]
    """Ordered by (task, rollout, turn)."""
    times: list[RolloutTimes]
    """Times of the rollouts, in their order."""
    task_times_s: list[float]
    """Seconds from the beginning of the unit to a task's last rollout, of the tasks that were not called off."""
    engine_s: float
    """Seconds in which the policy's engine had something to do."""


async def run_work_unit(
    tasks: Sequence[Task],
    *,
    repeat_times: int,
    explore_step: int,
    engines: Engines,
    defaults: RolloutDefaults,
    weights: ServedWeights,
    max_wait_s: float = 0.02,
    greedy_baseline: bool = False,
    over_rollout: OverRolloutConfig | None = None,
    on_group: Callable[[int, list[Experience]], None] = lambda number, experiences: None,
    fork_server: Callable[[SandboxSpec], ForkServer] | None = None,
) -> UnitOutcome:
    """Run `repeat_times` rollouts of each task, side by side.

    Args:
        max_wait_s: for rollouts that are busy elsewhere, before a call of the engine goes out without them.
        greedy_baseline: one more rollout of each task, the last, at temperature 0.
        on_group: takes the number of a task and its experiences as soon as all its rollouts have ended; must not block.
        fork_server: gives a living one of a spec, and keeps it; None: this unit has its own.
    Raises: UserError: a task names a workflow or a reward function that does not exist. What `engines` raise.
    """
    plan = _Plan.of(tasks, defaults.sandbox)
    queue = _queue(engines.generate or _no_engine, max_wait_s)
    queues, auxiliary = [queue], dict[str, ServedModel | ServedRemote]()
    for name, engine in engines.auxiliary.items():
        if isinstance(engine, ServedRemote):
            auxiliary[name] = engine
        else:
            queues.append(_queue(engine.generate, 0.0))  # nobody waits for others to ask a judge
            auxiliary[name] = ServedModel(queues[-1], engine.tokenizer, engine.sampling, engine.limits, engine.logprobs)

    def engine_failure() -> Exception | None:
        return queue.failure or next((each.failure for each in engines.remotes if each.failure is not None), None)

    def new_model(rollout: Rollout) -> RecordingModel:
        policy: ServedModel | ServedRemote
        if engines.remote is not None:
            policy = ServedRemote(engines.remote, rollout.sampling)
        else:
            assert engines.tokenizer is not None
            policy = ServedModel(queue, engines.tokenizer, rollout.sampling, defaults.limits, engines.logprobs)
        key, group_id = rollout.key, rollout.task.group_id
        return RecordingModel(policy, auxiliary, key=key, group_id=group_id, run_seed=defaults.run_seed)

    try:
        # The watchdog breaks off workflows that block the loop, and nothing of our own: see _Plan.workflow_of.
        async with _sandboxes(plan, fork_server) as pool:
            rollouts = [
                Rollout(
                    task=task,
                    key=RolloutKey(number, rollout),
                    explore_step=explore_step,
                    workflow=plan.workflow_of(task, pool),
                    engine_failure=engine_failure,
                    new_model=new_model,
                    defaults=defaults,
                    weights=weights,
                    greedy=rollout == repeat_times,
                )
                for number, task in enumerate(tasks)
                for rollout in range(repeat_times + greedy_baseline)
            ]
            unit = _RunningUnit(rollouts, plan, queue, over_rollout or OverRolloutConfig(), on_group)
            with Watchdog(defaults.max_block_s, only_within="run_in_process"):
                return await unit.run()
    except ExceptionGroup as group:
        failure = engine_failure() or group.exceptions[0]
    finally:
        for each in queues:
            await each.close()
        for remote in engines.remotes:
            await remote.close()
    # Not in the handler: an error whose context is the group that holds it cannot be pickled for the way home.
    raise failure


def _queue(generate: GenerateBatch | Streaming, max_wait_s: float) -> RequestQueue:
    return StreamingQueue(generate) if isinstance(generate, Streaming) else LockstepQueue(generate, max_wait_s)


async def _no_engine(requests: list[GenerateRequest]) -> list[Generation]:
    raise AssertionError("a remote policy is asked without a queue")


@dataclass(frozen=True)
class _Plan:
    """Places of the unit's workflows: the event loop, or sandboxes."""

    workflows: Mapping[str, FoundWorkflow]
    sandboxed: frozenset[tuple[str, str]]
    """(workflow, reward function) of the tasks that run in sandboxes; "" is the workflow's own reward."""
    options: SandboxOptions
    modules: tuple[str, ...]
    """Modules that sandboxes import."""

    @classmethod
    def of(cls, tasks: Sequence[Task], options: SandboxOptions) -> _Plan:
        """Find what the tasks need. Raises: UserError: a workflow or reward is not there, or no sandbox can have it."""
        load_plugin_folders(options.plugin_dirs)
        kinds = sorted({(task.workflow, task.reward_fn) for task in tasks})
        workflows = {name: find_workflow(name) for name in sorted({workflow for workflow, _ in kinds})}
        rewards = {name: get_reward(name) for name in sorted({reward for _, reward in kinds} - {""})}
        safe = {name for name, found in workflows.items() if found.in_process}
        safe |= {name for name, function in rewards.items() if runs_in_process(function)} | {""}
        sandboxed = {
            kind for kind in kinds if options.mode == "always" or (options.mode == "auto" and not safe.issuperset(kind))
        }
        needed = {name for kind in sandboxed for name in kind if name}
        modules = {workflows[n].module if n in workflows else module_of(rewards[n]) for n in needed}
        modules |= {m for n in needed for m in (workflows[n].requires if n in workflows else requires(rewards[n]))}
        if "__main__" in modules:
            raise UserError(
                f"one of {', '.join(sorted(needed))} is defined in a script or notebook, where no other process finds "
                "it; move it to a module, or declare it in_process=True"
            )
        return cls(workflows, frozenset(sandboxed), options, tuple(sorted(modules)))

    def is_sandboxed(self, task: Task) -> bool:
        return (task.workflow, task.reward_fn) in self.sandboxed

    def workflow_of(self, task: Task, pool: SandboxPool | None) -> WorkflowFn:
        """The task's workflow where it is safe to run: here, or in a process of `pool`."""
        if not self.is_sandboxed(task):
            run = self.workflows[task.workflow].run

            async def run_in_process(task: Task, model: Any) -> Any:
                """The watchdog breaks off what blocks below this function's name, and nothing of our own."""
                return await run(task, model)

            return run_in_process
        assert pool is not None
        return partial(pool.attempt, task.workflow)


@asynccontextmanager
async def _sandboxes(
    plan: _Plan, keep: Callable[[SandboxSpec], ForkServer] | None
) -> AsyncIterator[SandboxPool | None]:
    """A pool of sandboxes; None: no task needs one."""
    if not plan.sandboxed:
        yield None
        return
    spec = SandboxSpec(
        workflows=tuple(sorted({workflow for workflow, _ in plan.sandboxed})),
        rewards=tuple(sorted({reward for _, reward in plan.sandboxed} - {""})),
        modules=plan.modules,
        plugin_dirs=plan.options.plugin_dirs,
        max_memory_bytes=plan.options.max_memory_bytes,
        env=plan.options.env,
    )
    # In a thread: importing plug-ins takes as long as they like.
    fork_server = await asyncio.to_thread(keep or ForkServer, spec)
    pool = SandboxPool(fork_server)
    try:
        yield pool
    finally:
        await pool.close()
        if keep is None:
            fork_server.close()


class _RunningUnit:
    """The rollouts of a unit under way: who may run now, what has ended, and who is not waited for any longer."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        plan: _Plan,
        queue: RequestQueue,
        over_rollout: OverRolloutConfig,
        on_group: Callable[[int, list[Experience]], None],
    ) -> None:
        self._rollouts = rollouts
        self._plan = plan
        self._queue = queue
        self._over_rollout = over_rollout
        self._on_group = on_group
        places = {name: workflow.max_concurrent for name, workflow in plan.workflows.items()}
        limits = {name: most for name, most in places.items() if most is not None}
        self._limiter: ConcurrencyLimiter[RolloutKey] = ConcurrencyLimiter(
            {_SANDBOX: plan.options.max_sandboxes, **limits}
        )
        self._admitted = {rollout.key: asyncio.Event() for rollout in rollouts}
        self._of_task: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            self._of_task.setdefault(rollout.key.task_number, []).append(rollout)
        self._experiences: dict[int, dict[RolloutKey, list[Experience]]] = {number: {} for number in self._of_task}
        """Experiences of each task's rollouts that have ended."""
        self._task_times_s: list[float] = []
        self._num_needed = num_tasks_needed(over_rollout, len(self._of_task))
        self._enough = asyncio.Event()
        """Set when so many tasks are done that the others' time runs."""
        self._began = time.perf_counter()

    async def run(self) -> UnitOutcome:
        # All of them first, so that the first call of the engine waits for all of them.
        for rollout in self._rollouts:
            task = rollout.task
            kinds = (task.workflow, _SANDBOX) if self._plan.is_sandboxed(task) else (task.workflow,)
            if self._limiter.enter(rollout.key, kinds):
                self._admit(rollout.key)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(rollout)) for rollout in self._rollouts]
            if self._over_rollout.ratio > 0:
                group.create_task(self._call_off_the_rest(running))
        experiences = [each for number in sorted(self._experiences) for each in self._group(number)]
        times = [rollout.times for rollout in self._rollouts]
        return UnitOutcome(experiences, times, self._task_times_s, self._queue.busy_s)

    def _admit(self, key: RolloutKey) -> None:
        self._queue.enter(key)
        self._admitted[key].set()

    async def _run(self, rollout: Rollout) -> None:
        """Run one rollout; if it is the last of its task, end the task."""
        try:
            experiences = await rollout.run(self._admitted[rollout.key])
        finally:
            # Those that come in its place first: so calls wait for them, whatever else happens in this pass.
            for key in self._limiter.leave(rollout.key):
                self._admit(key)
            self._queue.leave(rollout.key)
        number = rollout.key.task_number
        ended, siblings = self._experiences[number], self._of_task[number]
        ended[rollout.key] = experiences
        if len(ended) < len(siblings):
            return
        if not any(sibling.called_off for sibling in siblings):
            self._task_times_s.append(time.perf_counter() - self._began)
            if len(self._task_times_s) >= self._num_needed:
                self._enough.set()
        elif not self._over_rollout.return_partial_tasks:
            # What siblings gave before the others were called off is kept for the record, and not trained on.
            reason = "other rollouts of its task were called off, and over_rollout.return_partial_tasks is off"
            for key, given in ended.items():
                ended[key] = [
                    replace(each, status=Status.FILTERED, error=reason) if each.status.trainable else each
                    for each in given
                ]
        self._on_group(number, self._group(number))

    def _group(self, number: int) -> list[Experience]:
        """Experiences of a task, ordered by rollout and turn."""
        ended = self._experiences[number]
        return [experience for key in sorted(ended) for experience in ended[key]]

    async def _call_off_the_rest(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Wait until enough tasks are done, give the others their time, and cancel what still runs."""
        await self._enough.wait()
        wait_s = self._over_rollout.wait_after_min
        await asyncio.wait(running, timeout=wait_s)
        reason = (
            f"called off {wait_s:g} s after {self._num_needed} of {len(self._of_task)} tasks were done "
            "(explorer.over_rollout)"
        )
        for rollout, task in zip(self._rollouts, running, strict=True):
            if not task.done():
                rollout.called_off = reason  # first: the rollout then takes its cancellation for a result
                task.cancel()
