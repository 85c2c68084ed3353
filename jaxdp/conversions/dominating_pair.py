"""Finite pairs that dominate, and compose: from an upper bound of the privacy profile, and from masses on a grid.

H(a) = delta(log a) is convex. The largest convex minorant of points (a_i, delta_i) above H is still above H; it is
piecewise linear, and is the profile of a finite pair: the ratio dP/dQ takes the values a_i, with Q-masses the changes
of slope (Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25). The step to the minorant is needed: composing a bound that is
not convex can under-estimate.

Grid: cut the outcomes into cells on which the loss lies between two known values. Merging the outcomes of each cell is
post-processing: the merged pair is dominated by the true one. Splitting the mass of each cell between the two ends of
its loss range, with the same P and Q masses, gives a pair that dominates, since a convex function lies below its chord.
Both hold at every a >= 0, so both pairs compose. The gap is of second order in the cell width. It takes the place of
Algorithm 2 of Zhu, Dong, Wang 2022, whose Theorem 43 bounds the error of another rounding.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxdp import validate
from jaxdp.domains import SMALLEST
from jaxdp.mechanisms.basic import DiscretePair
from jaxdp.numerics.rounding import ULP
from jaxdp.typing import Array, Real

# Relative margin for the logarithms that DiscretePair takes of the masses; the pair itself is exact without it.
_MARGIN = 1e-12
# Absolute charge for the rounding of the masses, for the swapped pair.
_SUM_ERROR = 1e-15
# Largest epsilon: e^eps, its reciprocal and their square roots are far inside the range of doubles.
_LARGEST = 700.0


def pair_from_profile(epsilons: Real, deltas: Real, *, symmetric: bool = True) -> DiscretePair:
    """A finite pair that dominates every mechanism whose profile lies below the given points.

    epsilons: in nats, finite, distinct, one axis, any order. With symmetric=False give negative ones too: for a < 1
        nothing else is known but the chord to H(0) = 1.
    deltas: certified upper bounds of delta at them, in [0, 1], same length. The smallest one becomes mass at infinity:
        extend the grid until it is negligible, or end it with a delta of 0 where that is true.
    symmetric: True if the bounds hold for both orders of every neighbouring pair (replace_one, or the larger of add and
        remove). The bound at a < 1 then follows from the swap identity H(a) = 1 - a + a H(1/a).

    >>> pair = jaxdp.conversions.pair_from_profile([0.0, 0.5, 1.0], [0.3, 0.1, 0.0])
    >>> print(f"{jaxdp.delta(pair, 0.5):.4f}")
    0.1000

    Returns a DiscretePair with two more outcomes than points (images under the swap included), which composes as any
    mechanism. Between the points its profile is the chord in e^eps, which exceeds a smooth profile by the square of the
    spacing. It dominates on any grid, in both orders; rounding moves each loss outward by 1e-15, which loosens the
    bound by about 1e-15 / loss, or 1e-15 / spacing near a kink. Raises ValueError, also for a delta below 1 - e^eps,
    which no mechanism has.
    Reference: Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25.
    """
    ratio, excess = _points(epsilons, deltas, symmetric)
    keep, corners = _hull(ratio, excess)
    # slopes of the minorant, flat after the last point; Q(dP/dQ = a_j) is the change of slope at a_j
    slopes = [Fraction(v1 - v0, a1 - a0) for (a0, v0), (a1, v1) in pairwise(corners)]
    masses = [after - before for before, after in pairwise([*slopes, Fraction(0)])]
    p, q = np.zeros(ratio.size), np.zeros(ratio.size)
    # P rounded up and Q rounded down: each (p - a q)_+ can only grow
    q[keep] = [_rounded(m, up=False) for m in masses]
    p[keep] = [_rounded(Fraction(ratio[i]) * m, up=True) for i, m in zip(keep, masses, strict=True)]
    one = corners[0][1]
    infinity = min(1.0, _rounded(Fraction(corners[-1][1], one), up=True))
    nothing = float(1 - sum(masses)) + _SUM_ERROR
    return DiscretePair(np.concatenate([p, [infinity, 0.0]]), np.concatenate([q, [0.0, nothing]]))


def _rounded(value: Fraction, *, up: bool) -> float:
    """The nearest double on the given side of a number >= 0; with up=True not subnormal, which XLA would take for 0."""
    near = float(value)
    if up:
        near = float(np.nextafter(near, np.inf)) if near < value else near
        return max(near, SMALLEST) if value > 0 else 0.0
    return float(np.nextafter(near, 0.0)) if near > value else near


def _points(epsilons: Real, deltas: Real, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Increasing ratios a_i, and H(a_i) - (1 - a_i)_+ >= 0 at them, with the margin added."""
    eps, delta = validate.real_array("epsilons", epsilons), validate.probability("deltas", deltas)
    validate.equal_lists(epsilons=eps, deltas=delta)
    validate.reject("epsilons", eps, ~(np.abs(eps) < _LARGEST), f"between -{_LARGEST} and {_LARGEST}")
    order = np.argsort(eps)
    eps, delta = eps[order], delta[order]
    validate.reject("epsilons", eps[1:], np.diff(eps) <= 0, "distinct")
    least = np.maximum(-np.expm1(eps), 0.0)
    validate.reject("deltas", delta, delta < least * (1 - 1e-9), "at least 1 - e^epsilon")
    excess = np.maximum(delta - least, 0.0) * (1 + _MARGIN) + 8 * ULP * least
    if symmetric:
        eps, excess = _mirrored(eps, excess)
    # The ratio is rounded away from 1. The excess remains a bound there: H decreases and H + a increases.
    ratio = np.exp(eps) * (1 + 8 * ULP * np.sign(eps))
    excess = np.minimum(excess, np.minimum(1.0, ratio))
    order = np.lexsort((-excess, ratio))
    return ratio[order], excess[order]


