"""Promises of the layout: roles that work at the same time share neither cores nor GPUs, or it is refused with the
arithmetic; scaling a role adds workers like those it has, under names that were never used, and removes the newest.
"""

import pytest

from rftdask.cluster.layout import (
    Layout,
    WorkerPlan,
    count_gpus,
    num_ranks,
    plan_jobs,
    plan_layout,
    plan_machines,
    scaled,
)
from rftdask.config import Config, load_config
from rftdask.config.schema.explorer import EngineTraits
from rftdask.errors import UserError
from rftdask.processes.gpus import visible_gpus


class Stays(EngineTraits):
    """An engine of a plug-in that cannot release a GPU."""


def stage(engines: int, *overrides: str) -> Config:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "explorer": {"rollout_model": {"engine_num": engines}},
    }
    return load_config(tree, overrides)


def test_two_cores_have_a_trainer_with_control_and_an_engine() -> None:
    expected = (WorkerPlan("trainer-0", ("trainer", "control"), 1), WorkerPlan("explorer-0", ("explorer",), 1))
    assert plan_layout([stage(1)], 2) == Layout(expected)


def test_without_a_trainer_the_control_role_has_a_worker() -> None:
    workers = plan_layout([stage(2, "mode=explore")], 2).workers
    assert [worker.resources for worker in workers] == [("explorer",), ("explorer",), ("control",)]


def test_every_role_has_its_own_gpu() -> None:
    workers = plan_layout([stage(7)], 64, num_gpus=8).workers
    assert [worker.gpu for worker in workers] == list(range(8))
    assert {worker.threads for worker in workers} == {8}


def test_an_engine_on_several_gpus_shares_none() -> None:
    split = ("explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.tensor_parallel_size=2")
    workers = plan_layout([stage(2, *split)], 64, num_gpus=8).workers
    assert [worker.num_gpus for worker in workers] == [1, 1, 1, 1, 2, 2]
    assert [worker.gpu for worker in workers] == [0, 1, 2, 3, 4, 6]
    apart = ("trainer.num_ranks=1", "cluster.colocate=false")
    with pytest.raises(UserError, match=r"4 explorers .* with 2 GPUs each .* = 9 GPUs.* lower engine_num to 3"):
        plan_layout([stage(4, *split, *apart)], 64, num_gpus=8)


def test_more_roles_than_gpus_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"1 trainer \+ 8 explorers .* = 9 processes .* 8 GPUs .* lower engine_num to 7"
    ):
        plan_layout([stage(8, "cluster.colocate=false")], 64, num_gpus=8)
    with pytest.raises(UserError, match=r"1 trainer \+ 1 explorers .* = 2 GPUs, .* 1 GPUs .* mode colocate"):
        plan_layout([stage(1, "cluster.colocate=false")], 64, num_gpus=1)


def places(layout: Layout) -> list[tuple[str, int | None, int, tuple[int, ...]]]:
    return [(worker.name, worker.gpu, worker.num_gpus, worker.shares) for worker in layout.workers]


def test_one_gpu_is_shared() -> None:
    layout = plan_layout([stage(1)], 16, num_gpus=1)
    assert places(layout) == [("trainer-0", 0, 1, (0,)), ("explorer-0", 0, 1, (0,))]
    assert {worker.threads for worker in layout.workers} == {16}  # waiting roles need no cores
    assert layout.describe() == "1 rank on GPU 0, 1 engine on GPU 0; they take turns on GPU 0 (colocate)"
    assert not plan_layout([stage(1)], 16, num_gpus=2).colocated
    assert plan_layout([stage(1, "mode=colocate")], 16, num_gpus=2).num_workers("trainer") == 2


