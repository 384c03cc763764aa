"""Promises of batch systems other than SLURM."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftdask.cluster import jobqueue
from rftdask.cluster.base import find_cluster
from rftdask.cluster.jobqueue import HTCondorCluster, JobQueueCluster, LsfCluster, OarCluster, PbsCluster, SgeCluster
from rftdask.errors import NotInstalledError, RoleError, UserError
from rftdask.storage import open_storage
from tests.unit.cluster.batch_cases import configured, private


@pytest.mark.parametrize("system", ["pbs", "lsf", "sge", "oar", "htcondor"])
def test_other_batch_systems_get_the_same_worker(tmp_path: Path, system: str) -> None:
    options = "{cores: 4, memory: 8GB, queue: long, trainer: {queue: gpu}}"
    if system == "htcondor":
        options = "{cores: 4, memory: 8GB, disk: 1GB}"
    if system == "oar":
        options = "{cores: 4, memory: 8GB, memory_per_core_property_name: not_applicable}"
    config = configured(tmp_path, f"cluster.type={system}", f"cluster.options={options}")
    batch_system: Any = find_cluster(system)
    options = batch_system.job_options(config, "trainer", "trainer-0", private(config), tmp_path / "log")
    made = batch_system.load_job_class()(**options)
    assert "--resources trainer=1" in made.job_script()
    assert "--scheduler-file" in made.job_script()
    if system in ("pbs", "sge"):
        assert "-q gpu" in made.job_script()


PBS_TABLE = """
pbs01: 
                                                            Req'd  Req'd   Elap
Job ID          Username Queue    Jobname    SessID NDS TSK Memory Time  S Time
--------------- -------- -------- ---------- ------ --- --- ------ ----- - -----
4711.pbs01      me       gpu      rftdask-t*  20341   1   8   64gb 24:00 R 01:12
4712.pbs01      me       gpu      rftdask-e*    --    1   8   64gb 24:00 Q   -- 
4713[].pbs01    me       gpu      sweep         --    1   1    4gb 01:00 B   -- 
4709.pbs01      me       gpu      old         19001   1   1    4gb 01:00 F 00:30
"""


SGE_TABLE = """\
job-ID  prior   name       user         state submit/start at     queue                          slots ja-task-ID 
-----------------------------------------------------------------------------------------------------------------
      2 0.75000 rftdask-co root         r     11/24/2026 19:35:13 all.q@vm                           1        
      3 0.58803 rftdask-tr root         r     11/24/2026 19:35:59 all.q@vm                           1        
      9 0.25000 t.sh       root         t     11/24/2026 19:37:35 all.q@vm                           1        
      7 0.25000 badwd      root         Eqw   11/24/2026 19:37:33                                    1        
      8 0.00000 held       root         hqw   11/24/2026 19:37:34                                    1        
