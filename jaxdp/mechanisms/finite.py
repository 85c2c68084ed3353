"""Finite pairs of output laws, and the finite pairs that enclose the pairs of noise laws.

A finite pair is (log_p, log_q), two vectors of log masses over the same outcomes, -inf where a law has no mass. The
library's own pairs are a `FinitePair`, which also holds the losses, because log_p - log_q has the rounding of both.
Two changes give a pair that dominates the original, because post-processing leads back to it. One splits an outcome of
masses (p_i, q_i) into two with other ratios but the same sums (a mean-preserving spread of the likelihood ratio); it
discretises a law. The other splits it into (p_i, 0) and (0, q_i); it bounds the outcomes outside a window.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log1mexp, log_complement, log_expm1, log_normal_tail, normal_quantiles
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number

GAUSS_NODES, GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
# numbers of (even, dense, far) cells of a Gaussian pair, see `gaussian_edges`
_CELLS, FINE_CELLS = (1024, 1024, 512), (4096, 3072, 1024)
_NEAR, REACH = 9.0, 37.5  # standard deviations beyond P's mean where near and far cells end; P's tail there: 5e-308
LARGEST_MU = 1e6  # above it, rounding of exponents of size mu^2 spoils P's masses: no bound is claimed
_AROUND = 8  # an edge is averaged with this many neighbours on either side
_LAPLACE_CELLS, _FINE_LAPLACE_CELLS = 1024, 4096
LAPLACE_MIDDLE = 512  # largest number of single outcomes between the modes; 2 x 256, as replace_one doubles the shift


class FinitePair(NamedTuple):
    """Log masses over the outcomes, the losses log p/q (any number where one law has no mass), and their errors.

    blur: bound of the absolute error of each loss. only_p, only_q: P's mass where Q has none, and Q's where P has none,
    rounded up. They are kept as numbers of their own because their logarithms would lose digits.
    """

    log_p: Array
    log_q: Array
    loss: Array
    blur: Array
    only_p: Number = 0.0
    only_q: Number = 0.0


Pair = FinitePair | tuple[Array, Array]


class Part(NamedTuple):
    """The law of the loss L under the first law of a pair, and the masses at infinity of the pair and of its swap.

    blur: bound of the absolute error of each loss. The error of a log weight is at most
    blur + 4 x 2^-53 (|log weight| + |loss| + 8).
    """

    loss: Array
    log_weight: Array
    blur: Array
    infinity: Number
    reverse_infinity: Number


def with_losses(pair: Pair) -> FinitePair:
    """The pair with its losses, computed from the masses where they are not given."""
    if isinstance(pair, FinitePair):
        return FinitePair(*(xp.asarray(side) for side in pair))
    log_p, log_q = (xp.asarray(side) for side in pair)
    live = (log_p > -xp.inf) & (log_q > -xp.inf)
    safe_p, safe_q = xp.where(live, log_p, 0.0), xp.where(live, log_q, 0.0)

    def alone(logs: Array, other_has_mass: Array) -> Array:
        size = xp.where(other_has_mass | (logs == -xp.inf), 0.0, xp.abs(logs) + 8)
        return xp.sum(xp.where(other_has_mass, 0.0, xp.exp(logs) * (1 + (2 * size + logs.shape[0]) * ULP)))

    blur = 4 * ULP * (xp.abs(safe_p) + xp.abs(safe_q) + 1)
    only_p, only_q = alone(log_p, log_q > -xp.inf), alone(log_q, log_p > -xp.inf)
    return FinitePair(log_p, log_q, safe_p - safe_q, blur, only_p, only_q)


def randomized_response_pair(epsilon: Number, categories: Number) -> FinitePair:
    """k-ary randomized response: outcomes "the person's value", "the value that replaces it", "any third value"."""
    scale = xp.log1p((categories - 1.0) * xp.exp(-epsilon))
    # log mass of a third value: log(1 / (1 + (e^eps + 1)/(k - 2))); differences of logarithms lose digits at large k
    thirds = xp.where(categories > 2, categories - 2.0, 1.0)
    moderate = xp.log1p((xp.exp(xp.minimum(epsilon, 600.0)) + 1) / thirds)
    third = -xp.where(epsilon < 600.0, moderate, xp.softplus(epsilon - xp.log(thirds)))
    third = xp.where(categories > 2, third, -xp.inf)
    own, other = -scale, -epsilon - scale
    zero = xp.zeros_like(scale)
    loss = xp.stack([epsilon + zero, -epsilon + zero, zero])
    return FinitePair(xp.stack([own, other, third]), xp.stack([other, own, third]), loss, xp.zeros_like(loss))


def with_leftover(pair: FinitePair, mass_p: Number, mass_q: Number) -> FinitePair:
    """A pair without mass at infinity, extended by two outcomes with masses (mass_p, 0) and (0, mass_q)."""
    mass_p, mass_q = xp.asarray(mass_p, xp.float64), xp.asarray(mass_q, xp.float64)
    nothing = xp.full((), -xp.inf)
    return FinitePair(
        xp.concatenate([pair.log_p, xp.stack([log_mass(mass_p), nothing])]),
        xp.concatenate([pair.log_q, xp.stack([nothing, log_mass(mass_q)])]),
        xp.concatenate([pair.loss, xp.zeros(2)]),
        xp.concatenate([pair.blur, xp.zeros(2)]),
        mass_p,
        mass_q,
    )


def log_mass(mass: Number) -> Array:
    """log(mass), -inf for mass 0."""
    return xp.where(mass > 0, xp.log(xp.where(mass > 0, mass, 1.0)), -xp.inf)


def either(first: FinitePair, second: FinitePair, take_second: Array | bool | np.bool) -> FinitePair:
    """The second pair where ``take_second`` is true, else the first; the shorter one is padded with empty outcomes."""
    length = max(first.loss.shape[-1], second.loss.shape[-1])
    sides = []
    for *arrays, filler in zip(second[:4], first[:4], (-xp.inf, -xp.inf, 0.0, 0.0), strict=True):
        padded = (xp.concatenate([side, xp.full(length - side.shape[-1], filler)]) for side in arrays)
        sides.append(xp.where(take_second, *padded))
    return FinitePair(*sides, *(xp.where(take_second, b, a) for a, b in zip(first[4:], second[4:], strict=True)))


def scaled(pair: FinitePair, lost: Number) -> FinitePair:
    """Both laws scaled by 1 - lost, each with the mass ``lost`` on an outcome where the other law has none."""
    log_kept = log_complement(lost, 1 - lost)
    return with_leftover(pair._replace(log_p=pair.log_p + log_kept, log_q=pair.log_q + log_kept), lost, lost)


def masses_pair(p: Array, q: Array) -> FinitePair:
    """The pair of two vectors of masses; only_p and only_q are left at 0, to be set by the caller."""
    both = (p > 0) & (q > 0)
    safe_p, safe_q = xp.where(both, p, 1.0), xp.where(both, q, 1.0)
    relative_gap = (safe_p - safe_q) / safe_q
    near = xp.abs(relative_gap) < 0.25
    # The loss is log1p((p - q)/q) where log(p/q) would lose digits, and log p - log q where p/q would overflow.
    log_p, log_q = xp.log(safe_p), xp.log(safe_q)
    far = xp.abs(log_p - log_q) > 600.0
    quotient = xp.log(xp.where(far, 1.0, safe_p / safe_q))
    loss = xp.where(near, xp.log1p(xp.where(near, relative_gap, 0.0)), xp.where(far, log_p - log_q, quotient))
    blur = 4 * ULP * xp.where(far, xp.abs(log_p) + xp.abs(log_q), xp.abs(loss))
    return FinitePair(log_mass(p), log_mass(q), loss, blur)


def _with_blur(log_p: Array, log_q: Array, loss: Array) -> FinitePair:
    """A pair without mass at infinity, whose losses have relative errors of at most 8 units of 2^-53."""
    return FinitePair(log_p, log_q, loss, 8 * ULP * xp.abs(loss))


def gaussian_edges(mu: Number, even_cells: int, dense_cells: int, far_cells: int) -> Array:
    """Edges of cells of N(mu, 1) against N(0, 1), as distances d >= 0 from the middle mu / 2; the loss at d is mu d."""
    near_end = mu / 2 + _NEAR
    even = near_end * xp.arange(even_cells) / even_cells
    # The error per length of cells of width h is proportional to density h^2. The total is least where 1/h goes with
    # the cube root of the density, a normal density of variance 3.
    dense = xp.abs(mu / 2 + normal_quantiles(dense_cells, 3.0))
    inner = xp.sort(xp.concatenate([even, dense]))
    outer = near_end + (REACH - _NEAR) * xp.arange(far_cells + 1) / far_cells
    edges = xp.concatenate([inner, outer])
    # Average each edge with its neighbours, so that widths change slowly: the law's transform is then small far out.
    around = xp.concatenate([-edges[_AROUND:0:-1], edges])
    means = xp.mean(around[np.arange(edges.size - _AROUND)[:, None] + np.arange(2 * _AROUND + 1)], axis=1)
    return xp.concatenate([xp.zeros(1), means[1:], edges[-_AROUND:]])


def gauss_error(fall: Array) -> Array:
    """Bound of the relative error of 8 Gauss nodes, for a function that falls by at most ``fall`` nats in the cell.

    The error is (8!)^4 / (17 (16!)^3) max |f^(16)| over a cell of width 1; here f is e^{-fall x} times a share.
    """
    fall = xp.minimum(fall, 1e9)
    return 7e-23 * (1 + fall) ** 3 * fall**15 * (16 + fall)


def _gaussian_cells(mu: Number, fine: bool) -> tuple[Array, Array, Array, Array]:
    """Cells right of the middle: edges, losses of nodes above the left edge, widths in L, log(Q density x weight)."""
    edges = gaussian_edges(mu, *(FINE_CELLS if fine else _CELLS))
    width = xp.diff(edges)[:, None]
    nodes = edges[:-1, None] + width * (0.5 + 0.5 * GAUSS_NODES)
    log_density = -0.5 * (nodes + mu / 2) ** 2 + xp.log(0.5 * width * GAUSS_WEIGHTS) - 0.5 * np.log(2 * np.pi)
    return edges, mu * (nodes - edges[:-1, None]), mu * width, log_density


def shares(up: Array, whole: Array) -> tuple[Array, Array]:
    """(log(1 - r), log r), r = (e^up - 1)/(e^whole - 1): the shares of a mass that go to a cell's left and right end.

    up: the loss at the mass minus the loss at the left end; whole: the width of the cell in L.
    """
    whole = xp.where(whole > 0, whole, 1.0)  # where two edges coincide, the cell has no mass
    total = log_expm1(whole)
    return up + log_expm1(xp.maximum(whole - up, 0.0)) - total, log_expm1(up) - total


def at_edges(to_left: Array, to_right: Array, own: Array | None = None) -> Array:
    """Log masses at the edges of cells, from the log masses that each cell moves to its left and its right edge.

    own: log masses that the edges already have.
    """
    nothing = xp.full(1, -xp.inf)
    parts = [xp.concatenate([to_left, nothing]), xp.concatenate([nothing, to_right])]
    return log_sum(xp.stack(parts if own is None else [*parts, own], axis=1))


def log_sum(terms: Array) -> Array:
    """log sum exp over the last axis; -inf, with derivative 0, for a row without mass."""
    live = xp.max(terms, axis=-1) > -xp.inf
    total = xp.logsumexp(xp.where(live[:, None], terms, 0.0), axis=-1)
    return xp.where(live, total, -xp.inf)


def log_sum_exp(terms: jax.Array) -> jax.Array:
    """log sum exp over the last axis of complex terms, shifted by the largest real part (terms may be -inf)."""
    shift = xp.max(xp.real(terms), axis=-1, keepdims=True)
    shift = xp.stop_gradient(xp.where(xp.isfinite(shift), shift, 0.0))
    return xp.log(xp.sum(xp.exp(terms - shift), axis=-1)) + xp.squeeze(shift, -1)


def mirrored(log_p: Array, log_q: Array, loss: Array, blur: Number = 0.0) -> FinitePair:
    """The outcomes and their mirror images; the error of a loss is at most 8 x 2^-53 |loss| + ``blur``."""
    pair = _with_blur(*(xp.concatenate(x) for x in ((log_p, log_q), (log_q, log_p), (loss, -loss))))
    return pair._replace(blur=pair.blur + xp.tile(xp.broadcast_to(blur, loss.shape), 2))


def gaussian_pair(mu: Number, fine: bool = False) -> FinitePair:
    """A finite pair that dominates N(mu, 1) against N(0, 1): each cell's masses are moved to its two ends.

    In a cell of losses L0 to L1 the share (e^{L - L0} - 1)/(e^{L1 - L0} - 1) of the mass at L goes to the right end,
    which preserves both masses. Eight Gauss nodes integrate it, so that no nearly equal masses are subtracted.
    """
    mu = xp.maximum(mu, 1e-100)
    edges, up, whole, log_density = _gaussian_cells(mu, fine)
    log_q = at_edges(*(xp.logsumexp(log_density + share, axis=1) for share in shares(up, whole)))
    tail = xp.logaddexp(log_normal_tail(edges[-1] - mu / 2), log_normal_tail(edges[-1] + mu / 2)) + 1e-12
    tail = xp.where(mu < LARGEST_MU, tail, 0.0)
    loss = xp.asarray(mu * edges)
    return with_leftover(mirrored(log_q + loss, log_q, loss), xp.exp(tail), xp.exp(tail))


def gaussian_tail_moment(mu: Number, order: Number) -> tuple[Number, Number]:
    """`tail_moment` of `gaussian_pair`: p^a q^(1-a), a = order, is e^{a (a-1) mu^2/2} x the density of N(a mu, 1)."""
    height = 0.5 * order * (order - 1) * mu**2
    log_moment = height + log_normal_tail(xp.asarray(REACH - (order - 1) * mu)) + np.log(2.0)
    return log_moment + 1e-12 * (1 + height), mu * (REACH + mu / 2)


def gaussian_inner_pair(mu: Number, fine: bool = False) -> FinitePair:
    """A finite pair that N(mu, 1) against N(0, 1) dominates: outcomes joined by cell, without the far tails.

    Cells in which the density falls by 3 nats or more are left out, too; below, the Gauss nodes are good to 1e-15.
    """
    mu = xp.maximum(mu, 1e-100)
    edges, up, whole, log_density = _gaussian_cells(mu, fine)
    log_q = xp.logsumexp(log_density, axis=1)
    fall = whole[:, 0] + xp.diff(edges) * (edges[1:] + mu / 2)
    fit = (fall < 3.0) & (log_q > -xp.inf) & (mu < LARGEST_MU)
    log_q = xp.where(fit, log_q, -xp.inf)
    # the cell's mean likelihood ratio divided by the ratio at its left edge, minus 1
    share = xp.exp(log_density - xp.where(fit, log_q, xp.inf)[:, None])
    excess = xp.sum(share * xp.expm1(xp.minimum(up, 3.0)), axis=1)
    loss = mu * edges[:-1] + xp.log1p(excess)
    return mirrored(log_q + loss, log_q, loss)


def laplace_pair(scale: Number, fine: bool = False, inner: bool = False) -> FinitePair:
    """A finite pair that dominates Laplace noise of the given scale, shift 1; the atoms at loss +-1/scale are exact.

    In a cell of width d in L the mean likelihood ratio is the ratio at the cell's middle. The right end therefore gets
    exactly the share 1/(1 + e^{d/2}) of the cell's mass under Q. inner: a pair that the noise dominates, the outcomes
    joined by cell.
    """
    cells = _FINE_LAPLACE_CELLS if fine else _LAPLACE_CELLS
    x, width = xp.arange(cells) / cells, 1.0 / (scale * cells)
    log_cell = -x / scale + xp.log(-xp.expm1(-width)) - np.log(2.0)
    below, above = xp.full(1, -np.log(2.0)), -1 / scale - xp.full(1, np.log(2.0))
    if inner:
        log_q, x = xp.concatenate([below, log_cell, above]), xp.concatenate([xp.zeros(1), x + 0.5 / cells, xp.ones(1)])
    else:
        left, right = log_cell - xp.logaddexp(0.0, -width), log_cell - xp.logaddexp(0.0, width)
        log_q = at_edges(left, right, xp.concatenate([below, xp.full(cells - 1, -xp.inf), above]))
        x = xp.arange(cells + 1) / cells
    loss = (2 * x - 1) / scale
    return _with_blur(log_q + loss, log_q, loss)


def discrete_laplace_pair(scale: Number, sensitivity: Number, fine: bool = False, inner: bool = False) -> FinitePair:
    """The pair of discrete Laplace noise: the outcomes <= 0 as one, the outcomes >= the shift as one, each one between.

    It is exact. If more than `LAPLACE_MIDDLE` lie between, they are grouped in cells as in `laplace_pair`: the pair
    dominates the noise, or is dominated by it (``inner``). Edges of cells lie halfway between integers.
    """
    a, s = 1.0 / scale, xp.asarray(sensitivity)
    x = 1.0 + xp.arange(LAPLACE_MIDDLE)
    end, log_peak = -xp.log1p(xp.exp(-a)), xp.log(xp.tanh(a / 2))
    ends = xp.stack([end, end - a * s])

    def with_ends(log_q: Array, loss: Array) -> FinitePair:
        log_q, loss = xp.concatenate([ends, log_q]), xp.concatenate([a * xp.stack([-s, s]), a * loss])
        return _with_blur(log_q + loss, log_q, loss)

    exact = with_ends(xp.where(x < s, log_peak - a * x, -xp.inf), 2 * x - s)
    count = _LAPLACE_CELLS if fine else LAPLACE_MIDDLE
    start = xp.floor(xp.arange(count + 1.0) * (xp.maximum(s - 1, 1.0) / count))  # a cell may be empty
    half = a * xp.diff(start)  # half the width of each cell in L
    log_cell = xp.where(half > 0, end - a * (start[:-1] + 1) + log1mexp(-xp.where(half > 0, half, 1.0)), -xp.inf)
    if inner:
        cells = with_ends(log_cell, start[:-1] + start[1:] + 1 - s)
    else:
        cells = with_ends(
            at_edges(log_cell - xp.logaddexp(0.0, -half), log_cell - xp.logaddexp(0.0, half)), 2 * start + 1 - s
        )
    return either(exact, cells, s - 1 > LAPLACE_MIDDLE)
