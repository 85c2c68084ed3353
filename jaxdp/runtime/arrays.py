"""The array functions that kernels are written with: those of JAX, or of NumPy where a few points are computed at once.

A kernel written with ``xp`` runs in two ways. Under a trace ``xp`` is `jax.numpy`, and the kernel becomes one compiled
program. Inside `on_host` it is NumPy, and the same lines run eagerly, one point at a time: some milliseconds a point,
where compiling takes seconds. The functions that NumPy lacks are defined here.
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


class _Mode(threading.local):
    host = False


_mode = _Mode()


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, ``xp`` is NumPy, in this thread only."""
    before, _mode.host = _mode.host, True
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        _mode.host = before


class _Arrays:
    """`numpy` inside `on_host`, `jax.numpy` elsewhere, with the functions of `jax.lax` and `jax.nn` that we use."""

    def __getattr__(self, name: str) -> Any:
        return _EACH[name][not _mode.host] if name in _EACH else getattr(np if _mode.host else jnp, name)


def _host_vmap(fun: Callable, in_axes: Any = 0) -> Callable:
    def mapped(*args: Any) -> Any:
        each = [axis is not None for axis in (in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args))]
        size = np.shape(jax.tree.leaves([arg for arg, own in zip(args, each, strict=True) if own])[0])[0]
        rows = [fun(*(_row(arg, i) if own else arg for arg, own in zip(args, each, strict=True))) for i in range(size)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    return mapped


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
    made = []
    for i in reversed(range(size or 0)) if reverse else range(size or 0):
        init, y = body(init, None if xs is None else _row(xs, i))
        made.append(y)
    made = made[::-1] if reverse else made
    return init, jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def _host_logsumexp(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    top = np.max(x, axis=axis, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    total = np.log(np.sum(np.exp(x - shift), axis=axis, keepdims=True)) + shift
    return total if keepdims else np.squeeze(total, axis)


def _host_complex(re: Any, im: Any) -> Any:
    made = np.empty(np.broadcast_shapes(np.shape(re), np.shape(im)), np.complex128)
    made.real, made.imag = re, im
    return made[()]


def _host_erfcx(x: Any) -> Any:
    """e^{x^2} erfc(x): x^2 in two parts, because its rounding would count x^2 times."""
    head = np.round(np.asarray(x, np.float64) * 2.0**20) * 2.0**-20
    return np.exp(head * head) * (np.exp((x - head) * (x + head)) * _host_erfc(x))


def _host_ndtri(x: float) -> float:
    if 0 < x < 1:
        return statistics.NormalDist().inv_cdf(x)
    return {0.0: -math.inf, 1.0: math.inf}.get(float(x), math.nan)


def _host_log_ndtr(x: Any) -> Any:
    x = np.asarray(x, np.float64)
    far = np.where(x < -30.0, x, -30.0)
    y = 1 / (far * far)
    series = -y * (1 - y * (3 - y * (15 - y * (105 - y * (945 - y * 10395)))))
    beyond = -0.5 * far * far - np.log(-far * math.sqrt(2 * math.pi)) + np.log1p(series)
    near = np.maximum(x, -30.0) / math.sqrt(2.0)
    tail = 0.5 * _host_erfc(np.abs(near))
    return np.where(x < -30.0, beyond, np.where(x > 0, np.log1p(-tail), np.log(tail)))


def _host_accumulate(least: np.ufunc, x: Any, axis: int = 0, reverse: bool = False) -> Any:
    return np.flip(least.accumulate(np.flip(x, axis), axis), axis) if reverse else least.accumulate(x, axis)


def _host_top_k(x: Any, count: int) -> list[Any]:
    places = np.argsort(-x, kind="stable")[:count]
    return [x[places], places]


def _set_at(x: Any, place: Any, value: Any) -> Any:
    made = np.array(x)
    made[place] = value
    return made


_host_erfc = np.vectorize(math.erfc, otypes=[np.float64])

_EXACT = jax.lax.Precision.HIGHEST
# name: (for NumPy, for JAX)
_EACH: dict[str, tuple[Any, Any]] = {
    "vmap": (_host_vmap, jax.vmap),
    "fori_loop": (_host_fori_loop, jax.lax.fori_loop),
    "while_loop": (_host_while_loop, jax.lax.while_loop),
    "scan": (_host_scan, jax.lax.scan),
    "cond": (lambda which, yes, no, *args: yes(*args) if which else no(*args), jax.lax.cond),
    "lax_map": (lambda fun, xs: _host_vmap(fun)(xs), jax.lax.map),
    "logsumexp": (_host_logsumexp, jax.nn.logsumexp),
    "softplus": (lambda x: np.logaddexp(x, 0.0), jax.nn.softplus),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), jax.nn.sigmoid),
    "complex": (_host_complex, jax.lax.complex),
    "stop_gradient": (lambda x: x, jax.lax.stop_gradient),
    "erf": (np.vectorize(math.erf, otypes=[np.float64]), jax.lax.erf),
    "erfc": (_host_erfc, jax.scipy.special.erfc),
    "erfcx": (_host_erfcx, jax.scipy.special.erfcx),
    "ndtr": (lambda x: 0.5 * _host_erfc(-np.asarray(x) / math.sqrt(2.0)), jax.scipy.special.ndtr),
    "ndtri": (np.vectorize(_host_ndtri, otypes=[np.float64]), jax.scipy.special.ndtri),
    "log_ndtr": (_host_log_ndtr, jax.scipy.special.log_ndtr),
    "cummin": (functools.partial(_host_accumulate, np.minimum), jax.lax.cummin),
    "cummax": (functools.partial(_host_accumulate, np.maximum), jax.lax.cummax),
    "set_at": (_set_at, lambda x, place, value: x.at[place].set(value)),
    # whatever the user's `jax_default_matmul_precision`: some settings round the factors
    "exact_matmul": (np.matmul, lambda left, right: jnp.matmul(left, right, precision=_EXACT)),
    "top_k": (_host_top_k, jax.lax.top_k),
    "optimization_barrier": (lambda x: x, jax.lax.optimization_barrier),
    "bits": (lambda x: np.asarray(x, np.float64).view(np.int64), lambda x: jax.lax.bitcast_convert_type(x, jnp.int64)),
}

xp: Any = _Arrays()
