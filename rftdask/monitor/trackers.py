"""Trackers: TensorBoard, Weights & Biases, MLflow, SwanLab and trackio as views of the files of a run.

A tracker is fed from storage (`TrackerFeed`), never by the roles themselves: what the files have, the tracker gets,
whichever process died. The driver feeds those of the configuration; `rftdask track` feeds any other one, from another
environment or when the run has ended. A tracker knows neither storage nor roles.

Invariant: a row is logged at least once; after a crash of who feeds it the last few may be logged again.
"""

from __future__ import annotations

import html
import json
import logging
import math
import os
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from rftdask.config import fill_from_environment
from rftdask.config.plugins import bind_arguments, find_part, read_parts
from rftdask.errors import NotFoundError, UserError
from rftdask.monitor.metrics import MetricsFollower, MetricsRow
from rftdask.storage.base import Storage
from rftdask.storage.checked_json import parse_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run."""

    folder: Path
    """Local folder for the tracker's files."""
    project: str
    name: str
    config: Mapping[str, Any]
    """For trackers that show configurations; holds no secrets."""
    is_temporary: bool = False
    """Whether `folder` is lost with this process, because the run is not on a local file system."""


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy, as a row of a table."""

    task: str
    """Its group: "gsm8k/0/17"."""
    rollout: int
    prompt: str
    response: str
    truth: str
    reward: float | None
    """None: the rollout failed."""
    status: str


COLUMNS = ("step", *(each.name for each in fields(Rollout)))
"""Of a table of rollouts; the first is the explore step."""


class Tracker(ABC):
    """Where a run is shown while it goes on. Made as `Tracker(run, **monitor_args)`."""

    monitor_type: ClassVar[str] = ""
    """Name in a configuration. A class without one is named as `package.module.Name`."""
    keeps_history: bool = True
    """Whether a new tracker for the same run continues what the former one logged."""

    @abstractmethod
    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Show `metrics` as `<role>/<name>` at `step`; `time_s` is when they were measured, Unix seconds."""

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:  # noqa: B027 -- not all have tables
        """Show answers of an explore step. They are read only for a tracker that overrides this."""

    def flush(self) -> None:  # noqa: B027 -- most trackers have nothing to flush
        """Hand over what is still in memory."""

    def close(self) -> None:  # noqa: B027 -- as above
        """Flush and end. Idempotent."""


class NoTracker(Tracker):
    """Shows nothing; the files in the run folder are complete anyway."""

    monitor_type: ClassVar[str] = "none"

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Nothing."""


class TensorBoardTracker(Tracker):
    """Event files in `<folder>/tensorboard/<role>`, by the tensorboard package alone (no torch, no TensorFlow)."""

    monitor_type: ClassVar[str] = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        with _extra("tensorboard"):
            # Late: half a second.
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.plugins.text.metadata import create_summary_metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        # Files that are lost with this process cannot be gone on with, so the next tracker gets all rows again.
        self.keeps_history = not run.is_temporary
        self.folder = run.folder / "tensorboard"
        self._event, self._summary, self._open = event_pb2.Event, summary_pb2.Summary, EventFileWriter
        self._tensor, self._text = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._about_text = create_summary_metadata("rollouts", description="")
        self._writers: dict[str, Any] = {}

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """One event; each role has a writer, and so a curve, of its own."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(role, step, values, time_s)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A table in the tab of texts."""
        text = self._tensor(dtype=self._text, string_val=[markdown_table(step, rollouts).encode()])
        self._add("explorer", step, [self._summary.Value(tag="rollouts", metadata=self._about_text, tensor=text)], None)

    def _add(self, role: str, step: int, values: list[Any], time_s: float | None) -> None:
        if role not in self._writers:
            self._writers[role] = self._open(str(self.folder / role))
        event = self._event(wall_time=time.time() if time_s is None else time_s, step=step)
        event.summary.value.extend(values)
        self._writers[role].add_event(event)

    def flush(self) -> None:
        """Writers keep events for up to two minutes otherwise."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes the writers; a later `log` would open new files."""
        while self._writers:
            self._writers.popitem()[1].close()


