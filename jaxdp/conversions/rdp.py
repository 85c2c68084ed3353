"""Renyi DP to (epsilon, delta), one order at a time: the classic conversion and that of Canonne, Kamath, Steinke.

Every order gives a valid bound; the smallest over the given orders is returned. `rdp_tradeoff` uses all orders at once.

The `cut_...` functions treat the Poisson-subsampled Gaussian under "remove". From order about 2 sigma^2 log(1/q) on,
outcomes so far out that their probability is far below delta dominate the moment, and the plain conversion is loose. So
every step is restricted to the outcomes below a cut. With p = P(above the cut) per step and T steps,

    delta(eps) <= 1 - (1 - p)^T + [restricted moment]^T e^{-c eps} c^c/(c+1)^(c+1),     c = order - 1,

because the cut changes delta by at most the probability of what it removes. At whole orders the restricted moment is a
finite sum of positive terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE_OR_INFINITE, NOT_NAN, OPEN_UNIT, POSITIVE, PROBABILITY, SMALLEST, Domain, whole
from jaxdp.numerics import special
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.formulas import ORDER, checked, theorem
from jaxdp.typing import Array, Real

# Charge for the rounding of the few operations on a term, relative to the size of the term.
_ROUNDING = 20 * ULP
# Number of values of log(order - 1) searched in each round; from the second round on, around the best one.
_POINTS = (64, 33, 33)
_LEAST_EXCESS, _LARGEST_EXCESS = 1e-3, 1e6


def log_gain(excess: Any) -> Any:
    """log of sup_x (1 - e^-x) e^-cx = c^c / (c+1)^(c+1), with c = excess = order - 1."""
    return -excess * xp.log1p(1 / excess) - xp.log1p(excess)


def epsilon_at_order(order, renyi, delta, infinity, sharp):
    """Certified epsilon at delta from one order; sharp: 1.0 for "cks", 0.0 for "classic"."""
    excess = order - 1
    infinity, _ = raised(infinity)
    room = xp.where(delta > infinity, delta - infinity, 1.0)
    gain = xp.where(sharp > 0, log_gain(excess), 0.0)
    value = renyi + (gain - xp.log(room)) / excess
    # The rounding error of delta - infinity, relative to room, is ULP * delta / room.
    lost = _ROUNDING * (xp.abs(renyi) + (xp.abs(gain) + xp.abs(xp.log(room)) + delta / room) / excess)
    return xp.where(delta > infinity, xp.maximum(value + lost, 0.0), xp.inf)


def delta_at_order(order, renyi, epsilon, infinity, sharp):
    """Certified delta at epsilon from one order; sharp as for `epsilon_at_order`."""
    excess = order - 1
    gain = xp.where(sharp > 0, log_gain(excess), 0.0)
    exponent = excess * (renyi - epsilon) + gain
    lost = _ROUNDING * (1 + excess * (xp.abs(renyi) + xp.abs(epsilon)) + xp.abs(gain))
    exponent = xp.where(xp.isinf(renyi), xp.inf, xp.where(epsilon == xp.inf, -xp.inf, exponent + lost))
    finite = xp.where(exponent == -xp.inf, 0.0, xp.maximum(xp.exp(xp.minimum(exponent, 1.0)), SMALLEST))
    return xp.minimum(raised(infinity)[0] * (1 + _ROUNDING) + finite, 1.0)


_DOMAINS: dict = {"order": ORDER, "renyi": NONNEGATIVE_OR_INFINITE, "infinity": PROBABILITY, "sharp": PROBABILITY}
_epsilon_at_orders = theorem(**_DOMAINS, delta=PROBABILITY)(epsilon_at_order)
_delta_at_orders = theorem(**_DOMAINS, epsilon=NOT_NAN, vacuous=1.0)(delta_at_order)


def epsilon_from_rdp(
    orders: Real | None,
    renyi: Real | Callable[[np.ndarray], Real],
    delta: Real,
    *,
    infinity_mass: Real = 0.0,
    method: Literal["cks", "classic"] = "cks",
) -> Array:
    """Certified epsilon at delta of a mechanism with the given Renyi curve rho_a.

    The smallest value over the orders a of
    "cks": rho_a + [log(1/delta) + (a-1) log(1 - 1/a) - log a]/(a-1); "classic": rho_a + log(1/delta)/(a-1).

    orders: a > 1, on the last axis. None, with a callable renyi: orders from 1.001 to 1e6 are searched.
    renyi: upper bounds rho_a of the Renyi divergence in nats, orders on the last axis, inf where unknown; or a callable
        that maps an array of orders elementwise to an array of the same shape. Under jit or vmap, with orders=None, the
        orders that it gets are traced.
    delta: in [0, 1]; broadcasts with the leading axes of renyi.
    infinity_mass: upper bound of P(L = inf) in [0, 1], if renyi is the curve of the finite part of the loss L.
    method: "cks" or "classic"; "cks" is never larger.

    >>> orders = [2.0, 4.0, 8.0, 16.0]
    >>> print(f"{jaxdp.conversions.epsilon_from_rdp(orders, [a / 8 for a in orders], 1e-6):.4f}")  # Gaussian, sigma = 2
    2.5430

    Returns epsilon >= 0 in nats, float64, of the broadcast shape without the axis of orders; inf where delta <=
    infinity_mass. Rounding is added outward. Raises ValueError, also for unequal lengths.
    Reference: Canonne, Kamath, Steinke 2020, Proposition 12; Mironov 2017, Proposition 3.
    """
    return _smallest(_epsilon_at_orders, orders, renyi, infinity_mass, method, delta=(PROBABILITY, delta))


def delta_from_rdp(
    orders: Real | None,
    renyi: Real | Callable[[np.ndarray], Real],
    epsilon: Real,
    *,
    infinity_mass: Real = 0.0,
    method: Literal["cks", "classic"] = "cks",
) -> Array:
    """Certified delta at epsilon of a mechanism with the given Renyi curve rho_a.

    infinity_mass plus the smallest value over the orders a of
    "cks": e^{(a-1)(rho_a - eps)} (a-1)^{a-1}/a^a; "classic": e^{(a-1)(rho_a - eps)}.

    epsilon: in nats, any real number; broadcasts with the leading axes of renyi. Other arguments, accuracy, errors and
        references: as for `epsilon_from_rdp`.

    >>> orders = [2.0, 4.0, 8.0, 16.0]
    >>> print(f"{jaxdp.conversions.delta_from_rdp(orders, [a / 8 for a in orders], 2.5):.2e}")
    1.35e-06

    Returns delta in [0, 1], float64, of the broadcast shape without the axis of orders.
    """
    return _smallest(_delta_at_orders, orders, renyi, infinity_mass, method, epsilon=(NOT_NAN, epsilon))


def named_scalars(target: dict[str, tuple[Domain, Any]], infinity_mass: Real) -> dict[str, Any]:
    """{name: checked value} of the target, given as {name: (domain, value)}, and of the mass at infinity."""
    arguments = target | {"infinity_mass": (PROBABILITY, infinity_mass)}
    return dict(zip(arguments, checked(**arguments), strict=True))


def _smallest(
    formula: Callable, orders: Any, renyi: Any, infinity_mass: Real, method: str, **target: tuple[Domain, Real]
) -> Array:
    """The smallest value of the formula over the orders. target: delta or epsilon, as name=(domain, value)."""
    sharp = 1.0 if validate.choice("method", method, ("cks", "classic")) == "cks" else 0.0
    scalars = named_scalars(target, infinity_mass)
    shape = validate.broadcast(**scalars)
    xp = jnp if validate.is_traced(scalars, orders, renyi) else np
    goal, infinity = (xp.broadcast_to(xp.asarray(a), shape)[..., None] for a in scalars.values())

    def bounds(at: Any, values: Any) -> Any:
        return formula(at, values, goal, infinity, sharp)

    if callable(renyi) and orders is None:
        return _search(bounds, renyi, shape)
    if orders is None:
        raise TypeError(f"orders must be given unless renyi is a function of the order, got {type(renyi).__name__}.")
    at, values = renyi_curve(orders, renyi(np.asarray(orders, np.float64)) if callable(renyi) else renyi)
    lead = {name: np.empty(np.shape(a)[:-1]) for name, a in (("orders", at), ("renyi", values))}
    validate.broadcast(**lead, **scalars)
    return bounds(at, values).min(axis=-1)[()]


def renyi_curve(orders: Any, renyi: Any, domain: Domain = ORDER, name: str = "renyi") -> tuple[Any, Any]:
    """The checked (orders, renyi): orders in the domain, values >= 0 or inf, equal last axes. name: for the errors."""
    (orders,) = checked(orders=(domain, orders))
    if not validate.is_traced(renyi):
        renyi = validate.real_array(name, renyi)
        validate.reject(name, renyi, ~(renyi >= 0), ">= 0 or inf")
    first, second = np.shape(orders), np.shape(renyi)
    if not first or not second or first[-1] != second[-1]:
        raise ValueError(
            f"orders and {name} must have equally long last axes, one entry per order, got shapes {first} and {second}."
        )
    if first[-1] == 0:
        raise ValueError("orders must not be empty.")
    return orders, renyi


def _search(bounds: Callable, renyi: Callable, shape: tuple[int, ...]) -> Any:
    """The smallest bound found over the orders. Every order gives a valid bound: the search affects tightness only.

    Under a bare jax.grad the orders are concrete and constant. The derivative is that at the best order.
    """
    low, high = (np.full((*shape, 1), np.log(end)) for end in (_LEAST_EXCESS, _LARGEST_EXCESS))
    best: Any = np.full(shape, np.inf)
    for points in _POINTS:
        log_excess = low + (high - low) * np.broadcast_to(np.linspace(0, 1, points), (*shape, points))
        order = 1 + _module(log_excess).exp(log_excess)
        at, values = renyi_curve(order, renyi(order))
        out = bounds(at, _module(values).broadcast_to(values, at.shape))
        best = _module(out).minimum(best, out.min(-1))
        found = jax.lax.stop_gradient(out)
        xp = _module(found)
        middle = xp.clip(xp.argmin(xp.asarray(found), -1)[..., None], 1, points - 2)
        low, high = (xp.take_along_axis(xp.asarray(log_excess), middle + side, -1) for side in (-1, 1))
    return best[()]


def _module(value: Any) -> Any:
    return jnp if validate.is_traced(value) else np


# Number of terms of the binomial sum, counts 0 to 2047. Orders are whole and below this number.
_TERMS = 2048
_ORDERS = np.unique(np.round(np.geomspace(2, _TERMS - 1, 48)))
# Relative error charged to the moment: five times the error of log_binomial_pmf in the terms that matter, 2e-12.
_ERROR = 1e-11
# Shares of delta spent on the tail above the cut. Each gives a valid bound, and the smallest bound is returned.
_SHARES = np.array([1e-6, 1e-3, 1e-2, 1e-1, 0.5])
_ORDER = Domain(
    lambda a: (a >= 2) & (a < _TERMS) & (a % 1 == 0), f"a whole number from 2 to {_TERMS - 1}", harmless=2.0, whole=True
)
_STEP = {"noise_multiplier": POSITIVE, "sampling_probability": OPEN_UNIT}
_TARGET = Domain(lambda delta: (delta > 0) & (delta <= 1), "in (0, 1]", harmless=0.5)


def _log_moment(order: jax.Array, sigma: jax.Array, q: jax.Array, cut: jax.Array) -> jax.Array:
    """log E[A(u)^order; u <= cut] for u ~ N(0, 1), A(u) = 1 - q + q e^{u/sigma - 1/(2 sigma^2)}, for a whole order."""
    j = xp.arange(_TERMS, dtype=xp.float64)
    pmf = special.log_binomial_pmf(j, order, q, 1 - q)
    shift = j / sigma
    away = shift - cut
    tilted, log_tail = 0.5 * shift * ((j - 1) / sigma), special.log_normal_tail(away)
    # An error of `away` enters with a factor below 1 + max(away, 0), the derivative of the log tail.
    size = 1 + shift + tilted + xp.abs(log_tail) + xp.where(away > 0, away * (shift + xp.abs(cut)), 0.0)
    terms = pmf + tilted + log_tail + 16 * ULP * (size + xp.abs(pmf))
    value = xp.logsumexp(xp.where(j <= order, terms, -xp.inf))
    return xp.where(cut > -xp.inf, value + _ERROR + 8 * ULP * xp.abs(value), -xp.inf)


def _tail(sigma: jax.Array, q: jax.Array, cut: jax.Array) -> jax.Array:
    """Upper bound of P(u > cut) with the record present: u ~ (1 - q) N(0, 1) + q N(1/sigma, 1)."""
    away = xp.exp(special.log_normal_tail(cut))
    shift = cut - 1 / sigma
    # Lower the shift by its rounding error: the relative error of the tail is |shift| times the error of the shift.
    shift = xp.where(xp.isfinite(shift), shift - 4 * ULP * (1 / sigma + xp.abs(shift)), shift)
    mass = ((1 - q) * away + q * xp.exp(special.log_normal_tail(shift))) * (1 + _ERROR)
    return xp.where(cut == xp.inf, 0.0, mass + SMALLEST)  # a tail may be subnormal


@theorem(order=_ORDER, **_STEP, cut=NOT_NAN, working_set=4 * _TERMS)
def cut_renyi(order: Real, noise_multiplier: Real, sampling_probability: Real, cut: Real) -> Array:
    """Renyi curve K(a - 1)/(a - 1) of one subsampled Gaussian step restricted to the outcomes below a cut.

    order: a, whole, 2 to 2047.
    noise_multiplier: sigma > 0, standard deviation of the noise / norm bound of one record.
    sampling_probability: q in (0, 1).
    cut: in standard deviations of the noise; inf gives the plain Renyi divergence.

    >>> print(f"{jaxdp.conversions.cut_renyi(32, noise_multiplier=1.0, sampling_probability=0.01, cut=6.0):.4f}")
    0.5738

    Returns an upper bound in nats of the broadcast shape, float64; it may be negative. For rounding, 1e-11/(a-1) and
    1e-15 of the size of the terms are added. Raises ValueError.
    """
    value = _log_moment(order, noise_multiplier, sampling_probability, cut) / (order - 1)
    return value + xp.where(cut > -xp.inf, 2 * ULP * xp.abs(value), 0.0)


@theorem(**_STEP, cut=NOT_NAN, vacuous=1.0)
def cut_mass(noise_multiplier: Real, sampling_probability: Real, cut: Real) -> Array:
    """Probability of an outcome above the cut in one subsampled Gaussian step, with the record present.

    noise_multiplier, sampling_probability, cut: as for `cut_renyi`.

    >>> print(f"{jaxdp.conversions.cut_mass(noise_multiplier=1.0, sampling_probability=0.01, cut=6.0):.1e}")
    3.8e-09

    Returns an upper bound in [0, 1] of the broadcast shape, float64. Raises ValueError.
    """
    return xp.minimum(_tail(noise_multiplier, sampling_probability, cut), 1.0)


@theorem(**_STEP, times=whole(1), delta=_TARGET, working_set=8 * _TERMS)
def cut_renyi_epsilon(noise_multiplier: Real, sampling_probability: Real, times: Real, delta: Real) -> Array:
    """Certified epsilon at delta of `times` Poisson-subsampled Gaussian steps, for "remove", by cut Renyi divergence.

    The smallest bound over 45 whole orders up to 2047 and five shares of delta for the tail above the cut.
    Where the cut does not help, this is the conversion of Canonne, Kamath, Steinke of the plain Renyi curve at whole
    orders, at delta less its share. For "add" the plain curve is not loose in this way: use `epsilon_from_rdp`.

    noise_multiplier, sampling_probability: as for `cut_renyi`.
    times: number of steps, whole, >= 1.
    delta: in (0, 1].

    >>> print(f"{jaxdp.conversions.cut_renyi_epsilon(1.0, 0.01, times=1000, delta=1e-6):.4f}")
    2.4176

    Returns an upper bound in nats of the broadcast shape, float64; `jaxdp.epsilon` is tighter. Raises ValueError.
    """
    orders = xp.asarray(_ORDERS)
    excess = orders - 1

    def at_share(share: jax.Array) -> jax.Array:
        cut = xp.sqrt(2 * xp.maximum(xp.log(times) - xp.log(delta * share), 0.0)) + 1 / noise_multiplier
        lost = times * _tail(noise_multiplier, sampling_probability, cut)
        room = xp.where(lost < delta, delta - lost, 1.0) * (1 - 1e-15)
        moment = xp.lax_map(lambda a: _log_moment(a, noise_multiplier, sampling_probability, cut), orders)
        gain, goal = log_gain(excess), xp.log(room)
        value = times * moment + gain - goal
        size = xp.abs(times * moment) + xp.abs(gain) + xp.abs(goal)
        return xp.where(lost < delta, xp.min((value + 1e-14 * size) / excess), xp.inf)

    return xp.maximum(xp.min(xp.lax_map(at_share, xp.asarray(_SHARES))), 0.0)
