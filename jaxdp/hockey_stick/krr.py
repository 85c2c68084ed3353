r"""Shuffled k-ary randomized response: certified delta(eps) and eps(delta) of its privacy blanket.

    delta = (1/n) E[(u a - v b - (E-1) c)_+],   (a, b, c, rest) ~ Mult(n; p, p, (k-2)p, 1-kp),
    p = 1/(E0+k-1), u = E0-E, v = E E0-1.

An upper bound for every data set (MATH 4.4, 4.6). Size-biasing the number j + 1 of draws a + b gives

    delta = 2p E_{j ~ Bin(n-1, 2p)} E_{c ~ Bin(n-1-j, (k-2)/(E0+k-3))} [ E(mean of j+1 coins - (E-1)c/(j+1))_+ ],

each coin u or -v. The innermost mean is one binomial term: with m = j+1, t the first count of heads that
makes it positive, b = P[Bin(j,1/2) = t-1], R the tail over b,

    2p E(.)_+ = b { p (u - h/m) - R p [(E-1)(E0+1) + 2h/m] },   h = (E-1) c.

Kernels (`size`, `inner_size` static):

    krr_delta_bounds(num_users, eps0, num_categories, epsilon, *, size, inner_size)    -> Bounds
    krr_epsilon_bounds(num_users, eps0, num_categories, delta, *, size, inner_size)    -> Bounds
    krr_delta_smooth(num_users, eps0, num_categories, epsilon, *, size, inner_size)    -> estimate,
                                        differentiable in eps0 and epsilon (differences, about 1e-5 relative)

Bounding a block of j in [l, r]: a mean of fewer coins spreads more, so delta at fixed c/m falls with m; c/m is
smallest at r, and c | j is stochastically smallest at j = r. Upper: l coins with c/(r+1), c from Bin(n-1-r, .);
lower: the other way round. In c the value is convex and decreasing: upper by chords, lower by right ends.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.bounds import Bounds
from jaxdp.hockey_stick import search
from jaxdp.hockey_stick.blocks import Blocks, binomial_blocks
from jaxdp.hockey_stick.half_binomial import log_pmf_and_tail_ratio
from jaxdp.precision import kernel

SIZE, INNER_SIZE = 512, 256
_COARSE = (64, 32)
_NODES = 20
_ROUNDING = 1e-11
_TERM_ROUNDING = 5e-13
_LARGEST_EPS0 = 300.0
_WORKING_SET = 20_000_000


class _Grid(NamedTuple):
    """Coin counts and c/m on a (blocks of j) x (blocks of c) grid, with the logarithm of each cell's weight."""

    coins: jax.Array
    rate: jax.Array
    log_weight: jax.Array
    log_missed: jax.Array


def _plans(num_users, eps0, categories, log_delta, shape, mode: str) -> _Grid:
    """The grid of one mode: "upper", "lower" or "middle" (estimate)."""
    small = jnp.exp(-eps0)
    p = small / (1.0 + (categories - 1.0) * small)
    pairs = binomial_blocks(
        num_users - 1.0, 2.0 * p, (1.0 + (categories - 3.0) * small) / (1.0 + (categories - 1.0) * small), log_delta,
        size=shape[0], deep=True,
    )
    first, last = pairs.left + 1.0, jnp.minimum(pairs.left + jnp.maximum(pairs.width, 1.0), num_users)
    first = jnp.minimum(first, num_users)
    coins, others = {"upper": (first, last), "lower": (last, first), "middle": (first, first)}[mode]
    rest = 1.0 + (categories - 3.0) * small
    chance, complement = (categories - 2.0) * small / rest, -jnp.expm1(-eps0) / rest
    inner = jax.vmap(lambda trials: binomial_blocks(
        trials, jnp.maximum(chance, 1e-300), complement, log_delta, size=shape[1]))(num_users - others)
    log_inner, nodes = _inner_weights(inner, num_users - others, mode)
    log_outer = {"upper": pairs.log_upper, "lower": pairs.log_lower, "middle": _interpolated(pairs)}[mode]
    missed = jnp.logaddexp(pairs.log_missed_low, pairs.log_missed_high)
    missed = jnp.logaddexp(missed, jnp.max(inner.log_missed_low))
    return _Grid(coins, nodes / others[:, None], log_outer[:, None] + log_inner, missed)


