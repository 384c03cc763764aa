"""Promise: the ids of supervised rows are those of transformers for the whole chat or text, whatever the tokenizer
adds, and learned tokens begin where the prompt of a rollout ends.
"""

import asyncio
from copy import copy
from functools import cache, partial
from typing import Any

import pytest

from rftdask.config.schema.buffer import FormatConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.supervised import PreferenceRows, Row, SftRows, TextRows
from rftdask.data.tokenizer import Tokenizer
from rftdask.engines.base import SamplingParams
from rftdask.errors import DataError
from rftdask.rollouts.policy.recording import RecordingModel, ServedModel
from rftdask.rollouts.policy.request_queues import RolloutKey
from tests.unit.data.test_supervised import marked
from tests.unit.data.test_tokenizer import Echo
from tests.unit.data.test_tokenizer import fast as chatml

BOS, EOS = "<s>", "</s>"
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BARE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
"""The answer follows text and no special token, as in Llama 2 and Mistral."""


def beginning(model: Any, pre_tokenizer: Any, template: str, special: list[str]) -> Any:
    """A tokenizer that begins every encoding with BOS, like those of Llama and Gemma."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, extra_special_tokens=special
    )
    first = [(BOS, fast.convert_tokens_to_ids(BOS))]
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=first)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, extra_special_tokens=special
    )
    fast.chat_template = template
    return fast


@cache
def llama3() -> Any:
    """Bytes with merges, and a template that spells BOS."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [("e", "l"), ("l", "o"), ("\u0120", "a"), ("1", "+"), (".", "\u010a"), ("\u010a", "\u010a")]
    words = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges), BOS, EOS]
    vocab = {word: number for number, word in enumerate(words)}
    return beginning(BPE(vocab, merges), ByteLevel(add_prefix_space=False), HEADERS, ["<|user|>", "<|assistant|>"])


