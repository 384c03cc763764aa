"""Experience operators and selectors of user code."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.operators import ExperienceTable, Operator
from rftdask.algorithm.selectors import Features, Order, Selector
from rftdask.compat.trinity.experience import EID, Experience
from rftdask.compat.trinity.registry import Registry
from rftdask.compat.trinity.task import DataSelectorConfig
from rftdask.config.schema.algorithm import registered_parts

T = TypeVar("T")

EXPERIENCE_OPERATORS = Registry("experience_operators", partial(registered_parts, "operator"))
SELECTORS = Registry("selectors", partial(registered_parts, "selector"))


class ExperienceOperator(ABC):
    """Base of operators, which filter experiences and set their rewards."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> Any:
        """Return (experiences, metrics)."""

    def close(self) -> Any:  # noqa: B027 -- most have nothing to release
        """Release resources."""

    @classmethod
    def __rftdask_part__(cls) -> type[Operator]:
        return _operator(cls)


class ExperienceOperatorV1(ExperienceOperator):
    """Base of asynchronous operators."""

    auxiliary_models: dict[Any, Any]

    def set_auxiliary_model(self, auxiliary_models: dict[Any, Any] | None = None) -> None:
        """Called with an empty dict: operators have no models here."""
        self.auxiliary_models = auxiliary_models or {}

    async def prepare(self) -> None:
        """Called before the first `process`."""


def _operator(cls: type[ExperienceOperator]) -> type[Operator]:
    class Adapted(Operator):
        """Passes rows as experiences without tokens, with reward, metrics and group."""

        def __init__(self, **arguments: Any) -> None:
            self._own = cls(**arguments)
            self._is_prepared = False

        def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
            before = _as_experiences(table)
            after, metrics = self._process(list(before.values()))
            rows = {experience.eid.uid: row for row, experience in before.items()}
            if added := [experience.eid.uid for experience in after if experience.eid.uid not in rows]:
                raise ValueError(f"{cls.__name__} added {len(added)} experiences; an operator may drop or reward rows")
            rewards_N = table.rewards_N.clone()
            stays_N = torch.zeros_like(table.keep_N)
            for experience in after:
                row = rows[experience.eid.uid]
                stays_N[row] = True
                rewards_N[row] = float("nan") if experience.reward is None else float(experience.reward)
            table, dropped = replace(table, rewards_N=rewards_N).dropping(~stays_N, DropReason.LEFT_OUT)
            numbers = {key: float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)}
            return table, {**numbers, **dropped}

        def close(self) -> None:
            """See Operator."""
            self._own.close()

        def _process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
            own = self._own
            if not isinstance(own, ExperienceOperatorV1):
                return own.process(exps)  # type: ignore[no-any-return]

            async def process() -> Any:
                if not self._is_prepared:
                    own.set_auxiliary_model({})
                    await own.prepare()
                return await own.process(exps)

            result: tuple[list[Experience], dict[str, Any]] = asyncio.run(process())
            self._is_prepared = True
            return result

    return named(Adapted, cls)


def _as_experiences(table: ExperienceTable) -> dict[int, Experience]:
    """Return row -> experience, for the rows that are kept."""
    runs: dict[int, int] = {}
    experiences: dict[int, Experience] = {}
    truncated = [False] * len(table.group_N) if table.truncated_N is None else table.truncated_N.tolist()
    for row in table.keep_N.nonzero().flatten().tolist():
        group = int(table.group_N[row])
        runs[group] = runs.get(group, -1) + 1
        stats = {key: float(value[row]) for key, value in table.stats.items() if not bool(torch.isnan(value[row]))}
        reward = float(table.rewards_N[row])
        experiences[row] = Experience(
            tokens=(0, 0),
            eid=EID(task=group, run=runs[group]),
            reward=None if reward != reward else reward,
            info=dict(stats),
            metrics=stats,
            truncate_status="response_truncated" if truncated[row] else None,
        )
    return experiences


def named(adapted: type[T], cls: type, drop: Sequence[str] = ()) -> type[T]:
    """Give `adapted` the name, the module and the arguments, without `drop`, of the user's `cls`."""
    adapted.__name__ = adapted.__qualname__ = cls.__name__
    adapted.__module__ = cls.__module__
    signature = inspect.signature(cls)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in drop]
    setattr(adapted, "__signature__", signature.replace(parameters=kept))  # noqa: B010 -- mypy knows no such attribute
    return adapted


class BaseSelector:
    """Base of selectors, which return indices of tasks in batches. Here a batch is an epoch, and `feedback` is not
    called."""

    def __init__(self, data_source: Any, config: DataSelectorConfig) -> None:
        self.data_source = data_source
        self.config = config

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> list[int]:
        """Return the next tasks."""
        raise NotImplementedError

    def feedback(self, indices: list[int], values: list[float]) -> None:
        """Take the results of tasks. Not called."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""

    @classmethod
    def __rftdask_part__(cls) -> type[Selector]:
        own = cls

        class Adapted(Selector):
            def __init__(self, seed: int = 42, **kwargs: Any) -> None:
                self._config = DataSelectorConfig(seed=seed, kwargs=kwargs)

            def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
                """Return the epoch's tasks, from a new selector that first returns the epochs before."""
                size = len(features_NF)
                selector = own(SimpleNamespace(dataset_size=size, dataset=None), self._config)
                for _ in range(epoch):
                    selector.get_indices(size)
                order = np.asarray(selector.get_indices(size), np.int64)
                if sorted(order.tolist()) != list(range(size)):
                    raise ValueError(f"{own.__name__} does not give each of {size} tasks once an epoch")
                return order

        Adapted.__name__ = Adapted.__qualname__ = own.__name__
        Adapted.__module__ = own.__module__
        return Adapted
