"""Certified delta(eps) and eps(delta) of one epoch of random allocation: intersection of closed forms and contour."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp.allocation import contour
from jaxdp.allocation.contour import Effort, Evaluation
from jaxdp.allocation.law import Step
from jaxdp.closed_forms import gaussian
from jaxdp.domains import LEAST_DELTA
from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary
from jaxdp.runtime.precision import kernel

EFFORTS = (Effort(64, 8, 16, 16), Effort(256, 16, 32, 16))  # tried in this order
LARGEST_EPSILON = 600.0  # e^epsilon must not overflow
_SLACK = 2e-13  # rounding of log delta
_NARROW = 3e-7  # relative width of the enclosure of epsilon at which a search ends
_MOST_CONTOURS = 4  # of one search
_MARGIN, _LEAST_MARGIN = 0.05, 1e-4  # limits of the relative distance from the guessed root to a contour's epsilon
_LARGEST_MARGIN = 0.3  # the same after a contour whose bounds are too far apart to prove one within its own margin
_NEAR = 0.02  # nats of delta from a contour's epsilon to the root, below which another contour would gain nothing
_NEWTON_STEPS = 3
_STEP = 1e-4  # relative step of the difference quotient that serves as slope in Newton's method
# Points tested around the root: root + gap _OFF, for the estimated gaps to both bounds of epsilon, and root _SHARES.
_OFF = np.array([1.05, 2.0, 6.0])
_SHARES = np.concatenate([1 - 10.0 ** np.arange(-7, 0), [0.6], 1 + 10.0 ** np.arange(-7, 0), [1.4]])
_PAIRS = (2 + 2 * _OFF.size + _SHARES.size) // 2  # pairs of tested points; 0 and the contour's own epsilon are two more


def at_own_epsilon(step: Step, effort: Effort) -> Evaluation:
    """Bounds and estimate of log delta at the step's own epsilon; scalars."""
    values = contour.evaluate(contour.prepare(step, effort), step.epsilon[None], effort)
    return Evaluation(*(value[0] for value in values))


def _delta(steps: Any, noise: Any, sign: Any, epsilon: Any, effort: Effort) -> Bounds:
    scale, size = 1 / noise, xp.abs(epsilon)
    inside = (size <= LARGEST_EPSILON) & (steps > 1)
    # Negative epsilon: delta(eps) = 1 - e^eps + e^eps delta'(-eps), delta' of the other direction.
    swapped_sign = xp.where(epsilon < 0, -sign, sign)
    logs = at_own_epsilon(Step(steps, scale, xp.where(inside, size, 1.0), swapped_sign), effort)
    lower, upper = (xp.where(inside, xp.exp(side), no) for side, no in ((logs.lower, 0.0), (logs.upper, 1.0)))
    negative = xp.minimum(epsilon, 0.0)
    odds, trivial = xp.exp(negative), -xp.expm1(negative)
    lower = xp.where(epsilon < 0, (trivial + odds * lower) * (1 - 8 * ULP), lower)
    upper = xp.where(epsilon < 0, (trivial + odds * upper) * (1 + 8 * ULP), xp.maximum(upper, LEAST_DELTA))
    one_step = gaussian.delta_bounds(scale, epsilon, 4 * ULP)
    upper = xp.fmin(upper, one_step[1])  # bound for an adversary who knows the step
    lower = xp.where(steps == 1, one_step[0], xp.where(xp.isnan(lower), 0.0, lower))
    summed = gaussian.delta_bounds(scale / xp.sqrt(steps), epsilon, 8 * ULP)[0]
    return Bounds(xp.clip(xp.maximum(lower, summed), 0.0, upper), xp.minimum(upper, 1.0))


def _guess(step: Step, log_delta: Any, cap: Any) -> tuple[Any, Any]:
    """(guess of epsilon, its relative uncertainty). cap: epsilon of one known step.

    "remove": the larger of a normal approximation of the sum, corrected for skewness, and of one step alone. "add":
    Chernoff's bound of the sum.
    """
    s = step.scale
    square = xp.exp(xp.minimum(s * s, 50.0))
    deviation = xp.sqrt((square - 1) / step.steps)

    def newton(_: Any, z: Any) -> Any:
        """Newton step for delta = deviation E[(x - z)_+], x ~ N(0, 1), about density(z)/(1 + 1.25 z + 0.7 z^2)."""
        correction = 1 + 1.25 * z + 0.7 * z * z
        residual = 0.5 * z * z + xp.log(correction) + 0.919 + log_delta - xp.log(deviation)
        return xp.maximum(z - residual / (z + (1.25 + 1.4 * z) / correction), 0.001)

    z = xp.fori_loop(0, 6, newton, xp.ones_like(s))
    skewed = xp.minimum((square + 2) * deviation / 6, 1.0)
    jump = xp.log1p(xp.expm1(cap) / step.steps)  # all other steps are at their mean
    rise = (z + xp.maximum(z * z - 1, 0.0) * skewed) * deviation  # excess of the others' sum, relative to its mean
    uncertainty = xp.where(step.sign > 0, 0.3 * rise * xp.exp(-jump) / jump, xp.inf)
    # "add": the sum whose Chernoff bound is e^(-z^2/2).
    c = xp.exp(xp.linspace(xp.log(0.02 / step.steps), cap + 5.0, 96))
    x = xp.linspace(step.left(), 9.5, 256)
    law = xp.exp(-0.5 * x * x - c[:, None] * xp.exp(step.log_ratio(x))) * ((x[1] - x[0]) / np.sqrt(2 * np.pi))
    add = -xp.log(xp.max((-0.5 * z * z / step.steps - xp.log(xp.sum(law, axis=1))) / c))
    guess = xp.where(step.sign > 0, xp.maximum(xp.log1p(rise), jump), add)
    return xp.clip(guess, 1e-6 * cap, 0.9 * cap), xp.clip(uncertainty, _LEAST_MARGIN, _MARGIN)


