"""Rollouts in an environment, from the runner to the trainer."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import batch_from_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.data.seeds import derived_seed
from rftdask.data.task import Task
from rftdask.data.tokenizer import load_tokenizer
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.models.toy import build_toy_model
from rftdask.monitor.metrics import MetricsWriter, read_metrics
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published
from rftdask.trainer.engines.micro_batches import DeviceBatch
from rftdask.trainer.rank import build_trainer

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}
WALKS = {0: ("right", "right"), 1: ("right", "left", "left")}
"""Answers of the two rollouts on "S.G": the first reaches the goal, the second walks back and into the edge (-0.1)."""
# Episodes earn 1 and -0.1, mean 0.45. Returns from 0,0: 1, -0.1, -0.1, mean 0.8 / 3; from 0,1: 1 and -0.1, mean 0.45.
ADVANTAGES = [
    0.55 + (1.0 - 0.8 / 3),
    0.55 + (1.0 - 0.45),
    -0.55 + (-0.1 - 0.8 / 3),
    -0.55 + (-0.1 - 0.45),
    -0.55 + (-0.1 - 0.8 / 3),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    folder = tmp_path_factory.mktemp("steps")
    build_toy_model(folder / "model", **SIZES)
    tree: dict[str, Any] = {
        "name": "walks",
        "mode": "train",
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": str(folder / "model"), "max_prompt_tokens": 200, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "gigpo", "repeat_times": 2, "bypass_old_logprobs": False},
        "buffer": {"batch_size": 1},
        "trainer": {"total_steps": 1},
    }
    yield load_config(tree)
    torch.use_deterministic_algorithms(False)


def explore(config: Config, walks: dict[int, tuple[str, ...]] = WALKS) -> list[Experience]:
    """Roll out one task with the runner; the policy answers as `walks` lists."""
    tokenizer = load_tokenizer(config)
    task = Task("maps", 0, 0, prompt="S.G", workflow="grid_workflow", workflow_args={"max_turns": 3})
    says = {
        derived_seed(42, task.group_id, rollout, turn): word
        for rollout, words in walks.items()
        for turn, word in enumerate(words)
    }

    async def generate_batch(requests: list[GenerateRequest]) -> list[Generation]:
        tokens = [tuple(tokenizer.encode(says[request.seed], add_special_tokens=False)) for request in requests]
        return [Generation(words, (-5.0,) * len(words), "stop", 0, 0) for words in tokens]

    return asyncio.run(
        run_work_unit(
            [task],
            repeat_times=len(walks),
            explore_step=1,
            policy=TextEngine(generate_batch, tokenizer),
            explorer=config.explorer,
            model=config.model,
            sampling={"maps": SamplingParams(max_tokens=8)},
            weights=Published(0, "", "hash"),
        )
    ).experiences


def test_step_advantages_use_the_states_of_the_workflow(config: Config) -> None:
    log = ParquetLog(open_storage("memory://walks"))
    table = log.read(log.commit(explore(config), explore_step=1, unit=0))
    assert table.column("env_state").to_pylist() == ["at 0,0", "at 0,1", "at 0,0", "at 0,1", "at 0,0"]
    inputs = DeviceBatch(batch_from_table(table), torch.device("cpu")).advantage_inputs(1)

    def advantages(omega: float) -> list[float]:
        algorithm = make_algorithm("gigpo", advantage_fn_args={"omega": omega})
        result: list[float] = algorithm.compute_advantages(inputs).advantages_N.tolist()
        return result

    assert advantages(1.0) == pytest.approx(ADVANTAGES, abs=1e-5)
    assert advantages(0.0) == pytest.approx([0.55, 0.55, -0.55, -0.55, -0.55], abs=1e-5)


def test_the_trainer_trains_with_them(config: Config) -> None:
    storage = open_storage(config.checkpoint_job_dir)
    log = ParquetLog(storage)
    log.commit(explore(config), explore_step=1, unit=0)
    log.seal(1)
    with MetricsWriter(storage, "trainer") as metrics:
        build_trainer(config, storage, 1, metrics, lambda event: None).run()
    [row] = read_metrics(storage, "trainer").to_dict("records")
    # Before the first update every ratio is 1 and the KL to the reference 0, so the loss is the mean of the advantages.
    lengths = [len(word) for words in WALKS.values() for word in words]
    mean = sum(a * length for a, length in zip(ADVANTAGES, lengths, strict=True)) / sum(lengths)
    assert row["loss"] == pytest.approx(-mean, abs=1e-5)
    assert (row["num_anchors"], row["singleton_anchors"], row["num_rows"]) == (2.0, 0.0, 5.0)
    assert row["grad_norm"] > 0
