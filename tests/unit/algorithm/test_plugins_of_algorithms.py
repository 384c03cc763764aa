"""Promises of custom algorithms: one file, named by its path or by a plug-in folder, checked before it runs."""

import sys
from collections.abc import Iterator

import pytest
import torch

from rftdask.algorithm.compose import make_algorithm, make_part
from rftdask.config.plugins import load_plugin_folders
from rftdask.errors import UserError
from tests.unit.algorithm.algorithm_cases import gradient, random_batch, with_weights

SOURCE = '''
from dataclasses import dataclass

import torch

from rftdask.algorithm.advantages.base import AdvantageFn, result
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.kl import KlFn
from rftdask.algorithm.losses.base import PolicyLoss
from rftdask.algorithm.operators import Operator


@dataclass(frozen=True)
class SquaredRatio(PolicyLoss):
    """-A r^2 / 2, as an example."""

    scale: float = 1.0

    def __call__(self, inputs):
        return -self.scale * inputs.advantages() * inputs.log_ratio().exp().square() / 2, {}


@dataclass(frozen=True)
class Sign(AdvantageFn):
    threshold: float = 0.5
    uses_groups = False

    def compute(self, inputs):
        return result(inputs, (inputs.rewards_N - self.threshold).sign(), {})


@dataclass(frozen=True)
class Cubic(KlFn):
    def estimate(self, difference, policy_logprobs, old_logprobs):
        return difference.abs() ** 3


class KeepAll(Operator):
    def __call__(self, table):
        return table, {}


class Squared(AlgorithmType):
    """An algorithm of one file."""

    advantage_fn = "Sign"
    policy_loss_fn = "SquaredRatio"
    policy_loss_fn_args = {"scale": 2.0}
    kl_loss_fn = "none"


class Unrelated:
    pass
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("plugins")
    (path / "squared_ratio_plugin.py").write_text(SOURCE)
    before = list(sys.path)
    load_plugin_folders([str(path)])
    yield str(path)
    sys.path[:] = before


def test_an_algorithm_in_one_file_is_named_by_its_class(folder: str) -> None:
    algorithm = make_algorithm("Squared", kl_loss_fn="Cubic", kl_loss_fn_args={"kl_coef": 0.5}, plugin_dirs=[folder])
    assert (algorithm.name, algorithm.repeat_times) == ("Squared", 8)
    assert type(algorithm.advantage_fn).__name__ == "Sign" and algorithm.policy_loss_fn.scale == 2.0  # type: ignore[attr-defined]
    batch = with_weights(random_batch(0), algorithm)
    loss, grad = gradient(batch, algorithm)
    assert torch.isfinite(loss) and grad.abs().sum() > 0


def test_a_part_is_named_by_its_path(folder: str) -> None:
    algorithm = make_algorithm("grpo", policy_loss_fn="squared_ratio_plugin.SquaredRatio", kl_loss_fn="none")
    same = make_algorithm("grpo", policy_loss_fn="SquaredRatio", kl_loss_fn="none", plugin_dirs=[folder])
    assert algorithm == same
    assert type(make_part("operator", "squared_ratio_plugin.KeepAll")).__name__ == "KeepAll"


@pytest.mark.parametrize(
    ("key", "name", "args", "message"),
    [
        ("policy_loss_fn", "squared_ratio_plugin.SquaredRation", {}, "no 'SquaredRation'; did you mean SquaredRatio"),
        ("policy_loss_fn", "SquaredRatio", {"scael": 1.0}, "unknown argument; did you mean scale"),
        ("policy_loss_fn", "SquaredRatio", {"scale": "x"}, "'x' is not float"),
        ("policy_loss_fn", "Unrelated", {}, "not a subclass of rftdask.algorithm.losses.base.PolicyLoss"),
        ("advantage_fn", "SquaredRatio", {}, "not a subclass of rftdask.algorithm.advantages.base.AdvantageFn"),
    ],
)
def test_a_mistake_in_a_plugin_is_an_error(
    folder: str, key: str, name: str, args: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_part(key, name, args, [folder])
