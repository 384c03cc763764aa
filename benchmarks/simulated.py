"""An engine whose responses take a given time by the clock.

It decodes one token of all active requests in `STEP_S` seconds, whatever their number, like a GPU that is not full. It
counts tokens by the clock, so a late wake-up costs no tokens.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from rftdask.engines.base import GenerateRequest, Give, Take
from rftdask.engines.fake import FakeEngine

STEP_S = "LONGTAIL_STEP_S"
"""Environment variable: seconds of a decoding step."""
_TICK_S = 0.002
"""Seconds between two polls for new requests: at least four simulated steps."""


class SimulatedEngine(FakeEngine):
    """Engine that decodes by the clock."""

    def serve(self, take: Take, give: Give) -> None:
        """Serve like `FakeEngine`, with responses of the requested lengths."""
        step_s = float(os.environ[STEP_S])
        under_way: dict[int, tuple[float, GenerateRequest, int]] = {}
        while True:
            now = time.perf_counter()
            for number, request in take():
                if request is None:
                    under_way.pop(number, None)
                else:
                    ends = now + request.sampling.max_tokens * step_s
                    under_way[number] = ends, request, self.policy_version
            if not under_way:
                return
            for number in [number for number, (ends, _, _) in under_way.items() if ends <= now]:
                _, request, oldest = under_way.pop(number)
                give(number, replace(self._answer(request), min_policy_version=oldest))
            time.sleep(_TICK_S)

    def _length(self, request: GenerateRequest) -> int:
        return request.sampling.max_tokens
