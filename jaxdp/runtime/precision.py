"""Kernels on batches, computed by NumPy or by a compiled program.

Every kernel of this package is a function of ONE parameter point. `kernel` turns it into a function of a flat batch.
Each call computes in float64 and leaves the user's x64 flag unchanged. Compiling takes seconds, so NumPy
(`runtime.arrays`) answers the first points; after them the kernel is compiled. On a CPU a program has one batch size,
and a longer batch is cut into pieces of that size. New values or batch lengths therefore compile nothing, and the
result of a row does not depend on the rest of its batch.

The checks of `runtime.backend` run before the first number is returned. The first row of a compiled program is compared
with NumPy if the kernel can run in NumPy. A failed check raises `BackendError`.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdp.runtime.arrays import computed, in_programs, on_host
from jaxdp.runtime.backend import compiler_options, ensure_canary, platform, refuse, require_reductions, x64


def whole_number(variable: str, otherwise: int) -> int:
    """The whole number >= 0 in an environment variable, or ``otherwise`` if the variable is not set."""
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"the environment variable {variable} must be a whole number >= 0 or unset, got {text!r}.")
    return int(text or otherwise)


# Limits of one call of a program: (float64 numbers held in memory, points). Larger calls are not faster on a CPU.
_CALL_LIMITS = {"cpu": (2**16, 2**11)}
_ACCELERATOR_LIMITS = (2**29, 2**20)
# Largest number of points that NumPy answers before a kernel is compiled. 0: programs compute every point.
_COMPILE_AFTER = whole_number("JAXDP_COMPILE_AFTER", 1_000_000)
_LARGE_BATCH = 32  # points from which NumPy, computing them together, takes a fraction of the time per point
_NUMBERS_TOGETHER = 2**16  # largest total size of the arguments of points that NumPy computes together
_AGREEMENT = 1e-6  # allowed relative difference of a program and NumPy; miscompiled sums are wrong by 0.1 or more
all_kernels: weakref.WeakSet[Any] = weakref.WeakSet()
_expected: contextvars.ContextVar[int | None] = contextvars.ContextVar("expected", default=None)


@contextlib.contextmanager
def expecting(calls: int) -> Iterator[None]:
    """Context manager: inside, a kernel chooses NumPy or a program as if each call were repeated ``calls`` times.

    Points that the kernel answered earlier do not count. So all processes that share the calls compute each call in the
    same way, and their numbers agree to the last bit.
    """
    token = _expected.set(calls)
    try:
        yield
    finally:
        _expected.reset(token)


def memory_maps() -> float:
    """Number of memory maps of this process divided by the limit of Linux; 0 on systems without such a limit."""
    try:
        limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
        return len(pathlib.Path("/proc/self/maps").read_bytes().splitlines()) / limit
    except (OSError, ValueError):
        return 0.0


def forget_compiled() -> None:
    """Drop the compiled programs of all kernels; each is compiled again when needed.

    An XLA program for CPUs takes about a hundred memory maps. Beyond the system's limit (65530 by default) compiling
    the next program is a segmentation fault.
    """
    for some_kernel in list(all_kernels):
        for compiled in list(some_kernel._jitted.values()):
            compiled.clear_cache()


@dataclasses.dataclass(eq=False, repr=False)
class Kernel:
    """A one-point function that is called on batches in float64, by NumPy or by a program. Made by `kernel`.

    ``kernel.point`` is the traceable one-point function. ``kernel(*args, **static)`` takes pytrees of NumPy arrays
    whose leading axis is the batch, and returns pytrees of NumPy float64 arrays with the same leading axis. Keyword
    arguments fix array sizes or choose a formula; the kernel is compiled once for each value.

    working_set: float64 numbers held in memory per point, or a function of the arguments that returns it. It limits the
        points of one call.
    large: the kernel has so many operations that compile time matters more than run time. On a CPU its pieces run on
        all cores.
    bounds: the kernel returns (lower, upper).
    by_numpy: number of points that NumPy answers before the kernel is compiled, or a function of the arguments that
        returns it. Best: as many as NumPy answers in the time of compiling. If not 0, the kernel must be written with
        `jaxdp.runtime.arrays.xp`.
    at_once: largest number of points that NumPy computes together, as `jaxdp.runtime.rows.Rows`, or a function of the
        arguments that returns it. Below 8: one by one.
    absolute: allowed absolute difference of program and NumPy besides the relative one, or a function of a point's
        arguments that returns it.
    """

    point: Callable
    _: dataclasses.KW_ONLY
    working_set: int | Callable[..., int] = 4096
    large: bool = False
    bounds: bool = False
    by_numpy: int | Callable[..., int] = 0
    at_once: int | Callable[..., int] = 1
    absolute: float | Callable[..., float] = 1e-300

    def __post_init__(self) -> None:
        self.traces = 0
        functools.update_wrapper(self, self.point)
        self._jitted: dict[Any, Any] = {}
        self._agreed: set[Any] = set()
        self._patience_used: dict[Any, float] = collections.defaultdict(float)  # by program: points answered / by_numpy
        all_kernels.add(self)

    def _compiled(self, where: str) -> Callable:
        require_reductions(where, self.large)
        if where in self._jitted:
            return self._jitted[where]

        def batched(static_items, structure, *leaves):
            self.traces += 1
            with jax.numpy_rank_promotion("allow"):  # the user's setting may be "raise"
                args = jax.tree.unflatten(structure, leaves)
                return by_rows(functools.partial(self.point, **dict(static_items)))(*args)

        jitted = jax.jit(batched, static_argnums=(0, 1), compiler_options=compiler_options(where, self.large))
        return self._jitted.setdefault(where, jitted)  # all threads use the first one stored

    def _most_points(self, where: str, args: Any, static: Any) -> int:
        most_numbers, most_points = _CALL_LIMITS.get(where, _ACCELERATOR_LIMITS)
        numbers_per_point = _value(self.working_set, args, static)
        return min(most_points, 1 << int(np.log2(max(1.0, most_numbers / numbers_per_point))))

    def run_unchecked(self, *args: Any, **static: Any) -> Any:
        """The batched call without the canary (the canary itself uses it)."""
        # eval_context: inside a user's trace, concrete numbers are computed immediately and returned as NumPy.
        with x64(), jax.core.eval_context():
            args = jax.tree.map(_as_float64, args)
            shapes = tuple(leaf.shape for leaf in jax.tree.leaves(args))
            size = shapes[0][0]
            program = tuple(sorted(static.items())), tuple(shape[1:] for shape in shapes)
            expected = _expected.get()
            patience = min(_value(self.by_numpy, args, static), _COMPILE_AFTER)
            used = size / patience if patience > 0 else math.inf
            self._patience_used[program] += used
            if (self._patience_used[program] if expected is None else expected * used) <= 1 + 1e-9:
                return self._by_numpy(args, static)
            return self._by_programs(args, size, static, program)

    def _by_numpy(self, args: Any, static: Any) -> Any:
        numbers = max(sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(args)), 1)
        together = _value(self.at_once, args, static)
        with on_host(together=together):
            return computed(functools.partial(self.point, **static), args, min(together, _NUMBERS_TOGETHER // numbers))

    def _by_programs(self, args: Any, size: int, static: Any, program: Any) -> Any:
        where, traces_before = platform(), self.traces
        run, must_agree = self._compiled(where), _value(self.by_numpy, args, static) > 0
        leaves, structure = jax.tree.flatten(args)

        def call(piece: tuple[int, int, int]) -> Any:
            start, stop, padded = piece
            rows = np.minimum(np.arange(start, start + padded), stop - 1)
            with in_programs(), x64(), jax.core.eval_context():
                result = run(program[0], structure, *(leaf[rows] for leaf in leaves))
            result = jax.tree.map(lambda a: np.asarray(a)[: stop - start], result)
            if must_agree and (where, padded, program) not in self._agreed:
                self._require_agreement(where, result, args, start, static)
                self._agreed.add((where, padded, program))
            return result

        on_cpu = where == "cpu"
        first, *rest = pieces_of(size, self._most_points(where, args, static), on_cpu)
        pieces = [call(first), *side_by_side(call, rest, cores() if on_cpu and self.large else 1)]
        if self.traces != traces_before and memory_maps() > 0.5:
            forget_compiled()
        return jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)

    def _require_agreement(self, where: str, compiled: Any, args: Any, start: int, static: Any) -> None:
        """BackendError unless a program's first row agrees with NumPy: bounds must overlap, other numbers be close."""
        row = jax.tree.map(lambda leaf: leaf[start : start + 1], args)
        first, other = ([x[0] for x in jax.tree.leaves(a)] for a in (compiled, self._by_numpy(row, static)))
        if self.bounds:
            (lower, upper), (other_lower, other_upper) = first, other
            slack = _AGREEMENT * np.abs(np.where(np.isfinite(other_upper), other_upper, 0.0))
            good = bool(np.all(lower <= other_upper + slack) and np.all(other_lower <= upper + slack))
        else:
            most = _value(self.absolute, jax.tree.map(lambda leaf: leaf[0], row), {})
            good = all(np.allclose(a, b, _AGREEMENT, most, equal_nan=True) for a, b in zip(first, other, strict=True))
        if not good:
            refuse(self.point.__name__, where, first, "NumPy computes", other)

    def __call__(self, *args: Any, **static: Any) -> Any:
        """The kernel at every row of the batch, as NumPy float64. The canaries of the kernel's module run first."""
        ensure_canary(self.point.__module__, platform())
        size = jax.tree.leaves(args)[0].shape[0]
        if size == 0:
            ones = jax.tree.map(lambda a: np.ones((1, *np.shape(a)[1:])), args)
            return jax.tree.map(lambda a: a[:0], self.run_unchecked(*ones, **static))
        return self.run_unchecked(*args, **static)


