"""Subsampling operators as records. Add and remove are different pairs; each is composed on its own."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from jaxdp import validate
from jaxdp.mechanisms.base import (
    FORWARD,
    REPLACE,
    REVERSE,
    GaussianMechanism,
    Mechanism,
    UnsupportedMechanismError,
    record,
)


class Sampled(Mechanism):
    """Shared by both samplers: the pairs ((1-q) P0 + q P1, P0) for remove and its swap for add."""

    mechanism: Mechanism
    sampling_probability: Any

    def validate(self) -> None:
        """sampling_probability in [0, 1]; the base mechanism is checked too."""
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(f"mechanism must be a jaxdp mechanism, got {type(self.mechanism).__name__}.")
        validate.probability("sampling_probability", self.sampling_probability)
        self.mechanism.validate()
        if not isinstance(self.mechanism, GaussianMechanism) and not hasattr(self.mechanism, "finite_pair"):
            raise UnsupportedMechanismError(
                f"{type(self).__name__} of {type(self.mechanism).__name__} is not available: sampling needs the law "
                "of the loss itself, not only K(z). Give the mechanism as a DiscretePair."
            )


@record
class PoissonSampled(Sampled):
    """Each record enters the batch independently with probability sampling_probability, then the mechanism runs.

    The batch must be hidden, and drawn exactly so: shuffled or cyclic batches are not Poisson.
    Pairs: remove ((1-q) P0 + q P1, P0), add its swap, (P1, P0) dominating the base for remove
    (Zhu, Dong, Wang 2022, Theorem 11(1)). replace_one, for a Gaussian base of add/remove sensitivity 1:
    (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1); proof status in notebooks/proofs/sampled_replace.md.
    """

    mechanism: Mechanism
    sampling_probability: Any
    relations: ClassVar[tuple[str, ...]] = ("add_or_remove", "add", "remove", "replace_one")

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric replace pair, Gaussian base only."""
        if not isinstance(self.mechanism, GaussianMechanism):
            raise UnsupportedMechanismError(
                "replace_one under Poisson sampling is available for a Gaussian base only; "
                f"got {type(self.mechanism).__name__}. Use add_or_remove."
            )
        return (REPLACE,)


@record
class FixedSizeSampled(Sampled):
    """A batch of fixed size drawn uniformly without replacement, then the mechanism runs.

    sampling_probability: batch size / (size of the larger data set), or the safe batch size / n. The base pair
    must dominate under **replace_one** (a Gaussian of add/remove sensitivity 1 has replace sensitivity 2 in
    general). Relations: add, remove (Zhu, Dong, Wang 2022, Theorem 11(2)). replace_one for one round
    (Proposition 29): delta(eps) = q delta_base(log(1 + (e^eps - 1)/q)), composed through the worst-case
    pair of that profile.
    """

    mechanism: Mechanism
    sampling_probability: Any
    relations: ClassVar[tuple[str, ...]] = ("add_or_remove", "add", "remove", "replace_one")

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair of the Proposition 29 profile."""
        return (REPLACE,)


SAMPLED_DIRECTIONS = (FORWARD, REVERSE, REPLACE)


def mixture_log_ratio(w: Any, q: Any) -> Any:
    """log(1 - q + q e^w) without overflow or loss at small q."""
    large = w > 30
    small_form = jnp.log1p(q * jnp.expm1(jnp.where(large, 0.0, w)))
    rate = jnp.where(q > 0, q, 1.0)
    big_form = jnp.log(rate) + w + jnp.log1p((1 - q) / rate * jnp.exp(-jnp.maximum(w, 30.0)))
    return jnp.where(large & (q > 0), big_form, jnp.where(q > 0, small_form, 0.0))
