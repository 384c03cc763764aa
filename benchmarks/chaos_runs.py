"""The runs that benchmarks/chaos.py disturbs: one command on this machine, or jobs of a SLURM on this machine.

Both find the processes of a run by a mark in their environment, wherever they are in the process tree. Neither knows
the expected result of a run.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

import psutil

from rftdask.buffer.batches.ledger import Ledger
from rftdask.cluster.batch_cluster import call
from rftdask.cluster.jobs import JobRecord, read_jobs
from rftdask.cluster.slurm import SlurmCluster
from rftdask.processes.zygote import requester_of
from rftdask.run.run_folder import read_driver, read_end
from rftdask.storage import open_storage
from rftdask.storage.base import numbers_in
from rftdask.synchronizer.manifest import NAME as MANIFEST
from rftdask.synchronizer.published import WEIGHTS_POINTER, read_pointer

MARK = "RFTDASK_CHAOS_RUN"
ENGINE, RANK, DRIVER = "rftdask.engines.server:serve", "rftdask.trainer.rank:serve", "-m rftdask run"
TARGETS = {"explorer worker": ENGINE, "engine": ENGINE, "trainer": RANK, "trainer worker": RANK, "driver": DRIVER}
"""Target of a kill -> text in its command line or, for workers, in that of its child."""
ORPHANS_S = 120.0
"""Seconds within which the processes that a killed driver left behind must have ended."""
SILENCE_S = 300.0
"""Seconds without activity after which a run has failed."""


PHASES = ("starting", "exploring", "training", "publishing", "saving")


class Strike(NamedTuple):
    """One kill."""

    kind: str
    at: float
    """Unix time."""
    job_id: str
    """Job of the victim; empty without a batch system."""
    phase: str
    """What the run was doing, by its files: one of PHASES."""


def phase_of(folder: Path) -> str:
    """Return the phase of a run, by its files. A recorded batch is in training until its weights are published."""
    storage = open_storage(folder)
    driver = read_driver(storage)
    results = [*folder.glob("ledger/main/0*.json"), *folder.glob("experiences/0*/*.parquet")]
    if driver is None or max((file.stat().st_mtime for file in results), default=0.0) < driver["time_s"]:
        return "starting"
    steps = [int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*")]
    if steps and not (folder / f"global_step_{max(steps)}" / MANIFEST).exists():
        return "saving"
    published = read_pointer(storage, WEIGHTS_POINTER) or 0
    if max(numbers_in(storage.list("weights"), "", "/"), default=0) > published:
        return "publishing"
    return "training" if Ledger(storage).last_step() > published else "exploring"


class Run(ABC):
    """A started run and its processes."""

    victims: ClassVar[tuple[str, ...]]
    """Valid kinds of `strike`."""
    look_s: ClassVar[float]
    """Seconds between two polls."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.folder = config.parent / "runs" / "chaos" / config.stem
        self.mark = uuid.uuid4().hex
        self.strikes: list[Strike] = []
        self.began_s = time.time()

    @abstractmethod
    def ended(self) -> str | None:
        """Return None while the run lives, an empty text if it ended well, else the reason."""

    @abstractmethod
    def close(self) -> None:
        """End all processes of the run. Idempotent."""

    @abstractmethod
    def recover(self, kind: str) -> None:
        """Do what the user who started the run must do after a strike of this kind."""

    def strike(self, kind: str, rng: random.Random, wait: Callable[[], object] = lambda: None) -> bool:
        """Kill a random process of the kind with signal 9. Returns: False if none exists at this moment.

        wait: called before the kill, when the victim is known.
        """
        candidates = [process for process in self.living() if TARGETS[kind] in _command_line(process)]
        if not candidates:
            return False
        victim = rng.choice(sorted(candidates, key=lambda process: process.pid))
        try:
            if kind.endswith("worker"):
                victim = psutil.Process(requester_of(victim.cmdline()) or victim.ppid())
            job_id = victim.environ().get("SLURM_JOB_ID", "")
            wait()
            phase = phase_of(self.folder)
            victim.kill()
            self._note(kind, phase, job_id)
        except psutil.Error:
            return False
        return True

    def living(self) -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except psutil.Error:
                continue
        return processes

    def steps_within(self, seconds: float) -> int:
        """Return the number of steps in the ledger after that many seconds."""
        files = (self.folder / "ledger" / "main").glob("*.json")
        return sum(file.stat().st_mtime < self.began_s + seconds for file in files)

    def last_words(self) -> str:
        """Return the last lines of the run's output."""
        path = self.config.with_suffix(".log")
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def is_gone(self) -> bool:
        return not self.living()

    def kill_all(self) -> None:
        for process in self.living():
            try:
                process.kill()
            except psutil.Error:
                continue

    def _note(self, kind: str, phase: str, job_id: str = "") -> None:
        self.strikes.append(Strike(kind, time.time(), job_id, phase))

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.config.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, MARK: self.mark}


