"""The cases of dp_accounting's tests of its PLD accountant, run with jaxdp's accountant.

Expected numbers and tolerances are those of dp_accounting 0.6.0's pld_privacy_accountant_test.py. The tables at the end
account for every case there: a test here or in test_interop.py, or a reason why the case does not apply.
"""

import importlib.util
import math
import pathlib
import re
import sys

import pytest

pytest.importorskip("dp_accounting")
import dp_accounting  # noqa: E402  (after the skip)
import test_interop  # noqa: E402
from dp_accounting import dp_event, privacy_accountant_test  # noqa: E402
from dp_accounting.pld import pld_privacy_accountant_test  # noqa: E402
from dp_accounting.privacy_accountant import UnsupportedEventError  # noqa: E402

from jaxdp import interop  # noqa: E402
from jaxdp.sources import contour  # noqa: E402

pytestmark = pytest.mark.comparison
R = interop.NeighboringRelation
ADD, REPLACE, SPECIAL = R.ADD_OR_REMOVE_ONE, R.REPLACE_ONE, R.REPLACE_SPECIAL
GAUSSIAN, LAPLACE = dp_event.GaussianDpEvent, dp_event.LaplaceDpEvent
DISCRETE_LAPLACE = dp_event.DiscreteLaplaceDpEvent
SAMPLED, COMPOSED = dp_event.PoissonSampledDpEvent, dp_event.ComposedDpEvent
MIXTURE = dp_event.MixtureOfGaussiansDpEvent
RESPONSE = dp_event.RandomizedResponseDpEvent(0.1, 3)


def by_relation(relation):
    return relation.name


def composed(*events, relation=ADD):
    """An accountant that has composed these (event, count) pairs."""
    accountant = interop.PrivacyAccountant(relation)
    for event, count in events:
        accountant.compose(event, count)
    return accountant


@pytest.mark.parametrize(
    ("event", "relation"),
    [(RESPONSE, ADD), (MIXTURE(1.0, [0.0, 1.0], [0.5, 0.5]), REPLACE)],
    ids=["randomized response", "mixture of Gaussians"],
)
def test_an_event_without_theorem_under_the_relation_is_refused_by_name(event, relation):
    with pytest.raises(UnsupportedEventError, match=type(event).__name__):
        composed((event, 1), relation=relation)


@pytest.mark.parametrize(("relation", "supported"), [(REPLACE, True), (SPECIAL, True), (ADD, False)], ids=str)
def test_randomized_response_alone_and_beside_a_sampled_gaussian(relation, supported):
    accountant = interop.PrivacyAccountant(relation)
    assert accountant.supports(RESPONSE) is supported
    assert accountant.supports(COMPOSED([SAMPLED(0.1, GAUSSIAN(1.0)), RESPONSE])) is supported


@pytest.mark.parametrize("relation", [REPLACE, SPECIAL], ids=by_relation)
def test_randomized_response_with_one_bucket_says_nothing(relation):
    accountant = composed((dp_event.RandomizedResponseDpEvent(0.0, 1), 1), relation=relation)
    assert accountant.get_delta(0) == 0
    assert accountant.get_epsilon(0) == 0


@pytest.mark.parametrize(
    ("relation", "noise", "buckets", "epsilon"),
    [(REPLACE, 4 / (3 + math.e), 4, 1.0), (SPECIAL, (4 - math.e) / 3, 4, 1.0), (SPECIAL, math.exp(-1), 2, 1.0)],
    ids=["replace", "special", "special, two buckets"],
)
def test_randomized_response_has_the_epsilon_of_its_odds(relation, noise, buckets, epsilon):
    accountant = composed((dp_event.RandomizedResponseDpEvent(noise, buckets), 1), relation=relation)
    assert accountant.get_delta(epsilon) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("relation", [ADD, REPLACE, SPECIAL], ids=by_relation)
