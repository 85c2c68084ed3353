"""Per-example gradients: clipped, masked, summed; a broken example is left out alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def clip_and_sum(gradients: Any, mask: jax.Array, clip_norm: float | None) -> tuple[Any, jax.Array]:
    """(sum of the masked per-example gradients, each clipped in l2 over all leaves; number left out).

    gradients: leaves with leading axis the batch. clip_norm None: no clipping. Examples with a non-finite
    gradient count as left out. float32 throughout.
    """
    leaves = [g.astype(jnp.float32) for g in jax.tree.leaves(gradients)]
    finite = jnp.stack([jnp.all(jnp.isfinite(g.reshape(g.shape[0], -1)), axis=1) for g in leaves]).all(0)
    keep = mask & finite
    weight = keep.astype(jnp.float32)
    if clip_norm is not None:
        weight = weight * _clip_factor(leaves, keep, clip_norm)
    summed = [
        jnp.tensordot(weight, jnp.where(_column(keep, g), g, 0.0), axes=1, precision=jax.lax.Precision.HIGHEST)
        for g in leaves
    ]
    tree = jax.tree.structure(gradients)
    return jax.tree.unflatten(tree, summed), jnp.sum(mask & ~finite, dtype=jnp.int32)


def mean_gradient(
    loss: Callable[[Any, Any], Any], params: Any, examples: Any, mask: Any, *, clip_norm: float | None
) -> tuple[Any, jax.Array]:
    """`clip_and_sum` of the gradients of loss(params, example) over a batch of examples."""
    per_example = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, examples)
    return clip_and_sum(per_example, jnp.asarray(mask), clip_norm)


def _clip_factor(leaves: list[jax.Array], keep: jax.Array, clip_norm: float) -> jax.Array:
    # the largest entry comes out first, else the square of a gradient of 1e20 is infinite and its clip zero
    rows = [jnp.where(_column(keep, g), g, 0.0).reshape(g.shape[0], -1) for g in leaves]
    largest = jnp.stack([jnp.max(jnp.abs(r), axis=1, initial=0.0) for r in rows]).max(0)
    unit = jnp.where(largest > 0, largest, 1.0)
    square = sum(jnp.sum(jnp.square(r / unit[:, None]), axis=1) for r in rows)
    # inward by more than float32 sums of squares err, so that rounding leaves no gradient longer than clip_norm
    bound = clip_norm * (1 - 1e-5)
    return jnp.minimum(1.0, bound / (unit * jnp.maximum(jnp.sqrt(square), 1e-30)))


def _column(keep: jax.Array, leaf: jax.Array) -> jax.Array:
    return keep.reshape((-1,) + (1,) * (leaf.ndim - 1))
