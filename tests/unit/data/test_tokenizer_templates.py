"""Promises of chat templates: the configured one wins, and its thinking mode applies to every rendering."""

from pathlib import Path

import pytest

from rftdask.config import load_config
from rftdask.data.tokenizer import load_tokenizer
from rftdask.errors import DataError
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.worker_state import _tokenizer as auxiliary_tokenizer

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


@pytest.mark.parametrize(("own", "rendered"), [("null", "<True>"), ("false", "<False>")])
def test_thinking_of_an_auxiliary_model_follows_its_key(tmp_path: Path, own: str, rendered: str) -> None:
    build_toy_model(tmp_path, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tree = {"model": {"model_path": str(tmp_path), "max_model_len": 64}, "buffer": {"total_steps": 1}}
    judge = f"explorer.auxiliary_models=[{{name: judge, model_path: {tmp_path}, enable_thinking: {own}}}]"
    taskset = "buffer.explorer_input.taskset.path=t.jsonl"
    config = load_config(tree, [taskset, judge, "model.enable_thinking=true"])
    tokenizer = auxiliary_tokenizer(config.explorer.auxiliary_models[0], config)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == f"Hi{rendered}"


def test_a_template_may_be_in_a_file(tmp_path: Path) -> None:
    build_toy_model(tmp_path / "model", hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1)
    (tmp_path / "own.jinja").write_text("own: {{ messages[0].content }}")
    tree = {
        "model": {"model_path": str(tmp_path / "model"), "max_model_len": 64},
        "buffer": {"total_steps": 1, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    tokenizer = load_tokenizer(load_config(tree, [f"model.chat_template_path={tmp_path}/own.jinja"]))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "own: Hi"
    with pytest.raises(DataError, match=r"chat_template_path .* does not exist"):
        load_tokenizer(load_config(tree, ["model.chat_template_path=nowhere.jinja"]))
