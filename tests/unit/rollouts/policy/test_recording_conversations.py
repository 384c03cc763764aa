"""Promises of conversations: sampled text is never tokenized again."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience, Status, token_versions
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.rollouts.policy.recording import Branch
from rftdask.rollouts.policy.request_queues import GenerateBatch
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.workflows.base import PolicyModel, Response, Step, WorkflowFn
from tests.unit.rollouts.rollout_cases import (
    VERSION,
    CharTokenizer,
    cut_at,
    engine_of,
    generation,
    named,
    outcome,
    prompt_of,
    replies,
    task,
)

Messages = list[dict[str, Any]]
ASKED: Messages = [{"role": "user", "content": "q"}]


def rows_of(function: WorkflowFn, engine: GenerateBatch, tokenizer: Any = None, **changes: Any) -> Any:
    policy = TextEngine(engine, tokenizer or CharTokenizer())
    return outcome([task(0, named(function))], policy, {}, **changes).experiences


def said(answer: Response, *more: tuple[str, str]) -> Messages:
    """Messages that an agent adds: the answer, and others."""
    return [
        {"role": "assistant", "content": answer.text},
        *({"role": role, "content": content} for role, content in more),
    ]


def two_turns(role: str, content: str, *, first: Any = None, second: Any = None) -> WorkflowFn:
    """Workflow that adds a message to the first answer. first, second: sampling of the turns."""

    async def talk(task: Task, model: PolicyModel) -> float:
        answer = await model.chat(ASKED, **(first or {}))
        await model.chat([*ASKED, *said(answer, (role, content))], **(second or {}))
        return 1.0

    return talk


def pieces(row: Experience) -> list[tuple[str, str]]:
    """(source, text) of each turn and of the text added before it."""
    texts, end = [], 0
    for turn in row.turns or ():
        texts += [(turn.source, row.response_text[end : turn.text_start])] * (turn.text_start > end)
        texts.append(("policy", row.response_text[turn.text_start : turn.text_end]))
        end = turn.text_end
    return texts


async def thirty_turns(task: Task, model: PolicyModel) -> float:
    messages: Messages = [{"role": "user", "content": "q" * 100}]
    for _ in range(30):
        messages += said(await model.chat(messages), ("tool", "o" * 62))
    return 1.0


def test_thirty_turns_are_one_row_with_each_token_once() -> None:
    calls: list[list[GenerateRequest]] = []
    [row] = rows_of(thirty_turns, replies("a" * 39, calls))
    prompts = [request.prompt_tokens for [request] in calls]
    assert sum(len(prompt) + 40 for prompt in prompts) == 56_475, "a row for each call, with all before it"
    assert len(row.tokens) == 3_608
    assert all(tuple(row.tokens[: len(prompt)]) == prompt for prompt in prompts)
    # Sampled tokens are trained with their logprobs; tokens of the template and the tool are not.
    mask, logprobs = np.array(row.loss_mask), np.array(row.rollout_logprobs)
    assert mask.sum() == 30 * 40 and set(logprobs[mask]) == {-0.5} and not logprobs[~mask].any()
    sampled = np.array(row.tokens)[row.prompt_length :][mask]
    assert sampled.tolist() == [*map(ord, "a" * 39), 0] * 30
    assert (row.uid, len(row.turns or ())) == ("t/0/0/0/0", 30)
    assert pieces(row)[:3] == [("policy", "a" * 39), ("tool", f"<tool>{'o' * 62}<assistant>"), ("policy", "a" * 39)]
    assert row.metrics["num_response_tokens"] == 1200 and row.metrics["num_prompt_tokens"] == 3_608 - 1200


def test_tokens_have_the_experts_of_their_first_call() -> None:
    def with_experts(request: GenerateRequest) -> Generation:
        # Every token's expert is the length of its prompt.
        answer = generation("ab!", request)
        length = len(request.prompt_tokens)
        experts = (length.to_bytes(2, "little") * 3,) * (length + len(answer.tokens) - 1)
        return replace(answer, routed_experts=experts)

    async def talk(task: Task, model: PolicyModel) -> float:
        messages = list(ASKED)
        for _ in range(3):
            messages += said(await model.chat(messages), ("tool", "o"))
        return 1.0

    [row] = rows_of(talk, engine_of(with_experts))
    assert row.routed_experts is not None and row.turns is not None and len(row.turns) == 3
    assert row.routed_experts.shape == (len(row.tokens) - 1, 3)
    begin = 0
    for turn in row.turns:
        length = row.prompt_length + turn.start
        # The last token of a turn is computed by the next call.
        end = row.prompt_length + turn.end - 1
        assert set(row.routed_experts[begin:end].ravel()) == {length}
        begin = end
    assert begin == len(row.routed_experts)
    # The engine reports experts also for tokens after a stop text.
    [row, *_] = rows_of(talk, engine_of(with_experts), sampling=SamplingParams(max_tokens=100, stop=("b",)))
    assert row.response_text == "a" and row.routed_experts is not None
    assert len(row.routed_experts) == len(row.tokens) - 1 == row.prompt_length + 1


def test_tokens_have_the_version_that_sampled_them() -> None:
    # Newer weights sampled the last token of the first answer, and all but the first of the second.
    changes = {0: [(0, 7), (3, 8)], 1: [(0, 8), (1, 9)]}
    numbers = itertools.count()

    engine = engine_of(lambda request: generation("ab!", request).sampled_by(changes[next(numbers) % 2]))
    [row] = rows_of(two_turns("tool", "o"), engine)
    [stored] = experiences_to_table([row]).to_pylist()
    added = len("<tool>o<assistant>")
    assert token_versions(stored) == [7, 7, 7, 8, *[None] * added, 8, 9, 9, 9]
    assert row.version_starts == ((0, 7), (3, 8), (4 + added + 1, 9)), "a version is recorded where it begins"
    assert (row.min_policy_version, row.max_policy_version) == (7, 9)
    # Newer weights sampled only tokens after the stop text, which are cut.
    [first, *_] = rows_of(two_turns("tool", "o"), engine, sampling=SamplingParams(max_tokens=100, stop=("b",)))
    assert (first.min_policy_version, first.max_policy_version, first.version_starts) == (7, 7, None)


def test_answer_with_ended_thoughts_has_versions_of_both_parts() -> None:
    parts = iter([("hmm", [(0, 7), (2, 8)]), ("4", [(0, 8), (1, 9)])])

    def next_part(request: GenerateRequest) -> Generation:
        text, versions = next(parts)
        return generation(text, request).sampled_by(versions)

    async def think(task: Task, model: PolicyModel) -> float:
        await model.generate("p<think>", thinking_token_budget=3)
        return 1.0

    [row] = rows_of(think, engine_of(next_part))
    assert row.response_text == "hmm\n</think>\n\n4"
    assert row.version_starts == ((0, 7), (2, 8), (len(row.response_text), 9)), "the last one is of the end token"
    assert (row.min_policy_version, row.max_policy_version) == (7, 9)


def test_unreported_versions_are_not_guessed() -> None:
    engine = engine_of(lambda request: replace(generation("ab!", request), max_policy_version=VERSION + 1))

    async def ask(task: Task, model: PolicyModel) -> float:
        await model.chat(ASKED)
        return 1.0

    [row] = rows_of(ask, engine)
    assert (row.min_policy_version, row.max_policy_version, row.version_starts) == (VERSION, VERSION + 1, None)
    assert token_versions(experiences_to_table([row]).to_pylist()[0]) == [None] * 4


class Merging(CharTokenizer):
    """Encodes "ab" as one token, unlike the policy."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(text.replace("ab", "\u0100"), add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).replace("\u0100", "ab")


