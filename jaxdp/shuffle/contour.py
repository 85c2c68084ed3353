r"""E[(X_1 + ... + X_n)_+] from one contour integral with weight 1/z^2, certified from both sides.

    delta(eps) = (1/n) e^K(c) (h/pi) sum' Re[phi(jh)^n / (c + ijh)^2] + ...,   K(z) = n log E e^{zX},  phi(t) =
    M(c+it)/M(c)

What is charged: the alias terms, the part beyond the last node, rounding. Proofs: notebooks/proofs/shuffle.md, sections
5 to 8. Every X is divided by the largest |X|, so that nothing overflows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.roots import Evaluation
from jaxdp.numerics.special import polynomial
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import long_arrays_pay
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import Sum, Tilt, known, log_moment, saddle, sum_at, wider

NODES = 12  # beside the one on the real axis
LAST_NODE = 8.2  # the last node, in 1/(standard deviation of the tilted sum)
_ROUNDING = 1e-14  # of K, log delta and 1 together; measured at most half of it
_UNIT = 1.5e-15  # thirteen units of rounding of one node's phase and modulus
_X0 = 0.125  # how close to a multiple of pi counts as a peak, see `peak_bounds`
_RHO = (math.sin(2 * _X0) / (2 * _X0)) ** 2
_FAMILIES = np.arange(1.0, 33.0)  # of peaks, whose places are looked at
_BLOCK, _LONG_BLOCK = 64, 512  # nodes of a long sum at a time; the latter where long arrays pay
_LONGER = 4.0
_PERIODS = 10.0 * _LONGER ** np.arange(5)  # of long sums, in standard deviations
_NODES_A_PERIOD = 1.5  # nodes for each of these deviations, for a period longer than the first
_ALIAS = 2e4  # relative size of the aliases, times nodes^3, at which no longer period is worth while
_DECAY = 25.0  # nats that |phi|^n falls at least to the edge of a window
_WIDTH = 8.5  # of a Gaussian that is added, over 1 by the last node: it falls by 36 nats until there
_BLUR = 6e-15  # of an atom, relative

_SIN_SERIES = tuple((-1) ** (i + 1) * 6 / math.factorial(2 * i + 3) for i in range(9))


def _small_turn(u: Any) -> tuple[Any, Any, Any]:
    """sin u, sin u - u and 1 - cos u where |u| <= 1, accurate relative to themselves, without a library's sine."""
    square = u * u
    bent = u * square / 6 * polynomial(_SIN_SERIES, square)
    sine = u + bent
    return sine, bent, sine * sine / (1 + xp.sqrt(1 - sine * sine))


def _turn(u: Any) -> tuple[Any, Any, Any]:
    """The same for every u; where |u| >= 1 sin u - u is accurate to a unit of u."""
    sine, cosine = xp.sin(0.5 * u), xp.cos(0.5 * u)
    small = xp.abs(u) < 1.0
    near, double = _small_turn(xp.where(small, u, 0.0))[1], 2 * sine * cosine
    return double, xp.where(small, near, double - u), 2 * sine * sine


class Nodes(NamedTuple):
    """Sums over nodes t = h j of Re[phi^n g / z^2], of its error and modulus, and of the slope's integrand."""

    value: Any
    error: Any
    modulus: Any
    slope: Any


