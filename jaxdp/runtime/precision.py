"""Kernels in batches, by NumPy or compiled.

Every kernel of this package is a function of ONE parameter point. `kernel` makes it a function of a flat batch. The
call enters a float64 scope of its own and leaves the user's flag as it is. Compiling takes seconds, so the first points
are answered by NumPy (`runtime.arrays`); after them the kernel is compiled. On a CPU its program has one size, and a
batch is cut into pieces of it: new values and new batch lengths compile nothing, and a row's number does not depend on
the batch it stands in.

The checks of `runtime.backend` stand before the first number, and the first row of each compiled program is compared
with NumPy's. Where one fails there is no number but a `BackendError`.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdp.runtime.arrays import in_programs, on_host
from jaxdp.runtime.backend import compiler_options, ensure_canary, platform, refuse, require_reductions, x64
from jaxdp.runtime.rows import Rows


def whole_number(variable: str, otherwise: int) -> int:
    """The whole number >= 0 in an environment variable, ``otherwise`` where it is not set."""
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{variable} is {text!r}, must be a whole number >= 0: set it to one, or unset it.")
    return int(text or otherwise)


# For the points of one call: float64 numbers alive, and the largest number of points. On a CPU more are not faster.
_TOGETHER = {"cpu": (2**16, 2**11)}
_ON_ACCELERATOR = (2**29, 2**20)
# Largest number of points that NumPy answers before a program is compiled; 0: every point is compiled.
_COMPILE_AFTER = whole_number("JAXDP_COMPILE_AFTER", 1_000_000)
_FEW, _MANY = 8, 32  # points from which NumPy computes them together, and takes a fraction of the time for each
_NUMBERS_AT_ONCE = 2**16  # of the arguments of all points that NumPy computes together
_AGREEMENT = 1e-6  # relative difference of a compiled program and NumPy; miscompiled sums are off by 0.1 and more
all_kernels: weakref.WeakSet[Any] = weakref.WeakSet()
_expected: contextvars.ContextVar[int | None] = contextvars.ContextVar("expected", default=None)


@contextlib.contextmanager
def expecting(calls: int) -> Iterator[None]:
    """Inside, a kernel's points in one call, ``calls`` times, decide between NumPy and a program.

    What it has answered before does not: all processes that share such calls compute each in the same way, and their
    numbers agree to the last bit.
    """
    token = _expected.set(calls)
    try:
        yield
    finally:
        _expected.reset(token)


def memory_maps() -> float:
    """Number of memory maps of this process over the limit that Linux sets, 0 where there is no such limit."""
    try:
        limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
        return len(pathlib.Path("/proc/self/maps").read_bytes().splitlines()) / limit
    except (OSError, ValueError):
        return 0.0


def forget_compiled() -> None:
    """Drop the compiled programs of all kernels; they are compiled again when they are needed.

    A program of XLA for CPUs takes about a hundred memory maps. Beyond the system's limit (65530 by default) the next
    program is a segmentation fault.
    """
    for one in list(all_kernels):
        for compiled in list(one._jitted.values()):
            compiled.clear_cache()


@dataclasses.dataclass(eq=False, repr=False)
class Kernel:
    """A one-point function with a batched float64 front, run by NumPy or compiled. Made by `kernel`.

    ``kernel.point`` is the traceable one-point function; ``kernel(*args, **static)`` takes pytrees of
    NumPy arrays whose leading axis is the batch and returns the same in NumPy float64.

    static: names of keyword arguments that fix sizes; each value is compiled once.
    working_set: float64 numbers alive per point, or a function of the arguments that gives it; limits a call's points.
    large: the kernel has so many operations that compile time matters more than run time. On a CPU its pieces go to all
        cores.
    bounds: the kernel returns (lower, upper).
    by_numpy: number of points that NumPy answers before the kernel is compiled, or a function of the arguments that
        gives it; about as many as take as long as compiling. The kernel has to be written with
        `jaxdp.runtime.arrays.xp`.
    at_once: number of points that NumPy computes together, with what `jaxdp.runtime.rows.Rows` has; else one by one.
    absolute: difference that a program and NumPy may have besides a relative one, or a function of a point's arguments.
    """

    point: Callable
    _: dataclasses.KW_ONLY
    static: tuple[str, ...] = ()
    working_set: int | Callable[..., int] = 4096
    large: bool = False
    bounds: bool = False
    by_numpy: int | Callable[..., int] = 0
    at_once: int = 1
    absolute: float | Callable[..., float] = 1e-300

    def __post_init__(self) -> None:
        self.traces = 0
        defaults = {name: inspect.signature(self.point).parameters[name].default for name in self.static}
        self._defaults = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
        functools.update_wrapper(self, self.point)
        self._jitted: dict[Any, Any] = {}
        self._agreed: set[Any] = set()
        self._answered: dict[Any, float] = collections.defaultdict(float)  # by program: of its patience
        all_kernels.add(self)

    def _compiled(self, where: str) -> Callable:
        require_reductions(where, self.large)
        if where in self._jitted:
            return self._jitted[where]

        def batched(static_items, structure, *leaves):
            self.traces += 1
            with jax.numpy_rank_promotion("allow"):  # a user's strictness is not ours to break on
                args = jax.tree.unflatten(structure, leaves)
                return by_rows(functools.partial(self.point, **dict(static_items)))(*args)

        made = jax.jit(batched, static_argnums=(0, 1), compiler_options=compiler_options(where, self.large))
        return self._jitted.setdefault(where, made)  # one for all threads

    def _most_points(self, where: str, args: Any, static: Any) -> int:
        room, most = _TOGETHER.get(where, _ON_ACCELERATOR)
        size = self.working_set(*args, **static) if callable(self.working_set) else self.working_set
        return min(most, 1 << int(np.log2(max(1.0, room / size))))

    def run_unchecked(self, *args: Any, **static: Any) -> Any:
        """The batched call without the canary (the canary itself uses it)."""
        # Concrete numbers inside a user's trace are computed now, not traced: the result is NumPy.
        with x64(), jax.core.eval_context():
            args = jax.tree.map(_as_float64, args)
            shapes = tuple(leaf.shape for leaf in jax.tree.leaves(args))
            size = shapes[0][0]
            # One program, whether a caller names a default or leaves it out.
            static = {**self._defaults, **static}
            items = tuple(sorted(static.items()))
            program = items, tuple(shape[1:] for shape in shapes)
            expected = _expected.get()
            patience = min(self._patience(args, static), _COMPILE_AFTER)
            used = size / patience if patience > 0 else math.inf
            self._answered[program] += used  # of what compiling takes
            if (self._answered[program] if expected is None else expected * used) <= 1 + 1e-9:
                numbers = max(sum(math.prod(shape[1:]) for shape in shapes), 1)
                most = min(self.at_once, max(_NUMBERS_AT_ONCE // numbers, 1)) if size >= _FEW else 1
                parts = [self._by_numpy(args, start, static, most) for start in range(0, size, most)]
                return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
            return self._by_programs(args, size, static, program)

    def _patience(self, args: Any, static: Any) -> int:
        return self.by_numpy(*args, **static) if callable(self.by_numpy) else self.by_numpy

    def _by_numpy(self, args: Any, start: int, static: Any, most: int = 1) -> Any:
        """Up to ``most`` rows from ``start`` on."""
        size = min(most, jax.tree.leaves(args)[0].shape[0] - start)
        with on_host(size > 1):
            if size == 1:
                made = self.point(*jax.tree.map(lambda leaf: leaf[start], args), **static)
                return jax.tree.map(lambda x: np.asarray(x)[None], made)
            try:
                made = self.point(*jax.tree.map(lambda leaf: Rows(leaf[start : start + size]), args), **static)
            except (TypeError, AttributeError):  # a class of the user's may be written with other functions
                each = [self._by_numpy(args, row, static) for row in range(start, start + size)]
                return jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)

        def every(x: Any) -> np.ndarray:
            return np.broadcast_to(x.data if isinstance(x, Rows) else x, (size, *np.shape(x)))

        return jax.tree.map(every, made)

    def _by_programs(self, args: Any, size: int, static: Any, program: Any) -> Any:
        where, traced = platform(), self.traces
        run, checked = self._compiled(where), self._patience(args, static) > 0
        leaves, structure = jax.tree.flatten(args)

        def call(piece: tuple[int, int, int]) -> Any:
            start, stop, padded = piece
            rows = np.minimum(np.arange(start, start + padded), stop - 1)
            with in_programs(), x64(), jax.core.eval_context():
                made = run(program[0], structure, *(leaf[rows] for leaf in leaves))
            made = jax.tree.map(lambda a: np.asarray(a)[: stop - start], made)
            if checked and (where, padded, program) not in self._agreed:
                self._require_agreement(where, made, args, start, static)
                self._agreed.add((where, padded, program))
            return made

        on_cpu = where == "cpu"
        first, *rest = pieces_of(size, self._most_points(where, args, static), on_cpu)
        pieces = [call(first), *side_by_side(call, rest, cores() if on_cpu and self.large else 1)]
        if self.traces != traced and memory_maps() > 0.5:
            forget_compiled()
        return jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)

    def _require_agreement(self, where: str, compiled: Any, args: Any, start: int, static: Any) -> None:
        """BackendError unless a program's first row agrees with NumPy's: bounds overlap, other numbers are close."""
        first, other = ([x[0] for x in jax.tree.leaves(a)] for a in (compiled, self._by_numpy(args, start, static)))
        if self.bounds:
            (lower, upper), (its_lower, its_upper) = first, other
            slack = _AGREEMENT * np.abs(np.where(np.isfinite(its_upper), its_upper, 0.0))
            good = bool(np.all(lower <= its_upper + slack) and np.all(its_lower <= upper + slack))
        else:
            point = jax.tree.map(lambda leaf: leaf[start], args)
            most = self.absolute(*point) if callable(self.absolute) else self.absolute
            good = all(np.allclose(a, b, _AGREEMENT, most, equal_nan=True) for a, b in zip(first, other, strict=True))
        if not good:
            refuse(self.point.__name__, where, first, "NumPy computes", other)

    def __call__(self, *args: Any, **static: Any) -> Any:
        """The kernel at every row of the batch, as NumPy float64, after the canary has passed."""
        ensure_canary(self.point.__module__)
        size = jax.tree.leaves(args)[0].shape[0]
        if size == 0:
            ones = jax.tree.map(lambda a: np.ones((1, *np.shape(a)[1:])), args)
            return jax.tree.map(lambda a: a[:0], self.run_unchecked(*ones, **static))
        return self.run_unchecked(*args, **static)


def by_rows(point: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one point for a batch, to be traced. One row is traced in half the time of several."""

    def rows(*args: Any) -> Any:
        if jax.tree.leaves(args)[0].shape[0] == 1:
            return jax.tree.map(lambda a: a[None], point(*jax.tree.map(lambda a: a[0], args)))
        return jax.vmap(point)(*args)

    return rows