@pytest.mark.parametrize(
    "event",
    [
        GAUSSIAN(1.0),
        dp_event.SelfComposedDpEvent(GAUSSIAN(1.0), 6),
        COMPOSED([GAUSSIAN(1.0), GAUSSIAN(2.0)]),
        SAMPLED(0.1, GAUSSIAN(1.0)),
        COMPOSED([SAMPLED(0.1, GAUSSIAN(1.0)), GAUSSIAN(2.0)]),
    ],
    ids=["plain", "repeated", "two", "sampled", "sampled and plain"],
)
def test_gaussian_events_are_supported_under_every_relation(event, relation):
    assert interop.PrivacyAccountant(relation).supports(event)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (GAUSSIAN(0), ADD),
        (LAPLACE(0), ADD),
        (DISCRETE_LAPLACE(0, 1), ADD),
        (SAMPLED(0.1, GAUSSIAN(0)), ADD),
        (SAMPLED(0.1, LAPLACE(0)), ADD),
        (MIXTURE(0, [1, 2], [0.5, 0.5]), ADD),
        (dp_event.RandomizedResponseDpEvent(0.0, 3), SPECIAL),
    ],
    ids=str,
)
def test_without_noise_nothing_is_private(event, relation):
    accountant = composed((event, 1), relation=relation)
    assert accountant.get_delta(1.0) == 1
    assert accountant.get_epsilon(0.01) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        *(SAMPLED(0, kind(noise)) for kind in (GAUSSIAN, LAPLACE) for noise in (1, 0)),
        MIXTURE(1, [0], [1.0]),
        MIXTURE(0, [0], [1.0]),
    ],
    ids=repr,
)
def test_a_record_that_is_never_used_costs_nothing(event):
    accountant = composed((event, 1))
    assert accountant.get_delta(0) == 0
    assert accountant.get_epsilon(0) == 0


SAMPLED_LAPLACE = SAMPLED(0.2, LAPLACE(0.5))
SAMPLED_GAUSSIAN = SAMPLED(0.2, GAUSSIAN(0.5))


@pytest.mark.parametrize(
    ("events", "epsilon", "delta", "delta_error", "epsilon_error"),
    [
        ([(GAUSSIAN(math.sqrt(3)), 1), (GAUSSIAN(math.sqrt(3)), 2)], 1.0, 0.126936, 1e-3, 1e-3),
        ([(SAMPLED_GAUSSIAN, 1), (SAMPLED_GAUSSIAN, 2)], 1.0, 0.15594, 1e-3, 1e-3),
        ([(dp_event.SelfComposedDpEvent(SAMPLED_GAUSSIAN, 3), 1)], 1.0, 0.15594, 1e-3, 1e-3),
        ([(LAPLACE(1), 3), (LAPLACE(2), 2)], 4.0, 1e-14, 1e-6, 1e-6),
        ([(SAMPLED_LAPLACE, 1), (SAMPLED_LAPLACE, 2)], 2.46964, 1e-14, 1e-6, 1e-3),
        ([(DISCRETE_LAPLACE(1, 1), 3), (DISCRETE_LAPLACE(0.5, 1), 2)], 4.0, 0, 1e-6, 1e-6),
    ],
    ids=[
        "Gaussian",
        "sampled Gaussian",
        "sampled Gaussian, self-composed",
        "Laplace",
        "sampled Laplace",
        "discrete Laplace",
    ],
)
def test_numbers_are_those_that_dp_accounting_expects(events, epsilon, delta, delta_error, epsilon_error, monkeypatch):
    monkeypatch.setattr(contour, "PLAIN_LADDER", contour.PLAIN_LADDER[:3])  # enough for a delta of 1e-14 within 1e-6
    accountant = composed(*events)
    assert accountant.get_delta(epsilon) == pytest.approx(delta, abs=delta_error)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, abs=epsilon_error)


