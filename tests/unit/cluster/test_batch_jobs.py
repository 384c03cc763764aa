"""Promises of the jobs of a run on a batch system.

- a role has as many jobs as were asked for: what ended is replaced, the newest are cancelled first;
- jobs that end again and again before their worker has joined are counted, and one that joined ends the count;
- layouts that a partition cannot hold are refused with the arithmetic;
- ranks are one job of whole nodes, engines as many jobs as their GPUs make; GPUs that nobody would use are refused;
- what a job asks for is what the config says, and a controller's script is the one shown;
- a controller ends with a checkpoint when it is told to, and is queued again near its walltime;
- a driver that is killed is started again in its job, not for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed.security import Security

from rftdask.cli import submit as submitting
from rftdask.cli.submit import (
    allocation_script,
    controller_text,
    has_finished,
    offline_scripts,
    plan_submission,
    warning,
)
from rftdask.cluster.base import find_cluster
from rftdask.cluster.batch import queries
from rftdask.cluster.batch.queries import Query
from rftdask.cluster.batch.slurm_script import NO_REQUEUE, HostSystem, driver_shell
from rftdask.cluster.batch.slurm_steps import allocation, read_allocation
from rftdask.cluster.jobs import (
    CANCELLED_FILE,
    RETURNED,
    RETURNS_FILE,
    JobRecord,
    jobs_file,
    note_workers,
    plan_change,
    read_jobs,
    write_jobs,
)
from rftdask.cluster.layout import plan_jobs
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.cluster.slurm import (
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
from rftdask.cluster.slurm_cluster import SlurmCluster, SlurmStepsCluster
from rftdask.config import Config, load_config, replace
from rftdask.config.schema.cluster import JobConfig, WorkerJobConfig, count_gres
from rftdask.errors import ConfigError, FencedError, RoleError, UserError
from rftdask.run.run_folder import note_end
from rftdask.storage import open_storage
from tests.integration.run_cases import call_cli
from tests.living import lives


def job(number: int, joined: bool = False) -> JobRecord:
    return JobRecord("explorer", f"explorer-{number}", str(number), "slurm", 0.0, joined)


def configured(folder: Path, *overrides: str) -> Config:
    tree = {
        "name": "try",
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"total_steps": 9, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "cluster": {"type": "slurm", "slurm": {"trainer": {"gres": "gpu:1", "cpus": 2}}},
    }
    return load_config(tree, overrides)


def private(config: Config) -> PrivateFolder:
    return PrivateFolder.of(config, open_storage(config.checkpoint_job_dir))


# ---- which jobs come and go


def test_a_role_has_as_many_jobs_as_were_asked_for() -> None:
    jobs = [job(1, joined=True), job(2, joined=True), job(3)]
    change = plan_change(jobs, frozenset({"1", "3"}), 4, 0)
    assert (change.lost, change.cancel, change.num_new) == ((jobs[1],), (), 2)
    fewer = plan_change(jobs, frozenset({"1", "2", "3"}), 1, 0)
    assert (fewer.lost, fewer.cancel, fewer.num_new) == ((), (jobs[1], jobs[2]), 0)


@pytest.mark.parametrize(("asked", "num_jobs"), [(0, 0), (3, 1), (8, 1), (15, 1), (16, 2)])
def test_jobs_of_several_workers_are_no_more_than_were_asked_for_but_for_the_first(asked: int, num_jobs: int) -> None:
    jobs = [job(number) for number in range(3)]
    assert plan_change([], frozenset(), asked, 0, per_job=8).num_new == num_jobs
    assert plan_change(jobs, frozenset("012"), asked, 0, per_job=8).cancel == tuple(jobs[num_jobs:])


def test_jobs_that_end_before_their_worker_joined_are_counted_until_one_joins() -> None:
    assert plan_change([job(1)], frozenset(), 1, 2).num_failed_starts == 3
    assert plan_change([job(1, joined=True)], frozenset(), 1, 2).num_failed_starts == 0
    assert plan_change([job(1), job(2, joined=True)], frozenset({"2"}), 2, 2).num_failed_starts == 0
    assert plan_change([job(1)], frozenset({"1"}), 1, 2).num_failed_starts == 2


def test_jobs_that_the_batch_system_ended_say_nothing_of_whether_workers_can_start() -> None:
    assert plan_change([job(1), job(2)], frozenset(), 2, 0, frozenset({"1"})).num_failed_starts == 1


def test_the_place_of_a_job_that_is_being_ended_is_filled_before_it_has_ended() -> None:
    jobs = [job(1, joined=True), job(2, joined=True), job(3)]
    change = plan_change(jobs, frozenset("123"), 3, 0, ending=frozenset("1"))
    assert (change.lost, change.cancel, change.num_new) == ((), (), 1)
    # One that has never joined may be one that fails by itself.
    assert plan_change(jobs, frozenset("123"), 3, 0, ending=frozenset("3")).num_new == 0
    assert plan_change(jobs, frozenset("123"), 2, 0, ending=frozenset("1")).cancel == ()


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
def test_waiting_for_room_is_told_from_waiting_for_ever(reason: str, never: bool) -> None:
    assert never_runs(f"PENDING ({reason})") == never
    assert not never_runs("RUNNING") and not never_runs("PENDING")


def test_a_limit_of_submitted_jobs_is_told_from_a_mistake() -> None:
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


def test_the_number_of_a_job_is_found_below_what_a_site_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho Welcome to this machine, 2 things are new\necho '4711;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert submit("script.sh") == "4711"
    sbatch.write_text("#!/bin/sh\necho 'refused: your quota of 7 is used up'\n")
    with pytest.raises(RoleError, match="named no job; it said: refused: your quota"):
        submit("script.sh")


def test_a_job_inherits_nothing_of_the_job_that_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ("SLURM_MEM_PER_CPU", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SLURMD_NODENAME")
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT")
    for name in (*told, *kept):
        monkeypatch.setenv(name, "1")
    forget_job()
    assert not set(told) & set(os.environ) and set(kept) <= set(os.environ)


def test_a_worker_that_left_is_missed_since_then() -> None:
    there = note_workers(job(1), True, 5.0)
    assert there.joined and there.missing_since_s is None
    left = note_workers(note_workers(there, False, 6.0), False, 7.0)
    assert left.joined and left.missing_since_s == 6.0
    assert note_workers(left, True, 8.0) == there
    assert note_workers(job(1), False, 5.0) == job(1)


def test_the_list_of_jobs_is_read_as_it_was_written(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    assert read_jobs(storage) == []
    write_jobs(storage, [job(1), job(2, joined=True)], jobs_file("both"))
    assert read_jobs(storage) == [job(1), job(2, joined=True)]


# ---- what fits


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


def test_jobs_that_a_partition_cannot_hold_are_refused_with_the_arithmetic() -> None:
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
def test_ranks_are_one_job_and_engines_as_many_as_their_gpus_make(
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
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 1, 12, "which are no whole nodes; set gpu:12, or a number that di"),
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
def test_gpus_that_nobody_would_use_are_refused_by_name(
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


def test_more_nodes_than_there_are_are_refused() -> None:
    there = Capacity("main", num_nodes=4, cpus=8, gpus=1)
    assert limit(there, 2, 0) == Capacity("main", 2, 8, 1)
    with pytest.raises(UserError, match=r"node_num is 5, and partition main has 4 nodes"):
        limit(there, 5, 0)


def test_a_trainer_takes_the_gpus_that_are_left_of_a_given_number(tmp_path: Path) -> None:
    config = configured(tmp_path, "explorer.rollout_model.engine_num=3")
    layout = plan_jobs([config], {"trainer": 2, "explorer": 1}, num_gpus=8)
    names = [(worker.name, worker.threads) for worker in layout.workers]
    assert names == [*((f"trainer-{i}", 2) for i in range(5)), *((f"explorer-{i}", 1) for i in range(3))]
    assert len(plan_jobs([config], {"trainer": 2, "explorer": 1}).workers) == 1 + 3
    whole = configured(tmp_path, "cluster.slurm.trainer.gres=gpu:h100:4", "explorer.rollout_model.engine_num=3")
    assert plan_jobs([whole], {"trainer": 2, "explorer": 1}).num_workers("trainer") == 4
    assert plan_jobs([whole], {"trainer": 2, "explorer": 1}, num_gpus=16).num_workers("trainer") == 12  # whole nodes


# ---- what scripts say


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


def test_a_worker_job_names_its_role_its_keys_and_itself(tmp_path: Path) -> None:
    keys = ("cluster.slurm.trainer.prologue=[module load cuda]", "cluster.interface=ib0")
    config = configured(tmp_path, *keys, "cluster.local_cache_dir=/local/$USER", "cluster.stage_keep=true")
    script = SlurmCluster.job_script(config, "trainer", 1, "trainer-0", private(config), tmp_path / "log")
    for text in (
        "#SBATCH --job-name=rftdask-trainer-0-try\n",
        "#SBATCH --gres=gpu:1\n",
        "#SBATCH --cpus-per-task=2\n",
        "#SBATCH --requeue\n",
        "#SBATCH --open-mode=append\n",
        "\nmodule load cuda\n",
        '\nexport RFTDASK_STAGE_TO="/local/$USER" RFTDASK_STAGE_KEEP=1\n',
        "--resources trainer=1 ",
        '--name "trainer-0-${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}" ',
        f"--tls-key {tmp_path}/runs/rftdask/try/control/private/key.pem ",
        "--interface ib0 ",
        f"\nexec {shlex.quote(sys.executable)} -m rftdask.cluster.join ",  # whom SLURM tells to end
    ):
        assert text in script
    assert "#SBATCH --time" not in script  # the partition's default
    assert "srun" not in script


def test_a_job_of_several_ranks_starts_one_worker_for_each_which_sees_all_gpus_of_its_node(tmp_path: Path) -> None:
    keys = ("gres=null", "gpus_per_node=h100:8", "exclusive=true", "cpus=12")
    config = configured(tmp_path, *(f"cluster.slurm.trainer.{key}" for key in keys))
    script = SlurmCluster.job_script(config, "trainer", 16, "trainer-0", private(config), tmp_path / "log")
    asked = ("--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=12", "--gpus-per-node=h100:8")
    assert all(f"#SBATCH {option}\n" in script for option in (*asked, "--exclusive", "--mem=0"))
    start = "exec srun --kill-on-bad-exit=1 --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=12 --mpi=none "
    assert f"\n{start}{sys.executable} -m rftdask.cluster.join " in script


def test_engines_that_take_turns_start_in_the_job_of_the_ranks(tmp_path: Path) -> None:
    keys = ("cluster.slurm.trainer={gres: 'gpu:h100:8', cpus: 12}", "mode=colocate", "trainer.num_ranks=16")
    engines = "explorer.rollout_model={engine_type: vllm, tensor_parallel_size: 2, engine_num: 8}"
    config = configured(tmp_path, *keys, engines)
    assert SlurmCluster.shape(config, "trainer", 16) == JobShape(1, 2, 8)
    script = SlurmCluster.job_script(config, "trainer", 16, "trainer-0", private(config), tmp_path)
    assert " -m rftdask.cluster.join --engine-every 2 " in script
    assert "--engine-every" not in SlurmCluster.job_script(
        configured(tmp_path, keys[0], keys[2], engines), "trainer", 16, "trainer-0", private(config), tmp_path
    )


def test_auxiliary_models_have_jobs_of_their_own_for_the_largest_of_them(tmp_path: Path) -> None:
    models = (
        "explorer.auxiliary_models=[{name: a, engine_type: vllm, model_path: m, engine_num: 2, "
        "tensor_parallel_size: 4}, {name: b, engine_type: vllm, model_path: m, engine_num: 2}]"
    )
    config = configured(tmp_path, "cluster.slurm.auxiliary={gres: 'gpu:h100:8', cpus: 16}", models)
    assert SlurmCluster.shape(config, "auxiliary", 4) == JobShape(2, 1, 2)
    script = SlurmCluster.job_script(config, "auxiliary", 4, "auxiliary-0", private(config), tmp_path)
    assert " --resources auxiliary=4 " in script and "#SBATCH --gres=gpu:h100:8\n" in script
    assert " --resources explorer=1 " in SlurmCluster.job_script(
        config, "explorer", 1, "explorer-0", private(config), tmp_path
    )
    few = configured(tmp_path, "cluster.slurm.auxiliary={gres: 'gpu:2'}", models)
    with pytest.raises(
        UserError, match=r"cluster.slurm.auxiliary: a node has 2 GPUs, .* works on 4; set gres to gpu:4"
    ):
        SlurmCluster.shape(few, "auxiliary", 4)


def test_an_engine_over_two_nodes_is_a_worker_and_one_that_follows(tmp_path: Path) -> None:
    keys = ("cluster.slurm.explorer={gres: 'gpu:h100:8', nodes: 2, cpus: 32}", "cluster.interface=ib0")
    engine = (
        "explorer.rollout_model={engine_type: vllm, tensor_parallel_size: 8, pipeline_parallel_size: 2, engine_num: 3}"
    )
    config = configured(tmp_path, *keys, engine)
    assert SlurmCluster.workers_per_job(config, "explorer", 3) == 1
    script = SlurmCluster.job_script(config, "explorer", 3, "explorer-0", private(config), tmp_path)
    asked = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gres=gpu:h100:8")
    assert all(f"#SBATCH {option}\n" in script for option in asked), script
    assert "exec srun --kill-on-bad-exit=1 --nodes=2 --ntasks=2 " in script
    assert " -m rftdask.cluster.join --span 2 " in script and " --interface ib0 " in script
    wide = "explorer.rollout_model={engine_type: vllm, tensor_parallel_size: 8, data_parallel_size: 2}"
    beside = "explorer.auxiliary_models=[{engine_type: vllm, model_path: m, tensor_parallel_size: 16, %s}]"
    beside %= "gpu_memory_utilization: 0.05"
    for changes, told in (
        ((engine, beside), "auxiliary_models.0. works on 16 GPUs, .* only engines of the policy, of engine_type vllm"),
        ((wide,), "data_parallel_size is for one node"),
        ((engine, "checkpoint_root_dir=s3://bucket/runs"), "must be a folder that they see"),
        ((engine, "synchronizer.sync_method=memory"), "sync_method memory lie on the first of its nodes alone"),
        ((engine, "synchronizer.sync_method=nccl"), "sync_method nccl lie on the first of its nodes alone"),
        ((engine, "synchronizer.full_publish_interval=20"), "set synchronizer.full_publish_interval to 1"),
    ):
        with pytest.raises(UserError, match=told):
            SlurmCluster.shape(configured(tmp_path, *keys, *changes), "explorer", 3)
    layout, storage = plan_jobs([config], {"trainer": 1, "explorer": 1}), open_storage(config.checkpoint_job_dir)
    with pytest.raises(UserError, match="an engine would have 2 nodes, which is for rftdask submit without --single"):
        allocation_script(config, layout, private(config), storage)


@pytest.mark.parametrize("system", ["pbs", "lsf", "sge", "oar", "htcondor"])
def test_other_batch_systems_get_the_same_worker(tmp_path: Path, system: str) -> None:
    options = "{cores: 4, memory: 8GB, queue: long, trainer: {queue: gpu}}"
    if system == "htcondor":
        options = "{cores: 4, memory: 8GB, disk: 1GB}"
    if system == "oar":
        options = "{cores: 4, memory: 8GB, memory_per_core_property_name: not_applicable}"
    config = configured(tmp_path, f"cluster.type={system}", f"cluster.options={options}")
    batch_system: Any = find_cluster(system)
    options = batch_system.job_options(config, "trainer", "trainer-0", private(config), tmp_path / "log")
    made = batch_system.load_job_class()(**options)
    assert "--resources trainer=1" in made.job_script()
    assert "--scheduler-file" in made.job_script()
    if system in ("pbs", "sge"):
        assert "-q gpu" in made.job_script()


PBS_TABLE = """
pbs01: 
                                                            Req'd  Req'd   Elap
