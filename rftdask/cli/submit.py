"""`rftdask submit`: the scripts of a run on a batch system, as a pure function of the config, and their submission.

The controller job has the scheduler, the driver and the light roles, and submits the jobs of trainer and explorers.
SLURM restarts it after the loss of its node and near its walltime, and the run continues from storage. With
--single-allocation all roles are steps of one job. With --offline explore and train jobs alternate over the same log.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rftdask.cli.common import AcceptChanges, ConfigFile, Origin, Overrides, load, say, warn, with_run_name
from rftdask.cluster.base import find_cluster
from rftdask.cluster.batch_cluster import BatchCluster, SubmitOptions, check_not_submitted, forget_job, log_folder
from rftdask.cluster.driver_script import PATIENCE_S, SOURCES_FOLDER
from rftdask.cluster.jobs import CANCELLED_FILE, CONFIG_FILE, SUBMITTED_FILE, JobRecord, ScriptPlan, write_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm import NO_REQUEUE, TEMPLATE
from rftdask.config import Config, replace
from rftdask.config.plan import plan_work
from rftdask.driver.memory_estimate import job_shortages, raise_shortages
from rftdask.driver.preflight import check_inputs
from rftdask.errors import FencedError, UserError
from rftdask.processes.poll import wait_for
from rftdask.run.input_fingerprints import InputFingerprints, check_inputs_unchanged, copy_for_jobs
from rftdask.run.run_folder import check_run, read_end
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, read_pointer

_POLL_INTERVAL_S = 0.2


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
    submission = plan_submission(checked, SubmitOptions(single_allocation, offline, rounds, explore_jobs, dry=dry_run))
    if dry_run:
        say(submission.system.render_scripts(submission.folder, submission.plan))
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
    submission.system.check_scripts(submission.plan)
    for job in submission.submit(fingerprints):
        say(f"submitted {job.name} as job {job.job_id}")
        if not submission.system.is_requeued(job.job_id):
            warn((NO_REQUEUE,))
    say(f"the run is {checked.checkpoint_job_dir}; next: rftdask status {checked.checkpoint_job_dir}")


@dataclass(frozen=True)
class Submission:
    """All scripts of a run.

    Example: submission = plan_submission(config); submission.submit()
    """

    config: Config
    system: type[BatchCluster]
    storage: Storage
    folder: SecretsDir
    plan: ScriptPlan

    def submit(self, inputs: Sequence[InputFingerprints] = (), after: str | None = None) -> list[JobRecord]:
        """Write the scripts and copies of the user's sources to the secrets directory and submit the scripts.

        Args: inputs: fingerprints of each stage's inputs; after: job that must end before, in any way.
        Raises: RoleError: a script is refused, and the other jobs are canceled; FencedError: already submitted.
        """
        forget_job()
        if self.config.private:
            self.storage.make_private()
        self.folder.make()
        with _one_at_a_time(self.folder.path / "submit.lock"):
            self.system.record_submitted(self.config, self.folder, self.storage)
            check_not_submitted(self.storage)  # again, under the lock
            # A marker of an earlier `rftdask cancel` would end the driver at once.
            (self.folder.path / CANCELLED_FILE).unlink(missing_ok=True)
            # Resolved, because the user's files may change while the job is queued.
            self.folder.write(CONFIG_FILE, self.config.to_yaml())
            sources = {name: file for stage in inputs for name, file in stage.files.items()}
            folders = [name for stage in self.config.stage_configs() for name in stage.explorer.plugin_dirs]
            copy_for_jobs(sources, folders, self.folder.path / SOURCES_FOLDER)
            log_folder(self.storage, self.folder).mkdir(parents=True, exist_ok=True)
            jobs = self.system.submit_scripts(self.config, self.folder, self.storage, self.plan, after)
            # Last: without the list the jobs run as well, and `status` reads the files of the run.
            write_jobs(self.storage, jobs, SUBMITTED_FILE)
        return jobs


def plan_submission(config: Config, options: SubmitOptions | None = None) -> Submission:
    """Make the scripts of a run. Raises: UserError: an impossible layout; FencedError: the run is running or queued."""
    forget_job()
    kind = find_cluster(config.cluster.type, config.explorer.plugin_dirs)
    if kind.is_one_machine:
        config, kind = replace(config, {"cluster.type": "slurm"}), find_cluster("slurm")
    if not issubclass(kind, BatchCluster):
        raise UserError(
            f"rftdask submit needs a batch system, and cluster.type is {config.cluster.type}; use rftdask run"
        )
    stages = config.stage_configs()
    storage = open_storage(config.checkpoint_job_dir)
    for number, stage in enumerate(stages):
        check_run(open_storage(stage.checkpoint_job_dir), stage, free=("model.model_path",) if number else ())
    folder = SecretsDir.base_of(config, storage)
    config, plan = kind.plan_scripts(config, folder, storage, options or SubmitOptions())
    if plan.layout is not None:
        raise_shortages(job_shortages(stages, plan.layout))
    return Submission(config, kind, storage, folder, plan)


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
