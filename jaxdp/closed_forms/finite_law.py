"""delta and epsilon of one run of a mechanism whose loss takes finitely many values: an all-positive sum."""

import jax

from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, of_delta, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp


def delta_bounds(
    loss: jax.Array, log_weight: jax.Array, blur: jax.Array, infinity: jax.Array, eps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) of infinity + sum w_i (1 - e^{eps - L_i})_+, eps finite.

    loss, log_weight: one axis, log_weight -inf where there is no atom; weights need not sum to 1. blur: what a loss and
    with it its log weight may be off by besides the rounding of numbers of their size. infinity: not less than it is,
    and more by rounding only.
    """
    live = log_weight > -xp.inf
    weight = xp.where(live, xp.exp(log_weight), 0.0)
    gap = xp.where(live, loss - eps, -1.0)
    share = -xp.expm1(-xp.maximum(gap, 0.0))
    total = xp.sum(weight * share)
    # a weight is off at the size of its exponent, a gap at that of its parts: an atom at eps may fall on either side
    heavier = 4 * ULP * xp.where(live, xp.abs(log_weight) + xp.abs(loss) + 8, 0.0) + 2 * blur
    moved = 2 * ULP * (xp.abs(loss) + xp.abs(eps)) + blur
    off = heavier * share + xp.where(gap > -moved, moved, 0.0)
    # XLA flushes subnormal numbers to zero: each term and its error are charged the smallest normal number
    error = xp.sum(weight * off) * (1 + 1e-9) + loss.shape[0] * (ULP * total + 2 * SMALLEST)
    # of first order: where an exponent is off by so much that a weight may have been lost, nothing is known
    unsure = xp.any(live & (heavier > 0.25) & (log_weight + heavier > -745.0))
    total, error = xp.where(unsure, 0.0, total), xp.where(unsure, 2.0, error)
    largest = xp.max(xp.where(live, loss + blur, -xp.inf))
    upper = xp.where(eps >= largest, infinity, (total + error + infinity) * (1 + 8 * ULP))
    sure = _at_least(infinity, loss.shape[0])
    trivial = -xp.expm1(xp.minimum(eps, 0.0))
    lower = xp.where(eps >= largest, sure, (total - error + sure) * (1 - 8 * ULP))
    lower = xp.maximum(lower, xp.maximum(trivial * (1 - 8 * ULP), sure))
    return xp.clip(lower, 0.0, 1.0), xp.clip(upper, xp.maximum(trivial * (1 + 8 * ULP), infinity), 1.0)


def _at_least(infinity: jax.Array, terms: int) -> jax.Array:
    return xp.where(infinity < 1e-307, 0.0, infinity * (1 - (4 * terms + 2048) * ULP))


def epsilon_bounds(
    loss: jax.Array, log_weight: jax.Array, blur: jax.Array, infinity: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 at delta in [0, 1], by Newton's method on `delta_bounds`."""
    law = loss, log_weight, blur, infinity
    largest = xp.maximum(xp.max(xp.where(log_weight > -xp.inf, loss + blur, 0.0)), 0.0)
    # next to the largest loss, where delta is lost in its rounding, nothing else is found
    near = xp.maximum(largest * (1 - 2e-14) - 8 * xp.max(xp.where(log_weight > -xp.inf, blur, 0.0)), 0.0)
    at_ends = xp.vmap(lambda eps: delta_bounds(*law, eps))(xp.stack([xp.zeros_like(largest), near]))
    nothing, all_but_last = at_ends[1][0] <= delta, at_ends[0][1] >= delta
    # at a smaller delta than the least number the largest loss is the upper bound
    target = xp.log(xp.maximum(delta, SMALLEST))

    def evaluate(eps: jax.Array) -> Evaluation:
        steep = xp.sum(xp.exp(xp.where(loss > eps, log_weight + xp.minimum(eps - loss, 0.0), -xp.inf)))
        return of_delta(*delta_bounds(*law, eps), steep)

    wanted = ~nothing & ~all_but_last
    lower, upper, _ = proved_ends(evaluate, target, 0.5 * largest, largest, wanted=wanted, close=1e-13, anywhere=True)
    lower = xp.where(all_but_last, near, lower)
    upper = xp.where(nothing, 0.0, xp.where(delta < SMALLEST, largest, upper))
    known = (delta >= 0) & (delta <= 1)
    never = delta < _at_least(infinity, loss.shape[0])
    lower = xp.where(known, xp.where(never, xp.inf, xp.where(delta < infinity, 0.0, lower)), 0.0)
    return lower, xp.where(known & ~(delta < infinity), upper, xp.inf)
