"""Progress views show the newest state at a limited rate, the last state of each stage, and notes at once."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from rftdask.errors import UserError
from rftdask.monitor.progress import JupyterView, PlainView, Progress, ProgressView, TerminalView, duration, panel

PROGRESS = Progress(
    stage="rl",
    stage_number=2,
    num_stages=2,
    mode="both",
    step=12,
    total_steps=100,
    reward=0.4123,
    tokens_per_s=5120.4,
    elapsed_s=65,
    eta_s=3700,
    workers=3,
)


def test_a_line_contains_only_known_values():
    assert PROGRESS.line() == (
        "[stage 2/2 rl (both)]  step 12/100  reward 0.412  left 1:01:40  tokens/s 5,120  workers 3  elapsed 1:05"
    )
    assert Progress("sft", loss=float("nan")).line() == "[sft]  step 0  workers 0  elapsed 0:00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (11400, "3:10:00"), (184200, "2d 03:10"), (-3, "0:00")],
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_plain_view_prints_a_line_per_interval_and_the_end(clock):
    out = io.StringIO()
    with PlainView(out, clock) as view:
        for step in range(1, 13):  # 12 s, a line at most every 5
            view.update(replace(PROGRESS, step=step))
            clock.now_s += 1
        view.close()
    steps = [int(step) for step in re.findall(r"step (\d+)/", out.getvalue())]
    assert steps == [1, 6, 11, 12]


def test_a_new_stage_is_printed_at_once_after_the_old_one(clock):
    out = io.StringIO()
    with PlainView(out, clock) as view:
        for number, step in ((1, 1), (1, 2), (2, 0), (2, 1)):
            view.update(replace(PROGRESS, stage_number=number, step=step))
    shown = [(int(n), int(step)) for n, step in re.findall(r"stage (\d)/2.*step (\d+)/", out.getvalue())]
    assert shown == [(1, 1), (1, 2), (2, 0), (2, 1)]


def test_a_note_is_printed_at_once(clock):
    out = io.StringIO()
    PlainView(out, clock).note("worker tcp://10.0.0.7:4001 lost; 3 work units run again")
    assert out.getvalue() == "note: worker tcp://10.0.0.7:4001 lost; 3 work units run again\n"


def test_the_terminal_keeps_one_panel_below_scrolling_notes(clock):
    out = io.StringIO()
    terminal = {"TERM": "xterm"}  # whatever the one is that the tests run in
    console = Console(
        file=out, force_terminal=True, width=100, color_system=None, legacy_windows=False, _environ=terminal
    )
    with TerminalView(console, clock) as view:
        view.update(PROGRESS)
        view.note("worker [3] lost")
        view.update(replace(PROGRESS, step=13))  # within 0.1 s: not drawn now, but at the end
    text = out.getvalue()
    assert "note: worker [3] lost" in text
    drawn = re.findall(r"(\d+)/100", text)
    assert drawn[0] == "12" and drawn[-1] == "13"
    assert all(label in text for label in ("step", "reward", "accuracy", "tokens/s", "staleness", "left"))


def test_a_notebook_updates_one_output(clock):
    shown = []

    class Handle:
        def update(self, page):
            shown.append(("update", page._repr_html_()))

    def display(page, *, display_id):
        assert display_id
        shown.append(("display", page._repr_html_()))
        return Handle()

    with JupyterView(display, clock) as view:
        view.update(PROGRESS)
        view.note("a <b> note")
        clock.now_s += 1
        view.update(replace(PROGRESS, step=13))
    assert [kind for kind, _ in shown] == ["display", "update", "update"]
    assert "12/100" in shown[0][1] and "13/100" in shown[2][1]
    assert "a &lt;b&gt; note" in shown[2][1]


def test_the_html_of_progress_is_escaped():
    assert "<script>" not in Progress("<script>", notes=("<script>",))._repr_html_()


def test_the_automatic_view_is_plain_without_a_terminal(capsys):
    with ProgressView.create() as view:
        view.update(PROGRESS)
    assert capsys.readouterr().out == PROGRESS.line() + "\n"


def test_the_silent_view_prints_nothing(capsys):
    with ProgressView.create("none") as view:
        view.update(PROGRESS)
        view.note("lost")
    assert capsys.readouterr().out == ""


def test_an_unknown_view_is_refused():
    with pytest.raises(UserError, match="use auto, terminal, plain, jupyter, none"):
        ProgressView.create("loud")


def test_80_columns_show_the_main_numbers_in_one_row():
    long = Progress(
        "grpo", 2, 2, "both", 112, 1000, -0.414, 0.613, 1040, -0.0123, 12345.0, 1.5, 93600.0, 7200.0, workers=12
    )
    console = Console(file=io.StringIO(), width=80, color_system=None, legacy_windows=False, record=True)
    console.print(panel(long))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) == 80
    labels, values = (line.strip("\u2502 ").split() for line in lines[2:4])
    assert labels[:4] == ["step", "reward", "accuracy", "left"]
    assert values[:5] == ["112/1000", "-0.414", "61.3%", "@1040", "2:00:00"]
    assert "left 2:00:00" in long.line()[:90]
