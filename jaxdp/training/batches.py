"""Which examples a training step uses: padded index arrays of static shape with a mask, usable under jit and scan."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import PROBABILITY
from jaxdp.mechanisms.truncated import binomial_tail
from jaxdp.training.noise import check_key
from jaxdp.typing import Step

# One of these is folded into the key of every draw of a batch. The noise of update t is drawn from fold_in(key, t) with
# t < 2^31, so a batch and the noise never use the same derived key, even if the caller gives both the same key.
_SAMPLE, _CUT = np.uint32(2**32 - 1), np.uint32(2**32 - 2)

# With more bins, the 32-bit arithmetic of jax.random.randint overflows when it reduces its 64 random bits.
MOST_BINS = 2**16


class Batch(NamedTuple):
    """Indices of one batch, (size,) int32, and the mask of the valid indices, (size,) bool.

    overflow: True if the sample has more than ``size`` examples. Do not train on a cut batch: the accounting does not
    cover it. The same key and step with a larger size give the whole sample.
    The adversary must not see the key of a batch. Noise drawn from the same key is independent of the batch. Runs that
    are composed need different keys: two runs with equal samples cost as much privacy as one run with less noise.

    >>> from jaxdp import training
    >>> batch = training.cyclic_batch(3, num_examples=10, batch_size=4, num_batches=3)
    >>> batch.indices[batch.mask].tolist(), bool(batch.overflow)
    ([0, 1, 2, 3], False)
    """

    indices: jax.Array
    mask: jax.Array
    overflow: jax.Array


def with_equal_rows(data: Any, num_examples: int | None = None) -> tuple[Any, int]:
    """(data as JAX arrays, number of rows); ValueError unless all have as many rows, ``num_examples`` or at least one.

    JAX clamps an index beyond the last row to the last row, so a shorter array would use its last record repeatedly.
    """
    data = jax.tree.map(jnp.asarray, data)
    counts = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(data)}
    if len(counts) != 1 or 0 in counts or (num_examples is not None and counts != {num_examples}):
        wanted = "equally many rows, at least one," if num_examples is None else f"num_examples = {num_examples} rows"
        raise ValueError(f"data must have {wanted} in every array, got {sorted(counts)}.")
    return data, counts.pop()


def cyclic_batch(step: Step, *, num_examples: int, batch_size: int, num_batches: int) -> Batch:
    """Batch number ``step % num_batches`` of the data in their fixed order; the last batch of an epoch may be short.

    >>> from jaxdp import training
    >>> batch = training.cyclic_batch(2, num_examples=10, batch_size=4, num_batches=3)
    >>> batch.indices[batch.mask].tolist()
    [8, 9]
    """
    step, num_examples, batch_size, num_batches = _checked(
        step, 1, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches
    )
    positions = (step % num_batches) * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    inside = positions < num_examples
    return Batch(jnp.where(inside, positions, 0), inside, jnp.zeros((), bool))


def reshuffled_batch(step: Step, key: jax.Array, *, num_examples: int, batch_size: int, num_batches: int) -> Batch:
    """A `cyclic_batch` of the data in a random order, drawn anew for every epoch.

    The key (see `Batch`) and the number of the epoch determine the order.

    >>> import jax
    >>> from jaxdp import training
    >>> sizes = {"num_examples": 10, "batch_size": 5, "num_batches": 2}
    >>> batches = [training.reshuffled_batch(step, jax.random.key(0), **sizes) for step in range(2)]
    >>> sorted(int(index) for batch in batches for index in batch.indices)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    batch = cyclic_batch(step, num_examples=num_examples, batch_size=batch_size, num_batches=num_batches)
    epoch = jnp.asarray(step, jnp.int32) // int(num_batches)
    order = jax.random.permutation(_sample_key(key, epoch), int(num_examples))
    return batch._replace(indices=order[batch.indices].astype(jnp.int32))


