#!/usr/bin/env bash
# Expected: the environment of a running process can be read from outside, by ps, psutil or /proc/PID/environ.
# Happens:  setproctitle writes the title over the memory in which Linux keeps the first arguments and the environment.
#           Read from outside, the environment is then empty. The process itself still has its variables. The commands
#           of Dask set a title if the package is installed.
# Hurts:    programs that find the processes of a job by a variable, as schedulers and cleanup scripts do, and people
#           who look up CUDA_VISIBLE_DEVICES of a worker: they find nothing, and no error.
# Seen:     setproctitle 1.3.8 with distributed 2026.7.1 and psutil 7.2.2, November 2026; SPT_NOENV=1 prevents it, with
#           shorter titles.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "setproctitle==1.3.8" "distributed==2026.7.1" "psutil==7.2.2" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import os
import subprocess
import sys
import time

import distributed
import psutil
import setproctitle

code = "import os, setproctitle; setproctitle.setproctitle('my title'); print(os.environ['JOB'], flush=True); input()"
scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
scheduler += ["--host", "127.0.0.1", "--port", "0"]


def job_from_outside(command, title, **more):
    environment = {**os.environ, "JOB": "17", **more}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        outside, until = psutil.Process(process.pid), time.monotonic() + 60
        while not " ".join(outside.cmdline()).startswith(title) and time.monotonic() < until:
            time.sleep(0.1)
        job = outside.environ().get("JOB")
        process.terminate()
    return job


seen = {
    "no title": job_from_outside([sys.executable, "-c", "input()"], ""),
    "title": job_from_outside([sys.executable, "-c", code], "my"),
    "title, SPT_NOENV=1": job_from_outside([sys.executable, "-c", code], "my", SPT_NOENV="1"),
    "scheduler of Dask": job_from_outside(scheduler, "dask"),
}
print("setproctitle", setproctitle.__version__, "distributed", distributed.__version__)
print("JOB, read from outside:", seen)
assert seen == {"no title": "17", "title": None, "title, SPT_NOENV=1": "17", "scheduler of Dask": None}
PYTHON
