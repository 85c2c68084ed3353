"""The product of named axes, cut into tiles of one size."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from jaxdp import validate

# Default number of grid points per tile: the overhead of a call is comparatively small, and a kill loses only seconds.
_DEFAULT_BATCH = 4096


@dataclasses.dataclass(frozen=True)
class Grid:
    """The product of axes, cut into rectangular tiles: a range of every numeric axis, one value of every other axis.

    axes: arrays for numeric axes, lists for others. numeric: the numeric axes. shape, steps, counts: along every axis,
    number of grid points, grid points of a tile, tiles. size, batch, tiles: their products over all axes.
    """

    axes: dict[str, np.ndarray | list[Any]]
    numeric: dict[str, np.ndarray]
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    size: int
    batch: int
    tiles: int

    @classmethod
    def of(cls, axes: Mapping[str, Any], batch_size: int | None) -> Self:
        """The grid of checked axes; ValueError for values other than real numbers, strings, booleans and None."""
        if not axes:
            raise ValueError(
                "axes must name at least one axis, such as eps0=[1, 2, 4], got none (batch_size, devices, executor, "
                "progress and path are options of sweep)."
            )
        checked = {name: _axis(name, values) for name, values in axes.items()}
        room = _DEFAULT_BATCH if batch_size is None else validate.count("batch_size", batch_size, 1)
        steps: list[int] = []
        for values in reversed(checked.values()):
            pieces = -(-len(values) // room) if isinstance(values, np.ndarray) else len(values)
            steps.insert(0, -(-len(values) // pieces))
            room = max(1, room // steps[0])
        numeric = {name: values for name, values in checked.items() if isinstance(values, np.ndarray)}
        shape = tuple(map(len, checked.values()))
        counts = tuple(-(-size // step) for size, step in zip(shape, steps, strict=True))
        return cls(checked, numeric, shape, tuple(steps), counts, *map(math.prod, (shape, steps, counts)))

    def region(self, tile: int) -> tuple[slice, ...]:
        """The range of every axis that a tile covers."""
        where = np.unravel_index(tile, self.counts)
        return tuple(
            slice(int(i) * step, min((int(i) + 1) * step, size))
            for i, step, size in zip(where, self.steps, self.shape, strict=True)
        )

    def length(self, tile: int) -> int:
        """Number of grid points of a tile, without padding."""
        return math.prod(part.stop - part.start for part in self.region(tile))

    def arguments(self, tile: int) -> dict[str, Any]:
        """Keyword arguments for the call of a tile. Numeric ones have length ``batch``; the last value pads an axis."""
        first: dict[str, Any] = {}
        rows = {}
        for (name, values), part, step in zip(self.axes.items(), self.region(tile), self.steps, strict=True):
            if isinstance(values, np.ndarray):
                rows[name] = values[np.minimum(np.arange(part.start, part.start + step), part.stop - 1)]
            first[name] = values[part.start]
        columns = np.meshgrid(*rows.values(), indexing="ij")
        return first | {name: column.ravel() for name, column in zip(rows, columns, strict=True)}

    def cut(self, tile: int, values: np.ndarray) -> np.ndarray:
        """The results of a tile's call in the shape of its region, without padding."""
        kept = tuple(slice(0, part.stop - part.start) for part in self.region(tile))
        return values.reshape(self.steps)[kept]

    def describe(self, tile: int) -> str:
        """The axis values of a tile, for the note of an error."""
        places = []
        for (name, values), part in zip(self.axes.items(), self.region(tile), strict=True):
            first, last = values[part.start], values[part.stop - 1]
            places.append(f"{name} = {first}" + (f" .. {last}" if part.stop - part.start > 1 else ""))
        return f"in tile {tile} of {self.tiles}: {', '.join(places)}"

    def probes(self) -> Iterator[dict[str, Any]]:
        """Arguments of calls that try every axis value, or the extreme ones if a tile cannot hold all of them."""
        others = {name: values for name, values in self.axes.items() if name not in self.numeric}
        short = sum(map(len, self.numeric.values())) <= self.batch
        parts = []
        for name, axis in self.numeric.items():
            ends = axis[[0, int(np.argmin(axis)), int(np.argmax(axis))]]
            tried = axis if short else np.concatenate([ends, axis[~np.isfinite(axis)][:1]])
            parts.append([tried if n == name else np.full(len(tried), a[0]) for n, a in self.numeric.items()])
        columns = dict(zip(self.numeric, map(np.concatenate, zip(*parts, strict=True)), strict=True))
        size = sum(len(part[0]) for part in parts)
        for chosen in itertools.product(*others.values()):
            for start in range(0, size, self.batch):
                rows = np.minimum(np.arange(start, start + self.batch), size - 1)
                yield {n: column[rows] for n, column in columns.items()} | dict(zip(others, chosen, strict=True))


def _axis(name: str, values: Any) -> np.ndarray | list[Any]:
    array = np.atleast_1d(np.asarray(values))
    mixed = array.dtype.kind not in "iufb" or any(isinstance(v, (str, bytes)) for v in np.ravel(values).tolist())
    array = np.atleast_1d(np.asarray(values, dtype=object)) if mixed else array
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"axis {name} must be a number or a non-empty 1-D sequence, got shape {array.shape}.")
    bad = [v for v in array.tolist() if not isinstance(v, (str, bytes, bool, type(None), int, float))]
    if bad:
        raise ValueError(f"axis {name} must hold real numbers, strings, booleans or None, got {bad[0]!r}.")
    return array if array.dtype.kind in "iuf" else array.tolist()
