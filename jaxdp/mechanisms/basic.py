"""The mechanisms without sampling and shuffling, each a record with its K(z)."""

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

    noise_multiplier: sigma, the standard deviation of the noise divided by the L2 norm bound of one record's
        contribution, > 0, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.Gaussian(noise_multiplier=1.0), delta=1e-5):.4f}")
    4.3772

    Assumes: the norm bound holds for every possible record, by clipping or by the query itself. The noise has the same
    standard deviation in every coordinate, is drawn anew for every release, and is as good as exact Gaussian noise.

    The dominating pair is N(1/sigma, 1) against N(0, 1). Under replace_one two data sets differ by up to twice the norm
    bound, and the pair is N(2/sigma, 1) against N(0, 1).
    """

    noise_multiplier: RealField = field(NOISE)

    def gaussian_mu(self) -> Number:
        """mu = 1 / noise_multiplier."""
        return 1.0 / self.noise_multiplier

    def at_distance(self, distance: Number) -> GaussianMechanism:
        """The mechanism with noise smaller by the factor ``distance``."""
        return Gaussian(self.noise_multiplier / distance)

    def log_middle(self, loss: Array) -> Array:
        """loss / 2 + mu^2 / 8."""
        return 0.5 * loss + self.gaussian_mu() ** 2 / 8


@record
class Laplace(Mechanism):
    """Laplace noise on a query with one real answer.

    noise_multiplier: b, the noise scale divided by the L1 norm bound of one record's contribution, > 0, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.repeat(jaxdp.Laplace(10.0), 100), delta=1e-5):.4f}")
    4.2203

    Assumes: the norm bound holds for every possible record, by clipping or by the query itself. The noise is drawn anew
    for every release and is as good as exact Laplace noise; the last digits of floating-point Laplace noise can reveal
    which of two data sets was used (Mironov 2012).

    Under replace_one two data sets differ by up to twice the norm bound, which costs as much as half the noise scale.
    K(z) = log[ e^{z/b} (z+1)/(2z+1) + e^{-(z+1)/b} z/(2z+1) ] (Zhu, Dong, Wang 2022, Lemma 33).
    """

    noise_multiplier: RealField = field(POSITIVE)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """log(e^{-1/(2b)} [cosh y + sinh(y)/(2by)]), y = (z + 1/2)/b: no 0/0 at z = -1/2. Factors e^y out."""
        b = self.noise_multiplier
        z = xp.where(xp.real(z) < -0.5, -1 - z, z)  # the formula is even in y: take the y with real part >= 0
        y = (z + 0.5) / b
        # e^{-y}[cosh y + sinh(y)/(2by)], with a series for (1 - e^{-2y})/(2y) at small y, where the difference cancels
        small = xp.abs(y) < 1e-2
        safe = xp.where(small, 1.0, y)
        series = 1 + y * (-1 + y * (2 / 3 + y * (-1 / 3 + y * (2 / 15 + y * (-2 / 45 + y * (4 / 315 - y / 315))))))
        ratio = xp.where(small, series, (1 - xp.exp(-2 * safe)) / (2 * safe))
        # y - 1/(2b), without the cancellation
        return z / b + xp.log((1 + xp.exp(-2 * y)) / 2 + ratio / (2 * b))

    def at_distance(self, distance: Number) -> Mechanism:
        """The mechanism with noise smaller by the factor ``distance``."""
        return Laplace(self.noise_multiplier / distance)

    def enclosing_pair(self, inner: bool, fine: bool) -> finite.FinitePair:
        """A pair made by cutting the outcomes into cells."""
        return finite.laplace_pair(self.noise_multiplier, fine, inner)

    def log_middle(self, loss: Array) -> Array:
        """min(loss, 0) + 1 / (2 noise_multiplier)."""
        return xp.minimum(loss, 0.0) + 0.5 / self.noise_multiplier

    def renyi_divergence(self, order: Number) -> Number:
        """The closed form of Mironov 2017, Corollary 2, with a series for small shifts."""
        return laplace_renyi(order, 1.0 / self.noise_multiplier)

    def max_loss(self) -> Number:
        """1 / noise_multiplier."""
        return 1.0 / self.noise_multiplier


@record
class RandomizedResponse(NamedSetRandomizer):
    """k-ary randomized response: the truth with probability e^epsilon / (e^epsilon + k - 1), else a random other value.

    epsilon: the local guarantee in nats, >= 0, any shape.
    num_categories: k, a whole number >= 2, any shape.

    >>> survey = jaxdp.RandomizedResponse(4.0, num_categories=10)
    >>> print(f"{jaxdp.epsilon(jaxdp.Shuffled(survey, num_users=100_000), delta=1e-6):.4f}")
    0.1099

    epsilon is the guarantee for replacing one person's value (replace_one, the natural relation). Under the other
    relations the same pair is used.

    Assumes: under add, remove and add_or_remove, a report is sent in place of an absent person's, drawn as for some
    fixed category. If nothing is sent, the number of reports tells, and there is no such guarantee. When shuffled, also
    what `Shuffled` assumes.
    """

    epsilon: RealField = field(NONNEGATIVE)
    num_categories: RealField = field(whole(2), default=2)
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one", "add_or_remove", "add", "remove")

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses: +-epsilon for two categories, {epsilon, 0, -epsilon} for more."""
        two = xp.asarray(self.num_categories) <= 2
        return xp.where(two, self.epsilon, 0.0), xp.where(two, 2.0, 1.0) * self.epsilon

    def finite_pair(self) -> finite.FinitePair:
        """Three outcomes: the person's value, the value that replaces it, any third value."""
        return finite.randomized_response_pair(self.epsilon, self.num_categories)

    def renyi_divergence(self, order: Number) -> Number:
        """log[1 + e^{(a-1) eps} (1 - e^{-a eps})(1 - e^{-(a-1) eps})/(1 + (k-1) e^-eps)]/(a - 1), a = order."""
        eps, excess = xp.asarray(self.epsilon), xp.asarray(order) - 1
        logs = [xp.log(xp.maximum(-xp.expm1(-x), SMALLEST)) for x in (order * eps, excess * eps)]
        s = excess * eps + logs[0] + logs[1] - xp.log1p((xp.asarray(self.num_categories) - 1.0) * xp.exp(-eps))
        small = xp.exp(xp.minimum(s, 0.0) - xp.log(excess))
        return xp.where(eps > 0, xp.maximum(xp.where(s < -40, small, xp.softplus(s) / excess), SMALLEST), 0.0)

    def named_sets(self) -> NamedSets:
        """A report names the one input that it states."""
        k = xp.asarray(self.num_categories) + 0.0 * xp.asarray(self.epsilon)
        one, zero = 1 / k, xp.zeros_like(k)
        others = xp.maximum(k - 2, 0.0)
        met = xp.where(others > 0, 1 / xp.maximum(others, 1.0), 0.0)
        third = xp.stack([xp.stack([1, 1, xp.where(others > 0, (others - 1) * met, 1.0), 1]), xp.stack([0, 0, met, 0])])
        return NamedSets(xp.asarray(self.epsilon), xp.stack([one, one, others / k, zero]), third, one, zero)