class LocalRun(Run):
    """`rftdask run CONFIG`, restarted after its driver was killed."""

    victims = ("explorer worker", "engine", "trainer", "trainer worker", "driver")
    look_s = 0.02

    def __init__(self, config: Path) -> None:
        super().__init__(config)
        self.orphans_s = 0.0
        """Longest lifetime of the processes that a killed driver left."""
        self._log = config.with_suffix(".log").open("ab")
        self._process = self._start()

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"code {code}: see {self._log.name}" * bool(code)

    def strike(self, kind: str, rng: random.Random, wait: Callable[[], object] = lambda: None) -> bool:
        if kind != "driver":
            return super().strike(kind, rng, wait)
        wait()
        # The started process: if the variables of a Dask parent are inherited, Dask gives it another name.
        self._note(kind, phase_of(self.folder))
        self._process.kill()
        return True

    def recover(self, kind: str) -> None:
        if kind == "driver":
            self._process.wait()
            self.orphans_s = max(self.orphans_s, wait_until(self.is_gone, ORPHANS_S, "the end of the orphans"))
            self._process = self._start()

    def close(self) -> None:
        self.kill_all()
        self._process.wait()
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "rftdask", "run", str(self.config), "--progress", "plain"],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )


class SlurmRun(Run):
    """`rftdask submit CONFIG`, once: SLURM and the run must replace whatever is killed."""

    victims = (
        "preemption",
        "requeue",
        "scancel",
        "explorer worker",
        "engine",
        "trainer",
        "trainer job",
        "driver",
        "controller requeue",
    )
    """Kinds of victims; the first three affect an explorer's job."""
    look_s = 0.25

    def __init__(self, config: Path) -> None:
        super().__init__(config)
        self._storage = open_storage(self.folder)
        self._urgent: list[str] = []
        """Jobs that preempted a job of the run."""
        done = subprocess.run(
            [sys.executable, "-m", "rftdask", "submit", str(config)],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)

    def ended(self) -> str | None:
        if SlurmCluster.states([job.job_id for job in self._jobs("controller")]):
            return None
        end = read_end(self._storage)
        return "" if end == "finished" else f"{end}: see {self.folder}/log"

    def recover(self, kind: str) -> None:
        return

    def strike(self, kind: str, rng: random.Random, wait: Callable[[], object] = lambda: None) -> bool:
        if kind in TARGETS:
            return super().strike(kind, rng, wait)
        role = {"trainer job": "trainer", "controller requeue": "controller"}.get(kind, "explorer")
        running = sorted(job_id for job_id, state in self._states(role).items() if state == "RUNNING")
        if not running:
            return False
        victim = rng.choice(running)
        self._note(kind, phase_of(self.folder), victim)
        if kind == "preemption":
            node = call("squeue", "--noheader", "--jobs", victim, "--format=%N").strip()
            options = ("--partition=urgent", f"--nodelist={node}", "--gres=gpu:1", "--time=1", "--output=/dev/null")
            self._urgent.append(call("sbatch", "--parsable", *options, "--wrap", "sleep 1").strip())
            gone: Callable[[], bool] = lambda: self._states(role).get(victim) != "RUNNING"  # noqa: E731
            wait_until(gone, SILENCE_S, f"the preemption of job {victim}", self.look_s)
        elif kind.endswith("requeue"):
            call("scontrol", "requeue", victim)
        else:
            SlurmCluster.cancel(victim)
        return True

    def close(self) -> None:
        SlurmCluster.cancel(*(job.job_id for job in self._jobs("controller")), *self._urgent)
        wait_until(lambda: not self._states("controller"), SILENCE_S, "the end of the controller", self.look_s)
        SlurmCluster.cancel(*(job.job_id for job in self._jobs("")))  # jobs of a driver that had no time to cancel them
        self.kill_all()

    def _jobs(self, role: str) -> list[JobRecord]:
        return [job for job in read_jobs(self._storage) if role in ("", job.role)]

    def _states(self, role: str) -> dict[str, str]:
        return SlurmCluster.states([job.job_id for job in self._jobs(role)])


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str, look_s: float = 0.02) -> float:
    """Return the seconds until the condition holds. Raises: SystemExit: it did not hold in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > deadline_s:
            raise SystemExit(f"{what} did not happen in {deadline_s:.0f} s")
        time.sleep(look_s)
    return time.monotonic() - began


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


# ---- absence of explorers, from the driver's log


class Away(NamedTuple):
    """Seconds during which an explorer was absent."""

    total_s: float
    """Seconds from the submission of its job, or from a strike at it, until its worker or a replacement had joined."""
    own_s: float
    """Seconds without SLURM's part: the time from the submission of a job, or from its end, until its script began."""


