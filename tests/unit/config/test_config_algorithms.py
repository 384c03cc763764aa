"""Promises about the requirements of an algorithm: a missing key and an incompatible combination are reported before
anything starts.
"""

from typing import Any, get_args

import pytest
from config_cases import config, grpo, problems, sft

from rftdask.config import check_plugins, fill_from_environment, load_config, make_plan, replace
from rftdask.config.schema.algorithm import AlgorithmConfig, registered_parts
from rftdask.config.schema.optimizer import SCHEDULES, OptimizerConfig
from rftdask.errors import ConfigError

SHOWN = {"trainer_input": {"auxiliary_buffers": {"sft_dataset": {"path": "shown.jsonl"}}}}


def mix(args: dict[str, Any] | None = None, **buffer: Any) -> dict[str, Any]:
    tree = grpo(algorithm={"algorithm_type": "mix", "sample_strategy_args": args})
    tree["buffer"] = {**tree["buffer"], **SHOWN, **buffer}
    return tree


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("batch_size", [1, 3, 56])
def test_a_mixed_batch_holds_the_rollouts_of_an_explore_step(ratio: float, batch_size: int) -> None:
    loaded = config(mix({"expert_data_ratio": ratio}, batch_size=batch_size))
    assert loaded.algorithm.sample_strategy == "mix"
    assert loaded.num_own_rollouts == 8 * batch_size
    assert loaded.num_demonstrations == pytest.approx(ratio * loaded.buffer.train_batch_size, abs=1.0)
    assert f" experiences = {batch_size} groups\n" in make_plan(loaded).render()


def test_a_mixed_batch_must_not_split_groups() -> None:
    (line,) = problems(mix({"expert_data_ratio": 0.5}, train_batch_size=20))
    assert "20 - 10 demonstrations (expert_data_ratio 0.5) = 10 rollouts, not a multiple" in line


def test_a_mixture_needs_its_demonstrations() -> None:
    (line,) = problems(grpo(algorithm={"algorithm_type": "mix"}))
    assert line.startswith("buffer.trainer_input.auxiliary_buffers.sft_dataset.path: required for mix")
    (line,) = problems(mix({"sft_dataset_name": "other"}))
    assert line.startswith("buffer.trainer_input.auxiliary_buffers.other.path: required")
    (line,) = problems(mix(trainer_input={"auxiliary_buffers": {"shown": {}}}))
    assert line.startswith("buffer.trainer_input.auxiliary_buffers.shown.path: required")
    (line,) = problems(mix({"expert_data_ratio": 1.0}))
    assert "1.0 is not a number in [0, 1)" in line
    (line,) = problems(mix({"ratio": 0.5}))
    assert "takes max_staleness, expert_data_ratio, sft_dataset_name" in line


@pytest.mark.parametrize(
    ("buffers", "found"),
    [(["shown"], "shown"), (["shown", "more"], "shown"), (["more", "sft_dataset"], "sft_dataset")],
)
def test_demonstrations_are_found_without_being_named(buffers: list[str], found: str) -> None:
    shown = {"auxiliary_buffers": {name: {"path": f"{name}.jsonl"} for name in buffers}}
    assert config(mix(trainer_input=shown)).demonstrations == found
    assert config(mix({"sft_dataset_name": buffers[-1]}, trainer_input=shown)).demonstrations == buffers[-1]


