"""The named shuffle theorems: the order among their bounds, inversion to the safe side, edge cases, bad input."""

import jax
import mpmath
import numpy as np
import pytest
from exact import gaussian_delta_in_digits, hockey_stick
from scipy import stats

import jaxdp
from jaxdp import shuffle
from jaxdp.shuffle.approximate import additive_term
from jaxdp.shuffle.bounds import clones_bounds

EPS0 = np.array([0.5, 1.0, 2.0, 4.0])
USERS, DELTA = 1e5, 1e-6


def exact(rate):
    return clones_bounds("epsilon", EPS0, np.full(4, USERS), np.full(4, DELTA), rate).upper


def test_bounds_are_ordered_from_the_lower_bound_to_the_closed_form():
    floor = shuffle.lower_bound_epsilon(EPS0, USERS, DELTA)
    closed = shuffle.clones_epsilon_closed_form(EPS0, USERS, DELTA)
    assert (floor <= exact("stronger")).all()
    assert (exact("stronger") <= exact("clones")).all()
    assert (exact("clones") <= closed).all()


def test_closed_form_outside_its_condition_is_eps0_itself():
    assert shuffle.clones_epsilon_closed_form(9.0, 1000, 1e-6) == 9.0
    assert shuffle.clones_epsilon_closed_form(1.0, 1e6, 0.0) == 1.0
    assert shuffle.clones_epsilon_closed_form(1.0, 1e6, 1e-6) < 0.1
    assert shuffle.krr_epsilon_closed_form(9.0, 10, 1000, 1e-6) == 9.0


def test_published_curves_lie_above_the_lower_bound():
    floor = shuffle.lower_bound_epsilon(0.4, USERS, DELTA)
    for curve in (shuffle.blanket_hoeffding, shuffle.blanket_bennett, shuffle.erlingsson_2019, shuffle.cheu_2019):
        assert floor <= curve(0.4, USERS, DELTA) <= 0.4


def test_renyi_curve_of_girgis_lies_above_the_exact_golden_values():
    # Exact values of the clones pair at n = 10000, eps0 = 1 (tests/data/shuffle.json); the curve bounds them.
    assert shuffle.girgis_2021_renyi(16, 1.0, 10000) > 0.0018576964042115204
    assert shuffle.girgis_2021_renyi(256, 1.0, 10000) > 0.029739483029871658


def test_renyi_curve_of_girgis_refuses_what_it_cannot_sum():
    with pytest.raises(ValueError, match="order must be a whole number from 2 to 100,000, got 1e\\+157"):
        shuffle.girgis_2021_renyi(1e157, 1.0, 100)
    with pytest.raises(TypeError, match="must be concrete"):
        jax.jit(lambda order: shuffle.girgis_2021_renyi(order, 1.0, 100))(3.0)


def clones_delta(eps0, users, epsilon, most=400):
    """Delta of the clones pair by its definition, summed over at most ``most`` clones of which some hold a one."""
    clones = np.arange(most)[:, None]
    ones = np.arange(most + 1)[None, :]
    chance = stats.binom.pmf(clones, users - 1, np.exp(-eps0))
    before, here = stats.binom.pmf(ones - 1, clones, 0.5), stats.binom.pmf(ones, clones, 0.5)
    own = 1 / (1 + np.exp(-eps0))
    p, q = (chance * (a * before + (1 - a) * here) for a in (own, 1 - own))
    return hockey_stick(p, q, epsilon)


def test_local_epsilon_for_is_the_largest_that_passes():
    answer = shuffle.local_epsilon_for(1.0, 1e6, 1e-6)
    at, above = (clones_delta(eps0, 10**6, 1.0) for eps0 in (answer, answer * (1 + 1e-5)))
    assert at <= 1e-6 < above


