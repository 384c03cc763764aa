"""Promises about what a user is told.

- All mistakes at once, sorted by path; no mistake hides another, and a mistake in one key does not invent others.
- Each line: the path, the value, what is allowed; the nearest names for a misspelled one.
- No secret in a message.
"""

from typing import Any

import pytest
from config_cases import config, grpo, problems, sft

from rftdask.config import load_config
from rftdask.errors import ConfigError


def test_all_mistakes_are_told_at_once_sorted_by_path() -> None:
    source = {
        "mode": "bth",
        "name": "../elsewhere",
        "algorithm": {"repeat_time": 4, "lr": 3, "optimizer": {"lr": -1, "betas": [0.9]}},
        "model": {
            "max_model_len": 64,
            "max_prompt_tokens": 50,
            "max_response_tokens": 30,
            "top_p": 1.5,
            "temperature": True,
        },
        "buffer": {"batch_size": 2.5, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "trainer": {"grad_clip": "much", "num_ranks": 2, "trainer_strategy": "single"},
        "explorers": {},
    }
    assert problems(source) == [
        "algorithm.lr: unknown key; lr is a key of algorithm.optimizer, trainer.critic",
        "algorithm.optimizer.betas: the list is too short",
        "algorithm.optimizer.lr: -1 is too small; it must be at least 0",
        "algorithm.repeat_time: unknown key; did you mean repeat_times?",
        "buffer.batch_size: 2.5 is not a whole number",
        "explorers: unknown key; did you mean explorer?",
        "mode: 'bth' is not one of both, explore, train, bench, serve, colocate; did you mean both?",
        "model.max_model_len: max_prompt_tokens 50 + max_response_tokens 30 = 80 exceeds max_model_len 64; "
        "lower one of them or raise max_model_len",
        "model.model_path: required, and not given",
        "model.temperature: true is not a number",
        "model.top_p: 1.5 is too large; it must be at most 1",
        "name: '../elsewhere' is not a folder name, or folder names joined by /",
        "trainer.grad_clip: 'much' is not a number",
        "trainer.num_ranks: 2 ranks cannot share a model by trainer_strategy single; use ddp or fsdp2",
    ]


def test_the_error_counts_the_problems_and_names_the_file(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {model_path: tiny, max_model_len: 64}\nmode: bench\nseed: x\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == (
        f"2 problems in {file}:\n"
        "  - buffer.explorer_input.eval_tasksets: required in mode bench: what to evaluate\n"
        "  - seed: 'x' is not a whole number"
    )


def test_a_key_that_resembles_none_is_told_with_where_keys_are() -> None:
    assert problems(grpo(actor_rollout_ref={"rollout": {"n": 8}})) == [
        "actor_rollout_ref: unknown key; rftdask schema lists all keys, rftdask import translates those of TRL, "
        "verl and Trinity-RFT"
    ]


def test_what_is_no_yaml_is_told_by_the_line_in_which_it_begins(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  algorithm_type: grpo\n  repeat_times 4\n  kl_loss_fn: k2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.problems == [
        "not valid YAML: line 4, column 3: could not find expected ':' while scanning a simple key that begins in "
        "line 3"
    ]


def test_a_key_of_another_section_is_told_by_its_place() -> None:
    assert problems(grpo(total_steps=4)) == [
        "total_steps: unknown key; total_steps is a key of buffer, trainer, buffer.explorer_input.taskset, ..."
    ]
    assert problems(grpo(trainer={"batch_size": 4, "model_path": "m"})) == [
        "trainer.batch_size: unknown key; did you mean micro_batch_size?; batch_size is a key of buffer",
        "trainer.model_path: unknown key; model_path is a key of model, explorer.rollout_model, "
        "explorer.auxiliary_models[]",
    ]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"explorer": 3}, "explorer: 3 is not a section (key: value lines)"),
        ({"explorer": {"env_vars": {"A": 1}}}, "explorer.env_vars.A: 1 is not text; put it in quotes"),
        ({"stages": "one"}, "stages: 'one' is not a list"),
        ({"seed": "12a"}, "seed: '12a' is not a whole number"),
        ({"deterministic": "maybe"}, "deterministic: 'maybe' is not true or false"),
        ({"name": ""}, "name: must not be empty"),
        ({"trainer": {"name": "a/b"}}, "trainer.name: 'a/b' is not a usable name"),
        ({"synchronizer": {"sync_timeout": 0}}, "synchronizer.sync_timeout: 0 is too small; it must be more than 0"),
        ({"algorithm": {"optimizer": {"lr": float("inf")}}}, "algorithm.optimizer.lr: inf is not a finite number"),
        (
            {"algorithm": {"optimizer": {"betas": [0.9, 0.9, 0.9]}}},
            "algorithm.optimizer.betas: the list has 3 items; it must have 2",
        ),
        (
            {"algorithm": {"optimizer": {"betas": [0.9, 2]}}},
            "algorithm.optimizer.betas[1]: 2 is too large; it must be less than 1",
        ),
        (
            {"explorer": {"rollout_model": {"engine_type": "vlm"}}},
            "explorer.rollout_model.engine_type: unknown engine 'vlm'; did you mean vllm?; give your own as "
            "package.module.Name, or by its name in a file of plugin_dirs",
        ),
        (
            {"explorer": {"rollout_model": {"engine_type": "sglang"}}},
            "explorer.rollout_model.engine_type: 'sglang' is not available in this release (this engine); "
            "use one of external, fake, tinker, transformers, vllm",
        ),
        (
            {"explorer": {"rollout_model": {"tensor_parallel_size": 2}}},
            "explorer.rollout_model.tensor_parallel_size: engine_type transformers does not support it; leave it out "
            "or use vllm",
        ),
        (
            {
                "explorer": {"rollout_model": {"engine_type": "vllm"}},
                "model": {"model_path": "m", "max_model_len": 64, "lora_configs": [{"use_dora": True}]},
            },
            "model.lora_configs[0].use_dora: engine_type vllm does not support DoRA; use transformers",
        ),
        (
            {"synchronizer": {"load_in_flight": True}},
            "synchronizer.load_in_flight: sync_style fixed loads at its boundaries; use fully_async",
        ),
        (
            {
                "synchronizer": {"load_in_flight": True, "sync_style": "fully_async"},
                "explorer": {"rollout_model": {"engine_type": "vllm"}},
                "model": {"model_path": "m", "max_model_len": 64, "lora_configs": [{}]},
            },
            "synchronizer.load_in_flight: engine_type vllm loads adapters only when no request is running; leave it "
            "out, or use transformers",
        ),
        (
            {
                "explorer": {
                    "rollout_model": {"engine_type": "vllm", "extra_engine_args": {"logprobs_mode": "raw_logits"}}
                }
            },
            "explorer.rollout_model.extra_engine_args.logprobs_mode: logprobs must be those of "
            "softmax(logits / temperature), as in the trainer; leave it out",
        ),
        (
            {"explorer": {"rollout_model": {"engine_type": "vllm", "extra_engine_args": {"speculative_config": {}}}}},
            "explorer.rollout_model.extra_engine_args.speculative_config: it is not verified that speculative "
            "decoding preserves tokens and logprobs; leave it out",
        ),
        (
            {
                "explorer": {
                    "rollout_model": {"engine_type": "vllm"},
                    "auxiliary_models": [{"engine_type": "vllm", "model_path": "judge"}],
                }
            },
            "explorer.auxiliary_models[0].gpu_memory_utilization: 0.9 + 0.9 exceeds the GPU that they share; set "
            "shares that add up to 0.95 at most (explorer.rollout_model, explorer.auxiliary_models[0])",
        ),
        (
            {"explorer": {"rollout_model": {"temperature": 0.5}}, "model": {**grpo()["model"], "temperature": 0.7}},
            "explorer.rollout_model.temperature: 0.5 is not available in this release (lengths and sampling of the "
            "policy; set the same key in section model); leave it out or set null",
        ),
        (
            {
                "explorer": {
                    "auxiliary_models": [{"model_path": "j", "max_model_len": 80, "max_response_tokens": 90}],
                }
            },
            "explorer.auxiliary_models[0].max_model_len: 80 is less than a prompt of 1 and a response of 90 tokens "
            "(its max_prompt_tokens, max_response_tokens); raise it",
        ),
        (
            {"trainer": {"trainer_type": "tinker"}},
            "trainer.trainer_type: tinker requires engine_type tinker; model.tinker.enable: true sets both",
        ),
        (
            {"explorer": {"rollout_model": {"engine_type": "tinker"}}},
            "explorer.rollout_model.engine_type: tinker requires trainer_type tinker; "
            "model.tinker.enable: true sets both",
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(section: dict, line: str) -> None:
    assert problems(grpo(**section)) == [line]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["trainer.num_ranks=6"],
            "groups of 4 ranks split sequences, and num_ranks 6 is not a multiple of 4; use num_ranks 8",
        ),
        (
            ["trainer.trainer_strategy=single"],
            "4 ranks split sequences, and trainer_strategy single is one rank; use ddp or fsdp2",
        ),
    ],
)
def test_ranks_that_split_sequences_make_whole_groups(overrides: list[str], line: str) -> None:
    key = "trainer.ulysses_sequence_parallel_size"
    assert problems(grpo(), f"{key}=4", *overrides) == [f"{key}: {line}"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["trainer.num_ranks=3"],
            "groups of 2 ranks cut layers, and num_ranks 3 is not a multiple of 2; use num_ranks 4",
        ),
        (
            ["trainer.ulysses_sequence_parallel_size=2"],
            "2 does not go with ulysses_sequence_parallel_size; use one of them",
        ),
        (["trainer.torch_compile=true"], "2 does not go with torch_compile"),
        (["model.lora_configs=[{lora_rank: 4}]"], "2 does not go with model.lora_configs"),
    ],
)
def test_what_does_not_go_with_cut_layers_is_refused(overrides: list[str], line: str) -> None:
    key = "trainer.tensor_parallel_size"
    cut = [f"{key}=2"]
    assert problems(grpo(), *cut, *overrides) == [f"{key}: {line}"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "optimizer_type adam, which rounds to nearest, so that small steps are lost; use torchao.optim.AdamW8bit"),
        (["trainer.trainer_strategy=ddp"], "trainer_strategy ddp, which computes in the data type of the weights; use"),
        (["model.lora_configs=[{lora_rank: 4}]"], "model.lora_configs, whose adapters are small; leave it out"),
    ],
)
def test_narrow_weights_are_refused_where_steps_would_be_lost(overrides: list[str], line: str) -> None:
    settings = ["algorithm.optimizer.optimizer_type=torchao.optim.AdamW8bit"] if overrides else []
    found = problems(grpo(), "trainer.master_weights=bfloat16", *settings, *overrides)
    assert len(found) == 1
    assert found[0].startswith(f"trainer.master_weights: bfloat16 does not go with {line}")


