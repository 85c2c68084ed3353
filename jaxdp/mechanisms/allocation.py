"""Random allocation: each person takes part in a uniformly drawn step of an epoch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxdp import validate
from jaxdp.allocation.renyi import log_moment
from jaxdp.domains import PROBABILITY, SMALLEST, Domain, field, whole
from jaxdp.mechanisms.base import FORWARD, Mechanism, UnsupportedMechanismError, record
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import as_gaussian, flatten, repeat
from jaxdp.mechanisms.finite import Part
from jaxdp.mechanisms.gaussian import gaussian_renyi
from jaxdp.mechanisms.shuffled import LossLaw
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Number, Real, RealField, Relation

_NO_MORE_THAN_STEPS = Domain(lambda x: x <= 1, "at most 1: nobody takes part more often than there are steps")


@record
class DirectedLaw(LossLaw):
    """The finite law of the loss of one direction of a pair: losses and log weights under its first law.

    infinity, reverse: masses at infinity of the pair of this direction and of its swap.
    """

    reverse: RealField = field(PROBABILITY)
    relations: ClassVar[tuple[Relation, ...]] = ("add_or_remove", "add", "remove")

    def part(self, direction: str) -> Part:
        """As given, for the direction that the law was made for."""
        return super().part(direction)._replace(reverse_infinity=self.reverse)


@record
class RandomAllocation(Mechanism):
    """num_steps steps of Gaussian noise; each person takes part in ``times`` of them, drawn uniformly and kept secret.

    mechanism: `Gaussian` (or a composition of Gaussians), what one step releases; noise_multiplier is the noise over
        the norm bound of ONE record's contribution.
    num_steps: T, whole number >= 1, any shape.
    times: whole, 1 <= times <= num_steps, any shape.

    >>> epoch = jaxdp.RandomAllocation(jaxdp.Gaussian(2.0), num_steps=100)
    >>> print(f"{jaxdp.epsilon(epoch, delta=1e-5):.4f}")
    0.1732

    The sampling is also called balls and bins. The record is one epoch; ``repeat(RandomAllocation(...), epochs)`` draws
    anew in each. The same draw in every epoch is far worse: `same_in_every_epoch`.

    Relations: add_or_remove (natural), add, remove. For replace_one no dominating pair is known, so it is refused.
    With times = 1 the pair is exact: (1/T) sum_i N(e_i, sigma^2) against N(0, sigma^2)^T. With times > 1 upper bounds
    are those of ``times`` independent blocks of steps, one step drawn in each, which is what the adversary sees who
    is told a random partition; lower bounds are those of the sum of all outputs.

    K(z) is that of a person whose steps are known, without amplification. Renyi divergences are amplified: for remove
    up to order 256 (whole orders to 1e-9, others above 2 up to an eighth above), for add and orders below 2 at noise
    above 0.2 (to 2e-6, at noise of 1e4 to 3e-4).
    Compositions, and several times, have bounds from these divergences under a trace: 1.04 to 2.8 times the verb's
    epsilon, delta three to thousands of times. Their derivatives are those of the Renyi bound: a few percent off, a
    third where one rare large loss decides.

    Assumes: one allocation a person, uniform, independent of the others and secret; every step adds fresh isotropic
    noise, independent across steps; contributions of norm at most 1 for every history; num_steps fixed and public.
    Steps publish sums: neither normalised by nor published with the sizes of the batches. Correlated (matrix) noise is
    not covered, nor shuffling into batches of fixed size, whose steps depend on each other.

    Accuracy: one epoch is bounded within 1e-6 for most settings from three steps on, two steps within 7e-6, several
    epochs within 2e-5 to 3e-4, seconds a point. docs/limits.md has the measured figures.

    Sources: Shenfeld and Feldman 2025 (Theorem 3.1, Lemma 3.2), Chua et al. 2024, Choquette-Choo et al. 2025. Proofs
    of the pair and of every bound: notebooks/proofs/allocation.md, sections 1 to 10.
    """

    mechanism: Mechanism
    num_steps: RealField = field(whole(1))
    times: RealField = field(whole(1), default=1)
    relations: ClassVar[tuple[Relation, ...]] = ("add_or_remove", "add", "remove")
    exact: ClassVar[bool] = False  # outside of one epoch the pairs in use only dominate

    @classmethod
    def same_in_every_epoch(cls, mechanism: Mechanism, num_steps: Real, num_epochs: Real) -> RandomAllocation:
        """num_epochs epochs in which everybody keeps the step drawn in the first one, fresh noise at every visit.

        mechanism, num_steps: as for `RandomAllocation`.
        num_epochs: whole number >= 1, any shape.

        >>> kept = jaxdp.RandomAllocation.same_in_every_epoch(jaxdp.Gaussian(10.0), num_steps=100, num_epochs=25)
        >>> print(f"{jaxdp.epsilon(kept, delta=1e-5):.4f}")
        0.1732

        It is one epoch in which a step releases num_epochs outputs: noise smaller by the root of num_epochs.
        """
        return cls(repeat(mechanism, num_epochs), num_steps)

    def noise_multiplier(self) -> Number:
        """Of the one Gaussian that a step is."""
        return as_gaussian(self.mechanism).noise_multiplier  # type: ignore[attr-defined]

    def check_structure(self) -> None:
        """A Gaussian step."""
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(f"mechanism must be a jaxdp mechanism, got {type(self.mechanism).__name__}.")
        atoms = [atom for atom, _ in flatten(self.mechanism)]
        other = next((atom for atom in atoms if not isinstance(atom, Gaussian)), None)
        if other is not None or not atoms:
            kind = type(self.mechanism if other is None else other).__name__
            raise UnsupportedMechanismError(
                f"RandomAllocation of {kind} is not available: its steps must add Gaussian noise. "
                "Without amplification, give the mechanism itself."
            )

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """times is at most num_steps; nothing to test where times is known to be 1, so that it stays a plain number."""
        if self.is_once():
            return {}
        with jax.numpy_rank_promotion("allow"):
            return {"times / num_steps": (self.times / self.num_steps, _NO_MORE_THAN_STEPS)}

    def simplified(self) -> Mechanism:
        """With the one Gaussian that a step is."""
        return dataclasses.replace(self, mechanism=Gaussian(self.noise_multiplier()))

    def is_once(self) -> bool:
        """True when everybody is known to take part once."""
        return not validate.is_traced(self.times) and bool(np.all(np.asarray(self.times) == 1))

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) of the Gaussian pair of a person whose steps are known, which dominates; no amplification."""
        return z * (z + 1) * (self.times / self.noise_multiplier() ** 2 / 2)

    def renyi_divergence(self, order: Number, direction: str = FORWARD) -> Number:
        """The sum of those of the blocks of steps, at most that of a person whose steps are known."""
        size = xp.floor(self.num_steps / self.times)
        larger = self.num_steps - size * self.times
        known, scale = gaussian_renyi(order, xp.sqrt(self.times) / self.noise_multiplier()), 1 / self.noise_multiplier()

        def moment(steps: Number) -> Number:
            return log_moment(steps, scale, order, direction)

        total = (self.times - larger) * moment(size) + xp.cond(
            larger > 0, lambda steps: larger * moment(steps), lambda steps: 0.0 * steps, size + 1
        )
        found = xp.maximum(total / (order - 1), SMALLEST)
        return xp.where(found < known, found, known)
