"""Requirements of an algorithm: missing keys and incompatible combinations are reported before anything starts."""

from typing import Any, get_args

import pytest
from config_cases import config, grpo, problems, sft

from rftdask.config import check_plugins, load_config, make_plan
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


@pytest.mark.parametrize(
    ("buffers", "found"), [(["shown"], "shown"), (["shown", "more"], "shown"), (["more", "sft_dataset"], "sft_dataset")]
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


EXPERIENCES = "buffer.trainer_input.experience_buffer"


def test_the_table_is_the_subset_or_else_the_name() -> None:
    sql = ("buffer.explorer_input.taskset.storage_type=sql", "buffer.explorer_input.taskset.path=sqlite:////rows.db")
    (taskset,) = config(grpo(), *sql, "buffer.explorer_input.taskset.name=sums").buffer.explorer_input.train_tasksets
    assert taskset.table == "sums"
    named = (*sql, "buffer.explorer_input.taskset.subset_name=hard_sums")
    assert config(grpo(), *named).buffer.explorer_input.train_tasksets[0].table == "hard_sums"
    assert config(grpo()).buffer.explorer_input.train_tasksets[0].table is None


def test_a_reward_model_is_trained_whole_and_answers_nothing() -> None:
    tree = sft(algorithm={"algorithm_type": "reward_model"})
    assert config(tree).algorithm.trains_reward_model and not config(sft()).algorithm.trains_reward_model
    settings = ("trainer.tensor_parallel_size=2", "trainer.num_ranks=2", "model.lora_configs=[{lora_rank: 4}]")
    found = [line for line in problems(tree, *settings) if "a reward model is trained whole" in line]
    assert [line.partition(":")[0] for line in found] == ["model.lora_configs", "trainer.tensor_parallel_size"]


@pytest.mark.parametrize("name", ["dpo", "cpt"])
def test_rows_of_a_dataset_are_counted_not_rollouts(name: str) -> None:
    loaded = config(sft(algorithm={"algorithm_type": name}))
    assert loaded.buffer.train_batch_size == 4
    assert loaded.buffer.trainer_input.experience_buffer.storage_type == "file"


def test_only_the_plugin_check_imports_own_parts() -> None:
    loaded = config(grpo(algorithm={"policy_loss_fn": "my_losses.Mine"}))
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss_fn: .*cannot import 'my_losses'"):
        check_plugins(loaded)


def test_schedules_and_optimizers_are_those_of_the_libraries() -> None:
    # The type of the key is written out for readers and for mypy.
    assert set(get_args(OptimizerConfig.model_fields["lr_scheduler_type"].annotation)) == set(SCHEDULES)
    assert set(SCHEDULES["polynomial"].parameters or ()) == {"lr_end", "power"}
    assert config(grpo(), "algorithm.optimizer.optimizer_type=AdamW").algorithm.optimizer.optimizer_type == "AdamW"
    with pytest.raises(ConfigError, match=r"has no 'LBFGX'"):
        check_plugins(config(grpo(), "algorithm.optimizer.optimizer_type=torch.optim.LBFGX"))


def test_an_eval_buffer_is_a_file_by_default() -> None:
    loaded = config(sft(), "buffer.trainer_input.eval_buffer.path=more.jsonl").buffer.trainer_input.eval_buffer
    assert loaded is not None and (loaded.path, loaded.storage_type) == ("more.jsonl", "file")


def test_videos_are_read_and_mini_batches_counted() -> None:
    assert config(grpo(), "buffer.explorer_input.taskset.format.video_key=video").reads_videos
    assert config(grpo(), "buffer.batch_size=3", "trainer.ppo_mini_batch_size=8").num_mini_batches == 3


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"advantage_fn": "ppo"}, "advantage_fn: advantage_fn 'ppo' needs a critic and algorithm_type 'grpo' has none"),
        ({"policy_loss_fn": "dpo"}, "policy_loss_fn: policy_loss_fn 'dpo' reads 'dpo' rows"),
        ({"algorithm_type": "raft", "kl_penalty_fn": "k1"}, "kl_penalty_fn: kl_penalty_fn changes rewards, and"),
        (
            {"algorithm_type": "sft", "advantage_fn_args": {"std": "none"}},
            "advantage_fn_args: policy_loss_fn 'sft' takes no advantages; remove advantage_fn_args from",
        ),
        ({"algorithm_type": "sft", "policy_loss_fn": "ppo"}, "policy_loss_fn: policy_loss_fn 'ppo' needs an advantage"),
        (
            {"algorithm_type": "dpo", "loss_agg_mode": "token-mean"},
            "loss_agg_mode: policy_loss_fn 'dpo' needs loss_agg",
        ),
        ({"algorithm_type": "dpo", "kl_penalty_fn": "k1"}, "kl_penalty_fn: 'dpo' rows have neither rewards nor"),
        (
            {"algorithm_type": "sft", "rollout_correction": {"method": "mask"}},
            "rollout_correction: 'sft' rows have neither rewards nor",
        ),
        (
            {"algorithm_type": "reward_model", "kl_loss_fn": "k2"},
            "kl_loss_fn: policy_loss_fn 'bradley_terry' trains a reward model, which has no logprobs; remove",
        ),
    ],
)
def test_parts_that_cannot_be_combined_are_refused(section: dict[str, Any], line: str) -> None:
    """The problem names the key of the file. Mode explore ignores the combination, since it does not train."""
    on_rows = section.get("algorithm_type", "raft") not in ("grpo", "raft")
    tree = sft(algorithm=section) if on_rows else grpo(algorithm=section)
    assert any(problem.startswith(f"algorithm.{line}") for problem in problems(tree)), problems(tree)
    if not on_rows:
        load_config({**tree, "mode": "explore"})


@pytest.mark.parametrize("kind", registered_parts("algorithm_type"))
def test_terms_without_effect_fit_every_algorithm_type(kind: str) -> None:
    fits = AlgorithmConfig(algorithm_type=kind, kl_penalty_fn="none", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0})
    assert fits.misfit is None
