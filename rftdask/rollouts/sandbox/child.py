"""Sandbox child: the far side of sandbox.py. A process that does nothing but fork, and what its forks do.

The fork server imports the plug-ins once, has one thread, and forks a process for each attempt that finds none idle. So
an attempt starts in milliseconds with everything imported, and what it does to its memory, its threads and its children
is its own. A fork leads a process group of its own, which the fork server kills whole, also when its leader has ended;
and all of them end with the fork server, which ends with its parent.

Messages of fork server and parent are msgpack, one in each packet of a SEQPACKET socket; those of a fork are frames of
4 bytes length and msgpack on a stream. Only the parent's word is trusted: it alone may send a pickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import numbers
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgpack

from rftdask.config.plugins import load_plugin_folders, read_functions
from rftdask.rollouts.policy.base import Method, PolicyHandle
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.workflows.base import PromptTooLongError, Response, as_reward
from rftdask.rollouts.workflows.registry import find_workflow

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20
"""Of one message from a fork; a longer one is an error of its workflow."""
_PACKET_BYTES = 128 << 10
_PR_SET_PDEATHSIG = 1
_MAX_TRACEBACK = 8000


def main(control_fd: int) -> None:
    control = socket.socket(fileno=control_fd)
    setup = msgpack.unpackb(control.recv(_PACKET_BYTES))
    try:
        _preload(setup)
    except BaseException as error:  # whatever a plug-in does when it is imported, its text goes to who started us
        text = str(error) or type(error).__name__
        control.send(msgpack.packb({"failed": text[-_MAX_TRACEBACK:]}))
        return
    control.send(msgpack.packb({"ready": os.getpid()}))
    _ForkServer(control, setup["max_memory_bytes"]).run()


def _preload(setup: Mapping[str, Any]) -> None:
    sys.path.extend(path for path in setup["path"] if path not in sys.path)
    load_plugin_folders(setup["plugin_dirs"])
    for module in setup["modules"]:
        __import__(module)
    for name in setup["workflows"]:
        find_workflow(name)
    for name in setup["rewards"]:
        get_reward(name)
    for part in read_functions("rftdask.rollouts.rewards", "reward").values():
        part.load()  # a workflow's default reward is named nowhere; a fork should not have to import it


class _ForkServer:
    """Forks, kills and buries; see the module's text."""

    def __init__(self, control: socket.socket, max_memory_bytes: int | None) -> None:
        self._control = control
        self._max_memory_bytes = max_memory_bytes
        self._libc = ctypes.CDLL(None)
        self._living: set[int] = set()
        self._wake, self._woken = socket.socketpair()

    def run(self) -> None:
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # the collector would otherwise touch, and so copy, every page in every fork
        while True:
            ready, _, _ = select.select([self._control, self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._bury()
            if self._control in ready and not self._obey():
                break
        for pid in self._living:
            _kill_group(pid)

    def _obey(self) -> bool:
        """Do what the parent says; False if it is gone."""
        packet, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 2)
        if not packet:
            return False
        message = msgpack.unpackb(packet)
        if "kill" in message:
            if message["kill"] in self._living:
                _kill_group(message["kill"])
        else:
            self._fork(*fds)
        return True

    def _fork(self, stream_fd: int, output_fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # the parent sees the end of the stream, and this in the log
            print(f"cannot start a process for a rollout: {error}", file=sys.stderr)
            pid = -1
        if pid == 0:
            # Nothing of the fork server's loop may run in the fork, whatever happens.
            try:
                self._become_fork(output_fd)
                asyncio.run(_Attempts(socket.socket(fileno=stream_fd)).run())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        if pid > 0:
            self._living.add(pid)
        os.close(stream_fd)
        os.close(output_fd)

    def _become_fork(self, output_fd: int) -> None:
        os.setsid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._wake, self._woken):
            end.close()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for fd in (1, 2):
            os.dup2(output_fd, fd)
        os.close(output_fd)
        os.close(null)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self._max_memory_bytes is not None:
            # On top of what the fork inherits: a plug-in's libraries reserve gigabytes that they never touch.
            limit = _address_space_bytes() + self._max_memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _bury(self) -> None:
        """Take note of the dead, and kill what they left behind while their number is still theirs."""
        while self._living:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            _kill_group(dead.si_pid)
            _, status = os.waitpid(dead.si_pid, 0)
            self._living.discard(dead.si_pid)
            self._control.send(msgpack.packb({"ended": dead.si_pid, "code": os.waitstatus_to_exitcode(status)}))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


class _Attempts:
    """A fork: attempts one after the other, on one event loop."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._runs: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0

    async def run(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._stream)
        pump = asyncio.create_task(self._pump(reader))
        self._send({"hello": os.getpid()})
        while True:
            message = await self._runs.get()
            outcome = await self._attempt(message)
            leftover = asyncio.all_tasks() - {pump, asyncio.current_task()}
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)
            # What is left behind in threads would go on beside the next attempt.
            clean = threading.active_count() == 1 and not leftover
            self._send_outcome({**outcome, "clean": clean})
            await self._writer.drain()

    async def _attempt(self, message: Mapping[str, Any]) -> dict[str, Any]:
        task = pickle.loads(message["task"])  # the parent's own
        handle = _RemoteModel(self, message["auxiliary"])
        try:
            result = await find_workflow(message["workflow"]).run(task, handle)
            reward = as_reward(result)
            outcome = {"reward": asdict(reward), "times": handle.times}
            msgpack.packb(outcome, default=_as_plain)
            return outcome
        except asyncio.CancelledError:
            return {"error": "RuntimeError", "text": "the workflow cancelled itself", "traceback": ""}
        except SystemExit as error:
            text = f"the workflow called sys.exit({error.code!r})"
            return {"error": "RuntimeError", "text": text, "traceback": ""}
        except BaseException as error:  # becomes the attempt's typed failure, with its traceback
            lines = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
            return {"error": type(error).__name__, "text": str(error)[:_MAX_TRACEBACK], "traceback": lines}

    def _send_outcome(self, outcome: dict[str, Any]) -> None:
        try:
            self._send(outcome)
        except ValueError as error:
            text = {"error": "ValueError", "text": f"what the workflow returned: {error}", "traceback": ""}
            self._send({**text, "clean": False})

    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        self._num_asked += 1
        number = self._num_asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, "model": name, "method": method, "arguments": dict(arguments)})
            await self._writer.drain()
            return await answer
        finally:
            del self._answers[number]

    def tell_state(self, values: Mapping[str, Any]) -> None:
        self._send({"state": dict(values)})

    def _send(self, message: Mapping[str, Any]) -> None:
        """Raises: ValueError: longer than MAX_FRAME_BYTES, or of values that are no plain data."""
        try:
            body = msgpack.packb(message, default=_as_plain)
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"only plain values can leave a sandbox: {error}") from error
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(body)} bytes; at most {MAX_FRAME_BYTES} leave a sandbox at once")
        self._writer.write(LENGTH.pack(len(body)) + body)

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                message = msgpack.unpackb(await reader.readexactly(size), use_list=False)
            except (asyncio.IncompleteReadError, ConnectionError):
                os._exit(0)  # the parent wants nothing more
            if "run" in message:
                self._runs.put_nowait(message["run"])
                continue
            answer = self._answers.get(message["answer"])
            if answer is None or answer.done():
                continue
            if "error" in message:
                kind = PromptTooLongError if message["error"] == "PromptTooLongError" else RuntimeError
                answer.set_exception(kind(message["text"]))
            else:
                value = message["value"]
                answer.set_result(Response(**value) if isinstance(value, dict) else value)


class _RemoteModel(PolicyHandle):
    """The model handle of one attempt in a fork."""

    def __init__(self, attempts: _Attempts, auxiliary_names: tuple[str, ...]) -> None:
        super().__init__(auxiliary_names)
        self._attempts = attempts

    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        return await self._attempts.ask(name, method, arguments)

    def set_state(self, **values: Any) -> None:
        super().set_state(**values)
        self._attempts.tell_state(values)


def _as_plain(value: Any) -> Any:
    """Numbers of any kind as Python's; of anything else its looks, which the check of a reward will name."""
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):
            return item()
    return {"not plain": repr(value)[:200]}


if __name__ == "__main__":
    main(int(sys.argv[1]))