Job ID          Username Queue    Jobname    SessID NDS TSK Memory Time  S Time
--------------- -------- -------- ---------- ------ --- --- ------ ----- - -----
4711.pbs01      me       gpu      rftdask-t*  20341   1   8   64gb 24:00 R 01:12
4712.pbs01      me       gpu      rftdask-e*    --    1   8   64gb 24:00 Q   -- 
4713[].pbs01    me       gpu      sweep         --    1   1    4gb 01:00 B   -- 
4709.pbs01      me       gpu      old         19001   1   1    4gb 01:00 F 00:30
"""
SGE_TABLE = """\
job-ID  prior   name       user         state submit/start at     queue                          slots ja-task-ID 
-----------------------------------------------------------------------------------------------------------------
      2 0.75000 rftdask-co root         r     11/24/2026 19:35:13 all.q@vm                           1        
      3 0.58803 rftdask-tr root         r     11/24/2026 19:35:59 all.q@vm                           1        
      9 0.25000 t.sh       root         t     11/24/2026 19:37:35 all.q@vm                           1        
      7 0.25000 badwd      root         Eqw   11/24/2026 19:37:33                                    1        
      8 0.00000 held       root         hqw   11/24/2026 19:37:34                                    1        
"""
"""Recorded from Grid Engine 8.1.9, but for the `t`, which lasts too short a time."""
OAR_TABLE = """\
Job id    S User     Duration   System message
--------- - -------- ---------- ------------------------------------------------
5001      R me        0:12:44 R=8,W=4:0:0,J=B,N=rftdask-trainer-try (Karma=0.001)
5002      W me        0:00:00 R=8,W=4:0:0,J=B,N=rftdask-explorer-try (Karma=0.001)
5003      E me        0:00:01 R=8,W=4:0:0,J=B
"""
OLD_OAR_TABLE = """\
Job id     Name           User           Submission Date     S Queue
---------- -------------- -------------- ------------------- - ----------
5001       rftdask        me             2026-11-24 00:20:01 R default
5002       rftdask        me             2026-11-24 00:20:03 W default
"""


@pytest.mark.parametrize(
    ("query", "told", "states"),
    [
        (queries.PBS, PBS_TABLE, {"4711": "RUNNING", "4712": "PENDING (Q)", "4713": "RUNNING"}),
        (queries.LSF, "7001 RUN\n7002 PEND\n7003 DONE\n7004 EXIT\n", {"7001": "RUNNING", "7002": "PENDING (PEND)"}),
        (
            queries.SGE,
            SGE_TABLE,
            {"2": "RUNNING", "3": "RUNNING", "9": "RUNNING", "7": "PENDING (Eqw)", "8": "PENDING (hqw)"},
        ),
        (queries.OAR, OAR_TABLE, {"5001": "RUNNING", "5002": "PENDING (W)"}),
        (queries.OAR, OLD_OAR_TABLE, {"5001": "RUNNING", "5002": "PENDING (W)"}),
        (queries.HTCONDOR, "12.0 2\n13.0 1\n14.0 5\n15.0 4\n", {"12.0": "RUNNING", "13.0": "PENDING (1)"}),
    ],
)
def test_what_other_batch_systems_say_of_jobs_is_read(query: Query, told: str, states: dict[str, str]) -> None:
    found = query.read(told)
    assert {job_id: state for job_id, state in found.items() if state != "PENDING (5)"} == states
    stuck = {job_id for job_id, state in found.items() if query.never_runs(state)}
    assert stuck == ({"7"} if query is queries.SGE else {"14.0"} if query is queries.HTCONDOR else set())


def test_a_batch_system_without_its_command_is_not_asked_and_one_without_jobs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queries.LSF.states(["1"]) is None and queries.LSF.states([]) == {}
    bjobs = tmp_path / "bjobs"
    bjobs.write_text("#!/bin/sh\necho 'No unfinished job found' >&2; exit 255\n")
    bjobs.chmod(0o755)
    assert queries.LSF.states(["1"]) == {}
    bjobs.write_text("#!/bin/sh\necho 'LSF is down. Please wait ...' >&2; exit 255\n")
    with pytest.raises(RoleError, match="LSF is down"):
        queries.LSF.states(["1"])


ELSEWHERE = {
    "pbs": (
        "resource_spec: 'select=1:ncpus=4:ngpus=1:mem=8gb', controller: {resource_spec: 'select=1:ncpus=1:mem=2gb'}",
        ("#PBS -N rftdask-controller-try", "#PBS -l select=1:ncpus=1:mem=2gb", "#PBS -l walltime=04:00:00"),
        ("#PBS -l select=1:ncpus=4:ngpus=1:mem=8gb", " --name trainer-<number>-${PBS_JOBID%%.*}-0 "),
    ),
    "lsf": (
        "walltime: '04:00', lsf_units: mb, job_extra_directives: [-gpu num=1], controller: {job_extra_directives: []}",
        ("#BSUB -J rftdask-controller-try", "#BSUB -W 04:00", "#BSUB -M 8000"),
        ("#BSUB -gpu num=1", '#BSUB -R "span[hosts=1]"', " --name trainer-<number>-${LSB_JOBID}-0 "),
    ),
    "sge": (
        "resource_spec: gpu=1, job_extra_directives: ['-S /bin/bash'], controller: {resource_spec: mem_free=2G}",
        ("#$ -N rftdask-controller-try", "#$ -l mem_free=2G", "#$ -l h_rt=04:00:00", "#$ -S /bin/bash"),
        ("#$ -l gpu=1", " --name trainer-<number>-${JOB_ID}-0 "),
    ),
    "oar": (
        "memory_per_core_property_name: not_applicable, controller: {cores: 1}",
        ("#OAR -n rftdask-controller-try", "#OAR -l /nodes=1/core=1,walltime=04:00:00"),
        ("#OAR -l /nodes=1/core=4,walltime=04:00:00", " --name trainer-<number>-${OAR_JOB_ID}-0 "),
    ),
    "htcondor": (
        "disk: 1GB, job_extra_directives: {request_gpus: 1}, controller: {job_extra_directives: {request_gpus: 0}}",
        ("universe = local", "request_gpus = 0", "Executable = /bin/sh"),
        ("request_gpus = 1", " --name trainer-<number>-$(ClusterId).$(ProcId)-0 "),
    ),
}
"""By system: options beside the common ones, and what the scripts of controller and trainer say."""


@pytest.mark.parametrize("system", ELSEWHERE)
def test_on_every_batch_system_a_job_drives_the_run_and_asks_for_the_others(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, *said = ELSEWHERE[system]
    walltime = "" if system in ("lsf", "htcondor") else "walltime: '04:00:00', "
    common = ("cluster.python=python3", "cluster.local_cache_dir=$TMPDIR/staged", f"cluster.type={system}")
    config = configured(tmp_path, *common, f"cluster.options={{cores: 4, memory: 8GB, {walltime}{options}}}")
    monkeypatch.setenv("PATH", str(tmp_path))
    submission = plan_submission(config)
    [controller] = submission.scripts
    for script, lines in zip((controller, submission.worker_scripts[0]), said, strict=True):
        assert all(line in script.text for line in lines), script.text
    driver = f"{tmp_path}/runs/rftdask/try/control/private/driver.sh"
    assert f"exec bash {driver}" in controller.text and "rftdask.cluster.join" not in controller.text
    staged = 'export RFTDASK_STAGE_TO="$TMPDIR/staged" RFTDASK_STAGE_KEEP=0'
    staged = staged.replace('"', '""') if system == "htcondor" else staged
    assert staged in submission.worker_scripts[0].text and "STAGE" not in controller.text
    warned = "( sleep 14220; kill -USR1 $$ ) &\n" in submission.driver
    assert warned == (system != "htcondor"), "near a walltime of four hours"
    assert "python3 -m rftdask.cli.submit " in submission.driver and "SLURM_" not in submission.driver
    assert subprocess.run(["/bin/bash", "-n"], input=submission.driver, text=True, check=False).returncode == 0
    assert submission.render().count(driver) == 2
    with pytest.raises(UserError, match=r"are for cluster\.type slurm"):
        plan_submission(config, single_allocation=True)


def test_the_controller_is_requeued_and_warned(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.slurm.controller.partition=long")
    text = controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    for line in ("--requeue", "--open-mode=append", "--signal=B:USR1@180", "--partition=long"):
        assert f"#SBATCH {line}\n" in text


WRAPPED = """{% extends "job.sh" %}
{% block command %}
{{ srun }} {{ "apptainer exec --nv /images/rft.sif " if role != "controller" }}{{ command }}
{% endblock %}
{% block prologue %}
ulimit -n 65536
{{ super() }}
{%- endblock %}
"""


def test_a_template_of_the_site_wraps_the_commands_of_every_script(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        "trainer.num_ranks=2",
        "cluster.slurm.trainer.prologue=[module load apptainer]",
        "cluster.python=python3",
    )
    config = replace(config, {"cluster.slurm.template": WRAPPED})
    worker = SlurmCluster.job_script(config, "trainer", 2, "trainer-0", private(config), tmp_path / "log")
    assert "\nulimit -n 65536\nmodule load apptainer\nexec srun " in worker
    assert " apptainer exec --nv /images/rft.sif python3 -m rftdask.cluster.join " in worker
    storage = open_storage(config.checkpoint_job_dir)
    assert "\npython3 -m rftdask run " in controller_text(config, private(config), storage)
    layout = plan_jobs([config], {"trainer": 2, "explorer": 1})
    parts = (
        allocation_script(config, layout, private(config), storage),
        *offline_scripts(config, private(config), storage, 1, 1),
    )
    for script, wrapped in zip(parts, (2, 2, 1), strict=True):  # both roles; who helps, twice; who trains
        assert script.text.count("apptainer exec --nv /images/rft.sif python3 -m rftdask ") == wrapped, script.name
        assert "\nulimit -n 65536\n" in script.text and "{" not in script.text.split("may_return")[0]


def test_the_template_is_printed_with_that_of_the_site(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(replace(configured(tmp_path), {"cluster.slurm.template": WRAPPED}).to_yaml())
    told = call_cli("submit", str(file), "--print-templates")
    assert told.code == 0 and "{% block command %}{{ srun }} {{ command }}{% endblock %}" in told.out, told
    assert told.out.rstrip().endswith(WRAPPED.rstrip())


def test_a_template_that_fails_is_told_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.slurm.template: .*line 1: unexpected '}'"):
        replace(configured(tmp_path), {"cluster.slurm.template": "{{ command }\n"})
    config = replace(configured(tmp_path), {"cluster.slurm.template": "{{ image }} {{ command }}"})
    with pytest.raises(UserError, match=r"cluster.slurm.template: UndefinedError: 'image' is undefined"):
        controller_text(config, private(config), open_storage(config.checkpoint_job_dir))


def test_who_is_written_to_is_told_the_end_of_what_drives_the_run(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.slurm.mail=me@example.org")
    storage = open_storage(config.checkpoint_job_dir)
    asked = "#SBATCH --mail-user=me@example.org\n#SBATCH --mail-type=END,FAIL\n"
    assert asked in controller_text(config, private(config), storage)
    assert all(asked in script.text for script in offline_scripts(config, private(config), storage, 2, 1))
    assert "mail" not in SlurmCluster.job_script(config, "trainer", 1, "trainer-0", private(config), tmp_path)
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.dependency"):
        configured(tmp_path, "cluster.slurm.dependency=later")
    assert configured(tmp_path, "cluster.slurm.dependency='afterok:12:13,afterany:7_1'").cluster.slurm.dependency


def test_scripts_are_shown_where_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(configured(tmp_path).to_yaml())
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = call_cli("submit", str(file), "--dry-run")
    assert shown.code == 0 and shown.out.count("#!/usr/bin/env bash") == 3, shown
    assert shown.out.startswith("# not checked against what SLURM has: sinfo is not a command here")
    refused = call_cli("submit", str(file))
    assert refused.code == 2 and "rftdask run with cluster.type=local works on one machine" in refused.err
    folder = Path(load_config(file).checkpoint_job_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").touch()
    shown = call_cli("submit", str(file), "--dry-run", "continue_from_checkpoint=false")
    assert f"continue_from_checkpoint: false: a new run, {folder}_20" in shown.err


def test_scripts_are_shown_with_what_slurm_says_and_refused_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, sbatch = tmp_path / "run.yaml", tmp_path / "sbatch"
    file.write_text(configured(tmp_path, "cluster.slurm.explorer.account=nobody").to_yaml())
    sbatch.write_text(
        "#!/bin/sh\nif grep -q account=nobody; then echo 'allocation failure: Invalid account or account/partition "
        "combination specified' >&2; exit 1; fi\necho 'sbatch: Job 5 to start at 2026-11-24T08:00:00 on n1' >&2\n"
    )
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'main*|4|8|gpu:1|16384|1-00:00:00'\n")
    for command in (sbatch, tmp_path / "sinfo"):
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shown = call_cli("submit", str(file), "--dry-run")
    assert shown.out.count("# SLURM: Job 5 to start at 2026-11-24T08:00:00 on n1\n") == 2, shown
    submission = plan_submission(load_config(file))
    with pytest.raises(UserError, match=r"refuses the job of explorer \(cluster.slurm.explorer\): .*Invalid account"):
        submission.check()


def test_of_two_submits_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {
        "sbatch": "cat >/dev/null; echo 7",
        "squeue": "echo 7 7 PENDING 0:00 Priority",
        "sinfo": "echo 'm|4|8|gpu:1|9|1'",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = (plan_submission(configured(tmp_path)) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        submits = [threads.submit(each.submit) for each in (first, second)]
    errors = [error for each in submits if (error := each.exception()) is not None]
    assert len(errors) == 1 and isinstance(errors[0], FencedError), errors
    assert "is submitted already: controller is job 7, PENDING (Priority)" in str(errors[0])
    # One that never ends keeps nobody waiting for ever.
    monkeypatch.setattr(submitting, "PATIENCE_S", 0.3)
    third = plan_submission(configured(tmp_path / "other"))
    third.folder.make()
    with (third.folder.path / "submit.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FencedError, match=r"another rftdask submit of this run has held .*submit\.lock for 0\.3 s"):
            third.submit()


def test_a_step_of_an_allocation_asks_for_exactly_what_a_job_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("RFTDASK_ALLOCATION", "")
    assert allocation() == "4711"
    forget_job()
    assert allocation() == "4711", "it is known after SLURM's own variables are forgotten"
    config = configured(
        tmp_path, "cluster.slurm.trainer.prologue=[module load cuda]", "cluster.slurm.trainer.gres=gpu:2"
    )
    script = SlurmStepsCluster.job_script(config, "trainer", 4, "trainer-3", private(config), tmp_path)
    assert "\nmodule load cuda\nexec srun --jobid=4711 --exact --mem=0 --kill-on-bad-exit=1 --gres=gpu:2 " in script
    assert " --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 " in script
    assert ' --name "trainer-3-4711.$$-0" ' in script and "#SBATCH" not in script
    monkeypatch.setenv("RFTDASK_SUBMITTED", "/sources")
    assert allocation() is None, "a job of rftdask submit asks for others"


def test_what_an_allocation_has_is_read_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for told, gpus in (("TresPerNode=gres:gpu:2", 2), ("AllocTRES=cpu=24,mem=9G,node=3,gres/gpu=12", 4), ("", 0)):
        scontrol.write_text(f"#!/bin/sh\necho 'JobId=7 NumNodes=3 NumCPUs=24 NumTasks=3 {told}'\n")
        scontrol.chmod(0o755)
        assert read_allocation("7") == Capacity("of allocation 7", 3, 8, gpus)


def test_a_finished_run_asks_for_no_jobs(tmp_path: Path) -> None:
    config = configured(tmp_path, "trainer.total_steps=9")
    storage = open_storage(config.checkpoint_job_dir)
    note_end(storage, "finished", "")
    assert not has_finished(config, [{}])
    storage.put("latest_checkpointed_iteration.txt", b"9")
    assert has_finished(config, [{}])
    assert not has_finished(replace(config, {"trainer.total_steps": 10}), [{}])
    note_end(storage, "stopped", "")
    assert not has_finished(config, [{}])


def test_one_allocation_has_a_part_for_each_role(tmp_path: Path) -> None:
    config = configured(tmp_path, "explorer.rollout_model.engine_num=3", "cluster.slurm.explorer.gres=gpu:1")
    layout = plan_jobs([config], {"trainer": 2, "explorer": 1})
    text = allocation_script(config, layout, private(config), open_storage(config.checkpoint_job_dir)).text
    assert text.count("#SBATCH hetjob") == 2 and text.count("#SBATCH --gres=gpu:1\n") == 2
    steps = [line.split(" --output=")[0] for line in text.splitlines() if line.startswith("exec srun ")]
    assert steps == [f"exec srun --het-group={part} --kill-on-bad-exit=0" for part in (1, 2)]
    assert " --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=1 " in text


def test_one_allocation_of_nodes_that_are_alike_gives_each_role_nodes_of_its_own(tmp_path: Path) -> None:
    explorer = "cluster.slurm.explorer={gres: 'gpu:h100:4', cpus: 4, memory: 32GiB, exclusive: true}"
    trainer = "cluster.slurm.trainer={gres: 'gpu:h100:4', cpus: 6, memory: 16GiB}"
    keys = ("cluster.slurm.heterogeneous=false", "explorer.rollout_model.engine_num=8", trainer, explorer)
    config = configured(tmp_path, *keys, "cluster.slurm.controller.partition=main")
    storage = open_storage(config.checkpoint_job_dir)
    text = allocation_script(config, plan_jobs([config], {"trainer": 6, "explorer": 4}), private(config), storage).text
    assert "hetjob" not in text and "--het-group" not in text
    asked = ("--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=24", "--mem=0", "--gres=gpu:h100:4")
    assert all(f"#SBATCH {option}\n" in text for option in (*asked, "--exclusive", "--partition=main")), text
    steps = [line for line in text.splitlines() if line.startswith("exec srun ")]
    for line, at, options in zip(steps, (0, 1), ("nodes=1 --ntasks=4", "nodes=2 --ntasks=8"), strict=True):
        cores = "6" if at == 0 else "4"
        assert f"--relative={at} " in line and f"--{options} --ntasks-per-node=4 --cpus-per-task={cores} " in line
    other = configured(tmp_path, *keys, "cluster.slurm.explorer.gres=gpu:h100:8", "explorer.rollout_model.engine_num=8")
    with pytest.raises(UserError, match=r"nodes that are all alike .* and GPUs differ: .*gpu:h100:4.*gpu:h100:8"):
        allocation_script(other, plan_jobs([other], {"trainer": 6, "explorer": 4}), private(other), storage)


def test_an_offline_chain_divides_the_steps_into_rounds(tmp_path: Path) -> None:
    config = configured(tmp_path)
    scripts = offline_scripts(config, private(config), open_storage(config.checkpoint_job_dir), 2, 3)
    told = [(script.name, script.after, script.after_task) for script in scripts]
    assert told == [
        ("explore-1", None, ""),
        ("train-1", "explore-1", "_0"),
        ("explore-2", "train-1", ""),
        ("train-2", "explore-2", "_0"),
    ]
    assert "buffer.total_steps=4 " in scripts[1].text and "buffer.total_steps=9 " in scripts[3].text
    assert "#SBATCH --array=0-2\n" in scripts[0].text
    whole = configured(tmp_path, "cluster.slurm.explorer.gres=gpu:4")
    explore = offline_scripts(whole, private(whole), open_storage(whole.checkpoint_job_dir), 1, 3)[0].text
    assert "explorer.rollout_model.engine_num=12 " in explore and explore.count("srun --nodes=1 --ntasks=4 ") == 2
    with pytest.raises(UserError, match="into 10 rounds, and there are 9"):
        offline_scripts(config, private(config), open_storage(config.checkpoint_job_dir), 10, 1)


SITES = {
    "whole-nodes": (
        ("--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--gres=gpu:h100:8", "--exclusive", "--mem=0"),
        ("--nodes=1", "--ntasks=8", "--gres=gpu:h100:8"),
        "exec srun --kill-on-bad-exit=1 --nodes=2 --ntasks=16 ",
    ),
    "submit-limits": (
        ("--nodes=1", "--ntasks=4", "--gpus-per-node=a100:4"),
        ("--nodes=1", "--ntasks=4", "--gpus-per-node=a100:4"),
        "exec srun ",
    ),
    "no-hetjobs": (("--ntasks-per-node=4", "--exclusive"), ("--ntasks-per-node=1", "--cpus-per-task=64"), "exec srun "),
    "no-requeue": (("--requeue", "--no-requeue"), ("--nodes=1", "--ntasks=1", "--no-requeue"), "exec srun "),
    "containers": (
        ("--ntasks=4", "--gres=gpu:4"),
        ("--ntasks=1", "--gres=gpu:1"),
        "--mpi=none apptainer exec --nv --bind /scratch /images/rftdask.sif python3 -m rftdask.cluster.join ",
    ),
}
"""What the jobs of trainer and explorer ask for, and what the trainer's runs; each is a file of config/slurm."""


