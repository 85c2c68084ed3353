"""Laws of the loss of sampled mechanisms, from finite pairs of their bases, and moments of what those leave out."""

import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.mechanisms.finite import FinitePair, Pair, Part, log_mass, with_losses
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_one_plus
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number


def mixture_log_ratio(w: Array, q: Number) -> Array:
    """log(1 - q + q e^w), accurate relative to itself for small q; w = -inf allowed.

    For q > 1/2 the roles are swapped, w + log(q + (1 - q) e^-w): next to w = -inf, 1 + q expm1(w) would cancel.
    """
    flip = q > 0.5
    x, rate = xp.where(flip, -w, w), xp.where(flip, 1 - q, q)
    large = x > 700  # below, e^x is a double, and what it is times q keeps its digits
    middle = xp.where(large, 0.0, x)
    small_form = log_one_plus(rate * xp.expm1(middle)) - xp.where(flip, middle, 0.0)
    safe = xp.where(rate > 0, rate, 1.0)
    far = xp.log(safe) + xp.log1p((1 - rate) / safe * xp.exp(-xp.maximum(x, 700.0)))
    # log A(x) is far + x: under a flip that x goes with the w outside
    big_form = far + xp.where(large & (q <= 0.5), x, 0.0)
    return xp.where(rate > 0, xp.where(large, big_form, small_form), xp.where(flip, w, 0.0))


def _mixture_blur(w: Array, blur: Array, ratio: Array, q: Number) -> Array:
    """Bound of the error of `mixture_log_ratio` where w is off by at most `blur`; at q = 1 it is `blur` itself."""
    live, size = xp.isfinite(ratio), xp.where(xp.isfinite(ratio), xp.abs(ratio), 0.0)
    room = xp.log(xp.where(q > 0, q, 1e-300)) + xp.where(live, w - ratio, -xp.inf)
    share = xp.exp(xp.minimum(room, 0.0))
    own = ULP * (24 * size + xp.where(q > 0.5, 8 * xp.minimum(xp.abs(w), 80.0), 0.0))
    return share * blur + xp.where(q < 1, own, 0.0)


def sampled_part(pair: Pair, rate: Number, direction: str) -> Part:
    """The pair ((1-q) Q + q P, Q) ("forward"), its swap ("reverse"), or the symmetric pair of Proposition 29.

    The last ("replace") asks for a symmetric base pair: its positive losses are those of the forward pair, the
    negative ones their mirror image, and the remaining mass has loss 0.
    """
    log_p, log_q, plain, blur, only_p, only_q = with_losses(pair)
    in_p, in_q = log_p > -xp.inf, log_q > -xp.inf
    base = xp.where(in_p & in_q, plain, -xp.inf)
    ratio = mixture_log_ratio(base, rate)
    live = in_q & (ratio > -xp.inf)
    loss = xp.where(live, ratio, 0.0)
    blur = xp.where(live, _mixture_blur(base, xp.where(in_p & in_q, blur, 0.0), ratio, rate), 0.0)
    under_q = xp.where(live, log_q, -xp.inf)
    # with everyone sampled the masses are those of the base; what some rounds leave out, P has under Q's outcomes
    some_p = xp.maximum(rate * only_p * xp.where(rate < 1, 1 + 4 * ULP, 1.0), SMALLEST)
    some_p = xp.where((rate > 0) & (only_p > 0), some_p, 0.0)
    only_q = xp.where(rate < 1, 0.0, only_q)
    if direction == "forward":
        return Part(loss, under_q + loss, blur, some_p, only_q)
    if direction == "reverse":
        return Part(-loss, under_q, blur, only_q, some_p)
    up = live & (base > 0)
    same = xp.sum(xp.where(in_p & in_q & (base == 0), xp.exp(log_q), 0.0))
    total_variation = only_p + xp.sum(xp.where(up, -xp.exp(log_p) * xp.expm1(-xp.where(up, base, 0.0)), 0.0))
    # 1 less the two sides, without the subtraction; uses the symmetry of the base
    rest = xp.log(same + (1 - rate) * total_variation)
    loss, under_q = xp.where(up, loss, 0.0), xp.where(up, under_q, -xp.inf)
    return Part(
        xp.concatenate([loss, -loss, xp.zeros(1)]),
        xp.concatenate([under_q + loss, under_q, rest[None]]),
        # the last one's loss is exact, its mass is a sum
        xp.concatenate([blur, blur, xp.full(1, loss.shape[0] * ULP)]),
        some_p,
        some_p,
    )


