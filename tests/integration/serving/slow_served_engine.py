"""A slow engine that records its calls, for tests of servers: one file per engine process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rftdask.engines.base import GenerateRequest, Generation, Give, Take
from rftdask.engines.fake import FakeEngine
from rftdask.errors import DataError

CALLS = "RFTDASK_TEST_CALLS"
"""Environment variable with the folder of the files `<pid>`: a line "+" per started call, and "-" per finished call."""

WHY_NOT = "RFTDASK_TEST_WHY_NOT"
"""Environment variable with the reason why the engine cannot start; unset: it can."""


class SlowEngine(FakeEngine):
    """Engine that takes 0.2 s for an answer of 8 tokens and has memory for 100 tokens."""

    engine_type = ""
    imports_ahead = ()

    def __init__(self) -> None:
        super().__init__(tokens_per_request=8, seconds_per_step=0.025)
        self.cache_tokens = 100

    @classmethod
    def from_config(cls, *_: Any) -> SlowEngine:
        if why := os.environ.get(WHY_NOT):
            raise DataError(why)
        return cls()

    def serve(self, take: Take, give: Give) -> None:
        with Path(os.environ[CALLS], str(os.getpid())).open("a", buffering=1) as file:

            def taken() -> Sequence[tuple[int, GenerateRequest | None]]:
                found = take()
                file.write("+\n" * sum(request is not None for _, request in found))
                return found

            def given(number: int, generation: Generation) -> None:
                file.write("-\n")
                give(number, generation)

            super().serve(taken, given)


def most_under_way(file: Path) -> int:
    """Return the maximum number of concurrent calls in the engine of a file."""
    return max(accumulate(1 if line == "+" else -1 for line in file.read_text().split()))
