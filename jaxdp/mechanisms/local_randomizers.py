"""Local randomizers: what each person runs before a shuffler mixes the reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, PROBABILITY, Domain, field, whole
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.base import Mechanism, UnsupportedMechanismError, record, static_field
from jaxdp.runtime.arrays import in_float64, xp
from jaxdp.shuffle import law
from jaxdp.shuffle.law import Law, NamedSets, stacked
from jaxdp.typing import Array, ArrayField, Number, OptionalRealField, RealField, Relation

_LAPLACE_CELLS = 2048  # for upper bounds, whose relative error falls with the square of this number: below 2e-6
# The same in compositions: a quarter of the time; ten rounds were up to 3.4e-5 larger (eps0 = 5; 10: 0.6%).
_LAPLACE_CELLS_COMPOSED = 256
_LAPLACE_CELLS_BELOW = 128  # for lower bounds; fewer suffice, as the data set used leaves a larger gap than the cells


class KnownRandomizer(Mechanism):
    """A local randomizer whose report probabilities are known, so that shuffling can use the bound "blanket".

    ``upper_laws`` and ``lower_laws`` return laws of X (see `jaxdp.shuffle.law`) for one parameter point, stacked on a
    leading axis: with the privacy blanket, for every pair of inputs that may be the worst; and exact, for data sets.
    """

    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)
    symmetric: ClassVar[bool] = True

    def upper_laws(self) -> Law:
        """Laws of X; the largest of their deltas is an upper bound of the shuffled mechanism's delta."""
        raise UnsupportedMechanismError(f"{type(self).__name__} does not define upper_laws.")

    def composed_laws(self) -> Law:
        """`upper_laws`, or laws with fewer outcomes that are less close, for compositions."""
        return self.upper_laws()

    def lower_laws(self) -> Law:
        """Laws of X; each gives the delta of one pair of neighbouring data sets."""
        raise UnsupportedMechanismError(f"{type(self).__name__} does not define lower_laws.")


