"""Random allocation: one epoch from its contour, several epochs and several blocks from finite pairs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxdp.allocation import bounds, finite
from jaxdp.closed_forms import gaussian
from jaxdp.mechanisms.allocation import DirectedLaw, RandomAllocation
from jaxdp.mechanisms.base import GaussianMechanism
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import Stack, spread
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.precision import kernel
from jaxdp.sources.base import Answer, Point, Route, explicit_delta, implicit_epsilon, intersect
from jaxdp.sources.contour import fourier_route
from jaxdp.validate import is_traced

_SIGNS = {"forward": 1.0, "reverse": -1.0}


@dataclasses.dataclass(frozen=True)
class _OneEpoch:
    """The contour at one effort."""

    verb: str
    sign: float
    effort: bounds.Effort

    def __call__(self, params: Any, target: Any, known: Any, gap: float) -> Answer:
        solve = bounds.allocation_epsilon if self.verb == "epsilon" else bounds.allocation_delta
        sign = np.full(target.shape, self.sign)
        return Answer(*solve(params.num_steps, params.noise_multiplier(), sign, target, effort=self.effort))


def epoch_route(mechanism: RandomAllocation, direction: str, shape: tuple[int, ...]) -> Route:
    """The route of one epoch in which everybody takes part once."""
    sign = _SIGNS[direction]
    epsilon, delta = (tuple(_OneEpoch(verb, sign, each) for each in bounds.EFFORTS) for verb in ("epsilon", "delta"))
    return Route(spread(mechanism, shape), epsilon, delta, *_traced(sign))


@functools.cache
def _traced(sign: float) -> tuple[Point, Point]:
    effort = bounds.EFFORTS[1]

    def answer(one: Any) -> Point:
        return lambda p, target: tuple(one.point(p.num_steps, p.noise_multiplier(), sign, target, effort=effort))

    def log_delta(p: RandomAllocation, epsilon: Any) -> Any:
        return bounds.log_delta(p.num_steps, p.noise_multiplier(), sign, epsilon)

    return (
        implicit_epsilon(answer(bounds.allocation_epsilon), log_delta, jax.jacfwd),
        explicit_delta(answer(bounds.allocation_delta), log_delta, jax.jacfwd),
    )


# ---- composition ----


@kernel(working_set=64, bounds=True, by_numpy=1000)
def _gaussian_epsilon(mu: Any, delta: Any) -> Any:
    return gaussian.epsilon_bounds(mu, delta, 64 * ULP)


@kernel(working_set=64, bounds=True, by_numpy=1000)
def _gaussian_delta(mu: Any, epsilon: Any) -> Any:
    return gaussian.delta_bounds(mu, epsilon, 64 * ULP)


@dataclasses.dataclass(frozen=True)
class _Epochs:
    """Finite pairs that dominate, composed, from above; from below the sum of each epoch's outputs alone."""

    verb: str
    direction: str

    def __call__(self, params: Any, target: Any, known: Any, gap: float) -> Answer:
        solve: Any = _gaussian_epsilon if self.verb == "epsilon" else _gaussian_delta
        lower = solve(_gaussian_mu(params, summed=True), target)[0]
        runs = sum(np.sum(times * _blocks(record), axis=1) for record, times in params)
        total = -np.log(np.clip(target, 1e-300, 1.0)) if self.verb == "epsilon" else np.full(target.shape, 20.0)
        stacks = dominating(params, self.direction, total / np.maximum(runs, 1.0), total)
        route = fourier_route(stacks, self.direction)
        sources = route.epsilon if self.verb == "epsilon" else route.delta
        ((_, upper),) = intersect(self.verb, [sources], stacks, target, gap)
        if all(isinstance(record, (RandomAllocation, GaussianMechanism)) for record, _ in params):
            upper = np.fmin(upper, solve(_gaussian_mu(params, summed=False), target)[1])
        return Answer(np.fmin(lower, upper), upper, True)


def _blocks(record: Any) -> Any:
    return record.times if isinstance(record, RandomAllocation) else 1.0


def _gaussian_mu(stacks: tuple[Stack, ...], summed: bool) -> np.ndarray:
    """mu of the Gaussian parts and of the epochs: of each one's outputs added up, or of its steps if they were known.

    Other parts are left out.
    """
    total = np.zeros(stacks[0][1].shape[0])
    for record, times in stacks:
        if isinstance(record, RandomAllocation):
            share = record.times**2 / record.num_steps if summed else record.times
            total = total + np.sum(times * share / record.noise_multiplier() ** 2, axis=1)
        elif isinstance(record, GaussianMechanism):
            total = total + np.sum(times * np.asarray(record.gaussian_mu()) ** 2, axis=1)
    return np.sqrt(total)


def dominating(stacks: tuple[Stack, ...], direction: str, depth: Any, total: Any) -> tuple[Stack, ...]:
    """Concrete stacks, epochs replaced by finite laws that dominate them in this direction, block by block."""
    made: list[Stack] = []
    for record, times in stacks:
        if not isinstance(record, RandomAllocation):
            made.append((record, times))
            continue
        size = np.floor(record.num_steps / record.times)
        larger = record.num_steps - size * record.times
        for steps, count in ((size, record.times - larger), (size + 1, larger)):
            if np.all((steps == 1) | (times * count == 0)):
                made.append((Gaussian(np.broadcast_to(record.noise_multiplier(), times.shape)), times * count))
            else:
                flat = [np.broadcast_to(x, times.shape).ravel() for x in (steps, record.noise_multiplier())]
                spans = [np.broadcast_to(np.reshape(x, (-1, 1)), times.shape).ravel() for x in (depth, total)]
                law = _law(direction, *flat, *spans)
                made.append((DirectedLaw(*(x.reshape((*times.shape, *x.shape[1:])) for x in law)), times * count))
    return tuple(made)


def _law(direction: str, steps: Any, noise: Any, depth: Any, total: Any) -> Any:
    inner = finite.grid(steps, noise, depth, total)
    epsilon = np.concatenate([np.zeros((inner.shape[0], 1)), inner], axis=1)
    sides = [finite.profiles(steps, noise, sign, epsilon).upper for sign in (1.0, -1.0)]
    return finite.directed(epsilon, *(sides if direction == "forward" else sides[::-1]))


def epochs_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The route of a composition in which some mechanisms are epochs of random allocation."""
    traced = fourier_route(stacks, direction) if is_traced(stacks) else None
    points = (traced.traced_epsilon, traced.traced_delta) if traced else (None, None)
    return Route(stacks, (_Epochs("epsilon", direction),), (_Epochs("delta", direction),), *points)
