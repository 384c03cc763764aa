"""The experience log: everything sampled, in shards that are committed once and never change.

Contains the schema of a row (schema.py), the name of a shard (shard.py) and its bytes (columns.py), the interface of a
log (log.py) and its backends (file_log.py, sql_log.py), the writer of a work unit (writer.py), and the treatment of old
shards (compaction.py, retention.py). It does not know what was trained: the ledger does (rftdask/buffer/batches).
"""

from __future__ import annotations

from rftdask.buffer.batches.ledger import parent_storage, read_parent
from rftdask.buffer.log.file_log import JsonlLog, ParquetLog
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.config import Config
from rftdask.errors import UserError
from rftdask.storage import Storage

__all__ = ["EXPERIENCES", "ExperienceLog", "open_log"]


def open_log(storage: Storage, config: Config, folder: str = EXPERIENCES) -> ExperienceLog:
    """Open the log in `folder` of the run (or stage) with this config and this run folder.

    The backend depends only on the config, so later readers of the run open the same log.
    Raises: UserError: a package for the database is missing, or the environment lacks a variable that its URL names.
    """
    if folder == EXPERIENCES and read_parent(storage) is not None:
        return open_log(parent_storage(storage), config)  # a lineage trains the experiences of its run again
    buffer = config.buffer.trainer_input.experience_buffer
    # A run that learns from a dataset names the dataset there; the log of its evaluations has the default backend.
    kind = buffer.storage_type if config.algorithm.schema_type == "experience" else "queue"
    if kind == "sql":
        try:
            from rftdask.buffer.log.sql_log import SqlLog  # late: SQLAlchemy is an extra
        except ModuleNotFoundError as error:
            raise UserError(
                f"buffer.trainer_input.experience_buffer.storage_type sql needs SQLAlchemy ({error}); "
                "run `pip install 'rftdask[sql]'`"
            ) from error
        return SqlLog(storage, buffer.path, folder, config.name)
    return (JsonlLog if kind == "file" else ParquetLog)(storage, folder, config.name)
