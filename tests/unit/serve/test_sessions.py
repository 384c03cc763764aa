"""Promises of the session store: a session for which `put` has returned is in the log once, in the group of its task,
wherever a process dies; groups have consecutive positions; a stored row is read back unchanged.
"""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rftdask.buffer.log import open_log
from rftdask.buffer.log.schema import Experience, Turn
from rftdask.buffer.log.shard import done_units
from rftdask.config import load_config
from rftdask.errors import StorageRefusedError
from rftdask.serve.sessions import RewardedSession, SessionStore
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import dump_checked, load_checked
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.config.config_cases import grpo

_numbers = itertools.count()
CONFIG = load_config(
    grpo(
        algorithm={"algorithm_type": "grpo", "repeat_times": 2},
        buffer={"batch_size": 3, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        explorer={"tasks_per_batch": 2},
    )
)


class Killed(BaseException):
    """Simulated end of the process."""


def dying(storage: Storage, num_writes: int) -> Storage:
    """A storage whose process dies after this number of writes."""
    left = itertools.count(num_writes, -1)

    def die(verb: str, path: str, stage: str) -> None:
        if verb in ("put", "put_new", "remove") and stage == "before" and next(left) <= 0:
            raise Killed

    return FaultyStorage(storage, die)


def session(number: int, task: str) -> RewardedSession:
    """A session of two turns, identified by its first token."""
    row = Experience(
        taskset="",
        epoch=0,
        task_index=0,
        rollout=0,
        explore_step=0,
        tokens=np.array([number, 2, 3, 4, 5], np.int32),
        prompt_length=2,
        rollout_logprobs=np.array([-0.1, 0.0, -1 / 3], np.float32),
        loss_mask=np.array([True, False, True]),
        reward=number / 7,
        min_policy_version=1,
        max_policy_version=2,
        turns=(Turn(0, 0, 1, 0, 1, "user", 7, 1, 1), Turn(1, 2, 3, 2, 3, "tool", 8, 2, 2)),
        metrics={"num_prompt_tokens": 2.0},
        version_starts=((0, 1), (2, 2)),
        session=f"s{number}",
    )
    return RewardedSession(f"s{number}", task, number / 7, (row, replace(row, turn=1)))


def bank_of(storage: Any, **options: Any) -> SessionStore:
    return SessionStore(storage, open_log(storage, CONFIG), CONFIG, **{"group_age_s": 1e9, **options})


def committed(storage: Any) -> dict[tuple[int, int], list[int]]:
    """(task index, rollout) -> first tokens of its rows."""
    log = open_log(storage, CONFIG)
    stored: dict[tuple[int, int], list[int]] = {}
    for name in log.shards():
        for row in log.read(name).to_pylist():
            stored.setdefault((row["task_index"], row["rollout"]), []).append(row["tokens"][0])
    return stored


def test_sessions_of_a_task_are_a_group() -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    bank = bank_of(storage)
    for number, task in enumerate(["a", "b", "", "a", "b", "a"]):
        bank.put(session(number, task))
        bank.commit_groups()
    assert committed(storage) == {(0, 0): [2, 2], (1, 0): [0, 0], (1, 1): [3, 3], (2, 0): [1, 1], (2, 1): [4, 4]}
    assert (bank.num_groups, bank.num_waiting, bank.num_whole_steps) == (3, 1, 1)
    # A step has three positions, two of them in its first work unit.
    assert done_units(open_log(storage, CONFIG).shards()) == {(1, 0), (1, 1)}


def test_stored_row_is_read_back_unchanged() -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    bank, new_sessions = bank_of(storage), session(5, "")
    bank.put(new_sessions)
    bank_of(storage).commit_groups()  # as another process
    log = open_log(storage, CONFIG)
    [name] = log.shards()
    first, second = log.read(name).to_pylist()
    assert first["rollout_logprobs"] == np.array([-0.1, 0.0, -1 / 3], np.float32).tolist()
    assert (first["loss_mask_runs"], first["reward"]) == ([1, 1, 1], float(np.float32(5 / 7)))
    assert [turn["source"] for turn in first["turns"]] == ["user", "tool"]
    assert [list(start.values()) for start in first["version_starts"]] == [[0, 1], [2, 2]]
    assert (first["session"], second["session"]) == ("s5", "s5")
    assert (first["uid"], second["uid"]) == ("served/0/0/0/0", "served/0/0/0/1")
    assert (name.min_policy_version, name.max_policy_version) == (1, 2)


def test_old_group_is_committed_incomplete() -> None:
    storage, now = open_storage(f"memory://bank-{next(_numbers)}"), [0.0]
    bank = bank_of(storage, group_age_s=10, clock=lambda: now[0])
    bank.put(session(0, "a"))
    assert bank.commit_groups() == 0
    now[0] = 11.0
    assert bank.commit_groups() == 1 and committed(storage) == {(0, 0): [0, 0]}


def test_session_has_one_reward() -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    bank = bank_of(storage)
    assert bank.find("s3") is None
    bank.put(session(3, "a"))
    with pytest.raises(ValueError, match="s3 already has its reward"):
        bank.put(session(3, "a"))
    for _ in range(2):  # while it waits, and when it is in the log
        stored = bank_of(storage).find("s3")
        assert stored is not None and (stored["task"], stored["reward"]) == ("a", 3 / 7)
        bank.put(session(4, "a")) if bank.num_waiting == 1 else None
        bank.commit_groups()
    with pytest.raises(ValueError, match="s3 already has its reward"):
        bank.put(session(3, "a"))


@pytest.mark.parametrize("left", range(25))
def test_each_session_is_in_the_log_once_after_any_crash(left: int) -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    new_sessions = [session(number, task) for number, task in enumerate(["a", "b", "a", "b", ""])]
    acknowledged = 0
    try:
        bank = bank_of(dying(storage, left))
        for each in new_sessions:
            bank.put(each)
            acknowledged += 1
            bank.commit_groups()
        assert left == 24, "only the last case dies nowhere"
    except Killed:
        pass
    bank = bank_of(storage)
    # A client without a reply checks whether the reward was stored, and otherwise repeats it.
    for number, each in enumerate(new_sessions):
        if bank.find(each.id) is None:
            assert number >= acknowledged, "what was acknowledged is lost"
            bank.put(each)
    bank.commit_groups()
    groups: dict[int, list[int]] = {}
    for (index, _), tokens in sorted(committed(storage).items()):
        assert len(tokens) == 2 and len(set(tokens)) == 1, "a session is there once, whole"
        groups.setdefault(index, []).append(tokens[0])
    assert sorted(map(sorted, groups.values())) == [[0, 2], [1, 3], [4]]
    assert bank.num_waiting == 0 and not storage.list("serve/groups") and not storage.list("serve/sessions")


def test_store_commits_nothing_after_a_failed_group() -> None:
    storage, is_full = open_storage(f"memory://bank-{next(_numbers)}"), False

    def refuse(verb: str, path: str, stage: str) -> None:
        if is_full and path.startswith("serve/groups"):
            raise StorageRefusedError("No space left on device")

    bank = bank_of(FaultyStorage(storage, refuse))
    bank.put(session(1, "a"))
    is_full = True
    with pytest.raises(StorageRefusedError):
        bank.commit_groups(include_incomplete=True)
    is_full = False
    bank.put(session(2, ""))
    for _ in range(2):  # a group behind an empty position would never be part of a whole step
        with pytest.raises(StorageRefusedError, match="No space left"):
            bank.commit_groups()
    assert committed(storage) == {}
    bank = bank_of(storage)
    assert bank.commit_groups(include_incomplete=True) == bank.num_groups == 2
    assert committed(storage) == {(0, 0): [1, 1], (1, 0): [2, 2]}


def test_unreadable_session_is_quarantined_and_others_go_on() -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    bank = bank_of(storage)
    bank.put(session(0, "a"))
    bank.put(session(1, "a"))
    bank.put(session(2, "b"))
    bank.put(session(3, "c"))
    # Invalid rows of an earlier version, a changed byte, and a file cut short.
    wrong = dict(load_checked(storage.get("serve/sessions/s0.json")))
    wrong["rows"][0]["metrics"] = {"steps": "many"}
    storage.put("serve/sessions/s0.json", dump_checked(wrong))
    assert bank.commit_groups() == 1 and committed(storage) == {(0, 1): [1, 1]}
    whole = storage.get("serve/sessions/s2.json")
    changed = whole.replace(b'"tokens": [2', b'"tokens": [3')
    assert changed != whole
    storage.put("serve/sessions/s2.json", changed)
    storage.put("serve/sessions/s3.json", storage.get("serve/sessions/s3.json")[:-9])
    for _ in range(2):
        bank = bank_of(storage)
        assert bank.num_waiting == 0
    assert sorted(storage.list("serve/quarantine")) == [
        f"s{number}{suffix}" for number in (0, 2, 3) for suffix in (".json", ".reason.json")
    ]
    reason = json.loads(storage.get("serve/quarantine/s0.reason.json"))["reason"]
    assert "many" in reason and not storage.list("serve/sessions")
    kept = bank.find("s0")
    assert kept is not None and kept["reward"] == 0.0, "a repeated reward gets the same answer"


def test_session_with_invalid_rows_is_not_stored() -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    bank = bank_of(storage)
    [row, _] = session(0, "a").rows
    with pytest.raises(ValueError, match="loss_mask of 2"):
        bank.put(RewardedSession("s0", "a", 0.0, (replace(row, loss_mask=np.array([True, False])),)))
    assert not storage.list("serve/sessions")


def test_text_invalid_in_utf8_does_not_stop_the_server() -> None:
    storage = open_storage(f"memory://bank-{next(_numbers)}")
    [row, _] = session(0, "").rows
    stored = RewardedSession("s0", "", 0.0, (replace(row, metrics={"a\ud800": 1.0}, prompt_text="\udfff"),))
    bank_of(storage).put(stored)
    assert bank_of(storage).commit_groups() == 1
    log = open_log(storage, CONFIG)
    [found] = log.read(log.shards()[0]).to_pylist()
    assert (dict(found["metrics"]), found["prompt_text"]) == ({r"a\ud800": 1.0}, r"\udfff")
