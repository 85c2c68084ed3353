"""Sources that need no contour: one step, one finite law, the bound without sampling, a lower bound for large losses.

Each takes (verb, direction, stacks, target). It returns bounds for the rows that it covers, vacuous bounds for others.
"""

import math
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
from jaxdp.mechanisms.spectrum import has_finite_law, is_sampled_gaussian, on_lattice
from jaxdp.numerics.rounding import ULP, product_error
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary
from jaxdp.runtime.precision import kernel, patience
from jaxdp.shuffle.every_count import all_counts
from jaxdp.sources.base import Answer, nothing
from jaxdp.sources.gaussian import gaussian_bounds

_FINITE = (NamedSetRandomizer, WorstCase, DiscreteLaplace)  # have a finite pair, but a closed form in compositions
_MOST_NUMBERS = 1024  # in a composition; with more, such as in tables of losses, the outcomes are too many to list
_MOST_LISTED, _MOST_COUNTS = 2**15, 2**21  # outcomes of all runs together, numbers in a table of counts of outcomes


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
    if _is_one(stacks) and _listable(record, direction):
        settled = (times[:, 0] == 1) & np.isfinite(target)
        rows = np.flatnonzero(settled)
        if rows.size:
            some = jax.tree_util.tree_map(lambda x: x[rows, 0], record)
            lower[rows], upper[rows] = law_bounds(some, target[rows], verb=verb, direction=direction)
    return Answer(lower, upper, settled)


def _listable(record: Any, direction: str) -> bool:
    """Whether the record's pair is finite and known, so that its outcomes can be listed."""
    return has_finite_law(record, direction) or (isinstance(record, _FINITE) and record.finite_pair_is_exact())


@kernel(working_set=_alive, by_numpy=2**20, at_once=64)
def _law_of(record: Any, *, direction: str) -> tuple[Any, Any, Any, Any]:
    """(losses, log weights, blur, mass at infinity) of one run."""
    return tuple(xp.asarray(x, xp.float64) for x in _law(record, direction))


def _lists_together(law: Any, *_: Any, **__: Any) -> int:
    return 2**19 // law[0].shape[-1]


# Never compiled: each number of outcomes would need a program.
@kernel(working_set=30000, bounds=True, by_numpy=10**9, at_once=_lists_together)
def _list_bounds(law: tuple[Any, Any, Any, Any], target: Any, *, verb: str) -> tuple[Any, Any]:
    return (finite_law.epsilon_bounds if verb == "epsilon" else finite_law.delta_bounds)(*law, target)


def few_outcomes(verb: str, direction: str, stacks: tuple[Stack, ...], target: np.ndarray) -> Answer:
    """Bounds for the rows in which all runs together have at most `_MOST_LISTED` outcomes: sums over these."""
    lower, upper = nothing(verb, target)
    settled = np.zeros(target.shape, bool)
    if on_lattice(stacks) or not all(_listable(record, direction) for record, _ in stacks):
        return Answer(lower, upper)
    leaves = [np.reshape(leaf, (target.size, -1)) for leaf in jax.tree_util.tree_leaves(stacks)]
    if sum(leaf.shape[1] for leaf in leaves) > _MOST_NUMBERS:
        return Answer(lower, upper)
    _, first, group = np.unique(np.concatenate(leaves, axis=1), axis=0, return_index=True, return_inverse=True)
    for i, row in enumerate(first):
        runs = [(jax.tree_util.tree_map(lambda x, r=row: x[r], record), times[row]) for record, times in stacks]
        listed = _listed(runs, direction)
        if listed is not None:
            rows = np.flatnonzero((np.ravel(group) == i) & np.isfinite(target))
            law = tuple(np.broadcast_to(x, (rows.size, *x.shape)) for x in listed)
            lower[rows], upper[rows] = _list_bounds(law, target[rows], verb=verb)
            settled[rows] = True
    return Answer(lower, upper, settled)


def _listed(stacks: list[Stack], direction: str) -> tuple[np.ndarray, ...] | None:
    """(losses, log weights, blur, mass at infinity) of all runs together, or None if the outcomes are too many."""
    law: tuple[np.ndarray, ...] = (np.zeros(1), np.zeros(1), np.zeros(1))
    log_finite, none = 0.0, np.zeros(1)
    for record, times in stacks:
        for member in np.flatnonzero(times):
            runs = times[member]
            if runs > _MOST_LISTED:
                return None
            one = jax.tree_util.tree_map(lambda x, m=member: x[m : m + 1], record)
            *outcomes, infinity = (x[0] for x in _law_of(one, direction=direction))
            live = outcomes[1] > -np.inf
            loss, log_weight, blur = (
                x[live] if live.any() else none + fill for x, fill in zip(outcomes, (0, -np.inf, 0), strict=True)
            )
            ways = math.comb(int(runs) + loss.size - 1, loss.size - 1)
            if ways * law[0].size > _MOST_LISTED or ways * loss.size > _MOST_COUNTS:
                return None
            counts, log_orders = all_counts(int(runs), loss.size)
            size = np.abs(loss) + np.abs(log_weight) + 8
            error = counts @ (blur + (loss.size + 8) * ULP * size) + 32 * ULP * math.lgamma(runs + 1)
            own = counts @ loss, log_orders + counts @ log_weight, error
            law = tuple(np.add.outer(a, b).ravel() for a, b in zip(law, own, strict=True))
            with np.errstate(divide="ignore"):
                log_finite = log_finite + runs * np.log1p(-np.minimum(infinity, 1.0))
    if not np.all(np.isfinite(law[0])) or np.any(np.isnan(law[1])):
        return None
    infinity = -np.expm1(log_finite)
    return *law, np.where(infinity > 0, np.clip(infinity * (1 + 256 * ULP), SMALLEST, 1.0), 0.0)


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


@canary("one run of a finite law")
def _canary() -> tuple[Any, Any, float]:
    """delta(1/2) = 3/4 - e^{1/2} / 4 of the pair (3/4, 1/4), (1/4, 3/4)."""
    record = DiscretePair(np.array([[0.75, 0.25]]), np.array([[0.25, 0.75]]))
    _, upper = law_bounds.run_unchecked(record, np.array([0.5]), verb="delta", direction="forward")
    return upper, np.array([0.75 - 0.25 * np.exp(0.5)]), 1e-13
