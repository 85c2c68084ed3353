"""Rows that are one run of a mechanism with a finite law of the loss: no contour, the sum itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxdp.arrays import xp
from jaxdp.hockey_stick import finite_law
from jaxdp.mechanisms.basic import DiscretePair
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.spectrum import is_sampled_gaussian
from jaxdp.precision import canary, kernel


def _law(record: Any, direction: str) -> tuple[Any, Any, Any, Any]:
    loss, log_weight, blur = record.atoms(direction)
    return loss, log_weight, blur, xp.asarray(record.masses_at_infinity(direction)[0], xp.float64)


@kernel(static=("direction",), working_set=30000, bounds=True, by_numpy=256)
def law_epsilon(record: Any, delta: Any, *, direction: str) -> tuple[Any, Any]:
    """Certified (lower, upper) epsilon of one run."""
    return finite_law.epsilon_bounds(*_law(record, direction), delta)


@kernel(static=("direction",), working_set=30000, bounds=True, by_numpy=256)
def law_delta(record: Any, eps: Any, *, direction: str) -> tuple[Any, Any]:
    """Certified (lower, upper) delta of one run."""
    return finite_law.delta_bounds(*_law(record, direction), eps)


def single_law(
    verb: str, stacks: tuple[Stack, ...], target: np.ndarray, direction: str
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of the rows that are one run of one finite law; NaN for all others.

    The bounds are those of the record's pair: the lower one counts only where the pair is exact.
    """
    lower, upper = np.full(target.shape, np.nan), np.full(target.shape, np.nan)
    if len(stacks) != 1 or stacks[0][1].shape[1] != 1:
        return lower, upper
    record, times = stacks[0]
    if not hasattr(record, "atoms") or is_sampled_gaussian(record, direction):
        return lower, upper
    rows = np.flatnonzero((times[:, 0] == 1) & np.isfinite(target))
    if rows.size:
        some = jax.tree_util.tree_map(lambda x: x[rows, 0], record)
        solve = law_epsilon if verb == "epsilon" else law_delta
        lower[rows], upper[rows] = solve(some, target[rows], direction=direction)
    return lower, upper


@canary("one run of a finite law")
def _canary() -> tuple[Any, Any, float]:
    """delta(1/2) = 3/4 - e^{1/2} / 4 of the pair (3/4, 1/4), (1/4, 3/4)."""
    record = DiscretePair(np.array([[0.75, 0.25]]), np.array([[0.25, 0.75]]))
    _, upper = law_delta.run_unchecked(record, np.array([0.5]), direction="forward")
    return upper, np.array([0.75 - 0.25 * np.exp(0.5)]), 1e-13
