"""Promises of the run folder: one config for its whole life, and one living owner for each role."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftdask.config import Config, load_config, replace
from rftdask.errors import DamagedError, DataError, FencedError, UserError
from rftdask.run.lease import Lease, LeaseWatch, lease_holder, lease_holders
from rftdask.run.run_folder import (
    RUN_FILE,
    allocate_run_name,
    check_run,
    open_run,
    read_config,
    read_run,
    read_run_config,
    record_config,
)
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_object
from rftdask.testing.storage_faults import FaultyStorage

_numbers = itertools.count()


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://run-folder-{next(_numbers)}")


@lru_cache  # reading a config is the slow part of these tests
def config(*overrides: str) -> Config:
    tree: dict[str, Any] = {
        "model": {"model_path": "tiny", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    return load_config(tree, overrides)


def test_the_first_start_makes_the_folder_and_the_second_finds_it(storage: Storage) -> None:
    opened = open_run(storage, config())
    assert opened.explorer.tasks_per_batch == 8
    recorded = read_run(storage)
    assert load_config(recorded["config"]) == opened
    assert recorded["seed"] == 42
    assert recorded["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    written = storage.get(RUN_FILE)
    assert open_run(storage, config()) == opened
    assert storage.get(RUN_FILE) == written, "a later start changes nothing"


def test_a_run_begins_beside_the_one_in_its_folder_where_it_is_not_to_continue_it(tmp_path: Path) -> None:
    fresh = config(f"checkpoint_root_dir={tmp_path}", "continue_from_checkpoint=false")
    assert allocate_run_name(fresh).name == "rft", "there is none to be beside"
    storage = open_storage(fresh.checkpoint_job_dir)
    open_run(storage, fresh)
    assert read_run_config(storage).continue_from_checkpoint, "once begun it is continued"
    beside = allocate_run_name(fresh)
    assert re.fullmatch(r"rft_20\d{12}", beside.name)
    open_run(open_storage(beside.checkpoint_job_dir), beside)
    assert allocate_run_name(beside) == beside, "who starts it again continues it"
    assert allocate_run_name(config(f"checkpoint_root_dir={tmp_path}")).name == "rft"
    with pytest.raises(UserError, match=r"from_checkpoint: .*/rft is not empty, and mode train finds the other"):
        allocate_run_name(replace(fresh, {"mode": "train"}))
    held_out = {"mode": "bench", "buffer.explorer_input.eval_tasksets": [{"path": "held_out.jsonl"}]}
    assert allocate_run_name(replace(fresh, held_out)).name == "rft", "it is warned of"


def test_another_config_is_refused_naming_every_key(storage: Storage) -> None:
    open_run(storage, config())
    with pytest.raises(DataError) as caught:
        open_run(storage, config("seed=7", "algorithm.optimizer.lr=0.5", "trainer.save_interval=3"))
    lines = str(caught.value).splitlines()
    assert "holds a run of another configuration; set these back, or choose another name:" in lines[0]
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
    "checkpoint_root_dir": "/somewhere/else",
}


def test_how_far_and_how_loud_may_change(storage: Storage) -> None:
    open_run(storage, config())
    changed = config(*(f"{key}={value}" for key, value in FREE.items()))
    opened = open_run(storage, changed)
    assert (opened.trainer.total_steps, opened.log.level, opened.buffer.total_epochs) == (99, "DEBUG", 3)
    with pytest.raises(DataError) as caught:
        open_run(storage, load_config({**changed.to_dict(), "seed": 1}))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == ["  - seed"]


def test_a_later_start_may_place_auxiliary_models_elsewhere_and_not_ask_others(storage: Storage) -> None:
    def judged(text: str) -> Config:
        return config(f"explorer.auxiliary_models=[{{name: judge, model_path: j{text}}}]")

    open_run(storage, judged(""))
    [judge] = open_run(storage, judged(", engine_num: 2, prompt_price: 3")).explorer.auxiliary_models
    assert (judge.engine_num, judge.prompt_price) == (2, 3.0)
    with pytest.raises(DataError, match=r"explorer\.auxiliary_models: was"):
        open_run(storage, judged(", temperature: 0.5"))


def test_an_evaluation_needs_no_training_taskset(storage: Storage) -> None:
    open_run(storage, config())
    evals = "buffer.explorer_input.eval_tasksets=[{path: e.jsonl}]"
    open_run(storage, config("mode=bench", "buffer.explorer_input.taskset=null", evals))
    with pytest.raises(DataError, match=r"explorer_input\.taskset"):
        open_run(storage, config("buffer.explorer_input={tasksets: [{path: tasks.jsonl}], taskset: null}"))


def test_rollout_batches_keep_the_size_of_the_first_start(storage: Storage) -> None:
    assert open_run(storage, config("explorer.rollout_model.engine_num=2")).explorer.tasks_per_batch == 4
    more_engines = open_run(storage, config("explorer.rollout_model.engine_num=4"))
    assert more_engines.explorer.rollout_model.engine_num == 4
    assert more_engines.explorer.tasks_per_batch == 4
    with pytest.raises(DataError, match=r"explorer.tasks_per_batch: was 4, is 2"):
        open_run(storage, config("explorer.tasks_per_batch=2"))


def test_a_run_from_before_raw_goes_on_as_it_began(storage: Storage) -> None:
    """Then plaintext said what raw says now, and what supervised rows did not look at may not begin to act."""

    def began(prompt_type: str, **more: str) -> Config:
        fmt = {"prompt_type": prompt_type, **more}
        read = {"experience_buffer": {"path": "rows.jsonl", "format": fmt}}
        tree = {"algorithm": {"algorithm_type": "sft"}, "mode": "train", "buffer": {"trainer_input": read}}
        return load_config({"model": {"model_path": "tiny", "max_model_len": 64}, **tree})

    open_run(storage, began("plaintext", reply_prefix="Well, "))
    tree = parse_object(storage.get(RUN_FILE))
    del tree["config_edition"]
    storage.put(RUN_FILE, json.dumps(tree).encode())

    key = "buffer.trainer_input.experience_buffer.format"
    assert open_run(storage, began("raw")).buffer.trainer_input.experience_buffer.format.prompt_type == "raw"
    with pytest.raises(DataError, match=f"{key}.prompt_type: was 'raw', is 'plaintext'"):
        open_run(storage, began("plaintext"))
    with pytest.raises(DataError, match=f"{key}.reply_prefix: was None, is 'Well, '"):
        open_run(storage, began("raw", reply_prefix="Well, "))


def test_what_is_held_out_may_change(storage: Storage) -> None:
    def held_out(*overrides: str) -> Config:
        tree = {
            "algorithm": {"algorithm_type": "sft"},
            "mode": "train",
            "model": {"model_path": "m", "max_model_len": 64},
        }
        return load_config(tree, ["buffer.trainer_input.experience_buffer.path=rows.jsonl", *overrides])

    open_run(storage, held_out())
    opened = open_run(storage, held_out("buffer.trainer_input.eval_buffer.path=more.jsonl", "trainer.eval_interval=3"))
    assert opened.trainer.eval_interval == 3 and opened.buffer.trainer_input.eval_buffer is not None


def test_a_folder_without_a_run_is_told(storage: Storage) -> None:
    with pytest.raises(DataError, match=r"is not a run folder: it has no run.json; give <checkpoint_root_dir>/"):
        read_run(storage)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_run_file_is_told_and_kept(storage: Storage, data: bytes) -> None:
    storage.put(RUN_FILE, data)
    with pytest.raises(DamagedError, match=r"run.json is damaged"):
        open_run(storage, config())
    assert storage.get(RUN_FILE) == data


def names(storage: Storage) -> list[str]:
    return storage.list("control")


def test_a_second_living_owner_is_refused_naming_the_first(storage: Storage) -> None:
    with Lease(storage, "trainer"):
        with pytest.raises(FencedError, match=f"trainer is process {os.getpid()} on {socket.gethostname()}"):
            Lease(storage, "trainer")
        with Lease(storage, "explorer"):
            assert names(storage) == ["lease-explorer-1.json", "lease-trainer-1.json"]


def test_a_released_role_is_free(storage: Storage) -> None:
    lease = Lease(storage, "trainer")
    holder = lease_holder(storage, "trainer")
    assert holder is not None
    assert holder["pid"] == os.getpid()
    lease.release()
    lease.release()
    assert lease_holder(storage, "trainer") is None
    with Lease(storage, "trainer") as second:
        assert not second.lost
        assert names(storage) == ["lease-trainer-1.json", "lease-trainer-2.json"]


def since_boot(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def plant(storage: Storage, number: int = 1, **fields: Any) -> None:
    process = psutil.Process()
    lease = {"host": socket.gethostname(), "pid": os.getpid(), "started_s": since_boot(process)}
    content = {**lease, "time_s": time.time(), "released": False, **fields}
    storage.put(f"control/lease-trainer-{number}.json", json.dumps(content).encode())


def test_the_role_of_a_dead_process_is_taken_over_at_once(storage: Storage) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        dead = process.pid
    plant(storage, pid=dead)
    assert lease_holder(storage, "trainer") is None
    Lease(storage, "trainer").release()
    assert names(storage)[-1] == "lease-trainer-2.json"


def test_an_owner_that_ended_and_that_its_parent_never_asked_for_is_dead(storage: Storage) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        zombie = psutil.Process(process.pid)
        while zombie.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        plant(storage, pid=zombie.pid, started_s=since_boot(zombie))
        assert lease_holder(storage, "trainer") is None
        Lease(storage, "trainer").release()


def test_a_pid_that_was_given_to_another_process_is_not_the_owner(storage: Storage) -> None:
    plant(storage, started_s=since_boot(psutil.Process()) - 60)
    Lease(storage, "trainer", sleep=lambda seconds: None).release()


@pytest.mark.parametrize("by_s", [-86400.0, -1.0, 1.0, 86400.0])
def test_a_clock_that_is_set_makes_no_living_owner_of_this_machine_dead(
    storage: Storage, by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(storage)
    # What Linux tells as the time of its start, from which psutil has those of processes.
    set_s = psutil.boot_time() + by_s
    monkeypatch.setattr(psutil, "boot_time", lambda: set_s)
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: set_s)
    assert lease_holder(storage, "trainer") is not None
    assert LeaseWatch(storage).is_held("trainer", 1)


@pytest.mark.parametrize(("age_s", "free"), [(0.0, False), (3600.0, True)])
def test_an_owner_on_another_machine_is_alive_while_it_says_so(storage: Storage, age_s: float, free: bool) -> None:
    plant(storage, host="elsewhere", time_s=time.time() - age_s)
    assert (lease_holder(storage, "trainer") is None) is free
    if free:
        Lease(storage, "trainer", sleep=lambda seconds: None).release()
    else:
        with pytest.raises(FencedError, match="on elsewhere"):
            Lease(storage, "trainer")


def test_a_lease_that_was_never_finished_is_nobodys(storage: Storage) -> None:
    storage.put("control/lease-trainer-4.json", b"")
    Lease(storage, "trainer").release()
    assert names(storage)[-1] == "lease-trainer-5.json"


@pytest.mark.parametrize("change", [{"pid": -5}, {"pid": True}, {"pid": 1e30}, {"time_s": "x"}, {"released": 0}])
def test_a_lease_of_another_shape_is_nobodys(change: dict[str, object], storage: Storage) -> None:
    plant(storage, **change)
    assert lease_holder(storage, "trainer") is None
    Lease(storage, "trainer").release()


def test_a_lease_after_which_none_can_come_is_to_be_removed(storage: Storage) -> None:
    for name in ("lease-trainer-99999999999999999999999.json", "lease-trainer-1e3.json", "lease-trainer--1.json"):
        storage.put(f"control/{name}", b"{}")
        Lease(storage, "trainer").release()
    storage.put("control/lease-trainer-999999999999999.json", b"{}")
    with pytest.raises(DamagedError, match=r"lease-trainer-999999999999999.json has a number .* remove it"):
        Lease(storage, "trainer")


def test_who_sees_a_higher_number_has_lost_and_leaves_it_alone(storage: Storage) -> None:
    lease = Lease(storage, "trainer", heartbeat_s=0.001)
    plant(storage, number=2, host="elsewhere")
    until = time.monotonic() + 30
    while not lease.lost and time.monotonic() < until:
        time.sleep(0.001)
    assert lease.lost
    before = storage.get("control/lease-trainer-2.json")
    lease.release()
    assert storage.get("control/lease-trainer-2.json") == before
    assert not json.loads(storage.get("control/lease-trainer-1.json"))["released"]


def test_of_two_that_start_at_once_one_wins(storage: Storage) -> None:
    others: list[Lease] = []

    def overtake(verb: str, path: str, stage: str) -> None:
        if (verb, stage) == ("put_new", "before"):
            others.append(Lease(storage, "trainer"))

    with pytest.raises(FencedError, match="another process has just started as trainer"):
        Lease(FaultyStorage(storage, overtake), "trainer")
    others[0].release()


def test_explorers_of_different_names_are_beside_each_other_if_they_make_as_many_steps(storage: Storage) -> None:
    open_run(storage, config())
    with Lease(storage, "explorer.a", explore_steps=4), Lease(storage, "explorer.b", explore_steps=4):
        assert list(lease_holders(storage)) == ["explorer.a", "explorer.b"]
        named = replace(config(), {"mode": "explore", "explorer.name": "c"})
        check_run(storage, named, explore_steps=4)
        Lease(storage, "trainer").release()
        with pytest.raises(FencedError, match=r"explorer.a is process .* explorer.name of its own"):
            check_run(storage, replace(named, {"explorer.name": "a"}), explore_steps=4)
        for steps, why in (
            (5, "it makes 4 explore steps, and this one 5"),
            (None, "of mode explore, with one of mode"),
        ):
            with pytest.raises(FencedError, match=why):
                check_run(storage, named, explore_steps=steps)
            with pytest.raises(FencedError, match=why):
                Lease(storage, "explorer.c", explore_steps=steps)
    assert lease_holders(storage) == {}, "who was refused holds nothing"


def test_nobody_explores_beside_who_explores_alone(storage: Storage) -> None:
    with Lease(storage, "explorer"), pytest.raises(FencedError, match="explorer is process"):
        Lease(storage, "explorer.b", explore_steps=4)


def test_of_two_explorers_that_exclude_each_other_and_start_at_once_one_sees_the_other(storage: Storage) -> None:
    others: list[Lease] = []

    def overtake(verb: str, path: str, stage: str) -> None:
        if (verb, stage) == ("put_new", "before") and not others:
            others.append(Lease(storage, "explorer.b", explore_steps=4))

    with pytest.raises(FencedError, match=r"explorer.b is process"):
        Lease(FaultyStorage(storage, overtake), "explorer")
    others[0].release()


def test_who_watches_a_lease_of_another_machine_goes_by_its_own_clock(storage: Storage) -> None:
    now = [0.0]
    watch = LeaseWatch(storage, lambda: now[0])
    plant(storage, host="elsewhere", time_s=0.0)  # its clock is years behind
    assert watch.is_held("trainer", 1)
    now[0] = 29.0
    assert watch.is_held("trainer", 1)
    plant(storage, host="elsewhere", time_s=5.0)
    now[0] = 58.0
    assert watch.is_held("trainer", 1)
    now[0] = 100.0
    assert not watch.is_held("trainer", 1)
    plant(storage, host="elsewhere", released=True)
    assert not watch.is_held("trainer", 1)
    assert not watch.is_held("trainer", 2)


def test_run_folders_work_on_disk(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    open_run(storage, config())
    with Lease(storage, "trainer"):
        assert lease_holder(storage, "trainer") is not None


def test_a_worker_reads_the_config_of_its_start_and_not_the_one_that_the_run_began_with(storage: Storage) -> None:
    began = open_run(storage, config())
    later = open_run(storage, config("explorer.max_timeout=7", "mode=explore"))
    fingerprints = [record_config(storage, each) for each in (began, later)]
    assert len(set(fingerprints)) == 2
    assert [read_config(storage, each) for each in fingerprints] == [began, later]
    assert load_config(read_run(storage)["config"]) == began, "run.json stays as it was"
    assert record_config(storage, later) == fingerprints[1], "the same config is the same file"


def test_a_stage_is_recorded_with_the_model_that_the_stage_before_it_made(storage: Storage) -> None:
    stage = replace(config(), {"model.model_path": "runs/first/global_step_4/huggingface"})
    worker = read_config(storage, record_config(storage, open_run(storage, stage)))
    assert worker.model.model_path == "runs/first/global_step_4/huggingface"


def test_a_stage_of_a_moved_run_goes_on_with_the_model_that_is_in_the_run(tmp_path: Path) -> None:
    """Its path was that of the old place; another checkpoint's, or one outside the run, is another model."""
    old, new = tmp_path / "old", tmp_path / "new"
    model = "first/global_step_4/actor/huggingface"
    open_run(open_storage(old / "second"), config(f"model.model_path={old}/{model}"))
    old.rename(new)
    stage = open_storage(new / "second")
    moved = open_run(stage, config(f"model.model_path={new}/{model}"))
    assert moved.model.model_path == f"{new}/{model}"
    for other in (f"{new}/{model.replace('4', '8')}", f"{tmp_path}/{model}"):
        with pytest.raises(DataError, match=r"model\.model_path: was"):
            open_run(stage, config(f"model.model_path={other}"))


