#!/usr/bin/env bash
# Expected: Client.scheduler_info(n_workers=-1) returns all workers. The documentation says so for synchronous clients.
# Happens:  sometimes the list is empty, although the same answer counts the workers correctly. The client also sends
#           its own request every two seconds, for zero workers, and returns the answer that came last.
# Hurts:    programs that look up a worker by its name, or scale a cluster by the length of the list: once in a while
#           all workers seem lost.
# Seen:     distributed 2026.7.1, November 2026; the interval is a millisecond here, so that it happens within seconds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "distributed==2026.7.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import collections

import dask
import distributed

dask.config.set({"distributed.client.scheduler-info-interval": "1ms"})
with distributed.LocalCluster(n_workers=3, processes=False, dashboard_address=None) as cluster:
    with distributed.Client(cluster) as client:
        client.wait_for_workers(3)
        answers = [client.scheduler_info(n_workers=-1) for _ in range(3000)]
seen = collections.Counter((len(answer["workers"]), answer["n_workers"]) for answer in answers)
print("distributed", distributed.__version__)
print("(workers listed, workers counted):", dict(seen))
assert set(seen) == {(3, 3), (0, 3)}
PYTHON
