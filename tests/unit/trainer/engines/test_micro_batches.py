"""Token-level advantages and rows of several turns: any split gives the results of padded or single rows."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from rftdask.algorithm.advantages.base import AdvantageFn, AdvantageInputs, AdvantageResult
from rftdask.algorithm.advantages.tokens import token_result
from rftdask.algorithm.advantages.turns import Gigpo, StepWiseGrpo
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, batch_from_table, join_batches, supervised_batch
from rftdask.buffer.log.columns import decode_parquet, experiences_to_table
from rftdask.buffer.log.schema import Experience, Turn
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.processes.ranks import Ranks
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Task
from rftdask.rollouts.workflows.registry import workflow
from rftdask.trainer.engines.micro_batches import DeviceBatch, takes_parts
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.numerics import shifted_seed
from tests.thread_ranks import in_threads
from tests.unit.buffer.buffer_cases import parquet_shard
from tests.unit.rollouts.rollout_cases import outcome, task
from tests.unit.trainer.trainer_cases import engine_config

CPU = torch.device("cpu")
KL = {"kl_penalty_fn": "k2", "kl_penalty_fn_args": {"kl_coef": 0.3}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage_fn_args": {"gamma": 0.9, "lam": 0.8}},
    "ppo and KL": {"algorithm_type": "ppo", **KL},
    "reinforceplusplus": {"advantage_fn_args": {"gamma": 0.97}},
    "remax": {},
    "remax and KL": {"algorithm_type": "remax", **KL},
    "on_policy_distill": {},
    "clipb": {"algorithm_type": "grpo", "advantage_fn": "clipb", "advantage_fn_args": {"mu": 0.3}},
    "clipv": {"algorithm_type": "grpo", "advantage_fn": "clipv", "advantage_fn_args": {"mu": 0.3, "max_frac": 0.05}},
    "grpo and KL": {"algorithm_type": "grpo", **KL},
    "rank penalty": {"algorithm_type": "grpo", "advantage_fn_args": {"rank_penalty": 0.4}},
}
SCORES = ("values", "ref_logprobs", "policy_logprobs", "teacher_logprobs", "entropy", "necs")


def algorithm_of(name: str) -> Algorithm:
    parts = dict(ALGORITHMS[name])
    return make_algorithm(parts.pop("algorithm_type", name), **parts)


def batch_of(seed: int) -> TrainingBatch:
    """12 rollouts of four tasks: some of several turns, some tokens not trained, some rows with none that is; one row
    is much longer than the others."""
    random = np.random.default_rng(shifted_seed(seed))
    lengths = np.minimum(random.geometric(0.2, 12), 20)
    lengths[random.integers(12)] = 60
    rows = [
        (
            random.integers(2, 50, 2 + n).tolist(),
            2,
            random.random(n) < random.choice([0.6, 1.0, 0.0], p=[0.6, 0.3, 0.1]),
        )
        for n in lengths
    ]
    batch = supervised_batch(rows, [f"t/0/{i // 3}/{i % 3}/0" for i in range(12)], 3)
    turns = random.integers(0, 2, 12).cumsum()  # neighbors may be turns of one rollout
    return replace(
        batch,
        experts=np.arange(12) == 5,
        rewards=random.choice([0.0, 0.5, 1.0], 12).astype(np.float32),
        rollout_logprobs=-random.random(len(batch.rollout_logprobs)).astype(np.float32),
        baselines=random.random(12).astype(np.float32),
        rollouts=np.unique(turns, return_inverse=True)[1],
        ordinals=np.arange(12),
        groups=np.zeros(12, np.int64),
    )


def scores_of(batch: TrainingBatch, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    count = int(batch.response_lengths.sum())
    return {f"{name}_Q": -torch.randn(count, generator=generator).abs() for name in SCORES}


# ---- the way with padding: rows side by side, [N, T], column by column


def to_rows(batch: TrainingBatch, values_Q: Tensor) -> Tensor:
    rows = values_Q.split(batch.response_lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def behind(values_NT: Tensor, mask_NT: Tensor, gamma: float) -> Tensor:
    """v_t + gamma * (the same of the next trained token), from the last column to the first."""
    sums_NT, after_N = torch.zeros_like(values_NT), torch.zeros_like(values_NT[:, 0])
    for t in reversed(range(values_NT.shape[1])):
        after_N = torch.where(mask_NT[:, t], values_NT[:, t] + gamma * after_N, after_N)
        sums_NT[:, t] = torch.where(mask_NT[:, t], after_N, 0.0)
    return sums_NT


def white(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    kept = values_NT[mask_NT]
    return (values_NT - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)


def padded_way(name: str, batch: TrainingBatch, scores: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """([N, T] advantages, returns, and which tokens stay) of rows side by side."""
    said = {key.removesuffix("_Q"): to_rows(batch, value).double() for key, value in scores.items()}
    logprobs_NT = to_rows(batch, torch.from_numpy(batch.rollout_logprobs)).double()
    used_N = torch.from_numpy(~batch.experts)
    mask_NT = to_rows(batch, torch.from_numpy(batch.loss_mask)).bool() & used_N[:, None]
    rewards_N, rollout_N = torch.from_numpy(batch.rewards).double(), torch.from_numpy(batch.rollouts)
    place_T = torch.arange(mask_NT.shape[1])
    last_N = torch.where(mask_NT, place_T, -1).amax(-1)
    rewards_NT = torch.where(place_T == last_N[:, None], rewards_N[:, None], 0.0)
    if "KL" in name:
        kl_NT = torch.where(mask_NT, 0.3 * 0.5 * (logprobs_NT - said["ref_logprobs"]).square(), 0.0)
        rewards_NT = rewards_NT - kl_NT
        of_rollout = torch.stack([kl_NT[rollout_N == number].sum() for number in rollout_N])
        rewards_N = rewards_N - of_rollout
    kind, returns_NT, stays_NT = name.partition(" ")[0], torch.zeros_like(rewards_NT), torch.ones_like(mask_NT)
    if kind == "ppo":
        gamma, lam = (1.0, 1.0) if "KL" in name else (0.9, 0.8)
        values_NT = torch.where(mask_NT, said["values"], 0.0)
        next_NT = torch.zeros_like(values_NT)
        for row, (values, mask) in enumerate(zip(values_NT, mask_NT, strict=True)):
            places = mask.nonzero().squeeze(-1)
            next_NT[row, places[:-1]] = values[places[1:]]
        advantages_NT = behind(rewards_NT + gamma * next_NT - values_NT, mask_NT, gamma * lam)
        returns_NT, advantages_NT = advantages_NT + values_NT, white(advantages_NT, mask_NT)
    elif kind == "reinforceplusplus":
        returns_NT = behind(rewards_NT, mask_NT, 0.97)
        advantages_NT = white(returns_NT, mask_NT)
    elif kind == "remax":
        returns_NT = behind(rewards_NT, mask_NT, 1.0)
        advantages_NT = returns_NT - torch.from_numpy(batch.baselines).double()[:, None]
    elif kind == "on_policy_distill":
        advantages_NT = said["teacher_logprobs"] - logprobs_NT
    else:
        # One number a rollout, whose tokens count together and whose reward is that of its last turn that is used.
        numbers = sorted({int(n) for n in rollout_N[used_N]})
        members = [(rollout_N == n) & used_N for n in numbers]
        rewards_R = torch.stack([rewards_N[rows][-1] for rows in members])
        if kind == "rank":
            masks = [to_rows(batch, torch.from_numpy(batch.loss_mask)).bool()[rollout_N == n] for n in numbers]
            means = [
                logprobs_NT[rollout_N == n][mask].sum() / max(1, int(mask.sum()))
                for n, mask in zip(numbers, masks, strict=True)
            ]
            rank_R = torch.argsort(torch.argsort(torch.stack(means), stable=True), stable=True)
            rewards_R = rewards_R * (1 - 0.4 * rank_R / len(numbers))
        spread = rewards_R.std()
        advantages_R = (rewards_R - rewards_R.mean()) / (spread + 1e-6) if spread > 1e-9 else 0.0 * rewards_R
        advantages_NT = torch.zeros_like(rewards_NT)
        for rows, value in zip(members, advantages_R, strict=True):
            advantages_NT[rows] = value
        if kind in ("clipb", "clipv"):
            own_NT = logprobs_NT if kind == "clipb" else said["policy_logprobs"]
            signal_NT = own_NT.exp() * (said["entropy"] + own_NT)
            losing_NT = mask_NT & (advantages_NT < 0)
            if kind == "clipb":
                kept = signal_NT[mask_NT]
                stays_NT = ~(losing_NT & (signal_NT - kept.mean() < -0.3 * kept.std(correction=0)))
            else:
                excess_NT = said["necs"] - signal_NT
                out_NT = losing_NT & (excess_NT > 0.3 * excess_NT[mask_NT].std(correction=0))
                most = max(int(0.05 * int(mask_NT.sum())), 1)
                if int(out_NT.sum()) > most:
                    least = excess_NT[out_NT].sort(descending=True).values[most - 1]
                    out_NT = out_NT & (excess_NT >= least)
                stays_NT = ~out_NT
    return torch.where(mask_NT, advantages_NT, 0.0), torch.where(mask_NT, returns_NT, 0.0), stays_NT


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_packed_rows_have_the_advantages_of_rows_side_by_side(name: str, seed: int) -> None:
    batch, scores = batch_of(seed), scores_of(batch_of(seed), seed)
    rows, members = DeviceBatch(batch, CPU), np.arange(12)
    advantages, returns_Q, _ = rows.advantages(algorithm_of(name), scores, 1, 0.3)
    wanted_NT, wanted_returns_NT, stays_NT = padded_way(name, batch, scores)
    mask_NT = to_rows(batch, torch.from_numpy(batch.loss_mask)).bool()
    assert torch.equal(rows.select(rows.loss_mask_Q, members), mask_NT & stays_NT)
    assert torch.equal(rows.num_trained_N, (mask_NT & stays_NT).sum(-1))
    found_NT = torch.where(mask_NT, advantages(members), 0.0)
    torch.testing.assert_close(found_NT, wanted_NT.float(), rtol=1e-5, atol=1e-6)
    if returns_Q is not None:
        torch.testing.assert_close(rows.select(returns_Q, members), wanted_returns_NT.float(), rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Centered(AdvantageFn):
    """Logprobs minus their mean over the batch: a custom function that ignores ranks."""

    token_level = True
    needs = ("rollout_logprobs_Q", "loss_mask_Q")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        mask_Q, logprobs_Q = inputs.used_mask_Q, inputs.rollout_logprobs_Q
        assert logprobs_Q is not None
        return token_result(inputs, logprobs_Q - logprobs_Q[mask_Q].mean())


def in_parts(
    algorithm: Algorithm, batch: TrainingBatch, scores: dict[str, Tensor]
) -> list[tuple[dict[int, list[float]], list[int], dict[str, float]]]:
    """Return per rank: numbers of the tokens of each row, counts of all rows, metrics.

    Each of the three ranks computes its part of the batch and also holds one row of another rank.
    """
    parted = takes_parts(algorithm.advantage_fn)
    computed = [np.array([7, 0, 3, 10]), np.array([1, 5, 2, 11, 9]), np.array([8, 4, 6])]

    def rank(ranks: Ranks) -> tuple[dict[int, list[float]], list[int], dict[str, float]]:
        # A function that ignores ranks gets all rows.
        here = np.sort([*computed[ranks.rank], computed[ranks.rank - 1][0]]) if parted else np.arange(12)
        rows = DeviceBatch(batch.holding(here), CPU, ranks=ranks)
        assert len(rows.loss_mask_Q) == len(rows.rollout_logprobs_Q) == sum(batch.response_lengths[here])
        is_here = torch.from_numpy(np.repeat(np.isin(np.arange(12), here), batch.response_lengths))
        # Scores of another rank's rows are exchanged.
        is_own = torch.from_numpy(np.repeat(np.isin(np.arange(12), computed[ranks.rank]), batch.response_lengths))
        own = {name: torch.where(is_own, value_Q, torch.nan)[is_here] for name, value_Q in scores.items()}
        shared = {name: rows.exchange(value_Q, computed) for name, value_Q in own.items()}
        for name, value_Q in shared.items():
            assert torch.equal(value_Q, scores[name][is_here]), name
        advantages, _, metrics = rows.advantages(algorithm, shared, 1, 0.3, computed)
        found = {}
        for row in here:
            part = torch.where(rows.select(rows.loss_mask_Q, np.array([row])), advantages(np.array([row])), 0.0)
            found[int(row)] = part[0].tolist()
        return found, rows.num_trained_N.tolist(), metrics

    return in_threads(3, rank)


@pytest.mark.parametrize("name", [*ALGORITHMS, "one of somebody's own"])
def test_ranks_compute_the_advantages_of_one_rank(name: str) -> None:
    algorithm = algorithm_of(name) if name in ALGORITHMS else make_algorithm("grpo")
    algorithm = algorithm if name in ALGORITHMS else replace(algorithm, advantage_fn=Centered())
    batch, scores = batch_of(3), scores_of(batch_of(3), 3)
    alone = DeviceBatch(batch, CPU)
    advantages, _, wanted_metrics = alone.advantages(algorithm, scores, 1, 0.3)
    wanted_NT = torch.where(alone.select(alone.loss_mask_Q, np.arange(12)), advantages(np.arange(12)), 0.0)

    for found, counts, metrics in in_parts(algorithm, batch, scores):
        assert counts == alone.num_trained_N.tolist()
        assert metrics == pytest.approx(wanted_metrics, rel=1e-6)
        for row, values in found.items():
            assert values == pytest.approx(wanted_NT[row, : batch.response_lengths[row]].tolist(), rel=1e-5, abs=1e-6)


def batches() -> tuple[TrainingBatch, TrainingBatch]:
    """The same rollouts twice: with one row for all turns, and with one row per turn after the previous ones."""
    random = np.random.default_rng(shifted_seed(3))
    merged, single = [], []
    for rollout, num_turns in enumerate((3, 1, 2, 2)):
        tokens, logprobs, mask, turns = random.integers(2, 200, 2).tolist(), list[float](), list[bool](), list[Turn]()
        common: dict[str, Any] = {
            **{"taskset": "t", "epoch": 0, "task_index": rollout // 2, "rollout": rollout % 2, "explore_step": 1},
            "reward": float(rollout % 2) + 0.25 * rollout,
        }
        for number in range(num_turns):
            added = random.integers(2, 200, 2 if number else 0).tolist()
            sampled = random.integers(2, 200, 3 + number).tolist()
            own = (-5.0 - random.random(len(sampled))).astype(np.float32).tolist()
            start = len(logprobs) + len(added)
            told = {"env_state": f"at {number}", "turn_reward": 0.125 * number}
            single.append(
                Experience(
                    **common,
                    turn=number,
                    tokens=[*tokens, *added, *sampled],
                    prompt_length=len(tokens) + len(added),
                    rollout_logprobs=own,
                    **told,
                )
            )
            tokens += added + sampled
            logprobs += [0.0] * len(added) + own
            mask += [False] * len(added) + [True] * len(sampled)
            turns.append(Turn(number, start, len(logprobs), 0, 0, "user", 0, **told))
        merged.append(
            Experience(**common, tokens=tokens, prompt_length=2, rollout_logprobs=logprobs, loss_mask=mask, turns=turns)
        )
    first, second = (batch_from_table(experiences_to_table(rows)) for rows in (merged, single))
    assert (len(first), len(second), len(first.turns), len(second.turns)) == (4, 8, 8, 8)
    return first, second


@pytest.mark.parametrize("function", [Gigpo(gamma=0.5, fnorm="std"), StepWiseGrpo(enable_step_norm=True)])
def test_turns_in_a_row_have_the_advantages_of_single_rows(function: Any) -> None:
    merged, single = batches()
    inputs = [DeviceBatch(batch, CPU).by_turns().advantage_inputs(1) for batch in (merged, single)]
    of_merged, of_single = (function(each) for each in inputs)
    torch.testing.assert_close(of_merged.advantages_N, of_single.advantages_N)
    assert of_merged.advantages_N.unique().numel() > 2
    assert [each.lengths_N.tolist() for each in inputs] == [[3, 4, 5, 3, 3, 4, 3, 4]] * 2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", ["grpo", "gigpo", "multi_step_grpo"])
def test_one_row_has_the_gradient_of_a_row_for_each_call(model: Path, name: str, mode: str) -> None:
    merged, single = batches()
    found = []
    for batch in (merged, single):
        engine = TorchEngine(engine_config(model), replace(make_algorithm(name), loss_agg_mode=mode))
        found.append(engine.train_step(batch, 1))
    for key in ("loss", "grad_norm", "mismatch_kl"):
        assert found[0][key] == pytest.approx(found[1][key], rel=2e-4, abs=1e-6), key
    assert found[0]["grad_norm"] > 0.0


def test_turns_are_numbered_through_when_batches_are_joined() -> None:
    merged, _ = batches()
    shown = supervised_batch([([5, 6, 7, 8], 2, None)], ["shown"])
    joined = join_batches([shown, merged])
    assert joined.num_turns.tolist() == [1, 3, 1, 2, 2]
    assert joined.turns.tolist() == [0, 0, 1, 2, 0, 0, 1, 0, 1]
    assert joined.turn_lengths.tolist() == [2, 3, 6, 7, 3, 3, 6, 3, 6]
    assert joined.states is not None and joined.states.tolist() == [-1, 0, 1, 2, 0, 0, 1, 0, 1]
    rows = joined.by_turns()
    assert rows.uids[1:4] == ("t/0/0/0/0, turn 0", "t/0/0/0/0, turn 1", "t/0/0/0/0, turn 2")
    assert rows.loss_mask.tolist() == joined.loss_mask.tolist() and len(rows.tokens) == len(joined.loss_mask)


def test_trainer_logprobs_equal_the_stored_ones_of_each_turn(model: Path) -> None:
    engine, tokenizer = TransformersEngine(str(model)), AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return engine.generate(requests)

    async def talk(task: Task, policy: PolicyModel) -> float:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 1+1?"}]
        for number in range(4):
            answer = await policy.chat(messages)
            hostile = f"no, {tokenizer.eos_token}"  # text that spells a special token stays text
            more = {"role": "tool" if number % 2 else "user", "content": hostile}
            messages += [{"role": "assistant", "content": answer.text}, more]
        return 1.0

    workflow("trained_turns_talk", in_process=True)(talk)
    sampling = SamplingParams(max_tokens=7, temperature=0.7)
    policy = TextEngine(generate, tokenizer)
    # By other seeds it samples special tokens, after which the chat is another sequence.
    more = {"sampling": sampling, "rollout_model": {"seed": 1}}
    rows = outcome([task(0, "trained_turns_talk")], policy, {}, **more).experiences
    # As the log keeps it and a trainer reads it; then one forward pass over the whole conversation.
    batch = batch_from_table(decode_parquet(*parquet_shard(rows)))
    assert (len(batch), batch.num_turns.tolist()) == (1, [4]), rows
    assert 0 < batch.loss_mask.sum() < len(batch.loss_mask) and batch.rollout_logprobs[batch.loss_mask].all()
    trained, _ = load_policy(str(model), "float32", "cpu")
    packed = pack_rows(batch.row_tokens(), batch.prompt_lengths, batch.temperatures)
    with torch.no_grad():
        scored, _ = token_logprobs(trained, packed)
    gaps = np.abs(scored[0].numpy() - batch.rollout_logprobs)[batch.loss_mask]
    assert gaps.max() <= 1e-4
