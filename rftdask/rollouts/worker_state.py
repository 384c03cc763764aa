"""Worker cache: what a worker process keeps between work units, and the seat in which one of them at a time begins.

The config of the run, the engine of the policy, tokenizers, tasksets, engines of auxiliary models, fork servers of
sandboxes, operators with the processes that they have, and how long tasks took. All of it can be made again from the
run folder, so a new worker starts with none of it. Invariant: nothing of another run, or of the same run with another
config, is ever given out.

A unit begins in the *seat*: it opens what it needs, chooses its weights, and waits for slots of the engine. Once all
its rollouts have slots it gives the seat up, and the next unit takes what the rest of it leaves free. Who needs the
engine for itself (other weights, style fixed, a suspicion of poison) waits in the seat until nothing is under way.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
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
from rftdask.rollouts.auxiliary_client import SharedEngine
from rftdask.rollouts.concurrency_limits import SLOT, SharedPlaces, slots_by_memory
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.rate_limit import RateLimit
from rftdask.rollouts.policy.remote_model import MAX_TIMEOUT_S, RemoteModel
from rftdask.rollouts.policy.streaming_queue import Streaming
from rftdask.rollouts.runner import SharedLoop, TextEngine
from rftdask.rollouts.sandbox.messages import SandboxSpec
from rftdask.rollouts.sandbox.pool import ForkServer
from rftdask.run.run_folder import read_config
from rftdask.storage import Storage

if TYPE_CHECKING:  # it needs torch
    from distributed import Worker

    from rftdask.algorithm.operators import Operator

_MAX_FORK_SERVERS = 4
"""Kept for evaluations, whose workflows may be others than those of training; each holds its imports in memory."""
_UNITS_REMEMBERED = 8
"""Work units whose rollouts make up the mean length of one."""
_MAX_STEPS_REMEMBERED = 100
"""Explore steps whose tasks make up the mean time of a task."""
_LOOK_S = 1.0
"""Between two looks whether what waits is still wanted."""
_EXTRA_TIME_S = 60.0
"""Time beyond `explorer.max_timeout` that an engine may take for one call before it counts as hanging."""


class Seat:
    """The place of the one work unit that begins; see the module's text."""

    def __init__(self, cache: WorkerCache) -> None:
        self._cache = cache
        self._held = True

    def give_up(self) -> None:
        """Let the next unit begin. Idempotent; from the thread that took the seat."""
        if self._held:
            self._held = False
            self._cache.seat_lock.release()


