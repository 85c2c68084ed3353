"""Subsampling operators as records. Add and remove are different pairs; each is composed on its own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxdp.domains import PROBABILITY, field
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.base import (
    FORWARD,
    REPLACE,
    REVERSE,
    GaussianMechanism,
    Mechanism,
    UnsupportedMechanismError,
    record,
    static_field,
)
from jaxdp.mechanisms.composition import as_gaussian, is_gaussian

SAMPLED_DIRECTIONS = (FORWARD, REVERSE, REPLACE)


@record
class Bracket(Mechanism):
    """In place of a base mechanism: its finite pair, which dominates it (inner = 0), or one that it dominates (1).

    A number and not two classes, so that both bounds are compiled once and solved in one call. fine: of more outcomes.
    """

    mechanism: Any
    inner: Any = field(PROBABILITY)
    fine: bool = static_field(default=False)

    def finite_pair(self) -> finite.FinitePair:
        """The one or the other, with outcomes of no mass where it is the shorter."""
        base = self.mechanism
        if is_gaussian(base):
            mu = base.gaussian_mu()
            outer, inner = finite.gaussian_pair(mu, self.fine), finite.gaussian_inner_pair(mu, self.fine)
        elif self.fine and hasattr(base, "fine_pairs"):
            outer, inner = base.fine_pairs()
        else:
            outer, inner = base.finite_pair(), base.inner_pair()
        return finite.either(outer, inner, self.inner > 0)


class Sampled(Mechanism):
    """Shared by both samplers: the pairs ((1-q) P0 + q P1, P0) for remove and its swap for add.

    A Gaussian base (composed of Gaussian-DP mechanisms, in general) is taken by quadrature; every other one by
    its ``finite_pair``. Where that only dominates (Laplace, discrete Gaussian) the upper bounds are its own, and the
    lower ones those of an ``inner_pair``, which the base dominates; a base without one has no lower bound then.
    """

    mechanism: Mechanism
    sampling_probability: Any
    base_relation: ClassVar[str] = "add_or_remove"

    def needs_quadrature(self, direction: str | None = None) -> bool:
        """True when the losses of this direction (any, if None) are those of a sampled Gaussian."""
        return is_gaussian(self.mechanism)

    def simplified(self) -> Mechanism:
        """With composed Gaussians as the base: the one Gaussian they are."""
        if isinstance(self.mechanism, GaussianMechanism) or not is_gaussian(self.mechanism):
            return self
        return dataclasses.replace(self, mechanism=as_gaussian(self.mechanism))  # type: ignore[type-var]

    def is_exact(self, direction: str) -> bool:
        """Whether the pair of this direction is the mechanism's own."""
        return self.needs_quadrature(direction) or (
            not is_gaussian(self.mechanism) and self.mechanism.finite_pair_is_exact()
        )

    @property
    def exact(self) -> bool:  # type: ignore[override]  # the base says it once for all directions
        """Whether the pair of every direction is exact."""
        return all(self.is_exact(direction) for direction in SAMPLED_DIRECTIONS)

    def bracket(self, fine: bool, reach: Any = None) -> tuple[Sampled, Sampled] | None:
        """With a base pair that dominates, and with one that is dominated; None where only the first is known."""
        if not is_gaussian(self.mechanism) and not hasattr(self.mechanism, "inner_pair"):
            return None
        none = np.zeros(np.shape(self.sampling_probability))
        bases = (Bracket(self.mechanism, inner, fine) for inner in (none, none + 1.0))
        outer, inner = (dataclasses.replace(self, mechanism=base) for base in bases)  # type: ignore[type-var]
        return outer, inner

    def refinable(self, direction: str) -> bool:
        """True for a Gaussian or Laplace base: its outcomes are cut into cells, of which there may be more."""
        cut = is_gaussian(self.mechanism) or hasattr(self.mechanism, "fine_pairs")
        return cut and not self.needs_quadrature(direction)

    def part(self, direction: str) -> finite.Part:
        """The finite law of the loss in one direction, with its masses at infinity."""
        base: Any = self.mechanism
        gaussian = isinstance(base, GaussianMechanism)
        pair = finite.gaussian_pair(base.gaussian_mu()) if gaussian else base.finite_pair()
        return finite.sampled_part(pair, self.sampling_probability, direction)

    def atoms(self, direction: str = FORWARD) -> tuple[Any, Any, Any]:
        """(losses, log weights under the first law, error of the losses) in one direction."""
        return self.part(direction)[:3]

    def masses_at_infinity(self, direction: str) -> tuple[Any, Any]:
        """Masses at infinity of the sampled pair of a direction and of its swap."""
        return self.part(direction)[3:]

    def top_loss(self, direction: str) -> Any:
        """The largest finite loss of a direction, rounded up."""
        loss, log_weight, blur = self.atoms(direction)
        return jnp.max(jnp.where(log_weight > -jnp.inf, loss + blur, -jnp.inf))

    def check_structure(self) -> None:
        """A base mechanism whose pair is known for what the sampling needs."""
        if not isinstance(self.mechanism, Mechanism):
            raise TypeError(f"mechanism must be a jaxdp mechanism, got {type(self.mechanism).__name__}.")
        kind, base = type(self).__name__, type(self.mechanism).__name__
        if not is_gaussian(self.mechanism) and not hasattr(self.mechanism, "finite_pair"):
            raise UnsupportedMechanismError(
                f"{kind} of {base} is not available: sampling needs the law of the loss itself, not only K(z). "
                "Give the mechanism as a DiscretePair."
            )
        if self.base_relation not in self.mechanism.relations:
            raise UnsupportedMechanismError(
                f"{kind} needs a base whose guarantee holds under {self.base_relation!r}; {base} is stated for "
                f"{self.mechanism.relations[0]!r} only. If it holds there too, say so with ApproximateDP."
            )


