"""Client: how an engine in another process is asked, and how a Dask worker reaches that of its child process, whose
other side is `server`. How that of another worker is reached, `remote` says.

Weights are proven on both sides: the client has every file verified on its machine before the engine loads it, and
the engine's process compares what they compute with the trainer's fingerprint before it answers. One client, one
engine. When the process ends, everything that was asked of it fails with the same error.
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
from rftdask.synchronizer.published import Published, read_published, request_whole

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""Deadline of reading a model from slow storage; a hung load ends as an error that names the engine."""
_LOAD_ATTEMPTS = 3
_WHOLE_S, _WHOLE_LOOK_S = 300.0, 0.5
"""Time for the trainer, which may be in the middle of a step, to write a version as a whole."""
_WRITE_GRACE_S = 2.0
"""Seconds that the last message has to be written before the process ends."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine to run; equal specs mean that a running one can be used."""

    section: InferenceModelConfig
    """`explorer.rollout_model`, or an item of `explorer.auxiliary_models`, which names its own model."""
    model: ModelConfig
    threads: int
    """Threads of its math libraries."""
    log_file: str | None = None
    """File that its process prints to; None: a temporary one."""
    plugin_dirs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    turn_timeout_s: float = 0.0
    """Seconds that it waits for its turn on a device that it shares with a trainer; 0: it shares none."""
    colocated: bool = False
    """Whether it finds out for itself with whom it shares its GPUs, on workers that somebody else started."""
    records_experts: bool = False
    """Whether it tells the experts of every generation."""
    sampling: tuple[SamplingParams, ...] = field(default=(), compare=False)
    """The ways in which the run samples: the engine answers a short request of each before it is ready."""

    @property
    def imports_ahead(self) -> tuple[str, ...]:
        """What another process may have imported for it; of an engine of a plug-in that is not known."""
        known = self.section.engine_type in registered_engines()
        return self.section.traits.imports_ahead if known else ()

    def to_plain(self) -> dict[str, Any]:
        """The spec as msgpack carries it to the process; the threads and the environment go another way."""
        return {
            "section": plain(self.section),
            "model": plain(self.model),
            "plugin_dirs": self.plugin_dirs,
            "turn_timeout_s": self.turn_timeout_s,
            "colocated": self.colocated,
            "records_experts": self.records_experts,
            "sampling": [asdict(params) for params in self.sampling],
        }


