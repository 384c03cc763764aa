"""Promises of preference pairs and of plain text as rows to train on."""

from typing import Any

import pytest

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.source import DatasetSource
from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.supervised import LabeledRows, PreferenceRows, TextRows
from rftdask.errors import DataError
from tests.unit.buffer.buffer_cases import batch_of, new_storage
from tests.unit.data.test_supervised import CharTokenizer, marked


def dataset(*rows: dict[str, Any]) -> RowsDataset:
    return RowsDataset([rows], "f1")


FORMAT = FormatConfig(prompt_type="raw")
MAX_TOKENS = 6
PAIRS = dataset(*({"prompt": "q", "chosen": f"{i}", "rejected": f"{i}!"} for i in range(4)))


def test_a_pair_is_two_neighbors_the_better_one_first() -> None:
    rows = PreferenceRows(PAIRS, CharTokenizer(), FORMAT, MAX_TOKENS).read([2, 0])
    texts = ["".join(map(chr, tokens[:-1])) for tokens, _, _ in rows]
    assert texts == ["q2", "q2!", "q0", "q0!"]
    assert [prompt for _, prompt, _ in rows] == [1, 1, 1, 1]


def test_a_missing_side_is_named() -> None:
    with pytest.raises(DataError, match="no column 'better'"):
        PreferenceRows(PAIRS, CharTokenizer(), FormatConfig(prompt_type="raw", chosen_key="better"), MAX_TOKENS)


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
)
MORE = {"role": "user", "content": "more"}


class Lines(CharTokenizer):
    """A chat is a line for each message."""

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = False, **options: Any) -> str:
        lines = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        if options.get("continue_final_message"):
            return lines[:-1]
        return lines + ("a:" if add_generation_prompt else "")


def pair(row: dict[str, Any], **fields: Any) -> list[str]:
    """Both sequences of a pair, what is learned in brackets."""
    rows = PreferenceRows(dataset(row), Lines(), FormatConfig(**fields), 99).read([0])
    texts = ("".join(f"[{chr(t)}]" if mark else chr(t) for t, mark in marked(row)) for row in rows)
    return [text.replace("][", "") for text in texts]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"message": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "the same as text", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_a_pair_of_chats_has_its_prompt_apart_or_inside(row: dict[str, Any]) -> None:
    assert pair(row) == ["u:q\na:[good\n]", "u:q\na:[bad\n]"]
    assert pair(row, system_prompt="kind", reply_prefix=">") == ["s:kind\nu:q\na:>[good\n]", "s:kind\nu:q\na:>[bad\n]"]


def test_assistant_messages_after_the_prompt_are_learned() -> None:
    row = {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, BAD]}
    assert pair(row) == ["u:q\na:[good\n]u:more\na:[good\n]", "u:q\na:[bad\n]"]
    same = {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, MORE, GOOD]}
    assert pair(same) == ["u:q\na:good\nu:more\na:[good\n]"] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "only one of the columns .* begins with a prompt"),
        ({"chosen": [USER, GOOD], "rejected": [MORE, BAD]}, "column 'chosen' does not answer the prompt"),
        ({"prompt": "q", "chosen": [GOOD, MORE], "rejected": [BAD]}, "column 'chosen' does not answer the prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "has no prompt: no column 'prompt', .* 'chosen' begins with an answer"),
        ({"prompt": "q", "chosen": [], "rejected": [BAD]}, "column 'chosen' is not a list of messages"),
        ({"prompt": "q", "chosen": 3, "rejected": [BAD]}, "column 'chosen' holds int, not text"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"row 0.*{message}"):
        pair(row)


def test_no_batch_parts_a_pair() -> None:
    reader = PreferenceRows(PAIRS, CharTokenizer(), FORMAT, MAX_TOKENS)
    source = DatasetSource(
        reader.read, 4, "f1", Ledger(new_storage()), batch_size=3, total_epochs=3, shuffle_seed=1, group_size=2
    )
    for step in range(1, 5):
        found = batch_of(source, step)
        assert found is not None
        entry, batch = found
        assert len(entry.use[0].rows) == 3
        assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
        assert [uid.rsplit("/", 1)[1] for uid in batch.uids] == ["0", "1"] * 3
        assert len(set(batch.uids)) == 6
    assert batch_of(source, 5) is None


def test_all_tokens_of_a_text_but_the_first_are_learned() -> None:
    rows = TextRows(dataset({"prompt": "abc"}, {"prompt": "abcdefgh"}), CharTokenizer(), FORMAT, MAX_TOKENS)
    (short, prompt, mask), (long, _, _) = rows.read([0, 1])
    assert (list(short), prompt, mask) == ([97, 98, 99, 0], 1, None)
    assert list(long) == [97, 98, 99, 100, 101, 102]


@pytest.mark.parametrize(("value", "message"), [(3, "holds int, not text"), ("", "has 1 tokens")])
def test_a_text_that_teaches_nothing_is_refused(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TextRows(dataset({"prompt": value}), CharTokenizer(), FORMAT, MAX_TOKENS).read([0])


def test_a_missing_text_column_is_named() -> None:
    with pytest.raises(DataError, match="no column 'text'"):
        TextRows(PAIRS, CharTokenizer(), FormatConfig(prompt_key="text"), MAX_TOKENS)


def test_a_verdict_comes_with_its_response() -> None:
    rows = [{"prompt": "2+2=", "response": "4", "label": True}, {"prompt": "1+1=", "response": "3", "label": 0}]
    reader = LabeledRows(dataset(*rows), CharTokenizer(), FORMAT, MAX_TOKENS)
    assert [(row[1], row[3]) for row in reader.read([0, 1])] == [(4, 1.0), (4, 0.0)]
    assert reader.sequences_per_row == 1


def test_a_pair_is_a_desirable_response_and_an_undesirable_one() -> None:
    reader = LabeledRows(PAIRS, CharTokenizer(), FORMAT, MAX_TOKENS)
    pairs = PreferenceRows(PAIRS, CharTokenizer(), FORMAT, MAX_TOKENS).read([2, 0])
    assert reader.read([2, 0]) == [(*row, label) for row, label in zip(pairs, [1.0, 0.0] * 2, strict=True)]
    assert reader.sequences_per_row == 2


def test_rows_with_neither_labels_nor_pairs_are_refused() -> None:
    rows = dataset({"prompt": "a", "response": "b", "good": True})
    with pytest.raises(DataError, match=r"neither labels \(column 'label', format.label_key\) nor pairs"):
        LabeledRows(rows, CharTokenizer(), FORMAT, MAX_TOKENS)


def test_an_invalid_label_is_refused() -> None:
    rows = [{"prompt": "a", "response": "b", "label": "good"}]
    with pytest.raises(DataError, match=r"row 0: column 'label' holds 'good'; use true or false"):
        LabeledRows(dataset(*rows), CharTokenizer(), FORMAT, MAX_TOKENS).read([0])
