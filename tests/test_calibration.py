"""Calibration: the value meets the target, as closely as rounding allows, for any monotone function."""

import functools

import jax
import mpmath
import numpy as np
import pytest
from exact import gaussian_delta_in_digits
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused_in_one_line

import jaxdp
from jaxdp import accounting, calibration
from jaxdp.calibration import calibrate
from jaxdp.mechanisms.base import record
from jaxdp.sources import contour as sources_contour

# The search ends at most 2e-10 (relative) from a value that fails; the certificate of the Gaussian kernel is finer.
NEAR = 2e-10
SIGMA_FOR_EPS_1_DELTA_1E6 = 4.2246788893  # root of `exact.gaussian_delta_in_digits`


@mpmath.workdps(50)
def test_the_noise_multiplier_is_the_exact_one_and_not_below_it():
    sigma = calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(0.1, 100.0))
    assert isinstance(sigma, np.float64)
    assert sigma == pytest.approx(SIGMA_FOR_EPS_1_DELTA_1E6, rel=1e-10)
    at, below = (gaussian_delta_in_digits(1, 1 / mpmath.mpf(noise)) for noise in (sigma, sigma * (1 - NEAR)))
    assert at <= 1e-6 < below


@pytest.mark.slow
@given(epsilon=st.floats(1e-3, 50.0), log_delta=st.floats(-30, -2))
def test_the_value_meets_the_target_and_its_neighbour_does_not(epsilon, log_delta):
    delta = 10.0**log_delta
    sigma = calibrate(jaxdp.Gaussian, epsilon=epsilon, delta=delta, bracket=(1e-2, 1e6))
    assert jaxdp.epsilon(jaxdp.Gaussian(sigma), delta) <= epsilon
    assert jaxdp.epsilon(jaxdp.Gaussian(sigma * (1 - NEAR)), delta) > epsilon


@record
class OnlyBoth(jaxdp.DiscretePair):
    """A pair whose theorem is stated for adding and removing together."""

    relations = ("add_or_remove",)


def test_a_mechanism_need_not_accept_add_and_remove_apart():
    even = np.array([0.5, 0.5])

    def leaning(x):
        return OnlyBoth(np.stack([x, 1 - np.asarray(x)], axis=-1), even)

    largest = calibrate(leaning, epsilon=1.0, delta=0.01, bracket=(0.5, 0.95))
    assert largest == pytest.approx(1 - 0.49 / np.e, rel=1e-9)  # add decides: (1/2 - delta)/(1 - x) = e^epsilon
    assert jaxdp.epsilon(leaning(largest), 0.01) <= 1.0
    apart = jaxdp.tradeoff(jaxdp.DiscretePair([0.7, 0.3], even), 0.1)
    assert 0.9 * apart < jaxdp.tradeoff(leaning(0.7), 0.1) <= apart * (1 + 1e-12)


def test_each_of_several_values_may_have_another_pair_that_decides():
    one, other = np.array([0.9, 0.1]), np.array([0.6, 0.4])

    def noisy(sigma):
        return jaxdp.compose(jaxdp.Gaussian(sigma), jaxdp.DiscretePair(np.stack([one, other]), np.stack([other, one])))

    sigma = calibrate(noisy, epsilon=5.0, delta=1e-3, bracket=(0.2, 1000.0))
    found = [jaxdp.epsilon(noisy(sigma), 1e-3, relation=relation) for relation in ("remove", "add")]
    assert np.all(np.diff(found, axis=0) * [1, -1] > 0.5)  # add decides in the first, remove in the second
    assert np.all(np.max(found, axis=0) <= 5.0)
    assert np.all(jaxdp.epsilon(noisy(sigma * (1 - NEAR)), 1e-3) > 5.0)


def test_an_increasing_parameter_is_met_from_below():
    mu = calibrate(lambda mu: jaxdp.Gaussian(1 / mu), epsilon=1.0, delta=1e-6, bracket=(1e-3, 10.0))
    assert 1 / mu == pytest.approx(SIGMA_FOR_EPS_1_DELTA_1E6, rel=1e-10)
    assert jaxdp.epsilon(jaxdp.Gaussian(1 / mu), 1e-6) <= 1.0


