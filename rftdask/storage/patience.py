"""Patience: how the verbs of every storage try again while it does not answer, and for how long.

Pauses double from a tenth of a second to 5 s, for about a minute in all; then the last error rises as it is. It knows
neither verbs nor backends: who calls says which errors may pass by themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

MAX_TRIES = 17
"""With the pauses between them, 57 s."""
PATIENCE_S = 60.0
"""After which nothing is tried again, however few the tries were that took so long."""
_FIRST_PAUSE_S, _MAX_PAUSE_S, _JITTER_S = 0.1, 5.0, 0.1
_TOLD_AFTER_TRIES = 6
"""Some 3 s: what takes no longer is not worth a word."""

log = logging.getLogger(__name__)


class Patience:
    """For one call of a verb.

    Example: Patience("get s3://bucket/a", is_transient).call(read)
    """

    def __init__(
        self, what: str, is_transient: Callable[[BaseException], bool], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._what = what
        self._is_transient = is_transient
        self._sleep = sleep
        self.tries = 0

    def call(self, operation: Callable[[], T]) -> T:
        """What the operation, which may be repeated, returns in the end. Raises: its last error."""
        self.tries = 1
        try:
            return operation()
        except Exception as error:  # every client has its own tree; what cannot pass rises again
            if not self._is_transient(error):
                raise
            failed = [error]
        import tenacity  # late: most calls succeed, and what only reads a config does without

        def attempt() -> T:
            if failed:
                raise failed.pop()  # the first, which has been made
            self.tries += 1
            return operation()

        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(MAX_TRIES) | tenacity.stop_after_delay(PATIENCE_S),
            wait=tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_MAX_PAUSE_S)
            + tenacity.wait_random(0, _JITTER_S),
            retry=tenacity.retry_if_exception(self._is_transient),
            before_sleep=self._tell,
            sleep=self._sleep,
            reraise=True,
        )(attempt)

    def _tell(self, state: tenacity.RetryCallState) -> None:
        if self.tries == _TOLD_AFTER_TRIES and state.outcome is not None:
            log.warning("%s fails (%s), and is tried again for a minute", self._what, state.outcome.exception())
