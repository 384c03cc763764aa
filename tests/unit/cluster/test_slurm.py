"""Promises of SLURM clusters: jobs of workers, and steps of an allocation."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from rftdask.cluster.batch_cluster import forget_job
from rftdask.cluster.job_shapes import Capacity, JobShape
from rftdask.cluster.layout import plan_jobs
from rftdask.cluster.slurm import SlurmCluster, SlurmStepsCluster, allocation, allocation_script, read_allocation
from rftdask.errors import UserError
from rftdask.storage import open_storage
from tests.unit.cluster.batch_cases import configured, private


def test_a_trainer_takes_the_remaining_gpus_of_node_num(tmp_path: Path) -> None:
    config = configured(tmp_path, "explorer.rollout_model.engine_num=3")
    layout = plan_jobs([config], {"trainer": 2, "explorer": 1}, num_gpus=8)
    names = [(worker.name, worker.threads) for worker in layout.workers]
    assert names == [*((f"trainer-{i}", 2) for i in range(5)), *((f"explorer-{i}", 1) for i in range(3))]
    assert len(plan_jobs([config], {"trainer": 2, "explorer": 1}).workers) == 1 + 3
    whole = configured(tmp_path, "cluster.slurm.trainer.gres=gpu:h100:4", "explorer.rollout_model.engine_num=3")
    assert plan_jobs([whole], {"trainer": 2, "explorer": 1}).num_workers("trainer") == 4
    assert plan_jobs([whole], {"trainer": 2, "explorer": 1}, num_gpus=16).num_workers("trainer") == 12  # whole nodes


def test_a_worker_job_names_its_role_keys_and_number(tmp_path: Path) -> None:
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
        f"\nexec {shlex.quote(sys.executable)} -m rftdask.cluster.join ",  # receives signals of SLURM
    ):
        assert text in script
    assert "#SBATCH --time" not in script  # the partition's default
    assert "srun" not in script


def test_a_job_of_several_ranks_starts_a_worker_for_each(tmp_path: Path) -> None:
    keys = ("gres=null", "gpus_per_node=h100:8", "exclusive=true", "cpus=12")
    config = configured(tmp_path, *(f"cluster.slurm.trainer.{key}" for key in keys))
    script = SlurmCluster.job_script(config, "trainer", 16, "trainer-0", private(config), tmp_path / "log")
    asked = ("--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=12", "--gpus-per-node=h100:8")
    assert all(f"#SBATCH {option}\n" in script for option in (*asked, "--exclusive", "--mem=0"))
    start = "exec srun --kill-on-bad-exit=1 --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=12 --mpi=none "
    assert f"\n{start}{sys.executable} -m rftdask.cluster.join " in script


@pytest.mark.parametrize("exclusive", ["true", "false"])
def test_a_job_without_memory_names_none(tmp_path: Path, exclusive: str) -> None:
    keys = ("memory=null", f"exclusive={exclusive}", "gres=gpu:1")
    config = configured(tmp_path, *(f"cluster.slurm.trainer.{key}" for key in keys))
    script = SlurmCluster.job_script(config, "trainer", 1, "trainer-0", private(config), tmp_path / "log")
    assert "SBATCH --mem" not in script and "#SBATCH --cpus-per-task=" in script


def test_colocated_engines_start_in_the_job_of_the_ranks(tmp_path: Path) -> None:
    keys = ("cluster.slurm.trainer={gres: 'gpu:h100:8', cpus: 12}", "mode=colocate", "trainer.num_ranks=16")
    engines = "explorer.rollout_model={engine_type: vllm, tensor_parallel_size: 2, engine_num: 8}"
    config = configured(tmp_path, *keys, engines)
    assert SlurmCluster.shape(config, "trainer", 16) == JobShape(1, 2, 8)
    script = SlurmCluster.job_script(config, "trainer", 16, "trainer-0", private(config), tmp_path)
    assert " -m rftdask.cluster.join --engine-every 2 " in script
    assert "--engine-every" not in SlurmCluster.job_script(
        configured(tmp_path, keys[0], keys[2], engines), "trainer", 16, "trainer-0", private(config), tmp_path
    )


def test_auxiliary_models_have_jobs_for_the_largest(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"cluster.slurm.auxiliary: a node has 2 GPUs, .* uses 4; set gres to gpu:4"):
        SlurmCluster.shape(few, "auxiliary", 4)


def test_an_engine_over_two_nodes_is_a_worker_and_a_follower(tmp_path: Path) -> None:
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
    for changes, message in (
        ((engine, beside), "auxiliary_models.0. uses 16 GPUs, .* only engines of the policy with engine_type vllm"),
        ((wide,), "data_parallel_size is limited to one node"),
        ((engine, "checkpoint_root_dir=s3://bucket/runs"), "must be a shared folder"),
        ((engine, "synchronizer.sync_method=memory"), "sync_method memory are only on the first of its nodes"),
        ((engine, "synchronizer.sync_method=nccl"), "sync_method nccl are only on the first of its nodes"),
        ((engine, "synchronizer.full_publish_interval=20"), "set synchronizer.full_publish_interval to 1"),
    ):
        with pytest.raises(UserError, match=message):
            SlurmCluster.shape(configured(tmp_path, *keys, *changes), "explorer", 3)
    layout, storage = plan_jobs([config], {"trainer": 1, "explorer": 1}), open_storage(config.checkpoint_job_dir)
    with pytest.raises(UserError, match="an engine would use 2 nodes; use rftdask submit without --single"):
        allocation_script(config, layout, private(config), storage)


def test_a_step_requests_exactly_the_resources_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_size_of_an_allocation_is_read_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for resources, gpus in (("TresPerNode=gres:gpu:2", 2), ("AllocTRES=cpu=24,mem=9G,node=3,gres/gpu=12", 4), ("", 0)):
        scontrol.write_text(f"#!/bin/sh\necho 'JobId=7 NumNodes=3 NumCPUs=24 NumTasks=3 {resources}'\n")
        scontrol.chmod(0o755)
        assert read_allocation("7") == Capacity("of allocation 7", 3, 8, gpus)
