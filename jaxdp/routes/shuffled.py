"""One shuffled round: direct, all-positive sums instead of the contour."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.hockey_stick.approximate_local import additive_term, approximate_delta_upper, approximate_epsilon_upper
from jaxdp.hockey_stick.clones import clones_delta_bounds, clones_delta_smooth, clones_epsilon_bounds
from jaxdp.hockey_stick.krr import krr_delta_bounds, krr_delta_smooth, krr_epsilon_bounds
from jaxdp.mechanisms.basic import RandomizedResponse
from jaxdp.mechanisms.composition import spread
from jaxdp.mechanisms.shuffled import Shuffled
from jaxdp.precision import kernel
from jaxdp.roots import crossing
from jaxdp.routes.base import Point, Route, explicit_delta, implicit_epsilon
from jaxdp.shuffle.closed_form import clones_closed_form_point
from jaxdp.validate import is_traced

# Parameters of every route here: (num_users, eps0, third), third the local delta or the number of categories.
Params = tuple[Any, Any, Any]


def shuffled_route(mechanism: Shuffled, shape: tuple[int, ...]) -> Route:
    """The route of one shuffled round with the record's bound."""
    flat: Any = spread(mechanism, shape)
    users, randomizer = flat.num_users, flat.randomizer
    bound = mechanism.chosen_bound()
    if bound == "blanket":
        return _krr_route((users, randomizer.epsilon, randomizer.num_categories))
    local_delta = jnp.zeros_like(users) if isinstance(randomizer, RandomizedResponse) else randomizer.delta
    params = (users, randomizer.epsilon, local_delta)
    clean = not is_traced(local_delta) and not np.any(np.asarray(local_delta) > 0)
    if bound == "closed_form":
        return _closed_form_route(params)
    if clean:
        return _clones_route((users, randomizer.epsilon, np.zeros(np.shape(users))), bound)
    return _approximate_route(params, bound)


def _clones_route(params: Params, rate: str) -> Route:
    return Route(
        params,
        lambda p, d: clones_epsilon_bounds(p[0], p[1], d, rate=rate),
        lambda p, e: _negative_side(lambda x: clones_delta_bounds(p[0], p[1], x, rate=rate), e),
        *_clones_points(rate),
    )


@functools.cache
def _clones_points(rate: str) -> tuple[Point, Point]:
    def log_delta(p: Params, eps: Any) -> Any:
        value = clones_delta_smooth.point(p[0], p[1], eps, rate=rate)
        return jnp.log(jnp.where(value > 0, value, 1.0))

    def eps_point(p: Params, d: Any) -> tuple[Any, Any]:
        return tuple(clones_epsilon_bounds.point(p[0], p[1], d, rate=rate))

    def delta_point(p: Params, e: Any) -> tuple[Any, Any]:
        return _negative_side(lambda x: clones_delta_bounds.point(p[0], p[1], x, rate=rate), e)

    return implicit_epsilon(eps_point, log_delta), explicit_delta(delta_point, log_delta)


def _negative_side(bounds: Callable[[Any], Any], eps: Any) -> tuple[Any, Any]:
    """delta at a negative eps from the symmetric pair's value at -eps: H_a = 1 - a + a H_{1/a}."""
    xp = jnp if is_traced(eps) else np
    lower, upper = bounds(xp.abs(eps))
    a = xp.exp(xp.minimum(eps, 0.0))
    floor = -xp.expm1(xp.minimum(eps, 0.0))
    negative = eps < 0
    return (
        xp.where(negative, (floor + a * lower) * (1 - 1e-15), lower),
        xp.where(negative, xp.minimum((floor + a * upper) * (1 + 1e-15), 1.0), upper),
    )


# Points whose bounds lie further apart than this are solved again with many more blocks, at twenty times the cost.
_KRR_GAP = 1e-6
_KRR_FINE = {"size": 1024, "inner_size": 512}


def _krr_route(params: Params) -> Route:
    def climb(solve: Callable[..., Any]) -> Point:
        def run(p: Params, target: Any) -> tuple[Any, Any]:
            lower, upper = (np.array(side) for side in solve(p, target))
            with np.errstate(invalid="ignore"):
                rows = np.flatnonzero(upper - lower > _KRR_GAP * upper)
            if rows.size:
                more_lower, more_upper = solve(tuple(x[rows] for x in p), target[rows], **_KRR_FINE)
                lower[rows], upper[rows] = np.fmax(lower[rows], more_lower), np.fmin(upper[rows], more_upper)
            return lower, upper

        return run

    def delta_batch(p: Params, e: Any, **sizes: int) -> tuple[Any, Any]:
        return _negative_side(lambda x: krr_delta_bounds(*p, x, **sizes), e)

    return Route(
        params,
        climb(lambda p, d, **sizes: krr_epsilon_bounds(*p, d, **sizes)),
        climb(delta_batch),
        *_krr_points(),
    )


