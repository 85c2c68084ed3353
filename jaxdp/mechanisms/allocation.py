"""Random allocation: each person takes part in a uniformly drawn step of an epoch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxdp import validate
from jaxdp.allocation.renyi import log_moment
from jaxdp.domains import PROBABILITY, SMALLEST, Domain, field, whole
from jaxdp.mechanisms.base import Mechanism, UnsupportedMechanismError, not_a_mechanism, record
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import as_gaussian, flatten, repeat
from jaxdp.mechanisms.finite import Part
from jaxdp.mechanisms.gaussian import gaussian_renyi
from jaxdp.mechanisms.shuffled import LossLaw
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Number, Real, RealField, Relation

_NO_MORE_THAN_STEPS = Domain(lambda x: x <= 1, "at most 1, as nobody takes part twice in one step")


@record
class DirectedLaw(LossLaw):
    """The finite law of the loss in one direction of a pair: losses, and log weights under the first law.

    infinity, reverse: masses at infinity of the pair in this direction and of its swap.
    """

    reverse: RealField = field(PROBABILITY)
    relations: ClassVar[tuple[Relation, ...]] = ("add_or_remove", "add", "remove")

    def part(self, direction: str) -> Part:
        """The law as given; it was made for one direction."""
        return super().part(direction)._replace(reverse_infinity=self.reverse)


@record
class RandomAllocation(Mechanism):
    """num_steps steps of Gaussian noise; each person takes part in ``times`` of them, drawn uniformly and kept secret.

    mechanism: what one step releases, `Gaussian` or a composition of Gaussians; noise_multiplier is the noise divided
        by the norm bound of ONE record's contribution.
    num_steps: T, a whole number >= 1, any shape.
    times: a whole number, 1 <= times <= num_steps, any shape.

    >>> epoch = jaxdp.RandomAllocation(jaxdp.Gaussian(2.0), num_steps=100)
    >>> print(f"{jaxdp.epsilon(epoch, delta=1e-5):.4f}")
    0.1732

    This sampling is also called balls and bins. The record is one epoch; ``repeat(RandomAllocation(...), epochs)``
    draws new steps in every epoch. Keeping the same steps in every epoch is far less private: `same_in_every_epoch`.

    Relations: add_or_remove (natural), add, remove; for replace_one no dominating pair is known.
    With times = 1 the pair is exact: (1/T) sum_i N(e_i, sigma^2) against N(0, sigma^2)^T. With times > 1 upper bounds
    are computed for ``times`` independent blocks of steps, with one step drawn in each; an adversary who also learns a
    random partition of the steps sees this. Lower bounds are computed for the sum of all outputs.

    K(z) describes a person whose steps are known, without amplification. Renyi divergences include the amplification.
    For remove they do up to order 256: whole orders are right to 1e-9, other orders above 2 are up to an eighth too
    large. For add, and for orders below 2, they do at noise above 0.2: right to 2e-6 (3e-4 at noise 1e4).
    Under a trace, compositions and times > 1 have bounds from these divergences: epsilon is 1.04 to 2.8 times, delta
    three to thousands of times the value outside a trace. Derivatives are those of this bound, not of the value:
    a few percent off, and a third off where one rare large loss decides.

    Assumes: the steps of each person are drawn uniformly, independently of all others, and kept secret. Every step adds
    fresh isotropic noise, independent across steps. Every contribution is within the norm bound, whatever was released
    before. num_steps is fixed and public. Steps publish sums that are not divided by batch sizes; these stay secret.
    Not covered: correlated (matrix) noise, and shuffling into batches of fixed size, where steps depend on each other.

    Accuracy: the relative gap of one epoch is at most 1e-6 in most settings of three or more steps, and 7e-6 for two
    steps. For several epochs it is 4e-7 to 1e-4, at seconds a point. docs/limits.md has the measured figures.

    Sources: Shenfeld and Feldman 2025 (Theorem 3.1, Lemma 3.2), Chua et al. 2024, Choquette-Choo et al. 2025. Proofs
    of the pair and of every bound: notebooks/proofs/allocation.md, sections 1 to 10.
    """

    mechanism: Mechanism
    num_steps: RealField = field(whole(1))
    times: RealField = field(whole(1), default=1)
    relations: ClassVar[tuple[Relation, ...]] = ("add_or_remove", "add", "remove")
    exact: ClassVar[bool] = False  # except for one epoch with times = 1 the pairs in use only dominate

    @classmethod
    def same_in_every_epoch(cls, mechanism: Mechanism, num_steps: Real, num_epochs: Real) -> RandomAllocation:
        """num_epochs epochs in which everyone keeps the step drawn in the first epoch; the noise is always fresh.

        mechanism, num_steps: as for `RandomAllocation`.
        num_epochs: a whole number >= 1, any shape.

        >>> kept = jaxdp.RandomAllocation.same_in_every_epoch(jaxdp.Gaussian(10.0), num_steps=100, num_epochs=25)
        >>> print(f"{jaxdp.epsilon(kept, delta=1e-5):.4f}")
        0.1732

        This is one epoch in which every step releases num_epochs outputs: noise smaller by the root of num_epochs.
        """
        return cls(repeat(mechanism, num_epochs), num_steps)

    def noise_multiplier(self) -> Number:
        """The noise_multiplier of the one Gaussian that a step equals."""
        return as_gaussian(self.mechanism).noise_multiplier  # type: ignore[attr-defined]

    def check_structure(self) -> None:
        """The steps must be Gaussian noise."""
        if not isinstance(self.mechanism, Mechanism):
            raise not_a_mechanism(self.mechanism)
        atoms = [atom for atom, _ in flatten(self.mechanism)]
        other = next((atom for atom in atoms if not isinstance(atom, Gaussian)), None)
        if other is not None or not atoms:
            kind = type(self.mechanism if other is None else other).__name__
            raise UnsupportedMechanismError(
                f"RandomAllocation needs steps that add Gaussian noise, got {kind}. "
                "For a bound without amplification, account for the mechanism alone."
            )

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """times must be at most num_steps; not tested if times is known to be 1, so that it stays a plain number."""
        if self.is_once():
            return {}
        with jax.numpy_rank_promotion("allow"):
            return {"times / num_steps": (self.times / self.num_steps, _NO_MORE_THAN_STEPS)}

    def simplified(self) -> Mechanism:
        """The record with the one Gaussian that a step equals."""
        return dataclasses.replace(self, mechanism=Gaussian(self.noise_multiplier()))

    def is_once(self) -> bool:
        """Whether everyone is known to take part exactly once."""
        return not validate.is_traced(self.times) and bool(np.all(np.asarray(self.times) == 1))

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) of the Gaussian pair of a person whose steps are known, which dominates; without amplification."""
        return z * (z + 1) * (self.times / self.noise_multiplier() ** 2 / 2)

    def renyi_divergence(self, order: Number, direction: str = "forward") -> Number:
        """The sum over the blocks of steps, but at most the divergence of a person whose steps are known."""
        size = xp.floor(self.num_steps / self.times)
        num_larger = self.num_steps - size * self.times  # blocks of size + 1 steps; the others have size steps
        known, scale = gaussian_renyi(order, xp.sqrt(self.times) / self.noise_multiplier()), 1 / self.noise_multiplier()

        def moment(steps: Number) -> Number:
            return log_moment(steps, scale, order, direction)

        total = (self.times - num_larger) * moment(size) + xp.cond(
            num_larger > 0, lambda steps: num_larger * moment(steps), lambda steps: 0.0 * steps, size + 1
        )
        amplified = total / (order - 1) < known
        # an infinite total must not be divided: the derivative of its quotient by the order is not finite
        return xp.where(amplified, xp.maximum(xp.where(amplified, total, 1.0) / (order - 1), SMALLEST), known)
