"""Curves as SVG, for pages without a script: lines or dots over policy versions, marks at some of them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from node.page.section import Curve, Points, Series
from node.text.visible_text import as_html

_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 36
"""Margins, for the axes' numbers."""

MOST_POINTS: Final = 500
"""Points of a line; of longer ones, as many means of neighbours are drawn."""

COLOURS: Final = ("#3388cc", "#cc6633", "#44aa66", "#aa66cc", "#bb9900", "#888888")

_TICKS: Final = 5

STYLE: Final = """\
svg.chart { display: block; width: 100%; overflow: visible; }
svg.chart text { font: 16px system-ui, sans-serif; fill: currentColor; }
svg.chart polyline { fill: none; stroke-width: 1.5; }
svg.chart .axis { stroke: #8886; }
svg.chart .mark { stroke: #cc3333; stroke-dasharray: 3 3; }
"""
"""Style sheet that charts need in their page."""


def chart(curve: Curve) -> str:
    """Return a picture of the finite points of all series; empty if there are none.

    A mark is a vertical line that tells what happened there.
    """
    finite = [(one, _thinned(_finite(one.points))) for one in curve.series]
    drawn = [Series(one.name, points, one.is_dotted) for one, points in finite if points]
    points = [point for one in drawn for point in one.points]
    if not points:
        return ""
    x_ticks = _ticks([*(x for x, _ in points), *(x for x, _ in curve.marks)])
    y_ticks = _ticks([y for _, y in points])
    frame = _Frame((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    parts = [
        *(_vertical(frame, x) for x in x_ticks),
        *(_horizontal(frame, y) for y in y_ticks),
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">policy version</text>',
        *(_mark(frame, x, what) for x, what in curve.marks),
    ]
    for number, one in enumerate(drawn):
        parts += _drawn(frame, one, COLOURS[number % len(COLOURS)])
        if one.name:
            parts.append(_legend(number, one.name))
    return f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>\n'


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the values of both axes lie in the picture."""

    of_x: tuple[float, float]
    of_y: tuple[float, float]

    def x(self, value: float) -> float:
        first, last = self.of_x
        return round(_LEFT + (value - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        first, last = self.of_y
        return round(_HEIGHT - _BOTTOM - (value - first) / (last - first) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _finite(points: Points) -> Points:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thinned(points: Points) -> Points:
    size = math.ceil(len(points) / MOST_POINTS)
    parts = (points[start : start + size] for start in range(0, len(points), max(1, size)))
    return [(part[-1][0], math.fsum(y for _, y in part) / len(part)) for part in parts]


def _ticks(values: Iterable[float]) -> list[float]:
    """Return round numbers around all values, the first and the last at or beyond them."""
    values = list(values)
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    exponent = math.floor(math.log10(span / _TICKS))
    step = next(n * 10.0**exponent for n in (1, 2, 5, 10) if n * 10.0**exponent >= span / _TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _vertical(frame: _Frame, value: float) -> str:
    x = frame.x(value)
    return (
        f'<line class="axis" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{value:g}</text>'
    )


def _horizontal(frame: _Frame, value: float) -> str:
    y = frame.y(value)
    return (
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>'
    )


def _mark(frame: _Frame, value: float, what: str) -> str:
    x, bottom = frame.x(value), _HEIGHT - _BOTTOM
    line = f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}">'
    return f"{line}<title>{as_html(what)}</title></line>"


def _drawn(frame: _Frame, series: Series, colour: str) -> Iterator[str]:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if series.is_dotted:
        yield from (f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in places)
    else:
        line = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline points="{line}" stroke="{colour}"/>'


def _legend(number: int, name: str) -> str:
    y = _TOP + 14 + 18 * number
    colour = COLOURS[number % len(COLOURS)]
    return (
        f'<rect x="{_LEFT + 8}" y="{y - 8}" width="10" height="3" fill="{colour}"/>'
        f'<text x="{_LEFT + 24}" y="{y - 3}">{as_html(name)}</text>'
    )
