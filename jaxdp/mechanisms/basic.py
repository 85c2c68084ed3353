"""The unsampled mechanisms, each a record and its K(z)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import numpy as np

from jaxdp import validate
from jaxdp.closed_forms.laplace_renyi import laplace_renyi
from jaxdp.domains import NOISE, NONNEGATIVE, POSITIVE, PROBABILITY, SMALLEST, Domain, field, whole
from jaxdp.iteration.isotonic import allocation, allocation_excess, shift_allocation_mu2
from jaxdp.mechanisms import finite, sampled_laws
from jaxdp.mechanisms.base import FiniteLaw, Mechanism, lists_to_arrays, record
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.mechanisms.local_randomizers import NamedSetRandomizer
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_complement
from jaxdp.runtime.arrays import in_float64, xp
from jaxdp.shuffle.law import NamedSets
from jaxdp.typing import Array, ArrayField, Number, RealField, Relation


@record
class Gaussian(GaussianMechanism):
    """Gaussian noise on a query of any dimension.

    noise_multiplier: sigma, the noise's standard deviation over the L2 norm bound of one record's contribution, > 0,
        any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.Gaussian(noise_multiplier=1.0), delta=1e-5):.4f}")
    4.3772

    Assumes: the norm bound holds for every record that could be there, by clipping or by the query itself; noise of the
    same standard deviation in every coordinate, fresh for every release, and as good as real noise.

    The dominating pair is N(1/sigma, 1) against N(0, 1). Under replace_one two data sets differ by twice the norm
    bound: N(2/sigma, 1) against N(0, 1).
    """

    noise_multiplier: RealField = field(NOISE)

    def gaussian_mu(self) -> Number:
        """mu = 1 / noise_multiplier."""
        return 1.0 / self.noise_multiplier

    def at_distance(self, distance: Number) -> GaussianMechanism:
        """As private as noise smaller by that factor."""
        return Gaussian(self.noise_multiplier / distance)

    def log_middle(self, loss: Array) -> Array:
        """Half the loss and a constant."""
        return 0.5 * loss + self.gaussian_mu() ** 2 / 8


@record
class Laplace(Mechanism):
    """Laplace noise on a query with one real answer.

    noise_multiplier: b, the noise's scale over the L1 norm bound of one record's contribution, > 0, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.repeat(jaxdp.Laplace(10.0), 100), delta=1e-5):.4f}")
    4.2203

    Assumes: the norm bound holds for every record that could be there, by clipping or by the query itself; noise fresh
    for every release, and as good as real noise: floating-point Laplace noise can be told apart by its last digits
    (Mironov 2012).

    Under replace_one two data sets differ by twice the norm bound, which is as private as noise of half the scale.
    K(z) = log[ e^{z/b} (z+1)/(2z+1) + e^{-(z+1)/b} z/(2z+1) ] (Zhu, Dong, Wang 2022, Lemma 33).
    """

    noise_multiplier: RealField = field(POSITIVE)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """log(e^{-1/(2b)} [cosh y + sinh(y)/(2by)]), y = (z + 1/2)/b: no 0/0 at z = -1/2; e^y taken out."""
        b = self.noise_multiplier
        left = xp.real(z) < -0.5  # even in y: the mirror image
        y = xp.where(left, -(z + 0.5), z + 0.5) / b
        # e^{-y}[cosh y + sinh(y)/(2by)]; (1 - e^{-2y})/(2y) by its series where it cancels
        small = xp.abs(y) < 1e-2
        safe = xp.where(small, 1.0, y)
        series = 1 + y * (-1 + y * (2 / 3 + y * (-1 / 3 + y * (2 / 15 + y * (-2 / 45 + y * (4 / 315 - y / 315))))))
        ratio = xp.where(small, series, (1 - xp.exp(-2 * safe)) / (2 * safe))
        # y - 1/(2b), without the cancellation
        return xp.where(left, -(z + 1), z) / b + xp.log((1 + xp.exp(-2 * y)) / 2 + ratio / (2 * b))

    def at_distance(self, distance: Number) -> Mechanism:
        """As private as noise smaller by that factor."""
        return Laplace(self.noise_multiplier / distance)

    def enclosing_pair(self, inner: bool, fine: bool) -> finite.FinitePair:
        """A pair on a grid."""
        return finite.laplace_pair(self.noise_multiplier, fine, inner)

    def log_middle(self, loss: Array) -> Array:
        """Left of the middle it falls with the loss, right of it it is constant."""
        return xp.minimum(loss, 0.0) + 0.5 / self.noise_multiplier

    def renyi_divergence(self, order: Number) -> Number:
        """The closed form of Mironov 2017, Corollary 2, with a series for small shifts."""
        return laplace_renyi(order, 1.0 / self.noise_multiplier)

    def max_loss(self) -> Number:
        """1/b."""
        return 1.0 / self.noise_multiplier


@record
class RandomizedResponse(NamedSetRandomizer):
    """k-ary randomized response: the truth with probability e^epsilon / (e^epsilon + k - 1), else another category.

    epsilon: local guarantee, nats, >= 0, any shape.
    num_categories: k, whole, >= 2, any shape.

    >>> survey = jaxdp.RandomizedResponse(4.0, num_categories=10)
    >>> print(f"{jaxdp.epsilon(jaxdp.Shuffled(survey, num_users=100_000), delta=1e-6):.4f}")
    0.1099

    epsilon is that of replacing one person's value, the natural relation; every other relation has the same guarantee.

    Assumes, when shuffled: what `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)
    num_categories: RealField = field(whole(2), default=2)
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one", "add_or_remove", "add", "remove")

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses: +-epsilon for two categories, {epsilon, 0, -epsilon} for more."""
        two = xp.asarray(self.num_categories) <= 2
        return xp.where(two, self.epsilon, 0.0), xp.where(two, 2.0, 1.0) * self.epsilon

    def finite_pair(self) -> finite.FinitePair:
        """The outcomes "own value", "the other value", "any third"."""
        return finite.randomized_response_pair(self.epsilon, self.num_categories)

    def renyi_divergence(self, order: Number) -> Number:
        """log[1 + e^{(a-1) eps} (1 - e^{-a eps})(1 - e^{-(a-1) eps})/(1 + (k-1) e^-eps)]/(a - 1): nothing cancels."""
        eps, excess = xp.asarray(self.epsilon), xp.asarray(order) - 1
        falls = [xp.log(xp.maximum(-xp.expm1(-x), SMALLEST)) for x in (order * eps, excess * eps)]
        s = excess * eps + falls[0] + falls[1] - xp.log1p((xp.asarray(self.num_categories) - 1.0) * xp.exp(-eps))
        small = xp.exp(xp.minimum(s, 0.0) - xp.log(excess))
        return xp.where(eps > 0, xp.maximum(xp.where(s < -40, small, xp.softplus(s) / excess), SMALLEST), 0.0)

    def named_sets(self) -> NamedSets:
        """A report names one category."""
        k = xp.asarray(self.num_categories) + 0.0 * xp.asarray(self.epsilon)
        one, zero = 1 / k, xp.zeros_like(k)
        others = xp.maximum(k - 2, 0.0)
        met = xp.where(others > 0, 1 / xp.maximum(others, 1.0), 0.0)
        third = xp.stack([xp.stack([1, 1, xp.where(others > 0, (others - 1) * met, 1.0), 1]), xp.stack([0, 0, met, 0])])
        return NamedSets(xp.asarray(self.epsilon), xp.stack([one, one, others / k, zero]), third, one, zero)


class WorstCase(Mechanism):
    """The worst case of a guarantee, binary randomized response: losses +-epsilon."""

    epsilon: RealField
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) = log[ (e^{eps (z+1)} + e^{-eps z}) / (1 + e^eps) ]."""
        return RandomizedResponse(self.epsilon, 2).log_mgf(z)

    def finite_pair(self) -> finite.FinitePair:
        """That of binary randomized response."""
        return finite.randomized_response_pair(self.epsilon, 2)

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses +-epsilon."""
        return xp.asarray(self.epsilon), 2.0 * self.epsilon

    def max_loss(self) -> Number:
        """The record's epsilon."""
        return self.epsilon


@record
class PureDP(WorstCase):
    """Any eps-DP mechanism, by its worst case: binary randomized response (Kairouz, Oh, Viswanath 2015).

    epsilon: the guarantee under the relation that you account for, the same number in each; nats, >= 0, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.repeat(jaxdp.PureDP(0.1), 100), delta=1e-6):.4f}")
    4.7746

    Assumes: the guarantee holds under the relation that you account for (in `FixedSizeSampled`: under replace_one; in
    `PoissonSampled` under replace_one: also for one record more or less), in every run whatever was released before.
    """

    epsilon: RealField = field(NONNEGATIVE)

    def renyi_divergence(self, order: Number) -> Number:
        """That of binary randomized response."""
        return RandomizedResponse(self.epsilon, 2).renyi_divergence(order)


@record
class ApproximateDP(WorstCase):
    """Any (eps, delta)-DP mechanism, by its worst case (Kairouz, Oh, Viswanath 2015).

    epsilon: nats, >= 0, any shape.
    delta: in [0, 1], any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.repeat(jaxdp.ApproximateDP(0.1, 1e-9), 100), delta=1e-6):.4f}")
    4.7877

    Assumes: the guarantee holds under the relation that you account for (in `FixedSizeSampled`: under replace_one; in
    `PoissonSampled` under replace_one: also for one record more or less), in every run whatever was released before.

    Both numbers are read as the guarantee under whichever relation is asked for. The worst case has mass delta at
    infinity, and 1 - delta times the worst eps-DP pair.
    """

    epsilon: RealField = field(NONNEGATIVE)
    delta: RealField = field(PROBABILITY)

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """log(1 - delta) + K of `PureDP`."""
        return super().log_mgf(z) + log_complement(xp.asarray(self.delta), 1.0 - self.delta)

    def finite_pair(self) -> finite.FinitePair:
        """That of `PureDP`, scaled by 1 - delta, and delta of mass at infinity on either side."""
        return finite.scaled(super().finite_pair(), self.delta)

    def infinity_mass(self) -> Number:
        """The record's delta."""
        return self.delta


@record
class DiscretePair(FiniteLaw):
    """A mechanism given by two distributions over finitely many outcomes.

    p: masses of the outcomes with the record, outcomes on the last axis.
    q: masses of the same outcomes without the record.

    >>> pair = jaxdp.DiscretePair(p=[0.7, 0.2, 0.1], q=[0.2, 0.2, 0.6])
    >>> print(f"{jaxdp.delta(pair, epsilon=1.0):.4f}")
    0.3282

    The pair (p, q) is that of "remove" and its swap that of "add"; "replace_one" takes the larger of the two orders. Of
    several releases that is too little: a value may change from a to b in one and from b to a in another. They need,
    and so does a batch of fixed size, a pair with the same profile in both orders: to every outcome of masses a and b
    one of masses b and a, to the last digit. `pair_from_profile` makes such pairs; for bins of symmetric noise, whose
    edges mirror each other, take q = p[::-1].
    Assumes: the pair dominates your mechanism under the relation that you account for (in `FixedSizeSampled`: under
    replace_one; in `PoissonSampled` under replace_one: also for one record more or less), whatever the others are.

    An outcome with p > 0 = q has an infinite loss. Masses must sum to 1 up to 1e-9. They are used as given: what p
    misses of 1 is charged as mass at infinity, but for what may be rounding: 1e-15 times 8 + log2 of the number of
    outcomes, or times that number where it is smaller.
    """

    p: ArrayField = field(NONNEGATIVE)
    q: ArrayField = field(NONNEGATIVE)
    event_ndim: ClassVar[dict[str, int]] = {"p": 1, "q": 1}

    def finite_pair(self) -> finite.FinitePair:
        """The outcomes as given, and what either side misses of 1 as mass at infinity."""
        p, q = xp.asarray(self.p, xp.float64), xp.asarray(self.q, xp.float64)
        pair = finite.with_leftover(finite.masses_pair(p, q), _missing(p), _missing(q))
        return pair._replace(only_p=_mass_at_infinity(self.p, self.q), only_q=_mass_at_infinity(self.q, self.p))

    def part(self, direction: str) -> finite.Part:
        """The law of the loss of the pair, or of its swap."""
        return sampled_laws.sampled_part(self.finite_pair(), xp.ones(()), direction)

    def check_structure(self) -> None:
        """p and q have a last axis of the same length."""
        p, q = np.shape(self.p), np.shape(self.q)
        if not p or not q or p[-1] != q[-1]:
            raise ValueError(f"p and q must have the same number of outcomes on the last axis, got shapes {p}, {q}.")

    def same_in_both_orders(self) -> bool:
        """Of concrete masses: the outcomes with masses (a, b) are as many as those with (b, a), for every a and b."""
        if validate.is_traced(self.p, self.q):
            return False
        p, q = np.broadcast_arrays(np.asarray(self.p, np.float64), np.asarray(self.q, np.float64))
        return np.array_equal(np.sort(p + 1j * q), np.sort(q + 1j * p))  # sorted by the first, then by the second

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """The masses of either law sum to 1."""
        return {f"the sum of {name}": (mass.sum(-1), _ONE) for name, mass in (("p", self.p), ("q", self.q))}


_ONE = Domain(lambda total: abs(total - 1) <= 1e-9, "1 (to 1e-9)", remedy="Normalise it.")


def _missing(p: Any) -> Any:
    size, total = p.shape[-1], p
    while total.size > 1:  # half of them onto the other half: as many roundings as the logarithm of their number
        half = (total.size + 1) // 2
        total = total[:half] + xp.pad(total[half:], (0, 2 * half - total.size))
    missing = xp.maximum(1.0 - total[0], 0.0)
    return xp.where(missing > 1e-15 * min(size, 8 + math.log2(size)), missing, 0.0)


def _mass_at_infinity(p: Any, q: Any) -> Any:
    """sum of p where q = 0, plus what p misses of 1."""
    alone, missing = xp.where(q > 0, 0.0, p), _missing(p)
    # one mass is exact, a sum is rounded up
    several = xp.sum(alone > 0) + (missing > 0) > 1
    up = xp.where(several | (missing > 0), 1 + (p.shape[-1] + 4) * ULP, 1.0)
    return xp.minimum(1.0, (xp.sum(alone) + missing) * up)


@record
class DiscreteLaplace(Mechanism):
    """Discrete Laplace (geometric) noise on the integers, P(x) ~ exp(-|x|/scale).

    scale: > 0, any shape.
    sensitivity: bound of the size of one record's contribution, a whole number >= 1, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.DiscreteLaplace(scale=2.0), delta=1e-5):.4f}")
    0.5000

    Assumes: the answer is a whole number, and the bound holds for every record that could be there; noise fresh for
    every release, drawn exactly on the integers.

    Under replace_one two data sets differ by twice the sensitivity.
    """

    scale: RealField = field(POSITIVE)
    sensitivity: RealField = field(whole(1), default=1)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """[e^{zas} + e^{-as(z+1)} + (1 - e^{-a}) sum_{x=1..s-1} e^{-ax} e^{za(s-2x)}] / (1 + e^{-a}), a = 1/scale."""
        a, s = 1.0 / self.scale, self.sensitivity
        first = xp.where(xp.real(z) >= -0.5, z * a * s, -a * s * (z + 1))
        other = xp.where(xp.real(z) >= -0.5, -a * s * (z + 1), z * a * s)
        # the middle sum is e^{zas} (y - y^s)/(1 - y), y = e^{-a(1+2z)}: a geometric sum in |y| <= 1 after
        # taking out the larger end; near y^s = 1 it is s - 1 terms of e^{zas}
        w = xp.where(xp.real(z) >= -0.5, -a * (1 + 2 * z), a * (1 + 2 * z))
        near = xp.abs(w) * s < 1e-6
        apart = xp.where(near, 1.0, w)
        quotient = xp.exp(apart) * xp.expm1(apart * (s - 1)) / xp.expm1(apart)
        linear = (s - 1) * (1 + w * s / 2 + w * w * s * (2 * s - 1) / 12)
        middle = xp.where(near, linear, quotient)
        total = 1 + xp.exp(other - first) - xp.expm1(-a) * middle
        return first + xp.log(total) - xp.log1p(xp.exp(-a))

    def at_distance(self, distance: Number) -> Mechanism:
        """As many times the shift."""
        return DiscreteLaplace(self.scale, self.sensitivity * distance)

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses (s - 2x) / scale, x = 0..s."""
        return self.sensitivity / self.scale, 2.0 / self.scale

    def enclosing_pair(self, inner: bool, fine: bool) -> finite.FinitePair:
        """Exact for a shift of at most 513; beyond, those between the two modes are put into cells."""
        return finite.discrete_laplace_pair(self.scale, self.sensitivity, fine, inner)

    def finite_pair_is_exact(self) -> bool:
        """Whether every outcome between the modes has its own place (a traced sensitivity: not known)."""
        known = not validate.is_traced(self.sensitivity)
        return known and bool(np.all(np.asarray(self.sensitivity) <= finite.LAPLACE_MIDDLE + 1))

    def log_middle(self, loss: Array) -> Array:
        """As of `Laplace`; the sensitivity is even."""
        return xp.minimum(loss, 0.0) + 0.5 * self.sensitivity / self.scale

    def max_loss(self) -> Number:
        """sensitivity / scale."""
        return self.sensitivity / self.scale


@record
class NoisyIteration(GaussianMechanism):
    """Last iterate of a contractive noisy iteration: x_j = Pi(psi_j(x_{j-1}) + N(0, noise_std_j^2 I)), j = 1..T.

    contraction: Lipschitz constant of psi_j for one of two neighbouring runs, >= 0.
    noise_std: standard deviation of the noise of step j, >= 0.
    shift: bound of |psi_j - psi'_j|, the difference of the two runs under the relation that you account for, >= 0. (A
        record that is removed from a fixed order moves all after it: every step from there on has a shift.)

    The last axis of each array is the steps; leading axes are a grid. A single number is that of every step.

    >>> runs = jaxdp.NoisyIteration(contraction=[0.9, 0.9, 0.9], noise_std=[1.0, 1.0, 1.0], shift=[0.1, 0.1, 0.1])
    >>> print(f"{jaxdp.epsilon(runs, delta=1e-6):.4f}")
    0.7119

    x_T is mu-Gaussian-DP at the optimal shift allocation,
    mu^2 = min sum a_j^2 / noise_std_j^2 over z_j = contraction_j z_{j-1} + shift_j - a_j >= 0, z_0 = z_T = 0.

    Assumes: only the last iterate is released; Pi a projection on a fixed convex set, after the noise; schedules public
    and fixed in advance; the same x_0. Proof: notebooks/proofs/heterogeneous_gdp_iteration.md.
    """

    contraction: ArrayField = field(NONNEGATIVE)
    noise_std: ArrayField = field(NONNEGATIVE)
    shift: ArrayField = field(NONNEGATIVE)
    event_ndim: ClassVar[dict[str, int]] = {"contraction": 1, "noise_std": 1, "shift": 1}
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one", "add_or_remove", "add", "remove")

    def __post_init__(self) -> None:
        lists_to_arrays(self)
        fields = {name: getattr(self, name) for name in self.event_ndim}
        steps = max(np.shape(value)[-1:] for value in fields.values())
        for name, value in fields.items():
            if steps and np.ndim(value) == 0 and isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)):
                object.__setattr__(self, name, (xp if validate.is_traced(value) else np).full(steps, value))

    @in_float64
    def gaussian_mu(self) -> Number:
        """sqrt of the optimal allocation's mu^2 (pool adjacent violators)."""
        steps = self.contraction, self.noise_std, self.shift
        # concrete numbers by the compiled loop: an eager one is compiled anew each time
        mu2 = (
            shift_allocation_mu2(*steps)
            if validate.is_traced(steps)
            else allocation(*(np.asarray(x)[None] for x in steps))[0]
        )
        positive = mu2 > 0
        return xp.where(positive, xp.sqrt(xp.where(positive, mu2, 1.0)), 0.0)

    def mu_excess(self, mu: Number) -> Number:
        """That of the allocation's mu^2, whose block variances are in units of the largest noise."""
        return allocation_excess(self.contraction, self.noise_std, self.shift, mu)

    def check_structure(self) -> None:
        """contraction, noise_std and shift have equal numbers of steps."""
        shapes = {name: np.shape(getattr(self, name)) for name in ("contraction", "noise_std", "shift")}
        lengths = {name: shape[-1] if shape else None for name, shape in shapes.items()}
        if not any(shapes.values()):
            raise ValueError(
                "contraction, noise_std or shift must be an array with one entry per step, got three numbers."
            )
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise ValueError(f"contraction, noise_std and shift must have the same number of steps, got {lengths}.")
