r"""How far a sampled Gaussian's characteristic function has decayed, for good: a bound that only falls with t.

On a line raised by y, |exp(i t L)| = e^{-t |arg A|}, so

    |m(c + it)| <= D_y(t) = int |g A^{c+1}| e^{-t arg A} du  over Im u = y  (add: |g A^{-c}|, Im u = -y),

which falls in t. At small t the best y is small and D is what a Gaussian of the same variance would have; far out it is
an exponential. Argument: notebooks/proofs/contour_certificate.md, section 3.4.
"""

import jax
import numpy as np

from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian import add_direction
from jaxdp.sampled_gaussian.likelihood_ratio import (
    HALF_WIDTH,
    ROOT_2PI,
    exact_nodes,
    exp_or_inf,
    gained,
    integrand_and_mixture,
    log_mixture,
    log_units,
)

HEIGHTS = 2.0 ** -np.arange(1.0, 12.0, 2.0)  # of the strip's
_FEWER = 4  # every so many nodes tell which height is best


def log_decay(c, mu, q, cut, direction: str, size: int, log_m, end) -> jax.Array:
    """log of a bound of |m(c + is)| / e^{log_m} for all s >= end (remove and add); at most a little above 0."""
    if direction == "reverse":
        low, high = add_direction.interval(c[None], mu[None], q[None])
        low, cell, v = exact_nodes(low[0], high[0], size)
    else:
        top = (c + 1) * mu + HALF_WIDTH
        low, cell, v = exact_nodes(xp.full_like(top, -HALF_WIDTH), xp.minimum(top, cut), size)
    ends = xp.stack([low, low + size * cell])
    strip = _strip(ends, mu, direction)
    few = v[::_FEWER]
    rough = xp.vmap(lambda y: xp.logsumexp(_exponent(few, y, c, mu, q, direction, end)[0]))(strip * HEIGHTS)
    y = strip * xp.asarray(HEIGHTS)[xp.argmin(rough)]
    bound = _modulus(v, cell, ends, y, strip, c, mu, q, direction, log_m, end)
    return xp.fmin(xp.log(xp.where(xp.isnan(bound), xp.inf, bound)), 1.0)


def turn_units(v: jax.Array, mu: jax.Array) -> jax.Array:
    """Units of 2^-53 by which t arg A may be off, relative to itself (q <= 1/2): e^w's by that of w, and its own."""
    return 16 + 4 * mu * (xp.abs(v) + mu)


def _strip(ends: jax.Array, mu: jax.Array, direction: str) -> jax.Array:
    """How far from the axis: arg A below 0.45 pi; add, |A|^{-c} not much larger than on the axis."""
    if direction != "reverse":
        return xp.minimum(1.0, 0.45 * xp.pi / mu)
    steep = 1 / xp.sqrt(mu * xp.maximum(-0.5 * xp.sum(ends), 1e-9))
    return 2 * xp.minimum(xp.minimum(1.0, xp.pi / (6 * mu)), steep)


def _exponent(v, y, c, mu, q, direction: str, t) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log of D_y(t)'s integrand at v + iy; t arg A; units of 2^-53 by which A's power may be off."""
    sign, power = (-1.0, -c) if direction == "reverse" else (1.0, c + 1)
    log_a, angle = log_mixture(v * mu - mu * mu / 2, sign * y * mu, q)
    turned = t * xp.maximum(sign * angle, 0.0)
    own = xp.abs(power) * log_units(v, xp.complex(log_a, angle), mu, q)
    return -0.5 * v * v + 0.5 * y * y + power * log_a - turned, turned, own


def _modulus(v, cell, ends, y, strip, c, mu, q, direction, log_m, t) -> jax.Array:
    """D_y(t) relative to e^{log_m}, from above, by the midpoint rule: analytic up to the height ``strip``."""
    exponent, turned, own = _exponent(v, y, c, mu, q, direction, t)
    weight = xp.exp(xp.minimum(exponent - log_m, 600.0)) * cell / ROOT_2PI
    units = v.shape[0] + 32 + 8 * (v * v + xp.abs(log_m)) + turned * turn_units(v, mu) + own
    units = units + xp.where(q > 0.5, 4 * t * y * mu, 0.0)
    total = xp.sum(weight * exp_or_inf(ULP * units))
    room = strip - y
    lift = 0.5 * (y * y + room * room)
    on_axis, axis_a = integrand_and_mixture(xp.concatenate([v, ends]), c, mu, q, direction)
    on_axis = on_axis - log_m + lift
    at_ends = on_axis[-2:]
    edge, outside = xp.exp(lift), 1e-20
    if direction == "reverse":
        at = xp.concatenate([v, ends])
        growth = add_direction.growth(at, axis_a, 0.5 * strip, c, mu, q)
        # the left end of the line is that of its first cell
        edge = xp.sum(exp_or_inf((on_axis + growth + 0.5 * gained(at, cell))[:-1])) * cell / ROOT_2PI
        outside = add_direction.outside(ends, axis_a[-2:], c, mu, q, log_m)[0]
        at_ends = at_ends + growth[-2:]
    kernel = xp.expm1(xp.minimum(2 * xp.pi * room / cell, 600.0))
    sides = xp.sum(exp_or_inf(at_ends)) * (6 * strip + 3 * cell) / ROOT_2PI
    # (log A on the axis is within 3e-14, which counts c times)
    return total + (2 * edge / kernel + sides + outside) * (1 + 1e-9) * exp_or_inf(6e-14 * (xp.abs(c) + 1))
