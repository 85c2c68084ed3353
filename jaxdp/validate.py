"""Checks of arguments. Each error is a sentence that names the argument, its value and what is allowed."""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.domains import NONNEGATIVE, POSITIVE, PROBABILITY, Domain, whole
from jaxdp.typing import Array


def is_traced(*trees: Any) -> bool:
    """Whether any leaf is a tracer of a surrounding jit, vmap or grad."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def concrete(name: str, *values: Any) -> None:
    """TypeError if a value is traced; for functions that compute on the host."""
    if is_traced(values):
        raise TypeError(f"{name} must be concrete, got a traced array: call this outside jit, vmap and grad.")


def real_array(name: str, value: Any) -> np.ndarray:
    """The argument as a float64 array; TypeError unless it consists of real numbers."""
    concrete(name, value)
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{name} must be a real number or an array of them, got {value!r}.")
    array = rectangular(name, value)
    if array.dtype == object and all(isinstance(v, numbers.Real) for v in array.ravel()):
        try:
            array = array.astype(np.float64)
        except OverflowError:
            raise ValueError(f"{name} must be at most 1.8e308, got a whole number beyond that.") from None
    if array.dtype.kind not in "iuf" and str(array.dtype) != "bfloat16":
        raise TypeError(f"{name} must be real, got {value!r} of dtype {array.dtype}.")
    return array.astype(np.float64)


def rectangular(name: str, value: Any) -> np.ndarray:
    """The argument as an array; ValueError for nested lists of different lengths, TypeError for a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, got a masked one: select the numbers that count.")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be a rectangular array of real numbers: {error}.") from error


def function(name: str, value: Any, returns: str) -> None:
    """TypeError unless the argument is callable. returns: what its result should be, for the error message."""
    if not callable(value):
        raise TypeError(f"{name} must be a function that returns {returns}, got {value!r}.")


def reject(name: str, array: np.ndarray, bad: Array, allowed: str, remedy: str = "", first: int = 0) -> None:
    """ValueError for the first value marked in ``bad``. first: index, in the argument, of the first entry of array."""
    if np.any(bad):
        place = tuple(map(int, np.argwhere(np.broadcast_to(bad, np.shape(array)))[0]))
        where = f" at index {[*place[:-1], place[-1] + first]}" if np.size(array) + first > 1 else ""
        raise ValueError(
            f"{name} must be {allowed}, got {np.asarray(array)[place]!s}{where}.{' ' + remedy if remedy else ''}"
        )


def confined(name: str, value: Any, domain: Domain, dtype: Any = np.float64) -> tuple[Any, Any]:
    """(the argument as a float64 array inside the domain, whether each entry was inside from the start).

    A concrete argument is returned with True, or raises ValueError. In a traced argument, entries outside the domain
    are replaced by ``domain.harmless``. dtype: np.complex128 if the argument may be complex.
    """
    if not is_traced(value):
        return inside(name, value, domain, dtype), True
    given = jnp.asarray(value)
    if given.dtype == bool or (dtype is np.float64 and jnp.iscomplexobj(given)):
        raise TypeError(f"{name} must be real, got a traced array of dtype {given.dtype}.")
    number = given.astype(dtype)
    good = domain.contains(number)
    if jnp.issubdtype(given.dtype, jnp.floating) and given.dtype != number.dtype:
        # The compiled conversion flushes subnormal float16 and float32 numbers to 0: they count as outside.
        good = good & ((number != 0) | (given.view(f"int{8 * given.dtype.itemsize}") * 2 == 0))
    return jnp.where(good, number, domain.harmless), good


def inside(name: str, value: Any, domain: Domain, dtype: Any = np.float64) -> np.ndarray:
    """The argument as a float64 (or complex128) array; ValueError if an entry lies outside the domain."""
    array = real_array(name, value) if dtype is np.float64 else np.asarray(value, dtype)
    with np.errstate(invalid="ignore"):
        good = domain.contains(array)
        # whether rounding would help: np.logspace and divisions give fractions
        fractions = domain.whole and domain.contains(np.rint(array)).all()
    reject(name, array, ~good, domain.allowed, domain.remedy or ("Round it." if fractions else ""))
    return array


positive = functools.partial(inside, domain=POSITIVE)
nonnegative = functools.partial(inside, domain=NONNEGATIVE)
probability = functools.partial(inside, domain=PROBABILITY)


def integer(name: str, value: Any, minimum: int) -> np.ndarray:
    """The argument as a float64 array of whole numbers >= minimum."""
    return inside(name, value, whole(minimum))


def all_inside(**arguments: tuple[Domain, Any]) -> list[np.ndarray]:
    """The concrete arguments name=(domain, value) as float64 arrays, in order; ValueError unless they broadcast."""
    arrays = {name: inside(name, value, domain) for name, (domain, value) in arguments.items()}
    broadcast(**arrays)
    return list(arrays.values())


def one(name: str, value: Any, domain: Domain, remedy: str = "") -> float:
    """The argument as a float; ValueError unless it is one number inside the domain."""
    array = inside(name, value, domain)
    if array.ndim:
        advice = f" {remedy}" if remedy else ""
        raise ValueError(f"{name} must be one number, got an array of shape {array.shape}.{advice}")
    return float(array)


def count(name: str, value: Any, minimum: int) -> int:
    """The argument as an int; ValueError unless it is one whole number >= minimum."""
    return int(one(name, value, whole(minimum)))


def equal_lists(**arrays: np.ndarray) -> None:
    """ValueError unless the named arrays are 1-D, equally long and not empty."""
    shapes = [array.shape for array in arrays.values()]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1 or shapes[0] == (0,):
        *first, last = arrays
        found = f"{', '.join(map(str, shapes[:-1]))} and {shapes[-1]}"
        raise ValueError(f"{', '.join(first)} and {last} must be equally long lists with entries, got shapes {found}.")


def choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """The argument itself; ValueError unless it is one of the allowed values."""
    if np.ndim(value) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
    return value


def broadcast(**arrays: Any) -> tuple[int, ...]:
    """The broadcast shape of the named arrays; ValueError that names them if they do not broadcast."""
    try:
        return np.broadcast_shapes(*(np.shape(a) for a in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {np.shape(a)}" for name, a in arrays.items() if np.ndim(a))
        raise ValueError(f"shapes do not broadcast: {shapes}. Add axes of length 1.") from None
