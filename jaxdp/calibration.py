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

# Values tested first, from end to end: they show whether the function is monotone.
_CANDIDATES = 8
# Width at which a bracket is closed: relative to the value; relative to the first bracket where that contains 0.
_RELATIVE = 2e-10
_ABSOLUTE = 1e-16
# Never reached: a search that halves its bracket, from the largest number to the smallest, takes about 60.
_MAX_CALLS = 200
# Relative rise and fall of epsilon that may come from the gap of its bounds; more means that it is not monotone.
_WOBBLE = 0.01
# Relative excess over the target that may come from rounding (7e-14 seen).
_ROUNDING = 1e-11
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
    _refuse_traced(epsilon, delta, bracket)
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
            return _verified(problem, _searched(pair, values, keep_others), lost, _ROUNDING)
    return _verified(problem, _searched(problem, values, keep_others), lost, np.inf)


def _searched(problem: Problem, values: np.ndarray, keep_others: bool) -> _Search:
    """The search from the first candidates until every bracket is closed; ValueError where there is nothing to find."""
    epsilons = problem.evaluate(values)
    # Some theorems are better at an end alone, as that of fixed batches at the sampling probability 1.
    for end, others in ((-1, slice(None, -1)), (0, slice(1, None))):
        jumps = _turned(problem.target, epsilons) & ~_turned(problem.target, epsilons[others])
        if jumps.any():
            values[end] = np.where(jumps, problem.next_inside(values[end]), values[end])
            epsilons[end] = problem.evaluate(values[[end]])
    lost = ~(np.minimum(epsilons[0], epsilons[-1]) <= problem.target)
    if lost.any() and not keep_others:
        i = int(np.argmax(lost))
        at = [f"{v[i]:.6g} it is {e[i]:.6g}" for v, e in zip(values, epsilons, strict=True)]
        raise ValueError(
            f"epsilon must be reachable in the bracket, got {problem.target[i]:.6g}{problem.element(i)}: "
            f"at the low end {at[0]}, at the high end {at[-1]}. Widen the bracket."
            + (f" Only whole values were tried, because {problem.refusal}" if problem.whole else "")
            + (' Or let the others through with unreachable="nan".' if lost.size > 1 else "")
        )
    turned = _turned(problem.target, epsilons) & ~lost
    if turned.any():
        i = int(np.argmax(turned))
        seen = ", ".join(f"{e:.4g} at {v:.4g}" for v, e in zip(values[:, i], epsilons[:, i], strict=True))
        at_element = problem.element(i)
        raise ValueError(f"make_mechanism must be monotone in epsilon inside the bracket, got {seen}{at_element}.")
    search = _Search(problem.without(lost), values, epsilons, lost)
    for _ in range(_MAX_CALLS):
        candidates = search.candidates()
        if candidates is None:
            break
        for tested in zip(candidates, problem.evaluate(candidates), strict=True):
            search.update(*tested)
    return search


