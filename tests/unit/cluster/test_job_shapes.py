"""Promises of the shapes of jobs: which workers share a job, and what does not fit a partition."""

from typing import Any

import pytest

from rftdask.cluster.job_shapes import Capacity, JobShape, check_fit, hours, limit, shape_of
from rftdask.config.schema.cluster import WorkerJobConfig, count_gres
from rftdask.errors import UserError


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        (None, 0),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:a100:4(S:0-1)", 4),
        ("gres/gpu:1", 1),
        ("(null)", 0),
        ("lustre:1", 0),
        ("gpu:2080ti:4", 4),
        ("gpu:1g.10gb:7", 7),
        ("gpu:3g.20gb:2,gpu:2g.10gb:1", 3),
        ("gpu:a100:1,gpu:a100_3g.20gb:2", 3),
        ("gpu:8,gpu_mem:640G", 8),
    ],
)
def test_gpus_of_generic_resources(gres: str | None, count: int) -> None:
    assert count_gres(gres) == count


def test_jobs_that_do_not_fit_a_partition_are_refused() -> None:
    jobs = {"trainer": WorkerJobConfig(gres="gpu:2", cpus=4), "explorer": WorkerJobConfig(gres="gpu:1", cpus=4)}
    capacities = dict.fromkeys(jobs, Capacity("main", num_nodes=4, cpus=16, gpus=2))

    def shapes(ranks: int, engines: int) -> dict[str, JobShape]:
        return {role: shape_of(role, jobs[role], n, 1) for role, n in (("trainer", ranks), ("explorer", engines))}

    check_fit(shapes(6, 2), jobs, capacities)
    with pytest.raises(
        UserError, match=r"3 trainer x 2 \+ 3 explorer x 1 = 9 GPUs, and partition main has 4 nodes x 2 = 8"
    ):
        check_fit(shapes(6, 3), jobs, capacities)
    with pytest.raises(UserError, match=r"slurm.trainer: a job asks for 2 GPUs of a node, and no node of .* than 1"):
        check_fit(shapes(2, 0), jobs, dict.fromkeys(jobs, limit(capacities["trainer"], 0, 1)))
    with pytest.raises(UserError, match=r"a job of 5 nodes with 2 workers each, and partition main has 4 nodes with 2"):
        check_fit(shapes(10, 0), jobs, capacities)
    jobs["explorer"] = WorkerJobConfig(gres="gpu:1", exclusive=True)
    with pytest.raises(UserError, match=r"2 trainer x 2 \+ 3 explorer x 2 = 10 GPUs"):
        check_fit(shapes(4, 3), jobs, capacities)
    apart = {**capacities, "explorer": Capacity("spot", 4, 16, 2)}
    check_fit(shapes(8, 4), jobs, apart)


@pytest.mark.parametrize(
    ("role", "asked", "workers", "gpus_each", "shape"),
    [
        ("trainer", {"gres": "gpu:h100:8"}, 16, 1, JobShape(1, 2, 8)),
        ("trainer", {"gpus_per_node": "h100:4"}, 4, 1, JobShape(1, 1, 4)),
        ("trainer", {"gres": "gpu:1g.10gb:7"}, 7, 1, JobShape(1, 1, 7)),
        ("trainer", {"gres": "gpu:1"}, 3, 1, JobShape(1, 3, 1)),
        ("trainer", {}, 3, 1, JobShape(1, 0, 3)),
        ("trainer", {"nodes": 2}, 4, 1, JobShape(1, 2, 2)),
        ("trainer", {"exclusive": True, "tasks_per_node": 3}, 6, 1, JobShape(1, 2, 3)),  # a site without GRES
        ("explorer", {}, 3, 1, JobShape(3, 0, 1)),
        ("explorer", {"gres": "gpu:1"}, 3, 1, JobShape(3, 1, 1)),
        ("explorer", {"gres": "gpu:8"}, 16, 1, JobShape(2, 1, 8)),
        ("explorer", {"gres": "gpu:8"}, 4, 4, JobShape(2, 1, 2)),
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 4, 8, JobShape(2, 2, 1)),
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 3, 16, JobShape(3, 2, 1, span=2)),
        ("explorer", {"gres": "gpu:gh200:1", "nodes": 8}, 4, 4, JobShape(2, 8, 1, span=4)),
        ("explorer", {"gres": "gpu:8"}, 0, 1, JobShape(0, 0, 1)),
    ],
)
def test_ranks_are_one_job_and_engines_fill_their_gpus(
    role: str, asked: dict[str, Any], workers: int, gpus_each: int, shape: JobShape
) -> None:
    assert shape_of(role, WorkerJobConfig(**asked), workers, gpus_each) == shape


@pytest.mark.parametrize(
    ("role", "asked", "workers", "gpus_each", "message"),
    [
        (
            "trainer",
            {"gres": "gpu:h100:8"},
            1,
            1,
            r"1 rank \(trainer.num_ranks\), and a job of 1 node x 8 has 8 \(cluster.slurm.trainer.gres is gpu:h100:8.*"
            "set trainer.num_ranks to 8, or ask for less",
        ),
        (
            "trainer",
            {"gres": "gpu:8", "tasks_per_node": 1},
            1,
            1,
            "1 rank with 1 GPU each .* use 1 of a node; ask for 1",
        ),
        ("explorer", {"gres": "gpu:8"}, 12, 1, "12 engines .* a job of 1 node x 8 has 8 .*engine_num to 16"),
        ("explorer", {"gres": "gpu:8"}, 2, 3, "gres is gpu:8, and 2 engines with 3 GPUs each .* use 6 of a node"),
        ("explorer", {"gres": "gpu:1"}, 1, 4, r"works on 4 GPUs .*; set gpu:4, or .* over 4 nodes .*explorer.nodes: 4"),
        ("explorer", {"gres": "gpu:8", "nodes": 3}, 1, 16, "over 2 nodes cluster.slurm.explorer.nodes: 2, or a mult"),
        ("explorer", {"gres": "gpu:8", "nodes": 2}, 1, 12, "which is not a number of whole nodes; set gpu:12, or a"),
        ("explorer", {"gres": "gpu:8", "nodes": 4}, 3, 16, "a job of 4 nodes has 2 of 3 engines; .*engine_num to 4"),
        ("explorer", {}, 1, 4, "an engine works on 4 GPUs .*; set gpu:4"),
    ],
)
def test_unused_gpus_are_refused_by_name(
    role: str, asked: dict[str, Any], workers: int, gpus_each: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        shape_of(role, WorkerJobConfig(**asked), workers, gpus_each)


@pytest.mark.parametrize(
    ("time_limit", "expected"),
    [("1-12:00:00", 36.0), ("08:00:00", 8.0), ("30:00", 0.5), ("2-0", 48.0), ("infinite", float("inf"))],
)
def test_the_hours_of_a_time_limit(time_limit: str, expected: float) -> None:
    assert hours(time_limit) == expected


def test_more_nodes_than_exist_are_refused() -> None:
    capacity = Capacity("main", num_nodes=4, cpus=8, gpus=1)
    assert limit(capacity, 2, 0) == Capacity("main", 2, 8, 1)
    with pytest.raises(UserError, match=r"node_num is 5, and partition main has 4 nodes"):
        limit(capacity, 5, 0)
