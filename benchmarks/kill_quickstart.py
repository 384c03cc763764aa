"""Kill the quickstart with signal 9 at a random moment, also during its start, and repeat the command.

    python benchmarks/kill_quickstart.py [--kills 25] [--seed 0] [--folder DIR] [--quick] [--json FILE]

`python examples/quickstart.py` runs undisturbed once. Then, for each kill, it runs in a new folder; all of its
processes, or only its driver, are killed at a random moment within the duration of the undisturbed run, and the same
command runs again. It must succeed with the same bits of weights as the undisturbed run, a clean audit, and no process
left. The exit code is 1 if one does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from report import Report, make_parser

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"
SHORT = ("stages[0].trainer.total_steps=8", "stages[1].trainer.total_steps=2", "stages[1].trainer.save_interval=1")
DEADLINE_S = 900.0
ORPHANS_S = 60.0
"""Seconds within which the processes of a dead driver must have ended."""
MARK = "RFTDASK_KILLED_QUICKSTART"
"""Variable in the environment of every process of a run, used to find them."""


class Quickstart:
    """The command in a folder, which can be repeated."""

    def __init__(self, folder: Path, overrides: tuple[str, ...]) -> None:
        self.run = folder / "rftdask" / "quickstart"
        self._command = [sys.executable, str(QUICKSTART), *overrides]
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, "RFTDASK_RUNS": str(folder), MARK: self._mark}
        self._output = folder / "output.txt"
        folder.mkdir(parents=True)

    def start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                self._command, stdout=output, stderr=output, env=self._environment, start_new_session=True
            )

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the run."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def finish(self) -> float:
        """Run the command until it succeeds and return the seconds. Raises: SystemExit: it failed."""
        began = time.monotonic()
        code = self.start().wait(DEADLINE_S)
        if code != 0:
            raise SystemExit(f"the quickstart ended with {code}: {self._output.read_text()[-2000:]}")
        return time.monotonic() - began

    def weights(self) -> str:
        """Return the sha256 of the weights of each stage's newest checkpoint."""
        digest = hashlib.sha256()
        for stage in ("warmup", "grpo"):
            step = int((self.run / stage / "latest_checkpointed_iteration.txt").read_text())
            digest.update((self.run / stage / f"global_step_{step}" / "actor" / "model.safetensors").read_bytes())
        return digest.hexdigest()

    def problems(self) -> list[str]:
        """Return the problems that the audit reports, and processes that outlive the run."""
        command = [sys.executable, "-m", "rftdask", "status", str(self.run), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        stages = json.loads(done.stdout)["stages"]
        problems = [f"the audit says of {stage['name']}: {text}" for stage in stages for text in stage["problems"]]
        for stage in stages:
            counts = dict(stage["experiences"])
            if counts.pop("committed", 0) != sum(counts.values()):
                problems.append(f"experiences of {stage['name']} do not add up: {stage['experiences']}")
        return problems + [f"{process.pid} outlives the run: {process.cmdline()[:4]}" for process in self.processes()]


def kill(quickstart: Quickstart, at_s: float, is_driver_alone: bool) -> str:
    """Start the command, kill it after `at_s` seconds, and return how far it had come."""
    driver = quickstart.start()
    time.sleep(at_s)
    done = [step.name for step in sorted(quickstart.run.glob("*/ledger/main/*.json"))]
    if driver.poll() is not None:
        return f"had ended with {driver.returncode}"
    if not is_driver_alone:
        for process in quickstart.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait(DEADLINE_S)
    deadline = time.monotonic() + ORPHANS_S
    while left := quickstart.processes():
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(left)} processes outlive their driver by {ORPHANS_S:.0f} s: {left}")
        time.sleep(0.2)
    return f"after {len(done)} batches"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, default=None, help="folder of the runs, which is kept")
    arguments = parser.parse_args()
    report, rng = Report(arguments), random.Random(arguments.seed)
    overrides, kills = (SHORT, 1) if arguments.quick else ((), arguments.kills)

    with tempfile.TemporaryDirectory(prefix="rftdask-kills-") as temporary:
        folder = arguments.folder or Path(temporary)
        undisturbed = Quickstart(folder / "undisturbed", overrides)
        undisturbed_s, weights = undisturbed.finish(), undisturbed.weights()
        broken = undisturbed.problems()
        again_s = []
        for number in range(1, kills + 1):
            quickstart = Quickstart(folder / f"kill-{number}", overrides)
            at_s, is_driver_alone = rng.uniform(0.0, undisturbed_s), rng.random() < 0.5
            came_to = kill(quickstart, at_s, is_driver_alone)
            again_s.append(quickstart.finish())
            problems = quickstart.problems()
            if quickstart.weights() != weights:
                problems.append("the weights differ")
            broken += [f"kill {number}: {problem}" for problem in problems]
            what = "driver" if is_driver_alone else "all"
            print(f"kill {number}: {what} at {at_s:.1f} s, {came_to}; {problems or 'the same bits'}", flush=True)

    report.add("quickstart, undisturbed", undisturbed_s, "s", less_is_better=True)
    mean_s = sum(again_s) / len(again_s)
    report.add(f"after each of {kills} kills, command repeated (mean)", mean_s, "s", less_is_better=True)
    report.add(
        "kills that lost, doubled or changed something", float(len(broken)), "kills", less_is_better=True, goal=0.0
    )
    report.write()
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
