"""Domains: the sets in which the numbers of a record must lie. Each field states its domain where it is declared.

A domain has two uses. A concrete number outside its domain raises a ValueError that names the field, the number, the
allowed set and a remedy. A traced number has no value while the program is built, so the test of the domain becomes a
mask: a number outside is replaced by ``harmless`` before any formula uses it, and the result of its row is the vacuous
bound (delta 1, every other quantity infinite).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.typing import Array

SMALLEST = float(np.finfo(np.float64).tiny)
"""Smallest positive normal float64. XLA flushes smaller (subnormal) numbers to 0."""

NEXT_TO_ZERO = 1e-300
"""Replaces 0 in the argument of a logarithm or in a divisor."""

LEAST_DELTA = 2.3e-308
"""Smallest number returned as upper bound of a positive delta. After an underflow, 0 would claim pure DP."""

SMALLEST_MU = 1e-150
"""A positive Gaussian-DP parameter below this number is replaced by it, because the square would underflow."""


@dataclasses.dataclass(frozen=True)
class Domain:
    """A set of real numbers.

    contains: float64 array -> booleans of its shape, False for NaN. It must work on NumPy and traced arrays.
    allowed: the set in words, to follow "must be" in an error message.
    harmless: a number in the set at which every formula and its derivative are finite.
    remedy: a sentence that ends the error message.
    whole: whether the set contains whole numbers only.

    >>> even = jaxdp.domains.Domain(lambda x: x % 2 == 0, "an even number", harmless=2.0)
    >>> even.contains(np.array([1.0, 2.0, np.nan]))
    array([False,  True, False])
    """

    contains: Callable[..., Array]
    allowed: str
    harmless: float = 1.0
    remedy: str = ""
    whole: bool = False


FINITE = Domain(lambda x: abs(x) < np.inf, "finite")
POSITIVE = Domain(lambda x: (x > 0) & (x < np.inf), "finite and > 0")
NOISE = dataclasses.replace(POSITIVE, remedy="Without noise there is no guarantee, and infinite noise is no release.")
NONNEGATIVE = Domain(lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
NONNEGATIVE_OR_INFINITE = Domain(lambda x: x >= 0, ">= 0 (inf allowed)")
PROBABILITY = Domain(lambda x: (x >= 0) & (x <= 1), "in [0, 1]", harmless=0.5)
RATE = dataclasses.replace(PROBABILITY, remedy="Divide the batch size by the number of records.")
OPEN_UNIT = Domain(lambda x: (x > 0) & (x < 1), "in (0, 1)", harmless=0.5)
ABOVE_ONE = Domain(lambda x: x > 1, "> 1 (inf allowed)", harmless=2.0)
BELOW_INFINITY = Domain(lambda x: x < np.inf, "a real number or -inf")
NOT_NAN = Domain(lambda x: x == x, "a real number, inf or -inf")


def whole(minimum: int) -> Domain:
    """The domain of the whole numbers >= ``minimum``.

    >>> jaxdp.domains.whole(1).allowed
    'a whole number >= 1'
    """
    inside = lambda x: (x >= minimum) & (x < np.inf) & (x % 1 == 0)  # noqa: E731
    return Domain(inside, f"a whole number >= {minimum}", minimum + 1.0, whole=True)


def _bits(x: Any) -> Any:
    """The bits of |x| as int64, ordered like |x|; compiled comparisons of floats treat subnormal numbers as 0."""
    return x.view(np.int64) & np.int64(2**63 - 1)


_SMALL, _LARGE, _INFINITE = (int(_bits(np.float64(x))) for x in (SMALLEST, 1 / SMALLEST, np.inf))


def _computable(x: Any) -> Array:
    bits = _bits(x)
    return (bits == 0) | ((bits >= _SMALL) & (bits <= _LARGE)) | (bits >= _INFINITE)


COMPUTABLE = Domain(
    _computable,
    f"0 or between {SMALLEST} and {1 / SMALLEST:.4g} in size",
    remedy="Compiled programs round smaller numbers, and the reciprocals of larger ones, to 0.",
)
"""The domain in which every numeric field must lie, in addition to the domain that the field states."""


def field(domain: Domain, *, remedy: str = "", **kwargs: Any) -> Any:
    """A dataclass field whose numbers must lie in the domain. remedy: replaces the domain's remedy, if given.

    Other keyword arguments are those of `dataclasses.field`.

    >>> @jaxdp.record
    ... class Noise(jaxdp.Mechanism):
    ...     scale: jaxdp.typing.RealField = jaxdp.domains.field(jaxdp.domains.POSITIVE, remedy="Add noise.")
    >>> Noise(scale=0.0).validate()
    Traceback (most recent call last):
    ValueError: scale must be finite and > 0, got 0.0. Add noise.
    """
    return dataclasses.field(metadata={"domain": dataclasses.replace(domain, remedy=remedy or domain.remedy)}, **kwargs)
