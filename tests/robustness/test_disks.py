"""A disk that is full, read-only or owned by another user. The disks are real: small file systems in memory."""

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile import assert_mendable

import rftdask.driver.experiment
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience
from rftdask.config import load_config
from rftdask.errors import RoleError, StorageRefusedError
from rftdask.monitor.logs import setup_logging
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.child import Child
from rftdask.run.lease import Lease
from rftdask.run.run_folder import open_run
from rftdask.storage import open_storage
from rftdask.synchronizer.published import WEIGHTS_POINTER
from rftdask.trainer.model import load_policy
from tests.integration import run_cases as runs
from tests.integration.roles.test_served_runs import Served, serve
from tests.unit.trainer.trainer_cases import fill_log, make_trainer

FULL = "No space left on device; free some space and run the same command again to continue"
NOBODY = 65534


class Disk:
    """A file system mounted in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / ".tmp-filler"  # hidden, like an unfinished write

    def fill(self) -> None:
        with self.filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        self.filler.unlink()


@pytest.fixture
def make_disk() -> Iterator[Callable[..., Disk]]:
    """Mount a disk of the given KiB at a folder; it is unmounted after the test."""
    made: list[Path] = []

    def make(folder: Path, kib: int, *, full: bool = True) -> Disk:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this user may not mount a small disk, and only that is really full: {error}")
        made.append(folder)
        disk = Disk(folder)
        if full:
            disk.fill()
        return disk

    yield make
    for folder in reversed(made):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".tmp-")}


@pytest.mark.parametrize("place", ["ledger/main", "weights/3", "global_step_4", "global_step_4/actor", ""])
def test_a_trainer_reports_a_full_disk_and_resumes(place: str, make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    """The full disk holds the ledger, weights, checkpoint and its files, or the pointer, which is in the folder
    itself.
    """
    plain, run = open_storage(tmp_path / "plain"), open_storage(tmp_path / "run")
    fill_log(plain, 5)
    make_trainer(plain).run()
    disk = make_disk(Path(run.url), 4096, full=False)
    fill_log(run, 5)
    if place:
        disk = make_disk(Path(run.url, place), 1024)
    else:
        for name in ("ledger", "weights"):
            make_disk(Path(run.url, name), 1024, full=False)
        disk.fill()
    before = files_in(disk.folder)
    with pytest.raises(StorageRefusedError, match=FULL) as caught:
        make_trainer(run).run()
    assert f"{run.url}/{place.split('/')[0] or WEIGHTS_POINTER}" in str(caught.value)
    if place:
        assert files_in(disk.folder) == before == set(), "a file that did not fit has no name"
    assert all(Ledger(run).read(step) for step in range(1, Ledger(run).last_step() + 1))
    disk.free()
    make_trainer(run).run()
    for path in ("weights/5/model.safetensors", "global_step_5/actor/model.safetensors"):
        assert run.get(path) == plain.get(path)


def test_a_shard_and_metrics_that_do_not_fit_have_no_name(make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    shards, metrics = make_disk(tmp_path / "experiences", 256), make_disk(tmp_path / "metrics", 256)
    log = ParquetLog(storage)
    rows = [Experience("t", 0, 0, 0, 1, tokens=(1, 2), prompt_length=1, rollout_logprobs=(-1.0,), reward=1.0)]
    with pytest.raises(StorageRefusedError, match=f"put {tmp_path}/experiences/000000/.*{FULL}"):
        log.commit(rows, explore_step=1, unit=0)
    writer = MetricsWriter(storage, "trainer")
    with pytest.raises(StorageRefusedError, match=f"put_new {tmp_path}/metrics/trainer/.*{FULL}"):
        writer.write(1, {"loss": 0.5})
        writer.flush()
    assert log.shards() == []
    shards.free()
    metrics.free()
    name = log.commit(rows, explore_step=1, unit=0)
    assert log.shards() == [name]
    writer.close()
    assert "0.5" in next(tmp_path.glob("metrics/trainer/*.jsonl")).read_text()


def test_logs_that_do_not_fit_end_nothing_and_fill_no_terminal(
    make_disk: Callable[..., Disk], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = make_disk(tmp_path / "log", 4)
    try:
        setup_logging("driver", folder=disk.folder)
        logging.getLogger("rftdask.test").warning("a thing to know")
    finally:
        setup_logging("driver")
    assert capsys.readouterr().err == "WARNING driver: a thing to know\n"


def test_an_error_arrives_even_if_its_log_does_not_fit(make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    disk = make_disk(tmp_path / "log", 4)
    log = disk.folder / "refused.log"
    child = Child("tests.unit.processes.child_targets:fail", {"kind": "other"}, name="refused", log_file=log)
    try:
        with pytest.raises(RoleError, match=f"No space left on device .log: {disk.folder}/refused.log"):
            child.receive(60)
    finally:
        child.close()


def test_a_lease_on_a_full_disk_ends_with_its_process(make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    disk = make_disk(tmp_path / "run", 64, full=False)
    lease = Lease(open_storage(disk.folder), "trainer")
    disk.fill()
    lease.release()


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_one_line_and_resumes(make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    settings = ("explorer.eval_interval=100",)
    plain, config = runs.write_config(tmp_path / "plain"), runs.write_config(tmp_path / "full")
    runs.finish(plain, *settings)
    disk, folder = make_disk(tmp_path / "full" / "runs", 90 << 10, full=False), runs.run_folder(config)
    with runs.RunProcess("run", str(config), *settings, "--progress", "plain") as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 3)
        disk.fill()
        ended = run.end(code=1)
    assert ended.err.startswith("error: put") and ended.err.count("\n") == 1, ended
    assert str(folder) in ended.err and FULL in ended.err, ended
    assert "restarts" not in ended.out and "runs again" not in ended.out, "no try could have helped"
    again = runs.call_cli("run", str(config), *settings)
    # Either the first write does not fit, or the files that the run removed last freed space for it but not for
    # weights.
    assert again.code == 2 and again.err.count("\n") == 1 and "free some space" in again.err, again
    disk.free()
    runs.finish(config, *settings)
    runs.assert_sound(folder)
    assert runs.final_weights(folder) == runs.final_weights(runs.run_folder(plain))


@pytest.mark.slow
def test_a_run_whose_disk_becomes_read_only_ends_and_resumes(make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    """As a file system does that has found an error in itself."""
    plain, config = runs.write_config(tmp_path / "plain"), runs.write_config(tmp_path)
    settings = ("trainer.total_steps=40", "synchronizer.sync_style=fixed")
    runs.finish(plain, *settings)
    folder = runs.run_folder(config)
    disk = make_disk(tmp_path / "runs", 90 << 10, full=False)
    make_disk(folder / "log", 1 << 10, full=False)  # a file that is open for writing prevents the change

    def becomes_read_only() -> bool:
        return not subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], capture_output=True).returncode

    with runs.RunProcess("run", str(config), *settings, "--progress", "plain") as run:
        run.wait_until(lambda: runs.num_steps(folder) > 5)
        run.wait_until(becomes_read_only)
        ended = run.end(code=1)
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1 and READ_ONLY in ended.err, ended
    again = runs.call_cli("run", str(config), *settings)
    assert again.code == 2 and READ_ONLY in again.err, again
    subprocess.run(["mount", "-o", "remount,rw", str(disk.folder)], check=True)
    runs.finish(config, *settings)
    runs.assert_sound(folder)
    assert runs.final_weights(folder) == runs.final_weights(runs.run_folder(plain))


@pytest.mark.slow
def test_a_server_on_a_full_disk_keeps_its_sessions(make_disk: Callable[..., Disk], tmp_path: Path) -> None:
    config = runs.write_config(tmp_path)
    disk, folder = make_disk(tmp_path / "runs", 8 << 10, full=False), runs.run_folder(config)
    with serve(config) as run:
        served = Served(run)
        for session in ("first", "second", "third"):
            served.ask(session, "a task")
        assert served.post("/feedback", session_id="first", task_id="a", reward=1.0)[0] == 200
        disk.fill()
        status, reply = served.post("/feedback", session_id="second", task_id="a", reward=2.0)
        assert status == 503 and FULL in reply["error"]["message"], reply
        assert run.process.poll() is None, "only a group that cannot be committed ends it"
        disk.free()
        assert served.post("/feedback", session_id="second", task_id="a", reward=2.0)[0] == 200
        run.wait_until(lambda: runs.num_shards(folder) == 1)
        assert served.post("/feedback", session_id="third", task_id="b", reward=3.0)[0] == 200
        disk.fill()
        status, reply = served.post("/commit")
        assert status == 503 and FULL in reply["error"]["message"], reply
        ended = run.end(code=1)
    assert ended.err.count("error: ") == 1 and FULL in ended.err, ended
    disk.free()
    with serve(config) as run:
        served = Served(run)
        assert served.post("/commit")[0] == 200
        run.process.terminate()
        assert run.process.wait(60) == 0
    log = ParquetLog(open_storage(folder))
    rewards = [sorted(row["reward"] for row in log.read(name).to_pylist()) for name in log.shards()]
    assert sorted(rewards) == [[1.0, 2.0], [3.0]]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user of this machine may enter, with the configuration of a run and a folder for runs."""
    folder = Path(tempfile.mkdtemp(prefix="rftdask-test-"))
    runs.write_config(folder)
    (folder / "runs").mkdir()
    folder.chmod(0o755)
    (folder / "runs").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def call_as_another(*arguments: str) -> runs.Ended:
    """Run `rftdask` as a user that owns none of the files: nobody if tests run as root, otherwise the current user."""
    if os.geteuid() != 0:
        return runs.call_cli(*arguments)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        return runs.call_cli(*arguments)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def lock(path: Path, mode: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.mkdir() if not path.suffix else path.write_text("{}")
    path.chmod(mode)


LOCKED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "the configuration": ("config.yaml", 0, ("config.yaml", "Permission denied")),
    "the tasks": ("tasks.jsonl", 0, ("tasks.jsonl", "Permission denied")),
    "the tasks of evaluations": ("held_out.jsonl", 0, ("held_out.jsonl", "Permission denied")),
    "the folder of runs": ("runs", 0o555, ("checkpoint_root_dir: cannot write to", "check the owner and the mode")),
    "the run folder": ("runs/rftdask/fake", 0o555, ("checkpoint_root_dir: cannot write to", "check the owner")),
    "the run folder, closed": ("runs/rftdask/fake", 0, ("checkpoint_root_dir: cannot write to", "check the owner")),
    "the model folder": ("model", 0, ("model.model_path", "Permission denied")),
    "the weights": ("model/model.safetensors", 0, ("model.model_path", "Permission denied")),
    "the tokenizer": ("model/tokenizer.json", 0, ("model.model_path", "Permission denied")),
    "the model's settings": ("model/config.json", 0, ("model.model_path", "Permission denied")),
    "the folder of plug-ins": ("plugins", 0, ("plugin_dirs", "may not be read")),
    "a plug-in": ("plugins/mine.py", 0, ("mine.py", "Permission denied")),
}


