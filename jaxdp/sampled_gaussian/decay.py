r"""A bound of |m(c + is)| of a sampled Gaussian for all s >= t: a bound that decreases in t.

On the line Im u = y (add: Im u = -y), |exp(i t L)| = e^{-t Im L} with Im L >= 0. Hence

    |m(c + it)| <= D_y(t) = int |the integrand of m(c)| e^{-t Im L} du  over this line,

which decreases in t. For small t the best y is small, and D_y is about the bound for a Gaussian of the same variance.
For large t, D_y decays exponentially. Proof: notebooks/proofs/contour_certificate.md, section 4.
"""

import jax
import numpy as np

from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian import add_direction
from jaxdp.sampled_gaussian.label import Label, off_axis
from jaxdp.sampled_gaussian.likelihood_ratio import ROOT_2PI, exact_nodes, exp_or_inf, integrand_and_mixture
from jaxdp.sampled_gaussian.moment import along_edges, exponent, height, interval, loss_units

_HEIGHTS = 2.0 ** -np.arange(1.0, 12.0, 2.0)  # heights y that are tried, as shares of the height of the strip
_HIGHER = np.arange(0.65, 0.95, 0.05)  # further shares with a label, because the strip is low then
_FEWER = 4, 16  # to choose y, every 4th node is used without a label, every 16th with a label


def log_decay(c, mu, q, cut, direction: str, size: int, log_m, end, label: Label | None = None) -> jax.Array:
    """log of a bound of |m(c + is)| / e^{log_m} for all s >= end; never above 1. size: quadrature nodes."""
    low, high = interval(c[None], mu[None], q[None], cut[None], direction, label)
    low, cell, v = exact_nodes(low[0], high[0], size)
    high = low + size * cell
    ends, reach = xp.stack([low, high]), height(low, high, c, mu, direction, label)
    widest = direction == "forward" and label is None
    strip = reach if widest else xp.minimum(2 * reach, 0.45 * xp.pi / mu)
    fewer = _FEWER[label is not None]
    few = v[::fewer]
    heights = strip * (_HEIGHTS if label is None else np.append(_HEIGHTS, _HIGHER))
    rough = xp.vmap(lambda y: xp.logsumexp(_fallen(few, y, c, mu, q, direction, end, label)[0]))(heights)
    if label is not None:  # add the error of the midpoint rule, roughly e^(5 - 2 pi (strip - y)/cell)
        rough = xp.logaddexp(rough + xp.log(fewer * cell / ROOT_2PI) - log_m, 5 - 2 * xp.pi * (strip - heights) / cell)
    y = heights[xp.argmin(rough)]
    bound = _modulus(v, cell, ends, y, strip, c, mu, q, direction, log_m, end, label)
    return xp.fmin(xp.log(xp.where(xp.isnan(bound), xp.inf, bound)), 1.0)


def _turn_units(v: jax.Array, mu: jax.Array) -> jax.Array:
    """Relative error of t arg A for q <= 1/2, in units of 2^-53: an upper bound that includes the rounding of w."""
    return 16 + 4 * mu * (xp.abs(v) + mu)


def _fallen(v, y, c, mu, q, direction: str, t, label) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At v + iy: log of the integrand of D_y(t); t Im L; error of log (powers of A times label) in units of 2^-53."""
    signed = -y if direction == "reverse" else y
    log_size, _, loss_re, loss_im = exponent(v, signed, c, mu, q, direction)
    t_im_loss = t * xp.maximum(loss_im, 0.0)
    units = (c + 1) * loss_units(xp.complex(loss_re, loss_im), v, mu, q, direction)
    if label is not None:
        more, _ = off_axis(v, y, label)
        log_size, units = log_size + more, units + 80 * xp.where(more > -1e12, xp.abs(more), 0.0)  # else e^more = 0
    return log_size - t_im_loss, t_im_loss, units


def _modulus(v, cell, ends, y, strip, c, mu, q, direction, log_m, t, label) -> jax.Array:
    """Upper bound of D_y(t) / e^{log_m} by the midpoint rule; the integrand is analytic up to the height ``strip``."""
    log_size, t_im_loss, factor_units = _fallen(v, y, c, mu, q, direction, t, label)
    weight = xp.exp(xp.minimum(log_size - log_m, 600.0)) * cell / ROOT_2PI
    units = v.shape[0] + 32 + 8 * (v * v + xp.abs(log_m)) + t_im_loss * _turn_units(v, mu) + factor_units
    units = units + xp.where(q > 0.5, 4 * t * y * mu, 0.0) * (2 if direction == "replace" else 1)
    total = xp.sum(weight * exp_or_inf(ULP * units))
    room = strip - y
    at = xp.concatenate([v, ends])
    on_axis, log_a = integrand_and_mixture(at, c, mu, q, direction)
    lift = 0.5 * (y * y + room * room)
    edge, at_ends = along_edges(at, on_axis - log_m, log_a, cell, 0.5 * strip, lift, c, mu, q, direction, label)
    outside = 1e-20 * edge
    if direction == "reverse":
        outside = add_direction.outside(ends, log_a[-2:], c, mu, q, log_m)
    kernel = xp.expm1(xp.minimum(2 * xp.pi * room / cell, 600.0))
    sides = xp.sum(exp_or_inf(at_ends)) * (6 * strip + 3 * cell) / ROOT_2PI
    # the last factor: log A on the real axis has an error of at most 3e-14, multiplied by about c
    return total + (2 * edge / kernel + sides + outside) * (1 + 1e-9) * exp_or_inf(6e-14 * (xp.abs(c) + 1))
