"""Promises of verification: an engine serves only weights that it computes with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rftdask.algorithm.compose import make_algorithm
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import LoraConfig, ModelConfig
from rftdask.engines.base import Engine, Give, Take
from rftdask.engines.fake import FakeEngine
from rftdask.engines.server import FROM_CLIENT, FROM_SERVER, FromClient, Loaded, LoadWeights, serve
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import RoleError, WeightsError
from rftdask.models.toy import build_toy_model
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.numerics import assert_same_logprobs
from tests.unit.engines.engine_contract import engine_spec
from tests.unit.trainer.trainer_cases import engine_config

PRINT = Fingerprint(((3, 1),), ((-2.0,),), "float32")


class StaleEngine(Engine):
    """Takes any weights, and computes with the new ones after so many loads of the surer kind."""

    def __init__(self, loads_needed: int) -> None:
        self.loads_needed = loads_needed
        self.calls: list[str] = []

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> StaleEngine:
        raise AssertionError("created by hand")

    def serve(self, take: Take, give: Give) -> None:
        raise AssertionError("no requests")

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        self.calls.append("logprobs")
        return [(-2.0 if self.calls.count("load_anew") >= self.loads_needed else -3.0,)]

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        self.calls.append("load_weights")

    def load_anew(self, version: int, files: Sequence[Path]) -> None:
        self.calls.append("load_anew")


@pytest.mark.parametrize("loads_needed", [0, 1])
def test_only_a_mismatch_is_loaded_again_and_checked_again(loads_needed: int) -> None:
    engine = StaleEngine(loads_needed)
    engine.load_verified(1, [], PRINT)
    assert engine.calls == ["load_weights", "logprobs", *["load_anew", "logprobs"] * loads_needed]


def test_a_lasting_mismatch_is_an_error_with_the_numbers() -> None:
    with pytest.raises(WeightsError, match=r"version 7, also after loading again: logprobs differ by up to 1"):
        StaleEngine(2).load_verified(7, [], PRINT)
    assert issubclass(WeightsError, RoleError)


def test_without_a_fingerprint_or_a_model_nothing_is_compared(tmp_path: Path) -> None:
    engine = StaleEngine(2)
    engine.load_verified(1, [], None)
    assert engine.calls == ["load_weights"]
    fake = FakeEngine()
    fake.load_verified(1, [], PRINT)
    assert fake.policy_version == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "model"
    build_toy_model(folder, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
    return folder


def trainer(model: Path, lora: LoraConfig | None = None) -> TorchEngine:
    return TorchEngine(engine_config(model, lora, deterministic=False), make_algorithm("grpo"))


def moved(engine: TorchEngine) -> TorchEngine:
    """Trainer with other weights, as after a step."""
    for number, parameter in enumerate(p for p in engine._model.parameters() if p.requires_grad):
        parameter.data += 0.01 * (-1) ** number
    return engine


def test_published_weights_have_the_dtype_of_the_engine(model: Path, tmp_path: Path) -> None:
    config = engine_config(model, deterministic=False, explorer__rollout_model__dtype="bfloat16")
    policy = moved(TorchEngine(config, make_algorithm("grpo")))
    files, fingerprint = write(policy, tmp_path / "weights"), policy.fingerprint()
    published = load_file(files[0])
    assert fingerprint.dtype == "bfloat16"
    for name, tensor in policy._model.state_dict().items():
        if name in published:  # one name of tied weights
            assert torch.equal(published[name], tensor.bfloat16()), name
    engine = TransformersEngine(str(model), dtype="bfloat16")
    engine.load_verified(1, files, fingerprint)


def write(engine: TorchEngine, folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, data in engine.weights().items():
        (folder / name).write_bytes(data)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=2)], ids=["all weights", "adapters"])
def test_the_engine_reproduces_the_trainers_fingerprint(model: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    policy = moved(trainer(model, lora))
    fingerprint = policy.fingerprint()
    engine = TransformersEngine(str(model))
    assert fingerprint.problem(engine.logprobs(fingerprint.pairs), engine.dtype), "the folder has other weights"
    engine.load_verified(1, write(policy, tmp_path / "weights"), fingerprint)
    [first, *_], [said, *_] = fingerprint.logprobs, engine.logprobs(fingerprint.pairs)
    assert_same_logprobs(said, first)
    assert policy._model.training, "the trainer continues"


class Parent:
    """Pipe of an engine process, without a process: messages in, replies out."""

    def __init__(self, *messages: FromClient) -> None:
        self.messages = [FROM_CLIENT.encode(message) for message in messages]
        self.answers: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.messages)

    def send(self, answer: Any) -> None:
        self.answers.append(FROM_SERVER.decode(answer))


def test_a_process_refuses_another_fingerprint(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFTDASK_THREADS", "1")
    policy = trainer(model)
    right = policy.fingerprint()
    files = tuple(str(path) for path in write(policy, tmp_path / "weights"))
    wrong = moved(policy).fingerprint()
    parent = Parent(LoadWeights(3, 5, files, right), LoadWeights(4, 5, files, wrong))
    with pytest.raises(WeightsError, match="version 5"):
        serve(engine_spec("transformers", str(model)).to_plain(), parent)  # type: ignore[arg-type]
    assert parent.answers[1:] == [Loaded(3, 5)]


ENGINE = """
import subprocess, sys, os
os.environ["RFTDASK_ENGINE_PID"] = str(os.getpid())
child = "import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
grandchild = "from rftdask.engines.vllm import end_with_engine as e; e(); print('up', flush=True); input()"
subprocess.run([sys.executable, "-c", child.format(grandchild=grandchild)])
"""


def test_child_processes_end_with_a_killed_engine() -> None:
    """The pipe ends only when both the watching and the intermediate process have ended."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "up\n"
        engine.kill()
        assert engine.stdout.read() == ""
