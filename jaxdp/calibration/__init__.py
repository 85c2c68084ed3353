"""Calibration: the parameter of a mechanism whose epsilon comes closest to a target without exceeding it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxdp import validate
from jaxdp.calibration.problem import Problem, grid, refuse_traced
from jaxdp.calibration.search import Search
from jaxdp.mechanisms import provenance
from jaxdp.mechanisms.base import Mechanism
from jaxdp.sources.base import gap_near
from jaxdp.typing import Array, Real, Relation

# Limit of the calls of a search, and of the moves of a value that fails its last test. It is never reached: bisection
# from the largest to the smallest double takes about 60.
_MAX_CALLS = 200
# Relative change of epsilon that the gap of its bounds can cause. An epsilon that rises and falls more is not monotone.
_WOBBLE = 0.01
# Relative excess over the target that rounding can cause (7e-14 was observed).
_ROUNDING = 1e-11
# Largest end of a bracket in a search without one; the ends are squared from call to call. Real values: 2^1022, whose
# reciprocal is the smallest normal double. Whole values: 2^53, up to which every whole number is a double.
_LARGEST, _LARGEST_WHOLE = 2.0**1022, 2.0**53
# Limit of the calls that look for a bracket. Nine calls lead from 1 to the largest number and nine to the smallest; a
# monotone function needs no more.
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

    make_mechanism: value -> mechanism, whose epsilon is monotone in the value, increasing or decreasing. It is called
        with arrays if it accepts them, otherwise with one number at a time. If the mechanism refuses a fraction but
        accepts the whole number next to it (a number of steps or users), only whole values are tried.
    epsilon: the target in nats, >= 0.
    delta: the delta of the target, in [0, 1].
    bracket: (low, high), finite, low < high. None: see below; make_mechanism must be defined and monotone for all
        numbers > 0 (or all whole numbers >= 1).
    relation: as for `jaxdp.epsilon`.
    unreachable: "raise", or "nan": NaN for an element if no value of its bracket meets the target (or, without a
        bracket, if no two values were found with the target between them); the other elements are solved.

    The noise that makes 100 Gaussian releases (1, 1e-5)-DP, and how many releases noise of 30 allows:

    >>> sigma = jaxdp.calibrate(lambda s: jaxdp.repeat(jaxdp.Gaussian(s), 100), epsilon=1.0, delta=1e-5)
    >>> print(f"{sigma:.4f}")
    37.3063
    >>> print(jaxdp.calibrate(lambda times: jaxdp.repeat(jaxdp.Gaussian(30.0), times), epsilon=1.0, delta=1e-5))
    64.0

    epsilon, delta, bracket and the arrays inside the mechanism broadcast: one calibration per element.
    Returns NumPy float64 of the broadcast shape. `jaxdp.epsilon(make_mechanism(value), delta) <= epsilon` was evaluated
    and holds for the returned value. A tested value close to it fails: the next whole number if only whole values are
    tried, otherwise a value within 2e-10 (relative; 1e-16 of the bracket's width if the bracket contains 0).
    If every value of the bracket meets the target, the result is the end with the larger epsilon.

    Without a bracket, make_mechanism is evaluated at 1 and 4, then at 16, 256, ... or at 1/4, 1/16, ..., in the
    direction in which the certified epsilons approach the target (in both while they are equal), until the target lies
    between the epsilons of two values: these are the bracket. A probability needs a bracket: values > 1 are refused.

    Raises ValueError, naming the element, if neither end of its bracket meets the target, if epsilon is not monotone
    inside the bracket, or if make_mechanism refuses a value that the search without a bracket has to try.
    """
    validate.function("make_mechanism", make_mechanism, "a mechanism")
    refuse_traced(epsilon, delta, bracket)
    keep_others = validate.choice("unreachable", unreachable, ("raise", "nan")) == "nan"
    problem = Problem.of(make_mechanism, epsilon, delta, bracket, relation)
    if 0 in problem.shape:
        return np.empty(problem.shape)
    # Search with one dominating pair first, which costs half as much as with both. The epsilon of one pair is at most
    # that of both, so a value that fails for one pair fails for both. The solution is then tested with both pairs. If
    # it fails, or the search finds none, the other pair is tried, and after that both pairs together. Where every value
    # meets the target for one pair, the solution is that of the other pair.
    with provenance.within("calibrate"):
        for pair in problem.pairs():
            with contextlib.suppress(ValueError):
                search = _searched(pair, bracket is None, keep_others)
                if np.all(search.lost | (search.safe != search.unsafe)):
                    return _verified(problem, search, _ROUNDING)
        return _verified(problem, _searched(problem, bracket is None, keep_others), np.inf)


