"""The verbs: validate, choose the route, enter float64, call the kernels. Written once for every mechanism."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import ABOVE_ONE, FINITE, NOT_NAN, PROBABILITY, SMALLEST
from jaxdp.interval import Bounds
from jaxdp.mechanisms import provenance
from jaxdp.mechanisms.base import Mechanism, UnsupportedMechanismError, confined, not_a_mechanism
from jaxdp.mechanisms.composition import (
    batch_shape,
    flatten,
    is_gaussian,
    natural_relation,
    normal_form,
    require_one_order,
    spread_axis,
)
from jaxdp.numerics.concave import largest_value
from jaxdp.numerics.special import raised
from jaxdp.runtime.backend import require_x64, x64
from jaxdp.sources import choose_routes
from jaxdp.sources.base import BESIDE_GRADIENT, VACUOUS, Asked, Route, intersect
from jaxdp.sources.gaussian import gaussian_tradeoff
from jaxdp.sources.renyi import log_mgf_kernel, renyi_kernel
from jaxdp.sources.round_laws import dominating
from jaxdp.sources.traced_rounds import traced_moment
from jaxdp.typing import Array, Complex, Real, Relation


def delta(mechanism: Mechanism, epsilon: Real, *, relation: Relation | None = None, gap: float = 1e-6) -> Array:
    """Smallest certified delta at ``epsilon``: never below the truth.

    mechanism: any jaxdp mechanism; its fields may be arrays.
    epsilon: real, nats, any sign, +-inf allowed, any shape; broadcasts with the mechanism's fields.
    relation, gap: see `epsilon`.

    >>> jaxdp.delta(jaxdp.Gaussian(1.0), epsilon=[0.5, 1.0, 2.0]).round(5)
    array([0.23842, 0.12694, 0.02092])

    Returns NumPy float64 of the broadcast shape (a traced array under jit, vmap, grad with x64 on), in [0, 1]. It is 1
    where nothing can be certified, and in a traced row that has a number outside its domain (`jaxdp.domains`).
    Raises ValueError, TypeError, UnsupportedMechanismError.
    """
    return _run(mechanism, "epsilon", epsilon, relation, "delta", gap=gap, upper_only=True).upper


def epsilon(mechanism: Mechanism, delta: Real, *, relation: Relation | None = None, gap: float = 1e-6) -> Array:
    """Smallest certified epsilon >= 0 at ``delta``: never below the truth.

    mechanism: any jaxdp mechanism; its fields may be arrays.
    delta: in [0, 1], any shape; broadcasts with the mechanism's fields. For 0 < delta < 2.2e-308, which compiled
        arithmetic takes for 0, the upper bound is infinite.
    relation: how neighbouring data sets differ: "add", "remove", "add_or_remove" (the larger of the two, each composed
        on its own), "replace_one", or None for the mechanism's natural relation.
    gap: in (0, 1), the relative gap of the certified bounds at which work stops. A smaller gap costs time and helps as
        far as double precision allows (often 1e-9). Under a trace the work is fixed. Closed forms do not use it: they
        are always as close as double precision allows.

    >>> training = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), sampling_probability=0.01), 1000)
    >>> print(f"{jaxdp.epsilon(training, delta=1e-5):.4f}")
    1.8282

    Returns NumPy float64 of the broadcast shape, nats (a traced array under jit, vmap, grad with x64 on). It is inf
    where nothing can be certified, and in a traced row that has a number outside its domain (see `jaxdp.domains`): NaN,
    a negative noise multiplier, a delta above 1. The derivative of such a row is 0.
    Raises ValueError, TypeError, UnsupportedMechanismError.
    """
    return _run(mechanism, "delta", delta, relation, "epsilon", gap=gap, upper_only=True).upper


def epsilon_near(
    mechanism: Mechanism, delta: Real, target: Real, *, relation: Relation | None = None, direction: str | None = None
) -> Array:
    """Certified upper bound of epsilon, like `epsilon`, but less close to the truth the farther it is from ``target``.

    Close to ``target`` it is as close as `epsilon`, so that it shows on which side of ``target`` epsilon lies.
    direction: one of ``mechanism.directions(relation)``, the only dominating pair to account for; None for all.
    """
    directions = None if direction is None else (direction,)
    return _run(mechanism, "delta", delta, relation, "epsilon", directions, near=target, upper_only=True).upper


def delta_bounds(
    mechanism: Mechanism, epsilon: Real, *, relation: Relation | None = None, gap: float = 1e-6
) -> Bounds[Array]:
    """Certified Bounds(lower, upper) of delta at ``epsilon``; arguments as for `delta`.

    >>> lower, upper = jaxdp.delta_bounds(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), epsilon=1.0)
    >>> print(f"{lower:.4g} <= delta <= {upper:.4g}")
    2.732e-09 <= delta <= 2.732e-09
    """
    return _run(mechanism, "epsilon", epsilon, relation, "delta", gap=gap)


def epsilon_bounds(
    mechanism: Mechanism, delta: Real, *, relation: Relation | None = None, gap: float = 1e-6
) -> Bounds[Array]:
    """Certified Bounds(lower, upper) of epsilon at ``delta``; arguments as for `epsilon`.

    In the example every randomizer with a local epsilon of 4 has a central epsilon of at most the upper bound, and some
    such randomizer has a central epsilon of at least the lower bound.

    >>> shuffled = jaxdp.Shuffled(jaxdp.LocalRandomizer(4.0), num_users=100_000)
    >>> lower, upper = jaxdp.epsilon_bounds(shuffled, delta=1e-6)
    >>> print(f"{lower:.4f} <= epsilon <= {upper:.4f}")
    0.0847 <= epsilon <= 0.1698
    """
    return _run(mechanism, "delta", delta, relation, "epsilon", gap=gap)


def renyi(mechanism: Mechanism, order: Real, *, relation: Relation | None = None) -> Array:
    """Renyi divergence of the given order: an upper bound of the mechanism's Renyi DP curve.

    order: real > 1, inf allowed (the supremum of the loss), any shape; broadcasts with the mechanism's fields.
    relation: as for `epsilon`; with several pairs, the largest divergence.

    >>> jaxdp.renyi(jaxdp.Gaussian(2.0), order=[2, 8]).round(4)
    array([0.25, 1.  ])

    Returns NumPy float64 in nats, rounded outward. It is infinite when the pair that bounds the mechanism has mass at
    infinity, and in a traced row that has a number outside its domain. At orders in the hundreds, sampled Gaussian
    noise gets the bound without sampling. Close to order 1, where cancellation would cost more, the value at a slightly
    larger order is returned: R is nondecreasing in the order.
    """
    return _per_direction(mechanism, "renyi", order, relation, renyi_kernel)


def log_mgf(mechanism: Mechanism, z: Complex, *, relation: Relation | None = None) -> Array:
    """K(z) = log E_P[exp(z L); L finite] of the dominating pair, an estimate.

    z: complex, any shape; broadcasts with the mechanism's fields.
    relation: as for `epsilon`, but not "add_or_remove": if that is the natural relation, None means "remove". The pair
        of "add" is the swapped pair of "remove".

    >>> print(jaxdp.log_mgf(jaxdp.Gaussian(1.0), z=1j))
    (-0.5+0.5j)

    Returns NumPy complex128, accurate to about 1e-12 relative in exp(K) per step and not rounded outward. Under a trace
    the value is inf + 0j, above every K, where z is not finite or a parameter is outside its domain.
    """
    if relation == "add_or_remove":
        raise ValueError('log_mgf describes one pair: relation must be "add", "remove" or "replace_one".')
    return _per_direction(mechanism, "log_mgf", z, relation, log_mgf_kernel)


def tradeoff(mechanism: Mechanism, false_positive_rate: Real, *, relation: Relation | None = None) -> Array:
    """Certified lower bound of the smallest false negative rate of any test at the given false positive rate.

    false_positive_rate: in [0, 1], any shape; broadcasts with the mechanism's fields.
    relation: as for `epsilon`; with several pairs, the smallest rate.

    >>> print(f"{jaxdp.tradeoff(jaxdp.RandomizedResponse(1.0), false_positive_rate=0.1):.4f}")
    0.7282

    With x the false positive rate it is Phi(-Phi^-1(x) - mu) for Gaussian-DP mechanisms. For others it is the largest
    of 1 - delta(eps) - e^eps x over certified points (eps, delta(eps)), eps of either sign, refined around the best
    point until it can gain at most 1e-5 of the smaller of the rate and 1 - rate, or 1e-12. Any points give a valid
    bound (Dong, Roth, Su 2022). Concrete numbers only. Returns NumPy float64.
    """
    if validate.is_traced(mechanism, false_positive_rate):
        raise TypeError(
            "tradeoff must be called outside jit, vmap and grad, got a traced array. Inside, take the largest of "
            "1 - delta(mechanism, epsilon) - exp(epsilon) * false_positive_rate over a grid of epsilons."
        )
    check_mechanism(mechanism)
    x = validate.probability("false_positive_rate", false_positive_rate)
    shape = validate.broadcast(mechanism=np.empty(batch_shape(mechanism)), false_positive_rate=x)
    provenance.note("tradeoff", mechanism, relation or natural_relation(mechanism), "false_positive_rate", x)
    x = np.broadcast_to(x, shape)
    resolved, _ = _resolved(mechanism, relation)
    if is_gaussian(resolved):
        # Compiled arithmetic takes a subnormal rate for 0. A larger rate is safe: its false negative rate is smaller.
        x = np.where(x > 0, np.maximum(x, SMALLEST), x)
        return gaussian_tradeoff(normal_form(resolved, shape), x.reshape(-1)).reshape(shape)[()]
    with provenance.observe():  # the calls of other verbs below are part of this one
        curves = [_tradeoff_of_pair(mechanism, x, r) for r in _single_relations(mechanism, relation)]
    return np.minimum.reduce(curves)[()]


def _single_relations(mechanism: Mechanism, relation: Relation | None) -> tuple[Relation, ...]:
    """The relations whose trade-off functions are computed: "add" and "remove" for both, where each is available."""
    relation = relation or natural_relation(mechanism)
    _, directions = _resolved(mechanism, relation)
    if relation != "add_or_remove" or len(directions) == 1:
        return (relation,)
    try:
        for single in ("add", "remove"):
            mechanism.directions(single)
    except UnsupportedMechanismError:
        return (relation,)  # its delta is the larger of both pairs', a valid bound for each pair
    return ("add", "remove")


def _tradeoff_of_pair(mechanism: Mechanism, x: np.ndarray, relation: Relation) -> np.ndarray:
    """Lower bound of the false negative rate under one relation: max over eps of 1 - delta(eps) - e^eps x."""
    spread = spread_axis(mechanism)

    def certified(eps: np.ndarray, gap: float) -> np.ndarray:
        upper = delta(spread, eps, relation=relation, gap=gap)
        return 1 - upper - np.exp(eps) * x[..., None] * (1 + 4e-16)

    def end(which: Relation) -> np.ndarray:
        delta_there = delta(mechanism, _FARTHEST, relation=which, gap=0.1)  # includes mass at infinity
        found = epsilon(mechanism, np.minimum(delta_there + 1e-6, 1.0), relation=which, gap=0.1)
        return np.minimum(found, _FARTHEST) + 1.0

    # The smallest loss is minus the largest loss of the swapped pair.
    swapped: dict[Relation, Relation] = {"add": "remove", "remove": "add"}
    value = largest_value(certified, -end(swapped.get(relation, relation)), end(relation), idle=-2 * _FARTHEST)
    return np.maximum(value - 1e-15, 0.0)


def _per_direction(mechanism: Mechanism, verb: str, value: Any, relation: Relation | None, kernel: Any) -> Any:
    """Values of the kernel: for "renyi" the largest over the directions, for "log_mgf" those of the first (verb)."""
    name = "order" if verb == "renyi" else "z"
    mechanism, value, shape, usable = _admitted(mechanism, name, value)
    if verb == "log_mgf" and relation is None and natural_relation(mechanism) == "add_or_remove":
        relation = "remove"
    provenance.note(verb, mechanism, relation or natural_relation(mechanism), name, value)
    resolved, directions = _resolved(mechanism, relation)
    directions = directions[:1] if verb == "log_mgf" else directions
    stacks, size = normal_form(resolved, shape), int(np.prod(shape))
    if size == 0:
        return np.empty(shape, np.complex128 if verb == "log_mgf" else np.float64)
    results = []
    for direction in directions:
        if usable is not True:
            flat = jnp.broadcast_to(jnp.asarray(value), shape).reshape(size)
            with jax.numpy_rank_promotion("allow"):
                result = traced_moment(kernel, direction)(stacks, flat)
        else:
            orders = np.broadcast_to(value, shape).reshape(size)
            result = kernel(dominating(stacks, orders) if verb == "log_mgf" else stacks, orders, direction=direction)
        results.append(_or_vacuous(result.reshape(shape), usable, np.inf))
    return functools.reduce(np.maximum if usable is True else jnp.maximum, results)[()]


def check_mechanism(mechanism: object) -> tuple[Mechanism, list[Array | bool]]:
    """What `confined` returns: the mechanism with traced numbers moved into their domains, and tests; or TypeError."""
    if not isinstance(mechanism, Mechanism):
        raise not_a_mechanism(mechanism)
    admitted, tests = confined(mechanism)
    return jax.tree.map(_in_double_precision, admitted), tests


def _in_double_precision(number: Any) -> Any:
    """A concrete array of few bits as float64, because `under` and `simplified` of own records compute with it."""
    if not isinstance(number, (np.ndarray, np.generic, jax.Array)) or validate.is_traced(number):
        return number
    few = number.dtype != np.float64 and (jnp.issubdtype(number.dtype, jnp.floating) or number.dtype.kind in "iu")
    return np.asarray(number, np.float64)[()] if few else number


_MARGIN = 0.9  # share of the user's gap at which the sources stop
_FARTHEST = 100.0  # largest epsilon that is tried for a trade-off function, up to a margin of 1
# `_down_to_zero` looks at upper bounds of epsilon below the first, and at deltas from the second on.
_NEXT_TO_ZERO, _LARGE = 1e-9, 0.01
_DELTA = dataclasses.replace(PROBABILITY, remedy="Give the number itself, such as 1e-5.")
_TARGETS = {"delta": _DELTA, "epsilon": NOT_NAN, "order": ABOVE_ONE, "z": FINITE}


def _admitted(mechanism: Any, name: str, target: Any) -> tuple[Mechanism, Any, tuple[int, ...], Any]:
    """(mechanism, target, their broadcast shape, usable), with every traced number moved into its domain.

    usable: which rows had all numbers in their domains; True if nothing is traced: a number outside is a ValueError.
    """
    if validate.is_traced(mechanism, target):
        # Under a bare jax.grad only our own programs compute bounds and slopes: the user compiles nothing.
        require_x64(compiles=name == "z" or validate.is_traced(jax.lax.stop_gradient((mechanism, target))))
    mechanism, tests = check_mechanism(mechanism)
    dtype = np.complex128 if name == "z" else np.float64
    target, test = validate.confined(name, target, _TARGETS[name], dtype)
    shape = validate.broadcast(mechanism=np.empty(batch_shape(mechanism)), **{name: target})
    parts = [jnp.broadcast_to(each, shape) for each in (*tests, test) if each is not True]
    return mechanism, target, shape, functools.reduce(operator.and_, parts) if parts else True


def _or_vacuous(answer: Any, usable: Any, vacuous: float) -> Any:
    return answer if usable is True else jnp.where(usable & ~jnp.isnan(answer), answer, vacuous)


def _without_replace(directions: tuple[str, ...]) -> set[str]:
    """The directions, "replace" as "forward": they differ only for sampled mechanisms."""
    return {"forward" if each == "replace" else each for each in directions}


def _resolved(
    mechanism: Mechanism, relation: Relation | None, directions: tuple[str, ...] | None = None
) -> tuple[Mechanism, tuple[str, ...]]:
    """The mechanism under the relation, and the directions of its pairs: one direction if all parts are symmetric."""
    needed, directions = directions, directions or mechanism.directions(relation)
    relation = relation or natural_relation(mechanism)
    if needed is None and relation == "replace_one":
        require_one_order(mechanism)
    with x64():  # methods of own records may compute with jax.numpy
        resolved = mechanism.under(relation)
    ordered = [atom for atom, _ in flatten(resolved) if not atom.symmetric]
    for atom in ordered if needed is None else ():
        if _without_replace(atom.directions(relation)) != _without_replace(directions):
            raise UnsupportedMechanismError(
                f"{type(atom).__name__} needs other pairs under {relation!r} than the mechanism that it stands for, or "
                "is composed with, unless its pair is symmetric."
            )
    return resolved, directions if ordered else ("forward",)


def _run(
    mechanism: Mechanism,
    name: str,
    target: Any,
    relation: Relation | None,
    verb: str,
    directions: tuple[str, ...] | None = None,
    gap: float = 1e-6,
    near: Any = None,
    upper_only: bool = False,
) -> Bounds[Array]:
    if validate.real_array("gap", gap).ndim or not 0 < gap < 1:
        raise ValueError(f"gap must be one number in (0, 1), got {gap!r}.")
    mechanism, target, shape, usable = _admitted(mechanism, name, target)
    provenance.note(verb, mechanism, relation or natural_relation(mechanism), name, target)
    routes = choose_routes(*_resolved(mechanism, relation, directions), shape)
    if usable is not True:
        pairs = [_evaluate_traced(route, verb, target, shape) for route in _largest(routes, verb, target, shape)]
        # Where both pairs are equal, as at sampling rate 1, jnp.maximum has the mean of their derivatives. The first
        # pair (remove) is the larger one at smaller rates: its derivative is right.
        larger = lambda one, other: jnp.where(other > one, other, one)  # noqa: E731
        lower, upper = (functools.reduce(larger, side) for side in zip(*pairs, strict=True))
        return Bounds(_or_vacuous(lower, usable, 0.0), _or_vacuous(upper, usable, VACUOUS[verb]))
    pairs = _evaluate(routes, verb, target, shape, Asked(_MARGIN * float(gap), near, upper_only))
    return Bounds(*(np.maximum.reduce(side)[()] for side in zip(*pairs, strict=True)))


def _distinct(params: Any, target: np.ndarray) -> tuple[Any, Any]:
    """(rows to solve, for each row the place of its answer among them): equal rows are solved once."""
    leaves = jax.tree_util.tree_leaves((params, target))
    width = sum(int(np.prod(np.shape(leaf)[1:])) for leaf in leaves)
    if target.size < 64 or width > 64:
        return slice(None), slice(None)
    rows = np.concatenate([np.reshape(leaf, (target.size, -1)) for leaf in leaves], axis=1)
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    if first.size == target.size:
        return slice(None), slice(None)
    return first, np.reshape(inverse, -1)


def _evaluate(
    routes: list[Route], verb: str, target: Any, shape: tuple[int, ...], asked: Asked
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Bounds for each dominating pair. They may be wide where another pair is known to be the larger one."""
    flat = np.broadcast_to(target, shape).reshape(int(np.prod(shape)))
    # XLA takes a subnormal delta for 0: the lower bound is that of the least normal delta, the upper bound is vacuous.
    subnormal = (verb == "epsilon") & (flat > 0) & (flat < SMALLEST)
    flat = np.where(subnormal, SMALLEST, flat)
    if asked.near is not None:
        asked = asked._replace(near=np.broadcast_to(asked.near, shape).reshape(flat.shape))
    first, inverse = _distinct((routes[0].params, asked.near), flat)
    params = jax.tree_util.tree_map(lambda x: np.asarray(x)[first], routes[0].params)
    answers = []
    found = intersect(verb, [route.sources[verb] for route in routes], params, flat[first], asked.rows(first))
    for route, (lower, upper) in zip(routes, found, strict=True):
        if verb == "epsilon":
            upper = _down_to_zero(route, params, flat[first], lower, upper)
        lower = np.where(lower < SMALLEST, 0.0, lower)  # a subnormal number may have been rounded up
        # + 0.0: no answer is -0.0
        lower, upper = lower[inverse] + 0.0, np.where(subnormal, VACUOUS[verb], upper[inverse]) + 0.0
        answers.append((lower.reshape(shape), upper.reshape(shape)))
    return answers


