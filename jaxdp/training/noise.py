"""The state of a private optax transformation, its noise (never drawn twice), and sums of clipped gradients."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxdp import validate

INT32_MAX = 2**31 - 1
_DRAWS = 4  # normal draws that are summed for each noise value
_STREAM = 0x6E6F6973  # "nois" in ASCII, folded into the key of the noise


class NoisyState(NamedTuple):
    """State of the optimizer: integers only, so that no privacy guarantee depends on floating-point precision.

    count: int32, number of updates made; never set it back. key: uint32 key data. The noise of update t is drawn from
    fold_in(key, t): a repeated count repeats the noise, and models that share a state get the same noise. nonfinite:
    int32; in NoisyProjectedSGD the number of updates whose gradient had NaN or infinite entries, which were replaced by
    zero; in DPSGD and ShuffledSGD the number of examples left out for that reason. Publish neither the key, which
    determines the noise, nor nonfinite, which is a count without noise.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jaxdp import training
    >>> sgd = training.DPSGD(clip_norm=1.0, noise_multiplier=1.0, sampling_probability=0.01)
    >>> state = sgd.privatize(jax.random.key(0)).init(jnp.zeros(3))
    >>> int(state.count), int(state.nonfinite)
    (0, 0)
    """

    count: jax.Array  # type: ignore[assignment]  # the name of the field is fixed, tuple.count is not needed
    key: jax.Array
    nonfinite: jax.Array


def check_key(key: Any) -> jax.Array:
    """The key as a typed JAX key; an error says what is wrong with it."""
    if key is None:
        raise ValueError("key must be a JAX random key, got None. A default would repeat other runs' noise.")
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and getattr(key, "dtype", None) != jnp.uint32:
        found = f"dtype {key.dtype}" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(f"key must be a JAX random key such as jax.random.key(seed), got {found}.")
    checked = key if typed else jax.random.wrap_key_data(key)
    if checked.ndim:
        raise ValueError(f"key must be one key, got shape {checked.shape}. Use vmap over the keys of several runs.")
    impl = str(jax.random.key_impl(checked))
    if impl != "threefry2x32":  # with other implementations, draws of two steps or under vmap may coincide
        raise ValueError(f"key must be of impl 'threefry2x32', as jax.random.key(seed) is by default, got {impl!r}.")
    return checked


def check_shapes(name: str, tree: Any, params: Any) -> None:
    """ValueError unless the leaves have the shapes of the parameters: broadcasting would repeat the noise."""
    given, wanted = (jax.tree.map(jnp.shape, each) for each in (tree, params))
    if given != wanted:
        raise ValueError(f"{name} must have the shapes of the parameters, {wanted}, got {given}.")


def _varying(x: Any) -> frozenset[str]:
    """Mesh axes over which an array varies, as its type says inside shard_map with check_vma=True."""
    return jax.typeof(x).manual_axis_type.varying


def require_partition(partition: Any) -> tuple[str, ...]:
    """The mesh axes of the surrounding shard_map or pmap; ValueError if there are any and partition is None."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if axes and partition is None:
        raise ValueError(
            "partition must give the PartitionSpec of each parameter (P() if replicated) inside shard_map or pmap over "
            f"{axes}, got None: each shard would clip alone and draw the same noise. Call a function without this "
            "argument under plain jit, where arrays may be sharded."
        )
    return axes


def require_whole_gradients(params: Any, partition: Any, data: Any = ()) -> None:
    """Inside shard_map: ValueError unless check_vma=True, partition fits params, and devices hold all examples."""
    axes = require_partition(partition)
    if not axes:
        return
    if not all(axis in _varying(jax.lax.axis_index(axis)) for axis in axes):
        raise ValueError(
            "shard_map must have check_vma=True where gradients are clipped, got check_vma=False or pmap: there each "
            "device computes a different gradient of a replicated parameter."
        )
    sharded = leaf_axes(params, partition)
    if any(_varying(leaf) != set(names) for leaf, names in zip(jax.tree.leaves(params), sharded, strict=True)):
        raise ValueError(f"partition must say how the parameters are sharded over {axes}, got {partition}.")
    split = set().union(*map(_varying, jax.tree.leaves(data))) - set(itertools.chain(*sharded))
    if split:
        raise ValueError(
            f"data must hold all examples on every device inside shard_map, got data split over {sorted(split)}. Use "
            "plain jit to split the examples."
        )


