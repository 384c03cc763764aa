"""Promises about the plan: sizes follow from the datasets, and what is unknown is not guessed."""

import json
from pathlib import Path

import pytest
from config_cases import config, grpo, sft

from rftdask.config import Config, make_plan
from rftdask.config.plan import count_rows


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(21)) + "\n")
    return str(file)


def test_steps_follow_from_the_size_of_the_taskset(tasks: str) -> None:
    source = grpo()
    source["buffer"]["explorer_input"]["taskset"]["path"] = tasks
    (stage,) = make_plan(config(source, "buffer.total_epochs=2", "buffer.train_batch_size=40")).stages
    assert stage.num_tasks == 21
    assert stage.explore_steps == 10  # 42 tasks in steps of 4
    assert stage.experiences == 320
    assert stage.train_steps == 8


def test_total_steps_limit_both_sides(tasks: str) -> None:
    source = grpo()
    source["buffer"]["explorer_input"]["taskset"]["path"] = tasks
    (stage,) = make_plan(config(source, "buffer.total_steps=9", "trainer.total_steps=3")).stages
    assert (stage.explore_steps, stage.experiences, stage.train_steps) == (3, 96, 3)


def test_unknown_sizes_are_not_guessed() -> None:
    source = grpo()
    source["buffer"]["explorer_input"]["taskset"]["path"] = "openai/gsm8k"
    plan = make_plan(config(source, "trainer.total_steps=3"))
    (stage,) = plan.stages
    assert (stage.num_tasks, stage.explore_steps, stage.experiences, stage.train_steps) == (None, None, None, None)
    assert plan.render().count("known when the dataset is read") == 4
    assert "at most 3, known when the dataset is read" in plan.render()


def test_sft_steps_are_whole_batches_of_all_epochs(tasks: str) -> None:
    loaded = config(sft(), f"buffer.trainer_input.experience_buffer.path={tasks}", "buffer.total_epochs=3")
    (stage,) = make_plan(loaded).stages
    assert (stage.num_tasks, stage.train_steps) == (21, 15)
    assert [role.name for role in stage.roles] == ["trainer"]


def test_a_run_with_only_a_trainer_reads_until_the_log_ends() -> None:
    plan = make_plan(config(grpo(mode="train")))
    assert plan.stages[0].train_steps is None
    assert "until the experience log ends" in plan.render()
    bounded = make_plan(config(grpo(mode="train"), "trainer.total_steps=5"))
    assert "train steps  at most 5, until the experience log ends" in bounded.render()


def test_the_rendered_plan_reads_well() -> None:
    source = grpo(name="demo", checkpoint_root_dir="/data")
    source["buffer"]["explorer_input"] = {
        "taskset": {"path": "reasoning-gym:basic_arithmetic", "dataset_args": {"size": 40}},
        "eval_tasksets": [{"name": "held_out", "path": "reasoning-gym:basic_arithmetic", "repeat_times": 4}],
    }
    assert make_plan(config(source, "explorer.rollout_model.engine_num=2")).render() == (
        "stage            demo\n"
        "mode             both\n"
        "algorithm        grpo\n"
        "folder           /data/rftdask/demo\n"
        "explorer         2 x transformers engine, auto, tiny\n"
        "trainer          1 x torch rank, tiny, with a frozen reference model unless its coefficient is 0\n"
        "synchronizer     1 x fixed; intervals: explorer 1, trainer 1; offset 0\n"
        "weights          checkpoint: files of the run, since the run is in a folder\n"
        "tasks per epoch  40\n"
        "explore steps    10\n"
        "experiences      320\n"
        "train batch      32 experiences = 4 groups\n"
        "train steps      10\n"
        "eval held_out    1000 tasks x 4 rollouts\n"
        "eval interval    100 explore steps"
    )


S3, SLURM = "checkpoint_root_dir=s3://bucket/runs", "cluster={type: slurm, node_num: 2, gpu_per_node: 8}"
TINKER = "model.tinker.enable=true"
EVALUATED = (
    "mode=train",
    "algorithm.algorithm_type=sft",
    "buffer.trainer_input.experience_buffer.path=pairs.jsonl",
    "buffer.explorer_input={taskset: null, eval_tasksets: [{path: e.jsonl}]}",
)
MEMORY_CHOSEN, NCCL_CHOSEN = "synchronizer.sync_method=memory", "synchronizer.sync_method=nccl"
FILES, MEMORY = "checkpoint: files of the run, since", "held in /dev/shm"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], f"{FILES} the run is in a folder"),
        (["checkpoint_root_dir=file:///data"], f"{FILES} the run is in a folder"),
        ([SLURM], f"{FILES} the run is in a folder"),
        ([S3], f"memory: {MEMORY}, since one machine runs on an object store"),
        ([S3, "synchronizer.full_publish_interval=20"], f"{FILES} deltas are files (full_publish_interval 20)"),
        ([S3, SLURM], f"{FILES} a slurm cluster may be several machines"),
        ([S3, TINKER], f"{FILES} the service keeps them, and files name them"),
        ([S3, "synchronizer.sync_method=checkpoint"], f"{FILES} sync_method says so"),
        ([MEMORY_CHOSEN], f"memory: {MEMORY}, since sync_method says so"),
        ([NCCL_CHOSEN], f"nccl: {MEMORY}, as by memory on one machine, since sync_method says so"),
        ([SLURM, MEMORY_CHOSEN], f"memory: {MEMORY}, by Dask between machines, since sync_method says so"),
        ([SLURM, NCCL_CHOSEN], f"nccl: {MEMORY}, by gloo between machines, since sync_method says so"),
        ([*EVALUATED, S3], f"memory: {MEMORY}, since one machine runs on an object store"),
    ],
)
def test_the_plan_names_the_weight_transport_and_its_reason(overrides: list[str], said: str) -> None:
    loaded = config(grpo(), *overrides)
    (stage,) = make_plan(loaded).stages
    assert stage.weights == said
    line = next(line for line in make_plan(loaded).render().splitlines() if line.startswith("weights "))
    assert line.endswith(f"  {said}") and len(line) <= 100
    assert not [warning for warning in loaded.warnings if "sync_method" in warning]


