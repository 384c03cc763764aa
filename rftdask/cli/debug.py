"""`rftdask debug`: keeps the model of a configuration loaded, and rolls out one task with it repeatedly.

Each round is a work unit as in an explorer. It commits its experiences to a separate run folder, so `rftdask view` and
`rftdask trace` show them. Each round starts new sandboxes, which read the current files. Code outside of sandboxes
(`in_process`) and the arguments of functions stay as in the first round. There is no cluster and no trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import io
import os
import pstats
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rftdask.buffer.log import open_log
from rftdask.buffer.log.writer import UnitWriter
from rftdask.cli.common import ConfigFile, Origin, Overrides, load, say
from rftdask.cli.results.reports import write_experiences_page
from rftdask.config import Config, replace
from rftdask.config.base import plain
from rftdask.engines.base import POLICY
from rftdask.engines.spec import engine_spec, sampling_params
from rftdask.errors import DataError, UserError
from rftdask.reports.lineage.trace import trace
from rftdask.rollouts.runner import UnitOutcome, run_work_unit
from rftdask.rollouts.try_workflow import rewards_of_truths
from rftdask.rollouts.worker_state import WorkerCache, text_engine
from rftdask.run.run_folder import open_run, record_config
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published

_NUM_PROFILED = 15
"""Number of functions of a profile to print."""


def debug(
    config: ConfigFile,
    overrides: Overrides = None,
    task: Annotated[int, typer.Option(min=0, help="Row of the taskset")] = 0,
    taskset: Annotated[str, typer.Option(metavar="NAME", help="Taskset with the row (default: the first)")] = "",
    rollouts: Annotated[int, typer.Option(min=1, help="Number of concurrent rollouts of the task")] = 1,
    folder: Annotated[str, typer.Option(metavar="FOLDER", help="Folder for the rollouts, for `rftdask view`")] = "",
    once: Annotated[bool, typer.Option("--once", help="End after the first round")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="HTML page to write with all conversations")] = "",
    profile: Annotated[str, typer.Option(metavar="FILE", help="File for the profile of the latest round")] = "",
    origin: Origin = "",
) -> None:
    """Roll out one task repeatedly while you edit its code.

    It loads the model once. Each round uses the current files of workflow and reward.
    """
    checked = load(config, overrides, origin)
    if "://" in folder:
        raise UserError(f"--folder {folder}: give a folder on this machine")
    stage = next((stage for stage in reversed(checked.stage_configs()) if stage.has_explorer), checked)
    run_folder = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="rftdask-debug-"))
    say("loading the model", err=True)
    with Debugger(stage, run_folder, taskset, profile) as debugger:
        if text := debugger.rewards_of_truths():
            say(text, err=True)
        while True:
            is_last = once or not sys.stdin.isatty()
            try:
                say(debugger.try_task(task, rollouts))
                if html:
                    write_experiences_page(run_folder, html, limit=100)
                say(f"\nas pages: rftdask view {run_folder}", err=True)
            except UserError as error:  # the user can fix the files and try again
                if is_last:
                    raise
                say(f"error: {error}", err=True)
            if is_last:
                return
            try:
                answer = input("Enter: repeat with the current files; a number: another task; q: quit > ").strip()
            except EOFError:
                return
            if answer == "q":
                return
            if answer.isdecimal():
                task = int(answer)


class Debugger:
    """Loaded engines of a stage that explores, and the tasks of one of its tasksets.

    Example:
        with Debugger(config, Path("runs/debug")) as debugger:
            print(debugger.try_task(3, rollouts=2))
    """

    def __init__(self, config: Config, folder: Path, taskset: str = "", profile: str = "") -> None:
        """
        Args:
            folder: a new run folder, or the folder of an earlier debugger of the same configuration.
            taskset: name of the taskset. "": the first.
            profile: file for the Python profile of each round (`python -m pstats FILE`). Workflows then run in this
                process instead of sandboxes, because a profile covers only its own process. "": no profile.
        Raises: UserError, DataError: there is nothing to roll out, or the folder belongs to another run; RoleError: an
            engine cannot start.
        """
        if not config.has_explorer:
            raise UserError(f"mode {config.mode} has no explorer, so there is no rollout to debug; use mode both")
        source = config.buffer.explorer_input
        tasksets = {section.name: section for section in (*source.train_tasksets, *source.eval_tasksets)}
        if taskset and taskset not in tasksets:
            raise UserError(f"taskset {taskset!r} does not exist; choose one of {', '.join(tasksets)}")
        self._taskset = tasksets[taskset or next(iter(tasksets))]
        self._profile = profile
        if profile:
            config = replace(config, {"explorer.sandbox.mode": "never"})
        # Without other workers, this process loads all models.
        auxiliary = [{**plain(model), "engine_num": 0} for model in config.explorer.auxiliary_models]
        config = replace(config, {"explorer.auxiliary_models": auxiliary})
        # The rollouts must not enter the log of a run.
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

    def rewards_of_truths(self) -> str:
        """Describe the rewards of the taskset's expected answers. "": it has none."""
        return asyncio.run(rewards_of_truths(self._tasks, self._config.explorer))

    def try_task(self, index: int, rollouts: int) -> str:
        """Roll out row `index` of the taskset, and return the result as text.

        Raises: UserError, DataError: the row, its workflow or its reward function does not exist; RoleError: an engine
            failed.
        """
        if not 0 <= index < len(self._tasks):
            last = len(self._tasks) - 1
            raise DataError(f"taskset {self._taskset.name} has no row {index}; choose a row from 0 to {last}")
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
        for number, times in enumerate(outcome.times):
            rows = [experience for experience in outcome.experiences if experience.rollout == number]
            num_tokens = sum(len(row.tokens) for row in rows)
            parts = f"models {times.generate_s:.2f}, tools {times.tool_s:.2f}, reward {times.reward_s:.2f}"
            lines.append(
                f"rollout {number}: {len(rows)} rows, {num_tokens} tokens; {times.total_s:.2f} s, of them {parts}"
            )
        if isinstance(profiler, cProfile.Profile):
            profiler.dump_stats(self._profile)
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(_NUM_PROFILED)
            lines += ["", f"profile in {self._profile}, the slowest functions:", text.getvalue().strip()]
        return "\n".join(lines)

    async def _roll_out(self, index: int, rollouts: int) -> UnitOutcome:
        config = self._config
        return await run_work_unit(
            # Each round is an epoch, so that uids stay unique.
            [self._tasks.task(self._num_rounds, index)],
            repeat_times=rollouts,
            explore_step=self._num_rounds + 1,
            policy=(
                self._cache.remote_model(POLICY)
                if self._engine is None
                else text_engine(self._engine, self._cache.tokenizer(), config, self._cache.images())
            ),
            auxiliary=self._cache.auxiliary(self._threads),
            # One try, because the user wants to see the first error.
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
