"""The contract of the synchronization methods checkpoint, memory and nccl. Every machine is a Dask worker with its own
memory, whose engine is a child process; the trainer is on another machine. Promises of all methods:

- every machine serves the published versions in order, with their bytes, hash and fingerprint;
- a machine that joins late gets the current version, and nobody waits for it;
- killing a machine, its engine or the trainer with signal 9 during a transfer affects no other process: the others get
  their versions, and so does the replacement, once the trainer has published its held versions again;
- a trainer killed at any of its durable writes is followed by one that publishes the same versions in order, with their
  hashes and fingerprints: versions before its newest checkpoint are files, the others it computes again;
- weights that a trainer holds become a file on request; until then, storage has only their manifest;
- a run over these machines trains the same, bit for bit, and requests files only if necessary; if the holders of
  weights send nothing, it continues with files and ends the same way.
"""

import hashlib
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftdask.cluster.layout import Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster
from rftdask.processes.dask_task import workers_of
from rftdask.storage import open_storage
from rftdask.synchronizer.published import read_published
from tests.integration import run_cases as runs
from tests.integration.weights import weight_parties as parties
from tests.integration.weights.killed_trainer import FingerprintEngine
from tests.integration.weights.weight_parties import Report
from tests.living import wait_until
from tests.unit.trainer.trainer_cases import fill_log, make_trainer

DEADLINE_S = 180.0
TRAINER, ENGINES = "trainer-0", ("explorer-1", "explorer-2")
PLANS = (WorkerPlan(TRAINER, ("trainer",), 1), *(WorkerPlan(name, ("explorer",), 1) for name in ENGINES))


class Machines(LocalCluster):
    """Workers that each have their own memory, so that only sockets and storage connect them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(Layout(PLANS), tls=False)  # a joining command has no keys

    def _worker_spec(self, worker: WorkerPlan) -> dict[str, Any]:
        memory = self.folder / f"memory-{worker.name}"
        memory.mkdir(exist_ok=True)
        spec = super()._worker_spec(worker)
        spec["options"]["env"] |= {"RFTDASK_SHARED_MEMORY": str(memory), "TMPDIR": str(memory)}
        return spec

    def addresses(self) -> dict[str, str]:
        return {str(worker["name"]): address for address, worker in workers_of(self.client).items()}

    def wait_for(self, name: str, other_than: str = "") -> None:
        def has_joined() -> bool:
            return self.addresses().get(name, other_than) != other_than

        wait_until(has_joined, f"the joining of {name}", deadline_s=DEADLINE_S)

    def kill(self, name: str) -> None:
        """Kill a worker with signal 9; its nanny starts another one."""
        address = self.addresses()[name]
        os.kill(self.client.run(os.getpid, workers=[address])[address], signal.SIGKILL)
        self.wait_for(name, other_than=address)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines")) as started:
        yield started


class Run:
    def __init__(self, machines: Machines, folder: Path, method: str) -> None:
        # A unique name: pytest reuses the folder of a passed test, and these processes live on.
        self.machines, self.url = machines, str(folder / f"run-{uuid.uuid4().hex[:8]}")
        self.config = runs.write_config(folder)
        text = self.config.read_text().replace("synchronizer:", f"synchronizer:\n  sync_method: {method}")
        elsewhere = "cluster:\n  type: existing\n  options: {address: 'tcp://127.0.0.1:1'}"
        self.config.write_text(text.replace("cluster:", elsewhere))

    def begin(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the future of a call on a machine."""
        return self.machines.client.submit(call, *arguments, workers=[name], pure=False)

    def publish(self, *versions: int) -> list[Report]:
        future = self.begin(TRAINER, parties.publish, str(self.config), self.url, list(versions))
        reports: list[Report] = future.result(timeout=DEADLINE_S)
        return reports

    def serve(self, version: int, names: tuple[str, ...] = ENGINES) -> dict[str, Any]:
        """Serve with the engines of machines and return the futures of their reports."""
        return {name: self.begin(name, parties.serve, str(self.config), self.url, version) for name in names}


def results(futures: dict[str, Any]) -> list[Report]:
    return [future.result(timeout=DEADLINE_S) for future in futures.values()]