@cache
def llama2() -> Any:
    """SentencePiece's way: every encoded text begins with a mark."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Metaspace

    letters = sorted({*map(chr, range(33, 127)), "\u2581", "\n"})
    merges = [("\u2581", "a"), ("\u2581", "2"), ("l", "o")]
    words = [*letters, *("".join(pair) for pair in merges), BOS, EOS]
    vocab = {word: number for number, word in enumerate(words)}
    return beginning(BPE(vocab, merges), Metaspace(prepend_scheme="first", split=False), BARE, [])


KINDS: dict[str, Any] = {"chatml": chatml, "llama3": llama3, "llama2": llama2}
CHATS = [
    [("user", "hello a"), ("assistant", "lo a.\n")],
    [("system", "be kind"), ("user", "1+1=?"), ("assistant", "2"), ("user", "elo?\n\n"), ("assistant", "1+ a")],
]
FORMAT = FormatConfig(messages_key="messages")


def chat(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """Reference ids from transformers."""
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def learned(row: Row) -> list[bool]:
    return [is_learned for _, is_learned in marked(row)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", CHATS)
def test_a_chat_has_the_ids_of_its_template(kind: str, turns: list[tuple[str, str]]) -> None:
    tokenizer, messages = KINDS[kind](), chat(turns)
    tokens, prompt, mask = SftRows(RowsDataset([[{"messages": messages}]], "f"), tokenizer, FORMAT, 999).read([0])[0]
    assert list(tokens) == rendered(tokenizer, messages)
    asked = rendered(tokenizer, messages[:-1], add_generation_prompt=True)
    assert (list(tokens[:prompt]), mask) == (asked, None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_turns_have_the_template_ids(kind: str) -> None:
    tokenizer, messages = KINDS[kind](), chat(CHATS[1])
    fmt = FORMAT.model_copy(update={"enable_concatenated_multi_turn": True})
    row = SftRows(RowsDataset([[{"messages": messages}]], "f"), tokenizer, fmt, 999).read([0])[0]
    assert list(row[0]) == rendered(tokenizer, messages)
    expected = [False] * len(row[0])
    for place in (2, 4):
        start = len(rendered(tokenizer, messages[:place], add_generation_prompt=True))
        end = len(rendered(tokenizer, messages[: place + 1]))
        expected[start:end] = [True] * (end - start)
    assert learned(row) == expected


MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{% if m['role'] == 'assistant' %}"
    "{% if thinks %}hm {% endif %}{% generation %}{{ m['content'] | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
"""A thought before the answer is not marked."""
OF_TEMPLATE = FORMAT.model_copy(update={"return_assistant_tokens_mask": True})


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("turns", [*CHATS, [*CHATS[1], ("user", "a")]])
def test_marked_tokens_agree_with_transformers(turns: list[tuple[str, str]], thinks: bool) -> None:
    tokenizer, messages = copy(llama3()), chat(turns)
    tokenizer.chat_template = MARKED
    render = partial(tokenizer.apply_chat_template, thinks=thinks)
    tokenizer.apply_chat_template = render
    theirs = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    [row] = SftRows(RowsDataset([[{"messages": messages}]], "f"), tokenizer, OF_TEMPLATE, 999).read([0])
    assert list(row[0]) == theirs["input_ids"] and any(learned(row))
    assert learned(row) == list(map(bool, theirs["assistant_masks"]))


def test_a_template_that_marks_nothing_is_refused() -> None:
    dataset = RowsDataset([[{"messages": chat(CHATS[0]), "chosen": "2", "rejected": "a"}]], "f")
    with pytest.raises(
        DataError, match=r"return_assistant_tokens_mask: the chat template marks nothing.*leave the key"
    ):
        SftRows(dataset, llama3(), OF_TEMPLATE, 999)
    with pytest.raises(DataError, match="works only with chats of sft"):
        PreferenceRows(dataset, llama3(), OF_TEMPLATE, 999)
    tokenizer = copy(llama3())
    tokenizer.chat_template = MARKED.replace("'assistant'", "'bot'")
    with pytest.raises(DataError, match="row 0: the chat template marks nothing in it"):
        SftRows(dataset, tokenizer, OF_TEMPLATE, 999).read([0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_pair_of_chats_has_the_ids_of_the_template(kind: str, is_inside: bool) -> None:
    tokenizer, prompt = KINDS[kind](), chat(CHATS[1][:2])
    answers = {key: chat([("assistant", text)]) for key, text in (("chosen", "lo a"), ("rejected", "2"))}
    row = {key: [*prompt, *answer] for key, answer in answers.items()} if is_inside else {"prompt": prompt, **answers}
    pair = PreferenceRows(RowsDataset([[row]], "f"), tokenizer, FORMAT, 999).read([0])
    for (tokens, length, mask), answer in zip(pair, answers.values(), strict=True):
        assert list(tokens) == rendered(tokenizer, [*prompt, *answer]) and mask is None
        assert list(tokens[:length]) == rendered(tokenizer, prompt, add_generation_prompt=True)


@pytest.mark.parametrize("kind", KINDS)
def test_raw_text_has_one_first_and_one_end_token(kind: str) -> None:
    tokenizer, end = KINDS[kind](), [KINDS[kind]().eos_token_id]
    raw, row = FormatConfig(prompt_type="raw"), {"prompt": "hello 1", "response": "2 a", "chosen": "2", "rejected": "a"}
    dataset = RowsDataset([[row]], "f")

    def whole(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], *end]

    [(tokens, length, _)] = SftRows(dataset, tokenizer, raw, 999).read([0])
    assert (list(tokens), list(tokens[:length])) == (whole("hello 12 a"), tokenizer("hello 1")["input_ids"])
    pair = PreferenceRows(dataset, tokenizer, raw, 999).read([0])
    assert [list(tokens) for tokens, _, _ in pair] == [whole("hello 12"), whole("hello 1a")]
    [(tokens, length, _)] = TextRows(dataset, tokenizer, FORMAT, 999).read([0])
    assert (list(tokens), length) == (whole("hello 1"), 1)


def test_a_token_that_would_span_prompt_and_response_is_not_made() -> None:
    """The policy reads the tokens of the prompt and answers with new ones; training data must match."""
    tokenizer = llama3()
    row = {"prompt": "l", "response": "o"}
    [(tokens, length, _)] = SftRows(RowsDataset([[row]], "f"), tokenizer, FormatConfig(prompt_type="raw"), 99).read([0])
    assert tokenizer("lo")["input_ids"] != list(tokens[:-1])
    assert list(tokens[:length]) == tokenizer("l")["input_ids"]


def test_a_text_that_spells_the_first_token_has_it_once() -> None:
    dataset = RowsDataset([[{"prompt": f"{BOS}1", "response": f"2{EOS}"}]], "f")
    [(tokens, length, _)] = SftRows(dataset, llama3(), FormatConfig(prompt_type="raw"), 99).read([0])
    assert list(tokens) == [*llama3()("12")["input_ids"], llama3().eos_token_id] and length == 2


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_prompts_have_the_learned_ids(kind: str) -> None:
    tokenizer: Tokenizer = KINDS[kind]()

    async def asked() -> list[tuple[int, ...]]:
        queue = Echo([1])
        served = ServedModel(queue, tokenizer, SamplingParams(max_tokens=4), ModelConfig(model_path="m"))
        model = RecordingModel(served, key=RolloutKey(0, 0), group_id="g", run_seed=0)
        await model.generate("hello 1")
        await model.chat(chat(CHATS[0][:1]))
        return [call.request.prompt_tokens for call in model.calls]

    raw, chatted = asyncio.run(asked())
    rows = RowsDataset([[{"prompt": "hello 1", "response": "2"}]], "f")
    [(tokens, length, _)] = SftRows(rows, tokenizer, FormatConfig(prompt_type="raw"), 999).read([0])
    assert tuple(tokens[:length]) == raw
    rows = RowsDataset([[{"prompt": CHATS[0][0][1], "response": "2"}]], "f")
    [(tokens, length, _)] = SftRows(rows, tokenizer, FormatConfig(prompt_type="plaintext"), 999).read([0])
    assert tuple(tokens[:length]) == chatted
