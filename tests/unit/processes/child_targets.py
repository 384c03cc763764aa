"""Targets of the children in test_child.py: `function(spec, channel)`, named "child_targets:function"."""

import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from rftdask.errors import ConfigError, FencedError
from rftdask.processes.child import Channel


def echo(spec: Mapping[str, Any], channel: Channel) -> None:
    """Answer each message with the message, the spec and the number of threads."""
    for message in channel:
        channel.send({"message": message, "spec": spec, "threads": os.environ["OMP_NUM_THREADS"]})


def wait_policy(spec: Mapping[str, Any], channel: Channel) -> None:
    channel.send([os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")])


def noisy(spec: Mapping[str, Any], channel: Channel) -> None:
    """Like echo, and prints in all ways."""
    for message in channel:
        print("printed", message)
        sys.stdout.write("written without an end")
        sys.stderr.write("to stderr\n")
        os.write(1, b"straight to descriptor one\n")
        channel.send(message)


def fail(spec: Mapping[str, Any], channel: Channel) -> None:
    print("about to fail")
    if spec["kind"] == "fenced":
        raise FencedError("ledger/main/00000007.json was written by somebody else")
    if spec["kind"] == "lone":
        raise FencedError("\ud800")
    if spec["kind"] == "config":
        raise ConfigError(["one: bad", "two: bad"], "file.yaml")
    raise ZeroDivisionError("it divided by nothing")


def die(spec: Mapping[str, Any], channel: Channel) -> None:
    """Print the position, then end like a crash in C."""
    for number in range(30):
        print(f"line {number}")
    os._exit(7)


def answer_then_end(spec: Mapping[str, Any], channel: Channel) -> None:
    channel.send("last words")


def busy(spec: Mapping[str, Any], channel: Channel) -> None:
    channel.send(os.getpid())
    while True:
        time.sleep(60)


def look(spec: dict[str, Any], channel: Channel) -> None:
    channel.send(
        {
            "modules": list(sys.modules),
            "environment": dict(os.environ),
            "session": os.getsid(0),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
    )
    for _ in channel:
        pass


def draw(spec: dict[str, Any], channel: Channel) -> None:
    import numpy as np

    channel.send([random.random(), float(np.random.rand())])
    for _ in channel:
        pass


def environment(spec: dict[str, Any], channel: Channel) -> None:
    """Send the length of a variable, and the bytes of another one."""
    long, odd = (os.environ[name] for name in spec["names"])
    channel.send([len(long), os.fsencode(odd).hex()])
    for _ in channel:
        pass
