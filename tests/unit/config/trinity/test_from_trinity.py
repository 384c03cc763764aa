"""Promises about configuration files of Trinity-RFT. `python tests/unit/config/trinity/test_from_trinity.py >
docs/trinity-keys.md` writes the page again.
"""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from rftdask.config import Config, load_config
from rftdask.config.base import Aliases, Computed, Later, default_of, marks_of, plain
from rftdask.config.check import walk
from rftdask.config.schema.algorithm import registered_parts
from rftdask.config.schema.buffer import registered_rewards, registered_workflows
from rftdask.config.trinity.reference_defaults import _AUXILIARY, DEFAULTS
from rftdask.config.trinity.reference_keys import REFERENCE_NAMES, Derived, Ignored, Missing, Renamed, Secret
from rftdask.config.trinity.translate import MEGATRON, NEEDLESS, OF_THE_POLICY, REFUSED, VERL
from rftdask.errors import ConfigError

ROOT = Path(__file__).parents[4]
REFERENCE: dict[str, Any] = json.loads(Path(__file__).with_name("trinity_keys.json").read_text())
SHOWN_BY: dict[str, str] = json.loads(Path(__file__).with_name("trinity_key_tests.json").read_text())
"""Key -> the test that shows its effect, as path::name."""
KEYS = dict(walk(Config))
ALL_DEFAULTS = {**DEFAULTS} | {f"explorer.auxiliary_models[].{key}": value for key, value in _AUXILIARY.items()}
SAME_AS = {
    "buffer.explorer_input.tasksets[].": "buffer.explorer_input.taskset.",
    "buffer.explorer_input.eval_tasksets[].": "buffer.explorer_input.taskset.",
    "buffer.trainer_input.auxiliary_buffers.<name>.": "buffer.trainer_input.experience_buffer.",
    "explorer.auxiliary_models[].": "explorer.rollout_model.",
}
"""Sections that stand in several places, with the place under which the page lists their keys."""
_BUFFER = "buffer.trainer_input.experience_buffer"
TOLD = {
    "explorer.listen_address": "effective; absent: `127.0.0.1`, which only this machine reaches",
    "explorer.proxy_port": "effective; absent: `8000`",
    "checkpoint_job_dir": "computed; refused when it is set",
    "checkpoint_root_dir": "effective; absent or empty: the working folder with `--from trinity`, else `./runs`",
    f"{_BUFFER}.capacity": "effective, in experiences; with `--from trinity` a given one is multiplied by "
    "`batch_size` x `repeat_times`, since it counts explore steps there. Absent: no limit, as 10000 steps there",
    f"{_BUFFER}.name": "effective, in messages",
    f"{_BUFFER}.replay_buffer.priority_fn_args": "effective; the same decay is the function's own default",
    "buffer.explorer_input.taskset.repeat_times": "effective for evaluation; a training taskset has "
    "`algorithm.repeat_times`, as there",
    "buffer.explorer_input.taskset.rollout_args.top_k": "effective; absent: -1 with `--from trinity`, "
    "else `model.top_k`",
    "data_processor.experience_pipeline.operators": "effective",
    "synchronizer.sync_method": "effective; `nccl` is a process group of gloo; absent: `auto`, whose choice "
    "`rftdask validate` shows; `offline` is taken as `checkpoint`; `online` is taken as `nccl`",
    "model.critic_model_path": "effective; absent or empty: `model.model_path`",
    "model.model_path": "effective, required",
    "monitor.monitor_args": "effective; keys and passwords are not taken from a file, the error names the "
    "variable of each; `uri` of MLflow is `tracking_uri`",
    "stages[].stage_name": "effective, required",
    "trainer.trainer_config": "read key by key, see below",
    **{f"explorer.rollout_model.{key}": f"taken as `model.{ours}`" for key, ours in OF_THE_POLICY.items()},
    **{f"trainer.megatron.{key}": f"taken as `{ours}`" for key, ours in MEGATRON.items()},
    "trainer.megatron.expert_model_parallel_size": "effective where it is `tensor_model_parallel_size`, or that is 1: "
    "experts go to the ranks that cut layers; else refused",
}


