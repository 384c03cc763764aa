"""Which backend the experience log of a run has: known from its config, and so to those who read the run later."""

from __future__ import annotations

from rftdask.buffer.batches.lineage import parent_storage, read_parent
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.jsonl_log import JsonlLog
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.config import Config
from rftdask.errors import UserError
from rftdask.storage import Storage


def open_log(storage: Storage, config: Config, folder: str = EXPERIENCES) -> ExperienceLog:
    """The log below `folder` of the run (or stage) with this config, whose run folder is `storage`.

    Raises: UserError: a package for the database is missing, or the environment lacks a variable that its URL names.
    """
    if folder == EXPERIENCES and read_parent(storage) is not None:
        return open_log(parent_storage(storage), config)  # a lineage trains the experiences of its run again
    buffer = config.buffer.trainer_input.experience_buffer
    # What learns from a dataset names the dataset there; its evaluations are a log like any other.
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
