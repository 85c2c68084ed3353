"""One-point formulas as public functions: check, broadcast, compute in float64, hand back NumPy or a trace."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import Domain
from jaxdp.runtime.backend import require_x64
from jaxdp.runtime.precision import Kernel, patience

F = TypeVar("F", bound=Callable[..., Any])

ORDER = Domain(lambda x: (x > 1) & (x < np.inf), "finite and > 1", harmless=2.0)
"""A Renyi order."""
LINEAR_ORDER = Domain(lambda x: (x >= 1) & (x < np.inf), "finite and >= 1", harmless=2.0)
"""An order of a bound that is linear in the order."""


class Rule(NamedTuple):
    """What an argument has to be to the others: ``holds`` takes all of them by name."""

    name: str
    holds: Callable[..., Any]
    allowed: str
    remedy: str = ""


def theorem(
    *rules: Rule,
    vacuous: Any = np.inf,
    working_set: int = 64,
    absolute: float | Callable[..., float] = 1e-12,
    **domains: Domain,
) -> Callable[[F], F]:
    """Decorator: the formula of one point, written for scalars with ``xp``, becomes a public function.

    Its arguments are numbers in the given domains. Concrete ones are checked and broadcast, the formula is computed at
    all points as one float64 batch, and NumPy comes out. Where one is traced, the formula is traced, and a point
    outside a domain or against a rule gives ``vacuous`` (one number, or one for each number of the result). So does
    NaN. working_set: float64 numbers alive per point. absolute: as of `Kernel`; a difference of numbers of size 1 may
    be next to 0.
    """

    def decorate(point: F) -> F:
        signature = inspect.signature(point)
        names = list(signature.parameters)

        @functools.wraps(point)
        def one_point(*values: Any) -> Any:
            """The formula of numbers, followed where they are traced by whether each is inside its domain."""
            numbers, inside = dict(zip(names, values, strict=False)), values[len(names) :]
            good = [*inside, *(rule.holds(**numbers) for rule in rules)]
            return unless(~jnp.stack(good).all() if inside else False, point(**numbers), vacuous)

        by_numpy = patience(max(2**15 // working_set, 1), max(2**22 // working_set, 1))
        at_once = min(4096, 2**18 // working_set)
        kernel = Kernel(one_point, working_set=working_set, by_numpy=by_numpy, at_once=at_once, absolute=absolute)

        @functools.wraps(point)
        def public(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            traced = validate.is_traced(given.arguments)
            if traced:
                require_x64()
            confined = {name: validate.confined(name, value, domains[name]) for name, value in given.arguments.items()}
            numbers = {name: number for name, (number, _) in confined.items()}
            validate.broadcast(**numbers)
            if traced:
                return _batched(jax.vmap(one_point), *numbers.values(), *(inside for _, inside in confined.values()))
            for name, holds, allowed, remedy in rules:
                bad = ~holds(**numbers)
                validate.reject(name, np.broadcast_to(numbers[name], np.shape(bad)), bad, allowed, remedy)
            return batched(kernel, *numbers.values())

        return public  # type: ignore[return-value]  # of the signature that `wraps` copies

    return decorate


def unless(bad: Any, made: Any, vacuous: Any) -> Any:
    """The numbers of a tree, ``vacuous`` where they are NaN or ``bad``."""
    xp = jnp if validate.is_traced(made, bad) else np
    leaves, tree = jax.tree.flatten(made)
    worst = np.broadcast_to(jax.tree.leaves(vacuous), len(leaves))
    kept = (xp.where(bad | xp.isnan(x), w, x)[()] for x, w in zip(leaves, worst, strict=True))
    return jax.tree.unflatten(tree, kept)


def checked(**arguments: tuple[Domain, Any]) -> list[Any]:
    """Arguments in order, each given as (domain, value), that broadcast; a traced one is NaN outside its domain."""
    if validate.is_traced(arguments):
        require_x64()
    values = {}
    for name, (domain, value) in arguments.items():
        number, good = validate.confined(name, value, domain)
        values[name] = jnp.where(good, number, jnp.nan) if validate.is_traced(value) else number
    validate.broadcast(**values)
    return list(values.values())


def flat_rows(array: Any, own: int, shape: tuple[int, ...]) -> Any:
    """The array broadcast to ``shape`` and flattened to one batch axis, before its last ``own`` axes."""
    xp = jnp if validate.is_traced(array) else np
    event = np.shape(array)[np.ndim(array) - own :]
    return xp.broadcast_to(array, (*shape, *event)).reshape((math.prod(shape), *event))


def batched(function: Callable, *arrays: Any, own: tuple[int, ...] = ()) -> Any:
    """`function` of flat concrete arrays of one length, at the broadcast of `arrays`; results in the broadcast shape.

    own: for each array the number of its last axes that belong to one point, 0 if not given.
    """
    validate.concrete("every number", *arrays)
    return _batched(function, *arrays, own=own)


def _batched(function: Callable, *arrays: Any, own: tuple[int, ...] = ()) -> Any:
    axes = list(zip(arrays, own or (0,) * len(arrays), strict=True))
    shape = np.broadcast_shapes(*(np.shape(array)[: np.ndim(array) - number] for array, number in axes))
    values = function(*(flat_rows(array, number, shape) for array, number in axes))
    return jax.tree.map(lambda value: value.reshape((*shape, *value.shape[1:]))[()], values)


def at_points(kernel: Kernel, *arguments: Any, own: tuple[int, ...] = (), **static: Any) -> Any:
    """`kernel` at the broadcast of checked arguments, as `batched`: NumPy out.

    Where an argument is traced, the kernel's one-point function is traced, which masks values outside its domain.
    """
    if not validate.is_traced(arguments):
        return batched(functools.partial(kernel, **static), *(np.asarray(a, np.float64) for a in arguments), own=own)
    require_x64()
    with jax.numpy_rank_promotion("allow"):
        point = jax.vmap(_flat_outside(functools.partial(kernel.point, **static)))
        return _batched(point, *(jnp.asarray(a, jnp.float64) for a in arguments), own=own)


def _flat_outside(point: Callable) -> Callable:
    """The function with derivatives 0 where an argument is NaN, as one outside its domain is."""

    def flat(*numbers: Any) -> Any:
        bad = jnp.stack([jnp.isnan(number).any() for number in numbers]).any()
        return point(*(jnp.where(bad, jax.lax.stop_gradient(number), number) for number in numbers))

    return flat
