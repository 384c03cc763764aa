"""Cluster: where the Dask workers of a run are, and what each is for. A role's tasks go to the workers that hold its
resource.
"""

from __future__ import annotations

import glob
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

from distributed import Client

from rftdask.config import Config
from rftdask.config.plugins import find_part
from rftdask.config.schema.cluster import registered_clusters
from rftdask.errors import UserError
from rftdask.storage import Storage

CONTROL_RESOURCE = "control"
TRAINER_RESOURCE = "trainer"
EXPLORER_RESOURCE = "explorer"
ROLES = (TRAINER_RESOURCE, EXPLORER_RESOURCE)
"""Roles that have workers of their own."""
_EXPLORER_KEYS = "explorer.rollout_model.engine_num or explorer.max_workers"
_CLOSE_S = 60.0
"""Longer than the start of a worker on a busy machine: one that is starting has to be up before it can be stopped. Dask
gives a worker 5 s of this to end, and a killed one the rest of those.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerPlan:
    """One Dask worker process."""

    name: str
    resources: tuple[str, ...]
    threads: int
    """Cores that the child process of its role may use."""
    gpu: int | None = None
    """Number of the first GPU it sees; None: there are none."""
    num_gpus: int = 1
    """How many it sees, where there are any."""


@dataclass(frozen=True)
class Layout:
    """All workers of a run.

    Example, 2 cores: workers=(WorkerPlan("trainer-0", ("trainer", "control"), 1), WorkerPlan("explorer-0",
    ("explorer",), 1))
    """

    workers: tuple[WorkerPlan, ...]

    def num_workers(self, resource: str) -> int:
        """Workers that hold the resource."""
        return sum(resource in worker.resources for worker in self.workers)

    def threads_of(self, resource: str) -> int:
        """Cores of each worker with the resource; 1 if there is none."""
        return next((worker.threads for worker in self.workers if resource in worker.resources), 1)


def scaled(
    workers: Sequence[WorkerPlan], layout: Layout, role: str, num_workers: int, num_gpus: int, unused: int
) -> list[WorkerPlan]:
    """The workers with `num_workers` of a role: new ones are like the layout's last of it, the newest leave first.

    Args: num_gpus: of the machine, 0 for none; unused: a number that no worker's name has had. A name does not come
    back, because the scheduler refuses it until the worker that had it is declared dead.
    Raises: UserError: no worker of the layout is like them, or there are fewer GPUs.
    """
    like = next((worker for worker in reversed(layout.workers) if role in worker.resources), None)
    if like is None:
        raise UserError(f"cluster: no worker of this run is for role {role!r}, so there is none to add more like it")
    # The oldest stay: they have loaded their models, and the newest have the least to lose.
    kept = [worker for worker in workers if role in worker.resources][:num_workers]
    others = [worker for worker in workers if role not in worker.resources]
    # All GPUs that somebody keeps, each of an engine's own range.
    used = {w.gpu + i for w in (*others, *kept) if w.gpu is not None for i in range(w.num_gpus)}
    free = [gpu for gpu in range(num_gpus) if gpu not in used]
    num_new = max(0, num_workers - len(kept))
    places = _runs(free, like.num_gpus) if like.gpu is not None else [None] * num_new
    if num_new > len(places):
        raise UserError(
            f"cluster: {num_workers} workers for role {role!r} with {like.num_gpus} GPUs each do not fit beside "
            f"{len(others)} others on {num_gpus} GPUs; ask for {len(kept) + len(places)}"
        )
    names = (f"{role}-{unused + i}" for i in range(num_new))
    new = (replace(like, name=name, resources=(role,), gpu=gpu) for name, gpu in zip(names, places, strict=False))
    return [*others, *kept, *new]


def _runs(free: Sequence[int], length: int) -> list[int | None]:
    """First numbers of disjoint runs of `length` neighbors; `free` is sorted.

    >>> _runs([1, 2, 3, 5, 6], 2)
    [1, 5]
    """
    # Neighbors, since an engine's GPUs are named as one slice of those that the machine has.
    found: list[int | None] = []
    end = 0
    for gpu in free:
        if gpu >= end and all(gpu + i in free for i in range(length)):
            found.append(gpu)
            end = gpu + length
    return found


def control_workers(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Addresses of the workers that may have the control role: those that hold it, else all that no rollout can kill.

    workers: by address, with "resources". None: a cluster of explorers alone, as somebody else may have started one.
    """
    held = [address for address, info in workers.items() if info["resources"].get(CONTROL_RESOURCE)]
    return held or [address for address, info in workers.items() if not info["resources"].get(EXPLORER_RESOURCE)]


def num_ranks(stage: Config, layout: Layout) -> int:
    """Ranks of a stage's trainer: as configured, else all that the layout has workers for."""
    return _asked_ranks(stage) or max(1, layout.num_workers(TRAINER_RESOURCE))


def _asked_ranks(stage: Config) -> int | None:
    one = stage.trainer.trainer_strategy == "single" or stage.mode not in ("both", "train")
    return stage.trainer.num_ranks or (1 if one else None)


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

    def check(self) -> None:
        """Raises: RoleError: the workers that were asked for can no longer be had, so the run is to end."""
        return

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


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; found without loading CUDA into the driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name not in ("", "-1")]
    return [str(number) for number, _ in enumerate(glob.glob("/dev/nvidia[0-9]*"))]