ELSEWHERE = {
    **{
        f"buffer.explorer_input.taskset.format.{key}": "without effect on tasks, warned of; see the experience buffer's"
        for key in ("chosen_key", "rejected_key", "enable_concatenated_multi_turn")
    },
    **{
        f"{_BUFFER}.format.{key}": "without effect on rows to learn from, warned of; see the taskset's"
        for key in ("workflow_key", "reward_fn_key")
    },
    **{
        f"{_BUFFER}.format.{key}": "refused: only tasks may have images and videos"
        for key in ("image_key", "video_key")
    },
    f"{_BUFFER}.data_selector.feature_keys": "without effect on rows to learn from, warned of; see the taskset's",
    f"{_BUFFER}.data_selector.kwargs": "refused: the orders of rows to learn from, sequential and shuffle, take none",
}
"""Keys of sections that stand in several places, where nothing reads them."""


def state(path: str, there: Any) -> str:
    """Return the treatment of a key of the reference; "" if none is documented."""
    base = next((path.replace(long, short) for long, short in SAME_AS.items() if path.startswith(long)), path)
    if path in TOLD or base in ELSEWHERE:
        return TOLD.get(path) or ELSEWHERE[base]
    key = KEYS.get(path)
    match key:
        case Ignored():
            return f"without effect, warned of: {key.reason}"
        case Missing():
            other = "".join(f", `{value}`" for value in key.allowed if value)
            return f"refused unless `{plain_text(key.default)}`{other}: not available ({key.feature})"
        case Derived():
            return "computed; refused when it is set"
        case Secret():
            return f"refused: {key.instead}"
        case Renamed():
            return f"old name of `{key.to}`"
        case FieldInfo():
            return "; ".join(said_of(path, key, there))
    return ""


def said_of(path: str, key: FieldInfo, there: Any) -> list[str]:
    ours, marks = plain(default_of(key)), marks_of(key)
    said = ["effective"]
    aliases = {old: new for mark in marks if isinstance(mark, Aliases) for old, new in mark.values.items()}
    later = [value for mark in marks if isinstance(mark, Later) for value in mark.values]
    if path in ALL_DEFAULTS:
        assert ALL_DEFAULTS[path] == there, path
        rule = next((mark.rule for mark in marks if isinstance(mark, Computed)), plain_text(ours))
        said.append(f"absent: `{there}` with `--from trinity`, else {rule}")
    elif filled := [mark.rule for mark in marks if isinstance(mark, Computed)]:
        said.append(f"absent: {filled[0]}")
    elif there != ours and not (isinstance(there, str) and aliases.get(there) == ours) and (there, ours) != (None, {}):
        base = next((path.replace(long, short) for long, short in SAME_AS.items() if path.startswith(long)), path)
        return [TOLD[base]] if base in TOLD else []
    said += [f"`{old}` is taken as `{new}`" for old, new in sorted(aliases.items()) if "_verl" not in old]
    said += [f"not available: {', '.join(f'`{value}`' for value in later)}"] if later else []
    return said


def shown_by(path: str, told: str) -> str:
    """The test of a key in this state; "" where nobody has named one."""
    refusals = {
        "without effect": "check_keys.py::test_an_ignored_key_is_warned_about_once_with_the_reason",
        "refused unless": "check_keys.py::test_a_key_whose_feature_is_missing_is_refused_when_set",
        "refused: ": "load_messages.py::test_secrets_are_refused_and_never_shown",
        "computed": "check_keys.py::test_a_derived_key_cannot_be_set",
    }
    base = path.replace("eval_tasksets[].", "taskset.").replace("tasksets[].", "taskset.")
    found = next((f"tests/unit/config/test_{test}" for text, test in refusals.items() if told.startswith(text)), "")
    return SHOWN_BY.get(path) or SHOWN_BY.get(base) or found


