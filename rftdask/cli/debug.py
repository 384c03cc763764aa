"""Debug: the model of a configuration stays loaded, and one task is rolled out with it again and again.

Each round is a work unit as an explorer runs it, in a run folder of its own: what it gave is committed there, so
`rftdask view` and `rftdask trace` show it. Sandboxes are made anew in each round, with the files as they are by then;
what runs outside of them (`in_process`), and the arguments that functions take, stay as they were at the first round.
There is no cluster and no trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import io
import os
import pstats
from pathlib import Path

from rftdask.buffer.log import open_log
from rftdask.buffer.log.writer import UnitWriter
from rftdask.config import Config, replace
from rftdask.config.base import plain
from rftdask.engines.base import POLICY
from rftdask.engines.spec import engine_spec, sampling_params
from rftdask.errors import DataError, UserError
from rftdask.reports.lineage.trace import trace
from rftdask.rollouts.runner import UnitOutcome, run_work_unit
from rftdask.rollouts.worker_state import WorkerCache, text_engine
from rftdask.run.run_folder import open_run, record_config
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published

_NUM_PROFILED = 15
"""Functions of a profile that are printed."""


class Debugger:
    """The engines of a stage that explores, loaded, and the tasks of one of its tasksets.

    Example:
        with Debugger(config, Path("runs/debug")) as debugger:
            print(debugger.try_task(3, rollouts=2))
    """

    def __init__(self, config: Config, folder: Path, taskset: str = "", profile: str = "") -> None:
        """
        Args:
            folder: a new run folder, or that of an earlier debugger of the same configuration.
            taskset: whose tasks; "": the first.
            profile: a file that gets Python's profile of each round (`python -m pstats FILE`). Workflows then run in
                this process and not in sandboxes, since a profile sees its own process; "": none is made.
        Raises: UserError, DataError: there is nothing to roll out, or the folder is another run's; RoleError: an
            engine cannot start.
        """
        if not config.has_explorer:
            raise UserError(f"mode {config.mode} explores nothing, so there is no rollout to debug")
        source = config.buffer.explorer_input
        tasksets = {each.name: each for each in (*source.train_tasksets, *source.eval_tasksets)}
        if taskset and taskset not in tasksets:
            raise UserError(f"no taskset is called {taskset!r}; there are {', '.join(tasksets)}")
        self._taskset = tasksets[taskset or next(iter(tasksets))]
        self._profile = profile
        if profile:
            config = replace(config, {"explorer.sandbox.mode": "never"})
        # There are no other workers: all models are here.
        auxiliary = [{**plain(each), "engine_num": 0} for each in config.explorer.auxiliary_models]
        config = replace(config, {"explorer.auxiliary_models": auxiliary})
        # Never into the log of a run.
        config = replace(config, {"buffer.trainer_input.experience_buffer.storage_type": "queue"})
        self.folder, self._storage = folder, open_storage(folder)
        self._config = open_run(self._storage, config)
        self._log = open_log(self._storage, self._config)
        self._num_rounds = max((shard.explore_step for shard in self._log.shards()), default=0)
        self._cache, self._threads = WorkerCache(), os.cpu_count() or 1
        self._cache.open(self._storage, record_config(self._storage, self._config))
        self._tasks = self._cache.taskset(self._taskset.name)
        self._engine = None
        if not self._config.is_external:
            log_file = folder / "log" / "engine.log"
            log_file.parent.mkdir(parents=True, exist_ok=True)
            section = self._config.explorer.rollout_model
            self._engine = self._cache.engine(engine_spec(section, self._config, self._threads, str(log_file)))
            try:
                self._engine.wait_ready()
                self._cache.start_auxiliary(self._threads)
            except BaseException:
                self.close()
                raise

    def try_task(self, index: int, rollouts: int) -> str:
        """Roll out row `index` of the taskset; what came of it, as text.

        Raises: UserError, DataError: the row, its workflow or reward function is not there; RoleError: an engine
            failed.
        """
        if not 0 <= index < len(self._tasks):
            raise DataError(f"taskset {self._taskset.name} has rows 0 to {len(self._tasks) - 1}, and no row {index}")
        profiler = cProfile.Profile() if self._profile else contextlib.nullcontext()
        with profiler:
            outcome = asyncio.run(self._roll_out(index, rollouts))
        self._num_rounds += 1
        with UnitWriter(
            self._log, explore_step=self._num_rounds, unit=0, num_tasks=1, max_commit_delay_s=None
        ) as writer:
            writer.add(0, outcome.experiences)
            writer.finish()
        first = outcome.experiences[0]
        uid = f"{first.taskset}/{first.epoch}/{first.task_index}/{first.rollout}/{first.turn}"
        lines = [trace(self.folder, uid).render(), ""]
        for number, taken in enumerate(outcome.times):
            rows = [each for each in outcome.experiences if each.rollout == number]
            num_tokens = sum(len(each.tokens) for each in rows)
            parts = f"models {taken.generate_s:.2f}, tools {taken.tool_s:.2f}, reward {taken.reward_s:.2f}"
            lines.append(
                f"rollout {number}: {len(rows)} rows, {num_tokens} tokens; {taken.total_s:.2f} s, of them {parts}"
            )
        if isinstance(profiler, cProfile.Profile):
            profiler.dump_stats(self._profile)
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(_NUM_PROFILED)
            lines += ["", f"profile in {self._profile}, what took longest:", text.getvalue().strip()]
        return "\n".join(lines)

    async def _roll_out(self, index: int, rollouts: int) -> UnitOutcome:
        config = self._config
        return await run_work_unit(
            # An epoch of its own for each round, so that no uid is told twice.
            [self._tasks.task(self._num_rounds, index)],
            repeat_times=rollouts,
            explore_step=self._num_rounds + 1,
            policy=(
                self._cache.remote_model(POLICY)
                if self._engine is None
                else text_engine(self._engine, self._cache.tokenizer(), config, self._cache.images())
            ),
            auxiliary=self._cache.auxiliary(self._threads),
            # One try: the first error is what is to be told.
            explorer=config.explorer.model_copy(update={"max_retry_times": 0}),
            model=config.model,
            sampling={self._taskset.name: sampling_params(self._taskset, config)},
            weights=Published(0, "", "") if self._engine is None else self._engine.weights,
        )

    def close(self) -> None:
        """End the engines. Idempotent."""
        self._cache.drop_engine()
        self._cache.drop_auxiliary()

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