@pytest.mark.parametrize("site", SITES)
def test_the_file_of_each_kind_of_site_gives_whole_scripts(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFTDASK_RUNS", str(tmp_path))
    folder = Path(__file__).parents[3] / "config" / "slurm"
    assert {file.stem for file in folder.glob("*.yaml")} == set(SITES)
    config = load_config(folder / f"{site}.yaml")
    layout, storage = plan_jobs([config], {"trainer": 1, "explorer": 1}), open_storage(config.checkpoint_job_dir)
    *asked, start = SITES[site]
    for role, options in zip(("trainer", "explorer"), asked, strict=True):
        count = layout.num_workers(role)
        script = SlurmCluster.job_script(config, role, count, f"{role}-0", private(config), tmp_path)
        assert all(f"#SBATCH {option}\n" in script for option in options), script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        assert role == "explorer" or start in script
    controller = controller_text(config, private(config), storage)
    assert f"\n{shlex.quote(sys.executable)} -m rftdask run " in controller
    if site == "no-hetjobs":
        one = allocation_script(config, layout, private(config), storage).text
        assert "#SBATCH --nodes=3\n" in one and "#SBATCH hetjob" not in one and "#SBATCH --cpus-per-task=64\n" in one


DRIVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "to_driver", "cancelled", "code", "restarts", "stay"),
    [
        (signal.SIGUSR1, False, False, 130, 0, True),  # the walltime is near
        (signal.SIGINT, False, False, 130, 0, False),  # rftdask cancel
        (signal.SIGTERM, False, False, 143, 0, False),  # scancel by hand
        (signal.SIGTERM, False, False, 143, 1, True),  # a requeue, of which SLURM knows itself
        (signal.SIGTERM, False, True, 143, 1, False),  # and then it was cancelled
        (signal.SIGTERM, True, False, 143, 0, False),  # somebody asked the driver alone
        (signal.SIGUSR1, False, True, 130, 0, False),  # both at once
    ],
)
def test_a_controller_ends_with_its_driver_and_comes_back_when_it_should(
    tmp_path: Path, sent: signal.Signals, to_driver: bool, cancelled: bool, code: int, restarts: int, stay: bool
) -> None:
    requeued = sent is signal.SIGUSR1 and not cancelled
    path = of_slurm(tmp_path, f"JobId=7 Requeue={int(requeued)} Restarts={restarts} BatchFlag=1")
    (tmp_path / "driver.py").write_text(DRIVER)
    run = shlex.join([sys.executable, "-S", str(tmp_path / "driver.py"), str(tmp_path / "ready")])
    script = "\n".join(driver_shell(PrivateFolder(tmp_path), run))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {"PATH": path, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", script], env=env, start_new_session=True, **pipes) as controller:
        wait_for((tmp_path / "ready").exists)
        if cancelled:
            (tmp_path / CANCELLED_FILE).touch()
        target = psutil.Process(controller.pid).children()[0].pid if to_driver else controller.pid
        os.kill(target, sent)
        assert controller.wait(60) == code
        assert controller.stderr is not None and (NO_REQUEUE in controller.stderr.read()) == (not requeued)
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "scancelled").exists() == (cancelled and code == 130)
    # Its driver is told that it comes back, so that the jobs of its workers stay.
    assert (tmp_path / RETURNS_FILE).exists() == stay
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def of_slurm(folder: Path, told: str) -> str:
    """A PATH with commands in the place of SLURM's, which write down what they are asked for."""
    requeue = f'[ "$1" = requeue ] && echo "$@" >{folder}/requeued; echo "{told}"'
    for name, body in {"scontrol": requeue, "scancel": f"touch {folder}/scancelled", "sleep": ":"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("driver", "code", "starts"),
    [
        ("[ $(wc -l <starts) -eq 3 ] || kill -9 $BASHPID", 0, 3),  # out of memory twice, say
        ("kill -9 $BASHPID", 137, 101),  # each time: not for ever
        ("touch cancelled; kill -9 $BASHPID", 137, 1),
        ("trap : INT; kill -INT $PPID; sleep 0.3; kill -9 $BASHPID", 137, 1),  # it was to end anyhow
        ("exit 2", 2, 1),
    ],
)
def test_a_driver_that_is_killed_is_started_again_in_its_job(
    tmp_path: Path, driver: str, code: int, starts: int
) -> None:
    path = of_slurm(tmp_path, "JobId=7 Requeue=1 Restarts=0 BatchFlag=1")
    (tmp_path / "sleep").unlink()
    run = f"bash -c {shlex.quote(f'echo >>starts; echo ${{{RETURNED}:-0}} >>returned; {driver}')}"
    script = "\n".join(driver_shell(PrivateFolder(tmp_path), run))
    env = {"PATH": path, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, len((tmp_path / "starts").read_text())) == (code, starts), done
    assert done.stdout.count("started again after it was killed (exit code 137)\n") == starts - 1
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / "returned").read_text().split() == ["0"] + ["1"] * (starts - 1)


