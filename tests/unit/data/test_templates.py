"""Promises of chat templates: the configuration's own wins, and its thinking mode reaches every rendering."""

from pathlib import Path

import pytest

from rftdask.config import load_config
from rftdask.data.tokenizer import load_tokenizer
from rftdask.models.toy import build_toy_model

TEMPLATE = """{{ messages[0].content }}
{%- if enable_thinking is defined %}<{{ enable_thinking }}>{% else %}<as it likes>{% endif %}"""


@pytest.mark.parametrize(("setting", "rendered"), [("null", "<as it likes>"), ("true", "<True>"), ("false", "<False>")])
def test_the_thinking_mode_reaches_the_template(tmp_path: Path, setting: str, rendered: str) -> None:
    build_toy_model(tmp_path / "model", hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1)
    tree = {
        "name": "x",
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": str(tmp_path / "model"), "max_model_len": 64, "custom_chat_template": TEMPLATE},
        "buffer": {"total_steps": 1, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    tokenizer = load_tokenizer(load_config(tree, [f"explorer.rollout_model.enable_thinking={setting}"]))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == f"Hi{rendered}"
