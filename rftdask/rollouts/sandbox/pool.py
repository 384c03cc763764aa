"""Runs attempts at rollouts in separate processes, so that a broken attempt affects only itself.

A workflow that hangs, blocks, crashes, exhausts memory or prints without end is killed with all its child processes,
and its attempt ends with a typed error; the event loop never waits for it. A process runs one attempt and is then
killed, so that no attempt inherits the state of another. A `ForkServer` serves many work units, a `SandboxPool` one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgpack

from rftdask.data.task import Task
from rftdask.errors import RoleError, UserError
from rftdask.rollouts.policy.base import PolicyHandle
from rftdask.rollouts.policy.openai_api import OpenAIAnswer
from rftdask.rollouts.sandbox import messages
from rftdask.rollouts.sandbox.bubblewrap import bwrap_command
from rftdask.rollouts.workflows.base import PromptTooLongError, Response, Reward

START_TIMEOUT_S = 120.0
"""Deadline of the imports of plug-ins."""
MAX_RECEIVED_BYTES = 256 << 20
"""Maximum size of all messages from one attempt."""
_MAX_OUTPUT_BYTES = 16 << 20
"""Maximum output of one process."""
BEGIN_TIMEOUT_S = 60.0
"""Deadline for a fork to begin."""
_EXIT_CODE_WAIT_S = 5.0
_SEND_WAIT_S = 5.0
"""Seconds to wait for a fork server whose socket is full."""
_CLOSE_WAIT_S = 5.0
"""Seconds that the fork server and its guard have to end all their processes."""
_TAIL_BYTES = 2000
_MAX_STARTING = 16
"""Maximum number of starting forks: the fork server's socket holds some hundred requests."""

log = logging.getLogger(__name__)


class SandboxError(Exception):
    """Error of a workflow in its sandbox, or death of its process. The text contains the original error."""


class SandboxLostError(RoleError):
    """The fork server has died, which is not the fault of the rollout that needs a sandbox."""


