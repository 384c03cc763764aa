"""A run stores fingerprints of its inputs; a start with changed inputs is refused until they are accepted."""

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rftdask.config import Config, load_config
from rftdask.config.plugins import SUBMITTED
from rftdask.driver.preflight import check_inputs
from rftdask.errors import DamagedError, DataError
from rftdask.models.toy import build_toy_model
from rftdask.run import input_fingerprints
from rftdask.run.run_folder import open_run, read_run
from rftdask.storage import open_storage
from tests.integration.run_cases import RunProcess, call_cli, finish_alone, num_steps, run_folder, write_config

REWARD = "def scored(response, truth, task):\n    return float(truth in response)\n"


class World:
    """A run with a reward of its own and a model folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path = write_config(folder)
        self.module = f"own_{folder.name}".replace("-", "_")  # a module is imported once in a process
        self.reward = folder / "plugins" / f"{self.module}.py"
        self.reward.parent.mkdir()
        self.reward.write_text(f"import {self.module}_scale\n{REWARD}")
        self.reward.with_name(f"{self.module}_scale.py").write_text("FACTOR = 1.0\n")
        self.tasks = folder / "tasks.jsonl"
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        self.storage = open_storage(run_folder(self.path))

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"explorer.plugin_dirs=[{self.reward.parent}]",
            f"buffer.explorer_input.taskset.default_reward_fn_type={self.module}.scored",
            f"model.model_path={self.model}",
            "explorer.sandbox.mode=never",  # each start would wait for an interpreter
        )

    def config(self, *more: str) -> Config:
        return load_config(self.path, (*self.settings, *more))

    def start(self, *more: str, accept: bool = False) -> input_fingerprints.InputFingerprints:
        config = self.config(*more)
        [fingerprints] = input_fingerprints.check_inputs_unchanged([config], check_inputs([config]), accept=accept)
        open_run(self.storage, config, fingerprints.to_json())
        input_fingerprints.copy_sources(self.storage, fingerprints)
        return fingerprints


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    build_toy_model(folder)
    return folder


@pytest.fixture
def world(tmp_path: Path, model: Path) -> World:
    return World(tmp_path, model)


def test_a_changed_recipe_of_an_operator_is_refused(world: World) -> None:
    recipe, at = world.tasks.with_name("recipe.yaml"), "data_processor.experience_pipeline"
    recipe.write_text("process: [text_length_filter]\n")
    operator = f"{at}.operators=[{{name: data_juicer, args: {{config_path: {recipe}}}}}]"
    config = world.config(operator, f"{at}.stage=commit")
    [fingerprints] = input_fingerprints.check_inputs_unchanged([config], [input_fingerprints.Inputs()])
    open_run(world.storage, config, fingerprints.to_json())
    input_fingerprints.check_inputs_unchanged([config], [input_fingerprints.Inputs()])
    recipe.write_text("process: [alphanumeric_filter]\n")
    with pytest.raises(DataError, match=r"experience_pipeline.operators\[0\]/recipe.yaml: content changed"):
        input_fingerprints.check_inputs_unchanged([config], [input_fingerprints.Inputs()])


def test_a_changed_initial_adapter_is_refused(tmp_path: Path, world: World) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = world.config(f"model.lora_configs=[{{path: {folder}}}]")
    (folder / "adapter_config.json").write_text('{"r": 4}')
    [fingerprints] = input_fingerprints.check_inputs_unchanged([config], [input_fingerprints.Inputs()])
    open_run(world.storage, config, fingerprints.to_json())
    (folder / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(DataError, match=r"model.lora_configs\[0\].path/adapter_config.json: content changed"):
        input_fingerprints.check_inputs_unchanged([config], [input_fingerprints.Inputs()])


def test_a_run_stores_the_fingerprints_of_its_inputs(world: World) -> None:
    fingerprints = world.start()
    said = read_run(world.storage)["fingerprints"]
    assert said["host"] == socket.gethostname()
    assert all(set(state) == {"commit", "is_dirty"} for state in said["git"].values())
    assert said["sources"] == dict(fingerprints.sources)
    assert list(said["sources"]) == [world.module, f"{world.module}_scale"]
    assert list(said["tasksets"]) == ["taskset_0", "eval/held_out"]
    size = (world.model / "model.safetensors").stat().st_size
    assert said["models"]["model.model_path/model.safetensors"].startswith(f"{size} ")
    copy, _ = world.storage.list("sources")
    assert world.storage.get(f"sources/{copy}").decode().endswith(REWARD)
    world.start()
    assert input_fingerprints.accepted_changes(world.storage) == []


def rewarded_otherwise(world: World) -> None:
    world.reward.write_text(REWARD.replace("float(", "-float("))


def imported_otherwise(world: World) -> None:
    helper = world.reward.with_name(f"{world.module}_scale.py")
    helper.write_text("FACTOR = 2.0\n")


def reordered(world: World) -> None:
    lines = world.tasks.read_text().splitlines(keepends=True)
    world.tasks.write_text("".join(reversed(lines)))


def trained_further(world: World) -> None:
    file = world.model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def tokenized_otherwise(world: World) -> None:
    (world.model / "added_tokens.json").write_text("{}")
    (world.model / "config.json").write_text((world.model / "config.json").read_text() + "\n")


CHANGES: dict[str, tuple[Callable[[World], None], str]] = {
    "a reward": (rewarded_otherwise, "source own_"),
    "what a reward imports": (imported_otherwise, "_scale: content changed"),
    "a taskset": (reordered, "taskset taskset_0: rows or their order changed"),
    "weights": (trained_further, "model.model_path/model.safetensors: content changed"),
    "a file of the model": (tokenized_otherwise, "model.model_path/config.json: content changed"),
}


@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_refused_by_name_until_accepted(change: Callable[[World], None], text: str, world: World) -> None:
    world.start()
    change(world)
    with pytest.raises(DataError, match="--accept-changes") as refused:
        world.start()
    assert text in str(refused.value) and len(str(refused.value).splitlines()) == 2
    assert input_fingerprints.accepted_changes(world.storage) == []
    world.start(accept=True)
    world.start()
    world.start(accept=True)
    [line] = input_fingerprints.accepted_changes(world.storage)
    assert line.startswith("after step 0: ") and text in line


def test_an_accepted_source_is_copied_next_to_the_first(world: World) -> None:
    world.start()
    rewarded_otherwise(world)
    world.start(accept=True)
    assert len(world.storage.list("sources")) == 3
    world.reward.write_text(f"import {world.module}_scale\n{REWARD}")
    with pytest.raises(DataError, match=f"source {world.module}"):
        world.start()


def test_a_changed_evaluation_is_recorded_and_not_refused(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    held_out = world.path.parent / "held_out.jsonl"
    held_out.write_text("".join(reversed(held_out.read_text().splitlines(keepends=True))))
    world.start()
    world.start()
    assert caplog.text.count("new evaluation results do not compare with earlier ones") == 1
    [line] = input_fingerprints.accepted_changes(world.storage)
    assert line.startswith("after step 0: taskset eval/held_out: rows or their order changed")


SHAPES = ("[]", "{", '{"sources": [1]}', '{"changes": 7}', '{"changes": [["a"]]}', '{"models": {"a": 7}}', "[" * 5000)


@pytest.mark.parametrize("text", SHAPES, ids=[text[:20] for text in SHAPES])
def test_a_malformed_record_of_changes_is_damage(text: str, world: World) -> None:
    world.start()
    world.storage.put("control/accepted-1.json", text.encode())
    for ask in (world.start, lambda: input_fingerprints.accepted_changes(world.storage)):
        with pytest.raises(DamagedError, match=r"control/accepted-1.json is damaged: "):
            ask()


def test_a_run_without_fingerprints_continues(world: World) -> None:
    open_run(world.storage, world.config())
    world.start()


def test_a_large_file_is_hashed_in_pieces(tmp_path: Path, world: World) -> None:
    file = world.model / "more.safetensors"
    with file.open("wb") as opened:
        opened.truncate(200 << 20)
    hashes = []
    for place in (0, 0, (200 << 20) - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"1")
        found = input_fingerprints.InputFingerprints.of(
            world.config(), input_fingerprints.Inputs().modules, {}, is_first=True
        )
        hashes.append(found.models["model.model_path/more.safetensors"])
    assert hashes[2] != hashes[1]
    later = input_fingerprints.InputFingerprints.of(world.config(), (), {}, is_first=False)
    assert not later.models, "the run makes the model of a later stage"


def test_a_large_file_is_hashed_fully_during_the_run(world: World) -> None:
    file = world.model / "more.safetensors"

    def place(value: bytes) -> input_fingerprints.InputFingerprints:
        with file.open("wb") as opened:
            opened.truncate(40 << 20)
            opened.seek((1 << 18) + 17)  # between two pieces
            opened.write(value)
        return input_fingerprints.InputFingerprints.of(world.config(), (), {}, is_first=True)

    def start(value: bytes, *, accept: bool = False, mode: str = "both") -> None:
        contents = input_fingerprints.BackgroundHasher(world.storage, mode, place(value), accept=accept)
        for thread in threading.enumerate():
            if thread.name == "contents":
                thread.join()
        contents.check()

    assert place(b"1").models == place(b"2").models
    open_run(world.storage, world.config(), place(b"1").to_json())
    start(b"1")
    start(b"1", mode="train")
    said = json.loads(world.storage.get("control/contents-both-0.json"))["models"]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert said == {"model.model_path/more.safetensors": f"{40 << 20} {digest}"}
    for mode in ("both", "explore"):
        with pytest.raises(DataError, match=r"model.model_path/more.safetensors: content changed .*; bytes and hash"):
            start(b"2", mode=mode)
    assert input_fingerprints.accepted_changes(world.storage) == []
    start(b"2", accept=True)
    start(b"2")
    assert len(input_fingerprints.accepted_changes(world.storage)) == 1
    with pytest.raises(DataError, match="--accept-changes"):
        start(b"1")


def test_files_in_the_hub_cache_have_the_hash_of_their_blob(world: World) -> None:
    file = world.model / "model.safetensors"
    (world.model.parent / "blobs").mkdir()
    file.rename(world.model.parent / "blobs" / "abc")
    with (world.model.parent / "blobs" / "abc").open("r+b") as opened:
        opened.truncate(40 << 20)
    file.symlink_to(world.model.parent / "blobs" / "abc")
    found = input_fingerprints.InputFingerprints.of(world.config(), (), {}, is_first=True)
    assert found.models["model.model_path/model.safetensors"] == f"{40 << 20} abc" and not found.large


@pytest.mark.slow
def test_a_resume_refuses_a_changed_reward_not_its_copy(world: World) -> None:
    """And one whose large file differs where no piece is ends, with the file's name, as soon as that is known."""
    copies = world.path.parent / "copies"
    config = world.config()
    input_fingerprints.copy_for_jobs(input_fingerprints.find_sources(config, ()), config.explorer.plugin_dirs, copies)
    large = world.model / "more.safetensors"
    with large.open("wb") as opened:
        opened.truncate(40 << 20)
    finish_alone(world.path, *world.settings, "trainer.total_steps=2")
    rewarded_otherwise(world)
    more = ("run", str(world.path), *world.settings, "--progress", "none")
    refused = call_cli(*more, "trainer.total_steps=3")
    assert refused.code == 2 and f"source {world.module}" in refused.err and "Traceback" not in refused.err
    with RunProcess(*more, "trainer.total_steps=3", env={SUBMITTED: str(copies)}) as run:
        ended = run.end()
    assert ended.code == 0 and num_steps(run_folder(world.path)) == 3, ended
    accepted = call_cli(*more, "trainer.total_steps=4", "--accept-changes")
    assert accepted.code == 0, accepted
    traced = call_cli("trace", str(run_folder(world.path)), "taskset_0/0/0/0/0")
    assert traced.code == 0 and f"accepted  after step 3: source {world.module}" in traced.out, traced
    with large.open("r+b") as opened:
        opened.seek((1 << 18) + 17)
        opened.write(b"1")
    other = call_cli(*more, "trainer.total_steps=40")
    assert other.code == 2 and "model.model_path/more.safetensors: content changed" in other.err, other
    assert "Traceback" not in other.err
