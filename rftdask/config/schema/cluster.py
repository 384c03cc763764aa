"""Section `cluster`: on which machines the workers of a run are. A kind of cluster is a class of rftdask.cluster."""

import re
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from rftdask.config.base import Count, Free, Later, Named, Natural, Seconds, Section, no_items
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


class JobConfig(Section):
    """`cluster.slurm.<role>`: what each job of a role asks of SLURM."""

    partition: str | None = None
    """Partition. None: the site's default."""
    account: str | None = None
    """Account that pays."""
    gres: str | None = None
    """Generic resources of the job, such as gpu:1."""
    constraint: str | None = None
    """Features that its node must have."""
    walltime: Annotated[str, AfterValidator(_walltime)] | None = None
    """Longest time, as SLURM writes it: 04:00:00. None: the partition's default."""
    cpus: Count = 1
    """Cores of the job."""
    memory: Annotated[str, AfterValidator(_memory)] = "4GB"
    """Memory of the job."""
    directives: tuple[str, ...] = ()
    """Further #SBATCH lines, without the #SBATCH."""
    prologue: tuple[str, ...] = ()
    """Lines of shell before the command: modules to load, variables, an environment to activate."""


class SlurmConfig(Section):
    """`cluster.slurm`: the jobs of a run on SLURM."""

    controller: JobConfig = JobConfig()
    """The one job of `rftdask submit`: scheduler, driver and the light roles. It needs no GPU."""
    trainer: JobConfig = JobConfig()
    """A job for each rank of the trainer."""
    explorer: JobConfig = JobConfig()
    """A job for each engine; good for preemptible partitions."""


class ClusterConfig(Section):
    """`cluster`: where the Dask workers live. How roles are placed on them follows from the other sections."""

    type: Annotated[
        str,
        Named("cluster", registered_clusters),
        Later("this kind of cluster", ("moab", "kubernetes", "ssh")),
    ] = "local"
    """local: processes on this machine. local-cuda: the same, started by dask-cuda (extra gpu). slurm, pbs, lsf, sge,
    htcondor, oar: a job for each worker, through dask-jobqueue (extra slurm). joined: workers that `rftdask join`
    brings. existing: a Dask scheduler that is there already, see `options`."""
    options: Free = no_items()
    """existing: {address} or {scheduler_file}, and {tls_ca_file, tls_cert, tls_key} where it has TLS. pbs to oar:
    arguments for dask-jobqueue's job class, for all roles, and below `trainer` and `explorer` for one."""
    slurm: SlurmConfig = SlurmConfig()
    """slurm: what the jobs of each role ask for."""
    interface: str | None = None
    """Network interface of the machine of the scheduler that the workers reach. None: the one that leads outside."""
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
