"""Certified delta(eps) and eps(delta) of batches of shuffled rounds: cheapest source first, all answers intersected.

A row is one law of X and a number of users. Sources: 13 nodes of the contour, the sum over clone counts (laws of two
outcomes from `law.clones`), the contour with as many nodes as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.bounds import Bounds
from jaxdp.precision import canary, kernel
from jaxdp.rounding import ULP
from jaxdp.shuffle import contour, counts, law, search
from jaxdp.shuffle.law import LARGEST_EPS0, Law
from jaxdp.shuffle.search import Evaluation
from jaxdp.special import raised

LEAST_DELTA = 2.3e-308
"""Least upper bound of a positive delta: one that underflows must not read 0, which means pure DP."""

LONG_SUMS = (2048, 32768)  # nodes
_LONG_OUTCOMES = 64  # laws of more outcomes get the first long sum only
_MOST_COUNTS = 2e8  # variance of the number of clones up to which counts are summed one by one
_WORKING_SET = 48_000  # what 512 points keep alive fits the cache, and few points wait for the slowest
_COUNTS_SET = 390_000  # batches of 32: all points of a batch take as many steps as the longest
_SLACK = 2e-13  # rounding of log(delta)
Evaluate = Callable[[Any], Evaluation]


def _log_delta(evaluate: Evaluate, made: Law, users: Any, epsilon: Any) -> Bounds:
    """Bounds of log delta, which is far below the smallest double for large epsilon; -inf where delta is 0."""
    largest = made.largest_loss()
    inside = (epsilon >= 0) & (epsilon < largest) & (epsilon <= LARGEST_EPS0)
    safe = jnp.where(inside, epsilon, 0.5 * jnp.minimum(largest, LARGEST_EPS0))
    single = jnp.log(contour.sum_at(made, users, epsilon).single)
    seen = evaluate(safe)
    upper = jnp.where(inside, jnp.minimum(seen.upper, single), single)
    upper = jnp.where(epsilon >= largest, -jnp.inf, jnp.minimum(upper, 0.0))
    good = (epsilon >= 0) & ~jnp.isnan(upper) & (users >= 1)
    lower = jnp.where(inside & good & ~jnp.isnan(seen.lower), seen.lower, -jnp.inf)
    upper = jnp.where(good, upper, 0.0)
    return Bounds(jnp.minimum(lower, upper), upper)


def from_logs(logs: Bounds) -> Bounds:
    """Bounds of delta from those of log delta; an upper one that underflows is `LEAST_DELTA`."""
    xp = jnp if isinstance(logs.upper, jax.Array) else np
    upper = xp.clip(xp.exp(logs.upper) * (1 + 8 * ULP), LEAST_DELTA, 1.0)
    return Bounds(xp.exp(logs.lower) * (1 - 8 * ULP), xp.where(logs.upper == -xp.inf, 0.0, upper))


def _guess(made: Law, users: Any, delta: Any, cap: Any) -> Any:
    """Epsilon by the normal approximation.

    delta = deviation/n (density(z) - z tail(z)), z = n (e^eps - 1)/deviation.
    """
    live = made.base > 0
    base = jnp.where(live, made.base, 1.0)

    def deviation(odds: Any) -> Any:
        x = jnp.where(live, (made.first - odds * made.second) / base, 0.0)
        return jnp.sqrt(jnp.sum(jnp.where(live, base * x * x, 0.0)) / users)

    def step(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        z, odds = state
        spread = jnp.maximum(deviation(odds), 1e-300)
        share = jnp.log(spread) - jnp.log(delta) - 0.919 - jnp.log1p(0.8 * z + z * z)
        z = jnp.sqrt(jnp.maximum(2 * share, 1e-6))
        return z, jnp.minimum(1 + z * spread, jnp.exp(0.9 * cap))

    _, odds = jax.lax.fori_loop(0, 8, step, (jnp.ones_like(delta), jnp.ones_like(delta)))
    return jnp.clip(jnp.log(odds), 1e-9 * cap, 0.9 * cap)


def _epsilon(evaluate: Evaluate, made: Law, users: Any, delta: Any, wanted: Any = True) -> Bounds:
    target, _ = raised(delta)
    largest = made.largest_loss()
    inside = (target > 0) & (target < 1) & (users >= 1) & (largest > 0) & wanted
    inside = inside & ((largest <= LARGEST_EPS0) | (largest == jnp.inf))
    cap = jnp.where(inside, jnp.minimum(largest, LARGEST_EPS0), 1.0)
    log_delta = jnp.log(jnp.where(inside, target, 0.5))
    start = _guess(made, users, jnp.where(inside, target, 0.5), cap)

    def shifted(epsilon: Any) -> Evaluation:
        seen = evaluate(epsilon)
        return seen._replace(upper=seen.upper + _SLACK, lower=seen.lower - _SLACK)

    low, high = search.epsilon_bounds(shifted, log_delta, start, cap, inside)
    high = jnp.where(inside & (high < cap), high, largest)
    high = jnp.where(target >= 1, 0.0, high)
    low = jnp.where(inside, low, jnp.where(target == 0, largest, 0.0))
    good = (target >= 0) & (target <= 1) & (users >= 1) & ~jnp.isnan(high)
    return Bounds(jnp.where(good, jnp.minimum(low, high), 0.0), jnp.where(good, high, jnp.inf))


@kernel(working_set=_WORKING_SET, large=True)
def contour_log_delta(made: Law, users: Any, epsilon: Any) -> Bounds:
    """Bounds of log delta with 13 nodes."""
    return _log_delta(lambda e: contour.evaluate(made, users, e), made, users, epsilon)


@kernel(working_set=_WORKING_SET, large=True)
def contour_epsilon(made: Law, users: Any, delta: Any) -> Bounds:
    """Bounds of epsilon with 13 nodes."""
    return _epsilon(lambda e: contour.evaluate(made, users, e), made, users, delta)


@kernel(working_set=20_000, large=True)
def long_log_delta(made: Law, users: Any, epsilon: Any, most_nodes: Any) -> Bounds:
    """Bounds of log delta with as many nodes as it takes, up to most_nodes."""
    return _log_delta(lambda e: contour.evaluate_long(made, users, e, most_nodes), made, users, epsilon)


@kernel(working_set=20_000, large=True)
def long_epsilon(made: Law, users: Any, delta: Any, most_nodes: Any) -> Bounds:
    """Bounds of epsilon with as many nodes as it takes, up to most_nodes."""
    return _epsilon(lambda e: contour.evaluate_long(made, users, e, most_nodes), made, users, delta)


def _countable(made: Law, users: Any) -> Any:
    return users * (1 - made.rest) * made.rest <= _MOST_COUNTS


@kernel(static=("bound",), working_set=_COUNTS_SET, large=True)
def counts_log_delta(eps0: Any, users: Any, epsilon: Any, *, bound: str) -> Bounds:
    """Bounds of log delta of the clones pair, summed over the number of clones."""
    made = law.clones(eps0, bound)
    wanted = _countable(made, users)
    bounds = _log_delta(lambda e: counts.evaluate(eps0, users, e, bound=bound, wanted=wanted), made, users, epsilon)
    return Bounds(jnp.where(wanted, bounds.lower, -jnp.inf), jnp.where(wanted, bounds.upper, 0.0))


@kernel(static=("bound",), working_set=_COUNTS_SET, large=True)
def counts_epsilon(eps0: Any, users: Any, delta: Any, *, bound: str) -> Bounds:
    """Bounds of epsilon of the clones pair, summed over the number of clones."""
    made = law.clones(eps0, bound)
    wanted = _countable(made, users)
    return _epsilon(lambda e: counts.evaluate(eps0, users, e, bound=bound), made, users, delta, wanted)


@kernel(static=("bound",), working_set=16)
def clones_law(eps0: Any, *, bound: str) -> Law:
    """`law.clones`, batched."""
    return law.clones(eps0, bound)


_KERNELS = {
    "log_delta": (contour_log_delta, long_log_delta, counts_log_delta),
    "epsilon": (contour_epsilon, long_epsilon, counts_epsilon),
}


def bounds(verb: str, made: Law, users: Any, target: Any, gap: float, sums: tuple[int, ...] = LONG_SUMS) -> Bounds:
    """Bounds of "delta", "log_delta" or "epsilon" (verb) for every row of a batch of laws, NumPy in and out.

    gap: relative distance (of log_delta: distance) of the bounds at which work stops. sums: sizes of the long sums that
    may be tried.
    """
    if verb == "delta":
        return from_logs(bounds("log_delta", made, users, target, gap, sums))
    short, long, _ = _KERNELS[verb]
    lower, upper = (np.array(side) for side in short(made, users, target))
    for nodes in sums[: 1 if made.first.shape[-1] > _LONG_OUTCOMES else None]:
        rows = _wide(verb, lower, upper, gap)
        if not rows.size:
            break
        some = jax.tree_util.tree_map(lambda a, rows=rows: a[rows], (made, users, target))
        _intersect(lower, upper, rows, long(*some, np.full(rows.size, float(nodes))))
    return Bounds(lower, upper)


def clones_bounds(verb: str, eps0: Any, users: Any, target: Any, bound: str, gap: float = 1e-6) -> Bounds:
    """Bounds of "delta", "log_delta" or "epsilon" of the clones pair, flat arrays of one length in, NumPy out."""
    if verb == "delta":
        return from_logs(clones_bounds("log_delta", eps0, users, target, bound, gap))
    short, _, one_by_one = _KERNELS[verb]
    lower, upper = (np.array(side) for side in short(clones_law(eps0, bound=bound), users, target))
    rows = _wide(verb, lower, upper, gap)
    rows = rows[np.argsort(users[rows] * np.exp(-eps0[rows]))]  # those of equal work together
    if rows.size:
        more = one_by_one(eps0[rows], users[rows], target[rows], bound=bound)
        _intersect(lower, upper, rows, more)
    return Bounds(lower, upper)


def clones_point(verb: str, eps0: Any, users: Any, target: Any, bound: str) -> Bounds:
    """The same at one traced point."""
    if verb == "delta":
        return from_logs(clones_point("log_delta", eps0, users, target, bound))
    short, _, one_by_one = _KERNELS[verb]
    first = short.point(law.clones(eps0, bound), users, target)
    second = one_by_one.point(eps0, users, target, bound=bound)
    return Bounds(jnp.maximum(first.lower, second.lower), jnp.minimum(first.upper, second.upper))


def _wide(verb: str, lower: np.ndarray, upper: np.ndarray, gap: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        close = (upper - lower <= (gap if verb == "log_delta" else gap * upper)) & np.isfinite(upper)
        return np.flatnonzero(~(close | (lower == upper)))


def _intersect(lower: np.ndarray, upper: np.ndarray, rows: np.ndarray, more: Bounds) -> None:
    upper[rows] = np.fmin(upper[rows], more.upper)
    lower[rows] = np.fmin(np.fmax(lower[rows], more.lower), upper[rows])


@canary("shuffled round, contour")
def _canary() -> tuple[Any, Any, float]:
    """One exact epsilon of the clones pair."""
    point = [np.array([x]) for x in (1.0, 1e6, 1e-6)]
    first = contour_epsilon.run_unchecked(clones_law.run_unchecked(point[0], bound="clones"), *point[1:])
    return first.upper, np.array([0.0043345198029866226]), 1e-8