def nodes_of(s: Sum, t: Tilt, h: Any, index: Any, variances: Any, turn: Callable[[Any], Any] = _turn) -> Nodes:
    """The sums over the nodes h index, the first one halved, once for each variance of a Gaussian that is added."""
    at = h * index
    sine, bent, less = turn(s.x * at[:, None])
    re = -xp.sum(t.weights * less, axis=-1)
    # the parts of first order in t, whose sum is the closed-form mean, are taken out of every atom
    growth = xp.expm1(t.c * s.x) * sine
    unit = xp.exp(-t.log_moment)
    im = (at * s.mean + xp.sum(s.mass * (growth + bent), axis=-1)) * unit
    off = (at * xp.abs(s.mean) + xp.sum(s.mass * (xp.abs(growth) + xp.abs(bent)), axis=-1)) * unit
    square, real = 2 * re + re * re + im * im, 1 + re
    size = real * real + im * im + NEXT_TO_ZERO
    near = xp.abs(square) < 0.25  # next to 1 only its difference from 1 has its digits
    log_size = 0.5 * xp.where(near, xp.log1p(xp.where(near, square, 0.0)), xp.log(size))
    angle = xp.arctan2(im, real)
    n, c = s.users, t.c
    inverse = 1 / (c * c + at * at)
    variances = variances[:, None]
    modulus = xp.where(index == 0, 0.5, 1.0) * inverse * xp.exp(n * log_size - 0.5 * variances * at * at)
    phase = n * angle + variances * c * at
    cosine_n, sine_n = xp.cos(phase), xp.sin(phase)
    rounding = _UNIT * n * (off / xp.sqrt(size) + xp.abs(angle) + xp.abs(log_size))
    ahead, aside = c * c - at * at, 2 * c * at
    value = (ahead * cosine_n + aside * sine_n) * inverse
    # the slope: n M'/M / z^2 with M' = sum growth (e^{zx} - 1) - z sum velocity mass e^{zx}
    grown = xp.exp(t.c * s.x) * (unit * n)
    moving = grown * s.mass * s.velocity
    along, across = xp.sum(moving * (1 - less), axis=-1), xp.sum(moving * sine, axis=-1)
    along, across = along * c - across * at, across * c + along * at  # times z
    if s.growth is not None:
        along = along - xp.sum(s.growth * (unit * n * xp.expm1(t.c * s.x) - grown * less), axis=-1)
        across = across - xp.sum(s.growth * grown * sine, axis=-1)
    along, across = (along * real + across * im) / size, (across * real - along * im) / size  # divided by phi
    slope = along * value - across * (ahead * sine_n - aside * cosine_n) * inverse
    value, slope = modulus * value, modulus * slope
    return Nodes(
        xp.sum(value, axis=-1),
        xp.sum(modulus * xp.minimum(rounding, 2.0), axis=-1),
        xp.sum(modulus, axis=-1),
        -xp.sum(slope, axis=-1),
    )


class _Alias(NamedTuple):
    """What the sum over nodes has too much, in units of e^K: a part that is known, and a bound of the rest."""

    known: Any
    error: Any
    bound: Any


_FEW_SHIFTS = np.array([4.6, 9.2])
_SHIFTS = 10 * 0.25 ** np.arange(8)  # of sums that need not be nearly normal


def _alias_parts(s: Sum, t: Tilt, periods: Any, variance: Any, few: bool = False) -> tuple[Any, Any, Any]:
    """For each period: what the terms on the right amount to, and on the left in all and beside the known part.

    few: at as many abscissae as a nearly normal sum needs.
    """
    deviation, c = xp.sqrt(t.deviation**2 + variance), t.c
    shifts = (_FEW_SHIFTS if few else _SHIFTS) / deviation
    left = c - shifts
    left = xp.where(xp.abs(left) < 0.2 / deviation, -0.2 / deviation, left) if few else xp.append(left, -shifts)
    points = xp.concatenate([c + shifts, left])
    growth = s.users * (log_moment(s, points) - t.log_moment) + 0.5 * variance * (points * points - c * c)
    distance = xp.abs(points - c) * periods[:, None]
    bound = xp.exp(growth - distance) / (math.e * xp.abs(points) * -xp.expm1(-distance))
    bound = xp.where(xp.isnan(bound), xp.inf, bound) * (1 + 1e-9)
    bounded = (points > c, (points > 0) & (points < c), points < 0)
    right, plain, remainder = (xp.min(xp.where(some, bound, xp.inf), axis=-1) for some in bounded)
    return xp.where((variance == 0) & (periods >= s.users * xp.max(s.x)), 0.0, right), plain, remainder


def alias_bounds(s: Sum, t: Tilt, period: Any, variance: Any, few: bool = False) -> _Alias:
    """What the terms j = 1, 2, ... of Poisson summation may amount to, on both sides."""
    right, plain, remainder = (side[0] for side in _alias_parts(s, t, period[None], variance, few))
    n, c = s.users, t.c
    log_total = n * t.log_moment + 0.5 * variance * c * c
    q = xp.exp(-c * period)
    parts = xp.stack([period / -xp.expm1(-c * period), n * s.mean]) * q / -xp.expm1(-c * period) * xp.exp(-log_total)
    error = _ROUNDING * (1 + xp.abs(log_total)) * xp.sum(xp.abs(parts))
    subtract = remainder + error < plain
    return _Alias(
        xp.where(subtract, xp.sum(parts), 0.0),
        xp.where(subtract, error, 0.0),
        right + xp.where(subtract, remainder, plain),
    )


def _atoms(s: Sum, t: Tilt) -> tuple[Any, Any]:
    """All atoms and their tilted weights, 0 included; atoms without mass stand at 0."""
    weights = xp.append(t.weights, t.rest)
    return xp.where(weights > 0, xp.append(s.x, 0.0), 0.0), weights


