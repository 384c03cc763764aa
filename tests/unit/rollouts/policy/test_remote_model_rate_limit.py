"""Promises of a rate limit: no window of one minute exceeds the limits, no request waits longer than needed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rftdask.rollouts.policy.remote_model import WINDOW_S, RateLimit


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_next_request_waits_until_the_first_is_a_minute_old() -> None:
    clock = Clock()
    limit = RateLimit(requests=3, clock=clock)
    assert [limit.reserve(1).at_s for _ in range(4)] == [0.0, 0.0, 0.0, 60.0]
    clock.now_s = 90.0
    assert limit.reserve(1).at_s == 90.0  # in one window with the request at 60


def test_less_than_one_request_per_minute() -> None:
    limit = RateLimit(requests=0.5, clock=Clock())
    assert [limit.reserve(1).at_s for _ in range(3)] == [0.0, 120.0, 240.0]


def test_unused_tokens_are_returned() -> None:
    clock = Clock()
    limit = RateLimit(tokens=100, clock=clock)
    first = limit.reserve(80)
    limit.settle(first, 20)
    assert [limit.reserve(80).at_s, limit.reserve(1).at_s] == [0.0, 60.0]
    clock.now_s = 300.0
    limit.settle(first, 1000)  # no longer in the window
    assert limit.reserve(1_000).at_s == 300.0
    assert limit.reserve(1).at_s == 360.0


def test_pause_applies_to_all_later_requests() -> None:
    clock = Clock()
    limit = RateLimit(clock=clock)
    limit.pause(20.0)
    clock.now_s = 5.0
    assert (limit.paused_s, limit.reserve(1).at_s) == (15.0, 20.0)
    clock.now_s = 30.0
    assert (limit.paused_s, limit.reserve(1).at_s) == (0.0, 30.0)


@given(
    requests=st.sampled_from([None, 0.5, 1, 3, 10]),
    tokens=st.sampled_from([None, 100, 1000]),
    asked=st.lists(
        st.tuples(st.sampled_from([0.0, 0.0, 1.0, 30.0]), st.integers(1, 150), st.floats(0.0, 1.0)), max_size=40
    ),
)
def test_no_minute_exceeds_its_limits(requests: Any, tokens: Any, asked: list[tuple[float, int, float]]) -> None:
    clock = Clock()
    limit = RateLimit(requests, tokens, clock=clock)
    places = []
    for pause_s, num_tokens, share in asked:
        clock.now_s += pause_s
        places.append(limit.reserve(num_tokens))
        if share < 0.3:
            limit.settle(places[-1], share * places[-1].num_tokens)
    assert [each.at_s for each in places] == sorted(each.at_s for each in places)
    window_s = WINDOW_S * max(1.0, 1.0 / (requests or 1.0))
    for number, place in enumerate(places):
        inside = [each for each in places[: number + 1] if each.at_s > place.at_s - window_s]
        assert len(inside) <= max(1, requests or 1e9)
        assert sum(each.num_tokens for each in inside) <= (tokens or 1e9) + 1e-6