def test_gpus_are_shared_by_as_many_ranks_and_engines() -> None:
    layout = plan_layout([stage(8)], 64, num_gpus=8)
    assert [worker.shares for worker in layout.workers] == [(i,) for i in (*range(8), *range(8))]
    assert layout.describe() == "8 ranks on GPUs 0-7, 8 engines on GPUs 0-7; they take turns on GPUs 0-7 (colocate)"
    # An engine on several GPUs waits for all of their ranks.
    split = ("explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.tensor_parallel_size=2")
    mixed = plan_layout([stage(4, *split, "trainer.num_ranks=3")], 64, num_gpus=8)
    assert places(mixed)[3:] == [
        ("explorer-0", 0, 2, (0, 1)),
        ("explorer-1", 2, 2, (2,)),
        ("explorer-2", 4, 2, ()),
        ("explorer-3", 6, 2, ()),
    ]
    # One of them is lost: the next one has its place, under another name.
    again = scaled([w for w in mixed.workers if w.name != "explorer-0"], mixed, "explorer", 4, num_gpus=8, unused=7)
    assert places(Layout(tuple(again)))[-1] == ("explorer-7", 0, 2, (0, 1))
    with pytest.raises(UserError, match=r"1 trainer \+ 9 explorers .*colocate\) = 9 GPUs.* lower engine_num to 8"):
        plan_layout([stage(9, "trainer.num_ranks=1")], 64, num_gpus=8)
    with pytest.raises(UserError, match=r"9 trainer \+ 1 explorers .*colocate\) = 9 GPUs.* lower num_ranks to 8"):
        plan_layout([stage(1, "trainer.num_ranks=9")], 64, num_gpus=8)


def test_all_ranks_lock_their_gpus_together() -> None:
    layout = plan_layout([stage(1, "mode=colocate", "trainer.num_ranks=3")], 16, num_gpus=3)
    assert [worker.shares for worker in layout.workers] == [(0,), (1,), (2,), (0,)]
    assert layout.describe() == "3 ranks on GPUs 0-2, 1 engine on GPU 0; they take turns on GPU 0 (colocate)"


def test_training_on_a_dataset_may_have_an_engine_to_evaluate() -> None:
    dataset = ("mode=train", "algorithm={algorithm_type: sft}", "buffer.trainer_input.experience_buffer.path=d.jsonl")
    tasks = "buffer.explorer_input.eval_tasksets=[{path: e.jsonl}]"
    assert plan_layout([stage(1, *dataset)], 2).num_workers("explorer") == 0
    assert plan_layout([stage(1, *dataset, tasks)], 2).num_workers("explorer") == 1
    assert plan_layout([stage(1, "mode=train", tasks)], 2).num_workers("explorer") == 0, (
        "of a log: who explores evaluates"
    )
    with pytest.raises(UserError, match=r"a trainer on a dataset never releases its GPU.* remove .*eval_tasksets"):
        plan_layout([stage(1, *dataset, tasks)], 16, num_gpus=1)


def test_cores_can_be_shared() -> None:
    layout = plan_layout([stage(2, "mode=colocate", "trainer.num_ranks=2")], 2)
    assert [worker.shares for worker in layout.workers] == [(0,), (1,), (0,), (1,)]
    assert layout.describe() == "2 ranks, 2 engines; they take turns on what each machine has (colocate)"


def test_an_engine_that_cannot_leave_its_gpu_shares_none() -> None:
    own = "explorer.rollout_model.engine_type=test_layout.Stays"
    with pytest.raises(UserError, match=r"explorer.rollout_model.engine_type .*Stays.* cannot release its GPU"):
        plan_layout([stage(1, own)], 16, num_gpus=1)


