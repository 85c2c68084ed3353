"""The noise convention: a noise multiplier is noise divided by the norm bound of one record's contribution.

It is the same in every relation and under every sampling. The sums over two data sets that are neighbours under
replace_one can therefore differ by two norm bounds.
"""

import itertools

import jax
import numpy as np
import pytest
from exact import gaussian_delta, hockey_stick, laplace_delta

import jaxdp
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options
from jaxdp.sources import contour

RELATIONS = ("add", "remove", "add_or_remove", "replace_one")
NOISES = {
    "Gaussian": jaxdp.Gaussian(1.3),
    "Laplace": jaxdp.Laplace(1.7),
    "DiscreteGaussian": jaxdp.DiscreteGaussian(1.5),
    "DiscreteLaplace": jaxdp.DiscreteLaplace(1.2, 2),
}
# Mechanisms given by a guarantee, not by noise. The guarantee holds in whichever relation the caller asks for.
STATED = {
    "PureDP": jaxdp.PureDP(0.7),
    "ApproximateDP": jaxdp.ApproximateDP(0.7, 1e-6),
    "RandomizedResponse": jaxdp.RandomizedResponse(1.1, 4),
    "DiscretePair": jaxdp.DiscretePair([0.7, 0.2, 0.1], [0.1, 0.2, 0.7]),
    "NoisyIteration": jaxdp.NoisyIteration([0.9, 0.9], [1.0, 1.0], [1.0, 0.0]),
}
BATCH, RECORDS = 2, 4  # batch size and number of records of the data sets that are enumerated
ROUNDING = 1e-12  # relative: rounding of sums of a few hundred doubles, and the margin that the verbs add outward


def integer_gaussian(sigma, reach=40):
    x = np.arange(-reach, reach + 1)
    density = np.exp(-0.5 * (x / sigma) ** 2)
    return lambda shift: np.exp(-0.5 * ((x - shift) / sigma) ** 2) / density.sum()


def integer_noise(scale, reach=120):
    x = np.arange(-reach, reach + 1)
    density = np.exp(-np.abs(x) / scale)
    return lambda shift: np.exp(-np.abs(x - shift) / scale) / density.sum()


def shifted(mass, shift, reach=160):
    """Normalised masses of integer noise: (shifted, unshifted). mass: unnormalised mass at an array of integers."""
    x = np.arange(-reach, reach + 1)
    total = mass(x).sum()
    return mass(x - shift) / total, mass(x) / total


def two_bounds_apart(name, eps):
    """Exact delta under replace_one at eps >= 0: the hockey-stick divergence of noise shifted by two norm bounds."""
    if name == "Gaussian":
        return gaussian_delta(eps, 2 / 1.3)
    if name == "Laplace":
        return laplace_delta(eps, 1.7, 2.0)
    if name == "DiscreteGaussian":
        return hockey_stick(*shifted(lambda x: np.exp(-(x**2) / (2 * 1.5**2)), 2), eps)
    return hockey_stick(*shifted(lambda x: np.exp(-np.abs(x) / 1.2), 4), eps)


@pytest.mark.parametrize("name", NOISES)
def test_under_replace_one_two_data_sets_are_two_norm_bounds_apart(name):
    eps = np.array([0.0, 0.3, 0.9, 1.1])
    exact = two_bounds_apart(name, eps)
    found = jaxdp.delta_bounds(NOISES[name], eps, relation="replace_one")
    assert np.all(found.lower <= exact * (1 + ROUNDING)) and np.all(exact <= found.upper * (1 + ROUNDING))
    assert found.upper == pytest.approx(exact, rel=1e-5)
    # under the default relation add_or_remove the shift is one norm bound, so delta is smaller
    assert np.all(jaxdp.delta(NOISES[name], eps) < 0.8 * exact)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", [*NOISES, *STATED])
