"""Actions of the studio. Promises: it writes only below `configs` of its folder; it starts only existing runs and
configurations, with the documented commands; only a page of its own origin with the action token can act.
"""

import http.client
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftdask.errors import DataError, UserError
from rftdask.run.run_folder import read_run_config
from rftdask.storage import open_storage
from rftdask.studio import actions as module
from rftdask.studio.actions import Actions
from rftdask.studio.folder import Folder
from rftdask.studio.form import Fields
from rftdask.studio.server import Studio, StudioServer
from tests.unit.reports.lineage.lineage_cases import Case, make_config, make_run
from tests.unit.studio.conftest import studio_of

FIELDS = Fields(
    {
        "name": "first",
        "model.model_path": "m",
        "model.max_model_len": "64",
        "buffer.explorer_input.taskset.path": "tasks.jsonl",
        "explorer.rollout_model.engine_type": "fake",
        "trainer.trainer_type": "fake",
    }
)


def test_save_a_configuration_below_the_folder_and_read_it(tmp_path: Path) -> None:
    actions = Actions(Folder(tmp_path / "runs"))
    assert (actions.configs(), actions.save("first", FIELDS)) == ([], "configs/first.yaml")
    assert actions.read("first") == FIELDS and actions.configs() == ["first"]
    text = (tmp_path / "runs/configs/first.yaml").read_text()
    assert f"checkpoint_root_dir: {tmp_path}/runs\n" in text
    actions.save("first", FIELDS)  # saving the same again is allowed
    other = Fields({**FIELDS.texts, "seed": "7"})
    with pytest.raises(UserError, match="already exists"):
        actions.save("first", other)
    actions.save("first", other, replace=True)
    assert actions.read("first").texts["seed"] == "7"
    assert [path.name for path in tmp_path.rglob("*.yaml")] == ["first.yaml"]


def test_an_invalid_configuration_is_not_saved(tmp_path: Path) -> None:
    actions = Actions(Folder(tmp_path))
    with pytest.raises(UserError, match=r"not saved: .*required"):
        actions.save("first", Fields({"name": "first"}))
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("name", ["", "..", "../first", "a/b", "/etc/x", ".hidden", "a\n", "x" * 99, "-rf"])
def test_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    actions = Actions(Folder(tmp_path / "runs"))
    for call in (lambda: actions.save(name, FIELDS), lambda: actions.read(name), lambda: actions.start("start", name)):
        with pytest.raises(UserError, match="invalid configuration name"):
            call()
    assert list(tmp_path.rglob("*")) == []


def test_save_configurations_on_an_object_store(s3_url: str) -> None:
    actions = Actions(Folder(s3_url))
    actions.save("first", FIELDS)
    assert actions.configs() == ["first"] and actions.read("first") == FIELDS
    file = actions._command("start", "first")[4]
    assert f"checkpoint_root_dir: {s3_url}" in Path(file).read_text()


def test_actions_run_the_documented_commands(tmp_path: Path) -> None:
    case = make_run("", make_config(str(tmp_path / "runs")))
    folder = tmp_path / "runs"
    actions = Actions(Folder(folder))
    actions.save("first", FIELDS)
    file = str(folder / "configs/first.yaml")
    start = [sys.executable, "-m", "rftdask"]
    assert actions._command("start", "first") == [*start, "run", file, "--progress", "plain"]
    assert actions._command("submit", "first") == [*start, "submit", file]
    assert actions._command("dry-run", "first") == [*start, "submit", "--dry-run", file]
    assert actions._command("check", "first") == [*start, "validate", "--data", file]
    assert actions._command("stop", "p/run") == [*start, "cancel", case.url]
    *_, again, _, _ = command = actions._command("continue", "p/run")
    assert command[3] == "run" and Fields.of_file(Path(again).read_text()) is not None
    assert read_run_config(open_storage(case.url)).to_yaml() == Path(again).read_text()
    for what, of in (("stop", "p/none"), ("continue", "../p/run"), ("start", "none")):
        with pytest.raises(DataError, match="has no"):
            actions._command(what, of)
    with pytest.raises(UserError, match="unknown action"):
        actions._command("rm", "first")


def test_a_copied_run_is_not_continued(tmp_path: Path) -> None:
    make_run("", make_config(str(tmp_path / "runs")))
    (tmp_path / "runs").rename(tmp_path / "copy")
    with pytest.raises(UserError, match="can only be continued in that folder"):
        Actions(Folder(tmp_path / "copy")).start("continue", "p/run")


