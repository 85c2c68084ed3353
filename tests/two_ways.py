"""Two ways to run a function written with ``xp``, as kernels run: by NumPy, or compiled with the current options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options


def plainly(run, *numbers):
    """The function's values by NumPy, without seconds of compiling: for sabotaged code, and for errors of a formula."""
    with jax.enable_x64(True), on_host():
        return jax.tree_util.tree_map(np.asarray, run(*(np.asarray(x, np.float64) for x in numbers)))


def row_by_row(run, *columns):
    """`plainly` at each row of the columns, the results stacked."""
    rows = [plainly(run, *numbers) for numbers in zip(*columns, strict=True)]
    return jax.tree_util.tree_map(lambda *leaves: np.stack(leaves), *rows)


def compiled(run, *numbers):
    """The function's values by a program, compiled once for each ``run``; what ``run`` closes over must not change."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        values = _program(run)(*(jnp.asarray(x, jnp.float64) for x in numbers))
        return jax.tree_util.tree_map(np.asarray, values)


@functools.cache
def _program(run):
    return jax.jit(run, compiler_options=compiler_options("cpu"))
