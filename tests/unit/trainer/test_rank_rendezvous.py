"""Promises of the rendezvous: ranks of one machine open no socket; others only listen at the given address."""

import os
import threading
from pathlib import Path
from typing import Any

import psutil

from rftdask.trainer.gang import free_address
from rftdask.trainer.rank import rendezvous_store


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def meet(rendezvous: str) -> tuple[bytes, set[tuple[str, int]]]:
    """Connect two ranks; returns the value that rank 1 reads from rank 0, and the new listening sockets."""
    before = listening()
    stores: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda rank: stores.update({rank: rendezvous_store(rendezvous, rank, 2)}), args=(rank,))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stores[0].set("word", b"said")
    return stores[1].get("word"), listening() - before


def test_one_rank_opens_no_socket() -> None:
    before = listening()
    store = rendezvous_store("10.9.9.9:1", 0, 1)
    store.set("word", b"said")
    assert store.get("word") == b"said"
    assert listening() == before


def test_ranks_of_one_machine_meet_in_a_folder(tmp_path: Path) -> None:
    assert meet(str(tmp_path)) == (b"said", set())


def test_rank_zero_listens_only_at_its_worker_address() -> None:
    class Worker:
        address = "tls://127.0.0.1:4001"

    address = free_address(Worker())  # type: ignore[arg-type]  # all that it reads
    host, _, port = address.rpartition(":")
    assert meet(address) == (b"said", {(host, int(port))})


def test_ranks_of_a_local_cluster_get_a_private_folder(tmp_path: Path) -> None:
    from rftdask.monitor.events import Ended
    from tests.unit.trainer.test_gang import FakeClient, gang

    modes = []

    class Local(FakeClient):
        def submit(self, function: Any, spec: Any, address: str, **options: Any) -> Any:
            modes.append(os.stat(spec.rendezvous).st_mode & 0o777)
            return super().submit(function, spec, address, **options)

    client = Local({"tls://127.0.0.1:1": True, "tls://127.0.0.1:2": True})
    client.outcomes = [Ended(3, False)] * 2
    assert gang(client, world_size=2).run() == Ended(3, False)
    assert modes == [0o700, 0o700]
