"""Compositions with shuffled rounds: finite pairs that enclose each round, composed like any other laws."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.mechanisms.basic import ApproximateDP
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.shuffled import LocalRandomizer, Shuffled
from jaxdp.numerics.rounding import ULP
from jaxdp.shuffle.approximate import alone, over_weaker
from jaxdp.shuffle.law import LARGEST_EPS0
from jaxdp.sources.base import VACUOUS, Answer, Asked, Points, Route, intersect, one_or_composed
from jaxdp.sources.contour import contour_route
from jaxdp.sources.round_laws import grids_of, lower_law_of, replaced, upper_law
from jaxdp.sources.shuffling import LOWER_GAP, additive_term, one_round_answer
from jaxdp.sources.traced_rounds import of_traced_laws
from jaxdp.validate import is_traced

_PAIR_GAP = 1e-5  # relative gap asked for composed pairs: about the error of the pairs themselves
_TRACED_SHARE = 0.05  # share of delta that is reserved for the additive terms of local deltas under a trace


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """Upper bounds by the composition of dominating pairs, lower bounds by the composition of dominated pairs."""

    verb: str
    direction: str

    def __call__(self, params: Any, target: Any, known: Any, asked: Asked) -> Answer:
        def alone(record: Shuffled, target: Any, asked: Asked) -> tuple[Any, Any]:
            return one_round_answer(self.verb, record, target, None, asked)[:2]

        return one_or_composed(self.verb, params, target, asked, True, alone, self._composed)

    def _composed(self, params: Any, target: Any, asked: Asked) -> tuple[Any, Any]:
        unknown = np.full(target.shape, np.nan)
        by_delta = self.verb == "epsilon"
        log_target = np.log(np.clip(target, SMALLEST, 1.0)) if by_delta else unknown

        def solver(stacks: tuple[Stack, ...]) -> Callable[..., Any]:
            """(upper_law or lower_law_of, least gap) -> (target -> bounds), for the stacks without local deltas."""
            pure = _changed(stacks, _pure)
            grids = grids_of(pure, log_target, unknown if by_delta else np.clip(target, 0.0, LARGEST_EPS0))

            def side(make: Callable[..., Any], least: float) -> Callable[[Any], tuple[Any, Any]]:
                laws = replaced(pure, grids, make)
                sources = contour_route(laws, self.direction).sources[self.verb]
                return lambda aim: intersect(self.verb, [sources], laws, aim, asked.at_least(least))[0]

            return side

        own_bounds = solver(params)

        def weaker(by: Any) -> tuple[Stack, ...]:
            return _changed(params, lambda record: record.weaker(by[:, None]))

        def central(by: Any, aim: Any) -> Any:
            side = solver(weaker(by)) if by.any() else own_bounds
            return side(upper_law, _PAIR_GAP)(aim)[1]

        def additive_terms(by: Any, epsilon: Any) -> Any:
            return _additive_terms(weaker(by), epsilon)

        if np.any(_additive_terms(params, np.zeros(target.shape))):
            alone = solver(_unshuffled(params))(upper_law, _PAIR_GAP)(target)[1]
            upper = np.fmin(over_weaker(self.verb, central, additive_terms, target), alone)
        else:
            upper = central(np.zeros(target.shape), target)
        lower = np.zeros(target.shape) if asked.upper_only else own_bounds(lower_law_of, LOWER_GAP)(target)[0]
        return np.fmin(lower, upper), upper


def _changed(stacks: tuple[Stack, ...], change: Callable[[Shuffled], Shuffled]) -> tuple[Stack, ...]:
    """The stacks with ``change`` applied to each shuffled round."""
    return tuple((change(record) if isinstance(record, Shuffled) else record, times) for record, times in stacks)


def _pure(record: Shuffled) -> Shuffled:
    """The round with its local delta set to 0."""
    local = record.randomizer
    if not isinstance(local, LocalRandomizer):
        return record
    return dataclasses.replace(record, randomizer=dataclasses.replace(local, delta=local.delta * 0.0))


def _unshuffled(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The stacks with each round that has a local delta replaced by the guarantee of one report without shuffling."""
    replaced_stacks: list[Stack] = []
    for record, times in stacks:
        if isinstance(record, Shuffled):
            leaky = np.asarray(record.local_delta()) > 0
            alone = ApproximateDP(record.max_loss(), record.local_delta())
            replaced_stacks += [(record, np.where(leaky, 0.0, times)), (alone, np.where(leaky, times, 0.0))]
        else:
            replaced_stacks.append((record, times))
    return tuple(replaced_stacks)


