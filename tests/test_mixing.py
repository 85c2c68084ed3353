"""Mixing: stored values, random finite instances, coefficients, couplings, bad input."""

import jax
import mpmath
import numpy as np
import pytest
from exact import hockey_stick, stored
from refusal import refused_in_one_line

from jaxdp import mixing
from jaxdp.convolution import laplace_rdp

CASES = stored("iteration")
GOLDEN = 1e-10  # relative tolerance of every stored value
ROUNDING = 1e-12  # rounding of sums of at most 6 probabilities
TINY = 2.3e-308  # just above the smallest normal number, the answer where the exact value is positive and smaller


def test_stored_values_are_met():
    amplify = {"mixing_doeblin": mixing.doeblin_amplification, "mixing_ultra": mixing.ultra_mixing_amplification}
    count = 0
    for case in CASES:
        if case["family"] in amplify:
            count += 1
            inputs = {name: float(v) for name, v in case["inputs"].items()}
            got = amplify[case["family"]](**inputs)
            assert got.epsilon == pytest.approx(float(case["value"]["epsilon"]), rel=GOLDEN)
            assert got.delta == pytest.approx(float(case["value"]["delta"]), rel=GOLDEN)
        if case["family"] == "iterated_laplace_opt":
            count += 1
            order, shift, first, second = (float(case["inputs"][k]) for k in ("alpha", "Delta", "lambda1", "lambda2"))
            got = mixing.iterated_laplace_rdp(order, shift, first, second)
            assert got.rdp == pytest.approx(float(case["value"]["rdp"]), rel=GOLDEN)
            assert got.first_share == pytest.approx(float(case["value"]["first_share"]), rel=GOLDEN)
    assert count == 9


def test_all_four_cases_hold_on_random_finite_mechanisms():
    rng = np.random.default_rng(0)
    nearest = np.full(4, np.inf)
    for _ in range(300):
        p, q = rng.dirichlet(np.full(3, 0.7), 2)
        kernel = rng.dirichlet(np.full(4, rng.uniform(0.5, 5)), 3)
        epsilon = rng.uniform(0, 2)
        delta = max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))
        level = min(mixing.required_level(epsilon, delta), 50.0)
        claims = [
            mixing.dobrushin_amplification(epsilon, delta, mixing.dobrushin_coefficient(kernel)),
            mixing.hockey_stick_amplification(
                epsilon, delta, mixing.hockey_stick_coefficient(kernel, level * (1 - 1e-15)), level * (1 - 1e-15)
            ),
            mixing.doeblin_amplification(epsilon, delta, mixing.doeblin_coefficient(kernel)),
            mixing.ultra_mixing_amplification(epsilon, delta, mixing.ultra_mixing_coefficient(kernel)),
        ]
        for i, claim in enumerate(claims):
            for one, other in ((p, q), (q, p)):
                truth = hockey_stick(one @ kernel, other @ kernel, claim.epsilon)
                assert truth <= claim.delta + ROUNDING
                nearest[i] = min(nearest[i], claim.delta - truth)
    assert (nearest < 0.05).all()  # a bound far above the exact value would hide a mistake


def exactly(value):
    return mpmath.mpf(float(value))