@functools.cache
def _krr_points() -> tuple[Point, Point]:
    def log_delta(p: Params, eps: Any) -> Any:
        value = krr_delta_smooth.point(p[0], p[1], p[2], eps)
        return jnp.log(jnp.where(value > 0, value, 1.0))

    def delta_point(p: Params, e: Any) -> tuple[Any, Any]:
        return _negative_side(lambda x: krr_delta_bounds.point(*p, x), e)

    solve = implicit_epsilon(lambda p, d: tuple(krr_epsilon_bounds.point(*p, d)), log_delta)
    return solve, explicit_delta(delta_point, log_delta)


def _approximate_route(params: Params, rate: str) -> Route:
    """Approximate local DP: upper bounds; the additive term hides the truth from below, so lower is 0."""

    def epsilon_batch(p: Params, d: Any) -> tuple[Any, Any]:
        upper = approximate_epsilon_upper(*p, d, rate=rate)
        return np.zeros_like(upper), upper

    def delta_batch(p: Params, e: Any) -> tuple[Any, Any]:
        upper = approximate_delta_upper(*p, np.abs(e), rate=rate)
        return _negative_side(lambda _: (np.zeros_like(upper), upper), e)

    return Route(params, epsilon_batch, delta_batch, *_approximate_points(rate))


@functools.cache
def _approximate_points(rate: str) -> tuple[Point, Point]:
    def log_delta(p: Params, eps: Any) -> Any:
        clean = clones_delta_smooth.point(p[0], p[1], eps, rate=rate)
        total = clean + additive_term(p[0], p[1], p[2], eps, rate)
        return jnp.log(jnp.where(total > 0, total, 1.0))

    def delta_point(p: Params, e: Any) -> tuple[Any, Any]:
        upper = approximate_delta_upper.point(*p, jnp.abs(e), rate=rate)
        return _negative_side(lambda _: (jnp.zeros_like(upper), upper), e)

    solve = implicit_epsilon(lambda p, d: (jnp.zeros(()), approximate_epsilon_upper.point(*p, d, rate=rate)), log_delta)
    return solve, explicit_delta(delta_point, log_delta)


# How much of delta goes to Theorem 3.1, the rest to the local delta: any split is valid, the best is kept.
_SPLITS = np.array([0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999])


@kernel(working_set=64)
def _closed_form_epsilon(params: Params, delta: Any) -> tuple[Any, Any]:
    users, eps0, local_delta = params
    clean = clones_closed_form_point.point(eps0, users, delta)
    shares = delta * _SPLITS
    tried = jax.vmap(lambda d: clones_closed_form_point.point(eps0, users, d))(shares)
    extra = additive_term(users, eps0, local_delta, tried, "clones")
    split = jnp.min(jnp.where(extra <= delta - shares, tried, jnp.inf))
    whole = jnp.where(local_delta <= delta, eps0, jnp.inf)
    upper = jnp.where(local_delta > 0, jnp.where(delta >= 1, 0.0, jnp.minimum(split, whole)), clean)
    return jnp.zeros_like(upper), upper


@kernel(working_set=64)
def _closed_form_delta(params: Params, eps: Any) -> tuple[Any, Any]:
    users, eps0, local_delta = params

    def side(log_delta: Any) -> tuple[Any, Any]:
        return clones_closed_form_point.point(eps0, users, jnp.exp(log_delta)) - eps, -jnp.ones_like(eps)

    _, log_delta = crossing(side, jnp.asarray(-745.0), jnp.zeros(()), jnp.asarray(-10.0), rtol=1e-12, max_steps=200)
    clean = jnp.where(eps >= eps0, 0.0, jnp.exp(log_delta))
    extra = additive_term(users, eps0, local_delta, eps, "clones")
    upper = jnp.minimum(jnp.where(eps >= eps0, jnp.minimum(extra, local_delta), clean + extra), 1.0)
    return jnp.zeros_like(upper), jnp.where(jnp.isnan(upper) | (eps < 0), 1.0, upper)


def _closed_form_route(params: Params) -> Route:
    """Theorem 3.1; delta is its inverse, found by a bracketed search. A formula has no lower bound: 0."""
    return Route(params, _closed_form_epsilon, _closed_form_delta, *_closed_form_points())


@functools.cache
def _closed_form_points() -> tuple[Point, Point]:
    def smooth(p: Params, eps: Any) -> Any:
        # d eps / d(parameters) at fixed delta is all that is used: the formula itself, read as a level set
        _, delta = _closed_form_delta.point(jax.lax.stop_gradient(p), jax.lax.stop_gradient(eps))
        value = clones_closed_form_point.point(p[1], p[0], jax.lax.stop_gradient(delta))
        slope = jax.lax.stop_gradient(_log_slope(p, delta))
        return jnp.log(jax.lax.stop_gradient(jnp.where(delta > 0, delta, 1.0))) + (value - eps) / slope

    return implicit_epsilon(_closed_form_epsilon.point, smooth), explicit_delta(_closed_form_delta.point, smooth)


def _log_slope(p: Params, delta: Any) -> Any:
    """-d eps / d log delta of the closed form, > 0."""

    def at(x: Any) -> Any:
        return clones_closed_form_point.point(p[1], p[0], jnp.exp(x))

    slope = -jax.grad(at)(jnp.log(jnp.where(delta > 0, delta, 0.5)))
    return jnp.where(slope > 0, slope, 1.0)
