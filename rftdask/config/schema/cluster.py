"""Section `cluster`: machines of the workers. Each kind of cluster is a class of rftdask.cluster."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from rftdask.config.base import (
    Count,
    Later,
    Natural,
    OpenDict,
    PluginName,
    Problem,
    Seconds,
    Section,
    empty_dict,
    reading,
)
from rftdask.config.plugins import read_parts

registered_clusters = partial(read_parts, "rftdask.cluster", "cluster_type")
"""Returns cluster.type -> class, of this package's clusters, read from their source because they import Dask."""


def _walltime(text: str) -> str:
    if not re.fullmatch(r"\d+(-\d+)?(:\d+){0,2}", text):
        raise ValueError("no time as SLURM writes it; give minutes, HH:MM:SS or D-HH:MM:SS")
    return text


def _seconds(walltime: str) -> int:
    """Length of a walltime in SLURM's format. 0: no limit.

    >>> _seconds("5"), _seconds("1:30"), _seconds("1:00:00"), _seconds("1-2"), _seconds("1-0:30")
    (300, 90, 3600, 93600, 88200)
    """
    days, dash, time = walltime.rpartition("-")
    parts = [int(part) for part in time.split(":")]
    hours_first = parts if dash or len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = (*hours_first, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _memory(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)? *[KMGT]?i?B?", text, re.IGNORECASE):
        raise ValueError("no amount of memory; give 4GB, 512MB or 16GiB")
    return text


def count_gres(gres: str | None) -> int:
    """Return the GPUs in "gpu:2", "gpu:a100:4(S:0-1)", "gpu:2080ti:4", "gpu:1g.10gb:7" (slices of one) or "gres/gpu:1";
    0: none."""
    # A type may begin with a digit, and has a letter somewhere; gpu_mem and its kin are other resources.
    found = re.findall(r"(?<!\w)gpu(?!\w)(?::\w*[A-Za-z][\w.-]*)?(?::(\d+))?", gres or "")
    return sum(int(count or 1) for count in found)


def _template(text: str) -> str:
    import jinja2  # late: most configurations have no template

    try:
        jinja2.Environment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"no template of Jinja: line {error.lineno}: {error.message}") from error
    return text


_AFTER = r"(singleton|(after|afterany|afterok|afternotok|afterburstbuffer|aftercorr)(:\d+(_\d+)?(\+\d+)?)+)"


WARNING_S = 180
"""Time before its walltime at which a controller is signaled, which writes a checkpoint and is queued again."""


class JobConfig(Section):
    """`cluster.slurm.<role>`: resources of each SLURM job of a role."""

    partition: str | None = None
    """Partition. None: the site's default."""
    account: str | None = None
    """Account that is charged. None: the user's default."""
    gres: str | None = None
    """Generic resources of each node of the job, such as gpu:1, gpu:h100:8 or gpu:1g.10gb:7. None: no --gres."""
    gpus_per_node: Annotated[str, Field(pattern=r"^([A-Za-z0-9_.-]+:)?[1-9]\d*$")] | None = None
    """GPUs of each node of the job, such as 8 or h100:8, for sites that take --gpus-per-node but not --gres. None: no
    --gpus-per-node."""
    exclusive: bool = False
    """Share no node with other jobs, and use all of its memory."""
    qos: str | None = None
    """Quality of service. None: the site's default."""
    reservation: str | None = None
    """Reservation whose nodes the job uses. None: no reservation."""
    constraint: str | None = None
    """Features that the nodes must have. None: any nodes."""
    walltime: Annotated[str, AfterValidator(_walltime)] | None = None
    """Time limit in SLURM's format: 04:00:00. None: the partition's default."""
    cpus: Count = 1
    """CPU cores of the job; for jobs of several ranks or engines, of each."""
    memory: Annotated[str, AfterValidator(_memory)] | None = "4GB"
    """Memory of the job; for jobs of several ranks or engines, of each. None: neither --mem-per-cpu nor --mem, which
    sites without memory accounting refuse."""
    directives: tuple[str, ...] = ()
    """Further #SBATCH lines, without #SBATCH."""
    prologue: tuple[str, ...] = ()
    """Shell lines before the command: modules to load, variables, an environment to activate."""

    @reading("gres", "gpus_per_node")
    def _gpus_are_requested_once(self) -> Iterator[Problem]:
        if self.gpus_per_node and count_gres(self.gres):
            why = f"gres {self.gres} requests GPUs as well, and SLURM takes only one of the two"
            yield "gpus_per_node", f"{why}; leave one out"

    @property
    def num_gpus(self) -> int:
        """GPUs of each node."""
        return count_gres(f"gpu:{self.gpus_per_node}" if self.gpus_per_node else self.gres)


class WorkerJobConfig(JobConfig):
    """`cluster.slurm.trainer`, `.explorer` and `.auxiliary`: jobs with several ranks or engines on each node."""

    nodes: Count | None = None
    """Nodes of each job. None: one; for a trainer, as many as all its ranks need."""
    tasks_per_node: Count | None = None
    """Ranks or engines on each node of a job. None: as many as fit its GPUs; without GPUs, SLURM decides."""

    def workers_per_node(self, gpus_each: int) -> int:
        """Return the workers with `gpus_each` GPUs on each node; 0: unknown."""
        return self.tasks_per_node or self.num_gpus // gpus_each


