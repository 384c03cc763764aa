"""Rank: the child process of one trainer rank. It puts the trainer's parts together from the config; rank 0 runs the
loop, the others follow it.

It tells its supervisor what happens by events; nothing that matters is in them. It ends with the result, or with an
error whose text its supervisor passes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rftdask.algorithm.algorithm import Algorithm
from rftdask.buffer.batches.backpressure import unread_limit
from rftdask.buffer.batches.dataset_source import DatasetSource
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.log_source import LogSource
from rftdask.buffer.batches.replay_priority import make_replay
from rftdask.buffer.batches.selection import SampleRule, make_sample_strategy
from rftdask.buffer.batches.source import BatchSource, ReplayedSource
from rftdask.buffer.lineage import lineage_of, parent_storage, read_parent
from rftdask.buffer.log import open_log
from rftdask.config import Config, load_config
from rftdask.data.tokenizer import load_tokenizer
from rftdask.models.lora import Lora
from rftdask.monitor.events import Alive, Ended, Event, encode
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.child import Channel
from rftdask.run.run_folder import STOP_FILE
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.styles import SyncStyle, make_sync_rules
from rftdask.trainer.background_checkpoints import Saver
from rftdask.trainer.build import algorithm_of, batch_filter_of, demonstrations_of, order_seed, reader_of
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.lr_schedule import LearningRate
from rftdask.trainer.rank0 import Follower, LeadEngine, LeadSaver, LeadSource, say_end, say_waiting
from rftdask.trainer.ranks import Ranks, lost_peer
from rftdask.trainer.trainer import Trainer, TrainerOptions
from rftdask.weights.published import read_requested_version

if TYPE_CHECKING:
    from rftdask.trainer.engines.adam import AdamOptions, CriticOptions
    from rftdask.trainer.engines.strategies.base import Strategy

_WEIGHTS_TO_KEEP = 8
"""By a trainer whose explorers, if any, are other runs of `rftdask`: enough for one that is slow to load."""
_RENDEZVOUS_S = 120
"""For all ranks to come together. They load torch first, which takes a while on a busy machine."""
_ANSWER_S = 1800
"""For a rank to take part in what the others wait for. One that died is noticed at once; this is for one that hangs,
and is longer than what a rank may have to do alone, such as writing weights. A wait for data is no wait of ranks: rank
0 gives a sign of life.
"""
_LOOK_EVERY_S = 0.2
_SIGN_OF_LIFE_S = 5.0


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry of the child process; see `gang.RankSpec` for the keys of `spec`."""
    torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
    config = load_config(spec["config"])
    try:
        _meet(spec["rendezvous"], spec["rank"], spec["world_size"])
        run_rank(config, open_storage(spec["url"]), spec["total_steps"], lambda event: channel.send(encode(event)))
    except RuntimeError as error:
        lost = lost_peer(error)
        if lost is None:
            raise
        raise lost from error
    # No goodbye: taking the process group down waits for ranks that may be gone, and the process ends here anyway.


def _meet(rendezvous: tuple[str, int], rank: int, size: int) -> None:
    """Join the process group. Raises: RuntimeError of torch: not all ranks came."""
    host, port = rendezvous
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timedelta(seconds=_RENDEZVOUS_S))
    dist.init_process_group(
        # Small messages go over the CPU, also where gradients do not.
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_ANSWER_S),
    )


def run_rank(config: Config, storage: Storage, total_steps: int | None, emit: Callable[[Event], None]) -> None:
    """Train until the steps or the data end; the last event is `Ended`."""
    ranks = Ranks()
    watch = _Watch(storage, emit)
    algorithm = algorithm_of(config)
    limit = config.train_step_limit(total_steps)
    parent = read_parent(storage)
    planned = None if parent is None else parent.schedule_steps  # a replay decays as its parent did
    engine = _engine(config, algorithm, planned or limit or total_steps, ranks)
    source = _source(config, storage, algorithm, watch)
    # The thread that saves speaks to its like on the other ranks while the ranks train.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_ANSWER_S)) if ranks.size > 1 else None
    saver = (LeadSaver if ranks.leads else Saver)(
        storage,
        lineage_of(storage),
        config.trainer.max_checkpoints_to_keep,
        ranks=ranks,
        writers=Ranks(group),
        strategy=config.trainer.save_strategy,
    )
    if ranks.leads:
        result = _lead(config, storage, limit, algorithm, engine, source, saver, watch, ranks, emit)
    else:
        Follower(ranks, engine, source.read, saver, lambda: emit(Alive())).run()
        result = Ended(0, stopped=False)
    emit(result)


