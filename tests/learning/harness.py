"""A complete run in one process, with the package's engine, workflows, batches and trainer but without Dask, so that a
toy run takes seconds and shows what an algorithm learns.

    run = Run(tree, (), folder)     # a configuration, as of any run
    before = run.rollouts()         # of the current policy
    steps = run.train()             # to the last step: the metrics of all steps
    after = run.rollouts()

`Run.explore` replaces the driver: before a batch is requested, it rolls out the explore steps of the batch with the
weights that the synchronization rules select. Everything else is the code of real runs.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from rftdask.algorithm.compose import build_algorithm
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.buffer.batches.source import BatchSource
from rftdask.buffer.log import open_log
from rftdask.buffer.log.schema import Experience
from rftdask.config import load_config
from rftdask.data.task import Task
from rftdask.data.tasksets import Taskset
from rftdask.data.tokenizer import load_tokenizer
from rftdask.engines.base import GenerateRequest, Generation
from rftdask.engines.spec import sampling_params
from rftdask.engines.transformers import TransformersEngine
from rftdask.explorer.task_order import make_task_order
from rftdask.monitor.metrics import MetricsWriter, read_metrics
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published, read_checkpoint_weights, read_published
from rftdask.synchronizer.styles import make_sync_rules
from rftdask.trainer.rank import build_trainer

_PUBLISHED_S = 60.0
"""Seconds to wait for weights that the trainer has started to write."""


class Run:
    """A run in a subfolder of `folder`. `engine` is the policy that rolls out, `tokenizer` its tokenizer."""

    def __init__(self, tree: dict[str, Any], settings: Sequence[str], folder: Path) -> None:
        """settings: KEY=VALUE, which override those of the tree."""
        torch.set_num_threads(1)
        self.config = config = load_config({**tree, "checkpoint_root_dir": str(folder)}, settings)
        self.storage = open_storage(config.checkpoint_job_dir)
        self.engine = TransformersEngine.from_config(config.explorer.rollout_model, config.model, "cpu")
        if config.algorithm.enable_router_replay:
            self.engine.record_experts()
        self.tokenizer = load_tokenizer(config)
        self._weights = Published(0, "", "")
        self._learns_from_rollouts = config.algorithm.schema_type == "experience"
        source = config.buffer.explorer_input
        self._sections = (*source.train_tasksets, *source.eval_tasksets)
        self._tasksets = {taskset.name: Taskset(taskset) for taskset in self._sections}
        self._train_names = [taskset.name for taskset in source.train_tasksets]
        self._eval_names = [taskset.name for taskset in source.eval_tasksets]
        self._explored = 0
        self._num_looked = 0
        if self._learns_from_rollouts:
            self._rules = make_sync_rules(config)
            self._log = open_log(self.storage, config)
            sizes = {name: len(self._tasksets[name]) for name in self._train_names}
            self._order = make_task_order(self.storage, self._log, config, sizes)

    def train(self) -> pd.DataFrame:
        """Train to `trainer.total_steps`. Returns the metrics of each step. The engine then has the last weights."""
        try:
            with MetricsWriter(self.storage, "trainer") as metrics:
                trainer = build_trainer(
                    self.config, self.storage, self.config.trainer.total_steps, metrics, lambda event: None
                )
                if self._learns_from_rollouts:
                    trainer.source = _Exploring(trainer.source, self.explore)
                ended = trainer.run()
        finally:
            torch.use_deterministic_algorithms(False)
        if not build_algorithm(self.config).policy_loss_fn.scores_sequences:  # a reward model generates nothing
            self._serve(ended.step)
        return read_metrics(self.storage, "trainer").sort_values("step", ignore_index=True)

    def rollouts(self, repeat_times: int = 16) -> list[Experience]:
        """Roll out the tasks of the evaluation with the current policy, without logging them."""
        tasks = [self._tasksets[name].task(0, i) for name in self._eval_names for i in range(len(self._tasksets[name]))]
        return self._roll_out(tasks, repeat_times, explore_step=0)

    def logprob(self, prompt: str, response: str) -> float:
        """Return the log-probability under the current policy of the whole `response` after `prompt`."""
        asked, said = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in (prompt, response))
        return sum(self.engine.logprobs([(asked, said)])[0])

    def explore(self, step: int) -> None:
        """Commit the explore steps of the batch of optimizer step `step` unless they exist."""
        size = self.config.tasks_per_unit
        while self._explored < self._rules.explore_steps_for(step):
            self._explored += 1
            refs = self._order(self._explored, self._explored - 1)
            assert refs is not None
            tasks = [self._tasksets[self._train_names[ref.taskset_number]].task(ref.epoch, ref.index) for ref in refs]
            self._serve(self._rules.weights_for(self._explored).version)
            for unit, first in enumerate(range(0, len(tasks), size)):
                algorithm = self.config.algorithm
                rows = self._roll_out(
                    tasks[first : first + size], algorithm.repeat_times, self._explored, algorithm.greedy_baseline
                )
                self._log.commit(rows, explore_step=self._explored, unit=unit)

    def _roll_out(
        self, tasks: Sequence[Task], repeat_times: int, explore_step: int, greedy_baseline: bool = False
    ) -> list[Experience]:
        async def generate(requests: list[GenerateRequest]) -> list[Generation]:
            return self.engine.generate(requests)

        unit = run_work_unit(
            tasks,
            repeat_times=repeat_times,
            greedy_baseline=greedy_baseline,
            explore_step=explore_step,
            policy=TextEngine(generate, self.tokenizer),
            explorer=self.config.explorer,
            model=self.config.model,
            sampling={each.name: sampling_params(each, self.config, max(1, explore_step)) for each in self._sections},
            weights=self._weights,
        )
        # Not asyncio.run, which takes over SIGINT for each unit and formats everything that the unit returned.
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(unit).experiences

    def _serve(self, version: int) -> None:
        """Load the weights that the trainer published, or saved if it publishes none."""
        if version == self._weights.version:
            return
        published, deadline = None, time.monotonic() + _PUBLISHED_S
        while published is None and time.monotonic() < deadline:  # the trainer writes them during its next steps
            published = read_published(self.storage, version)
            published = published or read_checkpoint_weights(self.storage, f"global_step_{version}")
            time.sleep(0.0 if published is not None else 0.01)
        assert published is not None, f"version {version} is not there"
        with ExitStack() as copies:
            paths = [f"{published.folder}/{name}" for name, _ in published.files]
            files = [copies.enter_context(self.storage.local_copy(path)) for path in paths]
            self.engine.load_verified(version, files, published.fingerprint)
        self._weights = published


class _Exploring(BatchSource):
    """The trainer's source, which rolls out the rollouts of an entry before it returns the entry."""

    def __init__(self, source: BatchSource, explore: Callable[[int], None]) -> None:
        self._source, self._explore = source, explore

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        self._explore(step)
        return self._source.entry(step, patience_s)

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        return self._source.read(entry, places)

    def state_dict(self) -> dict[str, object]:
        return self._source.state_dict()
