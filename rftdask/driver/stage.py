"""Stage: one mode of one run folder, from its first task to its last checkpoint, on a running cluster.

It starts the roles of its mode (trainer gang, explorer, synchronizer), watches them, passes on what they say, and ends
when they have. Starting and restarting are the same: each role reads the run folder and does what is missing. Every
failure of a role ends the stage with that role's error.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from distributed import Future as DaskFuture
from distributed.threadpoolexecutor import ThreadPoolExecutor

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.lineage import MAIN_LINEAGE, lineage_of
from rftdask.buffer.log import open_log
from rftdask.buffer.log.retention import apply_retention
from rftdask.cluster.base import Cluster, control_workers
from rftdask.cluster.layout import AUXILIARY_RESOURCE, EXPLORER_RESOURCE, TRAINER_RESOURCE, Layout, num_ranks
from rftdask.config import Config
from rftdask.config.plan import plan_work
from rftdask.config.schema.buffer import RetentionConfig
from rftdask.errors import DamagedError, DataError, FencedError, RftError, RoleError, UserError
from rftdask.explorer.auxiliary_pool import AuxiliaryPool
from rftdask.explorer.explorer import Explorer
from rftdask.explorer.unit_claims import Claims
from rftdask.monitor.events import CODEC, Ended, Event, Note, WeightsPublished
from rftdask.monitor.machine_metrics import MachineLog
from rftdask.processes.dask_task import workers_of
from rftdask.run.lease import Lease, lease_role, roles_of
from rftdask.run.run_folder import STOP_FILE
from rftdask.storage import Storage
from rftdask.synchronizer.actor import ACTOR_NAME, SyncHandle, Synchronizer, start_synchronizer
from rftdask.trainer.checkpoint import checkpoint_steps, oldest_resume_point
from rftdask.trainer.gang import TOPIC, Gang, RankSpec

WORKER_DEADLINE_S = 300.0
_TICK_S = 0.1
_LOOK_AT_WORKERS_S = 0.5
_RETENTION_S = 5.0
"""Between two passes of retention in mode train; where there is an explorer, it has its own time for them."""

log = logging.getLogger(__name__)


def bench_versions(storage: Storage, config: Config) -> tuple[int, ...]:
    """What mode bench evaluates: the model as it is, then every checkpoint; or only the newest. A model behind an API
    has one version.

    Raises: DataError: there is no checkpoint.
    """
    if config.is_external:
        return (0,)
    steps = checkpoint_steps(storage)
    if not config.explorer.bench_on_latest_checkpoint:
        return (0, *steps)
    if not steps:
        raise DataError(f"{storage.url} has no checkpoint to evaluate (explorer.bench_on_latest_checkpoint)")
    return (steps[-1],)


class StageRun:
    """Runs one stage.

    Example: StageRun(config, storage, cluster, layout, sizes, on_event).run()
    """

    def __init__(
        self,
        config: Config,
        storage: Storage,
        cluster: Cluster,
        layout: Layout,
        sizes: Mapping[str, int],
        on_event: Callable[[Event], None],
        log_folder: str | None,
    ) -> None:
        """on_event: called in the thread of `run` with what the roles say."""
        self._config, self._storage = config, storage
        self._cluster, self._client, self._layout = cluster, cluster.client, layout
        self._sizes, self._on_event, self._log_folder = sizes, on_event, log_folder
        self.work = plan_work(config, sizes)
        self._events: queue.Queue[Event] = queue.Queue()
        self._over = threading.Event()
        """Set when the roles are to end now."""
        self._ended = threading.Event()
        """Set when the roles have ended, so that compaction stops."""
        self._stopping = False
        self._trainer_ended: Ended | None = None
        self._explorer: Explorer | None = None
        self._auxiliary: AuxiliaryPool | None = None
        self._sync: SyncHandle | None = None
        self._actor: DaskFuture[Synchronizer] | None = None
        self._generation = 0
        self._can_scale = True
        # Threads of Dask's own executor do not outlive this process, so a second Ctrl-C ends it at once.
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="stage")
        self._errors: list[BaseException] = []
        """Of the roles, in the order in which they failed."""
        self._work: dict[str, Future[Any]] = {}
        """What runs in them, by role, and retention."""
        self._workers: dict[str, str | int] = {}
        self._watched = self._tidied = 0.0
        self._machines = MachineLog(storage)

    def run(self) -> Ended:
        """Start the roles, watch them and pass on what they say, until they have ended; how the trainer ended.

        Raises: the error of the role that failed first; FencedError: another process has a role, or took one over.
        """
        roles = roles_of(self._config)
        # Also of those before one that is refused: the outer `finally` releases them.
        leases: list[Lease] = []
        try:
            for role in roles:
                # First of all: who is refused here has not touched the ledger, the stop file or the weights.
                steps = self.work.explore_steps if self._config.mode == "explore" else None
                leases.append(Lease(self._storage, lease_role(self._config, role), explore_steps=steps))
            self._cluster.use((*roles, *([AUXILIARY_RESOURCE] * bool(self._config.models_apart))))
            if "trainer" in roles:
                self._check_ledger()
                self._storage.remove(STOP_FILE)
            if self._stopping:
                self.stop()  # it was asked to before the file of an earlier stop was removed
            # Before the roles start, so that not one of their first events is missed. Called in a thread of Dask.
            self._client.subscribe_topic(TOPIC, lambda message: self._events.put(CODEC.decode(message[1])))
            if "explorer" in roles:
                self._start_synchronizer()
                if self._config.models_apart:
                    self._auxiliary = self._make_auxiliary_pool()
                self._explorer = self._make_explorer(leases[-1])
                self._explorer.open()
                self._work["explorer"] = self._threads.submit(self._explorer.run)
            if "trainer" in roles:
                self._work["trainer"] = self._threads.submit(self._make_gang().run)
            try:
                # Until every role of this stage is gone. Retention is in `_work` as well, and ends nothing.
                while self._work.keys() & set(roles):
                    self._pass_events_on(_TICK_S)
                    self._watch(leases)
                    self._take_ends()
                    if self._errors:
                        self._over.set()
                    if self._explorer is None and time.monotonic() - self._tidied >= _RETENTION_S:
                        self._tidied = time.monotonic()  # where there is an explorer, it has its own time for this
                        self._remove_old_shards()
                self._machines.close()
                # What the roles said between the last look and their end.
                self._pass_events_on(0.0)
                if not self._errors and self._explorer is None:
                    self._remove_old_shards()  # what the last checkpoint settled; it is waited for below
            finally:
                self._ended.set()
                # Retention ends after the bucket it is at, while this process has the lease. Roles are not waited for:
                # all have ended, unless an error or a second Ctrl-C ends the stage, and then one of them may hang.
                wait([future for role, future in list(self._work.items()) if role == "retention"], WORKER_DEADLINE_S)
                self._take_ends()
                self._client.unsubscribe_topic(TOPIC)
                if self._auxiliary is not None:
                    self._auxiliary.close()
                if self._actor is not None:
                    self._client.unpublish_dataset(ACTOR_NAME)
                    self._actor.release()
            if self._errors:
                # The first is the cause: what fails after it mostly fails because the stage was ended.
                raise self._errors[0]
            return self._trainer_ended or Ended(0, stopped=self._over.is_set())
        finally:
            self._over.set()
            # Without waiting: a role that hangs, such as in a call of Dask, must not keep the process from its end.
            self._threads.shutdown(wait=False)
            for lease in leases:
                lease.release()

    def _check_ledger(self) -> None:
        """Raises: DamagedError: an entry up to the newest checkpoint is missing, so its rows could be trained again."""
        ledger, newest = Ledger(self._storage), max(checkpoint_steps(self._storage), default=0)
        # A lineage that replays another one may begin in the middle, so its first entries need not be there.
        if lineage_of(self._storage) != MAIN_LINEAGE or not newest:
            return
        if missing := sorted({*range(1, newest + 1)} - {*ledger.steps()}):
            raise DamagedError(
                f"{self._storage.url}/{ledger.path(missing[0])} is missing ({len(missing)} in all), and checkpoint "
                f"{newest} has trained it; restore it from a backup: without it its rows could be trained again"
            )

    def stop(self) -> None:
        """Ask the stage to end with a checkpoint. From any thread; another process may put a trainer's file itself."""
        self._stopping = True
        if self._config.mode in ("explore", "bench"):
            self._over.set()  # not by the file: the trainer of another process may be at work on the same run
        else:
            self._storage.put(STOP_FILE, b"stop\n")

    def _take_ends(self) -> None:
        """Take in what ended: an error of a role ends the stage, and after the trainer no newer weights will come."""
        # A copy: the explorer's thread may add retention meanwhile.
        for name in [name for name, future in list(self._work.items()) if future.done()]:
            future = self._work.pop(name)
            error = future.exception()
            if error is not None:
                self._errors.append(error)
            elif name == "trainer":
                # Without a rank there was nothing to write down.
                newest = Ended(max(checkpoint_steps(self._storage), default=0), stopped=True)
                ended = self._trainer_ended = future.result() or newest
                # Without newer weights an explorer that was asked to stop has nothing to go on for.
                if ended.stopped:
                    self._over.set()
                if self._explorer is not None:
                    # Who waits for a version beyond this one would wait to its deadline.
                    self._explorer.wake(ended.step)

    def _make_gang(self) -> Gang:
        # All that a rank needs to find its run again; it reads the rest from storage, at a restart too.
        spec = RankSpec(
            config=self._config.to_dict(),
            url=self._storage.url,
            total_steps=self.work.train_steps,
            world_size=num_ranks(self._config, self._layout),
            threads=self._layout.threads_of(TRAINER_RESOURCE),
            log_folder=self._log_folder,
        )
        return Gang(
            client=self._client,
            spec=spec,
            max_restarts=self._config.trainer.max_restarts,
            newest_step=Ledger(self._storage).last_step,
            worker_deadline_s=self._cluster.worker_deadline_s,
            note=self._note,
            cancelled=self._over.is_set,
            stopping=lambda: self._stopping,
        )

    def _make_explorer(self, lease: Lease) -> Explorer:
        bench = self._config.mode == "bench"
        shared = self._config.mode == "explore"
        # It knows neither the cluster nor the trainer: it is given functions that ask them.
        return Explorer(
            self._client,
            self._storage,
            self._config,
            self._sizes,
            num_steps=0 if bench else self.work.explore_steps,
            eval_versions=bench_versions(self._storage, self._config) if bench else (),
            threads=self._layout.threads_of(EXPLORER_RESOURCE),
            log_file=f"{self._log_folder}/engine.log" if self._log_folder else None,
            emit=self._events.put,
            cancelled=self._over.is_set,
            trainer_ended_at=lambda: self._trainer_ended.step if self._trainer_ended is not None else None,
            remove_old_shards=self._remove_old_shards,
            scale=self._ask_for_explorers,
            workers_asked=self._cluster.num_asked(EXPLORER_RESOURCE),
            claims=Claims(self._storage, lease, self._config.synchronizer.sync_timeout) if shared else None,
        )

    def _make_auxiliary_pool(self) -> AuxiliaryPool:
        return AuxiliaryPool(
            self._client,
            self._storage,
            self._config,
            threads=self._layout.threads_of(AUXILIARY_RESOURCE),
            log_folder=self._log_folder,
            deadline_s=self._cluster.worker_deadline_s,
            note=self._note,
            scale=lambda num_workers: self._cluster.scale(AUXILIARY_RESOURCE, num_workers),
        )

    def _ask_for_explorers(self, num_workers: int) -> None:
        if not self._can_scale:
            return
        try:
            self._cluster.scale(EXPLORER_RESOURCE, num_workers)
        except UserError as error:  # workers of such a cluster are somebody else's to start; who joins is taken
            self._can_scale = False
            self._note(f"explorer workers are not asked for: {error}")

    def _remove_old_shards(self) -> int:
        rule = self._config.buffer.trainer_input.experience_buffer.retention
        if rule.keep == "all" or self._config.algorithm.schema_type != "experience":
            return 0
        # Thinning only lists and removes, and runs in the explorer's own time for it.
        if rule.keep != "compact" and self._explorer is not None:
            return self._apply_retention(rule)
        # Seconds for each bucket, which neither the explorer nor this loop waits for.
        if "retention" not in self._work:
            self._work["retention"] = self._threads.submit(self._apply_retention, rule)
        return 0

    def _apply_retention(self, rule: RetentionConfig) -> int:
        try:
            oldest = oldest_resume_point(self._storage)
        except DamagedError:
            return 0  # it is not known what is needed, so nothing goes
        if oldest is None:
            return 0
        log = open_log(self._storage, self._config)
        return apply_retention(self._storage, log, Ledger(self._storage), rule, oldest, self._ended.is_set)

    def _start_synchronizer(self) -> None:
        workers = workers_of(self._client)
        control = control_workers(workers)
        if not control:
            self._actor = self._sync = None
            self._note("every worker is an explorer, which a task may kill: no synchronizer, weights are polled for")
            return
        poll_interval_s = self._config.synchronizer.poll_interval_s
        # The time, too: another start on the same cluster must not meet the key of an actor that it lost.
        self._actor = start_synchronizer(
            self._client, self._storage.url, poll_interval_s, f"{time.time_ns()}-{self._generation}", control
        )
        self._sync = SyncHandle(self._storage, self._client, poll_interval_s)

    def _pass_events_on(self, timeout_s: float) -> None:
        """Pass on what the roles said; wait up to `timeout_s` for the first."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if isinstance(event, WeightsPublished):
                    if self._sync is not None:
                        # Both are told, because they wait apart: the actor for workers in `wait_for_version`, the
                        # explorer for its next submission.
                        self._sync.hint()
                    if self._explorer is not None:
                        self._explorer.wake(event.version)
                self._on_event(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _note(self, text: str) -> None:
        log.info(text)
        self._events.put(Note(text))

    def _watch(self, leases: list[Lease]) -> None:
        """Losses that the roles do not see: a lease, a worker, the synchronizer."""
        now = time.monotonic()
        if now - self._watched < _LOOK_AT_WORKERS_S:
            return
        self._watched = now
        # Two owners would write the same steps; the one that finds itself replaced is the one to go.
        if any(lease.lost for lease in leases):
            self._errors.append(FencedError(f"another process took over {self._storage.url}; this one stops"))
        try:
            self._cluster.check()
        except RoleError as error:
            self._errors.append(error)
        found = workers_of(self._client)
        self._machines.note(found)
        if self._auxiliary is not None:
            try:
                self._auxiliary.look(found)
            except RftError as error:
                self._errors.append(error)
        workers = {a: info["name"] for a, info in found.items()}
        for address, name in self._workers.items():
            if address not in workers:
                self._note(f"worker {name} ({address}) was lost; what it had not finished runs again")
        # At the first look all are there, and none has joined.
        for address, name in workers.items():
            if self._workers and address not in self._workers:
                self._note(f"worker {name} ({address}) joined")
        self._workers = workers
        # Not while the stage ends: workers leave then, and the actor with them.
        if self._actor is not None and self._actor.status in ("error", "cancelled", "lost") and not self._over.is_set():
            self._generation += 1
            self._note("the synchronizer was lost; a new one starts")
            self._start_synchronizer()
