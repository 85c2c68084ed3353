"""One pass of noisy SGD over a random permutation (FMT 2021, Proposition 5.3), with exact numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp import validate
from jaxdp.closed_forms import gaussian
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.precision import kernel
from jaxdp.shuffle import checks, door
from jaxdp.shuffle.approximate_local import clones_upper

_SPLITS = 24
_MU_ERROR = 2.0**-51
_LEAST_MU = 1e-300


@kernel(working_set=64, by_numpy=64)
def _splits(mu, num_users, delta):
    """Candidate local pairs (eps0, delta0 = Gaussian delta at eps0), n delta0 from above delta to far below it."""
    least = xp.sqrt(2.0 * xp.log(2.0 / delta)) * 0.8
    most = xp.sqrt(2.0 * xp.log(1e4 * num_users / delta)) + 1.0
    quantiles = xp.linspace(least, most, _SPLITS)
    eps0 = mu * quantiles + 0.5 * mu * mu
    return eps0, xp.vmap(lambda e: gaussian.delta_bounds(mu, e, _MU_ERROR)[1])(eps0)


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
        with np.errstate(over="ignore", under="ignore"):
            mu = np.maximum(scale / noise * 2.0, _LEAST_MU)
        eps0, delta0 = _splits(mu, users, target)
        spread = np.broadcast_arrays(users[:, None], eps0, delta0, target[:, None])
        found = clones_upper("epsilon", *(array.reshape(-1) for array in spread), bound)
        return found.reshape(eps0.shape).min(axis=1)

    return door.batched(best, noise, scale, users, target)
