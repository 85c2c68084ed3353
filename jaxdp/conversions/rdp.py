"""Renyi DP to (epsilon, delta), one order at a time: the classic conversion and that of Canonne, Kamath, Steinke.

Every order gives a valid bound; the smallest over the given orders is returned. `rdp_tradeoff` uses all orders at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE_OR_INFINITE, NOT_NAN, PROBABILITY, SMALLEST, Domain
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.formulas import ORDER, checked, theorem
from jaxdp.typing import Array, Real

# Charge for the handful of operations on a term, relative to its size.
_ROUNDING = 20 * ULP
# The logarithm of the order minus 1 is searched on 64 points, then three times on 33 points around the best one.
_GRID, _ROUNDS, _LOCAL = 64, 3, 33
_LEAST_EXCESS, _LARGEST_EXCESS = 1e-3, 1e6


def log_gain(excess: Any) -> Any:
    """log of sup_x (1 - e^-x) e^-cx = c^c / (c+1)^(c+1), c = order - 1."""
    return -excess * jnp.log1p(1 / excess) - jnp.log1p(excess)


def epsilon_at_order(order, renyi, delta, infinity, sharp):
    """Certified epsilon at delta from one order; sharp: 1.0 for "cks", 0.0 for "classic"."""
    excess = order - 1
    infinity, _ = raised(infinity)
    room = jnp.where(delta > infinity, delta - infinity, 1.0)
    gain = jnp.where(sharp > 0, log_gain(excess), 0.0)
    value = renyi + (gain - jnp.log(room)) / excess
    # the rounding of delta - infinity_mass counts delta / room times
    lost = _ROUNDING * (jnp.abs(renyi) + (jnp.abs(gain) + jnp.abs(jnp.log(room)) + delta / room) / excess)
    return jnp.where(delta > infinity, jnp.maximum(value + lost, 0.0), jnp.inf)


def delta_at_order(order, renyi, epsilon, infinity, sharp):
    """Certified delta at epsilon from one order; sharp as for `epsilon_at_order`."""
    excess = order - 1
    gain = jnp.where(sharp > 0, log_gain(excess), 0.0)
    exponent = excess * (renyi - epsilon) + gain
    lost = _ROUNDING * (1 + excess * (jnp.abs(renyi) + jnp.abs(epsilon)) + jnp.abs(gain))
    exponent = jnp.where(jnp.isinf(renyi), jnp.inf, jnp.where(epsilon == jnp.inf, -jnp.inf, exponent + lost))
    finite = jnp.where(exponent == -jnp.inf, 0.0, jnp.maximum(jnp.exp(jnp.minimum(exponent, 1.0)), SMALLEST))
    return jnp.minimum(raised(infinity)[0] * (1 + _ROUNDING) + finite, 1.0)


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

    orders: a > 1, last axis. None, with a callable renyi: orders from 1.001 to 1e6 are searched.
    renyi: upper bounds rho_a of the Renyi divergence in nats, last axis that of the orders, inf where unknown; or a
        callable, elementwise from an array of orders to an array of the same shape.
    delta: in [0, 1]; broadcasts with the leading axes of renyi.
    infinity_mass: upper bound of P(L = inf) in [0, 1], where renyi is that of the finite part of the loss L.
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

    The smallest value over the orders a of e^{(a-1)(rho_a - eps)} (a-1)^{a-1}/a^a ("cks"), without the last factor for
    "classic", plus infinity_mass.

    orders, renyi, infinity_mass, method: as for `epsilon_from_rdp`.
    epsilon: in nats, any real number; broadcasts with the leading axes of renyi.

    >>> orders = [2.0, 4.0, 8.0, 16.0]
    >>> print(f"{jaxdp.conversions.delta_from_rdp(orders, [a / 8 for a in orders], 2.5):.2e}")
    1.35e-06

    Returns delta in [0, 1], float64, of the broadcast shape without the axis of orders. Rounding is added outward.
    Raises ValueError, also for unequal lengths.
    Reference: As `epsilon_from_rdp`.
    """
    return _smallest(_delta_at_orders, orders, renyi, infinity_mass, method, epsilon=(NOT_NAN, epsilon))


def named_scalars(target: dict[str, tuple[Domain, Any]], infinity_mass: Real) -> dict[str, Any]:
    """The target, given as {name: (domain, value)}, and the mass at infinity: checked, by name."""
    arguments = target | {"infinity_mass": (PROBABILITY, infinity_mass)}
    return dict(zip(arguments, checked(**arguments), strict=True))


def _smallest(
    formula_: Callable, orders: Any, renyi: Any, infinity_mass: Real, method: str, **target: tuple[Domain, Real]
) -> Array:
    """The smallest value of the formula over the orders; target: delta or epsilon, as (check, value)."""
    sharp = 1.0 if validate.choice("method", method, ("cks", "classic")) == "cks" else 0.0
    scalars = named_scalars(target, infinity_mass)
    shape = validate.broadcast(**scalars)
    xp = jnp if validate.is_traced(scalars, orders, renyi) else np
    goal, infinity = (xp.broadcast_to(xp.asarray(a), shape)[..., None] for a in scalars.values())

    def bounds(at: Any, values: Any) -> Any:
        return formula_(at, values, goal, infinity, sharp)

    if callable(renyi) and orders is None:
        return _search(bounds, renyi, shape)
    at, values = renyi_curve(orders, renyi(np.asarray(orders, np.float64)) if callable(renyi) else renyi)
    lead = {name: np.empty(np.shape(a)[:-1]) for name, a in (("orders", at), ("renyi", values))}
    validate.broadcast(**lead, **scalars)
    return bounds(at, values).min(axis=-1)[()]


def renyi_curve(orders: Any, renyi: Any, domain: Domain = ORDER, name: str = "renyi") -> tuple[Any, Any]:
    """Orders in the domain, and values >= 0 or inf, checked under `name`; their last axes agree."""
    (orders,) = checked(orders=(domain, orders))
    if not validate.is_traced(renyi):
        renyi = validate.real_array(name, renyi)
        validate.reject(name, renyi, ~(renyi >= 0), ">= 0 or inf")
    first, second = np.shape(orders), np.shape(renyi)
    if not first or not second or first[-1] != second[-1]:
        raise ValueError(f"orders and {name} must have the same last axis, got shapes {first} and {second}.")
    if first[-1] == 0:
        raise ValueError("orders must not be empty.")
    return orders, renyi


def _search(bounds: Callable, renyi: Callable, shape: tuple[int, ...]) -> Any:
    """The smallest bound found over the orders; every order is valid, so the search affects tightness only."""
    log_excess = np.broadcast_to(np.linspace(np.log(_LEAST_EXCESS), np.log(_LARGEST_EXCESS), _GRID), (*shape, _GRID))
    best = np.full(shape, np.inf)
    for _ in range(_ROUNDS):
        at, values = renyi_curve(1 + np.exp(log_excess), renyi(1 + np.exp(log_excess)))
        out = np.asarray(bounds(at, np.broadcast_to(values, at.shape)))
        best = np.minimum(best, out.min(-1))
        middle = np.clip(out.argmin(-1)[..., None], 1, log_excess.shape[-1] - 2)
        low, high = (np.take_along_axis(log_excess, middle + side, -1) for side in (-1, 1))
        log_excess = low + (high - low) * np.linspace(0, 1, _LOCAL)
    return best[()]
