"""Promises about loading: file, mapping and overrides give one tree, which is filled in and written without loss."""

import functools
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from config_cases import config, grpo, problems, sft
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.config import Config, load_config, replace
from rftdask.config.base import FrozenDict, plain
from rftdask.errors import ConfigError


def test_a_file_a_mapping_and_overrides_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {model_path: tiny, max_model_len: 64}\n"
        "buffer: {batch_size: 4, explorer_input: {taskset: {path: tasks.jsonl}}}\n"
        "algorithm: {optimizer: {lr: 1e-5}}\n"
    )
    overridden = config(
        {},
        "model.model_path=tiny",
        "model.max_model_len=64",
        "buffer.batch_size=4",
        "buffer.explorer_input.taskset.path=tasks.jsonl",
        "algorithm.optimizer.lr=1e-5",
    )
    assert load_config(file) == load_config(str(file)) == overridden
    assert overridden.algorithm.optimizer.lr == 1e-5


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    loaded = config(
        grpo(),
        "seed=1",
        "seed=2",
        "algorithm.optimizer.betas=[0.8, 0.9]",
        "explorer.env_vars={A: x}",
        "project=a=b",
        "group=",
        "buffer.explorer_input.eval_tasksets=[{path: e1}, {path: e2}]",
        "buffer.explorer_input.eval_tasksets[1].path=e3",
    )
    assert (loaded.seed, loaded.project, loaded.group) == (2, "a=b", "")
    assert loaded.algorithm.optimizer.betas == (0.8, 0.9)
    assert loaded.explorer.env_vars == {"A": "x"}
    assert [taskset.path for taskset in loaded.buffer.explorer_input.eval_tasksets] == ["e1", "e3"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed", "override 'seed' is not of the form key.sub=value"),
        ("=3", "override '=3' is not of the form key.sub=value"),
        (["seed=3"], "override ['seed=3'] is not text; give each as 'key.sub=value'"),
        ({"seed": 3}, "override {'seed': 3} is not text; give each as 'key.sub=value'"),
        (
            "a.b=3",
            "a: unknown key; rftdask schema lists all keys, rftdask import translates those of TRL, verl and "
            "Trinity-RFT",
        ),
        ("algorithm.optimizer.rl=1", "algorithm.optimizer.rl: unknown key; did you mean lr?"),
        ("project=[a", "project: the override cannot be applied: while parsing a flow sequence"),
        (
            "buffer.explorer_input.eval_tasksets[3].path=e",
            "buffer.explorer_input.eval_tasksets[3].path: the override cannot be applied: list index out of range",
        ),
    ],
)
def test_an_override_that_cannot_be_applied_is_reported(override: Any, line: str) -> None:
    source = grpo()
    source["buffer"]["explorer_input"]["eval_tasksets"] = [{"path": "e"}]
    assert problems(source, override) == [line]


def test_interpolations_see_the_overrides_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFTDASK_TEST_ROOT", "/data")
    source = grpo(
        name="${model.model_path}-${algorithm.repeat_times}",
        group="${oc.env:RFTDASK_TEST_NOT_SET,fallback}",
        checkpoint_root_dir="${oc.env:RFTDASK_TEST_ROOT}/runs",
        algorithm={"repeat_times": 4},
    )
    loaded = config(source, "model.model_path=other")
    assert (loaded.name, loaded.group, loaded.checkpoint_root_dir) == ("other-4", "fallback", "/data/runs")


def test_every_failed_interpolation_is_reported() -> None:
    assert problems(grpo(group="${nothing.here}", name="${oc.env:RFTDASK_TEST_NOT_SET}", project="???")) == [
        "group: cannot be resolved: Interpolation key 'nothing.here' not found",
        "name: cannot be resolved: the environment variable 'RFTDASK_TEST_NOT_SET' is not set",
        "project: required, and given as ???",
    ]


def test_a_missing_file_is_reported() -> None:
    assert problems("nowhere.yaml", "seed=1") == ["file nowhere.yaml does not exist"]
    folder = str(Path(__file__).parent)
    assert problems(folder) == [f"{folder} is not a file; give the YAML file of a configuration"]


def test_null_means_unset() -> None:
    assert config(grpo(explorer=None, log={"level": None}, stages=None)) == config(grpo())


