"""Layout: which workers a run has, and on which cores and GPUs of a machine each of them works. Pure: it starts nothing
and looks at no machine but for the GPUs that this process may see, so a run can be planned for machines elsewhere.

Roles that work at the same time share neither cores nor GPUs. Where there are fewer GPUs than all of them need, trainer
and engines *colocate*: each GPU has a rank and an engine, which take turns on it (processes/device_lock.py).
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

if TYPE_CHECKING:  # a job's first process needs the names below alone
    from rftdask.config import Config

CONTROL_RESOURCE = "control"
TRAINER_RESOURCE = "trainer"
EXPLORER_RESOURCE = "explorer"
AUXILIARY_RESOURCE = "auxiliary"
"""Of workers of auxiliary models; how much of it one has is the number of GPUs that its model may work on."""
ROLES = (TRAINER_RESOURCE, EXPLORER_RESOURCE, AUXILIARY_RESOURCE)
"""Roles that have workers of their own."""
WORKER_IMPORTS = ("distributed", "rftdask.cluster.preloads", "rftdask.rollouts.work_unit_task", REGISTERED)
"""What a worker imports, whatever its role."""
_EXPLORER_KEYS = "explorer.rollout_model.engine_num or explorer.max_workers"
_SHARING = ("joined", "existing", "slurm")
"""Types of clusters of several machines that may have a rank and an engine on one GPU: those whose workers somebody
else starts, each where he likes, and that whose jobs have several workers."""
_CORES_ENOUGH = 1 << 16
"""Of a machine that is not here, and of which nobody said how many it has."""


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
    shares: tuple[int, ...] = ()
    """Numbers of the devices on which it takes turns with a worker of the other role; (): it shares none."""

    @property
    def amounts(self) -> dict[str, int]:
        """How much of each resource it has."""
        return {role: amount_of(role, self.num_gpus) for role in self.resources}


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

    def num_in_jobs(self, role: str) -> int:
        """Workers of a role that have jobs of a batch system to themselves: engines that take turns come with the
        ranks.
        """
        return 0 if self.colocated and role == EXPLORER_RESOURCE else self.num_workers(role)

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines take turns on devices."""
        return any(worker.shares for worker in self.workers)

    @property
    def trains_on_gpus(self) -> bool:
        """Whether ranks of a trainer have GPUs."""
        return any(worker.gpu is not None and TRAINER_RESOURCE in worker.resources for worker in self.workers)

    def threads_of(self, resource: str) -> int:
        """Cores of each worker with the resource; 1 if there is none."""
        return next((worker.threads for worker in self.workers if resource in worker.resources), 1)

    def describe(self) -> str:
        """Where the roles are, in a line: "1 rank on GPU 0, 1 engine on GPU 0; they take turns on GPU 0 (colocate)"."""
        told = []
        names = {TRAINER_RESOURCE: "rank", EXPLORER_RESOURCE: "engine", AUXILIARY_RESOURCE: "auxiliary engine"}
        for role, what in names.items():
            if own := [worker for worker in self.workers if role in worker.resources]:
                gpus = sorted(w.gpu + i for w in own if w.gpu is not None for i in range(w.num_gpus))
                told.append(f"{len(own)} {what}{'s' * (len(own) > 1)}" + (f" on {_named(gpus)}" if gpus else ""))
        engines = (worker for worker in self.workers if EXPLORER_RESOURCE in worker.resources)
        shared = sorted({number for worker in engines for number in worker.shares})
        if shared:
            has_gpus = any(worker.gpu is not None for worker in self.workers)
            where = _named(shared) if has_gpus else "what each machine has"
            told[-1 if len(told) < len(names) else -2] += f"; they take turns on {where} (colocate)"
        return ", ".join(told)


def amount_of(role: str, num_gpus: int) -> int:
    """How much of its resource a worker of a role has, that works on so many GPUs."""
    return num_gpus if role == AUXILIARY_RESOURCE else 1


