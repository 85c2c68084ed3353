"""From an upper bound on the privacy profile to a finite pair that dominates, and composes.

H(a) = delta(log a) is convex. Given points (a_i, delta_i) above it, the largest convex minorant of the points is
still above it, is piecewise linear, and is the profile of a finite pair: the ratio dP/dQ takes the values a_i, with
Q-masses the changes of slope (Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25). The minorant is needed: composing a
bound that is not convex can under-estimate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.mechanisms.basic import DiscretePair

# Outward: the slopes, the masses and the logarithms that the record takes of them lose a few hundred ulp at most
# on grids whose spacing is above 1e-3 (checked against exact rationals).
_MARGIN = 1e-12
# The sum of the stored masses is itself rounded.
_SUM_ERROR = 1e-15
# e^eps and its square root of headroom stay inside the range of doubles
_LARGEST = 700.0


def pair_from_profile(epsilons: Any, deltas: Any, *, symmetric: bool = True) -> DiscretePair:
    """A finite pair that dominates every mechanism whose profile lies below the given points.

    Args:
        epsilons: finite real numbers, distinct, one axis, any order. With symmetric=False give negative ones too: for
            a < 1 nothing else is known but the chord to H(0) = 1.
        deltas: certified upper bounds of delta at them, in [0, 1], same length. The smallest is charged as mass at
            infinity: let the grid reach far enough, or end with a delta of 0 where that is true.
        symmetric: True if the bounds hold for both orders of every neighbouring pair (replace_one, or the larger of
            add and remove). The bound at a < 1 is then continued by the swap identity H(a) = 1 - a + a H(1/a).

    Returns:
        DiscretePair, two outcomes more than points (images under the swap included): compose it as any mechanism.
        Between the points the profile is the chord in e^eps, which exceeds a smooth profile by the square of
        the spacing.

    Raises:
        ValueError: a delta below 1 - e^eps, which no mechanism has.

    Reference:
        Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25.

    """
    ratio, excess = _points(epsilons, deltas, symmetric)
    keep = _hull(ratio, excess)
    mass = _masses(ratio, excess, keep)
    last = keep[-1]
    infinity = min(1.0, excess[last] + max(1 - ratio[last], 0.0))
    p, q = np.zeros(ratio.size), np.zeros(ratio.size)
    q[keep], p[keep] = mass, ratio[keep] * mass
    # what rounding left out goes where it raises the profile
    p[np.argmax(p)] += max(0.0, 1 - infinity - p.sum()) + _SUM_ERROR
    nothing = max(0.0, 1 - q.sum()) + _SUM_ERROR
    return DiscretePair(np.concatenate([p, [infinity, 0.0]]), np.concatenate([q, [0.0, nothing]]))


def _points(epsilons: Any, deltas: Any, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ratios a_i, increasing, and the excess H(a_i) - (1 - a_i)_+ >= 0 with the margin added."""
    eps, delta = validate.real_array("epsilons", epsilons), validate.probability("deltas", deltas)
    if eps.ndim != 1 or eps.shape != delta.shape or eps.size == 0:
        raise ValueError(f"epsilons and deltas must be equally long lists, got {eps.shape} and {delta.shape}.")
    validate.reject("epsilons", eps, ~(np.abs(eps) < _LARGEST), f"between -{_LARGEST} and {_LARGEST}")
    order = np.argsort(eps)
    eps, delta = eps[order], delta[order]
    validate.reject("epsilons", eps[1:], np.diff(eps) <= 0, "distinct")
    floor = np.maximum(-np.expm1(eps), 0.0)
    validate.reject("deltas", delta, delta < floor * (1 - 1e-9), "at least 1 - e^epsilon")
    # for eps < 0 the difference is rounded at the size of 1
    excess = np.maximum(delta - floor, 0.0) * (1 + _MARGIN) + np.where(eps < 0, 4 * np.finfo(float).eps, 0.0)
    excess = np.minimum(excess, np.minimum(1.0, np.exp(eps)))
    if symmetric:
        eps, excess = _mirrored(eps, excess)
    return np.exp(eps), excess


