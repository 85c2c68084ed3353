r"""A random label of an outcome u by its size: one more factor in the integral of a sampled Gaussian (remove, replace).

The label of u is at most j with probability W_j(u) = 1 / (1 + exp(2 sinh((u - u_j)/WIDTH))). W_j is analytic and falls
from 1 to 0 around the edge u_j, double exponentially on both sides. The factor for the labels between two edges is
W_high - W_low. Proof: notebooks/proofs/contour_certificate.md, section 10.
"""

from typing import NamedTuple

import jax

from jaxdp.numerics.complex_logarithms import log_one_plus
from jaxdp.runtime.arrays import xp

WIDTH = 0.4
TURN = 0.7  # largest |Im u| / WIDTH at which the bounds of a label hold
MODULUS = 0.4263  # log 1.5316: |1 + e^zeta| >= max(1, |e^zeta|)/1.5316 for |Im u| / WIDTH <= TURN
REACH = 11 * WIDTH  # a line ends at most this far from an edge; there log W falls by 1e5 nats per unit of u
STEEPEST = 2e4 / WIDTH  # largest slope, in nats per unit of u, of the rest of the integrand: less than half of 1e5
NEVER = 1e4  # an edge at NEVER or -NEVER is far from every outcome


class Label(NamedTuple):
    """The two edges of a band, at least 2.1 WIDTH apart."""

    low: jax.Array
    high: jax.Array


def _zeta(u: jax.Array, edge: jax.Array) -> jax.Array:
    """zeta = 2 sinh((u - edge)/WIDTH), so that W = 1 / (1 + e^zeta)."""
    return 2 * xp.sinh(xp.clip((u - edge) / WIDTH, -30.0, 30.0))


def on_axis(u: jax.Array, label: Label) -> jax.Array:
    """log(W_high - W_low) = log(1 - W_low) + log W_high + log(1 - e^{zeta_high - zeta_low}), without cancellation."""
    low, high = _zeta(u, label.low), _zeta(u, label.high)
    return xp.log1p(-xp.exp(xp.minimum(high - low, 0.0))) - xp.softplus(-low) - xp.softplus(high)


def off_axis(u: jax.Array, turn: jax.Array, label: Label) -> tuple[jax.Array, jax.Array]:
    """Real part and angle of log(W_high - W_low) at u + i turn; u: (size,)."""
    x, theta = xp.clip((u - xp.stack(label)[:, None]) / WIDTH, -30.0, 30.0), turn / WIDTH
    signs = xp.array([[-1.0], [1.0]])  # 1 - W is W with -zeta for zeta
    re, im = 2 * signs * xp.sinh(x) * xp.cos(theta), 2 * signs * xp.cosh(x) * xp.sin(theta)
    right, small = re > 0, xp.exp(-xp.abs(re))
    size, angle = log_one_plus(small * xp.cos(im), xp.where(right, -small, small) * xp.sin(im))
    fall, swing = xp.exp(xp.minimum(re[0] + re[1], 0.0)), im[0] + im[1]
    more, turned = log_one_plus(-fall * xp.cos(swing), -fall * xp.sin(swing))
    return more - xp.sum(xp.maximum(re, 0.0) + size, axis=0), turned - xp.sum(xp.where(right, im, 0.0) + angle, axis=0)


def log_bound(left: jax.Array, right: jax.Array, label: Label) -> jax.Array:
    """Upper bound of log |W_high - W_low| for all u with Re u in [left, right] and |Im u| / WIDTH <= `TURN`."""
    between = xp.minimum(_zeta(right, label.low), 0.0) + xp.minimum(-_zeta(left, label.high), 0.0)
    return xp.cos(TURN) * between + MODULUS + xp.where(label.low > -NEVER, MODULUS + 0.05, 0.0)


def log_beyond(rise: jax.Array, mu: jax.Array) -> jax.Array:
    """Amount to add to the log bound at the ends of a line, so that it covers what lies beyond; inf if none is proved.

    rise: bound of the slope in u of log |integrand|, without the factors g and label.
    """
    return xp.where((rise <= STEEPEST) & (mu <= 1000.0), 0.2, xp.inf)
