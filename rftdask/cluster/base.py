"""Cluster: where the Dask workers of a run are, and what each is for. A role's tasks go to the workers that hold its
resource.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rftdask.cluster.layout import AUXILIARY_RESOURCE, CONTROL_RESOURCE, EXPLORER_RESOURCE, Layout
from rftdask.config import Config
from rftdask.config.plugins import find_part
from rftdask.config.schema.cluster import registered_clusters
from rftdask.errors import UserError
from rftdask.storage import Storage

if TYPE_CHECKING:
    from distributed import Client

_CLOSE_S = 60.0
"""Longer than the start of a worker on a busy machine: one that is starting has to be up before it can be stopped. Dask
gives a worker 5 s of this to end, and a killed one the rest of those.
"""

log = logging.getLogger(__name__)


def control_workers(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Addresses of the workers that may have the control role: those that hold it, else all that no rollout can kill.

    workers: by address, with "resources". None: a cluster of explorers alone, as somebody else may have started one.
    """
    held = [address for address, info in workers.items() if info["resources"].get(CONTROL_RESOURCE)]
    # What ends an explorer's worker may be a rollout; that of an auxiliary model is full of its engine.
    engines = (EXPLORER_RESOURCE, AUXILIARY_RESOURCE)
    return held or [a for a, info in workers.items() if not any(map(info["resources"].get, engines))]


class Cluster(ABC):
    """A running set of workers. Use as a context manager; `close` is idempotent and leaves no process.

    A kind of cluster is a subclass with `plan`, `start`, `scale`, `num_asked` and `close`; what a configuration says to
    it beside the common keys is in `cluster.options`.
    Example: cluster.scale(EXPLORER_RESOURCE, 4)
    """

    cluster_type: ClassVar[str] = ""
    """Name in a configuration. A class without one is named as `package.module.Name`."""
    is_one_machine: ClassVar[bool] = False
    """Its workers are processes of the driver's machine."""
    takes_options: ClassVar[bool] = False
    """It reads `cluster.options`, which is refused where it is not read."""
    spans_nodes: ClassVar[bool] = False
    """One of its engines may have several whole nodes."""
    required_package: ClassVar[str | None] = None
    """Optional package that it imports."""
    required_extra: ClassVar[str | None] = None
    """The extra of rftdask that installs it."""

    client: Client
    worker_deadline_s: float = 300.0
    """How long the workers of a role may take to join; on a batch system that is the time in its queue."""
    may_return: bool = False
    """Set before `close`: the run may go on in a moment, so workers that others started are not told it is over."""

    @classmethod
    @abstractmethod
    def plan(cls, config: Config, stages: list[Config]) -> Layout:
        """The workers of a run. Raises: UserError: they cannot be had, with the arithmetic; nothing is started."""

    @classmethod
    def prepare(cls, config: Config, stages: list[Config]) -> None:
        """Begin what takes long and needs no layout, while the rest of the run is checked. Returns at once."""
        return None  # most have nothing to prepare

    @classmethod
    @abstractmethod
    def start(cls, config: Config, layout: Layout, storage: Storage) -> Cluster:
        """The running cluster of a run; workers of a batch system join later. Raises: UserError, WaitTimeout."""

    @abstractmethod
    def scale(self, role: str, num_workers: int) -> None:
        """Ask for `num_workers` workers that hold the resource `role`, 0 or more. Returns before they joined or left.

        Those that leave are the newest; what they had not finished runs elsewhere. Idempotent, from any thread.
        Raises: UserError: there are no cores, GPUs or quota for so many, or the cluster cannot be scaled.
        """

    @abstractmethod
    def num_asked(self, role: str) -> int:
        """Workers of the role that were asked for, whether or not they are there."""

    def use(self, roles: Collection[str]) -> None:
        """Told before each stage which roles it has: workers of others may be given back until a stage has them."""
        return

    def check(self) -> None:
        """Raises: RoleError: the workers that were asked for can no longer be had, so the run is to end."""
        return

    def comes_back(self) -> bool:
        """Whether the driver is started again in a moment by who has stopped it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the workers of this cluster and let go of Dask. Idempotent."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def find_cluster(cluster_type: str, plugin_dirs: Sequence[str] = ()) -> type[Cluster]:
    """The class that `cluster.type` names. Raises: UserError: there is none, or it lacks its optional package."""
    cluster: type[Cluster] = find_part("cluster", cluster_type, registered_clusters(), plugin_dirs)
    # Found and not imported: `validate` asks this, too, and loads nothing.
    if cluster.required_package is not None and find_spec(cluster.required_package) is None:
        raise UserError(
            f"cluster.type {cluster_type} needs the package {cluster.required_package}: pip install "
            f"'rftdask[{cluster.required_extra}]'"
        )
    return cluster


def plan_cluster(config: Config, stages: list[Config]) -> Layout:
    """The workers of a run. Raises: UserError: they cannot be had, with the arithmetic; nothing is started."""
    return find_cluster(config.cluster.type, config.explorer.plugin_dirs).plan(config, stages)


def prepare_cluster(config: Config, stages: list[Config]) -> None:
    """Begin what takes long and needs no layout. Returns at once. Raises: UserError: there is no such cluster."""
    find_cluster(config.cluster.type, config.explorer.plugin_dirs).prepare(config, stages)


def start_cluster(config: Config, layout: Layout, storage: Storage) -> Cluster:
    """The running cluster of a run; workers of a batch system join later. Raises: UserError, WaitTimeout."""
    return find_cluster(config.cluster.type, config.explorer.plugin_dirs).start(config, layout, storage)


class Closable(Protocol):
    """A client or a cluster of Dask."""

    def close(self, timeout: float) -> object:
        """Let go of it within `timeout` seconds."""


def close_in_turn(*parts: Closable) -> None:
    """Close Dask's clients and clusters; where that takes too long it is logged, and workers end with this process.

    By then all that the run came to is on storage: closing slowly is not a failure of it, nor may it hide one.
    """
    for part in parts:  # the client first: it would try to reconnect to a scheduler that ends before it
        try:
            part.close(timeout=_CLOSE_S)
        except TimeoutError:
            log.info("Dask's %s was too slow to close; its workers end with this process", part)