@pytest.mark.parametrize("path", ["explorer.max_commit_delay_s", "explorer.sandbox.max_memory_gb"])
def test_null_overrides_a_default_that_is_not_null(path: str) -> None:
    loaded = config(grpo(), f"{path}=null")
    *sections, key = path.split(".")
    assert getattr(functools.reduce(getattr, sections, loaded), key) is None
    assert load_config(plain(loaded)) == loaded, "as it is written to the run folder"


def test_absent_keys_are_filled_from_those_they_depend_on() -> None:
    loaded = config(
        grpo(),
        "synchronizer.sync_interval=3",
        "algorithm.optimizer.clip_grad=0.5",
        "model.temperature=0.7",
        "buffer.explorer_input.default_workflow_type=math_workflow",
        "buffer.explorer_input.default_reward_fn_type=math_reward",
        "buffer.explorer_input.eval_tasksets=[{path: e, rollout_args: {temperature: 0}}]",
        "buffer.explorer_input.default_eval_workflow_type=grid_workflow",
    )
    assert (loaded.algorithm.repeat_times, loaded.buffer.train_batch_size) == (8, 32)
    assert (loaded.model.max_prompt_tokens, loaded.model.max_response_tokens) == (32, 32)
    assert (loaded.synchronizer.explorer_sync_interval, loaded.synchronizer.trainer_sync_interval) == (3, 3)
    assert loaded.trainer.grad_clip == 0.5
    taskset, evaluation = loaded.buffer.explorer_input.taskset, loaded.buffer.explorer_input.eval_tasksets[0]
    assert taskset is not None
    assert (taskset.name, taskset.repeat_times, taskset.default_workflow_type) == ("taskset_0", 8, "math_workflow")
    assert (taskset.rollout_args.temperature, taskset.rollout_args.max_tokens) == (0.7, 32)
    assert (evaluation.name, evaluation.repeat_times) == ("eval_taskset_0", 1)
    assert evaluation.default_workflow_type == "grid_workflow"
    assert evaluation.default_reward_fn_type == "math_reward"
    assert evaluation.rollout_args.temperature == 0
    assert loaded.buffer.trainer_input.experience_buffer.storage_type == "queue"


@pytest.mark.parametrize(
    ("key", "last"),
    [
        ("seed", 2**63 - 1),
        ("explorer.rollout_model.seed", 2**63 - 1),
        ("buffer.explorer_input.taskset.data_selector.seed", 2**63 - 1),
        ("model.tinker.seed", 2**31 - 1),
        ("explorer.max_timeout", 10**9),  # threading.TIMEOUT_MAX is 9.2e9
        ("explorer.max_commit_delay_s", 10**9),
    ],
)
def test_a_number_has_the_bound_of_its_use(key: str, last: int) -> None:
    config(grpo(), f"{key}={last}")
    [problem] = problems(grpo(), f"{key}={last + 1}")
    assert problem.startswith(f"{key}: ") and str(last + 1) in problem


def test_samplers_use_the_seed_of_the_run_by_default() -> None:
    source = ("buffer.explorer_input.eval_tasksets=[{path: e}]", "explorer.auxiliary_models=[{model_path: judge}]")

    def seeds(loaded: Config) -> list[int]:
        explorer, buffer = loaded.explorer, loaded.buffer
        source, buffers = buffer.explorer_input, buffer.trainer_input
        selectors = [taskset.data_selector for taskset in (*source.train_tasksets, *source.eval_tasksets)]
        selectors += [each.data_selector for each in (buffers.experience_buffer, *buffers.auxiliary_buffers.values())]
        return [each.seed for each in (explorer.rollout_model, *explorer.auxiliary_models, *selectors)]

    assert seeds(config(grpo(), *source)) == 5 * [42]
    assert seeds(config(grpo(), *source, "seed=7")) == 5 * [7]
    assert seeds(config(sft(), "seed=7")) == 2 * [7]
    named = ("explorer.rollout_model.seed=1", "buffer.explorer_input.taskset.data_selector.seed=0")
    assert seeds(config(grpo(), *source, "seed=7", *named)) == [1, 7, 0, 7, 7]
    assert seeds(load_config(config(grpo(), *source, "seed=7", *named).to_dict())) == [1, 7, 0, 7, 7]
    for stage in config(grpo(stages=[{"stage_name": "one"}]), "seed=7").stage_configs():
        assert seeds(stage) == 3 * [7]


