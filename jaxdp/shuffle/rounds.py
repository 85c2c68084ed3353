"""Finite pairs (P, Q) that dominate one shuffled round or are dominated by it, for composition and moments.

They come from bounds of log delta on a grid of epsilons. The upper pair's profile is a piecewise linear function of
a = e^epsilon through upper bounds of delta. The lower pair's profile goes through lower bounds, reduced by as much as a
convex delta can lie below a chord. The grid is made twice: the first grid shows where the mass lies that matters for
the composition or the moment; the second grid is fine there. The swap of (P, Q) is (Q, P). Proofs:
notebooks/proofs/shuffle.md, section 11.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log1mexp, log_expm1
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.shuffle.law import Law

POINTS = 384  # points of a grid
_DEEPEST = 40.0  # standard deviations of the loss that the first grid covers evenly; beyond, delta is below 1e-308
_UNBOUNDED = 60.0  # last epsilon of a grid if the loss is not bounded
_FAR, _EDGE = 1 / 8, 1 / 8  # shares of the first grid's points: beyond the even part; next to the largest loss
LOG_SHARE = -23.0  # log of the share of the composed delta that may become mass at infinity
_LEAST_LOG = -690.0  # a smaller log delta does not become mass at infinity: that would be near the smallest double
_TILTS = np.geomspace(1e-3, 1e3, 49)  # tilts z that are tried, as multiples of a guess
_UNTILTED, _AROUND = 0.05, 0.15  # weights of points (1 for the tilted delta): for the untilted delta; elsewhere
EVERY = 8  # one in EVERY points of the first grid gets a long sum
_KEPT = 1e-9  # mass that `of_both_orders` leaves to outcomes of loss 0
_CHARGE = 16 * ULP  # relative error of a slope or chord, for each unit of the logarithms that it is computed from


def by_rows(point: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Apply a one-point function to each row of a batch with NumPy: a row takes milliseconds, nothing is compiled."""
    with on_host():
        return xp.vmap(functools.partial(point, **static))(*args)


def first_grid(law: Law, users: Any, z: Any, *, points: int = POINTS) -> Any:
    """Epsilons from 0 to the largest loss: evenly spaced over the bulk of the loss, then geometric, dense at the end.

    z: 0, or the tilt of a moment, for which the even part is longer by 2 z deviation^2.
    """
    deviation = xp.sqrt(law.chi_square() / users)
    cap = xp.max(xp.where(law.first > 0, law.loss, -xp.inf))
    cap = xp.where(xp.isfinite(cap), cap, _UNBOUNDED)
    even_end = xp.maximum(xp.minimum((_DEEPEST + 2 * z * deviation) * deviation, cap), 1e-6 * cap)
    far, edge = int(_FAR * points), int(_EDGE * points)
    even = even_end * xp.linspace(0.0, 1.0, points - far - edge)
    beyond = even_end * (cap / xp.where(even_end > 0, even_end, 1.0)) ** xp.asarray(np.linspace(0.0, 1.0, far + 1)[1:])
    end = cap - even_end * xp.asarray(np.geomspace(0.3, 1e-5, edge))
    return xp.sort(xp.concatenate([even, beyond[:-1], xp.maximum(end, 0.0), xp.reshape(cap, (1,))]))


def _log_widths(grid: Any) -> Any:
    """Log of the width e^grid[i+1] - e^grid[i] of every cell; -inf for a cell of width 0."""
    step = grid[1:] - grid[:-1]
    return xp.where(step > 0, grid[:-1] + log_expm1(xp.where(step > 0, step, 1.0)), -xp.inf)


def log_falls(grid: Any, logs: Any) -> Any:
    """Log of minus the slope of e^logs in e^epsilon for every cell; -inf where the values do not fall."""
    width = _log_widths(grid)
    rise = logs[1:] - xp.where(logs[:-1] > -xp.inf, logs[:-1], 0.0)
    falls = (logs[:-1] > -xp.inf) & (rise < 0) & (width > -xp.inf)
    return xp.where(falls, logs[:-1] + log1mexp(xp.where(falls, rise, -1.0)) - xp.where(falls, width, 0.0), -xp.inf)


