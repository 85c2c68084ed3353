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

from jaxdp.interval import Bounds
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import canary, kernel
from jaxdp.shuffle import contour, counts, law, search
from jaxdp.shuffle.law import LARGEST_EPS0, Law
from jaxdp.shuffle.search import Evaluation
from jaxdp.validate import is_traced

LEAST_DELTA = 2.3e-308
"""Least upper bound of a positive delta: one that underflows must not read 0, which means pure DP."""

LONG_SUMS = (128, 1024, 8192, 65536)  # nodes
_LONG_OUTCOMES = 64  # laws of more outcomes get the first long sum only
_LANES = 128
_COMMON_OUTCOMES, _FEW_ROWS = 8, 512
_CLONES_SUMS = (32768,)
_TERMS_A_NODE = 10.0  # terms of a sum over counts that take as long as one node
_WORKING_SET = 48_000  # what 512 points keep alive fits the cache, and few points wait for the slowest
_COUNTS_SET = 390_000  # batches of 32: all points of a batch take as many steps as the longest
_SLACK = 2e-13  # rounding of log(delta)
Evaluate = Callable[[Any], Evaluation]


def _log_delta(evaluate: Evaluate, made: Law, users: Any, epsilon: Any) -> Bounds:
    """Bounds of log delta, which is far below the smallest double for large epsilon; -inf where delta is 0."""
    largest = made.largest_loss()
    inside = (epsilon >= 0) & (epsilon < largest) & (epsilon <= LARGEST_EPS0)
    safe = xp.where(inside, epsilon, 0.5 * xp.minimum(largest, LARGEST_EPS0))
    single = xp.log(contour.sum_at(made, users, epsilon).single)
    seen = evaluate(safe)
    upper = xp.where(inside, xp.minimum(seen.upper, single), single)
    upper = xp.where(epsilon >= largest, -xp.inf, xp.minimum(upper, 0.0))
    good = (epsilon >= 0) & ~xp.isnan(upper) & (users >= 1)
    lower = xp.where(inside & good & ~xp.isnan(seen.lower), seen.lower, -xp.inf)
    upper = xp.where(good, upper, 0.0)
    return Bounds(xp.minimum(lower, upper), upper)


def from_logs(logs: Bounds) -> Bounds:
    """Bounds of delta from those of log delta; an upper one that underflows is `LEAST_DELTA`."""
    array = jnp if is_traced(logs) else np
    upper = array.clip(array.exp(logs.upper) * (1 + 8 * ULP), LEAST_DELTA, 1.0)
    return Bounds(array.exp(logs.lower) * (1 - 8 * ULP), array.where(logs.upper == -np.inf, 0.0, upper))


