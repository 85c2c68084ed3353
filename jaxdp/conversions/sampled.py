"""Privacy profiles of sampled mechanisms, from any bound on the profile of the mechanism that is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.conversions.dominating_pair import pair_from_profile
from jaxdp.mechanisms.basic import DiscretePair

_ULP = 2.0**-52
_RELATIONS = ("remove", "add", "replace_one")
Profile = Callable[[np.ndarray], Any]


def sampled_delta(base_delta: Profile, epsilon: Any, sampling_probability: Any, relation: str) -> np.ndarray:
    """Certified delta at epsilon of one sampled round: q delta_base(log(1 + (e^eps - 1)/q)).

    Args:
        base_delta: callable, elementwise from an array of real epsilons (negative ones for eps < 0 or "add") to
            certified upper bounds of delta. "remove": profile of the base pair (P1, P0), P1 with the record; "add": the
            same one, the swap is made here; "replace_one": a bound for both orders.
            Poisson, remove and add: the base under add/remove. Fixed size, all relations: the base under replace_one.
            Poisson, replace_one: the larger of the base profiles under replace_one and under add and remove,
            both orders (advanced joint convexity).
        epsilon: real, finite. sampling_probability: q in [0, 1] (fixed size: batch / size of the larger data set).
        relation: "remove", "add" or "replace_one".

    Returns:
        NumPy float64 of the broadcast shape. Below eps = log(1 - q) "remove" is 1 - e^eps exactly.
        A single round: to compose, use `sampled_pair`.

    Reference:
        Zhu, Dong, Wang 2022, Theorem 11 and Proposition 29; Balle, Barthe, Gaboardi 2018.

    """
    validate.choice("relation", relation, _RELATIONS)
    eps = validate.real_array("epsilon", epsilon)
    validate.reject("epsilon", eps, ~np.isfinite(eps), "finite")
    q = validate.probability("sampling_probability", sampling_probability)
    eps, q = (np.broadcast_to(a, validate.broadcast(epsilon=eps, sampling_probability=q)) for a in (eps, q))
    # the other order of the pair, or of a symmetric bound, is read off at -eps by the swap identity
    flip = np.full(eps.shape, relation == "add") | ((relation == "replace_one") & (eps < 0))
    excess = _remove_excess(base_delta, np.where(flip, -eps, eps), q) * np.exp(np.where(flip, eps, 0.0))
    return np.minimum(np.maximum(-np.expm1(eps), 0.0) + excess * (1 + 2 * _ULP), 1.0)[()]


def _remove_excess(base_delta: Profile, eps: np.ndarray, q: np.ndarray) -> np.ndarray:
    """H_a((1-q) P0 + q P1, P0) - (1 - a)_+ with H = q H_{(a - 1 + q)/q}(P1, P0) for a > 1 - q, else 1 - a."""
    live = (q > 0) & (np.expm1(eps) > -q)
    rate, at = np.where(live, q, 1.0), np.where(live, eps, 0.0)
    large = at > 30
    # e^eps overflows long before the answer does
    near = np.log1p(np.expm1(np.where(large, 0.0, at)) / rate)
    far = at - np.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(at, 30.0)))
    inner = np.where(large, far, near)
    # rounded down, delta decreases; near the edge a = 1 - q the argument of the logarithm cancels
    inner = inner - 8 * _ULP * (1 + np.abs(inner) + 1 / (rate * np.exp(np.minimum(inner, 0.0))))
    inside = validate.probability("base_delta(epsilon)", base_delta(inner))
    floor = np.maximum(-np.expm1(at), 0.0)
    # below eps = 0 the difference is rounded at the size of the floor
    excess = np.maximum(rate * inside - floor, 0.0) + 2 * _ULP * (rate * inside + floor)
    return np.where(live, excess, 0.0)


def sampled_pair(base_delta: Profile, epsilons: Any, sampling_probability: float, relation: str) -> DiscretePair:
    """A finite pair that dominates one sampled round, and composes; arguments as for `sampled_delta`.

    epsilons: the grid of the pair's losses, one axis, finite; its range and spacing set the accuracy (see
    `pair_from_profile`). "replace_one": eps >= 0 suffices, the pair is symmetric (Zhu, Dong, Wang 2022, Corollary
    31). "remove" and "add": give negative epsilons too. Composing the one-sided formula itself is not valid.
    """
    deltas = sampled_delta(base_delta, epsilons, sampling_probability, relation)
    return pair_from_profile(epsilons, deltas, symmetric=relation == "replace_one")
