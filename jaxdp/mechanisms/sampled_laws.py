"""Laws of the loss of sampled mechanisms, from finite pairs of their bases; moments of the outcomes left out."""

import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.mechanisms.finite import FinitePair, Pair, Part, log_mass, with_losses
from jaxdp.numerics.exponential_sums import sum_in_blocks, sum_units
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_one_plus
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number


def mixture_log_ratio(w: Array, q: Number) -> Array:
    """log(1 - q + q e^w) with a small relative error also for small q; w = -inf is allowed.

    For q > 1/2 it is computed as w + log(q + (1 - q) e^-w), because 1 + q expm1(w) would cancel for w far below 0.
    """
    flip = q > 0.5
    x, rate = xp.where(flip, -w, w), xp.where(flip, 1 - q, q)
    large = x > 700  # below, e^x does not overflow, and its product with the rate keeps its digits
    middle = xp.where(large, 0.0, x)
    small_form = log_one_plus(rate * xp.expm1(middle)) - xp.where(flip, middle, 0.0)
    safe = xp.where(rate > 0, rate, 1.0)
    far = xp.log(safe) + xp.log1p((1 - rate) / safe * xp.exp(-xp.maximum(x, 700.0)))
    # the logarithm is far + x; with the roles swapped, x = -w cancels the w outside
    big_form = far + xp.where(large & (q <= 0.5), x, 0.0)
    return xp.where(rate > 0, xp.where(large, big_form, small_form), xp.where(flip, w, 0.0))


def _mixture_blur(w: Array, blur: Array, ratio: Array, q: Number) -> Array:
    """Bound of the error of `mixture_log_ratio`, if the error of w is at most `blur`; at q = 1 it is `blur` itself."""
    live, size = xp.isfinite(ratio), xp.where(xp.isfinite(ratio), xp.abs(ratio), 0.0)
    log_slope = xp.log(xp.where(q > 0, q, 1e-300)) + xp.where(live, w - ratio, -xp.inf)
    slope = xp.exp(xp.minimum(log_slope, 0.0))
    rounding = ULP * (24 * size + xp.where(q > 0.5, 8 * xp.minimum(xp.abs(w), 80.0), 0.0))
    return slope * blur + xp.where(q < 1, rounding, 0.0)


def sampled_part(pair: Pair, rate: Number, direction: str) -> Part:
    """The law of the loss of ((1-q) Q + q P, Q) ("forward"), of its swap ("reverse"), or of the pair of "replace".

    The last is the symmetric pair of Zhu, Dong, Wang 2022, Proposition 29, and needs a symmetric base pair. Its
    positive losses equal the forward pair's, its negative losses are their mirror image, the other mass has loss 0.
    """
    log_p, log_q, plain, blur, only_p, only_q = with_losses(pair)
    in_p, in_q = log_p > -xp.inf, log_q > -xp.inf
    base, none = xp.where(in_p & in_q, plain, -xp.inf), in_p & in_q & (xp.abs(plain) <= blur)
    unsure = xp.max(xp.where(none, blur, 0.0))  # ``none``: outcomes of loss 0, as far as rounding tells
    ratio = mixture_log_ratio(base, rate)
    live = in_q & (ratio > -xp.inf)
    loss = xp.where(live, ratio, 0.0)
    blur = xp.where(live, _mixture_blur(base, xp.where(in_p & in_q, blur, 0.0), ratio, rate), 0.0)
    under_q = xp.where(live, log_q, -xp.inf)
    # at rate 1 the masses at infinity are the base's; below, (1-q) Q + q P has mass on every outcome of Q
    infinity = xp.maximum(rate * only_p * xp.where(rate < 1, 1 + 4 * ULP, 1.0), SMALLEST)
    infinity = xp.where((rate > 0) & (only_p > 0), infinity, 0.0)
    only_q = xp.where(rate < 1, 0.0, only_q)
    if direction == "forward":
        return Part(loss, under_q + loss, blur, infinity, only_q)
    if direction == "reverse":
        return Part(-loss, under_q, blur, only_q, infinity)
    up, down = live & (base > 0) & ~none, in_p & in_q & (base < 0) & ~none
    same = sum_in_blocks(xp.where(none, xp.exp(log_q), 0.0))
    # By symmetry Q has as much mass above loss 0 as P has below; a larger difference is that of outcomes of loss 0
    # which rounding has put on one side.
    mismatch = sum_in_blocks(xp.where(up, xp.exp(log_q), 0.0)) - sum_in_blocks(xp.where(down, xp.exp(log_p), 0.0))
    total_variation = only_p + sum_in_blocks(xp.where(up, -xp.exp(log_p) * xp.expm1(-xp.where(up, base, 0.0)), 0.0))
    # the mass at loss 0: 1 minus the masses on both sides, by the symmetry of the base written without a subtraction
    rest = same + (1 - rate) * total_variation - xp.where(xp.abs(mismatch) > 1e-9, mismatch, 0.0)
    loss, under_q = xp.where(up, loss, 0.0), xp.where(up, under_q, -xp.inf)
    return Part(
        xp.concatenate([loss, -loss, xp.zeros(1)]),
        xp.concatenate([under_q + loss, under_q, log_mass(rest)[None]]),
        # The loss 0 is exact, but its mass is a sum in blocks, of terms that are off by 4 units of |log p| and 16 more:
        # on average at most 4 log(terms) + 16 units.
        xp.concatenate([blur, blur, xp.full(1, (sum_units(loss.shape[0]) + 80) * ULP) + 2 * unsure]),
        infinity,
        infinity,
    )