def _guess(made: Law, users: Any, delta: Any, cap: Any) -> Any:
    """Epsilon by the normal approximation.

    delta = deviation/n (density(z) - z tail(z)), z = n (e^eps - 1)/deviation.
    """
    live = made.base > 0
    base = xp.where(live, made.base, 1.0)

    def deviation(odds: Any) -> Any:
        x = xp.where(live, (made.first - odds * made.second) / base, 0.0)
        return xp.sqrt(xp.sum(xp.where(live, base * x * x, 0.0)) / users)

    def step(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        z, odds = state
        spread = xp.maximum(deviation(odds), 1e-300)
        share = xp.log(spread) - xp.log(delta) - 0.919 - xp.log1p(0.8 * z + z * z)
        z = xp.sqrt(xp.maximum(2 * share, 1e-6))
        return z, xp.minimum(1 + z * spread, xp.exp(0.9 * cap))

    _, odds = xp.fori_loop(0, 8, step, (xp.ones_like(delta), xp.ones_like(delta)))
    return xp.clip(xp.log(odds), 1e-9 * cap, 0.9 * cap)


def _epsilon(evaluate: Evaluate, made: Law, users: Any, delta: Any, wanted: Any = True) -> Bounds:
    target, _ = raised(delta)
    largest = made.largest_loss()
    inside = (target > 0) & (target < 1) & (users >= 1) & (largest > 0) & wanted
    inside = inside & ((largest <= LARGEST_EPS0) | (largest == xp.inf))
    cap = xp.where(inside, xp.minimum(largest, LARGEST_EPS0), 1.0)
    log_delta = xp.log(xp.where(inside, target, 0.5))
    start = _guess(made, users, xp.where(inside, target, 0.5), cap)

    def shifted(epsilon: Any) -> Evaluation:
        seen = evaluate(epsilon)
        return seen._replace(upper=seen.upper + _SLACK, lower=seen.lower - _SLACK)

    low, high = search.epsilon_bounds(shifted, log_delta, start, cap, inside)
    high = xp.where(inside & (high < cap), high, largest)
    high = xp.where(target >= 1, 0.0, high)
    low = xp.where(inside, low, xp.where(target == 0, largest, 0.0))
    good = (target >= 0) & (target <= 1) & (users >= 1) & ~xp.isnan(high)
    return Bounds(xp.where(good, xp.minimum(low, high), 0.0), xp.where(good, high, xp.inf))


_short = kernel(working_set=_WORKING_SET, large=True, bounds=True, by_numpy=64)
_long = kernel(working_set=20_000, large=True, bounds=True, by_numpy=64)
_counts = kernel(
    static=("lanes",),
    working_set=_COUNTS_SET,
    large=True,
    bounds=True,
    by_numpy=64,
)


@_short
def contour_log_delta(made: Law, users: Any, epsilon: Any) -> Bounds:
    """Bounds of log delta with 13 nodes."""
    return _log_delta(lambda e: contour.evaluate(made, users, e), made, users, epsilon)


@_short
def contour_epsilon(made: Law, users: Any, delta: Any) -> Bounds:
    """Bounds of epsilon with 13 nodes."""
    return _epsilon(lambda e: contour.evaluate(made, users, e), made, users, delta)


@_long
def long_log_delta(made: Law, users: Any, epsilon: Any, most_nodes: Any) -> Bounds:
    """Bounds of log delta with as many nodes as it takes, up to most_nodes."""
    return _log_delta(lambda e: contour.evaluate_long(made, users, e, most_nodes), made, users, epsilon)


@_long
def long_epsilon(made: Law, users: Any, delta: Any, most_nodes: Any) -> Bounds:
    """Bounds of epsilon with as many nodes as it takes, up to most_nodes."""
    return _epsilon(lambda e: contour.evaluate_long(made, users, e, most_nodes), made, users, delta)


@_counts
def counts_log_delta(made: Law, users: Any, epsilon: Any, *, lanes: int = 1) -> Bounds:
    """Bounds of log delta, summed over how often each outcome occurs; for laws that are `countable`."""
    return _log_delta(lambda e: counts.evaluate(made, users, e, lanes=lanes), made, users, epsilon)


@_counts
def counts_epsilon(made: Law, users: Any, delta: Any, *, lanes: int = 1) -> Bounds:
    """Bounds of epsilon, summed over how often each outcome occurs; for laws that are `countable`."""
    return _epsilon(lambda e: counts.evaluate(made, users, e, lanes=lanes), made, users, delta)


@kernel(static=("bound",), working_set=16, by_numpy=4096)
def clones_law(eps0: Any, *, bound: str) -> Law:
    """`law.clones`, batched."""
    return law.clones(eps0, bound)


_KERNELS = {
    "log_delta": (contour_log_delta, long_log_delta, counts_log_delta),
    "epsilon": (contour_epsilon, long_epsilon, counts_epsilon),
}


def countable(made: Law, users: np.ndarray) -> np.ndarray:
    """About how many terms the sum over counts has, for rows of laws; infinite where it does not apply.

    It applies where the outcomes 0 and 1 mirror each other, all others are without loss, and at most two of these have
    mass.
    """
    first, second, base, loss = (side[:, :2] for side in made[:4])
    mirror = (first == second[:, ::-1]).all(1) & (loss[:, 0] == -loss[:, 1]) & (base[:, 0] == base[:, 1])
    plain = ((made.loss[:, 2:] == 0) | (made.base[:, 2:] == 0)).all(1) & (made.base[:, 4:] == 0).all(1)
    shares = np.sort(np.column_stack([made.base[:, 2:4], made.rest]), axis=1)[:, :-1]
    shares = np.column_stack([base.sum(1), shares])
    spread = np.sqrt(users[:, None] * shares * np.maximum(1 - shares, 0.0))
    terms = np.prod(np.where(shares > 0, 13 * spread + 4 + np.minimum(spread**2, 12), 1.0), axis=1)
    return np.where(mirror & plain & (loss[:, 0] > 0), terms, np.inf)


def _outcomes(made: Law, change: Callable[[Any], Any]) -> Law:
    return Law(change(made.first), change(made.second), change(made.base), change(made.loss), made.rest)


def bounds(verb: str, made: Law, users: Any, target: Any, gap: float, sums: tuple[int, ...] = LONG_SUMS) -> Bounds:
    """Bounds of "delta", "log_delta" or "epsilon" (verb) for every row of a batch of laws, NumPy in and out.

    gap: relative distance (of log_delta: distance) of the bounds at which work stops. sums: how many nodes may be
    tried, or the same work in sums over counts.
    """
    if verb == "delta":
        return from_logs(bounds("log_delta", made, users, target, gap, sums))
    short, long, one_by_one = _KERNELS[verb]
    missing = _COMMON_OUTCOMES - made.first.shape[-1]
    if users.size <= _FEW_ROWS and 0 < missing < _COMMON_OUTCOMES - 2:  # to share a program with other laws
        made = _outcomes(made, lambda side: np.pad(side, ((0, 0), (0, missing))))
    lower, upper = (np.array(side) for side in short(made, users, target))
    terms = countable(made, users) / _TERMS_A_NODE
    for nodes in sums[: 1 if made.first.shape[-1] > _LONG_OUTCOMES else None]:
        rows = _wide(verb, lower, upper, gap)
        few = terms[rows] <= nodes
        counted, rest = rows[few], rows[~few]
        counted = counted[np.argsort(terms[counted])]  # those of equal work together
        if counted.size:
            few_outcomes = _outcomes(made, lambda side: side[:, :4])
            lanes = 1 if made.first.shape[-1] == 2 else _LANES
            some = jax.tree_util.tree_map(lambda a, rows=counted: a[rows], (few_outcomes, users, target))
            more = one_by_one(*some, lanes=lanes)
            _intersect(lower, upper, counted, more)
            terms[counted] = np.inf
        if rest.size:
            some = jax.tree_util.tree_map(lambda a, rest=rest: a[rest], (made, users, target))
            _intersect(lower, upper, rest, long(*some, np.full(rest.size, float(nodes))))
    return Bounds(lower, upper)


def clones_bounds(verb: str, eps0: Any, users: Any, target: Any, bound: str, gap: float = 1e-6) -> Bounds:
    """Bounds of "delta", "log_delta" or "epsilon" of the clones pair, flat arrays of one length in, NumPy out."""
    return bounds(verb, clones_law(eps0, bound=bound), users, target, gap, _CLONES_SUMS)


def clones_point(verb: str, eps0: Any, users: Any, target: Any, bound: str) -> Bounds:
    """The same at one traced point."""
    if verb == "delta":
        return from_logs(clones_point("log_delta", eps0, users, target, bound))
    short, _, one_by_one = _KERNELS[verb]
    made = law.clones(eps0, bound)
    first, second = (solve.point(made, users, target) for solve in (short, one_by_one))
    return Bounds(xp.maximum(first.lower, second.lower), xp.minimum(first.upper, second.upper))


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
