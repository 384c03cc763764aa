"""Promises of rftdask submit: its scripts on SLURM and on other batch systems."""

import contextlib
import fcntl
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rftdask.cli import submit as submitting
from rftdask.cli.submit import has_finished, plan_submission
from rftdask.cluster.batch_cluster import SubmitOptions
from rftdask.cluster.driver_script import SOURCES_FOLDER, HostSystem, driver_shell, walltime_timer
from rftdask.cluster.jobs import jobs_file, write_jobs
from rftdask.cluster.layout import plan_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm import SlurmCluster, allocation_script, controller_text, offline_scripts
from rftdask.config import load_config, replace
from rftdask.config.plugins import SUBMITTED
from rftdask.errors import ConfigError, FencedError, UserError
from rftdask.run.input_fingerprints import copy_for_jobs
from rftdask.run.run_folder import note_end
from rftdask.storage import open_storage
from tests.integration.run_cases import call_cli
from tests.living import lives, wait_until
from tests.unit.cluster.batch_cases import DRIVER, configured, private

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
def test_on_each_system_a_controller_submits_jobs(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, *directives = ELSEWHERE[system]
    walltime = "" if system in ("lsf", "htcondor") else "walltime: '04:00:00', "
    common = ("cluster.python=python3", "cluster.local_cache_dir=$TMPDIR/staged", f"cluster.type={system}")
    config = configured(tmp_path, *common, f"cluster.options={{cores: 4, memory: 8GB, {walltime}{options}}}")
    monkeypatch.setenv("PATH", str(tmp_path))
    submission = plan_submission(config)
    plan = submission.plan
    [controller] = plan.scripts
    for script, lines in zip((controller, plan.worker_scripts[0]), directives, strict=True):
        assert all(line in script.text for line in lines), script.text
    driver = f"{tmp_path}/runs/rftdask/try/control/private/driver.sh"
    assert f"exec bash {driver}" in controller.text and "rftdask.cluster.join" not in controller.text
    staged = 'export RFTDASK_STAGE_TO="$TMPDIR/staged" RFTDASK_STAGE_KEEP=0'
    staged = staged.replace('"', '""') if system == "htcondor" else staged
    assert staged in plan.worker_scripts[0].text and "STAGE" not in controller.text
    warned = "( sleep 14220; kill -USR1 $$ ) &\n" in plan.driver
    assert warned == (system != "htcondor"), "near a walltime of four hours"
    assert "python3 -m rftdask.cluster.resubmit " in plan.driver and "SLURM_" not in plan.driver
    assert subprocess.run(["/bin/bash", "-n"], input=plan.driver, text=True, check=False).returncode == 0
    assert submission.system.render_scripts(submission.folder, plan).count(driver) == 2
    with pytest.raises(UserError, match=r"need cluster.type slurm"):
        plan_submission(config, SubmitOptions(single_allocation=True))


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Put shell scripts first on PATH."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


PLUGIN = r"""
from rftdask.cluster.jobqueue import PbsCluster

class SitePbs(PbsCluster):
    list_command = ("sitestat",)
    row = r"^(?P<id>\d+) (?P<state>\w)$"
"""


def test_a_batch_system_may_be_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "site_batch_system.py").write_text(PLUGIN)
    commands(tmp_path, monkeypatch, qsub="echo 7.pbs", sitestat="echo 7 R")
    keys = ("cluster.type=SitePbs", "cluster.options={cores: 1, memory: 1GB}")
    config = configured(tmp_path, *keys, f"explorer.plugin_dirs=[{tmp_path}/plugins]")
    submission = plan_submission(config)
    [job] = submission.submit()
    assert (job.job_id, job.system) == ("7", "site_batch_system.SitePbs")
    # The driver in that job imports a copy of the folder.
    copies = submission.folder.path / SOURCES_FOLDER
    copy_for_jobs({"site_batch_system": tmp_path / "plugins/site_batch_system.py"}, [f"{tmp_path}/plugins"], copies)
    with monkeypatch.context() as in_job:
        in_job.setenv(SUBMITTED, str(copies))
        worker = submission.system.record(config, "trainer", "trainer-0", "8")
    write_jobs(submission.storage, [worker], jobs_file("both"))
    # Another process has not imported the folder.
    status = [sys.executable, "-m", "rftdask", "status", config.checkpoint_job_dir]
    done = subprocess.run(status, capture_output=True, text=True, timeout=60, check=False)
    assert "job 7        controller     RUNNING" in done.stdout, done
    assert "job 8        trainer-0      ended" in done.stdout, done


