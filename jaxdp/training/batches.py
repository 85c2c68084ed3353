"""Which examples a step sees. Static shapes: padded index arrays with a mask, all usable under jit and scan."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate

# Folded into the key of every sample. Noise of update t is drawn from fold_in(key, t) with t < 2^31, so no draw of a
# sample has the key of a draw of noise, even where a caller gives both the same key.
_SAMPLE = np.uint32(2**32 - 1)


class Batch(NamedTuple):
    """Indices of one batch, (size,) int32, and which of them count, (size,) bool.

    overflow: True where the sample did not fit; the same key and step with a larger size give the whole
    sample. A cut sample is not a Poisson sample and is not accounted for: do not train on it.
    """

    indices: jax.Array
    mask: jax.Array
    overflow: jax.Array


def cyclic_batch(step: Any, *, num_examples: int, batch_size: int, num_batches: int) -> Batch:
    """Batch number step mod num_batches of the data in their fixed order; the last one may be short."""
    step = _checked_step(step, 1, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches)
    start = (step % num_batches) * batch_size
    positions = start + jnp.arange(batch_size, dtype=jnp.int32)
    return _fixed(positions, num_examples)


def reshuffled_batch(step: Any, key: jax.Array, *, num_examples: int, batch_size: int, num_batches: int) -> Batch:
    """As `cyclic_batch`, in an order drawn anew for every epoch from the key and the epoch's number.

    The key must be unseen by the adversary. Noise drawn from the same key is independent of the order.
    """
    step = _checked_step(step, 1, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches)
    order = jax.random.permutation(_sample_key(key, step // num_batches), num_examples)
    batch = cyclic_batch(step, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches)
    return batch._replace(indices=order[batch.indices].astype(jnp.int32))


def poisson_batch(step: Any, key: jax.Array, *, num_examples: int, probability: float, size: int) -> Batch:
    """Every example independently with the given probability, drawn from the key and the step; padded to size.

    The key must be unseen by the adversary. Noise drawn from the same key is independent of the sample. The rate is the
    probability rounded down to a multiple of 2^-32, so it is never above the one that is accounted for.
    """
    step = _checked_step(step, 0, num_examples=num_examples, size=size)
    validate.probability("probability", probability)
    chosen = _coins(_sample_key(key, step), probability, num_examples)
    indices = jnp.nonzero(chosen, size=size, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(chosen, dtype=jnp.int32)
    return Batch(indices, jnp.arange(size) < count, count > size)


def _checked_step(step: Any, least: int, **sizes: Any) -> jax.Array:
    """The step as int32. A jax array is not looked at, it may be traced, or not computed yet."""
    for name, value in sizes.items():
        validate.integer(name, value, least)
    if not isinstance(step, jax.Array):
        validate.integer("step", step, 0)
    return jnp.asarray(step, jnp.int32)


def _sample_key(key: jax.Array, number: Any) -> jax.Array:
    """The key of the sample of a step, or of the order of an epoch."""
    return jax.random.fold_in(jax.random.fold_in(key, _SAMPLE), number)


def _coins(key: jax.Array, probability: float, count: int) -> jax.Array:
    # float32 uniforms have 23 bits and compare upwards: at rate 1e-3 that is 1e-4 more than was accounted for
    if probability >= 1:
        return jnp.ones((count,), bool)
    return jax.random.bits(key, (count,), jnp.uint32) < np.uint32(int(probability * 2**32))


def _fixed(positions: jax.Array, num_examples: int) -> Batch:
    inside = positions < num_examples
    return Batch(jnp.where(inside, positions, 0), inside, jnp.zeros((), bool))
