"""Where a number may lie. Each field of a record names its domain once, where it is declared.

One declaration has two uses. A concrete number outside is refused with a ValueError that names the field, the number,
the allowed set and the remedy. A traced number has no value while the program is built: there the test of the domain
becomes a mask. A number outside is replaced by ``harmless`` before anything is computed from it, and the answer of its
row is the vacuous bound (delta 1, everything else infinite).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.typing import Array

SMALLEST = float(np.finfo(np.float64).tiny)
"""The smallest normal number: XLA takes what is closer to 0 for 0."""

NEXT_TO_ZERO = 1e-300
"""Stands for 0 where a logarithm or a quotient is taken."""

LEAST_DELTA = 2.3e-308
"""Least upper bound of a positive delta: one that underflows must not read 0, which means pure DP."""

SMALLEST_MU = 1e-150
"""A positive Gaussian-DP parameter below it stands for this one: its square would underflow."""


@dataclasses.dataclass(frozen=True)
class Domain:
    """A set of real numbers.

    contains: float64 array -> booleans of its shape, False for NaN; one expression for NumPy and for traced arrays.
    allowed: the set in words, to follow "must be".
    harmless: a number inside, at which every formula and its derivative are finite.
    remedy: a sentence for the error message.
    whole: the set is of whole numbers.

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
ABOVE_ONE = Domain(lambda x: x > 1, "> 1 (inf allowed)", harmless=2.0)
BELOW_INFINITY = Domain(lambda x: x < np.inf, "a real number or -inf")
NOT_NAN = Domain(lambda x: x == x, "a real number, inf or -inf")


def whole(minimum: int) -> Domain:
    """Whole numbers from ``minimum`` on.

    >>> jaxdp.domains.whole(1).allowed
    'a whole number >= 1'
    """
    inside = lambda x: (x >= minimum) & (x < np.inf) & (x % 1 == 0)  # noqa: E731
    return Domain(inside, f"a whole number >= {minimum}", minimum + 1.0, whole=True)


def _bits(x: Any) -> Any:
    """The bits of |x|, which have the order of the numbers; compiled comparisons take a subnormal number for 0."""
    return x.view(np.int64) & np.int64(2**63 - 1)


_SMALL, _LARGE, _INFINITE = (int(_bits(np.float64(x))) for x in (SMALLEST, 1 / SMALLEST, np.inf))


def _computable(x: Any) -> Array:
    bits = _bits(x)
    return (bits == 0) | ((bits >= _SMALL) & (bits <= _LARGE)) | (bits >= _INFINITE)


COMPUTABLE = Domain(
    _computable,
    f"0 or between {SMALLEST} and {1 / SMALLEST:.4g} in size",
    remedy="Compiled arithmetic takes what is smaller, or the reciprocal of what is larger, for 0.",
)
"""What every field must be in addition to its own domain."""


def field(domain: Domain, *, remedy: str = "", **kwargs: Any) -> Any:
    """A dataclass field whose numbers lie in the domain; keyword arguments as for `dataclasses.field`.

    >>> @jaxdp.record
    ... class Noise(jaxdp.Mechanism):
    ...     scale: jaxdp.typing.RealField = jaxdp.domains.field(jaxdp.domains.POSITIVE, remedy="Add noise.")
    >>> Noise(scale=0.0).validate()
    Traceback (most recent call last):
    ValueError: scale must be finite and > 0, got 0.0. Add noise.
    """
    return dataclasses.field(metadata={"domain": dataclasses.replace(domain, remedy=remedy or domain.remedy)}, **kwargs)
