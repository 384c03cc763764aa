"""Explorer workers that join and leave, with real processes."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rftdask.cluster.layout import EXPLORER_RESOURCE, TRAINER_RESOURCE, Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster
from rftdask.driver.experiment import Experiment
from rftdask.monitor.events import Event, Note
from rftdask.processes.dask_task import workers_of
from tests.integration import run_cases as runs
from tests.integration.local_stage import local_cluster, make_stage
from tests.living import wait_until

pytestmark = pytest.mark.slow

STEPS = 16
SETTINGS = (
    f"trainer.total_steps={STEPS}",
    "trainer.save_interval=5",
    "explorer.eval_interval=100",
    "explorer.eval_on_startup=false",
    "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.uneven",
    "cluster.num_cpus=4",
)
WORKER = "distributed.cli.dask_worker"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = runs.write_config(tmp_path_factory.mktemp("undisturbed"))
    with runs.RunProcess("run", str(config), *SETTINGS) as run:
        run.end(code=0)
    return runs.run_folder(config)


def has_engine(worker: psutil.Process) -> bool:
    """Return True if the worker has received a work unit; the first one starts its engine."""
    try:
        return any(runs.ENGINE in " ".join(child.cmdline()) for child in worker.children())
    except psutil.Error:
        return False


def test_a_run_grows_to_max_workers_and_survives_losing_one(config: Path, folder: Path, undisturbed: Path) -> None:
    workers = ("explorer.min_workers=1", "explorer.max_workers=2")
    with runs.RunProcess("run", str(config), *SETTINGS, *workers, "--progress", "plain") as run:
        run.wait_until(lambda: len(run.children(runs.ENGINE)) == 2)
        runs.worker_of(run.children(runs.ENGINE)[-1]).kill()
        ended = run.end(code=0)
    notes = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert any("requests 2 explorer workers" in note for note in notes), notes
    assert not any("crashed its workers" in note for note in notes), notes
    assert runs.assert_same_run(folder, undisturbed)["step"] == STEPS


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path / "layout", tls=False) as cluster:  # a worker from outside has no keys
        yield cluster


def wait_for_rank(running: threading.Thread) -> psutil.Process:
    while running.is_alive():
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if runs.TRAINER in " ".join(child.cmdline()):
                    return child
        running.join(0.02)
    raise AssertionError("the run ended before there was a trainer rank")


def test_an_outside_worker_takes_batches_until_killed(tmp_path: Path, cluster: LocalCluster, undisturbed: Path) -> None:
    path = runs.write_config(tmp_path)
    folder = runs.run_folder(path)
    events: list[Event] = []
    running = threading.Thread(target=make_stage(path, SETTINGS, cluster, events.append).run)
    running.start()
    address = cluster.client.scheduler.address
    options = ("--resources", "explorer=1", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--name", "late")
    rank = wait_for_rank(running)
    rank.suspend()  # until the other has joined, so that work is left for it however long that takes
    late = subprocess.Popen([sys.executable, "-m", WORKER, address, *options], stderr=subprocess.DEVNULL)
    try:
        while not any(isinstance(e, Note) and "worker late" in e.text for e in events) and running.is_alive():
            running.join(0.05)
        rank.resume()
        while not has_engine(psutil.Process(late.pid)) and running.is_alive():
            running.join(0.02)
        assert runs.num_steps(folder) < STEPS, "it took no work unit"
    finally:
        late.kill()
        late.wait()
    running.join(runs.DEADLINE_S)
    assert not running.is_alive()
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("worker late" in note and "joined" in note for note in notes), notes
    assert any("worker late" in note and "was lost" in note for note in notes), notes
    assert not any("crashed its workers" in note for note in notes), notes
    assert runs.assert_same_run(folder, undisturbed)["step"] == STEPS


def test_only_the_task_that_kills_its_worker_is_set_aside(tmp_path: Path) -> None:
    config, kills = runs.write_config(tmp_path, num_tasks=8), tmp_path / "kills"
    settings = (
        "trainer.total_steps=4",
        "explorer.eval_on_startup=false",
        "explorer.eval_interval=100",
        "explorer.sandbox.mode=never",
        "buffer.explorer_input.default_workflow_type=tests.integration.roles.poison_workflow.poisonous",
    )
    env = {"POISON_FILE": str(kills)}
    with runs.RunProcess("run", str(config), *settings, "--progress", "plain", env=env) as run:
        ended = run.end(code=0)
    status = runs.assert_sound(runs.run_folder(config))
    assert status["step"] == 4
    experiences = Experiment.open(runs.run_folder(config)).experiences()
    poisoned = experiences[experiences["status"] == "poisoned"]
    assert set(poisoned["task_index"]) == {5} and sorted(poisoned["epoch"]) == [0, 0, 1, 1]
    assert set(experiences[experiences["task_index"] != 5]["status"]) == {"ok"}
    assert len(experiences) == 4 * 4 * 2
    assert "/0/5 crashed its workers and was set aside" in ended.out, ended.out
    # In its second epoch it does not run; in its first, both of its rollouts may reach the kill.
    assert set(kills.read_text().split()) == {"0"}


PLANS = (WorkerPlan("trainer-0", (TRAINER_RESOURCE,), 1), WorkerPlan("explorer-0", (EXPLORER_RESOURCE,), 1))


def test_explorers_join_and_leave_a_local_cluster() -> None:
    with LocalCluster(Layout(PLANS)) as cluster:

        def names() -> set[str]:
            return {info["name"] for info in workers_of(cluster.client).values()}

        cluster.scale(EXPLORER_RESOURCE, 2)
        wait_until(lambda: names() == {"trainer-0", "explorer-0", "explorer-2"}, deadline_s=120.0)
        assert cluster.num_asked(EXPLORER_RESOURCE) == 2
        cluster.scale(EXPLORER_RESOURCE, 0)
        wait_until(lambda: names() == {"trainer-0"}, deadline_s=120.0)
