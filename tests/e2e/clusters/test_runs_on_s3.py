"""Whole runs on s3://, on a service that fails for about one request in 25: errors 503 and 500, replies lost after the
work was done, replies too late for the client, slow listings. The service is a separate process that implements the
real protocol; nothing inside the storage code is replaced.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log import open_log
from rftdask.config import load_config
from rftdask.driver.experiment import Experiment
from rftdask.monitor.metrics import MACHINE
from rftdask.run.run_folder import read_run
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import CHECKPOINT_POINTER, WEIGHTS_POINTER, read_pointer
from tests.e2e.toy_runs import write_grpo_config
from tests.integration.run_cases import RunProcess, call_cli, final_weights, finish_alone, run_folder, write_config
from tests.unit.storage.s3_proxy import S3Process

STEPS = 6
OUTAGE_S = 3.0
"""Seconds of each kind of outage; all of them are shorter than the patience of storage."""
SETTINGS = (f"trainer.total_steps={STEPS}", "trainer.save_interval=3", "explorer.eval_interval=3")


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[S3Process]:
    """The service, whose address all processes of these tests find in the environment."""
    service = S3Process(every=25, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in service.env.items():
            patch.setenv(name, value)
        yield service
    service.close()
    print("played:", service.played)
    kinds = {kind for word, count in service.played.items() for kind in word.split()[1:] if count}
    assert kinds == {"refused", "lost", "dropped", "stalled", "slow"}, service.played


def on_s3(name: str) -> tuple[str, str]:
    """Return the override that puts a run on the service, and its URL."""
    return f"checkpoint_root_dir=s3://bucket/{name}", f"s3://bucket/{name}/rftdask/fake"


def assert_all_is_accounted_for(storage: Storage) -> int:
    """Assert that the audit reports no problem. Returns the number of waiting experiences."""
    config = load_config(read_run(storage)["config"])
    audit = audit_log(open_log(storage, config), Ledger(storage), config.tasks_per_unit)
    assert audit.problems == () and audit.committed == audit.trained + audit.waiting + sum(audit.dropped.values())
    return audit.waiting


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, s3: S3Process) -> str:
    """URL of a run that was killed halfway and finished by a second start."""
    place, url = on_s3("killed")
    config = write_config(tmp_path_factory.mktemp("killed"))
    storage = open_storage(url)
    with RunProcess("run", str(config), *SETTINGS, place, "--progress", "plain") as run:
        run.wait_until(lambda: len(s3.keys("killed/rftdask/fake/ledger/")) >= STEPS // 2)
        run.kill()
    assert Ledger(storage).last_step() < STEPS
    finish_alone(config, *SETTINGS, place)
    return url


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an undisturbed run on the local disk."""
    config = write_config(tmp_path_factory.mktemp("plain"))
    finish_alone(config, *SETTINGS)
    return run_folder(config)


def test_a_run_killed_on_s3_ends_with_the_weights_of_a_local_one(killed: str, plain: Path) -> None:
    storage = open_storage(killed)
    assert read_pointer(storage, CHECKPOINT_POINTER) == read_pointer(storage, WEIGHTS_POINTER) == STEPS
    assert storage.get(f"global_step_{STEPS}/actor/model.safetensors") == final_weights(plain)
    assert_all_is_accounted_for(storage)
    logs = [set(storage.list(f"log/{start.rstrip('/')}")) for start in storage.list("log")]
    assert {"driver.log", "engine.log", "trainer-rank-0.log"} in logs
    assert "report.html" in storage.list()


