"""Resource usage of a worker process and its machine. Dask calls `Meter` for each heartbeat of a worker, without a
thread of its own; the driver reads the newest values from `scheduler_info`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from rftdask.processes.gpus import free_host_bytes, visible_gpus

METER = "rftdask_meter"
"""Name among the metrics of a Dask worker."""
_INTERVAL_S = 4.0
"""Between two measurements, which take milliseconds. Heartbeats come more often."""
_FIRST_S = 1.0
"""Before the first measurement, so that short runs have one."""
_GIB = 2**30


class Meter:
    """Usage of this process, its descendants and its GPUs. Example: worker.metrics[METER] = Meter()"""

    def __init__(self, clock: Callable[[], float] = time.monotonic, nvml: Any = None) -> None:
        """nvml: replacement for the module pynvml. None: pynvml, if it is installed and a GPU is visible."""
        self._clock, self._process = clock, psutil.Process()
        self._read_s, self._metrics = clock(), dict[str, float]()
        self._used_s, _ = self._tree()
        psutil.cpu_percent()  # the first result is meaningless
        self._gpus = _Gpus(nvml) if visible_gpus() else None

    def __call__(self, _worker: object = None) -> Mapping[str, float]:
        """Metrics by name (reports/metric_table.py), at most a few seconds old; empty at the beginning."""
        passed = self._clock() - self._read_s
        if passed < (_INTERVAL_S if self._metrics else _FIRST_S):
            return self._metrics
        self._read_s += passed
        used_s, largest = self._tree()
        # The sum falls when a process ends that nobody waited for.
        busy = max(0.0, used_s - self._used_s) / passed
        self._used_s = used_s
        self._metrics = {
            "cpu_cores": busy,
            "process_gib": largest / _GIB,
            "host_cpu": psutil.cpu_percent() / 100,
            "host_free_gib": free_host_bytes() / _GIB,
            **({} if self._gpus is None else self._gpus.read()),
        }
        return self._metrics

    def _tree(self) -> tuple[float, int]:
        """(CPU seconds of all processes, including ended ones; resident bytes of the largest)."""
        used_s, largest = 0.0, 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error), process.oneshot():  # the process may have ended
                times = process.cpu_times()
                used_s += times.user + times.system + times.children_user + times.children_system
                largest = max(largest, process.memory_info().rss)
        return used_s, largest


def gpu_memory(nvml: Any = None) -> int | None:
    """Memory of the largest visible GPU in bytes. None: no GPU, or NVIDIA's library does not report it. nvml: as for
    `Meter`.
    """
    totals = [memory.total for memory in _Gpus(nvml).memory()] if visible_gpus() else []
    return int(max(totals)) if totals else None


class _Gpus:
    """The GPUs of this process in NVIDIA's library, which does not load CUDA."""

    def __init__(self, nvml: Any) -> None:
        self._nvml, self._handles = nvml, list[Any]()
        try:
            if nvml is None:
                import pynvml  # late: an optional package

                self._nvml = nvml = pynvml
            nvml.nvmlInit()
        except Exception:  # not installed, or no driver: no metrics of GPUs
            return
        for name in visible_gpus():
            with contextlib.suppress(nvml.NVMLError):
                by_number = name.isdecimal()
                find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
                self._handles.append(find(int(name) if by_number else name))

    def memory(self) -> list[Any]:
        """Objects with `used` and `total` in bytes, for the GPUs that report them."""
        memory = []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                memory.append(self._nvml.nvmlDeviceGetMemoryInfo(handle))
        return memory

    def read(self) -> dict[str, float]:
        memory, busy = self.memory(), list[float]()
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):  # not available for a part of a GPU (MIG)
                busy.append(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        metrics = {"num_gpus": float(len(self._handles))} if self._handles else {}
        if memory:
            used = sum(gpu.used for gpu in memory)
            metrics |= {"gpu_gib": used / _GIB, "gpu_memory": used / sum(gpu.total for gpu in memory)}
        return metrics | ({"gpu_busy": sum(busy) / len(busy)} if busy else {})
