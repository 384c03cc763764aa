"""Promises of engines on workers that come and go: the engine of a lost worker fails its calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.remote import FROM_WORKER, Gone, Load, RemoteEngine, RemoteEngines, RemoteEngineServer
from rftdask.engines.server import Ready
from rftdask.errors import ProcessLostError, UserError

ASKED = GenerateRequest((1, 2), SamplingParams(max_tokens=3), seed=7)


class Pipe:
    """In-process replacement of the part of Dask's Comm that both sides use."""

    peer_address = "tcp://127.0.0.2:1"

    def __init__(self) -> None:
        self.other = self
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        message = await self._inbox.get()
        if message is OSError:
            raise OSError("the stream is closed")
        return message

    async def write(self, message: Any) -> None:
        self.other._inbox.put_nowait(message)

    def abort(self) -> None:
        for side in (self, self.other):
            side._inbox.put_nowait(OSError)


def pipes() -> tuple[Pipe, Pipe]:
    here, there = Pipe(), Pipe()
    here.other, there.other = there, here
    return here, there


class StubEngine:
    cache_tokens = None


async def said(*messages: Any) -> RemoteEngine:
    """Engine of a worker that sends these messages."""
    here, there = pipes()
    engine = RemoteEngine("tcp://127.0.0.2:1", here)  # type: ignore[arg-type]
    await there.write(list(map(FROM_WORKER.encode, messages)) or None)
    await engine.wait_ready()
    return engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0)


def test_an_engine_of_a_lost_worker_fails_its_calls() -> None:
    async def within() -> None:
        engines = RemoteEngines(lambda address: said(Ready(name=f"engine {address}")), again_s=60.0)
        engines.look({"a", "b"})
        await until(lambda: len(engines.alive) == 2)
        first, second = engines.alive
        assert str(first) == "engine a of worker tcp://127.0.0.2:1"
        [asked, other] = [*first.submit([ASKED]), *second.submit([ASKED])]
        engines.look({"b", "c"})
        with pytest.raises(ProcessLostError):
            await asyncio.wrap_future(asked)
        await until(lambda: len(engines.alive) == 2)
        assert engines.alive[0] is second and not other.done() and not first.alive()
        second._comm.abort()
        with pytest.raises(ProcessLostError, match="the stream is closed"):
            await asyncio.wrap_future(other)

        def is_opened_again() -> bool:
            engines.look({"b", "c"})
            return len(engines.alive) == 2

        await until(is_opened_again)
        assert second not in engines.alive
        engines.close()
        await until(lambda: not engines.alive)

    asyncio.run(asyncio.wait_for(within(), 20))


@pytest.mark.parametrize("error", [OSError, KeyError])
def test_an_engine_is_lost_if_nothing_can_be_sent(error: type[Exception]) -> None:
    async def within() -> None:
        engine = await said(Ready())

        async def fail(message: Any) -> None:
            raise error

        engine._comm.write = fail  # type: ignore[method-assign]
        [asked] = engine.submit([ASKED])
        with pytest.raises(ProcessLostError):
            await asyncio.wrap_future(asked)
        assert not engine.alive()

    asyncio.run(asyncio.wait_for(within(), 20))


def test_an_engine_is_lost_if_a_bug_ends_a_load() -> None:
    async def within() -> None:
        here, there = pipes()
        server = RemoteEngineServer(there, may_load=True)  # type: ignore[arg-type]
        running = asyncio.create_task(server.run())
        no_storage: Any = None
        server.begin(StubEngine(), no_storage)  # type: ignore[arg-type]
        engine = RemoteEngine("tcp://127.0.0.2:1", here)  # type: ignore[arg-type]
        await engine.wait_ready()
        asked = engine._ask(lambda number: Load(number, version=1))
        with pytest.raises(ProcessLostError, match="AttributeError"):
            await asyncio.wrap_future(asked)
        engine.close()
        await running

    asyncio.run(asyncio.wait_for(within(), 20))


def test_a_worker_without_an_engine_is_retried_later() -> None:
    async def within() -> None:
        opened = []

        async def open_engine(address: str) -> RemoteEngine:
            opened.append(address)
            return await said(*([Gone("no such model", is_users=True)] * (address == "a")))

        slow, quick = RemoteEngines(open_engine, again_s=60.0), RemoteEngines(open_engine, again_s=0.0)
        for engines, num_opened in ((slow, 1), (quick, 3)):
            opened.clear()
            engines.look({"a"})
            for _ in range(1000):
                await asyncio.sleep(0)
                if len(opened) < 3:
                    engines.look({"a"})
            assert len(opened) == num_opened and engines.alive == []
            engines.close()
        with pytest.raises(UserError, match="no such model"):
            await open_engine("a")
        with pytest.raises(ProcessLostError, match="it serves no engine"):
            await open_engine("a worker without the operation")

    asyncio.run(asyncio.wait_for(within(), 20))
