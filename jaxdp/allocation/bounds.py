"""Certified delta(eps) and eps(delta) of one epoch of random allocation: closed forms and the contour, intersected."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp.allocation import contour
from jaxdp.allocation.contour import Effort
from jaxdp.allocation.law import Step
from jaxdp.closed_forms import gaussian
from jaxdp.interval import Bounds
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import canary, kernel

EFFORTS = (Effort(48, 8, 16), Effort(128, 32, 64), Effort(384, 64, 128))
_LEAST_DELTA = 2.3e-308
LARGEST_EPSILON = 600.0  # e^epsilon must not overflow
_SLACK = 2e-13  # rounding of log delta
_NARROW, _ENOUGH = 1e-7, 5e-7  # relative widths of epsilon at which the first contour suffices, a later one
_MOST_TURNS = 5  # contours after the first


def at_own_epsilon(step: Step, effort: Effort) -> Evaluation:
    """Bounds of log delta at the step's own epsilon, the estimate and its slope."""
    seen = contour.evaluate(contour.prepare(step, effort), step.epsilon[None], effort)
    return Evaluation(*(each[0] for each in seen))


def _delta(steps: Any, noise: Any, sign: Any, epsilon: Any, effort: Effort) -> Bounds:
    scale, size = 1 / noise, xp.abs(epsilon)
    inside = (size <= LARGEST_EPSILON) & (steps > 1)
    # delta of the other direction at the negative: H_a = 1 - a + a H_{1/a}
    turned = xp.where(epsilon < 0, -sign, sign)
    seen = at_own_epsilon(Step(steps, scale, xp.where(inside, size, 1.0), turned), effort)
    lower, upper = (xp.where(inside, xp.exp(side), no) for side, no in ((seen.lower, 0.0), (seen.upper, 1.0)))
    negative = xp.minimum(epsilon, 0.0)
    odds, floor = xp.exp(negative), -xp.expm1(negative)
    lower = xp.where(epsilon < 0, (floor + odds * lower) * (1 - 8 * ULP), lower)
    upper = xp.where(epsilon < 0, (floor + odds * upper) * (1 + 8 * ULP), xp.maximum(upper, _LEAST_DELTA))
    alone = gaussian.delta_bounds(scale, epsilon, 4 * ULP)
    upper = xp.fmin(upper, alone[1])  # a person who takes part in a known step leaks no less
    lower = xp.where(steps == 1, alone[0], xp.where(xp.isnan(lower), 0.0, lower))
    together = gaussian.delta_bounds(scale / xp.sqrt(steps), epsilon, 8 * ULP)[0]
    return Bounds(xp.clip(xp.maximum(lower, together), 0.0, upper), xp.minimum(upper, 1.0))


def _guess(step: Step, log_delta: Any, cap: Any) -> Any:
    """Epsilon where the sum is normal, or one step decides: whichever is larger."""
    s = step.scale
    spread = xp.sqrt(xp.expm1(xp.minimum(s * s, 50.0)) / step.steps)

    def z_of(_: Any, z: Any) -> Any:
        share = xp.log(spread) - log_delta - 0.919 - xp.log1p(0.8 * z + z * z)
        return xp.sqrt(xp.maximum(2 * share, 1e-6))

    z = xp.fori_loop(0, 6, z_of, xp.ones_like(s))
    tail = xp.sqrt(xp.maximum(-2 * log_delta - 2 * xp.log(1 + xp.sqrt(xp.maximum(-2 * log_delta, 0.0))), 0.01))
    jump = s * (tail + 0.5 * s) - xp.log(step.steps)
    bulk = xp.where(step.sign > 0, xp.log1p(z * spread), -xp.log(xp.maximum(1 - z * spread, 0.1)))
    return xp.clip(xp.where(step.sign > 0, xp.maximum(bulk, jump), bulk), 1e-6 * cap, 0.9 * cap)


class _Search(NamedTuple):
    center: Any  # the epsilon that the next contour is made for
    start: Any  # the first one that the contour is asked for
    low: Any
    high: Any
    done: Any
    turns: Any


