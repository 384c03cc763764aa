"""Promises of the optimizer: the section selects its class, and its state is restored from files to the bit."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from rftdask.config.schema.optimizer import OPTIMIZERS, OptimizerConfig
from rftdask.errors import RoleError, UserError
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.optimizer import ModelOptimizer
from rftdask.trainer.engines.strategies.base import Strategy

NAME = "actor/optim.safetensors"


class Small(torch.nn.Module):
    """An embedding, two numbered layers with biases and norms, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(5, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        loss: Tensor = self.head(self.norm(hidden)).square().mean()
        return loss


def optimizer(model: torch.nn.Module, **section: Any) -> ModelOptimizer:
    return ModelOptimizer(model, OptimizerConfig(**{"lr": 0.01, **section}), 0.0, Strategy(Ranks()))


def train(model: torch.nn.Module, stepped: ModelOptimizer, steps: range) -> None:
    for step in steps:
        model(torch.tensor([step % 5, 1])).backward()
        stepped.step(step, step)


class Counts(torch.optim.Optimizer):
    """Keeps numbers in its state and its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale, "count": 0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["total"] += 0.1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] * group["scale"] * group["total"] / state["steps"])


class Wide(torch.nn.Module):
    """One matrix that torchao's optimizers keep in blocks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False)])

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.layers[0](torch.linspace(-1, 1, 64).roll(int(tokens[0]))).square().mean()
        return loss


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: make torchao")


@needs_torchao
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_blocks_of_few_bits_go_through_files_to_the_bit(name: str) -> None:
    section = {"optimizer_type": f"torchao.optim.{name}"}
    first, second = Wide(), Wide(seed=1)
    whole, resumed = optimizer(first, **section), optimizer(second, **section)
    train(first, whole, range(1, 4))
    assert any("codes" in key for key in load(bytes(whole.state_files(NAME)[NAME])))
    resumed.load_state_files(NAME, whole.state_files(NAME))
    second.load_state_dict(first.state_dict())
    for model, stepped in ((first, whole), (second, resumed)):
        train(model, stepped, range(4, 7))
    assert whole.state_files(NAME) == resumed.state_files(NAME)
    assert torch.equal(first.layers[0].weight, second.layers[0].weight)


@needs_torchao
def test_stochastic_rounding_adds_up_steps_below_bfloat16() -> None:
    model = Wide().bfloat16()
    torch.nn.init.ones_(model.layers[0].weight)
    stepped = optimizer(model, lr=1e-4, weight_decay=0.0, optimizer_type="torchao.optim.AdamW8bit")
    for step in range(1, 101):
        model.layers[0].weight.grad = torch.ones_like(model.layers[0].weight)
        stepped.step(step, step)
    # A hundred steps of 1e-4, where the next number below 1 is 1 - 2^-8: rounded to the nearest none would be seen.
    assert model.layers[0].weight.dtype == torch.bfloat16
    assert float(model.layers[0].weight.detach().float().mean()) == pytest.approx(0.99, abs=3e-4)


def test_narrow_weights_want_an_optimizer_that_rounds_at_random() -> None:
    with pytest.raises(UserError, match=r"bfloat16 does not go with torch.optim.AdamW, which has no bf16"):
        optimizer(Wide().bfloat16(), optimizer_type="torch.optim.AdamW")


OWN = f"{__name__}.Counts"
ARGUMENTS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, OWN: {"scale": 0.5}, "AdamW": {"fused": True}}


@pytest.mark.parametrize("name", [*OPTIMIZERS, OWN, "torch.optim.Adam"])
def test_a_state_goes_through_files_to_the_bit(name: str) -> None:
    section = {"optimizer_type": name, "optimizer_args": ARGUMENTS.get(name), "weight_decay": 0.1}
    first, second = Small(), Small(seed=1)
    whole = optimizer(first, **section)
    train(first, whole, range(1, 4))
    files = whole.state_files(NAME)
    weights = {key: value.clone() for key, value in first.state_dict().items()}
    resumed = optimizer(second, **section)
    resumed.load_state_files(NAME, files)
    second.load_state_dict(weights)
    assert resumed.state_files(NAME) == files
    for model, stepped in ((first, whole), (second, resumed)):
        train(model, stepped, range(4, 7))
    assert whole.state_files(NAME) == resumed.state_files(NAME)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
        assert not torch.equal(value, weights[key]), key


def test_before_its_first_step_there_is_no_state_to_load() -> None:
    files = optimizer(Small()).state_files(NAME)
    model = Small()
    resumed = optimizer(model)
    resumed.load_state_files(NAME, files)
    assert resumed.state_files(NAME) == files
    assert all(torch.equal(value, Small().state_dict()[key]) for key, value in model.state_dict().items())


def decayed(model: torch.nn.Module, **section: Any) -> set[str]:
    """Names of the weights that move where every gradient is zero."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    stepped = optimizer(model, weight_decay=0.5, **section)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    stepped.step(1, 1)
    return {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "adafactor"])
def test_weight_decay_excludes_norms_biases_and_embeddings(name: str) -> None:
    matrices = {"layers.0.weight", "layers.1.weight", "head.weight"}
    assert decayed(Small(), optimizer_type=name) == matrices
    model = Small()
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.5)  # no zero, which cannot decay
    assert decayed(model, optimizer_type=name, decay_all_weights=True) == {n for n, _ in model.named_parameters()}


def test_a_state_with_decay_of_all_weights_is_rejected() -> None:
    model = Small()
    whole = optimizer(model, decay_all_weights=True)
    train(model, whole, range(1, 3))
    tensors = load(bytes(whole.state_files(NAME)[NAME]))
    old = {NAME: save({key: value for key, value in tensors.items() if not key.startswith("spares")})}
    with pytest.raises(UserError, match=r"set algorithm.optimizer.decay_all_weights: true"):
        optimizer(Small()).load_state_files(NAME, old)
    for section in ({"decay_all_weights": True}, {"weight_decay": 0.0}):
        optimizer(Small(), **section).load_state_files(NAME, old)


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest() -> None:
    model = Small()
    whole = optimizer(model, optimizer_type="Muon", weight_decay=0.0)
    train(model, whole, range(1, 2))
    keys = {name: set(state) for name, state in whole._states()}
    assert {name for name, own in keys.items() if own == {"momentum_buffer"}} == {"layers.0.weight", "layers.1.weight"}
    assert keys["head.weight"] == keys["embedding.weight"] == {"step", "exp_avg", "exp_avg_sq"}


def test_an_unknown_optimizer_or_argument_is_reported() -> None:
    model = Small()
    train(model, whole := optimizer(model), range(1, 2))
    with pytest.raises(RoleError, match="does not fit the model"):
        optimizer(Small(), optimizer_type="adafactor").load_state_files(NAME, whole.state_files(NAME))
    with pytest.raises(UserError, match=r"algorithm.optimizer: sgd rejects its arguments: Invalid momentum"):
        optimizer(Small(), optimizer_type="sgd", optimizer_args={"momentum": -1.0})
