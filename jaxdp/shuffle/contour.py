r"""Bounds of E[S_+], S = X_1 + ... + X_n, from a sum over the nodes z = c + ijh of a contour integral.

    E[S_+] = e^K(c) (h/pi) sum' Re[phi(jh)^n / (c + ijh)^2] - alias terms,   sum' over j >= 0 with j = 0 halved,
    M(z) = E e^{zX},   K(z) = n log M(z),   phi(t) = M(c+it)/M(c)

The bounds account for three errors: the alias terms (period 2 pi/h), the nodes that are left out, and rounding. Proofs:
notebooks/proofs/shuffle.md, sections 5 to 8. Every X is divided by the largest |X|, so that nothing overflows.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.domains import NEXT_TO_ZERO
from jaxdp.numerics.roots import Evaluation
from jaxdp.numerics.special import polynomial, sine_and_versine
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import long_arrays_pay
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.tilted_sum import Sum, Tilt, known, log_moment, saddle, sum_at, wider

# sigma is the standard deviation of the tilted sum.
NODES = 12  # nodes off the real axis; node 0 is on it
LAST_NODE = 8.2  # t of the last of these nodes, times sigma
_ROUNDING = 1e-14  # error relative to the sum of moduli, for each unit of 1 + 2 |K| + |log_factor|; half was measured
_UNIT = 1.5e-15  # 13 ULP: error of the phase and log modulus of one node, relative to the terms they are made from
_X0 = 0.125  # distance from a multiple of pi within which an angle belongs to a peak, see `peak_bounds`
_RHO = (math.sin(2 * _X0) / (2 * _X0)) ** 2  # sin(v)^2 >= _RHO v^2 for |v| <= 2 _X0
_FAMILIES = np.arange(1.0, 33.0)  # numbers k of the families of peaks whose places are computed
_BLOCK, _LONG_BLOCK = 64, 512  # nodes of a long sum that are computed together; the second where `long_arrays_pay`
_LONGER = 4.0
_PERIODS = 10.0 * _LONGER ** np.arange(5)  # candidates for the period 2 pi/h of a long sum, in units of sigma
_NODES_A_PERIOD = 1.5  # least number of nodes for each sigma of a period longer than the first
_ALIAS = 2e4  # no longer period is chosen if the relative size of the alias terms is below _ALIAS / nodes^3
_DECAY = 25.0  # nats by which the bound of |phi|^n has fallen at the edge of a window
_WIDTH = 8.5  # standard deviation of an added Gaussian, times t of the last node: its factor there is e^-36
_BLUR = 6e-15  # relative error of an atom; also bounds the absolute error, as |x| <= 1

_SIN_SERIES = tuple((-1) ** (i + 1) * 6 / math.factorial(2 * i + 3) for i in range(9))  # of 6 (sin u - u)/u^3 in u^2


def _turn(u: Any) -> tuple[Any, Any, Any]:
    """(sin u, sin u - u, 1 - cos u); sin u - u has a small relative error for |u| < 5/4, else one of about ULP |u|."""
    small = xp.abs(u) < 1.25
    near = xp.where(small, u, 0.0)
    square = near * near
    sine, versine = sine_and_versine(u)
    return sine, xp.where(small, near * square / 6 * polynomial(_SIN_SERIES, square), sine - u), versine


class Nodes(NamedTuple):
    """Sums over nodes: Re[phi^n g / z^2], its rounding error, its modulus, its derivative by epsilon; g: a Gaussian."""

    value: Any
    error: Any
    modulus: Any
    slope: Any


def nodes_of(s: Sum, t: Tilt, h: Any, index: Any, variances: Any) -> Nodes:
    """The sums over the nodes t = h index, index 0 halved, for each variance of an added Gaussian."""
    height = h * index
    sine, sine_minus_u, versine = _turn(s.x * height[:, None])
    re = -xp.sum(t.weights * versine, axis=-1)
    # The terms of first order in t are not summed over atoms: their sum is t E X, known in closed form.
    growth = xp.expm1(t.c * s.x) * sine
    unit = xp.exp(-t.log_moment)
    im = (height * s.mean + xp.sum(s.mass * (growth + sine_minus_u), axis=-1)) * unit
    off = (height * xp.abs(s.mean) + xp.sum(s.mass * (xp.abs(growth) + xp.abs(sine_minus_u)), axis=-1)) * unit
    abs2_minus_1, real = 2 * re + re * re + im * im, 1 + re
    abs2 = real * real + im * im + NEXT_TO_ZERO
    near_1 = xp.abs(abs2_minus_1) < 0.25  # log |phi| from |phi|^2 - 1, which has more digits here
    log_abs = 0.5 * xp.where(near_1, xp.log1p(xp.where(near_1, abs2_minus_1, 0.0)), xp.log(abs2))
    angle = xp.arctan2(im, real)
    n, c = s.users, t.c
    inverse = 1 / (c * c + height * height)
    variances = variances[:, None]
    modulus = xp.where(index == 0, 0.5, 1.0) * inverse * xp.exp(n * log_abs - 0.5 * variances * height * height)
    phase = n * angle + variances * c * height
    sine_n, versine_n = sine_and_versine(phase)
    cosine_n = 1 - versine_n
    rounding = _UNIT * n * (off / xp.sqrt(abs2) + xp.abs(angle) + xp.abs(log_abs))
    re_z2, im_z2 = c * c - height * height, 2 * c * height
    value = (re_z2 * cosine_n + im_z2 * sine_n) * inverse
    # The slope is Re[n M'/M phi^n g / z^2], M' = dM/d epsilon = sum growth (e^{zx} - 1) - z sum velocity mass e^{zx}.
    # d_re + i d_im becomes -n M'/M(c), then -n M'/M(z).
    grown = xp.exp(t.c * s.x) * (unit * n)
    moving = grown * s.mass * s.velocity
    d_re, d_im = xp.sum(moving * (1 - versine), axis=-1), xp.sum(moving * sine, axis=-1)
    d_re, d_im = d_re * c - d_im * height, d_im * c + d_re * height  # times z
    if s.growth is not None:
        d_re = d_re - xp.sum(s.growth * (unit * n * xp.expm1(t.c * s.x) - grown * versine), axis=-1)
        d_im = d_im - xp.sum(s.growth * grown * sine, axis=-1)
    d_re, d_im = (d_re * real + d_im * im) / abs2, (d_im * real - d_re * im) / abs2  # divided by phi
    slope = d_re * value - d_im * (re_z2 * sine_n - im_z2 * cosine_n) * inverse
    value, slope = modulus * value, modulus * slope
    return Nodes(
        xp.sum(value, axis=-1),
        xp.sum(modulus * xp.minimum(rounding, 2.0), axis=-1),
        xp.sum(modulus, axis=-1),
        -xp.sum(slope, axis=-1),
    )


class _Alias(NamedTuple):
    """Alias terms, in units of e^K: a part that is known, the rounding error of this part, a bound of all the rest."""

    known: Any
    error: Any
    bound: Any


_FEW_SHIFTS = np.array([4.6, 9.2])  # distances of the abscissae from c, times sigma, for nearly normal sums
_SHIFTS = 10 * 0.25 ** np.arange(8)  # the same for all other sums


def _alias_parts(s: Sum, t: Tilt, periods: Any, variance: Any, shifts: Any = _SHIFTS) -> tuple[Any, Any, Any]:
    """Bounds of the alias terms for each period: (right terms, left terms, left terms without their known part)."""
    c, shifts = t.c, shifts / xp.sqrt(t.deviation**2 + variance)
    points = xp.concatenate([c + shifts, c - shifts, -shifts])
    growth = s.users * (log_moment(s, points) - t.log_moment) + 0.5 * variance * (points * points - c * c)
    distance = xp.abs(points - c) * periods[:, None]
    bound = xp.exp(growth - distance) / (math.e * xp.abs(points) * -xp.expm1(-distance))
    bound = xp.where(xp.isnan(bound), xp.inf, bound) * (1 + 1e-9)
    bounded = (points > c, (points > 0) & (points < c), points < 0)
    right, plain, remainder = (xp.min(xp.where(mask, bound, xp.inf), axis=-1) for mask in bounded)
    return xp.where((variance == 0) & (periods >= s.users * xp.max(s.x)), 0.0, right), plain, remainder


def alias_bounds(s: Sum, t: Tilt, period: Any, variance: Any, shifts: Any = _SHIFTS) -> _Alias:
    """The alias terms of Poisson summation for one period, left and right; shifts: `_FEW_SHIFTS` or `_SHIFTS`."""
    right, plain, remainder = (side[0] for side in _alias_parts(s, t, period[None], variance, shifts))
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
    """All atoms, X = 0 included, and their tilted weights; an atom without mass is put at 0."""
    weights = xp.append(t.weights, t.rest)
    return xp.where(weights > 0, xp.append(s.x, 0.0), 0.0), weights


def peak_bounds(s: Sum, t: Tilt, h: Any, first: Any) -> Any:
    """Upper bound of sum_{jh >= first} h |phi|^n/|z|^2 from three atoms: the two outermost and the heaviest other one.

    It is inf where the conditions of Lemma 2 fail (notebooks/proofs/shuffle.md, section 7).
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
    d_low, d_high = xp.maximum(d - _BLUR, 0.0), d + _BLUR
    # Peaks of family k have the exponents sharp (p - k short/d)^2, p whole; the nearest p on each side are computed.
    sharp = eta * d_low**2
    unplaced = d_high**2 + d_high * xp.sqrt(math.pi / eta)
    position = _FAMILIES * short / d
    position_error = position * (2e-15 + _BLUR / d)
    distance = xp.maximum(xp.stack([position - xp.floor(position), xp.ceil(position) - position]) - position_error, 0.0)
    beyond = 1 + 0.5 * xp.sqrt(math.pi / sharp)
    placed = d_high**2 * xp.sum(xp.exp(-sharp * distance**2) + beyond * xp.exp(-sharp * (1 + distance) ** 2), axis=0)
    placed = xp.where(placed < unplaced, placed, unplaced)  # NaN at d = 0
    families = xp.sum(placed / _FAMILIES**2) + unplaced / _FAMILIES.size
    theta = (1 - _X0 / math.pi) ** -2 * short**2 / 24 * xp.exp(-sharp) + (1 - 2 * _X0 / math.pi) ** -2 * families / (
        2 * math.pi
    ) ** 2
    peaks = (xp.sqrt(2 * math.pi / (_RHO * variance)) + h) * theta
    total = near + floor + peaks
    return xp.where((first <= 2 * _X0 / long) & (total >= 0), total, xp.inf)


