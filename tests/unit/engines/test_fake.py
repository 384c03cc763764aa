import subprocess
import sys
from pathlib import Path

import pytest

from rftdask.config.schema.explorer import EngineTraits, InferenceModelConfig, registered_engines
from rftdask.engines.base import Engine, GenerateRequest, SamplingParams
from rftdask.engines.fake import FakeEngine
from rftdask.errors import UserError
from tests.unit.engines.engine_contract import ContinuousContract, EngineContract, InFlightContract


class TestFakeEngine(EngineContract, ContinuousContract, InFlightContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return FakeEngine("no/such/model")

    @pytest.fixture
    def weights_file(self, tmp_path: Path) -> Path:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"")
        return file

    def test_a_complete_response_has_finish_reason_stop(self) -> None:
        engine = FakeEngine(tokens_per_request=3, vocab_size=10)
        [generation] = engine.generate([GenerateRequest((1,), SamplingParams(max_tokens=3), seed=0)])
        assert (len(generation.tokens), generation.finish_reason) == (3, "stop")
        assert all(0 <= token < 10 for token in generation.tokens)


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"unknown engine 'vlm'; did you mean vllm\?"):
        _ = InferenceModelConfig(engine_type="vlm").traits


@pytest.mark.parametrize("engine_type", sorted(registered_engines()))
def test_the_traits_read_from_the_source_are_those_of_the_class(engine_type: str) -> None:
    read, engine = InferenceModelConfig(engine_type=engine_type).traits, registered_engines()[engine_type].load()
    assert read is not engine
    names = [name for name in vars(EngineTraits) if not name.startswith("_")]
    assert len(names) >= 8
    assert {name: getattr(read, name) for name in names} == {name: getattr(engine, name) for name in names}


def test_a_custom_engine_has_its_own_traits() -> None:
    assert InferenceModelConfig(engine_type=f"{__name__}.{Steady.__name__}").traits is Steady
    assert Steady.repeats_bits and not InferenceModelConfig(engine_type="vllm").traits.repeats_bits


class Steady(FakeEngine):
    repeats_bits = True


def test_traits_are_known_without_torch() -> None:
    code = (
        "import sys; from rftdask.config.schema.explorer import InferenceModelConfig as C, registered_engines as r; "
        "[C(engine_type=name).traits for name in r()]; "
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_fake_engine_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from rftdask.engines.fake import FakeEngine; FakeEngine(); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
