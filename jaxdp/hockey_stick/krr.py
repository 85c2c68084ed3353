r"""Shuffled k-ary randomized response: certified delta(eps) and eps(delta) of its privacy blanket.

    delta = (1/n) E[(u a - v b - (E-1) c)_+],   (a, b, c, rest) ~ Mult(n; p, p, (k-2)p, 1-kp),
    p = 1/(E0+k-1), u = E0-E, v = E E0-1.

An upper bound for every data set (notebooks/proofs/krr_blanket.md, section 1). Size-biasing j + 1 = a + b gives

    delta = 2p E_{j ~ Bin(n-1, 2p)} E_{c ~ Bin(n-1-j, (k-2)/(E0+k-3))} [ E(mean of j+1 coins - (E-1)c/(j+1))_+ ],

each coin u or -v. The innermost mean is one binomial term: with m = j+1, t the first count of heads that
makes it positive, b = P[Bin(j,1/2) = t-1], R the tail over b,

    2p E(.)_+ = b { p (u - h/m) - R p [(E-1)(E0+1) + 2h/m] },   h = (E-1) c.

Kernels (`size`, `inner_size` static):

    krr_delta_bounds(num_users, eps0, num_categories, epsilon, *, size, inner_size)    -> Bounds
    krr_epsilon_bounds(num_users, eps0, num_categories, delta, *, size, inner_size)    -> Bounds
    krr_epsilon_upper(num_users, eps0, num_categories, delta, *, size, inner_size)     -> upper bound alone, cheaper
    krr_delta_smooth(num_users, eps0, num_categories, epsilon, *, size, inner_size)    -> estimate with derivatives in
                                                                                          eps0 and epsilon

Blocks of j, j in [l, r]: a mean of fewer coins spreads more, so the value at fixed c/m falls with m; c/m is smallest
at r, and c | j is stochastically smallest at j = r. Upper: l + 1 coins with c/(r+1), c from j = r; lower: the other way
round. The counts c: at fixed m the value f(c) is decreasing and convex on the reals, a mean of positive parts. So

  * one law of c serves a group of j. With N' <= N'' trials and chance pi, Jensen gives
    E f(Bin(N') ) <= E f(Bin(N'') - (N''-N') pi)  and  E f(Bin(N'')) >= E f(Bin(N') + (N''-N') pi);
    a window that fits `inner_size` counts is summed with the exact law of each j instead;
  * in a block of c the upper side is the chord and the lower side Jensen's inequality at the block's mean, for which
    `blocks.mean_offsets` has certified bounds.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bounds import Bounds
from jaxdp.hockey_stick import search
from jaxdp.hockey_stick.blocks import Blocks, binomial_blocks, block_edges, masses, mean_offsets, window
from jaxdp.hockey_stick.half_binomial import log_pmf_and_tail_ratio
from jaxdp.precision import canary, exact_product, kernel
from jaxdp.special import log_binomial_pmf

SIZE, INNER_SIZE = 512, 48
_COARSE = (96, 16)
_GROUP = 32  # blocks of j that share one law of c
_PARTS = 4  # parts of a block of c, to certify its mass and mean more sharply
_NODES = 20
_ROUNDING = 1e-11
_TERM_ROUNDING = 5e-13
_LARGEST_EPS0 = 300.0
_WORKING_SET = 3_000_000


class _Grid(NamedTuple):
    """Coins (rows), c/m (cells) and the cells' log weights on a grid (blocks of j) x (blocks of c)."""

    coins: jax.Array
    rate: jax.Array
    log_weight: jax.Array


class _Grids(NamedTuple):
    """Certified grids of the two sides, an estimate, and the logarithm of the mass that no grid holds."""

    upper: _Grid
    lower: _Grid
    middle: _Grid
    log_missed: jax.Array


class _Others(NamedTuple):
    """The law of c on common nodes: log weights and places of each side, and whether the exact laws are used."""

    nodes: jax.Array
    present: jax.Array
    log_upper: jax.Array
    log_lower: jax.Array
    means: jax.Array
    exact: jax.Array
    log_missed_low: jax.Array
    log_missed_high: jax.Array


def _chances(eps0, categories):
    """(2p, 1 - 2p, pi, 1 - pi), pi the chance that a user who drew neither a nor b drew one of the others."""
    small = jnp.exp(-eps0)
    scale, rest = 1.0 + (categories - 1.0) * small, 1.0 + (categories - 3.0) * small
    chance = jnp.maximum((categories - 2.0) * small / rest, 1e-300)
    return 2.0 * small / scale, rest / scale, chance, -jnp.expm1(-eps0) / rest


