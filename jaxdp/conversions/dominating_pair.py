"""Finite dominating pairs, which may be composed: from bounds of a profile, a sampled round, or masses on a grid.

From a profile: H(a) = delta(log a) is convex. Given points (a_i, delta_i) above H, their largest convex minorant is
still above H. The minorant is piecewise linear, so it is the profile of a finite pair: the ratio dP/dQ takes the values
a_i, and the Q-mass at a_i is the change of slope there (Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25). The minorant
is needed: composing a bound that is not convex can give a delta below the true delta.

From a grid: cut the outcomes into cells on which the loss lies between two known values. Merging the outcomes of each
cell is post-processing, so the true pair dominates the merged pair. Splitting the P and Q masses of each cell between
the two ends of its loss range gives a dominating pair, because a convex function lies below its chord. Both statements
hold at every a >= 0, so both pairs may be composed. The gap is of second order in the cell width. This replaces
Algorithm 2 of Zhu, Dong, Wang 2022, whose Theorem 43 bounds the error of a different rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from jaxdp import validate
from jaxdp.domains import FINITE, PROBABILITY, SMALLEST
from jaxdp.mechanisms.basic import DiscretePair
from jaxdp.numerics.exponential_sums import discrete_log_m
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import on_host
from jaxdp.typing import Array, Real

# Relative increase of H(a) - (1 - a)_+. It covers the rounding of the logarithms that DiscretePair takes of the masses.
_MARGIN = 1e-12
# Absolute charge for rounding the Q-masses down: the lost Q-mass becomes mass at infinity of the swapped pair.
_SUM_ERROR = 1e-15
# Largest |epsilon|: e^eps and e^-eps are far inside the range of doubles.
_FAR = 700.0


def pair_from_profile(epsilons: Real, deltas: Real, *, symmetric: bool = True) -> DiscretePair:
    """A finite pair that dominates every mechanism whose profile lies below the given points.

    epsilons: in nats, finite, distinct, one axis, any order. With symmetric=False give negative epsilons too: without
        them the only bound at a = e^eps < 1 is the chord from the first point to H(0) = 1.
    deltas: certified upper bounds of delta at the epsilons, in [0, 1], same length. The smallest delta becomes mass at
        infinity: extend the grid until it is negligible, or end the grid with a delta of 0 where that is true.
    symmetric: True if the bounds hold for both orders of every neighbouring pair (replace_one, or the larger of add and
        remove). The bound at a < 1 then follows from the swap identity H(a) = 1 - a + a H(1/a).

    >>> pair = jaxdp.conversions.pair_from_profile([0.0, 0.5, 1.0], [0.3, 0.1, 0.0])
    >>> print(f"{jaxdp.delta(pair, 0.5):.4f}")
    0.1000

    Returns a DiscretePair. It composes like any mechanism, and dominates in both orders, whatever the grid. It has two
    or three more outcomes than points (with symmetric=True, the images at -eps count as points). Between the points its
    profile is the chord in e^eps, which exceeds a smooth profile by the order of the spacing squared. Rounding moves
    each loss outward by 1e-15, which loosens the bound by about 1e-15 / loss, or 1e-15 / spacing near a kink. Raises
    ValueError, also for a delta below 1 - e^eps. Reference: Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25.
    """
    ratio, excess = _points(epsilons, deltas, symmetric)
    keep, corners = _hull(ratio, excess)
    # Slopes of the minorant, which is constant after the last point. Q(dP/dQ = a_j) is the change of slope at a_j.
    slopes = [Fraction(v1 - v0, a1 - a0) for (a0, v0), (a1, v1) in pairwise(corners)]
    changes = [after - before for before, after in pairwise([*slopes, Fraction(0)])]
    # Verbs refuse subnormal masses, so these are raised. More P- and Q-mass at one ratio can only increase H.
    masses = [max(m, Fraction(SMALLEST)) if m > 0 else m for m in changes]
    p, q = np.zeros(ratio.size), np.zeros(ratio.size)
    # Round P up and Q down: each (p - a q)_+ can only grow.
    q[keep] = [_rounded(m, up=False) for m in masses]
    p[keep] = [_rounded(Fraction(ratio[i]) * m, up=True) for i, m in zip(keep, masses, strict=True)]
    unit = corners[0][1]
    infinity = min(1.0, _rounded(Fraction(corners[-1][1], unit), up=True))
    if not symmetric:
        q_only = float(1 - sum(changes)) + _SUM_ERROR
        return DiscretePair(np.concatenate([p, [infinity, 0.0]]), np.concatenate([q, [0.0, q_only]]))
    # The outcomes of positive loss and their exact mirror images (p and q swapped); the remaining mass has loss 0.
    p, q = p[ratio > 1], q[ratio > 1]
    middle = _rounded(max(1 - sum(map(Fraction, [infinity, *p, *q]), Fraction(0)), Fraction(0)), up=True)
    return DiscretePair(
        np.concatenate([p, q, [middle, infinity, 0.0]]), np.concatenate([q, p, [middle, 0.0, infinity]])
    )


def _rounded(value: Fraction, *, up: bool) -> float:
    """A number >= 0 rounded up or down to a double. With up=True never subnormal, because XLA treats that as 0."""
    near = float(value)
    if up:
        near = float(np.nextafter(near, np.inf)) if near < value else near
        return max(near, SMALLEST) if value > 0 else 0.0
    return float(np.nextafter(near, 0.0)) if near > value else near


def _points(epsilons: Real, deltas: Real, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Increasing ratios a_i = e^eps_i, and upper bounds of the excess H(a_i) - (1 - a_i)_+ >= 0, margin included."""
    eps, delta = validate.real_array("epsilons", epsilons), validate.probability("deltas", deltas)
    validate.equal_lists(epsilons=eps, deltas=delta)
    validate.reject("epsilons", eps, ~(np.abs(eps) < _FAR), f"between -{_FAR} and {_FAR}")
    repeated = np.ones(eps.shape, bool)
    repeated[np.unique(eps, return_index=True)[1]] = False
    validate.reject("epsilons", eps, repeated, "distinct")
    least = np.maximum(-np.expm1(eps), 0.0)
    bad = delta < least * (1 - 1e-9)
    validate.reject("deltas", delta, bad, "at least 1 - e^epsilon", f"There epsilon is {eps[np.argmax(bad)]}.")
    order = np.argsort(eps)
    # No profile grows. Bounds may, by rounding or for lack of accuracy; much growth is a list in the wrong order.
    grows = np.zeros(eps.shape, bool)
    grows[order[1:]] = np.diff(delta[order]) > 0.01 * delta[order[:-1]] + 1e-9
    remedy = "If they are bounds, take their running minimum."
    validate.reject("deltas", delta, grows, "nonincreasing in epsilon", remedy)
    eps, delta, least = eps[order], delta[order], least[order]
    excess = np.maximum(delta - least, 0.0) * (1 + _MARGIN) + 8 * ULP * least
    if symmetric:
        # Add the images at -eps. The excess H - (1-a)_+ at 1/a is the excess at a, divided by a. SMALLEST is added
        # because a positive product may underflow to 0.
        image = excess * np.exp(-eps) * (1 + 8 * ULP) + np.where(excess > 0, SMALLEST, 0.0)
        eps, position = np.unique(np.concatenate([eps, -eps]), return_inverse=True)
        both, excess = np.concatenate([excess, image]), np.full(eps.size, np.inf)
        np.minimum.at(excess, position, both)
    # Move the ratio away from 1. The excess remains an upper bound: above 1 it is H, which decreases in a; below 1 it
    # is H + a - 1, which increases in a.
    ratio = np.exp(eps) * (1 + 8 * ULP * np.sign(eps))
    excess = np.minimum(excess, np.minimum(1.0, ratio))
    order = np.lexsort((-excess, ratio))
    return ratio[order], excess[order]


