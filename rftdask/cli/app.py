"""The command line. Thin: each command is one call. Exit codes: 0 all of it was done, 1 a role failed, 2 the user can
mend it, 130, 143 and 129 it was asked to end, with work left (Ctrl-C, SIGTERM, SIGHUP). Each command imports late what
only it needs, so that `--help` and `validate` load neither Dask nor torch.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from rftdask import __version__
from rftdask.config import Config, check_plugins, load_config, make_plan, replace
from rftdask.errors import FencedError, NotInstalledError, RftError, RoleError, UserError, lacks_training
from rftdask.rollouts.sandbox.bubblewrap import check_bubblewrap
from rftdask.storage.safe_text import safe, safe_console

app = typer.Typer(
    name="rftdask",
    help="Reinforcement fine-tuning of language models as an elastic batch system on Dask.\n\n"
    "The run lives on storage: running the same command again continues it, whatever happened before.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _here(config: str) -> str:
    """The file that is meant. Raises: UserError: there is none, and the package has one of that name."""
    if config.startswith("config/") and not Path(config).exists():
        from rftdask.driver.init_config import bundled  # late: only for this

        if config in bundled():
            copy = f"rftdask examples copy {config} {Path(config).parent}"
            raise UserError(f"there is no file {config}; `{copy}` writes the package's there")
    return config


ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="YAML file, for example config/quickstart.yaml", callback=_here)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file: trainer.total_steps=20"),
]
Gpus = Annotated[int | None, typer.Option(min=0, help="Plan for a machine of so many GPUs, which need not be this one")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Of --gpus: so many machines")]
Gpu = Annotated[str, typer.Option(help='What fits it: "H100 80GB", "RTX 4090", 48GB')]
Origin = Annotated[
    str, typer.Option("--from", metavar="SYSTEM", help="trinity: the file is Trinity-RFT's, whose defaults hold")
]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="Go on with a changed reward, workflow, taskset or model")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run")]

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")]
OpenBrowser = Annotated[bool, typer.Option(help="Open the page in the browser")]

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_STOPPED = 130
_LOOK_S = 1.0
_NOTICE_S = 0.1


def _print_version(wanted: bool) -> None:
    if wanted:
        _say(f"rftdask {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    pass


@app.command()
def init(
    out: Annotated[str, typer.Argument(metavar="[FILE]", help="To be written")] = "run.yaml",
    tasks: Annotated[str, typer.Option(help="jsonl, json, csv or parquet, or a data set of the Hub")] = "",
    model: Annotated[str, typer.Option(help="A folder, or a model of the Hub")] = "",
    slurm: Annotated[str, typer.Option(metavar="PARTITION", help="Run as jobs of this partition of SLURM")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: defaults for what is not given")] = False,
) -> None:
    """Write a first configuration from a few answers: what tasks, what model, and where it runs."""
    from rftdask.driver.init_config import GSM8K, FirstConfig
    from rftdask.processes.gpus import visible_gpus

    def ask(question: str, given: str, default: str) -> str:
        try:
            return given or (default if yes else typer.prompt(question, default=default))
        except typer.Abort:
            raise UserError(f"no answer to: {question}; give it as an option, or --yes for the defaults") from None

    num_gpus, node = len(visible_gpus()), None
    if slurm and shutil.which("sinfo") is not None:
        from rftdask.cluster.slurm import read_capacity  # late: it loads Dask

        try:
            node = read_capacity(slurm)
        except RoleError as error:
            _say(f"what a node of {slurm} has is not known here, so check what the jobs ask for: {error}", err=True)
    first = FirstConfig(
        tasks=ask("Tasks, with a question and an answer each", tasks, GSM8K),
        model=ask("Model", model, "Qwen/Qwen2.5-0.5B-Instruct"),
        where="slurm" if slurm else "gpus" if num_gpus else "laptop",
        partition=slurm,
        node=node,
        name=os.path.splitext(os.path.basename(out))[0],
    )
    path = Path(out)
    checked = first.write(path)
    place = f"partition {slurm}" if slurm else f"this machine and its {num_gpus} GPUs" if num_gpus else "this machine"
    _say(f"wrote {path}, for {place}; it would come to\n")
    _say(make_plan(checked).render())
    _say("\nNext you can type")
    for what, command in first.next_commands(path):
        _say(f"  # {what}\n  {command}")


@app.command()
def quickstart(overrides: Overrides = None) -> None:
    """Train a small model on this machine, in half a minute: see that it works, and what a run leaves."""
    import runpy

    from rftdask.driver.init_config import bundled

    # The very file that `rftdask examples` copies, so that what was seen to work is what is there to change.
    runpy.run_path(str(bundled()["examples/quickstart.py"]))["main"](overrides or [])


examples_app = typer.Typer(help="What comes with the package: configurations, examples, notebooks, a toy to try them.")
app.add_typer(examples_app, name="examples")


@examples_app.callback(invoke_without_command=True)
def examples(context: typer.Context) -> None:
    """List the configurations, examples and notebooks that come with the package."""
    from rftdask.driver.init_config import bundled, describe

    if context.invoked_subcommand is None:
        for name, path in bundled().items():
            _say(f"{name}\n    {describe(path)}")


@examples_app.command()
def copy(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As listed, or a part of it: ppo_critic, or a folder: agents")
    ],
    to: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Where it is copied")] = ".",
) -> None:
    """Copy one here, to change and run it; an example with code of its own is a configuration and a module."""
    from rftdask.driver.init_config import copy_bundled

    for path in copy_bundled(name, Path(to)):
        _say(f"wrote {path}")


@examples_app.command()
def toy(
    to: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Where it is made")] = "toy",
    warm: Annotated[bool, typer.Option("--warm", help="Let it learn to add first, half a minute")] = False,
) -> None:
    """Make a model that learns in seconds on a CPU, and its tasks, sums: nothing is downloaded."""
    from rftdask.models.toy import build_toy_model, write_toy_tasks  # late: it needs torch

    folder = Path(to)
    if (folder / "model").exists():
        raise UserError(f"{folder / 'model'} is there already; name another folder, or remove it")
    write_toy_tasks(folder)
    if warm:
        from rftdask.driver.convert import convert  # late: it needs torch
        from rftdask.driver.experiment import Experiment  # late: it loads Dask

        with tempfile.TemporaryDirectory(prefix="rftdask-toy-") as made:
            # As wide as that of config/quickstart.yaml, whose warm-up this is.
            build_toy_model(Path(made) / "raw", hidden_size=256, intermediate_size=512, num_layers=1, num_heads=8)
            tree = {
                "mode": "train",
                "name": "warmup",
                "checkpoint_root_dir": made,
                "model": {"model_path": f"{made}/raw", "max_prompt_tokens": 16, "max_response_tokens": 4},
                "algorithm": {
                    "algorithm_type": "sft",
                    "optimizer": {"lr": 4e-4, "lr_warmup_steps": 5, "betas": [0.9, 0.99], "weight_decay": 0.0},
                },
                "buffer": {
                    "train_batch_size": 32,
                    "total_epochs": 100,
                    "trainer_input": {
                        "experience_buffer": {
                            "path": str(folder / "sft.jsonl"),
                            "format": {"prompt_type": "raw"},
                            "data_selector": {"selector_type": "shuffle"},
                        }
                    },
                },
                "trainer": {"total_steps": 320},
                "monitor": {"monitor_type": "none"},
            }
            experiment = Experiment(load_config(tree))
            experiment.run()
            convert(experiment.url, folder / "model")
    else:
        build_toy_model(folder / "model", hidden_size=128, intermediate_size=256, num_layers=1, num_heads=4)
    _say(f"wrote {folder}/model, and {', '.join(sorted(path.name for path in folder.glob('*.jsonl')))} beside it")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, with every key's explanation, for editors that complete YAML."""
    from rftdask.driver.init_config import json_schema

    _say(json.dumps(json_schema(), indent=1))


