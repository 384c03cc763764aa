"""Algorithm types, advantages and policy losses of user code."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageFn as OurAdvantageFn
from rftdask.algorithm.advantages.base import AdvantageInputs, AdvantageResult, base_drops, result
from rftdask.algorithm.algorithm_type import AlgorithmType as OurAlgorithmType
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from rftdask.compat.trinity.experience import EID, Experience
from rftdask.compat.trinity.operators import named
from rftdask.compat.trinity.registry import Registry, Unsupported
from rftdask.config.schema.algorithm import registered_parts
from rftdask.errors import UserError

ALGORITHM_TYPE = Registry("algorithm", partial(registered_parts, "algorithm_type"))
ADVANTAGE_FN = Registry("advantage_fn", partial(registered_parts, "advantage_fn"))
POLICY_LOSS_FN = Registry("policy_loss_fn", partial(registered_parts, "policy_loss_fn"))
KL_FN, ENTROPY_LOSS_FN, SAMPLE_STRATEGY = (
    Unsupported(name) for name in ("kl_fn", "entropy_loss_fn", "sample_strategy")
)


class AlgorithmType(ABC):
    """Base of algorithm types."""

    use_critic: ClassVar[bool] = False
    use_reference: ClassVar[bool] = True
    compute_advantage_in_trainer: ClassVar[bool] = False
    can_balance_batch: ClassVar[bool] = True
    schema: ClassVar[str] = "experience"

    @classmethod
    @abstractmethod
    def default_config(cls) -> dict[str, Any]:
        """Return the parts that it chooses."""

    @classmethod  # noqa: B027 -- few types check anything
    def check_config(cls, config: Any) -> None:
        """Not called: rftdask checks configurations with its own rules."""

    @classmethod
    def __rftdask_part__(cls) -> type[OurAlgorithmType]:
        parts = {"advantage_fn": "ppo", "repeat_times": 1, **cls.default_config()}
        # A penalty is none by default in both.
        names = {key: value for key, value in parts.items() if key != "kl_penalty_fn"}
        if names.get("sample_strategy") == "warmup":
            names["sample_strategy"] = "default"
        body = {**names, "schema": cls.schema, "has_critic": cls.use_critic, "__module__": cls.__module__}
        return type(cls.__name__, (OurAlgorithmType,), body)


class AdvantageFn(ABC):
    """Base of advantage functions. Those on veRL's batches do not run here."""

    @abstractmethod
    def __call__(self, exps: Any, **kwargs: Any) -> Any:
        """Return (experiences, metrics)."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the default arguments."""
        return {}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """True if it works on veRL's batches."""
        return True

    @classmethod
    def __rftdask_part__(cls) -> type[OurAdvantageFn]:
        raise UserError(
            f"advantage function {cls.__name__} works on veRL's DataProto, which is not available here; derive it from "
            "GroupAdvantage, or from rftdask.algorithm.advantages.base.AdvantageFn (docs/extending.md)"
        )