class NamedSetRandomizer(KnownRandomizer):
    """A randomizer whose report names a set of inputs; these send it e^epsilon times as likely as the other inputs.

    A subclass has a field ``epsilon`` and defines ``named_sets``. Without shuffling its loss is epsilon, -epsilon or 0.
    """

    epsilon: RealField

    def named_sets(self) -> NamedSets:
        """The probabilities that a report names each subset of three inputs, for one parameter point."""
        raise UnsupportedMechanismError(f"{type(self).__name__} does not define named_sets.")

    def upper_laws(self) -> Law:
        """One law: all pairs of inputs have the same law."""
        return stacked(self.named_sets().blanket())

    def lower_laws(self) -> Law:
        """Three laws: all other people hold a third input (if there is one), the other input, or the person's own."""
        sets = self.named_sets()
        same = sets.homogeneous(False)
        return stacked(sets.homogeneous(True), same, same.swapped())

    def finite_pair(self) -> finite.FinitePair:
        """The three losses epsilon, -epsilon and 0 with their masses."""
        sets = self.named_sets()
        high, low = sets.levels()
        only, _, neither, both = sets.named
        return self._pair(finite.log_mass(high * only), finite.log_mass(low * neither + high * both))

    def _pair(self, own: Array, equal: Array) -> finite.FinitePair:
        """The finite pair, from P's log masses of the losses epsilon and 0. low * only would underflow."""
        other = own - self.epsilon
        loss = xp.stack([self.epsilon, -self.epsilon, xp.zeros_like(own)]) + xp.zeros_like(own)
        p, q = (xp.stack(masses) for masses in ([own, other, equal], [other, own, equal]))
        return finite.FinitePair(p, q, loss, xp.zeros_like(loss))

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """Log-sum-exp over the three losses; e^{end z} is factored out, so that its phase is not wrapped."""
        pair = self.finite_pair()
        end = xp.where(xp.real(z) < -0.5, -self.epsilon, self.epsilon)
        return end * z + finite.log_sum_exp(pair.log_p + z[..., None] * (pair.loss - end[..., None]))

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses {epsilon, 0, -epsilon}."""
        return xp.zeros_like(xp.asarray(self.epsilon)), xp.asarray(self.epsilon)

    def max_loss(self) -> Number:
        """The local epsilon."""
        return self.epsilon


_NO_THIRD = np.array([[1.0] * 4, [0.0] * 4])  # `NamedSets.third` where there is no third input


@record
class UnaryEncoding(NamedSetRandomizer):
    """One of k values as k bits, of which one is 1; each bit is flipped independently (one-time basic RAPPOR; OUE).

    epsilon: the local guarantee in nats, >= 0, any shape.
    num_categories: k, a whole number >= 2, any shape.
    optimized: True: a 1 stays 1 with probability 1/2, a 0 becomes 1 with probability 1/(e^epsilon + 1) (OUE; Wang,
        Blocki, Li, Jha 2017). False: every bit is flipped with probability 1/(e^(epsilon/2) + 1) (symmetric;
        Erlingsson, Pihur, Korolova 2014, where the permanent bits are reported once).

    >>> shuffled = jaxdp.Shuffled(jaxdp.UnaryEncoding(4.0, num_categories=16), num_users=100_000)
    >>> print(f"{jaxdp.epsilon(shuffled, delta=1e-6):.4f}")
    0.0814

    Assumes: inputs are one-hot; no input is all zeros. Each person sends one report: memoised bits that are sent in
    several rounds do not compose. Bloom filters with several hash functions are not covered. When shuffled, also what
    `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)
    num_categories: RealField = field(whole(2))
    optimized: bool = static_field(default=True)

    def check_structure(self) -> None:
        """optimized must be True or False."""
        validate.choice("optimized", self.optimized, (True, False))

    def finite_pair(self) -> finite.FinitePair:
        """The three losses with their masses, from logarithms: the probabilities of rare bits underflow."""
        # A bit 0 stays 0 with probability 1 / (1 + e^-zero), a bit 1 stays 1 with probability 1 / (1 + e^-one).
        eps0 = xp.asarray(self.epsilon)
        zero, one = (eps0, xp.zeros_like(eps0)) if self.optimized else (eps0 / 2, eps0 / 2)
        own = -xp.softplus(-zero) - xp.softplus(-one)
        return self._pair(own, own + xp.logaddexp(-zero, -one))

    def named_sets(self) -> NamedSets:
        """A report names the inputs whose bits are 1."""
        eps0 = xp.asarray(self.epsilon)
        flipped = eps0 if self.optimized else eps0 / 2
        one, zero = xp.exp(-flipped) / (1 + xp.exp(-flipped)), 1 / (1 + xp.exp(-flipped))
        named = xp.stack([one * zero, one * zero, zero * zero, one * one])
        third = xp.where(xp.asarray(self.num_categories) > 2, xp.stack([zero, one])[:, None], _NO_THIRD)
        every = xp.exp(-self.num_categories * (flipped + xp.log1p(xp.exp(-flipped))))
        return NamedSets(eps0, named, third, one, every)


@record
class SubsetSelection(NamedSetRandomizer):
    """A random subset of w of k categories, e^epsilon times as likely if it contains one's own (Ye, Barg 2018).

    epsilon: the local guarantee in nats, >= 0, any shape.
    num_categories: k, a whole number >= 2, any shape.
    subset_size: w, a whole number, 1 <= w <= k - 1. None: of the two whole numbers next to k/(e^epsilon + 1), the one
        whose frequency estimates have the least variance.

    >>> shuffled = jaxdp.Shuffled(jaxdp.SubsetSelection(4.0, num_categories=16), num_users=100_000)
    >>> print(f"{jaxdp.epsilon(shuffled, delta=1e-6):.4f}")
    0.1047

    Assumes: all subsets that contain the person's category are equally likely, and so are all others. When shuffled,
    also what `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)
    num_categories: RealField = field(whole(2))
    subset_size: OptionalRealField = field(whole(1), default=None)

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """The subset must leave out at least one category."""
        if self.subset_size is None:
            return {}
        return {"num_categories - subset_size": (self.num_categories - self.subset_size, whole(1))}

    def size(self) -> Number:
        """w: the field, or if it is None the size of least variance."""
        if self.subset_size is not None:
            return xp.asarray(self.subset_size)
        k, odds = xp.asarray(self.num_categories), xp.exp(xp.minimum(xp.asarray(self.epsilon), law.LARGEST_EPS0))

        def variance(w: Array) -> Array:
            total = w * odds + k - w
            own, other = w * odds / total, w * ((w - 1) * odds + k - w) / ((k - 1) * total)
            return other * (1 - other) / (own - other) ** 2

        low = xp.clip(xp.floor(k / (odds + 1)), 1.0, k - 1)
        high = xp.minimum(low + 1, k - 1)
        return xp.where(variance(high) < variance(low), high, low)

    def named_sets(self) -> NamedSets:
        """A report names the categories in its subset."""
        k, w = xp.asarray(self.num_categories), self.size()
        pairs = k * (k - 1)
        one, none, both = w * (k - w) / pairs, (k - w) * (k - w - 1) / pairs, w * (w - 1) / pairs
        inside = np.array([1.0, 1.0, 0.0, 2.0])
        chances = xp.clip(xp.stack([k - 2 - w + inside, w - inside]) / xp.maximum(k - 2, 1.0), 0.0, 1.0)
        third = xp.where(k > 2, chances, _NO_THIRD)
        return NamedSets(xp.asarray(self.epsilon), xp.stack([one, one, none, both]), third, w / k, xp.zeros_like(k))


