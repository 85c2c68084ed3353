"""The Gaussian-DP parameter that covers a privacy profile."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.closed_forms import gaussian
from jaxdp.domains import FINITE, PROBABILITY
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import theorem
from jaxdp.typing import Array, Real

# log mu is halved from -46 on until its last bit.
_LEAST_LOG_MU, _HALVINGS = -46.0, 60
_COVERS = ("intervals", "points")


@theorem(epsilon=FINITE, delta=PROBABILITY, working_set=256)
def _smallest_mu(epsilon, delta):
    delta = raised(delta)[0]

    def covers(log_mu):
        return gaussian.delta_bounds(jnp.exp(log_mu), epsilon)[0] >= delta

    # At the largest mu x1 = eps/mu - mu/2 < -10, where delta is 1 to 1e-22. A larger end would lose digits.
    largest = jnp.log(20 + 2 * jnp.sqrt(2 * jnp.abs(epsilon)))
    _, log_mu = bisect(covers, jnp.full_like(epsilon, _LEAST_LOG_MU), largest, _HALVINGS)
    # 1e-13 outward: the compiler may round the same formula differently inside and outside the loop
    high = jnp.exp(log_mu) * (1 + 1e-13)
    covered = gaussian.delta_bounds(high, epsilon)[0] >= delta
    # rounded down: a delta that exceeds it by less than its rounding may need a mu > 0
    least = jnp.maximum(-jnp.expm1(epsilon), 0.0) * (1 - 8 * ULP)
    return jnp.where(delta <= least, 0.0, jnp.where(covered & (delta < 1), high, jnp.inf))


def gdp_mu_from_profile(epsilons: Real, deltas: Real, *, cover: Literal["intervals", "points"] = "intervals") -> Array:
    """Smallest mu whose Gaussian profile lies above the given upper bounds of delta.

    Nothing is known beyond the last epsilon: mu-GDP itself needs the whole profile, down to delta = 0.

    epsilons: in nats, finite, increasing, last axis.
    deltas: upper bounds of delta in [0, 1]; they broadcast with epsilons.
    cover: "points": above each point (eps_i, delta_i), with no claim between them. "intervals": above every profile
        that obeys the points, on all of [eps_1, eps_n]; delta decreases, so delta_i is charged up to eps_{i+1}.

    >>> print(f"{jaxdp.conversions.gdp_mu_from_profile([0.0, 0.5, 1.0], [0.3, 0.2, 0.1]):.4f}")
    1.1962

    Returns mu >= 0 of the broadcast shape without the last axis, float64, rounded up by 1e-12 relative; inf where some
    delta is 1. Raises ValueError, also without a last axis.
    Reference: Dong, Roth, Su 2022, Corollary 2.13; Balle, Wang 2018.
    """
    validate.choice("cover", cover, _COVERS)
    eps, delta = validate.inside("epsilons", epsilons, FINITE), validate.probability("deltas", deltas)
    shape = validate.broadcast(epsilons=eps, deltas=delta)
    if not eps.ndim or shape[-1] == 0:
        raise ValueError(f"epsilons must have a last axis of at least one point, got shape {eps.shape}.")
    validate.reject("epsilons", eps[..., 1:], np.diff(eps) <= 0, "increasing along the last axis")
    eps, delta = np.broadcast_to(eps, shape), np.broadcast_to(delta, shape)
    if cover == "intervals" and shape[-1] > 1:
        delta = np.minimum.accumulate(delta, axis=-1)
        eps, delta = eps[..., [*range(1, shape[-1]), shape[-1] - 1]], delta
    return _smallest_mu(eps, delta).max(axis=-1)[()]
