"""Bounds of delta for two steps: one integral over one step's Y of an option price in the other's.

The contour's tail falls like t^-4 only, which leaves its bounds far apart. Proofs: notebooks/proofs/allocation.md,
section 10.
"""

from __future__ import annotations

from typing import Any

from jaxdp.allocation import law
from jaxdp.allocation.jumps import normal_tails
from jaxdp.allocation.law import Step
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import LOG_SQRT_2PI
from jaxdp.runtime.arrays import xp

_PANELS = 2048
_FAR = 38.0  # the normal law has no mass beyond it in double precision
_LEAST_SCALE, _LARGEST_SCALE = 0.01, 4.0  # of s, for which the constants below are proved
_BLUR = 1e-13  # relative, of Y and of a panel's mean
_SLACK = 1e-6  # relative, of variances and densities, which multiply a small term
_SUMMED = 1e-11  # relative, of masses and of sums


def bracket(step: Step, epsilon: Any) -> Bounds:
    """Bounds of delta at an array of epsilons >= 0 where step has two steps; elsewhere (0, 1)."""
    usable = (step.steps == 2) & (step.scale >= _LEAST_SCALE) & (step.scale <= _LARGEST_SCALE)
    nothing = Bounds(xp.zeros_like(epsilon), xp.ones_like(epsilon))
    each = lambda some: xp.lax_map(lambda one: bounds_at(step._replace(epsilon=one)), some)  # noqa: E731
    return law.once_if(usable, each, epsilon, nothing)


def _price(step: Step, strike: Any) -> tuple[Any, Any]:
    """(value, error) of E[(sign (Y - strike))_+]."""
    s = step.scale
    d = (xp.log(strike) + 0.5 * s * s) / s
    none, one = normal_tails(step.sign * xp.stack([d, d - s]))
    value = step.sign * (one - strike * none)
    return value, 64 * ULP * (4 + d * d + s * s) * (one + strike * none)


def log_density(step: Step, y: Any) -> Any:
    """log of the density of Y at y."""
    u = (xp.log(y) + 0.5 * step.scale**2) / step.scale
    return -0.5 * u * u - LOG_SQRT_2PI - xp.log(step.scale * y)


def bounds_at(step: Step) -> Bounds:
    """Bounds of delta at the step's own epsilon."""
    s, removes = step.scale, step.sign > 0
    odds = xp.exp(step.sign * step.epsilon)
    total, cut = 2 * odds, step.cut()
    top = xp.minimum(cut, _FAR + s)
    edges = xp.linspace(xp.maximum(step.left(), -_FAR - 1), top, _PANELS + 1)
    panels = law.on_panels(step, edges)
    w, y = xp.exp(panels.log_mass), xp.exp(step.log_ratio(panels.x))
    mass = xp.sum(w, axis=1)
    weight = w / xp.maximum(mass, 1e-320)[:, None]
    mean = xp.sum(weight * y, axis=1)
    variance = xp.sum(weight * (y - mean[:, None]) ** 2, axis=1)
    blur = _BLUR * (total + mean)
    # the price rises with Y for "remove" and falls for "add"
    least, most = (xp.maximum(total - mean - step.sign * side * blur, 1e-300) for side in (-1.0, 1.0))
    ends = xp.exp(step.log_ratio(edges))
    strike = xp.where(removes, xp.maximum(total - ends[0] - blur[0], 1e-300), total)
    price, off = _price(step, xp.concatenate([least, most, strike[None]]))
    low, high = price[:_PANELS] - off[:_PANELS], (price + off)[_PANELS:-1]
    first = xp.maximum(total - ends[1:] - blur, 1e-300)
    last = xp.maximum(total - ends[:-1] + blur, 1e-300)
    mode = xp.exp(-1.5 * s * s)
    heights = [xp.exp(log_density(step, each)) for each in (first, last, xp.clip(mode, first, last))]
    flat = xp.minimum(heights[0], heights[1]) * (1 - _SLACK)
    steep = xp.maximum(xp.maximum(heights[0], heights[1]), heights[2]) * (1 + _SLACK)
    lower = xp.sum(mass * xp.maximum(low + 0.5 * variance * (1 - _SLACK) * flat, 0.0))
    upper = xp.sum(mass * (high + 0.5 * (variance * (1 + _SLACK) + blur**2) * steep))
    none, one, left = normal_tails(xp.stack([top, top - s, -edges[0]]))
    here, there = one, (total - 1) * none
    error = 64 * ULP * (4 + top * top) * (here + xp.abs(there))
    beyond = xp.where(removes, here - there, 0.0)
    lower = lower * (1 - _SUMMED) + xp.where(removes & (top == cut), xp.maximum(beyond - error, 0.0), 0.0)
    far = xp.where(removes, one + none, total * none)  # the price is at most Y + 1, or the total
    upper = upper * (1 + _SUMMED) + xp.where(top == cut, xp.where(removes, beyond + error, 0.0), far)
    upper = upper + left * (price + off)[-1] * (1 + _SLACK)
    share = 0.5 * xp.where(removes, 1.0, xp.exp(step.epsilon))
    lower, upper = share * lower * (1 - 16 * ULP), share * upper * (1 + 16 * ULP) + 1e-307
    good = (lower <= upper) & (upper <= 1)
    return Bounds(xp.where(good, lower, 0.0), xp.where(good, upper, 1.0))
