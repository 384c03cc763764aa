"""SLURM's batch scripts: the text that sbatch is given, from the directives to the shell that drives a run.

It knows what a script says, and neither when it is submitted (commands/submit.py) nor SLURM's commands (slurm.py).
The scripts of a cluster's workers are written by dask-jobqueue, from the options of slurm_cluster.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rftdask.cluster import slurm
from rftdask.cluster.jobs import CANCELLED_FILE
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.config import Config
from rftdask.config.schema.cluster import JobConfig

MAX_RESTARTS = 100
"""Restarts of one job, for whatever reason: a run that is killed each time must not come back for ever."""


def driver_shell(folder: PrivateFolder, run: str, beside: Sequence[str] = (), at_end: Sequence[str] = ()) -> list[str]:
    """Shell that runs the driver and passes on what SLURM signals: INT and TERM end it with a checkpoint, USR1 (the
    walltime is near) too, and then the job is queued again. After TERM it is not: SLURM knows whether it ends the job
    (scancel) or queues it again (requeue, preemption).
    """
    return [
        f"cancelled={shlex.quote(str(folder.path / CANCELLED_FILE))}",
        # A signal may come before the driver is there: it is noted, and passed on as soon as there is a process.
        "run= again= stop= code=1",
        "trap 'stop=INT; [ -n \"$run\" ] && kill -INT $run' INT",
        "trap 'stop=TERM; [ -n \"$run\" ] && kill -TERM $run' TERM",
        "trap 'stop=INT again=1; [ -n \"$run\" ] && kill -INT $run' USR1",
        'if [ -e "$cancelled" ]; then echo "cancelled before it started"; exit 0; fi',
        "set -m  # else a command in the background ignores SIGINT",
        *beside,
        f"{run} &",
        "run=$!",
        '[ -n "$stop" ] && kill -$stop $run',
        # `wait` ends at a trapped signal, long before the driver does: then it waits again. 127 says that it was
        # collected by the wait before, whose code counts.
        "while :; do",
        "  stop=",
        "  wait $run; now=$?",
        "  [ $now -ne 127 ] && code=$now",
        '  [ -z "$stop" ] && break  # else it was the signal that ended the wait',
        "done",
        # Queued again by itself only near the walltime, and after a kill that nobody asked for. 130 and 143 are INT and
        # TERM.
        f'if [ ! -e "$cancelled" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_RESTARTS} ]; then',
        "  why=",
        '  [ -n "$again" ] && [ $code -eq 130 ] && why="before the walltime"',
        '  [ $code -gt 128 ] && [ $code -ne 130 ] && [ $code -ne 143 ] && why="after it was killed (exit code $code)"',
        '  if [ -n "$why" ]; then echo "queued again $why"; scontrol requeue "$SLURM_JOB_ID"; sleep 60; fi',
        "fi",
        *(f"[ $code -eq 143 ] || {command}" for command in at_end),  # else it may come back
        "exit $code",
    ]


def batch_script(
    config: Config,
    name: str,
    job: JobConfig,
    logs: Path,
    shell: Sequence[str],
    options: Sequence[str],
    more: Sequence[str] = (),
    number: str = "%j",
) -> str:
    """Return the text of a batch script.

    Args:
        options: of sbatch, for this job alone.
        more: directives after its own.
        number: stands for the job's in the name of its log.
    """
    # --requeue lets SLURM start it again after the loss of its node, and append keeps what it had logged before.
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name=rftdask-{name}-{config.name.replace('/', '-')}",
        f"#SBATCH --output={logs}/{name}-{number}.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        *(f"#SBATCH {option}" for option in options),
        *asks_for(job, 1),
        *more,
        "",
        *job.prologue,
        *shell,
    ]
    return "\n".join(lines) + "\n"


def asks_for(job: JobConfig, num_tasks: int) -> list[str]:
    """Return the #SBATCH lines with what `num_tasks` tasks ask for, each of which is a worker."""
    # By core and by task, because each task is a worker of its own; --mem and --gres would be for a node.
    per_cpu = -(-slurm.megabytes(job.memory) // job.cpus)
    options = [f"--ntasks={num_tasks}", f"--cpus-per-task={job.cpus}", f"--mem-per-cpu={per_cpu}M"]
    if num_tasks > 1 and (gpus := slurm.count_gres(job.gres)):
        options.append(f"--gpus-per-task={gpus}")
        job = job.model_copy(update={"gres": None})
    return [f"#SBATCH {option}" for option in (*options, *slurm.directives(job))]
