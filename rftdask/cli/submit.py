"""Submit: the scripts of a run on SLURM, and their submission. What a script says is a pure function of the config.

The controller job has the scheduler, the driver and the light roles; it submits the jobs of the trainer and the
explorers itself. SLURM starts it again after the loss of its node and near its walltime, and it continues from storage.
With one allocation, all roles are steps of one job. The offline chain is jobs that depend on each other:
explore, then train, over the same log, as many rounds as asked for.
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
from rftdask.cluster import slurm
from rftdask.cluster.base import find_cluster
from rftdask.cluster.batch.slurm_script import (
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
from rftdask.cluster.jobqueue import CONTROLLER, SUBMIT_S, OtherCluster, log_folder, states_of, system_of
from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, SUBMITTED_FILE, JobRecord, read_jobs, write_jobs
from rftdask.cluster.layout import EXPLORER_RESOURCE, ROLES, TRAINER_RESOURCE, Layout, plan_jobs
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.cluster.slurm import JobShape
from rftdask.cluster.slurm_cluster import SlurmCluster, chain_shape, check_chain
from rftdask.config import Config, load_config, make_plan, replace
from rftdask.config.plan import plan_work
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import JobConfig
from rftdask.driver.memory_estimate import job_shortages, raise_shortages
from rftdask.driver.preflight import check_inputs
from rftdask.errors import FencedError, NotInstalledError, RoleError, UserError
from rftdask.processes.poll import wait_for
from rftdask.run.input_fingerprints import MadeOf, check_made_of
from rftdask.run.run_folder import check_run, read_end
from rftdask.run.sources import SOURCES_FOLDER, copy_for_jobs
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, read_pointer

WARNING_S = 180
"""Before its walltime SLURM warns a controller, which then writes a checkpoint and is queued again."""
PATIENCE_S = 120
"""Wait for an owner on another machine that was killed a moment ago, and for a scheduler that is starting."""
_DRIVER_OPTIONS = ("--progress", "plain", "--patience", str(PATIENCE_S), "--exit-with-parent")
_LOOK_S = 0.2
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
    made_of = check_made_of(stages, inputs, accept=accept_changes)
    if not offline and has_finished(checked, [stage.sizes for stage in inputs]):
        say(
            f"{checked.checkpoint_job_dir} has finished, so nothing is submitted; raise trainer.total_steps to continue"
        )
        return
    submission.check()
    for job in submission.submit(made_of):
        say(f"submitted {job.name} as job {job.job_id}")
        if not system_of(job).is_requeued(job.job_id):
            warn((NO_REQUEUE,))
    say(f"the run is {checked.checkpoint_job_dir}; next: rftdask status {checked.checkpoint_job_dir}")


@dataclass(frozen=True)
class Script:
    """A batch script and how it hangs together with the others of a submission."""

    name: str
    role: str
    text: str
    after: str | None = None
    """Name of the script that must have ended well before this one starts."""
    after_task: str = ""
    """Suffix of the one task of an array that must have ended well: "_0"; "": all of it."""


@dataclass(frozen=True)
class Submission:
    """Everything that will be submitted.

    Example: submission = plan_submission(config); submission.submit()
    """

    config: Config
    storage: Storage
    folder: PrivateFolder
    scripts: tuple[Script, ...]
    worker_scripts: tuple[Script, ...] = ()
    """Scripts that the controller will submit; here only to be looked at."""
    unchecked: str = ""
    """Why it was not checked against what SLURM has; empty: it was."""
    driver: str = ""
    """Shell that the controller's job runs on other systems than SLURM."""

    def render(self) -> str:
        """The exact scripts, each below what SLURM says to it and the command that submits it."""
        if self.driver:
            shown = [f"# {self.folder.path / DRIVER_FILE}\n{self.driver}"]
            return "\n".join(
                [*(f"# {each.name}\n{each.text}" for each in (*self.scripts, *self.worker_scripts)), *shown]
            )
        parts = [f"# not checked against what SLURM has: {self.unchecked}\n"] * bool(self.unchecked)
        for script in (*self.scripts, *self.worker_scripts):
            options = "".join(f" {shlex.quote(option)}" for option in _dependency(script, f"<job of {script.after}>"))
            by = f"{options} {self._path(script)}" if script in self.scripts else f", by the controller ({script.name})"
            foreseen = "" if self.unchecked else f"# SLURM: {self._foresee(script)}\n"
            parts.append(f"{foreseen}# sbatch{by}\n{script.text}")
        return "\n".join(parts)

    def check(self) -> None:
        """Ask SLURM what it would do with each script. Raises: UserError: it would refuse one, with its words."""
        for script in (*self.scripts, *self.worker_scripts) if not self.driver else ():
            if slurm.is_mistake(told := self._foresee(script)):
                raise UserError(f"SLURM refuses the job of {script.role} (cluster.slurm.{script.role}): {told}")

    def _foresee(self, script: Script) -> str:
        try:
            return slurm.foresee(script.text)
        except (NotInstalledError, RoleError) as error:  # also a limit that will be none when the job comes
            return " ".join(str(error).split())

    def submit(self, made_of: Sequence[MadeOf] = (), after: str | None = None) -> list[JobRecord]:
        """Write the scripts and copies of the user's sources to the run's private folder and submit them.

        made_of: what each stage is made of; after: a job that must have ended, however it did, before any of these
        starts. Raises: RoleError: SLURM refuses a script, the others of the submission are cancelled then;
        FencedError: it has been submitted meanwhile.
        """
        slurm.forget_job()
        if self.config.private:
            self.storage.make_private()
        self.folder.make()
        with _one_at_a_time(self.folder.path / "submit.lock"):
            _check_not_submitted(self.storage)  # once more: somebody else may have done it since
            return self._submit(made_of, after)

    def _submit(self, made_of: Sequence[MadeOf], after: str | None) -> list[JobRecord]:
        # Left by an earlier `rftdask cancel`; a driver that finds it ends at once.
        (self.folder.path / CANCELLED_FILE).unlink(missing_ok=True)
        (self.folder.path / _RESTARTS_FILE).unlink(missing_ok=True)

        # Resolved: the job reads no file of the user's, which may change while it waits.
        self.folder.write(CONFIG_FILE, self.config.to_yaml())
        sources = {name: file for stage in made_of for name, file in stage.files.items()}
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
                job_id = slurm.submit(str(path), *options)
                jobs[script.name] = JobRecord(script.role, script.name, job_id, SlurmCluster.cluster_type, time.time())
        # Half a chain would wait in the queue for jobs that never come.
        except BaseException:
            slurm.cancel(job.job_id for job in jobs.values())
            raise
        # Last: killed before it, the jobs run all the same, and `status` sees the run by its own files.
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
    """The scripts of a run. dry: also where SLURM is not there or does not answer.

    Raises: UserError: an impossible layout; FencedError: it runs or is queued.
    """
    slurm.forget_job()  # what is submitted from within an allocation is not of it
    # What cannot be submitted is told first; then one of three: a chain of jobs, one allocation, or a controller that
    # submits the rest.
    if find_cluster(config.cluster.type).is_one_machine:
        config = replace(config, {"cluster.type": SlurmCluster.cluster_type})
    kind = find_cluster(config.cluster.type, config.explorer.plugin_dirs)
    if not issubclass(kind, SlurmCluster | OtherCluster):
        raise UserError(
            f"cluster.type is {config.cluster.type}, and rftdask submit is for batch systems; use rftdask run"
        )
    stages = config.stage_configs()
    storage = open_storage(config.checkpoint_job_dir)
    for number, stage in enumerate(stages):
        check_run(open_storage(stage.checkpoint_job_dir), stage, free=("model.model_path",) if number else ())
    folder, unchecked = PrivateFolder.base_of(config, storage), ""
    if issubclass(kind, OtherCluster):
        if offline or single_allocation:
            raise UserError(
                f"--offline and --single-allocation are for cluster.type slurm, and it is {config.cluster.type}; leave "
                "them out"
            )
        return _elsewhere(kind, config, stages, folder, storage)
    if (offline or single_allocation) and any(stage.cluster.colocate for stage in stages):
        raise UserError(
            "cluster.colocate: --offline and --single-allocation give each role nodes of its own, where nobody takes "
            "turns; leave them out"
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
        # The run is to find as many ranks as there are parts for.
        ranks = layout.num_workers(TRAINER_RESOURCE)
        pinned = {"trainer.num_ranks": ranks} if ranks and config.trainer.trainer_strategy != "single" else {}
        config = replace(config, {"cluster.type": "joined", **pinned})
        script = allocation_script(config, layout, folder, storage)
        return Submission(config, storage, folder, (script,), unchecked=unchecked)
    controller = Script(CONTROLLER, CONTROLLER, controller_text(config, folder, storage))
    of_cluster, logs = PrivateFolder.of(config, storage), log_folder(storage, folder)
    workers = []
    for role, count, shape in _jobs_of(config, layout):
        text = SlurmCluster.job_script(config, role, count, f"{role}-<number>", of_cluster, logs)
        workers.append(Script(f"{shape.num_jobs} x {role}", role, text))
    return Submission(config, storage, folder, (controller,), tuple(workers), unchecked)


def _elsewhere(
    kind: type[OtherCluster], config: Config, stages: list[Config], folder: PrivateFolder, storage: Storage
) -> Submission:
    """The controller's job, and what it will submit, on another batch system than SLURM."""
    _check_not_submitted(storage)
    layout, logs = kind.plan(config, stages), log_folder(storage, folder)
    restarts, path = shlex.quote(str(folder.path / _RESTARTS_FILE)), str(folder.path / CONFIG_FILE)
    python = shlex.quote(config.cluster.python or sys.executable)
    walltime_s = kind.walltime_s(config)
    # These systems let no job queue itself again in one way, so it submits the next one.
    submit_next = f"{python} -m {__name__} {shlex.quote(path)}"
    again = f'{{ echo >>{restarts} && {submit_next} && echo "queued again before the walltime" && exit 0; }}'
    # Nor do they warn of a walltime in one way.
    first = warning(walltime_s - WARNING_S) if walltime_s > 2 * WARNING_S else ""
    host = HostSystem(restarts=f"$(cat {restarts} 2>/dev/null | wc -l)", again=again, cancel="", first=first)
    run = f"{python} {shlex.join(['-m', 'rftdask', 'run', path, *_DRIVER_OPTIONS])}"
    driver = "\n".join(["#!/usr/bin/env bash", _takes_sources(folder), *driver_shell(folder, run, system=host), ""])
    script = kind.controller(config, folder, logs, _drive(folder)).job_script()
    of_cluster, workers = PrivateFolder.of(config, storage), []
    for role in ROLES:
        if count := layout.num_workers(role):
            text = kind.job_script(config, role, count, f"{role}-<number>", of_cluster, logs)
            workers.append(Script(f"{count} x {role}", role, text))
    scripts = (Script(CONTROLLER, CONTROLLER, script),)
    return Submission(config, storage, folder, scripts, tuple(workers), driver=driver)


def warning(after_s: float) -> str:
    """Return the shell that sends its own shell USR1 after so many seconds, and that ends with it: the number of a
    shell that is gone may be another process's by then.
    """
    return "\n".join(
        [
            "set -m  # a group of its own, which is ended whole",
            f"( sleep {after_s:.0f}; kill -USR1 $$ ) &",
            "warns=$!",
            "trap 'kill -- -$warns 2>/dev/null' EXIT",
        ]
    )


def _drive(folder: PrivateFolder) -> str:
    return f"exec bash {shlex.quote(str(folder.path / DRIVER_FILE))}"


def _start_controller(config: Config, storage: Storage) -> JobRecord:
    """Submit the job that drives a run on another system than SLURM, and note it. Raises: RoleError: it is refused."""
    kind = find_cluster(config.cluster.type, config.explorer.plugin_dirs)
    folder = PrivateFolder.base_of(config, storage)
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
    # Of those that drive the run. Jobs of workers that one has left are taken over by the next.
    jobs = read_jobs(storage, SUBMITTED_FILE)
    # Queued counts, too: of two drivers of one run the second would find the first at work, and fail.
    if alive := states_of(jobs):
        told = ", ".join(f"{job.name} is job {job.job_id}, {alive[job.job_id]}" for job in jobs if job.job_id in alive)
        raise FencedError(f"{storage.url} is submitted already: {told}; rftdask cancel {storage.url} ends it")


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Raises: FencedError: somebody else submits the run, and has not ended in time."""
    with path.open("a") as file:

        def is_ours() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                return True
            return True

        if not wait_for(is_ours, PATIENCE_S, _LOOK_S):
            raise FencedError(f"another rftdask submit of this run has held {path} for {PATIENCE_S} s; try again")
        yield


def has_finished(config: Config, sizes: Sequence[Mapping[str, int]]) -> bool:
    """Whether there is nothing left of a run that ended well; then nobody needs a job for it.

    Args: sizes: of the tasksets of each stage, by name.
    """
    if read_end(open_storage(config.checkpoint_job_dir)) != "finished":
        return False
    for stage, known in zip(config.stage_configs(), sizes, strict=True):
        storage, steps = open_storage(stage.checkpoint_job_dir), plan_work(stage, known).train_steps
        # It may have been given more steps since, or be one whose end is not known beforehand.
        if stage.mode not in ("both", "train") or steps is None or read_pointer(storage, CHECKPOINT_POINTER) != steps:
            return False
    return True


def controller_text(config: Config, folder: PrivateFolder, storage: Storage) -> str:
    """The job that drives the run."""
    run = _rftdask(config, CONTROLLER, "run", str(folder.path / CONFIG_FILE), *_DRIVER_OPTIONS)
    shell = [_takes_sources(folder), *driver_shell(folder, run)]
    logs, job = log_folder(storage, folder), config.cluster.slurm.controller
    return batch_script(config, CONTROLLER, CONTROLLER, job, logs, shell, _driver_asks(config))


def allocation_script(config: Config, layout: Layout, folder: PrivateFolder, storage: Storage) -> Script:
    """All roles in one job, which SLURM grants at once, and no job submits another: a heterogeneous one, or where sites
    have none one whose nodes are all alike. Raises: UserError: the roles ask for different nodes.
    """
    logs, section = log_folder(storage, folder), config.cluster.slurm
    asks, steps, parts, at = list[str](), list[str](), dict[str, JobShape](), 0
    for role, _, each in _jobs_of(config, layout):
        job: JobConfig = getattr(section, role)
        if each.span > 1:
            raise UserError(
                f"cluster.slurm.{role}: an engine would have {each.span} nodes, which is for rftdask submit without "
                "--single-allocation, or for rftdask run in an allocation of salloc"
            )
        shape = parts[role] = JobShape(1, each.num_jobs * each.nodes, each.tasks_per_node)
        if not each.nodes:
            shape = parts[role] = JobShape(1, 0 if section.heterogeneous else 1, each.num_jobs * each.tasks_per_node)
        # Each role has nodes of its own; the driver is part 0, or beside the first of them.
        place = f"--het-group={len(parts)}" if section.heterogeneous else f"--relative={at}"
        at += shape.nodes
        asks += ["hetjob", *asks_for(job, shape)] * section.heterogeneous
        output = f"--output={logs}/{role}-%J-%t.log"
        srun = step(job, shape, place, "--kill-on-bad-exit=0", output, "--open-mode=append")
        work = ("join", str(folder.path / CONFIG_FILE), "--role", role, "--patience", str(PATIENCE_S))
        # In a shell of its own: what the prologue of a role sets is not for the others.
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
    config: Config, folder: PrivateFolder, storage: Storage, rounds: int, explore_jobs: int
) -> tuple[Script, ...]:
    """Explore and train in turns: an array of explore jobs, whose first drives and whose others join while it lasts,
    and a train job after it. Raises: UserError: it is not known how much there is to explore.
    """
    if config.stages:
        raise UserError("rftdask submit --offline makes stages of its own; submit a config without `stages`")
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
        "# The tasks of the array but the first are helpers: they come, go and are preempted as SLURM likes.",
        f'if [ "$SLURM_ARRAY_TASK_ID" != 0 ]; then [ -e {cancelled} ] || exec {work}; exit; fi',
    ]
    end = 'scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID"  # helpers that would come too late'
    engines = f"explorer.rollout_model.engine_num={explore_jobs * of_explorers.num_workers}"
    # The train job is one machine, whose cores the batch system has counted already.
    cores = [f"cluster.num_cpus={train.cpus}"] if train.cpus > 1 and config.cluster.num_cpus is None else []
    for number in range(1, rounds + 1):
        # Each round explores on to a later step of the same run.
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


def _takes_sources(folder: PrivateFolder) -> str:
    """Shell by which a job and what it starts import the sources that were submitted, whatever became of them since."""
    return f"export {SUBMITTED}={shlex.quote(str(folder.path / SOURCES_FOLDER))}"


def _jobs_of(config: Config, layout: Layout) -> list[tuple[str, int, JobShape]]:
    """(role, number of its workers, its jobs) of the roles that have any."""
    counts = {role: layout.num_in_jobs(role) for role in ROLES}
    return [(role, count, SlurmCluster.shape(config, role, count)) for role, count in counts.items() if count]


def _dependency(script: Script, job_id: str) -> list[str]:
    if script.after is None:
        return []
    return [f"--dependency=afterok:{job_id}{script.after_task}", "--kill-on-invalid-dep=yes"]


def _driver_asks(config: Config) -> tuple[str, ...]:
    """Options of a job that drives a run: it is warned of its walltime, and its user is written to."""
    mail = config.cluster.slurm.mail
    return (_WARNING, *((f"--mail-user={mail}", "--mail-type=END,FAIL") if mail is not None else ()))


def _rftdask(config: Config, role: str, *arguments: str, srun: str = "") -> str:
    return command_of(config, role, shlex.join(["-m", "rftdask", *arguments]), srun)


if __name__ == "__main__":  # a driver's job, near its walltime
    queued = load_config(sys.argv[1], was_checked=True)
    _start_controller(queued, open_storage(queued.checkpoint_job_dir))
