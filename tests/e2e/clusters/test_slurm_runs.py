"""Runs on a real SLURM, with fake models. Skipped if SLURM does not answer (`sinfo -h`)."""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rftdask import Experiment
from rftdask.cluster.batch_cluster import call
from rftdask.cluster.jobs import JobRecord, read_jobs
from rftdask.cluster.slurm import ENDING, SlurmCluster, sbatch
from rftdask.errors import RftError
from rftdask.processes.dask_task import workers_of
from rftdask.run.lease import lease_holder
from rftdask.storage import open_storage
from tests import living
from tests.integration.run_cases import RunProcess, assert_sound, call_cli, num_shards, num_steps, write_config

DEADLINE_S = 300.0
CHAOS = Path(__file__).parents[3] / "benchmarks" / "chaos.py"
GUIDE = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text()


def has_slurm() -> bool:
    try:
        return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=30, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


pytestmark = [
    pytest.mark.skipif(not has_slurm(), reason="no SLURM answers here (sinfo -h)"),
    # One after the other: concurrent runs could each hold nodes while waiting for those of the others.
    pytest.mark.xdist_group("slurm"),
]


def block(language: str) -> str:
    match = re.search(rf"## A run in five commands\n.*?```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert match
    return match.group(1)


wait_until = functools.partial(living.wait_until, deadline_s=DEADLINE_S, every_s=0.2)


class Demo:
    """A run in its own folder, with the cluster section of the guide."""

    def __init__(self, folder: Path, *overrides: tuple[str, str, object]) -> None:
        folder.mkdir(exist_ok=True)
        tree = yaml.safe_load(write_config(folder).read_text())
        tree.update(name="demo", checkpoint_root_dir=str(folder / "runs"), **yaml.safe_load(block("yaml")))
        tree["cluster"]["interface"] = "lo"  # all nodes of the tests are this machine
        for role in tree["cluster"]["slurm"].values():
            role.update(walltime="00:10:00", prologue=[f"export PYTHONPATH={Path.cwd()} OMP_NUM_THREADS=1"])
        for section, key, value in overrides:
            tree[section][key] = value
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(tree))
        self.folder = folder / "runs" / "rftdask" / "demo"

    def jobs(self) -> list[JobRecord]:
        return read_jobs(open_storage(self.folder))

    def job_ids(self, *roles: str) -> list[str]:
        return [job.job_id for job in self.jobs() if not roles or job.role in roles]

    def alive(self, *roles: str) -> dict[str, str]:
        return SlurmCluster.states(self.job_ids(*roles))

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "log").glob("*.log")))

    def wait_for_end(self) -> None:
        wait_until(lambda: not self.alive(), f"the end of jobs {self.job_ids()}")

    def cancel_all(self) -> None:
        if self.folder.exists():
            with contextlib.suppress(RftError):
                SlurmCluster.cancel(*self.job_ids("controller", "explore", "train"))
                wait_until(lambda: not self.alive("controller", "explore", "train"), "the cancellation")
                SlurmCluster.cancel(*self.job_ids())


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    made = Demo(tmp_path, ("trainer", "total_steps", 100_000), ("buffer", "total_epochs", 100_000))
    yield made
    made.cancel_all()


