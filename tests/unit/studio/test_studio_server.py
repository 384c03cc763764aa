"""Pages of the studio and their server. Promises: model text never becomes markup, and pages with it cannot run
scripts; the server answers only requests of this machine with the token, and GET requests only read; a SQL statement
can access only the tables; no name leads out of the folder.
"""

import html
import http.client
import json
import re
from html.parser import HTMLParser
from urllib.parse import quote, urlsplit

import pytest

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.errors import DataError, UserError
from rftdask.reports.lineage.browse import Browser
from rftdask.reports.page.rendering import render_experiences
from rftdask.reports.page.report_file import report_run
from rftdask.studio.server import StudioServer, serve
from tests.unit.reports.lineage.lineage_cases import Case, conversation, make_config, make_run
from tests.unit.studio.conftest import studio_of

RUN = "run=p%2Frun"
PAGES = ["configure", "run", "samples", "groups", "distributions", "experiences", "sql", "cluster", "logs", "about"]
PAGES += ["compare"]


class Tags(HTMLParser):
    """Element names, script sources, links and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.sources: set[str | None] = set()
        self.links: list[str] = []
        self.text = ""
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag == "script":
            self.sources.add(dict(attrs).get("src"))
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "formaction")]

    def handle_data(self, data):
        self.text += data
        self.words += data.split()


def fetch(
    server: StudioServer,
    path: str,
    method: str = "GET",
    host: str = "",
    cookie: str | None = None,
    came_from: str = "none",
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    kept = f"{server.cookie}={server.token}" if cookie is None else cookie
    headers = {"Host": host or f"127.0.0.1:{server.port}", "Cookie": f"odd name=[]; {kept}"}
    headers["Sec-Fetch-Site"] = came_from
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, {name.title(): value for name, value in answer.headers.items()}


def experience_path(case: Case, row: int) -> str:
    return f"/experience?{RUN}&stage=run&shard={case.second.text}&row={row}"


# ---- pages


def test_model_text_is_escaped_on_every_page(case, server):
    paths = [
        f"/experiences?{RUN}",
        experience_path(case, 2),
        f"/groups?{RUN}&evals=no&step=1",
        f"/task?{RUN}&evals=no&stage=run&taskset=sums&task_index=3",
        f"/sql?{RUN}&q={quote('select response_text from experiences')}",
        f"/samples?{RUN}&evals=no&text=alert",
    ]
    for path in paths:
        status, page, headers = fetch(server, path)
        tags = Tags(page)
        assert status == 200, path
        assert "script" not in tags.names and "<script>alert" not in page
        assert "\x1b" not in page and "\u202e" not in page
        assert "script-src" not in headers["Content-Security-Policy"], path
        assert "<script>alert('x')</script>" in tags.text, path
    page = render_experiences(Browser(case.url), 100)
    assert "script" not in Tags(page).names and "<script>alert" not in page


@pytest.mark.parametrize("path", ["/", *(f"/{page}?{RUN}" for page in PAGES)])
def test_pages_load_only_the_studio_s_scripts(server, path):
    status, page, headers = fetch(server, path)
    assert status == 200
    assert Tags(page).sources <= {f"static/{name}" for name in ("studio.js", "configure.js", "uPlot.iife.min.js")}
    assert "http:" not in page and "https:" not in page
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_all_links_are_relative(server, case):
    """A proxy may serve the studio under a path of its own."""
    for path in ("/", *(f"/{page}?{RUN}" for page in PAGES), experience_path(case, 2)):
        links = Tags(fetch(server, path)[1]).links
        assert links and not [link for link in links if link.startswith("/") or urlsplit(link).scheme], path


def test_user_input_is_escaped(server):
    evil = quote('"><script>x</script>')
    for path in (f"/experiences?{RUN}&text={evil}", f"/sql?{RUN}&q={evil}", f"/samples?{RUN}&text={evil}"):
        assert "script" not in Tags(fetch(server, path)[1]).names


def test_the_list_and_the_overview_show_the_status_of_a_run(server):
    text = " ".join(Tags(fetch(server, "/")[1]).words)
    assert "p/run killed grpo 2 0.333 90.0% \u00b1 30.0 from 10.0%" in text
    text = " ".join(Tags(fetch(server, f"/run?{RUN}")[1]).words)
    assert "p/run killed" in text and "16 committed" in text


def test_show_a_conversation_turn_by_turn(own_case, own_server):
    name = ParquetLog(own_case.storage).commit([conversation(6)], explore_step=3, unit=0)
    _, page, _ = fetch(own_server, f"/experience?{RUN}&stage=run&shard={name.text}&row=0")
    text = " ".join(Tags(page).text.split())
    assert "As text prompt?turn 0Hitool<2+2=4>turn 14" in text and 'title="tool, token 3' in page
    text = " ".join(Tags(fetch(own_server, f"/groups?{RUN}&evals=no&step=3")[1]).words)
    assert "tokens turn 0 Hi tool <2+2=4> turn 1 4" in text


def test_an_experience_without_tokens_has_a_page(case, server):
    page = fetch(server, experience_path(case, 3))[1]
    assert "no tokens" in page and "ValueError: no number" in page


def test_every_listed_experience_has_a_page(server):
    listed = fetch(server, f"/experiences?{RUN}")[1]
    paths = {html.unescape(path) for path in re.findall(r'href="(experience\?[^"]*)"', listed)}
    assert len(paths) == 16 and {fetch(server, f"/{path}")[0] for path in paths} == {200}


def test_the_static_page_contains_the_first_experiences(case):
    text = Tags(render_experiences(Browser(case.url), 5)).text
    assert "the first 5 of 16" in text
    assert "sums/0/1/1/0" in text and "sums/0/2/0/0" not in text


def test_a_group_page_shows_rewards_minus_their_mean(server):
    _, page, _ = fetch(server, f"/groups?{RUN}&evals=no&step=2")
    text = " ".join(Tags(page).words)
    assert "sums 4 2 answers, mean reward 0.5 , spread 0.5 ?" in text
    assert text.index("reward 1 +0.5") < text.index("reward 0 -0.5")


def test_curves_have_values_for_every_stage_and_role(server):
    data = json.loads(fetch(server, f"/curves.json?{RUN}")[1])
    (run,) = data["runs"]
    (stage,) = run["stages"]
    assert (run["run"], run["arm"], stage["x"]["trainer"]["step"]) == ("p/run", "p/run", [1, 2])
    assert stage["y"]["trainer.loss"] == {"trainer": [0.5, 0.25]}
    assert stage["y"]["eval.accuracy"] == {"eval/held_out": [0.1, 0.9]}
    assert [chart["key"] for chart in data["charts"]][:2] == ["eval.accuracy", "trainer.reward"]


def test_reload_shows_new_ledger_entries(own_case, own_server):
    path = f"/experiences?{RUN}&step=3"
    assert "sums/0/4/0/0" not in fetch(own_server, path)[1]
    Ledger(own_case.storage).write(LedgerEntry(3, "main", (Rows(own_case.waiting.text, (0, 1)),)))
    status, _, headers = fetch(own_server, f"/reload?{RUN}")
    assert (status, headers["Location"]) == (303, f"experiences?{RUN}")
    assert "sums/0/4/0/0" in fetch(own_server, path)[1]


# ---- refused requests


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/experience?{RUN}&stage=run&shard=nope&row=0", 404),
        (f"/experience?{RUN}&row=-1", 404),
        (f"/task?{RUN}&evals=no&stage=run&taskset=sums&task_index=99", 404),
        ("/../etc/passwd", 404),
        ("/static/../server.py", 404),
        ("/static/%2e%2e/server.py", 404),
        ("/run?run=nope", 400),
        ("/run?run=p", 400),
        ("/run?run=p%2Frun%2F..%2Frun", 400),
        ("/run?run=%2Fetc", 400),
        (f"/experiences?{RUN}&page=x", 400),
        (f"/experiences?{RUN}&page={'9' * 5000}", 400),
        (f"/experience?{RUN}&stage=run&shard=nope&row={'9' * 5000}", 404),
        (f"/experiences?{RUN}&step=<script>", 400),
        (f"/samples?{RUN}&order=x", 400),
        ("/compare?" + "&".join(f"run=r{n}" for n in range(30)), 400),
    ],
)
def test_refuse_unknown_pages_and_values(server, path, status):
    actual, page, _ = fetch(server, path)
    assert actual == status and "script" not in Tags(page).names


@pytest.mark.parametrize(
    "statement",
    [
        "select * from read_csv('{file}', header=false)",
        "select * from '{file}'",
        "copy (select 1) to '{folder}/new.csv'",
        "attach '{folder}/new.db'",
        "set enable_external_access = true; select * from read_csv('{file}')",
        "select * from glob('/*')",
    ],
)
def test_a_query_reaches_no_file(server, tmp_path, statement):
    (tmp_path / "secret.csv").write_text("top secret\n")
    before = sorted(tmp_path.rglob("*"))
    sql = statement.format(file=tmp_path / "secret.csv", folder=tmp_path)
    status, page, _ = fetch(server, f"/sql?{RUN}&q={quote(sql)}")
    assert status == 200 and "Error" in Tags(page).text and "top secret" not in page
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("came_from", ["cross-site", "same-site"])
def test_a_foreign_link_runs_no_query(server, came_from):
    path = f"/sql?{RUN}&q={quote('select 6 * 7 as answer')}"
    assert '<td class="num">42</td>' in fetch(server, path, came_from="same-origin")[1]
    status, page, _ = fetch(server, path, came_from=came_from)
    assert status == 200 and ">42<" not in page and "was not run" in page


def test_an_endless_query_returns_its_first_rows(server):
    _, page, _ = fetch(server, f"/sql?{RUN}&q={quote('select * from range(100000000000)')}")
    assert "the first 500 rows" in page and '<td class="num">499</td>' in page


def test_reject_other_hosts_and_methods(server):
    assert fetch(server, "/", host="evil.example:80")[0] == 403
    assert fetch(server, "/", method="POST")[0] == 405
    assert fetch(server, "/", method="HEAD")[:2] == (200, "")


@pytest.mark.parametrize("path", ["/", f"/experiences?{RUN}", f"/curves.json?{RUN}", "/static/studio.js", "/none"])
def test_every_page_requires_the_token(server, path):
    for cookie in ("", f"{server.cookie}=guess", f"{server.cookie}=", f"{server.cookie}x={server.token}"):
        status, page, headers = fetch(server, path, cookie=cookie)
        assert status == 403 and "sums/" not in page and "Set-Cookie" not in headers


def test_the_printed_url_opens_the_pages(server):
    assert fetch(server, "/?token=guess%C3%A9", cookie="")[0] == 403
    path = server.address("/run", run="p/run").partition(str(server.port))[2]
    status, _, headers = fetch(server, path, cookie="")
    assert (status, headers["Location"]) == (303, f"./run?{RUN}") and "HttpOnly" in headers["Set-Cookie"]
    assert fetch(server, "/", cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
    # Never redirect to another host.
    _, _, headers = fetch(server, f"//evil.example/?token={server.token}", cookie="")
    assert headers["Location"] == "./"


def test_a_proxy_may_have_a_host_name_and_a_path(case):
    with studio_of(case, hosts=["Hub.example.org"]) as server:
        for host in ("hub.example.org", "hub.example.org:8443", f"127.0.0.1:{server.port}"):
            assert fetch(server, f"/run?{RUN}", host=host)[0] == 200
        for host in ("evil.example", "hub.example.org.evil", "x.hub.example.org:80", "evil:hub.example.org"):
            status, page, _ = fetch(server, f"/run?{RUN}", host=host)
            assert status == 403 and "--allow-host" in page
        assert fetch(server, "/", host="hub.example.org", cookie="")[0] == 403, "the token is still needed"


def test_every_page_works_on_an_object_store(s3_url):
    case = make_run("", make_config(s3_url))
    with studio_of(case) as server:
        for path in ("/", *(f"/{page}?{RUN}" for page in PAGES), experience_path(case, 2), f"/curves.json?{RUN}"):
            assert fetch(server, path)[0] == 200, path
    report_run(case.url)
    assert "Overview" in case.storage.get("report.html").decode()


def test_a_run_folder_contains_only_itself(case):
    served = make_run("memory://studio-one")
    with StudioServer(served.url) as server:
        assert server.folder.runs() == ["."]
        assert server.folder.line(".").step == 2


def test_a_port_in_use_is_a_user_error(case, server):
    with pytest.raises(UserError, match="cannot listen on port"):
        serve(case.url, server.port, open_browser=False, say=print)


def test_refuse_a_missing_folder_and_a_folder_without_a_run(tmp_path):
    with pytest.raises(DataError, match="no runs found in"):
        serve(tmp_path / "nope", 0, open_browser=False, say=print, read_only=True)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a run folder"):
        serve(tmp_path, 0, page="/experiences", open_browser=False, say=print)
