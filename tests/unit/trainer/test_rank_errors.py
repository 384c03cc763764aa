"""Promises of what a rank says of torch's errors: a lack of memory names keys, NCCL's own words are passed on, and who
waited in vain tells in which call.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch.distributed as dist

from rftdask.config import load_config
from rftdask.errors import PeerLostError
from rftdask.trainer import flight_recorder
from rftdask.trainer.process_ranks import lost_peer
from rftdask.trainer.rank import _less_memory

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
        {"name": "broadcast", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 3145},
        {"name": "broadcast", "filename": "/home/me/rftdask/trainer/process_ranks.py", "line": 36},
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


def test_a_mistake_that_nccl_tells_is_no_peer_that_is_lost() -> None:
    told = lost_peer(dist.DistBackendError(DUPLICATE))
    assert told is not None
    assert not isinstance(told, PeerLostError)
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 50000" in str(told)
    assert "frame #0" not in str(told)


def test_a_peer_that_is_lost_is_told_in_nccls_words() -> None:
    told = lost_peer(dist.DistBackendError(REMOTE))
    assert isinstance(told, PeerLostError)
    assert "Got completion from peer 10.0.0.2 with status=12" in str(told)
    assert isinstance(
        lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")), PeerLostError
    )
    assert lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_who_waits_in_vain_tells_in_which_call(tmp_path: Path) -> None:
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


def test_keys_that_are_set_already_are_not_advised() -> None:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64, "lora_configs": [{"lora_rank": 8}]},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    few = _less_memory(load_config(tree, ["trainer.gradient_checkpointing=true", "trainer.trainer_strategy=fsdp2"]))
    assert few == "trainer.max_token_len_per_gpu below 16384, more trainer.num_ranks or trainer.offload_policy: true"