class WandbTracker(Tracker):
    """One Weights & Biases run, continued by name; without an API key it is written offline, to be synced later."""

    monitor_type: ClassVar[str] = "wandb"

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        """args: further arguments of `wandb.init`."""
        with _extra("wandb"):
            import wandb  # late: an optional package
        run.folder.mkdir(parents=True, exist_ok=True)
        if wandb.api.api_key is None and "mode" not in args:
            # Its init would ask on the terminal, for ever in a batch job.
            args = {"mode": os.environ.get("WANDB_MODE", "offline"), **args}
        identity = _plain(f"{run.project}-{run.name}")
        settings = {"project": run.project, "name": run.name, "id": identity, "resume": "allow", "dir": str(run.folder)}
        self._run: Any = wandb.init(**{**settings, "config": dict(run.config), **args})
        self._roles: set[str] = set()
        self._table = wandb.Table(columns=list(COLUMNS), log_mode="INCREMENTAL")

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """`time_s` is not told: a run of Weights & Biases has its own clock."""
        # Each role counts its own steps, so wandb's one global step cannot be used.
        if role not in self._roles:
            self._run.define_metric(f"{role}/*", step_metric=f"{role}/step")
            self._roles.add(role)
        self._run.log({f"{role}/step": step, **{f"{role}/{key}": value for key, value in metrics.items()}})

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Rows of one table, which grows: of tables that are logged one by one only the last would be seen."""
        for row in table_rows(step, rollouts):
            self._table.add_data(*row)
        self._run.log({"explorer/step": step, "rollouts": self._table})

    def close(self) -> None:
        """Waits until what was logged is uploaded, or written where it is offline."""
        self._run.finish()


class MlflowTracker(Tracker):
    """One MLflow run, found again by its name; by default in `<folder>/mlflow` unless MLFLOW_TRACKING_URI is set."""

    monitor_type: ClassVar[str] = "mlflow"

    def __init__(self, run: TrackedRun, tracking_uri: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        # It reports its use to its makers, and where it cannot, each of its calls waits for that.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with _extra("mlflow"):
            import mlflow  # late: an optional package
            from mlflow.entities import Metric
        run.folder.mkdir(parents=True, exist_ok=True)
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # mlflow-skinny has no database, and mlflow asks for this consent before it writes files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlflow").resolve().as_uri()
        self._metric = Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        # It stands between such quotes in the query below.
        own_name = run.name.replace("'", "")
        query = f"tags.rftdask_run = '{own_name}'"
        known = self._client.search_runs([experiment_id], query, max_results=1)
        tags = {"rftdask_run": own_name, **(tags or {})}
        found = known[0] if known else self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._run_id: str = found.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        # A run that was found has it already, from its first start.
        if not known:
            self._client.log_dict(self._run_id, dict(run.config), "config.json")

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """One batch; times are milliseconds, and characters that MLflow refuses in names become "_"."""
        now_ms = int(1000 * (time_s or 0))
        names = {key: re.sub(r"[^\w\-. /]", "_", f"{role}/{key}") for key in metrics}
        rows = [self._metric(names[key], value, now_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A file for each step, which MLflow shows as a table: one for all would be read again for each step."""
        table = {"columns": COLUMNS, "data": table_rows(step, rollouts)}
        self._client.log_dict(self._run_id, table, f"rollouts/{step:08d}.json")

    def close(self) -> None:
        """Marks the run as finished; a tracker that comes later marks it as running again."""
        self._client.set_terminated(self._run_id)


