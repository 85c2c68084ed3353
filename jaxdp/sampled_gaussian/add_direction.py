"""The add direction of the sampled Gaussian: g A^{-c} is log-concave, and the larger c, the narrower its peak.

Bounds from log-concavity replace the cruder bounds of `jaxdp.sampled_gaussian.moment`. They matter next to the supremum
of the loss, where c is very large. Proof: notebooks/proofs/contour_certificate.md, sections 4 and 5.
"""

import jax

from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.sampled_gaussian.likelihood_ratio import HALF_WIDTH, ROOT_2PI, rough_log_mixture

_DROP = (50.0, 600.0)  # the line ends (left, right) where the integrand is this many nats below its peak, or earlier
_HALVINGS = 6  # bisection steps for an end of the line


def _mode(c: jax.Array, mu: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mode of g A^{-c}, bound of its error). The mode is the zero of u + c mu s(u), s = q e^w / A.

    It lies in [-c mu, 0]. There s <= q e^w / (1 - q), and y e^y = r implies y <= log(1 + r); therefore it is also at
    least -log(1 + c mu^2 q e^{-mu^2/2} / (1 - q)) / mu.
    """
    logit = xp.log(xp.where(q > 0, q, 1e-300)) - xp.log1p(-xp.minimum(q, 1 - ULP))
    log_r = xp.log(xp.maximum(c * mu * mu, 1e-300)) + logit - mu * mu / 2
    width = xp.minimum(c * mu, xp.softplus(log_r) / mu * (1 + 1e-12))

    def right_of_the_mode(u: jax.Array) -> jax.Array:
        return u * (1 + xp.exp(mu * mu / 2 - u * mu - logit)) > -c * mu

    low, high = bisect(right_of_the_mode, -width, xp.zeros_like(width), 10)
    return 0.5 * (low + high), width * 2.0**-10


def interval(c: jax.Array, mu: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(low, high): where log(g A^{-c}) is `_DROP` below its peak, at most 9.5 from the mode; much closer for large c.

    The drop is larger on the right, where |A|^{-c} is much larger off the real axis than on it. c, low and high have
    the shape (..., 1).
    """
    mode, slack = _mode(c, mu, q)
    sides, drops = xp.array([-1.0, 1.0]), xp.array(_DROP)

    def integrand(u: jax.Array) -> jax.Array:
        return -0.5 * u * u - c * rough_log_mixture(u * mu - mu * mu / 2, q)

    def dead(distance: jax.Array) -> jax.Array:
        return integrand(mode + sides * distance) < peak - drops

    peak = integrand(mode)
    widest = (HALF_WIDTH + slack) * xp.ones(2)
    _, distance = bisect(dead, xp.zeros_like(widest), widest, _HALVINGS)
    return mode - distance[..., :1], mode + distance[..., 1:]


def outside(ends, log_a, c, mu, q, log_m):
    """Bound of the integral of g A^{-c} outside the two ends, relative to m(c): value / |slope of its log| at each end.

    It holds because g A^{-c} is log-concave. inf if an end is on the wrong side of the mode. log_a: log A at the ends.
    """
    w = ends * mu - mu * mu / 2
    share = xp.exp(xp.minimum(xp.log(xp.where(q > 0, q, 1e-300)) + w - log_a, 0.0))
    slopes = xp.maximum((-ends - c * mu * share) * xp.array([1.0, -1.0]) - 1e-9, 0.0)
    value = xp.exp(xp.minimum(-0.5 * ends * ends - c * log_a - log_m, 600.0)) / ROOT_2PI
    return xp.sum(xp.where(slopes > 0, value / xp.where(slopes > 0, slopes, 1.0), xp.inf), axis=-1)


def growth(v: jax.Array, log_a: jax.Array, y: jax.Array, c: jax.Array, mu: jax.Array, q: jax.Array) -> jax.Array:
    """Upper bound of -c log(|A(v + is)| / A(v)) for |s| <= 2y <= pi/(2 mu); log_a: log A(v).

    |A(v + is)|^2 = A^2 (1 - x), x = 2 q (1-q) e^w (1 - cos(s mu))/A^2 <= 1/2, so that -log(1 - x) <= x (1 + x).
    """
    w = v * mu - mu * mu / 2
    log_product = xp.log(xp.where(q > 0, q, 1e-300)) + xp.log1p(-xp.minimum(q, 1 - ULP)) + w
    x = 2 * xp.exp(xp.minimum(log_product - 2 * log_a, 0.0)) * (1 - xp.cos(2 * y * mu))
    return 0.5 * c * x * (1 + x) * (1 + 1e-9)
