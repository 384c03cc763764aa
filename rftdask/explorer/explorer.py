"""Explorer: the driver's loop that keeps a bounded window of rollout batches on the explorer workers.

Consumes: the schedule (which tasks a step runs: a pure function, or a choice that is written down), the log's listing
(what is done), the sync rules (which weights a step needs). Produces: shards and evaluations, by way of the workers.
Waits for: results and, when it is ahead of the rules, for steps to complete; the workers wait for weights, with a
deadline. A batch is submitted only when every step its weights depend on is committed, so no waiting batch can block
the one it waits for. The loop keeps nothing that the listing does not say.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distributed import Client, Future, KilledWorker

from rftdask.buffer.batches.backpressure import SettledGroups, unread_limit
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.lineage import MAIN_LINEAGE
from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import NOTE_EVERY, first_open_step, note_complete
from rftdask.buffer.log.shard import done_batches
from rftdask.config import Config
from rftdask.data.task_schedule import TaskRef, explore_tasks
from rftdask.errors import FencedError, RftError, RoleError, UserError
from rftdask.explorer.autoscale import ScaleRule, Seen
from rftdask.explorer.bisection import STRIKES, Trial
from rftdask.explorer.evaluation import EvalTaskset
from rftdask.explorer.evaluation_queue import EvalAgenda
from rftdask.explorer.poison import Suspects
from rftdask.explorer.step_metrics import StepTotals
from rftdask.explorer.task_order import TaskOrder
from rftdask.explorer.worker_task import (
    BEGAN_TOPIC,
    EXPLORER_RESOURCE,
    RolloutResult,
    RolloutSpec,
    run_rollouts,
    set_aside,
)
from rftdask.monitor.events import Evaluated, Event, Note, Step
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.dask_task import LEAVING_TOPIC
from rftdask.storage import Storage
from rftdask.synchronizer.styles import Admission, SyncStyle, make_sync_rules
from rftdask.weights.published import latest_published, remove_weights_below, request_version

if TYPE_CHECKING:
    from rftdask.explorer.difficulty import LearnedOrder  # which needs torch

MAX_ATTEMPTS = 4
"""Of one rollout batch that raises, such as for storage; its rollouts' own failures and lost workers do not count."""
_TICK_S = 0.25
_RESULT_S = 10.0
"""For fetching a result, which is small. Dask itself would try for minutes to fetch it from a worker that died."""
_RESULT_LOOK_S = 1.0
_AUDIT_EVERY_S = 2.0
_SCALE_EVERY_S = 1.0
_ASK_AGAIN_S = 10.0
_EVAL_PRIORITY = 1_000_000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExplorePlan:
    """What there is to do."""

    num_steps: int
    """Explore steps in all; 0 for evaluations only."""
    sizes: tuple[int, ...]
    """Tasks of each training taskset."""
    order: TaskOrder
    """Of those tasks."""
    evals: tuple[EvalTaskset, ...]
    eval_versions: tuple[int, ...] = ()
    """Versions to evaluate whatever is published (bench)."""


