"""Network faults of S3: replies lost after the work was done, conflicts, overload, refusals. A local proxy injects the
faults in front of the moto server; nothing inside the storage is replaced.
"""

import pytest

from rftdask.errors import NotFoundError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.storage.fsspec_store import FsspecStorage
from tests.unit.storage.s3_proxy import FaultyS3


@pytest.fixture
def store(s3_url: str, faults: FaultyS3) -> Storage:
    store = open_storage(s3_url)
    store.put("warm", b"an open connection, which clients like to use again")
    faults.num_puts = 0
    return store


@pytest.mark.parametrize("fault", ["lost", "dropped"])
def test_a_lost_reply_is_not_a_lost_race(store: Storage, faults: FaultyS3, fault: str) -> None:
    faults.script = [fault]
    assert store.put_new("ledger/4.json", b"mine") is True
    assert store.get("ledger/4.json") == b"mine" and faults.num_puts == 2


def test_a_rival_with_the_same_bytes_has_won(store: Storage, faults: FaultyS3) -> None:
    faults.script = ["rival"]
    assert store.put_new("ledger/4.json", b"the same batch") is False
    assert faults.num_puts == 2


def test_a_conflict_is_tried_again(store: Storage, faults: FaultyS3) -> None:
    faults.script = ["conflict", "conflict"]
    assert store.put_new("ledger/4.json", b"mine") is True
    assert faults.num_puts == 3
    faults.script = ["conflict"]
    assert store.put_new("ledger/4.json", b"other") is False


def test_put_is_tried_again_under_overload(store: Storage, faults: FaultyS3) -> None:
    faults.script = ["refused", "lost", "refused"]
    store.put("pointer", b"3")
    assert store.get("pointer") == b"3" and faults.num_puts == 4


def test_retries_end_after_a_minute_and_the_error_counts_them(
    store: Storage, faults: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    pauses_s: list[float] = []
    hurried = FsspecStorage(store.url, sleep=pauses_s.append)
    faults.script = ["refused"] * 30
    with pytest.raises(StorageError, match=r"put_new .*ledger/4.json failed \(tries: 17\).*check the network"):
        hurried.put_new("ledger/4.json", b"mine")
    assert "ledger/4.json fails" in caplog.text and "retrying for a minute" in caplog.text
    assert 50 < sum(pauses_s) < 60 and pauses_s[0] < 0.3 and max(pauses_s) < 6
    faults.script = []
    assert faults.num_puts == 17 and store.list() == ["warm"]


def test_a_refusal_is_not_tried_again(store: Storage, faults: FaultyS3) -> None:
    faults.script = ["forbidden"]
    with pytest.raises(StorageError, match=r"\(tries: 1\).*permissions on the bucket"):
        store.put("pointer", b"3")
    assert faults.num_puts == 1


def test_a_missing_bucket_raises(s3_endpoint: str) -> None:
    store = open_storage("s3://no-such-bucket/runs")
    with pytest.raises(StorageError, match="check that the bucket exists"):
        store.put("a", b"x")
    with pytest.raises(NotFoundError):
        store.get("a")


def test_an_unreachable_service_is_a_storage_error(monkeypatch: pytest.MonkeyPatch, s3_endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the discard port, which is closed
    with pytest.raises(StorageError, match=r"\(tries: 17\)"):
        FsspecStorage("s3://bucket/runs", sleep=lambda seconds: None).get("a")
