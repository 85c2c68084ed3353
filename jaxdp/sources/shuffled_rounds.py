"""Compositions with shuffled rounds: finite pairs around each round, composed as any other law."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.domains import SMALLEST
from jaxdp.interval import Bounds
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.shuffled import LocalRandomizer, LossLaw, Shuffled
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.precision import Kernel
from jaxdp.shuffle import bounds, closed_form, rounds
from jaxdp.shuffle.approximate import additive_term, least_accepted
from jaxdp.shuffle.law import LARGEST_EPS0, Law, stacked
from jaxdp.sources.base import VACUOUS, Answer, Points, Route, batched, differentiated, intersect, one_or_composed
from jaxdp.sources.contour import contour_route
from jaxdp.sources.shuffling import (
    LOWER_GAP,
    LOWER_NODES,
    exact_source,
    lower_laws,
    one_round_answer,
    upper_laws,
    worst,
)
from jaxdp.validate import is_traced

# (gap asked for, most nodes of a sum) of the log deltas between which a round's finite pair lies: to place the grid, in
# a composition, where the pair's own error is larger, in a moment, where nothing else is off, and for the largest loss.
_FIRST, _COMPOSED, _MOMENT, _SUPREMUM = (0.5, 128), (1e-3, 512), (1e-6, 8192), (np.inf, 0)
_LARGEST_ORDER = 1e9  # for which a grid is placed where the order is infinite
_WIDEST = 0.1  # gap asked for at points that hardly count
_PAIR_GAP = 1e-5  # of the contour of composed pairs: about what the pairs themselves are off by
_TRACED_POINTS, _TRACED_AT_ONCE = 256, 16  # of a grid under a trace; of these, what is kept in memory
_TRACED_SHARE = 0.05  # of delta, kept for the additive terms of local deltas under a trace


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The upper pairs' composition from above, that of the lower pairs from below."""

    verb: str
    direction: str

    def __call__(self, params: Any, target: Any, known: Any, gap: float) -> Answer:
        def alone(record: Shuffled, target: Any) -> tuple[Any, Any]:
            return one_round_answer(self.verb, record, target, known, gap)[:2]

        composed = functools.partial(self._composed, gap, known.upper_only)
        return one_or_composed(self.verb, params, target, True, alone, composed)

    def _composed(self, gap: float, upper_only: bool, params: Any, target: Any) -> tuple[Any, Any]:
        unknown = np.full(target.shape, np.nan)
        by_delta = self.verb == "epsilon"
        log_target = np.log(np.clip(target, SMALLEST, 1.0)) if by_delta else unknown
        pure = _pure(params)
        grids = grids_of(pure, log_target, unknown if by_delta else np.clip(target, 0.0, LARGEST_EPS0))

        def side(make: Callable[..., Any], gap: float) -> Callable[[Any], tuple[Any, Any]]:
            stacks = _replaced(pure, grids, make)
            sources = getattr(contour_route(stacks, self.direction), self.verb)
            return lambda aim: intersect(self.verb, [sources], stacks, aim, gap)[0]

        above = side(_upper_law, max(gap, _PAIR_GAP))

        def central(aim: Any) -> Any:
            return above(aim)[1]

        if not np.any(_lost(params, np.zeros(target.shape))):
            upper = central(target)
        elif by_delta:
            upper = least_accepted(central, functools.partial(_lost, params), target, _PAIR_GAP)
        else:
            upper = _with(_lost(params, target), central(target))
        upper = np.fmin(upper, _report_by_report(self.verb, params, target))
        lower = np.zeros(target.shape) if upper_only else side(lower_law_of, max(gap, LOWER_GAP))(target)[0]
        return np.fmin(lower, upper), upper


