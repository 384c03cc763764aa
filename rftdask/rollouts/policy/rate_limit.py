"""Rate limit: when a request to a service may go out, so that no minute has more requests or tokens than it allows.

Pure but for a lock: times in, seconds to wait out; who waits, sleeps by himself. One for each model in a process, for
all event loops and work units of it. Invariant: in no window of a minute, wherever it begins, are more requests, or
more tokens, than the limits say, but for an answer that is longer than was reserved for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0
_FAR = float("inf")


@dataclass
class Reservation:
    """Room for one request."""

    at_s: float
    """When it may go out."""
    num_tokens: float
    counts: bool = True
    """False once it is older than the window."""


class RateLimit:
    """Example:
    limit = RateLimit(requests=60, tokens=10_000, clock=time.monotonic)
    place = limit.reserve(num_tokens=300)
    sleep(place.at_s - now); ...; limit.settle(place, num_tokens=120)
    """

    def __init__(
        self, requests: float | None = None, tokens: float | None = None, *, clock: Callable[[], float]
    ) -> None:
        """requests, tokens: of a minute; below 1 it is one in more than a minute. None: no limit."""
        self._limits = requests or _FAR, tokens or _FAR
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved: deque[Reservation] = deque()
        """By time; those of the last minute and of the time to come."""
        self._num_tokens = 0.0
        """Of all of them."""
        self._paused_until_s = -_FAR

    @property
    def paused_s(self) -> float:
        """Seconds for which nothing may go out."""
        return max(0.0, self._paused_until_s - self._clock())

    def reserve(self, num_tokens: float) -> Reservation:
        """The first moment at which a request of so many tokens may go out, after all that were reserved before. More
        than a minute's tokens count as all of them.
        """
        requests, tokens = self._limits
        # Fewer than one request a minute: the window is as long as one of them takes.
        window_s = WINDOW_S * max(1.0, 1.0 / requests)
        with self._lock:
            now_s = self._clock()
            last_s = self._reserved[-1].at_s if self._reserved else now_s
            at_s = max(now_s, last_s, self._paused_until_s)
            while self._reserved and self._reserved[0].at_s <= now_s - window_s:
                self._reserved[0].counts = False
                self._num_tokens -= self._reserved.popleft().num_tokens
            wanted = min(num_tokens, tokens)
            # As the oldest leave the window, there is room for more.
            count, used = len(self._reserved), self._num_tokens
            for each in self._reserved:
                inside = each.at_s > at_s - window_s
                if inside and count + 1 <= max(1.0, requests) and used + wanted <= tokens:
                    break
                at_s = max(at_s, each.at_s + window_s) if inside else at_s
                count, used = count - 1, used - each.num_tokens
            place = Reservation(at_s, wanted)
            self._reserved.append(place)
            self._num_tokens += wanted
            return place

    def settle(self, place: Reservation, num_tokens: float) -> None:
        """The request has taken so many tokens, and not what was reserved: what comes next counts with them."""
        with self._lock:
            self._num_tokens += (num_tokens - place.num_tokens) * place.counts
            place.num_tokens = num_tokens

    def pause(self, seconds: float) -> None:
        """Nothing that is reserved from now on goes out for so long: the service has said so."""
        with self._lock:
            self._paused_until_s = max(self._paused_until_s, self._clock() + seconds)
