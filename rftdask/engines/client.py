"""Host: an engine in a child process, and the client that a Dask worker reaches it by.

Weights are proven on both sides: the client verifies every file against the manifest before the engine loads it, and
the engine's process compares what they compute with the trainer's fingerprint before it answers. One client, one
engine. Requests enter the engine as they come, and each is answered when it is finished; anything else that is asked
waits until those before it are answered, and those after it wait for it. When the process ends, everything that was
asked of it fails with the same error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rftdask.config.engine_traits import engine_traits, registered_engines
from rftdask.config.plugins import find_part
from rftdask.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from rftdask.engines.verify import load_verified
from rftdask.errors import DamagedError, NotFoundError, RftError, RoleError, StorageError, WaitTimeout
from rftdask.processes.child import Channel, Child
from rftdask.storage import Storage
from rftdask.weights.fingerprint import Fingerprint
from rftdask.weights.manifest import check_file
from rftdask.weights.published import Published

TARGET = "rftdask.engines.client:serve"
"""What the child process of an engine runs."""

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""For reading a model from slow storage; a hung load ends as an error that names the engine."""
_LOAD_ATTEMPTS = 3
_WRITE_GRACE_S = 2.0
"""For the last message to be written before the process ends."""
_ANSWER = tuple(field.name for field in fields(Generation))
_REQUESTS = ("generate", "drop")
"""Methods of messages that an engine takes while it works."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to run; equal specs mean that a running one can be used."""

    engine_type: str
    model_path: str
    options: tuple[tuple[str, Any], ...]
    threads: int
    log_file: str | None
    env: tuple[tuple[str, str], ...] = ()


def serve(spec: Mapping[str, Any], channel: Channel) -> None:
    """Entry of the child process: answers whatever has a number with one message of that number."""
    options = dict(spec["options"])
    if engine_traits(spec["engine_type"]).has_model:
        # Late: an engine without a model needs no torch.
        import torch

        torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        if options["dtype"] == "auto":
            options["dtype"] = "bfloat16" if options["device"] == "cuda" else "float32"
    engine = find_part("engine", spec["engine_type"], registered_engines())(spec["model_path"], **options)
    log.info("engine %s is ready: %s, %s", spec["engine_type"], spec["model_path"], options)
    channel.send({"ready": os.getpid()})
    for message in channel:
        other = message
        while other is not None:
            if other["method"] in _REQUESTS:
                other = _serve_requests(engine, channel, other)
            else:
                channel.send({"number": other["number"], "answer": _answer(engine, other)})
                other = None


def _serve_requests(engine: Engine, channel: Channel, message: dict[str, Any] | None) -> dict[str, Any] | None:
    """Answer these requests and those that come meanwhile. Returns the first message that is something else: nothing
    that came after it was taken."""

    def take() -> list[tuple[int, GenerateRequest | None]]:
        nonlocal message
        found: list[tuple[int, GenerateRequest | None]] = []
        message = message or channel.try_receive()
        while message is not None and message["method"] in _REQUESTS:
            found += [(plain[0], _request(*plain[1:])) for plain in message.get("requests", ())]
            found += [(number, None) for number in message.get("numbers", ())]
            message = channel.try_receive()
        return found

    def give(number: int, generation: Generation) -> None:
        # Not asdict, which copies token by token.
        channel.send({"number": number, "generation": [getattr(generation, name) for name in _ANSWER]})

    engine.serve(take, give)
    return message


def _answer(engine: Engine, message: Mapping[str, Any]) -> Any:
    if message["method"] == "logprobs":
        pairs = [(tuple(prompt), tuple(response)) for prompt, response in message["pairs"]]
        return [list(logprobs) for logprobs in engine.logprobs(pairs)]
    fingerprint = message["fingerprint"] and Fingerprint.from_plain(message["fingerprint"])
    load_verified(engine, message["version"], [Path(file) for file in message["files"]], fingerprint)
    log.info("serves policy version %d", engine.policy_version)
    return engine.policy_version


def _request(prompt_tokens: Sequence[int], sampling: Mapping[str, Any], seed: int) -> GenerateRequest:
    return GenerateRequest(tuple(prompt_tokens), SamplingParams(**sampling), seed)


def _generation(tokens: list[int], logprobs: list[float], *others: Any) -> Generation:
    return Generation(tuple(tokens), tuple(logprobs), *others)