def shell(command: str, folder: Path) -> str:
    """Run a line of the guide in the folder of the configuration, as a user types it."""
    done = subprocess.run(
        ["bash", "-c", f'rftdask() {{ {sys.executable} -m rftdask "$@"; }}; {command}'],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_the_five_commands_of_the_guide_work_as_printed(tmp_path: Path, demo: Demo) -> None:
    submit, status, cancel, again, report = block("bash").splitlines()
    assert "submitted controller as job" in shell(submit, tmp_path)
    assert call_cli("submit", str(demo.config)).code == 2  # the job is already queued
    wait_until(lambda: num_steps(demo.folder) >= 2, "two steps")

    told = shell(status, tmp_path)
    assert re.search(r"job \d+ +controller +RUNNING", told) and re.search(r"job \d+ +explorer-\d+ +RUNNING", told)
    experiment = Experiment.attach(demo.folder)
    assert experiment.client is not None
    with experiment.client as client:
        assert client.scheduler.address.startswith("tls://")
        workers = workers_of(client).values()
        assert {role for info in workers for role in info["resources"]} == {"control", "trainer", "explorer"}

    assert re.search(r"trainer-\d+-\d+-0-0-1 +trainer +tls://", call_cli("attach", str(demo.folder)).out)

    [controller] = demo.job_ids("controller")
    shell(cancel, tmp_path)
    assert demo.alive() == {}
    assert SlurmCluster.reason(controller).startswith("CANCELLED")
    assert "not running: stopped" in call_cli("status", str(demo.folder)).out
    stopped_at = assert_sound(demo.folder)["checkpoint"]
    assert stopped_at >= 2

    tree = yaml.safe_load(demo.config.read_text())
    tree["trainer"]["total_steps"] = stopped_at + 20
    demo.config.write_text(yaml.safe_dump(tree))
    shell(again, tmp_path)
    wait_until(lambda: num_steps(demo.folder) > stopped_at, "a step of the third life")
    lost = demo.job_ids("explorer")
    SlurmCluster.cancel(*lost)  # its partition requests it again
    demo.wait_for_end()
    shell(report, tmp_path)
    assert (demo.folder / "report.html").exists()
    assert assert_sound(demo.folder)["step"] == stopped_at + 20
    assert "not running: finished" in call_cli("status", str(demo.folder)).out
    logs = call_cli("logs", str(demo.folder), "driver", "-n", "1000").out
    assert f"job {lost[0]} (explorer-" in logs and "ended: CANCELLED" in logs


def test_a_new_user_has_a_running_job_after_three_commands(tmp_path: Path) -> None:
    demo = Demo(tmp_path)  # for its tasks
    demo.config.unlink()
    fake = "explorer.rollout_model.engine_type=fake trainer.trainer_type=fake monitor.monitor_type=none"
    fake += " project=rftdask name=demo cluster.interface=lo trainer.total_steps=1000"  # until it is cancelled
    shell(f"rftdask init run.yaml --tasks {tmp_path}/tasks.jsonl --model none --slurm main --yes", tmp_path)
    shell(f"rftdask validate run.yaml {fake}", tmp_path)
    try:
        shell(f"rftdask submit run.yaml {fake}", tmp_path)
        wait_until(lambda: num_steps(demo.folder) >= 1, "a step")
        assert set(demo.alive().values()) == {"RUNNING"}
        assert call_cli("cancel", str(demo.folder)).code == 0
    finally:
        demo.cancel_all()


def test_a_dry_run_shows_the_scripts_and_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    shown = call_cli("submit", str(demo.config), "--dry-run")
    assert shown.code == 0, shown
    assert shown.out.count("#!/usr/bin/env bash") == 3 and "#SBATCH --gres=gpu:1" in shown.out
    chain = call_cli("submit", str(demo.config), "--dry-run", "--offline", "--rounds", "2", "trainer.num_ranks=8")
    assert chain.code == 0, chain
    assert chain.out.count("--dependency=afterok:") == 3 and chain.out.count("--kill-on-invalid-dep=yes") == 3
    one = call_cli("submit", str(demo.config), "--dry-run", "--single-allocation", "trainer.num_ranks=2")
    assert one.code == 0 and one.out.count("#SBATCH hetjob") == 2
    assert not demo.folder.exists()


def test_an_ending_job_is_distinguished_from_a_returning_one(tmp_path: Path) -> None:
    script = tmp_path / "slow.sh"
    script.write_text(f"#!/bin/bash\ntrap 'sleep 3; exit 0' TERM\ntouch {tmp_path}/$SLURM_JOB_ID\nsleep 100 & wait\n")
    jobs = [sbatch(str(script), "--requeue", "--output=/dev/null", "--time=1") for _ in range(2)]
    try:
        wait_until(lambda: all((tmp_path / job_id).exists() for job_id in jobs), "the traps")
        # It has used no time since its restart; the two states differ only by seconds.
        wait_until(lambda: "0:00" not in call("squeue", "--me", "--format=%M", "-h").split(), "a second")
        SlurmCluster.cancel(*jobs[:1])
        call("scontrol", "requeue", jobs[1])
        assert SlurmCluster.states(jobs) == {jobs[0]: ENDING, jobs[1]: "REQUEUED"}
        wait_until(lambda: SlurmCluster.states(jobs).get(jobs[1]) == "PENDING (BeginTime)", "the other in the queue")
        wait_until(lambda: jobs[0] not in SlurmCluster.states(jobs), "the ended one gone")
    finally:
        SlurmCluster.cancel(*jobs)


def test_an_impossible_request_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    demo = Demo(tmp_path, ("explorer", "rollout_model", {"engine_type": "fake", "engine_num": 1000}))
    refused = call_cli("submit", str(demo.config))
    assert refused.code == 2 and re.search(r"1000 explorer x 1 = 1000 GPUs, and partition spot has", refused.err)
    assert not demo.folder.exists()


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"prologue": ["echo no module cuda here >&2; exit 3"]}, ("ended as FAILED (exit 3:0)", "no module cuda here")),
        ({"walltime": "2-00:00:00"}, ("can never start: PENDING (PartitionTimeLimit)",)),
    ],
    ids=["failing prologue", "more time than its partition gives"],
)
def test_a_trainer_that_cannot_start_ends_the_run(demo: Demo, settings: dict[str, Any], texts: tuple[str, ...]) -> None:
    tree = yaml.safe_load(demo.config.read_text())
    tree["cluster"]["slurm"]["trainer"] |= settings
    demo.config.write_text(yaml.safe_dump(tree))
    assert call_cli("submit", str(demo.config)).code == 0
    demo.wait_for_end()
    assert demo.alive() == {}
    assert all(text in demo.log() for text in texts), demo.log()
    assert SlurmCluster.reason(demo.job_ids("controller")[0]).startswith("FAILED")


