"""The numbers of a report, computed by the verbs."""

import dataclasses
from typing import Any, Self

import numpy as np

from jaxdp import validate
from jaxdp.accounting import delta_bounds, epsilon_bounds
from jaxdp.conversions.profile import tradeoff_from_delta
from jaxdp.interval import Bounds
from jaxdp.mechanisms import provenance
from jaxdp.mechanisms.base import Mechanism
from jaxdp.report.text import outward
from jaxdp.runtime.extras import pieces

_POINTS = 33  # points of the privacy profile, besides those asked for


@dataclasses.dataclass(frozen=True)
class Facts:
    """All numbers of a page. bounds: at ``targets``; profile: bounds of delta at ``grid``; total: those of delta(0)."""

    mechanism: Mechanism
    relation: str
    target: str
    targets: np.ndarray
    bounds: Bounds
    grid: np.ndarray
    profile: Bounds
    total: Bounds
    theorem: str

    @classmethod
    def of(cls, mechanism: Mechanism, relation: Any, epsilon: Any, delta: Any, progress: bool = False) -> Self:
        """The facts of a mechanism at the given deltas or epsilons, of which one is None."""
        target, given = ("delta", delta) if epsilon is None else ("epsilon", epsilon)
        targets = np.atleast_1d((validate.probability if epsilon is None else validate.nonnegative)(target, given))
        if targets.ndim != 1 or targets.size == 0:
            raise ValueError(f"{target} must be one number or a list of them, got shape {targets.shape}.")
        with provenance.observe() as calls:
            bounds = (epsilon_bounds if epsilon is None else delta_bounds)(mechanism, targets, relation=relation)
        upper = np.ravel(bounds.upper)
        shown = targets if epsilon is not None else np.array([float(outward(each, True, 9)) for each in upper])
        # finite epsilons > 0, and points from 0 to 1.25 times their largest, denser near 0
        found = shown[np.isfinite(shown) & (shown > 0)]
        if not found.size:
            fallback = float(epsilon_bounds(mechanism, 1e-6, relation=relation).upper)
            found = np.array([fallback if 0 < fallback < np.inf else 1.0])
        even = [float(f"{point:.3g}") for point in 1.25 * found.max() * np.linspace(0.0, 1.0, _POINTS) ** 2]
        grid = np.unique(np.concatenate([even, found]))
        if relation in ("add", "remove"):
            grid = np.concatenate([-grid[:0:-1], grid])
        rows = pieces(grid.size, progress, rows=1)
        parts = [delta_bounds(mechanism, grid[piece], relation=relation) for piece in rows]
        lower, upper = (np.concatenate(side) for side in zip(*parts, strict=True))
        if epsilon is None:  # deltas certified already: the second search may end above them, by its gap
            for place, most in zip(shown, targets, strict=True):
                upper[grid == place] = np.fmin(upper[grid == place], most)
        profile = Bounds(np.fmin(lower, upper), upper)
        at_zero = int(np.flatnonzero(grid == 0)[0])
        total = Bounds(*(float(side[at_zero]) for side in profile))
        theorem = provenance.summary(calls).get("bound", "")
        return cls(mechanism, relation, target, targets, bounds, grid, profile, total, theorem)

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The certified pairs (epsilon, delta), one per target."""
        upper = np.ravel(self.bounds.upper)
        epsilons, deltas = (upper, self.targets) if self.target == "delta" else (self.targets, upper)
        return [(float(e), float(d)) for e, d in zip(epsilons, deltas, strict=True)]

    @property
    def symmetric(self) -> bool:
        """Whether the guarantee holds for D and D′ in both orders."""
        return self.relation in ("add_or_remove", "replace_one")

    def missed(self, rates: Any) -> np.ndarray:
        """Certified lower bounds of the false negative rate at these false positive rates."""
        return np.asarray(tradeoff_from_delta(rates, self.grid, self.profile.upper, symmetric=self.symmetric))
