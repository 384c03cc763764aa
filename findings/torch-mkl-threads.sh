#!/usr/bin/env bash
# Expected: OMP_NUM_THREADS=2 gives PyTorch two threads.
# Happens:  if MKL_NUM_THREADS is set as well, it wins, also for operations that do not use MKL. Dask sets both to 1 in
#           its worker processes unless the user has set them. A user who sets OMP_NUM_THREADS=2 for a cluster gets one
#           thread: MKL_NUM_THREADS=1 is still added.
# Hurts:    CPU work in Dask workers, such as tokenizing with a model or scoring: it runs at the speed of one core, and
#           the variable that people check has the value they set.
# Seen:     torch 2.13.0 with distributed 2026.7.1, November 2026, on x86; builds without MKL are not affected.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "torch==2.13.0" "distributed==2026.7.1" "numpy" || exit 75
cd "$folder"
cat >program.py <<'PYTHON' # a file, since the processes of the cluster import it
import os
import subprocess
import sys

import distributed

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def num_threads():
    import torch

    return *map(os.environ.get, NAMES), torch.get_num_threads()


def in_process(**variables):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return int(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    print("distributed", distributed.__version__)
    alone, both = in_process(OMP_NUM_THREADS="2"), in_process(OMP_NUM_THREADS="2", MKL_NUM_THREADS="1")
    opposite = in_process(OMP_NUM_THREADS="1", MKL_NUM_THREADS="2")
    print(f"OMP 2: {alone} threads; OMP 2, MKL 1: {both}; OMP 1, MKL 2: {opposite}")
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ.pop("MKL_NUM_THREADS", None)
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client:
            in_worker = client.submit(num_threads).result()
    print("a worker of a user who set OMP_NUM_THREADS=2 (OMP, MKL, threads):", in_worker)
    assert (alone, both, opposite) == (2, 1, 2)
    assert in_worker == ("2", "1", 1)
PYTHON
venv/bin/python program.py
