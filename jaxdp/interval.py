"""The result type of every certified computation: an interval that holds the truth."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

ArrayT = TypeVar("ArrayT", covariant=True)


class Bounds(NamedTuple, Generic[ArrayT]):
    """A certified enclosure: ``lower <= truth <= upper``, elementwise, same shapes and units."""

    lower: ArrayT
    upper: ArrayT
