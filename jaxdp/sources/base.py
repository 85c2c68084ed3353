"""The route of a dominating pair: its sources of bounds, the intersection of their answers, and the derivatives."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.domains import SMALLEST
from jaxdp.runtime.backend import require_x64
from jaxdp.runtime.precision import Kernel, by_rows
from jaxdp.validate import is_traced

Points = Callable[[Any, Any], Any]  # (params, target) -> (lower, upper) of a batch, or other numbers


class Answer(NamedTuple):
    """Valid bounds for every row asked for: 0 and `VACUOUS` where the source finds no bound.

    settled: for each row, or for all rows: no other source would narrow the bounds, so that none is asked.
    """

    lower: Any
    upper: Any
    settled: Any = False


class Known(NamedTuple):
    """Bounds found so far for every row asked for. largest: the largest lower bound among all pairs."""

    lower: np.ndarray
    upper: np.ndarray
    largest: np.ndarray


class Asked(NamedTuple):
    """The accuracy asked for.

    gap: relative gap of the bounds. near: for each row a target; the gap may grow with the distance from it, see
    `gap_near`. None: it does not grow. upper_only: compute a lower bound only where it helps to find the upper bound.
    apart: for each row a lower bound from elsewhere, or 0, that the pair's upper bound does not approach. The gap of
    the pair's own bounds may grow to a hundredth of the relative distance between the two, at most to 20 times ``gap``
    and 4e-5. inf, or no array: it does not grow.
    """

    gap: float
    near: np.ndarray | None = None
    upper_only: bool = False
    apart: np.ndarray | None = None

    def at_least(self, gap: float) -> "Asked":
        """A copy whose gap is not below ``gap``."""
        return self._replace(gap=max(self.gap, gap))

    def rows(self, rows: np.ndarray) -> "Asked":
        """A copy for the given rows."""
        near, apart = (None if each is None else each[rows] for each in (self.near, self.apart))
        return self._replace(near=near, apart=apart)

    def allowed(self, lower: np.ndarray, upper: np.ndarray) -> Any:
        """The relative gap at which a row with these bounds is done."""
        gap = self.gap if self.near is None else gap_near(self.near, self.gap, lower, upper)
        if self.apart is None:
            return gap
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.fmin(_SHARE_OF_APART * (1 - self.apart / upper), _MOST_APART)
        return np.fmax(gap, np.fmin(share, _TIMES_APART * self.gap))


# (params, target, bounds known so far, accuracy asked for) -> Answer. params: a pytree, first axis the batch.
Source = Callable[[Any, np.ndarray, Known, Asked], Answer]
Side = Callable[[Any, np.ndarray, Asked], tuple[Any, Any]]  # (params, target, accuracy) -> (lower, upper)
VACUOUS = {"epsilon": np.inf, "delta": 1.0}  # upper bounds that always hold
BESIDE_GRADIENT = Asked(1e-6)  # accuracy of the bounds that are returned together with a derivative
_GAP_PER_NAT, _LARGEST_GAP = 0.05, 0.2  # of `gap_near`: gap for each nat of distance from the target, largest gap
_SHARE_OF_APART, _TIMES_APART, _MOST_APART = 0.01, 20.0, 4e-5  # see `Asked.apart`
_NEGLIGIBLE = {"epsilon": 1e-9, "delta": SMALLEST}  # upper bounds up to these are not narrowed
_ZERO = 1e-12  # an epsilon up to this is taken for 0, where its derivative is 0; a search may end there


def gap_near(target: np.ndarray, gap: float, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Relative gap that suffices to see on which side of ``target`` the value between the bounds is, and about how far.

    It is ``gap`` where the target lies between the bounds, and grows with the distance |log(nearer bound / target)|.
    """
    with np.errstate(all="ignore"):
        nearest = np.where(upper <= target, upper, np.fmax(lower, target))
        distance = np.abs(np.log(nearest / target))
    return np.fmax(gap, np.fmin(_GAP_PER_NAT * distance, _LARGEST_GAP))


