"""Poisson batches cut to a static size. Proofs: notebooks/proofs/truncated_sampling.md."""

from typing import Any, ClassVar

import numpy as np

from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, POSITIVE, PROBABILITY, RATE, SMALLEST, field
from jaxdp.mechanisms import finite
from jaxdp.mechanisms.base import FiniteLaw, Mechanism, record
from jaxdp.mechanisms.basic import Gaussian
from jaxdp.mechanisms.sampled import Antipodal, PoissonSampled
from jaxdp.numerics.rounding import ULP
from jaxdp.numerics.special import log_complement
from jaxdp.runtime.arrays import xp
from jaxdp.typing import Number, Real, RealField

_LARGEST_BATCH = 1e9  # largest expected number of records for which the probabilities are summed
_BEYOND = 1e-100  # upper bound of the probability that the sum in `batch_chances` leaves out


@record
class TruncatedPoisson(FiniteLaw):
    """Gaussian noise on a Poisson batch; of a batch that is too large only a uniformly drawn part is kept.

    noise_multiplier: the noise divided by the norm bound of one record's contribution.
    sampling_probability: before the cut.
    full, partial: the probability s that the other records fill the batch, and 1 - s.
    joins: the probability j that one more record is in a batch that the others fill.
    error: bound of the relative error of s and of 1 - s.

    The cut batch is dominated by a mechanism that is PoissonSampled(Gaussian(noise_multiplier), sampling_probability)
    with probability 1 - s and PoissonSampled(Gaussian(noise_multiplier / 2), joins) with probability s, and which of
    the two is public. There are upper bounds only: from the finite laws of both, and from the Poisson batch composed
    with a (0, s j)-DP mechanism, which dominates the cut batch, too.

    Assumes: what `PoissonSampled` of `Gaussian` assumes of the noise and of the batch before the cut. Of a batch that
    is too large a uniformly drawn part is kept. Data sets have at most as many records as full and joins stand for.
    """

    noise_multiplier: RealField = field(POSITIVE)
    sampling_probability: RealField = field(RATE)
    partial: RealField = field(PROBABILITY)
    full: RealField = field(PROBABILITY)
    joins: RealField = field(PROBABILITY)
    error: RealField = field(NONNEGATIVE, default=0.0)
    exact: ClassVar[bool] = False

    def uncut(self) -> Mechanism:
        """The mechanism on the Poisson batch before the cut."""
        return PoissonSampled(Gaussian(self.noise_multiplier), self.sampling_probability)

    def replace_directions(self) -> tuple[str, ...]:
        """The symmetric pair."""
        return ("replace",)

    def cut(self) -> Number:
        """Upper bound of s j, the delta that the cut costs."""
        return xp.minimum(self.full * self.joins * (1 + 2 * self.error + 4 * ULP) + SMALLEST, 1.0)

    def log_tail(self, order: Number, direction: str) -> Number:
        """The sum of the bounds of both kinds of batches, weighted by their probabilities."""
        tails = [step.log_tail(order, direction) + finite.log_mass(share) for step, share, _ in self._kinds(direction)]
        return xp.logaddexp(*tails) + 2 * self.error + 1e-12

    def _kinds(self, direction: str) -> list[tuple[Any, Number, Number]]:
        """(step, its probability, probability of the other kind) for batches that are not full, then for full ones."""
        kind = Antipodal if direction == "replace" else PoissonSampled
        sigma = self.noise_multiplier * (0.5 if direction == "replace" else 1.0)  # Antipodal takes noise at distance 2
        not_full, full = kind(Gaussian(sigma), self.sampling_probability), kind(Gaussian(0.5 * sigma), self.joins)
        return [(not_full, self.partial, self.full), (full, self.full, self.partial)]

    def part(self, direction: str) -> finite.Part:
        """The finite laws of both kinds of batches as one law, weighted by their probabilities."""
        parts, error = [], xp.asarray(self.error)
        for step, share, other_share in self._kinds(direction):
            loss, log_weight, blur, infinity, reverse = step.part(direction)
            log_share = xp.maximum(log_complement(other_share, share), -1e4)
            up = share * (1 + 2 * error + 8 * ULP)
            blur = blur + 2 * error - 4 * ULP * log_share
            parts.append(finite.Part(loss, log_weight + log_share, blur, infinity * up, reverse * up))
        not_full, full = parts
        loss, log_weight, blur = (xp.concatenate(each) for each in zip(not_full[:3], full[:3], strict=True))
        masses = not_full.infinity + full.infinity, not_full.reverse_infinity + full.reverse_infinity
        return finite.Part(loss, log_weight, blur, *masses)


