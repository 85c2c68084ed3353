"""Privacy profiles of sampled mechanisms, from any bound on the profile of the mechanism that is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.conversions.dominating_pair import pair_from_profile
from jaxdp.conversions.rdp import TINY
from jaxdp.mechanisms.basic import DiscretePair
from jaxdp.numerics.rounding import ULP

# e^_FAR and e^-_FAR are normal numbers
_FAR = 700.0
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
        NumPy float64 of the broadcast shape. Below eps = log(1 - q) "remove" is 1 - e^eps, rounded up.
        "add" is read off 1 - base_delta(-eps), of which little is left past eps = 30: the answer nears 1 - (1-q) e^eps.
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
    excess = _remove_excess(base_delta, np.where(flip, -eps, eps), q) * np.exp(np.where(flip, eps, 0.0).clip(max=_FAR))
    total = (excess - np.expm1(np.minimum(eps, 0.0))) * (1 + 8 * ULP)
    # what is subnormal is rounded up too: XLA would flush it to 0
    return np.minimum(np.where(total > 0, np.maximum(total, TINY), 0.0), 1.0)[()]


def _remove_excess(base_delta: Profile, eps: np.ndarray, q: np.ndarray) -> np.ndarray:
    """H_a((1-q) P0 + q P1, P0) - (1 - a)_+ with H = q H_{u/q}(P1, P0), u = a - (1 - q), for u > 0, else 1 - a.

    It is at most u. Where the rounding of 1 - a hides it ("add" multiplies it by 1/a), u is the answer.
    """
    at = np.maximum(eps, -_FAR)
    far = at > 30  # e^eps overflows long before the answer does
    grown = np.where(far, 0.0, np.expm1(np.minimum(at, 30.0)))
    a = np.exp(np.minimum(at, 30.0))
    # the sum with the smaller terms; in the second 1 - q is exact for q >= 1/2, and rounded by 2^-54 for less
    u = np.where(at > -0.69, grown + q, a - (1 - q))
    slack = 8 * ULP * (np.minimum(np.abs(grown), a) + np.abs(u)) + TINY
    low, high = u - slack, np.where(far, np.inf, u + slack)
    live = (q > 0) & (far | (low > 0))
    rate, at = np.where(live, q, 1.0), np.where(live, at, 0.0)
    near = live & ~far & (np.abs(grown) < 0.5 * rate)
    log_u = np.log(np.where(live & ~far, low, 1.0))
    log_u = np.where(far, at + np.log1p(-(1 - rate) * np.exp(-np.maximum(at, 30.0))), log_u)
    log_q = np.log(rate)
    # rounded down, delta decreases
    inner = log_u - log_q - 8 * ULP * (1 + np.abs(log_u) + np.abs(log_q))
    close = np.log1p(np.where(near, grown, 0.0) / rate)
    inner = np.where(near, close - 16 * ULP * np.abs(close), inner)
    base = validate.probability("base_delta(epsilon)", base_delta(np.where(rate == 1, at, inner)))
    inside, floor = np.where(base > 0, rate * base + TINY, 0.0), -np.expm1(np.minimum(at, 0.0))
    excess = np.maximum(inside - floor, 0.0) + 8 * ULP * (inside + floor)
    # high > 0 >= low: whether there is any excess is lost in the rounding
    return np.where(q > 0, np.minimum(np.where(live, excess, np.inf), np.maximum(high, 0.0)), 0.0)


def sampled_pair(base_delta: Profile, epsilons: Any, sampling_probability: float, relation: str) -> DiscretePair:
    """A finite pair that dominates one sampled round, and composes; arguments as for `sampled_delta`.

    epsilons: the grid of the pair's losses, one axis, finite; its range and spacing set the accuracy (see
    `pair_from_profile`). "replace_one": eps >= 0 suffices, the pair is symmetric (Zhu, Dong, Wang 2022, Corollary
    31). "remove" and "add": give negative epsilons too. Composing the one-sided formula itself is not valid.
    """
    losses = validate.real_array("epsilons", epsilons)
    if np.ndim(validate.probability("sampling_probability", sampling_probability)):
        raise ValueError(f"sampling_probability must be one number, got shape {np.shape(sampling_probability)}.")
    deltas = sampled_delta(base_delta, losses, sampling_probability, relation)
    return pair_from_profile(epsilons, deltas, symmetric=relation == "replace_one")