def poisson_batch(step: Step, key: jax.Array, *, num_examples: int, probability: float | jax.Array, size: int) -> Batch:
    """A Poisson sample, padded to ``size``: every example is in it independently with the given probability.

    The key (see `Batch`) and the step determine the sample. probability: a number in [0, 1], or a traced scalar, which
    is clipped to [0, 1] (NaN: empty sample). It is rounded down to a multiple of 2^-32, never up.

    >>> import jax
    >>> from jaxdp import training
    >>> batch = training.poisson_batch(0, jax.random.key(0), num_examples=1000, probability=0.1, size=200)
    >>> batch.indices.shape, int(batch.mask.sum())
    ((200,), 113)
    """
    step, num_examples, size = _checked(step, 0, num_examples=num_examples, size=size)
    return _padded(_poisson(step, key, num_examples, probability), size)


def truncated_poisson_batch(
    step: Step, key: jax.Array, *, num_examples: int, probability: float | jax.Array, size: int
) -> Batch:
    """The sample of `poisson_batch`; if it has more than ``size`` examples, a uniformly drawn part of ``size`` of them.

    Arguments as for `poisson_batch`. The examples are in random order, and ``overflow`` is always False. `DPSGD` with
    sampling="truncated_poisson" accounts for this sample.

    >>> import jax
    >>> from jaxdp import training
    >>> batch = training.truncated_poisson_batch(0, jax.random.key(0), num_examples=1000, probability=0.1, size=64)
    >>> int(batch.mask.sum()), bool(batch.overflow)
    (64, False)
    """
    step, num_examples, size = _checked(step, 0, num_examples=num_examples, size=size)
    order = jax.random.permutation(_sample_key(key, step, _CUT), num_examples)
    places = _padded(_poisson(step, key, num_examples, probability)[order], size)
    return Batch(order[places.indices].astype(jnp.int32), places.mask, jnp.zeros((), bool))


