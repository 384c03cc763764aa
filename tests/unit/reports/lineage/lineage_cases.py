"""A run of two optimizer steps with known files, created by the classes of real runs.

explore step 1, batch 0, writer aaa...   tasks 0 and 1, policy version 0    trained in step 1
explore step 1, batch 0, writer bbb...   the same again, on another worker  repeats
explore step 1, batch 1, writer aaa...   tasks 2 and 3, policy version 0    trained in step 2, the last row failed
explore step 2, batch 0, writer aaa...   tasks 4 and 5, policy version 1    waiting; the last row names other weights
"""

import itertools
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status, Turn
from rftdask.buffer.log.shard import ShardName
from rftdask.config import Config, load_config
from rftdask.monitor.metrics import MetricsWriter
from rftdask.run.run_folder import open_run
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.manifest import Manifest, write_folder
from tests.unit.synchronizer.sync_cases import publish_weights

EVIL = "<script>alert('x')</script>\x1b[2J\u202e"
"""Possible model text: markup, terminal codes, a change of text direction."""


@dataclass(frozen=True)
class Case:
    url: str
    storage: Storage
    config: Config
    taken: ShardName
    """Shard of tasks 0 and 1."""
    repeated: ShardName
    second: ShardName
    """Tasks 2 and 3."""
    waiting: ShardName
    """Tasks 4 and 5."""


def make_config(root: str, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "project": "p",
        "name": "run",
        "checkpoint_root_dir": root,
        "model": {"model_path": "tiny", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "explorer": {"tasks_per_batch": 2, "rollout_model": {"engine_type": "fake"}},
        "buffer": {"batch_size": 4, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
    }
    return load_config({**tree, **sections})


def new_root(kind: str, folder: Path) -> str:
    return str(folder) if kind == "local" else f"memory://lineage-{uuid.uuid4().hex}"


def experience(task: int, rollout: int, **fields: Any) -> Experience:
    """Two rollouts with prompt "?" and two response tokens; the second has reward 1."""
    values: dict[str, Any] = {
        "taskset": "sums",
        "epoch": 0,
        "task_index": task,
        "rollout": rollout,
        "explore_step": 1,
        "tokens": (63, 65 + task, 48 + rollout),
        "prompt_length": 1,
        "rollout_logprobs": (-0.5, -2.5),
        "reward": float(rollout),
        "prompt_text": "?",
        "response_text": f"{chr(65 + task)}{rollout}",
        "truth": "A1",
        "weights_hash": "0123456789abcdef",
        "seed": 7,
    }
    return Experience(**{**values, **fields})


def group(task: int, **fields: Any) -> list[Experience]:
    return [experience(task, rollout, **fields) for rollout in range(2)]


def conversation(task: int) -> Experience:
    """Two turns, "Hi" and "4", with tokens of a tool and the template in between."""
    tokens = (63, *b"Hi", *b"<2+2=4>", *b"4")
    return experience(
        task,
        0,
        explore_step=3,
        tokens=tokens,
        rollout_logprobs=(-0.5, -0.5, *(0.0,) * 7, -2.0),
        loss_mask=(True, True, *(False,) * 7, True),
        response_text="Hi<2+2=4>4",
        turns=(Turn(0, 0, 2, 0, 2, "user", 7), Turn(1, 9, 10, 9, 10, "tool", 8)),
    )


def make_run(root: str, config: Config | None = None) -> Case:
    config = config or make_config(root)
    url = config.checkpoint_job_dir
    storage = open_storage(url)
    open_run(storage, config)
    log, again = ParquetLog(storage), ParquetLog(storage)
    log.writer, again.writer = "a" * 12, "b" * 12
    taken = log.commit([*group(0), *group(1)], explore_step=1, unit=0)
    repeated = again.commit([*group(0), *group(1, attempt=1)], explore_step=1, unit=0)
    failed = experience(
        3, 1, status=Status.FAILED, reward=None, tokens=(), prompt_length=0, rollout_logprobs=(), response_text="",
        error="ValueError: no number",
    )  # fmt: skip
    evil = experience(3, 0, response_text=EVIL, loss_mask=(True, False))
    second = log.commit([*group(2), evil, failed], explore_step=1, unit=1)
    first_hash = publish_weights(storage, 1, b"weights one").content_hash
    publish_weights(storage, 2, b"weights two")
    versions = {"explore_step": 2, "min_policy_version": 1, "max_policy_version": 1}
    rows = [*group(4, weights_hash=first_hash, **versions), experience(5, 0, weights_hash=first_hash, **versions)]
    waiting = log.commit([*rows, experience(5, 1, weights_hash="f" * 16, **versions)], explore_step=2, unit=0)
    ledger = Ledger(storage)
    ledger.write(LedgerEntry(1, "main", (Rows(taken.text, (0, 1, 2, 3)),), positions=((1, 0), (1, 1))))
    use, drop = Rows(second.text, (0, 1, 2)), Rows(second.text, (3,), "failed")
    ledger.write(LedgerEntry(2, "main", (use,), (drop,), positions=((1, 2), (1, 3))))
    files = {"actor/model.safetensors": b"weights two", "trainer_state.json": b"{}"}
    write_folder(storage, "global_step_2", Manifest("main", 2, {}), files)
    _write_metrics(storage)
    return Case(url, storage, config, taken, repeated, second, waiting)


def _write_metrics(storage: Storage) -> None:
    times = itertools.count(1000)
    with MetricsWriter(storage, "trainer", clock=lambda: float(next(times))) as trainer:
        trainer.write(1, {"loss": 0.5, "reward": 0.5, "dropped/total": 0})
        trainer.write(2, {"loss": 0.25, "reward": 1 / 3, "dropped/total": 1})
    with MetricsWriter(storage, "eval", clock=lambda: float(next(times))) as evals:
        evals.write(0, {"accuracy": 0.1, "reward": 0.1}, taskset="held_out")
        evals.write(2, {"accuracy": 0.9, "reward": 0.9}, taskset="held_out")
