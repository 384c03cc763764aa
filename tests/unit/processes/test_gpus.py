"""Promises of GPUs: an unusable planned GPU is an error; processes that see all GPUs claim different ones."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftdask.errors import RoleError, UserError
from rftdask.processes import gpus
from rftdask.processes.device_lock import DEVICES_VARIABLE, DeviceLock
from rftdask.processes.gpus import free_host_bytes, out_of_memory, use_device

GIB = 2**30
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.1 GiB is free."
)


def cuda(works: bool = True, problem: Exception | None = None) -> SimpleNamespace:
    """A stand-in for torch.cuda on a GPU of 80 GiB of which another process has 2."""

    def init() -> None:
        if problem is not None:
            raise problem

    return SimpleNamespace(
        is_available=lambda: works,
        init=init,
        mem_get_info=lambda: (8 * GIB, 80 * GIB),
        memory_reserved=lambda: 70 * GIB,
        max_memory_allocated=lambda: 66.5 * GIB,
        max_memory_reserved=lambda: 71 * GIB,
    )


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call it with the GPUs that the process sees, and a stand-in for torch.cuda."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpus, "_FREE_S", 0.0)
    for name in (*gpus._JOBS, DEVICES_VARIABLE):
        monkeypatch.setenv(name, "")

    def see(names: str, stand_in: SimpleNamespace) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        monkeypatch.setattr(gpus, "_cuda", lambda: stand_in)

    yield see
    while gpus._claims:
        os.close(gpus._claims.pop())


def test_a_planned_gpu_is_used_or_it_is_an_error(sees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sees("3", cuda())
    assert use_device() == "cuda"
    sees("", cuda(works=False))
    assert use_device() == "cpu"
    sees("GPU-5f", cuda(works=False))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"GPU GPU-5f is planned .*built without CUDA: install .*hide the GPUs"):
        use_device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    old = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    sees("0", cuda(works=False, problem=RuntimeError(old)))
    with pytest.raises(
        UserError, match=r"cannot use it: The NVIDIA driver on your system is too old \(found version 11"
    ):
        use_device()
    sees("9", cuda(works=False))
    with pytest.raises(UserError, match=r"finds no device of that name; see nvidia-smi"):
        use_device()


def test_a_process_claims_gpus_that_no_other_has(sees: Any, tmp_path: Path) -> None:
    sees("0,1,2", cuda())
    assert use_device() == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    sees("0,1,2", cuda())
    use_device(num_gpus=2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
    sees("0,1,2", cuda())
    with pytest.raises(UserError, match=r"this process needs 1 of the GPUs 0, 1, 2, and 0 are free"):
        use_device()
    # A process with the right number of visible GPUs claims none.
    sees("1", cuda())
    use_device()


def test_a_rank_and_an_engine_share_the_lock_of_a_gpu(sees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("rank-", "engine-"):
        for gpu in ("0", "1"):
            monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
            sees("0,1", cuda())
            use_device(shares_as=role)
            assert os.environ[DEVICES_VARIABLE].rpartition(":")[2] == os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    engine = DeviceLock.from_environment(exclusive=False)
    assert engine is not None
    rank = DeviceLock(os.environ[DEVICES_VARIABLE].rpartition(":")[0], ["1"], exclusive=True)
    assert rank.try_acquire()
    assert not engine.try_acquire()
    # A job has GPUs of its own, which may have the names of another job's.
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    sees("0,1", cuda())
    use_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


JOINED = """
import os, sys
from types import SimpleNamespace
from rftdask.engines import server
from rftdask.processes import gpus

seen = []
gpus._cuda = lambda: SimpleNamespace(is_available=lambda: True, set_device=seen.append)
if sys.argv[1] == "rank":
    gpus.use_device()
else:
    server._device({"plugin_dirs": [], "section": {"tensor_parallel_size": int(sys.argv[1])}, "colocated": False})
