"""The float64 scope, kernels in batches by NumPy or compiled, and the checks of both.

Every kernel of this package is a function of ONE parameter point. `kernel` makes it a function of a flat batch. The
call enters a float64 scope of its own and leaves the user's flag as it is. Compiling takes seconds, so the first points
are answered by NumPy (`runtime.arrays`); after them the kernel is compiled. On a CPU its program has one size, and a
batch is cut into pieces of it: new values and new batch lengths compile nothing, and a row's number does not depend on
the batch it stands in.

Two checks stand before the first number. A canary, a computation with a known answer, is run once per process. The
first row of each compiled program is compared with NumPy's. Either failing is a `BackendError`.
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
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.runtime.arrays import on_host, xp
from jaxdp.runtime.rows import Rows


def whole_number(variable: str, otherwise: int) -> int:
    """The whole number >= 0 in an environment variable, ``otherwise`` where it is not set."""
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{variable} is {text!r}, must be a whole number >= 0: set it to one, or unset it.")
    return int(text or otherwise)


# Compiler options. jaxlib from 0.10.2 to 0.12.0.1 miscompiles reductions over two log1p (jax-ml/jax 39103, 39257,
# 40412); the empty list of fusion types avoids that. The other two options only save compile time. The older code
# generator of fusions, which 0.11 no longer has, saves a third for the contours, which run as fast with it, but slows
# sums over users by up to 1.8, so that only large kernels get it. An option that the user sets in XLA_FLAGS is left
# alone. Where a release refuses the options, each is probed.
CURE = "--xla_cpu_experimental_ynn_fusion_type="
_FOR_LARGE: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
_SAVE_TIME: dict[str, Any] = {"xla_backend_optimization_level": 1, **_FOR_LARGE}
CPU_OPTIONS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "", **_SAVE_TIME}
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


class BackendError(RuntimeError):
    """The backend returned wrong numbers for a computation with a known answer."""


def x64():
    """Context manager: float64 inside, the caller's flag restored outside, this thread only."""
    return jax.enable_x64(True)


@functools.cache
def compiler_options(platform: str, large: bool = True) -> dict[str, Any] | None:
    """Options for our own jit calls on this platform, or None where none exists.

    large: with those of large kernels.
    """
    if platform != "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    skipped = {name for name in _SAVE_TIME if name in flags or (name in _FOR_LARGE and not large)}
    wanted = {name: value for name, value in CPU_OPTIONS.items() if name not in skipped}
    if not _is_known(wanted):
        wanted = {name: value for name, value in wanted.items() if _is_known({name: value})}
    return wanted or None


def _is_known(options: dict[str, Any]) -> bool:
    try:
        # Run for real even under a user's trace: a probe that only traces would fail and stay cached as "unknown".
        with jax.core.eval_context():
            jax.jit(lambda x: x + 1, compiler_options=options)(np.float32(0)).block_until_ready()
    except Exception:  # the option's absence surfaces as different exception types across releases
        return False
    return True


def platform() -> str:
    """Platform of the device that computations go to now (honours `jax.default_device`)."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # jax adds its options at run time
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def long_arrays_pay() -> bool:
    """Whether each operation costs a call of its own, by NumPy and on an accelerator: then a loop takes long steps."""
    return xp.eager or platform() != "cpu"


@contextlib.contextmanager
def expecting(points: int) -> Iterator[None]:
    """Inside, ``points`` alone decides between NumPy and a program, not what a kernel has answered before.

    So all processes that share these points compute in the same way, and their numbers agree to the last bit.
    """
    token = _expected.set(points)
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
        self._answered: collections.Counter[Any] = collections.Counter()
        all_kernels.add(self)

    def _compiled(self, where: str) -> Callable:
        _require_reductions(where, self.large)
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
            self._answered[program] += size
            points = self._answered[program] if expected is None else max(expected, size)
            if points <= min(self._patience(args, static), _COMPILE_AFTER):
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
            with x64(), jax.core.eval_context():
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
            _refuse(self.point.__name__, where, first, "NumPy computes", other)

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


CANARIES: list[tuple[str, Callable[[], tuple[Any, Any, float]]]] = []
_passed: set[tuple[Any, ...]] = set()
_checking = threading.RLock()  # one thread checks while the others wait


def canary(name: str) -> Callable[[Callable], Callable]:
    """Register a check: a function returning (computed, exact, relative tolerance).

    It runs once per process and backend, before the first number of any kernel of its own module leaves.
    """

    def register(check: Callable) -> Callable:
        CANARIES.append((name, check))
        return check

    return register


def ensure_canary(module: str) -> None:
    """Run the checks that guard the kernels of ``module``; BackendError when one fails."""
    _pass_once(module, platform(), [(name, check) for name, check in CANARIES if check.__module__ == module])


def _pass_once(key: Any, where: str, checks: list[tuple[str, Callable[[], tuple[Any, Any, float]]]]) -> None:
    if (where, key) in _passed:
        return
    with _checking:
        for name, check in checks if (where, key) not in _passed else []:
            _require(name, where, *check())
        _passed.add((where, key))


def _require_reductions(where: str, large: bool) -> None:
    """BackendError, checked once, if reductions that some release miscompiles are wrong with the kernel's options."""
    check = ("reductions of log1p and expm1", lambda: check_reductions(compiler_options(where, large)))
    _pass_once(large, where, [check])


