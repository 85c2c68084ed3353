"""The published theorems on amplification by iteration, as stated there, and the constants of the loss they need.

The theorems bound the last iterate and share the assumptions of `jaxdp.iteration.gdp_mu`. All bounds are rounded up.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, POSITIVE, whole
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import rounded_up
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.runtime.formulas import LINEAR_ORDER, Rule, theorem
from jaxdp.typing import Array, Real


def _product(positive, *logs):
    """exp(sum of logs), rounded up, or 0 unless positive: a product whose factors cannot underflow.

    logs: the logarithms of the factors, separately, because rounding is charged in proportion to the sum of |log|.
    """
    size = sum(xp.abs(xp.where(positive, log, 0.0)) for log in logs)
    total = sum(xp.where(positive, log, 0.0) for log in logs)
    return rounded_up(xp.exp(total) * (1 + 8 * ULP * (4 + size)), positive)


def _log(x):
    return xp.log(xp.where(x > 0, x, 1.0))


class LossConstants(NamedTuple):
    """Constants of the loss of one example.

    lipschitz: bound of the gradient norm of the data part (without the penalty).
    smoothness: beta, Lipschitz constant of the gradient.
    strong_convexity: rho in [0, beta].

    >>> constants = jaxdp.iteration.logistic_regression(feature_norm=2.0, l2=0.1)
    >>> print(constants.smoothness)
    1.1
    """

    lipschitz: Array
    smoothness: Array
    strong_convexity: Array


_CONVEXITY = Rule(
    "strong_convexity",
    lambda smoothness, strong_convexity, **_: strong_convexity <= smoothness,
    "at most the smoothness",
)
_LARGER = "Larger steps are not contractions."
_STEP = Rule(
    "step_size",
    lambda step_size, smoothness, **_: step_size <= 2 / smoothness * (1 + 1e-15),
    "at most 2 / smoothness",
    _LARGER,
)
_PUBLISHED_STEP = Rule(
    "step_size",
    lambda step_size, smoothness, strong_convexity, **_: step_size <= 2 / (smoothness + strong_convexity) * (1 + 1e-15),
    "at most 2 / (smoothness + strong_convexity)",
    _LARGER,
)
_ARGUMENTS = {"step_size": POSITIVE, "smoothness": POSITIVE, "strong_convexity": NONNEGATIVE}


def contraction(step_size: Real, smoothness: Real, strong_convexity: Real = 0.0, *, published: bool = False) -> Array:
    """Lipschitz constant kappa of the gradient step w -> w - eta grad f(w).

    The sharp constant is max(|1 - eta rho|, |1 - eta beta|), for eta <= 2 / beta. With published=True the result is
    sqrt(1 - 2 eta beta rho / (beta + rho)), for eta <= 2 / (beta + rho). It equals the sharp constant at
    eta = 2 / (beta + rho) and is larger elsewhere (Balle, Barthe, Gaboardi, Geumlek 2019, Theorem 5).

    step_size: eta > 0.
    smoothness: beta > 0, Lipschitz constant of grad f on the whole space.
    strong_convexity: rho in [0, beta]; 0 if f is only convex.

    >>> print(f"{jaxdp.iteration.contraction(step_size=0.5, smoothness=1.0, strong_convexity=0.1):.4f}")
    0.9500

    Returns kappa >= 0 of the broadcast shape, float64, rounded up (by 4 ulp plus 2^-52; with published=True by 2^-51
    under the root); exactly 1 for rho = 0. Under a trace an invalid argument gives inf. Raises ValueError.
    Assumes: f is beta-smooth and rho-strongly convex everywhere, not only near the optimum.
    """
    return (_published if published else _contraction)(step_size, smoothness, strong_convexity)


def _sharp(step_size, smoothness, strong_convexity):
    # With strong_convexity = 0 kappa is exactly 1: nothing is rounded.
    flat = (strong_convexity == 0) & (step_size * smoothness <= 2)
    steepest = xp.maximum(xp.abs(1 - step_size * strong_convexity), xp.abs(1 - step_size * smoothness))
    return xp.where(flat, 1.0, steepest * (1 + 8 * ULP) + 2 * ULP)  # 2 ULP: the products are rounded and at most 2


_contraction = theorem(_CONVEXITY, _STEP, **_ARGUMENTS)(_sharp)


@theorem(_CONVEXITY, _PUBLISHED_STEP, **_ARGUMENTS)
def _published(step_size, smoothness, strong_convexity):
    total = smoothness + strong_convexity
    # The rounding error of the difference is absolute. It is charged under the root, which magnifies it near 0.
    square = xp.maximum(1 - 2 * step_size * smoothness * strong_convexity / total, 0.0) + 4 * ULP
    sharp = _sharp(step_size, smoothness, strong_convexity)
    return xp.where(strong_convexity == 0, sharp, xp.maximum(xp.sqrt(square) * (1 + 8 * ULP), sharp))


_REGRESSION = {"feature_norm": POSITIVE, "l2": NONNEGATIVE}
_UNKNOWN = LossConstants(np.inf, np.inf, 0.0)


@theorem(**_REGRESSION, vacuous=_UNKNOWN)
def logistic_regression(feature_norm: Real, l2: Real = 0.0) -> LossConstants:
    """Constants of L2-regularised logistic regression: Lipschitz B, smoothness B^2 / 4 + l2, strong convexity l2.

    The loss of one example is log(1 + exp(-y <w, x>)) + l2 |w|^2 / 2 with y in {-1, 1}. The Lipschitz constant belongs
    to the data part: the penalty is the same in both runs and affects only the contraction.

    feature_norm: B > 0 with |x| <= B for every example.
    l2: weight of the penalty, >= 0.

    >>> print(*jaxdp.iteration.logistic_regression(feature_norm=1.0, l2=0.1))
    1.0 0.35 0.1

    Assumes: the bias column counts in B and is penalised too (otherwise the strong convexity is 0). Features are scaled
    by public constants only.

    Returns LossConstants of the broadcast shape, float64. Raises ValueError; under a trace an invalid argument gives
    the constants (inf, inf, 0).
    """
    return LossConstants(feature_norm, xp.square(feature_norm) / 4 + l2, l2)


@theorem(**_REGRESSION, vacuous=_UNKNOWN)
def softmax_regression(feature_norm: Real, l2: Real = 0.0) -> LossConstants:
    """Constants of L2-regularised softmax regression: Lipschitz sqrt(2) B, smoothness B^2/2 + l2, strong convexity l2.

    They hold for any number of classes: |p - e_y| <= sqrt(2) and diag(p) - p p' <= 1/2 for all probability vectors p.
    Arguments, result and errors: as for `logistic_regression`, with the penalty l2 |W|^2 / 2. The Lipschitz constant is
    rounded up.

    >>> print("{:.4f} {:.2f} {:.2f}".format(*jaxdp.iteration.softmax_regression(feature_norm=1.0, l2=0.1)))
    1.4142 0.60 0.10

    Assumes: as `logistic_regression`. Gradients are not clipped: with clipping the softmax step may be expansive.
    """
    return LossConstants(2**0.5 * feature_norm * (1 + 8 * ULP), xp.square(feature_norm) / 2 + l2, l2)


_FROM_ONE = "Indices count from 1."
_INDEX = Rule("index", lambda index, num_steps, **_: index <= num_steps, "at most num_steps", _FROM_ONE)
_AT_INDEX = {
    "order": LINEAR_ORDER,
    **dict.fromkeys(("lipschitz", "step_size", "smoothness", "noise_std"), POSITIVE),
    "num_steps": whole(1),
    "index": dataclasses.replace(whole(1), remedy=_FROM_ONE),
}
_PATH = {"order": LINEAR_ORDER, "noise_std": POSITIVE, "distance": NONNEGATIVE, "num_steps": whole(1)}
_CONSTANT = {"contraction": POSITIVE, "noise_std": POSITIVE, "shift": NONNEGATIVE}
_CONTRACTS = Rule(
    "contraction", lambda contraction, **_: contraction <= 1, "at most 1 in this closed form", "Use gdp_mu above 1."
)


@theorem(_INDEX, _CONVEXITY, _PUBLISHED_STEP, **_AT_INDEX, strong_convexity=NONNEGATIVE)
def noisy_sgd_rdp_at_index(
    order: Real,
    *,
    lipschitz: Real,
    step_size: Real,
    smoothness: Real,
    strong_convexity: Real,
    noise_std: Real,
    num_steps: Real,
    index: Real,
) -> Array:
    """Renyi divergence alpha e_i of one pass of noisy projected SGD for the record at index i, as published.

    e_n = 2 C^2 / sigma^2 and e_i = 2 C^2 / ((n - i) sigma^2) (1 - 2 eta beta rho / (beta + rho))^((n-i+1)/2).
    `per_index_mu` gives less: by a factor 1 + 1/(n-i) at rho = 0, exponentially less in long contracting runs.

    order: alpha >= 1 (alpha = 1 returns e_i itself).
    lipschitz: C > 0, gradient bound of one loss. noise_std: sigma > 0 of the noise added to the gradient.
    step_size, smoothness, strong_convexity: eta in (0, 2 / (beta + rho)], beta > 0, rho in [0, beta].
    num_steps: n, whole, >= 1. index: i in 1..n, counted from 1 as in the paper.

    >>> divergence = jaxdp.iteration.noisy_sgd_rdp_at_index(
    ...     2.0, lipschitz=1.0, step_size=0.5, smoothness=1.0, strong_convexity=0.1, noise_std=4.0,
    ...     num_steps=10, index=1,
    ... )
    >>> print(f"{divergence:.4f}")
    0.0172

    Returns the divergence in nats of the broadcast shape, float64. Raises ValueError.
    Assumes: batch size one, each record used once in a fixed order, replace-one neighbours; otherwise as `gdp_mu`.
    Reference: Balle, Barthe, Gaboardi, Geumlek 2019, Theorem 5.
    """
    last = 2 * xp.log(lipschitz), -2 * xp.log(noise_std)
    fall = 2 * xp.asarray(step_size) * smoothness * strong_convexity / (smoothness + strong_convexity)
    # fall is at most 1 up to the tolerance of the rule and rounding. The factor keeps 1 - fall > 0.
    kept = xp.log1p(-fall * (1 - 2.0**-48)) * (num_steps - index + 1) / 2
    later = xp.log(xp.maximum(num_steps - index, 1.0))
    return _product(lipschitz > 0, xp.log(2 * order), *last, -later, xp.where(index == num_steps, 0.0, kept))


@theorem(_INDEX, _STEP, **_AT_INDEX)
def feldman_rdp_at_index(
    order: Real, *, lipschitz: Real, step_size: Real, smoothness: Real, noise_std: Real, num_steps: Real, index: Real
) -> Array:
    """Renyi divergence 2 alpha C^2 / ((n + 1 - i) sigma^2) of one pass of noisy projected SGD on convex losses.

    Arguments, result, errors and assumptions: as for `noisy_sgd_rdp_at_index`, with eta in (0, 2 / beta].

    >>> divergence = jaxdp.iteration.feldman_rdp_at_index(
    ...     2.0, lipschitz=1.0, step_size=0.5, smoothness=1.0, noise_std=4.0, num_steps=10, index=1
    ... )
    >>> print(f"{divergence:.4f}")
    0.0250

    Reference: Feldman, Mironov, Talwar, Thakurta 2018, Theorem 23.
    """
    ratio = 2 * xp.log(lipschitz), -2 * xp.log(noise_std)
    return _product(lipschitz > 0, xp.log(2 * order), *ratio, -xp.log(num_steps + 1 - index))


def contractive_iteration_rdp(
    order: Real, allocation: Real, *, contraction: Real, noise_std: Real, shift: Real
) -> Array:
    """Renyi divergence alpha sum_t a_t^2 / (2 s_t^2) of the last iterate, for a given shift allocation a_t.

    order: alpha >= 1. allocation: a_t >= 0, last axis = steps. Leading axes of all arguments broadcast.
    contraction, noise_std, shift: kappa_t >= 0 (1 in the paper), s_t > 0 and d_t >= 0.

    >>> spent = [0.5, 0.5]
    >>> constants = dict(contraction=1.0, noise_std=1.0, shift=[1.0, 0.0])
    >>> print(f"{jaxdp.iteration.contractive_iteration_rdp(2.0, spent, **constants):.4f}")
    0.5000

    Returns the divergence in nats of the leading shape, float64. At alpha = 2 its minimum over all allocations is the
    square of `gdp_mu`. Raises ValueError if the allocation exceeds the distance left at a step (z_t < 0), or if a
    distance remains at the end (z_T > 0).
    Assumes: as `gdp_mu`.
    Reference: Feldman, Mironov, Talwar, Thakurta 2018, Theorem 22 (Theorem 1 of the abstract).
    """
    alpha, spent = validate.inside("order", order, LINEAR_ORDER), validate.nonnegative("allocation", allocation)
    kappa, noise = validate.nonnegative("contraction", contraction), validate.positive("noise_std", noise_std)
    moved = validate.nonnegative("shift", shift)
    shape = validate.broadcast(allocation=spent, contraction=kappa, noise_std=noise, shift=moved)
    if not shape:
        raise ValueError("allocation must be an array with one entry per step on its last axis, got a single number.")
    spent, kappa, noise, moved = (np.broadcast_to(a, shape).copy() for a in (spent, kappa, noise, moved))
    distance = np.zeros(shape[:-1])
    for t in range(shape[-1]):
        before = kappa[..., t] * distance + moved[..., t]
        slack = 1e-12 * before
        over = spent[..., t] > before + slack
        validate.reject("allocation", spent[..., t], over, f"at most the distance left at step {t}")
        distance = np.maximum(before - spent[..., t], 0.0)
        spent[..., t] = np.where(distance <= slack, np.maximum(spent[..., t], before), spent[..., t])
        distance = np.where(distance <= slack, 0.0, distance)
    validate.reject("distance that allocation leaves", distance, distance > 0, "0", "Allocate it to the last step.")
    with on_host():
        logs = np.log(alpha / 2)[..., None], 2 * _log(spent), -2 * np.log(noise)
        return rounded_up(np.sum(_product(spent > 0, *logs), axis=-1), np.any(spent > 0, axis=-1))[()]


def shifted_rdp(order: Real, *, contraction: Real, noise_std: Real, distances: Real) -> Array:
    """Renyi bound (alpha L^2 / (2 sigma^2)) sum_i L^(2(r-i)) W_i^2 along a given path of r couplings.

    order: alpha >= 1. noise_std: sigma > 0 of the noise of every step.
    contraction: L > 0, Lipschitz constant of every map; L > 1 is allowed.
    distances: W_i = W_inf(mu_i, mu_{i-1}) >= 0 for i = 1..r, last axis; mu_0 and mu_r are the two inputs.

    >>> print(f"{jaxdp.iteration.shifted_rdp(2.0, contraction=1.0, noise_std=1.0, distances=[0.5, 0.5]):.4f}")
    0.5000

    Returns a bound in nats, broadcast leading shape, float64. Raises ValueError, also without an axis of distances.
    Reference: Balle, Barthe, Gaboardi, Geumlek 2019, Theorem 4, equation (2).
    """
    alpha, lip = validate.inside("order", order, LINEAR_ORDER), validate.positive("contraction", contraction)
    sigma, steps = validate.positive("noise_std", noise_std), validate.nonnegative("distances", distances)
    if steps.ndim == 0 or steps.shape[-1] == 0:
        raise ValueError(
            f"distances must have at least one entry on the last axis, one per step, got shape {steps.shape}."
        )
    validate.broadcast(order=alpha, contraction=lip, noise_std=sigma, distances=steps[..., 0])
    powers = np.arange(steps.shape[-1], 0, -1)
    with on_host():
        logs = 2 * powers * np.log(lip[..., None]), 2 * _log(steps), -2 * np.log(sigma[..., None])
        terms = _product(steps > 0, np.log(alpha / 2)[..., None], *logs)
        return rounded_up(np.sum(terms, axis=-1), np.any(steps > 0, axis=-1))[()]


_SHRINKS = _CONTRACTS._replace(allowed="at most 1 in equation (3)", remedy="Use shifted_rdp_optimum.")


@theorem(_SHRINKS, **_PATH, contraction=POSITIVE)
def shifted_rdp_path(order: Real, *, contraction: Real, noise_std: Real, distance: Real, num_steps: Real) -> Array:
    """Renyi bound alpha Delta^2 L^(r+1) / (2 r sigma^2) after r noisy L-Lipschitz steps, for L <= 1.

    order, contraction, noise_std: as for `shifted_rdp`, with L in (0, 1].
    distance: Delta >= 0, W_inf distance of the two inputs. num_steps: r, whole, >= 1.

    >>> print(f"{jaxdp.iteration.shifted_rdp_path(2.0, contraction=0.9, noise_std=1.0, distance=1.0, num_steps=4):.4f}")
    0.1476

    Returns a bound in nats of the broadcast shape, float64; `shifted_rdp_optimum` is never larger. Raises ValueError.
    Reference: Balle, Barthe, Gaboardi, Geumlek 2019, Theorem 4, equation (3).
    """
    ratio = 2 * _log(distance), -2 * xp.log(noise_std)
    kept = (num_steps + 1) * xp.log(contraction)
    return _product(distance > 0, xp.log(order / 2), *ratio, -xp.log(num_steps), kept)


def _log_geometric(x, count):
    """log sum_{k=0..count-1} e^{k x}, without cancellation at x = 0 and without overflow."""
    size = xp.abs(x)
    near = count * size < 1e-4  # a series is used there, because it has a derivative at 0
    safe = xp.where(near, 1.0, size)
    apart = xp.log(xp.expm1(-count * safe) / xp.expm1(-safe)) + xp.where(x > 0, (count - 1) * x, 0.0)
    close = xp.where(near, x, 0.0)
    series = xp.log(count) + (count - 1) * close / 2 + (count - 1) * (count + 1) * close**2 / 24
    return xp.where(near, series, apart)


@theorem(**_PATH, contraction=POSITIVE)
def shifted_rdp_optimum(order: Real, *, contraction: Real, noise_std: Real, distance: Real, num_steps: Real) -> Array:
    """Renyi bound alpha Delta^2 / (2 sigma^2 sum_{k=1..r} L^(-2k)): the minimum of `shifted_rdp` over all paths.

    Arguments, result and errors: as for `shifted_rdp_path`, with any L > 0.

    >>> bound = jaxdp.iteration.shifted_rdp_optimum(2.0, contraction=0.9, noise_std=1.0, distance=1.0, num_steps=4)
    >>> print(f"{bound:.4f}")
    0.1436
    """
    log_sum = _log_geometric(-2 * xp.log(contraction), num_steps) - 2 * xp.log(contraction)
    return _product(distance > 0, xp.log(order / 2), 2 * _log(distance), -2 * xp.log(noise_std), -log_sum)


@theorem(_CONTRACTS, **_CONSTANT, num_steps=whole(1))
def full_batch_mu(contraction: Real, noise_std: Real, shift: Real, num_steps: Real) -> Array:
    """Gaussian-DP parameter of noisy gradient descent on all records: (d/s) sqrt((1-k^T)(1+k) / ((1+k^T)(1-k))).

    contraction: k in (0, 1]; above 1 the formula would be too small: use `gdp_mu`.
    noise_std: s > 0. shift: d >= 0. num_steps: T, whole, >= 1.

    >>> print(f"{jaxdp.iteration.full_batch_mu(0.9, noise_std=1.0, shift=0.1, num_steps=100):.4f}")
    0.4359

    Returns mu of the broadcast shape, float64: equal to `gdp_mu` up to rounding; sqrt(T) d / s at k = 1. Raises
    ValueError.
    Assumes: as `gdp_mu`.
    Reference: Bok, Su, Altschuler 2024, NoisyGD.
    """
    # (1 - k^T)/(1 - k) as a geometric sum: without the division, k = 1 is not a special case.
    log_sum = _log_geometric(xp.log(contraction), num_steps)
    share = 0.5 * (log_sum + xp.log1p(contraction) - xp.log1p(xp.power(contraction, num_steps)))
    return _product(shift > 0, _log(shift), -xp.log(noise_std), share)


_BATCHES = dataclasses.replace(whole(2), remedy="Use full_batch_mu for one batch.")


@theorem(_CONTRACTS, **_CONSTANT, num_batches=_BATCHES, num_epochs=whole(1))
def cyclic_mu(contraction: Real, noise_std: Real, shift: Real, num_batches: Real, num_epochs: Real) -> Array:
    """Gaussian-DP parameter of a record in the last of l batches, after E passes of noisy cyclic gradient descent.

    mu^2 = (d/s)^2 [1 + k^(2l-2) (1-k^2)(1-k^(l(E-1))) / ((1-k^l)^2 (1+k^(l(E-1))))].

    contraction, noise_std, shift: as for `full_batch_mu`.
    num_batches: l, whole, >= 2 (for l = 1 use `full_batch_mu`). num_epochs: E, whole, >= 1.

    >>> print(f"{jaxdp.iteration.cyclic_mu(0.9, noise_std=1.0, shift=0.1, num_batches=10, num_epochs=5):.4f}")
    0.1032

    Returns mu of the broadcast shape, float64. Raises ValueError.
    Assumes: as `gdp_mu`; the order of the batches is the same in every pass.
    Reference: Bok, Su, Altschuler 2024, NoisyCGD; at k = 1 Feldman, Mironov, Talwar, Thakurta 2018, Theorem 34.
    """
    x = xp.log(contraction)
    # (1 - k^2)(1 - k^(l(E-1)))/(1 - k^l)^2 as geometric sums, which do not cancel near k = 1.
    epoch = _log_geometric(x, num_batches)
    rounds = xp.exp(_log_geometric(num_batches * x, xp.maximum(num_epochs - 1, 1.0)) - epoch) * (1 + contraction)
    earlier = xp.exp(2 * x * (num_batches - 1)) * rounds / (1 + xp.exp(x * num_batches * (num_epochs - 1)))
    return rounded_up(shift / noise_std * xp.sqrt(1 + xp.where(num_epochs > 1, earlier, 0.0)), shift > 0)
