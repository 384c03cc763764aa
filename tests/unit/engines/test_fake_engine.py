from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftdask.engines import make_engine
from rftdask.engines.base import Engine, GenerateRequest, SamplingParams
from rftdask.engines.fake import FakeEngine
from rftdask.errors import UserError
from tests.unit.engines.engine_contract import ContinuousContract, EngineContract


class TestFakeEngine(EngineContract, ContinuousContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return make_engine("fake", "no/such/model")

    @pytest.fixture
    def weights_file(self, tmp_path: Path) -> Path:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"")
        return file

    def test_a_response_that_is_not_cut_off_says_stop(self) -> None:
        engine = FakeEngine(tokens_per_request=3, vocab_size=10)
        [generation] = engine.generate([GenerateRequest((1,), SamplingParams(max_tokens=3), seed=0)])
        assert (len(generation.tokens), generation.finish_reason) == (3, "stop")
        assert all(0 <= token < 10 for token in generation.tokens)


def test_an_unknown_engine_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(UserError, match="'vlm' is unknown; choose one of: fake, transformers"):
        make_engine("vlm", "model")


def test_the_fake_engine_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from rftdask.engines import make_engine; make_engine('fake', ''); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
