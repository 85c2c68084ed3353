"""Batches in NumPy: arrays with a leading batch axis that is hidden from code written for one point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

_SHORT = 8  # longest axis that is reduced slice by slice


class Rows(np.lib.mixins.NDArrayOperatorsMixin):
    """A batch of arrays, one per point. Axes, shapes and indices refer to the array of one point.

    NumPy's elementwise functions, its reductions and the functions of `_FUNCTIONS` accept `Rows` together with arrays
    and numbers that are equal for all points. Every other NumPy function raises TypeError.
    """

    __slots__ = ("data",)

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one point's array."""
        return self.data.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of one point's array."""
        return self.data.ndim - 1

    @property
    def size(self) -> int:
        """Size of one point's array."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        """Data type of the numbers."""
        return self.data.dtype

    def astype(self, dtype: Any) -> Rows:
        """The batch with its numbers converted to ``dtype``."""
        return Rows(self.data.astype(dtype))

    def reshape(self, *shape: Any) -> Rows:
        """The batch with each point's array in another shape."""
        return Rows(self.data.reshape(len(self.data), *(shape[0] if isinstance(shape[0], tuple) else shape)))

    @property
    def T(self) -> Rows:  # noqa: N802
        """The batch with the axes of each point's array in reverse order."""
        return Rows(self.data.transpose(0, *range(self.ndim, 0, -1)))

    def ravel(self) -> Rows:
        """The batch with each point's array flattened to one axis."""
        return Rows(self.data.reshape(len(self.data), -1))

    def __bool__(self) -> bool:
        raise TypeError("a condition on Rows may hold at some points only: use xp.where or xp.cond in place of if.")

    def __array__(self, *_: Any) -> np.ndarray:
        raise TypeError(
            "Rows must stay Rows: use operators and the functions of xp. A NumPy array of them would have one axis "
            "more than the code of one point expects."
        )

    def __iter__(self) -> Iterator[Rows]:
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, key: Any) -> Rows:
        if isinstance(key, Rows):
            rows = np.arange(len(self.data)).reshape(-1, *(1,) * key.ndim)
            return Rows(self.data[rows, key.data])
        return Rows(self.data[(slice(None), *(key if isinstance(key, tuple) else (key,)))])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if ufunc is np.matmul:
            left, right = inputs
            supported = isinstance(left, Rows) and not isinstance(right, Rows)
            return Rows(left.data @ right) if supported else NotImplemented
        if method == "__call__":
            return Rows(ufunc(*_aligned(inputs), **options))
        if method in ("reduce", "accumulate"):
            (x, axis), keywords = inputs if len(inputs) > 1 else (*inputs, options.pop("axis", 0)), options
            apply = functools.partial(_reduce, ufunc) if method == "reduce" else ufunc.accumulate
            return Rows(apply(x.data, _axis(axis, x.ndim), **keywords))
        return NotImplemented

    def __array_function__(self, function: Callable, types: Any, args: Any, options: Any) -> Any:
        return _FUNCTIONS[function](*args, **options) if function in _FUNCTIONS else NotImplemented


def _reduce(ufunc: np.ufunc, data: np.ndarray, axis: Any, keepdims: bool = False) -> np.ndarray:
    """``ufunc.reduce``; a short last axis is reduced slice by slice, in a tenth of the time."""
    last = axis in (-1, data.ndim - 1) and data.dtype.kind == "f"
    if not (last and 1 <= data.shape[-1] <= _SHORT):
        return ufunc.reduce(data, axis, keepdims=keepdims)
    slices = (data[..., slice(i, i + 1) if keepdims else i] for i in range(data.shape[-1]))
    return functools.reduce(ufunc, slices)


def _axis(axis: Any, ndim: int) -> Any:
    """Axis of the batch array that corresponds to ``axis`` of one point's array of ``ndim`` axes."""
    if axis is None:
        return tuple(range(1, ndim + 1))
    return tuple(_axis(each, ndim) for each in axis) if isinstance(axis, tuple) else axis + 1 if axis >= 0 else axis


def _axes(value: Any) -> int:
    """Number of axes of one point's array. For numbers `np.ndim` would take longer than summing a small array."""
    kind = type(value)
    return value.data.ndim - 1 if kind is Rows else 0 if kind is float or kind is int else np.ndim(value)


def _spread(rows: Rows, axes: int) -> np.ndarray:
    """The batch array, with axes of length 1 after the batch axis so that a point has at least ``axes`` axes."""
    shape = rows.data.shape
    return rows.data if len(shape) > axes else rows.data.reshape(shape[0], *(1,) * (axes + 1 - len(shape)), *shape[1:])


def _aligned(values: Sequence[Any]) -> list[Any]:
    """Batch arrays, shared arrays and numbers, shaped so that they broadcast as the arrays of one point would."""
    axes = max(map(_axes, values))
    return [_spread(value, axes) if type(value) is Rows else value for value in values]


def _operator(ufunc: np.ufunc) -> tuple[Callable[[Rows, Any], Rows], Callable[[Rows, Any], Rows]]:
    """Two methods of `Rows`: the operator with the rows on the left, and with the rows on the right."""
    return (
        lambda self, other: Rows(ufunc(*_aligned((self, other)))),
        lambda self, other: Rows(ufunc(*_aligned((other, self)))),
    )


# The most used operators, defined here in place of the mixin's: without NumPy's dispatch they take a third of the time.
_OFTEN: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide}
_OFTEN |= {"and": np.bitwise_and, "or": np.bitwise_or}
for _name, _ufunc in _OFTEN.items():
    for _side, _method in zip(("__{}__", "__r{}__"), _operator(_ufunc), strict=True):
        setattr(Rows, _side.format(_name), _method)
