"""Pages to browse the experiences of a run. Promises: nothing that a model wrote becomes markup; a page says what the
tables say; the server answers this machine alone, and reads only.
"""

import http.client
import threading
from html.parser import HTMLParser

import pytest
from lineage_cases import Case, conversation

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.errors import DataError, UserError
from rftdask.provenance.browse import (
    Browser,
    Filter,
    Token,
    ViewServer,
    experience_page,
    list_page,
    serve,
    static_page,
)


class _Tags(HTMLParser):
    """Names of the elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)

    def handle_data(self, data):
        self.text += data


def uids(browser: Browser, **wanted: str) -> list[str]:
    return [row["uid"] for row in browser.page(Filter(**wanted), 1).rows]


def test_what_a_model_wrote_is_text_on_every_page(case):
    browser = Browser(case.url)
    shown = browser.show("run", case.second.text, 2)
    for page in (list_page(browser, Filter(), 1), experience_page(browser, shown), static_page(browser, 100)):
        tags = _Tags(page)
        assert "script" not in tags.names
        assert "<script>alert" not in page
        assert "\x1b" not in page and "\u202e" not in page
    assert "<script>alert('x')</script>" in _Tags(list_page(browser, Filter(), 1)).text


def test_what_a_user_typed_is_text_too(case):
    page = list_page(Browser(case.url), Filter(text='"><script>x</script>'), 1)
    assert "script" not in _Tags(page).names


def test_filters_leave_what_they_say(case):
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


def test_pages_are_cut_and_counted(case):
    browser = Browser(case.url)
    first, last = browser.page(Filter(), 1, size=10), browser.page(Filter(), 99, size=10)
    assert (first.num_rows, first.num_pages, len(first.rows)) == (16, 2, 10)
    assert (last.page, len(last.rows)) == (2, 6)


@pytest.mark.parametrize("query", [{"step": "x"}, {"min_reward": "nan"}, {"sort": "uid; drop"}])
def test_a_filter_that_makes_no_sense_is_refused(query):
    with pytest.raises(DataError):
        Filter.from_query(query)


def test_an_experience_is_shown_with_its_tokens_mask_and_group(case):
    shown = Browser(case.url).show("run", case.second.text, 2)
    assert shown is not None
    assert shown.tokens == [
        Token(0, 63, "?"),
        Token(1, 68, "D", -0.5, True),
        Token(2, 48, "0", -2.5, False),
    ]
    assert [token.level for token in shown.tokens[1:]] == [2, 5]  # probabilities 0.61 and 0.08
    assert [(row["uid"], row["minus_mean"]) for row in shown.siblings] == [
        ("sums/0/3/0/0", 0.0),
        ("sums/0/3/1/0", None),
    ]
    assert [(state["state"], state["step"]) for state in shown.states] == [("trained", 2)]


def test_a_conversation_is_shown_turn_by_turn_and_tools_apart_from_the_policy(case):
    name = ParquetLog(case.storage).commit([conversation(6)], explore_step=3, unit=0)
    browser = Browser(case.url)
    shown = browser.show("run", name.text, 0)
    assert [(token.logprob, token.source) for token in shown.tokens] == [
        *((None, ""), (-0.5, ""), (-0.5, "")),
        *[(None, "tool")] * 7,
        (-2.0, ""),
    ]
    page = experience_page(browser, shown)
    text = " ".join(_Tags(page).text.split())
    assert "As text prompt?turn 0Hitool<2+2=4>turn 14" in text and 'title="tool, token 3' in page
    (listed,) = browser.page(Filter(task="sums/0/6"), 1).rows
    assert (listed["response_length"], listed["surprise"]) == (3, -1.0)


def test_an_experience_without_tokens_has_a_page(case):
    browser = Browser(case.url)
    page = experience_page(browser, browser.show("run", case.second.text, 3))
    assert "no tokens" in page and "ValueError: no number" in page


def test_the_static_page_holds_the_first_experiences(case):
    text = _Tags(static_page(Browser(case.url), 5)).text
    assert "the first 5 of 16" in text
    assert "sums/0/1/1/0" in text and "sums/0/2/0/0" not in text


# ---- the server


@pytest.fixture
def server(case: Case):
    with ViewServer(case.url) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join(10)


def fetch(
    server: ViewServer, path: str, method: str = "GET", host: str = "", cookie: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    kept = f"{server.cookie}={server.token}" if cookie is None else cookie
    headers = {"Host": host or f"127.0.0.1:{server.server_port}", "Cookie": f"odd name=[]; {kept}"}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.headers)


def test_the_server_shows_the_list_and_one_experience(case, server):
    status, page, headers = fetch(server, "/?state=failed")
    assert status == 200 and "sums/0/3/1/0" in page and "sums/0/2/0/0" not in page
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    status, page, _ = fetch(server, f"/experience?stage=run&shard={case.second.text}&row=2")
    assert status == 200 and "sums/0/3/0/0" in page


def test_the_server_shows_what_came_since_when_asked_to(case, server):
    Ledger(case.storage).write(LedgerEntry(3, "main", (Rows(case.waiting.text, (0, 1)),)))
    assert "sums/0/4/0/0" not in fetch(server, "/?step=3")[1]
    status, _, headers = fetch(server, "/reload")
    assert (status, headers["Location"]) == (303, "/")
    assert "sums/0/4/0/0" in fetch(server, "/?step=3")[1]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/experience?stage=run&shard=nope&row=0", 404),
        ("/experience?row=-1", 404),
        ("/../etc/passwd", 404),
        ("/?page=x", 400),
        ("/?page=" + "9" * 5000, 400),
        ("/experience?stage=run&shard=nope&row=" + "9" * 5000, 404),
        ("/?step=<script>", 400),
    ],
)
def test_the_server_refuses_what_it_does_not_know(server, path, status):
    found, page, _ = fetch(server, path)
    assert found == status and "script" not in _Tags(page).names


def test_the_server_answers_no_other_host_and_no_other_method(server):
    assert fetch(server, "/", host="evil.example:80")[0] == 403
    assert fetch(server, "/", method="POST")[0] == 501
    assert fetch(server, "/", method="HEAD")[:2] == (200, "")
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/?state=failed", "/experience?stage=run&shard=x&row=0", "/reload", "/none"])
def test_every_page_asks_for_the_token(server, path):
    for cookie in ("", f"{server.cookie}=guess", f"{server.cookie}=", f"{server.cookie}x={server.token}"):
        status, page, headers = fetch(server, path, cookie=cookie)
        assert status == 403 and "sums/" not in page and "Set-Cookie" not in headers


def test_the_printed_url_opens_the_pages(server):
    assert fetch(server, "/?token=guess%C3%A9", cookie="")[0] == 403
    path = server.address.partition(str(server.server_port))[2]
    status, _, headers = fetch(server, path, cookie="")
    assert (status, headers["Location"]) == (303, "/") and "HttpOnly" in headers["Set-Cookie"]
    assert fetch(server, "/", cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200


def test_a_port_that_is_taken_is_the_users_to_mend(case, server):
    with pytest.raises(UserError, match="cannot be had"):
        serve(case.url, server.server_port, open_browser=False, say=print)