class _Windows(NamedTuple):
    """Windows of nodes next to the recurrences of a pair of atoms (t where |phi| may be near 1).

    spacing: distance of two recurrences, in nodes. half: a window has 2 half + 1 nodes; inf if there are no gaps
    between windows. smooth: whether a Gaussian must be added. beyond: bound of all nodes that are left out; with a
    Gaussian, of those before node ``last`` that are left out.
    """

    spacing: Any
    half: Any
    smooth: Any
    beyond: Any
    last: Any


def windows_of(s: Sum, t: Tilt, h: Any, nodes: Any) -> _Windows:
    """The windows for the pair of heavy atoms with the closest bounds (notebooks/proofs/shuffle.md, section 7)."""
    x, w = _atoms(s, t)
    largest = xp.argsort(-w)[:5]
    x, w = x[largest], w[largest]
    i, j = np.triu_indices(w.shape[0], 1)
    distance = xp.maximum(xp.abs(x[i] - x[j]), NEXT_TO_ZERO)
    blur = _BLUR * xp.maximum(xp.abs(x[i]), xp.abs(x[j])) / distance
    fall = xp.maximum(2 * s.users * w[i] * w[j], NEXT_TO_ZERO)  # |phi|^n <= exp(-fall sin^2(distance t/2))
    spacing = 2 * math.pi / (distance * h)
    angle = xp.arcsin(xp.sqrt(xp.minimum(_DECAY / fall, 1.0)))
    half = xp.ceil(spacing / math.pi * angle)
    apart = 2 * half + 2 < spacing  # else there are no gaps between windows
    angle = xp.where(apart, angle, math.pi / 2)
    count = xp.floor(xp.where(apart, (nodes - half - 1) / (2 * half + 1), nodes / spacing * (1 - blur) - 0.5))
    outer_angle = xp.where(apart, half + 0.5 - (count + 1) * spacing * blur, nodes) / spacing * math.pi
    outer_angle = xp.clip(xp.where(apart, xp.minimum(outer_angle, angle), outer_angle), 0.0, math.pi / 2)
    between = math.pi / (2 * t.c) * xp.exp(-fall * xp.sin(outer_angle) ** 2)
    between = xp.where(apart | (count < 0), between, 0.0)
    later = xp.minimum(math.pi**2 / 2, 1 / xp.maximum(count, 0.1))  # the sum over q > count of 1/(q - 1/2)^2
    width = xp.sqrt(4 * math.pi / fall) * angle / xp.sin(angle)
    recurring = (width + distance * h) * distance / (4 * math.pi**2) * later
    beyond = between + recurring
    beyond = xp.where((distance > NEXT_TO_ZERO) & (~apart | (count >= 0)) & (beyond >= 0), beyond, xp.inf)
    # With a Gaussian the recurrences beyond the node ``last`` need no bound of their own.
    last = (count + 0.5) * spacing
    useful = apart & (last > nodes)
    last, between = xp.where(useful, last, nodes), xp.where(useful, between, 0.0)
    if_smooth = between + 0.6 * math.pi * (_WIDTH / (last * h)) ** 2 / t.deviation
    smooth = ~(xp.min(beyond) <= xp.min(if_smooth))
    best = xp.where(smooth, xp.argmin(if_smooth), xp.argmin(beyond))
    gaps = xp.where(smooth, useful, apart)[best]
    return _Windows(
        spacing[best],
        xp.where(gaps, half[best], xp.inf),
        smooth,
        xp.where(smooth, between[best], beyond[best]),
        last[best],
    )


