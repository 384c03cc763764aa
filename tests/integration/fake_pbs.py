"""Stand-ins for PBS's qsub, qstat and qdel with the same formats: the directives that qsub reads and its output, the
table of `qstat -u`, and the environment of a job. Jobs are processes of this machine and all run at once.

    python fake_pbs.py COMMAND SPOOL ARGUMENT...
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

DIRECTIVES = re.compile(r"#PBS -(?P<option>[NqAleoWrjV]) ?(?P<value>.*)")
SELECT = re.compile(r"select=\d+:ncpus=\d+(:\w+=\w+)*|walltime=\d+:\d\d:\d\d")
HEAD = """
fake: 
                                                            Req'd  Req'd   Elap
Job ID          Username Queue    Jobname    SessID NDS TSK Memory Time  S Time
--------------- -------- -------- ---------- ------ --- --- ------ ----- - -----
"""


def install(folder: Path) -> Path:
    """Create the three commands in a folder; return the folder that records their jobs."""
    folder.mkdir()
    for name in ("qsub", "qstat", "qdel"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} {folder}/spool "$@"\n')
        (folder / name).chmod(0o755)
    return folder / "spool"


def qsub(spool: Path, script: str) -> None:
    text = Path(script).read_text()
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("#PBS"):
            match = DIRECTIVES.fullmatch(line)
            if not match:
                sys.exit(f"qsub: directive error: {line}")
            options.setdefault(match["option"], []).append(match["value"])
    if not all(SELECT.fullmatch(value) for value in options["l"]):
        sys.exit(f"qsub: Illegal attribute or resource value Resource_List: {options['l']}")
    spool.mkdir(exist_ok=True)
    number = 100 + len(list(spool.glob("*.json")))
    copy = spool / f"{number}.SC"
    copy.write_text(text)
    # A job has the variables of PBS and none of the user's environment.
    env = {key: os.environ[key] for key in ("HOME", "PATH", "LANG", "USER") if key in os.environ}
    env |= {"PBS_JOBID": f"{number}.fake", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_QUEUE": options.get("q", ["workq"])[0]}
    with Path(options["o"][0], f"{options['N'][0]}.o{number}").open("ab") as out:
        job = subprocess.Popen(
            ["bash", str(copy)],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    (spool / f"{number}.json").write_text(json.dumps({"pid": job.pid, "name": options["N"][0], "asked": options}))
    print(f"{number}.fake")


def living(spool: Path) -> dict[str, dict[str, object]]:
    found = {}
    for file in spool.glob("*.json"):
        job = json.loads(file.read_text())
        try:
            if psutil.Process(job["pid"]).status() != psutil.STATUS_ZOMBIE:
                found[file.stem] = job
        except psutil.Error:
            continue
    return found


def qstat(spool: Path, option: str, user: str) -> None:
    assert option == "-u" and user
    if jobs := living(spool):
        print(HEAD, end="")
        for number, job in jobs.items():
            print(f"{number + '.fake':<15} {user[:8]:<8} workq    {str(job['name'])[:9] + '*'} {job['pid']:>6}", end="")
            print("   1   1    1gb 01:00 R 00:00")


def qdel(spool: Path, job_id: str) -> None:
    job = living(spool).get(job_id.partition(".")[0])
    if job is None:
        print(f"qdel: Unknown Job Id {job_id}", file=sys.stderr)
        sys.exit(153)
    group = int(str(job["pid"]))
    os.killpg(group, signal.SIGTERM)
    end = time.monotonic() + 10  # kill_delay
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        while psutil.Process(group).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                os.killpg(group, signal.SIGKILL)
            time.sleep(0.05)


if __name__ == "__main__":
    {"qsub": qsub, "qstat": qstat, "qdel": qdel}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