class AskedEngine(ABC):
    """An engine elsewhere, as others ask it. How messages reach it, and its answers come back, its kinds know: a child
    process (`EngineClient`), or a worker of another machine (`RemoteEngine`). Used from any thread.

    Once it has failed, everything that was asked of it and is not answered fails with the same error, as does all that
    is asked later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards what follows, and is held while a message is sent, so that numbers go out in their order."""
        self._num_asked = 0
        self._ready = Future[Any]()
        """Set by the first message, which the engine sends unasked once it works."""
        self._asked: dict[int, Future[Any]] = {0: self._ready}
        """Futures that are not answered yet, by number."""
        self._listeners: dict[int, OnTokens] = {}
        """Who takes the tokens of those that stream."""
        self._failure: RftError | None = None
        """The error because of which nothing will be answered any more."""
        self._has_work = False
        """True once it was asked for something on behalf of a task."""
        self._num_generating = 0
        """Requests under way."""
        self._request_s = 0.0
        """Seconds that they were, each for itself, since `take_use`, or since the engine was ready."""
        self._used_since_s = self._counted_s = time.monotonic()
        self.answered_s = time.monotonic()
        """Time of its last answer of any kind."""
        self.cache_tokens: int | None = None
        """See Engine; once it is ready."""
        self.weights = Published(0, "", "")
        """Weights that the engine serves now; version 0 is the model folder as it is."""

    @abstractmethod
    def load(self, storage: Storage, published: Published) -> None:
        """Serve `published` from now on. Raises: StorageError: it serves what it served; RoleError: it has ended;
        WaitTimeout: it hangs.
        """

    @abstractmethod
    def close(self) -> None:
        """End it, as far as it is ours to end. Idempotent."""

    @abstractmethod
    def _send(self, message: Any) -> None:
        """Send a message without waiting until it is written. `_lock` is held."""

    def alive(self) -> bool:
        """True while it may answer."""
        return self._failure is None

    @property
    def num_under_way(self) -> int:
        """What it was asked and has not answered."""
        return len(self._asked)

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """Send requests, which enter the engine together, and return futures of their answers at once, in their order.

        A cancelled future's request leaves the engine. `on_tokens` are called from the thread that reads its messages.
        The futures raise RoleError: the engine died.
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
            # One message for all of them: the engine takes them in one step, and siblings share the work on their
            # prompt.
            self._send(server.Generate(tuple(numbered)))

        # Called when the future is done, also by an answer; only a cancelled one is told to the engine. A future that
        # waits for its answer is still in `_asked`: so exactly one of answer and drop takes it out.
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
        """Seconds that requests were under way, each for itself, and seconds that have passed since the last call."""
        with self._lock:
            self._count_generating(0)
            use = self._request_s, self._counted_s - self._used_since_s
            self._request_s, self._used_since_s = 0.0, self._counted_s
            return use

    def _count_generating(self, change: int) -> None:
        # `_lock` is held.
        now_s = time.monotonic()
        self._request_s += self._num_generating * (now_s - self._counted_s)
        self._counted_s = now_s
        self._num_generating += change

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """Generate for each request, in order. Raises: RoleError: the engine died; WaitTimeout: it hangs."""
        futures = self.submit(requests)
        if wait(futures, timeout_s).not_done:
            raise WaitTimeout(f"{self} gave no answer for {timeout_s:.0f} s")
        return [future.result() for future in futures]

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """Score given tokens, as Engine.logprobs. Raises: RoleError; WaitTimeout: it hangs."""
        return list(self._wait(self.score(pairs), timeout_s).logprobs)

    def score(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Future[server.Scored]:
        """As `logprobs`, at once: a future of the answer, which raises RoleError."""
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
            raise WaitTimeout(f"{self} gave no answer for {timeout_s:.0f} s") from None

    def _register(self, future: Future[Any]) -> int:
        # Returns the number of what the future waits for, which is used once. `_lock` is held.
        assert self._ready.done(), "wait_ready comes first"
        self._num_asked += 1
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            self._asked[self._num_asked] = future
        return self._num_asked

    def _take(self, message: server.FromServer) -> None:
        """Hand on a message of the engine."""
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
            # False for one that was cancelled meanwhile: its answer is dropped.
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(answer)

    def _fail(self, error: RftError) -> None:
        """Fail what was asked. Idempotent."""
        with self._lock:
            # The first error is the cause; what fails after it fails because of it.
            self._failure = self._failure or error
            asked, self._asked = self._asked, {}
            self._count_generating(-self._num_generating)
        for future in asked.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure)


class EngineClient(AskedEngine):
    """The engine of this worker process. Used from any thread.

    Example:
        client = EngineClient(spec)
        client.wait_ready()
        client.load(storage, published)
        generations = client.generate(requests, timeout_s=1800)   # these together, and no others, if nobody else asks
        futures = client.submit(requests)                         # these beside whatever is under way
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Starts the child, and returns while it loads its model; see `wait_ready`."""
        super().__init__()
        self.spec = spec
        folder = Path(spec.section.model_path or spec.model.model_path)
        self.weights = Published(0, "", _folder_hash(folder))
        self._copy: NodeCache | None = None
        """Their files on this machine, kept for its other engines as long as this one serves them."""
        self._fetched: NodeCache | None = None
        """What `fetch` brought here last."""
        self._outbox: SimpleQueue[server.FromClient | None] = SimpleQueue()
        """Messages to write; None ends the writer."""
        self._child = Child(
            # A process of its own: a model that exhausts memory or crashes in a kernel costs the engine, not the Dask
            # worker.
            server.TARGET,
            spec.to_plain(),
            name=f"engine-{spec.section.engine_type}",
            threads=spec.threads,
            env=dict(spec.env),
            log_file=Path(spec.log_file) if spec.log_file else None,
            # An environment of the user's own may matter to what it imports.
            may_fork=bool(spec.imports_ahead) and dict(spec.env).keys() <= {LOG_LEVEL},
            needs=spec.imports_ahead,
        )
        self._turn = threading.Lock()
        """Held by one caller at a time that loads weights."""
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="engine-answers", daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until the model is loaded and has answered. Raises: RoleError, UserError: why not; it is closed then."""
        timeout_s = LOAD_TIMEOUT_S + self.spec.turn_timeout_s
        try:
            self._ready.result(timeout_s)
        except TimeoutError:
            self.close()
            raise WaitTimeout(f"{self} said nothing for {timeout_s:.0f} s") from None
        except RftError:
            self.close()
            raise

    def alive(self) -> bool:
        """True while the process may answer."""
        return super().alive() and self._child.alive()

    def take_turn(self) -> None:
        """Wait until the engine is on its device, where it stays until `end_turn`; at once if it shares it with nobody.

        Raises: RoleError: the engine died, or its turn did not come; WaitTimeout: it hangs.
        """
        if self.spec.turn_timeout_s:
            self._wait(self._ask(server.TakeTurn), LOAD_TIMEOUT_S + self.spec.turn_timeout_s)

    def end_turn(self) -> None:
        """The engine may leave its device, if it shares it: what it was to do there is done."""
        if self.spec.turn_timeout_s:
            self._outbox.put(server.EndTurn())

    def __str__(self) -> str:
        return f"{self._child.name} (pid {self._child.pid})"

    def _send(self, message: server.FromClient) -> None:
        self._outbox.put(message)

    def _write(self) -> None:
        # Thread that writes messages, so that nobody who asks waits for a process that does not read.
        try:
            while (message := self._outbox.get()) is not None:
                self._child.send(server.FROM_CLIENT.encode(message))
        except RoleError:
            return  # it is dead; the reader knows why
        except Exception as error:  # nobody else would hear of it
            self._fail(RoleError(f"{self}: a request cannot be sent: {type(error).__name__}: {error}"))

    def _read(self) -> None:
        while True:
            try:
                message = server.FROM_SERVER.decode(self._child.receive(LOAD_TIMEOUT_S))
            except WaitTimeout:
                continue  # whoever asked has a deadline
            except RftError as error:
                self._fail(self._blamed(error))
                return
            self._take(message)

    def _blamed(self, error: RftError) -> RftError:
        # The error of the process, as one that says whether a task may be to blame: only for a loss while it worked.
        if isinstance(error, ProcessLostError):
            if self._has_work:
                return error
            # Killed by somebody else, it may do better the next time.
            return RoleError(str(error)) if error.was_killed else EngineError(str(error))
        # The first line is the reason; the log has its traceback.
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
        called_off: Callable[[], bool] = lambda: False,
    ) -> Published:
        """Bring a version that its trainer holds to this machine, where it stays until another one is fetched; one that
        is on storage needs no fetching. What is to be loaded: the version, which may have been written meanwhile.

        It is tried again until it is there: a trainer that was lost publishes it once more when it has resumed. Whoever
        has it is asked to write it, too. At 0 s it is tried once, and nobody is asked.
        Raises: StorageError: it did not come in time; RoleError: called off.
        """
        if published.held is None or published == self.weights:
            return published
        deadline, asked = time.monotonic() + timeout_s, False
        while True:
            try:
                copy = NodeCache(storage, published, LOAD_TIMEOUT_S, transport)
            except (DamagedError, NotFoundError, StorageError, WaitTimeout) as error:
                problem = f"weights of version {published.version} did not come from those who hold them: {error}"
            else:
                self._fetched, before = copy, self._fetched
                if before is not None:
                    before.close()
                return published
            # Perhaps it is a file by now: with a checkpoint, or at the end of a run, it is held no more.
            published = read_published(storage, published.version) or published
            if published.held is None:
                return published
            if called_off():
                raise RoleError(f"{problem}; nobody wants them any more")
            if time.monotonic() >= deadline:
                raise StorageError(problem)
            if not asked:
                asked = True
                log.warning("%s; asks for files", problem)
                request_whole(storage, published.version)
            time.sleep(_WHOLE_LOOK_S)

    def load(self, storage: Storage, published: Published, *, in_flight: bool = False) -> None:
        """Serve `published` from now on, once what is under way has been answered; in_flight: at once, also for what is
        under way. Files that fail their checksum are read again, a few times, never loaded. One that is held has been
        fetched.

        Raises: StorageError: the version is not there or stays damaged; RoleError: the engine could not take it;
            WeightsError: it took it and computes something else. The engine has ended after the last two.
        """
        with self._turn:
            # By version, lineage and content: the same number of another lineage is other weights.
            if self.weights == published:
                return
            for attempt in range(1, _LOAD_ATTEMPTS + 1):
                try:
                    served = self._load(storage, published, in_flight)
                    break
                # A file that is being replicated, or read half from a cache, is whole a moment later. A version that
                # was removed stays away, and ends here.
                except (DamagedError, NotFoundError) as error:
                    if attempt == _LOAD_ATTEMPTS:
                        raise StorageError(
                            f"weights of version {published.version} cannot be loaded: {error}"
                        ) from error
                    if attempt == _LOAD_ATTEMPTS - 1:
                        published = self._as_whole(storage, published)
            if served != published.version:
                raise RoleError(f"the engine serves version {served} after loading {published.version}")
            # Only now: after an error the next call loads again, or finds the engine dead.
            self.weights = published
            if self._fetched is not None:
                self._fetched.close()
                self._fetched = None

    def _load(self, storage: Storage, published: Published, in_flight: bool) -> int:
        # One attempt at loading; returns the version that the engine serves then.
        delta, served = published.delta, self.weights
        changes = []
        if delta is not None and (delta.base, delta.base_hash) == (served.version, served.content_hash):
            changes = [published.changes]
        for part in (*changes, published):
            # Verified before the engine sees it: what is torn is read again, and costs no engine.
            copy = NodeCache(storage, part, LOAD_TIMEOUT_S)
            try:
                files, is_delta = tuple(map(str, copy.files)), part is not published
                load = server.LoadWeights(0, published.version, files, published.fingerprint, in_flight, is_delta)
                answer = self._wait(self._ask(partial(_numbered, load)), LOAD_TIMEOUT_S)
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
        # The version as a whole, which its trainer is asked for where it is there as a delta that cannot be used.
        if published.delta is None:
            return published
        log.warning("version %d cannot be made of what it was made of; waits for all of it", published.version)
        request_whole(storage, published.version)
        deadline = time.monotonic() + _WHOLE_S
        while time.monotonic() < deadline and self.alive():
            there = read_published(storage, published.version)
            if there is not None and there.delta is None:
                return there
            time.sleep(_WHOLE_LOOK_S)
        return published

    def close(self) -> None:
        """End the process. Idempotent."""
        self._outbox.put(None)
        if self._writer.is_alive():
            self._writer.join(_WRITE_GRACE_S)
        if self._writer.is_alive():
            # The process does not read, and its pipe cannot be closed while the writer waits for it.
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
        self._child.close()
        for copy in (self._copy, self._fetched):
            if copy is not None:
                copy.close()


def _numbered(load: server.LoadWeights, number: int) -> server.LoadWeights:
    return replace(load, number=number)


def _folder_hash(folder: Path) -> str:
    # Content hash of a model folder's weights, 16 hex digits; "" for a model that is not a local folder.
    digest, files = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16] if files else ""
