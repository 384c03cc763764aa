"""Promise: no text from tasks, models, names or files controls the terminal, and no secret is displayed."""

import io
import json
import logging
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from rftdask.monitor.logs import setup_logging
from rftdask.monitor.progress import PlainView, Progress, TerminalView
from rftdask.reports.summary import RunSummary, SampleAnswer, print_summary
from rftdask.run.run_folder import note_end, read_end
from rftdask.storage import open_storage
from rftdask.storage.safe_text import safe_console
from tests.integration.run_cases import RunProcess, call_cli, finish_alone, write_config

HOSTILE = (
    "a\x1b[2J\x1b]0;owned\x07\x9b31m\x08\r\x7f\u202egpj.exe\u2066 [bold red]b[/] [/nothing] [link=file:///x]c[/link]"
)
SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


def assert_shown_safely(text: str, *words: str) -> None:
    """Assert that only line ends remain as control characters, and that markup and the plain parts are unchanged."""
    raw = re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
    assert not raw, (raw, text)
    assert SECRET not in text
    for word in words:
        assert word in text, f"{word!r} is not in {text}"


def test_summaries_show_samples_and_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    sample = SampleAnswer(HOSTILE, HOSTILE, HOSTILE, None, f"{HOSTILE} {SECRET}", None)
    error = f"{HOSTILE} https://me:hunter2@host/x"
    print_summary(RunSummary("r", HOSTILE, "failed", error=error, samples=(sample,), warnings=(HOSTILE,)))
    shown = capsys.readouterr().out
    assert_shown_safely(shown, "\\x1b[2J", "[bold red]b[/]", "[link=file:///x]", "\\u202egpj")
    assert "hunter2" not in shown


def test_progress_and_notes_are_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = io.StringIO()
    with PlainView(out) as plain:
        plain.note(f"{HOSTILE} {SECRET}")
        plain.update(Progress(stage=HOSTILE))
    assert_shown_safely(out.getvalue(), "\\x1b[2J", "[bold red]b[/]")
    terminal = TerminalView(safe_console())
    terminal.note(f"{HOSTILE} {SECRET}")
    terminal._console.print(HOSTILE, markup=False)  # the console also escapes text that a caller did not escape
    assert_shown_safely(capsys.readouterr().out, "\\x1b[2J", "[bold red]b[/]")


def test_logs_and_last_words_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = setup_logging("driver", folder=tmp_path)
    try:
        raise ValueError(f"{HOSTILE} {SECRET}")
    except ValueError:
        logging.getLogger("rftdask.x").exception("lost %s", HOSTILE)
    setup_logging("driver")
    assert path is not None
    assert_shown_safely(path.read_text(), "\\x1b[2J", "ValueError")
    assert_shown_safely(capsys.readouterr().err, "\\x1b[2J", "ValueError")
    storage = open_storage(tmp_path)
    note_end(storage, "failed", f"no answer from https://me:hunter2@host and {SECRET}")
    assert read_end(storage) == "failed: no answer from https://me:***@host and ***"


MISTYPED = {
    "no such command": (f"{HOSTILE}",),
    "too many arguments": ("status", "x", HOSTILE),
    "no number": ("logs", "x", "-n", HOSTILE),
    "a run that is none": ("status", HOSTILE),
    "a config that is none": ("run", HOSTILE),
    "an override that is none": ("run", "CONFIG", HOSTILE),
    "a key that is none": ("run", "CONFIG", f"{HOSTILE}=1"),
    "a value that does not fit": ("run", "CONFIG", f"buffer.batch_size='{HOSTILE}'"),
    "a dataset that is none": ("run", "CONFIG", f"buffer.explorer_input.taskset.path='{HOSTILE}'"),
    "a workflow that is none": ("run", "CONFIG", f"buffer.explorer_input.taskset.default_workflow_type='{HOSTILE}'"),
    "a URL with a password": ("status", f"s3://me:hunter2@b/{HOSTILE}"),
    "SQL": ("experiences", "x", "--sql", HOSTILE),
    "a place to keep runs": ("doctor", f"nowhere://{HOSTILE}"),
}