class WorkerCache:
    """The cache of one worker process. `open` comes first, in the seat.

    Example:
        with cache.seat() as seat:
            config = cache.open(storage, unit.config_fingerprint)
            engine = cache.engine(engine_spec(config.explorer.rollout_model, config, ...))
            with cache.under_way(exact=False):
                ...
                seat.give_up()      # as soon as another unit may begin beside this one
                ...
    """

    _config: Config

    def __init__(self) -> None:
        self.seat_lock = threading.Lock()
        self._called_off: Callable[[], bool] = lambda: False
        """Of who has the seat."""
        self._num_under_way = self._num_exact = 0
        self._ended = threading.Condition()
        """Guards what units change that have given up their seat."""
        self._last_end_s = 0.0
        """Time at which a unit ended last, by the monotonic clock."""
        self._shared: tuple[SharedPlaces, SharedLoop] | None = None
        self._num_slots = 0
        """Of `_shared`."""
        self._unit_lengths: deque[Sequence[int]] = deque(maxlen=_UNITS_REMEMBERED)
        """Tokens of the rollouts of the last units."""
        self._run: tuple[str, str] | None = None
        """URL and fingerprint of the config that all below belongs to, save the policy's engine, which has a spec."""
        self._engine: EngineClient | None = None
        self._note = ""
        self._tokenizer: Tokenizer | None = None
        self._images: ImageProcessor | None = None
        self._tasksets: dict[str, Taskset] = {}
        self._operators: list[Operator] | None = None
        self.operators_lock = threading.Lock()
        """For who runs them: units overlap, and operators are anybody's."""
        self._fork_servers: dict[SandboxSpec, ForkServer] = {}
        """Least recently used first."""
        # These and the fork servers are made in the seat, and may be ended meanwhile by a unit that has given it up.
        self._auxiliary_engines: dict[EngineSpec, EngineClient] = {}
        self._auxiliary_tokenizers: dict[str, Tokenizer] = {}
        self._shared_engines: dict[str, SharedEngine] = {}
        """Of auxiliary models on workers of their own, by name."""
        self._rate_limits: dict[tuple[str, tuple[float | None, ...]], RateLimit] = {}
        """By model and limits; kept across runs, for a service does not know of them."""
        self._task_times_s: dict[int, list[float]] = {}
        """Seconds of each task, by explore step."""

    @contextmanager
    def seat(self, called_off: Callable[[], bool] = lambda: False) -> Iterator[Seat]:
        """Wait for the seat, and give it up at the end at the latest.

        called_off: whether nobody wants any more what begins in it; looked at in all of its waits for other units,
            whose own deadlines bound them. Raises: RoleError: it was called off.
        """
        while not self.seat_lock.acquire(timeout=_LOOK_S):
            _check_wanted(called_off)
        seat, self._called_off = Seat(self), called_off
        try:
            yield seat
        finally:
            seat.give_up()

    @contextmanager
    def under_way(self, *, exact: bool) -> Iterator[None]:
        """Count a unit as under way. exact: its weights must not change meanwhile."""
        with self._ended:
            self._num_under_way += 1
            self._num_exact += exact
        try:
            yield
        finally:
            with self._ended:
                self._num_under_way -= 1
                self._num_exact -= exact
                self._ended.notify_all()

    @property
    def is_busy(self) -> bool:
        """True while a unit is under way; in the seat, False stays so."""
        return self._num_under_way > 0

    @property
    def may_load_in_flight(self) -> bool:
        """True while no unit is under way that must keep its weights."""
        return not self._num_exact

    def wait_until_idle(self) -> None:
        """Wait until no unit is under way. In the seat, so that none begins meanwhile. Raises: as `seat`."""
        with self._ended:
            while not self._ended.wait_for(lambda: not self._num_under_way, _LOOK_S):
                _check_wanted(self._called_off)

    def wait_for_slot(self) -> None:
        """Wait until the engine has a free slot. In the seat, so that nobody else is about to take it. Raises: as
        `seat`.
        """
        while not self.shared()[0].wait_for_room(SLOT, _LOOK_S):
            _check_wanted(self._called_off)

    def shared(self) -> tuple[SharedPlaces, SharedLoop]:
        """What units share that overlap: the slots of the engine, and the event loop of their rollouts."""
        if self._shared is None:
            self._num_slots = self._config.slots_per_engine
            self._shared = SharedPlaces({SLOT: self._num_slots}), SharedLoop()
        return self._shared

    def add_lengths(self, lengths: Sequence[int], cache_tokens: int | None) -> None:
        """Remember how long the rollouts of a unit became, in tokens, by which an engine with room for so many has
        slots, where the configuration says so.
        """
        by_memory = self._config.explorer.slots_per_engine == "memory" and cache_tokens is not None
        with self._ended:  # units that overlap end on threads of their own
            if lengths and by_memory and self._shared is not None:
                self._unit_lengths.append(lengths)
                known = [length for unit in self._unit_lengths for length in unit]
                wanted = slots_by_memory(cache_tokens or 0, sum(known) / len(known), self._config.slots_per_engine)
                self._shared[0].change(SLOT, wanted - self._num_slots)
                self._num_slots = wanted

    @property
    def num_slots(self) -> int:
        """Slots that the engine has now."""
        return self._num_slots or self._config.slots_per_engine

    def count_time(self, began_s: float) -> float:
        """Seconds of a unit that has ended now which no other unit has counted. began_s: by the monotonic clock."""
        with self._ended:
            now_s = time.monotonic()
            counted_s = now_s - max(began_s, self._last_end_s)
            self._last_end_s = now_s
            return counted_s

    def open(self, storage: Storage, fingerprint: str) -> Config:
        """The config of the run, read once; what belongs to another run is dropped, when its units have ended.

        Raises: DataError: the run folder, as this worker sees it, has no such config; DamagedError.
        """
        # A worker may outlive a run, and a later start of the same run may have another config.
        if self._run != (storage.url, fingerprint):
            config = read_config(storage, fingerprint)  # first: if it fails, nothing is lost
            self.wait_until_idle()
            # Other plug-ins, environment variables or models may be meant by the same names.
            self.drop_auxiliary()
            for shared in self._shared_engines.values():
                shared.close()
            self._shared_engines.clear()
            self._tokenizer = None
            self._images = None
            self._tasksets = {}
            for operator in self._operators or ():
                operator.close()
            self._operators = None
            if self._shared is not None:
                self._shared[1].close()
                self._shared, self._num_slots = None, 0
            self._unit_lengths.clear()
            self._config, self._run = config, (storage.url, fingerprint)
        return self._config

    def engine(self, spec: EngineSpec) -> EngineClient:
        """A living engine of `spec`, started if need be; it may still be loading its model."""
        # The engine outlives a change of the config: its spec says whether it can be used, and loading one takes long.
        if self._engine is not None and not self._engine.alive():
            self._note = "an engine had died; a new one takes its place"
        if self._engine is not None and (self._engine.spec != spec or not self._engine.alive()):
            # Those that had it: what they still ask of a dead one fails, and a new one has other weights.
            self.wait_until_idle()
            self.drop_engine()
        if self._engine is None:
            # pyarrow has it imported for the first shard; now this process has time, for the engine loads its model.
            threading.Thread(target=import_module, args=("pandas",), name="imports", daemon=True).start()
            self._engine = EngineClient(spec)
        return self._engine

    def ready_engine(self, spec: EngineSpec) -> EngineClient:
        """`engine`, once it has loaded its model; the tokenizer is read meanwhile. Raises: RoleError, UserError: the
        engine's; DataError: the model folder has no tokenizer.
        """
        with ThreadPoolExecutor(1, "tokenizer") as beside:
            # Both may wait until they can be forked, neither for the other.
            reading = beside.submit(self.tokenizer)
            engine = self.engine(spec)
            reading.result()
        engine.wait_ready()
        return engine

    def drop_engine(self) -> None:
        """End the engine of the policy; the next unit gets another. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def drop_hanging(self, engine: EngineClient | None) -> None:
        """End this engine and those of auxiliary models. Idempotent: another that took its place stays."""
        if engine is self._engine:
            self.drop_engine()
            self.drop_auxiliary()

    def end_turn(self) -> None:
        """All engines may leave devices that they share: a work unit has ended."""
        for engine in (self._engine, *tuple(self._auxiliary_engines.values())):
            if engine is not None:
                engine.end_turn()

    def take_note(self) -> str:
        """News since the last call that people should know, in one sentence or none."""
        note, self._note = self._note, ""
        return note

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the policy. Raises: DataError: the model folder has none."""
        self._tokenizer = self._tokenizer or load_tokenizer(self._config)
        return self._tokenizer

    def images(self) -> ImageProcessor | None:
        """What makes tokens of images for the policy; None: the run's tasks have none."""
        if self._images is None and self._config.reads_images:
            model = self._config.model
            self._images = ImageProcessor(model.model_path, trust_remote_code=model.trust_remote_code)
        return self._images

    def taskset(self, name: str) -> Taskset:
        """The rows of a taskset. Raises: DataError: no taskset is called so, or it cannot be read."""
        if name not in self._tasksets:
            source = self._config.buffer.explorer_input
            configs = {t.name: t for t in (*source.train_tasksets, *source.eval_tasksets)}
            if name not in configs:
                raise DataError(f"no taskset is called {name!r}; there are {', '.join(configs)}")
            self._tasksets[name] = Taskset(configs[name])
        return self._tasksets[name]

    def operators(self) -> list[Operator]:
        """The operators that run before the commit, kept with what they hold. Raises: UserError."""
        if self._operators is None:
            # Late: it needs torch, which this process does without unless there are operators.
            from rftdask.buffer.batches.operator_pipeline import operators_of

            self._operators = operators_of(self._config)
        return self._operators

    def fork_server(self, spec: SandboxSpec) -> ForkServer:
        """A living fork server of `spec`. Raises: UserError: a plug-in cannot be imported."""
        kept = self._fork_servers
        # Taken out and put back, so that the dict is in the order of use.
        fork_server = kept.pop(spec, None)
        if fork_server is not None and not fork_server.alive():
            fork_server.close()
            fork_server = None
        # The first of the dict was used longest ago. Units that overlap may need more than are kept.
        for old, server in list(kept.items()):
            if len(kept) >= _MAX_FORK_SERVERS and not server.in_use:
                kept.pop(old, None)
                server.close()
        kept[spec] = fork_server = fork_server or ForkServer(spec)
        return fork_server

    def auxiliary(self, threads: int) -> dict[str, TextEngine | RemoteModel]:
        """The auxiliary models by name: those of this process, loaded, and those behind an API, for the event loop that
        runs now. A teacher is the trainer's. Raises: RoleError, UserError.
        """
        config = self._config
        if config.algorithm.needs_teacher:
            return {}
        found: dict[str, TextEngine | RemoteModel] = {
            name: text_engine(engine, tokenizer, config)
            for name, (engine, tokenizer) in self.start_auxiliary(threads).items()
        }
        found |= {
            name: text_engine(engine, self._auxiliary_tokenizers[name], config)
            for name, engine in self._shared_engines.items()
        }
        return found | {name: self.remote_model(name) for name in remote_models(config) if name != POLICY}

    def remote_model(self, name: str) -> RemoteModel:
        """The model behind an API that workflows ask by this name, for the event loop that runs now. Raises: UserError:
        see RemoteModel.
        """
        config = self._config
        section = remote_models(config)[name]
        service, asked = config.model.external_model, section.model_path or config.model.external_model.model_name or ""
        # One for all work units: they share what the service allows. Each worker has an equal part of it.
        share = 1 / config.explorer.most_workers
        limits = tuple(
            None if limit is None else limit * share
            for limit in (section.requests_per_minute, section.tokens_per_minute)
        )
        if (name, limits) not in self._rate_limits:
            self._rate_limits[name, limits] = RateLimit(*limits, clock=time.monotonic)
        # A try that takes as long as an attempt at a rollout would leave no time for another.
        timeout_s = min(MAX_TIMEOUT_S, config.explorer.max_timeout / 2)
        return RemoteModel(asked, service, timeout_s, section.max_retries, limit=self._rate_limits[name, limits])

    def wait_for_shared(self, worker: Worker, fingerprint: str, url: str) -> None:
        """Wait until workers of their own serve the auxiliary models that have some. In the seat. Raises: RoleError:
        none does in time; as `seat`.
        """
        config, cluster, known = self._config, self._config.cluster, self._auxiliary_tokenizers
        timeout_s = LOAD_TIMEOUT_S + (0.0 if cluster.is_one_machine else cluster.max_queue_s)
        for model in config.models_apart:
            name = model.asked_name
            if name not in known:
                known[name] = _tokenizer(model, config)
            if name not in self._shared_engines:
                # An attempt at a rollout that waits as long as it may would end by its own deadline, and not say why.
                patience_s = config.explorer.max_timeout / 2
                key, spec = (url, fingerprint, name), engine_spec(model, config, 1, None)
                shared = SharedEngine(worker, key, spec, num_engines=model.engine_num, patience_s=patience_s)
                self._shared_engines[name] = shared
            self._shared_engines[name].wait_ready(timeout_s, self._called_off)

    def start_auxiliary(self, threads: int) -> dict[str, tuple[EngineClient, Tokenizer]]:
        """The auxiliary models of this process by name, loaded. Raises: RoleError, UserError."""
        config = self._config
        models = {model.asked_name: model for model in config.models_beside}
        specs = {name: engine_spec(model, config, threads, None) for name, model in models.items()}
        kept = self._auxiliary_engines
        for spec, engine in list(kept.items()):
            # What is not asked for any more would keep its memory; what died is started again below.
            if spec not in specs.values() or not engine.alive():
                kept.pop(spec, None)
                engine.close()
        # All of them first, so that they load side by side; the tokenizers meanwhile.
        engines: dict[EngineSpec, EngineClient] = {}
        for spec in specs.values():
            if spec not in kept and spec.section.traits.takes_share:
                for other in (self._engine, *tuple(kept.values())):
                    if other is not None and other.spec.section.traits.takes_share:
                        other.wait_ready()
            engines[spec] = kept[spec] = kept.get(spec) or EngineClient(spec)
        known = self._auxiliary_tokenizers
        tokenizers = {name: known.get(name) or _tokenizer(model, config) for name, model in models.items()}
        known.update(tokenizers)
        for each in engines.values():
            each.wait_ready()
        return {name: (engines[spec], tokenizers[name]) for name, spec in specs.items()}

    def timeout_s(self, explore_step: int) -> float:
        """The limit of an attempt by `explorer.max_timeout` and `explorer.dynamic_timeout`."""
        explorer = self._config.explorer
        with self._ended:  # other units, which end meanwhile, add to them
            times_s = dict(self._task_times_s)
        return attempt_timeout_s(explorer.dynamic_timeout, explorer.max_timeout, times_s, explore_step)

    def add_task_times(self, explore_step: int, task_times_s: Sequence[float]) -> None:
        """Remember how long the tasks of a step took."""
        with self._ended:
            self._task_times_s.setdefault(explore_step, []).extend(task_times_s)
            # The oldest steps are forgotten: their tasks were run by weaker weights, and took other times.
            for step in sorted(self._task_times_s)[:-_MAX_STEPS_REMEMBERED]:
                del self._task_times_s[step]

    def drop_auxiliary(self) -> None:
        """End the auxiliary engines and the fork servers, and forget times. Idempotent."""
        for kept in (self._fork_servers, self._auxiliary_engines):
            for key in list(kept):  # one by one: another thread may add to them, or take from them, meanwhile
                if (held := kept.pop(key, None)) is not None:  # type: ignore[call-overload]
                    held.close()
        self._auxiliary_tokenizers.clear()
        self._task_times_s = {}