def test_a_command_runs_once_and_reports_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = Actions(Folder(tmp_path))
    program = "import sys; print('began', flush=True); sys.stdin.read(); sys.exit({})"
    codes = iter((0, 3, 0, 0, 0))
    monkeypatch.setattr(Actions, "_command", lambda *_: [sys.executable, "-c", program.format(next(codes)), "x"])
    monkeypatch.setattr(module, "_MAX_STARTED", 4)
    states = []
    for number in range(5):
        started = actions.start("start", "first")
        started.process.wait(60)
        states.append(started.state)
        assert len(actions.started()) == min(4, number + 1), "only the oldest ended command is forgotten"
    assert states == ["finished", "failed", *["finished"] * 3] and started.tail == "began\n"
    monkeypatch.setattr(Actions, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)", "x", "y"])
    running = actions.start("start", "first")
    try:
        with pytest.raises(UserError, match="already running"):
            actions.start("start", "first")
    finally:
        running.process.kill()
        running.process.wait(60)


# ---- access


def ask(server: StudioServer, body: Any, **headers: str | None) -> tuple[int, dict[str, Any]]:
    """POST /do like a page of the studio, with changed headers; None omits a header."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    base = {"Cookie": f"{server.cookie}={server.token}", "Host": f"127.0.0.1:{server.port}"}
    connection.request("GET", "/configure", headers=base)
    match = re.search(r'data-action-token="([^"]*)"', connection.getresponse().read().decode())
    sent_headers = {
        **base,
        "Content-Type": "application/json",
        "Origin": f"http://127.0.0.1:{server.port}",
        "Sec-Fetch-Site": "same-origin",
        "X-Rftdask-Action-Token": match[1] if match else "",
    }
    sent_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes | Iterator) else json.dumps(body).encode()
    sent = {name: value for name, value in sent_headers.items() if value is not None}
    connection.request("POST", "/do", data, sent)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else {}


FORM = {"do": "save", "of": "first", "fields": dict(FIELDS.texts), "rest": ""}


def test_a_page_of_the_studio_can_act(own_case: Case, own_server: StudioServer) -> None:
    status, result = ask(own_server, {**FORM, "do": "form", "gpu": ""})
    assert status == 200 and result["problems"] == {} and "checkpoint_root_dir" in result["yaml"]
    root = Path(own_case.config.checkpoint_root_dir)
    assert not (root / "configs").exists(), "checking writes nothing"
    assert ask(own_server, FORM) == (200, {"message": "wrote configs/first.yaml"})
    assert (root / "configs/first.yaml").exists()


def test_a_page_behind_a_proxy_with_tls_can_act(own_case: Case) -> None:
    with studio_of(own_case, hosts=["hub.example.org"]) as server:
        hub = {"Host": "hub.example.org", "Origin": "https://hub.example.org"}
        assert ask(server, FORM, **hub)[0] == 200
        for origin in ("https://evil.example", "https://hub.example.org:1"):
            assert ask(server, {**FORM, "replace": True}, **{**hub, "Origin": origin})[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Cookie": None},
        {"Cookie": "rftdask-1=guess"},
        {"Host": "evil.example:80", "Origin": "http://evil.example:80"},
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site"},
        {"X_Rftdask_Action_Token": None},
        {"X_Rftdask_Action_Token": "guess\u00e9"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
    ],
)
def test_other_requests_cannot_act(own_case: Case, own_server: StudioServer, headers: dict[str, str | None]) -> None:
    assert ask(own_server, FORM, **headers)[0] in (400, 403)
    assert not (Path(own_case.config.checkpoint_root_dir) / "configs").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"[" * 5000,
        b"x" * 1_100_000,
        {"do": "save"},
        {**FORM, "fields": {"name": 3}},
        {**FORM, "fields": []},
        {**FORM, "of": "../first"},
        {"do": "rm", "of": "first"},
        {"do": "stop", "of": "p/none"},
    ],
    ids=range(10),
)
def test_explain_invalid_values(own_server: StudioServer, body: Any) -> None:
    status, result = ask(own_server, body)
    assert status == 400 and result["error"]


def test_a_chunked_body_is_bounded(own_server: StudioServer) -> None:
    body = json.dumps({**FORM, "do": "form", "more": "x" * 1_100_000}).encode()
    status, result = ask(own_server, iter([body[:1000], body[1000:]]))
    assert status == 400 and "1,000,000 bytes" in result["error"]


def test_reading_starts_nothing(server: StudioServer) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request(method, "/do", headers={"Cookie": f"{server.cookie}={server.token}"})
        assert connection.getresponse().status == 405
        connection.close()


def test_a_single_run_and_read_only_have_no_actions(tmp_path: Path) -> None:
    make_run("", make_config(str(tmp_path)))
    assert Studio(Folder(tmp_path / "p/run")).actions is None
    assert Studio(Folder(tmp_path), read_only=True).actions is None
    assert Studio(Folder(tmp_path)).actions is not None
