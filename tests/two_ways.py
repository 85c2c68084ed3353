"""A function written with ``xp``, run as a kernel is: by NumPy, or compiled with the options of the time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options


def plainly(run, *numbers):
    """By NumPy, without the seconds of compiling: for what a test sabotages, and for errors of a formula."""
    with jax.enable_x64(True), on_host():
        return jax.tree_util.tree_map(np.asarray, run(*(np.asarray(x, np.float64) for x in numbers)))


def row_by_row(run, *columns):
    """`plainly` at each row of the columns, stacked."""
    rows = [plainly(run, *numbers) for numbers in zip(*columns, strict=True)]
    return jax.tree_util.tree_map(lambda *leaves: np.stack(leaves), *rows)


def compiled(run, *numbers):
    """By a program of its own for each ``run``, which must not change what it computes with."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        made = _program(run)(*(jnp.asarray(x, jnp.float64) for x in numbers))
        return jax.tree_util.tree_map(np.asarray, made)


@functools.cache
def _program(run):
    return jax.jit(run, compiler_options=compiler_options("cpu"))
