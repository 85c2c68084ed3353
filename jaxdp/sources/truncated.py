"""Truncated Poisson batches: rare cuts are charged to delta, beside Poisson batches; frequent cuts use a finite law."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxdp.mechanisms.basic import ApproximateDP
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.truncated import TruncatedPoisson
from jaxdp.sources.base import Answer, Asked, Route, Source, intersect, nothing
from jaxdp.sources.contour import contour_route

_NEGLIGIBLE = 1e-5  # share of delta that all cuts may cost: it changes epsilon by less than the finite law's error


def truncated_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The route of a composition in which some mechanisms are truncated Poisson batches."""
    law = contour_route(stacks, direction)
    sources: dict[str, tuple[Source, ...]] = {
        verb: (_RareCuts(verb, direction), *others) for verb, others in law.sources.items()
    }
    return dataclasses.replace(law, sources=sources)


@dataclasses.dataclass(frozen=True)
class _RareCuts:
    """Upper bounds for the rows in which all cuts together cost at most the share `_NEGLIGIBLE` of delta."""

    verb: str
    direction: str

    def __call__(self, params: Any, target: Any, known: Any, asked: Asked) -> Answer:
        lower, upper = nothing(self.verb, target)
        stacks, total = [], np.zeros(target.shape)
        for record, times in params:
            stacks.append((record.uncut() if isinstance(record, TruncatedPoisson) else record, times))
            if isinstance(record, TruncatedPoisson):
                stacks.append((ApproximateDP(0.0 * times, record.cut()), times))
                total = total + np.sum(times * record.cut(), axis=1)
        rows = np.flatnonzero(total <= _NEGLIGIBLE * (target if self.verb == "epsilon" else 1.0))
        if rows.size:
            charged: Any = jax.tree_util.tree_map(lambda x: np.asarray(x)[rows], tuple(stacks))
            sources = contour_route(charged, self.direction).sources[self.verb]
            ((_, upper[rows]),) = intersect(self.verb, [sources], charged, target[rows], asked.rows(rows))
        return Answer(lower, upper, total <= _NEGLIGIBLE * (target if self.verb == "epsilon" else upper))