class _Search(NamedTuple):
    start: Any  # epsilon at which Newton's method starts
    low: Any  # proved lower bound of epsilon
    high: Any  # proved upper bound of epsilon
    done: Any
    contours: Any  # number made
    margin: Any  # relative distance from the start to the next contour's epsilon


def _epsilon(steps: Any, noise: Any, sign: Any, delta: Any, known: Bounds, effort: Effort) -> Bounds:
    scale = 1 / noise
    target, _ = raised(delta)
    one_step = gaussian.epsilon_bounds(scale, target, 4 * ULP)
    inside = (target > 0) & (target < 1) & (steps > 1) & (one_step[1] > 0) & (one_step[1] <= LARGEST_EPSILON)
    cap = xp.where(inside, one_step[1], 1.0)
    log_delta = xp.log(xp.where(inside, target, 0.5))

    def narrow(s: _Search) -> _Search:
        # A contour is valid at its own epsilon and on one side of it: below for "remove", above for "add".
        margin = xp.minimum(s.margin * s.start, s.high - s.low)
        center = xp.where(sign > 0, s.start + margin, xp.maximum(s.start - margin, 0.0))
        prepared = contour.prepare(Step(steps, scale, center, sign), effort)

        def advance(i: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
            """One Newton step for i < _NEWTON_STEPS; afterwards tests two points around the root to prove bounds."""
            root, off, steep, low, high = found
            x = xp.where(sign > 0, xp.minimum(root, center), xp.maximum(root, center))
            step = -sign * (_STEP * x + 1e-9 * cap)
            tested = xp.concatenate([xp.zeros(1), center[None], root + (off[:, None] * _OFF).ravel(), root * _SHARES])
            tested = xp.clip(xp.where(xp.isnan(tested), 0.0, tested), 0.0, cap)
            searches, proves = i < _NEWTON_STEPS, i >= _NEWTON_STEPS
            pair = tested[2 * xp.maximum(i - _NEWTON_STEPS, 0) + np.arange(2)]
            values = contour.evaluate(prepared, xp.where(searches, xp.stack([x, x + step]), pair), effort)
            below, above = values.lower - _SLACK >= log_delta, values.upper + _SLACK <= log_delta
            low = xp.maximum(low, xp.max(xp.where(below & proves, pair, 0.0)))
            high = xp.minimum(high, xp.min(xp.where(above & proves, pair, cap)))
            estimate, lower, upper = (value[0] for value in (values.estimate, values.lower, values.upper))
            slope = xp.abs((values.estimate[1] - estimate) / step)
            move = (estimate - log_delta) / slope
            new = xp.clip(xp.where(xp.isfinite(move), x + move, x), 0.0, 0.5 * (x + cap))
            # Gaps from the root to the two bounds of epsilon: gaps of log delta, plus the error of Newton's method.
            newton_error = 1e-13 * x + xp.abs(move) * (_STEP + xp.abs(move) / x)
            gaps = xp.stack([lower - estimate, upper - estimate]) / slope + newton_error * np.array([-1.0, 1.0])
            root, off, steep = (xp.where(searches, a, b) for a, b in ((new, root), (gaps, off), (slope, steep)))
            return root, off, steep, low, high

        begun = s.start, xp.stack([-cap, cap]), xp.zeros_like(cap), s.low, s.high
        root, off, steep, low, high = xp.fori_loop(0, _NEWTON_STEPS + _PAIRS, advance, begun)
        near = (sign * (center - root) >= 0) & (steep > 0) & (steep * xp.abs(center - root) <= _NEAR)
        # The contour must reach beyond the root as far as its own bounds are apart, or it proves nothing on that side.
        reach = 1.5 * xp.where(sign > 0, off[1], -off[0]) / root
        near = near & ((reach * root <= xp.abs(center - root)) | (s.margin >= _LARGEST_MARGIN))
        wider = xp.clip(xp.where(xp.isnan(reach), _LARGEST_MARGIN, reach), off_by, _LARGEST_MARGIN)
        done = near | (high - low <= _NARROW * high) | (s.contours + 1 >= _MOST_CONTOURS)
        return _Search(xp.clip(root, xp.minimum(low, 0.9 * high), high), low, high, done, s.contours + 1, wider)

    low, high = xp.maximum(known.lower, 0.0), xp.minimum(known.upper, cap)
    guess, off_by = _guess(Step(steps, scale, cap, sign), log_delta, cap)
    start = xp.where(high - low < 0.5 * high, xp.sqrt(low * high), guess)
    first = _Search(start, low, high, ~inside, xp.zeros((), xp.int32), off_by)
    end = xp.while_loop(lambda s: ~s.done, narrow, first)
    low = xp.where(inside, end.low, xp.where((steps == 1) | (target == 0) | (target >= 1), one_step[0], 0.0))
    high = xp.where(inside, end.high, one_step[1])
    # The sum of all outputs is a Gaussian mechanism of mean 1 and variance T noise^2.
    summed = gaussian.epsilon_bounds(scale / xp.sqrt(steps), target, 8 * ULP)[0]
    return Bounds(xp.minimum(xp.maximum(low, summed), high), high)


def _by_numpy(*_: Any, effort: Effort, **__: Any) -> int:
    """Number of points that NumPy computes in the time of compiling, about 20 seconds."""
    return 400 if effort == EFFORTS[0] else 96


@kernel(working_set=1_500_000, large=True, bounds=True, by_numpy=_by_numpy)
def allocation_delta(steps: Any, noise: Any, sign: Any, epsilon: Any, *, effort: Effort) -> Bounds:
    """Bounds of delta at one point: T steps, noise multiplier, sign 1 for "remove", -1 for "add", any epsilon."""
    return _delta(steps, noise, sign, epsilon, effort)


@kernel(working_set=1_500_000, large=True, bounds=True, by_numpy=_by_numpy)
def allocation_epsilon(
    steps: Any, noise: Any, sign: Any, delta: Any, low: Any = 0.0, high: Any = np.inf, *, effort: Effort
) -> Bounds:
    """Bounds of epsilon at one point. sign: 1 for "remove", -1 for "add". low, high: bounds that are already known."""
    return _epsilon(steps, noise, sign, delta, Bounds(low, high), effort)


@kernel(working_set=1_500_000, large=True, bounds=True, by_numpy=10_000)
def profile_log_delta(steps: Any, noise: Any, sign: Any, epsilon: Any, *, effort: Effort) -> Bounds:
    """Bounds of log delta at epsilons >= 0, all from the contour of the first, which has the largest cut.

    This is the largest epsilon for sign = 1, the smallest for sign = -1. The tilts are chosen for the epsilon five
    eighths of the way to the last.
    """
    scale = 1 / noise
    inside = (steps > 1) & (epsilon <= LARGEST_EPSILON)
    safe = xp.where(inside, epsilon, 1.0)
    step = Step(xp.maximum(steps, 2.0), scale, safe[0], sign)
    prepared = contour.prepare(step, effort, safe[5 * safe.shape[0] // 8])
    values = contour.evaluate(prepared, safe, effort)
    one_step = gaussian.delta_bounds(scale, epsilon, 4 * ULP)
    one_step_lower, one_step_upper = (xp.log(xp.maximum(side, LEAST_DELTA)) for side in one_step)
    one_step_lower = xp.where(one_step[0] > LEAST_DELTA, one_step_lower - _SLACK, -xp.inf)
    upper = xp.minimum(xp.where(inside, xp.maximum(values.upper, np.log(LEAST_DELTA)), 0.0), one_step_upper + _SLACK)
    lower = xp.where(inside, values.lower, xp.where(steps == 1, one_step_lower, -xp.inf))
    return Bounds(xp.minimum(lower, upper), xp.minimum(upper, 0.0))


def log_delta(steps: Any, noise: Any, sign: Any, epsilon: Any) -> Any:
    """Estimate of log delta at epsilon >= 0, differentiable in noise and epsilon; not a bound."""
    steps = xp.stop_gradient(steps)
    allocated = at_own_epsilon(Step(xp.maximum(steps, 2.0), 1 / noise, epsilon, sign), EFFORTS[1]).estimate
    return xp.where(steps == 1, gaussian.smooth_delta(1 / noise, epsilon), allocated)


@canary("random allocation, contour")
def _canary() -> tuple[Any, Any, float]:
    """Epsilon at T = 1000, noise 2, delta 1e-6, confirmed by independent methods."""
    point = [np.array([x]) for x in (1000.0, 2.0, 1.0, 1e-6)]
    epsilon = allocation_epsilon.run_unchecked(*point, effort=EFFORTS[0])
    return epsilon.upper, np.array([0.059231457]), 1e-7
