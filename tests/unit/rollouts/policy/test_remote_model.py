"""Promises of models behind an OpenAI-compatible API, tested over HTTP."""

import asyncio
import time
from typing import Any

import pytest
from api_server import DROP, HANG, KEY, ApiServer, api_server

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config.schema.model import ExternalModelConfig
from rftdask.data.task import Task
from rftdask.engines.base import SamplingParams
from rftdask.errors import UserError
from rftdask.rollouts.policy import remote_model
from rftdask.rollouts.policy.remote_model import RateLimit
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel
from rftdask.rollouts.workflows.registry import workflow
from tests.unit.rollouts.rollout_cases import CharTokenizer, outcome, replies, task

pytest.importorskip("openai")
SERVICE = ExternalModelConfig(base_url_env="TEST_BASE_URL", api_key_env="TEST_API_KEY")
QUESTION = [{"role": "user", "content": "2+2="}]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", KEY)


def model(server: ApiServer, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> remote_model.RemoteModel:
    monkeypatch.setenv("TEST_BASE_URL", server.url)
    return remote_model.RemoteModel("m", SERVICE, **{"timeout_s": 30.0, **changes})


async def answer_of(remote: remote_model.RemoteModel, **sampling: Any) -> remote_model.RemoteAnswer:
    """Answer to one request, after which the model is closed."""
    try:
        return await remote.ask(QUESTION, SamplingParams(max_tokens=5, **sampling), seed=11)
    finally:
        await remote.close()


def rollouts(
    remote: remote_model.RemoteModel, tasks: list[Task], auxiliary: bool = False, **changes: Any
) -> list[Experience]:
    """A runner with `remote` as the policy, or as the auxiliary model "judge" of a policy that answers 4."""
    policy: Any = TextEngine(replies("4"), CharTokenizer()) if auxiliary else remote
    batch = {"repeat_times": 2, "auxiliary": {"judge": remote} if auxiliary else {}}
    return outcome(tasks, policy, batch, **{"max_retry_times": 0, **changes}).experiences


def test_temporary_errors_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server("it is 4", 429, 500, HANG, DROP, 503) as server:
        answer = asyncio.run(answer_of(model(server, monkeypatch, timeout_s=1.0), top_k=3, temperature=0.5))
        assert (answer.text, answer.num_prompt_tokens, answer.num_response_tokens) == ("it is 4", 7, 3)
        assert len(server.requests) == 6
        sampling = {"max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "top_k": 3, "seed": 11}
        assert server.requests[-1] == {"path": "/v1/chat/completions", "model": "m", "messages": QUESTION, **sampling}


def test_requested_pause_applies_to_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = RateLimit(clock=time.monotonic)

    async def ask() -> float:
        first, second = (model(server, monkeypatch, limit=limit) for _ in range(2))
        refused = asyncio.create_task(answer_of(first))
        async with asyncio.timeout(10.0):
            while not limit.paused_s:
                await asyncio.sleep(0.005)
        began_s, pause_s = time.monotonic(), limit.paused_s
        await answer_of(second)
        waited_s = time.monotonic() - began_s
        await refused
        return waited_s - pause_s

    with api_server("4", 429) as server:
        server.retry_after = "retry-after", "0.5"
        assert asyncio.run(ask()) > -0.01
    assert len(server.requests) == 3


def test_too_long_pause_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server("4", 429) as server:
        server.retry_after = "retry-after", "4000"
        with pytest.raises(remote_model.RemoteModelError, match="planned status 429"):
            asyncio.run(answer_of(model(server, monkeypatch)))
    assert len(server.requests) == 1


def test_pause_headers_have_three_forms() -> None:
    assert remote_model.retry_after_s({"retry-after-ms": "1500", "retry-after": "9"}, 0.0) == 1.5
    assert remote_model.retry_after_s({"retry-after": "20"}, 0.0) == 20.0
    assert remote_model.retry_after_s({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, 45.0) == 15.0
    assert [remote_model.retry_after_s({"retry-after": text}, 0.0) for text in ("soon", "nan", "-1")] == [None] * 3
    assert remote_model.retry_after_s({}, 0.0) is None


def test_requests_follow_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_model, "WINDOW_S", 0.5)

    async def ask(limit: RateLimit) -> float:
        remote, began_s = model(server, monkeypatch, limit=limit), time.monotonic()
        asked = [remote.ask(QUESTION, SamplingParams(max_tokens=3), seed=seed) for seed in range(5)]
        await asyncio.gather(*asked)
        await remote.close()
        return time.monotonic() - began_s

    with api_server("4") as server:
        # Limited to two requests per half second by number, or by tokens (10 per answer, more reserved).
        assert asyncio.run(ask(RateLimit(requests=2, clock=time.monotonic))) >= 1.0
        assert asyncio.run(ask(RateLimit(tokens=40, clock=time.monotonic))) >= 1.0


def test_answers_become_rows_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server(lambda body: "it is 4") as server:
        rows = rollouts(model(server, monkeypatch), [task(0), task(1, truth="5")])
    assert [(row.status, row.reward, row.response_text) for row in rows] == [
        (Status.OK, reward, "it is 4") for reward in (1.0, 1.0, 0.0, 0.0)
    ]
    assert all(len(row.tokens) == len(row.rollout_logprobs) == 0 for row in rows)
    assert rows[0].metrics["num_prompt_tokens"] == 7.0 and rows[0].prompt_text.endswith("user: q0")
    assert len({request["seed"] for request in server.requests}) == 4


def test_plain_prompt_uses_completions_and_calls_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2+2"}'}}

    def reply(body: dict[str, Any]) -> Any:
        if "prompt" in body:
            return "4"
        said = any("tool_response" in message["content"] for message in body["messages"])
        return "\\boxed{4}" if said else {"role": "assistant", "content": None, "tool_calls": [call]}

    with api_server(reply) as server:
        [plain, _] = rollouts(model(server, monkeypatch), [task(0, "simple_workflow", messages=())])
        assert (plain.response_text, server.requests[0]["path"], plain.reward) == ("4", "/v1/completions", 1.0)
        rows = rollouts(model(server, monkeypatch), [task(0, "calculator_workflow")])
    assert [(row.turn, row.reward, row.metrics["num_tool_calls"]) for row in rows[:2]] == [(0, 1.0, 1.0), (1, 1.0, 1.0)]


def test_stop_is_passed_on_and_unsupported_parameters_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = [{"stop": "END"}, {"stop": ["END", "."]}, {"bad_words": ["x"]}, {"stop": [""]}]

    async def judged(task: Task, model: PolicyModel) -> float:
        await model.chat(QUESTION, **asked[task.index])
        return 1.0

    workflow("asks_with_options", in_process=True)(judged)
    with api_server("4") as server:
        recorded = rollouts(model(server, monkeypatch), [task(number, "asks_with_options") for number in range(4)])
    assert sorted(request["stop"] for request in server.requests) == [["END"]] * 2 + [["END", "."]] * 2
    assert [row.error.partition(":")[0] for row in recorded[4::2]] == ["TypeError", "BadRequestError"]
    assert "bad_words" in recorded[4].error and "stop" in recorded[6].error


def test_auxiliary_model_behind_an_api_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = task(0, "rubric_judge_workflow", workflow_args={"rubric": ["is a number"]})
    with api_server("1: yes") as server:
        [row, _] = rollouts(model(server, monkeypatch), [judged], auxiliary=True)
        assert (row.reward, row.response_text, len(row.tokens) > 0) == (1.0, "4", True)
        graded = rollouts(model(server, monkeypatch), [task(0, "math_rm_workflow")], auxiliary=True)
    assert graded[0].error == "RuntimeError: a model behind an API cannot score given tokens"


def test_final_failure_of_a_request_fails_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server("4", *[500] * 2) as server:
        rows = rollouts(model(server, monkeypatch, max_retries=0, max_concurrent=1), [task(0), task(1)])
    assert [row.status for row in rows] == [Status.FAILED] * 2 + [Status.OK] * 2
    assert rows[0].reward is None and "RemoteModelError: model 'm' of the service at $TEST_BASE_URL: " in rows[0].error


@pytest.mark.parametrize("workflow", ["math_workflow", "tests.unit.rollouts.sandbox.sandbox_workflows.good"])
def test_wrong_key_ends_the_batch_and_is_not_printed(workflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", "another-key")
    with (
        api_server("4") as server,
        pytest.raises(UserError, match=r"refuses all requests: AuthenticationError.*check its") as told,
    ):
        rollouts(model(server, monkeypatch), [task(0, workflow), task(1, workflow)])
    assert "another-key" not in str(told.value)


def test_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_API_KEY")
    monkeypatch.setenv("TEST_BASE_URL", "http://127.0.0.1:1/v1")
    with pytest.raises(UserError, match="TEST_API_KEY is not set; set it to the key of the service of model 'm'"):
        remote_model.check_service("m", SERVICE)
