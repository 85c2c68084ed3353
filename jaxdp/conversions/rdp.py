"""Renyi DP to (epsilon, delta), one order at a time: the classic conversion and that of Canonne, Kamath, Steinke.

Every order gives a valid bound; the smallest over the given orders is returned. `optimal` in `rdp_tradeoff` uses all
orders at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.formulas import above_one, formula

METHODS = ("cks", "classic")
# Twenty units of roundoff of every term: more than the handful of operations can lose.
_ROUNDING = 20 * ULP
# XLA flushes smaller numbers to 0: what is below is charged this much.
TINY = 2.0**-1022
# One octave of the order is refined to 2^-15 of an octave in three rounds of 33 points.
_GRID, _ROUNDS, _LOCAL = 64, 3, 33
_SMALLEST, _LARGEST = 1e-3, 1e6


def _log_gain(excess: Any) -> Any:
    """log of sup_x (1 - e^-x) e^-cx = c^c / (c+1)^(c+1), c = order - 1."""
    return -excess * jnp.log1p(1 / excess) - jnp.log1p(excess)


def _gain(excess: Any, sharp: Any) -> Any:
    return jnp.where(sharp > 0, _log_gain(excess), 0.0)


@formula(valid=lambda a, r, d, p, s: (a > 1) & (a < jnp.inf) & (d > p))
def _epsilon_at_order(order, renyi, delta, infinity, sharp):
    excess = order - 1
    room = jnp.where(delta > infinity, delta - infinity, 1.0)
    gain = _gain(excess, sharp)
    value = renyi + (gain - jnp.log(room)) / excess
    # delta - infinity is rounded too: its relative error grows with the cancellation
    lost = _ROUNDING * (jnp.abs(renyi) + (jnp.abs(gain) + jnp.abs(jnp.log(room)) + delta / room) / excess)
    return jnp.maximum(value + lost, 0.0)


@formula(valid=lambda a, r, e, p, s: (a > 1) & (a < jnp.inf), vacuous=1.0)
def _delta_at_order(order, renyi, epsilon, infinity, sharp):
    excess = order - 1
    gain = _gain(excess, sharp)
    exponent = excess * (renyi - epsilon) + gain
    lost = _ROUNDING * (1 + excess * (jnp.abs(renyi) + jnp.abs(epsilon)) + jnp.abs(gain))
    exponent = jnp.where(jnp.isinf(renyi), jnp.inf, jnp.where(epsilon == jnp.inf, -jnp.inf, exponent + lost))
    finite = jnp.where(exponent == -jnp.inf, 0.0, jnp.maximum(jnp.exp(jnp.minimum(exponent, 1.0)), TINY))
    return jnp.minimum(infinity * (1 + _ROUNDING) + finite, 1.0)


def epsilon_from_rdp(orders: Any, renyi: Any, delta: Any, *, infinity_mass: Any = 0.0, method: str = "cks") -> Any:
    """Certified epsilon at delta of a mechanism with the given Renyi curve.

    cks: eps = rho_a + [log(1/delta) + (a-1) log(1 - 1/a) - log a]/(a-1); classic: eps = rho_a + log(1/delta)/(a-1);
    the minimum over the orders.

    Args:
        orders: a > 1, last axis; None (with a callable) searches orders from 1.001 to 1e6.
        renyi: upper bounds rho_a of the Renyi divergence, last axis that of the orders (inf where unknown); or a
            callable, elementwise from an array of orders to an array of the same shape.
        delta: in [0, 1]; broadcasts with the leading axes of renyi. Shape of the result.
        infinity_mass: an upper bound on P(L = inf), when renyi is that of the finite part.
        method: "cks" or "classic".

    Returns:
        Epsilon >= 0, NumPy float64; inf where delta <= infinity_mass. Rounding is added outward.

    Reference:
        Canonne, Kamath, Steinke 2020, Proposition 12; Mironov 2017, Proposition 3.

    """
    return _smallest(_epsilon_at_order, orders, renyi, infinity_mass, method, delta=_delta_target(delta))


def delta_from_rdp(orders: Any, renyi: Any, epsilon: Any, *, infinity_mass: Any = 0.0, method: str = "cks") -> Any:
    """Certified delta at epsilon of a mechanism with the given Renyi curve.

    cks: delta = e^{(a-1)(rho_a - eps)} (a-1)^{a-1}/a^a; classic without the last factor; the minimum over the orders,
    plus infinity_mass, at most 1. Arguments, shapes and reference as for `epsilon_from_rdp`; epsilon any real number.
    """
    return _smallest(_delta_at_order, orders, renyi, infinity_mass, method, epsilon=real_target("epsilon", epsilon))


def real_target(name: str, value: Any) -> Any:
    """A real number, +-inf allowed, NaN not; a tracer passes."""
    if validate.is_traced(value):
        return value
    array = validate.real_array(name, value)
    validate.reject(name, array, np.isnan(array), "a real number, inf or -inf")
    return array


def infinity_bound(mass: Any) -> Any:
    """An upper bound on P(L = inf), checked; a subnormal one is raised to the smallest normal number."""
    if validate.is_traced(mass):
        return mass
    mass = validate.probability("infinity_mass", mass)
    return np.where(mass > 0, np.maximum(mass, TINY), 0.0)


def _delta_target(delta: Any) -> Any:
    return delta if validate.is_traced(delta) else validate.probability("delta", delta)


def _smallest(formula_: Callable, orders: Any, renyi: Any, infinity_mass: Any, method: str, **named: Any) -> Any:
    (target,) = named.values()
    sharp = 1.0 if validate.choice("method", method, METHODS) == "cks" else 0.0
    infinity_mass = infinity_bound(infinity_mass)
    shape = validate.broadcast(**named, infinity_mass=infinity_mass)
    xp = jnp if validate.is_traced(target, infinity_mass, orders, renyi) else np
    goal, infinity = (xp.broadcast_to(xp.asarray(a), shape)[..., None] for a in (target, infinity_mass))

    def bounds(at: Any, values: Any) -> Any:
        return formula_(at, values, goal, infinity, sharp)

    if callable(renyi) and orders is None:
        return _search(bounds, renyi, shape)
    at, values = renyi_curve(orders, renyi(np.asarray(orders, np.float64)) if callable(renyi) else renyi)
    lead = {name: np.empty(np.shape(a)[:-1]) for name, a in (("orders", at), ("renyi", values))}
    validate.broadcast(**lead, **named, infinity_mass=infinity_mass)
    out = bounds(at, values)
    return out.min(axis=-1)[()]


def renyi_curve(orders: Any, renyi: Any, check: Callable = above_one, name: str = "renyi") -> tuple[Any, Any]:
    """Orders and values, checked: orders by ``check``, values (``name``) >= 0 or inf, the same last axis."""
    orders = orders if validate.is_traced(orders) else check("orders", orders)
    if not validate.is_traced(renyi):
        renyi = validate.real_array(name, renyi)
        validate.reject(name, renyi, ~(renyi >= 0), ">= 0 or inf")
    if np.ndim(orders) == 0 or np.ndim(renyi) == 0 or np.shape(orders)[-1] != np.shape(renyi)[-1]:
        raise ValueError(
            f"orders and {name} must have the same last axis, got shapes {np.shape(orders)} and {np.shape(renyi)}."
        )
    if np.shape(orders)[-1] == 0:
        raise ValueError("orders must not be empty.")
    return orders, renyi


def _search(bounds: Callable, renyi: Callable, shape: tuple[int, ...]) -> Any:
    """Every order is valid, so the search decides how tight the bound is, never whether it holds."""
    log_excess = np.broadcast_to(np.linspace(np.log(_SMALLEST), np.log(_LARGEST), _GRID), (*shape, _GRID))
    best = np.full(shape, np.inf)
    for _ in range(_ROUNDS):
        at, values = renyi_curve(1 + np.exp(log_excess), renyi(1 + np.exp(log_excess)))
        out = np.asarray(bounds(at, np.broadcast_to(values, at.shape)))
        best = np.minimum(best, out.min(-1))
        middle = np.clip(out.argmin(-1)[..., None], 1, log_excess.shape[-1] - 2)
        low, high = (np.take_along_axis(log_excess, middle + side, -1) for side in (-1, 1))
        log_excess = low + (high - low) * np.linspace(0, 1, _LOCAL)
    return best[()]