@pytest.mark.parametrize("name", sorted(registered_parts("algorithm_type")))
def test_an_algorithm_needs_its_name_and_one_input_key(name: str) -> None:
    tree = sft() if AlgorithmConfig(algorithm_type=name).schema_type != "experience" else grpo()
    tree["algorithm"] = {"algorithm_type": name}
    inputs = {
        "mix": {"buffer.trainer_input.auxiliary_buffers.sft_dataset.path": "shown.jsonl"},
        "sft": {"buffer.trainer_input.experience_buffer.path": "rows.jsonl"},
        "jsd": {"explorer.auxiliary_models": "[{model_path: teacher}]"},
    }
    inputs |= {
        "mix_chord": inputs["mix"],
        "on_policy_distill": inputs["jsd"],
        **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "reward_model", "cpt"), inputs["sft"]),
    }
    if AlgorithmConfig(algorithm_type=name).schema_type != "experience":
        del tree["buffer"]["trainer_input"]
    overrides = [f"{key}={value}" for key, value in inputs.get(name, {}).items()]
    for key in inputs.get(name, {}):
        (line,) = problems(tree)
        assert line.startswith(f"{key}: required for {name}: ")
    loaded = config(tree, *overrides)
    assert (loaded.algorithm.algorithm_type, loaded.warnings) == (name, ())


def test_a_sample_strategy_goes_with_its_algorithms() -> None:
    (line,) = problems(
        grpo(algorithm={"sample_strategy": "mix"}), "buffer.trainer_input.auxiliary_buffers.sft_dataset.path=x"
    )
    assert "mix does not go with grpo" in line
    (line,) = problems(mix(), "algorithm.sample_strategy=default")
    assert "default does not go with mix" in line


def test_a_student_learns_from_rollouts_and_a_dataset() -> None:
    """GKD's mix: lambda is 1 - expert_data_ratio."""
    teacher, shown = "explorer.auxiliary_models=[{model_path: t}]", "buffer.trainer_input.auxiliary_buffers.d.path=x"
    mixed = {"algorithm_type": "jsd", "repeat_times": 1, "sample_strategy": "mix"}
    mixed["sample_strategy_args"] = {"expert_data_ratio": 0.25}
    loaded = config(grpo(algorithm=mixed), teacher, shown, "buffer.batch_size=6")
    assert (loaded.num_own_rollouts, loaded.num_demonstrations) == (6, 2)
    (line,) = problems(grpo(algorithm=mixed), teacher)
    assert line.startswith("buffer.trainer_input.auxiliary_buffers.sft_dataset.path: required for jsd")
    # A loss that weighs rows by their advantage depends on their origin.
    (line,) = problems(grpo(algorithm={**mixed, "algorithm_type": "on_policy_distill"}), teacher, shown)
    assert "mix does not go with on_policy_distill" in line


def test_the_bound_of_a_mixture_is_the_bound_of_the_run() -> None:
    assert config(mix({"max_staleness": 3})).synchronizer.max_staleness == 3


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_a_student_needs_a_teacher(name: str) -> None:
    tree = grpo(algorithm={"algorithm_type": name})
    (line,) = problems(tree)
    key = "explorer.auxiliary_models"
    assert line == f"{key}: required for {name}: a teacher with the policy's vocabulary; give [{{model_path: ...}}]"
    assert "with the teacher big" in make_plan(config(tree, f"{key}=[{{model_path: big}}]")).render()


def teachers(*models: dict[str, Any], **buffer: Any) -> dict[str, Any]:
    tasksets = [{"name": name, "path": f"{name}.jsonl"} for name in ("math", "code")]
    tree = grpo(algorithm={"algorithm_type": "jsd"}, explorer={"auxiliary_models": list(models)})
    return {**tree, "buffer": {"batch_size": 4, "explorer_input": {"tasksets": tasksets}, **buffer}}


MATH, CODE, POEMS = ({"model_path": name, "teacher_for": [name]} for name in ("math", "code", "poems"))
REST = {"model_path": "rest"}


