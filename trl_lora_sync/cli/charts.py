"""Charts as SVG text, without any library; colours are the page's own variables `--s0` to `--s5`."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WIDTH, HEIGHT = 940, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 30, 36
_COLOURS = 6
# More bars than this are thinner than the eye or the screen can tell apart, so neighbours are averaged.
_MOST_BARS = 220
_LETTER = 7.2  # about as wide as one is
_FEW_POINTS = 120
_STANDALONE_STYLE = (
    "svg { --soft: #737d8c; --line: #a7b0bd55; --s0: #4b83e0; --s1: #de8425; --s2: #2b9c83; --s3: #a45fc7; "
    "--s4: #cf5570; --s5: #7f8a98; } text { fill: var(--soft); font: 12px system-ui, sans-serif; }"
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One named series.

    Attributes:
        points: (x, y), by rising x.
        band: (x, lower, upper) around the line, if there is one.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = field(default=())


class _Plane:
    """Maps values to places in the picture, and draws the axes."""

    def __init__(self, xs: Iterable[float], ys: Iterable[float], y_label: str) -> None:
        xs, ys = list(xs), list(ys)
        self._x0, self._x1 = min(xs), max(xs)
        if self._x0 == self._x1:
            self._x0, self._x1 = self._x0 - 1, self._x1 + 1
        self.ticks = nice_ticks(min(ys), max(ys))
        self._y0, self._y1 = self.ticks[0], self.ticks[-1]
        self._y_label = y_label

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x0) / (self._x1 - self._x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self._y0) / (self._y1 - self._y0) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str, x_names: Sequence[str] = ()) -> str:
        """Both axes; `x_names` stand at 0, 1 and so on in place of numbers."""
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
            )
        marks = [(float(place), name) for place, name in enumerate(x_names)] or [
            (tick, _number(tick))
            for tick in nice_ticks(self._x0, self._x1, count=10, whole=True)
            if self._x0 <= tick <= self._x1
        ]
        for place, words in marks:
            x = self.x(place)
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{html.escape(words)}</text>'
            )
        label = html.escape(x_label)
        parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{label}</text>')
        parts.append(f'<text x="8" y="16">{html.escape(self._y_label)}</text>')
        return "".join(parts)


def line_chart(
    lines: Sequence[Line],
    *,
    y_label: str,
    x_label: str = "step",
    from_zero: bool = False,
    reference: float | None = None,
) -> str:
    """Lines over the steps, or over what `x_label` says, each with its band; `reference` is a dashed level."""
    ys = [y for line in lines for _, y in line.points if math.isfinite(y)]
    ys += [y for line in lines for _, *ends in line.band for y in ends if math.isfinite(y)]
    ys += [0.0] * from_zero + ([] if reference is None else [reference])
    plane = _Plane((x for line in lines for x, _ in line.points), ys or [0.0], y_label)
    parts = [plane.axes(x_label)]
    if reference is not None:
        y = plane.y(reference)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--soft)" '
            'stroke-dasharray="4 4"/>'
        )
    for number, line in enumerate(lines):
        colour = f"var(--s{number % _COLOURS})"
        edge = [(x, upper) for x, _, upper in line.band] + [(x, lower) for x, lower, _ in reversed(line.band)]
        if edge:
            parts.append(f'<polygon points="{_places(plane, edge)}" fill="{colour}" opacity="0.15"/>')
        parts.append(
            f'<polyline points="{_places(plane, line.points)}" fill="none" stroke="{colour}" stroke-width="2" '
            'stroke-linejoin="round"/>'
        )
        if len(line.points) <= _FEW_POINTS:
            parts += [
                f'<circle cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="3" fill="{colour}">'
                f"<title>{html.escape(line.name)}, {html.escape(x_label)} {_number(x)}: {y:.5g}</title></circle>"
                for x, y in line.points
                if math.isfinite(y)
            ]
    return _svg([*parts, _legend(lines, y_label)], lines, y_label)


def stacked_chart(lines: Sequence[Line], *, y_label: str, x_label: str = "step", x_names: Sequence[str] = ()) -> str:
    """One bar per step, of the lines' values on top of one another; or per name, for points at 0, 1 and so on."""
    bars = _thinned(lines)
    totals = [sum(values) for _, values in bars]
    apart = min((right - left for (left, _), (right, _) in pairwise(bars)), default=1.0)
    plane = _Plane([bars[0][0] - apart / 2, bars[-1][0] + apart / 2], [0.0, *totals], y_label)
    width = min(60.0, max(1.0, (plane.x(apart) - plane.x(0.0)) * 0.8))
    parts = [plane.axes(x_label, x_names)]
    for x, values in bars:
        below = 0.0
        left = plane.x(x) - width / 2
        for number, value in enumerate(values):
            top, bottom = plane.y(below + value), plane.y(below)
            below += value
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(0.0, bottom - top):.2f}" '
                f'fill="var(--s{number % _COLOURS})"><title>{html.escape(lines[number].name)}, step {_number(x)}: '
                f"{value:.5g}</title></rect>"
            )
    return _svg([*parts, _legend(lines, y_label)], lines, y_label)


def standalone(charts: Sequence[str]) -> str:
    """One SVG file of charts below one another, with colours that can be read on a light and on a dark page."""
    placed = [
        f'<g transform="translate(0 {number * HEIGHT})">{chart.partition(">")[2].removesuffix("</svg>")}</g>'
        for number, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * max(1, len(charts))}">'
        f"<style>{_STANDALONE_STYLE}</style>{''.join(placed)}</svg>\n"
    )


def nice_ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """About `count` round numbers that enclose `low` and `high`."""
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _thinned(lines: Sequence[Line]) -> list[tuple[float, list[float]]]:
    """(x, the value of each line), with neighbours averaged where there are too many."""
    values = [dict(line.points) for line in lines]
    steps = sorted({x for found in values for x in found})
    size = math.ceil(len(steps) / _MOST_BARS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [
        (sum(group) / len(group), [sum(found.get(x, 0.0) for x in group) / len(group) for found in values])
        for group in groups
    ]


def _places(plane: _Plane, points: Iterable[Point]) -> str:
    return " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in points if math.isfinite(y))


def _legend(lines: Sequence[Line], y_label: str) -> str:
    """Right of the label of the axis, which is in the corner above it."""
    parts, x = [], max(_LEFT + 40.0, 24 + _LETTER * len(y_label))
    for number, line in enumerate(lines):
        parts.append(
            f'<rect x="{x:.0f}" y="7" width="11" height="11" rx="2" fill="var(--s{number % _COLOURS})"/>'
            f'<text x="{x + 16:.0f}" y="17">{html.escape(line.name)}</text>'
        )
        x += 38 + _LETTER * len(line.name)
    return "".join(parts)


def _svg(parts: Iterable[str], lines: Sequence[Line], y_label: str) -> str:
    about = html.escape(f"{', '.join(line.name for line in lines)} in {y_label} over the steps")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}</svg>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