def test_a_run_can_be_planned_for_other_machines() -> None:
    assert plan_machines(stage(6, "cluster.gpu_per_node=8", "trainer.num_ranks=2")).describe() == (
        "2 ranks on GPUs 0-1, 6 engines on GPUs 2-7"
    )
    four = ("cluster.node_num=4", "cluster.gpu_per_node=8")
    assert plan_machines(stage(16, *four, "cluster.type=joined")).describe() == "16 ranks, 16 engines"
    with pytest.raises(UserError, match=r"cluster.node_num is 4, and cluster.type local is one machine"):
        plan_machines(stage(16, *four))
    with pytest.raises(UserError, match=r"1 trainer \+ 32 explorers .* = 33 GPUs, and there are 32 .*engine_num to 31"):
        plan_machines(stage(32, *four, "cluster.type=joined"))
    split = ("explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.tensor_parallel_size=16")
    with pytest.raises(UserError, match=r"an engine uses 16 GPUs .* and a machine has 8"):
        plan_machines(stage(1, *four, *split, "cluster.type=joined"))
    # Processes of a machine share its GPUs, however their workers were started.
    assert plan_machines(stage(32, *four, "cluster.type=joined", "mode=colocate")).describe() == (
        "32 ranks, 32 engines; they take turns on what each machine has (colocate)"
    )
    with pytest.raises(UserError, match=r"1 trainer \+ 33 explorers .* turns .* = 33 GPUs.*engine_num to 32"):
        plan_machines(stage(33, *four, "cluster.type=joined", "mode=colocate", "trainer.num_ranks=1"))
    with pytest.raises(UserError, match=r"cluster.colocate: cluster.type pbs has separate jobs"):
        plan_machines(stage(1, *four, "cluster.type=pbs", "mode=colocate"))
    turns = plan_machines(stage(32, *four, "cluster.type=slurm", "mode=colocate"))
    assert (turns.num_workers("explorer"), turns.num_in_jobs("explorer"), turns.num_in_jobs("trainer")) == (32, 0, 32)
    with pytest.raises(UserError, match=r"each rank shares its GPU .* 4 trainer ranks .* set .*engine_num to 4, or"):
        plan_machines(stage(2, *four, "cluster.type=slurm", "mode=colocate", "trainer.num_ranks=4"))