@pytest.mark.parametrize("models", [(MATH, CODE), (REST, CODE), (CODE, MATH), (REST,)])
def test_each_taskset_has_its_teacher(models: tuple[dict[str, Any], ...]) -> None:
    loaded = config(teachers(*models))
    found = {name: loaded.explorer.teacher_of(name) for name in ("math", "code")}
    assert found == {
        name: models.index(own if own in models else REST) for name, own in (("math", MATH), ("code", CODE))
    }
    assert (len(models) > 1) == ("with the teachers " in make_plan(loaded).render())


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ((MATH,), "explorer.auxiliary_models: 'code' has no teacher"),
        ((REST, REST), "explorer.auxiliary_models: 2 models have no `teacher_for`"),
        ((MATH, CODE, POEMS), "explorer.auxiliary_models[2].teacher_for: 'poems' is not trained"),
        ((REST, {"teacher_for": ["code"]}), "explorer.auxiliary_models[1].model_path: required: a teacher"),
    ],
)
def test_no_teacher_or_two_teachers_is_an_error(models: tuple[dict[str, Any], ...], problem: str) -> None:
    (line,) = problems(teachers(*models))
    assert line.startswith(problem)


def test_a_taskset_with_two_teachers_is_reported_at_both() -> None:
    lines = problems(teachers(MATH, {**CODE, "teacher_for": ["code", "math"]}))
    assert [line.split(":")[0] for line in lines] == [f"explorer.auxiliary_models[{i}].teacher_for" for i in (0, 1)]


def test_only_tasksets_with_teachers_are_distilled() -> None:
    (line,) = problems(grpo(explorer={"auxiliary_models": [MATH]}))
    assert line == "explorer.auxiliary_models[0].teacher_for: grpo has no teachers; leave it out"
    (line,) = problems(grpo(explorer={"rollout_model": {"teacher_for": ["math"]}}))
    assert line.startswith("explorer.rollout_model.teacher_for: ")


def test_each_auxiliary_model_needs_a_path_and_a_name() -> None:
    (line,) = problems(grpo(explorer={"auxiliary_models": [{"name": "judge"}]}))
    assert line.startswith("explorer.auxiliary_models[0].model_path: required")
    twice = [{"model_path": "a", "name": "judge"}, {"model_path": "b", "name": "judge"}]
    lines = problems(grpo(explorer={"auxiliary_models": twice}))
    assert [line.split(":")[0] for line in lines] == [f"explorer.auxiliary_models[{i}].name" for i in (0, 1)]
    assert len(config(grpo(explorer={"auxiliary_models": twice[:1]})).explorer.auxiliary_models) == 1


@pytest.mark.parametrize(
    ("explorer", "key"),
    [
        ({"over_rollout": {"ratio": 0.25}}, "explorer.over_rollout.ratio"),
        ({"dynamic_timeout": {"enable": True}}, "explorer.dynamic_timeout.enable"),
    ],
)
def test_style_fixed_refuses_time_dependent_settings(explorer: dict[str, Any], key: str) -> None:
    (line,) = problems(grpo(explorer=explorer))
    assert line.startswith(f"{key}: ") and "in sync_style fixed" in line
    assert config(grpo(explorer=explorer), "synchronizer.sync_style=fully_async").explorer


def test_a_critic_that_nothing_trains_is_warned_about() -> None:
    loaded = config(grpo(), "model.critic_model_path=value")
    assert loaded.warnings == ("model.critic_model_path: ignored: grpo has no critic",)
    assert config(grpo(algorithm={"algorithm_type": "ppo"}), "model.critic_model_path=value").warnings == ()


EXPERIENCES = "buffer.trainer_input.experience_buffer"


def test_each_kind_of_log_is_taken_and_a_path_is_for_databases() -> None:
    for kind in ("queue", "file", "sql"):
        assert config(grpo(), f"{EXPERIENCES}.storage_type={kind}").warnings == ()
    (line,) = config(grpo(), f"{EXPERIENCES}.storage_type=file", f"{EXPERIENCES}.path=x").warnings
    assert line == f"{EXPERIENCES}.path: ignored: rollouts are read from the log of the run"
    for key in ("split", "subset_name"):  # of a dataset
        (line,) = config(grpo(), f"{EXPERIENCES}.{key}=hard").warnings
        assert line == f"{EXPERIENCES}.{key}: ignored: rollouts are read from the log of the run"
    (line,) = problems(grpo(), f"{EXPERIENCES}.storage_type=sql", f"{EXPERIENCES}.path=mysql://host/db")
    assert line.startswith(
        f"{EXPERIENCES}.path: 'mysql://host/db' is not a database URL; use postgresql://user@host/name"
    )
    (line,) = problems(grpo(), f"{EXPERIENCES}.storage_type=sql", "checkpoint_root_dir=s3://bucket/runs")
    assert line.startswith(f"{EXPERIENCES}.path: required: a database file cannot lie on remote storage")
    (line,) = problems(sft(), f"{EXPERIENCES}.storage_type=queue")
    assert line == f"{EXPERIENCES}.storage_type: sft learns from a dataset; use file or sql"


