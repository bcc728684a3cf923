"""Small charts as SVG text: lines, columns, and bars. It does not know what they show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 50
_BAR_HEIGHT = 30
_ROOM_FOR_TEXT = 36
# Colours that people who see colours differently can tell apart (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        label: What stands before it.
        value: Its length.
        low: Where the line over its end begins.
        high: Where that line ends.
    """

    label: str
    value: float
    low: float
    high: float


def line_chart(
    title: str, x_title: str, y_title: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Lines through points; x is drawn by powers of two, as such counts are chosen.

    Args:
        title: Above the chart.
        x_title: Below the x axis.
        y_title: Above the y axis, which begins at 0.
        series: Points in order of x, all above 0, by name.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _round_up(max(y for points in series.values() for _, y in points))
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        across = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 20, title, weight="bold"), _text(_LEFT, _TOP - 12, y_title)]
    for step in range(5):
        y = top * step / 4
        left, down = place(xs[0], y)[0] if high > low else _LEFT, place(xs[0], y)[1]
        parts.append(_line(min(left, _LEFT), down, _WIDTH - _RIGHT, down, "#dddddd"))
        parts.append(_text(_LEFT - 8, down + 4, f"{y:g}", anchor="end"))
    for x in xs:
        parts.append(_text(place(x, 0)[0], _HEIGHT - _BOTTOM + 18, f"{x:g}", anchor="middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_title, anchor="middle"))
    for index, (name, points) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [place(x, y) for x, y in points]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in places
        ]
        parts.append(_text(_LEFT + 12, _TOP + 14 + 16 * index, name, colour=colour))
    return _document(_HEIGHT, parts)


def bar_chart(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Bars to the right, each with its value and a line for its spread.

    Args:
        title: Above the chart.
        unit: Behind each value.
        bars: From the top.
    """
    left = 12 + 8 * max(len(bar.label) for bar in bars)
    scale = (_WIDTH - left - 130) / max(max(bar.value, bar.high) for bar in bars)
    parts = [_text(12, 20, title, weight="bold")]
    for index, bar in enumerate(bars):
        down = _TOP + index * _BAR_HEIGHT
        middle = down + _BAR_HEIGHT * 0.35
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(_text(left - 8, middle + 5, bar.label, anchor="end"))
        parts.append(
            f'<rect x="{left}" y="{down}" width="{bar.value * scale:.1f}" '
            f'height="{_BAR_HEIGHT * 0.7:.1f}" fill="{colour}" fill-opacity="0.8"/>'
        )
        parts.append(_line(left + bar.low * scale, middle, left + bar.high * scale, middle, "#222222"))
        end = left + max(bar.value, bar.high) * scale
        parts.append(_text(end + 8, middle + 5, f"{bar.value:.1f} {unit}"))
    return _document(_TOP + len(bars) * _BAR_HEIGHT + 20, parts)


def column_chart(title: str, x_title: str, y_title: str, values: Sequence[float]) -> str:
    """Columns side by side, as many as there are, and a line at their mean.

    Args:
        title: Above the chart.
        x_title: Below the columns, which have no labels of their own.
        y_title: Above the y axis, which begins at 0.
        values: Heights from the left; at least one, and not all 0.
    """
    top, mean = _round_up(max(values)), sum(values) / len(values)
    width, height = (_WIDTH - _LEFT - _RIGHT) / len(values), _HEIGHT - _TOP - _BOTTOM
    parts = [_text(_LEFT, 20, title, weight="bold"), _text(_LEFT, _TOP - 12, y_title)]
    for step in range(5):
        down = _TOP + height * (1 - step / 4)
        parts.append(_line(_LEFT, down, _WIDTH - _RIGHT, down, "#dddddd"))
        parts.append(_text(_LEFT - 8, down + 4, f"{top * step / 4:g}", anchor="end"))
    for index, value in enumerate(values):
        tall = value / top * height
        parts.append(
            f'<rect x="{_LEFT + (index + 0.1) * width:.2f}" y="{_TOP + height - tall:.1f}" '
            f'width="{0.8 * width:.2f}" height="{tall:.1f}" fill="{_COLOURS[0]}" fill-opacity="0.8"/>'
        )
    down = _TOP + height * (1 - mean / top)
    parts.append(_line(_LEFT, down, _WIDTH - _RIGHT, down, "#222222"))
    parts.append(_text(_WIDTH - _RIGHT, down - 5, f"mean {mean:.2f}", anchor="end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 20, x_title, anchor="middle"))
    return _document(_HEIGHT, parts)


def share_chart(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Bars of one length, divided.

    Args:
        title: Above the chart.
        rows: For each bar, from the top, the shares by name, 1 together. A name has one colour in all bars.
    """
    names = sorted({name for shares in rows.values() for name in shares})
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    left = 12 + 8 * max(map(len, rows))
    scale = _WIDTH - left - _RIGHT
    parts = [_text(12, 20, title, weight="bold")]
    for index, (label, shares) in enumerate(rows.items()):
        down, across = _TOP + index * _BAR_HEIGHT, float(left)
        parts.append(_text(left - 8, down + _BAR_HEIGHT * 0.35 + 5, label, anchor="end"))
        for name in names:
            width = shares.get(name, 0.0) * scale
            parts.append(
                f'<rect x="{across:.1f}" y="{down}" width="{width:.1f}" '
                f'height="{_BAR_HEIGHT * 0.7:.1f}" fill="{colours[name]}" fill-opacity="0.8"/>'
            )
            if width > _ROOM_FOR_TEXT:
                middle = across + width / 2
                text = f"{shares[name]:.0%}"
                parts.append(_text(middle, down + _BAR_HEIGHT * 0.35 + 5, text, anchor="middle"))
            across += width
    down, across = _TOP + len(rows) * _BAR_HEIGHT + 20, float(left)
    for name in names:
        parts.append(_text(across, down, name, colour=colours[name]))
        across += 20 + 8 * len(name)
    return _document(down + 20, parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 and 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10, 20) if step * power >= value)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = "#222222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _document(height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        'font-family="sans-serif" font-size="13">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])