@pytest.mark.parametrize(
    ("given_keys", "filled"),
    [
        ({"max_prompt_tokens": 10, "max_response_tokens": 20}, (30, 10, 20)),
        ({"max_model_len": 30, "max_prompt_tokens": 10}, (30, 10, 20)),
        ({"max_model_len": 30, "max_response_tokens": 20}, (30, 10, 20)),
        ({"max_model_len": 31}, (31, 15, 16)),
        ({"max_model_len": 40, "max_prompt_tokens": 10, "max_response_tokens": 20}, (40, 10, 20)),
    ],
)
def test_lengths_complete_each_other(given_keys: dict[str, int], filled: tuple[int, int, int]) -> None:
    model = config(grpo(model={"model_path": "m", **given_keys})).model
    assert (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens) == filled


def test_a_train_batch_of_zero_means_one_explore_step() -> None:
    assert config(grpo(), "buffer.train_batch_size=0").buffer.train_batch_size == 32


def test_sft_batches_rows_not_groups() -> None:
    loaded = config(sft())
    assert (loaded.algorithm.repeat_times, loaded.buffer.train_batch_size) == (1, 4)
    assert loaded.buffer.trainer_input.experience_buffer.storage_type == "file"


def test_the_bound_of_staleness_control_is_the_bound_of_the_run() -> None:
    args = ("algorithm.sample_strategy=staleness_control", "algorithm.sample_strategy_args={max_staleness: 2}")
    assert config(grpo(), *args).synchronizer.max_staleness == 2


@pytest.mark.parametrize(
    ("root", "folder"),
    [
        ("/data/runs", "/data/runs/p/g/n"),
        ("/data/runs/", "/data/runs/p/g/n"),
        ("s3://bucket/runs/", "s3://bucket/runs/p/g/n"),
        ("memory://", "memory://p/g/n"),
        ("file:///data", "file:///data/p/g/n"),
    ],
)
def test_the_folder_of_a_run_joins_root_project_group_and_name(root: str, folder: str) -> None:
    loaded = config(grpo(checkpoint_root_dir=root, project="p", group="g", name="n"))
    assert loaded.checkpoint_job_dir == folder


def test_the_run_folder_is_absolute_without_empty_parts() -> None:
    assert config(grpo()).checkpoint_job_dir == str(Path.cwd() / "runs" / "rftdask" / "rft")


def test_a_config_cannot_be_changed() -> None:
    loaded = config(grpo(), "monitor={monitor_type: wandb, monitor_args: {a: {b: [1]}}}")
    with pytest.raises(ValueError, match="frozen"):
        loaded.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot be changed"):
        loaded.monitor.monitor_args["a"] = 2
    with pytest.raises(TypeError, match="cannot be changed"):
        loaded.monitor.monitor_args["a"].update(b=2)
    with pytest.raises(TypeError, match="cannot be changed"):
        loaded.monitor.monitor_args |= {"c": 1}  # type: ignore[misc]
    assert loaded.monitor.monitor_args == {"a": {"b": (1,)}}


def test_a_config_pickles_with_its_warnings_and_stages() -> None:
    loaded = config(grpo(stages=[{"stage_name": "one"}, {"stage_name": "two"}]), "explorer.runner_per_model=4")
    copy = pickle.loads(pickle.dumps(loaded))
    assert copy == loaded
    assert copy.warnings == loaded.warnings != ()
    assert copy.stage_configs() == loaded.stage_configs()


def test_replacing_keys_checks_the_result() -> None:
    loaded = config(grpo())
    changed = replace(loaded, {"model.model_path": "other", "explorer.rollout_model.engine_num": 2})
    assert (changed.model.model_path, changed.explorer.rollout_model.engine_num) == ("other", 2)
    assert loaded.model.model_path == "tiny"
    with pytest.raises(ConfigError, match=r"buffer\.batch_size: 0 is too small"):
        replace(loaded, {"buffer.batch_size": 0})


def test_to_dict_is_plain_json_without_derived_values() -> None:
    tree = config(grpo()).to_dict()
    assert json.loads(json.dumps(tree)) == tree
    assert "checkpoint_job_dir" not in tree
    assert "api_key" not in tree["explorer"]["rollout_model"]
    assert "total_gpu_num" not in tree["cluster"]
    assert "warmup_style" not in tree["algorithm"]["optimizer"]
    assert tree["algorithm"]["repeat_times"] == 8


