r"""The clones pair summed over the number of clones, one by one: for the laws that the 13 nodes do not settle.

    delta(eps) = sum_j Bin(j; n-1, r) [gain b_j(x-1) - (e^eps - 1) T_j],   gain = (e^eps0 - e^eps)/(e^eps0 + 1),

b_j(i) = P[Bin(j, 1/2) = i], T_j = P[Bin(j, 1/2) >= x], x = floor(tau (j+1)) + 1 (Feldman, McMillan, Talwar 2021,
appendix F). Going down in j, T changes by half a probability, so a count costs a few operations
(notebooks/proofs/shuffle.md, section 9).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.shuffle import contour
from jaxdp.shuffle.law import clones
from jaxdp.shuffle.search import Evaluation
from jaxdp.special import LOG_SQRT_2PI, deviance, log_binomial_pmf, log_one_plus, polynomial, stirling_error

_WIDTH = 7.0  # of the window, in tilted standard deviations on either side
_MORE = 20.0  # counts on either side, for laws like Poisson's
_EXPONENT = 38.0  # the integrand of a tail is followed until it has fallen by so many nats
_POINTS = 32
_ROOM = 600.0  # nats by which the terms may rise above the first one, on top of the 709 above 1
_STEP_ROUNDING = 2e-15  # relative, of all numbers carried from one count to the next: eighteen units of rounding
_START_ROUNDING = 4e-12


@functools.cache
def _legendre() -> tuple[np.ndarray, np.ndarray]:
    points, weights = np.polynomial.legendre.leggauss(_POINTS)
    return (points + 1) / 2, weights / 2


# [(1+y) log(1+y) + (1-y) log(1-y)]/2 = sum_{i>=1} y^{2i} / (2i (2i-1)); 24 terms leave 2e-18 at 1/2. Beyond, where the
# rounding of 1 - y costs 1e-16 j, a value above -720 has j below 5600.
_SERIES = tuple(1.0 / (2 * i * (2 * i - 1)) for i in range(1, 25))


def _log_half_pmf(k: Any, j: Any) -> Any:
    """log P[Bin(j, 1/2) = k] in deviance form, y = (2k - j)/j; absolute error below 1e-12 where it is above -720."""
    y = (2.0 * k - j) / jnp.maximum(j, 1.0)
    small = jnp.abs(y) < 0.5
    near, far = jnp.where(small, y, 0.0), jnp.clip(jnp.where(small, 0.75, y), -1.0, 1.0)
    plus, minus = 1.0 + far, jnp.maximum(1.0 - far, 1e-300)
    direct = 0.5 * (plus * jnp.log(plus) + minus * jnp.log(minus))
    square = near * near
    heads, tails = jnp.maximum(k, 1.0), jnp.maximum(j - k, 1.0)
    away = (
        stirling_error(j)
        - stirling_error(heads)
        - stirling_error(tails)
        - j * jnp.where(small, square * polynomial(_SERIES, square), direct)
        + 0.5 * jnp.log(jnp.maximum(j, 1.0) / (heads * tails))
        - LOG_SQRT_2PI
    )
    return jnp.where((k == 0) | (k == j), -j * math.log(2.0), away)


def _tail_ratio(j: Any, x: Any) -> Any:
    """T_j / b_j(x-1) for 1 <= x <= j+1, 2x > j+1: relative error 3e-14.

    (j-x+1) int_0^1 (1-s)^{x-1} (1+s)^{j-x} ds, the integrand written exp[((j-1)/2) log(1-s^2) - (2x-1-j) atanh s].
    """
    points, weights = map(jnp.asarray, _legendre())
    slope, curve = 2 * x - 1 - j, jnp.maximum(j - 1, 0.0)
    reach = jnp.minimum(2 * _EXPONENT / (slope + jnp.sqrt(slope**2 + 2 * _EXPONENT * curve)), 1.0)
    s = reach * points
    # log(1 - s^2) is multiplied by j: (1 - s)(1 + s) would have lost its digits
    even = 0.5 * jnp.where(s < 0.5, log_one_plus(-s * s), jnp.log((1 - s) * (1 + s)))
    return (j - x + 1) * reach * jnp.sum(weights * jnp.exp((j - 1) * even - slope * jnp.arctanh(s)))


def _log_missed(outside: Any, n: Any, share: Any, rest: Any) -> Any:
    """Chernoff's bound of log P[Bin(n, share) is beyond ``outside``]; -inf where there is nothing beyond."""
    mean, others = n * share, n * rest
    fall = mean * deviance((outside - mean) / mean) + others * deviance((mean - outside) / others)
    return jnp.where((outside < 0) | (outside > n), -jnp.inf, -fall * (1 - 1e-12))