class WorstCase(Mechanism):
    """Base class of stated guarantees, with binary randomized response as the worst case: losses +-epsilon."""

    epsilon: RealField
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """K(z) = log[ (e^{eps (z+1)} + e^{-eps z}) / (1 + e^eps) ]."""
        return RandomizedResponse(self.epsilon, 2).log_mgf(z)

    def finite_pair(self) -> finite.FinitePair:
        """The pair of binary randomized response."""
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

    epsilon: the guarantee in nats, >= 0, any shape; used for whichever relation you account for.

    >>> print(f"{jaxdp.epsilon(jaxdp.repeat(jaxdp.PureDP(0.1), 100), delta=1e-6):.4f}")
    4.7746

    Assumes: the guarantee holds under the relation that you account for, in every run, whatever was released before.
    Inside `FixedSizeSampled` it must hold under replace_one. Inside `PoissonSampled` under replace_one it must hold for
    adding and removing a record as well.
    """

    epsilon: RealField = field(NONNEGATIVE)

    def renyi_divergence(self, order: Number) -> Number:
        """The Renyi divergence of binary randomized response."""
        return RandomizedResponse(self.epsilon, 2).renyi_divergence(order)


@record
class ApproximateDP(WorstCase):
    """Any (eps, delta)-DP mechanism, by its worst case (Kairouz, Oh, Viswanath 2015).

    epsilon: in nats, >= 0, any shape.
    delta: in [0, 1], any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.repeat(jaxdp.ApproximateDP(0.1, 1e-9), 100), delta=1e-6):.4f}")
    4.7877

    Assumes: the guarantee holds under the relation that you account for, in every run, whatever was released before.
    Inside `FixedSizeSampled` it must hold under replace_one. Inside `PoissonSampled` under replace_one it must hold for
    adding and removing a record as well.

    Both numbers are used for whichever relation you account for. The worst case has mass delta at infinity, and the
    worst eps-DP pair scaled by 1 - delta.
    """

    epsilon: RealField = field(NONNEGATIVE)
    delta: RealField = field(PROBABILITY)

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """log(1 - delta) + K of `PureDP`."""
        return super().log_mgf(z) + log_complement(xp.asarray(self.delta), 1.0 - self.delta)

    def finite_pair(self) -> finite.FinitePair:
        """The pair of `PureDP` scaled by 1 - delta, with mass delta at infinity on either side."""
        return finite.scaled(super().finite_pair(), self.delta)

    def infinity_mass(self) -> Number:
        """The record's delta."""
        return self.delta


