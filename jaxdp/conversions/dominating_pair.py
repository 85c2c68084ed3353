"""From an upper bound on the privacy profile to a finite pair that dominates, and composes.

H(a) = delta(log a) is convex. Given points (a_i, delta_i) above it, the largest convex minorant of the points is
still above it, is piecewise linear, and is the profile of a finite pair: the ratio dP/dQ takes the values a_i, with
Q-masses the changes of slope (Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25). The minorant is needed: composing a
bound that is not convex can under-estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.mechanisms.basic import DiscretePair

# Outward: the slopes, the masses and the logarithms that the record takes of them lose a few hundred ulp at most
# on grids whose spacing is above 1e-3 (checked against exact rationals).
_MARGIN = 1e-12
_RELATIONS = ("remove", "add", "replace_one")


def pair_from_profile(epsilons: Any, deltas: Any, *, symmetric: bool = True) -> DiscretePair:
    """A finite pair that dominates every mechanism whose profile lies below the given points.

    Args:
        epsilons: finite real numbers, distinct, one axis, any order. With symmetric=False give negative ones too: for
            a < 1 nothing else is known but the chord to H(0) = 1.
        deltas: certified upper bounds of delta at them, in [0, 1], same length. The smallest is charged as mass at
            infinity: let the grid reach far enough, or give a last delta of 0 where that is true.
        symmetric: True if the bounds hold for both orders of every neighbouring pair (replace_one, or the larger of
            add and remove). The bound at a < 1 is then continued by the swap identity H(a) = 1 - a + a H(1/a).

    Returns:
        DiscretePair of len(epsilons) + 2 outcomes (+ len for symmetric): compose it as any mechanism.
        Between the points the profile is the chord in e^eps, which exceeds a smooth profile by the square of
        the spacing.

    Raises:
        ValueError: a delta below 1 - e^eps, which no mechanism has.

    Reference:
        Zhu, Dong, Wang 2022, Lemma 9 and Corollary 25.

    """
    ratio, excess, infinity = _points(epsilons, deltas, symmetric)
    keep = _hull(ratio, excess)
    mass_q, lost_q = _masses(ratio[keep], excess[keep], infinity)
    p, q = np.zeros(ratio.size), np.zeros(ratio.size)
    q[keep], p[keep] = mass_q, ratio[keep] * mass_q
    return DiscretePair(np.concatenate([p, [infinity, 0.0]]), np.concatenate([q, [0.0, lost_q]]))


def _points(epsilons: Any, deltas: Any, symmetric: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Ratios a_i increasing, H(a_i) - (1 - a_i)_+ >= 0 with the margin added, and the mass at infinity."""
    eps, delta = validate.real_array("epsilons", epsilons), validate.probability("deltas", deltas)
    if eps.ndim != 1 or eps.shape != delta.shape or eps.size == 0:
        raise ValueError(f"epsilons and deltas must be equally long lists, got {eps.shape} and {delta.shape}.")
    validate.reject("epsilons", eps, ~(np.abs(eps) < 700), "between -700 and 700")
    order = np.argsort(eps)
    eps, delta = eps[order], delta[order]
    validate.reject("epsilons", eps[1:], np.diff(eps) <= 0, "distinct")
    floor = np.maximum(-np.expm1(eps), 0.0)
    validate.reject("deltas", delta, delta < floor * (1 - 1e-9), "at least 1 - e^epsilon")
    excess = np.maximum(delta - floor, 0.0) * (1 + _MARGIN) + np.where(eps < 0, _MARGIN * np.exp(eps), 0.0)
    if symmetric:
        eps, excess = _mirrored(eps, excess)
    infinity = min(1.0, delta.min() * (1 + _MARGIN))
    return np.exp(eps), excess, float(infinity)


def _mirrored(eps: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every point with its image under the swap: (H - (1-a)_+)(1/a) = (H - (1-a)_+)(a) / a."""
    both = np.concatenate([eps, -eps])
    values = np.concatenate([excess, excess * np.exp(-eps)])
    unique, where = np.unique(both, return_inverse=True)
    smallest = np.full(unique.size, np.inf)
    np.minimum.at(smallest, where, values)
    return unique, smallest


def _hull(ratio: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Indices of the points on the largest convex minorant that ends flat, H(0) = 1 included."""
    last = int(np.argmin(excess + np.maximum(1 - ratio, 0.0)))
    kept: list[int] = []
    for i in range(last + 1):
        while kept and _slope(ratio, excess, kept[-1], i) <= _slope(ratio, excess, kept[-2] if len(kept) > 1 else -1, kept[-1]):
            kept.pop()
        kept.append(i)
    return np.asarray(kept)


def _slope(ratio: np.ndarray, excess: np.ndarray, i: int, j: int) -> float:
    """Slope of H + a (for a <= 1) or H (else) between two points, i = -1 standing for H(0) = 1; comparable values.

    The slope of H is -1 plus a tiny number far left of 1 and a tiny negative number far right of it: each side keeps
    the part that has digits.
    """
    a = 0.0 if i < 0 else ratio[i]
    base = 0.0 if i < 0 else excess[i]
    if ratio[j] <= 1:
        return _Slope((excess[j] - base) / (ratio[j] - a), 0.0)
    if a >= 1:
        return _Slope(0.0, (excess[j] - base) / (ratio[j] - a))
    return _Slope.across((excess[j] - base - (1 - a)) / (ratio[j] - a))
