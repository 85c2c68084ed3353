"""Bounds of the modulus of the tilted characteristic function, and of the contour beyond its last node.

Proofs: notebooks/proofs/allocation.md, section 6.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp.allocation.law import Step
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.special import LOG_SQRT_2PI
from jaxdp.runtime.arrays import xp

_MERGED = (1, 2, 4, 8)  # neighbouring panels that are bounded as one
_CELLS = np.exp(0.08 * np.arange(101))  # of the integral beyond the last node, in units of that node
_HALVINGS, COARSE = 48, 13  # of a bisection: to 1e-14, to a ten thousandth of the interval


class Group(NamedTuple):
    """Parts of a tilted law, by intervals of x: mass, largest density of Y, and twice what its variation may be.

    variation: 0 where the density of Y is unimodal, which gives the better bound.
    """

    mass: Any
    height: Any
    variation: Any


def extremes(step: Step, c: Any) -> tuple[Any, Any]:
    """Mode and antimode, in x, of the density of Y tilted by e^{cX}; inf where there is none.

    Its logarithm is sign c Y - x^2/2 - s x + const, whose derivative in x is sign c s Y - x - s.
    """
    s = step.scale

    def slope(x: Any) -> Any:
        return step.sign * c * s * xp.exp(step.log_ratio(x)) - x - s

    bottom = (0.5 * s * s - xp.log(c * s * s)) / s  # where the slope is least, for sign = 1
    adds = step.sign < 0
    low = xp.where(adds, -s - c * s * xp.exp(step.log_ratio(-s)) - 1e-3, -s - 1e-3)
    mode = 0.5 * sum(bisect(lambda x: ~(slope(x) > 0), low, xp.where(adds, -s, xp.maximum(bottom, low)), _HALVINGS))
    far = bottom + 4 / s
    far = xp.maximum(far, (0.5 * s * s + xp.log((xp.abs(far) + 40 + s) / (c * s))) / s + 1 / s)
    antimode = 0.5 * sum(bisect(lambda x: ~(slope(x) < 0), bottom, far, _HALVINGS))
    two = (step.sign > 0) & (slope(bottom) < 0)
    return xp.where(adds | two, mode, xp.inf), xp.where(two, antimode, xp.inf)


@functools.cache
def _merging(panels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First edge and last edge of every group, and to which way of merging it belongs (ways, groups)."""
    starts = [np.arange(0, panels, merged) for merged in _MERGED]
    first = np.concatenate(starts)
    last = np.concatenate([start + merged for start, merged in zip(starts, _MERGED, strict=True)])
    way = np.repeat(np.arange(len(_MERGED)), [start.size for start in starts])
    return first, last, (way == np.arange(len(_MERGED))[:, None]).astype(np.float64)


def groups(step: Step, c: Any, log_moment: Any, edges: Any, mass: Any, found: tuple[Any, Any]) -> Group:
    """Bounds for each panel, and for pairs, fours and eights of panels.

    mass: tilted masses of the panels, whose number is a multiple of eight; they may be a little too large. found: the
    `extremes` at this tilt.
    """
    mode, antimode = found
    first, last, _ = _merging(mass.shape[-1])
    mode_x = xp.where(xp.isfinite(mode), mode, 0.0)

    x = xp.append(edges, mode_x)
    u = step.log_ratio(x)
    density = xp.exp(c * step.value(x) - 0.5 * x * x - u - LOG_SQRT_2PI - xp.log(step.scale) - log_moment)
    ends = density[:-1][xp.stack([first, last])]
    space = 1e-9 * (1 + xp.abs(edges))
    left, right = (edges - space)[first], (edges + space)[last]
    peak = xp.where((mode > left) & (mode < right), density[-1], 0.0)
    height = xp.maximum(xp.max(ends, axis=0), peak) * (1 + 1e-9)
    variation = xp.where((antimode > left) & (antimode < right), 2 * (xp.sum(ends, axis=0) + peak) * (1 + 1e-9), 0.0)
    held = (np.arange(mass.shape[-1]) >= first[:, None]) & (np.arange(mass.shape[-1]) < last[:, None])
    return Group(xp.sum(xp.where(held, mass, 0.0), axis=-1), height, variation)


def modulus(group: Group, t: Any) -> Any:
    """Bound of |sum over the parts of int e^{ity}|: the best way of merging.

    Axes of the result: those of t, then those of group but the last.
    """
    _, _, ways = _merging(_panels(group))
    t = xp.asarray(t)[(..., *[None] * group.mass.ndim)]
    height = xp.where(group.height > 0, group.height, 1.0)
    v = t * group.mass / (2 * height)
    square = xp.minimum(v, 0.5 * math.pi) ** 2
    # sin v/v up to pi/2, then 1/v; its series to v^8 is above it
    sinc = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    unimodal = group.mass * xp.where(v <= 0.5 * math.pi, sinc, 1 / xp.maximum(v, 1.0))
    varied = xp.minimum(group.mass, group.variation / t)
    each = xp.where(group.variation > 0, varied, unimodal)
    return xp.min(xp.exact_matmul(each, ways.T), axis=-1) * (1 + 1e-12)


def _panels(group: Group) -> int:
    return round(group.mass.shape[-1] / sum(1 / merged for merged in _MERGED))


def log_integrand(groups: Group, powers: Any, c: Any, t: Any) -> Any:
    """log of the bound of prod |phi_i|^powers[i] / |z|^2, z = c + it, over the leading axis of groups; falls with t."""
    size = modulus(groups, t)
    return xp.sum(powers * xp.log(xp.clip(size, 1e-300, 1.0)), axis=-1) - xp.log(c * c + t * t)


def fallen_at(groups: Group, powers: Any, c: Any, nats: float) -> Any:
    """The t at which the bound has fallen by so many nats from its value at 0, to a percent."""

    def fallen(log_t: Any) -> Any:
        return ~(log_integrand(groups, powers, c, xp.exp(log_t)) + 2 * xp.log(c) + nats > 0)

    return xp.exp(0.5 * sum(bisect(fallen, xp.log(c) - 12.0, xp.log(c) + 25.0, COARSE)))


def integral(groups: Group, powers: Any, c: Any, first: Any) -> Any:
    """Bound of the integral of the integrand's bound from t = first to infinity."""
    t = first * _CELLS
    # a left end's value is the largest of its cell; the last one's phi part is kept to infinity
    value = xp.exp(log_integrand(groups, powers, c, t))
    beyond = value[-1] * (c * c + t[-1] ** 2) / t[-1]
    return (xp.sum(value[:-1] * (t[1:] - t[:-1])) + beyond) * (1 + 1e-9)