def test_sampling_everyone_and_composing_once_change_nothing(name, relation):
    mechanism = (NOISES | STATED)[name]
    equivalents = (
        jaxdp.PoissonSampled(mechanism, 1.0),
        jaxdp.FixedSizeSampled(mechanism, 1.0),
        jaxdp.compose(mechanism),
        jaxdp.repeat(mechanism, 1),
        jaxdp.repeat(jaxdp.compose(jaxdp.PoissonSampled(jaxdp.compose(mechanism), 1.0)), 1)
        if name == "Gaussian"
        else jaxdp.compose(jaxdp.repeat(jaxdp.FixedSizeSampled(mechanism, np.ones(())), 1)),
    )
    number = jaxdp.epsilon_bounds(mechanism, 1e-5, relation=relation)
    assert 0 < number.lower <= number.upper < np.inf
    for other in equivalents:
        assert jaxdp.epsilon_bounds(other, 1e-5, relation=relation) == number


@pytest.mark.parametrize("name", STATED)
def test_a_guarantee_that_is_not_noise_is_the_callers_in_every_relation(name):
    levels = {r: jaxdp.epsilon(STATED[name], 1e-5, relation=r) for r in RELATIONS}
    assert levels["replace_one"] == levels["add_or_remove"]


def test_a_grid_in_which_some_rates_are_one_gives_those_the_mechanisms_own_number():
    rates = np.array([0.2, 1.0])
    for base, relation in itertools.product((NOISES["Gaussian"], NOISES["DiscreteLaplace"]), ("remove", "replace_one")):
        whole = jaxdp.epsilon(base, 1e-5, relation=relation)
        for kind in (jaxdp.PoissonSampled, jaxdp.FixedSizeSampled):
            found = jaxdp.epsilon_bounds(kind(base, rates), 1e-5, relation=relation)
            assert found.upper[1] == pytest.approx(whole, rel=1e-6)
            assert found.lower[1] <= whole <= found.upper[1] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("one", "half"),
    [
        (jaxdp.Gaussian(1.3), jaxdp.Gaussian(0.65)),
        (jaxdp.Laplace(1.7), jaxdp.Laplace(0.85)),
        (jaxdp.DiscreteLaplace(1.2, 2), jaxdp.DiscreteLaplace(1.2, 4)),
    ],
)
def test_every_verb_follows_the_convention(one, half, monkeypatch):
    # Few nodes, to save time. Both sides of each equation use the same nodes, so their bounds are equally wide.
    small = contour.PLAIN_LADDER[0]
    monkeypatch.setattr(contour, "PLAIN_LADDER", (small, small._replace(nodes=4096)))
    for verb, value in ((jaxdp.renyi, 4.0), (jaxdp.log_mgf, 0.5 + 1j), (jaxdp.tradeoff, 0.1), (jaxdp.delta, 0.4)):
        assert verb(one, value, relation="replace_one") == verb(half, value, relation="remove")


def test_the_trade_off_of_a_whole_sample_and_calibration_follow_the_convention():
    sampled = jaxdp.PoissonSampled(jaxdp.Gaussian(1.3), 1.0)
    assert jaxdp.tradeoff(sampled, 0.1, relation="replace_one") == jaxdp.tradeoff(jaxdp.Gaussian(0.65), 0.1)
    found = jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-5, bracket=(0.1, 100), relation="replace_one")
    once = jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-5, bracket=(0.1, 100))
    assert found == pytest.approx(2 * once, rel=1e-6)


