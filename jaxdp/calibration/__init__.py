"""The parameter of a mechanism that meets a target epsilon at a delta, always from the safe side."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxdp import validate
from jaxdp.calibration.problem import Problem, grid, refuse_traced
from jaxdp.calibration.search import Search
from jaxdp.mechanisms.base import Mechanism
from jaxdp.sources.base import gap_near
from jaxdp.typing import Array, Real, Relation

# Never reached: a search that halves its bracket, from the largest number to the smallest, takes about 60.
_MAX_CALLS = 200
# Relative rise and fall of epsilon that may come from the gap of its bounds; more means that it is not monotone.
_WOBBLE = 0.01
# Relative excess over the target that may come from rounding (7e-14 seen).
_ROUNDING = 1e-11
# The ends of a first bracket are squared from call to call, up to the largest power of 2 that is a double (for whole
# numbers: below which every whole number is a double).
_LARGEST, _LARGEST_WHOLE = 2.0**1022, 2.0**53
# Nine calls reach the largest number from 1, and nine the smallest; a monotone function needs no more.
_OUTWARD_CALLS = 20


def calibrate(
    make_mechanism: Callable[..., Mechanism],
    *,
    epsilon: Real,
    delta: Real,
    bracket: tuple[Real, Real] | None = None,
    relation: Relation | None = None,
    unreachable: Literal["raise", "nan"] = "raise",
) -> Array:
    """The value in ``bracket`` whose certified epsilon at ``delta`` is nearest to ``epsilon`` without exceeding it.

    make_mechanism: value -> mechanism, monotone in epsilon, increasing or decreasing. It is called with arrays where it
        accepts them and number by number where it does not. A value that must be whole (a number of steps or users) is
        found out by the mechanism refusing fractions, and then only whole values are tried.
    epsilon: the target, nats, >= 0.
    delta: the target's probability, in [0, 1].
    bracket: (low, high), finite, low < high. None: for a function that is defined and monotone for all numbers > 0
        (whole ones from 1), see below.
    relation: as for `jaxdp.epsilon`.
    unreachable: "raise", or "nan", which puts NaN where no value of the bracket meets the target (or, without a
        bracket, no two values on either side were found), and lets the other elements through.

    The noise that makes 100 Gaussian releases (1, 1e-5)-DP, and how many releases noise of 30 allows:

    >>> sigma = jaxdp.calibrate(lambda s: jaxdp.repeat(jaxdp.Gaussian(s), 100), epsilon=1.0, delta=1e-5)
    >>> print(f"{sigma:.4f}")
    37.3063
    >>> print(jaxdp.calibrate(lambda times: jaxdp.repeat(jaxdp.Gaussian(30.0), times), epsilon=1.0, delta=1e-5))
    64.0

    epsilon, delta and bracket broadcast, also with the arrays inside the mechanism: one calibration per element.
    Returns NumPy float64 of the broadcast shape. `jaxdp.epsilon(make_mechanism(value), delta) <= epsilon` was evaluated
    and holds for the value returned; a tested value within 2e-10 of it (relative; or 1e-16 of the bracket's width where
    the bracket holds 0), or the next whole one, fails it.
    Where the whole bracket is safe the answer is the end with the larger epsilon.

    Without a bracket the function is evaluated at 1 and 4, then at 16, 256, ..., or at 1/4, 1/16, ..., whichever way
    the certified epsilons lead towards the target (both ways while they are equal), until two values lie on either side
    of it: they are the bracket. A probability is refused at 2 or 4 and needs a bracket.

    Raises ValueError, naming the element, when neither end of its bracket meets the target, or epsilon turns round
    inside the bracket, or make_mechanism refuses a value that the search without a bracket has to try.
    """
    validate.function("make_mechanism", make_mechanism, "a mechanism")
    refuse_traced(epsilon, delta, bracket)
    keep_others = validate.choice("unreachable", unreachable, ("raise", "nan")) == "nan"
    problem = Problem.of(make_mechanism, epsilon, delta, bracket, relation)
    if 0 in problem.shape:
        return np.empty(problem.shape)
    # The search for one dominating pair costs half of that for both. Its epsilon is at most that of both, so that a
    # value which fails for the pair fails for both. Its solution is then tested for both; where it does not meet the
    # target, or the pair has no solution, the search is made for both.
    for pair in problem.pairs():
        with contextlib.suppress(ValueError):
            return _verified(problem, _searched(pair, bracket is None, keep_others), _ROUNDING)
    return _verified(problem, _searched(problem, bracket is None, keep_others), np.inf)


def _searched(problem: Problem, outward: bool, keep_others: bool) -> Search:
    """The search until every bracket is closed; ValueError where there is nothing to find."""
    no_bracket = np.zeros(problem.target.shape, bool)
    if outward:
        problem, no_bracket = _bracketed(problem, keep_others and problem.direction is None)
    values = problem.round(grid(problem.low, problem.high))
    epsilons = problem.evaluate(values)
    # Some theorems are better at an end alone, as that of fixed batches at the sampling probability 1.
    for end, others in ((-1, slice(None, -1)), (0, slice(1, None))):
        jumps = _turned(problem.target, epsilons) & ~_turned(problem.target, epsilons[others])
        if jumps.any():
            values[end] = np.where(jumps, problem.next_inside(values[end]), values[end])
            epsilons[end] = problem.evaluate(values[[end]])
    lost = no_bracket | ~(np.minimum(epsilons[0], epsilons[-1]) <= problem.target)
    if lost.any() and not keep_others:
        i = int(np.argmax(lost))
        at = [f"{v[i]:.6g} it is {e[i]:.6g}" for v, e in zip(values, epsilons, strict=True)]
        advice = _advice(epsilons[:, i], problem.target[i], outward=False)
        raise ValueError(
            f"epsilon must be reachable in the bracket, got {problem.target[i]:.6g}{problem.element(i)}: "
            f"at the low end {at[0]}, at the high end {at[-1]}. {advice}"
            + (f" Only whole values were tried, because {problem.refusal}" if problem.whole else "")
            + (' Or let the others through with unreachable="nan".' if lost.size > 1 else "")
        )
    turned = _turned(problem.target, epsilons) & ~lost
    if turned.any():
        i = int(np.argmax(turned))
        seen = ", ".join(f"{e:.4g} at {v:.4g}" for v, e in zip(values[:, i], epsilons[:, i], strict=True))
        at_element = problem.element(i)
        raise ValueError(f"make_mechanism must be monotone in epsilon inside the bracket, got {seen}{at_element}.")
    search = Search(problem.without(lost), values, epsilons, lost)
    for _ in range(_MAX_CALLS):
        candidates = search.candidates()
        if candidates is None:
            break
        for tested in zip(candidates, problem.evaluate(candidates), strict=True):
            search.update(*tested)
    return search


def _advice(epsilons: np.ndarray, target: float, outward: bool) -> str:
    """What may help where no value tried meets the target, or every one."""
    bracket = "give a bracket" if outward else "widen the bracket"
    if not np.isfinite(epsilons).any():
        return f"Take a larger delta, or {bracket}."
    if outward and epsilons.max() <= target:
        return f"Every value tried meets the target: take a smaller epsilon or delta, or {bracket}."
    if (epsilons == epsilons[0]).all():
        return f"The values tried make no difference: make_mechanism must depend on its argument, or {bracket}."
    if outward and epsilons.min() > target:
        return f"Take a larger epsilon or delta, change another parameter, or {bracket}."
    return f"{bracket.capitalize()}, or take a larger epsilon or delta."


def _turned(target: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Where epsilons over ordered values both rise and fall, by more than what their bounds may be apart."""
    with np.errstate(invalid="ignore"):
        steps = np.nan_to_num(np.diff(epsilons, axis=0), nan=0.0)
    smaller = np.minimum(epsilons[1:], epsilons[:-1])
    scale = gap_near(target, _WOBBLE, smaller, smaller) * smaller + 1e-9
    return (steps > scale).any(axis=0) & (steps < -scale).any(axis=0)