def test_only_added_text_is_tokenized() -> None:
    calls: list[list[GenerateRequest]] = []
    [row] = rows_of(two_turns("user", "ab"), replies("ab", calls), Merging())
    first = [*map(ord, "<user>q<assistant>"), ord("a"), ord("b"), 0]
    assert list(calls[1][0].prompt_tokens) == [*first, *map(ord, "<user>"), 0x100, *map(ord, "<assistant>")]
    assert list(row.tokens[: len(first)]) == first


class Stripping(CharTokenizer):
    """Drops thoughts before the last user message, as Qwen3's template does."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        last = max(n for n, message in enumerate(conversation) if message["role"] == "user")
        shown = [
            {**message, "content": message["content"].rpartition("</think>")[2] if n < last else message["content"]}
            for n, message in enumerate(conversation)
        ]
        return super().apply_chat_template(shown, **options)


@pytest.mark.parametrize(("role", "num_turns"), [("tool", [2]), ("user", [1, 1])])
def test_template_that_strips_thinking_begins_a_row(role: str, num_turns: list[int]) -> None:
    rows = rows_of(two_turns(role, "r"), replies("<think>hm</think>a"), Stripping())
    assert [len(row.turns or (1,)) for row in rows] == num_turns
    assert [row.metrics.get("branches/answer", 0.0) for row in rows] == [0.0, 1.0][: len(rows)]


async def changed_answer(task: Task, model: PolicyModel) -> float:
    answer = await model.chat(ASKED)
    await model.chat([*ASKED, {"role": "assistant", "content": answer.text.upper()}, {"role": "user", "content": "r"}])
    return 1.0


async def summarized(task: Task, model: PolicyModel) -> float:
    await model.chat(ASKED)
    await model.chat([{"role": "user", "content": "in short: q"}])
    return 1.0


async def asked_again(task: Task, model: PolicyModel) -> float:
    await asyncio.gather(model.chat(ASKED), model.chat(ASKED))
    return 1.0


async def forked(task: Task, model: PolicyModel) -> float:
    answer = await model.chat(ASKED)
    for question in ("r", "s"):
        await model.chat([*ASKED, *said(answer, ("user", question))])
    return 1.0


@pytest.mark.parametrize(
    ("workflow", "limit", "reason", "num_turns"),
    [
        (changed_answer, 40, Branch.ANSWER, [1, 1]),
        (summarized, 40, Branch.HISTORY, [1, 1]),
        (asked_again, 40, Branch.FORKED, [1, 1]),
        (forked, 40, Branch.FORKED, [2, 1]),
        (two_turns("user", "r", second={"temperature": 0.5}), 40, Branch.SAMPLING, [1, 1]),
        (two_turns("user", "r"), 20, Branch.TRUNCATED, [1, 1]),
    ],
)
def test_prompt_that_does_not_continue_begins_a_row_with_reason(
    workflow: WorkflowFn, limit: int, reason: Branch, num_turns: list[int]
) -> None:
    rows = rows_of(workflow, replies("a"), model=cut_at(limit, enable_prompt_truncation=True))
    assert [len(row.turns or (1,)) for row in rows] == num_turns
    assert [row.uid for row in rows] == [f"t/0/0/0/{ordinal}" for ordinal in range(len(rows))]
    reasons = [[name for name in row.metrics if name.startswith("branches/")] for row in rows]
    assert reasons == [[], [f"branches/{reason}"]]
    assert [row.reward for row in rows] == [1.0] * len(rows)


def test_fork_trains_only_its_own_tokens() -> None:
    first, second = rows_of(forked, replies("a"))
    shared = len("<user>q<assistant>a") + 1
    assert list(first.tokens[:shared]) == list(second.tokens[:shared]) and first.tokens[shared - 1] == 0
    assert (first.prompt_length, second.prompt_length) == (shared - 2, len(second.tokens) - 2)


async def sub_agents(task: Task, model: PolicyModel) -> list[Step]:
    chats: dict[str, Messages] = {name: [{"role": "user", "content": name}] for name in "AB"}
    steps = []
    for turn in range(2):
        for name, messages in chats.items():
            messages += said(await model.chat(messages), ("tool", "more"))
            steps.append(Step(state=f"{name}{turn}", reward=float(turn)))
    return steps


def test_interleaved_conversations_are_a_row_each() -> None:
    rows = rows_of(sub_agents, replies(lambda request: prompt_of(request)[6].lower()))
    assert [row.prompt_text for row in rows] == ["<user>A<assistant>", "<user>B<assistant>"]
    turns = [[(turn.number, turn.env_state, turn.turn_reward) for turn in row.turns] for row in rows]
    assert turns == [[(0, "A0", 0.0), (2, "A1", 1.0)], [(1, "B0", 0.0), (3, "B1", 1.0)]]
    assert [pieces(row)[-1] for row in rows] == [("policy", "a"), ("policy", "b")]
    table = experiences_to_table(rows)
    assert table.column("turns").to_pylist()[1][1]["env_state"] == "B1"


def test_two_conversations_with_one_beginning_both_continue() -> None:
    """Two sub-agents with equal prompts and answers: the next call of each continues its row."""

    async def twins(task: Task, model: PolicyModel) -> float:
        answers = await asyncio.gather(model.chat(ASKED), model.chat(ASKED))
        for answer, result in zip(answers, ("r", "s"), strict=True):
            await model.chat([*ASKED, *said(answer, ("tool", result))])
        return 1.0

    rows = rows_of(twins, replies("a"))
    assert [len(row.turns) for row in rows] == [2, 2]


def test_row_is_truncated_if_any_turn_was() -> None:
    [row] = rows_of(two_turns("user", "r", first={"max_tokens": 1}), replies("abc"))
    assert row.status is Status.TRUNCATED and len(row.turns) == 2


@pytest.mark.parametrize("error", [TemplateError("roles must alternate"), TypeError("no text")])
def test_chat_that_the_template_refuses_names_its_row(error: Exception) -> None:
    class Refusing(CharTokenizer):
        def apply_chat_template(self, chat: Any, **options: Any) -> str:
            raise error

    async def asks(task: Task, model: PolicyModel) -> float:
        await model.chat(ASKED)
        return 1.0

    [row] = rows_of(asks, replies("hi"), Refusing())
    where = f"the chat template cannot render the messages (taskset {row.taskset}, row {row.task_index})"
    assert row.status is Status.FAILED and f"{where}: {type(error).__name__}: {error}" in row.error