def test_a_composition_under_replace_one_counts_every_part_two_bounds_apart():
    parts = (
        jaxdp.Gaussian(3.0),
        jaxdp.PoissonSampled(jaxdp.Gaussian(4.0), 1.0),
        jaxdp.FixedSizeSampled(jaxdp.compose(jaxdp.Gaussian(5.0), jaxdp.repeat(jaxdp.Gaussian(6.0), 2)), 1.0),
    )
    mu = 2 * np.sqrt(1 / 9 + 3 / 16 + 1 / 25 + 2 / 36)
    mixed = jaxdp.compose(parts[0], jaxdp.repeat(parts[1], 3), parts[2])
    exact = jaxdp.epsilon(jaxdp.Gaussian(1 / mu), 1e-5)
    assert jaxdp.epsilon(mixed, 1e-5, relation="replace_one") == pytest.approx(exact, rel=1e-9)
    # the level of PureDP counts once: only noise is halved under replace_one
    both = jaxdp.compose(jaxdp.Laplace(2.0), jaxdp.PureDP(0.3))
    assert jaxdp.renyi(both, np.inf, relation="replace_one") == pytest.approx(2 / 2.0 + 0.3, rel=1e-9)


def test_a_sampled_part_and_a_plain_part_compose_in_one_convention():
    """As the sampling rate tends to 1, epsilon tends to that of the composition without sampling."""
    plain = jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(5.0), 2), 1e-5, relation="replace_one")
    for kind in (jaxdp.PoissonSampled, jaxdp.FixedSizeSampled):
        nearly = jaxdp.compose(jaxdp.Gaussian(5.0), kind(jaxdp.Gaussian(5.0), 1 - 1e-9))
        assert jaxdp.epsilon(nearly, 1e-5, relation="replace_one") == pytest.approx(plain, rel=1e-5)


def fixed_size_law(values, size, mass):
    """Law of (sum over a uniform batch of ``size`` records) + noise. mass(shift): law of the noise around shift."""
    batches = list(itertools.combinations(values, size))
    return sum(mass(sum(batch)) for batch in batches) / len(batches)


def poisson_law(values, rate, mass):
    """Law of (sum over a Poisson sample of the records) + noise. mass(shift): law of the noise around shift."""
    total = 0.0
    for taken in itertools.product((0, 1), repeat=len(values)):
        weight = rate ** sum(taken) * (1 - rate) ** (len(values) - sum(taken))
        total = total + weight * mass(sum(v for v, t in zip(values, taken, strict=True) if t))
    return total


@pytest.mark.parametrize("scale", [0.6, 2.5])
def test_no_fixed_size_batch_of_any_data_set_exceeds_the_bounds_and_the_worst_attains_them(scale):
    """Enumerates every data set of four records with contributions -1, 0, 1, and every neighbour of it."""
    mass, eps = integer_noise(scale), np.array([0.0, 0.05, 0.2, 0.6])
    base = jaxdp.DiscreteLaplace(scale)
    worst = {relation: np.zeros(eps.shape) for relation in ("add", "remove", "replace_one")}
    for values in itertools.product((-1, 0, 1), repeat=RECORDS):
        p = fixed_size_law(values, BATCH, mass)
        fewer = fixed_size_law(values[1:], BATCH, mass)
        worst["remove"] = np.maximum(worst["remove"], hockey_stick(p, fewer, eps))
        worst["add"] = np.maximum(worst["add"], hockey_stick(fewer, p, eps))
        for value in (-1, 0, 1):
            q = fixed_size_law((value, *values[1:]), BATCH, mass)
            worst["replace_one"] = np.maximum(worst["replace_one"], hockey_stick(p, q, eps))
    sampled = jaxdp.FixedSizeSampled(base, BATCH / RECORDS)
    for relation, exact in worst.items():
        found = jaxdp.delta_bounds(sampled, eps, relation=relation)
        assert np.all(found.upper >= exact * (1 - ROUNDING)), relation
        assert found.upper == pytest.approx(exact, rel=1e-9, abs=1e-14), relation
        assert np.all(found.lower <= exact * (1 + 1e-9)), relation


