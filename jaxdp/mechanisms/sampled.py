"""Subsampling operators as records. Add and remove are different pairs; each is composed on its own."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from jaxdp import validate
from jaxdp.domains import PROBABILITY, field
from jaxdp.mechanisms import finite, sampled_laws
from jaxdp.mechanisms.base import (
    REPLACE,
    REVERSE,
    FiniteLaw,
    Mechanism,
    UnsupportedMechanismError,
    record,
    static_field,
)
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.composition import as_gaussian, flatten, is_gaussian
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Array, Number, RealField, Relation


@record
class EnclosingPair(Mechanism):
    """In place of a base mechanism: a finite pair that dominates it (inner = 0) or that it dominates (inner = 1).

    inner is a number, so that the upper and the lower bounds are rows of one batch, solved by one compiled program.
    fine: a pair of more outcomes.
    """

    mechanism: Mechanism
    inner: RealField = field(PROBABILITY)
    fine: bool = static_field(default=False)

    def finite_pair(self) -> finite.FinitePair:
        """The chosen pair; in a program outcomes without mass are added to the shorter one."""
        if xp.eager:
            return self.mechanism.enclosing_pair(bool(self.inner > 0), self.fine)
        outer, inner = (self.mechanism.enclosing_pair(side, self.fine) for side in (False, True))
        return finite.either(outer, inner, self.inner > 0)

    def log_middle(self, loss: Array) -> Array:
        """That of the base."""
        return self.mechanism.log_middle(loss)


class Sampled(FiniteLaw):
    """Base class of both samplers: the pair is ((1-q) P0 + q P1, P0) for remove, and its swap for add.

    A base of Gaussian noise, or composed of such, is computed by quadrature, any other base by its ``finite_pair``.
    Where that pair only dominates (Laplace, discrete Gaussian), lower bounds come from a pair that the base dominates,
    its inner ``enclosing_pair``. A base without one has upper bounds only.
    """

    mechanism: Mechanism
    sampling_probability: RealField
    base_relation: ClassVar[Relation] = "add_or_remove"

    def samples_everyone(self) -> bool:
        """True when every rate is known to be 1: the record is then its base, in every relation."""
        rate = self.sampling_probability
        return not validate.is_traced(rate) and bool(np.all(np.asarray(rate) == 1))

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """The dominating pairs that a relation asks for; those of the base where everyone is sampled."""
        if self.samples_everyone():
            return self.mechanism.directions(relation or self.relations[0])
        return super().directions(relation)

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair of replace-one; UnsupportedMechanismError where the base's pair is not symmetric."""
        if not is_gaussian(self.mechanism) and not self.mechanism.symmetric:
            raise UnsupportedMechanismError(
                f"{type(self).__name__} under replace_one is available for a base whose pair is symmetric; "
                f"got {type(self.mechanism).__name__}."
            )
        return (REPLACE,)

    def unsampled(self, direction: str) -> Mechanism:
        """The mechanism at sampling probability 1: its privacy bounds that of the sampled one from above."""
        return self.mechanism

    def needs_quadrature(self, direction: str | None = None) -> bool:
        """True when the losses of this direction (of some direction, if None) are those of a sampled Gaussian."""
        return is_gaussian(self.mechanism)

    def simplified(self) -> Mechanism:
        """The record with a base of composed Gaussians replaced by the one Gaussian that they are."""
        return dataclasses.replace(self, mechanism=as_gaussian(self.mechanism)) if is_gaussian(self.mechanism) else self

    def is_exact(self, direction: str) -> bool:
        """Whether the pair of this direction is the mechanism's own."""
        base = self.mechanism
        if self.needs_quadrature(direction):
            return base.is_exact(direction)
        return not is_gaussian(base) and base.finite_pair_is_exact()

    def enclosing_records(self, direction: str, fine: bool) -> tuple[Mechanism, Mechanism] | None:
        """The record with a base that dominates, and with one that is dominated; None where only the first is known."""
        outer = inner = self.mechanism
        if not outer.offers("enclosing_pair"):
            return None
        if is_gaussian(outer) and not outer.is_exact("forward"):
            outer, inner = outer.enclosing_records(direction, fine) or (outer, outer)
        if not self.needs_quadrature(direction):
            none = np.zeros(np.shape(self.sampling_probability))
            outer, inner = EnclosingPair(outer, none, fine), EnclosingPair(inner, none + 1.0, fine)
        return dataclasses.replace(self, mechanism=outer), dataclasses.replace(self, mechanism=inner)

    def refinable(self, direction: str) -> bool:
        """Whether fine enclosing records are closer: the base's outcomes are cut into cells, and those may be more."""
        return self.mechanism.offers("enclosing_pair") and not self.needs_quadrature(direction)

    def part(self, direction: str) -> finite.Part:
        """The finite law of the loss in one direction, with its masses at infinity."""
        return sampled_laws.sampled_part(self.mechanism.finite_pair(), self.sampling_probability, direction)

    def log_tail(self, order: Number, direction: str) -> Number | None:
        """As of the forward pair; the swapped one has none below a rate of 1."""
        if not self.mechanism.offers("tail_moment"):
            return None
        rate = xp.asarray(self.sampling_probability)
        tail = sampled_laws.log_sampled_tail(*self.mechanism.tail_moment(order), order, rate)
        return xp.where((rate < 1) & (direction == REVERSE), -xp.inf, tail)

    def check_structure(self) -> None:
        """Raise unless the base is Gaussian noise or has a finite pair, and holds under the relation that is needed."""
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(f"mechanism must be a jaxdp mechanism, got {type(self.mechanism).__name__}.")
        kind, base = type(self).__name__, type(self.mechanism).__name__
        if not (is_gaussian(self.mechanism) or any(map(self.mechanism.offers, ("finite_pair", "enclosing_pair")))):
            raise UnsupportedMechanismError(
                f"{kind} of {base} is not available: sampling needs the probabilities of the outcomes, which {base} "
                "does not give. A DiscretePair that dominates it does."
            )
        if any(atom.fixed_order for atom, _ in flatten(self.mechanism)):
            raise UnsupportedMechanismError(f"{kind} of {base} is not available: its records stand in a fixed order.")
        if self.base_relation not in self.mechanism.relations:
            raise UnsupportedMechanismError(
                f"{kind} needs a base whose guarantee holds under {self.base_relation!r}; {base} is stated for "
                f"{self.mechanism.relations[0]!r} only. If it holds there too, say so with ApproximateDP."
            )