def _turned(target: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Where epsilons over ordered values both rise and fall, by more than what their bounds may be apart."""
    with np.errstate(invalid="ignore"):
        steps = np.nan_to_num(np.diff(epsilons, axis=0), nan=0.0)
    smaller = np.minimum(epsilons[1:], epsilons[:-1])
    scale = accounting.gap_near(target, _WOBBLE, smaller, smaller) * smaller + 1e-9
    return (steps > scale).any(axis=0) & (steps < -scale).any(axis=0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The calibrations to be made: one row per element of the broadcast shape.

    refusal: what was said of a value that is not whole, where only whole ones are tried. by_array: make takes arrays of
    values. direction: the one dominating pair that is accounted for, None for all that the relation asks for.
    """

    make: Callable[..., Mechanism]
    shape: tuple[int, ...]
    target: np.ndarray
    delta: np.ndarray
    low: np.ndarray
    high: np.ndarray
    relation: Relation | None
    refusal: str
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
            return cls(make, empty, target, delta, low, high, relation, "", True)
        try:
            refusal = _refusal_of_fractions(make, low.flat[0], high.flat[0])
            if refusal:
                low, high = np.ceil(low), np.floor(high)
                validate.reject("bracket", low, ~(low <= high), "wide enough to hold a whole number")
            first = make(_number(low.flat[0]))
        except ValueError as error:
            if bracket is None:
                raise ValueError(_NEEDS_BRACKET.format(error)) from error
            raise
        shape = validate.broadcast(epsilon=target, delta=delta, bracket=low, mechanism=np.empty(_shape_of(first)))
        target, delta, low, high = (np.broadcast_to(a, shape).ravel() for a in (target, delta, low, high))
        by_array = _takes_arrays(make, (np.rint if refusal else np.array)(_grid(low, high)).reshape(-1, *shape))
        if not by_array and shape:
            raise ValueError("make_mechanism must accept arrays when several values are calibrated at once.")
        return cls(make, shape, target, delta, low, high, relation, refusal, by_array)

    @property
    def whole(self) -> bool:
        """Whether only whole values are tried."""
        return bool(self.refusal)

    def round(self, values: np.ndarray) -> np.ndarray:
        """The values, rounded to whole numbers where only those are accepted, and moved into the bracket."""
        return np.clip(np.rint(values) if self.whole else values, self.low, self.high)

    def next_inside(self, end: np.ndarray) -> np.ndarray:
        """The next value inside the bracket from one of its ends."""
        towards = np.where(end == self.high, self.low, self.high)
        return end + np.sign(towards - end) if self.whole else np.nextafter(end, towards)

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
        value: Any = values.reshape(self.shape) if self.shape else _number(values[0])
        delta = self.delta.reshape(self.shape)
        return np.reshape(accounting.epsilon(self.make(value), delta, relation=self.relation), values.shape)

    def _epsilon(self, values: Any) -> Any:
        delta, target = (x.reshape(self.shape) for x in (self.delta, self.target))
        mechanism = self.make(values)
        return accounting.epsilon_near(mechanism, delta, target, relation=self.relation, direction=self.direction)


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


def _refuse_traced(*numbers: Any) -> None:
    if validate.is_traced(numbers):
        raise RuntimeError("calibrate searches on concrete numbers: call it outside jit, vmap and grad.")


def _shape_of(mechanism: Any) -> tuple[int, ...]:
    _refuse_traced(mechanism)
    accounting.check_mechanism(mechanism)
    return batch_shape(mechanism)


def _refusal_of_fractions(make: Callable[..., Mechanism], low: float, high: float) -> str:
    """What is said of a fraction inside the bracket, if it is refused while the whole number beside it is not."""
    fraction = low + 0.37 * (high - low)
    fraction = fraction + 0.5 if float(fraction).is_integer() else fraction
    whole = min(max(np.rint(fraction), np.ceil(low)), np.floor(high))
    try:
        _shape_of(make(float(fraction)))
    except (ValueError, TypeError) as error:
        _shape_of(make(_number(whole)))
        return f"{fraction:.6g} was refused: {error}"
    return ""


def _takes_arrays(make: Callable[..., Mechanism], values: np.ndarray) -> bool:
    try:
        return _shape_of(make(values)) == values.shape
    except (ValueError, TypeError):
        return False


def _grid(low: np.ndarray, high: np.ndarray, count: int = _CANDIDATES) -> np.ndarray:
    """Equally spaced candidates from end to end: in the logarithm where the ends are a factor of 4 apart."""
    steps = np.linspace(0.0, 1.0, count)[:, None]
    geometric = (np.minimum(low, high) > 0) & ((high / 4 > low) | (low / 4 > high))
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
        below = np.maximum(np.clip(low, 2.0**-511, 0.5) ** 2, 1 / largest)
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


class _Search:
    """A shrinking bracket per problem, by Chandrupatla's method.

    Its ends were tested, one of them meets the target and one does not; both are the same where the bracket is closed.
    What was tested is an array (value, log(epsilon / target)) of all problems: above 0 the target is not met.
    """

    def __init__(self, problem: Problem, values: np.ndarray, epsilons: np.ndarray, lost: np.ndarray) -> None:
        self._problem, self.lost = problem, lost
        rising = epsilons[-1] >= epsilons[0]
        # the candidates from the safe end on
        values, epsilons = (np.where(rising, x, x[::-1]) for x in (values, epsilons))
        tested, fails = np.stack([values, self._residual(epsilons)]), epsilons > problem.target
        last, each = len(values) - 1, np.arange(values.shape[1])
        unsafe = np.where(fails.any(axis=0), np.argmax(fails, axis=0), last)
        safe = np.where(fails.any(axis=0), unsafe - 1, last)
        # the newest end, and beyond it a value that it replaced; the end opposite to both
        second = safe > 0
        self._newest = tested[:, np.where(second, safe, unsafe), each]
        self._opposite = tested[:, np.where(second, unsafe, safe), each]
        self._replaced = tested[:, np.where(second, safe - 1, np.minimum(unsafe + 1, last)), each]

    @property
    def safe(self) -> np.ndarray:
        """The end that meets the target."""
        return np.where(self._newest[1] > 0, self._opposite[0], self._newest[0])

    @property
    def unsafe(self) -> np.ndarray:
        """The other end."""
        return np.where(self._newest[1] > 0, self._newest[0], self._opposite[0])

    def _residual(self, epsilons: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            ratio = np.log(epsilons) - np.log(self._problem.target)
        # the rounding of a logarithm must not change the side
        return np.where(epsilons > self._problem.target, np.fmax(ratio, 1e-300), np.fmin(ratio, 0.0))

    def update(self, values: np.ndarray, epsilons: np.ndarray) -> None:
        """Take in one tested value per problem, which tells nothing new unless it lies inside the bracket."""
        tested, newest, opposite = np.stack([values, self._residual(epsilons)]), self._newest, self._opposite
        moved = (np.minimum(newest[0], opposite[0]) < values) & (values < np.maximum(newest[0], opposite[0]))
        same_side = (tested[1] > 0) == (newest[1] > 0)
        self._replaced = np.where(moved, np.where(same_side, newest, opposite), self._replaced)
        self._opposite = np.where(moved & ~same_side, newest, opposite)
        self._newest = np.where(moved, tested, newest)

    def candidates(self) -> np.ndarray | None:
        """Values to test for each problem (an end where its bracket is closed); None when all brackets are closed.

        Two on either side of the solution: so close that they close the bracket where the solution is known so well,
        else so far that they enclose it, with one more between them. A compiled call with three takes little longer.
        """
        problem, safe, unsafe = self._problem, self.safe, self.unsafe
        low, high = np.minimum(safe, unsafe), np.maximum(safe, unsafe)
        least = _ABSOLUTE * np.where((problem.low <= 0) & (problem.high >= 0), problem.high - problem.low, 0.0)
        tolerance = np.where(problem.whole, 1.0, np.maximum(_RELATIVE * np.abs(safe), least))
        middle = _grid(low, high, 3)[1]
        is_open = (high - low > tolerance) & (middle != low) & (middle != high)
        if not is_open.any():
            return None
        solution, doubt = self._interpolated(middle)
        near = 0.2 * tolerance
        with np.errstate(invalid="ignore"):
            close = doubt / (high - low) * doubt < near
        side = np.where(close, near, doubt)
        places = [-side, side] if close[is_open].all() else [-side, side, np.zeros_like(side)]
        space = tolerance if problem.whole else near
        tested = problem.round(solution + np.stack(places))
        return np.where(is_open, np.clip(tested, low + space, high - space), safe)

    def _interpolated(self, middle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The zero of the inverse quadratic through the three values, and how far it is from that of the chord.

        Where it is not to be trusted: the middle, and a quarter of the bracket.
        """
        points = self._newest, self._opposite, self._replaced
        logarithmic = self._problem.low > 0
        a, b, c = (np.where(logarithmic, np.log(np.where(logarithmic, p[0], 1.0)), p[0]) for p in points)
        fa, fb, fc = (p[1] for p in points)
        with np.errstate(all="ignore"):
            place, rise = (a - b) / (c - b), (fa - fb) / (fc - fb)
            trusted = (rise**2 < place) & ((1 - rise) ** 2 < 1 - place)
            chord = fa / (fa - fb)
            share = chord * fc / (fc - fb) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
            solution, doubt = a + share * (b - a), np.abs((share - chord) * (b - a))
            solution = np.where(logarithmic, np.exp(solution), solution)
            doubt = doubt * np.where(logarithmic, solution, 1.0)
        trusted &= np.isfinite(solution) & np.isfinite(doubt)
        quarter = 0.25 * np.abs(self._newest[0] - self._opposite[0])
        return np.where(trusted, solution, middle), np.where(trusted, doubt, quarter)


def _verified(problem: Problem, search: _Search, lost: np.ndarray, excess: float) -> np.ndarray:
    """The safe values, tested once more in the caller's shape: the rounding depends on the size of a batch.

    A value that fails is moved away from the unsafe end, by a distance that doubles, until it meets the target.
    ValueError where an epsilon exceeds its target by more than ``excess`` (relative).
    """
    values, lost = search.safe, lost | search.lost
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
