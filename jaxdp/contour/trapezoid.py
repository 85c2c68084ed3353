r"""delta and epsilon from K by the contour trapezoid, certified from both sides.

    S = (h/pi) e^{K(c) - c eps} sum'_{n=0..N} Re[ (M(z_n)/M(c)) e^{-i n h eps} / (z_n (z_n + 1)) ],  z_n = c + i n h

(prime: half weight at n = 0). S - delta is a sum of nonnegative alias terms plus the truncated tail. The
error terms, added outward: alias left (after subtracting M(0)/(e^{c p} - 1) - e^eps M(-1)/(e^{(c+1) p} - 1),
p = 2 pi/h), alias right, truncation, quadrature and rounding of each node, mass cut away, mass at infinity.
The argument for each stands in notebooks/proofs/contour_certificate.md.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxdp.contour.lattice import LatticeContour, build_lattice, lattice_sum
from jaxdp.contour.plan import (
    AliasBound,
    Plan,
    alias_bound,
    log_alias,
    log_chernoff,
    plan_comparison,
    plan_delta,
    plan_epsilon,
)
from jaxdp.contour.spectrum import Nodes, Spectrum, along_line, counted
from jaxdp.contour.truncation import log_fallen, log_held, log_tail
from jaxdp.domains import SMALLEST
from jaxdp.numerics.exponential_sums import Line, blocks_of, discrete_log_m, in_blocks, split
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP as _ULP
from jaxdp.runtime.arrays import xp

SMOOTH_EXPONENT = 16.0  # nats by which the smoothing alone has damped the last node
_FALLEN = 40.0  # nats by which it has to have fallen by itself to need no smoothing
_PLACES = 2.0 ** np.arange(10)  # times the last node: up to where finite laws may be known to be small
_TRIES = 12  # of a search at the lesser efforts
_TRIES_KINKED = 60  # and where a tested end may be far from where Newton expects it, or nothing larger follows
_OUTWARD = 1 + 1e-9  # error terms are rounded up: their exponents are of size 1e3 at most
_TOP_ROUNDING = 1e-11


class Effort(NamedTuple):
    """Static sizes: contour nodes, quadrature nodes; smooth adds a tiny Gaussian (see `Contour`).

    lattice: the loss lies on a lattice (Spectrum.lattice), whose sum over one period is finite and exact.
    bands: edges of the label by which `jaxdp.contour.largest_loss` splits the law; 0 for the plain contour.
    """

    nodes: int
    quadrature: int
    smooth: bool
    lattice: bool = False
    bands: int = 0


class Contour(NamedTuple):
    """Everything that does not depend on eps. Leading axis: the smoothings, s (and 2s when the effort is smooth).

    Smoothing: U_s is delta of the mechanism composed with a Gaussian of mu = s. U_s >= delta, and
    delta >= (1 + w) U_s - w U_2s with w = A(s)/(A(2s) - A(s)), A(s) = erf(s/sqrt 8) (proof in the notes).
    Nodes carry weight = M(z_n)/M(c) / (z_n (z_n + 1)), halved at n = 0, without the factor e^{-i t eps}; node
    n = row * columns + column of a table filled up with zeros, because e^{-i t eps} is a product of two factors.
    """

    plan: Plan
    step: jax.Array
    real: jax.Array  # (smoothings, rows, columns)
    imag: jax.Array
    errors: jax.Array  # sums over the nodes of |weight| times: the node's error, t 2^-53
    log_tail: jax.Array
    extra_mu2: jax.Array
    mixing: jax.Array  # w
    log_m_c: jax.Array
    log_m_c_units: jax.Array  # bound of the error of log_m_c, in units of 2^-53
    log_kept: jax.Array
    shift: jax.Array  # the sum is that of a loss which is larger by an unknown number, at most this in modulus


def build(spectrum: Spectrum, plan: Plan, effort: Effort) -> Contour | LatticeContour:
    """The contour; that of a lattice has no end."""
    return build_lattice(spectrum, plan, effort.nodes) if effort.lattice else build_truncated(spectrum, plan, effort)


def build_truncated(spectrum: Spectrum, plan: Plan, effort: Effort) -> Contour:
    """Evaluate K on the contour and bound what is beyond its end."""
    c, end = plan.c, 2 * xp.pi / plan.period * effort.nodes
    lines = spectrum.lines(c, plan.cut, effort.quadrature)
    fallen = log_fallen(spectrum, lines, c, plan.cut, end)
    extra, mixing, until = xp.zeros(1), xp.zeros(()), end
    if effort.smooth:
        places = end * _PLACES
        known = log_held(spectrum, lines, end, places)
        # what is left out and what is smoothed away, both relative to delta, roughly
        cost = xp.where(_PLACES > 1, xp.exp(known), 0.0) * (effort.nodes / (25 * end**2)) + 16 / places**2
        best = xp.argmin(cost)
        until, held = places[best], known[best]
        extra, mixing = _smoothing(until, spectrum.mu2, fallen)
    mu2 = spectrum.mu2 + extra[0]
    tail = log_tail(spectrum, lines, fallen, until, mu2)
    if effort.smooth:
        before = log_tail(spectrum, lines, xp.minimum(held, fallen), end, mu2)
        tail = xp.logaddexp(tail, xp.where(until > end, before, -xp.inf))
    return on_line(spectrum, plan, effort.nodes, lines, extra)._replace(log_tail=tail, mixing=mixing)


def on_line(spectrum: Spectrum, plan: Plan, count: int, lines: list[Line], extra: jax.Array) -> Contour:
    """The contour's nodes, and what goes with them, with nothing said of what is beyond the last."""
    c, step = plan.c, 2 * xp.pi / plan.period
    nodes = along_line(spectrum, lines, c, step, count + 1)
    log_m_c = xp.real(spectrum.closed(xp.asarray(c, xp.complex128))) + 0.5 * extra * c * (c + 1)
    # K(c) stands here and is taken from every node: two values, each with its error
    units = 16 + 2 * spectrum.closed_units + 4 * xp.abs(log_m_c[-1])
    for part, line in zip(spectrum.parts, lines, strict=True):
        log_m_c = log_m_c + counted(part, line.log_m)
        # log m(c) = top + log(sum) + log(step): each of size |log m| + a dozen, rounded, then multiplied by T; and the
        # nodes are relative to the true m(c)
        units = units + counted(part, 4 * (xp.abs(line.log_m) + 12) + line.error * 2.0**53)
    return through(plan, step, nodes, extra, log_m_c, units)._replace(log_kept=spectrum.log_kept(plan.cut))


