"""The fork server, a process that does nothing but fork, and what its forks do; the worker's side is pool.py.

The fork server imports the plug-ins once, has one thread, and forks a process for each attempt. So an attempt starts in
milliseconds, with everything imported and in the state that the imports left, and what it does to its memory, its
working directory, its environment, its threads and its children is its own. A fork leads a process group of its own,
which the fork server kills whole, also when its leader has ended. What left that group by setsid keeps to its fork,
which is its subreaper, or comes to the fork server when that one has ended, which then kills it. All of them end with
the fork server, which ends with the worker: a guard, its parent, sees to that, in which no code of a plug-in ever runs.
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
"""Imported, with what they need, before there are forks of workflows that use them: it takes most of a second."""
_GRACE_S = 2.0
"""For a stopped fork server to go on (a batch system may stop a whole job for a while), or a deaf one to end."""
_LOOK_S = 0.2
"""Between two looks at the memory of rollouts that have children."""
_libc = ctypes.CDLL(None)


def main(control_fd: int) -> None:
    """Entry: become the guard of the fork server, and that in a process below."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    if (server := os.fork()) > 0:
        _guard(server, control_fd)
    else:
        os.setsid()  # a signal to the group of one is none to the other's
        die_with_parent(guard)
        _serve(control_fd)