@pytest.mark.parametrize(("place", "mode", "words"), LOCKED.values(), ids=LOCKED.keys())
def test_files_without_permission_are_reported_at_the_start(
    place: str, mode: int, words: tuple[str, ...], shared: Path, toy_model: Path
) -> None:
    settings = []
    if place.startswith("model"):
        shutil.copytree(toy_model, shared / "model")
        for file in (shared / "model").iterdir():
            file.chmod(0o644)
        settings = [f"model.model_path={shared}/model", "trainer.trainer_type=torch"]
        settings += ["explorer.rollout_model.engine_type=transformers"]
    if place.startswith("plugins"):
        settings = [f"explorer.plugin_dirs=[{shared}/plugins]"]
    sound = runs.call_cli(
        "validate", str(shared / "config.yaml"), *settings, "--data"
    )  # imports that only root can read
    assert rftdask.driver.experiment and sound.code == (2 if place.startswith("plugins") else 0), sound
    shutil.rmtree(shared / "runs" / "rftdask")
    lock(shared / place, mode)
    assert_mendable(call_as_another("run", str(shared / "config.yaml"), *settings), *words)
    assert runs.num_shards(runs.run_folder(shared / "config.yaml")) == 0


READ_ONLY = "Read-only file system; the file system is read-only: mount it writable or choose another folder"


