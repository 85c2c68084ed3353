"""Between the privacy profile delta(eps), the trade-off function f and the distribution functions F of the loss.

Each rule says which argument must be a bound from which side. The profile as a function of a = e^eps,
H(a) = delta(log a), is convex and decreasing with H(0) = 1: that is what turns values at points into certified
values between them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.conversions.concave import cell_bounds
from jaxdp.conversions.rdp import real_target
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import formula
from jaxdp.runtime.precision import kernel

_FAR = 700.0


@formula(valid=lambda e, d: (d >= 0) & (d <= 1), vacuous=1.0)
def _swapped(epsilon, delta):
    floor = -jnp.expm1(epsilon)
    return jnp.clip(floor + jnp.exp(epsilon) * delta, 0.0, 1.0)


def swapped_delta(epsilon: Any, delta: Any) -> Any:
    """delta_QP(eps) of the swapped pair, from delta = delta_PQ(-eps): 1 - e^eps + e^eps delta.

    epsilon: real; delta: in [0, 1], at MINUS epsilon; they broadcast. An upper bound gives an upper bound, a lower
    one a lower one, to three units of roundoff (of 1). Zhu, Dong, Wang 2022, Lemma 45.
    """
    delta = delta if validate.is_traced(delta) else validate.probability("delta", delta)
    return _swapped(real_target("epsilon", epsilon), delta)


@formula(vacuous=1.0)
def _from_cdfs(epsilon, cdf, reverse_cdf):
    # e^eps times 0 is 0 also at eps = inf
    second = jnp.where(reverse_cdf > 0, jnp.exp(epsilon) * reverse_cdf, 0.0)
    return jnp.clip(1 - cdf - second * (1 - 8 * ULP) + 4 * ULP, 0.0, 1.0)


def delta_from_cdfs(epsilon: Any, loss_cdf: Any, reverse_loss_cdf: Any) -> Any:
    """delta(eps) = 1 - F_P(eps) - e^eps F_Q'((-eps)-), from the two distribution functions of the loss.

    loss_cdf: F_P(eps) = P(log dP/dQ <= eps). reverse_loss_cdf: F_Q'((-eps)-) = Q(log dQ/dP < -eps), the LEFT limit;
    the right-continuous value in its place loses the atom P(L = eps). Lower bounds of both give an upper bound of
    delta. Mass at infinity is what F_P misses of 1, and is included. All broadcast. The difference cancels: absolute
    accuracy only, 1e-15, added on top. Zhu, Dong, Wang 2022, Appendix B.
    """
    checks = {"loss_cdf": loss_cdf, "reverse_loss_cdf": reverse_loss_cdf}
    values = [v if validate.is_traced(v) else validate.probability(name, v) for name, v in checks.items()]
    return _from_cdfs(real_target("epsilon", epsilon), *values)


def loss_tail_from_delta(epsilons: Any, lower: Any, upper: Any) -> Bounds:
    """Bounds of P(L > eps_i) and P(L >= eps_i) from a bounded profile: P(L > eps) = H - a H'(a), a = e^eps.

    The derivative is held between the chords to the neighbours (H is convex); left of the first point the chord goes
    to H(0) = 1, right of the last the derivative is between 0 and the chord. Wide where the points are far apart.

    Args:
        epsilons: increasing real numbers, at least one, last axis.
        lower: lower bounds of delta at them; upper: upper bounds. Same length.

    Returns:
        Bounds(lower, upper) of the length of epsilons. Rounding is not charged: 1e-15 delta/(1 - a_i/a_{i+1}).

    """
    eps, low, high = (
        validate.real_array(n, v) for n, v in (("epsilons", epsilons), ("lower", lower), ("upper", upper))
    )
    low, high = validate.probability("lower", low), validate.probability("upper", high)
    if eps.ndim != 1 or eps.shape != low.shape or eps.shape != high.shape or eps.size == 0:
        shapes = ", ".join(str(a.shape) for a in (eps, low, high))
        raise ValueError(f"epsilons, lower and upper must be equally long lists, got {shapes}.")
    validate.reject("epsilons", eps[1:], ~(np.diff(eps) > 0), "increasing")
    validate.reject("lower", low, low > high, "<= upper")
    ratio = np.exp(-np.diff(eps))  # a_i / a_{i+1}
    # a_i times the slope of the chord on the left, and on the right of point i
    left = np.concatenate([1 - low[:1], (high[:-1] - low[1:]) / -np.expm1(-np.diff(eps))])
    steep = np.maximum(left, 0.0)
    right = np.concatenate([(low[:-1] - high[1:]) * ratio / -np.expm1(-np.diff(eps)), [0.0]])
    flat = np.maximum(right, 0.0)
    return Bounds(np.clip(low + flat, 0, 1), np.clip(high + steep, 0, 1))


@formula(vacuous=0.0)
def _line(rate, epsilon, delta):
    return jnp.maximum((1 - delta - jnp.exp(epsilon) * rate * (1 + 8 * ULP)) - 4 * ULP, 0.0)


@formula(vacuous=0.0)
def _mirrored_line(rate, epsilon, delta):
    # 1 - rate - delta is rounded at the size of 1: charged before the factor, which is at most 1 for epsilon >= 0
    return jnp.maximum(jnp.exp(-epsilon) * (1 - 8 * ULP) * (1 - delta - rate - 4 * ULP), 0.0)


def tradeoff_from_delta(false_positive_rate: Any, epsilons: Any, deltas: Any, *, symmetric: bool = False) -> Any:
    """Certified smallest false negative rate: f(x) >= max_i (1 - delta_i - e^{eps_i} x)_+.

    Args:
        false_positive_rate: x in [0, 1], any shape; the shape of the result.
        epsilons: real, one axis. deltas: upper bounds of delta at them, same length.
        symmetric: True if the bounds hold for (Q, P) as well; adds e^{-eps_i} (1 - delta_i - x).

    Returns:
        Lower bound of f = T(Q, P), rounded down. Reference: Dong, Roth, Su 2022, Proposition 2.13.

    """
    x = false_positive_rate
    x = x if validate.is_traced(x) else validate.probability("false_positive_rate", x)
    xp = jnp if validate.is_traced(x) else np
    eps, delta = real_target("epsilons", epsilons), validate.probability("deltas", deltas)
    if np.ndim(eps) != 1 or np.shape(eps) != np.shape(delta) or np.size(eps) == 0:
        raise ValueError(f"epsilons and deltas must be equally long lists, got {np.shape(eps)} and {np.shape(delta)}.")
    value = _line(xp.asarray(x)[..., None], eps, delta).max(-1)
    if symmetric:
        value = xp.maximum(value, _mirrored_line(xp.asarray(x)[..., None], eps, delta).max(-1))
    return value[()]


def _test_gains(epsilon: Any, rate: Any, miss: Any) -> tuple[Any, Any]:
    """1 - f - e^eps x at the points, and its rounding (that of f, of size 1, included)."""
    lost = jnp.where(rate > 0, jnp.exp(epsilon) * rate, 0.0)
    return 1 - miss - lost, 8 * ULP * (1 + lost)


@kernel(working_set=2048)
def _staircase(epsilon: Any, rate: Any, miss: Any) -> tuple[Any, Any]:
    value, error = _test_gains(epsilon, rate, miss)
    # in the upper bound e^eps stays finite: delta decreases
    step, step_error = _test_gains(jnp.minimum(epsilon, _FAR), rate[:-1], miss[1:])
    return jnp.max(value - error), jnp.max(step + step_error)


@kernel(working_set=2048)
def _chords(epsilon: Any, rate: Any, miss: Any) -> tuple[Any, Any]:
    value, error = _test_gains(epsilon, rate, miss)
    tilt = jnp.minimum(epsilon, _FAR)
    step, step_error = _test_gains(tilt, rate[:-1], miss[1:])
    at, spread = _test_gains(tilt, rate, miss)
    # the slope of a narrow cell is the rounding of its ends
    chord = cell_bounds(rate, at - spread, at + spread)
    return jnp.max(value - error), jnp.max(jnp.minimum(chord, step) + step_error)


def delta_from_tradeoff(
    epsilon: Any, false_positive_rate: Any, false_negative_rate: Any, *, exact: bool = False
) -> Bounds:
    """delta(eps) = max_x [1 - f(x) - e^eps x] from points of the trade-off function f = T(Q, P).

    Args:
        epsilon: real, any shape, the shape of the result.
        false_positive_rate: increasing x_i from 0 to 1, one axis. false_negative_rate: f(x_i), decreasing.
        exact: False: only the values are known, f is decreasing between them. True: they are values of a convex f
            (to roundoff), and its chords are used: the gap shrinks with the square of the spacing.

    Returns:
        Bounds(lower, upper): upper holds if the values are lower bounds of f (exact=False) or f itself
        (exact=True), lower if they are upper bounds of f. Rounding, 1e-15 (1 + e^eps x) at x, is added outward.

    """
    x = validate.probability("false_positive_rate", false_positive_rate)
    y = validate.probability("false_negative_rate", false_negative_rate)
    if x.ndim != 1 or x.shape != y.shape or x.size < 2 or x[0] != 0 or x[-1] != 1:
        raise ValueError("false_positive_rate must be a list from 0 to 1, as long as false_negative_rate.")
    validate.reject("false_positive_rate", x[1:], ~(np.diff(x) > 0), "increasing")
    validate.reject("false_negative_rate", y[1:], np.diff(y) > 0, "decreasing")
    eps = validate.real_array("epsilon", epsilon)
    validate.reject("epsilon", eps, ~np.isfinite(eps), "finite")
    flat = eps.reshape(-1)
    spread = [np.broadcast_to(a, (flat.size, x.size)) for a in (x, y)]
    low, high = (_chords if exact else _staircase)(flat, *spread)
    floor = -np.expm1(np.minimum(flat, 0.0)) * (1 + 8 * ULP)
    low, high = np.clip(low, 0, 1), np.clip(np.maximum(high, floor), 0, 1)
    return Bounds(low.reshape(eps.shape)[()], high.reshape(eps.shape)[()])
