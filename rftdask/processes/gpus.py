"""GPUs: those that this process may use, how much host memory it may, and what goes wrong with them, in words that say
what to change.

A GPU that is planned is used, or it is an error: a run that was placed on GPUs never goes on on the CPU. All of torch's
CUDA that this module asks goes through `_cuda`, where a test puts another.
"""

from __future__ import annotations

import fcntl
import glob
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rftdask.errors import UserError
from rftdask.processes.device_lock import VARIABLE, shared_devices

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_FREE_S = 30.0
"""For a GPU to be free that a process had which is ending."""
_LOOK_S = 0.2
_GIB = 2**30
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""Environment variables by which batch systems name a job."""
_claims: list[int] = []
"""Locks of the GPUs that this process has claimed, open as long as it lives."""


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; found without loading CUDA into the driver."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name not in ("", "-1")]
    return [str(number) for number, _ in enumerate(glob.glob("/dev/nvidia[0-9]*"))]


def has_gpu_devices() -> bool:
    """Whether this machine has a GPU, whoever may use it; found without loading anything."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


def use_device(num_gpus: int = 1, shares_as: str = "") -> str:
    """What this process computes on, "cuda" or "cpu", from now on. Before anything else uses CUDA.

    "cpu" where it sees no GPU. Of more than `num_gpus` it takes as many that no other process of this user has taken:
    workers that somebody started on one machine may all see all of its GPUs. shares_as: a role that takes turns on its
    GPUs with the other role; then only processes of its role count, and the environment says with whom it shares.
    Raises: UserError: torch cannot use the GPUs that it sees, and why; too few are free.
    """
    names = visible_gpus()
    if not names:
        return "cpu"
    if len(names) > num_gpus:
        names = _claim(names, num_gpus, shares_as)
        os.environ[_VARIABLE] = ",".join(names)  # of the processes that it starts, too
    if shares_as and VARIABLE not in os.environ:  # a cluster that gave it its GPUs has said more
        os.environ.update(shared_devices(_folder(), names))
    cuda = _cuda()
    if not cuda.is_available():
        raise UserError(
            f"GPU {', '.join(names)} is planned for this process ({_VARIABLE}), and {_why_not(cuda)}. To compute on "
            f"the CPU, hide the GPUs: {_VARIABLE}="
        )
    return "cuda"


def set_device() -> None:
    """Make the one GPU of this process the current one, which NCCL takes and where all lands that names none. After
    `use_device`, and not in a process that leaves its GPUs to others which it starts.
    """
    _cuda().set_device(0)


def free_host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Host memory that this process may still take: of the machine, or of its job or container, whose control group is
    limited. Args: groups, own: where Linux tells of them.
    """
    free = int(psutil.virtual_memory().available)
    lines = own.read_text().splitlines() if own.is_file() else []
    for kinds, path in (line.split(":", 2)[1:] for line in lines):
        if not kinds:  # the groups of today have no kinds
            base, limit, used = groups, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            base, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        place = base / path.lstrip("/")
        for group in (place, *place.parents):
            # A group has no more than those above it; a container may see its own at the top alone.
            if not group.is_relative_to(base):
                break
            try:
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # none there, or one without a limit ("max")
                continue
            # Files that the kernel keeps in memory are counted, and go when the memory is wanted.
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free = min(free, most - taken + cached)
    return max(0, free)


def out_of_memory(error: BaseException, doing: str, change: str) -> UserError | None:
    """The error in our words, if it says that memory is out, on a GPU or the host; None: it says something else.

    doing: the phase, as it follows "while"; change: keys that lower what it needs.
    """
    told: BaseException | None = error
    while told is not None and not (type(told).__name__ == "OutOfMemoryError" or "out of memory" in str(told)):
        if "DefaultCPUAllocator" in str(told) or isinstance(told, MemoryError):
            return UserError(
                f"out of host memory while {doing}: {_first_line(told)}; this process had up to {_host_peak():.1f} "
                f"GiB. Give its machine or job more memory, or {change}"
            )
        told = told.__cause__
    if told is None:
        return None
    return UserError(
        f"out of GPU memory while {doing}: {_first_line(told)}{_gpu_peak()}. To change: {change}; `rftdask estimate` "
        "says what each part takes"
    )


def _cuda() -> Any:
    import torch  # late: who plans a run needs no torch

    return torch.cuda


def _why_not(cuda: Any) -> str:
    """What keeps torch from CUDA."""
    import torch  # late, as above

    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA: install a build for CUDA that suits the driver of this "
            "machine, as the page of PyTorch says"
        )
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:  # too old a driver, no such device, a driver that does not answer
        return f"torch {torch.__version__} cannot use it: {_first_line(error)}"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no device of that name; look at nvidia-smi"


def _folder() -> Path:
    """Of the locks of this user's processes on this machine, or in this job, where GPUs may have names of their own."""
    job = next((os.environ[name] for name in _JOBS if os.environ.get(name)), "")
    folder = Path(tempfile.gettempdir(), f"rftdask-gpus-{os.getuid()}" + f"-{job.replace('/', '-')}" * bool(job))
    folder.mkdir(mode=0o700, exist_ok=True)
    # Where all users share a folder for temporary files, anybody may have put a folder or a link of this name there.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{folder} belongs to somebody else; set TMPDIR to a folder of your own")
    return folder


def _claim(names: Sequence[str], number: int, role: str) -> list[str]:
    """The first `number` GPUs of those that no living process of this user and role has claimed.

    Raises: UserError: there are too few.
    """
    folder = _folder()
    deadline = time.monotonic() + _FREE_S
    while True:
        found: dict[str, int] = {}
        for name in names:
            # The kernel ends a lock with its process, so a GPU is free again when that has gone.
            file = os.open(folder / f"{role}gpu-{name.replace('/', '-')}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            found[name] = file
            if len(found) == number:
                _claims.extend(found.values())
                return list(found)
        # Too few, so none is kept: two who wait must not each hold what the other needs.
        for file in found.values():
            os.close(file)
        if time.monotonic() > deadline:
            raise UserError(
                f"{number} of the GPUs {', '.join(names)} are needed for this process, and {len(found)} are free: "
                f"other workers of yours on this machine have the others. Start fewer workers here, or give each its "
                f"own by {_VARIABLE}"
            )
        time.sleep(_LOOK_S)


def _gpu_peak() -> str:
    """How much memory this process had on its GPU, as it ends a sentence; "" where that cannot be told."""
    try:
        cuda = _cuda()
        free, total = cuda.mem_get_info()
        peak, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    except (RuntimeError, AssertionError):  # a device that failed tells nothing
        return ""
    others = max(0, total - free - cuda.memory_reserved())
    return (
        f"; the peak was {peak / _GIB:.1f} GiB in tensors, {reserved / _GIB:.1f} GiB with what the allocator holds, of "
        f"{total / _GIB:.1f} GiB, of which {others / _GIB:.1f} GiB are others'"
    )


def _host_peak() -> float:
    """GiB of host memory that this process has had at most."""
    import resource  # late: only for the words of an error

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
