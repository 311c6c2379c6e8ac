"""The chart of benchmarks/overlap.py."""

from typing import Any

_COLORS = {"generation": "#4c78a8", "training": "#72b7b2", "sync": "#e45756", "waiting": "#bab0ac"}
_LEFT, _WIDTH, _ROW, _GREY = 80, 800, 22, "#7f8a98"


def chart(timelines: dict[str, dict[str, Any]]) -> str:
    """Two rows for each arm, on one scale: when the server sampled, and what the trainer did."""
    longest = max((one["end"] for one in timelines.values()), default=1.0)
    scale = _WIDTH / longest
    parts, top = [], 24
    for place, (name, color) in enumerate(_COLORS.items()):
        parts.append(_box(_LEFT + 130 * place, 4, 12, 12, color))
        parts.append(_text(_LEFT + 130 * place + 18, 14, name))
    for arm, one in timelines.items():
        parts.append(_text(_LEFT, top + 18, f"{arm}: {len(one['steps'])} steps in {one['end']:.1f} s"))
        for row, (lane, kinds) in enumerate((("server", ("generation",)), ("trainer", ("waiting", "sync")))):
            y = top + 24 + row * (_ROW + 4)
            parts.append(_text(4, y + 15, lane))
            if lane == "trainer":
                parts.append(_box(_LEFT, y, one["end"] * scale, _ROW, _COLORS["training"]))
            parts += [
                _box(_LEFT + since * scale, y, (until - since) * scale, _ROW, _COLORS[what])
                for kind in kinds
                for what, since, until in one["spans"]
                if what == kind
            ]
        for step in one["steps"]:
            x = _LEFT + step * scale
            parts.append(f'<path d="M{x:.1f} {top + 22}v{2 * _ROW + 8}" stroke="{_GREY}"/>')
        top += 24 + 2 * (_ROW + 4) + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} {top}" font-size="13" '
    return f'{head}font-family="sans-serif" fill="{_GREY}">\n' + "\n".join(parts) + "\n</svg>\n"


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{color}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}">{words}</text>'
