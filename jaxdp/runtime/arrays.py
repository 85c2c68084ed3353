"""`xp`: the array functions that kernels call, from `jax.numpy` in a compiled program and from NumPy for few points.

A kernel written with ``xp`` runs in two ways. Under a trace ``xp`` is `jax.numpy`, and the kernel becomes one compiled
program. Inside `on_host` ``xp`` is NumPy, and the same lines run eagerly. NumPy needs milliseconds per point, compiling
needs seconds. This module defines the functions that NumPy lacks.
"""

import contextlib
import functools
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.runtime import rows
from jaxdp.runtime.rows import Rows, elementwise
from jaxdp.validate import is_traced


@contextlib.contextmanager
def _using(table: dict[str, Any], **more: Any) -> Iterator[None]:
    functions = vars(xp)
    before = dict(functions)
    functions.clear()
    functions.update(table, **more)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        functions.clear()
        functions.update(before)


def on_host(many: bool = False, together: int = 1) -> contextlib.AbstractContextManager[None]:
    """Context manager: inside, ``xp`` is NumPy, in this thread only. many: ``xp`` also takes batches, as `Rows`.

    together: largest number of items that ``xp.vmap`` computes together, as `Rows`; below 8 it loops over them.
    """
    return _using(_HOST_ROWS if many else _HOST, together=together)


def in_programs() -> contextlib.AbstractContextManager[None]:
    """Context manager: inside, ``xp`` is `jax.numpy`, even when nested in `on_host`."""
    return _using(_TRACED)


def in_float64(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator of a record's method: NumPy computes concrete records in float64; JAX would by default use float32."""

    @functools.wraps(method)
    def computed(record: Any) -> Any:
        with contextlib.nullcontext() if is_traced(record) else on_host():
            return method(record)

    return computed


class _Arrays(threading.local):
    """`numpy` inside `on_host`, `jax.numpy` elsewhere, plus the functions of `jax.lax` and `jax.nn` that kernels use.

    The functions are plain attributes, one table per thread: ``__getattr__`` costs as much as a small array operation.
    """

    def __init__(self) -> None:
        vars(self).update(_TRACED)


def _host_vmap(fun: Callable, in_axes: Any = 0) -> Callable:
    def mapped(*args: Any) -> Any:
        split = [axis is not None for axis in (in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args))]
        own = [arg for arg, mine in zip(args, split, strict=True) if mine]

        def one(*parts: Any) -> Any:
            rest = iter(parts)
            return fun(*(next(rest) if mine else arg for arg, mine in zip(args, split, strict=True)))

        return computed(one, own, 1 if any(isinstance(leaf, Rows) for leaf in jax.tree.leaves(own)) else xp.together)

    return mapped


_LEAST_TOGETHER = 8  # fewer items are computed one by one
_LACKING = TypeError, AttributeError, ValueError, IndexError  # raised where a function or a user's class lacks `Rows`


