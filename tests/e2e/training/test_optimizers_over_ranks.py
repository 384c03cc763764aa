"""Promises of optimizers under fsdp2, whose state is sharded like the weights: weights equal those of one rank up to
rounding, and one rank loads what two ranks saved, bit for bit.

The same holds for bfloat16 weights with 8-bit moments (trainer.master_weights), and two resuming ranks continue with
the same bits.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import Strategy, full
from tests.e2e.gloo_ranks import run_ranks
from tests.e2e.training.test_ranks_agree import batch_for, engine, exchange, strategy_of

NAMES = ("muon", "sgd")
"""Optimizers whose matrices are multiplied over ranks, and one with a single state tensor; test_ranks_agree.py tests
adamw.
"""
STEPS = 3


def train(gangs: dict[int, Ranks] | None, model: str, name: str, folder: str) -> bytes:
    """Return weights and optimizer state after some steps, whole; each rank writes its files to `folder`."""
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


NARROW = {"trainer__master_weights": "bfloat16", "algorithm__optimizer__optimizer_type": "torchao.optim.AdamW8bit"}


def resume_narrow(gangs: dict[int, Ranks], model: str) -> tuple[bool, bool, list[float]]:
    """Return whether two resuming ranks end like those that continued; whether their saved state is unchanged after one
    rank read and saved it; and their losses.
    """
    strategies = {size: strategy_of("fsdp2", gangs[size]) for size in (1, 2)}
    first = engine(model, "sft", strategies[2], **NARROW)
    assert {parameter.dtype for parameter in first._model.parameters()} == {torch.bfloat16}
    losses = [first.train_step(batch_for("sft", 1), step)["loss"] for step in range(1, STEPS + 1)]
    parts = exchange(gangs[2], dict(first.state_files()))
    saved = {name: data for part in parts for name, data in part.items()}
    second, alone = (engine(model, "sft", strategies[size], seed=5, **NARROW) for size in (2, 1))
    for each in (second, alone):
        each.load_state_files(saved)
    back = engine(model, "sft", strategies[2], seed=6, **NARROW)
    back.load_state_files(alone.state_files())
    passed_on = back.state_files() == first.state_files()
    second._config = first._config  # same seed, which determines the rounding
    for each in (first, second):
        each.train_step(batch_for("sft", 1), STEPS + 1)
    return first.state_files() == second.state_files(), passed_on, losses


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: make torchao")
def test_narrow_weights_and_moments_go_on_as_they_were_saved(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=128, intermediate_size=256, num_layers=1, num_heads=2)
    for same, passed_on, losses in run_ranks(2, tmp_path, resume_narrow, str(tmp_path / "model")):
        assert (same, passed_on) == (True, True)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_step_as_one_and_one_rank_loads_their_state(tmp_path: Path, name: str) -> None:
    model, saved = tmp_path / "model", tmp_path / "saved"
    build_toy_model(model, hidden_size=18, intermediate_size=33, num_layers=1, num_heads=3)
    loaded = load(run_ranks(2, tmp_path, train, str(model), name, str(saved))[0])
    alone = load(train(None, str(model), name, str(tmp_path / "alone")))
    assert loaded.keys() == alone.keys()
    # muon multiplies in bfloat16 at every step, which rounds at 2^-8.
    tolerance = 2e-3 if name == "muon" else 1e-4
    for key in (key for key in alone if "/" not in key):
        torch.testing.assert_close(loaded[key], alone[key], rtol=tolerance, atol=tolerance)
    files = {str(path.relative_to(saved)): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    one = engine(str(model), "grpo", Strategy(Ranks()), algorithm__optimizer__optimizer_type=name)
    one.load_state_files(files)
    for parameter, state in one._optimizer._states():
        for key, value in state.items():
            assert torch.equal(value, loaded[f"{parameter}/{key}"]), (parameter, key)
    for key, weight in one._model.named_parameters():
        assert torch.equal(weight, loaded[key]), key
