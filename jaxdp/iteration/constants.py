"""Public constants of a training problem: Lipschitz constants of its gradient steps and of its losses."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.runtime.formulas import checked, formula
from jaxdp.typing import Array, Real

_UP = 1.0 + 2.0**-50


class LossConstants(NamedTuple):
    """Constants of the loss of one example.

    lipschitz: bound of the gradient norm of the data part (without the penalty).
    smoothness: beta, Lipschitz constant of the gradient.
    strong_convexity: rho in [0, beta].

    >>> from jaxdp import iteration
    >>> constants = iteration.logistic_regression(feature_norm=2.0, l2=0.1)
    >>> print(constants.smoothness)
    1.1
    """

    lipschitz: Array
    smoothness: Array
    strong_convexity: Array


@formula()
def _sharp(step_size, smoothness, strong_convexity):
    return jnp.maximum(jnp.abs(1 - step_size * strong_convexity), jnp.abs(1 - step_size * smoothness)) * _UP


@formula()
def _published(step_size, smoothness, strong_convexity):
    total = smoothness + strong_convexity
    # charged is the rounding of the difference, of size 1; the root enlarges it where the difference is small
    square = jnp.maximum(1 - 2 * step_size * smoothness * strong_convexity / total, 0.0) + 2.0**-51
    return jnp.maximum(jnp.sqrt(square) * _UP, _sharp.point(step_size, smoothness, strong_convexity))


def contraction(step_size: Real, smoothness: Real, strong_convexity: Real = 0.0, *, published: bool = False) -> Array:
    """Lipschitz constant kappa of the gradient step w -> w - eta grad f(w).

    The sharp constant is max(|1 - eta rho|, |1 - eta beta|), for eta <= 2 / beta. With published=True it is
    sqrt(1 - 2 eta beta rho / (beta + rho)), for eta <= 2 / (beta + rho), which is equal at eta = 2 / (beta + rho) and
    larger elsewhere.

    step_size: eta > 0.
    smoothness: beta > 0, Lipschitz constant of grad f on the whole space.
    strong_convexity: rho in [0, beta]; 0 for a convex f.
    published: which of the two constants.

    >>> from jaxdp import iteration
    >>> print(f"{iteration.contraction(step_size=0.5, smoothness=1.0, strong_convexity=0.1):.4f}")
    0.9500

    Returns kappa >= 0 of the broadcast shape, float64, rounded up (by 4 ulp; the published one by 2^-51 under the
    root); exactly 1 for rho = 0. Under a trace an invalid argument gives inf. Raises ValueError, also for rho > beta,
    or eta beyond the range of the theorem.
    Assumes: f is beta-smooth and rho-strongly convex everywhere, not only near the optimum.
    Reference: Published constant: that of Balle, Barthe, Gaboardi, Geumlek 2019, Theorem 5.
    """
    eta, beta, rho = checked(
        step_size=(validate.positive, step_size),
        smoothness=(validate.positive, smoothness),
        strong_convexity=(validate.nonnegative, strong_convexity),
    )
    if not validate.is_traced(eta, beta, rho):
        _check_range(eta, beta, rho, published)
    kappa = (_published if published else _sharp)(eta, beta, rho)
    # 1 - 0 is exact: a convex loss has kappa = 1, without the charge for rounding
    flat = (rho == 0) & (eta * beta <= 2)
    if validate.is_traced(kappa):
        limit = 2 / (beta + rho) if published else 2 / beta
        inside = (eta > 0) & (rho >= 0) & (rho <= beta) & (eta <= limit)
        return jnp.where(inside, jnp.where(flat, 1.0, kappa), jnp.inf)
    return np.where(flat, 1.0, kappa)[()]


def _check_range(eta, beta, rho, published):
    shape = validate.broadcast(step_size=eta, smoothness=beta, strong_convexity=rho)
    eta, beta, rho = (np.broadcast_to(a, shape) for a in (eta, beta, rho))
    validate.reject("strong_convexity", rho, rho > beta, "at most the smoothness")
    limit, text = 2 / beta, "at most 2 / smoothness"
    if published:
        limit, text = 2 / (beta + rho), "at most 2 / (smoothness + strong_convexity)"
    validate.reject("step_size", eta, eta > limit * (1 + 1e-15), text, "Larger steps are not contractions.")


def logistic_regression(feature_norm: Real, l2: Real = 0.0) -> LossConstants:
    """Constants of L2-regularised logistic regression: Lipschitz B, smoothness B^2 / 4 + l2, strong convexity l2.

    The loss of one example is log(1 + exp(-y <w, x>)) + l2 |w|^2 / 2 with y in {-1, 1}. The Lipschitz constant is that
    of the data part: the penalty is the same in both runs, and counts in the contraction only.

    feature_norm: B > 0 with |x| <= B for every example.
    l2: weight of the penalty, >= 0.

    >>> from jaxdp import iteration
    >>> print(*iteration.logistic_regression(feature_norm=1.0, l2=0.1))
    1.0 0.35 0.1

    Assumes: the bias column counts in B and is penalised too (otherwise the strong convexity is 0). Features are scaled
    by public constants only.

    Returns LossConstants of the broadcast shape, float64. Raises ValueError. Traced, it gives constants (inf, inf, 0).
    """
    bound, penalty = _norm_and_penalty(feature_norm, l2)
    return LossConstants(bound, bound**2 / 4 + penalty, penalty)


def softmax_regression(feature_norm: Real, l2: Real = 0.0) -> LossConstants:
    """Constants of L2-regularised softmax regression: Lipschitz sqrt(2) B, smoothness B^2/2 + l2, strong convexity l2.

    They hold for any number of classes: |p - e_y| <= sqrt(2) and diag(p) - p p' <= 1/2 for all probability vectors p.

    feature_norm: B > 0 with |x| <= B for every example.
    l2: weight of the penalty l2 |W|^2 / 2, >= 0.

    >>> from jaxdp import iteration
    >>> print("{:.4f} {:.2f} {:.2f}".format(*iteration.softmax_regression(feature_norm=1.0, l2=0.1)))
    1.4142 0.60 0.10

    Assumes: as `logistic_regression`, and gradients are not clipped: clipping may make the softmax step expand
    distances.

    Returns LossConstants of the broadcast shape, float64; the Lipschitz constant is rounded up. Raises ValueError.
    Traced, it gives constants (inf, inf, 0).
    """
    bound, penalty = _norm_and_penalty(feature_norm, l2)
    return LossConstants(2**0.5 * bound * _UP, bound**2 / 2 + penalty, penalty)


def _norm_and_penalty(feature_norm: Real, l2: Real) -> tuple[Array, Array]:
    bound, penalty = checked(feature_norm=(validate.positive, feature_norm), l2=(validate.nonnegative, l2))
    if validate.is_traced(bound, penalty):
        inside = (bound > 0) & (penalty >= 0)
        return jnp.where(inside, bound, jnp.inf), jnp.where(inside, penalty, 0.0)
    bound, penalty = np.broadcast_arrays(bound, penalty)
    return bound[()], penalty[()]
