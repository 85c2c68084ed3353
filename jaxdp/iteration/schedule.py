"""Gaussian-DP parameter of the last iterate of a public schedule, by the optimal shift allocation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import FINITE, NONNEGATIVE, POSITIVE
from jaxdp.iteration import isotonic
from jaxdp.runtime.formulas import at_points, checked
from jaxdp.runtime.precision import Kernel
from jaxdp.typing import Array, Real


class Schedule(NamedTuple):
    """Lipschitz constants kappa_j > 0, noise s_j >= 0 and distances d_j >= 0 of all steps; steps on the last axis.

    >>> schedule = jaxdp.iteration.append_noise_only([0.9, 0.9], 1.0, [1.0, 1.0], steps=1, tail=(0.9, 1.0))
    >>> print(schedule.shift)
    [1. 1. 0.]
    """

    contraction: Array
    noise_std: Array
    shift: Array


def _checked_schedule(contraction, noise_std, shift):
    parts = checked(contraction=(POSITIVE, contraction), noise_std=(NONNEGATIVE, noise_std), shift=(NONNEGATIVE, shift))
    shape = np.broadcast_shapes(*map(np.shape, parts))
    if not shape:
        raise ValueError(
            "contraction, noise_std or shift must have one entry per step on the last axis, got single numbers."
        )
    xp = jnp if validate.is_traced(*parts) else np
    return [xp.broadcast_to(a, shape) for a in parts], shape


def _mu(kernel: Kernel, schedule: list[Any], *others: Any) -> Any:
    """mu at every point of the leading axes, from a kernel that rounds mu^2 up far enough for the root's rounding."""
    mu2 = at_points(kernel, *schedule, *others, own=(1,) * len(schedule) + (0,) * len(others))
    xp = jnp if validate.is_traced(mu2) else np
    return xp.where(mu2 == 0, 0.0, xp.sqrt(xp.where(mu2 == 0, 1.0, mu2)))[()]  # the derivative of sqrt(0) is NaN


def gdp_mu(contraction: Real, noise_std: Real, shift: Real, *, diameter: Real | None = None) -> Array:
    """Gaussian-DP parameter mu of the last iterate: the optimal shift allocation, rounded up.

    mu^2 = min sum_j a_j^2 / s_j^2 over a_j >= 0 with z_0 = 0, z_j = kappa_j z_{j-1} + d_j - a_j >= 0, z_T = 0, solved
    exactly by isotonic regression. Bounds of delta, epsilon, Renyi divergence (alpha mu^2 / 2) and trade-off function
    are those of N(mu, 1) against N(0, 1), in any dimension.

    contraction: kappa_j > 0, last axis = steps; kappa_j > 1 is allowed. Leading axes of all arguments broadcast.
    noise_std: s_j >= 0 per coordinate, in the units of the iterate (step size times gradient noise).
    shift: d_j >= 0, sup over x of |psi_j(x) - psi'_j(x)|; 0 where the record does not take part. With batch size b,
        step size eta, gradient bound C and noise on the mean: 2 eta C / b (replace one), eta C / b (zero out).
    diameter: >= 0, of the set on which the iterates are projected before every step; broadcasts with the leading axes.
        None: no such set.

    >>> print(f"{jaxdp.iteration.gdp_mu([0.9, 0.9, 0.9], noise_std=1.0, shift=[1.0, 0.0, 0.0]):.4f}")
    0.5158

    Assumes: only the last iterate is released: no averages, checkpoints, loss curves or best-of selection (averages of
    iterates are not amplified). x_j = Pi(psi_j(x_{j-1}) + N(0, s_j^2 I)), where psi_j or psi'_j of the neighbouring
    data set is kappa_j-Lipschitz, and Pi is the projection on a convex set that does not depend on the data. No
    momentum and no data-dependent preconditioner. Schedules are public and fixed in advance. x_0 is the same or
    independent of the data. Per-example clipping keeps kappa_j only if the loss depends on one scalar <w, x> and the
    penalty is not clipped.

    Returns mu of the leading shape, float64; inf if a step with d_j > 0 has no noise and no noise follows. The excess
    of mu^2 over the optimum is that of `isotonic.shift_allocation_mu2`. Differentiable under x64 traces without a
    diameter. Raises ValueError for contraction <= 0, negative noise, shift or diameter, schedules of unequal length.
    Reference: notebooks/proofs/heterogeneous_gdp_iteration.md; constant schedules: Bok, Su, Altschuler 2024, Lemma C.3.
    """
    schedule, shape = _checked_schedule(contraction, noise_std, shift)
    if diameter is None:
        return _mu(isotonic.allocation, schedule)
    (reset,) = checked(diameter=(NONNEGATIVE, diameter))
    validate.broadcast(contraction=np.empty(shape[:-1]), diameter=reset)
    return _mu(isotonic.restarted_mu2, schedule, reset)