def _guard(server: int, control_fd: int) -> None:
    """Wait until the fork server has ended, is stopped, or outlives the worker; then end all that is left of it."""
    worker = select.poll()
    worker.register(control_fd, 0)  # tells only that the other end is closed
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    deadline = math.inf
    while time.monotonic() < deadline:
        state = os.waitid(os.P_PID, server, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if state is not None and state.si_code != os.CLD_STOPPED:
            break
        # Three things end the wait: the server has ended (above), it is stopped, or the worker's end of the socket is
        # closed; the last two only after a grace, in which a stopped server may be continued.
        if state is None and not worker.poll(0):
            deadline = math.inf
        elif deadline == math.inf:
            deadline = time.monotonic() + _GRACE_S
        signal.sigtimedwait({signal.SIGCHLD}, 0.25)
    # What loses its parent comes here, however deep it was: this is the subreaper of them all.
    while below := _children():
        for pid in below:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _serve(control_fd: int) -> None:
    """Be the fork server: import what the first message names, say so, and fork until the worker is gone."""
    control = socket.socket(fileno=control_fd)
    setup = messages.TO_FORK_SERVER.decode(msgpack.unpackb(control.recv(_PACKET_BYTES)))
    assert isinstance(setup, messages.Setup), setup
    spec = setup.spec
    try:
        sys.path.extend(path for path in setup.path if path not in sys.path)
        load_plugin_folders(spec.plugin_dirs)
        for module in spec.modules:
            __import__(module)
        # Resolved once here, so that forks find them resolved, and a wrong name is told before any rollout.
        for name in spec.workflows:
            find_workflow(name)
        for name in spec.rewards:
            get_reward(name)
        for part in read_functions("rftdask.rollouts.rewards", "reward").values():
            part.load()  # a workflow's default reward is named nowhere; a fork should not have to import it
    except BaseException as error:  # whatever a plug-in does when it is imported, its text goes to who started us
        problem = messages.Imported((str(error) or type(error).__name__)[-_MAX_TRACEBACK:])
        control.send(msgpack.packb(messages.FROM_FORK_SERVER.encode(problem)))
        return
    if any(map(_asks_by_openai, spec.workflows)):
        for module in _OPENAI:
            with contextlib.suppress(ImportError):  # a fork tells what is missing, if it needs it
                importlib.import_module(module)
    control.send(msgpack.packb(messages.FROM_FORK_SERVER.encode(messages.Imported())))
    _ForkServer(control, spec).run()


def _asks_by_openai(workflow: str) -> bool:
    """Whether the source of a workflow's module asks for a client of openai, as far as can be seen."""
    found = sys.modules.get(find_workflow(workflow).module)
    with contextlib.suppress(OSError, TypeError):
        return found is not None and "openai_client" in inspect.getsource(found)
    return False


class _ForkServer:
    """The loop of the fork server: it forks, kills, and reports forks that have ended."""

    def __init__(self, control: socket.socket, spec: messages.SandboxSpec) -> None:
        self._pid = os.getpid()
        self._control = control
        self._max_memory_bytes = spec.max_memory_bytes
        self._has_folders = spec.bubblewrap
        self._inherited_bytes = _resident_bytes("self")
        self._living: dict[int, str] = {}
        """Forks by process id, and why they were killed; "": nobody said."""
        self._wake, self._woken = socket.socketpair()

    def run(self) -> None:
        """Do what the worker says until it is gone; then its forks go, too, and the guard ends what is left."""
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # SIGCHLD writes a byte that `select` sees; its handler does nothing, so nothing is left half done.
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._own = _children()  # what plug-ins started when they were imported
        gc.collect()
        gc.freeze()  # the collector would otherwise touch, and so copy, every page in every fork
        next_look = time.monotonic()
        while True:
            ready, _, _ = select.select([self._control, self._wake], [], [], _LOOK_S)
            if time.monotonic() >= next_look:
                self._hold_memory()
                next_look = time.monotonic() + _LOOK_S
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._bury()
            if self._control in ready:
                packet, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 2)
                if not packet:
                    break
                message = messages.TO_FORK_SERVER.decode(msgpack.unpackb(packet))
                if isinstance(message, messages.Fork):
                    self._fork(*fds)
                # Only its own: the number of one that was buried may be anybody's by now.
                elif isinstance(message, messages.Kill) and self._living.pop(message.pid, None) is not None:
                    _kill_group(message.pid)  # nobody asks how it ended

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
        # Take this process out of the fork server's hands: a group, signals, descriptors and limits of its own.
        os.setsid()
        die_with_parent(self._pid)
        # Its orphans stay with it while it lives: an attempt may start what puts itself in the background.
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
            # On top of what the fork inherits: a plug-in's libraries reserve gigabytes that they never touch.
            # For this process and each one that it starts; what they hold together _hold_memory adds up.
            with open("/proc/self/statm") as file:
                inherited = int(file.read().split()[0]) * resource.getpagesize()
            limit = inherited + self._max_memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _hold_memory(self) -> None:
        # End the forks that hold more than they may together with all they started.
        if self._max_memory_bytes is None:
            return
        allowed = self._max_memory_bytes + self._inherited_bytes
        for pid in self._living:
            tree = _tree(pid)
            # Alone it has its own limit. What several share is counted once, and looked at only if it may matter.
            if len(tree) == 1 or sum(map(_resident_bytes, tree)) <= allowed:
                continue
            if (held := sum(map(_share_bytes, tree))) > allowed:
                self._living[pid] = (
                    f"MemoryError: its {len(tree)} processes together hold "
                    f"{(held - self._inherited_bytes) / 2**30:.3f} GB beyond the imports, over the "
                    f"{self._max_memory_bytes / 2**30:g} GB of explorer.sandbox.max_memory_gb"
                )
                _kill_group(pid)

    def _bury(self) -> None:
        # Report forks that have ended, and kill what they left behind while their number is still theirs.
        # WNOWAIT leaves the number with the dead, so that no new process can have it before the group is killed.
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
        # Sessions of their own, which came here when their fork ended; their children come next.
        for pid in _children() - self._living.keys() - self._own:
            os.kill(pid, signal.SIGKILL)


def _folder(pid: int) -> str:
    """Working directory of a fork under bubblewrap, where /tmp is the fork server's own."""
    return f"/tmp/rollout-{pid}"