def test_a_driver_of_a_job_that_was_queued_again_knows_that_it_is_not_the_first(tmp_path: Path) -> None:
    script = "\n".join(driver_shell(PrivateFolder(tmp_path), f"echo returned ${{{RETURNED}:-0}}"))
    for restarts, told in (("", 0), ("0", 0), ("2", 1)):
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
        assert f"returned {told}\n" in done.stdout


def test_who_warns_of_the_walltime_warns_the_driver_and_ends_with_its_script(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    run = shlex.join([sys.executable, "-S", str(tmp_path / "driver.py"), str(tmp_path / "ready")])
    for after_s, command, code in ((1, run, 130), (700, "sleep 0.1", 0)):
        system = HostSystem(restarts="0", again=f"touch {tmp_path}/again", cancel="", first=warning(after_s))
        script = "\n".join(driver_shell(PrivateFolder(tmp_path), command, system=system)).replace("sleep 60", ":")
        with subprocess.Popen(["bash", "-c", script], start_new_session=True) as controller:
            assert controller.wait(60) == code
            left = [each for each in psutil.process_iter() if _session(each.pid) == controller.pid]
            wait_for(lambda left=left: not any(map(lives, left)))
        assert (tmp_path / "again").exists()  # after the first, whose walltime came


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


def test_a_driver_does_not_outlive_the_script_of_its_job(tmp_path: Path) -> None:
    ready, told = tmp_path / "ready", tmp_path / "told"
    watching = f"""
import os, pathlib, signal, time
from rftdask.cli.run import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(told)!r}).touch())
parent = os.getppid()
pathlib.Path({str(ready)!r}).touch()
end_with_parent(parent)
"""
    script = f"{shlex.join([sys.executable, '-c', watching])} & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        wait_for(ready.exists)
        shell.kill()
    wait_for(told.exists)
    config = configured(tmp_path)
    text = controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    assert " --exit-with-parent &\n" in text


def test_a_controller_that_was_cancelled_before_it_started_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / CANCELLED_FILE).touch()
    script = "\n".join(driver_shell(PrivateFolder(tmp_path), f"touch {tmp_path}/ran"))
    assert subprocess.run(["bash", "-c", script], capture_output=True, check=False).returncode == 0
    assert not (tmp_path / "ran").exists()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- the private folder


