"""t^a - 1 - a (t - 1), the convex function behind the Renyi divergence, without cancellation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def _exp_excess(y: Any) -> Any:
    """e^y - 1 - y without cancellation near 0."""
    small = jnp.abs(y) < 0.3
    near = jnp.where(small, y, 0.0)
    series = jnp.ones_like(near)
    for i in range(14, 2, -1):
        series = 1.0 + near / i * series
    return jnp.where(small, 0.5 * near * near * series, jnp.expm1(jnp.where(small, 1.0, jnp.minimum(y, 600.0))) - y)


def log_power_excess(loss: Any, order: Any) -> Any:
    """Log of f(e^loss), f(t) = t^order - 1 - order (t - 1), order > 1.

    f = h(order L) - order h(L), h(y) = e^y - 1 - y; the two parts cancel by order/(order - 1).
    """
    power = order * loss
    direct = jnp.log(jnp.maximum(_exp_excess(power) - order * _exp_excess(loss), 0.0))
    far = power + jnp.log1p(-jnp.minimum((1.0 + order * jnp.expm1(loss)) * jnp.exp(-jnp.minimum(power, 700.0)), 0.5))
    return jnp.where(power > 50.0, far, direct)
