"""Worker task: the Dask task of an explorer worker. It rolls out one work unit and commits it, as a shard or in parts.

Consumes: a `RolloutTask` (task numbers, seeds' origin, the version it needs), the config in the run folder, weights.
Waits for: the version to be published, with a deadline; the engine to load. Produces: shards, then a `RolloutResult`
of counts and times. The Dask task is idempotent: its tasks, its seeds and the name of what it writes are functions of
its arguments, and a unit that is committed already is not run again. It returns, which acknowledges it to Dask, only
after its shards are durable. What the worker process keeps between units is a cache (worker_cache.py).
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
from rftdask.config.schema.explorer import OverRolloutConfig
from rftdask.data.images import images_in
from rftdask.data.task import Task
from rftdask.engines.base import POLICY
from rftdask.engines.client import EngineClient, EngineSpec
from rftdask.engines.spec import engine_spec, sampling_params
from rftdask.errors import OperatorError, StorageError, WaitTimeout
from rftdask.processes.dask_task import host_of, make_cancel_check, workers_of
from rftdask.rollouts.concurrency_limits import SLOT, SharedPlaces
from rftdask.rollouts.policy.remote_model import RemoteModel
from rftdask.rollouts.runner import TextEngine, UnitOutcome, run_work_unit
from rftdask.rollouts.work_units import RolloutResult, RolloutTask, auxiliary_sums, summarize_unit
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
"""Dask topic where a worker reports which task it has begun: (address, key). So it is known what was running when the
worker is lost."""
ADMITTED_TOPIC = "rftdask-admitted"
"""Dask topic where a worker reports the key of a task all of whose rollouts have slots, and that another slot is free:
it can take another task."""
_LOOK_S = 0.5
"""Between two looks whether a unit has ended that waits for a free slot, whose end frees one."""
_MAX_WAIT_FIXED_S = 5.0
"""Time that a call of the engine waits for rollouts that are busy elsewhere, where which requests share a call must not
depend on timing (style fixed): longer than any step of a usual workflow. See LockstepQueue."""


_cache = WorkerCache()


def run_rollouts(unit: RolloutTask) -> RolloutResult:
    """Roll out one work unit and commit it; see the module's text.

    Raises: WaitTimeout: its weights were not published in time, or an engine hangs; RoleError: the engine failed;
    DataError: the run folder, as this worker sees it, lacks the config that the driver has; OperatorError;
    StorageError; UserError.
    """
    worker = get_worker()
    # One unit at a time begins. Dask may send the next one while the thread of a cancelled one still uses the engine.
    with _cache.seat(make_cancel_check()) as seat, _ending_turn():
        # Before anything that may end this process: what it was running must be known then.
        key = worker.get_current_task()
        worker.log_event(BEGAN_TOPIC, (worker.address, key))
        began_s = time.monotonic()
        storage = open_storage(unit.url)
        config = _cache.open(storage, unit.config_fingerprint)
        log = open_log(storage, config, unit.folder)
        # Dask runs a task again whose worker was lost after the commit and before the answer.
        committed = log.find_all(unit.explore_step, unit.unit_index)
        if done_units(committed):
            # The weights that sampled it, from its name; the times of that attempt are lost.
            version = max(name.max_policy_version for name in committed)
            return RolloutResult(unit.key, tuple(name.text for name in committed), version, worker.address)
        # Parts of the unit, by an attempt that was lost before it committed the rest.
        held = {slot for name in committed if name.part is not None for slot in name.part.slots}
        # All of them run again all the same: what an engine samples depends on what it samples beside it.
        slots = tuple(range(len(unit.tasks)) if unit.slots is None else (s for s in unit.slots if s not in held))
        if not slots:
            return RolloutResult(unit.key, (), unit.weights.version, worker.address)
        served = _serve(storage, unit, config)

        def begin_next() -> None:
            # In this thread: Dask gives the next unit to a thread of its own.
            seat.give_up()
            worker.log_event(ADMITTED_TOPIC, key)
            secede()

        # Roll out and commit: a group is committed when it is done or with its neighbors, see UnitWriter.
        with (
            _cache.under_way(exact=unit.weights.exact),
            UnitWriter(
                log,
                explore_step=unit.explore_step,
                unit=unit.unit_index,
                num_tasks=len(unit.tasks),
                max_commit_delay_s=None if unit.is_eval else config.explorer.max_commit_delay_s,
                committed=held,
            ) as writer,
        ):
            groups: dict[int, list[Experience]] = {}
            failures: list[OperatorError] = []
            filter_group = _group_filter(unit, config)

            def commit(slot: int, experiences: list[Experience]) -> None:
                try:
                    groups[slot] = experiences if filter_group is None else filter_group(experiences)
                    writer.add(slot, groups[slot])
                except OperatorError as error:  # raised below: here it would cancel the rollouts beside it
                    failures.append(error)

            # In a thread of their own: operators may take seconds, in which the rollouts of other groups go on.
            with _in_turn(commit) if filter_group is not None else nullcontext(commit) as on_group:
                outcome = _roll_out(storage, unit, slots, config, served, on_group, begin_next)
            if failures:
                raise failures[0]
            outcome = replace(outcome, experiences=[each for slot in sorted(groups) for each in groups[slot]])
            names = writer.finish()
        request_s, used_s = (0.0, 0.0) if served.engine is None else served.engine.take_use()
        return replace(
            summarize_unit(unit, outcome),
            shards=tuple(name.text for name in names),
            version=served.weights.version,
            worker=worker.address,
            time_wait_s=served.wait_s,
            time_load_s=served.load_s,
            time_generate_s=outcome.engine_s,
            time_s=time.monotonic() - began_s,
            time_engine_s=_cache.count_time(began_s),
            request_s=request_s,
            slot_s=used_s * _cache.num_slots,
            auxiliary_sums=auxiliary_sums(config, outcome),
            note=_cache.take_note(),
        )


@dataclass(frozen=True)
class WarmUp:
    """What a worker needs to know to start the engines of a run."""

    url: str
    """Run folder."""
    config_fingerprint: str
    threads: int
    """Threads of each engine."""
    log_file: str | None
    """File that the policy's engine writes to; None: its output is the worker's."""


def warm_up(run: WarmUp) -> None:
    """Start the engines of this worker, and load the newest weights, so that its first work unit waits for neither.

    Raises: as `run_rollouts`; the worker's first work unit tries again.
    """
    with _cache.seat(make_cancel_check()), _ending_turn():
        storage = open_storage(run.url)
        config = _cache.open(storage, run.config_fingerprint)
        if config.is_external:
            return
        engine = _cache.ready_engine(engine_spec(config.explorer.rollout_model, config, run.threads, run.log_file))
        _cache.start_auxiliary(run.threads)
        # On a device that is shared, the first unit loads in its turn.
        published = latest_published(storage)
        if published is not None and not _cache.is_busy and not engine.spec.turn_timeout_s and config.mode != "bench":
            with _ending_what_hangs(engine):
                try:
                    published = engine.fetch(storage, published, 0.0, transport=_transport(storage, config))
                except StorageError:  # it is not held any more, or not yet again; the first unit waits for it
                    return
                engine.load(storage, published)


@contextmanager
def own_engine(run: WarmUp, called_off: Callable[[], bool]) -> Iterator[EngineClient]:
    """A new engine of this worker that serves the model folder, for somebody else than work units, which wait until the
    block ends, and the engine with it. called_off: whether nobody wants it any more.

    Raises: RoleError: it was called off, or the engine failed; DataError, UserError: as `run_rollouts`.
    """
    with _cache.seat(called_off):
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
    """The engine as a unit finds it."""

    engine: EngineClient | None
    """None: the policy is a model behind an API."""
    weights: Published
    shares: bool
    """Whether other units may begin beside this one."""
    wait_s: float = 0.0
    """See `RolloutResult.time_wait_s`."""
    load_s: float = 0.0


def _serve(storage: Storage, unit: RolloutTask, config: Config) -> _Served:
    """The engine with the weights that the unit needs, once it has a slot for it or nothing else to do. In the seat."""
    began = time.monotonic()
    if config.is_external:
        _cache.wait_until_idle()
        return _Served(None, Published(0, "", ""), shares=False)
    engine = _cache.ready_engine(engine_spec(config.explorer.rollout_model, config, unit.threads, unit.log_file))
    load_s = time.monotonic() - began
    shares = units_overlap(config, engine.spec) and not unit.alone and unit.slots is None
    if shares:
        # Before it looks for weights, which should be new when its first rollout begins.
        _cache.wait_for_slot()
    else:
        _cache.wait_until_idle()
    began = time.monotonic()
    published = _wait_for_weights(storage, unit, config)
    loads = config.synchronizer.load_in_flight and shares and not unit.weights.exact and _cache.may_load_in_flight
    if _cache.is_busy and loads and published is not None and is_newer(published, engine.weights):
        with _ending_what_hangs(engine):
            engine.load(storage, _fetch(storage, engine, published, config), in_flight=True)
    elif _cache.is_busy and not may_join(unit.weights, engine.weights, published):
        _cache.wait_until_idle()
        # There may be newer ones by now.
        began = time.monotonic()
        published = _wait_for_weights(storage, unit, config)
    if _cache.is_busy:
        return _Served(engine, engine.weights, shares, 0.0, load_s)
    with _ending_what_hangs(engine):
        if published is not None:
            published = _fetch(storage, engine, published, config)
        # After the weights are there: who waits for them in its turn would wait for a trainer that waits for this
        # one's end.
        engine.take_turn()
        waited = time.monotonic()
        if published is not None:
            engine.load(storage, published)
        elif engine.weights.version != 0:
            # Back to the start: only a fresh engine has the weights of the model folder.
            _cache.drop_engine()
            engine = _cache.engine(engine.spec)
            engine.wait_ready()
            engine.take_turn()
    return _Served(engine, engine.weights, shares, waited - began, load_s + time.monotonic() - waited)


def _fetch(storage: Storage, engine: EngineClient, published: Published, config: Config) -> Published:
    """The version on this machine, if it is held elsewhere. Raises: StorageError; RoleError: called off."""
    if published.held is None or published == engine.weights:
        return published
    transport, timeout_s = _transport(storage, config), config.synchronizer.sync_timeout
    return engine.fetch(storage, published, timeout_s, transport=transport, called_off=make_cancel_check())


def _transport(storage: Storage, config: Config) -> Transport | None:
    """How a version that is held on another machine comes to this one; None: there is no other."""
    if config.cluster.is_one_machine or config.sync_method == "checkpoint":
        return None
    worker = get_worker()
    if config.sync_method == "nccl":
        from rftdask.synchronizer.transports.group_broadcast import (
            group_transport,  # late: torch, which no other method needs here
        )

        return group_transport(host_of(worker.address))
    serve_blocks(worker)
    workers = workers_of(get_client())
    peers = [address for address, told in workers.items() if told["resources"].get(EXPLORER_RESOURCE)]
    return dask_transport(storage, worker, peers)


def units_overlap(config: Config, spec: EngineSpec) -> bool:
    """Whether a unit may begin while the rollouts of others are under way in the engine.

    Not in style fixed, which repeats its bits: what an engine samples depends on what it samples beside it. Nor where
    the engine takes turns with a trainer, which comes when a unit has ended.
    """
    return config.synchronizer.sync_style != "fixed" and not spec.turn_timeout_s


def may_join(required: WeightRequirement, served: Published, published: Published | None) -> bool:
    """True if a unit may begin with the weights that its engine serves to others, which newer ones would have to end.

    published: what it would load, had it the engine for itself; None: the model folder.
    """
    if served == published or (published is None and served.version == 0):
        return True
    # An older one will do as long as the rule says so: the bound of staleness, for the styles that have one.
    newer = published is not None and is_newer(published, served)
    return newer and not required.exact and served.version >= required.version


def is_newer(published: Published, served: Published) -> bool:
    """True for newer weights of the same lineage; version 0 is before all."""
    return published.version > served.version and served.lineage in ("", published.lineage)


@contextmanager
def _ending_turn() -> Iterator[None]:
    # However the unit ends: a trainer rank may wait for the device of its engines.
    try:
        yield
    finally:
        _cache.end_turn()


@contextmanager
def _ending_what_hangs(engine: EngineClient | None) -> Iterator[None]:
    # End the engines after a WaitTimeout: whoever runs the unit again is to find other ones.
    try:
        yield
    except WaitTimeout:
        _cache.drop_hanging(engine)
        raise


def _wait_for_weights(storage: Storage, unit: RolloutTask, config: Config) -> Published | None:
    """The weights to serve; None: the model folder as it is. Raises: WaitTimeout; StorageError: they are gone."""
    version = unit.weights.version
    if version == 0 and unit.weights.exact:
        return None
    if config.mode == "bench":
        published = read_checkpoint_weights(storage, f"global_step_{version}")
        if published is None:
            raise StorageError(f"checkpoint global_step_{version} is not complete")
        return published
    # Near, by looking at the pointer first; else through the actor while it lives.
    is_near = config.cluster.is_one_machine and storage.local_file(WEIGHTS_POINTER) is not None
    handle = SyncHandle(storage, get_client(), config.synchronizer.poll_interval_s, is_near=is_near)
    timeout_s = config.synchronizer.sync_timeout
    if not unit.weights.exact:
        newest = handle.latest()
        # 0: whatever there is. Nothing published is no reason to wait, for then the model folder is what there is.
        if version == 0 or (newest is not None and newest.version >= version):
            return newest
        return handle.wait_for_version(version, timeout_s, make_cancel_check())
    # By its own folder: the pointer may have moved on, and exactly this version is wanted.
    published = read_published(storage, version)
    if published is None:
        handle.wait_for_version(version, timeout_s, make_cancel_check())
        published = read_published(storage, version)
    if published is None and config.mode == "explore" and not unit.is_eval:
        # A trainer beside this run keeps its last few versions, whatever this run still means to use.
        published = latest_published(storage)
    if published is None:
        raise StorageError(f"weights of version {version} were published and are gone; rollouts need them")
    return published


def _keep_images(storage: Storage, tasks: Sequence[Task]) -> None:
    """Have the images of tasks in the run folder, before anything that names them, and as tokens in this process."""
    processor = _cache.images()
    if processor is None:
        return
    _ = processor.placeholder_id  # here, and not on the event loop: it loads torch
    processor.run = storage
    processor.keep([name for task in tasks for name in images_in(task.messages)])


def _roll_out(
    storage: Storage,
    unit: RolloutTask,
    slots: tuple[int, ...],
    config: Config,
    served: _Served,
    on_group: Callable[[int, list[Experience]], None],
    begin_next: Callable[[], None],
) -> UnitOutcome:
    """Run the rollouts of the tasks at `slots`, side by side.

    on_group: takes the slot of a task whose rollouts have ended, and their experiences; begin_next: called in this
    thread once all rollouts have slots and another is free, if others may then begin.
    """
    model, explorer = config.model, config.explorer
    names = _taskset_names(unit, config)
    refs = [unit.tasks[slot] for slot in slots]
    tasks = [_cache.taskset(names[ref.taskset_number]).task(ref.epoch, ref.index) for ref in refs]
    _keep_images(storage, tasks)
    if unit.is_eval:  # its tasks are no measure of the others', and all of them count
        explorer = explorer.model_copy(update={"over_rollout": OverRolloutConfig()})
    else:
        explorer = explorer.model_copy(update={"max_timeout": _cache.timeout_s(unit.explore_step)})
    source = config.buffer.explorer_input
    sampling = {
        taskset.name: sampling_params(taskset, config, unit.explore_step)
        for taskset in (source.eval_tasksets if unit.is_eval else source.train_tasksets)
    }

    # Here, and not on an event loop that other units share: it may take minutes.
    _cache.start_auxiliary(unit.threads)
    if config.models_apart:
        _cache.wait_for_shared(get_worker(), unit.config_fingerprint, unit.url)
    admitted = threading.Event()
    limits = {SLOT: explorer.slots_per_engine} if isinstance(explorer.slots_per_engine, int) else {}
    places, loop = _cache.shared() if served.shares else (SharedPlaces(limits), None)

    async def run() -> UnitOutcome:
        # Made here, because the clients of models behind an API belong to the event loop that asks them.
        auxiliary = _cache.auxiliary(unit.threads)
        if served.engine is None:
            policy: TextEngine | RemoteModel = _cache.remote_model(POLICY)
        else:
            policy = text_engine(served.engine, _cache.tokenizer(), config, _cache.images())
        return await run_work_unit(
            tasks,
            repeat_times=unit.repeat_times,
            greedy_baseline=unit.greedy_baseline,
            explore_step=unit.explore_step,
            policy=policy,
            auxiliary=auxiliary,
            explorer=explorer,
            model=model,
            sampling=sampling,
            weights=served.weights,
            max_wait_s=_MAX_WAIT_FIXED_S,
            on_group=lambda number, experiences: on_group(slots[number], experiences),
            fork_server=_cache.fork_server,
            places=places,
            on_admitted=admitted.set,
        )

    with _ending_what_hangs(served.engine):
        if loop is None:
            outcome = asyncio.run(run())
        else:
            running = loop.submit(run())
            running.add_done_callback(lambda _: admitted.set())
            admitted.wait()
            # Not before there is room: what is sent here waits here, while another engine may have slots free.
            while not (running.done() or places.wait_for_room(SLOT, _LOOK_S)):
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
    """The operators, if they run before the commit: a task's experiences in, those to commit out."""
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
def _in_turn(function: Callable[[int, list[Experience]], None]) -> Iterator[Callable[[int, list[Experience]], None]]:
    """The same function, in one thread, call after call; at the end all of them are done, and what one raised is
    raised. After an error of the block those that have not begun are left out.
    """
    with ThreadPoolExecutor(1, "operators") as thread:
        calls: list[Future[None]] = []
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
    """Commit, without running them, the rollouts of the tasks at `slots` as poisoned, with the reason."""
    names = _taskset_names(unit, config)
    experiences = [
        Experience(
            taskset=names[unit.tasks[slot].taskset_number],
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
    # The driver commits them, since no worker lives through them; their rows still count in the audit.
    # A part names its slots, so that the rest of the unit still counts as missing.
    whole = len(slots) == len(unit.tasks)
    part = None if whole else Part(tuple(slots), len(unit.tasks))
    name = log.commit(experiences, explore_step=unit.explore_step, unit=unit.unit_index, part=part)
    tasks = sorted({experience.group_id for experience in experiences})
    num_rollouts = len(slots) * unit.repeat_times
    return RolloutResult(
        unit.key,
        (name.text,),
        unit.weights.version,
        "",
        num_rollouts=num_rollouts,
        num_by_status={str(Status.POISONED): num_rollouts},
        note=f"task {', '.join(tasks)} is poisonous and was set aside: {error}",
    )


def _taskset_names(unit: RolloutTask, config: Config) -> list[str]:
    # Names of the tasksets by their number.
    source = config.buffer.explorer_input
    return [t.name for t in (source.eval_tasksets if unit.is_eval else source.train_tasksets)]