def test_a_group_is_never_split_over_batches() -> None:
    assert problems(grpo(), "buffer.train_batch_size=20", "algorithm.repeat_times=8") == [
        "buffer.train_batch_size: 20 is not a multiple of algorithm.repeat_times 8, "
        "and groups are never split; use 16 or 24"
    ]


def test_too_small_a_batch_names_the_smallest_one() -> None:
    assert problems(grpo(), "buffer.train_batch_size=4")[0].endswith("use 8")


def test_an_algorithm_that_learns_from_a_dataset_names_its_modes() -> None:
    assert problems(sft(mode="both")) == [
        "mode: both makes rollouts, and sft learns from a dataset; use mode train (bench to evaluate its checkpoints)"
    ]


def test_each_mode_needs_its_data() -> None:
    at = "buffer.explorer_input"
    assert problems(grpo(buffer={})) == [f"{at}.taskset.path: required in mode both: the tasks to explore"]
    assert problems(grpo(mode="explore", buffer={})) == [
        f"{at}.taskset.path: required in mode explore: the tasks to explore"
    ]
    assert problems(grpo(mode="bench")) == [f"{at}.eval_tasksets: required in mode bench: what to evaluate"]
    assert problems(sft(buffer={})) == [
        "buffer.trainer_input.experience_buffer.path: required for sft: the dataset to learn from"
    ]
    assert config(grpo(mode="train", buffer={})).mode == "train"


