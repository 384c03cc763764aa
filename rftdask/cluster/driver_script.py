"""Shell of a job that drives a run: it forwards signals, and starts the driver again or queues the job again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rftdask.cluster.jobs import CANCELLED_FILE, RETURNED, RETURNS_FILE
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import Config
from rftdask.config.plugins import SUBMITTED
from rftdask.storage.staging import FOLDER, KEEP

SOURCES_FOLDER = "sources"
"""Folder of the copies of the user's sources for the jobs of a run, in its private folder."""
PATIENCE_S = 120
"""Time to wait for a lease of a killed process on another machine, and for a starting scheduler."""
DRIVER_OPTIONS = ("--progress", "plain", "--patience", str(PATIENCE_S), "--exit-with-parent")
"""Options of `rftdask run` in a job."""
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


def driver_shell(
    folder: SecretsDir, run: str, system: HostSystem, beside: Sequence[str] = (), at_end: Sequence[str] = ()
) -> list[str]:
    """Return the shell that runs the driver, the same on all batch systems, and forwards their signals.

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


def walltime_timer(after_s: float) -> str:
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


def takes_sources(folder: SecretsDir) -> str:
    """Return the shell that makes a job and its children import the submitted sources."""
    return f"export {SUBMITTED}={shlex.quote(str(folder.path / SOURCES_FOLDER))}"


def python_of(config: Config) -> str:
    """Return the Python interpreter of the jobs, quoted: cluster.python, or the one of this process."""
    return shlex.quote(config.cluster.python or sys.executable)


def staging(config: Config) -> list[str]:
    """Return the shell that sets the folder for local copies of models and datasets; the node expands its variables."""
    section = config.cluster
    if section.local_cache_dir is None:
        return []
    return [f'export {FOLDER}="{section.local_cache_dir}" {KEEP}={int(section.stage_keep)}']
