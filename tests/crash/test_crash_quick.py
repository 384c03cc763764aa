"""A small sample of the crash test, for every change: nothing is lost or trained twice, and the bits stay the same."""

import time
from pathlib import Path

import pytest
from crash_cases import part, run_crash_test

from rftdask.errors import UserError
from rftdask.storage import Storage
from rftdask.storage.local import LocalStorage
from rftdask.storage.memory import MemoryStorage
from rftdask.testing.crashtest.damage import damage_files
from rftdask.testing.crashtest.ending import check_ending, new_memory
from rftdask.testing.crashtest.figures import CrashReport, Figures, ProtectionFigures
from rftdask.testing.crashtest.kills import list_places
from rftdask.testing.crashtest.power import SimulatedDisk, lose_power
from rftdask.testing.crashtest.rivals import meet_rivals
from rftdask.testing.crashtest.suite import CheckThenWrite, LateLedger, TrustingLog
from rftdask.testing.crashtest.suite import run_crash_test as run
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all


def test_a_process_killed_at_a_storage_operation_loses_nothing(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "stops", "--every", "120")
    figures = part(report, "stops")
    assert (code, report["failures"]) == (0, [])
    assert figures["num_kills"] == figures["num_tried"] >= 4
    assert (figures["num_lost"], figures["num_twice"]) == (0, 0)
    assert figures["num_trained_again"] > 0


def test_a_run_reaches_its_last_place_before_a_kill_there(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "stops", "--seed", "11", "--every", "100000")
    figures = part(report, "stops")
    assert (code, report["failures"]) == (0, [])
    assert figures["num_kills"] == figures["num_tried"] == 2, "the first place and the last"


def test_runs_of_one_seed_pass_the_same_places_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    folders = (tmp_path / "there", tmp_path / "not" / "yet", tmp_path / "another")
    first, *others = (sorted(list_places(folder, Plan(), seed=11)) for folder in folders)
    assert others == [first, first]
    assert len(set(first)) == len(first) > 500
    assert any(place.startswith("after put global_step_4/MANIFEST.json") for place in first)


def test_a_slow_machine_passes_the_same_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted(list_places(tmp_path / "fast", Plan(6), seed=18536))
    fast = LocalStorage.list

    def slow(self: LocalStorage, folder: str = "") -> list[str]:
        time.sleep(0.01)
        return fast(self, folder)

    monkeypatch.setattr(LocalStorage, "list", slow)
    assert sorted(list_places(tmp_path / "slow", Plan(6), seed=18536)) == expected


@pytest.mark.parametrize("ordered", [True, False])
def test_a_power_loss_loses_nothing(ordered: bool) -> None:
    figures = lose_power(Plan(ordered=ordered), range(1), every=60)
    assert figures.problems == []
    assert figures.num_tried >= 4 and figures.num_trained_again > 0


@pytest.mark.parametrize("where", ["before put_new ledger/.*", "before put latest_.*", "before put weights/.*"])
def test_an_overtaken_trainer_repeats_no_row_and_no_pointer_move(where: str) -> None:
    figures = meet_rivals(Plan(ordered=False), range(1), where=where, every=2)
    assert figures.problems == []
    assert figures.num_tried >= 2


def test_damaged_files_are_healed_or_named() -> None:
    figures = damage_files(Plan(6), 0, every=31)
    assert figures.problems == []
    assert figures.num_tried >= 15


def finished(plan: Plan) -> tuple[MemoryStorage, Witness]:
    storage, witness = new_memory(), Witness()
    run_all(lambda: storage, plan, Parts(), witness, seed=0)
    return storage, witness


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan()


def test_a_sound_run_has_no_problem(plan: Plan) -> None:
    storage, witness = finished(plan)
    ending = check_ending(storage, plan, witness)
    assert (ending.problems, ending.num_lost, ending.num_twice) == ([], 0, 0)


@pytest.mark.parametrize(
    ("path", "data", "problem"),
    [
        ("latest_state_dict_iteration.txt", b"3\n", "latest_state_dict_iteration.txt says 3, not 4"),
        ("weights/4/model.safetensors", b"x", "weights/4 is not valid"),
        ("ledger/main/00000002.json", b"{}", "DamagedError: ledger/main/00000002.json is damaged"),
    ],
)
def test_an_unsound_end_is_reported(plan: Plan, path: str, data: bytes, problem: str) -> None:
    storage, witness = finished(plan)
    storage.put(path, data)
    ending = check_ending(storage, plan, witness)
    assert problem in "\n".join(ending.problems)


def test_a_lost_entry_of_the_ledger_is_counted_in_experiences(plan: Plan) -> None:
    storage, witness = finished(plan)
    storage.remove("ledger/main/00000004.json")
    ending = check_ending(storage, plan, witness)
    assert ending.num_lost == plan.groups_per_batch * plan.repeat_times


def test_an_acknowledged_shard_that_is_gone_is_counted(plan: Plan) -> None:
    storage, witness = finished(plan)
    storage.remove(witness.shards_acknowledged()[0])
    ending = check_ending(storage, plan, witness)
    assert ending.num_lost == plan.tasks_per_unit * plan.repeat_times


def test_a_step_trained_with_two_batches_is_reported(plan: Plan) -> None:
    storage, witness = finished(plan)
    witness.trained(2, "another")
    ending = check_ending(storage, plan, witness)
    assert "step 2 was trained with two different batches" in ending.problems


@pytest.mark.parametrize(
    ("storage", "parts"),
    [
        (LocalStorage("/run", SimulatedDisk(sync_files=False)), Parts()),
        (LocalStorage("/run", SimulatedDisk(sync_folders=False)), Parts()),
        (CheckThenWrite(new_memory(), lambda verb, path, stage: None), Parts()),
        (new_memory(), Parts(log=TrustingLog)),
        (new_memory(), Parts(ledger=LateLedger)),
    ],
    ids=["fsync of files", "fsync of folders", "create-only", "checksums", "ledger first"],
)
def test_removing_a_protection_changes_no_undisturbed_run(storage: Storage, parts: Parts) -> None:
    plan, witness = Plan(6), Witness()
    run_all(lambda: storage, plan, parts, witness, seed=0)
    assert check_ending(storage, plan, witness).problems == []


def test_a_test_that_detects_no_missing_protection_fails() -> None:
    report = CrashReport(0, [Figures("power", "", num_tried=1)], [ProtectionFigures("fsync of files", 3, 0, "")])
    assert report.failures == ["without fsync of files nothing broke in 3 tries: this test proves nothing of it"]
    assert "BROKEN: 1" in report.render()


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match=r"\['unplug'\] do not exist; they are stops, kills, power"):
        run(None, ("unplug",))


def test_a_storage_that_processes_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match="memory://x: the crash test kills processes that share a file system"):
        run("memory://x")
