"""The seam for faults: where the hook is called, and what each stage stands for."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rftdask.errors import StorageError
from rftdask.storage import open_storage
from rftdask.storage.local import LocalStorage
from rftdask.testing.storage_faults import FaultyStorage, PlaceCounter, SteppedPosix


def test_the_hook_sees_each_verb_before_and_after() -> None:
    calls: list[tuple[str, str, str]] = []
    store = FaultyStorage(open_storage("memory://faults-order"), lambda *call: calls.append(call))
    store.put("a", b"x")
    store.put_new("b", b"x")
    store.get("a")
    store.list("")
    store.exists("a")
    with store.local_copy("a"):
        calls.append(("body", "", ""))
    store.remove("a")
    verbs = ["put", "put_new", "get", "list", "exists", "local_copy", "remove"]
    assert [verb for verb, _, stage in calls if stage == "before"] == verbs
    assert [verb for verb, _, stage in calls if stage == "after"] == verbs
    assert calls[10:13] == [("local_copy", "a", "before"), ("body", "", ""), ("local_copy", "a", "after")]


@pytest.mark.parametrize(("fail_at", "kept"), [("before", []), ("after", ["a"])])
def test_raising_before_loses_the_write_and_after_the_reply(fail_at: str, kept: list[str]) -> None:
    def fail(verb: str, path: str, stage: str) -> None:
        if verb == "put_new" and stage == fail_at:
            raise StorageError(f"{verb} {path} failed")

    inner = open_storage(f"memory://faults-{fail_at}")
    with pytest.raises(StorageError, match="put_new a failed"):
        FaultyStorage(inner, fail).put_new("a", b"x")
    assert inner.list() == kept


def test_the_steps_of_a_local_write_are_its_system_calls(tmp_path: Path) -> None:
    calls: list[str] = []
    store = LocalStorage(tmp_path, SteppedPosix(lambda call, path: calls.append(call)))
    store.put("a", b"xy")
    assert calls == ["create", "write", "write the rest", "sync", "rename", "unlink", "sync folder"]
    calls.clear()
    assert store.put_new("b", b"xy") and not store.put_new("a", b"no")
    assert calls == 2 * ["create", "write", "write the rest", "sync", "link", "unlink", "sync folder"]
    calls.clear()
    store.remove("a")
    assert calls == ["rename", "sync folder", "remove tree"]
    assert (store.list(), store.get("b")) == (["b"], b"xy")


def test_a_fault_point_is_an_operation_a_path_and_a_count() -> None:
    acted: list[str] = []
    counter = PlaceCounter("/run", "before get b (2)", lambda: acted.append("here"))
    for verb, path in (("get", "a"), ("get", "b"), ("list", ""), ("get", "b"), ("get", "b")):
        counter.at_verb(verb, path, "before")
    counter.at_call("create", "/run/ledger/.tmp-17-0123456789abcdef")
    assert counter.places[3:] == ["before get b (2)", "before get b (3)", "before create ledger/.tmp-* (1)"]
    assert (acted, counter.has_acted) == (["here"], True)


def test_a_place_that_threads_pass_at_once_is_not_missed() -> None:
    acted: list[str] = []
    counter = PlaceCounter("", "before get a (500)", lambda: acted.append("here"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: counter.at_verb("get", "a", "before"), range(1000)))
    assert acted == ["here"] and len(set(counter.places)) == 1000
