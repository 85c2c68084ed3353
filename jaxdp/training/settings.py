"""Settings: one number, or a public function of the step like the schedules of optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate

Setting: TypeAlias = float | Callable[[Any], Any]
"""One number, or a function of the int32 step that returns one number and that jit can trace."""

MOST_STEPS = 2**24
"""Largest number of steps with a schedule: beyond it float32, in which schedules compute, does not hold all steps."""

SLACK = 2.0**-20
"""Relative difference of a schedule's value in a compiled step and on the host, where it is accounted for, that
training makes up for: eight roundings of float32 in the schedule, the rest in what is computed from it. A number, too,
is rounded to float32 before it is used."""

CHECKED_STEPS = 1024
"""How many steps of a schedule are checked at construction."""

_BLOCK = 2**14


def values(name: str, setting: Setting, count: int) -> np.ndarray:
    """The setting at steps 0..count-1, (count,) float64, as eager JAX computes it.

    Raises:
        TypeError: a function that jit cannot trace, or that returns no real number.
        ValueError: an array in place of one number; more steps than a schedule can be followed for.
    """
    if not callable(setting):
        number = validate.real_array(name, setting)
        if number.ndim:
            raise ValueError(f"{name} must be one number or a function of the step, got shape {number.shape}.")
        return np.full(count, float(number))
    if count > MOST_STEPS:
        raise ValueError(f"steps must be at most {MOST_STEPS} with {name} a function of the step, got {count}.")
    # blocks of one size: a new count compiles nothing
    found = [_block(name, setting, start) for start in range(0, count, _BLOCK)]
    return np.concatenate([np.zeros(0), *found])[:count]


def _block(name: str, setting: Callable[[Any], Any], start: int) -> np.ndarray:
    steps = jnp.arange(_BLOCK, dtype=jnp.int32) + start
    try:
        found = jax.vmap(lambda step: jnp.asarray(setting(step)))(steps)
    except jax.errors.JAXTypeError:
        raise TypeError(
            f"{name} must be a function of the step that jit can trace, got {setting!r}. Use jnp.where in place of if, "
            "or a schedule of optax."
        ) from None
    if found.shape != steps.shape:
        raise ValueError(f"{name} must be a function of the step that returns one number, got shape {found.shape[1:]}.")
    return validate.real_array(name, found)


def at(setting: Setting, step: Any) -> Any:
    """The setting in a step: the number itself, or the schedule's value as a float32 JAX scalar."""
    if not callable(setting):
        return setting
    return jnp.asarray(setting(jnp.asarray(step, jnp.int32))).astype(jnp.float32)
