"""Runner: the tasks of a work unit in, experiences out. Runs the rollouts side by side, where they are safe to run, and
waits no longer for them than it is told to.

A workflow of this package, with a reward of this package, runs as a coroutine on the event loop; any other in a process
of its own (sandbox/), unless it is declared `in_process`. A failure of the engine is nobody's rollout's: it ends the
unit, which somebody else then runs again. This module knows neither engines nor storage.
"""

from __future__ import annotations

import asyncio
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
from rftdask.rollouts.concurrency_limits import SLOT, SharedPlaces
from rftdask.rollouts.loop_watchdog import BlockedLoopTimeout, Watchdog
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.lockstep_queue import GenerateBatch, LockstepQueue, RequestQueue, RolloutKey
from rftdask.rollouts.policy.recording import LogprobsBatch, ModelUse, RecordingModel, Served, ServedModel, ServedRemote
from rftdask.rollouts.policy.remote_model import RemoteModel
from rftdask.rollouts.policy.streaming_queue import Streaming, StreamingQueue
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.rollout import Rollout, RolloutTimes, max_block_s
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer, SandboxPool
from rftdask.rollouts.workflows.base import WorkflowFn
from rftdask.rollouts.workflows.registry import FoundWorkflow, find_workflow
from rftdask.synchronizer.published import Published

_SANDBOX = "sandbox"
"""Kind of place for processes, beside those named by workflows and the engine's slots."""


@dataclass(frozen=True)
class TextEngine:
    """An engine, and the tokenizer by which it takes and gives text: the policy, or a frozen model beside it."""

    generate: GenerateBatch | Streaming
    """In calls, one at a time, or as requests come."""
    tokenizer: Tokenizer
    logprobs: LogprobsBatch | None = None
    """None: the engine cannot score given tokens."""
    parser: AnswerParser | None = None
    """Of its answers, as OpenAI's API tells them; None: the one that its chat template shows."""
    is_guided: bool = False
    """See EngineTraits.guides_sampling."""
    images: ImageProcessor | None = None
    """Of the images in chats; None: chats have none."""


@dataclass(frozen=True)
class UnitOutcome:
    """Experiences and times of a work unit."""

    experiences: list[Experience]
    """Ordered by (task, rollout, turn)."""
    times: list[RolloutTimes]
    """Times of the rollouts, in their order."""
    task_times_s: list[float]
    """Seconds from a task's first rollout to the end of its last, of the tasks that were not called off."""
    engine_s: float
    """Seconds in which the policy's engine had something to do."""
    uses: Mapping[str, ModelUse] = field(default_factory=dict)
    """What each auxiliary model was asked for, by name."""


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
    places: SharedPlaces | None = None,
    on_admitted: Callable[[], None] = lambda: None,
) -> UnitOutcome:
    """Run `repeat_times` rollouts of each task, side by side.

    Args:
        explorer: how long and how often rollouts are tried, where they run, and how many of them are waited for.
        model: the limits of prompts, and what auxiliary models have no lengths and temperature of their own for.
        sampling: of the policy, by the name of the taskset.
        weights: those that the policy's engine serves.
        max_wait_s: for rollouts that are busy elsewhere, before a call of the engine goes out without them.
        greedy_baseline: one more rollout of each task, the last, at temperature 0.
        on_group: takes the number of a task and its experiences as soon as all its rollouts have ended; must not block.
        fork_server: gives a living one of a spec, and keeps it; None: this unit has its own.
        places: slots and other places, which it may share with other units on this event loop; None: it has its own,
            and as many slots as rollouts.
        on_admitted: called once every rollout has its places.
    Raises: UserError: a task names a workflow or a reward function that does not exist. What the engines raise.
    """
    plan = _Plan.of(tasks, explorer)
    queues: list[RequestQueue] = []
    remotes = [each for each in (policy, *(auxiliary or {}).values()) if isinstance(each, RemoteModel)]

    # How each model is asked: an engine through a queue of this unit, a model behind an API directly.
    def serve(
        engine: TextEngine | RemoteModel, wait_s: float, own: ModelConfig, use: ModelUse
    ) -> Callable[[SamplingParams], Served]:
        if isinstance(engine, RemoteModel):
            return partial(ServedRemote, engine, use=use)
        generate = engine.generate
        queue = StreamingQueue(generate) if isinstance(generate, Streaming) else LockstepQueue(generate, wait_s)
        queues.append(queue)
        parser = engine.parser or AnswerParser(engine.tokenizer)
        return lambda sampling: ServedModel(
            queue, engine.tokenizer, sampling, own, engine.logprobs, parser, engine.is_guided, engine.images, use
        )

    serve_policy = serve(policy, max_wait_s, model, ModelUse())
    queue = queues[0] if queues else None
    owns = {each.asked_name: each.own_model(model) for each in explorer.auxiliary_models}
    # Nobody waits for others to ask a judge.
    served, uses = dict[str, Served](), dict[str, ModelUse]()
    for name, engine in (auxiliary or {}).items():
        own, uses[name] = owns.get(name, model), ModelUse()
        served[name] = serve(engine, 0.0, own, uses[name])(model_sampling(own))

    def engine_failure() -> Exception | None:
        failures = [*(each.failure for each in queues), *(each.failure for each in remotes)]
        return next((failure for failure in failures if failure is not None), None)

    def new_model(rollout: Rollout) -> RecordingModel:
        return RecordingModel(
            serve_policy(rollout.sampling),
            served,
            key=rollout.key,
            group_id=rollout.task.group_id,
            run_seed=explorer.rollout_model.seed,
        )

    greedy = {name: replace(params, temperature=0.0) for name, params in sampling.items()}
    own_server = pool = None
    try:
        if plan.spec is not None:
            # In a thread: importing plug-ins takes as long as they like.
            server = await asyncio.to_thread(fork_server or ForkServer, plan.spec)
            own_server = server if fork_server is None else None
            pool = SandboxPool(server)
        # All rollouts before any runs: who may run, and for whom calls wait, is known from the start.
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
            # The greedy one comes last, as number `repeat_times`, and only its sampling tells it from its siblings.
            for rollout in range(repeat_times + greedy_baseline)
        ]
        # The watchdog breaks off workflows that block the loop, and nothing of our own: see _Plan.workflow_of.
        with Watchdog(max_block_s(explorer), only_within="run_in_process"):
            outcome = await _RunningUnit(rollouts, plan, queue, explorer, on_group, places, on_admitted).run()
            return replace(outcome, uses=uses)
    except ExceptionGroup as group:
        # The engine's own, where it has one: what rollouts raise after it only follows from it.
        failure = engine_failure() or group.exceptions[0]
    finally:
        if pool is not None:
            await pool.close()
        if own_server is not None:
            own_server.close()
        for each in queues:
            await each.close()
        for remote in remotes:
            await remote.close()
    # Not in the handler: an error whose context is the group that holds it cannot be pickled for the way home.
    raise failure


