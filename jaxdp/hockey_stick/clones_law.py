r"""Finite laws of the privacy loss around the clones pair: one that dominates it, one that it dominates.

With m = j + 1 coins, j ~ Bin(num_users - 1, rate), of which i come up heads, the clones pair is a randomized response
of bias s = tanh(eps0/2) |2i - m|/m and loss 2 atanh(s): a mixture, in which every hockey-stick divergence is the mean
of a convex function of s that increases. So only the law of s counts, and what moves it up in the increasing convex
order dominates, also in composition; what moves it down is dominated. Three steps, one way and the other:

    a block of m            its left end                                its right end
    a cell of s             its mass to its two ends, the mean kept     its mass to its mean
    outside the window      s = tanh(eps0/2)                            s = 0

A block of one m and a cell with one value of s lose nothing. The second step is of second order in the cells' width.

    clones_law(num_users, eps0, reach, *, rate, mesh)   -> ClonesLaw
    clones_laws(num_users, eps0, reach, *, rate, mesh)  -> the same of vectors of concrete numbers, fine by default
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.hockey_stick.blocks import Blocks, masses, window
from jaxdp.hockey_stick.clones import clone_rate
from jaxdp.hockey_stick.half_binomial import log_pmf_and_tail_ratio
from jaxdp.precision import canary, cores, kernel, side_by_side
from jaxdp.special import normal_quantiles


class Mesh(NamedTuple):
    """How many blocks of the clone count (a multiple of 16), cells of the bias and, of these, evenly spread ones."""

    rows: int
    cells: int
    even: int


COARSE, FINE, FINEST = Mesh(512, 1024, 341), Mesh(4096, 3072, 1024), Mesh(4096, 8192, 6144)
USUAL_REACH = 12.0
_LARGEST_EPS0 = 300.0
_GROUP = 16  # clone counts treated at once: what fits the cache
_NODES = 26
_DEEP = -720.0  # log of the chance of the clone counts that are left out below
_ROUNDING = 1e-11  # relative, of the chance that the bias exceeds a given one
_LOSS_ROUNDING = 1e-12
REST = 4e-300
"""More than the chance of all that is left out: clone counts below the window, and what underflows."""
_PMF_ROUNDING = 1e-12  # relative, of a term or tail of the fair binomial law
_SLACK = 1e-9  # of a cell
_NEXT_TO_TOP = 1 - 1e-6
_SHIFT = 1e-12


class ClonesLaw(NamedTuple):
    """Losses of finite symmetric pairs and their log masses under P; the inner pair is the one that is dominated."""

    losses: jax.Array
    log_weights: jax.Array
    inner_losses: jax.Array
    inner_log_weights: jax.Array


@kernel(static=("rate", "mesh", "closed"), working_set=200_000)
def clones_law(
    num_users, eps0, reach, *, rate: str = "clones", mesh: Mesh = COARSE, closed: bool = True
) -> ClonesLaw:
    """Finite pairs that dominate the clones pair of one round, and that it dominates, for all a > 0 and composed.

    reach: > 0, standard deviations of the bias over which the even cells are spread, `USUAL_REACH` if nothing better is
    known: it moves the bounds' closeness alone. mesh: see there; 2 (cells + 1) losses.
    closed: what is left out, `REST`, is given the largest loss; if not, the caller has to take it for mass at infinity.
    Domain: num_users whole >= 1, 0 <= eps0 <= 300; otherwise the losses are +-eps0 (inner: 0), or +inf if that is
    invalid. Masses sum to 1 within 1e-10.
    """
    rows, cells = mesh.rows, mesh.cells
    valid = (num_users >= 1) & (num_users == jnp.floor(num_users)) & (num_users < jnp.inf) & (eps0 >= 0)
    inside = valid & (eps0 > 0) & (eps0 <= _LARGEST_EPS0)
    users, local = jnp.where(inside, num_users, 1.0), jnp.where(inside, eps0, 1.0)
    r, complement = clone_rate(local, rate)
    plan, live = _plan(users - 1.0, r, complement, rows)
    places = _places(1.0 + (users - 1.0) * r, plan.left[-1] + 1.0, reach, mesh)
    law = _bias_law(plan, places, live, rows)

    outer = jnp.append(law.mass * (1.0 - law.share), 0.0) + jnp.insert(law.mass * law.share, 0, 0.0)
    outer = outer.at[0].add(law.tie).at[-1].add(REST if closed else 0.0) * (1.0 + _ROUNDING)
    inner = law.inner_mass * (1.0 - _ROUNDING)
    rest = jnp.maximum(1.0 - jnp.sum(inner) - 1e-15, 0.0)
    span = places[1:] - places[:-1]
    means = places[:-1] + span * law.inner_share, (1.0 - places[1:]) + span * (1.0 - law.inner_share)

    outer_loss = jnp.minimum(_loss(places, 1.0 - places, local) * (1.0 + _LOSS_ROUNDING), local).at[-1].set(local)
    inner_loss = jnp.insert(_loss(*means, local) * (1.0 - _LOSS_ROUNDING), 0, 0.0)
    sound = inside & jnp.isfinite(jnp.sum(outer)) & jnp.isfinite(jnp.sum(inner))
    fallback = jnp.where(valid, eps0, jnp.inf)  # randomized response of level eps0
    even = jnp.full(cells + 1, 1.0 / (cells + 1))
    return ClonesLaw(
        *_both_signs(jnp.where(sound, outer_loss, fallback), jnp.where(sound, outer, even)),
        *_both_signs(jnp.where(sound, inner_loss, 0.0), jnp.where(sound, jnp.insert(inner, 0, rest), even)),
    )


def clones_laws(
    num_users: np.ndarray, eps0: np.ndarray, reach: np.ndarray, *, rate: str, mesh: Mesh = FINE, closed: bool = True
) -> ClonesLaw:
    """Laws of vectors of concrete numbers, every different triple of them once.

    Each takes milliseconds to seconds, as its clone count spreads: one at a time on a core, so that none waits.
    """
    points, places = np.unique(np.stack([num_users, eps0, reach], axis=1), axis=0, return_inverse=True)
    found = side_by_side(
        lambda point: clones_law(*point[:, None], rate=rate, mesh=mesh, closed=closed), list(points), cores()
    )
    order = places.reshape(-1)
    return jax.tree_util.tree_map(lambda *parts: np.concatenate(parts)[order], *found)


def _loss(share, complement, eps0):
    """2 atanh(bias), the bias a share of tanh(eps0/2), from 1 - bias without cancellation."""
    top, small = jnp.tanh(0.5 * eps0), jnp.exp(-eps0)
    return jnp.log1p(2.0 * top * share / (2.0 * small / (1.0 + small) + top * complement))


def _both_signs(loss, mass):
    """P gives a randomized response of loss L the probability 1/(1 + e^-L) of +L."""
    log_mass = jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)
    losses = jnp.concatenate([loss, jnp.where(jnp.isinf(loss), jnp.inf, -loss)])
    return losses, jnp.concatenate([log_mass, log_mass]) - jnp.logaddexp(0.0, -losses)


def _plan(n, p, q, rows: int) -> tuple[Blocks, jax.Array]:
    """Blocks of the clone count, single while they fit, and how many of them may hold something.

    The first-order cost of a block of width w goes with its mass times w: least where 1/w goes with the square root of
    the density. A quarter of the edges is spread evenly in asinh, for the far lower counts.
    """
    # nobody else: one who is never a clone, whose law has derivatives
    n, p, q = jnp.maximum(n, 1.0), jnp.where(n > 0, p, 1e-300), jnp.where(n > 0, q, 1.0)
    low, high, missed_low, missed_high = window(n, p, q, _DEEP)
    steps = jnp.arange(rows + 1, dtype=jnp.float64)
    singles = jnp.minimum(low + steps, high + 1.0)
    mean, deviation = n * p, jnp.sqrt(jnp.maximum(n * p * q, 1e-4))
    dense = mean + deviation * normal_quantiles(rows - rows // 4, 2.0)
    start, stop = (jnp.arcsinh((end - mean) / deviation) for end in (low, high + 1.0))
    sparse = mean + deviation * jnp.sinh(start + (stop - start) * jnp.arange(rows // 4 + 1) / (rows // 4))
    spread = jnp.clip(jnp.sort(jnp.round(jnp.concatenate([dense, sparse]))), low, high + 1.0)
    spread = spread.at[0].set(low).at[-1].set(high + 1.0)
    fits = high - low + 1.0 <= rows
    edges = jax.lax.stop_gradient(jax.lax.optimization_barrier(jnp.where(fits, singles, spread)))
    plan = masses(edges, n, p, q)._replace(log_missed_low=missed_low, log_missed_high=missed_high)
    return plan, jnp.where(fits, high - low + 1.0, jnp.asarray(rows, jnp.float64))


@functools.cache
def _fractions(cells: int) -> tuple[np.ndarray, int]:
    """(ends of the cells, Q): all fractions of [0, 1] with denominators up to Q, each just above an end."""

    def up_to(most: int) -> np.ndarray:
        return np.unique(np.concatenate([np.arange(d) / d for d in range(1, most + 1)]).round(14))

    most = 1
    while up_to(most + 1).size < cells:
        most += 1
    found = up_to(most) * (1 - _SHIFT)
    return np.concatenate([found, np.linspace(found[-1], 1.0, cells + 2 - found.size)[1:]]), most


def _places(count, most, reach, mesh: Mesh):
    """Ends of the cells, as shares of the largest bias, from 0 to 1; `count` coins or so, `most` at the most.

    The second-order cost of a cell goes with its mass times its squared width: least where 1/width goes with the
    density's cube root. Others lie evenly on `reach` deviations, for small deltas, and evenly in asinh.
    Few coins take few values, each of which gets a cell.
    """
    scale = 1.0 / jnp.sqrt(count)
    cells, even = mesh.cells, mesh.even
    far = (cells - even) * 3 // 8
    middle = cells - far - even
    dense = scale * np.abs(normal_quantiles(2 * middle, 3.0)[middle:])
    steady = scale * reach * (jnp.arange(even) + 0.5) / even
    step = jnp.arcsinh(_NEXT_TO_TOP / scale) / (far - 1)
    sparse = scale * jnp.sinh(step * jnp.arange(far))
    many = jnp.sort(jnp.minimum(jnp.concatenate([dense, steady, sparse]), _NEXT_TO_TOP)).at[0].set(0.0)
    ends, largest = _fractions(cells)
    return jax.lax.stop_gradient(jnp.where(most <= largest, ends, jnp.append(many, 1.0)))


class _BiasLaw(NamedTuple):
    """Mass of each cell and the place of its mean in it, from above; the same from below; the mass of ties."""

    mass: jax.Array
    share: jax.Array
    inner_mass: jax.Array
    inner_share: jax.Array
    tie: jax.Array


def _bias_law(plan: Blocks, places, live, rows: int) -> _BiasLaw:
    """The mean over blocks of the coins' law: of each block's left end from above, of the next one's from below."""
    # (a block of one count is its own right end; no logarithms of sums here: they have no derivative at -inf)
    alone, below = plan.width <= 1, jnp.exp(plan.log_lower)
    following = jnp.insert(jnp.where(alone, 0.0, below)[:-1], 0, 0.0)
    lower_law = jnp.where(alone, below, 0.0) + following
    weights = _counts_law(plan, live).reshape(-1, _GROUP), lower_law.reshape(-1, _GROUP)
    left = plan.left.reshape(-1, _GROUP)
    # (a number of turns known beforehand can be differentiated)
    groups = rows // _GROUP if rows <= COARSE.rows else jnp.ceil(live / _GROUP).astype(jnp.int32)

    def add(i, total):
        upper, lower = weights[0][i], weights[1][i]
        log_mass, up, down, tie = jax.vmap(lambda coins: _cells_of(coins, places))(left[i] + 1.0)
        mass, inner = jnp.exp(log_mass) * upper[:, None], jnp.exp(log_mass) * lower[:, None]
        parts = mass, mass * up, inner, inner * down, jnp.exp(tie) * upper
        return tuple(t + jnp.sum(part, axis=0) for t, part in zip(total, parts, strict=True))

    nothing = jnp.zeros(places.shape[0] - 1)
    start = (nothing, nothing, nothing, nothing, jnp.zeros(()))
    mass, moved, inner, inner_moved, tie = jax.lax.fori_loop(0, groups, add, start)
    return _BiasLaw(mass, _ratio(moved, mass), inner, _ratio(inner_moved, inner), tie)