@record
class LocalHashing(NamedSetRandomizer):
    """A value hashed to g buckets; the bucket is sent by g-ary randomized response, with the hash function (OLH, BLH).

    epsilon: the local guarantee in nats, >= 0, any shape.
    num_buckets: g, a whole number >= 2. None: round(e^epsilon) + 1 (OLH; Wang, Blocki, Li, Jha 2017). 2: BLH.
    collision_probability: the least Pr[h(x) = h(y)] over all pairs of inputs, h drawn from the family of hash
        functions; in [0, 1]. 0 is safe for every family, 1/g holds for uniformly random functions.

    >>> shuffled = jaxdp.Shuffled(jaxdp.LocalHashing(4.0), num_users=100_000)
    >>> print(f"{jaxdp.epsilon(shuffled, delta=1e-6):.4f}")
    0.0820

    Lower bounds are computed for a family that attains collision_probability.

    Assumes: each person draws a hash function of their own, independently of all data, and sends it in the report.
    When shuffled, also what `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)
    num_buckets: OptionalRealField = field(whole(2), default=None)
    collision_probability: RealField = field(PROBABILITY, default=0.0)

    def buckets(self) -> Number:
        """g: the field, or if it is None the number of optimal local hashing."""
        if self.num_buckets is not None:
            return xp.asarray(self.num_buckets)
        return xp.round(xp.exp(xp.minimum(xp.asarray(self.epsilon), law.LARGEST_EPS0))) + 1

    def named_sets(self) -> NamedSets:
        """A report (hash function, bucket) names the inputs that the function sends to the bucket."""
        g, met = self.buckets(), xp.asarray(self.collision_probability)
        one, zero = (1 - met) / g, xp.zeros_like(met / g)
        named = xp.stack([one, one, (g - 2 + met) / g, met / g])
        return NamedSets(xp.asarray(self.epsilon) + zero, named, xp.asarray(_NO_THIRD), 1 / g + zero, zero)


@record
class HadamardResponse(NamedSetRandomizer):
    """Hadamard response: reports in the input's half, a row of a Hadamard matrix, are e^epsilon times as likely.

    epsilon: the local guarantee in nats, >= 0, any shape (Acharya, Sun, Zhang 2019, with sets of half size).

    >>> shuffled = jaxdp.Shuffled(jaxdp.HadamardResponse(4.0), num_users=100_000)
    >>> print(f"{jaxdp.epsilon(shuffled, delta=1e-6):.4f}")
    0.0815

    Assumes: each input's set holds half of all reports, and any two sets share a quarter of them. When shuffled, also
    what `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)

    def named_sets(self) -> NamedSets:
        """A report names the inputs whose sets contain it."""
        eps0 = xp.asarray(self.epsilon)
        zero = xp.zeros_like(eps0)
        return NamedSets(eps0, xp.full(4, 0.25), xp.asarray(_NO_THIRD), zero + 0.5, zero)


@record
class LocalLaplace(KnownRandomizer):
    """A number in [0, 1] plus Laplace noise of scale 1/epsilon.

    epsilon: the local guarantee in nats, >= 0, any shape.

    >>> shuffled = jaxdp.Shuffled(jaxdp.LocalLaplace(1.0), num_users=100_000)
    >>> print(f"{jaxdp.epsilon(shuffled, delta=1e-6):.4f}")
    0.0109

    The inputs 0 and 1 are the worst pair (proof: notebooks/proofs/shuffle.md, section 4). The density is cut into 2048
    cells, in compositions into 256, and rounded to the safe side.

    Assumes: inputs are in [0, 1]. When shuffled, also what `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)

    def upper_laws(self) -> Law:
        """One law: the inputs 0 and 1."""
        return stacked(law.laplace_blanket(xp.asarray(self.epsilon), _LAPLACE_CELLS))

    def composed_laws(self) -> Law:
        """`upper_laws` with fewer cells."""
        return stacked(law.laplace_blanket(xp.asarray(self.epsilon), _LAPLACE_CELLS_COMPOSED))

    def lower_laws(self) -> Law:
        """Two laws: the inputs 0 and 1 in both orders, where all other people hold 1."""
        forward = law.laplace_homogeneous(xp.asarray(self.epsilon), _LAPLACE_CELLS_BELOW)
        return stacked(forward, forward.swapped())

    def _noise(self) -> Mechanism:
        from jaxdp.mechanisms.basic import Laplace  # noqa: PLC0415  # basic imports this module

        return Laplace(1 / xp.maximum(xp.asarray(self.epsilon), 1e-100))

    def enclosing_pair(self, inner: bool, fine: bool) -> finite.FinitePair:
        """The pair of Laplace noise of scale 1/epsilon."""
        return self._noise().enclosing_pair(inner, fine)

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """log[e^{z e} (z+1)/(2z+1) + e^{-(z+1) e} z/(2z+1)], e = epsilon (Zhu, Dong, Wang 2022, Lemma 33)."""
        return self._noise().log_mgf(z)

    def max_loss(self) -> Number:
        """The local epsilon."""
        return self.epsilon


