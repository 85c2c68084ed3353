"""Repeated noise: stored values, bounds above the exact value, the Laplace sum against its definition, bad input."""

import jax
import mpmath
import numpy as np
import pytest
from exact import stored
from refusal import refused_in_one_line

from jaxdp import convolution

CASES = stored("iteration")
GOLDEN = 1e-10  # relative tolerance of every stored value
SERIES = 1e-11  # relative error of the direct sum over the discrete law, in float64
# Group size m: the limit of bound over exact value, which is variance x Fisher information of the sum of m Laplace
# noises (40-digit quadrature).
GROUP_FACTORS = {1: 2.0, 2: 1.19269472, 4: 1.0555}


def inputs_of(family, *names):
    """Arrays of these inputs of the stored cases of a family, and the array of their values."""
    found = [c for c in CASES if c["family"] == family]
    assert found, family
    rows = [[*(float(case["inputs"][name]) for name in names), float(case["value"])] for case in found]
    return np.transpose(rows)


def test_laplace_divergence_equals_the_stored_values_from_tiny_shifts_to_large_orders():
    order, ratio, exact = inputs_of("laplace_rdp", "alpha", "shift_over_scale")
    assert convolution.laplace_rdp(order, ratio, 1.0) == pytest.approx(exact, rel=GOLDEN)


def test_laplace_divergence_is_continuous_where_the_series_ends_and_bounded_at_huge_orders():
    order = 1e6
    below, above = convolution.laplace_rdp(order, np.array([1, 1 + 1e-9]) * 1e-2 / order, 1.0)
    assert above == pytest.approx(below, rel=1e-8)  # twice the relative step
    assert 2.9999 < convolution.laplace_rdp(order, 3.0, 1.0) <= 3.0


def test_bounds_equal_the_stored_values():
    n, sigma, order, shift, exact = inputs_of("conv_bound_gauss", "n", "sigma", "alpha", "shift")
    assert convolution.gaussian_bound(order, shift, sigma, n) == pytest.approx(exact, rel=GOLDEN)
    n, scale, order, shift, exact = inputs_of("conv_bound_laplace", "n", "scale", "alpha", "shift")
    assert convolution.laplace_bound(order, shift, scale, n) == pytest.approx(exact, rel=GOLDEN)


def test_exact_divergence_of_laplace_sums_equals_the_stored_values():
    n, scale, order, shift, exact = inputs_of("laplace_conv_renyi_exact", "n", "scale", "alpha", "shift")
    assert convolution.laplace_sum_rdp(order, shift, scale, n) == pytest.approx(exact, rel=GOLDEN)


def test_delta_bounds_of_laplace_sums_enclose_the_stored_values_closely():
    n, scale, epsilon, shift, exact = inputs_of("laplace_conv_delta_exact", "n", "scale", "epsilon", "shift")
    bounds = convolution.laplace_sum_delta_bounds(epsilon, shift, scale, n)
    held = (bounds.lower <= exact) & (exact <= bounds.upper)
    assert held.all(), np.flatnonzero(~held)
    assert bounds.upper == pytest.approx(exact, rel=GOLDEN)


def test_epsilon_bounds_invert_delta():
    epsilon = np.array([0.05, 0.2, 0.6])
    delta = convolution.laplace_sum_delta_bounds(epsilon, 1.0, 1.0, 8)
    # epsilon decreases in delta, so each side is inverted at the opposite one.
    upper = convolution.laplace_sum_epsilon(delta.lower, 1.0, 1.0, 8)
    lower = convolution.laplace_sum_epsilon_bounds(delta.upper, 1.0, 1.0, 8).lower
    assert (lower <= epsilon).all()
    assert (epsilon <= upper).all()
    assert upper == pytest.approx(lower, rel=1e-9)


