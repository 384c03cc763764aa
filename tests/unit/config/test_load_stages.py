"""Promises about stages: a stage is a whole Config and inherits exactly what it does not set."""

from config_cases import config, grpo, problems

STAGES = [
    {
        "stage_name": "warmup",
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-4}},
        "buffer": {"trainer_input": {"experience_buffer": {"path": "pairs.jsonl"}}},
    },
    {
        "stage_name": "rl",
        "data_processor": {
            "experience_pipeline": {"operators": [{"name": "reward_filter", "args": {"threshold": 0.1}}]}
        },
        "explorer": {"max_timeout": 60.0},
        "trainer": {"save_interval": 5},
    },
]


def staged(**sections):
    return grpo(
        name="two",
        algorithm={"optimizer": {"lr": 1e-5, "weight_decay": 0.1}},
        trainer={"grad_clip": 0.3, "save_interval": 2, "total_steps": 7},
        stages=STAGES,
        **sections,
    )


def test_a_stage_inherits_exactly_what_it_does_not_set() -> None:
    loaded = config(staged())
    for stage, given in zip(loaded.stage_configs(), STAGES, strict=True):
        expected = leaves(without_stages(loaded.to_dict()))
        expected |= leaves({key: value for key, value in given.items() if key != "stage_name"})
        expected["name",] = f"two/{given['stage_name']}"
        actual = leaves(without_stages(stage.to_dict()))
        filled = {path for path in actual if expected[path] is None and actual[path] is not None}
        assert {path: actual[path] for path in actual if path not in filled} == {
            path: expected[path] for path in expected if path not in filled
        }


def without_stages(tree):
    return {key: value for key, value in tree.items() if key != "stages"}


def leaves(tree, path=()):
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {where: value for key, item in tree.items() for where, value in leaves(item, (*path, key)).items()}


def test_a_stage_keeps_keys_that_it_does_not_set() -> None:
    warmup, rl = config(staged()).stage_configs()
    assert (rl.trainer.save_interval, rl.trainer.grad_clip, rl.trainer.total_steps) == (5, 0.3, 7)
    assert (warmup.algorithm.optimizer.lr, warmup.algorithm.optimizer.weight_decay) == (1e-4, 0.1)
    assert rl.algorithm.optimizer.lr == 1e-5
    assert warmup.buffer.batch_size == rl.buffer.batch_size == 4


def test_computed_values_are_computed_for_each_stage() -> None:
    warmup, rl = config(staged()).stage_configs()
    assert (warmup.algorithm.repeat_times, warmup.buffer.train_batch_size) == (1, 4)
    assert (rl.algorithm.repeat_times, rl.buffer.train_batch_size) == (8, 32)
    assert warmup.buffer.trainer_input.experience_buffer.storage_type == "file"
    assert rl.buffer.trainer_input.experience_buffer.storage_type == "queue"


def test_the_stages_come_in_order_under_the_name_of_the_run() -> None:
    loaded = config(staged())
    assert [stage.name for stage in loaded.stage_configs()] == ["two/warmup", "two/rl"]
    assert [stage.mode for stage in loaded.stage_configs()] == ["train", "both"]
    assert all(stage.stages == () for stage in loaded.stage_configs())
    assert loaded.stage_configs()[0].checkpoint_job_dir == loaded.checkpoint_job_dir + "/warmup"


def test_a_config_without_stages_is_its_only_stage() -> None:
    loaded = config(grpo())
    assert loaded.stage_configs() == [loaded]


def test_rules_apply_to_stages_and_not_to_the_shared_part() -> None:
    loaded = config(staged(), "mode=bench", "stages[1].mode=both")
    assert [stage.mode for stage in loaded.stage_configs()] == ["train", "both"]


def test_null_in_a_stage_takes_an_inherited_value_back() -> None:
    _, rl = config(staged(), "buffer.train_batch_size=64", "stages[1].buffer.train_batch_size=null").stage_configs()
    assert rl.buffer.train_batch_size == 32


def test_mistakes_name_their_stage_and_shared_ones_appear_once() -> None:
    lines = problems(
        staged(seed="x"),
        "stages[1].trainer.save_intervall=3",
        "stages[0].mode=both",
        "stages[1].buffer.train_batch_size=3",
    )
    assert lines == [
        "seed: 'x' is not a whole number",
        "stages[0] (warmup): mode: both makes rollouts, and sft learns from a dataset; "
        "use mode train (bench to evaluate its checkpoints)",
        "stages[1] (rl): buffer.train_batch_size: 3 is not a multiple of algorithm.repeat_times 8, "
        "and groups are never split; use 8",
        "stages[1] (rl): trainer.save_intervall: unknown key; did you mean save_interval or eval_interval?",
    ]


def test_stages_have_names_of_their_own() -> None:
    assert problems(staged(), "stages[0].stage_name=rl") == ["stages: 2 stages are named 'rl'; give each a unique name"]


def test_a_stage_may_set_only_its_own_sections() -> None:
    assert problems(staged(), "stages[0].monitor.monitor_type=none")[0].startswith("stages[0].monitor: unknown key")


def test_a_warning_of_a_stage_names_it() -> None:
    loaded = config(staged(), "explorer.runner_per_model=4", "stages[1].trainer.param_offload=true")
    offload = "trainer.param_offload: ignored: use trainer.offload_policy, which offloads all three"
    runners = "explorer.runner_per_model: ignored: rollouts are concurrent coroutines, not runner processes"
    assert loaded.warnings == (runners, f"stages[1] (rl): {offload}")
    assert loaded.stage_configs()[0].warnings == (runners,)
    assert loaded.stage_configs()[1].warnings == (runners, offload)


def test_mode_colocate_means_both_with_colocate() -> None:
    loaded = config(grpo(mode="colocate", cluster={"num_cpus": 4}))
    assert (loaded.mode, loaded.cluster.colocate, loaded.cluster.num_cpus) == ("both", True, 4)
    assert config(loaded.to_dict()) == loaded
    warmup, rl = config(staged(), "stages[1].mode=colocate").stage_configs()
    assert (warmup.mode, warmup.cluster.colocate) == ("train", None)
    assert (rl.mode, rl.cluster.colocate) == ("both", True)


def test_an_override_hidden_by_every_stage_gives_a_warning() -> None:
    stages = [
        {**STAGES[0], "trainer": {"total_steps": 3}},
        {"stage_name": "rl", "trainer": {"total_steps": 5, "save_interval": 5}},
    ]
    tree = grpo(name="two", stages=stages)
    assert config(tree, "trainer.total_steps=9").warnings == (
        "trainer.total_steps: changes nothing: every stage sets it; set stages[1].trainer.total_steps, or that of "
        "another stage",
    )
    for has_an_effect in ("trainer.save_interval=9", "stages[1].trainer.total_steps=9", "seed=9"):
        assert config(tree, has_an_effect).warnings == ()