def test_the_controller_is_requeued_and_warned(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.slurm.controller.partition=long")
    text = controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    for line in ("--requeue", "--open-mode=append", "--signal=B:USR1@180", "--partition=long"):
        assert f"#SBATCH {line}\n" in text


def test_directives_of_the_user_win(tmp_path: Path) -> None:
    config = configured(tmp_path, 'cluster.slurm.controller.directives=["--signal=B:USR1@600"]')
    text = controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    assert text.index("#SBATCH --signal=B:USR1@180\n") < text.index("#SBATCH --signal=B:USR1@600\n")  # the last counts


def test_the_user_is_notified_when_the_controller_ends(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.slurm.mail=me@example.org")
    storage = open_storage(config.checkpoint_job_dir)
    asked = "#SBATCH --mail-user=me@example.org\n#SBATCH --mail-type=END,FAIL\n"
    assert asked in controller_text(config, private(config), storage)
    assert all(asked in script.text for script in offline_scripts(config, private(config), storage, 2, 1))
    assert "mail" not in SlurmCluster.job_script(config, "trainer", 1, "trainer-0", private(config), tmp_path)
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.dependency"):
        configured(tmp_path, "cluster.slurm.dependency=later")
    assert configured(tmp_path, "cluster.slurm.dependency='afterok:12:13,afterany:7_1'").cluster.slurm.dependency


def test_scripts_are_shown_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(configured(tmp_path).to_yaml())
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = call_cli("submit", str(file), "--dry-run")
    assert shown.code == 0 and shown.out.count("#!/usr/bin/env bash") == 3, shown
    assert shown.out.startswith("# not checked against what SLURM has: sinfo is not installed")
    refused = call_cli("submit", str(file))
    assert refused.code == 2 and "or rftdask run with cluster.type=local on one machine" in refused.err
    folder = Path(load_config(file).checkpoint_job_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").touch()
    shown = call_cli("submit", str(file), "--dry-run", "continue_from_checkpoint=false")
    assert f"continue_from_checkpoint: false: a new run, {folder}_20" in shown.err


def test_scripts_are_shown_with_the_prediction_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        submission.system.check_scripts(submission.plan)


def test_of_two_simultaneous_submits_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queued, partition = "echo 7 7 PENDING 0:00 Priority", "echo 'm|4|8|gpu:1|9|1'"
    commands(tmp_path, monkeypatch, sbatch="cat >/dev/null; echo 7", squeue=queued, sinfo=partition)
    first, second = (plan_submission(configured(tmp_path)) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        submits = [threads.submit(submission.submit) for submission in (first, second)]
    errors = [error for result in submits if (error := result.exception()) is not None]
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


def test_a_finished_run_needs_no_jobs(tmp_path: Path) -> None:
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


def test_one_allocation_of_equal_nodes_gives_roles_own_nodes(tmp_path: Path) -> None:
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
    free = configured(tmp_path, *keys, "cluster.slurm.trainer.memory=null")
    plan = plan_jobs([free], {"trainer": 6, "explorer": 4})
    assert "SBATCH --mem" not in allocation_script(free, plan, private(free), storage).text
    other = configured(tmp_path, *keys, "cluster.slurm.explorer.gres=gpu:h100:8", "explorer.rollout_model.engine_num=8")
    with pytest.raises(UserError, match=r"all nodes of a job .* and GPUs differ: .*gpu:h100:4.*gpu:h100:8"):
        allocation_script(other, plan_jobs([other], {"trainer": 6, "explorer": 4}), private(other), storage)


def test_an_offline_chain_divides_the_steps_into_rounds(tmp_path: Path) -> None:
    config = configured(tmp_path)
    scripts = offline_scripts(config, private(config), open_storage(config.checkpoint_job_dir), 2, 3)
    planned = [(script.name, script.after, script.after_task) for script in scripts]
    assert planned == [
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
def test_the_config_of_a_kind_of_site_gives_scripts(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_walltime_timer_signals_the_driver_and_ends(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    run = shlex.join([sys.executable, "-S", str(tmp_path / "driver.py"), str(tmp_path / "ready")])
    for after_s, command, code in ((1, run, 130), (700, "sleep 0.1", 0)):
        system = HostSystem(restarts="0", again=f"touch {tmp_path}/again", cancel="", first=walltime_timer(after_s))
        script = "\n".join(driver_shell(SecretsDir(tmp_path), command, system)).replace("sleep 60", ":")
        with subprocess.Popen(["bash", "-c", script], start_new_session=True) as controller:
            assert controller.wait(60) == code
            left = [process for process in psutil.process_iter() if _session(process.pid) == controller.pid]
            wait_until(lambda left=left: not any(map(lives, left)))
        assert (tmp_path / "again").exists()  # after the first, whose walltime came


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0
