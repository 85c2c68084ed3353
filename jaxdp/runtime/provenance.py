"""A record of the verbs that were called and their mechanisms, stored beside the numbers of a sweep or a report."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

_OBSERVED: contextvars.ContextVar[list[dict[str, str]] | None] = contextvars.ContextVar("observed", default=None)


def note(verb: str, mechanism: Any, relation: str) -> None:
    """Add one call of a verb to the list of `observe`; does nothing outside of it."""
    calls = _OBSERVED.get()
    if calls is None:
        return
    call = {"verb": verb, "mechanism": type(mechanism).__name__, "relation": relation}
    rounds = list(_shuffled(mechanism))
    for key, values in (
        ("bound", [each.chosen_bound() for each in rounds]),
        ("randomizer", [type(each.randomizer).__name__ for each in rounds]),
    ):
        if values:
            call[key] = ", ".join(dict.fromkeys(values))
    calls.append(call)


def _shuffled(value: Any) -> Iterator[Any]:
    """The shuffled rounds in a mechanism, wherever they stand inside compositions."""
    if hasattr(value, "chosen_bound"):
        yield value
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _shuffled(getattr(value, each.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _shuffled(part)


@contextlib.contextmanager
def observe() -> Iterator[list[dict[str, str]]]:
    """The list of verb calls made inside the block, in this thread."""
    calls: list[dict[str, str]] = []
    token = _OBSERVED.set(calls)
    try:
        yield calls
    finally:
        _OBSERVED.reset(token)


def summary(calls: list[dict[str, str]]) -> dict[str, str]:
    """One attribute per key, the distinct values joined by commas in the order of first use."""
    keys = dict.fromkeys(key for call in calls for key in call)
    parts = {key: [part for call in calls for part in call.get(key, "").split(", ") if part] for key in keys}
    return {key: ", ".join(dict.fromkeys(values)) for key, values in parts.items()}
