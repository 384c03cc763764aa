"""A cluster on this machine that dask-cuda starts: a worker for each GPU, on the cores that are near it.

Each worker sees its own GPU first, and so does the child process of its role, which calls it the first. Nothing else of
dask-cuda is used: no tensor passes through Dask, so there is nothing to spill, and the worker itself opens no GPU.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, ClassVar

from rftdask.cluster import preloads
from rftdask.cluster.base import Layout, visible_gpus
from rftdask.cluster.local import LocalCluster, grace
from rftdask.errors import UserError


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
        gpus = visible_gpus()
        if len(layout.workers) > len(gpus):
            raise UserError(
                f"cluster.type local-cuda has one worker for each GPU: {len(layout.workers)} are needed, and "
                f"{len(gpus)} GPUs can be seen; use cluster.type local"
            )
        if any(worker.num_gpus > 1 for worker in layout.workers):
            raise UserError("cluster.type local-cuda has one GPU for each worker; use cluster.type local for more")
        super().__init__(layout, dashboard_address, tls)

    def _start(self, layout: Layout, dashboard_address: str | None) -> Any:
        return placed(self._base, layout)(
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


def placed(base: Any, layout: Layout) -> Any:
    """`base` with workers that have the names and resources of the layout, in its order."""

    class Placed(base):  # type: ignore[misc]  # a class of dask-cuda, which is only there with its extra
        num_placed = 0

        def new_worker_spec(self) -> dict[Any, Any]:
            """What the base makes, with our name, resources and preload in place of its own."""
            # dask-cuda calls it once for each worker, in order, and gives the n-th worker the n-th GPU.
            worker = layout.workers[self.num_placed]
            self.num_placed += 1
            ((device, spec),) = super().new_worker_spec().items()
            own = {
                "name": worker.name,
                "resources": dict.fromkeys(worker.resources, 1),
                # Not dask-cuda's own, which takes GPU memory for the worker.
                "preload": [preloads.MODULE],
                "preload_argv": [],
                "dashboard": False,
                "dashboard_address": None,
            }
            env = {**spec["options"]["env"], **grace(worker.resources)}
            return {device: {**spec, "options": {**spec["options"], **own, "env": env}}}

    return Placed