def _others(fewest, most, chance, complement, log_delta, size: int) -> _Others:
    """Weights for the trials between `fewest` and `most`: chords of Bin(most), means of Bin(fewest)."""
    low, _, missed_low, _ = window(fewest, chance, complement, log_delta)
    _, high, _, missed_high = window(most, chance, complement, log_delta)
    variance = most * chance * complement
    centre = jnp.clip(most * chance + variance * log_delta / jnp.maximum(most * chance, 1e-300), low, high)
    edges = block_edges(low, high, centre, variance, size)
    width = edges[1:] - edges[:-1]
    parts = edges[:-1, None] + jnp.round(width[:, None] * (np.arange(_PARTS)[None, :] / _PARTS))
    parts = jax.lax.optimization_barrier(jnp.append(parts.reshape(-1), edges[-1]))

    def law(trials):
        plan = masses(jnp.minimum(parts, trials + 1.0), trials, chance, complement)
        return _block_sums(plan, mean_offsets(plan, trials, chance, complement), edges[:-1])

    log_up, log_down, least, largest = (item for item in jax.vmap(law)(jnp.stack([most, fewest])))
    span = jnp.maximum(width, 1.0)
    share = jnp.clip(least[0] / span, 0.0, 1.0).at[-1].set(0.0)
    moved = log_up[0] + jnp.log(share)
    chords = jnp.logaddexp(log_up[0] + jnp.log1p(-share), jnp.append(-jnp.inf, moved[:-1]))
    means = edges[:-1] + jnp.minimum(largest[1], jnp.maximum(width - 1.0, 0.0))
    # Counts above the window go to its last left end, where the value is larger.
    chords = chords.at[-1].set(jnp.logaddexp(chords[-1], missed_high))
    exact = high - low + 1.0 <= size
    return _Others(edges[:-1], width >= 1, chords, log_down[1], means, exact, missed_low, missed_high)