def test_no_amplified_guarantee_is_below_the_exact_one():
    rng = np.random.default_rng(1)
    for _ in range(400):
        gamma = float(rng.choice([rng.uniform(), 10 ** rng.uniform(-300, 0), 1 - 10 ** rng.uniform(-16, 0), 0.0, 1.0]))
        epsilon = float(rng.choice([rng.uniform(0, 5), 10 ** rng.uniform(-12, 3), rng.uniform(450, 800)]))
        delta = float(rng.choice([rng.uniform(), 10 ** rng.uniform(-300, 0), 0.0, 1.0]))
        with mpmath.workdps(400):
            g, e, d = exactly(gamma), exactly(epsilon), exactly(delta)
            level = mpmath.log(1 + g * mpmath.expm1(e))
            kept = 1 - (1 - g) * -mpmath.expm1(-e)
            truths = {
                mixing.doeblin_amplification: g * (1 - kept * (1 - d)),
                mixing.ultra_mixing_amplification: g * d * kept,
            }
            assert g * d <= exactly(mixing.dobrushin_amplification(epsilon, delta, gamma).delta)
            for amplify, truth in truths.items():
                claim = amplify(epsilon, delta, gamma)
                largest = level if epsilon < 700 else e  # e^700 is in the range of doubles
                assert level <= exactly(claim.epsilon) <= largest * (1 + ROUNDING) + TINY, (amplify, epsilon, gamma)
                assert truth <= exactly(claim.delta), (amplify, epsilon, delta, gamma)
                assert exactly(claim.delta) <= truth * (1 + ROUNDING) + TINY, (amplify, epsilon, delta, gamma)
            if delta > 0:
                limit = mpmath.log(1 + mpmath.expm1(e) / d)
                assert min(limit, 690) * (1 - ROUNDING) <= exactly(mixing.required_level(epsilon, delta)) <= limit


def test_a_coefficient_next_to_the_largest_ratio_is_not_too_small():
    rng = np.random.default_rng(2)
    for _ in range(200):
        rows = np.floor(rng.dirichlet(np.full(4, 0.6), 2) * 2**40) / 2**40
        rows[:, 0] += 1 - rows.sum(axis=1)
        if np.any(rows <= 0):
            continue
        ratio = np.max(rows[0] / rows[1])
        level = np.log(ratio) * (1 - 10 ** rng.uniform(-16, -1)) if ratio > 1 else 0.0
        with mpmath.workdps(60):
            scale = mpmath.exp(exactly(level))
            one, other = ([exactly(x) for x in row] for row in rows)
            truth = max(
                mpmath.fsum(max(a - scale * b, 0) for a, b in zip(p, q, strict=True))
                for p, q in ((one, other), (other, one))
            )
            found = exactly(mixing.hockey_stick_coefficient(rows, level))
            assert truth <= found <= truth * (1 + ROUNDING) + 8 * 2.0**-52


def test_products_that_underflow_are_not_zero():
    assert 1e-310 < mixing.dobrushin_amplification(1.0, 1e-200, 1e-110).delta < 1e-307
    assert 1e-310 < mixing.doeblin_amplification(1e-200, 0.0, 1e-110).delta < 1e-307
    assert 1e-310 < mixing.doeblin_amplification(1e-200, 0.0, 1e-110).epsilon < 1e-307
    assert 1e-320 < mixing.dobrushin_amplification(1.0, 1e-320, 1.0).delta < 1e-307
    assert 5e-311 < mixing.iterated_gaussian_rdp(2.0, 1e-155, 1.0, 0.0) < 1e-307
    assert mixing.doeblin_amplification(0.0, 0.0, 0.5) == (0.0, 0.0)


def test_a_gaussian_split_is_not_taken_for_no_divergence_where_a_ratio_underflows_or_a_deviation_overflows():
    assert 0 < mixing.iterated_gaussian_rdp(2.0, 1e-235, 1.0, 1e145) < 1e-307
    assert 2 / 9 <= mixing.iterated_gaussian_rdp(2.0, 1e308, 1.5e308, 1.5e308) < 0.32  # the hypotenuse overflows
    assert 1e-20 <= mixing.iterated_gaussian_rdp(2.0, 1.0, 1e-5, 1e-300, lipschitz=1e-310) < 1e-15
    assert mixing.iterated_gaussian_rdp(2.0, 0.0, 1.0, 1.0) == 0


def test_coefficients_of_rescaled_rows_are_not_below_those_of_the_exact_quotients():
    rng = np.random.default_rng(5)
    for _ in range(100):
        row = rng.dirichlet(np.full(5, 2.0))
        rows = np.stack([row, row * (1 + 1e-14 * rng.uniform(-1, 1, 5))]) * (1 + rng.uniform(-5e-10, 5e-10, (2, 1)))
        with mpmath.workdps(60):
            one, other = ([exactly(x) / mpmath.fsum(map(exactly, r)) for x in r] for r in rows)
            pairs = list(zip(one, other, strict=True))
            distance = mpmath.fsum(max(a - b, 0) for a, b in pairs)
            least = min(min(a / b, b / a) for a, b in pairs)
            assert distance <= exactly(mixing.dobrushin_coefficient(rows)) <= distance + 3e-15
            assert 1 - least <= exactly(mixing.ultra_mixing_coefficient(rows)) <= 1 - least + 3e-15


