"""Rank: the child process of one trainer rank. It builds the trainer's parts from the config and runs its loop.

It reports to its supervisor by events. It ends with `Ended`, or with an error that its supervisor forwards.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.compose import build_algorithm
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.operators import MaskResponseTruncated, Operator, RewardShapingMapper
from rftdask.buffer.batches.backpressure import unread_limit
from rftdask.buffer.batches.batch import (
    SupervisedRow,
    TrainingBatch,
    batch_from_table,
    column_of,
    numbers_of,
    supervised_batch,
)
from rftdask.buffer.batches.ledger import Ledger, lineage_of, parent_storage, read_parent
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.operator_pipeline import operators_of, run_pipeline
from rftdask.buffer.batches.replay_priority import make_replay
from rftdask.buffer.batches.selection import SampleRule, make_sample_strategy
from rftdask.buffer.batches.source import (
    BASELINE,
    BatchFilter,
    BatchSource,
    DatasetSource,
    Demonstrations,
    ReplayedSource,
    RowOrder,
    with_rewards,
)
from rftdask.buffer.log import open_log
from rftdask.config import Config, load_config
from rftdask.config.plugins import find_part, trait
from rftdask.config.schema.buffer import ExperienceBufferConfig
from rftdask.config.schema.trainer import registered_train_engines
from rftdask.data.datasets import Dataset, open_dataset
from rftdask.data.supervised import make_rows
from rftdask.data.tokenizer import load_tokenizer
from rftdask.errors import DataError
from rftdask.monitor.events import CODEC, Alive, Event
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.child import Channel
from rftdask.processes.dask_task import host_of
from rftdask.processes.device_lock import DeviceLock
from rftdask.processes.gpus import out_of_memory, set_device, use_device
from rftdask.run.input_fingerprints import accepted_changes
from rftdask.run.run_folder import STOP_FILE
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import WHOLE_FILE, read_requested_version
from rftdask.synchronizer.styles import SyncStyle, make_sync_rules
from rftdask.synchronizer.transports.group_broadcast import RendezvousServer
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.engines.micro_batches import DeviceBatch
from rftdask.trainer.process_ranks import ProcessRanks, all_ranks, lost_peer
from rftdask.trainer.trainer import Trainer, acquire_device

log = logging.getLogger(__name__)

_WEIGHTS_TO_KEEP = 8
"""Published versions kept by a trainer whose explorers are other runs of `rftdask`; enough for a slow one."""
_RENDEZVOUS_TIMEOUT_S = 120
"""Seconds for all ranks to connect. They import torch first, which takes long on a busy machine."""
_COLLECTIVE_TIMEOUT_S = 1800
"""Seconds for a rank to join a collective call. A rank that died is noticed at once; this limit is for one that hangs,
and exceeds the time that a rank may be busy, for example writing weights. Ranks do not wait for data: meanwhile rank 0
sends a message several times a second.
"""
NO_BASELINE = "no_baseline"
"""Drop reason of rollouts whose greedy sibling failed."""


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry point of the child process: connect the ranks, build the trainer, and run it.

    Args: spec: the fields of `gang.RankSpec`.
    Raises: PeerLostError: another rank does not answer; errors of the trainer.
    """
    # Before any tensor is created: by default torch uses all cores in every rank.
    torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
    config = load_config(spec["config"], was_checked=True)
    rank, size = spec["rank"], spec["world_size"]
    shares_as = "rank-" * bool(config.cluster.colocate)
    device = use_device(shares_as=shares_as) if config.trainer.has_model else "cpu"
    if device == "cuda":
        set_device()
    trainer: Trainer | None = None
    try:
        dist.init_process_group(
            # Small messages always go over the CPU.
            backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=rendezvous_store(spec["rendezvous"], rank, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
        )
        storage = open_storage(spec["url"])

        def emit(event: Event) -> None:
            channel.send(CODEC.encode(event))

        device_lock, timeout_s = DeviceLock.from_environment(exclusive=True), float(config.synchronizer.sync_timeout)
        if device_lock is not None:  # before a model is loaded onto the device
            acquire_device(device_lock, all_ranks(), timeout_s, lambda: emit(Alive()))
        with MetricsWriter(storage, "trainer") as metrics:
            trainer = build_trainer(config, storage, spec["total_steps"], metrics, emit, spec["address"])
            trainer.device_lock, trainer.device_timeout_s = device_lock, timeout_s
            ended = trainer.run()
    except (RuntimeError, MemoryError) as error:
        doing = "the trainer loads its model" if trainer is None else trainer.doing
        if (memory := out_of_memory(error, doing, config.trainer_memory_keys())) is not None:
            raise memory from error
        if not isinstance(error, RuntimeError):
            raise
        # torch raises a bare RuntimeError if a peer died; as a PeerLostError it does not count as the cause.
        lost = lost_peer(error)
        if lost is None:
            raise
        raise lost from error
    channel.send(CODEC.encode(ended))
    # The process group is not destroyed: that would wait for ranks that may be gone, and the process ends anyway.


def rendezvous_store(rendezvous: str, rank: int, size: int) -> Any:
    """Return the store by which ranks find each other, as private as possible: it has no authentication."""
    # torch exports its stores at run time only, and their module is private.
    stores: Any = dist
    if size == 1:
        return stores.HashStore()
    timeout = timedelta(seconds=_RENDEZVOUS_TIMEOUT_S)
    # On one machine a private folder is used instead of a port that others could reach.
    if os.path.isabs(rendezvous):
        store = stores.FileStore(os.path.join(rendezvous, "store"), size)
        store.set_timeout(timeout)
        return store
    host, _, port = rendezvous.rpartition(":")
    listening = {}
    if rank == 0:  # otherwise torch would listen on all interfaces
        server = socket.create_server((host, int(port)), family=socket.getaddrinfo(host, None)[0][0])
        listening = {"master_listen_fd": server.detach()}
    return stores.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout, **listening)


