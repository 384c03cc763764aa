"""Client of an engine in a child process of the Dask worker; `server` is the other side. `remote` has the client of an
engine on another worker.

Weights are verified twice: the client verifies every file on its machine before the engine loads it, and the engine
process compares its logprobs with the trainer's fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rftdask.config.base import plain
from rftdask.config.schema.explorer import InferenceModelConfig, registered_engines
from rftdask.config.schema.model import ModelConfig
from rftdask.engines import server
from rftdask.engines.base import GenerateRequest, Generation, OnTokens, SamplingParams
from rftdask.errors import (
    DamagedError,
    EngineError,
    NotFoundError,
    ProcessLostError,
    RftError,
    RoleError,
    StorageError,
    WaitTimeout,
)
from rftdask.processes.child import LOG_LEVEL, Child
from rftdask.storage import Storage
from rftdask.synchronizer.node_cache import NodeCache, Transport
from rftdask.synchronizer.published import WHOLE_FILE, Published, published_versions, read_published, request_version

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""Seconds to load a model from slow storage. After that a load counts as hung."""
_LOAD_ATTEMPTS = 3
_WHOLE_S, _WHOLE_LOOK_S = 300.0, 0.5
"""Seconds to wait for the trainer, which may be in the middle of a step, to write a complete version."""
_WRITE_GRACE_S = 2.0  # seconds to write the last message before the process is ended


@dataclass(frozen=True)
class EngineSpec:
    """Description of an engine process. A running engine can be reused for an equal spec."""

    section: InferenceModelConfig
    """`explorer.rollout_model`, or an item of `explorer.auxiliary_models`."""
    model: ModelConfig
    threads: int
    """Number of threads of math libraries."""
    log_file: str | None = None
    """File for the output of the process. None: a temporary file."""
    plugin_dirs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    device_lock_timeout_s: float = 0.0
    """Seconds to wait for the lock of a device shared with a trainer. 0: the device is not shared."""
    colocated: bool = False
    """True if it detects the sharing of its GPUs itself, on workers of an existing cluster."""
    records_experts: bool = False
    """True if it records the experts of every generation."""
    sampling: tuple[SamplingParams, ...] = field(default=(), compare=False)
    """Sampling parameters used by the run. The engine serves a short request with each before it is ready."""

    @property
    def imports_ahead(self) -> tuple[str, ...]:
        """Modules that a zygote may import ahead for this engine; unknown for engines of plug-ins."""
        known = self.section.engine_type in registered_engines()
        return self.section.traits.imports_ahead if known else ()

    def to_plain(self) -> dict[str, Any]:
        """Spec as plain types for msgpack, without threads and environment, which are passed separately."""
        names = ("plugin_dirs", "device_lock_timeout_s", "colocated", "records_experts")
        return {
            **{name: getattr(self, name) for name in names},
            "section": plain(self.section),
            "model": plain(self.model),
            "sampling": [asdict(params) for params in self.sampling],
        }


