"""The contour for mechanisms without quadrature: their own kernels, so that their canary compiles nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp.fourier import contour
from jaxdp.fourier.contour import Effort
from jaxdp.mechanisms.basic import RandomizedResponse
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.spectrum import spectrum
from jaxdp.precision import canary, kernel


@kernel(
    static=("direction", "effort"),
    working_set=60000,
    large=True,
    costly=Effort.costly,
    bounds=True,
    by_numpy=Effort.by_numpy,
)
def plain_epsilon(
    stacks: tuple[Stack, ...], delta: Any, known: Any, *, direction: str, effort: Effort
) -> tuple[Any, Any]:
    """Certified (lower, upper) epsilon of one point. known: an upper bound of it, or inf."""
    return contour.epsilon_bounds(spectrum(stacks, direction), delta, known, effort)


@kernel(
    static=("direction", "effort"),
    working_set=60000,
    large=True,
    costly=Effort.costly,
    bounds=True,
    by_numpy=Effort.by_numpy,
)
def plain_delta(stacks: tuple[Stack, ...], eps: Any, known: Any, *, direction: str, effort: Effort) -> tuple[Any, Any]:
    """Certified (lower, upper) delta of one point. known: not needed, taken to be called like `plain_epsilon`."""
    return contour.delta_bounds(spectrum(stacks, direction), eps, effort)


@canary("contour of randomized response")
def _canary() -> tuple[Any, Any, float]:
    """The golden 500-fold randomized response, read backwards: epsilon 20 at its exact delta."""
    local = np.array([[np.log(0.55) - np.log(0.45)]])
    stacks = ((RandomizedResponse(local, np.array([[2.0]])), np.array([[500.0]])),)
    effort = Effort(256, 1, 1, False, True)
    delta = np.array([0.007786793109874420442849])
    _, upper = plain_epsilon.run_unchecked(stacks, delta, np.array([np.inf]), direction="forward", effort=effort)
    return upper, np.array([20.0]), 1e-9