def listed_keys() -> dict[str, tuple[Any, str]]:
    """(default there, state) of each key that the page lists: of sections that stand in several places the keys of one,
    and what is otherwise in another."""
    listed = {}
    for path, there in REFERENCE["keys"].items():
        told = state(path, there)
        base = next((path.replace(long, short) for long, short in SAME_AS.items() if path.startswith(long)), path)
        if base == path or state(base, REFERENCE["keys"].get(base)) != told:
            listed[path] = there, told
    return listed


def plain_text(value: Any) -> str:
    return json.dumps(value).strip('"')


def page() -> str:
    lines = [
        "# Keys of Trinity-RFT",
        "",
        "Every key of its configuration and its treatment here. The keys are read from",
        f"{REFERENCE['source']}.",
        "Keys of a taskset hold for `tasksets[]` and `eval_tasksets[]`, those of the experience buffer for auxiliary",
        "buffers, those of the policy's engine for auxiliary models, unless the table differs. How to bring a",
        "file: [from-trinity.md](from-trinity.md).",
        "A test writes this page: tests/unit/config/trinity/test_from_trinity.py.",
        "",
        "The last column names a test that shows it; for an effective key the test fails if the key is ignored.",
        "",
        "| key | default there | here | shown by |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{path}` | `{plain_text(there)}` | {told.replace('|', '/')} | {shown_by(path, told).replace('::', ' `')}` |"
        for path, (there, told) in listed_keys().items()
    ]
    lines += ["", "## veRL's keys, below `trainer.trainer_config`", "", "| key | here |", "|---|---|"]
    lines += [f"| `{key}` | taken as `{ours}` |" for key, ours in VERL.items()]
    lines += [f"| `{key}` | without effect, warned of: {why} |" for key, why in NEEDLESS.items()]
    lines += [f"| `{key.removeprefix('trainer_config.')}` | as below `trainer.megatron` |" for key in REFUSED]
    lines += [
        "| any other | without effect, warned of |",
        "",
        "## Names that are not here",
        "",
        "| name | why |",
        "|---|---|",
    ]
    lines += [f"| {kind} `{name}` | {why} |" for kind, names in REFERENCE_NAMES.items() for name, why in names.items()]
    return "\n".join(lines) + "\n"


def test_every_leaf_of_the_reference_has_a_state() -> None:
    assert len(REFERENCE["keys"]) > 500
    assert [path for path, there in REFERENCE["keys"].items() if not state(path, there)] == []