def test_iterated_laplace_is_not_below_the_exact_value_of_its_split():
    rng = np.random.default_rng(6)
    order = 1 + 10 ** rng.uniform(-6, 5, 200)
    shift, second = 10 ** rng.uniform(-4, 1, 200) / order, 10 ** rng.uniform(-2, 2, 200)
    found = mixing.iterated_laplace_rdp(order, shift, 1.0, second)
    with mpmath.workdps(60):
        for alpha, s, b, value, share in zip(*(map(exactly, v) for v in (order, shift, second, *found)), strict=True):
            exact = 0
            for x in (s * share, s * (1 - share) / b):
                grown = alpha * mpmath.expm1(x * (alpha - 1)) + (alpha - 1) * mpmath.expm1(-x * alpha)
                exact += mpmath.log(1 + grown / (2 * alpha - 1)) / (alpha - 1)
            assert exact <= value <= exact * (1 + ROUNDING)


def test_coefficients_of_a_known_matrix():
    kernel = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.25, 0.25, 0.5]])
    assert mixing.dobrushin_coefficient(kernel) == pytest.approx(0.3)
    assert mixing.doeblin_coefficient(kernel) == pytest.approx(0.35)
    assert mixing.ultra_mixing_coefficient(kernel) == pytest.approx(0.6)
    assert mixing.dobrushin_coefficient(np.eye(2)) == 1.0
    assert mixing.ultra_mixing_coefficient(np.full((3, 2), 0.5)) == 0.0


def test_local_reading_of_randomized_response():
    keep = np.exp(1.0) / (1 + np.exp(1.0))
    kernel = np.array([[keep, 1 - keep], [1 - keep, keep]])
    assert mixing.pure_local_epsilon(mixing.ultra_mixing_coefficient(kernel)) == pytest.approx(1.0, rel=1e-12)
    assert mixing.local_privacy(kernel, 1.0).delta == pytest.approx(0.0, abs=1e-12)
    assert mixing.local_privacy(kernel).delta == pytest.approx(2 * keep - 1)


def test_optimal_laplace_split_beats_every_split_of_a_grid():
    order, shift, first, second = 5.0, 1.3, 1.0, 2.0
    best = mixing.iterated_laplace_rdp(order, shift, first, second)
    grid = np.linspace(0, shift, 101)
    values = mixing.coupling_bound(
        lambda a, s: laplace_rdp(a, s, first), lambda a, s: laplace_rdp(a, s, second), order, shift, grid
    )
    assert (values >= best.rdp * (1 - 1e-12)).all()
    assert values.min() == pytest.approx(best.rdp, rel=1e-3)


@pytest.mark.parametrize("order, hidden", [(0.5, 0.1), (np.nan, 0.1), (2.0, -0.1), (2.0, np.nan), (2.0, 1.5)])
def test_a_coupling_outside_the_range_is_infinite_in_a_program(order, hidden):
    def bound(alpha, part):
        return mixing.coupling_bound(lambda a, s: a * s**2 / 2, lambda a, s: a * s**2 / 8, alpha, 1.0, part)

    with jax.enable_x64(True):
        assert float(jax.jit(bound)(2.0, 0.25)) == bound(2.0, 0.25)
        assert float(jax.jit(bound)(order, hidden)) == np.inf


def test_laplace_limits_are_the_published_ones():
    assert mixing.iterated_laplace_rdp(1e6, 3.0, 1.0, 2.0).rdp == pytest.approx(
        mixing.iterated_laplace_pure_epsilon(3.0, 1.0, 2.0), rel=1e-4
    )
    assert mixing.iterated_laplace_rdp(1.5, 1e-9, 1.0, 2.0).first_share == pytest.approx(0.2, rel=1e-6)


