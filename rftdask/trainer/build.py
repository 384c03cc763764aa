"""Recipe: from the config to the algorithm, what it drops, and the rows it learns from. Built before anything starts
(to check it) and again by the trainer's ranks.
"""

from __future__ import annotations

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.dataset_source import Demonstrations, ReadRows, RowOrder
from rftdask.buffer.batches.operator_pipeline import operators_of
from rftdask.config import Config
from rftdask.config.schema.buffer import ExperienceBufferConfig
from rftdask.data.datasets import Dataset, open_dataset
from rftdask.data.supervised import PreferenceRows, SftRows, TextRows
from rftdask.data.tokenizer import Tokenizer
from rftdask.errors import UserError
from rftdask.trainer.batch_filters import AlgorithmFilter

_PARTS = ("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn")


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of the config. Raises: UserError: parts that do not exist, do not go together or cannot be fed."""
    section = config.algorithm
    choices = {name: getattr(section, name) for part in _PARTS for name in (part, f"{part}_args")}
    try:
        algorithm = make_algorithm(
            section.algorithm_type,
            loss_agg_mode=section.loss_agg_mode,
            rollout_correction=section.rollout_correction,
            plugin_dirs=config.explorer.plugin_dirs,
            **choices,
        )
    except UserError as error:
        raise UserError(f"algorithm: {error}") from error
    return algorithm


def batch_filter_of(config: Config, algorithm: Algorithm) -> AlgorithmFilter:
    """What is dropped when a batch is formed."""
    baseline = config.algorithm.repeat_times if config.algorithm.greedy_baseline else None
    at_commit = config.data_processor.experience_pipeline.stage == "commit"  # then the explorer has run them
    return AlgorithmFilter(algorithm, [] if at_commit else operators_of(config), baseline)


def reader_of(
    section: ExperienceBufferConfig, schema: str, config: Config, tokenizer: Tokenizer
) -> tuple[Dataset, ReadRows]:
    """A dataset and how its rows become sequences: one each for "sft" and "cpt", two for "dpo".

    Raises: DataError: there is no such dataset, or it lacks a column.
    """
    dataset = open_dataset(
        section.path or "", split=section.split, subset_name=section.subset_name, table=section.table
    )
    kind = {"cpt": TextRows, "dpo": PreferenceRows}.get(schema, SftRows)
    return dataset, kind(dataset, tokenizer, section.format, config.model.max_model_len).read


def demonstrations_of(config: Config, tokenizer: Tokenizer) -> Demonstrations | None:
    """The demonstrations in every batch of sample strategy mix. Raises: DataError."""
    count = config.num_demonstrations
    if not count:
        return None
    section = config.buffer.trainer_input.auxiliary_buffers[config.demonstrations]
    dataset, read = reader_of(section, "sft", config, tokenizer)
    return Demonstrations(read, dataset.fingerprint, RowOrder(len(dataset), order_seed(section)), count)


def order_seed(section: ExperienceBufferConfig) -> int | None:
    """Seed of the order of a dataset's rows; None: as stored."""
    selector = section.data_selector
    return None if selector.selector_type == "sequential" else selector.seed
