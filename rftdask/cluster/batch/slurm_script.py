"""SLURM's batch scripts: the text that sbatch is given, from the directives to the shell that drives a run. All are
made by one template, which a site may extend.

It knows what a script says, and neither when it is submitted (cli/submit.py, slurm_cluster.py) nor SLURM's
commands (slurm.py).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rftdask.cluster import slurm
from rftdask.cluster.jobs import CANCELLED_FILE, JOB_PREFIX, RETURNED, RETURNS_FILE
from rftdask.cluster.secrets_folder import PrivateFolder
from rftdask.cluster.slurm import JobShape
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
"""Of Jinja, named job.sh for those that extend it."""
NO_REQUEUE = (
    "SLURM does not queue this job again: before its walltime the run writes a checkpoint and ends, and rftdask submit "
    "continues it"
)
MAX_RESTARTS = 100
"""Restarts of one job, for whatever reason: a run that is killed each time must not come back for ever."""


@dataclass(frozen=True)
class HostSystem:
    """What the shell that runs a driver says to the batch system of its job."""

    restarts: str
    """Expands to how often the job was queued again."""
    again: str
    """Queues it again; fails where that is refused."""
    cancel: str
    """Says that its job was cancelled, where books tell that from a failure; empty: nothing does."""
    first: str = ""
    """What is done at the start."""
    queued: str = "false"
    """Succeeds, once the job is told to end, if it is queued again by who tells it."""


ON_SLURM = HostSystem(
    restarts="${SLURM_RESTART_COUNT:-0}",
    again='scontrol requeue "$SLURM_JOB_ID"',
    cancel='scancel --quiet "$SLURM_JOB_ID" && sleep 60',
    # Told at the start, and not when the walltime comes.
    first='case "$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null)" in\n'
    f'  *" Requeue=0 "*) echo "warning: {NO_REQUEUE}" >&2 ;;\nesac',
    # SLURM counts a requeue, also one by preemption, before it signals.
    queued='scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null'
    ' | grep -q " Restarts=$((${SLURM_RESTART_COUNT:-0} + 1)) "',
)


def driver_shell(
    folder: PrivateFolder,
    run: str,
    beside: Sequence[str] = (),
    at_end: Sequence[str] = (),
    system: HostSystem = ON_SLURM,
) -> list[str]:
    """Shell that runs the driver and passes on what SLURM signals: INT and TERM end it with a checkpoint, USR1 (the
    walltime is near) too, and then the job is queued again, to find those of its workers as it left them. After TERM
    it is not: SLURM knows whether it ends the job (scancel) or queues it again (requeue, preemption), and its workers'
    jobs stay in the latter. A driver that is killed is started again here, without a queue.
    """
    return [
        f"cancelled={shlex.quote(str(folder.path / CANCELLED_FILE))}",
        f"returns={shlex.quote(str(folder.path / RETURNS_FILE))}",
        'rm -f "$returns"',
        f'may_return() {{ [ ! -e "$cancelled" ] && [ "{system.restarts}" -lt {MAX_RESTARTS} ]; }}',
        # A signal may come before the driver is there: it is noted, and passed on as soon as there is a process.
        "run= again= asked= stop= code=1 kills=0",
        "trap 'asked=1 stop=INT; [ -n \"$run\" ] && kill -INT $run' INT",
        # Where the driver finds the file as it ends, it leaves the jobs of its workers alone.
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
        # `wait` ends at a trapped signal, long before the driver does: then it waits again. 127 says that it was
        # collected by the wait before, whose code counts.
        "  while :; do",
        "    stop=",
        "    wait $run; now=$?",
        "    [ $now -ne 127 ] && code=$now",
        '    [ -z "$stop" ] && break  # else it was the signal that ended the wait',
        "  done",
        # 130 and 143 are INT and TERM, of which it ends by itself.
        '  [ $code -gt 128 ] && [ $code -ne 130 ] && [ $code -ne 143 ] && [ -z "$asked" ] || break',
        f"  [ $kills -lt {MAX_RESTARTS} ] && may_return || break",
        "  kills=$((kills + 1))",
        '  echo "started again after it was killed (exit code $code)"',
        "done",
        'if [ -n "$again" ] && [ $code -gt 128 ] && [ $code -ne 143 ] && may_return; then',
        f'  if {system.again}; then echo "queued again before the walltime"; sleep 60',
        '  else echo "error: this job is not queued again; submit the run again to go on" >&2; fi',
        "fi",
        *(f"[ $code -eq 143 ] || {command}" for command in at_end),  # else it may come back
        # What somebody cancelled is CANCELLED in SLURM's books too, and not FAILED by its exit code.
        *([f'if [ -e "$cancelled" ] && [ $code -eq 130 ]; then {system.cancel}; fi'] * bool(system.cancel)),
        "exit $code",
    ]


def staging(config: Config) -> list[str]:
    """Return the shell that says where on its node a job puts models and datasets; its variables are the node's."""
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
        name: of the job and its log.
        role: of what it runs.
        options: of sbatch, for this job alone.
        more: directives after its own.
        number: stands for the job's in the name of its log.
    Raises: UserError: the site's template fails.
    """
    # --requeue lets SLURM start it again after the loss of its node, and append keeps what it had logged before.
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
    """Return the command by which a job starts a process of the run: Python with `arguments`, as a shell reads them.

    Args: srun: before it where it is to be several tasks. Raises: UserError: the site's template fails.
    """
    python = shlex.quote(config.cluster.python or sys.executable)
    told = {"python": python, "arguments": arguments, "command": f"{python} {arguments}", "srun": srun}
    return " ".join(_render(config, role, **told).split("\n")).strip()


def _render(config: Config, role: str, **values: Any) -> str:
    template = config.cluster.slurm.template
    own = {} if template is None else {"site": template}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({"job.sh": TEMPLATE, **own}),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        found = environment.get_template("site" if own else "job.sh")
        return found.render({"command": "", "srun": "", "run": config.name, "role": role, **values})
    except jinja2.TemplateError as error:
        raise UserError(f"cluster.slurm.template: {type(error).__name__}: {error}") from error


def asks_for(job: JobConfig, shape: JobShape) -> list[str]:
    """Return the directives with what a job of this shape asks for, each of whose tasks is a worker."""
    # By core and by task, because each task is a worker of its own. A whole node has all of its cores, and by core it
    # would have to have as much memory for each of them; 0 is what it has.
    by_core = f"--mem-per-cpu={-(-slurm.megabytes(job.memory) // job.cpus)}M"
    options = (*_places(shape), f"--cpus-per-task={job.cpus}", "--mem=0" if job.exclusive else by_core)
    return [*options, *slurm.directives(job)]


def alike(
    jobs: Mapping[str, JobConfig], controller: JobConfig, parts: Mapping[str, JobShape]
) -> tuple[JobConfig, JobShape]:
    """Return what one job asks for that has the nodes of all parts: each has what the part that needs most has of one.

    Args: all by role; `controller` says where the job runs and for how long. Raises: UserError: GPUs differ.
    """
    if len({(job.gres, job.gpus_per_node) for job in jobs.values()}) > 1:
        told = ", ".join(f"cluster.slurm.{role}: {job.gres or job.gpus_per_node}" for role, job in jobs.items())
        raise UserError(
            f"one job that is not heterogeneous has nodes that are all alike (cluster.slurm.heterogeneous), and GPUs "
            f"differ: {told}; ask for the same"
        )
    one = next(iter(jobs.values()))
    tasks = {role: shape.tasks_per_node for role, shape in parts.items()}
    cpus = max(job.cpus * tasks[role] for role, job in jobs.items())
    memory = max(slurm.megabytes(job.memory) * tasks[role] for role, job in jobs.items())
    job = controller.model_copy(
        update={
            **{"cpus": cpus, "memory": f"{memory}MiB", "gres": one.gres, "gpus_per_node": one.gpus_per_node},
            **{"exclusive": any(job.exclusive for job in jobs.values())},
            **{"constraint": controller.constraint or one.constraint},
        }
    )
    return job, JobShape(1, sum(shape.nodes for shape in parts.values()), 1)


def step(job: JobConfig, shape: JobShape, *options: str) -> str:
    """Return the command before which a command is one that all tasks of a job run, each of which sees all GPUs of its
    node: of several each takes its own (processes/gpus.py), and NCCL finds the way between them.
    """
    # What srun would read of its job's environment differs between its versions, so all is said. MPI is nobody's here.
    # Nothing of GPUs: --gpus-per-task would hide those of the neighbors, and with --gpu-bind=none SLURM 22.05 tells
    # several tasks of a node of none.
    return shlex.join(["srun", *options, *_places(shape), f"--cpus-per-task={job.cpus}", "--mpi=none"])


def _places(shape: JobShape) -> list[str]:
    if not shape.nodes:
        return [f"--ntasks={shape.num_tasks}"]
    return [f"--nodes={shape.nodes}", f"--ntasks={shape.num_tasks}", f"--ntasks-per-node={shape.tasks_per_node}"]
