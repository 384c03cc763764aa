"""Charts: metrics as matplotlib figures, for notebooks.

Each stage has a panel of its own, all of them equally wide, since a stage of 16 steps may be what a run is about and
256 steps before it only its preparation. It knows neither storage nor HTML pages, and uses no global state of
matplotlib (no pyplot), which is imported late, as pandas is: together a second that only who draws pays.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rftdask.reports.metric_table import METRICS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure, SubFigure

Stages = Sequence[tuple[str, "pd.DataFrame"]]
"""(stage name, its metrics as `read_metrics` gives them), in the order the stages ran."""

_TEXT, _GRID = "#52525b", "#d4d4d8"
_SERIES = ("#2a6fdb", "#c2570c", "#0f8a6c", "#7a4fd0", "#b0327a", "#7d6b00")

_SMOOTH_FROM = 40
"""With more points than this a curve is drawn faint, under its mean over a window."""
_MARKS_UP_TO = 20
"""With at most so many points each is marked."""


@dataclass(frozen=True)
class Chart:
    """One chart: `metric` of the first of `roles` that has it; one curve per taskset tag."""

    metric: str
    roles: tuple[str, ...]
    x_label: str = "optimizer step"
    one_scale: bool = True
    """Whether the stages share the y axis; the losses of two algorithms have nothing in common."""

    @property
    def title(self) -> str:
        """What is measured, and its unit."""
        return f"{METRICS[self.metric].label} ({METRICS[self.metric].unit})"


CHARTS = (
    Chart("reward", ("trainer", "explorer")),
    Chart("accuracy", ("eval",), "policy version"),
    Chart("loss", ("trainer",), one_scale=False),
    Chart("eval_loss", ("eval",), one_scale=False),
    Chart("grad_norm", ("trainer",), one_scale=False),
    Chart("response_length", ("trainer", "explorer")),
    Chart("staleness", ("trainer",)),
    Chart("tokens_per_s", ("trainer", "explorer")),
    Chart("kl", ("trainer",)),
    Chart("entropy", ("trainer",)),
)


@dataclass(frozen=True)
class Panel:
    """What one stage measured of a chart: (steps, values) of each curve by its taskset, "" where there is none."""

    stage: str
    curves: dict[str, tuple[list[int], list[float]]]


def panels_of(chart: Chart, stages: Stages) -> list[Panel]:
    """One for each stage that measured the metric, in order."""
    panels = []
    for name, metrics in stages:
        if chart.metric not in metrics:
            continue
        rows = metrics.dropna(subset=[chart.metric])
        # One role alone: the same name of two roles counts other rows, such as all rollouts and the trained ones.
        role = next((role for role in chart.roles if (rows["role"] == role).any()), None)
        if role is None:
            continue
        rows = rows[rows["role"] == role]
        # No row of a stage without evaluations has the tag; else it is "" where it is missing.
        parts = rows.groupby("taskset", sort=False) if "taskset" in rows else [("", rows)]
        curves = {str(taskset): (part["step"].tolist(), part[chart.metric].tolist()) for taskset, part in parts}
        panels.append(Panel(name, curves))
    return panels


def plot_metrics(metrics: pd.DataFrame | Stages) -> Figure:
    """All charts that have data, on one figure, three in a row. `metrics`: of one run, or of its stages."""
    import pandas as pd
    from matplotlib.figure import Figure

    stages: Stages = [("", metrics)] if isinstance(metrics, pd.DataFrame) else metrics
    drawn = [(chart, panels) for chart in CHARTS if (panels := panels_of(chart, stages))]
    num_rows = max(1, -(-len(drawn) // 3))
    figure = Figure(figsize=(12, 2.8 * num_rows), layout="constrained")
    if not drawn:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", color=_TEXT)
    for (chart, panels), part in zip(drawn, figure.subfigures(num_rows, 3, squeeze=False).flat, strict=False):
        part.suptitle(chart.title, x=0.02, ha="left", fontsize=10, color=_TEXT)
        _draw(part, chart, panels, name_stages=len(stages) > 1)

    def svg() -> str:
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        return buffer.getvalue()

    # A bare Figure shows itself in a notebook only after pyplot was set up there; this one always does.
    setattr(figure, "_repr_svg_", svg)  # noqa: B010 -- no attribute that matplotlib declares
    return figure


def _draw(figure: Figure | SubFigure, chart: Chart, panels: list[Panel], *, name_stages: bool) -> None:
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    # A taskset has its color in all stages.
    tasksets = dict.fromkeys(taskset for panel in panels for taskset in panel.curves)
    colors = dict(zip(tasksets, itertools.cycle(_SERIES), strict=False))
    axes_P = figure.subplots(1, len(panels), sharey=chart.one_scale, squeeze=False)[0]
    for axes, panel in zip(axes_P, panels, strict=True):
        for taskset, (x, y) in panel.curves.items():
            if len(x) > _SMOOTH_FROM:
                axes.plot(x, y, color=colors[taskset], linewidth=1.0, alpha=0.3)
                # Over it the mean of the tenth of the points around each.
                y = pd.Series(y).rolling(max(2, len(y) // 10), min_periods=1, center=True).mean().tolist()
            # With few points a line alone would hide how few.
            marks: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(x) <= _MARKS_UP_TO else {}
            axes.plot(x, y, color=colors[taskset], linewidth=1.8, label=taskset, **marks)
        if name_stages:
            axes.set_title(panel.stage[: 60 // len(panels)], fontsize=8, color=_TEXT, parse_math=False)
        if chart.metric == "accuracy":
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel(chart.x_label, fontsize=8, color=_TEXT)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=max(2, 6 // len(panels)), integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.grid(axis="y", color=_GRID, linewidth=0.7)
        axes.tick_params(colors=_TEXT, labelsize=8, length=0)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
    if len(tasksets) > 1:
        axes_P[-1].legend(frameon=False, fontsize=8, labelcolor=_TEXT)
