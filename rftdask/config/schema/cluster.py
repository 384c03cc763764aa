"""Section `cluster`: on which machines the workers of a run are. A kind of cluster is a class of rftdask.cluster."""

import re
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from rftdask.config.base import Count, Later, Natural, OpenDict, PluginName, Seconds, Section, empty_dict
from rftdask.config.plugins import read_parts

registered_clusters = partial(read_parts, "rftdask.cluster", "cluster_type")
"""Call for cluster.type -> class, of the clusters of this package; read from their source, for they import Dask."""


def _walltime(text: str) -> str:
    if not re.fullmatch(r"\d+(-\d+)?(:\d+){0,2}", text):
        raise ValueError("no time as SLURM writes it; give minutes, HH:MM:SS or D-HH:MM:SS")
    return text


def _memory(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)? *[KMGT]?i?B?", text, re.IGNORECASE):
        raise ValueError("no amount of memory; give 4GB, 512MB or 16GiB")
    return text


def count_gres(gres: str | None) -> int:
    """GPUs in "gpu:2", "gpu:a100:4(S:0-1)", "gpu:2080ti:4", "gpu:1g.10gb:7" (parts of one) or "gres/gpu:1"; 0
    without.
    """
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


class JobConfig(Section):
    """`cluster.slurm.<role>`: what each job of a role asks of SLURM."""

    partition: str | None = None
    """Partition. None: the site's default."""
    account: str | None = None
    """Account that pays."""
    gres: str | None = None
    """Generic resources of each node of the job, such as gpu:1, gpu:h100:8 or gpu:1g.10gb:7."""
    gpus_per_node: Annotated[str, Field(pattern=r"^([A-Za-z0-9_.-]+:)?[1-9]\d*$")] | None = None
    """GPUs of each node of the job, such as 8 or h100:8, for sites that take --gpus-per-node and no --gres."""
    exclusive: bool = False
    """The job shares its nodes with no other, and has all of their memory."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation whose nodes it uses."""
    constraint: str | None = None
    """Features that its node must have."""
    walltime: Annotated[str, AfterValidator(_walltime)] | None = None
    """Longest time, as SLURM writes it: 04:00:00. None: the partition's default."""
    cpus: Count = 1
    """Cores of the job; of each rank or engine where it has several."""
    memory: Annotated[str, AfterValidator(_memory)] = "4GB"
    """Memory of the job; of each rank or engine where it has several."""
    directives: tuple[str, ...] = ()
    """Further #SBATCH lines, without the #SBATCH."""
    prologue: tuple[str, ...] = ()
    """Lines of shell before the command: modules to load, variables, an environment to activate."""

    @property
    def num_gpus(self) -> int:
        """Of each node."""
        return count_gres(f"gpu:{self.gpus_per_node}" if self.gpus_per_node else self.gres)


class WorkerJobConfig(JobConfig):
    """`cluster.slurm.trainer`, `.explorer` and `.auxiliary`: jobs whose nodes have several ranks or engines each."""

    nodes: Count | None = None
    """Nodes of each job. None: one, and for a trainer as many as all of its ranks take."""
    tasks_per_node: Count | None = None
    """Ranks or engines on each node of a job. None: as many as its GPUs are for, or as SLURM likes without GPUs."""

    def workers_per_node(self, gpus_each: int) -> int:
        """Of workers with `gpus_each` GPUs, as far as it is said here; 0: it is not."""
        return self.tasks_per_node or self.num_gpus // gpus_each


class SlurmConfig(Section):
    """`cluster.slurm`: the jobs of a run on SLURM."""

    controller: JobConfig = JobConfig()
    """The one job of `rftdask submit`: scheduler, driver and the light roles. It needs no GPU."""
    trainer: WorkerJobConfig = WorkerJobConfig()
    """One job for all ranks of the trainer."""
    explorer: WorkerJobConfig = WorkerJobConfig()
    """A job for each engine, or for as many as the GPUs of its nodes are for; good for preemptible partitions."""
    auxiliary: WorkerJobConfig = WorkerJobConfig()
    """The same for engines of auxiliary models that have workers of their own; all are as large as the largest."""
    profile: str | None = None
    """Name of a file ~/.config/rftdask/NAME.yaml or /etc/rftdask/NAME.yaml, or the path of one, with a section
    `cluster` that a site writes once; what the configuration says itself counts. None once it is loaded: what the file
    says has taken its place."""
    template: Annotated[str, AfterValidator(_template)] | None = None
    """Jinja template of every script, which extends or replaces the one of `rftdask submit --print-templates`; or the
    path of its file, in whose place its text is once it is loaded. None: that one."""
    mail: str | None = None
    """Address to which SLURM writes when a job that drives the run ends or fails."""
    dependency: Annotated[str, Field(pattern=rf"^{_AFTER}([,?]{_AFTER})*$")] | None = None
    """Jobs of others that the first job of a submission waits for, as --dependency of sbatch: afterok:1234."""
    heterogeneous: bool = True
    """Whether `rftdask submit --single-allocation` may ask for a heterogeneous job; false: one job whose nodes are all
    alike, some for each role."""


