"""Start: what precedes a run. Its late imports load pandas, pyarrow or Dask, which not every start needs at once.

On one machine the fork servers start first: they import torch while this process imports Dask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rftdask.cluster.base import prepare_cluster
from rftdask.config import Config, check_plugins
from rftdask.errors import NotInstalledError
from rftdask.rollouts.sandbox.bubblewrap import check_bubblewrap

if TYPE_CHECKING:
    from rftdask.driver.experiment import Experiment
    from rftdask.reports.summary import RunSummary


def prepare_experiment(config: Config) -> Experiment:
    """Start the fork servers of the cluster, then return the Experiment of a configuration."""
    prepare_cluster(config, config.stage_configs())
    from rftdask.driver.experiment import Experiment

    return Experiment(config)


def print_summary(summary: RunSummary) -> None:
    """Print the summary of a run to the terminal."""
    from rftdask.reports.summary import print_summary as print_run

    print_run(summary)


def serve(config: Config, say: Callable[[str], None]) -> None:
    """Serve the policy of a configuration in mode serve until the process is interrupted."""
    from rftdask.serve.server import ServeOptions, serve_policy

    serve_policy(config, ServeOptions.of(config), say)


def check_machine(config: Config, *, data: bool) -> list[str]:
    """Check that this machine has what a run needs. data: also read its datasets and model, and try its workflows.

    Returns: parts that are missing here and that the machines of the run may have; without `data` only.
    Raises: UserError: a part is wrong, or missing on the one machine of the run.
    """
    missing: list[str] | None = None if config.cluster.is_one_machine else []
    check_plugins(config, missing)
    for stage in config.stage_configs():
        for check in (_check_sandbox, _check_juicer):
            try:
                check(stage)
            except NotInstalledError as error:
                if missing is None:
                    raise
                missing.append(str(error))
    if data:
        from rftdask.driver.preflight import check_inputs

        check_inputs(config.stage_configs(), elsewhere=missing is not None)  # reports missing parts itself
        return []
    return missing or []


def _check_sandbox(stage: Config) -> None:
    check_bubblewrap(stage.explorer.sandbox)


def _check_juicer(stage: Config) -> None:
    if stage.makes_dataset or stage.data_processor.experience_pipeline.operators:
        from rftdask.data.juicer.session import check_juicer_env

        check_juicer_env(stage)
