"""Field values and classes as Python source text."""

import sys

import jax
import numpy as np

from jaxdp import validate


def as_text(value: object) -> str:
    """A field's value as Python source; evaluating it with the builtins and jaxdp's names gives an equal value."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not validate.is_traced(value):
        value = np.asarray(value).tolist()
    if isinstance(value, float) and not np.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    return repr(value)


def public_name(cls: type) -> str:
    """The shortest dotted name of a class of jaxdp, relative to jaxdp; for a class from elsewhere its bare name."""
    parts = cls.__module__.split(".")
    for depth in range(1, len(parts) + 1 if parts[0] == "jaxdp" else 1):
        if getattr(sys.modules[".".join(parts[:depth])], cls.__qualname__, None) is cls:
            return ".".join((*parts[1:depth], cls.__qualname__))
    return cls.__qualname__
