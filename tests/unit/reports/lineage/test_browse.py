"""Browsing experiences with filters and orders. Promise: all values come from the tables."""

import pytest
from lineage_cases import conversation, experience

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.errors import DataError
from rftdask.reports.lineage.browse import Browser, Filter, Token


def uids(browser: Browser, **wanted: str) -> list[str]:
    return [row["uid"] for row in browser.page(Filter(**wanted), 1).rows]


def test_filters_select_matching_rows(case):
    browser = Browser(case.url)
    assert uids(browser, step="2", state="trained") == ["sums/0/2/0/0", "sums/0/2/1/0", "sums/0/3/0/0"]
    assert uids(browser, state="failed") == ["sums/0/3/1/0"]
    assert uids(browser, status="failed") == ["sums/0/3/1/0"]
    assert uids(browser, explore_step="2", min_reward="0.5") == ["sums/0/4/1/0", "sums/0/5/1/0"]
    assert uids(browser, explore_step="2", max_reward="0.5") == ["sums/0/4/0/0", "sums/0/5/0/0"]
    assert uids(browser, task="/4/") == ["sums/0/4/0/0", "sums/0/4/1/0"]
    assert uids(browser, text="ALERT(") == ["sums/0/3/0/0"]
    by_reward = ["sums/0/4/1/0", "sums/0/5/1/0", "sums/0/4/0/0", "sums/0/5/0/0"]
    assert uids(browser, explore_step="2", sort="-reward") == by_reward
    assert uids(browser, stage="other") == []


def test_find_a_served_session_by_its_complete_name_only(case):
    ParquetLog(case.storage).commit([experience(6, 0, explore_step=3, session="ticket-4711")], explore_step=3, unit=0)
    browser = Browser(case.url)
    assert uids(browser, task="ticket-4711") == ["sums/0/6/0/0"]
    assert uids(browser, task="ticket") == []


def test_expected_answers_with_the_lowest_reward_are_marked(case):
    """The truth of the case is A1. The second one has a reward that is not the lowest of its shard."""
    answers = [experience(0, n, explore_step=3, response_text="A1 ", reward=r) for n, r in enumerate((0.0, 0.5, 1.0))]
    name = ParquetLog(case.storage).commit(answers, explore_step=3, unit=0)
    rows = Browser(case.url).rows
    assert rows[rows["shard"] == name.text]["unpaid"].tolist() == [True, False, False]
    assert not rows[rows["shard"] != name.text]["unpaid"].any(), "A1 has the highest reward there"


def test_pages_are_cut_and_counted(case):
    browser = Browser(case.url)
    first, last = browser.page(Filter(), 1, size=10), browser.page(Filter(), 99, size=10)
    assert (first.num_rows, first.num_pages, len(first.rows)) == (16, 2, 10)
    assert (last.page, len(last.rows)) == (2, 6)


@pytest.mark.parametrize("query", [{"step": "x"}, {"min_reward": "nan"}, {"sort": "uid; drop"}])
def test_an_invalid_filter_is_refused(query):
    with pytest.raises(DataError):
        Filter.from_query(query)


def test_show_tokens_mask_and_group_of_an_experience(case):
    shown = Browser(case.url).show("run", case.second.text, 2)
    assert shown is not None
    assert shown.tokens == [
        Token(0, 63, "?"),
        Token(1, 68, "D", -0.5, True, version=0),
        Token(2, 48, "0", -2.5, False, version=0),
    ]
    assert [token.level for token in shown.tokens[1:]] == [2, 5]  # probabilities 0.61 and 0.08
    assert [(row["uid"], row["minus_mean"]) for row in shown.siblings] == [
        ("sums/0/3/0/0", 0.0),
        ("sums/0/3/1/0", None),
    ]
    assert [(state["state"], state["step"]) for state in shown.states] == [("trained", 2)]


def test_show_turns_and_tools_of_a_conversation_separately(case):
    name = ParquetLog(case.storage).commit([conversation(6)], explore_step=3, unit=0)
    browser = Browser(case.url)
    shown = browser.show("run", name.text, 0)
    assert [(token.logprob, token.source) for token in shown.tokens] == [
        *((None, ""), (-0.5, ""), (-0.5, "")),
        *[(None, "tool")] * 7,
        (-2.0, ""),
    ]
    (listed,) = browser.page(Filter(task="sums/0/6"), 1).rows
    assert (listed["response_length"], listed["surprise"]) == (3, -1.0)
