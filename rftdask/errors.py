"""The errors a caller may want to catch. Everything else is a bug and rises as it is.

    RftError
    |-- UserError            what the user can mend before anything starts; the CLI exits with 2
    |   |-- ConfigError      one or more mistakes in a configuration, all of them at once
    |   |-- DataError        a dataset, model folder or run folder is not what the configuration says
    |   `-- NotInstalledError    a module or package is not on this machine; it may be where the run will be
    |-- StorageError         a storage operation failed after its retries
    |   |-- NotFoundError    the path does not exist (yet)
    |   |-- DamagedError     bytes are there but fail their checksum or schema
    |   `-- StorageRefusedError    it is full, read-only or another user's: no further try helps
    |-- FencedError          somebody else owns this run or lineage; this process must stop
    |-- WaitTimeout          a deadline passed; the message names who did not come
    `-- RoleError            a role (trainer rank, engine, workflow) failed for good
        |-- EngineError      an engine says why it fails, or ended before it had work: no task is to blame
        |   `-- WeightsError     it does not compute what the trainer computed with the weights it was given
        |-- ProcessLostError a child process, its worker or its node is gone or hangs; another try may succeed
        |   `-- PeerLostError    a rank cannot go on because another one went away; the cause is with that one
        |-- EmptyBatchError  all rollouts of a batch failed; they stay, so the run meets them again
        `-- OperatorError    an operator of the experience pipeline raised; the message names it and the task

All of them cross process boundaries, so each keeps its values as positional arguments and pickles.
"""

import signal


class RftError(Exception):
    """Base of the tree."""


class UserError(RftError):
    """Something the user can mend. Raised before anything is trained."""


class DataError(UserError):
    """A dataset, model folder or run folder does not fit the configuration."""


class NotInstalledError(UserError):
    """A module or package cannot be found on this machine. It may be there on the one that the run will be on."""


_OF_TRAINING = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "tensorboard", "bokeh")
"""Packages of the extra `train`, which a light installation has not."""


def lacks_training(error: ImportError) -> str | None:
    """What to install, if `error` says that a package of the extra `train` is not there; else None."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _OF_TRAINING:
        return None
    return f"this needs {package}, and the installation is the light one; for training: pip install 'rftdask[train]'"


class ConfigError(UserError):
    """Mistakes in a configuration. `problems` holds one line for each: path, value, what is allowed."""

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
    """The bytes are there, but they fail their checksum, their schema or their name."""


class StorageRefusedError(StorageError):
    """The storage refuses until somebody mends it: it is full, read-only, or not this user's. Trying again is vain."""


class FencedError(RftError):
    """Another process owns this run or lineage. The remedy is to stop, not to retry."""


class WaitTimeout(RftError):
    """A deadline passed. The message names what was waited for, how long, and who did not come."""


class RoleError(RftError):
    """A role failed for good: a trainer rank, an engine, a workflow."""


class EngineError(RoleError):
    """An engine says why it fails, or ended before it was asked for anything: no task is to blame."""

    engine: str = ""
    """Which one, by a name that no other has; "": not known. Units that overlap in an engine fail with it."""


class WeightsError(EngineError):
    """An engine has loaded weights and computes something else than the trainer did with them."""


class ProcessLostError(RoleError):
    """A child process, its worker or its node is gone or hangs. What it did can be done again.

    exit_code: of the process, or minus the signal that ended it; None: not known.
    """

    engine: str = ""
    """As of an EngineError."""

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text, exit_code)
        self.exit_code = exit_code

    @property
    def was_killed(self) -> bool:
        """True if somebody else ended it, such as a user, a batch system or the kernel for want of memory."""
        return self.exit_code in (None, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLostError(ProcessLostError):
    """A rank of the trainer cannot go on, because another one went away or hangs; the cause is with that one."""


class EmptyBatchError(RoleError):
    """All rollouts of a batch failed. They stay, so the run meets them again, whatever is mended."""


class OperatorError(RoleError):
    """An operator of the experience pipeline raised; its rows are neither trained nor committed without it."""
