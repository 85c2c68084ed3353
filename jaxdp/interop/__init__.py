"""Translation of dp_accounting's DpEvents to jaxdp mechanisms, and a PrivacyAccountant with dp_accounting's interface.

Needs the extra `interop` (``pip install 'jaxdp-accounting[interop]'``). In jaxdp and dp_accounting's PLD accountant, a
noise multiplier is noise / (norm bound of ONE record's contribution): under REPLACE_ONE two data sets differ by twice
that bound. In dp_accounting's RDP accountant it is noise / (sensitivity under the relation): under REPLACE_ONE that
accountant reports smaller numbers for Gaussian, Laplace and SampledWithoutReplacement events.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

import jaxdp
from jaxdp import validate
from jaxdp.domains import NONNEGATIVE, PROBABILITY, Domain, whole
from jaxdp.interop.gaussian_mixtures import LARGEST_SHIFT, MOST_SHIFTS, GaussianMixtures
from jaxdp.mechanisms.base import Mechanism, UnsupportedMechanismError
from jaxdp.mechanisms.composition import as_gaussian, flatten
from jaxdp.mechanisms.truncated import truncated_poisson
from jaxdp.numerics.rounding import ULP
from jaxdp.typing import Relation

try:
    from dp_accounting import dp_event, privacy_accountant
    from dp_accounting.privacy_accountant import NeighboringRelation as NeighboringRelation
except ImportError as error:
    raise ImportError(
        "jaxdp.interop needs dp_accounting, the extra `interop`: pip install 'jaxdp-accounting[interop]'."
    ) from error

__all__ = ["PrivacyAccountant", "from_dp_event", "relation_name"]

_RELATIONS: dict[Any, Relation] = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add_or_remove",
    NeighboringRelation.REPLACE_ONE: "replace_one",
    # the special record contributes nothing: the outputs with it are those without the record
    NeighboringRelation.REPLACE_SPECIAL: "add_or_remove",
}

_SUM_TOLERANCE = 1e-9  # largest accepted difference of a sum of probabilities from 1


class _UnsupportedEvent(UnsupportedMechanismError):
    """No translation is known for ``event``, which may be nested in the event that the caller gave."""

    def __init__(self, event: Any, message: str):
        super().__init__(message)
        self.event = event


def from_dp_event(
    event: dp_event.DpEvent, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> Mechanism:
    """The jaxdp mechanism of a dp_accounting DpEvent: with the event's dominating pair, or a pair that dominates it.

    neighboring_relation: the relation that you will account for. Account for the result with
    ``relation=relation_name(neighboring_relation)``. Supported events, and how their parameters are read:

    * NoOp, NonPrivate, Composed, SelfComposed.
    * Gaussian. Laplace and DiscreteLaplace, also of vectors of bounded L1 norm: the scalar pair dominates
      (notebooks/proofs/vector_laplace.md). DiscreteGaussian with dimension=1 only. EpsilonDelta, whose guarantee must
      hold under neighboring_relation. (The last two if the release of dp_accounting has them.)
    * PoissonSampled and SampledWithoutReplacement of Gaussian events, or of a single Laplace or DiscreteLaplace event.
      Sampling without replacement has the safe rate sample_size / source_dataset_size; a sample of all records is
      accepted under REPLACE_ONE only.
    * RandomizedResponse under REPLACE_ONE; also under REPLACE_SPECIAL, where the report of the special record is
      uniform over the buckets, as dp_accounting's PLD accountant reads it.
    * MixtureOfGaussians, not under REPLACE_ONE. With one positive sensitivity it is the sampled Gaussian. With more
      there are upper bounds only, for at most 32 sensitivities, each at most 40 standard deviations.
    * TruncatedSubsampledGaussian, where dataset_size is the size of the larger of the two data sets; upper bounds only.
      Under REPLACE_SPECIAL only if batches are never cut.
    * SingleEpochTreeAggregation under REPLACE_SPECIAL.

    Raises:
        TypeError: event is not a DpEvent. ValueError: a parameter outside its range.
        UnsupportedMechanismError: no theorem is known, or jaxdp has no dominating pair for the event (for zCDP, for
            example: a Renyi bound alone is not a pair).

    >>> import jaxdp
    >>> from jaxdp import interop
    >>> import dp_accounting
    >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    >>> run = interop.from_dp_event(dp_accounting.SelfComposedDpEvent(step, 1000))
    >>> f"{jaxdp.epsilon(run, 1e-5):.4f}"
    '1.8282'
    """
    if not isinstance(event, dp_event.DpEvent):
        raise TypeError(f"event must be a dp_accounting DpEvent, got {type(event).__name__}.")
    relation_name(neighboring_relation)
    kind, translate = type(event).__name__, _TRANSLATIONS.get(type(event))
    if translate is None:
        raise _UnsupportedEvent(event, f"{kind} has no dominating pair in jaxdp.")
    if (kind, neighboring_relation) in _WITHOUT_THEOREM:
        raise _UnsupportedEvent(event, f"{kind} has no theorem under {neighboring_relation.name}.")
    mechanism = translate(event, neighboring_relation)
    try:
        mechanism.validate()
        mechanism.directions(relation_name(neighboring_relation))
    except UnsupportedMechanismError as error:
        raise _UnsupportedEvent(event, str(error)) from error
    return mechanism


def relation_name(neighboring_relation: NeighboringRelation) -> Relation:
    """The jaxdp relation of a dp_accounting NeighboringRelation; ValueError for anything else.

    >>> from jaxdp import interop
    >>> interop.relation_name(interop.NeighboringRelation.ADD_OR_REMOVE_ONE)
    'add_or_remove'
    """
    return _RELATIONS[validate.choice("neighboring_relation", neighboring_relation, tuple(_RELATIONS))]


class PrivacyAccountant(privacy_accountant.PrivacyAccountant):
    """An accountant with dp_accounting's interface and jaxdp's certified bounds.

    It has the methods of dp_accounting's accountants: compose, get_epsilon, get_delta, supports, ledger. The numbers
    are never below the true values, and every event counts as often as it was composed (dp_accounting 0.6.0's PLD
    accountant counts a repeated RandomizedResponseDpEvent once).

    >>> from jaxdp import interop
    >>> import dp_accounting
    >>> accountant = interop.PrivacyAccountant().compose(dp_accounting.GaussianDpEvent(2.0), 4)
    >>> f"{accountant.get_epsilon(1e-5):.4f}"
    '4.3772'
    """

    def __init__(self, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE):
        self._relation = relation_name(neighboring_relation)
        super().__init__(neighboring_relation)
        self._parts: list[Mechanism] = []

    @property
    def mechanism(self) -> Mechanism:
        """Everything composed so far, as one jaxdp mechanism."""
        return jaxdp.compose(*self._parts)

    def get_epsilon(self, target_delta: float) -> float:
        """Certified upper bound of epsilon at target_delta in [0, 1]; inf if no finite bound is known.

        By dp_accounting's convention it is inf, even at delta = 1, once an event without any privacy was composed.
        """
        if any(_reveals_everything(atom) and times > 0 for atom, times in flatten(self.mechanism)):
            return math.inf
        return float(jaxdp.epsilon(self.mechanism, target_delta, relation=self._relation))

    def get_delta(self, target_epsilon: float) -> float:
        """Certified upper bound of delta at target_epsilon; 1 if no better bound is known."""
        # adding 0 turns the -0.0 of an empty composition into 0.0
        return float(jaxdp.delta(self.mechanism, target_epsilon, relation=self._relation)) + 0.0

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        validate.integer("count", count, 0)
        try:
            mechanism = from_dp_event(event, self.neighboring_relation)
        except _UnsupportedEvent as error:
            return self.CompositionErrorDetails(invalid_event=error.event, error_message=str(error))
        if do_compose and count > 0:
            self._parts.append(jaxdp.repeat(mechanism, count))
        return None


_NOTHING, _EVERYTHING = jaxdp.compose(), jaxdp.ApproximateDP(0.0, 1.0)


def _reveals_everything(mechanism: Mechanism) -> bool:
    return isinstance(mechanism, jaxdp.ApproximateDP) and bool(mechanism.delta == 1)


def _numbers(event: Any, **domains: Domain) -> list[float]:
    """The named parameters of an event as floats; ValueError for one outside its domain."""
    return [validate.one(name, getattr(event, name), domain) for name, domain in domains.items()]


def _noise(record: Callable[[float], Mechanism], event: Any, relation: Any) -> Mechanism:
    (noise,) = _numbers(event, noise_multiplier=NONNEGATIVE)
    return record(noise) if noise > 0 else _EVERYTHING


def _discrete_laplace(event: Any, relation: Any) -> Mechanism:
    rate, shift = _numbers(event, noise_parameter=NONNEGATIVE, sensitivity=whole(0))
    # noise_parameter is the decay rate of the noise; 0 means no privacy, as in dp_accounting
    if rate == 0:
        return _EVERYTHING
    scale = 1 / rate
    if math.isfinite(scale) and Fraction(scale) * Fraction(rate) > 1:
        scale = math.nextafter(scale, 0.0)
    return jaxdp.DiscreteLaplace(scale, shift) if shift > 0 else _NOTHING


def _discrete_gaussian(event: Any, relation: Any) -> Mechanism:
    if event.dimension != 1:
        message = f"needs dimension=1, got {event.dimension}: the pair of jaxdp is that of a single number."
        raise _UnsupportedEvent(event, f"DiscreteGaussianDpEvent {message}")
    sigma, shift = _numbers(event, sigma=NONNEGATIVE, sensitivity=whole(0))
    if shift == 0:
        return _NOTHING
    return jaxdp.DiscreteGaussian(sigma, shift) if sigma > 0 else _EVERYTHING


def _randomized_response(event: Any, relation: Any) -> Mechanism:
    """The true value has probability 1 - p + p/k, each other value p/k: e^eps = 1 + k (1 - p)/p."""
    p, k = _numbers(event, noise_parameter=PROBABILITY, num_buckets=whole(1))
    if k == 1 or p == 1:
        return _NOTHING
    if p == 0:
        return _EVERYTHING
    if relation is not NeighboringRelation.REPLACE_SPECIAL:
        # increased by more than the rounding errors of the quotient and the logarithm
        return jaxdp.RandomizedResponse(math.log1p(k * (1 - p) / p) * (1 + 1e-15), k)
    # The pair of this law and the uniform law, on the outcomes "own value" and "any other". The two probabilities of
    # "any other" are rounded away from each other to multiples of 2^-53, so that 1 minus each is exact. A pair with a
    # larger difference of the two dominates in both orders.
    steps, share = 2**53, Fraction(int(k) - 1, int(k))
    other, uniform = math.floor(Fraction(p) * share * steps) / steps, math.ceil(share * steps) / steps
    return jaxdp.DiscretePair([1 - other, other], [1 - uniform, uniform])


def _one_query(event: Any, base: Mechanism) -> Mechanism:
    """All queries on one batch as one mechanism; several Gaussians become one, whose mu^2 is the sum of their mu^2."""
    atoms = [(atom, float(times)) for atom, times in flatten(base) if float(times) > 0]
    if any(_reveals_everything(atom) for atom, _ in atoms):
        return _EVERYTHING
    single = atoms[0][0] if len(atoms) == 1 and atoms[0][1] == 1 else None
    if isinstance(single, (jaxdp.Laplace, jaxdp.DiscreteLaplace)):
        return single
    if not all(isinstance(atom, jaxdp.Gaussian) for atom, _ in atoms):
        message = "must contain Gaussian events or a single Laplace or DiscreteLaplace event, got "
        message += f"{type(event.event).__name__}."
        raise _UnsupportedEvent(event, f"{type(event).__name__} {message}")
    if not atoms:
        return _NOTHING
    return single or jaxdp.Gaussian(as_gaussian(base).noise_multiplier * (1 - 1e-15))  # type: ignore[attr-defined]


def _sampled(event: Any, base: Mechanism, probability: float, record: Callable[..., Mechanism]) -> Mechanism:
    batch_query = _one_query(event, base)
    if probability == 0 or not flatten(batch_query):
        return _NOTHING
    if _reveals_everything(batch_query):
        # the batch is revealed: by dp_accounting's convention the event is not private, whatever the probability
        return batch_query
    return record(batch_query, probability)


def _poisson(event: Any, relation: Any) -> Mechanism:
    (probability,) = _numbers(event, sampling_probability=PROBABILITY)
    return _sampled(event, from_dp_event(event.event, relation), probability, jaxdp.PoissonSampled)


def _without_replacement(event: Any, relation: Any) -> Mechanism:
    size, batch = _numbers(event, source_dataset_size=whole(1), sample_size=whole(0))
    if batch >= size and relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise _UnsupportedEvent(
            event,
            f"SampledWithoutReplacementDpEvent must have sample_size < source_dataset_size = {size:.0f} under "
            f"ADD_OR_REMOVE_ONE, got {batch:.0f}: it does not say whether an added record enlarges the sample. If it "
            "does, give the inner event alone.",
        )
    return _sampled(event, from_dp_event(event.event, relation), min(1.0, batch / size), jaxdp.FixedSizeSampled)


def _mixture(event: Any, relation: Any) -> Mechanism:
    """A mixture of Gaussians that dominates: sensitivities are rounded up, probabilities move to larger ones."""
    (deviation,) = _numbers(event, standard_deviation=NONNEGATIVE)
    sizes = np.atleast_1d(validate.nonnegative("sensitivities", event.sensitivities))
    chances = np.atleast_1d(validate.probability("sampling_probs", event.sampling_probs))
    if sizes.shape != chances.shape or sizes.ndim != 1 or not abs(math.fsum(chances) - 1) <= _SUM_TOLERANCE:
        raise ValueError(
            f"sampling_probs must be as many as sensitivities and sum to 1 (to {_SUM_TOLERANCE}), "
            f"got {chances.tolist()} for {sizes.tolist()}."
        )
    order = np.argsort(sizes[chances > 0])
    sizes, chances = sizes[chances > 0][order], _normalised(chances[chances > 0][order])
    if sizes[-1] == 0:
        return _NOTHING
    if deviation == 0:
        return _EVERYTHING
    shifts = np.nextafter(sizes / deviation, np.inf) * (sizes > 0)
    if np.all((sizes == 0) | (sizes == sizes[-1])):
        rate = min(math.nextafter(math.fsum(chances[sizes > 0]), 2.0), 1.0)
        return jaxdp.PoissonSampled(jaxdp.Gaussian(math.nextafter(deviation / sizes[-1], 0.0)), rate)
    if shifts[-1] > LARGEST_SHIFT or shifts.size > MOST_SHIFTS:
        raise _UnsupportedEvent(
            event,
            f"MixtureOfGaussiansDpEvent is supported with at most {MOST_SHIFTS} sensitivities of at most "
            f"{LARGEST_SHIFT:.0f} standard deviations, got {shifts.size} of at most {shifts[-1]:.4g}.",
        )
    return GaussianMixtures(shifts, chances)


def _normalised(chances: np.ndarray) -> np.ndarray:
    """The probabilities, changed so that their sum is 1: mass moves to larger shifts, which come last.

    The sums of the last probabilities are rounded up. A deficit goes to the last one, a surplus is cut from the first.
    """
    deficit = max(1 - math.fsum(chances), 0.0)
    tails = np.minimum((np.cumsum(chances[::-1]) + deficit)[::-1] * (1 + 4 * chances.size * ULP), 1.0)
    return -np.diff([1.0, *tails[1:], 0.0])


def _truncated(event: Any, relation: Any) -> Mechanism:
    size, batch = map(int, _numbers(event, dataset_size=whole(0), truncated_batch_size=whole(0)))
    rate, noise = _numbers(event, sampling_probability=PROBABILITY, noise_multiplier=NONNEGATIVE)
    if 0 in (size, rate, batch):
        return _NOTHING
    if noise == 0:
        return _EVERYTHING
    if batch < size and relation is NeighboringRelation.REPLACE_SPECIAL:
        raise _UnsupportedEvent(
            event,
            f"{type(event).__name__} must have truncated_batch_size >= dataset_size = {size} under REPLACE_SPECIAL, "
            f"got {batch}: no theorem is known there for batches that are cut.",
        )
    return truncated_poisson(noise, rate, size - 1, batch)


def _tree(event: Any, relation: Any) -> Mechanism:
    """A record is in one leaf, so in at most ``depth`` nodes of the tree. Each node is released with Gaussian noise."""
    if relation is not NeighboringRelation.REPLACE_SPECIAL:
        raise _UnsupportedEvent(event, f"SingleEpochTreeAggregationDpEvent needs REPLACE_SPECIAL, got {relation.name}.")
    depth = int(np.max(validate.integer("step_counts", event.step_counts, 0), initial=0)).bit_length()
    return jaxdp.repeat(_noise(jaxdp.Gaussian, event, relation), depth) if depth > 0 else _NOTHING


_WITHOUT_THEOREM = {
    ("RandomizedResponseDpEvent", NeighboringRelation.ADD_OR_REMOVE_ONE),
    ("SampledWithoutReplacementDpEvent", NeighboringRelation.REPLACE_SPECIAL),
    ("MixtureOfGaussiansDpEvent", NeighboringRelation.REPLACE_ONE),
}
_BY_NAME: dict[str, Callable[[Any, Any], Mechanism]] = {
    "NoOpDpEvent": lambda event, relation: _NOTHING,
    "NonPrivateDpEvent": lambda event, relation: _EVERYTHING,
    "GaussianDpEvent": functools.partial(_noise, jaxdp.Gaussian),
    "LaplaceDpEvent": functools.partial(_noise, jaxdp.Laplace),
    "DiscreteLaplaceDpEvent": _discrete_laplace,
    "DiscreteGaussianDpEvent": _discrete_gaussian,
    "EpsilonDeltaDpEvent": lambda event, relation: jaxdp.ApproximateDP(event.epsilon, event.delta),
    "RandomizedResponseDpEvent": _randomized_response,
    "SelfComposedDpEvent": lambda event, relation: jaxdp.repeat(
        from_dp_event(event.event, relation), *_numbers(event, count=whole(0))
    ),
    "ComposedDpEvent": lambda event, relation: jaxdp.compose(*(from_dp_event(e, relation) for e in event.events)),
    "PoissonSampledDpEvent": _poisson,
    "SampledWithoutReplacementDpEvent": _without_replacement,
    "MixtureOfGaussiansDpEvent": _mixture,
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "SingleEpochTreeAggregationDpEvent": _tree,
}
# Older releases of dp_accounting lack some of these events.
_TRANSLATIONS = {getattr(dp_event, name): each for name, each in _BY_NAME.items() if hasattr(dp_event, name)}
