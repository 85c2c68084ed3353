"""Argument checks shared by the shuffle theorems."""

from __future__ import annotations

import numpy as np

from jaxdp import validate


def local_epsilon(eps0) -> np.ndarray:
    """eps0 >= 0, as float64."""
    return validate.nonnegative("eps0", eps0)


def users(num_users) -> np.ndarray:
    """Whole numbers of users >= 1, as float64."""
    return validate.integer("num_users", num_users, 1)


def categories(num_categories) -> np.ndarray:
    """Whole numbers of categories >= 2, as float64."""
    return validate.integer("num_categories", num_categories, 2)


def delta(value, name: str = "delta") -> np.ndarray:
    """A probability in [0, 1], as float64."""
    return validate.probability(name, value)


def target(eps0, num_users, value) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(eps0, num_users, delta), checked and known to broadcast."""
    arrays = local_epsilon(eps0), users(num_users), delta(value)
    validate.broadcast(eps0=arrays[0], num_users=arrays[1], delta=arrays[2])
    return arrays