class Recoveries(NamedTuple):
    starts: list[Away]
    by_kind: dict[str, list[Away]]


def read_recoveries(run: Run) -> Recoveries:
    """Read the recoveries that a strike at the controller did not interrupt."""
    text = "".join(path.read_text() for path in sorted((run.folder / "log").glob("driver.log*"), reverse=True))
    jobs = "".join(path.read_text() for path in (run.folder / "log").glob("explorer-*.log"))
    began = sorted((float(at), job) for job, at in re.findall(r"^job (\d+) begins at ([\d.]+)$", jobs, re.MULTILINE))
    submitted = [(at, job) for at, job in _events(text, r"submitted job (\d+) \(explorer-")]
    joined = [(at, job) for at, job in _events(text, r"worker explorer-\d+-(\d+)-\d+-\d+-\d+ .*joined")]
    starts = [
        Away(end - at, end - (_last(began, job, at, end) or at))
        for at, job in submitted
        if (end := _next(joined, job, at)) is not None
    ]
    by_kind: dict[str, list[Away]] = {}
    for strike in run.strikes:
        job_id, slurms_s = strike.job_id, strike.at
        if strike.kind == "scancel":
            slurms_s, job_id = next(((at, job) for at, job in submitted if at > strike.at), (strike.at, ""))
        elif strike.kind not in ("preemption", "requeue", "explorer worker"):
            continue
        end = _next(joined, job_id, strike.at)
        if end is not None and not any(
            strike.at < other.at < end and other.kind in ("driver", "controller requeue") for other in run.strikes
        ):
            # From here SLURM had the job until its script began; a killed worker restarts within its job.
            again_s = _last(began, job_id, slurms_s, end) or slurms_s
            by_kind.setdefault(strike.kind, []).append(Away(end - strike.at, end - strike.at - (again_s - slurms_s)))
    return Recoveries(starts, by_kind)


def _events(text: str, pattern: str) -> Iterator[tuple[float, str]]:
    for line in text.splitlines():
        if match := re.search(pattern, line):
            yield datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp(), match.group(1)


def _next(events: list[tuple[float, str]], job_id: str, after: float) -> float | None:
    return next((at for at, job in events if job == job_id and at > after), None)


def _last(events: list[tuple[float, str]], job_id: str, after: float, before: float) -> float | None:
    return max((at for at, job in events if job == job_id and after < at < before), default=None)


def render(recoveries: Recoveries) -> str:
    lines = []
    for name, what in (("total_s", "in all"), ("own_s", "without SLURM's part")):
        start_s = statistics.median(getattr(away, name) for away in recoveries.starts)
        parts = [f"{what}: an explorer's job starts in {start_s:.1f} s ({len(recoveries.starts)})"]
        for kind, cases in sorted(recoveries.by_kind.items()):
            back_s = statistics.median(getattr(away, name) for away in cases)
            parts.append(f"back from {kind} in {back_s:.1f} s ({back_s / start_s:.2f} of a start, {len(cases)})")
        lines.append("; ".join(parts))
    return "\n".join(lines)