def _states_in(tree: Any) -> list[NoisyState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, NoisyState))
    return [leaf for leaf in leaves if isinstance(leaf, NoisyState)]


def the_state(state: Any) -> NoisyState:
    """The `NoisyState` in the state of an optimizer, for example of a chain; TypeError for none or several."""
    found = _states_in(state)
    if len(found) != 1:
        raise TypeError(f"state must hold one NoisyState, got {len(found) or 'none'} in a {type(state).__name__}.")
    return found[0]


def check_steps(steps: Any) -> np.ndarray:
    """Numbers of updates, whole, as float64; an error says what to pass instead of a state or a traced count."""
    if _states_in(steps):
        raise TypeError("steps must be a whole number, got the optimizer's state: pass state.count.")
    if validate.is_traced(steps):
        raise TypeError("steps must be concrete: read state.count outside of jit, the accounting runs on the host.")
    counts = validate.integer("steps", steps, 0)
    validate.reject("steps", counts, counts >= INT32_MAX, f"below {INT32_MAX}, where the counter stops")
    return counts


def transformation(
    key: Any, move: Callable[..., tuple[Any, jax.Array]], partition: Any = None, low_precision: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optax transformation of move(grads, count, params, draws, **extra) -> (updates, increment of nonfinite).

    draws: standard normal noise in the shapes of the parameters, new in each update. The counters stop at 2^31 - 1.
    low_precision: as for `check_params`.
    """
    key = check_key(key)
    impl = jax.random.key_impl(key)

    def init(params: Any) -> NoisyState:
        check_params(params, low_precision=low_precision)
        # new arrays, not shared with the caller: jit may donate the state
        return NoisyState(jnp.zeros((), jnp.int32), jnp.copy(jax.random.key_data(key)), jnp.zeros((), jnp.int32))

    def update(grads: Any, state: NoisyState, params: Any = None, **extra: Any) -> tuple[Any, NoisyState]:
        check_params(params, low_precision=low_precision)
        require_partition(partition)
        draws = normal_like(step_key(state, impl), params, partition)
        updates, nonfinite = move(grads, state.count, params, draws, **extra)
        return updates, _counted(state, nonfinite)

    return optax.GradientTransformationExtraArgs(init, update)


@jax.jit
def _counted(state: NoisyState, nonfinite: jax.Array) -> NoisyState:
    """The state after one more update."""
    room = jnp.int32(INT32_MAX) - state.nonfinite
    count = jnp.where(state.count < INT32_MAX, state.count + 1, state.count)
    return NoisyState(count, state.key, state.nonfinite + jnp.minimum(nonfinite.astype(jnp.int32), room))


def step_key(state: NoisyState, impl: Any) -> jax.Array:
    """The key of the noise of the next update from this state."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key, impl=impl), state.count)


def normal_like(key: jax.Array, tree: Any, partition: Any = None) -> Any:
    """Standard normal float32 noise in the shapes of a tree, with one random stream per leaf (and per shard).

    A value is half the sum of four normal draws. A single float32 draw never exceeds 5.42 standard deviations: a larger
    output, which real noise gives with probability 6e-8, would show that a person took part. No stream is one that a
    user draws from the same key, because a constant is folded into the key.

    partition: None, or inside shard_map the PartitionSpecs of the leaves (a tree prefix). A leaf that is replicated
    over a mesh axis gets the same noise on all devices of the axis, a sharded leaf different noise on each shard.
    """
    leaves, treedef = jax.tree.flatten(tree)
    axes = leaf_axes(tree, partition)
    drawn = []
    for number, (leaf, names) in enumerate(zip(leaves, axes, strict=True)):
        leaf_key = jax.random.fold_in(jax.random.fold_in(key, _STREAM), number)
        for name in names:
            leaf_key = jax.random.fold_in(leaf_key, jax.lax.axis_index(name))
        four = [jax.random.normal(each, jnp.shape(leaf), jnp.float32) for each in jax.random.split(leaf_key, _DRAWS)]
        drawn.append(0.5 * functools.reduce(jnp.add, four))
    return jax.tree.unflatten(treedef, drawn)


def leaf_axes(tree: Any, partition: Any) -> list[tuple[str, ...]]:
    """For each leaf, the mesh axes over which it is sharded."""
    if partition is None:
        return [()] * len(jax.tree.leaves(tree))
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    specs = jax.tree.leaves(jax.tree.broadcast(partition, tree, is_leaf=is_spec), is_leaf=is_spec)
    axes = ((entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None) for spec in specs)
    return [tuple(itertools.chain.from_iterable(each)) for each in axes]


def summed(values: list[jax.Array], axes: Sequence[tuple[str, ...]]) -> jax.Array:
    """Sum of one number per leaf; the numbers of a sharded leaf are summed over its shards."""
    parts = (jax.lax.psum(value, names) if names else value for value, names in zip(values, axes, strict=True))
    return sum(parts, jnp.zeros((), jnp.float32))


def check_params(params: Any, *, low_precision: str | None) -> None:
    """Error unless parameters are floating-point. low_precision: why 16-bit ones are refused; None accepts them."""
    if params is None:
        raise ValueError("params must be given, as in tx.update(grads, state, params), got None.")
    for leaf in jax.tree.leaves(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"params must be floating, got a leaf of dtype {dtype}.")
        if low_precision and np.dtype(dtype).itemsize < 4:
            raise TypeError(f"params must be float32 or float64, got {dtype}: {low_precision}")


def clip_and_sum(
    gradients: Any, mask: jax.Array, clip_norm: float | None, partition: Any = None
) -> tuple[Any, jax.Array]:
    """(sum of the masked per-example gradients, each clipped in l2 over all leaves; number of examples left out).

    gradients: leaves whose leading axis is the batch. clip_norm: None for no clipping. partition: as for `normal_like`.
    Examples with a non-finite gradient are left out. A gradient whose clipping factor underflows float32 is clipped to
    zero.
    """
    leaves = jax.tree.leaves(gradients)
    if not leaves:
        raise ValueError("params must have at least one array, got a tree without leaves.")
    size = leaves[0].shape[0]
    if mask.shape != (size,) or mask.dtype != bool:
        raise ValueError(
            f"mask must be ({size},) booleans, one for each example, got shape {mask.shape} and dtype {mask.dtype}."
        )
    # reduced by more than the float32 error of a norm, so that no clipped gradient is longer than clip_norm
    bound = None if clip_norm is None else clip_norm * (1 - 1e-5)
    return _summed(gradients, mask, bound, axes=tuple(leaf_axes(gradients, partition)))


@functools.partial(jax.jit, static_argnames="axes")
def _summed(gradients: Any, mask: jax.Array, bound: Any, *, axes: tuple[tuple[str, ...], ...]) -> tuple[Any, jax.Array]:
    leaves, treedef = jax.tree.flatten(gradients)
    rows = [g.reshape(g.shape[0], math.prod(g.shape[1:])).astype(jnp.float32) for g in leaves]
    finite = summed([jnp.any(~jnp.isfinite(r), axis=1).astype(jnp.float32) for r in rows], axes) == 0
    keep = mask & finite
    rows = [jnp.where(keep[:, None], r, 0.0) for r in rows]
    weight = keep.astype(jnp.float32)
    if bound is not None:
        # Divide by the largest entry before squaring: the square of 1e20 overflows float32, and the factor would be 0.
        # XLA may multiply by the reciprocal instead: outside these limits it, or the product below, would underflow.
        largest = [jnp.max(jnp.abs(r), axis=1, initial=0.0) for r in rows]
        largest = [jax.lax.pmax(each, names) if names else each for each, names in zip(largest, axes, strict=True)]
        unit = jnp.clip(jnp.stack(largest).max(0), 2.0**-100, 2.0**100)
        square = summed([jnp.sum(jnp.square(r / unit[:, None]), axis=1) for r in rows], axes)
        factor = jnp.minimum(1.0, bound / unit / jnp.maximum(jnp.sqrt(square), 1e-30))
        # subnormal numbers have too few digits
        weight = weight * jnp.where(factor >= jnp.finfo(jnp.float32).tiny, factor, 0.0)
    total = [jnp.matmul(weight, r, precision=jax.lax.Precision.HIGHEST) for r in rows]
    total = [each.reshape(g.shape[1:]) for each, g in zip(total, leaves, strict=True)]
    return jax.tree.unflatten(treedef, total), jnp.sum(mask & ~finite, dtype=jnp.int32)


def clipped_gradient_sum(
    loss: Callable[[Any, Any], Any], params: Any, examples: Any, mask: Any, clip_norm: Any, partition: Any = None
) -> tuple[Any, jax.Array]:
    """`clip_and_sum` of the gradients of loss(params, example) over a batch of examples."""
    per_example = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, examples)
    return clip_and_sum(per_example, jnp.asarray(mask), clip_norm, partition)
