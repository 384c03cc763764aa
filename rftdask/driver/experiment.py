"""Experiment: a run as an object, for the command line and for notebooks.

    from rftdask import Experiment
    experiment = Experiment.from_yaml("config/quickstart.yaml", "trainer.total_steps=20")
    experiment.run()                      # or: experiment.start(); experiment.progress(); experiment.wait()
    experiment.metrics(); experiment.experiences(); experiment.plot()

Running again continues where the run stopped, according to its files. An Experiment reads metrics and experiences from
those files, so it also shows runs of other processes and runs that ended long ago. Modules that only views need
(pandas) are imported late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
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
from rftdask.driver.jobs import connect
from rftdask.driver.memory_estimate import gpu_shortages, host_shortages, job_shortages, raise_shortages
from rftdask.driver.preflight import check_inputs
from rftdask.driver.stage import StageRun
from rftdask.driver.stall_watch import StallWatch
from rftdask.errors import DataError, RftError, RoleError, StorageError, UserError
from rftdask.monitor.events import Alive, Ended, Evaluated, Event, Note, StepFinished
from rftdask.monitor.logs import LogFolder, setup_logging
from rftdask.monitor.metrics import read_metrics
from rftdask.monitor.progress import Progress, ProgressView, ViewKind
from rftdask.processes.dask_task import workers_of
from rftdask.processes.gpus import free_host_bytes, gpu_memory
from rftdask.reports.charts import plot_metrics
from rftdask.reports.jobs import processes_of
from rftdask.reports.lineage.sql import query as run_query
from rftdask.reports.lineage.sql import warn_of
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.lineage.trace import Trace, trace
from rftdask.reports.metric_table import WINDOW, warn_of_learning
from rftdask.reports.page.report_file import import_ahead, report_run, write_report
from rftdask.reports.run_reader import StageReader, stages_of
from rftdask.reports.summary import RunSummary, summarize
from rftdask.reports.tracking import open_feeds
from rftdask.run import run_folder
from rftdask.run.input_fingerprints import (
    BackgroundHasher,
    InputFingerprints,
    Inputs,
    check_inputs_unchanged,
    copy_sources,
)
from rftdask.run.lease import DATASET, Lease, driver_role
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

log = logging.getLogger(__name__)

_FEED_INTERVAL_S = 2.0
"""Seconds between polls of the metrics files for the tracker."""
_REPORT_IMPORT_S = 2.0
"""Seconds before the end of a run at which the imports of its report begin; earlier the roles need every core."""
_BEGIN_POLL_S = 0.05
_SHOWN = ("loss", "reward", "staleness", "tokens_per_s")


class Experiment:
    """One run: its config, its execution and its results."""

    def __init__(self, config: Config | None = None, **sections: Any) -> None:
        """Take a checked config, or its sections as keywords. Raises: ConfigError: lists every mistake."""
        if not isinstance(config, Config | None):
            raise UserError(
                f"Experiment({config!r}): pass a Config or sections as keywords; use Experiment.from_yaml for a file "
                "and Experiment.open for a run"
            )
        self.config = run_folder.allocate_run_name(config if config is not None else load_config(sections))
        self.summary: RunSummary | None = None
        """Summary of the most recent `run` in this process."""
        self.client: Client | None = None
        """Dask client for the cluster of an attached run; close it after use."""
        self.url = self.config.checkpoint_job_dir
        self._stage: StageRun | None = None
        self._progress: Progress | None = None
        """Of a stage of this process; None before the first one begins."""
        self._has_begun = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stop_requested = self._may_return = False

    @classmethod
    def from_yaml(cls, path: str | Path, *overrides: str) -> Experiment:
        """Load a YAML file with "key.sub=value" overrides."""
        return cls(load_config(path, overrides))

    @classmethod
    def open(cls, url: str | Path) -> Experiment:
        """Open the run in a folder, to view or to continue it. Raises: DataError: not a run folder."""
        storage = open_storage(url)
        config = run_folder.read_run_config(storage)
        # The folder may have moved since the run began.
        place = "/" + "/".join(part for part in (config.project, config.group, config.name) if part)
        if storage.url.endswith(place):
            config = replace(config, {"checkpoint_root_dir": storage.url.removesuffix(place)})
        experiment = cls(config)
        experiment.url = storage.url
        return experiment

    @classmethod
    def attach(cls, url: str | Path) -> Experiment:
        """Open the run in a folder, with a distributed.Client of its current cluster as `client`, for notebooks.

        Raises: DataError: not a run folder; UserError: the run has no cluster now; WaitTimeout: the cluster does not
            answer.
        """
        experiment = cls.open(url)
        experiment.client = connect(str(url))
        return experiment

    def prepare(self) -> None:
        """Start the fork servers of `run` early, since their imports take long. Raises: UserError: unknown cluster."""
        section = self.config.cluster
        if self.config.mode == "serve":
            raise UserError("mode serve never ends; use `rftdask run` or `rftdask serve` instead of Experiment")
        if section.local_cache_dir is not None and section.is_one_machine:  # otherwise the workers stage on their nodes
            stage_here(section.local_cache_dir, section.stage_keep)
        prepare_cluster(self.config, self.config.stage_configs())

    def run(self, progress: ViewKind = "auto", *, accept_changes: bool = False) -> RunSummary:
        """Run to the end, or continue the run. Ctrl-C ends it with a checkpoint; a second Ctrl-C ends it at once.

        accept_changes: continue with a changed reward, workflow, taskset or model, and record the change.

        Raises: UserError: a mistake in the config or its data, before anything starts; RftError: a role failed for
        good.
        """
        began_s, storage = time.time(), open_storage(self.config.checkpoint_job_dir)
        with contextlib.ExitStack() as held:
            watch = held.enter_context(StallWatch())
            watch.begin(lambda: "the check of the configuration, the code and the data")
            stages, inputs, fingerprints, layout = self._plan(storage, progress, accept_changes)
            # Up to here, only datasets of task pipelines were written; `check_inputs` has removed its probe. A second
            # driver would take over the jobs of the first, and cancel them when its roles are refused.
            held.enter_context(run_folder.private_files(storage, self.config))
            held.enter_context(Lease(storage, driver_role(self.config)))
            run_folder.record_run(storage, self.config)
            run_folder.note_begin(storage)
            self._has_begun.set()
            logs = LogFolder(storage)
            # Several explorers of one run have one file each, because only one process can rotate a file.
            setup_logging(
                "driver" + self.config.command_name.removeprefix(self.config.mode), self.config.log.level, logs.path
            )
            folders: list[StageReader] = []
            status, error, model_path = "failed", "", ""
            watch.begin(lambda: f"the start of cluster.type {self.config.cluster.type}")
            try:
                # Exited in reverse order: the cluster ends while Ctrl-C is still handled and the view still works.
                with (
                    ProgressView.create(progress) as view,
                    _stopping_on_interrupt(self, view),
                    start_cluster(self.config, layout, storage) as cluster,
                ):
                    for number, config in enumerate(stages):
                        began = time.monotonic()
                        # Model of the stage before. The config has it, so that run.json records it for a resume.
                        config = replace(config, {"model.model_path": model_path}) if model_path else config
                        stage_storage = open_storage(config.checkpoint_job_dir)
                        config = run_folder.open_run(
                            stage_storage,
                            config,
                            fingerprints[number].to_json(),
                            layout.describe(),
                            on_gpus=layout.trains_on_gpus,
                        )
                        copy_sources(stage_storage, fingerprints[number])
                        contents = BackgroundHasher(
                            stage_storage, config.mode, fingerprints[number], accept=accept_changes
                        )
                        observer = StageObserver(
                            self, config, number, len(stages), stage_storage, cluster, view, contents, watch
                        )
                        stage = StageRun(
                            config,
                            stage_storage,
                            cluster,
                            layout,
                            inputs[number].sizes,
                            observer.on_event,
                            observer.log_folder,
                        )
                        watch.begin(stage.waits_for)
                        observer.show(stage.work, layout)
                        self._stage = stage
                        if self._stop_requested:
                            stage.stop()  # the request came before the stage existed
                        try:
                            ended = _run_stage(stage, stage_storage) if self.config.stages else stage.run()
                        finally:
                            self._stage = None
                            watch.begin(lambda: "the end of the cluster and the report")
                            observer.close()
                            # Also for a failed stage: the report shows its progress.
                            folders.append(StageReader(config, stage_storage, time.monotonic() - began))
                        if ended.stopped or self._stop_requested:
                            status = "stopped"
                            break
                        if number + 1 < len(stages) and config.mode in ("both", "train"):
                            model_path = _trained_model(stage_storage)
                    else:
                        status = "finished"
                    # Set last, since a stop may come at any time; the cluster reads it in `close`.
                    cluster.may_return = self._may_return or (status == "stopped" and cluster.comes_back())
            # Also on Ctrl-C, because the files of the run record how it ended.
            except BaseException as failure:
                error = f"{type(failure).__name__}: {failure}"
                raise
            finally:
                self._stop_requested = self._may_return = False
                # A failed run also gets a report. If the disk is full, the error already says so.
                with contextlib.suppress(*((StorageError,) if error else ())):
                    run_folder.note_end(storage, status, error)
                    if folders:
                        self.summary = summarize(
                            self.config, self.url, folders, status=status, began_s=began_s, error=error
                        )
                        write_report(storage.url, self.summary)
                logs.close()
            assert self.summary is not None
            return self.summary

    def _plan(
        self, storage: Storage, progress: ViewKind, accept_changes: bool
    ) -> tuple[list[Config], list[Inputs], list[InputFingerprints], Layout]:
        if open_storage(self.url).url != storage.url:
            parts = [part for part in (self.config.project, self.config.group, self.config.name) if part]
            raise UserError(f"{self.url} is read-only here; to continue it, move it to a folder .../{'/'.join(parts)}")
        stages = self.config.stage_configs()
        # First, so that the fork servers import torch while this process checks the inputs.
        self.prepare()
        say = log.info if progress == "none" else lambda line: print(safe(line), file=sys.stderr)
        inputs = self._check(stages, storage, say)
        fingerprints = check_inputs_unchanged(stages, inputs, accept=accept_changes)
        return stages, inputs, fingerprints, plan_run(self.config, stages)

    def _check(self, stages: list[Config], storage: Storage, say: Callable[[str], None]) -> list[Inputs]:
        """Check what the stages read and where they write, and run the task pipelines that make their datasets."""
        # All stages are checked first, so that a mistake in the last one is reported before the first takes hours. A
        # start after RETURNED skips the slow trials of unchanged code, which an earlier start has passed.
        inputs = check_inputs(
            stages,
            tried=RETURNED in os.environ and open_storage(stages[0].checkpoint_job_dir).exists(run_folder.RUN_FILE),
            say=say,
        )
        for number, config in enumerate(stages):
            # A later stage takes its model from the stage before.
            steps = plan_work(config, inputs[number].sizes).explore_steps if config.mode == "explore" else None
            free = ("model.model_path",) if number else ()
            run_folder.check_run(open_storage(config.checkpoint_job_dir), config, free, steps)
        with run_folder.private_files(storage, self.config), contextlib.ExitStack() as leases:
            # Two concurrent first starts would write the same files, so the lease rejects the second.
            for stage in missing_datasets(stages):
                leases.enter_context(Lease(open_storage(stage.checkpoint_job_dir), DATASET))
            if make_datasets(stages, say):
                inputs = check_inputs(stages, tried=True, say=say)  # for the rows of the new datasets
        return inputs

    def start(self, progress: ViewKind = "none") -> Experiment:
        """Run in a thread of this process; see `wait`, `stop` and `progress`. Returns when the run has been checked.

        Raises: UserError, FencedError and others of `run` before the run begins.
        """
        if self._thread is not None and self._thread.is_alive():
            raise RoleError("this experiment is already running; call wait() or stop()")

        def guarded() -> None:
            try:
                self.run(progress)
            except BaseException as error:  # raised again by wait()
                self._error = error

        self._error = None
        # A daemon thread: the interpreter can exit without it, and the run can be continued from its files.
        self._has_begun.clear()
        self._thread = threading.Thread(target=guarded, name=f"experiment-{self.config.name}", daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not self._has_begun.wait(_BEGIN_POLL_S):
            pass  # the checks have their own deadlines
        if self._error is not None and not self._has_begun.is_set():
            raise self._error
        return self

    def wait(self, timeout_s: float | None = None) -> RunSummary | None:
        """Wait for the end of the run that `start` began. Returns: its summary, or None after `timeout_s` seconds.
        Raises: the error of the run.
        """
        if self._thread is None:
            raise RoleError("no run was started; call start() first, or run()")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self.summary

    def stop(self, may_return: bool = False) -> None:
        """Request that the run ends with a checkpoint soon; it can be continued later.

        may_return: True if the caller may continue the run at once, so externally started workers wait for a while.
        """
        self._stop_requested = True
        self._may_return = may_return
        if self._stage is not None:
            self._stage.stop()

    def progress(self) -> Progress:
        """Return the progress of the run; it renders in Jupyter. Read from the files unless this process runs it."""
        if self._progress is not None:
            return self._progress
        stages = self._stages()
        begun = [stage for stage in stages if stage.has_begun]
        if not begun:
            return Progress(stage=self.config.name, num_stages=len(stages))
        stage = begun[-1]
        began_s, last_s = stage.span
        return Progress(
            stage=stage.name,
            stage_number=len(begun),
            num_stages=len(stages),
            mode=stage.config.mode,
            step=stage.ledger.last_step(),
            total_steps=stage.config.trainer.total_steps,
            reward=stage.last("trainer", "reward"),
            accuracy=stage.accuracies[-1].value if stage.accuracies else None,
            loss=stage.last("trainer", "loss"),
            tokens_per_s=stage.last("trainer", "tokens_per_s"),
            elapsed_s=last_s - began_s,
        )

    def state(self) -> str:
        """Return "not started", "running", or how the run ended: "finished", "stopped", "failed: ..."."""
        storage = open_storage(self.url)
        if not storage.exists(run_folder.RUN_FILE):
            return "not started"
        return "running" if processes_of(storage) else run_folder.read_end(storage) or "killed"

    def __repr__(self) -> str:
        try:
            progress, state = self.progress(), self.state()
        except RftError as error:
            return f"<Experiment {self.url}: {error}>"
        total = "" if progress.total_steps is None else f" of {progress.total_steps}"
        return f"<Experiment {self.url}: {state}, step {progress.step}{total}>"

    def _repr_html_(self) -> str:
        """Render state and progress in Jupyter, with the command that shows the run in a browser."""
        try:
            shown = f"<p>{html.escape(self.state())}</p>{self.progress()._repr_html_()}"
        except RftError as error:
            shown = f"<p>{html.escape(str(error))}</p>"
        return f"<p><b>{html.escape(self.url)}</b></p>{shown}<pre>rftdask studio {html.escape(self.url)}</pre>"

    def metrics(self, role: str | None = None) -> pd.DataFrame:
        """Return all metrics so far, a row per role and step (and stage). role: trainer, explorer, eval or machine."""
        import pandas as pd

        frames = []
        for stage in self._stages():
            frame = read_metrics(stage.storage, role)
            frames.append(frame.assign(stage=stage.name) if self.config.stages else frame)
        return pd.concat(frames, ignore_index=True)

    def experiences(self, dask: bool = False) -> pd.DataFrame | dd.DataFrame:
        """Return every committed experience of the last exploring stage, as a pandas or a lazy Dask frame."""
        import pandas as pd

        exploring = [stage for stage in self._stages() if stage.config.algorithm.schema_type == "experience"]
        if not exploring:
            raise DataError(f"{self.url} has no experiences: none of its stages explores")
        experiences = exploring[-1].log
        shards = experiences.shards()
        if dask:
            import dask.dataframe as dd

            # Dask needs the columns before it reads data.
            meta = experiences.read(shards[0]).slice(0, 0).to_pandas() if shards else pd.DataFrame()
            return dd.from_map(lambda name: experiences.read(name).to_pandas(), shards, meta=meta)
        frames = [experiences.read(name).to_pandas() for name in shards]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def sql(self, query: str) -> pd.DataFrame:
        """Return the result of a SQL query over the tables of the run (docs/lineage.md); needs the extra `sql`."""
        tables = RunTables(self.url)
        result = run_query(tables, query)
        warn_of(tables.problems)
        return result.to_pandas()

    def trace(self, uid: str) -> Trace:
        """Return the history of one experience, which can be printed. Raises: DataError: unknown uid."""
        return trace(self.url, uid)

    def plot(self) -> Figure:
        """Plot the curves of the run."""
        return plot_metrics([(stage.name, stage.metrics) for stage in self._stages()])

    def report(self) -> str:
        """Write `report.html` from the files of the run, and return its URL."""
        return report_run(self.url)

    def model_path(self) -> str:
        """Return the Hugging Face folder with the trained model of the last stage. Raises: DataError: none yet."""
        return _trained_model(self._stages()[-1].storage)

    def push_to_hub(self, repo: str, *, step: int | None = None, private: bool = True, merge_lora: bool = True) -> str:
        """Upload the model to the Hugging Face Hub as "owner/name", with a model card. Returns: the URL of its page.

        step: checkpoint step. None: the newest. Raises: UserError: the Hub refuses; DataError: no model yet.
        """
        from rftdask.driver.convert import push  # late: loads torch

        return push(self.url, repo, step=step, private=private, merge_lora=merge_lora)

    def _stages(self) -> list[StageReader]:
        return stages_of(self.config, open_storage(self.url))


@contextlib.contextmanager
def _stopping_on_interrupt(experiment: Experiment, view: ProgressView) -> Iterator[None]:
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        view.note("stopping: the trainer writes a checkpoint first (press Ctrl-C again to end at once)")
        # Keeps the `may_return` of an earlier `stop`.
        experiment.stop(experiment._may_return)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclasses.dataclass
class StageObserver:
    """Feeds the progress view, the tracker and the logs from the events of a stage."""

    experiment: Experiment
    config: Config
    number: int
    """Index of the stage, from 0."""
    num_stages: int
    storage: Storage
    cluster: Cluster
    view: ProgressView
    contents: BackgroundHasher
    watch: StallWatch

    def __post_init__(self) -> None:
        config, storage = self.config, self.storage
        self._began = self._fed = time.monotonic()
        self._first: tuple[int, float] | None = None
        """Step before the first reported one, and the time at which the first one began."""
        self._role = "trainer" if config.mode in ("both", "train") else "explorer"
        """Role whose steps count as steps of the stage."""
        self._rows: dict[str, list[Mapping[str, float]]] = {"trainer": [], "explorer": []}
        """Metrics of the first and last steps of each role."""
        self._report_imported = False
        self._warned: set[str] = set()
        self._logs = LogFolder(storage)
        self.log_folder = str(self._logs.path)
        self._feeds = open_feeds(config, storage)

    def show(self, work: StageWork, layout: Layout) -> None:
        """Show the stage before its first event, and the layout if roles share devices."""
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
        """Process an event of a role. Called in the thread that runs the stage."""
        self.contents.check()
        now, before = time.monotonic(), self.experiment._progress
        assert before is not None, "set by `show`"
        progress = dataclasses.replace(
            before, elapsed_s=now - self._began, workers=len(workers_of(self.cluster.client))
        )
        if not isinstance(event, Note | Alive):
            self.watch.progress()
        if isinstance(event, Note):
            self.view.note(event.text)
        elif isinstance(event, Evaluated):
            progress = dataclasses.replace(
                progress, accuracy=event.metrics.get("accuracy"), accuracy_step=event.version
            )
        if isinstance(event, StepFinished):
            rows = self._rows[event.role]
            rows.append(event.metrics)
            del rows[WINDOW:-WINDOW]  # warnings compare only the first and last steps
            warnings = warn_of_learning(self._rows["trainer"], self._rows["explorer"])
            for name in warnings.keys() - self._warned:  # once, while the condition lasts
                self.view.note(f"warning: {warnings[name]}")
            self._warned = set(warnings)
        # Only steps of one role move the bar. In mode both that is the trainer, whose end is the end of the run.
        if isinstance(event, StepFinished) and event.role == self._role:
            if self._first is None:
                self._first = (event.step - 1, now - event.metrics.get("step_s", 0.0))
            # Measured from the first step of this start, without earlier starts and the loading of models.
            pace = (now - self._first[1]) / max(1, event.step - self._first[0])
            total = progress.total_steps
            shown: dict[str, Any] = {name: event.metrics[name] for name in _SHOWN if name in event.metrics}
            eta_s = None if total is None else max(0, total - event.step) * pace
            progress = dataclasses.replace(progress, step=event.step, eta_s=eta_s, **shown)
            if not self._report_imported and (eta_s is None or eta_s < _REPORT_IMPORT_S):
                self._report_imported = True
                import_ahead()
        elif isinstance(event, StepFinished):
            progress = dataclasses.replace(progress, reward=event.metrics.get("reward", progress.reward))
        self.experiment._progress = progress
        self.view.update(progress)
        if now - self._fed > _FEED_INTERVAL_S:
            self._fed = now
            for feed in self._feeds:
                feed.poll()
        self._logs.poll()

    def close(self) -> None:
        self.contents.close()
        for feed in self._feeds:
            feed.close()
        self._logs.close()


def plan_run(config: Config, stages: list[Config]) -> Layout:
    """Plan the workers of the run. Raises: UserError: they are not available, or do not fit the memory."""
    layout = plan_cluster(config, stages)
    raise_shortages([*host_shortages(stages, layout, free_host_bytes()), *job_shortages(stages, layout)])
    # The memory of other machines is not known here.
    memory = gpu_memory() if config.cluster.is_one_machine else None
    shortages = {} if memory is None else gpu_shortages(stages, layout, memory)
    raise_shortages(text for text, is_certain in shortages.items() if is_certain)
    for text in shortages:
        log.warning("this is an estimate, and the run starts: %s", text)
    return layout


def _run_stage(stage: StageRun, storage: Storage) -> Ended:
    """Run a stage and record its end in its folder, since commands that take a run also take one of its stages."""
    run_folder.note_begin(storage)
    try:
        ended = stage.run()
    except BaseException as failure:
        with contextlib.suppress(StorageError):
            run_folder.note_end(storage, "failed", f"{type(failure).__name__}: {failure}")
        raise
    run_folder.note_end(storage, "stopped" if ended.stopped else "finished", "")
    return ended


def _trained_model(storage: Storage) -> str:
    step = newest_valid_checkpoint(storage)
    folder = f"{checkpoint_folder(step)}/{HF_FOLDER}" if step is not None else ""
    if step is None or "config.json" not in storage.list(folder):
        raise DataError(f"{storage.url} has no trained model yet; trainer.save_hf_checkpoint must not be never")
    return f"{storage.url}/{folder}"