def evaluation(s: Sum, log_total: Any, upper: Any, lower: Any, estimate: Any, slope: Any) -> Evaluation:
    """Bounds of log delta, from bounds, an estimate and its slope of E[S_+] in units of e^log_total."""
    scale = log_total + s.log_factor
    certain = xp.log(xp.where(s.certain > 0, s.certain, 1.0))

    def total(value: Any, sign: float) -> Any:
        log_value = xp.where(value > 0, scale + xp.log(xp.where(value > 0, value, 1.0)), -xp.inf)
        log_sum = xp.where(s.certain > 0, xp.logaddexp(log_value, certain), log_value)
        return log_sum + sign * 1e-14 * (1 + s.x.shape[0] * (s.certain > 0))

    high = xp.where(xp.isnan(upper), xp.inf, total(upper, 1.0))
    # An infinite upper bound stays infinite: it tells the search for epsilon that nothing is certified.
    high = xp.where(high < xp.inf, xp.minimum(high, xp.log(s.single)), xp.inf)
    low = xp.minimum(xp.where(xp.isnan(lower), -xp.inf, total(lower, -1.0)), high)
    middle = total(estimate, 0.0)
    rate = (xp.exp(xp.minimum(scale, 600.0)) * slope + s.certain_slope) / xp.exp(xp.maximum(middle, -600.0))
    rate = xp.where(scale < -600.0, slope / xp.where(estimate > 0, estimate, 1.0), rate)
    return Evaluation(high, low, middle, rate)


