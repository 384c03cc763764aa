"""Promises of make_algorithm: a type needs only its name, and every mistake is an error before anything starts."""

import ast
import dataclasses
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import rftdask.algorithm
from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.compose import BASES, build_algorithm, make_algorithm, make_part
from rftdask.config import load_config
from rftdask.config.plugins import accepts, load_plugin_folders
from rftdask.config.schema.algorithm import LABELS, AlgorithmConfig, old_names, registered_parts
from rftdask.errors import UserError
from tests.unit.algorithm import algorithm_cases
from tests.unit.algorithm.algorithm_cases import ADVANTAGE_FNS, ALGORITHMS, gradient, random_batch, with_weights

REFERENCE_TYPES = {
    # Groups have 8 rollouts here and 2 in the reference, where a group holds at most one success and one failure.
    # type: (critic, reference, repeat_times, advantage, loss, kl loss, sample strategy)
    "ppo": (True, True, 1, "ppo", "ppo", "k2", "default"),
    "grpo": (False, True, 8, "grpo", "ppo", "k2", "default"),
    "dapo": (False, False, 16, "grpo", "ppo", "none", "default"),
    "reinforceplusplus": (False, True, 8, "reinforceplusplus", "ppo", "k2", "default"),
    "rloo": (False, True, 8, "rloo", "ppo", "k2", "default"),
    "opmd": (False, True, 8, "opmd", "opmd", "k2", "default"),
    "asymre": (False, False, 8, "asymre", "opmd", "none", "default"),
    "topr": (False, True, 8, "reinforce", "topr", "k2", "default"),
    "cispo": (False, True, 8, "grpo", "cispo", "k2", "default"),
    "gspo": (False, True, 8, "grpo", "gspo", "k2", "default"),
    "sapo": (False, True, 8, "grpo", "sapo", "k2", "default"),
    "sppo": (False, False, 8, "opmd", "sppo", "none", "default"),
    "rec": (False, True, 8, "rec", "rec", "k2", "default"),
    "multi_step_grpo": (False, True, 8, "step_wise_grpo", "ppo", "k2", "default"),
    "gigpo": (False, True, 8, "gigpo", "ppo", "k2", "default"),
    "mix": (False, True, 8, "grpo", "mix", "k2", "mix"),
    "mix_chord": (False, True, 8, "grpo", "mix_chord", "k2", "mix"),
    "raft": (False, False, 8, "best_of_n", "sft", "none", "default"),
    "sft": (False, False, 1, None, "sft", "none", "default"),
    "cpt": (False, False, 1, None, "sft", "none", "default"),
    "dpo": (False, True, 2, None, "dpo", "none", "default"),
    "on_policy_distill": (False, False, 8, "on_policy_distill", "ppo", "none", "default"),
    "jsd": (False, False, 8, None, "jsd", "none", "default"),  # there an advantage of the sampled tokens
}


@pytest.mark.parametrize("name", sorted(REFERENCE_TYPES))
def test_types_are_composed_as_in_the_reference(name: str) -> None:
    critic, reference, repeat_times, advantage, loss, kl, strategy = REFERENCE_TYPES[name]
    algorithm = make_algorithm(name)
    assert (algorithm.use_critic, algorithm.use_reference, algorithm.repeat_times) == (critic, reference, repeat_times)
    assert type(algorithm.advantage_fn) is (
        type(None) if advantage is None else algorithm_cases.ADVANTAGE_FNS[advantage]
    )
    assert type(algorithm.policy_loss_fn) is algorithm_cases.POLICY_LOSS_FNS[loss]
    assert type(algorithm.kl_loss_fn) is algorithm_cases.KL_FNS[kl]
    assert algorithm.sample_strategy == strategy


def test_the_named_types_are_all_there() -> None:
    beyond = {"remax", "m2po", "dr_grpo", "drpo", "bnpo", "decoupled_ppo", "dppo", "vespo"}
    assert set(algorithm_cases.ALGORITHMS) == set(REFERENCE_TYPES) | beyond | {"kto", "orpo", "simpo", "reward_model"}


def test_gspo_keeps_the_aggregation_of_its_paper() -> None:
    assert make_algorithm("gspo").loss_agg_mode == "seq-mean-token-mean"
    assert make_algorithm("gspo", loss_agg_mode="token-mean").loss_agg_mode == "token-mean"


