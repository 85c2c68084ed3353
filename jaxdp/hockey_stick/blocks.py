"""A binomial law cut into blocks of neighbouring counts, with a certified mass on each side.

The window leaves out at most e^{-y} on each side (Bernstein). Inside it the counts are single while they
fit and blocks of growing width otherwise. Every number is kept as a logarithm: the masses that decide
delta = 1e-300 lie far below the smallest double once multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.special import log_binomial_pmf

LOG_CUT = -math.log(1e-9)
"""Mass left out on each side over the delta in question, 1e-9 (notebooks/proofs/clones_kernel.md, section 3)."""


class Blocks(NamedTuple):
    """Blocks of counts; arrays of one static size except the two scalars at the end.

    left: first count of each block. width: its number of counts (0: an empty block, mass 0).
    log_upper, log_lower: certified logarithms of the mass. log_middle: the best estimate of it.
    fraction: estimate of (mean count - left)/width, the place of the block's mean between two left ends.
    log_edge: logarithm of the pmf at each edge, one more than there are blocks.
    log_missed_low, log_missed_high: bounds on the mass outside the window (-inf: nothing outside).
    """

    left: jax.Array
    width: jax.Array
    log_upper: jax.Array
    log_lower: jax.Array
    log_middle: jax.Array
    fraction: jax.Array
    log_edge: jax.Array
    log_missed_low: jax.Array
    log_missed_high: jax.Array


def binomial_blocks(n, p, q, log_delta, *, size: int, deep: bool = False, tilt=None, cut: float = LOG_CUT) -> Blocks:
    """Blocks of Bin(n, p), q = 1 - p, for a sum whose value is about e^log_delta.

    A sharper delta widens the low side: small counts are rare but bad. `log_delta` steers the window only;
    the masses are certified whatever it is. `deep` cuts the high side as sharply as the low one. `tilt` (default
    log_delta) places the finest blocks: where pmf(j) e^{tilt j/mean} is largest.
    """
    low, high, missed_low, missed_high = window(n, p, q, log_delta, deep=deep, cut=cut)
    mean, variance = n * p, n * p * q
    centre = jnp.clip(mean + variance * (log_delta if tilt is None else tilt) / jnp.maximum(mean, 1e-300), low, high)
    # The barriers keep the compiler from recomputing the edges inside each later expression.
    edges = jax.lax.optimization_barrier(block_edges(low, high, centre, variance, size))
    return masses(edges, n, p, q)._replace(log_missed_low=missed_low, log_missed_high=missed_high)


def masses(edges, n, p, q) -> Blocks:
    """Blocks [edges[i], edges[i+1]) of Bin(n, p), whole increasing edges; nothing is said of what lies outside."""
    size = edges.shape[0] - 1
    left, right = edges[:-1], edges[1:] - 1.0
    width = edges[1:] - left
    centre = jnp.clip(jnp.floor(0.5 * (left + right)), left, n)
    both = jax.lax.optimization_barrier(log_binomial_pmf(jnp.concatenate([edges, centre]), n, p, q))
    log_edge, log_centre = both[: size + 1], both[size + 1 :]
    # pmf(right) is one step below the next edge, so no third evaluation is needed.
    step_down = jnp.log(edges[1:] / jnp.maximum(n - edges[1:] + 1.0, 1.0)) + jnp.log(q) - jnp.log(p)
    log_right = jnp.where(
        edges[1:] > n, log_binomial_pmf(n, n, p, q), log_edge[1:] + jnp.where(edges[1:] > 0, step_down, 0.0)
    )
    upper = log_centre + jnp.log(_upper_factor(centre, left, right, n, p, q))
    slope = jnp.where(width > 1, (log_right - log_edge[:-1]) / jnp.maximum(width - 1.0, 1.0), 0.0)
    lower = log_edge[:-1] + jnp.log(_geometric(jnp.exp(slope), width - 1.0) + 1.0)
    empty, single = width < 1, width == 1
    lower = jnp.where(single, upper, lower)
    # The tangent overshoots by w^2/24 of the curvature, the chord falls short by w^2/12: weights 2 and 1.
    middle = jnp.where(single, upper, upper + jnp.log1p(jnp.expm1(lower - upper) / 3.0))
    fraction = _mean_fraction(slope, jnp.maximum(width, 1.0))

    def absent(log_mass):
        return jnp.where(empty, -jnp.inf, log_mass)

    nothing = jnp.full_like(n * p, -jnp.inf)
    return Blocks(left, width, absent(upper), absent(lower), absent(middle), fraction, log_edge, nothing, nothing)


def mean_offsets(plan: Blocks, n, p, q):
    """Bounds (low, high) of (mean count of the block) - left.

    From the telescoping sum over i >= l of (i - n p) pmf(i) = l q pmf(l) (de Moivre), which leaves only the certified
    width of the mass. Moved outwards by 1e-6 of the width for rounding; beyond n = 1e12, where the pmf's rounding was
    not measured, the whole width.
    """
    last = jnp.maximum(plan.width - 1.0, 0.0)
    log_next, next_edge = plan.log_edge[1:], plan.left + plan.width
    present = plan.width > 1
    excess = q * (plan.left - next_edge * jnp.exp(jnp.where(present, log_next - plan.log_edge[:-1], 0.0)))
    means = [
        excess * jnp.exp(jnp.where(present, plan.log_edge[:-1] - log_mass, 0.0))
        for log_mass in (plan.log_upper, plan.log_lower)
    ]
    slack, shift = 1e-6 * plan.width, n * p - plan.left
    low = jnp.clip(jnp.minimum(*means) + shift - slack, 0.0, last)
    high = jnp.clip(jnp.maximum(*means) + shift + slack, 0.0, last)
    known = present & (n <= 1e12) & (low <= high)
    return jnp.where(known, low, 0.0), jnp.where(known, high, last)


def window(n, p, q, log_delta, *, deep: bool = False, cut: float = LOG_CUT):
    """(low, high, log mass below low, log mass above high) for a sum of about e^log_delta; see `binomial_blocks`."""
    mean, variance = n * p, n * p * q
    low_exponent = cut - log_delta
    high_exponent = low_exponent if deep else cut
    low = jnp.maximum(jnp.floor(mean - _half_width(low_exponent, variance)), 0.0)
    high = jnp.minimum(jnp.ceil(mean + _half_width(high_exponent, variance)), n)
    missed_low = jnp.where(low > 0, -low_exponent, -jnp.inf)
    return low, high, missed_low, jnp.where(high < n, -high_exponent, -jnp.inf)


def block_edges(low, high, centre, variance, size: int):
    """size + 1 whole edges from low to high + 1: single counts while they fit, else finest around the centre."""
    steps = jnp.arange(size + 1, dtype=jnp.float64)
    singles = jnp.minimum(low + steps, high + 1.0)
    scale = 2.5 * jnp.sqrt(jnp.maximum(variance, 1e-4))
    start, stop = jnp.arcsinh((low - centre) / scale), jnp.arcsinh((high + 1.0 - centre) / scale)
    spread = jnp.round(centre + scale * jnp.sinh(start + (stop - start) * (steps / size)))
    spread = jnp.clip(spread, low, high + 1.0).at[0].set(low).at[-1].set(high + 1.0)
    return jnp.where(high - low + 1.0 <= size, singles, spread)


def _half_width(exponent, variance):
    """Distance from the mean beyond which each side weighs at most e^-exponent (Bernstein's inequality)."""
    return exponent / 3.0 + jnp.sqrt(exponent * exponent / 9.0 + 2.0 * variance * exponent)


def _upper_factor(centre, left, right, n, p, q):
    """Block mass over pmf(centre), from above: the pmf is log-concave, so it lies below its tangents."""
    up = (n - centre) / (centre + 1.0) * (p / q)
    down = centre / (n - centre + 1.0) * (q / p)
    return 1.0 + _geometric(up, right - centre) + _geometric(down, centre - left)


def _geometric(ratio, count):
    """sum_{i=1..count} ratio^i; count at ratio 1, 0 for count <= 0 and at ratio 0."""
    # ratio - 1 and log(ratio) round the same number, so their quotient keeps its digits next to 1.
    excess = ratio - 1.0
    log_ratio = jnp.log(jnp.maximum(ratio, 1e-300))
    value = ratio * jnp.expm1(jnp.minimum(count * log_ratio, 690.0)) / jnp.where(excess == 0, 1.0, excess)
    return jnp.where(count <= 0, 0.0, jnp.where(excess == 0, count, value))


def _mean_fraction(slope, width):
    """Mean of {0..width-1} tilted by e^{slope i}, over width, to third order in the slope; kept in [0, 1 - 1/width]."""
    first = slope * (width * width - 1.0) / 12.0
    third = slope * slope * slope * (width * width * width * width - 1.0) / 720.0
    return jnp.clip(((width - 1.0) / 2.0 + first - third) / width, 0.0, 1.0 - 1.0 / width)
