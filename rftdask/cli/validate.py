"""`rftdask validate` and `rftdask estimate`: what a configuration means and needs, before anything is started."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from rftdask.cli.common import ConfigFile, Gpu, Gpus, Nodes, Origin, Overrides, load, machine_settings, say, warn
from rftdask.cluster.layout import TRAINER_RESOURCE, plan_machines
from rftdask.config import Config, check_plugins, load_config, make_plan, replace
from rftdask.data.juicer import check_juicer_env
from rftdask.driver.memory_estimate import (
    can_be_sized,
    format_memory_report,
    gpu_bytes,
    gpu_shortages,
    job_shortages,
    raise_shortages,
)
from rftdask.errors import NotInstalledError, UserError
from rftdask.processes.gpus import gpu_memory, visible_gpus
from rftdask.rollouts.sandbox.bubblewrap import check_bubblewrap


def validate(
    config: ConfigFile,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also read data and model, and try workflows and rewards on the first row")
    ] = False,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpu: Gpu = "",
    origin: Origin = "",
    diff: Annotated[bool, typer.Option("--diff", help="Print the keys that are read differently")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print all keys with their values before the plan")] = False,
) -> None:
    """Check a configuration, and print its plan.

    The plan lists roles, workers, concurrent rollouts, steps and experiences.
    """
    checked = load_config(config, [*(overrides or []), *machine_settings(gpus, nodes)], origin=origin)
    # Before the warnings: a configuration with a mistake prints only the mistake.
    missing = _check_machine(checked, data=data)
    warn(tuple(f"not checked here, and checked where the run starts: {text}" for text in missing))
    if checked.origin:
        say(f"read as a file of {checked.origin}, with its defaults:", err=True)
        for line in checked.reference_defaults:
            say(f"default: {line}", err=True)
    warn(checked.warnings)
    if diff:
        say("\n".join(checked.changes) or "read as it is written")
        return
    if full:
        say(checked.to_yaml())
    stages = checked.stage_configs()
    # The GPUs of this machine do not matter to a run on other machines.
    num_gpus = len(visible_gpus()) if checked.cluster.is_one_machine and gpus is None else 0
    shared = any(stage.cluster.colocate for stage in stages)
    if gpus is not None or checked.cluster.gpu_per_node or num_gpus or shared:
        planned = checked if checked.cluster.gpu_per_node else replace(checked, {"cluster.gpu_per_node": num_gpus})
        try:
            layout = plan_machines(planned)
        except UserError:
            say(make_plan(checked).render())
            raise
        say(make_plan(checked, layout.num_workers(TRAINER_RESOURCE)).render())
        if not (gpu and checked.cluster.gpu_per_node):  # otherwise the memory report begins with it
            say(f"placement  {layout.describe()}")
        raise_shortages(job_shortages(stages, layout))
        if num_gpus and not gpu:
            memory = gpu_memory()
            if memory is not None and can_be_sized(checked):
                raise_shortages(gpu_shortages(stages, layout, memory))
            else:
                why = "nvidia-ml-py does not report the GPUs" if memory is None else "the model is not on this machine"
                say(f"memory     not known, since {why}; give --gpu")
    else:
        say(make_plan(checked).render())
    if gpu:
        say(format_memory_report(checked, gpu))
        raise_shortages(gpu_shortages(stages, plan_machines(checked), gpu_bytes(gpu)))
    if data and not missing:
        from rftdask.driver.preflight import rewards_of_truths  # late: loads pyarrow

        if lines := rewards_of_truths(stages):
            say("\n".join(["", *lines]))


def estimate(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpu: Gpu = "",
    origin: Origin = "",
) -> None:
    """Print the GPU memory that a configuration needs.

    It lists the parts of each role, and with --gpu what fits. It starts nothing.
    """
    say(format_memory_report(load(config, [*(overrides or []), *machine_settings(gpus, nodes)], origin), gpu))


def _check_machine(config: Config, *, data: bool) -> list[str]:
    """Check that this machine has what a run needs. data: also read its datasets and model, and try its workflows.

    Returns: parts that are missing here and that the machines of the run may have; without `data` only.
    Raises: UserError: a part is wrong, or missing on the one machine of the run.
    """
    missing: list[str] | None = None if config.cluster.is_one_machine else []
    check_plugins(config, missing)
    for stage in config.stage_configs():
        for check in (partial(check_bubblewrap, stage.explorer.sandbox), partial(check_juicer_env, stage)):
            try:
                check()
            except NotInstalledError as error:
                if missing is None:
                    raise
                missing.append(str(error))
    if data:
        from rftdask.driver.preflight import check_inputs  # late: loads pyarrow

        # It reports missing parts itself.
        check_inputs(config.stage_configs(), elsewhere=missing is not None, say=partial(say, err=True))
        return []
    return missing or []