def test_partial_arguments_keep_the_other_defaults() -> None:
    algorithm = make_algorithm("dapo", policy_loss_fn_args={"clip_range_low": 0.1}, advantage_fn_args={"epsilon": 1e-4})
    loss: Any = algorithm.policy_loss_fn
    assert (loss.low, loss.high, loss.clip_ratio_c) == (0.1, 0.28, 3.0)
    advantage: Any = algorithm.advantage_fn
    assert (advantage.epsilon, advantage.std_threshold) == (1e-4, 0.0)


def test_the_aggregation_is_one_setting_in_two_places() -> None:
    inner = make_algorithm("grpo", policy_loss_fn_args={"loss_agg_mode": "seq-mean-token-sum"})
    assert inner.loss_agg_mode == make_algorithm("grpo", loss_agg_mode="seq-mean-token-sum").loss_agg_mode
    with pytest.raises(UserError, match="set it once"):
        make_algorithm("grpo", loss_agg_mode="token-mean", policy_loss_fn_args={"loss_agg_mode": "seq-mean-token-sum"})


def test_a_reference_is_needed_only_by_an_active_kl() -> None:
    assert not make_algorithm("grpo", kl_loss_fn="none").use_reference
    assert not make_algorithm("grpo", kl_loss_fn_args={"kl_coef": 0}).use_reference
    assert make_algorithm("sft", kl_loss_fn="k3").use_reference


def test_integers_are_accepted_for_floats() -> None:
    loss: Any = make_algorithm("ppo", policy_loss_fn_args={"clip_ratio_c": 4}).policy_loss_fn
    assert loss.clip_ratio_c == 4.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm_type": "gropo"}, r"unknown algorithm_type 'gropo'; did you mean grpo"),
        ({"algorithm_type": "grpo", "policy_loss_fn": "pp0"}, "unknown policy_loss_fn 'pp0'; did you mean ppo"),
        ({"algorithm_type": "grpo", "advantage_fn": "zzz"}, "unknown advantage_fn 'zzz'; there are asymre"),
        ({"algorithm_type": "grpo", "kl_loss_fn": "k9"}, "unknown kl_loss_fn 'k9'"),
        ({"algorithm_type": "grpo", "kl_penalty_fn": "k9"}, "unknown kl_penalty_fn 'k9'"),
        ({"algorithm_type": "grpo", "entropy_loss_fn": "dflt"}, "unknown entropy_loss_fn 'dflt'"),
        (
            {"algorithm_type": "grpo", "loss_agg_mode": "token_mean"},
            "loss_agg_mode is 'token_mean'; allowed: token-mean",
        ),
        (
            {"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_rangee": 0.1, "tau": 1}},
            r"'ppo'.clip_rangee: unknown argument; did you mean clip_range(.|\n)*'ppo'.tau: unknown argument",
        ),
        ({"algorithm_type": "grpo", "advantage_fn_args": {"std": "robust"}}, "std is 'robust'; allowed: sample"),
        (
            {"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_range": "0.2"}},
            "'ppo'.clip_range: '0.2' is not float",
        ),
        ({"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_range_low": "x"}}, "'x' is not float . None"),
        ({"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_ratio_c": 0.5}}, "clip_ratio_c must be > 1"),
        ({"algorithm_type": "grpo", "kl_loss_fn_args": {"adaptive": True}}, "adaptive needs target_kl and horizon"),
        ({"algorithm_type": "grpo", "advantage_fn": "ppo"}, "needs a critic and algorithm_type 'grpo' has none"),
        ({"algorithm_type": "sft", "advantage_fn": "grpo"}, "takes no advantages"),
        ({"algorithm_type": "sft", "policy_loss_fn": "ppo"}, "needs an advantage_fn; algorithm_type 'sft' has none"),
        ({"algorithm_type": "grpo", "policy_loss_fn": "dpo"}, "reads 'dpo' rows"),
        ({"algorithm_type": "dpo", "loss_agg_mode": "token-mean"}, "needs loss_agg_mode 'seq-mean-token-mean'"),
        ({"algorithm_type": "dpo", "kl_penalty_fn": "k1"}, "takes neither"),
        ({"algorithm_type": "reward_model", "kl_loss_fn": "k2"}, "which has no logprobs; remove kl_loss_fn"),
        ({"algorithm_type": "raft", "kl_penalty_fn": "k1"}, "use kl_loss_fn"),
        (
            {"algorithm_type": "grpo", "rollout_correction": {"method": "tis"}},
            "method is 'tis'; allowed: none, truncate",
        ),
        ({"algorithm_type": "grpo", "advantage_fn_args": {"duplicate_experiences": True}}, "train an experience twice"),
    ],
)
def test_a_mistake_is_an_error_with_a_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_algorithm(**given)