@pytest.mark.parametrize("bracket", [(1, 10**9), (1.0, 1e9)])
def test_a_number_of_steps_is_whole_and_the_largest_allowed(bracket):
    def steps(count):
        return jaxdp.repeat(jaxdp.Gaussian(100.0), count)

    count = calibrate(steps, epsilon=1.0, delta=1e-6, bracket=bracket)
    assert count == np.floor(count)
    assert jaxdp.epsilon(steps(count), 1e-6) <= 1.0 < jaxdp.epsilon(steps(count + 1), 1e-6)


def test_whole_bracket_ends_do_not_make_a_real_parameter_whole():
    sigma = calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(1, 100))
    assert sigma == pytest.approx(SIGMA_FOR_EPS_1_DELTA_1E6, rel=1e-10)


def test_targets_brackets_and_mechanisms_broadcast():
    targets, deltas = np.array([0.5, 1.0, 2.0]), np.array([[1e-5], [1e-8]])
    together = calibrate(jaxdp.Gaussian, epsilon=targets, delta=deltas, bracket=(0.1, [100.0, 200.0, 300.0]))
    assert together.shape == (2, 3) and together.dtype == np.float64
    alone = calibrate(jaxdp.Gaussian, epsilon=2.0, delta=1e-8, bracket=(0.1, 300.0))
    assert together[1, 2] == pytest.approx(alone, rel=NEAR)
    fixed = jaxdp.Gaussian(np.array([10.0, 20.0]))
    inner = calibrate(lambda s: jaxdp.compose(fixed, jaxdp.Gaussian(s)), epsilon=1.0, delta=1e-6, bracket=(0.1, 100.0))
    # exact: composed Gaussians have 1/s^2 + 1/fixed^2 = 1/sigma^2
    expected = (SIGMA_FOR_EPS_1_DELTA_1E6**-2 - np.array([10.0, 20.0]) ** -2) ** -0.5
    np.testing.assert_allclose(inner, expected, rtol=1e-9)


def test_a_function_of_single_numbers_is_called_number_by_number():
    kinds = set()

    def after(steps):
        for _ in range(steps):
            break
        kinds.add(type(steps))
        return jaxdp.Gaussian(10.0 / steps**0.5)

    steps = calibrate(after, epsilon=1.0, delta=1e-6, bracket=(1, 50))
    assert steps == 5  # the largest whole number up to (10 / sigma)^2 = 5.603
    assert kinds == {int}


def test_few_values_are_tested(monkeypatch):
    tested = []
    real = calibration.Problem.evaluate
    monkeypatch.setattr(calibration.Problem, "evaluate", lambda self, v: (tested.extend(v.flat), real(self, v))[1])
    calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(0.1, 100.0))
    assert len(tested) <= 17


def test_an_epsilon_far_from_the_target_is_not_sought_to_the_last_digit(monkeypatch):
    efforts = []
    real = sources_contour._Contour.__call__
    monkeypatch.setattr(
        sources_contour._Contour, "__call__", lambda self, *a: (efforts.append(self.effort), real(self, *a))[1]
    )
    make = lambda s: jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(s), 0.01), 1000)  # noqa: E731
    sigma = calibrate(make, epsilon=2.0, delta=1e-6, bracket=(0.1, 100.0))
    assert jaxdp.epsilon(make(sigma), 1e-6) == pytest.approx(2.0, rel=1e-8)
    assert not any(effort.bands for effort in efforts)
    near = accounting.epsilon_near(make(0.1), 1e-6, 2.0)  # epsilon_bounds gives 1297.69875
    assert 1297.6988 <= near <= 1.25 * 1297.6988


def test_a_theorem_that_is_better_at_an_end_alone_leaves_the_values_inside_monotone():
    make = lambda q: jaxdp.repeat(jaxdp.FixedSizeSampled(jaxdp.Gaussian(5.0), q), 10)  # noqa: E731
    assert jaxdp.epsilon(make(1.0), 1e-6) < jaxdp.epsilon(make(0.9), 1e-6)
    q = calibrate(make, epsilon=3.0, delta=1e-6, bracket=(0.1, 1.0))
    assert jaxdp.epsilon(make(q), 1e-6) <= 3.0 < jaxdp.epsilon(make(q * (1 + 1e-9)), 1e-6)
    assert calibrate(make, epsilon=50.0, delta=1e-6, bracket=(0.1, 1.0)) == np.nextafter(1.0, 0.0)