def test_taskset_and_tasksets_exclude_each_other() -> None:
    assert problems(grpo(), "buffer.explorer_input.tasksets=[{path: b.jsonl}]") == [
        "buffer.explorer_input.tasksets: taskset is given as well; give only one of them"
    ]


def test_tasksets_have_names_of_their_own() -> None:
    assert problems(grpo(), "buffer.explorer_input.eval_tasksets=[{path: b.jsonl, name: taskset_0}]") == [
        "buffer.explorer_input: 2 tasksets are named 'taskset_0'; give each a unique name"
    ]


def test_a_training_taskset_does_not_choose_its_own_group_size() -> None:
    assert problems(grpo(), "buffer.explorer_input.taskset.repeat_times=2") == [
        "buffer.explorer_input.taskset.repeat_times: 2 differs from algorithm.repeat_times 8, "
        "which decides for training; leave it out"
    ]


def test_two_names_of_one_limit_may_not_differ() -> None:
    assert problems(grpo(), "trainer.grad_clip=2", "algorithm.optimizer.clip_grad=3") == [
        "trainer.grad_clip: 2.0 differs from algorithm.optimizer.clip_grad 3.0, and both are the same limit; give one"
    ]
    assert problems(
        grpo(),
        "algorithm.sample_strategy=staleness_control",
        "algorithm.sample_strategy_args={max_staleness: 2}",
        "synchronizer.max_staleness=1",
    ) == [
        "algorithm.sample_strategy_args.max_staleness: 2 differs from synchronizer.max_staleness 1, "
        "and both are the same bound; give one"
    ]