def chorded(grid: Any, logs: Any) -> Any:
    """The log values, lowered to chords of other values: nearly convex in e^epsilon, not below the convex hull."""
    size = grid.shape[0]
    place = xp.arange(size)
    spans = xp.asarray([2**k for k in range(size.bit_length() - 2, -1, -1)] * 2)

    def lower(i: Any, logs: Any) -> Any:
        return lowered(grid, logs, xp.maximum(place - spans[i], 0), xp.minimum(place + spans[i], size - 1))

    return xp.fori_loop(0, spans.shape[0], lower, logs)


def lowered(grid: Any, logs: Any, left: Any, right: Any) -> Any:
    """Each log value, lowered to the chord, linear in e^epsilon, between the values at the indices left and right."""
    before, after, whole = grid - grid[left], grid[right] - grid, grid[right] - grid[left]
    # Where no chord is taken, its formula gets numbers at which it has a derivative.
    between = (before > 0) & (after > 0) & (logs[left] > -xp.inf)
    before, after, whole = (xp.where(between, width, 1.0) for width in (before, after, whole))
    chord = xp.logaddexp(
        log_expm1(before) + logs[right], before + log_expm1(after) + xp.where(between, logs[left], 0.0)
    )
    chord = chord - log_expm1(whole)
    size_of = xp.abs(chord) - xp.log(whole)
    return xp.where(between, xp.minimum(logs, chord + _CHARGE * (8 + size_of)), logs)


def of_both_orders(grid: Any, logs: Any) -> Any:
    """Upper bounds of log delta that hold in both orders, lowered by a line that one of them implies on its left.

    If delta <= h in both orders at a = e^epsilon, then delta <= h + (1 - h) (a - b)/(a + 1) at every b < a. Bounds that
    are 1 up to some epsilon and then fall steeply give no pair (too much mass) without this line. The line is drawn
    slightly too high: outcomes of loss 0 keep a mass (`_KEPT`) that rounding cannot use up.
    """
    # the point whose line is lowest at epsilon = 0
    least = xp.argmin(xp.tanh(0.5 * grid) + 2 * xp.exp(logs - grid) / (1 + xp.exp(-grid)))
    end = grid[least]
    kept = xp.where(logs[least] > -xp.inf, _KEPT, 0.0)  # if h = 0 there is no mass at infinity: mass > 1 is harmless
    h = xp.exp(logs[least]) * (1 + 4 * ULP) + 0.5 * kept * xp.expm1(end)
    line = h + (1 - h - kept) * -xp.expm1(grid - end) / (1 + xp.exp(-end))
    above = xp.log(xp.where(line > 0, line, 1.0))
    line = xp.where(line > 0, xp.minimum(above + (16 + 2 * xp.abs(above)) * ULP, 0.0), -xp.inf)
    return xp.where((least > 0) & (h + kept < 1), xp.where(grid <= end, line, xp.maximum(logs, line)), logs)


def masses_of_falls(falls: Any) -> Any:
    """Log masses under Q at the right ends of cells, rounded up; falls: nonincreasing logs of minus the slopes."""
    following = xp.concatenate([falls[1:], xp.full(1, -xp.inf)])
    live = falls > following
    mass = xp.where(live, falls + log1mexp(xp.where(live, following - falls, -1.0)), -xp.inf)
    charge = xp.where(falls > -xp.inf, falls + xp.log(_CHARGE * (32 + xp.abs(falls))), -xp.inf)
    return xp.logaddexp(mass, charge)


def log_upper_masses(grid: Any, logs: Any) -> Any:
    """Log masses under Q at grid[1:] of a profile above every convex profile that is at most e^logs on the grid.

    It is linear in e^epsilon between points. The delta of the last point is left to the caller as mass at infinity.
    """
    logs = chorded(grid, xp.cummin(logs))
    # A convex function that is nowhere smaller: each slope is made at least as steep as all slopes on its right.
    return masses_of_falls(xp.cummax(log_falls(grid, xp.cummin(logs))[::-1])[::-1])


