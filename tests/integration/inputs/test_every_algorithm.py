"""Promise: every algorithm type trains when its section names only the type, given its inputs: two steps of the
trainer's rank, in this process, on a tiny model's own rollouts.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.config.schema.algorithm import AlgorithmConfig, registered_parts
from rftdask.data.tokenizer import load_tokenizer
from rftdask.driver.preflight import check_inputs
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_model
from rftdask.monitor.events import Ended
from rftdask.monitor.metrics import MetricsWriter, read_metrics
from rftdask.reports.metric_table import explain
from rftdask.storage import Storage, open_storage
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import checkpoint_steps
from rftdask.trainer.rank import build_trainer
from tests.integration.run_cases import BATCH_SIZE as NUM_TASKS
from tests.integration.run_cases import assert_sound, finish, run_folder

BATCH_SIZE = 2
STEPS = 2
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class World:
    """A tiny model, a teacher, and datasets of every kind."""

    folder: Path
    engine: TransformersEngine

    def config(self, name: str, *overrides: str, run: str = "") -> Config:
        tree: dict[str, Any] = {
            "name": run or name,
            "mode": "train",
            "checkpoint_root_dir": str(self.folder / "runs"),
            "model": {"model_path": str(self.folder / "model"), "max_prompt_tokens": 16, "max_response_tokens": 4},
            "algorithm": {"algorithm_type": name},
            "buffer": {"batch_size": BATCH_SIZE, "trainer_input": {"experience_buffer": {}, "auxiliary_buffers": {}}},
            "trainer": {"total_steps": STEPS},
        }
        raw = {"prompt_type": "raw"}
        section = AlgorithmConfig(algorithm_type=name)
        if section.schema_type != "experience":
            buffer = {"path": str(self.folder / f"{section.schema_type}.jsonl"), "format": raw}
            tree["buffer"]["trainer_input"]["experience_buffer"] = buffer
        if section.usual_sample_strategy == "mix":
            shown = {"shown": {"path": str(self.folder / "sft.jsonl"), "format": raw}}
            tree["buffer"]["trainer_input"]["auxiliary_buffers"] = shown
        if name in ("on_policy_distill", "jsd"):
            tree["explorer"] = {"auxiliary_models": [{"model_path": str(self.folder / "teacher")}]}
        assert tree["algorithm"] == {"algorithm_type": name}
        return load_config(tree, overrides)

    def with_explorer(self, name: str) -> Config:
        """The same run with its own explorers instead of a finished log."""
        taskset = {"path": str(self.folder / "sft.jsonl"), "format": {"prompt_type": "raw"}}
        return self.config(name, "mode=both", f"buffer.explorer_input.taskset={json.dumps(taskset)}")

    def explore(self, config: Config, storage: Storage, flat: bool = False) -> None:
        """Roll out all steps with the initial weights; every second rollout of a task is right, or all (`flat`)."""
        tokenizer = load_tokenizer(config)
        log = ParquetLog(storage)
        repeat_times = config.algorithm.repeat_times
        for step in range(1, STEPS + 1):
            keys = [
                (task, k) for task in range(BATCH_SIZE) for k in range(repeat_times + config.algorithm.greedy_baseline)
            ]
            prompts = [tuple(tokenizer.encode(f"{10 * step + task}+1=", add_special_tokens=False)) for task, _ in keys]
            requests = [
                GenerateRequest(p, SamplingParams(4, temperature=float(k < repeat_times)), seed=100 * step + i)
                for i, (p, (_, k)) in enumerate(zip(prompts, keys, strict=True))
            ]
            rows = [
                Experience(
                    taskset="t",
                    epoch=0,
                    task_index=step * BATCH_SIZE + task,
                    rollout=k,
                    explore_step=step,
                    tokens=(*request.prompt_tokens, *answer.tokens),
                    prompt_length=len(request.prompt_tokens),
                    rollout_logprobs=answer.logprobs,
                    reward=float(flat or (task + k) % 2),
                    metrics={"length": float(len(answer.tokens))},
                    temperature=request.sampling.temperature,
                )
                for (task, k), request, answer in zip(keys, requests, self.engine.generate(requests), strict=True)
            ]
            log.commit(rows, explore_step=step, unit=0)
        log.seal(STEPS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("algorithms")
    build_toy_model(folder / "model", **SIZES)
    build_toy_model(folder / "teacher", seed=1, **SIZES)
    rows = {
        "sft": [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(10, 18)],
        "dpo": [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 11)} for i in range(10, 18)],
        "kto": [{"prompt": f"{i}+1=", "response": str(i + 1 + i % 2), "label": i % 2 == 0} for i in range(10, 18)],
        "cpt": [{"prompt": f"{i} and 1 are {i + 1}"} for i in range(10, 18)],
    }
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    yield World(folder, TransformersEngine(str(folder / "model")))
    torch.use_deterministic_algorithms(False)


def train(world: World, config: Config, *, flat: bool = False, stops: tuple[int, ...] = (STEPS,)) -> Storage:
    """Train all steps and return the run folder. `stops`: steps at which a trainer ends and another one takes over."""
    check_inputs([config])
    storage = open_storage(config.checkpoint_job_dir)
    if config.algorithm.schema_type == "experience":
        world.explore(config, storage, flat)
    for stop in stops:
        with MetricsWriter(storage, "trainer") as metrics:
            ended = build_trainer(config, storage, stop, metrics, lambda event: None).run()
        assert ended == Ended(stop, stopped=False)
    return storage


def weights(storage: Storage) -> bytes:
    return storage.get(f"global_step_{STEPS}/actor/model.safetensors")


def entry(storage: Storage, step: int = 1) -> LedgerEntry:
    recorded = Ledger(storage).read(step)
    assert recorded is not None
    return recorded


@pytest.mark.parametrize("name", sorted(registered_parts("algorithm_type")))
def test_every_algorithm_trains_with_nothing_but_its_name(world: World, name: str) -> None:
    config = world.config(name)
    storage = train(world, config)
    assert checkpoint_steps(storage) == [STEPS]
    assert weights(storage) != (world.folder / "model" / "model.safetensors").read_bytes()
    frame = read_metrics(storage, "trainer")
    assert sorted(frame["step"]) == [1, 2]
    assert frame.drop(columns=[c for c in frame if frame[c].dtype == object]).notna().all().all()
    assert {c for c in frame if frame[c].dtype == float and explain(c) is None} <= {"time_s"}
    assert (frame["grad_norm"] > 0).any()
    if config.algorithm.schema_type == "experience":
        audit = audit_log(ParquetLog(storage), Ledger(storage), BATCH_SIZE)
        assert (audit.problems, audit.waiting) == ((), 0)
        num_rollouts = STEPS * BATCH_SIZE * config.algorithm.repeat_times
        assert audit.trained + audit.dropped.get("not_best", 0) == num_rollouts
        if name == "raft":
            assert audit.trained == STEPS * BATCH_SIZE, "the best of each task"
        check_inputs([world.with_explorer(name)])


@pytest.mark.parametrize("name", ["ppo", "dpo", "kto", "reward_model", "mix", "remax", "rec"])
def test_a_trainer_that_takes_over_ends_with_the_same_weights(world: World, name: str) -> None:
    drops = ("algorithm.advantage_fn_args={drop: balance}",) if name == "rec" else ()
    whole = train(world, world.config(name, *drops, run=f"{name}-whole"))
    parts = train(world, world.config(name, *drops, run=f"{name}-parts"), stops=(1, STEPS))
    assert weights(whole) == weights(parts)


def test_an_empty_step_changes_no_weights_and_is_counted(world: World) -> None:
    storage = train(world, world.config("dapo", run="flat"), flat=True)
    assert weights(storage) == (world.folder / "model" / "model.safetensors").read_bytes()
    audit = audit_log(ParquetLog(storage), Ledger(storage), BATCH_SIZE)
    assert (audit.trained, audit.waiting, audit.problems) == (0, 0, ())
    assert audit.dropped == {"low_std": STEPS * BATCH_SIZE * 16}
    assert read_metrics(storage, "trainer")["num_dropped_low_std"].tolist() == [32.0, 32.0]


def test_a_greedy_baseline_is_in_the_ledger_and_not_trained(world: World) -> None:
    storage = train(world, world.config("remax", "algorithm.repeat_times=2", run="greedy"))
    assert [(rows.rows, rows.reason) for rows in entry(storage).drop] == [((2,), "baseline"), ((5,), "baseline")]
    assert [rows.rows for rows in entry(storage).use] == [(0, 1), (3, 4)]


def test_demonstrations_are_in_the_ledger_with_the_rollouts(world: World) -> None:
    storage = train(world, world.config("mix", run="shown"))
    shown = entry(storage, 2).use[-1]
    assert shown.source.startswith("dataset:")
    assert len(shown.rows) == sum(len(rows.rows) for rows in entry(storage, 2).use[:-1]) == 16


@pytest.mark.parametrize("name", sorted(registered_parts("advantage_fn")))
def test_every_advantage_function_trains_where_it_fits(world: World, name: str) -> None:
    fitting = {"ppo": "ppo", "remax": "remax", "on_policy_distill": "on_policy_distill"}.get(name, "grpo")
    storage = train(world, world.config(fitting, f"algorithm.advantage_fn={name}", run=f"by-{name}"))
    frame = read_metrics(storage, "trainer")
    assert (frame["grad_norm"] > 0).any()
    if name in ("clipb", "clipv"):
        assert frame["token_filter_frac"].between(0.0, 0.5).all()


@pytest.mark.parametrize(("strategy", "is_apart"), [("unrestricted", True), ("single_thread", False)])
def test_checkpoints_are_written_and_kept_as_configured(world: World, strategy: str, is_apart: bool) -> None:
    keys = ("save_interval=1", "max_checkpoints_to_keep=1", f"save_strategy={strategy}")
    config = world.config("reinforceplusplus", *(f"trainer.{key}" for key in keys), run=f"saved-{strategy}")
    writers: dict[str, bool] = {}

    def note(verb: str, path: str, stage: str) -> None:
        if verb == "put" and path.endswith("actor/model.safetensors"):
            writers[path] = threading.current_thread() is not threading.main_thread()

    storage = FaultyStorage(open_storage(config.checkpoint_job_dir), note)
    world.explore(config, storage)
    with MetricsWriter(storage, "trainer") as metrics:
        build_trainer(config, storage, STEPS, metrics, lambda event: None).run()
    assert writers == {f"global_step_{step}/actor/model.safetensors": is_apart for step in (1, 2)}
    assert checkpoint_steps(storage) == [2]


def test_operators_of_the_config_drop_and_shape(world: World) -> None:
    shaping = "{reward_shaping_configs: [{stats_key: length, op_type: MUL, weight: 10.0}]}"
    operators = f"[{{name: reward_shaping_mapper, args: {shaping}}}, {{name: reward_filter, args: {{threshold: 5}}}}]"
    config = world.config("topr", f"data_processor.experience_pipeline.operators={operators}", run="shaped")
    storage = train(world, config)
    assert {rows.reason for rows in entry(storage).drop} == {"reward_range"}
    assert (read_metrics(storage, "trainer")["reward"] >= 10.0).all()
    assert (read_metrics(storage, "trainer")["num_rows"] == BATCH_SIZE * 8 / 2).all()


def test_the_explorer_makes_the_greedy_baselines(config: Path) -> None:
    finish(config, "algorithm.algorithm_type=remax", "trainer.total_steps=2")
    status = assert_sound(run_folder(config))
    assert status["experiences"].get("baseline") == 2 * NUM_TASKS, status["experiences"]