def test_a_limit_of_submitted_jobs_reduces_only_the_explorers(tmp_path: Path) -> None:
    # SLURM needs a database for such limits, so this sbatch enforces one: three jobs of this run.
    real, shim = shutil.which("sbatch"), tmp_path / "bin" / "sbatch"
    shim.parent.mkdir()
    limit = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    count = f'echo >>{tmp_path}/asked; [ "$(wc -l <{tmp_path}/asked)" -le 3 ]'
    shim.write_text(f'#!/bin/bash\n{{ {count}; }} && exec {real} "$@"\necho "{limit}" >&2; exit 1\n')
    shim.chmod(0o755)
    demo = Demo(tmp_path, ("explorer", "rollout_model", {"engine_type": "fake", "engine_num": 4}))
    tree = yaml.safe_load(demo.config.read_text())
    tree["cluster"]["slurm"]["controller"]["prologue"].append(f"export PATH={shim.parent}:$PATH")
    demo.config.write_text(yaml.safe_dump(tree))
    try:
        assert call_cli("submit", str(demo.config)).code == 0
        demo.wait_for_end()
        assert assert_sound(demo.folder)["step"] == tree["trainer"]["total_steps"], demo.log()
        assert "2 explorer jobs are submitted, another one follows later: " in demo.log() and limit in demo.log()
    finally:
        demo.cancel_all()