def kernel(**options: Any) -> Callable[[Callable], Kernel]:
    """Decorator: one-point function -> `Kernel`, which documents the options."""
    return functools.partial(Kernel, **options)


def many(arguments: Any) -> bool:
    """Whether a call has so many points that NumPy, computing them together, takes a fraction of the time for each."""
    return jax.tree.leaves(arguments)[0].shape[0] >= _MANY


def patience(alone: float, together: float) -> Callable[..., int]:
    """For `Kernel.by_numpy`: points that take NumPy as long as compiling, a few in a call, and many."""
    return lambda *arguments, **static: int(together if many(arguments) else alone)


def _as_float64(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array if array.dtype == np.complex128 else array.astype(np.float64)


def pieces_of(size: int, largest: int, one_size: bool) -> Iterator[tuple[int, int, int]]:
    """(start, stop, padded size) of the calls that compute ``size`` points.

    one_size: padded sizes are all ``largest``; else 64, 1024, ... ``largest``, for an accelerator: it computes the
    larger size in little more time, and compiling a program for each smaller one takes seconds.
    """
    start = 0
    while start < size:
        rest = min(size - start, largest)
        padded = largest if one_size else min(4 * 16 ** max(math.ceil(math.log2(rest / 4) / 4), 1), largest)
        yield start, start + rest, padded
        start += rest


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(call: Callable[[Any], Any], pieces: list[Any], threads: int) -> list[Any]:
    """call(piece) for each piece, in several threads, on the caller's device.

    Threads that want the same program wait for the first of them to compile it (jax sees to that).
    """
    if min(threads, len(pieces)) < 2:
        return [call(piece) for piece in pieces]
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # jax adds its options at run time

    def work(piece: Any, context: contextvars.Context) -> Any:
        with jax.default_device(device):
            return context.run(call, piece)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces, [contextvars.copy_context() for _ in pieces]))
