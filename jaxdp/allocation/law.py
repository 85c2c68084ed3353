"""The law of one step's likelihood ratio Y = exp(s x - s^2/2), x ~ N(0, 1), on Gauss panels with bounded errors.

X = sign (Y - e^(sign epsilon)), T steps. sign = 1: "remove", delta = E[(X_1 + ... + X_T)_+]/T. sign = -1: "add",
delta = e^epsilon E[(X_1 + ... + X_T)_+]/T. Proofs: notebooks/proofs/allocation.md, sections 1 to 5.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import LOG_SQRT_2PI
from jaxdp.runtime.arrays import xp

NODES = 16  # in each Gauss-Legendre panel
POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(NODES)
_RADII = np.array([1.0, 1.6, 2.0, 2.6, 3.4, 4.5, 6.0, 9.0, 14.0])  # radii of the Bernstein ellipses that are tried
_LEFT = 9.5  # the panels begin this far left of 0 and of the zero of X, in standard deviations of x


class Step(NamedTuple):
    """One parameter point: T steps, s = 1/noise multiplier, epsilon >= 0 and the sign of the direction."""

    steps: Any
    scale: Any
    epsilon: Any
    sign: Any

    def log_ratio(self, x: Any) -> Any:
        """log Y."""
        return self.scale * x - 0.5 * self.scale**2

    def threshold(self) -> Any:
        """e^(sign epsilon) - 1."""
        return xp.expm1(self.sign * self.epsilon)

    def value(self, x: Any) -> Any:
        """X."""
        return self.sign * (xp.expm1(self.log_ratio(x)) - self.threshold())

    def blur(self, x: Any) -> Any:
        """Bound of the rounding error of X."""
        u = self.log_ratio(x)
        size = xp.abs(self.scale * x) + 0.5 * self.scale**2
        return ULP * (5 * xp.abs(xp.expm1(u)) + 4 * size * xp.exp(u) + 5 * xp.abs(self.threshold()))

    def cut(self) -> Any:
        """An x at which Y >= T e^(sign epsilon): one step beyond it decides the sign of X_1 + ... + X_T."""
        x = (self.sign * self.epsilon + xp.log(self.steps) + 0.5 * self.scale**2) / self.scale
        size = (self.epsilon + xp.log(self.steps) + self.scale**2) / self.scale
        return x + 16 * ULP * size

    def left(self) -> Any:
        """The x at which the panels begin."""
        return xp.minimum(0.0, (self.sign * self.epsilon + 0.5 * self.scale**2) / self.scale) - _LEFT


class Law(NamedTuple):
    """Intervals of x cut into n panels: edges (..., n + 1); x, X, bound of X's rounding, log mass (..., n, NODES)."""

    edges: Any
    x: Any
    value: Any
    blur: Any
    log_mass: Any


def on_panels(step: Step, edges: Any) -> Law:
    """The law between the edges. A panel of width 0 has mass 0."""
    middle, half = 0.5 * (edges[..., 1:] + edges[..., :-1]), 0.5 * (edges[..., 1:] - edges[..., :-1])
    x = middle[..., None] + half[..., None] * POINTS
    weight = half[..., None] * _WEIGHTS
    log_mass = xp.log(xp.where(weight > 0, weight, 1.0)) - 0.5 * x * x - LOG_SQRT_2PI
    return Law(edges, x, step.value(x), step.blur(x), xp.where(weight > 0, log_mass, -xp.inf))


def log_sum(exponent: Any) -> Any:
    """log of the sum of exponentials along the last axis; -inf if all terms are 0, inf if a term is NaN."""
    total = xp.logsumexp(exponent, axis=-1)
    return xp.where(xp.isnan(total), xp.inf, total)


def log_moments(law: Law, c: Any) -> Any:
    """log of the sum of mass e^{cX} over the nodes of each interval; -inf for an empty interval.

    Axes of the result: the axes of c, then the axes of the intervals.
    """
    exponent = law.log_mass + xp.asarray(c)[(..., *[None] * law.value.ndim)] * law.value
    return log_sum(exponent.reshape(*exponent.shape[:-2], -1))


def log_panel_errors(step: Step, edges: Any, c: Any, t: Any) -> Any:
    """log of a bound of |sum - integral| of density times e^{zX} over each panel, for all z = c + it', |t'| <= t.

    Axes of the result: the axes of c and t, then the axes of the panels. The integrand is bounded on Bernstein ellipses
    around each panel, and the best ellipse is taken (notebooks/proofs/allocation.md, section 5).
    """
    c, t = (xp.asarray(value)[(..., *[None] * (edges.ndim + 1))] for value in (c, t))
    middle, half = 0.5 * (edges[..., 1:] + edges[..., :-1]), 0.5 * (edges[..., 1:] - edges[..., :-1])
    middle, half, radius = middle[..., None], half[..., None], xp.asarray(_RADII)
    wide, high = half * 0.5 * (radius + 1 / radius), half * 0.5 * (radius - 1 / radius)
    near = xp.maximum(xp.abs(middle) - wide, 0.0)
    low_y, high_y = xp.exp(step.log_ratio(middle - wide)), xp.exp(step.log_ratio(middle + wide))
    turn = step.scale * high
    sine = xp.sin(xp.minimum(turn, 0.5 * math.pi))
    # Upper bound of sign Re Y on the ellipse.
    adds = xp.where(turn < 0.5 * math.pi, -low_y * xp.cos(turn), high_y)
    real = xp.where(step.sign > 0, high_y, adds)
    exponent = c * (real - step.sign * (1 + step.threshold())) + t * high_y * sine
    # Radius 1: |sum| + |integral| is at most four half widths times the largest value on the panel.
    factor = np.log(np.where(_RADII > 1, 8 * _RADII / np.maximum(_RADII - 1, 1e-3), 4.0)) - 2 * NODES * np.log(_RADII)
    bound = xp.min(exponent - 0.5 * (near**2 - high**2) - LOG_SQRT_2PI + factor, axis=-1)
    half = half[..., 0]
    return xp.where(half > 0, bound + xp.log(xp.where(half > 0, half, 1.0)), -xp.inf)


def log_left(step: Step, start: Any, c: Any) -> Any:
    """log of a bound of E[e^{cX}; x <= start], start < 0 <= c, from P[x <= start] <= e^{-start^2/2}/2 and a bound of X.

    "remove": X <= X(start). "add": X is concave, so it lies below its tangent at the start. If the tangent is flat, the
    expectation is at most its value for X = X(start); otherwise X <= 1 + threshold is used.
    """
    flat = c * step.scale * xp.exp(step.log_ratio(start)) <= -start
    most = xp.where((step.sign > 0) | flat, step.value(start) + step.blur(start), 1 + step.threshold())
    return c * most - 0.5 * start**2 - math.log(2) + 1e-12


def log_quadrature_errors(step: Step, edges: Any, c: Any, t: Any) -> Any:
    """log of the sum of the bounds of `log_panel_errors` over the panels of each interval."""
    return log_sum(log_panel_errors(step, edges, c, t))
