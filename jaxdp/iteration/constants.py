"""Public constants of a training problem: Lipschitz constants of its steps and of its losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.runtime.formulas import checked, formula

_UP = 1.0 + 2.0**-50


class LossConstants(NamedTuple):
    """Constants of the loss of one example: gradient bound (data part), smoothness, strong convexity."""

    lipschitz: Any
    smoothness: Any
    strong_convexity: Any


@formula()
def _sharp(step_size, smoothness, strong_convexity):
    return jnp.maximum(jnp.abs(1 - step_size * strong_convexity), jnp.abs(1 - step_size * smoothness)) * _UP


@formula()
def _published(step_size, smoothness, strong_convexity):
    total = smoothness + strong_convexity
    # the difference is rounded at the size of 1, which its root enlarges
    square = jnp.maximum(1 - 2 * step_size * smoothness * strong_convexity / total, 0.0) + 2.0**-51
    return jnp.maximum(jnp.sqrt(square) * _UP, _sharp.point(step_size, smoothness, strong_convexity))


def contraction(step_size: Any, smoothness: Any, strong_convexity: Any = 0.0, *, published: bool = False) -> Any:
    """Lipschitz constant kappa of the gradient step w -> w - step_size grad f(w).

    The sharp constant is max(|1 - eta rho|, |1 - eta beta|) for eta <= 2 / beta. With ``published=True`` the
    formula of Balle et al. 2019, sqrt(1 - 2 eta beta rho / (beta + rho)) for eta <= 2 / (beta + rho), which is
    equal at eta = 2 / (beta + rho) and weaker elsewhere.

    Args:
        step_size: eta > 0.
        smoothness: beta > 0, Lipschitz constant of grad f on the whole space.
        strong_convexity: rho in [0, beta]; 0 is a convex f.
        published: which of the two constants.

    Returns:
        kappa >= 0, float64, rounded up (by 4 ulp; the published one by 2^-51 under the root), of the broadcast shape;
        1 for rho = 0.

    Raises:
        ValueError: rho > beta, or eta beyond the range of the theorem.

    Assumes:
        f is beta-smooth and rho-strongly convex everywhere, not only near the optimum.

    """
    eta, beta, rho = checked(
        step_size=(validate.positive, step_size),
        smoothness=(validate.positive, smoothness),
        strong_convexity=(validate.nonnegative, strong_convexity),
    )
    if not validate.is_traced(eta, beta, rho):
        _check_range(eta, beta, rho, published)
    kappa = (_published if published else _sharp)(eta, beta, rho)
    # 1 - 0 is exact, so a convex loss keeps kappa = 1 and not one ulp more.
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


def logistic_regression(feature_norm: Any, l2: Any = 0.0) -> LossConstants:
    """Constants of L2-regularised logistic regression: B, B^2 / 4 + l2, l2.

    Loss log(1 + exp(-y <w, x>)) + l2 |w|^2 / 2 with |x| <= B = feature_norm and y in {-1, 1}. The Lipschitz
    constant is that of the data part; the penalty is the same in both runs and belongs into the contraction.

    Assumes:
        The bias column counts in B and is penalised too (else strong convexity is 0); the scaling of the
        features uses public constants only.
    """
    bound, penalty = _norm_and_penalty(feature_norm, l2)
    return LossConstants(bound, bound**2 / 4 + penalty, penalty)


def softmax_regression(feature_norm: Any, l2: Any = 0.0) -> LossConstants:
    """Constants of L2-regularised softmax regression, any number of classes: sqrt(2) B, B^2 / 2 + l2, l2.

    From |p - e_y| <= sqrt(2) and diag(p) - p p' <= 1/2. Arguments as in `logistic_regression`.

    Assumes:
        As `logistic_regression`; gradients are not clipped (clipping makes the softmax step expansive).
    """
    bound, penalty = _norm_and_penalty(feature_norm, l2)
    return LossConstants(2**0.5 * bound * _UP, bound**2 / 2 + penalty, penalty)


def _norm_and_penalty(feature_norm, l2):
    bound, penalty = checked(feature_norm=(validate.positive, feature_norm), l2=(validate.nonnegative, l2))
    if validate.is_traced(bound, penalty):
        return bound, penalty
    bound, penalty = np.broadcast_arrays(bound, penalty)
    return bound[()], penalty[()]