@record
class DiscretePair(FiniteLaw):
    """A mechanism given by two distributions over finitely many outcomes.

    p: probabilities of the outcomes with the record, outcomes on the last axis.
    q: probabilities of the same outcomes without the record.

    >>> pair = jaxdp.DiscretePair(p=[0.7, 0.2, 0.1], q=[0.2, 0.2, 0.6])
    >>> print(f"{jaxdp.delta(pair, epsilon=1.0):.4f}")
    0.3282

    (p, q) is the pair for "remove" and (q, p) the pair for "add"; "replace_one" takes the larger of the two. For
    several releases under replace_one this is not enough: a value may change from a to b in one release and from b to a
    in another. Several releases, and `FixedSizeSampled`, need a pair with the same profile in both orders: for every
    outcome of masses (a, b) an outcome of masses (b, a), equal to the last digit. `conversions.pair_from_profile` makes
    such pairs. For bins of symmetric noise, whose edges mirror each other, take q = p[::-1].

    Assumes: the pair dominates your mechanism under the relation that you account for, whatever the other records are.
    Inside `FixedSizeSampled` it must dominate under replace_one. Inside `PoissonSampled` under replace_one it must
    dominate for adding and removing a record as well.

    An outcome with p > 0 and q = 0 has an infinite loss. The masses of each law must sum to 1 within 1e-9 and are used
    as given. The mass by which the sum falls short of 1 is charged as mass at infinity, unless it is at most
    1e-15 min(n, 8 + log2 n) for n outcomes, which counts as rounding.
    """

    p: ArrayField = field(NONNEGATIVE)
    q: ArrayField = field(NONNEGATIVE)
    event_ndim: ClassVar[dict[str, int]] = {"p": 1, "q": 1}

    def finite_pair(self) -> finite.FinitePair:
        """The outcomes as given; the mass by which p or q falls short of 1 is put at infinity."""
        p, q = xp.asarray(self.p, xp.float64), xp.asarray(self.q, xp.float64)
        pair = finite.with_leftover(finite.masses_pair(p, q), _missing_mass(p), _missing_mass(q))
        return pair._replace(only_p=_mass_at_infinity(self.p, self.q), only_q=_mass_at_infinity(self.q, self.p))

    def part(self, direction: str) -> finite.Part:
        """The law of the loss of the pair, or of its swap."""
        return sampled_laws.sampled_part(self.finite_pair(), xp.ones(()), direction)

    def check_structure(self) -> None:
        """p and q must have a last axis of the same length."""
        p, q = np.shape(self.p), np.shape(self.q)
        if not p or not q or p[-1] != q[-1]:
            raise ValueError(f"p and q must have the same number of outcomes on the last axis, got shapes {p}, {q}.")

    def same_in_both_orders(self) -> bool:
        """Whether, for every a and b, as many outcomes have masses (a, b) as (b, a); False for traced masses."""
        if validate.is_traced(self.p, self.q):
            return False
        p, q = np.broadcast_arrays(np.asarray(self.p, np.float64), np.asarray(self.q, np.float64))
        return np.array_equal(np.sort(p + 1j * q), np.sort(q + 1j * p))  # sorts by real, then by imaginary part

    def derived(self) -> dict[str, tuple[Number, Domain]]:
        """The masses of p and the masses of q must each sum to 1."""
        return {f"the sum of {name}": (mass.sum(-1), _ONE) for name, mass in (("p", self.p), ("q", self.q))}