def test_epsilon_is_the_pure_guarantee_at_delta_zero_and_zero_at_delta_one():
    assert convolution.laplace_sum_epsilon(0.0, 3.0, 2.0, 5) == 1.5
    assert convolution.laplace_sum_epsilon(1.0, 3.0, 2.0, 5) == 0.0
    assert convolution.laplace_sum_delta(1.5, 3.0, 2.0, 5) == 0.0


def test_one_laplace_is_the_textbook_profile():
    epsilon = np.linspace(0, 0.99, 12)
    exact = -np.expm1((epsilon - 1) / 2)
    assert convolution.laplace_sum_delta(epsilon, 1.0, 1.0, 1) == pytest.approx(exact, rel=1e-9)


def sum_at(n, x):
    """(density, tail P(X > x)) of the sum of n Laplace(1) noises, from the mixture of Erlang laws."""
    y, density, tail, above = abs(x), mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(0)
    poisson = [mpmath.exp(-y) * y**i / mpmath.factorial(i) for i in range(n)]
    for i in range(n - 1, -1, -1):
        weight = mpmath.binomial(2 * n - 2 - i, n - 1 - i) * mpmath.mpf(2) ** (i + 1 - 2 * n)
        above += weight
        density, tail = density + poisson[i] * weight, tail + poisson[i] * above
    return density, tail if x >= 0 else 1 - tail


def loss_and_delta(n, shift, x):
    """(loss at x, delta at that loss)."""
    (shifted, first), (here, second) = sum_at(n, x - shift), sum_at(n, x)
    return mpmath.log(shifted / here), first - shifted / here * second


def exact_pair(n, shift, target, part):
    """(epsilon, delta) of the profile at the point where its epsilon (part 0) or delta (part 1) is the target."""
    low, high = shift / 2, 2 * shift + 3000
    for _ in range(130):
        middle = (low + high) / 2
        value = loss_and_delta(n, shift, middle)[part]
        low, high = (low, middle) if (value >= target) == (part == 0) else (middle, high)
    return loss_and_delta(n, shift, high)


def enclosed(bounds, exact):
    rows = zip(bounds.lower, exact, bounds.upper, strict=True)
    return [mpmath.mpf(float(low)) <= e <= mpmath.mpf(float(high)) for low, e, high in rows]


def test_delta_bounds_of_laplace_sums_hold_at_huge_and_at_tiny_shifts():
    cases = [
        (750.0, 800.0, 1.0, 1),
        (720.0, 720.5, 1.0, 1),
        (720.0, 900.0, 1.0, 5),
        (584.659386186347, 585.9086458609027, 1.0, 2),
        (7.627393513442566e-05, 7.627393513505552e-05, 1.0, 1),
        (3.3156547283615435e-15, 1.9703241147781565e-14, 1.0, 2),
        (6.3e-27, 7.410495019677179e-14, 1.0, 10),
        (1 / 3, 1.0, 3.0, 1),
    ]
    with mpmath.workdps(60):
        exact = []
        for epsilon, shift, scale, n in cases:
            level, moved = mpmath.mpf(epsilon), mpmath.mpf(shift) / mpmath.mpf(scale)
            exact.append(-mpmath.expm1((level - moved) / 2) if n == 1 else exact_pair(n, moved, level, 0)[1])
        bounds = convolution.laplace_sum_delta_bounds(*np.array(cases).T)
        assert all(enclosed(bounds, exact)), enclosed(bounds, exact)
    assert (bounds.upper - bounds.lower < 2e-11).all()
    assert bounds.upper[3] == pytest.approx(float(exact[3]), rel=1e-7)