def test_a_strategy_takes_only_its_own_arguments() -> None:
    assert problems(grpo(), "algorithm.sample_strategy_args={max_staleness: 2}") == [
        "algorithm.sample_strategy_args.max_staleness: unknown argument; default takes no arguments"
    ]


def test_lengths_must_be_given_one_way_or_the_other() -> None:
    assert problems(grpo(model={"model_path": "m", "max_prompt_tokens": 5})) == [
        "model.max_model_len: required, unless max_prompt_tokens and max_response_tokens are both given"
    ]


def test_secrets_are_refused_and_never_shown() -> None:
    source = grpo(
        explorer={
            "rollout_model": {"api_key": "sk-1"},
            "env_vars": {"OPENAI_API_KEY": "sk-2", "HF_TOKEN": "sk-3", "PLAIN": "fine"},
            "auxiliary_models": [{"api_key": "sk-4"}],
        },
        monitor={"monitor_type": "wandb", "monitor_args": {"nested": {"password": "sk-5"}, "api_key_env": "NAME"}},
    )
    lines = problems(source)
    assert [line.split(":")[0] for line in lines] == [
        "explorer.auxiliary_models[0].api_key",
        "explorer.env_vars.HF_TOKEN",
        "explorer.env_vars.OPENAI_API_KEY",
        "explorer.rollout_model.api_key",
        "monitor.monitor_args.nested.password",
    ]
    assert not any("sk-" in line for line in lines)


def test_a_password_in_an_address_is_not_shown() -> None:
    (line,) = problems(grpo(), "mode=postgresql://user:hunter2@host/db")
    assert "hunter2" not in line