@app.command("import")
def import_file(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="trl, verl or trinity")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="A script of TRL, or a YAML file; it is not executed")],
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="To be written; else it is printed")] = "",
) -> None:
    """Translate a script of TRL or a configuration of verl or Trinity-RFT, and name what has no translation."""
    from rftdask.cli.import_file import import_from

    text, left = import_from(system, file)
    if not out:
        _say(text)
        return
    if Path(out).exists():
        raise UserError(f"{out} is there already; name another one, or remove it")
    Path(out).write_text(text, encoding="utf-8")
    _say(f"wrote {out}")
    for line in left:
        _say(f"not translated: {line}", err=True)


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    progress: Annotated[str, typer.Option(help="auto, terminal, plain or none")] = "auto",
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for another process at work on the run")] = 0,
    with_parent: Annotated[bool, typer.Option("--with-parent", help="End as on SIGTERM when its parent dies")] = False,
    accept_changes: AcceptChanges = False,
    origin: Origin = "",
) -> None:
    """Run a configuration to its end, or continue it. Ctrl-C (exit code 130), SIGTERM (143) and SIGHUP (129) end with a
    checkpoint. In mode serve: serve the policy, as `rftdask serve` does.
    """
    checked = _load(config, overrides, origin)
    if checked.mode == "serve":
        from rftdask.serve.server import ServeOptions, serve_policy

        return serve_policy(checked, ServeOptions.of(checked), typer.echo)
    begun = _begin(checked)
    given = "" if checked.continue_from_checkpoint else f" with name={begun.name} continue_from_checkpoint=true"
    checked, again = begun, f"the same command{given} continues"
    # Late: the other commands need neither Dask nor pandas. What the run's processes are forked from starts first, and
    # imports torch while this process imports those.
    from rftdask.cluster.base import prepare_cluster

    prepare_cluster(checked, checked.stage_configs())
    from rftdask.driver.experiment import Experiment
    from rftdask.reports.summary import print_summary

    experiment = Experiment(checked)
    if with_parent:
        threading.Thread(target=end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    with _ending_on_signals(lambda: experiment.stop(may_return=True)) as terminated:
        try:
            _wait_for_owner(checked, patience, lambda: terminated() > 0)
            if terminated():
                raise typer.Exit(terminated())
            summary = experiment.run(progress, accept_changes=accept_changes)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            _say(f"ended at once; {again} from the newest checkpoint", err=True)
            raise typer.Exit(EXIT_STOPPED) from None
        print_summary(summary)
        # Python's last look for garbage, at all that Dask and pandas are, takes a tenth of a second and finds none.
        gc.freeze()
        if summary.status != "finished":
            _say(f"stopped with a checkpoint; {again}", err=True)
            raise typer.Exit(terminated() or EXIT_STOPPED)


@app.command()
def validate(
    config: ConfigFile,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Read data and model too, and try workflows and rewards on the first row")
    ] = False,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpu: Gpu = "",
    origin: Origin = "",
    diff: Annotated[bool, typer.Option("--diff", help="Print what is read otherwise than it is written")] = False,
) -> None:
    """Check a configuration; print it as resolved, and the plan: roles, workers, places, steps, experiences."""
    from rftdask.cluster.layout import TRAINER_RESOURCE, plan_machines  # late: not every command plans
    from rftdask.data.juicer.session import check_juicer_env
    from rftdask.driver.memory_estimate import can_be_sized, check_gpus, check_jobs, gpu_bytes, tell_memory
    from rftdask.processes.gpus import visible_gpus
    from rftdask.processes.usage import gpu_memory

    checked = load_config(config, [*(overrides or []), *_machines(gpus, nodes)], origin=origin)
    # Before the warnings: of a configuration with a mistake only that is told.
    unchecked: list[str] | None = None if checked.cluster.is_one_machine else []
    check_plugins(checked, unchecked)
    for stage in checked.stage_configs():
        try:
            check_bubblewrap(stage.explorer.sandbox)
        except NotInstalledError as error:
            if unchecked is None:
                raise
            unchecked.append(str(error))
        try:
            check_juicer_env(stage)
        except NotInstalledError as error:
            if unchecked is None:
                raise
            unchecked.append(str(error))
    if data:
        from rftdask.driver.preflight import check_inputs  # late: it reads datasets, and needs torch

        check_inputs(checked.stage_configs(), elsewhere=unchecked is not None)
    else:
        _warn(tuple(f"not checked here, and checked where the run starts: {text}" for text in unchecked or ()))
    if checked.origin:
        _say(f"read as a file of {checked.origin}, whose defaults hold:", err=True)
        for line in checked.reference_defaults:
            _say(f"default: {line}", err=True)
    _warn(checked.warnings)
    if diff:
        _say("\n".join(checked.changes) or "read as it is written")
        return
    _say(checked.to_yaml())
    # On other machines this one's GPUs say nothing.
    here = len(visible_gpus()) if checked.cluster.is_one_machine and gpus is None else 0
    shared = any(stage.cluster.colocate for stage in checked.stage_configs())
    if gpus is not None or checked.cluster.gpu_per_node or here or shared:
        planned = checked if checked.cluster.gpu_per_node else replace(checked, {"cluster.gpu_per_node": here})
        try:
            layout = plan_machines(planned)
        except UserError:
            _say(make_plan(checked).render())
            raise
        _say(make_plan(checked, layout.num_workers(TRAINER_RESOURCE)).render())
        if not (gpu and checked.cluster.gpu_per_node):  # else it is told below
            _say(f"placement  {layout.describe()}")
        check_jobs(checked.stage_configs(), layout)
        if here and not gpu:
            memory = gpu_memory()
            if memory is not None and can_be_sized(checked):
                check_gpus(checked.stage_configs(), layout, memory)
            else:
                why = "nvidia-ml-py does not tell of the GPUs" if memory is None else "the model is not on this machine"
                _say(f"memory     not known, since {why}; give --gpu")
    else:
        _say(make_plan(checked).render())
    if gpu:
        _say(tell_memory(checked, gpu))
        check_gpus(checked.stage_configs(), plan_machines(checked), gpu_bytes(gpu))


