"""Promises of the meter: it counts all descendants, including ended ones, and measures at intervals."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rftdask.processes.gpus import Meter, gpu_memory

GIB = 2**30


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fake_nvml(**changes: Any) -> SimpleNamespace:
    """A machine with two GPUs of 80 GiB; number 1 is busy."""

    class NVMLError(Exception):
        pass

    names = {0: 0, 1: 1, "GPU-b": 1}

    def find(name: int | str) -> int:
        if name not in names:
            raise NVMLError
        return names[name]

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=find,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=(10 + 40 * gpu) * GIB, total=80 * GIB),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=100 * gpu),
    )
    vars(nvml).update(changes)
    return nvml


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Clock()


def measured(meter: Meter, clock: Clock) -> dict[str, float]:
    clock.now += 10
    return dict(meter())


def test_the_time_of_an_ended_child_counts(clock: Clock) -> None:
    meter = Meter(clock)
    before = sum(os.times()[2:4])
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.1: pass"], check=True)
    spent = sum(os.times()[2:4]) - before
    found = measured(meter, clock)
    assert found["cpu_cores"] > 0.99 * spent / 10 > 0.005
    assert 0 < found["process_gib"] < 100 and found["host_free_gib"] > 0 and 0 <= found["host_cpu"] <= 1
    assert not [name for name in found if "gpu" in name]


def test_a_measurement_is_repeated_after_seconds(clock: Clock) -> None:
    meter = Meter(clock)
    assert meter() == {}
    first = measured(meter, clock)
    clock.now += 1
    assert meter() == first


@pytest.mark.parametrize(("names", "busy", "gib"), [("0,1", 0.5, 60.0), ("GPU-b", 1.0, 50.0)])
def test_the_gpus_of_the_process_are_reported(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, names: str, busy: float, gib: float
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    found = measured(Meter(clock, fake_nvml()), clock)
    assert (found["num_gpus"], found["gpu_busy"], found["gpu_gib"]) == (names.count(",") + 1, busy, gib)
    assert found["gpu_memory"] == pytest.approx(gib / 80 / found["num_gpus"])


def test_gpu_memory_is_reported_if_the_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=0, total=(24 + 56 * gpu) * GIB))
    for names, found in (("0,1", 80 * GIB), ("0", 24 * GIB), ("GPU-b", 80 * GIB), ("", None), ("7", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert gpu_memory(nvml) == found, names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_memory(fake_nvml(nvmlInit=None)) is None


def test_a_failing_gpu_has_no_metrics(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise nvml.NVMLError

    nvml = fake_nvml(nvmlDeviceGetUtilizationRates=refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert {"gpu_memory", "gpu_busy"} & measured(Meter(clock, nvml), clock).keys() == {"gpu_memory"}
    for broken in (fake_nvml(nvmlInit=refuse), fake_nvml(nvmlDeviceGetHandleByIndex=refuse)):
        nvml = broken
        assert not [name for name in measured(Meter(clock, broken), clock) if "gpu" in name]
