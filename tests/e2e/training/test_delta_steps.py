"""Promise of deltas during training: an engine that changed its weights in place 200 times, and the files that a
machine built from deltas, have the bits of the trainer's weights, tensor by tensor, and reproduce the trainer's
fingerprint. On average a delta has at most 5 % of the bytes at the learning rates of reinforcement learning.
"""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from rftdask.algorithm.compose import make_algorithm
from rftdask.engines.transformers import TransformersEngine
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.publisher import Publisher
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.unit.trainer.trainer_cases import engine_config, rollouts

NUM_STEPS, INTERVAL, TIMEOUT_S = 200, 25, 60.0


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return hashes by name; a file contains only one name of tied tensors."""
    words = {name: tensor.detach().contiguous().view(torch.int16).numpy() for name, tensor in tensors.items()}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in words.items()}


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-6, pytest.param(1e-5, marks=pytest.mark.long)])
def test_200_steps_of_deltas_have_the_bits_of_the_whole(tmp_path: Path, lr: float) -> None:
    build_toy_model(tmp_path / "model", hidden_size=64, num_layers=2, num_heads=4)
    config = engine_config(
        tmp_path / "model", explorer__rollout_model={"dtype": "bfloat16"}, algorithm__optimizer={"lr": lr}
    )
    trainer = TorchEngine(config, make_algorithm("grpo"))
    storage = open_storage(f"memory://delta-steps-{lr:g}")
    publisher = Publisher(storage, "main", INTERVAL)
    served = TransformersEngine(str(tmp_path / "model"), dtype="bfloat16")
    held: list[NodeCache] = []
    shares = []
    for step in range(1, NUM_STEPS + 1):
        trainer.train_step(rollouts(seed=step), step)
        files, fingerprint = trainer.weights(), trainer.fingerprint()
        published = publisher.publish(step, files, fingerprint)
        whole = bytes(files["model.safetensors"])
        copy = NodeCache(storage, published, TIMEOUT_S)
        held.append(copy)
        assert copy.files[0].read_bytes() == whole
        if published.delta is None:
            served.load_verified(step, copy.files, fingerprint)
        else:
            changes = NodeCache(storage, published.changes, TIMEOUT_S)
            assert served.try_load_changes(step, changes.files, fingerprint)
            shares.append(sum(entry.size_bytes for _, entry in published.delta.files) / len(whole))
            changes.close()
        expected = hashes(load(whole))
        assert {name: one for name, one in hashes(served._model.state_dict()).items() if name in expected} == expected
        if len(held) > 1:
            held.pop(0).close()
    held.pop().close()
    mean = sum(shares) / len(shares)
    print(f"lr {lr:g}: a delta is {100 * mean:.2f} % of the whole in the mean, {100 * max(shares):.2f} at most")
    assert len(shares) == NUM_STEPS - NUM_STEPS // INTERVAL
    assert mean <= 0.05
