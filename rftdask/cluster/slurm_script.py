"""Text of SLURM's batch scripts, from the directives to the shell of the driver. Sites may extend the template."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rftdask.cluster import slurm_commands
from rftdask.cluster.jobs import CANCELLED_FILE, JOB_PREFIX, RETURNED, RETURNS_FILE
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm_commands import JobShape
from rftdask.config import Config
from rftdask.config.schema.cluster import JobConfig
from rftdask.errors import UserError
from rftdask.storage.staging import FOLDER, KEEP

ONE_TASK = JobShape(1, 0, 1)
TEMPLATE = """\
{#- Every script of a run on SLURM is made by this template, and each command in it by its block `command`. To change
them, extend it as cluster.slurm.template; for a container, say:

    {% extends "job.sh" %}
    {% block command %}{{ srun }} {{ "apptainer exec --nv IMAGE " if role != "controller" }}{{ command }}{% endblock %}

role      of the job or command: controller (which drives the run), trainer, explorer
srun      what starts a command as tasks of a job, where it has several; else empty
command   python, an interpreter, and arguments, what it runs
run       the name of the run
-#}
{% if command -%}
{% block command %}{{ srun }} {{ command }}{% endblock %}

{%- else -%}
#!/usr/bin/env bash
{% block directives %}
{% for directive in directives %}
#SBATCH {{ directive }}
{% endfor %}
{% endblock %}

{% block prologue %}
{% for line in prologue %}
{{ line }}
{% endfor %}
{% endblock %}
{% block shell %}
{{ shell }}
{% endblock %}
{% endif %}
"""
"""Jinja template, named job.sh for templates that extend it."""
NO_REQUEUE = (
    "SLURM does not requeue this job: before its walltime the run writes a checkpoint and ends, and rftdask submit "
    "continues it"
)
MAX_RESTARTS = 100
"""Restarts of a job for any reason, so that a failing run does not restart forever."""


@dataclass(frozen=True)
class HostSystem:
    """Shell commands of a batch system for the script of the driver."""

    restarts: str
    """Number of restarts of the job."""
    again: str
    """Requeue the job; fails if that is not possible."""
    cancel: str
    """Mark the job as canceled in the accounting; empty: not possible."""
    first: str = ""
    """Run at the start."""
    queued: str = "false"
    """Succeeds after SIGTERM if the batch system requeues the job."""


ON_SLURM = HostSystem(
    restarts="${SLURM_RESTART_COUNT:-0}",
    again='scontrol requeue "$SLURM_JOB_ID"',
    cancel='scancel --quiet "$SLURM_JOB_ID" && sleep 60',
    # A warning at the start, not at the walltime.
    first='case "$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null)" in\n'
    f'  *" Requeue=0 "*) echo "warning: {NO_REQUEUE}" >&2 ;;\nesac',
    # SLURM counts a requeue before it signals.
    queued='scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null'
    ' | grep -q " Restarts=$((${SLURM_RESTART_COUNT:-0} + 1)) "',
)


def driver_shell(
    folder: SecretsDir,
    run: str,
    beside: Sequence[str] = (),
    at_end: Sequence[str] = (),
    system: HostSystem = ON_SLURM,
) -> list[str]:
    """Shell that runs the driver and forwards SLURM's signals.

    INT, TERM and USR1 (near the walltime) end the driver with a checkpoint. After USR1 the shell requeues the job, and
    the jobs of workers stay. After TERM the jobs of workers stay only if SLURM requeues the job (requeue, preemption,
    not scancel). A killed driver is started again in the same job.
    """
    return [
        f"cancelled={shlex.quote(str(folder.path / CANCELLED_FILE))}",
        f"returns={shlex.quote(str(folder.path / RETURNS_FILE))}",
        'rm -f "$returns"',
        f'may_return() {{ [ ! -e "$cancelled" ] && [ "{system.restarts}" -lt {MAX_RESTARTS} ]; }}',
        # A signal that comes before the driver starts is forwarded later.
        "run= again= asked= stop= code=1 kills=0",
        "trap 'asked=1 stop=INT; [ -n \"$run\" ] && kill -INT $run' INT",
        # With this file the ending driver leaves the jobs of its workers.
        f"queued() {{ {system.queued}; }}",
        'trap \'asked=1 stop=TERM; [ -n "$run" ] && kill -TERM $run; may_return && queued && touch "$returns"\' TERM',
        'trap \'asked=1 stop=INT again=1; may_return && touch "$returns"; [ -n "$run" ] && kill -INT $run\' USR1',
        'if [ -e "$cancelled" ]; then echo "cancelled before it started"; exit 0; fi',
        *filter(None, [system.first]),
        "set -m  # else a command in the background ignores SIGINT",
        *beside,
        "while :; do",
        f'  [ "$(({system.restarts} + kills))" -eq 0 ] || export {RETURNED}=1',
        f"{run} &",
        "  run=$!",
        '  [ -n "$stop" ] && kill -$stop $run',
        # A trapped signal interrupts `wait`, which is then repeated. 127: the wait before has the exit code.
        "  while :; do",
        "    stop=",
        "    wait $run; now=$?",
        "    [ $now -ne 127 ] && code=$now",
        '    [ -z "$stop" ] && break  # else it was the signal that ended the wait',
        "  done",
        # 130 and 143: the driver ended after INT or TERM.
        '  [ $code -gt 128 ] && [ $code -ne 130 ] && [ $code -ne 143 ] && [ -z "$asked" ] || break',
        f"  [ $kills -lt {MAX_RESTARTS} ] && may_return || break",
        "  kills=$((kills + 1))",
        '  echo "started again after it was killed (exit code $code)"',
        "done",
        'if [ -n "$again" ] && [ $code -gt 128 ] && [ $code -ne 143 ] && may_return; then',
        f'  if {system.again}; then echo "queued again before the walltime"; sleep 60',
        '  else echo "error: this job cannot be requeued; submit the run again to continue" >&2; fi',
        "fi",
        *(f"[ $code -eq 143 ] || {command}" for command in at_end),  # else it may be requeued
        # A canceled job is CANCELLED in SLURM's accounting, not FAILED by its exit code.
        *([f'if [ -e "$cancelled" ] && [ $code -eq 130 ]; then {system.cancel}; fi'] * bool(system.cancel)),
        "exit $code",
    ]


def staging(config: Config) -> list[str]:
    """Shell that sets the folder for local copies of models and datasets; the node expands its variables."""
    section = config.cluster
    if section.local_cache_dir is None:
        return []
    return [f'export {FOLDER}="{section.local_cache_dir}" {KEEP}={int(section.stage_keep)}']


def batch_script(
    config: Config,
    name: str,
    role: str,
    job: JobConfig,
    logs: Path,
    shell: Sequence[str],
    options: Sequence[str] = (),
    more: Sequence[str] = (),
    number: str = "%j",
    shape: JobShape = ONE_TASK,
) -> str:
    """Return the text of a batch script.

    Args:
        name: name of the job and its log.
        role: role of its command.
        options: options of sbatch for this job.
        more: further directives.
        number: pattern of the job id in the name of the log.
    Raises: UserError: the site's template fails.
    """
    # --requeue allows a restart after the loss of a node, and append keeps the log of earlier starts.
    directives = [
        f"--job-name={JOB_PREFIX}{name}-{config.name.replace('/', '-')}",
        f"--output={logs}/{name}-{number}.log",
        "--open-mode=append",
        "--requeue",
        *options,
        *asks_for(job, shape),
        *more,
    ]
    return _render(config, role, directives=directives, prologue=job.prologue, shell="\n".join(shell))


def command_of(config: Config, role: str, arguments: str, srun: str = "") -> str:
    """Return the shell command of a process of the run: Python with `arguments`.

    Args: srun: prefix for several tasks. Raises: UserError: the site's template fails.
    """
    python = shlex.quote(config.cluster.python or sys.executable)
    values = {"python": python, "arguments": arguments, "command": f"{python} {arguments}", "srun": srun}
    return " ".join(_render(config, role, **values).split("\n")).strip()


def _render(config: Config, role: str, **values: Any) -> str:
    template = config.cluster.slurm.template
    site = {} if template is None else {"site": template}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({"job.sh": TEMPLATE, **site}),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        script = environment.get_template("site" if site else "job.sh")
        return script.render({"command": "", "srun": "", "run": config.name, "role": role, **values})
    except jinja2.TemplateError as error:
        raise UserError(f"cluster.slurm.template: {type(error).__name__}: {error}") from error


def asks_for(job: JobConfig, shape: JobShape) -> list[str]:
    """Return the directives with the resources of a job, each of whose tasks is a worker."""
    # By core and task, because each task is a worker. A whole node has more cores, so it gets all of its memory (0).
    by_core = f"--mem-per-cpu={-(-slurm_commands.megabytes(job.memory) // job.cpus)}M"
    options = (*_places(shape), f"--cpus-per-task={job.cpus}", "--mem=0" if job.exclusive else by_core)
    return [*options, *slurm_commands.directives(job)]


def alike(
    jobs: Mapping[str, JobConfig], controller: JobConfig, parts: Mapping[str, JobShape]
) -> tuple[JobConfig, JobShape]:
    """Return one job with the nodes of all parts, each as large as the largest.

    Args: all by role; `controller` has the partition and walltime. Raises: UserError: GPUs differ.
    """
    if len({(job.gres, job.gpus_per_node) for job in jobs.values()}) > 1:
        requests = ", ".join(f"cluster.slurm.{role}: {job.gres or job.gpus_per_node}" for role, job in jobs.items())
        raise UserError(
            f"all nodes of a job that is not heterogeneous are equal (cluster.slurm.heterogeneous), and GPUs differ: "
            f"{requests}; request the same"
        )
    one = next(iter(jobs.values()))
    tasks = {role: shape.tasks_per_node for role, shape in parts.items()}
    cpus = max(job.cpus * tasks[role] for role, job in jobs.items())
    memory = max(slurm_commands.megabytes(job.memory) * tasks[role] for role, job in jobs.items())
    job = controller.model_copy(
        update={
            **{"cpus": cpus, "memory": f"{memory}MiB", "gres": one.gres, "gpus_per_node": one.gpus_per_node},
            **{"exclusive": any(job.exclusive for job in jobs.values())},
            **{"constraint": controller.constraint or one.constraint},
        }
    )
    return job, JobShape(1, sum(shape.nodes for shape in parts.values()), 1)


def step(job: JobConfig, shape: JobShape, *options: str) -> str:
    """Return the srun prefix of a command that all tasks of a job run.

    Each task sees all GPUs of its node and claims its own (processes/gpus.py), so NCCL can connect them.
    """
    # All options are explicit, because versions of srun read the job's environment differently. No GPU options:
    # --gpus-per-task hides the GPUs of other tasks, and with --gpu-bind=none SLURM 22.05 hides all GPUs if a node has
    # several tasks.
    return shlex.join(["srun", *options, *_places(shape), f"--cpus-per-task={job.cpus}", "--mpi=none"])


def _places(shape: JobShape) -> list[str]:
    if not shape.nodes:
        return [f"--ntasks={shape.num_tasks}"]
    return [f"--nodes={shape.nodes}", f"--ntasks={shape.num_tasks}", f"--ntasks-per-node={shape.tasks_per_node}"]
