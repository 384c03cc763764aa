"""Rollouts: the Dask task of an explorer worker. It runs one rollout batch and commits it, as one shard or in parts.

The task is idempotent: its tasks, seeds and the name of what it writes are functions of its spec, and a batch that is
committed already is not run again. It is acknowledged, by returning, only after its shards are durable. What the worker
process keeps between tasks (engine, tokenizer, tasksets) is a cache.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import get_client, get_worker

from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.buffer.log.shard import Part, done_batches
from rftdask.buffer.log.writer import BatchWriter
from rftdask.config import Config, load_config
from rftdask.data.task_schedule import TaskRef
from rftdask.data.tasksets import Taskset
from rftdask.data.tokenizer import load_tokenizer
from rftdask.engines.base import SamplingParams
from rftdask.engines.client import EngineClient, EngineSpec
from rftdask.engines.options import engine_options
from rftdask.errors import DataError, OperatorError, StorageError, WaitTimeout
from rftdask.explorer.task_order import taskset_spec
from rftdask.explorer.worker_cache import (
    Companions,
    auxiliary_sampling,
    external_policy,
    generates_as,
    remote_auxiliary,
    sandbox_options,
)
from rftdask.processes.child import LOG_LEVEL
from rftdask.processes.dask_task import make_called_off
from rftdask.rollouts.attempt import RolloutDefaults, RolloutTimes, ServedWeights
from rftdask.rollouts.policy.recording import PromptLimits
from rftdask.rollouts.policy.remote import RemoteModel, ServedRemote
from rftdask.rollouts.runner import AuxiliaryEngine, Engines, UnitOutcome, run_work_unit
from rftdask.rollouts.timeouts import OverRollout, pass_rates
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.actor import SyncHandle
from rftdask.weights.published import Published, read_checkpoint_weights, read_published

EXPLORER_RESOURCE = "explorer"
BEGAN_TOPIC = "rftdask-began"
"""Where a worker says which task it has begun: (address, key). So it is known what was running when it is lost."""
_EXTRA_TIME_S = 60.0
_MAX_WAIT_FIXED_S = 5.0
"""Where which requests share a call of the engine must not depend on timing: for rollouts that are busy elsewhere,
before a call goes out without them; longer than any step of a usual workflow. See LockstepQueue."""


@dataclass(frozen=True)
class RolloutSpec:
    """One rollout batch: everything that decides what it gives, save the weights if `exact` is False."""

    url: str
    """Of the run folder."""
    config: Mapping[str, Any]
    folder: str
    """Log to commit to: "experiences", or "eval/<taskset>"."""
    explore_step: int
    """For evaluations: the policy version."""
    batch: int
    tasks: tuple[TaskRef, ...]
    repeat_times: int
    greedy_baseline: bool
    """One more rollout of each task, at temperature 0: rollout number `repeat_times`."""
    version: int
    """Policy version it needs."""
    exact: bool
    """True: with that version and no other; False: with it or any newer."""
    threads: int
    log_file: str | None
    slots: tuple[int, ...] | None = None
    """Places of the only tasks to run, of those that are not committed; None: all, so that they sample side by side."""

    @property
    def is_eval(self) -> bool:
        return self.folder.startswith("eval/")

    @property
    def key(self) -> tuple[str, int, int]:
        return self.folder, self.explore_step, self.batch


@dataclass(frozen=True)
class RolloutResult:
    """What the driver is told: counts and times; the experiences are on storage."""

    key: tuple[str, int, int]
    shards: tuple[str, ...]
    version: int
    worker: str
    num_rollouts: int = 0
    num_by_status: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    """Response tokens."""
    num_bytes: int = 0
    """Of all that was committed: tokens, logprobs and text, before any encoding."""
    reward_sum: float = 0.0
    num_rewards: int = 0
    metric_sums: Mapping[str, float] = field(default_factory=dict)
    time_wait_s: float = 0.0
    """For the weights to be published."""
    time_load_s: float = 0.0
    """Engine start and weights."""
    time_generate_s: float = 0.0
    time_s: float = 0.0
    rollout_time_sums: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name of a field of RolloutTimes, summed over the rollouts."""
    pass_rates: Mapping[str, float] = field(default_factory=dict)
    """pass@k by name, mean over the tasks."""
    note: str = ""
    """What people should know, such as that the engine had died."""


