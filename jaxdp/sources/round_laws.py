"""Finite laws that replace shuffled rounds in compositions, made on grids of epsilon; concrete numbers only."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.interval import Bounds
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.shuffled import LossLaw, Shuffled
from jaxdp.shuffle import bounds, closed_form, rounds
from jaxdp.shuffle.law import Law
from jaxdp.sources.shuffling import LOWER_GAP, LOWER_NODES, batch_of_laws, lower_laws, upper_laws, worst

# Gap asked for and most nodes of a sum, for the log deltas that place the grid of a round's finite pair.
_FIRST_GAP, _FIRST_NODES = 0.1, 128
# The same for the log deltas of the pair, whose own error is larger: the gap at points of full weight, and the largest.
_LEAST_GAP, _LARGEST_GAP, _NODES = 1e-3, 0.1, 512


def _flat(record: Shuffled) -> Any:
    """The record with its two batch axes (rows, members) joined: one row for each round."""
    return jax.tree_util.tree_map(lambda x: x.reshape((-1, *x.shape[2:])), record)


def replaced(stacks: tuple[Stack, ...], grids: list[Any], make: Callable[..., Any]) -> tuple[Stack, ...]:
    """The stacks with shuffled rounds replaced by the finite laws make(rounds, *grid)."""

    def law(record: Any, times: Any, grid: Any) -> Any:
        if not isinstance(record, Shuffled):
            return record
        return LossLaw(*(x.reshape((*times.shape, *x.shape[1:])) for x in make(_flat(record), *grid)))

    return tuple((law(*stack, grid), stack[1]) for stack, grid in zip(stacks, grids, strict=True))


def dominating(stacks: tuple[Stack, ...], z: Any) -> tuple[Stack, ...]:
    """The stacks with shuffled rounds replaced by dominating finite pairs, close for the moment of each row's z."""
    return replaced(stacks, grids_of(stacks, None, None, np.abs(z)), upper_law)


def has_rounds(stacks: tuple[Stack, ...]) -> bool:
    """Whether any mechanism is a shuffled round."""
    return any(isinstance(record, Shuffled) for record, _ in stacks)


def grids_of(
    stacks: tuple[Stack, ...], log_delta: Any, epsilon: Any, z: Any = None
) -> list[tuple[np.ndarray, ...] | None]:
    """(grids of epsilon, log weights of points, tilts), one row a round, for each stack of shuffled rounds; else None.

    The grids are fine where a composition with this log delta or epsilon (the other is NaN) depends on them, or where
    the moment at a tilt z does.
    """
    shuffled = [(_flat(record), times) for record, times in stacks if isinstance(record, Shuffled)]
    if not shuffled:
        return [None] * len(stacks)
    first = []
    for flat, t in shuffled:
        tilts = np.zeros(flat.num_users.shape) if z is None else np.repeat(z, t.shape[1])
        first.append(rounds.by_rows(rounds.first_grid, _widest_law(flat), flat.num_users, tilts))
    # Delta is convex and the pairs take chords between points, so that a few long sums are enough.
    gaps = np.full(rounds.POINTS, np.inf)
    gaps[:: rounds.EVERY] = gaps[-1] = _FIRST_GAP
    logs = [_log_profile(flat, x, gaps, _FIRST_NODES) for (flat, _), x in zip(shuffled, first, strict=True)]
    if z is None:
        rows = log_delta.shape[0]
        wide = [np.concatenate([x.reshape(rows, -1, rounds.POINTS) for x in xs], axis=1) for xs in (first, logs)]
        times = np.concatenate([t for _, t in shuffled], axis=1)
        z, total = rounds.by_rows(rounds.tilt, *wide, wide[1], times, log_delta, epsilon)
        log_end = total - np.log(np.maximum(np.sum(times, axis=1), 1.0)) + rounds.LOG_SHARE
    else:
        log_end = np.full(z.shape, -np.inf)
    grids: list[tuple[np.ndarray, ...]] = []
    for (_, t), grid, log in zip(shuffled, first, logs, strict=True):
        each, end = (np.repeat(x, t.shape[1]) for x in (z, log_end))
        finer = rounds.by_rows(rounds.refined, grid, log, each, end)
        grids.append((finer, rounds.by_rows(rounds.log_weights, finer, grid, log, each), each))
    remaining = iter(grids)
    return [next(remaining) if isinstance(record, Shuffled) else None for record, _ in stacks]


def _widest_law(flat: Shuffled) -> Law:
    """For each row, of the laws of all pairs of inputs, the law with the largest loss: beyond it all deltas are 0."""
    laws = batch_of_laws(upper_laws, flat, composed=True)
    return _chosen(laws, np.max(np.where(laws.first > 0, laws.loss, -np.inf), axis=-1))


def _chosen(laws: Law, score: np.ndarray) -> Law:
    """The law with the largest score in each row."""
    best = np.argmax(score, axis=-1)
    return jax.tree_util.tree_map(lambda a: a[np.arange(best.size), best], laws)


def _log_profile(flat: Shuffled, grid: np.ndarray, gaps: Any, most: int) -> np.ndarray:
    """Upper bounds of log delta on grids of epsilon, (rounds, points).

    gaps: gap asked for at each point, inf for no long sum. most: most nodes of a long sum.
    """
    users, size = np.asarray(flat.num_users), grid.shape[1]
    if flat.chosen_bound() == "closed_form":
        eps0 = np.asarray(flat.max_loss())[:, None]
        with np.errstate(divide="ignore"):
            logs = np.log(closed_form.clones_closed_form_delta(eps0, users[:, None], grid))
        return rounds.by_rows(rounds.of_both_orders, grid, logs)
    laws = jax.tree_util.tree_map(lambda a: np.repeat(a, size, axis=0), batch_of_laws(upper_laws, flat, composed=True))
    gaps = np.broadcast_to(gaps, grid.shape).ravel()
    return worst("log_delta", laws, np.repeat(users, size), grid.ravel(), gaps, most).upper.reshape(grid.shape)


def upper_law(flat: Shuffled, grid: np.ndarray, weights: np.ndarray, _: np.ndarray) -> Any:
    """(losses, log masses, mass at infinity) of a finite law for each row that dominates its round."""
    gaps = np.minimum(_LEAST_GAP * np.exp(-0.5 * np.clip(weights, -80.0, 0.0)), _LARGEST_GAP)
    logs = _log_profile(flat, grid, gaps, _NODES)
    largest = np.broadcast_to(np.asarray(flat.max_loss()), grid.shape[:1])
    losses, masses, infinity = rounds.by_rows(rounds.bounded_pair, grid, logs, largest)
    return losses, masses, np.maximum(infinity, flat.infinity_mass())


def lower_law_of(flat: Shuffled, grid: np.ndarray, _: np.ndarray, z: np.ndarray) -> Any:
    """(losses, log masses, mass at infinity) of a finite law for each row that its round dominates."""
    laws, size = batch_of_laws(lower_laws, flat), grid.shape[1]
    best = _chosen(laws, laws.chi_square())
    best = jax.tree_util.tree_map(lambda a: np.repeat(a, size, axis=0), best)
    forward, back = (np.sort(np.rec.fromarrays(x), axis=-1) for x in (best[:3], best.swapped()[:3]))
    sides = []
    for order in [best] if (forward == back).all() else [best, best.swapped()]:
        found = bounds.bounds("log_delta", order, np.repeat(flat.num_users, size), grid.ravel(), LOWER_GAP, LOWER_NODES)
        sides.append(Bounds(*(side.reshape(grid.shape) for side in found)))
    return rounds.by_rows(rounds.lower_pair, grid, z, sides[0], sides[-1])
