"""Promises of training on conversations: one row of several turns teaches what a row for each of its calls teaches, and
what the trainer computes of its tokens is what the engine has recorded, turn by turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
from rftdask.buffer.log.schema import Experience, Turn, experiences_to_table
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.policy.lockstep_queue import RolloutKey
from rftdask.rollouts.policy.recording import RecordingModel, ServedModel
from rftdask.trainer.engines.micro_batches import BatchRows
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.numerics import shifted_seed
from tests.unit.trainer.trainer_cases import engine_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("conversations") / "policy"
    build_toy_model(folder, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    yield folder
    torch.use_deterministic_algorithms(False)


def batches() -> tuple[TrainingBatch, TrainingBatch]:
    """The same rollouts twice: each as one row of its turns, and with a row for each turn after all before it."""
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
def test_turns_within_a_row_have_the_advantages_that_they_have_as_rows(function: Any) -> None:
    merged, single = batches()
    inputs = [BatchRows(batch, CPU).by_turns().advantage_inputs(1) for batch in (merged, single)]
    of_merged, of_single = (function(each) for each in inputs)
    torch.testing.assert_close(of_merged.advantages_N, of_single.advantages_N)
    assert of_merged.advantages_N.unique().numel() > 2
    assert [each.lengths_N.tolist() for each in inputs] == [[3, 4, 5, 3, 3, 4, 3, 4]] * 2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", ["grpo", "gigpo", "multi_step_grpo"])
def test_a_conversation_as_one_row_has_the_gradient_of_a_row_for_each_call(model: Path, name: str, mode: str) -> None:
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


class Direct:
    """A queue that asks the engine at once."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        return self._engine.generate([request])[0]


def test_the_trainer_computes_the_logprobs_that_were_recorded_in_every_turn(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    sampling = SamplingParams(max_tokens=7, temperature=0.7)
    served = ServedModel(Direct(TransformersEngine(str(model))), tokenizer, sampling, ModelConfig(model_path="none"))  # type: ignore[arg-type]
    policy = RecordingModel(served, key=RolloutKey(0, 0), group_id="t/0/0", run_seed=1)

    async def talk() -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 1+1?"}]
        for number in range(4):
            answer = await policy.chat(messages)
            hostile = f"no, {tokenizer.eos_token}"  # text that spells a special token stays text
            more = {"role": "tool" if number % 2 else "user", "content": hostile}
            messages += [{"role": "assistant", "content": answer.text}, more]

    asyncio.run(talk())
    [calls] = policy.sequences
    assert len(calls) == 4
    last = calls[-1][1]
    row = np.array([*last.request.prompt_tokens, *last.generation.tokens])
    # One forward pass over the whole conversation, against what four calls have recorded.
    start = len(calls[0][1].request.prompt_tokens)
    trained, _ = load_policy(str(model), "float32", "cpu")
    scored, _ = token_logprobs(trained, pack_rows([row], np.array([start]), np.array([0.7])))
    for _, call in calls:
        begin = len(call.request.prompt_tokens) - start
        own = scored[0, begin : begin + len(call.generation.tokens)].tolist()
        assert own == pytest.approx(list(call.generation.logprobs), abs=1e-4)
