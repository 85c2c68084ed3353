"""The likelihood ratio A = 1 - q + q e^w, w = u mu - mu^2/2, of a sampled Gaussian at real and complex outcomes u."""

import jax

from jaxdp.numerics.complex_logarithms import log_one_plus
from jaxdp.runtime.arrays import xp

ROOT_2PI = 2.5066282746310002
HALF_WIDTH = 9.5  # half the length of a line of integration, in standard deviations: it leaves out 2 Phi_c(9.5) = 2e-21


def log_mixture(w_re: jax.Array, w_im: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of log(1 - q + q e^w), with a small relative error even for small q.

    For q > 1/2, where 1 + q (e^w - 1) would cancel, log A(w; q) = w + log A(-w; 1 - q) is used.
    """
    flip = q > 0.5
    sign, rate = xp.where(flip, -1.0, 1.0), xp.where(flip, 1 - q, q)
    x, turn = sign * w_re, sign * w_im
    a, half = xp.minimum(x, 700.0), xp.sin(0.5 * turn)
    re, im = xp.expm1(a) * xp.cos(turn) - 2 * half * half, xp.exp(a) * xp.sin(turn)
    log_abs, angle = log_one_plus(rate * re, rate * im)
    beyond = xp.where(rate > 0, x - a, 0.0)  # e^w overflows: there log A is w + log q
    return log_abs + beyond + xp.where(flip, w_re, 0.0), angle + xp.where(flip, w_im, 0.0)


def log_mixture_real(w: jax.Array, q: jax.Array) -> jax.Array:
    """log(1 - q + q e^w) for real w, with an absolute error below 3e-14 (XLA's log1p is 129 ulp off near -0.414)."""
    flip = q > 0.5
    x, rate = xp.where(flip, -w, w), xp.where(flip, 1 - q, q)
    near = xp.log1p(rate * xp.expm1(xp.minimum(x, 700.0)))
    far = xp.log(xp.where(rate > 0, rate, 1.0)) + x
    return xp.where((x > 700.0) & (rate > 0), far, near) + xp.where(flip, w, 0.0)


def rough_log_mixture(w: jax.Array, q: jax.Array) -> jax.Array:
    """log(1 - q + q e^w) by one exponential and one logarithm, to a few ULP of 1 + |w|. Not for certified bounds."""
    larger = xp.where(w > 0, q, 1 - q)
    return xp.maximum(w, 0.0) + xp.log(larger + (1 - larger) * xp.exp(-xp.abs(w)))


def integrand_and_mixture(v, c, mu, q, direction, mixture=log_mixture_real):
    """(log of the integrand without 1/sqrt(2 pi), log A) at real u = v and t = 0."""
    a = mixture(v * mu - mu * mu / 2, q)
    if direction == "forward":
        return -v * v / 2 + (c + 1) * a, a
    if direction == "reverse":
        return -v * v / 2 - c * a, a
    return -v * v / 2 + (c + 1) * a - c * mixture(-v * mu - mu * mu / 2, q), a


def exp_or_inf(x: jax.Array) -> jax.Array:
    """e^x of a log bound; inf for x >= 600. A clipped value would not be a bound if a tiny factor follows."""
    return xp.where(x < 600, xp.exp(xp.minimum(x, 600.0)), xp.inf)


def gained(at: jax.Array, to: jax.Array) -> jax.Array:
    """u^2 at one end of a cell minus the least u^2 in the cell: twice the largest increase of log g in the cell."""
    smallest = xp.where(at * to < 0, 0.0, xp.minimum(xp.abs(at), xp.abs(to)))
    return at * at - smallest * smallest


def exact_nodes(low: jax.Array, high: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(low, cell width, midpoints) of ``size`` cells from about low to about high, exact; the end may be above high.

    The nodes are multiples of 2^-41. A steep integrand would change if a node were one ULP away from its grid point.
    """
    grain = 2.0**-40
    low = xp.floor(low / grain) * grain
    cell = xp.ceil((high - low) / size / grain) * grain
    return low, cell, low + (xp.arange(size) + 0.5) * cell


def log_units(v: jax.Array, log_a: jax.Array, mu: jax.Array, q: jax.Array) -> jax.Array:
    """Error bound of log A, real or complex, at Re u = v, in units of 2^-53: its own rounding and the rounding of w."""
    size = mu * (xp.abs(v) + mu)
    w = v * mu - mu * mu / 2
    share = xp.exp(xp.minimum(xp.log(xp.where(q > 0, q, 1e-300)) + w - xp.real(log_a), 10.0))
    return 16 * (xp.abs(log_a) + xp.where(q > 0.5, size, 0.0)) + 4 * share * size
