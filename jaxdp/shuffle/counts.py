r"""E[S_+], S = X_1 + ... + X_n, summed over the numbers of reports of each outcome, where contour bounds are wide.

Outcomes 0 and 1 mirror each other: their masses are equal and X_0 > 0 > X_1. J of the n reports have one of the two. C,
D and R reports have the others (up to three, X = 0 included), whose X are at most 0. Let x be the least number of
reports of outcome 0 that makes S positive, b = P[Bin(J-1, 1/2) = x-1] and T = P[Bin(J-1, 1/2) >= x]. The terms are

    P[J, C, D, R] (b (J X_0 + Z)/2 - T (J kappa - Z)),   Z = C X_C + D X_D + R X_R <= 0,  kappa = -(X_0 + X_1)/2.

From J to J - 1, T changes by half a probability. So probabilities are running products and tails are running sums,
taken over many J at once (notebooks/proofs/shuffle.md, section 9).
"""

import functools
import math
from typing import Any, NamedTuple

from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.roots import Evaluation
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import deviance, log_binomial_pmf
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import long_arrays_pay
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import Sum, saddle, sum_at
from jaxdp.shuffle.two_point import tail_ratio

_WIDTH = 6.5  # half width of a window of counts, in tilted standard deviations
_MORE = 12.0  # counts added on either side, because the numbers may be nearly Poisson distributed
_ROOM = 600.0  # carried numbers start at e^-_ROOM and overflow at e^709, so they may rise by 1309 nats
_STEP_ROUNDING = 20 * ULP  # relative error that the carried numbers get in each step of J
_TAIL_ROUNDING = 32 * ULP  # each tail, times this, bounds the error it adds to later tails in any order of summation
_START_ROUNDING = 4e-12  # relative error of the first tail
LANES = 128  # pairs (C, D) that are summed side by side
DEPTH, DEPTH_OF_LANES = 64, 16  # values of J in one step, for one pair (C, D) and for many; 1 unless `long_arrays_pay`


class _Window(NamedTuple):
    """Numbers low, ..., high of reports with one outcome, and log of a bound of the probability of all others."""

    low: Any
    high: Any
    log_missed: Any


def _log_missed(outside: Any, n: Any, share: Any, rest: Any) -> Any:
    """Chernoff's bound of log P[Bin(n, share) is at ``outside`` or beyond]; -inf outside 0..n; rest: 1 - share."""
    mean, others = n * share, n * rest
    fall = mean * deviance((outside - mean) / mean) + others * deviance((mean - outside) / others)
    return xp.where((outside < 0) | (outside > n), -xp.inf, -fall * (1 - 1e-12))


def _window(n: Any, share: Any, rest: Any) -> _Window:
    share, rest = xp.maximum(share, NEXT_TO_ZERO), xp.maximum(rest, NEXT_TO_ZERO)
    variance = n * share * rest
    width = _WIDTH * xp.sqrt(variance) + xp.minimum(_MORE, 3 * _MORE / xp.log1p(3 * _MORE / variance))
    high = xp.minimum(xp.ceil(n * share + width), n)
    low = xp.maximum(xp.floor(n * share - width), 0.0)
    below = xp.where(low > 0, _log_missed(low - 1, n, share, rest), -xp.inf)
    missed = xp.logaddexp(_log_missed(high + 1, n, share, rest), below)
    empty = share <= NEXT_TO_ZERO
    return _Window(xp.where(empty, 0.0, low), xp.where(empty, 0.0, high), xp.where(empty, -xp.inf, missed))


class _Step(NamedTuple):
    """State of the sum over J in each lane, that is for each pair (C, D).

    pmf is b, tail is T, doubt bounds the error of tail; all three are for the next J, times P[J, C, D, R], and scaled
    so that pmf starts at e^-_ROOM.
    """

    pairs: Any  # the next J
    bears: Any  # the largest number of reports of outcome 1, among these J, with which S is positive
    pmf: Any
    tail: Any
    doubt: Any
    sums: Any  # rows: value, slope, sum of moduli (its rounding grows with the number of steps), doubt


