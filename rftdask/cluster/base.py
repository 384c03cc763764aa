"""Interface of clusters: the Dask workers of a run. Tasks of a role go to the workers that hold its resource."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from rftdask.cluster.layout import AUXILIARY_RESOURCE, CONTROL_RESOURCE, EXPLORER_RESOURCE, Layout
from rftdask.config import Config
from rftdask.config.plugins import find_part
from rftdask.config.schema.cluster import registered_clusters
from rftdask.errors import UserError
from rftdask.storage import Storage

if TYPE_CHECKING:
    from distributed import Client, SpecCluster

_CLOSE_S = 60.0
"""Longer than the start of a worker on a busy machine, since Dask cannot stop a worker that is starting."""

log = logging.getLogger(__name__)


def control_workers(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Addresses of the workers that may have the control role: its holders, else all that no rollout can kill.

    workers: by address, with "resources". Returns: empty for a cluster with only explorers.
    """
    holders = [address for address, info in workers.items() if info["resources"].get(CONTROL_RESOURCE)]
    # A rollout may kill the worker of an explorer, and an engine fills that of an auxiliary model.
    engines = (EXPLORER_RESOURCE, AUXILIARY_RESOURCE)
    return holders or [a for a, info in workers.items() if not any(map(info["resources"].get, engines))]


class Cluster(ABC):
    """A running set of workers. Use as a context manager; `close` is idempotent and leaves no process.

    A kind of cluster is a subclass with `plan`, `start`, `scale`, `num_asked` and `close`. Its own settings are in
    `cluster.options`.
    Example: cluster.scale(EXPLORER_RESOURCE, 4)
    """

    cluster_type: ClassVar[str] = ""
    """Value of cluster.type. A class without a name is used as `package.module.Name`."""
    is_one_machine: ClassVar[bool] = False
    """True if its workers are processes of the driver's machine."""
    takes_options: ClassVar[bool] = False
    """True if it reads `cluster.options`, which is otherwise an error."""
    spans_nodes: ClassVar[bool] = False
    """True if an engine may use several whole nodes."""
    required_package: ClassVar[str | None] = None
    """Optional package that it imports."""
    required_extra: ClassVar[str | None] = None
    """The extra of rftdask that installs it."""

    client: Client
    worker_deadline_s: float = 300.0
    """Time for the workers of a role to join; on a batch system it includes the queue."""
    may_return: bool = False
    """Set before `close`: the driver may restart soon, so joined workers keep waiting for it."""

    @classmethod
    @abstractmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """Plan the workers of a run, without starting anything. Raises: UserError: they do not fit."""

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Start slow work that needs no layout in the background, while the run is checked."""
        return None

    @classmethod
    @abstractmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """Start the cluster of a run; workers of a batch system join later. Raises: UserError, WaitTimeout."""

    @abstractmethod
    def scale(self, role: str, num_workers: int) -> None:
        """Request `num_workers` workers with the resource `role`. Returns before they join or leave.

        The newest workers leave, and their unfinished tasks run elsewhere. Idempotent and thread-safe.
        Raises: UserError: too few cores, GPUs or quota, or the cluster cannot be scaled.
        """

    @abstractmethod
    def num_asked(self, role: str) -> int:
        """Number of requested workers of the role, joined or not."""

    def use(self, roles: Collection[str]) -> None:
        """Set the roles of the next stage. Workers of other roles may be released until a stage needs them."""
        return

    def check(self) -> None:
        """Raises: RoleError: requested workers are no longer available, so the run must end."""
        return

    def comes_back(self) -> bool:
        """True if the batch system that stopped the driver starts it again."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the workers of this cluster and disconnect from Dask. Idempotent."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def find_cluster(cluster_type: str, plugin_dirs: Sequence[str] = ()) -> type[Cluster]:
    """Class of a cluster.type. Raises: UserError: no such type, or its optional package is missing."""
    cluster: type[Cluster] = find_part("cluster", cluster_type, registered_clusters(), plugin_dirs)
    # find_spec does not import the package, so that `validate` stays fast.
    if cluster.required_package is not None and find_spec(cluster.required_package) is None:
        raise UserError(
            f"cluster.type {cluster_type} needs the package {cluster.required_package}: pip install "
            f"'rftdask[{cluster.required_extra}]'"
        )
    return cluster


def plan_cluster(config: Config, stages: list[Config]) -> Layout:
    """`Cluster.plan` of cluster.type."""
    return find_cluster(config.cluster.type, config.explorer.plugin_dirs).plan(config, stages)


def prepare_cluster(config: Config, stages: list[Config]) -> None:
    """`Cluster.prepare` of cluster.type."""
    find_cluster(config.cluster.type, config.explorer.plugin_dirs).prepare(config, stages)


def start_cluster(config: Config, layout: Layout, storage: Storage) -> Cluster:
    """`Cluster.start` of cluster.type."""
    return find_cluster(config.cluster.type, config.explorer.plugin_dirs).start(config, layout, storage)


def close_in_turn(*parts: Client | SpecCluster) -> None:
    """Close Dask's clients and clusters in order. A timeout is only logged, because all results are on storage.

    The client comes first, since it would reconnect to a scheduler that ends before it.
    """
    for part in parts:
        try:
            part.close(timeout=_CLOSE_S)
        except TimeoutError:
            log.info("Dask's %s was too slow to close; its workers end with this process", part)
