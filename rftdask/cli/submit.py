"""`rftdask submit`: the scripts of a run on a batch system, as a pure function of the config, and their submission.

The controller job has the scheduler, the driver and the light roles, and submits the jobs of trainer and explorers.
SLURM restarts it after the loss of its node and near its walltime, and the run continues from storage. With
--single-allocation all roles are steps of one job. With --offline explore and train jobs alternate over the same log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rftdask.cli.common import AcceptChanges, ConfigFile, Origin, Overrides, load, say, warn, with_run_name
from rftdask.cluster import slurm_commands
from rftdask.cluster.base import find_cluster
from rftdask.cluster.jobqueue import CONTROLLER, SUBMIT_S, OtherCluster, log_folder, states_of, system_of
from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, SUBMITTED_FILE, JobRecord, read_jobs, write_jobs
from rftdask.cluster.layout import EXPLORER_RESOURCE, ROLES, TRAINER_RESOURCE, Layout, plan_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm import SlurmCluster, chain_shape, check_chain
from rftdask.cluster.slurm_commands import JobShape
from rftdask.cluster.slurm_script import (
    NO_REQUEUE,
    ONE_TASK,
    TEMPLATE,
    HostSystem,
    alike,
    asks_for,
    batch_script,
    command_of,
    driver_shell,
    staging,
    step,
)
from rftdask.config import Config, load_config, make_plan, replace
from rftdask.config.plan import plan_work
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import JobConfig
from rftdask.driver.memory_estimate import job_shortages, raise_shortages
from rftdask.driver.preflight import check_inputs
from rftdask.errors import FencedError, NotInstalledError, RoleError, UserError
from rftdask.processes.poll import wait_for
from rftdask.run.input_fingerprints import SOURCES_FOLDER, InputFingerprints, check_inputs_unchanged, copy_for_jobs
from rftdask.run.run_folder import check_run, read_end
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, read_pointer

WARNING_S = 180
"""Time before its walltime at which SLURM signals a controller, which writes a checkpoint and is requeued."""
PATIENCE_S = 120
"""Time to wait for a lease of a killed process on another machine, and for a starting scheduler."""
_DRIVER_OPTIONS = ("--progress", "plain", "--patience", str(PATIENCE_S), "--exit-with-parent")
_POLL_INTERVAL_S = 0.2
DRIVER_FILE = "driver.sh"
_RESTARTS_FILE = "restarts"
_WARNING = f"--signal=B:USR1@{WARNING_S}"


def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts; write and submit nothing")] = False,
    single_allocation: Annotated[
        bool,
        typer.Option("--single-allocation", help="Put all roles in one job, for sites where jobs cannot submit jobs"),
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Alternate explore and train jobs, in a chain")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of --offline")] = 1,
    explore_jobs: Annotated[int, typer.Option(min=1, help="Tasks of each explore array of --offline")] = 1,
    print_templates: Annotated[
        bool,
        typer.Option("--print-templates", help="Print the template of all scripts (docs/slurm.md); submit nothing"),
    ] = False,
    accept_changes: AcceptChanges = False,
    origin: Origin = "",
) -> None:
    """Submit a run to a batch system.

    A controller job drives the run and submits the other jobs, so the user can log out.
    """
    if offline and single_allocation:
        raise UserError("--offline submits several jobs, and --single-allocation one; leave out one of them")
    checked = load(config, overrides, origin)
    if print_templates:
        template = checked.cluster.slurm.template
        say(TEMPLATE if template is None else f"{TEMPLATE}\n{{# cluster.slurm.template of this run: #}}\n{template}")
        return
    checked = with_run_name(checked)
    submission = plan_submission(
        checked,
        single_allocation=single_allocation,
        offline=offline,
        rounds=rounds,
        explore_jobs=explore_jobs,
        dry=dry_run,
    )
    if dry_run:
        say(submission.render())
        return
    # Checked here, where the user sees the result, and again by the job, since files may change while it waits.
    stages = checked.stage_configs()
    inputs = check_inputs(stages, elsewhere=True)
    fingerprints = check_inputs_unchanged(stages, inputs, accept=accept_changes)
    if not offline and has_finished(checked, [stage.sizes for stage in inputs]):
        say(
            f"{checked.checkpoint_job_dir} has finished, so nothing is submitted; raise trainer.total_steps to continue"
        )
        return
    submission.check()
    for job in submission.submit(fingerprints):
        say(f"submitted {job.name} as job {job.job_id}")
        if not system_of(job).is_requeued(job.job_id):
            warn((NO_REQUEUE,))
    say(f"the run is {checked.checkpoint_job_dir}; next: rftdask status {checked.checkpoint_job_dir}")


@dataclass(frozen=True)
class Script:
    """A batch script of a submission."""

    name: str
    role: str
    text: str
    after: str | None = None
    """Name of the script whose job must succeed before."""
    after_task: str = ""
    """Suffix of the array task that must succeed before: "_0". "": all tasks."""


@dataclass(frozen=True)
class Submission:
    """All scripts of a run.

    Example: submission = plan_submission(config); submission.submit()
    """

    config: Config
    storage: Storage
    folder: SecretsDir
    scripts: tuple[Script, ...]
    worker_scripts: tuple[Script, ...] = ()
    """Scripts that the controller will submit, for display."""
    unchecked: str = ""
    """Reason why the scripts were not checked against SLURM's partitions; empty: checked."""
    driver: str = ""
    """Shell that the controller's job runs on batch systems other than SLURM."""

    def render(self) -> str:
        """Text of all scripts, with SLURM's prediction and the submit command of each."""
        if self.driver:
            shown = [f"# {self.folder.path / DRIVER_FILE}\n{self.driver}"]
            return "\n".join(
                [*(f"# {script.name}\n{script.text}" for script in (*self.scripts, *self.worker_scripts)), *shown]
            )
        parts = [f"# not checked against what SLURM has: {self.unchecked}\n"] * bool(self.unchecked)
        for script in (*self.scripts, *self.worker_scripts):
            options = "".join(f" {shlex.quote(option)}" for option in _dependency(script, f"<job of {script.after}>"))
            by = f"{options} {self._path(script)}" if script in self.scripts else f", by the controller ({script.name})"
            foreseen = "" if self.unchecked else f"# SLURM: {self._foresee(script)}\n"
            parts.append(f"{foreseen}# sbatch{by}\n{script.text}")
        return "\n".join(parts)

    def check(self) -> None:
        """Test each script with SLURM. Raises: UserError: SLURM would refuse a script."""
        for script in (*self.scripts, *self.worker_scripts) if not self.driver else ():
            if slurm_commands.is_mistake(answer := self._foresee(script)):
                raise UserError(f"SLURM refuses the job of {script.role} (cluster.slurm.{script.role}): {answer}")

    def _foresee(self, script: Script) -> str:
        try:
            return slurm_commands.foresee(script.text)
        except (NotInstalledError, RoleError) as error:  # may be a temporary limit
            return " ".join(str(error).split())

    def submit(self, inputs: Sequence[InputFingerprints] = (), after: str | None = None) -> list[JobRecord]:
        """Write the scripts and copies of the user's sources to the secrets directory and submit the scripts.

        Args: inputs: fingerprints of each stage's inputs; after: job that must end before, in any way.
        Raises: RoleError: SLURM refuses a script, and the other jobs are canceled; FencedError: already submitted.
        """
        slurm_commands.forget_job()
        if self.config.private:
            self.storage.make_private()
        self.folder.make()
        with _one_at_a_time(self.folder.path / "submit.lock"):
            _check_not_submitted(self.storage)  # again, under the lock
            return self._submit(inputs, after)

    def _submit(self, inputs: Sequence[InputFingerprints], after: str | None) -> list[JobRecord]:
        # A marker of an earlier `rftdask cancel` would end the driver at once.
        (self.folder.path / CANCELLED_FILE).unlink(missing_ok=True)
        (self.folder.path / _RESTARTS_FILE).unlink(missing_ok=True)

        # Resolved, because the user's files may change while the job is queued.
        self.folder.write(CONFIG_FILE, self.config.to_yaml())
        sources = {name: file for stage in inputs for name, file in stage.files.items()}
        folders = [name for stage in self.config.stage_configs() for name in stage.explorer.plugin_dirs]
        copy_for_jobs(sources, folders, self.folder.path / SOURCES_FOLDER)
        log_folder(self.storage, self.folder).mkdir(parents=True, exist_ok=True)
        if self.driver:
            self.folder.write(DRIVER_FILE, self.driver)
            return [_start_controller(self.config, self.storage)]
        jobs: dict[str, JobRecord] = {}
        try:
            for script in self.scripts:
                path = self.folder.write(f"{script.name}.sh", script.text)
                options = _dependency(script, jobs[script.after].job_id) if script.after else []
                if not options:
                    waits = [self.config.cluster.slurm.dependency, f"afterany:{after}" if after is not None else None]
                    options = [f"--dependency={','.join(filter(None, waits))}"] if any(waits) else []
                job_id = slurm_commands.submit(str(path), *options)
                jobs[script.name] = JobRecord(script.role, script.name, job_id, SlurmCluster.cluster_type, time.time())
        # The rest of a chain would wait for jobs that never come.
        except BaseException:
            slurm_commands.cancel(job.job_id for job in jobs.values())
            raise
        # Last: without the list the jobs run as well, and `status` reads the files of the run.
        write_jobs(self.storage, list(jobs.values()), SUBMITTED_FILE)
        return list(jobs.values())

    def _path(self, script: Script) -> Path:
        return self.folder.path / f"{script.name}.sh"


