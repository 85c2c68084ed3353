"""Privacy profiles of sampled mechanisms, from any bound on the profile of the mechanism that is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from jaxdp import validate
from jaxdp.conversions.dominating_pair import pair_from_profile
from jaxdp.domains import FINITE, SMALLEST
from jaxdp.mechanisms.basic import DiscretePair
from jaxdp.numerics.rounding import ULP
from jaxdp.typing import Array, Real

# Largest epsilon in size whose exponential is computed: e^700 and e^-700 are normal numbers.
_FAR = 700.0
_RELATIONS = ("remove", "add", "replace_one")
Profile: TypeAlias = Callable[[np.ndarray], Real]


def sampled_delta(
    base_delta: Profile, epsilon: Real, sampling_probability: Real, relation: Literal["remove", "add", "replace_one"]
) -> Array:
    """Certified delta at epsilon of one sampled round: q delta_base(log(1 + (e^eps - 1)/q)).

    base_delta: elementwise from an array of real epsilons to certified upper bounds of delta; it is asked at negative
        ones for eps < 0 or "add". For "remove" it is the profile of the base pair (P1, P0), P1 with the record; "add"
        uses the same one, swapped here; for "replace_one" it is a bound for both orders. Poisson sampling, remove and
        add: the base under add/remove. Fixed size, all relations: the base under replace_one. Poisson, replace_one: the
        larger of the base profiles under replace_one and under add and remove, both orders (advanced joint convexity).
    epsilon: in nats, real, finite.
    sampling_probability: q in [0, 1] (fixed size: batch over size of the larger data set).
    relation: "remove", "add" or "replace_one".

    >>> pure = lambda eps: np.maximum((np.e - np.exp(eps)) / (1 + np.e), -np.expm1(np.minimum(eps, 0)))  # 1-DP
    >>> print(f"{jaxdp.conversions.sampled_delta(pure, 0.05, sampling_probability=0.1, relation='remove'):.4f}")
    0.0324

    Returns delta of the broadcast shape, float64, rounded up. Below eps = log(1 - q) "remove" is 1 - e^eps. "add" uses
    1 - base_delta(-eps), whose relative accuracy is lost past eps = 30: the answer tends to 1 - (1-q) e^eps. It is for
    a single round; `sampled_pair` composes. Raises ValueError, also for a base_delta outside [0, 1].
    Reference: Zhu, Dong, Wang 2022, Theorem 11 and Proposition 29; Balle, Barthe, Gaboardi 2018.
    """
    validate.choice("relation", relation, _RELATIONS)
    eps = validate.inside("epsilon", epsilon, FINITE)
    q = validate.probability("sampling_probability", sampling_probability)
    eps, q = (np.broadcast_to(a, validate.broadcast(epsilon=eps, sampling_probability=q)) for a in (eps, q))
    # the other order of the pair (or of a symmetric bound) follows from the value at -eps by the swap identity
    flip = np.full(eps.shape, relation == "add") | ((relation == "replace_one") & (eps < 0))
    excess = _remove_excess(base_delta, np.where(flip, -eps, eps), q) * np.exp(np.where(flip, eps, 0.0).clip(max=_FAR))
    total = (excess - np.expm1(np.minimum(eps, 0.0))) * (1 + 8 * ULP)
    # subnormal numbers are rounded up to the smallest normal one: XLA would take them for 0
    return np.minimum(np.where(total > 0, np.maximum(total, SMALLEST), 0.0), 1.0)[()]


def _remove_excess(base_delta: Profile, eps: np.ndarray, q: np.ndarray) -> np.ndarray:
    """H_a((1-q) P0 + q P1, P0) - (1 - a)_+ with H = q H_{u/q}(P1, P0), u = a - (1 - q), for u > 0, else 1 - a.

    It is at most u, which is returned where the rounding of 1 - a exceeds it ("add" multiplies it by 1/a).
    """
    at = np.maximum(eps, -_FAR)
    far = at > 30  # e^eps overflows long before the answer does
    grown = np.where(far, 0.0, np.expm1(np.minimum(at, 30.0)))
    a = np.exp(np.minimum(at, 30.0))
    # u in the form with the smaller terms; in the second 1 - q is exact for q >= 1/2 and off by 2^-54 for smaller q
    u = np.where(at > -0.69, grown + q, a - (1 - q))
    slack = 8 * ULP * (np.minimum(np.abs(grown), a) + np.abs(u)) + SMALLEST
    low, high = u - slack, np.where(far, np.inf, u + slack)
    live = (q > 0) & (far | (low > 0))
    rate, at = np.where(live, q, 1.0), np.where(live, at, 0.0)
    near = live & ~far & (np.abs(grown) < 0.5 * rate)
    log_u = np.log(np.where(live & ~far, low, 1.0))
    log_u = np.where(far, at + np.log1p(-(1 - rate) * np.exp(-np.maximum(at, 30.0))), log_u)
    log_q = np.log(rate)
    # rounded down, because delta decreases
    inner = log_u - log_q - 8 * ULP * (1 + np.abs(log_u) + np.abs(log_q))
    close = np.log1p(np.where(near, grown, 0.0) / rate)
    inner = np.where(near, close - 16 * ULP * np.abs(close), inner)
    base = validate.probability("base_delta(epsilon)", base_delta(np.where(rate == 1, at, inner)))
    inside, least = np.where(base > 0, rate * base + SMALLEST, 0.0), -np.expm1(np.minimum(at, 0.0))
    excess = np.maximum(inside - least, 0.0) + 8 * ULP * (inside + least)
    # where high > 0 >= low the rounding decides whether there is any excess: u is the bound
    return np.where(q > 0, np.minimum(np.where(live, excess, np.inf), np.maximum(high, 0.0)), 0.0)


def sampled_pair(
    base_delta: Profile, epsilons: Real, sampling_probability: float, relation: Literal["remove", "add", "replace_one"]
) -> DiscretePair:
    """A finite pair that dominates one sampled round, and composes.

    Composing the one-sided formula of `sampled_delta` itself is not valid.

    base_delta: as for `sampled_delta`.
    epsilons: the losses of the pair in nats, one axis, finite; range and spacing set the accuracy, see
        `pair_from_profile`. For "remove" and "add" also negative ones; for "replace_one", symmetric, eps >= 0 suffices.
    sampling_probability: q in [0, 1], one number.
    relation: "remove", "add" or "replace_one".

    >>> pure = lambda eps: np.maximum((np.e - np.exp(eps)) / (1 + np.e), -np.expm1(np.minimum(eps, 0)))  # 1-DP
    >>> pair = jaxdp.conversions.sampled_pair(pure, np.linspace(-1, 1, 21), 0.1, "remove")
    >>> print(f"{jaxdp.delta(pair, 0.1):.4f}")
    0.0179

    Returns a DiscretePair, an upper bound in both orders. Raises ValueError.
    Reference: Zhu, Dong, Wang 2022, Corollary 31.
    """
    losses = validate.real_array("epsilons", epsilons)
    if np.ndim(validate.probability("sampling_probability", sampling_probability)):
        raise ValueError(f"sampling_probability must be one number, got shape {np.shape(sampling_probability)}.")
    deltas = sampled_delta(base_delta, losses, sampling_probability, relation)
    return pair_from_profile(epsilons, deltas, symmetric=relation == "replace_one")