def _searched(problem: Problem, outward: bool, keep_others: bool) -> Search:
    """The search, run until every bracket is closed; ValueError for an element without a solution."""
    no_bracket = np.zeros(problem.target.shape, bool)
    if outward:
        problem, no_bracket = _bracketed(problem, keep_others and problem.direction is None)
    values = problem.round(grid(problem.low, problem.high))
    epsilons = problem.evaluate(values)
    # Some theorems are tighter exactly at one end, such as that of fixed batches at sampling probability 1. If epsilon
    # is monotone without that end, the end is moved to the next value inside the bracket.
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
            + (' Or pass unreachable="nan" to get NaN here and solve the others.' if lost.size > 1 else "")
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
    """What the user can change if no value tried meets the target, or every value does."""
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
    """Where the epsilons of ordered values both rise and fall by more than the gap of their bounds."""
    with np.errstate(invalid="ignore"):
        steps = np.nan_to_num(np.diff(epsilons, axis=0), nan=0.0)
    smaller = np.minimum(epsilons[1:], epsilons[:-1])
    scale = gap_near(target, _WOBBLE, smaller, smaller) * smaller + 1e-9
    return (steps > scale).any(axis=0) & (steps < -scale).any(axis=0)


def _bracketed(problem: Problem, keep_others: bool) -> tuple[Problem, np.ndarray]:
    """The problem with brackets found by going outward from its first brackets, and whether a row found none."""
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
        # Where the two epsilons show the direction, the next bracket begins at the end of this bracket.
        starts = np.where(down, below, np.where(up & ~flat, high, low))
        ends = np.where(up, above, np.where(down & ~flat, low, high))
        try:
            found = problem.evaluate_new(starts, ends)
        except ValueError as error:
            if keep_others:  # NaN would say that the rows still searched have no solution
                raise
            beyond = f" The search ended there, as make_mechanism refused the next value: {error.__cause__ or error}"
            break
        low, high, epsilons = starts, ends, found
    if lost.any() and not keep_others:
        i = int(np.argmax(lost))
        raise ValueError(
            "epsilon must lie between the epsilons of two values > 0, got "
            f"{problem.target[i]:.6g}{problem.element(i)}: "
            f"at {low[i]:.6g} it is {epsilons[0, i]:.6g}, at {high[i]:.6g} it is {epsilons[1, i]:.6g}. "
            + _advice(epsilons[:, i], problem.target[i], outward=True)
            + beyond
        )
    low, high = (np.where(lost, end, found) for end, found in ((problem.low, low), (problem.high, high)))
    return dataclasses.replace(problem.without(lost), low=low, high=high), lost


def _verified(problem: Problem, search: Search, excess: float) -> np.ndarray:
    """The safe values, tested once more in the caller's shape, because rounding depends on the size of a batch.

    A value that fails is moved away from the unsafe end, by a distance that doubles, until it meets the target.
    ValueError if an epsilon exceeds its target by more than ``excess`` (relative).
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
    raise ValueError(
        "bracket must hold a value that also meets the target in a call of jaxdp.epsilon with the shape of your "
        "arguments, got none. Widen the bracket."
    )