def _pure(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The stacks with local deltas of 0."""

    def pure(record: Any) -> Any:
        if not (isinstance(record, Shuffled) and isinstance(record.randomizer, LocalRandomizer)):
            return record
        randomizer = dataclasses.replace(record.randomizer, delta=record.randomizer.delta * 0.0)
        return dataclasses.replace(record, randomizer=randomizer)

    return tuple((pure(record), times) for record, times in stacks)


def _lost(stacks: tuple[Stack, ...], epsilon: Any) -> Any:
    """What the local deltas add to delta: the sum of the rounds' additive terms."""
    array = jnp if is_traced(stacks, epsilon) else np
    total = array.zeros(array.shape(epsilon))
    for record, times in stacks:
        if isinstance(record, Shuffled):
            numbers = record.num_users, record.max_loss(), array.asarray(record.local_delta()), epsilon[..., None]
            each = additive_term(*numbers, record.clones())
            total = total + array.sum(array.where(times > 0, times * each, 0.0), axis=-1)
    return total * (1 + 1e-12)


def _with(lost: Any, delta: Any) -> Any:
    array = jnp if is_traced(lost, delta) else np
    return array.where(lost > 0, array.minimum((delta + lost) * (1 + 2 * ULP), 1.0), delta)


def _report_by_report(verb: str, stacks: tuple[Stack, ...], target: Any) -> Any:
    """Upper bound of compositions of rounds alone: each is (eps0, delta0)-DP without its shuffling; both are added."""
    array = jnp if is_traced(stacks, target) else np
    largest = lost = array.zeros(np.shape(target))
    for record, times in stacks:
        if not isinstance(record, Shuffled):
            return array.full(np.shape(target), VACUOUS[verb])
        for_one = record.max_loss(), array.asarray(record.local_delta())
        largest, lost = (
            total + array.sum(times * array.where(times > 0, each, 0.0), axis=-1)
            for total, each in zip((largest, lost), for_one, strict=True)
        )
    largest, lost = largest * (1 + 1e-12), array.minimum(lost * (1 + 1e-12), 1.0)
    if verb == "epsilon":
        return array.where(target >= lost, largest, np.inf)
    return array.where(target >= largest, lost, 1.0)


def _flat(record: Shuffled) -> Any:
    return jax.tree_util.tree_map(lambda x: x.reshape((-1, *x.shape[2:])), record)


def _replaced(stacks: tuple[Stack, ...], grids: list[Any], make: Callable[..., Any]) -> tuple[Stack, ...]:
    """The stacks, shuffled rounds replaced by the finite laws that ``make`` gives on their grids."""

    def law(record: Any, times: Any, grid: Any) -> Any:
        if not isinstance(record, Shuffled):
            return record
        return LossLaw(*(x.reshape((*times.shape, *x.shape[1:])) for x in make(_flat(record), *grid)))

    return tuple((law(*stack, grid), stack[1]) for stack, grid in zip(stacks, grids, strict=True))


def _without_vacuous(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The stacks, rounds of which every row has a local delta replaced by laws whose mass at infinity is 1."""

    def law(record: Any, times: Any) -> Any:
        if not (isinstance(record, Shuffled) and _leaks(record, np).all()):
            return record
        nothing = np.zeros((*times.shape, 1))
        return LossLaw(nothing, nothing, np.ones(times.shape))

    return tuple((law(*stack), stack[1]) for stack in stacks)


def grids_of(
    stacks: tuple[Stack, ...],
    log_delta: Any,
    epsilon: Any,
    order: Any = None,
    points: int = rounds.POINTS,
    close: tuple[float, int] = _FIRST,
) -> list[tuple[np.ndarray, ...] | None]:
    """Grids of epsilon for each stack of shuffled rounds, one row a round, their weights, and their tilts; else None.

    Fine where a composition looks that has this log delta or this epsilon (the other is NaN), or a moment of this
    order. close: gap asked for and most nodes of the log deltas that place the grids.
    """
    found = [(_flat(record), times) for record, times in stacks if isinstance(record, Shuffled)]
    first = []
    for flat, t in found:
        orders = np.zeros(flat.num_users.shape) if order is None else np.repeat(order, t.shape[1])
        first.append(rounds.by_rows(rounds.first_grid, _widest_law(flat), flat.num_users, orders))
    deepest = -800.0 if order is None else -np.inf
    logs = [_log_profile(flat, x, close, rounds.EVERY, deepest) for (flat, _), x in zip(found, first, strict=True)]
    if order is None:
        rows = log_delta.shape[0]
        wide = [np.concatenate([x.reshape(rows, -1, rounds.POINTS) for x in xs], axis=1) for xs in (first, logs)]
        times = np.concatenate([t for _, t in found], axis=1)
        z, total = rounds.by_rows(rounds.tilt, *wide, wide[1], times, log_delta, epsilon)
        log_end = total - np.log(np.maximum(np.sum(times, axis=1), 1.0)) + rounds.LOG_SHARE
    else:
        z, log_end = order, np.full(order.shape, -np.inf)
    made: list[tuple[np.ndarray, ...]] = []
    for (_, t), grid, log in zip(found, first, logs, strict=True):
        each, end = (np.repeat(x, t.shape[1]) for x in (z, log_end))
        finer = rounds.by_rows(rounds.refined, grid, log, each, end, points=points)
        made.append((finer, rounds.by_rows(rounds.log_weights, finer, grid, log, each), each))
    left = iter(made)
    return [next(left) if isinstance(record, Shuffled) else None for record, _ in stacks]


def _widest_law(flat: Shuffled) -> Law:
    """Of the laws of each row, one for every pair of inputs, that with the largest loss, where delta of all ends."""
    laws = upper_laws(flat)
    return _chosen(laws, np.max(np.where(laws.first > 0, laws.loss, -np.inf), axis=-1))


def _chosen(laws: Law, score: np.ndarray) -> Law:
    best = np.argmax(score, axis=-1)
    return jax.tree_util.tree_map(lambda a: a[np.arange(best.size), best], laws)


def _chi_square(laws: Law) -> Any:
    array = jnp if is_traced(laws) else np
    return array.sum((laws.first - laws.second) ** 2 / array.where(laws.base > 0, laws.base, np.inf), axis=-1)


def _log_profile(
    flat: Shuffled,
    grid: np.ndarray,
    close: tuple[float, int],
    every: int = 1,
    deepest: float = -np.inf,
    weights: Any = 0.0,
) -> np.ndarray:
    """Upper bounds of log delta on a grid, rows of epsilons.

    weights: log weights of the points, the largest 0; the gap asked for grows with the root of 1/weight. every: long
    sums are made at every so many points only (delta is convex: the pairs take chords between them), and not beyond a
    point where log delta is below ``deepest``.
    """
    (gap, most), size = close, grid.shape[1]
    users, epsilon = np.repeat(flat.num_users, size), grid.ravel()
    if flat.chosen_bound() == "closed_form":
        eps0 = np.repeat(flat.max_loss(), size)
        with np.errstate(divide="ignore"):
            return np.log(closed_form.clones_closed_form_delta(eps0, users, epsilon)).reshape(grid.shape)
    laws = jax.tree_util.tree_map(lambda a: np.repeat(a, size, axis=0), upper_laws(flat))
    lower, upper = worst("log_delta", laws, users, epsilon, gap, 0)
    with np.errstate(invalid="ignore"):
        wide = (upper > -np.inf) & ~(upper - lower <= gap)
    # a point right of one where delta is as small as that has no mass that counts
    deep = np.minimum.accumulate(upper.reshape(grid.shape), axis=1).ravel() < deepest
    place = np.arange(upper.size)
    places = np.flatnonzero(wide & ~deep & ((place % every == 0) | (place % size == size - 1)))
    if places.size:
        asked = np.minimum(gap * np.exp(-0.5 * np.clip(weights, -80.0, 0.0)), _WIDEST) + np.zeros(grid.shape)
        some, n, e, g = jax.tree_util.tree_map(lambda a: a[places], (laws, users, epsilon, asked.ravel()))
        upper[places] = np.fmin(upper[places], worst("log_delta", some, n, e, g, most).upper)
    return upper.reshape(grid.shape)


def _upper_law(
    flat: Shuffled, grid: np.ndarray, weights: np.ndarray, _: np.ndarray, close: tuple[float, int] = _COMPOSED
) -> Any:
    logs = _log_profile(flat, grid, close, weights=weights)
    losses, masses, infinity = rounds.by_rows(rounds.upper_pair, grid, logs)
    return losses, masses, np.where(_leaks(flat, np), 1.0, infinity)


def _leaks(record: Shuffled, array: Any) -> Any:
    """Whether there is a local delta: its additive term has no mass at infinity to stand for, so all mass does."""
    return array.asarray(record.local_delta()) > 0


def lower_law_of(flat: Shuffled, grid: np.ndarray, _: np.ndarray, z: np.ndarray) -> Any:
    """A finite law that the round of every row dominates."""
    laws, size = lower_laws(flat), grid.shape[1]
    one = _chosen(laws, _chi_square(laws))
    one = jax.tree_util.tree_map(lambda a: np.repeat(a, size, axis=0), one)
    forward, back = (np.sort(np.rec.fromarrays(x), axis=-1) for x in (one[:3], one.swapped()[:3]))
    sides = []
    for order in [one] if (forward == back).all() else [one, one.swapped()]:
        found = bounds.bounds("log_delta", order, np.repeat(flat.num_users, size), grid.ravel(), LOWER_GAP, LOWER_NODES)
        sides.append(Bounds(*(side.reshape(grid.shape) for side in found)))
    return rounds.by_rows(rounds.lower_pair, grid, z, sides[0], sides[-1])


# ---- composition, one traced point ----


def _upper_point(record: Shuffled, epsilon: Any) -> Any:
    """Upper bound of log delta of one round at one traced epsilon; differentiable in the randomizer."""
    if record.chosen_bound() == "closed_form":
        return jnp.log(closed_form.clones_closed_form_delta.point(record.max_loss(), record.num_users, epsilon))
    return jnp.max(
        jax.lax.map(lambda made: bounds.log_delta_by_nodes(made, record.num_users, epsilon), upper_laws.point(record))
    )


def traced_law_of(
    record: Shuffled, times: Any, log_delta: Any, epsilon: Any, order: Any = None, slopes: bool = False
) -> tuple[LossLaw, Any, tuple[Any, Any]]:
    """(law, moved, (grid, z)): a finite law that dominates one traced round, its derivatives, its grid and its tilt.

    Other arguments: see `grids_of`.

    moved: the derivatives of the log weights and of the mass at infinity by each number of the randomizer, those of an
    accurate delta on the grid; None unless ``slopes``.
    """
    numbers, randomizer = ravel_pytree(record.randomizer)

    def at(e: Any) -> tuple[Any, Any]:
        def point(numbers: Any) -> tuple[Any, Any]:
            upper = _upper_point(dataclasses.replace(record, randomizer=randomizer(numbers)), e)
            return upper, upper  # the value, and beside it what is differentiated

        if not slopes:
            return None, point(numbers)[1]
        by_numbers, upper = jax.jacfwd(point, has_aux=True)(numbers)
        return jnp.where(jnp.isfinite(by_numbers), by_numbers, 0.0), upper

    def improved(i: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        grid = state[0]
        by_numbers, logs = jax.lax.map(at, grid, batch_size=_TRACED_AT_ONCE)
        if order is None:
            z, total = rounds.tilt(grid[None], logs[None], logs[None], times[None], log_delta, epsilon)
            log_end = total - jnp.log(jnp.maximum(times, 1.0)) + rounds.LOG_SHARE
        else:
            z, log_end = order, jnp.asarray(-jnp.inf)
        finer = rounds.refined(grid, logs, z, log_end, points=_TRACED_POINTS)
        return jnp.where(i == 0, finer, grid), z, logs, by_numbers

    widest = jax.tree_util.tree_map(lambda a: a[0], upper_laws.point(record))
    first = rounds.first_grid(widest, record.num_users, 0.0 if order is None else order, points=_TRACED_POINTS)
    start = first, jnp.zeros(()), jnp.zeros(_TRACED_POINTS)
    slope = jnp.zeros((_TRACED_POINTS, numbers.size)) if slopes else None
    grid, z, logs, by_numbers = jax.lax.fori_loop(0, 2, improved, (*start, slope))
    losses, weights, infinity = made = rounds.upper_pair(grid, logs)
    moved = jax.vmap(lambda d: rounds.upper_pair_slopes(grid, logs, made, d), in_axes=1)(by_numbers) if slopes else None
    return LossLaw(losses, weights, jnp.where(_leaks(record, jnp), 1.0, infinity)), moved, (grid, z)


def _traced_lower_law(record: Shuffled, grid: Any, z: Any) -> LossLaw:
    """`lower_law_of` of one traced round."""
    laws = lower_laws.point(record)
    best = jnp.argmax(_chi_square(laws))
    one = jax.tree_util.tree_map(lambda a: a[best], laws)
    exact = exact_source(record)

    def order(made: Law) -> Bounds:
        def point(e: Any) -> Bounds:
            return bounds.point("log_delta", made, record.num_users, e, exact)

        return jax.lax.map(point, grid, batch_size=_TRACED_AT_ONCE)

    found = jax.lax.map(order, stacked(one, one.swapped()))
    return LossLaw(*rounds.lower_pair(grid, z, *(Bounds(*(side[i] for side in found)) for i in range(2))))


def _traced_laws(
    stacks: tuple[Stack, ...], log_delta: Any, epsilon: Any, order: Any, slopes: bool = False
) -> tuple[tuple[Stack, ...], list[Any], list[Any]]:
    """The stacks of one traced point, shuffled rounds replaced by laws; of each ``moved`` and (grid, z), or None."""

    def law(stack: Stack) -> tuple[LossLaw, Any, tuple[Any, Any]]:
        record, times = _as_floats(stack)
        return traced_law_of(record, times, log_delta, epsilon, order, slopes)

    made = [jax.lax.map(law, stack) if isinstance(stack[0], Shuffled) else (stack[0], None, None) for stack in stacks]
    laws, moved, grids = map(list, zip(*made, strict=True))
    return tuple((one, times) for one, (_, times) in zip(laws, stacks, strict=True)), moved, grids


def _traced_lower_laws(stacks: tuple[Stack, ...], grids: list[Any]) -> tuple[Stack, ...]:
    """The stacks of one traced point, shuffled rounds replaced by laws that they dominate."""

    def law(each: tuple[Any, tuple[Any, Any]]) -> LossLaw:
        return _traced_lower_law(_as_floats(each[0]), *each[1])

    return tuple(
        (record if place is None else jax.lax.map(law, (record, place)), times)
        for (record, times), place in zip(stacks, grids, strict=True)
    )


def _as_floats(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float64), tree)


def _by_randomizer(record: Any, by_law: LossLaw, moved: tuple[Any, Any]) -> Any:
    """The derivative of a number by a randomizer, from that by its law's masses and from that of these masses."""
    weights, infinity = moved
    by_numbers = weights @ by_law.log_weights + infinity * by_law.infinity
    randomizer = ravel_pytree(record.randomizer)[1](by_numbers)
    return dataclasses.replace(record, randomizer=randomizer, num_users=jnp.zeros_like(record.num_users))


def _of_traced_laws(
    value: Callable[[tuple[Stack, ...], Any], Any],
    place: Callable[[Any], tuple[Any, Any, Any]],
    below: Callable[[tuple[Stack, ...], Any], Any] | None = None,
) -> Callable[..., Any]:
    """(stacks, target) -> value(laws, target) of a traced batch, where the laws replace the shuffled rounds.

    value, of one point, is differentiable where it is real. place: target -> (log_delta, epsilon, order) of
    `grids_of`. below: None, or what is asked of laws that the rounds dominate: then (below, value), with the derivative
    of the latter. The derivative by a randomizer is that by the masses of its law times theirs by the randomizer: no
    loop is differentiated.
    """

    def with_lower(stacks: tuple[Stack, ...], grids: list[Any], target: Any, found: Any) -> Any:
        return (below(_traced_lower_laws(stacks, grids), target), found) if below else found

    def plain(stacks: tuple[Stack, ...], target: Any) -> Any:
        laws, _, grids = _traced_laws(stacks, *place(target))
        return with_lower(stacks, grids, target, value(laws, target))

    def with_gradient(stacks: tuple[Stack, ...], target: Any) -> tuple[Any, Any, Any]:
        laws, moved, grids = _traced_laws(stacks, *place(target), True)
        found, (by_laws, by_target) = jax.value_and_grad(value, argnums=(0, 1))(laws, target)
        by_stacks = tuple(
            (by_law if move is None else jax.vmap(_by_randomizer)(record, by_law, move), by_times)
            for (record, _), (by_law, by_times), move in zip(stacks, by_laws, moved, strict=True)
        )
        return with_lower(stacks, grids, target, found), by_stacks, by_target

    return differentiated(batched(plain, 2**20), batched(with_gradient, 2**20))


def dominating(stacks: tuple[Stack, ...], order: Any, divergence: bool) -> tuple[Stack, ...]:
    """Stacks, shuffled rounds replaced by finite pairs that dominate them, for moments of one order a row.

    divergence: for that of Renyi, which is infinite wherever there is mass at infinity.
    """
    stacks = _without_vacuous(stacks) if divergence else stacks
    if not _has_rounds(stacks):
        return stacks
    finite = np.isfinite(order)
    points, first, close = (rounds.MANY, _FIRST, _MOMENT) if finite.any() else (rounds.POINTS, _SUPREMUM, _SUPREMUM)
    grids = grids_of(stacks, None, None, np.where(finite, order, _LARGEST_ORDER), points, first)
    return _replaced(stacks, grids, functools.partial(_upper_law, close=close))


def _has_rounds(stacks: tuple[Stack, ...]) -> bool:
    return any(isinstance(record, Shuffled) for record, _ in stacks)


@functools.cache
def traced_moment(moment: Kernel, direction: str) -> Callable[[tuple[Stack, ...], Any], Any]:
    """A moment of traced points, (stacks, order) -> numbers, differentiable; of shuffled rounds, of dominating pairs.

    With shuffled rounds a complex moment has no derivative. Cached, so that equal moments compile once.
    """

    def place(order: Any) -> tuple[Any, Any, Any]:
        return jnp.nan, jnp.nan, jnp.where(jnp.isfinite(order), jnp.abs(order), _LARGEST_ORDER)

    def point(stacks: tuple[Stack, ...], order: Any) -> Any:
        return moment.point(stacks, order, direction=direction)

    of_rounds = _of_traced_laws(point, place)

    return lambda stacks, order: (of_rounds if _has_rounds(stacks) else jax.vmap(point))(stacks, order)


def rounds_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The route of a composition in which some mechanisms are shuffled rounds."""
    epsilon, delta = (_Rounds(verb, direction) for verb in ("epsilon", "delta"))
    return Route(stacks, (epsilon,), (delta,), _traced("epsilon", direction), _traced("delta", direction))


@functools.cache
def _traced(verb: str, direction: str) -> Points:
    """The solver of traced points; cached, so that equal configurations compile once."""

    def place(target: Any) -> tuple[Any, Any, None]:
        if verb == "delta":
            return jnp.nan, jnp.maximum(target, 0.0), None
        return jnp.log(jnp.clip(target, SMALLEST, 1.0)), jnp.nan, None

    def side(i: int, laws: tuple[Stack, ...], target: Any) -> Any:
        route = contour_route(jax.tree_util.tree_map(lambda x: x[None], laws), direction)
        answer = route.traced_epsilon if verb == "epsilon" else route.traced_delta
        return answer(route.params, target[None])[i][0]

    of_rounds = _of_traced_laws(functools.partial(side, 1), place, functools.partial(side, 0))

    def solve(params: Any, target: Any) -> tuple[Any, Any]:
        pure, leaky = _pure(params), _lost(params, jnp.zeros_like(target)) > 0
        share = jnp.where(leaky & (verb == "epsilon"), _TRACED_SHARE, 0.0)
        aim = target * (1 - share)
        lower, upper = of_rounds(pure, aim)
        lost = _lost(params, upper if verb == "epsilon" else target)
        if verb == "delta":
            upper = _with(lost, upper)
        else:
            upper = jnp.where(lost <= share * target, upper, jnp.inf)
        upper = jnp.fmin(upper, _report_by_report(verb, params, target))
        return jnp.where(share > 0, 0.0, jnp.minimum(lower, upper)), upper

    return solve
