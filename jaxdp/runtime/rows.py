"""Many points at once by NumPy: arrays whose leading axis, that of the points, the code of one point does not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np


class Rows(np.lib.mixins.NDArrayOperatorsMixin):
    """One array for each point; axes, shapes and indices are those of one point.

    Elementwise functions, reductions and the functions of `_FUNCTIONS` take it, together with arrays and numbers that
    are the same for all points. Any other function of NumPy is a TypeError.
    """

    __slots__ = ("data",)

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one point's array."""
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
        """That of the numbers."""
        return self.data.dtype

    def astype(self, dtype: Any) -> Rows:
        """The numbers of another type."""
        return Rows(self.data.astype(dtype))

    def ravel(self) -> Rows:
        """As one axis."""
        return Rows(self.data.reshape(len(self.data), -1))

    def __bool__(self) -> bool:
        raise TypeError("it may be true of some points and false of others.")

    def __array__(self, *_: Any) -> np.ndarray:
        raise TypeError("an array of all points has one more axis than the code of one point sees.")

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
            alike = isinstance(left, Rows) and not isinstance(right, Rows)
            return Rows(left.data @ right) if alike else NotImplemented
        if method == "__call__":
            return Rows(ufunc(*_aligned(inputs), **options))
        if method in ("reduce", "accumulate"):
            (x, axis), keep = inputs if len(inputs) > 1 else (*inputs, options.pop("axis", 0)), options
            return Rows(getattr(ufunc, method)(x.data, _axis(axis, x.ndim), **keep))
        return NotImplemented

    def __array_function__(self, function: Callable, types: Any, args: Any, options: Any) -> Any:
        return _FUNCTIONS[function](*args, **options) if function in _FUNCTIONS else NotImplemented


def _axis(axis: Any, ndim: int) -> Any:
    """The axis of all points' array for one of a point's."""
    if axis is None:
        return tuple(range(1, ndim + 1))
    return tuple(_axis(each, ndim) for each in axis) if isinstance(axis, tuple) else axis + 1 if axis >= 0 else axis


def _axes(value: Any) -> int:
    """Number of axes of one point's array; `np.ndim` of a number takes longer than most sums of small arrays."""
    kind = type(value)
    return value.data.ndim - 1 if kind is Rows else 0 if kind is float or kind is int else np.ndim(value)


def _spread(rows: Rows, axes: int) -> np.ndarray:
    """Of all points, with as many axes of length 1 in front of a point's as it takes."""
    shape = rows.data.shape
    return rows.data if len(shape) > axes else rows.data.reshape(shape[0], *(1,) * (axes + 1 - len(shape)), *shape[1:])


def _aligned(values: Sequence[Any]) -> list[Any]:
    """Arrays that broadcast as the points' arrays do."""
    axes = max(map(_axes, values))
    return [_spread(value, axes) if type(value) is Rows else value for value in values]


def _operator(ufunc: np.ufunc) -> tuple[Callable[[Rows, Any], Rows], Callable[[Rows, Any], Rows]]:
    """With the rows on the left and on the right."""
    return (
        lambda self, other: Rows(ufunc(*_aligned((self, other)))),
        lambda self, other: Rows(ufunc(*_aligned((other, self)))),
    )


# Those of the mixin's operators that are used most, without NumPy's search for who computes them: a third of the time.
_OFTEN: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide}
_OFTEN |= {"and": np.bitwise_and, "or": np.bitwise_or}
for _name, _ufunc in _OFTEN.items():
    for _side, _method in zip(("__{}__", "__r{}__"), _operator(_ufunc), strict=True):
        setattr(Rows, _side.format(_name), _method)
for _name, _ufunc in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}.items():
    setattr(Rows, f"__{_name}__", _operator(_ufunc)[0])


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers, of whatever is given: rows, arrays, numbers."""

    def each(*values: Any) -> Any:
        some = any(type(value) is Rows for value in values)
        return Rows(function(*_aligned(values))) if some else function(*values)

    return each


def _joined(join: Callable[..., Any], axes_more: int) -> Callable[..., Any]:
    """`np.concatenate` or `np.stack`."""

    def joined(parts: Sequence[Any], axis: int = 0) -> Rows:
        size = max(len(part.data) for part in parts if isinstance(part, Rows))
        every = [part.data if isinstance(part, Rows) else np.asarray(part)[None] for part in parts]
        every = [np.broadcast_to(part, (size, *part.shape[1:])) for part in every]
        return Rows(join(every, _axis(axis, every[0].ndim - 1 + axes_more)))

    return joined


def _best(find: Callable[..., Any]) -> Callable[[Rows], Rows]:
    return lambda x: Rows(find(x.data.reshape(len(x.data), -1), axis=1))


def _append(x: Any, more: Any) -> Any:
    return np.concatenate([a.ravel() if isinstance(a, Rows) else np.ravel(a) for a in (x, more)])


where = elementwise(np.where)
_FUNCTIONS: dict[Callable, Callable[..., Any]] = {
    np.where: where,
    np.round: elementwise(np.round),
    np.concatenate: _joined(np.concatenate, 0),
    np.stack: _joined(np.stack, 1),
    np.append: _append,
    np.argsort: lambda x: Rows(np.argsort(x.data, axis=-1)),
    np.cumsum: lambda x, axis: Rows(np.cumsum(x.data, _axis(axis, x.ndim))),
    np.cumprod: lambda x, axis: Rows(np.cumprod(x.data, _axis(axis, x.ndim))),
    np.argmax: _best(np.argmax),
    np.argmin: _best(np.argmin),
    np.squeeze: lambda x, axis: Rows(np.squeeze(x.data, _axis(axis, x.ndim))),
    np.full_like: lambda x, value: np.full(x.shape, value, x.dtype),
    np.zeros_like: lambda x: np.zeros(x.shape, x.dtype),
    np.ones_like: lambda x: np.ones(x.shape, x.dtype),
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
}


def while_loop(unfinished: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
    """The loop for all points until the last one is finished; of finished ones nothing is changed."""
    while True:
        going = unfinished(state)
        some = np.ravel(going.data if isinstance(going, Rows) else going)
        if not some.any():
            return state
        new = body(state)
        state = new if some.all() else jax.tree.map(lambda a, b, keep=going: where(keep, a, b), new, state)


def cond(which: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> Any:
    """Both branches, where points differ, and of each point the one that it takes."""
    if not isinstance(which, Rows):
        return yes(*args) if which else no(*args)
    return jax.tree.map(lambda a, b: where(which, a, b), yes(*args), no(*args))


def set_at(x: Any, place: Any, value: Any) -> Rows:
    """The array with other numbers in one place."""
    x, place, value = (each if isinstance(each, Rows) else Rows(np.asarray(each)[None]) for each in (x, place, value))
    size = max(len(each.data) for each in (x, place, value))
    made = np.array(np.broadcast_to(x.data, (size, *x.shape)))
    made[np.arange(size), place.data] = value.data
    return Rows(made)