class ForkServer:
    """Process that imports the plug-ins once and forks a process for each attempt; see child.py."""

    def __init__(self, spec: messages.SandboxSpec, *, logs_failures: bool = True) -> None:
        """Waits for the imports. logs_failures: False: the caller reports errors of workflows.

        Raises: UserError: an import failed, or bwrap is not installed; RoleError: the process died.
        """
        self._logs_failures = logs_failures
        self.taken: dict[int, messages.Ended | None] = {}
        """Ends of forks in use, by process id. None: running."""
        self._pools = threading.Lock()
        """Guards the two below."""
        self.num_pools = 0
        """Number of listening pools, all on one event loop."""
        self._closes_later = False
        """True if it was closed while pools listened, whose event loop still watches the socket."""
        self._failures: Counter[str] = Counter()
        """Number of failures by error and code location."""
        path = tuple(path or os.getcwd() for path in sys.path)
        read = (*path, *spec.plugin_dirs, os.getcwd())
        wrapped = bwrap_command(read, network=spec.network) if spec.bubblewrap else ()
        # SEQPACKET: a message is one packet with its descriptors, without framing.
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile(prefix="rftdask-sandbox-")  # noqa: SIM115 -- `close` closes it
        with far:
            self._process = subprocess.Popen(
                [*wrapped, sys.executable, "-m", "rftdask.rollouts.sandbox.child", str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[far.fileno()],
                env={**os.environ, **dict(spec.env)},
                # A group of its own: `end` kills all of it, and Ctrl-C at a terminal does not reach it.
                start_new_session=True,
            )
        setup = messages.Setup(path, spec)
        names = ", ".join((*spec.workflows, *spec.rewards)) or "nothing"
        # The reply has a deadline: an import may hang (connecting to a dead server), and may end the process.
        reply: messages.FromForkServer | None = None
        try:
            self._control.send(msgpack.packb(messages.TO_FORK_SERVER.encode(setup)))
            self._control.settimeout(START_TIMEOUT_S)
            if packet := self._control.recv(1 << 20):
                reply = messages.FROM_FORK_SERVER.decode(msgpack.unpackb(packet))
        except TimeoutError:
            reply = messages.Imported(f"importing {names} took more than {START_TIMEOUT_S:.0f} s")
        except ConnectionError:
            pass  # it died, so `reply` stays None
        if reply != messages.Imported():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if reply else 2.0)  # let a dying process finish its output
            self._log.seek(0)
            tail = self._log.read()[-_TAIL_BYTES:].decode(errors="replace").strip() or "it printed nothing"
            self.close()
            if isinstance(reply, messages.Imported):
                raise UserError(reply.problem)
            raise RoleError(f"the process that imports {names} died: {tail}")
        self._control.setblocking(False)

    def log_failure(self, failure: messages.Failed) -> None:
        """Log a failure with its traceback the first time, and its count after 10, 100, 1000, ... equal ones."""
        if not self._logs_failures:
            return
        # Failures are equal if their code locations are; messages differ from row to row.
        where = failure.error + "".join(re.findall(r'^ *File ".*$', failure.traceback, re.MULTILINE))
        self._failures[where] += 1
        times = self._failures[where]
        if times == 1:
            log.warning("a workflow raised:\n%s", failure.traceback)
        elif str(times).strip("0") == "1":
            log.warning("a workflow raised %s %d times at the same place, now: %s", failure.error, times, failure.text)

    def alive(self) -> bool:
        """False after its death, when a new one is needed."""
        return self._process.poll() is None

    def fork(self) -> tuple[socket.socket, int]:
        """Start a fork. Returns: its stream and its output pipe. Raises: SandboxLostError: the fork server is dead."""
        near, far = socket.socketpair()
        output, far_output = os.pipe()
        try:
            self._send(messages.Fork(), (far.fileno(), far_output))
        except SandboxLostError:
            near.close()
            os.close(output)
            raise
        finally:
            # Close the copies of this process, or it would never see the end of the stream.
            far.close()
            os.close(far_output)
        return near, output

    def kill(self, pid: int) -> None:
        """Kill a fork and its processes, through the fork server, because only that knows if the pid is reused."""
        with contextlib.suppress(SandboxLostError):  # its forks died with it
            self._send(messages.Kill(pid))

    def _send(self, message: messages.ToForkServer, fds: Sequence[int] = ()) -> None:
        """Raises: SandboxLostError: the fork server is dead, or has not read its socket for `_SEND_WAIT_S`."""
        packet = msgpack.packb(messages.TO_FORK_SERVER.encode(message))
        try:
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:  # its socket is full
                select.select([], [self._control], [], _SEND_WAIT_S)
                socket.send_fds(self._control, [packet], fds)
        except (OSError, ValueError) as error:  # ValueError: closed
            raise SandboxLostError(f"the process that starts sandboxes is gone: {error}") from error

    def read_events(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := self._control.recv(1 << 16):
                event = messages.FROM_FORK_SERVER.decode(msgpack.unpackb(packet))
                assert isinstance(event, messages.Ended), event
                if event.pid in self.taken:
                    self.taken[event.pid] = event

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a group: bwrap is two processes
        self._process.wait()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read its events on the loop for one more pool. Call it in the loop's thread, like `unlisten`."""
        with self._pools:
            self.num_pools += 1
        loop.add_reader(self._control.fileno(), self.read_events)

    def unlisten(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._pools:
            self.num_pools -= 1
            if self.num_pools:
                return
            loop.remove_reader(self._control.fileno())
        if self._closes_later:
            self.close()

    def close(self) -> None:
        """End it and all forks. Idempotent."""
        with self._pools:
            if self.num_pools:
                self._closes_later = True
                self.end()
                return
        self._control.close()  # the fork server then kills its forks and ends
        try:
            self._process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self.end()
        self._log.close()


class SandboxPool:
    """Runs each attempt of a work unit in its own process. Pools of one fork server must be on one event loop."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.Semaphore(_MAX_STARTING)
        fork_server.listen(self._loop)

    async def attempt(self, workflow: str, task: Task, model: PolicyHandle) -> Reward:
        """Run one attempt of `workflow`. Cancellation kills its process. Raises: SandboxError; PromptTooLongError."""
        async with self._starting:
            process = await _Process.start(self._fork_server)
        try:
            outcome = await process.attempt(messages.Run(workflow, pickled(task), model.auxiliary_names), model)
        finally:
            process.kill()
        if isinstance(outcome, messages.Finished):
            for name, time_s in outcome.times.items():
                model.times[name] = model.times.get(name, 0.0) + time_s
            return cast(Reward, outcome.reward)
        if outcome.error == PromptTooLongError.__name__:
            raise PromptTooLongError(outcome.text)
        where = ""
        if outcome.traceback:
            self._fork_server.log_failure(outcome)
            # Innermost location: " (my_module.py:12 in run)".
            places = re.findall(r'^ *File "(?:.*/)?(.+?)", line (\d+), (.*)$', outcome.traceback, re.MULTILINE)
            where = " ({}:{} {})".format(*places[-1]) if places else ""
        raise SandboxError(f"{outcome.error}: {outcome.text}{where}")

    def close(self) -> None:
        """Stop listening to the fork server."""
        self._fork_server.unlisten(self._loop)


def pickled(task: Task) -> bytes:
    """Pickled task. Frozen dicts become plain dicts, or every fork would have to import the module of their type."""

    class TaskPickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (dict, (dict(value),)) if isinstance(value, dict) else NotImplemented

    buffer = io.BytesIO()
    TaskPickler(buffer).dump(task)
    return buffer.getvalue()


class _Process:
    """Worker's side of one fork, which runs one attempt."""

    def __init__(
        self, fork_server: ForkServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, output_fd: int
    ) -> None:
        self._fork_server, self._reader, self._writer, self._output_fd = fork_server, reader, writer, output_fd
        self._loop = asyncio.get_running_loop()
        self._pid = self._num_received = self._num_printed = 0
        self._tail, self._reason = b"", ""
        os.set_blocking(output_fd, False)
        # Read continuously: a process that prints into a full pipe would stop.
        self._loop.add_reader(output_fd, self._read_output)

    @classmethod
    async def start(cls, fork_server: ForkServer) -> _Process:
        """Start a fork and wait until it has begun. Raises: SandboxError; SandboxLostError: the fork server ended."""
        near, output = fork_server.fork()
        try:
            # The streams own the socket, even after an error; close only the pipe.
            streams = await asyncio.open_connection(sock=near)
        except BaseException:
            os.close(output)
            raise
        process = cls(fork_server, *streams, output)
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                hello = await process._receive()
            assert isinstance(hello, messages.Hello), "code of a plug-in has not run yet"
            process._pid = hello.pid
            fork_server.taken[hello.pid] = None
        except TimeoutError:
            process.kill()
            fork_server.end()
            text = f"no sandbox process began within {BEGIN_TIMEOUT_S:g} s; the process that starts them was ended"
            raise SandboxLostError(text) from None
        except BaseException:
            process.kill()
            raise
        return process

    async def attempt(self, run: messages.Run, model: PolicyHandle) -> messages.Finished | messages.Failed:
        """Run an attempt with calls to `model`. Raises: SandboxError: its process died or sent an invalid message."""
        self._send(run)
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = await self._receive()
                if isinstance(message, messages.Ask):
                    answer = asyncio.create_task(self._answer(message, model))
                    answers.add(answer)
                    answer.add_done_callback(answers.discard)
                elif isinstance(message, messages.SetState):
                    model.set_state(**message.values)
                elif isinstance(message, messages.Finished | messages.Failed):
                    if isinstance(message, messages.Finished):
                        message = replace(message, reward=messages.read_reward(message.reward))
                    self._read_output()  # output that it printed before this message
                    return message
        except (KeyError, TypeError, ValueError) as error:  # a workflow may write to the stream itself
            raise SandboxError(f"its process sent an invalid message: {error!r:.200}") from error
        finally:
            for answer in answers:
                answer.cancel()

    async def _answer(self, question: messages.Ask, model: PolicyHandle) -> None:
        # The fork is not trusted: the receiver of the text is set here.
        arguments = {name: value for name, value in question.arguments.items() if name != "on_text"}
        if question.streams and question.method == "openai":
            arguments["on_text"] = lambda *delta: self._send(messages.TextDelta(question.number, *delta))
        try:
            value = await model.model(question.model).call(question.method, arguments)
        except Exception as error:  # for the workflow to handle; the runner detects failures of the engine
            # By name, because exceptions cannot be sent, and the fork may not know the class.
            self._send(messages.Answer(question.number, error=type(error).__name__, text=str(error)))
            return
        kind = (
            "response" if isinstance(value, Response) else "openai" if isinstance(value, OpenAIAnswer) else "logprobs"
        )
        self._send(messages.Answer(question.number, **{kind: value}))

    def _send(self, message: messages.ToFork) -> None:
        body = msgpack.packb(messages.TO_FORK.encode(message))
        self._writer.write(messages.LENGTH.pack(len(body)) + body)

    async def _receive(self) -> messages.FromFork:
        """Raises: SandboxError: the fork died, or sent too much; ValueError, TypeError: it sent no message."""
        try:
            size = messages.LENGTH.unpack(await self._reader.readexactly(messages.LENGTH.size))[0]
            # Check the length before memory is allocated for the body.
            self._num_received += size
            if size > messages.MAX_FRAME_BYTES or self._num_received > MAX_RECEIVED_BYTES:
                raise SandboxError(f"it sent {self._num_received} bytes of messages, {size} in one")
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SandboxError(await self._death()) from None
        return messages.FROM_FORK.decode(msgpack.unpackb(body, strict_map_key=False))

    async def _death(self) -> str:
        # The exit code comes from the fork server, a little later than the end of the stream.
        deadline = self._loop.time() + _EXIT_CODE_WAIT_S
        taken = self._fork_server.taken
        while self._pid and taken.get(self._pid) is None and self._loop.time() < deadline and self._fork_server.alive():
            await asyncio.sleep(0.002)
        if self._reason:
            return self._reason
        if not self._fork_server.alive():  # it has ended the fork, which is not the rollout's failure
            raise SandboxLostError("the process that starts sandboxes is gone")
        if not self._pid:
            return "its process could not be started; see the log"
        ended = taken.get(self._pid)
        if ended is not None and ended.reason:
            return ended.reason
        code = None if ended is None else ended.code
        how = "died" if code is None else f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        printed = self._tail.decode(errors="replace").strip()
        return f"the workflow's process {how}" + (f"; it printed last: {printed[-300:]}" if printed else "")

    def _read_output(self) -> None:
        try:
            data = os.read(self._output_fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output_fd)
            return
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._num_printed += len(data)
        if self._num_printed <= _MAX_OUTPUT_BYTES:
            log.info("printed in a rollout: %s", data.decode(errors="replace").rstrip())
        else:
            self._reason = f"it printed more than {_MAX_OUTPUT_BYTES} bytes"
            self.kill()

    def kill(self) -> None:
        """Kill the process and close its pipes. Idempotent."""
        if self._pid:
            self._fork_server.kill(self._pid)
            self._fork_server.taken.pop(self._pid, None)
            self._pid = 0  # the pid may be reused from now on
        self._writer.close()
        if self._output_fd >= 0:
            self._loop.remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = -1
