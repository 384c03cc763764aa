"""Promise: a workflow or reward that cannot work is reported in one message before anything starts, by a trial on the
first row.

An error that may only be caused by the trial's answer is a warning. On a login node, parts that are not installed are
reported as unchecked.
"""

import json
import logging
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hostile import refused_run

from rftdask.config import load_config
from rftdask.data.task import Task
from rftdask.driver.preflight import check_inputs
from rftdask.errors import ConfigError
from tests.integration.run_cases import call_cli

TASKSET = "buffer.explorer_input.taskset"
HEAD = """
import os
import sys
import time
from rftdask.rollouts.workflows.base import Reward
"""

REWARDS = {
    "of TRL": ("def scored(completions, **kwargs):\n    return [0.0 for _ in completions]", "(response, truth, task)"),
    "of TRL with prompts": ("def scored(prompts, completions, answer, **kwargs):\n    return [0.0]", "[0.0]"),
    "of only the response": ("def scored(response):\n    return 1.0", "(response, truth, task)"),
    "wants more": ("def scored(response, truth, task, tokenizer):\n    return 1.0", "tokenizer"),
    "gives nothing": ("def scored(response, truth, task):\n    pass", "None"),
    "gives text": ("def scored(response, truth, task):\n    return '1.0'", "'1.0'"),
    "gives a pair": ("def scored(response, truth, task):\n    return 1.0, {}", "[1.0, {}]"),
    "names nothing": ("def scored(response, truth, task):\n    return no_such_name", "no_such_name"),
    "asks a text for a list": ("def scored(response, truth, task):\n    return truth.pop()", "pop"),
    "takes a column as attribute": ("def scored(response, truth, task):\n    return task.answer", "answer"),
    "imports what is not there": ("def scored(response, truth, task):\n    import no_such_package", "no_such_package"),
    "is a generator": ("def scored(response, truth, task):\n    yield 1.0", "generator"),
    "is a number": ("scored = 1.0", "float"),
}
WORKFLOWS = {
    "takes no model": ("async def scored(task):\n    return 1.0", "(task, model)"),
    "takes more": ("async def scored(task, model, judge):\n    return 1.0", "judge"),
    "is a class without run": ("class scored:\n    pass", "run(task, model)"),
    "is a class that wants arguments": (
        "class scored:\n    def __init__(self, depth):\n        pass\n    async def run(self, *given):\n        pass",
        "depth",
    ),
    "asks nothing": ("async def scored(task, model):\n    return 1.0", "never called"),
    "asks with no messages": ("async def scored(task, model):\n    await model.chat([])", "at least one message"),
    "forgets to await": ("async def scored(task, model):\n    return model.generate('x').text", "text"),
    "has no such judge": ("async def scored(task, model):\n    model.auxiliary('judge')", "explorer.auxiliary_models"),
    "fails at its start": ("async def scored(task, model):\n    raise ValueError('no Chess-v9')", "Chess-v9"),
    "dies at its start": ("async def scored(task, model):\n    os._exit(7)", "exited with code 7"),
    "takes a column that is not there": ("async def scored(task, model):\n    return task.row['level']", "level"),
    "returns nothing": ("async def scored(task, model):\n    await model.generate('x')", "None"),
    "returns text": ("async def scored(task, model):\n    return (await model.generate('x')).text", "'1'"),
}


def own(config: Path, key: str, source: str) -> tuple[str, ...]:
    """Return settings that name the function `scored` in a plug-in folder."""
    folder = config.parent / "plugins"
    folder.mkdir()
    name = f"plugin_{abs(hash((config, source)))}"  # a process imports a module only once
    (folder / f"{name}.py").write_text(HEAD + source + "\n")
    return f"explorer.plugin_dirs=[{folder}]", f"{TASKSET}.{key}={name}.scored"


@pytest.mark.parametrize(("source", "word"), REWARDS.values(), ids=REWARDS.keys())
@pytest.mark.timeout(60)
def test_a_reward_that_cannot_work_is_refused(config: Path, source: str, word: str) -> None:
    refused_plugin(config, "default_reward_fn_type", source, word)


