"""Promises of SLURM's commands: what their answers mean, and the directives of jobs."""

import os
from pathlib import Path

import pytest

from rftdask.cluster.batch_cluster import forget_job
from rftdask.cluster.job_shapes import megabytes
from rftdask.cluster.slurm import SlurmCluster, directives, sbatch
from rftdask.config.schema.cluster import JobConfig
from rftdask.errors import RoleError, UserError


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("Resources", False),
        ("Priority", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("QOSMaxGRESPerUser", False),
        ("AssocGrpGRES", False),
        ("ReqNodeNotAvail, UnavailableNodes:n1", False),
        ("BeginTime", False),
        ("PartitionTimeLimit", True),
        ("PartitionNodeLimit", True),
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocMaxCpuPerJobLimit", True),
        ("QOSMaxGRESPerJob", True),
        ("QOSMinGRES", True),
    ],
)
def test_waiting_for_room_is_not_waiting_forever(reason: str, never: bool) -> None:
    assert SlurmCluster.never_runs(f"PENDING ({reason})") == never
    assert not SlurmCluster.never_runs("RUNNING") and not SlurmCluster.never_runs("PENDING")


def test_a_limit_of_submitted_jobs_is_not_a_mistake() -> None:
    assert SlurmCluster.is_at_limit(
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job ..."
    )
    assert SlurmCluster.is_at_limit("error: AssocMaxSubmitJobLimit")
    assert SlurmCluster.is_at_limit(
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    )
    mistakes = (
        "sbatch: error: invalid partition specified: gpus",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: error: Memory specification can not be satisfied",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    )
    assert all(SlurmCluster.is_mistake(error) and not SlurmCluster.is_at_limit(error) for error in mistakes)
    assert not SlurmCluster.is_mistake(
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    )


def test_the_job_id_is_the_last_line_of_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "sbatch"
    command.write_text("#!/bin/sh\necho Welcome to this machine, 2 things are new\necho '4711;cluster'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert sbatch("script.sh") == "4711"
    command.write_text("#!/bin/sh\necho 'refused: your quota of 7 is used up'\n")
    with pytest.raises(RoleError, match="printed no job id but 'refused: your quota"):
        sbatch("script.sh")


def test_a_job_inherits_no_variables_of_its_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = ("SLURM_MEM_PER_CPU", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SLURMD_NODENAME")
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT")
    for name in (*removed, *kept):
        monkeypatch.setenv(name, "1")
    forget_job()
    assert not set(removed) & set(os.environ) and set(kept) <= set(os.environ)


def test_every_key_of_a_role_becomes_a_directive() -> None:
    asked = JobConfig(
        **{"partition": "spot", "account": "me", "gres": "gpu:1", "constraint": "a100", "walltime": "1:00"},
        **{"qos": "long", "reservation": "course", "directives": ("--nice",)},
    )
    assert directives(asked) == [
        "--partition=spot",
        "--account=me",
        "--qos=long",
        "--reservation=course",
        "--gres=gpu:1",
        "--constraint=a100",
        "--time=1:00",
        "--nice",
    ]
    assert megabytes("4GiB") == 4096
    with pytest.raises(UserError, match="memory"):
        megabytes("much")
