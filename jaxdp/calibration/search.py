"""The root search inside the brackets of all problems of a calibration."""

import numpy as np

from jaxdp.calibration.problem import Problem, grid

# A bracket is closed at this width: relative to the value, or to the first bracket's width if that contains 0.
_RELATIVE = 2e-10
_ABSOLUTE = 1e-16


class Search:
    """One shrinking bracket per problem, by Chandrupatla's method.

    Both ends are tested values. The safe end meets the target and the unsafe end does not. If every value tested first
    meets the target, both ends are the value with the largest epsilon. A tested point is an array (2, problems) of
    values and residuals log(epsilon / target); a residual > 0 does not meet the target.
    """

    def __init__(self, problem: Problem, values: np.ndarray, epsilons: np.ndarray, lost: np.ndarray) -> None:
        self._problem, self.lost = problem, lost
        rising = epsilons[-1] >= epsilons[0]
        # Order the values from the end with the smaller epsilon, the safe end.
        values, epsilons = (np.where(rising, x, x[::-1]) for x in (values, epsilons))
        tested, fails = np.stack([values, self._residual(epsilons)]), epsilons > problem.target
        last, each = len(values) - 1, np.arange(values.shape[1])
        unsafe = np.where(fails.any(axis=0), np.argmax(fails, axis=0), last)
        safe = np.where(fails.any(axis=0), unsafe - 1, last)
        # The end that was moved last, the end opposite to it, and the former end that the newest end replaced.
        newest_is_safe = safe > 0
        self._newest = tested[:, np.where(newest_is_safe, safe, unsafe), each]
        self._opposite = tested[:, np.where(newest_is_safe, unsafe, safe), each]
        self._replaced = tested[:, np.where(newest_is_safe, safe - 1, np.minimum(unsafe + 1, last)), each]

    @property
    def safe(self) -> np.ndarray:
        """The end that meets the target."""
        return np.where(self._newest[1] > 0, self._opposite[0], self._newest[0])

    @property
    def unsafe(self) -> np.ndarray:
        """The end that does not meet the target."""
        return np.where(self._newest[1] > 0, self._newest[0], self._opposite[0])

    def _residual(self, epsilons: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            ratio = np.log(epsilons) - np.log(self._problem.target)
        # The rounding of the logarithms must not change the sign.
        return np.where(epsilons > self._problem.target, np.fmax(ratio, 1e-300), np.fmin(ratio, 0.0))

    def update(self, values: np.ndarray, epsilons: np.ndarray) -> None:
        """Shrink each bracket with one tested value per problem. A value outside its bracket is ignored."""
        tested, newest, opposite = np.stack([values, self._residual(epsilons)]), self._newest, self._opposite
        inside = (np.minimum(newest[0], opposite[0]) < values) & (values < np.maximum(newest[0], opposite[0]))
        same_side = (tested[1] > 0) == (newest[1] > 0)
        self._replaced = np.where(inside, np.where(same_side, newest, opposite), self._replaced)
        self._opposite = np.where(inside & ~same_side, newest, opposite)
        self._newest = np.where(inside, tested, newest)

    def candidates(self) -> np.ndarray | None:
        """Values to test for each problem (the safe end if its bracket is closed); None if all brackets are closed.

        Two values lie on the two sides of the estimated solution. If all estimates are good, the values are so close
        that they close the bracket. Otherwise they are far enough apart to enclose the solution, and the estimate
        itself is a third value: a compiled call with three values takes little longer.
        """
        problem, safe, unsafe = self._problem, self.safe, self.unsafe
        low, high = np.minimum(safe, unsafe), np.maximum(safe, unsafe)
        least = _ABSOLUTE * np.where((problem.low <= 0) & (problem.high >= 0), problem.high - problem.low, 0.0)
        tolerance = np.where(problem.whole, 1.0, np.maximum(_RELATIVE * np.abs(safe), least))
        middle = grid(low, high, 3)[1]
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
        """(solution, doubt): the zero of the inverse quadratic through the three points, its distance from the chord's.

        Where Chandrupatla's criterion rejects the quadratic: the middle, and a quarter of the bracket's width.
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
