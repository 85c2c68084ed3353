"""Bracketed root finding whose two ends are both tested points, never the last iterate unchecked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxdp.runtime.arrays import xp


class _State(NamedTuple):
    low: jax.Array
    high: jax.Array
    point: jax.Array
    width: jax.Array
    step: jax.Array


def bisect(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, halvings: int
) -> tuple[jax.Array, jax.Array]:
    """(a, b) around the smallest x of [low, high] at which a condition holds that holds at every larger x; elementwise.

    The interval is halved ``halvings`` times. An end that moved was tested: ``holds`` is false at a, true at b.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = 0.5 * (ends[0] + ends[1])
        done = holds(middle)
        return xp.where(done, ends[0], middle), xp.where(done, middle, ends[1])

    return xp.fori_loop(0, halvings, halve, (low, high))


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
        return (s.step < max_steps) & (s.high - s.low > rtol * xp.abs(s.high))

    def advance(s: _State) -> _State:
        value, slope = fun(s.point)
        safe = value <= 0
        low, high = xp.where(safe, s.low, s.point), xp.where(safe, s.point, s.high)
        newton = s.point - value / slope
        margin = 0.4 * rtol * xp.abs(newton) + 0.02 * xp.abs(newton - s.point)
        guess = newton + xp.where(safe, -margin, margin)
        inside = (guess > low) & (guess < high)
        stalled = (s.step % 3 == 2) & (high - low > 0.5 * s.width)
        guess = xp.where(inside & ~stalled, guess, 0.5 * (low + high))
        width = xp.where(s.step % 3 == 2, high - low, s.width)
        return _State(low, high, guess, width, s.step + 1)

    low, high = xp.asarray(low, xp.float64), xp.asarray(high, xp.float64)
    inside = (start > low) & (start < high)
    first = xp.where(inside, start, 0.5 * (low + high))
    final = xp.while_loop(unfinished, advance, _State(low, high, first, high - low, xp.asarray(0, xp.int32)))
    return final.low, final.high


class Evaluation(NamedTuple):
    """Certified bounds of a decreasing function at a few points, and an estimate between them.

    upper <= 0 proves that the zero is not right of the point, lower > 0 that it is not left of it. middle: the
    estimate; where only its sign is known it is infinite. slope: the derivative of middle.
    """

    upper: jax.Array
    lower: jax.Array
    middle: jax.Array
    slope: jax.Array


class _Search(NamedTuple):
    points: jax.Array
    lower: jax.Array
    upper: jax.Array
    left: jax.Array  # around the zero of middle
    right: jax.Array
    root: jax.Array
    done: jax.Array
    step: jax.Array


def proved_ends(
    evaluate: Callable[[jax.Array], Evaluation], ceiling: jax.Array, first: jax.Array, *, max_rounds: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(a, b, estimate) around the zero: lower > 0 was found at a (or a is 0), upper <= 0 at b (or b is ``ceiling``).

    evaluate: the function at five points at once. first: the points of the first round, increasing, from 0 to the
    largest that is ever tried. Every later round evaluates the zero that Newton expects and two points on each side of
    it: one as far away as the bounds differ there, one farther. NaN proves nothing.
    """
    end = first[-1]

    def inside(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        return xp.where((x > low) & (x < high), x, 0.5 * (low + high))

    def advance(s: _Search) -> _Search:
        x = s.points
        seen = evaluate(x)
        upper = xp.minimum(s.upper, xp.min(xp.where(seen.upper <= 0, x, xp.inf)))
        lower = xp.maximum(s.lower, xp.max(xp.where(seen.lower > 0, x, 0.0)))
        left = xp.maximum(s.left, xp.max(xp.where((seen.middle > 0) & (x < upper), x, 0.0)))
        right = xp.minimum(s.right, xp.min(xp.where((seen.middle <= 0) & (x > left), x, xp.inf)))
        newton = x - seen.middle / seen.slope
        usable = (newton >= left) & (newton <= right)
        best = xp.argmin(xp.where(usable, xp.abs(seen.middle), xp.inf))
        near = Evaluation(*(value[best] for value in seen))
        root = xp.where(usable[best], newton[best], 0.5 * (left + right))
        above, below = (near.middle - near.upper) / near.slope, (near.lower - near.middle) / near.slope
        # Where a bound proves nothing near the zero its error is unknown: try smaller and smaller shares of the zero.
        guessed = 0.3 * root * 4.0 ** -(s.step % 8)
        measured = (above >= 0) & (above < root) & (below >= 0) & (below < root) & usable[best]
        above, below = (xp.where((y >= 0) & (y < root), y, guessed) + 2e-12 * root for y in (above, below))
        width = above + below
        enough = (
            measured & (xp.abs(root - x[best]) <= width) & (upper - lower <= xp.where(s.step < 5, 1.5, 5.0) * width)
        )
        done = enough | (upper <= 0) | (upper - lower <= 1e-13 * upper)
        farther = 4.0 ** (1 + s.step % 5)
        high = xp.minimum(upper, end)
        points = xp.stack(
            [
                root,
                inside(root + 1.2 * above, root, high),
                inside(root - 1.2 * below, lower, root),
                inside(root + farther * above, root, high),
                inside(root - farther * below, lower, root),
            ]
        )
        return _Search(points, lower, upper, left, right, root, done, s.step + 1)

    def unfinished(s: _Search) -> jax.Array:
        return ~s.done & (s.step < max_rounds)

    nothing = xp.zeros_like(end)
    never, none = xp.zeros(end.shape, bool), xp.asarray(0, xp.int32)
    start = _Search(first, nothing, ceiling, nothing, end, end, never, none)
    final = xp.while_loop(unfinished, advance, start)
    return final.lower, final.upper, final.root