@pytest.fixture(params=["checkpoint", "memory", "nccl"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(machines: Machines, tmp_path: Path, method: str) -> Run:
    return Run(machines, tmp_path, method)


def test_all_machines_serve_all_versions_even_after_joining_late(run: Run, method: str) -> None:
    reports = run.publish(1, 2, 3)
    for report in reports:
        assert report.fingerprint == parties.fingerprint(report.version)
        assert results(run.serve(report.version)) == [report] * len(ENGINES)
    files = sorted(path.name for path in Path(run.url, "weights", "3").iterdir())
    assert files == ["MANIFEST.json", *["model.safetensors"] * (method == "checkpoint")]
    # One joins while the others continue with the next version.
    (fourth,) = run.publish(4)
    futures = run.serve(4)
    before = run.machines.addresses().keys()
    run.machines.scale("explorer", len(before))
    while not (joined := run.machines.addresses().keys() - before):
        time.sleep(0.02)
    assert results(run.serve(3, tuple(joined))) == [reports[-1]]
    assert results(futures) == [fourth] * len(ENGINES)
    # Unneeded versions are removed; the others become files on request.
    run.begin(TRAINER, parties.collect, run.url, 4).result(timeout=DEADLINE_S)
    run.begin(TRAINER, parties.write_held, run.url).result(timeout=DEADLINE_S)
    assert [path.name for path in Path(run.url, "weights").iterdir()] == ["4"]
    written = Path(run.url, "weights", "4", "model.safetensors").read_bytes()
    assert written == bytes(parties.weights(4)["model.safetensors"])


@pytest.mark.slow
def test_a_killed_process_loses_no_weights(run: Run) -> None:
    kills = []
    for version, victim in ((3, ENGINES[0]), (6, TRAINER), (9, f"the engine of {ENGINES[1]}")):
        (report,) = run.publish(version)
        futures = run.serve(version)
        pause_s = random.SystemRandom().uniform(0.0, 0.3)
        kills.append((victim, pause_s))
        time.sleep(pause_s)
        if victim in (TRAINER, *ENGINES):
            run.machines.kill(victim)
        else:
            pid = run.begin(ENGINES[1], parties.engine_pid, str(run.config)).result(timeout=DEADLINE_S)
            os.kill(pid, signal.SIGKILL)
        if victim == TRAINER:
            # Like a resumed trainer: publish what was held after its checkpoint, at the same steps.
            assert run.publish(version) == [report], kills
        for name, future in futures.items():
            if name in victim:
                # Another worker must repeat a task whose worker or engine was lost, as the explorer does.
                future.cancel()
                future = run.serve(version, (name,))[name]
            assert future.result(timeout=DEADLINE_S) == report, (name, kills)


@pytest.fixture(scope="module")
def undisturbed() -> list[Report]:
    """Reports about the versions of an undisturbed trainer that holds nothing."""
    storage = open_storage(f"memory://undisturbed-{uuid.uuid4().hex}")
    fill_log(storage, parties.NUM_VERSIONS)
    make_trainer(storage, engine=FingerprintEngine()).run()
    reports = []
    for version in range(1, parties.NUM_VERSIONS + 1):
        published = read_published(storage, version)
        assert published is not None
        data = storage.get(f"{published.folder}/model.safetensors")
        sha256 = hashlib.sha256(data).hexdigest()
        reports.append(Report(version, published.content_hash, published.fingerprint, sha256))
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_trainer_repeats_its_versions(run: Run, tmp_path: Path, every: int, undisturbed: list[Report]) -> None:
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    machine = run.begin(TRAINER, parties.give_blocks).result(timeout=DEADLINE_S)
    followers = {
        name: run.begin(name, parties.follow, str(run.config), str(folder), name) for name in parties.FOLLOWERS
    }
    memory = str(run.machines.folder / f"memory-{TRAINER}")
    arguments = (str(run.config), str(folder), machine, str(random.SystemRandom().randrange(every)), str(every))
    program = ("-m", "tests.integration.weights.killed_trainer", *arguments)
    with runs.RunProcess(program=program, env={"RFTDASK_SHARED_MEMORY": memory, "TMPDIR": memory}) as trainer:
        trainer.end(code=0)
    problems_by_place = json.loads((folder / "problems.json").read_text())
    assert {place: problems for place, problems in problems_by_place.items() if problems} == {}
    assert len(problems_by_place) >= 5, problems_by_place
    for name, first in parties.FOLLOWERS.items():
        served = followers[name].result(timeout=DEADLINE_S)
        expected = undisturbed[first - 1 :]
        assert [at for at, reports in zip(problems_by_place, served, strict=True) if reports != expected] == []


STEPS = 6


@pytest.fixture(scope="module")
def by_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one machine whose weights are files."""
    config = runs.write_config(tmp_path_factory.mktemp("by-files"))
    runs.finish_alone(config, f"trainer.total_steps={STEPS}", "synchronizer.sync_method=checkpoint")
    return runs.run_folder(config)


@pytest.fixture
def settings(machines: Machines, method: str) -> tuple[str, ...]:
    address = f"cluster.options={{address: '{machines.client.scheduler.address}'}}"
    return "cluster.type=existing", address, f"trainer.total_steps={STEPS}", f"synchronizer.sync_method={method}"


@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_a_run_over_machines_trains_the_same(config: Path, settings: tuple[str, ...], by_files: Path) -> None:
    runs.finish_alone(config, *settings)
    folder = runs.run_folder(config)
    assert runs.assert_same_run(folder, by_files)["step"] == STEPS
    assert not (folder / "control" / "whole_version.txt").exists(), "it asked for files"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_a_run_without_held_weights_continues_with_files(
    config: Path, folder: Path, machines: Machines, by_files: Path, method: str, settings: tuple[str, ...]
) -> None:
    task, names = (parties.reach_no_rank, ENGINES) if method == "nccl" else (parties.give_nothing, (TRAINER,))
    try:
        machines.client.run(task, workers=[machines.addresses()[name] for name in names])
        with runs.RunProcess("run", str(config), *settings, "--progress", "plain") as run:
            ended = run.end()
    finally:
        machines.client.run(parties.reconnect)
    assert ended.code == 0, ended
    assert (folder / "control" / "whole_version.txt").exists(), "nobody asked for files"
    assert runs.assert_same_run(folder, by_files)["step"] == STEPS