def test_a_read_only_run_is_read_and_not_continued(config: Path, folder: Path, make_disk: Callable[..., Disk]) -> None:
    disk = make_disk(folder, 4096, full=False)
    storage = open_storage(folder)
    open_run(storage, load_config(config))
    fill_log(storage, 3)
    make_trainer(storage).run()
    subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
    for command in ("status", "experiences"):
        ended = runs.call_cli(command, str(folder))
        assert (ended.code, ended.err) == (0, ""), ended
    for command in (
        ("run", str(config)),
        ("report", str(folder)),
        ("skip", str(folder), "3", "--because", "no reason"),
    ):
        ended = runs.call_cli(*command)
        assert ended.code == (2 if command[0] == "run" else 1), ended
        assert ended.err.startswith("error: ") and ended.err.count("\n") == 1 and READ_ONLY in ended.err, ended


def test_read_only_models_and_tasks_do(make_disk: Callable[..., Disk], toy_model: Path, tmp_path: Path) -> None:
    data = make_disk(tmp_path / "data", 16 << 10, full=False).folder
    config = runs.write_config(data)
    shutil.copytree(toy_model, data / "model")
    subprocess.run(["mount", "-o", "remount,ro", str(data)], check=True)
    settings = (f"checkpoint_root_dir={tmp_path}/runs", f"model.model_path={data}/model")
    real = ("trainer.trainer_type=torch", "explorer.rollout_model.engine_type=transformers")
    ended = runs.call_cli("validate", str(config), *settings, *real, "--data")
    assert ended.code == 0, ended
    load_policy(f"{data}/model", "float32", "cpu", trust_remote_code=False, offline=True)
