"""One step of the sampled Gaussian: delta and epsilon from the Gaussian's own, without cancellation.

With rate q, mu = 1/sigma and delta_G the Gaussian's profile (swap identity applied until all terms are positive):

    remove  delta(eps) = q delta_G(log(1 + (e^eps - 1)/q)),            1 - e^eps where e^eps <= 1 - q
    add     delta(eps) = (1 - e^-g) delta_G(-log((1-q)(e^g - 1)/q)),   g = -log(1-q) - eps,   0 where g <= 0.

Next to the supremum of the add direction's loss g is a difference whose rounding decides: it is moved outward by what
it may be off, delta rising in g.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdp.hockey_stick import gaussian
from jaxdp.roots import crossing
from jaxdp.rounding import ULP as _ULP
from jaxdp.special import log_complement

_SLACK = 1e-13
_TINY = 2.2250738585072014e-308  # XLA flushes subnormal numbers to zero
_LARGE = 30.0
_CERTAIN = -200.0  # an epsilon at which delta is 1 - e^-200


def delta_bounds(mu: jax.Array, q: jax.Array, eps: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) delta of one step at eps, 0 < q < 1, mu > 0, forward (remove) or reverse (add)."""
    lower, upper = (_forward if direction == "forward" else _reverse)(mu, q, eps)
    floor = jnp.maximum(-jnp.expm1(jnp.minimum(eps, 0.0)), 0.0)
    lower = jnp.maximum(lower * (1 - _SLACK), floor * (1 - _SLACK))
    upper = jnp.where(eps < _CERTAIN, 1.0, jnp.minimum(upper * (1 + _SLACK), 1.0))
    return jnp.where(jnp.isnan(lower), 0.0, lower), jnp.where(jnp.isnan(upper), 1.0, upper)


def _forward(mu: jax.Array, q: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    large = eps > _LARGE
    ratio = jnp.expm1(jnp.where(large, 0.0, eps)) / q
    dead = ratio <= -1 + 1e-12
    near = jnp.log1p(jnp.where(dead, 0.0, ratio))
    # log(1 + (e^eps - 1)/q) = eps - log q + log(1 - (1-q) e^-eps)
    far = eps - jnp.log(q) + jnp.log1p(-(1 - q) * jnp.exp(-jnp.where(large, eps, _LARGE)))
    inner = jnp.where(large, far, near)
    # the argument's rounding, seen through a slope of at most 1 (XLA's log1p is 241 units off near -0.414)
    shift = 1e-15 * (1 + jnp.abs(inner)) + 4e-16 / jnp.maximum(jnp.exp(jnp.minimum(inner, 0.0)), 1e-300)
    shift = shift + jnp.where(ratio < -0.25, 3e-14, 0.0)
    floor = jnp.maximum(-jnp.expm1(jnp.minimum(eps, 0.0)), 0.0)
    lower, upper = q * gaussian.delta_bounds(mu, inner + shift)[0], q * gaussian.delta_bounds(mu, inner - shift)[1]
    # q delta_G(x) <= q (1 - e^x) + q e^x, and e^x <= 1e-12 in the dead zone, 0 left of -1
    over = jnp.where(ratio > -1 - 1e-14, 1.2e-12 * q, 0.0)
    upper = jnp.where(ratio < jnp.inf, upper, q)  # a rate below 1e-295
    return jnp.where(dead, floor, lower), jnp.where(dead, floor + over, upper) + _TINY


def _reverse(mu: jax.Array, q: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_rest, log_q = log_complement(q, 1 - q), jnp.log(q)
    gap = -log_rest - jnp.maximum(eps, _CERTAIN)
    off = 8 * _ULP * (jnp.abs(log_rest) + jnp.abs(eps))

    def at(g: jax.Array, sign: float) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        small = jnp.log(jnp.expm1(jnp.clip(g, 1e-300, _LARGE)))
        log_grown = jnp.where(g > _LARGE, g + jnp.log1p(-jnp.exp(-jnp.maximum(g, 1.0))), small)
        inner = log_q - log_rest - log_grown
        shift = 1e-15 * (2 + jnp.abs(log_q) + jnp.abs(log_rest) + jnp.abs(log_grown))
        return gaussian.delta_bounds(mu, inner + sign * shift), -jnp.expm1(-g)

    (lower, _), low_factor = at(gap - off, 1.0)
    (_, upper), high_factor = at(gap + off, -1.0)
    lower = jnp.where((gap - off > 0) & (eps >= _CERTAIN), low_factor * lower, 0.0)
    return lower, jnp.where(gap + off > 0, high_factor * upper + _TINY, 0.0)


def epsilon_bounds(mu: jax.Array, q: jax.Array, delta: jax.Array, direction: str) -> tuple[jax.Array, jax.Array]:
    """Certified (lower, upper) epsilon >= 0 of one step at 0 < delta < 1."""
    top = -log_complement(q, 1 - q) * (1 + 2e-15) if direction == "reverse" else jnp.asarray(jnp.inf)
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