@pytest.mark.parametrize("rate", [0.1, 0.7])
@pytest.mark.parametrize("noise", [jaxdp.DiscreteLaplace(1.5), jaxdp.DiscreteGaussian(0.9)])
def test_no_poisson_batch_of_any_data_set_exceeds_the_bounds_and_the_worst_attains_them(rate, noise):
    mass = integer_noise(1.5) if isinstance(noise, jaxdp.DiscreteLaplace) else integer_gaussian(0.9)
    eps = np.array([0.0, 0.05, 0.2, 0.6])
    worst = {relation: np.zeros(eps.shape) for relation in ("add", "remove", "replace_one")}
    for values in itertools.product((-1, 0, 1), repeat=3):
        p, fewer = poisson_law(values, rate, mass), poisson_law(values[1:], rate, mass)
        worst["remove"] = np.maximum(worst["remove"], hockey_stick(p, fewer, eps))
        worst["add"] = np.maximum(worst["add"], hockey_stick(fewer, p, eps))
        for value in (-1, 0, 1):
            q = poisson_law((value, *values[1:]), rate, mass)
            worst["replace_one"] = np.maximum(worst["replace_one"], hockey_stick(p, q, eps))
    sampled = jaxdp.PoissonSampled(noise, rate)
    for relation, exact in worst.items():
        found = jaxdp.delta_bounds(sampled, eps, relation=relation)
        assert np.all(found.upper >= exact * (1 - ROUNDING)), relation
        assert np.all(found.lower <= exact * (1 + 1e-9)), relation
        for side in found:
            assert side == pytest.approx(exact, rel=1e-9, abs=1e-14), relation


def antipodal(mass, rate):
    """Laws of the noisy sum when the replaced record contributes 1, and when it contributes -1; Poisson sampled."""
    return (1 - rate) * mass(0) + rate * mass(1), (1 - rate) * mass(0) + rate * mass(-1)


@pytest.mark.parametrize(
    ("noise", "mass"),
    [(jaxdp.DiscreteLaplace(1.5), integer_noise(1.5, 60)), (jaxdp.DiscreteGaussian(0.9), integer_gaussian(0.9, 30))],
)
def test_two_replaced_poisson_rounds_have_the_delta_of_their_outcomes_one_by_one(noise, mass):
    p, q = (np.outer(side, side).ravel() for side in antipodal(mass, 0.2))
    eps = np.array([-0.3, 0.03, 0.1, 0.6, 1.5])  # none equals a privacy loss, where delta has a kink
    found = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.PoissonSampled(noise, 0.2), 2), eps, relation="replace_one")
    exact = hockey_stick(p, q, eps)
    assert np.all(found.lower <= exact * (1 + 1e-9)) and np.all(exact * (1 - ROUNDING) <= found.upper)
    assert found.lower == pytest.approx(found.upper, rel=3e-6, abs=1e-13)


@pytest.mark.parametrize("scale", [0.4, 1.0, 5.0])
def test_no_two_contributions_to_a_poisson_sum_with_laplace_noise_exceed_the_bounds(scale):
    x, rate, eps = np.arange(-60.0, 60.0, 1e-3), 0.3, np.array([0.0, 0.1, 0.5])
    edges = np.concatenate([x, [x[-1] + 1e-3]])

    def mass(shift):
        below = np.where(
            edges < shift, 0.5 * np.exp((edges - shift) / scale), 1 - 0.5 * np.exp((shift - edges) / scale)
        )
        return np.diff(below)

    found = jaxdp.delta_bounds(jaxdp.PoissonSampled(jaxdp.Laplace(scale), rate), eps, relation="replace_one")
    worst = hockey_stick(*antipodal(mass, rate), eps)
    assert found.upper == pytest.approx(worst, rel=2e-5)  # error of the reference, which sums cells of width 1e-3
    assert np.all(worst * (1 - 1e-9) <= found.upper) and np.all(found.lower <= found.upper)
    for one, other in itertools.product((-1.0, -0.6, 0.0, 0.3, 1.0), repeat=2):
        p, q = ((1 - rate) * mass(0) + rate * mass(shift) for shift in (one, other))
        assert np.all(hockey_stick(p, q, eps) <= found.upper * (1 + 1e-9) + 1e-15)


