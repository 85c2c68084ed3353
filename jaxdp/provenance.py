"""What was accounted: verbs note their mechanism here, so that a stored number can say where it is from."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

_OBSERVED: contextvars.ContextVar[list[dict[str, str]] | None] = contextvars.ContextVar("observed", default=None)


def note(verb: str, mechanism: Any, relation: str) -> None:
    """Record one call of a verb for whoever observes this context; free when nobody does."""
    calls = _OBSERVED.get()
    if calls is None:
        return
    call = {"verb": verb, "mechanism": type(mechanism).__name__, "relation": relation}
    bound = getattr(mechanism, "bound", None)
    calls.append(call | ({"bound": str(bound)} if bound is not None else {}))


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
    return {key: ", ".join(dict.fromkeys(call[key] for call in calls if key in call)) for key in keys}