def _named(gpus: Sequence[int]) -> str:
    """GPUs that are neighbors, for a person.

    >>> _named([2, 3, 4])
    'GPUs 2-4'
    """
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]}-{gpus[-1]}"


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
    num_new = max(0, num_workers - len(kept))
    if layout.colocated:
        # Who takes turns with whom is the layout's: a new worker takes the place of one that has left.
        taken = {(worker.gpu, worker.shares) for worker in kept}
        free = [each for each in layout.workers if role in each.resources and (each.gpu, each.shares) not in taken]
    else:
        # All GPUs that somebody keeps, each of an engine's own range.
        used = {w.gpu + i for w in (*others, *kept) if w.gpu is not None for i in range(w.num_gpus)}
        unused_gpus = [gpu for gpu in range(num_gpus) if gpu not in used]
        places = _runs(unused_gpus, like.num_gpus) if like.gpu is not None else [None] * num_new
        # Of each range only the first number is kept; `num_gpus` says how many follow.
        free = [replace(like, gpu=gpu) for gpu in places]
    # Told with what would fit, since whoever asks may be content with that.
    if num_new > len(free):
        raise UserError(
            f"cluster: {num_workers} workers for role {role!r} with {like.num_gpus} GPUs each do not fit beside "
            f"{len(others)} others on {num_gpus} GPUs; ask for {len(kept) + len(free)}"
        )
    names = (f"{role}-{unused + i}" for i in range(num_new))
    new = (replace(place, name=name, resources=(role,)) for name, place in zip(names, free, strict=False))
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


def num_ranks(stage: Config, layout: Layout) -> int:
    """Ranks of a stage's trainer: as configured, else all that the layout has workers for."""
    return _asked_ranks(stage) or max(1, layout.num_workers(TRAINER_RESOURCE))


def _asked_ranks(stage: Config) -> int | None:
    one = stage.trainer.trainer_strategy == "single" or stage.trainer.is_hosted or stage.mode not in ("both", "train")
    return stage.trainer.num_ranks or (1 if one else None)


def count_gpus(config: Config) -> int:
    """GPUs to place roles on: cluster.gpu_per_node of this machine, or all of them; none where a service computes.

    Raises: UserError: too few.
    """
    if config.trainer.is_hosted and not config.explorer.auxiliary_models:
        return 0
    wanted, there = config.cluster.gpu_per_node, len(visible_gpus())
    if wanted > there:
        raise UserError(f"cluster.gpu_per_node is {wanted}, and {there} GPUs can be seen here; 0 takes what there is")
    return wanted or there


def num_cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan_machines(config: Config) -> Layout:
    """The workers of a run on `cluster.node_num` machines of `cluster.gpu_per_node` GPUs, which need not be here; with
    as many cores as it takes where `cluster.num_cpus` does not say. Raises: UserError: they do not fit.
    """
    section, stages = config.cluster, config.stage_configs()
    check_one_machine(config)
    if section.is_one_machine:
        return plan_layout(stages, section.num_cpus or _CORES_ENOUGH, section.gpu_per_node)
    num_gpus = section.gpu_per_node * max(1, section.node_num)
    each = _demand(stages, num_gpus).each
    spans = section.spans_nodes and section.gpu_per_node and each % section.gpu_per_node == 0
    if section.gpu_per_node and each > section.gpu_per_node and not spans:
        raise UserError(
            f"cluster: an engine works on {each} GPUs (tensor, pipeline and data_parallel_size of "
            f"explorer.rollout_model), and a machine has {section.gpu_per_node} (cluster.gpu_per_node)"
        )
    largest = max(auxiliary_sizes(stages), default=0)
    if section.gpu_per_node and largest > section.gpu_per_node:
        raise UserError(
            f"cluster: an engine of an auxiliary model works on {largest} GPUs (its tensor, pipeline and "
            f"data_parallel_size), and a machine has {section.gpu_per_node} (cluster.gpu_per_node)"
        )
    return plan_jobs(stages, dict.fromkeys(ROLES, section.num_cpus or 1), num_gpus or None)