class SlurmConfig(Section):
    """`cluster.slurm`: the jobs of a run on SLURM."""

    controller: JobConfig = JobConfig.model_construct()
    """The job of `rftdask submit`: scheduler, driver and light roles. It needs no GPU."""
    trainer: WorkerJobConfig = WorkerJobConfig.model_construct()
    """One job for all ranks of the trainer."""
    explorer: WorkerJobConfig = WorkerJobConfig.model_construct()
    """One job per engine, or per as many engines as fit the GPUs of its nodes. Suits preemptible partitions."""
    auxiliary: WorkerJobConfig = WorkerJobConfig.model_construct()
    """The same for engines of auxiliary models with their own workers; all jobs have the size of the largest."""
    profile: str | None = None
    """Name of a file ~/.config/rftdask/NAME.yaml or /etc/rftdask/NAME.yaml, or a path, with a section `cluster` for a
    whole site. Keys of the configuration override it. None: no profile; always None after loading, because the profile
    is merged."""
    template: Annotated[str, AfterValidator(_template)] | None = None
    """Jinja template of all job scripts, which extends or replaces the one of `rftdask submit --print-templates`; or
    the path of its file, replaced by its text when loaded. None: the built-in template."""
    mail: str | None = None
    """Address for SLURM's mail when a job of the driver ends or fails. None: no mail."""
    dependency: Annotated[str, Field(pattern=rf"^{_AFTER}([,?]{_AFTER})*$")] | None = None
    """Jobs that the first job of a submission waits for, in the format of sbatch --dependency: afterok:1234. None: no
    wait."""
    heterogeneous: bool = True
    """Allow a heterogeneous job for `rftdask submit --single-allocation`. False: one job with nodes all alike, some for
    each role."""

    @reading("controller")
    def _the_controller_runs_before_its_warning(self) -> Iterator[Problem]:
        length_s = _seconds(self.controller.walltime or "0")
        if 0 < length_s <= WARNING_S:
            why = f"{WARNING_S} s before its walltime the controller ends the run with a checkpoint"
            yield "controller.walltime", f"{why}, so {length_s} s are too short; give more"


class ClusterConfig(Section):
    """`cluster`: where the Dask workers run. The placement of roles on them follows from other sections."""

    type: Annotated[
        str,
        PluginName("cluster", registered_clusters),
        Later(
            "this kind of cluster; docs/slurm.md, Kubernetes, has a way with cluster.type existing",
            ("moab", "kubernetes", "ssh"),
        ),
    ] = "local"
    """local: processes on this machine. local-cuda: the same, started by dask-cuda (extra gpu). slurm: one job for all
    ranks, and jobs of engines (extra slurm). pbs, lsf, sge, htcondor, oar: one job for each worker, through
    dask-jobqueue (extra slurm). joined: workers started by `rftdask join`. existing: a running Dask scheduler, see
    `options`."""
    options: OpenDict = empty_dict()
    """existing: {address} or {scheduler_file}, and with TLS {tls_ca_file, tls_cert, tls_key}. pbs to oar: arguments of
    dask-jobqueue's job class for all roles; below `trainer`, `explorer` and `auxiliary`, for one role."""
    slurm: SlurmConfig = SlurmConfig.model_construct()
    """slurm: resources of the jobs of each role."""
    interface: str | None = None
    """Network interface through which workers reach the scheduler. None: the one of the default route."""
    python: str | None = None
    """Batch systems: Python interpreter of the jobs, such as one of an environment with the extra train. None: the
    interpreter that submits."""
    local_cache_dir: str | None = None
    """Batch systems, joined: folder on each node's local disk, such as $TMPDIR or /local/$USER, to which models and
    dataset files are copied once before they are read. The shell of the job expands variables. None: files are read in
    place."""
    stage_keep: bool = False
    """Keep the copies in local_cache_dir for the next run. False: the last process on a node that uses them removes
    them."""
    private_folder: str | None = None
    """Folder that all machines see and only its owner can read, for the scheduler's address and the TLS keys. None: in
    the run folder; if that is not a local path, below ~/.rftdask."""
    tls: bool = True
    """Encrypt and authenticate the connections of a cluster, also on one machine. Without it, every user who reaches
    the scheduler's port controls it."""
    dashboard_address: str | None = None
    """host:port of Dask's dashboard, such as 127.0.0.1:8787. It has no password. None: no dashboard."""
    max_queue_s: Seconds = 7 * 86400.0
    """Maximum seconds that the workers of a role wait in the queue of a batch system before the run fails."""
    node_num: Natural = 0
    """Machines for all roles. 0: detect; slurm: those of the partition."""
    gpu_per_node: Natural = 0
    """GPUs of each machine. 0: detect; there may be none."""
    colocate: bool | None = None
    """Trainer and engines use the same GPUs alternately; the idle side keeps its weights in host memory. None: if a
    machine has too few GPUs for both. `mode: colocate` means `mode: both` with this on."""
    num_cpus: Count | None = None
    """CPU cores to distribute among the roles as threads. None: all cores of the machine."""

    @reading("type", "options", "local_cache_dir")
    def _options_are_read(self) -> Iterator[Problem]:
        if self.local_cache_dir is not None and self.type == "existing":
            why = "the workers of an existing cluster are started elsewhere"
            yield "local_cache_dir", f"{why}; export RFTDASK_STAGE_TO there, and leave it out here"
        if self.options and not self.takes_options:
            yield "options", f"cluster.type {self.type} takes no options; leave it out"

    @property
    def takes_options(self) -> bool:
        """True if this kind of cluster reads `options`. Clusters of the user's own may read any."""
        part = registered_clusters().get(self.type)
        return part is None or bool(part.traits["takes_options"])

    @property
    def is_one_machine(self) -> bool:
        """True if all workers are processes of the driver's machine."""
        part = registered_clusters().get(self.type)
        return bool(part and part.traits["is_one_machine"])

    @property
    def spans_nodes(self) -> bool:
        """True if one engine may use several whole nodes of this kind of cluster."""
        part = registered_clusters().get(self.type)
        return bool(part and part.traits["spans_nodes"])
