"""Numbers as typed: one, a list, or a range."""

from __future__ import annotations

import numpy as np

RANGE_HELP = (
    "RANGE is a number, a comma list (0.5,1,2), START:STOP:COUNT (linear) or START:STOP:COUNT:log. Whole-number "
    "options round the values of a range and drop duplicates. Tables, CSV and JSON write infinity and NaN as inf, -inf "
    "and nan (in JSON as strings, because it has no such numbers); options read the same words."
)


def parse_range(name: str, text: str, whole: bool = False) -> np.ndarray:
    """``a:b:count`` (linear), ``a:b:count:log``, or a comma list; whole values are rounded and made distinct."""
    try:
        values = np.concatenate([_piece(piece) for piece in text.split(",")])
    except ValueError:
        raise ValueError(f"{name} must be a number, a comma list or START:STOP:COUNT[:log], got {text!r}.") from None
    if whole and ":" in text:
        values = np.unique(np.rint(values))
    return values


def _piece(text: str) -> np.ndarray:
    parts = text.split(":")
    if len(parts) == 1:
        return np.array([float(text)])
    if len(parts) not in (3, 4):
        raise ValueError(text)
    start, stop, count = float(parts[0]), float(parts[1]), int(parts[2])
    if len(parts) == 3 and count >= 1:
        return np.linspace(start, stop, count)
    if parts[-1] == "log" and count >= 1 and start > 0 and stop > 0:
        values = np.geomspace(start, stop, count)
        values[0], values[-1] = start, stop if count > 1 else start
        return values
    raise ValueError(text)


def parse_bracket(text: str | None) -> tuple[float, float] | None:
    """``LOW:HIGH`` as two numbers."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise ValueError(f"bracket must be LOW:HIGH, got {text!r}.") from None
    return low, high