@pytest.mark.long
def test_a_sweep_submits_every_run_and_at_most_so_many_at_a_time(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    sweep = ("sweep", str(demo.config), "seed=0..3", "trainer.total_steps=2")
    submitted = call_cli(*sweep, "--at-most", "2")
    assert submitted.code == 0, submitted
    jobs = re.findall(r"submitted seed-\d as job (\d+)", submitted.err)
    assert len(jobs) == 4, submitted
    try:
        told = [call("squeue", "--noheader", "--format=%E", "--jobs", job_id).strip() for job_id in jobs[2:]]
        assert [re.sub(r"\(.*\)", "", text) for text in told] == [f"afterany:{job_id}" for job_id in jobs[:-2]]
        again = call_cli(*sweep, "--at-most", "2")
        assert again.code == 0 and re.findall(r"as job (\d+)", again.err)[-2:] == jobs[-2:], "kept, not submitted twice"
        wait_until(lambda: not SlurmCluster.states(jobs), "the end of the sweep")
        assert call_cli(*sweep, "--table").out.count("finished") == 4
    finally:
        SlurmCluster.cancel(*jobs)


SBATCH = """#!/bin/bash
{sbatch} "$@" || exit
[ "${{1}}" = --test-only ] || kill -KILL $PPID
"""
"""sbatch whose caller is killed as soon as the job is queued."""


@pytest.mark.parametrize("types_again", [True, False], ids=["submit", "cancel"])
def test_a_killed_submit_leaves_one_job_that_the_next_command_finds(
    types_again: bool, tmp_path: Path, demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.write_text(SBATCH.format(sbatch=shutil.which("sbatch")))
    wrapper.chmod(0o755)
    submit = ("submit", str(demo.config))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
        with RunProcess(*submit) as killed:
            assert killed.end().code == -signal.SIGKILL
    assert not demo.jobs(), "the job is not recorded"
    if types_again:
        again = call_cli(*submit)
        assert again.code == 2 and "is submitted already: controller is job" in again.err, again
        assert len(demo.alive("controller")) == 1
    cancelled = call_cli("cancel", str(demo.folder))
    assert cancelled.code == 0 and "(controller)" in cancelled.out, cancelled
    demo.wait_for_end()


CONTAINER = """#!/bin/bash
[ "$1 $2 $3" = "exec --nv image.sif" ] || exit 9
shift 3
echo "$SLURM_JOB_ID $SLURM_PROCID $@" >>{log}
exec "$@"
"""
"""Stand-in for a container's runner."""


@pytest.mark.long
def test_a_trainer_on_two_nodes_is_one_job_over_two_controllers(tmp_path: Path, demo: Demo) -> None:
    tree = yaml.safe_load(demo.config.read_text())
    runner, wrapped = tmp_path / "apptainer", tmp_path / "wrapped"
    runner.write_text(CONTAINER.format(log=wrapped))
    runner.chmod(0o755)
    tree["cluster"]["slurm"]["template"] = (
        f"{{% extends 'job.sh' %}}{{% block command %}}{{{{ srun }}}} "
        f"{{{{ '{runner} exec --nv image.sif' if role != 'controller' }}}} {{{{ command }}}}{{% endblock %}}"
    )
    # Five nodes of one GPU are needed and four exist, so one job waits.
    tree["trainer"]["num_ranks"] = 2
    tree["explorer"]["rollout_model"]["engine_num"] = 3
    tree["cluster"]["slurm"]["explorer"]["exclusive"] = True
    demo.config.write_text(yaml.safe_dump(tree))
    assert call_cli("submit", str(demo.config)).code == 0
    wait_until(lambda: len(demo.job_ids("trainer", "explorer")) == 4, "all jobs")
    wait_until(lambda: num_steps(demo.folder) >= 2, "two steps")
    before, [controller] = demo.alive("trainer", "explorer"), demo.job_ids("controller")
    call("scancel", "--batch", "--signal=USR1", controller)
    wait_until(lambda: "queued again before the walltime" in demo.log(), "the requeue")
    assert set(SlurmCluster.states(list(before))) == set(before), "nobody cancelled them"
    steps = num_steps(demo.folder)
    wait_until(lambda: num_steps(demo.folder) >= steps + 2, "steps of the second life")
    assert set(before) <= set(demo.job_ids("trainer", "explorer")), (before, demo.jobs())
    assert all(f"taking over job {job_id} " in demo.log() for job_id in before)
    [trainer], in_containers = demo.job_ids("trainer"), wrapped.read_text()
    assert {line.split()[1] for line in in_containers.splitlines() if line.startswith(trainer)} == {"0", "1"}
    assert controller not in {line.split()[0] for line in in_containers.splitlines()}
    [second] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or ())[1:3] == ["-m", "rftdask.cluster.join"]
        and process.environ().items() >= {("SLURM_JOB_ID", trainer), ("SLURM_PROCID", "1")}
    ]
    # All of them: SLURM waits a minute for processes that still hold its output. Some end with the one before.
    for process in (*second.children(recursive=True), second):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: demo.job_ids("trainer") not in ([], [trainer]), "another trainer job")
    steps = num_steps(demo.folder)
    wait_until(lambda: num_steps(demo.folder) >= steps + 2, "steps of its ranks")
    assert len(demo.job_ids("trainer")) == 1 and f"job {trainer} (trainer-" in demo.log()
    assert call_cli("cancel", str(demo.folder)).code == 0
    assert demo.alive() == {}


@pytest.mark.long
def test_two_runs_in_an_existing_allocation_are_its_steps(tmp_path: Path) -> None:
    demos = [Demo(tmp_path / name) for name in ("one", "two")]
    runs = " & ".join(f"{sys.executable} -m rftdask run {demo.config} --progress none" for demo in demos)
    shell(f"salloc --quiet --nodes=4 --gres=gpu:1 --cpus-per-task=4 --time=10 bash -c '{runs} & wait'", tmp_path)
    for demo in demos:
        assert_sound(demo.folder)
        logs = list((demo.folder / "log").glob("trainer-0-*.log"))
        assert len(logs) == 1 and re.fullmatch(r"trainer-0-\d+\.\d+\.log", logs[0].name), logs
        assert "submitted job" in demo.log() and demo.jobs() == []


