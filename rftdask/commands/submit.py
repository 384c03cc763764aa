"""Submit: the scripts of a run on SLURM, and their submission. What a script says is a pure function of the config.

The controller job has the scheduler, the driver and the light roles; it submits the jobs of the trainer and the
explorers itself. SLURM starts it again after the loss of its node and near its walltime, and it continues from storage.
With one allocation, all roles are steps of one heterogeneous job. The offline chain is jobs that depend on each other:
explore, then train, over the same log, as many rounds as asked for.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rftdask.cluster import slurm
from rftdask.cluster.base import EXPLORER_RESOURCE, TRAINER_RESOURCE, Layout, find_cluster
from rftdask.cluster.jobqueue import log_folder
from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, SUBMITTED_FILE, JobRecord, read_jobs, write_jobs
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.cluster.slurm_cluster import SlurmCluster, check_chain
from rftdask.cluster.slurm_script import asks_for, batch_script, driver_shell
from rftdask.config import Config, make_plan, replace
from rftdask.config.plugins import SUBMITTED
from rftdask.config.schema.cluster import JobConfig
from rftdask.errors import FencedError, UserError
from rftdask.run.made_of import MadeOf
from rftdask.run.run_folder import check_run
from rftdask.run.sources import SOURCES_FOLDER, copy_for_jobs
from rftdask.storage import Storage, open_storage

WARNING_S = 180
"""Before its walltime SLURM warns a controller, which then writes a checkpoint and is queued again."""
PATIENCE_S = 120
"""Wait for an owner on another machine that was killed a moment ago, and for a scheduler that is starting."""
_DRIVER_OPTIONS = ("--progress", "plain", "--patience", str(PATIENCE_S), "--with-parent")
_CONTROLLER = "controller"
_WARNING = f"--signal=B:USR1@{WARNING_S}"


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

    def render(self) -> str:
        """The exact scripts, each below a line with the command that submits it."""
        parts = []
        for script in self.scripts:
            options = "".join(f" {shlex.quote(option)}" for option in _dependency(script, f"<job of {script.after}>"))
            parts.append(f"# sbatch{options} {self._path(script)}\n{script.text}")
        parts += [f"# sbatch, by the controller ({script.name})\n{script.text}" for script in self.worker_scripts]
        return "\n".join(parts)

    def submit(self, made_of: Sequence[MadeOf] = ()) -> list[JobRecord]:
        """Write the scripts and copies of the user's sources to the run's private folder and submit them.

        made_of: what each stage is made of. Raises: RoleError: SLURM refuses a script, the others of the submission are
        cancelled then.
        """
        slurm.forget_restarts()
        if self.config.private:
            self.storage.make_private()
        self.folder.make()
        # Left by an earlier `rftdask cancel`; a driver that finds it ends at once.
        (self.folder.path / CANCELLED_FILE).unlink(missing_ok=True)

        def write(path: Path, text: str) -> Path:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            return path

        write(self.folder.path / CONFIG_FILE, self.config.to_yaml())
        sources = {name: file for stage in made_of for name, file in stage.files.items()}
        folders = [name for stage in self.config.stage_configs() for name in stage.explorer.plugin_dirs]
        copy_for_jobs(sources, folders, self.folder.path / SOURCES_FOLDER)
        log_folder(self.storage, self.folder).mkdir(parents=True, exist_ok=True)
        jobs: dict[str, JobRecord] = {}
        try:
            for script in self.scripts:
                after = jobs[script.after].job_id if script.after else ""
                path = write(self._path(script), script.text)
                job_id = slurm.submit(str(path), *_dependency(script, after))
                jobs[script.name] = JobRecord(script.role, script.name, job_id, SlurmCluster.cluster_type, time.time())
        # Half a chain would wait in the queue for jobs that never come.
        except BaseException:
            slurm.cancel(job.job_id for job in jobs.values())
            raise
        write_jobs(self.storage, list(jobs.values()), SUBMITTED_FILE)
        return list(jobs.values())

    def _path(self, script: Script) -> Path:
        return self.folder.path / f"{script.name}.sh"


def plan_submission(
    config: Config, *, single_allocation: bool = False, offline: bool = False, rounds: int = 1, explore_jobs: int = 1
) -> Submission:
    """The scripts of a run. Raises: UserError: an impossible layout; FencedError: it runs or is queued."""
    # What cannot be submitted is told first; then one of three: a chain of jobs, one allocation, or a controller that
    # submits the rest.
    if find_cluster(config.cluster.type).is_one_machine:
        config = replace(config, {"cluster.type": SlurmCluster.cluster_type})
    if config.cluster.type != SlurmCluster.cluster_type:
        raise UserError(f"cluster.type is {config.cluster.type}, and rftdask submit is for slurm; use rftdask run")
    stages = config.stage_configs()
    storage = open_storage(config.checkpoint_job_dir)
    for number, stage in enumerate(stages):
        check_run(open_storage(stage.checkpoint_job_dir), stage, free=("model.model_path",) if number else ())
    jobs = [job for job in read_jobs(storage) if job.system == SlurmCluster.cluster_type]
    alive = slurm.states([job.job_id for job in jobs])
    if alive:
        told = ", ".join(f"{job.name} is job {job.job_id}, {alive[job.job_id]}" for job in jobs if job.job_id in alive)
        raise FencedError(f"{storage.url} is submitted already: {told}; rftdask cancel {storage.url} ends it")
    folder = PrivateFolder.base_of(config, storage)
    if offline:
        check_chain(config)
        scripts = offline_scripts(config, folder, storage, rounds, explore_jobs)
        return Submission(config, storage, folder, scripts)
    layout = SlurmCluster.plan(config, stages)
    if single_allocation:
        # The run is to find as many ranks as there are parts for.
        ranks = layout.num_workers(TRAINER_RESOURCE)
        pinned = {"trainer.num_ranks": ranks} if ranks and config.trainer.trainer_strategy != "single" else {}
        config = replace(config, {"cluster.type": "joined", **pinned})
        return Submission(config, storage, folder, (allocation_script(config, layout, folder, storage),))
    controller = Script(_CONTROLLER, _CONTROLLER, controller_text(config, folder, storage))
    workers, of_cluster, logs = [], PrivateFolder.of(config, storage), log_folder(storage, folder)
    for role, count in _workers_of(layout):
        options = SlurmCluster.job_options(config, role, f"{role}-<number>", of_cluster, logs)
        text = SlurmCluster.load_job_class()(**options).job_script()
        workers.append(Script(f"{count} x {role}", role, text))
    return Submission(config, storage, folder, (controller,), tuple(workers))


def controller_text(config: Config, folder: PrivateFolder, storage: Storage) -> str:
    """The job that drives the run."""
    run = _rftdask("run", str(folder.path / CONFIG_FILE), *_DRIVER_OPTIONS)
    shell = [_takes_sources(folder), *driver_shell(folder, run)]
    logs, job = log_folder(storage, folder), config.cluster.slurm.controller
    return batch_script(config, _CONTROLLER, job, logs, shell, (_WARNING,))


def allocation_script(config: Config, layout: Layout, folder: PrivateFolder, storage: Storage) -> Script:
    """All roles in one heterogeneous job: SLURM grants every part of it at once, and no job submits another."""
    logs, path, asks, steps = log_folder(storage, folder), str(folder.path / CONFIG_FILE), list[str](), list[str]()
    for role, count in _workers_of(layout):
        job: JobConfig = getattr(config.cluster.slurm, role)
        # Each role is a part of the job with nodes of its own; part 0 is the driver.
        asks += ["#SBATCH hetjob", *asks_for(job, count)]
        worker = _rftdask("join", path, "--role", role, "--patience", str(PATIENCE_S))
        prologue = "; ".join([*job.prologue, f"exec {worker}"])
        output = shlex.quote(f"{logs}/{role}-%J-%t.log")
        steps.append(
            f"srun --het-group={len(steps) + 1} --ntasks={count} --kill-on-bad-exit=0 --output={output} "
            f"--open-mode=append bash -c {shlex.quote(prologue)} &"
        )
    shell = [_takes_sources(folder), *driver_shell(folder, _rftdask("run", path, *_DRIVER_OPTIONS), steps)]
    text = batch_script(config, _CONTROLLER, config.cluster.slurm.controller, logs, shell, (_WARNING,), asks)
    return Script(_CONTROLLER, _CONTROLLER, text)


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
            f"rftdask submit --offline divides the explore steps into {rounds} rounds, and there are "
            f"{total or 'unknown'}; set buffer.total_steps"
        )
    logs, path, scripts = log_folder(storage, folder), str(folder.path / CONFIG_FILE), []
    explore, train = config.cluster.slurm.explorer, config.cluster.slurm.trainer
    work = _rftdask("join", path, "mode=explore", "--role", EXPLORER_RESOURCE, "--patience", str(PATIENCE_S))
    cancelled = shlex.quote(str(folder.path / CANCELLED_FILE))
    help_out = [
        "# The tasks of the array but the first are helpers: they come, go and are preempted as SLURM likes.",
        f'if [ "$SLURM_ARRAY_TASK_ID" != 0 ]; then [ -e {cancelled} ] || exec {work}; exit; fi',
    ]
    end = 'scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID"  # helpers that would come too late'
    engines = f"explorer.rollout_model.engine_num={explore_jobs}"
    cores = [f"cluster.num_cpus={train.cpus}"] if train.cpus > 1 and config.cluster.num_cpus is None else []
    for number in range(1, rounds + 1):
        # Each round explores on to a later step of the same run.
        run = ("run", path, f"buffer.total_steps={total * number // rounds}", *_DRIVER_OPTIONS)
        drive = _rftdask(*run, "mode=explore", "cluster.type=joined", engines)
        shell = [_takes_sources(folder), *help_out, *driver_shell(folder, drive, [f"{work} &"], [end])]
        array = f"--array=0-{explore_jobs - 1}"
        text = batch_script(config, f"explore-{number}", explore, logs, shell, (array, _WARNING), number="%A_%a")
        after = f"train-{number - 1}" if number > 1 else None
        scripts.append(Script(f"explore-{number}", "explore", text, after))
        learn = _rftdask(*run, "mode=train", "cluster.type=local", "cluster.node_num=0", *cores)
        shell = [_takes_sources(folder), *driver_shell(folder, learn)]
        text = batch_script(config, f"train-{number}", train, logs, shell, (_WARNING,))
        scripts.append(Script(f"train-{number}", "train", text, f"explore-{number}", "_0"))
    return tuple(scripts)


def _takes_sources(folder: PrivateFolder) -> str:
    """Shell by which a job and what it starts import the sources that were submitted, whatever became of them since."""
    return f"export {SUBMITTED}={shlex.quote(str(folder.path / SOURCES_FOLDER))}"


def _workers_of(layout: Layout) -> list[tuple[str, int]]:
    """(role, number of its workers) of the roles that have any."""
    counts = {role: layout.num_workers(role) for role in (TRAINER_RESOURCE, EXPLORER_RESOURCE)}
    return [(role, count) for role, count in counts.items() if count]


def _dependency(script: Script, job_id: str) -> list[str]:
    if script.after is None:
        return []
    return [f"--dependency=afterok:{job_id}{script.after_task}", "--kill-on-invalid-dep=yes"]


def _rftdask(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "rftdask", *arguments])
