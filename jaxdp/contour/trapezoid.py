r"""delta and epsilon from K by the contour trapezoid, certified from both sides.

    S = (h/pi) e^{K(c) - c eps} sum'_{n=0..N} Re[ (M(z_n)/M(c)) e^{-i n h eps} / (z_n (z_n + 1)) ],  z_n = c + i n h

(prime: half weight at n = 0). Without truncation, S is delta plus nonnegative alias terms. The bounds of delta include
these errors: left alias (after subtracting M(0)/(e^{c p} - 1) - e^eps M(-1)/(e^{(c+1) p} - 1), p = 2 pi/h), right
alias, truncation, quadrature and rounding of each node, mass cut away. The mass at infinity is added to delta.
Proofs: notebooks/proofs/contour_certificate.md ("section" below refers to it).
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxdp.contour.lattice import LatticeContour, build_lattice, lattice_sum
from jaxdp.contour.plan import (
    Aliases,
    Plan,
    Sides,
    alias_terms,
    log_alias,
    log_chernoff,
    plan_comparison,
    plan_delta,
    plan_epsilon,
)
from jaxdp.contour.spectrum import Nodes, Spectrum, along_line, counted
from jaxdp.contour.truncation import log_fallen, log_held, log_tail
from jaxdp.domains import SMALLEST
from jaxdp.numerics.exponential_sums import discrete_log_m, split
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.runtime.arrays import xp

# Nats by which smoothing plus all Gaussians of the composition damp |M| where other bounds end: at least 16, and more
# where delta is far below the integrand, so that the nodes left out are negligible beside delta.
SMOOTH_EXPONENT, _MOST_NATS, _NEGLIGIBLE = 16.0, 80.0, 5.0
_FALLEN = 40.0  # nats by which the sampled steps must have decayed at the last node so that no smoothing is used
_PLACES = 2.0 ** np.arange(10)  # multiples of the last node's t, up to one of which finite laws are bounded
_TRIES = 12  # largest number of tested points in a search for epsilon with a small effort
_TRIES_KINKED = 60  # the same where kinks of delta mislead Newton's method, or for the largest efforts
_OUTWARD = 1 + 1e-9  # factor that covers the rounding of an error term e^x, |x| at most about 1e3
_TOP_ROUNDING = 1e-11  # relative amount by which the upper bound ``top`` may exceed the supremum of the loss


class Effort(NamedTuple):
    """Static sizes: number of contour nodes, of quadrature nodes per step; smooth: add a tiny Gaussian (see `Contour`).

    lattice: the loss lies on a lattice (Spectrum.lattice); the contour is one period, without truncation.
    bands: number of edges by which `jaxdp.contour.largest_loss` splits the law; 0 for a single contour.
    """

    nodes: int
    quadrature: int
    smooth: bool
    lattice: bool = False
    bands: int = 0


class Contour(NamedTuple):
    """The parts of the sum that do not depend on eps. Leading axis: the smoothings s and, if the effort is smooth, 2s.

    Smoothing: U_s is delta of the mechanism composed with a Gaussian of mu = s. U_s >= delta, and
    delta >= (1 + w) U_s - w U_2s with w = A(s)/(A(2s) - A(s)), A(s) = erf(s/sqrt 8) (proof: section 7).
    The weight of node n is M(z_n)/M(c) / (z_n (z_n + 1)), halved at n = 0, without the factor e^{-i t eps}. The weights
    form a table, n = row * columns + column, padded with 0, because e^{-i t eps} is a row factor times a column factor.
    """

    plan: Plan
    real: jax.Array  # real parts of the node weights, (smoothings, rows, columns)
    imag: jax.Array
    errors: jax.Array  # two sums over the nodes: |weight| x relative error of the node; |weight| x t 2^-53
    log_tail: jax.Array  # log of the bound of the truncation error, in units of e^{K(c) - c eps}/pi
    extra_mu2: jax.Array  # s^2 of each smoothing
    mixing: jax.Array  # w
    log_m_c: jax.Array
    log_m_c_units: jax.Array  # bound of the error of log_m_c, in units of 2^-53
    log_kept: jax.Array  # lower bound of the log of the probability that no outcome lies beyond the tail cut
    shift: jax.Array  # the sum belongs to the loss L + S; S is an unknown number with |S| <= shift


def build(spectrum: Spectrum, plan: Plan, effort: Effort) -> Contour | LatticeContour:
    """The contour: one period for a lattice, otherwise a truncated line."""
    return build_lattice(spectrum, plan, effort.nodes) if effort.lattice else build_truncated(spectrum, plan, effort)


def _fitting(effort: Effort, spectrum: Spectrum) -> Effort:
    """The effort; a truncated line where a record without a lattice takes the place of one with a lattice."""
    return effort._replace(lattice=False, smooth=True) if effort.lattice and spectrum.lattice is None else effort


def build_truncated(spectrum: Spectrum, plan: Plan, effort: Effort) -> Contour:
    """Evaluate K at the contour's nodes and bound the truncation error."""
    c, step = plan.c, 2 * xp.pi / plan.period
    end, lines = step * effort.nodes, spectrum.lines(c, plan.cut, effort.quadrature)
    fallen = log_fallen(spectrum, lines, c, plan.cut, end)
    extra, mixing, until = xp.zeros(1), xp.zeros(()), end
    if effort.smooth:
        places = end * _PLACES
        known = fallen + log_held(spectrum, lines, end, places)
        # rough errors relative to c (c + 1) delta: of the nodes left out, and of smoothing
        left_out = xp.exp(xp.clip(known + plan.log_height, -700.0, 700.0)) / (xp.pi * end)
        nats = xp.clip(fallen + plan.log_height + xp.log(places) + _NEGLIGIBLE, SMOOTH_EXPONENT, _MOST_NATS)
        best = xp.argmin(xp.where(_PLACES > 1, left_out, 0.0) + nats / places**2)
        until, known, nats = (xp.lookup(x, best) for x in (places, known, nats))
        extra, mixing = _smoothing(until, nats, spectrum.mu2, fallen)
    mu2 = spectrum.mu2 + extra[0]
    tail = log_tail(spectrum, lines, fallen, until, mu2)
    if effort.smooth:
        between = log_tail(spectrum, lines, known, end, mu2)
        tail = xp.logaddexp(tail, xp.where(until > end, between, -xp.inf))
    nodes = along_line(spectrum, lines, c, step, effort.nodes + 1)
    log_m_c = xp.real(spectrum.closed(xp.asarray(c, xp.complex128))) + 0.5 * extra * c * (c + 1)
    # closed(c) is computed twice, here and in `along_line`, with an error each time
    units = 16 + 2 * spectrum.closed_units + 4 * xp.abs(log_m_c[-1])
    for part, line in zip(spectrum.parts, lines, strict=True):
        log_m_c = log_m_c + counted(part, line.log_m)
        # log m(c) = top + log(sum) + log(step): each rounded at a size of |log m(c)| + 12, and counted T times.
        # line.error: the nodes are relative to the true m(c), log_m_c is computed.
        units = units + counted(part, 4 * (xp.abs(line.log_m) + 12) + line.error * 2.0**53)
    contour = through(plan, nodes, extra, log_m_c, units)
    return contour._replace(log_tail=tail, mixing=mixing, log_kept=spectrum.log_kept(plan.cut))