def plan_submission(
    config: Config,
    *,
    single_allocation: bool = False,
    offline: bool = False,
    rounds: int = 1,
    explore_jobs: int = 1,
    dry: bool = False,
) -> Submission:
    """Make the scripts of a run. dry: allow SLURM to be unavailable.

    Raises: UserError: an impossible layout; FencedError: the run is running or queued.
    """
    slurm_commands.forget_job()
    if find_cluster(config.cluster.type).is_one_machine:
        config = replace(config, {"cluster.type": SlurmCluster.cluster_type})
    kind = find_cluster(config.cluster.type, config.explorer.plugin_dirs)
    if not issubclass(kind, SlurmCluster | OtherCluster):
        raise UserError(
            f"rftdask submit needs a batch system, and cluster.type is {config.cluster.type}; use rftdask run"
        )
    stages = config.stage_configs()
    storage = open_storage(config.checkpoint_job_dir)
    for number, stage in enumerate(stages):
        check_run(open_storage(stage.checkpoint_job_dir), stage, free=("model.model_path",) if number else ())
    folder, unchecked = SecretsDir.base_of(config, storage), ""
    if issubclass(kind, OtherCluster):
        if offline or single_allocation:
            raise UserError(
                f"--offline and --single-allocation need cluster.type slurm, not {config.cluster.type}; remove them"
            )
        return _elsewhere(kind, config, stages, folder, storage)
    if (offline or single_allocation) and any(stage.cluster.colocate for stage in stages):
        raise UserError(
            "cluster.colocate: --offline and --single-allocation give each role its own nodes; remove these options"
        )
    layout = None
    try:
        _check_not_submitted(storage)
        if offline:
            check_chain(config)
        else:
            layout = SlurmCluster.plan(config, stages)
    except (NotInstalledError, RoleError) as error:
        if not dry:
            raise
        unchecked = str(error)
    if offline:
        scripts = offline_scripts(config, folder, storage, rounds, explore_jobs)
        return Submission(config, storage, folder, scripts, unchecked=unchecked)
    layout = layout or plan_jobs(stages, {role: getattr(config.cluster.slurm, role).cpus for role in ROLES})
    raise_shortages(job_shortages(stages, layout))
    if single_allocation:
        # The number of ranks must match the parts of the job.
        ranks = layout.num_workers(TRAINER_RESOURCE)
        pinned = {"trainer.num_ranks": ranks} if ranks and config.trainer.trainer_strategy != "single" else {}
        config = replace(config, {"cluster.type": "joined", **pinned})
        script = allocation_script(config, layout, folder, storage)
        return Submission(config, storage, folder, (script,), unchecked=unchecked)
    controller = Script(CONTROLLER, CONTROLLER, controller_text(config, folder, storage))
    of_cluster, logs = SecretsDir.of(config, storage), log_folder(storage, folder)
    workers = []
    for role, count, shape in _jobs_of(config, layout):
        text = SlurmCluster.job_script(config, role, count, f"{role}-<number>", of_cluster, logs)
        workers.append(Script(f"{shape.num_jobs} x {role}", role, text))
    return Submission(config, storage, folder, (controller,), tuple(workers), unchecked)


