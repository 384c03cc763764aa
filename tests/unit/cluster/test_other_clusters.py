"""Promises of clusters that others start.

- the workers of an existing cluster get roles only if none has one, and too few are refused with the arithmetic;
- dask-cuda is asked for the workers of the layout, with their names, resources and GPUs, and for nothing that takes GPU
  memory. Its class is a stand-in here, whose arguments are those of dask-cuda 26.10: no test has run it on a GPU;
- a cluster that closes slowly, as when a worker is just starting on a busy machine, does not fail the run that ended;
- what starts a worker in a job, and stays beside it, loads neither Dask nor a configuration.
"""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftdask.cluster.base import close_in_turn, control_workers
from rftdask.cluster.cuda import LocalCudaCluster, role_local_cuda_cluster
from rftdask.cluster.existing import ExistingCluster, assign
from rftdask.cluster.layout import Layout, WorkerPlan
from rftdask.cluster.preloads import GRACE_VARIABLE, MODULE
from rftdask.config import load_config
from rftdask.engines.vllm_follower import Nodes, follow
from rftdask.errors import UserError
from rftdask.processes.device_lock import DEVICES_VARIABLE
from rftdask.processes.poll import wait_for

LAYOUT = Layout(
    (
        WorkerPlan("trainer-0", ("trainer", "control"), 1, gpu=0),
        WorkerPlan("trainer-1", ("trainer",), 1, gpu=1),
        WorkerPlan("explorer-0", ("explorer",), 1, gpu=2),
    )
)


def workers(*resources: dict[str, float]) -> dict[str, dict[str, Any]]:
    return {f"tcp://{i}": {"name": f"w{i}", "resources": held} for i, held in enumerate(resources)}


def test_workers_without_roles_get_them_in_the_order_of_their_names() -> None:
    assert assign(workers({}, {}, {}, {}), LAYOUT) == {
        "tcp://0": {"trainer": 1.0},
        "tcp://1": {"trainer": 1.0},
        "tcp://2": {"explorer": 1.0},
    }


def test_the_control_role_is_never_on_a_worker_that_a_rollout_can_kill() -> None:
    explorer = {"explorer": 1.0}
    assert control_workers(workers({"trainer": 1.0, "control": 1.0}, {"trainer": 1.0}, {})) == ["tcp://0"]
    assert control_workers(workers(explorer, {"trainer": 1.0}, explorer)) == ["tcp://1"]
    assert control_workers(workers(explorer, {}, explorer)) == ["tcp://1"], "one that is not needed"
    assert control_workers(workers(explorer, explorer)) == []


def test_workers_with_roles_keep_them() -> None:
    assert assign(workers({"trainer": 1}, {"trainer": 1}, {"explorer": 1}, {}), LAYOUT) == {}
    with pytest.raises(UserError, match="2 workers for role trainer are needed, and 1 of the 2 workers hold"):
        assign(workers({"trainer": 1}, {"explorer": 1}), LAYOUT)


def test_too_few_workers_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError, match=r"2 trainer \+ 1 explorers = 3 workers are needed, and .* has 2"):
        assign(workers({}, {}), LAYOUT)


def test_an_existing_cluster_is_named_in_one_way() -> None:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "cluster": {"type": "existing", "options": {"adress": "tcp://x"}},
    }
    with pytest.raises(UserError, match="adress is not an option; use address, scheduler_file"):
        ExistingCluster(load_config(tree), LAYOUT)
    with pytest.raises(UserError, match="needs either address or scheduler_file"):
        ExistingCluster(load_config({**tree, "cluster": {"type": "existing"}}), LAYOUT)


def test_the_other_nodes_of_an_engine_run_its_newest_start_until_its_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            told = json.loads((tmp_path / f"start-{number}.json").read_text())
            assert told == {**first, "on_cpu": True} and (told["nnodes"], told["master_addr"]) == (2, "127.0.0.1")
            lines = [f"{tmp_path}/start-{each}.json 1" for each in range(1, number + 1)]
            assert wait_for((tmp_path / "started").exists, 30.0, 0.01)
            assert wait_for(lambda lines=lines: (tmp_path / "started").read_text().splitlines() == lines, 30.0, 0.01)
            assert len(parts_of(tmp_path)) == 1, "of an earlier start nothing is left"
        nodes.end()
        follower.result(30)
    assert parts_of(tmp_path) == []


