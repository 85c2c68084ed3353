"""One shuffled round, from its law of X. Several: `jaxdp.sources.shuffled_rounds`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.interval import Bounds
from jaxdp.mechanisms.basic import RandomizedResponse
from jaxdp.mechanisms.composition import spread
from jaxdp.mechanisms.local_randomizers import KnownRandomizer
from jaxdp.mechanisms.shuffled import Shuffled
from jaxdp.numerics.roots import crossing
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import kernel
from jaxdp.shuffle import approximate_local, bounds, contour, counts, law
from jaxdp.shuffle.closed_form import clones_closed_form_point
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.two_point import two_point_delta, two_point_epsilon
from jaxdp.sources.base import Answer, Point, Route, explicit_delta, implicit_epsilon
from jaxdp.validate import is_traced

LOWER_GAP = 0.01  # lower bounds are of one data set: their numerical error need not be small
LOWER_NODES = bounds.FEWEST_NODES
_TWO_POINT = {"delta": two_point_delta, "epsilon": two_point_epsilon}


@kernel(working_set=100_000, by_numpy=64)
def upper_laws(randomizer: KnownRandomizer) -> Law:
    """Laws of X for the upper bound, leading axes (batch, pairs of inputs)."""
    return randomizer.upper_laws()


@kernel(working_set=100_000, by_numpy=64)
def lower_laws(randomizer: KnownRandomizer) -> Law:
    """Laws of X for the lower bound, leading axes (batch, data sets)."""
    return randomizer.lower_laws()


def one_round(verb: str, mechanism: Shuffled, target: np.ndarray, gap: float) -> Bounds:
    """Bounds of "delta" (at epsilon >= 0) or "epsilon" (verb) of one round; flat concrete fields."""
    randomizer, bound = mechanism.randomizer, mechanism.chosen_bound()
    users, eps0 = np.asarray(mechanism.num_users), np.asarray(randomizer.max_loss())
    if isinstance(randomizer, KnownRandomizer):
        lower = worst(verb, lower_laws(randomizer), users, target, LOWER_GAP, LOWER_NODES).lower
        two = np.flatnonzero(randomizer.num_categories == 2) if isinstance(randomizer, RandomizedResponse) else ()
        if len(two):
            exact = _TWO_POINT[verb](users[two], eps0[two], target[two])
            lower[two] = np.maximum(lower[two], exact.lower)
        if bound == "blanket":
            upper = worst(verb, upper_laws(randomizer), users, target, gap).upper
            return Bounds(np.fmin(lower, upper), upper)
        local_delta = np.zeros(users.shape)
    else:
        lower = _TWO_POINT[verb](users, eps0, target).lower
        local_delta = np.asarray(randomizer.delta)
    if bound == "closed_form":
        solve = _closed_form_epsilon if verb == "epsilon" else closed_form_delta
        upper = solve((users, eps0, local_delta), target)
    else:
        upper = approximate_local.clones_upper(verb, users, eps0, local_delta, target, bound, gap)
    return Bounds(np.fmin(lower, upper), upper)


def worst(verb: str, laws: Law, users: Any, target: Any, gap: Any, most: int = bounds.MOST_NODES) -> Bounds:
    """The largest bounds over the laws of each row; gap and most: as for `bounds.bounds`."""
    pairs = laws.first.shape[1]
    flat = jax.tree_util.tree_map(lambda a: a.reshape((-1, *a.shape[2:])), laws)
    gaps = np.repeat(np.broadcast_to(gap, users.shape), pairs)
    found = bounds.bounds(verb, flat, np.repeat(users, pairs), np.repeat(target, pairs), gaps, most)
    return Bounds(*(side.reshape(-1, pairs).max(axis=1) for side in found))


def _both_sides(delta: Callable[[Any], Any], epsilon: Any) -> tuple[Any, Any]:
    """delta at an epsilon of any sign, from a symmetric profile: H_a = 1 - a + a H_{1/a}."""
    xp = jnp if is_traced(epsilon) else np
    lower, upper = delta(xp.abs(epsilon))
    a, least = xp.exp(xp.minimum(epsilon, 0.0)), -xp.expm1(xp.minimum(epsilon, 0.0))
    negative = epsilon < 0
    return (
        xp.where(negative, (least + a * lower) * (1 - 1e-15), lower),
        xp.where(negative, xp.minimum((least + a * upper) * (1 + 1e-15), 1.0), upper),
    )


def one_round_answer(verb: str, params: Any, target: Any, known: Any, gap: float) -> Answer:
    """The source of one shuffled round: bounds of epsilon at a delta, or of delta at an epsilon of any sign."""
    if verb == "epsilon":
        return Answer(*one_round("epsilon", params, target, gap), True)
    return Answer(*_both_sides(lambda e: one_round("delta", params, e, gap), target), True)


_ONE_ROUND = {verb: functools.partial(one_round_answer, verb) for verb in ("epsilon", "delta")}


def shuffled_route(mechanism: Shuffled, shape: tuple[int, ...]) -> Route:
    """The route of one shuffled round with the record's bound."""
    flat: Any = spread(mechanism, shape)
    local_delta = getattr(flat.randomizer, "delta", 0.0)
    clean = not is_traced(local_delta) and not np.any(np.asarray(local_delta) > 0)
    return Route(flat, (_ONE_ROUND["epsilon"],), (_ONE_ROUND["delta"],), *_traced(mechanism.chosen_bound(), clean))