def _elsewhere(
    kind: type[OtherCluster], config: Config, stages: list[Config], folder: SecretsDir, storage: Storage
) -> Submission:
    """Submission on a batch system other than SLURM."""
    _check_not_submitted(storage)
    layout, logs = kind.plan(config, stages), log_folder(storage, folder)
    restarts, path = shlex.quote(str(folder.path / _RESTARTS_FILE)), str(folder.path / CONFIG_FILE)
    python = shlex.quote(config.cluster.python or sys.executable)
    walltime_s = kind.walltime_s(config)
    # These systems have no common way to requeue a job, so the job submits its successor.
    submit_next = f"{python} -m {__name__} {shlex.quote(path)}"
    again = f'{{ echo >>{restarts} && {submit_next} && echo "queued again before the walltime" && exit 0; }}'
    # Nor a common signal before the walltime.
    first = warning(walltime_s - WARNING_S) if walltime_s > 2 * WARNING_S else ""
    host = HostSystem(restarts=f"$(cat {restarts} 2>/dev/null | wc -l)", again=again, cancel="", first=first)
    run = f"{python} {shlex.join(['-m', 'rftdask', 'run', path, *_DRIVER_OPTIONS])}"
    driver = "\n".join(["#!/usr/bin/env bash", _takes_sources(folder), *driver_shell(folder, run, system=host), ""])
    script = kind.controller(config, folder, logs, _drive(folder)).job_script()
    of_cluster, workers = SecretsDir.of(config, storage), []
    for role in ROLES:
        if count := layout.num_workers(role):
            text = kind.job_script(config, role, count, f"{role}-<number>", of_cluster, logs)
            workers.append(Script(f"{count} x {role}", role, text))
    scripts = (Script(CONTROLLER, CONTROLLER, script),)
    return Submission(config, storage, folder, scripts, tuple(workers), driver=driver)


