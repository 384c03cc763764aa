"""Engine in a plug-in folder that fails as specified by the environment."""

import os
import signal
from collections.abc import Sequence

from rftdask.engines.base import GenerateRequest, Give, Take
from rftdask.engines.fake import FakeEngine

CAUSE = "Unsupported CPU attention configuration: head_dim=16"
HOW, AT = "TEST_BROKEN_HOW", "TEST_BROKEN_AT"
"""HOW: "says", "ends", "killed". AT: "any" request, a "long" one, such as tasks have, any after "loaded" weights."""


class BrokenEngine(FakeEngine):
    def serve(self, take: Take, give: Give) -> None:
        def look() -> Sequence[tuple[int, GenerateRequest | None]]:
            taken = take()
            for _, request in taken:
                if request is not None:
                    self._meet(request)
            return taken

        super().serve(look, give)

    def _meet(self, request: GenerateRequest) -> None:
        at = os.environ.get(AT, "never")
        long, loaded = request.sampling.max_tokens > 2, self.policy_version > 0
        if at == "any" or (at == "long" and long) or (at == "loaded" and loaded):
            if os.environ[HOW] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif os.environ[HOW] == "ends":
                print(CAUSE, flush=True)
                os._exit(3)
            raise NotImplementedError(CAUSE)
