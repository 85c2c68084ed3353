r"""E[(X_1 + ... + X_n)_+] summed over how often each outcome occurs: for the laws that the nodes do not settle.

Outcomes 0 and 1 mirror each other, J of the n reports are one of them; C, D, R reports have the (up to three) others,
of which none is above 0. With b = P[Bin(J-1, 1/2) = x-1], T = P[Bin(J-1, 1/2) >= x], x the least number of reports of
outcome 0 that makes the sum positive, the terms are

    P[J, C, D, R] (b (J X_0 + Z)/2 - T (J kappa - Z)),   Z = C X_C + D X_D + R X_R <= 0,  kappa = -(X_0 + X_1)/2.

Going down in J, T changes by half a probability, so a term costs a few operations (notebooks/proofs/shuffle.md,
section 9).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.rounding import ULP
from jaxdp.shuffle import contour
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.search import Evaluation
from jaxdp.special import LOG_SQRT_2PI, deviance, log_binomial_pmf, log_one_plus, polynomial, stirling_error

_WIDTH = 6.5  # of the window, in tilted standard deviations on either side
_MORE = 12.0  # counts on either side, for laws like Poisson's
_EXPONENT = 38.0  # the integrand of a tail is followed until it has fallen by so many nats
_POINTS = 32
_ROOM = 600.0  # nats by which the terms may rise above the first one, on top of the 709 above 1
_STEP_ROUNDING = 20 * ULP  # relative, of what is carried from one count to the next
_TAIL_ROUNDING = 5 * ULP  # of each tail, to all later ones
_START_ROUNDING = 4e-12  # of the first tail
_LEAST = 1e-300


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


class _Window(NamedTuple):
    """Counts low, ..., high of one outcome among the reports, and a bound of the log chance of any other count."""

    low: Any
    high: Any
    log_missed: Any


def _log_missed(outside: Any, n: Any, share: Any, rest: Any) -> Any:
    """Chernoff's bound of log P[Bin(n, share) is beyond ``outside``]; -inf where there is nothing beyond."""
    mean, others = n * share, n * rest
    fall = mean * deviance((outside - mean) / mean) + others * deviance((mean - outside) / others)
    return jnp.where((outside < 0) | (outside > n), -jnp.inf, -fall * (1 - 1e-12))


def _window(n: Any, share: Any, rest: Any) -> _Window:
    share, rest = jnp.maximum(share, _LEAST), jnp.maximum(rest, _LEAST)
    variance = n * share * rest
    width = _WIDTH * jnp.sqrt(variance) + jnp.minimum(_MORE, 3 * _MORE / jnp.log1p(3 * _MORE / variance))
    high = jnp.minimum(jnp.ceil(n * share + width), n)
    low = jnp.maximum(jnp.floor(n * share - width), 0.0)
    below = jnp.where(low > 0, _log_missed(low - 1, n, share, rest), -jnp.inf)
    missed = jnp.logaddexp(_log_missed(high + 1, n, share, rest), below)
    empty = share <= _LEAST
    return _Window(jnp.where(empty, 0.0, low), jnp.where(empty, 0.0, high), jnp.where(empty, -jnp.inf, missed))


class _Step(NamedTuple):
    """One J of all lanes. pmf, tail and doubt, a bound of the tail's error, have the chance of the counts as factor."""

    pairs: Any
    bears: Any  # the largest number of reports of outcome 1 with which the sum is positive
    pmf: Any
    tail: Any
    doubt: Any
    sums: Any


class _Sums(NamedTuple):
    """Sums over J: of pmf and tail times their factors, of doubt, of sizes, and of the parts of the slope."""

    gain: Any
    loss: Any
    doubt: Any
    size: Any
    slope: Any


