"""Processes of `test_weight_methods.py`: a trainer that publishes, and machines whose engines serve the versions. Each
Dask worker is a machine with its own RFTDASK_SHARED_MEMORY.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from distributed import Worker, get_worker

from rftdask.config import Config, load_config
from rftdask.engines.client import EngineClient
from rftdask.engines.spec import engine_spec
from rftdask.rollouts.work_unit_task import _transport
from rftdask.storage import open_storage
from rftdask.storage.base import Data
from rftdask.synchronizer.actor import SyncHandle
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import BLOCK_BYTES
from rftdask.synchronizer.published import read_published, remove_weights_below
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports import dask_broadcast as dask_tree
from rftdask.synchronizer.transports import group_broadcast as process_group
from rftdask.synchronizer.transports.dask_broadcast import _answer, serve_blocks
from rftdask.synchronizer.transports.group_broadcast import _store_of_another
from rftdask.trainer.rank import build_holder

TIMEOUT_S = 120.0
NUM_VERSIONS = 4
"""Number of versions of a run of `killed_trainer.py`."""
FOLLOWERS = {"explorer-1": 1, "explorer-2": 2}
"""First version that each machine must serve of such a run: the second joins late."""
_publishers: dict[str, Publisher] = {}
"""Publishers of this process by URL: a killed trainer has lost them, with all held weights."""
_engine: EngineClient | None = None


@dataclass(frozen=True)
class Report:
    version: int
    content_hash: str
    fingerprint: Fingerprint | None
    sha256: str
    """Hash of the bytes of its files, one after another."""


def weights(version: int) -> dict[str, Data]:
    """Return the files of a version; every third version has two blocks."""
    size = BLOCK_BYTES + 1000 if version % 3 == 0 else 1000
    return {"model.safetensors": bytearray(version.to_bytes(2, "little") * (size // 2))}


def fingerprint(version: int) -> Fingerprint:
    return Fingerprint(sequences=((3, 1, version),), logprobs=((-2.5, -0.1),), dtype="float32")


def publish(config_file: str, url: str, versions: list[int]) -> list[Report]:
    config, storage, worker = load_config(config_file), open_storage(url), get_worker()
    if url not in _publishers:
        serve_blocks(worker)
        holds = config.sync_method != "checkpoint"
        holder = build_holder(config, storage, worker.address) if holds else None
        _publishers[url] = Publisher(storage, "main", holder=holder)
    said = []
    for version in versions:
        published = _publishers[url].publish(version, weights(version), fingerprint(version))
        sha256 = hashlib.sha256(weights(version)["model.safetensors"]).hexdigest()
        said.append(Report(version, published.content_hash, published.fingerprint, sha256))
    return said


def give_blocks() -> str:
    """Give held weights of this machine to others; return the address for requests."""
    serve_blocks(get_worker())
    return str(get_worker().address)


def give_nothing(dask_worker: Worker) -> None:
    """Give no block to anyone from the next start of a run until `reconnect` is called."""

    async def answer(**asked: object) -> dict[str, None]:
        return {"block": None}

    vars(dask_tree)["_answer"] = answer


def reach_no_rank(dask_worker: Worker) -> None:
    """Make the ranks unreachable from this machine until `reconnect` is called."""

    def refused(address: str) -> object:
        raise ConnectionRefusedError(f"{address} refuses")

    vars(process_group)["_store_of_another"] = refused


def reconnect(dask_worker: Worker) -> None:
    """Undo `give_nothing` and `reach_no_rank`."""
    vars(process_group)["_store_of_another"] = _store_of_another
    vars(dask_tree)["_answer"] = _answer
    serve_blocks(dask_worker)


def collect(url: str, version: int) -> None:
    """Remove older versions, as the explorer does."""
    remove_weights_below(open_storage(url), version)


def write_held(url: str) -> None:
    """Write held weights on request, as the trainer does between two steps."""
    _publishers[url].write_held()


def engine_of(config: Config) -> EngineClient:
    """Return the engine of this machine, a child process."""
    global _engine
    if _engine is None or not _engine.alive():
        _engine = EngineClient(engine_spec(config.explorer.rollout_model, config, 1, None))
        _engine.wait_ready()
    return _engine


def serve(config_file: str, url: str, version: int) -> Report:
    """Wait for a version, fetch it to this machine and load it into the engine."""
    config, storage = load_config(config_file), open_storage(url)
    engine = engine_of(config)
    SyncHandle(storage, None).wait_for_version(version, TIMEOUT_S)
    published = read_published(storage, version)
    assert published is not None
    published = engine.fetch(storage, published, TIMEOUT_S, transport=_transport(storage, config))
    engine.load(storage, published)
    assert engine._copy is not None
    digest = hashlib.sha256()
    for file in engine._copy.files:
        digest.update(Path(file).read_bytes())
    return Report(engine.weights.version, engine.weights.content_hash, engine.weights.fingerprint, digest.hexdigest())


def follow(config_file: str, folder: str, machine: str) -> list[list[Report]]:
    """Serve the versions of the runs in `folder`, one run after another, each version as soon as it is published."""
    found: list[list[Report]] = []
    while True:
        run = Path(folder, str(len(found)))
        while not run.exists():
            if Path(folder, "problems.json").exists():
                return found
            time.sleep(0.01)
        found.append([])
        for version in range(FOLLOWERS[machine], NUM_VERSIONS + 1):
            found[-1].append(serve(config_file, str(run), version))
            _served_file(run, machine).write_text(str(version))


def served_by(run: Path, machine: str) -> int:
    """Return the version that a following machine serves now; 0: none yet."""
    try:
        return int(_served_file(run, machine).read_text() or 0)
    except FileNotFoundError:
        return 0


def _served_file(run: Path, machine: str) -> Path:
    return run / f"served-by-{machine}"


def engine_pid(config_file: str) -> int:
    return engine_of(load_config(config_file))._child.pid