@pytest.mark.thorough
def test_num_users_for_is_the_smallest_that_passes():
    answer = shuffle.num_users_for(0.1, 1.0, 1e-6)
    at = clones_bounds("delta", np.ones(2), np.array([answer, answer - 1]), np.full(2, 0.1), "clones").upper
    assert at[0] <= 1e-6 < at[1]
    assert shuffle.num_users_for(1.0, 1.0, 0.0) == 1
    assert shuffle.num_users_for(0.5, 1.0, 0.0) == np.inf


def test_sharp_term_is_below_the_published_one_and_stronger_refuses_the_published_one():
    sharp = shuffle.approximate_ldp(0.1, 1e-6, EPS0, 1e-12, USERS)[1]
    published = shuffle.approximate_ldp(0.1, 1e-6, EPS0, 1e-12, USERS, term="published")[1]
    assert (1e-6 < sharp).all() and (sharp < published).all()
    with pytest.raises(ValueError, match="published"):
        shuffle.approximate_ldp(0.1, 1e-6, 1.0, 1e-12, USERS, term="published", bound="stronger")


def exact_term(epsilon, eps0, delta0, users, term, bound):
    e, local, delta = mpmath.exp(mpmath.mpf(epsilon)), mpmath.exp(mpmath.mpf(eps0)), mpmath.mpf(delta0)
    if term == "published":
        return (e + 1) * (1 + 1 / local / 2) * int(users) * delta
    kappa = (local + 2) / (local + 1) / local * (1 if bound == "clones" else 2)
    return (e + 1) * delta * (1 / (local + 1) + (int(users) - 1) * kappa)


@pytest.mark.parametrize(("term", "bound"), [("sharp", "clones"), ("sharp", "stronger"), ("published", "clones")])
def test_additive_term_holds_where_its_factors_overflow_or_underflow(term, bound):
    rng = np.random.default_rng(7)
    eps0 = np.append(10 ** rng.uniform(-2, 3.2, 200), [800.0, 750.0, 760.0, 746.0])
    epsilon = np.append(eps0[:200] * rng.uniform(0.7, 1.0, 200), [790.0, 720.0, 700.0, 700.0])
    delta0 = np.append(10 ** rng.uniform(-300, -1, 200), [1e-3] * 4)
    total = shuffle.approximate_ldp(epsilon, 0.0, eps0, delta0, USERS, term=term, bound=bound)[1]
    with jax.enable_x64(True):
        traced = np.asarray(additive_term(USERS, eps0, delta0, epsilon, bound))
    with mpmath.workdps(40):
        for i in range(204):
            exact = exact_term(epsilon[i], eps0[i], delta0[i], USERS, term, bound)
            for got in [total[i]] if term == "published" else [total[i], min(traced[i], 1.0)]:
                assert min(exact, 1) <= mpmath.mpf(float(got)) <= exact * (1 + mpmath.mpf(3e-12)) + mpmath.mpf(1e-300)


def test_a_small_additive_term_is_not_lost_by_the_sum():
    assert shuffle.approximate_ldp(0.1, 0.1, 1.0, 1e-40, 1000)[1] > 0.1
    assert shuffle.approximate_ldp(0.1, 0.1, 1.0, 0.0, 1000)[1] == 0.1


def test_noisy_sgd_with_huge_noise_keeps_the_mass_of_the_gaussian_tail():
    # With one example the pair is that of Gaussian noise, delta(epsilon) in closed form with mu = 2 / noise_std.
    noise, target = np.array([2e17, 2e16, 2e15]), np.array([1e-300, 1e-300, 1e-250])
    found = shuffle.noisy_sgd_one_pass_epsilon(noise, 1, target)
    with mpmath.workdps(600):
        for std, delta, epsilon in zip(*(map(mpmath.mpf, v) for v in (noise, target, found)), strict=True):
            assert gaussian_delta_in_digits(epsilon, 2 / std) <= delta
            assert gaussian_delta_in_digits(0.9 * epsilon, 2 / std) > delta


