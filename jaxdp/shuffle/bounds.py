"""Certified delta(epsilon) and epsilon(delta) of batches of shuffled rounds, cheapest source first.

A row of a batch is one law of X (``made`` below) and a number of users. A law with two outcomes and rest 0 has one
source, a binomial tail (`two_point`). All other laws have several sources, whose intervals are intersected: 13 nodes of
the contour, the sum over the numbers of reports of each outcome (`counts`; `every_count` for few users), and more nodes
of the contour. Proofs: notebooks/proofs/shuffle.md.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.domains import LEAST_DELTA
from jaxdp.interval import Bounds
from jaxdp.numerics.roots import Evaluation, proved_ends
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import LOG_SQRT_2PI, raised
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary, long_arrays_pay, platform
from jaxdp.runtime.precision import Kernel, kernel, many, patience
from jaxdp.shuffle import contour, counts, every_count, law, two_point
from jaxdp.shuffle.every_count import Reports
from jaxdp.shuffle.law import LARGEST_EPS0, Law
from jaxdp.shuffle.tilted_sum import Sum, sum_at
from jaxdp.validate import is_traced

FEWEST_NODES, MOST_NODES = 128, 65536
"""Nodes of the shortest and of the longest sum that is tried after 13 nodes."""
_GROWTH = 4  # factor from one number of nodes to the next
_LONG_OUTCOMES, _LONG_SHARE = 64, 1 / 128  # laws with more outcomes get one long sum, with this share of the most nodes
_TERMS_A_NODE = 10.0  # terms of a sum over counts that take as long as one node
_NODES_OF_CLONES = 32768  # nodes that take as long as the longest sum over counts of a law with two outcomes
_SLACK = 2e-13  # rounding of log delta and of its target
_OF_LOG_DELTA = 3  # arguments of a long sum's log delta after the law: users, epsilon, nodes; a search has known bounds
_TRACED_NODES = 1024  # leaves bounds of log delta 2e-3 apart for 100 users, 1e-4 for 10,000


def _log_delta(evaluate: Callable[[Any], Evaluation], made: Law, users: Any, epsilon: Any) -> Evaluation:
    """Bounds of log delta (delta itself may be far below the smallest double); -inf where delta is 0."""
    largest = made.largest_loss()
    inside = (epsilon >= 0) & (epsilon < largest) & (epsilon <= LARGEST_EPS0)
    safe = xp.where(inside, epsilon, 0.5 * xp.minimum(largest, LARGEST_EPS0))
    single = xp.log(sum_at(made, users, safe).single)  # safe <= epsilon, or delta is 0
    found = evaluate(safe)
    upper = xp.where(inside, xp.minimum(found.upper, single), single)
    upper = xp.where((epsilon >= largest) & (largest < xp.inf), -xp.inf, xp.minimum(upper, 0.0))
    good = (epsilon >= 0) & ~xp.isnan(upper) & ~xp.isnan(largest) & (users >= 1)
    least = xp.log(made.given_away() * (1 - 8 * ULP))
    lower = xp.where(good, xp.where(inside & (found.lower > least), found.lower, least), -xp.inf)
    upper = xp.where(good, upper, 0.0)
    return found._replace(lower=xp.minimum(lower, upper), upper=upper)


def from_logs(logs: Bounds) -> Bounds:
    """Bounds of delta from bounds of log delta; an upper bound that underflows becomes `LEAST_DELTA`."""
    array = jnp if is_traced(logs) else np
    upper = array.clip(array.exp(logs.upper) * (1 + 8 * ULP), LEAST_DELTA, 1.0)
    return Bounds(array.exp(logs.lower) * (1 - 8 * ULP), array.where(logs.upper == -np.inf, 0.0, upper))


def _guess(made: Law, users: Any, delta: Any, cap: Any) -> Any:
    """Epsilon at delta if S = X_1 + ... + X_n were normal, at most 0.9 cap.

    delta = sigma (density(z) - z tail(z)), z = (e^eps - 1)/sigma, sigma the standard deviation of S/n;
    density(z) - z tail(z) is about density(z)/(1 + 0.8 z + z^2).
    """
    live = made.base > 0
    base = xp.where(live, made.base, 1.0)

    def deviation(odds: Any) -> Any:
        x = xp.where(live, (made.first - odds * made.second) / base, 0.0)
        return xp.sqrt(xp.sum(xp.where(live, base * x * x, 0.0)) / users)

    def step(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        z, odds = state
        sigma = xp.maximum(deviation(odds), 1e-300)
        share = xp.log(sigma) - xp.log(delta) - LOG_SQRT_2PI - xp.log1p(0.8 * z + z * z)
        z = xp.sqrt(xp.maximum(2 * share, 1e-6))
        return z, xp.minimum(1 + z * sigma, xp.exp(0.9 * cap))

    _, odds = xp.fori_loop(0, 8, step, (xp.ones_like(delta), xp.ones_like(delta)))
    return xp.clip(xp.log(odds), 1e-9 * cap, 0.9 * cap)


def _epsilon(
    evaluate: Callable[[Any], Evaluation], made: Law, users: Any, delta: Any, known: Bounds | None, tries: int
) -> Bounds:
    """Bounds of epsilon at delta. known: earlier bounds; where they are close the search starts between them."""
    target, _ = raised(delta)
    largest = made.largest_loss()
    inside = (target > 0) & (target < 1) & (users >= 1) & (largest > 0)
    endless = made.given_away() * (1 - 1e-14) > target
    inside = inside & ((largest <= LARGEST_EPS0) | ((largest == xp.inf) & ~endless))
    cap = xp.where(inside, xp.minimum(largest, LARGEST_EPS0), 1.0)
    log_delta = xp.log(xp.where(inside, target, 0.5))
    start = _guess(made, users, xp.where(inside, target, 0.5), cap)
    if known is not None:
        middle = 0.5 * (known.lower + known.upper)
        close = (known.lower >= 0.9 * known.upper) & (middle > 0) & (middle < cap)
        start = xp.where(close, middle, start)

    def shifted(epsilon: Any) -> Evaluation:
        found = evaluate(epsilon)
        # Without an upper bound the estimate NaN ends the search; another source is asked then.
        known = xp.where(found.upper < xp.inf, found.estimate, xp.nan)
        return found._replace(upper=found.upper + _SLACK, lower=found.lower - _SLACK, estimate=known)

    low, high, _ = proved_ends(shifted, log_delta, start, cap, wanted=inside, anywhere=True, most_tries=tries)
    high = xp.where(inside & (high < cap), high, largest)
    high = xp.where(target >= 1, 0.0, high)
    low = xp.where(inside, low, xp.where((target == 0) | (endless & (target > 0)), largest, 0.0))
    good = (target >= 0) & (target <= 1) & (users >= 1) & ~xp.isnan(high)
    return Bounds(xp.where(good, xp.minimum(low, high), 0.0), xp.where(good, high, xp.inf))


def _pair(
    evaluate: Callable[..., Evaluation],
    working_set: Any,
    by_numpy: tuple[Any, Any],
    at_once: tuple[int, int] = (1, 1),
    tries: int = 40,
) -> dict[str, Kernel]:
    """Kernels for bounds of "log_delta" and of "epsilon", from ``evaluate`` of one source.

    working_set, by_numpy, at_once: see `Kernel`; the last two for log delta and for epsilon. tries: most evaluations in
    a search for epsilon; all rows of a call wait for the slowest. nodes, in the kernels: number of nodes of the long
    sum.
    """

    def log_delta(made: Law, users: Any, epsilon: Any, *nodes: Any, **static: Reports) -> Bounds:
        found = _log_delta(lambda e: evaluate(made, users, e, *nodes, **static), made, users, epsilon)
        return Bounds(found.lower, found.upper)

    def epsilon(
        made: Law, users: Any, delta: Any, known: Bounds | None = None, *nodes: Any, **static: Reports
    ) -> Bounds:
        return _epsilon(lambda e: evaluate(made, users, e, *nodes, **static), made, users, delta, known, tries)

    def kernel_of(point: Callable[..., Any], i: int) -> Kernel:
        return Kernel(point, large=True, bounds=True, working_set=working_set, by_numpy=by_numpy[i], at_once=at_once[i])

    return {"log_delta": kernel_of(log_delta, 0), "epsilon": kernel_of(epsilon, 1)}


def _patience(seconds: float, nodes: float | None = None, together: bool = True) -> Callable[..., int]:
    """Number of log deltas that NumPy computes in this time.

    nodes: of each sum, or None if they are the last argument. together: whether many points are computed together.
    """

    def points(made: Law, *rest: Any) -> int:
        most = np.max(rest[-1]) if nodes is None else nodes
        each = (2e-5 if together and many(made) else 1e-3) + most * (4e-7 + 6e-8 * made.first.shape[-1])
        return max(int(seconds / each), 1)

    return points


def _patience_of_counts(made: Law, users: Any, *_: Any) -> int:
    """Points that NumPy evaluates in the time of compiling (1 to 9 s for epsilons); at least 1, to check programs."""
    two = made.base.shape[1] == 2
    terms_a_step = counts.DEPTH if two else counts.LANES * counts.DEPTH_OF_LANES
    # time of compiling, and of a point besides its steps; both in units of NumPy's steps
    of_two = (24000.0, 2.0) if many(made) else (4000.0, 30.0)
    compiling, beside = of_two if two else (1000.0, 15.0)
    return max(int(compiling / (beside + np.max(countable(made, users), initial=1.0) / terms_a_step)), 1)


def _alive_in_long_sum(made: Law, *rest: Any) -> int:
    """`working_set` of a long sum: large for many terms and for searches, so that calls compute few padded points."""
    short = len(rest) == _OF_LOG_DELTA and np.max(rest[-1]) * made.first.shape[-1] <= 8192
    return 2048 if short and not long_arrays_pay() else 20_000


# by_numpy: a program is compiled after this many seconds of NumPy's time, for log delta and for epsilon. The second is
# counted in log deltas too, of which a search takes about four. Programs of long sums take 0.4 to 0.7 of NumPy's time.
_AT_13 = float(contour.NODES + 1)
_KERNELS = {
    "13 nodes": _pair(
        contour.evaluate,
        lambda made, *_: 64 * max(made.first.shape[-1], 8),
        (_patience(2.5, _AT_13), _patience(0.5, _AT_13)),
        (512, 512),
        tries=12,
    ),
    "nodes": _pair(
        contour.evaluate_long, _alive_in_long_sum, (_patience(7.0), _patience(0.5, together=False)), (256, 1)
    ),
    # with over two outcomes a call computes one point, as points wait for the slowest
    "counts": _pair(
        counts.evaluate,
        lambda made, *_: 512 if made.first.shape[-1] == 2 else 40_000,
        (_patience_of_counts,) * 2,
        (256, 256),
    ),
    # never compiled: each number of users would need a program
    "every count": _pair(every_count.evaluate, 40 * every_count.MOST_WAYS, (10**9,) * 2),
    "two": _pair(two_point.evaluate, 256, (patience(2048, 16384), patience(512, 2048)), (512, 512)),
}


@kernel(working_set=16, by_numpy=2**20, at_once=2**16)
def clones_law(eps0: Any, *, bound: str) -> Law:
    """`law.clones` for a batch of eps0."""
    return law.clones(eps0, bound)


def countable(made: Law, users: np.ndarray) -> np.ndarray:
    """Approximate number of terms of the sum over counts, for each row of a batch; inf where `counts` does not apply.

    It applies where outcomes 0 and 1 mirror each other, and where at most two other outcomes have any probability, each
    with loss 0, and others than the user send one of them or no blanket report. An outcome with base 0 and another loss
    would identify the user, which the sum does not account for.
    """
    first, second, base, loss = (side[:, :2] for side in made[:4])
    mirror = (first == second[:, ::-1]).all(1) & (loss[:, 0] == -loss[:, 1]) & (base[:, 0] == base[:, 1])
    impossible = made.first + made.second + made.base == 0
    plain = (impossible | (made.loss == 0))[:, 2:].all(1) & impossible[:, 4:].all(1)
    shares = np.sort(np.column_stack([made.base[:, 2:4], made.rest]), axis=1)
    plain &= (shares[:, -1] > 0) | (made.base.shape[1] == 2)
    shares = np.column_stack([base.sum(1), shares[:, :-1]])
    deviations = np.sqrt(users[:, None] * shares * np.maximum(1 - shares, 0.0))
    terms = np.where(shares > 0, 13 * deviations + 4 + np.minimum(deviations**2, 12), 1.0)
    beside = np.maximum(np.prod(terms[:, 1:], axis=1), counts.LANES if made.base.shape[1] > 2 else 1)
    return np.where(mirror & plain & (loss[:, 0] > 0), terms[:, 0] * beside, np.inf)


def _few_users(made: Law, users: np.ndarray, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Reports]]:
    """(indices, `Reports`) of the rows with each number of users small enough for `every_count`; rows: a mask."""
    for n in np.unique(users[rows & (users <= every_count.MOST_WAYS)]):
        places = np.flatnonzero(rows & (users == n))
        massive = (np.column_stack([made.base[places], made.rest[places]]) > 0).any(axis=0)
        reports = Reports(int(n), tuple(np.flatnonzero(massive).tolist()))
        ways = every_count.ways(reports.users, len(reports.places))
        if ways <= every_count.MOST_WAYS and ways * len(reports.places) * places.size <= every_count.MOST_IN_ALL:
            yield places, reports


def _of_equal_work(rows: np.ndarray, terms: np.ndarray) -> list[np.ndarray]:
    """The rows, sorted by their numbers of terms and split into calls: all rows of a call take as long as the longest.

    On a CPU one group is enough, as a call takes few rows. On an accelerator a call takes nearly all rows: there the
    terms in a group differ by less than a factor of 8.
    """
    order = np.argsort(terms)
    sizes = np.floor(np.log2(terms[order]) / 3)
    return np.split(rows[order], np.flatnonzero(np.diff(sizes)) + 1 if platform() != "cpu" else [])


def _live_outcomes(made: Law) -> Law:
    """The laws with outcomes of probability 0 moved last and cut off where every row has them; two at least stay."""
    live = (made.first > 0) | (made.second > 0) | (made.base > 0)
    order = np.argsort(~live, axis=1, kind="stable")[:, : max(2, live.sum(axis=1).max(initial=0))]
    return _outcomes(made, lambda side: np.take_along_axis(side, order, axis=1))


def _two_outcomes(made: Law) -> np.ndarray:
    """Mask of the rows whose law has two outcomes and rest 0."""
    live = (made.first > 0) | (made.second > 0)
    return (live.sum(1) == 2) & ((made.base > 0) == live).all(1) & (made.rest == 0)


def _outcomes(made: Law, change: Callable[[Any], Any]) -> Law:
    """The law with ``change`` applied to each of its arrays over outcomes."""
    return Law(change(made.first), change(made.second), change(made.base), change(made.loss), made.rest)


def bounds(
    verb: str, made: Law, users: Any, target: Any, gap: Any, most: int = MOST_NODES, group: Any = None
) -> Bounds:
    """Bounds of "delta", "log_delta" or "epsilon" (verb) for every row of a batch of laws, NumPy in and out.

    gap: tolerance, for all rows or for each: the relative gap of the bounds at which work stops (log_delta: the gap).
    most: largest number of nodes of a sum; 0 means 13 nodes only. group: None, or for each row the number of its group
    (0, 1, ..., sorted). Only the largest bounds of each group matter then, so other rows may stay wide.
    """
    if verb == "delta":
        return from_logs(bounds("log_delta", made, users, target, gap, most, group))
    made = _live_outcomes(made)
    outcomes = made.first.shape[-1]
    lower, upper = np.full(users.shape, 0.0 if verb == "epsilon" else -np.inf), np.full(users.shape, np.inf)

    def ask(name: str, places: np.ndarray, made: Law, *last: np.ndarray, **static: Reports) -> None:
        """Intersect the bounds of the rows ``places`` with the bounds that the kernel ``name`` gives."""
        if places.size:
            known = (Bounds(lower[places], upper[places]),) if verb == "epsilon" else ()
            more = _KERNELS[name][verb](
                *jax.tree_util.tree_map(lambda a: a[places], (made, users, target)), *known, *last, **static
            )
            upper[places] = np.fmin(upper[places], more.upper)
            lower[places] = np.fmin(np.fmax(lower[places], more.lower), upper[places])

    def wide() -> np.ndarray:
        """Mask of the rows whose upper bound exceeds the largest lower bound of their group by more than gap."""
        best = lower if group is None else largest_of_group(lower, group)[group]
        return (_gaps(verb, best, upper) > gap) & (upper > best)

    two = _two_outcomes(made)
    ask("two", np.flatnonzero(two), _outcomes(made, lambda side: side[:, :2]))
    ask("13 nodes", np.flatnonzero(~two), made)
    long = outcomes > _LONG_OUTCOMES
    most = min(most, max(FEWEST_NODES, int(_LONG_SHARE * most))) if long else most
    terms = np.where(two, np.inf, countable(made, users) / _TERMS_A_NODE)
    nodes = most if long else min(FEWEST_NODES, most)
    rows = ~two & (nodes > 0) & ~np.isnan(np.column_stack([side.reshape(two.size, -1) for side in made])).any(axis=1)
    for few, reports in _few_users(made, users, rows & np.isinf(terms) & wide()):
        ask("every count", few, made, of=reports)
        rows[few] = False
    while nodes:
        rows &= wide()
        counted = np.flatnonzero(rows & (terms <= (_NODES_OF_CLONES if outcomes == 2 else 2 * nodes)))
        for batch in _of_equal_work(counted, terms[counted]):
            ask("counts", batch, _outcomes(made, lambda side: side[:, :4]))
        terms[counted] = np.inf
        rows[counted] = False
        summed = np.flatnonzero(rows)
        ask("nodes", summed, made, np.full(summed.size, float(nodes)))
        # Jump to the largest number of nodes when the next step would come within a factor of two of it.
        following = _GROWTH * nodes if 2 * _GROWTH * nodes < most else most
        nodes = following if nodes < most and rows.any() else 0
    return Bounds(lower, upper)


def largest_of_group(side: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The largest value of each group; group: for each row the number of its group, from 0 on, sorted."""
    return np.maximum.reduceat(side, np.searchsorted(group, np.arange(group[-1] + 1))) if group.size else side


