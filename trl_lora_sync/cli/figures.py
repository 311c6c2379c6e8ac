"""The figures of the report, made with plotly; text and grid take their colours from the page."""

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_lora_sync.cli.run_history import Point

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Readable on a light and on a dark page.
COLOURS = ("#4b83e0", "#de8425", "#2b9c83", "#a45fc7", "#cf5570", "#7f8a98")
_OUTLIER_COLOUR = "#e0354b"
_NONE = "rgba(0, 0, 0, 0)"
_MOST_BARS = 150  # more of them are thinner than a screen shows, and are drawn as areas
_MOST_MARKERS = 60
_WINDOW, _FEWEST = 15, 8  # an outlier is found among so many neighbours, in a series of at least so many points
_SPREADS, _SHARE = 6.0, 0.5  # and is so far from their median: in median absolute deviations, and as a share of it


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series.

    Attributes:
        points: (step, value), by rising step.
        band: (step, lower, upper) around the line, if there is one.
        colour: place in `COLOURS`.
        is_dashed: separates two series of one run, where colours separate the runs.
        marks_outliers: whether points far above their neighbours are marked.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = field(default=())
    colour: int = 0
    is_dashed: bool = False
    marks_outliers: bool = True


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A value far above its neighbours, or not a number; `usual` is the neighbours' median."""

    step: float
    value: float
    usual: float


