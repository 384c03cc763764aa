"""Promises of the workers of jobs."""

import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rftdask.engines.vllm_follower import Nodes, follow
from rftdask.processes.poll import wait_for


def test_followers_run_the_newest_start_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the place of Python, which would import vLLM.
    part = tmp_path / "python"
    part.write_text(f'#!/bin/sh\necho "$3 $4" >>{tmp_path}/started\nexec sleep 600\n')
    part.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(part))
    monkeypatch.setenv("RFTDASK_ENGINE_NODES", f"2:{tmp_path}")
    nodes = Nodes.of_this_process()
    assert nodes == Nodes(2, tmp_path)
    with ThreadPoolExecutor(1) as threads:
        follower = threads.submit(follow, nodes, 1)
        for number in (1, 2):
            first = nodes.begin({"model": "m", "tensor_parallel_size": 2}, on_cpu=True)
            start = json.loads((tmp_path / f"start-{number}.json").read_text())
            assert start == {**first, "on_cpu": True} and (start["nnodes"], start["master_addr"]) == (2, "127.0.0.1")
            lines = [f"{tmp_path}/start-{earlier}.json 1" for earlier in range(1, number + 1)]
            assert wait_for((tmp_path / "started").exists, 30.0, 0.01)
            assert wait_for(lambda lines=lines: (tmp_path / "started").read_text().splitlines() == lines, 30.0, 0.01)
            assert len(parts_of(tmp_path)) == 1, "of an earlier start nothing is left"
        nodes.end()
        follower.result(30)
    assert parts_of(tmp_path) == []


def parts_of(folder: Path) -> list[psutil.Process]:
    """Children of this process that have the engine of this folder in their environment."""
    processes = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ends at this moment
            processes += [process] * (process.environ().get("RFTDASK_ENGINE_NODES") == f"2:{folder}")
    return processes


def test_join_imports_neither_dask_nor_a_configuration() -> None:
    heavy = {"distributed", "dask", "pydantic", "torch", "numpy"}
    code = f"import sys, rftdask.cluster.join; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
