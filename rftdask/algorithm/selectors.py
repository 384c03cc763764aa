"""Selectors: the order in which an explore step takes the tasks of a training taskset. Knows no taskset and no step.

Without torch, which the process that schedules tasks does not load; selectors that learn need it and are in
learning_selectors.py. Invariant: an order is a function of its arguments, so a resumed run takes the same tasks.
"""

from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from rftdask.algorithm.checks import require
from rftdask.config import fill_from_environment
from rftdask.config.plugins import bind_arguments, parameters_of
from rftdask.config.schema.algorithm import load_part
from rftdask.config.schema.buffer import DataSelectorConfig
from rftdask.errors import DataError, UserError

Features: TypeAlias = npt.NDArray[np.float64]
Order: TypeAlias = npt.NDArray[np.int64]


class Selector:
    """Base of selectors. The constructor receives `data_selector.kwargs`, and `seed` if it accepts one.

    Class attributes are literals, so that a configuration can be checked without importing this module.
    """

    selector_name: ClassVar[str] = ""
    """Name in a configuration. A class without one is named by its class."""
    features: ClassVar[str] = ""
    """Meaning of the columns of `feature_keys`, for messages. "": no columns are read."""
    num_features: ClassVar[int | None] = None
    """Number of required columns, if any are read. None: one or more."""
    seeded: ClassVar[bool] = True
    """True if the order depends on `data_selector.seed`."""
    epoch_each_step: ClassVar[bool] = False
    """True if each explore step is a separate epoch, so that a task may repeat before all were taken. Such a selector
    applies to all tasksets or none."""
    learns: ClassVar[bool] = False
    """True if it chooses by the results of earlier steps: a `learning_selectors.LearningSelector`."""
    for_datasets: ClassVar[bool] = False
    """True if it may be used for a dataset to train on or evaluate, whose rows are shuffled if it is seeded."""

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """[N] rows of the taskset in the order of `epoch` (from 0), each once.

        Args:
            features_NF: [N, F] columns of `feature_keys`; F is 0 if `features` is "".
            random: generator seeded with `data_selector.seed`, the epoch and the number of the taskset.
        """
        raise NotImplementedError


class Sequential(Selector):
    """Rows as stored."""

    selector_name = "sequential"
    seeded = False
    for_datasets = True

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """0..N-1, without a draw."""
        return np.arange(len(features_NF), dtype=np.int64)


class Shuffle(Selector):
    """A new order in each epoch."""

    selector_name = "shuffle"
    for_datasets = True

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """Permutation drawn from `random`, which is seeded for each epoch."""
        # Sorted raw words: unlike Generator.permutation, their stream is guaranteed not to change between versions.
        return np.argsort(random.random_raw(len(features_NF)), kind="stable").astype(np.int64)


class Random(Shuffle):
    """A fresh draw without replacement in each step."""

    selector_name = "random"
    epoch_each_step = True


class EasyToHard(Selector):
    """Easy to hard, the same in each epoch: by the first feature, largest first; ties by the next feature, then the
    later row.
    """

    selector_name = "offline_easy2hard"
    features = "columns with the difficulty"
    seeded = False

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """Order without a draw. Raises: ValueError: no feature column."""
        require(features_NF.shape[1] > 0, "offline_easy2hard needs at least one feature per task")
        # lexsort sorts by its last key first and is stable, so rows that tie in all features are in reversed order.
        backward_N = np.arange(len(features_NF) - 1, -1, -1)
        order_N: Order = backward_N[np.lexsort(-features_NF[backward_N, ::-1].T)]
        return order_N


def make_selector(section: DataSelectorConfig, plugin_dirs: tuple[str, ...] = ()) -> Selector:
    """Selector of a section, with its arguments.

    Raises: UserError: unknown selector or argument. DataError: an argument is out of range.
    """
    part = load_part("selector", section.selector_type, plugin_dirs)
    if not (isinstance(part, type) and issubclass(part, Selector)):
        raise UserError(f"selector {section.selector_type!r} is not a subclass of {Selector.__module__}.Selector")
    # Only for selectors that accept it; `sequential` does not draw.
    seed = {"seed": section.seed} if "seed" in (parameters_of(part) or {}) else {}
    arguments = {**seed, **fill_from_environment(section.kwargs)}
    bind_arguments("data_selector.kwargs", part, arguments)
    try:
        return part(**arguments)
    except ValueError as error:
        raise DataError(f"data_selector.kwargs: {error}") from error
