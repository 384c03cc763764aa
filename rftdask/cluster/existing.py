"""A running Dask cluster of the user.

Workers that hold resources of roles keep them (`dask worker --resources explorer=1`). If no worker has any, roles are
assigned in the order of the workers' names; workers that join later have none. The control role needs no worker of its
own (`control_workers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from distributed import Client, Worker
from distributed.security import Security

from rftdask.cluster.base import Cluster, close_in_turn
from rftdask.cluster.layout import (
    AUXILIARY_RESOURCE,
    EXPLORER_RESOURCE,
    ROLES,
    TRAINER_RESOURCE,
    Layout,
    amount_of,
    plan_jobs,
)
from rftdask.config import Config, fill_from_environment
from rftdask.errors import UserError
from rftdask.processes.dask_cluster import set_config
from rftdask.processes.dask_task import WorkerInfo, workers_of
from rftdask.storage import Storage

_CONNECT_S = 60.0
_OPTIONS = ("address", "scheduler_file", "tls_ca_file", "tls_cert", "tls_key")


class ExistingCluster(Cluster):
    """Example: with ExistingCluster(config, layout) as cluster: cluster.client.submit(...)"""

    cluster_type: ClassVar[str] = "existing"
    takes_options: ClassVar[bool] = True

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Plan from the config; `start` connects to the cluster."""
        section = config.cluster
        num_gpus = section.node_num * section.gpu_per_node or None
        return plan_jobs(stages, dict.fromkeys(ROLES, section.num_cpus or 1), num_gpus)

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Connect, and assign roles to workers without any."""
        return cls(config, layout)

    def __init__(self, config: Config, layout: Layout) -> None:
        """Raises: UserError: wrong options, no answer, or too few workers."""
        options = dict(fill_from_environment(config.cluster.options))
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise UserError(f"cluster.options: {', '.join(unknown)} is not an option; use {', '.join(_OPTIONS)}")
        if ("address" in options) == ("scheduler_file" in options):
            raise UserError("cluster.options: cluster.type existing needs either address or scheduler_file")
        self._layout = layout
        self._restore = set_config()
        security = None
        if "tls_ca_file" in options:
            security = Security(
                tls_ca_file=options["tls_ca_file"],
                tls_client_cert=options.get("tls_cert"),
                tls_client_key=options.get("tls_key"),
                require_encryption=True,
            )
        address, file = options.get("address"), options.get("scheduler_file")
        try:
            # As the default client, which actor calls use.
            self.client = Client(address, scheduler_file=file, security=security, timeout=_CONNECT_S)
        except (OSError, ValueError) as error:
            self._restore.__exit__(None, None, None)
            raise UserError(f"cluster.options: no Dask scheduler answers at {address or file}: {error}") from error
        try:
            workers = workers_of(self.client)
            # Called on each worker, which reports its resources to the scheduler and keeps them after this run.
            for worker, resources in assign(workers, layout).items():
                self.client.run(_set_resources, resources, workers=[worker])
        except BaseException:
            self.close()
            raise

    def scale(self, role: str, num_workers: int) -> None:
        """Raises: UserError: not the current number."""
        if num_workers != self.num_asked(role):
            raise UserError("cluster.type existing: start or stop workers where you started the cluster")

    def num_asked(self, role: str) -> int:
        """Number of workers in the layout."""
        return self._layout.num_workers(role)

    def close(self) -> None:
        """Disconnect. Workers keep running, and keep their roles."""
        close_in_turn(self.client)
        self._restore.__exit__(None, None, None)


def assign(workers: Mapping[str, WorkerInfo], layout: Layout) -> dict[str, dict[str, float]]:
    """Resources to assign, by address; empty if workers have roles already.

    Args: workers: by address, with "name" and "resources". Raises: UserError: too few workers.
    """
    needed = {role: layout.num_workers(role) for role in ROLES}
    # If any worker has a role, the user has assigned all of them.
    held = {role: sum(bool(info["resources"].get(role)) for info in workers.values()) for role in ROLES}
    if any(held.values()):
        for role in ROLES:
            if held[role] < needed[role]:
                raise UserError(
                    f"cluster: {needed[role]} workers for role {role} are needed, and {held[role]} of the "
                    f"{len(workers)} workers hold that resource (dask worker --resources {role}="
                    f"{amount_of(role, _num_gpus(layout, role))})"
                )
        return {}
    if len(workers) < sum(needed.values()):
        raise UserError(
            f"cluster: {needed[TRAINER_RESOURCE]} trainer + {needed[EXPLORER_RESOURCE]} explorers"
            f"{f' + {needed[AUXILIARY_RESOURCE]} auxiliary' * bool(needed[AUXILIARY_RESOURCE])} = "
            f"{sum(needed.values())} workers are needed, and the existing cluster has {len(workers)}"
        )
    order = [role for role in ROLES for _ in range(needed[role])]
    # By name, so that a second run on the same workers assigns the same roles.
    addresses = sorted(workers, key=lambda address: (str(workers[address]["name"]), address))
    amounts = {role: float(amount_of(role, _num_gpus(layout, role))) for role in ROLES}
    return {address: {role: amounts[role]} for address, role in zip(addresses, order, strict=False)}


def _num_gpus(layout: Layout, role: str) -> int:
    """GPUs of each worker of the role."""
    return next((worker.num_gpus for worker in layout.workers if role in worker.resources), 1)


async def _set_resources(resources: dict[str, float], dask_worker: Worker) -> None:
    await dask_worker.set_resources(**resources)
