"""Promises of the rule for jobs and of their lists on storage."""

from pathlib import Path

import pytest

from rftdask.cluster.jobs import JobRecord, jobs_file, note_workers, plan_role, read_jobs, write_jobs
from rftdask.storage import open_storage


def job(number: int, joined: bool = False) -> JobRecord:
    return JobRecord("explorer", f"explorer-{number}", str(number), "slurm", 0.0, joined)


def test_a_role_has_the_requested_number_of_jobs() -> None:
    jobs = [job(1, joined=True), job(2, joined=True), job(3)]
    change = plan_role(jobs, frozenset({"1", "3"}), 4, 0)
    assert (change.lost, change.cancel, change.num_new) == ((jobs[1],), (), 2)
    fewer = plan_role(jobs, frozenset({"1", "2", "3"}), 1, 0)
    assert (fewer.lost, fewer.cancel, fewer.num_new) == ((), (jobs[1], jobs[2]), 0)


@pytest.mark.parametrize(("asked", "num_jobs"), [(0, 0), (3, 1), (8, 1), (15, 1), (16, 2)])
def test_jobs_of_several_workers_do_not_exceed_the_request(asked: int, num_jobs: int) -> None:
    jobs = [job(number) for number in range(3)]
    assert plan_role([], frozenset(), asked, 0, per_job=8).num_new == num_jobs
    assert plan_role(jobs, frozenset("012"), asked, 0, per_job=8).cancel == tuple(jobs[num_jobs:])


def test_failed_starts_are_counted_until_a_worker_joins() -> None:
    assert plan_role([job(1)], frozenset(), 1, 2).num_failed_starts == 3
    assert plan_role([job(1, joined=True)], frozenset(), 1, 2).num_failed_starts == 0
    assert plan_role([job(1), job(2, joined=True)], frozenset({"2"}), 2, 2).num_failed_starts == 0
    assert plan_role([job(1)], frozenset({"1"}), 1, 2).num_failed_starts == 2


def test_jobs_ended_from_outside_are_not_failed_starts() -> None:
    assert plan_role([job(1), job(2)], frozenset(), 2, 0, frozenset({"1"})).num_failed_starts == 1


def test_an_ending_job_is_replaced_at_once() -> None:
    jobs = [job(1, joined=True), job(2, joined=True), job(3)]
    change = plan_role(jobs, frozenset("123"), 3, 0, ending=frozenset("1"))
    assert (change.lost, change.cancel, change.num_new) == ((), (), 1)
    # A job whose worker never joined may have failed.
    assert plan_role(jobs, frozenset("123"), 3, 0, ending=frozenset("3")).num_new == 0
    assert plan_role(jobs, frozenset("123"), 2, 0, ending=frozenset("1")).cancel == ()


def test_a_lost_worker_is_missing_since_its_loss() -> None:
    joined = note_workers(job(1), True, 5.0)
    assert joined.joined and joined.missing_since_s is None
    lost = note_workers(note_workers(joined, False, 6.0), False, 7.0)
    assert lost.joined and lost.missing_since_s == 6.0
    assert note_workers(lost, True, 8.0) == joined
    assert note_workers(job(1), False, 5.0) == job(1)


def test_the_list_of_jobs_is_read_as_written(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    assert read_jobs(storage) == []
    write_jobs(storage, [job(1), job(2, joined=True)], jobs_file("both"))
    assert read_jobs(storage) == [job(1), job(2, joined=True)]