def test_a_target_out_of_reach_says_what_each_end_gives():
    with pytest.raises(ValueError, match=r"epsilon must be reachable.*low end 0.1 it is 96.7.*high end 0.2 it is 35.5"):
        calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(0.1, 0.2))
    with pytest.raises(ValueError, match="reachable"):
        calibrate(jaxdp.Gaussian, epsilon=[5.0, 1.0], delta=1e-6, bracket=(0.1, 2.0))


def test_an_element_out_of_reach_is_named_by_its_index_and_target():
    targets = np.array([[50.0, 40.0, 30.0], [20.0, 1.0, 10.0]])
    with pytest.raises(ValueError, match=r"epsilon must be reachable in the bracket, got 1 for element \[1, 1\]:"):
        calibrate(jaxdp.Gaussian, epsilon=targets, delta=1e-6, bracket=(0.1, 2.0))
    with pytest.raises(ValueError, match=r"unreachable must be one of 'raise', 'nan', got 'skip'"):
        calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(0.1, 2.0), unreachable="skip")


@pytest.mark.parametrize("make", [jaxdp.Gaussian, lambda s: jaxdp.PoissonSampled(jaxdp.Gaussian(s), 0.9)])
@pytest.mark.thorough
def test_unreachable_nan_lets_the_other_elements_through(make):
    targets = np.array([[50.0, 40.0], [0.5, 10.0]])
    found = calibrate(make, epsilon=targets, delta=1e-6, bracket=(0.1, 2.0), unreachable="nan")
    np.testing.assert_array_equal(np.isnan(found), [[False, False], [True, False]])
    reached = targets != 0.5
    alone = calibrate(make, epsilon=targets[reached], delta=1e-6, bracket=(0.1, 2.0))
    np.testing.assert_allclose(found[reached], alone, rtol=NEAR)
    assert np.all(jaxdp.epsilon(make(found[reached]), 1e-6) <= targets[reached])
    assert np.isnan(calibrate(make, epsilon=0.5, delta=1e-6, bracket=(0.1, 2.0), unreachable="nan"))


@pytest.mark.parametrize("target", [1e-3, 0.2, 1.0, 40.0, 1e5])
def test_without_a_bracket_a_positive_number_is_found_whichever_way_epsilon_goes(target):
    sigma = calibrate(jaxdp.Gaussian, epsilon=target, delta=1e-6)
    met, missed = jaxdp.epsilon(jaxdp.Gaussian(np.array([sigma, sigma * (1 - NEAR)])), 1e-6)
    assert met <= target < missed
    mu = calibrate(lambda mu: jaxdp.Gaussian(1 / mu), epsilon=target, delta=1e-6)
    assert mu == pytest.approx(1 / sigma, rel=2 * NEAR) and jaxdp.epsilon(jaxdp.Gaussian(1 / mu), 1e-6) <= target


def test_without_a_bracket_whole_numbers_are_tried_from_1_on():
    def steps(count):
        return jaxdp.repeat(jaxdp.Gaussian(100.0), count)

    count = calibrate(steps, epsilon=[1.0, 0.2], delta=1e-6)
    assert np.all(count == np.floor(count))
    assert np.all(jaxdp.epsilon(steps(count), 1e-6) <= [1.0, 0.2])
    assert np.all(jaxdp.epsilon(steps(count + 1), 1e-6) > [1.0, 0.2])
    with pytest.raises(ValueError, match=r"epsilon must lie between .* got 0.001 for element \[1\]: at 1 it is 0.03"):
        calibrate(steps, epsilon=[1.0, 1e-3], delta=1e-6)
    found = calibrate(steps, epsilon=[1.0, 1e-3], delta=1e-6, unreachable="nan")
    np.testing.assert_array_equal(found, [count[0], np.nan])


def test_without_a_bracket_a_plateau_around_1_is_left_both_ways():
    # epsilon is 5 between 1e-3 and 1e3, larger below and smaller above
    plateau = lambda s: jaxdp.PureDP(5.0 * np.where((s > 1e-3) & (s < 1e3), 1.0, 1.0 / np.sqrt(s)))  # noqa: E731
    assert calibrate(plateau, epsilon=0.05, delta=0.0) == pytest.approx(1e4, rel=1e-9)
    assert calibrate(plateau, epsilon=500.0, delta=0.0) == pytest.approx(1e-4, rel=1e-9)


