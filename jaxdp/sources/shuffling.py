"""One shuffled round, from the law of X (`jaxdp.shuffle.law`). Several rounds: `jaxdp.sources.shuffled_rounds`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.interval import Bounds
from jaxdp.mechanisms.composition import flat_rows
from jaxdp.mechanisms.local_randomizers import FiniteRandomizer, KnownRandomizer
from jaxdp.mechanisms.shuffled import Shuffled
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import Kernel, kernel
from jaxdp.shuffle import approximate, bounds, closed_form, law
from jaxdp.shuffle.law import Law
from jaxdp.sources.base import VACUOUS, Answer, Asked, Points, Route, traced_bounds
from jaxdp.validate import is_traced

LOWER_GAP = 0.01  # gap of lower bounds: they describe one data set, so that their numerical error need not be small
LOWER_NODES = 2048  # most nodes of a lower bound; with 512 some at local epsilons above 5 are a fifth as large
_CLOSED_FORM = {"delta": closed_form.clones_closed_form_delta, "epsilon": closed_form.clones_closed_form_point}


@kernel(working_set=512, by_numpy=2**16, at_once=512)
def upper_laws(mechanism: Shuffled, *, composed: bool = False) -> Law:
    """`Shuffled.upper_laws` of each row."""
    return mechanism.upper_laws(composed)


@kernel(working_set=512, by_numpy=2**16, at_once=512)
def lower_laws(mechanism: Shuffled) -> Law:
    """Laws of X for the lower bound; first axis: data sets."""
    randomizer = mechanism.randomizer
    return randomizer.lower_laws() if isinstance(randomizer, KnownRandomizer) else law.two_point(mechanism.max_loss())


def batch_of_laws(kernel: Kernel, mechanism: Shuffled, **static: bool) -> Law:
    """The laws that the kernel returns for concrete rows; repeated laws of a `FiniteRandomizer` are removed."""
    laws = kernel(mechanism, **static)
    return law.distinct(laws) if isinstance(mechanism.randomizer, FiniteRandomizer) else laws


def worst(verb: str, laws: Law, users: Any, target: Any, gap: Any, most: int = bounds.MOST_NODES) -> Bounds:
    """The largest bounds over the laws of each row; gap and most: as for `bounds.bounds`."""
    rows, pairs = laws.first.shape[:2]
    new = np.ones((rows, pairs), bool)  # laws that do not repeat the one before them
    new[:, 1:] = np.any([np.any(a[:, 1:] != a[:, :-1], axis=2) for a in (laws.first, laws.second, laws.base)], axis=0)
    row = np.repeat(np.arange(rows), pairs)[new.ravel()]
    flat = jax.tree_util.tree_map(lambda a: a[new], laws)
    found = bounds.bounds(verb, flat, users[row], target[row], np.broadcast_to(gap, users.shape)[row], most, row)
    return Bounds(*(bounds.largest_of_group(side, row) for side in found))


def worst_point(verb: str, laws: Law, users: Any, target: Any, source: str) -> Bounds:
    """The largest bounds of "delta" or "epsilon" (verb) over laws, at one traced point; source: see `bounds.point`."""
    found = xp.vmap(lambda made: bounds.point(verb, made, users, target, source))(laws)
    return Bounds(xp.max(found.lower), xp.max(found.upper))


def _upper(verb: str, mechanism: Shuffled, target: Any, clean: Callable[[Shuffled, Any], Any], leaky: bool) -> Any:
    """Upper bound of the round. clean: (round, target) -> upper bound for a local delta of 0. leaky: it may be > 0."""
    if not leaky and mechanism.chosen_bound() != "closed_form":
        return clean(mechanism, target)

    def central(by: Any, aim: Any) -> Any:
        return clean(mechanism.weaker(by), aim)

    def added(by: Any, epsilon: Any) -> Any:
        return additive_term(mechanism.weaker(by), epsilon)

    found = approximate.over_weaker(verb, central, added, target) if leaky else clean(mechanism, target)
    alone = approximate.alone(verb, mechanism.max_loss(), mechanism.local_delta(), target)
    return (jnp if is_traced(alone, found) else np).fmin(found, alone)


def additive_term(mechanism: Shuffled, epsilon: Any) -> Any:
    """The term that the local delta adds to delta at this epsilon."""
    array = jnp if is_traced(mechanism, epsilon) else np
    local_delta = array.asarray(mechanism.local_delta())
    return approximate.additive_term(
        mechanism.num_users, mechanism.max_loss(), local_delta, epsilon, mechanism.clones()
    )


def one_round(verb: str, mechanism: Shuffled, target: np.ndarray, asked: Asked) -> Bounds:
    """Bounds of "delta" (at epsilon >= 0) or "epsilon" (verb) of one round; the record's fields are flat, concrete."""
    users = np.asarray(mechanism.num_users)
    lower = np.zeros(target.shape)
    if not asked.upper_only:
        lower = worst(verb, batch_of_laws(lower_laws, mechanism), users, target, LOWER_GAP, LOWER_NODES).lower

    def clean(mechanism: Shuffled, aim: np.ndarray) -> np.ndarray:
        if mechanism.chosen_bound() == "closed_form":
            return _CLOSED_FORM[verb](np.asarray(mechanism.max_loss()), users, aim)
        return worst(verb, batch_of_laws(upper_laws, mechanism), users, aim, asked.gap).upper

    upper = _upper(verb, mechanism, target, clean, bool(np.any(np.asarray(mechanism.local_delta()) > 0)))
    return Bounds(np.fmin(lower, upper), upper)