def test_an_eval_buffer_needs_an_algorithm_with_a_dataset() -> None:
    held_out = "buffer.trainer_input.eval_buffer"
    loaded = config(sft(), f"{held_out}.path=more.jsonl").buffer.trainer_input.eval_buffer
    assert loaded is not None and (loaded.path, loaded.storage_type) == ("more.jsonl", "file")
    assert problems(sft(), f"{held_out}.split=test") == [f"{held_out}.path: required: the dataset to evaluate on"]
    [line] = problems(sft(), f"{held_out}.path=m", f"{held_out}.storage_type=queue")
    assert line == f"{held_out}.storage_type: queue: it is a dataset; use file or sql"
    [line] = problems(grpo(), f"{held_out}.path=more.jsonl")
    assert line == f"{held_out}: grpo learns from rollouts; use buffer.explorer_input.eval_tasksets"


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@host/db", "postgresql://host/db?user=me&password=hunter2"])
def test_a_password_is_never_in_a_config(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = problems(grpo(), f"{EXPERIENCES}.storage_type=sql", f"{EXPERIENCES}.path={url}")
    assert "does not belong in a configuration" in line and "hunter2" not in line
    monkeypatch.setenv("EXPERIENCES_URL", url)
    loaded = config(grpo(), f"{EXPERIENCES}.storage_type=sql", EXPERIENCES + ".path=${oc.env:EXPERIENCES_URL}")
    assert "hunter2" not in loaded.to_yaml() + str(loaded.to_dict()) + repr(loaded)
    for again in (load_config(loaded.to_dict()), replace(loaded, {"seed": 1})):
        path = again.buffer.trainer_input.experience_buffer.path
        assert path == "${oc.env:EXPERIENCES_URL}"
        assert fill_from_environment(path) == url


@pytest.mark.parametrize(
    ("tree", "at"),
    [
        (sft(), EXPERIENCES),
        (grpo(), "buffer.explorer_input.taskset"),
        (mix(), "buffer.trainer_input.auxiliary_buffers.sft_dataset"),
    ],
)
def test_a_dataset_of_storage_type_sql_is_a_table_of_a_database(tree: dict[str, Any], at: str) -> None:
    (line,) = problems(tree, f"{at}.storage_type=sql", f"{at}.path=rows.jsonl")
    assert line.startswith(f"{at}.path: 'rows.jsonl' is not a database URL; use postgresql://user@host/name")
    (line,) = problems(tree, f"{at}.storage_type=sql", f"{at}.path=postgresql://me:hunter2@host/db")
    assert line.startswith(f"{at}.path: a password in a URL does not belong in a") and "hunter2" not in line
    assert config(tree, f"{at}.storage_type=sql", f"{at}.path=sqlite:////rows.db").warnings == ()


def test_the_table_is_the_subset_or_else_the_name() -> None:
    sql = ("buffer.explorer_input.taskset.storage_type=sql", "buffer.explorer_input.taskset.path=sqlite:////rows.db")
    (taskset,) = config(grpo(), *sql, "buffer.explorer_input.taskset.name=sums").buffer.explorer_input.train_tasksets
    assert taskset.table == "sums"
    named = (*sql, "buffer.explorer_input.taskset.subset_name=hard_sums")
    assert config(grpo(), *named).buffer.explorer_input.train_tasksets[0].table == "hard_sums"
    assert config(grpo()).buffer.explorer_input.train_tasksets[0].table is None


def test_a_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="EXPERIENCES_URL"):
        fill_from_environment("postgresql://me:${oc.env:EXPERIENCES_URL}@host/db")