class _Resources:
    """What a worker process keeps between tasks. Tasks of one process take turns."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._engine: EngineClient | None = None
        self._tasksets: dict[str, Taskset] = {}
        self._run: tuple[str, str] | None = None
        self.config: Config | None = None
        self._tokenizer: Any = None
        self._note = ""
        self.companions = Companions()

    def open(self, spec: RolloutSpec) -> Config:
        """The config of the task's run; what belongs to another run is dropped."""
        run = (spec.url, str(spec.config))
        if self.config is None or self._run != run:
            self.config = load_config(spec.config)
            self._run = run
            self._tasksets = {}
            self._tokenizer = None
            self.companions.close()
        return self.config

    def tokenizer(self) -> Any:
        assert self.config is not None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config)
        return self._tokenizer

    def engine(self, spec: EngineSpec) -> EngineClient:
        """A living engine of `spec`, started if need be; it may still be loading its model."""
        if self._engine is not None and not self._engine.alive():
            self._note = "an engine had died; a new one takes its place"
        if self._engine is not None and (self._engine.spec != spec or not self._engine.alive()):
            self._engine.close()
            self._engine = None
        if self._engine is None:
            self._engine = EngineClient(spec)
        return self._engine

    def drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def take_note(self) -> str:
        """What happened since the last call that people should know."""
        note, self._note = self._note, ""
        return note

    def taskset(self, name: str) -> Taskset:
        assert self.config is not None
        if name not in self._tasksets:
            source = self.config.buffer.explorer_input
            found = [t for t in (*source.train_tasksets, *source.eval_tasksets) if t.name == name]
            if not found:
                raise DataError(f"no taskset is called {name!r}")
            self._tasksets[name] = Taskset(taskset_spec(found[0]))
        return self._tasksets[name]


_resources = _Resources()


def run_rollouts(spec: RolloutSpec) -> RolloutResult:
    """Run one rollout batch and commit it; see the module's text.

    Raises: WaitTimeout: its weights were not published in time, or an engine hangs; RoleError: the engine failed;
    OperatorError; StorageError; UserError.
    """
    worker = get_worker()
    with _resources.lock:
        worker.log_event(BEGAN_TOPIC, (worker.address, worker.get_current_task()))
        began = time.perf_counter()
        storage = open_storage(spec.url)
        config = _resources.open(spec)
        log = open_log(storage, config, spec.folder)
        committed = log.find_all(spec.explore_step, spec.batch)
        if done_batches(committed):
            version = max(name.max_policy_version for name in committed)
            return RolloutResult(spec.key, tuple(name.text for name in committed), version, worker.address)
        held = {slot for name in committed if name.part is not None for slot in name.part.slots}
        # All of them run again all the same: what an engine samples depends on what it samples beside it.
        slots = tuple(range(len(spec.tasks)) if spec.slots is None else (s for s in spec.slots if s not in held))
        if not slots:
            return RolloutResult(spec.key, (), spec.version, worker.address)
        engine = tokenizer = None
        started = waited = time.perf_counter()
        if not config.is_external:
            engine = _resources.engine(engine_spec(config, spec.threads, spec.log_file))
            tokenizer = _resources.tokenizer()  # while the engine's process loads the model
            engine.wait_ready()
            started = time.perf_counter()
            published = _weights(storage, spec, config)
            waited = time.perf_counter()
            with _ending_what_hangs():
                engine = _load(engine, storage, published)
        loaded = time.perf_counter()
        with BatchWriter(
            log,
            explore_step=spec.explore_step,
            batch=spec.batch,
            num_tasks=len(spec.tasks),
            flush_age_s=None if spec.is_eval else config.explorer.flush_age_s,
            committed=held,
        ) as writer:
            pipeline = _Pipeline(spec, config, writer.add)
            outcome = _run(spec, slots, config, engine, tokenizer, pipeline.add)
            outcome = replace(outcome, experiences=pipeline.finish())
            names = writer.finish()
        return _result(
            spec,
            tuple(name.text for name in names),
            outcome,
            version=0 if engine is None else engine.weights.version,
            time_wait_s=waited - started,
            time_load_s=started - began + loaded - waited,
            time_generate_s=outcome.engine_s,
            time_s=time.perf_counter() - began,
            note=_resources.take_note(),
        )


