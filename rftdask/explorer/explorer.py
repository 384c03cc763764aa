"""Explorer: the driver's loop that keeps a bounded window of work units on the explorer workers.

    schedule --> choose tasks --> roll out (worker_task.py, on a worker) --> commit (there, too) --> record

A *work unit* is a fixed part of an explore step, some tasks with all their rollouts: what a worker is sent at a time,
and what a lost worker costs at most. `Explorer.run` is the whole loop; for each of its parts:

- choose: consumes the task order (a pure function of the step, or a choice that is written down) and the sync rules
  (which weights the step needs). Waits until every explore step that those weights are trained from is committed, and
  while more lies unread than the limits allow; the trainer's next ledger entry unblocks it. Produces a `RolloutTask`.
- roll out and commit: by the workers, which wait for the weights to be published, with a deadline. The window of units
  that want slots is 1.5 per engine and one more, so that no engine waits for the driver; a unit leaves it when its
  result arrives, and the next one enters. Where units overlap the window is one per engine, and a unit leaves it when
  all its rollouts have slots and another slot is free: so the next one goes where there is room, and does not wait
  behind the long responses of one engine while another has nothing to do. A worker that joins while others work is
  given units once its engine is warm.
- record: consumes results; a step whose units are all committed is a row of metrics and an event. A unit whose worker
  was lost goes back to the workers, as poison.py says.

Invariants: a unit is submitted only when every step its weights depend on is committed, so no waiting unit can block
the one it waits for. What is done is what the log's listing says; the loop keeps nothing that storage does not, so it
may die at any line and a new one goes on. In mode explore others may work on the same run, each under its name: a unit
is chosen by who claims it (claims.py), and each of them goes on until all are committed.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError
from dataclasses import replace

from distributed import KilledWorker

from rftdask.buffer.batches.backpressure import Backpressure
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.lineage import MAIN_LINEAGE
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import NOTE_EVERY, first_open_step, note_complete
from rftdask.buffer.log.shard import done_units
from rftdask.cluster.dask_client import DaskClient, UnitFuture
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
from rftdask.explorer.crash_suspects import STRIKES, PoisonTracker, Trial
from rftdask.explorer.evaluation import EvaluationQueue
from rftdask.explorer.task_order import make_task_order
from rftdask.explorer.unit_claims import EVALUATIONS, Claims
from rftdask.monitor.events import Evaluated, Event, Note, StepFinished
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.dask_task import LEAVING_TOPIC, workers_of
from rftdask.rollouts.work_unit_task import (
    ADMITTED_TOPIC,
    BEGAN_TOPIC,
    EXPLORER_RESOURCE,
    WarmUp,
    commit_poisoned,
    run_rollouts,
    warm_up,
)
from rftdask.rollouts.work_units import RolloutResult, RolloutTask, UnitKey, step_metrics
from rftdask.run.run_folder import record_config
from rftdask.storage import Storage
from rftdask.synchronizer.published import latest_published, remove_weights_below, request_version
from rftdask.synchronizer.styles import SyncStyle, WeightRequirement, make_sync_rules

MAX_ATTEMPTS = 4
"""Attempts at a work unit that raises, as for storage; failures of its rollouts and lost workers do not count."""
_TICK_S = 0.25
"""Longest wait for a result before the loop looks at everything else again."""
_RESULT_S = 10.0
"""Time to fetch a result, which is small. Dask itself would try for minutes to fetch it from a worker that died."""
_RESULT_LOOK_S = 1.0
"""Pause between two looks whether the run was cancelled, while a result is fetched."""
_AUDIT_EVERY_S = 2.0
_SCALE_EVERY_S = 1.0
_ASK_AGAIN_S = 10.0
"""Pause before workers that were asked for and are missing are asked for again."""
_VANISHED_S = 5.0
"""Time after which a unit that only workers may run that are gone is sent again; Dask usually tells of it at once."""
_OVERLAP = 2.0**-10
"""Of a worker's resource, for a unit that overlaps with others: so many may be on a worker as have slots. A power of
two, so that sums are exact."""
_ADMITTED = "admitted "
"""Before a key, in the queue of news: the task has all its slots, and leaves some."""
_EVAL_PRIORITY = 1_000_000
"""Dask priority of evaluations: above every explore step's, which is minus its number."""