def upper_pair(grid: Any, logs: Any) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, mass at infinity) of a symmetric pair that dominates the round.

    grid: increasing epsilons from 0. logs: upper bounds of the round's log delta in both orders; the least of them
    becomes the mass at infinity.
    """
    mass = log_upper_masses(grid, logs)
    last = xp.min(logs)
    infinity = xp.where(last > -xp.inf, xp.maximum(xp.exp(last) * (1 + 4 * ULP), SMALLEST), 0.0)
    return joined(grid[1:], mass, mass, infinity, 1.0)


def bounded_pair(grid: Any, logs: Any, largest: Any) -> tuple[Any, Any, Any]:
    """`upper_pair` of concrete numbers; where it gives up, the last point is moved to the largest loss of the round.

    There delta is 0, so that there is no mass at infinity; without it a finite mass above 1 is harmless.
    """
    pair = upper_pair(grid, logs)
    gave_up = pair[2] == 1 and logs[-1] < 0 and np.isfinite(largest)
    return pair if not gave_up else upper_pair(np.append(grid[:-1], largest), np.append(logs[:-1], -np.inf))


def joined(losses: Any, mass: Any, turned: Any, infinity: Any, sign: float) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, mass at infinity) of a pair; the mass that is missing to 1 gets loss 0.

    mass, turned: log masses under Q at the positive ``losses``, for the pair and for its swap. sign: 1 to round the
    masses up, -1 to round them down.
    """
    under_p = mass + losses
    total = xp.sum(xp.exp(under_p)) + xp.sum(xp.exp(turned))
    rest = 1 - infinity - total + sign * 16 * ULP * losses.shape[0]
    # A finite mass above 1 - infinity would increase the composed mass at infinity: give up, infinity = 1.
    infinity = xp.where((rest < 0) & (infinity > 0), 1.0, infinity)
    rest = xp.where(rest > 0, xp.log(xp.where(rest > 0, rest, 1.0)), -xp.inf)
    logs = xp.concatenate([under_p, turned, xp.reshape(rest, (1,))])
    logs = logs + xp.where(logs > -xp.inf, sign * 4 * ULP * (1 + xp.abs(logs)), 0.0)
    return xp.concatenate([losses, -losses, xp.zeros(1)]), logs, infinity


def upper_pair_slopes(grid: Any, logs: Any, made: tuple[Any, Any, Any], slopes: Any) -> tuple[Any, Any]:
    """Derivatives of the log masses under P and of the mass at infinity of ``made = upper_pair(grid, logs)``.

    slopes: derivatives of log delta on the grid. The masses are treated as second differences of delta: the steps that
    made the values convex are not differentiated.
    """
    size = grid.shape[0] - 1
    losses, under_p, infinity = made
    mass = under_p[size : 2 * size]
    width = _log_widths(grid)
    width = xp.append(xp.where(width > -xp.inf, width, xp.inf), xp.inf)
    logs, slopes = xp.append(logs, -xp.inf), xp.append(slopes, 0.0)

    def fall(cell: Any) -> Any:
        """Derivative of minus the slope (in e^epsilon) of a cell, divided by the masses."""
        at_left, at_right = (xp.exp(logs[place] - width[cell] - mass) * slopes[place] for place in (cell, cell + 1))
        return at_left - at_right

    cell = xp.arange(size)
    turned = xp.where(mass > -xp.inf, fall(cell) - fall(cell + 1), 0.0)
    end = infinity * slopes[-2]
    moved = xp.concatenate([turned, turned])
    rest = -(end + xp.sum(xp.exp(under_p[:-1]) * moved)) * xp.exp(-under_p[-1])
    return xp.append(moved, xp.where(under_p[-1] > -xp.inf, rest, 0.0)), end


def tilt(grids: Any, logs: Any, turned: Any, times: Any, log_delta: Any, epsilon: Any) -> tuple[Any, Any]:
    """(z, log delta): the tilt z where the Chernoff bound of a composition is least, and its log delta.

    grids, logs, turned: (rounds, points), the first grids and upper bounds of log delta on them, of each round and of
    its swap. times: (rounds,), how often each round is composed. Either log_delta or epsilon is the target, the other
    is NaN. The results are estimates: they decide how close the pairs are, not whether the bounds hold.
    """
    masses, back = (xp.vmap(log_upper_masses)(grids, each) for each in (logs, turned))
    losses = grids[:, 1:]
    rest = xp.log(xp.maximum(1 - xp.sum(xp.exp(masses + losses) + xp.exp(back), axis=1), SMALLEST))
    deviation = xp.sqrt(xp.sum(times * xp.sum(xp.exp(masses) * losses**2, axis=1)) + SMALLEST)

    def at(z: Any) -> Any:
        parts = xp.logaddexp(masses + (1 + z) * losses, back - z * losses)
        return xp.sum(times * xp.logaddexp(xp.logsumexp(parts, axis=1), rest))

    by_delta = ~xp.isnan(log_delta)
    start = xp.where(by_delta, xp.sqrt(2 * xp.abs(log_delta)), 4.0) / deviation
    z = xp.asarray(_TILTS) * start
    k = xp.lax_map(at, z)
    best = xp.argmin(xp.where(by_delta, (k - log_delta) / z, k - z * epsilon))
    return z[best], xp.where(by_delta, log_delta, xp.minimum(k[best] - z[best] * epsilon, 0.0) - 8.0)