def balls_in_bins_batch(step: Step, key: jax.Array, *, num_examples: int, num_bins: int, size: int) -> Batch:
    """The examples of one bin: in every epoch of num_bins steps each example is in one uniformly drawn bin.

    The batch is bin step % num_bins of epoch step // num_bins. The key (see `Batch`) and the number of the epoch
    determine the bins. A bin is 64 random bits modulo num_bins, so its probability is 1/num_bins up to a relative
    2^-48. num_bins: 1 to 65536. size: static, at least the number of examples in the largest bin.
    `jaxdp.RandomAllocation` accounts for these batches.

    Raises ValueError if a bin of the epoch has more than ``size`` examples, and names the size that is needed. Under a
    trace ``overflow`` marks a bin of more than ``size`` examples instead.

    >>> import jax
    >>> from jaxdp import training
    >>> sizes = {"num_examples": 12, "num_bins": 3, "size": 12}
    >>> epoch = [training.balls_in_bins_batch(step, jax.random.key(0), **sizes) for step in range(3)]
    >>> sum(int(batch.mask.sum()) for batch in epoch)  # everyone once
    12
    """
    step, num_examples, num_bins, size = _checked(step, 1, num_examples=num_examples, num_bins=num_bins, size=size)
    if num_bins > MOST_BINS:
        raise ValueError(f"num_bins must be at most {MOST_BINS}, got {num_bins}.")
    bins = jax.random.randint(_sample_key(key, step // num_bins), (num_examples,), 0, num_bins)
    if not validate.is_traced(bins):
        largest = int(np.bincount(np.asarray(bins), minlength=num_bins).max())
        if largest > size:
            chance = bin_overflow_chance(num_examples, num_bins, size)
            raise ValueError(
                f"size must be at least {largest} for this epoch, as its largest bin holds so many, got {size}. "
                f"The chance that an epoch has a bin above {size} is at most {chance:.2g}."
            )
    return _padded(bins == step % num_bins, size)


def bin_overflow_chance(num_examples: int, num_bins: int, size: int) -> float:
    """Upper bound of the probability that, in one epoch, some bin holds more than ``size`` examples.

    min(1, num_bins P[Binomial(num_examples, 1/num_bins) >= size + 1]), the probability bounded by `binomial_tail`.

    >>> from jaxdp import training
    >>> f"{training.bin_overflow_chance(10_000, 100, 160):.1e}"
    '1.0e-06'
    """
    trials, bins = validate.count("num_examples", num_examples, 1), validate.count("num_bins", num_bins, 1)
    # 1/bins is rounded: take the next larger float64
    rate = min(1.0, np.nextafter(1 / bins, 1.0))
    return min(1.0, bins * binomial_tail(trials, rate, validate.count("size", size, 0) + 1))


def band_rounds(num_steps: int, bands: int) -> int:
    """Number of rounds to account for, ceil(num_steps / bands), if the noise is correlated over ``bands`` steps.

    This is DP-SGD whose correlation matrix has ``bands`` non-zero diagonals, under cyclic Poisson sampling: the
    examples are split into ``bands`` fixed parts, and step t samples from part t mod bands. An example can then take
    part only in steps that are at least ``bands`` apart. Their matrix columns do not overlap, so the run is

        repeat(PoissonSampled(Gaussian(noise_multiplier), q), band_rounds(num_steps, bands))

    q: probability that an example is sampled in a step of its part (``bands`` times the expected batch size, divided by
    the number of all examples). noise_multiplier: noise / (clip norm x largest column norm of the matrix). num_steps,
    bands: whole, num_steps >= 0, bands >= 1.

    Assumes: the split does not depend on the data; no column of the matrix has a larger norm than the one in
    noise_multiplier. jaxdp does not draw correlated noise; the package jax_privacy does.
    Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization".

    >>> from jaxdp import training
    >>> training.band_rounds(1000, 16)
    63
    """
    return -(-validate.count("num_steps", num_steps, 0) // validate.count("bands", bands, 1))


def _checked(step: Step, least: int, **sizes: Any) -> tuple[Any, ...]:
    """The step as int32, and the sizes as ints >= ``least``.

    The value of a step that is a JAX array is not checked: it may be traced, or not computed yet.
    """
    whole = [validate.count(name, value, least) for name, value in sizes.items()]
    if not isinstance(step, jax.Array):
        validate.count("step", step, 0)
    return jnp.asarray(step, jnp.int32), *whole


def _sample_key(key: jax.Array, number: Any, use: np.uint32 = _SAMPLE) -> jax.Array:
    """The key that draws the sample of step ``number``, or the order or bins of epoch ``number``."""
    return jax.random.fold_in(jax.random.fold_in(check_key(key), use), number)


def _poisson(step: Step, key: jax.Array, num_examples: int, probability: Any) -> jax.Array:
    """Which examples are in the sample of a step, (num_examples,) bool."""
    if not validate.is_traced(probability):
        probability = validate.one("probability", probability, PROBABILITY)
    # not float32 uniforms: they have 23 bits, and uniform < p rounds p up, at p = 1e-3 by a relative 1e-4
    bits = jax.random.bits(_sample_key(key, step), (num_examples,), jnp.uint32)
    if isinstance(probability, jax.Array):
        probability = probability.astype(jnp.float32)  # 2^32 exceeds the range of float16
    # probability * 2^32 is exact; every comparison with NaN is False: an empty sample
    xp = jnp if isinstance(probability, jax.Array) else np
    below = xp.where((probability > 0) & (probability < 1), probability * 2.0**32, 0.0).astype(xp.uint32)
    return (probability >= 1) | (bits < below)


@functools.partial(jax.jit, static_argnames="size")
def _padded(chosen: jax.Array, size: int) -> Batch:
    """The batch of the first ``size`` examples that ``chosen`` marks, in their order."""
    count = jnp.sum(chosen, dtype=jnp.int32)
    indices = jnp.nonzero(chosen, size=size, fill_value=0)[0].astype(jnp.int32)
    return Batch(indices, jnp.arange(size) < count, count > size)