def _interpolated(plan: Blocks):
    mass = jnp.exp(plan.log_middle)
    share = mass * jnp.where(plan.width > 1, plan.fraction, 0.0)
    return jnp.log(mass - share + jnp.concatenate([jnp.zeros(1), share[:-1]]))


def _inner_weights(inner: Blocks, trials, mode: str):
    """Log weights and values of c: chords for "upper", right ends for "lower", chords of the estimate else."""
    if mode == "lower":
        return inner.log_lower, inner.left + jnp.maximum(inner.width - 1.0, 0.0)
    fraction = jnp.where(inner.width > 1, inner.fraction, 0.0)
    if mode == "upper":
        # The mean may only be under-estimated. The fraction is exact for a geometric block; the binomial's
        # second and third log-derivatives move it by less than these two terms (Taylor, factors 2.4 each).
        cube = inner.width**3
        curve = 1.0 / jnp.maximum(inner.left, 1.0) + 1.0 / jnp.maximum(trials[:, None] - inner.left - inner.width, 1.0)
        steep = jnp.abs(fraction - 0.5) * 12.0 / jnp.maximum(inner.width, 1.0)
        fraction = jnp.maximum(fraction - cube * curve * (curve / 300.0 + steep / 100.0), 0.0)
    log_mass = inner.log_middle
    if mode == "upper":
        # Counts above the window go to its last left end, where the value is larger.
        last = jnp.logaddexp(inner.log_upper[:, -1], inner.log_missed_high)
        log_mass = inner.log_upper.at[:, -1].set(last)
    following = jnp.log(jnp.where(inner.width > 1, fraction, 0.0)) + log_mass
    moved = jnp.concatenate([jnp.full((log_mass.shape[0], 1), -jnp.inf), following[:, :-1]], axis=1)
    # The last block's share of its far end stays at its left end, where the value is larger.
    keep = jnp.log1p(-fraction.at[:, -1].set(0.0))
    return jnp.logaddexp(log_mass + keep, moved), inner.left


def _terms(grid: _Grid, eps0, categories, epsilon):
    """Flattened (log b, gain, loss R) of every cell."""
    small = jnp.exp(-eps0)
    tau = jnp.expm1(-(epsilon + eps0)) / (jnp.expm1(-eps0) * (1.0 + jnp.exp(-epsilon)))
    tilt = jnp.tanh(0.5 * epsilon) * small / -jnp.expm1(-eps0)
    coins = jnp.broadcast_to(grid.coins[:, None], grid.rate.shape)
    threshold = jnp.floor(coins * (tau + tilt * grid.rate)) + 1.0
    possible = threshold <= coins
    x = jnp.clip(threshold, 1.0, coins)
    log_bin, ratio = log_pmf_and_tail_ratio((coins - 1.0).reshape(-1), x.reshape(-1), nodes=_NODES)
    gain, loss = _cell_rates(eps0, categories, epsilon, grid.rate)
    gain = jnp.where(possible, gain, 0.0).reshape(-1)
    return log_bin, gain, jnp.where(possible, loss, 0.0).reshape(-1) * ratio, ratio, possible.reshape(-1)