def parts_of(folder: Path) -> list[psutil.Process]:
    """Children of this process that were told the number of this folder's engine by the environment."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ends at this moment
            found += [each] * (each.environ().get("RFTDASK_ENGINE_NODES") == f"2:{folder}")
    return found


class StandIn:
    """As much of dask_cuda.LocalCUDACluster as makes the specs of its workers."""

    def __init__(self, CUDA_VISIBLE_DEVICES: list[str], n_workers: int, **options: Any) -> None:
        self.options = options
        self.cuda_visible_devices = CUDA_VISIBLE_DEVICES
        self.worker_spec: dict[Any, Any] = {}
        for _ in range(n_workers):
            self.worker_spec.update(self.new_worker_spec())

    def new_worker_spec(self) -> dict[Any, Any]:
        devices = self.cuda_visible_devices
        device = min(set(devices) - set(self.worker_spec))
        at = devices.index(device)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(devices[at:] + devices[:at])}
        own = {
            "preload": ["dask_cuda.initialize"],
            "preload_argv": ["--create-cuda-context"],
            "env": env,
            "near": device,
        }
        return {device: {"cls": object, "options": copy.deepcopy(own)}}


def test_dask_cuda_places_each_role_on_a_gpu_of_its_own() -> None:
    made = role_local_cuda_cluster(StandIn, LAYOUT)(CUDA_VISIBLE_DEVICES=["0", "1", "2"], n_workers=3)
    options = [spec["options"] for spec in made.worker_spec.values()]
    assert [each["name"] for each in options] == ["trainer-0", "trainer-1", "explorer-0"]
    assert [each["resources"] for each in options] == [{"trainer": 1, "control": 1}, {"trainer": 1}, {"explorer": 1}]
    assert [each["env"]["CUDA_VISIBLE_DEVICES"] for each in options] == ["0", "1", "2"]
    assert [each["near"] for each in options] == ["0", "1", "2"]
    # Never dask-cuda's own; and trainers outlast a SIGTERM that reaches all processes at once.
    assert [each["preload"] for each in options] == [[MODULE]] * 3
    assert [each["env"][GRACE_VARIABLE] for each in options] == ["30.0", "30.0", "0"]


def test_dask_cuda_places_roles_that_share_gpus_and_engines_of_several() -> None:
    shared = Layout(
        (
            WorkerPlan("trainer-0", ("trainer", "control"), 1, gpu=0, shares=(0,)),
            WorkerPlan("trainer-1", ("trainer",), 1, gpu=1, shares=(1,)),
            WorkerPlan("explorer-0", ("explorer",), 1, gpu=0, num_gpus=2, shares=(0, 1)),
        )
    )
    made = role_local_cuda_cluster(StandIn, shared, "/turns")(CUDA_VISIBLE_DEVICES=["5", "6"], n_workers=3)
    env = [spec["options"]["env"] for spec in made.worker_spec.values()]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in env] == ["5", "6", "5,6"]
    assert [each[DEVICES_VARIABLE] for each in env] == ["/turns:0", "/turns:1", "/turns:0,1"]
    alone = Layout((WorkerPlan("explorer-0", ("explorer",), 1, gpu=0), WorkerPlan("control-0", ("control",), 1)))
    made = role_local_cuda_cluster(StandIn, alone)(CUDA_VISIBLE_DEVICES=["5"], n_workers=2)
    assert [spec["options"]["env"]["CUDA_VISIBLE_DEVICES"] for spec in made.worker_spec.values()] == ["5", ""]


def test_dask_cuda_without_gpus_is_refused() -> None:
    without = Layout((WorkerPlan("trainer-0", ("trainer", "control"), 1), WorkerPlan("explorer-0", ("explorer",), 1)))
    with pytest.raises(UserError, match="local-cuda needs GPUs, and none is visible"):
        LocalCudaCluster(without, base=StandIn)


class Slow:
    """A client or cluster of Dask that takes its time."""

    def __init__(self, seconds: float, closed: list[float]) -> None:
        self.seconds, self.closed = seconds, closed

    def close(self, timeout: float) -> None:
        self.closed.append(self.seconds)
        if self.seconds > timeout:
            raise TimeoutError


def test_a_cluster_that_closes_too_slowly_fails_no_run_and_the_next_part_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    closed: list[float] = []
    close_in_turn(Slow(1e6, closed), Slow(12, closed))
    assert closed == [1e6, 12]
    (message,) = caplog.messages
    assert "too slow to close" in message


def test_the_first_process_of_a_job_loads_neither_dask_nor_a_configuration() -> None:
    heavy = {"distributed", "dask", "pydantic", "torch", "numpy"}
    code = f"import sys, rftdask.cluster.join; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