def per_index_mu(contraction: Real, noise_std: Real, shift: Real) -> Array:
    """Gaussian-DP parameter of the record used in step i only, for every i of a one-pass run.

    mu_i = d_i / sqrt(sum_{j >= i} s_j^2 / prod_{k = i+1..j} kappa_k^2), the optimum of `gdp_mu` for one participation.
    The i-th entry is the guarantee of the person used in step i; the guarantee of the mechanism is the largest entry.
    Arguments, errors and assumptions: as for `gdp_mu`; d_j is the distance that the record of step j causes.

    >>> print(jaxdp.iteration.per_index_mu(0.9, noise_std=1.0, shift=[1.0, 1.0, 1.0]).round(4))
    [0.5158 0.669  1.    ]

    Returns mu of the broadcast shape, float64, rounded up by at most 4 ulp (T + 8) relative for T steps.
    """
    return _mu(isotonic.single_participation_mu2, _checked_schedule(contraction, noise_std, shift)[0])


def participation_mu(contraction: Real, noise_std: Real, shift: Real, steps: Real) -> Array:
    """Gaussian-DP parameter of every record, if record i takes part in the steps steps[i].

    The optimum of `gdp_mu` for n records of one schedule in one call. Stretches without participation are combined once
    by doubling, in O(T log T). The cost of a record is then proportional to its number of participations, not to T.

    contraction, noise_std, shift: (T,) kappa_j > 0, s_j >= 0, and the distance d_j >= 0 that a record of step j causes.
    steps: (n, p) strictly increasing zero-based steps; rows with fewer than p steps are padded with T.

    >>> order = jaxdp.iteration.cyclic_participation(num_batches=2, num_steps=4)
    >>> print(jaxdp.iteration.participation_mu([0.9] * 4, 1.0, 1.0, order).round(4))
    [0.9409 1.2031]

    Returns mu of shape (n,), float64, rounded up. Raises ValueError as `gdp_mu`, and for a step outside 0..T or a row
    that does not increase; RuntimeError inside jit, vmap or grad. Assumes: as `gdp_mu`.
    """
    if validate.is_traced(contraction, noise_std, shift, steps):
        raise RuntimeError("participation_mu is computed on the host: call it outside jit/vmap/grad.")
    schedule, shape = _checked_schedule(contraction, noise_std, shift)
    if len(shape) != 1:
        raise ValueError(f"participation_mu takes one schedule of shape (T,), got shape {shape}.")
    rows = validate.integer("steps", steps, 0)
    if rows.ndim != 2:
        raise ValueError(f"steps must have shape (records, participations), got {rows.shape}.")
    validate.reject("steps", rows, rows > shape[0], f"zero-based and at most the number of steps {shape[0]}")
    ordered = (np.diff(rows, axis=1) > 0) | (rows[:, 1:] == shape[0])
    validate.reject("steps", rows[:, 1:], ~ordered, "strictly increasing in each row")
    if shape[0] == 0:
        return np.zeros(rows.shape[0])
    with np.errstate(divide="ignore"):
        kappa, noise, moved = map(np.log, schedule)
    logs = isotonic.participation_steps(kappa, noise, moved, rows.astype(np.int64))
    return _mu(isotonic.participation_allocation, list(logs))