@cache
def names_in(file: str) -> set[str]:
    return {n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_key_names_a_test_that_exists() -> None:
    named = {path: shown_by(path, told) for path, (_, told) in listed_keys().items()}
    assert [path for path, test in named.items() if not test] == []
    for test in set(named.values()):
        file, _, name = test.partition("::")
        assert name in names_in(file), test
    assert sorted(SHOWN_BY.keys() - named.keys()) == []


def test_the_page_of_keys_is_of_today() -> None:
    told = "stale; write it again: python tests/unit/config/trinity/test_from_trinity.py > docs/trinity-keys.md"
    assert (ROOT / "docs/trinity-keys.md").read_text() == page(), told


NAMES = {
    "workflow": "simple_workflow async_simple_workflow math_workflow async_math_workflow math_boxed_workflow "
    "async_math_boxed_workflow math_eval_workflow async_math_eval_workflow math_rm_workflow async_math_rm_workflow "
    "tool_call_workflow agentscope_workflow_adapter agentscope_workflow_adapter_v1 agentscope_react_workflow "
    "agentscope_react_math_workflow as_react_workflow agentscopev0_react_math_workflow "
    "agentscope_v1_react_search_workflow email_search_workflow alfworld_workflow RAFT_alfworld_workflow "
    "RAFT_reflect_alfworld_workflow frozen_lake_workflow sciworld_workflow webshop_workflow intercode_sql_workflow "
    "step_wise_alfworld_workflow async_math_ruler_workflow math_ruler_workflow math_trainable_ruler_workflow "
    "rubric_judge_workflow rubric_judge_openai_workflow simple_mm_workflow async_simple_mm_workflow "
    "on_policy_distill_workflow on_policy_distill_math_workflow sudoku_workflow",
    "reward function": "math_reward math_boxed_reward format_reward countdown_reward accuracy_reward math_dapo_reward",
    "operator": "reward_filter reward_std_filter dapo_dynamic_sampling mask_response_truncated reward_shaping_mapper "
    "pass_rate_calculator data_juicer invalid_reward_filter",
    "selector": "sequential shuffle random offline_easy2hard difficulty_based",
}
"""Its registered names, of the kinds that a file gives most."""


@pytest.mark.parametrize("kind", NAMES)
def test_each_reference_name_exists_or_is_refused(kind: str) -> None:
    here = {
        "workflow": registered_workflows(),
        "reward function": registered_rewards(),
        "operator": registered_parts("operator"),
        "selector": registered_parts("selector"),
    }[kind]
    assert [n for n in NAMES[kind].split() if n not in here and n not in REFERENCE_NAMES.get(kind, {})] == []


def tree(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8},
        "buffer": {"total_steps": 4, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        **sections,
    }


def test_from_trinity_applies_and_reports_reference_defaults() -> None:
    ours, theirs = load_config(tree()), load_config(tree(), origin="trinity")
    assert (ours.algorithm.algorithm_type, ours.algorithm.repeat_times, ours.origin) == ("grpo", 8, "")
    assert (theirs.algorithm.algorithm_type, theirs.algorithm.repeat_times) == ("ppo", 1)
    assert (theirs.explorer.rollout_model.engine_type, theirs.explorer.rollout_model.dtype) == ("vllm", "bfloat16")
    assert theirs.checkpoint_job_dir == str(Path.cwd() / "Trinity-RFT/rft")
    assert theirs.origin == "Trinity-RFT (--from trinity)"
    told = [line.partition(":")[0] for line in theirs.reference_defaults]
    assert told == sorted(DEFAULTS)
    assert (
        "algorithm.repeat_times: 1, as in Trinity-RFT; the default here is the algorithm's default"
        in theirs.reference_defaults
    )


def test_a_reference_key_selects_the_reference_defaults() -> None:
    source = tree(explorer={"runner_per_model": 4})
    assert load_config(source).origin == "Trinity-RFT (it has explorer.runner_per_model)"
    assert load_config(source).algorithm.algorithm_type == "ppo"
    assert load_config(source, origin="rftdask").algorithm.algorithm_type == "grpo"
    assert load_config(tree(stages=[{"stage_name": "s", "explorer": {"runner_num": 1}}])).origin
    with pytest.raises(ConfigError, match="--from verl: use rftdask or trinity"):
        load_config(source, origin="verl")


def test_values_in_the_file_win_over_reference_defaults() -> None:
    sections = {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "trainer": {"trainer_config": {"actor_rollout_ref": {"model": {"enable_gradient_checkpointing": False}}}},
        "explorer": {"rollout_model": {"engine_type": "vllm_async"}},
    }
    loaded = load_config(tree(**sections), origin="trinity")
    assert (loaded.algorithm.algorithm_type, loaded.algorithm.repeat_times) == ("grpo", 4)
    assert not loaded.trainer.gradient_checkpointing
    assert [line for line in loaded.reference_defaults if "algorithm_type" in line or "engine_type" in line] == []


def test_a_run_that_goes_on_from_its_own_file_means_the_same() -> None:
    stage = {"stage_name": "s", "explorer": {"auxiliary_models": [{"model_path": "j"}], "runner_num": 1}}
    first = load_config(tree(stages=[stage]), origin="trinity")
    again = load_config(first.to_dict(), was_checked=True)
    assert again == first
    [model] = again.stage_configs()[0].explorer.auxiliary_models
    assert model.engine_type == "vllm"


def test_training_tasksets_use_repeat_times_of_the_algorithm() -> None:
    source = tree(algorithm={"algorithm_type": "grpo", "repeat_times": 4}, model={**tree()["model"], "top_k": 20})
    source["buffer"]["explorer_input"]["taskset"]["repeat_times"] = 1
    loaded = load_config(source, origin="trinity")
    taskset = loaded.buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.repeat_times, taskset.rollout_args.top_k) == (4, -1)
    assert "buffer.explorer_input.taskset.repeat_times: not taken: algorithm.repeat_times 4 decides" in loaded.warnings