def computed(function: Callable[..., Any], args: Any, most: int) -> Any:
    """``function`` of one item at all items of the arrays in args, along their first axis; up to ``most`` together."""
    size = np.shape(jax.tree.leaves(args)[0])[0]
    most = min(most, size)
    if most < _LEAST_TOGETHER:
        return _in_turn(function, args, 0, size)
    parts = [_together(function, args, i, min(i + most, size)) for i in range(0, size, most)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _together(function: Callable[..., Any], args: Any, start: int, stop: int) -> Any:
    size = stop - start
    try:
        with on_host(many=True):
            result = function(*jax.tree.map(lambda leaf: Rows(leaf[start:stop]), args))
    except _LACKING:
        return _in_turn_after_all(function, args, start, stop)
    return jax.tree.map(lambda x: np.broadcast_to(x.data if isinstance(x, Rows) else x, (size, *np.shape(x))), result)


def _in_turn(function: Callable[..., Any], args: Any, start: int, stop: int) -> Any:
    results = [function(*(_row(arg, i) for arg in args)) for i in range(start, stop)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


_in_turn_after_all = _in_turn  # a name of its own, so that the tests can refuse it


def _row(tree: Any, i: int) -> Any:
    if isinstance(tree, np.ndarray):
        return tree[i]
    return jax.tree.map(lambda leaf: leaf[i], tree)


def _host_fori_loop(lower: int, upper: int, body: Callable, init: Any) -> Any:
    for i in range(int(lower), int(upper)):
        init = body(i, init)
    return init


def _host_while_loop(unfinished: Callable, body: Callable, init: Any) -> Any:
    while unfinished(init):
        init = body(init)
    return init


def _host_scan(body: Callable, init: Any, xs: Any, length: int | None = None, reverse: bool = False) -> Any:
    size = length if xs is None else np.shape(jax.tree.leaves(xs)[0])[0]
    outputs = []
    for i in reversed(range(size or 0)) if reverse else range(size or 0):
        init, output = body(init, None if xs is None else _row(xs, i))
        outputs.append(output)
    outputs = outputs[::-1] if reverse else outputs
    return init, jax.tree.map(lambda *leaves: np.stack(leaves), *outputs)


def _host_logsumexp(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    top = np.maximum.reduce(x, axis, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    total = np.log(np.add.reduce(np.exp(x - shift), axis, keepdims=True)) + shift
    return total if keepdims else np.squeeze(total, axis)


def _host_complex(re: Any, im: Any) -> Any:
    result = np.empty(np.broadcast(re, im).shape, np.complex128)
    result.real, result.imag = re, im
    return result[()]


def _host_erfcx(x: Any) -> Any:
    """e^{x^2} erfc(x), with x^2 = head^2 + (x - head)(x + head): a rounded x^2 costs e^{x^2} about x^2 ULP."""
    head = np.round(np.asarray(x, np.float64) * 2.0**20) * 2.0**-20
    return np.exp(head * head) * (np.exp((x - head) * (x + head)) * _host_erfc(x))


def _host_ndtri(x: float) -> float:
    if 0 < x < 1:
        return statistics.NormalDist().inv_cdf(x)
    return {0.0: -math.inf, 1.0: math.inf}.get(float(x), math.nan)


def _set_at(x: Any, place: Any, value: Any) -> Any:
    result = np.array(x)
    result[place] = value
    return result


_ONE_THREAD = 2**18  # scalar multiplications up to which OpenBLAS multiplies two matrices in the calling thread
_HEIGHT, _DEPTH = 32, 256  # rows and least length of the inner axis of the pieces of a product


def _host_matmul(left: Any, right: Any) -> Any:
    """`np.matmul`; large matrices are multiplied in pieces, each in the calling thread.

    OpenBLAS threads spin while they wait: twice the CPU time, and ten times on a machine with other work.
    """
    if np.ndim(left) != 2 or np.ndim(right) != 2 or left.size * right.shape[1] <= _ONE_THREAD:
        return np.matmul(left, right)
    (rows, depth), columns = left.shape, right.shape[1]
    height = min(rows, _HEIGHT)
    width = min(columns, max(_ONE_THREAD // (height * min(depth, _DEPTH)), 1))
    end = rows - rows % height
    if end < rows:
        return np.concatenate([_host_matmul(part, right) for part in (left[:end], left[end:])])
    end = columns - columns % width
    if end < columns:
        return np.concatenate([_host_matmul(left, part) for part in (right[:, :end], right[:, end:])], axis=1)
    length = _ONE_THREAD // (height * width)
    high, wide = left.reshape(-1, 1, height, depth), np.moveaxis(right.reshape(depth, -1, width), 1, 0)
    pieces = (np.matmul(high[..., i : i + length], wide[:, i : i + length]) for i in range(0, depth, length))
    return np.swapaxes(functools.reduce(np.add, pieces), 1, 2).reshape(rows, columns)


def _one_by_one(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """``function``, defined for one float, applied to every element of an array."""

    def each(x: Any) -> Any:
        return np.array([function(value) for value in np.ravel(x).tolist()], np.float64).reshape(np.shape(x))[()]

    return each


def _reduction(reduce: Callable) -> Callable:
    """A ufunc's reduction as a replacement for `np.sum` and the like, whose overhead exceeds a small array's sum."""
    return lambda x, axis=None, keepdims=False: reduce(x, axis, keepdims=keepdims)


_host_erf, _host_erfc, _host_inverse = (_one_by_one(f) for f in (math.erf, math.erfc, _host_ndtri))

_EXACT = jax.lax.Precision.HIGHEST
# name: (implementation for NumPy, implementation for JAX)
_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "sum": (_reduction(np.add.reduce), jnp.sum),
    "max": (_reduction(np.maximum.reduce), jnp.max),
    "min": (_reduction(np.minimum.reduce), jnp.min),
    "any": (_reduction(np.logical_or.reduce), jnp.any),
    "all": (_reduction(np.logical_and.reduce), jnp.all),
    "clip": (lambda x, low, high: np.minimum(np.maximum(x, low), high), jnp.clip),
    "stack": (lambda parts, axis=0: np.stack(parts, axis) if axis else np.array(parts), jnp.stack),
    "vmap": (_host_vmap, jax.vmap),
    "fori_loop": (_host_fori_loop, jax.lax.fori_loop),
    "while_loop": (_host_while_loop, jax.lax.while_loop),
    "scan": (_host_scan, jax.lax.scan),
    "cond": (lambda which, yes, no, *args: yes(*args) if which else no(*args), jax.lax.cond),
    "lax_map": (lambda fun, xs: _host_vmap(fun)(xs), jax.lax.map),
    "logsumexp": (_host_logsumexp, jax.nn.logsumexp),
    # Tracing jax.nn.softplus takes as long as tracing thirty other functions.
    "softplus": (lambda x: np.logaddexp(x, 0.0), lambda x: jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))),
    "complex": (_host_complex, jax.lax.complex),
    "stop_gradient": (lambda x: x, jax.lax.stop_gradient),
    "erf": (_host_erf, jax.lax.erf),
    "erfcx": (_host_erfcx, jax.scipy.special.erfcx),
    "ndtr": (lambda x: 0.5 * _host_erfc(-np.asarray(x) / math.sqrt(2.0)), jax.scipy.special.ndtr),
    "ndtri": (_host_inverse, jax.scipy.special.ndtri),
    "cummin": (lambda x, axis=0: np.minimum.accumulate(x, axis), jax.lax.cummin),
    "cummax": (lambda x, axis=0: np.maximum.accumulate(x, axis), jax.lax.cummax),
    "set_at": (_set_at, lambda x, place, value: x.at[place].set(value, mode="promise_in_bounds")),
    # Independent of the user's `jax_default_matmul_precision`: some of its settings round the factors.
    "exact_matmul": (_host_matmul, lambda left, right: jnp.matmul(left, right, precision=_EXACT)),
    "optimization_barrier": (lambda x: x, jax.lax.optimization_barrier),
    "eager": (True, False),  # whether NumPy runs the operations one by one
    "many": (False, False),  # whether the operations run on `Rows`
    "most": (np.max, lambda x: math.inf),  # the largest number as a float, over all points; inf where it is not known
    "bits": (lambda x: np.asarray(x, np.float64).view(np.int64), lambda x: jax.lax.bitcast_convert_type(x, jnp.int64)),
    "lookup": (
        lambda table, place: table[place],
        lambda table, place: jnp.asarray(table).at[place].get(mode="promise_in_bounds"),
    ),
}

_HOST, _TRACED = (
    {name: value for name, value in vars(module).items() if name[0] != "_"}
    | {name: implementation[i] for name, implementation in _IMPLEMENTATIONS.items()}
    for i, module in enumerate((np, jnp))
)

_EACH_MATMUL = rows.point_by_point(_host_matmul)
_ELEMENTWISE = "bits", "complex", "erf", "erfcx", "ndtr", "ndtri", "softplus"
_HOST_ROWS = _HOST | {name: elementwise(_HOST[name]) for name in _ELEMENTWISE}
_HOST_ROWS |= {
    "asarray": lambda x, dtype=None: x if isinstance(x, Rows) else np.asarray(x, dtype),
    "stack": np.stack,
    "where": rows.where,
    "lookup": lambda table, place: table[place] if isinstance(table, Rows) else elementwise(table.__getitem__)(place),
    "while_loop": rows.while_loop,
    "cond": rows.cond,
    "set_at": rows.set_at,
    "exact_matmul": lambda left, right: (_EACH_MATMUL if isinstance(right, Rows) else _host_matmul)(left, right),
    "most": lambda x: np.max(x.data if isinstance(x, Rows) else x),
    "many": True,
}

xp: Any = _Arrays()
