"""Several updates per batch equal a plain loop over the same mini-batches, on any number of ranks."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.ratio import Ppo
from rftdask.buffer.batches.batch import supervised_batch
from rftdask.config.schema.optimizer import OptimizerConfig
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.critic import ValueModel
from rftdask.trainer.engines.micro_batches import mini_batches
from rftdask.trainer.engines.optimizer import learning_rate
from rftdask.trainer.engines.strategies.base import DDP
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.packing import pack_rows
from tests.thread_ranks import in_threads
from tests.unit.trainer.trainer_cases import engine_config, rollouts

EPOCHS, NUM_PARTS, STEPS = 2, 3, 2
BETAS = (0.8, 0.9)
CLOSE = 1e-4
"""A hundredth of the learning rate, by which an update moves a weight. Adam divides a gradient by its size, which
enlarges the rounding of the smallest gradients, and that rounding depends on the processor."""
SETTINGS: dict[str, Any] = {
    "deterministic": True,
    "algorithm__repeat_times": 4,
    "buffer__batch_size": 3,
    "trainer__ppo_epochs": EPOCHS,
    "trainer__ppo_mini_batch_size": 4,
    "algorithm__optimizer__lr_scheduler_type": "cosine",
    "algorithm__optimizer__lr_warmup_steps": 3,
    "algorithm__optimizer__betas": BETAS,
    "algorithm__optimizer__weight_decay": 0.1,
    "algorithm__optimizer__decay_all_weights": True,
}


def engine(
    model: Path, name: str = "grpo", ranks: Ranks | None = None, loss: Ppo | None = None, **overrides: Any
) -> TorchEngine:
    config = engine_config(model, **{**SETTINGS, **overrides})
    algorithm = make_algorithm(name, kl_loss_fn="none")
    algorithm = algorithm if loss is None else replace(algorithm, policy_loss_fn=loss)
    return TorchEngine(config, algorithm, None if ranks is None else DDP(ranks), total_steps=STEPS)


def row_logprobs(model: Any, tokens: np.ndarray) -> Tensor:
    """log p of the tokens after the two of the prompt."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logprobs: Tensor = model(ids[None]).logits[0, 1:-1].log_softmax(-1).gather(1, ids[2:, None])[:, 0]
    return logprobs


@pytest.mark.parametrize("bypass", [True, False])
def test_updates_equal_those_of_a_plain_loop(model: Path, bypass: bool) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.1)
    section = OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=3)
    rate = learning_rate(section, STEPS * EPOCHS * NUM_PARTS)
    tested, clipped = engine(model, algorithm__bypass_old_logprobs=bypass), []
    for step in range(STEPS):
        batch = rollouts(seed=step)
        rows = batch.row_tokens()
        sampled = [torch.from_numpy(row) for row in batch.row_logprobs()]
        with torch.no_grad():
            old = sampled if bypass else [row_logprobs(plain, row) for row in rows]
        rewards = torch.from_numpy(batch.rewards).view(3, 4)
        means, stds = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
        advantages = ((rewards - means) / (stds + 1e-6)).flatten()
        norms, losses, rates = [], [], []
        for epoch in range(step * EPOCHS, (step + 1) * EPOCHS):
            for members in mini_batches(batch.experts, NUM_PARTS, unit=1, seed=0, epoch=epoch):
                total, count, num_clipped = torch.zeros(()), 0, 0
                for i in members:
                    ratio = (row_logprobs(plain, rows[i]) - old[i]).exp()
                    gain, held = advantages[i] * ratio, advantages[i] * ratio.clamp(0.8, 1.2)
                    total = total - torch.minimum(gain, held).sum()
                    count, num_clipped = count + len(ratio), num_clipped + int((held < gain).sum())
                loss = total / count
                optimizer.zero_grad()
                loss.backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
                # The schedule counts updates: this one is as many after those of the other steps.
                rates.append(rate(len(clipped) + 1))
                optimizer.param_groups[0]["lr"] = rates[-1]
                optimizer.step()
                losses.append(float(loss.detach()))
                clipped.append(num_clipped)
        metrics = tested.train_step(batch, step + 1)
        assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
        assert metrics["lr"] == pytest.approx(np.mean(rates), rel=1e-9)
    assert (sum(clipped[:1]) > 0) == bypass  # what was just scored has ratio 1
    assert sum(clipped) > 0
    ours = load(bytes(tested.weights()["model.safetensors"]))
    theirs = plain.state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=CLOSE)


