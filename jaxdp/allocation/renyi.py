"""Upper bounds of the Renyi divergences of one epoch of random allocation, from moments of X = (Y_1 + ... + Y_T)/T.

Y = exp(s x - s^2/2), x ~ N(0, 1). (order - 1) times the divergence is log E[X^order] for "remove" and
log E[X^(1 - order)] for "add". Proofs: notebooks/proofs/allocation.md, section 10.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import LOG_SQRT_2PI, log1mexp, log_expm1
from jaxdp.runtime.arrays import xp

LARGEST_ORDER = 256  # for "remove"; beyond it `log_moment` is inf and callers use the bound without amplification
_LOG_FACTORIAL = np.array([math.log(math.factorial(n)) for n in range(LARGEST_ORDER + 1)])
_INDEX = np.arange(LARGEST_ORDER + 1)

_REACH = 13.0  # the nodes in x extend this far below 0 and above s, in standard deviations of x
# Nodes in x; points of the search for the largest term of the sum over w; index of the largest of this sum's 256 terms.
_NODES, _PLACES, _PEAK = 512, 64, 136
_AROUND = np.arange(256) - float(_PEAK)
_LOG_TAIL = -87.98  # at least log P[x > 13] = -87.9897
_LARGEST_SCALE = 5.0  # for larger s the quadrature error in x is too large, and hiding the step hardly helps
_ROUNDING = 1e-12  # bound of the rounding of the log of a transform, whose exponents are at most 80
_MOST = 600.0  # exponents are cut here: e^600 does not overflow, and slopes stay finite
_SMALL = 0.5  # u/T up to which the excess of the transform over e^{-u/T} is summed


def _log_central_moments(steps: Any, scale: Any, largest: Any) -> Any:
    """log of E[(X - 1)^j]/j! for j = 0, ..., 256, by sums of positive terms. NumPy stops at j = largest + 1.

    The n-th cumulant of Y is (e^{s^2} - 1)^{n-1} J_n, where J_n is a polynomial in e^{s^2} with positive coefficients.
    """
    square = scale**2
    excess = log_expm1(square)
    log_sums = log_expm1(square * (_INDEX + 1.0)) - excess
    smaller = _INDEX * (excess - xp.log(steps))

    def advance(n: Any, state: Any) -> Any:
        trees, moments = state  # trees[i] = log J_{i+1}/i!
        back = xp.clip(n - 1 - _INDEX, 0, LARGEST_ORDER)
        terms = log_sums + trees + xp.lookup(trees, back)
        trees = xp.set_at(trees, n, xp.logsumexp(xp.where(_INDEX < n, terms, -xp.inf)) - xp.log(n * 1.0))
        terms = smaller + trees + xp.lookup(moments, xp.clip(n - _INDEX, 0, LARGEST_ORDER))
        live = (_INDEX > 0) & (_INDEX <= n)
        return trees, xp.set_at(moments, n + 1, xp.logsumexp(xp.where(live, terms, -xp.inf)) - xp.log(n + 1.0))

    start = xp.where(_INDEX == 0, 0.0, -xp.inf)
    last = int(largest) + 1 if xp.eager else LARGEST_ORDER
    return xp.fori_loop(1, last, advance, (start, start))[1]


def _remove(log_moments: Any, steps: Any, scale: Any, n: Any) -> Any:
    """log E[X^n] for whole n >= 1, rounded up."""
    log_factorials = xp.lookup(_LOG_FACTORIAL, xp.clip(n - _INDEX, 0, LARGEST_ORDER).astype(xp.int32))
    terms = xp.where((_INDEX >= 2) & (n >= _INDEX), log_moments - log_factorials, -xp.inf)
    log_n_factorial = xp.lookup(_LOG_FACTORIAL, n.astype(xp.int32))
    size = n * (1 + xp.log(steps) + xp.abs(log_expm1(scale**2)) + xp.log(n)) + 0.5 * (scale * n) ** 2
    error = 4 * n * ULP * (n + 6 * size)
    return xp.where(n > 1, xp.softplus(log_n_factorial + xp.logsumexp(terms) + error), 0.0)


def _log_transform(steps: Any, scale: Any, u: Any) -> tuple[Any, Any]:
    """(log E[e^{-uX}], log E[e^{-uX}] + u >= 0), both rounded up: T times the values of Y at u/T (trapezoidal rule)."""
    x = xp.linspace(-_REACH, _REACH + scale, _NODES)
    width = (2 * _REACH + scale) / (_NODES - 1)
    strip = xp.minimum(0.5 * math.pi / scale, 2 * math.pi / width)
    log_error = math.log(2.02) + 0.5 * strip**2 - 2 * math.pi * strip / width
    log_weight, log_y = xp.log(width) - 0.5 * x * x - LOG_SQRT_2PI, scale * x - 0.5 * scale**2
    v = u / steps
    small = v <= _SMALL
    near = xp.where(small, v, _SMALL)
    excess = xp.sum(xp.exp(log_weight) * _excess(near[:, None] * xp.expm1(log_y)), axis=-1)
    # The error of the sum and of its left end is proportional to v^2, the error of its right end to v.
    squares = xp.exp(log_error + near) * (xp.exp(scale**2) + 1) + xp.exp(_LOG_TAIL)
    by_excess = steps * xp.log1p(excess * (1 + _ROUNDING) + near * (near * squares + math.exp(_LOG_TAIL)))
    far = xp.where(small, _SMALL, v)
    direct = xp.logsumexp(log_weight - far[:, None] * xp.exp(log_y), axis=-1)
    direct = xp.logaddexp(direct, xp.logaddexp(log_error, _LOG_TAIL + 1))
    direct = steps * (direct + _ROUNDING)
    rise = xp.where(small, by_excess, xp.maximum(direct + steps * far * (1 + 4 * ULP), SMALLEST))
    return xp.where(small, by_excess - u, direct), rise


def _excess(z: Any) -> Any:
    """e^{-z} - 1 + z."""
    small = xp.abs(z) < 0.25
    near, far = xp.where(small, z, 0.0), xp.where(small, 0.0, z)
    series = xp.full_like(near, 1 / 15)
    for n in range(14, 2, -1):
        series = (1 - near * series) / n
    return xp.where(small, 0.5 * near * near * (1 - near * series), xp.expm1(-far) + far)


def _log_power(steps: Any, scale: Any, c: Any) -> Any:
    """log E[X^{-c}], rounded up, for c > 0 or -2 < c < -1, by the trapezoidal rule in w = log u.

    E[X^{-c}] - 1 = (1/Gamma(c)) int_0^inf u^{c-1} (E e^{-uX} - e^{-u}) du.
    """
    at = xp.log(c + 2)
    step = 0.6 / xp.sqrt(c + 6)

    def logs(w: Any) -> tuple[Any, Any]:
        transform, rise = _log_transform(steps, scale, xp.exp(w))
        whole = c * w + transform + 4 * ULP * (xp.abs(c * w) + xp.abs(transform)) + 1e-14
        return whole + log1mexp(-xp.maximum(rise, SMALLEST)), whole

    w = xp.linspace(at - 3.0, at + 3.0 + xp.minimum(xp.maximum(c, 0.0) * scale**2, 30.0), _PLACES)
    found = logs(w)[0]
    peak = xp.lookup(w, xp.argmax(found[1:] < found[:-1]))  # first decrease: for large u only a bound is known
    w = peak + _AROUND * step
    terms, whole = logs(w)
    # Terms outside are bounded by geometric sums: of Var[X] u^(c+2)/2 on the left; on the right from the node that
    # makes the total least.
    below = (c + 2) * w[0] + xp.log(0.5 * xp.expm1(scale**2) / steps) - log_expm1((c + 2) * step)
    top = xp.maximum(whole[_PEAK], below)
    rounded = 1e-10 + 4 * _ROUNDING * xp.minimum(steps, xp.exp(w[1:]))
    fall = whole[:-1] - whole[1:] - rounded
    high, inner = whole[1:] - top, terms - top
    above = xp.exp(xp.minimum(high, _MOST)) / xp.expm1(xp.clip(fall, 1e-9, _MOST))
    sums = xp.exp(below - top) + xp.cumsum(xp.exp(xp.minimum(inner, _MOST)))[1:] + above
    uncut = (high < _MOST) & (xp.cummax(inner)[1:] < _MOST)
    total = top + xp.log(step) + xp.log(xp.min(xp.where((fall > 1e-9) & uncut, sums, xp.inf)))
    gamma = xp.log(c + 3) + _AROUND * step
    log_gamma = xp.logsumexp((c + 3) * gamma - xp.exp(gamma)) + xp.log(step)

    def log_error(power: Any) -> Any:
        strip = xp.arctan(2 * math.pi / (step * power))
        return math.log(2) - power * xp.log(xp.cos(strip)) - 2 * math.pi * strip / step

    error = 3 * (xp.exp(log_error(c + 2)) + xp.exp(log_error(c + 3)))
    rounding = 1e-13 + 8 * ULP * (c + 3) * (2 + xp.log(c + 3))
    return xp.softplus(total - log_gamma + xp.log(c * (c + 1) * (c + 2)) + error + rounding)


def log_moment(steps: Any, scale: Any, order: Any, direction: str) -> Any:
    """Upper bound of (order - 1) times the Renyi divergence of order > 1 of one epoch; inf if no bound is known."""

    def power(c: Any) -> Any:
        return xp.where(scale < _LARGEST_SCALE, _log_power(steps, xp.minimum(scale, _LARGEST_SCALE), c), xp.inf)

    if direction == "reverse":
        return power(order - 1)
    n = xp.clip(xp.floor(order), 1.0, LARGEST_ORDER - 1.0)
    moments = _log_central_moments(steps, scale, n)
    share = order - n
    chord = (1 - share) * _remove(moments, steps, scale, n) + share * _remove(moments, steps, scale, n + 1)
    small = order < 1.999999  # near order 2 the integrand decays only like u^(2 - order) at u = 0
    below = xp.cond(small, power, lambda _: xp.asarray(xp.inf), -xp.where(small, order, 1.5))
    return xp.where(below < chord, below, xp.where(order <= LARGEST_ORDER, chord, xp.inf))
