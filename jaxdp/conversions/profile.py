"""Conversions between the privacy profile delta(eps), the trade-off function f and the distributions F of the loss.

Each function says which arguments must be upper bounds and which must be lower bounds. As a function of a = e^eps the
profile H(a) = delta(log a) is convex and decreasing with H(0) = 1, so its values at points bound it between the points.

`levy_cdf`, `levy_delta` and `quadrature_log_characteristic` serve comparison and teaching and are NOT certified. The
contour sum of `jaxdp.delta` is, and it does not subtract two numbers near 1 to obtain a small delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.closed_forms import gaussian
from jaxdp.domains import FINITE, NOT_NAN, POSITIVE, PROBABILITY
from jaxdp.interval import Bounds
from jaxdp.numerics.roots import bisect
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import x64
from jaxdp.runtime.formulas import at_points, checked, theorem
from jaxdp.runtime.precision import kernel
from jaxdp.typing import Array, Complex, Real

_FAR = 700.0  # larger eps are replaced by this one: e^eps stays finite, and delta can only grow


def cell_bounds(point: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Upper bounds of a concave function g on the cells [point_i, point_{i+1}], given low_i <= g(point_i) <= high_i.

    A chord of a concave function, extended beyond its cell, lies above the function. So the chord of the cell to the
    left bounds g to the right of point_i, and the chord of the cell to the right bounds g to the left of point_{i+1}.
    The smaller bound exceeds the maximum of g on the cell by the order of the cell width squared. Returns one bound per
    cell, len(point) - 1 in all.
    """
    width = xp.diff(point)
    safe = xp.where(width > 0, width, 1.0)
    infinite = xp.full((1,), xp.inf)
    rise = xp.where(width > 0, (high[1:] - low[:-1]) / safe, xp.inf)
    fall = xp.where(width > 0, (high[:-1] - low[1:]) / safe, xp.inf)
    left_slope = xp.concatenate([infinite, xp.maximum(rise[:-1], 0.0)])
    right_slope = xp.concatenate([xp.maximum(fall[1:], 0.0), infinite])
    from_left = high[:-1] + xp.where(width > 0, left_slope * width, 0.0)
    from_right = high[1:] + xp.where(width > 0, right_slope * width, 0.0)
    return xp.where(width > 0, xp.minimum(from_left, from_right), xp.maximum(high[:-1], high[1:]))


@theorem(epsilon=NOT_NAN, delta=PROBABILITY, vacuous=1.0)
def swapped_delta(epsilon: Real, delta: Real) -> Array:
    """delta of the swapped pair (Q, P) from delta of (P, Q): delta_QP(eps) = 1 - e^eps + e^eps delta_PQ(-eps).

    epsilon: in nats, any real number.
    delta: delta_PQ at MINUS epsilon, in [0, 1]. An upper bound gives an upper bound, a lower bound a lower bound.

    >>> print(f"{jaxdp.conversions.swapped_delta(0.5, 0.45):.4f}")
    0.0932

    Returns delta in [0, 1] of the broadcast shape, float64, with an absolute rounding error of 3 ulp. Raises
    ValueError. Reference: Zhu, Dong, Wang 2022, Lemma 45.
    """
    small, cut = xp.minimum(epsilon, 1.0), xp.minimum(epsilon, _FAR)
    # `near` keeps its digits next to epsilon = 0; in `far` no large numbers cancel at large epsilon
    near, far = -xp.expm1(small) + xp.exp(small) * delta, 1 - xp.exp(cut) * (1 - delta)
    return xp.clip(xp.where(epsilon < 0.5, near, far), 0.0, 1.0)


@theorem(epsilon=NOT_NAN, loss_cdf=PROBABILITY, reverse_loss_cdf=PROBABILITY, vacuous=1.0)
def delta_from_cdfs(epsilon: Real, loss_cdf: Real, reverse_loss_cdf: Real) -> Array:
    """delta(eps) = 1 - F_P(eps) - e^eps F_Q'((-eps)-), from the two distribution functions of the loss.

    epsilon: in nats, any real number.
    loss_cdf: F_P(eps) = P(log dP/dQ <= eps), in [0, 1]. F_P(inf) may be below 1: the rest is mass at infinity, which
        delta includes.
    reverse_loss_cdf: F_Q'((-eps)-) = Q(log dQ/dP < -eps), the LEFT limit, in [0, 1]. The right-continuous value
        Q(log dQ/dP <= -eps) would make delta too small by the atom P(L = eps).

    >>> print(f"{jaxdp.conversions.delta_from_cdfs(1.0, loss_cdf=0.6915, reverse_loss_cdf=0.0668):.4f}")
    0.1269

    Returns delta in [0, 1] of the broadcast shape, float64: an upper bound if both arguments are lower bounds. The
    absolute rounding error of the difference, 1e-15, is added. Raises ValueError.
    Reference: Zhu, Dong, Wang 2022, Appendix B.
    """
    second = xp.exp(xp.minimum(epsilon, _FAR)) * reverse_loss_cdf
    return xp.clip(1 - loss_cdf - second * (1 - 8 * ULP) + 4 * ULP, 0.0, 1.0)


