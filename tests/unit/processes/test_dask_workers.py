"""Promises of what is known of workers: all of them, whatever else the client asks meanwhile."""

from __future__ import annotations

import threading

from distributed import Client, LocalCluster

from rftdask.processes.dask_task import workers_of


def test_workers_are_told_while_the_client_asks_for_none_of_them() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                # What it does by itself every few seconds.
                client.sync(client._update_scheduler_info)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert {len(workers_of(client)) for _ in range(300)} == {2}
        finally:
            ended.set()
            asking.join()
