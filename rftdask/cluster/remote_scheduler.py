"""A scheduler in the driver's process and one worker for the light roles; all other workers join from elsewhere.

They find the scheduler by the run's private folder, and talk TLS with its keys. It knows neither who starts those
workers nor where; see jobqueue.py for jobs, join.py for workers that a script starts.
"""

from __future__ import annotations

import os
import sys
from typing import ClassVar

import dask
from distributed.utils import get_ip, get_ip_interface

from rftdask.cluster.base import Cluster, close_in_turn
from rftdask.cluster.layout import CONTROL_RESOURCE, ROLES, WORKER_IMPORTS, Layout, plan_jobs
from rftdask.cluster.local import worker_spec
from rftdask.cluster.preloads import UMASK_VARIABLE
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.config import Config
from rftdask.errors import UserError, WaitTimeout
from rftdask.processes.dask_cluster import DASK_CONFIG, METHOD, connect, start_dask
from rftdask.processes.fork_server import start_fork_server
from rftdask.processes.nursery import start_nursery, umask
from rftdask.storage import Storage

_START_DEADLINE_S = 120


class RemoteWorkersCluster(Cluster):
    """Scheduler and control worker; `rftdask join` brings the other workers. `scale` is for subclasses that start them.

    Example: with RemoteWorkersCluster.start(config, layout, storage) as cluster: cluster.client.submit(...)
    """

    cluster_type: ClassVar[str] = "joined"

    @classmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """By what the config says a worker of each role has; whoever starts them must give that much."""
        section = config.cluster
        cpus = {role: section.num_cpus or getattr(section.slurm, role).cpus for role in ROLES}
        return plan_jobs(stages, cpus, section.node_num * section.gpu_per_node or None)

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Starts the fork server of the control worker, and a nursery for checks that need torch."""
        if sys.platform == "linux":
            start_fork_server(WORKER_IMPORTS)
            start_nursery()

    @classmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Scheduler and control worker run when it returns; the others join when they are started."""
        return cls(config, layout, PrivateFolder.of(config, storage))

    def __init__(self, config: Config, layout: Layout, folder: PrivateFolder) -> None:
        cluster = config.cluster
        self.worker_deadline_s = cluster.max_queue_s
        self._layout = layout
        self._folder = folder
        self.security = folder.make_keys() if cluster.tls else None
        folder.make()
        try:
            host = get_ip() if cluster.interface is None else get_ip_interface(cluster.interface)
        except ValueError as error:
            raise UserError(f"cluster.interface: {error}") from error
        self.prepare(config, [])
        forks = sys.platform == "linux"
        self._restore = dask.config.set(DASK_CONFIG | ({METHOD: "forkserver"} if forks else {}))
        # The fork server has the environment and the mask of its start, which may be those of an earlier run.
        env = {**os.environ, UMASK_VARIABLE: str(umask())} if forks else {}
        options = {"host": str(host), "protocol": "tls://" if cluster.tls else "tcp://"}
        # One worker beside the driver, for what no rollout may kill: the synchronizer.
        control = worker_spec("control-0", {CONTROL_RESOURCE: 1}, env, security=self.security, **options)
        self._cluster = start_dask({"control-0": control}, cluster.dashboard_address, self.security, **options)
        self.client = connect(self._cluster)
        self.address = str(self._cluster.scheduler_address)
        # From here on workers find this scheduler, so it is written when everything else is there.
        folder.write_address(self.address)
        try:
            self.client.wait_for_workers(1, timeout=_START_DEADLINE_S)
        except TimeoutError as error:
            self.close()
            raise WaitTimeout(f"the control worker did not start in {_START_DEADLINE_S} s") from error

    def scale(self, role: str, num_workers: int) -> None:
        """Raises: UserError, always: it does not start workers."""
        raise UserError("cluster.type joined: the workers of this run are started by rftdask join; start more or fewer")

    def num_asked(self, role: str) -> int:
        """As the layout has it."""
        return self._layout.num_workers(role)

    def close(self) -> None:
        """Workers end too, unless the driver is to come back (`may_return`)."""
        # A worker that finds no address ends for good; one that finds an old address waits for the next scheduler.
        if not self.may_return:
            self._folder.remove_address(self.address)
        close_in_turn(self.client, self._cluster)
        self._restore.__exit__(None, None, None)