def peak_bounds(s: Sum, t: Tilt, h: Any, first: Any) -> Any:
    """Bound of sum_{jh >= first} h |phi|^n/|z|^2 from three atoms: the two outermost and the heaviest other.

    inf where its conditions do not hold (notebooks/proofs/shuffle.md, section 7).
    """
    x, w = _atoms(s, t)
    place = xp.arange(x.shape[0])
    top, bottom = xp.argmax(x), xp.argmin(x)
    middle = xp.argmax(xp.where((place == top) | (place == bottom), -1.0, w))
    up, down = x[top] - x[middle], x[middle] - x[bottom]
    swap = up > down
    w0, w1, w2 = w[middle], w[xp.where(swap, bottom, top)], w[xp.where(swap, top, bottom)]
    short, long = xp.minimum(up, down), xp.maximum(up, down)
    d = xp.abs(2 * x[middle] - x[top] - x[bottom])
    n, c, deviation = s.users, t.c, t.deviation
    k1, k2, k3 = 2 * n * w0 * w1, 2 * n * w0 * w2, 2 * n * w1 * w2
    variance = 0.5 * (k1 * short**2 + k2 * long**2 + k3 * (short + long) ** 2)
    eta = _RHO * 2 * math.pi**2 * n**2 * w0 * w1 * w2 * (w0 + w1 + w2) / variance
    fall = _RHO * deviation**2
    near = h * xp.exp(-0.5 * fall * first**2) / ((c * c + first**2) * -xp.expm1(-fall * h * first))
    floor = math.pi / (2 * c) * xp.exp(-xp.minimum(k1, k2) * math.sin(_X0) ** 2)
    least, most = xp.maximum(d - _BLUR, 0.0), d + _BLUR
    # peaks of the k-th family stand (p - k short/d) apart from its place, p whole: the nearest ones one by one
    sharp = eta * least**2
    unplaced = most**2 + most * xp.sqrt(math.pi / eta)
    where = _FAMILIES * short / d
    unsure = where * (2e-15 + _BLUR / d)
    ahead = xp.maximum(xp.stack([where - xp.floor(where), xp.ceil(where) - where]) - unsure, 0.0)
    beyond = 1 + 0.5 * xp.sqrt(math.pi / sharp)
    placed = most**2 * xp.sum(xp.exp(-sharp * ahead**2) + beyond * xp.exp(-sharp * (1 + ahead) ** 2), axis=0)
    placed = xp.where(placed < unplaced, placed, unplaced)  # NaN, at d = 0, is no place
    families = xp.sum(placed / _FAMILIES**2) + unplaced / _FAMILIES.size
    theta = (1 - _X0 / math.pi) ** -2 * short**2 / 24 * xp.exp(-sharp) + (1 - 2 * _X0 / math.pi) ** -2 * families / (
        2 * math.pi
    ) ** 2
    peaks = (xp.sqrt(2 * math.pi / (_RHO * variance)) + h) * theta
    total = near + floor + peaks
    return xp.where((first <= 2 * _X0 / long) & (total >= 0), total, xp.inf)


class _Windows(NamedTuple):
    """Nodes next to the recurrences of a pair of atoms, and what is known of the rest of the sum.

    spacing: of the recurrences, in nodes. half: of each window, in nodes; without gaps between them infinite. smooth:
    whether a Gaussian is to be added. beyond: bound of all that is left out; with a Gaussian, of what is left out up to
    the node ``last``.
    """

    spacing: Any
    half: Any
    smooth: Any
    beyond: Any
    last: Any


