"""Promises of batch scripts: the site's template, and the shell of the driver."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rftdask.cluster import slurm
from rftdask.cluster.driver_script import driver_shell
from rftdask.cluster.jobs import CANCELLED_FILE, RETURNED, RETURNS_FILE
from rftdask.cluster.layout import plan_jobs
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import replace
from rftdask.errors import ConfigError, UserError
from rftdask.storage import open_storage
from tests.integration.run_cases import call_cli
from tests.living import wait_until
from tests.unit.cluster.batch_cases import DRIVER, configured, private

WRAPPED = """{% extends "job.sh" %}
{% block command %}
{{ srun }} {{ "apptainer exec --nv /images/rft.sif " if role != "controller" }}{{ command }}
{% endblock %}
{% block prologue %}
ulimit -n 65536
{{ super() }}
{%- endblock %}
"""


def test_a_site_template_wraps_the_commands_of_scripts(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        "trainer.num_ranks=2",
        "cluster.slurm.trainer.prologue=[module load apptainer]",
        "cluster.python=python3",
    )
    config = replace(config, {"cluster.slurm.template": WRAPPED})
    worker = slurm.SlurmCluster.job_script(config, "trainer", 2, "trainer-0", private(config), tmp_path / "log")
    assert "\nulimit -n 65536\nmodule load apptainer\nexec srun " in worker
    assert " apptainer exec --nv /images/rft.sif python3 -m rftdask.cluster.join " in worker
    storage = open_storage(config.checkpoint_job_dir)
    assert "\npython3 -m rftdask run " in slurm.controller_text(config, private(config), storage)
    layout = plan_jobs([config], {"trainer": 2, "explorer": 1})
    parts = (
        slurm.allocation_script(config, layout, private(config), storage),
        *slurm.offline_scripts(config, private(config), storage, 1, 1),
    )
    for script, wrapped in zip(parts, (2, 2, 1), strict=True):  # (driver and helper), twice; trainer
        assert script.text.count("apptainer exec --nv /images/rft.sif python3 -m rftdask ") == wrapped, script.name
        assert "\nulimit -n 65536\n" in script.text and "{" not in script.text.split("may_return")[0]


def test_the_template_is_printed_with_the_site_template(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(replace(configured(tmp_path), {"cluster.slurm.template": WRAPPED}).to_yaml())
    shown = call_cli("submit", str(file), "--print-templates")
    assert shown.code == 0 and "{% block command %}{{ srun }} {{ command }}{% endblock %}" in shown.out, shown
    assert shown.out.rstrip().endswith(WRAPPED.rstrip())


def test_the_error_of_a_failing_template_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.slurm.template: .*line 1: unexpected '}'"):
        replace(configured(tmp_path), {"cluster.slurm.template": "{{ command }\n"})
    config = replace(configured(tmp_path), {"cluster.slurm.template": "{{ image }} {{ command }}"})
    with pytest.raises(UserError, match=r"cluster.slurm.template: UndefinedError: 'image' is undefined"):
        slurm.controller_text(config, private(config), open_storage(config.checkpoint_job_dir))


@pytest.mark.parametrize(
    ("sent", "to_driver", "cancelled", "code", "restarts", "stay"),
    [
        (signal.SIGUSR1, False, False, 130, 0, True),  # the walltime is near
        (signal.SIGINT, False, False, 130, 0, False),  # rftdask cancel
        (signal.SIGTERM, False, False, 143, 0, False),  # scancel by hand
        (signal.SIGTERM, False, False, 143, 1, True),  # a requeue, of which SLURM knows itself
        (signal.SIGTERM, False, True, 143, 1, False),  # and then it was cancelled
        (signal.SIGTERM, True, False, 143, 0, False),  # only the driver was signaled
        (signal.SIGUSR1, False, True, 130, 0, False),  # both at once
    ],
)
def test_a_controller_ends_with_its_driver_or_is_requeued(
    tmp_path: Path, sent: signal.Signals, to_driver: bool, cancelled: bool, code: int, restarts: int, stay: bool
) -> None:
    requeued = sent is signal.SIGUSR1 and not cancelled
    path = of_slurm(tmp_path, f"JobId=7 Requeue={int(requeued)} Restarts={restarts} BatchFlag=1")
    (tmp_path / "driver.py").write_text(DRIVER)
    run = shlex.join([sys.executable, "-S", str(tmp_path / "driver.py"), str(tmp_path / "ready")])
    script = "\n".join(driver_shell(SecretsDir(tmp_path), run, slurm.ON_SLURM))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {"PATH": path, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", script], env=env, start_new_session=True, **pipes) as controller:
        wait_until((tmp_path / "ready").exists)
        if cancelled:
            (tmp_path / CANCELLED_FILE).touch()
        target = psutil.Process(controller.pid).children()[0].pid if to_driver else controller.pid
        os.kill(target, sent)
        assert controller.wait(60) == code
        assert controller.stderr is not None and (slurm.NO_REQUEUE in controller.stderr.read()) == (not requeued)
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "scancelled").exists() == (cancelled and code == 130)
    # The driver finds the marker, so that the jobs of its workers stay.
    assert (tmp_path / RETURNS_FILE).exists() == stay
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def of_slurm(folder: Path, answer: str) -> str:
    """A PATH with commands in the place of SLURM's, which write down what they are asked for."""
    requeue = f'[ "$1" = requeue ] && echo "$@" >{folder}/requeued; echo "{answer}"'
    for name, body in {"scontrol": requeue, "scancel": f"touch {folder}/scancelled", "sleep": ":"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("driver", "code", "starts"),
    [
        ("[ $(wc -l <starts) -eq 3 ] || kill -9 $BASHPID", 0, 3),  # out of memory twice, say
        ("kill -9 $BASHPID", 137, 101),  # each time: not for ever
        ("touch cancelled; kill -9 $BASHPID", 137, 1),
        ("trap : INT; kill -INT $PPID; sleep 0.3; kill -9 $BASHPID", 137, 1),  # it was to end anyhow
        ("exit 2", 2, 1),
    ],
)
def test_a_killed_driver_is_started_again_in_its_job(tmp_path: Path, driver: str, code: int, starts: int) -> None:
    path = of_slurm(tmp_path, "JobId=7 Requeue=1 Restarts=0 BatchFlag=1")
    (tmp_path / "sleep").unlink()
    run = f"bash -c {shlex.quote(f'echo >>starts; echo ${{{RETURNED}:-0}} >>returned; {driver}')}"
    script = "\n".join(driver_shell(SecretsDir(tmp_path), run, slurm.ON_SLURM))
    env = {"PATH": path, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, len((tmp_path / "starts").read_text())) == (code, starts), done
    assert done.stdout.count("started again after it was killed (exit code 137)\n") == starts - 1
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / "returned").read_text().split() == ["0"] + ["1"] * (starts - 1)


