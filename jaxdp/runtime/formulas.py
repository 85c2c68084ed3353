"""One-point formulas as public functions: check, broadcast, compute in float64, hand back NumPy or a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.runtime.precision import Kernel, require_x64


def checked(**arguments: tuple[Callable, Any]) -> list[Any]:
    """Arguments in order, each given as (check, value), that broadcast; a traced value is masked by the formula."""
    values = {name: v if validate.is_traced(v) else check(name, v) for name, (check, v) in arguments.items()}
    validate.broadcast(**values)
    return list(values.values())


def above_one(name: str, value: Any) -> np.ndarray:
    """A Renyi order: finite and > 1."""
    array = validate.real_array(name, value)
    validate.reject(name, array, ~(np.isfinite(array) & (array > 1)), "finite and > 1")
    return array


def at_least_one(name: str, value: Any) -> np.ndarray:
    """An order of a bound that is linear in the order: finite and >= 1."""
    array = validate.real_array(name, value)
    validate.reject(name, array, ~(np.isfinite(array) & (array >= 1)), "finite and >= 1")
    return array


def whole(minimum: int, remedy: str = "") -> Callable[[str, Any], np.ndarray]:
    """A check for `checked`: whole numbers >= minimum."""
    return lambda name, value: validate.integer(name, value, minimum, remedy)


def batched(function: Callable, *arrays: np.ndarray) -> Any:
    """`function` of flat arrays of one length, at the broadcast of `arrays`; results in the broadcast shape."""
    spread = np.broadcast_arrays(*arrays)
    shape = spread[0].shape
    values = function(*(array.reshape(-1) for array in spread))
    return jax.tree_util.tree_map(lambda value: np.asarray(value).reshape(shape)[()], values)


def at_points(kernel: Kernel, *arguments: Any, **static: Any) -> Any:
    """`kernel` at the broadcast of checked arguments: one batched call and NumPy out.

    Where an argument is traced, the kernel's one-point function is traced, which masks values outside its domain.
    """
    if validate.is_traced(arguments):
        require_x64()
        arrays = (jnp.asarray(argument, jnp.float64) for argument in arguments)
        return jnp.vectorize(lambda *point: kernel.point(*point, **static))(*arrays)
    return batched(lambda *flat: kernel(*flat, **static), *arguments)


class Formula:
    """A scalar function of scalars, made to broadcast. ``formula.point`` is the traceable function itself.

    valid: condition on the same scalars; where it fails under a trace the answer is `vacuous`, never NaN.
    """

    def __init__(self, point: Callable, valid: Callable | None, vacuous: float, working_set: int):
        self.point = point
        self._valid = valid
        self._vacuous = vacuous
        self._kernel = Kernel(self._guarded, (), working_set)

    def _guarded(self, *args: Any) -> Any:
        good = True if self._valid is None else self._valid(*args)
        return jax.tree_util.tree_map(
            lambda out: jnp.where(good & ~jnp.isnan(out), out, self._vacuous), self.point(*args)
        )

    def __call__(self, *args: Any) -> Any:
        """Value at broadcast arguments: NumPy float64, or a traced array inside an x64 trace."""
        return at_points(self._kernel, *args)


def formula(*, valid: Callable | None = None, vacuous: float = np.inf, working_set: int = 64) -> Callable:
    """Decorator: scalar jnp function -> `Formula`."""
    return lambda point: Formula(point, valid, vacuous, working_set)