def _require(name: str, where: str, computed: Any, exact: Any, tolerance: float) -> None:
    computed, exact = np.broadcast_arrays(np.asarray(computed), np.asarray(exact))
    good = np.abs(computed - exact) <= tolerance * np.abs(exact)
    if not good.all():
        _refuse(name, where, computed[~good][0], "the exact value is", exact[~good][0])


def _refuse(name: str, where: str, computed: Any, but: str, exact: Any) -> NoReturn:
    raise BackendError(
        f"{name}: backend {where!r} with jaxlib {jax.lib.__version__} computed {computed!r} where {but} {exact!r}. "
        "No number was returned. Install another jaxlib release (0.10.1 is good)."
    )


# Reductions that jaxlib from 0.10.2 on gets wrong under jit, by factors of 2 to 200, at 512 rows (at 200 it is right).
# Each is compiled alone: in one computation they share their operands, are fused otherwise and come out right.
_REDUCTIONS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda xp, s: xp.sum(xp.log1p(-s) + xp.log1p(s), -1),
    lambda xp, s: xp.max(xp.log1p(-s) + xp.log1p(s), -1),
    lambda xp, s: xp.sum(xp.expm1(-s) * xp.expm1(s), -1),
    lambda xp, s: xp.ravel(xp.log(s) @ xp.exp(s).T),
)


def check_reductions(options: dict[str, Any] | None) -> tuple[Any, Any, float]:
    """(computed, exact, tolerance) of sums that known releases miscompile."""
    s = np.linspace(0.01, 0.9, 512 * 16).reshape(512, 16)
    with x64(), jax.core.eval_context():
        compiled = [jax.jit(functools.partial(r, jnp), compiler_options=options) for r in _REDUCTIONS]
        computed = np.concatenate([np.asarray(reduction(s)) for reduction in compiled])
    return computed, np.concatenate([reduction(np, s) for reduction in _REDUCTIONS]), 1e-11


@functools.cache
def plain_compilation_is_sound(where: str) -> bool:
    """Whether the reductions are right without our options too, as in a program that a user compiles."""
    computed, exact, tolerance = check_reductions(None)
    return bool(np.all(np.abs(computed - exact) <= tolerance * np.abs(exact)))


def require_x64(compiles: bool = True) -> None:
    """For use under a user's trace: RuntimeError where x64 is off, BackendError where the backend miscompiles sums.

    compiles: whether all of it becomes part of a program that the user compiles, without our options.
    """
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # jax adds its options at run time
        raise RuntimeError(
            "jaxdp computes in float64: inside jit, vmap or grad turn x64 on (JAX_ENABLE_X64=1 or `with "
            "jax.enable_x64(True):`), or call it on concrete numbers outside the transformation."
        )
    where = platform()
    if compiles and not plain_compilation_is_sound(where):
        raise BackendError(
            f"under your own jit this backend ({where!r}, jaxlib {jax.lib.__version__}) sums log1p wrongly. Start "
            f"Python with the environment variable XLA_FLAGS={CURE}, or install jaxlib 0.10.1; outside of jit and vmap "
            "the same call is compiled safely."
        )
