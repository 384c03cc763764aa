"""Promises of distillation: a student approaches its teacher over the whole vocabulary, in chunks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.imitation import Jsd
from rftdask.buffer.batches.batch import TrainingBatch, join_batches, supervised_batch
from rftdask.errors import DataError
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import TeacherStates, load_policy, predicting_states, token_logprobs
from rftdask.trainer.packing import PackedRows, pack_rows
from tests.unit.trainer.trainer_cases import engine_config


def student(models: Path, name: str, parts: dict[str, Any] | None = None, **overrides: Any) -> TorchEngine:
    overrides.setdefault("explorer__auxiliary_models", [{"model_path": str(models / "teacher")}])
    config = engine_config(models / "policy", deterministic=True, **overrides)
    return TorchEngine(config, make_algorithm(name, **(parts or {})))


def rollouts(seed: int = 0, num_rows: int = 12) -> TrainingBatch:
    random = np.random.default_rng(seed)
    rows = [(random.integers(2, 200, 2 + random.integers(3, 7)).tolist(), 2, None) for _ in range(num_rows)]
    batch = supervised_batch(rows, [f"t/0/{i}/0/0" for i in range(num_rows)])
    batch.experts[:] = False
    return batch


def logprobs(model: Any, batch: TrainingBatch) -> Tensor:
    """[Q, V] float64 of every response token, row by row, one row a pass."""
    with torch.no_grad():
        rows = zip(batch.row_tokens(), batch.prompt_lengths, strict=True)
        logits = [model(torch.from_numpy(row[None].astype(int))).logits[0, p - 1 : -1] for row, p in rows]
    return torch.log_softmax(torch.cat(logits).double(), dim=-1)


def mean_kl(p_QV: Tensor, q_QV: Tensor) -> float:
    """KL(p || q) of logprobs, nats a token."""
    return float((p_QV.exp() * (p_QV - q_QV)).sum(-1).mean())


def token_side(models: Path) -> tuple[Any, PackedRows, TeacherStates]:
    """Return a policy, packed rows, and the teacher's states for them."""
    policy, teacher = (load_policy(str(models / name), "float32", "cpu")[0] for name in ("policy", "teacher"))
    batch = rollouts()
    rows = pack_rows(batch.row_tokens(), batch.prompt_lengths, np.full(len(batch), 0.7))
    with torch.no_grad():
        states_QH = predicting_states(teacher, rows)
    return policy, rows, TeacherStates(states_QH, teacher.get_output_embeddings(), Jsd(0.3, 2.0).divergence)