# Case of that file: the test here. The name is unittest's; for a parameterised group, without its number or relation.
APPLIED = {
    "test_additive_noise_mechanisms_with_zero_noise_multiplier": test_without_noise_nothing_is_private,
    "test_composition_errors_for_neighboring_relation": (
        test_an_event_without_theorem_under_the_relation_is_refused_by_name
    ),
    "test_discrete_laplace_basic": test_numbers_are_those_that_dp_accounting_expects,
    "test_gaussian_basic": test_numbers_are_those_that_dp_accounting_expects,
    "test_laplace_basic": test_numbers_are_those_that_dp_accounting_expects,
    "test_non_positive_composition_value_error": test_interop.test_a_count_below_one_is_an_error,
    "test_poisson_subsampled_gaussian": test_numbers_are_those_that_dp_accounting_expects,
    "test_poisson_subsampled_laplace": test_numbers_are_those_that_dp_accounting_expects,
    "test_poisson_subsampling_with_zero_probability": test_a_record_that_is_never_used_costs_nothing,
    "test_randomized_response": test_randomized_response_has_the_epsilon_of_its_odds,
    "test_randomized_response_with_single_bucket": test_randomized_response_with_one_bucket_says_nothing,
    "test_randomized_response_with_zero_noise_parameter": test_without_noise_nothing_is_private,
    "test_self_composed_subsampled_gaussian": test_numbers_are_those_that_dp_accounting_expects,
    "test_supports_gaussian": test_gaussian_events_are_supported_under_every_relation,
    "test_supports_randomized_response": test_randomized_response_alone_and_beside_a_sampled_gaussian,
    "test_supports_subsampled_gaussian_and_rr_composition": (
        test_randomized_response_alone_and_beside_a_sampled_gaussian
    ),
}
_COARSER = "jaxdp's grid is coarser: its number is larger by some 1e-6 (relative), where the case asks for 6e-8"
_SMALLER = "jaxdp's bound of a truncated batch is smaller: 16.4566 where the case expects 17.9043"
# test_interop.py has these theorems' mechanisms
_OWN_THEOREM = "jaxdp has a theorem for the event under REPLACE_ONE, where dp_accounting has none"
NOT_APPLICABLE = {
    "test_composition_errors_for_neighboring_relation1": _OWN_THEOREM,
    "test_composition_errors_for_neighboring_relation2": _OWN_THEOREM,
    "test_composition_errors_for_neighboring_relation3": _OWN_THEOREM,
    "test_mixture_of_gaussians_basic": _COARSER,
    "test_poisson_subsampling_laplace_not_supported_for_replace_one": _OWN_THEOREM,
    "test_truncated_subsampled_gaussian_basic": _SMALLER,
}


def cases_of_the_file():
    """Names of the cases of dp_accounting's file, without those inherited, which test_interop.py runs."""
    return {
        name
        for name in vars(pld_privacy_accountant_test.PldPrivacyAccountantTest)
        if name.startswith("test") and not hasattr(privacy_accountant_test.PrivacyAccountantTest, name)
    }


def group(case):
    """The case's name without the number or the relation that parameterising appends."""
    return re.sub(r"(\d+|_(replace_one|replace_special|add_or_remove_one))$", "", case)


def test_every_case_of_the_file_is_applied_or_named_with_its_reason():
    cases = cases_of_the_file()
    applied = {case for case in cases if case not in NOT_APPLICABLE}
    assert len(cases) > 50
    assert {group(case) if case not in APPLIED else case for case in applied} == set(APPLIED)
    assert set(NOT_APPLICABLE) <= cases
    assert all(getattr(sys.modules[test.__module__], test.__name__) is test for test in APPLIED.values())


@pytest.mark.slow
def test_the_reasons_hold_where_jaxdp_has_other_numbers():
    mixtures = composed((MIXTURE(1.0, [0, 1, 2], [0.2, 0.6, 0.2]), 3), (MIXTURE(2.0, [0, 2, 3], [0.33, 0.34, 0.33]), 2))
    assert 1e-6 < mixtures.get_epsilon(1e-6) - 17.193115 < 1e-4
    truncated = dp_event.TruncatedSubsampledGaussianDpEvent
    batches = composed((truncated(4, 0.5, 2, 1.0), 3), (truncated(3, 0.5, 2, 1.0), 2))
    assert batches.get_epsilon(1e-6) == pytest.approx(16.4566, abs=1e-3)


@pytest.mark.parametrize(
    "make_event", [GAUSSIAN, lambda noise: SAMPLED(0.1, GAUSSIAN(noise))], ids=["plain", "sampled"]
)
def test_dp_accountings_calibration_finds_the_noise_with_our_accountant(make_event):
    noise = dp_accounting.calibrate_dp_mechanism(
        interop.PrivacyAccountant,
        lambda noise: dp_event.SelfComposedDpEvent(make_event(noise), 10),
        1.0,
        1e-6,
        dp_accounting.ExplicitBracketInterval(0.5, 50.0),
        tol=1e-6,
    )
    spent = [composed((make_event(value), 10)).get_epsilon(1e-6) for value in (noise, noise - 2e-6)]
    assert spent[0] <= 1.0 < spent[1]


