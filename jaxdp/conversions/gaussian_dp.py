"""The Gaussian-DP parameter that covers a privacy profile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.closed_forms import gaussian
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import formula

# mu from e^-46, to the last bit of its logarithm
_SMALLEST, _HALVINGS = -46.0, 60
_COVERS = ("intervals", "points")


@formula(valid=lambda e, d: (d >= 0) & (d <= 1), working_set=256)
def _smallest_mu(epsilon, delta):
    delta = raised(delta)[0]

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        covers = gaussian.delta_bounds(jnp.exp(middle), epsilon)[0] >= delta
        return jnp.where(covers, low, middle), jnp.where(covers, middle, high)

    # x1 = eps/mu - mu/2 < -10 there, so that delta is 1 to 1e-22; much larger mu cost digits, not privacy
    largest = jnp.log(20 + 2 * jnp.sqrt(2 * jnp.abs(epsilon)))
    start = jnp.full_like(epsilon, _SMALLEST), largest
    # 1e-13 outward: the compiler may round the same formula differently inside and outside the loop
    high = jnp.exp(jax.lax.fori_loop(0, _HALVINGS, halve, start)[1]) * (1 + 1e-13)
    reached = gaussian.delta_bounds(high, epsilon)[0] >= delta
    # rounded down: a delta within its rounding may need a mu > 0
    floor = jnp.maximum(-jnp.expm1(epsilon), 0.0) * (1 - 8 * ULP)
    return jnp.where(delta <= floor, 0.0, jnp.where(reached & (delta < 1), high, jnp.inf))


def gdp_mu(epsilons: Any, deltas: Any, *, cover: str = "intervals") -> Any:
    """Smallest mu whose Gaussian profile lies above the given upper bounds of delta.

    cover="points": above each point (eps_i, delta_i); nothing is said between them. cover="intervals": above every
    profile that obeys the points, on all of [eps_1, eps_n] (delta decreases, so delta_i is charged up to eps_{i+1}).
    Beyond eps_n no finite set of points says anything: mu-GDP itself needs the whole profile, down to delta = 0.

    Args:
        epsilons: increasing real numbers, last axis. deltas: upper bounds in [0, 1]; broadcast.

    Returns:
        mu >= 0 without the last axis; inf where some delta is 1. The bracket's safe end, 1e-12 relative.

    Reference:
        Dong, Roth, Su 2022, Corollary 2.13; Balle, Wang 2018.

    """
    validate.choice("cover", cover, _COVERS)
    eps, delta = validate.real_array("epsilons", epsilons), validate.probability("deltas", deltas)
    validate.reject("epsilons", eps, ~np.isfinite(eps), "finite")
    shape = validate.broadcast(epsilons=eps, deltas=delta)
    if not eps.ndim or shape[-1] == 0:
        raise ValueError(f"epsilons must have a last axis of at least one point, got shape {eps.shape}.")
    validate.reject("epsilons", eps[..., 1:], np.diff(eps) <= 0, "increasing along the last axis")
    eps, delta = np.broadcast_to(eps, shape), np.broadcast_to(delta, shape)
    if cover == "intervals" and shape[-1] > 1:
        delta = np.minimum.accumulate(delta, axis=-1)
        eps, delta = eps[..., [*range(1, shape[-1]), shape[-1] - 1]], delta
    return _smallest_mu(eps, delta).max(axis=-1)[()]
