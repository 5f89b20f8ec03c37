"""Plots as SVG for Markdown pages: lines, bars and steps with axes. They follow the reader's light or dark
scheme. Pages of people are the console's (console/src/chart.tsx).

A plot is a string that stands alone as a file. No scripts, nothing fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 42, 40
COLOURS = 6
STYLE = """\
.plot{--ink:#1f2933;--faint:#d5dbe1;--soft:#616e7c;--c0:#2166ac;--c1:#d6604d;--c2:#1b7837;\
--c3:#9970ab;--c4:#bf812d;--c5:#35978f;font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.plot{--ink:#e4e7eb;--faint:#39424d;--soft:#9aa5b1;\
--c0:#74a9e0;--c1:#f4937f;\
--c2:#6cc38a;--c3:#c7a2db;--c4:#e0b25f;--c5:#6fcfc3}}
.plot text{fill:var(--soft)}.plot .title{fill:var(--ink);font-weight:600}.plot .grid{stroke:var(--faint)}
.plot .mark{stroke:var(--soft);stroke-dasharray:5 4}"""


@dataclass(slots=True, frozen=True)
class Series:
    """One line: points by rising x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Axes:
    """The axes of a plot."""

    title: str
    x: str
    y: str
    y_max: float = 0.0
    """0: as high as the data."""
    mark: tuple[float, str] | None = None
    """A level that is drawn across, and its name."""
    log_x: bool = False


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """Lines over a common x axis."""
    points = [point for each in series for point in each.points] or [(0.0, 0.0)]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    if axes.log_x:
        low = max(low, 1e-3)
        high = max(high, low * 1.01)
    top = axes.y_max or max([y for _, y in points] + ([axes.mark[0]] if axes.mark else []))
    scale = _Scale(low, high, top, log_x=axes.log_x)
    body = [_frame(axes, scale)]
    for each in series:
        drawn = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in each.points)
        body.append(
            f'<polyline points="{drawn}" fill="none" stroke="var(--c{each.colour % COLOURS})" '
            f'stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )
    return _svg(axes, [*body, _legend([(each.name, each.colour) for each in series])])


def bars(axes: Axes, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str]) -> str:
    """A group of bars per label, one bar per name."""
    top = axes.y_max or max([value for _, values in groups for value in values] + [1e-9])
    scale = _Scale(0, max(1, len(groups)), top)
    body = [_frame(axes, scale, ticks=False)]
    width = (scale.x(1) - scale.x(0)) * 0.8 / max(1, len(names))
    for place, (label, values) in enumerate(groups):
        left = scale.x(place) + (scale.x(1) - scale.x(0)) * 0.1
        for index, value in enumerate(values):
            y = scale.y(value)
            body.append(
                f'<rect x="{left + index * width:.1f}" y="{y:.1f}" width="{max(1.0, width - 1.5):.1f}" '
                f'height="{max(0.0, HEIGHT - BOTTOM - y):.1f}" fill="var(--c{index % COLOURS})"/>'
            )
        middle = scale.x(place + 0.5)
        body.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(label)}</text>'
        )
    return _svg(
        axes, [*body, _legend(list(zip(names, range(len(names)), strict=True)) if len(names) > 1 else [])]
    )


class _Scale:
    def __init__(self, low: float, high: float, top: float, *, log_x: bool = False) -> None:
        self.low, self.high, self.log_x = low, high if high > low else low + 1, log_x
        self.step = nice_step(top or 1.0, 4)
        self.top = self.step * -(-(top or 1.0) // self.step)

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log_x:
            share = log10(max(value, self.low) / self.low) / log10(self.high / self.low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(value, self.top) / self.top * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        if self.log_x:
            first, last = floor(log10(self.low)), floor(log10(self.high))
            ticks = [10.0**power for power in range(first, last + 1)]
            return [tick for tick in ticks if tick >= self.low * 0.999]
        step = nice_step(self.high - self.low, 6)
        first = -(-self.low // step)
        return [step * (first + i) for i in range(int((self.high - step * first) / step + 1e-9) + 1)]


def nice_step(span: float, about: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts the span into about so many."""
    raw = span / about
    power = 10.0 ** floor(log10(raw))
    return power * next(step for step in (1, 2, 5, 10) if raw <= step * power * (1 + 1e-9))


def short(value: float) -> str:
    """A number for an axis: 1500 is 1.5k."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _frame(axes: Axes, scale: _Scale, *, ticks: bool = True) -> str:
    parts: list[str] = []
    for i in range(round(scale.top / scale.step) + 1):
        value = i * scale.step
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in scale.x_ticks() if ticks else ():
        x = scale.x(value)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{short(value)}</text>'
        )
    if axes.mark is not None:
        y = scale.y(axes.mark[0])
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 2}" y="{y - 4:.1f}" text-anchor="end">{escape(axes.mark[1])}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 '
        f'{middle})">{escape(axes.y)}</text>'
    )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(axes.x)}</text>'
    )
    return "".join(parts)


def _legend(names: Sequence[tuple[str, int]]) -> str:
    parts, x = list[str](), float(LEFT)
    for name, colour in names:
        parts.append(
            f'<rect x="{x:.0f}" y="25" width="10" height="10" rx="2" fill="var(--c{colour % COLOURS})"/>'
        )
        parts.append(f'<text x="{x + 14:.0f}" y="34">{escape(name)}</text>')
        x += 28 + 6.6 * len(name)
    return "".join(parts)


def _svg(axes: Axes, body: Sequence[str]) -> str:
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(axes.title)}"><style>{STYLE}</style>'
        f'<text class="title" x="{LEFT}" y="17">{escape(axes.title)}</text>{"".join(body)}</svg>'
    )