def test_dp_accountings_calibration_finds_the_number_of_steps_with_our_accountant():
    event = SAMPLED(0.01, GAUSSIAN(1.0))
    steps = dp_accounting.calibrate_dp_mechanism(
        interop.PrivacyAccountant,
        lambda count: dp_event.SelfComposedDpEvent(event, count),
        1.0,
        1e-5,
        dp_accounting.ExplicitBracketInterval(1, 100_000),  # their default starts at 0 steps, which no ledger takes
        discrete=True,
    )
    assert isinstance(steps, int)
    assert composed((event, steps)).get_epsilon(1e-5) <= 1.0 < composed((event, steps + 2)).get_epsilon(1e-5)


def test_a_ledger_that_was_built_apart_gives_the_numbers_of_its_parts():
    """dp_accounting 0.6.0 calls the builder of ledgers DpEventBuilder."""
    builder = dp_accounting.DpEventBuilder()
    event = SAMPLED(0.1, GAUSSIAN(2.0))
    builder.compose(event, 3)
    builder.compose(event, 2)
    builder.compose(LAPLACE(4.0))
    apart = composed((builder.build(), 1))
    direct = composed((event, 5), (LAPLACE(4.0), 1))
    assert apart.ledger == builder.build()
    assert apart.get_epsilon(1e-6) == direct.get_epsilon(1e-6)


def test_jax_privacys_training_accountant_works_with_our_accountant():
    """jax_privacy's configuration object makes the accountant: a class of three lines."""
    accounting = pytest.importorskip("jax_privacy.accounting", reason="jax_privacy is not installed (extra bench)")

    class Certified(accounting.DpAccountantConfig):
        def create_accountant(self):
            return interop.PrivacyAccountant()

    def training(noise):
        return accounting.DpParams(noise_multipliers=noise, num_samples=1000, delta=1e-5, batch_size=10)

    ours, theirs = map(accounting.DpsgdTrainingAccountant, (Certified(), accounting.PldAccountantConfig()))
    spent = ours.compute_epsilon(100, training(1.0))
    assert spent == composed((SAMPLED(0.01, GAUSSIAN(1.0)), 100)).get_epsilon(1e-5)
    assert 0.99 * spent < theirs.compute_epsilon(100, training(1.0)) < 1.01 * spent
    noise = accounting.calibrate_noise_multiplier(
        target_epsilon=1.0,
        accountant=ours,
        batch_sizes=10,
        num_updates=100,
        num_samples=1000,
        target_delta=1e-5,
        tol=1e-4,
    )
    assert ours.compute_epsilon(100, training(noise)) == pytest.approx(1.0, abs=1e-3)


def benchmark():
    """The module benchmarks/peers.py."""
    path = pathlib.Path(__file__).parent.parent / "benchmarks" / "peers.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quick_comparison_prints_bounds_numbers_of_the_peers_and_who_fails(capsys):
    benchmark().main(["--quick"])
    printed = capsys.readouterr().out
    rows = {
        line.split(" | ")[0][2:]: line.strip("| ").split(" | ")[1:] for line in printed.splitlines() if " | " in line
    }
    lower, upper, pld, rdp = (float(text.split(";")[0]) for text in rows["Gaussian 1"][1:5])
    assert lower <= upper <= pld * (1 + 1e-6) <= rdp
    assert "ZCDpEvent has no dominating pair" in rows["zCDP 0.01"][2]
    assert rows["shuffled, 1e5 people, local epsilon 1"][-1] == "no event"
    assert "1 of 1 answered" in printed and "2 of 3 answered" in printed


def test_an_accountant_that_takes_too_long_or_fails_is_named():
    module = benchmark()

    def endless():
        while True:
            sum(range(1000))

    assert module.cell(endless, limit=0.1).value == "TimeoutError: 0.1 CPU s passed"
    assert module.cell(lambda: 1 / 0).value == "ZeroDivisionError: division by zero"
