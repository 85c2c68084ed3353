"""Bracketed root finding whose two ends are both tested points, never the last iterate unchecked."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxdp.domains import SMALLEST
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp

_NEWTON = 0.05  # a larger residual asks for another step of Newton's; with a smaller one the ends are tested
_CLOSE = 1e-9


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


class Evaluation(NamedTuple):
    """Certified bounds of a decreasing function at one point, an estimate between them, and the estimate's slope.

    Where only the sign of the estimate is known it is infinite. Where it is NaN a search ends on what it has.
    """

    upper: jax.Array
    lower: jax.Array
    estimate: jax.Array
    slope: jax.Array


def of_delta(lower: jax.Array, upper: jax.Array, steepness: jax.Array) -> Evaluation:
    """The logarithm of a delta with these bounds and minus this slope, to be compared with the logarithm of another.

    Both logarithms are rounded: each bound is moved outward by 2 units in the last place of either.
    """
    middle = 0.5 * (lower + upper)
    logs = xp.log(lower), xp.log(upper)
    below, above = (sign * 8 * ULP * (1 + xp.minimum(xp.abs(x), 745.0)) for sign, x in zip((-1, 1), logs, strict=True))
    return Evaluation(logs[1] + above, logs[0] + below, xp.log(middle), -steepness / xp.maximum(middle, SMALLEST))


class _Search(NamedTuple):
    point: jax.Array
    low: jax.Array  # the largest point with lower >= target
    high: jax.Array  # the smallest point with upper <= target
    left: jax.Array  # the estimate's root lies between left and right; -1 before 0 was looked at
    right: jax.Array
    root: jax.Array
    done: jax.Array
    tries: jax.Array
    tests: jax.Array  # tries next to the root
    before: jax.Array  # size of the residual from which Newton came here, or infinite


def proved_ends(
    evaluate: Callable[[jax.Array], Evaluation],
    target: jax.Array | float,
    start: jax.Array,
    end: jax.Array,
    *,
    ceiling: jax.Array | None = None,
    wanted: jax.Array | bool = True,
    close: float = _CLOSE,
    anywhere: bool = False,
    most_tries: int = 40,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(low, high, root): points tested to have lower >= target and upper <= target, and the root of the estimate.

    low is 0 and high is ``ceiling`` (``end`` unless given) where none is found. start: a first guess in (0, end), the
    range that is searched. wanted: False where no search is to be made. close: ends closer than this (relative) to the
    root are not improved; at least 1e-13. anywhere: the bounds are close at every point, not only near the root; then
    the function is taken for the logarithm of a delta, which is convex in e^epsilon.

    Newton's method finds the root of the estimate; then it is left by as much as the bounds differ from it, on one side
    and on the other.
    """

    def advance(s: _Search) -> _Search:
        x = s.point
        seen = evaluate(x)
        high = xp.where(seen.upper <= target, xp.minimum(s.high, x), s.high)
        low = xp.where(seen.lower >= target, xp.maximum(s.low, x), s.low)
        residual = seen.estimate - target
        left = xp.where((residual > 0) & (x < high), xp.maximum(s.left, x), s.left)
        right = xp.where((residual <= 0) & (x > left), xp.minimum(s.right, x), s.right)
        steep = xp.abs(seen.slope)
        newton = x + residual / steep
        # next to the end of its support delta falls to 0 linearly: Newton on delta itself
        linear = -xp.expm1(-xp.clip(residual, -30.0, 700.0)) / steep
        linear = x + (xp.log1p(linear) if anywhere else linear)
        nearest = xp.maximum(left, 0.0)
        # where Newton creeps the next point is in the middle
        quick = (xp.abs(residual) < xp.inf) & ((xp.abs(residual) < 0.5 * s.before) | (xp.abs(residual) <= _NEWTON))
        usable = [quick & (guess >= nearest) & (guess <= right) for guess in (newton, linear)]
        middle = 0.5 * (nearest + right)
        if anywhere:
            middle = xp.fmax(middle, xp.where(residual > 0, xp.minimum(linear, x + 0.9 * (right - x)), 0.0))
        root = xp.where(usable[0], newton, xp.where(usable[1], linear, middle))
        rough = ~usable[0] | (xp.abs(residual) > _NEWTON)
        curved = residual * residual / steep + 1e-14 * root
        distances = 1.1 * (seen.upper - seen.estimate) / steep, 1.1 * (seen.estimate - seen.lower) / steep
        # Where a bound proves nothing near the root its error is unknown: try smaller and smaller shares of the root.
        known = [(distance >= 0) & (distance < root) for distance in distances]
        guessed = 0.3 * root * 0.25 ** (s.tests % 8)
        enough_above = known[0] & (high - root <= 2 * distances[0] + close * root)
        enough_below = known[1] & (root - low <= 2 * distances[1] + close * root)
        above, below = (xp.where(k, d, guessed) + curved for k, d in zip(known, distances, strict=True))
        grown = 2.0 ** xp.maximum(s.tests - 4, 0)  # a failed test is followed by a wider one
        outward = xp.where(enough_above, xp.maximum(root - grown * below, 0.5 * root), root + grown * above)
        following = xp.minimum(xp.where(rough, root, outward), 0.5 * (root + end))
        # where the root may be below 0: 0 itself, once
        following = xp.where((newton <= 0) & (left < 0), 0.0, following)
        lost = xp.isnan(seen.estimate)
        done = (~rough & enough_above & enough_below) | lost | (high <= 0) | (s.tries + 1 >= most_tries)
        before = xp.where(usable[0] | usable[1], xp.abs(residual), xp.inf)
        return _Search(following, low, high, left, right, root, done, s.tries + 1, s.tests + ~rough, before)

    zero = xp.zeros_like(end)
    top = end if ceiling is None else ceiling
    none = xp.zeros((), xp.int32)
    begun = _Search(start, zero, top, zero - 1, end, start, ~xp.asarray(wanted), none, none, zero + xp.inf)
    found = xp.while_loop(lambda s: ~s.done, advance, begun)
    return xp.minimum(found.low, found.high), found.high, found.root
