"""Runs the fast tests many times on a busy machine, and reports every test that failed: make steady N=20.

Each round has another order of the files and another load: 0 to 6 busy loops, low priority, a disk whose fsync is slow,
fewer CPUs. The results are appended to build/steady.jsonl, so that an interrupted command continues; remove the file to
begin again. The table is for CONTRIBUTING.md.
"""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build/steady.jsonl"
DEADLINE_S = 7200.0


@dataclass(frozen=True)
class Load:
    """Load of the machine in a round."""

    order: int
    busy_loops: int
    nice: int
    fsync_s: float
    num_cpus: int

    @classmethod
    def of(cls, number: int) -> "Load":
        cpus = len(os.sched_getaffinity(0))
        return cls(
            order=number,
            busy_loops=6 - number % 7,
            nice=10 * (number % 2),
            fsync_s=0.02 * (number % 3 == 1),
            num_cpus=max(1, cpus - 2) if number % 5 == 4 else cpus,
        )


@contextmanager
def busy(num_loops: int) -> Iterator[None]:
    # A loop ends with this process, however that ends.
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(load: Load, parallel: list[str]) -> dict[str, str]:
    """Run the fast tests once. parallel: options of pytest-xdist.

    Returns: the reason by failed test; {"the session": reason} if it did not end well.
    """
    report = ROOT / "build/steady.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "RFTDASK_TEST_ORDER": str(load.order), "RFTDASK_TEST_FSYNC_S": str(load.fsync_s)}
    command = ["nice", "-n", str(load.nice), sys.executable, "-m", "pytest", "-q", *parallel, f"--junitxml={report}"]
    cpus = sorted(os.sched_getaffinity(0))
    with busy(load.busy_loops):
        os.sched_setaffinity(0, cpus[: load.num_cpus])
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            return {"the session": f"it did not end in {DEADLINE_S:.0f} s"}
        finally:
            os.sched_setaffinity(0, cpus)
    failed = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        for problem in (*case.findall("failure"), *case.findall("error")):
            lines = (problem.get("message") or "").splitlines()
            failed[f"{case.get('classname')}::{case.get('name')}"] = lines[0] if lines else "no message"
    return failed or ({} if ended.returncode == 0 else {"the session": f"exit code {ended.returncode}"})


def table() -> str:
    rounds = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    failed: dict[str, list[str]] = {}
    for result in rounds:
        for test, reason in result["failed"].items():
            failed.setdefault(test, []).append(reason)
    rows = [f"| `{test}` | {len(reasons)} of {len(rounds)} | {reasons[-1]} |" for test, reasons in failed.items()]
    ended = f"{len(rounds)} rounds, {sum(not result['failed'] for result in rounds)} of them green"
    return "\n".join([ended, "", "| test | failed | last reason |", "| --- | --- | --- |", *sorted(rows)])


def main() -> int:
    wanted = int(sys.argv[1])
    RESULTS.parent.mkdir(exist_ok=True)
    done = len(RESULTS.read_text().splitlines()) if RESULTS.exists() else 0
    for number in range(done, wanted):
        load, began = Load.of(number), time.monotonic()
        print(f"==> round {number + 1} of {wanted}: {load}", flush=True)
        result = {**asdict(load), "failed": run(load, sys.argv[2:]), "seconds": round(time.monotonic() - began)}
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
    print(table())
    return int(any(json.loads(line)["failed"] for line in RESULTS.read_text().splitlines()))


if __name__ == "__main__":
    sys.exit(main())