@record
class PoissonSampled(Sampled):
    """Each record enters the batch independently with probability sampling_probability; the mechanism sees the batch.

    mechanism: what a batch goes through, such as `Gaussian` or a composition of Gaussians.
    sampling_probability: q in [0, 1], any shape.

    >>> training = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), sampling_probability=0.01), 1000)
    >>> print(f"{jaxdp.epsilon(training, delta=1e-5):.4f}")
    1.8282

    Assumes: the batch is unseen by the adversary, its size too, and drawn anew and exactly so in every round: shuffled,
    cyclic or cut batches are not Poisson. Sums are divided by a public number, not by the size of the batch. And
    what the mechanism assumes; under replace_one that its guarantee holds for one record more or less, too: `Gaussian`
    and other noise is over the norm bound of one contribution, which moves an answer by so much when a record is added.

    Relations: add_or_remove (natural), add, remove, replace_one. The pair for remove is ((1-q) P0 + q P1, P0) and for
    add its swap, where (P1, P0) dominates the mechanism for remove (Zhu, Dong, Wang 2022, Theorem 11(1)). Under
    replace_one the pair for Gaussian, Laplace, discrete Gaussian and discrete Laplace noise is that of contributions 1
    and -1, for one (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1), which dominates in any dimension and is attained
    (proof: notebooks/proofs/sampled_replace.md). For any other symmetric mechanism one round has, under replace_one,
    the profile q delta_base(log(1 + (e^eps - 1)/q)), eps >= 0, with delta_base under replace_one (section 6 there). Of
    a stated guarantee that is what `FixedSizeSampled` has; of noise of a class of your own it is an upper bound without
    a lower one.
    """

    mechanism: Mechanism
    sampling_probability: RealField = field(PROBABILITY)

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair; UnsupportedMechanismError unless the base has a guarantee under replace_one."""
        self.mechanism.directions("replace_one")
        return super().replace_directions()

    def under(self, relation: str) -> Mechanism:
        """The base where everyone is sampled; else the record itself, or under replace_one the bound by convexity.

        For Gaussian noise under replace_one the record's pair is (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1).
        """
        if self.samples_everyone():
            return self.mechanism.under(relation)
        if relation != "replace_one" or all(isinstance(atom, Gaussian) for atom, _ in flatten(self.mechanism)):
            return self
        noise, known = self.mechanism.offers("at_distance"), self.mechanism.offers("log_middle")
        # a guarantee, whatever the distance, is attained where the other record does as if it were not there
        kind = Antipodal if known else JointlyConvex if noise else FixedSizeSampled
        return kind(self.mechanism.under(relation), self.sampling_probability)

    def unsampled(self, direction: str) -> Mechanism:
        """The base; under replace_one at distance 2, that is N(1) against N(-1)."""
        return self.mechanism.at_distance(2.0) if direction == REPLACE else self.mechanism


@record
class Antipodal(Sampled):
    """Poisson sampling of additive noise under replace_one: contributions 1 and -1. Made by `PoissonSampled.under`.

    mechanism: the noise at distance 2.
    """

    mechanism: Mechanism
    sampling_probability: RealField = field(PROBABILITY)

    def part(self, direction: str) -> finite.Part:
        """The symmetric pair, the same for every direction."""
        base = self.mechanism
        pair = finite.with_losses(base.finite_pair())
        inner = base.inner if isinstance(base, EnclosingPair) else None if base.finite_pair_is_exact() else 0.0
        return sampled_laws.antipodal_part(pair, base.log_middle(pair.loss), self.sampling_probability, inner)

    def log_tail(self, order: Number, direction: str) -> Number | None:
        """The same for every direction."""
        if not self.mechanism.offers("tail_moment"):
            return None
        apart, rate = self.mechanism, xp.asarray(self.sampling_probability)
        return sampled_laws.log_antipodal_tail(
            apart.at_distance(0.5).tail_moment(order), apart.tail_moment(order), order, rate
        )


@record
class FixedSizeSampled(Sampled):
    """A batch of fixed size drawn uniformly without replacement; the mechanism sees the batch.

    mechanism: what a batch goes through, such as `Gaussian` or a composition of Gaussians.
    sampling_probability: q in [0, 1], the batch size over the size of the larger of the two data sets, any shape.

    >>> training = jaxdp.repeat(jaxdp.FixedSizeSampled(jaxdp.Gaussian(2.0), sampling_probability=0.01), 1000)
    >>> print(f"{jaxdp.epsilon(training, delta=1e-5):.4f}")
    1.8282

    Assumes: the batch is unseen by the adversary, and drawn uniformly and anew in every round: the batches of a
    shuffled epoch are not. And what the mechanism assumes.

    Under add and remove q is below 1 where both data sets have a batch (batch size / size of the smaller one is safe
    where that is below 1). q = 1 says that everyone is in the batch whatever its size, which is the mechanism itself.

    Below 1 a batch of fixed size holds another record in place of the one that was added or removed. All relations
    therefore use the mechanism under **replace_one**: noise_multiplier is over the norm bound of one record's
    contribution, and the two contributions differ by twice that. The mechanism's pair has to have the same profile in
    both orders. Relations: add_or_remove (natural), add, remove (Zhu, Dong, Wang 2022, Theorem 11(2)), and replace_one
    for a symmetric mechanism. Under replace_one the profile of one round is delta(eps) = q delta_base(log(1 + (e^eps -
    1)/q)), eps >= 0 (Proposition 29), composed through its symmetric pair (Corollary 31). That pair only dominates more
    than one round: their lower bounds are those of one data set (sampled_replace.md, section 7), 0 under a trace. For
    Gaussian noise it is put on a grid of losses that dominates it (docs/limits.md).
    """

    mechanism: Mechanism
    sampling_probability: RealField = field(PROBABILITY)
    base_relation: ClassVar[Relation] = "replace_one"

    def directions(self, relation: str | None) -> tuple[str, ...]:
        """Those of sampling; UnsupportedMechanismError where the base has another pair in the other order.

        The batch with the record and that with another in its place may be either of the two.
        """
        found = super().directions(relation)
        if not (self.samples_everyone() or is_gaussian(self.mechanism) or self.mechanism.same_in_both_orders()):
            raise UnsupportedMechanismError(
                f"{type(self).__name__} needs a base whose pair has the same profile in both orders, to the last "
                "digit, under every relation (another record is in place of the one removed); got "
                f"{type(self.mechanism).__name__}. The pair of the larger profile has: "
                "jaxdp.conversions.pair_from_profile(..., symmetric=True)."
            )
        return found

    def needs_quadrature(self, direction: str | None = None) -> bool:
        """True for Gaussian noise, except for the replace_one pair, which is computed on a grid of losses."""
        return is_gaussian(self.mechanism) and direction != REPLACE

    def under(self, relation: str) -> Mechanism:
        """The record with the base at distance 2; the base itself, under the relation, where everyone is sampled."""
        if self.samples_everyone():
            return self.mechanism.under(relation)
        rate = self.sampling_probability
        traced = validate.is_traced(rate)
        if relation == "replace_one":
            return dataclasses.replace(self, mechanism=self.mechanism.under(relation))
        if traced or np.any(np.asarray(rate) == 1):
            self.mechanism.directions(relation)
        distance = xp.where(rate < 1, 2.0, 1.0) if traced else np.where(np.asarray(rate) < 1, 2.0, 1.0)
        with jax.numpy_rank_promotion("allow"):
            return dataclasses.replace(self, mechanism=self.mechanism.at_distance(distance))


@record
class JointlyConvex(FixedSizeSampled):
    """Upper bound of Poisson sampling under replace_one by advanced joint convexity. Made by `PoissonSampled.under`.

    The pair of Proposition 29 for the base under replace_one. It only dominates, and no lower bound is known.
    """

    def is_exact(self, direction: str) -> bool:
        """False."""
        return False

    def enclosing_records(self, direction: str, fine: bool) -> None:
        """None: no pair that the mechanism's own dominates."""
        return None
