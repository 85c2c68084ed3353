"""Argument checks shared by the shuffle theorems."""

from __future__ import annotations

import numpy as np

from jaxdp import validate


def local_epsilon(eps0) -> np.ndarray:
    """eps0 >= 0, as float64."""
    return validate.nonnegative("eps0", eps0)


def users(n) -> np.ndarray:
    """Whole numbers of users >= 1, as float64."""
    return validate.integer("n", n, 1)


def categories(k) -> np.ndarray:
    """Whole numbers of categories >= 2, as float64."""
    return validate.integer("k", k, 2)


def delta(value, name: str = "delta") -> np.ndarray:
    """A probability in [0, 1], as float64."""
    return validate.probability(name, value)


def target(eps0, n, value) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(eps0, n, delta), checked and known to broadcast."""
    arrays = local_epsilon(eps0), users(n), delta(value)
    validate.broadcast(eps0=arrays[0], n=arrays[1], delta=arrays[2])
    return arrays