def _both_sides(delta: Callable[[Any], Any], epsilon: Any) -> tuple[Any, Any]:
    """Bounds of delta at any epsilon, from delta at |epsilon|: a symmetric profile has H_a = 1 - a + a H_{1/a}."""
    xp = jnp if is_traced(epsilon) else np
    lower, upper = delta(xp.abs(epsilon))
    a, least = xp.exp(xp.minimum(epsilon, 0.0)), -xp.expm1(xp.minimum(epsilon, 0.0))
    negative = epsilon < 0
    return (
        xp.where(negative, (least + a * lower) * (1 - 1e-15), lower),
        xp.where(negative, xp.minimum((least + a * upper) * (1 + 1e-15), 1.0), upper),
    )


def one_round_answer(verb: str, params: Any, target: Any, known: Any, asked: Asked) -> Answer:
    """The source of one shuffled round: bounds of epsilon at a delta, or of delta at an epsilon of any sign."""
    if verb == "epsilon":
        return Answer(*one_round("epsilon", params, target, asked), True)
    return Answer(*_both_sides(lambda e: one_round("delta", params, e, asked), target), True)


def shuffled_route(mechanism: Shuffled, shape: tuple[int, ...]) -> Route:
    """The route of one shuffled round with the record's bound."""
    return _route(flat_rows(mechanism, shape))


def _route(flat: Any) -> Route:
    local_delta = flat.local_delta()
    leaky = is_traced(local_delta) or bool(np.any(np.asarray(local_delta) > 0))
    return Route(flat, {verb: (functools.partial(one_round_answer, verb),) for verb in VACUOUS}, _traced(leaky))


# ---- the same for one traced point ----


def exact_source(mechanism: Shuffled) -> str:
    """The ``source`` argument of `bounds.point` that suits the laws of `lower_laws`."""
    return "nodes" if isinstance(mechanism.randomizer, KnownRandomizer) else "two"


def _point(verb: str, mechanism: Shuffled, target: Any, leaky: bool) -> Bounds:
    users = mechanism.num_users
    lower = worst_point(verb, lower_laws.point(mechanism), users, target, exact_source(mechanism)).lower

    def clean(mechanism: Shuffled, aim: Any) -> Any:
        if mechanism.chosen_bound() == "closed_form":
            return _CLOSED_FORM[verb].point(mechanism.max_loss(), users, aim)
        source = "nodes" if mechanism.chosen_bound() == "blanket" else "counts"
        return worst_point(verb, upper_laws.point(mechanism), users, aim, source).upper

    upper = _upper(verb, mechanism, target, clean, leaky)
    return Bounds(xp.fmin(lower, upper), upper)


def log_delta_estimate(mechanism: Shuffled, epsilon: Any, leaky: bool = False) -> Any:
    """Estimate of log delta by the bound in use: accurate, differentiable in randomizer and epsilon, not certified."""
    capped = leaky or mechanism.chosen_bound() == "closed_form"  # as `_upper` caps the bound by that of `alone`
    best = _best_log_delta(mechanism, epsilon) if leaky else _log_delta_parts(mechanism, epsilon)[0]
    if not capped:
        return best
    eps0 = mechanism.max_loss()
    alone = xp.log(approximate.alone("delta", eps0, mechanism.local_delta(), epsilon))
    # At epsilon = eps0 delta stops falling. There epsilon has slope 1 by eps0 and 0 by delta: log delta is infinite.
    return xp.where(epsilon == eps0, xp.inf + (eps0 - epsilon), xp.minimum(best, alone))


def _best_log_delta(mechanism: Shuffled, epsilon: Any) -> Any:
    """Log delta, the additive term included, of the best of the weaker local guarantees."""

    def central(by: Any, epsilon: Any) -> Any:
        return xp.exp(_log_delta_parts(mechanism.weaker(by), epsilon)[0])

    def added(by: Any, epsilon: Any) -> Any:
        return additive_term(mechanism.weaker(by), epsilon)

    by = xp.stop_gradient(approximate.best_delta(central, added, epsilon)[1])
    local: Any = mechanism.randomizer
    # If by > 0, the best bound depends on epsilon + by only: it does not change with the local epsilon.
    fixed = dataclasses.replace(local, epsilon=xp.where(by > 0, xp.stop_gradient(local.epsilon), local.epsilon))
    return xp.logaddexp(*_log_delta_parts(dataclasses.replace(mechanism, randomizer=fixed).weaker(by), epsilon))


def _log_delta_parts(mechanism: Shuffled, epsilon: Any) -> tuple[Any, Any]:
    """(log delta for a local delta of 0, log of the additive term) of a traced round."""
    users, eps0 = xp.stop_gradient(mechanism.num_users), mechanism.max_loss()
    if mechanism.chosen_bound() == "closed_form":
        clean = closed_form.clones_closed_form_log_delta(eps0, mechanism.num_users, epsilon)
    else:
        laws = upper_laws.point(mechanism)
        clean = xp.max(xp.vmap(lambda made: bounds.log_delta_by_nodes(made, users, epsilon))(laws))
    extra = additive_term(mechanism, epsilon)
    return clean, xp.where(extra > 0, xp.log(xp.where(extra > 0, extra, 1.0)), -xp.inf)


@functools.cache
def _traced(leaky: bool) -> dict[str, Points]:
    def bounds(mechanism: Shuffled, target: Any, verb: str) -> tuple[Any, Any]:
        if verb == "delta":
            return _both_sides(lambda x: _point("delta", mechanism, x, leaky), target)
        return tuple(_point("epsilon", mechanism, target, leaky))

    return traced_bounds(bounds, functools.partial(log_delta_estimate, leaky=leaky), _route, 20_000, jax.jacfwd)
