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

# (gap asked for, most nodes of a sum) of the log deltas from which a round's finite pair is made: to place the grid,
# and for the pair (whose own error is larger).
_FIRST, _COMPOSED = (0.5, 128), (1e-3, 512)
_WIDEST = 0.1  # largest gap of log delta that is asked for, at points of small weight


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
    logs = [_log_profile(flat, x, _FIRST, rounds.EVERY, -800.0) for (flat, _), x in zip(shuffled, first, strict=True)]
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
    laws = batch_of_laws(upper_laws, flat)
    return _chosen(laws, np.max(np.where(laws.first > 0, laws.loss, -np.inf), axis=-1))


def _chosen(laws: Law, score: np.ndarray) -> Law:
    """The law with the largest score in each row."""
    best = np.argmax(score, axis=-1)
    return jax.tree_util.tree_map(lambda a: a[np.arange(best.size), best], laws)


def _log_profile(
    flat: Shuffled,
    grid: np.ndarray,
    close: tuple[float, int],
    every: int = 1,
    deepest: float = -np.inf,
    weights: Any = 0.0,
) -> np.ndarray:
    """Upper bounds of log delta on grids of epsilon, (rounds, points).

    close: gap asked for and most nodes of a long sum. weights: log weights of the points, the largest 0; the gap grows
    like sqrt(1/weight). every: only one of so many points gets a long sum, because delta is convex and the pairs take
    chords between points. deepest: points to the right of a point with log delta below this get no long sum.
    """
    (gap, most), size = close, grid.shape[1]
    users = np.asarray(flat.num_users)
    if flat.chosen_bound() == "closed_form":
        eps0 = np.asarray(flat.max_loss())[:, None]
        with np.errstate(divide="ignore"):
            logs = np.log(closed_form.clones_closed_form_delta(eps0, users[:, None], grid))
        return rounds.by_rows(rounds.of_both_orders, grid, logs)
    laws, n, epsilon = batch_of_laws(upper_laws, flat), np.repeat(users, size), grid.ravel()
    laws = jax.tree_util.tree_map(lambda a: np.repeat(a, size, axis=0), laws)
    lower, upper = worst("log_delta", laws, n, epsilon, gap, 0)
    with np.errstate(invalid="ignore"):
        wide = (upper > -np.inf) & ~(upper - lower <= gap)
    # To the right of a point with so small a delta there is no mass that counts.
    deep = np.minimum.accumulate(upper.reshape(grid.shape), axis=1).ravel() < deepest
    place = np.arange(n.size)
    long = np.flatnonzero(wide & ~deep & ((place % every == 0) | (place % size == size - 1)))
    if long.size:
        gaps = np.minimum(gap * np.exp(-0.5 * np.clip(weights, -80.0, 0.0)) + np.zeros(grid.shape), _WIDEST).ravel()
        some, n, epsilon, gaps = jax.tree_util.tree_map(lambda a: a[long], (laws, n, epsilon, gaps))
        upper[long] = np.fmin(upper[long], worst("log_delta", some, n, epsilon, gaps, most).upper)
    return upper.reshape(grid.shape)


def upper_law(flat: Shuffled, grid: np.ndarray, weights: np.ndarray, _: np.ndarray) -> Any:
    """(losses, log masses, mass at infinity) of a finite law for each row that dominates its round."""
    logs = _log_profile(flat, grid, _COMPOSED, weights=weights)
    largest = np.broadcast_to(np.asarray(flat.max_loss()), grid.shape[:1])
    losses, masses, infinity = rounds.by_rows(rounds.bounded_pair, grid, logs, largest)
    return losses, masses, np.where(leaks(flat, np), 1.0, infinity)


def leaks(record: Shuffled, array: Any) -> Any:
    """Whether there is a local delta. A law cannot hold its additive term, so that all mass is put at infinity."""
    return array.asarray(record.local_delta()) > 0


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
