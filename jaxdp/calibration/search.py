"""The search inside brackets whose ends were tested."""

import numpy as np

from jaxdp.calibration.problem import Problem, grid

# Width at which a bracket is closed: relative to the value; relative to the first bracket where that contains 0.
_RELATIVE = 2e-10
_ABSOLUTE = 1e-16


class Search:
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
