"""State that a worker process keeps between work units, and the lock under which one unit at a time starts.

It is a cache: a new worker starts empty and rebuilds it from the run folder. Invariant: it never returns state of
another run, or of another config of the run.

A unit starts under the *start lock*: it opens its inputs, chooses its weights, and waits for slots of the engine. It
releases the lock once all its rollouts have slots, and the next unit takes the slots that it leaves free. A unit that
needs the engine for itself (other weights, style fixed, a crash suspect) holds the lock and waits until no unit runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

from rftdask.config import Config
from rftdask.config.schema.explorer import DynamicTimeoutConfig, InferenceModelConfig
from rftdask.data.images import ImageProcessor
from rftdask.data.tasksets import Taskset
from rftdask.data.tokenizer import Tokenizer, load_tokenizer, read_tokenizer, with_thinking
from rftdask.engines.base import POLICY, GenerateRequest, Generation
from rftdask.engines.client import LOAD_TIMEOUT_S, EngineClient, EngineSpec
from rftdask.engines.spec import engine_spec, is_asked_in_calls, remote_models
from rftdask.errors import DataError, RoleError
from rftdask.rollouts.auxiliary_models import SharedEngine
from rftdask.rollouts.concurrency_limits import SLOT, SharedSlots, slots_by_memory
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.remote_model import MAX_TIMEOUT_S, RateLimit, RemoteModel
from rftdask.rollouts.policy.request_queues import Streaming
from rftdask.rollouts.runner import SharedLoop, TextEngine
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer
from rftdask.run.run_folder import read_config
from rftdask.storage import Storage

if TYPE_CHECKING:  # it needs torch
    from distributed import Worker

    from rftdask.algorithm.operators import Operator

_MAX_FORK_SERVERS = 4
"""Fork servers to keep: evaluations may have other workflows than training, and each server holds its imports in
memory."""
_UNITS_REMEMBERED = 8
"""Number of work units whose rollouts determine the mean length of a rollout."""
_MAX_STEPS_REMEMBERED = 100
"""Number of explore steps whose tasks determine the mean time of a task."""
_POLL_INTERVAL_S = 1.0
"""Seconds between checks whether a waiting unit is cancelled."""
_EXTRA_TIME_S = 60.0
"""Seconds beyond `explorer.max_timeout` that a call of an engine may take before the engine counts as hanging."""


class WorkerCache:
    """Cache of one worker process. Call `open` first, with the start lock."""

    _config: Config

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self._is_cancelled: Callable[[], bool] = lambda: False
        """Cancel check of the unit that holds the start lock."""
        self.num_under_way = self.num_exact = 0
        """Running units, and those of them whose weights must not change. With the start lock, 0 stays 0."""
        self._ended = threading.Condition()
        """Guards the state that units change after they have released the start lock."""
        self._last_end_s = 0.0
        """Monotonic time at which a unit last ended."""
        self._shared: tuple[SharedSlots, SharedLoop] | None = None
        self._num_slots = 0
        """Number of engine slots in `_shared`."""
        self._unit_lengths: deque[Sequence[int]] = deque(maxlen=_UNITS_REMEMBERED)
        """Lengths in tokens of the rollouts of each of the last units."""
        self._run: tuple[str, str] | None = None
        """URL and config fingerprint of the run that the fields below belong to, except the policy's engine, which has
        a spec."""
        self._engine: EngineClient | None = None
        self._note = ""
        self._tokenizer: Tokenizer | None = None
        self._images: ImageProcessor | None = None
        self._tasksets: dict[str, Taskset] = {}
        self._operators: list[Operator] | None = None
        self.operators_lock = threading.Lock()
        """Held while operators run: units overlap, and operators need not be thread-safe."""
        self._fork_servers: dict[SandboxSpec, ForkServer] = {}
        """Least recently used first."""
        # A unit with the start lock makes these and the fork servers; one that has released it may end them meanwhile.
        self._auxiliary_engines: dict[EngineSpec, EngineClient] = {}
        self._auxiliary_tokenizers: dict[str, Tokenizer] = {}
        self._shared_engines: dict[str, SharedEngine] = {}
        """Clients of auxiliary models on other workers, by name."""
        self._rate_limits: dict[tuple[str, tuple[float | None, ...]], RateLimit] = {}
        """Rate limits by model and limits; kept across runs, because the service does not distinguish runs."""
        self._task_times_s: dict[int, list[float]] = {}
        """Seconds of each task, by explore step."""

    @contextmanager
    def start_lock(self, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[ExitStack]:
        """Wait for the start lock. The end of the block releases it, or an earlier `close` of the result.

        is_cancelled: checked during all waits of the holder for other units. Raises: RoleError: cancelled.
        """
        while not self.mutex.acquire(timeout=_POLL_INTERVAL_S):
            _raise_if_cancelled(is_cancelled)
        self._is_cancelled = is_cancelled
        with ExitStack() as start:
            start.callback(self.mutex.release)
            yield start

    @contextmanager
    def under_way(self, *, exact: bool) -> Iterator[None]:
        """Count a unit as running. exact: its weights must not change meanwhile."""
        with self._ended:
            self.num_under_way += 1
            self.num_exact += exact
        try:
            yield
        finally:
            with self._ended:
                self.num_under_way -= 1
                self.num_exact -= exact
                self._ended.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until no unit runs. Needs the start lock. Raises: as `start_lock`."""
        with self._ended:
            while not self._ended.wait_for(lambda: not self.num_under_way, _POLL_INTERVAL_S):
                _raise_if_cancelled(self._is_cancelled)

    def wait_for_slot(self) -> None:
        """Wait until the engine has a free slot. Needs the start lock. Raises: as `start_lock`."""
        while not self.shared()[0].wait_for_slot(SLOT, _POLL_INTERVAL_S):
            _raise_if_cancelled(self._is_cancelled)

    def shared(self) -> tuple[SharedSlots, SharedLoop]:
        """Slots of the engine and event loop of the rollouts, which overlapping units share."""
        if self._shared is None:
            self._num_slots = self._config.slots_per_engine
            self._shared = SharedSlots({SLOT: self._num_slots}), SharedLoop()
        return self._shared

    def add_lengths(self, lengths: Sequence[int], cache_tokens: int | None) -> None:
        """Record the lengths of a unit's rollouts in tokens, and adapt the number of slots if it follows the memory.
        cache_tokens: KV cache of the engine. None: unknown.
        """
        if not lengths or self._config.explorer.slots_per_engine != "memory" or cache_tokens is None:
            return
        with self._ended:  # units that overlap end on threads of their own
            if self._shared is not None:
                self._unit_lengths.append(lengths)
                wanted = slots_by_memory(cache_tokens, fmean(chain(*self._unit_lengths)), self._config.slots_per_engine)
                self._shared[0].change(SLOT, wanted - self._num_slots)
                self._num_slots = wanted

    @property
    def num_slots(self) -> int:
        return self._num_slots or self._config.slots_per_engine

    def count_time(self, began_s: float) -> float:
        """Seconds of a unit that began at the monotonic time `began_s`, without those that other units have counted."""
        with self._ended:
            now_s = time.monotonic()
            counted_s = now_s - max(began_s, self._last_end_s)
            self._last_end_s = now_s
            return counted_s

    def open(self, storage: Storage, fingerprint: str) -> Config:
        """Config of the run, read once. Waits for units of another run, and drops its state. Raises: as read_config."""
        # A worker may outlive a run, and a resumed run may have another config.
        if self._run != (storage.url, fingerprint):
            config = read_config(storage, fingerprint)  # first: if it fails, nothing is lost
            self.wait_until_idle()
            # The same names may mean other plug-ins, environment variables or models.
            self.drop_auxiliary()
            self._auxiliary_tokenizers.clear()
            for kept in (*self._shared_engines.values(), *(self._operators or ())):
                kept.close()
            self._shared_engines.clear()
            self._tokenizer, self._images, self._tasksets = None, None, {}
            self._operators = None
            if self._shared is not None:
                self._shared[1].close()
                self._shared, self._num_slots = None, 0
            self._unit_lengths.clear()
            self._config, self._run = config, (storage.url, fingerprint)
        return self._config

    def engine(self, spec: EngineSpec) -> EngineClient:
        """Running engine of `spec`, which may still be loading its model."""
        # Loading takes long, so the engine outlives a change of the config if its spec stays.
        if self._engine is not None and not self._engine.alive():
            self._note = "an engine had died; a new one takes its place"
        if self._engine is not None and (self._engine.spec != spec or not self._engine.alive()):
            # Units that use it must end first: their requests to a dead engine fail, and a new one has other weights.
            self.wait_until_idle()
            self.drop_engine()
        if self._engine is None:
            # pyarrow imports pandas for the first shard; import it while the engine loads its model.
            threading.Thread(target=import_module, args=("pandas",), name="imports", daemon=True).start()
            self._engine = EngineClient(spec)
        return self._engine

    def ready_engine(self, spec: EngineSpec) -> EngineClient:
        """`engine`, once it has loaded its model; reads the tokenizer meanwhile. Raises: RoleError, UserError."""
        with ThreadPoolExecutor(1, "tokenizer") as thread:
            # Each may wait for its process to be forked; do not make one wait for the other.
            reading = thread.submit(self.tokenizer)
            engine = self.engine(spec)
            reading.result()
        engine.wait_ready()
        return engine

    def drop_engine(self) -> None:
        """End the engine of the policy; the next unit starts a new one. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def drop_hanging(self, engine: EngineClient | None) -> None:
        """End this engine and those of auxiliary models, unless another engine replaced it."""
        if engine is self._engine:
            self.drop_engine()
            self.drop_auxiliary()

    def release_device(self) -> None:
        """Let all engines release devices that they share, because a work unit has ended."""
        for engine in filter(None, (self._engine, *tuple(self._auxiliary_engines.values()))):
            engine.release_device()

    def take_note(self) -> str:
        """Message for the user since the last call, one sentence. "": none."""
        note, self._note = self._note, ""
        return note

    def tokenizer(self) -> Tokenizer:
        self._tokenizer = self._tokenizer or load_tokenizer(self._config)
        return self._tokenizer

    def images(self) -> ImageProcessor | None:
        if self._images is None and self._config.reads_images:
            model = self._config.model
            self._images = ImageProcessor(model.model_path, trust_remote_code=model.trust_remote_code)
        return self._images

    def taskset(self, name: str) -> Taskset:
        """Rows of a taskset. Raises: DataError: the taskset does not exist or cannot be read."""
        if name not in self._tasksets:
            source = self._config.buffer.explorer_input
            configs = {t.name: t for t in (*source.train_tasksets, *source.eval_tasksets)}
            if name not in configs:
                raise DataError(f"unknown taskset {name!r}; the tasksets are {', '.join(configs)}")
            self._tasksets[name] = Taskset(configs[name])
        return self._tasksets[name]

    def operators(self) -> list[Operator]:
        if self._operators is None:
            # Late: it imports torch, which this process needs only for operators.
            from rftdask.buffer.batches.operator_pipeline import operators_of

            self._operators = operators_of(self._config)
        return self._operators

    def fork_server(self, spec: SandboxSpec) -> ForkServer:
        """Running fork server of `spec`. Raises: UserError: a plug-in cannot be imported."""
        kept = self._fork_servers
        # Pop and insert again, so that the dict is in the order of use.
        if (fork_server := kept.pop(spec, None)) is not None and not fork_server.alive():
            fork_server.close()
            fork_server = None
        # Least recently used first. Overlapping units may need more than _MAX_FORK_SERVERS.
        for old, server in list(kept.items()):
            if len(kept) >= _MAX_FORK_SERVERS and not server.num_pools:
                kept.pop(old, None)
                server.close()
        kept[spec] = fork_server = fork_server or ForkServer(spec)
        return fork_server

    def auxiliary(self, threads: int) -> dict[str, TextEngine | RemoteModel]:
        """Auxiliary models by name, for the running event loop: loaded ones of this process, those of other workers and
        those behind an API. Empty if the only one is the trainer's teacher. Raises: RoleError, UserError.
        """
        config = self._config
        if config.algorithm.needs_teacher:
            return {}
        engines: dict[str, EngineClient | SharedEngine] = {**self.start_auxiliary(threads), **self._shared_engines}
        known = self._auxiliary_tokenizers
        models: dict[str, TextEngine | RemoteModel] = {
            name: text_engine(engine, known[name], config) for name, engine in engines.items()
        }
        return models | {name: self.remote_model(name) for name in remote_models(config) if name != POLICY}

    def remote_model(self, name: str) -> RemoteModel:
        """Model behind an API by name, for the running event loop. Raises: UserError: see RemoteModel."""
        config, section = self._config, remote_models(self._config)[name]
        service = config.model.external_model
        # All work units of a worker share one rate limit, an equal part of the service's limit.
        share, per_minute = 1 / config.explorer.most_workers, (section.requests_per_minute, section.tokens_per_minute)
        limits = tuple(None if limit is None else limit * share for limit in per_minute)
        if (name, limits) not in self._rate_limits:
            self._rate_limits[name, limits] = RateLimit(*limits, clock=time.monotonic)
        # A request that takes as long as an attempt at a rollout would leave no time for a retry.
        timeout_s = min(MAX_TIMEOUT_S, config.explorer.max_timeout / 2)
        remote_name = section.model_path or service.model_name or ""
        return RemoteModel(remote_name, service, timeout_s, section.max_retries, limit=self._rate_limits[name, limits])

    def wait_for_shared(self, worker: Worker, fingerprint: str, url: str) -> None:
        """Wait until other workers serve their auxiliary models. Needs the start lock. Raises: RoleError."""
        config, cluster, known = self._config, self._config.cluster, self._auxiliary_tokenizers
        timeout_s = LOAD_TIMEOUT_S + (0.0 if cluster.is_one_machine else cluster.max_queue_s)
        for model in config.models_apart:
            name = model.asked_name
            if name not in known:
                known[name] = _tokenizer(model, config)
            if name not in self._shared_engines:
                # Less than the deadline of an attempt, so that the attempt ends with this model's error.
                patience_s = config.explorer.max_timeout / 2
                key, spec = (url, fingerprint, name), engine_spec(model, config, 1, None)
                shared = SharedEngine(worker, key, spec, num_engines=model.engine_num, patience_s=patience_s)
                self._shared_engines[name] = shared
            self._shared_engines[name].wait_ready(timeout_s, self._is_cancelled)

    def start_auxiliary(self, threads: int) -> dict[str, EngineClient]:
        """Loaded auxiliary models of this process by name; caches their tokenizers. Raises: RoleError, UserError."""
        config = self._config
        models = {model.asked_name: model for model in config.models_beside}
        specs = {name: engine_spec(model, config, threads, None) for name, model in models.items()}
        kept = self._auxiliary_engines
        for spec, engine in list(kept.items()):
            # An unused engine would keep its memory; a dead one is started again below.
            if spec not in specs.values() or not engine.alive():
                kept.pop(spec, None)
                engine.close()
        # Start all engines first, so that they load concurrently, and read the tokenizers meanwhile.
        engines: dict[str, EngineClient] = {}
        for name, spec in specs.items():
            if spec not in kept and spec.section.traits.takes_share:
                for other in (self._engine, *tuple(kept.values())):
                    if other is not None and other.spec.section.traits.takes_share:
                        other.wait_ready()
            engines[name] = kept[spec] = kept.get(spec) or EngineClient(spec)
        known = self._auxiliary_tokenizers
        known.update({name: known.get(name) or _tokenizer(model, config) for name, model in models.items()})
        for engine in engines.values():
            engine.wait_ready()
        return engines

    def timeout_s(self, explore_step: int) -> float:
        explorer = self._config.explorer
        with self._ended:  # other units add to them
            times_s = dict(self._task_times_s)
        return attempt_timeout_s(explorer.dynamic_timeout, explorer.max_timeout, times_s, explore_step)

    def add_task_times(self, explore_step: int, task_times_s: Sequence[float]) -> None:
        with self._ended:
            self._task_times_s.setdefault(explore_step, []).extend(task_times_s)
            # Forget the oldest steps, whose weights were weaker and took other times.
            for step in sorted(self._task_times_s)[:-_MAX_STEPS_REMEMBERED]:
                del self._task_times_s[step]

    def drop_auxiliary(self) -> None:
        """End the auxiliary engines and the fork servers, and forget task times. Idempotent."""
        for kept in (self._fork_servers, self._auxiliary_engines):
            for key in list(kept):  # one by one: another thread may add or remove some meanwhile
                if (process := kept.pop(key, None)) is not None:  # type: ignore[call-overload]
                    process.close()
        self._task_times_s = {}


def _raise_if_cancelled(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise RoleError("a work unit was cancelled while it waited for other units of its worker")


def attempt_timeout_s(
    dynamic: DynamicTimeoutConfig, max_timeout_s: float, times_s: Mapping[int, Sequence[float]], explore_step: int
) -> float:
    """Time limit of an attempt of `explore_step`: `ratio` times the mean time of a task, once enough steps have times.
    times_s: seconds of the tasks that ended well, by their explore step.
    """
    # Only earlier steps, so that the limit is the same for all tasks of a step.
    before = [times for step, times in times_s.items() if step < explore_step]
    times = [time_s for step_times in before for time_s in step_times]
    if not dynamic.enable or len(before) < dynamic.warmup_min_steps or not times:
        return max_timeout_s
    return min(max_timeout_s, dynamic.ratio * sum(times) / len(times))


def text_engine(
    client: EngineClient | SharedEngine, tokenizer: Tokenizer, config: Config, images: ImageProcessor | None = None
) -> TextEngine:
    """The engine for rollouts, which takes requests as they come or in calls. Raises: UserError: see AnswerParser."""
    timeout_s = config.explorer.max_timeout + _EXTRA_TIME_S

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(client.generate, requests, timeout_s)

    async def logprobs(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return await asyncio.to_thread(client.logprobs, pairs, timeout_s)

    streaming = Streaming(client.submit, timeout_s, str(client), lambda: client.answered_s)
    section = client.spec.section
    parser = AnswerParser(tokenizer, section.tool_call_parser, section.reasoning_parser)
    backend = generate if is_asked_in_calls(section, config) else streaming
    return TextEngine(backend, tokenizer, logprobs, parser, section.traits.guides_sampling, images)


def _tokenizer(model: InferenceModelConfig, config: Config) -> Tokenizer:
    if not model.traits.has_model:
        return load_tokenizer(config)
    try:
        tokenizer = read_tokenizer(model.model_path or "", config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"explorer.auxiliary_models: {model.model_path!r} has no usable tokenizer: {reason}") from error
    thinks = config.model.enable_thinking if model.enable_thinking is None else model.enable_thinking
    return with_thinking(tokenizer, thinks)