_ONE = Domain(lambda total: abs(total - 1) <= 1e-9, "1 (to 1e-9)", remedy="Normalise it.")


def _missing_mass(p: Any) -> Any:
    size, total = p.shape[-1], p
    while total.size > 1:  # add the second half of the array to the first: log2(size) roundings in all
        half = (total.size + 1) // 2
        total = total[:half] + xp.pad(total[half:], (0, 2 * half - total.size))
    missing = xp.maximum(1.0 - total[0], 0.0)
    return xp.where(missing > 1e-15 * min(size, 8 + math.log2(size)), missing, 0.0)


def _mass_at_infinity(p: Any, q: Any) -> Any:
    """Sum of p where q = 0, plus the mass by which p falls short of 1."""
    alone, missing = xp.where(q > 0, 0.0, p), _missing_mass(p)
    # a single mass is exact, a sum is rounded up
    several = xp.sum(alone > 0) + (missing > 0) > 1
    up = xp.where(several | (missing > 0), 1 + (p.shape[-1] + 4) * ULP, 1.0)
    return xp.minimum(1.0, (xp.sum(alone) + missing) * up)


@record
class DiscreteLaplace(Mechanism):
    """Discrete Laplace (geometric) noise on the integers, P(x) proportional to exp(-|x|/scale).

    scale: > 0, any shape.
    sensitivity: s, bound of the absolute value of one record's contribution, a whole number >= 1, any shape.

    >>> print(f"{jaxdp.epsilon(jaxdp.DiscreteLaplace(scale=2.0), delta=1e-5):.4f}")
    0.5000

    Assumes: the answer is a whole number, and the sensitivity holds for every possible record. The noise is drawn anew
    for every release, exactly from this law on the integers.

    Under replace_one two data sets differ by up to twice the sensitivity.
    """

    scale: RealField = field(POSITIVE)
    sensitivity: RealField = field(whole(1), default=1)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        """[e^{zas} + e^{-as(z+1)} + (1 - e^{-a}) sum_{x=1..s-1} e^{-ax} e^{za(s-2x)}] / (1 + e^{-a}), a = 1/scale."""
        a, s = 1.0 / self.scale, self.sensitivity
        z = xp.where(xp.real(z) >= -0.5, z, -1 - z)  # K(z) = K(-1 - z)
        # The sum is e^{zas} (y - y^s)/(1 - y) with y = e^{-a(1+2z)}. With the larger of the first two terms factored
        # out it is a geometric sum with |y| = |e^w| <= 1; near w = 0, where it is 0/0, its Taylor series is used.
        larger, smaller, w = z * a * s, -a * s * (z + 1), -a * (1 + 2 * z)
        near = xp.abs(w) * s < 1e-6
        safe = xp.where(near, 1.0, w)
        quotient = xp.exp(safe) * xp.expm1(safe * (s - 1)) / xp.expm1(safe)
        series = (s - 1) * (1 + w * s / 2 + w * w * s * (2 * s - 1) / 12)
        middle = xp.where(near, series, quotient)
        total = 1 + xp.exp(smaller - larger) - xp.expm1(-a) * middle
        return larger + xp.log(total) - xp.log1p(xp.exp(-a))

    def at_distance(self, distance: Number) -> Mechanism:
        """The same noise with the sensitivity multiplied by ``distance``."""
        return DiscreteLaplace(self.scale, self.sensitivity * distance)

    def lattice(self) -> tuple[Number, Number]:
        """(offset, spacing) of the losses (s - 2x) / scale, x = 0..s."""
        return self.sensitivity / self.scale, 2.0 / self.scale

    def enclosing_pair(self, inner: bool, fine: bool) -> finite.FinitePair:
        """Exact up to sensitivity 513; above it the outcomes between the modes of the two laws are grouped in cells."""
        return finite.discrete_laplace_pair(self.scale, self.sensitivity, fine, inner)

    def finite_pair_is_exact(self) -> bool:
        """Whether no outcomes are grouped in cells; False for a traced sensitivity."""
        known = not validate.is_traced(self.sensitivity)
        return known and bool(np.all(np.asarray(self.sensitivity) <= finite.LAPLACE_MIDDLE + 1))

    def log_middle(self, loss: Array) -> Array:
        """min(loss, 0) + sensitivity / (2 scale), for an even sensitivity, as it is at distance 2."""
        return xp.minimum(loss, 0.0) + 0.5 * self.sensitivity / self.scale

    def max_loss(self) -> Number:
        """sensitivity / scale."""
        return self.sensitivity / self.scale