@pytest.mark.parametrize("words", MISTYPED.values(), ids=MISTYPED.keys())
@pytest.mark.timeout(120)
def test_control_characters_in_mistakes_are_not_obeyed(words: tuple[str, ...], tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    ended = call_cli(*(word.replace("CONFIG", config) for word in words))
    assert ended.code in (1, 2), ended
    assert_shown_safely(ended.out + ended.err)
    assert "hunter2" not in ended.err and "Traceback" not in ended.err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose names, tasks and answers are hostile, and the output of `rftdask run`."""
    folder = tmp_path_factory.mktemp("hostile")
    config = write_config(folder)
    tree = yaml.safe_load(config.read_text())
    rows = [{"question": f"{i}{HOSTILE}", "answer": f"{HOSTILE}{SECRET}"} for i in range(16)]
    name = "tasks\x1b[31m\u202e[bold].jsonl"
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = tree["buffer"]["explorer_input"]["taskset"] | {"path": str(folder / name)}
    held_out = tree["buffer"]["explorer_input"]["eval_tasksets"][0] | {"path": str(folder / name)}
    tree["buffer"]["explorer_input"] |= {"taskset": taskset, "eval_tasksets": [held_out]}
    tree["checkpoint_root_dir"] = str(folder / "ru\x1b[31m\u202ens")
    tree["model"]["max_prompt_tokens"] = 256
    tree["trainer"]["total_steps"] = 2
    config.write_text(yaml.safe_dump(tree))
    ended = finish_alone(config)
    (folder / "printed").write_text(ended.out + ended.err)
    return folder / "ru\x1b[31m\u202ens" / "rftdask" / "fake"


READERS = {
    "status": ("status", "RUN"),
    "status as JSON": ("status", "RUN", "--json"),
    "report": ("report", "RUN"),
    "logs": ("logs", "RUN"),
    "cancel": ("cancel", "RUN", "--timeout", "2"),
    "experiences": ("experiences", "RUN"),
    "SQL": ("experiences", "RUN", "--sql", "select prompt_text, response_text, truth as '[red]t\x1b' from experiences"),
    "SQL of the text": ("experiences", "RUN", "--sql", "select * from experiences"),
    "trace": ("trace", "RUN", "UID"),
    "trace of nobody": ("trace", "RUN", f"{HOSTILE}/0/0/0/0"),
    "a page": ("view", "RUN", "--html", "page.html"),
    "validate": ("validate", "CONFIG", "--data"),
    "submit": ("submit", "CONFIG", "--dry-run"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_control_characters_in_a_run_are_not_obeyed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.parents[2]
    assert_shown_safely((folder / "printed").read_text())
    with (run / "log" / "driver.log").open("a") as log:
        log.write(f"{HOSTILE} {SECRET}\n")
    found = call_cli("experiences", str(run), "--json", "--sql", "select uid from experiences limit 1")
    places = {"RUN": str(run), "UID": json.loads(found.out)[0]["uid"], "CONFIG": str(folder / "config.yaml")}
    with RunProcess("view", str(run), "--no-browser") as viewing:
        assert viewing.process.stdout is not None
        address = viewing.process.stdout.readline()
        viewing.interrupt()
    assert re.search(r"token=[\w-]{20,}", address), f"{address} has no token to use"
    monkeypatch.chdir(tmp_path)
    for name, words in READERS.items():
        ended = call_cli(*(places.get(word, word) for word in words))
        assert ended.code in (0, 1, 2) and "Traceback" not in ended.err, (name, ended)
        assert_shown_safely(ended.out + ended.err)
    # Output for programs is unchanged.
    assert "\x1b[2J" in call_cli("experiences", str(run), "--csv", "--sql", "select * from experiences").out
    assert os.listdir(tmp_path)


SLOW_IMPORT = """
import sys, time
from rftdask import __main__

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "rftdask.cli.app":
            print("importing", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Slow())
__main__.main()
"""


SLOW_COMMANDS = """
import time
import typer.main
from rftdask import __main__

def slow(*_):
    print("making", flush=True)
    {wait}

typer.main.get_group = slow
__main__.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "program",
    [SLOW_IMPORT, SLOW_COMMANDS.format(wait="time.sleep(600)"), SLOW_COMMANDS.format(wait="exec('time.sleep(600)')")],
    ids=["import", "commands", "exec"],
)
def test_a_signal_during_import_ends_with_its_code(program: str, number: int) -> None:
    with RunProcess(program=("-c", program)) as command:
        assert command.process.stdout is not None
        command.process.stdout.readline()
        command.process.send_signal(number)
        ended = command.end()
    assert (ended.code, ended.err) == (128 + number, ""), ended
