"""Renyi divergence of shuffled rounds against exact values, derivatives, traced verbs, and the closed form of k-RR."""

import jax
import numpy as np
import pytest
from exact import column, stored
from mpmath import mp

import jaxdp
from jaxdp.runtime.backend import compiler_options
from jaxdp.shuffle import bounds, krr_epsilon_closed_form, rounds
from jaxdp.sources import shuffling as route

GOLDEN = stored("shuffle")
RENYI_GAP = 1e-6  # promised relative excess of upper bounds of the divergence
SLOPE_GAP = 1e-5  # relative error of a central difference with step 1e-4


@pytest.mark.slow
def test_golden_renyi_divergence_is_bounded_and_the_excess_is_small():
    cases = [case for case in GOLDEN if case["family"] == "renyi_clones"][::4]
    users, eps0, order, exact = (column(cases, key) for key in ("n", "eps0", "alpha", "value"))
    upper = jaxdp.renyi(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users), order)
    rounded = np.array([1e-11 if case.get("digits") else 0.0 for case in cases])  # golden values of 11 digits
    assert (exact <= upper * (1 + rounded)).all()
    assert (upper - exact <= RENYI_GAP * exact).all()


@pytest.mark.parametrize("users", [1, 2, 5])
def test_renyi_of_few_users_is_exact_from_next_to_one_to_the_largest_orders(users):
    orders = [1 + 1e-6, 1.01, 2.0, 30.0, 350.0, 1e4]
    local = mp.e
    with mp.workdps(60):
        pair = []
        for j in range(users):
            count = mp.binomial(users - 1, j) * local**-j * (1 - 1 / local) ** (users - 1 - j) / mp.mpf(2) ** j
            for i in range(j + 2):
                heads = [mp.binomial(j, m) if 0 <= m <= j else 0 for m in (i - 1, i)]
                pair.append([count * (a * heads[0] + b * heads[1]) / (local + 1) for a, b in ((local, 1), (1, local))])
        exact = [float(mp.log(mp.fsum(q * (p / q) ** a for p, q in pair)) / (a - 1)) for a in map(mp.mpf, orders)]
    upper = jaxdp.renyi(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), users), orders)
    assert (np.array(exact) * (1 - 1e-12) <= upper).all() and (upper <= np.array(exact) * (1 + RENYI_GAP)).all()
    assert 1.0 <= jaxdp.renyi(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), users), np.inf) <= 1 + 1e-12


@pytest.mark.parametrize(
    "randomizer", [jaxdp.LocalRandomizer(2.0), jaxdp.RandomizedResponse(2.0, 10)], ids=["clones", "k-RR"]
)
@pytest.mark.thorough
def test_renyi_of_many_users_stays_that_of_a_gaussian_up_to_large_orders(randomizer):
    """It would be 15 times too large beyond order 350 if deltas far below the smallest double were lost."""
    orders = np.array([16.0, 350.0, 1e3, 5e3])
    ratio = jaxdp.renyi(jaxdp.Shuffled(randomizer, 1e7), orders) / orders
    np.testing.assert_allclose(ratio, ratio[0], rtol=2e-3)


@pytest.mark.slow
def test_renyi_grows_with_the_order_up_to_eps0(compiled):
    order = np.array([1.01, 1.5, 2.0, 8.0, 64.0, 1e4])
    values = jaxdp.renyi(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 1e5), order)
    assert (np.diff(values) > 0).all() and values[0] > 0 and values[-1] <= 1.0


def test_golden_krr_delta_is_bounded_and_below_the_closed_form():
    cases = [case for case in GOLDEN if case["family"] == "krr"]
    users, eps0, kinds, delta, exact = (column(cases, key) for key in ("n", "eps0", "k", "delta", "eps"))
    lower, upper = jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, kinds), users), exact)
    assert (delta * (1 - 1e-9) <= upper).all() and (upper <= delta * (1 + 1e-8)).all()
    assert (0.3 * delta < lower).all() and (lower <= delta * (1 + 1e-9)).all()
    assert (exact <= krr_epsilon_closed_form(eps0, kinds, users, delta)).all()


def test_closed_form_of_krr_is_above_the_blanket_on_random_points():
    rng = np.random.default_rng(1)
    users, kinds = np.floor(10 ** rng.uniform(6, 9, 60)), np.floor(2 * 10 ** rng.uniform(0, 2.5, 60))
    eps0, delta = 10 ** rng.uniform(-2, 0.7, 60), 10 ** rng.uniform(-12, -0.5, 60)
    closed = krr_epsilon_closed_form(eps0, kinds, users, delta)
    holds = closed < eps0
    upper = jaxdp.epsilon(jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, kinds), users), delta)
    assert holds.sum() >= 20 and (closed[holds] >= upper[holds]).all()


def epsilon(x):
    return jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(x), 1e5), 1e-6)


@pytest.mark.thorough
def test_traced_epsilon_is_the_eager_one_and_its_gradient_that_of_differences():
    eps0, step = np.array([1.0, 2.0]), 1e-4
    with jax.enable_x64(True):
        run = jax.jit(jax.vmap(jax.value_and_grad(epsilon)), compiler_options=compiler_options("cpu"))
        values, slopes = map(np.asarray, run(eps0))
    np.testing.assert_allclose(values, epsilon(eps0), rtol=1e-6)
    difference = (epsilon(eps0 + step) - epsilon(eps0 - step)) / (2 * step)
    np.testing.assert_allclose(slopes, difference, rtol=SLOPE_GAP)


