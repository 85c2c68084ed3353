"""Bounds of delta and epsilon of one run of a mechanism with finitely many privacy losses: sums of positive terms."""

import jax

from jaxdp.domains import SMALLEST
from jaxdp.numerics.roots import Evaluation, of_delta, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp


def delta_bounds(
    loss: jax.Array, log_weight: jax.Array, blur: jax.Array, infinity: jax.Array, eps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta = infinity + sum_i w_i (1 - e^{eps - L_i})_+ at a finite eps.

    loss, log_weight: L_i and log w_i along one axis; log w_i = -inf means no atom. The weights need not sum to 1.
    blur: bound of the error of each loss, and of its log weight, beyond the rounding of numbers of their size.
    infinity: mass at infinite loss. It may exceed the exact mass by rounding only, and must not be below it.
    """
    live = log_weight > -xp.inf
    weight = xp.where(live, xp.exp(log_weight), 0.0)
    gap = xp.where(live, loss - eps, -1.0)
    share = -xp.expm1(-xp.maximum(gap, 0.0))
    total = xp.sum(weight * share)
    # Relative error of a weight, absolute error of a gap. An atom within gap_error of eps may lie on either side of it.
    weight_error = 4 * ULP * xp.where(live, xp.abs(log_weight) + xp.abs(loss) + 8, 0.0) + 2 * blur
    gap_error = 2 * ULP * (xp.abs(loss) + xp.abs(eps)) + blur
    term_error = weight_error * share + xp.where(gap > -gap_error, gap_error, 0.0)
    # XLA flushes subnormal numbers to zero: each term and its error are charged the smallest normal number.
    error = xp.sum(weight * term_error) * (1 + 1e-9) + loss.shape[0] * (ULP * total + 2 * SMALLEST)
    # The errors are of first order: if a weight that may be positive has an error above 0.25, delta is only in [0, 1].
    unsure = xp.any(live & (weight_error > 0.25) & (log_weight + weight_error > -745.0))
    total, error = xp.where(unsure, 0.0, total), xp.where(unsure, 2.0, error)
    largest = xp.max(xp.where(live, loss + blur, -xp.inf))
    upper = xp.where(eps >= largest, infinity, (total + error + infinity) * (1 + 8 * ULP))
    infinity_lower = _at_least(infinity, loss.shape[0])
    trivial = -xp.expm1(xp.minimum(eps, 0.0))
    lower = xp.where(eps >= largest, infinity_lower, (total - error + infinity_lower) * (1 - 8 * ULP))
    lower = xp.maximum(lower, xp.maximum(trivial * (1 - 8 * ULP), infinity_lower))
    return xp.clip(lower, 0.0, 1.0), xp.clip(upper, xp.maximum(trivial * (1 + 8 * ULP), infinity), 1.0)


def _at_least(infinity: jax.Array, terms: int) -> jax.Array:
    """Lower bound of the exact mass at infinity, whose computed value was rounded up in about ``terms`` operations."""
    return xp.where(infinity < 1e-307, 0.0, infinity * (1 - (4 * terms + 2048) * ULP))


def epsilon_bounds(
    loss: jax.Array, log_weight: jax.Array, blur: jax.Array, infinity: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 at delta in [0, 1], by Newton's method on `delta_bounds`."""
    law = loss, log_weight, blur, infinity
    largest = xp.maximum(xp.max(xp.where(log_weight > -xp.inf, loss + blur, 0.0)), 0.0)
    # Between `near` and the largest loss delta is below its rounding error: a search cannot separate points there.
    near = xp.maximum(largest * (1 - 2e-14) - 8 * xp.max(xp.where(log_weight > -xp.inf, blur, 0.0)), 0.0)
    at_ends = xp.vmap(lambda eps: delta_bounds(*law, eps))(xp.stack([xp.zeros_like(largest), near]))
    is_zero, at_largest = at_ends[1][0] <= delta, at_ends[0][1] >= delta
    # For delta below the smallest normal number the upper bound is the largest loss (see below).
    target = xp.log(xp.maximum(delta, SMALLEST))

    def evaluate(eps: jax.Array) -> Evaluation:
        steepness = xp.sum(xp.exp(xp.where(loss > eps, log_weight + xp.minimum(eps - loss, 0.0), -xp.inf)))
        return of_delta(*delta_bounds(*law, eps), steepness)

    wanted = ~is_zero & ~at_largest
    lower, upper, _ = proved_ends(evaluate, target, 0.5 * largest, largest, wanted=wanted, close=1e-13, anywhere=True)
    lower = xp.where(at_largest, near, lower)
    upper = xp.where(is_zero, 0.0, xp.where(delta < SMALLEST, largest, upper))
    known = (delta >= 0) & (delta <= 1)
    infinite = delta < _at_least(infinity, loss.shape[0])
    lower = xp.where(known, xp.where(infinite, xp.inf, xp.where(delta < infinity, 0.0, lower)), 0.0)
    return lower, xp.where(known & ~(delta < infinity), upper, xp.inf)