def _children() -> set[int]:
    """Processes whose parent this is, those that wait to be buried included."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))


def _tree(pid: int) -> list[int]:
    """A process and all below it; it comes first."""
    tree = [pid]
    for each in tree:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{thread}/children") as file:
                    tree += map(int, file.read().split())
    return tree


def _resident_bytes(pid: int | str) -> int:
    """Memory of a process, shared pages included; 0: it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _share_bytes(pid: int) -> int:
    """Memory of a process, of a page that n processes share the nth part, swapped pages included."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = [line.split() for line in file]
    except OSError:  # it has ended, or lets nobody look
        return _resident_bytes(pid)
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("Pss:", "SwapPss:"))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Attempt:
    """A fork: one attempt, on an event loop of its own. Who wanted it then kills the fork."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tells: dict[int, OnText] = {}
        """Who takes the text of those that stream."""
        self._num_asked = 0

    async def run(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._stream)
        self.send(messages.Hello(os.getpid()))
        run = await self._receive()
        assert isinstance(run, messages.Run), "nothing has been asked yet"
        # Beside the attempt, which may have several questions open at once.
        pump = asyncio.create_task(self._pump())
        outcome = await self._attempt(run)
        with contextlib.suppress(Exception):  # a workflow may have closed it
            sys.stdout.flush()
        # The last thing it does: the worker kills it when this has arrived.
        self.send(outcome)
        await pump  # until this process is killed

    async def _attempt(self, run: messages.Run) -> messages.Finished | messages.Failed:
        task = pickle.loads(run.task)  # the worker's own
        handle = _RemoteModel(self, run.auxiliary)
        try:
            result = await find_workflow(run.workflow).run(task, handle)
            outcome = messages.Finished(as_reward(result), handle.times)
            try:
                _packed(outcome)  # while it can still become a failure of this attempt
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
        """Ask the worker, which has the models; see ForwardingPolicy.ask."""
        self._num_asked += 1
        number = self._num_asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        plain = dict(arguments)
        if (tell := plain.pop("on_text", None)) is not None:
            self._tells[number] = tell
        try:
            self.send(messages.Ask(number, name, method, plain, tell is not None))
            await self._writer.drain()
            return await answer
        finally:
            del self._answers[number]
            self._tells.pop(number, None)

    def send(self, message: messages.FromFork) -> None:
        """Raises: ValueError: as `_packed`."""
        body = _packed(message)
        self._writer.write(messages.LENGTH.pack(len(body)) + body)

    async def _receive(self) -> messages.ToFork:
        try:
            size = messages.LENGTH.unpack(await self._reader.readexactly(messages.LENGTH.size))[0]
            return messages.TO_FORK.decode(msgpack.unpackb(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the worker wants nothing more

    async def _pump(self) -> None:
        while True:
            message = await self._receive()
            if isinstance(message, messages.Told):
                if message.number in self._tells:
                    self._tells[message.number](message.choice, message.part, message.text)
                continue
            assert isinstance(message, messages.Answer), "a fork runs one attempt"
            # Not there: the workflow called off its own question, such as by a timeout.
            waiting = self._answers.get(message.number)
            if waiting is None or waiting.done():
                continue
            if message.error:
                too_long = message.error == PromptTooLongError.__name__
                waiting.set_exception((PromptTooLongError if too_long else RuntimeError)(message.text))
            else:
                waiting.set_result(message.response or message.openai or message.logprobs)


class _RemoteModel(ForwardingPolicy):
    """The model handle of one attempt in a fork."""

    def __init__(self, attempt: _Attempt, auxiliary_names: tuple[str, ...]) -> None:
        super().__init__(auxiliary_names)
        self._attempt = attempt

    async def ask(self, name: str, method: Method, arguments: Mapping[str, Any]) -> Any:
        return await self._attempt.ask(name, method, arguments)

    def set_state(self, **values: Any) -> None:
        super().set_state(**values)
        self._attempt.send(messages.SetState(values))


def _packed(message: messages.FromFork) -> bytes:
    """The message as bytes. Raises: ValueError: longer than MAX_FRAME_BYTES, or of values that are no plain data."""

    try:
        body: bytes = msgpack.packb(messages.FROM_FORK.encode(message))
    except (AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"only plain values can leave a sandbox: {error}") from error
    if len(body) > messages.MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes; at most {messages.MAX_FRAME_BYTES} leave a sandbox at once")
    return body


if __name__ == "__main__":
    main(int(sys.argv[1]))
