"""The fork server, a process that only forks, and the code of its forks. pool.py is the worker's side.

The fork server imports the plug-ins once, has one thread, and forks a process for each attempt, which starts in
milliseconds with everything imported. A fork leads a process group, which the fork server kills as a whole even if the
leader has ended. Descendants that left the group by setsid are adopted by their fork, which is their subreaper, or by
the fork server when the fork has ended, which then kills them. All of them end with the fork server, which ends with
the worker. Its parent, a guard that never runs code of a plug-in, ensures this.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import math
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import msgpack

from rftdask.config.plugins import load_plugin_folders, read_functions
from rftdask.processes.zygote import die_with_parent
from rftdask.rollouts.policy.answer_stream import OnText
from rftdask.rollouts.policy.base import ForwardingPolicy, Method
from rftdask.rollouts.rewards.registry import get_reward
from rftdask.rollouts.sandbox import messages
from rftdask.rollouts.workflows.base import PromptTooLongError, as_reward
from rftdask.rollouts.workflows.registry import find_workflow

_PACKET_BYTES = 128 << 10
_PR_SET_CHILD_SUBREAPER = 36
_MAX_TRACEBACK = 8000
_OPENAI = (
    *("openai", "starlette.applications", "starlette.responses"),
    *("uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.off"),
)
"""Modules to import before forking workflows that use them, which takes most of a second."""
_GRACE_S = 2.0
"""Seconds for a stopped fork server to continue (a batch system may pause a job), or to end after the worker."""
_POLL_INTERVAL_S = 0.2
"""Seconds between checks of the memory of rollouts with child processes."""
_libc = ctypes.CDLL(None)


def main(control_fd: int) -> None:
    """Start the fork server in a child process, and become its guard."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    if (server := os.fork()) > 0:
        _guard(server, control_fd)
    else:
        os.setsid()  # signals to the group of one must not reach the other
        die_with_parent(guard)
        _serve(control_fd)


