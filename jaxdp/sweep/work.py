"""The computation of one tile of a sweep, with its checks, in this process or on a worker."""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jaxlib
import numpy as np

import jaxdp
from jaxdp.interval import Bounds
from jaxdp.mechanisms import provenance
from jaxdp.runtime.precision import expecting
from jaxdp.sweep.grid import Grid

Values = dict[str, np.ndarray]
Calls = list[dict[str, str]]


def versions() -> dict[str, str]:
    """Versions of the packages on which the last digits of a result depend."""
    return {"jaxdp": jaxdp.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__}


@dataclasses.dataclass(frozen=True)
class Task:
    """A function of the number of a tile, which is sent to workers.

    expected: `versions` of the process that started the sweep. identity: a string unique to this run, so that an
    executor that caches results does not return one of an earlier run.
    """

    fn: Callable[..., Any]
    grid: Grid
    expected: dict[str, str]
    identity: str

    def __call__(self, tile: int) -> tuple[Values, Calls]:
        """(values of a tile, records of the jaxdp functions called for them)."""
        try:
            flat, calls = self.probe(self.grid.arguments(tile))
        except Exception as error:
            error.add_note(self.grid.describe(tile))
            raise
        return {name: self.grid.cut(tile, each) for name, each in flat.items()}, calls

    def probe(self, arguments: dict[str, Any]) -> tuple[Values, Calls]:
        """(values, calls) for any arguments; also called before a long run, so that errors come at the start."""
        require_versions(self.expected)
        size = self.grid.batch
        try:
            with provenance.observe() as calls, expecting(self.grid.tiles):
                result = self.fn(**arguments)
        except (TypeError, ValueError) as error:
            if _takes_numbers_only(self.fn, arguments):
                raise TypeError(
                    "fn must accept arrays, got one that accepts single numbers only: numeric axes arrive as arrays of "
                    f"{size} grid points. Use NumPy's functions (np.exp, np.where for if), or wrap it: "
                    "np.vectorize(fn)."
                ) from error
            raise
        flat = {}
        for name, value in _named(self.fn, result):
            if name in self.grid.axes:
                raise ValueError(
                    f"fn must not return a variable with the name of an axis, got {name!r}. Return a dict with another "
                    "name, or rename the axis."
                )
            array = np.asarray(value)
            if array.dtype.kind not in "biuf" and str(array.dtype) != "bfloat16":
                found = repr(value) if array.ndim == 0 else array.dtype
                raise ValueError(f"fn must return real values, got {found} for {name}.")
            if array.shape not in ((), (size,)):
                raise ValueError(
                    f"fn must return one value per grid point, shape ({size},), got {array.shape} for {name}."
                )
            flat[name] = np.broadcast_to(array, (size,)).astype(np.float64)
        return flat, calls


def require_versions(expected: Mapping[str, str]) -> None:
    """RuntimeError if this process runs other releases than the process that started the sweep."""
    here = versions()
    other = [f"{name} {here[name]} (expected {expected[name]})" for name in expected if here[name] != expected[name]]
    if other:
        raise RuntimeError(
            f"worker process {os.getpid()} on {socket.gethostname()} has {', '.join(other)}; "
            "install the same releases on every worker."
        )


def _takes_numbers_only(fn: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Whether fn fails on arrays of equal grid points but accepts one grid point as numbers."""
    arrays = {name: np.full_like(a, a[0]) for name, a in arguments.items() if isinstance(a, np.ndarray)}
    try:
        fn(**{**arguments, **{name: array[0].item() for name, array in arrays.items()}})
    except Exception:  # of any kind: the caller raises fn's original error instead
        return False
    try:
        fn(**{**arguments, **arrays})
    except (TypeError, ValueError):
        return True
    return False


def _named(fn: Callable[..., Any], result: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name of the variable, values) for every array in a result of fn."""
    if isinstance(result, Bounds):
        yield f"{prefix}_lower".lstrip("_"), result.lower
        yield f"{prefix}_upper".lstrip("_"), result.upper
    elif isinstance(result, Mapping):
        for name, value in result.items():
            yield from _named(fn, value, str(name))
    else:
        own = getattr(fn, "__name__", "value")
        yield prefix or (own if own.isidentifier() else "value"), result