def _bracketed(problem: Problem, keep_others: bool) -> tuple[Problem, np.ndarray]:
    """The problem with brackets found by going outward from its own, and the rows in which none was found."""
    low, high = problem.low, problem.high
    epsilons = problem.evaluate_new(low, high)
    largest, beyond = _LARGEST_WHOLE if problem.whole else _LARGEST, ""
    for _ in range(_OUTWARD_CALLS):
        small, large = epsilons.min(axis=0), epsilons.max(axis=0)
        lost = ~((small <= problem.target) & (problem.target < large))
        with np.errstate(invalid="ignore"):
            flat = ~(large - small > _WOBBLE * small)
        towards_larger = (epsilons[1] > epsilons[0]) == (large <= problem.target)
        up = lost & (flat | towards_larger) & (high < largest)
        down = lost & (flat | ~towards_larger) & (low > 1 / largest) & (not problem.whole)
        if not (up | down).any():
            break
        above = np.minimum(np.minimum(high, 2.0**511) ** 2, largest)
        below = np.maximum(np.clip(low, 2.0**-511, 0.5) ** 2, 1 / largest)
        # where the two epsilons tell the direction, the next bracket begins at the end of this one
        starts = np.where(down, below, np.where(up & ~flat, high, low))
        ends = np.where(up, above, np.where(down & ~flat, low, high))
        try:
            found = problem.evaluate_new(starts, ends)
        except ValueError as error:
            if keep_others:  # a row whose search ends here may have a solution
                raise
            beyond = f" Beyond, a value is refused: {error.__cause__ or error}"
            break
        low, high, epsilons = starts, ends, found
    if lost.any() and not keep_others:
        i = int(np.argmax(lost))
        raise ValueError(
            f"epsilon must lie between those of two positive numbers, got {problem.target[i]:.6g}{problem.element(i)}: "
            f"at {low[i]:.6g} it is {epsilons[0, i]:.6g}, at {high[i]:.6g} it is {epsilons[1, i]:.6g}. "
            + _advice(epsilons[:, i], problem.target[i], outward=True)
            + beyond
        )
    low, high = (np.where(lost, end, found) for end, found in ((problem.low, low), (problem.high, high)))
    return dataclasses.replace(problem.without(lost), low=low, high=high), lost


def _verified(problem: Problem, search: Search, excess: float) -> np.ndarray:
    """The safe values, tested once more in the caller's shape: the rounding depends on the size of a batch.

    A value that fails is moved away from the unsafe end, by a distance that doubles, until it meets the target.
    ValueError where an epsilon exceeds its target by more than ``excess`` (relative).
    """
    values, lost = search.safe, search.lost
    step, away = 1.0 if problem.whole else 2.0**-43, np.sign(search.safe - search.unsafe)
    for _ in range(_MAX_CALLS):
        epsilons = problem.evaluate_one(values)
        good = lost | (epsilons <= problem.target)
        if good.all():
            return problem.answer(values, lost)
        with np.errstate(invalid="ignore"):
            if (~good & (epsilons > (1 + excess) * problem.target)).any():
                break
        shift = step if problem.whole else step * np.abs(values)
        values = problem.round(np.where(good, values, values + away * shift))
        step *= 2
    raise ValueError("no value in the bracket meets the target when it is evaluated by itself; widen the bracket.")