def cyclic_participation(num_batches: int, num_steps: int) -> np.ndarray:
    """Steps in which each position of a fixed cyclic order takes part: i, i + num_batches, ... below num_steps.

    Also valid for an order that is shuffled once at the start. num_batches, num_steps: whole, >= 1.

    >>> print(jaxdp.iteration.cyclic_participation(num_batches=2, num_steps=5))
    [[0 2 4]
     [1 3 5]]

    Returns steps of shape (num_batches, passes), padded with num_steps, for `participation_mu`. Raises ValueError.
    """
    batches, total = validate.count("num_batches", num_batches, 1), validate.count("num_steps", num_steps, 1)
    epochs = -(-total // batches)
    return np.minimum(np.arange(batches)[:, None] + batches * np.arange(epochs), total)


def append_noise_only(
    contraction: Real, noise_std: Real, shift: Real, *, steps: int, tail: tuple[Real, Real]
) -> Schedule:
    """The schedule followed by steps that add noise and use no record: they amplify the last batch as well.

    contraction, noise_std, shift: as for `gdp_mu`. steps: number of further steps, whole, >= 0.
    tail: (kappa, s), contraction and noise of every further step.

    >>> schedule = jaxdp.iteration.append_noise_only([0.9, 0.9], 1.0, [0.0, 1.0], steps=2, tail=(0.8, 1.0))
    >>> print(schedule.contraction, schedule.shift)
    [0.9 0.9 0.8 0.8] [0. 1. 0. 0.]

    Returns a Schedule of length T + steps. If the further steps have kappa and s of step T, a single participation d in
    step T has mu^2 = (d/s)^2 / sum_{k=0..steps} kappa^(-2k). Raises ValueError; TypeError for a tail that is no pair.
    """
    schedule, shape = _checked_schedule(contraction, noise_std, shift)
    count = validate.count("steps", steps, 0)
    if not isinstance(tail, (tuple, list)) or len(tail) != 2:
        raise TypeError(f"tail must be a pair (contraction, noise_std), got {tail!r}.")
    kappa, noise = checked(**{"tail[0]": (POSITIVE, tail[0]), "tail[1]": (NONNEGATIVE, tail[1])})
    xp = jnp if validate.is_traced(*schedule, kappa, noise) else np
    pads = [xp.broadcast_to(v, (*shape[:-1], count)) for v in (kappa, noise, 0.0)]
    return Schedule(*(xp.concatenate([a, pad], axis=-1) for a, pad in zip(schedule, pads, strict=True)))


def quadratic_mu(factor: Real, noise_std: Real, shift: Real, *, initial_variance: Real = 0.0) -> Array:
    """Exact Gaussian-DP parameter mu of the last iterate for a quadratic loss in one dimension.

    The output is Gaussian: m <- c m + d, V <- c^2 V + s^2, mu = |m_T| / sqrt(V_T). This is a check of `gdp_mu`, which
    is equal if the optimal allocation has one block, V_0 = 0 and all signs agree. It is no guarantee for other losses,
    whose mu may be larger.

    factor: c_j = 1 - eta H with its sign, last axis = steps. Leading axes of all arguments broadcast.
    noise_std: s_j >= 0. shift: d_j, the signed difference of the two maps. initial_variance: V_0 >= 0.

    >>> print(f"{jaxdp.iteration.quadratic_mu([0.9, 0.9, 0.9], 1.0, [1.0, 0.0, 0.0]):.4f}")
    0.5158

    Returns mu of the leading shape, float64, not rounded outward; inf where V_T = 0 < |m_T|. Raises ValueError, also
    without an axis of steps.
    """
    validate.concrete("factor, noise_std, shift and initial_variance", factor, noise_std, shift, initial_variance)
    parts = checked(factor=(FINITE, factor), noise_std=(NONNEGATIVE, noise_std), shift=(FINITE, shift))
    start = validate.nonnegative("initial_variance", initial_variance)
    c, noise, moved = np.broadcast_arrays(*parts)
    shape = c.shape
    if not shape:
        raise ValueError(
            "factor, noise_std or shift must have one entry per step on the last axis, got single numbers."
        )
    mean, std, scale = np.zeros(shape[:-1]), np.broadcast_to(np.sqrt(start), shape[:-1]), np.zeros(shape[:-1], int)
    for j in range(shape[-1]):
        # Mean and standard deviation in units of 2^scale, so that neither overflows where factors exceed 1.
        mean = c[..., j] * mean + np.ldexp(moved[..., j], -scale)
        std = np.hypot(c[..., j] * std, np.ldexp(noise[..., j], -scale))
        grown = np.maximum(np.frexp(np.maximum(np.abs(mean), std))[1], -scale)
        mean, std, scale = np.ldexp(mean, -grown), np.ldexp(std, -grown), scale + grown
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mean == 0, 0.0, np.abs(mean) / std)[()]
