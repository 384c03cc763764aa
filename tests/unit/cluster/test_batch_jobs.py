"""Promises of the jobs of a run on a batch system.

- a role has as many jobs as were asked for: what ended is replaced, the newest are cancelled first;
- jobs that end again and again before their worker has joined are counted, and one that joined ends the count;
- layouts that a partition cannot hold are refused with the arithmetic;
- what a job asks for is what the config says, and a controller's script is the one shown;
- a controller ends with a checkpoint when it is told to, and is queued again near its walltime or if it was killed.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed.security import Security

from rftdask.cluster.base import find_cluster, plan_jobs
from rftdask.cluster.jobs import CANCELLED_FILE, JobRecord, jobs_file, note_workers, plan_change, read_jobs, write_jobs
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.cluster.slurm import Capacity, check_fit, count_gres, directives, limit, megabytes
from rftdask.cluster.slurm_cluster import SlurmCluster
from rftdask.cluster.slurm_script import driver_shell
from rftdask.commands.submit import allocation_script, controller_text, offline_scripts
from rftdask.config import Config, load_config
from rftdask.config.schema.cluster import JobConfig
from rftdask.errors import UserError
from rftdask.storage import open_storage


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


def test_jobs_that_end_before_their_worker_joined_are_counted_until_one_joins() -> None:
    assert plan_change([job(1)], frozenset(), 1, 2).num_failed_starts == 3
    assert plan_change([job(1, joined=True)], frozenset(), 1, 2).num_failed_starts == 0
    assert plan_change([job(1), job(2, joined=True)], frozenset({"2"}), 2, 2).num_failed_starts == 0
    assert plan_change([job(1)], frozenset({"1"}), 1, 2).num_failed_starts == 2


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
    [(None, 0), ("gpu", 1), ("gpu:2", 2), ("gpu:a100:4(S:0-1)", 4), ("gres/gpu:1", 1), ("(null)", 0), ("lustre:1", 0)],
)
def test_gpus_of_generic_resources(gres: str | None, count: int) -> None:
    assert count_gres(gres) == count


def test_jobs_that_a_partition_cannot_hold_are_refused_with_the_arithmetic() -> None:
    jobs = {"trainer": JobConfig(gres="gpu:2", cpus=4), "explorer": JobConfig(gres="gpu:1", cpus=4)}
    there = dict.fromkeys(jobs, Capacity("main", num_nodes=4, cpus=16, gpus=2))
    check_fit({"trainer": 3, "explorer": 2}, jobs, there)
    with pytest.raises(
        UserError, match=r"3 trainer x 2 \+ 3 explorer x 1 = 9 GPUs, and partition main has 4 nodes x 2 = 8"
    ):
        check_fit({"trainer": 3, "explorer": 3}, jobs, there)
    with pytest.raises(UserError, match=r"slurm.trainer: a job asks for 2 GPUs, and no node of .* has more than 1"):
        check_fit({"trainer": 1}, jobs, dict.fromkeys(jobs, limit(there["trainer"], 0, 1)))
    apart = {**there, "explorer": Capacity("spot", 4, 16, 2)}
    check_fit({"trainer": 4, "explorer": 8}, jobs, apart)


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


# ---- what scripts say


def test_every_key_of_a_role_becomes_a_directive() -> None:
    asked = JobConfig(
        partition="spot", account="me", gres="gpu:1", constraint="a100", walltime="1:00", directives=("--nice",)
    )
    assert directives(asked) == [
        "--partition=spot",
        "--account=me",
        "--gres=gpu:1",
        "--constraint=a100",
        "--time=1:00",
        "--nice",
    ]
    assert megabytes("4GiB") == 4096
    with pytest.raises(UserError, match="memory"):
        megabytes("much")


def test_a_worker_job_names_its_role_its_keys_and_itself(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.slurm.trainer.prologue=[module load cuda]", "cluster.interface=ib0")
    options = SlurmCluster.job_options(config, "trainer", "trainer-0", private(config), tmp_path / "log")
    script = SlurmCluster.load_job_class()(**options).job_script()
    for text in (
        "#SBATCH --gres=gpu:1\n",
        "#SBATCH --cpus-per-task=2\n",
        "#SBATCH --requeue\n",
        "#SBATCH --open-mode=append\n",
        "\nmodule load cuda\n",
        "--resources trainer=1 ",
        "--name trainer-0-${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0} ",
        f"--tls-key {tmp_path}/runs/rftdask/try/control/private/key.pem ",
        "--interface ib0 ",
        f"\nexec {shlex.quote(sys.executable)} -m distributed.cli.dask_worker ",  # whom SLURM tells to end
    ):
        assert text in script
    assert "#SBATCH -t" not in script  # the partition's default


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


def test_the_controller_is_requeued_and_warned(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.slurm.controller.partition=long")
    text = controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    for line in ("--requeue", "--open-mode=append", "--signal=B:USR1@180", "--partition=long"):
        assert f"#SBATCH {line}\n" in text


def test_one_allocation_has_a_part_for_each_role(tmp_path: Path) -> None:
    config = configured(tmp_path, "explorer.rollout_model.engine_num=3", "cluster.slurm.explorer.gres=gpu:1")
    layout = plan_jobs([config], {"trainer": 2, "explorer": 1})
    text = allocation_script(config, layout, private(config), open_storage(config.checkpoint_job_dir)).text
    assert text.count("#SBATCH hetjob") == 2
    assert "#SBATCH --ntasks=3\n" in text and "#SBATCH --gpus-per-task=1\n" in text
    assert "srun --het-group=1 --ntasks=1 " in text and "srun --het-group=2 --ntasks=3 " in text


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
    with pytest.raises(UserError, match="into 10 rounds, and there are 9"):
        offline_scripts(config, private(config), open_storage(config.checkpoint_job_dir), 10, 1)


DRIVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "to_driver", "cancelled", "code", "requeued"),
    [
        (signal.SIGUSR1, False, False, 130, True),  # the walltime is near
        (signal.SIGINT, False, False, 130, False),  # rftdask cancel
        (signal.SIGTERM, False, False, 143, False),  # scancel by hand, or a requeue, of which SLURM knows itself
        (signal.SIGTERM, True, False, 143, False),  # somebody asked the driver alone
        (signal.SIGUSR1, False, True, 130, False),  # both at once
        (signal.SIGKILL, True, False, 137, True),  # the driver ran out of memory, say
    ],
)
def test_a_controller_ends_with_its_driver_and_comes_back_when_it_should(
    tmp_path: Path, sent: signal.Signals, to_driver: bool, cancelled: bool, code: int, requeued: bool
) -> None:
    commands = {"scontrol": f'echo "$@" >{tmp_path}/requeued', "sleep": ":"}  # in the place of SLURM's
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "driver.py").write_text(DRIVER)
    run = shlex.join([sys.executable, "-S", str(tmp_path / "driver.py"), str(tmp_path / "ready")])
    script = "\n".join(driver_shell(PrivateFolder(tmp_path), run))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(
        ["bash", "-c", script], env=env, stdout=subprocess.PIPE, start_new_session=True
    ) as controller:
        wait_for((tmp_path / "ready").exists)
        if cancelled:
            (tmp_path / CANCELLED_FILE).touch()
        target = psutil.Process(controller.pid).children()[0].pid if to_driver else controller.pid
        os.kill(target, sent)
        assert controller.wait(60) == code
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_driver_does_not_outlive_the_script_of_its_job(tmp_path: Path) -> None:
    ready, told = tmp_path / "ready", tmp_path / "told"
    watching = f"""
import os, pathlib, signal, time
from rftdask.cli import end_with
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(told)!r}).touch())
parent = os.getppid()
pathlib.Path({str(ready)!r}).touch()
end_with(parent)
"""
    script = f"{shlex.join([sys.executable, '-c', watching])} & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        wait_for(ready.exists)
        shell.kill()
    wait_for(told.exists)
    config = configured(tmp_path)
    text = controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    assert " --with-parent &\n" in text


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
from rftdask.cluster.slurm_cluster import SlurmCluster

before = signal.getsignal(signal.SIGINT)
loaded = []
thread = threading.Thread(target=lambda: loaded.append(SlurmCluster.load_job_class()))
thread.start()
thread.join()
assert loaded and signal.getsignal(signal.SIGINT) is before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
