"""Random allocation: one epoch from its contour; several epochs, or epochs of several blocks, from finite pairs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.allocation import bounds, finite
from jaxdp.domains import SMALLEST
from jaxdp.interval import Bounds
from jaxdp.mechanisms.allocation import DirectedLaw, RandomAllocation
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.shuffle import rounds
from jaxdp.sources.base import VACUOUS, Answer, Asked, Points, Route, Source, intersect, one_or_composed, traced_bounds
from jaxdp.sources.contour import contour_route
from jaxdp.sources.gaussian import gaussian_bounds

_SIGNS = {"forward": 1.0, "reverse": -1.0}  # as in `jaxdp.allocation.law`
_ROUGH = 0.3  # gap of log delta that is small enough on the first grids
_NEGLIGIBLE = 30.0  # nats below the log delta of a composition beyond which those of an epoch need not be known
_PAIR_GAP = 1e-5  # relative gap asked for composed pairs
_UNKNOWN_NATS = 20.0  # -log delta for which the first grids are made if epsilon is given instead of delta
_WIDEST = 6.0  # nats below the upper bound of a log delta beyond which its lower bound says nothing about its size


def _one_epoch(verb: str, direction: str) -> tuple[Source, ...]:
    """The sources of one epoch: the contour with growing effort."""

    def contour(effort: bounds.Effort, params: Any, target: Any, known: Any, asked: Asked) -> Answer:
        point = params.num_steps, params.noise_multiplier(), np.full(target.shape, _SIGNS[direction]), target
        if verb == "epsilon":
            return Answer(*bounds.allocation_epsilon(*point, *known[:2], effort=effort))
        return Answer(*bounds.allocation_delta(*point, effort=effort))

    return tuple(functools.partial(contour, effort) for effort in bounds.EFFORTS)


def epoch_route(flat: Any, direction: str) -> Route:
    """The route of one epoch in which everybody takes part once. flat: the record as rows."""
    return Route(flat, {verb: _one_epoch(verb, direction) for verb in VACUOUS}, _traced(direction))


@functools.cache
def _traced(direction: str) -> dict[str, Points]:
    sign = _SIGNS[direction]

    def answer(p: RandomAllocation, target: Any, verb: str) -> tuple[Any, Any]:
        kernel = bounds.allocation_epsilon if verb == "epsilon" else bounds.allocation_delta
        return tuple(kernel.point(p.num_steps, p.noise_multiplier(), sign, target, effort=bounds.EFFORTS[1]))

    def log_delta(p: RandomAllocation, epsilon: Any) -> Any:
        return bounds.log_delta(p.num_steps, p.noise_multiplier(), sign, epsilon)

    return traced_bounds(answer, log_delta, functools.partial(epoch_route, direction=direction), 2**20, jax.jacfwd)


# ---- composition ----


@dataclasses.dataclass(frozen=True)
class _Epochs:
    """Compositions of finite pairs: upper bounds by pairs that dominate each epoch, lower bounds by dominated pairs.

    Rows that are a single epoch are answered by its contour. fine: use fine grids. Otherwise use the first grids, which
    locate where to refine: a quarter of the work, for rows that need not be close.
    """

    verb: str
    direction: str
    fine: bool

    def __call__(self, params: Any, target: Any, known: Any, asked: Asked) -> Answer:
        if not self.fine and asked.near is None:
            return Answer(known.lower, known.upper)
        record, times = params[0]
        once = np.all((record.times == 1) | (times == 0), axis=1) if len(params) == 1 else False

        def alone(flat: RandomAllocation, target: Any, asked: Asked) -> tuple[Any, Any]:
            (found,) = intersect(self.verb, [_one_epoch(self.verb, self.direction)], flat, target, asked)
            return found

        answer = one_or_composed(self.verb, params, target, asked, once, alone, self._composed)
        return answer._replace(settled=self.fine)

    def _composed(self, params: Any, target: Any, asked: Asked) -> tuple[Any, Any]:
        given = {"delta" if self.verb == "epsilon" else "epsilon": target}
        above, below = enclosing(params, self.direction, self.fine, **given)

        def side(stacks: tuple[Stack, ...]) -> tuple[Any, Any]:
            sources = contour_route(stacks, self.direction).sources[self.verb]
            (found,) = intersect(self.verb, [sources], stacks, target, asked.at_least(_PAIR_GAP))
            return found

        upper = side(above)[1]
        lower = gaussian_bounds(_gaussians(params, summed=True), target, verb=self.verb)[0]
        wanted = not (self.fine and asked.upper_only)  # the lower bound may show that the first grids suffice
        if wanted and not all(isinstance(record, GaussianMechanism) for record, _ in below):
            lower = np.fmax(lower, side(below)[0])
        if all(isinstance(record, (RandomAllocation, GaussianMechanism)) for record, _ in params):
            upper = np.fmin(upper, gaussian_bounds(_gaussians(params, summed=False), target, verb=self.verb)[1])
        return np.fmin(lower, upper), upper


def _gaussians(stacks: tuple[Stack, ...], summed: bool) -> tuple[Stack, ...]:
    """Gaussian mechanisms, and each epoch as one: the sum of its outputs (summed), else a person's steps, known."""
    gaussians: list[Stack] = []
    for record, times in stacks:
        if isinstance(record, RandomAllocation):
            share = record.times / np.sqrt(record.num_steps) if summed else np.sqrt(record.times)
            gaussians.append((Gaussian(np.broadcast_to(record.noise_multiplier() / share, times.shape)), times))
        elif isinstance(record, GaussianMechanism):
            gaussians.append((record, times))
    return tuple(gaussians)