def _epsilon(steps: Any, noise: Any, sign: Any, delta: Any, known: Bounds, effort: Effort) -> Bounds:
    scale, removes = 1 / noise, sign > 0
    target, _ = raised(delta)
    alone = gaussian.epsilon_bounds(scale, target, 4 * ULP)
    inside = (target > 0) & (target < 1) & (steps > 1) & (alone[1] > 0) & (alone[1] <= LARGEST_EPSILON)
    cap = xp.where(inside, alone[1], 1.0)
    log_delta = xp.log(xp.where(inside, target, 0.5))

    def around(low: Any, high: Any, share: float) -> Any:
        """An epsilon from which contours look at [low, high]: they look down for "remove", up for "add"."""
        margin = share * (high - low)
        return xp.where(removes, xp.minimum(high + margin, cap), low - xp.minimum(margin, 0.5 * low))

    def narrow(s: _Search) -> _Search:
        made = contour.prepare(Step(steps, scale, s.center, sign), effort)

        last = s.turns >= _MOST_TURNS

        def ask(epsilon: Any) -> Evaluation:
            return Evaluation(*(each[0] for each in contour.evaluate(made, epsilon[None], effort)))

        def at(epsilon: Any) -> Evaluation:
            seen = ask(epsilon)
            # too far from the center to say much: NaN ends the search
            far = ~last & (seen.upper - seen.lower > 0.3 + 0.2 * xp.abs(seen.estimate - log_delta))
            estimate = xp.where(far, xp.nan, seen.estimate)
            return seen._replace(upper=seen.upper + _SLACK, lower=seen.lower - _SLACK, estimate=estimate)

        found = proved_ends(at, log_delta, s.start, cap, wanted=inside)
        low, high = xp.maximum(s.low, found[0]), xp.minimum(s.high, found[1])
        near = high - low < 1e-3 * high
        # a step of Newton's from the first epsilon that was asked for
        seen = ask(s.start)
        root = xp.clip(s.start + (seen.estimate - log_delta) / xp.abs(seen.slope), xp.maximum(low, 0.2 * s.start), high)
        aside = root + sign * (0.25 * xp.abs(s.center - root) + 1e-3 * root)
        center = xp.where(near, around(low, high, 1.0), aside)
        start = xp.where(near, xp.sqrt(low * high), root)
        gain = ~near | (high - low < 0.5 * (s.high - s.low))
        done = last | ~gain | (high - low <= xp.where(s.turns > 0, _ENOUGH, _NARROW) * high)
        return _Search(xp.minimum(center, cap), xp.minimum(start, 0.9 * cap), low, high, done, s.turns + 1)

    low, high = xp.maximum(known.lower, 0.0), xp.minimum(known.upper, cap)
    near = high - low < 0.5 * high
    guess = _guess(Step(steps, scale, cap, sign), log_delta, cap)
    start = xp.where(near, xp.sqrt(low * high), guess)
    center = xp.where(near, around(low, high, 1.0), around(guess, guess, 0.0) * xp.where(removes, 1.2, 0.8))
    first = _Search(xp.minimum(center, cap), start, low, high, ~inside, xp.zeros((), xp.int32))
    end = xp.while_loop(lambda s: ~s.done, narrow, first)
    low, high = end.low, end.high
    low = xp.where(inside, low, xp.where((steps == 1) | (target == 0) | (target >= 1), alone[0], 0.0))
    high = xp.where(inside, high, alone[1])
    # all outputs added up: a Gaussian mechanism of mean 1 and variance T noise^2
    together = gaussian.epsilon_bounds(scale / xp.sqrt(steps), target, 8 * ULP)[0]
    return Bounds(xp.minimum(xp.maximum(low, together), high), high)


@kernel(static=("effort",), working_set=1_500_000, large=True, bounds=True, by_numpy=40)
def allocation_delta(steps: Any, noise: Any, sign: Any, epsilon: Any, *, effort: Effort) -> Bounds:
    """Bounds of delta of one point. sign: 1 for "remove", -1 for "add"."""
    return _delta(steps, noise, sign, epsilon, effort)


@kernel(static=("effort",), working_set=1_500_000, large=True, bounds=True, by_numpy=40)
def allocation_epsilon(
    steps: Any, noise: Any, sign: Any, delta: Any, low: Any = 0.0, high: Any = np.inf, *, effort: Effort
) -> Bounds:
    """Bounds of epsilon of one point. sign: 1 for "remove", -1 for "add". low, high: bounds known so far."""
    return _epsilon(steps, noise, sign, delta, Bounds(low, high), effort)


@kernel(static=("effort",), working_set=1_500_000, large=True, bounds=True, by_numpy=10_000)
def profile_log_delta(steps: Any, noise: Any, sign: Any, epsilon: Any, *, effort: Effort) -> Bounds:
    """Bounds of log delta at neighbouring epsilons >= 0, increasing, which share the contour of one of them."""
    scale = 1 / noise
    inside = (steps > 1) & (epsilon <= LARGEST_EPSILON)
    safe = xp.where(inside, epsilon, 1.0)
    # the one with the largest cut: the others' lie inside
    made = contour.prepare(Step(xp.maximum(steps, 2.0), scale, xp.where(sign > 0, safe[-1], safe[0]), sign), effort)
    seen = contour.evaluate(made, safe, effort)
    alone = gaussian.delta_bounds(scale, epsilon, 4 * ULP)
    least, most = (xp.log(xp.maximum(side, _LEAST_DELTA)) for side in alone)
    least = xp.where(alone[0] > _LEAST_DELTA, least - _SLACK, -xp.inf)
    upper = xp.minimum(xp.where(inside, xp.maximum(seen.upper, np.log(_LEAST_DELTA)), 0.0), most + _SLACK)
    lower = xp.where(inside, seen.lower, xp.where(steps == 1, least, -xp.inf))
    return Bounds(xp.minimum(lower, upper), xp.minimum(upper, 0.0))


def log_delta(steps: Any, noise: Any, sign: Any, epsilon: Any) -> Any:
    """log delta at epsilon >= 0 as a differentiable function of noise and epsilon; an estimate."""
    steps = xp.stop_gradient(steps)
    many = at_own_epsilon(Step(xp.maximum(steps, 2.0), 1 / noise, epsilon, sign), EFFORTS[1]).estimate
    return xp.where(steps == 1, gaussian.smooth_delta(1 / noise, epsilon), many)


@canary("random allocation, contour")
def _canary() -> tuple[Any, Any, float]:
    """One epsilon that other methods agree on."""
    point = [np.array([x]) for x in (1000.0, 2.0, 1.0, 1e-6)]
    found = allocation_epsilon.run_unchecked(*point, effort=EFFORTS[0])
    return found.upper, np.array([0.059231457]), 1e-7