def test_without_a_bracket_a_probability_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"must be given, because .* num_categories must be .* got 1"):
        jaxdp.calibrate(lambda k: jaxdp.RandomizedResponse(1.0, k), epsilon=0.5, delta=1e-6)
    with pytest.raises(
        ValueError, match=r"bracket .low, high. must be given, because .* sampling_probability must be .*, got [24]"
    ):
        calibrate(lambda p: jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), p), epsilon=0.1, delta=1e-6)
    # p / 10 is accepted at p = 1 and 4, and refused at 16, where the search has to go
    with pytest.raises(
        ValueError, match=r"meets the target.* give a bracket\. .* refused the next value: sampling_prob.*, got 1\.6"
    ):
        calibrate(lambda p: jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), p / 10), epsilon=30.0, delta=1e-6)


def test_without_a_bracket_nothing_to_find_ends_with_an_error_after_few_calls():
    flat = lambda s: jaxdp.PureDP(np.ones_like(s))  # noqa: E731
    with pytest.raises(ValueError, match="make no difference.*give a bracket"):
        calibrate(flat, epsilon=0.5, delta=0.0)
    turning = lambda s: jaxdp.PureDP(1.0 + np.abs(np.log(s) - 1.0))  # noqa: E731
    with pytest.raises(ValueError, match="give a bracket|monotone"):
        calibrate(turning, epsilon=0.5, delta=0.0)
    assert np.isnan(calibrate(flat, epsilon=0.5, delta=0.0, unreachable="nan"))


@pytest.mark.parametrize(("delta", "advice"), [(0.0, "Take a larger delta"), (1e-6, "Widen the bracket")])
def test_the_advice_is_one_that_can_help(delta, advice):
    with pytest.raises(ValueError, match=advice):
        calibrate(jaxdp.Gaussian, epsilon=0.4, delta=delta, bracket=(1.0, 2.0))


def test_where_one_step_is_too_much_the_advice_is_a_larger_target():
    steps = functools.partial(jaxdp.repeat, jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01))
    with pytest.raises(ValueError, match="Take a larger epsilon or delta, change another parameter"):
        calibrate(steps, epsilon=0.01, delta=1e-6)


@pytest.mark.slow
def test_epsilon_zero_of_sampled_noise_is_where_delta_at_zero_is_the_target():
    """A search for epsilon ends next to 0, not at 0: calibrating by it gives half as much noise again."""
    steps = lambda s: jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(s), 0.01), 1000)  # noqa: E731
    noise = calibrate(steps, epsilon=0.0, delta=1e-5)
    lower, upper = jaxdp.delta_bounds(steps(np.array([noise, 0.99999 * noise])), 0.0)
    assert upper[0] <= 1e-5 < lower[1]


def test_a_bracket_that_is_safe_throughout_gives_its_end_nearest_the_target():
    assert calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(10.0, 20.0)) == 10.0
    assert calibrate(lambda n: jaxdp.repeat(jaxdp.Gaussian(1e3), n), epsilon=1.0, delta=1e-6, bracket=(1, 9)) == 9.0


def test_epsilon_zero_and_infinity_are_targets_like_others():
    far = calibrate(jaxdp.Gaussian, epsilon=0.0, delta=1e-3, bracket=(1.0, 1e6))
    assert jaxdp.epsilon(jaxdp.Gaussian(far), 1e-3) == 0.0
    assert jaxdp.epsilon(jaxdp.Gaussian(far * (1 - 1e-6)), 1e-3) > 0.0
    assert calibrate(jaxdp.Gaussian, epsilon=np.inf, delta=1e-6, bracket=(1.0, 2.0)) == 1.0


def test_a_function_that_turns_round_is_refused():
    with pytest.raises(ValueError, match="monotone"):
        calibrate(lambda s: jaxdp.Gaussian(np.abs(s - 3) + 1), epsilon=1.5, delta=1e-6, bracket=(0.0, 12.0))


def test_an_accountant_that_wobbles_still_gives_a_tested_value(monkeypatch):
    real = accounting.epsilon

    def wobbling(mechanism, delta, target=None, relation=None, direction=None):
        exact = real(mechanism, delta, relation=relation)
        return exact * (1 + 1e-6 * np.sin(1e9 * np.asarray(exact)) ** 2)

    monkeypatch.setattr(accounting, "epsilon", wobbling)
    monkeypatch.setattr(accounting, "epsilon_near", wobbling)
    sigma = calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(0.1, 100.0))
    assert wobbling(jaxdp.Gaussian(sigma), 1e-6) <= 1.0
    assert sigma == pytest.approx(SIGMA_FOR_EPS_1_DELTA_1E6, rel=1e-5)


