"""An engine whose responses take their time by the clock.

It decodes a token of all that is under way in `STEP_S` seconds, however many there are, as a GPU that is not full; it
says how many tokens there are by the clock, so that a late wake-up costs no tokens.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from rftdask.engines.base import GenerateRequest, Give, Take
from rftdask.engines.fake import FakeEngine

STEP_S = "LONGTAIL_STEP_S"
"""Environment: seconds of a decoding step."""
_TICK_S = 0.002
"""Between two looks whether something came: four steps or more of what it simulates."""


class SimulatedEngine(FakeEngine):
    """Decodes by the clock."""

    def serve(self, take: Take, give: Give) -> None:
        """As `FakeEngine`, with responses as long as they are asked for."""
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
