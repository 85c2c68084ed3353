"""Finite pairs of output laws: what sampling makes of them, and the finite pairs that dominate continuous ones.

A finite pair is (log_p, log_q), two vectors of log masses over the same outcomes, -inf where a law has no mass.
Splitting an outcome of masses (p_i, q_i) into two of other ratios but the same sums dominates (a mean-preserving
spread of the likelihood ratio: the larger pair post-processes to the smaller), and so does splitting it into
(p_i, 0) and (0, q_i). The first discretises, the second bounds what lies outside a window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.special import log_normal_tail

Pair = tuple[Any, Any]
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)
_FINE_CELLS, _COARSE_CELLS = 1536, 512
_FINE_REACH, _FULL_REACH = 9.0, 37.5  # standard deviations of P; the tail beyond the second is 5e-308
_LAPLACE_CELLS = 512
_LATTICE_HALF_WIDTH = 1024
LAPLACE_MIDDLE = 256


class Part(NamedTuple):
    """The law of L under the first law of a pair, and the masses at infinity of the pair and of its swap."""

    loss: Any
    log_weight: Any
    infinity: Any
    reverse_infinity: Any


def mixture_log_ratio(w: Any, q: Any) -> Any:
    """log(1 - q + q e^w), accurate relative to itself for small q; w = -inf allowed."""
    large = w > 30
    excess = q * jnp.expm1(jnp.where(large, 0.0, w))
    near = jnp.abs(excess) < 0.25
    # XLA's log1p is up to 129 ulp off near -0.414 (jax-ml/jax 39707); away from 0 the plain logarithm is not
    small_form = jnp.where(near, jnp.log1p(jnp.where(near, excess, 0.0)), jnp.log(jnp.where(near, 1.0, 1.0 + excess)))
    rate = jnp.where(q > 0, q, 1.0)
    big_form = jnp.log(rate) + jnp.where(large, w, 30.0) + jnp.log1p((1 - q) / rate * jnp.exp(-jnp.maximum(w, 30.0)))
    return jnp.where(q > 0, jnp.where(large, big_form, small_form), 0.0)


def sampled_part(pair: Pair, rate: Any, direction: str) -> Part:
    """The pair ((1-q) Q + q P, Q) ("forward"), its swap ("reverse"), or the symmetric pair of Proposition 29.

    The last ("replace") asks for a symmetric base pair: its positive losses are those of the forward pair, the
    negative ones their mirror image, and the remaining mass has loss 0.
    """
    log_p, log_q = (jnp.asarray(side) for side in pair)
    in_p, in_q = log_p > -jnp.inf, log_q > -jnp.inf
    base = jnp.where(in_p & in_q, jnp.where(in_p, log_p, 0.0) - jnp.where(in_q, log_q, 0.0), -jnp.inf)
    ratio = mixture_log_ratio(base, rate)
    live = in_q & (ratio > -jnp.inf)
    loss = jnp.where(live, ratio, 0.0)
    under_q = jnp.where(live, log_q, -jnp.inf)
    only_p = jnp.sum(jnp.where(in_q, 0.0, jnp.exp(log_p)))
    only_q = jnp.sum(jnp.where(in_q & ~live, jnp.exp(log_q), 0.0))
    if direction == "forward":
        return Part(loss, under_q + loss, rate * only_p, only_q)
    if direction == "reverse":
        return Part(-loss, under_q, only_q, rate * only_p)
    up = live & (base > 0)
    same = jnp.sum(jnp.where(in_p & in_q & (base == 0), jnp.exp(log_q), 0.0))
    total_variation = only_p + jnp.sum(jnp.where(up, -jnp.exp(log_p) * jnp.expm1(-jnp.where(up, base, 0.0)), 0.0))
    # 1 less the two sides, without the subtraction; uses the symmetry of the base
    rest = jnp.log(same + (1 - rate) * total_variation)
    loss, under_q = jnp.where(up, loss, 0.0), jnp.where(up, under_q, -jnp.inf)
    return Part(
        jnp.concatenate([loss, -loss, jnp.zeros(1)]),
        jnp.concatenate([under_q + loss, under_q, rest[None]]),
        rate * only_p,
        rate * only_p,
    )


def plain_part(pair: Pair, direction: str) -> Part:
    """The pair itself, or its swap."""
    if direction == "reverse":
        pair = pair[1], pair[0]
    return sampled_part(pair, jnp.ones(()), "forward")


def randomized_response_pair(epsilon: Any, categories: Any) -> Pair:
    """The three outcomes of k-ary randomized response: one's own value, the other's, any third."""
    rest = jnp.where(categories > 2, jnp.log(jnp.where(categories > 2, categories - 2.0, 1.0)), -jnp.inf) - epsilon
    scale = jnp.log1p((categories - 1.0) * jnp.exp(-epsilon))
    own, other = jnp.zeros_like(scale), -epsilon + jnp.zeros_like(scale)
    return jnp.stack([own, other, rest]) - scale, jnp.stack([other, own, rest]) - scale


def with_leftover(pair: Pair, log_mass_p: Any, log_mass_q: Any) -> Pair:
    """The pair with two more outcomes, (mass_p, 0) and (0, mass_q)."""
    nothing = jnp.full((), -jnp.inf)
    return (
        jnp.concatenate([pair[0], jnp.stack([jnp.asarray(log_mass_p, jnp.float64), nothing])]),
        jnp.concatenate([pair[1], jnp.stack([nothing, jnp.asarray(log_mass_q, jnp.float64)])]),
    )


def symmetric_pair(log_p: Any, log_q: Any) -> Pair:
    """A pair and its mirror image, side by side."""
    return jnp.concatenate([log_p, log_q]), jnp.concatenate([log_q, log_p])


def gaussian_pair(mu: Any) -> Pair:
    """A finite pair that dominates N(mu, 1) against N(0, 1): each cell's masses moved to its two ends.

    The share of a cell that goes to its right end, (e^{L - L0} - 1)/(e^{L1 - L0} - 1), preserves both masses. It
    is integrated by 8 Gauss nodes a cell, so no two nearly equal masses are ever subtracted.
    """
    mu = jnp.maximum(mu, 1e-100)
    fine = mu / 2 + _FINE_REACH
    edges = jnp.concatenate(
        [
            fine * jnp.arange(_FINE_CELLS) / _FINE_CELLS,
            fine + (_FULL_REACH - _FINE_REACH) * jnp.arange(_COARSE_CELLS + 1) / _COARSE_CELLS,
        ]
    )  # distance from the middle, where the loss mu x edge is 0
    width = jnp.diff(edges)[:, None]
    nodes = edges[:-1, None] + width * (0.5 + 0.5 * _GAUSS_NODES)
    log_density = -0.5 * (nodes + mu / 2) ** 2 + jnp.log(0.5 * width * _GAUSS_WEIGHTS) - 0.5 * np.log(2 * np.pi)
    up, whole = mu * (nodes - edges[:-1, None]), mu * width
    to_right = jnp.log(jnp.expm1(up) / jnp.expm1(whole))
    to_left = up + jnp.log(jnp.expm1(whole - up) / jnp.expm1(whole))
    right = jax.nn.logsumexp(log_density + to_right, axis=1)
    left = jax.nn.logsumexp(log_density + to_left, axis=1)
    edge = jnp.full(1, -jnp.inf)
    log_q = jnp.logaddexp(jnp.concatenate([left, edge]), jnp.concatenate([edge, right]))
    half = symmetric_pair(log_q + mu * edges, log_q)
    tail = jnp.logaddexp(log_normal_tail(edges[-1] - mu / 2), log_normal_tail(edges[-1] + mu / 2)) + 1e-12
    return with_leftover(half, tail, tail)


def laplace_pair(scale: Any) -> Pair:
    """A finite pair that dominates Laplace noise of the given scale, shift 1: the atoms +-1/scale stay exact.

    In a cell of width d (in L) the likelihood ratio averages to that of its middle, so the right end gets the
    share 1/(1 + e^{d/2}) of the cell's mass under Q, exactly.
    """
    x = jnp.arange(_LAPLACE_CELLS) / _LAPLACE_CELLS
    width = 1.0 / (scale * _LAPLACE_CELLS)
    log_cell = -x / scale + jnp.log(-jnp.expm1(-width)) - np.log(2.0)
    right, left = log_cell - jnp.logaddexp(0.0, width), log_cell - jnp.logaddexp(0.0, -width)
    below, above = jnp.full(1, -np.log(2.0)), -1 / scale - jnp.full(1, np.log(2.0))
    log_q = jnp.logaddexp(jnp.concatenate([left, above]), jnp.concatenate([below, right]))
    loss = (2 * jnp.arange(_LAPLACE_CELLS + 1) / _LAPLACE_CELLS - 1) / scale
    return log_q + loss, log_q


def discrete_laplace_pair(scale: Any, sensitivity: Any) -> Pair:
    """Discrete Laplace noise, exactly: the outcomes up to 0, from the shift on, and each one between.

    More than `LAPLACE_MIDDLE` between: all of those are split into (p, 0) and (0, q).
    """
    a, s = 1.0 / scale, sensitivity
    x = 1.0 + jnp.arange(LAPLACE_MIDDLE)
    fits = s - 1 <= LAPLACE_MIDDLE
    log_peak = jnp.log(jnp.tanh(a / 2))
    inside = (x < s) & fits
    middle_q = jnp.where(inside, log_peak - a * x, -jnp.inf)
    middle_p = jnp.where(inside, log_peak - a * (s - x), -jnp.inf)
    end = -jnp.log1p(jnp.exp(-a))
    between = jnp.where(fits, -jnp.inf, 0.0)  # at most all of it
    log_q = jnp.concatenate([jnp.stack([end, end - a * s]), middle_q])
    log_p = jnp.concatenate([jnp.stack([end - a * s, end]), middle_p])
    return with_leftover((log_p, log_q), between, between)


def discrete_gaussian_pair(sigma: Any, sensitivity: Any) -> Pair:
    """N_Z(s, sigma^2) against N_Z(0, sigma^2) on a window of 2048 integers; what lies outside is split.

    The mass outside is a bound: it is 1, and the pair says nothing, when sigma is too large for the window.
    """
    s = sensitivity
    x = jnp.ceil(s / 2) + jnp.arange(-_LATTICE_HALF_WIDTH, _LATTICE_HALF_WIDTH)
    inside = jnp.abs(x - s / 2) < _LATTICE_HALF_WIDTH - 0.25  # symmetric about s/2 for even and odd s
    scale = 2 * sigma**2
    log_total = _log_theta_at_zero(sigma)
    log_q = jnp.where(inside, -(x**2) / scale - log_total, -jnp.inf)
    log_p = jnp.where(inside, -((x - s) ** 2) / scale - log_total, -jnp.inf)
    outside = jnp.logaddexp(
        _log_lattice_tail(_LATTICE_HALF_WIDTH - s / 2 - 1, sigma) - log_total,
        _log_lattice_tail(_LATTICE_HALF_WIDTH + s / 2 - 1, sigma) - log_total,
    )
    outside = jnp.minimum(outside + 1e-12, 0.0)
    return with_leftover((log_p, log_q), outside, outside)


def _log_lattice_tail(start: Any, sigma: Any) -> Any:
    """log of a bound of sum_{k >= start} e^{-k^2 / (2 sigma^2)}: a geometric series; 700 when start <= 0."""
    safe = jnp.maximum(start, 1.0)
    series = -(safe**2) / (2 * sigma**2) - jnp.log(-jnp.expm1(-safe / sigma**2))
    return jnp.where(start >= 1, series, 700.0)


def _log_theta_at_zero(sigma: Any) -> Any:
    """log sum_k e^{-k^2 / (2 sigma^2)} over all integers, by the sum or by its Poisson dual."""
    k = jnp.arange(1, 13)
    small = sigma < 0.5
    direct = jnp.log1p(2 * jnp.sum(jnp.exp(-(k**2) / (2 * jnp.where(small, sigma, 1.0) ** 2))))
    wide = jnp.where(small, 1.0, sigma)
    dual = jnp.log(wide) + 0.5 * np.log(2 * np.pi) + jnp.log1p(2 * jnp.sum(jnp.exp(-2 * (np.pi * wide * k) ** 2)))
    return jnp.where(small, direct, dual)