def evaluate(eps0: Any, users: Any, epsilon: Any, *, bound: str, wanted: Any = True) -> Evaluation:
    """Bounds of log delta(epsilon) of the clones pair; the work goes with the deviation of the number of clones."""
    law = clones(eps0, bound)
    s = contour.sum_at(law, users, epsilon)
    t = contour.saddle(s)
    share = jnp.sum(t.weights)
    width = _WIDTH * jnp.sqrt(users * share * t.rest) + _MORE
    high = jnp.minimum(jnp.ceil(users * share + width), users)
    low = jnp.maximum(jnp.floor(users * share - width), 1.0)
    missed = jnp.logaddexp(_log_missed(high + 1, users, share, t.rest), _log_missed(low - 1, users, share, t.rest))
    missed = jnp.where(low <= 1, _log_missed(high + 1, users, share, t.rest), missed)
    log_missed = users * t.log_moment + s.log_factor - 1 - jnp.log(t.c) + jnp.minimum(missed, 0.0)

    trials = users - 1
    rate, rest = 2 * law.base[0], law.rest
    gain, loss = -jnp.expm1(epsilon - eps0) * law.first[0], jnp.expm1(epsilon)
    # 1 - tau; a rounded threshold only shifts a term that is 0 to rounding
    short = jnp.exp(-epsilon) * jnp.expm1(epsilon - eps0) / (jnp.expm1(-eps0) * (1 + jnp.exp(-epsilon)))

    def threshold(j: Any) -> Any:
        return jnp.clip(j + 2 - jnp.ceil(short * (j + 1)), 1.0, j + 1)

    start = high - 1
    x = threshold(start)
    log_weight = log_binomial_pmf(start, trials, rate, rest)
    log_pmf = _log_half_pmf(x - 1, start)
    unit = log_weight + log_pmf + _ROOM

    # Both times the chance of the count, in units of e^unit: chances alone could underflow where these do not. And the
    # sums of both parts and of the slope's terms.
    def down(state: tuple[Any, ...]) -> tuple[Any, ...]:
        j, x, pmf, tail, gains, losses = state
        gains, losses = gains + pmf, losses + tail
        half = pmf * (j - x + 1) / j
        after = threshold(j - 1)
        moved = after < x
        tail = jnp.maximum(jnp.where(moved, tail + half, tail - half), 0.0)
        pmf = jnp.where(moved, 2 * pmf * (x - 1) / j, 2 * half)
        ratio = (j / (users - j)) * (rest / rate)
        return j - 1, after, pmf * ratio, tail * ratio, gains, losses

    zero = jnp.zeros_like(users + epsilon)
    first = zero + math.exp(-_ROOM)
    last = jnp.where(wanted, low - 1, start + 1)
    state = (start + zero, x + zero, first, first * _tail_ratio(start, x), zero, zero)
    state = jax.lax.while_loop(lambda state: state[0] >= last, down, state)
    gains, losses = state[-2:]
    steps = start - last + 1
    slack = (_STEP_ROUNDING * (steps + 30)) * (gain * gains + loss * losses)
    net = gain * gains - loss * losses
    start_error = _START_ROUNDING + 1e-15 * (jnp.abs(log_weight) + jnp.abs(log_pmf))

    def log_of(value: Any) -> Any:
        # NaN, of sums that overflow, stays NaN
        return jnp.where(value <= 0, -jnp.inf, unit + jnp.log(jnp.where(value <= 0, 1.0, value)))

    single = jnp.log(s.single)
    upper = jnp.logaddexp(log_of(net + slack) + start_error, log_missed)
    upper = jnp.minimum(jnp.where(jnp.isnan(upper), jnp.inf, upper), single)
    lower = jnp.minimum(log_of(net - slack) - start_error, upper)
    estimate = jnp.where(net > 0, log_of(net), upper)
    slope = -jnp.exp(epsilon) * (losses + law.second[0] * gains) / jnp.where(net > 0, net, 1.0)
    return Evaluation(upper, jnp.where(jnp.isnan(lower), -jnp.inf, lower), estimate, slope)