@dataclass(frozen=True)
class _Plan:
    """Places of the unit's workflows: the event loop, or sandboxes."""

    workflows: Mapping[str, FoundWorkflow]
    sandboxed: frozenset[tuple[str, str]]
    """(workflow, reward function) of the tasks that run in sandboxes; "" is the workflow's own reward."""
    spec: SandboxSpec | None
    """What the sandboxes need; None: no task runs in one."""

    @classmethod
    def of(cls, tasks: Sequence[Task], explorer: ExplorerConfig) -> _Plan:
        """Find what the tasks need. Raises: UserError: a workflow or reward is not there, or no sandbox can have it."""
        # First: the names below may be defined there.
        load_plugin_folders(explorer.plugin_dirs)
        kinds = sorted({(task.workflow, task.reward_fn) for task in tasks})
        workflows = {name: find_workflow(name) for name in sorted({workflow for workflow, _ in kinds})}
        rewards = {name: get_reward(name) for name in sorted({reward for _, reward in kinds} - {""})}
        safe = {name for name, found in workflows.items() if found.in_process}
        safe |= {name for name, function in rewards.items() if runs_in_process(function)} | {""}
        mode = explorer.sandbox.mode
        # By pairs: a workflow of ours is not safe with a reward function of somebody else's.
        sandboxed = {kind for kind in kinds if mode == "always" or (mode == "auto" and not safe.issuperset(kind))}
        if not sandboxed:
            return cls(workflows, frozenset(), None)
        needed = {name for kind in sandboxed for name in kind if name}
        modules = {workflows[n].module if n in workflows else module_of(rewards[n]) for n in needed}
        modules |= {m for n in needed for m in (workflows[n].requires if n in workflows else requires(rewards[n]))}
        if "__main__" in modules:
            raise UserError(
                f"one of {', '.join(sorted(needed))} is defined in a script or notebook, where no other process finds "
                "it; move it to a module, or declare it in_process=True"
            )
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
        """Kinds of places that a rollout of the task takes; see SharedPlaces."""
        sandboxed = (task.workflow, task.reward_fn) in self.sandboxed
        return (SLOT, task.workflow, _SANDBOX) if sandboxed else (SLOT, task.workflow)

    def workflow_of(self, task: Task, pool: SandboxPool | None) -> WorkflowFn:
        """The task's workflow where it is safe to run: here, or in a process of `pool`."""
        if _SANDBOX not in self.kinds(task):
            run = self.workflows[task.workflow].run

            async def run_in_process(task: Task, model: Any) -> Any:
                """The watchdog breaks off what blocks below this function's name, and nothing of our own."""
                return await run(task, model)

            return run_in_process
        assert pool is not None
        return partial(pool.attempt, task.workflow)


