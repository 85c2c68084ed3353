"""The backend: float64 scope, compiler options, and checks that run before the first number is returned.

A canary is a computation with a known answer; it runs once per process. Some releases of jaxlib miscompile certain
reductions. They are checked once with our compiler options, and once without them when a user compiles our code. A
failed check raises `BackendError`.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.runtime.arrays import xp

# Compiler options. jaxlib 0.10.2 to 0.12.0.1 miscompiles reductions over two log1p (jax-ml/jax 39103, 39257, 40412).
# The empty list of fusion types avoids the bug. The other two options only save compile time. Turning the fusion
# emitters off selects an older code generator, which jaxlib 0.11 lacks: it saves a third of the contours' compile time
# at equal run time, but sums over users run up to 1.8 times slower, so only large kernels get it. An option of
# _SAVE_TIME that the user sets in XLA_FLAGS is left alone. If a release refuses the options, each one is tried alone.
CURE = "--xla_cpu_experimental_ynn_fusion_type="
_FOR_LARGE: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
_SAVE_TIME: dict[str, Any] = {"xla_backend_optimization_level": 1, **_FOR_LARGE}
CPU_OPTIONS: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": "", **_SAVE_TIME}


class BackendError(RuntimeError):
    """The backend returned wrong numbers for a computation with a known answer."""


def x64():
    """Context manager: float64 inside, the caller's flag restored outside, this thread only."""
    return jax.enable_x64(True)


@functools.cache
def compiler_options(platform: str, large: bool = True) -> dict[str, Any] | None:
    """Options for our own jit calls on this platform, None if there are none. large: include those of large kernels."""
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
        # eval_context: under a user's trace the probe would fail, and `compiler_options` would cache that result.
        with jax.core.eval_context():
            jax.jit(lambda x: x + 1, compiler_options=options)(np.float32(0)).block_until_ready()
    except Exception:  # releases raise different exception types for an unknown option
        return False
    return True


def platform() -> str:
    """Platform of the device on which JAX currently computes (honours `jax.default_device`)."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX defines its options at run time
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def long_arrays_pay() -> bool:
    """Whether a loop should take long steps: in NumPy and on an accelerator each operation is a separate call."""
    return xp.eager or platform() != "cpu"


CANARIES: list[tuple[str, Callable[[], tuple[Any, Any, float]]]] = []


def canary(name: str) -> Callable[[Callable], Callable]:
    """Register a check: a function returning (computed, exact, relative tolerance).

    The check runs once per process and platform, before any kernel of the module that defines it returns a number.
    """

    def register(check: Callable) -> Callable:
        CANARIES.append((name, check))
        return check

    return register


@functools.cache  # an error is not remembered
def ensure_canary(module: str, where: str) -> None:
    """Run the checks that guard the kernels of ``module`` on platform ``where``; BackendError when one fails."""
    for name, check in CANARIES:
        if check.__module__ == module:
            _require(name, where, *check())


@functools.cache
def require_reductions(where: str, large: bool) -> None:
    """BackendError if the reductions that some jaxlib miscompiles are wrong with the kernel's options; checked once."""
    _require("reductions of log1p and expm1", where, *check_reductions(compiler_options(where, large)))


def _require(name: str, where: str, computed: Any, exact: Any, tolerance: float) -> None:
    computed, exact = np.broadcast_arrays(np.asarray(computed), np.asarray(exact))
    good = np.abs(computed - exact) <= tolerance * np.abs(exact)
    if not good.all():
        refuse(name, where, computed[~good][0], "the exact value is", exact[~good][0])


def refuse(name: str, where: str, computed: Any, but: str, exact: Any) -> NoReturn:
    """Raise BackendError: on platform ``where``, ``name`` gave ``computed`` instead of ``exact``."""
    raise BackendError(
        f"{name}: backend {where!r} with jaxlib {jax.lib.__version__} computed {computed!r} where {but} {exact!r}. "
        "No number was returned. Install another jaxlib release (0.10.1 is good)."
    )


# Reductions that jaxlib from 0.10.2 on gets wrong under jit by factors of 2 to 200 at 512 rows (200 rows are right).
# Each is compiled alone: in one program they would share operands, be fused differently and come out right.
_REDUCTIONS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda xp, s: xp.sum(xp.log1p(-s) + xp.log1p(s), -1),
    lambda xp, s: xp.max(xp.log1p(-s) + xp.log1p(s), -1),
    lambda xp, s: xp.sum(xp.expm1(-s) * xp.expm1(s), -1),
    lambda xp, s: xp.ravel(xp.log(s) @ xp.exp(s).T),
)


def check_reductions(options: dict[str, Any] | None) -> tuple[Any, Any, float]:
    """(compiled value, NumPy value, relative tolerance) of the reductions that known releases miscompile."""
    s = np.linspace(0.01, 0.9, 512 * 16).reshape(512, 16)
    with x64(), jax.core.eval_context():
        compiled = [jax.jit(functools.partial(r, jnp), compiler_options=options) for r in _REDUCTIONS]
        computed = np.concatenate([np.asarray(reduction(s)) for reduction in compiled])
    return computed, np.concatenate([reduction(np, s) for reduction in _REDUCTIONS]), 1e-11


@functools.cache
def plain_compilation_is_sound(where: str) -> bool:
    """Whether the reductions are right without our compiler options, as in a program that a user compiles."""
    computed, exact, tolerance = check_reductions(None)
    return bool(np.all(np.abs(computed - exact) <= tolerance * np.abs(exact)))


def require_x64(compiles: bool = True) -> None:
    """For use under a user's trace: RuntimeError where x64 is off, BackendError where the backend miscompiles sums.

    compiles: whether the user's own jit, which lacks our compiler options, compiles the whole computation.
    """
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # JAX defines its options at run time
        raise RuntimeError(
            "jaxdp computes in float64: inside jit, vmap or grad turn x64 on (JAX_ENABLE_X64=1 or `with "
            "jax.enable_x64(True):`), or call it on concrete numbers outside the transformation."
        )
    where = platform()
    if compiles and not plain_compilation_is_sound(where):
        raise BackendError(
            f"jaxlib {jax.lib.__version__} miscompiles sums of log1p under your own jit or vmap on backend {where!r}. "
            f"Start Python with the environment variable XLA_FLAGS={CURE}, or install jaxlib 0.10.1, or call jaxdp "
            "outside of jit and vmap, where it sets this option itself."
        )
