"""Promises of training on conversations: a row of several turns has the gradient of one row per call, and the logged
logprobs of its tokens equal the trainer's up to 1e-4 in float32.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rftdask.algorithm.advantages.turns import Gigpo, StepWiseGrpo
from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, batch_from_table, join_batches, supervised_batch
from rftdask.buffer.log.columns import decode_parquet, experiences_to_table
from rftdask.buffer.log.schema import Experience, Turn
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Task
from rftdask.rollouts.workflows.registry import workflow
from rftdask.trainer.engines.micro_batches import DeviceBatch
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.numerics import shifted_seed
from tests.unit.buffer.buffer_cases import parquet_shard
from tests.unit.rollouts.rollout_cases import outcome, task
from tests.unit.trainer.trainer_cases import engine_config

CPU = torch.device("cpu")


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
