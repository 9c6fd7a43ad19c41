"""The front as a drawing: two metrics, every measured point, intervals, the front as a stair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.report.html import Html, tag

WIDTH, HEIGHT = 860.0, 460.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 20.0, 18.0, 58.0


@dataclass(frozen=True)
class Mark:
    """One point to draw. `kind` picks the shape, `series` the colour; intervals in data units."""

    x: float
    y: float
    x_interval: tuple[float, float] | None
    y_interval: tuple[float, float] | None
    kind: str
    series: int
    front: bool
    feasible: bool
    baseline: bool
    title: str


@dataclass(frozen=True)
class Axis:
    """Title and direction of one axis; `minimise` is None where neither direction is better."""

    title: str
    minimise: bool | None


@dataclass(frozen=True)
class Scale:
    """Data to pixels, linear, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def scale(values: Sequence[float], start: float, end: float, count: int = 6) -> Scale:
    """Return a scale that covers the values with about `count` round steps."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.25 or 1.0
    low = max(0.0, low - margin) if low >= 0 else low - margin
    high += margin
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    ticks = tuple(low + i * step for i in range(round((high - low) / step) + 1))
    return Scale(low, high, start, end, ticks)


def tick_text(value: float, step: float) -> str:
    """Return a tick's label with the digits that its step needs."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}".replace(",", " ")


def scatter(marks: Sequence[Mark], x_axis: Axis, y_axis: Axis) -> Html:
    """Return the drawing as inline SVG."""
    xs = [v for m in marks for v in (m.x, *(m.x_interval or ()))]
    ys = [v for m in marks for v in (m.y, *(m.y_interval or ()))]
    x, y = scale(xs, LEFT, WIDTH - RIGHT), scale(ys, HEIGHT - BOTTOM, TOP)
    back = [mark for mark in marks if not mark.front]
    ahead = [mark for mark in marks if mark.front]
    return tag(
        "svg",
        _axes(x, y, x_axis, y_axis),
        _stair(ahead, x, y, x_axis),
        [_draw(mark, x, y) for mark in (*back, *ahead)],
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        role="img",
        aria_label=f"{y_axis.title} against {x_axis.title}",
    )


def _axes(x: Scale, y: Scale, x_axis: Axis, y_axis: Axis) -> list[Html]:
    parts = []
    for scale_, vertical in ((x, True), (y, False)):
        step = scale_.ticks[1] - scale_.ticks[0]
        for value in scale_.ticks:
            at = scale_(value)
            ends: dict[str, float | str | None] = {"x1": at, "x2": at, "y1": TOP, "y2": HEIGHT - BOTTOM}
            if not vertical:
                ends = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": at, "y2": at}
            parts.append(tag("line", class_="grid", **ends))
            place: dict[str, float | str | None] = {"x": at, "y": HEIGHT - BOTTOM + 18, "text_anchor": "middle"}
            if not vertical:
                place = {"x": LEFT - 8, "y": at + 4, "text_anchor": "end"}
            parts.append(tag("text", tick_text(value, step), class_="tick", **place))
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(tag("text", _title(x_axis), class_="axis", x=middle_x, y=HEIGHT - 14, text_anchor="middle"))
    turn = f"rotate(-90 18 {middle_y:.1f})"
    parts.append(
        tag(
            "text",
            _title(y_axis),
            class_="axis",
            x=18.0,
            y=middle_y,
            text_anchor="middle",
            transform=turn,
        )
    )
    return parts


def _title(axis: Axis) -> str:
    if axis.minimise is None:
        return axis.title
    return f"{axis.title} · " + ("← lower is better" if axis.minimise else "higher is better →")


def _stair(front: Sequence[Mark], x: Scale, y: Scale, x_axis: Axis) -> Html | None:
    """Return the border of what the front dominates."""
    if len(front) < 2:
        return None
    ordered = sorted(front, key=lambda m: m.x)
    corners = [(ordered[0].x, ordered[0].y)]
    for before, after in itertools.pairwise(ordered):
        # Walk along the first point's own level to where the second begins to dominate.
        corner = (after.x, before.y) if x_axis.minimise else (before.x, after.y)
        corners += [corner, (after.x, after.y)]
    path = " ".join(f"{'M' if i == 0 else 'L'}{x(a):.1f} {y(b):.1f}" for i, (a, b) in enumerate(corners))
    return tag("path", class_="stair", d=path)


def _draw(mark: Mark, x: Scale, y: Scale) -> Html:
    at_x, at_y = x(mark.x), y(mark.y)
    parts: list[Html] = [tag("title", mark.title)]
    if mark.x_interval:
        parts.append(tag("line", class_="bar", x1=x(mark.x_interval[0]), x2=x(mark.x_interval[1]), y1=at_y, y2=at_y))
    if mark.y_interval:
        parts.append(tag("line", class_="bar", x1=at_x, x2=at_x, y1=y(mark.y_interval[0]), y2=y(mark.y_interval[1])))
    if mark.baseline:
        parts.append(tag("circle", class_="ring", cx=at_x, cy=at_y, r=11.0))
    parts.append(shape(mark.kind, at_x, at_y, 6.0 if mark.front else 4.5))
    classes = f"mark s{mark.series % 6}"
    classes += " front" if mark.front else " back"
    classes += "" if mark.feasible else " infeasible"
    return tag("g", parts, class_=classes)


def shape(kind: str, x: float, y: float, size: float) -> Html:
    """Return the symbol of a draft kind."""
    if kind == "none":
        return tag("circle", class_="dot", cx=x, cy=y, r=size)
    if kind == "dflash":
        points = [(x, y - 1.3 * size), (x + 1.15 * size, y + 0.8 * size), (x - 1.15 * size, y + 0.8 * size)]
    elif kind == "ddtree":
        points = [(x, y - 1.3 * size), (x + 1.3 * size, y), (x, y + 1.3 * size), (x - 1.3 * size, y)]
    else:
        points = [(x - size, y - size), (x + size, y - size), (x + size, y + size), (x - size, y + size)]
    path = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in points) + " Z"
    return tag("path", class_="dot", d=path)
