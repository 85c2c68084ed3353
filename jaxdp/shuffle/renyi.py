"""Renyi divergence of one shuffled round: a double integral over contours, with a certificate.

A law of X gives a pair (P, Q) that dominates the round: dP/dM = A/n and dQ/dM = B/n, where A and B are the sums of
R_x(y)/m(y) and R_x'(y)/m(y) over n independent reports y. Its moment is E[A^alpha B^(1-alpha)]/n.

    Gamma(alpha) B^-alpha = integral over s > 0 of s^alpha e^(-s B) ds/s,
    A^alpha / Gamma(alpha + 1) = integral over t of e^(t A) t^(-alpha-1) dt/(2 pi i),

t on a contour around 0, and E[B e^(t A - s B)] is a product over the users. Proofs: notebooks/proofs/shuffle.md,
section 12.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp.numerics.power_excess import log_power_excess
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import exp_excess

_OUTER, _INNER = 192, 80  # nodes in log s; nodes on half a contour in t
_TERMS = 120.0  # units of rounding charged for sums over all nodes
_COARSE = 64  # cells of the grid on which the range of s is found
_SMALL = 38.0  # the errors of truncation and aliasing are about e^-38 of the moment
_TILT = 0.2, 3.5  # t times the mean of A is order - min(0.2 order, 3.5 sqrt(order)) at the centre of a contour
_STEP, _SHIFT = 0.26, 0.52  # of the inner sum: step times the root of the tilt; largest shift of the contour
_SHIFTS = _SHIFT * np.array([1.0, 0.7, 0.5, 0.35, 0.25])  # shifts that are tried in the bound of aliasing
_HALVINGS = 14  # of the bracket for the centre of a contour
_CLOSE = 0.25  # largest |m - 1| for which log m is computed from m - 1
_LARGEST = 30.0  # largest exponent for which e^x - 1 is used
_LOG_SERIES = tuple(2.0 / (2 * i + 3) for i in range(9))  # of (log((1+w)/(1-w)) - 2 w)/w^3, in powers of w^2
_UNDER = -600.0  # e^-_UNDER must not overflow


class _Sums(NamedTuple):
    """The law of A/n and B/n, each scaled to mean 1.

    a, b: what one report adds, by outcome. mass: probabilities of the outcomes. rest: probability that it adds nothing.
    """

    a: Any
    b: Any
    mass: Any
    rest: Any
    users: Any


class _Moment(NamedTuple):
    """G = E[(B/n) e^(t A/n - s B/n)]: log G - (t - s) and its absolute error; log of the moduli summed in G."""

    log_ratio: Any
    error: Any
    log_moduli: Any


def _log_excess(p: Any) -> Any:
    """log(1 + p) - p with a small relative error, for complex |p| < 1/4."""
    w = p / (2 + p)
    square = w * w
    series = _LOG_SERIES[-1]
    for coefficient in _LOG_SERIES[-2::-1]:
        series = series * square + coefficient
    return w * (square * series - p)


def _with_derivative(value: Any, other: Any) -> Any:
    """The value with the derivative of another formula, whose program is smaller."""
    return xp.stop_gradient(value - other) + other if not xp.eager else value


def _modulus(x: Any) -> Any:
    """|x|, where the square does not overflow; XLA compiles `abs` of a complex number to a longer program."""
    return xp.sqrt(xp.real(x) ** 2 + xp.imag(x) ** 2)


def _moment(sums: _Sums, t: Any, s: Any) -> _Moment:
    """The moment at t (real or complex) and real s of one shape."""
    n, size, s = sums.users, sums.a.shape[0], s + xp.zeros_like(xp.real(t))
    y = t[..., None] * sums.a - s[..., None] * sums.b
    share, step = sums.mass * sums.b * n, (t - s) / n
    top = xp.stop_gradient(xp.max(xp.real(y), axis=-1))
    lift = xp.maximum(top, _UNDER)
    scale, none, grown = xp.exp(top - lift), sums.rest * xp.exp(-lift), xp.exp(y - top[..., None])
    reach = xp.stop_gradient(_modulus(t)[..., None] * sums.a + s[..., None] * sums.b)
    small = xp.max(reach, axis=-1) < 0.5
    # m - 1, for a report of the others, and the same for one report under Q. As E a = E b = 1, the first order of m - 1
    # is `step`. Where all y are small the rest of m - 1 is summed by itself, so that no digits cancel.
    excess = exp_excess(xp.where(top[..., None] < _LARGEST, y, 0.0))
    m, one = xp.sum(sums.mass * (excess + y), axis=-1), xp.sum(share * (excess + y), axis=-1)
    second_order = xp.where(small, xp.sum(sums.mass * excess, axis=-1), m - step)

    def log_of(less_one: Any, near: Any, direct: Any, height: Any) -> tuple[Any, Any]:
        """(near + log(1 + less_one) - less_one if |less_one| is small, else log direct + height; whether it is)."""
        close = (top < _LARGEST) & (_modulus(less_one) < _CLOSE)
        direct = xp.log(xp.where(direct == 0, 1e-300, direct)) + height
        return _with_derivative(
            xp.where(close, near + _log_excess(xp.where(close, less_one, 0.0)), direct), direct
        ), close

    others, close = log_of(m, second_order, scale * xp.sum(sums.mass * grown, axis=-1) + none, lift - step)
    first, close_first = log_of(one, one, xp.sum(share * grown, axis=-1), top)

    moduli = xp.exp(xp.stop_gradient(xp.real(y)) - top[..., None])
    whole, of_first = scale * xp.sum(sums.mass * moduli, axis=-1) + none, xp.sum(share * moduli, axis=-1)
    log_moduli = xp.log(of_first) + top + (n - 1) * (xp.log(whole) + lift) - xp.real(t - s)
    # Errors, in units of rounding: of e^y - 1 and of e^y - 1 - y
    linear = 1 + moduli * xp.exp(xp.minimum(top, _LARGEST))[..., None] * (1 + reach)
    linear = xp.where(small[..., None], 2 * reach, linear)
    square = xp.where(small[..., None], linear * reach, linear)
    near = xp.sum(sums.mass * square, axis=-1) + xp.sum(sums.mass * linear, axis=-1) ** 2
    error = (n - 1) * xp.where(close, near, 1 + scale * xp.sum(sums.mass * moduli * reach, axis=-1) / whole)
    tilted = 1 + xp.sum(share * moduli * reach, axis=-1) / of_first
    error = error + xp.where(close_first, xp.sum(share * linear, axis=-1), tilted) + _modulus(step)
    error = 2 * (size + 12) * ULP * (error + xp.where(small, 0.0, _modulus(t - s)))
    return _Moment(first + (n - 1) * others - step, *xp.stop_gradient((error, log_moduli)))


def _log_real(sums: _Sums, t: Any, s: Any) -> Any:
    """log G at real t and s, rounded up."""
    found = _moment(sums, t, s)
    return found.log_ratio + (t - s) + found.error


def _mean(sums: _Sums, t: Any, s: Any) -> Any:
    """The mean of A/n under the weight B e^(t A/n - s B/n), for real t and s."""
    y = t[..., None] * sums.a - s[..., None] * sums.b
    top = xp.max(y, axis=-1)
    lift = xp.maximum(top, _UNDER)
    grown, scale = sums.mass * xp.exp(y - top[..., None]), xp.exp(top - lift)
    of_one = xp.sum(sums.b * grown * sums.a, axis=-1) / xp.sum(sums.b * grown, axis=-1)
    whole = scale * xp.sum(grown, axis=-1) + sums.rest * xp.exp(-lift)
    return of_one + (sums.users - 1) * scale * xp.sum(grown * sums.a, axis=-1) / whole


def _centre(sums: _Sums, s: Any, tilt: Any) -> Any:
    """The t at which t times `_mean` is about ``tilt``; bounds hold at any t."""
    least, most = xp.min(xp.where(sums.b > 0, sums.a, xp.inf)), sums.users * xp.max(sums.a)
    low, high = (xp.log(tilt / a) + xp.zeros_like(s) for a in (most, least))
    middle, _ = bisect(lambda log_t: xp.exp(log_t) * _mean(sums, xp.exp(log_t), s) >= tilt, low, high, _HALVINGS)
    return xp.stop_gradient(xp.exp(middle))


class _Contour(NamedTuple):
    """t = c z^2, z = 1 + i sinh(x), at the nodes x = h k, k = 0, 1, ..., and their mirror images."""

    t: Any
    log_weight: Any  # log |cosh(x) z^(-2 order - 1) h|, plus log 2 for k > 0
    phase: Any  # of z^(-2 order - 1)
    last: Any  # the last x


def _contour(c: Any, h: Any, order: Any) -> _Contour:
    """The contours with centres c and steps h; c and h have one shape."""
    x = h[..., None] * xp.arange(float(_INNER))
    sinh = xp.sinh(x)
    t = xp.complex(1 - sinh * sinh, 2 * sinh) * c[..., None]
    twice = xp.asarray(np.where(np.arange(_INNER) > 0, math.log(2.0), 0.0))
    log_weight = twice + xp.log(h)[..., None] - 2 * order * xp.log(xp.cosh(x))
    return _Contour(t, log_weight, -(2 * order + 1) * xp.arctan(sinh), x[..., -1:])


def _contour_error(log_moment: Callable[[Any], Any], c: Any, h: Any, last: Any, order: Any) -> Any:
    """Error of the inner sum: aliasing on both sides of the contour, and truncation. log_moment: t -> log G."""
    shift = xp.minimum(1.0, 37 * h)[..., None] * xp.asarray(_SHIFTS)
    sides = 1 + xp.stack([-xp.sin(shift), xp.sin(shift)], axis=-2)
    end = xp.sinh(last)
    square = xp.concatenate([xp.reshape(sides**2, (*xp.shape(h), -1)), 1 - end * end], axis=-1)
    logs = log_moment(c[..., None] * square)
    log_alias = xp.log(xp.asarray([[2.0], [5.0]])) - xp.log(xp.expm1(2 * math.pi * shift / h[..., None]))[..., None, :]
    alias = xp.reshape(logs[..., :-1], xp.shape(sides)) - (2 * order + 1) * xp.log(sides) + log_alias
    cut = logs[..., -1:] - 2 * order * xp.log(xp.cosh(last)) - xp.log(order * xp.tanh(last))
    return xp.sum(xp.exp(xp.min(alias, axis=-1)), axis=-1) + xp.exp(cut)[..., 0]


def _outer_alias(step: Any, order: Any) -> Any:
    """Relative error of the outer sum."""
    turn = xp.minimum(1.3, xp.arctan(2 * math.pi / (step * order)))
    return 2 * xp.exp(-order * xp.log(xp.cos(turn))) / xp.expm1(2 * math.pi * turn / step)


def _range(sums: _Sums, tilt: Any, order: Any) -> tuple[Any, Any, Any, Any]:
    """(first and last node in log s, log of a unit, bound of the terms beyond these nodes in this unit)."""
    start = _centre(sums, xp.zeros(1), tilt)
    log_start, least = xp.log(start[0]), xp.min(xp.where(sums.b > 0, sums.b, xp.inf))
    low = log_start - _SMALL / order - 1
    high = xp.log((order + _SMALL + 10 * xp.sqrt(order)) / least)
    edges = low + (high - low) * xp.asarray(np.linspace(0.0, 1.0, _COARSE + 1))
    s, width = xp.exp(edges), (high - low) / _COARSE
    c = _centre(sums, s, tilt)
    log_moments = _log_real(sums, xp.concatenate([start, c]), xp.concatenate([xp.zeros(1), s]))
    logs = xp.log(2 / math.pi * order) + order * (edges - xp.log(c)) + log_moments[1:]
    unit = xp.maximum(xp.max(logs), 0.0)
    cells = xp.exp(logs[:-1] + order * width - unit) * (1 / order + width)
    last = xp.exp(logs[-1] - unit) / (s[-1] * least - order)
    right = xp.concatenate([xp.cumsum(cells[::-1], axis=0)[::-1], xp.zeros(1)]) + last
    place = xp.minimum(xp.sum(xp.where(right > math.exp(-_SMALL), 1, 0)), _COARSE)
    left = 2 / math.pi * xp.exp(order * (low - log_start) + log_moments[0] - unit)
    return low, edges[place], unit, left + right[place]


def _log_moment_less_one(sums: _Sums, order: Any) -> Any:
    """Upper bound of log(E[(A/n)^order (B/n)^(1-order)] - 1)."""
    tilt = order - xp.minimum(_TILT[0] * order, _TILT[1] * xp.sqrt(order))
    log_share = xp.log(order / math.pi)
    low, high, unit, beyond = xp.stop_gradient(_range(sums, tilt, order))
    blocks = xp.most(xp.ceil((high - low) / (16 * xp.minimum(0.17, 0.5 / xp.sqrt(order))) + 0.1))
    nodes = int(np.fmin(16 * blocks, _OUTER))
    step = (high - low) / (nodes - 1)
    alias = _outer_alias(step, order)

    def block(log_s: Any) -> tuple[Any, Any]:
        """(sum, error) over nodes in log s of the moment's terms less those of A = B = n, where they count."""
        s = xp.exp(log_s)
        c = _centre(sums, s, tilt)
        h = xp.stop_gradient(_STEP / xp.sqrt(xp.maximum(xp.maximum(order, 16.0), 1.5 * c * _mean(sums, 1.5 * c, s))))
        contour = _contour(c, h, order)
        found = _moment(sums, contour.t, s[:, None])
        scale = log_share + order * (log_s - xp.log(c)) - unit
        size = scale[:, None] + contour.log_weight + xp.real(contour.t) - s[:, None]
        # The terms of A = B = n are subtracted under the sum, which keeps digits. Where this contour does not suit them
        # they are negligible, and left in: the bound only grows.
        near = (c - tilt) - order * xp.log(c / tilt) < 16
        mild = near[:, None] & (xp.real(found.log_ratio) < _LARGEST)
        other = xp.exp(xp.where(near[:, None], size, -xp.inf))
        small = xp.where(mild, found.log_ratio, 0.0)
        full = xp.exp(size + found.log_ratio) - other
        change = _with_derivative(xp.where(mild, other * (exp_excess(small) + small), full), full)
        angle = xp.imag(contour.t) + contour.phase
        terms = xp.real(change) * xp.cos(angle) - xp.imag(change) * xp.sin(angle)
        logs = order * (xp.abs(log_s) + xp.abs(xp.log(c))) + s + xp.abs(unit)
        blur = ULP * (
            _TERMS + 8 * (logs[:, None] + xp.abs(contour.phase) + xp.abs(contour.log_weight) + _modulus(contour.t))
        )
        rounding = xp.exp(found.log_moduli + size) * found.error + _modulus(xp.stop_gradient(change)) * blur
        error = xp.sum(rounding, axis=1) + _contour_error(
            lambda t: _log_real(sums, t, s[:, None]) + scale[:, None], c, h, contour.last, order
        )
        both = xp.exp(xp.where(near, scale + c - s, -xp.inf))
        error = error + both * _contour_error(lambda t: t - c[:, None], c, h, contour.last, order)
        return xp.sum(terms), xp.stop_gradient(xp.sum(error))

    together = 16 if sums.a.shape[0] <= 16 else 1  # nodes in log s that are computed at once, to save memory
    sums_of_blocks, errors = xp.lax_map(block, xp.reshape(low + step * xp.arange(float(nodes)), (-1, together)))
    total = step * (xp.sum(sums_of_blocks) + xp.sum(errors)) + beyond + 2 * alias * xp.exp(-unit)
    total = xp.where((alias < 1) & ~xp.isnan(total), total / (1 - alias), xp.inf)
    return unit + xp.log(xp.maximum(total, 1e-300))


