"""One pass of noisy SGD over a random permutation (FMT 2021, Proposition 5.3), with exact numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.hockey_stick.approximate_local import approximate_epsilon_upper
from jaxdp.precision import kernel
from jaxdp.shuffle import checks, door
from jaxdp.special import log_normal_density, mills

_SPLITS = 24


def _gaussian_delta(epsilon, mu):
    """delta(epsilon) of the Gaussian mechanism with sensitivity over noise mu, rounded up."""
    low, high = epsilon / mu - 0.5 * mu, epsilon / mu + 0.5 * mu
    tail = jnp.exp(log_normal_density(low)) * (mills(low) - mills(high))
    return jnp.clip(tail * (1.0 + 1e-10), 0.0, 1.0)


@kernel(working_set=64)
def _splits(mu, num_users, delta):
    """Candidate local pairs (eps0, delta0 = Gaussian delta at eps0), n delta0 from above delta to far below it."""
    least = jnp.sqrt(2.0 * jnp.log(2.0 / delta)) * 0.8
    most = jnp.sqrt(2.0 * jnp.log(1e4 * num_users / delta)) + 1.0
    quantiles = jnp.linspace(least, most, _SPLITS)
    eps0 = mu * quantiles + 0.5 * mu * mu
    return eps0, jax.vmap(_gaussian_delta, in_axes=(0, None))(eps0, mu)


def noisy_sgd_one_pass_epsilon(
    noise_std: Any, n: Any, delta: Any, *, lipschitz: Any = 1.0, bound: str = "clones"
) -> Any:
    """Epsilon at delta of one pass of noisy SGD over n examples in a uniformly random order.

    Each step releases an example's gradient, norm <= lipschitz, plus N(0, noise_std^2 I): a Gaussian local
    randomizer with mu = 2 lipschitz/noise_std. It is (eps0, delta0)-DP for every eps0; 24 such splits, from
    n delta0 above delta to far below it, are certified each and the smallest epsilon is kept. inf where no split fits.

    Arguments broadcast: noise_std > 0 and lipschitz > 0 in the units of the gradient, n whole >= 1, 0 < delta < 1.
    Assumes: all iterates may be released; the order is uniform and secret. Proof: Theorem 3.8 with the sharper
    additive term. Reference: Feldman, McMillan, Talwar 2021, Proposition 5.3.
    """
    validate.choice("bound", bound, ("clones", "stronger"))
    noise, scale = validate.positive("noise_std", noise_std), validate.positive("lipschitz", lipschitz)
    users, target = checks.users(n), checks.delta(delta)
    validate.reject("delta", target, (target <= 0) | (target >= 1), "in (0, 1)")
    validate.broadcast(noise_std=noise, lipschitz=scale, n=users, delta=target)

    def best(noise, scale, users, target):
        eps0, delta0 = _splits(2.0 * scale / noise, users, target)
        spread = np.broadcast_arrays(users[:, None], eps0, delta0, target[:, None])
        found = approximate_epsilon_upper(*(array.reshape(-1) for array in spread), rate=bound)
        return found.reshape(eps0.shape).min(axis=1)

    return door.batched(best, noise, scale, users, target)
