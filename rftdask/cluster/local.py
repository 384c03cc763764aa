"""A cluster on this machine: a Dask scheduler in this process and one worker process for each role.

They talk TLS: whoever reaches a scheduler's port may run code as its owner, and on a shared machine everybody reaches
127.0.0.1. The keys are made anew at each start and are in no file: each worker gets them through the pipe of its nanny.

Dask is imported late, as the cluster starts: what its processes are forked from is to begin before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rftdask.cluster import preloads
from rftdask.cluster.base import Cluster, close_in_turn
from rftdask.cluster.layout import (
    AUXILIARY_RESOURCE,
    EXPLORER_RESOURCE,
    ROLES,
    WORKER_IMPORTS,
    Layout,
    WorkerPlan,
    check_one_machine,
    count_gpus,
    imports_ahead,
    num_cores,
    plan_layout,
    scaled,
    worker_imports,
)
from rftdask.config import Config
from rftdask.errors import WaitTimeout
from rftdask.processes.device_lock import shared_devices
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.gpus import visible_gpus
from rftdask.processes.zygote import ZYGOTE_ADDRESS, can_fork, start_zygote, umask
from rftdask.storage import Storage
from rftdask.synchronizer.node_cache import sweep

if TYPE_CHECKING:
    from distributed import SpecCluster

_START_DEADLINE_S = 120


def grace(resources: Collection[str]) -> dict[str, str]:
    """Environment of a worker that this process starts: how long it outlives SIGTERM (preloads.py). Engines end at
    once: nothing needs them.
    """
    ends = EXPLORER_RESOURCE in resources or AUXILIARY_RESOURCE in resources
    return {preloads.GRACE_VARIABLE: "0" if ends else str(preloads.GRACE_S)}


def worker_spec(name: str, resources: Mapping[str, int], env: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """A worker in its nanny, as SpecCluster starts it. options: host, and what more of a nanny's is not the default."""
    own = {
        "name": name,
        "nthreads": 1,
        "dashboard": False,
        "dashboard_address": None,
        # The data is in child processes, which the nanny does not see.
        "memory_limit": 0,
        "silence_logs": logging.CRITICAL,
        "preload": [preloads.MODULE],
        "resources": dict(resources),
        "env": {**grace(resources), **env},
    }
    return {"cls": "distributed.Nanny", "options": {**own, **options}}


class LocalCluster(Cluster):
    """Scheduler and workers on this machine.

    Example: with LocalCluster(layout) as cluster: cluster.client.submit(...)
    """

    cluster_type: ClassVar[str] = "local"
    is_one_machine: ClassVar[bool] = True

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Raises: UserError: several nodes are wanted, or this machine has too few cores or GPUs."""
        check_one_machine(config)
        return plan_layout(stages, config.cluster.num_cpus or num_cores(), count_gpus(config))

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Starts what workers, engines and trainers are forked from, with what those of the stages import."""
        if can_fork(count_gpus(config) > 0):
            start_fork_server(worker_imports(stages), imports_ahead(stages, ROLES))

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Returns when all workers have joined."""
        return cls(layout, config.cluster.dashboard_address, config.cluster.tls)

    def __init__(self, layout: Layout, dashboard_address: str | None = None, tls: bool = True) -> None:
        """dashboard_address: host:port of Dask's dashboard; None: no dashboard (it costs seconds of start-up)."""
        import dask
        from distributed.security import Security

        from rftdask.processes.dask_cluster import DASK_CONFIG, METHOD, connect

        self._stack = contextlib.ExitStack()
        # Global to the process, and put back by `close`: a notebook may have a cluster of its own.
        self._stack.enter_context(dask.config.set(DASK_CONFIG))
        self._layout = layout
        self._env: dict[str, str] = {}
        # Of this start alone: nobody else has its devices, and what an earlier one left has ended, or ends by itself.
        self._turns = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="rftdask-turns-", ignore_cleanup_errors=True)
        )
        if can_fork(any(worker.gpu is not None for worker in layout.workers)):
            start_fork_server(WORKER_IMPORTS)
            self._stack.enter_context(dask.config.set({METHOD: "forkserver"}))
            # The fork server has the environment and the mask of its start, which may be those of an earlier run.
            own = {ZYGOTE_ADDRESS: start_zygote(), preloads.UMASK_VARIABLE: str(umask())}
            self._env = {**os.environ, **own}
        self._security = Security.temporary() if tls else None
        self._comm = {"host": "127.0.0.1", "protocol": "tls://" if tls else "tcp://"}
        self._plans = list(layout.workers)
        self._num_named = len(self._plans)  # counts on, so that a name never comes back
        # Two roles may ask at once, and both plans are made from the same list.
        self._scaling = threading.Lock()
        with contextlib.ExitStack() as failing:
            failing.callback(self._stack.close)
            self._cluster = self._start(layout, dashboard_address)
            self.client = connect(self._cluster)
            failing.callback(close_in_turn, self.client, self._cluster)
            try:
                self.client.wait_for_workers(len(layout.workers), timeout=_START_DEADLINE_S)
            except TimeoutError as error:
                told = f"{len(layout.workers)} local workers did not start in {_START_DEADLINE_S} s"
                raise WaitTimeout(told) from error
            failing.pop_all()  # from here on `close` does it

    def _start(self, layout: Layout, dashboard_address: str | None) -> SpecCluster:
        from rftdask.processes.dask_cluster import start_dask

        workers = {worker.name: self._worker_spec(worker) for worker in layout.workers}
        return start_dask(workers, dashboard_address, self._security, **self._comm)

    def _worker_spec(self, worker: WorkerPlan) -> dict[str, Any]:
        # What the worker sees its child sees, which then finds these GPUs alone and calls one of them the first.
        gpus = [] if worker.gpu is None else visible_gpus()[worker.gpu : worker.gpu + worker.num_gpus]
        env = self._env if worker.gpu is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        env = {**env, **shared_devices(self._turns, worker.shares)}
        return worker_spec(worker.name, worker.amounts, env, security=self._security, **self._comm)

    def scale(self, role: str, num_workers: int) -> None:
        """New workers get the GPUs that nobody has; those that leave are the newest."""
        with self._scaling:
            num_gpus = len(visible_gpus()) if any(plan.gpu is not None for plan in self._plans) else 0
            # All GPUs of the machine, also those that the layout left over: they are what new explorers get.
            before = {plan.name for plan in self._plans}
            self._plans = scaled(self._plans, self._layout, role, num_workers, num_gpus, self._num_named)
            self._num_named += sum(plan.name not in before for plan in self._plans)
            spec = {plan.name: self._worker_spec(plan) for plan in self._plans}
            # In the loop of the cluster, which reads the dict of workers there.
            assert self._cluster.loop is not None
            self._cluster.loop.add_callback(self._apply, spec)

    def num_asked(self, role: str) -> int:
        """Those of the plan, whether or not they have started."""
        return sum(role in plan.resources for plan in self._plans)

    def _apply(self, spec: dict[str, Any]) -> None:
        # What is the same in both stays as it is: a worker that is there keeps its engine.
        there = self._cluster.worker_spec
        for name in there.keys() - spec.keys():
            del there[name]
        there.update({name: spec[name] for name in spec.keys() - there.keys()})
        # Dask's own step from the dict to processes: it starts what is new there, and ends what is gone.
        self._cluster._correct_state()

    def close(self) -> None:
        """Client, workers and scheduler in turn; then the configuration of Dask as it was."""
        close_in_turn(self.client, self._cluster)
        sweep()  # weights that workers had mapped, which are not asked whether they have an end
        self._stack.close()