def charged_for_rounding(
    s: Sum, t: Tilt, h: Any, sums: Nodes, tail: Any, variance: Any, shifts: Any = _SHIFTS
) -> tuple[Any, Any, Any]:
    """(upper, lower, estimate) of E[(S + G)_+] e^-K, G Gaussian; tail: bound of the sum over the nodes left out."""
    alias = alias_bounds(s, t, 2 * math.pi / h, variance, shifts)
    value = h / math.pi * sums.value
    size = xp.abs(s.users * t.log_moment + 0.5 * variance * t.c**2)
    share = _ROUNDING * (1 + s.x.shape[0] / 100) * (1 + 2 * size + xp.abs(s.log_factor))
    error = h / math.pi * (sums.error + share * sums.modulus) + alias.error
    exact = value - alias.known
    beyond = tail / math.pi * (1 + 1e-9)  # 1e-9: rounding of its exponentials
    return exact + beyond + error, exact - beyond - alias.bound - error, exact


def smoothed_tail(c: Any, variance: Any, h: Any, first: Any) -> Any:
    """Upper bound of sum_{jh >= first} h |phi|^n e^{-variance (jh)^2/2}/|z|^2 for every law, as |phi| <= 1."""
    fall = xp.maximum(0.5 * variance, NEXT_TO_ZERO)
    return h * xp.exp(-fall * first**2) / ((c**2 + first**2) * -xp.expm1(-2 * fall * h * first))