def _down_to_zero(route: Route, params: Any, delta: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Upper bounds of epsilon, 0 where delta(0) <= delta. A search may end above 0, far above 0 for a large delta."""
    rows = np.flatnonzero((lower == 0) & (upper > 0) & ((upper < _NEXT_TO_ZERO) | (delta >= _LARGE)))
    if not rows.size:
        return upper
    open_params = jax.tree_util.tree_map(lambda x: x[rows], params)
    ((_, at_zero),) = intersect("delta", [route.sources["delta"]], open_params, np.zeros(rows.size), BESIDE_GRADIENT)
    upper = upper.copy()
    upper[rows] = np.where(at_zero <= delta[rows], 0.0, upper[rows])
    return upper


def _largest(routes: list[Route], verb: str, target: Any, shape: tuple[int, ...]) -> list[Route]:
    """The routes to differentiate. If the numbers are concrete, pairs that are certainly smaller are left out."""
    params, target = jax.lax.stop_gradient(([route.params for route in routes], target))
    if len(routes) == 1 or validate.is_traced(params, target):
        return routes
    params, target = jax.tree_util.tree_map(np.asarray, (params, target))
    concrete = [dataclasses.replace(route, params=own) for route, own in zip(routes, params, strict=True)]
    kept = dict(enumerate(_evaluate(concrete, verb, target, shape, BESIDE_GRADIENT)))
    for i, (_, upper) in list(kept.items()):
        others = [lower for j, (lower, _) in kept.items() if j != i]
        if others and np.all(upper <= np.maximum.reduce(others)):
            del kept[i]
    return [routes[i] for i in kept]


def _evaluate_traced(route: Route, verb: str, target: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    flat = jnp.broadcast_to(jnp.asarray(target, jnp.float64), shape).reshape(int(np.prod(shape)))
    params = jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float64), route.params)
    flat, subnormal = raised(flat) if verb == "epsilon" else (flat, False)  # subnormal deltas: as in `_evaluate`
    lower, upper = route.traced[verb](params, flat)
    upper = jnp.where(subnormal, jnp.inf, upper)
    return lower.reshape(shape), upper.reshape(shape)
