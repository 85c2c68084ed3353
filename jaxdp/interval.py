"""The result type of every certified computation: an interval that contains the true value."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

ArrayT = TypeVar("ArrayT", covariant=True)


class Bounds(NamedTuple, Generic[ArrayT]):
    """A certified enclosure, elementwise: ``lower <= truth <= upper``. Both sides have the same shape and unit.

    >>> bounds = jaxdp.epsilon_bounds(jaxdp.Laplace(1.0), delta=1e-5)
    >>> print(f"{bounds.lower:.4f} {bounds.upper:.4f}")
    1.0000 1.0000
    >>> lower, upper = bounds
    """

    lower: ArrayT
    upper: ArrayT
