"""Meter: what a worker process and its machine have in use. Asked by the heartbeat that a Dask worker sends anyway, so
there is no thread for it; what it told last is in `scheduler_info`, where the driver finds it.
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
_EVERY_S = 4.0
"""Between two looks at all processes of a machine, which take milliseconds. Heartbeats come more often."""
_FIRST_S = 1.0
"""Before the first look, so that a short run has one, too."""
_GIB = 2**30


class Meter:
    """What this process, those that it started and its GPUs use.

    Example: worker.metrics[METER] = Meter()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, nvml: Any = None) -> None:
        """nvml: the module pynvml, or one like it; None: that, where it is installed and there is a GPU."""
        self._clock, self._process = clock, psutil.Process()
        self._read_s, self._told = clock(), dict[str, float]()
        self._used_s, _ = self._tree()
        psutil.cpu_percent()  # its first answer is meaningless
        self._gpus = _Gpus(nvml) if visible_gpus() else None

    def __call__(self, _worker: object = None) -> Mapping[str, float]:
        """Metrics by name (see `reports.metric_table`), at most some seconds old; empty at the beginning."""
        passed = self._clock() - self._read_s
        if passed < (_EVERY_S if self._told else _FIRST_S):
            return self._told
        self._read_s += passed
        used_s, largest = self._tree()
        # Less than before where a process has gone whose time nobody took over.
        busy = max(0.0, used_s - self._used_s) / passed
        self._used_s = used_s
        self._told = {
            "cpu_cores": busy,
            "process_gib": largest / _GIB,
            "host_cpu": psutil.cpu_percent() / 100,
            "host_free_gib": free_host_bytes() / _GIB,
            **({} if self._gpus is None else self._gpus.read()),
        }
        return self._told

    def _tree(self) -> tuple[float, int]:
        """(CPU seconds of all of them and of those that have ended, resident bytes of the largest)."""
        used_s, largest = 0.0, 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error), process.oneshot():  # it may have just ended
                times = process.cpu_times()
                used_s += times.user + times.system + times.children_user + times.children_system
                largest = max(largest, process.memory_info().rss)
        return used_s, largest


def gpu_memory(nvml: Any = None) -> int | None:
    """Bytes of a GPU that this process may use; None: there is none, or NVIDIA's library does not tell. Of GPUs that
    differ the largest has them: who will have which is not known here. nvml: as for `Meter`.
    """
    totals = [memory.total for memory in _Gpus(nvml).memory()] if visible_gpus() else []
    return int(max(totals)) if totals else None


class _Gpus:
    """The GPUs of this process, asked through NVIDIA's library, which loads no CUDA."""

    def __init__(self, nvml: Any) -> None:
        self._nvml, self._handles = nvml, list[Any]()
        try:
            if nvml is None:
                import pynvml  # late: an optional package, and only where there is a GPU

                self._nvml = nvml = pynvml
            nvml.nvmlInit()
        except Exception:  # not installed, or no driver: then nothing is told of GPUs, and nothing depends on it
            return
        for name in visible_gpus():
            with contextlib.suppress(nvml.NVMLError):
                by_number = name.isdecimal()
                find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
                self._handles.append(find(int(name) if by_number else name))

    def memory(self) -> list[Any]:
        """(`used`, `total`) of each that tells it, in bytes."""
        found = []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                found.append(self._nvml.nvmlDeviceGetMemoryInfo(handle))
        return found

    def read(self) -> dict[str, float]:
        memory, busy = self.memory(), list[float]()
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):  # a part of a GPU (MIG) has no such number
                busy.append(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        found = {"num_gpus": float(len(self._handles))} if self._handles else {}
        if memory:
            used = sum(each.used for each in memory)
            found |= {"gpu_gib": used / _GIB, "gpu_memory": used / sum(each.total for each in memory)}
        return found | ({"gpu_busy": sum(busy) / len(busy)} if busy else {})