def through(
    plan: Plan, step: jax.Array, nodes: Nodes, extra: jax.Array, log_m_c: jax.Array, units: jax.Array
) -> Contour:
    """The contour through the nodes, with nothing said of what is beyond the last or was cut away."""
    real, imag, errors = node_weights(nodes, plan.c, step * xp.arange(nodes.log_abs.shape[0]), extra)
    units, nothing, unknown = xp.broadcast_to(units, extra.shape), xp.zeros(()), xp.asarray(xp.inf)
    return Contour(
        plan, step, table(real), table(imag), errors, unknown, extra, nothing, log_m_c, units, nothing, nodes.shift
    )


def table(values: jax.Array) -> jax.Array:
    """Node weights (..., nodes) as rows of about sqrt(nodes), (smoothings, rows, columns), padded with 0."""
    columns, rows = split(values.shape[-1])
    padded = xp.pad(values, ((0, 0), (0, rows * columns - values.shape[-1])))
    return padded.reshape(-1, rows, columns)


def _smoothing(end: jax.Array, mu2: jax.Array, fallen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(s^2 and (2s)^2, w): s so large that the Gaussian has decayed where the contour ends, 0 if all else has."""
    s2 = xp.maximum(2 * SMOOTH_EXPONENT / end**2 - mu2, 0.0)
    s2 = xp.where(fallen < -_FALLEN, 0.0, s2)
    s = xp.sqrt(s2)
    near, far = xp.erf(s / np.sqrt(8.0)), xp.erf(s / np.sqrt(2.0))
    mixing = xp.where(s2 > 0, near / xp.where(s2 > 0, far - near, 1.0), 0.0) * (1 + 1e-14)
    return xp.stack([s2, 4 * s2]), mixing


def node_weights(nodes: Nodes, c: jax.Array, t: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Real and imaginary node weights and the error sums of `Contour`."""
    # the Gaussian of mu^2 = x multiplies M(c + it)/M(c) by exp(-x t^2/2 + i t x (2c + 1)/2)
    log_abs = nodes.log_abs - 0.5 * extra[:, None] * t**2
    phase = nodes.phase + 0.5 * extra[:, None] * (2 * c + 1) * t
    half = xp.where(xp.arange(t.shape[0]) == 0, 0.5, 1.0)
    # 1/(z (z+1)) by real arithmetic
    a, b = c * (c + 1) - t * t, t * (2 * c + 1)
    norm = 1 / (a * a + b * b)
    size = xp.exp(log_abs) * half
    cosine, sine = xp.cos(phase), xp.sin(phase)
    real, imag = size * norm * (cosine * a + sine * b), size * norm * (sine * a - cosine * b)
    moduli = size * xp.sqrt(norm)
    # the error of M itself (huge where M is only noise), then rounding of the sum and of the phase
    raised = xp.exp(xp.clip(log_abs + nodes.excess, -745.0, 600.0))
    slack = xp.where(nodes.excess < 1, xp.exp(log_abs) * xp.expm1(xp.minimum(nodes.excess, 1.0)), raised)
    columns, rows = split(t.shape[0])
    units = 32 + 1.5 * (sum(blocks_of(columns)) + rows) + 2 * xp.abs(phase)
    own = xp.sum(half * xp.sqrt(norm) * slack + moduli * units * _ULP, axis=-1)
    return real, imag, xp.stack([own, xp.sum(moduli * t, axis=-1) * _ULP])


class Sums(NamedTuple):
    """In units of e^ref: upper and lower bound of delta, and d delta / d eps of the sum."""

    upper: jax.Array
    lower: jax.Array
    middle: jax.Array
    slope: jax.Array


class Raw(NamedTuple):
    """The sum itself in units of e^ref, per smoothing: value, slope in eps, what is left out, rounding."""

    total: jax.Array
    slope: jax.Array
    tail: jax.Array
    rounding: jax.Array


def contour_sum(contour: Contour, eps: jax.Array, ref: jax.Array) -> Raw:
    """The sum of `Contour` at eps, with what is left out beyond its end and its rounding."""
    c, h = contour.plan.c, contour.step
    base = contour.log_m_c - c * eps - ref
    front = xp.exp(base) * h / xp.pi
    rows, columns = contour.real.shape[1:]
    down, along = h * columns * xp.arange(rows), h * xp.arange(columns)
    cosine, sine = xp.cos(along * eps), xp.sin(along * eps)
    waves = xp.stack([cosine, sine, along * cosine, along * sine], axis=1)
    real_waves, imag_waves = (xp.moveaxis(in_blocks(x, waves), -1, 0) for x in (contour.real, contour.imag))
    real, imag = real_waves[0] + imag_waves[1], imag_waves[0] - real_waves[1]
    real_t, imag_t = real_waves[2] + imag_waves[3], imag_waves[2] - real_waves[3]
    cosine, sine = xp.cos(down * eps), xp.sin(down * eps)
    total = xp.sum(real * cosine + imag * sine, axis=1)
    turned = xp.sum((imag_t + down * imag) * cosine - (real_t + down * real) * sine, axis=1)
    exponent = xp.abs(contour.log_m_c) + xp.abs(c * eps) + xp.abs(ref)
    own, moment = contour.errors
    # ``head`` is the error of the logarithm of ``front``; where it exceeds a quarter no bound is claimed
    head = (contour.log_m_c_units + 4 * exponent + 16) * _ULP + 2 * c * contour.shift
    raised = 1 + 2 * xp.minimum(head, 0.25)
    tail = xp.exp(base + contour.log_tail) / xp.pi * _OUTWARD * raised
    rounding = front * ((own + 4 * xp.abs(eps) * moment) * raised + 2 * head * xp.abs(total))
    tail, rounding = (xp.where(head < 0.25, bound, xp.inf) for bound in (tail, rounding))
    return Raw(front * total, front * (turned - c * total), tail, rounding)


class Aliases(NamedTuple):
    """The parts of the alias terms that do not depend on eps; M(0) and M(-1) are those of the finite part.

    log_first, log_second: of M(0)/(e^{c p} - 1) and M(-1)/(e^{(c+1) p} - 1). kept: the share of both that is certain.
    off: their relative error.
    """

    bound: AliasBound
    log_first: jax.Array
    log_second: jax.Array
    kept: jax.Array
    off: jax.Array


def alias_terms(plan: Plan, log_masses: jax.Array, log_kept: jax.Array, off: jax.Array, mu2: jax.Array) -> Aliases:
    """The alias terms given log M(0), log M(-1) and the logarithm of their certain share; mu2: of the smoothing."""
    c, p = plan.c, plan.period
    k_above = plan.k_above + 0.5 * mu2 * plan.above * (plan.above + 1)
    k_below = plan.k_below + 0.5 * mu2 * plan.below * (plan.below + 1)
    return Aliases(
        alias_bound(plan, k_above, k_below),
        log_masses[0] - xp.maximum(c * p, 1e-300) - xp.log(-xp.expm1(-c * p)),
        log_masses[1] - (c + 1) * p - xp.log(-xp.expm1(-(c + 1) * p)),
        xp.exp(log_kept),
        off,
    )


def aliases(contour: Contour | LatticeContour, spectrum: Spectrum) -> Aliases:
    """The alias terms of a contour, for `evaluate`."""
    ends = xp.real(spectrum.closed(xp.array([0.0, -1.0], xp.complex128)))
    off = spectrum.closed_units * _ULP
    for atoms in spectrum.discrete:
        both, error = discrete_log_m(xp.array([[0.0], [-1.0]]), atoms.loss, atoms.log_weight, atoms.blur)
        ends = ends + counted(atoms, both)
        off = off + xp.max(counted(atoms, error + 4 * _ULP))
    off = xp.where(off < 0.25, off * (1 + off), xp.inf)
    return alias_terms(contour.plan, ends, contour.log_kept, off, contour.extra_mu2[-1])


def enclosed(contour: Contour | LatticeContour, known: Aliases, eps: jax.Array, ref: jax.Array) -> tuple[Sums, Raw]:
    """Bounds of the finite part of delta as of `evaluate`, for each smoothing, and the sum they are from."""
    raw = (
        Raw(*lattice_sum(contour, eps, ref)) if isinstance(contour, LatticeContour) else contour_sum(contour, eps, ref)
    )
    left, right = log_alias(known.bound, eps, contour.shift)
    left, right = xp.exp(left - ref) * _OUTWARD, xp.exp(right - ref) * _OUTWARD
    left_low, left_high = _left_alias(contour, known, left, eps, ref)
    middle, error = raw.total - left_low, raw.tail + raw.rounding
    return Sums(middle + error, raw.total - left_high - right - error, middle, raw.slope), raw


def evaluate(
    contour: Contour | LatticeContour, known: Aliases, spectrum: Spectrum, eps: jax.Array, ref: jax.Array
) -> Sums:
    """Certified delta at a number within ``contour.shift`` of eps, the same distance for all eps, in units of e^ref."""
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
    contour: Contour | LatticeContour, known: Aliases, rest: jax.Array, eps: jax.Array, ref: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Bounds of the alias left of eps, sum_j e^{-c j p} delta(eps - j p), j >= 1.

    delta(e) = M(0) - e^e M(-1) + e^e delta_QP(-e), and ``rest`` bounds the last term. Besides 0 <= delta(e) <= M(0),
    which is the better bound where e^e is large.
    """
    first, second = xp.exp(known.log_first - ref), xp.exp(known.log_second + eps - ref)
    rounded = 1e-14 * (1 + contour.plan.c * contour.plan.period + xp.abs(ref) + xp.abs(eps)) + known.off
    rounded = rounded + 2 * contour.shift
    blur = rounded * (first + second)
    low = first * known.kept - second - blur
    high = first - second * known.kept + blur + rest
    return xp.fmax(low, 0.0), xp.fmin(high, first * (1 + rounded))


def epsilon_bounds(
    spectrum: Spectrum, delta: jax.Array, known: jax.Array, effort: Effort
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon at delta in [0, 1]. known: an upper bound of epsilon, or inf."""
    spare = delta - spectrum.infinity
    inside = (spare > 0) & (delta < 1)
    ref = xp.log(xp.where(inside, spare, 0.5))
    plan = plan_epsilon(spectrum, ref + xp.log1p(-1e-9), effort.quadrature, known)
    contour = build(spectrum, plan, effort)
    target = xp.where(inside, delta, 1.0) * xp.exp(-ref)

    left_and_right = aliases(contour, spectrum)
    # The Chernoff bound certifies this end, because it leaves 1e-9 of delta for the mass cut away (at most 1e-10).
    enough = -xp.expm1(contour.log_kept) <= 1e-9 * xp.exp(ref)
    ceiling = xp.where(enough & xp.isfinite(plan.rdp_epsilon), xp.maximum(plan.rdp_epsilon, 0.0) * (1 + 1e-12), xp.inf)
    ceiling = xp.minimum(xp.minimum(ceiling, known), spectrum.top)
    search = xp.where(xp.isfinite(ceiling), ceiling, 1.0)

    def at(eps: jax.Array) -> Evaluation:
        return relative_to(target, evaluate(contour, left_and_right, spectrum, eps, ref))

    # A long search on a smooth delta is not worth its time: a larger effort will be asked next.
    kinked = effort.lattice or effort.quadrature == 1 or bool(spectrum.discrete)
    tries = _TRIES if effort.nodes < 10_000 and not kinked else _TRIES_KINKED
    lower, upper, _ = proved_ends(at, 0.0, 0.9 * search, search, ceiling=ceiling, most_tries=tries)
    lower = xp.maximum(lower - contour.shift, 0.0) * (1 - 2 * _ULP)
    upper = xp.minimum((upper + contour.shift) * (1 + 2 * _ULP), ceiling)
    return epsilon_edges(spectrum, delta, inside, lower, upper)


def relative_to(target: jax.Array, sums: Sums) -> Evaluation:
    """Logarithms of sums relative to ``target``.

    A negative sum is lost in rounding: by much left of the root, by little right of it. An upper bound that is not
    positive proves nothing: something in it underflowed.
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
    """The bounds found; those known without a search where delta is not between the mass at infinity and 1."""
    # a lossless mechanism (K = 0) has epsilon 0; delta = 0 asks for the supremum of the loss
    top = xp.maximum(spectrum.top, 0.0)
    blur = sum((counted(part, xp.max(part.blur, axis=-1)) for part in spectrum.discrete), xp.zeros(()))
    exact_zero = (delta == 0) & (spectrum.infinity == 0)
    outside = xp.where(delta >= 1, 0.0, xp.where(exact_zero, top, xp.inf))
    flat = (delta == spectrum.infinity) & (delta > 0) & (delta < 1)
    upper = xp.where(inside, xp.minimum(upper, top), xp.where(flat, top, outside))
    # The supremum and the mass at infinity are rounded up, the supremum by the error of the losses.
    supremum = xp.maximum(top * (1 - _TOP_ROUNDING) - 2 * blur, 0.0)
    never = xp.where(exact_zero, supremum, xp.where(delta < spectrum.infinity_low, xp.inf, 0.0))
    lower = xp.where(inside, xp.minimum(lower, upper), xp.where(delta >= 1, 0.0, never))
    known = (delta >= 0) & (delta <= 1)
    trivial = spectrum.top <= 0
    upper = xp.where(trivial & (delta >= spectrum.infinity), 0.0, upper)
    return (
        xp.where(known & ~xp.isnan(lower) & ~(trivial & inside), lower, 0.0),
        xp.where(known & ~xp.isnan(upper), upper, xp.inf),
    )


def _upper_left(plan: Plan, reverse_infinity: jax.Array, eps: jax.Array) -> jax.Array:
    """1 - e^eps + e^eps delta(-eps) of the swapped pair, from its Chernoff bound: close left of the losses' bulk."""
    swapped = xp.exp(xp.min(log_chernoff(plan.below, plan.k_below, -eps))) + reverse_infinity
    least = -xp.expm1(xp.minimum(eps, 0.0))
    return xp.where(eps < 0, (least + xp.exp(xp.minimum(eps, 0.0)) * swapped) * (1 + 8 * _ULP) + SMALLEST, xp.inf)


def delta_bounds(spectrum: Spectrum, eps: jax.Array, known: jax.Array, effort: Effort) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta at eps (any sign). known: an upper bound of delta, or 1."""
    finite = xp.isfinite(eps)
    e = xp.where(finite, eps, 1.0)
    plan = plan_delta(spectrum, e, effort.quadrature, xp.log(xp.clip(known, SMALLEST, 1.0)))
    contour = build(spectrum, plan, effort)
    ref = xp.where(xp.isfinite(plan.log_chernoff), xp.clip(plan.log_chernoff, -700.0, 0.0), 0.0)  # e^-ref is finite
    left_and_right = aliases(contour, spectrum)
    sides = e + contour.shift * xp.array([0.0] if effort.lattice else [-1.0, 1.0])
    sums = xp.vmap(lambda eps: evaluate(contour, left_and_right, spectrum, eps, ref))(sides)
    # what underflows is charged the smallest normal number
    upper = xp.where(sums.upper[0] > 0, sums.upper[0] * xp.exp(ref), xp.inf) + SMALLEST
    lower = sums.lower[-1] * xp.exp(ref)
    chernoff = xp.exp(plan.log_chernoff) * (1 + 1e-12) + spectrum.infinity - xp.expm1(contour.log_kept)
    upper = xp.minimum(upper, chernoff * (1 + 4 * _ULP) + SMALLEST)
    upper = xp.minimum(upper, _upper_left(plan, spectrum.reverse_infinity, e))
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
    """Certified (lower, upper) of a contour's sum over delta, 0 < delta < 1; delta(eps), eps > 0, is at most the sum.

    The alias terms are not subtracted: they are nonnegative.
    """
    ref = xp.log(delta)
    contour = build_truncated(spectrum, plan_comparison(spectrum, eps, ref, effort.quadrature), effort)
    raw = contour_sum(contour, eps - contour.shift, ref)
    left_out = (spectrum.infinity - xp.expm1(contour.log_kept)) / delta
    error = (raw.tail + raw.rounding)[0]
    # besides: ref is the logarithm of delta to two units
    upper = (raw.total[0] + error + left_out) * (1 + (32 + 4 * xp.abs(ref)) * _ULP)
    return xp.fmax(raw.total[0] - error, 0.0), xp.where(xp.isnan(upper), xp.inf, upper)
