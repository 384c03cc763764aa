"""Stage: one mode of one run folder, from its first task to its last checkpoint, on a running cluster.

A stage starts the roles of its mode (trainer gang, explorer, synchronizer), watches them, forwards their events, and
ends when they end. Start and restart are the same: each role reads the run folder and does the missing work. A failed
role ends the stage with the error of that role.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from distributed import Future as DaskFuture
from distributed.threadpoolexecutor import ThreadPoolExecutor

from rftdask.buffer.batches.ledger import MAIN_LINEAGE, Ledger, lineage_of
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
from rftdask.monitor.events import CODEC, Alive, Ended, Event, Note, Started, WeightsPublished
from rftdask.monitor.metrics import MachineLog
from rftdask.processes.dask_task import workers_of
from rftdask.run.lease import Lease, lease_role, roles_of
from rftdask.run.run_folder import STOP_FILE
from rftdask.storage import Storage
from rftdask.synchronizer.actor import ACTOR_NAME, SyncHandle, Synchronizer, start_synchronizer
from rftdask.trainer.checkpoint import checkpoint_steps, oldest_resume_point
from rftdask.trainer.gang import TOPIC, Gang, RankSpec

WORKER_DEADLINE_S = 300.0
_EVENT_TIMEOUT_S = 0.1
_WATCH_INTERVAL_S = 0.5
_ALIVE_S = 15.0
"""Seconds after a heartbeat in which the trainer waits: it sends one every 5 s then, and none while it computes."""
_RETENTION_INTERVAL_S = 5.0
"""Seconds between retention passes in mode train. In other modes the explorer schedules them."""

log = logging.getLogger(__name__)


def bench_versions(storage: Storage, config: Config) -> tuple[int, ...]:
    """Return the versions that mode bench evaluates: the initial model and every checkpoint, or only the newest.

    A model behind an API has only version 0. Raises: DataError: no checkpoint exists.
    """
    if config.is_external:
        return (0,)
    steps = checkpoint_steps(storage)
    if not config.explorer.bench_on_latest_checkpoint:
        return (0, *steps)
    if not steps:
        raise DataError(
            f"{storage.url} has no checkpoint to evaluate; set explorer.bench_on_latest_checkpoint to false for the "
            "initial model"
        )
    return (steps[-1],)


class StageRun:
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
        """on_event: called in the thread of `run` with the events of the roles."""
        self._config, self._storage = config, storage
        self._cluster, self._client, self._layout = cluster, cluster.client, layout
        self._sizes, self._on_event, self._log_folder = sizes, on_event, log_folder
        self.work = plan_work(config, sizes)
        self._events: queue.Queue[Event] = queue.Queue()
        self._over = threading.Event()
        """Set when the roles must end now."""
        self._ended = threading.Event()
        """Set when the roles have ended, to stop compaction."""
        self._stopping = False
        self._trainer_ended: Ended | None = None
        self._gang: Gang | None = None
        self._trainer_started = False
        self._alive_s = -math.inf
        """Time of the trainer's last heartbeat, which it sends while it waits for a batch."""
        self._explorer: Explorer | None = None
        self._auxiliary: AuxiliaryPool | None = None
        self._sync: SyncHandle | None = None
        self._actor: DaskFuture[Synchronizer] | None = None
        self._generation = 0
        self._can_scale = True
        # Threads of Dask's executor do not keep the process alive, so a second Ctrl-C ends it at once.
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="stage")
        self._errors: list[BaseException] = []
        self._work: dict[str, Future[Any]] = {}
        """Active threads by role, and "retention"."""
        self._workers: dict[str, str | int] = {}
        self._watched = self._retained = 0.0
        self._machines = MachineLog(storage)

    def run(self) -> Ended:
        """Start the roles, watch them and forward their events until they end. Returns: how the trainer ended.

        Raises: the error of the role that failed first; FencedError: another process owns a role, or took one over.
        """
        roles = roles_of(self._config)
        # The outer `finally` also releases leases taken before one that is refused.
        leases: list[Lease] = []
        try:
            for role in roles:
                # First, so that a refused process has not touched the ledger, the stop file or the weights.
                steps = self.work.explore_steps if self._config.mode == "explore" else None
                leases.append(Lease(self._storage, lease_role(self._config, role), explore_steps=steps))
            self._cluster.use((*roles, *([AUXILIARY_RESOURCE] * bool(self._config.models_apart))))
            if "trainer" in roles:
                self._check_ledger()
                self._storage.remove(STOP_FILE)
            if self._stopping:
                self.stop()  # the request came before the removal of the old stop file
            # Before the roles start, to receive their first events. Dask calls the handler in its own thread.
            self._client.subscribe_topic(TOPIC, lambda message: self._events.put(CODEC.decode(message[1])))
            if "explorer" in roles:
                self._start_synchronizer()
                if self._config.models_apart:
                    self._auxiliary = self._make_auxiliary_pool()
                self._explorer = self._make_explorer(leases[-1])
                self._explorer.open()
                self._work["explorer"] = self._threads.submit(self._explorer.run)
            if "trainer" in roles:
                self._gang = self._make_gang()
                self._work["trainer"] = self._threads.submit(self._gang.run)
            try:
                # Until every role has ended; `_work` may also contain retention.
                while self._work.keys() & set(roles):
                    self._forward_events(_EVENT_TIMEOUT_S)
                    self._watch(leases)
                    self._take_ends()
                    if self._errors:
                        self._over.set()
                    # An explorer schedules retention itself.
                    if self._explorer is None and time.monotonic() - self._retained >= _RETENTION_INTERVAL_S:
                        self._retained = time.monotonic()
                        self._remove_old_shards()
                self._machines.close()
                self._forward_events(0.0)
                if not self._errors and self._explorer is None:
                    self._remove_old_shards()  # shards that the last checkpoint settled; waited for below
            finally:
                self._ended.set()
                # Retention finishes its current bucket while this process holds the lease. This does not wait for
                # roles: they have ended, unless an error or a second Ctrl-C ends the stage, and then one may hang.
                wait([future for role, future in list(self._work.items()) if role == "retention"], WORKER_DEADLINE_S)
                self._take_ends()
                self._client.unsubscribe_topic(TOPIC)
                if self._auxiliary is not None:
                    self._auxiliary.close()
                if self._actor is not None:
                    self._client.unpublish_dataset(ACTOR_NAME)
                    self._actor.release()
            if self._errors:
                # The first is the cause; later errors usually follow from the end of the stage.
                raise self._errors[0]
            return self._trainer_ended or Ended(0, stopped=self._over.is_set())
        finally:
            self._over.set()
            # Without waiting: a hanging role, for example in a Dask call, must not keep the process alive.
            self._threads.shutdown(wait=False)
            for lease in leases:
                lease.release()

    def _check_ledger(self) -> None:
        """Check the ledger up to the newest checkpoint. Raises: DamagedError: a missing entry, whose rows could be
        trained again.
        """
        ledger, newest = Ledger(self._storage), max(checkpoint_steps(self._storage), default=0)
        # The ledger of a replay may begin in the middle.
        if lineage_of(self._storage) != MAIN_LINEAGE or not newest:
            return
        if missing := sorted({*range(1, newest + 1)} - {*ledger.steps()}):
            raise DamagedError(
                f"{self._storage.url}/{ledger.path(missing[0])} is missing ({len(missing)} in all), and checkpoint "
                f"{newest} has trained it; restore it from a backup: without it its rows could be trained again"
            )

    def stop(self) -> None:
        """Request that the stage ends with a checkpoint. Thread-safe. Other processes can write the stop file."""
        self._stopping = True
        if self._config.mode in ("explore", "bench"):
            self._over.set()  # without the file, which would stop the trainer of another process on the same run
        else:
            self._storage.put(STOP_FILE, b"stop\n")

    def waits_for(self) -> str:
        """Return what the roles wait for, as text for the user. Called in any thread."""
        parts = []
        if "trainer" in self._work and self._gang is not None:
            step = self._gang.newest_step() + 1
            if self._gang.num_missing:
                parts.append(f"{self._gang.num_missing} of {self._gang.spec.world_size} trainer workers to join")
            elif not self._trainer_started:
                parts.append("the trainer to load its models")
            elif time.monotonic() - self._alive_s < _ALIVE_S:
                parts.append(f"the experiences of step {step}")
            else:
                parts.append(f"the trainer to compute step {step}")
        if "explorer" in self._work and self._explorer is not None:
            parts.append(self._explorer.waits_for())
        parts += [f"{name} to end" for name in list(self._work) if name not in ("trainer", "explorer")]
        return "; ".join(parts) or "the roles to start"

    def _take_ends(self) -> None:
        """Collect ended threads. An error ends the stage; after the trainer, no newer weights appear."""
        # A copy, because the explorer's thread may add retention meanwhile.
        for name in [name for name, future in list(self._work.items()) if future.done()]:
            future = self._work.pop(name)
            error = future.exception()
            if error is not None:
                self._errors.append(error)
            elif name == "trainer":
                # None: no rank was started, so the newest checkpoint stays the end.
                newest = Ended(max(checkpoint_steps(self._storage), default=0), stopped=True)
                ended = self._trainer_ended = future.result() or newest
                # An explorer that waits for newer weights must stop too.
                if ended.stopped:
                    self._over.set()
                if self._explorer is not None:
                    # Otherwise a wait for a later version would last until its deadline.
                    self._explorer.wake(ended.step)

    def _make_gang(self) -> Gang:
        # Everything that a rank needs to find its run; it reads the rest from storage, also after a restart.
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
        # The explorer does not know the cluster or the trainer; it gets functions that query them.
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
        except UserError as error:  # this cluster does not start workers; it accepts those that join
            self._can_scale = False
            self._note(f"explorer workers are not requested: {error}")

    def _remove_old_shards(self) -> int:
        rule = self._config.buffer.trainer_input.experience_buffer.retention
        if rule.keep == "all" or self._config.algorithm.schema_type != "experience":
            return 0
        # Thinning only lists and removes files, so it runs in the explorer's thread.
        if rule.keep != "compact" and self._explorer is not None:
            return self._apply_retention(rule)
        # Compaction takes seconds per bucket, so it runs in a separate thread.
        if "retention" not in self._work:
            self._work["retention"] = self._threads.submit(self._apply_retention, rule)
        return 0

    def _apply_retention(self, rule: RetentionConfig) -> int:
        try:
            oldest = oldest_resume_point(self._storage)
        except DamagedError:
            return 0  # the needed shards are not known, so none is removed
        if oldest is None:
            return 0
        log = open_log(self._storage, self._config)
        return apply_retention(self._storage, log, Ledger(self._storage), rule, oldest, self._ended.is_set)

    def _start_synchronizer(self) -> None:
        workers = workers_of(self._client)
        control = control_workers(workers)
        if not control:
            self._actor = self._sync = None
            self._note("every worker is an explorer, which a task may kill: no synchronizer; workers poll for weights")
            return
        poll_interval_s = self._config.synchronizer.poll_interval_s
        # The key includes the time, so that another start on the same cluster cannot reuse the key of a lost actor.
        self._actor = start_synchronizer(
            self._client, self._storage.url, poll_interval_s, f"{time.time_ns()}-{self._generation}", control
        )
        self._sync = SyncHandle(self._storage, self._client, poll_interval_s)

    def _forward_events(self, timeout_s: float) -> None:
        """Forward queued events of the roles; wait up to `timeout_s` for the first."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if isinstance(event, Started):
                    self._trainer_started = True
                elif isinstance(event, Alive):
                    self._alive_s = time.monotonic()
                if isinstance(event, WeightsPublished):
                    if self._sync is not None:
                        # Two separate waits: workers wait in `wait_for_version` of the actor, the explorer waits
                        # before its next submission.
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
        """Detect failures that the roles cannot see: lost leases, workers, or the synchronizer."""
        now = time.monotonic()
        if now - self._watched < _WATCH_INTERVAL_S:
            return
        self._watched = now
        # Two owners would both write these steps, so the replaced one must stop.
        if any(lease.lost for lease in leases):
            self._errors.append(FencedError(f"another process took over {self._storage.url}; this one stops"))
        try:
            self._cluster.check()
        except RoleError as error:
            self._errors.append(error)
        infos = workers_of(self._client)
        self._machines.note(infos)
        if self._auxiliary is not None:
            try:
                self._auxiliary.look(infos)
            except RftError as error:
                self._errors.append(error)
        workers = {address: info["name"] for address, info in infos.items()}
        for address, name in self._workers.items():
            if address not in workers:
                self._note(f"worker {name} ({address}) was lost; its unfinished work runs again")
        # The first poll finds the initial workers, which are not reported.
        for address, name in workers.items():
            if self._workers and address not in self._workers:
                self._note(f"worker {name} ({address}) joined")
        self._workers = workers
        # Not while the stage ends, when workers leave together with the actor.
        if self._actor is not None and self._actor.status in ("error", "cancelled", "lost") and not self._over.is_set():
            self._generation += 1
            self._note("the synchronizer was lost; a new one starts")
            self._start_synchronizer()