@pytest.mark.long
def test_a_rank_and_an_engine_take_turns_in_one_job(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    turns.mkdir()
    demo = Demo(tmp_path, ("cluster", "colocate", True))
    tree = yaml.safe_load(demo.config.read_text())
    # On a GPU they recognize each other by its name; here the test names the device.
    tree["cluster"]["slurm"]["trainer"]["prologue"].append(f"export RFTDASK_DEVICE_LOCKS={turns}:0")
    tree["explorer"] = {**tree.get("explorer", {}), "max_workers": 1}
    demo.config.write_text(yaml.safe_dump(tree))
    try:
        told = call_cli("submit", str(demo.config))
        assert told.code == 0, told
        demo.wait_for_end()
        assert assert_sound(demo.folder)["step"] == 10
    finally:
        demo.cancel_all()
    assert {path.name for path in turns.iterdir()} == {"gate-0", "lock-0"}
    logs = demo.log()
    assert len(re.findall(r"submitted job \d+ \(trainer-", logs)) == 1
    assert not re.search(r"submitted job \d+ \(explorer-", logs)


def test_one_job_of_nodes_that_are_alike_has_the_whole_run(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        submitted = call_cli("submit", str(demo.config), "--single-allocation", "cluster.slurm.heterogeneous=false")
        assert submitted.code == 0, submitted
        demo.wait_for_end()
        assert_sound(demo.folder)
        assert "not running: finished" in call_cli("status", str(demo.folder)).out, demo.log()
        assert len(demo.jobs()) == 1
    finally:
        demo.cancel_all()


def test_a_node_that_goes_down_costs_a_run_its_job_and_no_more(demo: Demo) -> None:
    assert call_cli("submit", str(demo.config)).code == 0
    wait_until(lambda: num_steps(demo.folder) >= 2, "two steps")
    [explorer] = demo.job_ids("explorer")
    node = call("squeue", "--noheader", "--jobs", explorer, "--format=%N").strip()
    try:
        call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        wait_until(
            lambda: SlurmCluster.states([explorer]).get(explorer) != "RUNNING", "the loss of the explorer's node"
        )
        steps = num_steps(demo.folder)
        wait_until(lambda: num_steps(demo.folder) >= steps + 3, "steps on the nodes that are left")
        again = call("squeue", "--noheader", "--me", "--states=RUNNING", "--format=%N").split()
        assert again and node not in again
    finally:
        call("scontrol", "update", f"nodename={node}", "state=resume")
    assert call_cli("cancel", str(demo.folder)).code == 0
    assert_sound(demo.folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root submits as another user")
def test_jobs_of_another_user_are_neither_seen_nor_touched(tmp_path: Path) -> None:
    theirs = subprocess.run(
        ["sbatch", "--parsable", "--chdir=/", "--output=/dev/null", "--wrap", "sleep 600"],
        cwd="/",
        user=65534,
        group=65534,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    demo = Demo(tmp_path)
    try:
        assert SlurmCluster.states([theirs]) == {} and SlurmCluster.expected_starts([theirs]) == {}
        assert call_cli("submit", str(demo.config)).code == 0
        demo.wait_for_end()
        told = call("squeue", "--noheader", "--jobs", theirs, "--format=%T %u").split()
        assert told == ["RUNNING", "nobody"]
        assert (demo.folder / "control" / "private").stat().st_mode & 0o077 == 0
    finally:
        demo.cancel_all()
        SlurmCluster.cancel(theirs)


def test_a_run_without_requeue_reports_it_and_ends(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    tree = yaml.safe_load(demo.config.read_text())
    for role in tree["cluster"]["slurm"].values():
        role["directives"] = ["--no-requeue"]
    demo.config.write_text(yaml.safe_dump(tree))
    try:
        submitted = call_cli("submit", str(demo.config))
        assert submitted.code == 0 and "warning: SLURM does not requeue this job" in submitted.err, submitted
        demo.wait_for_end()
        assert "SLURM does not requeue this job" in demo.log()
        again = call_cli("submit", str(demo.config))
        assert again.code == 0 and "has finished, so nothing is submitted" in again.out, again
        assert demo.alive() == {}
    finally:
        demo.cancel_all()


@pytest.mark.long
def test_an_allocation_resumes_a_killed_driver_as_submitted(tmp_path: Path, demo: Demo) -> None:
    reward = tmp_path / "plugins" / "submitted_reward.py"
    reward.parent.mkdir()
    reward.write_text("def scored(response, truth, task):\n    return 0.25\n")
    taskset = "buffer.explorer_input.taskset"
    own = (f"explorer.plugin_dirs=[{reward.parent}]", f"{taskset}.default_reward_fn_type=submitted_reward.scored")
    submit = ("submit", str(demo.config), "--single-allocation", "explorer.rollout_model.engine_num=2", *own)
    ended = call_cli(*submit)
    assert ended.code == 0, ended
    wait_until(lambda: num_steps(demo.folder) >= 2, "two steps")
    reward.write_text("def scored(response, truth, task):\n    raise ValueError('edited')\n")
    driver = lease_holder(open_storage(demo.folder), "trainer")
    assert driver is not None
    os.kill(driver["pid"], signal.SIGKILL)
    wait_until(lambda: "started again after it was killed (exit code 137)" in demo.log(), "the next start")
    before = num_steps(demo.folder)
    # Two: the next entry may still be written by the first life, whose rank ends shortly after its driver.
    wait_until(lambda: num_steps(demo.folder) >= before + 2, "a step of the second life")
    assert call_cli("cancel", str(demo.folder)).code == 0
    assert demo.alive() == {}
    assert assert_sound(demo.folder)["checkpoint"] > before
    assert set(Experiment.open(demo.folder).experiences()["reward"].dropna()) == {0.25}
    refused = call_cli(*submit)
    assert refused.code == 2 and "source submitted_reward: content changed" in refused.err, refused


@pytest.mark.long
def test_a_chain_of_jobs_survives_requeues_of_either_kind(tmp_path: Path) -> None:
    demo = Demo(
        tmp_path,
        ("buffer", "total_steps", 40),
        ("trainer", "total_steps", None),
        ("trainer", "save_interval", 1),
        ("synchronizer", "sync_style", "fully_async"),
    )
    try:
        ended = call_cli("submit", str(demo.config), "--offline", "--rounds", "2", "--explore-jobs", "2")
        assert ended.code == 0, ended
        (explore,), (train,) = ([j.job_id for j in demo.jobs() if j.name == name] for name in ("explore-1", "train-1"))
        wait_until(lambda: num_shards(demo.folder) >= 1, "a shard")
        call("scontrol", "requeue", f"{explore}_0")  # the job that drives
        wait_until((demo.folder / "latest_checkpointed_iteration.txt").exists, "a checkpoint")
        call("scontrol", "requeue", train)
        demo.wait_for_end()
        status = assert_sound(demo.folder)
        assert (status["step"], status["explore_step"]) == (40, 40), demo.log()
    finally:
        demo.cancel_all()


@pytest.mark.long
def test_a_run_disturbed_by_slurm_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    # A kill comes with every fifth of the steps; the seed gives the order: controller, preemption, trainer.
    command = [sys.executable, str(CHAOS), "--slurm", "--explorers", "1", "--local-reference", "--seed", "6"]
    command += ["--kinds", "preemption,trainer job,controller requeue", "--kills", "3", "--steps", "16"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=600)
    logs = tmp_path / "runs" / "chaos" / "chaos" / "log"
    assert done.returncode == 0, (done.stdout, done.stderr, [path.read_text()[-4000:] for path in logs.glob("*.log")])
    assert "3 kills (1 x controller requeue, 1 x preemption, 1 x trainer job)" in done.stdout
    assert "0 lost, 0 twice, the same ledger, the same bits of weights" in done.stdout
    said = "".join(path.read_text() for path in logs.glob("controller-*"))
    assert "SIGTERM: the run ends with a checkpoint" in said
    assert "losses in a row" not in said, "the tasks of a preempted explorer are not crash suspects"
    # SLURM lets jobs inherit the restart count of the job that submits them, while their own count starts at 0. Checked
    # on trainers, since an explorer may be preempted before it has joined.
    joined = re.findall(r"worker trainer-\d+-(\d+)-(\d+)-\d+-\d+ .* joined", (logs / "driver.log").read_text())
    first = {job: number for job, number in reversed(joined)}
    assert len(first) >= 2 and set(first.values()) == {"0"}, joined
