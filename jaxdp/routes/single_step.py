"""What needs no contour: one sampled step, the unsampled bound, and the lower bound next to a loss's supremum."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxdp.arrays import xp
from jaxdp.fourier.mixture import log_mixture_real, log_units
from jaxdp.hockey_stick import sampled_gaussian
from jaxdp.mechanisms.base import GaussianMechanism
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.sampled import FixedSizeSampled
from jaxdp.mechanisms.spectrum import is_sampled_gaussian
from jaxdp.precision import kernel
from jaxdp.rounding import ULP
from jaxdp.routes.gaussian import gaussian_delta, gaussian_epsilon

_RANKS = 64


@kernel(static=("direction",), working_set=512, bounds=True, by_numpy=256)
def _single_epsilon(record: Any, delta: Any, *, direction: str) -> tuple[Any, Any]:
    mu = xp.asarray(record.mechanism.gaussian_mu())
    return sampled_gaussian.epsilon_bounds(mu, record.sampling_probability, delta, direction)


@kernel(static=("direction",), working_set=512, bounds=True, by_numpy=256)
def _single_delta(record: Any, eps: Any, *, direction: str) -> tuple[Any, Any]:
    mu = xp.asarray(record.mechanism.gaussian_mu())
    return sampled_gaussian.delta_bounds(mu, record.sampling_probability, eps, direction)


def shortcuts(
    verb: str, stacks: tuple[Stack, ...], target: np.ndarray, direction: str
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of the rows that are one sampled Gaussian step, or sample everyone; NaN for all others."""
    lower, upper = np.full(target.shape, np.nan), np.full(target.shape, np.nan)
    record: Any = stacks[0][0] if len(stacks) == 1 else None
    if record is None or not is_sampled_gaussian(record):
        return lower, upper
    times = stacks[0][1]
    if times.shape[1] != 1:
        return lower, upper
    rate = record.sampling_probability[:, 0]
    everyone = np.flatnonzero(rate == 1)
    if everyone.size:
        some = jax.tree_util.tree_map(lambda x: x[everyone], record.unsampled(direction))
        solve: Any = gaussian_epsilon if verb == "epsilon" else gaussian_delta
        lower[everyone], upper[everyone] = solve(((some, times[everyone]),), target[everyone])
    inside = (target > 0) & (target < 1) if verb == "epsilon" else np.isfinite(target)
    if direction == "replace":
        if not isinstance(record, FixedSizeSampled):
            return lower, upper
        # Proposition 29: for eps >= 0 the profile of replace-one is that of remove
        direction, inside = "forward", inside & (target >= 0)
    rows = np.flatnonzero((times[:, 0] == 1) & (rate > 0) & (rate < 1) & inside)
    if rows.size:
        some = jax.tree_util.tree_map(lambda x: x[rows, 0], record)
        solve = _single_epsilon if verb == "epsilon" else _single_delta
        lower[rows], upper[rows] = solve(some, target[rows], direction=direction)
    return lower, upper


def cap_by_unsampled(
    verb: str, stacks: tuple[Stack, ...], target: np.ndarray, direction: str, lower: np.ndarray, upper: np.ndarray
) -> None:
    """Where nothing was certified, the bound without sampling, in place: leaving records out never hurts.

    Remove and add: H_a((1-q)P0 + qP1, P0) <= H_a(P1, P0), and its swap, for every a, so also composed. The
    replace pair of Poisson sampling is the mixture of (N(0), N(0)) and (N(1), N(-1)): at most the latter.
    """
    rows = np.flatnonzero(upper == (np.inf if verb == "epsilon" else 1.0))
    plain = all(is_sampled_gaussian(r) or isinstance(r, GaussianMechanism) for r, _ in stacks)
    if not rows.size or not plain:
        return
    some = jax.tree_util.tree_map(lambda x: x[rows], stacks)
    bare = tuple((r.unsampled(direction) if is_sampled_gaussian(r) else r, times) for r, times in some)
    solve = gaussian_epsilon if verb == "epsilon" else gaussian_delta
    _, cap = solve(bare, target[rows])
    upper[rows] = np.fmin(upper[rows], cap)
    lower[rows] = np.fmin(lower[rows], upper[rows])


