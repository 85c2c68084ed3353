"""Shuffled rounds: one round from its law of X, several from finite pairs around each round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.arrays import xp
from jaxdp.bounds import Bounds
from jaxdp.mechanisms.basic import RandomizedResponse
from jaxdp.mechanisms.composition import Stack, spread
from jaxdp.mechanisms.local_randomizers import KnownRandomizer
from jaxdp.mechanisms.shuffled import LossLaw, Shuffled
from jaxdp.precision import kernel
from jaxdp.roots import crossing
from jaxdp.routes.base import Answer, Point, Route, explicit_delta, implicit_epsilon, intersect, nothing
from jaxdp.routes.fourier import fourier_route
from jaxdp.shuffle import approximate_local, bounds, contour, counts, law, rounds
from jaxdp.shuffle.closed_form import clones_closed_form_point
from jaxdp.shuffle.law import Law
from jaxdp.shuffle.two_point import two_point_delta, two_point_directions, two_point_epsilon
from jaxdp.validate import is_traced

_LOWER_GAP = 0.01  # lower bounds are of one data set: their numerical error need not be small
_LOWER_SUMS = bounds.LONG_SUMS[:1]
_PROFILE_GAP, _PROFILE_SUMS = 1e-4, bounds.LONG_SUMS[:1]  # of the values between which a round's finite pair lies
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
    randomizer, users, eps0 = mechanism.randomizer, mechanism.num_users, mechanism.randomizer.max_loss()
    bound = mechanism.chosen_bound()
    if isinstance(randomizer, KnownRandomizer):
        lower = _worst(verb, lower_laws(randomizer), users, target, _LOWER_GAP, _LOWER_SUMS).lower
        two = np.flatnonzero(randomizer.num_categories == 2) if isinstance(randomizer, RandomizedResponse) else ()
        if len(two):
            exact = _TWO_POINT[verb](users[two], eps0[two], target[two])
            lower[two] = np.maximum(lower[two], exact.lower)
        if bound == "blanket":
            upper = _worst(verb, upper_laws(randomizer), users, target, gap).upper
            return Bounds(np.fmin(lower, upper), upper)
        local_delta = np.zeros(users.shape)
    else:
        lower = _TWO_POINT[verb](users, eps0, target).lower
        local_delta = randomizer.delta
    if bound == "closed_form":
        solve = _closed_form_epsilon if verb == "epsilon" else _closed_form_delta
        upper = solve((users, eps0, local_delta), target)
    else:
        upper = approximate_local.clones_upper(verb, users, eps0, local_delta, target, bound, gap)
    return Bounds(np.fmin(lower, upper), upper)


def _worst(
    verb: str, laws: Law, users: Any, target: Any, gap: float, sums: tuple[int, ...] = bounds.LONG_SUMS
) -> Bounds:
    """The largest bounds over the laws of each row."""
    pairs = laws.first.shape[1]
    flat = jax.tree_util.tree_map(lambda a: a.reshape((-1, *a.shape[2:])), laws)
    found = bounds.bounds(verb, flat, np.repeat(users, pairs), np.repeat(target, pairs), gap, sums)
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


def _answer(verb: str, params: Any, target: Any, known: Any, gap: float) -> Answer:
    if verb == "epsilon":
        return Answer(*one_round("epsilon", params, target, gap), True)
    return Answer(*_both_sides(lambda e: one_round("delta", params, e, gap), target), True)


_ONE_ROUND = {verb: functools.partial(_answer, verb) for verb in ("epsilon", "delta")}


def shuffled_route(mechanism: Shuffled, shape: tuple[int, ...]) -> Route:
    """The route of one shuffled round with the record's bound."""
    flat: Any = spread(mechanism, shape)
    local_delta = getattr(flat.randomizer, "delta", 0.0)
    clean = not is_traced(local_delta) and not np.any(np.asarray(local_delta) > 0)
    return Route(flat, (_ONE_ROUND["epsilon"],), (_ONE_ROUND["delta"],), *_traced(mechanism.chosen_bound(), clean))


# ---- the same for one traced point ----