def test_a_value_that_fails_when_evaluated_alone_is_moved_to_the_safe_side(monkeypatch):
    real = accounting.epsilon

    def rounding_by_batch_size(mechanism, delta, **more):
        exact = real(mechanism, delta, **more)
        return exact * (1 + 1e-14) if np.ndim(exact) == 0 else exact

    monkeypatch.setattr(accounting, "epsilon", rounding_by_batch_size)
    sigma = calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(0.1, 100.0))
    assert rounding_by_batch_size(jaxdp.Gaussian(sigma), 1e-6) <= 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bracket": (2.0, 1.0)}, "low < high"),
        ({"bracket": (1.0, np.inf)}, "bracket must be finite, got inf"),
        ({"bracket": ([1.0, 2.0], [3.0, np.nan])}, "bracket must be finite, got nan"),
        ({"bracket": (-np.inf, 1.0)}, "bracket must be finite, got -inf"),
        ({"bracket": 3.0}, "pair"),
        ({"bracket": (-1.0, 5.0)}, "noise_multiplier must be finite and > 0"),
        ({"epsilon": -1.0}, "epsilon must be >= 0"),
        ({"epsilon": np.nan}, "epsilon must be >= 0"),
        ({"delta": 2.0}, "delta must be in"),
        ({"relation": "cousins"}, "relation must be one of"),
    ],
)
def test_bad_input_is_one_line(change, message):
    with refused_in_one_line(ValueError, message):
        calibrate(jaxdp.Gaussian, **({"epsilon": 1.0, "delta": 1e-6, "bracket": (0.1, 100.0)} | change))


def test_what_is_not_a_mechanism_is_a_type_error():
    with pytest.raises(TypeError, match="must be a jaxdp mechanism"):
        calibrate(lambda s: s, epsilon=1.0, delta=1e-6, bracket=(0.1, 1.0))


def test_under_a_trace_it_says_where_to_call_it():
    with pytest.raises(RuntimeError, match="outside jit"):
        jax.jit(lambda e: calibrate(jaxdp.Gaussian, epsilon=e, delta=1e-6, bracket=(0.1, 1.0)))(1.0)
    with pytest.raises(RuntimeError, match="outside jit"):
        jax.jit(lambda t: calibrate(lambda s: jaxdp.repeat(jaxdp.Gaussian(s), t), epsilon=1.0, delta=1e-6))(3.0)


def test_an_empty_batch_has_no_answers():
    assert calibrate(jaxdp.Gaussian, epsilon=np.zeros(0), delta=1e-6, bracket=(0.1, 10.0)).shape == (0,)
    assert calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-6, bracket=(np.zeros(0), 10.0)).shape == (0,)


def test_ends_of_a_bracket_of_whole_numbers_may_be_fractions():
    count = calibrate(lambda n: jaxdp.repeat(jaxdp.Gaussian(10.0), n), epsilon=1.0, delta=1e-6, bracket=(0.3, 10.7))
    assert count == 5
    with mpmath.workdps(50):
        at, beyond = (gaussian_delta_in_digits(1, mpmath.sqrt(steps) / 10) for steps in (5, 6))
    assert at <= 1e-6 < beyond


@pytest.mark.parametrize(
    "make, epsilon, bracket, expected",
    [
        (jaxdp.PureDP, 0.0, (0.0, 1.0), 0.0),
        (jaxdp.PureDP, 0.5, (1e-300, 1e300), 0.5),
        (lambda x: jaxdp.PureDP(np.where(np.asarray(x) > 3e-299, 1.0, 2.0)), 1.5, (1e-300, 1e300), 3e-299),
    ],
)
def test_brackets_around_zero_and_over_all_magnitudes_are_closed(make, epsilon, bracket, expected, monkeypatch):
    calls = []
    evaluate = calibration.Problem.evaluate
    monkeypatch.setattr(calibration.Problem, "evaluate", lambda *a: (calls.append(1), evaluate(*a))[1])
    value = calibrate(make, epsilon=epsilon, delta=0.0, bracket=bracket)
    assert value == pytest.approx(expected, rel=NEAR, abs=1e-15 if expected == 0 else 0)
    assert len(calls) < 80


