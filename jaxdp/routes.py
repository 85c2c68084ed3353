"""Which kernel answers for which mechanism, and how its answers are differentiated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import numpy as np

from jaxdp.fourier import contour, derivative
from jaxdp.fourier.contour import Effort
from jaxdp.hockey_stick import gaussian
from jaxdp.mechanisms.base import GaussianMechanism, Mechanism
from jaxdp.mechanisms.composition import Stack, is_gaussian, normal_form
from jaxdp.mechanisms.spectrum import is_sampled_gaussian, spectrum
from jaxdp.precision import kernel

Point = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to answer: batched kernels for concrete numbers, one-point functions for traced ones.

    params: the pytree the kernels take, leading axis the batch. epsilon, delta: (params, target) ->
    (lower, upper), batched. traced_epsilon, traced_delta: the same for one point, differentiable.
    """

    params: Any
    epsilon: Point
    delta: Point
    traced_epsilon: Point
    traced_delta: Point


def implicit_epsilon(bounds: Point, log_delta: Callable[[Any, Any], Any]) -> Point:
    """epsilon bounds whose derivative is that of the implicit function: -(d delta/d p)/(d delta/d eps).

    log_delta(params, eps) is a differentiable formula for log delta; the root finder is never
    differentiated. Both bounds get the same derivative. It is 0 where epsilon is 0 or infinite.
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
        by_params, by_eps = jax.grad(log_delta, argnums=(0, 1))(params, eps)
        by_params = jax.tree_util.tree_map(lambda g: _finite(-g / by_eps, live), by_params)
        by_target = _finite(1 / (jnp.where(target > 0, target, 1.0) * by_eps), live)
        tangent = _directional(by_params, tangents[0]) + by_target * tangents[1]
        return (lower, upper), (tangent, tangent)

    return solve


def explicit_delta(bounds: Point, log_delta: Callable[[Any, Any], Any]) -> Point:
    """delta bounds with the derivative of the differentiable formula."""

    @jax.custom_jvp
    def solve(params: Any, eps: Any) -> tuple[Any, Any]:
        return bounds(params, eps)

    @solve.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        lower, upper = solve(*primals)
        by_params, by_eps = jax.grad(log_delta, argnums=(0, 1))(*primals)
        by_params = jax.tree_util.tree_map(lambda g: _finite(upper * g), by_params)
        tangent = _directional(by_params, tangents[0]) + _finite(upper * by_eps) * tangents[1]
        return (lower, upper), (tangent, tangent)

    return solve


def _finite(value: Any, live: Any = True) -> Any:
    return jnp.where(live & jnp.isfinite(value), value, 0.0)


def _directional(gradient: Any, tangent: Any) -> Any:
    products = jax.tree_util.tree_map(lambda g, t: jnp.sum(g * t), gradient, tangent)
    return sum(jax.tree_util.tree_leaves(products), jnp.zeros(()))


def choose_route(mechanism: Mechanism, direction: str, shape: tuple[int, ...]) -> Route:
    """The route for one dominating pair of a mechanism, its parameters spread over ``shape``."""
    stacks = normal_form(mechanism, shape)
    if is_gaussian(mechanism):
        return _gaussian_route(stacks)
    return _fourier_route(stacks, direction)


def total_mu2(stacks: tuple[Stack, ...]) -> Any:
    """Sum of count x mu^2 over the Gaussian mechanisms of one point."""
    total = jnp.zeros(())
    for record, times in stacks:
        if isinstance(record, GaussianMechanism):
            mu = jax.vmap(lambda r: r.gaussian_mu())(record)
            # 0 runs of an infinitely leaky mechanism leak nothing
            total = total + jnp.sum(jnp.where(times > 0, times * mu**2, 0.0))
    return total


def _mu(stacks: tuple[Stack, ...]) -> Any:
    mu2 = total_mu2(stacks) * (1 + 1e-14)
    return jnp.where(mu2 > 0, jnp.sqrt(jnp.where(mu2 > 0, mu2, 1.0)), 0.0)


@kernel(working_set=512)
def _gaussian_epsilon(stacks: tuple[Stack, ...], delta: Any) -> tuple[Any, Any]:
    return gaussian.epsilon_bounds(_mu(stacks), delta)


@kernel(working_set=512)
def _gaussian_delta(stacks: tuple[Stack, ...], eps: Any) -> tuple[Any, Any]:
    return gaussian.delta_bounds(_mu(stacks), eps)


def _gaussian_log_delta(stacks: tuple[Stack, ...], eps: Any) -> Any:
    return gaussian.smooth_delta(_mu(stacks), eps)


_traced_gaussian_epsilon = implicit_epsilon(_gaussian_epsilon.point, _gaussian_log_delta)
_traced_gaussian_delta = explicit_delta(_gaussian_delta.point, _gaussian_log_delta)


def _gaussian_route(stacks: tuple[Stack, ...]) -> Route:
    return Route(
        stacks, _gaussian_epsilon, _gaussian_delta, _traced_gaussian_epsilon, _traced_gaussian_delta
    )


# Efforts, cheapest first: a point climbs until its gap is small enough. (nodes, quadrature, cover, smooth)
_SAMPLED_LADDER = (
    Effort(128, 256, 64, False),
    Effort(512, 512, 128, False),
    Effort(4096, 1024, 256, False),
    Effort(32768, 1024, 1024, True),
    Effort(262144, 4096, 4096, True),
)
_GAUSSIAN_LADDER = (
    Effort(128, 1, 1, False),
    Effort(1024, 1, 1, False),
    Effort(16384, 1, 1, True),
    Effort(262144, 1, 1, True),
)
_PLAIN_LADDER = (Effort(4096, 1, 1, True), Effort(32768, 1, 1, True), Effort(262144, 1, 1, True))
_GAP = 1e-7  # relative gap at which a point stops climbing


@kernel(static=("direction", "effort"), working_set=40000)
def _fourier_epsilon(stacks: tuple[Stack, ...], delta: Any, *, direction: str, effort: Effort) -> tuple[Any, Any]:
    return contour.epsilon_bounds(spectrum(stacks, direction), delta, effort)


@kernel(static=("direction", "effort"), working_set=40000)
def _fourier_delta(stacks: tuple[Stack, ...], eps: Any, *, direction: str, effort: Effort) -> tuple[Any, Any]:
    return contour.delta_bounds(spectrum(stacks, direction), eps, effort)


def _ladder(stacks: tuple[Stack, ...]) -> tuple[Effort, ...]:
    if any(is_sampled_gaussian(record) for record, _ in stacks):
        return _SAMPLED_LADDER
    if any(isinstance(record, GaussianMechanism) for record, _ in stacks):
        return _GAUSSIAN_LADDER
    return _PLAIN_LADDER


def climb(solve: Callable[..., tuple[Any, Any]], ladder: tuple[Effort, ...], params: Any, target: Any) -> tuple[Any, Any]:
    """Bounds of every point, each at the cheapest effort that closes its gap; the best of all tries counts."""
    lower, upper = solve(params, target, effort=ladder[0])
    for effort in ladder[1:]:
        with np.errstate(invalid="ignore"):
            wide = ~(upper - lower <= _GAP * upper) & ~((upper == np.inf) & (lower == np.inf))
        rows = np.flatnonzero(wide)
        if rows.size == 0:
            break
        some = jax.tree_util.tree_map(lambda x, r=rows: x[r], params)
        more_lower, more_upper = solve(some, target[rows], effort=effort)
        lower[rows] = np.fmax(lower[rows], more_lower)
        upper[rows] = np.fmin(upper[rows], more_upper)
    return lower, upper


def _fourier_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    ladder = _ladder(stacks)
    traced = (ladder[1], ladder[-2])

    def batched(solve: Any) -> Point:
        return lambda params, target: climb(functools.partial(solve, direction=direction), ladder, params, target)

    def log_delta(params: Any, eps: Any) -> Any:
        return derivative.log_delta(lambda p: spectrum(p, direction), params, eps, traced[0])

    def point(solve: Callable[..., tuple[Any, Any]]) -> Point:
        def run(params: Any, target: Any) -> tuple[Any, Any]:
            made = spectrum(params, direction)
            lower, upper = solve(made, target, traced[0])
            more_lower, more_upper = jax.lax.cond(
                upper - lower <= 1e-6 * upper,
                lambda: (lower, upper),
                lambda: solve(made, target, traced[1]),
            )
            return jnp.maximum(lower, more_lower), jnp.minimum(upper, more_upper)

        return run

    return Route(
        stacks,
        batched(_fourier_epsilon),
        batched(_fourier_delta),
        implicit_epsilon(point(contour.epsilon_bounds), log_delta),
        explicit_delta(point(contour.delta_bounds), log_delta),
    )
