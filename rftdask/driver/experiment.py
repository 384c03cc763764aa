"""Experiment: a run as an object. The command line and notebooks both use it.

    from rftdask import Experiment
    experiment = Experiment.from_yaml("config/quickstart.yaml", "trainer.total_steps=20")
    experiment.run()                      # or: experiment.start(); experiment.progress(); experiment.wait()
    experiment.metrics(); experiment.experiences(); experiment.plot()

Running again continues where the files of the run say that it stopped. What an Experiment tells is read from those
files, so it tells the same of a run that another process makes, or that ended long ago; what only looking needs
(pandas, the charts) is imported late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftdask.cluster.base import plan_cluster, prepare_cluster, start_cluster
from rftdask.cluster.jobs import RETURNED
from rftdask.cluster.layout import Layout
from rftdask.config import Config, load_config, replace
from rftdask.config.plan import StageWork, plan_work
from rftdask.data.task_pipeline import make_datasets, missing_datasets
from rftdask.driver.memory_estimate import check_host, check_jobs, gpu_shortages
from rftdask.driver.preflight import Inputs, check_inputs
from rftdask.driver.stage import StageRun
from rftdask.errors import DataError, RoleError, StorageError, UserError
from rftdask.monitor.events import Evaluated, Event, Note, StepFinished
from rftdask.monitor.logs import LogFolder, setup_logging
from rftdask.monitor.metrics import read_metrics
from rftdask.monitor.progress import Progress, ProgressView, ViewKind
from rftdask.processes.dask_task import workers_of
from rftdask.processes.gpus import free_host_bytes
from rftdask.processes.usage import gpu_memory
from rftdask.reports.metric_table import WINDOW, warn_of_learning
from rftdask.reports.page.report_file import import_ahead, report_run, write_report
from rftdask.reports.run_reader import StageReader, stages_of
from rftdask.reports.summary import RunSummary, summarize
from rftdask.reports.tracking import open_feeds
from rftdask.run.input_fingerprints import WholeContents, check_made_of, copy_sources
from rftdask.run.lease import DATASET, Lease
from rftdask.run.run_folder import (
    RUN_FILE,
    begin_beside,
    check_run,
    note_begin,
    note_end,
    open_run,
    private_files,
    read_run_config,
    record_run,
)
from rftdask.storage import Storage, open_storage
from rftdask.storage.safe_text import safe
from rftdask.storage.staging import stage_here
from rftdask.trainer.checkpoint import HF_FOLDER, checkpoint_folder, newest_valid_checkpoint

if TYPE_CHECKING:
    import dask.dataframe as dd
    import pandas as pd
    from distributed import Client
    from matplotlib.figure import Figure

    from rftdask.cluster.base import Cluster
    from rftdask.reports.lineage.trace import Trace

log = logging.getLogger(__name__)

_FEED_EVERY_S = 2.0
"""Between two looks at the metrics files for the tracker."""
_REPORT_AHEAD_S = 2.0
"""Before the end of a run: what its report takes is imported then, and not when the roles want every core to start."""
_SHOWN = ("loss", "reward", "staleness", "tokens_per_s")
"""Metrics of a step that `Progress` shows."""


class Experiment:
    """One run: its config, and what it does and did.

    Example: Experiment(model={"model_path": "model"}, buffer={...}, mode="both").run()
    """

    def __init__(self, config: Config | None = None, **sections: Any) -> None:
        """Either a checked config, or its sections as keywords. Raises: ConfigError: every mistake at once."""
        if not isinstance(config, Config | None):
            raise UserError(
                f"Experiment({config!r}): it takes a Config, or sections as keywords; Experiment.from_yaml reads a "
                "file, Experiment.open a run"
            )
        self.config = begin_beside(config if config is not None else load_config(sections))
        self.summary: RunSummary | None = None
        """Of the last `run` in this process."""
        self.client: Client | None = None
        """Of the cluster of an attached run; close it after use."""
        self.url = self.config.checkpoint_job_dir
        """Where the run is."""
        self._stage: StageRun | None = None
        self._progress = Progress(stage=self.config.name)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stop_requested = self._may_return = False

    @classmethod
    def from_yaml(cls, path: str | Path, *overrides: str) -> Experiment:
        """From a YAML file and "key.sub=value" overrides."""
        return cls(load_config(path, overrides))

    @classmethod
    def open(cls, url: str | Path) -> Experiment:
        """The run in a folder, to look at or to continue. Raises: DataError: it is no run folder."""
        storage = open_storage(url)
        config = read_run_config(storage)
        # Where it is now, which need not be where it began.
        place = "/" + "/".join(part for part in (config.project, config.group, config.name) if part)
        if storage.url.endswith(place):
            config = replace(config, {"checkpoint_root_dir": storage.url.removesuffix(place)})
        experiment = cls(config)
        experiment.url = storage.url
        return experiment

    @classmethod
    def attach(cls, url: str | Path) -> Experiment:
        """The run in a folder, and as `client` a distributed.Client of the cluster that it has now, for a notebook.

        Raises: DataError: it is no run folder; UserError: it has no cluster now; WaitTimeout: that does not answer.
        """
        from rftdask.driver.jobs import connect  # late: only who attaches needs a client

        experiment = cls.open(url)
        experiment.client = connect(str(url))
        return experiment

    def prepare(self) -> None:
        """Start, in the background, what the processes of `run` will be forked from: what else there is to do before
        that costs no time. `run` does it, too. Raises: UserError: there is no such cluster.
        """
        section = self.config.cluster
        if self.config.mode == "serve":
            raise UserError("mode serve has no end to wait for: `rftdask run`, or `rftdask serve`, serves it")
        if section.local_cache_dir is not None and section.is_one_machine:  # else on the nodes of the workers
            stage_here(section.local_cache_dir, section.stage_keep)
        prepare_cluster(self.config, self.config.stage_configs())

    def run(self, progress: ViewKind = "auto", *, accept_changes: bool = False) -> RunSummary:
        """Run to the end, continuing what is there. Ctrl-C ends with a checkpoint; a second one at once.

        accept_changes: go on with a reward, workflow, taskset or model that changed since the run began; written down.

        Raises: UserError: something in the config or its data, before anything starts; RftError: a role failed for
        good.
        """
        # Checks that change nothing, then what is written down, then the stages one after another, and the last words
        # in any case.
        began_s, storage = time.time(), open_storage(self.config.checkpoint_job_dir)
        if open_storage(self.url).url != storage.url:
            parts = [part for part in (self.config.project, self.config.group, self.config.name) if part]
            raise UserError(f"{self.url} can be read there; to continue it, move it to a folder .../{'/'.join(parts)}")
        stages = self.config.stage_configs()
        # First: what processes are forked from imports torch while this process checks the inputs.
        self.prepare()
        say = log.info if progress == "none" else lambda line: print(safe(line), file=sys.stderr)
        inputs = self._check(stages, storage, say)
        made_of = check_made_of(stages, inputs, accept=accept_changes)
        layout = plan_run(self.config, stages)
        # Up to here nothing of the run was written but such a dataset; the probe of `check_inputs` is gone again.
        with private_files(storage, self.config):
            record_run(storage, self.config)
            note_begin(storage)
            logs = LogFolder(storage)
            # Of explorers beside each other each has a file: one process alone may rotate it.
            setup_logging(
                "driver" + self.config.command_name.removeprefix(self.config.mode), self.config.log.level, logs.path
            )
        folders: list[StageReader] = []
        status, error, model_path = "failed", "", ""
        try:
            # Left from the last to the first: the cluster ends while Ctrl-C is still
            # caught and the view can still say so.
            with (
                private_files(storage, self.config),
                ProgressView.create(progress) as view,
                _stopping_on_interrupt(self, view),
                start_cluster(self.config, layout, storage) as cluster,
            ):
                for number, config in enumerate(stages):
                    began = time.monotonic()
                    # What the stage before made. Written into the config, so that the run.json of this stage says it
                    # and a resume finds it.
                    config = replace(config, {"model.model_path": model_path}) if model_path else config
                    stage_storage = open_storage(config.checkpoint_job_dir)
                    config = open_run(
                        stage_storage,
                        config,
                        made_of[number].to_json(),
                        layout.describe(),
                        on_gpus=layout.trains_on_gpus,
                    )
                    copy_sources(stage_storage, made_of[number])
                    contents = WholeContents(stage_storage, config.mode, made_of[number], accept=accept_changes)
                    watcher = _Watcher(self, config, number, len(stages), stage_storage, cluster, view, contents)
                    stage = StageRun(
                        config,
                        stage_storage,
                        cluster,
                        layout,
                        inputs[number].sizes,
                        watcher.on_event,
                        watcher.log_folder,
                    )
                    watcher.show(stage.work, layout)
                    self._stage = stage
                    if self._stop_requested:
                        stage.stop()  # it was asked to before there was a stage
                    try:
                        ended = stage.run()
                    finally:
                        self._stage = None
                        watcher.close()
                        # Also of a stage that failed: the report shows how far it came.
                        folders.append(StageReader(config, stage_storage, time.monotonic() - began))
                    if ended.stopped or self._stop_requested:
                        status = "stopped"
                        break
                    if number + 1 < len(stages) and config.mode in ("both", "train"):
                        model_path = _trained_model(stage_storage)
                else:
                    status = "finished"
                # Told last, since a stop may come at any time; the cluster acts on it when it is closed.
                cluster.may_return = self._may_return or (status == "stopped" and cluster.comes_back())
        # Ctrl-C, too: the files of the run are to say how it ended.
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._stop_requested = self._may_return = False
            # Also of a run that failed: its curves and answers tell why. Where its disk is full, that is told already.
            with contextlib.suppress(*((StorageError,) if error else ())):
                note_end(storage, status, error)
                if folders:
                    found = summarize(self.config, self.url, folders, status=status, began_s=began_s, error=error)
                    self.summary = found
                    write_report(storage.url, found)
            logs.close()
        assert self.summary is not None
        return self.summary

    def _check(self, stages: list[Config], storage: Storage, say: Callable[[str], None]) -> list[Inputs]:
        """Check what the stages read and where they write, and make what their pipelines make of it."""
        # All stages are checked before anything starts: a mistake in the last is told before the first has cost hours.
        # But what cannot have changed since a start that came further than here, which takes seconds.
        inputs = check_inputs(
            stages, tried=RETURNED in os.environ and open_storage(stages[0].checkpoint_job_dir).exists(RUN_FILE)
        )
        for number, config in enumerate(stages):
            # The model of a later stage is what the one before it makes.
            steps = plan_work(config, inputs[number].sizes).explore_steps if config.mode == "explore" else None
            free = ("model.model_path",) if number else ()
            check_run(open_storage(config.checkpoint_job_dir), config, free, steps)
        with private_files(storage, self.config), contextlib.ExitStack() as leases:
            # Two first starts at once would write the same files: the second is refused, as it would be as a role.
            for stage in missing_datasets(stages):
                leases.enter_context(Lease(open_storage(stage.checkpoint_job_dir), DATASET))
            if make_datasets(stages, say):
                inputs = check_inputs(stages, tried=True)  # now of the rows that are trained
        return inputs

    def start(self, progress: ViewKind = "none") -> Experiment:
        """Run in a thread of this process; see `wait`, `stop` and `progress`."""
        if self._thread is not None and self._thread.is_alive():
            raise RoleError("this experiment is running already; wait() for it or stop() it")

        def guarded() -> None:
            try:
                self.run(progress)
            except BaseException as error:  # raised again by wait()
                self._error = error

        self._error = None
        # A daemon: an interpreter that ends does not wait for it, and the run can be continued from its files.
        self._thread = threading.Thread(target=guarded, name=f"experiment-{self.config.name}", daemon=True)
        self._thread.start()
        return self

    def wait(self, timeout_s: float | None = None) -> RunSummary | None:
        """Until the run that `start` began has ended; None if it has not after `timeout_s`. Raises: what the run
        raised.
        """
        if self._thread is None:
            raise RoleError("nothing was started; call start() or run()")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self.summary

    def stop(self, may_return: bool = False) -> None:
        """Ask the run to end with a checkpoint, soon; it can be continued later. may_return: whoever asks may do that
        at once, so workers that others started are to wait for it a while.
        """
        self._stop_requested = True
        self._may_return = may_return
        if self._stage is not None:
            self._stage.stop()

    def progress(self) -> Progress:
        """Where the run of this process stands; renders in Jupyter."""
        return self._progress

    def metrics(self, role: str | None = None) -> pd.DataFrame:
        """All numbers so far, a row for each role and step (roles: trainer, explorer, eval, machine); with stages, a
        column tells which.
        """
        import pandas as pd  # late: only who looks at a run needs it

        frames = []
        for stage in self._stages():
            frame = read_metrics(stage.storage, role)
            frames.append(frame.assign(stage=stage.name) if self.config.stages else frame)
        return pd.concat(frames, ignore_index=True)

    def experiences(self, dask: bool = False) -> pd.DataFrame | dd.DataFrame:
        """Every committed experience of the (last) stage that explores, as pandas or as a lazy Dask frame."""
        import pandas as pd

        exploring = [stage for stage in self._stages() if stage.config.algorithm.schema_type == "experience"]
        if not exploring:
            raise DataError("no stage of this run explores, so it has no experiences")
        experiences = exploring[-1].log
        shards = experiences.shards()
        if dask:
            import dask.dataframe as dd

            # Dask wants the columns before it reads anything.
            meta = experiences.read(shards[0]).slice(0, 0).to_pandas() if shards else pd.DataFrame()
            return dd.from_map(lambda name: experiences.read(name).to_pandas(), shards, meta=meta)
        frames = [experiences.read(name).to_pandas() for name in shards]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def sql(self, query: str) -> pd.DataFrame:
        """What `query` gives over the tables of the run (docs/lineage.md); needs the extra `sql`."""
        from rftdask.reports.lineage.sql import query as run_query  # late: only who looks at a run needs it
        from rftdask.reports.lineage.sql import warn_of
        from rftdask.reports.lineage.tables import RunTables

        tables = RunTables(self.url)
        found = run_query(tables, query)
        warn_of(tables.problems)
        return found.to_pandas()

    def trace(self, uid: str) -> Trace:
        """The life of one experience; print it. Raises: DataError: there is none of that uid."""
        from rftdask.reports.lineage.trace import trace

        return trace(self.url, uid)

    def plot(self) -> Figure:
        """The curves of the run."""
        from rftdask.reports.charts import plot_metrics

        return plot_metrics([(stage.name, stage.metrics) for stage in self._stages()])

    def report(self) -> str:
        """Write `report.html` from the files of the run; its URL."""
        return report_run(self.url)

    def model_path(self) -> str:
        """The trained model of the last stage, as a Hugging Face folder. Raises: DataError: there is none (yet)."""
        return _trained_model(self._stages()[-1].storage)

    def push_to_hub(self, repo: str, *, step: int | None = None, private: bool = True, merge_lora: bool = True) -> str:
        """Upload the model to the Hugging Face Hub as "owner/name", with a model card; the page's URL.

        step: of the checkpoint; None: the newest. Raises: UserError: the Hub refuses; DataError: there is no model yet.
        """
        from rftdask.driver.hub_push import push  # late: who uploads nothing needs no client of the Hub

        return push(self.url, repo, step=step, private=private, merge_lora=merge_lora)

    def _stages(self) -> list[StageReader]:
        return stages_of(self.config, open_storage(self.url))


@contextlib.contextmanager
def _stopping_on_interrupt(experiment: Experiment, view: ProgressView) -> Iterator[None]:
    """The first Ctrl-C asks the run to end with a checkpoint, the second one ends it at once."""
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        view.note("stopping: the trainer writes a checkpoint first (press Ctrl-C again to end at once)")
        # Ctrl-C itself says nothing of a return; what an earlier `stop` said of it stays.
        experiment.stop(experiment._may_return)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclasses.dataclass
class _Watcher:
    """What happens beside a stage as it tells its events: the view, the tracker, the logs."""

    experiment: Experiment
    config: Config
    number: int
    """Of the stage, from 0."""
    num_stages: int
    storage: Storage
    cluster: Cluster
    view: ProgressView
    contents: WholeContents

    def __post_init__(self) -> None:
        config, storage = self.config, self.storage
        self._began = self._fed = time.monotonic()
        self._first: tuple[int, float] | None = None
        """The step before the first one that was told, and when that one began."""
        self._role = "trainer" if config.mode in ("both", "train") else "explorer"
        """The role whose steps are the stage's."""
        self._rows: dict[str, list[Mapping[str, float]]] = {"trainer": [], "explorer": []}
        """Metrics of the first and the last steps of each role."""
        self._ends_soon = False
        """Whether what the report is written with has been imported."""
        self._warned: set[str] = set()
        """Metrics that a note has warned of."""
        self._logs = LogFolder(storage)
        self.log_folder = str(self._logs.path)
        self._feeds = open_feeds(config, storage)

    def show(self, work: StageWork, layout: Layout) -> None:
        """Show the stage before its first event, and who takes turns on what."""
        if layout.colocated:
            self.view.note(layout.describe())
        self.experiment._progress = Progress(
            stage=self.config.name.rpartition("/")[2],
            stage_number=self.number + 1,
            num_stages=self.num_stages,
            mode=self.config.mode,
            total_steps=work.train_steps if self._role == "trainer" else work.explore_steps,
        )
        self.view.update(self.experiment._progress)

    def on_event(self, event: Event) -> None:
        """Take in what a role said. In the thread that runs the stage."""
        self.contents.check()
        now = time.monotonic()
        progress = dataclasses.replace(
            self.experiment._progress,
            elapsed_s=now - self._began,
            workers=len(workers_of(self.cluster.client)),
        )
        if isinstance(event, Note):
            self.view.note(event.text)
        elif isinstance(event, Evaluated):
            progress = dataclasses.replace(
                progress, accuracy=event.metrics.get("accuracy"), accuracy_step=event.version
            )
        if isinstance(event, StepFinished):
            rows = self._rows[event.role]
            rows.append(event.metrics)
            del rows[WINDOW:-WINDOW]  # of what is between them nothing is told
            warnings = warn_of_learning(self._rows["trainer"], self._rows["explorer"])
            for name in warnings.keys() - self._warned:  # once, while it lasts
                self.view.note(f"warning: {warnings[name]}")
            self._warned = set(warnings)
        # Only one role's steps move the bar; in mode both that is the trainer, whose end is the run's.
        if isinstance(event, StepFinished) and event.role == self._role:
            if self._first is None:
                self._first = (event.step - 1, now - event.metrics.get("step_s", 0.0))
            # From the first step of this start: a resumed run has made the earlier ones
            # elsewhere, and loading models is no pace.
            pace = (now - self._first[1]) / max(1, event.step - self._first[0])
            total = progress.total_steps
            shown: dict[str, Any] = {name: event.metrics[name] for name in _SHOWN if name in event.metrics}
            eta_s = None if total is None else max(0, total - event.step) * pace
            progress = dataclasses.replace(progress, step=event.step, eta_s=eta_s, **shown)
            if not self._ends_soon and (eta_s is None or eta_s < _REPORT_AHEAD_S):
                self._ends_soon = True
                import_ahead()
        elif isinstance(event, StepFinished):
            progress = dataclasses.replace(progress, reward=event.metrics.get("reward", progress.reward))
        self.experiment._progress = progress
        self.view.update(progress)
        if now - self._fed > _FEED_EVERY_S:
            self._fed = now
            for feed in self._feeds:
                feed.poll()
        self._logs.poll()

    def close(self) -> None:
        """Feed the tracker what is left, and let go of the logs."""
        self.contents.close()
        for feed in self._feeds:
            feed.close()
        self._logs.close()


def plan_run(config: Config, stages: list[Config]) -> Layout:
    """The workers of the run. Raises: UserError: they cannot be had, or this machine lacks memory for them."""
    layout = plan_cluster(config, stages)
    check_host(stages, layout, free_host_bytes())
    check_jobs(stages, layout)
    # What other machines have is not known here.
    memory = gpu_memory() if config.cluster.is_one_machine else None
    short = [] if memory is None else gpu_shortages(stages, layout, memory)
    if certain := [each.text for each in short if each.is_certain]:
        raise UserError("\n".join(certain))
    for each in short:
        log.warning("this is an estimate, and the run starts: %s", each.text)
    return layout


def _trained_model(storage: Storage) -> str:
    step = newest_valid_checkpoint(storage)
    folder = f"{checkpoint_folder(step)}/{HF_FOLDER}" if step is not None else ""
    if step is None or "config.json" not in storage.list(folder):
        raise DataError(f"{storage.url} has no trained model yet (trainer.save_hf_checkpoint must not be never)")
    return f"{storage.url}/{folder}"