@app.command()
def debug(
    config: ConfigFile,
    overrides: Overrides = None,
    task: Annotated[int, typer.Option(min=0, help="Row of the taskset")] = 0,
    taskset: Annotated[str, typer.Option(metavar="NAME", help="Whose row; the first one's if none is named")] = "",
    rollouts: Annotated[int, typer.Option(min=1, help="Of the task, side by side")] = 1,
    folder: Annotated[str, typer.Option(metavar="FOLDER", help="What they give is kept here, for rftdask view")] = "",
    once: Annotated[bool, typer.Option("--once", help="End after the first round")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write the conversations of all rounds as one page")] = "",
    profile: Annotated[str, typer.Option(metavar="FILE", help="Write a profile of Python's, of the last round")] = "",
    origin: Origin = "",
) -> None:
    """Load the model once, and roll out one task again and again while you change its workflow or reward."""
    checked = _load(config, overrides, origin)
    # Late: the other commands need no engine.
    from rftdask.cli.debug import Debugger

    if "://" in folder:
        raise UserError(f"--folder {folder}: give a folder of this machine")
    stage = next((each for each in reversed(checked.stage_configs()) if each.has_explorer), checked)
    kept = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="rftdask-debug-"))
    _say("the model is being loaded", err=True)
    with Debugger(stage, kept, taskset, profile) as debugger:
        while True:
            is_last = once or not sys.stdin.isatty()
            try:
                _say(debugger.try_task(task, rollouts))
                if html:
                    _write_page(kept, html, limit=100)
                _say(f"\nas pages: rftdask view {kept}", err=True)
            except UserError as error:  # to be mended in the files, and tried again
                if is_last:
                    raise
                _say(f"error: {error}", err=True)
            if is_last:
                return
            try:
                said = input("Enter: again, with the files as they are now; a number: that task; q: end > ").strip()
            except EOFError:
                return
            if said == "q":
                return
            if said.isdecimal():
                task = int(said)