def test_a_broken_key_does_not_invent_other_mistakes() -> None:
    assert problems(grpo(), "buffer.batch_size=x", "buffer.train_batch_size=20") == [
        "buffer.batch_size: 'x' is not a whole number"
    ]


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            ["algorithm.repeat_times=1"],
            "algorithm.repeat_times: 1: grpo compares rollouts of a task, so a single one gives no gradient; "
            "use 2 or more",
        ),
        (
            ["buffer.total_steps=5", "buffer.total_epochs=2"],
            "buffer.total_epochs: ignored: buffer.total_steps is given and decides",
        ),
        (
            ["trainer.trainer_strategy=ddp", "trainer.offload_policy=true"],
            "trainer.offload_policy: ignored: trainer_strategy ddp shards nothing",
        ),
        (
            ["trainer.trainer_strategy=single", "trainer.prefetch_layers=2"],
            "trainer.prefetch_layers: ignored: trainer_strategy single shards nothing",
        ),
        (
            ["trainer.trainer_strategy=ddp", "trainer.reshard_after_forward=false"],
            "trainer.reshard_after_forward: ignored: trainer_strategy ddp shards nothing",
        ),
        (
            [
                "explorer.eval_interval=10",
                "synchronizer.sync_interval=4",
                "buffer.explorer_input.eval_tasksets=[{path: e}]",
            ],
            "explorer.eval_interval: 10 is not a multiple of explorer_sync_interval 4: evaluated every 8 steps",
        ),
        (
            ["buffer.train_batch_size=64"],
            "synchronizer.explorer_sync_interval: not every synchronization brings new weights: between two of "
            "them the explorer makes explorer_sync_interval 1 x batch_size 4 x repeat_times 8 = 32 experiences, "
            "and new weights need trainer_sync_interval 1 x train_batch_size 64 = 64; with 2 each would",
        ),
        (
            ["buffer.trainer_input.experience_buffer.path=x.db"],
            "buffer.trainer_input.experience_buffer.path: ignored: rollouts are read from the log of the run",
        ),
        (
            ["buffer.trainer_input.experience_buffer.format.prompt_key=question"],
            "buffer.trainer_input.experience_buffer.format: ignored: rollouts are read from the log of the run",
        ),
        (
            ["buffer.explorer_input.eval_tasksets=[{path: e, data_selector: {selector_type: shuffle}}]"],
            "buffer.explorer_input.eval_tasksets[0].data_selector.selector_type: ignored: an evaluation takes every "
            "task once, in the order stored",
        ),
        (
            ["explorer.auxiliary_models=[{model_path: judge, engine_num: 2, engine_type: external}]"],
            "explorer.auxiliary_models[0].engine_num: ignored: a model behind an API has no engine here",
        ),
        (
            ["explorer.auxiliary_models=[{model_path: judge, seed: 7}]"],
            "explorer.auxiliary_models[0].seed: ignored: explorer.rollout_model.seed decides for "
            "all requests of a rollout",
        ),
        (
            ["trainer.eval_interval=5"],
            "trainer.eval_interval: ignored: there is neither buffer.trainer_input.eval_buffer nor, on a dataset, "
            "eval_tasksets",
        ),
        (["trainer.critic.lr=0.1"], "trainer.critic: ignored: grpo has no critic"),
        (["trainer.critic_warmup=5"], "trainer.critic_warmup: ignored: grpo has no critic"),
        (
            ["algorithm.kl_loss_fn=k1"],
            "algorithm.kl_loss_fn: k1: as a loss its gradient is 0 on average, so it does not hold the policy; use "
            "k2 here, or k1 as kl_penalty_fn",
        ),
        (
            ["algorithm.kl_penalty_fn=k3"],
            "algorithm.kl_penalty_fn: k3: as a penalty only the signed estimate k1 holds the policy; "
            "use k1 here, or k3 as kl_loss_fn",
        ),
    ],
)
def test_what_may_surprise_is_warned_about(overrides: list[str], warning: str) -> None:
    assert config(grpo(), *overrides).warnings == (warning,)


def test_routers_are_heard_where_they_can_be() -> None:
    of_two = problems(sft(), "trainer.router_aux_loss_coef=0.1", "trainer.torch_compile=true")
    assert of_two == ["trainer.router_aux_loss_coef: 0.1 does not go with torch_compile, which hides the routers"]


@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        (["explorer.rollout_model.engine_type=vllm"], "engine_type vllm, which does not report its experts here; use"),
        (["explorer.rollout_model.engine_type=fake"], "engine_type fake, which does not report its experts here; use"),
        (["trainer.torch_compile=true"], "trainer.torch_compile, which hides the routers"),
    ],
)
def test_experts_are_replayed_where_they_can_be(overrides: list[str], other: str) -> None:
    found = problems(grpo(), "algorithm.enable_router_replay=true", *overrides)
    assert any(each.startswith(f"algorithm.enable_router_replay: does not go with {other}") for each in found)
    config(grpo(), "algorithm.enable_router_replay=true")


def test_rows_of_a_dataset_have_no_experts_to_replay() -> None:
    [found] = problems(sft(), "algorithm.enable_router_replay=true")
    assert found.endswith("does not go with sft, which learns from a dataset: no engine reported its experts")


def test_reward_models_are_not_evaluated_on_tasks() -> None:
    tasks = "buffer.explorer_input.eval_tasksets=[{path: e}]"
    loaded = config(sft(), tasks, "trainer.eval_interval=5", "explorer.eval_interval=7")
    assert loaded.evaluates_training and loaded.eval_interval == 5 and loaded.warnings == ()
    ignored = config(sft(algorithm={"algorithm_type": "reward_model"}), tasks)
    assert not ignored.has_explorer
    told = "ignored: a reward model generates no answers; use eval_buffer"
    assert ignored.warnings == (f"buffer.explorer_input.eval_tasksets: {told}",)


