"""Explorer: the driver's loop that keeps a bounded window of work units on the explorer workers.

    schedule --> choose tasks --> roll out (work_unit_task.py, on a worker) --> commit (on the worker) --> record

A *work unit* is a fixed part of an explore step, some tasks with all their rollouts: the amount that a worker receives
at a time and that a lost worker costs at most. `Explorer.run` contains the whole loop. Its parts:

- choose: waits until all explore steps from which the unit's weights are trained are committed, and while the unread
  experiences exceed the limits; the trainer's next ledger entry unblocks it.
- roll out and commit: done by the workers, which wait for the weights to be published, with a deadline. The window of
  units that wait for slots is 1.5 per engine plus one, so that no engine waits for the driver. A unit leaves it when
  its result arrives. Where units overlap, the window is one per engine, and a unit leaves it when all its rollouts have
  slots and another slot is free. The next unit then goes to a worker with room, and does not wait behind the long
  responses of one engine while another is idle.
- record: a step whose units are all committed yields a row of metrics and an event. A unit whose worker was lost runs
  again as crash_suspects.py decides.

Invariants: a unit is submitted only when every step that its weights depend on is committed, so a waiting unit cannot
block the one it waits for. The listing of the log decides which units are done. The loop has no state that storage
lacks, so it may die at any line and a new one continues. In mode explore, explorers of other names may work on the same
run: they divide the units by claims (unit_claims.py), and each runs until all units are committed.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace

from distributed import KilledWorker

from rftdask.buffer.batches.backpressure import Backpressure
from rftdask.buffer.batches.ledger import MAIN_LINEAGE, Ledger
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import NOTE_EVERY, first_open_step, note_complete
from rftdask.buffer.log.shard import done_units
from rftdask.config import Config
from rftdask.data.task_schedule import TaskRef
from rftdask.errors import (
    DamagedError,
    EngineError,
    FencedError,
    ProcessLostError,
    RftError,
    RoleError,
    StorageRefusedError,
    UserError,
)
from rftdask.explorer.autoscale import ScaleRule
from rftdask.explorer.crash_suspects import MAX_CRASHES, CrashSuspect, CrashTracker
from rftdask.explorer.dask_client import DaskClient, UnitFuture
from rftdask.explorer.evaluation import EvaluationQueue
from rftdask.explorer.task_order import make_task_order
from rftdask.explorer.unit_claims import EVALUATIONS, Claims
from rftdask.monitor.events import Evaluated, Event, Note, StepFinished
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.dask_task import LEAVING_TOPIC, fetch, workers_of
from rftdask.rollouts.work_unit_task import (
    ADMITTED_TOPIC,
    BEGAN_TOPIC,
    EXPLORER_RESOURCE,
    commit_poisoned,
    run_rollouts,
    warm_up,
)
from rftdask.rollouts.work_units import EngineRequest, RolloutResult, RolloutTask, UnitKey, step_metrics
from rftdask.run.run_folder import record_config
from rftdask.storage import Storage
from rftdask.synchronizer.published import latest_published, remove_weights_below, request_version
from rftdask.synchronizer.styles import SyncStyle, WeightRequirement, make_sync_rules

MAX_ATTEMPTS = 4
"""Attempts at a work unit that raises a temporary error. Failed rollouts and lost workers do not count."""
_TICK_S = 0.25
"""Longest wait for a result in one pass of the loop."""
_RESULT_S = 600.0
"""Seconds to fetch a result, which is small, while Dask knows of no lost worker. Then the unit is submitted again."""
_AUDIT_EVERY_S = 2.0
_SCALE_EVERY_S = 1.0
_ASK_AGAIN_S = 10.0
"""Seconds before missing workers are requested again."""
_VANISHED_S = 5.0
"""Seconds after which a unit whose allowed workers are all gone is submitted again. Dask usually reports it at once."""
_OVERLAP = 2.0**-10
"""Amount of the worker's resource that an overlapping unit takes: the slots limit the units of a worker, not Dask. A
power of two, so that sums are exact."""
_ADMITTED = "admitted "
"""Prefix of a key in the queue of events: all rollouts of the task have slots, and another slot is free."""
_EVAL_PRIORITY = 1_000_000
"""Dask priority of evaluations, above that of every explore step, which is minus its number."""

log = logging.getLogger(__name__)


@dataclass
class _Submitted:
    unit: RolloutTask
    future: UnitFuture
    allowed: Set[str]
    """Addresses of the workers that may run it."""
    sent_s: float
    seen_s: float
    """Time at which one of these workers was last connected, until the task ended."""
    fetched: Future[RolloutResult] | None = None
    """Result that is being fetched. None: the task runs, or it failed."""
    is_admitted: bool = False
    """True if all its rollouts have slots, on a worker with another free slot."""


class Explorer:
    """Runs the explore steps and evaluations of a stage: call `open`, then `run`."""

    _request: EngineRequest
    """Fields of every unit. Set by `open`."""

    def __init__(
        self,
        client: DaskClient,
        storage: Storage,
        config: Config,
        sizes: Mapping[str, int],
        *,
        num_steps: int,
        eval_versions: Sequence[int] = (),
        threads: int,
        log_file: str | None,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        trainer_ended_at: Callable[[], int | None],
        remove_old_shards: Callable[[], object] = lambda: None,
        scale: Callable[[int], None] | None = None,
        workers_asked: int = 0,
        claims: Claims | None = None,
        task: Callable[[RolloutTask], RolloutResult] = run_rollouts,
    ) -> None:
        """Reads the tasksets that are ordered by their columns; writes nothing.

        Args:
            sizes: number of tasks by name of the taskset.
            num_steps: total number of explore steps. 0: only evaluations.
            eval_versions: versions to evaluate in mode bench, in place of the published ones.
            trainer_ended_at: returns the last policy version when the trainer has ended, else None.
            scale: requests a number of explorer workers. None: the explorer uses the workers that join.
            claims: claims of units, which explorers of other names share. None: no other explorer exists.
            task: function that workers run; benchmarks replace it.
        Raises: DataError: a taskset is empty, or its columns do not fit its selector.
        """
        self._client, self._storage, self._config = client, storage, config
        self._num_steps, self._threads, self._log_file, self._task = num_steps, threads, log_file, task
        self._emit, self._cancelled, self._trainer_ended_at = emit, cancelled, trainer_ended_at
        self._remove_old_shards, self._scale = remove_old_shards, scale
        self._scale_rule = ScaleRule(config.explorer.fewest_workers, config.explorer.most_workers, asked=workers_asked)
        self._scaled_s = 0.0
        """Time of the last request for workers."""
        self._metrics = {role: MetricsWriter(storage, role) for role in ("explorer", "eval")}
        self._log = open_log(storage, config)
        self._claims, self._evaluates = claims, claims is None
        """True if this explorer makes the evaluations."""
        self._rules = make_sync_rules(config)
        self._overlaps = self._rules.style is not SyncStyle.FIXED
        self._follows_trainer = config.has_both_roles
        self._order = make_task_order(storage, self._log, config, sizes) if num_steps else None
        self._evals = EvaluationQueue(storage, config, sizes, eval_versions, self._make_unit, self._record_evaluation)
        self._crashes = CrashTracker()
        self._backpressure = Backpressure(config, Ledger(storage, MAIN_LINEAGE))
        self._is_full = False
        """True if back-pressure kept the last unit from beginning."""
        # Completed and running units. A unit of training is identified by (explore step, unit_index).
        self._done: set[tuple[int, int]] = set()
        self._complete = 0
        """Last step up to which all units are committed."""
        self._noted = 0
        """Last value of `_complete` that was stored."""
        self._step_ended = 0.0
        """Time at which the last explore step completed, or the loop began."""
        self._begun: set[tuple[int, int]] = set()
        """Units of training that were chosen and are not committed, running or not."""
        self._cursor = (1, 0)
        """First unit that may be left to choose."""
        self._under_way: dict[str, _Submitted] = {}
        """Submitted units by the key of their Dask task."""
        self._warm: set[str] = set()
        """Addresses of the workers that receive units."""
        self._warming: dict[str, UnitFuture] = {}
        """Running warm-up tasks by address of the worker."""
        self._retry: list[RolloutTask] = []
        self._num_attempts: dict[UnitKey, int] = {}
        self._results: dict[int, list[RolloutResult]] = {}
        """Results of units by explore step, until the step is complete."""
        self._ended: queue.Queue[str] = queue.Queue()
        """Events from any thread: keys of ended tasks, `_ADMITTED` + keys of admitted ones, "" to wake the loop."""

        self._newest = 0
        """Newest policy version known to be published."""
        self._pinned = self._pinned_at = 0
        """Version that steps run with until the next boundary of the sync style, and the step up to which boundaries
        were checked."""

        self._num_quarantined, self._audited_s = 0, 0.0

    def open(self) -> None:
        """Read which units are done, and remove the seal of a log that will grow. Call it before the trainer starts,
        which would end at the old seal.
        """
        fingerprint = record_config(self._storage, self._config)
        self._request = EngineRequest(self._storage.url, fingerprint, self._threads, self._log_file)
        # Before the log is read: a later seal is that of another explorer, which has completed the rest.
        try:
            was_sealed = self._log.sealed_at() is not None
        except DamagedError:
            was_sealed = True
        self._read_log()
        # The run was resumed with more steps.
        if was_sealed and self._complete < self._num_steps:
            self._log.unseal()

    def run(self) -> None:
        """Run until all steps and evaluations are done, or until cancelled.

        Raises: RoleError: a unit failed repeatedly, or workers are lost whatever they run; FencedError; UserError.
        """
        if self._evaluates:
            self._evals.read()
        self._look_for_weights()
        self._client.subscribe_topic(BEGAN_TOPIC, lambda message: self._crashes.began(*message[1]))
        self._client.subscribe_topic(LEAVING_TOPIC, lambda message: self._crashes.leaves(message[1]))
        self._client.subscribe_topic(ADMITTED_TOPIC, lambda message: self._ended.put(f"{_ADMITTED}{message[1]}"))
        self._step_ended = time.monotonic()
        # Released only after the next units are sent: Dask would send the release first, and pause for 10 ms.
        ended: list[UnitFuture] = []
        try:
            while not self._cancelled():
                resources = {address: info["resources"] for address, info in workers_of(self._client).items()}
                workers = {a: int(of[EXPLORER_RESOURCE]) for a, of in resources.items() if EXPLORER_RESOURCE in of}
                self._warm_up(workers.keys())
                if self._claims is not None and self._claims.is_due:
                    self._look_at_others(self._claims)
                num_engines = sum(workers[address] for address in self._warm)
                window = num_engines if self._overlaps else math.ceil(1.5 * num_engines) + 1
                self._retry += self._take_vanished(workers.keys())

                # Fill the window: first evaluations, on at most half of the engines while training goes on (a single
                # engine alternates); then units that failed; then the next units of the schedule.
                if self._evaluates:
                    self._evals.add_due(self._newest, self._trainer_ended_at())
                eval_window = max(1, num_engines // 2) if self._next_unit() is not None else window
                while num_engines and self._evals.waiting and self._num_waiting(is_eval=True) < eval_window:
                    unit = self._evals.waiting.popleft()
                    self._roll_out_rest(unit, self._crashes.begin(unit))
                while self._retry and num_engines and self._num_waiting() < window:
                    self._submit(self._retry.pop(0))
                while num_engines and self._num_waiting(is_eval=False) < window and (chosen := self._choose_unit()):
                    self._begun.add((chosen.explore_step, chosen.unit_index))
                    self._roll_out_rest(chosen, self._crashes.begin(chosen))

                if self._is_over():
                    break
                ended.clear()
                self._ask_for_workers(sum(workers.values()))
                ended += self._take_ended()
                if time.monotonic() - self._audited_s > _AUDIT_EVERY_S:
                    self._audit()
        finally:
            for topic in (BEGAN_TOPIC, LEAVING_TOPIC, ADMITTED_TOPIC):
                self._client.unsubscribe_topic(topic)
            running = [submitted.future for submitted in self._under_way.values()]
            self._client.cancel([*running, *self._warming.values()], force=True)
            for writer in self._metrics.values():
                writer.flush()
            if self._claims is not None and self._evaluates:
                self._claims.give_back(EVALUATIONS)
        # Also after a cancelled loop, so that the trainer does not wait for more.
        if self._complete >= self._num_steps > 0:
            self._log.seal(self._num_steps)

    def waits_for(self) -> str:
        """Return what the loop waits for, as text for the user. Called in any thread."""
        if not self._warm:
            return "an explorer worker to join"
        # `list` copies in one step, because the loop's thread changes the dict meanwhile.
        under_way = sorted(list(self._under_way.values()), key=lambda submitted: submitted.sent_s)
        if under_way:
            unit, age_s = under_way[0].unit, time.monotonic() - under_way[0].sent_s
            oldest = f"{unit.folder} {unit.explore_step}.{unit.unit_index}"
            num_workers = f"{len(self._warm)} worker{'s' * (len(self._warm) > 1)}"
            text = f"{len(under_way)} work units on {num_workers} (the oldest, {oldest}, for {age_s:.0f} s)"
            needs = min(submitted.unit.weights.version for submitted in under_way)
            return f"{text}, which need policy version {needs}" if needs > self._newest else text
        if self._warming:
            return f"engines to start on {', '.join(list(self._warming))}"
        step = self._complete + 1
        if step > self._num_steps:
            return "the trainer to end, or evaluations"
        if self._is_full:
            return f"the trainer to read experiences, before explore step {step} may begin (back-pressure)"
        return f"newer weights than policy version {self._newest}, for explore step {step}"

    def wake(self, version: int = 0) -> None:
        """Wake the loop; `version`: a newly published version. From any thread."""
        # A lost update between two threads costs one more read of the pointer.
        self._newest = max(self._newest, version)
        self._ended.put("")

    # ---- what is done, and what is next

    def _read_log(self) -> None:
        first = first_open_step(self._storage, self._log)
        self._done = done_units([*self._log.shards(first), *self._log.removed(first)])
        self._complete = self._noted = first - 1
        self._cursor = (first, 0)
        self._advance()

    def _look_at_others(self, claims: Claims) -> None:
        # Read the units that other explorers have committed, then their claims, in this order, so that claims of
        # committed units are removed. Then take over evaluations that no explorer makes.
        first = self._complete + 1
        self._done |= done_units([*self._log.shards(first), *self._log.removed(first)])
        self._advance()
        self._record_steps()
        claims.look(self._done)
        if not self._evaluates and EVALUATIONS not in claims.others and claims.take(EVALUATIONS):
            self._evaluates = True
            self._evals.read()

    def _advance(self) -> None:
        # Advance `_complete` over the steps whose units are all committed, and store it periodically.
        while self._is_complete(self._complete + 1):
            self._complete += 1
        if self._complete >= self._noted + NOTE_EVERY:
            note_complete(self._storage, self._complete)
            self._noted = self._complete

    def _is_complete(self, step: int) -> bool:
        return all((step, unit_index) in self._done for unit_index in range(self._config.units_per_step))

    def _next_unit(self) -> tuple[int, int] | None:
        # First unit that is neither committed nor begun by any explorer. None: none is left, or the trainer has ended.
        if self._follows_trainer and self._trainer_ended_at() is not None:
            return None
        unit, moves_on = self._cursor, True
        while unit[0] <= self._num_steps:
            is_others = self._claims is not None and unit in self._claims.others
            if unit not in self._done and unit not in self._begun and not is_others:
                break
            step, unit_index = unit
            unit = (step, unit_index + 1) if unit_index + 1 < self._config.units_per_step else (step + 1, 0)
            # The cursor stays before units of other explorers, which may become free again. `_read_log` resets it when
            # units must run again.
            moves_on &= not is_others
            self._cursor = unit if moves_on else self._cursor
        return unit if unit[0] <= self._num_steps else None

    def _choose_unit(self) -> RolloutTask | None:
        # Next unit of the schedule. None: it may not begin yet, or none is left.
        upcoming = self._next_unit()
        if upcoming is None or self._order is None:
            return None
        step, unit_index = upcoming
        weights = self._weights_for(step)
        steps_needed = self._rules.explore_steps_for(weights.version)
        # A unit that waits for weights must not block the units from which they are trained.
        if (self._follows_trainer and steps_needed > self._complete) or not self._has_room(step, unit_index):
            return None
        if self._rules.style is SyncStyle.EXPLORER_DRIVEN and weights.version > self._newest:
            # Only now that its experiences are complete: it replaces the request of the previous step.
            request_version(self._storage, weights.version)
        # In style fixed the choice depends on the steps from which the weights are trained, not on timing.
        fixed = self._follows_trainer and self._rules.style is SyncStyle.FIXED
        tasks = self._order(step, steps_needed if fixed else self._complete)
        if tasks is None or (self._claims is not None and not self._claim(self._claims, upcoming)):
            return None
        size = self._config.tasks_per_unit
        part = tasks[unit_index * size : (unit_index + 1) * size]
        return self._make_unit("experiences", step, unit_index, part, self._config.algorithm.repeat_times, weights)

    def _claim(self, claims: Claims, unit: tuple[int, int]) -> bool:
        # Claim the unit for this explorer. False: another explorer claimed it, or has committed it since the last look.
        if not claims.take(unit):
            return False
        if claims.is_sole or unit not in done_units(self._log.find_all(*unit)):
            return True
        self._done.add(unit)
        claims.give_back(unit)
        return False

    def _weights_for(self, step: int) -> WeightRequirement:
        # Weights of a step. If the trainer is in another process, a step takes the newest weights.
        if self._follows_trainer:
            required = self._rules.weights_for(step)
            if required.exact or self._rules.style is SyncStyle.FULLY_ASYNC:
                return required
        elif self._rules.style is SyncStyle.FULLY_ASYNC:
            # Running units with older weights need not end for it, within the staleness bound.
            return WeightRequirement(max(0, self._newest - self._rules.staleness_bound), exact=False)
        else:
            required = WeightRequirement(0, exact=False)
        # Steps that another explorer makes are skipped here, but their boundaries count.
        passed = range(min(self._pinned_at + 1, step) if self._claims is not None else step, step + 1)
        self._pinned_at = max(self._pinned_at, step)
        if any(map(self._rules.takes_newest_at, passed)) or required.version > self._pinned:
            # Only to published versions: a newer one may replace the required version.
            self._pinned = max(self._pinned, self._newest)
        version = max(self._pinned, required.version)
        return WeightRequirement(version, exact=version == self._pinned)

    def _has_room(self, step: int, unit_index: int) -> bool:
        # True if the limits on unread experiences let the unit begin. All groups of earlier units count as written.
        num_groups = (step - 1) * self._config.buffer.batch_size + unit_index * self._config.tasks_per_unit
        self._is_full = not self._backpressure.has_room(num_groups)
        return not self._is_full

    def _is_over(self) -> bool:
        training_over = self._next_unit() is None
        if self._claims is not None and self._complete < self._num_steps:
            return False  # units of other explorers may be left to this one
        if self._complete >= self._num_steps > 0 and self._log.sealed_at() is None:
            self._log.seal(self._num_steps)  # the trainer may be waiting for more
        trainer_over = not self._follows_trainer or self._trainer_ended_at() is not None
        evals_over = not self._evaluates or self._evals.is_empty(self._newest, self._trainer_ended_at())
        return training_over and trainer_over and evals_over and not self._under_way and not self._retry

    # ---- units on their way to the workers and back

    def _make_unit(
        self,
        folder: str,
        step: int,
        unit_index: int,
        tasks: Sequence[TaskRef],
        repeats: int,
        weights: WeightRequirement,
    ) -> RolloutTask:
        return RolloutTask(
            **vars(self._request),
            folder=folder,
            explore_step=step,
            unit_index=unit_index,
            tasks=tuple(tasks),
            repeat_times=repeats,
            greedy_baseline=folder == "experiences" and self._config.algorithm.greedy_baseline,
            weights=weights,
        )

    def _roll_out_rest(self, unit: RolloutTask, suspect: CrashSuspect) -> None:
        if suspect.to_set_aside:
            error = f"{MAX_CRASHES} workers in a row were lost while it ran isolated"
            unit_log = open_log(self._storage, self._config, unit.folder)
            self._count(unit, commit_poisoned(unit_log, unit, self._config, suspect.to_set_aside, error))
            self._crashes.set_aside(unit, suspect.to_set_aside)
        if not suspect.is_over:
            self._submit(replace(unit, slots=suspect.next_slots, isolated=suspect.is_isolated))
        elif unit.is_eval:
            self._evals.finish(unit)
        else:
            done = unit.explore_step, unit.unit_index
            self._begun.discard(done)
            self._done.add(done)
            if self._claims is not None:
                self._claims.give_back(done)
            self._advance()
            self._record_steps()

    def _warm_up(self, workers: Set[str]) -> None:
        # Start the engines of workers that joined, before they receive units.
        self._warm &= workers
        for address in [address for address, future in self._warming.items() if future.status != "pending"]:
            # Also after an error, which the first unit of the worker raises again.
            del self._warming[address]
            self._warm |= {address} & workers
        for address in [address for address in self._warming if address not in workers]:
            self._client.cancel([self._warming.pop(address)], force=True)
        if not self._warm:
            # No worker is active, so units wait for the engines on the workers themselves.
            self._warm |= workers
        for address in sorted(workers - self._warm - self._warming.keys()):
            self._warming[address] = self._client.submit(
                warm_up,
                self._request,
                key=f"warm-up-{address}-{time.time_ns()}",
                resources={EXPLORER_RESOURCE: 1},
                workers=(address,),
                priority=_EVAL_PRIORITY,
                pure=False,
                retries=0,
            )
            self._warming[address].add_done_callback(lambda _: self._ended.put(""))

    def _submit(self, unit: RolloutTask) -> None:
        # The time makes the key unique, or Dask would return the result of an earlier attempt.
        key = f"rollouts-{unit.folder.replace('/', '-')}-{unit.explore_step}-{unit.unit_index}-{time.time_ns()}"
        future = self._client.submit(
            self._task,
            unit,
            key=key,
            resources={EXPLORER_RESOURCE: _OVERLAP if self._overlaps else 1},
            workers=tuple(sorted(self._warm)),
            priority=_EVAL_PRIORITY if unit.is_eval else -unit.explore_step,
            pure=False,
            retries=0,
        )
        # Before the callback is added, which another thread calls at once if the task has already ended.
        now = time.monotonic()
        self._under_way[key] = _Submitted(unit, future, frozenset(self._warm), now, now)
        future.add_done_callback(self._begin_fetch)

    def _begin_fetch(self, future: UnitFuture) -> None:
        # Fetch the result in a thread: a worker that answers slowly must not hold up the units of others.
        key = str(future.key)
        submitted = self._under_way.get(key)
        if submitted is None or future.status != "finished":
            self._ended.put(key)
            return
        submitted.fetched = fetch(future)
        submitted.fetched.add_done_callback(lambda _: self._ended.put(key))

    def _take_vanished(self, workers: Set[str]) -> list[RolloutTask]:
        # Units that wait for workers that are all gone. Dask reports only those that it had assigned.
        now, vanished = time.monotonic(), list[RolloutTask]()
        for key, submitted in list(self._under_way.items()):
            if submitted.fetched is not None:
                if submitted.future.status != "finished" or now - submitted.seen_s > _RESULT_S:
                    self._ended.put(key)  # the worker was lost with the result, or does not answer
            elif not workers.isdisjoint(submitted.allowed) or submitted.future.status != "pending":
                submitted.seen_s = now
            elif now - submitted.seen_s > _VANISHED_S:
                log.warning("work unit %s is submitted again: its workers are gone", submitted.unit.key)
                del self._under_way[key]
                self._client.cancel([submitted.future], force=True)
                vanished.append(submitted.unit)
        return vanished

    def _num_waiting(self, is_eval: bool | None = None) -> int:
        # Submitted units that wait for slots; admitted units do not hold up others. None: of both kinds.
        waiting = [submitted.unit for submitted in self._under_way.values() if not submitted.is_admitted]
        return sum(is_eval is None or unit.is_eval == is_eval for unit in waiting)

    def _take_ended(self) -> list[UnitFuture]:
        # Record ended units; wait `_TICK_S` for the first. Returns: their futures, which nothing else refers to.
        futures, timeout_s = list[UnitFuture](), _TICK_S
        while True:
            try:
                key = self._ended.get(timeout=timeout_s)
            except queue.Empty:
                return futures
            timeout_s = 0.0
            if key.startswith(_ADMITTED):
                if (admitted := self._under_way.get(key.removeprefix(_ADMITTED))) is not None:
                    admitted.is_admitted = True
                continue
            # None for "" from `wake`, and for a task that was removed before.
            if (ended := self._under_way.pop(key, None)) is None:
                continue
            unit, future = ended.unit, ended.future
            futures.append(future)
            if (result := _result_of(ended)) is not None:
                self._count(unit, result)
                self._crashes.ended(result.worker, key)
                self._roll_out_rest(unit, self._crashes.finished(unit, result.num_rollouts))
            elif not self._cancelled():
                self._take_failure(unit, future, future.exception() if future.status == "error" else None)

    def _take_failure(self, unit: RolloutTask, future: UnitFuture, error: BaseException | None) -> None:
        # Permanent failures end the run; a lost unit runs again and may become a crash suspect; temporary failures are
        # retried a few times. error: None if the worker was lost after the unit had ended.
        name, cause = f"work unit {unit.key}", f"{type(error).__name__}: {error}"
        if isinstance(error, UserError | FencedError | StorageRefusedError):
            raise error
        if isinstance(error, EngineError | ProcessLostError):
            self._crashes.engine_failed(unit, str(future.key), error)
        # The loss of an engine's process counts as that of its worker; its other errors are unrelated to the task.
        if error is None or isinstance(error, KilledWorker | ProcessLostError):
            was_running = error is not None
            if isinstance(error, KilledWorker):
                address = error.last_worker.address
                was_running = self._crashes.was_running(str(future.key), on=address)
                cause = f"its worker {address} was lost"
            elif error is None:
                finished = future.status == "finished"
                cause = "its worker was lost with the result" if finished else f"the task is {future.status}"
            suspect = self._crashes.lost(unit, was_running, cause)
            log.warning("%s runs again: %s (%s)", name, cause, suspect)
            first_line = cause.partition("\n")[0]
            if was_running and suspect.num_crashes:
                what = name if suspect.is_whole else f"an isolated task of {name}"
                losses = f"{suspect.num_crashes} of {MAX_CRASHES} losses in a row"
                self._emit(Note(f"{what} runs again ({losses}): {first_line}"))
            elif was_running and not suspect.to_set_aside:
                purpose = "to find out whether one of them crashes workers"
                self._emit(Note(f"{name} runs task by task, {purpose}: {first_line}"))
            self._roll_out_rest(unit, suspect)
            return
        if not isinstance(error, RftError | OSError):
            raise RoleError(f"{name} failed: {cause}") from error  # a bug, which would fail again
        # Storage or an engine failed temporarily; the unit has changed nothing.
        attempts = self._num_attempts[unit.key] = self._num_attempts.get(unit.key, 0) + 1
        if attempts >= MAX_ATTEMPTS:
            raise RoleError(f"{name} failed {attempts} times; the last time: {cause}") from error
        log.warning("%s failed: %s", name, cause)
        self._emit(Note(f"{name} runs again ({attempts} of {MAX_ATTEMPTS}): {cause.splitlines()[0]}"))
        self._retry.append(unit)

    # ---- record

    def _count(self, unit: RolloutTask, result: RolloutResult) -> None:
        if result.note:
            self._emit(Note(result.note))
        if unit.is_eval:
            self._evals.count(unit, result.auxiliary_sums)
        elif result.num_rollouts:  # 0 if an earlier attempt committed the unit, whose times are unknown
            self._results.setdefault(unit.explore_step, []).append(result)
            self._backpressure.add(result.num_rollouts, result.num_bytes)

    def _record_steps(self) -> None:
        # Write the metrics of complete steps, from the units that this explorer rolled out.
        for step in [step for step in self._results if self._is_complete(step)]:
            results = self._results.pop(step)
            # Steps overlap, so the time of a step begins at the end of the previous step, not at its first unit.
            began, self._step_ended = self._step_ended, time.monotonic()
            metrics = step_metrics(results, self._step_ended - began)
            named = self._config.command_name != self._config.mode
            labels = {"explorer": self._config.explorer.name} if named else {}
            self._metrics["explorer"].write(step, metrics, **labels)
            self._emit(StepFinished("explorer", step, metrics))

    def _record_evaluation(self, taskset: str, version: int, metrics: Mapping[str, float]) -> None:
        # Trinity-RFT's names in addition.
        prefixed = {f"bench/{name}": v for name, v in metrics.items()} if self._config.mode == "bench" else {}
        self._metrics["eval"].write(version, {**metrics, **prefixed}, taskset=taskset)
        # Evaluations are rare and awaited, so flush at once.
        self._metrics["eval"].flush()
        self._emit(Evaluated(version, taskset, metrics))

    # ---- now and then

    def _ask_for_workers(self, num_engines: int) -> None:
        now, before = time.monotonic(), self._scale_rule
        if self._scale is None or now - before.seen_s < _SCALE_EVERY_S:
            return
        # More workers do not help units that wait for weights on their workers. Admitted units need only the workers
        # that they have.
        admitted = [submitted for submitted in self._under_way.values() if submitted.is_admitted]
        backlog = min(num_engines, len(admitted)) + len(self._retry) + len(self._evals.waiting)
        for submitted in self._under_way.values():
            backlog += not submitted.is_admitted and submitted.unit.weights.version <= self._newest
        upcoming = self._next_unit()
        # Add units of the next steps that weights and back-pressure let begin now, up to max_workers.
        while upcoming is not None and backlog < before.max_workers and self._has_room(*upcoming):
            step, unit_index = upcoming
            if self._follows_trainer and self._rules.weights_for(step).version > self._newest:
                break
            backlog += self._config.units_per_step - unit_index
            upcoming = (step + 1, 0) if step < self._num_steps else None
        self._scale_rule = before.after(now, num_engines, backlog)
        target = self._scale_rule.target
        if target != before.target:
            self._emit(Note(f"requests {target} explorer workers: {num_engines} joined, {backlog} units are runnable"))
        elif num_engines >= target or now - self._scaled_s < _ASK_AGAIN_S:
            return
        # Repeat the request while some are missing: a nanny does not restart a worker that died while it started.
        self._scaled_s = now
        self._scale(target)

    def _audit(self) -> None:
        # Remove weights and shards that are no longer needed, and run the units of quarantined shards again.
        self._audited_s = time.monotonic()
        self._look_for_weights()
        if self._follows_trainer:
            # Keep the versions that running units, failed units, evaluations or the next step may still load.
            in_use = [submitted.unit.weights.version for submitted in self._under_way.values()]
            in_use += [unit.weights.version for unit in self._retry]
            in_use += self._evals.versions_in_use(self._newest, self._trainer_ended_at())
            if self._num_steps:
                in_use.append(self._rules.weights_for(self._complete + 1).version)
            remove_weights_below(self._storage, min([self._newest - 1, *in_use]))
            self._remove_old_shards()
        # The trainer, which reads the shards, quarantines damaged ones; their units count as not done.
        num_quarantined = self._log.num_quarantined()
        if num_quarantined != self._num_quarantined:
            self._num_quarantined = num_quarantined
            self._emit(Note(f"{num_quarantined} damaged shards were set aside; their work units run again"))
            self._read_log()

    def _look_for_weights(self) -> None:
        published = latest_published(self._storage)
        self._newest = max(self._newest, published.version if published is not None else 0)


def _result_of(ended: _Submitted) -> RolloutResult | None:
    # None: the task raised an error, or its worker was lost after it had ended, or does not answer.
    with suppress(CancelledError):
        if ended.fetched is not None and ended.fetched.done():
            return ended.fetched.result()
    return None