def log_sampled_tail(moment: Number, least_loss: Number, order: Number, rate: Number) -> Array:
    """log of a bound of sum ((1-q) + q p/r)^order r over unlikely outcomes; moment: its logarithm at q = 1.

    With y = p/r, (1 - q + q y)^order is at most 1 - q + q y^order, and at most y^order times the power of the largest
    quotient (1 - q + q y)/y.
    """
    share = order * (mixture_log_ratio(xp.asarray(least_loss), rate) - least_loss) * (1 - 1e-12)
    tail = xp.logaddexp(moment + xp.minimum(share, log_mass(rate)) + 1e-9, np.log(SMALLEST))
    return xp.where(rate > 0, tail, -xp.inf)


def log_antipodal_tail(
    at_one: tuple[Number, Number], at_two: tuple[Number, Number], order: Number, rate: Number
) -> Array:
    """The same of the pair of `antipodal_part`, from the noise at distance 1 and at distance 2.

    The second law is at least (1-q) M; and sum p^order r^(1-order) is jointly convex.
    """
    by_middle = log_sampled_tail(*at_one, order, rate) - (order - 1) * log_mass(1 - rate)
    return xp.minimum(by_middle, xp.logaddexp(at_two[0] + log_mass(rate), np.log(SMALLEST)))


def antipodal_part(pair: FinitePair, log_middle: Array, rate: Number, inner: Number | None) -> Part:
    """The pair ((1-q) M + q P, (1-q) M + q Q), symmetric: M is the law of the noise halfway between P and Q.

    log_middle: log of M over Q at each loss of the pair, concave in e^loss. inner: 0 where the pair dominates that of
    the noise, which the result then does; positive where it is dominated; None where it is that of the noise.
    Proof: notebooks/proofs/sampled_replace.md, section 9.
    """
    there = (pair.log_p > -xp.inf) & (pair.log_q > -xp.inf)
    above, below = (xp.where(there, x, 0.0) for x in (pair.loss - log_middle, -log_middle))
    with_p, with_q = mixture_log_ratio(above, rate), mixture_log_ratio(below, rate)
    size = xp.where(there, pair.blur + 2 * ULP * (xp.abs(pair.loss) + xp.abs(log_middle)), 0.0)
    blur = size + _mixture_blur(above, size, with_p, rate) + _mixture_blur(below, size, with_q, rate)
    log_m = xp.where(there, pair.log_q + log_middle, -xp.inf)
    some = xp.where((rate > 0) & (pair.only_p > 0), xp.maximum(rate * pair.only_p * (1 + 4 * ULP), SMALLEST), 0.0)
    log_weight, rest = log_m + with_p, xp.zeros(())
    if inner is not None:
        total, rounded = xp.sum(xp.exp(log_m)), 4 * ULP * (log_m.shape[0] + 16)
        rest = xp.where(inner > 0, 0.0, (1 - rate) * (xp.maximum(1 - total, 0.0) + rounded))
        log_weight = log_weight - xp.where(inner > 0, xp.log1p(xp.maximum(total - 1, 0.0) + rounded), 0.0)
    nothing = xp.zeros(1)
    return Part(
        xp.concatenate([xp.where(there, with_p - with_q, 0.0), nothing]),
        xp.concatenate([log_weight, log_mass(rest)[None]]),
        xp.concatenate([blur, nothing]),
        some,
        some,
    )