@app.command()
def estimate(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpu: Gpu = "",
    origin: Origin = "",
) -> None:
    """Say how much GPU memory a configuration needs, part by part, and what fits; starts nothing."""
    from rftdask.driver.memory_estimate import tell_memory

    _say(tell_memory(_load(config, [*(overrides or []), *_machines(gpus, nodes)], origin), gpu))


def _machines(gpus: int | None, nodes: int | None) -> list[str]:
    """--gpus and --nodes as the settings that they stand for."""
    given = (("cluster.gpu_per_node", gpus), ("cluster.node_num", nodes))
    return [f"{key}={number}" for key, number in given if number is not None]


@app.command()
def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts; write and submit nothing")] = False,
    single_allocation: Annotated[
        bool, typer.Option("--single-allocation", help="All roles in one job, where jobs may submit none")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Explore and train in turns, as jobs in a chain")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of --offline")] = 1,
    explore_jobs: Annotated[int, typer.Option(min=1, help="Tasks of each explore array of --offline")] = 1,
    print_templates: Annotated[
        bool,
        typer.Option("--print-templates", help="Print the template of all scripts (docs/slurm.md); submit nothing"),
    ] = False,
    accept_changes: AcceptChanges = False,
    origin: Origin = "",
) -> None:
    """Submit a run to a batch system: a job that drives it and asks for the others, so nobody stays logged in."""
    from rftdask.cli.submit import has_finished, plan_submission
    from rftdask.cluster.batch.slurm_script import NO_REQUEUE, TEMPLATE
    from rftdask.cluster.jobqueue import system_of

    if offline and single_allocation:
        raise UserError("--offline makes jobs of its own; leave out --single-allocation")
    checked = _load(config, overrides, origin)
    if print_templates:
        own = checked.cluster.slurm.template
        _say(TEMPLATE if own is None else f"{TEMPLATE}\n{{# cluster.slurm.template of this run: #}}\n{own}")
        return
    checked = _begin(checked)
    submission = plan_submission(
        checked,
        single_allocation=single_allocation,
        offline=offline,
        rounds=rounds,
        explore_jobs=explore_jobs,
        dry=dry_run,
    )
    if dry_run:
        _say(submission.render())
        return
    # Late: it reads datasets. What is wrong with them is better known before the job waits in the queue.
    from rftdask.driver.preflight import check_inputs
    from rftdask.run.input_fingerprints import check_made_of

    # Checked here, where the user sees it, and once more by the job, since files may change while it waits.
    stages = checked.stage_configs()
    inputs = check_inputs(stages, elsewhere=True)
    made_of = check_made_of(stages, inputs, accept=accept_changes)
    if not offline and has_finished(checked, [each.sizes for each in inputs]):
        _say(f"{checked.checkpoint_job_dir} has finished, so nothing is submitted; trainer.total_steps gives it more")
        return
    submission.check()
    for job in submission.submit(made_of):
        _say(f"submitted {job.name} as job {job.job_id}")
        if not system_of(job).is_requeued(job.job_id):
            _warn((NO_REQUEUE,))
    _say(f"the run is {checked.checkpoint_job_dir}; next: rftdask status {checked.checkpoint_job_dir}")


@app.command()
def sweep(
    config: ConfigFile,
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE,VALUE...", help="Axes: seed=0..4 or a.b=1,2; one value is for all"),
    ],
    at_most: Annotated[int, typer.Option(min=1, help="Runs at the same time")] = 1,
    table: Annotated[bool, typer.Option("--table", help="Start nothing; print where the runs stand")] = False,
) -> None:
    """Run a configuration with every combination of some values, or continue that; a table and a chart at the end. With
    cluster.type slurm the runs are submitted. Exit code 1 if one failed.
    """
    from rftdask.cli.sweep import plan_sweep, run_sweep, write_results

    points = plan_sweep(config, settings)
    failed = 0 if table else run_sweep(config, points, at_most, lambda line: _say(line, err=True))
    text, folder = write_results(points)
    _say(text)
    if folder is not None:
        _say(f"\n{folder}/ has the table as sweep.csv and the curves as sweep.svg")
    if failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def join(
    config: ConfigFile,
    overrides: Overrides = None,
    role: Annotated[str, typer.Option(help="trainer, explorer or auxiliary")] = "explorer",
    patience: Annotated[float, typer.Option(min=1, help="Seconds to wait for the run to have a scheduler")] = 120,
    origin: Origin = "",
) -> None:
    """Work for a run whose cluster.type is joined, as one more worker, until it is over."""
    from rftdask.cluster.join import join as work
    from rftdask.cluster.layout import plan_machines
    from rftdask.cluster.secrets_folder import PrivateFolder
    from rftdask.driver.memory_estimate import check_joined
    from rftdask.processes.gpus import free_host_bytes, visible_gpus
    from rftdask.storage import open_storage

    if role not in ("trainer", "explorer", "auxiliary"):
        raise UserError(f"--role {role}: a worker is for trainer, explorer or auxiliary")
    checked = load_config(config, overrides or [], origin=origin)
    if checked.cluster.is_one_machine:
        raise UserError(
            f"cluster.type {checked.cluster.type} starts its own workers; only one that is joined takes more"
        )
    if not checked.continue_from_checkpoint:
        raise UserError(
            "continue_from_checkpoint: false gives each start a run of its own, whose name a worker cannot know; add "
            "continue_from_checkpoint=true, and name=NAME of the run that is meant, as its start says it"
        )
    if visible_gpus():
        check_joined(checked.stage_configs(), plan_machines(checked), role, free_host_bytes())
    work(checked, PrivateFolder.of(checked, open_storage(checked.checkpoint_job_dir)), role, patience)


