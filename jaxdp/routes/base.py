"""What a route is, and how its answers are differentiated."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Point = Callable[[Any, Any], tuple[Any, Any]]


class Climb(abc.ABC):
    """Batched bounds in two parts, because what one pair's bounds are may save most of another pair's work."""

    @abc.abstractmethod
    def start(self, params: Any, target: Any, gap: float) -> tuple[Any, Any] | None:
        """(lower, upper) at the cheapest effort, or None where there is no such thing."""

    @abc.abstractmethod
    def finish(self, params: Any, target: Any, gap: float, floor: Any, started: Any) -> tuple[Any, Any]:
        """(lower, upper), from what ``start`` gave or from nothing (None).

        A point whose relative gap is at most ``gap``, or whose upper bound is not above ``floor``, a lower bound known
        from another pair, is left as it is.
        """


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to answer: batched kernels for concrete numbers, one-point functions for traced ones.

    params: the pytree the kernels take, leading axis the batch. epsilon, delta: (params, target) ->
    (lower, upper), batched, or a `Climb`. traced_epsilon, traced_delta: the same for one point, differentiable.
    """

    params: Any
    epsilon: Point | Climb
    delta: Point | Climb
    traced_epsilon: Point
    traced_delta: Point


def implicit_epsilon(
    bounds: Point, log_delta: Callable[[Any, Any], Any], gradient: Callable[..., Any] = jax.grad
) -> Point:
    """epsilon bounds whose derivative is that of the implicit function: -(d delta/d p)/(d delta/d eps).

    log_delta(params, eps) is a differentiable formula for log delta; the root finder is never differentiated. Both
    bounds get the same derivative. It is 0 where epsilon is 0 or infinite. gradient: `jax.grad`, or `jax.jacfwd` where
    log_delta has loops whose length is not known. Compiled as a unit: traced eagerly (a bare jax.grad) it would run
    one operation at a time.
    """

    @jax.custom_jvp
    def solve(params: Any, target: Any) -> tuple[Any, Any]:
        return bounds(params, target)

    @solve.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        params, target = primals
        lower, upper = solve(params, target)
        live = (upper > 0) & jnp.isfinite(upper)
        eps = jnp.where(live, upper, 1.0)
        by_params, by_eps = gradient(log_delta, argnums=(0, 1))(params, eps)
        by_params = jax.tree_util.tree_map(lambda g: _finite(-g / by_eps, live), by_params)
        by_target = _finite(1 / (jnp.where(target > 0, target, 1.0) * by_eps), live)
        tangent = _directional(by_params, tangents[0]) + by_target * tangents[1]
        return (lower, upper), (tangent, tangent)

    return jax.jit(solve)


def explicit_delta(
    bounds: Point, log_delta: Callable[[Any, Any], Any], gradient: Callable[..., Any] = jax.grad
) -> Point:
    """delta bounds with the derivative of the differentiable formula."""

    @jax.custom_jvp
    def solve(params: Any, eps: Any) -> tuple[Any, Any]:
        return bounds(params, eps)

    @solve.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        lower, upper = solve(*primals)
        by_params, by_eps = gradient(log_delta, argnums=(0, 1))(*primals)
        by_params = jax.tree_util.tree_map(lambda g: _finite(upper * g), by_params)
        tangent = _directional(by_params, tangents[0]) + _finite(upper * by_eps) * tangents[1]
        return (lower, upper), (tangent, tangent)

    return jax.jit(solve)


def _finite(value: Any, live: Any = True) -> Any:
    return jnp.where(live & jnp.isfinite(value), value, 0.0)


def _directional(gradient: Any, tangent: Any) -> Any:
    products = jax.tree_util.tree_map(lambda g, t: jnp.sum(g * t), gradient, tangent)
    return sum(jax.tree_util.tree_leaves(products), jnp.zeros(()))