def _mirrored(eps: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every point with its image under the swap: (H - (1-a)_+)(1/a) = (H - (1-a)_+)(a) / a."""
    unique, where = np.unique(np.concatenate([eps, -eps]), return_inverse=True)
    smallest = np.full(unique.size, np.inf)
    np.minimum.at(smallest, where, np.concatenate([excess, excess * np.exp(-eps)]))
    return unique, smallest


def _slope(ratio: np.ndarray, excess: np.ndarray, i: int, j: int, shifted: bool) -> float:
    """Slope between two points (i = -1: H(0) = 1) of H, or of H + a if shifted.

    Left of a = 1 the slope of H is -1 plus what matters, so that H + a keeps the digits; right of 1 H does.
    """
    a, base = (0.0, 0.0) if i < 0 else (ratio[i], excess[i])
    if shifted:
        kink = max(ratio[j], 1.0) - max(a, 1.0)
    else:
        kink = max(1 - ratio[j], 0.0) - max(1 - a, 0.0)
    return (excess[j] - base + kink) / (ratio[j] - a)


def _bend(ratio: np.ndarray, excess: np.ndarray, i: int, j: int, k: int) -> float:
    """Change of slope at point j on the way from i to k."""
    shifted = bool(ratio[j] <= 1)
    return _slope(ratio, excess, j, k, shifted) - _slope(ratio, excess, i, j, shifted)


def _hull(ratio: np.ndarray, excess: np.ndarray) -> list[int]:
    """Indices of the points on the largest convex decreasing minorant that starts at H(0) = 1."""
    value = excess + np.maximum(1 - ratio, 0.0)
    kept: list[int] = [-1]
    for i in range(int(np.argmin(value)) + 1):
        while len(kept) > 1 and _bend(ratio, excess, kept[-2], kept[-1], i) <= 0:
            kept.pop()
        kept.append(i)
    return kept[1:]


def _masses(ratio: np.ndarray, excess: np.ndarray, keep: list[int]) -> np.ndarray:
    """Q(dP/dQ = a_j) = the change of slope of the minorant at a_j; flat after the last point."""
    path = [-1, *keep]
    inner = [_bend(ratio, excess, path[n - 1], path[n], path[n + 1]) for n in range(1, len(path) - 1)]
    shifted = bool(ratio[keep[-1]] <= 1)
    final = (1.0 if shifted else 0.0) - _slope(ratio, excess, path[-2], path[-1], shifted)
    return np.maximum([*inner, final], 0.0)


def renyi_from_profile(orders: Any, epsilons: Any, deltas: Any, *, symmetric: bool = True) -> np.ndarray:
    """Certified Renyi divergence R_a of every mechanism whose profile lies below the given points.

    orders: a > 0, a != 1, any shape, the shape of the result. The other arguments as for `pair_from_profile`, whose
    pair is used: inf for a > 1 unless the last delta is 0. Zhu, Dong, Wang 2022, Lemma 23, for a finite pair.
    """
    a = validate.positive("orders", orders)
    validate.reject("orders", a, a == 1, "> 0 and not 1")
    pair = pair_from_profile(epsilons, deltas, symmetric=symmetric)
    if pair.p[-2] > 0:
        return np.where(a > 1, np.inf, _finite_renyi(a, pair))[()]
    return _finite_renyi(a, pair)[()]


def _finite_renyi(a: np.ndarray, pair: DiscretePair) -> np.ndarray:
    both = (pair.p > 0) & (pair.q > 0)
    log_q = np.log(pair.q[both])
    exponents = log_q + a[..., None] * (np.log(pair.p[both]) - log_q)
    top = exponents.max(-1)
    log_moment = top + np.log(np.exp(exponents - top[..., None]).sum(-1))
    rounding = 1e-14 * (1 + np.abs(log_moment) + np.abs(exponents).max(-1))
    return np.maximum((log_moment + np.sign(a - 1) * rounding) / (a - 1), 0.0)


def pair_from_tradeoff(false_positive_rate: Any, false_negative_rate: Any) -> DiscretePair:
    """The finite pair whose trade-off function T(Q, P) is the polygon through the given points.

    q_i are the steps of x, p_i those of 1 - f; 1 - f(0) is mass at infinity. Its `log_mgf(1j t)` is
    log int |f'|^{1+it} dx, the characteristic function of the loss (f -> phi). The polygon through values of a convex
    f lies ABOVE f: the pair is post-processing of the true one and gives lower bounds of delta. For a
    dominating pair go through `delta_from_tradeoff` and `pair_from_profile`.

    Args:
        false_positive_rate: increasing from 0 to 1, one axis.
        false_negative_rate: decreasing to 0 and convex at these points, the same length.

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
