"""Bounds of delta that need no contour: valid everywhere, close where a single large step decides.

A step is large if its x lies beyond a split. Lower bounds use normal tails and Jensen's inequality, upper bounds a
parabola and Chernoff bounds. Proofs: notebooks/proofs/allocation.md, section 8.
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

_PANELS = 32  # and as many splits
_TILTS = np.exp(np.linspace(-3.5, 5.5, 28))  # in units of 1/(T e^(sign epsilon))
# Where the parabola ends: shares of the way from the mean of the other steps' sum to T e^epsilon.
_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7])
_CHARGE = 1e-12  # rounding error per unit of a sum of moduli: normal tails err by some ULP times x^2


def normal_tails(x: Any) -> Any:
    """P(N(0, 1) > x)."""
    return xp.exp(log_normal_tail(x))


class Splits(NamedTuple):
    """Data of one step that `bracket` uses for every epsilon.

    edges: the splits are edges[1:]. tilts: c, (tilts, 1). log_moments: upper bounds of log E[e^{sign c Y}; x <= split],
    (tilts, splits).
    """

    edges: Any
    tilts: Any
    log_moments: Any


def prepare(step: Step) -> Splits:
    """Splits between the left end of the panels and the cut of the step."""
    edges = xp.linspace(step.left(), xp.minimum(step.cut(), 38.0 + step.scale), _PANELS + 1)
    return Splits(edges, *_log_moments(step, edges))


def bracket(step: Step, made: Splits, epsilon: Any) -> Bounds:
    """Bounds of delta at an array of epsilons >= 0 close to the step's own epsilon; T > 1.

    No epsilon of the array may need a larger cut than the step's own epsilon. Axes inside: epsilons, splits.
    """
    steps, s = step.steps, step.scale
    removes = step.sign > 0
    edges, c, log_moment = made
    cut, split = step.cut(), edges[1:]
    # One step: P(x > split); then mean and variance of Y given x <= split. `second_moment` lacks the factor e^(s^2).
    beyond, first_moment, second_moment = normal_tails(xp.stack([split, s - split, 2 * s - split]))
    usable = split > 0
    below = xp.where(usable, 1 - beyond, 1.0)
    mean = first_moment / below
    square = xp.exp(xp.minimum(s * s, 600.0))
    variance = xp.maximum(square * second_moment / below - mean**2, 0.0) + _CHARGE * (1 + square)
    odds = xp.exp(step.sign * epsilon)[:, None]
    total = steps * odds
    log_c, slack = xp.log(c), 1e-15 * steps + 1e-12
    chernoff = least_over_tilts(steps * log_moment - log_c, c, step.sign * total) - 1 + slack - xp.log(steps)
    several = xp.exp(log_several_steps(step, split))
    # Exactly one step beyond the split: the sum of the others is close to its mean `others`.
    others = (steps - 1) * mean
    log_below = xp.log1p(-xp.minimum(beyond, 1 - 1e-12))
    all_below = xp.exp((steps - 1) * log_below)

    def decided(v: Any) -> tuple[Any, Any]:
        """(E[(Y + v - total)_+; x > split], bound of its rounding error)."""
        gap = xp.maximum(total - v, 1e-300)
        x = xp.maximum((xp.log(gap) + 0.5 * s * s) / s, split)
        own, beyond_x = normal_tails(xp.stack([x - s, x]))
        beyond_x = (v - total) * beyond_x
        return own + beyond_x, (own + xp.abs(beyond_x)) * (1 + x * x) * _CHARGE

    value, error = decided(others)
    mass_error = 4 * ULP * (steps + 4) * (1 + split**2)
    rounded_down = xp.maximum(1 - mass_error, 0.0)
    least = all_below * xp.maximum(value - error, 0.0) * rounded_down
    lower = xp.max(xp.where(usable, least, 0.0), axis=1)
    # Upper bound of E[(Y + v - total)_+; x > split] in v: a parabola up to `places`, slope P(x > split) beyond.
    places = others + _SHARES[:, None, None] * xp.maximum(total - others, 0.0)
    ahead = xp.maximum(total - places, 1e-300)
    u = (xp.log(ahead) + 0.5 * s * s) / s
    curvature = _largest_density(u, s, ahead)
    far = xp.exp(least_over_tilts((steps - 1) * log_moment - log_c, c, places) - 1 + slack) + 1e-12 * beyond
    curved = xp.min(0.5 * curvature * (steps - 1) * variance * all_below + beyond * far, axis=0)
    one_step = all_below * (value + error) * (1 + mass_error) + curved * (1 + 1e-9)
    bound = xp.exp(chernoff) + several + one_step
    upper = xp.min(xp.where(usable & (total > others) & (bound >= 0), bound, xp.inf), axis=1)
    # "add", lower bound: all steps below the split, where the mean of Y is below the threshold e^-epsilon.
    every_below = xp.exp(steps * log_below)
    least = xp.maximum(1 - mean / odds * (1 + 1e-12), 0.0) * every_below * rounded_down
    low_add = xp.max(xp.where(usable, least, 0.0), axis=1)
    high_add = xp.exp(chernoff[:, -1]) / odds[:, 0] + xp.where(edges[-1] < cut, steps * beyond[-1], 0.0)
    lower, upper = xp.where(removes, lower, low_add), xp.where(removes, upper, high_add)
    upper = xp.where(upper <= 1, upper, 1.0)
    return Bounds(xp.where(xp.isnan(lower), 0.0, lower), upper)


def log_several_steps(step: Step, split: Any) -> Any:
    """log of an upper bound of the contribution of two or more steps beyond the split to delta of "remove"."""
    log_q, log_p = log_normal_tail(xp.stack([split, split - step.scale]))
    return xp.log(step.steps - 1) + log_q + xp.logaddexp(log_p, log_q + xp.log(0.5 * excess(step))) + 1e-9


def _largest_density(u: Any, s: Any, y: Any) -> Any:
    """The largest density of Y beyond y = e^(s u - s^2/2); inf if y is left of the mode of Y."""
    return xp.where(u > -s, xp.exp(-0.5 * u * u - LOG_SQRT_2PI) / (s * y), xp.inf)


def _log_moments(step: Step, edges: Any) -> tuple[Any, Any]:
    """Tilts c (tilts, 1); upper bounds of log E[e^{sign c Y}; x <= split] for the splits edges[1:] (tilts, splits)."""
    panels = law.on_panels(step, edges)
    shift = step.sign * (1 + step.threshold())
    c = _TILTS / (step.steps * xp.abs(shift))
    exponent = panels.log_mass + c[:, None, None] * panels.value
    errors = law.log_panel_errors(step, edges, c, xp.zeros(()))
    most = xp.max(exponent, axis=(1, 2))[:, None]
    panel_sums = xp.sum(xp.exp(exponent - most[..., None]), axis=2) + xp.exp(errors - most)
    left_end = c * xp.where(step.sign > 0, step.value(edges[0]), -shift) + log_normal_tail(-edges[0])
    log_sums = most + xp.log(xp.cumsum(panel_sums, axis=1) + xp.exp(left_end[:, None] - most)) + 5e-13
    return c[:, None], log_sums + (c * shift)[:, None]


def least_over_tilts(log_bound: Any, c: Any, place: Any) -> Any:
    """Minimum over the tilts of log_bound - c place."""
    return xp.min(log_bound - c * place[..., None, :], axis=-2)


def excess(step: Step) -> Any:
    """Upper bound of E[(Y_1 + ... + Y_T - T)_+]."""
    return xp.minimum(step.steps, 0.5 * xp.sqrt(step.steps * xp.expm1(xp.minimum(step.scale**2, 600.0))))
