"""Promises of the checks before a start: each mistake in data, model or storage is reported before a run starts, and
those of the data together. Two commands on one run are rejected if the storage has no conditional writes.
"""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from rftdask.config import Config, load_config
from rftdask.data import hub
from rftdask.driver.preflight import check_inputs, check_owners
from rftdask.errors import ConfigError, UserError
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.storage.fsspec_store import FsspecStorage


def save_tokenizer(folder: Path) -> None:
    """A tokenizer with one token per byte, whose template refuses the role "tool"."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    bytes_of = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    bytes_of.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of)
    refused = "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{refused}{{{{ m['content'] }}}}{{% endfor %}}"
    tokenizer.save_pretrained(folder)


class World:
    """A run whose inputs are all right, until a test breaks one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks = folder / "tasks.jsonl"
        self.rows = [{"question": f"1+{n}=", "answer": str(1 + n)} for n in range(6)]
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        save_tokenizer(self.model)
        (self.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # whole, without a tensor
        self.write(self.rows)

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, *overrides: str) -> Config:
        explored = {"taskset": self.section(), "default_reward_fn_type": "exact_reward"}
        tree = {"algorithm": {"repeat_times": 2}, "buffer": {"batch_size": 4, "explorer_input": explored}}
        return self.load(tree, overrides)

    def sft(self, *overrides: str) -> Config:
        buffer = {"batch_size": 4, "trainer_input": {"experience_buffer": self.section()}}
        return self.load({"mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}, overrides)

    def section(self) -> dict[str, Any]:
        return {"path": str(self.tasks), "format": {"prompt_key": "question", "response_key": "answer"}}

    def load(self, tree: dict[str, Any], overrides: tuple[str, ...]) -> Config:
        model = {"model_path": str(self.model), "max_model_len": 64}
        return load_config({**tree, "checkpoint_root_dir": str(self.folder / "runs"), "model": model}, overrides)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def problems(*stages: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(list(stages))
    return "\n".join(caught.value.problems)


TASKS = "buffer.explorer_input.taskset"


def test_right_inputs_pass_and_are_counted(world: World) -> None:
    config = world.config()
    assert check_inputs([config])[0].sizes == {"taskset_0": 6}
    assert check_inputs([world.sft()])[0].sizes == {"dataset": 6}
    assert open_storage(config.checkpoint_job_dir).list("control") == [], "the probe is gone again"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (f"{TASKS}.format.image_key=image", "explorer.rollout_model.engine_type=vllm"),
            "is a llava; with images this engine was verified to compute",
        ),
        (
            (f"{TASKS}.format.video_key=video",),
            "is a llava, and a taskset has format.video_key: only qwen2_vl, qwen2_5_vl read videos",
        ),
    ],
)
def test_images_and_videos_need_a_model_that_reads_them(world: World, overrides: tuple[str, ...], message: str) -> None:
    (world.model / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    (world.model / "preprocessor_config.json").write_text("{}")
    assert message in problems(world.config(*overrides))


def test_an_empty_taskset_is_an_error(world: World) -> None:
    world.write([])
    assert "tasks.jsonl has no rows" in problems(world.config())
    assert "tasks.jsonl has no rows" in problems(world.sft())


@pytest.mark.parametrize(("option", "column"), [("prompt_key", "questin"), ("response_key", "anser")])
def test_a_wrong_column_key_lists_the_columns(world: World, option: str, column: str) -> None:
    text = problems(world.config(f"{TASKS}.format.{option}={column}"))
    assert f"has no column {column!r}, which format.{option} names" in text
    assert "columns: question, answer; nearest: " in text
    text = problems(world.sft(f"buffer.trainer_input.experience_buffer.format.{option}={column}"))
    assert f"has no column {column!r}, which format.{option} names; columns: question, answer" in text


def test_all_rows_are_checked_before_the_start(world: World) -> None:
    rows = [{"question": "1+1=", "answer": None if number == 130 else "2"} for number in range(140)]
    world.write(rows)
    assert "row 130: column 'answer' (format.response_key) is empty; fix the data, or raise" in problems(world.config())
    check_inputs([world.config("buffer.max_bad_rows=1")])
    assert "row 130: column 'answer' holds NoneType, not text" in problems(world.sft())
    text = "algorithm.algorithm_type=cpt", "buffer.trainer_input.experience_buffer.format.prompt_key=answer"
    assert "row 130: column 'answer' holds NoneType, not text" in problems(world.sft(*text))
    world.write([{**row, "answer": "2", "label": None if number == 130 else 1} for number, row in enumerate(rows)])
    assert "row 130: column 'label' holds 'None'; use true or false" in problems(
        world.sft("algorithm.algorithm_type=kto")
    )


BAD_CHAT = [{"role": "tool", "content": "1+1="}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1" * 70, "answer": "2"}, "row 40: the prompt has 64 tokens, so nothing of the response fits"),
        ({"question": BAD_CHAT[:1], "answer": "2"}, "row 40: the chat template cannot render it: TemplateError: no"),
        ({"question": "1+1=", "answer": None}, "row 40: column 'answer' holds NoneType, not text"),
    ],
)
def test_rows_to_learn_from_are_counted_as_bad_rows(
    world: World, row: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*[{"question": "1+1=", "answer": "2"}] * 40, row]
    world.write(rows)
    text = problems(world.sft())
    assert message in text
    assert "fix the data, or raise buffer.max_bad_rows (0)" in text
    check_inputs([world.sft("buffer.max_bad_rows=1")])
    assert re.search(f"{re.escape(message)}.*; such a row is not trained", caplog.text)
    world.write([*rows, row])
    assert "rows with errors: 2 (40, 41)" in problems(world.sft("buffer.max_bad_rows=1"))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("1" * 40, "row 40: prompt of 40 tokens exceeds max_prompt_tokens 32"),
        (BAD_CHAT[:1], "row 40: the chat template cannot render it: TemplateError: no tools"),
    ],
)
def test_prompts_that_fail_their_task_are_bad_rows(world: World, question: Any, message: str) -> None:
    world.write([*[{"question": "1+1=", "answer": "2"}] * 40, {"question": question, "answer": "2"}])
    refuses = "model.enable_prompt_truncation=false"
    text = problems(world.config(refuses))
    assert message in text
    assert "fix the data, or raise buffer.max_bad_rows (0)" in text
    check_inputs([world.config(refuses, "buffer.max_bad_rows=1")])


