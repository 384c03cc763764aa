"""Rate limit: computes when a request to a service may be sent, by requests and tokens per minute.

Pure except for a lock: the caller sleeps until the returned time. Each model of a process has one limit, shared by all
event loops and work units. Invariant: no window of one minute, wherever it begins, has more requests or tokens than
allowed, unless an answer is longer than its reservation.
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
    """A reserved request."""

    at_s: float
    """Time at which it may be sent."""
    num_tokens: float
    counts: bool = True
    """False once it has left the window."""


class RateLimit:
    """Example:
    limit = RateLimit(requests=60, tokens=10_000, clock=time.monotonic)
    reservation = limit.reserve(num_tokens=300)
    sleep(reservation.at_s - now); ...; limit.settle(reservation, num_tokens=120)
    """

    def __init__(
        self, requests: float | None = None, tokens: float | None = None, *, clock: Callable[[], float]
    ) -> None:
        """requests, tokens: limits per minute; requests below 1 mean one in more than a minute. None: unlimited."""
        self._limits = requests or _FAR, tokens or _FAR
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved: deque[Reservation] = deque()
        """Reservations of the last minute and of the future, by time."""
        self._num_tokens = 0.0
        """Tokens of all reservations."""
        self._paused_until_s = -_FAR

    @property
    def paused_s(self) -> float:
        """Remaining seconds of a pause."""
        return max(0.0, self._paused_until_s - self._clock())

    def reserve(self, num_tokens: float) -> Reservation:
        """Reserve the first time at which a request of so many tokens may be sent, after all earlier reservations. More
        tokens than a minute allows count as a full minute's tokens.
        """
        requests, tokens = self._limits
        # Below one request per minute, the window is as long as the interval between two requests.
        window_s = WINDOW_S * max(1.0, 1.0 / requests)
        with self._lock:
            now_s = self._clock()
            last_s = self._reserved[-1].at_s if self._reserved else now_s
            at_s = max(now_s, last_s, self._paused_until_s)
            while self._reserved and self._reserved[0].at_s <= now_s - window_s:
                self._reserved[0].counts = False
                self._num_tokens -= self._reserved.popleft().num_tokens
            num_tokens = min(num_tokens, tokens)
            # Move the time until enough of the oldest reservations have left the window.
            count, used = len(self._reserved), self._num_tokens
            for earlier in self._reserved:
                is_inside = earlier.at_s > at_s - window_s
                if is_inside and count + 1 <= max(1.0, requests) and used + num_tokens <= tokens:
                    break
                at_s = max(at_s, earlier.at_s + window_s) if is_inside else at_s
                count, used = count - 1, used - earlier.num_tokens
            reservation = Reservation(at_s, num_tokens)
            self._reserved.append(reservation)
            self._num_tokens += num_tokens
            return reservation

    def settle(self, reservation: Reservation, num_tokens: float) -> None:
        """Replace the reserved tokens by the tokens that the request used."""
        with self._lock:
            self._num_tokens += (num_tokens - reservation.num_tokens) * reservation.counts
            reservation.num_tokens = num_tokens

    def pause(self, seconds: float) -> None:
        """Delay all later reservations, because the service requested a pause."""
        with self._lock:
            self._paused_until_s = max(self._paused_until_s, self._clock() + seconds)
