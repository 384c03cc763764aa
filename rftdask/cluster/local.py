"""A cluster on this machine: a Dask scheduler in this process, and worker processes.

They use TLS, because access to a scheduler's port allows running code as its owner, and every user of a shared machine
can reach 127.0.0.1. Keys are created at each start and sent through the pipe of a worker's nanny, never stored.

Dask is imported late, when the cluster starts, because the fork server starts before (processes/zygote.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from rftdask.cluster.base import Cluster, close_in_turn
from rftdask.cluster.layout import (
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
from rftdask.cluster.preloads import MODULE, UMASK_VARIABLE, grace, worker_spec
from rftdask.cluster.secrets_dir import new_security
from rftdask.config import Config
from rftdask.errors import UserError, WaitTimeout
from rftdask.processes.dask_cluster import connect, set_config, start_dask
from rftdask.processes.device_lock import shared_devices
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.gpus import visible_gpus
from rftdask.processes.leftovers import remove_abandoned_semaphores
from rftdask.processes.zygote import ZYGOTE_ADDRESS, can_fork, start_zygote, umask
from rftdask.storage import Storage
from rftdask.storage.temporary import TemporaryFolder
from rftdask.synchronizer.node_cache import sweep

if TYPE_CHECKING:
    from distributed import SpecCluster

_START_DEADLINE_S = 120


class LocalCluster(Cluster):
    """Scheduler and workers on this machine.

    Example: with LocalCluster(layout) as cluster: cluster.client.submit(...)
    """

    cluster_type: ClassVar[str] = "local"
    is_one_machine: ClassVar[bool] = True

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Raises: UserError: node_num is above 1, or this machine has too few cores or GPUs."""
        check_one_machine(config)
        return plan_layout(stages, config.cluster.num_cpus or num_cores(), count_gpus(config))

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Start the fork server and the zygote of workers, engines and ranks."""
        if can_fork(count_gpus(config) > 0):
            start_fork_server(worker_imports(stages), imports_ahead(stages, ROLES))

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Start the cluster and wait until all workers have joined."""
        return cls(layout, config.cluster.dashboard_address, config.cluster.tls)

    def __init__(self, layout: Layout, dashboard_address: str | None = None, tls: bool = True) -> None:
        """dashboard_address: host:port of Dask's dashboard. None: no dashboard, which saves seconds of start-up."""
        forks = can_fork(any(worker.gpu is not None for worker in layout.workers))
        self._layout = layout
        self._env: dict[str, str] = {}
        self._security = new_security() if tls else None
        self._comm = {"host": "127.0.0.1", "protocol": "tls://" if tls else "tcp://"}
        self._plans = list(layout.workers)
        self._num_named = len(self._plans)  # names are never used again
        # Two roles may scale at the same time.
        self._scaling = threading.Lock()
        with contextlib.ExitStack() as stack:
            # Global to the process; `close` restores it for other clusters of a notebook.
            stack.enter_context(set_config(forks=forks))
            # Device locks of this start; processes of earlier starts have ended.
            self._lock_dir = stack.enter_context(TemporaryFolder("devices"))
            remove_abandoned_semaphores()
            if forks:
                start_fork_server(WORKER_IMPORTS)
                # The fork server may have the environment and the umask of an earlier run.
                forked = {ZYGOTE_ADDRESS: start_zygote(), UMASK_VARIABLE: str(umask())}
                self._env = {**os.environ, **forked}
            stack.callback(sweep)  # weights that ended workers had mapped
            self._cluster = self._start(layout, dashboard_address)
            stack.callback(close_in_turn, self._cluster)
            self.client = connect(self._cluster)
            stack.callback(close_in_turn, self.client)
            try:
                self.client.wait_for_workers(len(layout.workers), timeout=_START_DEADLINE_S)
            except TimeoutError as error:
                text = f"{len(layout.workers)} local workers did not start in {_START_DEADLINE_S} s"
                raise WaitTimeout(text) from error
            self._stack = stack.pop_all()

    def _start(self, layout: Layout, dashboard_address: str | None) -> SpecCluster:
        workers = {worker.name: self._worker_spec(worker) for worker in layout.workers}
        return start_dask(workers, dashboard_address, self._security, **self._comm)

    def _worker_spec(self, worker: WorkerPlan) -> dict[str, Any]:
        # Children inherit the variable, and so see only these GPUs.
        gpus = [] if worker.gpu is None else visible_gpus()[worker.gpu : worker.gpu + worker.num_gpus]
        env = self._env if worker.gpu is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        env = {**env, **shared_devices(self._lock_dir, worker.shares)}
        return worker_spec(worker.name, worker.amounts, env, security=self._security, **self._comm)

    def scale(self, role: str, num_workers: int) -> None:
        """Give new workers free GPUs; the newest workers leave first."""
        with self._scaling:
            num_gpus = len(visible_gpus()) if any(plan.gpu is not None for plan in self._plans) else 0
            before = {plan.name for plan in self._plans}
            self._plans = scaled(self._plans, self._layout, role, num_workers, num_gpus, self._num_named)
            self._num_named += sum(plan.name not in before for plan in self._plans)
            spec = {plan.name: self._worker_spec(plan) for plan in self._plans}
            # The cluster reads the dict of workers in its loop.
            assert self._cluster.loop is not None
            self._cluster.loop.add_callback(self._apply, spec)

    def num_asked(self, role: str) -> int:
        """Number of planned workers, started or not."""
        return sum(role in plan.resources for plan in self._plans)

    def _apply(self, spec: dict[str, Any]) -> None:
        # Unchanged entries stay as they are, so these workers keep their engines.
        current = self._cluster.worker_spec
        for name in current.keys() - spec.keys():
            del current[name]
        current.update({name: spec[name] for name in spec.keys() - current.keys()})
        # Starts the new workers of the dict and ends the removed ones.
        self._cluster._correct_state()

    def close(self) -> None:
        """Close client, workers and scheduler, and restore the configuration of Dask."""
        self._stack.close()