def _lead(
    config: Config,
    storage: Storage,
    limit: int | None,
    algorithm: Algorithm,
    engine: TrainEngine,
    source: BatchSource,
    saver: Saver,
    watch: _Watch,
    ranks: Ranks,
    emit: Callable[[Event], None],
) -> Ended:
    metrics = MetricsWriter(storage, "trainer")
    options = TrainerOptions(
        total_steps=limit,
        save_interval=config.trainer.save_interval,
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        lineage=lineage_of(storage),
        publish=algorithm.schema == "experience" and read_parent(storage) is None,
        max_weights_to_keep=0 if config.mode == "both" else _WEIGHTS_TO_KEEP,
    )
    trainer = Trainer(
        LeadEngine(engine, ranks),
        LeadSource(source, ranks),
        saver,
        storage,
        metrics,
        options,
        publish_due=_publish_due(config, storage),
        should_stop=watch.should_stop,
        emit=emit,
    )
    watch.when_idle = trainer.publish_if_due_now
    watch.say_waiting = lambda: say_waiting(ranks)
    try:
        result = trainer.run()
        say_end(ranks)
    finally:
        metrics.close()
    return Ended(result.step, result.stopped)


class _Watch:
    """What a waiting trainer does meanwhile: look for the stop file, give a sign of life, publish if asked."""

    def __init__(self, storage: Storage, emit: Callable[[Event], None]) -> None:
        self._storage = storage
        self._emit = emit
        self._looked = self._spoke = 0.0
        self._stop = False
        self.when_idle: Callable[[], None] = lambda: None
        self.say_waiting: Callable[[], None] = lambda: None

    def should_stop(self) -> bool:
        now = time.monotonic()
        if not self._stop and now - self._looked > _LOOK_EVERY_S:
            self._looked = now
            self._stop = self._storage.exists(STOP_FILE)
            self.when_idle()
        if now - self._spoke > _SIGN_OF_LIFE_S:
            self._spoke = now
            self._emit(Alive())
            self.say_waiting()
        return self._stop


def _engine(config: Config, algorithm: Algorithm, total_steps: int | None, ranks: Ranks) -> TrainEngine:
    if config.trainer.trainer_type == "fake":
        return FakeTrainEngine()
    # Late, as what builds its options below: it imports transformers and the compiler of PyTorch, which the fake does
    # without, and takes seconds.
    from rftdask.trainer.engines.torch_engine import TorchEngine, TorchOptions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = TorchOptions(
        model_path=config.model.model_path,
        dtype="float32",
        device=device,
        adam=_adam(config, _learning_rate(config, total_steps)),
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        max_response_tokens=config.model.max_response_tokens,
        micro_batch_size=config.trainer.micro_batch_size,
        seed=config.seed,
        deterministic=config.deterministic,
        trust_remote_code=config.model.trust_remote_code,
        teacher_path=config.explorer.auxiliary_models[0].model_path if config.algorithm.needs_teacher else None,
        critic=_critic(config) if algorithm.use_critic else None,
        critic_warmup=config.trainer.critic_warmup,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        torch_compile=config.trainer.torch_compile,
        recompute_old_logprobs=not config.algorithm.bypass_old_logprobs,
        lora=lora_of(config),
    )
    size = config.trainer.ulysses_sequence_parallel_size
    sequence = ranks.neighbors(size) if size > 1 else None
    return TorchEngine(options, algorithm, _strategy(config, ranks, torch.device(device)), sequence)


def _strategy(config: Config, ranks: Ranks, device: torch.device) -> Strategy:
    from rftdask.trainer.engines.strategies.base import Single
    from rftdask.trainer.engines.strategies.ddp import DDP
    from rftdask.trainer.engines.strategies.fsdp2 import FSDP2, ShardOptions
    from rftdask.trainer.engines.strategies.tensor import TensorParallel

    trainer = config.trainer
    size = trainer.tensor_parallel_size
    if size > 1:
        return TensorParallel(ranks, ranks.neighbors(size), ranks.across(size), device)
    if trainer.trainer_strategy == "fsdp2" and (ranks.size > 1 or trainer.offload_policy):
        return FSDP2(
            ranks, device, ShardOptions(trainer.offload_policy, trainer.prefetch_layers, trainer.reshard_after_forward)
        )
    return Single(ranks) if ranks.size == 1 else DDP(ranks)


