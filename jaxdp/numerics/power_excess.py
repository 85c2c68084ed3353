"""t^a - 1 - a (t - 1), the convex function behind the Renyi divergence, without cancellation."""

from typing import Any

from jaxdp.runtime.arrays import xp

_SERIES_BELOW = 0.5


def log_power_excess(loss: Any, order: Any) -> Any:
    """log(e^{alpha t} - 1 - alpha (e^t - 1)), t = loss, alpha = order > 1; absolute error 1e-14 (1 + |alpha t|)."""
    excess = order - 1.0
    growth = xp.log1p(excess)
    near = xp.abs(loss) * order < _SERIES_BELOW
    small = xp.where(near, loss, 0.1 / order)
    power, total = small, xp.zeros_like(small)
    for j in range(2, 18):
        # alpha^j - alpha = alpha expm1((j-1) log alpha), scaled by t^j / j!
        power = power * small / j
        total = total + order * xp.expm1((j - 1) * growth) * power
    far = xp.where(near, 1.0 / order, loss)
    # The excess is e^t expm1((alpha-1) t) - (alpha-1) expm1(t); for t > 0 the factor e^{alpha t} is taken out, and
    # e^{-alpha t} expm1(t) is computed as -e^{-(alpha-1) t} expm1(-t), which does not overflow.
    up = -xp.expm1(-excess * xp.abs(far)) + excess * xp.exp(-excess * xp.abs(far)) * xp.expm1(-xp.abs(far))
    down = xp.exp(xp.minimum(far, 0.0)) * xp.expm1(excess * xp.minimum(far, 0.0)) - excess * xp.expm1(far)
    direct = xp.maximum(far, 0.0) * order + xp.log(xp.maximum(xp.where(far > 0, up, down), 1e-300))
    return xp.where(near, xp.log(xp.maximum(total, 1e-300)), direct)