def _folder_hash(folder: Path) -> str:
    """Content hash of a model folder's weights, 16 hex digits; "" for a model that is not a local folder."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16] if files else ""


class EngineClient:
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
        self.spec = spec
        self.weights = Published(0, "", _folder_hash(Path(spec.model_path)))
        """What the engine serves now; version 0 is the model folder as it is."""
        self._lock = threading.Lock()
        """Of what follows."""
        self._num_asked = 0
        self._asked: dict[int, Future[Any]] = {}
        """What is not answered yet, by number."""
        self._failure: RftError | None = None
        """Why nothing will be answered any more."""
        self._outbox: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._child = Child(
            TARGET,
            {**asdict(spec), "options": dict(spec.options)},
            name=f"engine-{spec.engine_type}",
            threads=spec.threads,
            env=dict(spec.env),
            log_file=Path(spec.log_file) if spec.log_file else None,
        )
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._ready = False
        self._turn = threading.Lock()
        """Of those who wait until it is ready, or load weights."""

    def wait_ready(self) -> None:
        """Until the model is loaded. Raises: RoleError, UserError: why it cannot be, and the engine is closed."""
        with self._turn:
            if self._ready:
                return
            try:
                self._child.receive(LOAD_TIMEOUT_S)
            except BaseException:
                self.close()
                raise
            self._ready = True
            self._writer.start()
            threading.Thread(target=self._read, name="engine-answers", daemon=True).start()

    def alive(self) -> bool:
        return self._failure is None and self._child.alive()

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """The answers to be, in the order of the requests, which enter the engine together. Returns at once.

        One that is cancelled leaves the engine. They raise RoleError: the engine died.
        """
        if not requests:
            return []
        futures = [Future[Any]() for _ in requests]
        with self._lock:
            numbers = [self._register(future) for future in futures]
            plain = [(n, r.prompt_tokens, asdict(r.sampling), r.seed) for n, r in zip(numbers, requests, strict=True)]
            self._outbox.put({"method": "generate", "requests": plain})
        for number, future in zip(numbers, futures, strict=True):
            future.add_done_callback(partial(self._drop, number))
        return futures

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """One generation per request, in order. Raises: RoleError: the engine died; WaitTimeout: it hangs."""
        futures = self.submit(requests)
        if wait(futures, timeout_s).not_done:
            raise WaitTimeout(self._silence(timeout_s))
        return [future.result() for future in futures]

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """As Engine.logprobs. Raises: RoleError; WaitTimeout: it hangs."""
        message = {"method": "logprobs", "pairs": [(list(prompt), list(response)) for prompt, response in pairs]}
        return [tuple(logprobs) for logprobs in self._request(message, timeout_s)]

    def _request(self, message: dict[str, Any], timeout_s: float) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            self._outbox.put({**message, "number": self._register(future)})
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise WaitTimeout(self._silence(timeout_s)) from None

    def _silence(self, timeout_s: float) -> str:
        return f"{self} gave no answer for {timeout_s:.0f} s"

    def __str__(self) -> str:
        return f"{self._child.name} (pid {self._child.pid})"

    def _register(self, future: Future[Any]) -> int:
        """Its number, which is used once; `_lock` is held."""
        assert self._ready, "wait_ready comes first"
        self._num_asked += 1
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            self._asked[self._num_asked] = future
        return self._num_asked

    def _drop(self, number: int, future: Future[Any]) -> None:
        """Tell the engine, if the future was cancelled."""
        if not future.cancelled():
            return
        with self._lock:
            if self._asked.pop(number, None) is not None:
                self._outbox.put({"method": "drop", "numbers": [number]})

    def _write(self) -> None:
        """Thread: so that nobody who asks waits for a process that does not read."""
        try:
            while (message := self._outbox.get()) is not None:
                self._child.send(message)
        except RoleError:
            return  # it is dead; the reader knows why
        except Exception as error:  # nobody else would hear of it
            self._fail(RoleError(f"{self}: a request cannot be sent: {type(error).__name__}: {error}"))

    def _read(self) -> None:
        """Thread: hands on answers until the process ends."""
        while True:
            try:
                message = self._child.receive(LOAD_TIMEOUT_S)
            except WaitTimeout:
                continue  # whoever asked has a deadline
            except RftError as error:
                self._fail(error)
                return
            with self._lock:
                future = self._asked.pop(message["number"], None)
            if future is not None and future.set_running_or_notify_cancel():
                plain = message.get("generation")
                future.set_result(message["answer"] if plain is None else _generation(*plain))

    def _fail(self, error: RftError) -> None:
        """Everything that was asked, and all that will be."""
        with self._lock:
            self._failure = self._failure or error
            asked, self._asked = self._asked, {}
        self._outbox.put(None)
        for future in asked.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def load(self, storage: Storage, published: Published) -> None:
        """Serve `published` from now on. Files that fail their checksum are read again, a few times, never loaded.

        Raises: StorageError: the version is not there or stays damaged; RoleError: the engine could not take it;
            WeightsError: it took it and computes something else. The engine has ended after the last two.
        """
        with self._turn:
            if self.weights == published:
                return
            for attempt in range(1, _LOAD_ATTEMPTS + 1):
                try:
                    self._load_verified(storage, published)
                    break
                except (DamagedError, NotFoundError) as error:
                    if attempt == _LOAD_ATTEMPTS:
                        raise StorageError(
                            f"weights of version {published.version} cannot be loaded: {error}"
                        ) from error
            self.weights = published

    def _load_verified(self, storage: Storage, published: Published) -> None:
        with ExitStack() as stack:
            files = []
            for name, entry in published.files:
                path = f"{published.folder}/{name}"
                file = stack.enter_context(storage.local_copy(path))
                check_file(path, file.read_bytes(), entry)
                files.append(str(file))
            fingerprint = published.fingerprint and published.fingerprint.to_plain()
            message = {
                "method": "load_weights",
                "version": published.version,
                "files": files,
                "fingerprint": fingerprint,
            }
            version = self._request(message, LOAD_TIMEOUT_S)
        if version != published.version:
            raise RoleError(f"the engine serves version {version} after loading {published.version}")

    def close(self) -> None:
        self._outbox.put(None)
        if self._writer.is_alive():
            self._writer.join(_WRITE_GRACE_S)
        if self._writer.is_alive():
            # The process does not read, and its pipe cannot be closed while the writer waits for it.
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
        self._child.close()
