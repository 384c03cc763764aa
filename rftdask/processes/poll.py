"""Waiting for what can only be looked at, with a deadline."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], deadline_s: float, look_s: float) -> bool:
    """Look every `look_s` seconds, at least once; whether the condition held within `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(look_s)
    return True
