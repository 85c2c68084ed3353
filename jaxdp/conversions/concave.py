"""A certified maximum of a concave function that is known, from both sides, at a few points only."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def cell_bounds(point: Any, low: Any, high: Any) -> Any:
    """Upper bound of a concave function on each cell [point_i, point_{i+1}].

    low_i <= g(point_i) <= high_i. A chord of a concave function, extended, lies above it: the chord from the left
    through point_i bounds the cell from one side, the chord from the right through point_{i+1} from the other. The
    smaller of the two exceeds the maximum by the square of the cell width. Length len(point) - 1.
    """
    width = jnp.diff(point)
    safe = jnp.where(width > 0, width, 1.0)
    infinite = jnp.full((1,), jnp.inf)
    rise = jnp.where(width > 0, (high[1:] - low[:-1]) / safe, jnp.inf)  # of the cell, seen from its right end
    fall = jnp.where(width > 0, (high[:-1] - low[1:]) / safe, jnp.inf)
    left_slope = jnp.concatenate([infinite, jnp.maximum(rise[:-1], 0.0)])
    right_slope = jnp.concatenate([jnp.maximum(fall[1:], 0.0), infinite])
    from_left = high[:-1] + jnp.where(width > 0, left_slope * width, 0.0)
    from_right = high[1:] + jnp.where(width > 0, right_slope * width, 0.0)
    ends = jnp.maximum(high[:-1], high[1:])
    return jnp.where(width > 0, jnp.minimum(from_left, from_right), ends)