def test_gpus_are_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    assert visible_gpus() == ["2", "GPU-5f"]
    assert (count_gpus(stage(1)), count_gpus(stage(1, "cluster.gpu_per_node=1"))) == (2, 1)
    with pytest.raises(UserError, match="gpu_per_node is 3, and 2 GPUs are visible"):
        count_gpus(stage(1, "cluster.gpu_per_node=3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_trainer_takes_num_ranks_or_the_remaining_gpus() -> None:
    asked = stage(2, "trainer.num_ranks=4")
    workers = plan_layout([asked], 12).workers
    assert [worker.name for worker in workers[:4]] == ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]
    assert {worker.threads for worker in workers} == {2}
    assert num_ranks(asked, Layout(workers)) == 4
    left = plan_layout([stage(2)], 64, num_gpus=8)
    assert num_ranks(stage(2), left) == 6
    assert [worker.gpu for worker in left.workers] == list(range(8))
    assert num_ranks(stage(2), plan_layout([stage(2)], 12)) == 1
    single = stage(2, "trainer.trainer_strategy=single")
    assert num_ranks(single, plan_layout([single], 64, num_gpus=8)) == 1
    # Stages share their workers; each takes as many as it has ranks.
    both = plan_layout([asked, single], 12)
    assert [num_ranks(stage, both) for stage in (asked, single)] == [4, 1]


def test_too_many_ranks_are_refused_with_a_number_that_fits() -> None:
    with pytest.raises(UserError, match=r"8 trainer \+ 2 explorers .* = 10 processes .* 4 cores .* num_ranks to 2"):
        plan_layout([stage(2, "trainer.num_ranks=8")], 4)


def test_ranks_make_whole_groups() -> None:
    split = stage(1, "trainer.ulysses_sequence_parallel_size=2")
    assert num_ranks(split, plan_layout([split], 64, num_gpus=5)) == 4
    with pytest.raises(UserError, match=r"ulysses.* groups of 2 ranks, and the trainer would have 3"):
        plan_layout([split], 64, num_gpus=4)
    cut = stage(1, "trainer.tensor_parallel_size=2", "trainer.trainer_strategy=ddp")
    with pytest.raises(UserError, match=r"tensor.* groups of 2 ranks, and the trainer would have 3"):
        plan_layout([cut], 64, num_gpus=4)


def test_new_workers_have_new_names_and_free_gpus() -> None:
    layout = plan_layout([stage(2, "trainer.num_ranks=1")], 64, num_gpus=4)
    fewer = scaled(layout.workers, layout, "explorer", 1, num_gpus=4, unused=3)
    assert [worker.name for worker in fewer] == ["trainer-0", "explorer-0"]
    more = scaled(fewer, layout, "explorer", 3, num_gpus=4, unused=3)
    assert [(worker.name, worker.gpu) for worker in more[2:]] == [("explorer-3", 2), ("explorer-4", 3)]
    with pytest.raises(
        UserError, match=r"4 workers for role 'explorer' with 1 GPUs each .* next to 1 .* 4 GPUs; request 3"
    ):
        scaled(more, layout, "explorer", 4, num_gpus=4, unused=5)
    none = scaled(more, layout, "explorer", 0, num_gpus=4, unused=5)
    assert none == [layout.workers[0]]
    assert [worker.name for worker in scaled(none, layout, "explorer", 1, num_gpus=4, unused=5)][1:] == ["explorer-5"]


def test_engines_on_several_gpus_need_free_neighbors() -> None:
    split = ("explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.tensor_parallel_size=2")
    layout = plan_layout([stage(2, *split, "trainer.num_ranks=1")], 64, num_gpus=8)
    more = scaled(layout.workers, layout, "explorer", 3, num_gpus=8, unused=3)
    assert [(worker.gpu, worker.num_gpus) for worker in more] == [(0, 1), (1, 2), (3, 2), (5, 2)]
    with pytest.raises(UserError, match=r"4 workers for role 'explorer' with 2 GPUs each .* request 3"):
        scaled(more, layout, "explorer", 4, num_gpus=8, unused=4)


def test_an_added_trainer_has_no_control_role() -> None:
    layout = plan_layout([stage(1)], 2)
    workers = scaled(layout.workers, layout, "trainer", 2, num_gpus=0, unused=2)
    assert [(w.name, w.resources) for w in workers if "trainer" in w.resources] == [
        ("trainer-0", ("trainer", "control")),
        ("trainer-2", ("trainer",)),
    ]


def test_a_layout_leaves_cores_for_later_explorers() -> None:
    elastic = stage(2, "explorer.min_workers=1", "explorer.max_workers=3")
    workers = plan_layout([elastic], 8).workers
    assert [(worker.name, worker.threads) for worker in workers] == [("trainer-0", 2), ("explorer-0", 2)]
    with pytest.raises(UserError, match=r"1 trainer \+ 3 explorers .* = 4 processes .* there are 3 cores"):
        plan_layout([elastic], 3)


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ((), (2, 2)),
        (("explorer.min_workers=1",), (1, 2)),
        (("explorer.min_workers=4",), (4, 4)),
        (("explorer.max_workers=6",), (2, 6)),
        (("explorer.max_workers=1",), (1, 1)),
        (("explorer.min_workers=1", "explorer.max_workers=9"), (1, 9)),
    ],
)
def test_the_default_number_of_workers_is_engine_num(overrides: tuple[str, ...], limits: tuple[int, int]) -> None:
    explorer = stage(2, *overrides).explorer
    assert (explorer.fewest_workers, explorer.most_workers) == limits


def test_scaled_engines_get_neighboring_gpus() -> None:
    like = WorkerPlan("explorer-1", ("explorer",), 2, gpu=1, num_gpus=2)
    layout = Layout((WorkerPlan("trainer-0", ("trainer", "control"), 2, gpu=0), like))
    more = scaled(layout.workers, layout, "explorer", 3, num_gpus=7, unused=2)
    assert [(worker.name, worker.gpu, worker.num_gpus) for worker in more[1:]] == [
        ("explorer-1", 1, 2),
        ("explorer-2", 3, 2),
        ("explorer-3", 5, 2),
    ]


