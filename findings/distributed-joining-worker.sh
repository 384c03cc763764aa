#!/usr/bin/env bash
# Expected: a task that is submitted with `workers=[A], allow_other_workers=True` runs on A while A is there and has a
#           free thread; "other workers" are for the case that A is gone or cannot take it.
# Happens:  a worker that has just joined is listed, with all its resources and status "init", before it counts as
#           running. A task for it in this moment goes to another worker, and stays there.
# Hurts:    programs that wait for a worker to join and then place a task on it, such as a training rank on the machine
#           with the GPU: it runs on a worker without one. On a busy machine the moment lasts most of a second. Waiting
#           until scheduler_info gives the status "running" avoids it.
# Seen:     distributed 2026.7.1, November 2026. A plugin of the scheduler submits the task here, since it is called in
#           that moment.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "distributed==2026.7.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import asyncio

import distributed
from distributed.diagnostics.plugin import SchedulerPlugin

placed = {}


def where():
    return distributed.get_worker().name


class Greeter(SchedulerPlugin):
    """Runs a task on each worker that joins."""

    def __init__(self, client):
        self.client = client

    async def add_worker(self, scheduler, worker):
        status = scheduler.workers[worker].status.name
        future = self.client.submit(where, workers=[worker], allow_other_workers=True, pure=False)
        placed[scheduler.workers[worker].name] = status, await future


async def main():
    async with distributed.LocalCluster(
        n_workers=1, processes=False, dashboard_address=None, asynchronous=True
    ) as cluster, distributed.Client(cluster, asynchronous=True) as client:
        cluster.scheduler.add_plugin(Greeter(client), name="greeter")
        async with distributed.Worker(cluster.scheduler_address, name="new") as worker:
            while "new" not in placed:
                await asyncio.sleep(0.01)
            later = client.submit(where, workers=[worker.address], allow_other_workers=True, pure=False)
            return await later


later = asyncio.run(asyncio.wait_for(main(), 60))
print("distributed", distributed.__version__)
print("status and place of the first task for worker new:", placed["new"])
print("place of a task a moment later:", later)
assert placed["new"] == ("init", 0) and later == "new"
PYTHON