def _hull(ratio: np.ndarray, excess: np.ndarray) -> tuple[list[int], list[tuple[int, int]]]:
    """The largest convex decreasing minorant of the points that starts at H(0) = 1, in exact integers.

    Rounded slopes would have an error of ULP / (difference of the ratios), which has no bound on fine grids.

    Returns (indices of the corners, [(0, 1), then (a, H) of each corner]). The numbers a and H are integers in units of
    a common power of 2.
    """
    parts = [float(x).as_integer_ratio() for x in (*ratio, *excess)]
    unit = max(denominator for _, denominator in parts)
    whole = [numerator * (unit // denominator) for numerator, denominator in parts]
    points = [(a, e + max(unit - a, 0)) for a, e in zip(whole[: ratio.size], whole[ratio.size :], strict=True)]
    values = [value for _, value in points]
    kept, corners = [-1], [(0, unit)]
    for i, (a, value) in enumerate(points[: values.index(min(values)) + 1]):
        while len(kept) > 1:
            (a0, v0), (a1, v1) = corners[-2:]
            if (value - v1) * (a1 - a0) > (v1 - v0) * (a - a1):
                break
            kept.pop()
            corners.pop()
        kept.append(i)
        corners.append((a, value))
    return kept[1:], corners


def renyi_from_profile(orders: Real, epsilons: Real, deltas: Real, *, symmetric: bool = True) -> Array:
    """Upper bound of the Renyi divergence R_a of every mechanism whose profile lies below the given points.

    orders: a > 0, a != 1, any shape.
    epsilons, deltas, symmetric: as for `pair_from_profile`.

    >>> print(f"{jaxdp.conversions.renyi_from_profile(2.0, [0.0, 0.5, 1.0], [0.3, 0.1, 0.0]):.4f}")
    0.4206

    Returns R_a in nats, shape of orders, float64, rounded up; inf for a > 1 unless the smallest delta is 0. Raises
    ValueError. Reference: Zhu, Dong, Wang 2022, Lemma 23, applied to the pair of `pair_from_profile`.
    """
    a = validate.positive("orders", orders)
    validate.reject("orders", a, a == 1, "> 0 and not 1")
    pair = pair_from_profile(epsilons, deltas, symmetric=symmetric)
    with on_host():
        part = pair.part("forward")
        log_moment, error = discrete_log_m(a - 1, *part[:3])
        value = np.maximum((log_moment + np.sign(a - 1) * (error + 4 * ULP * np.abs(log_moment))) / (a - 1), 0.0)
        most = np.maximum(pair.top_of(part), 0.0) if part.infinity == 0 else np.inf
    return np.where((a > 1) & (part.infinity > 0), np.inf, np.minimum(value * (1 + 4 * ULP), most))[()]


def pair_from_tradeoff(false_positive_rate: Real, false_negative_rate: Real) -> DiscretePair:
    """The finite pair whose trade-off function T(Q, P) is the polygon through the given points.

    From one point to the next, x grows by q_i and 1 - f grows by p_i; 1 - f(0) is mass at infinity. The pair's
    `log_mgf(1j t)` is log int |f'|^{1+it} dx, the logarithm of the characteristic function of the loss. The polygon
    through values of a convex f lies ABOVE f: the pair is post-processing of the true pair and gives lower bounds of
    delta. For a dominating pair use `delta_from_tradeoff` and `pair_from_profile`.

    false_positive_rate: increasing from 0 to 1, one axis.
    false_negative_rate: decreasing to 0 and convex at these points, same length.

    >>> pair = jaxdp.conversions.pair_from_tradeoff([0.0, 0.5, 1.0], [1.0, 0.2, 0.0])
    >>> print(pair.p, pair.q)
    [0.8 0.2 0. ] [0.5 0.5 0. ]

    Returns a DiscretePair with one outcome per step, and one for mass at infinity. Raises ValueError.
    """
    x = validate.probability("false_positive_rate", false_positive_rate)
    y = validate.probability("false_negative_rate", false_negative_rate)
    validate.equal_lists(false_positive_rate=x, false_negative_rate=y)
    if x[0] != 0 or x[-1] != 1 or y[-1] != 0:
        raise ValueError(
            "false_positive_rate must go from 0 to 1 and false_negative_rate end at 0, got "
            f"{x[0]} to {x[-1]} and the end {y[-1]}."
        )
    validate.reject("false_positive_rate", x[1:], ~(np.diff(x) > 0), "increasing", first=1)
    steps = -np.diff(y)
    slopes = steps / np.diff(x)
    convex = (steps[1:] >= 0) & (slopes[1:] <= slopes[:-1] * (1 + 1e-9))
    validate.reject("false_negative_rate", y[2:], ~convex, "decreasing and convex", first=2)
    return DiscretePair(np.concatenate([steps, [1 - y[0]]]), np.concatenate([np.diff(x), [0.0]]))


# Relative amount by which both ends of a cell's range of ratios p / q are moved outward, to cover rounded masses.
_WIDEN = 1e-12


class GridPairs(NamedTuple):
    """Two finite pairs around a true pair, which dominates `lower` and is dominated by `upper`.

    >>> pairs = jaxdp.conversions.grid_pairs([0.3, 0.7], [0.7, 0.3], [-1.0, 0.0, 1.0])
    >>> print(pairs.lower.p, pairs.upper.p.round(3))
    [0.3 0.7] [0.233 0.067 0.067 0.633]
    """

    lower: DiscretePair
    upper: DiscretePair


def grid_pairs(p_mass: Real, q_mass: Real, edge_losses: Real) -> GridPairs:
    """A dominated and a dominating finite pair, from the masses of cells whose range of losses is known.

    p_mass, q_mass: P(cell_i) and Q(cell_i), one axis of n cells that cover all outcomes.
    edge_losses: n + 1 increasing values in nats; the loss on cell i lies in [edge_i, edge_{i+1}]. The first may be
        -inf; the last may be inf, which makes part of the last cell mass at infinity.

    >>> pairs = jaxdp.conversions.grid_pairs([0.3, 0.7], [0.7, 0.3], [-1.0, 0.0, 1.0])
    >>> print(f"{jaxdp.delta(pairs.lower, 0.5):.4f} {jaxdp.delta(pairs.upper, 0.5):.4f}")
    0.2054 0.2490

    Returns GridPairs(lower, upper) of DiscretePair. The error of the masses is not charged: their relative error should
    be much smaller than the width of a cell. Raises ValueError, also where log(p_mass / q_mass) of a cell lies outside
    its loss range by more than rounding.
    """
    p, q = validate.nonnegative("p_mass", p_mass), validate.nonnegative("q_mass", q_mass)
    edges = validate.real_array("edge_losses", edge_losses)
    if p.ndim != 1 or p.shape != q.shape or edges.shape != (p.size + 1,):
        shapes = f"{p.shape}, {q.shape}, {edges.shape}"
        raise ValueError(f"p_mass, q_mass and edge_losses must have shapes (n,), (n,), (n + 1,), got {shapes}.")
    validate.reject("edge_losses", edges[1:], ~(np.diff(edges) > 0), "increasing", first=1)
    with np.errstate(over="ignore", invalid="ignore"):  # too large a ratio: infinite as an upper end, e^709 as a lower
        low, high = np.exp(np.minimum(edges[:-1], 709.0)) * (1 - _WIDEN), np.exp(edges[1:]) * (1 + _WIDEN)
        inside = (p >= low * q * (1 - 1e-9)) & ((p <= high * q * (1 + 1e-9)) | np.isinf(high))
    validate.reject("p_mass", p, ~inside, "between q_mass * exp(edge_loss) at the two edges of its cell")
    # each cell is split into two outcomes of ratio p / q = low and high; the cell's masses are kept
    infinite = np.isinf(high)
    top = np.where(infinite, 1.0, high)
    bottom = np.where(infinite, 0.0, low)
    q_high = np.where(infinite, 0.0, np.clip((p - bottom * q) / (top - bottom), 0.0, q))
    p_high = np.where(infinite, np.maximum(p - low * q, 0.0), top * q_high)
    upper = DiscretePair(np.concatenate([p - p_high, p_high]).clip(0.0), np.concatenate([q - q_high, q_high]))
    return GridPairs(DiscretePair(p, q), upper)


_RELATIONS = ("remove", "add", "replace_one")
Profile: TypeAlias = Callable[[np.ndarray], Real]


def sampled_delta(
    base_delta: Profile, epsilon: Real, sampling_probability: Real, relation: Literal["remove", "add", "replace_one"]
) -> Array:
    """Certified delta at epsilon of one sampled round; for "remove" it is q delta_base(log(1 + (e^eps - 1)/q)).

    base_delta: maps an array of real epsilons elementwise to certified upper bounds of the base mechanism's delta. The
        epsilons are negative for "remove" at eps < 0 and for "add" at eps > 0. For "remove" and "add" give the profile
        of the base pair (P1, P0), P1 with the record (it is swapped here for "add"); for "replace_one" a bound for both
        orders. The base profile is taken under add/remove for Poisson sampling with "remove" or "add", under
        replace_one for a fixed size. For Poisson sampling with "replace_one" give the largest of the base profiles
        under replace_one, add and remove, in both orders (advanced joint convexity).
    epsilon: in nats, real, finite.
    sampling_probability: q in [0, 1] (for a fixed size: batch size / size of the larger data set).
    relation: "remove", "add" or "replace_one".

    >>> pure = lambda eps: np.maximum((np.e - np.exp(eps)) / (1 + np.e), -np.expm1(np.minimum(eps, 0)))  # 1-DP
    >>> print(f"{jaxdp.conversions.sampled_delta(pure, 0.05, sampling_probability=0.1, relation='remove'):.4f}")
    0.0324

    Returns delta of the broadcast shape, float64, rounded up. For "remove" below eps = log(1 - q) it is 1 - e^eps.
    "add" uses 1 - base_delta(-eps), which loses its relative accuracy past eps = 30; there the result approaches the
    trivial bound 1 - (1-q) e^eps. The result is for a single round: to compose rounds use `sampled_pair`. Raises
    ValueError, also for a base_delta outside [0, 1].
    Reference: Zhu, Dong, Wang 2022, Theorem 11 and Proposition 29; Balle, Barthe, Gaboardi 2018.
    """
    validate.choice("relation", relation, _RELATIONS)
    eps = validate.inside("epsilon", epsilon, FINITE)
    q = validate.probability("sampling_probability", sampling_probability)
    eps, q = (np.broadcast_to(a, validate.broadcast(epsilon=eps, sampling_probability=q)) for a in (eps, q))
    # The swap identity gives delta of the swapped pair at eps from delta of the pair at -eps.
    flip = np.full(eps.shape, relation == "add") | ((relation == "replace_one") & (eps < 0))
    excess = _remove_excess(base_delta, np.where(flip, -eps, eps), q) * np.exp(np.where(flip, eps, 0.0).clip(max=_FAR))
    total = (excess - np.expm1(np.minimum(eps, 0.0))) * (1 + 8 * ULP)
    # A subnormal delta is raised to the smallest normal number, because XLA treats subnormal numbers as 0.
    return np.minimum(np.where(total > 0, np.maximum(total, SMALLEST), 0.0), 1.0)[()]


def _remove_excess(base_delta: Profile, eps: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Upper bound of the excess H_a((1-q) P0 + q P1, P0) - (1 - a)_+ at a = e^eps.

    Let u = a - (1 - q). Then H_a = q H_{u/q}(P1, P0) for u > 0 and H_a = 1 - a for u <= 0. The excess is at most u,
    which is returned where the rounding of 1 - a is larger than u ("add" multiplies the excess by 1/a).
    """
    at = np.clip(eps, -_FAR, _FAR)
    grown, a = np.expm1(at), np.exp(at)
    # The form of u with the smaller terms. In the second form 1 - q is exact for q >= 1/2, else its error is 2^-54.
    u = np.where(at > -0.69, grown + q, a - (1 - q))
    slack = 8 * ULP * (np.minimum(np.abs(grown), a) + np.abs(u)) + SMALLEST
    low, high = u - slack, u + slack
    live = (q > 0) & (low > 0)
    rate, at = np.where(live, q, 1.0), np.where(live, at, 0.0)
    log_u, log_q = np.log(np.where(live, low, 1.0)), np.log(rate)
    # inner = log(u / q), rounded down because delta decreases
    inner = log_u - log_q - 8 * ULP * (1 + np.abs(log_u) + np.abs(log_q))
    base = validate.probability("base_delta(epsilon)", base_delta(np.where(rate == 1, at, inner)))
    inside, least = np.where(base > 0, rate * base + SMALLEST, 0.0), -np.expm1(np.minimum(at, 0.0))
    excess = np.maximum(inside - least, 0.0) + 8 * ULP * (inside + least)
    # Where low <= 0 < high, rounding hides the sign of u: the bound is u rounded up.
    return np.where(q > 0, np.minimum(np.where(live, excess, np.inf), np.maximum(high, 0.0)), 0.0)


def sampled_pair(
    base_delta: Profile, epsilons: Real, sampling_probability: float, relation: Literal["remove", "add", "replace_one"]
) -> DiscretePair:
    """A finite pair that dominates one sampled round and may be composed; the bound `sampled_delta` may not.

    base_delta, relation: as for `sampled_delta`.
    epsilons: the losses of the pair in nats, one axis, finite. Their range and spacing determine the accuracy, see
        `pair_from_profile`. For "remove" and "add" give negative epsilons too; "replace_one" needs only eps >= 0.
    sampling_probability: q in [0, 1], one number.

    >>> pure = lambda eps: np.maximum((np.e - np.exp(eps)) / (1 + np.e), -np.expm1(np.minimum(eps, 0)))  # 1-DP
    >>> pair = jaxdp.conversions.sampled_pair(pure, np.linspace(-1, 1, 21), 0.1, "remove")
    >>> print(f"{jaxdp.delta(pair, 0.1):.4f}")
    0.0179

    Returns a DiscretePair, an upper bound in both orders. Raises ValueError.
    Reference: Zhu, Dong, Wang 2022, Corollary 31.
    """
    losses = validate.real_array("epsilons", epsilons)
    validate.one("sampling_probability", sampling_probability, PROBABILITY)
    deltas = sampled_delta(base_delta, losses, sampling_probability, relation)
    return pair_from_profile(epsilons, deltas, symmetric=relation == "replace_one")
