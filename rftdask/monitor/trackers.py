"""Trackers: TensorBoard, Weights & Biases, MLflow, SwanLab and trackio as views of the files of a run.

A `TrackerFeed` feeds a tracker from storage, so it receives everything in the files, whichever process dies. The driver
feeds the configured trackers; `rftdask track` feeds any other one, from another environment or after the run.

Invariant: a row is logged at least once; after a crash of the feeding process, the last few rows are logged again.
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
from importlib import import_module
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
    """Run as seen by a tracker."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    """Configuration without secrets, for trackers that show it."""
    is_temporary: bool = False
    """True if `folder` is lost with this process, because the run is not on a local file system."""


@dataclass(frozen=True)
class RolloutRow:
    task: str
    """Name of the group, for example "gsm8k/0/17"."""
    rollout: int
    prompt: str
    response: str
    truth: str
    reward: float | None
    """None: the rollout failed."""
    status: str


COLUMNS = ("step", *(field.name for field in fields(RolloutRow)))
"""Columns of a table of rollouts; "step" is the explore step."""


class Tracker(ABC):
    """A service that shows a run. Created as `Tracker(run, **monitor_args)`."""

    monitor_type: ClassVar[str] = ""
    """Name in a configuration. Classes without a name are configured as `package.module.Name`."""
    keeps_history: bool = True
    """True if a new tracker for the same run continues the log of the previous one."""

    @abstractmethod
    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Show `metrics` as `<role>/<name>` at `step`; `time_s` is the time of measurement in Unix seconds."""

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRow]) -> None:  # noqa: B027 -- not all have tables
        """Show rollouts of an explore step. They are read only for trackers that override this method."""

    def flush(self) -> None:  # noqa: B027 -- most trackers have nothing to flush
        """Send everything that is still in memory."""

    def close(self) -> None:  # noqa: B027 -- as above
        """Flush and close. Idempotent."""


class NoTracker(Tracker):
    """Tracker that shows nothing; the files in the run folder are complete without it."""

    monitor_type: ClassVar[str] = "none"

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None: ...


class TensorBoardTracker(Tracker):
    """Event files in `<folder>/tensorboard/<role>`, written by the tensorboard package (no torch, no TensorFlow)."""

    monitor_type: ClassVar[str] = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        with _extra("tensorboard"):
            # late: half a second
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.plugins.text.metadata import create_summary_metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        # Files in a temporary folder cannot be continued, so the next tracker receives all rows again.
        self.keeps_history = not run.is_temporary
        self.folder = run.folder / "tensorboard"
        self._event, self._summary, self._open = event_pb2.Event, summary_pb2.Summary, EventFileWriter
        self._tensor, self._text = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._about_text = create_summary_metadata("rollouts", description="")
        self._writers: dict[str, Any] = {}

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Write one event; each role has its own writer and therefore its own curve."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(role, step, values, time_s)

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRow]) -> None:
        text = self._tensor(dtype=self._text, string_val=[markdown_table(step, rollouts).encode()])
        self._add("explorer", step, [self._summary.Value(tag="rollouts", metadata=self._about_text, tensor=text)], None)

    def _add(self, role: str, step: int, values: list[Any], time_s: float | None) -> None:
        if role not in self._writers:
            self._writers[role] = self._open(str(self.folder / role))
        event = self._event(wall_time=time.time() if time_s is None else time_s, step=step)
        event.summary.value.extend(values)
        self._writers[role].add_event(event)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()  # otherwise it keeps events for up to two minutes

    def close(self) -> None:
        """Flush and close the writers; a later `log` would open new files."""
        while self._writers:
            self._writers.popitem()[1].close()


