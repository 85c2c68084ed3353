"""How the theorems of this package meet their kernels: broadcast, one batched call, NumPy out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.runtime.precision import require_x64


def run(kernel: Any, check: Callable[..., tuple], *arguments: Any, **static: Any) -> Any:
    """`kernel` at the broadcast of the arguments.

    Concrete arguments go through `check` (which returns them as float64 arrays) and one batched call, NumPy out.
    Traced ones go through the kernel's one-point function, which answers an invalid value with the vacuous bound.
    """
    if validate.is_traced(*arguments):
        require_x64()
        return jnp.vectorize(lambda *point: kernel.point(*point, **static))(*map(jnp.asarray, arguments))
    arrays = check(*arguments)
    return batched(lambda *flat: kernel(*flat, **static), *arrays)


def batched(function: Callable, *arrays: np.ndarray) -> Any:
    """`function` of flat arrays of one length, at the broadcast of `arrays`; results in the broadcast shape."""
    spread = np.broadcast_arrays(*arrays)
    shape = spread[0].shape
    values = function(*(array.reshape(-1) for array in spread))
    return jax.tree_util.tree_map(lambda value: np.asarray(value).reshape(shape)[()], values)
