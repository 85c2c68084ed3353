"""Notes on which verbs were called for which mechanisms, stored beside the numbers of a sweep or a report."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import everything
from jaxdp.mechanisms.shuffled import Shuffled

_MOST = 20  # largest number of distinct values that `summary` lists for one attribute
_OBSERVED: contextvars.ContextVar[list[dict[str, str]] | None] = contextvars.ContextVar("observed", default=None)


def note(verb: str, mechanism: Mechanism, relation: str, name: str, target: Any) -> None:
    """Add a call of a verb, and its target (argument ``name``), to the list of the `observe` block in force, if any."""
    calls = _OBSERVED.get()
    if calls is None:
        return
    parts = list(everything(mechanism))
    names = dict.fromkeys(type(each).__name__ for each in parts)
    call = {"verb": verb, "mechanism": ", ".join(names), "relation": relation}
    if isinstance(target, (np.generic, np.ndarray)) and target.ndim == 0:  # one number, not an axis of a grid
        call[name] = repr(target.item())
    rounds = [each for each in parts if isinstance(each, Shuffled)]
    if rounds:
        call["bound"] = ", ".join(dict.fromkeys(each.chosen_bound() for each in rounds))
        call["randomizer"] = ", ".join(dict.fromkeys(type(each.randomizer).__name__ for each in rounds))
    calls.append(call)


@contextlib.contextmanager
def observe() -> Iterator[list[dict[str, str]]]:
    """Context manager that gives a list; verb calls inside the block, in this thread, are added to the list."""
    calls: list[dict[str, str]] = []
    token = _OBSERVED.set(calls)
    try:
        yield calls
    finally:
        _OBSERVED.reset(token)


@contextlib.contextmanager
def within(verb: str) -> Iterator[None]:
    """Context manager: the verb calls inside the block are noted as one call, of ``verb``."""
    with observe() as calls:
        yield
    outer = _OBSERVED.get()
    if outer is not None and calls:
        outer.append(calls[0] | {"verb": verb})


def summary(calls: list[dict[str, str]]) -> dict[str, str]:
    """One attribute per key: the first 20 distinct values in order of first use, joined by commas, "..." for more."""
    keys = dict.fromkeys(key for call in calls for key in call)
    parts = {key: [part for call in calls for part in call.get(key, "").split(", ") if part] for key in keys}
    distinct = {key: list(dict.fromkeys(values)) for key, values in parts.items()}
    return {key: ", ".join([*each[:_MOST], *["..."] * (len(each) > _MOST)]) for key, each in distinct.items()}
