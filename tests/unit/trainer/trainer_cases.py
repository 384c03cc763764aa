"""A trainer without a model, over an experience log in memory: what the tests of the loop and of checkpoints share."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.selection import SampleRule
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.config.schema.model import LoraConfig
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.monitor.events import Event
from rftdask.storage import Storage, open_storage
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.trainer import Trainer
from tests.numerics import shifted_seed

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}
"""Arguments of `build_toy_model`."""
_numbers = itertools.count()


def new_storage() -> Storage:
    return open_storage(f"memory://trainer-{next(_numbers)}")


def fill_log(storage: Storage, steps: int, *, first: int = 1, is_finished: bool = True) -> None:
    """A finished log: one task of two rollouts in each explore step, one batch for each."""
    log = ParquetLog(storage)
    for step in range(first, steps + 1):
        rows = [
            Experience(
                *("t", 0, step, k, step),
                tokens=(1, step, k),
                prompt_length=1,
                rollout_logprobs=(-1.0, -2.0),
                reward=float(k),
            )
            for k in (0, 1)
        ]
        log.commit(rows, explore_step=step, unit=0)
    if is_finished:
        log.seal(steps)


def rollouts(num_groups: int = 3, size: int = 4, seed: int = 0) -> TrainingBatch:
    """Random rollouts of three to six tokens, two prompt tokens each."""
    random = np.random.default_rng(shifted_seed(seed))
    rows = [(random.integers(2, 200, 2 + random.integers(3, 7)).tolist(), 2, None) for _ in range(num_groups * size)]
    batch = supervised_batch(rows, [f"t/0/{i // size}/{i % size}/0" for i in range(len(rows))], size)
    return replace(
        batch,
        rewards=random.random(len(batch)).astype(np.float32),
        rollout_logprobs=-5.0 - random.random(len(batch.rollout_logprobs)).astype(np.float32),
        experts=np.zeros(len(batch), bool),
        baselines=random.random(len(batch)).astype(np.float32),
    )


def engine_config(model: Path | str, lora: LoraConfig | None = None, **overrides: Any) -> Config:
    """A configuration of which a train engine on `model` reads all it needs; overrides: "trainer__grad_clip" and so on,
    where the underscores are a dot."""
    tree: dict[str, Any] = {
        "mode": "train",
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 6},
        "buffer": {"batch_size": 4},
        "algorithm": {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}},
        "trainer": {"max_token_len_per_gpu": 1000, "critic": {"lr": 1e-2}},
        "seed": 0,
    }
    if lora is not None:
        tree["model"]["lora_configs"] = [lora.model_dump(exclude_defaults=True)]
    return load_config(tree, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()])


class Sink:
    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.num_flushed = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, metrics))

    def flush(self) -> None:
        self.num_flushed = len(self.rows)


def source_of(
    storage: Storage, lineage: str = "main", timeout_s: float = 0.0, kind: type[LogSource] = LogSource
) -> LogSource:
    """Batches of one group each."""
    rule = SampleRule(groups_per_batch=1, tasks_per_step=1, ordered=True)
    ledger = Ledger(storage, lineage)
    return kind(ParquetLog(storage), ledger, rule, tasks_per_unit=1, max_read_timeout_s=timeout_s)


def make_trainer(
    storage: Storage,
    *,
    events: list[Event] | None = None,
    sink: Sink | None = None,
    keep: int = 0,
    lineage: str = "main",
    **options: Any,
) -> Trainer:
    """A new process' trainer; its defaults: to the end of the log, a checkpoint every 2 steps.

    options: fields of Trainer and of its section.
    """
    section = {name: options.pop(name) for name in [*options] if name not in Trainer.__dataclass_fields__}
    defaults: dict[str, Any] = {
        "engine": FakeTrainEngine(),
        "source": source_of(storage, lineage),
        "checkpoints": Checkpoints(storage, lineage, keep),
        "total_steps": None,
        "publish_due": lambda step, published: True,
        "should_stop": lambda: False,
    }
    return Trainer(
        storage=storage,
        metrics=sink or Sink(),
        section=TrainerConfig(**{"save_interval": 2, **section}),
        lineage=lineage,
        emit=(events if events is not None else []).append,
        **{**defaults, **options},
    )