def _value(option: Any, args: Any, static: Any) -> Any:
    """An option of a kernel, which may be a function of the arguments."""
    return option(*args, **static) if callable(option) else option


def by_rows(point: Callable[..., Any]) -> Callable[..., Any]:
    """``point`` as a function of a batch, to be traced. A batch of one row needs no vmap: half the tracing time."""

    def rows(*args: Any) -> Any:
        if jax.tree.leaves(args)[0].shape[0] == 1:
            return jax.tree.map(lambda a: a[None], point(*jax.tree.map(lambda a: a[0], args)))
        return jax.vmap(point)(*args)

    return rows


def kernel(**options: Any) -> Callable[[Callable], Kernel]:
    """Decorator: turns a one-point function into a `Kernel`; its options are documented there."""
    return functools.partial(Kernel, **options)


def many(arguments: Any) -> bool:
    """Whether a batch is so large that NumPy, computing its points together, takes a fraction of the time per point."""
    return jax.tree.leaves(arguments)[0].shape[0] >= _LARGE_BATCH


def patience(alone: float, together: float) -> Callable[..., int]:
    """A function for `Kernel.by_numpy`: ``alone`` for small batches, ``together`` for large ones (see `many`)."""
    return lambda *arguments, **static: int(together if many(arguments) else alone)


def _as_float64(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array if array.dtype == np.complex128 else array.astype(np.float64)


def pieces_of(size: int, largest: int, one_size: bool) -> Iterator[tuple[int, int, int]]:
    """(start, stop, padded size) of the calls that compute ``size`` points.

    one_size: every padded size is ``largest``. Otherwise (accelerators) padded sizes are 64, 1024, ..., ``largest``:
    computing a larger size takes little more time there, but each further size costs seconds to compile.
    """
    start = 0
    while start < size:
        count = min(size - start, largest)
        padded = largest if one_size else min(4 * 16 ** max(math.ceil(math.log2(count / 4) / 4), 1), largest)
        yield start, start + count, padded
        start += count


def cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(call: Callable[[Any], Any], pieces: list[Any], threads: int) -> list[Any]:
    """[call(piece) for piece in pieces], computed in several threads on the caller's device.

    If several threads need the same program, JAX compiles it in one of them while the others wait.
    """
    if min(threads, len(pieces)) < 2:
        return [call(piece) for piece in pieces]
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX defines its options at run time

    def work(piece: Any, context: contextvars.Context) -> Any:
        with jax.default_device(device):
            return context.run(call, piece)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces, [contextvars.copy_context() for _ in pieces]))
