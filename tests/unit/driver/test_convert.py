"""Promises of `rftdask convert`: any checkpoint becomes a folder that transformers loads, in the data type of its
files, with tied weights or not, with LoRA merged or separate. An incomplete folder never appears.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from rftdask.cli.app import app
from rftdask.config import Config, load_config
from rftdask.config import replace as config_with
from rftdask.driver.convert import convert
from rftdask.errors import UserError
from rftdask.models.toy import build_toy_model
from rftdask.run.run_folder import open_run
from rftdask.storage import open_storage
from rftdask.trainer.checkpoint import HF_FOLDER, Checkpoints
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.integration.run_cases import call_cli
from tests.numerics import assert_close
from tests.unit.models.test_lora import trainer
from tests.unit.trainer.engines.test_torch_engine import SIZES, rollouts


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with files in the given type; in bfloat16, embeddings and output layer are one tensor."""
    folder = tmp_path_factory.mktemp("model")
    build_toy_model(folder, **SIZES)
    if request.param == "bfloat16":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("small")
    build_toy_model(folder, **SIZES)
    return str(folder)


def make_config(model_folder: str, root: Path, lora: bool, **more: Any) -> Config:
    return load_config(
        {
            "name": "run",
            "mode": "train",
            "checkpoint_root_dir": str(root),
            "model": {
                "model_path": model_folder,
                "max_model_len": 32,
                **({"lora_configs": [{"lora_rank": 4, "use_dora": True} | more]} if lora else {}),
            },
            "buffer": {"batch_size": 4},
        }
    )


def make_run(
    model_folder: str, root: Path, lora: bool = False, steps: int = 2, algorithm: str = "grpo", **more: Any
) -> tuple[str, TorchEngine]:
    """A run with a checkpoint of each step, and the trainer that wrote them."""
    config = make_config(model_folder, root, lora, **more)
    storage = open_storage(config.checkpoint_job_dir)
    open_run(storage, config)
    engine = trainer(model_folder, config.model.lora_configs[0] if config.model.lora_configs else None, algorithm)
    for step in range(1, steps + 1):
        engine.train_step(rollouts(seed=step), step)
        Checkpoints(storage, "main").save(step, engine.state_files(), {})
    return config.checkpoint_job_dir, engine


IDS = torch.arange(2, 12)[None]


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_checkpoint_converts_to_a_transformers_model(model_folder: str, tmp_path: Path, lora: bool) -> None:
    run, engine = make_run(model_folder, tmp_path, lora)
    out = tmp_path / "out"
    assert convert(run, out).step == 2
    model = AutoModelForCausalLM.from_pretrained(out)
    dtype = AutoModelForCausalLM.from_pretrained(model_folder).dtype
    assert model.dtype == dtype
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    expected = engine._model(IDS).logits.to(dtype)
    assert_close(model(IDS).logits, expected)
    if not lora:
        for name, tensor in engine._model.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor.to(dtype)), name
    assert (
        AutoTokenizer.from_pretrained(out)("47+8=").input_ids
        == AutoTokenizer.from_pretrained(model_folder)("47+8=").input_ids
    )
    assert (
        GenerationConfig.from_pretrained(out).eos_token_id
        == GenerationConfig.from_pretrained(model_folder).eos_token_id
    )