class _Block(NamedTuple):
    """Blocks of ``steps`` steps, of which one is drawn; fields (rows, records). count: number of equal blocks."""

    steps: Any
    noise: Any
    count: Any

    def known(self) -> bool:
        """Whether every block has one step only, so that a person's step is known."""
        return bool(np.all((self.steps == 1) | (self.count == 0)))


def _blocks(record: RandomAllocation, times: Any) -> list[_Block]:
    """The epochs of a record, each split into ``record.times`` blocks of nearly equal size."""
    size = np.floor(record.num_steps / record.times)
    larger = record.num_steps - size * record.times
    noise = np.broadcast_to(record.noise_multiplier(), times.shape)
    parts = ((size, record.times - larger), (size + 1, larger))
    both = [_Block(np.broadcast_to(n, times.shape), noise, times * k) for n, k in parts]
    return [block for block in both if np.any(block.count > 0)] or both[:1]


def enclosing(
    stacks: tuple[Stack, ...], direction: str, fine: bool = True, delta: Any = None, epsilon: Any = None
) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
    """(above, below): concrete stacks with each epoch replaced by finite pairs that dominate it, by dominated pairs.

    fine: whether the pairs are refined where they matter for a composition with this delta, or with this epsilon.
    """
    epochs: list[tuple[Any, Any]] = [stack for stack in stacks if isinstance(stack[0], RandomAllocation)]
    split = [(record, times, _blocks(record, times)) for record, times in epochs]
    drawn = [block for _, _, blocks in split for block in blocks if not block.known()]
    pairs = _pairs(drawn, direction, fine, delta, epsilon)
    above = [stack for stack in stacks if not isinstance(stack[0], RandomAllocation)]
    below = list(above)
    for record, times, blocks in split:
        alone = record.times == 1  # an epoch is a single block; several blocks only dominate their epoch
        for block in blocks:
            upper, lower = (Gaussian(block.noise),) * 2 if block.known() else next(pairs)
            above.append((upper, block.count))
            if np.any(alone):
                below.append((lower, np.where(alone, block.count, 0.0)))
        several = np.where(alone, 0.0, times)
        if np.any(several):
            # The sum of all outputs of an epoch has mean ``times`` and variance num_steps noise^2.
            summed = np.sqrt(record.num_steps) * record.noise_multiplier() / record.times
            below.append((Gaussian(np.broadcast_to(summed, times.shape)), several))
    return tuple(above), tuple(below)