def windows_of(s: Sum, t: Tilt, h: Any, nodes: Any) -> _Windows:
    """The windows of the pair of heavy atoms that leaves the least (notebooks/proofs/shuffle.md, section 7)."""
    x, w = _atoms(s, t)
    largest = xp.argsort(-w)[:5]
    x, w = x[largest], w[largest]
    one, other = np.triu_indices(w.shape[0], 1)
    distance = xp.maximum(xp.abs(x[one] - x[other]), NEXT_TO_ZERO)
    blur = _BLUR * xp.maximum(xp.abs(x[one]), xp.abs(x[other])) / distance
    fall = xp.maximum(2 * s.users * w[one] * w[other], NEXT_TO_ZERO)  # |phi|^n <= exp(-fall sin^2(distance t/2))
    spacing = 2 * math.pi / (distance * h)
    angle = xp.arcsin(xp.sqrt(xp.minimum(_DECAY / fall, 1.0)))
    half = xp.ceil(spacing / math.pi * angle)
    apart = 2 * half + 2 < spacing  # or there are no gaps
    angle = xp.where(apart, angle, math.pi / 2)
    count = xp.floor(xp.where(apart, (nodes - half - 1) / (2 * half + 1), nodes / spacing * (1 - blur) - 0.5))
    unseen = xp.where(apart, half + 0.5 - (count + 1) * spacing * blur, nodes) / spacing * math.pi
    unseen = xp.clip(xp.where(apart, xp.minimum(unseen, angle), unseen), 0.0, math.pi / 2)
    between = math.pi / (2 * t.c) * xp.exp(-fall * xp.sin(unseen) ** 2)
    between = xp.where(apart | (count < 0), between, 0.0)
    later = xp.minimum(math.pi**2 / 2, 1 / xp.maximum(count, 0.1))  # the sum over q > count of 1/(q - 1/2)^2
    width = xp.sqrt(4 * math.pi / fall) * angle / xp.sin(angle)
    recurring = (width + distance * h) * distance / (4 * math.pi**2) * later
    beyond = between + recurring
    beyond = xp.where((distance > NEXT_TO_ZERO) & (~apart | (count >= 0)) & (beyond >= 0), beyond, xp.inf)
    # a Gaussian may take the place of the later recurrences
    last = (count + 0.5) * spacing
    useful = apart & (last > nodes)
    last, between = xp.where(useful, last, nodes), xp.where(useful, between, 0.0)
    left = between + 0.6 * math.pi * (_WIDTH / (last * h)) ** 2 / t.deviation
    smooth = ~(xp.min(beyond) <= xp.min(left))
    best = xp.where(smooth, xp.argmin(left), xp.argmin(beyond))
    gaps = xp.where(smooth, useful, apart)[best]
    return _Windows(
        spacing[best],
        xp.where(gaps, half[best], xp.inf),
        smooth,
        xp.where(smooth, between[best], beyond[best]),
        last[best],
    )


def evaluation(s: Sum, log_total: Any, upper: Any, lower: Any, estimate: Any, slope: Any) -> Evaluation:
    """Bounds of E[S_+] in units of e^log_total, turned into bounds of log delta."""
    scale = log_total + s.log_factor
    certain = xp.log(xp.where(s.certain > 0, s.certain, 1.0))

    def total(value: Any, sign: float) -> Any:
        log_value = xp.where(value > 0, scale + xp.log(xp.where(value > 0, value, 1.0)), -xp.inf)
        both = xp.where(s.certain > 0, xp.logaddexp(log_value, certain), log_value)
        return both + sign * 1e-14 * (1 + s.x.shape[0] * (s.certain > 0))

    high = xp.where(xp.isnan(upper), xp.inf, total(upper, 1.0))
    # (an infinite one stays: it tells the search that nothing is certified)
    high = xp.where(high < xp.inf, xp.minimum(high, xp.log(s.single)), xp.inf)
    low = xp.minimum(xp.where(xp.isnan(lower), -xp.inf, total(lower, -1.0)), high)
    middle = total(estimate, 0.0)
    rate = (xp.exp(xp.minimum(scale, 600.0)) * slope + s.certain_slope) / xp.exp(xp.maximum(middle, -600.0))
    rate = xp.where(scale < -600.0, slope / xp.where(estimate > 0, estimate, 1.0), rate)
    return Evaluation(high, low, middle, rate)


def charged_for_rounding(
    s: Sum, t: Tilt, h: Any, sums: Nodes, tail: Any, variance: Any, few: bool = False
) -> tuple[Any, Any, Any]:
    """(upper, lower, estimate) of E[(S + G)_+] e^-K for one variance of G; rounding is charged to the sum of moduli."""
    alias = alias_bounds(s, t, 2 * math.pi / h, variance, few)
    value = h / math.pi * sums.value
    size = xp.abs(s.users * t.log_moment + 0.5 * variance * t.c**2)
    share = _ROUNDING * (1 + s.x.shape[0] / 100) * (1 + 2 * size + xp.abs(s.log_factor))
    error = h / math.pi * (sums.error + share * sums.modulus) + alias.error
    exact = value - alias.known
    beyond = tail / math.pi * (1 + 1e-9)  # the rounding of the exponentials in it
    return exact + beyond + error, exact - beyond - alias.bound - error, exact


def smoothed_tail(c: Any, variance: Any, h: Any, first: Any) -> Any:
    """Bound of sum_{jh >= first} h |phi|^n e^{-variance (jh)^2/2}/|z|^2, for every law."""
    fall = xp.maximum(0.5 * variance, NEXT_TO_ZERO)
    return h * xp.exp(-fall * first**2) / ((c**2 + first**2) * -xp.expm1(-2 * fall * h * first))


