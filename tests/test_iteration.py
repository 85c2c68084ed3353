"""Iteration: exact values, the optimum against a general solver, exactness, validity, bad input."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from exact import stored
from refusal import refused_in_one_line
from scipy import optimize
from two_ways import compiled

import jaxdp
from jaxdp import iteration
from jaxdp.iteration import isotonic
from jaxdp.runtime import precision
from jaxdp.runtime.backend import compiler_options

CASES = stored("iteration")
GOLDEN = 1e-10  # relative tolerance of every stored value, which has more digits
SOLVER = 1e-6  # relative accuracy of SLSQP, the less accurate side of the comparison
EXACT = 1e-10  # outward rounding of mu at these lengths is below 1e-11
GRID = 2e-4  # relative error of a divergence whose densities are discretised on a grid


def cases(family):
    found = [c for c in CASES if c["family"] == family]
    assert found, family
    return found


def numbers(inputs, *names):
    return [np.asarray(inputs[name], np.float64) for name in names]


def value_of(case, key="mu2"):
    value = case["value"]
    return float(value[key] if isinstance(value, dict) else value)


@pytest.mark.parametrize("case", cases("multi_pav_mu2") + cases("multi_pav_mu2_z0") + cases("single_opt_mu2"))
def test_optimal_allocation_equals_the_stored_value_and_never_falls_below(case):
    inputs = case["inputs"]
    kappa, variance = numbers(inputs, "c", "s2")
    shift = np.zeros(len(kappa))
    if "index" in inputs:
        shift[inputs["index"]] = float(inputs["d"])
    else:
        shift[:] = np.asarray(inputs["d"], np.float64)
    shift[0] += kappa[0] * float(inputs.get("z0", 0))
    mu2 = iteration.gdp_mu(kappa, np.sqrt(variance), shift) ** 2
    assert 0 <= mu2 / value_of(case) - 1 < GOLDEN


@pytest.mark.parametrize("case", cases("single_opt_eps_i"))
def test_per_index_optimum_equals_the_stored_value(case):
    c, sigma, eta, beta, rho = numbers(case["inputs"], "C", "sigma", "eta", "beta", "rho")
    kappa = np.full(case["inputs"]["n"], iteration.contraction(eta, beta, rho))
    mu = iteration.per_index_mu(kappa, eta * sigma, 2 * eta * c)[case["inputs"]["i"] - 1]
    assert abs(mu**2 / 2 / value_of(case) - 1) < GOLDEN


def test_published_theorems_equal_the_stored_values():
    for case in cases("thm5_eps_i"):
        c, sigma, eta, beta, rho, n, i = numbers(case["inputs"], "C", "sigma", "eta", "beta", "rho", "n", "i")
        got = iteration.noisy_sgd_rdp_at_index(
            1, lipschitz=c, step_size=eta, smoothness=beta, strong_convexity=rho, noise_std=sigma, num_steps=n, index=i
        )
        assert abs(got / value_of(case) - 1) < GOLDEN
    for case in cases("thm4_eq3"):
        alpha, moved, lip, r, sigma = numbers(case["inputs"], "alpha", "Delta", "L", "r", "sigma")
        got = iteration.shifted_rdp_path(alpha, contraction=lip, noise_std=sigma, distance=moved, num_steps=r)
        assert abs(got / value_of(case) - 1) < GOLDEN
    for case in cases("bok_ngd_table"):
        mu, t, kappa = numbers(case["inputs"], "mu", "t", "c")
        assert abs(iteration.full_batch_mu(kappa, 1, mu, t) / value_of(case) - 1) < GOLDEN
        assert abs(iteration.gdp_mu(np.full(int(t), kappa), 1, mu) / value_of(case) - 1) < GOLDEN
    for case in cases("bok_ncgd_table"):
        mu, epochs, length, kappa = numbers(case["inputs"], "mu", "E", "l", "c")
        assert abs(iteration.cyclic_mu(kappa, 1, mu, length, epochs) / value_of(case) - 1) < GOLDEN


def random_schedule(rng, steps, *, largest=1.3):
    kappa = rng.uniform(0.6, largest, steps)
    noise = rng.uniform(0.3, 2.0, steps)
    shift = rng.uniform(0, 1, steps) * (rng.random(steps) < 0.6)
    shift[-1] = 0.5
    return kappa, noise, shift


def test_optimum_equals_a_general_solver():
    rng = np.random.default_rng(1)
    for _ in range(8):
        kappa, noise, shift = random_schedule(rng, 6)
        to_end = np.append(np.cumprod(kappa[::-1])[::-1][1:], 1.0)
        moved = np.cumsum(to_end * shift)

        def cost(y, v=(to_end * noise) ** 2):
            return np.sum(y**2 / v), 2 * y / v

        constraints = [
            {"type": "ineq", "fun": lambda y, m=moved: (m - np.cumsum(y))[:-1]},
            {"type": "eq", "fun": lambda y, m=moved: m[-1] - y.sum()},
        ]
        solved = optimize.minimize(
            cost,
            to_end * shift,
            jac=True,
            bounds=[(0, None)] * 6,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert abs(iteration.gdp_mu(kappa, noise, shift) ** 2 / solved.fun - 1) < SOLVER


def rational_mu2(contraction, noise_std, shift):
    """mu^2 by the stack algorithm in exact rationals; None where a block without noise remains (mu is infinite)."""
    blocks = []
    for kappa, noise, moved in zip(*(map(Fraction, a) for a in (contraction, noise_std, shift)), strict=True):
        blocks = [(d * kappa, v * kappa**2) for d, v in blocks]
        if moved == 0 and (noise == 0 or not blocks):
            continue
        d, v = moved, noise**2
        while blocks and blocks[-1][0] * v >= d * blocks[-1][1]:
            below = blocks.pop()
            d, v = d + below[0], v + below[1]
        blocks.append((d, v))
    return None if any(v == 0 for _, v in blocks) else sum(d**2 / v for d, v in blocks)


@pytest.mark.parametrize("decades", [0.3, 3.0, 12.0])
def test_rounded_optimum_never_falls_below_exact_rationals_over_many_decades(decades):
    rng = np.random.default_rng(11)
    kappa, noise, shift = (10 ** rng.uniform(-decades, decades, (40, 14)) for _ in range(3))
    noise *= rng.random(noise.shape) < 0.8
    shift *= rng.random(shift.shape) < 0.5
    for mu, row in zip(iteration.gdp_mu(kappa, noise, shift), zip(kappa, noise, shift, strict=True), strict=True):
        exact = rational_mu2(*row)
        if exact is None:
            assert np.isinf(mu)
        elif Fraction(10) ** -290 < exact < Fraction(10) ** 290:
            assert 0 <= Fraction(float(mu)) ** 2 / exact - 1 < EXACT


@pytest.mark.thorough
def test_diameter_equals_the_best_restart_and_a_large_one_changes_nothing():
    rng = np.random.default_rng(2)
    for _ in range(10):
        kappa, noise, shift = random_schedule(rng, 8)
        diameter = rng.uniform(0, 2)
        restarts = [iteration.gdp_mu(kappa, noise, shift)]
        for k in range(1, 8):
            further = shift[k:].copy()
            further[0] += kappa[k] * diameter
            restarts.append(iteration.gdp_mu(kappa[k:], noise[k:], further))
        bounded = iteration.gdp_mu(kappa, noise, shift, diameter=diameter)
        assert abs(bounded / min(restarts) - 1) < EXACT
        assert abs(iteration.gdp_mu(kappa, noise, shift, diameter=1e6) / restarts[0] - 1) < EXACT


def test_cyclic_participation_equals_one_schedule_per_record():
    rng = np.random.default_rng(3)
    kappa, noise, shift = random_schedule(rng, 23)
    steps = iteration.cyclic_participation(5, 23)
    together = iteration.participation_mu(kappa, noise, shift, steps)
    for row, mu in zip(steps, together, strict=True):
        alone = np.zeros(23)
        alone[row[row < 23]] = shift[row[row < 23]]
        assert mu == pytest.approx(iteration.gdp_mu(kappa, noise, alone), rel=EXACT)


def test_single_participation_equals_the_general_allocation_at_every_index():
    kappa, noise, shift = random_schedule(np.random.default_rng(4), 12)
    rows = np.diag(shift)
    general = iteration.gdp_mu(kappa, noise, rows)
    assert iteration.per_index_mu(kappa, noise, shift) == pytest.approx(general, rel=EXACT, abs=1e-140)


def test_steps_that_nearly_reach_the_optimum_are_not_contracted_too_much():
    step, beta = 7.099387123153666, 0.1408572293147163  # their product is 1 - 5.2e-17
    assert iteration.contraction(step, beta, beta) >= 5.2e-17
    given = dict(lipschitz=0.3574465939482433, step_size=0.22366000059106192, noise_std=73187.85654920127)
    beta = 4.471072151289097
    found = iteration.noisy_sgd_rdp_at_index(
        2.0, **given, smoothness=beta, strong_convexity=beta, num_steps=1e6, index=999999.0
    )
    assert found >= 3.47e-27


def test_published_bounds_are_not_below_by_a_slack_or_an_underflow():
    given = dict(contraction=1.0, noise_std=1.0)
    assert iteration.contractive_iteration_rdp(2.0, [1 - 9.9e-13, 0.0], shift=[1.0, 0.0], **given) >= 1
    assert iteration.shifted_rdp_optimum(1e300, distance=1e-200, num_steps=1, **given) >= 5e-101
    with pytest.raises(ValueError, match="allocation must be an array with one entry per step"):
        iteration.contractive_iteration_rdp(2.0, 1.0, shift=1.0, **given)


def test_a_contraction_of_0_erases_earlier_steps_from_both_bounds():
    with_reset = jaxdp.NoisyIteration([0.9, 0.0, 0.9], 1.0, 1.0)
    without_earlier = jaxdp.NoisyIteration([1.0, 1.0, 0.9], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    lower, upper = jaxdp.epsilon_bounds(with_reset, 1e-6)
    assert upper * (1 - 1e-9) < lower <= upper
    np.testing.assert_allclose((lower, upper), jaxdp.epsilon_bounds(without_earlier, 1e-6), rtol=1e-10)
    assert jaxdp.epsilon(jaxdp.NoisyIteration([1.0, 0.0], [1.0, 0.0], [1.0, 0.0]), 1e-6) < 1e-100


@pytest.mark.parametrize("kappa", [1e-100, 1e-200, 1e-300])
def test_steps_without_noise_after_a_tiny_contraction_hide_nothing(kappa):
    schedule = np.full(3, kappa), np.array([1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0])
    with jax.enable_x64(True):
        for mu in (iteration.per_index_mu(*schedule), jax.jit(iteration.per_index_mu)(*schedule)):
            np.testing.assert_allclose(mu, [1.0, 0.0, 0.0], rtol=EXACT)


def test_long_schedules_neither_overflow_nor_underflow():
    for kappa in (1e-3, 0.9, 1.0, 1.1, 1e3):
        mu = iteration.gdp_mu(np.full(3000, kappa), 1.0, np.full(3000, 0.1))
        assert np.isfinite(mu)
        assert mu >= 0.1
    last_noise_only = np.r_[1.0, np.zeros(2999)]
    assert 0 < iteration.gdp_mu(np.full(3000, 0.5), 1.0, last_noise_only) < 1e-100
    # Exact for one participation and an expanding map: 1 / sum of 1.1^(-2k).
    growing = iteration.gdp_mu(np.full(3000, 1.1), 1.0, last_noise_only) ** 2
    assert growing == pytest.approx(1 - 1.1**-2, rel=1e-8)  # outward slack 3e-9


def test_noiseless_step_is_infinite_unless_later_noise_hides_it():
    assert np.isinf(iteration.gdp_mu([1.0, 1.0], [1.0, 0.0], [0.0, 1.0]))
    assert iteration.gdp_mu([1.0, 1.0], [0.0, 2.0], [1.0, 0.0]) == pytest.approx(0.5, rel=EXACT)
    assert iteration.gdp_mu([1.0, 1.0], [1.0, 0.0], [1.0, 0.0]) == pytest.approx(1.0, rel=EXACT)


def test_a_noiseless_step_is_told_from_one_of_hardly_any_noise_and_a_tiny_optimum_does_not_vanish():
    assert iteration.gdp_mu([1.0, 1.0], [1.0, 0.0], [1.0, 1e-150]) == np.inf
    assert iteration.gdp_mu([1.0, 1.0], [1.0, 1e-170], [1.0, 1e-150]) == pytest.approx(1e20, rel=1e-10)
    assert iteration.gdp_mu([1.0, 1e-160], [1.0, 1.0], [1e80, 0.0]) == pytest.approx(1e-80, rel=1e-10, abs=0)
    shrinking, moved = np.full(155, 0.1), np.zeros(155)
    moved[0] = 1e10
    hidden = np.sum(0.01 ** np.arange(155.0))  # variance at the end; the distance is 1e10 x 1e-154
    exact = 1e-144 / np.sqrt(hidden)
    assert exact <= iteration.gdp_mu(shrinking, np.ones(155), moved) <= exact * (1 + 1e-9)
    exact = 1e5 * 1e-155 / np.sqrt(hidden) * 10  # a distance of the diameter, before the second step
    found = iteration.gdp_mu(shrinking, np.ones(155), moved, diameter=1e5)
    assert 1e-150 < found <= exact * (1 + 1e-9)


def test_quadratic_losses_attain_the_bound():
    for eta_h in (0.1, 0.5, 0.9):
        factor = np.full(40, 1 - eta_h)
        shift = np.full(40, 0.3)
        exact = iteration.quadratic_mu(factor, 1.0, shift)
        assert iteration.gdp_mu(factor, 1.0, shift) == pytest.approx(exact, rel=EXACT)


def test_nonlinear_chains_on_exact_grids_never_exceed_the_bound():
    grid = np.linspace(-9, 9, 1801)
    width = grid[1] - grid[0]
    rng = np.random.default_rng(5)
    for _ in range(4):
        steps = 5
        kappa, noise, shift = rng.uniform(0.5, 1.1, steps), rng.uniform(0.6, 1.2, steps), rng.uniform(0, 0.6, steps)
        frequency = rng.uniform(0.3, 1.0, steps)
        mu = iteration.gdp_mu(kappa, noise, shift)
        laws = []
        for sign in (1.0, -1.0):
            law = None
            for k, s, d, w in zip(kappa, noise, shift, frequency, strict=True):
                start = np.zeros(1) if law is None else grid
                mean = k * np.sin(w * start) / w + sign * d / 2
                rows = np.exp(-0.5 * ((grid[None, :] - mean[:, None]) / s) ** 2)
                rows /= rows.sum(axis=1, keepdims=True)
                law = rows[0] if law is None else law @ rows
            laws.append(law / width)
        for alpha in (1.5, 4.0):
            divergence = np.log(np.sum(laws[0] ** alpha * laws[1] ** (1 - alpha)) * width) / (alpha - 1)
            assert divergence <= alpha * mu**2 / 2 * (1 + GRID)
            assert divergence > 0.02 * alpha * mu**2 / 2  # the comparison is not empty


def test_published_bounds_are_never_below_the_optimum():
    n = 60
    for rho in (0.0, 0.05, 0.5):
        kappa = iteration.contraction(0.5, 1.0, rho)
        ours = iteration.per_index_mu(np.full(n, kappa), 0.5 * 2.0, 2 * 0.5 * 1.0) ** 2 / 2
        common = {"lipschitz": 1, "step_size": 0.5, "smoothness": 1, "noise_std": 2.0, "num_steps": n}
        index = np.arange(1, n + 1)
        balle = iteration.noisy_sgd_rdp_at_index(1, strong_convexity=rho, index=index, **common)
        feldman = iteration.feldman_rdp_at_index(1, index=index, **common)
        assert (balle >= ours * (1 - EXACT)).all()
        assert (feldman >= ours * (1 - EXACT)).all()
        if rho == 0:
            assert feldman == pytest.approx(ours, rel=EXACT)


def test_equation_three_relaxes_the_minimum_of_equation_two():
    lip, r = 0.8, 6
    powers = lip ** -np.arange(r)
    weights = lip ** (-2.0 * np.arange(1, r + 1)[::-1])
    path = weights / weights.sum()
    best = iteration.shifted_rdp_optimum(2, contraction=lip, noise_std=1, distance=1, num_steps=r)
    assert iteration.shifted_rdp(2, contraction=lip, noise_std=1, distances=path) == pytest.approx(best, rel=EXACT)
    assert iteration.shifted_rdp(2, contraction=lip, noise_std=1, distances=powers / powers.sum()) > best
    assert iteration.shifted_rdp_path(2, contraction=lip, noise_std=1, distance=1, num_steps=r) > best


def test_any_feasible_allocation_is_no_cheaper_than_the_optimum():
    kappa, noise, shift = np.array([0.9, 0.8, 1.0]), np.ones(3), np.array([1.0, 0.5, 0.2])
    everything_at_once = iteration.contractive_iteration_rdp(2, shift, contraction=kappa, noise_std=noise, shift=shift)
    assert everything_at_once > iteration.gdp_mu(kappa, noise, shift) ** 2
    with pytest.raises(ValueError, match="distance that allocation leaves must be 0, got"):
        iteration.contractive_iteration_rdp(2, [0.5, 0.5, 0.2], contraction=kappa, noise_std=noise, shift=shift)


def test_noise_only_tail_matches_its_closed_form():
    kappa = 0.9
    longer = iteration.append_noise_only([kappa], [1.0], [1.0], steps=10, tail=(kappa, 1.0))
    assert iteration.gdp_mu(*longer) ** 2 == pytest.approx(1 / np.sum(kappa ** (-2.0 * np.arange(11))), rel=EXACT)


@pytest.mark.parametrize("forgets", [False, True])  # a step of contraction 0, or one without noise
def test_gradient_equals_finite_differences_in_all_three_arrays(forgets):
    rng = np.random.default_rng(7)
    schedule = list(random_schedule(rng, 7))
    schedule[2] += 0.05
    schedule[0][2], schedule[1][4] = (0.0, schedule[1][4]) if forgets else (schedule[0][2], 0.0)
    gradients = compiled(jax.grad(isotonic.shift_allocation_mu2, argnums=(0, 1, 2)), *schedule)
    for part in range(3):
        for j in np.flatnonzero(schedule[part]):
            up, down = ([a.copy() for a in schedule] for _ in range(2))
            up[part][j] += 1e-6
            down[part][j] -= 1e-6
            larger, smaller = isotonic.allocation(*(np.stack(both) for both in zip(up, down, strict=True)))
            slope = (larger - smaller) / 2e-6
            assert gradients[part][j] == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_traced_and_batched_values_agree_and_bad_traced_values_are_infinite():
    rows = [np.stack(a) for a in zip(*(random_schedule(np.random.default_rng(s), 9) for s in range(3)), strict=True)]
    grid = iteration.gdp_mu(*rows)
    with jax.enable_x64(True):
        options = compiler_options("cpu")
        traced = jax.jit(jax.vmap(iteration.gdp_mu), compiler_options=options)(*rows)
        assert np.asarray(traced) == pytest.approx(grid, rel=1e-14)
        rows[1][1, 3] = -1.0
        together = jax.jit(iteration.gdp_mu, compiler_options=options)(*rows)
        assert np.isinf(np.asarray(together)).tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match="float64"):
        jax.jit(iteration.gdp_mu)(*rows)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("place", [1, 2])
def test_the_derivative_where_a_number_is_no_schedule_is_zero(bad, place):
    schedule = [np.array([0.9, 0.8]), np.array([1.0, 1.0]), np.array([1.0, 0.5])]
    schedule[place][1] = bad
    with jax.enable_x64(True):
        value, slopes = jax.value_and_grad(iteration.gdp_mu, argnums=(0, 1, 2))(*schedule)
    assert np.isinf(value) and not np.any(slopes)


def test_a_record_of_steps_is_answered_by_a_program_too(monkeypatch):
    noisy = jaxdp.NoisyIteration([0.9] * 3, [1.0] * 3, [0.1] * 3)
    by_numpy = jaxdp.epsilon(noisy, 1e-6)
    monkeypatch.setattr(precision, "_COMPILE_AFTER", 0)
    assert abs(jaxdp.epsilon(noisy, 1e-6) / by_numpy - 1) < 1e-12


def test_a_schedule_without_steps_loses_nothing_also_between_projections():
    assert iteration.per_index_mu([], 1.0, 1.0).shape == (0,)
    assert (iteration.participation_mu([], 1.0, 1.0, [[0, 0]]) == [0.0]).all()
    assert iteration.gdp_mu([], [], []) == 0
    assert iteration.gdp_mu([], [], [], diameter=1.0) == 0
    assert iteration.gdp_mu(np.ones((3, 0)), 1.0, 0.0, diameter=np.ones(3)).tolist() == [0, 0, 0]


def test_new_values_of_the_same_shape_do_not_recompile():
    schedule = random_schedule(np.random.default_rng(8), 17)
    iteration.gdp_mu(*schedule)
    before = isotonic.allocation.traces
    iteration.gdp_mu(schedule[0] * 0.9, schedule[1], schedule[2])
    assert isotonic.allocation.traces == before


def test_constants_of_logistic_regression_bound_the_loss_on_a_grid():
    bound, penalty = 1.5, 0.1
    constants = iteration.logistic_regression(bound, penalty)
    w = np.linspace(-20, 20, 4001)
    p = 1 / (1 + np.exp(-bound * w))
    assert np.max(bound * p) <= constants.lipschitz
    assert np.max(bound**2 * p * (1 - p)) + penalty == pytest.approx(constants.smoothness, rel=1e-9)
    assert iteration.softmax_regression(bound, penalty).smoothness == pytest.approx(bound**2 / 2 + penalty)


@pytest.mark.parametrize("constants", [iteration.logistic_regression, iteration.softmax_regression])
@pytest.mark.parametrize("bad", [(-1.0, 0.1), (np.nan, 0.1), (1.0, -0.1), (1.0, np.nan)])
def test_traced_constants_of_bad_numbers_promise_nothing(constants, bad):
    with jax.enable_x64(True):
        assert jax.jit(constants)(*bad) == (np.inf, np.inf, 0.0)


@pytest.mark.parametrize("bad", [{"index": 2.5}, {"index": 11.0}, {"step_size": 1.9}, {"noise_std": np.inf}])
def test_a_traced_index_theorem_promises_nothing_for_numbers_outside_its_range(bad):
    good = {"lipschitz": 1.0, "step_size": 0.5, "smoothness": 1.0, "strong_convexity": 0.1, "noise_std": 4.0}
    good |= {"num_steps": 10.0, "index": 2.0}
    call = jax.jit(lambda given: iteration.noisy_sgd_rdp_at_index(2.0, **given))
    with jax.enable_x64(True):
        assert call(good | bad) == np.inf
        assert call(good) == pytest.approx(iteration.noisy_sgd_rdp_at_index(2.0, **good), rel=1e-14)
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        iteration.noisy_sgd_rdp_at_index(2.0, **good | bad)


def test_sharp_contraction_is_never_above_the_published_one_and_both_are_right_on_a_quadratic():
    eta = np.linspace(0.01, 2 / 1.1, 30)
    sharp = iteration.contraction(eta, 1.0, 0.1)
    published = iteration.contraction(eta, 1.0, 0.1, published=True)
    assert (sharp <= published * (1 + 1e-14)).all()
    assert sharp[-1] == pytest.approx(published[-1], rel=1e-9)
    assert sharp == pytest.approx(np.maximum(abs(1 - eta), abs(1 - 0.1 * eta)), rel=1e-14)


def test_the_published_contraction_is_not_below_the_sharp_one_where_both_vanish():
    beta = np.concatenate([[4.875490645107482, 1.0], np.random.default_rng(3).uniform(0.1, 10, 200)])
    rho = beta * np.concatenate([[1.0, 0.9999999999], np.ones(200)])
    step = 2 / (beta + rho)
    published = iteration.contraction(step, beta, rho, published=True)
    exact = [max(abs(1 - Fraction(e) * Fraction(b)), abs(1 - Fraction(e) * Fraction(r)))
             for e, b, r in zip(step, beta, rho, strict=True)]  # fmt: skip
    assert all(Fraction(value) >= least for value, least in zip(published, exact, strict=True))
    assert (published < 1e-7).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iteration.contraction(2.5, 1.0), "step_size"),
        (lambda: iteration.contraction(1.9, 1.0, 0.5, published=True), "step_size"),
        (lambda: iteration.contraction(0.1, 1.0, 2.0), "strong_convexity"),
        (lambda: iteration.gdp_mu([0.0, 1.0], 1.0, 1.0), "contraction"),
        (lambda: iteration.gdp_mu([1.0, 1.0], [1.0, -1.0], 1.0), "noise_std"),
        (lambda: iteration.gdp_mu([1.0, 1.0], np.ones(3), 1.0), r"broadcast: contraction \(2,\), noise_std \(3,\)"),
        (lambda: iteration.gdp_mu(1.0, 1.0, 1.0), "last axis"),
        (lambda: iteration.gdp_mu([np.nan], 1.0, 1.0), "contraction"),
        (lambda: iteration.participation_mu([1.0, 1.0], 1.0, 1.0, [[3]]), "steps"),
        (lambda: iteration.participation_mu([1.0, 1.0], 1.0, 1.0, [[1, 0]]), "increasing"),
        (lambda: iteration.cyclic_mu(1.1, 1, 1, 3, 3), "gdp_mu"),
        (lambda: iteration.full_batch_mu(0.9, 0.0, 1, 3), "noise_std"),
        (
            lambda: iteration.feldman_rdp_at_index(
                2, lipschitz=1, step_size=1, smoothness=1, noise_std=1, num_steps=5, index=6
            ),
            "index",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(call, message):
    with refused_in_one_line(ValueError, message):
        call()


@pytest.mark.parametrize("steps", [800, 1000, 2000])
def test_a_quadratic_loss_that_expands_has_a_parameter_however_far_it_goes(steps):
    assert iteration.quadratic_mu(np.full(steps, 1.5), 1.0, 1.0) == pytest.approx(np.sqrt(5.0), rel=1e-13)
    assert iteration.quadratic_mu([1.0, 1.0], 1e160, 1e160) == pytest.approx(np.sqrt(2.0), rel=1e-14)
    with pytest.raises(TypeError, match="must be concrete"):
        jax.jit(lambda x: iteration.quadratic_mu([x], 1.0, 1.0))(1.0)


def test_a_coupling_without_distance_costs_nothing_however_far_back():
    path = np.r_[np.zeros(1750), np.ones(10)]
    exact = sum(1.5 ** (2 * k) for k in range(1, 11))
    assert iteration.shifted_rdp(2.0, contraction=1.5, noise_std=1.0, distances=path) == pytest.approx(exact, rel=1e-12)


def test_closed_forms_have_their_derivatives_where_nothing_contracts():
    """Derivatives at kappa = 1, by hand or by a one-sided difference."""
    with jax.enable_x64(True):
        full = jax.grad(lambda k: iteration.full_batch_mu(k, 1.0, 1.0, 10))(1.0)
        cyclic = jax.grad(lambda k: iteration.cyclic_mu(k, 1.0, 1.0, 2, 10))(1.0)
        optimum = {"noise_std": 1.0, "distance": 1.0, "num_steps": 10}
        shifted = jax.grad(lambda k: iteration.shifted_rdp_optimum(2.0, contraction=k, **optimum))(1.0)
        numbers = {"lipschitz": 1.0, "smoothness": 1.0, "strong_convexity": 1.0, "noise_std": 1.0, "num_steps": 10}
        index = jax.grad(lambda k: iteration.noisy_sgd_rdp_at_index(2.0, step_size=k, index=1, **numbers))(1.0)
    assert np.array([full, shifted, index]) == pytest.approx(np.array([0.0, 1.1, 0.0]), abs=1e-9)
    below = [float(iteration.cyclic_mu(1 - h, 1.0, 1.0, 2, 10)) for h in (1e-5, 2e-5)]
    at = float(iteration.cyclic_mu(1.0, 1.0, 1.0, 2, 10))
    assert float(cyclic) == pytest.approx((3 * at - 4 * below[0] + below[1]) / 2e-5, rel=1e-5)


def test_published_bounds_are_not_rounded_to_nothing():
    assert iteration.shifted_rdp_optimum(2.0, contraction=0.5, noise_std=1.0, distance=1.0, num_steps=600) > 0
    assert iteration.shifted_rdp_path(2.0, contraction=0.999, noise_std=1.0, distance=1.0, num_steps=10**6) > 0
    assert iteration.shifted_rdp(2.0, contraction=0.1, noise_std=1.0, distances=[1e-200, 0.0]) > 0
    assert iteration.full_batch_mu(0.9, 1.0, 0.0, 5) == 0
    exact = 5 * mpmath.mpf(0.3) ** 2 / 2 / sum(mpmath.mpf(0.9) ** (-2 * k) for k in range(1, 8))
    found = iteration.shifted_rdp_optimum(5.0, contraction=0.9, noise_std=1.0, distance=0.3, num_steps=7)
    assert exact <= found <= exact * (1 + mpmath.mpf("1e-12"))


def test_noise_behind_a_tiny_contraction_is_not_more_than_there_is():
    """The square of the contraction underflows; taking it for 0 gives a mu of 1e-150."""
    assert iteration.per_index_mu([1.0, 1e-165], [1.0, 1e-160], [1.0, 0.0])[0] >= 1e-5
    with jax.enable_x64(True):
        mu = jax.jit(lambda kappa: iteration.per_index_mu(kappa, jnp.array([1.0, 1e-150]), jnp.array([1.0, 0.0])))
        assert mu(jnp.array([1.0, 1e-156]))[0] >= 1e-6
    # here the square of the noise underflows
    assert iteration.per_index_mu(1.0, [1.0, 1.6e-162], [0.0, 1e-100])[1] >= 6.25e61


def test_a_factor_that_underflows_is_not_forgotten():
    given, square = dict(contraction=0.5, noise_std=1.0, distance=1e150), mpmath.mpf(1e150) ** 2
    path = square * mpmath.mpf(0.5) ** 1101 / 1100  # equation (3) of Balle et al. 2019
    optimum = square / mpmath.fsum(mpmath.mpf(4) ** k for k in range(1, 551))
    assert iteration.shifted_rdp_path(2.0, num_steps=1100, **given) == pytest.approx(float(path), rel=1e-9, abs=0)
    assert iteration.shifted_rdp_optimum(2.0, num_steps=550, **given) == pytest.approx(float(optimum), rel=1e-9, abs=0)
    given = dict(lipschitz=1.0, step_size=0.5, smoothness=1.0, noise_std=1e165, num_steps=1, index=1)
    for value in (
        iteration.feldman_rdp_at_index(1e100, **given),
        iteration.noisy_sgd_rdp_at_index(1e100, strong_convexity=0.5, **given),
        4 * iteration.contractive_iteration_rdp(1e100, [1.0], contraction=1.0, noise_std=1e165, shift=[1.0]),
    ):
        assert 2e-230 <= value <= 2e-230 * (1 + 1e-11)
    assert 1e-305 <= iteration.full_batch_mu(1.0, noise_std=1e154, shift=1e-154, num_steps=1e6) <= 1e-305 * (1 + 1e-11)


def test_runs_that_are_never_apart_cost_next_to_nothing():
    assert iteration.gdp_mu(0.9, 1.0, [1.0, 0.0], diameter=0.0) < 1e-100


@pytest.mark.parametrize("unit", [1e-160, 1e160])
def test_neither_bounds_nor_derivatives_depend_on_the_unit_of_length(unit):
    contraction, ones = np.full(4, 0.9), np.ones(4)
    per_index = jaxdp.iteration.per_index_mu(contraction, ones * unit, ones * unit)
    np.testing.assert_allclose(per_index, jaxdp.iteration.per_index_mu(contraction, ones, ones), rtol=1e-12)
    with jax.enable_x64(True):
        found, expected = (
            jax.grad(lambda k, scale: jaxdp.iteration.gdp_mu(k, ones * scale, ones * scale))(contraction, scale)
            for scale in (unit, 1.0)
        )
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_the_derivative_of_mu_is_finite_where_nothing_depends_on_the_data():
    ones = jnp.ones(3)
    with jax.enable_x64(True):
        slopes = jax.grad(lambda c, d: jaxdp.iteration.gdp_mu(c * ones, ones, d * ones), argnums=(0, 1))(1.0, 0.0)
    assert np.all(np.isfinite(slopes))