@contextmanager
def _ending_what_hangs() -> Iterator[None]:
    """Who runs the batch again is to find other engines."""
    try:
        yield
    except WaitTimeout:
        _resources.drop_engine()
        _resources.companions.close()
        raise


def _load(engine: EngineClient, storage: Storage, published: Published | None) -> EngineClient:
    """The engine that serves `published`, or the model folder as it is; the same one unless that takes a new one."""
    if published is not None:
        engine.load(storage, published)
    elif engine.weights.version != 0:
        # Back to the start: only a fresh engine has the weights of the model folder.
        _resources.drop_engine()
        engine = _resources.engine(engine.spec)
        engine.wait_ready()
    return engine


def engine_spec(config: Config, threads: int, log_file: str | None) -> EngineSpec:
    """The engine a stage's rollouts run on."""
    model = config.explorer.rollout_model
    env = tuple(sorted({**config.explorer.env_vars, LOG_LEVEL: config.log.level}.items()))
    return EngineSpec(model.engine_type, config.model.model_path, engine_options(model, config), threads, log_file, env)


def _weights(storage: Storage, spec: RolloutSpec, config: Config) -> Published | None:
    """What to serve; None for the model folder as it is."""
    timeout_s = config.synchronizer.sync_timeout
    handle = SyncHandle(storage, get_client(), config.synchronizer.poll_interval_s)
    if not spec.exact:
        newest = handle.latest()
        if newest is None and spec.version == 0:
            return None
        return (
            newest
            if newest is not None and newest.version >= spec.version
            else handle.wait_for_version(spec.version, timeout_s, make_called_off())
        )
    if spec.version == 0:
        return None
    if config.mode == "bench":
        published = read_checkpoint_weights(storage, f"global_step_{spec.version}")
        if published is None:
            raise StorageError(f"checkpoint global_step_{spec.version} is not complete")
        return published
    published = read_published(storage, spec.version)
    if published is None:
        handle.wait_for_version(spec.version, timeout_s, make_called_off())
        published = read_published(storage, spec.version)
    if published is None:
        raise StorageError(f"weights of version {spec.version} were published and are gone; rollouts need them")
    return published


def _run(
    spec: RolloutSpec,
    slots: tuple[int, ...],
    config: Config,
    engine: EngineClient | None,
    tokenizer: Any,
    on_group: Callable[[int, list[Experience]], None],
) -> UnitOutcome:
    """engine: None: the policy is a model behind an API."""
    tasksets = _names(spec, config)
    refs = [spec.tasks[slot] for slot in slots]
    tasks = [_resources.taskset(tasksets[ref.taskset_number]).task(ref.epoch, ref.index) for ref in refs]
    companions, explorer = _resources.companions, config.explorer
    # An evaluation's tasks are no measure of the others', and all of them count.
    limit_s = explorer.max_timeout if spec.is_eval else companions.timeout_s(config, spec.explore_step)
    over_rollout = OverRollout() if spec.is_eval else OverRollout(**explorer.over_rollout.model_dump())
    weights = (
        ServedWeights(0, "") if engine is None else ServedWeights(engine.weights.version, engine.weights.content_hash)
    )

    async def run() -> UnitOutcome:
        return await run_work_unit(
            tasks,
            repeat_times=spec.repeat_times,
            greedy_baseline=spec.greedy_baseline,
            explore_step=spec.explore_step,
            engines=_engines(spec, config, engine, tokenizer),
            defaults=_defaults(config, limit_s),
            weights=weights,
            max_wait_s=_MAX_WAIT_FIXED_S,
            over_rollout=over_rollout,
            on_group=lambda number, experiences: on_group(slots[number], experiences),
            fork_server=companions.fork_server,
        )

    with _ending_what_hangs():
        outcome = asyncio.run(run())
    if not spec.is_eval:
        companions.took(spec.explore_step, outcome.task_times_s)
    return outcome


