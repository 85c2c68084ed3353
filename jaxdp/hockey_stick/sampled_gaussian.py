"""One step of the sampled Gaussian: delta and epsilon from the Gaussian's own, without cancellation.

With rate q, mu = 1/sigma and delta_G the Gaussian's profile (swap identity applied until all terms are positive):

    remove  delta(eps) = q delta_G(log(1 + (e^eps - 1)/q)),            1 - e^eps where e^eps <= 1 - q
    add     delta(eps) = (1 - (1-q) e^eps) delta_G(-log b),  b = 1 - (1 - e^-eps)/q,   0 where b <= 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdp.hockey_stick import gaussian
from jaxdp.roots import crossing

_SLACK = 1e-13


def delta_bounds(mu: jax.Array, q: jax.Array, eps: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta of one step at eps, 0 < q < 1, mu > 0, forward (remove) or reverse (add)."""
    floor = jnp.maximum(-jnp.expm1(jnp.minimum(eps, 0.0)), 0.0)
    if direction == "forward":
        factor, inner, dead = _forward(q, eps)
    else:
        factor, inner, dead = _reverse(q, eps)
    # the argument's rounding, seen through a slope of at most 1: shifted outward on each side
    shift = 1e-15 * (1 + jnp.abs(inner)) + 4e-16 / jnp.maximum(jnp.exp(jnp.minimum(inner, 0.0)), 1e-300)
    lower, _ = gaussian.delta_bounds(mu, inner + shift)
    _, upper = gaussian.delta_bounds(mu, inner - shift)
    lower, upper = factor * lower * (1 - _SLACK), jnp.minimum(factor * upper * (1 + _SLACK), 1.0)
    lower = jnp.maximum(jnp.where(dead, floor, lower), floor * (1 - _SLACK))
    upper = jnp.maximum(jnp.where(dead, floor * (1 + _SLACK), upper), floor)
    return lower, jnp.where(jnp.isnan(upper), 1.0, upper)


def _forward(q: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(factor, argument of delta_G, where delta is 1 - e^eps)."""
    large = eps > 30
    ratio = jnp.expm1(jnp.where(large, 0.0, eps)) / q
    dead = ratio <= -1 + 1e-12
    near = jnp.log1p(jnp.where(dead, 0.0, ratio))
    return q, jnp.where(large, eps - jnp.log(q), near), dead


def _reverse(q: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(factor, argument of delta_G, where delta is 0)."""
    e = jnp.minimum(eps, 700.0)
    b = 1 + jnp.expm1(-e) / q
    # within 1e-12 of the end the rounding of b decides: there delta is below factor, itself charged in full
    dead = e >= -jnp.log1p(-q) * (1 - 1e-13)
    safe = jnp.maximum(jnp.where(dead, 1.0, b), 1e-12)
    return (
        jnp.maximum(1 - (1 - q) * jnp.exp(jnp.where(dead, 0.0, e)), 0.0) + 1e-16,
        -jnp.log(safe),
        dead & (e >= -jnp.log1p(-q) * (1 + 1e-13)),
    )


def epsilon_bounds(mu: jax.Array, q: jax.Array, delta: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 of one step at 0 < delta < 1."""
    top = -jnp.log1p(-q) * (1 + 1e-15) if direction == "reverse" else jnp.asarray(jnp.inf)
    _, reach = gaussian.epsilon_bounds(mu, jnp.minimum(delta, 0.5))
    high = jnp.minimum(reach + 1e-12, top)  # sampling never hurts
    high = jnp.where(jnp.isfinite(high), high, 0.0)

    def side(which: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
        lower, upper = delta_bounds(mu, q, eps, direction)
        value = jnp.where(which == 0, upper, lower)
        return jnp.where(value > delta, 1.0, -1.0) * jnp.abs(
            jnp.log(jnp.maximum(value, 1e-307) / delta)
        ), jnp.full_like(eps, jnp.nan)

    ends = jax.vmap(
        lambda which: crossing(lambda e: side(which, e), jnp.zeros(()), high, 0.5 * high, rtol=1e-13, max_steps=70)
    )(jnp.arange(2))
    at_zero = delta_bounds(mu, q, jnp.zeros(()), direction)
    upper = jnp.where(at_zero[1] <= delta, 0.0, ends[1][0])
    upper = jnp.where(jnp.isfinite(reach), upper, top)
    return jnp.where(at_zero[0] <= delta, 0.0, ends[0][1]), upper
