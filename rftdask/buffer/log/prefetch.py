"""Read ahead: some calls at once, their results in order. On object stores a read is mostly waiting.

Invariant: whoever takes the results sees what one call after another would give, errors at their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(call: Callable[[_Item], _Result], items: Sequence[_Item], num_threads: int) -> Iterator[_Result]:
    """`call` of each item, in their order. At most `num_threads` results are under way or wait to be taken."""
    num_threads = min(num_threads, len(items))
    if num_threads <= 1:
        yield from map(call, items)
        return
    ahead: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for item in items:
                ahead.append(pool.submit(call, item))
                if len(ahead) == num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
