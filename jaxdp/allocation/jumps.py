"""Bounds of delta from sums over one large step: close where a single step decides, valid everywhere.

No contour: normal tails, Jensen's inequality from below, a parabola and Chernoff bounds from above. Proofs:
notebooks/proofs/allocation.md, section 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp.allocation import law
from jaxdp.allocation.law import Step
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import LOG_SQRT_2PI, log_normal_tail
from jaxdp.runtime.arrays import xp

_PANELS = 32
_TILTS = np.exp(np.linspace(-3.5, 5.5, 28))
_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7])
_CHARGE = 1e-12  # of every sum of moduli: hundreds of units of rounding times squares of x


def normal_tails(x: Any) -> Any:
    """P(N(0, 1) > x)."""
    return xp.exp(log_normal_tail(x))


class Splits(NamedTuple):
    """Where x may be split, and what does not depend on the epsilon that is asked for.

    log_moments (tilts, splits): upper bounds of log E[e^{sign c Y}; x <= split].
    """

    edges: Any
    tilts: Any
    log_moments: Any


def prepare(step: Step) -> Splits:
    """Splits between the left end and the cut of the step."""
    edges = xp.linspace(step.left(), xp.minimum(step.cut(), 38.0 + step.scale), _PANELS + 1)
    return Splits(edges, *_log_moments(step, edges))


def bracket(step: Step, made: Splits, epsilon: Any) -> Bounds:
    """Bounds of delta at an array of epsilons >= 0 close to the step's own, more than one step.

    The step's own epsilon has the largest cut.
    """
    steps, s = step.steps, step.scale
    removes = step.sign > 0
    edges, c, log_moment = made
    cut, split = step.cut(), edges[1:]
    # one step: tails, and of what is left of the split mass, mean and variance of Y
    none, first, second = normal_tails(xp.stack([split, s - split, 2 * s - split]))
    usable = split > 0
    below = xp.where(usable, 1 - none, 1.0)
    mean = first / below
    square = xp.exp(xp.minimum(s * s, 600.0))
    variance = xp.maximum(square * second / below - mean**2, 0.0) + _CHARGE * (1 + square)
    # one row for each epsilon, one column for each split
    odds = xp.exp(step.sign * epsilon)[:, None]
    total = steps * odds
    log_c, slack = xp.log(c), 1e-15 * steps + 1e-12
    chernoff = least_over_tilts(steps * log_moment - log_c, c, step.sign * total) - 1 + slack - xp.log(steps)
    rest = xp.exp(log_several_steps(step, split))
    # exactly one step beyond the split; the others sum to about the mean
    others = (steps - 1) * mean
    log_below = xp.log1p(-xp.minimum(none, 1 - 1e-12))
    all_below = xp.exp((steps - 1) * log_below)

    def decided(v: Any) -> tuple[Any, Any]:
        """E[(Y + v - total)_+; x > split] and the sum of the moduli that it is the difference of."""
        gap = xp.maximum(total - v, 1e-300)
        x = xp.maximum((xp.log(gap) + 0.5 * s * s) / s, split)
        here, there = normal_tails(xp.stack([x - s, x]))
        there = (v - total) * there
        return here + there, (here + xp.abs(there)) * (1 + x * x) * _CHARGE

    value, error = decided(others)
    mass_error = 4 * ULP * (steps + 4) * (1 + split**2)
    sure = xp.maximum(1 - mass_error, 0.0)
    least = all_below * xp.maximum(value - error, 0.0) * sure
    lower = xp.max(xp.where(usable, least, 0.0), axis=1)
    places = others + _SHARES[:, None, None] * xp.maximum(total - others, 0.0)
    ahead = xp.maximum(total - places, 1e-300)
    u = (xp.log(ahead) + 0.5 * s * s) / s
    bend = _largest_density(u, s, ahead)
    far = xp.exp(least_over_tilts((steps - 1) * log_moment - log_c, c, places) - 1 + slack) + 1e-12 * none
    curved = xp.min(0.5 * bend * (steps - 1) * variance * all_below + none * far, axis=0)
    one_step = all_below * (value + error) * (1 + mass_error) + curved * (1 + 1e-9)
    most = xp.exp(chernoff) + rest + one_step
    upper = xp.min(xp.where(usable & (total > others) & (most >= 0), most, xp.inf), axis=1)
    # "add": all below a split that keeps the mean below the threshold
    fewer = xp.exp(steps * log_below)
    least = xp.maximum(1 - mean / odds * (1 + 1e-12), 0.0) * fewer * sure
    low_add = xp.max(xp.where(usable, least, 0.0), axis=1)
    high_add = xp.exp(chernoff[:, -1]) / odds[:, 0] + xp.where(edges[-1] < cut, steps * none[-1], 0.0)
    lower, upper = xp.where(removes, lower, low_add), xp.where(removes, upper, high_add)
    upper = xp.where(upper <= 1, upper, 1.0)
    return Bounds(xp.where(xp.isnan(lower), 0.0, lower), upper)


def log_several_steps(step: Step, split: Any) -> Any:
    """log of a bound of what more than one step beyond the split contributes to delta of "remove"."""
    none, one = log_normal_tail(xp.stack([split, split - step.scale]))
    return xp.log(step.steps - 1) + none + xp.logaddexp(one, none + xp.log(0.5 * _excess(step))) + 1e-9


def _largest_density(u: Any, s: Any, y: Any) -> Any:
    """The largest density of Y from y = e^(s u - s^2/2) on; inf left of its mode."""
    return xp.where(u > -s, xp.exp(-0.5 * u * u - LOG_SQRT_2PI) / (s * y), xp.inf)


def _log_moments(step: Step, edges: Any) -> tuple[Any, Any]:
    """Tilts c (tilts, 1), and upper bounds of log E[e^{sign c Y}; x <= split] for every split edges[1:]."""
    panels = law.on_panels(step, edges)
    shift = step.sign * (1 + step.threshold())
    c = _TILTS / (step.steps * xp.abs(shift))
    exponent = panels.log_mass + c[:, None, None] * panels.value
    errors = law.log_panel_errors(step, edges, c, xp.zeros(()))
    most = xp.max(exponent, axis=(1, 2))[:, None]
    each = xp.sum(xp.exp(exponent - most[..., None]), axis=2) + xp.exp(errors - most)
    start = c * xp.where(step.sign > 0, step.value(edges[0]), -shift) + log_normal_tail(-edges[0])
    found = most + xp.log(xp.cumsum(each, axis=1) + xp.exp(start[:, None] - most)) + 5e-13
    return c[:, None], found + (c * shift)[:, None]


def least_over_tilts(log_bound: Any, c: Any, place: Any) -> Any:
    """The least over the tilts of log_bound - c place."""
    return xp.min(log_bound - c * place[..., None, :], axis=-2)


def _excess(step: Step) -> Any:
    """Bound of E[(sum Y - T)_+]."""
    return xp.minimum(step.steps, 0.5 * xp.sqrt(step.steps * xp.expm1(xp.minimum(step.scale**2, 600.0))))
