"""Promises of chat templates: the configured one wins, and its thinking mode applies to every rendering."""

from pathlib import Path

import pytest

from rftdask.config import Config, load_config, replace
from rftdask.data.tokenizer import Tokenizer, load_tokenizer
from rftdask.errors import DataError
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.worker_state import _tokenizer as auxiliary_tokenizer

TEMPLATE = """{{ messages[0].content }}
{%- if enable_thinking is defined %}<{{ enable_thinking }}>{% else %}<as it likes>{% endif %}"""


def config_of(folder: Path, *overrides: str, **model: str) -> Config:
    """A configuration with a toy model in `folder`."""
    build_toy_model(folder, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1)
    tree = {
        "model": {"model_path": str(folder), "max_model_len": 64, **model},
        "buffer": {"total_steps": 1, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    return load_config(tree, overrides)


def rendered_by(tokenizer: Tokenizer) -> str:
    return str(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))


@pytest.mark.parametrize(("setting", "rendered"), [("null", "<as it likes>"), ("true", "<True>"), ("false", "<False>")])
def test_the_thinking_mode_reaches_the_template(tmp_path: Path, setting: str, rendered: str) -> None:
    thinking = f"explorer.rollout_model.enable_thinking={setting}"
    config = config_of(tmp_path, thinking, custom_chat_template=TEMPLATE)
    assert rendered_by(load_tokenizer(config)) == f"Hi{rendered}"


@pytest.mark.parametrize(("own", "rendered"), [("null", "<True>"), ("false", "<False>")])
def test_thinking_of_an_auxiliary_model_follows_its_key(tmp_path: Path, own: str, rendered: str) -> None:
    judge = f"explorer.auxiliary_models=[{{name: judge, model_path: {tmp_path}, enable_thinking: {own}}}]"
    config = config_of(tmp_path, judge, "model.enable_thinking=true")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert rendered_by(auxiliary_tokenizer(config.explorer.auxiliary_models[0], config)) == f"Hi{rendered}"


def test_a_template_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own: {{ messages[0].content }}")
    config = config_of(tmp_path, chat_template_path=f"{tmp_path}/own.jinja")
    assert rendered_by(load_tokenizer(config)) == "own: Hi"
    with pytest.raises(DataError, match=r"chat_template_path .* does not exist"):
        load_tokenizer(replace(config, {"model.chat_template_path": "nowhere.jinja"}))
