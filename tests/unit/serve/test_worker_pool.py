"""Promises of an engine on a worker, with both sides of the connection in this process and a real engine process: calls
are answered, streamed and dropped; weights are loaded, or the error is reported; images come from the run folder; the
end of one side ends the other and the engine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftdask.config import replace as replace_keys
from rftdask.engines.base import GenerateRequest
from rftdask.engines.remote import RemoteEngine
from rftdask.errors import ProcessLostError, StorageError
from rftdask.rollouts.work_units import EngineRequest
from rftdask.run.run_folder import record_config
from rftdask.serve.worker_pool import host
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import latest_written
from tests.unit.engines.test_remote import ASKED, pipes
from tests.unit.serve.test_sessions import CONFIG
from tests.unit.synchronizer.sync_cases import publish_weights

FAKE = replace_keys(CONFIG, {"model.model_path": "none", "explorer.rollout_model.engine_type": "fake"})


def run(tmp_path: Path, check: Callable[[RemoteEngine, Storage], Awaitable[None]]) -> None:
    async def within() -> None:
        storage = open_storage(tmp_path)
        here, there = pipes()
        request = EngineRequest(storage.url, record_config(storage, FAKE), 1, None)
        async with asyncio.timeout(120):
            hosting = asyncio.create_task(host(there, astuple(request)))  # type: ignore[arg-type]
            engine = RemoteEngine("tcp://127.0.0.2:1", here)  # type: ignore[arg-type]
            await engine.wait_ready()
            await check(engine, storage)
            engine.close()
            await hosting

    asyncio.run(within())
    engines = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends at this moment
            engines += [each] * ("rftdask.engines.server:serve" in " ".join(each.cmdline()))
    assert psutil.wait_procs(engines, timeout=60)[1] == [], "an engine is left"


async def answers(engine: RemoteEngine, *requests: GenerateRequest) -> list[Any]:
    return list(await asyncio.gather(*map(asyncio.wrap_future, engine.submit(requests))))


def test_calls_are_answered_and_streamed_and_weights_are_loaded(tmp_path: Path) -> None:
    async def check(engine: RemoteEngine, storage: Storage) -> None:
        received: list[int] = []
        [plain, streamed] = await answers(engine, ASKED, replace(ASKED, on_tokens=received.extend))
        assert plain == streamed and len(plain.tokens) == 3 and plain.max_policy_version == 0
        assert tuple(received) == plain.tokens[: len(received)] and received
        publish_weights(storage, 4, b"weights")
        published = latest_written(storage)
        assert published is not None
        await asyncio.to_thread(engine.load, storage, published)
        assert engine.weights == published
        assert [each.max_policy_version for each in await answers(engine, ASKED)] == [4]
        with pytest.raises(StorageError, match="weights of version 9 no longer exist"):
            await asyncio.to_thread(engine.load, storage, replace(published, version=9))
        assert engine.weights == published and engine.alive()
        [dropped] = engine.submit([ASKED])
        assert dropped.cancel()
        assert [each.max_policy_version for each in await answers(engine, ASKED)] == [4]

    run(tmp_path, check)


def test_missing_image_ends_the_engine_with_its_name(tmp_path: Path) -> None:
    async def check(engine: RemoteEngine, storage: Storage) -> None:
        with pytest.raises(ProcessLostError, match=r"media/abcd.* is missing"):
            await answers(engine, replace(ASKED, images=("abcd",)))
        assert not engine.alive()
        with pytest.raises(ProcessLostError):
            await answers(engine, ASKED)
        with pytest.raises(ProcessLostError):
            await asyncio.to_thread(engine.load, storage, engine.weights)

    run(tmp_path, check)
