"""Dask task of an explorer worker: rolls out one work unit and commits it, as a shard or in parts.

It waits for publication of the weights, with a deadline, and for the engine. The Dask task is idempotent: tasks, seeds
and shard names are functions of its arguments, and a committed unit does not run again. It returns, which acknowledges
it to Dask, only after its shards are durable. The worker process keeps only a cache between units (worker_state.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from distributed import get_client, get_worker, secede

from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.buffer.log.shard import Part, done_units
from rftdask.buffer.log.writer import UnitWriter
from rftdask.config import Config
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.explorer import OverRolloutConfig
from rftdask.data.images import images_in
from rftdask.engines.base import POLICY
from rftdask.engines.client import EngineClient
from rftdask.engines.spec import engine_spec, sampling_params
from rftdask.errors import StorageError, WaitTimeout
from rftdask.processes.dask_task import host_of, make_cancel_check, workers_of
from rftdask.rollouts.concurrency_limits import SLOT, SharedSlots
from rftdask.rollouts.policy.remote_model import RemoteModel
from rftdask.rollouts.runner import TextEngine, UnitOutcome, run_work_unit
from rftdask.rollouts.work_units import EngineRequest, RolloutResult, RolloutTask, Sums, auxiliary_sums, summarize_unit
from rftdask.rollouts.worker_state import WorkerCache, text_engine
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.actor import SyncHandle
from rftdask.synchronizer.node_cache import Transport
from rftdask.synchronizer.published import (
    WEIGHTS_POINTER,
    Published,
    latest_published,
    read_checkpoint_weights,
    read_published,
)
from rftdask.synchronizer.styles import WeightRequirement
from rftdask.synchronizer.transports.dask_broadcast import dask_transport, serve_blocks

EXPLORER_RESOURCE = "explorer"
BEGAN_TOPIC = "rftdask-began"
"""Dask topic of (address, key): a worker has begun this task, so that it is known what ran on a lost worker."""
ADMITTED_TOPIC = "rftdask-admitted"
"""Dask topic of the key of a task: all its rollouts have slots and another slot is free, so its worker can take another
task."""
_POLL_INTERVAL_S = 0.5
"""Seconds between checks whether a unit has ended, whose end frees a slot."""
_MAX_WAIT_FIXED_S = 5.0
"""Seconds that a call of the engine waits for rollouts that do something else, in style fixed, where timing must not
decide which requests share a call: longer than any step of a usual workflow. See LockstepQueue."""
_cache = WorkerCache()


def run_rollouts(unit: RolloutTask) -> RolloutResult:
    """Roll out one work unit and commit it; see the module docstring.

    Raises: WaitTimeout: its weights were not published in time, or an engine hangs; RoleError: the engine failed;
    DataError: see read_config; OperatorError; StorageError; UserError.
    """
    worker = get_worker()
    # One unit starts at a time. Dask may send the next one while a cancelled one still uses the engine in its thread.
    with _cache.start_lock(make_cancel_check()) as start, _ending_turn():
        # First, so that the driver knows what was running if the following code kills this process.
        key = worker.get_current_task()
        worker.log_event(BEGAN_TOPIC, (worker.address, key))
        began_s = time.monotonic()
        storage = open_storage(unit.url)
        config = _cache.open(storage, unit.config_fingerprint)
        log = open_log(storage, config, unit.folder)
        # Dask runs a task again if its worker was lost between the commit and the result.
        committed = log.find_all(unit.explore_step, unit.unit_index)
        if done_units(committed):
            # The shard names contain the version of the weights; the times of that attempt are lost.
            version = max(name.max_policy_version for name in committed)
            return RolloutResult(unit.key, tuple(name.text for name in committed), version, worker.address)
        # Groups already committed by an earlier attempt that died part-way.
        committed_slots = {slot for name in committed if name.part is not None for slot in name.part.slots}
        # They run again with the others, because samples depend on the other requests in the engine.
        wanted = range(len(unit.tasks)) if unit.slots is None else set(unit.slots) - committed_slots
        slots = tuple(sorted(wanted))
        if not slots:
            return RolloutResult(unit.key, (), unit.weights.version, worker.address)
        served = _serve(storage, unit, config)

        def begin_next() -> None:
            # In this thread: Dask gives the next unit to another thread.
            start.close()
            worker.log_event(ADMITTED_TOPIC, key)
            secede()

        with (
            _cache.under_way(exact=unit.weights.exact),
            UnitWriter(
                log,
                explore_step=unit.explore_step,
                unit=unit.unit_index,
                num_tasks=len(unit.tasks),
                max_commit_delay_s=None if unit.is_eval else config.explorer.max_commit_delay_s,
                committed=committed_slots,
            ) as writer,
        ):
            groups: dict[int, list[Experience]] = {}
            filter_group = _group_filter(unit, config)

            def commit(slot: int, experiences: list[Experience]) -> None:
                groups[slot] = experiences if filter_group is None else filter_group(experiences)
                writer.add(slot, groups[slot])

            # Operators may take seconds, so they run in another thread than the rollouts of other groups.
            with _in_one_thread(commit) if filter_group is not None else nullcontext(commit) as on_group:
                outcome = _roll_out(storage, unit, slots, config, served, on_group, begin_next)
            outcome = replace(outcome, experiences=[row for slot in sorted(groups) for row in groups[slot]])
            names = writer.finish()

        result = summarize_unit(unit, outcome)
        result.sums.put(auxiliary_sums(config, outcome))
        result.sums.put({"wait_s": served.wait_s, "load_s": served.load_s, "generate_s": outcome.engine_s})
        result.sums.weights["engine_s"] = _cache.count_time(began_s)
        request_s, used_s = (0.0, 0.0) if served.engine is None else served.engine.take_use()
        if used_s:
            result.sums.put({"occupancy": request_s}, "slot_s")
            result.sums.weights["slot_s"] = used_s * _cache.num_slots
        shards, version = tuple(name.text for name in names), served.weights.version
        return replace(result, shards=shards, version=version, worker=worker.address, note=_cache.take_note())


def warm_up(run: EngineRequest) -> None:
    """Start the engines of this worker and load the newest weights, for its first unit. Raises: as `run_rollouts`."""
    with _cache.start_lock(make_cancel_check()), _ending_turn():
        storage = open_storage(run.url)
        config = _cache.open(storage, run.config_fingerprint)
        if config.is_external:
            return
        engine = _cache.ready_engine(engine_spec(config.explorer.rollout_model, config, run.threads, run.log_file))
        _cache.start_auxiliary(run.threads)
        # On a shared device the first unit loads them once it has the device lock.
        published = latest_published(storage)
        if published and not (_cache.num_under_way or engine.spec.device_lock_timeout_s or config.mode == "bench"):
            with _ending_what_hangs(engine):
                try:
                    published = engine.fetch(storage, published, 0.0, transport=_transport(storage, config))
                except StorageError:  # its holder is gone or restarting; the first unit waits for it
                    return
                engine.load(storage, published)


@contextmanager
def own_engine(run: EngineRequest, is_cancelled: Callable[[], bool]) -> Iterator[EngineClient]:
    """New engine of this worker that serves the model folder; work units wait until the block and the engine end.
    Raises: RoleError: cancelled, or the engine failed; DataError, UserError: as `run_rollouts`.
    """
    with _cache.start_lock(is_cancelled):
        config = _cache.open(open_storage(run.url), run.config_fingerprint)
        _cache.wait_until_idle()
        _cache.drop_engine()
        engine = _cache.engine(engine_spec(config.explorer.rollout_model, config, run.threads, run.log_file))
        try:
            engine.wait_ready()
            yield engine
        finally:
            _cache.drop_engine()


@dataclass(frozen=True)
class _Served:
    engine: EngineClient | None
    """None: the policy is a model behind an API."""
    weights: Published
    shares: bool
    """True if other units may start while this one runs."""
    wait_s: float = 0.0
    """Seconds of waiting for the weights to be published, and for the lock of a shared device."""
    load_s: float = 0.0
    """Seconds of starting the engine and loading weights."""


def _serve(storage: Storage, unit: RolloutTask, config: Config) -> _Served:
    # Wait until the engine has a slot for the unit, or is idle if the unit needs that, and have it serve its weights.
    if config.is_external:
        _cache.wait_until_idle()
        return _Served(None, Published(0, "", ""), shares=False)

    began = time.monotonic()
    engine = _cache.ready_engine(engine_spec(config.explorer.rollout_model, config, unit.threads, unit.log_file))
    load_s = time.monotonic() - began
    # Bits repeat in style fixed, and samples depend on the other requests in the engine. An engine that shares its
    # device with a trainer returns the device when a unit ends.
    may_overlap = config.synchronizer.sync_style != "fixed" and not engine.spec.device_lock_timeout_s
    shares = may_overlap and not unit.isolated and unit.slots is None

    # Wait for the engine before choosing weights, so that they are new when the first rollout begins.
    if shares:
        _cache.wait_for_slot()
    else:
        _cache.wait_until_idle()
    began = time.monotonic()
    published = _wait_for_weights(storage, unit, config)
    if _cache.num_under_way:
        # Load without interrupting the running units, or take the weights that they use, or wait for their end.
        may_load = config.synchronizer.load_in_flight and not (unit.weights.exact or _cache.num_exact)
        if may_load and published is not None and is_newer(published, engine.weights):
            with _ending_what_hangs(engine):
                engine.load(storage, _fetch(storage, engine, published, config), in_flight=True)
            return _Served(engine, engine.weights, shares, 0.0, load_s)
        if may_join(unit.weights, engine.weights, published):
            return _Served(engine, engine.weights, shares, 0.0, load_s)
        _cache.wait_until_idle()
        began = time.monotonic()
        published = _wait_for_weights(storage, unit, config)  # newer ones may exist by now

    # The engine stays idle as long as this unit has the start lock.
    with _ending_what_hangs(engine):
        if published is not None:
            published = _fetch(storage, engine, published, config)
        # Lock the device only now: the trainer needs it to make the weights that the lines above wait for.
        engine.acquire_device()
        waited = time.monotonic()
        if published is not None:
            engine.load(storage, published)
        elif engine.weights.version != 0:
            # Only a new engine has the weights of the model folder.
            _cache.drop_engine()
            engine = _cache.engine(engine.spec)
            engine.wait_ready()
            engine.acquire_device()
    return _Served(engine, engine.weights, shares, waited - began, load_s + time.monotonic() - waited)


def _fetch(storage: Storage, engine: EngineClient, published: Published, config: Config) -> Published:
    """Copy a version to this machine if another process holds it. Raises: StorageError; RoleError: cancelled."""
    if published.held is None or published == engine.weights:
        return published
    transport, timeout_s = _transport(storage, config), config.synchronizer.sync_timeout
    return engine.fetch(storage, published, timeout_s, transport=transport, is_cancelled=make_cancel_check())


def _transport(storage: Storage, config: Config) -> Transport | None:
    """Transport of versions that another machine holds. None: no other machine holds any."""
    if config.cluster.is_one_machine or config.sync_method == "checkpoint":
        return None
    worker = get_worker()
    if config.sync_method == "nccl":
        # Late: it needs torch, which no other method needs here.
        from rftdask.synchronizer.transports import group_broadcast

        return group_broadcast.group_transport(host_of(worker.address))
    serve_blocks(worker)
    workers = workers_of(get_client())
    peers = [address for address, info in workers.items() if info["resources"].get(EXPLORER_RESOURCE)]
    return dask_transport(storage, worker, peers)


def may_join(required: WeightRequirement, served: Published, published: Published | None) -> bool:
    """True if a unit may use the weights that its engine serves to running units. published: the weights that it would
    load into an idle engine. None: the model folder.
    """
    if served == published or (published is None and served.version == 0):
        return True
    # Older weights are fine within the requirement, which contains the staleness bound of the style, if any.
    newer = published is not None and is_newer(published, served)
    return newer and not required.exact and served.version >= required.version


def is_newer(published: Published, served: Published) -> bool:
    """True for newer weights of the same lineage. Version 0 belongs to every lineage."""
    return published.version > served.version and served.lineage in ("", published.lineage)


@contextmanager
def _ending_turn() -> Iterator[None]:
    # However the unit ends: a trainer rank may wait for the device of its engines.
    try:
        yield
    finally:
        _cache.release_device()


@contextmanager
def _ending_what_hangs(engine: EngineClient | None) -> Iterator[None]:
    # End the engines after a WaitTimeout, so that the next attempt at the unit gets new ones.
    try:
        yield
    except WaitTimeout:
        _cache.drop_hanging(engine)
        raise


def _wait_for_weights(storage: Storage, unit: RolloutTask, config: Config) -> Published | None:
    """Weights that the unit needs. None: the model folder. Raises: WaitTimeout; StorageError: they were removed."""
    version = unit.weights.version
    if version == 0 and unit.weights.exact:
        return None
    if config.mode == "bench":
        published = read_checkpoint_weights(storage, f"global_step_{version}")
        if published is None:
            raise StorageError(f"checkpoint global_step_{version} is not complete")
        return published
    # On one machine, read the pointer file first; otherwise ask the actor while it lives.
    is_near = config.cluster.is_one_machine and storage.local_file(WEIGHTS_POINTER) is not None
    handle = SyncHandle(storage, get_client(), config.synchronizer.poll_interval_s, is_near=is_near)
    timeout_s = config.synchronizer.sync_timeout
    if not unit.weights.exact:
        newest = handle.latest()
        # Version 0 takes the newest weights, which are the model folder before the first publication.
        if version == 0 or (newest is not None and newest.version >= version):
            return newest
        return handle.wait_for_version(version, timeout_s, make_cancel_check())
    # Read its folder: exactly this version is required, and the pointer may name a newer one.
    published = read_published(storage, version)
    if published is None:
        handle.wait_for_version(version, timeout_s, make_cancel_check())
        published = read_published(storage, version)
    if published is None and config.mode == "explore" and not unit.is_eval:
        # The trainer of another process keeps only its last few versions and does not know what this run needs.
        published = latest_published(storage)
    if published is None:
        raise StorageError(f"weights of version {version} were published and are gone; rollouts need them")
    return published


def _roll_out(
    storage: Storage,
    unit: RolloutTask,
    slots: tuple[int, ...],
    config: Config,
    served: _Served,
    on_group: Callable[[int, list[Experience]], None],
    begin_next: Callable[[], None],
) -> UnitOutcome:
    """Run the rollouts of the tasks at `slots`. on_group: called with a task's slot and experiences when all its
    rollouts have ended; begin_next: called in this thread once all have slots, if other units may then start.
    """
    explorer = config.explorer
    tasksets = _tasksets(unit, config)
    refs = [unit.tasks[slot] for slot in slots]
    tasks = [_cache.taskset(tasksets[ref.taskset_number].name).task_or_problem(ref.epoch, ref.index) for ref in refs]
    # Write the images of the tasks to the run folder, before any row names them, and cache their tokens.
    if (processor := _cache.images()) is not None:
        _ = processor.placeholder_id  # here and not on the event loop, because it loads torch
        processor.run = storage
        processor.keep([name for task in tasks for name in images_in(task.messages)])
    if unit.is_eval:  # an evaluation waits for all its tasks, without a limit learned from others
        explorer = explorer.model_copy(update={"over_rollout": OverRolloutConfig()})
    else:
        explorer = explorer.model_copy(update={"max_timeout": _cache.timeout_s(unit.explore_step)})

    # In this thread, because it may take minutes and other units share the event loop.
    _cache.start_auxiliary(unit.threads)
    if config.models_apart:
        _cache.wait_for_shared(get_worker(), unit.config_fingerprint, unit.url)
    admitted = threading.Event()
    limits = {SLOT: explorer.slots_per_engine} if isinstance(explorer.slots_per_engine, int) else {}
    shared_slots, loop = _cache.shared() if served.shares else (SharedSlots(limits), None)

    async def run() -> UnitOutcome:
        # On the loop, because clients of models behind an API belong to the event loop that uses them.
        auxiliary = _cache.auxiliary(unit.threads)
        policy: TextEngine | RemoteModel
        if served.engine is None:
            policy = _cache.remote_model(POLICY)
        else:
            policy = text_engine(served.engine, _cache.tokenizer(), config, processor)
        return await run_work_unit(
            tasks,
            repeat_times=unit.repeat_times,
            greedy_baseline=unit.greedy_baseline,
            explore_step=unit.explore_step,
            policy=policy,
            auxiliary=auxiliary,
            explorer=explorer,
            model=config.model,
            sampling={taskset.name: sampling_params(taskset, config, unit.explore_step) for taskset in tasksets},
            weights=served.weights,
            max_wait_s=_MAX_WAIT_FIXED_S,
            on_group=lambda number, experiences: on_group(slots[number], experiences),
            fork_server=_cache.fork_server,
            shared_slots=shared_slots,
            on_admitted=admitted.set,
        )

    with _ending_what_hangs(served.engine):
        if loop is None:
            outcome = asyncio.run(run())
        else:
            running = loop.submit(run())
            running.add_done_callback(lambda _: admitted.set())
            admitted.wait()
            # A unit sent before a slot is free would wait here, while another engine may have free slots.
            while not (running.done() or shared_slots.wait_for_slot(SLOT, _POLL_INTERVAL_S)):
                pass
            begin_next()
            outcome = running.result()
    if not unit.is_eval:
        _cache.add_task_times(unit.explore_step, outcome.task_times_s)
        lengths: dict[tuple[str, int], int] = {}
        for row in outcome.experiences:
            if row.status.trainable:
                key = row.group_id, row.rollout
                lengths[key] = max(lengths.get(key, 0), len(row.tokens))
        if served.engine is not None:
            _cache.add_lengths([*lengths.values()], served.engine.cache_tokens)
    return outcome


def _group_filter(unit: RolloutTask, config: Config) -> Callable[[list[Experience]], list[Experience]] | None:
    section = config.data_processor.experience_pipeline
    if section.stage != "commit" or not section.operators or unit.is_eval:
        return None
    from rftdask.buffer.batches.operator_pipeline import filter_experiences  # late: it needs torch

    operators, baseline = _cache.operators(), unit.repeat_times if unit.greedy_baseline else None

    def filter_group(experiences: list[Experience]) -> list[Experience]:
        with _cache.operators_lock:
            return filter_experiences(operators, experiences, baseline)

    return filter_group


@contextmanager
def _in_one_thread(
    function: Callable[[int, list[Experience]], None],
) -> Iterator[Callable[[int, list[Experience]], None]]:
    """Run the calls of `function` one after another in a thread. The end of the block waits for them, and raises the
    first error. If the block raises, calls that have not started are dropped.
    """
    calls: list[Future[None]] = []
    with ThreadPoolExecutor(1, "operators") as thread:
        try:
            yield lambda slot, experiences: calls.append(thread.submit(function, slot, experiences))
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            raise
    for call in calls:
        call.result()


def commit_poisoned(
    log: ExperienceLog, unit: RolloutTask, config: Config, slots: Sequence[int], error: str
) -> RolloutResult:
    """Commit the rollouts of the tasks at `slots` with status poisoned and the reason, without running them."""
    tasksets = _tasksets(unit, config)
    experiences = [
        Experience(
            taskset=tasksets[unit.tasks[slot].taskset_number].name,
            epoch=unit.tasks[slot].epoch,
            task_index=unit.tasks[slot].index,
            rollout=rollout,
            explore_step=unit.explore_step,
            status=Status.POISONED,
            min_policy_version=unit.weights.version,
            max_policy_version=unit.weights.version,
            error=error,
        )
        for slot in slots
        for rollout in range(unit.repeat_times + unit.greedy_baseline)
    ]
    # A part names its slots, so that the rest of the unit still counts as missing.
    part = None if len(slots) == len(unit.tasks) else Part(tuple(slots), len(unit.tasks))
    name = log.commit(experiences, explore_step=unit.explore_step, unit=unit.unit_index, part=part)
    tasks = sorted({experience.group_id for experience in experiences})
    num_rollouts = len(slots) * unit.repeat_times
    return RolloutResult(
        unit.key,
        (name.text,),
        unit.weights.version,
        "",
        num_rollouts=num_rollouts,
        sums=Sums({"failed": (num_rollouts, "rollouts")}, {"rollouts": num_rollouts}),
        note=f"task {', '.join(tasks)} crashed its workers and was set aside: {error}",
    )


def _tasksets(unit: RolloutTask, config: Config) -> Sequence[TasksetConfig]:
    source = config.buffer.explorer_input
    return source.eval_tasksets if unit.is_eval else source.train_tasksets
