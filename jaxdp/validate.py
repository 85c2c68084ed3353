"""Argument checks at the door: one sentence naming the argument, the value and what is allowed."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import numpy as np

SMALLEST = float(np.finfo(np.float64).tiny)
"""The smallest normal number: XLA takes what is closer to 0 for 0."""


def is_traced(*trees: Any) -> bool:
    """True when any leaf is an abstract value of a surrounding jit, vmap or grad."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(trees))


def real_array(name: str, value: Any) -> np.ndarray:
    """The argument as a float64 array; TypeError unless it is made of real numbers."""
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{name} must be a real number or an array of them, got {value!r}.")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be a rectangular array of real numbers: {error}.") from error
    if array.dtype == object and all(isinstance(v, numbers.Real) for v in array.ravel()):
        array = array.astype(np.float64)
    if (
        array.dtype == bool
        or not (np.issubdtype(array.dtype, np.number) or str(array.dtype) == "bfloat16")
        or np.issubdtype(array.dtype, np.complexfloating)
    ):
        raise TypeError(f"{name} must be real, got {value!r} of dtype {array.dtype}.")
    return array.astype(np.float64)


def reject(name: str, array: np.ndarray, bad: np.ndarray, allowed: str, remedy: str = "") -> None:
    """ValueError naming the first bad value, unless there is none."""
    bad = np.asarray(bad)
    if bad.any():
        value = np.asarray(array)[bad].ravel()[0] if np.ndim(array) else np.asarray(array)[()]
        raise ValueError(f"{name} must be {allowed}, got {value!s}.{' ' + remedy if remedy else ''}")


def positive(name: str, value: Any, remedy: str = "") -> np.ndarray:
    """The argument as finite float64 numbers > 0."""
    array = real_array(name, value)
    reject(name, array, ~(np.isfinite(array) & (array > 0)), "finite and > 0", remedy)
    return array


def nonnegative(name: str, value: Any, remedy: str = "") -> np.ndarray:
    """The argument as finite float64 numbers >= 0."""
    array = real_array(name, value)
    reject(name, array, ~(np.isfinite(array) & (array >= 0)), "finite and >= 0", remedy)
    return array


def probability(name: str, value: Any, remedy: str = "") -> np.ndarray:
    """The argument as float64 numbers in [0, 1]."""
    array = real_array(name, value)
    reject(name, array, ~((array >= 0) & (array <= 1)), "in [0, 1]", remedy)
    return array


def integer(name: str, value: Any, minimum: int, remedy: str = "") -> np.ndarray:
    """A float64 array of whole numbers >= minimum."""
    array = real_array(name, value)
    whole = np.isfinite(array) & (array == np.floor(array)) & (array >= minimum)
    reject(name, array, ~whole, f"a whole number >= {minimum}", remedy)
    return array


def choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """The argument itself, one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
    return value


def broadcast(**arrays: Any) -> tuple[int, ...]:
    """The common shape of named arrays; ValueError naming them when there is none."""
    try:
        return np.broadcast_shapes(*(np.shape(a) for a in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {np.shape(a)}" for name, a in arrays.items())
        raise ValueError(f"shapes do not broadcast: {shapes}. Add axes of length 1.") from None