def test_a_driver_of_a_requeued_job_knows_its_restart(tmp_path: Path) -> None:
    script = "\n".join(driver_shell(SecretsDir(tmp_path), f"echo returned ${{{RETURNED}:-0}}", slurm.ON_SLURM))
    for restarts, returned in (("", 0), ("0", 0), ("2", 1)):
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
        assert f"returned {returned}\n" in done.stdout


def test_a_driver_ends_with_the_script_of_its_job(tmp_path: Path) -> None:
    ready, signaled = tmp_path / "ready", tmp_path / "told"
    watching = f"""
import os, pathlib, signal, time
from rftdask.cli.run import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(signaled)!r}).touch())
parent = os.getppid()
pathlib.Path({str(ready)!r}).touch()
end_with_parent(parent)
"""
    script = f"{shlex.join([sys.executable, '-c', watching])} & wait"
    with subprocess.Popen(["bash", "-c", script]) as shell:
        wait_until(ready.exists)
        shell.kill()
    wait_until(signaled.exists)
    config = configured(tmp_path)
    text = slurm.controller_text(config, private(config), open_storage(config.checkpoint_job_dir))
    assert " --exit-with-parent &\n" in text


def test_a_canceled_controller_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / CANCELLED_FILE).touch()
    script = "\n".join(driver_shell(SecretsDir(tmp_path), f"touch {tmp_path}/ran", slurm.ON_SLURM))
    assert subprocess.run(["bash", "-c", script], capture_output=True, check=False).returncode == 0
    assert not (tmp_path / "ran").exists()