@pytest.mark.parametrize("positions", [1000, 3], ids=["at once", "in chunks"])
def test_the_divergence_covers_the_whole_vocabulary(models: Path, positions: int) -> None:
    policy, rows, teacher = token_side(models)
    max_logits = 4 * positions * policy.config.vocab_size
    with torch.no_grad():
        _, more_BT2 = token_logprobs(policy, rows, teacher=teacher, with_entropy=True, max_logits=max_logits)
        plain = token_logprobs(policy, rows, with_entropy=True)[1]
        policy_QV = policy.get_output_embeddings()(predicting_states(policy, rows)).double()
        teacher_QV = teacher.head(teacher.states_QH).double()
    assert more_BT2 is not None and plain is not None
    p_QV, q_QV = (logits.div(2.0).softmax(-1) for logits in (teacher_QV, policy_QV))
    m_QV = 0.3 * p_QV + 0.7 * q_QV
    expected_Q = 0.3 * (p_QV * (p_QV / m_QV).log()).sum(-1) + 0.7 * (q_QV * (q_QV / m_QV).log()).sum(-1)
    got_Q = more_BT2[rows.row_Q, rows.column_Q, 0]
    torch.testing.assert_close(got_Q.double(), expected_Q, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(more_BT2[..., 1], plain, rtol=1e-5, atol=1e-6)


def test_chunks_give_the_same_gradients_and_keep_no_logits(models: Path) -> None:
    policy, rows, teacher = token_side(models)
    num_words, gradients, sizes = policy.config.vocab_size, [], []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == num_words and not isinstance(tensor, torch.nn.Parameter):
            sizes[-1] += 1
        return tensor

    for positions in (len(rows.target_Q), 3):
        policy.zero_grad()
        sizes.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _, more_BT2 = token_logprobs(policy, rows, teacher=teacher, max_logits=4 * positions * num_words)
        assert more_BT2 is not None
        more_BT2[..., 0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
    assert sizes[0] > 0 == sizes[1]
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-7)
    assert all(parameter.grad is None for parameter in teacher.head.parameters())


@pytest.mark.parametrize("beta", [None, 0.0, 0.5, 1.0])
def test_a_student_comes_nearer_to_its_teacher(models: Path, beta: float | None) -> None:
    parts = {} if beta is None else {"policy_loss_fn_args": {"beta": beta}}
    trained, batch = student(models, "jsd", parts), rollouts()
    teacher = logprobs(load_policy(str(models / "teacher"), "float32", "cpu")[0], batch)
    before = logprobs(trained._model.eval(), batch)
    for step in range(1, 11):
        trained.train_step(batch, step)
    after = logprobs(trained._model.eval(), batch)
    assert mean_kl(teacher, after) < 0.9 * mean_kl(teacher, before)
    assert mean_kl(after, teacher) < 0.9 * mean_kl(before, teacher)


def test_rollouts_and_rows_of_a_dataset_weigh_by_their_number(models: Path) -> None:
    """A step on both is, in expectation over the share, GKD's loss: the mean over sequences of either origin."""
    own, shown = rollouts(0, 9), rollouts(1, 3)
    shown.experts[:] = True
    values = [student(models, "jsd").train_step(batch, 1)["jsd"] for batch in (own, shown, join_batches([own, shown]))]
    assert values[2] == pytest.approx(0.75 * values[0] + 0.25 * values[1], rel=1e-5)
    assert values[0] != pytest.approx(values[1], rel=1e-3)


def test_sft_with_jsd_distills_from_a_dataset(models: Path) -> None:
    batch = rollouts()
    batch.experts[:] = True
    trained = student(models, "sft", {"policy_loss_fn": "jsd"})
    first = trained.train_step(batch, 1)["jsd"]
    assert trained.train_step(batch, 2)["jsd"] < first


@pytest.mark.parametrize("name", ["jsd", "on_policy_distill"])
@pytest.mark.parametrize("size", [None, 5])
def test_each_teacher_scores_the_rows_of_its_own_tasksets(models: Path, name: str, size: int | None) -> None:
    def taught(batch: TrainingBatch, *teachers: tuple[str, list[str] | None]) -> dict[str, float]:
        settings = [{"model_path": str(models / model), "teacher_for": names} for model, names in teachers]
        keys = {"explorer__auxiliary_models": settings, "trainer__micro_batch_size": size}
        return student(models, name, algorithm__algorithm_type=name, **keys).train_step(batch, 1)

    own, theirs = rollouts(0, 7), rollouts(1, 5)
    theirs = replace(theirs, uids=tuple(uid.replace("t/", "u/") for uid in theirs.uids))
    both = join_batches([own, theirs])
    each = taught(own, ("teacher", None)), taught(theirs, ("other", None))
    got = taught(both, ("other", ["u"]), ("teacher", None))
    wrong = taught(both, ("other", ["t"]), ("teacher", None))
    if name == "jsd":
        expected = (7 * each[0]["jsd"] + 5 * each[1]["jsd"]) / 12
        assert got["jsd"] == pytest.approx(expected, rel=1e-5)
        assert wrong["jsd"] != pytest.approx(expected, rel=1e-5)
    else:
        counts = [int(batch.loss_mask.sum()) for batch in (own, theirs)]
        expected = sum(n * metrics["teacher_kl"] for n, metrics in zip(counts, each, strict=True)) / sum(counts)
        assert got["teacher_kl"] == pytest.approx(expected, rel=1e-5)
        assert wrong["teacher_kl"] != pytest.approx(expected, rel=1e-5)
    with pytest.raises(DataError, match="the rows of 't' have no teacher"):
        taught(both, ("other", ["u"]), ("teacher", ["v"]))
