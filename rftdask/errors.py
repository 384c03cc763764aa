"""Errors that a caller may want to catch. Everything else is a bug and is raised unchanged.

    RftError
    |-- UserError            an error that the user can fix before anything starts; the CLI exits with 2
    |   |-- ConfigError      one or more mistakes in a configuration; lists all of them
    |   |-- DataError        a dataset, model folder or run folder does not match the configuration
    |   |   `-- MismatchError    the first rollouts were sampled with another policy than the trainer has
    |   `-- NotInstalledError    a module or package is missing on this machine; the machines of the run may have it
    |-- StorageError         a storage operation failed after its retries
    |   |-- NotFoundError    the path does not exist (yet)
    |   |-- DamagedError     the bytes fail their checksum or schema
    |   `-- StorageRefusedError    full, read-only or owned by another user: retries do not help
    |-- FencedError          another process owns this run or lineage; this process must stop
    |-- WaitTimeout          a deadline passed; the message names the missing process
    `-- RoleError            a role (trainer rank, engine, workflow) failed for good
        |-- EngineError      an engine reports its error, or ended before it had work: no task is to blame
        |   `-- WeightsError     an engine does not reproduce the trainer's results with the same weights
        |-- ProcessLostError a child process, its worker or its node is lost or hangs; a retry may succeed
        |   `-- PeerLostError    a rank lost another rank, which has the cause
        |-- EmptyBatchError  all rollouts of a batch failed; they stay, so the run finds them again
        `-- OperatorError    an operator of the experience pipeline raised; the message names it and the task

Errors cross process boundaries, so each keeps its values as positional arguments and pickles.
"""

import signal


class RftError(Exception):
    """Base of the tree."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows in place of a traceback: the message, as the command line prints it."""
        return [f"{type(self).__name__}: {self}"]


class UserError(RftError):
    """An error that the user can fix. Raised before anything is trained."""


class DataError(UserError):
    """A dataset, model folder or run folder does not fit the configuration."""


class MismatchError(DataError):
    """The first rollouts of a run were sampled with another policy than the trainer has. Nothing was trained."""


class NotInstalledError(UserError):
    """A module or package is missing on this machine. The machines of the run may have it."""


_TRAINING_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "tensorboard", "bokeh")
"""Packages of the extra `train`."""


def lacks_training(error: ImportError) -> str | None:
    """Return the remedy if a package of the extra `train` is missing, otherwise None."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _TRAINING_PACKAGES:
        return None
    return f"{package} is not installed; for training: pip install 'rftdask[train]'"


class ConfigError(UserError):
    """Mistakes in a configuration. `problems` has a line for each: path, value, allowed values."""

    def __init__(self, problems: list[str], source: str = "") -> None:
        super().__init__(problems, source)
        self.problems = problems
        self.source = source

    def __str__(self) -> str:
        where = f" in {self.source}" if self.source else ""
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        return f"{count}{where}:\n" + "\n".join(f"  - {problem}" for problem in self.problems)


class StorageError(RftError):
    """A storage operation failed after its retries."""


class NotFoundError(StorageError):
    """The path does not exist, or does not exist yet."""


class DamagedError(StorageError):
    """The bytes fail their checksum or schema, or do not match their name."""


class StorageRefusedError(StorageError):
    """The storage is full, read-only or owned by another user. Retries fail until that is fixed."""


class FencedError(RftError):
    """Another process owns this run or lineage. The remedy is to stop, not to retry."""


class WaitTimeout(RftError):
    """A deadline passed. The message has the awaited event, the seconds waited and the missing process."""


class RoleError(RftError):
    """A role failed for good: a trainer rank, an engine or a workflow."""


class EngineError(RoleError):
    """An engine reports its error, or ended before its first request: no task is to blame."""

    engine: str = ""
    """Unique name of the engine, whose concurrent units fail with it. "": not known."""


class WeightsError(EngineError):
    """An engine does not reproduce the trainer's results with the same weights."""


class ProcessLostError(RoleError):
    """A child process, its worker or its node is lost or hangs. Its work can be repeated.

    exit_code: exit code of the process, or minus the signal that ended it. None: not known.
    """

    engine: str = ""
    """As in EngineError."""

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text, exit_code)
        self.exit_code = exit_code

    @property
    def was_killed(self) -> bool:
        """True if the process was ended from outside: by a user, a batch system, or the kernel when out of memory."""
        return self.exit_code in (None, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLostError(ProcessLostError):
    """A trainer rank cannot continue because another rank was lost or hangs. The other rank has the cause."""


class EmptyBatchError(RoleError):
    """All rollouts of a batch failed. They stay in the log, so a restarted run finds them again."""


class OperatorError(RoleError):
    """An operator of the experience pipeline raised. Its rows are neither trained nor committed without it."""
