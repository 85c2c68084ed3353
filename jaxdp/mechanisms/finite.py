"""Finite pairs of output laws: what sampling makes of them, and the finite pairs that dominate continuous ones.

A finite pair is (log_p, log_q), two vectors of log masses over the same outcomes, -inf where a law has no mass; the
library's own are a `FinitePair`, which also knows its losses, because log_p - log_q has the rounding of both.
Splitting an outcome of masses (p_i, q_i) into two of other ratios but the same sums dominates (a mean-preserving
spread of the likelihood ratio: the larger pair post-processes to the smaller), and so does splitting it into
(p_i, 0) and (0, q_i). The first discretises, the second bounds what lies outside a window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.rounding import ULP
from jaxdp.special import log_complement, log_expm1, log_normal_tail, log_one_plus, normal_quantiles

_LEAST = 2.3e-308  # subnormal numbers are flushed to 0
Pair = tuple[Any, ...]
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
# cells of a Gaussian: (even, dense, far) ones
_CELLS, _FINE_CELLS = (1024, 1024, 512), (4096, 3072, 1024)
_FINE_REACH, _FULL_REACH = 9.0, 37.5  # standard deviations of P; the tail beyond the second is 5e-308
LARGEST_MU = 1e6  # beyond it exponents of size mu^2 lose the digits that tell P's masses: nothing is claimed
LAPLACE_CELLS, FINE_LAPLACE_CELLS = 1024, 4096
LAPLACE_MIDDLE = 512  # twice 256: under replace_one the shift is two contributions


class FinitePair(NamedTuple):
    """A finite pair with its losses log p/q (any number where one law has no mass) and what they may be off by.

    only_p, only_q: all of the mass that one law has where the other has none, not less than it is (its logarithm loses
    digits).
    """

    log_p: Any
    log_q: Any
    loss: Any
    blur: Any
    only_p: Any = 0.0
    only_q: Any = 0.0


class Part(NamedTuple):
    """The law of L under the first law of a pair, and the masses at infinity of the pair and of its swap.

    blur: bound of the absolute error of each loss. A log weight may be off by as much, and by 4 units of 2^-53 times
    (its size + that of the loss + 8).
    """

    loss: Any
    log_weight: Any
    blur: Any
    infinity: Any
    reverse_infinity: Any


def with_losses(pair: Pair) -> FinitePair:
    """The pair, its losses from its masses if it does not know them."""
    if isinstance(pair, FinitePair):
        return FinitePair(*(jnp.asarray(side) for side in pair))
    log_p, log_q = (jnp.asarray(side) for side in pair)
    live = (log_p > -jnp.inf) & (log_q > -jnp.inf)
    one, other = jnp.where(live, log_p, 0.0), jnp.where(live, log_q, 0.0)

    def alone(log_mass: Any, there: Any) -> Any:
        size = jnp.where(there | (log_mass == -jnp.inf), 0.0, jnp.abs(log_mass) + 8)
        return jnp.sum(jnp.where(there, 0.0, jnp.exp(log_mass) * (1 + (2 * size + log_mass.shape[0]) * ULP)))

    blur = 4 * ULP * (jnp.abs(one) + jnp.abs(other) + 1)
    only_p, only_q = alone(log_p, log_q > -jnp.inf), alone(log_q, log_p > -jnp.inf)
    return FinitePair(log_p, log_q, one - other, blur, only_p, only_q)


def mixture_log_ratio(w: Any, q: Any) -> Any:
    """log(1 - q + q e^w), accurate relative to itself for small q; w = -inf allowed.

    For q > 1/2 the roles are swapped, w + log(q + (1 - q) e^-w): next to w = -inf, 1 + q expm1(w) would cancel.
    """
    flip = q > 0.5
    x, rate = jnp.where(flip, -w, w), jnp.where(flip, 1 - q, q)
    large = x > 30
    middle = jnp.where(large, 0.0, x)
    excess = rate * jnp.expm1(middle)
    small_form = log_one_plus(excess) - jnp.where(flip, middle, 0.0)
    safe = jnp.where(rate > 0, rate, 1.0)
    far = jnp.log(safe) + jnp.log1p((1 - rate) / safe * jnp.exp(-jnp.maximum(x, 30.0)))
    # log A(x) is far + x: under a flip that x goes with the w outside
    big_form = far + jnp.where(large & ~flip, x, 0.0)
    return jnp.where(rate > 0, jnp.where(large, big_form, small_form), jnp.where(flip, w, 0.0))


def _mixture_blur(w: Any, blur: Any, ratio: Any, q: Any) -> Any:
    """What `mixture_log_ratio` may be off by when w is off by `blur`; nothing is added at q = 1."""
    live, size = jnp.isfinite(ratio), jnp.where(jnp.isfinite(ratio), jnp.abs(ratio), 0.0)
    room = jnp.log(jnp.where(q > 0, q, 1e-300)) + jnp.where(live, w - ratio, -jnp.inf)
    share = jnp.exp(jnp.minimum(room, 0.0))
    own = ULP * (24 * size + jnp.where(q > 0.5, 8 * jnp.minimum(jnp.abs(w), 80.0), 0.0))
    return share * blur + jnp.where(q < 1, own, 0.0)


def sampled_part(pair: Pair, rate: Any, direction: str) -> Part:
    """The pair ((1-q) Q + q P, Q) ("forward"), its swap ("reverse"), or the symmetric pair of Proposition 29.

    The last ("replace") asks for a symmetric base pair: its positive losses are those of the forward pair, the
    negative ones their mirror image, and the remaining mass has loss 0.
    """
    log_p, log_q, plain, blur, only_p, only_q = with_losses(pair)
    in_p, in_q = log_p > -jnp.inf, log_q > -jnp.inf
    base = jnp.where(in_p & in_q, plain, -jnp.inf)
    ratio = mixture_log_ratio(base, rate)
    live = in_q & (ratio > -jnp.inf)
    loss = jnp.where(live, ratio, 0.0)
    blur = jnp.where(live, _mixture_blur(base, jnp.where(in_p & in_q, blur, 0.0), ratio, rate), 0.0)
    under_q = jnp.where(live, log_q, -jnp.inf)
    # with everyone sampled the masses are those of the base; what some rounds leave out, P has under Q's outcomes
    some_p = jnp.maximum(rate * only_p * jnp.where(rate < 1, 1 + 4 * ULP, 1.0), _LEAST)
    some_p = jnp.where((rate > 0) & (only_p > 0), some_p, 0.0)
    only_q = jnp.where(rate < 1, 0.0, only_q)
    if direction == "forward":
        return Part(loss, under_q + loss, blur, some_p, only_q)
    if direction == "reverse":
        return Part(-loss, under_q, blur, only_q, some_p)
    up = live & (base > 0)
    same = jnp.sum(jnp.where(in_p & in_q & (base == 0), jnp.exp(log_q), 0.0))
    total_variation = only_p + jnp.sum(jnp.where(up, -jnp.exp(log_p) * jnp.expm1(-jnp.where(up, base, 0.0)), 0.0))
    # 1 less the two sides, without the subtraction; uses the symmetry of the base
    rest = jnp.log(same + (1 - rate) * total_variation)
    loss, under_q = jnp.where(up, loss, 0.0), jnp.where(up, under_q, -jnp.inf)
    return Part(
        jnp.concatenate([loss, -loss, jnp.zeros(1)]),
        jnp.concatenate([under_q + loss, under_q, rest[None]]),
        # the last one's loss is exact, its mass is a sum
        jnp.concatenate([blur, blur, jnp.full(1, loss.shape[0] * ULP)]),
        some_p,
        some_p,
    )


def plain_part(pair: Pair, direction: str) -> Part:
    """The pair itself, or its swap."""
    pair = with_losses(pair)
    if direction == "reverse":
        pair = FinitePair(pair.log_q, pair.log_p, -pair.loss, pair.blur, pair.only_q, pair.only_p)
    return sampled_part(pair, jnp.ones(()), "forward")


def randomized_response_pair(epsilon: Any, categories: Any) -> FinitePair:
    """The three outcomes of k-ary randomized response: one's own value, the other's, any third; exact losses."""
    scale = jnp.log1p((categories - 1.0) * jnp.exp(-epsilon))
    # the third as log of 1 / (1 + (e^eps + 1)/(k - 2)): differences of logarithms lose the digits of a large k
    some = jnp.where(categories > 2, categories - 2.0, 1.0)
    near = jnp.log1p((jnp.exp(jnp.minimum(epsilon, 600.0)) + 1) / some)
    third = -jnp.where(epsilon < 600.0, near, jax.nn.softplus(epsilon - jnp.log(some)))
    rest = jnp.where(categories > 2, third, -jnp.inf)
    own, other = -scale, -epsilon - scale
    zero = jnp.zeros_like(scale)
    loss = jnp.stack([epsilon + zero, -epsilon + zero, zero])
    return FinitePair(jnp.stack([own, other, rest]), jnp.stack([other, own, rest]), loss, jnp.zeros_like(loss))


def with_leftover(pair: FinitePair, mass_p: Any, mass_q: Any) -> FinitePair:
    """A pair with no mass at infinity, and two more outcomes, (mass_p, 0) and (0, mass_q)."""
    mass_p, mass_q = jnp.asarray(mass_p, jnp.float64), jnp.asarray(mass_q, jnp.float64)
    nothing = jnp.full((), -jnp.inf)
    return FinitePair(
        jnp.concatenate([pair.log_p, jnp.stack([_log(mass_p), nothing])]),
        jnp.concatenate([pair.log_q, jnp.stack([nothing, _log(mass_q)])]),
        jnp.concatenate([pair.loss, jnp.zeros(2)]),
        jnp.concatenate([pair.blur, jnp.zeros(2)]),
        mass_p,
        mass_q,
    )


def _log(mass: Any) -> Any:
    return jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)


def either(first: FinitePair, second: FinitePair, take_second: Any) -> FinitePair:
    """One of two pairs, as long as the longer one."""
    size = max(first.loss.shape[-1], second.loss.shape[-1])

    def padded(side: Any, filler: float) -> Any:
        return jnp.concatenate([side, jnp.full(size - side.shape[-1], filler)])

    fillers = (-jnp.inf, -jnp.inf, 0.0, 0.0)
    sides = [
        jnp.where(take_second, padded(b, filler), padded(a, filler))
        for a, b, filler in zip(first[:4], second[:4], fillers, strict=True)
    ]
    return FinitePair(*sides, *(jnp.where(take_second, b, a) for a, b in zip(first[4:], second[4:], strict=True)))


def without_leftover(pair: FinitePair) -> FinitePair:
    """The outcomes that both laws have. It is dominated: what is left out only adds to a divergence."""
    both = (pair.log_p > -jnp.inf) & (pair.log_q > -jnp.inf)
    nothing = jnp.zeros(())
    log_p, log_q = (jnp.where(both, side, -jnp.inf) for side in (pair.log_p, pair.log_q))
    return pair._replace(log_p=log_p, log_q=log_q, only_p=nothing, only_q=nothing)


def scaled(pair: FinitePair, lost: Any) -> FinitePair:
    """Both laws times 1 - lost, and the mass that is lost where the other law has none."""
    kept = log_complement(lost, 1 - lost)
    return with_leftover(pair._replace(log_p=pair.log_p + kept, log_q=pair.log_q + kept), lost, lost)


def masses_pair(p: Any, q: Any) -> FinitePair:
    """The pair of two vectors of masses, its own only_p and only_q not counted."""
    both = (p > 0) & (q > 0)
    one, other = jnp.where(both, p, 1.0), jnp.where(both, q, 1.0)
    gap = (one - other) / other
    near = jnp.abs(gap) < 0.25
    # the quotient overflows where the masses are too far apart; next to 1 only the difference keeps its digits
    far = jnp.abs(jnp.log(one) - jnp.log(other)) > 600.0
    quotient = jnp.log(jnp.where(far, 1.0, one / other))
    difference = jnp.log(one) - jnp.log(other)
    loss = jnp.where(near, jnp.log1p(jnp.where(near, gap, 0.0)), jnp.where(far, difference, quotient))
    blur = 4 * ULP * jnp.where(far, jnp.abs(jnp.log(one)) + jnp.abs(jnp.log(other)), jnp.abs(loss))
    return FinitePair(_log(p), _log(q), loss, blur)


def _rounded(log_p: Any, log_q: Any, loss: Any) -> FinitePair:
    """A pair with no mass at infinity, its losses within 8 units of themselves."""
    return FinitePair(log_p, log_q, loss, 8 * ULP * jnp.abs(loss))


class _Cells(NamedTuple):
    """Cells of the outcome right of the middle, where the loss is mu x the distance from it, and nodes in each."""

    edges: Any
    above: Any  # of the nodes above the cell's left edge, in L
    whole: Any  # width in L
    log_density: Any  # of Q, times the node's weight


def gaussian_edges(mu: Any, even_cells: int, dense_cells: int, far_cells: int) -> Any:
    """Edges of cells of N(mu, 1) against N(0, 1): distances from the middle, where the loss mu x edge is 0."""
    fine = mu / 2 + _FINE_REACH
    even = fine * jnp.arange(even_cells) / even_cells
    # what a cell of width h costs goes with density h^2: least where 1/h goes with the density's cube root
    dense = jnp.abs(mu / 2 + normal_quantiles(dense_cells, 3.0))
    inner = jnp.sort(jnp.concatenate([even, dense]))
    outer = fine + (_FULL_REACH - _FINE_REACH) * jnp.arange(far_cells + 1) / far_cells
    return jnp.concatenate([inner, outer])


def gauss_error(fall: Any) -> Any:
    """Bound of the error of 8 Gauss nodes, relative, for a function that falls by at most so many nats in the cell.

    (8!)^4 / (17 (16!)^3) max f^(16) over a cell of width 1; the factors are for f being e^{-fall x} times a share.
    """
    fall = jnp.minimum(fall, 1e9)
    return 7e-23 * (1 + fall) ** 3 * fall**15 * (16 + fall)


def _gaussian_cells(mu: Any, many: bool) -> _Cells:
    edges = gaussian_edges(mu, *(_FINE_CELLS if many else _CELLS))
    width = jnp.diff(edges)[:, None]
    nodes = edges[:-1, None] + width * (0.5 + 0.5 * _GAUSS_NODES)
    log_density = -0.5 * (nodes + mu / 2) ** 2 + jnp.log(0.5 * width * _GAUSS_WEIGHTS) - 0.5 * np.log(2 * np.pi)
    return _Cells(edges, mu * (nodes - edges[:-1, None]), mu * width, log_density)


def mirrored(log_p: Any, log_q: Any, loss: Any, blur: Any = 0.0) -> FinitePair:
    """The outcomes and their mirror images; losses within 8 units of themselves and ``blur``."""
    pair = _rounded(*(jnp.concatenate(x) for x in ((log_p, log_q), (log_q, log_p), (loss, -loss))))
    return pair._replace(blur=pair.blur + jnp.tile(jnp.broadcast_to(blur, loss.shape), 2))


def gaussian_pair(mu: Any, fine: bool = False) -> FinitePair:
    """A finite pair that dominates N(mu, 1) against N(0, 1): each cell's masses moved to its two ends.

    The share of a cell that goes to its right end, (e^{L - L0} - 1)/(e^{L1 - L0} - 1), preserves both masses. It
    is integrated by 8 Gauss nodes a cell, so no two nearly equal masses are ever subtracted.
    """
    mu = jnp.maximum(mu, 1e-100)
    edges, up, whole, log_density = _gaussian_cells(mu, fine)
    # (two edges may coincide: a cell without mass)
    whole = jnp.where(whole > 0, whole, 1.0)
    to_right = log_expm1(up) - log_expm1(whole)
    to_left = up + log_expm1(jnp.maximum(whole - up, 0.0)) - log_expm1(whole)
    right = jax.nn.logsumexp(log_density + to_right, axis=1)
    left = jax.nn.logsumexp(log_density + to_left, axis=1)
    edge = jnp.full(1, -jnp.inf)
    log_q = jnp.logaddexp(jnp.concatenate([left, edge]), jnp.concatenate([edge, right]))
    tail = jnp.logaddexp(log_normal_tail(edges[-1] - mu / 2), log_normal_tail(edges[-1] + mu / 2)) + 1e-12
    tail = jnp.where(mu < LARGEST_MU, tail, 0.0)
    return with_leftover(mirrored(log_q + mu * edges, log_q, mu * edges), jnp.exp(tail), jnp.exp(tail))


def gaussian_inner_pair(mu: Any, fine: bool = False) -> FinitePair:
    """A finite pair that N(mu, 1) against N(0, 1) dominates: which cell the outcome is in, without the far tails.

    Also without cells in which the density falls too far for the Gauss nodes (3 nats: they are then good to 1e-15).
    """
    mu = jnp.maximum(mu, 1e-100)
    edges, up, whole, log_density = _gaussian_cells(mu, fine)
    log_q = jax.nn.logsumexp(log_density, axis=1)
    fall = whole[:, 0] + jnp.diff(edges) * (edges[1:] + mu / 2)
    fit = (fall < 3.0) & (log_q > -jnp.inf) & (mu < LARGEST_MU)
    log_q = jnp.where(fit, log_q, -jnp.inf)
    # the cell's mean likelihood ratio, relative to that of its left edge
    share = jnp.exp(log_density - jnp.where(fit, log_q, jnp.inf)[:, None])
    excess = jnp.sum(share * jnp.expm1(jnp.minimum(up, 3.0)), axis=1)
    loss = mu * edges[:-1] + jnp.log1p(excess)
    return mirrored(log_q + loss, log_q, loss)


def _laplace_cells(scale: Any, cells: int) -> tuple[Any, Any, Any]:
    """(log mass under Q of the cells between 0 and the shift, their width in L, and of either end under Q)."""
    x = jnp.arange(cells) / cells
    width = 1.0 / (scale * cells)
    log_cell = -x / scale + jnp.log(-jnp.expm1(-width)) - np.log(2.0)
    return log_cell, width, (jnp.full(1, -np.log(2.0)), -1 / scale - jnp.full(1, np.log(2.0)))


def laplace_pair(scale: Any, cells: int = LAPLACE_CELLS) -> FinitePair:
    """A finite pair that dominates Laplace noise of the given scale, shift 1: the atoms +-1/scale stay exact.

    In a cell of width d (in L) the likelihood ratio averages to that of its middle, so the right end gets the
    share 1/(1 + e^{d/2}) of the cell's mass under Q, exactly.
    """
    log_cell, width, (below, above) = _laplace_cells(scale, cells)
    right, left = log_cell - jnp.logaddexp(0.0, width), log_cell - jnp.logaddexp(0.0, -width)
    log_q = jnp.logaddexp(jnp.concatenate([left, above]), jnp.concatenate([below, right]))
    loss = (2 * jnp.arange(cells + 1) / cells - 1) / scale
    return _rounded(log_q + loss, log_q, loss)


def laplace_inner_pair(scale: Any, cells: int = LAPLACE_CELLS) -> FinitePair:
    """A finite pair that Laplace noise dominates: which cell the outcome is in."""
    log_cell, _, (below, above) = _laplace_cells(scale, cells)
    middle = (2 * (jnp.arange(cells) + 0.5) / cells - 1) / scale
    log_q = jnp.concatenate([below, log_cell, above])
    loss = jnp.concatenate([jnp.full(1, -1 / scale), middle, jnp.full(1, 1 / scale)])
    return _rounded(log_q + loss, log_q, loss)


def discrete_laplace_pair(scale: Any, sensitivity: Any) -> FinitePair:
    """Discrete Laplace noise, exactly: the outcomes up to 0, from the shift on, and each one between.

    More than `LAPLACE_MIDDLE` between: all of those are split into (p, 0) and (0, q).
    """
    a, s, zero = 1.0 / scale, sensitivity, jnp.zeros(())
    x = 1.0 + jnp.arange(LAPLACE_MIDDLE)
    fits = s - 1 <= LAPLACE_MIDDLE
    log_peak = jnp.log(jnp.tanh(a / 2))
    inside = (x < s) & fits
    middle_q = jnp.where(inside, log_peak - a * x, -jnp.inf)
    middle_p = jnp.where(inside, log_peak - a * (s - x), -jnp.inf)
    end = -jnp.log1p(jnp.exp(-a))
    between = jnp.where(fits, 0.0, 1.0)  # at most all of it
    log_q = jnp.concatenate([jnp.stack([end, end - a * s]), middle_q])
    log_p = jnp.concatenate([jnp.stack([end - a * s, end]), middle_p])
    loss = a * jnp.concatenate([jnp.stack([-s + zero, s + zero]), 2 * x - s])
    return with_leftover(_rounded(log_p, log_q, loss), between, between)