def log_sampled_tail(moment: Number, least_loss: Number, order: Number, rate: Number) -> Array:
    """Log of a bound of sum ((1-q) + q p/r)^order r over the outcomes in the tail; moment: log of the bound at q = 1.

    With y = p/r, (1 - q + q y)^order is at most 1 - q + q y^order. It is also at most y^order times the power of the
    largest quotient (1 - q + q y)/y, which is at the smallest y.
    """
    share = order * (mixture_log_ratio(xp.asarray(least_loss), rate) - least_loss) * (1 - 1e-12)
    tail = xp.logaddexp(moment + xp.minimum(share, log_mass(rate)) + 1e-9, np.log(SMALLEST))
    return xp.where(rate > 0, tail, -xp.inf)


def log_antipodal_tail(
    at_one: tuple[Number, Number], at_two: tuple[Number, Number], order: Number, rate: Number
) -> Array:
    """The bound of `log_sampled_tail` for the pair of `antipodal_part`, from tails of noise at distance 1 and 2.

    Two bounds: the second law is at least (1-q) M, and sum p^order r^(1-order) is jointly convex.
    """
    by_middle = log_sampled_tail(*at_one, order, rate) - (order - 1) * log_mass(1 - rate)
    return xp.minimum(by_middle, xp.logaddexp(at_two[0] + log_mass(rate), np.log(SMALLEST)))


def antipodal_part(pair: FinitePair, log_middle: Array, rate: Number, inner: Number | None) -> Part:
    """The law of the loss of ((1-q) M + q P, (1-q) M + q Q), symmetric; M is the noise's law halfway between P and Q.

    log_middle: log(dM/dQ) at each loss of the pair; dM/dQ is concave in e^loss. inner: 0 if the pair dominates the pair
    of the noise, positive if it is dominated by it, None if it is the pair of the noise; the result then dominates, is
    dominated or is exact. Proof: notebooks/proofs/sampled_replace.md, section 9.
    """
    shared = (pair.log_p > -xp.inf) & (pair.log_q > -xp.inf)
    log_p_over_m, log_q_over_m = (xp.where(shared, x, 0.0) for x in (pair.loss - log_middle, -log_middle))
    with_p, with_q = mixture_log_ratio(log_p_over_m, rate), mixture_log_ratio(log_q_over_m, rate)
    error = xp.where(shared, pair.blur + 2 * ULP * (xp.abs(pair.loss) + xp.abs(log_middle)), 0.0)
    blur = error + _mixture_blur(log_p_over_m, error, with_p, rate) + _mixture_blur(log_q_over_m, error, with_q, rate)
    log_m = xp.where(shared, pair.log_q + log_middle, -xp.inf)
    infinity = xp.where((rate > 0) & (pair.only_p > 0), xp.maximum(rate * pair.only_p * (1 + 4 * ULP), SMALLEST), 0.0)
    log_weight, rest = log_m + with_p, xp.zeros(())
    if inner is not None:
        total, rounded = xp.sum(xp.exp(log_m)), 4 * ULP * (log_m.shape[0] + 16)
        rest = xp.where(inner > 0, 0.0, (1 - rate) * (xp.maximum(1 - total, 0.0) + rounded))
        log_weight = log_weight - xp.where(inner > 0, xp.log1p(xp.maximum(total - 1, 0.0) + rounded), 0.0)
    nothing = xp.zeros(1)
    return Part(
        xp.concatenate([xp.where(shared, with_p - with_q, 0.0), nothing]),
        xp.concatenate([log_weight, log_mass(rest)[None]]),
        xp.concatenate([blur, nothing]),
        infinity,
        infinity,
    )
