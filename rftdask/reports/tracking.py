"""Tracking: the trackers of a stage, fed from its files: by the driver while it runs, by `rftdask track` at any time.

It knows the files of a stage, and of a tracker only its name and arguments; no process of the run, so it works in an
environment with little else than the tracker's package, which may want other versions than training does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rftdask.buffer.log import open_log
from rftdask.config import Config
from rftdask.errors import DamagedError, NotFoundError, UserError
from rftdask.monitor.trackers import Rollout, TrackerFeed, make_tracker
from rftdask.reports.run_reader import open_stages
from rftdask.run.run_folder import read_end
from rftdask.storage import Storage, open_storage

logger = logging.getLogger(__name__)

MOST_ROLLOUTS = 16
"""Answers of an explore step that a table shows: enough to read, and few enough for a service that is paid by size.
All of them are in the log, which `rftdask studio` shows."""
_COLUMNS = ["taskset", "epoch", "task_index", "rollout", "prompt_text", "response_text", "truth", "reward", "status"]


def open_feeds(config: Config, storage: Storage) -> list[TrackerFeed]:
    """The trackers that the configuration of a stage names. Raises: UserError: see `make_tracker`."""
    monitor = config.monitor
    named = [(monitor.monitor_type, monitor.monitor_args)]
    named += [(str(tracker["name"]), tracker.get("args") or {}) for tracker in monitor.extra_monitors]
    return [open_feed(config, storage, *tracker) for tracker in named]


def open_feed(config: Config, storage: Storage, monitor_type: str, args: Mapping[str, Any]) -> TrackerFeed:
    """A tracker for a stage, which goes on where the last one of this name ended."""
    tracker = make_tracker(
        monitor_type,
        folder=None if "://" in storage.url else Path(storage.url, "monitor"),
        project=config.project,
        name=config.name,
        config=config.to_dict(),
        args=args,
        plugin_dirs=config.explorer.plugin_dirs,
    )

    def read_rollouts(step: int) -> list[Rollout]:
        found: list[Rollout] = []
        for row in _rows(config, storage, step):
            task = f"{row['taskset']}/{row['epoch']}/{row['task_index']}"
            texts = (row["prompt_text"], row["response_text"], row["truth"])
            found.append(Rollout(task, row["rollout"], *texts, row["reward"], row["status"]))
            if len(found) == MOST_ROLLOUTS:
                break
        return found

    return TrackerFeed(storage, tracker, monitor_type, read_rollouts)


def _rows(config: Config, storage: Storage, step: int) -> Iterator[dict[str, Any]]:
    """Rows of an explore step; a shard that cannot be read is left out, with a warning."""
    log = open_log(storage, config)
    for name in log.shards(step):
        if name.explore_step > step:
            break
        try:
            yield from log.read(name, _COLUMNS).select(_COLUMNS).to_pylist()
        except (DamagedError, NotFoundError) as error:  # quarantined meanwhile, or dropped by retention
            logger.warning("answers of explore step %d are not shown by trackers: %s", step, error)


def track(run: str, monitor_type: str, args: Mapping[str, Any], wait: Callable[[], bool] | None = None) -> int:
    """Give a tracker what it has not had of a run; the number of rows of metrics.

    Args:
        args: of the tracker, as in monitor.monitor_args.
        wait: called between two looks until the run has ended; False ends the following. None: one look.
    Raises: UserError: no such run or tracker, or the tracker failed; StorageError.
    """
    storage = open_storage(run)
    feed: TrackerFeed | None = None
    num_rows = num_done = 0
    try:
        while True:
            has_ended = read_end(storage) is not None  # asked first, so that the last rows are there
            begun = [stage for stage in open_stages(run) if stage.has_begun]
            # One after another: few packages hold two runs in a process.
            for number, stage in enumerate(begun[num_done:], start=num_done):
                feed = feed or open_feed(stage.config, stage.storage, monitor_type, args)
                num_rows += _checked(feed, feed.poll())
                if number < len(begun) - 1:
                    feed.close()
                    _checked(feed)
                    feed, num_done = None, number + 1
            if has_ended or wait is None or not wait():
                break
    finally:
        if feed is not None:
            feed.close()
    if feed is not None:
        _checked(feed)
    return num_rows


def _checked(feed: TrackerFeed, num_rows: int = 0) -> int:
    if feed.error:
        raise UserError(f"the tracker failed: {type(feed.error).__name__}: {feed.error}") from feed.error
    return num_rows
