"""The route of mechanisms without a closed form: simple sources first, then the contour of K with growing effort."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.contour import derivative
from jaxdp.contour import trapezoid as contour
from jaxdp.contour.largest_loss import bands
from jaxdp.contour.spectrum import SWAPPED
from jaxdp.contour.trapezoid import Effort
from jaxdp.domains import LEAST_DELTA, SMALLEST
from jaxdp.mechanisms.basic import Gaussian, RandomizedResponse
from jaxdp.mechanisms.composition import Stack
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.mechanisms.sampled import FixedSizeSampled, PoissonSampled, Sampled
from jaxdp.mechanisms.shuffled import LossLaw
from jaxdp.mechanisms.spectrum import has_finite_law, is_sampled_gaussian, on_lattice, spectrum
from jaxdp.numerics.rounding import ULP
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import canary, x64
from jaxdp.runtime.precision import kernel
from jaxdp.sources import simple
from jaxdp.sources.base import (
    Answer,
    Asked,
    Known,
    Points,
    Route,
    Source,
    intersect,
    nothing,
    relative_gap,
    traced_bounds,
    wide,
)
from jaxdp.sources.renyi import optimal_order

# Efforts, cheapest first, used in turn until the gap is small enough: (contour nodes, quadrature nodes, smooth).
SAMPLED_LADDER = (
    Effort(128, 96, False),
    Effort(512, 192, False),
    Effort(4096, 320, False),
    Effort(16384, 512, False),
    Effort(65536, 1024, True),
    Effort(262144, 4096, True),
)
FOR_DELTA = Effort(128, 160, False)  # first effort for delta, whose relative gap takes more digits
# Effort that suffices to show that the add direction has the smaller delta.
COMPARED = Effort(16, 96, False)
# Sources without an answer, placed before that comparison. The add direction is hardly ever the larger one: it waits
# until the remove direction has been computed with 4096 nodes and usually has a lower bound.
_WAITING: list[Source] = [lambda params, target, known, asked: Answer(known.lower, known.upper)] * 3
# Remove and replace, all else in closed form: one contour for each band of losses, where few rare large losses decide.
_BANDED = (Effort(1024, 640, False, bands=4), Effort(1024, 960, False, bands=8), Effort(32768, 960, False, bands=8))
BANDED_LADDER = (*SAMPLED_LADDER[:4], *_BANDED)
_MOST_BANDED = 8  # largest number of distinct sampled mechanisms for which bands are affordable
GAUSSIAN_LADDER = (Effort(128, 1, False), Effort(1024, 1, False), Effort(16384, 1, True), Effort(262144, 1, True))
PLAIN_LADDER = (Effort(1024, 1, True), Effort(8192, 1, True), Effort(49152, 1, True), Effort(262144, 1, True))
LATTICE_LADDER = (Effort(256, 1, False, True), Effort(4096, 1, False, True), Effort(65536, 1, False, True))
_WIDEST = 5123  # most outcomes of a finite law; fine laws have more, but fill the cores anyway
TRACED = Effort(16384, 512, False)  # under a trace, where each epsilon takes two passes
# Bands take 30 ms and more. They are left out for an upper bound of delta up to _DEEP, and for one up to _SMALL whose
# relative gap is at most _SMALL_GAP times the gap asked for.
_DEEP = 1e-60
_SMALL, _SMALL_GAP = 1e-20, 100.0
_SMALL_BEFORE = 0.01  # relative gap below which an effort that does not halve it is the last
# The numerical gap of each of two enclosing pairs is small enough at the larger of these two shares.
_SHARE_OF_GAP = 0.3  # of the gap asked for
_SHARE_OF_DISTANCE = 0.5  # of the relative distance between the dominating pair's upper and the other's lower bound
_BY_CONTOUR = 0.75  # share of the gap of two enclosing pairs, due to the contour, from which closer pairs are not tried
_APART = 4.0  # pairs whose upper bounds differ by more than this multiple of the gap are too far apart to meet it
_LEAST_PART = 1e-13  # error of the swapped pair's delta at a negative epsilon that is always small enough


def _by_numpy(stacks: Any, *_: Any, effort: Effort, direction: str, **__: Any) -> int:
    """Points that NumPy computes in about the time that the effort's program takes to compile."""
    mechanisms = sum(times.shape[1] for _, times in stacks)
    if effort.bands:
        return (384 // effort.bands if effort.nodes <= 1024 else 4) // mechanisms
    points, together = min(384, 2**24 // effort.nodes), min(max(len(stacks[0][1]), mechanisms), 32)
    if _at_once(stacks, effort=effort, direction=direction) > 1:
        points = max(points, together * 2**16 // (512 + effort.nodes))
        # a mechanism in closed form takes about an eighth of the time of a sampled one
        in_closed_form = sum(times.shape[1] for record, times in stacks if not is_sampled_gaussian(record))
        mechanisms -= in_closed_form * 7 // 8
    # At least one point, to compare the program with, unless NumPy takes too long for one.
    return max(points // mechanisms, min(256 // mechanisms, 1))


def _size(effort: Effort, finite: bool) -> int:
    """Numbers that one mechanism needs: two complex tables, (a row of nodes, or planning abscissae) x losses."""
    width = max(effort.quadrature, _WIDEST if finite else 1)
    size = effort.nodes + 4 * max(math.isqrt(effort.nodes), 8) * width
    if effort.quadrature == 1 and not finite:
        # smaller calls: a batch takes at most a tenth longer, a single point a quarter of the time
        return 4 * size if effort.lattice else 8 * size
    return 8 * size if effort.bands else size  # bands: two labels and a dozen abscissae at a time


def _working_set(stacks: Any, *_: Any, effort: Effort, **__: Any) -> int:
    """Numbers held in memory for one point.

    With hundreds of mechanisms a call computes one point: each copy that fills up a larger call would cost as much.
    """
    mechanisms = sum(times.shape[1] for _, times in stacks)
    return max(mechanisms // 32, 1) * _size(effort, any(has_finite_law(record) for record, _ in stacks))


def _at_once(stacks: Any, *_: Any, effort: Effort, direction: str, **__: Any) -> int:
    """Points that NumPy computes together; alone where the arrays of one point are so large that nothing is gained."""
    if any(has_finite_law(record, direction) for record, _ in stacks):
        return 1
    return min(2**21 // _size(effort, False), 128)


_contour_kernel = kernel(working_set=_working_set, large=True, bounds=True, by_numpy=_by_numpy, at_once=_at_once)


@_contour_kernel
def contour_bounds(
    stacks: tuple[Stack, ...], target: Any, known: Any, *, verb: str, direction: str, effort: Effort
) -> tuple[Any, Any]:
    """Certified (lower, upper) "epsilon" or "delta" (verb) of one point. known: an upper bound of it."""
    method = bands if effort.bands else contour
    solve = method.epsilon_bounds if verb == "epsilon" else method.delta_bounds
    return solve(spectrum(stacks, direction), target, known, effort)


@_contour_kernel
def contour_ratio(
    stacks: tuple[Stack, ...], eps: Any, delta: Any, *, direction: str, effort: Effort
) -> tuple[Any, Any]:
    """Certified (lower, upper) of S / delta at one point, where S is a sum >= delta(eps); 0 < eps, 0 < delta < 1."""
    return contour.ratio_bounds(spectrum(stacks, direction), eps, delta, effort)


def _ladder(stacks: tuple[Stack, ...], direction: str) -> tuple[Effort, ...]:
    """The efforts for a composition of these mechanisms, cheapest first."""
    if on_lattice(stacks):
        # The third effort ignores the lattice, which may be so fine that one period takes too many nodes.
        falls = stacks[0][0].offers("log_modulus")
        return (*LATTICE_LADDER[:2], PLAIN_LADDER[1], LATTICE_LADDER[2]) if falls else LATTICE_LADDER
    sampled = sum(times.shape[1] for record, times in stacks if is_sampled_gaussian(record, direction))
    if sampled:
        finite = any(has_finite_law(record, direction) for record, _ in stacks)
        banded = direction != "reverse" and sampled <= _MOST_BANDED and not finite
        return BANDED_LADDER if banded else SAMPLED_LADDER
    if any(isinstance(record, GaussianMechanism) for record, _ in stacks):
        return GAUSSIAN_LADDER
    return PLAIN_LADDER


def contour_route(stacks: tuple[Stack, ...], direction: str, concrete: Callable[[Any], Route] | None = None) -> Route:
    """The route of one dominating pair.

    concrete: params -> a closer route for concrete numbers. If given, traced numbers also use `optimal_order`.
    """
    exact = all(record.is_exact(direction) for record, _ in stacks)
    ladder = _ladder(stacks, direction)
    quadrature = ladder in (SAMPLED_LADDER, BANDED_LADDER)
    traced = TRACED if quadrature else LATTICE_LADDER[1] if ladder[0].lattice else ladder[-2]
    sources = {verb: _sources(verb, stacks, direction, ladder, exact) for verb in ("epsilon", "delta")}
    return Route(stacks, sources, _traced_points(direction, traced, exact, concrete))


def _sources(
    verb: str, stacks: tuple[Stack, ...], direction: str, ladder: tuple[Effort, ...], exact: bool
) -> tuple[Source, ...]:
    """The sources, cheapest first. A pair that is not exact is replaced by two that enclose it (`_Between`)."""

    def plain(answer: Callable[..., Answer]) -> Source:
        return lambda params, target, known, asked: answer(verb, direction, params, target)

    quadrature = ladder in (SAMPLED_LADDER, BANDED_LADDER)
    efforts = (FOR_DELTA, *ladder[1:]) if quadrature and verb == "delta" else ladder
    contours: list[Source] = [_Contour(verb, direction, effort) for effort in efforts]
    in_add = ladder is SAMPLED_LADDER and direction == "reverse"
    compared: list[Source] = [*_WAITING, Compared(verb)] if in_add else []
    bare = plain(simple.unsampled)
    # The bound without sampling comes before the bands, which start from the bounds known.
    contours.insert(next((i for i, effort in enumerate(efforts) if effort.bands), len(efforts)), bare)
    pair: tuple[Source, ...] = (plain(simple.one_finite_law), plain(simple.few_outcomes), *compared, *contours)
    if not exact:
        refinable = any(isinstance(r, Sampled) and r.refinable(direction) for r, _ in stacks)
        pairs = (False, True) if refinable else (False,)
        pair = tuple(_Between(verb, direction, fine, fine == pairs[-1], pair) for fine in pairs)
        pair = (*pair, bare)
    if _attained(stacks, direction) is not True:
        pair = (_Symmetric(verb, pair),)
    if verb == "delta" and not any(isinstance(record, LossLaw) for record, _ in stacks):
        # a `LossLaw` was made for one direction: its swap is not known
        pair = (_Swapped(direction), *pair)
    return (plain(simple.no_step), plain(simple.one_sampled_step), plain(simple.one_laplace), *pair)


@dataclasses.dataclass(frozen=True)
class _Swapped:
    """delta at eps < 0 from the swapped pair: delta(eps) = 1 - e^eps + e^eps delta_swapped(-eps)."""

    direction: str

    def __call__(self, params: Any, target: np.ndarray, known: Known, asked: Asked) -> Answer:
        lower, upper = nothing("delta", target)
        negative = (target < 0) & np.isfinite(target)
        rows = np.flatnonzero(negative)
        if rows.size:
            odds, least = np.exp(target[rows]), -np.expm1(target[rows])
            swapped = jax.tree_util.tree_map(operator.itemgetter(rows), params)
            sources = contour_route(swapped, SWAPPED[self.direction]).sources["delta"]

            def allowed(_: np.ndarray, high: np.ndarray) -> np.ndarray:
                """The gap asked for, of the swapped pair's delta, as trade-off functions need it; larger next to 0."""
                return np.fmax(asked.gap, _LEAST_PART / np.fmax(high, SMALLEST))

            ((low, high),) = intersect("delta", [sources], swapped, -target[rows], asked._replace(near=None), allowed)
            lower[rows] = (least + odds * low) * (1 - 8 * ULP)
            upper[rows] = np.minimum((least + odds * high) * (1 + 8 * ULP), 1.0)
        return Answer(lower, upper, negative)


@dataclasses.dataclass(frozen=True)
class Compared:
    """Where the add direction is proved not to be the larger one, its upper bound is the lower bound of the other."""

    verb: str

    def __call__(self, params: Any, target: Any, known: Known, asked: Asked) -> Answer:
        """``known.largest`` as the upper bound of the rows where `contour_ratio` proves it; else vacuous bounds."""
        lower, upper = nothing(self.verb, target)
        eps, delta = (known.largest, target) if self.verb == "epsilon" else (target, known.largest)
        rows = np.flatnonzero((eps > 0) & np.isfinite(eps) & (delta > 0) & (delta < 1))
        if rows.size:
            open_params = jax.tree_util.tree_map(lambda x: x[rows], params)
            _, ratio = contour_ratio(open_params, eps[rows], delta[rows], direction="reverse", effort=COMPARED)
            upper[rows] = np.where(ratio <= 1, known.largest[rows], upper[rows])
        return Answer(lower, upper)


@dataclasses.dataclass(frozen=True)
class _Contour:
    """The contour at one effort. Bands are left out for deltas that are tiny, or whose bounds are close enough.

    Without quadrature a row is settled if its gap, already small, is not halved: what is left is rounding.
    """

    verb: str
    direction: str
    effort: Effort

    def __call__(self, params: Any, target: Any, known: Known, asked: Asked) -> Answer:
        lower, upper = known.lower.copy(), known.upper.copy()
        close_enough = (upper <= _SMALL) & ~wide(lower, upper, _SMALL_GAP * asked.gap)
        worth_bands = (upper > _DEEP) & (target > 0) & ~close_enough
        rows = np.flatnonzero((self.verb == "epsilon") | (self.effort.bands == 0) | worth_bands)
        if rows.size:
            points = jax.tree_util.tree_map(operator.itemgetter(rows), (params, target, upper))
            static = {"verb": self.verb, "direction": self.direction, "effort": self.effort}
            lower[rows], upper[rows] = contour_bounds(*points, **static)
        if self.effort.quadrature > 1 or self.effort.lattice:
            return Answer(lower, upper)
        before = relative_gap(known.lower, known.upper)
        return Answer(lower, upper, (before < _SMALL_BEFORE) & wide(lower, upper, 0.5 * before))


@dataclasses.dataclass(frozen=True)
class _Between:
    """The upper bound of a dominating pair, the lower bound of a dominated pair.

    fine: use the pairs that enclose more closely. last: no closer pairs exist, so the dominated pair serves the lower
    bound only.
    """

    verb: str
    direction: str
    fine: bool
    last: bool
    sources: tuple[Source, ...]

    def __call__(self, params: Any, target: Any, known: Known, asked: Asked) -> Answer:
        pairs = _enclosing_pairs(params, self.direction, self.fine)
        if pairs is None:
            asked = asked._replace(apart=np.zeros(target.shape))
            ((_, upper),) = intersect(self.verb, [self.sources], params, target, asked)
            return Answer(np.zeros(target.shape), upper)
        if not self.last:
            twice, allowed = np.tile(np.arange(target.size), 2), functools.partial(_allowed, asked)
            ((lower, upper),) = intersect(self.verb, [self.sources], pairs, target[twice], asked.rows(twice), allowed)
            unfinished = np.any(np.split(wide(lower, upper, allowed(lower, upper)), 2), axis=0)
            (own, lower), (upper, _) = np.split(lower, 2), np.split(upper, 2)
            by_contour = unfinished & (relative_gap(own, upper) > _BY_CONTOUR * relative_gap(lower, upper))
            return Answer(lower, upper, by_contour | _all_infinite(pairs, target.size))
        outer, inner = (
            jax.tree_util.tree_map(operator.itemgetter(side), pairs)
            for side in (slice(target.size), slice(target.size, None))
        )
        ((_, upper),) = intersect(self.verb, [self.sources], outer, target, asked._replace(gap=2 * asked.gap))
        lower = np.zeros(target.shape)
        if not asked.upper_only:
            allowed = functools.partial(_allowed_beside, asked, upper)
            ((lower, _),) = intersect(self.verb, [self.sources], inner, target, asked, allowed)
        return Answer(lower, upper)


def _allowed(asked: Asked, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The gap at which a row of either pair is done, if closer pairs follow; rows of the dominating pair come first.

    Infinite once the bounds of both pairs together meet the gap asked for, or prove the pairs too far apart to meet it.
    """
    (outer_lower, lower), (outer, inner) = np.split(lower, 2), np.split(upper, 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = (outer_lower > 0) & (1 - inner / outer > _APART * asked.allowed(lower, outer))
    return np.tile(np.where(apart, np.inf, _allowed_beside(asked, outer, lower)), 2)


def _allowed_beside(asked: Asked, outer: np.ndarray, lower: np.ndarray, *_: np.ndarray) -> np.ndarray:
    """The gap at which a pair is done, from the dominating pair's upper and the dominated pair's lower bound."""
    gap = asked.allowed(lower, outer)
    with np.errstate(invalid="ignore", divide="ignore"):
        between = np.where(np.isfinite(outer), 1 - lower / outer, np.nan)
    return np.where(between <= gap, np.inf, np.fmax(gap * _SHARE_OF_GAP, _SHARE_OF_DISTANCE * between))


@dataclasses.dataclass(frozen=True)
class _Symmetric:
    """Fixed-size batches under replace_one: bounds of their symmetric pair.

    Where no data set attains it, lower bounds are those of the data set in which the two records contribute 1 and -1,
    all others -1; its two orders have the pairs for remove and add (notebooks/proofs/sampled_replace.md, section 7), or
    those of the mechanisms without batches of fixed size alone.
    """

    verb: str
    sources: tuple[Source, ...]

    def __call__(self, params: Any, target: Any, known: Known, asked: Asked) -> Answer:
        attained = _attained(params, "replace")
        if np.all(attained):
            accuracy, beside = asked, np.zeros(target.shape)
        else:
            orders = [contour_route(params, direction).sources[self.verb] for direction in ("forward", "reverse")]
            found = intersect(self.verb, orders, params, target, asked)
            rest = tuple((record, times) for record, times in params if not isinstance(record, FixedSizeSampled))
            if rest:
                found += intersect(self.verb, [contour_route(rest, "replace").sources[self.verb]], rest, target, asked)
            beside = np.maximum.reduce([lower for lower, _ in found])
            accuracy = asked._replace(upper_only=not np.any(attained), apart=np.where(attained, np.inf, beside))
        ((lower, upper),) = intersect(self.verb, [self.sources], params, target, accuracy)
        lower = np.fmax(np.where(attained, lower, 0.0), beside)
        return Answer(np.fmin(lower, upper), upper, True)


def _attained(stacks: tuple[Stack, ...], direction: str) -> Any:
    """Whether some data set attains each row's pair; fixed-size batches under replace_one: only with one round."""
    if direction != "replace" or not any(isinstance(record, FixedSizeSampled) for record, _ in stacks):
        return True
    times = stacks[0][1]
    return (len(stacks) == 1) & (times.shape[-1] == 1) & (times[..., 0] <= 1)


def _all_infinite(pairs: tuple[Stack, ...], size: int) -> np.ndarray:
    """Whether each row has a dominating law that is nothing but mass at infinity, so that no other grid helps."""
    masses = [np.reshape(r.infinity, (2 * size, -1))[:size] for r, _ in pairs if isinstance(r, LossLaw)]
    return np.any([np.any(mass >= 1, axis=1) for mass in masses], axis=0) | np.zeros(size, bool)


def _enclosing_pairs(stacks: tuple[Stack, ...], direction: str, fine: bool) -> tuple[Stack, ...] | None:
    """The stacks with all rows twice: of dominating, then of dominated records; None where the latter are unknown."""
    doubled = []
    for record, times in stacks:
        with x64():  # an own record may compute with jax.numpy
            both = (record, record) if record.is_exact(direction) else record.enclosing_records(direction, fine)
        if both is None:
            return None
        twice = jax.tree_util.tree_map(lambda one, other: np.concatenate([one, other]), *both)
        doubled.append((twice, np.concatenate([times, times])))
    return tuple(doubled)


@functools.cache
def _traced_points(
    direction: str, effort: Effort, exact: bool, concrete: Callable[[Any], Route] | None
) -> dict[str, Points]:
    """Differentiable bounds of epsilon and of delta; cached, so that equal configurations compile once."""

    def log_delta(params: Any, eps: Any) -> Any:
        log = derivative.log_delta(lambda p: spectrum(p, direction), params, eps, effort)
        return xp.minimum(log, by_renyi(params, eps, "delta")) if concrete else log

    def by_renyi(params: Any, target: Any, verb: str) -> Any:
        return optimal_order(params, target, verb=verb, direction=direction)

    def epsilon(params: Any, delta: Any) -> tuple[Any, Any]:
        composed = spectrum(params, direction)

        def narrowed(_: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
            lower, upper = contour.epsilon_bounds(composed, delta, found[1], effort)
            return xp.maximum(found[0], lower), xp.minimum(found[1], upper)

        most = by_renyi(params, delta, "epsilon") if concrete else xp.asarray(xp.inf)
        lower, upper = xp.fori_loop(0, 2, narrowed, (xp.zeros(()), most))
        return attained(params, lower), upper

    def delta(params: Any, eps: Any) -> tuple[Any, Any]:
        most = xp.maximum(xp.exp(by_renyi(params, eps, "delta")), LEAST_DELTA) if concrete else xp.ones(())
        lower, upper = contour.delta_bounds(spectrum(params, direction), eps, most, effort)
        return attained(params, lower), xp.where(most < upper, most, upper)

    def bounds(params: Any, target: Any, verb: str) -> tuple[Any, Any]:
        return (epsilon if verb == "epsilon" else delta)(params, target)

    def attained(params: Any, lower: Any) -> Any:
        return xp.where(_attained(params, direction), lower, 0.0) if exact else xp.zeros(())

    route, size = concrete or functools.partial(contour_route, direction=direction), 256 * effort.nodes
    return traced_bounds(bounds, log_delta, route, size)


@canary("contour of the sampled Gaussian")
def _canary() -> tuple[Any, Any, float]:
    """One DP-SGD epsilon, exact to 20 digits."""
    stacks = ((PoissonSampled(Gaussian(np.array([[2.0]])), np.array([[0.1]])), np.array([[5000.0]])),)
    points = stacks, np.array([1e-8]), np.array([np.inf])
    _, upper = contour_bounds.run_unchecked(*points, verb="epsilon", direction="forward", effort=SAMPLED_LADDER[0])
    return upper, np.array([27.81331522523486904152]), 1e-8


@canary("contour of randomized response")
def _lattice_canary() -> tuple[Any, Any, float]:
    """Epsilon of 500 randomized responses at the exact delta(20)."""
    local = np.array([[np.log(0.55) - np.log(0.45)]])
    stacks = ((RandomizedResponse(local, np.array([[2.0]])), np.array([[500.0]])),)
    points = stacks, np.array([0.007786793109874420442849]), np.array([np.inf])
    _, upper = contour_bounds.run_unchecked(*points, verb="epsilon", direction="forward", effort=LATTICE_LADDER[0])
    return upper, np.array([20.0]), 1e-9