def outliers(points: Sequence[Point]) -> list[Outlier]:
    """The points far above their neighbours: above the median of those, by the spread of the whole series around it."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    middle = [value for _, value in finite]
    usual = [statistics.median(_around(middle, place)) for place in range(len(middle))]
    # With fewer points, a median of neighbours is little more than the point itself.
    found = []
    if len(finite) >= _FEWEST:
        away = [value - near for value, near in zip(middle, usual, strict=True)]
        # With this factor it estimates the standard deviation of normal noise, and outliers hardly move it.
        spread = 1.4826 * statistics.median(map(abs, away))
        found = [
            Outlier(step=step, value=value, usual=near)
            for (step, value), near, distance in zip(finite, usual, away, strict=True)
            # The share keeps a series that hardly moves free of marks, and the last bound a constant one.
            if distance > max(_SPREADS * spread, _SHARE * abs(near), 1e-12)
        ]
    overall = statistics.median(middle) if middle else math.nan
    not_finite = [Outlier(step=x, value=y, usual=overall) for x, y in points if not math.isfinite(y)]
    return sorted([*found, *not_finite], key=lambda outlier: outlier.step)


def _around(values: Sequence[float], place: int) -> Sequence[float]:
    start = max(0, min(place - _WINDOW // 2, len(values) - _WINDOW))
    return values[start : start + _WINDOW]


def line_figure(
    lines: Sequence[Line],
    *,
    unit: str,
    from_zero: bool = False,
    reference: float | None = None,
    is_sparse: bool = False,
) -> "Figure":
    """Lines over the steps, each with its band; `reference` is a dotted level.

    Args:
        is_sparse: whether most steps have no value, so that a line would suggest some in between.
    """
    figure = _figure(unit)
    for line in lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        if line.band:
            steps = [step for step, _, _ in line.band]
            edge = [upper for _, _, upper in line.band], [lower for _, lower, _ in line.band]
            figure.add_scatter(
                # One closed outline: along the upper edge, and back along the lower one.
                x=steps + steps[::-1], y=edge[0] + edge[1][::-1], fill="toself", fillcolor=_faint(colour),
                # By default plotly marks the points of a trace that has few.
                mode="lines", line_width=0, hoverinfo="skip", showlegend=False,
            )  # fmt: skip
        figure.add_scatter(
            x=[step for step, _ in line.points], y=[value for _, value in line.points], name=html.escape(line.name),
            mode="markers" if is_sparse else "lines+markers" if len(line.points) <= _MOST_MARKERS else "lines",
            marker_size=8 if is_sparse else 5,
            line={"color": colour, "width": 2, "dash": "dot" if line.is_dashed else "solid"},
        )  # fmt: skip
    marked = [outlier for line in lines if line.marks_outliers for outlier in outliers(line.points)]
    has_legend = len(lines) > 1 or bool(marked)
    figure.update_layout(showlegend=has_legend, margin_t=34 if has_legend else 20)
    top = _cut(figure, [value for line in lines for _, value in line.points], marked, from_zero=from_zero)
    _mark(figure, marked, top)
    if reference is not None:
        figure.add_hline(y=reference, line={"color": COLOURS[-1], "width": 1, "dash": "dot"})
    return figure


def stacked_figure(parts: Sequence[Line], *, unit: str, top: float) -> "Figure":
    """The parts of each step on top of one another; `top` ends the axis, so that two figures can be compared."""
    figure = _figure(unit)
    count = max(len(part.points) for part in parts)
    for number, part in enumerate(parts):
        colour = COLOURS[number % len(COLOURS)]
        steps, values = [step for step, _ in part.points], [value for _, value in part.points]
        if count <= _MOST_BARS:
            figure.add_bar(x=steps, y=values, name=part.name, marker_color=colour)
        else:
            figure.add_scatter(
                x=steps, y=values, name=part.name, stackgroup="parts", mode="lines", line_width=0, fillcolor=colour
            )
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(range=[0, top])
    _mark(figure, outliers(sums(parts)), top)
    return figure


def sums(parts: Sequence[Line]) -> list[Point]:
    """The sum of the parts at each step that any of them has."""
    totals: dict[float, float] = {}
    for part in parts:
        for step, value in part.points:
            totals[step] = totals.get(step, 0.0) + value
    return sorted(totals.items())


def stack_top(wholes: Iterable[Sequence[Point]]) -> float:
    """Where the axis of stacked figures ends: above all that is not an outlier."""
    highest = 0.0
    for whole in wholes:
        far = {outlier.step for outlier in outliers(whole)}
        values = [value for step, value in whole if math.isfinite(value)]
        usual = [value for step, value in whole if step not in far] or values
        # Cut somewhat above what is usual, so that a few long steps do not flatten the others.
        highest = max(highest, min(max(values, default=0.0), 1.6 * max(usual, default=0.0)))
    return 1.08 * highest or 1.0


def _cut(figure: "Figure", values: Sequence[float], marked: Sequence[Outlier], *, from_zero: bool) -> float | None:
    """End the axis so that a few outliers above do not flatten the rest; where it ends, or None if it is not cut."""
    far = {outlier.value for outlier in marked}
    usual = [value for value in values if math.isfinite(value) and value not in far]
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    if not usual:
        return None
    low, high = min([*usual, 0.0] if from_zero else usual), max(usual)
    # A constant series has no height to take a share of.
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = low if from_zero and low == 0.0 else low - margin
    # The second comparison is false for a constant series, whose axis must not be cut to nothing.
    if highest > high + 1.5 * (high - low) > low:
        figure.update_yaxes(range=[bottom, high + 4 * margin])
        return high + 4 * margin
    if from_zero:
        figure.update_yaxes(rangemode="tozero")
    return None


def _mark(figure: "Figure", marked: Sequence[Outlier], top: float | None) -> None:
    """Put a mark on each outlier, at the upper edge where it is above that."""
    drawn = [outlier for outlier in marked if math.isfinite(outlier.value)]
    if not drawn:
        return
    above = [top is not None and outlier.value > top for outlier in drawn]
    figure.add_scatter(
        x=[outlier.step for outlier in drawn],
        y=[top if is_above else outlier.value for outlier, is_above in zip(drawn, above, strict=True)],
        mode="markers", name="outlier", cliponaxis=False,
        marker={
            "symbol": ["triangle-up" if is_above else "circle-open" for is_above in above],
            "color": _OUTLIER_COLOUR, "size": 10, "line": {"width": 2, "color": _OUTLIER_COLOUR},
        },
        # The height of a mark at the edge is not the value.
        customdata=[outlier.value for outlier in drawn],
        hovertemplate="%{customdata:.4g}",
    )  # fmt: skip


def _figure(unit: str) -> "Figure":
    from plotly.graph_objects import Figure

    axis: dict[str, Any] = {
        "automargin": True,
        "zeroline": False,
        # By default plotly writes a learning rate of 1e-5 with the prefix for millionths.
        "exponentformat": "e",
        "gridcolor": "rgba(136, 136, 136, 0.3)",
        "tickfont_size": 12,
    }
    return Figure(
        layout={
            # The default template has colours for a light page.
            "template": "none", "height": 270, "margin": {"l": 8, "r": 12, "t": 34, "b": 8}, "hovermode": "x unified",
            "paper_bgcolor": _NONE, "plot_bgcolor": _NONE, "font": {"family": "system-ui, sans-serif", "size": 12},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
            # By default plotly cuts names there, and names of runs begin alike.
            "hoverlabel": {"namelength": -1}, "modebar": {"bgcolor": _NONE, "color": "#999", "activecolor": "#888"},
            "xaxis": axis | {
                "title": {"text": "step", "standoff": 4}, "tickangle": 0, "hoverformat": "d",
                "unifiedhovertitle_text": "step %{x}",
                "spikethickness": 1, "spikedash": "solid",
            },
            "yaxis": axis | {"title": {"text": unit, "standoff": 6}, "hoverformat": ".4~g"},
        }
    )  # fmt: skip


def share_steps(figures: Sequence["Figure"], first: float, last: float) -> None:
    """Give all figures the same axis of steps, with whole numbers on it."""
    for figure in figures:
        # Plotly puts ticks at fractions of a step where there are few.
        figure.update_xaxes(range=[first - 0.6, last + 0.6], dtick=1 if last - first < 8 else None)


def _faint(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red}, {green}, {blue}, 0.15)"