def test_critic_updates_are_clipped_around_initial_values(model: Path) -> None:
    body = AutoModelForCausalLM.from_pretrained(model)
    plain = ValueModel(body.base_model, 16)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.1)
    clip = 0.01
    tested = engine(model, "ppo", trainer__critic__cliprange_value=clip)
    batch = rollouts()
    rows = batch.row_tokens()

    def values(i: int) -> Tensor:
        packed = pack_rows([rows[i]], np.array([2]), np.ones(1, np.float32))
        found: Tensor = plain(packed)[0]
        return found

    with torch.no_grad():
        old = [values(i) for i in range(12)]
    # gamma 1, lambda 1: every token's return is the reward of its row.
    losses = []
    for epoch in range(EPOCHS):
        for members in mini_batches(batch.experts, NUM_PARTS, unit=1, seed=0, epoch=epoch):
            errors = []
            for i in members:
                now, target = values(i), float(batch.rewards[i])
                near = torch.minimum(torch.maximum(now, old[i] - clip), old[i] + clip)
                errors.append(0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2))
            loss = torch.cat(errors).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    metrics = tested.train_step(batch, 1)
    assert metrics["critic_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    saved = load(bytes(tested.state_files()["critic/model.safetensors"]))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=CLOSE)


@dataclass(frozen=True)
class Watched(Ppo):
    """PPO's; keeps what it was given."""

    seen: list[LossInputs] = field(default_factory=list)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append(inputs)
        return super().__call__(inputs)


def furthest(inputs: LossInputs) -> float:
    """Return the largest distance of a ratio from 1."""
    return float((inputs.log_ratio().detach().exp() - 1).abs().max())


def test_ratios_are_1_in_the_first_update_and_clipped_later(model: Path) -> None:
    loss = Watched()
    # Without warm-up, whose first update has rate 0.
    settings = {"algorithm__bypass_old_logprobs": False, "algorithm__optimizer__lr_warmup_steps": 0}
    metrics = engine(model, loss=loss, **settings).train_step(rollouts(), 1)
    assert len(loss.seen) == EPOCHS * NUM_PARTS
    assert furthest(loss.seen[0]) < 1e-5
    assert min(furthest(inputs) for inputs in loss.seen[1:]) > 1e-3
    assert metrics["clip_frac"] > 0.0
    assert metrics["ppo_kl"] != 0.0
    once = engine(model, trainer__ppo_epochs=1, trainer__ppo_mini_batch_size=12, **settings)
    assert once.train_step(rollouts(), 1)["clip_frac"] == 0.0


def test_decoupled_ppo_uses_the_policy_before_the_batch(model: Path) -> None:
    found = []
    for bypass in (True, False):
        tested = engine(model, "decoupled_ppo", algorithm__bypass_old_logprobs=bypass)
        found.append(tested.train_step(rollouts(), 1))
    # However the ratios of other losses are taken: this one corrects for what sampled, and clips around its start.
    assert found[0] == found[1]
    assert found[0]["clip_frac"] > 0.0


def test_mismatch_is_measured_before_the_first_update(model: Path) -> None:
    batch = rollouts()
    of_first = mini_batches(batch.experts, NUM_PARTS, unit=1, seed=0, epoch=0)[0]
    loss = Watched()
    metrics = engine(model, loss=loss).train_step(batch, 1)
    gap = (loss.seen[0].policy_logprobs_BT.detach() - loss.seen[0].rollout_logprobs_BT)[loss.seen[0].loss_mask_BT]
    assert len(loss.seen[0].loss_mask_BT) == len(of_first)
    assert metrics["mismatch_kl"] == pytest.approx(float((torch.expm1(gap) - gap).mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_dataset_can_be_trained_in_mini_batches(model: Path, name: str) -> None:
    rows = [([i + 2, i + 3, i + 4, i + 5], 2, None) for i in range(12)]
    batch = supervised_batch(rows, [str(i) for i in range(12)], 2 if name == "dpo" else 1)
    tested = engine(model, name)
    first, later = (tested.train_step(batch, step)["loss"] for step in (1, 2))
    assert later < first


class Cut(Exception):
    pass


@dataclass(frozen=True)
class CutOff(Ppo):
    """PPO's, until a call fails."""

    left: list[int] = field(default_factory=lambda: [4])

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise Cut
        return super().__call__(inputs)


def test_repeating_an_interrupted_step_gives_the_same_bits(model: Path) -> None:
    whole = engine(model, "ppo")
    whole.train_step(rollouts(), 1)
    saved = whole.state_files()
    whole.train_step(rollouts(seed=1), 2)
    cut = engine(model, "ppo", loss=CutOff())
    cut.load_state_files(saved)
    with pytest.raises(Cut):
        cut.train_step(rollouts(seed=1), 2)
    again = engine(model, "ppo", seed=0)
    again.load_state_files(saved)
    again.train_step(rollouts(seed=1), 2)
    assert again.state_files() == whole.state_files()


def test_two_ranks_make_the_updates_of_one(model: Path) -> None:
    def trained(ranks: Ranks) -> tuple[dict[str, float], dict[str, Tensor]]:
        tested = engine(model, "ppo", ranks, algorithm__bypass_old_logprobs=False, trainer__micro_batch_size=1)
        metrics = tested.train_step(rollouts(), 1)
        return metrics, {name: p.detach().clone() for name, p in tested._model.named_parameters()}

    (alone, weights), *both = trained(Ranks()), *in_threads(2, trained)
    for metrics, found in both:
        for name, value in alone.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("parts", [{}, {"trainer__ppo_epochs": 1, "trainer__ppo_mini_batch_size": None}])
def test_two_ranks_need_only_the_tokens_of_their_rows(model: Path, parts: dict[str, Any]) -> None:
    def trained(ranks: Ranks) -> tuple[np.ndarray, dict[str, float]]:
        tested, batch = engine(model, "ppo", ranks, trainer__micro_batch_size=1, **parts), rollouts()
        rows = tested.rows_to_compute(batch.holding([]), 1)
        assert rows is not None
        whole = engine(model, "ppo", ranks, trainer__micro_batch_size=1, **parts).train_step(batch, 1)
        own = tested.train_step(batch.holding(rows), 1)
        assert own == whole
        return rows, own

    (first, told), (second, also) = in_threads(2, trained)
    assert told == also
    assert sorted({*first, *second}) == list(range(12))
    if parts:
        assert len({*first} & {*second}) <= 1, "but for the row of idle passes"


@given(st.integers(0, 12), st.integers(0, 8), st.integers(1, 6), st.sampled_from([1, 2]), st.integers(0, 5))
def test_mini_batches_hold_rows_once_evenly(num_own: int, num_shown: int, count: int, unit: int, epoch: int) -> None:
    experts = np.repeat(np.arange(num_own + num_shown) >= num_own, unit)
    parts = mini_batches(experts, count, unit=unit, seed=7, epoch=epoch)
    assert len(parts) == min(count, num_own + num_shown)
    assert sorted(int(row) for part in parts for row in part) == list(range(len(experts)))
    assert all((part.reshape(-1, unit) // unit == part[::unit, None] // unit).all() for part in parts)
    for sizes in ([len(part) for part in parts], [int(experts[part].sum()) for part in parts]):
        assert not parts or max(sizes) - min(sizes) <= unit
    again = mini_batches(experts, count, unit=unit, seed=7, epoch=epoch)
    assert [part.tolist() for part in parts] == [part.tolist() for part in again]


def test_every_epoch_has_its_own_order_of_mini_batches() -> None:
    experts = np.zeros(16, bool)
    orders = {str(mini_batches(experts, 4, unit=1, seed=0, epoch=epoch)) for epoch in range(5)}
    assert len(orders) == 5
    (whole,) = mini_batches(experts, 1, unit=1, seed=0, epoch=3)
    assert whole.tolist() == list(range(16))


def test_a_critic_begins_with_the_model_of_its_own_path(model: Path, tmp_path: Path) -> None:
    build_toy_model(tmp_path, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1)
    for path, width in ((None, 16), (str(tmp_path), 8)):
        config = engine_config(model, model__critic_model_path=path, algorithm__algorithm_type="ppo")
        critic = TorchEngine(config, make_algorithm("ppo"))._critic
        assert critic is not None
        assert {p.shape[-1] for n, p in critic.model.named_parameters() if "embed_tokens" in n} == {width}