@record
class NoisyIteration(GaussianMechanism):
    """Last iterate of a contractive noisy iteration: x_j = Pi(psi_j(x_{j-1}) + N(0, noise_std_j^2 I)), j = 1..T.

    contraction: Lipschitz constant of psi_j in one of the two neighbouring runs, >= 0.
    noise_std: standard deviation of the noise of step j, >= 0.
    shift: bound of |psi_j - psi'_j|, psi' the maps of the other run under the relation that you account for, >= 0. (If
        a record is removed from a fixed order, all later records move up: every step from there on has a shift.)

    The last axis of each array counts the steps; leading axes are a batch. A single number applies to every step.

    >>> runs = jaxdp.NoisyIteration(contraction=[0.9, 0.9, 0.9], noise_std=[1.0, 1.0, 1.0], shift=[0.1, 0.1, 0.1])
    >>> print(f"{jaxdp.epsilon(runs, delta=1e-6):.4f}")
    0.7119

    x_T is mu-Gaussian-DP (proof: notebooks/proofs/heterogeneous_gdp_iteration.md), where the optimal allocation a gives
    mu^2 = min sum_j a_j^2 / noise_std_j^2 over z_j = contraction_j z_{j-1} + shift_j - a_j >= 0, z_0 = z_T = 0.

    Assumes: only the last iterate is released. Pi projects onto a fixed convex set, after the noise is added. The
    schedules are public and fixed in advance. Both runs start at the same x_0.
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
        """The root of the optimal allocation's mu^2, computed by pooling adjacent violators."""
        steps = self.contraction, self.noise_std, self.shift
        # Concrete numbers use the kernel, which is compiled once; an eager loop would be compiled anew at each call.
        mu2 = (
            shift_allocation_mu2(*steps)
            if validate.is_traced(steps)
            else allocation(*(np.asarray(x)[None] for x in steps))[0]
        )
        positive = mu2 > 0
        return xp.where(positive, xp.sqrt(xp.where(positive, mu2, 1.0)), 0.0)

    def mu_excess(self, mu: Number) -> Number:
        """Bound of the relative excess of the square root of the computed mu^2, see `allocation_excess`."""
        return allocation_excess(self.contraction, self.noise_std, self.shift, mu)

    def check_structure(self) -> None:
        """contraction, noise_std and shift must have the same number of steps."""
        shapes = {name: np.shape(getattr(self, name)) for name in ("contraction", "noise_std", "shift")}
        lengths = {name: shape[-1] if shape else None for name, shape in shapes.items()}
        if not any(shapes.values()):
            raise ValueError(
                "contraction, noise_std or shift must be an array with one entry per step, got three single numbers."
            )
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise ValueError(f"contraction, noise_std and shift must have the same number of steps, got {lengths}.")
