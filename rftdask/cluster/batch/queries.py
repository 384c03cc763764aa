"""Queries: what PBS, LSF, Grid Engine, OAR and HTCondor say of a user's jobs, by one command for all of them.

It reads what they print. Of Grid Engine that was recorded, and PBS' table was read from SLURM's commands of Torque; the
forms of the others are written down from what is known of them.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rftdask.cluster import slurm
from rftdask.errors import NotInstalledError, RoleError


@dataclass(frozen=True)
class Query:
    """How a batch system is asked, and how it answers."""

    command: tuple[str, ...]
    row: str
    """Pattern of the line of a job, with groups `id` and `state`."""
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    stuck: tuple[str, ...] = ()
    """Of a job that nobody but its user gets going again."""
    nothing: str = "\0"
    """In what it says, and fails, where the user has no job."""

    def states(self, job_ids: Sequence[str]) -> dict[str, str] | None:
        """PENDING or RUNNING, of those that have not ended; None: there is no such command here.

        Raises: RoleError: it fails, which says nothing of the jobs.
        """
        if not job_ids:
            return {}
        try:
            told = slurm.call(*(part.format(user=getpass.getuser()) for part in self.command))
        except NotInstalledError:
            return None
        except RoleError as error:
            if self.nothing not in str(error):
                raise
            told = ""
        found = self.read(told)
        return {job_id: found[job_id] for job_id in job_ids if job_id in found}

    def read(self, told: str) -> dict[str, str]:
        """State by number of job, from what the command printed."""
        found = {}
        for row in re.finditer(self.row, told, re.MULTILINE):
            state = row["state"]
            if state in self.running:
                found[row["id"]] = "RUNNING"
            elif state in (*self.waiting, *self.stuck):
                found[row["id"]] = f"PENDING ({state})"
        return found

    def never_runs(self, state: str) -> bool:
        """Whether a job in this state (`states`) waits until its user does something."""
        return state in {f"PENDING ({stuck})" for stuck in self.stuck}


PBS = Query(
    ("qstat", "-u", "{user}"),
    r"^(?P<id>\d+)\S*\s+\S+\s.*\s(?P<state>[A-Z])\s+\S+\s*$",
    waiting=("Q", "H", "W", "T"),
    running=("R", "E", "S", "B"),
)
"""OpenPBS, PBS Pro and Torque print the same table for a user; what has ended (C, F, X) is not alive."""
LSF = Query(
    ("bjobs", "-noheader", "-o", "jobid stat"),
    r"^(?P<id>\d+)\s+(?P<state>[A-Z]+)\s*$",
    waiting=("PEND", "PSUSP", "WAIT", "PROV"),
    running=("RUN", "SSUSP", "USUSP", "UNKWN"),
    nothing="No unfinished job found",
)
SGE = Query(
    ("qstat", "-u", "{user}"),
    r"^\s*(?P<id>\d+)\s+[\d.]+\s+\S+\s+\S+\s+(?P<state>[A-Za-z]+)\s",
    waiting=("qw", "hqw", "hRwq", "Rq"),
    running=("r", "t", "Rr", "Rt", "s", "S", "T", "dr", "dt"),
    stuck=("Eqw", "Ehqw"),
)
OAR = Query(
    ("oarstat", "-u", "{user}"),
    r"^(?P<id>\d+)\s.*?\s(?P<state>[A-Zt])\s",
    waiting=("W", "H", "t"),
    running=("L", "R", "S", "F"),
)
HTCONDOR = Query(
    ("condor_q", "-autoformat:j", "JobStatus"),
    r"^(?P<id>\d+\.\d+)\s+(?P<state>\d)\s*$",
    waiting=("1",),
    running=("2", "6", "7"),
    stuck=("5",),  # held: it has failed to start, or its user holds it
)
