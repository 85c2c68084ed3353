"""Gaussian-DP mechanisms and their compositions: one mu, the closed form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.hockey_stick import gaussian
from jaxdp.mechanisms.base import GaussianMechanism
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import Stack
from jaxdp.precision import canary, kernel
from jaxdp.routes.base import Route, explicit_delta, implicit_epsilon


def total_mu2(stacks: tuple[Stack, ...]) -> Any:
    """Sum of count x mu^2 over the Gaussian mechanisms of one point."""
    total = jnp.zeros(())
    for record, times in stacks:
        if isinstance(record, GaussianMechanism):
            mu = jax.vmap(lambda r: r.gaussian_mu())(record)
            # 0 runs of an infinitely leaky mechanism leak nothing
            total = total + jnp.sum(jnp.where(times > 0, times * mu**2, 0.0))
    return total


def composed_mu(stacks: tuple[Stack, ...]) -> Any:
    """mu of the composition."""
    mu2 = total_mu2(stacks)
    return jnp.where(mu2 > 0, jnp.sqrt(jnp.where(mu2 > 0, mu2, 1.0)), 0.0)


def _mu_error(stacks: tuple[Stack, ...]) -> float:
    """Relative error of `composed_mu`: a sum of so many squares."""
    return 1e-15 * (8 + sum(times.shape[-1] for _, times in stacks))


@kernel(working_set=512)
def gaussian_epsilon(stacks: tuple[Stack, ...], delta: Any) -> tuple[Any, Any]:
    """Certified (lower, upper) epsilon of one point."""
    return gaussian.epsilon_bounds(composed_mu(stacks), delta, _mu_error(stacks))


@kernel(working_set=512)
def gaussian_delta(stacks: tuple[Stack, ...], eps: Any) -> tuple[Any, Any]:
    """Certified (lower, upper) delta of one point."""
    return gaussian.delta_bounds(composed_mu(stacks), eps, _mu_error(stacks))


def _log_delta(stacks: tuple[Stack, ...], eps: Any) -> Any:
    return gaussian.smooth_delta(composed_mu(stacks), eps)


_traced_epsilon = implicit_epsilon(gaussian_epsilon.point, _log_delta)
_traced_delta = explicit_delta(gaussian_delta.point, _log_delta)


def gaussian_route(stacks: tuple[Stack, ...]) -> Route:
    """The closed-form route."""
    return Route(stacks, gaussian_epsilon, gaussian_delta, _traced_epsilon, _traced_delta)


@canary("Gaussian delta and epsilon")
def _canary() -> tuple[Any, Any, float]:
    """A deep tail and an epsilon, exact to 20 digits."""
    stacks = ((Gaussian(np.array([[1.0], [20.0]])), np.array([[1.0], [1000.0]])),)
    _, upper = gaussian_epsilon.run_unchecked(stacks, np.array([1e-50, 1e-6]))
    return upper, np.array([15.24786543230564852697, 8.306225049954728206035]), 1e-11
