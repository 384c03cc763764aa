#!/usr/bin/env bash
# Expected: a result that is not there in time raises TimeoutError, and nothing else changes.
# Happens:  a client gathers at most five results at a time. A sixth call waits for its place; if its timeout ends there,
#           later calls share its cancelled wait and raise UnboundLocalError, although worker, task and result are well.
# Hurts:    programs that poll results with a timeout on a busy machine: they take a slow answer for a lost worker.
# Seen:     distributed 2026.7.1, November 2026; the worker is stopped for two seconds to be slow.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "distributed==2026.7.1" || exit 75
cd "$folder"
cat >program.py <<'PYTHON' # a file, since the processes of the cluster import it
import os
import signal
import threading
import time

import distributed
from distributed import Client, LocalCluster, wait

def errors_of_eight_results():
    names = []
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        futures = [client.submit(int, str(number), pure=False) for number in range(8)]
        wait(futures)
        (pid,) = client.run(os.getpid).values()

        def ask(future):
            try:
                future.result(timeout=1.5)
            except Exception as error:
                names.append(type(error).__name__)

        os.kill(pid, signal.SIGSTOP)
        threads = [threading.Thread(target=ask, args=(future,)) for future in futures]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        os.kill(pid, signal.SIGCONT)
    return names

if __name__ == "__main__":
    names = errors_of_eight_results()
    print("distributed", distributed.__version__)
    print(names)
    assert "TimeoutError" in names and "UnboundLocalError" in names
PYTHON
venv/bin/python program.py
