"""GPUs and host memory of this process, its usage of them, and errors about them that name the remedy.

A planned GPU that torch cannot use is an error: a run that was placed on GPUs never continues on the CPU. Tests replace
`_cuda`, the only access to torch.cuda.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rftdask.errors import UserError
from rftdask.processes.device_lock import DEVICES_VARIABLE, shared_devices
from rftdask.storage.shared_folder import private_folder

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_FREE_S = 30.0
"""Time to wait for GPUs of a process that is ending."""
_POLL_INTERVAL_S = 0.2
_GIB = 2**30
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
METER = "rftdask_meter"
"""Name among the metrics of a Dask worker."""
_METER_INTERVAL_S = 4.0
"""Between two measurements, which take milliseconds. Heartbeats come more often."""
_METER_FIRST_S = 1.0
"""Before the first measurement, so that short runs have one."""
_claims: list[int] = []
"""Lock files of the GPUs that this process has claimed, open until it ends."""


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. Does not load CUDA."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name not in ("", "-1")]
    return [str(number) for number, _ in enumerate(glob.glob("/dev/nvidia[0-9]*"))]


def has_gpu_devices() -> bool:
    """True if this machine has a GPU, even one that this process may not use. Does not load CUDA."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


def use_device(num_gpus: int = 1, shares_as: str = "") -> str:
    """Choose the device of this process, before anything uses CUDA: "cuda", or "cpu" if no GPU is visible.

    If more than `num_gpus` are visible, it claims that many which no other process of this user has claimed: workers
    that were started on one machine may all see all of its GPUs.

    Args: shares_as: role of a process that shares its GPUs with the other role. Only processes of its role compete for
    GPUs then, and the environment is set for the device lock.
    Raises: UserError: torch cannot use the visible GPUs, or too few are free.
    """
    names = visible_gpus()
    if not names:
        return "cpu"
    if len(names) > num_gpus:
        names = _claim(names, num_gpus, shares_as)
        os.environ[_VARIABLE] = ",".join(names)
    if shares_as and DEVICES_VARIABLE not in os.environ:  # a cluster that assigned GPUs has set it
        os.environ.update(shared_devices(_folder(), names))
    cuda = _cuda()
    if not cuda.is_available():
        raise UserError(
            f"GPU {', '.join(names)} is planned for this process ({_VARIABLE}), and {_why_not(cuda)}. To compute on "
            f"the CPU, hide the GPUs: {_VARIABLE}="
        )
    return "cuda"


def set_device() -> None:
    """Make the GPU of this process the current one, the default of NCCL and of new tensors. Call it after `use_device`,
    and not in a process that leaves its GPUs to its children.
    """
    _cuda().set_device(0)


def free_host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Host memory in bytes that this process may still use, within the limits of its job or container (cgroups).

    Args: groups, own: paths of Linux's cgroup files.
    """
    free = int(psutil.virtual_memory().available)
    lines = own.read_text().splitlines() if own.is_file() else []
    for kinds, path in (line.split(":", 2)[1:] for line in lines):
        if not kinds:  # cgroup v2
            base, limit, used = groups, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            base, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        place = base / path.lstrip("/")
        for group in (place, *place.parents):
            # Limits of parent groups apply as well. A container may see only its own group, at the top.
            if not group.is_relative_to(base):
                break
            try:
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group, or no limit ("max")
                continue
            # The page cache counts as used, and the kernel frees it on demand.
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free = min(free, most - taken + cached)
    return max(0, free)


def out_of_memory(error: BaseException, doing: str, change: str) -> UserError | None:
    """Convert an out-of-memory error of a GPU or the host to a UserError with the remedy. None: another error.

    doing: the phase, as it follows "while"; change: keys that lower the memory use.
    """
    cause: BaseException | None = error
    while cause is not None and not (type(cause).__name__ == "OutOfMemoryError" or "out of memory" in str(cause)):
        if "DefaultCPUAllocator" in str(cause) or isinstance(cause, MemoryError):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
            return UserError(
                f"out of host memory while {doing}: {_first_line(cause)}; this process used up to {peak:.1f} "
                f"GiB. Give its machine or job more memory, or {change}"
            )
        cause = cause.__cause__
    if cause is None:
        return None
    return UserError(
        f"out of GPU memory while {doing}: {_first_line(cause)}{_gpu_peak()}. To change: {change}; `rftdask estimate` "
        "lists the memory of each part"
    )


def _cuda() -> Any:
    import torch  # late: planning a run needs no torch

    return torch.cuda


def _why_not(cuda: Any) -> str:
    import torch  # late, as above

    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA: install a CUDA build that supports the driver of this "
            "machine (see pytorch.org)"
        )
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:  # old or hanging driver, or no such device
        return f"torch {torch.__version__} cannot use it: {_first_line(error)}"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no device of that name; see nvidia-smi"


def _folder() -> Path:
    """Folder of this user's GPU locks on this machine, or in this job, since GPU names may be relative to a job."""
    job = next((os.environ[name] for name in _JOBS if os.environ.get(name)), "")
    folder = Path(tempfile.gettempdir(), f"rftdask-gpus-{os.getuid()}" + f"-{job.replace('/', '-')}" * bool(job))
    return private_folder(folder, "set TMPDIR to your own folder")


def _claim(names: Sequence[str], number: int, role: str) -> list[str]:
    """Claim `number` GPUs that no process of this user and role has claimed. Raises: UserError: too few are free."""
    folder = _folder()
    deadline = time.monotonic() + _FREE_S
    while True:
        claimed: dict[str, int] = {}
        for name in names:
            # The kernel releases a lock when its process ends.
            file = os.open(folder / f"{role}gpu-{name.replace('/', '-')}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            claimed[name] = file
            if len(claimed) == number:
                _claims.extend(claimed.values())
                return list(claimed)
        # Keep none, or two waiting processes could each hold what the other needs.
        for file in claimed.values():
            os.close(file)
        if time.monotonic() > deadline:
            raise UserError(
                f"this process needs {number} of the GPUs {', '.join(names)}, and {len(claimed)} are free: your other "
                f"workers on this machine use the rest. Start fewer workers, or assign GPUs with {_VARIABLE}"
            )
        time.sleep(_POLL_INTERVAL_S)


def _gpu_peak() -> str:
    """Memory use of this process on its GPU, as the end of a sentence; "": not known."""
    try:
        cuda = _cuda()
        free, total = cuda.mem_get_info()
        peak, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    except (RuntimeError, AssertionError):  # the device has failed
        return ""
    others = max(0, total - free - cuda.memory_reserved())
    return (
        f"; the peak was {peak / _GIB:.1f} GiB in tensors and {reserved / _GIB:.1f} GiB in the allocator, of "
        f"{total / _GIB:.1f} GiB; other processes use {others / _GIB:.1f} GiB"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


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
        if passed < (_METER_INTERVAL_S if self._metrics else _METER_FIRST_S):
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