def evaluate(law: Law, users: Any, epsilon: Any) -> Evaluation:
    """Bounds of log delta(epsilon) from 13 nodes; they are close where users x rest x (1 - rest) is large."""
    s = sum_at(law, users, epsilon)
    t = known(s, saddle(s))
    h = LAST_NODE / (NODES * t.deviation)
    sums = nodes_of(s, t, h, xp.arange(NODES + 1.0), xp.zeros(1))
    sums = jax.tree_util.tree_map(lambda a: a[0], sums)
    tail = peak_bounds(s, t, h, (NODES + 1) * h)
    bounds = charged_for_rounding(s, t, h, sums, tail, xp.zeros(()), _FEW_SHIFTS)
    return evaluation(s, users * t.log_moment, *bounds, h / math.pi * sums.slope)


def _period(s: Sum, t: Tilt, nodes: Any) -> Any:
    """Period 2 pi/h of a long sum in units of sigma: longer where a rare outcome makes S far from normal."""
    right, plain, remainder = _alias_parts(s, t, _PERIODS * t.deviation, xp.zeros(()))
    inverse_value = t.c**2 * xp.sqrt(t.deviation**2 + 2 / t.c**2)  # about 1 / (2.5 E[S_+] e^-K)
    relative = (right + xp.minimum(plain, remainder)) * inverse_value
    allowed = (_PERIODS <= nodes / _NODES_A_PERIOD) | (_PERIODS == _PERIODS[0])
    allowed = allowed & (relative >= 0)
    return _PERIODS[0] * _LONGER ** xp.argmin(xp.where(allowed, xp.maximum(relative, _ALIAS / nodes**3), xp.inf))


def evaluate_long(law: Law, users: Any, epsilon: Any, most_nodes: Any, moved: Sum | None = None) -> Evaluation:
    """Bounds of log delta(epsilon) from a long sum of most_nodes nodes, rounded up to whole blocks; for every law.

    most_nodes may be traced. The nodes stand in windows, see `_Windows`. If the nodes left out may add too much, a
    Gaussian sG, G standard, is added: U_s = E[(S + sG)_+] is convex in s, so 2 U_s - U_2s <= E[S_+] <= U_s. moved:
    None, or derivatives of x, mass and certain by another parameter than epsilon; the slope is then by it, too.
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
        number, total = state
        place = number * block + xp.arange(float(block))
        window = xp.floor((place + windows.half) / width)
        in_window = xp.round(window * windows.spacing) + place - window * width
        place = xp.where(gaps, in_window, place)
        return number + 1, jax.tree_util.tree_map(xp.add, total, nodes_of(s, t, h, place, variances))

    nothing = Nodes(*(xp.zeros(2) for _ in range(4)))
    _, sums = xp.while_loop(lambda state: state[0] < blocks, add, (xp.zeros(()), nothing))
    tails = windows.beyond + xp.where(windows.smooth, smoothed_tail(t.c, variances, h, last), 0.0)
    bounds = xp.vmap(lambda *each: charged_for_rounding(s, t, h, *each))(sums, tails, variances)
    grown = xp.exp(0.5 * variances * t.c**2)
    upper, lower, estimate, slope = (grown * value for value in (*bounds, h / math.pi * sums.slope))
    lower = xp.where(windows.smooth, 2 * lower[0] - upper[1], lower[0])
    estimate, slope = (xp.where(windows.smooth, (4 * a[0] - a[1]) / 3, a[0]) for a in (estimate, slope))
    return evaluation(s, users * t.log_moment, upper[0], lower, estimate, slope)
