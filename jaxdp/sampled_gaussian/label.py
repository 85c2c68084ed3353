r"""A soft label of an outcome u by its size: one more factor under a sampled Gaussian's integral, remove direction.

An outcome u is labelled at most j with probability W_j(u) = 1 / (1 + exp(2 sinh((u - u_j)/0.3))), which is analytic,
falls from 1 to 0 around u_j and has no tail to speak of on either side. The factor is W_high - W_low.
Argument: notebooks/proofs/contour_certificate.md, section 10.
"""

from typing import NamedTuple

import jax

from jaxdp.numerics.complex_logarithms import log_one_plus
from jaxdp.runtime.arrays import xp

WIDTH = 0.4
TURN = 0.7  # largest angle, in units of the label's width, at which the strip ends
MODULUS = 0.4263  # log 1.5316: |1 + e^zeta| >= max(1, |e^zeta|)/1.5316 up to that angle
REACH = 11 * WIDTH  # distance from an edge at which a line may end: there a label falls by 1e5 nats a unit
STEEPEST = 2e4 / WIDTH  # most nats a unit by which the rest of the integrand may rise: less than half of that
NEVER = 1e4  # no outcome comes near an edge there, or at its negative


class Label(NamedTuple):
    """The two edges, at least 2.1 widths apart."""

    low: jax.Array
    high: jax.Array


def _zeta(u: jax.Array, edge: jax.Array) -> jax.Array:
    """W = 1 / (1 + e^zeta)."""
    return 2 * xp.sinh(xp.clip((u - edge) / WIDTH, -30.0, 30.0))


def on_axis(u: jax.Array, label: Label) -> jax.Array:
    """log(W_high - W_low) = log(1 - W_low) + log W_high + log(1 - e^{zeta_high - zeta_low}), without cancellation."""
    low, high = _zeta(u, label.low), _zeta(u, label.high)
    return xp.log1p(-xp.exp(xp.minimum(high - low, 0.0))) - xp.softplus(-low) - xp.softplus(high)


def off_axis(u: jax.Array, turn: jax.Array, label: Label) -> tuple[jax.Array, jax.Array]:
    """Real part and angle of the same at u + i turn; u: (size,)."""
    x, theta = xp.clip((u - xp.stack(label)[:, None]) / WIDTH, -30.0, 30.0), turn / WIDTH
    signs = xp.array([[-1.0], [1.0]])  # log(1 - W) is log W of -zeta
    re, im = 2 * signs * xp.sinh(x) * xp.cos(theta), 2 * signs * xp.cosh(x) * xp.sin(theta)
    right, small = re > 0, xp.exp(-xp.abs(re))
    size, angle = log_one_plus(small * xp.cos(im), xp.where(right, -small, small) * xp.sin(im))
    fall, swing = xp.exp(xp.minimum(re[0] + re[1], 0.0)), im[0] + im[1]
    more, turned = log_one_plus(-fall * xp.cos(swing), -fall * xp.sin(swing))
    return more - xp.sum(xp.maximum(re, 0.0) + size, axis=0), turned - xp.sum(xp.where(right, im, 0.0) + angle, axis=0)


def log_bound(left: jax.Array, right: jax.Array, label: Label) -> jax.Array:
    """Bound of log |W_high - W_low| for all Re u in [left, right], at any angle up to `TURN`."""
    between = xp.minimum(_zeta(right, label.low), 0.0) + xp.minimum(-_zeta(left, label.high), 0.0)
    return xp.cos(TURN) * between + MODULUS + xp.where(label.low > -NEVER, MODULUS + 0.05, 0.0)


def log_beyond(rise: jax.Array, mu: jax.Array) -> jax.Array:
    """What the log of a bound at a line's ends is raised by, for what lies beyond; inf where that may be much.

    rise: the most by which the rest of the integrand's logarithm, but for g, changes per unit of u.
    """
    return xp.where((rise <= STEEPEST) & (mu <= 1000.0), 0.2, xp.inf)