@pytest.mark.parametrize(("source", "word"), WORKFLOWS.values(), ids=WORKFLOWS.keys())
@pytest.mark.timeout(60)
def test_a_workflow_that_cannot_work_is_refused(config: Path, source: str, word: str) -> None:
    refused_plugin(config, "default_workflow_type", source, word)


def refused_plugin(config: Path, key: str, source: str, word: str) -> None:
    settings = own(config, key, source)
    text = refused_run(config, *settings, words=(word, "scored"))
    assert text.startswith("error: 1 problem:"), f"one mistake is reported once: {text}"


@pytest.mark.parametrize("source", ["1 / 0", "def scored(response truth):\n    pass"], ids=["raises", "is no Python"])
def test_a_plugin_that_cannot_be_imported_is_refused(config: Path, source: str) -> None:
    refused_run(config, *own(config, "default_reward_fn_type", source), words=("Error: ", "plugin_", ".py:"))


def test_a_game_that_does_not_exist_is_one_message(config: Path) -> None:
    arguments = "{env_id: NoSuch-v9, actions: [up, down]}"
    settings = (f"{TASKSET}.default_workflow_type=gymnasium_workflow", f"{TASKSET}.workflow_args={arguments}")
    text = refused_run(config, *settings, words=("NoSuch", "gymnasium_workflow"))
    assert text.startswith("error: 1 problem:"), text


def test_validate_with_data_runs_custom_functions(config: Path) -> None:
    settings = own(config, "default_reward_fn_type", "def scored(response, truth, task):\n    return None")
    assert call_cli("validate", str(config), *settings).code == 0
    ended = call_cli("validate", str(config), *settings, "--data")
    assert ended.code == 2 and "reward is None, not a number" in ended.err
    assert "tried on row 0 of taskset_0" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("answer", ["4", ""])
def test_validate_ends_with_the_rewards_of_answers(config: Path, answer: str) -> None:
    settings = own(config, "default_reward_fn_type", "def scored(response, truth, task):\n    return 1.0")
    tasks = config.parent / "answers.jsonl"
    tasks.write_text(json.dumps({"question": "2 + 2", "answer": answer}) + "\n")
    only = f"{TASKSET}.path={tasks}", "buffer.explorer_input.eval_tasksets=[]"
    ended = call_cli("validate", str(config), *settings, *only, "--data")
    last = "\n\ntaskset taskset_0: reward of the expected answer: 1 on 1 row\n"
    assert ended.code == 0 and ended.out.endswith(last) == bool(answer), ended
    assert not ended.out.endswith("\n\n")


@pytest.mark.parametrize(
    "source",
    [
        "def scored(response, truth, task):\n    raise ValueError('no answer in it')",
        "def scored(response, truth, task):\n    return float('nan')",
        "def scored(response, truth, task):\n    os._exit(3)",
    ],
    ids=["raises", "nan", "dies"],
)
def test_a_failure_an_answer_may_cause_only_warns(config: Path, source: str, caplog: pytest.LogCaptureFixture) -> None:
    check_inputs([load_config(config, own(config, "default_reward_fn_type", source))])
    [warning] = [record for record in caplog.records if "is not trained" in record.message]
    assert warning.levelno == logging.WARNING and "scored: tried on row 0 of taskset_0" in warning.message