class Explorer:
    """Runs the explore steps and evaluations of a stage.

    Example: Explorer(client, storage, config, plan, ...).run()
    """

    def __init__(
        self,
        client: Client,
        storage: Storage,
        config: Config,
        plan: ExplorePlan,
        metrics: Mapping[str, MetricsWriter],
        *,
        threads: int,
        log_file: str | None,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        trainer_ended_at: Callable[[], int | None],
        learned: LearnedOrder | None = None,
        remove_old_shards: Callable[[], int] = lambda: 0,
        scale_rule: ScaleRule | None = None,
        scale: Callable[[int], None] = lambda num_workers: None,
        task: Callable[[RolloutSpec], RolloutResult] = run_rollouts,
    ) -> None:
        """learned: chooses the tasks in place of the plan's order; remove_old_shards: what retention does not keep.

        metrics: writers of the roles "explorer" and "eval"; trainer_ended_at: last policy version once there will be
        no newer; scale_rule: how many workers to ask for, by way of `scale`; None: never for others; task: what runs
        on the workers (benchmarks have another).
        """
        self._client = client
        self._storage = storage
        self._config = config
        self._config_dict = config.to_dict()
        self._plan = plan
        self._metrics = metrics
        self._threads = threads
        self._log_file = log_file
        self._emit = emit
        self._cancelled = cancelled
        self._trainer_ended_at = trainer_ended_at
        self._learned = learned
        self._remove_old_shards = remove_old_shards
        self._scale_rule = scale_rule
        self._scale = scale
        self._asked_s = 0.0
        self._task = task
        self._rules = make_sync_rules(config)
        self._follows_trainer = config.mode == "both"
        self._per_batch = config.tasks_per_unit
        self._batches_per_step = config.units_per_step
        self._log = open_log(storage, config)
        self._suspects = Suspects(self._log.takes_parts)
        self._unread_limit = unread_limit(config)
        self._settled = SettledGroups(Ledger(storage, MAIN_LINEAGE))
        self._num_settled = 0
        self._num_committed = self._num_bytes = 0
        self._done: set[tuple[int, int]] = set()
        self._complete = 0
        self._noted = 0
        """Step of the last note of progress."""
        self._pinned = 0
        self._outstanding: dict[str, tuple[RolloutSpec, Future]] = {}
        self._attempts: dict[tuple[str, int, int], int] = {}
        self._set_aside: set[tuple[tuple[str, int, int], int]] = set()
        """(rollout batch, place of the task) whose rollouts are committed as poisoned, of batches under way."""
        self._finished: queue.Queue[str] = queue.Queue()
        self._retry: list[RolloutSpec] = []
        self._totals: dict[tuple[str, int], StepTotals] = {}
        self._agenda = EvalAgenda(storage, config, plan.evals, plan.eval_versions, self._make_spec, self._record_eval)
        self._newest = 0
        """Newest policy version known to be published; behind by a look at most."""
        self._quarantined = 0
        self._audited = 0.0

    def wake(self, version: int = 0) -> None:
        """From any thread: something happened; `version` was published."""
        self._newest = max(self._newest, version)
        self._finished.put("")

    def run(self) -> None:
        """Until all steps and evaluations are done, or `cancelled`. Raises: RoleError: a batch failed for good;
        UserError.
        """
        self._read_log()
        self._agenda.read()
        self._look_for_weights()
        if self._complete < self._plan.num_steps:
            self._log.unseal()
        pending = self._pending_batches()
        upcoming = next(pending, None)
        self._client.subscribe_topic(BEGAN_TOPIC, lambda event: self._suspects.began(*event[1]))
        self._client.subscribe_topic(LEAVING_TOPIC, lambda event: self._suspects.leaves(event[1]))
        try:
            while not self._cancelled():
                self._submit_evals(is_training=upcoming is not None and not self._trainer_has_enough())
                upcoming = self._submit_steps(upcoming, pending)
                if self._is_over(upcoming):
                    break
                self._ask_for_workers(upcoming)
                self._collect()
                if time.monotonic() - self._audited > _AUDIT_EVERY_S and self._audit():
                    pending = self._pending_batches()
                    upcoming = next(pending, None)
        finally:
            self._client.unsubscribe_topic(BEGAN_TOPIC)
            self._client.unsubscribe_topic(LEAVING_TOPIC)
            self._client.cancel([future for _, future in self._outstanding.values()], force=True)
            for writer in self._metrics.values():
                writer.flush()
        if self._complete >= self._plan.num_steps > 0:
            self._log.seal(self._plan.num_steps)

    def _is_over(self, upcoming: tuple[int, int] | None) -> bool:
        if upcoming is None and self._complete >= self._plan.num_steps > 0 and self._log.sealed_at() is None:
            self._log.seal(self._plan.num_steps)  # the trainer may be waiting for more
        steps_over = upcoming is None or self._trainer_has_enough()
        trainer_over = not self._follows_trainer or self._trainer_ended_at() is not None
        evals_over = self._agenda.is_empty(self._newest, self._trainer_ended_at())
        return steps_over and trainer_over and evals_over and not self._outstanding and not self._retry

    def _trainer_has_enough(self) -> bool:
        return self._follows_trainer and self._trainer_ended_at() is not None

    def _read_log(self) -> None:
        first = first_open_step(self._storage, self._log)
        self._done = done_batches([*self._log.shards(first), *self._log.removed(first)])
        self._complete = self._noted = first - 1
        self._advance()

    def _advance(self) -> None:
        """`_complete` = the last step up to which every batch is committed."""
        while all((self._complete + 1, batch) in self._done for batch in range(self._batches_per_step)):
            self._complete += 1
        if self._complete >= self._noted + NOTE_EVERY:
            note_complete(self._storage, self._complete)
            self._noted = self._complete

    def _pending_batches(self) -> Iterator[tuple[int, int]]:
        under_way = {(spec.explore_step, spec.batch) for spec, _ in self._outstanding.values() if not spec.is_eval}
        for step in range(self._complete + 1, self._plan.num_steps + 1):
            for batch in range(self._batches_per_step):
                if (step, batch) not in self._done and (step, batch) not in under_way:
                    yield step, batch

    def _submit_steps(
        self, upcoming: tuple[int, int] | None, pending: Iterator[tuple[int, int]]
    ) -> tuple[int, int] | None:
        window = self._window()
        while self._retry and len(self._outstanding) < window:
            self._submit(self._retry.pop(0))
        while upcoming is not None and self._num_training() < window and not self._trainer_has_enough():
            step, batch = upcoming
            admission = self._admission(step)
            if self._follows_trainer and self._rules.explore_steps_for(admission.version) > self._complete:
                break
            if not self._has_room(step, batch):
                break
            if self._rules.style is SyncStyle.EXPLORER_DRIVEN and admission.version > self._newest:
                # Not before its experiences are complete: it would replace the request that the step before waits for.
                request_version(self._storage, admission.version)
            tasks = self._tasks(step, admission)
            if tasks is None:
                break
            spec = self._spec(step, batch, tasks, admission)
            self._go_on(spec, self._suspects.begin(spec))
            upcoming = next(pending, None)
        return upcoming

    def _has_room(self, step: int, batch: int) -> bool:
        """Whether so little lies unread before this batch that it may begin."""
        if self._unread_limit is None:
            return True
        before = (step - 1) * self._config.buffer.batch_size + batch * self._per_batch
        rollouts = self._config.algorithm.repeat_times
        mean_bytes = self._num_bytes / max(1, self._num_committed)
        # What was settled when the ledger was last read may be enough, and saves another look.
        if self._unread_limit.admits((before - self._num_settled) * rollouts, mean_bytes):
            return True
        self._num_settled = self._settled.count()
        return self._unread_limit.admits((before - self._num_settled) * rollouts, mean_bytes)

    def _admission(self, step: int) -> Admission:
        """Which weights the step runs with. Without a trainer beside it, a step takes what there is."""
        if self._follows_trainer:
            admission = self._rules.admit(step)
            if admission.exact or self._rules.style is SyncStyle.FULLY_ASYNC:
                return admission
        else:
            admission = Admission(0, exact=False)
        if self._rules.takes_newest_at(step) or admission.version > self._pinned:
            # Only ever to what was published: a version that was asked for may be skipped for a newer one.
            self._pinned = max(self._pinned, self._newest)
        version = max(self._pinned, admission.version)
        return Admission(version, exact=version == self._pinned)

    def _tasks(self, step: int, admission: Admission) -> list[TaskRef] | None:
        """The tasks of the step, or None while they cannot be chosen."""
        if self._learned is not None:
            fixed = self._follows_trainer and self._rules.style is SyncStyle.FIXED
            # Style fixed learns from the steps that its weights learned from, whatever else has been completed by now.
            known = self._rules.explore_steps_for(admission.version) if fixed else self._complete
            return self._learned.tasks(step, known)
        order = self._plan.order
        return explore_tasks(
            step,
            sizes=self._plan.sizes,
            batch_size=self._config.buffer.batch_size,
            selector=order.selector,
            seed=order.seed,
            orders=order.orders,
        )

    def _spec(self, step: int, batch: int, tasks: list[TaskRef], admission: Admission) -> RolloutSpec:
        part = tasks[batch * self._per_batch : (batch + 1) * self._per_batch]
        repeat_times = self._config.algorithm.repeat_times
        return self._make_spec("experiences", step, batch, part, repeat_times, admission)

    def _make_spec(
        self, folder: str, step: int, batch: int, tasks: list[TaskRef], repeat_times: int, admission: Admission
    ) -> RolloutSpec:
        return RolloutSpec(
            url=self._storage.url,
            config=self._config_dict,
            folder=folder,
            explore_step=step,
            batch=batch,
            tasks=tuple(tasks),
            repeat_times=repeat_times,
            greedy_baseline=folder == "experiences" and self._config.algorithm.greedy_baseline,
            version=admission.version,
            exact=admission.exact,
            threads=self._threads,
            log_file=self._log_file,
        )

    def _submit(self, spec: RolloutSpec) -> None:
        key = f"rollouts-{spec.folder.replace('/', '-')}-{spec.explore_step}-{spec.batch}-{time.time_ns()}"
        future = self._client.submit(
            self._task,
            spec,
            key=key,
            resources={EXPLORER_RESOURCE: 1},
            priority=_EVAL_PRIORITY if spec.is_eval else -spec.explore_step,
            pure=False,
            retries=0,
        )
        self._outstanding[key] = (spec, future)
        future.add_done_callback(lambda done: self._finished.put(done.key))

    def _window(self) -> int:
        """Batches that may be under way: one and a half per engine, so that no engine waits for the driver."""
        return math.ceil(1.5 * self._num_slots()) + 1

    def _num_training(self) -> int:
        return sum(not spec.is_eval for spec, _ in self._outstanding.values())

    def _num_slots(self) -> int:
        """Rollout batches that the workers which are there can run at once."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        return sum(int(info["resources"].get(EXPLORER_RESOURCE, 0)) for info in workers)

    def _ask_for_workers(self, upcoming: tuple[int, int] | None) -> None:
        now = time.monotonic()
        before = self._scale_rule
        if before is None or now - before.seen_s < _SCALE_EVERY_S:
            return
        seen = Seen(now, self._num_slots(), self._backlog(upcoming, before.max_workers))
        self._scale_rule = before.after(seen)
        target = self._scale_rule.target
        if target != before.target:
            why = f"{seen.num_workers} are there, and {seen.backlog} rollout batches to run"
            self._note(f"asks for {target} explorer workers: {why}")
        elif seen.num_workers >= target or now - self._asked_s < _ASK_AGAIN_S:
            return
        # Again while some are missing: a worker that died while it started is not started again by its nanny.
        self._asked_s = now
        self._scale(target)

    def _backlog(self, upcoming: tuple[int, int] | None, enough: int) -> int:
        """Rollout batches that are under way or could run this moment; `enough` or more are all the same."""
        ready = sum(spec.version <= self._newest for spec, _ in self._outstanding.values())
        ready += len(self._retry) + self._agenda.num_waiting
        if upcoming is None or self._trainer_has_enough():
            return ready
        step, batch = upcoming
        while step <= self._plan.num_steps and ready < enough and self._has_room(step, batch):
            if self._follows_trainer and self._rules.admit(step).version > self._newest:
                break
            ready += self._batches_per_step - batch
            step, batch = step + 1, 0
        return ready

    def _collect(self) -> None:
        """Take in what finished; wait a tick for the first."""
        try:
            key = self._finished.get(timeout=_TICK_S)
        except queue.Empty:
            return
        while True:
            if key in self._outstanding:
                self._take(*self._outstanding.pop(key))
            try:
                key = self._finished.get_nowait()
            except queue.Empty:
                return

    def _take(self, spec: RolloutSpec, future: Future) -> None:
        result, error, cause = _outcome(future, self._cancelled)
        if result is not None:
            self._suspects.ended(result.worker, str(future.key))
            self._add(spec, result)
            self._go_on(spec, self._suspects.finished(spec, result.num_rollouts))
            return
        if self._cancelled():
            return
        if isinstance(error, UserError | FencedError):
            raise error
        if error is None or isinstance(error, KilledWorker) or type(error) is RoleError:
            self._take_loss(spec, str(future.key), error, cause)
            return
        attempts = self._attempts[spec.key] = self._attempts.get(spec.key, 0) + 1
        if not isinstance(error, RftError | OSError):
            raise RoleError(f"rollout batch {spec.key} failed: {cause}") from error
        if attempts >= MAX_ATTEMPTS:
            raise RoleError(f"rollout batch {spec.key} failed {attempts} times; the last time: {cause}") from error
        log.warning("rollout batch %s failed: %s", spec.key, cause)
        first_line = cause.partition("\n")[0]
        text = f"rollout batch {spec.key} runs again ({attempts} of {MAX_ATTEMPTS}): {first_line}"
        self._note(text)
        self._retry.append(spec)

    def _take_loss(self, spec: RolloutSpec, key: str, error: BaseException | None, cause: str) -> None:
        """The batch's worker was lost, or its engine, which is as good as that; error: None: after the batch had ended,
        so nothing of it is to blame.
        """
        was_running = error is not None
        if isinstance(error, KilledWorker):
            was_running = self._suspects.was_running(key, on=error.last_worker.address)
            cause = f"its worker {error.last_worker.address} was lost"
        trial = self._suspects.lost(spec, was_running, cause)
        log.warning("rollout batch %s runs again: %s (%s)", spec.key, cause, trial)
        first_line = cause.partition("\n")[0]
        what = f"rollout batch {spec.key}"
        if was_running and trial.is_whole:
            self._note(f"{what} runs again ({trial.strikes} of {STRIKES} losses in a row): {first_line}")
        elif was_running:
            self._note(f"{what} runs in pieces, to find out whether a task of it ends workers: {first_line}")
        self._go_on(spec, trial)

    def _go_on(self, spec: RolloutSpec, trial: Trial) -> None:
        """Run what the trial says is next; the batch is done when nothing is."""
        found = tuple(slot for slot in trial.poisonous if (spec.key, slot) not in self._set_aside)
        if found:
            self._set_poison_aside(spec, found)
        if trial.is_whole:
            self._submit(spec)
        elif trial.pieces:
            self._submit(replace(spec, slots=trial.next_piece))
        else:
            self._set_aside -= {(spec.key, slot) for slot in trial.poisonous}
            self._complete_batch(spec)

    def _set_poison_aside(self, spec: RolloutSpec, slots: tuple[int, ...]) -> None:
        error = f"{STRIKES} workers in a row were lost while it ran, and nothing beside it"
        self._add(spec, set_aside(open_log(self._storage, self._config, spec.folder), spec, self._config, slots, error))
        self._set_aside.update((spec.key, slot) for slot in slots)
        self._suspects.set_aside(spec, slots)

    def _note(self, text: str) -> None:
        self._emit(Note(text))

    def _add(self, spec: RolloutSpec, result: RolloutResult) -> None:
        """Count what was committed of a batch."""
        totals = self._totals.setdefault((spec.folder, spec.explore_step), StepTotals())
        if result.num_rollouts:
            totals.results.append(result)
        if result.note:
            self._note(result.note)
        if not spec.is_eval:
            self._num_committed += result.num_rollouts
            self._num_bytes += result.num_bytes

    def _complete_batch(self, spec: RolloutSpec) -> None:
        if spec.is_eval:
            if self._agenda.finished(spec):
                self._totals.pop((spec.folder, spec.explore_step))
            return
        totals = self._totals.setdefault((spec.folder, spec.explore_step), StepTotals())
        self._done.add((spec.explore_step, spec.batch))
        self._advance()
        step = spec.explore_step
        if all((step, batch) in self._done for batch in range(self._batches_per_step)):
            self._totals.pop((spec.folder, step))
            if totals.results:
                metrics = totals.metrics()
                self._metrics["explorer"].write(step, metrics)
                self._emit(Step("explorer", step, metrics))

    def _record_eval(self, taskset: str, version: int, metrics: Mapping[str, float]) -> None:
        prefix = {f"bench/{k}": v for k, v in metrics.items()} if self._config.mode == "bench" else {}
        self._metrics["eval"].write(version, {**metrics, **prefix}, taskset=taskset)
        self._metrics["eval"].flush()
        self._emit(Evaluated(version, taskset, metrics))

    def _submit_evals(self, is_training: bool) -> None:
        """While there is training to go on with, half of the workers at most evaluate; one alone does both in turn."""
        self._agenda.add_due(self._newest, self._trainer_ended_at())
        if not self._agenda.num_waiting:
            return
        window = max(1, self._num_slots() // 2) if is_training else self._window()
        while self._agenda.num_waiting and len(self._outstanding) - self._num_training() < window:
            spec = self._agenda.take()
            self._go_on(spec, self._suspects.begin(spec))

    def _audit(self) -> bool:
        """Now and then: drop weights that nobody needs, and find shards that were set aside, whose batches must run
        again.
        """
        self._audited = time.monotonic()
        self._look_for_weights()
        if self._follows_trainer:
            self._remove_old_weights()
            self._remove_old_shards()
        quarantined = self._log.num_quarantined()
        if quarantined == self._quarantined:
            return False
        self._quarantined = quarantined
        self._note(f"{quarantined} damaged shards were set aside; their rollout batches run again")
        self._read_log()
        return True

    def _look_for_weights(self) -> None:
        published = latest_published(self._storage)
        self._newest = max(self._newest, published.version if published is not None else 0)

    def _remove_old_weights(self) -> None:
        in_use = [spec.version for spec, _ in self._outstanding.values()]
        in_use += [spec.version for spec in self._retry]
        in_use += self._agenda.versions_in_use(self._newest, self._trainer_ended_at())
        next_step = self._rules.admit(self._complete + 1).version
        remove_weights_below(self._storage, min([self._newest - 1, next_step, *in_use]))


def _outcome(future: Future, called_off: Callable[[], bool]) -> tuple[RolloutResult | None, BaseException | None, str]:
    """What an ended task came to: its result, or else its error, if it has one, and the cause in words."""
    if future.status == "finished":
        end = time.monotonic() + _RESULT_S
        while time.monotonic() < end and not called_off():
            try:
                return future.result(timeout=_RESULT_LOOK_S), None, ""
            except TimeoutError:
                continue
            except CancelledError:
                break
        return None, None, "its worker was lost with the result"
    error = future.exception() if future.status == "error" else None
    return None, error, f"{type(error).__name__}: {error}" if error is not None else f"the task is {future.status}"
