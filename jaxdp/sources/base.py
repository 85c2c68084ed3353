"""What a route is, how its sources' answers are intersected, and how they are differentiated."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.runtime.backend import require_x64
from jaxdp.runtime.precision import Kernel, by_rows
from jaxdp.validate import is_traced

Point = Callable[[Any, Any], tuple[Any, Any]]
Points = Callable[[Any, Any], Any]  # the same for a batch


class Answer(NamedTuple):
    """Valid bounds of every row asked for (0 and `VACUOUS` where the source has nothing to say).

    settled: rows, or all, of which no other source would tell more: they are not asked for again.
    """

    lower: Any
    upper: Any
    settled: Any = False


class Known(NamedTuple):
    """Bounds found so far of every row asked for, and a lower bound of the largest among the pairs."""

    lower: np.ndarray
    upper: np.ndarray
    largest: np.ndarray


class Asked(NamedTuple):
    """How close bounds shall be.

    gap: relative. near: of each row, a number from which the gap may grow, see `gap_near`; None: nowhere. upper_only:
    no lower bound need be computed that is of no use for the upper one.
    """

    gap: float
    near: np.ndarray | None = None
    upper_only: bool = False

    def at_least(self, gap: float) -> "Asked":
        """The same with a gap not below ``gap``."""
        return self._replace(gap=max(self.gap, gap))

    def rows(self, rows: np.ndarray) -> "Asked":
        """The same for some of the rows."""
        return self if self.near is None else self._replace(near=self.near[rows])

    def allowed(self, lower: np.ndarray, upper: np.ndarray) -> Any:
        """The relative gap at which a row is done whose number lies between the bounds."""
        return self.gap if self.near is None else gap_near(self.near, self.gap, lower, upper)


# (params, target, bounds known so far, what is asked) -> Answer. params: a pytree, leading axis the batch.
Source = Callable[[Any, np.ndarray, Known, Asked], Answer]
Side = Callable[[Any, np.ndarray, Asked], tuple[Any, Any]]
VACUOUS = {"epsilon": np.inf, "delta": 1.0}
BESIDE_GRADIENT = Asked(1e-6)  # of bounds beside a derivative
_SHARE, _MOST_GAP = 0.05, 0.2  # gap of an epsilon, for each nat between it and a target, and the largest
_NEGLIGIBLE = {"epsilon": 1e-12, "delta": SMALLEST}  # not narrowed; a smaller delta has no number


def gap_near(target: np.ndarray, gap: float, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The relative gap that shows on which side of ``target`` a number between the bounds is, and about how far.

    It is ``gap`` where the target lies between the bounds.
    """
    with np.errstate(all="ignore"):
        nearest = np.where(upper <= target, upper, np.fmax(lower, target))
        distance = np.abs(np.log(nearest / target))
    return np.fmax(gap, np.fmin(_SHARE * distance, _MOST_GAP))