def test_epsilon_bounds_of_laplace_sums_hold_at_huge_shifts():
    cases = [
        (0.1, 800.0, 1.0, 1),
        (0.5, 5000.0, 1.0, 1),
        (8.793245930436981e-89, 512.4018919624649, 1.0, 2),
        (1e-5, 2000.0, 1.0, 3),
    ]
    with mpmath.workdps(60):
        exact = []
        for delta, shift, _, n in cases:
            d, s = mpmath.mpf(delta), mpmath.mpf(shift)
            exact.append(s + 2 * mpmath.log1p(-d) if n == 1 else exact_pair(n, s, d, 1)[0])
        bounds = convolution.laplace_sum_epsilon_bounds(*np.array(cases).T)
        assert all(enclosed(bounds, exact)), enclosed(bounds, exact)
    assert bounds.upper == pytest.approx(bounds.lower, rel=1e-11)


def test_laplace_divergence_is_never_below_the_exact_one():
    rng = np.random.default_rng(3)
    order = np.append(1 + 10 ** rng.uniform(-10, 6, 300), [3309.6250986602313, 1e6, 2.0])
    shift = np.append(10 ** rng.uniform(-4, 1.5, 300) / order[:300], [3.0231820583835815e-06, 1e-155, 1e-200])
    one, seven = convolution.laplace_rdp(order, shift, 1.0), convolution.laplace_bound(order, shift, 1.0, 7)
    with mpmath.workdps(450):
        for alpha, s, of_1, of_7 in zip(*(map(mpmath.mpf, v) for v in (order, shift, one, seven)), strict=True):
            for count, got in ((1, of_1), (7, of_7)):
                x = s / count
                grown = alpha * mpmath.expm1(x * (alpha - 1)) + (alpha - 1) * mpmath.expm1(-x * alpha)
                exact = count * mpmath.log(1 + grown / (2 * alpha - 1)) / (alpha - 1)
                assert exact <= got <= exact * (1 + mpmath.mpf(3e-14)) + mpmath.mpf(2e-307), (alpha, s, count)


def test_exact_divergence_of_laplace_sums_at_shifts_whose_exponential_overflows_and_at_huge_orders():
    orders, shifts = np.array([1.1, 2.0, 8.0, 1e6]), np.array([[300.0], [1e3], [1e5]])
    one = convolution.laplace_sum_rdp(orders, shifts, 1.0, num_summands=1)
    np.testing.assert_allclose(one, convolution.laplace_rdp(orders, shifts, 1.0), rtol=1e-12)
    three = convolution.laplace_sum_rdp([1.1, 2.0], 1e3, 1.0, num_summands=3)  # by mpmath.quad at 40 digits
    np.testing.assert_allclose(three, [986.946530881579, 988.220042425395], rtol=1e-12)
    huge = convolution.laplace_sum_rdp([1e50, 1e200, 1e307], [[1e-8], [1.0], [1e5]], 1.0, num_summands=3)
    np.testing.assert_array_equal(huge, np.broadcast_to([[1e-8], [1.0], [1e5]], (3, 3)))
    assert convolution.laplace_sum_rdp(2.0, 1e300, 1e-300, num_summands=3) == np.inf
    assert np.all(convolution.laplace_sum_log_density(1e308, [1e-8, 1.0], num_summands=3) < -1e299)


def test_density_integrates_to_one_and_has_the_right_variance():
    x = np.linspace(-120, 120, 481)  # step 0.5: at the sum's first alias the characteristic function is below 1e-20
    density = np.exp(convolution.laplace_sum_log_density(x, 2.0, 8))
    assert np.sum(density) * 0.5 == pytest.approx(1.0, rel=1e-10)
    assert np.sum(density * x**2) * 0.5 == pytest.approx(2 * 8 * 4.0, rel=1e-8)


def test_bound_is_never_below_the_exact_value_and_grouping_lies_between():
    for order in (1.5, 4.0, 32.0):
        exact = convolution.laplace_sum_rdp(order, 1.0, 1.0, 16)
        chain = [convolution.grouped_laplace_bound(order, 1.0, 1.0, 16, m) for m in (1, 2, 4, 8)]
        assert chain[0] == pytest.approx(convolution.laplace_bound(order, 1.0, 1.0, 16), rel=1e-9)
        assert all(a > b > exact for a, b in zip(chain, chain[1:], strict=False))


