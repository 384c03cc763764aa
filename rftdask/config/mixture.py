"""Sample strategy mix: how many rows of a train batch are demonstrations, and where they come from. Pure arithmetic."""

import math

from rftdask.config.schema.run import Config

EXPERT_RATIO = 0.5
"""Share of demonstrations in a batch of strategy mix, where sample_strategy_args say nothing."""
EXPERT_BUFFER = "sft_dataset"
"""Auxiliary buffer they are in, where there is one of this name and sample_strategy_args name no other."""


def is_share(value: object) -> bool:
    """Whether it is a number of [0, 1)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def expert_ratio(config: Config) -> float:
    """Share of demonstrations in a batch of strategy mix; the default where it is no number of [0, 1)."""
    ratio = (config.algorithm.sample_strategy_args or {}).get("expert_data_ratio", EXPERT_RATIO)
    return float(ratio) if is_share(ratio) else EXPERT_RATIO


def with_experts(rollouts: int, ratio: float) -> int:
    """The smallest batch that holds so many rollouts beside its share of demonstrations."""
    size = math.floor(rollouts / (1.0 - ratio))
    while size - _experts_of(size, ratio) < rollouts:
        size += 1
    return size


def _experts_of(size: int, ratio: float) -> int:
    return math.ceil(ratio * size - 1e-9)


def num_experts(config: Config) -> int:
    """Demonstrations in one train batch; 0 unless the sample strategy is mix."""
    if config.algorithm.sample_strategy != "mix":
        return 0
    return _experts_of(config.buffer.train_batch_size, expert_ratio(config))


def num_own_rollouts(config: Config) -> int:
    """Rollouts in one train batch."""
    return config.buffer.train_batch_size - num_experts(config)


def demonstrations(config: Config) -> str:
    """Name of the auxiliary buffer that strategy mix takes its demonstrations from: as given, else `EXPERT_BUFFER` if
    there is one, else the first there is."""
    buffers = config.buffer.trainer_input.auxiliary_buffers
    default = EXPERT_BUFFER if EXPERT_BUFFER in buffers else next(iter(buffers), EXPERT_BUFFER)
    return str((config.algorithm.sample_strategy_args or {}).get("sft_dataset_name", default))
