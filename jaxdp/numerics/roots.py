"""Bracketed root finding: both ends of the returned interval are tested points, never an untested last iterate."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxdp.domains import SMALLEST
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp

_NEWTON = 0.05  # residual above which another Newton step is made; below it, the ends are tested
_CLOSE = 1e-9  # relative distance from the root at which an end is not improved further


def bisect(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, halvings: int
) -> tuple[jax.Array, jax.Array]:
    """(a, b) around the smallest x in [low, high] at which ``holds`` is true; elementwise.

    ``holds`` must be true at every larger x. The interval is halved ``halvings`` times. Each end that has moved was
    tested: ``holds`` is false at a and true at b.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = 0.5 * (ends[0] + ends[1])
        is_true = holds(middle)
        return xp.where(is_true, ends[0], middle), xp.where(is_true, middle, ends[1])

    return xp.fori_loop(0, halvings, halve, (low, high))


class Evaluation(NamedTuple):
    """Certified bounds of a decreasing function at one point, an estimate of its value, and the slope of the estimate.

    An infinite estimate tells only on which side of the target the value is. A NaN estimate ends the search.
    """

    upper: jax.Array
    lower: jax.Array
    estimate: jax.Array
    slope: jax.Array


def of_delta(lower: jax.Array, upper: jax.Array, steepness: jax.Array) -> Evaluation:
    """`Evaluation` of log delta, from bounds of delta and steepness = -(slope of delta); the target is a log delta too.

    Both logarithms are rounded. So each bound is moved outward by 2 units in the last place for each of the two.
    """
    middle = 0.5 * (lower + upper)
    logs = xp.log(lower), xp.log(upper)
    below, above = (sign * 8 * ULP * (1 + xp.minimum(xp.abs(x), 745.0)) for sign, x in zip((-1, 1), logs, strict=True))
    return Evaluation(logs[1] + above, logs[0] + below, xp.log(middle), -steepness / xp.maximum(middle, SMALLEST))


class _Search(NamedTuple):
    point: jax.Array
    low: jax.Array  # the largest tested point with lower >= target
    high: jax.Array  # the smallest tested point with upper <= target
    left: jax.Array  # the root of the estimate lies between left and right; -1 until a point is known to be left of it
    right: jax.Array
    root: jax.Array  # the next approximation of the root
    done: jax.Array
    tries: jax.Array  # number of points evaluated
    tests: jax.Array  # number of points evaluated after Newton's method had converged
    before: jax.Array  # |residual| at the last point if Newton's method chose this point from it, otherwise inf


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
    """(low, high, root): tested points with lower >= target at low and upper <= target at high; root of the estimate.

    low is 0 and high is ``ceiling`` (by default ``end``) where no such point is found. start: a first guess in the
    range of the search, (0, end). wanted: whether to search at all. close: an end within this relative distance of the
    root is not improved; at least 1e-13. anywhere: whether the bounds are close at every point, not only near the root;
    then the function must be the logarithm of a delta, which is convex in e^epsilon.

    Newton's method finds the root of the estimate. Then points on both sides of the root are tested, as far from it as
    the difference between bound and estimate requires.
    """

    def advance(s: _Search) -> _Search:
        x = s.point
        here = evaluate(x)
        high = xp.where(here.upper <= target, xp.minimum(s.high, x), s.high)
        low = xp.where(here.lower >= target, xp.maximum(s.low, x), s.low)
        residual = here.estimate - target
        left = xp.where((residual > 0) & (x < high), xp.maximum(s.left, x), s.left)
        right = xp.where((residual <= 0) & (x > left), xp.minimum(s.right, x), s.right)
        steep = xp.abs(here.slope)
        newton = x + residual / steep
        # near the supremum of the loss delta falls to 0 linearly: Newton step for delta instead of log delta
        linear = -xp.expm1(-xp.clip(residual, -30.0, 700.0)) / steep
        linear = x + (xp.log1p(linear) if anywhere else linear)
        nearest = xp.maximum(left, 0.0)
        # bisect where the last Newton step did not halve the residual
        quick = (xp.abs(residual) < xp.inf) & ((xp.abs(residual) < 0.5 * s.before) | (xp.abs(residual) <= _NEWTON))
        usable = [quick & (guess >= nearest) & (guess <= right) for guess in (newton, linear)]
        middle = 0.5 * (nearest + right)
        if anywhere:
            middle = xp.fmax(middle, xp.where(residual > 0, xp.minimum(linear, x + 0.9 * (right - x)), 0.0))
        root = xp.where(usable[0], newton, xp.where(usable[1], linear, middle))
        rough = ~usable[0] | (xp.abs(residual) > _NEWTON)
        curved = residual * residual / steep + 1e-14 * root
        distances = 1.1 * (here.upper - here.estimate) / steep, 1.1 * (here.estimate - here.lower) / steep
        # Where a bound proves nothing near the root, its error is unknown: try smaller and smaller shares of the root.
        known = [(distance >= 0) & (distance < root) for distance in distances]
        guessed = 0.3 * root * 0.25 ** (s.tests % 8)
        enough_above = known[0] & (high - root <= 2 * distances[0] + close * root)
        enough_below = known[1] & (root - low <= 2 * distances[1] + close * root)
        above, below = (xp.where(k, d, guessed) + curved for k, d in zip(known, distances, strict=True))
        widening = 2.0 ** xp.maximum(s.tests - 4, 0)  # after four tests, each test is twice as far from the root
        outward = xp.where(enough_above, xp.maximum(root - widening * below, 0.5 * root), root + widening * above)
        next_point = xp.minimum(xp.where(rough, root, outward), 0.5 * (root + end))
        # where the root may be below 0, the point 0 is tested, once
        next_point = xp.where((newton <= 0) & (left < 0), 0.0, next_point)
        lost = xp.isnan(here.estimate)
        done = (~rough & enough_above & enough_below) | lost | (high <= 0) | (s.tries + 1 >= most_tries)
        before = xp.where(usable[0] | usable[1], xp.abs(residual), xp.inf)
        return _Search(next_point, low, high, left, right, root, done, s.tries + 1, s.tests + ~rough, before)

    zero = xp.zeros_like(end)
    top = end if ceiling is None else ceiling
    count = xp.zeros((), xp.int32)
    begun = _Search(start, zero, top, zero - 1, end, start, ~xp.asarray(wanted), count, count, zero + xp.inf)
    found = xp.while_loop(lambda s: ~s.done, advance, begun)
    return xp.minimum(found.low, found.high), found.high, found.root
