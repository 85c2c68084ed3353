"""The verbs: validate, choose the route, enter float64, call the kernels. Written once for every mechanism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.bounds import Bounds
from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.precision import BackendError, plain_compilation_is_sound, platform
from jaxdp.routes import Route, choose_route

_X64_SENTENCE = (
    "jaxdp computes in float64: inside jit, vmap or grad turn x64 on (JAX_ENABLE_X64=1 or `with "
    "jax.enable_x64(True):`), or call the verb on concrete numbers outside the transformation."
)


def delta(mechanism: Mechanism, epsilon: Any, *, relation: str | None = None) -> Any:
    """Smallest certified delta at ``epsilon``: never below the truth.

    mechanism: any jaxdp mechanism; leaves may be arrays. epsilon: real, any sign, +-inf allowed, any
    shape; broadcasts with the mechanism's leaves. relation: see `epsilon`.
    Returns NumPy float64 of the broadcast shape (a traced array under jit, vmap, grad with x64 on), in
    [0, 1]; 1 where nothing can be certified. Raises ValueError, TypeError, UnsupportedMechanismError.
    """
    return _run(mechanism, "epsilon", epsilon, relation, "delta").upper


def epsilon(mechanism: Mechanism, delta: Any, *, relation: str | None = None) -> Any:
    """Smallest certified epsilon >= 0 at ``delta``: never below the truth.

    mechanism: any jaxdp mechanism; leaves may be arrays. delta: in [0, 1], any shape; broadcasts.
    relation: "add", "remove", "add_or_remove" (the larger of the two, each composed on its own),
    "replace_one", or None for the mechanism's natural relation.
    Returns NumPy float64 of the broadcast shape (a traced array under jit, vmap, grad with x64 on);
    inf where nothing can be certified. Raises ValueError, TypeError, UnsupportedMechanismError.
    """
    return _run(mechanism, "delta", delta, relation, "epsilon").upper


def delta_bounds(mechanism: Mechanism, epsilon: Any, *, relation: str | None = None) -> Bounds:
    """Certified Bounds(lower, upper) of delta at ``epsilon``; arguments as for `delta`."""
    return _run(mechanism, "epsilon", epsilon, relation, "delta")


def epsilon_bounds(mechanism: Mechanism, delta: Any, *, relation: str | None = None) -> Bounds:
    """Certified Bounds(lower, upper) of epsilon at ``delta``; arguments as for `epsilon`."""
    return _run(mechanism, "delta", delta, relation, "epsilon")


def check_mechanism(mechanism: Any) -> None:
    """TypeError unless it is a mechanism; ValueError for a bad concrete field."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"mechanism must be a jaxdp mechanism (such as jaxdp.Gaussian), got {type(mechanism).__name__}."
        )
    if not validate.is_traced(mechanism):
        mechanism.validate()


def check_trace() -> None:
    """One clear sentence when a verb is traced with x64 off."""
    if not jax.config.jax_enable_x64:
        raise RuntimeError(_X64_SENTENCE)
    where = platform()
    if not plain_compilation_is_sound(where):
        raise BackendError(
            f"under your own jit this backend ({where!r}, jaxlib {jax.lib.__version__}) sums log1p wrongly; call the verb "
            "outside the transformation, where it is compiled safely, or install another jaxlib release."
        )


def check_target(name: str, value: Any) -> Any:
    """The target of a verb: a concrete float64 array in its allowed set, or the tracer itself."""
    if validate.is_traced(value):
        return value
    if name == "delta":
        return validate.probability("delta", value)
    array = validate.real_array(name, value)
    validate.reject(name, array, np.isnan(array), "a real number, inf or -inf")
    return array


def _run(mechanism: Mechanism, name: str, target: Any, relation: str | None, verb: str) -> Bounds:
    check_mechanism(mechanism)
    target = check_target(name, target)
    shape = validate.broadcast(mechanism=np.empty(batch_shape(mechanism)), **{name: target})
    results = [
        _evaluate(choose_route(mechanism, direction, shape), verb, target, shape)
        for direction in mechanism.directions(relation)
    ]
    lower, upper = results[0]
    for more_lower, more_upper in results[1:]:
        xp = jnp if validate.is_traced(lower, upper, more_lower, more_upper) else np
        lower, upper = xp.maximum(lower, more_lower), xp.maximum(upper, more_upper)
    return Bounds(lower, upper)


def _evaluate(route: Route, verb: str, target: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    size = int(np.prod(shape))
    if validate.is_traced(route.params, target):
        check_trace()
        flat = jnp.broadcast_to(jnp.asarray(target, jnp.float64), shape).reshape(size)
        params = jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float64), route.params)
        point: Callable = route.traced_epsilon if verb == "epsilon" else route.traced_delta
        lower, upper = jax.vmap(point)(params, flat)
        return lower.reshape(shape), upper.reshape(shape)
    flat = np.broadcast_to(target, shape).reshape(size)
    solve = route.epsilon if verb == "epsilon" else route.delta
    lower, upper = solve(route.params, flat)
    vacuous = np.inf if verb == "epsilon" else 1.0
    lower = np.where(np.isnan(lower), 0.0, lower)
    upper = np.where(np.isnan(upper), vacuous, upper)
    return lower.reshape(shape)[()], upper.reshape(shape)[()]
