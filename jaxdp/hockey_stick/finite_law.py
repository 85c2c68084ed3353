"""delta and epsilon of one run of a mechanism whose loss takes finitely many values: an all-positive sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdp.rounding import ULP as _ULP

_HALVINGS = 64
_LEAST = 2.3e-308


def delta_bounds(
    loss: jax.Array, log_weight: jax.Array, blur: jax.Array, infinity: jax.Array, eps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) of infinity + sum w_i (1 - e^{eps - L_i})_+, eps finite.

    loss, log_weight: one axis, log_weight -inf where there is no atom; weights need not sum to 1. blur: what a loss and
    with it its log weight may be off by besides the rounding of numbers of their size. infinity: not less than it is,
    and more by rounding only.
    """
    live = log_weight > -jnp.inf
    weight = jnp.where(live, jnp.exp(log_weight), 0.0)
    gap = jnp.where(live, loss - eps, -1.0)
    share = -jnp.expm1(-jnp.maximum(gap, 0.0))
    total = jnp.sum(weight * share)
    # a weight is off at the size of its exponent, a gap at that of its parts: an atom at eps may fall on either side
    heavier = 4 * _ULP * jnp.where(live, jnp.abs(log_weight) + jnp.abs(loss) + 8, 0.0) + 2 * blur
    moved = 2 * _ULP * (jnp.abs(loss) + jnp.abs(eps)) + blur
    off = heavier * share + jnp.where(gap > -moved, moved, 0.0)
    # XLA flushes subnormal numbers to zero: each term and its error are charged the smallest normal number
    error = jnp.sum(weight * off) * (1 + 1e-9) + loss.shape[0] * (_ULP * total + 2 * _LEAST)
    # of first order: where an exponent is off by so much that a weight may have been lost, nothing is known
    unsure = jnp.any(live & (heavier > 0.25) & (log_weight + heavier > -745.0))
    total, error = jnp.where(unsure, 0.0, total), jnp.where(unsure, 2.0, error)
    largest = jnp.max(jnp.where(live, loss + blur, -jnp.inf))
    upper = jnp.where(eps >= largest, infinity, (total + error + infinity) * (1 + 8 * _ULP))
    sure = _at_least(infinity, loss.shape[0])
    floor = -jnp.expm1(jnp.minimum(eps, 0.0))
    lower = jnp.where(eps >= largest, sure, (total - error + sure) * (1 - 8 * _ULP))
    lower = jnp.maximum(lower, jnp.maximum(floor * (1 - 8 * _ULP), sure))
    return jnp.clip(lower, 0.0, 1.0), jnp.clip(upper, jnp.maximum(floor * (1 + 8 * _ULP), infinity), 1.0)


def _at_least(infinity: jax.Array, terms: int) -> jax.Array:
    return jnp.where(infinity < 1e-307, 0.0, infinity * (1 - (4 * terms + 2048) * _ULP))


def epsilon_bounds(
    loss: jax.Array, log_weight: jax.Array, blur: jax.Array, infinity: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 at delta in [0, 1], by bisection on `delta_bounds`."""
    law = loss, log_weight, blur, infinity
    largest = jnp.maximum(jnp.max(jnp.where(log_weight > -jnp.inf, loss + blur, 0.0)), 0.0)

    def halve(_: int, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        lower_low, lower_high, upper_low, upper_high = ends
        a, b = 0.5 * (lower_low + lower_high), 0.5 * (upper_low + upper_high)
        leaks = delta_bounds(*law, a)[0] > delta
        safe = delta_bounds(*law, b)[1] <= delta
        return (
            jnp.where(leaks, a, lower_low),
            jnp.where(leaks, lower_high, a),
            jnp.where(safe, upper_low, b),
            jnp.where(safe, b, upper_high),
        )

    zero = jnp.zeros_like(largest)
    lower, _, _, upper = jax.lax.fori_loop(0, _HALVINGS, halve, (zero, largest, zero, largest))
    upper = jnp.where(delta_bounds(*law, zero)[1] <= delta, 0.0, upper)
    known = (delta >= 0) & (delta <= 1)
    never = delta < _at_least(infinity, loss.shape[0])
    lower = jnp.where(known, jnp.where(never, jnp.inf, jnp.where(delta < infinity, 0.0, lower)), 0.0)
    return lower, jnp.where(known & ~(delta < infinity), upper, jnp.inf)