def _guard(server: int, control_fd: int) -> None:
    """Wait until the fork server has ended, is stopped, or outlives the worker; then kill all its processes."""
    worker = select.poll()
    worker.register(control_fd, 0)  # reports only that the other end is closed
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    deadline = math.inf
    while time.monotonic() < deadline:
        state = os.waitid(os.P_PID, server, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if state is not None and state.si_code != os.CLD_STOPPED:
            break
        # A server that is stopped, or whose worker has closed its end of the socket, has a grace period.
        if state is None and not worker.poll(0):
            deadline = math.inf
        elif deadline == math.inf:
            deadline = time.monotonic() + _GRACE_S
        signal.sigtimedwait({signal.SIGCHLD}, 0.25)
    # Orphaned descendants become children of this process, which is their subreaper.
    while below := _children():
        for pid in below:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _serve(control_fd: int) -> None:
    """Run the fork server: do the imports of the first message, report them, and fork until the worker is gone."""
    control = socket.socket(fileno=control_fd)
    setup = messages.TO_FORK_SERVER.decode(msgpack.unpackb(control.recv(_PACKET_BYTES)))
    assert isinstance(setup, messages.Setup), setup
    spec = setup.spec
    try:
        sys.path.extend(path for path in setup.path if path not in sys.path)
        load_plugin_folders(spec.plugin_dirs)
        for module in spec.modules:
            __import__(module)
        # Resolve the names before forking, so that a wrong name is reported before any rollout.
        for name in spec.workflows:
            find_workflow(name)
        for name in spec.rewards:
            get_reward(name)
        for part in read_functions("rftdask.rollouts.rewards", "reward").values():
            part.load()  # a workflow may use any of them as its default reward
    except BaseException as error:  # a plug-in may raise anything when imported; the worker gets the text
        problem = messages.Imported((str(error) or type(error).__name__)[-_MAX_TRACEBACK:])
        control.send(msgpack.packb(messages.FROM_FORK_SERVER.encode(problem)))
        return
    if any(map(_uses_openai, spec.workflows)):
        for module in _OPENAI:
            with contextlib.suppress(ImportError):  # a fork that needs it raises the error
                importlib.import_module(module)
    control.send(msgpack.packb(messages.FROM_FORK_SERVER.encode(messages.Imported())))
    _ForkServer(control, spec).run()


def _uses_openai(workflow: str) -> bool:
    module = sys.modules.get(find_workflow(workflow).module)
    with contextlib.suppress(OSError, TypeError):
        return module is not None and "openai_client" in inspect.getsource(module)
    return False


class _ForkServer:
    def __init__(self, control: socket.socket, spec: messages.SandboxSpec) -> None:
        self._pid, self._control = os.getpid(), control
        self._max_memory_bytes = spec.max_memory_bytes
        self._has_folders = spec.bubblewrap
        self._inherited_bytes = _resident_bytes("self")
        self._living: dict[int, str] = {}
        """Reason of the kill by pid of a running fork. "": not killed."""
        self._wake, self._woken = socket.socketpair()

    def run(self) -> None:
        """Fork, kill, and report forks that have ended, until the worker is gone."""
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # SIGCHLD writes a byte that wakes `select`. Its handler does nothing, so it interrupts nothing.
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._imported = _children()  # processes that plug-ins started at import
        gc.collect()
        gc.freeze()  # or the collector would touch, and thus copy, every page in every fork
        next_check = time.monotonic()
        while True:
            ready, _, _ = select.select([self._control, self._wake], [], [], _POLL_INTERVAL_S)
            if time.monotonic() >= next_check:
                self._check_memory()
                next_check = time.monotonic() + _POLL_INTERVAL_S
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap()
            if self._control in ready:
                packet, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 2)
                if not packet:
                    break
                message = messages.TO_FORK_SERVER.decode(msgpack.unpackb(packet))
                if isinstance(message, messages.Fork):
                    self._fork(*fds)
                # Only running forks: the pid of a reaped one may be reused.
                elif isinstance(message, messages.Kill) and self._living.pop(message.pid, None) is not None:
                    _kill_group(message.pid)  # the worker does not need its exit code

    def _fork(self, stream_fd: int, output_fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # the worker sees the end of the stream
            print(f"cannot start a process for a rollout: {error}", file=sys.stderr)
            pid = -1
        if pid == 0:
            # The fork must never return to the loop of the fork server.
            try:
                self._become_fork(output_fd)
                asyncio.run(_Attempt(socket.socket(fileno=stream_fd)).run())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        if pid > 0:
            self._living[pid] = ""
        os.close(stream_fd)
        os.close(output_fd)

    def _become_fork(self, output_fd: int) -> None:
        os.setsid()
        die_with_parent(self._pid)
        # It adopts its orphaned descendants while it lives, because an attempt may start daemons.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._wake, self._woken):
            end.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, fd in ((null, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(source, fd)
        os.close(output_fd)
        os.close(null)
        if self._has_folders:
            os.mkdir(_folder(os.getpid()))
            os.chdir(_folder(os.getpid()))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self._max_memory_bytes is not None:
            # In addition to the inherited address space: libraries reserve gigabytes that they never touch.
            # The limit applies to each process; _check_memory checks their sum.
            with open("/proc/self/statm") as file:
                inherited = int(file.read().split()[0]) * resource.getpagesize()
            limit = inherited + self._max_memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _check_memory(self) -> None:
        # Kill the forks that exceed the limit together with their child processes. RLIMIT_AS limits a single process.
        if self._max_memory_bytes is None:
            return
        allowed = self._max_memory_bytes + self._inherited_bytes
        for pid in self._living:
            tree = _tree(pid)
            # Counting shared pages once is slow, so check an upper bound first.
            if len(tree) == 1 or sum(map(_resident_bytes, tree)) <= allowed:
                continue
            if (used := sum(map(_share_bytes, tree))) > allowed:
                self._living[pid] = (
                    f"MemoryError: its {len(tree)} processes together use "
                    f"{(used - self._inherited_bytes) / 2**30:.3f} GB beyond the imports, over the "
                    f"{self._max_memory_bytes / 2**30:g} GB of explorer.sandbox.max_memory_gb"
                )
                _kill_group(pid)

    def _reap(self) -> None:
        # Report forks that have ended, and kill the rest of their group. WNOWAIT keeps the pid in use, so that no new
        # process can have it before the group is killed.
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                _kill_group(dead.si_pid)
                if self._has_folders:
                    shutil.rmtree(_folder(dead.si_pid), ignore_errors=True)
                _, status = os.waitpid(dead.si_pid, 0)
                if dead.si_pid in self._living:
                    reason = self._living.pop(dead.si_pid)
                    ended = messages.Ended(dead.si_pid, os.waitstatus_to_exitcode(status), reason)
                    with contextlib.suppress(ConnectionError):  # the worker is gone
                        self._control.send(msgpack.packb(messages.FROM_FORK_SERVER.encode(ended)))
        # Kill orphans in other sessions, which this process adopted when their fork ended; their children follow.
        for pid in _children() - self._living.keys() - self._imported:
            os.kill(pid, signal.SIGKILL)


def _folder(pid: int) -> str:
    """Working directory of a fork under bubblewrap, where /tmp is the fork server's own."""
    return f"/tmp/rollout-{pid}"


def _children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))


def _tree(pid: int) -> list[int]:
    """Pids of a process and its descendants; the process comes first."""
    tree = [pid]
    for process in tree:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    tree += map(int, file.read().split())
    return tree


def _resident_bytes(pid: int | str) -> int:
    """Memory of a process including shared pages. 0: it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _share_bytes(pid: int) -> int:
    """Proportional memory of a process, including swapped pages: a page that n processes share counts 1/n."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = [line.split() for line in file]
    except OSError:  # it has ended, or is not readable
        return _resident_bytes(pid)
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("Pss:", "SwapPss:"))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Attempt(ForwardingPolicy):
    """One attempt in a fork, on its own event loop, and its model handle."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._receivers: dict[int, OnText] = {}
        """Receivers of streamed text by number of the call."""
        self._num_calls = 0

    async def run(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._stream)
        self._send(messages.Hello(os.getpid()))
        run = await self._receive()
        assert isinstance(run, messages.Run), "the worker sends Run first"
        super().__init__(run.auxiliary)
        # Concurrently with the attempt, which may have several calls in progress.
        pump = asyncio.create_task(self._pump())
        outcome = await self._attempt(run)
        with contextlib.suppress(Exception):  # a workflow may have closed it
            sys.stdout.flush()
        self._send(outcome)
        await pump  # until the worker kills this process, as it has the outcome

    async def _attempt(self, run: messages.Run) -> messages.Finished | messages.Failed:
        task = pickle.loads(run.task)  # from the worker, which is trusted
        try:
            result = await find_workflow(run.workflow).run(task, self)
            outcome = messages.Finished(as_reward(result), self.times)
            try:
                _packed(outcome)  # an error here is still a failure of this attempt
            except ValueError as error:
                return messages.Failed("ValueError", f"what the workflow returned: {error}")
            return outcome
        except asyncio.CancelledError:
            return messages.Failed("RuntimeError", "the workflow cancelled itself")
        except SystemExit as error:
            return messages.Failed("RuntimeError", f"the workflow called sys.exit({error.code!r})")
        except BaseException as error:  # becomes the attempt's typed failure, with its traceback
            lines = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
            return messages.Failed(type(error).__name__, str(error)[:_MAX_TRACEBACK], lines)

    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        self._num_calls += 1
        number = self._num_calls
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        plain = dict(arguments)
        if (on_text := plain.pop("on_text", None)) is not None:
            self._receivers[number] = on_text
        try:
            self._send(messages.Ask(number, name, method, plain, on_text is not None))
            await self._writer.drain()
            return await answer
        finally:
            del self._answers[number]
            self._receivers.pop(number, None)

    def set_state(self, **values: Any) -> None:
        super().set_state(**values)
        self._send(messages.SetState(values))

    def _send(self, message: messages.FromFork) -> None:
        body = _packed(message)
        self._writer.write(messages.LENGTH.pack(len(body)) + body)

    async def _receive(self) -> messages.ToFork:
        try:
            size = messages.LENGTH.unpack(await self._reader.readexactly(messages.LENGTH.size))[0]
            return messages.TO_FORK.decode(msgpack.unpackb(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the worker has closed the stream

    async def _pump(self) -> None:
        while True:
            message = await self._receive()
            if isinstance(message, messages.TextDelta):
                if message.number in self._receivers:
                    self._receivers[message.number](message.choice, message.part, message.text)
                continue
            assert isinstance(message, messages.Answer), "a fork runs one attempt"
            # None if the workflow cancelled its call, such as by a timeout.
            waiting = self._answers.get(message.number)
            if waiting is None or waiting.done():
                continue
            if message.error:
                too_long = message.error == PromptTooLongError.__name__
                waiting.set_exception((PromptTooLongError if too_long else RuntimeError)(message.text))
            else:
                waiting.set_result(message.response or message.openai or message.logprobs)


def _packed(message: messages.FromFork) -> bytes:
    """Encode a message. Raises: ValueError: longer than MAX_FRAME_BYTES, or values that are not plain data."""
    try:
        body: bytes = msgpack.packb(messages.FROM_FORK.encode(message))
    except (AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"only plain values can leave a sandbox: {error}") from error
    if len(body) > messages.MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes; at most {messages.MAX_FRAME_BYTES} leave a sandbox at once")
    return body


if __name__ == "__main__":
    main(int(sys.argv[1]))