def evaluate(law: Law, users: Any, epsilon: Any, wanted: Any = True, *, lanes: int = 1) -> Evaluation:
    """Bounds of log delta(epsilon) of a law whose outcomes 0 and 1 mirror each other, with at most two more.

    The work goes with the deviations of the numbers of reports of each outcome. wanted: False where nothing is summed.
    lanes: so many pairs (C, D) are summed beside each other.
    """
    s = contour.sum_at(law, users, epsilon)
    t = contour.saddle(s)
    pair_share, pair_mass = t.weights[0] + t.weights[1], s.mass[0] + s.mass[1]
    falls, velocity = (jnp.append(a[2:], 0.0) for a in (-s.x, s.velocity))
    masses, shares = (jnp.append(a[2:], rest) for a, rest in ((s.mass, s.rest), (t.weights, t.rest)))
    order = jnp.argsort(-shares)  # the heaviest has the rest of the reports
    falls, velocity, masses, shares = (a[order] for a in (falls, velocity, masses, shares))
    window = _window(users, pair_share, jnp.sum(shares))
    others = [_window(users, shares[i], pair_share + jnp.sum(shares) - shares[i]) for i in range(1, falls.size)]
    missed = functools.reduce(jnp.logaddexp, [w.log_missed for w in (window, *others)])
    log_missed = users * t.log_moment + s.log_factor - 1 - jnp.log(t.c) + jnp.minimum(missed, 0.0)
    least = jnp.where(wanted, jnp.maximum(window.low, 1.0), users + 1)

    # all in units of X_0, next to which the others may underflow
    falls, velocity, own = falls / s.x[0], velocity / s.x[0], s.velocity[0] / s.x[0]
    kappa, speed = _mean_of_pair(law, s, epsilon) / s.x[0], 0.5 * (own + s.velocity[1] / s.x[0])
    inverse = s.x[0] / (s.x[0] - s.x[1])
    sizes = [w.high - w.low + 1 for w in others]

    def add(state: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        block, *totals = state
        place = block * lanes + jnp.arange(float(lanes))
        counts = []
        for w, size in zip(others, sizes, strict=True):
            above = jnp.floor((place + 0.5) / size)
            counts.append(w.low + place - size * above)
            place = above
        reports = users - sum(counts)
        start = jnp.minimum(window.high, reports)
        valid = (place < 1) & (start >= least)
        start = jnp.where(valid, start, 1.0)
        fixed = sum((falls[i + 1] * count for i, count in enumerate(counts)), start=0.0)
        moving = sum((velocity[i + 1] * count for i, count in enumerate(counts)), start=0.0)

        def most(pairs: Any) -> tuple[Any, Any]:
            """What the other outcomes take away, and how many reports of outcome 1 the sum then bears."""
            taken = fixed + falls[0] * (reports - pairs)
            return taken, jnp.maximum(jnp.ceil((pairs - taken) * inverse) - 1, 0.0)

        def down(step: _Step) -> _Step:
            j, bears, sums = step.pairs - 1, step.bears, step.sums
            taken, _ = most(step.pairs)
            live = valid & (step.pairs >= least) & (step.pairs > taken)
            pmf, tail, doubt = (jnp.where(live, a, 0.0) for a in (step.pmf, step.tail, step.doubt))
            weight = kappa * step.pairs + taken
            spent = moving + velocity[0] * (reports - step.pairs)
            sums = _Sums(
                sums.gain + pmf * (step.pairs - taken),
                sums.loss + tail * weight,
                sums.doubt + doubt * weight,
                sums.size + pmf * (step.pairs + taken),
                sums.slope + 0.5 * pmf * (own * step.pairs + spent) + tail * (speed * step.pairs + spent),
            )
            after = jnp.clip(most(j)[1], bears - 1, bears)
            half = pmf * bears / j
            moved = after == bears  # so does the least number of reports of outcome 0
            following = jnp.maximum(jnp.where(moved, tail + half, tail - half), 0.0)
            ratio = step.pairs * (masses[0] / pair_mass) / (reports - j)
            pmf = jnp.where(moved, 2 * pmf * (j - bears) / j, 2 * half)
            doubt = doubt + _TAIL_ROUNDING * tail
            following, doubt = (jnp.where(after > 0, a * ratio, 0.0) for a in (following, doubt))  # no tail: exactly 0
            return _Step(j, after, pmf * ratio, following, doubt, sums)

        _, bears = most(start)
        log_chance, left = jnp.zeros_like(start), users
        parts = jnp.concatenate([pair_mass[None], masses[1:], masses[:1]])
        for i, count in enumerate([start, *counts]):
            total = jnp.sum(parts[i:])
            chances = (jnp.maximum(part / total, _LEAST) for part in (parts[i], jnp.sum(parts[i + 1 :])))
            log_chance = log_chance + log_binomial_pmf(count, left, *chances)
            left = left - count
        log_pmf = _log_half_pmf(start - 1 - bears, start - 1)
        zero = jnp.zeros_like(start)
        first = zero + math.exp(-_ROOM)
        tail = first * jax.vmap(_tail_ratio)(start - 1, start - bears)
        step = _Step(start, bears, first, tail, _START_ROUNDING * tail, _Sums(*([zero] * 5)))
        sums = jax.lax.while_loop(lambda step: jnp.any(valid & (step.pairs >= least)), down, step).sums
        steps = start - least + 1
        share = _STEP_ROUNDING * (steps + 30) + 1e-15 * (jnp.abs(log_chance) + jnp.abs(log_pmf))
        error = jnp.where(valid, share * (0.5 * sums.size + sums.loss) + sums.doubt, 0.0)
        unit = jnp.where(valid, log_chance + log_pmf + _ROOM - users * t.log_moment, -jnp.inf)

        def scaled(value: Any) -> Any:
            """The lanes' sum, in units of e^(n log E e^{cX}); neither factor need be a number of its own."""
            size = jnp.exp(unit + jnp.log(jnp.maximum(jnp.abs(value), _LEAST)))
            return jnp.sum(jnp.where(jnp.isnan(value), value, jnp.sign(value) * size))

        more = scaled(0.5 * sums.gain - sums.loss), scaled(error), scaled(sums.slope)
        return block + 1, *(total + part for total, part in zip(totals, more, strict=True))

    zero = jnp.zeros_like(users + epsilon)
    blocks = jnp.where(wanted, math.prod(sizes, start=jnp.ones(())), 0.0) / lanes
    _, net, error, slope = jax.lax.while_loop(lambda state: state[0] < blocks, add, (zero, zero, zero, zero))
    error = error + _STEP_ROUNDING * (blocks + 30) * (jnp.abs(net) + error)
    scale = users * t.log_moment + s.log_factor + jnp.log(s.x[0])

    def log_of(value: Any) -> Any:
        # NaN, of sums that overflow, stays NaN
        return jnp.where(value <= 0, -jnp.inf, scale + jnp.log(jnp.where(value <= 0, 1.0, value)))

    single, blur = jnp.log(s.single), 1e-15 * (20 + jnp.abs(scale))
    summed = log_of(net + error) + blur
    upper = jnp.logaddexp(summed, log_missed)
    upper = jnp.minimum(jnp.where(jnp.isnan(upper), jnp.inf, upper), single)
    lower = jnp.minimum(log_of(net - error) - blur, upper)
    estimate = jnp.where(net > 0, log_of(net), upper)
    slope = -slope / jnp.where(net > 0, net, 1.0)
    return Evaluation(upper, jnp.where(jnp.isnan(lower), -jnp.inf, lower), estimate, slope)


def _mean_of_pair(law: Law, s: contour.Sum, epsilon: Any) -> Any:
    """-(X_0 + X_1)/2, which would lose its digits as a difference: (e^eps - 1) (first_0 + first_1)/2, scaled."""
    own = jnp.exp(epsilon) * law.second[1] * -jnp.expm1(law.loss[1] - epsilon)  # -X_1, scaled like the former
    return -s.x[1] * jnp.expm1(epsilon) * 0.5 * (law.first[0] + law.first[1]) / own
