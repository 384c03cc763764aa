"""Host: an engine in a child process, and the client that a Dask worker reaches it by.

Weights are proven on both sides: the client verifies every file against the manifest before the engine loads it, and
the engine's process compares what they compute with the trainer's fingerprint before it answers. One client, one
engine, one request at a time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rftdask.child import Channel, Child
from rftdask.errors import DamagedError, NotFoundError, RoleError, StorageError
from rftdask.explorer.engines import make_engine
from rftdask.explorer.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.explorer.engines.proof import load_proven
from rftdask.storage import Storage
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import check_file
from rftdask.synchronizer.weights import Published

TARGET = "rftdask.explorer.engines.host:serve"
"""What the child process of an engine runs."""

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""For reading a model from slow storage; a hung load ends as an error that names the engine."""
_LOAD_ATTEMPTS = 3


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
    """Entry of the child process: answers one message with one."""
    options = dict(spec["options"])
    if spec["engine_type"] != "fake":
        # Late: the fake needs no torch.
        import torch

        torch.set_num_threads(int(os.environ["RFTDASK_THREADS"]))
        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        if options["dtype"] == "auto":
            options["dtype"] = "bfloat16" if options["device"] == "cuda" else "float32"
    engine = make_engine(spec["engine_type"], spec["model_path"], **options)
    log.info("engine %s is ready: %s, %s", spec["engine_type"], spec["model_path"], options)
    channel.send({"ready": os.getpid()})
    for message in channel:
        if message["method"] == "generate":
            requests = [_request(*fields) for fields in message["requests"]]
            channel.send([list(asdict(generation).values()) for generation in engine.generate(requests)])
        elif message["method"] == "logprobs":
            pairs = [(tuple(prompt), tuple(response)) for prompt, response in message["pairs"]]
            channel.send([list(logprobs) for logprobs in engine.logprobs(pairs)])
        else:
            fingerprint = message["fingerprint"] and Fingerprint.from_plain(message["fingerprint"])
            load_proven(engine, message["version"], [Path(file) for file in message["files"]], fingerprint)
            log.info("serves policy version %d", engine.policy_version)
            channel.send({"version": engine.policy_version})


def _request(prompt_tokens: Sequence[int], sampling: Mapping[str, Any], seed: int) -> GenerateRequest:
    return GenerateRequest(tuple(prompt_tokens), SamplingParams(**sampling), seed)


def _folder_hash(folder: Path) -> str:
    """Content hash of a model folder's weights, 16 hex digits; "" for a model that is not a local folder."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16] if files else ""


class EngineClient:
    """The engine of this worker process.

    Example:
        client = EngineClient(spec)
        client.wait_ready()
        client.load(storage, published)
        generations = client.generate(requests, timeout_s=1800)
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Starts the child, and returns while it loads its model; see `wait_ready`."""
        self.spec = spec
        self.weights = Published(0, "", _folder_hash(Path(spec.model_path)))
        """What the engine serves now; version 0 is the model folder as it is."""
        self._lock = threading.Lock()
        self._child = Child(
            TARGET,
            {**asdict(spec), "options": dict(spec.options)},
            name=f"engine-{spec.engine_type}",
            threads=spec.threads,
            env=dict(spec.env),
            log_file=Path(spec.log_file) if spec.log_file else None,
        )
        self._ready = False

    def wait_ready(self) -> None:
        """Until the model is loaded. Raises: RoleError, UserError: why it cannot be, and the engine is closed."""
        with self._lock:
            if self._ready:
                return
            try:
                self._child.receive(LOAD_TIMEOUT_S)
            except BaseException:
                self.close()
                raise
            self._ready = True

    def alive(self) -> bool:
        return self._child.alive()

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """One generation per request, in order. Raises: RoleError: the engine died; WaitTimeout: it hangs."""
        message = {
            "method": "generate",
            "requests": [(list(r.prompt_tokens), asdict(r.sampling), r.seed) for r in requests],
        }
        with self._lock:
            answers = self._child.request(message, timeout_s)
        return [Generation(tuple(a[0]), tuple(a[1]), a[2], a[3], a[4]) for a in answers]

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """As Engine.logprobs. Raises: RoleError; WaitTimeout: it hangs."""
        message = {"method": "logprobs", "pairs": [(list(prompt), list(response)) for prompt, response in pairs]}
        with self._lock:
            return [tuple(logprobs) for logprobs in self._child.request(message, timeout_s)]

    def load(self, storage: Storage, published: Published) -> None:
        """Serve `published` from now on. Files that fail their checksum are read again, a few times, never loaded.

        Raises: StorageError: the version is not there or stays damaged; RoleError: the engine could not take it;
            WeightsError: it took it and computes something else. The engine has ended after the last two.
        """
        with self._lock:
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
            answer = self._child.request(message, LOAD_TIMEOUT_S)
        if answer["version"] != published.version:
            raise RoleError(f"the engine serves version {answer['version']} after loading {published.version}")

    def close(self) -> None:
        self._child.close()