class MlflowTracker(Tracker):
    """One MLflow run, continued by its name; in `<folder>/mlflow` unless MLFLOW_TRACKING_URI is set."""

    monitor_type: ClassVar[str] = "mlflow"

    def __init__(self, run: TrackedRun, tracking_uri: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        # Without network, each call of MLflow would wait for its telemetry.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with _extra("mlflow"):
            import mlflow  # late: an optional package
            from mlflow.entities import Metric
        run.folder.mkdir(parents=True, exist_ok=True)
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # mlflow-skinny has no database, and mlflow requires this variable to write files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlflow").resolve().as_uri()
        self._metric = Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        quoted_name = run.name.replace("'", "")  # for the query
        query = f"tags.rftdask_run = '{quoted_name}'"
        existing = self._client.search_runs([experiment_id], query, max_results=1)
        tags = {"rftdask_run": quoted_name, **(tags or {})}
        mlflow_run = existing[0] if existing else self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._run_id: str = mlflow_run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        if not existing:
            self._client.log_dict(self._run_id, dict(run.config), "config.json")

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Log one batch; times are in milliseconds, and characters that MLflow rejects in names become "_"."""
        now_ms = int(1000 * (time_s or 0))
        names = {key: re.sub(r"[^\w\-. /]", "_", f"{role}/{key}") for key in metrics}
        rows = [self._metric(names[key], value, now_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRow]) -> None:
        """Log one file per step, which MLflow shows as a table; a single file would be read again at each step."""
        table = {"columns": COLUMNS, "data": table_rows(step, rollouts)}
        self._client.log_dict(self._run_id, table, f"rollouts/{step:08d}.json")

    def close(self) -> None:
        """Mark the run as finished; a later tracker marks it as running again."""
        self._client.set_terminated(self._run_id)


class _WandbStyleTracker(Tracker):
    """Base of trackers whose packages share the API of Weights & Biases: `init`, `log` and `finish`."""

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        """args: further arguments of the package's `init`."""
        with _extra(self.monitor_type):
            self._package: Any = import_module(self.monitor_type)
        settings = {"project": _plain(run.project), "name": run.name, "config": dict(run.config)}
        self._run: Any = self._package.init(**{**settings, **self._settings(run, args), **args})

    @abstractmethod
    def _settings(self, run: TrackedRun, args: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `init` for this package; `args` takes precedence over them."""

    @abstractmethod
    def _table(self, step: int, rollouts: Sequence[RolloutRow]) -> Any:
        """Make a table of the package."""

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Log metrics; `time_s` is ignored, because the package uses its own clock."""
        self._run.log({f"{role}/{key}": value for key, value in metrics.items()}, step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRow]) -> None:
        self._run.log({"rollouts": self._table(step, rollouts)}, step=step)

    def close(self) -> None:
        """Wait until everything is uploaded, or written to disk in offline mode."""
        self._run.finish()


class WandbTracker(_WandbStyleTracker):
    """One Weights & Biases run, continued by name; offline without an API key, to be synchronized later."""

    monitor_type: ClassVar[str] = "wandb"

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        super().__init__(run, **args)
        self._roles: set[str] = set()
        self._rollouts = self._package.Table(columns=list(COLUMNS), log_mode="INCREMENTAL")

    def _settings(self, run: TrackedRun, args: Mapping[str, Any]) -> dict[str, Any]:
        run.folder.mkdir(parents=True, exist_ok=True)
        settings = {"project": run.project, "dir": str(run.folder), **_identity(run)}
        if self._package.api.api_key is None:
            # Without a key, init would prompt on the terminal and block a batch job forever.
            settings["mode"] = os.environ.get("WANDB_MODE", "offline")
        return settings

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        # Each role has its own step metric, because a run has only one global step.
        if role not in self._roles:
            self._run.define_metric(f"{role}/*", step_metric=f"{role}/step")
            self._roles.add(role)
        self._run.log({f"{role}/step": step, **{f"{role}/{key}": value for key, value in metrics.items()}})

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRow]) -> None:
        """Add rows to one table, because wandb shows only the last of several tables."""
        self._run.log({"explorer/step": step, "rollouts": self._table(step, rollouts)})

    def _table(self, step: int, rollouts: Sequence[RolloutRow]) -> Any:
        for row in table_rows(step, rollouts):
            self._rollouts.add_data(*row)
        return self._rollouts