class GroupAdvantage(AdvantageFn):
    """Base of advantages that compare the rollouts of a group."""

    @abstractmethod
    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Return the experiences by group."""

    @abstractmethod
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, Any]]:
        """Set `advantages` of a group's experiences. Experiences that are not returned are dropped."""

    def __call__(self, exps: list[Experience], **kwargs: Any) -> tuple[list[Experience], dict[str, Any]]:
        """Process all groups."""
        return self.process(exps)

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Process all groups. Metrics are means over them."""
        kept: list[Experience] = []
        values: dict[str, list[float]] = {}
        for group_id, group in self.group_experiences(exps).items():
            returned, metrics = self.calculate_group_advantage(group_id, group)
            kept += returned
            for key, value in (metrics or {}).items():
                values.setdefault(f"group_advantages/{key}/mean", []).append(float(value))
        return kept, {key: sum(numbers) / len(numbers) for key, numbers in values.items()}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """False: it works on experiences."""
        return False

    @classmethod
    def __rftdask_part__(cls) -> type[OurAdvantageFn]:
        user_class = cls

        class Adapted(OurAdvantageFn):
            def __init__(self, **arguments: Any) -> None:
                self._own = user_class(**{**user_class.default_args(), **arguments})

            def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
                """Pass rollouts as experiences of their lengths; each gets one number."""
                rows: dict[str, int] = {}
                exps: list[Experience] = []
                runs: dict[int, int] = {}
                for row in inputs.used_N.nonzero().flatten().tolist():
                    group = int(inputs.group_N[row])
                    runs[group] = runs.get(group, -1) + 1
                    length = 1 if inputs.lengths_N is None else max(1, int(inputs.lengths_N[row]))
                    eid = EID(task=group, run=runs[group])
                    reward = float(inputs.rewards_N[row])
                    exps.append(Experience(tokens=torch.zeros(length + 1, dtype=torch.int32), eid=eid, reward=reward))
                    rows[eid.uid] = row
                after, metrics = self._own.process(exps)
                advantages_N = torch.zeros_like(inputs.rewards_N, dtype=torch.float32)
                drops_N = base_drops(inputs)
                drops_N[list(rows.values())] = int(DropReason.LEFT_OUT)
                for experience in after:
                    row = rows[experience.eid.uid]
                    drops_N[row] = int(DropReason.KEPT)
                    advantages_N[row] = _one_number(user_class.__name__, experience)
                return result(inputs, advantages_N, metrics, drops_N)

        return named(Adapted, user_class)


def _one_number(name: str, experience: Experience) -> float:
    """Return the advantage of a rollout. Raises: ValueError: it has none, or its tokens have different ones."""
    if experience.advantages is None:
        raise ValueError(f"{name} set no advantages of an experience that it returned")
    values = torch.as_tensor(experience.advantages, dtype=torch.float32).flatten()
    if len(values) > 1 and experience.action_mask is not None:
        values = values[experience.action_mask]
    if len(values) == 0 or float(values.max() - values.min()) > 1e-6:
        raise ValueError(f"{name} gives the tokens of a rollout different advantages; here they have one")
    return float(values[0])


class PolicyLossFn(ABC):
    """Base of policy losses, called with tensors by the names of their arguments."""

    def __init__(self, backend: str = "verl") -> None:
        self.backend = backend

    @abstractmethod
    def __call__(self, logprob: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return (loss, metrics) of a micro-batch."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the default arguments."""
        return {}

    @classmethod
    def __rftdask_part__(cls) -> type[PolicyLoss]:
        own = cls
        parameters = inspect.signature(own.__call__).parameters
        names = [name for name, item in parameters.items() if name != "self" and item.kind is not item.VAR_KEYWORD]

        class Adapted(PolicyLoss):
            uses_reference = "ref_logprob" in names
            uses_advantages = "advantages" in names

            def __init__(self, **arguments: Any) -> None:
                taken = inspect.signature(own).parameters
                defaults = {key: value for key, value in own.default_args().items() if key in taken}
                self._own = own(**{**defaults, **arguments})

            def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
                """Return the number at each token, which is weighted by the tokens of a micro-batch."""
                given: Mapping[str, Any] = {
                    "logprob": inputs.policy_logprobs_BT,
                    "old_logprob": inputs.old_logprobs_BT,
                    "ref_logprob": inputs.ref_logprobs_BT,
                    "action_mask": inputs.loss_mask_BT,
                    "advantages": inputs.advantages_BT,
                }
                unknown = [n for n in names if n not in given and parameters[n].default is inspect.Parameter.empty]
                if unknown:
                    raise ValueError(f"{own.__name__} takes {', '.join(unknown)}, which is not available here")
                loss, metrics = self._own(**{name: given[name] for name in names if name in given})
                share = inputs.token_weights_BT.sum()
                weighted = {
                    key: torch.as_tensor(value, dtype=torch.float32).detach() * share for key, value in metrics.items()
                }
                return loss.expand_as(inputs.policy_logprobs_BT), weighted

        return named(Adapted, own, drop=("backend", "loss_agg_mode"))


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum where the mask is set."""
    return (values * mask).sum() if axis is None else (values * mask).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean where the mask is set; 0 if it is set nowhere."""
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def aggregate_loss(
    values: Tensor, mask: Tensor, loss_agg_mode: str = "token-mean", normalizer: float | None = None
) -> Tensor:
    """Return token losses as one number. Raises: ValueError: unknown mode."""
    if loss_agg_mode == "token-mean":
        return masked_mean(values, mask)
    if loss_agg_mode == "seq-mean-token-sum":
        return masked_sum(values, mask, -1).mean()
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(values, mask, -1).mean()
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return (masked_sum(values, mask, -1) / (normalizer or values.shape[-1])).mean()
    raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}")
