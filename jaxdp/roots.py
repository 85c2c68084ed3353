"""Bracketed root finding whose two ends are both tested points, never the last iterate unchecked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _State(NamedTuple):
    low: jax.Array
    high: jax.Array
    point: jax.Array
    width: jax.Array
    step: jax.Array


def crossing(
    fun: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    low: jax.Array,
    high: jax.Array,
    start: jax.Array,
    *,
    rtol: float | jax.Array,
    max_steps: int = 80,
) -> tuple[jax.Array, jax.Array]:
    """(a, b), a <= b, around the zero of a decreasing function of one variable.

    fun(x) -> (value, slope); value > 0 left of the zero. ``low`` and ``high`` are taken as known to be on
    their sides; every other returned end was tested: value(a) > 0, value(b) <= 0. NaN counts as > 0.
    Newton steps overshoot by a margin, so that both ends close in; whenever the bracket has not halved
    in two steps it is bisected. Ends when b - a <= rtol b or after max_steps, on whatever bracket holds.
    """

    def unfinished(s: _State) -> jax.Array:
        return (s.step < max_steps) & (s.high - s.low > rtol * jnp.abs(s.high))

    def advance(s: _State) -> _State:
        value, slope = fun(s.point)
        safe = value <= 0
        low, high = jnp.where(safe, s.low, s.point), jnp.where(safe, s.point, s.high)
        newton = s.point - value / slope
        margin = 0.4 * rtol * jnp.abs(newton) + 0.02 * jnp.abs(newton - s.point)
        guess = newton + jnp.where(safe, -margin, margin)
        inside = (guess > low) & (guess < high)
        stalled = (s.step % 3 == 2) & (high - low > 0.5 * s.width)
        guess = jnp.where(inside & ~stalled, guess, 0.5 * (low + high))
        width = jnp.where(s.step % 3 == 2, high - low, s.width)
        return _State(low, high, guess, width, s.step + 1)

    low, high = jnp.asarray(low, jnp.float64), jnp.asarray(high, jnp.float64)
    inside = (start > low) & (start < high)
    first = jnp.where(inside, start, 0.5 * (low + high))
    final = jax.lax.while_loop(unfinished, advance, _State(low, high, first, high - low, jnp.asarray(0, jnp.int32)))
    return final.low, final.high