class ClusterConfig(Section):
    """`cluster`: where the Dask workers live. How roles are placed on them follows from the other sections."""

    type: Annotated[
        str,
        PluginName("cluster", registered_clusters),
        Later(
            "this kind of cluster; docs/slurm.md, Kubernetes, has a way with cluster.type existing",
            ("moab", "kubernetes", "ssh"),
        ),
    ] = "local"
    """local: processes on this machine. local-cuda: the same, started by dask-cuda (extra gpu). slurm: a job for all
    ranks, and jobs of engines (extra slurm). pbs, lsf, sge, htcondor, oar: a job for each worker, through dask-jobqueue
    (extra slurm). joined: workers that `rftdask join` brings. existing: a Dask scheduler that is there already, see
    `options`."""
    options: OpenDict = empty_dict()
    """existing: {address} or {scheduler_file}, and {tls_ca_file, tls_cert, tls_key} where it has TLS. pbs to oar:
    arguments for dask-jobqueue's job class, for all roles, and below `trainer`, `explorer` and `auxiliary` for one."""
    slurm: SlurmConfig = SlurmConfig()
    """slurm: what the jobs of each role ask for."""
    interface: str | None = None
    """Network interface of the machine of the scheduler that the workers reach. None: the one that leads outside."""
    python: str | None = None
    """Batch systems: interpreter of the jobs, where that is another than the one that submits, such as of an
    environment with the extra train. None: the one that submits."""
    local_cache_dir: str | None = None
    """Batch systems, joined: folder on each node's own disk, such as $TMPDIR or /local/$USER, to which models and
    datasets in files are copied once before they are read; the shell of a job fills in its variables. None: they are
    read where they are."""
    stage_keep: bool = False
    """Keep the copies in local_cache_dir for the next run. False: the last process on a node that uses them removes
    them."""
    private_folder: str | None = None
    """Folder that all machines see and only its owner may read, for the scheduler's address and the TLS keys. None:
    inside the run folder, or below ~/.rftdask where that is not a local path."""
    tls: bool = True
    """Encrypt and authenticate what the processes of a cluster say to each other, also on one machine. A scheduler
    without it obeys anybody who reaches its port, so every user of its machine."""
    dashboard_address: str | None = None
    """host:port of Dask's dashboard, such as 127.0.0.1:8787; it has no password. None: no dashboard."""
    max_queue_s: Seconds = 7 * 86400.0
    """How long the workers of a role may wait in the queue of a batch system before the run fails."""
    node_num: Natural = 0
    """Number of machines to place roles on. 0: detect; slurm: those of the partition."""
    gpu_per_node: Natural = 0
    """GPUs of each machine. 0: detect, which may find none."""
    colocate: bool | None = None
    """Trainer and engines take turns on the same GPUs: who waits has its weights in host memory. None: where a machine
    has fewer GPUs than all of them need. `mode: colocate` is `mode: both` with this on."""
    num_cpus: Count | None = None
    """CPU cores to share out among the roles as threads. None: all cores of the machine."""

    @property
    def takes_options(self) -> bool:
        """Whether `options` means something to this kind of cluster; one of the user's own may read what it likes."""
        part = registered_clusters().get(self.type)
        return part is None or bool(part.traits["takes_options"])

    @property
    def is_one_machine(self) -> bool:
        """Whether all workers are processes of the driver's machine."""
        part = registered_clusters().get(self.type)
        return bool(part and part.traits["is_one_machine"])

    @property
    def spans_nodes(self) -> bool:
        """Whether an engine may have several whole nodes of this kind of cluster."""
        part = registered_clusters().get(self.type)
        return bool(part and part.traits["spans_nodes"])