gpus.set_device()
print(os.environ["CUDA_VISIBLE_DEVICES"], *seen, flush=True)
input()
"""


@pytest.mark.slow
def test_joined_workers_claim_different_gpus(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1,2,3,4", "RFTDASK_THREADS": "1"}
    env = {name: value for name, value in env.items() if name not in (*gpus._JOBS, DEVICES_VARIABLE)}
    with ExitStack() as stack:  # three engines, of which one has two GPUs, and a rank, at the same time
        processes = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", JOINED, who], env=env, stdin=-1, stdout=-1))
            for who in ("1", "2", "1", "rank")
        ]
        told = [process.stdout.readline().decode().split() for process in processes if process.stdout is not None]
        for process in processes:
            process.kill()
    taken = [name for names, _ in told for name in names.split(",")]
    assert sorted(taken) == ["0", "1", "2", "3", "4"], told
    assert [len(names.split(",")) for names, _ in told] == [1, 2, 1, 1]
    assert {device for _, device in told} == {"0"}, "each process sees only its own GPUs"


def test_a_killed_process_releases_its_gpu(sees: Any, tmp_path: Path) -> None:
    code = "from rftdask.processes import gpus; gpus._claim(['0', '1'], 2, ''); print('has', flush=True); input()"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has\n"
        sees("0,1", cuda())
        with pytest.raises(UserError, match="0 are free"):
            use_device()
        other.send_signal(signal.SIGKILL)
        other.wait()
    use_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_out_of_gpu_memory_names_phase_peak_and_remedy(sees: Any) -> None:
    sees("0", cuda())
    error = RoleError("engine 'transformers' failed on a batch of 4 requests")
    error.__cause__ = torch.OutOfMemoryError(TORCH_SAYS)
    told = str(out_of_memory(error, "step 7 is trained", "trainer.gradient_checkpointing: true"))
    assert told.startswith("out of GPU memory while step 7 is trained: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "the peak was 66.5 GiB in tensors and 71.0 GiB in the allocator, of 80.0 GiB; other processes" in told
    assert "To change: trainer.gradient_checkpointing: true" in told
    assert out_of_memory(RuntimeError("shapes do not fit"), "step 7 is trained", "") is None


def test_out_of_host_memory_is_named_as_such(sees: Any) -> None:
    sees("", cuda())
    for error in (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8589934592"), MemoryError()):
        told = str(out_of_memory(error, "checkpoint 4 is saved", "use LoRA"))
        assert told.startswith("out of host memory while checkpoint 4 is saved: ")
        assert told.endswith("Give its machine or job more memory, or use LoRA")


def test_an_engine_out_of_memory_names_the_remedy(sees: Any) -> None:
    from rftdask.engines.server import _telling_memory

    sees("0", cuda())
    spec = {"section": {"engine_type": "vllm"}}
    with (
        pytest.raises(UserError, match=r"while the engine generates.*explorer.rollout_model.gpu_memory_utilization"),
        _telling_memory(spec, "the engine generates"),
    ):
        raise RoleError("engine 'vllm' failed on request 3: OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/job/step", "job", "memory.max", "memory.current"),
        ("4:memory:/job/step", "memory/job/step", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("0::/elsewhere", "", "memory.max", "memory.current"),  # a container, which sees its own group at the top
    ],
)
def test_the_host_memory_of_a_job_is_limited_by_its_cgroup(
    tmp_path: Path, line: str, folder: str, limit: str, used: str
) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(f"1:cpu:/\n{line}\n")
    machine = free_host_bytes(groups, own)
    assert machine > 2**20  # nothing is limited
    group = groups / folder
    group.mkdir(parents=True)
    (group / limit).write_text("5000\n")
    (group / used).write_text("4500\n")
    (group / "memory.stat").write_text("anon 4000\ninactive_file 300\n")
    assert free_host_bytes(groups, own) == 800
    (group / limit).write_text("max\n")
    assert free_host_bytes(groups, own) > 2**20
