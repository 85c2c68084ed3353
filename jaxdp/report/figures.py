"""Curves as inline SVG, legible at phone width, so that `jaxdp.report` needs no plotting package."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 350.0, 12.0, 226.0
_LOOK = {
    "own": 'stroke="#1f5fa8" stroke-width="2.6"',
    "lower": 'stroke="#1f5fa8" stroke-width="1.2" stroke-dasharray="2 2"',
    "reference": 'stroke="#c8590a" stroke-width="1.8" stroke-dasharray="7 3"',
    "perfect": 'stroke="#5b6575" stroke-width="1.6" stroke-dasharray="1.5 3"',
}


class Curve(NamedTuple):
    """One line of a figure. look: a key of `_LOOK`: "own", "lower", "reference" or "perfect"."""

    label: str
    look: str
    x: np.ndarray
    y: np.ndarray


def figure(
    title: str,
    x_axis: tuple[str, float, float],
    y_axis: tuple[str, float, float],
    curves: Sequence[Curve],
    caption: str,
    marks: Sequence[tuple[float, float]] = (),
    logarithmic: bool = False,
) -> str:
    """HTML of the curves, dots at ``marks``, key and caption. Axes: (label, low, high). logarithmic: whether y is."""
    (x_label, left, right), (y_label, low, high) = x_axis, y_axis

    def across(x: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (x - left) / (right - left)

    def up(y: float) -> float:
        # smaller values are drawn just below the axis, where the clip path hides them
        share = math.log(max(y, low / 10) / low) / math.log(high / low) if logarithmic else (y - low) / (high - low)
        return _BOTTOM - (_BOTTOM - _TOP) * share

    def path(curve: Curve) -> str:
        points = [f"{across(x):.1f} {up(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True)]
        return "M" + "L".join(points)

    plot, middle, centre = title.replace(" ", "-"), (_TOP + _BOTTOM) / 2, (_LEFT + _RIGHT) / 2
    frame = "".join(
        f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}" stroke="#e3e8f0"/>'
        f'<text x="{_LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{text}</text>'
        for y, text in (_decades(low, high) if logarithmic else _steps(low, high))
    )
    frame += "".join(
        f'<line x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{_TOP}" y2="{_BOTTOM}" stroke="#e3e8f0"/>'
        f'<text x="{across(x):.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{text}</text>'
        for x, text in _steps(left, right)
    )
    lines = "".join(
        f'<path d="{path(curve)}" fill="none" {_LOOK[curve.look]} clip-path="url(#{plot})"/>'
        for curve in reversed(curves)
    )
    dots = "".join(
        f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="4" fill="#1f5fa8" stroke="#fff"/>' for x, y in marks
    )
    entries = "".join(
        f'<li><svg viewBox="0 0 34 10" aria-hidden="true"><path d="M1 5H33" {_LOOK[c.look]}/></svg>'
        f"{html.escape(c.label)}</li>"
        for c in curves
    )
    return (
        f'<figure><svg viewBox="0 0 360 264" role="img" aria-label="{html.escape(title)}" '
        'font-family="inherit" font-size="11.5" fill="#1c2330">'
        f'<clipPath id="{plot}"><rect x="{_LEFT}" y="{_TOP - 3}" width="{_RIGHT - _LEFT}" '
        f'height="{_BOTTOM - _TOP + 3}"/></clipPath>{frame}'
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#46536a"/>'
        f'<text x="{centre}" y="{_BOTTOM + 33}" text-anchor="middle">{html.escape(x_label)}</text>'
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{html.escape(y_label)}</text>{lines}{dots}</svg>"
        f'<ul class="key">{entries}</ul><figcaption>{html.escape(caption)}</figcaption></figure>'
    )


def _steps(low: float, high: float) -> list[tuple[float, str]]:
    """(value, text) of at most six round ticks from ``low`` to ``high``."""
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size * 5 >= (high - low) * (1 - 1e-9))
    return [(k * step, f"{k * step:g}") for k in range(math.ceil(low / step), math.floor(high / step * (1 + 1e-9)) + 1)]


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    """(value, text) of ticks at most seven powers of ten from ``low`` to ``high``."""
    first, last = round(math.log10(low)), round(math.log10(high))
    powers = range(last, first - 1, -math.ceil((last - first) / 6))
    return [
        (10.0**p, "1" if p == 0 else f'10<tspan dy="-4" font-size="8.5">{str(p).replace("-", "−")}</tspan>')
        for p in powers
    ]