def test_parts_missing_on_a_login_node_are_unchecked(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    for source in ("import no_such_package", "def scored(response, truth, task):\n    import no_such_package"):
        caplog.clear()
        shutil.rmtree(config.parent / "plugins", ignore_errors=True)
        settings = own(config, "default_reward_fn_type", source)
        check_inputs([load_config(config, settings)], elsewhere=True)
        assert "not checked here" in caplog.text and "no_such_package" in caplog.text
        text = refused_run(config, *settings, words=("no_such_package",))
        assert text.startswith("error: 1 problem:"), text


def test_each_of_the_rows_ways_is_tried(config: Path) -> None:
    settings = own(config, "default_reward_fn_type", "def scored(response, truth, task):\n    return None")
    rows = [{"question": "1+1=", "answer": "2", "how": how} for how in ("", "", settings[1].partition("=")[2])]
    (config.parent / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    ways = (settings[0], f"{TASKSET}.default_reward_fn_type=exact_reward", f"{TASKSET}.format.reward_fn_key=how")
    refused_run(config, *ways, words=("tried on row 2 of taskset_0",))


def test_functions_of_a_script_cannot_run_in_process(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(response: str, truth: str, task: Task) -> float:
        return 1.0

    scored.in_process = True  # type: ignore[attr-defined]
    scored.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "scored", scored, raising=False)
    with pytest.raises(ConfigError, match=r"1 problem:\n.*reward function __main__.scored is defined in a script"):
        check_inputs([load_config(config, [f"{TASKSET}.default_reward_fn_type=__main__.scored"])])


@pytest.mark.parametrize(
    ("mode", "is_apart"), [("auto", True), ("always", True), ("never", False)], ids=["auto", "always", "never"]
)
@pytest.mark.timeout(60)
def test_the_trial_runs_where_rollouts_will(config: Path, mode: str, is_apart: bool) -> None:
    tell = "def scored(response, truth, task):\n    raise NameError(f\"{os.getpid()} {os.environ.get('OWN')}\")"
    settings = own(config, "default_reward_fn_type", tell)
    with pytest.raises(ConfigError, match=r"NameError: (\d+) " + ("yes" if is_apart else "None")) as caught:
        check_inputs(
            [load_config(config, (*settings, f"explorer.sandbox.mode={mode}", "explorer.env_vars={OWN: 'yes'}"))]
        )
    assert (f"NameError: {os.getpid()} " not in str(caught.value)) == is_apart


@pytest.mark.timeout(60)
def test_the_trial_has_the_limits_of_the_run(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    eat = "def scored(response, truth, task):\n    return float(len(bytearray(1 << 29)) > 0)"
    settings = own(config, "default_reward_fn_type", eat)
    check_inputs([load_config(config, (*settings, "explorer.sandbox.max_memory_gb=0.25"))])
    assert "MemoryError" in caplog.text


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.timeout(60)
def test_a_trial_that_never_ends_is_broken_off(config: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    hang = "def scored(response, truth, task):\n    while True:\n        time.sleep(0.01)"
    settings = own(config, "default_reward_fn_type", hang)
    limits = (f"explorer.sandbox.mode={mode}", "explorer.max_timeout=1")
    check_inputs([load_config(config, (*settings, *limits))])
    assert "a rollout that ends like this one counts as failed" in caplog.text


@pytest.mark.parametrize("missing", ["a loss", "an engine"])
def test_plugins_missing_on_a_login_node_are_unchecked(
    config: Path, missing: str, toy_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = config.parent / "plugins"
    folder.mkdir()
    name = f"lossy_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text("import no_such_package")
    settings = ["trainer.trainer_type=torch", f"model.model_path={toy_model}"]
    if missing == "a loss":
        settings += [f"explorer.plugin_dirs=[{folder}]", f"algorithm.policy_loss_fn={name}.Lossy"]
    elif find_spec("vllm") is None:
        settings += ["explorer.rollout_model.engine_type=vllm"]
    else:
        pytest.skip("vLLM is installed")
    word = "no_such_package" if missing == "a loss" else "vllm"
    stage = load_config(config, settings)
    with pytest.raises(ConfigError, match=word):
        check_inputs([stage])
    check_inputs([stage], elsewhere=True)
    assert "not checked here" in caplog.text and word in caplog.text


def test_validate_on_a_login_node_lists_unchecked_parts(config: Path) -> None:
    settings = own(config, "default_reward_fn_type", "import no_such_package")
    for more in ((), ("--data",)):
        ended = call_cli("validate", str(config), *settings, *more)
        assert ended.code == 2 and "no_such_package" in ended.err
        ended = call_cli("validate", str(config), *settings, "cluster.type=slurm", *more)
        assert ended.code == 0, ended
        if not more:  # the other message is logged, and pytest has captured it
            assert ended.err.count("not checked here, and checked where the run starts:") == 1
