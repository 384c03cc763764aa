"""Promises of a fingerprint: it is the same everywhere, travels with the weights, and detects other weights."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.errors import DamagedError
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer import fingerprint as fingerprints
from rftdask.synchronizer.fingerprint import TOLERANCES, Fingerprint, fixed_sequences
from rftdask.synchronizer.manifest import Manifest, commit_folder, read_manifest
from rftdask.synchronizer.published import (
    CHECKPOINT_MODEL_FILE,
    fingerprint_of,
    latest_published,
    read_checkpoint_weights,
    read_published,
)
from rftdask.trainer.checkpoint import Checkpoints
from tests.unit.synchronizer.sync_cases import publish_weights

PRINT = Fingerprint(((3, 1, 4), (1, 5, 9)), ((-2.5, -0.125), (-1.0, -3.0)), "float32")


def shifted(by: float) -> list[list[float]]:
    """Logprobs of an engine whose every logprob is off by `gap`."""
    return [[value + by for value in row] for row in PRINT.logprobs]


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"memory://fingerprint-{request.node.name}")


@given(vocab_size=st.integers(1, 300_000))
def test_sequences_fit_the_vocabulary_and_repeat(vocab_size: int) -> None:
    sequences = fixed_sequences(vocab_size)
    assert [len(sequence) for sequence in sequences] == [fingerprints.SEQUENCE_LENGTH] * fingerprints.NUM_SEQUENCES
    assert all(0 <= token < vocab_size for sequence in sequences for token in sequence)
    assert sequences == fixed_sequences(vocab_size)


def test_the_sequences_never_change() -> None:
    """A trainer and an engine of two releases may meet in one run."""
    assert fixed_sequences(1000)[0][:4] == (774, 153, 196, 870)


def test_pairs_ask_for_all_tokens_but_the_first() -> None:
    assert PRINT.pairs == [((3,), (1, 4)), ((1,), (5, 9))]


def test_only_different_logprobs_are_a_problem_with_numbers() -> None:
    assert PRINT.problem(shifted(0.0), "float32") == ""
    assert PRINT.problem(shifted(0.5), "float32") == (
        "logprobs differ by up to 0.5 and by 0.5 on average; float32 allows 0.001 and 0.0002"
    )
    assert "differ by up to nan" in PRINT.problem(shifted(math.nan), "float32")
    assert PRINT.problem(shifted(0.0)[:1], "float32") == "got [2] logprobs, expected [2, 2]"


def test_one_token_far_off_is_enough() -> None:
    measured = shifted(0.0)
    measured[1][0] += 2 * TOLERANCES["fp8"][0]
    for dtype in TOLERANCES:
        assert PRINT.problem(measured, dtype)


@pytest.mark.parametrize("trainer", TOLERANCES)
@pytest.mark.parametrize("engine", TOLERANCES)
def test_the_coarser_data_type_decides_what_is_rounding(trainer: str, engine: str) -> None:
    bound = max(TOLERANCES[trainer][1], TOLERANCES[engine][1])
    one = Fingerprint(PRINT.sequences, PRINT.logprobs, trainer)
    assert one.problem(shifted(0.9 * bound), engine) == ""
    assert one.problem(shifted(1.1 * bound), engine)


def test_a_fingerprint_is_published_and_read_back_unchanged(storage: Storage) -> None:
    published = publish_weights(storage, 3, b"weights", PRINT)
    assert published.fingerprint == PRINT
    assert latest_published(storage) == read_published(storage, 3) == published
    assert publish_weights(storage, 4, b"weights").fingerprint is None, "an engine may have none"


def test_a_checkpoint_carries_the_fingerprint(storage: Storage) -> None:
    state = {"step": 2, "fingerprint": asdict(PRINT)}
    Checkpoints(storage, "main").save(2, {CHECKPOINT_MODEL_FILE: b"weights"}, state)
    published = read_checkpoint_weights(storage, "global_step_2")
    assert published is not None and published.fingerprint == PRINT


def test_a_flipped_number_damages_the_manifest(storage: Storage) -> None:
    publish_weights(storage, 3, b"weights", PRINT)
    path = "weights/3/MANIFEST.json"
    data = storage.get(path)
    assert b"-0.125" in data
    storage.put(path, data.replace(b"-0.125", b"-0.120"))
    assert read_published(storage, 3) is None
    with pytest.raises(DamagedError):
        read_manifest(storage, "weights/3")


def test_an_unreadable_fingerprint_is_damage(storage: Storage) -> None:
    commit_folder(storage, "weights/3", Manifest("main", 3, {}, {"fingerprint": {"sequences": 1}}))
    with pytest.raises(DamagedError, match="fingerprint of version 3"):
        read_published(storage, 3)


def test_a_fingerprint_survives_json_to_the_bit() -> None:
    odd = Fingerprint(((1, 2),), ((-1 / 3,),), "bfloat16")
    assert fingerprint_of(Manifest("main", 1, {}, json.loads(json.dumps({"fingerprint": asdict(odd)})))) == odd