def test_noisy_sgd_is_at_most_the_gaussian_of_one_step():
    noise, users, delta = np.array([0.5, 1.0, 1.0, 4.0]), [1e4, 1e4, 1e4, 1], [1e-2, 1e-2, 1e-5, 1e-2]
    alone = jaxdp.epsilon(jaxdp.Gaussian(noise), delta, relation="replace_one")
    assert (shuffle.noisy_sgd_one_pass_epsilon(noise, users, delta) <= alone * (1 + 1e-9)).all()


@pytest.mark.slow
def test_noisy_sgd_is_amplified_and_falls_with_noise(compiled):
    values = shuffle.noisy_sgd_one_pass_epsilon([2.0, 4.0, 8.0], 1e6, 1e-6)
    assert (np.diff(values) < 0).all()
    # One Gaussian step with mu = 2 / 8 has an epsilon of 4.24 mu at this delta; 4.89 mu leaves some room.
    assert values[2] < 0.1 * 2.0 / 8.0 * 4.89


def test_one_call_broadcasts_and_returns_numpy_float64():
    value = shuffle.lower_bound_epsilon(EPS0[:, None], [1e4, 1e5, 1e6], DELTA)
    assert value.shape == (4, 3) and value.dtype == np.float64
    assert (np.diff(value, axis=1) < 0).all()
    assert isinstance(shuffle.lower_bound_epsilon(1.0, 1000, 1e-6), np.float64)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1.0, 10, 0.1), "eps0"),
        ((np.nan, 10, 0.1), "eps0"),
        ((1.0, 0, 0.1), "n must be"),
        ((1.0, 1.5, 0.1), "n must be"),
        ((1.0, 10, 1.5), "delta"),
        ((1.0, 10, np.nan), "delta"),
        (([1.0, 2.0], [1, 2, 3], 0.1), "broadcast"),
    ],
)
def test_bad_input_names_the_argument(arguments, name):
    for function in (shuffle.clones_epsilon_closed_form, shuffle.lower_bound_epsilon, shuffle.blanket_bennett):
        with pytest.raises(ValueError, match=name):
            function(*arguments)


@pytest.mark.parametrize("bad", [(-1.0, 1e4, 1e-6, 16.0), (1.0, np.nan, 1e-6, 16.0), (1.0, 1e4, 1e-6, 2.5)])
def test_a_traced_closed_form_of_a_bad_number_promises_nothing_and_has_no_slope(bad):
    def krr(eps0, n, delta, k):
        return shuffle.krr_epsilon_closed_form(eps0, k, n, delta)

    with jax.enable_x64(True):
        value, slopes = jax.jit(jax.value_and_grad(krr, argnums=(0, 1, 2, 3)))(*bad)
    assert np.isinf(value) and not np.any(slopes)


def test_closed_form_traces_with_x64_and_refuses_without():
    with jax.enable_x64(True):
        traced = jax.jit(shuffle.clones_epsilon_closed_form)(1.0, 1e5, 1e-6)
    assert float(traced) == pytest.approx(float(shuffle.clones_epsilon_closed_form(1.0, 1e5, 1e-6)), rel=1e-14)
    with pytest.raises(RuntimeError, match="x64"):
        jax.jit(shuffle.clones_epsilon_closed_form)(1.0, 1e5, 1e-6)


def test_a_report_alone_bounds_a_closed_form_whatever_stands_in_other_rows():
    """The bound by the report alone holds with and without a local delta, and whether or not another row has one."""
    one = lambda local: jaxdp.Shuffled(jaxdp.LocalRandomizer(1.465, local), 763_585_922, "closed_form")  # noqa: E731
    alone = jaxdp.delta(jaxdp.PureDP(1.465), 1.1e-4)
    found = [jaxdp.delta(one(0.0), 1.1e-4), *jaxdp.delta(one(np.array([0.0, 1e-300])), 1.1e-4)]
    np.testing.assert_allclose(found, alone, rtol=1e-12)
