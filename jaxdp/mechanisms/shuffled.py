"""One round of shuffled local reports."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import BELOW_INFINITY, NONNEGATIVE, PROBABILITY, field, whole
from jaxdp.hockey_stick.clones_law import FINE, FINEST, REST, USUAL_REACH, clones_law, clones_laws
from jaxdp.mechanisms.base import FORWARD, Mechanism, UnsupportedMechanismError, record, static_field
from jaxdp.mechanisms.basic import ApproximateDP, RandomizedResponse, log_sum_exp
from jaxdp.renyi.shuffled import clones_renyi_bounds

_FEW_ROUNDS = 8  # the usual law's bounds of 2 to 10 rounds, n >= 1e3, delta <= 1e-9, were 2e-6 to 1.4e-5 apart
_SHARED_REACH = 10.0  # where the finest law is as close as it need be: two rounds at delta = 1e-15
BOUNDS = ("clones", "stronger", "closed_form", "blanket")


@record
class LocalRandomizer(ApproximateDP):
    """Any local randomizer that is (epsilon, delta)-DP when one person's value is replaced.

    epsilon >= 0, delta in [0, 1] (default 0), any shape. On its own it accounts as `ApproximateDP`.
    """

    epsilon: Any = field(NONNEGATIVE)
    delta: Any = field(PROBABILITY, default=0.0)
    relations: ClassVar[tuple[str, ...]] = ("replace_one",)


@record
class LossLaw(Mechanism):
    """The finite law of the loss of a symmetric pair: losses and log weights under P, losses rounded to a safe side.

    infinity: mass at infinity.
    """

    losses: Any
    log_weights: Any = field(BELOW_INFINITY)
    infinity: Any = field(PROBABILITY)
    event_ndim: ClassVar[dict[str, int]] = {"losses": 1, "log_weights": 1}
    symmetric: ClassVar[bool] = True
    relations: ClassVar[tuple[str, ...]] = ("replace_one",)

    def atoms(self, direction: str = FORWARD) -> tuple[Any, Any, Any]:
        """(losses, log weights, 0), the same in every direction."""
        return self.losses, self.log_weights, jnp.zeros_like(self.losses)

    def infinity_mass(self) -> Any:
        """As given."""
        return self.infinity

    def reverse_infinity_mass(self) -> Any:
        """The same."""
        return self.infinity

    def max_loss(self) -> Any:
        """The largest loss that has mass."""
        return jnp.max(jnp.where(self.log_weights > -jnp.inf, self.losses, 0.0))


@record
class Shuffled(Mechanism):
    """num_users people each run the randomizer once; the reports are uniformly shuffled. Relation: replace_one.

    randomizer: `LocalRandomizer` or `RandomizedResponse`. num_users: whole number >= 1, any shape.
    bound: for a LocalRandomizer "clones" (default; Feldman, McMillan, Talwar 2021, Theorem 3.2, published,
    every adaptive sequence of randomizers), "stronger" (clone rate 2/(e^eps0 + 1), proved by us in
    notebooks/proofs/stronger_clones.md) or "closed_form" (their Theorem 3.1); with delta > 0 each is extended to
    approximate local DP. For RandomizedResponse "blanket" (default; the k-ary privacy blanket, an upper
    bound for every data set), or any of the above, which use its epsilon alone.

    Composed, a round is the clones pair between two finite ones (notebooks/proofs/clones_law.md): of 56 random points
    (2 to 3000 rounds, n 20 to 1e8, delta 1e-3 to 1e-18) 55 had epsilons within 1e-6, one 1.1e-6. Two rounds at 1e-50
    to 1e-289 have 2e-6 to 7e-6, and bounds far apart where rounds with the largest loss decide (eps0 = 14, n = 1e9,
    1e-150); delta just at a loss of two users has 1e-5; eps0 above 300 has no lower bound. Lower bounds are those of
    the clones pair, the worst that Theorem 3.2 allows for, not of one randomizer; "blanket" and "closed_form" have none
    in composition, where the clones pair stands for them.

    Assumes: the randomizer belongs to the slot and may depend on earlier outputs, not on who reports.
    """

    randomizer: LocalRandomizer | RandomizedResponse
    num_users: Any = field(whole(1))
    bound: str | None = static_field(default=None)
    symmetric: ClassVar[bool] = True
    relations: ClassVar[tuple[str, ...]] = ("replace_one",)
    exact: ClassVar[bool] = False

    def chosen_bound(self) -> str:
        """The bound in use, the randomizer's default when none was named."""
        return self.bound or ("blanket" if isinstance(self.randomizer, RandomizedResponse) else "clones")

    def check_structure(self) -> None:
        """A supported randomizer and a known bound."""
        if not isinstance(self.randomizer, (LocalRandomizer, RandomizedResponse)):
            kind = type(self.randomizer).__name__
            message = f"randomizer must be a LocalRandomizer or a RandomizedResponse, got {kind}. {validate.LOCAL}"
            raise UnsupportedMechanismError(message) if isinstance(self.randomizer, Mechanism) else TypeError(message)
        validate.choice("bound", self.chosen_bound(), BOUNDS)
        if self.chosen_bound() == "blanket" and not isinstance(self.randomizer, RandomizedResponse):
            raise UnsupportedMechanismError(
                'bound "blanket" needs the randomizer itself: it is available for RandomizedResponse. '
                'Use "clones" or "stronger" for a LocalRandomizer.'
            )

    def max_loss(self) -> Any:
        """The local epsilon."""
        return self.randomizer.epsilon

    def rate(self) -> str:
        """Which clone rate the pair uses in composition (the k-RR blanket composes through the clones pair)."""
        return "stronger" if self.chosen_bound() == "stronger" else "clones"

    def atoms(self, direction: str = FORWARD) -> tuple[Any, Any, Any]:
        """(losses, log weights under P, 0) of a finite pair that dominates the round; losses are rounded up.

        The same in every direction.
        """
        users, eps0 = jnp.asarray(self.num_users, jnp.float64), jnp.asarray(self.randomizer.epsilon, jnp.float64)
        law = clones_law.point(users, eps0, USUAL_REACH, rate=self.rate())
        return law.losses, law.log_weights, jnp.zeros_like(law.losses)

    def bracket(self, fine: bool, reach: Any = None) -> tuple[Mechanism, Mechanism] | None:
        """Finite laws that dominate the clones pair and that it dominates; None where that is not the bound."""
        if self.chosen_bound() not in ("clones", "stronger"):
            return None  # (the blanket and Theorem 3.1 are composed through a pair that is not theirs)
        # (points share a law where they can: each takes seconds)
        spread: Any = USUAL_REACH
        if reach is not None:
            spread = _SHARED_REACH * np.sqrt(2.0) ** np.maximum(np.ceil(2.0 * np.log2(reach / _SHARED_REACH)), 0.0)
        parts = self.num_users, self.randomizer.epsilon, self._local_delta(), spread
        users, eps0, local_delta, spread = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in parts))
        points = (x.reshape(-1) for x in (users, eps0, spread))
        law = clones_laws(*points, rate=self.rate(), mesh=FINEST if fine else FINE, closed=not fine)
        outer, log_outer, inner, log_inner = (x.reshape((*users.shape, -1)) for x in law)
        leaks = local_delta > 0  # an additive term, which the pair does not have: nothing is known
        infinity = np.where(leaks, 1.0, REST if fine else 0.0)
        nothing = np.where(leaks[..., None], 0.0, inner)
        return LossLaw(outer, log_outer, infinity), LossLaw(nothing, log_inner, np.zeros(users.shape))

    def hopeless(self, runs: Any) -> Any:
        """For few rounds (see ``_FEW_ROUNDS``)."""
        return runs <= _FEW_ROUNDS

    def refinable(self, direction: str) -> bool:
        """True: there is a law of more cells, which lie where the point needs them."""
        return True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) of the finite pair of ``atoms``."""
        loss, log_weight, _ = self.atoms()
        return log_sum_exp(log_weight + jnp.asarray(z)[..., None] * loss)

    def renyi_divergence(self, order: Any) -> Any:
        """Upper bound of R_order of the clones pair (infinite when the local delta is positive)."""
        users, eps0 = jnp.asarray(self.num_users, jnp.float64), jnp.asarray(self.randomizer.epsilon, jnp.float64)
        value = clones_renyi_bounds.point(users, eps0, order, rate=self.rate()).upper
        return jnp.where(self._local_delta() > 0, jnp.inf, value)

    def infinity_mass(self) -> Any:
        """With a positive local delta the round's additive term has no mass at infinity to stand for: all of it."""
        return jnp.where(self._local_delta() > 0, 1.0, 0.0)

    def reverse_infinity_mass(self) -> Any:
        """As ``infinity_mass``."""
        return self.infinity_mass()

    def _local_delta(self) -> Any:
        return jnp.asarray(getattr(self.randomizer, "delta", 0.0))