def _additive_terms(stacks: tuple[Stack, ...], epsilon: Any) -> Any:
    """The sum of the rounds' additive terms: what the local deltas add to delta at this epsilon."""
    array = jnp if is_traced(stacks, epsilon) else np
    total = array.zeros(array.shape(epsilon))
    for record, times in stacks:
        if isinstance(record, Shuffled):
            each = additive_term(record, epsilon[..., None])
            total = total + array.sum(times * array.where(times > 0, each, 0.0), axis=-1)
    return total * (1 + 1e-12)


def _report_by_report(verb: str, stacks: tuple[Stack, ...], target: Any) -> Any:
    """Upper bound of traced rounds, each (eps0, delta0)-DP without shuffling, by basic composition; else vacuous."""
    eps0 = delta0 = jnp.zeros(np.shape(target))
    for record, times in stacks:
        if not isinstance(record, Shuffled):
            return jnp.full(np.shape(target), VACUOUS[verb])
        one_round = record.max_loss(), jnp.asarray(record.local_delta())
        eps0, delta0 = (
            total + jnp.sum(times * jnp.where(times > 0, each, 0.0), axis=-1)
            for total, each in zip((eps0, delta0), one_round, strict=True)
        )
    return alone(verb, eps0 * (1 + 1e-12), jnp.minimum(delta0 * (1 + 1e-12), 1.0), target)


def rounds_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The route of a composition in which some mechanisms are shuffled rounds."""
    sources = {verb: (_Rounds(verb, direction),) for verb in VACUOUS}
    return Route(stacks, sources, {verb: _traced(verb, direction) for verb in VACUOUS})


@functools.cache
def _traced(verb: str, direction: str) -> Points:
    """Differentiable bounds at traced points; cached, so that equal configurations compile once."""

    def place(target: Any) -> tuple[Any, Any]:
        if verb == "delta":
            return jnp.nan, jnp.maximum(target, 0.0)
        return jnp.log(jnp.clip(target, SMALLEST, 1.0)), jnp.nan

    def side(i: int, laws: tuple[Stack, ...], target: Any) -> Any:
        route = contour_route(jax.tree_util.tree_map(lambda x: x[None], laws), direction)
        return route.traced[verb](route.params, target[None])[i][0]

    of_rounds = of_traced_laws(functools.partial(side, 1), place, functools.partial(side, 0))

    def solve(params: Any, target: Any) -> tuple[Any, Any]:
        pure, leaky = _changed(params, _pure), _additive_terms(params, jnp.zeros_like(target)) > 0
        share = jnp.where(leaky & (verb == "epsilon"), _TRACED_SHARE, 0.0)
        aim = target * (1 - share)
        lower, upper = of_rounds(pure, aim)
        added = _additive_terms(params, upper if verb == "epsilon" else target)
        if verb == "delta":
            upper = jnp.where(added > 0, jnp.minimum((upper + added) * (1 + 2 * ULP), 1.0), upper)
        else:
            upper = jnp.where(added <= share * target, upper, jnp.inf)
        upper = jnp.fmin(upper, _report_by_report(verb, params, target))
        return jnp.where(share > 0, 0.0, jnp.minimum(lower, upper)), upper

    return solve