def noisy_sgd(sigma):
    return jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), 0.01), 1000)


def test_a_smooth_function_is_searched_in_few_calls(monkeypatch):
    calls = []
    evaluate = calibration.Problem.evaluate
    monkeypatch.setattr(calibration.Problem, "evaluate", lambda *a: (calls.append(1), evaluate(*a))[1])
    assert jaxdp.epsilon(noisy_sgd(calibrate(noisy_sgd, epsilon=2.0, delta=1e-6, bracket=(0.5, 20.0))), 1e-6) <= 2.0
    assert len(calls) <= 4


def test_without_a_bracket_one_pair_is_followed_and_no_value_is_tried_twice(monkeypatch):
    asked = []
    near = accounting.epsilon_near

    def noted(mechanism, *args, direction, **kwargs):
        sigmas = np.ravel(mechanism.mechanism.mechanism.noise_multiplier)
        asked.extend((direction, sigma) for sigma in sigmas.tolist())
        return near(mechanism, *args, direction=direction, **kwargs)

    monkeypatch.setattr(accounting, "epsilon_near", noted)
    sigma = calibrate(noisy_sgd, epsilon=9.0, delta=1e-6)
    assert 0.25 < sigma < 1.0 and {direction for direction, _ in asked} == {"forward"}
    assert {0.25, 1.0, 4.0} <= {sigma for _, sigma in asked} and len(set(asked)) == len(asked)


def test_the_rounding_of_the_last_test_costs_no_second_search(monkeypatch):
    found, tested = [], []
    searched, evaluate_one = calibration._searched, calibration.Problem.evaluate_one

    def rounded(problem, values):
        tested.append(values)
        return evaluate_one(problem, values) if len(tested) > 1 else problem.target * (1 + 1e-12)

    monkeypatch.setattr(calibration, "_searched", lambda *a: (found.append(1), searched(*a))[1])
    monkeypatch.setattr(calibration.Problem, "evaluate_one", rounded)
    sigma = calibrate(noisy_sgd, epsilon=2.0, delta=1e-6, bracket=(0.5, 20.0))
    assert len(found) == 1 and len(tested) == 2 and sigma == tested[-1] > tested[0]
    assert jaxdp.epsilon(noisy_sgd(sigma), 1e-6) <= 2.0


def test_a_fraction_refused_for_another_reason_is_named_where_only_whole_values_were_tried():
    with pytest.raises(
        ValueError, match=r"Only whole values were tried, because 0\.37\d* was refused: times must be a whole number"
    ):
        calibrate(lambda q: jaxdp.repeat(jaxdp.Gaussian(4.0), 20 / q), epsilon=3.0, delta=1e-5, bracket=(1e-4, 1.0))


def test_what_every_value_meets_and_what_is_refused_beyond_is_said():
    with pytest.raises(ValueError, match=r"Every value tried meets the target: take a smaller epsilon or delta"):
        jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1.0)

    def make(steps):
        if np.any(np.asarray(steps) > 1000):
            raise ValueError("steps must be below 1000.")
        return jaxdp.compose(jaxdp.Gaussian(0.1), jaxdp.repeat(jaxdp.Gaussian(100.0), steps))

    with pytest.raises(ValueError, match=r"at 1 it is .*, at 256 it is .* refused the next value: steps must be"):
        jaxdp.calibrate(make, epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize("relation", ["add_or_remove", "replace_one"])
def test_a_pair_that_meets_the_target_everywhere_does_not_decide(relation):
    """Exact: the loss of the pair is at most 0.4 - 0.3 s, that of the swapped pair 0.5 + 1.5 s."""

    def make(s):
        first, second = 0.01 * np.exp(0.3 * np.asarray(s) - 0.4), 0.01 * np.exp(0.5 + 1.5 * np.asarray(s))
        p = np.broadcast_to([0.01, 0.01, 0.98], (*np.shape(s), 3))
        return jaxdp.DiscretePair(p, np.stack([first, second, 1 - first - second], -1))

    for target, best in ((1.0, 1 / 3), (1.7, 0.8), (3.0, 1.0)):
        found = jaxdp.calibrate(make, epsilon=target, delta=1e-9, bracket=(0.0, 1.0), relation=relation)
        assert found == pytest.approx(best, abs=1e-6)
