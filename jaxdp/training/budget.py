"""What the inverse questions share: how many steps a budget allows, how much noise a target needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.accounting import epsilon as certified_epsilon
from jaxdp.training.settings import Setting


def check_budget(epsilon: Any, delta: Any) -> None:
    """Epsilon >= 0 and 0 < delta < 1, single numbers."""
    eps = validate.real_array("epsilon", epsilon)
    validate.reject("epsilon", eps, ~(eps >= 0), ">= 0")
    value = validate.probability("delta", delta)
    validate.reject("delta", value, (value == 0) | (value == 1), "in (0, 1)")
    if eps.ndim or value.ndim:
        raise ValueError(f"epsilon and delta must be single numbers, got shapes {eps.shape}, {value.shape}.")


def largest_within(after: Callable[[Any], Any], epsilon: float, delta: float, max_steps: int) -> int:
    """Largest count <= max_steps with epsilon(after(count)) <= budget, for a guarantee that worsens with the count.

    after: takes an array of counts; eight are asked for at once.
    """
    check_budget(epsilon, delta)

    low, high = 0, max_steps + 1
    while high - low > 1:
        counts = np.unique(np.linspace(low, high, 10).astype(np.int64)[1:-1])
        counts = counts[(counts > low) & (counts < high)]
        good = np.asarray(certified_epsilon(after(counts), delta) <= epsilon)
        first_bad = int(np.argmin(good)) if not good.all() else counts.size
        if first_bad < counts.size:
            high = int(counts[first_bad])
        if first_bad > 0:
            low = int(counts[first_bad - 1])
    return low


def scaled(setting: Setting, factor: float) -> Setting:
    """The setting times a factor, in every step."""
    return (lambda step: factor * setting(step)) if callable(setting) else float(setting) * factor