@pytest.mark.parametrize("key", ["capacity=9", "max_unread_bytes=9", "max_read_timeout=9", "retention.keep=none"])
def test_a_dataset_has_no_use_for_the_keys_of_a_log(key: str) -> None:
    at = "buffer.trainer_input.experience_buffer"
    loaded = config(sft(), f"{at}.{key}")
    name = key.partition("=")[0].partition(".")[0]
    assert loaded.warnings == (f"{at}.{name}: ignored: sft reads a dataset and keeps no log",)


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("synchronizer.sync_method", "online", "nccl"),
        ("synchronizer.sync_method", "offline", "checkpoint"),
        ("synchronizer.sync_style", "dynamic_by_explorer", "explorer_driven"),
        ("synchronizer.sync_style", "dynamic_by_trainer", "trainer_driven"),
        ("trainer.trainer_type", "verl", "torch"),
        ("trainer.trainer_strategy", "fsdp", "fsdp2"),
        ("trainer.trainer_strategy", "megatron", "fsdp2"),
        ("algorithm.algorithm_type", "grpo_verl", "grpo"),
        ("algorithm.advantage_fn", "grpo_verl", "grpo"),
        ("algorithm.sample_strategy", "warmup", "default"),
    ],
)
def test_an_old_value_is_replaced_with_a_warning(key: str, old: str, new: str) -> None:
    loaded = config(grpo(), f"{key}={old}")
    section, name = key.split(".")
    assert getattr(getattr(loaded, section), name) == new
    assert len(loaded.warnings) == 1 and loaded.warnings[0].startswith(f"{key}: {old} is taken as {new}: ")


def test_an_old_key_is_replaced_with_a_warning() -> None:
    loaded = config(grpo(), "algorithm.optimizer.warmup_style=cosine")
    assert loaded.algorithm.optimizer.lr_scheduler_type == "cosine"
    assert loaded.warnings == ("algorithm.optimizer.warmup_style: old name of lr_scheduler_type",)


def test_an_old_key_beside_its_new_name_is_refused() -> None:
    assert problems(
        grpo(), "algorithm.optimizer.warmup_style=cosine", "algorithm.optimizer.lr_scheduler_type=constant"
    ) == ["algorithm.optimizer.warmup_style: an old name of lr_scheduler_type, which is given as well; leave it out"]


def test_mini_batches_make_a_whole_batch() -> None:
    sizes = ("buffer.batch_size=3", "algorithm.repeat_times=4")
    assert problems(grpo(), *sizes, "trainer.ppo_mini_batch_size=5") == [
        "trainer.ppo_mini_batch_size: 5 does not divide buffer.train_batch_size 12; use 4"
    ]
    assert problems(grpo(), *sizes, "trainer.ppo_mini_batch_size=24") == [
        "trainer.ppo_mini_batch_size: 24 does not divide buffer.train_batch_size 12; use 12"
    ]
    assert load_config(grpo(), [*sizes, "trainer.ppo_mini_batch_size=4"]).num_mini_batches == 3


def test_only_one_adapter_can_be_trained() -> None:
    load_config(grpo(), ["model.lora_configs=[{}]"])
    assert problems(grpo(), "model.lora_configs=[{}, {}]") == [
        "model.lora_configs: the list has 2 items; it must have 1"
    ]


@pytest.mark.parametrize("keep", ["thin", "none"])
def test_results_that_somebody_needs_again_are_not_removed(keep: str) -> None:
    at = "buffer.trainer_input.experience_buffer.retention.keep"
    selector = "{selector_type: difficulty_based, feature_keys: [weak, strong]}"
    load_config(grpo(), [f"{at}={keep}"])
    assert problems(grpo(), f"{at}={keep}", f"buffer.explorer_input.taskset.data_selector={selector}") == [
        f"{at}: {keep} removes results that the selector difficulty_based learns from; use all"
    ]


@pytest.mark.parametrize("kind", ["file", "sql"])
def test_only_parquet_shards_are_compacted(kind: str) -> None:
    buffer = "buffer.trainer_input.experience_buffer"
    selector = "{selector_type: difficulty_based, feature_keys: [weak, strong]}"
    compact = f"{buffer}.retention.keep=compact"
    load_config(grpo(), [compact, f"buffer.explorer_input.taskset.data_selector={selector}"])
    assert problems(grpo(), compact, f"{buffer}.storage_type={kind}") == [
        f"{buffer}.retention.keep: compact merges Parquet shards, and storage_type {kind} has none; use queue, or all"
    ]


