"""Audit of a log with damaged shards: trained rows stay trained, and nothing counts twice."""

import pytest

from rftdask.buffer.batches.audit import Audit, audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from tests.unit.buffer.buffer_cases import audit, commit_batch, make_source, new_storage, take


def test_trained_rows_of_a_quarantined_shard_stay_trained() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    name = commit_batch(log, 1, 0)
    source = make_source(storage, groups_per_batch=1)
    assert take(source, [1]) == [("t/0/0/0/0", "t/0/0/1/0")]
    state = source.state_dict()
    storage.put(log.path(name), b"rotten")
    assert audit(storage) == Audit(committed=4, trained=2, waiting=2), "nobody has looked yet"

    log.quarantine(name, "rotten")
    assert audit(storage) == Audit(committed=4, trained=2, waiting=0, dropped={"damaged": 2})
    commit_batch(ParquetLog(storage), 1, 0)
    assert audit(storage) == Audit(committed=8, trained=2, waiting=2, dropped={"damaged": 2, "repeat": 2})

    resumed = make_source(storage, groups_per_batch=1)
    resumed.load_state_dict(state)
    assert take(resumed, [2]) == [("t/0/1/0/0", "t/0/1/1/0")]
    assert audit(storage) == Audit(committed=8, trained=4, waiting=0, dropped={"damaged": 2, "repeat": 2})


def test_a_batch_that_no_step_has_trained_waits() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    commit_batch(log, 1, 0)
    take(make_source(storage, groups_per_batch=1), [1, 2])  # and the second step fails

    def up_to(step: int) -> Audit:
        return audit_log(log, Ledger(storage), tasks_per_unit=2, trained_step=step)

    assert up_to(2) == audit(storage) == Audit(committed=4, trained=4, waiting=0)
    assert up_to(1) == Audit(committed=4, trained=2, waiting=2)
    assert up_to(0) == Audit(committed=4, trained=0, waiting=4)


def test_a_shard_made_again_to_the_byte_is_the_same_shard() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    name = commit_batch(log, 1, 0)
    take(make_source(storage, groups_per_batch=1), [1])
    log.quarantine(name, "rotten")
    assert commit_batch(log, 1, 0) == name
    assert audit(storage) == Audit(committed=4, trained=2, waiting=2)


def test_a_shard_that_is_gone_is_a_problem() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    name = commit_batch(log, 1, 0)
    take(make_source(storage), [1])
    storage.remove(log.path(name))
    problem, *_ = audit(storage).problems
    assert problem == f"{name.text} is in the ledger and not in the log"


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_copy_of_a_batch_that_ran_twice_hides_nothing(damaged: int) -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    commit_batch(log, 1, 0)
    commit_batch(ParquetLog(storage), 1, 0)
    take(make_source(storage), [1])
    storage.put(log.path(log.shards()[damaged]), b"rotten")
    assert audit(storage) == Audit(committed=8, trained=4, waiting=0, dropped={"repeat": 4})
