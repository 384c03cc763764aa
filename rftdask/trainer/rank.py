"""Rank: the child process of one trainer rank. It builds the trainer's parts from the config and runs its loop.

It tells its supervisor what happens by events; nothing that matters is in them. It ends with `Ended`, or with an error
that its supervisor passes on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.compose import build_algorithm
from rftdask.buffer.batches.backpressure import unread_limit
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.lineage import lineage_of, parent_storage, read_parent
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.operator_pipeline import operators_of
from rftdask.buffer.batches.replay_priority import make_replay
from rftdask.buffer.batches.selection import SampleRule, make_sample_strategy
from rftdask.buffer.batches.source import BatchSource, DatasetSource, Demonstrations, ReplayedSource, RowOrder
from rftdask.buffer.log import open_log
from rftdask.config import Config, load_config
from rftdask.config.plugins import find_part, trait
from rftdask.config.schema.buffer import ExperienceBufferConfig
from rftdask.config.schema.trainer import registered_train_engines
from rftdask.data.datasets import Dataset, open_dataset
from rftdask.data.supervised import LabeledRows, PreferenceRows, SftRows, TextRows
from rftdask.data.tokenizer import Tokenizer, load_tokenizer
from rftdask.monitor.events import CODEC, Alive, Event
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.child import Channel
from rftdask.processes.dask_task import host_of
from rftdask.processes.device_lock import DeviceLock
from rftdask.processes.gpus import out_of_memory, set_device, use_device
from rftdask.run.run_folder import STOP_FILE
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import read_requested_version, read_requested_whole
from rftdask.synchronizer.styles import SyncStyle, make_sync_rules
from rftdask.synchronizer.transports.group_broadcast import RendezvousServer
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from rftdask.trainer.batch_filters import AlgorithmFilter
from rftdask.trainer.checkpoint import Checkpoints
from rftdask.trainer.process_ranks import ProcessRanks, all_ranks, lost_peer
from rftdask.trainer.trainer import Trainer, take_turn

_WEIGHTS_TO_KEEP = 8
"""By a trainer whose explorers, if any, are other runs of `rftdask`: enough for one that is slow to load."""
_RENDEZVOUS_S = 120
"""For all ranks to come together. They load torch first, which takes a while on a busy machine."""
_ANSWER_S = 1800
"""For a rank to take part in what the others wait for. One that died is noticed at once; this is for one that hangs,
and is longer than what a rank may have to do alone, such as writing weights. A wait for data is no wait of ranks: rank
0 says several times a second that it waits.
"""
RowReader = SftRows | PreferenceRows | LabeledRows | TextRows
"""Makes sequences of the rows of a dataset."""
_LOOK_EVERY_S = 0.2
"""Between two looks for the file that asks the trainer to stop."""


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry of the child process: meet the other ranks, build the trainer, run it to its end.

    spec: the fields of `gang.RankSpec`. Raises: PeerLostError: another rank does not answer; what the trainer raises.
    """
    # Before any tensor: torch would take all cores for each of the ranks that share this machine.
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
            # Small messages go over the CPU, also where gradients do not.
            backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=meeting_place(spec["rendezvous"], rank, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_ANSWER_S),
        )
        storage = open_storage(spec["url"])

        def emit(event: Event) -> None:
            channel.send(CODEC.encode(event))

        turn = DeviceLock.from_environment(exclusive=True)
        if turn is not None:  # before a model is loaded onto the device
            take_turn(turn, all_ranks(), config.synchronizer.sync_timeout, lambda: emit(Alive()))
        with MetricsWriter(storage, "trainer") as metrics:
            trainer = build_trainer(config, storage, spec["total_steps"], metrics, emit, spec["address"])
            trainer.turn, trainer.turn_timeout_s = turn, config.synchronizer.sync_timeout
            ended = trainer.run()
    except (RuntimeError, MemoryError) as error:
        doing = "the trainer loads its model" if trainer is None else trainer.doing
        if (memory := out_of_memory(error, doing, config.trainer_memory_keys())) is not None:
            raise memory from error
        if not isinstance(error, RuntimeError):
            raise
        # Where a peer has died torch raises a bare RuntimeError. Told apart, this rank is not taken for the cause.
        lost = lost_peer(error)
        if lost is None:
            raise
        raise lost from error
    channel.send(CODEC.encode(ended))
    # No goodbye: taking the process group down waits for ranks that may be gone, and the process ends here anyway.