def refined(grid: Any, logs: Any, z: Any, log_end: Any, *, points: int = POINTS, alone: float = 0.0) -> Any:
    """A grid from 0 to the first point with log delta <= log_end, fine where e^(z epsilon) delta is large.

    grid, logs: the first grid and upper bounds of log delta on it. The error of a chord is proportional to the mass in
    its cell times its squared width, so steps are proportional to density^(-1/3). Away from the bulk steps grow slowly,
    because a chord overshoots by a factor e^(z width). alone: weight of the epsilons where log delta is about
    log_end - LOG_SHARE: one rare large loss there makes up the composed delta.
    """
    logs = chorded(grid, xp.cummin(logs))
    off = xp.abs(xp.maximum(logs[1:], -1e300) - (log_end - LOG_SHARE))
    log_end = xp.where(log_end < _LEAST_LOG, -xp.inf, log_end)
    end = xp.min(xp.where(logs <= log_end, grid, grid[-1]))
    ends = xp.minimum(grid, end)
    width = ends[1:] - ends[:-1]

    def shared(part: Any) -> Any:
        return part * width / xp.maximum(xp.sum(part * width), SMALLEST)

    def log_tilted(c: Any) -> Any:
        tilted = xp.where(grid <= end, logs + c * grid, -xp.inf)
        tilted = xp.maximum(tilted - xp.maximum(xp.max(tilted), -1e300), -1e300)
        return xp.maximum(tilted[1:], tilted[:-1])

    tilted = log_tilted(z)
    bulk = xp.exp(tilted) + _UNTILTED * xp.exp(log_tilted(xp.zeros_like(z)))
    steps = shared(bulk ** (1 / 3)) + _AROUND * shared(1 / (1 + xp.sqrt(-tilted))) + alone * shared(xp.exp(-off / 6))
    reached = xp.concatenate([xp.zeros(1), xp.cumsum(steps)])
    epsilons = xp.interp(xp.asarray(np.linspace(0.0, 1.0, points)) * reached[-1], reached, ends)
    return xp.concatenate([xp.zeros(1), epsilons[1:-1], xp.reshape(end, (1,))])


def log_weights(grid: Any, first: Any, logs: Any, z: Any) -> Any:
    """z epsilon + log delta on a grid, minus its maximum; logs: upper bounds of log delta on the grid ``first``."""
    weights = xp.interp(grid, first, xp.maximum(chorded(first, xp.cummin(logs)), -1e300)) + z * grid
    return weights - xp.max(weights)


def _values(logs: Any, sign: float) -> Any:
    """e^logs, rounded up (sign 1) or down (-1)."""
    live = logs > -xp.inf
    safe = xp.where(live, logs, 0.0)
    least = SMALLEST if sign > 0 else 0.0
    return xp.where(live, xp.maximum(xp.exp(safe) * (1 + sign * 4 * ULP * (2 + xp.abs(safe))), least), 0.0)


def masses_below(grid: Any, delta: Bounds) -> Any:
    """Masses under Q at the right ends of cells, of a profile that is nowhere above the true profile.

    delta: bounds of log delta on the grid.
    """
    upper = _values(xp.cummin(delta.upper), 1.0)
    lower = _values(xp.cummax(delta.lower[::-1])[::-1], -1.0)  # the true delta is nonincreasing
    width = grid[1:] - grid[:-1]
    has_width = width > 0
    width = xp.where(has_width, xp.exp(grid[:-1]) * xp.expm1(width), 1.0)
    zero = xp.zeros(1)
    # By convexity the slope in a cell is between the slopes of the cells beside it; every slope is between -1 and 0.
    before = xp.where(has_width, (lower[1:] - upper[:-1]) / width, -1.0)
    after = xp.where(has_width, (upper[1:] - lower[:-1]) / width, 0.0)
    least, most = xp.concatenate([zero - 1, before[:-1]]), xp.concatenate([after[1:], zero])
    # Lines of slopes least and most through the chord's ends meet in a corner, this far below the chord:
    chord = (lower[1:] - lower[:-1]) / width
    falls, rises = xp.maximum(chord - least, 0.0), xp.maximum(most - chord, 0.0)
    total = xp.where(falls + rises > 0, falls + rises, 1.0)
    deep = xp.where(has_width, falls * rises / total * width, 0.0) * (1 + 1e-12) + 16 * ULP * (upper[:-1] + upper[1:])
    value = lower - xp.maximum(xp.concatenate([deep, zero]), xp.concatenate([zero, deep]))
    # Negative values are raised to 0. A chord from a positive value on the left to a raised one could be above the true
    # profile: so the value on the left becomes 0, too.
    left_of_negative = xp.concatenate([value[1:] < 0, xp.full(1, False)])
    value = xp.where(left_of_negative, 0.0, xp.maximum(value, 0.0))
    slope = xp.minimum(hull_slopes(grid, value), 0.0)
    following = xp.concatenate([slope[1:], zero])
    return xp.maximum(following - slope + _CHARGE * (slope + following), 0.0)


