"""Polling with a deadline."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], deadline_s: float, interval_s: float) -> bool:
    """Check the condition at least once, every `interval_s` seconds. Returns: True if it held within `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(interval_s)
    return True
