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
    """Base of operators: experiences in, those that stay out, with their rewards."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> Any:
        """(experiences, metrics)."""

    def close(self) -> Any:  # noqa: B027 -- most have nothing to release
        """Release what it holds."""

    @classmethod
    def __rftdask_part__(cls) -> type[Operator]:
        return _operator(cls)


class ExperienceOperatorV1(ExperienceOperator):
    """The same, which awaits."""

    auxiliary_models: dict[Any, Any]

    def set_auxiliary_model(self, auxiliary_models: dict[Any, Any] | None = None) -> None:
        """Operators have no models here: an empty one."""
        self.auxiliary_models = auxiliary_models or {}

    async def prepare(self) -> None:
        """Called before the first `process`."""


def _operator(cls: type[ExperienceOperator]) -> type[Operator]:
    class Adapted(Operator):
        """Rows as experiences without tokens: reward, metrics and group are what an operator sees."""

        def __init__(self, **arguments: Any) -> None:
            self._own = cls(**arguments)
            self._is_prepared = False

        def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
            given = _as_experiences(table)
            after, metrics = self._process(list(given.values()))
            rows = {experience.eid.uid: row for row, experience in given.items()}
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

            found: tuple[list[Experience], dict[str, Any]] = asyncio.run(process())
            self._is_prepared = True
            return found

    return named(Adapted, cls)


def _as_experiences(table: ExperienceTable) -> dict[int, Experience]:
    """Row -> experience, of the rows that are kept."""
    runs: dict[int, int] = {}
    found: dict[int, Experience] = {}
    truncated = [False] * len(table.group_N) if table.truncated_N is None else table.truncated_N.tolist()
    for row in table.keep_N.nonzero().flatten().tolist():
        group = int(table.group_N[row])
        runs[group] = runs.get(group, -1) + 1
        stats = {key: float(value[row]) for key, value in table.stats.items() if not bool(torch.isnan(value[row]))}
        reward = float(table.rewards_N[row])
        found[row] = Experience(
            tokens=(0, 0),
            eid=EID(task=group, run=runs[group]),
            reward=None if reward != reward else reward,
            info=dict(stats),
            metrics=stats,
            truncate_status="response_truncated" if truncated[row] else None,
        )
    return found


def named(adapted: type[T], cls: type, drop: Sequence[str] = ()) -> type[T]:
    """`adapted` as what stands for the user's `cls`: with its name, its module and, but for `drop`, its arguments."""
    adapted.__name__ = adapted.__qualname__ = cls.__name__
    adapted.__module__ = cls.__module__
    signature = inspect.signature(cls)
    kept = [each for name, each in signature.parameters.items() if name not in drop]
    setattr(adapted, "__signature__", signature.replace(parameters=kept))  # noqa: B010 -- mypy knows no such attribute
    return adapted


class BaseSelector:
    """Base of selectors: indices of tasks, batch by batch. It is asked for whole epochs; `feedback` is not called."""

    def __init__(self, data_source: Any, config: DataSelectorConfig) -> None:
        self.data_source = data_source
        self.config = config

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> list[int]:
        """The next tasks."""
        raise NotImplementedError

    def feedback(self, indices: list[int], values: list[float]) -> None:
        """What came of tasks."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""

    @classmethod
    def __rftdask_part__(cls) -> type[Selector]:
        own = cls

        class Adapted(Selector):
            def __init__(self, seed: int = 42, **kwargs: Any) -> None:
                self._config = DataSelectorConfig(seed=seed, kwargs=kwargs)

            def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
                """The epoch's tasks, by a selector that has given those of the epochs before it."""
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
