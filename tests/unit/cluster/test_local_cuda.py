"""Promises of dask-cuda clusters: each role has its GPUs."""

import copy
from typing import Any

import pytest

from rftdask.cluster.layout import Layout, WorkerPlan
from rftdask.cluster.local import LocalCudaCluster, role_local_cuda_cluster
from rftdask.cluster.preloads import GRACE_VARIABLE, MODULE
from rftdask.errors import UserError
from rftdask.processes.device_lock import DEVICES_VARIABLE
from tests.unit.cluster.worker_cases import LAYOUT


class StandIn:
    """The part of dask_cuda.LocalCUDACluster that makes the specs of workers."""

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


def test_dask_cuda_gives_each_role_a_gpu() -> None:
    made = role_local_cuda_cluster(StandIn, LAYOUT)(CUDA_VISIBLE_DEVICES=["0", "1", "2"], n_workers=3)
    options = [spec["options"] for spec in made.worker_spec.values()]
    assert [worker["name"] for worker in options] == ["trainer-0", "trainer-1", "explorer-0"]
    assert [worker["resources"] for worker in options] == [
        {"trainer": 1, "control": 1},
        {"trainer": 1},
        {"explorer": 1},
    ]
    assert [worker["env"]["CUDA_VISIBLE_DEVICES"] for worker in options] == ["0", "1", "2"]
    assert [worker["near"] for worker in options] == ["0", "1", "2"]
    # Never dask-cuda's own; and trainers outlast a SIGTERM that reaches all processes at once.
    assert [worker["preload"] for worker in options] == [[MODULE]] * 3
    assert [worker["env"][GRACE_VARIABLE] for worker in options] == ["30.0", "30.0", "0"]


def test_dask_cuda_supports_shared_and_several_gpus() -> None:
    shared = Layout(
        (
            WorkerPlan("trainer-0", ("trainer", "control"), 1, gpu=0, shares=(0,)),
            WorkerPlan("trainer-1", ("trainer",), 1, gpu=1, shares=(1,)),
            WorkerPlan("explorer-0", ("explorer",), 1, gpu=0, num_gpus=2, shares=(0, 1)),
        )
    )
    made = role_local_cuda_cluster(StandIn, shared, "/turns")(CUDA_VISIBLE_DEVICES=["5", "6"], n_workers=3)
    env = [spec["options"]["env"] for spec in made.worker_spec.values()]
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in env] == ["5", "6", "5,6"]
    assert [worker[DEVICES_VARIABLE] for worker in env] == ["/turns:0", "/turns:1", "/turns:0,1"]
    alone = Layout((WorkerPlan("explorer-0", ("explorer",), 1, gpu=0), WorkerPlan("control-0", ("control",), 1)))
    made = role_local_cuda_cluster(StandIn, alone)(CUDA_VISIBLE_DEVICES=["5"], n_workers=2)
    assert [spec["options"]["env"]["CUDA_VISIBLE_DEVICES"] for spec in made.worker_spec.values()] == ["5", ""]


def test_dask_cuda_without_gpus_is_refused() -> None:
    without = Layout((WorkerPlan("trainer-0", ("trainer", "control"), 1), WorkerPlan("explorer-0", ("explorer",), 1)))
    with pytest.raises(UserError, match="local-cuda needs GPUs, and none is visible"):
        LocalCudaCluster(without, base=StandIn)