"""
"""Recorded from Grid Engine 8.1.9, but for the `t`, which lasts too short a time."""


OAR_TABLE = """\
Job id    S User     Duration   System message
--------- - -------- ---------- ------------------------------------------------
5001      R me        0:12:44 R=8,W=4:0:0,J=B,N=rftdask-trainer-try (Karma=0.001)
5002      W me        0:00:00 R=8,W=4:0:0,J=B,N=rftdask-explorer-try (Karma=0.001)
5003      E me        0:00:01 R=8,W=4:0:0,J=B
"""


OLD_OAR_TABLE = """\
Job id     Name           User           Submission Date     S Queue
---------- -------------- -------------- ------------------- - ----------
5001       rftdask        me             2026-11-24 00:20:01 R default
5002       rftdask        me             2026-11-24 00:20:03 W default
"""


@pytest.mark.parametrize(
    ("system", "table", "states"),
    [
        (PbsCluster, PBS_TABLE, {"4711": "RUNNING", "4712": "PENDING (Q)", "4713": "RUNNING"}),
        (LsfCluster, "7001 RUN\n7002 PEND\n7003 DONE\n7004 EXIT\n", {"7001": "RUNNING", "7002": "PENDING (PEND)"}),
        (
            SgeCluster,
            SGE_TABLE,
            {"2": "RUNNING", "3": "RUNNING", "9": "RUNNING", "7": "PENDING (Eqw)", "8": "PENDING (hqw)"},
        ),
        (OarCluster, OAR_TABLE, {"5001": "RUNNING", "5002": "PENDING (W)"}),
        (OarCluster, OLD_OAR_TABLE, {"5001": "RUNNING", "5002": "PENDING (W)"}),
        (HTCondorCluster, "12.0 2\n13.0 1\n14.0 5\n15.0 4\n", {"12.0": "RUNNING", "13.0": "PENDING (1)"}),
    ],
)
def test_the_output_of_other_batch_systems_is_parsed(
    system: type[JobQueueCluster], table: str, states: dict[str, str]
) -> None:
    parsed = system.read_states(table)
    assert {job_id: state for job_id, state in parsed.items() if state != "PENDING (5)"} == states
    stuck = {job_id for job_id, state in parsed.items() if system.never_runs(state)}
    assert stuck == ({"7"} if system is SgeCluster else {"14.0"} if system is HTCondorCluster else set())


@pytest.mark.parametrize(
    ("system", "walltime", "seconds", "line"),
    [
        (PbsCluster, "'04:00:00'", 14400, "#PBS -l walltime=04:00:00"),
        (PbsCluster, "3600", 3600, "#PBS -l walltime=3600"),
        (PbsCluster, None, 1800, "#PBS -l walltime=00:30:00"),
        (SgeCluster, None, 1800, "#$ -l h_rt=00:30:00"),
        (LsfCluster, "'4:30'", 16200, "#BSUB -W 4:30"),
        (LsfCluster, None, 1800, "#BSUB -W 00:30"),
        (OarCluster, "'4'", 14400, "walltime=4"),
        (OarCluster, "'4:30'", 16200, "walltime=4:30"),
        (OarCluster, "'4:00:30'", 14430, "walltime=4:00:30"),
        (OarCluster, None, 1800, "walltime=00:30:00"),
    ],
)
def test_a_controller_knows_the_walltime_of_its_script(
    tmp_path: Path, system: type[JobQueueCluster], walltime: str | None, seconds: float, line: str
) -> None:
    options = "cores: 1, memory: 1GB, lsf_units: mb, " if system is LsfCluster else "cores: 1, memory: 1GB, "
    options += "memory_per_core_property_name: not_applicable, " if system is OarCluster else ""
    options += f"controller: {{walltime: {walltime}}}" if walltime else ""
    config = configured(tmp_path, f"cluster.type={system.cluster_type}", f"cluster.options={{{options}}}")
    assert system.walltime_s(config) == seconds
    script = system.controller(config, private(config), tmp_path).job_script()
    assert any(text.endswith(line) for text in script.splitlines()), script


def test_a_walltime_of_oar_is_a_text(tmp_path: Path) -> None:
    config = configured(tmp_path, "cluster.type=oar", "cluster.options={cores: 1, memory: 1GB, walltime: 10:00:00}")
    with pytest.raises(UserError, match=r"walltime is the number 36000, .* put it in quotes: '10:00:00'"):
        OarCluster.controller(config, private(config), tmp_path)


def test_the_remedy_for_a_held_job_is_one_of_its_system() -> None:
    for system in (PbsCluster, LsfCluster, SgeCluster, HTCondorCluster, OarCluster):
        assert "slurm" not in system.remedy and ("{job_id}" in system.remedy) == bool(system.stuck)


def test_a_missing_or_hanging_submit_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, "cluster.type=pbs", "cluster.options={cores: 1, memory: 1GB}")
    storage = open_storage(config.checkpoint_job_dir)
    monkeypatch.setenv("PATH", str(tmp_path))
    lsf = configured(tmp_path, "cluster.type=lsf", "cluster.options={cores: 1, memory: 1GB, lsf_units: mb}")
    with pytest.raises(NotInstalledError, match="qsub is not installed: use a login node"):
        PbsCluster.submit_controller(config, private(config), storage)
    with pytest.raises(NotInstalledError, match="bsub is not installed: use a login node"):
        LsfCluster.submit_controller(lsf, private(lsf), storage)
    (tmp_path / "bsub").write_text("#!/bin/sh\necho no such queue >&2; exit 255\n")
    (tmp_path / "bsub").chmod(0o755)
    with pytest.raises(RoleError, match=r"could not be submitted: bsub failed \(255\): no such queue"):
        LsfCluster.submit_controller(lsf, private(lsf), storage)
    (tmp_path / "bsub").write_text('#!/bin/sh\nread line; echo "Job <17> $line"\n')
    assert LsfCluster.submit_controller(lsf, private(lsf), storage).job_id == "17"
    (tmp_path / "qsub").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "qsub").chmod(0o755)
    monkeypatch.setattr(jobqueue, "SUBMIT_S", 0.3)
    with pytest.raises(
        RoleError, match=r"qsub \S+ did not answer in 0\.3 s: the batch system is overloaded or down; run"
    ):
        PbsCluster.submit_controller(config, private(config), storage)


def test_a_failed_cancel_is_an_error_unless_the_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    qdel = tmp_path / "qdel"
    qdel.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/tried\necho "no $1" >&2; exit 1\n')
    qdel.chmod(0o755)
    with pytest.raises(RoleError, match=r"qdel 1 failed \(1\): no 1; qdel 2 failed"):
        PbsCluster.cancel("1", "2")  # there is no qstat, so they may be alive
    assert (tmp_path / "tried").read_text() == "1\n2\n"
    (tmp_path / "qstat").write_text("#!/bin/sh\n")
    (tmp_path / "qstat").chmod(0o755)
    PbsCluster.cancel("1", "2")


def test_a_missing_command_and_no_jobs_are_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert LsfCluster.states(["1"]) is None and LsfCluster.states([]) == {}
    bjobs = tmp_path / "bjobs"
    bjobs.write_text("#!/bin/sh\necho 'No unfinished job found' >&2; exit 255\n")
    bjobs.chmod(0o755)
    assert LsfCluster.states(["1"]) == {}
    bjobs.write_text("#!/bin/sh\necho 'LSF is down. Please wait ...' >&2; exit 255\n")
    with pytest.raises(RoleError, match="LSF is down"):
        LsfCluster.states(["1"])


@pytest.mark.slow
def test_loading_a_batch_system_keeps_the_sigint_handler() -> None:
    code = """
import signal, threading
from rftdask.cluster.jobqueue import LsfCluster, PbsCluster

install, before = signal.signal, signal.getsignal(signal.SIGINT)
loaded = []

def load(system):
    loaded.append(system.load_job_class())

threads = [threading.Thread(target=load, args=[system]) for system in [PbsCluster, LsfCluster] * 4]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert {job.__name__: loaded.count(job) for job in loaded} == {"PBSJob": 4, "LSFJob": 4}
assert signal.getsignal(signal.SIGINT) is before and signal.signal is install
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
