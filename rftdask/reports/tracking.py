"""Tracking: feeds trackers from the files of a stage, in the driver during the run or with `rftdask track` at any time.

It contacts no process of the run, so it works in an environment with little more than the tracker's package, whose
requirements may conflict with those of training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rftdask.buffer.log import open_log
from rftdask.config import Config
from rftdask.errors import DamagedError, NotFoundError, UserError
from rftdask.monitor.trackers import RolloutRow, TrackerFeed, make_tracker
from rftdask.reports.run_reader import open_stages
from rftdask.run.run_folder import read_end
from rftdask.storage import Storage, open_storage

logger = logging.getLogger(__name__)

MAX_ROLLOUTS = 16
"""Rollouts per explore step in a table: few enough for services that charge by size. `rftdask studio` shows all."""
# After the task, in the order of the fields of RolloutRow.
_COLUMNS = ["taskset", "epoch", "task_index", "rollout", "prompt_text", "response_text", "truth", "reward", "status"]


def open_feeds(config: Config, storage: Storage) -> list[TrackerFeed]:
    """Open the configured trackers of a stage. Raises: UserError: see `make_tracker`."""
    monitor = config.monitor
    trackers = [(monitor.monitor_type, monitor.monitor_args)]
    trackers += [(str(tracker["name"]), tracker.get("args") or {}) for tracker in monitor.extra_monitors]
    return [open_feed(config, storage, *tracker) for tracker in trackers]


def open_feed(config: Config, storage: Storage, monitor_type: str, args: Mapping[str, Any]) -> TrackerFeed:
    """Open a tracker for a stage, which continues where the last one of this name stopped."""
    tracker = make_tracker(
        monitor_type,
        folder=None if "://" in storage.url else Path(storage.url, "monitor"),
        project=config.project,
        name=config.name,
        config=config.to_dict(),
        args=args,
        plugin_dirs=config.explorer.plugin_dirs,
    )
    rollouts = partial(_rollouts, config, storage)
    return TrackerFeed(storage, tracker, monitor_type, lambda step: list(islice(rollouts(step), MAX_ROLLOUTS)))


def _rollouts(config: Config, storage: Storage, step: int) -> Iterator[RolloutRow]:
    """Yield the rollouts of an explore step; unreadable shards are skipped with a warning."""
    log = open_log(storage, config)
    for name in log.shards(step):
        if name.explore_step > step:
            break
        try:
            for row in log.read(name, _COLUMNS).select(_COLUMNS).to_pylist():
                taskset, epoch, task, *columns = row.values()
                yield RolloutRow(f"{taskset}/{epoch}/{task}", *columns)
        except (DamagedError, NotFoundError) as error:  # quarantined or removed by retention in the meantime
            logger.warning("trackers do not show the rollouts of explore step %d: %s", step, error)


def track(run: str, monitor_type: str, args: Mapping[str, Any], wait: Callable[[], bool] | None = None) -> int:
    """Feed a tracker with the new rows of a run, and return the number of rows.

    Args:
        args: arguments of the tracker, like monitor.monitor_args.
        wait: called between two polls until the run has ended; returning False stops following. None: poll once.
    Raises: UserError: no such run or tracker, or the tracker failed; StorageError.
    """
    storage = open_storage(run)
    feed: TrackerFeed | None = None
    num_rows = num_done = 0
    try:
        while True:
            has_ended = read_end(storage) is not None  # read first, so that the last rows are included
            begun = [stage for stage in open_stages(run) if stage.has_begun]
            # One stage after another, since few packages support two runs in a process.
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
