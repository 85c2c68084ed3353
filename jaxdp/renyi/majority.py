r"""The larger of the two counts of m fair coins, cut into blocks whose mass and mean are known to rounding.

Tail masses come from `half_binomial` (no certified width is needed, unlike for a general binomial law) and first
moments from the telescoping sum over i >= l of (i - m/2) pmf(i) = (l/2) pmf(l). Hence, for every convex function of
i, the chord over each block (upper) and Jensen's inequality at its mean (lower) are both of second order in the width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.hockey_stick.half_binomial import log_pmf_and_tail_ratio

# Of a block's width; the mean is known to about 1e-9 of it, and is moved outwards by this.
_SLACK = 1e-7


class Majority(NamedTuple):
    """Law of the larger count i > m/2 of m fair coins; both sides together, so all masses add to 1.

    knots: size + 1 counts. log_chord: log weight of each knot after every block's mass is split between its two ends
    at its mean. log_mass, means: the size blocks' mass and mean. log_tie: log P[i = m/2].
    """

    knots: jax.Array
    log_chord: jax.Array
    log_mass: jax.Array
    means: jax.Array
    log_tie: jax.Array


def majority(coins, exponent, *, size: int) -> Majority:
    """Blocks of the larger count, finest within about e^-exponent of the mass; nothing is cut away.

    size: number of blocks, divisible by 16. Counts are single while they fit; the last block reaches to `coins`.
    """
    knots = _knots(coins, exponent, size)
    left = knots[:-1]
    log_below, ratio = log_pmf_and_tail_ratio(jnp.full(size, coins), left, nodes=26)
    log_tail = log_below + jnp.log(ratio)
    log_pmf = log_below + jnp.log((coins - left + 1.0) / left)
    log_tail, log_pmf = jax.lax.optimization_barrier((log_tail, log_pmf))
    next_tail, next_pmf = jnp.append(log_tail[1:], -jnp.inf), jnp.append(log_pmf[1:], -jnp.inf)
    width, last = knots[1:] - left, jnp.arange(size) == size - 1
    single = ~last & (width == 1)
    log_mass = log_tail + jnp.log(-jnp.expm1(jnp.minimum(next_tail - log_tail, 0.0)))
    log_mass = jnp.where(single, log_pmf, jnp.where(~last & (width < 1), -jnp.inf, log_mass))
    mass = jnp.exp(jnp.where(width < 1, 0.0, log_mass - log_pmf))
    moment = 0.5 * (left - knots[1:] * jnp.exp(next_pmf - log_pmf)) + (0.5 * coins - left) * mass
    fraction = jnp.where(single | (width < 1), 0.0, moment / jnp.maximum(mass * width, 1e-300))
    slack = jnp.where(single | (width < 1), 0.0, _SLACK)
    up, down = jnp.clip(fraction + slack, 0.0, 1.0), jnp.clip(fraction - slack, 0.0, 1.0)
    log_mass = log_mass + jnp.log(2.0)
    chord = jnp.logaddexp(jnp.append(log_mass + jnp.log1p(-up), -jnp.inf), jnp.append(-jnp.inf, log_mass + jnp.log(up)))
    even = coins == 2.0 * jnp.floor(0.5 * coins)
    tie = jnp.where(even, log_below[0], -jnp.inf)
    return Majority(knots, chord, log_mass, left + down * width, tie)


def _knots(coins, exponent, size: int):
    start = jnp.floor(0.5 * coins) + 1.0
    steps = jnp.arange(size, dtype=jnp.float64)
    # Hoeffding: beyond m/2 + sqrt(m y/2) lies at most e^-y.
    reach = jnp.minimum(coins, start + jnp.ceil(jnp.sqrt(0.5 * coins * exponent))) - start
    scale = 1.25 * jnp.sqrt(coins)
    spread = jnp.round(scale * jnp.sinh(jnp.arcsinh(reach / scale) * (steps / (size - 1))))
    offsets = jnp.where(coins - start <= size - 1.0, steps, jnp.where(reach <= size - 1.0, steps, spread))
    return jax.lax.optimization_barrier(jnp.append(jnp.minimum(start + offsets, coins), coins))
