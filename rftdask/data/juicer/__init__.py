"""Data-Juicer: runs its operators over rows, in an environment and a process of its own, or in an existing service.

    environment.py    location of the environment, and how it is made (rftdask data setup)
    runner.py         program that runs there: the only file that imports Data-Juicer, and nothing of rftdask
    base.py           Juicer: interface for running a pipeline over rows; recipes and lists of operators
    process.py        client of that process: a deadline, its log, typed errors
    service.py        client of the HTTP service of the reference system

This folder knows neither tasksets nor trainers, and only it knows Data-Juicer. Its users are the dataset of a run
(data/task_pipeline.py), an operator over experiences (algorithm/operators.py) and `rftdask data refine`.
"""

from __future__ import annotations

from pathlib import Path

from rftdask.config import Config
from rftdask.data.juicer.base import SILENCE_S, Juicer, Pipeline
from rftdask.data.juicer.environment import find_environment
from rftdask.data.juicer.process import JuicerProcess
from rftdask.data.juicer.service import KEY, JuicerService
from rftdask.errors import NotInstalledError, ProcessLostError, WaitTimeout


def open_juicer(
    pipeline: Pipeline,
    what: str,
    *,
    server_url: str | None = None,
    log_file: Path | None = None,
    silence_s: float = SILENCE_S,
) -> Juicer:
    """Open a pipeline, in the service at `server_url` or else in a process.

    what: the key that needs it, for messages; log_file: log of the process, None: a temporary file.
    Raises: as JuicerProcess and JuicerService; NotInstalledError: a process has no environment.
    """
    if server_url:
        return JuicerService(server_url, pipeline, silence_s=silence_s)
    return JuicerProcess(find_environment(what), pipeline, log_file, silence_s=silence_s)


def check_juicer(pipeline: Pipeline, what: str, *, server_url: str | None = None) -> None:
    """Check the operators and arguments of a pipeline.

    Raises: UserError: one does not exist, or the service refuses it; NotInstalledError: a process has no environment,
    or this machine gets no answer from the service.
    """
    if not server_url:
        return JuicerProcess(find_environment(what), pipeline, only_check=True).close()
    try:
        with JuicerService(server_url, pipeline) as service:
            service.run([])  # only then does the service check its operators
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