def _gaps(verb: str, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Gaps of log delta, or relative gaps of epsilon; 0 where the bounds are equal, even if they are infinite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = (upper - lower) / (1.0 if verb == "log_delta" else upper)
        return np.where(lower == upper, 0.0, np.where(np.isfinite(upper) & ~np.isnan(distance), distance, np.inf))


def clones_bounds(
    verb: str, eps0: Any, users: Any, target: Any, bound: str, gap: float = 1e-6, most: int = MOST_NODES
) -> Bounds:
    """`bounds` of the clones pair; eps0, users and target are arrays of shape (rows,)."""
    return bounds(verb, clones_law(eps0, bound=bound), users, target, gap, most)


def point(verb: str, made: Law, users: Any, target: Any, source: str) -> Bounds:
    """Bounds of "delta", "log_delta" or "epsilon" (verb) of a law at one traced point.

    source: "two" for a law with two outcomes and rest 0. Otherwise the source that is asked after the 13 nodes:
    "counts" for the clones pair, "nodes" for any other law.
    """
    if verb == "delta":
        return from_logs(point("log_delta", made, users, target, source))
    if source == "two":
        return _KERNELS["two"][verb].point(made, users, target)
    first = _KERNELS["13 nodes"][verb].point(made, users, target)
    known = (first,) if verb == "epsilon" else ()
    nodes = (float(FEWEST_NODES),) if source == "nodes" else ()
    second = _KERNELS[source][verb].point(made, users, target, *known, *nodes)
    return Bounds(xp.maximum(first.lower, second.lower), xp.minimum(first.upper, second.upper))


@kernel(working_set=1024, large=True, by_numpy=patience(64, 2048), at_once=256)
def least_epsilon(eps0: Any, users: Any, delta: Any) -> Any:
    """Lower bound of epsilon of shuffled two-point randomized response, the larger one over both orders of x and x'."""
    valid = (eps0 >= 0) & (users >= 1) & (users == xp.floor(users)) & (users < xp.inf)
    found = xp.vmap(lambda made: point("epsilon", made, users, delta, "two").lower)(law.two_point(eps0))
    return xp.where(valid, xp.max(found), 0.0)


@jax.custom_jvp
def log_delta_by_nodes(made: Law, users: Any, epsilon: Any) -> Any:
    """Upper bound of log delta at one traced point, from the long sum alone.

    Its derivatives by the law and by epsilon are the derivatives of the estimate between the bounds. They are sums over
    the same nodes, so that no loop is differentiated.
    """
    return _by_nodes(made, users, epsilon).upper


@log_delta_by_nodes.defjvp
def _by_nodes_jvp(primals: Any, tangents: Any) -> Any:
    made, users, epsilon = primals
    along = tangents[0], tangents[2]
    moved = jax.jvp(lambda law, e: sum_at(law, users, e)[:-1], (made, epsilon), along)[1]
    found = _by_nodes(made, users, epsilon, Sum(*moved))
    # NaN, the slope of a law with equal rows (delta 0), would spoil the slope of the largest of several laws.
    return found.upper, xp.where(xp.isnan(found.slope), 0.0, found.slope)


def _by_nodes(made: Law, users: Any, epsilon: Any, moved: Sum | None = None) -> Evaluation:
    nodes = float(FEWEST_NODES if made.first.shape[-1] > _LONG_OUTCOMES else _TRACED_NODES)
    return _log_delta(lambda e: contour.evaluate_long(made, users, e, nodes, moved), made, users, epsilon)


@canary("shuffled round, contour")
def _canary() -> tuple[Any, Any, float]:
    """One exact epsilon of the clones pair and one of two-point randomized response."""
    point = [np.array([x]) for x in (1.0, 1e6, 1e-6)]
    first = _KERNELS["13 nodes"]["epsilon"].run_unchecked(
        clones_law.run_unchecked(point[0], bound="clones"), *point[1:]
    )
    two = least_epsilon.run_unchecked(*(np.array([x]) for x in (4.0, 1e5, 1e-6)))
    return np.append(first.upper, two), np.array([0.0043345198029866226, 0.084713990685631705]), 1e-8
