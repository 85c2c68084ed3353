"""The calibrations of one call of `calibrate`: their targets and brackets, and how candidate values are evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import accounting, validate
from jaxdp.domains import FINITE
from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.typing import Real, Relation

# First bracket of a search if the caller gives none.
START = (1.0, 4.0)
NEEDS_BRACKET = "bracket (low, high) must be given, because a number that the search tried was refused: {}"
# Number of values tested first, from end to end of the bracket. They show whether epsilon is monotone.
_CANDIDATES = 8


@dataclasses.dataclass(frozen=True)
class Problem:
    """The calibrations of one call: one row (or problem) per element of the broadcast shape.

    refusal: the error message for a fraction if only whole values are tried, else "". by_array: whether make accepts
    arrays of values. direction: the only dominating pair that is accounted for; None: all pairs of the relation. seen:
    value -> epsilon of the candidates tested so far, used if there is only one problem.
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
    seen: dict[float, float] = dataclasses.field(default_factory=dict)

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
        low, high = _ends(START if bracket is None else bracket)
        asked_shape = validate.broadcast(epsilon=target, delta=delta, bracket=low)
        if 0 in asked_shape:
            return cls(make, asked_shape, target, delta, low, high, relation, "", True)
        try:
            refusal = _refusal_of_fractions(make, low.flat[0], high.flat[0])
            if refusal:
                low, high = np.ceil(low), np.floor(high)
                validate.reject("bracket", low, ~(low <= high), "wide enough to hold a whole number")
            mechanism_shape = _shape_of(make(_number(low.flat[0])))
        except ValueError as error:
            message = NEEDS_BRACKET if bracket is None else "an end of bracket was refused: {}"
            raise ValueError(message.format(error)) from error
        shape = validate.broadcast(epsilon=target, delta=delta, bracket=low, mechanism=np.empty(mechanism_shape))
        target, delta, low, high = (np.broadcast_to(a, shape).ravel() for a in (target, delta, low, high))
        by_array = _takes_arrays(make, (np.rint if refusal else np.array)(grid(low, high)).reshape(-1, *shape))
        if not by_array and shape:
            raise ValueError("make_mechanism must accept arrays when several values are calibrated at once.")
        return cls(make, shape, target, delta, low, high, relation, refusal, by_array)

    @property
    def whole(self) -> bool:
        """Whether only whole values are tried."""
        return bool(self.refusal)

    def round(self, values: np.ndarray) -> np.ndarray:
        """The values, rounded if only whole values are tried, and clipped to the bracket."""
        return np.clip(np.rint(values) if self.whole else values, self.low, self.high)

    def next_inside(self, end: np.ndarray) -> np.ndarray:
        """The value inside the bracket that is next to the given end: the next double or whole number."""
        towards = np.where(end == self.high, self.low, self.high)
        return end + np.sign(towards - end) if self.whole else np.nextafter(end, towards)

    def pairs(self) -> list[Problem]:
        """The problem for each dominating pair alone; an empty list if there is only one pair."""
        first = self.make(_number(self.low[0]) if not self.shape else self.low.reshape(self.shape))
        directions = first.directions(self.relation)
        problems = [dataclasses.replace(self, direction=each, seen={}) for each in directions]
        return problems if len(problems) > 1 else []

    def without(self, lost: np.ndarray) -> Problem:
        """The problem with the target inf, which every value meets, in the rows where ``lost`` is True."""
        return dataclasses.replace(self, target=np.where(lost, np.inf, self.target))

    def element(self, i: int) -> str:
        """The index of the i-th problem in the broadcast shape, as words for an error message."""
        index = ", ".join(str(k) for k in np.unravel_index(i, self.shape))
        return f" for element [{index}]" if self.shape else ""

    def answer(self, values: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """One value per problem, in the caller's shape; NaN where ``lost``."""
        return np.where(lost, np.nan, values).reshape(self.shape)[()].astype(np.float64)

    def evaluate(self, values: np.ndarray) -> np.ndarray:
        """Certified epsilons of the candidates, shape (candidates, problems), in one call if possible."""
        if self.shape:
            return self._epsilon(values.reshape(-1, *self.shape)).reshape(values.shape)
        asked = values[:, 0].tolist()
        new = np.array([value for value in dict.fromkeys(asked) if value not in self.seen])
        if new.size:
            found = self._epsilon(new) if self.by_array else [self._epsilon(_number(value)) for value in new]
            self.seen.update(zip(new.tolist(), found, strict=True))
        return np.array([[self.seen[value]] for value in asked], np.float64)

    def evaluate_new(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Certified epsilons, shape (2, problems), at values not given by the caller; a refusal asks for a bracket."""
        try:
            return self.evaluate(np.stack([low, high]))
        except ValueError as error:
            raise ValueError(NEEDS_BRACKET.format(error)) from error

    def evaluate_one(self, values: np.ndarray) -> np.ndarray:
        """Certified epsilons of one value per problem: the numbers of `jaxdp.epsilon` in the caller's shape."""
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
    bad = np.ravel(~(low < high))
    if bad.any():
        first = np.argmax(bad)
        pair = float(low.flat[first]), float(high.flat[first])
        raise ValueError(f"bracket must be a pair (low, high) with low < high, got {pair}.")
    return low, high


def _number(value: Any) -> int | float:
    """A Python number: an int if it is whole, so that `range(value)` works in the caller's function."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)


def refuse_traced(*numbers: Any) -> None:
    """RuntimeError for traced numbers: a search cannot be part of a compiled program."""
    if validate.is_traced(numbers):
        raise RuntimeError("calibrate searches on concrete numbers: call it outside jit, vmap and grad.")


def _shape_of(mechanism: Any) -> tuple[int, ...]:
    refuse_traced(mechanism)
    accounting.check_mechanism(mechanism)
    return batch_shape(mechanism)


def _refusal_of_fractions(make: Callable[..., Mechanism], low: float, high: float) -> str:
    """Why a fraction in the bracket is refused, "" if it is accepted. Raises if a whole number is refused too."""
    fraction = low + 0.37 * (high - low)
    fraction = fraction + 0.5 if float(fraction).is_integer() else fraction
    whole = min(max(np.rint(fraction), np.ceil(low)), np.floor(high))
    try:
        _shape_of(make(float(fraction)))
    except (ValueError, TypeError) as error:
        _shape_of(make(_number(whole)))
        return f"{float(fraction)!r} was refused: {error}"
    return ""


def _takes_arrays(make: Callable[..., Mechanism], values: np.ndarray) -> bool:
    try:
        return _shape_of(make(values)) == values.shape
    except (ValueError, TypeError):
        return False


def grid(low: np.ndarray, high: np.ndarray, count: int = _CANDIDATES) -> np.ndarray:
    """Candidates from end to end, equally spaced; in the logarithm if both ends are > 0 and a factor > 4 apart."""
    steps = np.linspace(0.0, 1.0, count)[:, None]
    geometric = (np.minimum(low, high) > 0) & ((high / 4 > low) | (low / 4 > high))
    safe_low, safe_high = np.where(geometric, low, 1.0), np.where(geometric, high, 1.0)
    logarithmic = np.exp(np.log(safe_low) + steps * (np.log(safe_high) - np.log(safe_low)))
    values = np.where(geometric, logarithmic, low + (high - low) * steps)
    values[0], values[-1] = low, high
    return values