def auxiliary_sizes(stages: Sequence[Config]) -> list[int]:
    """GPUs of each worker of auxiliary models, the largest first, so that every stage has a worker for each engine."""
    wanted = [
        sorted((model.num_gpus for model in stage.models_apart for _ in range(model.engine_num)), reverse=True)
        for stage in stages
    ]
    return [max(sizes) for sizes in zip_longest(*wanted, fillvalue=0)]


def check_one_machine(config: Config) -> None:
    """Raises: UserError: the cluster is one machine, and several are wanted."""
    section = config.cluster
    if section.is_one_machine and section.node_num > 1:
        raise UserError(
            f"cluster.node_num is {section.node_num}, and cluster.type {section.type} is one machine; use slurm or "
            "another batch system, or joined"
        )


def plan_layout(stages: list[Config], num_cpus: int, num_gpus: int = 0) -> Layout:
    """The workers that all stages need, sharing `num_cpus` cores: roles that work at the same time get cores of their
    own, and each a GPU of its own where there are any. A trainer without `num_ranks` takes the GPUs that are left.
    Explorers are as many as a run starts with, and share with those that may join later.

    Where `cluster.colocate` says so, and where it says nothing and there are fewer GPUs than that takes, ranks and
    engines take turns instead, rank i and the engines on device i; a trainer without `num_ranks` takes all GPUs.

    The light control role (synchronizer) shares the trainer's worker, which only watches its child. Where there is no
    trainer it has a worker of its own: rollouts may kill theirs.
    Raises: UserError: more roles than cores or GPUs.
    """
    ranks, first, explorers, each, judges = _demand(stages, num_gpus)
    # Those of auxiliary models share with nobody.
    apart = sum(judges)
    wanted = {stage.cluster.colocate for stage in stages}
    too_few = bool(num_gpus) and ranks + explorers * each + apart > num_gpus
    colocated = bool(ranks and explorers) and (True in wanted or (too_few and False not in wanted))
    if colocated:
        ranks, first, explorers, each, judges = _demand(stages, num_gpus, colocated=True)
        for path, engine in [pair for stage in stages if stage.has_explorer for pair in stage.explorer.engines()]:
            if path != "explorer.rollout_model" and engine.is_apart:
                continue
            if engine.traits.has_model and not (engine.traits.leaves_device or engine.traits.is_external):
                raise UserError(
                    f"{path}.engine_type {engine.engine_type} cannot leave its GPU, so that trainer and engines take "
                    "turns on it (Engine.leaves_device, docs/extending.md); use more GPUs"
                )
    of_roles = f"{ranks} trainer + {explorers} explorers (trainer.num_ranks, {_EXPLORER_KEYS})"
    if judges:
        of_roles += f" + {len(judges)} auxiliary (engine_num of explorer.auxiliary_models)"
    # Who takes turns takes them on the cores, too.
    roles = (max(ranks, explorers) if colocated else ranks + explorers) + len(judges)
    # A trainer and an explorer may share a single core, so that a run starts on any machine.
    if roles > max(num_cpus, 2):
        at_once = f"{'by turns ' * colocated}= {roles} processes that compute"
        raise UserError(
            f"cluster: {of_roles} {at_once}, and there are {num_cpus} cores (cluster.num_cpus); "
            f"{_advice(ranks, explorers, num_cpus - len(judges), 1, colocated, len(judges))}"
        )
    needed = (max(ranks, explorers * each) if colocated else ranks + explorers * each) + apart
    if num_gpus and needed > num_gpus:
        at_once = "taking turns (colocate)" if colocated else f"= {roles} processes with a GPU each"
        if each > 1:
            at_once = f"with {each} GPUs each (tensor, pipeline and data_parallel_size)"
        if judges:
            at_once = f"with {each} GPU{'s' * (each > 1)} each{', taking turns (colocate),' * colocated}"
            at_once += f" + {_added(judges)} of auxiliary models"
        raise UserError(
            f"cluster: {of_roles} {at_once} = {needed} GPUs, and there are {num_gpus} GPUs (cluster.gpu_per_node); "
            f"{_advice(ranks, explorers, num_gpus - apart, each, colocated, apart)}, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=)"
        )
    check_groups(stages, ranks)
    # Cores are divided evenly: more threads than cores slow all of them.
    threads, has_gpu = max(1, num_cpus // max(1, roles)), num_gpus > 0
    workers = [WorkerPlan(f"trainer-{i}", (TRAINER_RESOURCE,), threads, i if has_gpu else None) for i in range(ranks)]
    for i in range(first):
        # The GPUs after the ranks' own, or those of the ranks; each engine's side by side.
        at = i * each if colocated else ranks + i * each
        shares = tuple(number for number in range(at, at + each) if number < ranks) if colocated else ()
        gpu, num = (at, each) if has_gpu else (None, 1)
        workers.append(WorkerPlan(f"explorer-{i}", (EXPLORER_RESOURCE,), threads, gpu, num, shares))
    # At the end of the machine: what lies between is for explorers that may join later.
    at = num_gpus
    for i, size in enumerate(judges):
        at -= size
        gpu = at if has_gpu else None
        workers.append(WorkerPlan(f"auxiliary-{i}", (AUXILIARY_RESOURCE,), threads, gpu, size))
    if colocated:
        # Also those without an engine on their device: ranks take their turns together.
        workers[:ranks] = [replace(worker, shares=(i,)) for i, worker in enumerate(workers[:ranks])]
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
    Raises: UserError: ranks that are to work together are no whole number of groups; there are too few GPUs; roles are
    to take turns on GPUs, and have jobs of their own.
    """
    # Whoever starts workers himself may start both roles on a machine, where they find each other.
    colocated = any(stage.cluster.colocate for stage in stages)
    ranks, first, most, each, judges = _demand(stages, num_gpus or 0, colocated, alike=True)
    kind = stages[0].cluster.type
    if colocated and kind not in _SHARING:
        raise UserError(
            f"cluster.colocate: cluster.type {kind} has jobs of their own for ranks and engines, which share no GPU; "
            f"use {', '.join(_SHARING)} or local, or leave it out (mode: both)"
        )
    if colocated and kind == "slurm" and ranks != most * each:
        raise UserError(
            f"cluster.colocate: on SLURM each rank shares its GPU with an engine, and {ranks} trainer ranks have "
            f"{ranks} GPUs for {most} engines with {each} each; set explorer.rollout_model.engine_num to "
            f"{max(1, ranks // each)}, or trainer.num_ranks to {most * each}"
        )
    needed = (max(ranks, most * each) if colocated else ranks + most * each) + sum(judges)
    if num_gpus and needed > num_gpus:
        beside = f" + {_added(judges)} of auxiliary models" if judges else ""
        raise UserError(
            f"cluster: {ranks} trainer + {most} explorers (trainer.num_ranks, {_EXPLORER_KEYS}) with {each} "
            f"GPU{'s' * (each > 1)} each{', taking turns (colocate),' * colocated}{beside} = {needed} GPUs, and there "
            f"are {num_gpus} (cluster.node_num x cluster.gpu_per_node); "
            f"{_advice(ranks, most, num_gpus - sum(judges), each, colocated, sum(judges))}"
        )
    check_groups(stages, ranks)
    counts = ((TRAINER_RESOURCE, ranks, 1), (EXPLORER_RESOURCE, first, each))
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
    """What all stages can do with."""

    ranks: int
    first: int
    """Explorers at first."""
    most: int
    """Explorers at most."""
    each: int
    """GPUs of each explorer."""
    auxiliary: list[int]
    """Of each worker of auxiliary models its GPUs."""


def _demand(stages: Sequence[Config], num_gpus: int, colocated: bool = False, alike: bool = False) -> _Demand:
    """What the stages want. alike: workers of auxiliary models are jobs of one role, each for the largest of them."""
    exploring = [stage for stage in stages if stage.has_explorer]
    if colocated and any(stage.evaluates_training for stage in stages):
        raise UserError(
            "cluster: a trainer on a dataset waits for nobody, so engines that evaluate beside it get no turn on its "
            "GPU: give them one of their own, or leave out buffer.explorer_input.eval_tasksets in mode train; mode "
            "bench evaluates the checkpoints afterwards"
        )
    first = max((stage.explorer.fewest_workers for stage in exploring), default=0)
    most = max((stage.explorer.most_workers for stage in exploring), default=0)
    each = max((stage.explorer.gpus_per_worker for stage in exploring), default=1)
    # What as many explorers as there may ever be leave over: ranks cannot be moved while a stage runs. On SLURM they
    # are one job, of whole nodes.
    slurm, on_slurm = stages[0].cluster.slurm.trainer, stages[0].cluster.type == "slurm"
    node = max(1, slurm.workers_per_node(1)) if on_slurm else 1
    judges = auxiliary_sizes(stages)
    judges = [max(judges)] * len(judges) if alike and judges else judges
    others = sum(judges) if colocated else sum(judges) + most * each
    left = max(node * (slurm.nodes or 1), (num_gpus - others) // node * node)
    ranks = max((_asked_ranks(stage) or left for stage in stages if _trains(stage)), default=0)
    # Who has a place on a device keeps it, so all of them are there from the start.
    return _Demand(ranks, most if colocated else first, most, each, judges)


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


def _added(sizes: Sequence[int]) -> str:
    """ "2" of one worker, "2 + 1" of two."""
    return " + ".join(map(str, sizes))


def _advice(ranks: int, explorers: int, places: int, each: int, colocated: bool, apart: int = 0) -> str:
    """What would fit, by changing the fewest: engines beside the ranks that there are, else ranks beside the engines,
    else both, in about the same shares. places: without the `apart` that auxiliary models have.
    """
    if apart and places < 1 + (0 if colocated else each):
        return "lower engine_num of explorer.auxiliary_models, or set it to 0, which loads them beside the policy"
    if explorers and each > places:
        return f"lower explorer.rollout_model.tensor_parallel_size (or pipeline, data), so that an engine has {places}"
    turns = f"num_ranks {min(ranks, places)}, engine_num {min(explorers, places // each)}"
    if colocated:  # who takes turns has all places
        changes = {"engine_num": min(explorers, places // each), "num_ranks": min(ranks, places)}
    elif explorers and ranks + each <= places:
        changes = {"engine_num": min(explorers, (places - ranks) // each)}
    elif places - explorers * each > 0:
        changes = {"num_ranks": min(ranks, places - explorers * each)}
    elif places > each:
        engines = max(1, min((places - 1) // each, places * explorers // (ranks + explorers * each)))
        changes = {"engine_num": engines, "num_ranks": min(ranks, places - engines * each)}
    else:
        return f"use one machine whose GPUs they share by turns (cluster.type local, mode colocate, {turns})"
    now = {"engine_num": explorers, "num_ranks": ranks}
    return "lower " + " and ".join(f"{key} to {number}" for key, number in changes.items() if number < now[key])


def worker_imports(stages: Sequence[Config]) -> list[str]:
    """Modules that the workers of one machine import."""
    modules = [*WORKER_IMPORTS]
    for stage in stages:
        pipeline = stage.data_processor.experience_pipeline
        if stage.has_explorer and stage.explorer.rollout_model.traits.has_model:
            modules += TOKENIZERS
        if stage.reads_images or stage.reads_videos or (pipeline.operators and pipeline.stage == "commit"):
            modules.append(MODELS)
    return list(dict.fromkeys(modules))


def imports_ahead(stages: Sequence[Config], roles: Collection[str]) -> list[str]:
    """Modules that the engines and ranks of the roles import in some of the stages; WORKER_IMPORTS not among them."""
    ranks = [stage for stage in stages if TRAINER_RESOURCE in roles and _trains(stage)]
    # First what a check of the algorithm waits for, before which none of them is started; last the rank, which has
    # nothing to train before an engine has answered.
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
