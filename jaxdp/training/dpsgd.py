"""DP-SGD with Poisson, truncated Poisson or allocation sampling; every iterate may be released."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import validate
from jaxdp.accounting import epsilon as certified_epsilon
from jaxdp.calibration import calibrate
from jaxdp.domains import NOISE, PROBABILITY, RATE, whole
from jaxdp.mechanisms.allocation import RandomAllocation
from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import compose, repeat
from jaxdp.mechanisms.sampled import PoissonSampled
from jaxdp.mechanisms.truncated import truncated_poisson
from jaxdp.training import batches, noise, settings
from jaxdp.training.settings import CLIP_NORM, Setting
from jaxdp.typing import Example, Loss, Params, Real, Step

MOST_SETTINGS = 128
"""Largest number of different steps in one composition; more would take minutes."""

_DOMAINS = {"clip_norm": CLIP_NORM, "noise_multiplier": NOISE, "sampling_probability": RATE}


class ClippedSum(NamedTuple):
    """Sum of clipped per-example gradients over one sample, the number of examples left out, and the sample's step.

    total: a pytree like the parameters, float32. nonfinite: number of examples whose gradient was not finite. step: the
    update of another step refuses the sum; None, for a sum that you computed yourself, is not checked.
    `DPSGD.clipped_sum` returns this record, and the update of `DPSGD.optimizer` takes it.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jaxdp import training
    >>> sgd = training.DPSGD(clip_norm=1.0, noise_multiplier=1.0, sampling_probability=1.0)
    >>> clipped = sgd.clipped_sum(lambda w, x: w * x, jnp.zeros(()), jnp.array([0.25, -3.0]), 0, jax.random.key(0))
    >>> f"{float(clipped.total):.4f}"  # 0.25, and -3 clipped to the norm 1
    '-0.7500'
    """

    total: optax.Updates
    nonfinite: jax.Array
    step: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DPSGD:
    """Differentially private SGD: each step sums the clipped gradients of a random sample and adds Gaussian noise.

    clip_norm: l2 bound C > 0 on the gradient of one example. noise_multiplier: (noise std on the sum) / C, > 0.
    sampling_probability: probability, in [0, 1], that an example is in the sample of a step. Each of the three is a
    number or a schedule: a public function of the step that jit can trace, like the schedules of optax. num_examples:
    n; if given, the noisy sum is divided by the constant n x sampling_probability, otherwise it is not divided.

    sampling: "poisson"; or "truncated_poisson": if a Poisson sample has more than truncated_batch_size examples, a
    uniformly drawn part of that size is kept (`truncated_poisson_batch`; needs truncated_batch_size <= num_examples);
    or "allocation": each example is in one uniformly drawn step of every epoch (`balls_in_bins_batch`). An epoch has
    1/sampling_probability steps, a whole number up to 65536; only clip_norm may then be a schedule.

    Guarantee: that of `after`. For "poisson" it is repeat(PoissonSampled(Gaussian(noise_multiplier),
    sampling_probability), steps), for "allocation" repeat(RandomAllocation(Gaussian(noise_multiplier), steps of an
    epoch), epochs begun). A truncated step is a `jaxdp.mechanisms.truncated.TruncatedPoisson`, which dominates the step
    for data sets of at most num_examples records and their neighbours; there are upper bounds only. All iterates may be
    released. The natural relation is add_or_remove. Under replace_one (not with allocation) two sums differ by up to
    2 C; the accounting includes this.

    Schedules: `after` composes each step at its own settings and merges equal steps; at most 128 different pairs of
    noise_multiplier and sampling_probability are allowed. Step t is the update at state.count = t. Training uses noise
    that is a relative 2^-20 larger, and scheduled probabilities a relative 2^-20 smaller, than stated. A value outside
    its range raises an error: at construction for the first 1024 steps, in `after` for all. A training step with such a
    value returns NaN, which shows nothing of the data.

    Assumes: nothing changes the clipped sum before this transformation, in an optax.chain or by hand: scaling or
    momentum there raises no error, but invalidates the bound C. Anything that sees no data but the noisy updates may
    follow (Adam, momentum, weight decay, averaging). The sample of a step is drawn by `batch` (or is another Poisson
    sample that the adversary does not see) for step state.count, from a key that no other composed run uses for its
    batches; shuffled or cyclic batches are not covered. Normalisation, schedules and the number of steps do not depend
    on the data. A schedule's value in the compiled step is within a relative 2^-21 of its value on the host. The model
    computes no statistic across examples (batch normalisation). The transformation gets the whole parameter tree: with
    optax.masked, a part is clipped alone, and the masked rest is not private. Floating-point noise is as good as real
    noise (docs/limits.md). The key has 64 random bits; key, state and checkpoints are secret.
    Reference: Abadi et al. 2016; Zhu, Dong, Wang 2022, Theorem 11; notebooks/proofs/truncated_sampling.md.

    >>> import jaxdp
    >>> from jaxdp import training
    >>> sgd = training.DPSGD(clip_norm=1.0, noise_multiplier=1.0, sampling_probability=0.01)
    >>> f"{jaxdp.epsilon(sgd.after(1000), 1e-5):.4f}"
    '1.8282'
    """

    clip_norm: Setting
    noise_multiplier: Setting
    sampling_probability: Setting
    num_examples: int | None = None
    sampling: str = "poisson"
    truncated_batch_size: int | None = None

    def __post_init__(self):
        for name in _DOMAINS:
            self._checked(name, settings.CHECKED_STEPS)
        constant = {name: domain for name, domain in _DOMAINS.items() if not callable(getattr(self, name))}
        settings.as_numbers(self, **constant, num_examples=whole(1), truncated_batch_size=whole(1))
        if self.sampling not in ("poisson", "truncated_poisson", "allocation"):
            raise ValueError(
                f"sampling must be 'poisson', 'truncated_poisson' or 'allocation', got {self.sampling!r}. "
                "Account for fresh batches of fixed size with jaxdp.FixedSizeSampled; for shuffled batches only lower "
                "bounds are known."
            )
        if (self.sampling == "truncated_poisson") != (self.truncated_batch_size is not None):
            raise ValueError(
                "truncated_batch_size must be given with sampling='truncated_poisson', and only there, got "
                f"{self.truncated_batch_size!r} with {self.sampling!r}."
            )
        if self.truncated_batch_size is not None:
            size, most = np.asarray(self.truncated_batch_size), self._require_num_examples()
            validate.reject("truncated_batch_size", size, size > most, f"at most num_examples = {most}")
        if self.sampling == "allocation":
            if callable(self.noise_multiplier) or callable(self.sampling_probability):
                raise ValueError(
                    "noise_multiplier and sampling_probability must be numbers with sampling='allocation', got a "
                    "function of the step. Compose phases of whole epochs, each with its own DPSGD and key."
                )
            steps = 1 / max(self.sampling_probability, 1e-300)
            if steps > batches.MOST_BINS or abs(steps - np.rint(steps)) > 1e-9 * steps:
                raise ValueError(
                    "sampling_probability must be 1 / (a whole number of steps an epoch, at most "
                    f"{batches.MOST_BINS}) with sampling='allocation', got {self.sampling_probability!r}."
                )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch with sampling="allocation": every example takes part in one of them."""
        if self.sampling != "allocation" or callable(self.sampling_probability):
            raise ValueError(f"steps_per_epoch needs sampling='allocation', got {self.sampling!r}.")
        return int(np.rint(1 / self.sampling_probability))

    def divisor(self, step: Step) -> float | jax.Array:
        """Public divisor of the noisy sum in a step: the expected batch size, or 1 if num_examples is not given."""
        if self.num_examples is None:
            return 1.0
        expected = self.num_examples * settings.at(self.sampling_probability, step)
        return jnp.maximum(expected, 1e-30) if callable(self.sampling_probability) else max(expected, 1e-30)

    def batch(self, step: Step, key: jax.Array, *, size: int | None = None) -> batches.Batch:
        """The sample of a step, drawn as ``sampling`` states and padded to ``size`` rows.

        A Poisson sample of more than ``size`` examples has ``overflow`` set: do not train on it, call again with a
        larger size. key: the adversary must not see it; it may equal the key of the noise. size: static; not allowed
        with sampling="truncated_poisson", whose batches have truncated_batch_size rows. Needs num_examples.
        """
        rows = self.truncated_batch_size if size is None else size
        if rows is None or None not in (size, self.truncated_batch_size):
            raise ValueError(
                "size must be given, except with sampling='truncated_poisson', which fixes it, "
                f"got {size!r} with {self.sampling!r}."
            )
        return self._sample(step, key, self._require_num_examples(), rows)

    def _sample(self, step: Step, key: jax.Array, count: int, size: int) -> batches.Batch:
        if self.sampling == "allocation":
            return batches.balls_in_bins_batch(step, key, num_examples=count, num_bins=self.steps_per_epoch, size=size)
        rate = settings.at(self.sampling_probability, step)
        if callable(self.sampling_probability):
            rate = rate * (1 - settings.SLACK)
        if self.truncated_batch_size is None:
            return batches.poisson_batch(step, key, num_examples=count, probability=rate, size=size)
        most = self.truncated_batch_size
        kept = batches.truncated_poisson_batch(step, key, num_examples=count, probability=rate, size=most)
        indices, mask = (jnp.pad(each, (0, size - most)) for each in (kept.indices, kept.mask))
        return kept._replace(indices=indices, mask=mask)

    def clipped_sum(
        self,
        loss: Loss[Params, Example],
        params: Params,
        data: Example,
        step: Step,
        key: jax.Array,
        *,
        microbatch: int = 64,
        partition: object = None,
    ) -> ClippedSum:
        """Sum of clipped gradients over the sample of a step, whatever its size.

        loss(params, example): the loss of one example. data: a pytree of arrays with leading axis n, preferably on the
        device. step: state.count of the update that takes the sum, so that every update has its own sample; another
        update raises ValueError (in a traced program it returns NaN). key: as for `batch`. microbatch: number of
        examples whose gradients are held at once; memory is microbatch x parameters. Only
        sampling="truncated_poisson" cuts a sample. partition: inside shard_map, the PartitionSpecs of the parameters,
        as in `optimizer`; every device must hold all examples.
        """
        noise.require_whole_gradients(params, partition, data)
        data, count = batches.with_equal_rows(data, self.num_examples)
        microbatch = validate.count("microbatch", microbatch, 1)
        padded = -(-(self.truncated_batch_size or count) // microbatch) * microbatch
        sample = self._sample(step, key, count, padded)
        clip_norm = settings.at(self.clip_norm, step)

        def add_microbatch(number: Any, carry: ClippedSum) -> ClippedSum:
            rows = jax.lax.dynamic_slice_in_dim(sample.indices, number * microbatch, microbatch)
            mask = jax.lax.dynamic_slice_in_dim(sample.mask, number * microbatch, microbatch)
            examples = jax.tree.map(lambda a: a[rows], data)
            part, bad = noise.clipped_gradient_sum(loss, params, examples, mask, clip_norm, partition)
            return carry._replace(total=jax.tree.map(jnp.add, carry.total, part), nonfinite=carry.nonfinite + bad)

        zero = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        used = (jnp.sum(sample.mask, dtype=jnp.int32) + microbatch - 1) // microbatch
        # a copy: sum and state may both be donated to a jitted update, and may not share a buffer
        start = ClippedSum(zero, jnp.zeros((), jnp.int32), jnp.array(step, jnp.int32))
        return jax.lax.fori_loop(0, used, add_microbatch, start)

    def optimizer(
        self, key: jax.Array, *, learning_rate: Setting, partition: object = None
    ) -> optax.GradientTransformationExtraArgs:
        """The optax transformation with updates -learning_rate x (clipped sum + noise) / divisor.

        update(grads, state, params, mask=None): grads is a `ClippedSum`, or a tree of per-example gradients, each leaf
        with one leading axis more than its parameter. mask: (batch,) bool, the rows that are examples, as in `batch`;
        without it all rows count, padding too. A mean gradient is refused: its clipping cannot be checked.
        learning_rate: a number or a schedule; for a rate that changes otherwise (optax.inject_hyperparams), chain
        `privatize` and optax.sgd. partition: as in `NoisyProjectedSGD.optimizer`. State: `NoisyState`. Parameters may
        be 16-bit.

        optax.MultiSteps around this transformation raises ValueError, because it averages gradients before they are
        clipped. It may wrap an optimizer that follows `privatize`: noisy gradients may be averaged.
        """
        private = self.privatize(key, partition=partition)

        def update(grads: Any, state: noise.NoisyState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
            mean, state = private.update(grads, state, params, **extra)
            return jax.tree.map(lambda g: (-rate * g).astype(g.dtype), mean), state

        if not callable(learning_rate) and not validate.is_traced(learning_rate):
            validate.positive("learning_rate", learning_rate)
        return optax.GradientTransformationExtraArgs(private.init, update)

    def privatize(self, key: jax.Array, *, partition: object = None) -> optax.GradientTransformationExtraArgs:
        """The transformation to the noisy mean gradient; any optimizer may follow, none may stand before it.

        Arguments as for `optimizer`.
        """

        def move(
            grads: Any, count: jax.Array, params: Any, draws: Any, *, mask: Any = None, **_: Any
        ) -> tuple[Any, jax.Array]:
            clip_norm = settings.at(self.clip_norm, count)
            clipped = _clip(grads, params, mask, partition, clip_norm)
            std, divisor = self._noise_std(count, clipped.step), self.divisor(count)
            return jax.tree.map(
                lambda p, g, z: ((g + std * z) / divisor).astype(p.dtype), params, clipped.total, draws
            ), clipped.nonfinite

        return noise.transformation(key, move, partition)

    def after(self, steps: Real) -> Mechanism:
        """The mechanism of the first ``steps`` steps, for jaxdp.epsilon and similar functions; steps may be an array.

        Compose runs with different settings or batches, each with its own key and state, by
        jaxdp.compose(first.after(1000), second.after(500)).

        Raises ValueError for an invalid count or a schedule that leaves its range or has over 128 different settings.
        """
        counts = noise.check_steps(steps)
        if callable(self.clip_norm):
            self._checked("clip_norm", int(np.max(counts, initial=1)))
        if self.sampling == "allocation":
            length, sigma = self.steps_per_epoch, float(self._checked("noise_multiplier", 1)[0])
            return repeat(RandomAllocation(Gaussian(sigma), length), -(-counts // length))
        parts = []
        for sigma, rate, times in self._different_steps(counts):
            step: Mechanism = PoissonSampled(Gaussian(sigma), rate)
            if self.truncated_batch_size is not None:
                others = self._require_num_examples()
                step = truncated_poisson(sigma, rate, others, self.truncated_batch_size, fewer=True)
            parts.append(repeat(step, times))
        return parts[0] if len(parts) == 1 else compose(*parts)

    def privacy_spent(self, state: noise.NoisyState | optax.OptState, delta: float) -> float:
        """Certified epsilon at delta, in [0, 1], of the steps taken so far, under add_or_remove.

        state: the state of `optimizer` or `privatize`, or of a chain that contains one of them; not traced. A further
        count compiles no further program, unless it brings a new setting of a schedule.
        """
        target = validate.one("delta", delta, PROBABILITY, "For several, call jaxdp.epsilon(after(steps), delta).")
        return float(certified_epsilon(self.after(noise.the_state(state).count), target))

    def steps_within(self, epsilon: float, delta: float, *, max_steps: int = 10**6) -> float:
        """Largest number of steps, at most max_steps, that keeps within the budget; inf if nothing is sampled.

        With sampling="allocation" it is a whole number of epochs, or max_steps.
        """
        if not callable(self.sampling_probability) and self.sampling_probability == 0:
            return float(np.inf)
        length = self.steps_per_epoch if self.sampling == "allocation" else 1
        most = validate.count("max_steps", max_steps, 1)
        epochs = -(-most // length)
        settings.check_budget(epsilon, delta)

        def after(epochs: Any) -> Mechanism:
            return self.after(np.minimum(noise.check_steps(epochs) * length, most))

        first, last = certified_epsilon(after([1, epochs]), delta)
        if first > epsilon:
            return 0
        if last > epsilon:
            epochs = int(calibrate(after, epsilon=epsilon, delta=delta, bracket=(1, epochs)))
        return min(epochs * length, most)

    def calibrated(self, steps: int, *, epsilon: float, delta: float) -> DPSGD:
        """A copy with the smallest noise_multiplier that meets the target, found by `jaxdp.calibrate`.

        A schedule is multiplied by the smallest factor that meets it. If nothing is released, returns this DPSGD.
        """
        settings.check_budget(validate.nonnegative("epsilon", epsilon), delta)
        if certified_epsilon(self.after(steps), 0.0) == 0:
            return self
        unit = self.noise_multiplier if callable(self.noise_multiplier) else 1.0

        def with_noise(factor: float) -> DPSGD:
            return dataclasses.replace(self, noise_multiplier=settings.scaled(unit, factor))

        return with_noise(float(calibrate(lambda times: with_noise(times).after(steps), epsilon=epsilon, delta=delta)))

    def _different_steps(self, counts: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
        """(noise_multiplier, sampling_probability, how many of the first ``counts`` steps have them), for each pair."""
        if not (callable(self.noise_multiplier) or callable(self.sampling_probability)):
            return [(self.noise_multiplier, self.sampling_probability, counts)]
        last = int(np.max(counts, initial=1))
        columns = [self._checked(name, last) for name in ("noise_multiplier", "sampling_probability")]
        different, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        if len(different) > MOST_SETTINGS:
            raise ValueError(
                f"noise_multiplier and sampling_probability must have at most {MOST_SETTINGS} different pairs of "
                f"values in {last} steps, got {len(different)}. Make the schedule piecewise constant."
            )
        return [
            (float(sigma), float(rate), np.searchsorted(np.flatnonzero(which.ravel() == number), counts).astype(float))
            for number, (sigma, rate) in enumerate(different)
        ]

    def _checked(self, name: str, count: int) -> np.ndarray:
        """The setting at steps 0..count-1, (count,) float64; ValueError for a value outside its domain."""
        return settings.values(name, getattr(self, name), count, _DOMAINS[name])

    def _noise_std(self, step: jax.Array, of_sum: jax.Array | None) -> Any:
        """Standard deviation of the noise on the sum; NaN if a scheduled value of the step is outside its domain.

        Also NaN if the sum is of another step, ``of_sum``, or ValueError if both steps are concrete.
        """
        scheduled = {name: domain for name, domain in _DOMAINS.items() if callable(getattr(self, name))}
        good = [domain.contains(settings.at(getattr(self, name), step)) for name, domain in scheduled.items()]
        if of_sum is not None:
            good.append(of_sum == step)
            if not validate.is_traced(good[-1]) and not good[-1]:
                raise ValueError(
                    f"grads must be the clipped sum of step {int(step)}, the state's count, got that of step "
                    f"{int(of_sum)}: give state.count to clipped_sum, so that every update has a sample of its own."
                )
        sigma, clip_norm = settings.at(self.noise_multiplier, step), settings.at(self.clip_norm, step)
        std = sigma * clip_norm * (1 + settings.SLACK)
        return jnp.where(jnp.stack(good).all(), std, jnp.nan) if good else std

    def _require_num_examples(self) -> int:
        if self.num_examples is None:
            raise ValueError("num_examples must be given to the constructor to draw or cut batches, got None.")
        return self.num_examples


def _clip(grads: Any, params: Any, mask: Any, partition: Any, clip_norm: Any) -> ClippedSum:
    """The clipped sum of per-example gradients. A `ClippedSum` is returned as it is, after a check of its shapes."""
    if isinstance(grads, ClippedSum):
        noise.check_shapes("grads.total", grads.total, params)
        return grads
    noise.require_whole_gradients(params, partition)
    leaves = (jax.tree.leaves(tree) for tree in (grads, params))
    shapes = [(jnp.shape(g), jnp.shape(p)) for g, p in zip(*leaves, strict=True)]
    if any(g[1:] != p or not g for g, p in shapes) or len({g[0] for g, _ in shapes}) > 1:
        raise ValueError(
            "grads must be a ClippedSum (see DPSGD.clipped_sum) or per-example gradients with one leading axis more "
            f"than the parameters, got (gradient, parameter) shapes {shapes}. A mean gradient cannot be clipped per "
            "example: instead of optax.MultiSteps, gather microbatches in DPSGD.clipped_sum, or put MultiSteps around "
            "the optimizer that follows DPSGD.privatize."
        )
    size = shapes[0][0][0] if shapes else 0
    mask = jnp.ones((size,), bool) if mask is None else jnp.asarray(mask)
    return ClippedSum(*noise.clip_and_sum(grads, mask, clip_norm, partition))
