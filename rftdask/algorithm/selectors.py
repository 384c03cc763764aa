"""Selectors: the order in which an explore step takes the tasks of a training taskset. Knows no taskset and no step.

Without torch, for the process that hands out tasks does without it: selectors that learn, which need it, are in
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
    """Base of selectors; the arguments of the constructor are `data_selector.kwargs`, and `seed` if it takes one.

    Class attributes are literals: a configuration is checked by them without importing this.
    """

    selector_name: ClassVar[str] = ""
    """Name in a configuration. A class without one is named by its class."""
    features: ClassVar[str] = ""
    """What the columns of `feature_keys` hold, in messages; "": none are read."""
    num_features: ClassVar[int | None] = None
    """Columns that it needs, if it reads some; None: one or more."""
    seeded: ClassVar[bool] = True
    """Whether the order depends on `data_selector.seed`."""
    epoch_each_step: ClassVar[bool] = False
    """Each explore step opens an epoch of its own, so that a task may come again before all were taken. Such a selector
    is for all tasksets or none."""
    learns: ClassVar[bool] = False
    """It chooses by the results of earlier steps: a `learning_selectors.LearningSelector`."""
    for_datasets: ClassVar[bool] = False
    """It may stand beside a dataset that is trained on or evaluated, whose rows are shuffled if it is seeded."""

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """[N] rows of the taskset, each once, as `epoch` (from 0) takes them.

        Args:
            features_NF: [N, F], the columns of `feature_keys`; F is 0 where `features` is "".
            random: seeded by `data_selector.seed`, the epoch and the taskset's number.
        """
        raise NotImplementedError


class Sequential(Selector):
    """Rows as stored."""

    selector_name = "sequential"
    seeded = False
    for_datasets = True

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """0..N-1; draws nothing."""
        return np.arange(len(features_NF), dtype=np.int64)


class Shuffle(Selector):
    """A new order in each epoch."""

    selector_name = "shuffle"
    for_datasets = True

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """A permutation drawn from `random`, which is seeded anew for each epoch."""
        # Raw words, sorted: unlike Generator.permutation, their stream is promised not to change with the version.
        return np.argsort(random.random_raw(len(features_NF)), kind="stable").astype(np.int64)


class Random(Shuffle):
    """A fresh draw without replacement in each step."""

    selector_name = "random"
    epoch_each_step = True


class EasyToHard(Selector):
    """From easy to hard, the same in each epoch: by the first feature, largest first, ties by the next, then the later
    row.
    """

    selector_name = "offline_easy2hard"
    features = "columns that tell the difficulty"
    seeded = False

    def order(self, features_NF: Features, epoch: int, random: np.random.BitGenerator) -> Order:
        """Draws nothing. Raises: ValueError: there is no feature column."""
        require(features_NF.shape[1] > 0, "offline_easy2hard needs at least one feature per task")
        # lexsort sorts by its last key first, and is stable: rows that tie in all features come in reversed order.
        backward_N = np.arange(len(features_NF) - 1, -1, -1)
        order_N: Order = backward_N[np.lexsort(-features_NF[backward_N, ::-1].T)]
        return order_N


def make_selector(section: DataSelectorConfig, plugin_dirs: tuple[str, ...] = ()) -> Selector:
    """The selector that a section names, with its arguments.

    Raises: UserError: no such selector, or an argument that it does not take. DataError: one is out of range.
    """
    part = load_part("selector", section.selector_type, plugin_dirs)
    if not (isinstance(part, type) and issubclass(part, Selector)):
        raise UserError(f"selector {section.selector_type!r} is no subclass of {Selector.__module__}.Selector")
    # Only to one that takes it: `sequential` has nothing to draw.
    seed = {"seed": section.seed} if "seed" in (parameters_of(part) or {}) else {}
    arguments = {**seed, **fill_from_environment(section.kwargs)}
    bind_arguments("data_selector.kwargs", part, arguments)
    try:
        return part(**arguments)
    except ValueError as error:
        raise DataError(f"data_selector.kwargs: {error}") from error
