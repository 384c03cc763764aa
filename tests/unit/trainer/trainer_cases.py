"""A trainer without a model, over an experience log in memory: what the tests of the loop and of checkpoints share."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.selection import SampleRule
from rftdask.buffer.batches.source import BatchSource
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.config.schema.model import LoraConfig
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.monitor.events import Event
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.ranks import Ranks
from rftdask.trainer.trainer import Trainer

_numbers = itertools.count()


def new_storage() -> Storage:
    return open_storage(f"memory://trainer-{next(_numbers)}")


def fill_log(storage: Storage, steps: int, *, first: int = 1, is_finished: bool = True) -> None:
    """A finished log: one task of two rollouts in each explore step, one batch for each."""
    log = ParquetLog(storage)
    for step in range(first, steps + 1):
        rows = [
            Experience(
                "t",
                0,
                step,
                k,
                step,
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
    """Metrics in a list."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.num_flushed = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, metrics))

    def flush(self) -> None:
        self.num_flushed = len(self.rows)


def source_of(storage: Storage, lineage: str = "main") -> LogSource:
    """Batches of one group each."""
    rule = SampleRule(groups_per_batch=1, tasks_per_step=1, ordered=True)
    return LogSource(ParquetLog(storage), Ledger(storage, lineage), rule, tasks_per_unit=1, max_read_timeout_s=0.0)


def make_trainer(
    storage: Storage,
    *,
    events: list[Event] | None = None,
    sink: Sink | None = None,
    keep: int = 0,
    total_steps: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    publish_due: Callable[[int, int], bool] | None = lambda step, published: True,
    engine: FakeTrainEngine | None = None,
    source: BatchSource | None = None,
    checkpoints: Checkpoints | None = None,
    ranks: Ranks | None = None,
    readers: Ranks | None = None,
    full_publish_interval: int = 1,
    whole_requested: Callable[[int], bool] = lambda version: False,
    holder: InMemoryPublisher | None = None,
    lineage: str = "main",
    **section: Any,
) -> Trainer:
    """A new process' trainer; its defaults: to the end of the log, a checkpoint every 2 steps."""
    return Trainer(
        engine=engine or FakeTrainEngine(),
        source=source or source_of(storage, lineage),
        checkpoints=checkpoints or Checkpoints(storage, lineage, keep),
        storage=storage,
        metrics=sink or Sink(),
        section=TrainerConfig(**{"save_interval": 2, **section}),
        total_steps=total_steps,
        readers=readers,
        lineage=lineage,
        publish_due=publish_due,
        should_stop=should_stop,
        emit=(events if events is not None else []).append,
        ranks=ranks or Ranks(),
        full_publish_interval=full_publish_interval,
        whole_requested=whole_requested,
        holder=holder,
    )
