"""Sources that need no contour: one step, one finite law, the bound without sampling, a lower bound for large losses.

Each takes (verb, direction, stacks, target). It returns bounds for the rows that it covers, vacuous bounds for others.
"""

from typing import Any

import jax
import numpy as np

from jaxdp.closed_forms import finite_law
from jaxdp.closed_forms import one_sampled_step as single_step
from jaxdp.domains import SMALLEST
from jaxdp.mechanisms.base import FiniteLaw
from jaxdp.mechanisms.basic import DiscreteLaplace, DiscretePair, Laplace, WorstCase
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.mechanisms.local_randomizers import NamedSetRandomizer
from jaxdp.mechanisms.sampled import FixedSizeSampled, Sampled
from jaxdp.mechanisms.sampled_laws import sampled_part
from jaxdp.mechanisms.spectrum import has_finite_law, is_sampled_gaussian
from jaxdp.numerics.rounding import ULP, product_error
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary
from jaxdp.runtime.precision import kernel, patience
from jaxdp.sources.base import Answer, nothing
from jaxdp.sources.gaussian import gaussian_bounds

_FINITE = (NamedSetRandomizer, WorstCase, DiscreteLaplace)  # have a finite pair, but a closed form in compositions
_RANKS = 64  # largest losses of a law that `_largest_losses` uses


@kernel(working_set=512, bounds=True, by_numpy=patience(512, 16384), at_once=512)
def _single_step(record: Any, target: Any, *, verb: str, direction: str) -> tuple[Any, Any]:
    solve = single_step.epsilon_bounds if verb == "epsilon" else single_step.delta_bounds
    return solve(xp.asarray(record.mechanism.gaussian_mu()), record.sampling_probability, target, direction)


def _law(record: Any, direction: str) -> tuple[Any, Any, Any, Any]:
    if isinstance(record, FiniteLaw):
        return record.part(direction)[:4]
    return sampled_part(record.finite_pair(), xp.ones(()), direction)[:4]


def _patience_of_law(record: Any, *_: Any, **__: Any) -> int:
    """Points that NumPy answers before compiling: more for laws of few outcomes, which are fast in large batches."""
    return patience(256, 16384 if _alive(record) < 1000 else 256)(record)


def _alive(record: Any, *_: Any, **__: Any) -> int:
    return 256 if isinstance(record, (NamedSetRandomizer, WorstCase)) else 30000


@kernel(working_set=_alive, bounds=True, by_numpy=_patience_of_law, at_once=64)
def law_bounds(record: Any, target: Any, *, verb: str, direction: str) -> tuple[Any, Any]:
    """Certified (lower, upper) "epsilon" or "delta" (verb) of one run of a mechanism with a finite law."""
    solve = finite_law.epsilon_bounds if verb == "epsilon" else finite_law.delta_bounds
    return solve(*_law(record, direction), target)