def _block_sums(plan: Blocks, offsets, left):
    """Per block of parts: log mass from above and below, and the mean offset from below and from above."""
    shape = (left.shape[0], _PARTS)
    log_upper, log_lower = plan.log_upper.reshape(shape), plan.log_lower.reshape(shape)
    top = jnp.max(log_upper, axis=1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    upper, lower = jnp.exp(log_upper - top), jnp.exp(log_lower - top)
    start = plan.left.reshape(shape) - left[:, None]
    least = jnp.sum(lower * jnp.maximum(start + offsets[0].reshape(shape), 0.0), axis=1)
    largest = jnp.sum(upper * jnp.maximum(start + offsets[1].reshape(shape), 0.0), axis=1)
    above, below = jnp.sum(upper, axis=1), jnp.sum(lower, axis=1)
    top = top[:, 0]
    positive = jnp.where(below > 0, below, 1.0)
    return top + jnp.log(above), top + jnp.log(below), least / jnp.where(above > 0, above, 1.0), largest / positive


def _exact_rows(others: _Others, trials, chance, complement):
    """Log pmf of Bin(trials) at the nodes, for each row's trials: consecutive counts, hence cumulative ratios."""
    start, size = others.nodes[0], others.nodes.shape[0]
    counts = start + jnp.arange(size - 1)[None, :]
    remaining = trials[:, None] - counts
    steps = jnp.where(remaining > 0, jnp.log(jnp.maximum(remaining, 1.0)), -1e5)
    steps = steps + (jnp.log(chance) - jnp.log(complement)) - jnp.log(counts + 1.0)
    # A product with a triangle of ones: the library's cumulative sum is slower at this size.
    rise = exact_product(steps, np.triu(np.ones((size - 1, size)), 1))
    first = log_binomial_pmf(jnp.full_like(trials, start), trials, chance, complement)
    return jnp.where(others.present[None, :], first[:, None] + rise, -jnp.inf)


def _grids(num_users, eps0, categories, log_delta, shape) -> _Grids:
    """Groups of neighbouring blocks of j share one law of c."""
    pair, single, chance, complement = _chances(eps0, categories)
    pairs = binomial_blocks(num_users - 1.0, pair, single, log_delta, size=shape[0], deep=True)
    greatest = pairs.left[-1] + pairs.width[-1] - 1.0
    first = jnp.minimum(pairs.left + 1.0, num_users)
    last = jnp.minimum(pairs.left + jnp.maximum(pairs.width, 1.0), num_users)

    def group(first, last, log_upper, log_lower, log_middle):
        fewest, most = jnp.minimum(first[0] - 1.0, greatest), jnp.minimum(last[-1] - 1.0, greatest)
        others = _others(num_users - 1.0 - most, num_users - 1.0 - fewest, chance, complement, log_delta, shape[1])
        others = _Others(*jax.lax.optimization_barrier(tuple(others)))

        def cells(log_outer, given, log_inner, places, extra):
            rows = _exact_rows(others, num_users - given, chance, complement)
            rows = rows.at[:, -1].set(jnp.logaddexp(rows[:, -1], extra))
            weight = log_outer[:, None] + jnp.where(others.exact, rows, log_inner)
            return weight, jnp.where(others.exact, others.nodes[None, :], places)

        def upper_side(log_outer, last):
            moved = others.nodes[None, :] - (last - 1.0 - fewest)[:, None] * chance
            weight, count = cells(log_outer, last, others.log_upper[None, :], moved, others.log_missed_high)
            # A block's smallest c/m is at the end that its sign names, and never below -1.
            rate = jnp.maximum(jnp.minimum(count / last[:, None], count / first[:, None]), -1.0)
            return _Grid(first, rate, weight)

        moved = others.means[None, :] + (most + 1.0 - first)[:, None] * chance
        weight, count = cells(log_lower, first, others.log_lower[None, :], moved, -jnp.inf)
        lower = _Grid(last, count / first[:, None], weight)
        return upper_side(log_upper, last), lower, upper_side(log_middle, first), others.log_missed_low

    def grouped(row):
        return row.reshape(-1, _GROUP)

    rows = (first, last, pairs.log_upper, pairs.log_lower, _interpolated(pairs))
    *sides, missed = jax.vmap(group)(*map(grouped, rows))
    upper, lower, middle = (_Grid(*(item.reshape(shape[0], *item.shape[2:]) for item in side)) for side in sides)
    missed = jnp.logaddexp(jnp.logaddexp(pairs.log_missed_low, pairs.log_missed_high), jnp.max(missed))
    # Without the barriers here and above the compiler rebuilds the weights inside every later expression.
    return jax.lax.optimization_barrier(_Grids(upper, lower, middle, missed))


def _interpolated(plan: Blocks):
    mass = jnp.exp(plan.log_middle)
    share = mass * jnp.where(plan.width > 1, plan.fraction, 0.0)
    return jnp.log(mass - share + jnp.concatenate([jnp.zeros(1), share[:-1]]))


def _terms(grid: _Grid, eps0, categories, epsilon):
    """Flattened (log b, gain, loss R) of every cell."""
    small = jnp.exp(-eps0)
    coins = jnp.broadcast_to(grid.coins[:, None], grid.rate.shape)
    gain, loss = _cell_rates(eps0, categories, epsilon, grid.rate)
    # The likelihood ratio exceeds E above coins - room heads, room = coins gain scale / ((E + 1) (1 - e^-eps0)).
    # Counted from above, because the threshold itself rounds to coins for large eps0, which loses all of delta.
    scale = 1.0 + (categories - 1.0) * small
    room = coins * gain * scale * jnp.exp(-epsilon) / (-jnp.expm1(-eps0) * (1.0 + jnp.exp(-epsilon)))
    possible = gain > 0
    x = jnp.clip(coins - jnp.ceil(room) + 1.0, 1.0, coins)
    log_bin, ratio = log_pmf_and_tail_ratio((coins - 1.0).reshape(-1), x.reshape(-1), nodes=_NODES)
    gain = jnp.where(possible, gain, 0.0).reshape(-1)
    return log_bin, gain, jnp.where(possible, loss, 0.0).reshape(-1) * ratio, ratio, possible.reshape(-1)


def _log_sum(log_weight, factor):
    top = jnp.max(jnp.where(factor > 0, log_weight, -jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    return top + jnp.log(jnp.sum(jnp.exp(jnp.minimum(log_weight - top, 0.0)) * factor))


def _value(grid: _Grid, eps0, categories, epsilon, sign):
    """(log delta with the margins added at sign 1, taken off at -1, left out at 0; d log delta/d epsilon)."""
    log_bin, gain, lost, ratio, possible = _terms(grid, eps0, categories, epsilon)
    net = jnp.maximum(jnp.maximum(gain - lost, 0.0) + sign * _TERM_ROUNDING * (gain + lost), 0.0)
    log_weight = grid.log_weight.reshape(-1) + log_bin
    value = _log_sum(log_weight, net) + sign * _ROUNDING
    small, rate = jnp.exp(-eps0), grid.rate.reshape(-1)
    weight = (small * (1.0 + rate) + ratio * (1.0 + small + 2.0 * small * rate)) / (1.0 + (categories - 1.0) * small)
    slope = epsilon + _log_sum(log_weight, jnp.where(possible, weight, 0.0)) - value
    return value, -jnp.exp(jnp.minimum(slope, 600.0))


def _certified(grids: _Grids, eps0, categories, epsilon, descending) -> search.Certified:
    """One side at a time, the lower one when `descending`: their grids differ."""
    grid = jax.tree_util.tree_map(lambda low, up: jnp.where(descending, low, up), grids.lower, grids.upper)
    value, slope = _value(grid, eps0, categories, epsilon, jnp.where(descending, -1.0, 1.0))
    upper = jnp.minimum(jnp.logaddexp(value, grids.log_missed), 0.0)
    return search.Certified(
        jnp.where(descending, 0.0, upper), jnp.where(descending, jnp.minimum(value, 0.0), -jnp.inf), slope
    )


def _prepare(num_users, eps0, categories):
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (num_users < jnp.inf)
    valid = valid & (eps0 >= 0) & (eps0 < jnp.inf)
    valid = valid & (categories >= 2) & (categories == jnp.floor(categories)) & (categories < jnp.inf)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0)
    users, local = jnp.where(inside, num_users, 1.0), jnp.where(inside, eps0, 1.0)
    return valid, inside, users, local, jnp.where(inside, categories, 2.0)


def _guess(users, local, kinds, epsilon):
    coarse = _grids(users, local, kinds, -60.0, _COARSE).middle
    return jnp.clip(_value(coarse, local, kinds, epsilon, 0.0)[0], -700.0, 0.0)


@kernel(static=("size", "inner_size"), working_set=_WORKING_SET)
def krr_delta_bounds(num_users, eps0, num_categories, epsilon, *, size: int = SIZE, inner_size: int = INNER_SIZE):
    """Bounds of delta(epsilon) of the k-ary randomized response blanket pair."""
    valid, inside, users, local, kinds = _prepare(num_users, eps0, num_categories)
    good = valid & (epsilon >= 0)
    inside = inside & good & (epsilon < eps0)
    central = jnp.where(inside, epsilon, 0.5 * local)
    grids = _grids(users, local, kinds, _guess(users, local, kinds, central), (size, inner_size))
    values = jax.lax.map(lambda low: _certified(grids, local, kinds, central, low), jnp.array([False, True]))
    upper = jnp.maximum(jnp.exp(values.log_upper[0]), search.LEAST_DELTA)
    upper = jnp.where(inside, upper, jnp.where(good & (epsilon >= eps0), 0.0, 1.0))
    return Bounds(jnp.where(inside, jnp.minimum(jnp.exp(values.log_lower[1]), upper), 0.0), upper)


def _invert(users, local, kinds, log_target, shape, with_lower):
    coarse = _grids(users, local, kinds, log_target, _COARSE).middle
    pairs = 2.0 * users * jnp.exp(-local) / (1.0 + (kinds - 1.0) * jnp.exp(-local))
    shift = 2.0 * jnp.tanh(0.5 * local) / jnp.sqrt(pairs)
    start = jnp.minimum(shift * jnp.sqrt(-2.0 * log_target), 0.9 * local)
    estimate = search.decreasing_root(
        lambda epsilon: search.Side(*_value(coarse, local, kinds, epsilon, 0.0)), log_target, start, local
    )
    grids = _grids(users, local, kinds, log_target, shape)
    return search.certify(
        lambda epsilon, low: _certified(grids, local, kinds, epsilon, low),
        log_target,
        estimate,
        local,
        with_lower=with_lower,
    )


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
    grid = _grids(users, local, kinds, _guess(users, local, kinds, central), shape).middle
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


@canary("k-ary randomized response, one shuffled round")
def _canary():
    bounds = krr_epsilon_bounds.run_unchecked(*(np.array([x]) for x in (1e4, 6.0, 20.0, 1e-6)))
    return bounds.upper, np.array([1.401531497961662215853381]), 1e-4
