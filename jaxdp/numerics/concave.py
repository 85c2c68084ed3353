"""The largest value of concave functions of e^x that are known at chosen points only, such as trade-off functions."""

from collections.abc import Callable

import numpy as np

# Points of the first grid, most rounds of four more points each, and the gap to the maximum, relative to the smaller of
# the value and 1 - value, at which the search ends.
_FIRST_TRIED, _ROUNDS, _GAP = 33, 16, 1e-5


def largest_value(
    value_at: Callable[[np.ndarray, float], np.ndarray], low: np.ndarray, high: np.ndarray, idle: float
) -> np.ndarray:
    """The largest value found of each function of a batch, by a search between low and high.

    low, high: of a shape that broadcasts to the batch's; functions with equal ends share the points of the first grid.
    value_at: (points on a further last axis, relative tolerance) -> values, at most 1. idle: a point left of ``low`` at
    which evaluation costs little; functions whose search is over get it.
    """
    # The maximum of a concave function lies between the neighbours of the best point.
    x = np.linspace(low, high, _FIRST_TRIED, axis=-1)
    value = value_at(x, 1e-2)
    x = _around_the_best(np.broadcast_to(x, value.shape), value)[0]
    value = value_at(x, _GAP)
    for turn in range(_ROUNDS):
        kinks, most = _corners(x, value)
        best = np.max(value, axis=-1)
        done = most <= best + np.maximum(_GAP * np.minimum(best, 1 - best), 1e-12)
        if done.all():
            break
        # The parabola finds the maximum of a smooth function, the chords find a kink. Chords of wide cells are too
        # steep: the first round takes the middles of the cells, every second round keeps away from their ends.
        three = x[..., 1:4]
        space = np.diff(three, axis=-1) * (0.5 if turn == 0 else 0.1 if turn % 2 else 0.0)
        kinks = np.clip(kinks, three[..., :-1] + space, three[..., 1:] - space)
        new = np.concatenate([_next_to_the_vertex(three, value[..., 1:4]), kinks], axis=-1)
        new = np.where(done[..., None], idle, new)
        value = np.concatenate([value, value_at(new, _GAP)], axis=-1)
        x, value = _around_the_best(np.concatenate([x, new], axis=-1), value)
    return np.max(value, axis=-1)


def _around_the_best(x: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x, value) of the point with the largest value and of two neighbours on either side, along the last axis."""
    order = np.argsort(x, axis=-1)
    x, value = (np.take_along_axis(a, order, axis=-1) for a in (x, value))
    best = np.clip(np.argmax(value, axis=-1), 2, x.shape[-1] - 3)
    five = best[..., None] + np.arange(-2, 3)
    return np.take_along_axis(x, five, axis=-1), np.take_along_axis(value, five, axis=-1)


def _corners(x: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x in the two middle cells, upper bound of the maximum) of a function given at five points.

    In each middle cell the extended chords of both neighbouring cells meet at x, not below the function.
    """
    at = np.expm1(x - x[..., 2:3])
    low, high = at[..., 1:3], at[..., 2:4]
    with np.errstate(all="ignore"):
        slope = np.diff(value, axis=-1) / np.diff(at, axis=-1)
        rise, fall = slope[..., :2], slope[..., 2:]
        meet = low + (np.diff(value, axis=-1)[..., 1:3] - fall * (high - low)) / (rise - fall)
        beside = 1e-6 * (high - low)  # the ends of the cell are known points: take its middle instead
        inside = (meet > low + beside) & (meet < high - beside)
        most = np.where(inside, value[..., 1:3] + rise * (meet - low), np.maximum(value[..., 1:3], value[..., 2:4]))
    return x[..., 2:3] + np.log1p(np.where(inside, meet, 0.5 * (low + high))), np.max(most, axis=-1)


def _next_to_the_vertex(x: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Two points close to the vertex of the parabola through three points, between the outer two."""
    (low, middle, high), (v_low, v_middle, v_high) = np.moveaxis(x, -1, 0), np.moveaxis(value, -1, 0)
    left, right = middle - low, high - middle
    with np.errstate(all="ignore"):
        rise, fall = (v_middle - v_low) / left, (v_middle - v_high) / right
        vertex = middle + 0.5 * (rise * right - fall * left) / (rise + fall)
    vertex = np.where(np.isfinite(vertex), vertex, middle)
    space = 0.1 * np.minimum(left, right)
    vertex = np.clip(vertex, low + 2 * space, high - 2 * space)
    return np.stack([vertex - space, vertex + space], axis=-1)