@pytest.mark.thorough
def test_the_slope_of_a_named_randomizers_epsilon_is_that_of_differences():
    """The implicit derivative, from the formula that traced verbs differentiate. The verb takes longer to compile."""
    local, step = 1.0, 1e-4

    def made(x):
        return jaxdp.Shuffled(jaxdp.RandomizedResponse(x, 10.0), 1e5)

    at = float(jaxdp.epsilon(made(local), 1e-6))
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        slopes = jax.jit(jax.jacfwd(lambda x, e: route.log_delta_estimate(made(x), e), argnums=(0, 1)))
        by_local, by_epsilon = map(float, slopes(local, at))
    above, below = (jaxdp.epsilon(made(x), 1e-6) for x in (local + step, local - step))
    np.testing.assert_allclose(-by_local / by_epsilon, (above - below) / (2 * step), rtol=SLOPE_GAP)


def test_a_traced_verb_without_x64_says_so():
    with jax.enable_x64(False), pytest.raises(RuntimeError, match="x64"):
        jax.jit(epsilon)(1.0)


def small_group(x, order):
    return jaxdp.renyi(jaxdp.Shuffled(jaxdp.RandomizedResponse(x, 10), 1e3), order)


EAGER = 0.0040293119162502075  # `small_group(1.0, 16.0)`, stored because it sums over counts for 3,000 epsilons


@pytest.mark.thorough
def test_eager_renyi_of_a_small_group(compiled_as_for_users):
    assert small_group(1.0, 16.0) == pytest.approx(EAGER, rel=RENYI_GAP)


@pytest.mark.slow
def test_traced_renyi_of_a_small_group_is_near_the_eager_one():
    """With the 13 nodes of one sum alone it would be 0.9 in place of 0.004 at order 16."""
    with jax.enable_x64(True):
        run = jax.jit(small_group, compiler_options=compiler_options("cpu"))
        value, largest = float(run(1.0, 16.0)), float(run(1.0, np.inf))
    assert EAGER * (1 - RENYI_GAP) <= value <= EAGER * 1.001
    assert 1.0 <= largest <= 1 + 1e-12


@pytest.mark.thorough
def test_the_gradient_of_a_traced_renyi_is_that_of_differences():
    local, order, step = 1.0, 2.0, 1e-3
    with jax.enable_x64(True):
        run = jax.jit(jax.grad(small_group, argnums=(0, 1)), compiler_options=compiler_options("cpu"))
        by_local, by_order = map(float, run(local, order))
    above, below = small_group(np.array([local + step, local - step]), order)
    assert by_local == pytest.approx((above - below) / (2 * step), rel=3e-3)
    above, below = small_group(local, np.array([order + step, order - step]))
    assert by_order == pytest.approx((above - below) / (2 * step), rel=3e-3)


@pytest.mark.thorough
def test_a_traced_table_may_have_equal_rows_and_a_first_pair_of_rows_with_a_small_loss():
    """The grid ended at the first pair's largest loss (Renyi: inf); an equal pair's slope, NaN, made all slopes 0."""

    def moment(table):
        return jaxdp.renyi(jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), 100), 2.0)

    table, moved = np.array([[0.5, 0.5], [0.5, 0.5], [0.2, 0.8]]), np.array([[0.0, 0.0], [0.0, 0.0], [1.0, -1.0]])
    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(moment)(jax.numpy.asarray(table))
    assert moment(table) * (1 - RENYI_GAP) <= float(value) <= moment(table) * 1.001
    above, below = (moment(table + step * moved) for step in (1e-4, -1e-4))
    assert float(np.sum(np.asarray(slope) * moved)) == pytest.approx((above - below) / 2e-4, rel=3e-3)


@pytest.mark.thorough
def test_the_infinite_order_of_a_randomizer_of_many_outcomes_needs_no_long_sums(monkeypatch):
    monkeypatch.delitem(bounds._KERNELS, "nodes")
    loss = jaxdp.renyi(jaxdp.Shuffled(jaxdp.LocalLaplace(0.0635563), 2), np.inf)
    assert 0.0635563 <= loss <= 0.0635563 * (1 + 1e-12)


def test_many_orders_of_one_round_share_their_points(monkeypatch):
    asked, plain = [], bounds.bounds

    def counted(verb, made, users, *rest):
        asked.append(users.size)
        return plain(verb, made, users, *rest)

    monkeypatch.setattr(bounds, "bounds", counted)
    mechanism = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), num_users=10**5)
    together = jaxdp.renyi(mechanism, np.geomspace(1.5, 256, 16))
    assert sum(asked) < 5 * rounds.MANY
    alone = [jaxdp.renyi(mechanism, order) for order in (1.5, 256.0)]
    np.testing.assert_allclose(together[[0, -1]], alone, rtol=1e-6)


def test_no_order_has_no_divergence():
    mechanism = jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, 10), num_users=1000)
    assert jaxdp.renyi(mechanism, np.ones((0, 3))).shape == (0, 3)
