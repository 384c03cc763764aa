"""Progress: the current state of a run, on a terminal, in a log or in a notebook.

A `ProgressView` shows the newest `Progress`. Views only print: they read no files, start no threads (rich refreshes
only on request) and limit their refresh rate. rich is imported late, because runs without a terminal do not need it.
"""

from __future__ import annotations

import html
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rftdask.errors import UserError
from rftdask.storage.safe_text import safe, safe_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ViewKind = Literal["auto", "terminal", "plain", "jupyter", "none"]


@dataclass(frozen=True)
class Progress:
    """State of a run at one moment. None: unknown, or not measured yet."""

    stage: str
    stage_number: int = 1
    """Counted from 1."""
    num_stages: int = 1
    mode: str = ""
    step: int = 0
    """Finished steps of this stage."""
    total_steps: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    """Newest evaluation, 0 to 1."""
    accuracy_step: int | None = None
    """Evaluated policy version."""
    loss: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    """Mean number of optimizer steps between sampling and training of the newest batch."""
    elapsed_s: float = 0.0
    eta_s: float | None = None
    """Estimated time left in this stage."""
    workers: int = 0
    notes: tuple[str, ...] = ()
    """Newest events, which a notebook shows below; see `ProgressView.note`."""

    def columns(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs in display order; unknown values are "-"."""

        def number(value: float | None, form: str) -> str:
            return "-" if value is None or math.isnan(value) else format(value, form)

        accuracy = number(self.accuracy, ".1%")
        if accuracy != "-" and self.accuracy_step is not None:
            accuracy += f" @{self.accuracy_step}"
        # Most important first: 80 columns have room for seven.
        return [
            ("step", f"{self.step}" if self.total_steps is None else f"{self.step}/{self.total_steps}"),
            ("reward", number(self.reward, ".3g")),
            ("accuracy", accuracy),
            ("left", "-" if self.eta_s is None else duration(self.eta_s)),
            ("loss", number(self.loss, ".3g")),
            ("tokens/s", number(self.tokens_per_s, ",.0f")),
            ("staleness", number(self.staleness, ".1f")),
            ("workers", str(self.workers)),
            ("elapsed", duration(self.elapsed_s)),
        ]

    @property
    def title(self) -> str:
        """Example: "stage 2/2 rl (both)"."""
        number = f"stage {self.stage_number}/{self.num_stages} " if self.num_stages > 1 else ""
        return number + self.stage + (f" ({self.mode})" if self.mode else "")

    @property
    def fraction(self) -> float | None:
        """Completed fraction of the stage, 0 to 1."""
        return None if not self.total_steps else min(1.0, self.step / self.total_steps)

    def line(self) -> str:
        known = [f"{label} {text}" for label, text in self.columns() if text != "-"]
        return "  ".join([f"[{self.title}]", *known])

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<div style="padding:2px 16px 2px 0"><div style="opacity:.65;font-size:85%">{label}</div>'
            f"<div>{html.escape(text)}</div></div>"
            for label, text in self.columns()
        )
        width = f"{100 * (self.fraction or 0):.1f}%"
        bar = (
            '<div style="height:4px;margin:4px 0;border-radius:2px;background:rgba(128,128,128,.25)">'
            f'<div style="height:4px;border-radius:2px;background:#2a6fdb;width:{width}"></div></div>'
        )
        notes = "".join(f'<div style="opacity:.75">{html.escape(note)}</div>' for note in self.notes)
        style = "font-family:sans-serif;font-variant-numeric:tabular-nums;max-width:60em"
        title = f"<b>{html.escape(self.title)}</b>"
        return f'<div style="{style}">{title}{bar}<div style="display:flex;flex-wrap:wrap">{cells}</div>{notes}</div>'


def duration(seconds: float) -> str:
    """Example: "0:42", "12:05", "3:10:00", "2d 03:10"."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class ProgressView(AbstractContextManager["ProgressView"]):
    """Shows the newest `Progress`; the base class shows nothing (kind "none")."""

    min_interval_s: float = 0.1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at = -math.inf
        self._shown: Progress | None = None
        self._newest: Progress | None = None

    @staticmethod
    def create(kind: ViewKind = "auto") -> ProgressView:
        """Create a view; "auto" chooses it by the output. Raises: UserError: unknown kind."""
        if kind == "auto":
            # Notebooks (Jupyter, Colab) have a kernel; IPython on a terminal has none.
            ipython = sys.modules.get("IPython")
            kernel = getattr(ipython.get_ipython() if ipython else None, "kernel", None)
            # Redrawing needs a terminal that can move its cursor.
            can_redraw = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            kind = "jupyter" if kernel is not None else "terminal" if can_redraw else "plain"
        views: dict[str, type[ProgressView]] = {
            "terminal": TerminalView,
            "plain": PlainView,
            "jupyter": JupyterView,
            "none": ProgressView,
        }
        if kind not in views:
            raise UserError(f"unknown progress view {kind!r}; use auto, {', '.join(views)}")
        return views[kind]()

    def update(self, progress: Progress) -> None:
        """Show `progress`, subject to the refresh interval; a new stage is always shown."""
        is_new_stage = self._newest is None or self._newest.stage_number != progress.stage_number
        if is_new_stage:  # otherwise the end of a short stage might never be shown
            self._finish()
        self._newest = progress
        if is_new_stage or self._clock() - self._shown_at >= self.min_interval_s:
            self._finish()

    def note(self, text: str) -> None:
        """Show an event permanently."""

    def close(self) -> None:
        """Show the last state and release the screen. Idempotent."""
        self._finish()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finish(self) -> None:
        if self._newest is not None and self._newest != self._shown:
            self._show(self._newest)
            self._shown, self._shown_at = self._newest, self._clock()

    def _show(self, progress: Progress) -> None:
        pass


class PlainView(ProgressView):
    """Prints one line per interval, for logs and pipes."""

    min_interval_s = 5.0

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._out = out

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def _show(self, progress: Progress) -> None:
        self._print(progress.line())

    def _print(self, line: str) -> None:
        print(safe(line), file=self._out or sys.stdout, flush=True)


class TerminalView(ProgressView):
    """Draws a panel at the bottom of the terminal; notes scroll above it."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live  # late, see the module docstring

        super().__init__(clock)
        self._console = console or safe_console()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> ProgressView:
        self._live.start()
        return self

    def close(self) -> None:
        super().close()
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(safe(f"note: {text}"), style="yellow", markup=False, highlight=False)

    def _show(self, progress: Progress) -> None:
        self._live.update(panel(progress), refresh=True)


def panel(progress: Progress) -> RenderableType:
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    cells = [Text.assemble((f"{label}\n", "dim"), (text, "bold")) for label, text in progress.columns()]
    parts: list[RenderableType] = [Columns(cells, padding=(0, 3))]
    if progress.fraction is not None:
        bar = Table.grid(expand=True)  # a bare bar has no line end
        bar.add_row(ProgressBar(total=1.0, completed=progress.fraction))
        parts.insert(0, bar)
    return Panel(Group(*parts), title=Text(progress.title, style="bold"), title_align="left", border_style="dim")


class JupyterView(ProgressView):
    """Redraws one output area in place, with the last notes below."""

    max_notes = 8

    def __init__(self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """display: like IPython's `display`; called with display_id=True, returns a handle with `update`."""
        super().__init__(clock)
        if display is None:
            import IPython.display  # late: only available in Jupyter

            display = IPython.display.display
        self._display = display
        self._handle: Any = None
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        self._notes.append(safe(text))
        if self._newest is not None:
            self._show(self._newest)

    def _show(self, progress: Progress) -> None:
        page = replace(progress, notes=(*progress.notes, *self._notes[-self.max_notes :]))
        if self._handle is None:
            self._handle = self._display(page, display_id=True)
        else:
            self._handle.update(page)
