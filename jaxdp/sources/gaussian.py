"""Gaussian-DP mechanisms and their compositions: one mu, the closed form."""

import functools
from typing import Any

import numpy as np

from jaxdp.closed_forms import gaussian
from jaxdp.domains import SMALLEST_MU
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import Stack, norm
from jaxdp.mechanisms.gaussian import GaussianMechanism, gaussian_mus
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary
from jaxdp.runtime.precision import kernel, patience
from jaxdp.sources.base import VACUOUS, Answer, Asked, Route, traced_bounds


def composed_mu(stacks: tuple[Stack, ...]) -> Any:
    """mu of the composition of one point's Gaussian mechanisms: sqrt(sum of times mu^2).

    NaN where a mu is NaN, and where finite numbers overflow.
    """
    mus, parts = [], []
    for record, times in stacks:
        if isinstance(record, GaussianMechanism):
            # 0 runs cost nothing, even if mu is infinite
            live = times > 0
            mus.append(xp.where(live, gaussian_mus(record), 0.0))
            parts.append(xp.where(live, xp.sqrt(xp.where(live, times, 1.0)) * mus[-1], 0.0))
    if not parts:
        return xp.zeros(())
    total = norm(xp.concatenate(parts))
    return xp.where((total == xp.inf) & xp.all(xp.concatenate(mus) < xp.inf), xp.nan, total)


def mu_error(stacks: tuple[Stack, ...]) -> float:
    """Bound on the relative rounding error of `composed_mu`. It grows with the number of squares in the sum."""
    return 1e-15 * (8 + sum(times.shape[-1] for _, times in stacks))


def mu_excess(stacks: tuple[Stack, ...]) -> Any:
    """Largest ``mu_excess`` of the mechanisms: bounds by how much, relative, `composed_mu` may exceed the truth."""
    largest: Any = 0.0
    for record, times in stacks:
        if isinstance(record, GaussianMechanism) and type(record).mu_excess is not GaussianMechanism.mu_excess:
            each = xp.vmap(lambda one, mu: xp.asarray(one.mu_excess(mu)))(record, gaussian_mus(record))
            largest = xp.maximum(largest, xp.max(xp.where(times > 0, xp.where(xp.isnan(each), xp.inf, each), 0.0)))
    return largest


@kernel(working_set=256, large=True, bounds=True, by_numpy=patience(1024, 32768), at_once=512)
def gaussian_bounds(stacks: tuple[Stack, ...], target: Any, *, verb: str) -> tuple[Any, Any]:
    """Certified (lower, upper) "epsilon" at a delta, or "delta" at an epsilon (verb), of one point."""
    mu, solve = composed_mu(stacks), gaussian.epsilon_bounds if verb == "epsilon" else gaussian.delta_bounds
    # For mu < 1e-150, where mu^2 underflows: the upper bound at 1e-150 and the trivial lower bound.
    safe = xp.where(mu > 0, xp.maximum(mu, SMALLEST_MU), mu)
    lower, upper = solve(safe, target, mu_error(stacks), mu_excess(stacks))
    trivial = 0.0 if verb == "epsilon" else -xp.expm1(xp.where(target < 0, target, 0.0)) * (1 - 1e-15)
    return xp.where((mu > 0) & (mu < SMALLEST_MU), trivial, lower), upper


@kernel(working_set=512, by_numpy=2**20, at_once=4096)
def gaussian_tradeoff(stacks: tuple[Stack, ...], x: Any) -> Any:
    """Lower bound of the smallest false negative rate, Phi(-Phi^-1(x) - mu), at a false positive rate x."""
    mu = composed_mu(stacks)
    quantile = xp.ndtri(x)  # not Phi^-1(1 - x): 1 - x is rounded, and is 1 below 1e-16
    off = 2e-14 * (1 + xp.abs(quantile) + mu) + mu * mu_error(stacks)
    value = xp.ndtr(-quantile - mu - xp.where(xp.isfinite(off), off, 0.0))
    return xp.maximum(xp.where(xp.isnan(value), 0.0, value) * (1 - 1e-12) - 1e-15, 0.0)


def _log_delta(stacks: tuple[Stack, ...], eps: Any) -> Any:
    return gaussian.smooth_delta(composed_mu(stacks), eps)


def gaussian_route(stacks: tuple[Stack, ...]) -> Route:
    """The closed-form route."""
    return Route(stacks, {verb: (functools.partial(_answer, verb),) for verb in VACUOUS}, _traced)


def _answer(verb: str, params: Any, target: Any, known: Any, asked: Asked) -> Answer:
    """The closed form as a source. It settles every row, because no other source narrows it."""
    lower, upper = gaussian_bounds(params, target, verb=verb)
    return Answer(lower, upper, True)


_traced = traced_bounds(gaussian_bounds.point, _log_delta, gaussian_route, 512)


@canary("Gaussian delta and epsilon")
def _canary() -> tuple[Any, Any, float]:
    """Epsilons at delta 1e-50 and 1e-6, exact to 20 digits."""
    stacks = ((Gaussian(np.array([[1.0], [20.0]])), np.array([[1.0], [1000.0]])),)
    _, upper = gaussian_bounds.run_unchecked(stacks, np.array([1e-50, 1e-6]), verb="epsilon")
    return upper, np.array([15.24786543230564852697, 8.306225049954728206035]), 1e-11
