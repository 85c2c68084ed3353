"""Bounds of the modulus of the tilted characteristic function, and of the contour integral beyond its last node.

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

_MERGED = (1, 2, 4, 8)  # numbers of neighbouring panels that are bounded together
_CELLS = np.exp(0.08 * np.arange(101))  # ends of cells of the integral beyond the last node, in units of that node's t
_HALVINGS, COARSE = 48, 13  # halvings of a bisection: to 4e-15, and to 1e-4 of the interval


class Group(NamedTuple):
    """Bounds for parts of a tilted law, each an interval of x: mass, largest density of Y, variation.

    variation: V with |int e^{ity}| <= V/t over the part; 0 if the density of Y is unimodal there, because mass and
    height then give a better bound.
    """

    mass: Any
    height: Any
    variation: Any


def extremes(step: Step, c: Any) -> tuple[Any, Any]:
    """(mode, antimode), in x, of the density of Y tilted by e^{cX}; inf if there is none.

    The log density is sign c Y - x^2/2 - s x + const; its derivative in x is sign c s Y - x - s.
    """
    s = step.scale

    def slope(x: Any) -> Any:
        return step.sign * c * s * xp.exp(step.log_ratio(x)) - x - s

    bottom = (0.5 * s * s - xp.log(c * s * s)) / s  # x at which the slope is least for sign = 1
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
    """First and last edge of every group, and a table (ways of merging, groups): 1 if the group is part of the way."""
    starts = [np.arange(0, panels, merged) for merged in _MERGED]
    first = np.concatenate(starts)
    last = np.concatenate([start + merged for start, merged in zip(starts, _MERGED, strict=True)])
    way = np.repeat(np.arange(len(_MERGED)), [start.size for start in starts])
    return first, last, (way == np.arange(len(_MERGED))[:, None]).astype(np.float64)


def groups(step: Step, c: Any, log_moment: Any, edges: Any, mass: Any, found: tuple[Any, Any]) -> Group:
    """Bounds for each panel, and for pairs, fours and eights of panels.

    mass: tilted masses of the panels, or upper bounds. The number of panels is a multiple of eight. found: `extremes`
    at this tilt.
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
    """Bound of |int e^{ity}| of a tilted law: the sum of the bounds of its parts, for the best way of merging.

    Axes of the result: the axes of t, then the axes of ``group`` without the last.
    """
    _, _, ways = _merging(group.mass.shape[-1] * 8 // 15)  # panels: a panel stands for 1 + 1/2 + 1/4 + 1/8 groups
    t = xp.asarray(t)[(..., *[None] * group.mass.ndim)]
    height = xp.where(group.height > 0, group.height, 1.0)
    v = t * group.mass / (2 * height)
    square = xp.minimum(v, 0.5 * math.pi) ** 2
    # sin v/v up to v = pi/2, then 1/v. The series of sin v/v up to v^8 is an upper bound.
    sinc = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    unimodal = group.mass * xp.where(v <= 0.5 * math.pi, sinc, 1 / xp.maximum(v, 1.0))
    varied = xp.minimum(group.mass, group.variation / t)
    each = xp.where(group.variation > 0, varied, unimodal)
    return xp.min(xp.exact_matmul(each, ways.T), axis=-1) * (1 + 1e-12)


def log_integrand(groups: Group, powers: Any, c: Any, t: Any) -> Any:
    """log of a bound of prod_i |phi_i|^powers[i] / |z|^2, z = c + it; it decreases in t. i: leading axis of groups."""
    size = modulus(groups, t)
    return xp.sum(powers * xp.log(xp.clip(size, 1e-300, 1.0)), axis=-1) - xp.log(c * c + t * t)


def fallen_at(groups: Group, powers: Any, c: Any, nats: float) -> Any:
    """The t at which `log_integrand` is ``nats`` below its value at t = 0, accurate to a percent."""

    def fallen(log_t: Any) -> Any:
        return ~(log_integrand(groups, powers, c, xp.exp(log_t)) + 2 * xp.log(c) + nats > 0)

    return xp.exp(0.5 * sum(bisect(fallen, xp.log(c) - 12.0, xp.log(c) + 25.0, COARSE)))


def integral(groups: Group, powers: Any, c: Any, first: Any) -> Any:
    """Upper bound of the integral of e^`log_integrand` from t = first to infinity."""
    t = first * _CELLS
    # The value at the left end is the largest of a cell. Beyond the last cell prod |phi|^powers is kept constant.
    value = xp.exp(log_integrand(groups, powers, c, t))
    beyond = value[-1] * (c * c + t[-1] ** 2) / t[-1]
    return (xp.sum(value[:-1] * (t[1:] - t[:-1])) + beyond) * (1 + 1e-9)