for _name, _ufunc in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}.items():
    setattr(Rows, f"__{_name}__", _operator(_ufunc)[0])


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, elementwise on numbers and arrays, extended to `Rows`."""

    def each(*values: Any) -> Any:
        has_rows = any(type(value) is Rows for value in values)
        return Rows(function(*_aligned(values))) if has_rows else function(*values)

    return each


def _joined(join: Callable[..., Any], axes_more: int) -> Callable[..., Any]:
    """`np.concatenate` or `np.stack` for `Rows`. axes_more: number of axes that ``join`` adds."""

    def joined(parts: Sequence[Any], axis: int = 0) -> Rows:
        arrays = _batches(*parts)
        return Rows(join(arrays, _axis(axis, arrays[0].ndim - 1 + axes_more)))

    return joined


def _batches(*values: Any) -> list[np.ndarray]:
    """Batch arrays of equal length, at least one of which is of `Rows`; arrays that are not are repeated."""
    size = max(len(value.data) for value in values if isinstance(value, Rows))
    arrays = [value.data if isinstance(value, Rows) else np.asarray(value)[None] for value in values]
    return [np.broadcast_to(array, (size, *array.shape[1:])) for array in arrays]


def point_by_point(function: Callable[..., np.ndarray]) -> Callable[..., Rows]:
    """``function`` of arrays, at least one of them `Rows`, applied to each point's arrays in turn."""
    return lambda *values: Rows(np.stack([function(*point) for point in zip(*_batches(*values), strict=True)]))


def _extreme_index(find: Callable[..., Any]) -> Callable[..., Rows]:
    return lambda x, axis=None: Rows(
        find(x.data.reshape(len(x.data), -1), axis=1) if axis is None else find(x.data, axis=_axis(axis, x.ndim))
    )


def _append(x: Any, more: Any) -> Any:
    return np.concatenate([a.ravel() if isinstance(a, Rows) else np.ravel(a) for a in (x, more)])


def _linspace(start: Any, stop: Any, count: int, axis: int = 0) -> Rows:
    start, stop = np.broadcast_arrays(*_aligned((start, stop)))
    return Rows(np.linspace(start, stop, count, axis=_axis(axis, start.ndim)))


def _take_along_axis(x: Any, at: Any, axis: int) -> Rows:
    table, places = _batches(x, at)
    return Rows(np.take_along_axis(table, places, _axis(axis, np.ndim(x))))


where = elementwise(np.where)
_FUNCTIONS: dict[Callable, Callable[..., Any]] = {
    np.where: where,
    np.round: elementwise(np.round),
    np.concatenate: _joined(np.concatenate, 0),
    np.stack: _joined(np.stack, 1),
    np.append: _append,
    np.argsort: lambda x: Rows(np.argsort(x.data, axis=-1)),
    np.sort: lambda x, axis=-1: Rows(np.sort(x.data, _axis(axis, x.ndim))),
    np.diff: lambda x: Rows(np.diff(x.data)),
    np.pad: lambda x, widths: Rows(np.pad(x.data, [(0, 0), *np.broadcast_to(widths, (x.ndim, 2))])),
    np.broadcast_arrays: lambda *values: [Rows(x) for x in np.broadcast_arrays(*_aligned(values))],
    np.cumsum: lambda x, axis: Rows(np.cumsum(x.data, _axis(axis, x.ndim))),
    np.cumprod: lambda x, axis: Rows(np.cumprod(x.data, _axis(axis, x.ndim))),
    np.argmax: _extreme_index(np.argmax),
    np.argmin: _extreme_index(np.argmin),
    np.squeeze: lambda x, axis: Rows(np.squeeze(x.data, _axis(axis, x.ndim))),
    np.full_like: lambda x, value: where(True, value, np.zeros(x.shape)),
    np.zeros_like: lambda x: np.zeros(x.shape, x.dtype),
    np.ones_like: lambda x: np.ones(x.shape, x.dtype),
    np.reshape: Rows.reshape,
    np.real: lambda x: Rows(x.data.real),
    np.imag: lambda x: Rows(x.data.imag),
    np.moveaxis: lambda x, source, to: Rows(np.moveaxis(x.data, _axis(source, x.ndim), _axis(to, x.ndim))),
    np.broadcast_to: lambda x, shape: Rows(np.broadcast_to(_spread(x, len(shape)), (len(x.data), *shape))),
    np.take_along_axis: _take_along_axis,
    np.linspace: _linspace,
    np.split: lambda x, places: [Rows(part) for part in np.split(x.data, places, axis=1)],
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
}


def while_loop(unfinished: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
    """The loop, run for all points until every point has finished; a finished point keeps its state."""
    while True:
        unfinished_points = unfinished(state)
        flags = np.ravel(unfinished_points.data if isinstance(unfinished_points, Rows) else unfinished_points)
        if not flags.any():
            return state
        new = body(state)
        state = new if flags.all() else jax.tree.map(lambda a, b, keep=unfinished_points: where(keep, a, b), new, state)


def cond(which: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> Any:
    """The branch that ``which`` selects. If ``which`` is `Rows`, both are computed and each point selects its own."""
    if not isinstance(which, Rows):
        return yes(*args) if which else no(*args)
    return jax.tree.map(lambda a, b: where(which, a, b), yes(*args), no(*args))


def set_at(x: Any, place: Any, value: Any) -> Rows:
    """A copy of the array with ``value`` at index ``place`` of its first axis."""
    x, place, value = (each if isinstance(each, Rows) else Rows(np.asarray(each)[None]) for each in (x, place, value))
    size = max(len(each.data) for each in (x, place, value))
    result = np.array(np.broadcast_to(x.data, (size, *x.shape)))
    result[np.arange(size), place.data] = value.data
    return Rows(result)
