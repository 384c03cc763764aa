"""Charts: metrics as matplotlib figures and as SVG that follows the colors of the page it stands in.

Stages are drawn one after another on one axis: stage 2 starts where the last step of stage 1 was, because its first
weights are those. It knows neither storage nor HTML pages, and uses no global state of matplotlib (no pyplot),
which is imported late, as pandas is: together a second that only who draws pays.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rftdask.monitor.explain import METRICS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Stages = Sequence[tuple[str, "pd.DataFrame"]]
"""(stage name, its metrics as `read_metrics` gives them), in the order the stages ran."""

_TEXT, _GRID = "#52525b", "#d4d4d8"
_SERIES = ("#2a6fdb", "#c2570c", "#0f8a6c", "#7a4fd0", "#b0327a", "#7d6b00")
_CSS = {_TEXT: "currentColor", _GRID: "var(--grid)"} | {c: f"var(--s{n})" for n, c in enumerate(_SERIES, start=1)}
"""Colors of the figure -> colors of the page, so that the page's light and dark mode hold for charts too."""

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

    @property
    def title(self) -> str:
        """What is measured, and its unit."""
        return f"{METRICS[self.metric].label} ({METRICS[self.metric].unit})"


CHARTS = (
    Chart("reward", ("trainer", "explorer")),
    Chart("accuracy", ("eval",), "policy version"),
    Chart("loss", ("trainer",)),
    Chart("eval_loss", ("eval",)),
    Chart("grad_norm", ("trainer",)),
    Chart("response_length", ("trainer", "explorer")),
    Chart("staleness", ("trainer",)),
    Chart("tokens_per_s", ("trainer", "explorer")),
    Chart("kl", ("trainer",)),
    Chart("entropy", ("trainer",)),
)


@dataclass(frozen=True)
class Curve:
    """x and y of one curve; a list of segments, one per stage that has it."""

    label: str
    segments: list[tuple[list[float], list[float]]]


def stage_edges(stages: Stages) -> list[int]:
    """Where on the common axis each stage begins, which is the sum of the optimizer steps before it; then the end."""
    edges = [0]
    for _, metrics in stages:
        steps = metrics[metrics["role"].isin(["trainer", "eval"])]["step"] if len(metrics) else []
        edges.append(edges[-1] + int(max(steps, default=0)))
    return edges


def compute_curves(chart: Chart, stages: Stages) -> list[Curve]:
    """The curves of a chart over all stages; empty when nobody measured the metric."""
    curves: dict[str, Curve] = {}
    for (_, metrics), start in zip(stages, stage_edges(stages), strict=False):
        if chart.metric not in metrics:
            continue
        rows = metrics.dropna(subset=[chart.metric])
        # One role alone: the same name of two roles counts other rows, such as all rollouts and the trained ones.
        role = next((role for role in chart.roles if (rows["role"] == role).any()), None)
        rows = rows[rows["role"] == role]
        labels = rows["taskset"] if "taskset" in rows else rows["role"]
        for label, part in rows.groupby(labels, sort=False):
            curve = curves.setdefault(str(label), Curve(str(label), []))
            curve.segments.append(((part["step"] + start).tolist(), part[chart.metric].tolist()))
    return list(curves.values())


def plot_metrics(metrics: pd.DataFrame | Stages) -> Figure:
    """All charts that have data, on one figure, three in a row. `metrics`: of one run, or of its stages."""
    import pandas as pd
    from matplotlib.figure import Figure

    stages: Stages = [("", metrics)] if isinstance(metrics, pd.DataFrame) else metrics
    drawn = [(chart, curves) for chart in CHARTS if (curves := compute_curves(chart, stages))]
    num_rows = max(1, -(-len(drawn) // 3))
    figure = Figure(figsize=(12, 2.8 * num_rows), layout="constrained")
    if not drawn:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", color=_TEXT)
    for number, (chart, curves) in enumerate(drawn, start=1):
        axes = figure.add_subplot(num_rows, 3, number)
        _draw(axes, chart, curves, stages)
        axes.set_title(chart.title, loc="left", fontsize=10, color=_TEXT, pad=6 if len(stages) < 2 else 26)

    def svg() -> str:
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        return buffer.getvalue()

    # A bare Figure shows itself in a notebook only after pyplot was set up there; this one always does.
    setattr(figure, "_repr_svg_", svg)  # noqa: B010 -- no attribute that matplotlib declares
    return figure


def chart_svg(chart: Chart, stages: Stages) -> str:
    """The chart as an `<svg>` element for an HTML page, "" without data. The page defines --grid and --s1 ... --s6."""
    import matplotlib
    from matplotlib.figure import Figure

    curves = compute_curves(chart, stages)
    if not curves:
        return ""
    buffer = io.StringIO()
    # Text stays text (small, in the page's font); the salt makes the same numbers give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.metric}):
        figure = Figure(figsize=(5.6, 2.5), layout="constrained")
        _draw(figure.add_subplot(), chart, curves, stages)
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    # The file as an element: no prolog, no metadata, ids of its own, colors and font of the page.
    svg = buffer.getvalue()
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{chart.metric}-", svg)
    for color, variable in _CSS.items():
        svg = svg.replace(color, variable)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{chart.title}"', 1)


def _draw(axes: Axes, chart: Chart, curves: list[Curve], stages: Stages) -> None:
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    for curve, color in zip(curves, itertools.cycle(_SERIES), strict=False):
        num_points = max(len(x) for x, _ in curve.segments)
        marks: dict[str, Any] = {"marker": "o", "markersize": 3.5} if num_points <= _MARKS_UP_TO else {}
        for number, (x, y) in enumerate(curve.segments):
            if num_points > _SMOOTH_FROM:
                axes.plot(x, y, color=color, linewidth=1.0, alpha=0.3)
                # Over it the mean of the tenth of the points around each.
                window = max(2, len(y) // 10)
                y = pd.Series(y).rolling(window, min_periods=1, center=True).mean().tolist()
            axes.plot(x, y, color=color, linewidth=1.8, label=curve.label if number == 0 else None, **marks)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=_TEXT)
    if len(stages) > 1:
        # A dashed line where a stage begins, and the names of the stages above; all charts then span all stages.
        edges = stage_edges(stages)
        axes.set_xlim(-0.02 * edges[-1], 1.02 * max(1, edges[-1]))
        for number, ((name, _), start) in enumerate(zip(stages, edges, strict=False)):
            if number:
                axes.axvline(start, color=_TEXT, linewidth=0.8, linestyle=(0, (3, 3)))
            axes.annotate(
                name,
                (start, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 12 if number % 2 else 2),  # staggered: a short stage leaves no room for its name
                textcoords="offset points",
                fontsize=8,
                color=_TEXT,
                parse_math=False,
            )
    if chart.metric == "accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(chart.x_label, fontsize=8, color=_TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.tick_params(colors=_TEXT, labelsize=8, length=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