def lora_of(config: Config) -> Lora | None:
    """The adapters to train; None: all weights."""
    if not config.model.lora_configs:
        return None
    section = config.model.lora_configs[0]
    return Lora(
        rank=section.lora_rank,
        alpha=section.lora_alpha,
        target_modules=section.target_modules,
        exclude_modules=section.exclude_modules,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        dtype="float32" if section.lora_dtype == "auto" else section.lora_dtype,
        path=section.path,
    )


def _learning_rate(config: Config, total_steps: int | None) -> LearningRate:
    optimizer = config.algorithm.optimizer
    warmup = optimizer.lr_warmup_steps
    if warmup < 0:
        warmup = int(optimizer.lr_warmup_steps_ratio * (total_steps or 0))
    return LearningRate(optimizer.lr, warmup, optimizer.lr_scheduler_type, total_steps, optimizer.min_lr_ratio)


def _adam(config: Config, learning_rate: LearningRate) -> AdamOptions:
    from rftdask.trainer.engines.adam import AdamOptions

    optimizer = config.algorithm.optimizer
    return AdamOptions(learning_rate, optimizer.betas, optimizer.weight_decay, config.trainer.grad_clip)


def _critic(config: Config) -> CriticOptions:
    from rftdask.trainer.engines.adam import CriticOptions

    section = config.trainer.critic
    return CriticOptions(
        model_path=config.model.critic_model_path or config.model.model_path,
        adam=_adam(config, LearningRate(section.lr)),
        cliprange_value=section.cliprange_value,
    )


def _source(config: Config, storage: Storage, algorithm: Algorithm, watch: _Watch) -> BatchSource:
    parent = read_parent(storage)
    ledger = Ledger(storage, lineage_of(storage))
    source: BatchSource
    if config.algorithm.schema_type == "experience":
        source = _log_source(config, storage, ledger, algorithm, watch)
    else:
        source = _dataset_source(config, ledger)
    if parent is None:
        return source
    return ReplayedSource(Ledger(parent_storage(storage), parent.lineage), ledger, source)


def _log_source(config: Config, storage: Storage, ledger: Ledger, algorithm: Algorithm, watch: _Watch) -> LogSource:
    rules = make_sync_rules(config)
    strategy = make_sample_strategy(config)
    log = open_log(storage, config)
    # A finished log is read in order, whatever style made it: the same files, the same batches.
    in_order = rules.style is SyncStyle.FIXED or (config.mode == "train" and log.sealed_at() is not None)
    rule = SampleRule(
        groups_per_batch=config.num_own_rollouts // config.algorithm.repeat_times,
        tasks_per_step=config.buffer.batch_size,
        ordered=in_order and strategy.follows_schedule,
        max_staleness=rules.staleness_bound if config.mode == "both" else config.synchronizer.max_staleness,
        strategy=strategy,
    )
    return LogSource(
        log,
        ledger,
        rule,
        tasks_per_unit=config.tasks_per_unit,
        max_read_timeout_s=config.buffer.trainer_input.experience_buffer.max_read_timeout,
        poll_interval_s=config.synchronizer.poll_interval_s,
        replay=make_replay(config),
        notes_settled=unread_limit(config) is not None,
        should_stop=watch.should_stop,
        batch_filter=batch_filter_of(config, algorithm),
        demonstrations=demonstrations_of(config, load_tokenizer(config)) if config.num_demonstrations else None,
    )


def _dataset_source(config: Config, ledger: Ledger) -> DatasetSource:
    section = config.buffer.trainer_input.experience_buffer
    schema = config.algorithm.schema_type
    dataset, read = reader_of(section, schema, config, load_tokenizer(config))
    return DatasetSource(
        read,
        len(dataset),
        dataset.fingerprint,
        ledger,
        batch_size=config.buffer.train_batch_size,
        total_epochs=config.buffer.total_epochs,
        shuffle_seed=order_seed(section),
        group_size=2 if schema == "dpo" else 1,
    )


def _publish_due(config: Config, storage: Storage) -> Callable[[int, int], bool]:
    if config.algorithm.schema_type != "experience":
        return lambda step, published: False
    rules = make_sync_rules(config)

    def due(step: int, published: int) -> bool:
        asked = read_requested_version(storage) if rules.style is SyncStyle.EXPLORER_DRIVEN else 0
        return rules.publish_due(step, published, asked)

    return due