class SwanLabTracker(_WandbStyleTracker):
    """One SwanLab experiment, continued by its id; offline without an API key, to be synchronized later."""

    monitor_type: ClassVar[str] = "swanlab"

    def _settings(self, run: TrackedRun, args: Mapping[str, Any]) -> dict[str, Any]:
        # A key is in the environment or from `swanlab login`. Without one, init would prompt on the terminal.
        login = Path(os.environ.get("SWANLAB_SAVE_DIR", "~/.swanlab")).expanduser() / ".netrc"
        has_key = "SWANLAB_API_KEY" in os.environ or login.exists()
        mode = args.get("mode") or os.environ.get("SWANLAB_MODE") or ("online" if has_key else "offline")
        settings = {"mode": mode, "log_dir": str(run.folder / "swanlab")}
        # Offline runs have no id, so each start is a new experiment.
        return settings | _identity(run) if mode == "online" else settings

    def log(self, role: str, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Log the finite metrics; SwanLab accepts no others."""
        if finite := {key: value for key, value in metrics.items() if math.isfinite(value)}:
            super().log(role, step, finite)

    def _table(self, step: int, rollouts: Sequence[RolloutRow]) -> Any:
        return self._package.echarts.Table().add(list(COLUMNS), table_rows(step, rollouts))


class TrackioTracker(_WandbStyleTracker):
    """One trackio run, continued by its name, in trackio's folder or on the server or Space given in `args`."""

    monitor_type: ClassVar[str] = "trackio"

    def _settings(self, run: TrackedRun, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"resume": "allow", "embed": False}

    def _table(self, step: int, rollouts: Sequence[RolloutRow]) -> Any:
        import pandas as pd  # late: half a second

        return self._package.Table(dataframe=pd.DataFrame(table_rows(step, rollouts), columns=list(COLUMNS)))


def _identity(run: TrackedRun) -> dict[str, str]:
    """Arguments of `init` that continue the run of an earlier start."""
    return {"id": _plain(f"{run.project}-{run.name}"), "resume": "allow"}


def _plain(name: str) -> str:
    """Reduce a name to at most 64 letters, digits, "_" and "-", in the same way at each start."""
    return re.sub(r"[^\w-]", "-", name)[-64:]


def table_rows(step: int, rollouts: Sequence[RolloutRow]) -> list[list[Any]]:
    return [[step, *astuple(rollout)] for rollout in rollouts]


def markdown_table(step: int, rollouts: Sequence[RolloutRow]) -> str:
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
    """Create a tracker.

    Args:
        monitor_type: registered name, `package.module.Name`, or a class in `plugin_dirs`.
        folder: local path of `<run>/monitor`. None: the run is not on a local file system, so the tracker's files go
            to a temporary folder, which is logged as a warning.
        config: configuration without secrets, for trackers that show it.
        args: `monitor_args`, further arguments of the tracker.
    Raises: UserError: unknown type or argument, or its package is not installed.
    """
    registered = read_parts("rftdask.monitor.trackers", "monitor_type")
    tracker = find_part("monitor", monitor_type, registered, plugin_dirs)
    args = fill_from_environment(args or {})
    bind_arguments("monitor.monitor_args", tracker, args, supplied=1)
    is_temporary = folder is None and tracker is not NoTracker  # which needs no folder
    if is_temporary:
        folder = Path(tempfile.mkdtemp(prefix="rftdask-monitor-"))
        logger.warning(
            "the run is not on a local file system: files of monitor_type %s are in %s", monitor_type, folder
        )
    instance: Tracker = tracker(TrackedRun(folder or Path(), project, name, config or {}, is_temporary), **args)
    return instance


class TrackerFeed:
    """Feeds the rows of a run to a tracker, and keeps its position on storage for the next driver.

    A tracker that raises is disabled with a warning (see `error`), because it must not end the run. The next driver
    continues from the last stored position.
    """

    def __init__(
        self,
        storage: Storage,
        tracker: Tracker,
        monitor_type: str,
        read_rollouts: Callable[[int], Sequence[RolloutRow]] | None = None,
    ) -> None:
        """read_rollouts: returns rollouts of an explore step, for trackers that show them."""
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
        # Store the position after the rows: a crash in between logs rows again, but never loses any.
        if rows and self._try(lambda: self._log(rows)):
            self._storage.put(self._path, json.dumps(self._follower.cursor).encode())
        return 0 if self.error else len(rows)

    def close(self) -> None:
        """Log the remaining rows, then close the tracker. Raises: StorageError."""
        self.poll()
        self._try(self._tracker.close)  # even after a failure, since it may hold files or a connection

    def _log(self, rows: list[MetricsRow]) -> None:
        for row in rows:
            # Tags other than the stage distinguish rows of one step, so they become part of the name.
            prefix = "".join(f"{value}/" for tag, value in sorted(row.tags.items()) if tag != "stage")
            self._tracker.log(row.role, row.step, {prefix + k: v for k, v in row.metrics.items()}, row.time_s)
            # An explore step is committed before its metrics are written, so its rollouts are complete.
            if row.role == "explorer" and self._read_rollouts and (rollouts := self._read_rollouts(row.step)):
                self._tracker.log_rollouts(row.step, rollouts)
        self._tracker.flush()

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # packages raise arbitrary errors; see the class docstring
            # Keep the first error, since closing a failed tracker often fails as well.
            self.error = self.error or error
            logger.warning("%s failed and is disabled: %s", type(self._tracker).__name__, error, exc_info=True)
        return self.error is None


@contextmanager
def _extra(package: str) -> Iterator[None]:
    """Raise UserError with the extra to install if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"monitor_type {package} needs the package {error.name!r}: "
            f'pip install "rftdask[{package}]", or set monitor.monitor_type to none'
        ) from error
