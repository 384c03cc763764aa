"""Promises of local clusters: other users of the machine reach every port of 127.0.0.1, and need the keys of the run.

The stranger is a process of another uid if the tests run as root, else of the same one, also without keys.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import dask
import distributed
import psutil
import pytest

from rftdask.cluster import local
from rftdask.cluster.layout import EXPLORER_RESOURCE, TRAINER_RESOURCE, Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster
from rftdask.errors import RoleError

PLANS = (WorkerPlan("trainer-0", (TRAINER_RESOURCE, "control"), 1), WorkerPlan("explorer-0", (EXPLORER_RESOURCE,), 1))
TITLES = """
import distributed  # before the workers' fork server starts, as in a notebook
import psutil
from rftdask.cluster.local import LocalCluster
from tests.unit.cluster.test_cluster_local import PLANS, Layout

with LocalCluster(Layout(PLANS)):
    for process in psutil.Process().children(recursive=True):
        print(*process.cmdline()[:1])
"""
KNOCK = r"""
import asyncio, http.client, os, sys
from distributed.comm import connect
from distributed.security import Security


async def knock(port, scheme, security):
    try:
        keys = security.get_connection_args("client")
        comm = await asyncio.wait_for(connect(f"{scheme}://127.0.0.1:{port}", **keys), 5)
        await comm.write({"op": "identity", "reply": True})
        return f"OBEYED {port} {scheme} {await asyncio.wait_for(comm.read(), 5)!s:.80}"
    except Exception as error:
        return f"refused {port} {scheme} {error!r:.80}"

async def knock_everywhere(*ports):
    tries = (("tcp", Security()), ("tls", STRANGER))
    return await asyncio.gather(*(knock(port, *each) for port in ports for each in tries))

STRANGER = Security.temporary()
if os.getuid() == 0:
    asyncio.run(knock_everywhere(sys.argv[1]))  # loads what a stranger may not read from here on
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(*asyncio.run(knock_everywhere(*sys.argv[1:])), sep="\n")
for port in sys.argv[1:]:
    for page in ("/health", "/info/main/workers.html", "/metrics", "/json/counts.json", "/json/identity.json"):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
            connection.request("GET", page)
            answer = connection.getresponse()
            print("TOLD" if answer.status == 200 else "refused", port, page, answer.status)
        except Exception as error:
            print("refused", port, page, type(error).__name__)
"""


@pytest.fixture(scope="module")
def of_others() -> set[int]:
    """Ports on which this process and its descendants listened before there was a cluster."""
    return {address.port for address in listening()}


@pytest.fixture(scope="module")
def cluster(of_others: set[int]) -> Iterator[LocalCluster]:
    with LocalCluster(Layout(PLANS)) as started:
        yield started


def listening() -> list[psutil._common.addr]:
    """Sockets on which this process and its descendants listen."""
    me = psutil.Process()
    return [
        connection.laddr
        for process in (me, *me.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
def test_no_socket_of_a_local_cluster_trusts_strangers(cluster: LocalCluster, of_others: set[int]) -> None:
    assert cluster.client.submit(os.getuid).result(timeout=60) == os.getuid()
    ports = sorted(str(port) for port in {address.port for address in listening()} - of_others)
    assert len(ports) >= 4, ports
    done = subprocess.run([sys.executable, "-c", KNOCK, *ports], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 7 * len(ports)
    assert "ModuleNotFoundError" not in done.stdout
    assert [line for line in answers if not line.startswith("refused")] == []


def test_a_local_cluster_listens_only_on_loopback(cluster: LocalCluster, of_others: set[int]) -> None:
    assert {address.ip for address in listening() if address.port not in of_others} == {"127.0.0.1"}


def test_a_failed_start_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(started: distributed.SpecCluster) -> distributed.Client:
        cluster.append(started)
        raise RoleError("the start of Dask's client was cancelled")

    cluster: list[distributed.SpecCluster] = []
    monkeypatch.setattr(local, "connect", fail)
    before = dask.config.get("distributed.scheduler.allowed-failures")
    with pytest.raises(RoleError, match="was cancelled"):
        LocalCluster(Layout(PLANS))
    assert cluster[0].status.name == "closed"
    assert dask.config.get("distributed.scheduler.allowed-failures") == before


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks only on Linux")
@pytest.mark.slow
def test_ps_shows_the_name_of_a_worker() -> None:
    done = subprocess.run([sys.executable, "-c", TITLES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"rftdask worker trainer-0", "rftdask worker explorer-0"} <= {*done.stdout.splitlines()}, done.stdout
