"""One-point formulas as public functions: check and broadcast arguments, compute in float64, return NumPy or trace."""

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
"""A Renyi order at which a bound linear in the order is evaluated."""


class Rule(NamedTuple):
    """A condition on argument ``name`` that involves other arguments; ``holds`` takes all of them by name."""

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
    """Decorator: the formula of one point, written for scalars with ``xp``, becomes a public function of arrays.

    Concrete arguments are checked and broadcast; the result is computed for one float64 batch of points and returned as
    NumPy. If an argument is traced, the formula is traced. Then ``vacuous`` (one number, or one per number of the
    result) replaces the result of a point that is outside a domain or breaks a rule. It also replaces every NaN.
    working_set, absolute: as for `Kernel`; by default numbers of size 1 may cancel to nearly 0.
    """

    def decorate(point: F) -> F:
        signature = inspect.signature(point)
        names = list(signature.parameters)

        @functools.wraps(point)
        def one_point(*values: Any) -> Any:
            """The formula at one point. Under a trace, flags follow the arguments: whether each is in its domain."""
            numbers, inside = dict(zip(names, values, strict=False)), values[len(names) :]
            bad = ~jnp.stack([*inside, *(rule.holds(**numbers) for rule in rules)]).all() if inside else False
            return unless(bad, point(**numbers), vacuous)

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
            return _batched(kernel, *numbers.values())

        return public  # type: ignore[return-value]  # `wraps` copies the signature

    return decorate


def unless(bad: Any, made: Any, vacuous: Any) -> Any:
    """The pytree ``made`` with ``vacuous`` in place of NaN, and everywhere that ``bad`` is true."""
    xp = jnp if validate.is_traced(made, bad) else np
    leaves, tree = jax.tree.flatten(made)
    worst = np.broadcast_to(jax.tree.leaves(vacuous), len(leaves))
    values = (xp.where(bad | xp.isnan(x), w, x)[()] for x, w in zip(leaves, worst, strict=True))
    return jax.tree.unflatten(tree, values)


def checked(**arguments: tuple[Domain, Any]) -> list[Any]:
    """The checked values, in order, of arguments name=(domain, value). A traced value outside its domain is NaN.

    ValueError if a concrete value is outside its domain or if the shapes do not broadcast.
    """
    if validate.is_traced(arguments):
        require_x64()
    values = {}
    for name, (domain, value) in arguments.items():
        number, good = validate.confined(name, value, domain)
        values[name] = jnp.where(good, number, jnp.nan) if validate.is_traced(value) else number
    validate.broadcast(**values)
    return list(values.values())


def flat_rows(array: Any, own: int, shape: tuple[int, ...]) -> Any:
    """The array with all axes but the last ``own`` broadcast to ``shape`` and flattened to one batch axis."""
    xp = jnp if validate.is_traced(array) else np
    event = np.shape(array)[np.ndim(array) - own :]
    return xp.broadcast_to(array, (*shape, *event)).reshape((math.prod(shape), *event))


def batched(function: Callable, *arrays: Any, own: tuple[int, ...] = ()) -> Any:
    """`function` at the broadcast of concrete `arrays`: it gets one flat batch, its results get the broadcast shape.

    own: for each array the number of last axes that belong to one point and do not broadcast; default 0.
    """
    validate.concrete("every argument", *arrays)
    return _batched(function, *arrays, own=own)


def _batched(function: Callable, *arrays: Any, own: tuple[int, ...] = ()) -> Any:
    pairs = list(zip(arrays, own or (0,) * len(arrays), strict=True))
    shape = np.broadcast_shapes(*(np.shape(array)[: np.ndim(array) - own_axes] for array, own_axes in pairs))
    values = function(*(flat_rows(array, own_axes, shape) for array, own_axes in pairs))
    return jax.tree.map(lambda value: value.reshape((*shape, *value.shape[1:]))[()], values)


def at_points(kernel: Kernel, *arguments: Any, own: tuple[int, ...] = (), **static: Any) -> Any:
    """`kernel` at the broadcast of arguments that are already checked; NumPy arrays. own: as for `batched`.

    If an argument is traced, the kernel's one-point function is traced; it must handle NaN (see `checked`) itself.
    """
    if not validate.is_traced(arguments):
        return _batched(functools.partial(kernel, **static), *(np.asarray(a, np.float64) for a in arguments), own=own)
    require_x64()
    with jax.numpy_rank_promotion("allow"):
        point = jax.vmap(_flat_outside(functools.partial(kernel.point, **static)))
        return _batched(point, *(jnp.asarray(a, jnp.float64) for a in arguments), own=own)


def _flat_outside(point: Callable) -> Callable:
    """``point`` with zero derivatives where an argument is NaN, which marks a value outside its domain."""

    def flat(*numbers: Any) -> Any:
        bad = jnp.stack([jnp.isnan(number).any() for number in numbers]).any()
        return point(*(jnp.where(bad, jax.lax.stop_gradient(number), number) for number in numbers))

    return flat