def test_deprecated_names_are_aliases_with_one_warning() -> None:
    with pytest.warns(FutureWarning, match="algorithm_type 'grpo_verl' is deprecated: it is 'grpo'"):
        assert make_algorithm("grpo_verl") == make_algorithm("grpo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_algorithm("grpo_verl")
    with pytest.warns(FutureWarning, match="advantage_fn 'opmd_verl'"):
        make_algorithm("grpo", advantage_fn="opmd_verl")


def test_batch_sizes_of_mix_are_ignored_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="'ngpus_trainer' is ignored"):
        make_algorithm("mix", policy_loss_fn_args={"ngpus_trainer": 8, "mu": 0.2})


def test_mu_of_chord_warms_up_and_decays() -> None:
    args = {"mu_warmup_steps": 10, "mu_decay_steps": 20, "mu_peak": 0.5, "mu_valley": 0.1}
    loss: Any = make_algorithm("mix_chord", policy_loss_fn_args=args).policy_loss_fn
    assert [loss.mu_at(step) for step in (0, 5, 10, 20, 30, 99)] == pytest.approx([0.0, 0.25, 0.5, 0.3, 0.1, 0.1])


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("advantage_fn", algorithm_cases.ADVANTAGE_FNS),
        ("policy_loss_fn", algorithm_cases.POLICY_LOSS_FNS),
        ("kl_loss_fn", algorithm_cases.KL_FNS),
        ("entropy_loss_fn", algorithm_cases.ENTROPY_FNS),
        ("operator", algorithm_cases.OPERATORS),
    ],
)
def test_every_part_is_a_documented_frozen_dataclass(key: str, table: dict[str, Any]) -> None:
    for name, cls in table.items():
        part = make_part(key, name, {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)})
        assert part == cls() and cls.__doc__
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.something = 1


def built(**section: Any) -> Algorithm:
    """Build the algorithm of a configuration as the trainer does; default: grpo without a KL."""
    tree = {"mode": "train", "model": {"model_path": "m", "max_model_len": 64}}
    return build_algorithm(load_config({**tree, "algorithm": {"kl_loss_fn": "none", **section}}))


def loss_of(**section: Any) -> float:
    """The loss of one row of two tokens: ratios 2 and 1/2, advantage 1, log p - log p_ref 1, entropies 1 and 3."""
    algorithm = built(**section)
    batch = algorithm_cases.from_ratios([2.0, 0.5], [1.0, 1.0], entropy_BT=algorithm_cases.rows([1.0, 3.0]))
    batch = dataclasses.replace(batch, ref_logprobs_BT=batch.policy_logprobs_BT.detach() - 1.0)
    return algorithm.compute_loss(algorithm_cases.with_weights(batch, algorithm))[0].item()