# ---- the same for one traced point ----


def _point(verb: str, mechanism: Shuffled, target: Any, bound: str, clean: bool) -> tuple[Any, Any]:
    randomizer, users, eps0 = mechanism.randomizer, mechanism.num_users, mechanism.randomizer.max_loss()
    if bound == "blanket" and isinstance(randomizer, KnownRandomizer):
        upper = worst_point(verb, randomizer.upper_laws(), users, target).upper
        return xp.minimum(_lower_point(verb, mechanism, target), upper), upper
    lower = _lower_point(verb, mechanism, target)
    local_delta = xp.asarray(getattr(randomizer, "delta", 0.0))
    if bound == "closed_form":
        upper = (_closed_form_epsilon if verb == "epsilon" else closed_form_delta).point(
            (users, eps0, local_delta), target
        )
        return xp.minimum(lower, upper), upper
    if clean or verb == "delta":
        upper = bounds.clones_point(verb, eps0, users, target, bound).upper
        if not clean:
            upper = approximate_local.delta_upper(upper, users, eps0, local_delta, target, bound)
        return xp.minimum(lower, upper), upper

    def exact(d: Any) -> Any:
        return bounds.clones_point("epsilon", eps0, users, d, bound).upper

    upper = approximate_local.epsilon_upper(exact, users, eps0, local_delta, target, bound, xp.fori_loop)
    return xp.minimum(lower, upper), upper


def _lower_point(verb: str, mechanism: Shuffled, target: Any) -> Any:
    """The lower bound of some data set."""
    randomizer, users = mechanism.randomizer, mechanism.num_users
    if isinstance(randomizer, KnownRandomizer):
        return worst_point(verb, randomizer.lower_laws(), users, target).lower
    return _TWO_POINT[verb].point(users, randomizer.max_loss(), target).lower


def worst_point(verb: str, laws: Law, users: Any, target: Any) -> Bounds:
    """The largest bounds of "delta", "log_delta" or "epsilon" (verb) over laws, at one traced point."""
    if verb == "delta":
        return bounds.from_logs(worst_point("log_delta", laws, users, target))
    short, long = (
        (bounds.contour_epsilon, bounds.long_epsilon)
        if verb == "epsilon"
        else (bounds.contour_log_delta, bounds.long_log_delta)
    )

    def one(made: Law) -> Bounds:
        first = short.point(made, users, target)
        known = (first,) if verb == "epsilon" else ()
        second = long.point(made, users, target, *known, float(bounds.FEWEST_NODES))
        return Bounds(xp.maximum(first.lower, second.lower), xp.minimum(first.upper, second.upper))

    found = xp.vmap(one)(laws)
    return Bounds(xp.max(found.lower), xp.max(found.upper))


def log_delta_estimate(mechanism: Shuffled, epsilon: Any, bound: str) -> Any:
    """An accurate log delta of the bound in use, to be differentiated in the randomizer and epsilon; not certified."""
    randomizer, users = mechanism.randomizer, xp.stop_gradient(mechanism.num_users)
    if bound == "blanket" and isinstance(randomizer, KnownRandomizer):
        each = xp.vmap(lambda made: _estimate(made, users, epsilon))(randomizer.upper_laws())
        return xp.max(each)
    eps0 = randomizer.max_loss()
    made = law.clones(eps0, bound)
    close = contour.evaluate(made, users, epsilon)
    slow = counts.evaluate(made, users, epsilon, wanted=~_is_close(close))
    clean = xp.where(_is_close(close), close.estimate, slow.estimate)
    local_delta = getattr(randomizer, "delta", 0.0)
    extra = approximate_local.additive_term(users, eps0, xp.asarray(local_delta), epsilon, bound)
    return xp.where(extra > 0, xp.logaddexp(clean, xp.log(xp.where(extra > 0, extra, 1.0))), clean)