class LocalCudaCluster(LocalCluster):
    """A cluster on this machine that dask-cuda starts, with each worker on the cores near its GPUs.

    Each worker and its child processes see only their own GPUs. No other feature of dask-cuda is used: tensors do not
    pass through Dask, and workers do not open GPUs.
    Example: with LocalCudaCluster(layout) as cluster: cluster.client.submit(...)
    """

    cluster_type: ClassVar[str] = "local-cuda"
    required_package: ClassVar[str] = "dask_cuda"
    required_extra: ClassVar[str] = "gpu"

    def __init__(
        self, layout: Layout, dashboard_address: str | None = None, tls: bool = True, base: Any = None
    ) -> None:
        """base: replacement of dask_cuda.LocalCUDACluster. Raises: UserError: no GPU is visible."""
        self._base = base or import_module("dask_cuda").LocalCUDACluster  # late: an extra
        if all(worker.gpu is None for worker in layout.workers):
            raise UserError("cluster.type local-cuda needs GPUs, and none is visible; use cluster.type local")
        super().__init__(layout, dashboard_address, tls)

    def _start(self, layout: Layout, dashboard_address: str | None) -> Any:
        return role_local_cuda_cluster(self._base, layout, self._lock_dir)(
            CUDA_VISIBLE_DEVICES=visible_gpus(),
            n_workers=len(layout.workers),
            threads_per_worker=1,
            memory_limit=None,
            device_memory_limit=None,
            security=self._security,
            **self._comm,
            dashboard_address=dashboard_address,
            silence_logs=logging.ERROR,
        )

    def scale(self, role: str, num_workers: int) -> None:
        """Raises: UserError: not the current number."""
        if num_workers != self.num_asked(role):
            raise UserError(
                "cluster.type local-cuda has one worker per GPU and cannot be scaled; use cluster.type local"
            )


def role_local_cuda_cluster(base: Any, layout: Layout, lock_dir: str = "") -> Any:
    """Subclass of `base` with the workers of the layout. lock_dir: folder of device locks."""

    class RoleLocalCUDACluster(base):  # type: ignore[misc]  # dask-cuda is optional
        num_placed = 0
        worker_spec: dict[Any, Any]

        def new_worker_spec(self) -> dict[Any, Any]:
            """Spec of the next worker, with its name, resources and preload."""
            # dask-cuda calls this once per worker and takes the first GPU without a worker. So `worker_spec` has
            # workers on all GPUs but the planned one, which other workers may share.
            worker = layout.workers[self.num_placed]
            self.num_placed += 1
            gpus: list[Any] = list(self.cuda_visible_devices)
            first = worker.gpu or 0  # the control role has no GPU
            current: dict[Any, Any] = self.worker_spec
            self.worker_spec = dict.fromkeys(gpus[:first] + gpus[first + 1 :])
            ((_, spec),) = super().new_worker_spec().items()
            self.worker_spec = current
            own_gpus = [] if worker.gpu is None else gpus[first : first + worker.num_gpus]
            options = {
                "name": worker.name,
                "resources": worker.amounts,
                # The preload of dask-cuda would allocate GPU memory.
                "preload": [MODULE],
                "preload_argv": [],
                "dashboard": False,
                "dashboard_address": None,
            }
            env = {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, own_gpus)),
                **grace(worker.resources),
                **shared_devices(lock_dir, worker.shares),
            }
            return {worker.name: {**spec, "options": {**spec["options"], **options, "env": env}}}

    return RoleLocalCUDACluster
