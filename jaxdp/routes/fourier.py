"""Everything without a closed form: the contour of K, climbing a ladder of efforts until the gap closes."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.fourier import bands, contour, derivative
from jaxdp.fourier.contour import Effort
from jaxdp.mechanisms.base import GaussianMechanism
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.sampled import FixedSizeSampled, PoissonSampled
from jaxdp.mechanisms.shuffled import LossLaw
from jaxdp.mechanisms.spectrum import is_sampled_gaussian, on_lattice, spectrum
from jaxdp.precision import canary, cores, kernel, platform, side_by_side
from jaxdp.routes.base import Climb, Point, Route, explicit_delta, implicit_epsilon
from jaxdp.routes.plain import plain_delta, plain_epsilon
from jaxdp.routes.single_law import single_law
from jaxdp.routes.single_step import cap_by_unsampled, lower_next_to_supremum, shortcuts

# Efforts, cheapest first: a point climbs until its gap is small enough. (nodes, quadrature, cover, smooth)
_SAMPLED_LADDER = (
    Effort(128, 128, 64, False),
    Effort(1024, 256, 128, False),
    Effort(16384, 512, 512, False),
    Effort(65536, 1024, 1024, True),
    Effort(262144, 4096, 4096, True),
)
# remove, all else in closed form: what one contour does not get, because a few rare large losses rule, gets one a band
_BANDED_LADDER = (
    *_SAMPLED_LADDER[:3],
    Effort(1024, 1024, 256, False, bands=4),
    Effort(1024, 2048, 256, False, bands=8),
    Effort(8192, 4096, 512, False, bands=14),
    Effort(65536, 4096, 512, False, bands=14),
)
_MOST_BANDED = 8  # distinct sampled mechanisms, at most, for which a band is affordable
_GAUSSIAN_LADDER = (
    Effort(128, 1, 1, False),
    Effort(1024, 1, 1, False),
    Effort(16384, 1, 1, True),
    Effort(262144, 1, 1, True),
)
_PLAIN_LADDER = (Effort(4096, 1, 1, True), Effort(32768, 1, 1, True), Effort(262144, 1, 1, True))
_LATTICE_LADDER = tuple(Effort(nodes, 1, 1, False, True) for nodes in (256, 4096, 65536))
_TRACED_LAST = _SAMPLED_LADDER[3]
_CACHED = 2**19  # float64 numbers that the points of one call may keep alive on a CPU: its cache
_ON_ACCELERATOR = 2**27  # the same elsewhere: 1 GiB
_WIDEST = 5123  # atoms of a finite law, but for the fine ones, which fill the cores by themselves
# A sampled Gaussian's epsilon is sought again at the same effort while its upper bound falls below so much of what the
# plan had to take for it: past a phase transition the Chernoff bound is no place to plan for.
_REPEATS, _LOWER = 3, 0.99
_FEW = 16  # points of a costly effort, at most, that go one by one: a batch of them would be compiled for nothing
_MARGIN = 0.9  # of the gap asked for, at which a point stops climbing
_COARSE = 0.3  # of the gap, for either side of what lies between a pair that dominates and one that is dominated
_BESIDE = 0.25  # of what lies between the two as measured, both sides' errors included
_FINEST_DELTA = 1e-290
_USUAL_LAW = 2e-5  # a gap that a bracket that is not fine meets also for few runs
_AROUND = 4.0  # deviations about the place where a run's loss is when the sum is large
_ROUGH = 100.0  # times the gap suffices where there is only the first: it has an error of its own


@kernel(
    static=("direction", "effort"),
    working_set=40000,
    large=True,
    costly=Effort.costly,
    bounds=True,
    by_numpy=Effort.by_numpy,
)
def _sampled_epsilon(
    stacks: tuple[Stack, ...], delta: Any, known: Any, *, direction: str, effort: Effort
) -> tuple[Any, Any]:
    if effort.bands:
        return bands.epsilon_bounds(spectrum(stacks, direction), delta, effort)
    return contour.epsilon_bounds(spectrum(stacks, direction), delta, known, effort)


@kernel(
    static=("direction", "effort"),
    working_set=40000,
    large=True,
    costly=Effort.costly,
    bounds=True,
    by_numpy=Effort.by_numpy,
)
def _sampled_delta(
    stacks: tuple[Stack, ...], eps: Any, known: Any, *, direction: str, effort: Effort
) -> tuple[Any, Any]:
    solve = bands.delta_bounds if effort.bands else contour.delta_bounds
    return solve(spectrum(stacks, direction), eps, effort)


def _ladder(stacks: tuple[Stack, ...], direction: str) -> tuple[Effort, ...]:
    if on_lattice(stacks):
        return _LATTICE_LADDER
    sampled = sum(times.shape[1] for record, times in stacks if is_sampled_gaussian(record, direction))
    if sampled:
        finite = any(hasattr(record, "atoms") and not is_sampled_gaussian(record, direction) for record, _ in stacks)
        banded = direction == "forward" and sampled <= _MOST_BANDED and not finite
        return _BANDED_LADDER if banded else _SAMPLED_LADDER
    if any(isinstance(record, GaussianMechanism) for record, _ in stacks):
        return _GAUSSIAN_LADDER
    return _PLAIN_LADDER


def climb(
    solve: Callable[..., tuple[Any, Any]],
    ladder: tuple[Effort, ...],
    params: Any,
    target: Any,
    gap: float,
    floor: Any = -np.inf,
    simple: Callable[..., Any] | None = None,
    paired: bool = False,
    started: tuple[Any, Any] | None = None,
    repeats: int = 1,
) -> tuple[Any, Any]:
    """Bounds of every point, each at the cheapest effort that closes its gap; the best of all tries counts.

    floor: a point whose upper bound is not above it needs no better one. started: what the cheapest effort gave, if it
    was called before (with an infinite floor). simple: a lower bound that costs little, asked for where the cheapest
    effort left a gap. paired: the second half of the rows are pairs that those of the first half dominate; a gap
    that is small beside what lies between the two is closed. repeats: times that an effort is made, at most, each with
    a plan for the upper bound that the last one gave, as long as that falls.
    """
    finite = any(hasattr(record, "atoms") and not is_sampled_gaussian(record) for record, _ in params)
    lower, upper = started or (np.zeros(target.shape), np.full(target.shape, np.inf))
    rows = np.arange(target.size)

    def unfinished() -> np.ndarray:
        return _unfinished(lower, upper, _allowed(lower, upper, gap) if paired else gap, floor)

    for effort in ladder:
        planned = np.full(target.shape, np.inf)
        for again in range(repeats):
            if again or not (started and effort is ladder[0]):
                planned = upper.copy()
                _tighten(solve, effort, params, target, rows, lower, upper, _rows_at_once(effort, finite))
            left = unfinished()
            rows = left[upper[left] < _LOWER * planned[left]]
            if rows.size == 0:
                break
        rows = left
        if rows.size and simple is not None and effort is ladder[0]:
            more = simple(stacks=jax.tree_util.tree_map(operator.itemgetter(rows), params), target=target[rows])
            if more is not None:
                lower[rows] = np.fmin(np.fmax(lower[rows], more), upper[rows])
                rows = unfinished()
        if rows.size == 0:
            break
    return lower, upper


def _tighten(
    solve: Callable[..., tuple[Any, Any]],
    effort: Effort,
    params: Any,
    target: np.ndarray,
    rows: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    at_once: tuple[int, int],
) -> None:
    """Bounds of the given rows by one effort, in place: the better of each side. What is known helps to plan."""
    step, threads = at_once
    if Effort.costly(effort) and rows.size <= _FEW:
        step = 1

    def answer(some: np.ndarray) -> tuple[Any, Any]:
        return solve(jax.tree_util.tree_map(lambda x: x[some], params), target[some], upper[some], effort=effort)

    pieces = [rows[start : start + step] for start in range(0, rows.size, step)]
    for some, (more_lower, more_upper) in zip(pieces, side_by_side(answer, pieces, threads), strict=True):
        lower[some], upper[some] = np.fmax(lower[some], more_lower), np.fmin(upper[some], more_upper)


def _allowed(lower: np.ndarray, upper: np.ndarray, gap: float) -> np.ndarray:
    """The gap at which either of two pairs is done: any, once the two together have what is asked for."""
    half = upper.size // 2
    with np.errstate(invalid="ignore", divide="ignore"):
        between = np.where(np.isfinite(upper[:half]), 1 - lower[half:] / upper[:half], np.nan)
    return np.tile(np.where(between <= gap / _COARSE, np.inf, np.fmax(gap, _BESIDE * between)), 2)


def _unfinished(lower: np.ndarray, upper: np.ndarray, gap: Any, floor: Any) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        width = np.where(upper == lower, 0.0, (upper - lower) / upper)
    return np.flatnonzero(~(width <= gap) & (upper > floor))


def _rows_at_once(effort: Effort, finite: bool) -> tuple[int, int]:
    """(points per call, of the sizes that kernels are compiled for; calls at once, on a CPU)."""
    width = max(effort.quadrature, _WIDEST if finite else 1)
    size = effort.nodes + 2 * (math.isqrt(effort.nodes) + math.isqrt(effort.cover)) * width
    size = 16 * size if effort.bands else size  # two labels, a dozen abscissae at a time
    on_cpu = platform() == "cpu"
    room = _CACHED if on_cpu else _ON_ACCELERATOR
    at_once = cores() if on_cpu and size <= _CACHED else 1  # a larger point fills all cores by itself
    return next((rows for rows in ((512, 64) if on_cpu else (512, 64, 8)) if rows * size <= room), 1), at_once


def fourier_route(stacks: tuple[Stack, ...], direction: str) -> Route:
    """The contour route for one dominating pair."""
    exact = all(record.is_exact(direction) for record, _ in stacks) and np.all(_attained(stacks, direction))
    ladder = _ladder(stacks, direction)
    quadrature = ladder in (_SAMPLED_LADDER, _BANDED_LADDER)
    traced = (ladder[1], _TRACED_LAST if quadrature else ladder[-2])
    return Route(
        stacks,
        _Contours("epsilon", _sampled_epsilon if quadrature else plain_epsilon, ladder, direction),
        _Contours("delta", _sampled_delta if quadrature else plain_delta, ladder, direction),
        *_traced_points(direction, traced, exact),
    )


@dataclasses.dataclass(frozen=True)
class _Contours(Climb):
    """Batched bounds of epsilon or delta (verb) for one dominating pair: contours, and what needs none."""

    verb: str
    solve: Callable[..., tuple[Any, Any]]
    ladder: tuple[Effort, ...]
    direction: str

    def start(self, params: Any, target: Any, gap: float) -> tuple[Any, Any] | None:
        if not self._exact(params):
            return None
        return self._run(params, target, gap, np.full(target.shape, np.inf))

    def finish(self, params: Any, target: Any, gap: float, floor: Any, started: Any) -> tuple[Any, Any]:
        lower, upper = self._run(params, target, gap, floor) if started is None else started
        rows = _unfinished(lower, upper, gap * _MARGIN, floor) if started is not None else np.zeros(0, int)
        if rows.size:
            some, begun = jax.tree_util.tree_map(operator.itemgetter(rows), (params, started))
            lower[rows], upper[rows] = self._run(some, target[rows], gap, floor[rows], begun)
        return np.where(_attained(params, self.direction), lower, 0.0), upper

    def _exact(self, params: Any) -> bool:
        return all(record.is_exact(self.direction) for record, _ in params)

    def _run(self, params: Any, target: Any, gap: float, floor: Any, started: Any = None) -> tuple[Any, Any]:
        exact = self._exact(params)
        lower, upper = shortcuts(self.verb, params, target, self.direction)
        _without_rounds(self.verb, params, target, lower, upper)
        rows = np.flatnonzero(np.isnan(upper))
        lower[rows], upper[rows] = 0.0, np.inf
        at_once = self.verb == "epsilon" and gap < _USUAL_LAW and _few_runs(params, target)
        for fine in (True,) if at_once else (False, True):
            if not rows.size:
                break
            some, begun = jax.tree_util.tree_map(operator.itemgetter(rows), (params, started))
            if exact:
                more = self._pair(some, target[rows], floor[rows], gap * _MARGIN, started=begun)
            else:
                depth = -np.log(np.clip(target[rows] if self.verb == "epsilon" else upper[rows], 1e-300, 1.0))
                both = _bracketed(some, self.direction, depth if fine else None)
                more = self._between(some, both, target[rows], floor[rows], gap)
            lower[rows], upper[rows] = np.fmax(lower[rows], more[0]), np.fmin(upper[rows], more[1])
            wide = _unfinished(lower[rows], upper[rows], gap, floor[rows])
            if exact or both is None or not any(record.refinable(self.direction) for record, _ in params):
                break
            rows = rows[wide[~_all_infinite(both, rows.size)[wide]]]
        cap_by_unsampled(self.verb, params, target, self.direction, lower, upper)
        return lower, upper

    def _between(self, params: Any, both: Any, target: Any, floor: Any, gap: float) -> tuple[Any, Any]:
        """The upper bound of a pair that dominates, the lower one of a dominated pair."""
        if both is None:
            lower, upper = self._pair(params, target, floor, gap * _ROUGH)
            return np.zeros_like(lower), upper
        lower, upper = self._pair(both, np.tile(target, 2), np.tile(floor, 2), gap * _COARSE, paired=True)
        return lower[target.size :], upper[: target.size]

    def _pair(
        self, params: Any, target: Any, floor: Any, gap: float, paired: bool = False, started: Any = None
    ) -> tuple[Any, Any]:
        """Certified bounds of the pairs given: of the rows that are one run of one law its sum, else the contour."""
        lower, upper = single_law(self.verb, params, target, self.direction)
        rows = np.flatnonzero(np.isnan(upper))
        if rows.size:
            solve = functools.partial(self.solve, direction=self.direction)
            simple = functools.partial(lower_next_to_supremum, self.verb, direction=self.direction)
            some, begun = jax.tree_util.tree_map(operator.itemgetter(rows), (params, started))
            often = _REPEATS if self.verb == "epsilon" and self.solve is _sampled_epsilon else 1
            more = climb(solve, self.ladder, some, target[rows], gap, floor[rows], simple, paired, begun, often)
            lower[rows], upper[rows] = more
        return lower, upper


def _attained(stacks: tuple[Stack, ...], direction: str) -> Any:
    """Rows whose pair is that of some data set: of fixed-size batches under replace_one only one round is.

    Composed, their symmetric pair only dominates (notebooks/proofs/sampled_replace.md, section 7).
    """
    if direction != "replace" or not any(isinstance(record, FixedSizeSampled) for record, _ in stacks):
        return True
    times = stacks[0][1]
    return (len(stacks) == 1) & (times.shape[1] == 1) & (times[:, 0] <= 1)


def _all_infinite(both: tuple[Stack, ...], size: int) -> np.ndarray:
    """Rows in which the pair that dominates is nothing but mass at infinity: no other grid helps."""
    masses = [np.reshape(r.infinity, (2 * size, -1))[:size] for r, _ in both if isinstance(r, LossLaw)]
    return np.any([np.any(mass >= 1, axis=1) for mass in masses], axis=0) | np.zeros(size, bool)


def _few_runs(stacks: tuple[Stack, ...], delta: np.ndarray) -> bool:
    """Whether a bracket that is not fine need not be tried (a fine one has mass at infinity: not for tiny deltas)."""
    runs = sum(np.sum(times, axis=1) for _, times in stacks)
    few = np.any([record.hopeless(runs) for record, _ in stacks], axis=0)
    return bool(np.all(few & (delta > _FINEST_DELTA)))


def _without_rounds(
    verb: str, stacks: tuple[Stack, ...], eps: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> None:
    """delta of the rows in which nothing is run or nobody sampled, in place."""
    if verb == "epsilon":
        return
    rows = np.isfinite(eps)
    for record, times in stacks:
        rate = record.sampling_probability if isinstance(record, PoissonSampled | FixedSizeSampled) else 1.0
        rows = rows & np.all((times == 0) | (rate == 0), axis=1)
    exact = -np.expm1(np.minimum(eps[rows], 0.0))
    lower[rows], upper[rows] = exact * (1 - 1e-15), np.minimum(exact * (1 + 1e-15), 1.0)


def _bracketed(stacks: tuple[Stack, ...], direction: str, depth: np.ndarray | None) -> tuple[Stack, ...] | None:
    """The rows twice: of pairs that dominate, then of pairs that are dominated; None where the latter are unknown.

    depth: -log delta of every row, for fine pairs. A sum of T losses that lies sqrt(2 depth) deviations out is one of
    T losses sqrt(2 depth/T) deviations out, more or less.
    """
    made = []
    for record, times in stacks:
        reach = None if depth is None else np.sqrt(2.0 * depth[:, None] / np.maximum(times, 1.0)) + _AROUND
        both = (record, record) if record.is_exact(direction) else record.bracket(depth is not None, reach)
        if both is None:
            return None
        twice = jax.tree_util.tree_map(lambda one, other: np.concatenate([one, other]), *both)
        made.append((twice, np.concatenate([times, times])))
    return tuple(made)


@functools.cache
def _traced_points(direction: str, efforts: tuple[Effort, Effort], exact: bool) -> tuple[Point, Point]:
    """The differentiable one-point solvers; cached, so that equal configurations compile once."""

    def log_delta(params: Any, eps: Any) -> Any:
        return derivative.log_delta(lambda p: spectrum(p, direction), params, eps, efforts[0])

    def point(solve: Callable[..., tuple[Any, Any]]) -> Point:
        def run(params: Any, target: Any) -> tuple[Any, Any]:
            made = spectrum(params, direction)
            lower, upper = solve(made, target, jnp.asarray(jnp.inf), efforts[0])
            more_lower, more_upper = jax.lax.cond(
                upper - lower <= 1e-6 * upper,
                lambda: (lower, upper),
                lambda: solve(made, target, upper, efforts[1]),
            )
            lower = jnp.maximum(lower, more_lower) if exact else jnp.zeros_like(lower)
            return lower, jnp.minimum(upper, more_upper)

        return run

    def delta_bounds(made: Any, eps: Any, known: Any, effort: Effort) -> tuple[Any, Any]:
        return contour.delta_bounds(made, eps, effort)

    return implicit_epsilon(point(contour.epsilon_bounds), log_delta), explicit_delta(point(delta_bounds), log_delta)


@canary("contour of the sampled Gaussian")
def _canary() -> tuple[Any, Any, float]:
    """One DP-SGD epsilon, exact to 20 digits, by the cheapest effort as it is compiled for a single point."""
    stacks = ((PoissonSampled(Gaussian(np.array([[2.0]])), np.array([[0.1]])), np.array([[5000.0]])),)
    points = stacks, np.array([1e-8]), np.array([np.inf])
    _, upper = _sampled_epsilon.run_unchecked(*points, direction="forward", effort=_SAMPLED_LADDER[0])
    return upper, np.array([27.81331522523486904152]), 1e-8
