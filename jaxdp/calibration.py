"""The parameter of a mechanism that meets a target epsilon at a delta, always from the safe side."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxdp import accounting, validate
from jaxdp.domains import FINITE
from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.typing import Array, Real, Relation

# Values tested in one call of a verb. Batches are padded to 8 points, so that fewer values would not be cheaper.
_CANDIDATES = 8
# Points through which the inverse function is interpolated, and the least relative difference of their residuals
# log(epsilon / target): of closer points the difference is mostly rounding.
_INTERPOLATED = 8
_SEPARATION = 0.01
# Width at which a bracket is closed: relative to the value; relative to the first bracket where that contains 0.
_RELATIVE = 2e-10
_ABSOLUTE = 1e-16
# Half-distances of the pairs of values around the interpolated solution, in widths of the bracket. The smallest pair
# that contains the solution becomes the next bracket.
_OFFSETS = np.array([1e-6, 1e-4, 1e-2, 1 / 3])
# Never reached by a monotone function: the widest pair shrinks a bracket by a third in every call.
_MAX_CALLS = 200
# Relative rise and fall of epsilon that may come from the gap of its bounds; more means that it is not monotone.
_WOBBLE = 0.01
# First bracket of a search without one. Its ends are squared from call to call, up to the largest power of 2 that is a
# double (for whole numbers: below which every whole number is a double).
_START = (1.0, 4.0)
_LARGEST, _LARGEST_WHOLE = 2.0**1022, 2.0**53
# Nine calls reach the largest number from 1, and nine the smallest; a monotone function needs no more.
_OUTWARD_CALLS = 20
_NEEDS_BRACKET = "bracket must be given unless make_mechanism accepts every positive number. Tried without one: {}"


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
    if validate.is_traced(epsilon, delta, bracket):
        raise RuntimeError("calibrate searches on concrete numbers: call it outside jit, vmap and grad.")
    keep_others = validate.choice("unreachable", unreachable, ("raise", "nan")) == "nan"
    problem = Problem.of(make_mechanism, epsilon, delta, bracket, relation)
    if 0 in problem.shape:
        return np.empty(problem.shape)
    lost = np.zeros(problem.target.shape, bool)
    if bracket is None:
        problem, lost = _bracketed(problem, keep_others)
    values = problem.round(_grid(problem.low, problem.high))
    # The search for one dominating pair costs half of that for both. Its epsilon is at most that of both, so that a
    # value which fails for the pair fails for both. Its solution is then tested for both; where it does not meet the
    # target, or the pair has no solution, the search is made for both.
    for pair in problem.pairs():
        with contextlib.suppress(ValueError):
            search = _searched(pair, values, keep_others)
            lost_here = lost | search.lost
            if (lost_here | (problem.evaluate_one(search.safe) <= problem.target)).all():
                return problem.answer(search.safe, lost_here)
    search = _searched(problem, values, keep_others)
    return _verified(problem, search, lost | search.lost)


def _searched(problem: Problem, values: np.ndarray, keep_others: bool) -> _Search:
    """The search from the first candidates until every bracket is closed; ValueError where there is nothing to find."""
    epsilons = problem.evaluate(values)
    lost = ~(np.minimum(epsilons[0], epsilons[-1]) <= problem.target)
    if lost.any() and not keep_others:
        i = int(np.argmax(lost))
        at = [f"{v[i]:.6g} it is {e[i]:.6g}" for v, e in zip(values, epsilons, strict=True)]
        raise ValueError(
            f"epsilon must be reachable in the bracket, got {problem.target[i]:.6g}{problem.element(i)}: "
            f"at the low end {at[0]}, at the high end {at[-1]}. Widen the bracket."
            + (' Or let the others through with unreachable="nan".' if lost.size > 1 else "")
        )
    _require_monotone(problem, epsilons, ~lost)
    search = _Search(problem.without(lost), values, epsilons, lost)
    for _ in range(_MAX_CALLS):
        candidates = search.candidates()
        if candidates is None:
            break
        search.update(candidates, problem.evaluate(candidates))
    return search


@dataclasses.dataclass(frozen=True)
class Problem:
    """The calibrations to be made: one row per element of the broadcast shape.

    whole: only whole values are tried. by_array: make takes arrays of values. direction: the one dominating pair that
    is accounted for, None for all that the relation asks for.
    """

    make: Callable[..., Mechanism]
    shape: tuple[int, ...]
    target: np.ndarray
    delta: np.ndarray
    low: np.ndarray
    high: np.ndarray
    relation: Relation | None
    whole: bool
    by_array: bool
    direction: str | None = None

    @classmethod
    def of(
        cls,
        make: Callable[..., Mechanism],
        epsilon: Real,
        delta: Real,
        bracket: tuple[Real, Real] | None,
        relation: Relation | None,
    ) -> Problem:
        """The problem of a call of `calibrate`."""
        target = validate.real_array("epsilon", epsilon)
        validate.reject("epsilon", target, ~(target >= 0), ">= 0")
        delta = validate.probability("delta", delta)
        low, high = _ends(_START if bracket is None else bracket)
        empty = validate.broadcast(epsilon=target, delta=delta, bracket=low)
        if 0 in empty:
            return cls(make, empty, target, delta, low, high, relation, False, True)
        try:
            whole = _refuses_fractions(make, low.flat[0], high.flat[0])
            if whole:
                low, high = np.ceil(low), np.floor(high)
                validate.reject("bracket", low, ~(low <= high), "wide enough to hold a whole number")
            first = make(_number(low.flat[0]))
        except ValueError as error:
            if bracket is None:
                raise ValueError(_NEEDS_BRACKET.format(error)) from error
            raise
        shape = validate.broadcast(epsilon=target, delta=delta, bracket=low, mechanism=np.empty(_shape_of(first)))
        target, delta, low, high = (np.broadcast_to(a, shape).ravel() for a in (target, delta, low, high))
        by_array = _takes_arrays(make, (np.rint if whole else np.array)(_grid(low, high)).reshape(-1, *shape))
        if not by_array and shape:
            raise ValueError("make_mechanism must accept arrays when several values are calibrated at once.")
        return cls(make, shape, target, delta, low, high, relation, whole, by_array)

    def round(self, values: np.ndarray) -> np.ndarray:
        """The values, rounded to whole numbers where only those are accepted, and moved into the bracket."""
        return np.clip(np.rint(values) if self.whole else values, self.low, self.high)

    def pairs(self) -> list[Problem]:
        """The problem for each dominating pair alone; an empty list where there is only one pair."""
        first = self.make(_number(self.low[0]) if not self.shape else self.low.reshape(self.shape))
        directions = first.directions(self.relation)
        return [dataclasses.replace(self, direction=each) for each in directions] if len(directions) > 1 else []

    def without(self, lost: np.ndarray) -> Problem:
        """The problem with an infinite target, which every value meets, in the rows ``lost``."""
        return dataclasses.replace(self, target=np.where(lost, np.inf, self.target))

    def element(self, i: int) -> str:
        """Which element of the broadcast shape the i-th problem is, for messages."""
        index = ", ".join(str(k) for k in np.unravel_index(i, self.shape))
        return f" for element [{index}]" if self.shape else ""

    def answer(self, values: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """One value per problem, in the caller's shape; NaN where there is none."""
        return np.where(lost, np.nan, values).reshape(self.shape)[()].astype(np.float64)

    def evaluate(self, values: np.ndarray) -> np.ndarray:
        """Certified epsilons of candidates, shape (candidates, problems), in one call where possible."""
        if self.by_array:
            return self._epsilon(values.reshape(-1, *self.shape)).reshape(values.shape)
        distinct, where = np.unique(values, return_inverse=True)
        return np.array([self._epsilon(_number(v)) for v in distinct], dtype=np.float64)[where].reshape(values.shape)

    def evaluate_new(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Certified epsilons, shape (2, problems), of values not named by the caller: a refusal asks for a bracket."""
        values = np.stack([low, high])
        try:
            for value in [values.reshape(-1, *self.shape)] if self.by_array else map(_number, values.ravel()):
                _shape_of(self.make(value))
        except ValueError as error:
            raise ValueError(_NEEDS_BRACKET.format(error)) from error
        return self.evaluate(values)

    def evaluate_one(self, values: np.ndarray) -> np.ndarray:
        """Certified epsilons of one value per problem, in the batch of the caller's shape, as `jaxdp.epsilon` gives."""
        if not self.shape:
            return np.array([self._epsilon(_number(values[0]))], dtype=np.float64)
        return self._epsilon(values.reshape(self.shape)).ravel()

    def _epsilon(self, values: Any) -> Any:
        delta = self.delta.reshape(self.shape)
        if self.direction is None:
            return accounting.epsilon(self.make(values), delta, relation=self.relation)
        return accounting.epsilon_of_pair(self.make(values), delta, self.direction, relation=self.relation)


def _ends(bracket: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        low, high = bracket
    except (TypeError, ValueError):
        raise ValueError(f"bracket must be a pair (low, high), got {bracket!r}.") from None
    low, high = validate.inside("bracket", low, FINITE), validate.inside("bracket", high, FINITE)
    validate.broadcast(low=low, high=high)
    low, high = np.broadcast_arrays(low, high)
    validate.reject("bracket", low, ~(low < high), "a pair with low < high")
    return low, high


def _number(value: Any) -> int | float:
    """A plain number: an int where it is whole, so that `range(value)` works in a caller's function."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)


def _shape_of(mechanism: Any) -> tuple[int, ...]:
    accounting.check_mechanism(mechanism)
    return batch_shape(mechanism)


def _refuses_fractions(make: Callable[..., Mechanism], low: float, high: float) -> bool:
    """Whether a fraction inside the bracket is refused while the whole number beside it is not."""
    fraction = low + 0.37 * (high - low)
    fraction = fraction + 0.5 if float(fraction).is_integer() else fraction
    whole = min(max(np.rint(fraction), np.ceil(low)), np.floor(high))
    try:
        _shape_of(make(float(fraction)))
    except (ValueError, TypeError):
        _shape_of(make(_number(whole)))
        return True
    return False


def _takes_arrays(make: Callable[..., Mechanism], values: np.ndarray) -> bool:
    try:
        return _shape_of(make(values)) == values.shape
    except (ValueError, TypeError):
        return False


def _grid(low: np.ndarray, high: np.ndarray, count: int = _CANDIDATES) -> np.ndarray:
    """Equally spaced candidates from end to end: in the logarithm where the ends are a factor of 4 apart."""
    steps = np.linspace(0.0, 1.0, count)[:, None]
    geometric = (np.minimum(low, high) > 0) & ((high > 4 * low) | (low > 4 * high))
    safe_low, safe_high = np.where(geometric, low, 1.0), np.where(geometric, high, 1.0)
    logarithmic = np.exp(np.log(safe_low) + steps * (np.log(safe_high) - np.log(safe_low)))
    grid = np.where(geometric, logarithmic, low + (high - low) * steps)
    grid[0], grid[-1] = low, high
    return grid


def _bracketed(problem: Problem, keep_others: bool) -> tuple[Problem, np.ndarray]:
    """The problem with brackets found by going outward from its own, and the rows in which none was found."""
    low, high = problem.low, problem.high
    epsilons = problem.evaluate_new(low, high)
    largest = _LARGEST_WHOLE if problem.whole else _LARGEST
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
        below = np.maximum(np.minimum(np.maximum(low, 2.0**-511) ** 2, 0.25), 1 / largest)
        # where the two epsilons tell the direction, the next bracket begins at the end of this one
        starts = np.where(down, below, np.where(up & ~flat, high, low))
        ends = np.where(up, above, np.where(down & ~flat, low, high))
        low, high, epsilons = starts, ends, problem.evaluate_new(starts, ends)
    if lost.any() and not keep_others:
        i = int(np.argmax(lost))
        raise ValueError(
            f"epsilon must lie between those of two positive numbers, got {problem.target[i]:.6g}{problem.element(i)}: "
            f"at {low[i]:.6g} it is {epsilons[0, i]:.6g}, at {high[i]:.6g} it is {epsilons[1, i]:.6g}. Give a bracket."
        )
    low, high = (np.where(lost, end, found) for end, found in ((problem.low, low), (problem.high, high)))
    return dataclasses.replace(problem.without(lost), low=low, high=high), lost


def _require_monotone(problem: Problem, epsilons: np.ndarray, sought: np.ndarray) -> None:
    """ValueError where epsilons over equally ordered values rise and fall."""
    with np.errstate(invalid="ignore"):
        steps = np.nan_to_num(np.diff(epsilons, axis=0), nan=0.0)
    scale = _WOBBLE * np.minimum(epsilons[1:], epsilons[:-1]) + 1e-9
    turned = (steps > scale).any(axis=0) & (steps < -scale).any(axis=0) & sought
    if turned.any():
        i = int(np.argmax(turned))
        seen = ", ".join(f"{e:.4g}" for e in epsilons[:, i])
        at = problem.element(i)
        raise ValueError(f"make_mechanism must be monotone in epsilon inside the bracket, got epsilons {seen}{at}.")


class _Search:
    """A shrinking bracket per problem: `safe` was tested and meets the target, `unsafe` was tested and does not."""

    def __init__(self, problem: Problem, values: np.ndarray, epsilons: np.ndarray, lost: np.ndarray) -> None:
        self._problem, self.lost = problem, lost
        self._values, self._epsilons = values, epsilons
        rising = epsilons[-1] >= epsilons[0]
        self._sign = np.where(rising, 1.0, -1.0)
        self.safe = np.where(rising, values[0], values[-1])
        self.unsafe = np.where(rising, values[-1], values[0])
        all_safe = np.maximum(epsilons[0], epsilons[-1]) <= problem.target
        self.safe = np.where(all_safe, self.unsafe, self.safe)
        self._narrow(values, epsilons)

    def _narrow(self, values: np.ndarray, epsilons: np.ndarray) -> None:
        """Move the bracket's ends to the innermost tested pair (safe, unsafe)."""
        signed, meets = values * self._sign, epsilons <= self._problem.target
        # `unsafe` becomes the first failing value beyond `safe`: both ends are tested even if epsilon is not monotone
        limit = np.min(np.where(meets | (signed < self.safe * self._sign), np.inf, signed), axis=0)
        limit = np.minimum(limit, self.unsafe * self._sign)
        inside = np.where(meets & (signed < limit), signed, -np.inf)
        self.safe = self._sign * np.maximum(self.safe * self._sign, np.max(inside, axis=0))
        done = self.safe == self.unsafe
        self.unsafe = np.where(done, self.unsafe, self._sign * limit)

    def update(self, values: np.ndarray, epsilons: np.ndarray) -> None:
        """Take in tested candidates."""
        self._values = np.concatenate([self._values, values])
        self._epsilons = np.concatenate([self._epsilons, epsilons])
        self._narrow(values, epsilons)

    def candidates(self) -> np.ndarray | None:
        """The next values to test, or None when every bracket is closed."""
        width = np.abs(self.unsafe - self.safe)
        around_zero = (self._problem.low <= 0) & (self._problem.high >= 0)
        least = np.where(around_zero, _ABSOLUTE * (self._problem.high - self._problem.low), 0.0)
        tolerance = np.where(self._problem.whole, 1.0, np.maximum(_RELATIVE * np.abs(self.safe), least))
        middle = _grid(self.safe, self.unsafe, 3)[1]
        is_open = (width > tolerance) & (middle != self.safe) & (middle != self.unsafe)
        if not is_open.any():
            return None
        low, high = np.minimum(self.safe, self.unsafe), np.maximum(self.safe, self.unsafe)
        centre = self._interpolated(middle)
        offsets = np.maximum(_OFFSETS[:, None] * width, tolerance / 3)
        if self._problem.whole:
            offsets = np.maximum(offsets, np.arange(len(_OFFSETS))[:, None] + 0.5)
        tested = np.concatenate([centre + offsets, centre - offsets])
        values = np.where((tested > low) & (tested < high), tested, middle)
        values = self._problem.round(values)
        return np.where(is_open, np.clip(values, low, high), self.safe)

    def _interpolated(self, fallback: np.ndarray) -> np.ndarray:
        """Inverse interpolation of log(value) at log(target) through the tested points nearest to the target."""
        with np.errstate(all="ignore"):
            logarithmic = (self._problem.low > 0)[None, :]
            x = np.where(logarithmic, np.log(np.where(logarithmic, self._values, 1.0)), self._values)
            y = np.log(self._epsilons) - np.log(self._problem.target)
            order = np.argsort(np.where(np.isfinite(y), np.abs(y), np.inf), axis=0, kind="stable")
            x, y = (np.take_along_axis(a, _distinct(order, y), axis=0) for a in (x, y))
            solution = _neville(y, x)
            solution = np.where(logarithmic[0], np.exp(solution), solution)
            low, high = np.minimum(self.safe, self.unsafe), np.maximum(self.safe, self.unsafe)
            return np.where((solution > low) & (solution < high), solution, fallback)


def _distinct(order: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The first `_INTERPOLATED` entries of each column of ``order`` whose y differ by more than `_SEPARATION`."""
    chosen = np.repeat(order[:1], _INTERPOLATED, axis=0)
    for column in range(order.shape[1]):
        picked: list[int] = []
        for i in order[:, column]:
            value = y[i, column]
            if all(abs(value - y[j, column]) > _SEPARATION * abs(value) for j in picked):
                picked.append(i)
            if len(picked) == _INTERPOLATED:
                break
        chosen[: len(picked), column] = picked
    return chosen


def _neville(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The value at y = 0 of the polynomial through the rows (y, x)."""
    table = list(x)
    for level in range(1, len(table)):
        table = [(y[i + level] * table[i] - y[i] * table[i + 1]) / (y[i + level] - y[i]) for i in range(len(table) - 1)]
    return table[0]


def _verified(problem: Problem, search: _Search, lost: np.ndarray) -> np.ndarray:
    """The safe values, tested once more in the caller's shape: the rounding depends on the size of a batch.

    A value that fails is moved away from the unsafe end, by a distance that doubles, until it meets the target.
    """
    values, step = search.safe, 1.0 if problem.whole else 2.0**-50
    away = np.sign(search.safe - search.unsafe)
    for _ in range(_MAX_CALLS):
        good = lost | (problem.evaluate_one(values) <= problem.target)
        if good.all():
            return problem.answer(values, lost)
        shift = step if problem.whole else step * np.abs(values)
        values = problem.round(np.where(good, values, values + away * shift))
        step *= 2
    raise ValueError("no value in the bracket meets the target when it is evaluated by itself; widen the bracket.")