@pytest.mark.parametrize(
    ("section", "loss"),
    [
        ({}, -(1.2 + 0.5) / 2),
        ({"algorithm_type": "gspo"}, -1.0),  # the ratio of the row is 1
        ({"policy_loss_fn": "sft"}, 1.0),
        ({"policy_loss_fn_args": {"clip_range": 0.5}}, -(1.5 + 0.5) / 2),
        ({"loss_agg_mode": "seq-mean-token-sum"}, -(1.2 + 0.5)),
        ({"kl_loss_fn": "k1"}, -0.85 + 0.001),
        ({"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.5}}, -0.85 + 0.5 * 0.5),
        ({"entropy_loss_fn_args": {"entropy_coef": 0.1}}, -0.85 - 0.1 * 2),
        ({"entropy_loss_fn": "none", "entropy_loss_fn_args": {"entropy_coef": 0.1}}, -0.85),
        ({"rollout_correction": {"method": "mask", "high": 1.5}}, -(0.0 * 1.2 + 0.5 * 0.5) / 2),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_key_of_a_part_reaches_the_loss(section: dict[str, Any], loss: float) -> None:
    assert loss_of(**section) == pytest.approx(loss, abs=1e-9)


@pytest.mark.parametrize(
    ("section", "advantages"),
    [
        ({}, [0.5**0.5, -(0.5**0.5)]),
        ({"advantage_fn": "reinforce"}, [1.0, 0.0]),
        ({"advantage_fn_args": {"std": "none"}}, [0.5, -0.5]),
        # The first rollout pays half a nat of its reward.
        ({"advantage_fn": "reinforce", "kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.5}}, [0.5, 0.0]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_key_of_a_part_reaches_the_advantages(section: dict[str, Any], advantages: list[float]) -> None:
    batch = AdvantageInputs(
        rewards_N=torch.tensor([1.0, 0.0]),
        group_N=torch.tensor([0, 0]),
        tokens_N=torch.ones(2, dtype=torch.int64),
        loss_mask_Q=torch.ones(2, dtype=torch.bool),
        rollout_logprobs_Q=torch.tensor([-1.0, -1.0]),
        ref_logprobs_Q=torch.tensor([-2.0, -1.0]),
    )
    assert built(**section).compute_advantages(batch).advantages_N.tolist() == pytest.approx(advantages, abs=1e-5)


ROOT = Path(rftdask.algorithm.__file__).parent


def test_names_and_arguments_are_read_without_torch() -> None:
    code = (
        "import sys; from rftdask.config.schema.algorithm import LABELS, registered_parts;"
        "print([len(registered_parts(key)) > 0 for key in LABELS], 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"{[True] * len(LABELS)} False"


@pytest.mark.parametrize("key", sorted(BASES))
def test_source_reading_matches_the_classes(key: str) -> None:
    for name, part in registered_parts(key).items():
        cls = part.load()
        assert issubclass(cls, BASES[key]) and getattr(cls, LABELS[key]) == name
        if dataclasses.is_dataclass(cls):
            assert part.parameters is not None
            assert list(part.parameters) == [field.name for field in dataclasses.fields(cls)]
        for trait, value in part.traits.items():
            assert getattr(cls, trait) == value, (name, trait)


def test_class_names_are_unique_below_the_package() -> None:
    """They are the names of bases when files are read, and of parts in an error."""
    trees = [ast.parse(file.read_text()) for file in ROOT.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_facts_match_the_composed_algorithm(name: str) -> None:
    algorithm = make_algorithm(name)
    advantage = algorithm.advantage_fn
    section = AlgorithmConfig(algorithm_type=name)
    assert section.schema_type == algorithm.schema
    assert section.usual_repeat_times == algorithm.repeat_times
    assert section.usual_sample_strategy == algorithm.sample_strategy
    assert section.trains_critic == algorithm.use_critic
    assert section.compares_reference == algorithm.use_reference
    assert section.needs_teacher == algorithm.use_teacher
    assert section.compares_groups == (advantage is not None and advantage.uses_groups)


def test_needs_of_advantages_are_read_from_source() -> None:
    for name, cls in ADVANTAGE_FNS.items():
        section = AlgorithmConfig(algorithm_type="grpo", advantage_fn=name)
        assert section.needs_teacher == ("teacher_logprobs_Q" in cls.needs)
        assert section.greedy_baseline == ("baseline_rewards_N" in cls.needs)
    assert AlgorithmConfig(algorithm_type="jsd").needs_teacher
    assert AlgorithmConfig(algorithm_type="remax").greedy_baseline
    assert not AlgorithmConfig(algorithm_type="sft").needs_teacher
    assert AlgorithmConfig(algorithm_type="sft", policy_loss_fn="jsd").needs_teacher


def test_old_names_map_to_existing_names() -> None:
    twins = {"grpo_verl": "grpo", "opmd_verl": "opmd", "asymre_verl": "asymre"}
    assert old_names("algorithm_type") == old_names("advantage_fn") == twins


def test_no_gradient_is_written_by_hand() -> None:
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        assert "autograd.Function" not in text and "autograd.grad(" not in text and "save_for_backward" not in text, (
            file
        )


def test_configurable_aggregations_are_the_implemented_ones() -> None:
    annotation = AlgorithmConfig.model_fields["loss_agg_mode"].annotation
    assert set(get_args(get_args(annotation)[0])) == set(AGGREGATIONS)


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


@pytest.mark.parametrize("key", BASES)
def test_values_are_refused_without_the_module_of_a_part(key: str) -> None:
    """A configuration is checked without torch, by the rules in the source of each class."""
    # The rules of data_juicer read files.
    for name, part in (item for item in registered_parts(key).items() if item[0] != "data_juicer"):
        for argument, parameter in (part.parameters or {}).items():
            for value in (-1, 0, 2, 30.0, "other"):
                if accepts(parameter.annotation, value):
                    try:
                        part.load()(**{argument: value})
                        expected = None
                    except ValueError as error:
                        expected = str(error)
                    except TypeError:  # it needs other arguments as well
                        continue
                    assert part.refusal({argument: value}) == expected, (name, argument, value)