def test_fewest_explorer_workers_are_not_more_than_most() -> None:
    source = grpo()
    source["explorer"] = {"min_workers": 5, "max_workers": 4}
    (line,) = problems(source)
    assert line == "explorer.min_workers: 5 exceeds explorer.max_workers 4; lower one or raise the other"


@pytest.mark.parametrize(
    ("taskset", "line"),
    [
        (
            {"default_workflow_type": "math_worklow"},
            "buffer.explorer_input.taskset.default_workflow_type: unknown workflow 'math_worklow'",
        ),
        (
            {"default_reward_fn_type": "math_boxed_rewad"},
            "buffer.explorer_input.taskset.default_reward_fn_type: unknown reward function 'math_boxed_rewad'",
        ),
    ],
)
def test_unknown_workflows_and_rewards_name_the_nearest(taskset: dict, line: str) -> None:
    [problem] = problems(grpo(buffer={"explorer_input": {"taskset": {"path": "t.jsonl", **taskset}}}))
    assert problem.startswith(line)
    assert "; did you mean math_" in problem


def test_a_workflow_of_a_plugin_is_accepted_unimported() -> None:
    taskset = {"path": "t.jsonl", "default_workflow_type": "no_such_module.workflow"}
    assert load_config(grpo(buffer={"explorer_input": {"taskset": taskset}}))


def test_videos_are_refused_where_nothing_reads_them() -> None:
    key = "buffer.explorer_input.taskset.format.video_key"
    assert config(grpo(), f"{key}=video").reads_videos
    for engine in ("vllm", "fake"):
        [line] = problems(grpo(), f"{key}=video", f"explorer.rollout_model.engine_type={engine}")
        kind = "videos" if engine == "vllm" else "images"
        assert line == f"{key}: engine_type {engine} does not support {kind} here; use engine_type transformers"
    [line] = problems(grpo(), f"{key}=video", "buffer.explorer_input.taskset.format.prompt_type=raw")
    assert line.startswith(f"{key}: images and videos need a chat template, which prompt_type raw lacks")
    own = "buffer.trainer_input.experience_buffer.format.video_key"
    assert problems(sft(), f"{own}=video") == [f"{own}: only tasks may have videos; leave it out"]


def test_pixels_are_not_normalized_by_vllm() -> None:
    key = "explorer.rollout_model.extra_engine_args.mm_device_do_normalize"
    [line] = problems(grpo(), f"{key}=true", "explorer.rollout_model.engine_type=vllm")
    assert line.startswith(f"{key}: the trainer normalizes pixels with the processor of the model")


@pytest.mark.parametrize(
    ("explorer", "line"),
    [
        (
            {"rollout_model": {"engine_num": 0}},
            "explorer.rollout_model.engine_num: 0: the policy needs at least one engine; give 1 or more",
        ),
        (
            {"auxiliary_models": [{"model_path": "j", "requests_per_minute": 60}]},
            "explorer.auxiliary_models[0].requests_per_minute: only for models behind an API, and engine_type is "
            "transformers",
        ),
        (
            {"rollout_model": {"prompt_price": 1.0}},
            "explorer.rollout_model.prompt_price: 1.0 is not available in this release (auxiliary models); leave it "
            "out or set null",
        ),
        (
            {"auxiliary_models": [{"model_path": "q", "engine_type": "tinker", "engine_num": 1}]},
            "explorer.auxiliary_models[0].engine_num: the Tinker service runs the model, so it needs no workers; leave "
            "it out",
        ),
    ],
)
def test_what_an_auxiliary_model_cannot_have_is_refused(explorer: dict[str, Any], line: str) -> None:
    assert line in problems(grpo(explorer=explorer))


def test_models_apart_share_no_gpu_with_the_policy() -> None:
    both = {
        "rollout_model": {"engine_type": "vllm"},
        "auxiliary_models": [{"engine_type": "vllm", "model_path": "judge", "engine_num": 1}],
    }
    assert [model.asked_name for model in config(grpo(explorer=both)).models_apart] == ["judge"]