def build_trainer(
    config: Config,
    storage: Storage,
    total_steps: int | None,
    metrics: MetricsWriter,
    emit: Callable[[Event], None],
    address: str = "",
) -> Trainer:
    """Build the trainer of this rank, and load its models. total_steps, address: as in `gang.RankSpec`.

    Raises: UserError, DataError.
    """
    ranks = all_ranks()
    lineage, parent = lineage_of(storage), read_parent(storage)
    # First, so that an inconsistent algorithm is reported before any model is loaded.
    algorithm = build_algorithm(config)
    limit = config.train_step_limit(total_steps)
    planned = None if parent is None else parent.schedule_steps  # a replay has its parent's learning rates
    registered, folders = registered_train_engines(), config.explorer.plugin_dirs
    engine = find_part("trainer engine", config.trainer.trainer_type, registered, folders)
    # The threads that save, publish and prefetch communicate while the ranks train, hence groups of their own.
    timeout = timedelta(seconds=_COLLECTIVE_TIMEOUT_S)
    savers, publishers, readers = (
        ProcessRanks(dist.new_group(backend="gloo", timeout=timeout)) if ranks.size > 1 else None for _ in range(3)
    )
    rules = make_sync_rules(config)
    publishes = algorithm.schema == "experience" or config.evaluates_training
    holder = build_holder(config, storage, address) if config.sync_method != "checkpoint" else None
    stop_requested, last_whole = False, 0

    def publish_due(step: int, published: int) -> bool:
        if config.evaluates_training:
            return bool(config.eval_interval) and step % config.eval_interval == 0
        # Read on every call, since the explorer may request newer weights at any time.
        requested = read_requested_version(storage) if rules.style is SyncStyle.EXPLORER_DRIVEN else 0
        return rules.publish_due(step, published, requested)

    def whole_requested(version: int) -> int:
        nonlocal last_whole
        requested = read_requested_version(storage, WHOLE_FILE)
        if requested == last_whole or requested > version:
            return 0
        last_whole = requested
        return requested

    def should_stop() -> bool:
        # Remembered: the file may be removed for the next start.
        nonlocal stop_requested
        stop_requested = stop_requested or storage.exists(STOP_FILE)
        return stop_requested

    train_engine = engine.from_config(config, algorithm, planned or limit or total_steps, ranks)
    train_engine.compares_first_update = begins_with_sampler(config, storage)
    return Trainer(
        engine=train_engine,
        source=build_source(config, storage, algorithm),
        checkpoints=Checkpoints(
            storage,
            lineage,
            config.trainer.max_checkpoints_to_keep,
            ranks=ranks,
            writers=savers,
            strategy=config.trainer.save_strategy,
        ),
        storage=storage,
        metrics=metrics,
        section=config.trainer,
        total_steps=limit,
        lineage=lineage,
        # Weights trained on a dataset, or by a replay of another lineage, are not explored with.
        publish_due=publish_due if publishes and parent is None else None,
        should_stop=should_stop,
        emit=emit,
        publishers=publishers,
        readers=readers,
        whole_requested=whole_requested,
        full_publish_interval=config.synchronizer.full_publish_interval,
        holder=holder,
        max_weights_to_keep=0 if config.has_both_roles else _WEIGHTS_TO_KEEP,
        ranks=ranks,
        held_out=read_held_out(config),
        eval_metrics=MetricsWriter(storage, "eval"),
    )


