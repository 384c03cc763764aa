"""Promises of the toy model and tasks: seeded, loadable without remote code, held-out questions stay held out."""

import hashlib
import json
import string
from pathlib import Path

import pytest

from rftdask.models.toy import build_toy_model, write_toy_tasks

PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n\t"
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("toy")
    build_toy_model(folder, **SMALL)
    return folder


@pytest.mark.parametrize("text", [PRINTABLE, "17+25=42", "  two  blanks, it 's kept .\n\n", "", "Ann's 3 eggs: $1.50?"])
def test_decoding_gives_back_the_encoded_text(model_folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_text_outside_ascii_is_one_token_per_byte_and_survives(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    text = "caf\u00e9 \u4e2d"
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_the_chat_template_concatenates_contents(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    messages = [{"role": "system", "content": "Add. "}, {"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "Add. 1+2="


def test_the_folder_loads_as_a_qwen2_with_its_tokenizer(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    assert model.config.model_type == "qwen2"
    assert model.config.vocab_size == len(tokenizer) == 256 + 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_the_default_model_has_about_a_million_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    build_toy_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 700_000 < model.num_parameters() < 1_300_000


def test_weights_follow_from_the_seed_alone(model_folder: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    build_toy_model(tmp_path / "same", **SMALL)
    build_toy_model(tmp_path / "other", seed=1, **SMALL)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert _hashes(tmp_path / "same") == _hashes(model_folder)
    differing = {name for name, digest in _hashes(tmp_path / "other").items() if digest != _hashes(model_folder)[name]}
    assert differing == {"model.safetensors"}


def test_tasks_follow_from_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_toy_tasks(tmp_path / name, seed=seed)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b")
    assert not set(_hashes(tmp_path / "a").values()) & set(_hashes(tmp_path / "c").values())


def test_held_out_questions_occur_in_no_training_file(tmp_path: Path) -> None:
    write_toy_tasks(tmp_path, num_eval=100)
    held_out = {row["question"] for row in _rows(tmp_path / "eval.jsonl")}
    train = {row["question"] for row in _rows(tmp_path / "train.jsonl")}
    assert len(held_out) == 100
    assert len(held_out | train) == 900
    assert not held_out & train
    assert {row["prompt"] for row in _rows(tmp_path / "sft.jsonl")} == train


def test_wrong_warm_up_answers_are_ten_too_high(tmp_path: Path) -> None:
    write_toy_tasks(tmp_path, correct_share=0.5)
    for row in _rows(tmp_path / "train.jsonl") + _rows(tmp_path / "eval.jsonl"):
        assert int(row["answer"]) == sum(map(int, row["question"].rstrip("=").split("+")))
    rows = _rows(tmp_path / "sft.jsonl")
    errors = [int(row["response"]) - sum(map(int, row["prompt"].rstrip("=").split("+"))) for row in rows]
    assert set(errors) == {0, 10}
    assert errors.count(0) / len(errors) == pytest.approx(0.5, abs=0.02)


def test_sizes_that_cannot_work_are_refused_with_their_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_eval 900 must be in 1\.\.899"):
        write_toy_tasks(tmp_path, num_eval=900)
    with pytest.raises(ValueError, match=r"hidden_size 10 .* num_heads 3"):
        build_toy_model(tmp_path, hidden_size=10)
    assert list(tmp_path.iterdir()) == []