def _check_wanted(called_off: Callable[[], bool]) -> None:
    if called_off():
        raise RoleError("a work unit was called off while it waited for others of its worker")


def attempt_timeout_s(
    dynamic: DynamicTimeoutConfig, max_timeout_s: float, times_s: Mapping[int, Sequence[float]], explore_step: int
) -> float:
    """Limit for an attempt of `explore_step`: `ratio` times the mean time of a task, once enough steps have one.

    Args: times_s: seconds of the tasks that ended well, by their explore step.
    """
    # Of earlier steps alone: a limit that moved within a step would judge its tasks by different measures.
    before = [times for step, times in times_s.items() if step < explore_step]
    times = [time_s for step_times in before for time_s in step_times]
    if not dynamic.enable or len(before) < dynamic.warmup_min_steps or not times:
        return max_timeout_s
    return min(max_timeout_s, dynamic.ratio * sum(times) / len(times))


def text_engine(
    client: EngineClient | SharedEngine, tokenizer: Tokenizer, config: Config, images: ImageProcessor | None = None
) -> TextEngine:
    """The engine as rollouts ask it: as they come, or in calls of which LockstepQueue decides what shares one. Raises:
    UserError: see AnswerParser.
    """
    timeout_s = config.explorer.max_timeout + _EXTRA_TIME_S

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(client.generate, requests, timeout_s)

    async def logprobs(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return await asyncio.to_thread(client.logprobs, pairs, timeout_s)

    streaming = Streaming(client.submit, timeout_s, str(client), lambda: client.answered_s)
    section = client.spec.section
    parser = AnswerParser(tokenizer, section.tool_call_parser, section.reasoning_parser)
    ways = generate if is_asked_in_calls(section, config) else streaming
    return TextEngine(ways, tokenizer, logprobs, parser, section.traits.guides_sampling, images)


def _tokenizer(model: InferenceModelConfig, config: Config) -> Tokenizer:
    if not model.traits.has_model:
        return load_tokenizer(config)
    try:
        tokenizer = read_tokenizer(model.model_path or "", config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"explorer.auxiliary_models: {model.model_path!r} gives no tokenizer: {reason}") from error
    own = model.enable_thinking
    return with_thinking(tokenizer, config.model.enable_thinking if own is None else own)
