"""t^a - 1 - a (t - 1), the convex function behind the Renyi divergence, without cancellation."""

from __future__ import annotations

from typing import Any

from jaxdp.runtime.arrays import xp


def _exp_excess(y: Any) -> Any:
    """e^y - 1 - y without cancellation near 0."""
    small = xp.abs(y) < 0.3
    near = xp.where(small, y, 0.0)
    series = xp.ones_like(near)
    for i in range(14, 2, -1):
        series = 1.0 + near / i * series
    return xp.where(small, 0.5 * near * near * series, xp.expm1(xp.where(small, 1.0, xp.minimum(y, 600.0))) - y)


def log_power_excess(loss: Any, order: Any) -> Any:
    """Log of f(e^loss), f(t) = t^order - 1 - order (t - 1), order > 1.

    f = h(order L) - order h(L), h(y) = e^y - 1 - y; the two parts cancel by order/(order - 1).
    """
    power = order * loss
    direct = xp.log(xp.maximum(_exp_excess(power) - order * _exp_excess(loss), 0.0))
    far = power + xp.log1p(-xp.minimum((1.0 + order * xp.expm1(loss)) * xp.exp(-xp.minimum(power, 700.0)), 0.5))
    return xp.where(power > 50.0, far, direct)