@app.command()
def perf(
    run: Run,
    path: Annotated[str, typer.Argument(metavar="FILE", help="What is written, for ui.perfetto.dev")] = "timeline.json",
) -> None:
    """Write what trainer and explorers did and waited for, step by step, as a timeline for Perfetto or chrome://tracing."""
    from rftdask.reports.page.curves import trace_events
    from rftdask.reports.run_reader import open_stages

    events = trace_events(open_stages(run))
    if not events:
        raise UserError(f"{run} has made no step yet, so there is no timeline")
    try:
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    _say(path)


@app.command("log", hidden=True)  # as Trinity-RFT's users type it
@app.command()
def logs(
    run: Run,
    role: Annotated[str, typer.Argument(help="controller, driver, trainer, explorer, engine; all without it")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Of the end of each log")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is added; Ctrl-C ends it")] = False,
) -> None:
    """Print the end of the logs of a run and its jobs, also when it is dead."""
    from rftdask.driver.jobs import follow_logs, read_logs

    with contextlib.suppress(KeyboardInterrupt):
        for name, tail in follow_logs(run, role, lines) if follow else read_logs(run, role, lines):
            _say(f"==> {name} <==")
            _say("\n".join(tail))


@app.command()
def cancel(
    run: Run,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait before its jobs are killed")] = 600,
) -> None:
    """End a run with a checkpoint, wherever it runs; rftdask submit continues it."""
    from rftdask.driver.jobs import cancel as end_run

    end_run(run, timeout, _say)


@app.command()
def attach(run: Run) -> None:
    """Look into the cluster of a run: its workers and what they do now. In a notebook: Experiment.attach(RUN)."""
    from rftdask.driver.jobs import connect
    from rftdask.processes.dask_task import workers_of

    with connect(run) as client:
        workers = workers_of(client)
        _say(f"scheduler {client.scheduler.address}")
        for address, info in sorted(workers.items(), key=lambda item: str(item[1]["name"])):
            busy = ", ".join(client.processing().get(address, ())) or "idle"
            _say(f"  {info['name']:<28} {', '.join(info['resources']):<10} {address:<28} {busy}")
        _say(f"dashboard {client.dashboard_link}" if client.dashboard_link else "no dashboard")


@app.command()
def status(run: Run, as_json: Annotated[bool, typer.Option("--json", help="For programs")] = False) -> None:
    """Say where a run stands, from its files: works from anywhere, also when the run is dead. Exit code 1 if its
    experiences do not add up.
    """
    # Late: the other commands do not need Dask's scheduler.
    from rftdask.reports.jobs import read_run_jobs
    from rftdask.reports.status import read_status

    found = read_run_jobs(run)
    stages = read_status(run) if found.has_begun else []
    if as_json:
        _say(json.dumps({**found.to_json(), "stages": [dataclasses.asdict(stage) for stage in stages]}, indent=1))
    else:
        for job in found.jobs:
            _say(f"job {job.job_id:<8} {job.name:<14} {job.state}")
        if found.usage is not None:
            _say(f"took {found.usage.render()}")
        elif found.usage_unknown:
            _say(found.usage_unknown)
        if found.why:
            _say(f"not running: {found.why}")
        for stage in stages:
            _say(stage.render())
    if any(stage.problems for stage in stages):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def report(run: Run) -> None:
    """Write the report of a run, one self-contained HTML page, and print where it is."""
    from rftdask.reports.page.report_file import report_run

    _say(report_run(run))


@app.command()
def convert(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder or URL of a run or a checkpoint")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to make")],
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; without it, the newest")] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora/--adapter", help="LoRA: a whole model, or the adapter in PEFT's layout")
    ] = True,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, the only one; of gguf it says the way")] = "hf",
) -> None:
    """Write a checkpoint as a Hugging Face folder, without a network."""
    if to == "gguf":
        raise UserError(
            f"--to gguf: its converter is a script of llama.cpp, and in no package of theirs (gguf on PyPI only writes "
            f"the file). Convert without --to, then with that script: "
            f"python llama.cpp/convert_hf_to_gguf.py {out} --outfile {out}.gguf"
        )
    if to != "hf":
        raise UserError(f"--to {to}: a checkpoint becomes hf, a Hugging Face folder")
    # Late: it imports torch and transformers.
    from rftdask.driver.convert import convert as convert_checkpoint

    done = convert_checkpoint(run, out, step=step, merge_lora=merge_lora)
    _say(f"{done.folder}: step {done.step} of {done.run}")