def _ratio(part, whole):
    """part/whole, 0 for 0/0. Its derivative as 1/whole (d part - ratio d whole): whole^2 may underflow."""
    still = jax.lax.stop_gradient
    value = still(jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1.0), 0.0))
    inverse = still(jnp.where(whole > 1e-290, 1.0 / jnp.where(whole > 1e-290, whole, 1.0), 0.0))
    change = inverse * ((part - still(part)) - value * (whole - still(whole)))
    return jnp.clip(value + change, 0.0, 1.0)


def _counts_law(plan: Blocks, live):
    """Masses of the left ends that add to 1 and whose sums from the left are never below the true ones.

    What lies above the window goes to the last of the `live` blocks.
    """
    upper, before = jnp.exp(plan.log_upper), jnp.exp(plan.log_missed_low)
    reached = before + jnp.cumsum(upper)
    law = jnp.where(reached <= 1.0, upper, jnp.maximum(1.0 - (reached - upper), 0.0))
    return law.at[live.astype(jnp.int32) - 1].add(jnp.maximum(1.0 - reached[-1], 0.0))


def _cells_of(coins, places):
    """(log mass of each cell under m fair coins, the place of its mean in it from above and below, log P[tie])."""
    half = jnp.floor(0.5 * coins) + 1.0
    first = jnp.maximum(jnp.ceil(0.5 * coins * (1.0 + places[:-1])), half)
    first = jax.lax.stop_gradient(jnp.minimum(first, coins + 1.0))
    following = jnp.append(first[1:], coins + 1.0)
    log_below, ratio = log_pmf_and_tail_ratio(jnp.full(first.shape[0], coins), first, nodes=_NODES)
    there = first <= coins
    log_tail = log_below + jnp.where(there, jnp.log(jnp.where(there, ratio, 1.0)), -jnp.inf)
    log_pmf = log_below + jnp.log(jnp.maximum(coins - first + 1.0, 0.5) / first)
    log_tail, log_pmf = jax.lax.optimization_barrier((log_tail, log_pmf))
    next_tail, next_pmf = jnp.append(log_tail[1:], -jnp.inf), jnp.append(log_pmf[1:], -jnp.inf)
    next_pmf = jnp.where(following <= coins, next_pmf, -jnp.inf)
    width = following - first
    some, wide = width > 0, width > 1
    # by tails even where the cell is one count: their errors cancel in the sums over cells that decide
    log_mass = log_tail + jnp.log(-jnp.expm1(jnp.where(some, jnp.minimum(next_tail - log_tail, -1e-300), -1.0)))
    log_mass = jnp.where(some, log_mass, -jnp.inf)
    mass = jnp.exp(jnp.where(wide, log_mass - log_pmf, 0.0))
    moment = 0.5 * (first - following * jnp.exp(next_pmf - log_pmf)) + (0.5 * coins - first) * mass
    beyond = jnp.where(wide, moment / mass, 0.0)  # mean count - first
    span = places[1:] - places[:-1]
    place = (2.0 * first - coins) / coins - places[:-1] + 2.0 * beyond / coins
    share = place / jnp.where(span > 0, span, 1.0)
    # what the mean count may be off by: a mass is a difference of tails, a moment one of larger numbers
    mass_off = _PMF_ROUNDING * jnp.exp(jnp.where(wide, jnp.minimum(log_tail - log_mass, 600.0), 0.0))
    moment_off = _PMF_ROUNDING * 0.5 * (first + following * jnp.exp(next_pmf - log_pmf))
    mean_off = jnp.where(wide, moment_off / mass + (first - 0.5 * coins + beyond) * mass_off, 0.0)
    slack = _SLACK + (2.0 * mean_off / coins + 2.0**-50 * places[1:]) / jnp.where(span > 0, span, 1.0)
    all_heads = first >= coins  # the largest bias itself; the share as computed may fall short of 1
    even = coins == 2.0 * (half - 1.0)
    tie = jnp.where(even, log_below[0], -jnp.inf)
    return (
        log_mass + math.log(2.0),
        jnp.where(all_heads, 1.0, jnp.clip(share + slack, 0.0, 1.0)),
        jnp.where(all_heads, 1.0, jnp.clip(share - slack, 0.0, 1.0)),
        tie,
    )


@canary("clones pair, finite law")
def _canary():
    """The Renyi divergence of order 16 of 300 users with eps0 = 2, to 17 digits, from the pair that dominates."""
    law = clones_law.run_unchecked(*(np.array([x]) for x in (300.0, 2.0, USUAL_REACH)))
    moment = np.sum(np.exp(law.log_weights + 15.0 * law.losses), axis=-1)
    return np.log(moment) / 15.0, np.array([0.64570993125113142]), 5e-4