def through(plan: Plan, nodes: Nodes, extra: jax.Array, log_m_c: jax.Array, units: jax.Array) -> Contour:
    """The `Contour` with these nodes, without bounds of the truncation error (inf) and of the mass cut away (0)."""
    t = 2 * xp.pi / plan.period * xp.arange(nodes.log_abs.shape[0])
    real, imag, errors = node_weights(nodes, plan.c, t, extra)
    units, zero, unknown = xp.broadcast_to(units, extra.shape), xp.zeros(()), xp.asarray(xp.inf)
    return Contour(plan, table(real), table(imag), errors, unknown, extra, zero, log_m_c, units, zero, nodes.shift)


def table(values: jax.Array) -> jax.Array:
    """Node weights (..., nodes) as a table (smoothings, rows, columns), about square, padded with 0."""
    columns, rows = split(values.shape[-1])
    padded = xp.pad(values, ((0, 0), (0, rows * columns - values.shape[-1])))
    return padded.reshape(-1, rows, columns)


def _smoothing(end: jax.Array, nats: jax.Array, mu2: jax.Array, fallen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """([s^2, (2s)^2], w): mu2 + s^2 damps t = end by this many nats; s = 0 if ``fallen`` shows decay enough."""
    s2 = xp.maximum(2 * nats / end**2 - mu2, 0.0)
    s2 = xp.where(fallen < -_FALLEN, 0.0, s2)
    s = xp.sqrt(s2)
    near, far = xp.erf(s / np.sqrt(8.0)), xp.erf(s / np.sqrt(2.0))
    mixing = xp.where(s2 > 0, near / xp.where(s2 > 0, far - near, 1.0), 0.0) * (1 + 1e-14)
    return xp.stack([s2, 4 * s2]), mixing


def node_weights(nodes: Nodes, c: jax.Array, t: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The fields real, imag (still in one row) and errors of `Contour`; extra: s^2 of each smoothing."""
    # a Gaussian of mu^2 = x multiplies M(c + it)/M(c) by exp(-x t^2/2 + i t x (2c + 1)/2)
    log_abs = nodes.log_abs - 0.5 * extra[:, None] * t**2
    phase = nodes.phase + 0.5 * extra[:, None] * (2 * c + 1) * t
    half = xp.where(xp.arange(t.shape[0]) == 0, 0.5, 1.0)
    # 1/(z (z+1)) = (a - ib) norm
    a, b = c * (c + 1) - t * t, t * (2 * c + 1)
    norm = 1 / (a * a + b * b)
    modulus = xp.exp(log_abs) * half
    cosine, sine = xp.cos(phase), xp.sin(phase)
    real, imag = modulus * norm * (cosine * a + sine * b), modulus * norm * (sine * a - cosine * b)
    moduli = modulus * xp.sqrt(norm)
    # slack: error of M(z)/M(c), very large where M is all rounding error; units: rounding of the sum and of the phase
    raised = xp.exp(xp.clip(log_abs + nodes.excess, -745.0, 600.0))
    slack = xp.where(nodes.excess < 1, xp.exp(log_abs) * xp.expm1(xp.minimum(nodes.excess, 1.0)), raised)
    columns, rows = split(t.shape[0])
    units = 32 + 1.5 * (columns + rows) + 2 * xp.abs(phase)
    own = xp.sum(half * xp.sqrt(norm) * slack + moduli * units * _ULP, axis=-1)
    return real, imag, xp.stack([own, xp.sum(moduli * t, axis=-1) * _ULP])


class Sums(NamedTuple):
    """Bounds of delta and an estimate of it, in units of e^ref."""

    upper: jax.Array
    lower: jax.Array
    middle: jax.Array  # estimate of delta
    slope: jax.Array  # d middle / d eps


class Raw(NamedTuple):
    """The contour sum for each smoothing, in units of e^ref."""

    total: jax.Array
    slope: jax.Array  # d total / d eps
    tail: jax.Array  # bound of the truncation error
    rounding: jax.Array  # bound of the error of the nodes and of rounding


def contour_sum(contour: Contour, eps: jax.Array, ref: jax.Array) -> Raw:
    """The contour sum at eps, with bounds of its truncation error and of its rounding."""
    c, h = contour.plan.c, 2 * xp.pi / contour.plan.period
    base = contour.log_m_c - c * eps - ref
    front = xp.exp(base) * h / xp.pi
    rows, columns = contour.real.shape[1:]
    row_t, column_t = h * columns * xp.arange(rows), h * xp.arange(columns)
    cosine, sine = xp.cos(column_t * eps), xp.sin(column_t * eps)
    waves = xp.stack([cosine, sine, column_t * cosine, column_t * sine], axis=1)
    real_waves, imag_waves = (xp.moveaxis(xp.exact_matmul(x, waves), -1, 0) for x in (contour.real, contour.imag))
    real, imag = real_waves[0] + imag_waves[1], imag_waves[0] - real_waves[1]
    real_t, imag_t = real_waves[2] + imag_waves[3], imag_waves[2] - real_waves[3]
    cosine, sine = xp.cos(row_t * eps), xp.sin(row_t * eps)
    total = xp.sum(real * cosine + imag * sine, axis=1)
    phase_slope = xp.sum((imag_t + row_t * imag) * cosine - (real_t + row_t * real) * sine, axis=1)
    exponent = xp.abs(contour.log_m_c) + xp.abs(c * eps) + xp.abs(ref)
    own, moment = contour.errors
    # head: bound of the error of log(front); above 1/4 no bound is claimed (below, e^x - 1 <= 2x)
    head = (contour.log_m_c_units + 4 * exponent + 16) * _ULP + 2 * c * contour.shift
    raised = 1 + 2 * xp.minimum(head, 0.25)
    tail = xp.exp(base + contour.log_tail) / xp.pi * _OUTWARD * raised
    rounding = front * ((own + 4 * xp.abs(eps) * moment) * raised + 2 * head * xp.abs(total))
    tail, rounding = (xp.where(head < 0.25, bound, xp.inf) for bound in (tail, rounding))
    return Raw(front * total, front * (phase_slope - c * total), tail, rounding)


def aliases(contour: Contour | LatticeContour, spectrum: Spectrum) -> Aliases:
    """The `Aliases` of a contour."""
    ends = xp.real(spectrum.closed(xp.array([0.0, -1.0], xp.complex128)))
    off = spectrum.closed_units * _ULP
    for atoms in spectrum.discrete:
        log_m, error = discrete_log_m(xp.array([[0.0], [-1.0]]), atoms.loss, atoms.log_weight, atoms.blur)
        ends = ends + counted(atoms, log_m)
        off = off + xp.max(counted(atoms, error + 4 * _ULP))
    off = xp.where(off < 0.25, off * (1 + off), xp.inf)
    return alias_terms(contour.plan, ends, contour.log_kept, off, contour.extra_mu2[-1])


def enclosed(contour: Contour | LatticeContour, known: Aliases, eps: jax.Array, ref: jax.Array) -> tuple[Sums, Raw]:
    """Bounds of delta for each smoothing, as in `evaluate` but without masses at infinity and cut away; and the sum."""
    raw = (
        Raw(*lattice_sum(contour, eps, ref)) if isinstance(contour, LatticeContour) else contour_sum(contour, eps, ref)
    )
    left, right = log_alias(known, eps, contour.shift)
    left, right = xp.exp(left - ref) * _OUTWARD, xp.exp(right - ref) * _OUTWARD
    left_low, left_high = _left_alias(contour, known, left, eps, ref)
    middle, error = raw.total - left_low, raw.tail + raw.rounding
    return Sums(middle + error, raw.total - left_high - right - error, middle, raw.slope), raw


def evaluate(
    contour: Contour | LatticeContour, known: Aliases, spectrum: Spectrum, eps: jax.Array, ref: jax.Array
) -> Sums:
    """Certified bounds of delta(eps - S) in units of e^ref; S is an unknown constant with |S| <= contour.shift."""
    upper, lower, middle, slope = enclosed(contour, known, eps, ref)[0]
    infinity = spectrum.infinity * xp.exp(-ref)
    cut_away = -xp.expm1(contour.log_kept) * xp.exp(-ref)
    w = contour.mixing
    best_lower = (1 + w) * lower[0] - w * upper[-1]
    best_lower = xp.where(xp.isnan(best_lower), -infinity, best_lower)
    return Sums(
        (upper[0] + infinity * (1 + 4 * _ULP) + cut_away) * (1 + 4 * _ULP),
        xp.maximum((best_lower + spectrum.infinity_low * xp.exp(-ref) * (1 - 4 * _ULP)) * (1 - 4 * _ULP), 0.0),
        middle[0] + infinity,
        xp.minimum(slope[0], 0.0),
    )


def _left_alias(
    contour: Contour | LatticeContour, known: Aliases, remainder: jax.Array, eps: jax.Array, ref: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(lower, upper) bound of the left alias, the sum over j >= 1 of e^{-c j p} delta(eps - j p).

    delta(x) = M(0) - e^x M(-1) + e^x delta_QP(-x); ``remainder`` bounds the sum of the last terms. Where e^x is large,
    0 <= delta(x) <= M(0) is the better bound.
    """
    first, second = xp.exp(known.log_first - ref), xp.exp(known.log_second + eps - ref)
    rounded = 1e-14 * (1 + contour.plan.c * contour.plan.period + xp.abs(ref) + xp.abs(eps)) + known.off
    rounded = rounded + 2 * contour.shift
    blur = rounded * (first + second)
    low = first * known.kept - second - blur
    high = first - second * known.kept + blur + remainder
    return xp.fmax(low, 0.0), xp.fmin(high, first * (1 + rounded))


def epsilon_bounds(
    spectrum: Spectrum, delta: jax.Array, known: jax.Array, effort: Effort
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) bounds of epsilon at delta in [0, 1]. known: an upper bound of epsilon, or inf."""
    effort, spare = _fitting(effort, spectrum), delta - spectrum.infinity
    inside = (spare > 0) & (delta < 1)
    ref = xp.log(xp.where(inside, spare, 0.5))
    plan, from_axis = plan_epsilon(spectrum, ref + xp.log1p(-1e-9), effort.quadrature, known)
    contour = build(spectrum, plan, effort)
    target = xp.where(inside, delta, 1.0) * xp.exp(-ref)

    left_and_right = aliases(contour, spectrum)
    # ``from_axis`` is certified for 1 - 1e-9 of ``spare``, which leaves 1e-9 of ``spare`` for the mass cut away.
    enough = -xp.expm1(contour.log_kept) <= 1e-9 * xp.exp(ref)
    ceiling = xp.where(enough & xp.isfinite(from_axis), xp.maximum(from_axis, 0.0) * (1 + 1e-12), xp.inf)
    ceiling = xp.minimum(xp.minimum(ceiling, known), spectrum.top)
    search = xp.where(xp.isfinite(ceiling), ceiling, 1.0)

    def at(eps: jax.Array) -> Evaluation:
        return relative_to(target, evaluate(contour, left_and_right, spectrum, eps, ref))

    # If delta is smooth, a long search costs more than it gains: the caller tries the next larger effort.
    kinked = effort.lattice or effort.quadrature == 1 or bool(spectrum.discrete)
    tries = _TRIES if effort.nodes < 10_000 and not kinked else _TRIES_KINKED
    lower, upper, _ = proved_ends(at, 0.0, 0.9 * search, search, ceiling=ceiling, most_tries=tries)
    lower = xp.maximum(lower - contour.shift, 0.0) * (1 - 2 * _ULP)
    upper = xp.minimum((upper + contour.shift) * (1 + 2 * _ULP), ceiling)
    return epsilon_edges(spectrum, delta, inside, lower, upper)


def relative_to(target: jax.Array, sums: Sums) -> Evaluation:
    """Logarithms of ``sums`` relative to ``target``, for a root search.

    A sum that is not positive is all rounding error: the root is taken to be right of the point if |sum| > target, left
    of it otherwise. An upper bound that is not positive proves nothing, because a part of it has underflowed.
    """
    upper, lower, middle = (xp.log(value / target) for value in (sums.upper, sums.lower, sums.middle))
    little = xp.abs(sums.middle) <= target
    return Evaluation(
        xp.where((sums.upper > 0) & (sums.upper <= target), xp.fmin(upper, 0.0), xp.fmax(upper, 1e-300)),
        xp.where(sums.lower > target, xp.fmax(lower, 1e-300), xp.fmin(lower, -1e-300)),
        xp.where(sums.middle > 0, middle, xp.where(little, -xp.inf, xp.inf)),
        sums.slope / sums.middle,
    )


def epsilon_edges(spectrum, delta, inside, lower, upper):
    """Bounds of epsilon: lower and upper where ``inside``, elsewhere those that are known without a search.

    inside: whether delta lies strictly between the mass at infinity and 1. lower, upper: bounds found by a search.
    """
    # a lossless mechanism (K = 0) has epsilon 0; epsilon at delta = 0 is the supremum of the loss
    top = xp.maximum(spectrum.top, 0.0)
    blur = sum((counted(part, xp.max(part.blur, axis=-1)) for part in spectrum.discrete), xp.zeros(()))
    exact_zero = (delta == 0) & (spectrum.infinity == 0)
    outside = xp.where(delta >= 1, 0.0, xp.where(exact_zero, top, xp.inf))
    flat = (delta == spectrum.infinity) & (delta > 0) & (delta < 1)
    upper = xp.where(inside, xp.minimum(upper, top), xp.where(flat, top, outside))
    # ``top`` and ``infinity`` are upper bounds; for a lower bound of epsilon take their rounding and blur away
    supremum = xp.maximum(top * (1 - _TOP_ROUNDING) - 2 * blur, 0.0)
    supremum = supremum if spectrum.knows_top else xp.where(top < xp.inf, supremum, 0.0)
    never = xp.where(exact_zero, supremum, xp.where(delta < spectrum.infinity_low, xp.inf, 0.0))
    lower = xp.where(inside, xp.minimum(lower, upper), xp.where(delta >= 1, 0.0, never))
    valid = (delta >= 0) & (delta <= 1)
    trivial = spectrum.top <= 0
    upper = xp.where(trivial & (delta >= spectrum.infinity), 0.0, upper)
    return (
        xp.where(valid & ~xp.isnan(lower) & ~(trivial & inside), lower, 0.0),
        xp.where(valid & ~xp.isnan(upper), upper, xp.inf),
    )


def _upper_left(sides: Sides, reverse_infinity: jax.Array, eps: jax.Array) -> jax.Array:
    """Upper bound 1 - e^eps + e^eps delta_QP(-eps) for eps < 0, by the Chernoff bound of the swapped pair; else inf.

    It is close to delta where eps is smaller than nearly all losses.
    """
    swapped = xp.exp(xp.min(log_chernoff(sides.below, sides.k_below, -eps))) + reverse_infinity
    least = -xp.expm1(xp.minimum(eps, 0.0))
    return xp.where(eps < 0, (least + xp.exp(xp.minimum(eps, 0.0)) * swapped) * (1 + 8 * _ULP) + SMALLEST, xp.inf)


def delta_bounds(spectrum: Spectrum, eps: jax.Array, known: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) bounds of delta at eps (any sign). known: an upper bound of delta, or 1."""
    effort, finite = _fitting(effort, spectrum), xp.isfinite(eps)
    e = xp.where(finite, eps, 1.0)
    plan, bound = plan_delta(spectrum, e, effort.quadrature, xp.log(xp.clip(known, SMALLEST, 1.0)))
    contour = build(spectrum, plan, effort)
    ref = xp.where(xp.isfinite(bound), xp.clip(bound, -700.0, 0.0), 0.0)  # e^-ref is finite
    left_and_right = aliases(contour, spectrum)
    sides = e + contour.shift * xp.array([0.0] if effort.lattice else [-1.0, 1.0])
    sums = xp.vmap(lambda eps: evaluate(contour, left_and_right, spectrum, eps, ref))(sides)
    # subnormal numbers are computed as 0, so the smallest normal number is added
    upper = xp.where(sums.upper[0] > 0, sums.upper[0] * xp.exp(ref), xp.inf) + SMALLEST
    lower = sums.lower[-1] * xp.exp(ref)
    chernoff = xp.exp(bound) * (1 + 1e-12) + spectrum.infinity - xp.expm1(contour.log_kept)
    upper = xp.minimum(upper, chernoff * (1 + 4 * _ULP) + SMALLEST)
    upper = xp.minimum(upper, _upper_left(plan.sides, spectrum.reverse_infinity, e))
    beyond = e >= spectrum.top
    upper = xp.where(beyond, spectrum.infinity * (1 + 4 * _ULP), upper)
    least = -xp.expm1(xp.minimum(e, 0.0))
    certain = xp.maximum(least * (1 - 4 * _ULP), spectrum.infinity_low)
    lower = xp.where(beyond, spectrum.infinity_low, xp.where(xp.isnan(lower), 0.0, lower))
    lower = xp.clip(lower, xp.minimum(certain, 1.0), 1.0)
    upper = xp.clip(upper, xp.maximum(least * (1 + 8 * _ULP), spectrum.infinity), 1.0)
    edge_low = xp.where(eps == xp.inf, spectrum.infinity_low, xp.where(eps == -xp.inf, 1.0, 0.0))
    edge_high = xp.where(eps == xp.inf, xp.minimum(spectrum.infinity * (1 + 4 * _ULP), 1.0), 1.0)
    upper = xp.where(finite & ~xp.isnan(upper), upper, edge_high)
    lower = xp.where(finite, xp.minimum(lower, upper), edge_low)
    return lower, upper


def ratio_bounds(spectrum: Spectrum, eps: jax.Array, delta: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) bounds of (contour sum at eps)/delta for eps > 0, 0 < delta < 1.

    The alias terms, which are nonnegative, are not subtracted, and the upper bound includes the masses at infinity and
    cut away: delta(eps)/delta is at most the upper bound.
    """
    ref = xp.log(delta)
    contour = build_truncated(spectrum, plan_comparison(spectrum, eps, ref, effort.quadrature), effort)
    raw = contour_sum(contour, eps - contour.shift, ref)
    left_out = (spectrum.infinity - xp.expm1(contour.log_kept)) / delta
    error = (raw.tail + raw.rounding)[0]
    # the last factor covers the rounding of ref = log(delta)
    upper = (raw.total[0] + error + left_out) * (1 + (32 + 4 * xp.abs(ref)) * _ULP)
    return xp.fmax(raw.total[0] - error, 0.0), xp.where(xp.isnan(upper), xp.inf, upper)
