"""Promises of Trinity-RFT's model for workflows: every answer of every API is an experience, others are a 400."""

import asyncio
from typing import Any

from rftdask.compat.trinity.model import ModelWrapper
from rftdask.engines.base import SamplingParams
from rftdask.rollouts.policy.recording import RecordingModel, ServedModel
from rftdask.rollouts.policy.request_queues import RolloutKey
from tests.unit.rollouts.rollout_cases import MODEL, CharTokenizer
from tests.unit.serve.test_server import ASKED, Queue


def test_answers_of_all_apis_are_experiences() -> None:
    async def check() -> None:
        served = ServedModel(Queue(), CharTokenizer(), SamplingParams(max_tokens=20), MODEL)
        recording = RecordingModel(served, key=RolloutKey(0, 0), group_id="g", run_seed=0)
        model = ModelWrapper(recording, wait=lambda call: call, name="m")
        bodies: list[tuple[str, Any, list[str]]] = [
            ("chat/completions", {"messages": ASKED, "tool_choice": "required"}, ["hi"]),
            ("completions", {"prompt": ["a", "b"], "n": 2}, ["a", "a", "b", "b"]),
            ("responses", {"input": "hi", "prompt": None}, ["hi"]),
            ("responses", {"input": ASKED}, ["hi"]),
            ("messages", {"messages": ASKED, "max_tokens": 4}, ["hi"]),
            ("messages/count_tokens", {"messages": ASKED}, []),
        ]
        for path, body, prompts in bodies:
            answer = await model._answer_openai(path, body)
            assert answer.status == 200, answer
            assert [experience.prompt_text for experience in model.history] == prompts
            model.history.clear()
        for wrong in ([], "x", None, 3, {"messages": 3}):
            assert (await model._answer_openai("chat/completions", wrong)).status == 400

    asyncio.run(check())
