"""Argument checks shared by the shuffle theorems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxdp import validate
from jaxdp.runtime.formulas import checked, whole
from jaxdp.typing import Real


def reports(*, eps0: Real, n: Real, delta: Real, **others: tuple[Callable, Real]) -> list[Any]:
    """[eps0 >= 0, whole n >= 1, delta in [0, 1], *others], which broadcast; others are (check, value), by name."""
    return checked(eps0=(validate.nonnegative, eps0), n=(whole(1), n), delta=(validate.probability, delta), **others)