class AskedEngine(ABC):
    """Base of clients of an engine elsewhere. Subclasses define the transport of messages: a child process
    (`EngineClient`) or a worker of another machine (`RemoteEngine`). Used from any thread.

    After a failure all pending and later calls fail with the same error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the fields below. Held while a message is sent, so that numbers are sent in order."""
        self._num_asked = 0
        self._ready = Future[Any]()  # set by the first message, which the engine sends when it is ready
        self._asked: dict[int, Future[Any]] = {0: self._ready}  # pending
        self._listeners: dict[int, OnTokens] = {}
        self._failure: RftError | None = None
        self._has_work = False  # True once it has received a request of a task
        self._num_generating = 0  # running requests
        self._request_s = 0.0  # summed running seconds of requests since `take_use`, or since the engine was ready
        self._used_since_s = self._counted_s = time.monotonic()
        self.answered_s = time.monotonic()
        """Time of the last message of any kind."""
        self.cache_tokens: int | None = None
        """See Engine. Set once the engine is ready."""
        self.weights = Published(0, "", "")
        """Served weights. Version 0: the model folder."""

    @abstractmethod
    def load(self, storage: Storage, published: Published) -> None:
        """Serve `published`. Raises: StorageError: the previous weights are still served; RoleError: the engine ended;
        WaitTimeout: it hangs.
        """

    @abstractmethod
    def close(self) -> None:
        """End the engine if this client owns it. Idempotent."""

    @abstractmethod
    def _send(self, message: Any) -> None:
        """Queue a message without waiting until it is written. Requires `_lock`."""

    def alive(self) -> bool:
        """True while the engine may respond."""
        return self._failure is None

    @property
    def num_under_way(self) -> int:
        """Number of pending calls."""
        return len(self._asked)

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """Send requests as one batch without waiting. Returns: one future per request, in order, which raises RoleError
        if the engine dies; cancel it to remove its request. `on_tokens` is called from the thread that reads messages.
        """
        if not requests:
            return []
        futures = [Future[Any]() for _ in requests]
        with self._lock:
            self._has_work = True
            numbers = [self._register(future) for future in futures]
            if self._failure is None:
                self._count_generating(len(numbers))
            self._listeners.update(
                (n, each.on_tokens) for n, each in zip(numbers, requests, strict=True) if each.on_tokens
            )
            numbered = (
                server.NumberedRequest(n, replace(each, on_tokens=None), each.on_tokens is not None)
                for n, each in zip(numbers, requests, strict=True)
            )
            # One message for all: the engine takes them in one step, and siblings share the work on their prompt.
            self._send(server.Generate(tuple(numbered)))

        # Called when the future is done, also by a result; only cancellations are sent to the engine. A pending future
        # is in `_asked`, so either the result or `drop` removes it.
        def drop(number: int, future: Future[Any]) -> None:
            with self._lock:
                self._listeners.pop(number, None)
            if future.cancelled():
                with self._lock:
                    if self._asked.pop(number, None) is not None:
                        self._count_generating(-1)
                        self._send(server.Drop((number,)))

        for number, future in zip(numbers, futures, strict=True):
            future.add_done_callback(partial(drop, number))
        return futures

    def take_use(self) -> tuple[float, float]:
        """(summed running seconds of requests, elapsed seconds) since the last call."""
        with self._lock:
            self._count_generating(0)
            use = self._request_s, self._counted_s - self._used_since_s
            self._request_s, self._used_since_s = 0.0, self._counted_s
            return use

    def _count_generating(self, change: int) -> None:
        # Requires `_lock`.
        now_s = time.monotonic()
        self._request_s += self._num_generating * (now_s - self._counted_s)
        self._counted_s = now_s
        self._num_generating += change

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """Generate for all requests; results are in order. Raises: RoleError: the engine died; WaitTimeout: it
        hangs."""
        futures = self.submit(requests)
        if wait(futures, timeout_s).not_done:
            raise WaitTimeout(f"{self} did not respond for {timeout_s:.0f} s")
        return [future.result() for future in futures]

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """Like Engine.logprobs. Raises: RoleError; WaitTimeout: it hangs."""
        return list(self._wait(self.score(pairs), timeout_s).logprobs)

    def score(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Future[server.Scored]:
        """Like `logprobs`, but returns a future, which raises RoleError."""
        self._has_work = True
        return self._ask(lambda number: server.Score(number, tuple(pairs)))

    def _ask(self, message: Callable[[int], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._send(message(self._register(future)))
        return future

    def _wait(self, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise WaitTimeout(f"{self} did not respond for {timeout_s:.0f} s") from None

    def _register(self, future: Future[Any]) -> int:
        # Returns the unique number of the call. Requires `_lock`.
        assert self._ready.done(), "wait_ready comes first"
        self._num_asked += 1
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            self._asked[self._num_asked] = future
        return self._num_asked

    def _take(self, message: server.FromServer) -> None:
        """Dispatch a message of the engine."""
        for sampled in message.sampled if isinstance(message, server.Generated) else ():
            with self._lock:
                listener = self._listeners.get(sampled.number)
            if listener is not None:
                listener(sampled.tokens)
        answers: list[tuple[int, Any]]
        if isinstance(message, server.Generated):
            answers = [(answer.number, answer.generation) for answer in message.answers]
        else:
            answers = [(0 if isinstance(message, server.Ready) else message.number, message)]
        with self._lock:
            futures = [self._asked.pop(number, None) for number, _ in answers]
            self.answered_s = time.monotonic()
            if isinstance(message, server.Ready):
                self._used_since_s = self.answered_s
                self.cache_tokens = message.cache_tokens
            elif isinstance(message, server.Generated):
                self._count_generating(-sum(future is not None for future in futures))
        for future, (_, answer) in zip(futures, answers, strict=True):
            # False if it was cancelled meanwhile: the result is dropped.
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(answer)

    def _fail(self, error: RftError) -> None:
        """Fail all pending calls. Idempotent."""
        with self._lock:
            # The first error is the cause of later ones.
            self._failure = self._failure or error
            asked, self._asked = self._asked, {}
            self._count_generating(-self._num_generating)
        for future in asked.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure)


class EngineClient(AskedEngine):
    """Engine of this worker process: `wait_ready`, then `load`, `submit` and the others, from any thread."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the child process and return while it loads its model; see `wait_ready`."""
        super().__init__()
        self.spec = spec
        folders = [spec.section.model_path or spec.model.model_path]
        if spec.section.model_path is None:  # the policy, which may begin with an adapter
            folders += [lora.path for lora in spec.model.lora_configs or () if lora.path is not None]
        self.weights = Published(0, "", _content_hash(folders))
        self._copy: NodeCache | None = None
        """Files of the served weights on this machine, shared with its other engines."""
        self._fetched: NodeCache | None = None  # files of the last `fetch`
        self._outbox: SimpleQueue[server.FromClient | None] = SimpleQueue()  # Messages to write. None: stop the writer.
        self._child = Child(
            # A child process: a model that crashes in a kernel costs the engine, not the Dask worker.
            server.TARGET,
            spec.to_plain(),
            name=f"engine-{spec.section.engine_type}",
            threads=spec.threads,
            env=dict(spec.env),
            log_file=Path(spec.log_file) if spec.log_file else None,
            # A custom environment may affect imports.
            may_fork=bool(spec.imports_ahead) and dict(spec.env).keys() <= {LOG_LEVEL},
            needs=spec.imports_ahead,
        )
        self._turn = threading.Lock()  # held by the caller that loads weights
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="engine-answers", daemon=True)
        self._writer.start()
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until the engine is ready. Raises: RoleError, UserError: loading failed, and the engine is closed."""
        timeout_s = LOAD_TIMEOUT_S + self.spec.device_lock_timeout_s
        try:
            self._ready.result(timeout_s)
        except TimeoutError:
            self.close()
            raise WaitTimeout(f"{self} sent no message for {timeout_s:.0f} s") from None
        except RftError:
            self.close()
            raise

    def alive(self) -> bool:
        """True while the process may respond."""
        return super().alive() and self._child.alive()

    def acquire_device(self) -> None:
        """Wait until the engine holds the lock of its device, if that is shared; it keeps it until `release_device`.

        Raises: RoleError: the engine died or did not get the lock; WaitTimeout: it hangs.
        """
        if self.spec.device_lock_timeout_s:
            self._wait(self._ask(server.AcquireDevice), LOAD_TIMEOUT_S + self.spec.device_lock_timeout_s)

    def release_device(self) -> None:
        """Allow the engine to release a shared device."""
        if self.spec.device_lock_timeout_s:
            self._outbox.put(server.ReleaseDevice())

    def __str__(self) -> str:
        return f"{self._child.name} (pid {self._child.pid})"

    def _send(self, message: server.FromClient) -> None:
        self._outbox.put(message)

    def _write(self) -> None:
        # In a thread, so that callers do not wait for a process that does not read.
        try:
            while (message := self._outbox.get()) is not None:
                self._child.send(server.FROM_CLIENT.encode(message))
        except RoleError as error:
            # The process is dead, and the reader reports the reason; without this thread the engine is lost anyway.
            self._reader.join(_WRITE_GRACE_S)
            self._fail(self._blamed(error))
        except Exception as error:  # otherwise the error would be lost
            self._fail(RoleError(f"{self}: cannot send a request: {type(error).__name__}: {error}"))

    def _read(self) -> None:
        while True:
            try:
                self._take(server.FROM_SERVER.decode(self._child.receive(LOAD_TIMEOUT_S)))
            except WaitTimeout:
                continue  # callers have deadlines
            except RftError as error:
                self._fail(self._blamed(error))
                return
            except Exception as error:  # otherwise the engine would be alive and nobody would get its answers
                self._fail(RoleError(f"{self}: cannot take its answer: {type(error).__name__}: {error}"))
                return

    def _blamed(self, error: RftError) -> RftError:
        # Error of the process that records whether a task may be the cause: only if it was lost while working.
        if isinstance(error, ProcessLostError):
            if self._has_work:
                return error
            # Killed from outside, so a restart may succeed.
            return RoleError(str(error)) if error.was_killed else EngineError(str(error))
        # The first line is the reason; the log has the traceback.
        return EngineError(str(error).partition("\n")[0]) if type(error) is RoleError else error

    def _fail(self, error: RftError) -> None:
        if isinstance(error, EngineError | ProcessLostError):
            error.engine = f"{os.uname().nodename}/{self._child.pid}"
        super()._fail(error)
        self._outbox.put(None)

    def fetch(
        self,
        storage: Storage,
        published: Published,
        timeout_s: float,
        *,
        transport: Transport | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Published:
        """Fetch a version in the memory of the trainer to this machine, where it stays until the next fetch.

        Retries until it arrives, since a lost trainer publishes it again after resuming, and requests complete files
        from the trainer. timeout_s 0: one attempt without a request. A version on storage needs no fetch.
        Returns: the version to load, which may have been written to storage meanwhile.
        Raises: StorageError: it did not arrive in time; RoleError: `is_cancelled` returned True.
        """
        if published.held is None or published == self.weights:
            return published
        deadline, asked = time.monotonic() + timeout_s, False
        while True:
            try:
                copy = NodeCache(storage, published, LOAD_TIMEOUT_S, transport)
            except (DamagedError, NotFoundError, StorageError, WaitTimeout) as error:
                problem = f"weights of version {published.version} could not be fetched from memory: {error}"
            else:
                self._fetched, before = copy, self._fetched
                if before is not None:
                    before.close()
                return published
            # It may be on storage by now: it leaves memory with a checkpoint or at the end of a run.
            published = read_published(storage, published.version) or published
            if published.held is None:
                return published
            if is_cancelled():
                raise RoleError(f"{problem}; nobody wants them any more")
            if time.monotonic() >= deadline:
                raise StorageError(problem)
            if not asked:
                asked = True
                log.warning("%s; requesting files", problem)
                request_version(storage, published.version, WHOLE_FILE)
            time.sleep(_WHOLE_LOOK_S)

    def load(self, storage: Storage, published: Published, *, in_flight: bool = False) -> None:
        """Serve `published` once running requests have finished; in_flight: at once.

        Files with a wrong checksum are read again a few times and never loaded. A version in memory must be fetched
        before.
        Raises: StorageError: the version is missing or damaged; RoleError: the engine cannot load it; WeightsError: it
            loaded it but does not reproduce the fingerprint. After the last two the engine has ended.
        """
        with self._turn:
            # Compared by version, lineage and content, since versions of two lineages may have the same number.
            if self.weights == published:
                return
            for attempt in range(1, _LOAD_ATTEMPTS + 1):
                try:
                    served = self._load(storage, published, in_flight)
                    break
                # A file that is being replicated or cached is complete a moment later.
                except (DamagedError, NotFoundError) as error:
                    if attempt == _LOAD_ATTEMPTS:
                        text = f"weights of version {published.version} cannot be loaded: {error}"
                        raise StorageError(text) from error
                    if attempt == _LOAD_ATTEMPTS - 1:
                        published = self._as_whole(storage, published)
            if served != published.version:
                raise RoleError(f"the engine serves version {served} after loading {published.version}")
            # Set last: after an error the next call loads again or finds the engine dead.
            self.weights = published
            if self._fetched is not None:
                self._fetched.close()
                self._fetched = None

    def _load(self, storage: Storage, published: Published, in_flight: bool) -> int:
        # Returns the version that the engine serves then.
        delta, served = published.delta, self.weights
        fits = delta is not None and (delta.base, delta.base_hash) == (served.version, served.content_hash)
        for part in (published.changes, published) if fits else (published,):
            # Verified before the engine reads it, so that a torn file is read again without losing the engine.
            copy = NodeCache(storage, part, LOAD_TIMEOUT_S)
            try:
                load = partial(
                    server.LoadWeights,
                    version=published.version,
                    files=tuple(map(str, copy.files)),
                    fingerprint=published.fingerprint,
                    in_flight=in_flight,
                    is_delta=part is not published,
                )
                answer = self._wait(self._ask(load), LOAD_TIMEOUT_S)
            except BaseException:
                copy.close()
                raise
            self._copy, before = copy, self._copy
            if before is not None:
                before.close()
            if not answer.needs_whole:
                break
        return int(answer.version)

    def _as_whole(self, storage: Storage, published: Published) -> Published:
        # The complete version, requested from the trainer if its delta cannot be used.
        if published.delta is None:
            return published
        log.warning("version %d cannot be rebuilt from its delta; waiting for the complete files", published.version)
        request_version(storage, published.version, WHOLE_FILE)
        deadline = time.monotonic() + _WHOLE_S
        while time.monotonic() < deadline and self.alive():
            there = read_published(storage, published.version)
            if there is not None and there.delta is None:
                return there
            newer = [version for version in published_versions(storage) if version > published.version]
            if there is None or len(newer) > 1:
                break  # removed, or the trainer no longer has its bytes (`Publisher.write_whole`)
            time.sleep(_WHOLE_LOOK_S)
        return published

    def close(self) -> None:
        """End the process. Idempotent."""
        self._outbox.put(None)
        if self._writer.is_alive():
            self._writer.join(_WRITE_GRACE_S)
        if self._writer.is_alive():
            # The process does not read, and its pipe cannot be closed while the writer waits.
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
        self._child.close()
        for copy in (self._copy, self._fetched):
            if copy is not None:
                copy.close()


def _content_hash(folders: Sequence[str]) -> str:
    # Content hash of the weights in model and adapter folders, 16 hex digits. "": not local folders.
    digest = hashlib.sha256()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.safetensors"))]
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16] if files else ""