def _pairs(blocks: list[_Block], direction: str, fine: bool, delta: Any, epsilon: Any) -> Iterator[tuple[Any, Any]]:
    """(dominating, dominated) records of each block."""
    if not blocks:
        return
    rows = blocks[0].count.shape[0]
    target = np.full(rows, _UNKNOWN_NATS) if delta is None else -np.log(np.clip(delta, SMALLEST, 1.0))
    runs = np.sum([np.sum(block.count, axis=1) for block in blocks], axis=0)

    def spread(block: _Block, *per_row: Any) -> list[Any]:
        """Numbers of each row, for each of the block's records."""
        return [np.repeat(x, block.count.shape[1]) for x in per_row]

    flat = [(block.steps.ravel(), block.noise.ravel()) for block in blocks]
    grids = [
        rounds.by_rows(finite.first_grid, *settings, *spread(block, target, runs))
        for block, settings in zip(blocks, flat, strict=True)
    ]
    signs = (1.0, -1.0) if direction == "forward" else (-1.0, 1.0)
    least = -np.max(target, initial=0.0) - _NEGLIGIBLE
    profiles = [
        [finite.log_profiles(*settings, sign, x, np.full(x.shape, _ROUGH), np.full(x.shape, least)) for sign in signs]
        for settings, x in zip(flat, grids, strict=True)
    ]
    if not fine:
        yield from (_enclosed(grid, sides, block) for grid, sides, block in zip(grids, profiles, blocks, strict=True))
        return
    # Estimates of log delta, from its bounds. turned: of the swapped pair.
    guessed = [[0.5 * (x.upper + np.fmax(x.lower, x.upper - _WIDEST)) for x in sides] for sides in profiles]
    logs, turned = zip(*guessed, strict=True)
    joined = [np.concatenate([x.reshape(rows, -1, finite.FIRST) for x in xs], axis=1) for xs in (grids, logs, turned)]
    counts = np.concatenate([block.count for block in blocks], axis=1)
    unknown = np.full(rows, np.nan)
    targets = (-target, unknown) if epsilon is None else (unknown, np.clip(epsilon, 0.0, bounds.LARGEST_EPSILON))
    z, total = rounds.by_rows(rounds.tilt, *joined, counts, *targets)
    log_end = total - np.log(np.maximum(runs, 1.0)) + rounds.LOG_SHARE
    for block, settings, first, log, turn in zip(blocks, flat, grids, logs, turned, strict=True):
        tilts, ends = spread(block, z, log_end)
        grid = rounds.by_rows(finite.fine_grid, first, log, tilts, ends)
        needed = rounds.by_rows(finite.needed, grid, first, log, turn, tilts, ends)
        sides = [finite.log_profiles(*settings, sign, grid, *side) for sign, side in zip(signs, needed, strict=True)]
        yield _enclosed(grid, sides, block)


def _enclosed(grid: np.ndarray, sides: list[Bounds], block: _Block) -> tuple[DirectedLaw, DirectedLaw]:
    """(dominating, dominated) pairs of a block. sides: bounds of log delta on the grids of the pair and of its swap."""
    upper = rounds.by_rows(finite.upper_pair, grid, *(side.upper for side in sides))
    lower = rounds.by_rows(finite.lower_pair, grid, *sides)
    dominating, dominated = (
        DirectedLaw(*(x.reshape((*block.count.shape, *x.shape[1:])) for x in law)) for law in (upper, lower)
    )
    return dominating, dominated


@functools.cache
def _concrete_route(direction: str) -> Callable[[Any], Route]:
    """`epochs_route` of a direction. Cached: `contour_route` caches programs by this function."""
    return functools.partial(epochs_route, direction=direction)


def epochs_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The route of a composition in which some mechanisms are epochs of random allocation."""
    traced = contour_route(stacks, direction, _concrete_route(direction))
    sources = {verb: tuple(_Epochs(verb, direction, fine) for fine in (False, True)) for verb in VACUOUS}
    return dataclasses.replace(traced, sources=sources)
