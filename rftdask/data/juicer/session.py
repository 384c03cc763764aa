"""Opens a Juicer: the HTTP service if the configuration names one, otherwise a child process."""

from __future__ import annotations

from pathlib import Path

from rftdask.config import Config
from rftdask.data.juicer.base import SILENCE_S, Juicer, Pipeline
from rftdask.data.juicer.environment import find_environment
from rftdask.data.juicer.process import JuicerProcess
from rftdask.errors import NotInstalledError, ProcessLostError, WaitTimeout


def open_juicer(
    pipeline: Pipeline, log_file: Path, what: str, *, server_url: str | None = None, silence_s: float = SILENCE_S
) -> Juicer:
    """Open a pipeline. what: the key that needs it, for messages; log_file: log of the process.

    Raises: as JuicerProcess and JuicerService; NotInstalledError: a process has no environment.
    """
    from rftdask.data.juicer.service import JuicerService  # late: imports pyarrow, which no check of a file needs

    if server_url:
        return JuicerService(server_url, pipeline, silence_s=silence_s)
    return JuicerProcess(find_environment(what), pipeline, log_file, silence_s=silence_s)


def check_juicer(pipeline: Pipeline, log_file: Path, what: str, *, server_url: str | None = None) -> None:
    """Check the operators and arguments of a pipeline.

    Raises: UserError: one does not exist, or the service refuses it; NotInstalledError: a process has no environment,
    or this machine gets no answer from the service.
    """
    if not server_url:
        return JuicerProcess(find_environment(what), pipeline, log_file, only_check=True).close()
    from rftdask.data.juicer.service import KEY, JuicerService  # late: as above

    try:
        with JuicerService(server_url, pipeline) as service:
            service.check()
    except (ProcessLostError, WaitTimeout) as error:
        raise NotInstalledError(f"{what}: {error}; start the service, or leave {KEY} out") from error


def check_juicer_env(stage: Config) -> None:
    """Raise NotInstalledError if the stage needs the environment of Data-Juicer, and it does not exist."""
    if stage.service.data_juicer.server_url:
        return
    if stage.makes_dataset:
        find_environment("data_processor.task_pipeline")
    for number, entry in enumerate(stage.data_processor.experience_pipeline.operators):
        if entry.get("name") == "data_juicer" and stage.mode in ("both", "explore"):
            find_environment(f"data_processor.experience_pipeline.operators[{number}]")
