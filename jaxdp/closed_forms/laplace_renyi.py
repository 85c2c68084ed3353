"""Renyi divergences between Laplace (or discrete Laplace) noise and the same noise shifted."""

import math

from jaxdp.domains import SMALLEST
from jaxdp.numerics.special import log1mexp, log_one_plus, polynomial
from jaxdp.runtime.arrays import xp

_SERIES_BELOW = 0.5  # alpha x below which the power series is used
_BEND = tuple(1 / math.factorial(j) for j in range(2, 18))  # (e^y - 1 - y) / y^2 as a power series
_LONGEST_SHIFT = 1024  # of the discrete Laplace law
_RELATIVE = 1.0 + 2.0**-46  # 1.4e-14: covers the error 4e-15 of `laplace_renyi` and the rounding of the ratio


def laplace_renyi(order, ratio):
    """R_alpha(Laplace(1) + x, Laplace(1)) for alpha > 1 and x = shift / scale >= 0.

    R = log g / (alpha - 1), g = [alpha e^{x(alpha-1)} + (alpha-1) e^{-x alpha}] / (2 alpha - 1). It is computed as
    x + log1p(q expm1(-x (2 alpha - 1))) / (alpha - 1), q = (alpha-1)/(2 alpha - 1), which is accurate for alpha -> 1
    and for alpha = 1e6. This form cancels for x alpha < 1/2; there a power series is used. Relative error 4e-15
    while the result is above 1e-300.

    Reference: Mironov 2017, Corollary 2.
    """
    small = ratio * order < _SERIES_BELOW
    excess = order - 1.0
    far = xp.where(small, 1.0, ratio)
    share = excess / (2 * order - 1.0)
    direct = far + log_one_plus(share * xp.expm1(-far * (2 * order - 1.0))) / excess
    near = xp.where(small, ratio, 0.0)
    return xp.where(small, _small_shift(order, excess, near), direct)


def laplace_renyi_upper(order, ratio):
    """`laplace_renyi` rounded up: covers its error and a few roundings of the ratio; positive for every ratio > 0."""
    return xp.where(ratio > 0, xp.maximum(laplace_renyi(order, ratio) * _RELATIVE, SMALLEST), 0.0)


def _small_shift(order, excess, x):
    """log(1 + z R) / z, z = alpha - 1, R = [alpha h(z x) + z h(-alpha x)] / ((2 alpha - 1) z), h(y) = e^y - 1 - y."""
    bend = excess * polynomial(_BEND, excess * x) + order * polynomial(_BEND, -order * x)
    # x stays next to the order: x^2 may underflow where alpha x^2 does not.
    rise = order * x * (x * (bend / (2 * order - 1.0)))
    return xp.where(excess * rise < 1e-20, rise, log_one_plus(excess * rise) / excess)


def laplace_log_g_slope(order, x):
    """h'(x)/(alpha-1), h = log g_alpha: alpha (e^{x(alpha-1)} - e^{-x alpha}) / ((2 alpha - 1) g_alpha(x)).

    It rises from 0 at x = 0, where it is relatively accurate, to 1 at infinity. g: see `laplace_renyi`.
    """
    shrink = -xp.expm1(-x * (2 * order - 1.0))
    return order * shrink / (order + (order - 1.0) * xp.exp(-x * (2 * order - 1.0)))


def discrete_laplace_renyi(order, rate, shift):
    """R_alpha(P + s, P) of P(x) ~ e^{-a|x|} on the integers, s = 0, 1, ..., 1024; inf for every other shift.

    R = log(M)/z, z = alpha - 1. With w = s - 2j, outcomes j and s - j are paired, so that every term is positive:
    M - 1 = [expm1(zas)(-expm1(-as(1+z)))]/(1+e^{-a}) + tanh(a/2) sum_{1<=j<s/2} e^{-aj} expm1(zaw)(-expm1(-aw(1+z))).
    """
    z = order - 1.0
    j = xp.arange(_LONGEST_SHIFT // 2, dtype=rate.dtype)
    width = shift - 2 * j
    # expm1(t) = e^t (1 - e^{-t}), in logarithms: t may be as large as alpha a s.
    inside = xp.where(width > 0, rate * width, 1.0)
    terms = z * inside + log1mexp(-z * inside) + log1mexp(-inside * order)
    weight = xp.where(j > 0, xp.log(xp.tanh(rate / 2)) - rate * j, -xp.log1p(xp.exp(-rate)))
    log_excess = xp.logsumexp(xp.where(width > 0, terms + weight, -xp.inf))
    # logaddexp(0, log y) = log(1 + y) does not cancel for tiny y.
    value = xp.where(shift > 0, xp.logaddexp(0.0, log_excess), 0.0)
    inside_domain = (shift >= 0) & (shift <= _LONGEST_SHIFT) & (shift == xp.floor(shift)) & (rate > 0) & (z > 0)
    return xp.where(inside_domain, value / z, xp.inf)
