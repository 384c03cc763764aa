"""A cluster on this machine that dask-cuda starts, with each worker on the cores near its GPUs.

Each worker and its child processes see only their own GPUs. No other feature of dask-cuda is used: tensors do not pass
through Dask, and workers do not open GPUs.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, ClassVar

from rftdask.cluster import preloads
from rftdask.cluster.layout import Layout
from rftdask.cluster.local import LocalCluster
from rftdask.errors import UserError
from rftdask.processes.device_lock import shared_devices
from rftdask.processes.gpus import visible_gpus


class LocalCudaCluster(LocalCluster):
    """Example: with LocalCudaCluster(layout) as cluster: cluster.client.submit(...)"""

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
                "preload": [preloads.MODULE],
                "preload_argv": [],
                "dashboard": False,
                "dashboard_address": None,
            }
            env = {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, own_gpus)),
                **preloads.grace(worker.resources),
                **shared_devices(lock_dir, worker.shares),
            }
            return {worker.name: {**spec, "options": {**spec["options"], **options, "env": env}}}

    return RoleLocalCUDACluster