def test_only_the_owner_may_read_keys_and_address(tmp_path: Path) -> None:
    folder = private(configured(tmp_path))
    with pytest.raises(UserError, match="no TLS keys"):
        folder.security()
    made = folder.make_keys()
    assert isinstance(made, Security) and made.require_encryption
    folder.write_address("tls://127.0.0.1:1")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.path.iterdir()} == {0o600}
    before = (folder.path / "key.pem").read_bytes()
    assert folder.make_keys() and (folder.path / "key.pem").read_bytes() == before  # those who join later have them


def test_an_address_is_removed_only_by_its_owner(tmp_path: Path) -> None:
    folder = private(configured(tmp_path))
    folder.write_address("tls://127.0.0.1:2")
    folder.remove_address("tls://127.0.0.1:1")
    assert folder.read_address() == "tls://127.0.0.1:2"
    folder.remove_address("tls://127.0.0.1:2")
    assert folder.read_address() is None


def test_exploring_and_training_as_two_commands_have_a_scheduler_each(tmp_path: Path) -> None:
    config = configured(tmp_path)
    storage = open_storage(config.checkpoint_job_dir)
    apart = [private(configured(tmp_path, f"mode={mode}")) for mode in ("explore", "train")]
    assert [folder.path for folder in apart] == [private(config).path / "explore", private(config).path / "train"]
    assert PrivateFolder.base_of(config, storage).path == private(config).path
    apart[0].make()
    assert stat.S_IMODE(private(config).path.stat().st_mode) == 0o700


def test_loading_a_batch_system_leaves_ctrl_c_to_the_driver_and_works_in_a_thread() -> None:
    code = """
import signal, threading
from rftdask.cluster.jobqueue import PbsCluster

before = signal.getsignal(signal.SIGINT)
loaded = []
thread = threading.Thread(target=lambda: loaded.append(PbsCluster.load_job_class()))
thread.start()
thread.join()
assert loaded and signal.getsignal(signal.SIGINT) is before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