def evaluate(law: Law, users: Any, epsilon: Any) -> Evaluation:
    """Bounds of log delta(epsilon) of a law whose outcomes 0 and 1 mirror each other, with at most two other outcomes.

    Time grows with the product of the standard deviations of the numbers of reports J, C, D.
    """
    s = sum_at(law, users, epsilon)
    t = saddle(s)
    pair_share, pair_mass = t.weights[0] + t.weights[1], s.mass[0] + s.mass[1]
    falls, velocity = (xp.append(a[2:], 0.0) for a in (-s.x, s.velocity))
    masses, shares = (xp.append(a[2:], rest) for a, rest in ((s.mass, s.rest), (t.weights, t.rest)))
    lanes, depth = (LANES, DEPTH_OF_LANES) if falls.size > 1 else (1, DEPTH)
    depth = depth if long_arrays_pay() else 1
    order = xp.argsort(-shares)  # the heaviest of the other outcomes is first: it gets the R reports
    falls, velocity, masses, shares = (a[order] for a in (falls, velocity, masses, shares))
    window = _window(users, pair_share, xp.sum(shares))
    others = [_window(users, shares[i], pair_share + xp.sum(shares) - shares[i]) for i in range(1, falls.size)]
    missed = functools.reduce(xp.logaddexp, [w.log_missed for w in (window, *others)])
    log_missed = users * t.log_moment + s.log_factor - 1 - xp.log(t.c) + xp.minimum(missed, 0.0)
    least = xp.maximum(window.low, 1.0)

    # In units of X_0 from here on: in units of max |X|, X_0 may be so small that terms underflow.
    falls, velocity, top_velocity = falls / s.x[0], velocity / s.x[0], s.velocity[0] / s.x[0]
    kappa, pair_velocity = _mean_of_pair(law, s, epsilon) / s.x[0], 0.5 * (top_velocity + s.velocity[1] / s.x[0])
    inverse = s.x[0] / (s.x[0] - s.x[1])
    sizes = [w.high - w.low + 1 for w in others]

    def add(state: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        block, *totals = state
        place = block * lanes + xp.arange(float(lanes))
        counts = []
        for w, size in zip(others, sizes, strict=True):
            above = xp.floor((place + 0.5) / size)
            counts.append(w.low + place - size * above)
            place = above
        zero = xp.zeros(lanes)
        reports = users - sum(counts, start=zero)
        start = xp.minimum(window.high, reports)
        valid = (place < 1) & (start >= least)
        start = xp.where(valid, start, 1.0)
        fixed = sum((falls[i + 1] * count for i, count in enumerate(counts)), start=zero)
        fixed_velocity = sum((velocity[i + 1] * count for i, count in enumerate(counts)), start=zero)

        def taken_and_bears(pairs: Any, reports: Any, fixed: Any) -> tuple[Any, Any]:
            """(-Z, the largest number of reports of outcome 1 with which S is positive) for J = pairs."""
            taken = fixed + falls[0] * (reports - pairs)
            return taken, xp.maximum(xp.ceil((pairs - taken) * inverse) - 1, 0.0)

        def down(step: _Step) -> _Step:
            """Add the terms of the next ``depth`` values of J (columns) in each lane (rows)."""
            down_by = xp.arange(depth + 1.0)
            pairs = step.pairs[:, None] - down_by
            taken, bears = taken_and_bears(pairs, reports[:, None], fixed[:, None])
            # From J to J - 1 bears falls by 0 or 1. Where rounding makes it fall by 2, one fall is put off.
            bears = _running(xp.maximum, xp.cummax, step.bears[:, None], (bears + down_by)[:, 1:]) - down_by
            pairs, taken, bears, after = pairs[:, :-1], taken[:, :-1], bears[:, :-1], bears[:, 1:]
            live = valid[:, None] & (pairs >= least) & (pairs > taken)
            j = xp.maximum(pairs - 1, 1.0)
            stays = after == bears  # then x = J - bears falls by 1
            product, total = ((xp.multiply, xp.cumprod), (xp.add, xp.cumsum))
            ratio = pairs * (masses[0] / pair_mass) / (reports[:, None] - pairs + 1)
            chance = _running(*product, xp.ones((lanes, 1)), ratio)
            pmf = _running(*product, step.pmf[:, None], 2 * xp.where(stays, j - bears, bears) / j)
            half = pmf[:, :-1] * bears / j
            tail = _running(*total, step.tail[:, None], xp.where(stays, half, -half))
            tail = xp.maximum(tail, 0.0)
            doubt = _running(*total, step.doubt[:, None], _TAIL_ROUNDING * tail[:, :-1])
            bearable = xp.concatenate([bears, after[:, -1:]], 1) > 0  # bears = 0 makes T exactly 0
            tail, doubt = (xp.where(bearable, a, 0.0) for a in (tail, doubt))
            pmf, tail, doubt = (a * chance for a in (pmf, tail, doubt))
            following = _Step(step.pairs - depth, after[:, -1], pmf[:, -1], tail[:, -1], doubt[:, -1], step.sums)
            pmf, tail, doubt = (xp.where(live, a[:, :-1], 0.0) for a in (pmf, tail, doubt))
            weight = kappa * pairs + taken
            z_velocity = fixed_velocity[:, None] + velocity[0] * (reports[:, None] - pairs)
            gain, loss = 0.5 * pmf * (pairs - taken), tail * weight
            slope = 0.5 * pmf * (top_velocity * pairs + z_velocity) + tail * (pair_velocity * pairs + z_velocity)
            parts = xp.stack([gain - loss, slope, 0.5 * pmf * (pairs + taken) + loss, doubt * weight])
            return following._replace(sums=step.sums + xp.sum(parts, axis=2))

        _, bears = taken_and_bears(start, reports, fixed)
        log_chance, left = xp.zeros_like(start), users
        parts = xp.concatenate([pair_mass[None], masses[1:], masses[:1]])
        for i, count in enumerate([start, *counts]):
            total = xp.sum(parts[i:])
            chances = (xp.maximum(part / total, NEXT_TO_ZERO) for part in (parts[i], xp.sum(parts[i + 1 :])))
            log_chance = log_chance + log_binomial_pmf(count, left, *chances)
            left = left - count
        log_pmf = log_binomial_pmf(start - 1 - bears, start - 1, 0.5, 0.5)
        first = zero + math.exp(-_ROOM)
        tail = first * tail_ratio(start - bears, start - 1, 1.0, 0)
        step = _Step(start, bears, first, tail, _START_ROUNDING * tail, xp.stack([zero] * 4))
        step = xp.while_loop(lambda step: xp.any(valid & (step.pairs >= least)), down, step)
        net, slope, size, doubt = step.sums
        steps = start - least + 1
        share = _STEP_ROUNDING * (steps + 30) + 5e-15 * (xp.abs(log_chance) + xp.abs(log_pmf))
        error = xp.where(valid, share * size + doubt, 0.0)
        unit = xp.where(valid, log_chance + log_pmf + _ROOM - users * t.log_moment, -xp.inf)

        def scaled(value: Any) -> Any:
            """Sum over lanes of value e^unit, in units of (E e^{cX})^n; e^unit alone may overflow or underflow."""
            size = xp.exp(unit + xp.log(xp.maximum(xp.abs(value), NEXT_TO_ZERO)))
            return xp.sum(xp.where(xp.isnan(value), value, xp.sign(value) * size))

        more = scaled(net), scaled(error), scaled(slope)
        return block + 1, *(total + part for total, part in zip(totals, more, strict=True))

    zero = xp.zeros_like(users + epsilon)
    blocks = math.prod(sizes, start=xp.ones(())) / lanes
    _, net, error, slope = xp.while_loop(lambda state: state[0] < blocks, add, (zero, zero, zero, zero))
    error = error + _STEP_ROUNDING * (blocks + 30) * (xp.abs(net) + error)
    scale = users * t.log_moment + s.log_factor + xp.log(s.x[0])

    def log_of(value: Any) -> Any:
        # NaN, from a sum that overflowed, stays NaN
        return xp.where(value <= 0, -xp.inf, scale + xp.log(xp.where(value <= 0, 1.0, value)))

    single, blur = xp.log(s.single), 1e-15 * (20 + xp.abs(scale))
    summed = log_of(net + error) + blur
    upper = xp.logaddexp(summed, log_missed)
    upper = xp.minimum(xp.where(xp.isnan(upper), xp.inf, upper), single)
    lower = xp.minimum(log_of(net - error) - blur, upper)
    # The sum takes a probability below NEXT_TO_ZERO for NEXT_TO_ZERO, which an upper bound may do.
    lower = xp.where(xp.any((law.base > 0) & (law.base < 2 * NEXT_TO_ZERO)), -xp.inf, lower)
    estimate = xp.where(net > 0, log_of(net), upper)
    slope = -slope / xp.where(net > 0, net, 1.0)
    return Evaluation(upper, xp.where(xp.isnan(lower), -xp.inf, lower), estimate, slope)


def _running(join: Any, accumulate: Any, first: Any, parts: Any) -> Any:
    """Columns first, join(first, p_1), join(first, p_1, p_2), ..., p_i the columns of parts; NumPy goes one by one."""
    begun = xp.concatenate([join(first, parts[:, :1]), parts[:, 1:]], 1)
    return xp.concatenate([first, accumulate(begun, axis=1)], 1)


def _mean_of_pair(law: Law, s: Sum, epsilon: Any) -> Any:
    """kappa = -(X_0 + X_1)/2 from (e^eps - 1) (first_0 + first_1)/2, because the sum X_0 + X_1 loses its digits."""
    minus_x1 = xp.exp(epsilon) * law.second[1] * -xp.expm1(law.loss[1] - epsilon)  # -X_1 times base, not scaled
    return -s.x[1] * xp.expm1(epsilon) * 0.5 * (law.first[0] + law.first[1]) / minus_x1
