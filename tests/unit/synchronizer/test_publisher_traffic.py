"""Cost of versions on remote storage: a delta takes a few percent of the bytes of a complete version, in about as many
calls, for the publishing trainer and for a serving machine. Counted by a proxy in front of an S3 service and, for a
shared folder such as NFS, at the system calls, each of which the server sees.
"""

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from benchmarks import weight_arithmetic
from rftdask.storage import Storage, open_storage
from rftdask.storage.local import LocalStorage, Posix
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import read_published
from rftdask.synchronizer.publisher import Publisher
from tests.unit.storage.s3_proxy import FaultyS3

NUM_VALUES = 1_000_000
NUM_CHANGED = NUM_VALUES // 100
"""Share of bfloat16 values that a step changes at a learning rate of 1e-6 (docs/weights.md)."""


@pytest.fixture
def storage(s3_url: str, faults: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = open_storage(s3_url)
    opened.put("warm", b"an open connection, which clients like to use again")
    return opened


class CountingPosix(Posix):
    """Counter of system calls and their bytes. Reads through a mapping are not counted: verified pages are cached."""

    def __init__(self) -> None:
        self.num_calls = self.num_bytes = 0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not callable(value) or name.startswith("_"):
            return value

        def counted(*args: Any) -> Any:
            found = value(*args)
            self.num_calls += 1
            self.num_bytes += sum(
                len(each) for each in (*args, found) if isinstance(each, bytes | bytearray | memoryview)
            )
            return found

        return counted


def costs(storage: Storage, counter: Any) -> dict[str, list[tuple[int, int]]]:
    """Kind of publication -> (calls, bytes) of the trainer and of a machine."""
    random = np.random.default_rng(0)
    words = random.integers(0, 2**16, NUM_VALUES, dtype=np.uint16)
    publisher = Publisher(storage, "main", full_publish_interval=10)
    cost: dict[str, list[tuple[int, int]]] = {}
    copies: list[NodeCache] = []
    for version, kind in ((1, "whole"), (2, "delta"), (3, "delta")):
        words[random.choice(NUM_VALUES, NUM_CHANGED, replace=False)] ^= 1
        data = bytearray(save({"weight": words}))
        counter.num_calls = counter.num_bytes = 0
        publisher.publish(version, {"model.safetensors": data})
        published = (counter.num_calls, counter.num_bytes)
        counter.num_calls = counter.num_bytes = 0
        found = read_published(storage, version)
        assert found is not None
        copies.append(NodeCache(storage, found, 5.0))  # the previous version is still served here
        assert copies[-1].files[0].read_bytes() == bytes(data)
        cost[kind] = [published, (counter.num_calls, counter.num_bytes)]
    for copy in copies:
        copy.close()
    print("(calls, bytes) of the trainer and of a machine:", cost)
    return cost


def test_a_delta_on_s3_costs_few_bytes_and_requests(storage: Storage, faults: FaultyS3) -> None:
    cost = costs(storage, faults)
    for (whole_calls, whole_bytes), (calls, num_bytes) in zip(cost["whole"], cost["delta"], strict=True):
        assert num_bytes < 0.05 * whole_bytes
        assert calls <= whole_calls + 2  # reading a delta includes the manifest of its base


def test_a_delta_in_a_shared_folder_costs_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))
    posix = CountingPosix()
    cost = costs(LocalStorage(tmp_path / "shared", posix), posix)
    for (whole_calls, whole_bytes), (calls, num_bytes) in zip(cost["whole"], cost["delta"], strict=True):
        assert whole_bytes > 2 * NUM_VALUES and num_bytes < 0.05 * whole_bytes
        assert calls <= 2 * whole_calls, (calls, whole_calls)  # a second file, with its own name and sync


PAGE = Path(__file__).parents[3] / "docs" / "weights.md"


def test_the_table_on_the_page_matches_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    weight_arithmetic.print_table()
    assert capsys.readouterr().out in PAGE.read_text(), "python benchmarks/weight_arithmetic.py"


@pytest.mark.parametrize("rate", [field.name for field in fields(weight_arithmetic.Rates)])
def test_a_higher_rate_is_not_slower(rate: str) -> None:
    rates = weight_arithmetic.RATES
    faster = replace(rates, **{rate: 2 * getattr(rates, rate)})
    changed = []
    for num_gpus in weight_arithmetic.NUM_GPUS:
        for way, share in weight_arithmetic.WAYS:
            method = way.partition(",")[0]
            before = weight_arithmetic.costs(70, num_gpus, method, share, rates).served_s
            after = weight_arithmetic.costs(70, num_gpus, method, share, faster).served_s
            assert after <= before
            changed.append(after < before)
    assert any(changed), "the rate is used"