log = logging.getLogger(__name__)


class Explorer:
    """Runs the explore steps and evaluations of a stage.

    Example:
        explorer = Explorer(client, storage, config, {"gsm8k": 7473}, num_steps=100, ...)
        explorer.open()
        explorer.run()
    """

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
        """Reads the tasksets that are ordered by their columns; changes nothing.

        Args:
            sizes: tasks by name of the taskset.
            num_steps: explore steps in all; 0 for evaluations only.
            eval_versions: versions to evaluate whatever is published (bench).
            threads, log_file: of the engines.
            trainer_ended_at: the last policy version, once there will be no newer one.
            remove_old_shards: removes what retention does not keep; called now and then.
            scale: asks for so many explorer workers; None: those that come are taken, and nobody is asked.
            workers_asked: workers that were asked for before.
            claims: by which the run is shared with explorers of other names; None: there are none.
            task: what runs on the workers (benchmarks have another).
        Raises: DataError: a taskset is empty, or its columns do not fit its selector.
        """
        self._client, self._storage, self._config = client, storage, config
        self._num_steps = num_steps
        self._threads, self._log_file = threads, log_file
        self._task = task
        self._emit = emit
        self._cancelled = cancelled
        self._trainer_ended_at = trainer_ended_at
        self._remove_old_shards = remove_old_shards
        self._scale = scale
        self._scale_rule = ScaleRule(config.explorer.fewest_workers, config.explorer.most_workers, asked=workers_asked)
        self._scaled_s = 0.0
        """Time at which workers were last asked for."""
        self._metrics = {role: MetricsWriter(storage, role) for role in ("explorer", "eval")}
        self._log = open_log(storage, config)
        self._claims, self._evaluates = claims, claims is None
        """Whether evaluations are this explorer's to make."""
        self._rules = make_sync_rules(config)
        self._overlaps = self._rules.style is not SyncStyle.FIXED
        self._follows_trainer = config.has_both_roles
        self._order = make_task_order(storage, self._log, config, sizes) if num_steps else None
        self._evals = EvaluationQueue(storage, config, sizes, eval_versions, self._make_unit, self._record_evaluation)
        self._poison = PoisonTracker()
        self._backpressure = Backpressure(config, Ledger(storage, MAIN_LINEAGE))
        self._config_fingerprint = ""

        # What is done and under way. (explore step, unit_index) names a unit of training.
        self._done: set[tuple[int, int]] = set()
        self._complete = 0
        """Last step up to which every unit is committed."""
        self._noted = 0
        """Step of the last note of progress."""
        self._step_ended = 0.0
        """Time at which the last explore step was complete, or the loop began."""
        self._begun: set[tuple[int, int]] = set()
        """Units of training that were chosen and are not committed, whatever happens to their workers."""
        self._cursor = (1, 0)
        """No unit before this one is left to choose."""
        self._under_way: dict[str, tuple[RolloutTask, UnitFuture]] = {}
        """Units on the workers, by the key of their Dask task."""
        self._admitted: set[str] = set()
        """Keys of those of them that have all the slots they need, and leave some, which their workers report."""
        self._allowed: dict[str, tuple[str, ...]] = {}
        """Addresses of the workers that may run them."""
        self._seen_s: dict[str, float] = {}
        """Time at which one of those was there last."""
        self._warm: set[str] = set()
        """Addresses of the workers that are given units."""
        self._warming: dict[str, UnitFuture] = {}
        """Engines that get warm, by the address of their worker."""
        self._retry: list[RolloutTask] = []
        self._num_attempts: dict[UnitKey, int] = {}
        self._results: dict[int, list[RolloutResult]] = {}
        """Results of the units of an explore step, until it is complete."""
        self._ended: queue.Queue[str] = queue.Queue()
        """Keys of Dask tasks that ended, those that were admitted after `_ADMITTED`, and "" for other news; from any
        thread."""

        # Which weights there are, and which the steps run with.
        self._newest = 0
        """Newest policy version known to be published; behind by a look at most."""
        self._pinned = self._pinned_at = 0
        """Version that steps run with until a boundary of the sync style lets them move on, and the step up to which
        boundaries were looked for."""

        self._num_quarantined = 0
        self._audited_s = 0.0

    def open(self) -> None:
        """Read which units are done; a log that is to grow has no seal from here on. Before `run` and before the
        trainer, which would end where an earlier seal says.
        """
        # Before any unit is sent: its worker looks for this file.
        self._config_fingerprint = record_config(self._storage, self._config)
        # Before the log is read: a seal that comes later is of another explorer, which has made the rest meanwhile.
        try:
            was_sealed = self._log.sealed_at() is not None
        except DamagedError:
            was_sealed = True
        self._read_log()
        # A run that is given more steps than it ended with has more to tell.
        if was_sealed and self._complete < self._num_steps:
            self._log.unseal()

    def run(self) -> None:
        """Run until all steps and evaluations are done, or `cancelled`; after `open`.

        Raises: RoleError: a unit failed for good, or workers are lost whatever they run; FencedError; UserError.
        """
        if self._evaluates:
            self._evals.read()
        self._look_for_weights()
        # What workers report of themselves, which no storage keeps: what they begin, and that they were told to end.
        self._client.subscribe_topic(BEGAN_TOPIC, lambda message: self._poison.began(*message[1]))
        self._client.subscribe_topic(LEAVING_TOPIC, lambda message: self._poison.leaves(message[1]))
        self._client.subscribe_topic(ADMITTED_TOPIC, lambda message: self._take_admitted(message[1]))
        self._step_ended = time.monotonic()
        # Wanted until the next units are sent: Dask would say first that they are not, and send nothing more for 10 ms.
        ended: list[UnitFuture] = []
        try:
            while not self._cancelled():
                # Counted anew in each turn: workers come and go, and the window follows them.
                found = {address: info["resources"] for address, info in workers_of(self._client).items()}
                workers = {
                    address: int(has[EXPLORER_RESOURCE]) for address, has in found.items() if EXPLORER_RESOURCE in has
                }
                self._warm_up(workers.keys())
                if self._claims is not None and self._claims.is_due:
                    self._look_at_others(self._claims)
                num_engines = sum(workers[address] for address in self._warm)
                window = num_engines if self._overlaps else math.ceil(1.5 * num_engines) + 1
                self._retry += self._take_vanished(workers.keys())

                # Choose what enters the window. Evaluations first, on half of the engines at most while there is
                # training to go on with (one engine alone does both in turn); then units that failed; then the next
                # ones of the schedule.
                if self._evaluates:
                    self._evals.add_due(self._newest, self._trainer_ended_at())
                eval_window = max(1, num_engines // 2) if self._next_unit() is not None else window
                while num_engines and self._evals.num_waiting and self._num_under_way(is_eval=True) < eval_window:
                    unit = self._evals.take()
                    self._roll_out_rest(unit, self._poison.begin(unit))
                while self._retry and num_engines and len(self._under_way.keys() - self._admitted) < window:
                    self._submit(self._retry.pop(0))
                while (
                    num_engines
                    and self._num_under_way(is_eval=False) < window
                    and (chosen := self._choose_unit()) is not None
                ):
                    self._begun.add((chosen.explore_step, chosen.unit_index))
                    self._roll_out_rest(chosen, self._poison.begin(chosen))

                if self._is_over():
                    break
                ended.clear()
                self._ask_for_workers(sum(workers.values()))

                # Meanwhile the workers roll out and commit. What was lost runs again, and tells whether a task of it is
                # to blame.
                ended += self._take_ended()
                if time.monotonic() - self._audited_s > _AUDIT_EVERY_S:
                    self._audit()
        finally:  # leave nothing running and no number unwritten
            self._client.unsubscribe_topic(BEGAN_TOPIC)
            self._client.unsubscribe_topic(LEAVING_TOPIC)
            self._client.unsubscribe_topic(ADMITTED_TOPIC)
            futures = [*(future for _, future in self._under_way.values()), *self._warming.values()]
            self._client.cancel(futures, force=True)
            for writer in self._metrics.values():
                writer.flush()
            if self._claims is not None and self._evaluates:
                self._claims.give_back(EVALUATIONS)
        # Also after a cancelled loop: what is complete is complete, and the trainer need not wait for more.
        if self._complete >= self._num_steps > 0:
            self._log.seal(self._num_steps)

    def wake(self, version: int = 0) -> None:
        """Look again, for something happened: `version` was published. From any thread."""
        # Two threads may write it; the older of two numbers costs one look at the pointer.
        self._newest = max(self._newest, version)
        self._ended.put("")

    # ---- what is done, and what is next

    def _read_log(self) -> None:
        # Learn from the listing which units are committed; none of a step before the first open one is of interest.
        first = first_open_step(self._storage, self._log)
        self._done = done_units([*self._log.shards(first), *self._log.removed(first)])
        self._complete = self._noted = first - 1
        self._cursor = (first, 0)
        self._advance()

    def _look_at_others(self, claims: Claims) -> None:
        # Learn what other explorers have done and are at, in this order, so that no claim of what is done is left; and
        # take over what nobody does any more.
        first = self._complete + 1
        self._done |= done_units([*self._log.shards(first), *self._log.removed(first)])
        self._advance()
        self._record_steps()
        claims.look(self._done)
        if not self._evaluates and not claims.is_others(EVALUATIONS) and claims.take(EVALUATIONS):
            self._evaluates = True
            self._evals.read()

    def _advance(self) -> None:
        # Move `_complete` on over the steps all of whose units are committed, and note it now and then.
        while self._is_complete(self._complete + 1):
            self._complete += 1
        if self._complete >= self._noted + NOTE_EVERY:
            note_complete(self._storage, self._complete)
            self._noted = self._complete

    def _is_complete(self, step: int) -> bool:
        return all((step, unit_index) in self._done for unit_index in range(self._config.units_per_step))

    def _next_unit(self) -> tuple[int, int] | None:
        # The first unit that is neither committed nor begun, here or by another explorer; None: there is none, or the
        # trainer wants no more.
        if self._follows_trainer and self._trainer_ended_at() is not None:
            return None
        unit, moves_on = self._cursor, True
        while unit[0] <= self._num_steps:
            is_others = self._claims is not None and self._claims.is_others(unit)
            if unit not in self._done and unit not in self._begun and not is_others:
                break
            step, unit_index = unit
            unit = (step, unit_index + 1) if unit_index + 1 < self._config.units_per_step else (step + 1, 0)
            # The cursor stays before what another explorer is at, which may be free again. Else it moves on only;
            # `_read_log` sets it back when units have to run again.
            moves_on &= not is_others
            self._cursor = unit if moves_on else self._cursor
        return unit if unit[0] <= self._num_steps else None

    def _choose_unit(self) -> RolloutTask | None:
        # The next unit of the schedule; None while it may not begin, or there is none.
        upcoming = self._next_unit()
        if upcoming is None or self._order is None:
            return None
        step, unit_index = upcoming
        weights = self._weights_for(step)
        steps_needed = self._rules.explore_steps_for(weights.version)
        # A unit that waits for weights must not block the units that these are trained from.
        if (self._follows_trainer and steps_needed > self._complete) or not self._has_room(step, unit_index):
            return None
        if self._rules.style is SyncStyle.EXPLORER_DRIVEN and weights.version > self._newest:
            # Not before its experiences are complete: it would replace the request that the step before waits for.
            request_version(self._storage, weights.version)
        # Style fixed learns from the steps that its weights learned from, whatever else has been completed by now.
        fixed = self._follows_trainer and self._rules.style is SyncStyle.FIXED
        tasks = self._order.tasks(step, known=steps_needed if fixed else self._complete)
        if tasks is None or (self._claims is not None and not self._claim(self._claims, upcoming)):
            return None
        # The last unit of a step may be smaller: a slice beyond the end is short.
        size = self._config.tasks_per_unit
        part = tasks[unit_index * size : (unit_index + 1) * size]
        return self._make_unit("experiences", step, unit_index, part, self._config.algorithm.repeat_times, weights)

    def _claim(self, claims: Claims, unit: tuple[int, int]) -> bool:
        # Claim the unit for this explorer; False: another one was first, or has committed it since the last look.
        if not claims.take(unit):
            return False
        if claims.alone or unit not in done_units(self._log.find_all(*unit)):
            return True
        self._done.add(unit)
        claims.give_back(unit)
        return False

    def _weights_for(self, step: int) -> WeightRequirement:
        # Choose the weights that the step runs with. Without a trainer beside it, a step takes the newest there is.
        if self._follows_trainer:
            required = self._rules.weights_for(step)
            if required.exact or self._rules.style is SyncStyle.FULLY_ASYNC:
                return required
        elif self._rules.style is SyncStyle.FULLY_ASYNC:
            # Those that are under way with older ones need not end for it, as long as the bound allows.
            return WeightRequirement(max(0, self._newest - self._rules.staleness_bound), exact=False)
        else:
            required = WeightRequirement(0, exact=False)
        # A step may be passed over, which another explorer makes whole, and its boundary counts all the same.
        passed = range(min(self._pinned_at + 1, step) if self._claims is not None else step, step + 1)
        self._pinned_at = max(self._pinned_at, step)
        if any(map(self._rules.takes_newest_at, passed)) or required.version > self._pinned:
            # Only ever to what was published: a version that was asked for may be skipped for a newer one.
            self._pinned = max(self._pinned, self._newest)
        version = max(self._pinned, required.version)
        return WeightRequirement(version, exact=version == self._pinned)

    def _has_room(self, step: int, unit_index: int) -> bool:
        # True if so little lies unread before this unit that it may begin.
        # Groups of all units before this one in the schedule: whatever of them is not settled by the trainer lies
        # unread.
        num_groups = (step - 1) * self._config.buffer.batch_size + unit_index * self._config.tasks_per_unit
        return self._backpressure.has_room(num_groups)

    def _is_over(self) -> bool:
        training_over = self._next_unit() is None
        if self._claims is not None and self._complete < self._num_steps:
            return False  # what other explorers are at may be left to this one
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
        repeat_times: int,
        weights: WeightRequirement,
    ) -> RolloutTask:
        return RolloutTask(
            url=self._storage.url,
            config_fingerprint=self._config_fingerprint,
            folder=folder,
            explore_step=step,
            unit_index=unit_index,
            tasks=tuple(tasks),
            repeat_times=repeat_times,
            greedy_baseline=folder == "experiences" and self._config.algorithm.greedy_baseline,
            weights=weights,
            threads=self._threads,
            log_file=self._log_file,
        )

    def _roll_out_rest(self, unit: RolloutTask, trial: Trial) -> None:
        # Run what the trial says is left of the unit; the unit is complete when nothing is.
        if trial.poisonous:
            error = f"{STRIKES} workers in a row were lost while it ran, and nothing beside it"
            unit_log = open_log(self._storage, self._config, unit.folder)
            self._count(unit, commit_poisoned(unit_log, unit, self._config, trial.poisonous, error))
            self._poison.set_aside(unit, trial.poisonous)
        if trial.is_over:
            self._complete_unit(unit)
        else:
            self._submit(replace(unit, slots=trial.next_slots, alone=trial.runs_alone))

    def _warm_up(self, workers: Set[str]) -> None:
        # Have the engines of workers that joined started, before they are given units.
        self._warm &= workers
        for address in [address for address, future in self._warming.items() if future.status != "pending"]:
            # However it ended: what cannot get warm fails with its first unit, where the error is told.
            del self._warming[address]
            self._warm |= {address} & workers
        for address in [address for address in self._warming if address not in workers]:
            self._client.cancel([self._warming.pop(address)], force=True)
        if not self._warm:
            # None works that could go on meanwhile: the first units wait on the workers.
            self._warm |= workers
        for address in sorted(workers - self._warm - self._warming.keys()):
            self._warming[address] = self._client.submit(
                warm_up,
                WarmUp(self._storage.url, self._config_fingerprint, self._threads, self._log_file),
                key=f"warm-up-{address}-{time.time_ns()}",
                resources={EXPLORER_RESOURCE: 1},
                workers=(address,),
                priority=_EVAL_PRIORITY,
                pure=False,
                retries=0,
            )
            self._warming[address].add_done_callback(lambda done: self._ended.put(""))

    def _submit(self, unit: RolloutTask) -> None:
        # The time makes the key new: Dask must not answer with what it knows of an earlier attempt.
        key = f"rollouts-{unit.folder.replace('/', '-')}-{unit.explore_step}-{unit.unit_index}-{time.time_ns()}"
        allowed = tuple(sorted(self._warm))
        future = self._client.submit(
            self._task,
            unit,
            key=key,
            resources={EXPLORER_RESOURCE: _OVERLAP if self._overlaps else 1},
            workers=allowed,
            priority=_EVAL_PRIORITY if unit.is_eval else -unit.explore_step,
            pure=False,
            retries=0,
        )
        # Before the callback is added: a task that has ended already calls it at once, from another thread.
        self._under_way[key], self._allowed[key], self._seen_s[key] = (unit, future), allowed, time.monotonic()
        future.add_done_callback(lambda done: self._ended.put(str(done.key)))

    def _take_vanished(self, workers: Set[str]) -> list[RolloutTask]:
        # Units that wait for workers of which none is left. Dask tells of those that it had given to one.
        now, vanished = time.monotonic(), list[RolloutTask]()
        for key, (unit, future) in list(self._under_way.items()):
            if not workers.isdisjoint(self._allowed[key]) or future.status != "pending":
                self._seen_s[key] = now
            elif now - self._seen_s[key] > _VANISHED_S:
                log.warning("work unit %s is sent again: its workers are gone", unit.key)
                self._take_out(key)
                self._client.cancel([future], force=True)
                vanished.append(unit)
        return vanished

    def _take_out(self, key: str) -> tuple[RolloutTask, UnitFuture]:
        self._admitted.discard(key)
        del self._allowed[key], self._seen_s[key]
        return self._under_way.pop(key)

    def _take_admitted(self, key: str) -> None:
        # From Dask's thread.
        self._ended.put(f"{_ADMITTED}{key}")

    def _num_under_way(self, is_eval: bool) -> int:
        # Those that want slots: the others are under way until they end, and are in nobody's way.
        return sum(unit.is_eval == is_eval and key not in self._admitted for key, (unit, _) in self._under_way.items())

    def _take_ended(self) -> list[UnitFuture]:
        """Record what has ended; the futures, which nothing else holds then."""
        futures = []
        for unit, future, result, error in self._wait_for_ended():
            futures.append(future)
            if result is not None:
                self._count(unit, result)
                self._poison.ended(result.worker, str(future.key))
                self._roll_out_rest(unit, self._poison.finished(unit, result.num_rollouts))
            elif not self._cancelled():
                self._take_failure(unit, future, error)
        return futures

    def _wait_for_ended(self) -> Iterator[tuple[RolloutTask, UnitFuture, RolloutResult | None, BaseException | None]]:
        """Take units whose Dask tasks have ended out of the window, with result or error; wait a tick for the first.

        Neither result nor error: it was lost after it had ended.
        """
        timeout_s = _TICK_S
        while True:
            try:
                key = self._ended.get(timeout=timeout_s)
            except queue.Empty:
                return
            timeout_s = 0.0
            if key.startswith(_ADMITTED) and (key := key.removeprefix(_ADMITTED)) in self._under_way:
                self._admitted.add(key)
                continue
            # "" from `wake`, or a task that was taken out before.
            if key not in self._under_way:
                continue
            unit, future = self._take_out(key)
            result, status = None, future.status
            deadline = time.monotonic() + (_RESULT_S if status == "finished" else 0.0)
            while result is None and time.monotonic() < deadline and not self._cancelled():
                try:
                    result = future.result(timeout=_RESULT_LOOK_S)
                except TimeoutError:
                    continue
                except CancelledError:
                    break
            yield unit, future, result, future.exception() if status == "error" else None

    def _take_failure(self, unit: RolloutTask, future: UnitFuture, error: BaseException | None) -> None:
        """Let the unit run again, if that may help. Raises: RoleError: it may not; UserError, FencedError: the unit's.

        error: None: the worker was lost after the unit had ended, so nothing of the unit is to blame.
        """
        # Three kinds of failure: what stays as it is ends the run; what was lost runs again and is a clue to poison;
        # what could not answer is tried a few times.
        name, cause = f"work unit {unit.key}", f"{type(error).__name__}: {error}"
        if isinstance(error, UserError | FencedError | StorageRefusedError):
            raise error
        if isinstance(error, EngineError | ProcessLostError):
            self._poison.engine_failed(unit, str(future.key), error)
        # The loss of an engine's process is as good as that of its worker. Any other error of an engine is none: it
        # says nothing of the task that ran, and may come again.
        if error is None or isinstance(error, KilledWorker | ProcessLostError):
            was_running = error is not None
            if isinstance(error, KilledWorker):
                address = error.last_worker.address
                was_running = self._poison.was_running(str(future.key), on=address)
                cause = f"its worker {address} was lost"
            elif error is None:
                finished = future.status == "finished"
                cause = "its worker was lost with the result" if finished else f"the task is {future.status}"
            trial = self._poison.lost(unit, was_running, cause)
            log.warning("%s runs again: %s (%s)", name, cause, trial)
            first_line = cause.partition("\n")[0]
            if was_running and trial.strikes:
                what = name if trial.is_whole else f"a task of {name}, alone,"
                self._emit(Note(f"{what} runs again ({trial.strikes} of {STRIKES} losses in a row): {first_line}"))
            elif was_running and not trial.poisonous:
                self._emit(
                    Note(f"{name} runs task by task, to find out whether one of them ends workers: {first_line}")
                )
            self._roll_out_rest(unit, trial)
            return
        if not isinstance(error, RftError | OSError):
            raise RoleError(f"{name} failed: {cause}") from error  # a fault of code: it would fail again
        # Storage or an engine that could not answer: it may at the next try, and the unit changed nothing.
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
        # None where an attempt before had committed it, whose answer was lost: its shards count, its times are not
        # known.
        if not unit.is_eval and result.num_rollouts:
            self._results.setdefault(unit.explore_step, []).append(result)
            self._backpressure.add(result.num_rollouts, result.num_bytes)

    def _complete_unit(self, unit: RolloutTask) -> None:
        if unit.is_eval:
            self._evals.finish(unit)
            return
        step = unit.explore_step
        self._begun.discard((step, unit.unit_index))
        self._done.add((step, unit.unit_index))
        if self._claims is not None:
            self._claims.give_back((step, unit.unit_index))
        self._advance()
        self._record_steps()

    def _record_steps(self) -> None:
        # Write the metrics of each step that is complete, by the results of the units that were rolled out here.
        for step in [step for step in self._results if self._is_complete(step)]:
            results = self._results.pop(step)
            # Steps overlap, so the time of one counts from the end of the step before, not from its own first unit.
            began, self._step_ended = self._step_ended, time.monotonic()
            metrics = step_metrics(results, self._step_ended - began)
            # Of each explorer a row, if it made any of the step's units.
            named = self._config.command_name != self._config.mode
            self._metrics["explorer"].write(
                step, metrics, **({"explorer": self._config.explorer.name} if named else {})
            )
            self._emit(StepFinished("explorer", step, metrics))

    def _record_evaluation(self, taskset: str, version: int, metrics: Mapping[str, float]) -> None:
        # The names of Trinity-RFT beside ours.
        prefixed = {f"bench/{name}": v for name, v in metrics.items()} if self._config.mode == "bench" else {}
        self._metrics["eval"].write(version, {**metrics, **prefixed}, taskset=taskset)
        # At once: evaluations are rare, and somebody waits for each.
        self._metrics["eval"].flush()
        self._emit(Evaluated(version, taskset, metrics))

    # ---- now and then

    def _ask_for_workers(self, num_engines: int) -> None:
        # Ask the cluster for as many workers as there are units that could run this moment; see autoscale.py.
        now, before = time.monotonic(), self._scale_rule
        if self._scale is None or now - before.seen_s < _SCALE_EVERY_S:
            return
        # A unit that waits for weights on its worker keeps it busy, and more workers would not help.
        # What has all its slots needs its worker, and no other.
        backlog = sum(
            unit.weights.version <= self._newest and key not in self._admitted
            for key, (unit, _) in self._under_way.items()
        )
        backlog += min(num_engines, len(self._admitted))
        backlog += len(self._retry) + self._evals.num_waiting
        upcoming = self._next_unit()
        # Also units of the coming steps, as far as weights and back-pressure let them begin now. More of them than the
        # most workers there may be need not be counted.
        while upcoming is not None and backlog < before.max_workers and self._has_room(*upcoming):
            step, unit_index = upcoming
            if self._follows_trainer and self._rules.weights_for(step).version > self._newest:
                break
            backlog += self._config.units_per_step - unit_index
            upcoming = (step + 1, 0) if step < self._num_steps else None
        self._scale_rule = before.after(now, num_engines, backlog)
        target = self._scale_rule.target
        if target != before.target:
            there = f"{num_engines} are there, and {backlog} work units to run"
            self._emit(Note(f"asks for {target} explorer workers: {there}"))
        elif num_engines >= target or now - self._scaled_s < _ASK_AGAIN_S:
            return
        # Again while some are missing: a worker that died while it started is not started again by its nanny.
        self._scaled_s = now
        self._scale(target)

    def _audit(self) -> None:
        # Drop weights and shards that nobody needs, and find shards that were set aside: their units run again.
        self._audited_s = time.monotonic()
        self._look_for_weights()
        if self._follows_trainer:
            # Whatever a unit under way, a failed one, an evaluation or the next step may still load stays.
            in_use = [unit.weights.version for unit, _ in self._under_way.values()]
            in_use += [unit.weights.version for unit in self._retry]
            in_use += self._evals.versions_in_use(self._newest, self._trainer_ended_at())
            if self._num_steps:
                in_use.append(self._rules.weights_for(self._complete + 1).version)
            remove_weights_below(self._storage, min([self._newest - 1, *in_use]))
            self._remove_old_shards()
        # Set aside by the trainer, who reads the shards: their units count as not done, and are chosen again.
        num_quarantined = self._log.num_quarantined()
        if num_quarantined != self._num_quarantined:
            self._num_quarantined = num_quarantined
            self._emit(Note(f"{num_quarantined} damaged shards were set aside; their work units run again"))
            self._read_log()

    def _look_for_weights(self) -> None:
        published = latest_published(self._storage)
        self._newest = max(self._newest, published.version if published is not None else 0)


# ---- what the loop uses of Dask; testing/fake_dask.py has another client
