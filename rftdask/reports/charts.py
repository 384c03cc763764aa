"""Charts: metrics as matplotlib figures, for notebooks.

Each stage has its own panel of equal width, since 16 steps of one stage can matter more than 256 steps of warm-up. No
global state of matplotlib (pyplot) is used. matplotlib and pandas are imported late: together they take a second.
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
"""(stage name, metrics in the format of `read_metrics`), in the order of the stages."""

_TEXT, _GRID = "#52525b", "#d4d4d8"
_SERIES = ("#2a6fdb", "#c2570c", "#0f8a6c", "#7a4fd0", "#b0327a", "#7d6b00")

_SMOOTH_FROM = 40
"""A curve with more points is drawn faintly, under its moving average."""
_MARKS_UP_TO = 20
"""A curve with at most this many points has markers."""


@dataclass(frozen=True)
class Chart:
    """One chart: `metric` of the first role that has it, with one curve per taskset."""

    metric: str
    roles: tuple[str, ...]
    x_label: str = "optimizer step"
    one_scale: bool = True
    """True if the stages share the y axis. The losses of two algorithms are not comparable."""

    @property
    def title(self) -> str:
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
    """Data of one stage: (steps, values) of each curve by taskset, "" without one."""

    stage: str
    curves: dict[str, tuple[list[int], list[float]]]


def panels_of(chart: Chart, stages: Stages) -> list[Panel]:
    panels = []
    for name, metrics in stages:
        if chart.metric not in metrics:
            continue
        rows = metrics.dropna(subset=[chart.metric])
        # One role only: the explorer's value covers all rollouts, the trainer's only the trained ones.
        role = next((role for role in chart.roles if (rows["role"] == role).any()), None)
        if role is None:
            continue
        rows = rows[rows["role"] == role]
        # The column is missing if no row of the stage has the tag.
        parts = rows.groupby("taskset", sort=False) if "taskset" in rows else [("", rows)]
        curves = {str(taskset): (part["step"].tolist(), part[chart.metric].tolist()) for taskset, part in parts}
        panels.append(Panel(name, curves))
    return panels


def plot_metrics(stages: Stages) -> Figure:
    """Draw all charts with data on one figure, three per row."""
    from matplotlib.figure import Figure

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

    # Without pyplot, a notebook displays a Figure only through this method.
    setattr(figure, "_repr_svg_", svg)  # noqa: B010 -- matplotlib does not declare it
    return figure


def _draw(figure: Figure | SubFigure, chart: Chart, panels: list[Panel], *, name_stages: bool) -> None:
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    tasksets = dict.fromkeys(taskset for panel in panels for taskset in panel.curves)
    colors = dict(zip(tasksets, itertools.cycle(_SERIES), strict=False))
    axes_P = figure.subplots(1, len(panels), sharey=chart.one_scale, squeeze=False)[0]
    for axes, panel in zip(axes_P, panels, strict=True):
        for taskset, (x, y) in panel.curves.items():
            if len(x) > _SMOOTH_FROM:
                axes.plot(x, y, color=colors[taskset], linewidth=1.0, alpha=0.3)
                y = pd.Series(y).rolling(max(2, len(y) // 10), min_periods=1, center=True).mean().tolist()
            # With few points, a line without markers would hide their number.
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