def test_jobs_leave_gpus_for_later_explorers() -> None:
    elastic = stage(2, "explorer.min_workers=1", "explorer.max_workers=3")
    workers = plan_jobs([elastic], {"trainer": 4, "explorer": 2}, num_gpus=8).workers
    assert [worker.name for worker in workers if "explorer" in worker.resources] == ["explorer-0"]
    assert sum("trainer" in worker.resources for worker in workers) == 5


# ---- auxiliary models on workers of their own


def judges(*models: str) -> str:
    """The key for auxiliary models of `engines x GPUs` each, such as "2x4"."""
    items = []
    for number, model in enumerate(models):
        engines, gpus = model.split("x")
        items.append(
            f"{{name: judge-{number}, model_path: j, engine_type: vllm, engine_num: {engines}, "
            f"tensor_parallel_size: {gpus}}}"
        )
    return f"explorer.auxiliary_models=[{', '.join(items)}]"


def test_auxiliary_models_have_their_own_workers_and_gpus() -> None:
    layout = plan_layout([stage(1, judges("2x2", "1x1", "0x1"))], 64, num_gpus=8)
    apart = [worker for worker in layout.workers if "auxiliary" in worker.resources]
    # At the end of the machine; the ranks have what is left.
    assert [(worker.gpu, worker.num_gpus) for worker in apart] == [(6, 2), (4, 2), (3, 1)]
    assert [worker.amounts for worker in apart] == [{"auxiliary": 2}, {"auxiliary": 2}, {"auxiliary": 1}]
    # A model in the workers of the policy has the same number of GPUs.
    with pytest.raises(UserError, match=r"4 GPUs? each"):
        plan_layout([stage(2, judges("0x4"), "cluster.colocate=false")], 64, num_gpus=8)
    with_small = plan_layout([stage(1, judges("1x2"))], 64, num_gpus=8)
    assert with_small.describe() == "5 ranks on GPUs 0-4, 1 engine on GPU 5, 1 auxiliary engine on GPUs 6-7"


def test_too_little_for_auxiliary_models_is_refused() -> None:
    apart = ("trainer.num_ranks=2", "cluster.colocate=false")
    with pytest.raises(
        UserError, match=r"2 trainer \+ 3 explorers .*\+ 2 auxiliary .*2 \+ 2 of .* = 9 GPUs.*engine_num to 2"
    ):
        plan_layout([stage(3, judges("2x2"), *apart)], 64, num_gpus=8)
    with pytest.raises(
        UserError, match=r"8 of auxiliary models = 10 GPUs.* lower engine_num of explorer.auxiliary_models"
    ):
        plan_layout([stage(1, judges("1x8"), "trainer.num_ranks=1", "cluster.colocate=false")], 64, num_gpus=8)
    with pytest.raises(UserError, match=r"\+ 1 auxiliary .* 3 processes .* there are 2 cores"):
        plan_layout([stage(1, judges("1x1"))], 2)


def test_all_stages_have_workers_for_auxiliary_models() -> None:
    layout = plan_layout([stage(1, judges("1x1", "1x4")), stage(1, judges("3x2"))], 64, num_gpus=16)
    assert [w.num_gpus for w in layout.workers if "auxiliary" in w.resources] == [4, 2, 2]
    taught = stage(1, "algorithm.algorithm_type=on_policy_distill", judges("2x1"))
    assert plan_layout([taught], 64, num_gpus=8).num_workers("auxiliary") == 0


def test_jobs_of_auxiliary_models_fit_the_largest() -> None:
    threads = {"trainer": 4, "explorer": 2, "auxiliary": 8}
    layout = plan_jobs([stage(2, judges("1x4", "1x1"), "cluster.type=slurm")], threads, num_gpus=12)
    apart = [worker for worker in layout.workers if "auxiliary" in worker.resources]
    assert [(worker.num_gpus, worker.threads) for worker in apart] == [(4, 8), (4, 8)]
    assert layout.num_workers("trainer") == 2
    with pytest.raises(UserError, match=r"8 GPUs \(its tensor.* machine has 4"):
        plan_machines(stage(1, judges("1x8"), "cluster.type=slurm", "cluster.gpu_per_node=4", "cluster.node_num=4"))
