"""The result type of every certified computation: an interval that holds the truth."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """A certified enclosure: ``lower <= truth <= upper``, elementwise, same shapes and units."""

    lower: Any
    upper: Any