def test_gaussian_coupling_is_attained_by_the_optimal_split():
    share = mixing.gaussian_split(1.0, 2.0)
    value = mixing.coupling_bound(lambda a, s: a * s**2 / 2, lambda a, s: a * s**2 / 8, 3.0, 1.0, share)
    assert mixing.iterated_gaussian_rdp(3.0, 1.0, 1.0, 2.0) == pytest.approx(value, rel=1e-12)
    assert mixing.iterated_gaussian_rdp(3.0, 1.0, 1.0, 2.0, lipschitz=0.5) < value


def test_traced_values_agree_and_invalid_ones_are_vacuous():
    with jax.enable_x64(True):
        traced = jax.jit(mixing.doeblin_amplification)(1.0, 1e-5, 0.5)
        bad = jax.jit(mixing.doeblin_amplification)(1.0, 1e-5, 1.5)
        values = [float(v) for v in (*traced, *bad)]
    assert values[:2] == pytest.approx(list(mixing.doeblin_amplification(1.0, 1e-5, 0.5)), rel=1e-14)
    assert values[2:] == [np.inf, 1.0]


def test_the_required_level_is_accepted_by_a_program_that_rounds_it_differently():
    level = mixing.required_level(2.0, 0.2)  # by NumPy
    many = mixing.hockey_stick_amplification(np.full(4096, 2.0), 0.2, 0.1, level)  # one ulp less by a program
    for _ in range(600):  # until single points are computed by a program, too
        one = mixing.hockey_stick_amplification(2.0, 0.2, 0.1, level)
    assert one.delta == pytest.approx(0.02) == many.delta[0]


@pytest.mark.parametrize("small", [1e-310, 5e-324])
def test_a_subnormal_number_counts_as_a_normal_one_traced_and_concrete(small):
    with jax.enable_x64(True):
        limit = float(jax.jit(mixing.required_level)(1.0, small))
        delta = float(jax.jit(mixing.dobrushin_amplification)(1.0, small, 0.5).delta)
        shifted = float(jax.jit(mixing.iterated_laplace_rdp)(2.0, small, 1.0, 1.0).rdp)
    assert limit == mixing.required_level(1.0, small) < np.inf
    assert delta == mixing.dobrushin_amplification(1.0, small, 0.5).delta > 0
    assert 0 < shifted <= mixing.iterated_laplace_rdp(2.0, small, 1.0, 1.0).rdp <= 2.001 * shifted


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixing.dobrushin_coefficient([[0.5, 0.4]]), "row sum of kernel"),
        (lambda: mixing.dobrushin_coefficient([[1.5, -0.5]]), "kernel"),
        (lambda: mixing.doeblin_coefficient([0.5, 0.5]), "matrix"),
        (lambda: mixing.doeblin_amplification(1.0, 0.1, 1.2), "gamma"),
        (lambda: mixing.dobrushin_amplification(-1.0, 0.1, 0.2), "epsilon"),
        (lambda: mixing.hockey_stick_amplification(1.0, 0.1, 0.2, 10.0), "level"),
        (lambda: mixing.iterated_laplace_rdp(1.0, 1.0, 1.0, 1.0), "order"),
        (lambda: mixing.iterated_gaussian_rdp(2.0, 1.0, 0.0, 1.0), "first_std"),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(call, message):
    with refused_in_one_line(ValueError, message):
        call()


def test_the_level_of_the_hockey_stick_theorem_may_be_differentiated():
    with jax.enable_x64(True):
        slope = jax.grad(lambda level: mixing.hockey_stick_amplification(1.0, 0.1, 0.2, level).delta)(0.5)
    assert float(slope) == 0.0


def test_the_required_level_has_a_derivative_at_0():
    with jax.enable_x64(True):
        assert float(jax.grad(lambda e: mixing.required_level(e, 0.1))(0.0)) == pytest.approx(10.0)
