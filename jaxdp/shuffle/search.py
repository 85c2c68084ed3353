"""Epsilon from certified bounds of log delta: every end that is returned was itself evaluated.

Why that suffices: notebooks/proofs/shuffle.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdp.runtime.arrays import xp

_MOST_TRIES = 40
_NEWTON = 0.05  # residuals of log delta above it are Newton's business, below it the ends are tested
_CLOSE = 1e-9  # ends closer than this (relative) to the root of the estimate are not improved


class Evaluation(NamedTuple):
    """Certified bounds of log delta at one epsilon, an estimate between them, and the estimate's slope in epsilon."""

    upper: Any
    lower: Any
    estimate: Any
    slope: Any


class _State(NamedTuple):
    epsilon: Any
    low: Any  # the largest epsilon with lower >= target
    high: Any  # the smallest epsilon with upper <= target
    left: Any  # the estimate's root lies between left and right; -1 before 0 was looked at
    right: Any
    done: Any
    tries: Any


def epsilon_bounds(
    evaluate: Callable[[Any], Evaluation], log_delta: Any, start: Any, cap: Any, wanted: Any
) -> tuple[Any, Any]:
    """(low, high): epsilons in [0, cap] tested to have lower >= log_delta and upper <= log_delta; 0 and cap if none.

    log_delta: the target. start: a first guess in (0, cap). wanted: False where no search is to be made.
    """

    def advance(s: _State) -> _State:
        seen = evaluate(s.epsilon)
        high = xp.where(seen.upper <= log_delta, xp.minimum(s.high, s.epsilon), s.high)
        low = xp.where(seen.lower >= log_delta, xp.maximum(s.low, s.epsilon), s.low)
        residual = seen.estimate - log_delta
        left = xp.where(residual > 0, xp.maximum(s.left, s.epsilon), s.left)
        right = xp.where(residual <= 0, xp.minimum(s.right, s.epsilon), s.right)
        steep = xp.abs(seen.slope)
        newton = s.epsilon + residual / steep
        # next to the cap delta falls to 0 linearly: Newton on delta itself
        linear = s.epsilon - xp.expm1(-xp.clip(residual, -30.0, 700.0)) / steep
        usable = [(x >= xp.maximum(left, 0.0)) & (x <= right) for x in (newton, linear)]
        root = xp.where(usable[0], newton, xp.where(usable[1], linear, 0.5 * (xp.maximum(left, 0.0) + right)))
        # a failed test is followed by a wider one
        grown = 2.0 ** xp.maximum(s.tries - 8, 0)
        curved = residual * residual / steep + 1e-14 * root
        above = 1.1 * (seen.upper - seen.estimate) / steep + curved
        below = 1.1 * (seen.estimate - seen.lower) / steep + curved
        enough_above = high - root <= 2 * above + _CLOSE * root
        enough_below = root - low <= 2 * below + _CLOSE * root
        rough = ~usable[0] | (xp.abs(residual) > _NEWTON)
        following = xp.where(
            rough,
            root,
            xp.where(enough_above, xp.maximum(root - grown * below, 0.5 * root), root + grown * above),
        )
        following = xp.minimum(following, 0.5 * (root + cap))
        lost = ~(xp.abs(seen.estimate) < xp.inf) | ~(seen.upper < xp.inf)
        # where delta(0) may be below the target: 0 itself, once
        following = xp.where((newton <= 0) & (left < 0), 0.0, following)
        settled = ~rough & enough_above & enough_below
        done = settled | lost | (high <= 0) | (s.tries >= _MOST_TRIES)
        return _State(following, low, high, left, right, done, s.tries + 1)

    zero = xp.zeros_like(cap)
    state = _State(start, zero, cap, zero - 1, cap, ~wanted, xp.zeros((), xp.int32))
    end = xp.while_loop(lambda s: ~s.done, advance, state)
    return xp.minimum(end.low, end.high), end.high