def test_unread_auxiliary_buffers_give_a_warning() -> None:
    (line,) = problems(mix(), "buffer.trainer_input.auxiliary_buffers.more={path: x, storage_type: queue}")
    at = "buffer.trainer_input.auxiliary_buffers.more.storage_type"
    assert line == f"{at}: queue: auxiliary buffers are datasets; use file or sql"
    more = "buffer.trainer_input.auxiliary_buffers.more.path=x"
    assert config(mix(), more).warnings == (
        "buffer.trainer_input.auxiliary_buffers.more: ignored: sample_strategy mix reads sft_dataset",
    )
    assert config(grpo(), more).warnings == (
        "buffer.trainer_input.auxiliary_buffers.more: ignored: grpo does not mix in other data",
    )


def test_a_reward_model_is_trained_whole_and_answers_nothing() -> None:
    tree = sft(algorithm={"algorithm_type": "reward_model"})
    assert config(tree).algorithm.trains_reward_model and not config(sft()).algorithm.trains_reward_model
    settings = ("trainer.tensor_parallel_size=2", "trainer.num_ranks=2", "model.lora_configs=[{lora_rank: 4}]")
    found = [line for line in problems(tree, *settings) if "a reward model is trained whole" in line]
    assert [line.partition(":")[0] for line in found] == ["model.lora_configs", "trainer.tensor_parallel_size"]


def test_a_kl_baseline_needs_a_second_prompt() -> None:
    (line,) = problems(sft(algorithm={"algorithm_type": "kto"}), "buffer.train_batch_size=1")
    assert line.startswith("buffer.train_batch_size: a batch of one row has no response to another prompt")


@pytest.mark.parametrize("name", ["dpo", "cpt"])
def test_rows_of_a_dataset_are_counted_not_rollouts(name: str) -> None:
    loaded = config(sft(algorithm={"algorithm_type": name}))
    assert loaded.buffer.train_batch_size == 4
    assert loaded.buffer.trainer_input.experience_buffer.storage_type == "file"


def test_keys_of_auxiliary_buffers_are_checked() -> None:
    tree = mix(trainer_input={"auxiliary_buffers": {"sft_dataset": {"path": "x", "pth": "y"}}})
    (line,) = problems(tree)
    assert line.startswith("buffer.trainer_input.auxiliary_buffers.sft_dataset.pth: unknown key; did you mean path?")
    tree = mix(trainer_input={"auxiliary_buffers": {"sft_dataset": {"path": "x", "replay_buffer": {"enable": True}}}})
    (line,) = problems(tree)
    assert line.endswith("replay is for experience_buffer")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"algorithm_type": "grop"}, "algorithm.algorithm_type: unknown algorithm type 'grop'; did you mean grpo"),
        ({"policy_loss_fn": "ppoo"}, "algorithm.policy_loss_fn: unknown policy loss 'ppoo'; did you mean ppo"),
        (
            {"policy_loss_fn_args": {"clip_rnage": 1}},
            "algorithm.policy_loss_fn_args.clip_rnage: unknown argument; did you mean clip_range",
        ),
        ({"advantage_fn_args": {"epsilon": "x"}}, "algorithm.advantage_fn_args.epsilon: 'x' is not float"),
        ({"kl_loss_fn": "k4"}, "algorithm.kl_loss_fn: unknown KL estimate 'k4'; did you mean"),
        ({"entropy_loss_fn_args": {"coef": 1.0}}, "algorithm.entropy_loss_fn_args.coef: unknown argument"),
        ({"loss_agg_mode": "token_mean"}, "algorithm.loss_agg_mode: "),
    ],
)
def test_parts_are_checked_without_torch(section: dict[str, Any], line: str) -> None:
    (problem,) = problems(grpo(algorithm=section))
    assert problem.startswith(line)