def loss_tail_from_delta(epsilons: Real, lower: Real, upper: Real) -> Bounds[Array]:
    """Bounds of P(L > eps_i) and P(L >= eps_i) of the loss L, from bounds of the profile at the points eps_i.

    P(L > eps) = H - a H'(a) with a = e^eps. Because H is convex, its derivative lies between the slopes of the chords
    to the neighbouring points. The left chord of the first point goes to H(0) = 1. At the last point the derivative is
    at most 0. The bounds are wide where the points are far apart.

    epsilons: increasing real numbers in nats, one axis, at least one.
    lower, upper: bounds of delta at the epsilons, in [0, 1], same length.

    >>> tail = jaxdp.conversions.loss_tail_from_delta([0.0, 0.5, 1.0], [0.3, 0.2, 0.1], [0.3, 0.2, 0.1])
    >>> print(tail.lower.round(3), tail.upper.round(3))
    [0.454 0.354 0.1  ] [1.    0.454 0.354]

    Returns Bounds(lower, upper) of the length of epsilons, float64. Rounding errors, 1e-15 delta/(1 - a_i/a_{i+1}), are
    not included. Raises ValueError, also for unequal lengths.
    """
    eps, low = validate.real_array("epsilons", epsilons), validate.probability("lower", lower)
    high = validate.probability("upper", upper)
    validate.equal_lists(epsilons=eps, lower=low, upper=high)
    validate.reject("epsilons", eps[1:], ~(np.diff(eps) > 0), "increasing", first=1)
    validate.reject("lower", low, low > high, "<= upper")
    gap = -np.diff(eps)  # log of a_i / a_{i+1}
    # -a_i times the slope of the chord to the left of point i, and to the right of point i
    left = np.concatenate([1 - low[:1], (high[:-1] - low[1:]) / -np.expm1(gap)])
    right = np.concatenate([(low[:-1] - high[1:]) * np.exp(gap) / -np.expm1(gap), [0.0]])
    return Bounds(np.clip(low + np.maximum(right, 0.0), 0, 1), np.clip(high + np.maximum(left, 0.0), 0, 1))


@theorem(rate=PROBABILITY, epsilon=NOT_NAN, delta=PROBABILITY, vacuous=0.0)
def _line(rate, epsilon, delta):
    return xp.maximum((1 - delta - xp.exp(epsilon) * rate * (1 + 8 * ULP)) - 4 * ULP, 0.0)


@theorem(rate=PROBABILITY, epsilon=NOT_NAN, delta=PROBABILITY, vacuous=0.0)
def _mirrored_line(rate, epsilon, delta):
    # The rounding error of 1 - delta - rate is absolute, 4 ULP. It is charged before the factor e^-eps can shrink it.
    return xp.maximum(xp.exp(-epsilon) * (1 - 8 * ULP) * (1 - delta - rate - 4 * ULP), 0.0)


def tradeoff_from_delta(false_positive_rate: Real, epsilons: Real, deltas: Real, *, symmetric: bool = False) -> Array:
    """Certified smallest false negative rate f(x) >= max_i (1 - delta_i - e^{eps_i} x)_+.

    false_positive_rate: x in [0, 1], the probability of rejecting under Q, any shape.
    epsilons: in nats, real, one axis.
    deltas: upper bounds of delta at the epsilons, in [0, 1], same length.
    symmetric: True if the bounds hold for (Q, P) as well; the maximum then includes e^{-eps_i} (1 - delta_i - x).

    >>> print(f"{jaxdp.conversions.tradeoff_from_delta(0.1, [0.0, 0.5, 1.0], [0.3, 0.2, 0.1]):.4f}")
    0.6351

    Returns a lower bound of f = T(Q, P), shape of x, float64, rounded down. Raises ValueError, also for unequal
    lengths. Reference: Dong, Roth, Su 2022, who show that the bounds of delta and these lines say the same.
    """
    (x,) = checked(false_positive_rate=(PROBABILITY, false_positive_rate))
    xp = jnp if validate.is_traced(x) else np
    eps, delta = validate.inside("epsilons", epsilons, NOT_NAN), validate.probability("deltas", deltas)
    validate.equal_lists(epsilons=eps, deltas=delta)
    value = _line(xp.asarray(x)[..., None], eps, delta).max(-1)
    if symmetric:
        value = xp.maximum(value, _mirrored_line(xp.asarray(x)[..., None], eps, delta).max(-1))
    return value[()]


