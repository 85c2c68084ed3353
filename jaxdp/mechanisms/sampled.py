"""Subsampled mechanisms as records. Add and remove have different dominating pairs; each is composed on its own."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxdp import validate
from jaxdp.domains import PROBABILITY, RATE, field
from jaxdp.mechanisms import finite, sampled_laws
from jaxdp.mechanisms.base import (
    FiniteLaw,
    Mechanism,
    UnsupportedMechanismError,
    not_a_mechanism,
    record,
    static_field,
)
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import BOTH_ORDERS, as_gaussian, event_dims, flatten, is_gaussian
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number, RealField, Relation


@record
class EnclosingPair(Mechanism):
    """Replaces a base mechanism by a finite pair that dominates it (inner = 0) or that it dominates (inner = 1).

    inner is a number, so that the upper and the lower bounds are rows of one batch, solved by one compiled program.
    fine: use more outcomes.
    """

    mechanism: Mechanism
    inner: RealField = field(PROBABILITY)
    fine: bool = static_field(default=False)

    def finite_pair(self) -> finite.FinitePair:
        """The chosen pair; in a compiled program the shorter of the two is padded with empty outcomes."""
        if xp.eager:
            return finite.with_losses(self.mechanism.enclosing_pair(bool(self.inner > 0), self.fine))
        outer, inner = (finite.with_losses(self.mechanism.enclosing_pair(side, self.fine)) for side in (False, True))
        return finite.either(outer, inner, self.inner > 0)

    def log_middle(self, loss: Array) -> Array:
        """`log_middle` of the base mechanism."""
        return self.mechanism.log_middle(loss)


class Sampled(FiniteLaw):
    """Base class of samplers: the pair is ((1-q) P0 + q P1, P0) for remove and its swap for add, (P1, P0) the base's.

    If the base is Gaussian noise or a composition of it, a quadrature is used, for any other base its ``finite_pair``.
    Where the finite pair only dominates the base (Laplace, discrete Gaussian), lower bounds use its inner
    ``enclosing_pair``, which the base dominates. A base without one has upper bounds only.
    """

    mechanism: Mechanism
    sampling_probability: RealField
    base_relation: ClassVar[Relation] = "add_or_remove"

    def samples_everyone(self) -> bool:
        """Whether every sampling probability is known to be 1; the record then equals its base under every relation."""
        rate = self.sampling_probability
        return not validate.is_traced(rate) and bool(np.all(np.asarray(rate) == 1))

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The directions that a relation needs; the base's directions if everyone is sampled."""
        if self.samples_everyone():
            return self.mechanism.directions(relation or self.relations[0])
        return super().directions(relation)

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair of replace_one; UnsupportedMechanismError if the base's pair is not symmetric."""
        if not is_gaussian(self.mechanism) and not self.mechanism.symmetric:
            raise UnsupportedMechanismError(
                f"{type(self).__name__} under replace_one needs a base whose pair is symmetric, got "
                f"{type(self.mechanism).__name__}. Use jaxdp.ApproximateDP(epsilon, delta) instead."
            )
        return ("replace",)

    def unsampled(self, direction: str) -> Mechanism:
        """The mechanism at sampling probability 1; its epsilon and delta are upper bounds for the sampled mechanism."""
        return self.mechanism

    def needs_quadrature(self, direction: str | None = None) -> bool:
        """Whether the losses in this direction (None: in some direction) are those of sampled Gaussian noise."""
        return is_gaussian(self.mechanism)

    def simplified(self) -> Mechanism:
        """The record with a base of composed Gaussians replaced by the one Gaussian that equals them."""
        return dataclasses.replace(self, mechanism=as_gaussian(self.mechanism)) if is_gaussian(self.mechanism) else self

    def is_exact(self, direction: str) -> bool:
        """Whether the pair in this direction is the mechanism's own."""
        base = self.mechanism
        if self.needs_quadrature(direction):
            return base.is_exact(direction)
        return not is_gaussian(base) and base.finite_pair_is_exact()

    def enclosing_records(self, direction: str, fine: bool) -> tuple[Mechanism, Mechanism] | None:
        """The record with a base that dominates, and with one that is dominated; None if only the first is known."""
        outer = inner = self.mechanism
        if not outer.offers("enclosing_pair"):
            return None
        if is_gaussian(outer) and not outer.is_exact("forward"):
            outer, inner = outer.enclosing_records(direction, fine) or (outer, outer)
        if not self.needs_quadrature(direction):
            zeros = np.zeros(np.shape(self.sampling_probability))
            outer, inner = EnclosingPair(outer, zeros, fine), EnclosingPair(inner, zeros + 1.0, fine)
        return dataclasses.replace(self, mechanism=outer), dataclasses.replace(self, mechanism=inner)

    def refinable(self, direction: str) -> bool:
        """Whether ``fine`` enclosing records enclose more closely: the base's outcomes can be cut into more cells."""
        return self.mechanism.offers("enclosing_pair") and not self.needs_quadrature(direction)

    def part(self, direction: str) -> finite.Part:
        """The finite law of the loss in one direction, with its masses at infinity."""
        return sampled_laws.sampled_part(self.mechanism.finite_pair(), self.sampling_probability, direction)

    def log_tail(self, order: Number, direction: str) -> Number | None:
        """The bound of the forward pair; below a rate of 1 the swapped pair has no outcomes at infinity."""
        if not (self.mechanism.offers("tail_moment") and self.mechanism.symmetric):
            return None
        rate = xp.asarray(self.sampling_probability)
        tail = sampled_laws.log_sampled_tail(*self.mechanism.tail_moment(order), order, rate)
        return xp.where((rate < 1) & (direction == "reverse"), -xp.inf, tail)

    def check_structure(self) -> None:
        """Raise unless the base is Gaussian noise or has a finite pair, and is stated for the relation needed."""
        if not isinstance(self.mechanism, Mechanism):
            raise not_a_mechanism(self.mechanism)
        kind, base = type(self).__name__, type(self.mechanism).__name__
        if not (is_gaussian(self.mechanism) or any(map(self.mechanism.offers, ("finite_pair", "enclosing_pair")))):
            raise UnsupportedMechanismError(
                f"{kind} needs a base that gives the probabilities of its outcomes, got {base}. Use a DiscretePair "
                "that dominates it, for example from jaxdp.conversions.pair_from_profile. Of Poisson sampling "
                "inside Poisson sampling, multiply the probabilities."
            )
        if any(atom.fixed_order for atom, _ in flatten(self.mechanism)):
            raise UnsupportedMechanismError(
                f"{kind} needs a base that takes records in any order, got {base}, which needs them in a fixed order."
            )
        if self.base_relation not in self.mechanism.relations:
            raise UnsupportedMechanismError(
                f"{kind} needs a base whose guarantee holds under {self.base_relation!r}; got {base}, stated for "
                f"{self.mechanism.relations[0]!r}. If you know its epsilon and delta under {self.base_relation!r}, use "
                "jaxdp.ApproximateDP(epsilon, delta) as the base."
            )