def _mirrored(eps: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points and their images under the swap: H - (1-a)_+ at 1/a is its value at a, divided by a."""
    unique, where = np.unique(np.concatenate([eps, -eps]), return_inverse=True)
    smallest = np.full(unique.size, np.inf)
    # a positive product may underflow
    image = excess * np.exp(-eps) * (1 + 8 * ULP) + np.where(excess > 0, SMALLEST, 0.0)
    np.minimum.at(smallest, where, np.concatenate([excess, image]))
    return unique, smallest


def _hull(ratio: np.ndarray, excess: np.ndarray) -> tuple[list[int], list[tuple[int, int]]]:
    """The largest convex decreasing minorant of the points that starts at H(0) = 1, in exact integers.

    Rounded slopes are wrong by ulp / (difference of the ratios), without a limit on fine grids.

    Returns (indices of its corners, (a, H) at (0, 1) and at these corners in units of a common power of 2).
    """
    parts = [float(x).as_integer_ratio() for x in (*ratio, *excess)]
    one = max(denominator for _, denominator in parts)
    whole = [numerator * (one // denominator) for numerator, denominator in parts]
    points = [(a, e + max(one - a, 0)) for a, e in zip(whole[: ratio.size], whole[ratio.size :], strict=True)]
    values = [value for _, value in points]
    kept, corners = [-1], [(0, one)]
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
    """Renyi divergence R_a that no mechanism exceeds whose profile lies below the given points.

    orders: a > 0, a != 1, any shape.
    epsilons, deltas, symmetric: as for `pair_from_profile`.

    >>> print(f"{jaxdp.conversions.renyi_from_profile(2.0, [0.0, 0.5, 1.0], [0.3, 0.1, 0.0]):.4f}")
    0.4206

    Returns an upper bound in nats, orders' shape, float64; inf for a > 1 unless the last delta is 0. Raises ValueError.
    Reference: Zhu, Dong, Wang 2022, Lemma 23, for the pair of `pair_from_profile`.
    """
    a = validate.positive("orders", orders)
    validate.reject("orders", a, a == 1, "> 0 and not 1")
    pair = pair_from_profile(epsilons, deltas, symmetric=symmetric)
    both, alone = (pair.p > 0) & (pair.q > 0), (pair.p > 0) & (pair.q == 0)
    if not both.any():
        return np.full(a.shape, np.inf)[()]
    log_q = np.log(pair.q[both])
    exponents = log_q + a[..., None] * (np.log(pair.p[both]) - log_q)
    top = exponents.max(-1)
    log_moment = top + np.log(np.exp(exponents - top[..., None]).sum(-1))
    rounding = 1e-14 * (1 + np.abs(log_moment) + np.abs(exponents).max(-1))
    finite = np.maximum((log_moment + np.sign(a - 1) * rounding) / (a - 1), 0.0)
    return np.where((a > 1) & alone.any(), np.inf, finite)[()]


def pair_from_tradeoff(false_positive_rate: Real, false_negative_rate: Real) -> DiscretePair:
    """The finite pair whose trade-off function T(Q, P) is the polygon through the given points.

    q_i are the steps of x, p_i those of 1 - f, and 1 - f(0) is mass at infinity. Its `log_mgf(1j t)` is
    log int |f'|^{1+it} dx, the logarithm of the characteristic function of the loss. The polygon through values of a
    convex f lies ABOVE f: the pair is post-processing of the true one, and gives lower bounds of delta. For a
    dominating pair use `delta_from_tradeoff` and `pair_from_profile`.

    false_positive_rate: increasing from 0 to 1, one axis.
    false_negative_rate: decreasing to 0 and convex at these points, same length.

    >>> pair = jaxdp.conversions.pair_from_tradeoff([0.0, 0.5, 1.0], [1.0, 0.2, 0.0])
    >>> print(pair.p, pair.q)
    [0.8 0.2 0. ] [0.5 0.5 0. ]

    Returns a DiscretePair with one outcome a step, and one for mass at infinity. Raises ValueError, also for points
    that are not decreasing and convex.
    """
    x = validate.probability("false_positive_rate", false_positive_rate)
    y = validate.probability("false_negative_rate", false_negative_rate)
    if x.ndim != 1 or x.shape != y.shape or x.size < 2 or x[0] != 0 or x[-1] != 1 or y[-1] != 0:
        raise ValueError("the points must go from false_positive_rate 0 to 1, where false_negative_rate is 0.")
    validate.reject("false_positive_rate", x[1:], ~(np.diff(x) > 0), "increasing")
    steps = -np.diff(y)
    slopes = steps / np.diff(x)
    convex = (steps[1:] >= 0) & (slopes[1:] <= slopes[:-1] * (1 + 1e-9))
    validate.reject("false_negative_rate", y[2:], ~convex, "decreasing and convex")
    return DiscretePair(np.concatenate([steps, [1 - y[0]]]), np.concatenate([np.diff(x), [0.0]]))


# Relative distance by which the edge ratios of a cell are moved apart: the rounded masses stay between them.
_WIDEN = 1e-12


class GridPairs(NamedTuple):
    """Two finite pairs around a true one.

    lower: a pair that the true one dominates: its delta is a lower bound.
    upper: a pair that dominates the true one: its delta is an upper bound.

    >>> pairs = jaxdp.conversions.grid_pairs([0.3, 0.7], [0.7, 0.3], [-1.0, 0.0, 1.0])
    >>> print(pairs.lower.p, pairs.upper.p.round(3))
    [0.3 0.7] [0.233 0.067 0.067 0.633]
    """

    lower: DiscretePair
    upper: DiscretePair


def grid_pairs(p_mass: Real, q_mass: Real, edge_losses: Real) -> GridPairs:
    """A dominated and a dominating finite pair, from the masses of cells of known loss range.

    p_mass: P(cell_i), one axis of n cells that cover all outcomes.
    q_mass: Q(cell_i), same length.
    edge_losses: n + 1 increasing values in nats; the loss on cell i lies in [edge_i, edge_{i+1}]. The first may be
        -inf; the last may be inf, which makes part of the last cell mass at infinity.

    >>> pairs = jaxdp.conversions.grid_pairs([0.3, 0.7], [0.7, 0.3], [-1.0, 0.0, 1.0])
    >>> print(f"{jaxdp.delta(pairs.lower, 0.5):.4f} {jaxdp.delta(pairs.upper, 0.5):.4f}")
    0.2054 0.2490

    Returns GridPairs(lower, upper) of DiscretePair. The masses are used as given; their relative error should be small
    against the width of a cell. Raises ValueError, also for shapes other than (n,), (n,), (n + 1,), a cell whose mass
    ratio lies outside its loss range by more than rounding.
    """
    p, q = validate.nonnegative("p_mass", p_mass), validate.nonnegative("q_mass", q_mass)
    edges = validate.real_array("edge_losses", edge_losses)
    if p.ndim != 1 or p.shape != q.shape or edges.shape != (p.size + 1,):
        shapes = f"{p.shape}, {q.shape}, {edges.shape}"
        raise ValueError(f"p_mass, q_mass and edge_losses must have shapes (n,), (n,), (n + 1,), got {shapes}.")
    validate.reject("edge_losses", edges[1:], ~(np.diff(edges) > 0), "increasing")
    low, high = np.exp(edges[:-1]) * (1 - _WIDEN), np.exp(edges[1:]) * (1 + _WIDEN)
    inside = (p >= low * q * (1 - 1e-9)) & ((p <= high * q * (1 + 1e-9)) | np.isinf(high))
    validate.reject("p_mass", p, ~inside, "between the cell's edge ratios times q_mass")
    return GridPairs(DiscretePair(p, q), _spread(p, q, low, high))


def _spread(p: np.ndarray, q: np.ndarray, low: np.ndarray, high: np.ndarray) -> DiscretePair:
    """The pair in which each cell is split into two outcomes of ratio low and high, with its P and Q masses."""
    infinite = np.isinf(high)
    top = np.where(infinite, 1.0, high)
    bottom = np.where(infinite, 0.0, low)
    q_high = np.where(infinite, 0.0, np.clip((p - bottom * q) / (top - bottom), 0.0, q))
    p_high = np.where(infinite, np.maximum(p - low * q, 0.0), top * q_high)
    return DiscretePair(np.concatenate([p - p_high, p_high]).clip(0.0), np.concatenate([q - q_high, q_high]))
