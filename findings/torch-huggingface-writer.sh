#!/usr/bin/env bash
# Expected: a distributed checkpoint that two ranks save without an error contains both halves of a sharded tensor, or
#           saving raises.
# Happens:  torch.distributed.checkpoint.save with HuggingFaceStorageWriter and its defaults writes one file, and both
#           ranks write it. The file has one rank's half of the tensor as if it were all of it. There is no error and no
#           warning. With save_distributed=True there is one file for each rank.
# Hurts:    training with FSDP2 or tensor parallelism that writes checkpoints in this format: half of the weights are
#           gone, which only the shape shows when somebody loads them.
# Seen:     torch 2.13.0 with safetensors 0.8.0, November 2026, with two processes on CPUs (gloo). The defaults are
#           meant for a full state dict saved by rank 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "safetensors==0.8.0" "numpy" || exit 75
cd "$folder"
cat >program.py <<'PYTHON' # a file, since the ranks import it
import glob
import os
import warnings

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def save(rank, folder, settings):
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    weight = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dcp.save({"weight": weight}, storage_writer=dcp.HuggingFaceStorageWriter(folder, **settings))
    dist.destroy_process_group()


def saved(name, **settings):
    folder = os.path.abspath(name)
    torch.multiprocessing.spawn(save, (folder, settings), nprocs=2)
    files = sorted(glob.glob(f"{folder}/*.safetensors"))
    return [safetensors.torch.load_file(file)["weight"].tolist() for file in files]


if __name__ == "__main__":
    first, second = [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]
    default, distributed = saved("default"), saved("distributed", save_distributed=True)
    print("torch", torch.__version__)
    print("default:                ", default)
    print("save_distributed=True:  ", distributed)
    assert default in ([first], [second])
    assert distributed == [first, second]
PYTHON
venv/bin/python program.py