def warning(after_s: float) -> str:
    """Return shell commands that send USR1 to their shell after a delay. The timer ends with the shell, since another
    process may have its number later.
    """
    return "\n".join(
        [
            "set -m  # a process group, so that all of it can be killed",
            f"( sleep {after_s:.0f}; kill -USR1 $$ ) &",
            "warns=$!",
            "trap 'kill -- -$warns 2>/dev/null' EXIT",
        ]
    )


def _drive(folder: SecretsDir) -> str:
    return f"exec bash {shlex.quote(str(folder.path / DRIVER_FILE))}"


def _start_controller(config: Config, storage: Storage) -> JobRecord:
    """Submit and record the controller's job on another system than SLURM. Raises: RoleError: refused."""
    kind = find_cluster(config.cluster.type, config.explorer.plugin_dirs)
    folder = SecretsDir.base_of(config, storage)
    assert issubclass(kind, OtherCluster)
    job = kind.controller(config, folder, log_folder(storage, folder), _drive(folder))
    try:
        asyncio.run(asyncio.wait_for(job.start(), SUBMIT_S))
    except (RuntimeError, TimeoutError, OSError, ValueError) as error:
        raise RoleError(f"{config.cluster.type} refuses the job of the controller: {error}") from error
    record = JobRecord(CONTROLLER, CONTROLLER, str(job.job_id), config.cluster.type, time.time())
    write_jobs(storage, [record], SUBMITTED_FILE)
    return record