@pytest.mark.parametrize("mode", ["explore", "train"])
@pytest.mark.parametrize("chosen", [MEMORY_CHOSEN, NCCL_CHOSEN])
def test_an_unused_sync_method_gives_a_warning(mode: str, chosen: str) -> None:
    loaded = config(grpo(mode=mode), S3, chosen)
    (stage,) = make_plan(loaded).stages
    why = f"mode {mode} has only one role"
    assert stage.weights == f"{FILES} {why}"
    key, _, method = chosen.partition("=")
    assert loaded.warnings == (f"{key}: {method} is not used: {why}, so weights go through files",)


@pytest.mark.parametrize(
    "loaded", [config(sft()), config(grpo(mode="bench"), "buffer.explorer_input.eval_tasksets=[{path: e.jsonl}]")]
)
def test_the_plan_has_no_transport_without_a_following_engine(loaded: Config) -> None:
    assert make_plan(loaded).stages[0].weights is None


def test_tasks_next_to_a_dataset_are_planned_by_train_steps() -> None:
    tasks = "buffer.explorer_input.eval_tasksets=[{path: e.jsonl}]"
    plan = make_plan(config(sft(), tasks, "trainer.eval_interval=5"))
    assert [role.name for role in plan.stages[0].roles] == ["explorer", "trainer"]
    assert "eval interval        5 train steps" in plan.render()
    assert "eval interval        before the first step and after the last" in make_plan(config(sft(), tasks)).render()


def test_the_trainer_has_its_name_in_the_plan() -> None:
    roles = make_plan(config(grpo(), "trainer.name=learner")).stages[0].roles
    assert [role.name for role in roles] == ["explorer", "learner", "synchronizer"]


def test_the_plan_lists_auxiliary_models_with_their_place() -> None:
    models = (
        "explorer.auxiliary_models=[{name: judge, model_path: j, engine_type: vllm, tensor_parallel_size: 2}, "
        "{name: far, model_path: gpt, engine_type: external}]"
    )
    said = make_plan(config(grpo(), models, "explorer.rollout_model.engine_num=3")).render()
    assert "judge            3 x vllm engine over 2 GPUs, j, with the policy in each explorer worker" in said
    assert "far              1 x gpt, behind an API" in said


def test_every_stage_is_planned() -> None:
    plan = make_plan(config(grpo(stages=[{"stage_name": "a"}, {"stage_name": "b", "mode": "explore"}])))
    assert [(stage.config.name, stage.config.mode) for stage in plan.stages] == [
        ("rft/a", "both"),
        ("rft/b", "explore"),
    ]
    assert [role.name for role in plan.stages[1].roles] == ["explorer"]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}', 2),
        ("a.json", '[{"a": 1}, {"a": 2}, {"a": 3}]', 3),
        ("a.json", '{"a": 1}\n{"a": 2}\n', 2),
        ("a.csv", 'a,b\n1,"two\nlines"\n3,4\n', 2),
        ("a.txt", "x\n", None),
        ("a.json", "[1,", None),
    ],
)
def test_rows_of_local_files_are_counted(tmp_path: Path, name: str, text: str, rows: int | None) -> None:
    (tmp_path / name).write_text(text)
    assert count_rows(str(tmp_path / name), "train", {}) == rows


def test_rows_of_parquet_come_from_its_footer(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": list(range(7))}), tmp_path / "a.parquet")
    assert count_rows(str(tmp_path / "a.parquet"), "train", {}) == 7
    (tmp_path / "b.parquet").write_bytes(b"not parquet")
    assert count_rows(str(tmp_path / "b.parquet"), "train", {}) is None


def test_a_folder_counts_the_files_of_the_split(tmp_path: Path) -> None:
    (tmp_path / "train-0.jsonl").write_text("{}\n{}\n")
    (tmp_path / "train-1.jsonl").write_text("{}\n")
    (tmp_path / "test.jsonl").write_text("{}\n")
    assert count_rows(str(tmp_path), "train", {}) == 3
    assert count_rows(str(tmp_path), "test", {}) == 1
    assert count_rows(str(tmp_path / "absent"), "train", {}) is None
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard/train.jsonl").write_text("{}\n" * 5)
    assert count_rows(str(tmp_path), "train", {}, "hard") == 5
    assert count_rows(str(tmp_path), "train", {}, "easy") is None
    assert count_rows(str(tmp_path / "test.jsonl"), "train", {}, "hard") == 1  # a file has no subsets