@app.command()
def push(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder or URL of a run or a checkpoint")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Model on the Hub; it is made if it is not there")],
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; without it, the newest")] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Of a model that is made")] = True,
    merge_lora: Annotated[bool, typer.Option("--merge-lora/--adapter", help="LoRA: whole, or the adapter")] = True,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub, with a card that tells data, algorithm, settings and results."""
    from rftdask.driver.hub_push import push as push_model  # late: it imports torch and transformers

    _say(push_model(run, repo, step=step, private=private, merge_lora=merge_lora))


@app.command()
def track(
    run: Run,
    to: Annotated[str, typer.Option(metavar="TRACKER", help="tensorboard, wandb, mlflow, swanlab, trackio or yours")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the tracker, as monitor.monitor_args")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Until the run has ended, or Ctrl-C")] = False,
) -> None:
    """Show a run in a tracker, from its files: also one that has ended, and from an environment that has little else
    than the tracker's package. What the tracker has had of it is not told again.
    """
    import yaml  # late: it loads what only this needs

    from rftdask.reports.tracking import track as track_run

    given = {}
    for arg in args or []:
        key, sign, value = arg.partition("=")
        if not sign:
            raise UserError(f"{arg!r} is no KEY=VALUE; arguments of the tracker are given so, as mode=offline")
        given[key] = yaml.safe_load(value)

    def wait() -> bool:
        time.sleep(_LOOK_S)
        return True

    num_rows = track_run(run, to, given, wait if follow else None)
    _say(f"{to}: {num_rows} rows of metrics")


@app.command()
def replay(
    run: Run,
    step: Annotated[int, typer.Option("--from", metavar="STEP", help="Step of a checkpoint; 0: the initial model")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="How to train otherwise: algorithm.optimizer.lr=5e-7"),
    ] = None,
    lineage: Annotated[str, typer.Option(metavar="NAME", help="Of the new lineage; needed with KEY=VALUE")] = "",
    progress: Annotated[str, typer.Option(help="auto, terminal, plain or none")] = "auto",
) -> None:
    """Train again what a run trained after STEP, from its ledger, into RUN/lineages/NAME. Unchanged, it must end with
    the very same weights (exit code 1 if not).
    """
    from rftdask.cli.replay import replay as train_again

    folder, found = train_again(run, step, lineage, overrides or [], progress)  # type: ignore[arg-type]
    _say(folder)
    _say(found.render())


@app.command()
def skip(
    run: Run,
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="Step whose batch cannot be trained")],
    because: Annotated[str, typer.Option(metavar="WHY", help="Why, for who reads the run later")],
) -> None:
    """Leave out a batch that is written down and cannot be trained, and write that down; the run goes on after it."""
    from rftdask.cli.skip import skip as skip_step

    entry = skip_step(run, step, because)
    # Of all that the entry drops those of the skipped batch; others were dropped when it was formed.
    num_rows = sum(len(rows.rows) for rows in entry.drop if rows.reason.startswith("skipped"))
    _say(f"step {step} is skipped, with {num_rows} rows; the command that ran it goes on")


@app.command()
def conformance() -> None:
    """Compare every loss and advantage with those of other frameworks; exit code 1 if one is not as documented."""
    # Late: it imports torch, and every framework that is installed.
    import warnings

    from rftdask.testing.conformance.run import failures, format_table, run_conformance

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the frameworks warn of when they are imported is theirs
        rows = run_conformance()
    _say(format_table(rows))
    if failures(rows):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def experiences(
    run: Run,
    sql: Annotated[str, typer.Option(help="Over the tables of docs/lineage.md; without it, an overview")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="All rows as CSV")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All rows as JSON")] = False,
) -> None:
    """Ask what became of the experiences of a run, in SQL over its files."""
    from rftdask.reports.lineage.sql import OVERVIEW, query, to_csv, to_json, to_terminal
    from rftdask.reports.lineage.tables import RunTables

    tables = RunTables(run)
    found = query(tables, sql or OVERVIEW)
    _warn(tuple(f"left out: {problem}" for problem in tables.problems))
    if as_csv or as_json:
        # For programs, byte for byte; on a terminal as everything else.
        text = to_csv(found) if as_csv else to_json(found)
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    else:
        safe_console().print(to_terminal(found))


data = typer.Typer(help="Make datasets: of a run's experiences, or of another dataset.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("export")
def data_export(
    run: Run,
    path: Annotated[str, typer.Argument(metavar="FILE", help="What is written: .jsonl or .parquet")],
    kind: Annotated[
        str, typer.Option("--as", help="sft, dpo (best and worst of a group) or tasks (with scores)")
    ] = "sft",
    where: Annotated[str, typer.Option(help="SQL condition over the experiences, such as reward >= 1")] = "",
) -> None:
    """Write the experiences of a run as a dataset for training offline; each row says where it is from."""
    from rftdask.cli.data_export import USE, export

    if kind not in USE:
        raise UserError(f"--as {kind!r} is none of {', '.join(USE)}")
    written, dropped = export(run, path, kind, where)  # type: ignore[arg-type]
    _say(f"{written:,} rows in {path}")
    for reason, count in dropped.items():
        _say(f"  left out: {count:,} {reason}")
    _say(f"in a configuration: {{path: {path}, {USE[kind]}}}")


@data.command("refine")
def data_refine(
    path: Annotated[str, typer.Argument(metavar="DATASET", help=".jsonl or .parquet: a file, a glob or a folder")],
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="A new one, or that of this command to go on with")],
    where: Annotated[str, typer.Option(help="SQL condition over the columns: rows for which it holds stay")] = "",
    juicer: Annotated[
        str,
        typer.Option(help="Filters and mappers of Data-Juicer: a recipe (YAML) or JSON [{name: {...}}]"),
    ] = "",
    unique: Annotated[
        list[str] | None, typer.Option(help="Column whose text stands once, but for case and space")
    ] = None,
    score: Annotated[str, typer.Option(help="Dotted path of a function (row) -> number, or {name: number}")] = "",
    top: Annotated[int, typer.Option(min=0, help="Keep so many rows of the largest --score; 0: all")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine")] = 2,
    scheduler: Annotated[
        str, typer.Option(metavar="ADDRESS", help="A Dask scheduler whose workers do it instead")
    ] = "",
) -> None:
    """Filter, deduplicate and score a dataset over Dask workers, and say what was dropped and why."""
    from rftdask.cli.data_refine import Steps, on_workers, refine

    steps = Steps(where, juicer, tuple(unique or ()), score, top)
    with on_workers(workers, scheduler) as submit:
        _say(refine(path, out, steps, submit).render())


@data.command("setup")
def data_setup(
    extra: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="Beside what it needs: torch, ftfy, ...")
    ] = None,
) -> None:
    """Make the environment of Data-Juicer, once: for task_pipeline, operator data_juicer and data refine."""
    from rftdask.data.juicer.environment import set_up

    _say(set_up(extra or ()))


@app.command()
def trace(
    run: Run, uid: Annotated[str, typer.Argument(help="taskset/epoch/task/rollout/row; or a served session")]
) -> None:
    """Tell the life of one experience: sampled with which weights, trained in which step, and what came of it."""
    from rftdask.reports.lineage.trace import trace as read_trace

    _say(read_trace(run, uid).render())


@app.command()
def view(
    run: Run,
    port: Port = 0,
    browser: OpenBrowser = True,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write one page instead of serving")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Experiences in the page of --html")] = 100,
) -> None:
    """Browse the experiences of a run with their tokens: the studio of one run."""
    from rftdask.studio.server import serve

    if html:
        _write_page(run, html, limit)
        _say(html)
    else:
        # What it says has a token, to be used.
        serve(run, port, page="/experiences", open_browser=browser, say=typer.echo)


@app.command()
def studio(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="Folder or URL with runs below it, or a run")
    ] = "runs",
    port: Port = 0,
    browser: OpenBrowser = True,
    read_only: Annotated[bool, typer.Option("--read-only", help="Only show: write, start and stop nothing")] = False,
) -> None:
    """Look at runs in the browser: live curves, answers by step, comparisons, logs; configure, start and stop them. In
    pages that only this machine sees.
    """
    from rftdask.studio.server import serve

    # What it says has a token, to be used.
    serve(folder, port, open_browser=browser, say=typer.echo, read_only=read_only)


@app.command()
def serve(
    config: Annotated[str, typer.Argument(metavar="CONFIG|RUN", help="YAML file, or folder or URL of a run")],
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at; default: explorer.listen_address")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default: explorer.proxy_port")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at once; default: what engines have memory for")
    ] = None,
    group_age: Annotated[float, typer.Option(min=0, help="Seconds that a session waits for others of its task")] = 600,
    tls_cert: Annotated[str, typer.Option(help="Certificate chain (PEM): serve HTTPS; with --tls-key")] = "",
    tls_key: Annotated[str, typer.Option(help="Private key (PEM) of the certificate")] = "",
) -> None:
    """Serve the policy as OpenAI's API; sessions that are rewarded become experiences for `mode: train`."""
    from rftdask.run.run_folder import RUN_FILE, read_run_config
    from rftdask.serve.server import ServeOptions, serve_policy
    from rftdask.storage import open_storage

    storage = None if config.endswith((".yaml", ".yml")) else open_storage(config)
    if storage is not None and storage.exists(RUN_FILE):
        checked = load_config(read_run_config(storage).to_dict(), overrides or [], was_checked=True)
    else:
        checked, storage = _load(config, overrides, ""), None
    told = ServeOptions.of(checked)
    options = dataclasses.replace(
        told,
        host=told.host if host is None else host,
        port=told.port if port is None else port,
        max_concurrent=max_concurrent,
        group_age_s=group_age,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    serve_policy(checked, options, typer.echo, storage)  # what it says has the key, to be used


@app.command()
def compact(run: Run) -> None:
    """Merge the small shards of a run that nobody works on into few large files; every experience stays."""
    from rftdask.cli.compact import compact_run

    for stage in compact_run(run):
        _say(stage.render())


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="Where runs are to be kept")] = None,
) -> None:
    """Check this machine and installation; with a URL, in about 15 s, whether that storage keeps what runs rely on, and
    what it costs. Exit code 1 if something is broken.
    """
    if url is None:
        from rftdask.cli.environment import check_environment

        found = check_environment()
        _say("\n".join(finding.render() for finding in found))
        _say("\nrftdask doctor FOLDER checks a storage")
        if any(finding.state == "broken" for finding in found):
            raise typer.Exit(EXIT_FAILED)
        return
    from rftdask.storage.doctor import check_storage

    report = check_storage(url)
    _say(report.render())
    if not report.is_safe:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def crashtest(
    folder: Annotated[str | None, typer.Argument(metavar="[FOLDER]", help="On the file system to test")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Processes to kill at random moments")] = 100,
    seed: Annotated[int, typer.Option(help="Of all that is drawn at random")] = 1,
    only: Annotated[str, typer.Option(metavar="PART,...", help="stops kills power rivals damage protections")] = "",
    every: Annotated[int, typer.Option(min=1, help="Try every n-th place only")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs")] = False,
) -> None:
    """Kill, unplug and damage short runs in every way we know, and check what they end with. Exit code 1 if any broke a
    promise; see docs/reliability.md.
    """
    from rftdask.testing.crashtest.suite import PARTS, run_crash_test

    parts = tuple(name.strip() for name in only.split(",") if name.strip()) or PARTS
    found = run_crash_test(folder, parts, kills, seed, every, say=lambda line: _say(line, err=True))
    _say(json.dumps(found.to_json(), indent=1) if as_json else found.render())
    if found.failures:
        raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def _ending_on_signals(stop: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """SIGTERM and SIGHUP call `stop`, however often they come: SLURM sends SIGTERM to a script and all its processes,
    and the script sends it on. What it gives is the exit code for the first that came; 0: none did.

    A thread calls it: it writes to storage, and takes locks that the code which a signal interrupts may hold.
    """
    came: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_NOTICE_S):
            if came:
                try:
                    stop()
                except BaseException:
                    _thread.interrupt_main()  # it could not be asked to end well, so it ends at once
                    raise
                return

    def on_terminate(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1:
            with contextlib.suppress(OSError):  # not by print, which may be what was interrupted
                os.write(2, f"{signal.Signals(number).name}: the run ends with a checkpoint\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # signals are the main thread's
        return
    # Under nohup SIGHUP is ignored, and stays so.
    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_terminate) for number in taken}
    threading.Thread(target=look, name="signals", daemon=True).start()
    try:
        yield lambda: 128 + came[0] if came else 0
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with(parent: int) -> None:
    """SIGTERM to this process once the other one, its parent, is gone: a run must not go on beside its batch system."""
    # An orphan gets another parent, at once on Linux; no signal tells of it.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    # By the signal, so that this end goes the way of any other: with a checkpoint.
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_owner(config: Config, patience_s: float, called_off: Callable[[], bool]) -> None:
    """Until nobody works on the run: an owner that was killed on another machine is seen to be dead after a while."""
    from rftdask.run.run_folder import check_run
    from rftdask.storage import open_storage

    end = time.monotonic() + patience_s
    while time.monotonic() < end and not called_off():
        try:
            for stage in config.stage_configs():
                # Any other mistake is told at once: only an owner that may be dead is worth waiting for.
                check_run(open_storage(stage.checkpoint_job_dir), stage, free=("model.model_path",))
            return
        except FencedError:
            time.sleep(_LOOK_S)


def _load(config: str, overrides: list[str] | None, origin: str) -> Config:
    """The checked configuration; its warnings are shown."""
    checked = load_config(config, overrides or [], origin=origin)
    if checked.origin:
        _say(f"read as a file of {checked.origin}; rftdask validate tells what that changes", err=True)
    _warn(checked.warnings)
    return checked


def _begin(checked: Config) -> Config:
    """The configuration of a start, whose run may be one beside the one in its folder; that is said."""
    from rftdask.run.run_folder import begin_beside  # late: the other commands need no storage

    begun = begin_beside(checked)
    if begun.name != checked.name:
        _say(f"continue_from_checkpoint: false: a new run, {begun.checkpoint_job_dir}", err=True)
    return begun


def _write_page(run: str | Path, html: str, limit: int) -> None:
    """The experiences of a run as one page. Raises: UserError: the file cannot be written."""
    from rftdask.reports.lineage.browse import Browser
    from rftdask.reports.page.rendering import render_experiences

    page = render_experiences(Browser(run), limit)
    try:
        Path(html).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"--html {html}: {error.strerror}") from error


def _say(text: object, err: bool = False) -> None:
    """Print a line: the one way in which a command does, and nothing that others wrote does more than be read."""
    typer.echo(safe(str(text)), err=err)


def _warn(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        _say(f"warning: {warning}", err=True)


def main() -> None:
    """Entry point of the command `rftdask`."""
    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:  # while typer makes the commands; from then on it takes it itself
        sys.exit(EXIT_STOPPED)
    except (UserError, FencedError) as error:
        _say(f"error: {error}", err=True)
        sys.exit(EXIT_USER)
    except RftError as error:
        _say(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if isinstance(error, ImportError) and (remedy := lacks_training(error)):
            _say(f"error: {remedy}", err=True)
            sys.exit(EXIT_USER)
        if hasattr(error, "message") and hasattr(error, "exit_code"):  # mistyped; the class is private to typer
            from typer import rich_utils  # late: it loads rich, which most commands do without

            error.message = safe(str(error.message))
            rich_utils.rich_format_error(error)  # type: ignore[arg-type]
            sys.exit(error.exit_code)
        # A bug, whose traceback quotes what others wrote.
        _say(traceback.format_exc().rstrip(), err=True)
        sys.exit(EXIT_FAILED)
