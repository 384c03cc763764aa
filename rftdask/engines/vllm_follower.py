"""Followers of a vLLM engine over several nodes: vLLM processes on all nodes but the first, which hold their share of
the model.

The engine (vllm.py) records each start of vLLM, with arguments and rendezvous address, in a folder that all nodes
share. A follower on each other node runs its part of the newest start only, since vLLM's followers do not notice the
loss of the first node. The batch system ends a follower with its job. A job's first process imports this module, so
it loads no configuration.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdask.errors import RoleError
from rftdask.storage.staging import source_of

NODES = "RFTDASK_ENGINE_NODES"
"""Environment variable of a worker whose engine has several nodes: their number and shared folder."""
ADDRESS = "VLLM_HOST_IP"
"""Environment variable of vLLM: address of this node for the others."""
_OVER = "over"
_LOOK_S = 0.2
_TELL_S = 60.0  # seconds for the engine to report the reason after a part of vLLM has ended, before the job ends


@dataclass(frozen=True)
class Nodes:
    """Nodes of an engine."""

    count: int
    folder: Path

    @classmethod
    def of_this_process(cls) -> Nodes | None:
        """Nodes from the environment. None: the engine runs on one node."""
        count, _, folder = os.environ.get(NODES, "").partition(":")
        return cls(int(count), Path(folder)) if count else None

    def begin(self, arguments: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        """Start the parts on the other nodes and return the arguments of the first node."""
        host = os.environ.get(ADDRESS, "127.0.0.1")
        # Free now; if it is taken later, the start fails and is retried.
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        given = {**arguments, "nnodes": self.count, "master_addr": host, "master_port": port}
        given["distributed_executor_backend"] = "mp"
        number = max(self._starts(), default=0) + 1
        temporary = self.folder / f".start-{number}"
        # Other nodes make their own local copies.
        told = {**given, "model": source_of(str(arguments["model"])), "on_cpu": on_cpu}
        temporary.write_text(json.dumps(told))
        temporary.rename(self.folder / f"start-{number}.json")
        return given

    def _starts(self) -> list[int]:
        return [int(path.stem.rpartition("-")[2]) for path in self.folder.glob("start-*.json")]

    def end(self) -> None:
        """End the other nodes; there is no further start."""
        (self.folder / _OVER).touch()

    def is_over(self) -> bool:
        """True after `end`."""
        return (self.folder / _OVER).exists()

    def newest(self) -> Path | None:
        """Newest start of the engine."""
        starts = self._starts()
        return self.folder / f"start-{max(starts)}.json" if starts else None


def follow(nodes: Nodes, node_rank: int) -> None:
    """Run the part of this node for each start of the engine, until its worker ends.

    Raises: RoleError: it ended unexpectedly, and the engine has not started again.
    """
    started: Path | None = None
    part: subprocess.Popen[bytes] | None = None
    ended_s: float | None = None
    try:
        while not nodes.is_over():
            newest = nodes.newest()
            if newest is not None and newest != started:
                if part is not None:
                    part.kill()
                    part.wait()
                started, ended_s = newest, None
                arguments = str(newest), str(node_rank), str(os.getpid())
                part = subprocess.Popen([sys.executable, "-m", "rftdask.engines.vllm", *arguments])
            elif part is not None and part.poll() is not None:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s > _TELL_S:
                    raise RoleError(f"node {node_rank} of the engine ended with code {part.returncode}")
            time.sleep(_LOOK_S)
    finally:
        if part is not None:
            part.kill()
            part.wait()