def test_laplace_bound_is_not_tight_and_groups_of_m_have_their_own_factor():
    exact = convolution.laplace_sum_rdp(2.0, 1.0, 1.0, 1024)
    for size, factor in GROUP_FACTORS.items():
        grouped = convolution.grouped_laplace_bound(2.0, 1.0, 1.0, 1024, size)
        assert grouped / exact == pytest.approx(factor, rel=2e-3)  # the factor is a limit, approached like 1/n


def discrete_divergence(order, scale, shift):
    """Renyi divergence of shifted discrete Laplace noise, summed over the integers up to 600."""
    x = np.arange(-600, 601)
    p, q = np.exp(-abs(x - shift) / scale), np.exp(-abs(x) / scale)
    return np.log(np.sum(p**order * q ** (1 - order)) / q.sum()) / (order - 1)


@pytest.mark.parametrize("bound", [convolution.laplace_bound, convolution.gaussian_bound])
@pytest.mark.parametrize("unit", [1e-300, 1e300])
def test_bounds_do_not_depend_on_the_unit_of_length(bound, unit):
    assert bound(2.0, 30 * unit, unit, 1e10) == pytest.approx(bound(2.0, 30.0, 1.0, 1e10), rel=1e-14)


def test_discrete_laplace_bound_is_exact_for_one_summand():
    for shift in (1, 2, 3, 8):
        got = convolution.discrete_laplace_bound(2.5, shift, 3.0, 1)
        assert got == pytest.approx(discrete_divergence(2.5, 3.0, shift), rel=SERIES)


def test_discrete_laplace_shift_inequality_as_printed_is_false_and_the_used_one_holds():
    one, two = (convolution.discrete_laplace_bound(2.0, s, 3.0, 1) for s in (1, 2))
    assert two > 2 * one
    weights = np.exp(-abs(np.arange(-300, 301)) / 3.0)
    law = np.convolve(weights, weights) / weights.sum() ** 2
    shifted, here = law[:-2], law[2:]
    keep = here > 1e-60
    exact = np.log(np.sum(shifted[keep] ** 2 / here[keep]))
    assert exact <= convolution.discrete_laplace_bound(2.0, 2, 3.0, 2) == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convolution.laplace_rdp(1.0, 1.0, 1.0), "order"),
        (lambda: convolution.laplace_bound(2.0, -1.0, 1.0, 3), "shift"),
        (lambda: convolution.laplace_bound(2.0, 1.0, 1.0, 0), "num_summands"),
        (lambda: convolution.laplace_sum_rdp(2.0, 1.0, 1.0, 10_001), "num_summands"),
        (lambda: convolution.grouped_laplace_bound(2.0, 1.0, 1.0, 10, 3), "multiple"),
        (lambda: convolution.discrete_laplace_bound(2.0, 1.5, 1.0, 3), "shift"),
        (lambda: convolution.laplace_sum_epsilon(-0.1, 1.0, 1.0, 3), "delta"),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(call, message):
    with refused_in_one_line(ValueError, message):
        call()


@pytest.mark.parametrize("order, shift, count", [(1.0, 1.0, 2), (2.0, -1.0, 2), (2.0, np.nan, 2), (2.0, 1.0, 2.5)])
def test_repeated_noise_outside_the_range_is_infinite_in_a_program(order, shift, count):
    def bound(*numbers):
        return convolution.repeated_noise_bound(lambda a, s: a * s**2 / 2, *numbers)

    with jax.enable_x64(True):
        assert float(jax.jit(bound)(2.0, 1.0, 2.0)) == bound(2.0, 1.0, 2.0)
        assert float(jax.jit(bound)(order, shift, count)) == np.inf


def test_a_divergence_that_is_no_number_is_infinite():
    assert convolution.repeated_noise_bound(lambda a, s: np.nan * s, 2.0, 1.0, 2) == np.inf
