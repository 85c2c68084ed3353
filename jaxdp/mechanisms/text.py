"""Numbers and classes as the Python text that stands for them."""

import sys

import jax
import numpy as np

from jaxdp import validate


def as_text(value: object) -> str:
    """A field's value as Python text; evaluating it with the builtins and the names of jaxdp gives an equal value."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not validate.is_traced(value):
        value = np.asarray(value).tolist()
    if isinstance(value, float) and not np.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    return repr(value)


def public_name(cls: type) -> str:
    """The shortest path to a class of ours from the root of the package; the bare name of a user's own."""
    parts = cls.__module__.split(".")
    for depth in range(1, len(parts) + 1 if parts[0] == "jaxdp" else 1):
        if getattr(sys.modules[".".join(parts[:depth])], cls.__qualname__, None) is cls:
            return ".".join((*parts[1:depth], cls.__qualname__))
    return cls.__qualname__
