"""Which examples a step sees. Static shapes: padded index arrays with a mask, all usable under jit and scan."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.mechanisms.truncated import binomial_tail
from jaxdp.training.noise import check_key
from jaxdp.typing import Step

# Folded into the key of every sample. Noise of update t is drawn from fold_in(key, t) with t < 2^31, so no draw of a
# sample has the key of a draw of noise, even where a caller gives both the same key.
_SAMPLE = np.uint32(2**32 - 1)
_CUT = np.uint32(2**32 - 2)
MOST_BINS = 2**16


class Batch(NamedTuple):
    """Indices of one batch, (size,) int32, and which of them count, (size,) bool.

    overflow: True where the sample did not fit; the same key and step with a larger size give the whole
    sample. A cut sample is not a Poisson sample and is not accounted for: do not train on it.
    The key of a batch must be unseen by the adversary. Noise drawn from the same key is independent of the batch. Runs
    that are composed need a key each: with one key their samples are the same, and cost as much as less noise.

    >>> from jaxdp import training
    >>> batch = training.cyclic_batch(3, num_examples=10, batch_size=4, num_batches=3)
    >>> batch.indices[batch.mask].tolist(), bool(batch.overflow)
    ([0, 1, 2, 3], False)
    """

    indices: jax.Array
    mask: jax.Array
    overflow: jax.Array


def with_equal_rows(data: Any, num_examples: int | None = None) -> tuple[Any, int]:
    """(data on the device, number of its rows); ValueError unless every array has as many, and ``num_examples``.

    JAX takes the last row for one beyond it: a shorter array would use that record again and again.
    """
    data = jax.tree.map(jnp.asarray, data)
    counts = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(data)}
    if len(counts) != 1 or (num_examples is not None and counts != {num_examples}):
        wanted = "equally many" if num_examples is None else f"num_examples = {num_examples}"
        raise ValueError(f"data must have {wanted} rows in every array, got {sorted(counts)}.")
    return data, counts.pop()


def cyclic_batch(step: Step, *, num_examples: int, batch_size: int, num_batches: int) -> Batch:
    """Batch number step mod num_batches of the data in their fixed order; the last one may be short.

    >>> from jaxdp import training
    >>> batch = training.cyclic_batch(2, num_examples=10, batch_size=4, num_batches=3)
    >>> batch.indices[batch.mask].tolist()
    [8, 9]
    """
    step = _checked_step(step, 1, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches)
    positions = (step % num_batches) * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    inside = positions < num_examples
    return Batch(jnp.where(inside, positions, 0), inside, jnp.zeros((), bool))


def reshuffled_batch(step: Step, key: jax.Array, *, num_examples: int, batch_size: int, num_batches: int) -> Batch:
    """As `cyclic_batch`, in an order drawn anew for every epoch from the key (see `Batch`) and the epoch's number.

    >>> import jax
    >>> from jaxdp import training
    >>> sizes = {"num_examples": 10, "batch_size": 5, "num_batches": 2}
    >>> batches = [training.reshuffled_batch(step, jax.random.key(0), **sizes) for step in range(2)]
    >>> sorted(int(index) for batch in batches for index in batch.indices)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    batch = cyclic_batch(step, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches)
    order = jax.random.permutation(_sample_key(key, jnp.asarray(step, jnp.int32) // num_batches), num_examples)
    return batch._replace(indices=order[batch.indices].astype(jnp.int32))


def poisson_batch(step: Step, key: jax.Array, *, num_examples: int, probability: float | jax.Array, size: int) -> Batch:
    """Every example independently with the given probability, drawn from the key and the step; padded to size.

    key: see `Batch`. probability: a number in [0, 1], or a scalar of a traced program, which is clipped to [0, 1]
    (NaN: nobody); it is rounded down to a multiple of 2^-32, so it is never above the one that is accounted for.

    >>> import jax
    >>> from jaxdp import training
    >>> batch = training.poisson_batch(0, jax.random.key(0), num_examples=1000, probability=0.1, size=200)
    >>> batch.indices.shape, int(batch.mask.sum())
    ((200,), 113)
    """
    return _padded(_poisson(step, key, num_examples, probability, size), int(size))


def truncated_poisson_batch(
    step: Step, key: jax.Array, *, num_examples: int, probability: float | jax.Array, size: int
) -> Batch:
    """The sample of `poisson_batch`, and where it holds more than ``size`` examples a uniformly drawn ``size`` of them.

    Arguments as there. In random order; ``overflow`` is always False. Accounted for by `DPSGD` with
    sampling="truncated_poisson".

    >>> import jax
    >>> from jaxdp import training
    >>> batch = training.truncated_poisson_batch(0, jax.random.key(0), num_examples=1000, probability=0.1, size=64)
    >>> int(batch.mask.sum()), bool(batch.overflow)
    (64, False)
    """
    chosen = _poisson(step, key, num_examples, probability, size)
    order = jax.random.permutation(_sample_key(key, jnp.asarray(step, jnp.int32), _CUT), num_examples)
    places = _padded(chosen[order], int(size))
    return Batch(order[places.indices].astype(jnp.int32), places.mask, jnp.zeros((), bool))


def balls_in_bins_batch(step: Step, key: jax.Array, *, num_examples: int, num_bins: int, size: int) -> Batch:
    """The examples of one bin: in every epoch of num_bins steps each example is in one uniformly drawn bin.

    step: its epoch is step // num_bins, its bin step % num_bins; bins are drawn anew for every epoch from the key (see
    `Batch`) and the epoch's number, as 64 random bits modulo num_bins: the probability of a bin is 1/num_bins up to a
    relative 2^-48. num_bins: 1 to 65536. size: static; a bin that holds more examples does not fit. Accounted by
    `jaxdp.RandomAllocation`.

    Raises ValueError where a bin of the epoch does not fit, with the size that does; under a trace ``overflow`` tells.

    >>> import jax
    >>> from jaxdp import training
    >>> sizes = {"num_examples": 12, "num_bins": 3, "size": 12}
    >>> epoch = [training.balls_in_bins_batch(step, jax.random.key(0), **sizes) for step in range(3)]
    >>> sum(int(batch.mask.sum()) for batch in epoch)  # everyone once
    12
    """
    bins_given = validate.integer("num_bins", num_bins, 1)
    # above it jax.random.randint, of 32-bit integers, computes the remainder of its 64 bits with an overflow
    validate.reject("num_bins", bins_given, bins_given > MOST_BINS, f"at most {MOST_BINS}")
    traced = isinstance(step, jax.core.Tracer) or isinstance(key, jax.core.Tracer)
    step = _checked_step(step, 1, num_examples=num_examples, num_bins=num_bins, size=size)
    bins = jax.random.randint(_sample_key(key, step // num_bins), (num_examples,), 0, num_bins)
    if not traced:
        largest = int(np.bincount(np.asarray(bins), minlength=num_bins).max())
        if largest > size:
            chance = bin_overflow_chance(num_examples, num_bins, size)
            raise ValueError(
                f"size must be at least {largest} for this epoch, as its largest bin holds so many, got {size}. "
                f"The chance that an epoch has a bin above {size} is at most {chance:.2g}."
            )
    return _padded(bins == step % num_bins, int(size))


def bin_overflow_chance(num_examples: int, num_bins: int, size: int) -> float:
    """Upper bound of the chance that, in one epoch, some bin holds more than ``size`` examples.

    `binomial_tail` of Binomial(num_examples, 1/num_bins) >= size + 1, times num_bins; at most 1.

    >>> from jaxdp import training
    >>> f"{training.bin_overflow_chance(10_000, 100, 160):.1e}"
    '1.1e-06'
    """
    for name, value in (("num_examples", num_examples), ("num_bins", num_bins)):
        validate.integer(name, value, 1)
    validate.integer("size", size, 0)
    # the next number up: 1/num_bins is rounded
    return min(1.0, num_bins * binomial_tail(num_examples, min(1.0, np.nextafter(1 / num_bins, 1.0)), size + 1))


def band_rounds(num_steps: int, bands: int) -> int:
    """Rounds to account for, ceil(num_steps / bands), with noise that is correlated over ``bands`` steps.

    DP-SGD whose correlation matrix has ``bands`` non-zero diagonals, under cyclic Poisson sampling: the examples are
    split into ``bands`` fixed parts, and step t samples the part t mod bands. An example's possible participations are
    then at least ``bands`` steps apart, their columns do not overlap, and the run is that of

        repeat(PoissonSampled(Gaussian(noise_multiplier), q), band_rounds(num_steps, bands))

    with q the probability with which an example of a part is sampled in its steps (``bands`` times the fraction of all
    examples in an expected batch) and noise_multiplier the noise over the clip norm times the largest column norm of
    the matrix. Whole numbers, num_steps >= 0, bands >= 1.

    Assumes: the split does not depend on the data; every column of the matrix has the norm that noise_multiplier is
    stated for, or less. The noise itself is not made here; the package jax_privacy has it.
    Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization".

    >>> from jaxdp import training
    >>> training.band_rounds(1000, 16)
    63
    """
    validate.integer("num_steps", num_steps, 0)
    validate.integer("bands", bands, 1)
    return -(-int(num_steps) // int(bands))


def _checked_step(step: Step, least: int, **sizes: Any) -> jax.Array:
    """The step as int32. A jax array is not looked at, it may be traced, or not computed yet."""
    for name, value in sizes.items():
        validate.integer(name, value, least)
    if not isinstance(step, jax.Array):
        validate.integer("step", step, 0)
    return jnp.asarray(step, jnp.int32)


def _sample_key(key: jax.Array, number: Any, use: np.uint32 = _SAMPLE) -> jax.Array:
    """The key of the sample of a step, or of the order of an epoch."""
    return jax.random.fold_in(jax.random.fold_in(check_key(key), use), number)


def _poisson(step: Step, key: jax.Array, num_examples: int, probability: Any, size: int) -> jax.Array:
    """Who is in the sample of a step, (num_examples,) bool."""
    step = _checked_step(step, 0, num_examples=num_examples, size=size)
    if not validate.is_traced(probability):
        probability = float(validate.probability("probability", probability))
    # float32 uniforms have 23 bits and compare upwards: at rate 1e-3 that is 1e-4 more than was accounted for
    bits = jax.random.bits(_sample_key(key, step), (num_examples,), jnp.uint32)
    if isinstance(probability, jax.Array):
        probability = probability.astype(jnp.float32)  # 2^32 is no float16
    # the product is exact; a comparison with NaN is False
    xp = jnp if isinstance(probability, jax.Array) else np
    below = xp.where((probability > 0) & (probability < 1), probability * 2.0**32, 0.0).astype(xp.uint32)
    return (probability >= 1) | (bits < below)


@functools.partial(jax.jit, static_argnames="size")
def _padded(chosen: jax.Array, size: int) -> Batch:
    """The examples of a boolean array, in their order."""
    count = jnp.sum(chosen, dtype=jnp.int32)
    indices = jnp.nonzero(chosen, size=size, fill_value=0)[0].astype(jnp.int32)
    return Batch(indices, jnp.arange(size) < count, count > size)
