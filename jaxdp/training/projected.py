"""Noisy projected SGD, whose last iterate gets privacy amplification by iteration; the constants of its loss."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import iteration, validate
from jaxdp.accounting import epsilon as certified_epsilon
from jaxdp.calibration import calibrate
from jaxdp.domains import NONNEGATIVE, POSITIVE, Domain, whole
from jaxdp.training import batches, noise, schedule, settings
from jaxdp.training.settings import Setting
from jaxdp.typing import Example, Loss, Params, Real, Step


@dataclasses.dataclass(frozen=True)
class StronglyConvexLoss:
    """Constants of the loss of one example, f(w, x) = l(w, x) + r(w), on all of R^d.

    lipschitz: C >= |grad_w l(w, x)|, for the data term l alone (the regulariser r is the same in both runs).
    smoothness: beta, a Lipschitz constant of grad_w f. strong_convexity: rho >= 0, that of r (rho = 0: only convex).
    generalized_linear: whether l depends on w through one scalar <w, x> only; clipping per example keeps a step a
    contraction for these losses only.

    Assumes: the constants hold for every possible example, at every w, and are not computed from the data (such as the
    largest norm of a feature vector). Every step's gradient contains grad r in full, even if the batch is short.

    Raises: ValueError unless 0 <= strong_convexity <= smoothness, lipschitz > 0.

    >>> from jaxdp import training
    >>> training.StronglyConvexLoss.logistic_regression(feature_norm=2.0, l2=0.5)
    StronglyConvexLoss(lipschitz=2.0, smoothness=1.5, strong_convexity=0.5, generalized_linear=True)
    """

    lipschitz: float
    smoothness: float
    strong_convexity: float = 0.0
    generalized_linear: bool = False

    def __post_init__(self):
        settings.as_numbers(self, lipschitz=POSITIVE, smoothness=POSITIVE, strong_convexity=NONNEGATIVE)
        rho = np.float64(self.strong_convexity)
        validate.reject("strong_convexity", rho, rho > self.smoothness, f"at most smoothness = {self.smoothness}")

    @classmethod
    def logistic_regression(cls, feature_norm: float, l2: float) -> StronglyConvexLoss:
        """Constants of log(1 + exp(-y <w, x>)) + l2 |w|^2 / 2, as `jaxdp.iteration.logistic_regression` gives them."""
        lipschitz, smoothness, rho = map(float, iteration.logistic_regression(feature_norm, l2))
        return cls(lipschitz, smoothness, rho, generalized_linear=True)

    @classmethod
    def softmax_regression(cls, feature_norm: float, l2: float) -> StronglyConvexLoss:
        """Constants of multinomial logistic regression, as `jaxdp.iteration.softmax_regression` gives them.

        `NoisyProjectedSGD` refuses clip=True for this loss: a clipped step expands distances at every step size.
        """
        lipschitz, smoothness, rho = map(float, iteration.softmax_regression(feature_norm, l2))
        return cls(lipschitz, smoothness, rho)


_SIXTEEN_BIT = (
    "16-bit updates have rounding errors that the noise is too small to hide. Keep float32 master weights; gradients "
    "may be bfloat16."
)
# The largest count of updates. With 1 - kappa >= 1e-6, mu reaches its limit long before.
_PLATEAU_STEPS = noise.INT32_MAX - 1


@dataclasses.dataclass(frozen=True)
class NoisyProjectedSGD:
    """Noisy projected SGD, p <- Pi(p - learning_rate (g + Z)), Z ~ N(0, noise_std^2 I): the last iterate is private.

    loss: StronglyConvexLoss, the constants of one example's loss. learning_rate, noise_std (noise on the mean
    gradient): > 0, numbers or public functions of the step (optax schedules); learning_rate <= 2 / smoothness.
    batch_size: b, constant divisor of the summed gradient. num_examples: n. radius: Pi projects on the l2 ball of this
    radius around 0. projection: another convex projection, tree -> tree. With neither, Pi is the identity.
    order: "cyclic" (examples in their fixed order) or "reshuffled" (a new random order in every epoch).
    remainder: use of the last n mod b examples: "short" (they form a last, short batch; the divisor is still b) or
    "drop" (they are never used, so they lose no privacy). data_steps: number of steps that use data; later steps use
    none, but still add noise (None: all steps use data).
    clip: whether `gradient` clips each example's gradient to loss.lipschitz; for generalized linear losses only.
    rounding: l2 bound on the floating-point error of one update, charged to each step of both runs: `float32_rounding`.
        0 supposes parameters so small that their float32 rounding is far below the noise.

    Guarantee: under replace_one alone (removing an example would move later examples to other places in the order). If
    one example is replaced, a step t that uses it moves the next iterate by at most d_t = 2 eta_t C / b. Every step
    contracts distances by kappa_t = max(|1 - eta_t rho|, |1 - eta_t beta|) and adds noise of std eta_t noise_std_t.
    The last iterate is mu-GDP with mu of the optimal shift allocation (jaxdp.NoisyIteration), or a smaller mu if radius
    bounds the distance of the two runs (constant settings only). Training rounds the step down to float32 and the noise
    up; mu is never below the optimal mu for the stated numbers, and without a radius at most a relative 2e-7 above.
    With a schedule, which a program may round otherwise, the step is 1e-6 smaller and the noise 4e-6 larger (relative).

    Assumes: the transformation is used alone. Its input is the mean gradient of the batch (from `gradient`, or gathered
    from equal parts of the batch by optax.MultiSteps). Its output goes to optax.apply_updates. With momentum, Adam,
    weight decay, scaling or clipping on either side, an optax.chain raises no error but runs another iteration than the
    accounted one. After the last step, any function of the released iterate is allowed.
    Only the last iterate is released (no checkpoints, averages, best-of selection, early stopping or loss curves from
    private data). The constants of `loss` hold. Every step uses the full gradient of the regulariser, even with no data
    or a short batch (`gradient` does this). Batches are those of `batch`. Gradients are finite: one non-finite mean
    gradient voids the guarantee (see `NoisyState.nonfinite`), so clean the data or use `gradient`, which leaves out
    only the bad example. x_0 and all settings are independent of the data. A schedule's value in the compiled step is
    within a relative 2^-21 of its value on the host. The projection is convex and public. Floating-point noise is as
    good as real noise (docs/limits.md). The key has 64 random bits; key, state and checkpoints are secret.
    Reference: Balle, Barthe, Gaboardi, Geumlek 2019, Algorithm 1; Feldman, Mironov, Talwar, Thakurta 2018,
    Theorem 22; the allocation in notebooks/proofs/heterogeneous_gdp_iteration.md.

    Raises: ValueError, TypeError at construction for a setting outside its range (schedules: in the first 1024 steps).

    >>> import jaxdp
    >>> from jaxdp import training
    >>> loss = training.StronglyConvexLoss.logistic_regression(feature_norm=1.0, l2=0.1)
    >>> sgd = training.NoisyProjectedSGD(loss, learning_rate=1.0, noise_std=0.1, batch_size=50, num_examples=1000)
    >>> f"{jaxdp.epsilon(sgd.after(200), 1e-5):.4f}"  # ten epochs
    '1.5589'
    """

    loss: StronglyConvexLoss
    learning_rate: Setting
    noise_std: Setting
    batch_size: int
    num_examples: int
    radius: float | None = None
    order: str = "cyclic"
    projection: Callable[[optax.Params], optax.Params] | None = None
    remainder: str = "drop"
    data_steps: int | None = None
    rounding: float = 0.0
    clip: bool = False

    def __post_init__(self):
        if not isinstance(self.loss, StronglyConvexLoss):
            raise TypeError(f"loss must be a StronglyConvexLoss, got {type(self.loss).__name__}.")
        settings.as_numbers(self, batch_size=whole(1), num_examples=whole(1), data_steps=whole(0))
        if self.batch_size > self.num_examples:
            raise ValueError(f"batch_size must be at most num_examples = {self.num_examples}, got {self.batch_size}.")
        validate.choice("order", self.order, ("cyclic", "reshuffled"))
        validate.choice("remainder", self.remainder, ("short", "drop"))
        settings.as_numbers(self, radius=POSITIVE, rounding=NONNEGATIVE)
        if self.radius is not None and self.projection is not None:
            raise ValueError("radius and projection exclude each other: give one of them.")
        if self.projection is not None:
            validate.function("projection", self.projection, "the projected parameters")
        validate.choice("clip", self.clip, (False, True))
        if self.clip and not self.loss.generalized_linear:
            raise ValueError(
                "clip must be False for this loss, got True: clipping per example makes the step expand unless the "
                "loss depends on the parameters through one scalar (softmax does not). Scale the features instead, "
                "or state generalized_linear=True on the loss."
            )
        self._steps(1 if self._is_constant() else settings.CHECKED_STEPS)
        constant = [name for name in ("learning_rate", "noise_std") if not callable(getattr(self, name))]
        settings.as_numbers(self, **dict.fromkeys(constant, POSITIVE))

    def _is_constant(self) -> bool:
        return not (callable(self.learning_rate) or callable(self.noise_std))

    @property
    def num_batches(self) -> int:
        """Steps per epoch."""
        full, left_over = divmod(self.num_examples, self.batch_size)
        return full + (left_over > 0 and self.remainder == "short")

    def optimizer(self, key: jax.Array, *, partition: object = None) -> optax.GradientTransformationExtraArgs:
        """The optax transformation, for use alone. update(grads, state, params) returns Pi(p - eta (g + Z)) - p.

        key: a JAX random key that no other run uses. partition: inside shard_map, the PartitionSpecs of the parameters
        (a tree prefix): sharded leaves get different noise on every shard, replicated leaves the same noise.
        grads: mean gradient over the batch from `batch`, summed over devices; any float dtype. State: `NoisyState`.
        Raises ValueError or TypeError for a missing key, missing params, 16-bit params.
        """
        # If a schedule is off by SLACK, the step is still at most, and the noise at least, the one accounted for.
        margin = 0.0 if self._is_constant() else settings.SLACK
        rounded = ((self.learning_rate, -np.inf), (self.noise_std, np.inf))
        rate_of, std_of = (each if callable(each) else float(as_float32(each, towards)) for each, towards in rounded)

        def move(grads: Any, count: jax.Array, params: Any, draws: Any, **_: Any) -> tuple[Any, jax.Array]:
            noise.check_shapes("grads", grads, params)
            finite = jax.tree.map(jnp.isfinite, grads)
            bad = [jnp.any(~each).astype(jnp.float32) for each in jax.tree.leaves(finite)]  # in any shard
            # only the entries: to clear the whole gradient would need a pass over it before noise can be added
            grads = jax.tree.map(lambda g, good: jnp.where(good, g, jnp.zeros_like(g)), grads, finite)
            rate, std = settings.at(rate_of, count) * (1 - margin), settings.at(std_of, count) * (1 + 4 * margin)
            moved = jax.tree.map(
                lambda p, g, z: p - (rate * (g.astype(jnp.float32) + std * z)).astype(p.dtype), params, grads, draws
            )
            found = noise.summed(bad, noise.leaf_axes(params, partition)) > 0
            return jax.tree.map(jnp.subtract, self._project(moved, partition), params), found

        return noise.transformation(key, move, partition, _SIXTEEN_BIT)

    def batch(self, step: Step, key: jax.Array | None = None) -> batches.Batch:
        """The batch of a step, as `after` accounts for it; empty after data_steps. Usable under jit.

        key: for order "reshuffled" only; the adversary must not see it. It may equal the key of the noise.
        """
        sizes = {
            "num_examples": min(self.num_batches * self.batch_size, self.num_examples),
            "batch_size": self.batch_size,
            "num_batches": self.num_batches,
        }
        if self.order == "cyclic":
            chosen = batches.cyclic_batch(step, **sizes)
        else:
            chosen = batches.reshuffled_batch(step, noise.check_key(key), **sizes)
        if self.data_steps is None:
            return chosen
        return chosen._replace(mask=chosen.mask & (jnp.asarray(step) < self.data_steps))

    def gradient(self, data_loss: Loss[Params, Example], params: Params, examples: Example, mask: jax.Array) -> Params:
        """Gradient of (sum of l(w, x) over the batch) / b + rho |w|^2 / 2, for the optimizer's update.

        data_loss(params, example): l alone, without the regulariser. examples: a pytree with leading axis b. mask: (b,)
        bool. Examples with a non-finite gradient are left out. With clip=True each example's gradient is clipped to
        `loss.lipschitz` in l2. Returns float32 leaves.
        """
        noise.require_whole_gradients(params, None)
        bound = self.loss.lipschitz if self.clip else None
        total, _ = noise.clipped_gradient_sum(data_loss, params, examples, mask, bound)
        rho = self.loss.strong_convexity
        return jax.tree.map(lambda g, p: g / self.batch_size + rho * jnp.asarray(p, jnp.float32), total, params)

    def after(self, steps: Real, example: Real | None = None) -> schedule.IteratedRelease:
        """The mechanism that releases the parameters after ``steps`` steps, for jaxdp.epsilon and similar functions.

        steps: whole numbers >= 0 (state.count). example: None for the worst example, or indices of examples. Both may
        be arrays of any shape and broadcast; the result has one entry per pair.
        Raises ValueError for an invalid count or index, or a schedule that leaves the allowed range.
        """
        counts = noise.check_steps(steps)
        slots = None if example is None else self._slots(example)
        validate.broadcast(steps=counts, **({} if slots is None else {"example": slots}))
        different, which = np.unique(counts, return_inverse=True)
        which = which.reshape(counts.shape)
        mu = np.stack([np.append(self._mu_of_slots(int(count)), 0.0) for count in different])
        return schedule.IteratedRelease(mu.max(axis=1)[which] if slots is None else mu[which, slots])

    def iteration(self, steps: Step, example: int | None = None) -> schedule.CyclicIteration:
        """The iteration for one example (None: the worst) with all its steps; slower to account for than `after`.

        It ignores ``rounding`` and the smaller mu that a radius may give. Order "cyclic" only.
        """
        if self.order != "cyclic":
            raise ValueError(f"order must be 'cyclic' for a step-by-step record, got {self.order!r}. Use after().")
        count = int(noise.check_steps(steps))
        slot = int(np.argmax(self._mu_of_slots(count))) if example is None else int(self._slots(example))
        rows = self._steps(count)
        step = np.arange(count)
        takes_part = (step % self.num_batches == slot) & (step < self._limit(count))
        return schedule.CyclicIteration(
            np.exp(rows.log_contraction), rows.noise_std, np.where(takes_part, rows.shift, 0.0)
        )

    def steps_within(self, epsilon: float, delta: float, *, max_steps: int = 10**6) -> float:
        """Largest number of steps for which epsilon of the last iterate stays within the budget; inf: unlimited.

        With constant settings, every smaller number of steps is within the budget too (reshuffled order: every smaller
        number of whole epochs; the answer is a number of whole epochs). With a schedule, only the answer itself is
        known to be; it is at most max_steps. Raises ValueError for a budget outside epsilon >= 0, 0 < delta < 1.
        """
        settings.check_budget(epsilon, delta)
        # search over numbers of epochs: for constant settings in cyclic order, the worst mu is constant within an epoch
        period, constant = self.num_batches, self._is_constant()
        limit = self._limit(_PLATEAU_STEPS if constant else max_steps)
        largest = limit // period if constant and self.data_steps is None else -(-limit // period)

        def exceeds(epochs: int) -> bool:
            return bool(certified_epsilon(self.after(self._limit(epochs * period)), delta) > epsilon)

        epochs = largest
        if exceeds(largest):
            end = next(each for each in map((2).__pow__, itertools.count()) if each >= largest or exceeds(each))
            epochs = bisect.bisect(range(1, min(end, largest)), False, key=exceeds)
        if epochs == largest and (constant or (self.data_steps is not None and self.data_steps <= max_steps)):
            return float(np.inf)
        return int(min(epochs * period, np.inf if constant else max_steps))

    def calibrated(self, steps: int, *, epsilon: float, delta: float) -> NoisyProjectedSGD:
        """A copy with noise_std scaled to the smallest noise for which epsilon of `after(steps)` meets the target."""
        settings.check_budget(validate.nonnegative("epsilon", epsilon), delta)
        current = float(self.after(int(noise.check_steps(steps))).mu)  # mu is inversely proportional to the noise
        if current == 0:
            return self
        allowed = float(calibrate(schedule.IteratedRelease, epsilon=epsilon, delta=delta))
        # 1 + 1e-9 covers the rounding of the quotient, of the scaled noise and of the mu computed from it
        return dataclasses.replace(self, noise_std=settings.scaled(self.noise_std, current / allowed * (1 + 1e-9)))

    def _limit(self, steps: int) -> int:
        return steps if self.data_steps is None else min(steps, self.data_steps)

    def _project(self, tree: Any, partition: Any) -> Any:
        if self.projection is not None:
            return self.projection(tree)
        if self.radius is None:
            return tree
        squares = [jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(tree)]
        norm = jnp.sqrt(noise.summed(squares, noise.leaf_axes(tree, partition)))
        scale = jnp.minimum(1.0, self.radius / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda p: (p * scale).astype(p.dtype), tree)

    def _slots(self, example: Any) -> np.ndarray:
        index = validate.integer("example", example, 0)
        validate.reject("example", index, index >= self.num_examples, f"below num_examples = {self.num_examples}")
        slot = np.zeros_like(index) if self.order == "reshuffled" else index // self.batch_size
        # dropped examples get the extra slot num_batches, whose mu is 0
        return np.minimum(slot, self.num_batches).astype(np.int64)

    def _mu_of_slots(self, steps: int) -> np.ndarray:
        """mu of the examples of each batch of an epoch, (num_batches,); reshuffled: of the worst example, (1,)."""
        if steps == 0:
            return np.zeros(1 if self.order == "reshuffled" else self.num_batches)
        limit, constant = self._limit(steps), self._is_constant()
        rows = self._steps(1 if constant else steps)
        whole_epochs = self.order == "reshuffled" and limit % self.num_batches == 0
        if constant and (self.order == "cyclic" or whole_epochs):
            log_k, std, shift = (float(column[0]) for column in rows)
            # with a constant shift and kappa <= 1 the last place of a reshuffled epoch is the worst
            slots = np.arange(self.num_batches)[-1:] if whole_epochs else np.arange(self.num_batches)
            # float32 rounding moves a projected iterate out of the ball by less than a relative 1e-6
            diameter = np.inf if self.radius is None else 2 * self.radius * (1 + 1e-6) / shift
            mu = schedule.cyclic_constant_mu(log_k, shift / std, self.num_batches, limit, steps, slots, diameter)
        else:
            rows = schedule.Steps(*(np.broadcast_to(column, (steps,)) for column in rows))
            mu_of = schedule.mu_of_slots if self.order == "cyclic" else schedule.reshuffled_mu
            mu = np.atleast_1d(mu_of(rows, self.num_batches, limit))
        if self.rounding == 0:
            return mu
        # mu is a norm of the distances d_t, so rounding errors add at most the mu of their own. Both runs round (2),
        # and the float32 step, which scales the noise, may be a relative 2^-23 below the stated one.
        ratio = 2 * self.rounding * (1 + 2.0**-23) / rows.noise_std.min()
        return mu + schedule.cyclic_constant_mu(float(rows.log_contraction.max()), ratio, 1, steps, steps, 0)

    def _steps(self, count: int) -> schedule.Steps:
        """Contraction, noise and distance of the first ``count`` steps, in float64, rounded to the safe side."""
        beta, rho = self.loss.smoothness, self.loss.strong_convexity
        rates = Domain(lambda rate: (rate > 0) & (rate <= 2 / beta), f"in (0, 2 / smoothness] = (0, {2 / beta}]")
        rate = settings.values("learning_rate", self.learning_rate, count, rates)
        std = settings.values("noise_std", self.noise_std, count, POSITIVE)
        # training may use a smaller learning rate than the stated one, which may contract less
        least = as_float32(rate[0], -np.inf) if self._is_constant() else rate * (1 - 3 * settings.SLACK)
        taken = np.full(count, least, np.float64)
        gap = np.minimum(taken * rho, 2 - rate * beta - 1e-15)
        log_k = np.log1p(-np.clip(gap, 0.0, 1 - 1e-16)) * (1 - 1e-15)
        return schedule.Steps(log_k, rate * std, 2 * rate * self.loss.lipschitz / self.batch_size)


def float32_rounding(dimension: int, radius: float) -> float:
    """l2 bound on the float32 error of one update that ends in a ball: (4 sqrt(dimension) + 10) 2^-24 radius.

    Rounding a vector moves it by at most 2^-24 of its norm. In units of 2^-24 radius, after the projection: the product
    loses 2, the difference 1, the projection's factor 3.5 beside its sum of squares, the update 2 and adding it 1. The
    sum of squares is taken to be right to a relative 8 sqrt(dimension) 2^-24; its worst case grows with the dimension.
    The bound does not cover the summation of the gradient, whose error grows with the batch.

    >>> from jaxdp import training
    >>> f"{training.float32_rounding(100, 2.0):.2e}"
    '5.96e-06'
    """
    size = validate.count("dimension", dimension, 1)
    return (4 * math.sqrt(size) + 10) * 2.0**-24 * validate.one("radius", radius, POSITIVE)


def as_float32(value: float, towards: float) -> np.float32:
    """A number as float32, rounded towards -inf (a step, which must not grow) or inf (noise, which must not shrink)."""
    nearest, exact = np.float32(value), np.float64(value)  # NumPy would round a Python number to float32 to compare it
    wrong = np.float64(nearest) > exact if towards < 0 else np.float64(nearest) < exact
    return np.nextafter(nearest, np.float32(towards)) if wrong else nearest
