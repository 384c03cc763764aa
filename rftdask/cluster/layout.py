"""Layout of a run: its workers, with the cores and GPUs of each.

Planning starts nothing and reads only the visible GPUs, so runs can be planned for other machines. Roles that work at
the same time share neither cores nor GPUs. With too few GPUs, trainer and engines are *colocated*: a rank and an engine
share each GPU (processes/device_lock.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from rftdask.errors import UserError
from rftdask.processes.gpus import visible_gpus
from rftdask.processes.zygote import MODELS, RANK, REGISTERED, TOKENIZERS, TORCH

if TYPE_CHECKING:  # slow import that the first process of a job does not need
    from rftdask.config import Config

CONTROL_RESOURCE = "control"
TRAINER_RESOURCE = "trainer"
EXPLORER_RESOURCE = "explorer"
AUXILIARY_RESOURCE = "auxiliary"
"""Resource of workers of auxiliary models; its amount is the number of GPUs of the worker."""
ROLES = (TRAINER_RESOURCE, EXPLORER_RESOURCE, AUXILIARY_RESOURCE)
"""Roles with their own workers."""
WORKER_IMPORTS = ("distributed", "rftdask.cluster.preloads", "rftdask.rollouts.work_unit_task", REGISTERED)
"""Modules that workers of all roles import."""
_EXPLORER_KEYS = "explorer.rollout_model.engine_num or explorer.max_workers"
_SHARING = ("joined", "existing", "slurm")
"""Cluster types of several machines that support colocation: the user places the workers, or jobs have several."""
_CORES_ENOUGH = 1 << 16
"""Cores of another machine, if not configured."""


@dataclass(frozen=True)
class WorkerPlan:
    """One Dask worker process."""

    name: str
    resources: tuple[str, ...]
    threads: int
    """Cores of its child process."""
    gpu: int | None = None
    """Number of its first GPU. None: no GPU."""
    num_gpus: int = 1
    """Number of its GPUs, if it has any."""
    shares: tuple[int, ...] = ()
    """Numbers of devices that it shares with a worker of the other role."""

    @property
    def amounts(self) -> dict[str, int]:
        """Amount of each of its resources."""
        return {role: amount_of(role, self.num_gpus) for role in self.resources}


@dataclass(frozen=True)
class Layout:
    """All workers of a run.

    Example, 2 cores: workers=(WorkerPlan("trainer-0", ("trainer", "control"), 1), WorkerPlan("explorer-0",
    ("explorer",), 1))
    """

    workers: tuple[WorkerPlan, ...]

    def num_workers(self, resource: str) -> int:
        """Number of workers with the resource."""
        return sum(resource in worker.resources for worker in self.workers)

    def num_in_jobs(self, role: str) -> int:
        """Number of workers of a role that need their own jobs; colocated engines are in the jobs of ranks."""
        return 0 if self.colocated and role == EXPLORER_RESOURCE else self.num_workers(role)

    @property
    def colocated(self) -> bool:
        """True if ranks and engines share devices."""
        return any(worker.shares for worker in self.workers)

    @property
    def trains_on_gpus(self) -> bool:
        """True if ranks have GPUs."""
        return any(worker.gpu is not None and TRAINER_RESOURCE in worker.resources for worker in self.workers)

    def threads_of(self, resource: str) -> int:
        """Cores of each worker with the resource; 1 without workers."""
        return next((worker.threads for worker in self.workers if resource in worker.resources), 1)

    def describe(self) -> str:
        """Format as a line: "1 rank on GPU 0, 1 engine on GPU 0; they take turns on GPU 0 (colocate)"."""
        parts = []
        names = {TRAINER_RESOURCE: "rank", EXPLORER_RESOURCE: "engine", AUXILIARY_RESOURCE: "auxiliary engine"}
        for role, what in names.items():
            if workers := [worker for worker in self.workers if role in worker.resources]:
                gpus = sorted(w.gpu + i for w in workers if w.gpu is not None for i in range(w.num_gpus))
                place = f" on {_named(gpus)}" if gpus else ""
                parts.append(f"{len(workers)} {what}{'s' * (len(workers) > 1)}{place}")
        engines = (worker for worker in self.workers if EXPLORER_RESOURCE in worker.resources)
        shared = sorted({number for worker in engines for number in worker.shares})
        if shared:
            has_gpus = any(worker.gpu is not None for worker in self.workers)
            where = _named(shared) if has_gpus else "what each machine has"
            parts[-1 if len(parts) < len(names) else -2] += f"; they take turns on {where} (colocate)"
        return ", ".join(parts)


def amount_of(role: str, num_gpus: int) -> int:
    """Amount of the resource of a role for a worker with `num_gpus` GPUs."""
    return num_gpus if role == AUXILIARY_RESOURCE else 1


def _named(gpus: Sequence[int]) -> str:
    """Name of a range of GPUs.

    >>> _named([2, 3, 4])
    'GPUs 2-4'
    """
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]}-{gpus[-1]}"


def scaled(
    workers: Sequence[WorkerPlan], layout: Layout, role: str, num_workers: int, num_gpus: int, unused: int
) -> list[WorkerPlan]:
    """Scale a role to `num_workers` workers. New workers copy the last one of the layout; the newest leave first.

    Args: num_gpus: GPUs of the machine; unused: first number for new names, since the scheduler refuses the name of a
    lost worker for a while.
    Raises: UserError: the layout has no worker of the role, or too few GPUs.
    """
    like = next((worker for worker in reversed(layout.workers) if role in worker.resources), None)
    if like is None:
        raise UserError(f"cluster: this run has no worker for role {role!r} to copy")
    # The oldest have loaded their models.
    kept = [worker for worker in workers if role in worker.resources][:num_workers]
    others = [worker for worker in workers if role not in worker.resources]
    num_new = max(0, num_workers - len(kept))
    if layout.colocated:
        # A new worker takes the place of one that has left.
        taken = {(worker.gpu, worker.shares) for worker in kept}
        free = [plan for plan in layout.workers if role in plan.resources and (plan.gpu, plan.shares) not in taken]
    else:
        used = {w.gpu + i for w in (*others, *kept) if w.gpu is not None for i in range(w.num_gpus)}
        unused_gpus = [gpu for gpu in range(num_gpus) if gpu not in used]
        first_gpus = _runs(unused_gpus, like.num_gpus) if like.gpu is not None else [None] * num_new
        free = [replace(like, gpu=gpu) for gpu in first_gpus]
    if num_new > len(free):
        raise UserError(
            f"cluster: {num_workers} workers for role {role!r} with {like.num_gpus} GPUs each do not fit next to "
            f"{len(others)} others on {num_gpus} GPUs; request {len(kept) + len(free)}"
        )
    names = (f"{role}-{unused + i}" for i in range(num_new))
    new = (replace(place, name=name, resources=(role,)) for name, place in zip(names, free, strict=False))
    return [*others, *kept, *new]


def _runs(free: Sequence[int], length: int) -> list[int | None]:
    """First numbers of disjoint runs of `length` neighbors; `free` is sorted.

    >>> _runs([1, 2, 3, 5, 6], 2)
    [1, 5]
    """
    starts: list[int | None] = []
    end = 0
    for gpu in free:
        if gpu >= end and all(gpu + i in free for i in range(length)):
            starts.append(gpu)
            end = gpu + length
    return starts


def num_ranks(stage: Config, layout: Layout) -> int:
    """Number of ranks of a stage: as configured, else one for each worker of the layout."""
    return _asked_ranks(stage) or max(1, layout.num_workers(TRAINER_RESOURCE))


def _asked_ranks(stage: Config) -> int | None:
    one = stage.trainer.trainer_strategy == "single" or stage.trainer.is_hosted or stage.mode not in ("both", "train")
    return stage.trainer.num_ranks or (1 if one else None)


def count_gpus(config: Config) -> int:
    """Number of GPUs for roles: cluster.gpu_per_node, or all visible ones; 0 if a service computes.

    Raises: UserError: too few GPUs are visible.
    """
    if config.trainer.is_hosted and not config.explorer.auxiliary_models:
        return 0
    requested, visible = config.cluster.gpu_per_node, len(visible_gpus())
    if requested > visible:
        raise UserError(f"cluster.gpu_per_node is {requested}, and {visible} GPUs are visible; 0 takes all of them")
    return requested or visible


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_machines(config: Config) -> Layout:
    """Plan a run for `cluster.node_num` machines with `cluster.gpu_per_node` GPUs, and enough cores if
    `cluster.num_cpus` is not set. Raises: UserError: the workers do not fit.
    """
    section, stages = config.cluster, config.stage_configs()
    check_one_machine(config)
    if section.is_one_machine:
        return plan_layout(stages, section.num_cpus or _CORES_ENOUGH, section.gpu_per_node)
    num_gpus = section.gpu_per_node * max(1, section.node_num)
    gpus_each = _demand(stages, num_gpus).gpus_each
    spans = section.spans_nodes and section.gpu_per_node and gpus_each % section.gpu_per_node == 0
    if section.gpu_per_node and gpus_each > section.gpu_per_node and not spans:
        raise UserError(
            f"cluster: an engine uses {gpus_each} GPUs (tensor, pipeline and data_parallel_size of "
            f"explorer.rollout_model), and a machine has {section.gpu_per_node} (cluster.gpu_per_node)"
        )
    largest = max(auxiliary_sizes(stages), default=0)
    if section.gpu_per_node and largest > section.gpu_per_node:
        raise UserError(
            f"cluster: an engine of an auxiliary model uses {largest} GPUs (its tensor, pipeline and "
            f"data_parallel_size), and a machine has {section.gpu_per_node} (cluster.gpu_per_node)"
        )
    return plan_jobs(stages, dict.fromkeys(ROLES, section.num_cpus or 1), num_gpus or None)


def auxiliary_sizes(stages: Sequence[Config]) -> list[int]:
    """GPUs of each worker of auxiliary models, the largest first. Each stage has a worker for each engine."""
    wanted = [
        sorted((model.num_gpus for model in stage.models_apart for _ in range(model.engine_num)), reverse=True)
        for stage in stages
    ]
    return [max(sizes) for sizes in zip_longest(*wanted, fillvalue=0)]


def check_one_machine(config: Config) -> None:
    """Raises: UserError: node_num is above 1 for a cluster of one machine."""
    section = config.cluster
    if section.is_one_machine and section.node_num > 1:
        raise UserError(
            f"cluster.node_num is {section.node_num}, and cluster.type {section.type} is one machine; use slurm or "
            "another batch system, or joined"
        )


def plan_layout(stages: list[Config], num_cpus: int, num_gpus: int = 0) -> Layout:
    """Plan the workers of all stages on one machine.

    Roles have their own cores and GPUs. A trainer without `num_ranks` takes the remaining GPUs. The plan has the
    explorers of the start, and leaves resources for those that may join later.

    With `cluster.colocate`, or by default with too few GPUs, rank i and the engines on device i share it, and a trainer
    without `num_ranks` takes all GPUs.

    The light control role (synchronizer) is in the first trainer's worker, which only watches its child. Without a
    trainer it has its own worker, because rollouts may kill the others.
    Raises: UserError: more roles than cores or GPUs.
    """
    ranks, first, explorers, gpus_each, judges = _demand(stages, num_gpus)
    apart = sum(judges)
    wanted = {stage.cluster.colocate for stage in stages}
    too_few = bool(num_gpus) and ranks + explorers * gpus_each + apart > num_gpus
    colocated = bool(ranks and explorers) and (True in wanted or (too_few and False not in wanted))
    if colocated:
        ranks, first, explorers, gpus_each, judges = _demand(stages, num_gpus, colocated=True)
        for path, engine in [pair for stage in stages if stage.has_explorer for pair in stage.explorer.engines()]:
            if path != "explorer.rollout_model" and engine.is_apart:
                continue
            if engine.traits.has_model and not (engine.traits.leaves_device or engine.traits.is_external):
                raise UserError(
                    f"{path}.engine_type {engine.engine_type} cannot release its GPU, which trainer and engines must "
                    "share (Engine.leaves_device, docs/extending.md); use more GPUs"
                )
    of_roles = f"{ranks} trainer + {explorers} explorers (trainer.num_ranks, {_EXPLORER_KEYS})"
    if judges:
        of_roles += f" + {len(judges)} auxiliary (engine_num of explorer.auxiliary_models)"
    # Colocated roles also share cores.
    roles = (max(ranks, explorers) if colocated else ranks + explorers) + len(judges)
    # A trainer and an explorer may share a single core, so that a run starts on any machine.
    if roles > max(num_cpus, 2):
        at_once = f"{'by turns ' * colocated}= {roles} processes that compute"
        raise UserError(
            f"cluster: {of_roles} {at_once}, and there are {num_cpus} cores (cluster.num_cpus); "
            f"{_advice(ranks, explorers, num_cpus - len(judges), 1, colocated, len(judges))}"
        )
    needed = (max(ranks, explorers * gpus_each) if colocated else ranks + explorers * gpus_each) + apart
    if num_gpus and needed > num_gpus:
        at_once = "taking turns (colocate)" if colocated else f"= {roles} processes with a GPU each"
        if gpus_each > 1:
            at_once = f"with {gpus_each} GPUs each (tensor, pipeline and data_parallel_size)"
        if judges:
            at_once = f"with {gpus_each} GPU{'s' * (gpus_each > 1)} each{', taking turns (colocate),' * colocated}"
            at_once += f" + {_added(judges)} of auxiliary models"
        raise UserError(
            f"cluster: {of_roles} {at_once} = {needed} GPUs, but there are {num_gpus} GPUs (cluster.gpu_per_node); "
            f"{_advice(ranks, explorers, num_gpus - apart, gpus_each, colocated, apart)}, or set CUDA_VISIBLE_DEVICES= "
            "to run on CPUs"
        )
    check_groups(stages, ranks)
    # More threads than cores would slow all roles.
    threads, has_gpu = max(1, num_cpus // max(1, roles)), num_gpus > 0
    workers = [WorkerPlan(f"trainer-{i}", (TRAINER_RESOURCE,), threads, i if has_gpu else None) for i in range(ranks)]
    for i in range(first):
        at = i * gpus_each if colocated else ranks + i * gpus_each
        shares = tuple(number for number in range(at, at + gpus_each) if number < ranks) if colocated else ()
        gpu, num = (at, gpus_each) if has_gpu else (None, 1)
        workers.append(WorkerPlan(f"explorer-{i}", (EXPLORER_RESOURCE,), threads, gpu, num, shares))
    # At the end, so that the GPUs between are for explorers that join later.
    at = num_gpus
    for i, size in enumerate(judges):
        at -= size
        gpu = at if has_gpu else None
        workers.append(WorkerPlan(f"auxiliary-{i}", (AUXILIARY_RESOURCE,), threads, gpu, size))
    if colocated:
        # All ranks, since they lock their devices together.
        workers[:ranks] = [replace(worker, shares=(i,)) for i, worker in enumerate(workers[:ranks])]
    if ranks:
        workers[0] = replace(workers[0], resources=(*workers[0].resources, CONTROL_RESOURCE))
    else:
        workers.append(WorkerPlan("control-0", (CONTROL_RESOURCE,), 1))
    return Layout(tuple(workers))


def plan_jobs(stages: list[Config], threads: Mapping[str, int], num_gpus: int | None = None) -> Layout:
    """Plan the workers of a run whose roles have their own machines or jobs.

    Args: threads: cores of a worker of each role; num_gpus: total number, of which a trainer without `num_ranks` takes
    what the maximum of explorers leaves. None: not known, and such a trainer has one rank.
    Raises: UserError: ranks do not form whole groups, too few GPUs, or colocation is not supported.
    """
    colocated = any(stage.cluster.colocate for stage in stages)
    ranks, first, most, gpus_each, judges = _demand(stages, num_gpus or 0, colocated, alike=True)
    kind = stages[0].cluster.type
    if colocated and kind not in _SHARING:
        raise UserError(
            f"cluster.colocate: cluster.type {kind} has separate jobs for ranks and engines, which cannot share GPUs; "
            f"use {', '.join(_SHARING)} or local, or remove this key (mode: both)"
        )
    if colocated and kind == "slurm" and ranks != most * gpus_each:
        raise UserError(
            f"cluster.colocate: on SLURM each rank shares its GPU with an engine, and {ranks} trainer ranks have "
            f"{ranks} GPUs for {most} engines with {gpus_each} each; set explorer.rollout_model.engine_num to "
            f"{max(1, ranks // gpus_each)}, or trainer.num_ranks to {most * gpus_each}"
        )
    needed = (max(ranks, most * gpus_each) if colocated else ranks + most * gpus_each) + sum(judges)
    if num_gpus and needed > num_gpus:
        auxiliary = f" + {_added(judges)} of auxiliary models" if judges else ""
        raise UserError(
            f"cluster: {ranks} trainer + {most} explorers (trainer.num_ranks, {_EXPLORER_KEYS}) with {gpus_each} "
            f"GPU{'s' * (gpus_each > 1)} each{', taking turns (colocate),' * colocated}{auxiliary} = {needed} GPUs, "
            f"and there are {num_gpus} (cluster.node_num x cluster.gpu_per_node); "
            f"{_advice(ranks, most, num_gpus - sum(judges), gpus_each, colocated, sum(judges))}"
        )
    check_groups(stages, ranks)
    counts = ((TRAINER_RESOURCE, ranks, 1), (EXPLORER_RESOURCE, first, gpus_each))
    workers = []
    for role, count, num in counts:
        for i in range(count):
            shares = tuple(range(i * num, i * num + num)) if colocated else ()
            workers.append(WorkerPlan(f"{role}-{i}", (role,), threads[role], None, num, shares))
    for i, size in enumerate(judges):
        workers.append(
            WorkerPlan(f"{AUXILIARY_RESOURCE}-{i}", (AUXILIARY_RESOURCE,), threads[AUXILIARY_RESOURCE], None, size)
        )
    return Layout(tuple(workers))


class _Demand(NamedTuple):
    """Requirements of all stages."""

    ranks: int
    first: int
    """Explorers at the start."""
    most: int
    """Maximum of explorers."""
    gpus_each: int
    """GPUs of each explorer."""
    auxiliary: list[int]
    """GPUs of each worker of auxiliary models."""


def _demand(stages: Sequence[Config], num_gpus: int, colocated: bool = False, alike: bool = False) -> _Demand:
    """Requirements of the stages. alike: all workers of auxiliary models fit the largest model."""
    exploring = [stage for stage in stages if stage.has_explorer]
    if colocated and any(stage.evaluates_training for stage in stages):
        raise UserError(
            "cluster: a trainer on a dataset never releases its GPU, so engines that evaluate need another one; add a "
            "GPU, or remove buffer.explorer_input.eval_tasksets in mode train and evaluate the checkpoints with mode "
            "bench"
        )
    first = max((stage.explorer.fewest_workers for stage in exploring), default=0)
    most = max((stage.explorer.most_workers for stage in exploring), default=0)
    gpus_each = max((stage.explorer.gpus_per_worker for stage in exploring), default=1)
    # Ranks take what the maximum of explorers leaves, since they cannot move during a stage. On SLURM they are one job
    # with whole nodes.
    slurm, on_slurm = stages[0].cluster.slurm.trainer, stages[0].cluster.type == "slurm"
    node = max(1, slurm.workers_per_node(1)) if on_slurm else 1
    judges = auxiliary_sizes(stages)
    judges = [max(judges)] * len(judges) if alike and judges else judges
    others = sum(judges) if colocated else sum(judges) + most * gpus_each
    left = max(node * (slurm.nodes or 1), (num_gpus - others) // node * node)
    ranks = max((_asked_ranks(stage) or left for stage in stages if _trains(stage)), default=0)
    # All colocated explorers start at once, since they keep their devices.
    return _Demand(ranks, most if colocated else first, most, gpus_each, judges)


def _trains(stage: Config) -> bool:
    return stage.mode in ("both", "train")


def check_groups(stages: Sequence[Config], ranks: int) -> None:
    """Raises: UserError: `ranks` do not form whole groups."""
    for stage in filter(_trains, stages):
        # A stage may use only some of the workers.
        stage_ranks, trainer = _asked_ranks(stage) or ranks, stage.trainer
        for key in ("ulysses_sequence_parallel_size", "tensor_parallel_size"):
            if stage_ranks % (size := getattr(trainer, key)):
                raise UserError(
                    f"cluster: trainer.{key} needs groups of {size} ranks, and the trainer would have {stage_ranks}; "
                    f"set trainer.num_ranks to a multiple of {size}"
                )


def _added(sizes: Sequence[int]) -> str:
    """Format a sum: "2 + 1"."""
    return " + ".join(map(str, sizes))


def _advice(ranks: int, explorers: int, places: int, gpus_each: int, colocated: bool, apart: int = 0) -> str:
    """Suggest numbers that fit: fewer engines if that suffices, else fewer ranks, else both in proportion.

    places: cores or GPUs without the `apart` of auxiliary models.
    """
    if apart and places < 1 + (0 if colocated else gpus_each):
        return "lower engine_num of explorer.auxiliary_models, or set it to 0, which loads them with the policy"
    if explorers and gpus_each > places:
        return f"lower explorer.rollout_model.tensor_parallel_size (or pipeline, data), so that an engine has {places}"
    shared = f"num_ranks {min(ranks, places)}, engine_num {min(explorers, places // gpus_each)}"
    if colocated:
        changes = {"engine_num": min(explorers, places // gpus_each), "num_ranks": min(ranks, places)}
    elif explorers and ranks + gpus_each <= places:
        changes = {"engine_num": min(explorers, (places - ranks) // gpus_each)}
    elif places - explorers * gpus_each > 0:
        changes = {"num_ranks": min(ranks, places - explorers * gpus_each)}
    elif places > gpus_each:
        engines = max(1, min((places - 1) // gpus_each, places * explorers // (ranks + explorers * gpus_each)))
        changes = {"engine_num": engines, "num_ranks": min(ranks, places - engines * gpus_each)}
    else:
        return f"use one machine with shared GPUs (cluster.type local, mode colocate, {shared})"
    now = {"engine_num": explorers, "num_ranks": ranks}
    return "lower " + " and ".join(f"{key} to {number}" for key, number in changes.items() if number < now[key])


def worker_imports(stages: Sequence[Config]) -> list[str]:
    """Modules that the workers of this machine import."""
    modules = [*WORKER_IMPORTS]
    for stage in stages:
        pipeline = stage.data_processor.experience_pipeline
        if stage.has_explorer and stage.explorer.rollout_model.traits.has_model:
            modules += TOKENIZERS
        if stage.reads_images or stage.reads_videos or (pipeline.operators and pipeline.stage == "commit"):
            modules.append(MODELS)
    return list(dict.fromkeys(modules))


def imports_ahead(stages: Sequence[Config], roles: Collection[str]) -> list[str]:
    """Modules that engines and ranks of the roles import, without WORKER_IMPORTS."""
    ranks = [stage for stage in stages if TRAINER_RESOURCE in roles and _trains(stage)]
    # First the import that the check of the algorithm waits for; last the rank, which waits for the first rollouts.
    modules = [TORCH] if ranks else []
    for stage in stages:
        models = (stage.explorer.rollout_model, *stage.models_beside) if EXPLORER_RESOURCE in roles else ()
        models += stage.models_apart if AUXILIARY_RESOURCE in roles else ()
        modules += [module for engine in models for module in engine.traits.imports_ahead]
    if any(stage.trainer.has_model for stage in ranks):
        modules.append(MODELS)
    if ranks:
        modules += [REGISTERED, RANK]
    return list(dict.fromkeys(modules))