def test_the_capacity_of_a_buffer_counts_steps_there() -> None:
    source = tree(algorithm={"algorithm_type": "grpo", "repeat_times": 4})
    source["buffer"] |= {
        "batch_size": 3,
        "trainer_input": {"experience_buffer": {"capacity": 10, "storage_type": "file"}},
    }
    buffer = load_config(source, origin="trinity").buffer.trainer_input.experience_buffer
    assert (buffer.capacity, buffer.storage_type) == (120, "queue")


def test_auxiliary_models_have_engines_and_teachers_none() -> None:
    models = {"auxiliary_models": [{"model_path": "j"}, {"model_path": "far", "engine_type": "external"}]}
    loaded = load_config(tree(explorer=models), origin="trinity")
    assert [model.asked_name for model in loaded.models_apart] == ["j"]
    assert [(model.engine_num, model.gpu_memory_utilization) for model in loaded.models_apart] == [(1, 0.9)]
    engine_num = "explorer.auxiliary_models[0].engine_num: 1, as in Trinity-RFT"
    assert any(line.startswith(engine_num) for line in loaded.reference_defaults)
    assert not any("[1].engine_num" in line for line in (*loaded.reference_defaults, *loaded.warnings))
    taught = tree(
        explorer={"auxiliary_models": [{"model_path": "t"}]}, algorithm={"algorithm_type": "on_policy_distill"}
    )
    assert not any("engine_num" in line for line in load_config(taught, origin="trinity").warnings)


def test_engines_on_one_gpu_get_shares_of_it() -> None:
    judge = {"model_path": "j", "enable_thinking": False, "max_model_len": 20, "engine_num": 0}
    judge |= {"max_prompt_tokens": 16, "max_response_tokens": 8}
    loaded = load_config(tree(explorer={"auxiliary_models": [judge]}), origin="trinity")
    [model] = loaded.explorer.auxiliary_models
    assert (model.enable_thinking, model.max_prompt_tokens) == (False, 12)
    assert (model.gpu_memory_utilization, loaded.explorer.rollout_model.gpu_memory_utilization) == (0.47, 0.47)


def test_a_key_of_a_monitor_is_never_written_down() -> None:
    monitor = {"monitor_type": "wandb", "monitor_args": {"api_key": "0123456789abcdef", "base_url": "http://x"}}
    loaded = load_config(tree(monitor=monitor), origin="trinity")
    assert "0123456789abcdef" not in loaded.to_yaml() + "".join((*loaded.warnings, *loaded.changes))
    assert any("set WANDB_API_KEY instead" in line for line in loaded.warnings)


def test_changes_list_keys_that_were_read_differently() -> None:
    loaded = load_config(tree(explorer={"runner_per_model": 4}, synchronizer={"sync_method": "online"}))
    assert "- explorer.runner_per_model: 4" in loaded.changes
    assert {"- synchronizer.sync_method: online", "+ synchronizer.sync_method: nccl"} <= set(loaded.changes)
    assert "+ explorer.rollout_model.engine_type: vllm" in loaded.changes
    assert load_config(tree()).changes == ()


def test_an_unavailable_workflow_is_refused_with_the_reason() -> None:
    source = tree()
    source["buffer"]["explorer_input"]["default_workflow_type"] = "webshop_workflow"
    with pytest.raises(
        ConfigError, match="'webshop_workflow' of Trinity-RFT is not available: it needs the package web_agent_site"
    ):
        load_config(source)


if __name__ == "__main__":
    print(page(), end="")