def test_a_run_on_s3_outlives_outages(s3: S3Process, plain: Path, tmp_path: Path) -> None:
    place, url = on_s3("outages")
    config = write_config(tmp_path)
    with RunProcess("run", str(config), *SETTINGS, place, "--progress", "plain") as run:
        run.wait_until(lambda: len(s3.keys("outages/rftdask/fake/ledger/")) >= STEPS // 2)
        try:
            for fault in ("throttled", "reset", "stalled"):
                s3.answer(fault)
                with suppress(subprocess.TimeoutExpired):
                    run.process.wait(OUTAGE_S)
        finally:
            s3.answer("pass")
        run.end(code=0)
    assert open_storage(url).get(f"global_step_{STEPS}/actor/model.safetensors") == final_weights(plain)
    assert_all_is_accounted_for(open_storage(url))


@pytest.mark.long
def test_expired_credentials_end_a_run_that_new_ones_continue(s3: S3Process, plain: Path, tmp_path: Path) -> None:
    place, url = on_s3("expired")
    config = write_config(tmp_path)
    with RunProcess("run", str(config), *SETTINGS, place, "--progress", "plain") as run:
        run.wait_until(lambda: len(s3.keys("expired/rftdask/fake/ledger/")) >= STEPS // 2)
        s3.answer("expired")
        try:
            ended = run.end(code=1)
            again = call_cli("run", str(config), *SETTINGS, place)
        finally:
            s3.answer("pass")
    *warnings, error = ended.err.splitlines()
    assert all("is not copied to the run yet" in warning for warning in warnings), ended
    assert error.startswith("error: ") and "check the network, the credentials" in error, ended
    assert "restarts" not in ended.out and "runs again" not in ended.out, ended
    assert again.code == 2 and again.err.count("\n") == 1 and "credentials" in again.err, again
    finish_alone(config, *SETTINGS, place)
    assert open_storage(url).get(f"global_step_{STEPS}/actor/model.safetensors") == final_weights(plain)
    assert_all_is_accounted_for(open_storage(url))


def test_readers_of_a_run_on_s3_see_the_same_as_on_a_disk(killed: str) -> None:
    ended = call_cli("status", killed, "--json")
    (status,) = json.loads(ended.out)["stages"]
    assert (status["step"], status["state"], status["problems"]) == (STEPS, "not running", [])
    query = "select count(*) as n from ledger where reason is null"
    ended = call_cli("experiences", killed, "--sql", query, "--json")
    assert json.loads(ended.out) == [{"n": STEPS * 8}], ended
    experiment = Experiment.open(killed)
    uid = experiment.experiences()["uid"][0]
    ended = call_cli("trace", killed, uid)
    assert ended.code == 0 and "trained" in ended.out, ended
    # Rows of machine usage exist only if the run was long enough for a heartbeat.
    assert set(experiment.metrics()["role"]) - {MACHINE} == {"trainer", "explorer", "eval"}
    assert call_cli("report", killed).code == 0


def test_two_commands_on_s3_explore_and_train_everything_once(tmp_path: Path) -> None:
    place, url = on_s3("apart")
    config = write_config(tmp_path)
    settings = ("buffer.total_steps=4", "trainer.total_steps=null", "synchronizer.sync_style=fully_async", place)
    settings = (*settings, "buffer.explorer_input.eval_tasksets=[]", "--progress", "plain")
    with (
        RunProcess("run", str(config), *settings, "mode=explore") as explorer,
        RunProcess("run", str(config), *settings, "mode=train") as trainer,
    ):
        explored, trained = explorer.end(), trainer.end()
    assert (explored.code, trained.code) == (0, 0), (explored, trained)
    assert assert_all_is_accounted_for(open_storage(url)) == 0
    assert Ledger(open_storage(url)).last_step() == 4


@pytest.mark.long
def test_real_engines_publish_load_and_checkpoint_on_s3(tmp_path: Path) -> None:
    config = write_grpo_config(tmp_path)
    place = "checkpoint_root_dir=s3://bucket/real"
    finish_alone(config, place, "trainer.total_steps=2", "trainer.save_interval=1")
    storage = open_storage("s3://bucket/real/rftdask/tiny")
    assert read_pointer(storage, CHECKPOINT_POINTER) == read_pointer(storage, WEIGHTS_POINTER) == 2
    assert {"config.json", "model.safetensors"} <= set(storage.list("global_step_2/actor/huggingface"))
    assert_all_is_accounted_for(storage)


@pytest.mark.long
def test_the_doctor_finds_nothing_broken_on_s3() -> None:
    ended = call_cli("doctor", "s3://bucket/doctor")
    assert ended.code == 0 and "nothing broken" in ended.out, ended
    assert re.search(r"create-only +ok", ended.out), ended.out
    assert open_storage("s3://bucket/doctor").list() == []