def meeting_place(rendezvous: str, rank: int, size: int) -> Any:
    """The store by which ranks find each other; it knows no keys, so it is as narrow as their machines allow."""
    # torch exports its stores at run time, and says so to no type checker; its own module is private and moves.
    stores: Any = dist
    if size == 1:
        return stores.HashStore()
    timeout = timedelta(seconds=_RENDEZVOUS_S)
    # All ranks are on one machine: a folder of the user alone, and no port that others could reach.
    if os.path.isabs(rendezvous):
        store = stores.FileStore(os.path.join(rendezvous, "store"), size)
        store.set_timeout(timeout)
        return store
    host, _, port = rendezvous.rpartition(":")
    listening = {}
    if rank == 0:  # else torch would listen on all interfaces
        own = socket.create_server((host, int(port)), family=socket.getaddrinfo(host, None)[0][0])
        listening = {"master_listen_fd": own.detach()}
    return stores.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout, **listening)


def build_trainer(
    config: Config,
    storage: Storage,
    total_steps: int | None,
    metrics: MetricsWriter,
    emit: Callable[[Event], None],
    address: str = "",
) -> Trainer:
    """Build the trainer of this rank, all its models loaded.

    total_steps: steps of whole batches that the data fills; None: it is not known. address: of its Dask worker.
    Raises: UserError, DataError.
    """
    ranks = all_ranks()
    lineage, parent = lineage_of(storage), read_parent(storage)
    # First: parts that do not go together are told before any model is loaded.
    algorithm = build_algorithm(config)
    limit = config.train_step_limit(total_steps)
    planned = None if parent is None else parent.schedule_steps  # a replay decays as its parent did
    registered, folders = registered_train_engines(), config.explorer.plugin_dirs
    engine = find_part("trainer engine", config.trainer.trainer_type, registered, folders)
    # The threads that save, publish and read ahead speak to their like on the other ranks while the ranks train.
    # Made here, since making a group is a call of all ranks, in one order.
    timeout = timedelta(seconds=_ANSWER_S)
    savers, publishers, readers = (
        ProcessRanks(dist.new_group(backend="gloo", timeout=timeout)) if ranks.size > 1 else None for _ in range(3)
    )
    rules = make_sync_rules(config)
    publishes = algorithm.schema == "experience" or config.evaluates_training
    holder = build_holder(config, storage, address) if config.sync_method != "checkpoint" else None
    looked_s, stop_found = 0.0, False

    def publish_due(step: int, published: int) -> bool:
        if config.evaluates_training:
            return bool(config.eval_interval) and step % config.eval_interval == 0
        # From storage at each question, since the explorer may ask for newer weights at any time.
        asked = read_requested_version(storage) if rules.style is SyncStyle.EXPLORER_DRIVEN else 0
        return rules.publish_due(step, published, asked)

    asked_s, answered = 0.0, 0

    def whole_asked(version: int) -> bool:
        nonlocal asked_s, answered
        now = time.monotonic()
        if version == answered or now - asked_s < _LOOK_EVERY_S:
            return False
        asked_s = now
        asked = read_requested_whole(storage)
        # Older ones may be held as well; of deltas the bytes of the newest alone are here.
        if asked == answered or (asked != version and (holder is None or asked > version)):
            return False
        answered = asked
        return True

    def should_stop() -> bool:
        # Asked before every batch, several times a second: a look at a remote storage each time would cost more.
        nonlocal looked_s, stop_found
        now = time.monotonic()
        # Once found it stays found: who put the file may take it away for the next start.
        if not stop_found and now - looked_s > _LOOK_EVERY_S:
            looked_s, stop_found = now, storage.exists(STOP_FILE)
        return stop_found

    return Trainer(
        engine=engine.from_config(config, algorithm, planned or limit or total_steps, ranks),
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
        # Nobody explores with what a dataset or the replay of another lineage makes; a dataset's may be evaluated.
        publish_due=publish_due if publishes and parent is None else None,
        should_stop=should_stop,
        emit=emit,
        publishers=publishers,
        readers=readers,
        whole_asked=whole_asked,
        whole_interval=config.synchronizer.whole_interval,
        holder=holder,
        max_weights_to_keep=0 if config.has_both_roles else _WEIGHTS_TO_KEEP,
        ranks=ranks,
        held_out=read_held_out(config),
        eval_metrics=MetricsWriter(storage, "eval"),
    )


def build_holder(config: Config, storage: Storage, address: str) -> InMemoryPublisher:
    """Who holds what this rank publishes, for engines on its machine and, by `synchronizer.sync_method`, on others."""
    if config.cluster.is_one_machine:
        return InMemoryPublisher(storage)
    return InMemoryPublisher(
        storage, RendezvousServer(storage, host_of(address)).address if config.sync_method == "nccl" else address
    )