def divergence(law: Law, users: Any, order: Any) -> Any:
    """Upper bound of the Renyi divergence, of a finite order > 1, of the pair that the law gives.

    The bound of a second order may be the better one: of a larger order because R grows with it; of a smaller order
    because (order - 1) R has a slope of at most the largest loss.
    """
    live, top = law.base > 0, law.largest_loss()
    alone = ((law.first > 0) | (law.second > 0)) & ~live
    kept = [xp.where(xp.any(alone), xp.sum(xp.where(live, side, 0.0)), 1.0) for side in (law.first, law.second)]
    some = (kept[0] > 0) & (kept[1] > 0)
    first, second = (xp.where(some, x, 1.0) for x in kept)
    base = xp.where(live, law.base, 1.0) * users
    a, b = (xp.where(live, side / (base * x), 0.0) for side, x in ((law.first, first), (law.second, second)))
    a, b = (xp.where(live, side, side[xp.argmax(live)]) for side in (a, b))  # no outlier where there is no mass
    sums = _Sums(a, b, xp.where(live, law.base, 0.0), law.rest, users)
    # The outcomes with base 0, and all others as one outcome
    ratio = xp.log(first) - xp.log(second)
    losses = xp.append(xp.where(alone & (law.second > 0), law.loss, 0.0), ratio)
    told = losses != 0
    weights = xp.log(xp.where(told, xp.append(law.second, second), 1.0))

    def log_moment(order: Any) -> Any:
        """log of 1 + sum Q f(P/Q), f(t) = t^order - 1 - order (t - 1), rounded up."""
        apart = xp.where(told, weights + log_power_excess(xp.where(told, losses, 1.0), order), -xp.inf)
        within = xp.log(second) + order * ratio + _log_moment_less_one(sums, order)
        logs = xp.append(apart, xp.where(some, within, -xp.inf))
        return xp.logaddexp(0.0, xp.logsumexp(logs)) * (1 + 64 * ULP)

    nearby = xp.clip(order, 1.02, xp.maximum(8.0, 32 / xp.where(top > 0, top, 1.0)))
    orders = xp.stack([order, nearby])[: 1 + int(min(xp.most(xp.where(order == nearby, 0.0, 1.0)), 1.0))]
    logs = xp.lax_map(log_moment, orders) + xp.maximum(order - orders, 0.0) * xp.where(orders < order, top, 0.0)
    value = xp.min(logs / (xp.maximum(order, orders) - 1)) * (1 + 8 * ULP)
    endless = xp.any((law.first > 0) & (law.second == 0)) | xp.isnan(value)
    return xp.where(endless, xp.inf, value)