def _engines(spec: RolloutSpec, config: Config, engine: EngineClient | None, tokenizer: Any) -> Engines:
    """What answers the rollouts of one event loop, which runs; see _run."""
    timeout_s = config.explorer.max_timeout + _EXTRA_TIME_S
    auxiliary: dict[str, AuxiliaryEngine | ServedRemote] = dict(
        _resources.companions.auxiliary(config, spec.threads, timeout_s)
    )
    for name, remote in remote_auxiliary(config).items():
        auxiliary[name] = ServedRemote(RemoteModel(remote), auxiliary_sampling(config))
    external = external_policy(config)
    if external is not None:
        return Engines(None, None, auxiliary=auxiliary, remote=RemoteModel(external))
    assert engine is not None

    async def logprobs_batch(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return await asyncio.to_thread(engine.logprobs, pairs, timeout_s)

    return Engines(generates_as(config, engine, timeout_s), tokenizer, logprobs_batch, auxiliary)


class _Pipeline:
    """Hands groups on to be committed, after the operators if they run before the commit."""

    def __init__(self, spec: RolloutSpec, config: Config, add: Callable[[int, list[Experience]], None]) -> None:
        section = config.data_processor.experience_pipeline
        self._add = add
        self._groups: dict[int, list[Experience]] = {}
        self._error: OperatorError | None = None
        self._filter = None
        if section.stage == "commit" and section.operators and not spec.is_eval:
            # Late: it needs torch, which this process does without unless there are operators.
            from rftdask.buffer.batches.operator_pipeline import filter_experiences, operators_of

            baseline = spec.repeat_times if spec.greedy_baseline else None
            operators = operators_of(config)
            self._filter = lambda experiences: filter_experiences(operators, experiences, baseline)

    def add(self, slot: int, experiences: list[Experience]) -> None:
        try:
            self._groups[slot] = experiences if self._filter is None else self._filter(experiences)
        except OperatorError as error:  # raised by `finish`: here it would cancel the rollouts beside it
            self._error = self._error or error
            return
        self._add(slot, self._groups[slot])

    def finish(self) -> list[Experience]:
        """All experiences as they are committed. Raises: OperatorError: of the first group that it failed on."""
        if self._error is not None:
            raise self._error
        return [experience for slot in sorted(self._groups) for experience in self._groups[slot]]


def set_aside(log: ExperienceLog, spec: RolloutSpec, config: Config, slots: Sequence[int], error: str) -> RolloutResult:
    """Commit, without running them, the rollouts of the tasks at `slots` as poisoned, with the reason."""
    names = _names(spec, config)
    experiences = [
        Experience(
            taskset=names[spec.tasks[slot].taskset_number],
            epoch=spec.tasks[slot].epoch,
            task_index=spec.tasks[slot].index,
            rollout=rollout,
            explore_step=spec.explore_step,
            status=Status.POISONED,
            min_policy_version=spec.version,
            max_policy_version=spec.version,
            error=error,
        )
        for slot in slots
        for rollout in range(spec.repeat_times + spec.greedy_baseline)
    ]
    whole = len(slots) == len(spec.tasks)
    part = None if whole else Part(tuple(slots), len(spec.tasks))
    name = log.commit(experiences, explore_step=spec.explore_step, batch=spec.batch, part=part)
    tasks = sorted({experience.group_id for experience in experiences})
    return RolloutResult(
        spec.key,
        (name.text,),
        spec.version,
        "",
        num_rollouts=len(slots) * spec.repeat_times,
        num_by_status={str(Status.POISONED): len(slots) * spec.repeat_times},
        note=f"task {', '.join(tasks)} is poisonous and was set aside: {error}",
    )


def _names(spec: RolloutSpec, config: Config) -> list[str]:
    """Of the tasksets, by their number."""
    source = config.buffer.explorer_input
    return [t.name for t in (source.eval_tasksets if spec.is_eval else source.train_tasksets)]


def _defaults(config: Config, max_timeout_s: float) -> RolloutDefaults:
    model, source = config.model, config.buffer.explorer_input
    sampling = SamplingParams(
        max_tokens=model.max_response_tokens,
        temperature=model.temperature,
        top_p=model.top_p,
        top_k=model.top_k,
        min_tokens=model.min_response_tokens,
        repetition_penalty=model.repetition_penalty,
    )
    keys = ("temperature", "top_p", "top_k", "max_tokens")
    return RolloutDefaults(
        sampling=sampling,
        limits=PromptLimits(model.max_prompt_tokens, model.enable_prompt_truncation),
        taskset_sampling={
            t.name: {key: getattr(t.rollout_args, key) for key in keys}
            for t in (*source.train_tasksets, *source.eval_tasksets)
        },
        max_timeout_s=max_timeout_s,
        max_retry_times=config.explorer.max_retry_times,
        run_seed=config.explorer.rollout_model.seed,
        sandbox=sandbox_options(config),
    )


def _result(
    spec: RolloutSpec,
    shards: tuple[str, ...],
    outcome: UnitOutcome,
    version: int,
    note: str,
    **times: float,
) -> RolloutResult:
    statuses: dict[str, int] = {}
    sums: dict[str, float] = {}
    rollouts = [e for e in outcome.experiences if e.rollout < spec.repeat_times]  # a greedy baseline is no sample
    rewards = [e.reward for e in rollouts if e.status.trainable and e.reward is not None]
    rewards_by_group: dict[str, list[float]] = {}
    for experience in rollouts:
        if experience.turn == 0 and experience.status.trainable and experience.reward is not None:
            rewards_by_group.setdefault(experience.group_id, []).append(experience.reward)
        statuses[str(experience.status)] = statuses.get(str(experience.status), 0) + 1
        if experience.status.trainable:
            for name, value in experience.metrics.items():
                sums[name] = sums.get(name, 0.0) + value
    return RolloutResult(
        spec.key,
        shards,
        version,
        get_worker().address,
        num_rollouts=len(rollouts),
        num_by_status=statuses,
        num_tokens=sum(len(e.tokens) - e.prompt_length for e in rollouts),
        num_bytes=sum(_payload_bytes(e) for e in outcome.experiences),
        reward_sum=float(sum(rewards)),
        num_rewards=len(rewards),
        metric_sums=sums,
        rollout_time_sums={
            name: float(sum(getattr(times, name) for times in outcome.times)) for name in RolloutTimes.names()
        },
        pass_rates=pass_rates(rewards_by_group),
        note=note,
        **times,
    )


def _payload_bytes(experience: Experience) -> int:
    numbers = 4 * len(experience.tokens) + 4 * len(experience.rollout_logprobs)
    return numbers + len(experience.prompt_text) + len(experience.response_text) + len(experience.truth)


__all__ = [
    "BEGAN_TOPIC",
    "EXPLORER_RESOURCE",
    "RolloutResult",
    "RolloutSpec",
    "WaitTimeout",
    "engine_spec",
    "run_rollouts",
    "set_aside",
]
