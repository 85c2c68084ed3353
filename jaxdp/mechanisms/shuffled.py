"""One round of shuffled reports: its record, the generic local randomizer, and finite laws in place of a round."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from jaxdp import validate
from jaxdp.domains import BELOW_INFINITY, NONNEGATIVE, PROBABILITY, field, whole
from jaxdp.mechanisms.base import FiniteLaw, Mechanism, UnsupportedMechanismError, record, static_field
from jaxdp.mechanisms.basic import ApproximateDP
from jaxdp.mechanisms.finite import Part
from jaxdp.mechanisms.local_randomizers import KnownRandomizer
from jaxdp.runtime.arrays import xp
from jaxdp.shuffle.law import Law, clones, stacked
from jaxdp.shuffle.renyi import divergence
from jaxdp.typing import ArrayField, Bound, Number, RealField, Relation

BOUNDS: tuple[Bound, ...] = ("clones", "stronger", "closed_form", "blanket")


@record
class LocalRandomizer(ApproximateDP):
    """Any local randomizer that is (epsilon, delta)-DP when one person's value is replaced.

    epsilon: in nats, >= 0, any shape.
    delta: in [0, 1], any shape.

    >>> local = jaxdp.LocalRandomizer(4.0)
    >>> print(f"{jaxdp.epsilon(jaxdp.Shuffled(local, num_users=100_000), delta=1e-6):.4f}")
    0.1698

    Assumes: the guarantee holds for every two values of a person, whatever was reported before. When shuffled, also
    what `Shuffled` assumes.

    Without shuffling it is accounted for as `ApproximateDP`. When shuffled, the local deltas of all users add up:
    shuffling amplifies only if the local delta is far below the round's delta divided by num_users. (With 1e5 users, a
    local epsilon of 1 and a round's delta of 1e-6, the round's epsilon is 0.0153 for a local delta of 0, 0.0192 for
    1e-11, and 0.50 for 1e-9.)
    """

    epsilon: RealField = field(NONNEGATIVE)
    delta: RealField = field(PROBABILITY, default=0.0)
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)


@record
class LossLaw(FiniteLaw):
    """The finite law of the loss of a symmetric pair: losses, rounded to the safe side, and log weights under P.

    infinity: mass at infinity.
    """

    losses: ArrayField
    log_weights: ArrayField = field(BELOW_INFINITY)
    infinity: RealField = field(PROBABILITY)
    event_ndim: ClassVar[dict[str, int]] = {"losses": 1, "log_weights": 1}
    symmetric: ClassVar[bool] = True
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)

    def part(self, direction: str) -> Part:
        """The law as given, the same in every direction."""
        return Part(self.losses, self.log_weights, xp.zeros_like(self.losses), self.infinity, self.infinity)


@record
class Shuffled(Mechanism):
    """num_users people each run a local randomizer once; a shuffler mixes the reports before anybody sees them.

    randomizer: what each person runs. `LocalRandomizer` stands for all randomizers with its guarantee. For a named
        randomizer the probabilities of its reports are used: `RandomizedResponse`, `UnaryEncoding`, `SubsetSelection`,
        `LocalHashing`, `HadamardResponse`, `LocalLaplace`, `FiniteRandomizer`.
    num_users: n, a whole number >= 1, any shape.
    bound: the theorem that gives the upper bounds, see below; None for the default.

    100,000 people with a local epsilon of 4, for any randomizer and for 10-ary randomized response:

    >>> for randomizer in (jaxdp.LocalRandomizer(4.0), jaxdp.RandomizedResponse(4.0, 10)):
    ...     print(f"{jaxdp.epsilon(jaxdp.Shuffled(randomizer, num_users=100_000), delta=1e-6):.4f}")
    0.1698
    0.1099

    The only relation is replace_one: one person's value is replaced.

    Which bound to choose:

    * "blanket", the default for named randomizers: the privacy blanket of that randomizer;
    * "clones", the default for `LocalRandomizer`: Feldman, McMillan, Talwar 2021, Theorem 3.2, published;
    * "stronger": clone rate 2/(e^epsilon + 1), proved in notebooks/proofs/stronger_clones.md, not peer reviewed;
    * "closed_form": Theorem 3.1 of the 2021 paper.

    All bounds except "blanket" use only the randomizer's epsilon and delta. A positive delta is treated by Theorem 3.8
    of the 2021 paper, at the best local epsilon that is not smaller; its additive terms add up over composed rounds.
    Lower bounds come from one data set: with a named randomizer all other people hold one value, with `LocalRandomizer`
    the randomizer is two-point randomized response.

    Assumes: one value is replaced; n is fixed and public. Each person sends one report, all with one common randomizer
    and fresh independent randomness. (For `LocalRandomizer` the randomizer belongs to the position of the report: it
    may depend on earlier outputs, not on who reports.) The adversary sees nothing but the shuffled reports.

    Accuracy: at 150 random points for each of five randomizers (any, k-ary response, OUE, OLH, subset selection; n 1e3
    to 1e9, epsilon 0.1 to 8, k 2 to 1000, delta 1e-12 to 1e-5) the upper bound of epsilon was certified to exceed the
    value of its theorem by at most 1e-6, relative. The excess can be larger for n below 1000, for delta below 1e-12 and
    for `LocalLaplace` (2e-6; 1e-4 at n = 2000, 1e-3 at n = 20).
    """

    randomizer: LocalRandomizer | KnownRandomizer
    num_users: RealField = field(whole(1))
    bound: Bound | None = static_field(default=None)
    symmetric: ClassVar[bool] = True
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)
    exact: ClassVar[bool] = False

    def chosen_bound(self) -> Bound:
        """The bound in use: the field ``bound``, or if it is None the default for the randomizer."""
        return self.bound or ("blanket" if isinstance(self.randomizer, KnownRandomizer) else "clones")

    def clones(self) -> Bound:
        """The clone rate for bounds by the local epsilon alone: "stronger" if it is the chosen bound, else "clones"."""
        return "stronger" if self.bound == "stronger" else "clones"

    def check_structure(self) -> None:
        """The randomizer must be supported, and the bound known and available for this randomizer."""
        if not isinstance(self.randomizer, (LocalRandomizer, KnownRandomizer)):
            kind = type(self.randomizer).__name__
            known = "a named one such as RandomizedResponse"
            message = f"randomizer must be a LocalRandomizer or {known}, got {kind}. "
            message += "For a randomizer known by its guarantee alone use LocalRandomizer(epsilon, delta), for a "
            message += "table of report probabilities FiniteRandomizer(table)."
            raise UnsupportedMechanismError(message) if isinstance(self.randomizer, Mechanism) else TypeError(message)
        validate.choice("bound", self.chosen_bound(), BOUNDS)
        if self.chosen_bound() == "blanket" and not isinstance(self.randomizer, KnownRandomizer):
            raise UnsupportedMechanismError(
                'bound "blanket" needs a named randomizer such as RandomizedResponse, got LocalRandomizer. '
                'Use bound "clones" or "stronger", or the named randomizer.'
            )

    def upper_laws(self, composed: bool = False) -> Law:
        """Laws of X for the upper bound; first axis: pairs of inputs. Bound "closed_form" gets the clones' law.

        composed: for compositions, for which laws with fewer outcomes may do.
        """
        known = self.randomizer
        if isinstance(known, KnownRandomizer) and self.chosen_bound() == "blanket":
            return known.composed_laws() if composed else known.upper_laws()
        return stacked(clones(self.max_loss(), self.clones()))

    def renyi_divergence(self, order: Number) -> Number:
        """The largest over the laws of `upper_laws`; infinite for a positive local delta."""
        users = xp.stop_gradient(self.num_users)
        found = xp.vmap(lambda law: divergence(law, users, order))(self.upper_laws())
        return xp.where(self.infinity_mass() > 0, xp.inf, xp.max(found))

    def infinity_mass(self) -> Number:
        """1 for a positive local delta: no finite pair holds its additive term."""
        return xp.where(xp.asarray(self.local_delta()) > 0, 1.0, 0.0)

    def max_loss(self) -> Number:
        """The local epsilon."""
        return self.randomizer.max_loss()

    def local_delta(self) -> Number:
        """The local delta, 0 for a named randomizer."""
        return getattr(self.randomizer, "delta", 0.0)

    def weaker(self, by: Number) -> Shuffled:
        """The round with its local epsilon raised by ``by`` where the local delta is positive; still valid."""
        local = self.randomizer
        if not isinstance(local, LocalRandomizer):
            return self
        array = xp if validate.is_traced(local, by) else np  # outside a trace xp computes in float32
        raised = local.epsilon + array.where(array.asarray(local.delta) > 0, by, 0.0)
        return dataclasses.replace(self, randomizer=dataclasses.replace(local, epsilon=raised))