def test_a_worker_that_sees_another_folder_refuses(storage: Storage) -> None:
    fingerprint = record_config(storage, config())
    with pytest.raises(DataError, match=f"config-{fingerprint}.json, which the driver .* does this machine see the"):
        read_config(open_storage("memory://another-disk"), fingerprint)


def test_a_config_that_is_not_what_its_fingerprint_says_is_refused_and_put_right_by_the_next_start(
    storage: Storage,
) -> None:
    fingerprint = record_config(storage, config())
    path = f"control/config-{fingerprint}.json"
    written = storage.get(path)
    for damaged in (b"", written[:100], written.replace(b'"batch_size": 8', b'"batch_size": 9')):
        storage.put(path, damaged)
        with pytest.raises(DamagedError, match="does not fit its name"):
            read_config(storage, fingerprint)
    record_config(storage, config())
    assert read_config(storage, fingerprint) == config()


def test_what_the_environment_completes_may_take_the_place_of_its_value(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older start may have written the value down, a password included."""
    key, url = "buffer.explorer_input.taskset.workflow_args", "https://me:hunter2@judge"
    tree = {"model": {"model_path": "tiny", "max_model_len": 64}, "algorithm": {"repeat_times": 2}}
    tree |= {"buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "t", "workflow_args": {"url": url}}}}}
    open_run(storage, load_config(tree, was_checked=True))
    monkeypatch.setenv("JUDGE", url)
    opened = open_run(storage, load_config(tree, [key + ".url=${oc.env:JUDGE}"]))
    assert opened.buffer.explorer_input.train_tasksets[0].workflow_args["url"] == "${oc.env:JUDGE}"
    monkeypatch.setenv("JUDGE", "https://me:other@judge")
    with pytest.raises(DataError, match=f"{key}.url: was .*, is '"):
        open_run(storage, load_config(tree, [key + ".url=${oc.env:JUDGE}"]))


def test_a_run_folder_holds_nothing_of_the_environment(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "https://me:hunter2@judge")
    asked = "buffer.explorer_input.taskset.workflow_args.url=${oc.env:JUDGE}"
    opened = open_run(storage, config(asked))
    again = read_config(storage, record_config(storage, opened))
    assert again.buffer.explorer_input.train_tasksets[0].workflow_args["url"] == "${oc.env:JUDGE}"
    for path in (RUN_FILE, *(f"control/{name}" for name in storage.list("control"))):
        assert b"hunter2" not in storage.get(path)
    monkeypatch.delenv("JUDGE")
    assert load_config(read_run(storage)["config"], was_checked=True) == opened, "who looks needs no environment"


@pytest.mark.parametrize(("on_gpus", "given", "kept"), [(False, None, True), (True, None, False), (True, True, True)])
def test_the_first_start_writes_down_whether_bits_repeat(
    storage: Storage, on_gpus: bool, given: bool | None, kept: bool
) -> None:
    settings = [] if given is None else [f"deterministic={str(given).lower()}"]
    assert open_run(storage, config(*settings), on_gpus=on_gpus).deterministic is kept
    assert read_run_config(storage).deterministic is kept
    # A later start on another machine goes on as the run began.
    assert open_run(storage, config(*settings), on_gpus=not on_gpus).deterministic is kept
    with pytest.raises(DataError, match="deterministic: was"):
        open_run(storage, config(f"deterministic={str(not kept).lower()}"))