_TABLE = "Give one row for each input and one column for each report; divide rows that are off by rounding only."


@record
class FiniteRandomizer(KnownRandomizer):
    """Any local randomizer with finitely many inputs and reports, given by its table of probabilities.

    probabilities: shape (..., inputs, outputs), entries >= 0. Rows must sum to 1 within 1e-12 and are then normalised.

    >>> table = [[0.9, 0.1], [0.2, 0.8]]
    >>> print(f"{jaxdp.epsilon(jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), num_users=100_000), delta=1e-6):.4f}")
    0.0286

    Assumes: every person draws the report from this table, with fresh randomness. The rows are all possible inputs.
    When shuffled, also what `Shuffled` assumes.

    All ordered pairs of inputs are tried. A report that some inputs cannot send may give a person away: epsilon is then
    infinite for every delta below the probability of that report. The record works inside `Shuffled` only; account for
    a report that is not shuffled with num_users=1.
    """

    probabilities: ArrayField = field(Domain(lambda x: (x >= 0) & (x <= 1), "in [0, 1]", harmless=0.5))
    event_ndim: ClassVar[dict[str, int]] = {"probabilities": 2}

    def check_structure(self) -> None:
        """There must be at least two inputs and two outputs."""
        shape = np.shape(self.probabilities)
        if len(shape) < 2 or shape[-1] < 2 or shape[-2] < 2:
            raise ValueError(f"probabilities must have shape (..., inputs >= 2, outputs >= 2), got {shape}.")

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """Every row must sum to 1."""
        plain = jnp if isinstance(self.probabilities, jax.Array) else np
        sums = plain.sum(plain.asarray(self.probabilities), axis=-1)
        worst = plain.where(plain.max(sums, -1) - 1 > 1 - plain.min(sums, -1), plain.max(sums, -1), plain.min(sums, -1))
        one = Domain(lambda x: abs(x - 1) <= 1e-12, "1 (to 1e-12)", remedy=_TABLE)
        return {"the sum of each row of probabilities": (worst, one)}

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """Not defined: which two rows are the worst pair may differ between rounds."""
        raise UnsupportedMechanismError(
            "FiniteRandomizer must be shuffled, as jaxdp.Shuffled(randomizer, num_users). Use "
            "num_users=1 for a report that is not shuffled."
        )

    def _laws(self, make: Callable[[Array, Array, Array], Law]) -> Law:
        table = xp.asarray(self.probabilities)
        pairs = np.nonzero(~np.eye(table.shape[0], dtype=bool))
        return xp.vmap(lambda person, other: make(table, person, other))(*pairs)

    def upper_laws(self) -> Law:
        """One law for each ordered pair of inputs; the blanket is each report's least probability over all inputs."""
        return self._laws(law.finite_law)

    def lower_laws(self) -> Law:
        """For each ordered pair of inputs: all others hold one of the two, or the input that separates them most."""
        told = self._laws(lambda table, x, other: law.finite_law(table, x, other, law.most_telling(table, x, other)))
        same = self._laws(lambda table, x, other: law.finite_law(table, x, other, other))
        return Law(*(xp.concatenate(sides) for sides in zip(told, same, same.swapped(), strict=True)))

    @in_float64
    def max_loss(self) -> Number:
        """The largest log ratio of two probabilities of one report; infinite where one of them is 0."""
        table = law.normalised(xp.asarray(self.probabilities, float))
        least, most = xp.min(table, axis=-2), xp.max(table, axis=-2)
        logs = [xp.log(xp.where(side > 0, side, 1.0)) for side in (most, least)]
        ratio = (logs[0] - logs[1]) + 4e-16 * (1 + abs(logs[0]) + abs(logs[1]))
        return xp.max(xp.where(most > 0, xp.where(least > 0, ratio, np.inf), 0.0), axis=-1)
