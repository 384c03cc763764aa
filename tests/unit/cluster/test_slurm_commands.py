"""Promises of SLURM's commands and of the shapes of jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rftdask.cluster.slurm_commands import (
    Capacity,
    JobShape,
    check_fit,
    directives,
    forget_job,
    hours,
    is_at_limit,
    is_mistake,
    limit,
    megabytes,
    never_runs,
    shape_of,
    submit,
)
from rftdask.config.schema.cluster import JobConfig, WorkerJobConfig, count_gres
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
    assert never_runs(f"PENDING ({reason})") == never
    assert not never_runs("RUNNING") and not never_runs("PENDING")


def test_a_limit_of_submitted_jobs_is_not_a_mistake() -> None:
    assert is_at_limit(
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job ..."
    )
    assert is_at_limit("error: AssocMaxSubmitJobLimit")
    assert is_at_limit("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)")
    mistakes = (
        "sbatch: error: invalid partition specified: gpus",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: error: Memory specification can not be satisfied",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    )
    assert all(is_mistake(error) and not is_at_limit(error) for error in mistakes)
    assert not is_mistake("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")


def test_the_job_id_is_the_last_line_of_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho Welcome to this machine, 2 things are new\necho '4711;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert submit("script.sh") == "4711"
    sbatch.write_text("#!/bin/sh\necho 'refused: your quota of 7 is used up'\n")
    with pytest.raises(RoleError, match="printed no job id but 'refused: your quota"):
        submit("script.sh")


def test_a_job_inherits_no_variables_of_its_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ("SLURM_MEM_PER_CPU", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SLURMD_NODENAME")
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT")
    for name in (*told, *kept):
        monkeypatch.setenv(name, "1")
    forget_job()
    assert not set(told) & set(os.environ) and set(kept) <= set(os.environ)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        (None, 0),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:a100:4(S:0-1)", 4),
        ("gres/gpu:1", 1),
        ("(null)", 0),
        ("lustre:1", 0),
        ("gpu:2080ti:4", 4),
        ("gpu:1g.10gb:7", 7),
        ("gpu:3g.20gb:2,gpu:2g.10gb:1", 3),
        ("gpu:a100:1,gpu:a100_3g.20gb:2", 3),
        ("gpu:8,gpu_mem:640G", 8),
    ],
)
def test_gpus_of_generic_resources(gres: str | None, count: int) -> None:
    assert count_gres(gres) == count


def test_jobs_that_do_not_fit_a_partition_are_refused() -> None:
    jobs = {"trainer": WorkerJobConfig(gres="gpu:2", cpus=4), "explorer": WorkerJobConfig(gres="gpu:1", cpus=4)}
    there = dict.fromkeys(jobs, Capacity("main", num_nodes=4, cpus=16, gpus=2))

    def shapes(ranks: int, engines: int) -> dict[str, JobShape]:
        return {role: shape_of(role, jobs[role], n, 1) for role, n in (("trainer", ranks), ("explorer", engines))}

    check_fit(shapes(6, 2), jobs, there)
    with pytest.raises(
        UserError, match=r"3 trainer x 2 \+ 3 explorer x 1 = 9 GPUs, and partition main has 4 nodes x 2 = 8"
    ):
        check_fit(shapes(6, 3), jobs, there)
    with pytest.raises(UserError, match=r"slurm.trainer: a job asks for 2 GPUs of a node, and no node of .* than 1"):
        check_fit(shapes(2, 0), jobs, dict.fromkeys(jobs, limit(there["trainer"], 0, 1)))
    with pytest.raises(UserError, match=r"a job of 5 nodes with 2 workers each, and partition main has 4 nodes with 2"):
        check_fit(shapes(10, 0), jobs, there)
    jobs["explorer"] = WorkerJobConfig(gres="gpu:1", exclusive=True)
    with pytest.raises(UserError, match=r"2 trainer x 2 \+ 3 explorer x 2 = 10 GPUs"):
        check_fit(shapes(4, 3), jobs, there)
    apart = {**there, "explorer": Capacity("spot", 4, 16, 2)}
    check_fit(shapes(8, 4), jobs, apart)


@pytest.mark.parametrize(
    ("role", "asked", "workers", "gpus_each", "shape"),
    [
        ("trainer", {"gres": "gpu:h100:8"}, 16, 1, JobShape(1, 2, 8)),
        ("trainer", {"gpus_per_node": "h100:4"}, 4, 1, JobShape(1, 1, 4)),
        ("trainer", {"gres": "gpu:1g.10gb:7"}, 7, 1, JobShape(1, 1, 7)),
        ("trainer", {"gres": "gpu:1"}, 3, 1, JobShape(1, 3, 1)),
        ("trainer", {}, 3, 1, JobShape(1, 0, 3)),
        ("trainer", {"nodes": 2}, 4, 1, JobShape(1, 2, 2)),
        ("trainer", {"exclusive": True, "tasks_per_node": 3}, 6, 1, JobShape(1, 2, 3)),  # a site without GRES
        ("explorer", {}, 3, 1, JobShape(3, 0, 1)),
        ("explorer", {"gres": "gpu:1"}, 3, 1, JobShape(3, 1, 1)),
        ("explorer", {"gres": "gpu:8"}, 16, 1, JobShape(2, 1, 8)),
        ("explorer", {"gres": "gpu:8"}, 4, 4, JobShape(2, 1, 2)),
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 4, 8, JobShape(2, 2, 1)),
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 3, 16, JobShape(3, 2, 1, span=2)),
        ("explorer", {"gres": "gpu:gh200:1", "nodes": 8}, 4, 4, JobShape(2, 8, 1, span=4)),
        ("explorer", {"gres": "gpu:8"}, 0, 1, JobShape(0, 0, 1)),
    ],
)
def test_ranks_are_one_job_and_engines_fill_their_gpus(
    role: str, asked: dict[str, Any], workers: int, gpus_each: int, shape: JobShape
) -> None:
    assert shape_of(role, WorkerJobConfig(**asked), workers, gpus_each) == shape


@pytest.mark.parametrize(
    ("role", "asked", "workers", "gpus_each", "told"),
    [
        (
            "trainer",
            {"gres": "gpu:h100:8"},
            1,
            1,
            r"1 rank \(trainer.num_ranks\), and a job of 1 node x 8 has 8 \(cluster.slurm.trainer.gres is gpu:h100:8.*"
            "set trainer.num_ranks to 8, or ask for less",
        ),
        (
            "trainer",
            {"gres": "gpu:8", "tasks_per_node": 1},
            1,
            1,
            "1 rank with 1 GPU each .* use 1 of a node; ask for 1",
        ),
        ("explorer", {"gres": "gpu:8"}, 12, 1, "12 engines .* a job of 1 node x 8 has 8 .*engine_num to 16"),
        ("explorer", {"gres": "gpu:8"}, 2, 3, "gres is gpu:8, and 2 engines with 3 GPUs each .* use 6 of a node"),
        ("explorer", {"gres": "gpu:1"}, 1, 4, r"works on 4 GPUs .*; set gpu:4, or .* over 4 nodes .*explorer.nodes: 4"),
        ("explorer", {"gres": "gpu:8", "nodes": 3}, 1, 16, "over 2 nodes cluster.slurm.explorer.nodes: 2, or a mult"),
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 1, 12, "which is not a number of whole nodes; set gpu:12, or a"),
        (
            "explorer",
            {"gres": "gpu:8", "nodes": 4},
            3,
            16,
            "a job of 4 nodes has 2 of 3 engines; .*engine_num to 4",
        ),
        ("explorer", {}, 1, 4, "an engine works on 4 GPUs .*; set gpu:4"),
    ],
)
def test_unused_gpus_are_refused_by_name(
    role: str, asked: dict[str, Any], workers: int, gpus_each: int, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        shape_of(role, WorkerJobConfig(**asked), workers, gpus_each)


@pytest.mark.parametrize(
    ("told", "expected"),
    [("1-12:00:00", 36.0), ("08:00:00", 8.0), ("30:00", 0.5), ("2-0", 48.0), ("infinite", float("inf"))],
)
def test_the_hours_of_a_time_limit(told: str, expected: float) -> None:
    assert hours(told) == expected


def test_more_nodes_than_exist_are_refused() -> None:
    there = Capacity("main", num_nodes=4, cpus=8, gpus=1)
    assert limit(there, 2, 0) == Capacity("main", 2, 8, 1)
    with pytest.raises(UserError, match=r"node_num is 5, and partition main has 4 nodes"):
        limit(there, 5, 0)


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
