"""BlockingClient: an `openai.OpenAI` that refuses to be used on the event loop that would have to answer it.

A module of its own, because it needs the package openai, which is optional and takes most of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from openai import OpenAI

from rftdask.rollouts.loop_watchdog import BlockedLoopError


class BlockingClient(OpenAI):
    """See above; `answering_loop` is that event loop."""

    answering_loop: asyncio.AbstractEventLoop | None = None

    def request(self, *args: Any, **options: Any) -> Any:
        """See OpenAI. Raises: BlockedLoopError."""
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread, as it should be
            if asyncio.get_running_loop() is self.answering_loop:
                raise BlockedLoopError("a blocking call on the event loop waits for itself; await the async one")
        return super().request(*args, **options)
