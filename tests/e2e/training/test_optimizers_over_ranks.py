"""Promises of optimizers under fsdp2, whose state is spread as the weights are: weights are those of one rank up to
rounding, and what two ranks saved, one rank loads to the bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from rftdask.models.toy import build_toy_model
from rftdask.trainer.engines.strategies.base import Strategy, full
from rftdask.trainer.ranks import Ranks
from tests.e2e.gloo_ranks import run_ranks
from tests.e2e.training.test_ranks_agree import batch_for, engine, strategy_of

NAMES = ("muon", "sgd")
"""Matrices that are multiplied over ranks, and a state of one tensor; adamw is in test_ranks_agree.py."""
STEPS = 3


def train(gangs: dict[int, Ranks] | None, model: str, name: str, folder: str) -> bytes:
    """Weights and optimizer state after some steps, whole; each rank writes its files to `folder`."""
    strategy = Strategy(Ranks()) if gangs is None else strategy_of("fsdp2", gangs[2])
    made = engine(model, "grpo", strategy, algorithm__optimizer__optimizer_type=name)
    for step in range(1, STEPS + 1):
        made.train_step(batch_for("grpo", step), step)
    for file, data in made.state_files().items():
        path = Path(folder, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    tensors = dict(made._model.named_parameters())
    for parameter, state in made._optimizer._states():
        tensors |= {f"{parameter}/{key}": value for key, value in state.items()}
    return save({key: full(tensor.detach()).contiguous() for key, tensor in tensors.items()})


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_step_as_one_and_save_what_one_loads(tmp_path: Path, name: str) -> None:
    model, saved = tmp_path / "model", tmp_path / "saved"
    build_toy_model(model, hidden_size=18, intermediate_size=33, num_layers=1, num_heads=3)
    found = load(run_ranks(2, tmp_path, train, str(model), name, str(saved))[0])
    alone = load(train(None, str(model), name, str(tmp_path / "alone")))
    assert found.keys() == alone.keys()
    # Of muon every step multiplies in bfloat16, which rounds at 2^-8.
    tolerance = 2e-3 if name == "muon" else 1e-4
    for key in (key for key in alone if "/" not in key):
        torch.testing.assert_close(found[key], alone[key], rtol=tolerance, atol=tolerance)
    files = {str(path.relative_to(saved)): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    one = engine(str(model), "grpo", Strategy(Ranks()), algorithm__optimizer__optimizer_type=name)
    one.load_state_files(files)
    for parameter, state in one._optimizer._states():
        for key, value in state.items():
            assert torch.equal(value, found[f"{parameter}/{key}"]), (parameter, key)
    for key, weight in one._model.named_parameters():
        assert torch.equal(weight, found[key]), key