def test_loading_a_written_config_gives_no_new_warnings() -> None:
    loaded = config(grpo(), "synchronizer.sync_interval=7", "buffer.total_steps=5")
    assert load_config(loaded.to_dict()).warnings == loaded.warnings == ()


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20) | st.sampled_from(
    [
        "1e-6",
        "null",
        "true",
        "0x10",
        "${a.b}",
        "\\${a}",
        "\\\\${a",
        "{{ m['role'] }}",
        "a: b",
        "- x",
        "2020-01-01",
        "???x",
        "'",
        '"',
        "%",
        "~",
    ]
)
FREE = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}x", fullmatch=True),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
        lambda x: st.lists(x, max_size=3),
        max_leaves=4,
    ),
    max_size=3,
)


@st.composite
def configurations(draw: st.DrawFn) -> dict:
    tree = grpo(
        seed=draw(st.integers(0, 2**40)),
        algorithm={
            "repeat_times": draw(st.none() | st.integers(2, 8)),
            "optimizer": {"lr": draw(st.floats(0, 1)), "clip_grad": draw(st.none() | st.floats(0, 9))},
            "policy_loss_fn": "plugin.Loss",  # of which nothing is known here, so that it takes any arguments
            "policy_loss_fn_args": draw(st.none() | FREE),
        },
        synchronizer={
            "sync_style": draw(st.sampled_from(["fixed", "explorer_driven", "trainer_driven", "fully_async"])),
            "sync_interval": draw(st.integers(1, 9)),
            "explorer_sync_interval": draw(st.none() | st.integers(1, 9)),
        },
        monitor={"monitor_type": "wandb", "monitor_args": draw(FREE)},
    )
    tree["model"]["custom_chat_template"] = draw(st.none() | TEXT)
    tree["buffer"]["explorer_input"]["taskset"]["workflow_args"] = draw(FREE)
    if draw(st.booleans()):
        tree["stages"] = [
            {"stage_name": "a", "algorithm": {"repeat_times": draw(st.integers(2, 4))}},
            {"stage_name": "b", "trainer": {"total_steps": draw(st.none() | st.integers(1, 9))}},
        ]
    return escaped(tree)


def escaped(value):
    """Literal texts, as a user writes them: "${" with a backslash before it, and each backslash before that doubled."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if isinstance(value, str) and "${" in value:
        head, _, tail = value.partition("${")
        slashes = len(head) - len(head.rstrip("\\"))
        return head + "\\" * slashes + "\\${" + tail
    return value


@settings(max_examples=20)  # each writes and reads the whole file
@given(configurations())
def test_a_written_config_loads_as_the_same_config(source: dict) -> None:
    loaded = load_config(source)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(loaded.to_yaml(), encoding="utf-8")
        from_yaml = load_config(file)
    assert from_yaml == loaded == load_config(loaded.to_dict())
    assert from_yaml.stage_configs() == loaded.stage_configs()
    assert from_yaml.to_yaml() == loaded.to_yaml()


@pytest.mark.parametrize("text", ["${a}", "\\${a}", "\\\\${a}", "x\\\\\\${a} ${b} \\", "$${a", "\\", "{{ '${' }}"])
def test_a_text_that_looks_like_an_interpolation_survives(tmp_path: Path, text: str) -> None:
    literal = replace(config(grpo()), {"model.custom_chat_template": text})
    assert literal.model.custom_chat_template == text
    (tmp_path / "run.yaml").write_text(literal.to_yaml())
    assert load_config(tmp_path / "run.yaml") == literal == load_config(literal.to_dict())


def test_loading_changes_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = config(grpo(continue_from_checkpoint=False))
    assert loaded.name == "rft"
    assert list(tmp_path.iterdir()) == []


def test_configuration_needs_neither_torch_nor_dask() -> None:
    code = (
        "import sys; from rftdask.config import load_config, make_plan; "
        "make_plan(load_config({'model': {'model_path': 'm', 'max_model_len': 8}, 'mode': 'train'})).render(); "
        "print([name for name in ('torch', 'transformers', 'dask', 'distributed', 'numpy', 'pyarrow') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_frozen_dict_is_still_a_dict() -> None:
    frozen = FrozenDict({"a": 1})
    assert frozen == {"a": 1} and isinstance(frozen, dict)
    assert {**frozen, "b": 2} == {"a": 1, "b": 2}


def test_a_config_differs_from_other_things() -> None:
    assert config(grpo()) != config(grpo(), "seed=1")
    assert config(grpo()) != "a config"
    assert isinstance(config(grpo()), Config)
