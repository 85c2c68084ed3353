"""Settings: a number, or a public function of the step like the schedules of optax."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE_OR_INFINITE, OPEN_UNIT, Domain

# Far inside the range of float32: noise of std 1e-37 mostly underflows to 0, gradients of 1e37 overflow in a sum.
CLIP_NORM = Domain(lambda x: (x >= 1e-20) & (x <= 1e20), "between 1e-20 and 1e20")
Setting: TypeAlias = float | Callable[[Any], Any]
"""A number, or a function of the int32 step that returns one number and that jit can trace."""

MOST_STEPS = 2**24
"""Largest number of steps with a schedule: float32, in which schedules compute, is exact up to this step number."""

SLACK = 2.0**-20
"""Relative margin that training adds, because a schedule's value in a compiled step may differ from the value on the
host, which is accounted for: eight float32 roundings in the schedule, the rest for what is computed from its value. A
plain number is rounded to float32 too before it is used."""

CHECKED_STEPS = 1024
"""Number of steps of a schedule that are checked at construction."""

_BLOCK = 2**14


def values(name: str, setting: Setting, count: int, domain: Domain) -> np.ndarray:
    """The setting at steps 0..count-1, (count,) float64, as JAX computes it outside of jit.

    Raises TypeError for a function that jit cannot trace or that returns no real number; ValueError for an array
    instead of one number, for a value outside the domain, and for a schedule with count > MOST_STEPS.
    """
    if not callable(setting):
        return np.full(count, validate.one(name, setting, domain, "A function of the step is allowed, too."))
    if count > MOST_STEPS:
        raise ValueError(f"steps must be at most {MOST_STEPS} with {name} a function of the step, got {count}.")
    evaluate = jax.vmap(lambda step: jnp.asarray(setting(step)))
    steps = np.arange(max(count, 1), dtype=np.int32)
    steps = np.pad(steps, (0, -steps.size % _BLOCK), "edge")  # whole blocks, so that a new count compiles nothing
    try:
        blocks = [evaluate(block) for block in steps.reshape(-1, _BLOCK)]
    except jax.errors.JAXTypeError:
        raise TypeError(
            f"{name} must be a function of the step that jit can trace, got {setting!r}. Use jnp.where in place of if, "
            "or a schedule of optax."
        ) from None
    if blocks[0].ndim != 1:
        shape = blocks[0].shape[1:]
        raise ValueError(f"{name} must be a function of the step that returns one number, got shape {shape}.")
    found = validate.real_array(name, np.concatenate(blocks))[:count]
    bad = ~domain.contains(found)
    validate.reject(name, found, bad, domain.allowed, f"This is its value at step {np.argmax(bad)}.")
    return found


def as_numbers(record: Any, **domains: Domain) -> None:
    """Replace fields of a frozen record that are not None by Python numbers; ValueError unless each is in its domain.

    NumPy and JAX scalars would wrap or round in arithmetic with Python numbers.
    """
    for name, domain in domains.items():
        if getattr(record, name) is not None:
            number = validate.one(name, getattr(record, name), domain)
            object.__setattr__(record, name, int(number) if domain.whole else number)


def at(setting: Setting, step: Any) -> Any:
    """The setting in a step: the number itself, or the schedule's value as a float32 JAX scalar."""
    if not callable(setting):
        return setting
    return jnp.asarray(setting(jnp.asarray(step, jnp.int32))).astype(jnp.float32)


def check_budget(epsilon: Any, delta: Any) -> None:
    """ValueError unless epsilon >= 0 and 0 < delta < 1, both single numbers."""
    validate.one("epsilon", epsilon, NONNEGATIVE_OR_INFINITE)
    validate.one("delta", delta, OPEN_UNIT)


def scaled(setting: Setting, factor: float) -> Setting:
    """The setting multiplied by a factor, in every step."""
    return (lambda step: factor * setting(step)) if callable(setting) else float(setting) * factor