def count_gpus(config: Config) -> int:
    """GPUs to place roles on: cluster.gpu_per_node of this machine, or all of them. Raises: UserError: too few."""
    wanted, there = config.cluster.gpu_per_node, len(visible_gpus())
    if wanted > there:
        raise UserError(f"cluster.gpu_per_node is {wanted}, and {there} GPUs can be seen here; 0 takes what there is")
    return wanted or there


def num_cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_layout(stages: list[Config], num_cpus: int, num_gpus: int = 0) -> Layout:
    """The workers that all stages need, sharing `num_cpus` cores: roles that work at the same time get cores of their
    own, and each a GPU of its own where there are any. A trainer without `num_ranks` takes the GPUs that are left.
    Explorers are as many as a run starts with, and share with those that may join later.

    The light control role (synchronizer) shares the trainer's worker, which only watches its child. Where there is no
    trainer it has a worker of its own: rollouts may kill theirs.
    Raises: UserError: more roles than cores or GPUs.
    """
    ranks, first, explorers, each = _demand(stages, num_gpus)
    roles = ranks + explorers
    # A trainer and an explorer may share a single core, so that a run starts on any machine.
    if roles > max(num_cpus, 2):
        raise UserError(
            f"cluster: {ranks} trainer + {explorers} explorers (trainer.num_ranks, {_EXPLORER_KEYS}) "
            f"= {roles} processes that compute, and there are {num_cpus} cores (cluster.num_cpus); "
            f"{_advice(ranks, explorers, num_cpus)}"
        )
    if num_gpus and ranks + explorers * each > num_gpus:
        one_each = f"= {roles} processes with a GPU each"
        more = f"with {each} GPUs each (tensor, pipeline and data_parallel_size) = {ranks + explorers * each} GPUs"
        raise UserError(
            f"cluster: {ranks} trainer + {explorers} explorers (trainer.num_ranks, {_EXPLORER_KEYS}) "
            f"{one_each if each == 1 else more}, and there are {num_gpus} GPUs (cluster.gpu_per_node); "
            f"{_advice(ranks, explorers, num_gpus, each)}, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    check_groups(stages, ranks)
    # Cores are divided evenly: more threads than cores slow all of them.
    threads, has_gpu = max(1, num_cpus // max(1, roles)), num_gpus > 0
    workers = [WorkerPlan(f"trainer-{i}", (TRAINER_RESOURCE,), threads, i if has_gpu else None) for i in range(ranks)]
    for i in range(first):
        # The GPUs after the ranks' own, each engine's side by side.
        gpu, num = (ranks + i * each, each) if has_gpu else (None, 1)
        workers.append(WorkerPlan(f"explorer-{i}", (EXPLORER_RESOURCE,), threads, gpu, num))
    if ranks:
        workers[0] = replace(workers[0], resources=(*workers[0].resources, CONTROL_RESOURCE))
    else:
        # One thread, and no share of the cores: it answers and waits.
        workers.append(WorkerPlan("control-0", (CONTROL_RESOURCE,), 1))
    return Layout(tuple(workers))


def plan_jobs(stages: list[Config], threads: Mapping[str, int], num_gpus: int | None = None) -> Layout:
    """The workers of a run whose roles have a machine or a job each: trainer ranks and explorers.

    Args: threads: cores of a worker of each role; num_gpus: in all, of which a trainer without `num_ranks` takes what
    as many explorers as there may be leave; None: it is not known, and such a trainer has one rank.
    Raises: UserError: ranks that are to work together are no whole number of groups.
    """
    ranks, first, _, _ = _demand(stages, num_gpus or 0)
    check_groups(stages, ranks)
    counts = ((TRAINER_RESOURCE, ranks), (EXPLORER_RESOURCE, first))
    return Layout(tuple(WorkerPlan(f"{role}-{i}", (role,), threads[role]) for role, n in counts for i in range(n)))


def _demand(stages: Sequence[Config], num_gpus: int) -> tuple[int, int, int, int]:
    """(trainer ranks, explorers at first, explorers at most, GPUs of each explorer) that all stages can do with."""
    exploring = [stage for stage in stages if stage.mode != "train"]
    first = max((stage.explorer.fewest_workers for stage in exploring), default=0)
    most = max((stage.explorer.most_workers for stage in exploring), default=0)
    each = max((stage.explorer.rollout_model.num_gpus for stage in exploring), default=1)
    # What as many explorers as there may ever be leave over: ranks cannot be moved while a stage runs.
    left = max(1, num_gpus - most * each)
    return max((_asked_ranks(stage) or left for stage in stages if _trains(stage)), default=0), first, most, each


def _trains(stage: Config) -> bool:
    return stage.mode in ("both", "train")


def check_groups(stages: Sequence[Config], ranks: int) -> None:
    """Raises: UserError: `ranks` is no whole number of the groups of ranks that work together."""
    for stage in filter(_trains, stages):
        # Stages share the workers, and one may ask for fewer of them.
        own, trainer = _asked_ranks(stage) or ranks, stage.trainer
        for key in ("ulysses_sequence_parallel_size", "tensor_parallel_size"):
            if own % (size := getattr(trainer, key)):
                raise UserError(
                    f"cluster: groups of {size} ranks work together (trainer.{key}), and the trainer would have {own} "
                    f"ranks; set trainer.num_ranks to a multiple of {size}"
                )


def _advice(ranks: int, explorers: int, places: int, each: int = 1) -> str:
    if explorers and ranks + each <= places:
        return f"lower engine_num to {(places - ranks) // each}"
    return f"lower num_ranks to {max(1, places - explorers * each)}"