def _is_close(seen: Any) -> Any:
    return xp.stop_gradient(seen.upper - seen.lower) < 1e-5


def _estimate(made: Law, users: Any, epsilon: Any) -> Any:
    close = contour.evaluate(made, users, epsilon)
    slow = contour.evaluate_long(made, users, epsilon, xp.where(_is_close(close), 1.0, float(bounds.FEWEST_NODES)))
    return xp.where(_is_close(close), close.estimate, slow.estimate)


@functools.cache
def _traced(bound: str, clean: bool) -> tuple[Point, Point]:
    if bound == "closed_form":
        return _closed_form_points()

    def log_delta(mechanism: Shuffled, epsilon: Any) -> Any:
        return log_delta_estimate(mechanism, epsilon, bound)

    def delta_point(p: Shuffled, e: Any) -> tuple[Any, Any]:
        return _both_sides(lambda x: _point("delta", p, x, bound, clean), e)

    return (
        implicit_epsilon(lambda p, d: _point("epsilon", p, d, bound, clean), log_delta, jax.jacfwd),
        explicit_delta(delta_point, log_delta, jax.jacfwd),
    )


# How much of delta goes to Theorem 3.1, the rest to the local delta: any split is valid, the best is kept.
_SPLITS = np.array([0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999])


@kernel(working_set=64, by_numpy=1024)
def _closed_form_epsilon(params: tuple[Any, Any, Any], delta: Any) -> Any:
    users, eps0, local_delta = params
    clean = clones_closed_form_point.point(eps0, users, delta)
    shares = delta * _SPLITS
    tried = xp.vmap(lambda d: clones_closed_form_point.point(eps0, users, d))(shares)
    extra = approximate_local.additive_term(users, eps0, local_delta, tried, "clones")
    split = xp.min(xp.where(extra <= delta - shares, tried, xp.inf))
    whole = xp.where(local_delta <= delta, eps0, xp.inf)
    return xp.where(local_delta > 0, xp.where(delta >= 1, 0.0, xp.minimum(split, whole)), clean)


@kernel(working_set=64, by_numpy=1024)
def closed_form_delta(params: tuple[Any, Any, Any], eps: Any) -> Any:
    """Upper bound of delta at an epsilon: the closed form inverted; params are users, eps0 and the local delta."""
    users, eps0, local_delta = params

    def side(log_delta: Any) -> tuple[Any, Any]:
        return clones_closed_form_point.point(eps0, users, xp.exp(log_delta)) - eps, -xp.ones_like(eps)

    _, log_delta = crossing(side, xp.asarray(-745.0), xp.zeros(()), xp.asarray(-10.0), rtol=1e-12, max_steps=200)
    clean = xp.where(eps >= eps0, 0.0, xp.exp(log_delta))
    upper = approximate_local.delta_upper(clean, users, eps0, local_delta, eps, "clones")
    return xp.where(xp.isnan(upper) | (eps < 0), 1.0, upper)


@functools.cache
def _closed_form_points() -> tuple[Point, Point]:
    def parameters(p: Shuffled) -> tuple[Any, Any, Any]:
        return p.num_users, p.randomizer.max_loss(), xp.asarray(getattr(p.randomizer, "delta", 0.0))

    def smooth(p: Shuffled, eps: Any) -> Any:
        # d eps / d(parameters) at fixed delta is all that is used: the formula itself, read as a level set
        users, eps0, _ = parameters(p)
        delta = closed_form_delta.point(xp.stop_gradient(parameters(p)), xp.stop_gradient(eps))
        value = clones_closed_form_point.point(eps0, users, xp.stop_gradient(delta))
        slope = xp.stop_gradient(_log_slope(eps0, users, delta))
        return xp.log(xp.stop_gradient(xp.where(delta > 0, delta, 1.0))) + (value - eps) / slope

    def solve(verb: str, p: Shuffled, target: Any) -> tuple[Any, Any]:
        upper = (_closed_form_epsilon if verb == "epsilon" else closed_form_delta).point(parameters(p), target)
        return xp.minimum(_lower_point(verb, p, target), upper), upper

    return implicit_epsilon(functools.partial(solve, "epsilon"), smooth, jax.jacfwd), explicit_delta(
        lambda p, e: _both_sides(lambda x: solve("delta", p, x), e), smooth, jax.jacfwd
    )


def _log_slope(eps0: Any, users: Any, delta: Any) -> Any:
    """-d eps / d log delta of the closed form, > 0."""

    def at(x: Any) -> Any:
        return clones_closed_form_point.point(eps0, users, xp.exp(x))

    slope = -jax.grad(at)(xp.log(xp.where(delta > 0, delta, 0.5)))
    return xp.where(slope > 0, slope, 1.0)
