"""Inverse questions: how many steps a budget allows, how much noise a target needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdp import validate
from jaxdp.accounting import epsilon as certified_epsilon
from jaxdp.calibration import calibrate
from jaxdp.training import schedule
from jaxdp.training.noise import INT32_MAX
from jaxdp.training.settings import Setting
from jaxdp.typing import Array

if TYPE_CHECKING:
    from jaxdp.training.dpsgd import DPSGD
    from jaxdp.training.projected import NoisyProjectedSGD

# the largest count; a contraction with 1 - kappa >= 1e-6 reaches its limit long before
_PLATEAU_STEPS = INT32_MAX - 1


def check_budget(epsilon: Any, delta: Any) -> None:
    """Epsilon >= 0 and 0 < delta < 1, single numbers."""
    eps = validate.real_array("epsilon", epsilon)
    validate.reject("epsilon", eps, ~(eps >= 0), ">= 0")
    value = validate.probability("delta", delta)
    validate.reject("delta", value, (value == 0) | (value == 1), "in (0, 1)")
    if eps.ndim or value.ndim:
        raise ValueError(f"epsilon and delta must be single numbers, got shapes {eps.shape}, {value.shape}.")


def largest_within(after: Callable[[Any], Any], epsilon: float, delta: float, max_steps: int) -> int:
    """Largest count <= max_steps with epsilon(after(count)) <= budget, for a guarantee that worsens with the count."""
    check_budget(epsilon, delta)

    def within(counts: np.ndarray) -> Array:
        return certified_epsilon(after(counts), delta) <= epsilon

    return _last_true(within, max_steps)


def _last_true(within: Callable[[np.ndarray], Array], limit: int) -> int:
    """Largest count in 0..limit at which a decreasing predicate holds, eight counts a question."""
    low, high = 0, limit + 1
    while high - low > 1:
        counts = np.unique(np.linspace(low, high, 10).astype(np.int64)[1:-1])
        counts = counts[(counts > low) & (counts < high)]
        good = np.asarray(within(counts))
        first_bad = int(np.argmin(good)) if not good.all() else counts.size
        if first_bad < counts.size:
            high = int(counts[first_bad])
        if first_bad > 0:
            low = int(counts[first_bad - 1])
    return low


def projected_steps(sgd: NoisyProjectedSGD, epsilon: float, delta: float, max_steps: int) -> float:
    """See `NoisyProjectedSGD.steps_within`."""
    check_budget(epsilon, delta)
    constant = not (callable(sgd.learning_rate) or callable(sgd.noise_std))
    # the number of epochs in question; within one epoch all prefixes have the same worst example (cyclic order)
    period = sgd.num_batches
    data_steps = sgd.data_steps
    if constant:
        largest = _PLATEAU_STEPS // period if data_steps is None else -(-int(data_steps) // period)
    else:
        allowed = max_steps if data_steps is None else min(max_steps, int(data_steps))
        largest = -(-allowed // period)

    def within(epochs: np.ndarray) -> Array:
        mu = np.array([_worst_mu_at_epoch_end(sgd, int(e)) for e in epochs])
        return certified_epsilon(schedule.IteratedRelease(mu), delta) <= epsilon

    epochs = largest if within(np.array([largest]))[0] else _last_true(within, largest - 1)
    if epochs == largest and (constant or (data_steps is not None and data_steps <= max_steps)):
        return float(np.inf)
    return int(min(epochs * period, max_steps if not constant else np.inf))


def _worst_mu_at_epoch_end(sgd: NoisyProjectedSGD, epochs: int) -> float:
    steps = epochs * sgd.num_batches
    if sgd.data_steps is not None:
        steps = min(steps, int(sgd.data_steps))
    return float(sgd.after(steps).mu)


def projected_calibration(sgd: NoisyProjectedSGD, steps: int, epsilon: float, delta: float) -> NoisyProjectedSGD:
    """See `NoisyProjectedSGD.calibrated`: mu is inversely proportional to the noise, so only mu is searched for."""
    check_budget(epsilon, delta)
    current = float(sgd.after(steps).mu)
    if current == 0:
        return sgd
    allowed = float(calibrate(schedule.IteratedRelease, epsilon=epsilon, delta=delta))
    # the quotient, its product with the noise and the mu computed from that round by a few units
    factor = current / allowed * (1 + 1e-9)
    return dataclasses.replace(sgd, noise_std=_scaled(sgd.noise_std, factor))


def dpsgd_calibration(sgd: DPSGD, steps: int, epsilon: float, delta: float) -> DPSGD:
    """See `DPSGD.calibrated`: the noise multiplier, or the factor of its schedule, is searched for."""
    check_budget(epsilon, delta)
    sgd.after(steps)  # an error in a setting or a count is one before the search
    unit = sgd.noise_multiplier if callable(sgd.noise_multiplier) else 1.0

    def with_noise(factor: float) -> DPSGD:
        return dataclasses.replace(sgd, noise_multiplier=_scaled(unit, factor))

    factor = calibrate(lambda factor: with_noise(factor).after(steps), epsilon=epsilon, delta=delta)
    return with_noise(float(factor))


def _scaled(setting: Setting, factor: float) -> Setting:
    return (lambda step: factor * setting(step)) if callable(setting) else float(setting) * factor