def hull_slopes(grid: Any, value: Any) -> Any:
    """Slopes in e^epsilon, for every cell, of the largest convex function below the values.

    The slope of a cell is the maximum over points i left of it of the minimum over points j right of it of slope(i, j).
    """
    place = xp.arange(grid.shape[0])
    width = xp.exp(grid[:, None]) * xp.expm1(xp.maximum(grid[None, :] - grid[:, None], 0.0))
    apart = (place[:, None] < place[None, :]) & (width > 0)
    slope = xp.where(apart, (value[None, :] - value[:, None]) / xp.where(apart, width, 1.0), xp.inf)
    least = xp.cummin(slope[:, ::-1], axis=1)[:, ::-1][:, 1:]
    return xp.max(xp.where(place[:, None] <= place[None, :-1], least, -xp.inf), axis=0)


def _within_one(losses: Any, sides: list[Any]) -> list[Any]:
    """Masses under Q of the pair and of its swap (sides), reduced at the smallest losses to a total mass of at most 1.

    The total mass under P is sum(mass e^loss) of one side plus sum(mass) of the other. Less mass means a lower profile.
    """
    total = [xp.sum(mass) for mass in sides]
    room = (1 - xp.maximum(*(xp.sum(mass * xp.expm1(losses)) for mass in sides))) * (1 - 1e-12)
    share = xp.minimum(xp.maximum(room, 0.0) / xp.maximum(total[0] + total[1], SMALLEST), 1.0)
    larger = [xp.concatenate([xp.cumsum(mass[::-1])[::-1][1:], xp.zeros(1)]) for mass in sides]
    return [xp.clip(share * t - b, 0.0, mass) for t, b, mass in zip(total, larger, sides, strict=True)]


def log_lower_masses(grid: Any, delta: Bounds, turned: Bounds) -> Any:
    """Log masses under Q at grid[1:] of a dominated pair and of its swap, shape (2, cells).

    delta: bounds of log delta of the true pair on the grid. turned: the same for the swap of the true pair.
    """
    losses = grid[1:]
    sides = _within_one(losses, [masses_below(grid, each) for each in (delta, turned)])
    at_zero = [xp.sum(mass * xp.expm1(losses)) for mass in sides]  # these two must be equal
    least = xp.minimum(*at_zero) * (1 - 1e-12)
    shares = [xp.where(total > 0, least / xp.where(total > 0, total, 1.0), 0.0) for total in at_zero]
    masses = xp.stack([mass * share for mass, share in zip(sides, shares, strict=True)])
    live = masses > SMALLEST
    return xp.where(live, xp.log(xp.where(live, masses, 1.0)), -xp.inf)


def lower_pair(grid: Any, z: Any, delta: Bounds, turned: Bounds) -> tuple[Any, Any, Any]:
    """(losses, log masses under P, mass at infinity 0) of a pair that the true pair dominates.

    delta, turned: see `log_lower_masses`. The result is the pair or its swap, whichever has the larger moment at the
    tilt z: x and x' may be exchanged in each round.
    """
    losses, logs = grid[1:], log_lower_masses(grid, delta, turned)
    larger = xp.logsumexp(logs + (1 + z) * losses, axis=1)
    smaller = xp.logsumexp(logs - z * losses, axis=1)
    forward = xp.logaddexp(larger[0], smaller[1]) >= xp.logaddexp(larger[1], smaller[0])
    mass, swapped = xp.where(forward, logs, logs[::-1])
    return joined(losses, mass, swapped, xp.zeros(()), -1.0)