def nothing(verb: str, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The vacuous bounds, which always hold."""
    return np.zeros(target.shape), np.full(target.shape, VACUOUS[verb])


@dataclasses.dataclass(frozen=True)
class Route:
    """How bounds of one dominating pair are found: sources for concrete numbers, functions for traced numbers.

    params: the pytree that the sources take; the first axis of each leaf is the batch. sources: for "epsilon" and for
    "delta", cheapest first. traced: for each of the two, (params, target) -> (lower, upper) of a batch, differentiable.
    """

    params: Any
    sources: Mapping[str, tuple[Source, ...]]
    traced: Mapping[str, Points]


def relative_gap(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """(upper - lower) / upper; 0 for equal bounds."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(upper == lower, 0.0, (upper - lower) / upper)


def wide(lower: np.ndarray, upper: np.ndarray, gap: Any) -> np.ndarray:
    """Whether the relative gap exceeds ``gap``. NaN always does."""
    return ~(relative_gap(lower, upper) <= gap)


def intersect(
    verb: str,
    pairs: list[tuple[Source, ...]],
    params: Any,
    target: np.ndarray,
    asked: Asked,
    allowed: Callable[[np.ndarray, np.ndarray], Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(lower, upper) of each pair: the intersection of its sources' answers.

    pairs: the sources of each pair, asked in turn for the rows that are not done. A row of a pair is done if its
    relative gap is at most the gap asked for (or ``allowed(lower, upper)``), if a source has settled it, if its upper
    bound is negligible, or if this does not exceed a lower bound of another pair: the verbs return the largest pair's.
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
                open_params = jax.tree_util.tree_map(operator.itemgetter(rows), params)
                known = Known(lower[rows], upper[rows], largest[rows])
                answer = sources[rank](open_params, target[rows], known, asked.rows(rows))
                upper[rows] = np.fmin(upper[rows], answer.upper)
                lower[rows] = np.fmin(np.fmax(lower[rows], answer.lower), upper[rows])
                settled[pair][rows] = answer.settled
        if narrow:
            break
    return found


def one_or_composed(
    verb: str, stacks: Any, target: np.ndarray, asked: Asked, one: Any, alone: Side, composed: Side
) -> Answer:
    """Bounds of each row of stacks: by ``alone`` where the row is one run of one mechanism, else by ``composed``.

    one: whether one run of a record counts as one mechanism, for each row or for all. With several stacks no row is one
    mechanism. alone, composed: (record or stacks, target, asked) -> (lower, upper).
    """
    (record, times), *more = stacks
    single = one & (np.sum(times, axis=1) == 1) & (not more)
    lower, upper = nothing(verb, target)
    rows, others = np.flatnonzero(single), np.flatnonzero(~single)
    if rows.size:
        member = np.argmax(times[rows] == 1, axis=1)
        flat = jax.tree_util.tree_map(lambda x: x[rows, member], record)
        lower[rows], upper[rows] = alone(flat, target[rows], asked.rows(rows))
    if others.size:
        other_stacks = jax.tree_util.tree_map(lambda x: x[others], stacks)
        lower[others], upper[others] = composed(other_stacks, target[others], asked.rows(others))
    return Answer(lower, upper, True)


def batched(point: Callable[..., Any], working_set: int) -> Callable[..., Any]:
    """The function of a batch made from a function of one point.

    Traced arguments: it becomes part of the caller's program, under jit, because a bare jax.grad would run it one
    operation at a time. Concrete arguments: it is compiled to a program of its own. working_set: as for `Kernel`.
    """

    def batch(*args: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return by_rows(point)(*args)

    traced, concrete = jax.jit(batch), Kernel(point, working_set=working_set, large=True)

    def either(*args: Any) -> Any:
        if not is_traced(args):
            return concrete(*args)
        require_x64()  # the verbs do not check the compiler under a bare jax.grad, whose second derivative comes here
        return traced(*args)

    return either


def differentiated(value: Points, with_gradient: Callable[[Any, Any], Any]) -> Points:
    """value(params, target) of a batch, with derivatives from with_gradient.

    with_gradient: (params, target) -> (value, derivative by params, derivative by target). All numbers of a value, such
    as lower and upper, get the same derivative. The functions take batches, not points: transforming a traced program
    once more takes as long as tracing it.
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
    bounds: Callable[..., tuple[Any, Any]],
    log_delta: Callable[[Any, Any], Any],
    route: Callable[[Any], Route],
    working_set: int,
    gradient: Callable[..., Any] = jax.grad,
) -> dict[str, Points]:
    """Bounds of "epsilon" and of "delta" of a batch, with the derivatives of the formula log_delta(params, eps).

    The root finder is never differentiated: d epsilon/d p = -(d delta/d p)/(d delta/d eps) by the implicit function
    theorem, set to 0 where epsilon is at most 1e-12 or infinite. bounds: (params, target, verb="epsilon" or "delta") ->
    (lower, upper) of one traced point. route: concrete params -> their route. Numbers under a bare jax.grad are
    concrete: the route's sources bound them, and only the slopes are compiled. working_set: as for `Kernel`. gradient:
    `jax.grad`, or `jax.jacfwd` where log_delta has loops of unknown length.
    """

    def of_epsilon(params: Any, target: Any, upper: Any) -> tuple[Any, Any]:
        live = (upper > _ZERO) & jnp.isfinite(upper)

        def value(params: Any, eps: Any) -> tuple[Any, Any]:
            log = log_delta(params, eps)
            return log, log

        (by_params, by_eps), log = gradient(value, argnums=(0, 1), has_aux=True)(params, jnp.where(live, upper, 1.0))
        by_params = jax.tree_util.tree_map(lambda g: jnp.where(live, -g / by_eps, 0.0), by_params)
        # delta at ``upper``, not the target: next to the largest loss, epsilon has too few digits for both to agree
        return by_params, jnp.where(live, 1 / (jnp.exp(log) * by_eps), 0.0)

    def of_delta(params: Any, eps: Any, upper: Any) -> tuple[Any, Any]:
        return jax.tree_util.tree_map(lambda g: upper * g, gradient(log_delta, argnums=(0, 1))(params, eps))

    def with_slopes(verb: str, slopes: Callable[..., Any]) -> Points:
        batch_slopes = batched(slopes, working_set)

        def of_point(params: Any, target: Any) -> tuple[Any, Any]:
            return bounds(params, target, verb=verb)

        def with_gradient(params: Any, target: Any) -> tuple[Any, Any, Any]:
            if is_traced(params, target):
                found = solve(params, target)
            else:
                params, target = jax.tree_util.tree_map(np.asarray, (params, target))
                (found,) = intersect(verb, [route(params).sources[verb]], params, target, BESIDE_GRADIENT)
            return found, *batch_slopes(params, target, found[1])

        solve = differentiated(batched(of_point, working_set), with_gradient)
        return solve

    return {"epsilon": with_slopes("epsilon", of_epsilon), "delta": with_slopes("delta", of_delta)}


def _finite(value: Any) -> Any:
    return jnp.where(jnp.isfinite(value), value, 0.0)


def _directional(gradient: Any, tangent: Any) -> Any:
    products = jax.tree_util.tree_map(lambda g, t: jnp.sum(g * t), gradient, tangent)
    return sum(jax.tree_util.tree_leaves(products), jnp.zeros(()))