@record
class PoissonSampled(Sampled):
    """Each record enters the batch independently with probability sampling_probability; the mechanism sees the batch.

    mechanism: what is applied to the batch, such as `Gaussian` or a composition of Gaussians.
    sampling_probability: q in [0, 1], any shape.

    >>> training = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), sampling_probability=0.01), 1000)
    >>> print(f"{jaxdp.epsilon(training, delta=1e-5):.4f}")
    1.8282

    Assumes: the adversary sees neither the batch nor its size. Every round draws a new batch in exactly this way:
    shuffled, cyclic or cut batches are not Poisson. Sums are divided by a public number, not by the size of the batch.
    The assumptions of the mechanism hold; under replace_one its guarantee also holds for adding and removing a record.
    (Noise such as `Gaussian` is scaled to the norm bound of one contribution, by which an added record moves a sum.)

    Relations: add_or_remove (natural), add, remove, replace_one. With (P1, P0) dominating the mechanism for remove, the
    pair for remove is ((1-q) P0 + q P1, P0) and the pair for add its swap (Zhu, Dong, Wang 2022, Theorem 11(1)). Under
    replace_one the pair of Gaussian, Laplace, discrete Gaussian and discrete Laplace noise has the contributions 1
    and -1. For Gaussian noise it is (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1). It dominates in any dimension and
    is attained (proof: notebooks/proofs/sampled_replace.md). For any other symmetric mechanism the profile of one round
    under replace_one is q delta_base(log(1 + (e^eps - 1)/q)), eps >= 0, delta_base the base's profile under replace_one
    (section 6 there). A stated guarantee has the same profile in `FixedSizeSampled`. For noise of a class of your own
    the profile is an upper bound, and there is no lower bound.
    """

    mechanism: Mechanism
    sampling_probability: RealField = field(RATE)

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair; UnsupportedMechanismError unless the base has a guarantee under replace_one."""
        self.mechanism.directions("replace_one")
        return super().replace_directions()

    def under(self, relation: str) -> Mechanism:
        """The base if everyone is sampled; else this record, or under replace_one a record for the kind of base.

        Under replace_one Gaussian noise keeps this record. Other noise becomes `Antipodal` if it has a ``log_middle``,
        else `JointlyConvex`. A stated guarantee becomes `FixedSizeSampled`.
        """
        if self.samples_everyone():
            return self.mechanism.under(relation)
        if relation != "replace_one" or all(isinstance(atom, Gaussian) for atom, _ in flatten(self.mechanism)):
            return self
        is_noise, has_middle = self.mechanism.offers("at_distance"), self.mechanism.offers("log_middle")
        # a stated guarantee is attained if the new record has the effect of no record at all
        kind = Antipodal if has_middle else JointlyConvex if is_noise else FixedSizeSampled
        return kind(self.mechanism.under(relation), self.sampling_probability)

    def unsampled(self, direction: str) -> Mechanism:
        """The base; under replace_one the base at distance 2, for Gaussian noise N(1) against N(-1)."""
        return self.mechanism.at_distance(2.0) if direction == "replace" else self.mechanism


@record
class Antipodal(Sampled):
    """Poisson sampling of additive noise under replace_one: contributions 1 and -1. Made by `PoissonSampled.under`.

    mechanism: the noise at distance 2.
    """

    mechanism: Mechanism
    sampling_probability: RealField = field(RATE)

    def part(self, direction: str) -> finite.Part:
        """The law of the symmetric pair, the same in every direction."""
        base = self.mechanism
        pair = finite.with_losses(base.finite_pair())
        inner = base.inner if isinstance(base, EnclosingPair) else None if self.is_exact(direction) else 0.0
        return sampled_laws.antipodal_part(pair, base.log_middle(pair.loss), self.sampling_probability, inner)

    def is_exact(self, direction: str) -> bool:
        """Whether the base's pair is exact, known only of jaxdp's noise: M may have mass where P or Q has none."""
        return self.mechanism.finite_pair_is_exact() and self.mechanism.offers("enclosing_pair")

    def log_tail(self, order: Number, direction: str) -> Number | None:
        """The bound of the symmetric pair, the same in every direction."""
        if not self.mechanism.offers("tail_moment"):
            return None
        noise, rate = self.mechanism, xp.asarray(self.sampling_probability)
        return sampled_laws.log_antipodal_tail(
            noise.at_distance(0.5).tail_moment(order), noise.tail_moment(order), order, rate
        )


@record
class FixedSizeSampled(Sampled):
    """A batch of fixed size drawn uniformly without replacement; the mechanism sees the batch.

    mechanism: what is applied to the batch, such as `Gaussian` or a composition of Gaussians.
    sampling_probability: q in [0, 1], the batch size divided by the size of the larger of the two data sets, any shape.

    >>> training = jaxdp.repeat(jaxdp.FixedSizeSampled(jaxdp.Gaussian(2.0), sampling_probability=0.01), 1000)
    >>> print(f"{jaxdp.epsilon(training, delta=1e-5):.4f}")
    1.8282

    Assumes: the adversary does not see the batch. Every round draws a new batch uniformly; the batches of a shuffled
    epoch are not drawn in this way. The assumptions of the mechanism hold.

    Under add and remove q is below 1 if both data sets are large enough for a batch (batch size / size of the smaller
    data set is safe, if below 1). q = 1 means that everyone is in the batch, whatever its size: the mechanism itself.

    For q < 1 the batch holds another record in place of the one that was added or removed. All relations therefore use
    the mechanism under **replace_one**: noise_multiplier is relative to the norm bound of one record's contribution,
    and two contributions differ by up to twice the bound. The mechanism's pair must have the same profile in both
    orders. Relations: add_or_remove (natural), add, remove (Zhu, Dong, Wang 2022, Theorem 11(2)), and replace_one for a
    symmetric mechanism. Under replace_one the profile of one round is q delta_base(log(1 + (e^eps - 1)/q)), eps >= 0
    (Proposition 29). Several rounds are composed through its symmetric pair (Corollary 31), which only dominates them:
    lower bounds come from one data set (sampled_replace.md, section 7), or are 0 under a trace. For Gaussian noise
    the pair is replaced by a pair on a grid of losses that dominates it (docs/limits.md).
    """

    mechanism: Mechanism
    sampling_probability: RealField = field(RATE)
    base_relation: ClassVar[Relation] = "replace_one"

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The directions of sampling; UnsupportedMechanismError if the base's profile depends on the pair's order.

        The batch with the record and the batch with another record in its place may belong to either law of the pair.
        """
        found = super().directions(relation)
        if not (self.samples_everyone() or is_gaussian(self.mechanism) or self.mechanism.same_in_both_orders()):
            raise UnsupportedMechanismError(
                f"{type(self).__name__} needs a base whose pair has the same profile in both orders, to the last "
                f"digit, got {type(self.mechanism).__name__}: another record takes the place of a removed one. "
                f"{BOTH_ORDERS}"
            )
        return found

    def needs_quadrature(self, direction: str | None = None) -> bool:
        """Whether the base is Gaussian noise; False for the replace_one pair, which is computed on a grid of losses."""
        return is_gaussian(self.mechanism) and direction != "replace"

    def under(self, relation: str) -> Mechanism:
        """The record with its base at distance 2, or 1 where the rate is 1; the base itself if everyone is sampled."""
        if self.samples_everyone():
            return self.mechanism.under(relation)
        if relation == "replace_one":
            return dataclasses.replace(self, mechanism=self.mechanism.under(relation))
        rate = self.sampling_probability
        below = rate < 1 if validate.is_traced(rate) else np.asarray(rate) < 1
        if not validate.is_traced(rate) and np.all(below):
            return dataclasses.replace(self, mechanism=self.mechanism.at_distance(2.0))
        self.mechanism.directions(relation)
        array = xp if validate.is_traced(self) else np
        both, dims = [self.mechanism.at_distance(distance) for distance in (2.0, 1.0)], iter(event_dims(self.mechanism))

        def chosen(two: Number, one: Number) -> Array:
            """The number at distance 2 where the rate is below 1; event axes do not broadcast with the rate's axes."""
            return array.where(array.reshape(below, array.shape(below) + (1,) * next(dims)), two, one)

        with jax.numpy_rank_promotion("allow"):
            return dataclasses.replace(self, mechanism=jax.tree.map(chosen, *both))


@record
class JointlyConvex(FixedSizeSampled):
    """Upper bound of Poisson sampling under replace_one by advanced joint convexity. Made by `PoissonSampled.under`.

    The pair of `FixedSizeSampled` for the base under replace_one. It only dominates, and no lower bound is known.
    """

    def is_exact(self, direction: str) -> bool:
        """False: the pair only dominates."""
        return False

    def enclosing_records(self, direction: str, fine: bool) -> None:
        """None: no pair is known that the mechanism dominates."""
        return None
