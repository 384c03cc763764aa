"""Which backend the experience log of a run has: known from its config, and so to those who read the run later."""

from __future__ import annotations

from rftdask.buffer.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log_files import ParquetLog
from rftdask.buffer.parent import parent_storage, read_parent
from rftdask.config import Config
from rftdask.storage import Storage


def open_log(storage: Storage, config: Config, folder: str = EXPERIENCES) -> ExperienceLog:
    """The log below `folder` of the run (or stage) with this config, whose run folder is `storage`."""
    if folder == EXPERIENCES and read_parent(storage) is not None:
        return open_log(parent_storage(storage), config)  # a lineage trains the experiences of its run again
    return ParquetLog(storage, folder, config.name)