def begins_with_sampler(config: Config, storage: Storage) -> bool:
    """True if engine and trainer must begin with the same policy, up to the rounding of 16 bits."""
    rollout = config.explorer.rollout_model
    rounds = {"quantization", "kv_cache_dtype"} & rollout.extra_engine_args.keys()
    # A replay, or a run whose user accepted another model, may train another policy on purpose.
    is_on_purpose = read_parent(storage) is not None or accepted_changes(storage)
    return rollout.traits.has_model and not rounds and not is_on_purpose


def build_holder(config: Config, storage: Storage, address: str) -> InMemoryPublisher:
    """Build the holder of published weights, for engines on this machine and, by `sync_method`, on others."""
    if config.cluster.is_one_machine:
        return InMemoryPublisher(storage)
    return InMemoryPublisher(
        storage, RendezvousServer(storage, host_of(address)).address if config.sync_method == "nccl" else address
    )


def build_source(config: Config, storage: Storage, algorithm: Algorithm) -> BatchSource:
    """Build the source of batches: the experience log or a dataset; a replay first follows its parent's ledger.

    Raises: UserError, DataError.
    """
    parent, ledger = read_parent(storage), Ledger(storage, lineage_of(storage))
    section, schema = config.buffer.trainer_input.experience_buffer, config.algorithm.schema_type
    source: BatchSource
    if schema != "experience":
        dataset, read, sequences_per_row = build_reader(section, schema, config)
        source = DatasetSource(
            read,
            len(dataset),
            dataset.fingerprint,
            ledger,
            batch_size=config.buffer.train_batch_size,
            total_epochs=config.buffer.total_epochs,
            shuffle_seed=_order_seed(section),
            group_size=sequences_per_row,
            total_steps=config.buffer.total_steps,
            max_bad_rows=config.buffer.max_bad_rows,
        )
    else:
        rules, strategy, log = make_sync_rules(config), make_sample_strategy(config), open_log(storage, config)
        # A finished log is read in order, so that the same files give the same batches.
        in_order = rules.style is SyncStyle.FIXED or (config.mode == "train" and log.sealed_at() is not None)
        # With an explorer the style bounds staleness; without one only the config does.
        rule = SampleRule(
            groups_per_batch=config.num_own_rollouts // config.algorithm.repeat_times,
            tasks_per_step=config.buffer.batch_size,
            ordered=in_order and strategy.follows_schedule,
            max_staleness=rules.staleness_bound if config.mode == "both" else config.synchronizer.max_staleness,
            strategy=strategy,
        )
        demonstrations = None
        if config.num_demonstrations:
            shown = config.buffer.trainer_input.auxiliary_buffers[config.demonstrations]
            dataset, read, _ = build_reader(shown, "sft", config)
            # The order of demonstrations is a function of the step, so checkpoints do not store a position.
            order = RowOrder(len(dataset), _order_seed(shown))
            demonstrations = Demonstrations(read, dataset.fingerprint, order, config.num_demonstrations)
        source = LogSource(
            log,
            ledger,
            rule,
            tasks_per_unit=config.tasks_per_unit,
            max_read_timeout_s=section.max_read_timeout,
            poll_interval_s=config.synchronizer.poll_interval_s,
            replay=make_replay(config),
            notes_settled=unread_limit(config) is not None,
            max_bad_rows=config.buffer.max_bad_rows,
            batch_filter=build_batch_filter(config, algorithm),
            demonstrations=demonstrations,
        )
    if parent is None:
        return source
    # The parent's ledger then decides which rows a step trains; `source` only reads them.
    return ReplayedSource(Ledger(parent_storage(storage), parent.lineage), ledger, source)


def read_held_out(config: Config) -> list[TrainingBatch]:
    """Read the held-out rows in batches of `train_batch_size`; []: no evaluation dataset.

    Raises: DataError: more than `buffer.max_bad_rows` rows cannot be used, or none can.
    """
    section = config.buffer.trainer_input.eval_buffer
    if section is None:
        return []
    dataset, read, count = build_reader(section, config.algorithm.schema_type, config)
    size, most = config.buffer.train_batch_size, config.buffer.max_bad_rows
    sequences, bad = dict[int, Sequence[SupervisedRow]](), list[DataError]()
    for number in range(len(dataset)):
        try:
            sequences[number] = read([number])
        except DataError as error:
            bad.append(error)
    if len(bad) > most or (bad and not sequences):
        raise DataError(f"{bad[0]}; held-out rows with errors: {len(bad)} (buffer.max_bad_rows {most}); fix the data")
    if bad:
        log.warning("%d held-out rows are left out, which cannot be used: %s", len(bad), bad[0])
    numbers, batches = list(sequences), []
    for first in range(0, len(numbers), size):
        part = numbers[first : first + size]
        uids = [f"held-out/{number}/{sequence}" for number in part for sequence in range(count)]
        batches.append(supervised_batch([row for number in part for row in sequences[number]], uids, count))
    return batches