def _check_not_submitted(storage: Storage) -> None:
    # Only drivers count, since the next driver takes over jobs of workers.
    jobs = read_jobs(storage, SUBMITTED_FILE)
    # Queued drivers count as well, because the second driver of a run would fail.
    if alive := states_of(jobs):
        drivers = ", ".join(
            f"{job.name} is job {job.job_id}, {alive[job.job_id]}" for job in jobs if job.job_id in alive
        )
        raise FencedError(f"{storage.url} is submitted already: {drivers}; rftdask cancel {storage.url} ends it")


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock. Raises: FencedError: another submit of the run holds it for too long."""
    with path.open("a") as file:

        def try_lock() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                return True
            return True

        if not wait_for(try_lock, PATIENCE_S, _POLL_INTERVAL_S):
            raise FencedError(f"another rftdask submit of this run has held {path} for {PATIENCE_S} s; try again")
        yield


def has_finished(config: Config, sizes: Sequence[Mapping[str, int]]) -> bool:
    """True if a run has finished and nothing is left to do, so that it needs no job.

    Args: sizes: sizes of the tasksets of each stage, by name.
    """
    if read_end(open_storage(config.checkpoint_job_dir)) != "finished":
        return False
    for stage, known in zip(config.stage_configs(), sizes, strict=True):
        storage, steps = open_storage(stage.checkpoint_job_dir), plan_work(stage, known).train_steps
        # total_steps may have been raised, or the number of steps may be unknown.
        if stage.mode not in ("both", "train") or steps is None or read_pointer(storage, CHECKPOINT_POINTER) != steps:
            return False
    return True


def controller_text(config: Config, folder: SecretsDir, storage: Storage) -> str:
    """Script of the controller."""
    run = _rftdask(config, CONTROLLER, "run", str(folder.path / CONFIG_FILE), *_DRIVER_OPTIONS)
    shell = [_takes_sources(folder), *driver_shell(folder, run)]
    logs, job = log_folder(storage, folder), config.cluster.slurm.controller
    return batch_script(config, CONTROLLER, CONTROLLER, job, logs, shell, _driver_asks(config))


def allocation_script(config: Config, layout: Layout, folder: SecretsDir, storage: Storage) -> Script:
    """Script of one job with all roles: a heterogeneous job, or one with equal nodes for sites without heterogeneous
    jobs. Raises: UserError: the roles need different nodes.
    """
    logs, section = log_folder(storage, folder), config.cluster.slurm
    asks, steps, parts, at = list[str](), list[str](), dict[str, JobShape](), 0
    for role, _, each in _jobs_of(config, layout):
        job: JobConfig = getattr(section, role)
        if each.span > 1:
            raise UserError(
                f"cluster.slurm.{role}: an engine would use {each.span} nodes; use rftdask submit without "
                "--single-allocation, or rftdask run in an allocation of salloc"
            )
        shape = parts[role] = JobShape(1, each.num_jobs * each.nodes, each.tasks_per_node)
        if not each.nodes:
            shape = parts[role] = JobShape(1, 0 if section.heterogeneous else 1, each.num_jobs * each.tasks_per_node)
        # Each role has its own nodes; the driver is part 0, or on the first node.
        place = f"--het-group={len(parts)}" if section.heterogeneous else f"--relative={at}"
        at += shape.nodes
        asks += ["hetjob", *asks_for(job, shape)] * section.heterogeneous
        output = f"--output={logs}/{role}-%J-%t.log"
        srun = step(job, shape, place, "--kill-on-bad-exit=0", output, "--open-mode=append")
        work = ("join", str(folder.path / CONFIG_FILE), "--role", role, "--patience", str(PATIENCE_S))
        # In a subshell, because the prologue of a role must not affect the others.
        steps += ["(", *job.prologue, f"exec {_rftdask(config, role, *work, srun=srun)}", ") &"]
    run = _rftdask(config, CONTROLLER, "run", str(folder.path / CONFIG_FILE), *_DRIVER_OPTIONS)
    shell = [_takes_sources(folder), *driver_shell(folder, run, steps)]
    if section.heterogeneous:
        job, shape = section.controller, ONE_TASK
    else:
        job, shape = alike({role: getattr(section, role) for role in parts}, section.controller, parts)
    text = batch_script(config, CONTROLLER, CONTROLLER, job, logs, shell, _driver_asks(config), asks, shape=shape)
    return Script(CONTROLLER, CONTROLLER, text)


def offline_scripts(
    config: Config, folder: SecretsDir, storage: Storage, rounds: int, explore_jobs: int
) -> tuple[Script, ...]:
    """Scripts of alternating jobs: an array of explore jobs, whose first task is the driver and whose others join, then
    a train job. Raises: UserError: the number of explore steps is not known.
    """
    if config.stages:
        raise UserError("rftdask submit --offline creates its own stages; submit a config without `stages`")
    total = make_plan(config).stages[0].explore_steps
    if total is None or total < rounds:
        raise UserError(
            f"rftdask submit --offline divides the explore steps into {rounds} rounds, and "
            f"{'their number is not known' if total is None else f'there are {total}'}; set buffer.total_steps"
        )
    logs, path, scripts = log_folder(storage, folder), str(folder.path / CONFIG_FILE), []
    explore, train = config.cluster.slurm.explorer, config.cluster.slurm.trainer
    of_explorers, of_trainer = (chain_shape(config, role) for role in (EXPLORER_RESOURCE, TRAINER_RESOURCE))
    srun = step(explore, of_explorers) if of_explorers.num_tasks > 1 else ""
    help_with = ("join", path, "mode=explore", "--role", EXPLORER_RESOURCE, "--patience", str(PATIENCE_S))
    work = _rftdask(config, EXPLORER_RESOURCE, *help_with, srun=srun)
    cancelled = shlex.quote(str(folder.path / CANCELLED_FILE))
    help_out = [
        "# All tasks but the first are helpers, which SLURM may start and preempt at any time.",
        f'if [ "$SLURM_ARRAY_TASK_ID" != 0 ]; then [ -e {cancelled} ] || exec {work}; exit; fi',
    ]
    end = 'scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID"  # helpers that have not started'
    engines = f"explorer.rollout_model.engine_num={explore_jobs * of_explorers.num_workers}"
    # The batch system limits the cores of the train job.
    cores = [f"cluster.num_cpus={train.cpus}"] if train.cpus > 1 and config.cluster.num_cpus is None else []
    for number in range(1, rounds + 1):
        # Each round continues the run to a later step.
        run = ("run", path, f"buffer.total_steps={total * number // rounds}", *_DRIVER_OPTIONS)
        drive = _rftdask(config, CONTROLLER, *run, "mode=explore", "cluster.type=joined", engines)
        shell = [_takes_sources(folder), *help_out, *driver_shell(folder, drive, [f"{work} &"], [end])]
        asks, name = (f"--array=0-{explore_jobs - 1}", *_driver_asks(config)), f"explore-{number}"
        text = batch_script(
            config, name, EXPLORER_RESOURCE, explore, logs, shell, asks, number="%A_%a", shape=of_explorers
        )
        after = f"train-{number - 1}" if number > 1 else None
        scripts.append(Script(name, "explore", text, after))
        learn = _rftdask(
            config, TRAINER_RESOURCE, *run, "mode=train", "cluster.type=local", "cluster.node_num=0", *cores
        )
        shell = [_takes_sources(folder), *staging(config), *driver_shell(folder, learn)]
        asks, after = _driver_asks(config), name
        name = f"train-{number}"
        text = batch_script(config, name, TRAINER_RESOURCE, train, logs, shell, asks, shape=of_trainer)
        scripts.append(Script(name, "train", text, after, "_0"))
    return tuple(scripts)


def _takes_sources(folder: SecretsDir) -> str:
    """Shell that makes a job and its children import the submitted sources."""
    return f"export {SUBMITTED}={shlex.quote(str(folder.path / SOURCES_FOLDER))}"


def _jobs_of(config: Config, layout: Layout) -> list[tuple[str, int, JobShape]]:
    """(role, number of workers, jobs) of each role with workers."""
    counts = {role: layout.num_in_jobs(role) for role in ROLES}
    return [(role, count, SlurmCluster.shape(config, role, count)) for role, count in counts.items() if count]


def _dependency(script: Script, job_id: str) -> list[str]:
    if script.after is None:
        return []
    return [f"--dependency=afterok:{job_id}{script.after_task}", "--kill-on-invalid-dep=yes"]


def _driver_asks(config: Config) -> tuple[str, ...]:
    """Options of a driver's job: a signal before the walltime, and mail to the user."""
    mail = config.cluster.slurm.mail
    return (_WARNING, *((f"--mail-user={mail}", "--mail-type=END,FAIL") if mail is not None else ()))


def _rftdask(config: Config, role: str, *arguments: str, srun: str = "") -> str:
    return command_of(config, role, shlex.join(["-m", "rftdask", *arguments]), srun)


if __name__ == "__main__":  # called by a driver's job near its walltime
    queued = load_config(sys.argv[1], was_checked=True)
    _start_controller(queued, open_storage(queued.checkpoint_job_dir))
