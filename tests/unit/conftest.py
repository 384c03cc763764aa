"""Storage media (an S3 server, which is moto on this machine with dummy credentials; a disk that fills up), plug-ins.

moto and s3fs are in the dev extra; where they are missing the S3 tests fail, they are not skipped.
"""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.config import plugins
from rftdask.storage.local import LocalStorage
from tests.unit.storage.s3_proxy import FaultyS3, start_moto


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """URL of the server, which the environment already names to S3 clients; it has the bucket `bucket`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "dummy")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        patch.delenv("AWS_PROFILE", raising=False)
        server = start_moto()
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).makedirs("bucket", exist_ok=True)  # moto keeps it between modules
        yield endpoint
        server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str) -> str:
    """A prefix of its own in the bucket."""
    return f"s3://bucket/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def faults(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A proxy that S3 clients use instead of the server."""
    server = FaultyS3(s3_endpoint)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")  # bodies as they are, no trailers
    yield server
    server.shutdown()
    thread.join(timeout=30)
    server.server_close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[LocalStorage]:
    """Storage on a file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a full disk needs the right to mount a small tmpfs (root)")
    yield LocalStorage(disk)
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for plug-ins; what a test imports from it is forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_plugin_modules", [])
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
