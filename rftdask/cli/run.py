"""`rftdask run` and `rftdask join`: the processes that drive a run or work for it."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from rftdask.cli.app import EXIT_STOPPED
from rftdask.cli.common import AcceptChanges, ConfigFile, Origin, Overrides, Progress, load, say, with_run_name
from rftdask.cluster.base import prepare_cluster
from rftdask.cluster.join import join as work
from rftdask.cluster.layout import plan_machines
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import Config, load_config
from rftdask.driver.memory_estimate import raise_shortages, worker_shortages
from rftdask.errors import FencedError, UserError
from rftdask.processes.gpus import free_host_bytes, visible_gpus
from rftdask.reports.summary import print_summary
from rftdask.run.run_folder import check_driver, check_run
from rftdask.storage import open_storage

_POLL_INTERVAL_S = 1.0
_SIGNAL_POLL_S = 0.1


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    progress: Progress = "auto",
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for another owner of the run")] = 0,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="End as on SIGTERM when the parent process dies")
    ] = False,
    accept_changes: AcceptChanges = False,
    origin: Origin = "",
) -> None:
    """Run a configuration to its end, or continue it.

    Ctrl-C (exit code 130), SIGTERM (143) and SIGHUP (129) end the run with a checkpoint. In mode serve, the command
    serves the policy like `rftdask serve`.
    """
    checked = load(config, overrides, origin)
    if checked.mode == "serve":
        from rftdask.serve.server import ServeOptions, serve_policy  # late: loads numpy

        return serve_policy(checked, ServeOptions.of(checked), typer.echo)
    settings = "" if checked.continue_from_checkpoint else " with name={} continue_from_checkpoint=true"
    checked = with_run_name(checked)
    again = f"the same command{settings.format(checked.name)} continues"
    experiment = None

    def stop() -> None:
        if experiment is not None:  # else `exit_code` is read below, before the run starts
            experiment.stop(may_return=True)

    with _stopping_on_signals(stop) as exit_code:
        if exit_with_parent:
            threading.Thread(target=end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
        prepare_cluster(checked, checked.stage_configs())
        from rftdask.driver.experiment import Experiment  # late: the fork servers import torch meanwhile

        experiment = Experiment(checked)
        try:
            _wait_for_owner(checked, patience, lambda: exit_code() > 0)
            if exit_code():
                raise typer.Exit(exit_code())
            summary = experiment.run(progress, accept_changes=accept_changes)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            say(f"ended at once; {again} from the newest checkpoint", err=True)
            raise typer.Exit(EXIT_STOPPED) from None
        print_summary(summary)
        # The last garbage collection would scan Dask and pandas for a tenth of a second and free nothing.
        gc.freeze()
        if summary.status != "finished":
            say(f"stopped with a checkpoint; {again}", err=True)
            raise typer.Exit(exit_code() or EXIT_STOPPED)


def join(
    config: ConfigFile,
    overrides: Overrides = None,
    role: Annotated[str, typer.Option(help="Role of the worker: trainer, explorer or auxiliary")] = "explorer",
    patience: Annotated[float, typer.Option(min=1, help="Seconds to wait for the scheduler of the run")] = 120,
    origin: Origin = "",
) -> None:
    """Work for a run as one more worker of its cluster.

    The run needs cluster.type joined. The worker ends with the run.
    """
    if role not in ("trainer", "explorer", "auxiliary"):
        raise UserError(f"--role {role}: choose trainer, explorer or auxiliary")
    checked = load_config(config, overrides or [], origin=origin)
    if checked.cluster.is_one_machine:
        raise UserError(
            f"cluster.type {checked.cluster.type} starts its own workers; rftdask join needs cluster.type joined"
        )
    if not checked.continue_from_checkpoint:
        raise UserError(
            "continue_from_checkpoint: false gives each start a new name, which a worker cannot know; add "
            "continue_from_checkpoint=true and name=NAME, where NAME is the name that the start of the run printed"
        )
    if visible_gpus():
        raise_shortages(worker_shortages(checked.stage_configs(), plan_machines(checked), role, free_host_bytes()))
    work(checked, SecretsDir.of(checked, open_storage(checked.checkpoint_job_dir)), role, patience)


@contextlib.contextmanager
def _stopping_on_signals(stop: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Call `stop` once on SIGTERM or SIGHUP; yield a function that returns the exit code of the first signal, or 0.

    Repeated signals are ignored: SLURM sends SIGTERM to a script and all its processes, and the script forwards it.
    A thread calls `stop`, because it writes to storage and takes locks that the interrupted code may hold.
    """
    signals: list[int] = []
    over = threading.Event()

    def poll() -> None:
        while not over.wait(_SIGNAL_POLL_S):
            if signals:
                try:
                    stop()
                except BaseException:
                    _thread.interrupt_main()  # a clean end is impossible, so the run ends at once
                    raise
                return

    def on_signal(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) == 1:
            with contextlib.suppress(OSError):  # os.write, because print may be the interrupted call
                os.write(2, f"{signal.Signals(number).name}: the run ends with a checkpoint\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # only the main thread can handle signals
        return
    # nohup ignores SIGHUP, and it stays ignored.
    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in handled}
    threading.Thread(target=poll, name="signals", daemon=True).start()
    try:
        yield lambda: 128 + signals[0] if signals else 0
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Send SIGTERM to this process when its parent ends, so that a run does not outlive its batch job.

    The signal ends the run in the usual way, with a checkpoint.
    """
    # Linux gives an orphan a new parent at once, but sends no signal about it.
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_owner(config: Config, patience_s: float, is_cancelled: Callable[[], bool]) -> None:
    """Wait until no other process owns the run. An owner killed on another machine counts as dead after a while."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and not is_cancelled():
        try:
            check_driver(open_storage(config.checkpoint_job_dir), config)
            for stage in config.stage_configs():
                check_run(open_storage(stage.checkpoint_job_dir), stage, free=("model.model_path",))
            return
        except FencedError:  # other errors rise at once: waiting does not fix them
            time.sleep(_POLL_INTERVAL_S)