def evaluate(law: Law, users: Any, epsilon: Any) -> Evaluation:
    """Bounds of log delta(epsilon) with 13 nodes; close where users x rest x (1 - rest) is large."""
    s = sum_at(law, users, epsilon)
    t = known(s, saddle(s))
    h = LAST_NODE / (NODES * t.deviation)
    small = NODES * h <= 1  # all angles at the nodes too, as all |x| are at most 1; elsewhere there is no bound
    h_or_1 = xp.where(small, h, 1 / NODES)
    sums = nodes_of(s, t, h_or_1, xp.arange(NODES + 1.0), xp.zeros(1), _small_turn)
    sums = jax.tree_util.tree_map(lambda a: a[0], sums)
    tail = xp.where(small, peak_bounds(s, t, h, (NODES + 1) * h), xp.inf)
    bounds = charged_for_rounding(s, t, h, sums, tail, xp.zeros(()), few=True)
    return evaluation(s, users * t.log_moment, *bounds, h / math.pi * sums.slope)


def _period(s: Sum, t: Tilt, nodes: Any) -> Any:
    """Period of a long sum, in standard deviations: longer ones where a rare outcome makes S far from normal."""
    right, plain, remainder = _alias_parts(s, t, _PERIODS * t.deviation, xp.zeros(()))
    size = t.c**2 * xp.sqrt(t.deviation**2 + 2 / t.c**2)  # about 1 / (2.5 E[S_+] e^-K)
    relative = (right + xp.minimum(plain, remainder)) * size
    allowed = (_PERIODS <= nodes / _NODES_A_PERIOD) | (_PERIODS == _PERIODS[0])
    allowed = allowed & (relative >= 0)
    return _PERIODS[0] * _LONGER ** xp.argmin(xp.where(allowed, xp.maximum(relative, _ALIAS / nodes**3), xp.inf))


def evaluate_long(law: Law, users: Any, epsilon: Any, most_nodes: Any, moved: Sum | None = None) -> Evaluation:
    """Bounds of log delta(epsilon) with most_nodes nodes (data, not a size; rounded up to whole blocks), for every law.

    The nodes stand where a pair of atoms recurs. Where that leaves too much, a Gaussian G of deviation s is added:
    E[(S + sG)_+] is convex in s, so 2 U_s - U_2s <= E[S_+] <= U_s. moved: None, or the derivatives of the sum's
    atoms and masses by another parameter than epsilon; the slope is then by that parameter.
    """
    s = sum_at(law, users, epsilon)
    if moved is not None:
        s = s._replace(velocity=-moved.x, growth=moved.mass, certain_slope=moved.certain)
    t = known(s, wider(s, saddle(s)))
    h = 2 * math.pi / (_period(s, t, most_nodes) * t.deviation)
    block = _LONG_BLOCK if long_arrays_pay() and not xp.many else _BLOCK
    blocks = xp.ceil(most_nodes / block)
    windows = windows_of(s, t, h, blocks * block)
    last, gaps, width = windows.last * h, windows.half < xp.inf, 2 * windows.half + 1
    variances = xp.where(windows.smooth, (_WIDTH / last) ** 2, 0.0) * xp.array([1.0, 4.0])

    def add(state: tuple[Any, Nodes]) -> tuple[Any, Nodes]:
        turn, total = state
        place = turn * block + xp.arange(float(block))
        which = xp.floor((place + windows.half) / width)
        inside = xp.round(which * windows.spacing) + place - which * width
        place = xp.where(gaps, inside, place)
        return turn + 1, jax.tree_util.tree_map(xp.add, total, nodes_of(s, t, h, place, variances))

    nothing = Nodes(*(xp.zeros(2) for _ in range(4)))
    _, sums = xp.while_loop(lambda state: state[0] < blocks, add, (xp.zeros(()), nothing))
    tails = windows.beyond + xp.where(windows.smooth, smoothed_tail(t.c, variances, h, last), 0.0)
    bounds = xp.vmap(lambda *each: charged_for_rounding(s, t, h, *each))(sums, tails, variances)
    grown = xp.exp(0.5 * variances * t.c**2)
    upper, lower, estimate, slope = (grown * value for value in (*bounds, h / math.pi * sums.slope))
    lower = xp.where(windows.smooth, 2 * lower[0] - upper[1], lower[0])
    estimate, slope = (xp.where(windows.smooth, (4 * a[0] - a[1]) / 3, a[0]) for a in (estimate, slope))
    return evaluation(s, users * t.log_moment, upper[0], lower, estimate, slope)
