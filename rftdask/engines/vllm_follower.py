"""A vLLM engine over several nodes, seen from all nodes but the first: processes of vLLM that hold their share of the
model and obey the engine's.

The engine (vllm.py) writes down each start of vLLM in a folder that all of its nodes see: its arguments, and where its
processes meet. A follower on each other node runs its part of the newest start, and nothing of an earlier one, since
vLLM's own followers do not notice that the first node is gone. Its batch system ends it with its job.
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
from rftdask.processes.zygote import die_with_parent, socket_folder
from rftdask.storage.staging import source_of, staged

ENGINE_PID = "RFTDASK_ENGINE_PID"
"""Environment variable of vLLM's processes: the engine's process, with which they end."""
CAUSE_FILE = "RFTDASK_ENGINE_CAUSE"
"""Environment variable of vLLM's processes: the file for the first error that ends one of them."""
NODES = "RFTDASK_ENGINE_NODES"
"""Environment of a worker whose engine has several nodes: how many, and the folder that they share."""
ADDRESS = "VLLM_HOST_IP"
"""Environment, vLLM's: the address of this node at which the others find it."""
_OVER = "over"
_LOOK_S = 0.2
_TELL_S = 60.0
"""After a part of vLLM has ended by itself, for the engine to tell why before the job ends."""

_CPU_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share the cores; OMP_NUM_THREADS is set
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it needs Triton, which has no CPU; said here, vLLM does not warn of it
}
_DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class Nodes:
    """The nodes of an engine. Example: Nodes.of_this_process() == Nodes(2, Path("/run/control/private/engine-7-0"))"""

    count: int
    folder: Path

    @classmethod
    def of_this_process(cls) -> Nodes | None:
        """None: the engine has the one that it is on."""
        count, _, folder = os.environ.get(NODES, "").partition(":")
        return cls(int(count), Path(folder)) if count else None

    def begin(self, arguments: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        """Have the other nodes start their part, and return the arguments of the first."""
        host = os.environ.get(ADDRESS, "127.0.0.1")
        # Free at this moment; where it is taken by then, starting fails, and is tried again.
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        given = {**arguments, "nnodes": self.count, "master_addr": host, "master_port": port}
        given["distributed_executor_backend"] = "mp"
        number = max(self._starts(), default=0) + 1
        temporary = self.folder / f".start-{number}"
        # A copy on this node's own disk is another node's to make.
        told = {**given, "model": source_of(str(arguments["model"])), "on_cpu": on_cpu}
        temporary.write_text(json.dumps(told))
        temporary.rename(self.folder / f"start-{number}.json")
        return given

    def _starts(self) -> list[int]:
        return [int(path.stem.rpartition("-")[2]) for path in self.folder.glob("start-*.json")]

    def end(self) -> None:
        """There will be no other start: the other nodes end."""
        (self.folder / _OVER).touch()

    def is_over(self) -> bool:
        """Whether `end` was called."""
        return (self.folder / _OVER).exists()

    def newest(self) -> Path | None:
        """What the engine started last."""
        starts = self._starts()
        return self.folder / f"start-{max(starts)}.json" if starts else None


def follow(nodes: Nodes, node_rank: int) -> None:
    """Run this node's part of the engine, from start to start, until its worker ends.

    Raises: RoleError: it ended by itself, and the engine has not started again.
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
                part = subprocess.Popen([sys.executable, "-m", __name__, str(newest), str(node_rank)])
            elif part is not None and part.poll() is not None:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s > _TELL_S:
                    raise RoleError(f"node {node_rank} of the engine ended with code {part.returncode}")
            time.sleep(_LOOK_S)
    finally:
        if part is not None:
            part.kill()
            part.wait()


def set_defaults(on_cpu: bool) -> None:
    """Set what vLLM reads from the environment, where nobody has; before it is imported."""
    from rftdask.engines.base import MAX_BAD_TOKENS, MAX_BAD_WORDS  # late: a job's first process loads no configuration

    own = {
        "VLLM_MAX_NUM_BAD_WORDS": str(MAX_BAD_WORDS),
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(MAX_BAD_TOKENS),
        "VLLM_RPC_BASE_PATH": socket_folder(),
    }
    for name, value in (_DEFAULTS | own | (_CPU_DEFAULTS if on_cpu else {})).items():
        os.environ.setdefault(name, value)


def main(file: str, node_rank: str) -> None:
    """Entry of a part: vLLM's processes on this node, as `vllm serve --headless` has them."""
    die_with_parent(os.getppid())
    given = json.loads(Path(file).read_text())
    set_defaults(on_cpu=bool(given.pop("on_cpu")))
    os.environ[ENGINE_PID] = str(os.getpid())  # for vLLM's processes, which end with this one
    os.environ[CAUSE_FILE] = f"{file}.cause-{node_rank}"
    # Late: vLLM is optional, takes ten seconds, and reads the environment.
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    given["model"] = staged(given["model"])
    arguments = AsyncEngineArgs(**given, node_rank=int(node_rank))
    config = arguments.create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
    # It is told what to do by the first node's; its own monitor sees only the processes of this one.
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    raise SystemExit(1)  # they run for as long as they are obeyed


if __name__ == "__main__":
    main(*sys.argv[1:])
