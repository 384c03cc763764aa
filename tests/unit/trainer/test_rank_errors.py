"""Promises of a rank's errors: out-of-memory errors name keys, NCCL's texts are kept, and timeouts name the call."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from rftdask.config import load_config
from rftdask.errors import PeerLostError
from rftdask.trainer import flight_recorder
from rftdask.trainer.process_ranks import lost_peer

DUPLICATE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:94, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 50000
Exception raised from getNCCLComm at ... (most recent call first):
frame #0: c10::Error"""
REMOTE = """NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/IB: Got completion from peer 10.0.0.2 with status=12"""
# As torch 2.13 wrote it for two ranks on gloo, of which one slept.
ENTRY = {
    "frames": [
        # In an environment below a clone of this name.
        {"name": "broadcast", "filename": "/home/me/rftdask/.venv/lib/torch/distributed_c10d.py", "line": 3145},
        {"name": "broadcast", "filename": "/home/me/rftdask/rftdask/trainer/process_ranks.py", "line": 36},
    ],
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 7,
    "p2p_seq_id": 0,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[4096]],
    "input_dtypes": ["Float"],
    "state": "started",
    "is_p2p": False,
}


def test_a_mistake_reported_by_nccl_is_not_a_lost_peer() -> None:
    told = lost_peer(dist.DistBackendError(DUPLICATE))
    assert told is not None
    assert not isinstance(told, PeerLostError)
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 50000" in str(told)
    assert "frame #0" not in str(told)


def test_a_lost_peer_is_reported_with_the_text_of_nccl() -> None:
    told = lost_peer(dist.DistBackendError(REMOTE))
    assert isinstance(told, PeerLostError)
    assert "Got completion from peer 10.0.0.2 with status=12" in str(told)
    assert isinstance(
        lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")), PeerLostError
    )
    assert lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_a_timeout_names_the_collective_call(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert flight_recorder.left_behind(folder, 1) == ""
    prefix = flight_recorder.recording(folder)["TORCH_FR_DUMP_TEMP_FILE"]
    slow = {**ENTRY, "profiling_name": "gloo:broadcast", "state": "scheduled", "process_group": ("1", "of saving")}
    earlier = {**ENTRY, "collective_seq_id": 6, "state": "completed"}
    Path(f"{prefix}1").write_bytes(pickle.dumps({"entries": [earlier, ENTRY, slow], "version": "2.10"}))
    told = flight_recorder.left_behind(folder, 1)
    assert told.startswith(
        "its last call in default_pg was number 7, nccl:all_reduce of [[4096]] Float, started and not completed, "
        "at rftdask/trainer/process_ranks.py:36"
    )
    assert "; its last call in of saving was number 7, gloo:broadcast of [[4096]] Float, at rftdask/trainer/" in told
    Path(f"{prefix}1").write_bytes(pickle.dumps(Path))  # it reads nothing that could run
    assert flight_recorder.left_behind(folder, 1) == ""
    flight_recorder.forget(folder, 1)
    assert list(tmp_path.iterdir()) == []


HANGING = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from rftdask.trainer.process_ranks import ProcessRanks, lost_peer

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
meeting = f"file://{folder}/meeting"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=30))
ranks = ProcessRanks(dist.new_group(timeout=timedelta(seconds=2), group_desc="of training"))
ranks.all_reduce(torch.ones(8))
if rank == 1:
    sys.stdin.read()  # as a rank that hangs, until the test has seen the output of the other rank
try:
    ranks.all_reduce(torch.ones(4096))
except RuntimeError as error:
    print(lost_peer(error))
    # Where NCCL is, its watchdog writes this record into the file before it ends the process.
    dump = torch._C._distributed_c10d._dump_fr_trace()
    Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_bytes(dump)
    sys.stdout.flush()
    os._exit(0)  # without a goodbye to the rank that hangs
"""


@pytest.mark.slow
def test_gloo_errors_name_the_call_that_timed_out(tmp_path: Path) -> None:
    """gloo records calls like NCCL, but without their completion, and without a file at a timeout."""
    env = {**os.environ, **flight_recorder.recording(str(tmp_path))}
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen([*command, "1", str(tmp_path)], stdin=subprocess.PIPE, env=env) as hung:
        waiting = subprocess.run([*command, "0", str(tmp_path)], capture_output=True, text=True, timeout=120, env=env)
        hung.kill()
    assert waiting.returncode == 0, waiting.stderr[-2000:]
    call = r"number 2, gloo:all_reduce of \[\[4096\]\] Float, at rftdask/trainer/process_ranks.py:\d+"
    what = f"its last call in of training was {call}"
    assert re.search(rf"^another rank does not answer: .*Timed out waiting.*; {what}", waiting.stdout), waiting.stdout
    told = flight_recorder.left_behind(str(tmp_path), 0)
    assert re.search(rf"{what}.* \(all calls: torchfrtrace {tmp_path} --prefix collectives-rank-\)$", told), told


def test_keys_that_are_set_already_are_not_advised() -> None:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64, "lora_configs": [{"lora_rank": 8}]},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    config = load_config(tree, ["trainer.gradient_checkpointing=true", "trainer.trainer_strategy=fsdp2"])
    few = config.trainer_memory_keys()
    assert few == "trainer.max_token_len_per_gpu below 16384, more trainer.num_ranks or trainer.offload_policy: true"
    assert config.trainer_memory_keys(of_passes=False) == "more trainer.num_ranks or trainer.offload_policy: true"