def test_the_adapters_of_a_tied_head_convert(model_folder: str, tmp_path: Path) -> None:
    run, engine = make_run(model_folder, tmp_path, lora=True, use_dora=False, target_modules=("lm_head",))
    convert(run, tmp_path / "out")
    model, base = (AutoModelForCausalLM.from_pretrained(f, dtype="float32") for f in (tmp_path / "out", model_folder))
    logits = engine._model(IDS).logits
    # The difference is the rounding of the merged weights in the files.
    assert (model(IDS).logits - logits).abs().max() < 0.02 * logits.abs().max()
    assert torch.equal(model.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert not torch.equal(model.get_output_embeddings().weight, base.get_output_embeddings().weight)


def test_a_reward_model_keeps_its_head(small: str, tmp_path: Path) -> None:
    run, engine = make_run(small, tmp_path, algorithm="reward_model")
    convert(run, tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1 and model.score.weight.abs().sum() > 0
    assert_close(model(IDS).logits, engine._model(IDS).logits)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_files_that_are_only_read_are_copied_unchanged(small: str, tmp_path: Path, lora: bool) -> None:
    """Also a temperature without do_sample, which transformers reads and refuses to write."""
    model = Path(shutil.copytree(small, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 5]}')
    (model / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text() + "\n")
    run, engine = make_run(str(model), tmp_path, lora)
    exported = engine.export_files()
    convert(run, tmp_path / "out")
    names = {path.name for path in model.iterdir()} - {"model.safetensors"}
    assert len(names) == 5
    for name in sorted(names):
        assert exported[name] == (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes(), name


def test_a_model_has_the_chat_template_of_its_run(small: str, tmp_path: Path) -> None:
    """Not that of the model that it began as, with which it was never prompted."""
    file = tmp_path / "own.jinja"
    file.write_text("own: {{ messages[0].content }}")
    engine = trainer(small, None, model__chat_template_path=str(file))
    config = config_with(make_config(small, tmp_path, lora=False), {"model.chat_template_path": str(file)})
    storage = open_storage(config.checkpoint_job_dir)
    open_run(storage, config)
    Checkpoints(storage, "main").save(1, engine.state_files(), {})
    convert(config.checkpoint_job_dir, tmp_path / "first")
    exported = {f"{HF_FOLDER}/{name}": data for name, data in engine.export_files().items()}
    Checkpoints(storage, "main").save(2, engine.state_files() | exported, {})
    file.unlink()
    convert(config.checkpoint_job_dir, tmp_path / "second")
    for name in ("first", "second"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "own: hi"


def test_adapters_are_written_in_peft_layout(small: str, tmp_path: Path) -> None:
    run, engine = make_run(small, tmp_path, lora=True)
    convert(run, tmp_path / "out", merge_lora=False)
    model = AutoModelForCausalLM.from_pretrained(small)
    theirs = PeftModel.from_pretrained(model, tmp_path / "out")
    assert_close(theirs(IDS).logits, engine._model(IDS).logits)


@pytest.mark.parametrize("lora", [True, False])
def test_a_moved_run_finds_the_model_in_its_first_folder(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """It has no model of its own, or adapters, which are added to the one that they were trained on."""
    shutil.copytree(small, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    run, _ = make_run("model", tmp_path / "runs", lora=lora)
    convert(run, tmp_path / "before")
    shutil.move(run, tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    convert("../moved", tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_moved_stage_finds_the_model_of_the_stage_before(small: str, tmp_path: Path) -> None:
    run = make_config(small, tmp_path / "whole", lora=True).checkpoint_job_dir
    own = Path(run).parent / "first" / "global_step_4" / HF_FOLDER
    shutil.copytree(small, own)
    make_run(str(own), tmp_path / "whole", lora=True)
    convert(run, tmp_path / "before")
    shutil.move(tmp_path / "whole", tmp_path / "moved")
    convert(run.replace("/whole/", "/moved/"), tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_moved_run_converts_without_its_first_model(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    run, engine = make_run("model", tmp_path / "runs")
    exported = {f"{HF_FOLDER}/{name}": data for name, data in engine.export_files().items()}
    Checkpoints(open_storage(run), "main").complete(2, exported, interim=False)
    convert(run, tmp_path / "before")
    shutil.move(run, tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "model")
    for step in (1, 2):  # the first one has no model of its own
        convert("../moved", tmp_path / f"after-{step}", step=step)
    for path in (tmp_path / "before").iterdir():
        assert (tmp_path / "after-2" / path.name).read_bytes() == path.read_bytes(), path.name


def test_run_checkpoint_and_step_select_the_same_weights(small: str, tmp_path: Path) -> None:
    run, _ = make_run(small, tmp_path)
    ways: list[dict[str, Any]] = [
        {"source": run, "step": 1},
        {"source": f"{run}/global_step_1"},
        {"source": f"{run}/global_step_1/", "step": 1},
    ]
    files = []
    for number, way in enumerate(ways):
        assert replace(convert(**way, out=tmp_path / str(number)), run="", folder=Path()).step == 1
        files.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]
    convert(run, tmp_path / "newest")
    assert (tmp_path / "newest" / "model.safetensors").read_bytes() != files[0]


def test_convert_prints_its_output_and_rejects_bad_input(small: str, tmp_path: Path) -> None:
    run, _ = make_run(small, tmp_path, steps=1)
    done = CliRunner().invoke(app, ["convert", run, str(tmp_path / "out")])
    assert done.exit_code == 0
    assert done.output == f"{tmp_path / 'out'}: step 1 of {run}\n"
    for call, message in (
        ({"out": tmp_path / "out"}, "already exists"),
        ({"out": tmp_path / "new", "step": 7}, "no checkpoint of step 7; its steps are: 1"),
        ({"out": tmp_path / "new", "merge_lora": False}, "trains all weights"),
    ):
        with pytest.raises(UserError, match=message):
            convert(run, **call)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("form", "text"),
    [("gguf", r"python llama\.cpp/convert_hf_to_gguf\.py out --outfile out\.gguf"), ("onnx", "hf, a Hugging")],
)
def test_gguf_is_rejected_with_instructions(
    form: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = call_cli("convert", "run", "out", "--to", form)
    assert ended.code == 2 and re.search(text, ended.err), ended
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_checkpoint_is_an_error(small: str, tmp_path: Path) -> None:
    run, _ = make_run(small, tmp_path, steps=0)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        convert(run, tmp_path / "out")
