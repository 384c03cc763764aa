"""Promises of the run folder: one config for the whole life of a run."""

import json
import re
import sys
from pathlib import Path

import pytest

from rftdask.config import Config, load_config, replace
from rftdask.errors import DamagedError, DataError, UserError
from rftdask.run import run_folder
from rftdask.run.lease import Lease, lease_holder
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object
from tests.unit.run.folder_cases import config


def test_the_first_start_creates_the_folder(storage: Storage) -> None:
    opened = run_folder.open_run(storage, config())
    assert opened.explorer.tasks_per_batch == 8
    recorded = run_folder.read_run(storage)
    assert load_config(recorded["config"]) == opened
    assert recorded["seed"] == 42
    assert recorded["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    written = storage.get(run_folder.RUN_FILE)
    assert run_folder.open_run(storage, config()) == opened
    assert storage.get(run_folder.RUN_FILE) == written, "a later start changes nothing"


def test_a_run_that_does_not_continue_gets_a_new_name(tmp_path: Path) -> None:
    fresh = config(f"checkpoint_root_dir={tmp_path}", "continue_from_checkpoint=false")
    assert run_folder.allocate_run_name(fresh).name == "rft", "the folder is empty"
    storage = open_storage(fresh.checkpoint_job_dir)
    run_folder.open_run(storage, fresh)
    assert run_folder.read_run_config(storage).continue_from_checkpoint, "once begun it is continued"
    beside = run_folder.allocate_run_name(fresh)
    assert re.fullmatch(r"rft_20\d{12}", beside.name)
    run_folder.open_run(open_storage(beside.checkpoint_job_dir), beside)
    assert run_folder.allocate_run_name(beside) == beside, "a second start continues the run"
    assert run_folder.allocate_run_name(config(f"checkpoint_root_dir={tmp_path}")).name == "rft"
    with pytest.raises(UserError, match=r"from_checkpoint: .*/rft is not empty, and mode train finds the other"):
        run_folder.allocate_run_name(replace(fresh, {"mode": "train"}))
    held_out = {"mode": "bench", "buffer.explorer_input.eval_tasksets": [{"path": "held_out.jsonl"}]}
    assert run_folder.allocate_run_name(replace(fresh, held_out)).name == "rft", "it is warned of"


def test_another_config_is_refused_naming_every_key(storage: Storage) -> None:
    run_folder.open_run(storage, config())
    with pytest.raises(DataError) as caught:
        run_folder.open_run(storage, config("seed=7", "algorithm.optimizer.lr=0.5", "trainer.save_interval=3"))
    lines = str(caught.value).splitlines()
    assert "has a run with another configuration; restore these values, or choose another name:" in lines[0]
    # And what has the run's seed since it names none of its own.
    named = [line.split(":")[0].removeprefix("  - ") for line in lines[1:]]
    assert [name for name in named if not name.endswith(".seed")] == ["algorithm.optimizer.lr", "seed"]
    assert lines[-1] == "  - seed: was 42, is 7"


FREE = {
    "trainer.total_steps": "99",
    "trainer.save_interval": "5",
    "trainer.num_ranks": "2",
    "trainer.trainer_strategy": "ddp",
    "trainer.max_checkpoints_to_keep": "1",
    "buffer.total_epochs": "3",
    "buffer.explorer_input.eval_tasksets": "[{path: more.jsonl, name: held_out}]",
    "explorer.eval_interval": "7",
    "monitor.monitor_type": "none",
    "log.level": "DEBUG",
    "synchronizer.sync_timeout": "5",
    "synchronizer.sync_method": "memory",
    "buffer.trainer_input.experience_buffer.retention.keep": "thin",
    "explorer.listen_address": "127.0.0.2",
    "explorer.proxy_port": "8123",
    "explorer.sandbox.max_processes": "3",
    "explorer.sandbox.max_memory_gb": "9",
    "trainer.max_token_len_per_gpu": "512",
    "buffer.explorer_input.default_eval_workflow_type": "math_workflow",
    "trainer.name": "learner",
    "checkpoint_root_dir": "/somewhere/else",
}


def test_length_and_output_of_a_run_may_change(storage: Storage) -> None:
    run_folder.open_run(storage, config())
    changed = config(*(f"{key}={value}" for key, value in FREE.items()))
    opened = run_folder.open_run(storage, changed)
    assert (opened.trainer.total_steps, opened.log.level, opened.buffer.total_epochs) == (99, "DEBUG", 3)
    with pytest.raises(DataError) as caught:
        run_folder.open_run(storage, load_config({**changed.to_dict(), "seed": 1}))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == ["  - seed"]


def test_auxiliary_models_may_move_but_not_change(storage: Storage) -> None:
    def judged(text: str) -> Config:
        return config(f"explorer.auxiliary_models=[{{name: judge, model_path: j{text}}}]")

    run_folder.open_run(storage, judged(""))
    [judge] = run_folder.open_run(storage, judged(", engine_num: 2, prompt_price: 3")).explorer.auxiliary_models
    assert (judge.engine_num, judge.prompt_price) == (2, 3.0)
    with pytest.raises(DataError, match=r"explorer\.auxiliary_models: was"):
        run_folder.open_run(storage, judged(", temperature: 0.5"))


def test_an_evaluation_needs_no_training_taskset(storage: Storage) -> None:
    run_folder.open_run(storage, config())
    evals = "buffer.explorer_input.eval_tasksets=[{path: e.jsonl}]"
    run_folder.open_run(storage, config("mode=bench", "buffer.explorer_input.taskset=null", evals))
    with pytest.raises(DataError, match=r"explorer_input\.taskset"):
        run_folder.open_run(storage, config("buffer.explorer_input={tasksets: [{path: tasks.jsonl}], taskset: null}"))


def test_rollout_batches_keep_the_size_of_the_first_start(storage: Storage) -> None:
    assert run_folder.open_run(storage, config("explorer.rollout_model.engine_num=2")).explorer.tasks_per_batch == 4
    more_engines = run_folder.open_run(storage, config("explorer.rollout_model.engine_num=4"))
    assert more_engines.explorer.rollout_model.engine_num == 4
    assert more_engines.explorer.tasks_per_batch == 4
    with pytest.raises(DataError, match=r"explorer.tasks_per_batch: was 4, is 2"):
        run_folder.open_run(storage, config("explorer.tasks_per_batch=2"))


def test_a_run_of_the_first_config_edition_continues(storage: Storage) -> None:
    """In edition 1 plaintext meant raw, and supervised rows ignored some keys, which must stay so."""

    def began(prompt_type: str, **more: str) -> Config:
        fmt = {"prompt_type": prompt_type, **more}
        read = {"experience_buffer": {"path": "rows.jsonl", "format": fmt}}
        tree = {"algorithm": {"algorithm_type": "sft"}, "mode": "train", "buffer": {"trainer_input": read}}
        return load_config({"model": {"model_path": "tiny", "max_model_len": 64}, **tree})

    run_folder.open_run(storage, began("plaintext", reply_prefix="Well, "))
    tree = parse_object(storage.get(run_folder.RUN_FILE))
    del tree["config_edition"]
    storage.put(run_folder.RUN_FILE, json.dumps(tree).encode())

    key = "buffer.trainer_input.experience_buffer.format"
    assert run_folder.open_run(storage, began("raw")).buffer.trainer_input.experience_buffer.format.prompt_type == "raw"
    with pytest.raises(DataError, match=f"{key}.prompt_type: was 'raw', is 'plaintext'"):
        run_folder.open_run(storage, began("plaintext"))
    with pytest.raises(DataError, match=f"{key}.reply_prefix: was None, is 'Well, '"):
        run_folder.open_run(storage, began("raw", reply_prefix="Well, "))


def test_held_out_data_may_change(storage: Storage) -> None:
    def held_out(*overrides: str) -> Config:
        tree = {
            "algorithm": {"algorithm_type": "sft"},
            "mode": "train",
            "model": {"model_path": "m", "max_model_len": 64},
        }
        return load_config(tree, ["buffer.trainer_input.experience_buffer.path=rows.jsonl", *overrides])

    run_folder.open_run(storage, held_out())
    opened = run_folder.open_run(
        storage, held_out("buffer.trainer_input.eval_buffer.path=more.jsonl", "trainer.eval_interval=3")
    )
    assert opened.trainer.eval_interval == 3 and opened.buffer.trainer_input.eval_buffer is not None


def test_a_folder_without_a_run_is_an_error(storage: Storage) -> None:
    with pytest.raises(DataError, match=r"is not a run folder: it has no run.json; give <checkpoint_root_dir>/"):
        run_folder.read_run(storage)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_run_file_is_an_error_and_kept(storage: Storage, data: bytes) -> None:
    storage.put(run_folder.RUN_FILE, data)
    with pytest.raises(DamagedError, match=r"run.json is damaged"):
        run_folder.open_run(storage, config())
    assert storage.get(run_folder.RUN_FILE) == data


def test_run_folders_work_on_disk(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    run_folder.open_run(storage, config())
    with Lease(storage, "trainer"):
        assert lease_holder(storage, "trainer") is not None


def test_a_worker_reads_the_config_of_its_start(storage: Storage) -> None:
    began = run_folder.open_run(storage, config())
    later = run_folder.open_run(storage, config("explorer.max_timeout=7", "mode=explore"))
    fingerprints = [run_folder.record_config(storage, each) for each in (began, later)]
    assert len(set(fingerprints)) == 2
    assert [run_folder.read_config(storage, each) for each in fingerprints] == [began, later]
    assert load_config(run_folder.read_run(storage)["config"]) == began, "run.json stays as it was"
    assert run_folder.record_config(storage, later) == fingerprints[1], "the same config is the same file"


def test_a_stage_records_the_model_of_the_stage_before(storage: Storage) -> None:
    stage = replace(config(), {"model.model_path": "runs/first/global_step_4/huggingface"})
    worker = run_folder.read_config(storage, run_folder.record_config(storage, run_folder.open_run(storage, stage)))
    assert worker.model.model_path == "runs/first/global_step_4/huggingface"


def test_a_stage_of_a_moved_run_uses_its_model(tmp_path: Path) -> None:
    """Its path was that of the old place; another checkpoint's, or one outside the run, is another model."""
    old, new = tmp_path / "old", tmp_path / "new"
    model = "first/global_step_4/actor/huggingface"
    run_folder.open_run(open_storage(old / "second"), config(f"model.model_path={old}/{model}"))
    old.rename(new)
    stage = open_storage(new / "second")
    moved = run_folder.open_run(stage, config(f"model.model_path={new}/{model}"))
    assert moved.model.model_path == f"{new}/{model}"
    for other in (f"{new}/{model.replace('4', '8')}", f"{tmp_path}/{model}"):
        with pytest.raises(DataError, match=r"model\.model_path: was"):
            run_folder.open_run(stage, config(f"model.model_path={other}"))


def test_a_worker_with_another_folder_refuses(storage: Storage) -> None:
    fingerprint = run_folder.record_config(storage, config())
    with pytest.raises(DataError, match=f"config-{fingerprint}.json, which the driver wrote; check that this machine"):
        run_folder.read_config(open_storage("memory://another-disk"), fingerprint)


def test_a_damaged_config_is_refused_then_repaired(storage: Storage) -> None:
    fingerprint = run_folder.record_config(storage, config())
    path = f"control/config-{fingerprint}.json"
    written = storage.get(path)
    for damaged in (b"", written[:100], written.replace(b'"batch_size": 8', b'"batch_size": 9')):
        storage.put(path, damaged)
        with pytest.raises(DamagedError, match="does not match its name"):
            run_folder.read_config(storage, fingerprint)
    run_folder.record_config(storage, config())
    assert run_folder.read_config(storage, fingerprint) == config()


def test_an_environment_reference_may_replace_its_value(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older start may have written the value down, a password included."""
    key, url = "buffer.explorer_input.taskset.workflow_args", "https://me:hunter2@judge"
    tree = {"model": {"model_path": "tiny", "max_model_len": 64}, "algorithm": {"repeat_times": 2}}
    tree |= {"buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "t", "workflow_args": {"url": url}}}}}
    run_folder.open_run(storage, load_config(tree, was_checked=True))
    monkeypatch.setenv("JUDGE", url)
    opened = run_folder.open_run(storage, load_config(tree, [key + ".url=${oc.env:JUDGE}"]))
    assert opened.buffer.explorer_input.train_tasksets[0].workflow_args["url"] == "${oc.env:JUDGE}"
    monkeypatch.setenv("JUDGE", "https://me:other@judge")
    with pytest.raises(DataError, match=f"{key}.url: was .*, is '"):
        run_folder.open_run(storage, load_config(tree, [key + ".url=${oc.env:JUDGE}"]))


def test_a_run_folder_has_no_values_of_the_environment(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "https://me:hunter2@judge")
    asked = "buffer.explorer_input.taskset.workflow_args.url=${oc.env:JUDGE}"
    opened = run_folder.open_run(storage, config(asked))
    again = run_folder.read_config(storage, run_folder.record_config(storage, opened))
    assert again.buffer.explorer_input.train_tasksets[0].workflow_args["url"] == "${oc.env:JUDGE}"
    for path in (run_folder.RUN_FILE, *(f"control/{name}" for name in storage.list("control"))):
        assert b"hunter2" not in storage.get(path)
    monkeypatch.delenv("JUDGE")
    assert load_config(run_folder.read_run(storage)["config"], was_checked=True) == opened, (
        "reading needs no environment"
    )


@pytest.mark.parametrize(("on_gpus", "given", "kept"), [(False, None, True), (True, None, False), (True, True, True)])
def test_a_first_start_decides_if_bits_repeat(storage: Storage, on_gpus: bool, given: bool | None, kept: bool) -> None:
    settings = [] if given is None else [f"deterministic={str(given).lower()}"]
    assert run_folder.open_run(storage, config(*settings), on_gpus=on_gpus).deterministic is kept
    assert run_folder.read_run_config(storage).deterministic is kept
    # A later start on another machine goes on as the run began.
    assert run_folder.open_run(storage, config(*settings), on_gpus=not on_gpus).deterministic is kept
    with pytest.raises(DataError, match="deterministic: was"):
        run_folder.open_run(storage, config(f"deterministic={str(not kept).lower()}"))