def integer_gaussian_rounds(sigma, sensitivity, times):
    sampled = jaxdp.PoissonSampled(jaxdp.DiscreteGaussian(sigma, sensitivity), 0.01)
    return jaxdp.epsilon_bounds(jaxdp.repeat(sampled, times), 1e-6, relation="replace_one")


def test_many_replaced_rounds_of_discrete_gaussian_noise_cost_about_what_those_of_gaussian_noise_do():
    gaussian = jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01)
    exact = jaxdp.epsilon(jaxdp.repeat(gaussian, 1000), 1e-6, relation="replace_one")
    for sigma, sensitivity in ((1.0, 1), (200.0, 200)):  # the law is kept outcome by outcome; in cells of outcomes
        found = integer_gaussian_rounds(sigma, sensitivity, 1000)
        assert found.upper == pytest.approx(exact, rel=1e-5)
        assert 0 < 1 - found.lower / found.upper < 1e-6


@pytest.mark.parametrize("noise", [jaxdp.Laplace(0.7), jaxdp.DiscreteGaussian(150.0, 90)])
@pytest.mark.parametrize("rate", [1e-4, 0.3])
def test_cells_of_noise_keep_all_mass_in_the_pair_that_dominates_and_no_more_in_the_dominated_one(noise, rate):
    outer, inner = jaxdp.PoissonSampled(noise, rate).under("replace_one").enclosing_records("replace", False)
    with on_host():
        parts = [each.part("replace") for each in (outer, inner)]
    totals = [np.sum(np.exp(part.log_weight)) for part in parts]
    assert 1 - 1e-15 <= totals[0] + parts[0].infinity <= 1 + 1e-10
    assert 1 - 2e-3 - rate <= totals[1] <= 1 - 1e-15


@pytest.mark.parametrize("kind", [jaxdp.FixedSizeSampled, jaxdp.PoissonSampled])
def test_large_contributions_are_sampled_outcome_by_outcome_at_twice_the_shift(kind):
    rate, eps = 0.3, np.array([0.0, 0.2, 1.0])
    mass = integer_noise(100.0, 8000)
    p, q = mass(200), mass(-200)
    exact = rate * hockey_stick(p, q, np.log1p(np.expm1(eps) / rate))
    if kind is jaxdp.PoissonSampled:
        first, second = ((1 - rate) * mass(0) + rate * side for side in (p, q))
        exact = hockey_stick(first, second, eps)
    found = jaxdp.delta(kind(jaxdp.DiscreteLaplace(100.0, 200), rate), eps, relation="replace_one")
    assert found == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("relation", ["remove", "replace_one"])
@pytest.mark.thorough
def test_traced_records_follow_the_convention(relation):
    with jax.enable_x64(True):

        def numbers(sigma, rate):
            base = jaxdp.Gaussian(sigma)
            return jaxdp.delta(jaxdp.FixedSizeSampled(base, rate), 0.7, relation=relation), jaxdp.delta(
                base, 0.7, relation=relation
            )

        # These options lower XLA's optimisation level; at its default level the program only takes longer to compile.
        compiled = jax.jit(numbers, compiler_options=compiler_options("cpu"))
        for rate in (1.0, 0.4):
            traced = compiled(1.3, rate)
            eager = numbers(1.3, rate)
            assert np.allclose(traced, eager, rtol=1e-4)
            assert np.all(np.asarray(traced) >= np.asarray(eager) * (1 - 1e-5))


def test_a_batch_of_everybody_has_no_guarantee_of_add_and_remove_from_a_base_without_one():
    local = jaxdp.LocalRandomizer(1.0)
    half = jaxdp.delta(jaxdp.FixedSizeSampled(local, 0.5), 0.0, relation="remove")
    assert 0 < half < 1
    for rate in (1.0, np.array([0.5, 1.0])):
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="LocalRandomizer"):
            jaxdp.delta(jaxdp.FixedSizeSampled(local, rate), 0.0, relation="remove")