def _log_sum(log_weight, factor):
    top = jnp.max(jnp.where(factor > 0, log_weight, -jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    return top + jnp.log(jnp.sum(jnp.exp(jnp.minimum(log_weight - top, 0.0)) * factor))


def _side(grid: _Grid, eps0, categories, epsilon, sign: float) -> search.Side:
    """log delta with the margins added (sign 1), taken off (-1) or left out (0), and its slope."""
    log_bin, gain, lost, ratio, possible = _terms(grid, eps0, categories, epsilon)
    net = jnp.maximum(jnp.maximum(gain - lost, 0.0) + sign * _TERM_ROUNDING * (gain + lost), 0.0)
    log_weight = grid.log_weight.reshape(-1) + log_bin
    value = _log_sum(log_weight, net) + sign * _ROUNDING
    small, rate = jnp.exp(-eps0), grid.rate.reshape(-1)
    weight = (small * (1.0 + rate) + ratio * (1.0 + small + 2.0 * small * rate)) / (1.0 + (categories - 1.0) * small)
    slope = epsilon + _log_sum(log_weight, jnp.where(possible, weight, 0.0)) - value
    if sign > 0:
        value = jnp.logaddexp(value, grid.log_missed)
    return search.Side(jnp.minimum(value, 0.0), -jnp.exp(jnp.minimum(slope, 600.0)))


def _prepare(num_users, eps0, categories):
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (num_users < jnp.inf)
    valid = valid & (eps0 >= 0) & (eps0 < jnp.inf)
    valid = valid & (categories >= 2) & (categories == jnp.floor(categories)) & (categories < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0)
    users, local = jnp.where(inside, num_users, 1.0), jnp.where(inside, eps0, 1.0)
    return valid, inside, users, local, jnp.where(inside, categories, 2.0)


def _guess(users, local, kinds, epsilon):
    coarse = _plans(users, local, kinds, -60.0, _COARSE, "middle")
    return jnp.clip(_side(coarse, local, kinds, epsilon, 0.0).log_delta, -700.0, 0.0)


@kernel(static=("size", "inner_size"), working_set=_WORKING_SET)
def krr_delta_bounds(num_users, eps0, num_categories, epsilon, *, size: int = SIZE, inner_size: int = INNER_SIZE):
    """Bounds of delta(epsilon) of the k-ary randomized response blanket pair."""
    valid, inside, users, local, kinds = _prepare(num_users, eps0, num_categories)
    good = valid & (epsilon >= 0)
    inside = inside & good & (epsilon < eps0)
    central = jnp.where(inside, epsilon, 0.5 * local)
    log_delta, shape = _guess(users, local, kinds, central), (size, inner_size)
    above = _side(_plans(users, local, kinds, log_delta, shape, "upper"), local, kinds, central, 1.0)
    below = _side(_plans(users, local, kinds, log_delta, shape, "lower"), local, kinds, central, -1.0)
    upper = jnp.where(inside, jnp.exp(above.log_delta), jnp.where(good & (epsilon >= eps0), 0.0, 1.0))
    return Bounds(jnp.where(inside, jnp.minimum(jnp.exp(below.log_delta), upper), 0.0), upper)


def _invert(users, local, kinds, log_target, shape, with_lower):
    coarse = _plans(users, local, kinds, log_target, _COARSE, "middle")
    pairs = 2.0 * users * jnp.exp(-local) / (1.0 + (kinds - 1.0) * jnp.exp(-local))
    shift = 2.0 * jnp.tanh(0.5 * local) / jnp.sqrt(pairs)
    start = jnp.minimum(shift * jnp.sqrt(-2.0 * log_target), 0.9 * local)
    estimate = search.decreasing_root(
        lambda epsilon: _side(coarse, local, kinds, epsilon, 0.0), log_target, start, local
    )
    grid = _plans(users, local, kinds, log_target, shape, "upper")
    upper = search.certify_above(lambda e: _side(grid, local, kinds, e, 1.0), log_target, estimate, local)
    if not with_lower:
        return jnp.zeros_like(upper), upper
    under = _plans(users, local, kinds, log_target, shape, "lower")
    return search.certify_below(lambda e: _side(under, local, kinds, e, -1.0), log_target, upper), upper


def _epsilon(num_users, eps0, num_categories, delta, shape, with_lower):
    valid, inside, users, local, kinds = _prepare(num_users, eps0, num_categories)
    good = valid & (delta >= 0) & (delta <= 1)
    searched = inside & (delta > 0) & (delta < 1)
    log_target = jnp.log(jnp.where(searched, delta, 0.5))
    lower, upper = _invert(users, local, kinds, log_target, shape, with_lower)
    upper = jnp.where(searched, upper, jnp.where(delta >= 1, 0.0, eps0))
    lower = jnp.where(searched, lower, jnp.where(delta == 0, eps0, 0.0))
    return Bounds(jnp.where(good, lower, 0.0), jnp.where(good, upper, jnp.inf))


@kernel(static=("size", "inner_size"), working_set=_WORKING_SET)
def krr_epsilon_bounds(num_users, eps0, num_categories, delta, *, size: int = SIZE, inner_size: int = INNER_SIZE):
    """Bounds of the smallest epsilon with delta(epsilon) <= delta, k-ary randomized response blanket pair."""
    return _epsilon(num_users, eps0, num_categories, delta, (size, inner_size), True)


@kernel(static=("size", "inner_size"), working_set=_WORKING_SET)
def krr_epsilon_upper(num_users, eps0, num_categories, delta, *, size: int = SIZE, inner_size: int = INNER_SIZE):
    """Upper bound of the smallest epsilon with delta(epsilon) <= delta, k-ary randomized response blanket pair."""
    return _epsilon(num_users, eps0, num_categories, delta, (size, inner_size), False).upper


def _cell_rates(eps0, categories, epsilon, rate):
    """Gain and loss of a cell as smooth functions of eps0 and epsilon (threshold and coin terms held)."""
    small = jnp.exp(-eps0)
    scale = 1.0 + (categories - 1.0) * small
    rise = jnp.expm1(epsilon)
    gain = (-jnp.expm1(epsilon - eps0) - rise * small * rate) / scale
    return gain, rise * (1.0 + small + 2.0 * small * rate) / scale


def _slopes(num_users, eps0, num_categories, epsilon, shape):
    """(delta, d/d epsilon, d/d eps0), uncertified; through the weights by their score, centred before summing."""
    _, inside, users, local, kinds = _prepare(num_users, eps0, num_categories)
    inside = inside & (epsilon >= 0) & (epsilon < eps0)
    central = jnp.where(inside, epsilon, 0.5 * local)
    grid = _plans(users, local, kinds, _guess(users, local, kinds, central), shape, "middle")
    log_bin, gain, lost, ratio, possible = _terms(grid, local, kinds, central)
    weight, term = jnp.exp(grid.log_weight.reshape(-1)), jnp.exp(log_bin)
    value = term * jnp.maximum(gain - lost, 0.0)
    delta = jnp.sum(weight * value)
    active = jnp.where(possible & (gain > lost), weight * term, 0.0)
    rate = grid.rate.reshape(-1)

    def moved(tangent_eps0, tangent_epsilon):
        _, (d_gain, d_loss) = jax.jvp(
            lambda a, e: _cell_rates(a, kinds, e, rate), (local, central), (tangent_eps0, tangent_epsilon)
        )
        return jnp.sum(active * (d_gain - d_loss * ratio))

    one, none = jnp.ones_like(local), jnp.zeros_like(local)
    small = jnp.exp(-local)
    scale, rest = 1.0 + (kinds - 1.0) * small, 1.0 + (kinds - 3.0) * small
    coins = jnp.broadcast_to(grid.coins[:, None], grid.rate.shape).reshape(-1)
    pairs = -(coins - 1.0 - (users - 1.0) * 2.0 * small / scale) / rest
    chance = (kinds - 2.0) * small / rest
    others = (rate * coins - (users - coins) * chance) / jnp.expm1(-local)
    by_eps0 = moved(one, none) + jnp.sum(weight * (value - delta) * (pairs + others))
    return tuple(jnp.where(inside, item, 0.0) for item in (delta, moved(none, one), by_eps0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _smooth(num_users, eps0, num_categories, epsilon, shape):
    return _slopes(num_users, eps0, num_categories, epsilon, shape)[0]


@_smooth.defjvp
def _smooth_jvp(shape, primals, tangents):
    value, by_epsilon, by_eps0 = _slopes(*primals, shape)
    return value, by_eps0 * tangents[1] + by_epsilon * tangents[3]


@kernel(static=("size", "inner_size"), working_set=_WORKING_SET)
def krr_delta_smooth(num_users, eps0, num_categories, epsilon, *, size: int = 512, inner_size: int = 64):
    """Uncertified delta(epsilon) of the k-RR blanket pair with derivatives in eps0 and epsilon."""
    arguments = (jnp.asarray(value) for value in (num_users, eps0, num_categories, epsilon))
    return _smooth(*arguments, (size, inner_size))