def test_no_tokenizer_is_loaded_if_long_prompts_are_truncated(world: World) -> None:
    world.write([{"question": "1" * 40, "answer": "2"}] * 6)
    (world.model / "tokenizer.json").write_text("{}")
    check_inputs([world.config()])
    assert "has no usable tokenizer" in problems(world.config("model.enable_prompt_truncation=false"))


def test_held_out_rows_are_checked_like_training_rows(world: World) -> None:
    held_out = "buffer.trainer_input.eval_buffer"
    keys = [f"{held_out}.format.prompt_key=question", f"{held_out}.format.response_key=answer"]
    [inputs] = check_inputs([world.sft(f"{held_out}.path={world.folder}/tasks.jsonl", *keys)])
    assert inputs.fingerprints["eval/dataset"] == inputs.fingerprints["dataset"]
    assert "has no column 'prompt'" in problems(world.sft(f"{held_out}.path={world.folder}/tasks.jsonl"))


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("tokenizer.json", r"has no tokenizer; save one there with tokenizer.save_pretrained"),
        ("config.json", "is not a model folder: it has no config.json"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_an_incomplete_model_folder_is_an_error(world: World, missing: str, text: str) -> None:
    (world.model / missing).unlink()
    lines = problems(world.config())
    assert f"model.model_path: {str(world.model)!r}" in lines
    assert text in lines


def test_a_missing_model_is_an_error_unless_it_may_be_on_the_hub(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist; give a model folder or a name" in problems(
        world.config(f"model.model_path={world.folder}/none")
    )
    on_the_hub = world.config("model.model_path=Qwen/Qwen2.5-0.5B")
    assert "model.model_path: 'Qwen/Qwen2.5-0.5B' is not on this machine" in problems(on_the_hub)  # which is offline
    answered = (huggingface_hub.constants.ENDPOINT, time.monotonic(), "")
    monkeypatch.setattr(hub, "_silence", answered)  # as where it answers
    check_inputs([on_the_hub])


def test_a_batch_larger_than_all_tasks_is_an_error(world: World) -> None:
    assert "buffer.batch_size 8 exceeds the 6 tasks of all epochs (1)" in problems(world.config("buffer.batch_size=8"))
    check_inputs([world.config("buffer.batch_size=8", "buffer.total_epochs=2")])
    lines = problems(world.sft("buffer.batch_size=8"))
    assert "has 6 rows; 1 epochs do not fill one batch of 8" in lines


def test_an_unwritable_root_is_an_error(world: World) -> None:
    (world.folder / "file").write_text("")
    with pytest.raises(
        UserError, match=r"checkpoint_root_dir: cannot write to .*/file/runs/.*something above it is a file"
    ):
        check_inputs([world.config(f"checkpoint_root_dir={world.folder}/file/runs")])


def test_a_full_disk_is_an_error(world: World, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with pytest.raises(UserError, match=r"0.00 GB free; .* need about 0.07 GB; free some space"):
            check_inputs([world.config(f"checkpoint_root_dir={disk}")])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_impossible_staleness_bound_shows_its_arithmetic(world: World) -> None:
    tight = ("mode=both", "synchronizer.sync_offset=2", "synchronizer.max_staleness=1")
    assert "synchronizer.max_staleness 1 is too low" in problems(world.config(*tight))
    check_inputs([world.config("mode=both", "synchronizer.sync_offset=2", "synchronizer.max_staleness=2")])


def test_all_mistakes_are_reported_together(world: World) -> None:
    (world.model / "tokenizer.json").unlink()
    lines = problems(
        world.config(
            f"{TASKS}.format.prompt_key=x", f"buffer.explorer_input.eval_tasksets=[{{path: {world.folder}/no.jsonl}}]"
        )
    )
    assert len(lines.splitlines()) == 3


def test_an_adapter_is_not_added_by_two_stages(world: World) -> None:
    tree = world.config("model.lora_configs=[{path: adapter}]").to_dict()
    stages = load_config({**tree, "stages": [{"stage_name": "a"}, {"stage_name": "b"}]}).stage_configs()
    assert "the stage after rft/a would add the adapter to a model that already includes it" in problems(*stages)
    check_inputs(stages[:1])


def test_a_model_folder_with_an_adapter_is_refused(world: World) -> None:
    check_inputs([world.config()])
    (world.model / "adapter_config.json").write_text("{}")
    assert "transformers adds that adapter to them and vLLM does not" in problems(world.config())


def test_stages_are_all_checked_without_repeated_errors(world: World) -> None:
    good, bad = world.sft(), world.config(f"{TASKS}.path={world.folder}/task.jsonl")
    assert len(problems(good, bad, bad).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.policy_loss_fn=no_such.Loss", "policy loss 'no_such.Loss': cannot import 'no_such'"),
        ("data_processor.experience_pipeline.operators=[{name: reward_filtr}]", "unknown operator 'reward_filtr'"),
        ("data_processor.experience_pipeline.operators=[{args: {}}]", "operators[0]: takes name and args, no name"),
        ("model.critic_model_path=/no/critic", "model.critic_model_path: '/no/critic' does not exist"),
        (
            "explorer.auxiliary_models=[{model_path: /no/teacher}]",
            "explorer.auxiliary_models[0].model_path: '/no/teacher' does not exist",
        ),
        (f"{TASKS}.default_workflow_type=no_such_package.workflow", "no_such_package"),
        (f"{TASKS}.default_reward_fn_type=no_such_package.reward", "no_such_package"),
    ],
)
def test_missing_and_incompatible_parts_are_found(world: World, override: str, message: str) -> None:
    name = "ppo" if "critic_model_path" in override else "jsd" if "auxiliary" in override else "grpo"
    assert message in problems(world.config(f"algorithm.algorithm_type={name}", override))


def test_a_missing_file_is_named_with_its_neighbors(world: World) -> None:
    assert "task.jsonl does not exist; nearest in" in problems(world.config(f"{TASKS}.path={world.folder}/task.jsonl"))


def test_expert_and_template_settings_must_fit_the_model(world: World) -> None:
    build_toy_model(world.model, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    of_experts = world.sft("trainer.router_aux_loss_coef=0.1")
    assert "has no experts; leave it out" in problems(of_experts)
    replayed = world.config("algorithm.enable_router_replay=true")
    assert re.search("algorithm.enable_router_replay: .* has no experts; leave it out", problems(replayed))
    config = json.loads((world.model / "config.json").read_text())
    # A size that a config.json leaves out is its class's default.
    (world.model / "config.json").write_text(json.dumps({"vocab_size": config["vocab_size"], "model_type": "mixtral"}))
    check_inputs([of_experts])
    of_template = "buffer.trainer_input.experience_buffer.format.return_assistant_tokens_mask=true"
    assert "the chat template marks nothing, it has no {% generation %} block" in problems(world.sft(of_template))


def test_columns_of_pairs_texts_and_demonstrations_are_checked(world: World) -> None:
    rows = "buffer.trainer_input.experience_buffer.format"
    pairs = ("algorithm.algorithm_type=dpo", f"{rows}.prompt_key=question", f"{rows}.chosen_key=answer")
    assert "no column 'rejected', which format.rejected_key names" in problems(world.sft(*pairs))
    check_inputs([world.sft(*pairs, f"{rows}.rejected_key=question")])
    text = "algorithm.algorithm_type=cpt"
    assert "no column 'text', which format.prompt_key names" in problems(world.sft(text, f"{rows}.prompt_key=text"))
    check_inputs([world.sft(text)])
    shown = "buffer.trainer_input.auxiliary_buffers.sft_dataset"
    mix = ("algorithm.algorithm_type=mix", f"{shown}.path={world.tasks}", f"{shown}.format.prompt_key=question")
    assert "no column 'response', which format.response_key names" in problems(world.config(*mix))
    check_inputs([world.config(*mix, f"{shown}.format.response_key=answer")])


def test_a_teacher_with_another_vocabulary_is_rejected(world: World) -> None:
    teacher = world.folder / "teacher"
    shutil.copytree(world.model, teacher)
    config = world.config("algorithm.algorithm_type=jsd", f"explorer.auxiliary_models=[{{model_path: {teacher}}}]")
    check_inputs([config])
    for folder, size in ((world.model, 258), (teacher, 300)):
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    assert f"vocabulary of {teacher} has 300 tokens, and that of the policy {world.model} has 258" in problems(config)
    (teacher / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert f"vocabulary of {teacher} has 32000 tokens" in problems(config)
    (teacher / "config.json").write_text("{}")
    check_inputs([config])


def test_difficulty_columns_are_checked(world: World) -> None:
    easy_to_hard = f"{TASKS}.data_selector={{selector_type: offline_easy2hard, feature_keys: [level]}}"
    assert "no column 'level', which data_selector.feature_keys names" in problems(world.config(easy_to_hard))
    world.write([{**row, "level": n} for n, row in enumerate(world.rows)])
    assert check_inputs([world.config(easy_to_hard)])[0].sizes == {"taskset_0": 6}


def test_learning_selectors_are_checked(world: World) -> None:
    world.write([{**row, "weak": 0.0, "strong": 1.0} for row in world.rows])
    selector = f"{TASKS}.data_selector={{selector_type: difficulty_based, feature_keys: [weak, strong]}}"
    assert check_inputs([world.config(selector)])[0].sizes == {"taskset_0": 6}
    with pytest.raises(ConfigError, match=r"data_selector\.kwargs\.tau: tau must be >= 0"):
        world.config(selector, f"{TASKS}.data_selector.kwargs={{tau: -1}}")
    assert "exceeds the 6 tasks" in problems(world.config(selector, "buffer.batch_size=8"))


def test_a_hosted_model_needs_a_tokenizer_and_a_key(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    hosted = "model.tinker.enable=true"
    (world.model / "tokenizer.json").unlink()
    assert "has no usable tokenizer" in problems(world.config(hosted))
    build_toy_model(world.model, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    (world.model / "model.safetensors").unlink()
    lines = problems(world.config(hosted))
    assert "model.tinker: the service needs a key; export TINKER_API_KEY=tml-... before starting the run" in lines
    assert "no weights" not in lines
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    lines = problems(world.config(hosted, f"{TASKS}.path={world.folder}/missing.jsonl"))
    assert "missing.jsonl" in lines and "the service needs a key" not in lines
    stages = load_config({**world.config(hosted).to_dict(), "stages": [{"stage_name": "a"}, {"stage_name": "b"}]})
    assert "stages: 2 stages need a model folder from each stage" in problems(*stages.stage_configs())


@pytest.mark.parametrize("mode", ["explore", "train"])
def test_two_commands_need_conditional_writes(world: World, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = FsspecStorage("memory://no-conditional-writes")
    with pytest.raises(UserError, match=f"required for mode {mode}, which shares a run with another command"):
        check_owners(plain, world.config(f"mode={mode}"))
    with pytest.raises(UserError, match="required for cluster slurm"):
        one = world.config()
        check_owners(plain, one.model_copy(update={"cluster": one.cluster.model_copy(update={"type": "slurm"})}))
    for config in (world.config(), world.sft()):
        caplog.clear()
        check_owners(plain, config)
        assert "start no second command before this one has ended" in caplog.text
    check_owners(open_storage(world.folder), world.config(f"mode={mode}"))


def test_an_unreachable_database_is_found_before_the_start(world: World) -> None:
    at = "buffer.trainer_input.experience_buffer"
    url = "postgresql://me@127.0.0.1:9/none?connect_timeout=1"
    with pytest.raises(ConfigError, match=f"{at}.path: check in postgresql.*none failed"):
        check_inputs([world.config(f"{at}.storage_type=sql", f"{at}.path={url}")])
    check_inputs([world.config(f"{at}.storage_type=sql")])
    assert not list(world.folder.rglob("*.sqlite"))


@pytest.mark.slow
def test_trials_of_an_earlier_start_are_not_repeated(world: World) -> None:
    (world.folder / "plugins").mkdir()
    (world.folder / "plugins" / "broken_reward.py").write_text(
        "def reward(response, truth, task):\n    return len(task)\n"
    )
    key = "buffer.explorer_input.default_reward_fn_type=broken_reward.reward"
    config = world.config(key, f"explorer.plugin_dirs=[{world.folder}/plugins]")
    with pytest.raises(ConfigError, match="broken_reward"):
        check_inputs([config])
    assert check_inputs([config], tried=True)[0].sizes == {"taskset_0": 6}
    world.write([{"question": "1+1=", "no_answer": "2"}])
    with pytest.raises(ConfigError, match="answer"):
        check_inputs([config], tried=True)