def build_batch_filter(config: Config, algorithm: Algorithm) -> AlgorithmFilter:
    """Build the filter that drops rows when a batch is formed."""
    baseline = config.algorithm.repeat_times if config.algorithm.greedy_baseline else None
    at_commit = config.data_processor.experience_pipeline.stage == "commit"  # the explorer has applied them
    return AlgorithmFilter(algorithm, [] if at_commit else operators_of(config), baseline)


_Read = Callable[[Sequence[int]], Sequence[SupervisedRow]]


def build_reader(section: ExperienceBufferConfig, schema: str, config: Config) -> tuple[Dataset, _Read, int]:
    """Open a dataset. Returns: (dataset, function from row numbers to tokenized sequences, sequences of each row).

    Raises: DataError: the dataset does not exist, or lacks a column; a row has no use.
    """
    dataset = open_dataset(
        section.path or "", split=section.split, subset_name=section.subset_name, table=section.table
    )
    rows = make_rows(schema, dataset, load_tokenizer(config), section.format, config.model.max_model_len)

    def read(numbers: Sequence[int]) -> Sequence[SupervisedRow]:
        try:
            return rows.read(numbers)
        except DataError as error:
            raise DataError(f"dataset {section.path}: {error}") from error

    return dataset, read, rows.sequences_per_row


def _order_seed(section: ExperienceBufferConfig) -> int | None:
    """Seed of the order of a dataset's rows; None: as stored."""
    return section.data_selector.seed if trait(section.data_selector.selector, "seeded") else None


class AlgorithmFilter(BatchFilter):
    """Drops of greedy baselines, then of the operators in order, then of the algorithm's advantage function.

    It only uses rewards and statistics of the rows, never a model, so that the ledger can record every drop before the
    batch is trained. Only `reward_shaping_mapper` changes rewards, row by row.
    """

    def __init__(self, algorithm: Algorithm, operators: Sequence[Operator], baseline_rollout: int | None) -> None:
        """baseline_rollout: number of the rollout whose reward is the baseline of its group; None: no baseline."""
        self._algorithm = algorithm
        self._operators = tuple(operators)
        self._shaping = tuple(operator for operator in operators if isinstance(operator, RewardShapingMapper))
        self._baseline_rollout = baseline_rollout
        self.columns = ("metrics",) if self._operators else ()

    def reasons(self, table: pa.Table, step: int) -> list[str]:
        """See BatchFilter; each stage sees the rows that the previous one kept."""
        reasons = [""] * len(table)
        if self._baseline_rollout is not None:
            # The rollout numbered `repeat_times` was sampled at temperature 0, as a baseline.
            greedy = numbers_of(table.column("rollout")) == self._baseline_rollout
            groups = batch_from_table(table).groups
            has_baseline = zip(greedy, np.isin(groups, groups[greedy]), strict=True)
            reasons = [BASELINE if is_greedy else "" if ok else NO_BASELINE for is_greedy, ok in has_baseline]
        for stage in (self._operator_drops, self._advantage_drops):
            kept = np.array([i for i, reason in enumerate(reasons) if not reason], dtype=np.int64)
            codes = stage(table.take(column_of(kept)), step) if len(kept) else []
            for row, code in zip(kept, codes, strict=True):
                reasons[row] = "" if code == DropReason.KEPT else DropReason(code).name.lower()
        return reasons

    def rewards(self, table: pa.Table) -> np.ndarray:
        """See BatchFilter; the recorded rewards after the operators that shape rewards."""
        if not self._shaping:
            return super().rewards(table)
        shaped, _ = run_pipeline(self._shaping, table)
        return shaped.rewards_N.numpy().astype(np.float32)

    def masked(self, table: pa.Table) -> np.ndarray:
        """See BatchFilter; rows that operators mask."""
        masking = [operator for operator in self._operators if isinstance(operator, MaskResponseTruncated)]
        masked_N = run_pipeline(masking, table)[0].masked_N if masking else None
        return super().masked(table) if masked_N is None else masked_N.numpy()

    def _operator_drops(self, table: pa.Table, step: int) -> list[int]:
        if not self._operators:
            return [DropReason.KEPT] * len(table)
        return [int(code) for code in run_pipeline(self._operators, table)[0].reasons_N]

    def _advantage_drops(self, table: pa.Table, step: int) -> list[int]:
        advantage = self._algorithm.advantage_fn
        # Most functions never drop rows, so their advantages are not computed here.
        if advantage is None or advantage.without_filtering() == advantage:
            return [DropReason.KEPT] * len(table)
        # With shaped rewards, which may make a flat group uneven, or the reverse.
        batch = DeviceBatch(batch_from_table(with_rewards(table, self.rewards(table))), torch.device("cpu"))
        inputs = replace(batch.advantage_inputs(step), **batch.token_inputs(batch, {}))
        return [int(code) for code in advantage(inputs).drops_N]