@record
class PoissonSampled(Sampled):
    """Each record enters the batch independently with probability sampling_probability, then the mechanism runs.

    The batch must be hidden, and drawn exactly so: shuffled or cyclic batches are not Poisson.
    Pairs: remove ((1-q) P0 + q P1, P0), add its swap, (P1, P0) dominating the base for remove
    (Zhu, Dong, Wang 2022, Theorem 11(1)). replace_one, for a Gaussian base of add/remove sensitivity 1:
    (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1), which dominates in any dimension and for any mu-GDP base;
    proof in notebooks/proofs/sampled_replace.md.
    """

    mechanism: Mechanism
    sampling_probability: Any = field(PROBABILITY)
    relations: ClassVar[tuple[str, ...]] = ("add_or_remove", "add", "remove", "replace_one")

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric replace pair, Gaussian base only."""
        if not is_gaussian(self.mechanism):
            raise UnsupportedMechanismError(
                "replace_one under Poisson sampling is available for a Gaussian base only; "
                f"got {type(self.mechanism).__name__}. Use add_or_remove."
            )
        return (REPLACE,)


@record
class FixedSizeSampled(Sampled):
    """A batch of fixed size drawn uniformly without replacement, then the mechanism runs.

    sampling_probability: batch size / (size of the larger data set), or the safe batch size / n. The base pair
    must dominate every ordered pair of neighbours under **replace_one** (a Gaussian of add/remove sensitivity 1
    has replace sensitivity 2 in general). Relations: add, remove (Zhu, Dong, Wang 2022, Theorem 11(2)), and
    replace_one for a symmetric base: the profile of one round is delta(eps) = q delta_base(log(1 + (e^eps - 1)/q)),
    eps >= 0 (Proposition 29), composed through its symmetric pair (Corollary 31). For a Gaussian base that pair is
    put on a grid of losses that dominates it, and on one that it dominates: epsilons 3e-7 to 2e-6 apart (relative)
    where tried (delta 1e-6 and 1e-15).
    """

    mechanism: Mechanism
    sampling_probability: Any = field(PROBABILITY)
    relations: ClassVar[tuple[str, ...]] = ("add_or_remove", "add", "remove", "replace_one")
    base_relation: ClassVar[str] = "replace_one"

    def needs_quadrature(self, direction: str | None = None) -> bool:
        """The replace pair of a Gaussian is a finite one."""
        return is_gaussian(self.mechanism) and direction != REPLACE

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair of the Proposition 29 profile, for a symmetric base."""
        if not is_gaussian(self.mechanism) and not self.mechanism.symmetric:
            raise UnsupportedMechanismError(
                "replace_one under fixed-size sampling is available for a base whose pair is symmetric; "
                f"got {type(self.mechanism).__name__}."
            )
        return (REPLACE,)