def nothing(verb: str, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bounds that always hold."""
    return np.zeros(target.shape), np.full(target.shape, VACUOUS[verb])


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to answer for one dominating pair: sources for concrete numbers, functions for traced ones.

    params: the pytree the sources take, leading axis the batch. epsilon, delta: sources, cheapest first.
    traced_epsilon, traced_delta: (params, target) -> (lower, upper) of a batch, differentiable.
    """

    params: Any
    epsilon: tuple[Source, ...]
    delta: tuple[Source, ...]
    traced_epsilon: Points
    traced_delta: Points


def source(kernel: Point) -> Source:
    """The source that a kernel is by itself: a closed form, which nothing narrows."""
    return lambda params, target, known, asked: Answer(*kernel(params, target), True)


def wide(lower: np.ndarray, upper: np.ndarray, gap: Any) -> np.ndarray:
    """Whether the relative gap is above ``gap``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return ~(np.where(upper == lower, 0.0, (upper - lower) / upper) <= gap)


def intersect(
    verb: str,
    pairs: list[tuple[Source, ...]],
    params: Any,
    target: np.ndarray,
    asked: Asked,
    allowed: Callable[[np.ndarray, np.ndarray], Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(lower, upper) of each pair: its sources in turn, asked for the rows whose interval is still wide, intersected.

    A row of one pair is narrow enough where its relative gap is at most what is asked (or what ``allowed`` says
    of the bounds), or where its upper bound is not above a lower bound of another: the largest of the pairs is sought.
    """
    found = [nothing(verb, target) for _ in pairs]
    settled = [np.zeros(target.shape, bool) for _ in pairs]
    for rank in range(max(map(len, pairs))):
        narrow = True
        for pair, sources in enumerate(pairs):
            lower, upper = found[pair]
            largest = np.maximum.reduce([lower for lower, _ in found])
            open_rows = wide(lower, upper, (allowed or asked.allowed)(lower, upper)) & (upper > largest)
            open_rows &= upper > _NEGLIGIBLE[verb]
            rows = np.flatnonzero(open_rows & ~settled[pair])
            narrow &= rows.size == 0
            if rank < len(sources) and rows.size:
                some = jax.tree_util.tree_map(operator.itemgetter(rows), params)
                known = Known(lower[rows], upper[rows], largest[rows])
                answer = sources[rank](some, target[rows], known, asked.rows(rows))
                upper[rows] = np.fmin(upper[rows], answer.upper)
                lower[rows] = np.fmin(np.fmax(lower[rows], answer.lower), upper[rows])
                settled[pair][rows] = answer.settled
        if narrow:
            break
    return found


def one_or_composed(
    verb: str, stacks: Any, target: np.ndarray, asked: Asked, one: Any, alone: Side, composed: Side
) -> Answer:
    """The answer of each row of stacks: by ``alone`` where ``one`` says that it is one mechanism, else by ``composed``.

    alone, composed: (record or stacks, target, asked) -> (lower, upper). Several stacks are never one mechanism.
    """
    (record, times), *more = stacks
    single = one & (np.sum(times, axis=1) == 1) & (not more)
    lower, upper = nothing(verb, target)
    first, rest = np.flatnonzero(single), np.flatnonzero(~single)
    if first.size:
        place = np.argmax(times[first] == 1, axis=1)
        flat = jax.tree_util.tree_map(lambda x: x[first, place], record)
        lower[first], upper[first] = alone(flat, target[first], asked.rows(first))
    if rest.size:
        some = jax.tree_util.tree_map(lambda x: x[rest], stacks)
        lower[rest], upper[rest] = composed(some, target[rest], asked.rows(rest))
    return Answer(lower, upper, True)


def batched(point: Callable[..., Any], working_set: int) -> Callable[..., Any]:
    """The function of one point for a batch: part of a caller's program, or of one of its own for concrete numbers.

    (Traced eagerly, by a bare jax.grad, it would run one operation at a time.) working_set: as for `Kernel`.
    """

    def batch(*args: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return by_rows(point)(*args)

    inside, alone = jax.jit(batch), Kernel(point, working_set=working_set, large=True)

    def either(*args: Any) -> Any:
        if not is_traced(args):
            return alone(*args)
        require_x64()  # a derivative of a bare jax.grad comes here first
        return inside(*args)

    return either


def differentiated(value: Points, with_gradient: Callable[[Any, Any], Any]) -> Points:
    """value(params, target) of a batch, with the derivatives that with_gradient gives: (value, by params, by target).

    Where the value has several numbers all of them get the same derivative. Batches, not points: to transform a traced
    program once more takes as long as tracing it.
    """
    solve = jax.custom_jvp(value)

    @solve.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        found, by_params, by_target = with_gradient(*primals)
        found = jax.tree_util.tree_map(jnp.asarray, found)
        by_params, by_target = jax.tree_util.tree_map(_finite, (by_params, by_target))
        tangent = jax.vmap(_directional)((by_params, by_target), tangents)
        return found, jax.tree_util.tree_map(lambda _: tangent, found)

    return solve


def traced_bounds(
    epsilon: Point,
    delta: Point,
    log_delta: Callable[[Any, Any], Any],
    route: Callable[[Any], Route],
    working_set: int,
    gradient: Callable[..., Any] = jax.grad,
) -> tuple[Points, Points]:
    """Bounds of epsilon and of delta of a batch, with the derivatives of the formula log_delta(params, eps).

    The root finder is never differentiated: epsilon has the derivative of the implicit function, -(d delta/d p)/(d
    delta/d eps), 0 where epsilon is 0 or infinite. route: that of params. working_set: of the gradient, as for
    `Kernel`. gradient: `jax.grad`, or `jax.jacfwd` where log_delta has loops whose length is not known. A bare
    jax.grad has concrete numbers here: their bounds are those of the verb, and only the slopes are compiled.
    """

    def of_epsilon(params: Any, target: Any, upper: Any) -> tuple[Any, Any]:
        live = (upper > 0) & jnp.isfinite(upper)

        def value(params: Any, eps: Any) -> tuple[Any, Any]:
            made = log_delta(params, eps)
            return made, made

        (by_params, by_eps), log = gradient(value, argnums=(0, 1), has_aux=True)(params, jnp.where(live, upper, 1.0))
        by_params = jax.tree_util.tree_map(lambda g: jnp.where(live, -g / by_eps, 0.0), by_params)
        # its own delta: next to the largest loss epsilon has too few digits to stand for that of the target
        return by_params, jnp.where(live, 1 / (jnp.exp(log) * by_eps), 0.0)

    def of_delta(params: Any, eps: Any, upper: Any) -> tuple[Any, Any]:
        return jax.tree_util.tree_map(lambda g: upper * g, gradient(log_delta, argnums=(0, 1))(params, eps))

    def sloped(verb: str, bounds: Point, slopes: Callable[..., Any]) -> Points:
        many = batched(slopes, working_set)

        def with_gradient(params: Any, target: Any) -> tuple[Any, Any, Any]:
            if is_traced(params, target):
                found = solve(params, target)
            else:
                params, target = jax.tree_util.tree_map(np.asarray, (params, target))
                (found,) = intersect(verb, [getattr(route(params), verb)], params, target, BESIDE_GRADIENT)
            return found, *many(params, target, found[1])

        solve = differentiated(batched(bounds, working_set), with_gradient)
        return solve

    return sloped("epsilon", epsilon, of_epsilon), sloped("delta", delta, of_delta)


def _finite(value: Any) -> Any:
    return jnp.where(jnp.isfinite(value), value, 0.0)


def _directional(gradient: Any, tangent: Any) -> Any:
    products = jax.tree_util.tree_map(lambda g, t: jnp.sum(g * t), gradient, tangent)
    return sum(jax.tree_util.tree_leaves(products), jnp.zeros(()))