class SwanLabTracker(Tracker):
    """One SwanLab experiment, continued by its id; without an API key it is written offline, to be synced later."""

    monitor_type: ClassVar[str] = "swanlab"

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        """args: further arguments of `swanlab.init`."""
        with _extra("swanlab"):
            import swanlab  # late: an optional package
        # Its init would ask on the terminal. A run that is not online has no id there: each start is an experiment.
        mode = args.get("mode") or os.environ.get("SWANLAB_MODE") or ("online" if _swanlab_key() else "offline")
        settings = {
            "project": _plain(run.project),
            "name": run.name,
            "mode": mode,
            "log_dir": str(run.folder / "swanlab"),
        }
        if mode == "online":
            settings |= {"id": _plain(f"{run.project}-{run.name}"), "resume": "allow"}
        self._swanlab = swanlab
        self._run: Any = swanlab.init(**{**settings, "config": dict(run.config), **args})

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """`time_s` is not told: SwanLab has its own clock. A curve has no place for a value that is no number."""
        finite = {f"{role}/{key}": value for key, value in metrics.items() if math.isfinite(value)}
        if finite:
            self._run.log(finite, step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A table at each step."""
        table = self._swanlab.echarts.Table().add(list(COLUMNS), table_rows(step, rollouts))
        self._run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        """Waits until what was logged is uploaded, or written where it is offline."""
        self._run.finish()


class TrackioTracker(Tracker):
    """One trackio run, continued by its name; in trackio's folder, or on the server or Space that `args` name."""

    monitor_type: ClassVar[str] = "trackio"

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        """args: further arguments of `trackio.init`."""
        with _extra("trackio"):
            import trackio  # late: an optional package
        self._trackio = trackio
        settings = {"project": _plain(run.project), "name": run.name, "resume": "allow", "embed": False}
        self._run: Any = trackio.init(**{**settings, "config": dict(run.config), **args})

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """`time_s` is not told: trackio has its own clock."""
        self._run.log({f"{role}/{key}": value for key, value in metrics.items()}, step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A table at each step."""
        import pandas as pd  # late: half a second

        frame = pd.DataFrame(table_rows(step, rollouts), columns=list(COLUMNS))
        self._run.log({"rollouts": self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        """Waits until what was logged is written or sent."""
        self._run.finish()


def _swanlab_key() -> bool:
    """Whether somebody has logged in, by the variable or by `swanlab login`."""
    folder = Path(os.environ.get("SWANLAB_SAVE_DIR", "~/.swanlab")).expanduser()
    return "SWANLAB_API_KEY" in os.environ or (folder / ".netrc").exists()


def _plain(name: str) -> str:
    """A name of letters, digits, "_" and "-", 64 at most; the same at every start, so that a run is found again."""
    return re.sub(r"[^\w-]", "-", name)[-64:]


def table_rows(step: int, rollouts: Sequence[Rollout]) -> list[list[Any]]:
    """Rows of a table with COLUMNS."""
    return [[step, *astuple(rollout)] for rollout in rollouts]


def markdown_table(step: int, rollouts: Sequence[Rollout]) -> str:
    """The same as Markdown."""

    def cell(value: Any) -> str:
        return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")

    lines = [[str(name) for name in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[cell(value) for value in row] for row in table_rows(step, rollouts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_tracker(
    monitor_type: str,
    *,
    folder: Path | None,
    project: str,
    name: str,
    config: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    plugin_dirs: Sequence[str] = (),
) -> Tracker:
    """The tracker that `monitor_type` names: a registered one, `package.module.Name`, or one of `plugin_dirs`.

    Args:
        folder: local path of `<run>/monitor`; None when the run is not on a local file system, then the tracker's
            files go to a temporary folder of this machine, named in a warning. The metrics files are complete anyway.
        config: shown by trackers that show configurations; must hold no secrets.
        args: `monitor_args`, the further arguments of the tracker.
    Raises: UserError: an unknown type or argument, or its package is not installed.
    """
    registered = read_parts("rftdask.monitor.trackers", "monitor_type")
    tracker = find_part("monitor", monitor_type, registered, plugin_dirs)
    args = fill_from_environment(args or {})
    bind_arguments("monitor.monitor_args", tracker, args, supplied=1)
    is_temporary = folder is None
    # Before any folder is made for it.
    if tracker is NoTracker:
        return NoTracker(TrackedRun(Path(), project, name, {}))
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="rftdask-monitor-"))
        logger.warning(
            "the run is not on a local file system: files of monitor_type %s are in %s", monitor_type, folder
        )
    made: Tracker = tracker(TrackedRun(folder, project, name, config or {}, is_temporary), **(args or {}))
    return made


class TrackerFeed:
    """Gives a tracker the rows of a run. Where it has come to is kept on storage, for the next driver.

    A tracker that raises is set aside with a warning (`error`), because it must not end a training run: the rows
    are in the files, and the next driver goes on from the last cursor.

    Example:
        feed = TrackerFeed(storage, make_tracker("tensorboard", folder=..., project="p", name="n"), "tensorboard")
        feed.poll()   # now and then
        feed.close()  # the rest, then the tracker
    """

    def __init__(
        self,
        storage: Storage,
        tracker: Tracker,
        monitor_type: str,
        read_rollouts: Callable[[int], Sequence[Rollout]] | None = None,
    ) -> None:
        """read_rollouts: gives answers of an explore step, for a tracker that shows them."""
        self._storage, self._tracker = storage, tracker
        shows = type(tracker).log_rollouts is not Tracker.log_rollouts
        self._read_rollouts = read_rollouts if shows else None
        self._path = f"monitor/{monitor_type}_cursor.json"
        cursor: dict[str, int] = {}
        if tracker.keeps_history:
            with suppress(NotFoundError):
                cursor = {path: int(count) for path, count in parse_object(storage.get(self._path)).items()}
        self._follower = MetricsFollower(storage, cursor)
        self.error: Exception | None = None

    def poll(self) -> int:
        """Log the new rows and return their number; 0 once the tracker has failed. Raises: StorageError."""
        if self.error:
            return 0
        rows = self._follower.poll()
        # The cursor after the rows: a crash between the two logs them again, which no tracker minds, and loses none.
        if rows and self._try(lambda: self._log(rows)):
            self._storage.put(self._path, json.dumps(self._follower.cursor).encode())
        return 0 if self.error else len(rows)

    def close(self) -> None:
        """Log the rest, then close the tracker. Raises: StorageError."""
        self.poll()
        self._try(self._tracker.close)  # also one that has failed: it may hold files or a connection

    def _log(self, rows: list[MetricsRow]) -> None:
        for row in rows:
            # A tag that is not the stage tells apart rows of one step, so it must be in the name.
            prefix = "".join(f"{value}/" for tag, value in sorted(row.tags.items()) if tag != "stage")
            self._tracker.log(row.role, row.step, {prefix + k: v for k, v in row.metrics.items()}, row.time_s)
            # An explore step is committed before its metrics are written, so what is shown of it is whole.
            if row.role == "explorer" and self._read_rollouts and (rollouts := self._read_rollouts(row.step)):
                self._tracker.log_rollouts(row.step, rollouts)
        self._tracker.flush()

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # whatever a tracker's package raises; see the class
            # The first error is the cause: closing a tracker that has failed often fails as well.
            self.error = self.error or error
            logger.warning("%s failed and is not fed any more: %s", type(self._tracker).__name__, error, exc_info=True)
        return self.error is None


@contextmanager
def _extra(package: str) -> Iterator[None]:
    """Names the extra to install when an import in its block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"monitor_type {package} needs the package {error.name!r}: "
            f'pip install "rftdask[{package}]", or set monitor.monitor_type to none'
        ) from error
