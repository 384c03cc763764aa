"""Promise: rows of sft and dpo have the ids, and the border between prompt and response, of TRL's trainers."""

from types import SimpleNamespace
from typing import Any

import pytest

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.supervised import PreferenceRows, SftRows
from tests.unit.data.test_supervised_ids import KINDS, chat, learned

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # warnings from TRL's imports

PROMPT = chat([("system", "be kind"), ("user", "1+1=?")])
GOOD, BAD = chat([("assistant", "2 a")]), chat([("assistant", "lo")])
TEXTS = {"prompt": "hello 1", "response": "2 a"}
PAIRS = [
    ({"prompt": "hello 1", "chosen": "2 a", "rejected": "a"}, "raw"),
    ({"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}, "messages"),
    ({"chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]}, "messages"),
]


def prepared(trainer: Any, row: dict[str, Any], tokenizer: Any, **attributes: Any) -> dict[str, Any]:
    """Return a row as TRL's trainer prepares it, without the models that it trains."""
    from datasets import Dataset

    me = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, **attributes)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        shuffle_dataset=False,
    )
    sets = {"packing": False, "formatting_func": None} if "completion_only_loss" in attributes else {}
    dataset = Dataset.from_list([row])
    return dict(trainer._prepare_dataset(me, dataset, tokenizer, args, *sets.values(), "train")[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_type", ["raw", "plaintext", "messages"])
def test_a_supervised_row_is_that_of_trl(kind: str, prompt_type: str) -> None:
    from trl import SFTTrainer

    tokenizer, row = KINDS[kind](), {"prompt": TEXTS["prompt"], "completion": TEXTS["response"]}
    ours: dict[str, Any] = dict(TEXTS)
    if prompt_type == "plaintext":
        row = {"prompt": chat([("user", row["prompt"])]), "completion": chat([("assistant", row["completion"])])}
    elif prompt_type == "messages":
        row, ours = {"prompt": PROMPT, "completion": GOOD}, {"message": [*PROMPT, *GOOD]}
    theirs = prepared(SFTTrainer, row, tokenizer, completion_only_loss=True)
    mine = SftRows(RowsDataset([[ours]], "f"), tokenizer, FormatConfig(prompt_type=prompt_type), 999).read([0])[0]
    assert list(mine[0]) == theirs["input_ids"]
    assert learned(mine) == [label != -100 for label in theirs["labels"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("row", "prompt_type"), PAIRS)
def test_a_pair_is_that_of_trl(kind: str, row: dict[str, Any], prompt_type: str) -> None:
    from trl import DPOTrainer

    tokenizer = KINDS[kind]()
    theirs = prepared(DPOTrainer, row, tokenizer)
    pair = PreferenceRows(RowsDataset([[row]], "f"), tokenizer, FormatConfig(prompt_type=prompt_type), 999).read([0])
    for (tokens, length, mask), key in zip(pair, ("chosen_ids", "rejected_ids"), strict=True):
        assert (list(tokens[:length]), list(tokens[length:])) == (theirs["prompt_ids"], theirs[key])
        assert mask is None