def test_loss_arguments_may_include_the_aggregation() -> None:
    loaded = config(grpo(algorithm={"policy_loss_fn_args": {"loss_agg_mode": "token-mean"}}))
    assert loaded.warnings == ()


def test_only_the_plugin_check_imports_own_parts() -> None:
    loaded = config(grpo(algorithm={"policy_loss_fn": "my_losses.Mine"}))
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss_fn: .*cannot import 'my_losses'"):
        check_plugins(loaded)


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        ({"methd": "mask"}, "methd", "unknown argument; did you mean method?"),
        ({"method": "mask", "high": "2"}, "high", "'2' is not float"),
    ],
)
def test_arguments_of_the_rollout_correction_are_checked(given: dict[str, Any], key: str, message: str) -> None:
    (line,) = problems(grpo(algorithm={"algorithm_type": "grpo", "rollout_correction": given}))
    assert line.startswith(f"algorithm.rollout_correction.{key}: {message}")


def test_schedules_have_the_arguments_of_transformers() -> None:
    # The type of the key is written out for readers and for mypy.
    assert set(get_args(OptimizerConfig.model_fields["lr_scheduler_type"].annotation)) == set(SCHEDULES)
    assert set(SCHEDULES["polynomial"].parameters or ()) == {"lr_end", "power"}

    def lines(**section: object) -> list[str]:
        return problems(grpo(algorithm={"optimizer": section}))

    assert config(grpo(algorithm={"optimizer": {"lr_scheduler_type": "linear"}})).algorithm.optimizer.lr == 1e-6
    args = "algorithm.optimizer.lr_scheduler_args"
    assert lines(lr_scheduler_type="cosine", lr_scheduler_args={"num_cycle": 2}) == [
        f"{args}.num_cycle: unknown argument; did you mean num_cycles?; cosine takes num_cycles"
    ]
    few = lines(lr_scheduler_type="cosine", lr_scheduler_args={"num_cycles": "2"})
    assert few == [f"{args}.num_cycles: '2' is not float"]
    assert lines(lr_scheduler_type="warmup_stable_decay") == [
        f"{args}.num_decay_steps: required by warmup_stable_decay, and not given"
    ]
    [line] = lines(lr_scheduler_type="inverse_sqrt", min_lr_ratio=0.1)
    assert line.startswith(
        "algorithm.optimizer.min_lr_ratio: only for linear and cosine; inverse_sqrt takes lr_scheduler_args"
    )


def test_optimizers_have_the_arguments_of_torch() -> None:
    def lines(**section: object) -> list[str]:
        return problems(grpo(algorithm={"optimizer": section}))

    assert config(grpo(), "algorithm.optimizer.optimizer_type=AdamW").algorithm.optimizer.optimizer_type == "AdamW"
    at = "algorithm.optimizer"
    [line] = lines(optimizer_type="sgd", optimizer_args={"momentun": 0.9})
    assert line.startswith(f"{at}.optimizer_args.momentun: unknown argument; did you mean momentum?")
    assert lines(optimizer_type="sgd", optimizer_args={"nesterov": "yes"}) == [
        f"{at}.optimizer_args.nesterov: 'yes' is not bool"
    ]
    assert lines(optimizer_type="sgd", betas=[0.5, 0.9]) == [
        f"{at}.betas: optimizer sgd does not have it; leave it out"
    ]
    [line] = lines(optimizer_type="lbfgs")
    assert line.startswith(f"{at}.optimizer_type: ")
    other = config(grpo(algorithm={"optimizer": {"optimizer_type": "torch.optim.LBFGX"}}))
    with pytest.raises(ConfigError, match=r"has no 'LBFGX'"):
        check_plugins(other)