def one_sampled_step(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Bounds for the rows that are one sampled Gaussian step, or in which everyone is sampled in every step."""
    lower, upper = nothing(verb, target)
    settled = np.zeros(target.shape, bool)
    record: Any = stacks[0][0]
    if not (_is_one(stacks) and is_sampled_gaussian(record) and record.mechanism.is_exact(direction)):
        return Answer(lower, upper)

    def settle(rows: np.ndarray, solve: Any, params: Any, **static: str) -> None:
        if rows.size:
            lower[rows], upper[rows] = solve(params, target[rows], verb=verb, **static)
            settled[rows] = True

    times, rate = stacks[0][1], record.sampling_probability[:, 0]
    everyone = np.flatnonzero(rate == 1)
    some = jax.tree_util.tree_map(lambda x: x[everyone], (record.unsampled(direction), times))
    settle(everyone, gaussian_bounds, (some,))
    inside = (target > 0) & (target < 1) if verb == "epsilon" else np.isfinite(target)
    if direction == "replace":
        # Proposition 29: for eps >= 0 and batches of a fixed size, replace_one has the profile of remove.
        direction = "forward" if isinstance(record, FixedSizeSampled) else direction
        inside = inside & (target >= 0)
    rows = np.flatnonzero((times[:, 0] == 1) & (rate > 0) & (rate < 1) & inside)
    some = jax.tree_util.tree_map(lambda x: x[rows, 0], record)
    settle(rows, _single_step, some, direction=direction)
    return Answer(lower, upper, settled)


def _is_one(stacks: tuple[Stack, ...]) -> bool:
    """Whether every row is one mechanism, repeated or not."""
    return len(stacks) == 1 and stacks[0][1].shape[1] == 1


def one_finite_law(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Bounds for the rows that are one run of a mechanism whose loss has a finite law: sums over its outcomes."""
    lower, upper = nothing(verb, target)
    settled = np.zeros(target.shape, bool)
    record, times = stacks[0]
    exact = isinstance(record, _FINITE) and record.finite_pair_is_exact()
    if _is_one(stacks) and (exact or has_finite_law(record, direction)):
        settled = (times[:, 0] == 1) & np.isfinite(target)
        rows = np.flatnonzero(settled)
        if rows.size:
            some = jax.tree_util.tree_map(lambda x: x[rows, 0], record)
            lower[rows], upper[rows] = law_bounds(some, target[rows], verb=verb, direction=direction)
    return Answer(lower, upper, settled)


def one_laplace(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Bounds for the rows that are one Laplace release of scale b: delta = 1 - e^{(eps - 1/b)/2}, 0 <= eps <= 1/b."""
    lower, upper = nothing(verb, target)
    record, times = stacks[0]
    if not (_is_one(stacks) and isinstance(record, Laplace)):
        return Answer(lower, upper)
    inside = (target > 0) & (target < 1) if verb == "epsilon" else np.isfinite(target)
    rows = np.flatnonzero((times[:, 0] == 1) & inside)
    scale, aim = np.asarray(record.noise_multiplier)[rows, 0], target[rows]
    if verb == "epsilon":
        most, less = 1 / scale, -2 * np.log1p(-aim)
        found, error = most - less, 4 * ULP * (most + less)
        lower[rows] = np.maximum(found - error, 0.0)
        upper[rows] = np.where(aim >= -np.expm1(-most / 2) * (1 + 16 * ULP), 0.0, np.maximum(found + error, 0.0))
    else:
        gap = np.maximum(_one_less_product(np.abs(aim), scale), 0.0)
        odds, least = np.exp(np.minimum(aim, 0.0)), -np.expm1(np.minimum(aim, 0.0))
        found = least + odds * -np.expm1(-0.5 * gap / scale)
        tiny = (gap > 0) & (found < SMALLEST)
        lower[rows] = np.where(tiny, 0.0, found * (1 - 16 * ULP))
        upper[rows] = np.where(tiny, 2 * SMALLEST, np.minimum(found * (1 + 16 * ULP), 1.0))
    settled = np.zeros(target.shape, bool)
    settled[rows] = True
    return Answer(lower, upper, settled)


def _one_less_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """1 - x y with a relative error of a few ULP, also next to 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        product, rounding = x * y, product_error(x, y)
        near = np.abs(product - 1) < 0.5
        return (1 - product) - np.where(near & np.isfinite(rounding), rounding, 0.0)


def no_step(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Bounds of delta, max(1 - e^eps, 0), for the rows in which nothing is run or nobody is sampled."""
    lower, upper = nothing(verb, target)
    rows = np.isfinite(target) & (verb == "delta")
    for record, times in stacks:
        rate = record.sampling_probability if isinstance(record, Sampled) else 1.0
        rows = rows & np.all((times == 0) | (rate == 0), axis=1)
    exact = -np.expm1(np.minimum(target[rows], 0.0))
    lower[rows], upper[rows] = exact * (1 - 1e-15), np.minimum(exact * (1 + 1e-15), 1.0)
    return Answer(lower, upper, rows)


def unsampled(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Upper bounds of the mechanisms without sampling. Sampling never increases delta.

    Remove and add: H_a((1-q)P0 + qP1, P0) <= H_a(P1, P0) for every a, the same for the swapped pairs, hence also for
    compositions. Replace: the pair of Poisson sampling is a mixture of (N(0), N(0)) and (N(1), N(-1)); the second
    dominates it.
    """
    lower, upper = nothing(verb, target)
    if all(is_sampled_gaussian(r) or isinstance(r, GaussianMechanism) for r, _ in stacks):
        bare = tuple((r.unsampled(direction) if isinstance(r, Sampled) else r, times) for r, times in stacks)
        _, upper = gaussian_bounds(bare, target, verb=verb)
    return Answer(lower, upper)


@kernel(working_set=60000, by_numpy=256)
def _largest_losses(stacks: Any, target: Any, *, direction: str, verb: str) -> Any:
    """Lower bound of epsilon or delta from the event that every loss is among the r largest of its law.

    p: probability of the event; l: least sum of losses in it. delta >= p (1 - e^(eps - l)), best of r = 1, ..., 64.
    """
    loss, log_chance = xp.zeros(_RANKS), xp.zeros(_RANKS)
    for record, times in stacks:
        atoms, log_weight, blur = xp.vmap(lambda one: one.part(direction)[:3])(record)
        order = xp.argsort(xp.where(log_weight > -xp.inf, -atoms, xp.inf), axis=-1)[:, :_RANKS]
        order = xp.pad(order, ((0, 0), (0, _RANKS - order.shape[1])), mode="edge")
        losses, blur, log_weight = (xp.take_along_axis(x, order, axis=-1) for x in (atoms, blur, log_weight))
        # A law of fewer than 64 losses is padded with copies of its last loss, which must not count again.
        live = (log_weight > -xp.inf) & (xp.arange(_RANKS) < atoms.shape[-1])
        log_weight = xp.where(live, log_weight, 0.0)
        rounding = 1e-12 + 1e-15 * (xp.abs(log_weight) + xp.abs(losses))
        weight = xp.where(live, xp.exp(log_weight - 2 * blur) * xp.maximum(1 - rounding, 0.0), 0.0)
        least = xp.cummin(losses - blur - 1e-15 * xp.abs(losses), axis=1)
        chance = xp.minimum(xp.cumsum(weight, axis=-1), 1.0)
        count = xp.reshape(xp.asarray(times, xp.float64), (-1, 1))
        loss = loss + xp.sum(xp.where(count > 0, count * least, 0.0), axis=0)
        log_chance = log_chance + xp.sum(xp.where(count > 0, count * xp.log(chance), 0.0), axis=0)
    loss, log_chance = loss - 1e-12 * xp.abs(loss), log_chance * (1 + 1e-12) - 1e-12
    if verb == "delta":
        return xp.maximum(xp.max(xp.exp(log_chance) * -xp.expm1(xp.minimum(target - loss, 0.0))), 0.0)
    share = xp.log(target) - log_chance
    return xp.max(xp.where(share < 0, loss + xp.log(-xp.expm1(xp.minimum(share, -1e-300))) - 1e-15, 0.0))


def next_to_supremum(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Lower bounds for finite laws, close to the truth where epsilon is near the largest possible loss."""
    lower, upper = nothing(verb, target)
    if all(has_finite_law(record, direction) for record, _ in stacks):
        lower = np.asarray(_largest_losses(stacks, target, direction=direction, verb=verb))
    return Answer(lower, upper)


@canary("one run of a finite law")
def _canary() -> tuple[Any, Any, float]:
    """delta(1/2) = 3/4 - e^{1/2} / 4 of the pair (3/4, 1/4), (1/4, 3/4)."""
    record = DiscretePair(np.array([[0.75, 0.25]]), np.array([[0.25, 0.75]]))
    _, upper = law_bounds.run_unchecked(record, np.array([0.5]), verb="delta", direction="forward")
    return upper, np.array([0.75 - 0.25 * np.exp(0.5)]), 1e-13