def build_source(config: Config, storage: Storage, algorithm: Algorithm) -> BatchSource:
    """Where the batches come from: the experience log, or a dataset; of a replay, what its parent's ledger says first.

    Raises: UserError, DataError.
    """
    parent, ledger = read_parent(storage), Ledger(storage, lineage_of(storage))
    section, schema = config.buffer.trainer_input.experience_buffer, config.algorithm.schema_type
    source: BatchSource
    if schema != "experience":
        # One row of a dataset is one sequence, or two for a pair: "chosen" and "rejected" are trained in one batch.
        dataset, reader = build_reader(section, schema, config, load_tokenizer(config))
        source = DatasetSource(
            reader.read,
            len(dataset),
            dataset.fingerprint,
            ledger,
            batch_size=config.buffer.train_batch_size,
            total_epochs=config.buffer.total_epochs,
            shuffle_seed=_order_seed(section),
            group_size=reader.sequences_per_row,
            total_steps=config.buffer.total_steps,
        )
    else:
        rules, strategy, log = make_sync_rules(config), make_sample_strategy(config), open_log(storage, config)
        # A finished log is read in order, whatever style made it: the same files, the same batches.
        in_order = rules.style is SyncStyle.FIXED or (config.mode == "train" and log.sealed_at() is not None)
        # Beside an explorer the bound is the one that its style keeps; a trainer alone has only what was asked for.
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
            dataset, reader = build_reader(shown, "sft", config, load_tokenizer(config))
            # The order of demonstrations is a function of the step, so a checkpoint need not keep where it stood.
            order = RowOrder(len(dataset), _order_seed(shown))
            demonstrations = Demonstrations(reader.read, dataset.fingerprint, order, config.num_demonstrations)
        source = LogSource(
            log,
            ledger,
            rule,
            tasks_per_unit=config.tasks_per_unit,
            max_read_timeout_s=section.max_read_timeout,
            poll_interval_s=config.synchronizer.poll_interval_s,
            replay=make_replay(config),
            notes_settled=unread_limit(config) is not None,
            batch_filter=build_batch_filter(config, algorithm),
            demonstrations=demonstrations,
        )
    if parent is None:
        return source
    # `source` then only reads: which rows a step trains is what the parent has written down.
    return ReplayedSource(Ledger(parent_storage(storage), parent.lineage), ledger, source)


def read_held_out(config: Config) -> list[TrainingBatch]:
    """The rows to evaluate on, in batches of `train_batch_size`; none of no such dataset. Raises: DataError."""
    section = config.buffer.trainer_input.eval_buffer
    if section is None:
        return []
    dataset, reader = build_reader(section, config.algorithm.schema_type, config, load_tokenizer(config))
    size, count, batches = config.buffer.train_batch_size, reader.sequences_per_row, []
    for first in range(0, len(dataset), size):
        numbers = range(first, min(first + size, len(dataset)))
        uids = [f"held-out/{number}/{sequence}" for number in numbers for sequence in range(count)]
        batches.append(supervised_batch(reader.read(numbers), uids, count))
    return batches


def build_batch_filter(config: Config, algorithm: Algorithm) -> AlgorithmFilter:
    """What is dropped when a batch is formed."""
    baseline = config.algorithm.repeat_times if config.algorithm.greedy_baseline else None
    at_commit = config.data_processor.experience_pipeline.stage == "commit"  # then the explorer has run them
    return AlgorithmFilter(algorithm, [] if at_commit else operators_of(config), baseline)


def build_reader(
    section: ExperienceBufferConfig, schema: str, config: Config, tokenizer: Tokenizer
) -> tuple[Dataset, RowReader]:
    """A dataset and how its rows become sequences: one each for "sft" and "cpt", two for pairs.

    Raises: DataError: there is no such dataset, or it lacks a column.
    """
    dataset = open_dataset(
        section.path or "", split=section.split, subset_name=section.subset_name, table=section.table
    )
    kinds: dict[str, type[RowReader]] = {"cpt": TextRows, "dpo": PreferenceRows, "kto": LabeledRows}
    return dataset, kinds.get(schema, SftRows)(dataset, tokenizer, section.format, config.model.max_model_len)


def _order_seed(section: ExperienceBufferConfig) -> int | None:
    """Seed of the order of a dataset's rows; None: as stored."""
    return section.data_selector.seed if trait(section.data_selector.selector, "seeded") else None