@kernel(static=("verb",), working_set=4096, by_numpy=256)
def _small_outcomes(stacks: Any, target: Any, *, verb: str) -> Any:
    """Lower bound of epsilon or delta in the add direction from the outcomes that are all below a threshold a.

    Their chance is Phi(a)^T, their loss at least l = -sum T log A(a), as A rises: delta >= Phi(a)^T (1 - e^(eps-l)).
    """
    a = xp.linspace(-40.0, 6.0, 461)
    loss, size, log_chance = xp.zeros_like(a), xp.zeros_like(a), xp.zeros_like(a)
    for record, times in stacks:
        mu, rate, count = (
            xp.reshape(xp.asarray(x, xp.float64), (-1, 1))
            for x in (record.mechanism.gaussian_mu(), record.sampling_probability, times)
        )
        log_a = log_mixture_real(a * mu - mu * mu / 2, rate)
        blur = 1e-13 * (xp.abs(log_a) + xp.where(rate > 0.5, 1.0, 0.0)) + ULP * log_units(a, log_a, mu, rate)
        live = (count > 0) & (rate > 0)
        loss = loss - xp.sum(xp.where(live, count * log_a, 0.0), axis=0)
        size = size + xp.sum(xp.where(live, count * blur, 0.0), axis=0)
        log_chance = log_chance + xp.sum(xp.where(live, count, 0.0)) * xp.log_ndtr(a)
    loss, log_chance = loss - size, log_chance * (1 + 1e-12) - 1e-12
    return _at_least(loss, log_chance, target, verb)


@kernel(static=("direction", "verb"), working_set=60000, by_numpy=256)
def _largest_losses(stacks: Any, target: Any, *, direction: str, verb: str) -> Any:
    """The same for finite laws: each loss one of its record's r + 1 largest, r = 0, 1, ..."""
    loss, log_chance = xp.zeros(_RANKS), xp.zeros(_RANKS)
    for record, times in stacks:
        atoms, log_weight, blur = xp.vmap(lambda one: one.atoms(direction))(record)
        order = xp.argsort(xp.where(log_weight > -xp.inf, -atoms, xp.inf), axis=-1)[:, :_RANKS]
        order = xp.pad(order, ((0, 0), (0, _RANKS - order.shape[1])), mode="edge")
        some, blur, log_weight = (xp.take_along_axis(x, order, axis=-1) for x in (atoms, blur, log_weight))
        # (in a law of fewer losses the last one stands for the rest)
        live = (log_weight > -xp.inf) & (xp.arange(_RANKS) < atoms.shape[-1])
        log_weight = xp.where(live, log_weight, 0.0)
        rounding = 1e-12 + 1e-15 * (xp.abs(log_weight) + xp.abs(some))
        weight = xp.where(live, xp.exp(log_weight - 2 * blur) * xp.maximum(1 - rounding, 0.0), 0.0)
        least = xp.cummin(some - blur - 1e-15 * xp.abs(some), axis=1)
        chance = xp.minimum(xp.cumsum(weight, axis=-1), 1.0)
        count = xp.reshape(xp.asarray(times, xp.float64), (-1, 1))
        loss = loss + xp.sum(xp.where(count > 0, count * least, 0.0), axis=0)
        log_chance = log_chance + xp.sum(xp.where(count > 0, count * xp.log(chance), 0.0), axis=0)
    loss, log_chance = loss - 1e-12 * xp.abs(loss), log_chance * (1 + 1e-12) - 1e-12
    return _at_least(loss, log_chance, target, verb)


def _at_least(loss: Any, log_chance: Any, target: Any, verb: str) -> Any:
    """The best of the bounds delta >= chance (1 - e^(eps - loss)), or the epsilon at which it is delta."""
    if verb == "delta":
        return xp.maximum(xp.max(xp.exp(log_chance) * -xp.expm1(xp.minimum(target - loss, 0.0))), 0.0)
    share = xp.log(target) - log_chance
    return xp.max(xp.where(share < 0, loss + xp.log(-xp.expm1(xp.minimum(share, -1e-300))) - 1e-15, 0.0))


def lower_next_to_supremum(
    verb: str, stacks: tuple[Stack, ...], target: np.ndarray, direction: str
) -> np.ndarray | None:
    """A lower bound that is close where nearly all of the loss's range is asked for; None where it does not apply."""
    sampled = [is_sampled_gaussian(record, direction) for record, _ in stacks]
    if direction == "reverse" and all(sampled):
        lower = np.asarray(_small_outcomes(stacks, target, verb=verb))
    elif all(hasattr(record, "atoms") for record, _ in stacks) and not any(sampled):
        lower = np.asarray(_largest_losses(stacks, target, direction=direction, verb=verb))
    else:
        return None
    return np.where(np.isnan(lower), 0.0, lower)
