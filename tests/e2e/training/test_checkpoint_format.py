"""Promise: a checkpoint of several ranks is one of `torch.distributed.checkpoint`: PyTorch's own reader, in one process
without rftdask, finds every weight and every moment of AdamW in its folder, bit for bit.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save

from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.storage import open_storage
from rftdask.synchronizer.manifest import is_valid
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.strategies.base import distinct_state, full
from rftdask.trainer.process_ranks import ProcessRanks
from tests.e2e.gloo_ranks import run_ranks
from tests.e2e.training.test_ranks_agree import batch_for, engine, strategy_of

STEP = 2


def train_and_save(gangs: dict[int, Ranks], model: str, folder: str) -> bytes:
    """Return what two ranks hold together after some steps, and save it."""
    ranks = gangs[2]
    made = engine(model, "grpo", strategy_of("fsdp2", ranks))
    for step in range(1, STEP + 1):
        made.train_step(batch_for("grpo", step), step)
    tensors = dict(distinct_state(made._model))
    for name, state in made._optimizer._states():
        tensors |= {f"{name}/{key}": value for key, value in state.items()}
    whole = {name: full(tensor).contiguous() for name, tensor in tensors.items()}
    writers = ProcessRanks(torch.distributed.new_group())
    saver = Checkpoints(open_storage(folder), "main", ranks=ranks, writers=writers, strategy="unrestricted")
    saver.save(STEP, made.state_files(), {})
    saver.flush()
    return save(whole)


def test_pytorch_reads_a_checkpoint_of_two_ranks(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=18, intermediate_size=33, num_layers=1, num_heads=3)
    run = str(tmp_path / "run")
    files = run_ranks(2, tmp_path, train_and_save, str(tmp_path / "model"), run)
    expected = load(files[0])
    folder = tmp_path / "run" / f"global_step_{STEP}"
    assert is_valid(open_storage(run), folder.name, version=STEP)
    assert {path.name for path in (folder / "actor").iterdir()} == {
        "kl_coefs.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optim-1.safetensors",
        "optim.safetensors",
    }
    # As in docs/trainer.md.
    reader = dcp.HuggingFaceStorageReader(str(folder / "actor"))
    saved = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in saved.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, storage_reader=reader)
    assert state.keys() - expected.keys() == {"kl", "num_skipped_in_a_row", "spares_norms_biases_embeddings"}
    assert sum(name.endswith("/exp_avg_sq") for name in state) > 10
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