def _test_gains(epsilon: jax.Array, rate: jax.Array, miss: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 - f(x) - e^eps x at the points x = rate, f(x) = miss, and a bound of its rounding error (f: some ULP of 1)."""
    lost = xp.where(rate > 0, xp.exp(epsilon) * rate, 0.0)
    return 1 - miss - lost, 8 * ULP * (1 + lost)


@kernel(working_set=2048)
def _best_test(epsilon: jax.Array, rate: jax.Array, miss: jax.Array, *, exact: bool) -> tuple[jax.Array, jax.Array]:
    """(lower, upper) bounds of max_x [1 - f(x) - e^eps x]. exact: f is convex, so its chords lie above it."""
    value, error = _test_gains(epsilon, rate, miss)
    tilt = xp.minimum(epsilon, _FAR)
    upper, step_error = _test_gains(tilt, rate[:-1], miss[1:])
    if exact:
        at, spread = _test_gains(tilt, rate, miss)
        # In a narrow cell rounding spoils the chord's bound; the bound from "f decreases" holds there as well.
        upper = xp.minimum(cell_bounds(rate, at - spread, at + spread), upper)
    return xp.max(value - error), xp.max(upper + step_error)


def delta_from_tradeoff(
    epsilon: Real, false_positive_rate: Real, false_negative_rate: Real, *, exact: bool = False
) -> Bounds[Array]:
    """Bounds of delta(eps) = max_x [1 - f(x) - e^eps x], from points of the trade-off function f = T(Q, P).

    epsilon: in nats, finite, any shape.
    false_positive_rate: increasing x_i from 0 to 1, one axis.
    false_negative_rate: f(x_i) or bounds of it, decreasing, same length.
    exact: False: the bounds use only that f decreases between the points. True: the values are exact values of a convex
        f (up to rounding), and the bounds use its chords: the gap shrinks with the square of the spacing.

    >>> x, f = [0.0, 0.2, 0.5, 1.0], [1.0, 0.5, 0.2, 0.0]
    >>> lower, upper = jaxdp.conversions.delta_from_tradeoff(0.5, x, f, exact=True)
    >>> print(f"{lower:.4f} {upper:.4f}")
    0.1703 0.3503

    Returns Bounds(lower, upper) of the shape of epsilon, float64. upper is valid if false_negative_rate holds lower
    bounds of f (exact=False) or f itself (exact=True); lower is valid if it holds upper bounds of f. Rounding errors,
    1e-15 (1 + e^eps x) at x, are added outward. Raises ValueError, also for unequal lengths.
    Reference: Dong, Roth, Su 2022: delta(eps) = 1 + f*(-e^eps), with f* the convex conjugate of f.
    """
    x = validate.probability("false_positive_rate", false_positive_rate)
    y = validate.probability("false_negative_rate", false_negative_rate)
    validate.equal_lists(false_positive_rate=x, false_negative_rate=y)
    if x[0] != 0 or x[-1] != 1:
        raise ValueError(f"false_positive_rate must go from 0 to 1, got {x[0]} to {x[-1]}.")
    validate.reject("false_positive_rate", x[1:], ~(np.diff(x) > 0), "increasing", first=1)
    validate.reject("false_negative_rate", y[1:], np.diff(y) > 0, "decreasing", first=1)
    eps = validate.inside("epsilon", epsilon, FINITE)
    low, high = at_points(_best_test, eps, x, y, own=(0, 1, 1), exact=bool(exact))
    least = -np.expm1(np.minimum(eps, 0.0)) * (1 + 8 * ULP)
    return Bounds(np.clip(low, 0, 1), np.clip(np.maximum(high, least), 0, 1))


# Bisection for log mu: the lower end of the interval, and the halvings that determine log mu to its last bit.
_LEAST_LOG_MU, _HALVINGS = -46.0, 60


def _allowed_difference(epsilon, delta, *_):
    """Largest allowed |mu of NumPy - mu of a program|: without limit where mu depends on the last digits of delta."""
    return 1e300 if min(delta + np.expm1(epsilon), 1 - delta) < 1e-6 and (epsilon < 0 or delta > 0.5) else 1e-12


@theorem(epsilon=FINITE, delta=PROBABILITY, working_set=256, absolute=_allowed_difference)
def _smallest_mu(epsilon, delta):
    delta = raised(delta)[0]

    def covers(log_mu):
        return gaussian.delta_bounds(xp.exp(log_mu), epsilon)[0] >= delta

    # At the largest mu, eps/mu - mu/2 < -10, so delta is 1 up to 1e-22. A larger end of the interval would lose digits.
    largest = xp.log(20 + 2 * xp.sqrt(2 * xp.abs(epsilon)))
    _, log_mu = bisect(covers, xp.full_like(epsilon, _LEAST_LOG_MU), largest, _HALVINGS)
    # log_mu was tested, or is the largest, which covers every delta below 1. A larger mu covers delta as well; the
    # factor is needed because a program may round exp(log_mu) differently inside and outside the loop.
    high = xp.exp(log_mu) * (1 + 1e-13)
    # delta at mu = 0, rounded down: a given delta that exceeds it only by rounding may still need mu > 0
    least = xp.maximum(-xp.expm1(epsilon), 0.0) * (1 - 8 * ULP)
    return xp.where(delta <= least, 0.0, xp.where(delta < 1, high, xp.inf))


def gdp_mu_from_profile(epsilons: Real, deltas: Real, *, cover: Literal["intervals", "points"] = "intervals") -> Array:
    """Smallest mu whose Gaussian profile lies above the given upper bounds of delta.

    The result says nothing beyond the last epsilon: mu-GDP itself needs the whole profile, down to delta = 0.

    epsilons: in nats, finite, increasing along the last axis.
    deltas: upper bounds of delta at the epsilons, in [0, 1]; broadcast with the epsilons.
    cover: "points": mu's profile lies above each point (eps_i, delta_i), with no claim between the points.
        "intervals": mu's profile lies above every profile that the deltas bound, on all of [eps_1, eps_n]. Because
        delta decreases, mu's profile must still reach delta_i at eps_{i+1}.

    >>> print(f"{jaxdp.conversions.gdp_mu_from_profile([0.0, 0.5, 1.0], [0.3, 0.2, 0.1]):.4f}")
    1.1962

    Returns mu >= 0 of the broadcast shape without the last axis, float64, rounded up: by 1e-12 relative, by more where
    only the last digits of delta depend on mu (epsilon far below 0, or delta next to 1); inf where some delta is 1.
    Raises ValueError, also without a last axis.
    Reference: Dong, Roth, Su 2022; Balle, Wang 2018.
    """
    validate.choice("cover", cover, ("intervals", "points"))
    eps, delta = validate.inside("epsilons", epsilons, FINITE), validate.probability("deltas", deltas)
    shape = validate.broadcast(epsilons=eps, deltas=delta)
    if not eps.ndim or shape[-1] == 0:
        raise ValueError(
            f"epsilons and deltas must have at least one point on the last axis, got shapes {eps.shape}, {delta.shape}."
        )
    validate.reject("epsilons", eps[..., 1:], np.diff(eps) <= 0, "increasing along the last axis", first=1)
    eps, delta = np.broadcast_to(eps, shape), np.broadcast_to(delta, shape)
    if cover == "intervals" and shape[-1] > 1:
        eps, delta = eps[..., [*range(1, shape[-1]), shape[-1] - 1]], np.minimum.accumulate(delta, axis=-1)
    return _smallest_mu(eps, delta).max(axis=-1)[()]


LogCharacteristic: TypeAlias = Callable[[np.ndarray], Complex]
LogDensity: TypeAlias = Callable[[np.ndarray], Real]
# Number of nodes t evaluated at once, which limits the (points x, nodes t) array.
_BLOCK = 4096


def levy_cdf(log_characteristic: LogCharacteristic, x: Real, *, step: float, nodes: int) -> Array:
    """Distribution function F(x) = phi(0)/2 - (1/pi) int_0^inf Im[e^{-itx} phi(t)]/t dt of the loss: an estimate.

    log_characteristic: maps t >= 0 (float64) elementwise to log phi(t), for example ``lambda t:
        jaxdp.log_mgf(mechanism, 1j * t)``; it is called in a float64 scope.
    x: real, in nats, any shape.
    step: h > 0, the step of the midpoint rule in t. The rule repeats the law of the loss with period 2 pi/h (aliasing):
        mass further than that from x is counted at the wrong place.
    nodes: number of nodes t, whole, >= 1; the integral over t > h * nodes is left out.

    >>> normal = lambda t: 0.5j * t - t**2 / 2  # mean 1/2, variance 1: the loss of Gaussian noise with sigma = 1
    >>> print(f"{jaxdp.conversions.levy_cdf(normal, 0.5, step=0.1, nodes=200):.6f}")
    0.500000

    Returns an estimate of P(L <= x), shape of x, float64; an atom at x counts half. phi(0) = 1 - P(L = inf), so F does
    not include mass at infinity. The absolute accuracy is at best 1e-15 sqrt(nodes). Raises ValueError.
    Reference: Gil-Pelaez 1951; Davies 1973 for the midpoint rule.
    """
    points = validate.inside("x", x, NOT_NAN)
    h = validate.one("step", step, POSITIVE)
    count = validate.count("nodes", nodes, 1)
    with x64():
        total = np.exp(np.asarray(log_characteristic(np.zeros(1)))).real[0]
        value = np.full(points.shape, total / 2)
        for start in range(0, count, _BLOCK):
            t = (np.arange(start, min(start + _BLOCK, count)) + 0.5) * h
            weight = np.exp(np.asarray(log_characteristic(t))) / t
            turned = np.exp(-1j * np.where(np.isfinite(points), points, 0.0)[..., None] * t) * weight
            value = value - (h / np.pi) * turned.imag.sum(-1)
    return np.where(np.isfinite(points), value, np.where(points > 0, total, 0.0))[()]


def levy_delta(
    log_characteristic: LogCharacteristic, reverse: LogCharacteristic, epsilon: Real, *, step: float, nodes: int
) -> Array:
    """delta(eps) = 1 - F_P(eps) - e^eps F_Q'(-eps) from two inversions of characteristic functions: an estimate.

    log_characteristic: maps t >= 0 elementwise to log phi(t) of the loss L = log dP/dQ under P.
    reverse: the same for log dQ/dP under Q; for a mechanism ``lambda t: mechanism.log_mgf(-1 - 1j * t)``.
    epsilon: in nats, real, any shape.
    step, nodes: as for `levy_cdf`.

    >>> normal = lambda t: 0.5j * t - t**2 / 2  # Gaussian noise with sigma = 1: both directions are equal
    >>> print(f"{jaxdp.conversions.levy_delta(normal, normal, 1.0, step=0.1, nodes=200):.6f}")
    0.126937

    Returns an estimate of delta in [0, 1] of the shape of epsilon, float64, with absolute accuracy only. An atom at
    epsilon counts half in both terms, and the two errors cancel. Raises ValueError.
    Reference: Zhu, Dong, Wang 2022, Algorithm 1.
    """
    eps = validate.real_array("epsilon", epsilon)
    ahead = levy_cdf(log_characteristic, eps, step=step, nodes=nodes)
    behind = levy_cdf(reverse, -eps, step=step, nodes=nodes)
    return np.clip(1 - ahead - np.exp(eps) * behind, 0.0, 1.0)[()]


def quadrature_log_characteristic(
    log_p: LogDensity, log_q: LogDensity, low: float, high: float, *, nodes: int = 256
) -> LogCharacteristic:
    """Function t -> log phi(t) = log int p(x) e^{it log(p(x)/q(x))} dx by Gauss-Legendre on [low, high]: an estimate.

    With `levy_cdf` this is the double quadrature of Zhu, Dong, Wang 2022, for mechanisms without a closed form.

    log_p, log_q: log densities of P and Q, elementwise on [low, high].
    low, high: finite, low < high; mass outside is lost.
    nodes: number of nodes x, whole, >= 1. The rule fails where e^{it loss} oscillates too fast for the nodes.

    >>> log_p, log_q = (lambda x, m=m: -((x - m) ** 2) / 2 - np.log(2 * np.pi) / 2 for m in (1.0, 0.0))
    >>> log_phi = jaxdp.conversions.quadrature_log_characteristic(log_p, log_q, -9.0, 10.0)
    >>> print(np.round(log_phi(np.array([1.0])), 6))  # 0.5 i t - t^2 / 2
    [-0.5+0.5j]

    Returns a callable for `levy_cdf` and `levy_delta`. Raises ValueError.
    """
    start, end = validate.one("low", low, FINITE), validate.one("high", high, FINITE)
    if start >= end:
        raise ValueError(f"low must be below high, got {low!r} and {high!r}.")
    x, weight = np.polynomial.legendre.leggauss(validate.count("nodes", nodes, 1))
    half = (end - start) / 2
    points = start + half * (x + 1)
    with x64():
        density = np.asarray(log_p(points), np.float64)
        loss = density - np.asarray(log_q(points), np.float64)
    mass = half * weight * np.exp(density)

    def log_characteristic(t: np.ndarray) -> np.ndarray:
        return np.log(np.exp(1j * np.asarray(t)[..., None] * loss) @ mass)

    return log_characteristic
