"""Progress: up to which explore step the log is known to be complete, so that nobody lists a long log to find its
end.

A note beside the log, written now and then by whoever fills it, after the steps were complete. Losing it costs time:
the log is then listed from its start. Damaged shards that were set aside since then are looked up by their names.
"""

from __future__ import annotations

from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.shard import done_batches
from rftdask.errors import NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

COMPLETE = f"{EXPERIENCES}/COMPLETE.json"
NOTE_EVERY = 64
"""Explore steps between two notes: at most so many are listed again, and the note is written seldom."""


def note_complete(storage: Storage, explore_step: int) -> None:
    """Every explore step up to this one is complete in the log."""
    storage.put(COMPLETE, dump_checked({"explore_step": explore_step}))


def noted_complete(storage: Storage) -> int:
    """The step of the last note; 0 if there is none, or none that can be read."""
    try:
        return int(load_checked(storage.get(COMPLETE))["explore_step"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        return 0


def first_open_step(storage: Storage, log: ExperienceLog) -> int:
    """An explore step before which all are complete. What it costs does not grow with the log."""
    noted = noted_complete(storage)
    quarantined = log.quarantined() if noted else None
    if quarantined is None:
        return 1
    batches = {(name.explore_step, name.batch) for name in quarantined if name.explore_step <= noted}
    lost = [step for step, batch in batches if not _is_done(log, step, batch)]
    return min([noted + 1, *lost])


def _is_done(log: ExperienceLog, step: int, batch: int) -> bool:
    loose = log.find_all(step, batch)
    return bool(done_batches(loose)) or (step, batch) in done_batches([*loose, *log.compacted_shards(step, step)])
