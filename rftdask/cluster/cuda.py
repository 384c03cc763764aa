"""A cluster on this machine that dask-cuda starts: its workers on the cores that are near their GPUs.

Each worker sees its own GPUs alone, and so does the child process of its role. Nothing else of dask-cuda is used: no
tensor passes through Dask, so there is nothing to spill, and the worker itself opens no GPU.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, ClassVar

from rftdask.cluster import preloads
from rftdask.cluster.layout import Layout
from rftdask.cluster.local import LocalCluster, grace
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
        """base: dask_cuda.LocalCUDACluster, or what takes its place in a test.

        Raises: UserError: a role has no GPU.
        """
        self._base = base or import_module("dask_cuda").LocalCUDACluster  # late: an extra
        if all(worker.gpu is None for worker in layout.workers):
            raise UserError("cluster.type local-cuda needs GPUs, and none can be seen here; use cluster.type local")
        super().__init__(layout, dashboard_address, tls)

    def _start(self, layout: Layout, dashboard_address: str | None) -> Any:
        return placed(self._base, layout, self._turns)(
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
        """Raises: UserError: another number than there is."""
        if num_workers != self.num_asked(role):
            raise UserError(
                "cluster.type local-cuda has a worker for each GPU and is not scaled; use cluster.type local"
            )


def placed(base: Any, layout: Layout, turns: str = "") -> Any:
    """`base` with the workers of the layout, in its order; turns: folder of those who share GPUs."""

    class Placed(base):  # type: ignore[misc]  # a class of dask-cuda, which is only there with its extra
        num_placed = 0
        worker_spec: dict[Any, Any]

        def new_worker_spec(self) -> dict[Any, Any]:
            """What the base makes, with our name, resources and preload in place of its own."""
            # dask-cuda calls it once for each worker, in order, and takes the first of its GPUs that no worker has yet:
            # so it is shown workers on all but the one that is meant, also where another worker has that one, too.
            worker = layout.workers[self.num_placed]
            self.num_placed += 1
            gpus: list[Any] = list(self.cuda_visible_devices)
            first = worker.gpu or 0  # the control role has none, and lies near the first
            there: dict[Any, Any] = self.worker_spec
            self.worker_spec = dict.fromkeys(gpus[:first] + gpus[first + 1 :])
            ((_, spec),) = super().new_worker_spec().items()
            self.worker_spec = there
            own_gpus = [] if worker.gpu is None else gpus[first : first + worker.num_gpus]
            own = {
                "name": worker.name,
                "resources": worker.amounts,
                # Not dask-cuda's own, which takes GPU memory for the worker.
                "preload": [preloads.MODULE],
                "preload_argv": [],
                "dashboard": False,
                "dashboard_address": None,
            }
            env = {
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, own_gpus)),
                **grace(worker.resources),
                **shared_devices(turns, worker.shares),
            }
            return {worker.name: {**spec, "options": {**spec["options"], **own, "env": env}}}

    return Placed