def _point(verb: str, mechanism: Shuffled, target: Any, bound: str, clean: bool) -> tuple[Any, Any]:
    randomizer, users, eps0 = mechanism.randomizer, mechanism.num_users, mechanism.randomizer.max_loss()
    if bound == "blanket":
        upper = _worst_point(verb, randomizer.upper_laws(), users, target).upper
        return xp.minimum(_worst_point(verb, randomizer.lower_laws(), users, target).lower, upper), upper
    known = isinstance(randomizer, KnownRandomizer)
    lower = xp.zeros(()) if known else _TWO_POINT[verb].point(users, eps0, target).lower
    local_delta = xp.zeros(()) if known else randomizer.delta
    if bound == "closed_form":
        upper = (_closed_form_epsilon if verb == "epsilon" else _closed_form_delta).point(
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


def _worst_point(verb: str, laws: Law, users: Any, target: Any) -> Bounds:
    short, long = (
        (bounds.contour_delta, bounds.long_delta) if verb == "delta" else (bounds.contour_epsilon, bounds.long_epsilon)
    )

    def one(made: Law) -> Bounds:
        first, second = short.point(made, users, target), long.point(made, users, target, bounds.LONG_SUMS[0])
        return Bounds(xp.maximum(first.lower, second.lower), xp.minimum(first.upper, second.upper))

    found = xp.vmap(one)(laws)
    return Bounds(xp.max(found.lower), xp.max(found.upper))


def _log_delta(mechanism: Shuffled, epsilon: Any, bound: str) -> Any:
    """An accurate log delta of the bound in use, to be differentiated in the randomizer and epsilon; not certified."""
    randomizer, users = mechanism.randomizer, xp.stop_gradient(mechanism.num_users)
    if bound == "blanket":
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
    slow = contour.evaluate_long(made, users, epsilon, xp.where(_is_close(close), 1.0, bounds.LONG_SUMS[0]))
    return xp.where(_is_close(close), close.estimate, slow.estimate)


@functools.cache
def _traced(bound: str, clean: bool) -> tuple[Point, Point]:
    if bound == "closed_form":
        return _closed_form_points()

    def log_delta(mechanism: Shuffled, epsilon: Any) -> Any:
        return _log_delta(mechanism, epsilon, bound)

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
def _closed_form_delta(params: tuple[Any, Any, Any], eps: Any) -> Any:
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
        delta = _closed_form_delta.point(xp.stop_gradient(parameters(p)), xp.stop_gradient(eps))
        value = clones_closed_form_point.point(eps0, users, xp.stop_gradient(delta))
        slope = xp.stop_gradient(_log_slope(eps0, users, delta))
        return xp.log(xp.stop_gradient(xp.where(delta > 0, delta, 1.0))) + (value - eps) / slope

    def solve(verb: str, p: Shuffled, target: Any) -> tuple[Any, Any]:
        upper = (_closed_form_epsilon if verb == "epsilon" else _closed_form_delta).point(parameters(p), target)
        known = isinstance(p.randomizer, KnownRandomizer)
        lower = 0.0 if known else _TWO_POINT[verb].point(p.num_users, p.randomizer.max_loss(), target).lower
        return xp.minimum(lower, upper), upper

    return implicit_epsilon(functools.partial(solve, "epsilon"), smooth, jax.jacfwd), explicit_delta(
        lambda p, e: _both_sides(lambda x: solve("delta", p, x), e), smooth, jax.jacfwd
    )


def _log_slope(eps0: Any, users: Any, delta: Any) -> Any:
    """-d eps / d log delta of the closed form, > 0."""

    def at(x: Any) -> Any:
        return clones_closed_form_point.point(eps0, users, xp.exp(x))

    slope = -jax.grad(at)(xp.log(xp.where(delta > 0, delta, 0.5)))
    return xp.where(slope > 0, slope, 1.0)


# ---- composition ----


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The upper pairs' composition from above, that of the lower pairs from below."""

    verb: str
    direction: str

    def __call__(self, params: Any, target: Any, known: Any, gap: float) -> Answer:
        single = np.all([np.sum(times, axis=1) == 1 for _, times in params], axis=0) & (len(params) == 1)
        lower, upper = nothing(self.verb, target)
        for rows, solve in ((np.flatnonzero(single), self._single), (np.flatnonzero(~single), self._composed)):
            if rows.size:
                some = jax.tree_util.tree_map(lambda x, rows=rows: x[rows], params)
                lower[rows], upper[rows] = solve(some, target[rows], gap)
        return Answer(lower, upper, True)

    def _single(self, params: Any, target: Any, gap: float) -> tuple[Any, Any]:
        record, times = params[0]
        place = np.argmax(times == 1, axis=1)
        flat = jax.tree_util.tree_map(lambda x: x[np.arange(target.size), place], record)
        return _answer(self.verb, flat, target, None, gap)[:2]

    def _composed(self, params: Any, target: Any, gap: float) -> tuple[Any, Any]:
        runs = sum(np.sum(times, axis=1) for _, times in params)
        depth = -np.log(np.clip(target, 1e-300, 1.0)) if self.verb == "epsilon" else np.full(target.shape, 14.0)
        depth = depth / np.maximum(runs, 1.0)

        def side(lower: bool) -> tuple[Any, Any]:
            stacks = tuple(_finite(record, times, depth, lower) for record, times in params)
            route = fourier_route(stacks, self.direction)
            sources = route.epsilon if self.verb == "epsilon" else route.delta
            (found,) = intersect(self.verb, [sources], stacks, target, max(gap, _LOWER_GAP) if lower else gap)
            return found

        upper = side(False)[1]
        return np.fmin(side(True)[0], upper), upper


def _finite(record: Any, times: Any, depth: np.ndarray, lower: bool) -> Stack:
    """The stack, shuffled rounds replaced by finite laws that dominate them, or that they dominate (lower)."""
    if not isinstance(record, Shuffled):
        return record, times
    flat: Any = jax.tree_util.tree_map(lambda x: x.reshape((-1, *x.shape[2:])), record)
    each = np.repeat(depth, times.shape[1])
    made = _lower_law(flat, each) if lower else _upper_law(flat, each)
    return LossLaw(*(x.reshape((*times.shape, *x.shape[1:])) for x in made)), times


def _grid(flat: Shuffled, depth: np.ndarray, points: int, order: Any = 0.0) -> np.ndarray:
    randomizer = flat.randomizer
    if isinstance(randomizer, KnownRandomizer):
        laws = upper_laws(randomizer)
        # of the pairs of inputs the one with the largest loss, where delta of all pairs ends
        largest = np.argmax(np.max(np.where(laws.first > 0, laws.loss, -np.inf), axis=-1), axis=-1)
        made = jax.tree_util.tree_map(lambda a: a[np.arange(largest.size), largest], laws)
    else:
        made = bounds.clones_law(randomizer.epsilon, bound="stronger" if flat.bound == "stronger" else "clones")
    return rounds.grids(made, flat.num_users, depth, np.broadcast_to(order, depth.shape), points=points)


def _profile(flat: Shuffled, grid: np.ndarray) -> np.ndarray:
    """Upper bounds of delta on a grid, rows of epsilons."""
    tiled = jax.tree_util.tree_map(lambda a: np.repeat(a, grid.shape[1], axis=0), flat)
    if flat.chosen_bound() != "blanket":
        return one_round("delta", tiled, grid.ravel(), 1e-7).upper.reshape(grid.shape)
    lower, upper = (np.array(side).reshape(grid.shape) for side in _blanket(tiled, grid.ravel(), ()))
    # Long sums take most of the time: they are made at every fourth point, with chords between (delta is convex).
    wide = upper - lower > _PROFILE_GAP * upper
    known = ~wide | (np.arange(grid.shape[1]) % 4 == 0)
    known[:, -1] = True
    places = np.flatnonzero(known & wide)
    if places.size:
        some = jax.tree_util.tree_map(lambda a: a[places], tiled)
        upper.ravel()[places] = np.fmin(upper.ravel()[places], _blanket(some, grid.ravel()[places], _PROFILE_SUMS)[1])
        with np.errstate(over="ignore"):
            for row, odds, some in zip(upper, np.expm1(grid), known, strict=True):
                row[:] = np.fmin(row, np.interp(odds, odds[some], row[some]) * (1 + 1e-14))
    return upper


def _blanket(flat: Shuffled, epsilon: np.ndarray, sums: tuple[int, ...]) -> Bounds:
    return _worst("delta", upper_laws(flat.randomizer), flat.num_users, epsilon, _PROFILE_GAP, sums)


def _upper_law(flat: Shuffled, depth: np.ndarray, order: Any = 0.0, points: int = rounds.POINTS) -> Any:
    grid = _grid(flat, depth, points, order)
    losses, weights, infinity = rounds.upper_pair(grid, _profile(flat, grid))
    # with a positive local delta the additive term has no mass at infinity to stand for: all of it
    leaks = np.asarray(getattr(flat.randomizer, "delta", 0.0)) > 0
    return losses, weights, np.where(leaks, 1.0, infinity)


def _lower_law(flat: Shuffled, depth: np.ndarray) -> Any:
    grid = _grid(flat, depth, rounds.COARSE)
    size = grid.shape[1]
    users, epsilon = np.repeat(flat.num_users, size), grid.ravel()
    if isinstance(flat.randomizer, KnownRandomizer):
        one = jax.tree_util.tree_map(lambda a: np.repeat(a[:, 0], size, axis=0), lower_laws(flat.randomizer))
        both = [bounds.bounds("delta", side, users, epsilon, _LOWER_GAP, ()) for side in (one, one.swapped())]
    else:
        both = two_point_directions(users, np.repeat(flat.randomizer.epsilon, size), epsilon)
    return rounds.lower_pair(grid, *(Bounds(*(side.reshape(grid.shape) for side in each)) for each in both))


def dominating(stacks: tuple[Stack, ...], order: Any) -> tuple[Stack, ...]:
    """Concrete stacks, shuffled rounds replaced by finite pairs that dominate them, for moments of one order."""
    made = []
    for record, times in stacks:
        if isinstance(record, Shuffled):
            flat: Any = jax.tree_util.tree_map(lambda x: x.reshape((-1, *x.shape[2:])), record)
            orders = np.repeat(np.where(np.isfinite(order), order, 1e9), times.shape[1])
            law = _upper_law(flat, np.zeros(orders.shape), orders, rounds.MANY)
            record = LossLaw(*(x.reshape((*times.shape, *x.shape[1:])) for x in law))
        made.append((record, times))
    return tuple(made)


def rounds_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The route of a composition in which some mechanisms are shuffled rounds."""
    traced = fourier_route(stacks, direction) if is_traced(stacks) else None
    points = (traced.traced_epsilon, traced.traced_delta) if traced else (None, None)
    return Route(stacks, (_Rounds("epsilon", direction),), (_Rounds("delta", direction),), *points)