def truncated_poisson(
    noise_multiplier: Real, rate: float, others: int, largest: int, fewer: bool = False
) -> TruncatedPoisson | PoissonSampled:
    """The step with ``others`` other records and batches cut to ``largest``. fewer: there may be fewer others, too."""
    if largest > others:
        return PoissonSampled(Gaussian(noise_multiplier), rate)
    partial, full, joins, error = batch_chances(others, rate, largest)
    if not fewer:
        return TruncatedPoisson(noise_multiplier, rate, partial, full, min(joins * (1 + 3 * error), rate), error)
    full = min(full * (1 + error), 1.0)  # s grows with the number of others; j need not, so its bound `rate` is used
    return TruncatedPoisson(noise_multiplier, rate, 1 - full, full, rate)


def batch_chances(others: int, rate: float, largest: int) -> tuple[float, float, float, float]:
    """(1 - s, s, j, their relative error): s = P[S >= largest], j = E[rate largest / (S + 1) | S >= largest].

    S ~ Binomial(others, rate), 1 <= largest <= others. The masses follow a recurrence from the mode outward, until less
    than 1e-170 is left (Bernstein's inequality). Above 1e9 expected records s = 1 and j = rate, which dominate.
    """
    if rate in (0.0, 1.0):
        return 1 - rate, rate, rate * largest / (others + 1), ULP
    if others * rate > _LARGEST_BATCH:
        return 0.0, 1.0, rate, 0.0
    mode = min(int((others + 1) * rate), others)
    reach = int(40 * np.sqrt(others * rate * (1 - rate))) + 1000
    up = np.arange(mode, min(others, mode + reach), dtype=np.float64)
    down = np.arange(mode, max(0, mode - reach), -1, dtype=np.float64)
    odds = rate / (1 - rate)
    above = np.cumprod((others - up) / (up + 1) * odds)
    below = np.cumprod(down / (others - down + 1) / odds)
    mass = np.concatenate([below[::-1], [1.0], above])
    mass /= mass.sum()
    count = mode - below.size + np.arange(mass.size)
    full = count >= largest
    chance = mass[full].sum()
    joined = np.sum(mass[full] * (rate * largest / (count[full] + 1)))
    error = 16 * ULP * (mass.size + 16)
    joins = float(joined / chance) if chance > 0 else rate
    return float(mass[~full].sum()), float(min(chance + _BEYOND, 1.0)), joins, error


def binomial_tail(num_trials: int, probability: float, least: int) -> float:
    """Upper bound of P[Binomial(num_trials, probability) >= least], least >= 1: the sum of `batch_chances`, rounded up.

    At most a relative 5e-9 above a tail of 1e-90 or more, 1e-100 above a smaller one; 1 beyond 1e9 expected successes.
    """
    if least > num_trials:
        return 0.0
    _, tail, _, error = batch_chances(num_trials, probability, least)
    return min(tail * (1 + error), 1.0)


def truncation_delta(num_examples: int, sampling_probability: float, truncated_batch_size: int) -> float:
    """q P[Binomial(n, q) >= B], rounded up: the probability that an example is sampled and n others fill the batch.

    Cutting the Poisson sample to B examples adds at most this to the delta of one step. Here n = num_examples,
    q = sampling_probability and B = truncated_batch_size. It covers data sets of at most n records and their neighbours
    under add, remove and replace_one. It is a rough measure; `DPSGD` accounts for the cut more closely.
    Accuracy: as for `binomial_tail`. Proof: notebooks/proofs/truncated_sampling.md, section 2.

    >>> from jaxdp import training
    >>> f"{training.truncation_delta(10_000, 0.01, 160):.1e}"
    '1.7e-10'
    """
    n = validate.count("num_examples", num_examples, 1)
    rate = validate.one("sampling_probability", sampling_probability, RATE)
    tail = binomial_tail(n, rate, validate.count("truncated_batch_size", truncated_batch_size, 1))
    return min(max(rate * tail * (1 + 4 * ULP), SMALLEST), 1.0) if tail else 0.0