class _RunningUnit:
    """The rollouts of a unit under way: who may run now, what has ended, and who is not waited for any longer."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        plan: _Plan,
        queue: RequestQueue | None,
        explorer: ExplorerConfig,
        on_group: Callable[[int, list[Experience]], None],
        places: SharedPlaces | None,
        on_admitted: Callable[[], None],
    ) -> None:
        """queue: None: the policy is asked without one; places: None: it has its own."""
        self._rollouts = rollouts
        self._plan = plan
        self._queue = queue
        self._over_rollout = explorer.over_rollout
        self._on_group = on_group
        limits = {name: found.max_concurrent for name, found in plan.workflows.items() if found.max_concurrent}
        self._shares_places = places is not None
        self._places, self._on_admitted = places or SharedPlaces({}), on_admitted
        self._places.limit(limits | {_SANDBOX: explorer.sandbox.max_processes})
        # An event for each: who may run is decided by the places, in their order, and not by who wakes first.
        self._admitted = {rollout.key: asyncio.Event() for rollout in rollouts}
        self._num_admitted = 0
        self._all_admitted = asyncio.Event()
        self._task_began: dict[int, float] = {}
        """Time at which the first rollout of each task was admitted."""
        self._of_task: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            self._of_task.setdefault(rollout.key.task_number, []).append(rollout)
        self._experiences: dict[int, dict[RolloutKey, list[Experience]]] = {number: {} for number in self._of_task}
        """Experiences of each task's rollouts that have ended."""
        self._task_times_s: list[float] = []
        self._num_needed = num_tasks_needed(self._over_rollout, len(self._of_task))
        self._enough = asyncio.Event()
        """Set when so many tasks are done that the others' time runs."""

    async def run(self) -> UnitOutcome:
        """Run all of them. Raises: ExceptionGroup: an engine, or what starts sandboxes, is gone."""
        # All of them first, so that the first call of the engine waits for all of them.
        for rollout in self._rollouts:
            kinds = self._plan.kinds(rollout.task)
            self._places.enter((self, rollout.key), kinds, partial(self._admit, rollout.key))
        try:
            await self._run_all()
        finally:  # also of those that were cancelled before they began
            for rollout in self._rollouts:
                self._places.leave((self, rollout.key))
        # By number and not as they ended, so that the unit is the same rows whatever was quicker.
        experiences = [each for number in sorted(self._experiences) for each in self._group(number)]
        times = [rollout.times for rollout in self._rollouts]
        engine_s = 0.0 if self._queue is None else self._queue.busy_s
        return UnitOutcome(experiences, times, self._task_times_s, engine_s)

    async def _run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(rollout)) for rollout in self._rollouts]
            if self._over_rollout.ratio > 0:
                await self._enough.wait()
                if self._shares_places:
                    # Not while some wait for others' slots: those would be called off before they began.
                    await self._all_admitted.wait()
                # Enough tasks are done: the others have a while, and what still runs then is called off.
                wait_s = self._over_rollout.wait_after_min
                await asyncio.wait(running, timeout=wait_s)
                done = f"{self._num_needed} of {len(self._of_task)} tasks were done"
                for rollout, task in zip(self._rollouts, running, strict=True):
                    if not task.done():
                        # First the reason: the rollout then takes its cancellation for a result.
                        rollout.called_off = f"called off {wait_s:g} s after {done} (explorer.over_rollout)"
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
            # Those that come in its place first: so calls wait for them, whatever else happens in this pass.
            self._places.leave((self, rollout.key))
            if self._queue is not None:
                self._queue.leave(rollout.key)
        number = rollout.key.task_number
        ended, siblings = self._experiences[number], self._of_task[number]
        ended[rollout.key] = experiences
        # Handed on as a whole group: advantages compare siblings.
        if len(ended) < len(siblings):
            return
        group_reward = self._plan.workflows[rollout.task.workflow].group_reward
        if group_reward is not None:
            ended.update(await rollout.reward_group(group_reward, ended))
        if not any(sibling.called_off for sibling in siblings):
            self._task_times_s.append(time.perf_counter() - self._task_began[number])
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
        # From here on the group may be committed, also when the rest of the unit is lost.
        self._on_group(number, self._group(number))

    def _group(self, number: int) -> list[Experience]:
        # Experiences of a task, ordered by rollout and turn.
        ended = self._experiences[number]
        return [experience for key in sorted(ended) for experience in ended[key]]


def num_tasks_needed(over_rollout: OverRolloutConfig, num_tasks: int) -> int:
    """Tasks of a work unit that must be done before the time of the others begins to run.

    Meanings as in Trinity-RFT's `explorer.over_rollout`.
    """
    return math.ceil(num_tasks * (1 - over_rollout.ratio))


Result = TypeVar("Result")


log = logging.getLogger(__name__)


class SharedLoop:
    """Example: SharedLoop().submit(run_work_unit(...)).result()"""

    def __init__(self) -> None:
        """Starts the thread, which ends with the process."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="rollouts", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run it beside the others. From any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs on it, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it cancels what is left
            runner.get_loop()
            asyncio.set_event_loop(self._loop)
            while True:
                try:
                    return self._loop.run_forever()
                # The watchdog's, which came after the code that it was for had returned: the others go on.
                except BlockedLoopTimeout:
                    log.warning("a workflow blocked the event loop and went on by itself")
