"""delta and epsilon of one run of a mechanism whose loss takes finitely many values: an all-positive sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ULP = 2.0**-53
_HALVINGS = 64


def delta_bounds(
    loss: jax.Array, log_weight: jax.Array, infinity: jax.Array, eps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) of infinity + sum w_i (1 - e^{eps - L_i})_+, eps finite.

    loss, log_weight: one axis, log_weight -inf where there is no atom; weights need not sum to 1.
    """
    live = log_weight > -jnp.inf
    weight = jnp.where(live, jnp.exp(log_weight), 0.0)
    gap = jnp.where(live, loss - eps, -1.0)
    total = jnp.sum(weight * -jnp.expm1(-jnp.maximum(gap, 0.0)))
    # exponents and gaps are rounded at their own size; an atom at eps itself may fall on either side
    size = jnp.where(live, jnp.abs(log_weight) + jnp.abs(loss), 0.0) + jnp.abs(eps) + 8
    near = gap > -4 * _ULP * size
    error = 4 * _ULP * jnp.sum(jnp.where(near, weight * size, 0.0)) + loss.shape[0] * _ULP * total
    largest = jnp.max(jnp.where(live, loss, -jnp.inf))
    upper = jnp.where(eps >= largest, infinity, (total + error + infinity) * (1 + 8 * _ULP))
    floor = jnp.maximum(-jnp.expm1(jnp.minimum(eps, 0.0)), infinity)
    lower = jnp.where(eps >= largest, infinity, (total - error + infinity) * (1 - 8 * _ULP))
    # XLA flushes subnormal numbers to zero: what is below them is charged the smallest normal one
    upper = upper + jnp.where(upper > 0, 2.3e-308, 0.0) * (eps < largest)
    return jnp.clip(jnp.maximum(lower, floor * (1 - 8 * _ULP)), 0.0, 1.0), jnp.clip(upper, floor, 1.0)


def epsilon_bounds(
    loss: jax.Array, log_weight: jax.Array, infinity: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 at delta in [0, 1], by bisection on `delta_bounds`."""
    largest = jnp.maximum(jnp.max(jnp.where(log_weight > -jnp.inf, loss, 0.0)), 0.0)

    def halve(_: int, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        lower_low, lower_high, upper_low, upper_high = ends
        a, b = 0.5 * (lower_low + lower_high), 0.5 * (upper_low + upper_high)
        leaks = delta_bounds(loss, log_weight, infinity, a)[0] > delta
        safe = delta_bounds(loss, log_weight, infinity, b)[1] <= delta
        return (
            jnp.where(leaks, a, lower_low),
            jnp.where(leaks, lower_high, a),
            jnp.where(safe, upper_low, b),
            jnp.where(safe, b, upper_high),
        )

    zero = jnp.zeros_like(largest)
    lower, _, _, upper = jax.lax.fori_loop(0, _HALVINGS, halve, (zero, largest, zero, largest))
    upper = jnp.where(delta_bounds(loss, log_weight, infinity, zero)[1] <= delta, 0.0, upper)
    impossible = delta < infinity
    known = (delta >= 0) & (delta <= 1)
    return jnp.where(known, jnp.where(impossible, jnp.inf, lower), 0.0), jnp.where(known & ~impossible, upper, jnp.inf)
