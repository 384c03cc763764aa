"""Promises of clusters whose workers are jobs: a failing command of the batch system loses no job and skips no end."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import dask
import distributed
import pytest

from rftdask.cluster import batch_cluster
from rftdask.cluster.batch_cluster import RemoteWorkersCluster, call, for_all_jobs
from rftdask.cluster.jobs import JobRecord, jobs_file, read_jobs, write_jobs
from rftdask.cluster.layout import plan_jobs
from rftdask.cluster.slurm import SlurmCluster
from rftdask.config import Config
from rftdask.errors import NotInstalledError, RoleError, WaitTimeout
from rftdask.storage import open_storage
from tests.living import wait_until
from tests.unit.cluster.batch_cases import configured, private


class FakeSystem(SlurmCluster):
    """A batch system whose jobs are entries of `queue` and never start."""

    queue: ClassVar[list[str]] = []
    keeps: ClassVar[list[str]] = []
    """Ids of jobs whose next cancel fails, once for each entry."""

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        return {job_id: "PENDING" for job_id in job_ids if job_id in cls.queue}

    @classmethod
    def cancel(cls, *job_ids: str) -> None:
        for_all_jobs(job_ids, cls._cancel_one)

    @classmethod
    def _cancel_one(cls, job_id: str) -> None:
        if job_id in cls.keeps:
            cls.keeps.remove(job_id)
            raise RoleError(f"scancel {job_id} failed")
        cls.queue.remove(job_id)

    @classmethod
    def reason(cls, job_id: str) -> str:
        return ""

    def start_job(self, role: str, name: str) -> str:
        self.queue.append(name)
        return name


@pytest.fixture(autouse=True)
def empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSystem, "queue", [])
    monkeypatch.setattr(FakeSystem, "keeps", [])
    monkeypatch.setattr(batch_cluster, "_POLL_INTERVAL_S", 0.02)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path, "cluster.interface=lo", "explorer.rollout_model.engine_num=3")


@pytest.fixture
def cluster(config: Config) -> Iterator[FakeSystem]:
    layout = plan_jobs([config], {"trainer": 1, "explorer": 1})
    started = FakeSystem(config, layout, private(config), open_storage(config.checkpoint_job_dir))
    started.use(["explorer"])
    wait_until(lambda: len(FakeSystem.queue) == 3)
    yield started
    FakeSystem.keeps.clear()
    started.close()


def noted(config: Config) -> list[str]:
    return [job.job_id for job in read_jobs(open_storage(config.checkpoint_job_dir), jobs_file(config.command_name))]


def test_a_job_that_could_not_be_cancelled_is_cancelled_again(cluster: FakeSystem, config: Config) -> None:
    FakeSystem.keeps += ["explorer-1"] * 3
    cluster.scale("explorer", 1)
    wait_until(lambda: FakeSystem.queue == ["explorer-0"] and noted(config) == ["explorer-0"])
    cluster.check()  # cancelled jobs whose workers had not joined are no failed starts


def test_close_ends_everything_although_a_job_cannot_be_cancelled(cluster: FakeSystem, config: Config) -> None:
    FakeSystem.keeps.append("explorer-0")
    with pytest.raises(RoleError, match="scancel explorer-0 failed"):
        cluster.close()
    assert FakeSystem.queue == ["explorer-0"] and "explorer-0" in noted(config)
    assert private(config).read_address() is None and cluster.client.status == "closed"
    cluster.close()


def test_all_jobs_of_an_earlier_start_are_cancelled_although_one_fails(config: Config) -> None:
    storage = open_storage(config.checkpoint_job_dir)
    system = f"{FakeSystem.__module__}.FakeSystem"
    FakeSystem.queue += ["explorer-0", "explorer-1", "explorer-2"]
    earlier = [JobRecord("explorer", name, name, system, 0.0, script="another") for name in FakeSystem.queue]
    write_jobs(storage, earlier, jobs_file(config.command_name))
    FakeSystem.keeps += ["explorer-0", "explorer-1"]
    with pytest.raises(RoleError, match="scancel explorer-0 failed; scancel explorer-1 failed"):
        FakeSystem(config, plan_jobs([config], {"trainer": 1, "explorer": 1}), private(config), storage)
    assert FakeSystem.queue == ["explorer-0", "explorer-1"]


@pytest.mark.parametrize("kind", [FakeSystem, RemoteWorkersCluster])
def test_a_failed_start_reports_its_reason_and_leaves_nothing(
    kind: type[RemoteWorkersCluster], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(distributed.Client, "wait_for_workers", fail)
    before = dask.config.get("distributed.scheduler.allowed-failures")
    with pytest.raises(WaitTimeout, match="the control worker did not start in 120 s; see the log"):
        kind.start(config, plan_jobs([config], {"trainer": 1, "explorer": 1}), open_storage(config.checkpoint_job_dir))
    assert private(config).read_address() is None
    assert dask.config.get("distributed.scheduler.allowed-failures") == before


def test_a_job_that_can_never_start_fails_the_run_with_a_remedy(
    cluster: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_cluster, "_HOPELESS_S", 0.0)
    monkeypatch.setattr(FakeSystem, "never_runs", lambda *_: True)
    monkeypatch.setattr(FakeSystem, "remedy", "release {job_id} of {role}")

    def has_failed() -> bool:
        try:
            cluster.check()
        except RoleError as error:
            assert "job explorer-0 (explorer-0) can never start: PENDING; release explorer-0 of explorer" in str(error)
            return True
        return False

    wait_until(has_failed)


def test_output_in_another_encoding_is_no_error() -> None:
    assert call("printf", r"name\377") == "name\ufffd"


def test_one_kind_of_failure_is_reported_once() -> None:
    def fail(job_id: str) -> None:
        raise NotInstalledError("qdel is not installed")

    with pytest.raises(NotInstalledError, match=r"^qdel is not installed$"):
        for_all_jobs(["1", "2"], fail)
