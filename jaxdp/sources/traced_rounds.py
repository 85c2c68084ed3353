"""Finite laws that replace the shuffled rounds of a traced composition, and the derivatives of the composition."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxdp.interval import Bounds
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.shuffled import LossLaw, Shuffled
from jaxdp.runtime.precision import Kernel
from jaxdp.shuffle import bounds, closed_form, rounds
from jaxdp.shuffle.law import Law, stacked
from jaxdp.sources.base import batched, differentiated
from jaxdp.sources.round_laws import has_rounds
from jaxdp.sources.shuffling import exact_source, lower_laws, upper_laws

_TRACED_POINTS, _TRACED_AT_ONCE = 256, 16  # points of a grid under a trace; points computed at once, to save memory


def _upper_point(record: Shuffled, epsilon: Any) -> Any:
    """Upper bound of log delta of one round at one traced epsilon; differentiable in the randomizer."""
    if record.chosen_bound() == "closed_form":
        return jnp.log(closed_form.clones_closed_form_delta.point(record.max_loss(), record.num_users, epsilon))
    laws = upper_laws.point(record, composed=True)
    return jnp.max(jax.lax.map(lambda made: bounds.log_delta_by_nodes(made, record.num_users, epsilon), laws))


def traced_law_of(
    record: Shuffled, times: Any, log_delta: Any, epsilon: Any, z: Any = None, slopes: bool = False
) -> tuple[LossLaw, Any, tuple[Any, Any]]:
    """(law, moved, (grid, z)): a finite law that dominates one traced round, its derivatives, its grid and its tilt.

    log_delta, epsilon, z: see `grids_of`.

    moved: the derivatives of the law's log weights and mass at infinity by each number of the randomizer, from the
    derivatives of an accurate delta on the grid; None unless ``slopes``.
    """
    numbers, randomizer = ravel_pytree(record.randomizer)

    def at(e: Any) -> tuple[Any, Any]:
        def point(numbers: Any) -> tuple[Any, Any]:
            upper = _upper_point(dataclasses.replace(record, randomizer=randomizer(numbers)), e)
            return upper, upper  # the value to differentiate, and the value itself (has_aux)

        if not slopes:
            return None, point(numbers)[1]
        by_numbers, upper = jax.jacfwd(point, has_aux=True)(numbers)
        return jnp.where(jnp.isfinite(by_numbers), by_numbers, 0.0), upper

    def improved(i: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        grid = state[0]
        by_numbers, logs = jax.lax.map(at, grid, batch_size=_TRACED_AT_ONCE)
        if z is None:
            tilt, total = rounds.tilt(grid[None], logs[None], logs[None], times[None], log_delta, epsilon)
            log_end = total - jnp.log(jnp.maximum(times, 1.0)) + rounds.LOG_SHARE
        else:
            tilt, log_end = z, jnp.asarray(-jnp.inf)
        finer = rounds.refined(grid, logs, tilt, log_end, points=_TRACED_POINTS)
        return jnp.where(i == 0, finer, grid), tilt, logs, by_numbers

    laws = upper_laws.point(record, composed=True)
    best = jnp.argmax(jnp.max(jnp.where(laws.first > 0, laws.loss, -jnp.inf), axis=-1))
    widest = jax.tree_util.tree_map(lambda a: a[best], laws)
    first = rounds.first_grid(widest, record.num_users, 0.0 if z is None else z, points=_TRACED_POINTS)
    start = first, jnp.zeros(()), jnp.zeros(_TRACED_POINTS)
    slope = jnp.zeros((_TRACED_POINTS, numbers.size)) if slopes else None
    grid, tilt, logs, by_numbers = jax.lax.fori_loop(0, 2, improved, (*start, slope))
    losses, weights, infinity = pair = rounds.upper_pair(grid, logs)
    moved = jax.vmap(lambda d: rounds.upper_pair_slopes(grid, logs, pair, d), in_axes=1)(by_numbers) if slopes else None
    return LossLaw(losses, weights, jnp.maximum(infinity, record.infinity_mass())), moved, (grid, tilt)


def _traced_lower_law(record: Shuffled, grid: Any, z: Any) -> LossLaw:
    """`lower_law_of` for one traced round."""
    laws = lower_laws.point(record)
    best = jnp.argmax(laws.chi_square())
    law = jax.tree_util.tree_map(lambda a: a[best], laws)
    exact = exact_source(record)

    def profile(law: Law) -> Bounds:
        def point(e: Any) -> Bounds:
            return bounds.point("log_delta", law, record.num_users, e, exact)

        return jax.lax.map(point, grid, batch_size=_TRACED_AT_ONCE)

    found = jax.lax.map(profile, stacked(law, law.swapped()))
    return LossLaw(*rounds.lower_pair(grid, z, *(Bounds(*(side[i] for side in found)) for i in range(2))))


def _traced_laws(
    stacks: tuple[Stack, ...], log_delta: Any, epsilon: Any, z: Any = None, slopes: bool = False
) -> tuple[tuple[Stack, ...], list[Any], list[Any]]:
    """(stacks with rounds replaced by dominating laws, moved, (grid, z) for each stack or None) of one traced point."""

    def law(stack: Stack) -> tuple[LossLaw, Any, tuple[Any, Any]]:
        record, times = _as_floats(stack)
        return traced_law_of(record, times, log_delta, epsilon, z, slopes)

    found = [jax.lax.map(law, stack) if isinstance(stack[0], Shuffled) else (stack[0], None, None) for stack in stacks]
    laws, moved, grids = map(list, zip(*found, strict=True))
    return tuple((one, times) for one, (_, times) in zip(laws, stacks, strict=True)), moved, grids


def _traced_lower_laws(stacks: tuple[Stack, ...], grids: list[Any]) -> tuple[Stack, ...]:
    """The stacks of one traced point with each shuffled round replaced by a law that the round dominates."""

    def law(each: tuple[Any, tuple[Any, Any]]) -> LossLaw:
        return _traced_lower_law(_as_floats(each[0]), *each[1])

    return tuple(
        (record if place is None else jax.lax.map(law, (record, place)), times)
        for (record, times), place in zip(stacks, grids, strict=True)
    )


def _as_floats(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float64), tree)


def _by_randomizer(record: Any, by_law: LossLaw, moved: tuple[Any, Any]) -> Any:
    """Chain rule: d number/d randomizer, from by_law = d number/d law and moved = d law/d randomizer."""
    weights, infinity = moved
    by_numbers = weights @ by_law.log_weights + infinity * by_law.infinity
    randomizer = ravel_pytree(record.randomizer)[1](by_numbers)
    return dataclasses.replace(record, randomizer=randomizer, num_users=jnp.zeros_like(record.num_users))


def of_traced_laws(
    value: Callable[[tuple[Stack, ...], Any], Any],
    place: Callable[[Any], tuple[Any, Any]],
    below: Callable[[tuple[Stack, ...], Any], Any],
) -> Callable[..., Any]:
    """(stacks, target) -> (below, value) of a traced batch: finite laws replace the shuffled rounds.

    value: a function of one point; its laws dominate the rounds. place: target -> (log_delta, epsilon) of `grids_of`.
    below: a function of laws that the rounds dominate. The derivative of both is that of value. A derivative by a
    randomizer is the derivative by its law's masses times their derivatives by the randomizer, so that no loop is
    differentiated.
    """

    def plain(stacks: tuple[Stack, ...], target: Any) -> Any:
        laws, _, grids = _traced_laws(stacks, *place(target))
        return below(_traced_lower_laws(stacks, grids), target), value(laws, target)

    def with_gradient(stacks: tuple[Stack, ...], target: Any) -> tuple[Any, Any, Any]:
        laws, moved, grids = _traced_laws(stacks, *place(target), slopes=True)
        found, (by_laws, by_target) = jax.value_and_grad(value, argnums=(0, 1))(laws, target)
        by_stacks = tuple(
            (by_law if move is None else jax.vmap(_by_randomizer)(record, by_law, move), by_times)
            for (record, _), (by_law, by_times), move in zip(stacks, by_laws, moved, strict=True)
        )
        return (below(_traced_lower_laws(stacks, grids), target), found), by_stacks, by_target

    return differentiated(batched(plain, 2**20), batched(with_gradient, 2**20))


@functools.cache
def traced_moment(moment: Kernel, direction: str) -> Callable[[tuple[Stack, ...], Any], Any]:
    """(stacks, order) -> values of a moment's kernel at traced points. Cached, so that equal moments compile once.

    A Renyi divergence, of a real order, is differentiable. For the moment at a complex number dominating finite pairs
    replace shuffled rounds.
    """

    def point(stacks: tuple[Stack, ...], order: Any) -> Any:
        return moment.point(stacks, order, direction=direction)

    def with_gradient(stacks: tuple[Stack, ...], order: Any) -> tuple[Any, Any, Any]:
        found, gradient = jax.value_and_grad(point, argnums=(0, 1))(*_as_floats((stacks, order)))
        return found, *gradient

    def of_laws(stacks: tuple[Stack, ...], z: Any) -> Any:
        return point(_traced_laws(stacks, jnp.nan, jnp.nan, jnp.abs(z))[0], z)

    divergence, transform = (
        differentiated(batched(point, 2**20), batched(with_gradient, 2**20)),
        batched(of_laws, 2**20),
    )

    def answer(stacks: tuple[Stack, ...], order: Any) -> Any:
        if not jnp.iscomplexobj(order):
            return divergence(stacks, order)
        return transform(stacks, order) if has_rounds(stacks) else jax.vmap(point)(stacks, order)

    return answer
