"""Promise: every configuration the project ships loads without a warning, is planned, and survives its own comments."""

from pathlib import Path

import pytest

from rftdask.config import load_config, make_plan

FOLDER = Path(__file__).parents[3] / "config"
FILES = sorted(FOLDER.rglob("*.yaml"))


def test_there_are_configurations_to_check() -> None:
    assert {file.stem for file in FILES} >= {"gsm8k-grpo", "offline", "sft"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_without_a_warning_and_is_planned(file: Path) -> None:
    loaded = load_config(file)
    assert loaded.warnings == ()
    assert make_plan(loaded).render()


def commands_in(file: Path) -> list[str]:
    """The commands that run or submit in the comments at its top, continued over lines with a backslash."""
    comments = (line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))
    joined = "\n".join(comments).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.startswith(("rftdask run ", "rftdask submit "))]


COMMANDS = [(file, command) for file in FILES for command in commands_in(file)]


@pytest.mark.parametrize(("file", "command"), COMMANDS, ids=[file.stem for file, _ in COMMANDS])
def test_the_commands_in_its_comments_are_valid(file: Path, command: str) -> None:
    _, _, path, *words = command.partition(" #")[0].split()
    overrides = [word for word in words if not word.startswith("--")]
    assert path == f"config/{file.resolve().relative_to(FOLDER)}"
    load_config(file, overrides)


def test_each_example_shows_its_commands() -> None:
    assert {file.stem for file, _ in COMMANDS} >= {"gsm8k-grpo", "offline", "sft"}


def test_gsm8k_reads_the_answer_after_the_mark() -> None:
    loaded = load_config(FOLDER / "gsm8k.yaml")  # its short name
    taskset = loaded.buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.path, taskset.subset_name) == ("openai/gsm8k", "main")
    assert (taskset.format.prompt_key, taskset.format.response_key) == ("question", "answer")
    assert (taskset.default_workflow_type, taskset.default_reward_fn_type) == ("math_workflow", "math_reward")


def test_both_modes_of_the_offline_example_share_one_folder() -> None:
    explore, train = (load_config(FOLDER / "offline.yaml", [f"mode={mode}"]) for mode in ("explore", "train"))
    assert explore.checkpoint_job_dir == train.checkpoint_job_dir
