"""Certified maximum of a concave function of which bounds are known at a few points."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cell_bounds(point: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Upper bounds of a concave function g on the cells [point_i, point_{i+1}], given low_i <= g(point_i) <= high_i.

    The extension of a chord of a concave function lies above it. The chord of the cell to the left bounds g from
    point_i on, that of the cell to the right bounds g up to point_{i+1}. The smaller of the two exceeds the maximum by
    the square of the cell width. There is one bound a cell: len(point) - 1 of them.
    """
    width = jnp.diff(point)
    safe = jnp.where(width > 0, width, 1.0)
    infinite = jnp.full((1,), jnp.inf)
    rise = jnp.where(width > 0, (high[1:] - low[:-1]) / safe, jnp.inf)
    fall = jnp.where(width > 0, (high[:-1] - low[1:]) / safe, jnp.inf)
    left_slope = jnp.concatenate([infinite, jnp.maximum(rise[:-1], 0.0)])
    right_slope = jnp.concatenate([jnp.maximum(fall[1:], 0.0), infinite])
    from_left = high[:-1] + jnp.where(width > 0, left_slope * width, 0.0)
    from_right = high[1:] + jnp.where(width > 0, right_slope * width, 0.0)
    ends = jnp.maximum(high[:-1], high[1:])
    return jnp.where(width > 0, jnp.minimum(from_left, from_right), ends)
