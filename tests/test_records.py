"""Records, compose and repeat: refused arguments and their messages, relations, order of composition, counts."""

import dataclasses

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from exact import gaussian_delta_in_digits
from scipy import stats

import jaxdp
from jaxdp.mechanisms import basic
from jaxdp.mechanisms.composition import flatten, normal_form
from jaxdp.mechanisms.sampled import EnclosingPair

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: jaxdp.Gaussian(0.0), "noise_multiplier"),
        (lambda: jaxdp.Gaussian(-1.0), "noise_multiplier"),
        (lambda: jaxdp.Gaussian(NAN), "noise_multiplier"),
        (lambda: jaxdp.Gaussian(INF), "noise_multiplier"),
        (lambda: jaxdp.Gaussian(np.array([1.0, NAN])), "noise_multiplier"),
        (lambda: jaxdp.Laplace(0.0), "noise_multiplier"),
        (lambda: jaxdp.DiscreteGaussian(-2.0), "sigma"),
        (lambda: jaxdp.DiscreteGaussian(2.0, 1.5), "sensitivity"),
        (lambda: jaxdp.DiscreteLaplace(0.0), "scale"),
        (lambda: jaxdp.RandomizedResponse(-0.1), "epsilon"),
        (lambda: jaxdp.RandomizedResponse(1.0, 1), "num_categories"),
        (lambda: jaxdp.PureDP(NAN), "epsilon"),
        (lambda: jaxdp.ApproximateDP(1.0, 1.5), "delta"),
        (lambda: jaxdp.DiscretePair([0.5, 0.6], [0.5, 0.5]), "sum of p"),
        (lambda: jaxdp.DiscretePair([0.5, 0.5], [1.5, -0.5]), "q"),
        (lambda: jaxdp.DiscretePair([1.0], [0.5, 0.5]), "same number of outcomes"),
        (lambda: jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 1.1), "sampling_probability"),
        (lambda: jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), NAN), "sampling_probability"),
        (lambda: jaxdp.FixedSizeSampled(jaxdp.Gaussian(0.0), 0.1), "noise_multiplier"),
        (lambda: jaxdp.repeat(jaxdp.Gaussian(1.0), 2.5), "times"),
        (lambda: jaxdp.repeat(jaxdp.Gaussian(1.0), -1), "times"),
        (lambda: jaxdp.repeat(jaxdp.Gaussian(1.0), NAN), "times"),
        (lambda: jaxdp.compose(jaxdp.Gaussian(1.0), jaxdp.Laplace(-1.0)), "noise_multiplier"),
    ],
)
def test_bad_values_are_refused_by_name_before_any_number_is_computed(make, name):
    with pytest.raises(ValueError, match=name):
        jaxdp.epsilon(make(), 1e-5)


@pytest.mark.parametrize("delta", [-1e-9, 1.1, NAN, np.array([0.1, NAN])])
def test_delta_outside_the_unit_interval_is_refused(delta):
    with pytest.raises(ValueError, match="delta"):
        jaxdp.epsilon(jaxdp.Gaussian(1.0), delta)


def test_epsilon_may_be_infinite_but_not_nan():
    assert jaxdp.delta(jaxdp.Gaussian(1.0), INF) == 0
    with pytest.raises(ValueError, match="epsilon"):
        jaxdp.delta(jaxdp.Gaussian(1.0), NAN)


@pytest.mark.parametrize("target", ["1e-5", None, 1j, True])
def test_targets_that_are_not_real_numbers_are_a_type_error(target):
    with pytest.raises(TypeError, match="delta"):
        jaxdp.epsilon(jaxdp.Gaussian(1.0), target)


def test_things_that_are_not_mechanisms_are_a_type_error():
    for call in (lambda: jaxdp.epsilon(1.0, 1e-5), lambda: jaxdp.compose(1.0), lambda: jaxdp.repeat(None, 2)):
        with pytest.raises(TypeError, match="mechanism"):
            call()


def test_shapes_that_do_not_broadcast_are_named():
    with pytest.raises(ValueError, match="broadcast"):
        jaxdp.epsilon(jaxdp.Gaussian(np.ones(3)), np.full(2, 1e-5))
    with pytest.raises(ValueError, match="broadcast"):
        jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(np.ones(3)), np.ones(2)), 1e-5)


def test_shapes_broadcast_over_leaves_counts_and_target():
    mechanism = jaxdp.repeat(jaxdp.Gaussian(np.array([1.0, 2.0])[:, None]), np.array([1, 10, 100]))
    assert jaxdp.epsilon(mechanism, np.array([1e-5, 1e-6])[:, None, None]).shape == (2, 2, 3)
    assert np.shape(jaxdp.epsilon(jaxdp.Gaussian(1.0), 1e-5)) == ()
    assert jaxdp.epsilon(jaxdp.Gaussian(np.ones((0, 2))), 1e-5).shape == (0, 2)


def test_answers_are_numpy_float64():
    value = jaxdp.epsilon(jaxdp.Gaussian(np.float32([1.0, 2.0])), 1e-5)
    assert type(value) is np.ndarray
    assert value.dtype == np.float64


def test_unknown_relations_and_relations_without_a_theorem_are_refused():
    with pytest.raises(ValueError, match="relation"):
        jaxdp.epsilon(jaxdp.Gaussian(1.0), 1e-5, relation="bounded")
    with pytest.raises(jaxdp.UnsupportedMechanismError):
        jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 1000), 1e-5, relation="add")


def test_one_number_of_a_noisy_iteration_is_that_of_every_step():
    steps = jaxdp.NoisyIteration([0.9, 0.8], 1.0, [1.0, 0.5])
    assert steps == jaxdp.NoisyIteration([0.9, 0.8], [1.0, 1.0], [1.0, 0.5])
    mu = jaxdp.iteration.gdp_mu([0.9, 0.8], 1.0, [1.0, 0.5])
    assert jaxdp.renyi(steps, 2.0) == pytest.approx(mu**2, rel=2e-12)
    assert jaxdp.epsilon(jaxdp.NoisyIteration(0.9, 1.0, [[1.0, 0.5], [2.0, 0.5]]), 1e-5).shape == (2,)
    with jax.enable_x64(True):
        slope = jax.grad(lambda noise: jaxdp.epsilon(jaxdp.NoisyIteration([0.9, 0.8], noise, [1.0, 0.5]), 1e-5))(1.0)
        assert slope < 0
    with pytest.raises(ValueError, match="must be an array with one entry per step, got three single numbers"):
        jaxdp.epsilon(jaxdp.NoisyIteration(0.9, 1.0, 1.0), 1e-5)


@pytest.mark.parametrize(
    ("make", "relation", "delta"),
    [
        (lambda m: jaxdp.repeat(jaxdp.PoissonSampled(m, 0.1), 3), "add", 1e-2),
        (lambda m: jaxdp.compose(m, jaxdp.RandomAllocation(jaxdp.Gaussian(3.0), 10)), "remove", 1e-6),
    ],
)
def test_a_noisy_iteration_is_the_gaussian_of_its_mu_wherever_it_stands(make, relation, delta):
    runs = jaxdp.NoisyIteration([0.9] * 4, [1.0] * 4, [0.5] * 4)
    same = jaxdp.Gaussian(jaxdp.renyi(runs, 2.0) ** -0.5)
    found, expected = (jaxdp.epsilon_bounds(make(each), delta, relation=relation) for each in (runs, same))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("make", "relation"),
    [
        (lambda m: jaxdp.compose(m, jaxdp.Laplace(8.0)), "replace_one"),
        (lambda m: jaxdp.PoissonSampled(m, 0.1), "remove"),
        (lambda m: jaxdp.compose(m, jaxdp.RandomAllocation(jaxdp.Gaussian(3.0), 10)), "remove"),
    ],
)
def test_lower_bounds_allow_for_the_excess_of_the_mu_of_a_noisy_iteration(make, relation, times, monkeypatch):
    runs = jaxdp.NoisyIteration([0.9] * 4, [1.0] * 4, [0.5] * 4)
    smaller = dataclasses.replace(runs, shift=0.95 * runs.shift)
    monkeypatch.setattr(basic, "allocation_excess", lambda *args: 0.05)
    truth, most = (jaxdp.epsilon(jaxdp.repeat(make(m), times), 1e-3, relation=relation) for m in (smaller, runs))
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(make(runs), times), 1e-3, relation=relation)
    assert 0.9 * truth < lower <= truth < most == upper


def test_a_run_without_steps_costs_nothing():
    nothing = jaxdp.NoisyIteration([], [], [])
    assert jaxdp.epsilon(nothing, 1e-5) == 0
    both = jaxdp.compose(nothing, jaxdp.Gaussian(2.0))
    assert jaxdp.epsilon(both, 1e-5, relation="remove") == pytest.approx(jaxdp.epsilon(jaxdp.Gaussian(2.0), 1e-5))


def test_mixing_natural_relations_must_be_decided_by_the_caller():
    mixed = jaxdp.compose(jaxdp.Gaussian(1.0), jaxdp.NoisyIteration([0.9], [1.0], [1.0]))
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="relation"):
        jaxdp.epsilon(mixed, 1e-5)
    assert jaxdp.epsilon(mixed, 1e-5, relation="replace_one") > 0


@jaxdp.record
class KnownByItsMoments(jaxdp.Mechanism):
    scale: object

    def log_mgf(self, z):
        return z * (z + 1) * self.scale


def test_sampling_a_mechanism_known_only_by_its_moments_is_refused():
    with pytest.raises(jaxdp.UnsupportedMechanismError):
        jaxdp.epsilon(jaxdp.PoissonSampled(KnownByItsMoments(0.1), 0.1), 1e-5)


def test_a_users_own_mechanism_accounts_like_the_closed_form_with_the_same_moments():
    bounds = jaxdp.epsilon_bounds(jaxdp.repeat(KnownByItsMoments(0.005), 100), 1e-5)
    exact = jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(10.0), 100), 1e-5)
    assert bounds.lower <= exact * (1 + 1e-12) and exact <= bounds.upper <= exact * (1 + 1e-6)


def test_records_are_pytrees_of_their_numbers():
    mechanism = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(2.0), 0.1), 7)
    assert jax.tree_util.tree_leaves(mechanism) == [2.0, 0.1, 7]
    doubled = jax.tree_util.tree_map(lambda x: 2 * x, mechanism)
    assert doubled.mechanism.mechanism.noise_multiplier == 4.0


def test_counts_multiply_through_nested_repetition():
    inner = jaxdp.repeat(jaxdp.compose(jaxdp.Gaussian(1.0), jaxdp.repeat(jaxdp.Laplace(3.0), 4)), 5)
    assert [times for _, times in flatten(inner)] == [5, 20]


def test_equal_records_are_merged_and_unequal_ones_stacked():
    stacks = normal_form(jaxdp.compose(*[jaxdp.Laplace(b) for b in (1.0, 2.0, 1.0)], jaxdp.Gaussian(1.0)), ())
    sizes = {type(record).__name__: np.shape(times) for record, times in stacks}
    assert sizes == {"Laplace": (1, 2), "Gaussian": (1, 1)}


def test_order_of_composition_and_grouping_do_not_matter():
    a, b, c = jaxdp.Gaussian(1.0), jaxdp.Gaussian(2.0), jaxdp.Gaussian(0.5)
    first = jaxdp.epsilon(jaxdp.compose(a, jaxdp.compose(b, c)), 1e-6)
    assert jaxdp.epsilon(jaxdp.compose(jaxdp.compose(c, a), b), 1e-6) == pytest.approx(first, rel=1e-12)
    assert jaxdp.epsilon(jaxdp.compose(a), 1e-6) == pytest.approx(jaxdp.epsilon(a, 1e-6), rel=1e-12)


def test_composing_nothing_releases_nothing():
    assert jaxdp.epsilon(jaxdp.compose(), 1e-9) == 0
    assert jaxdp.delta(jaxdp.compose(), 0.0) == 0
    assert jaxdp.epsilon(jaxdp.PoissonSampled(jaxdp.compose(), 0.5), 1e-9) == 0
    assert jaxdp.renyi(jaxdp.compose(), [2.0, np.inf]) == pytest.approx([0, 0], abs=0)
    assert jaxdp.log_mgf(jaxdp.compose(), 1j) == 0


@pytest.mark.parametrize("kind", [np.float16, np.float32, jnp.bfloat16, np.int8])
def test_noise_of_few_bits_is_composed_in_double_precision(kind):
    """Sums of squares in float16 would make epsilon too small by a thousandth of its value."""

    def epsilon(number):
        noise = jaxdp.compose(jaxdp.Gaussian(number(3.3)), jaxdp.repeat(jaxdp.Gaussian(number(5.7)), number(11)))
        return jaxdp.epsilon(jaxdp.PoissonSampled(noise, 0.1), 1e-6)

    assert epsilon(kind) == pytest.approx(epsilon(lambda number: float(kind(number))), rel=1e-12)


def test_two_classes_never_share_a_tree_structure():
    """jit finds a compiled program by the tree structure: an equal one would run another mechanism's kernel."""
    pairs = jaxdp.DiscreteGaussian(1.5, 3), jaxdp.DiscreteLaplace(1.5, 3)
    ones = jaxdp.Gaussian(1.0), jaxdp.Laplace(1.0), jaxdp.PureDP(1.0)
    twos = *pairs, jaxdp.ApproximateDP(1.0, 0.1), jaxdp.RandomizedResponse(1.0, 2)
    samplers = jaxdp.PoissonSampled, jaxdp.FixedSizeSampled
    mechanisms = [*ones, *twos, *(sampler(base, 0.1) for sampler in samplers for base in (*ones, *pairs))]
    structures = [jax.tree_util.tree_structure(mechanism) for mechanism in mechanisms]
    for i, first in enumerate(structures):
        assert all(first != second for second in structures[:i])
        assert first == jax.tree_util.tree_structure(jax.tree_util.tree_map(lambda leaf: leaf, mechanisms[i]))


def test_class_attributes_stay_as_they_were_written():
    for each in (jaxdp.RandomizedResponse(1.0), jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.1)):
        assert each.relations is type(each).relations and isinstance(each.relations, tuple)


def test_a_word_is_no_flag():
    with pytest.raises(ValueError, match="optimized must be one of True, False, got 'no'"):
        jaxdp.epsilon(jaxdp.Shuffled(jaxdp.UnaryEncoding(4.0, 5, "no"), 10_000), 1e-6)


def test_an_empty_tuple_is_an_empty_array():
    assert jaxdp.epsilon(jaxdp.Gaussian(()), 1e-5).shape == (0,)


@pytest.mark.parametrize(("steps", "shift"), [(1000, 5e-4), (10000, 5e-4), (300, 2e-3)])
def test_lower_bounds_of_iterations_with_little_loss_are_below_the_exact_delta(steps, shift):
    """Near epsilon 0 delta is proportional to mu, so the lower bound allows for the whole relative excess of mu."""
    runs, mu = jaxdp.NoisyIteration([1.0] * steps, 1.0, [shift] * steps), mp.sqrt(steps) * mp.mpf(shift)

    for eps in (0.0, 1e-3, 1e-2):
        lower, upper = jaxdp.delta_bounds(runs, eps)
        assert lower <= gaussian_delta_in_digits(eps, mu) <= upper <= lower * (1 + 1e-8)
    for delta in (float(gaussian_delta_in_digits(eps, mu)) for eps in ("1e-4", "1e-2")):
        lower, upper = jaxdp.epsilon_bounds(runs, delta)
        assert gaussian_delta_in_digits(upper, mu) <= delta <= gaussian_delta_in_digits(lower, mu)


@pytest.mark.parametrize("last", [2e-24, 3e-24, 7e-24])
def test_noise_that_is_lost_beside_the_largest_is_not_rounded_up(last):
    """3e-24 / 1e300 is subnormal with one digit left: rounded, it gives epsilon of a different noise."""
    runs = jaxdp.NoisyIteration([1.0, 1.0], [1e300, last], [0.0, 1e-24])
    exact = jaxdp.epsilon_bounds(jaxdp.Gaussian(last / 1e-24), 1e-6)
    found = jaxdp.epsilon_bounds(runs, 1e-6)
    assert found.lower <= exact.upper and exact.lower <= found.upper


@jaxdp.record
class TwoOutcomes(jaxdp.Mechanism):
    """P = (p, 1 - p) against Q = (q, 1 - q), not symmetric, with its lattice and its Renyi divergence."""

    p: jaxdp.typing.RealField
    q: jaxdp.typing.RealField

    def _losses(self):
        return jnp.log(self.p / self.q), jnp.log((1 - self.p) / (1 - self.q))

    def log_mgf(self, z):
        first, second = self._losses()
        return jnp.log(self.p * jnp.exp(z * first) + (1 - self.p) * jnp.exp(z * second))

    def lattice(self):
        first, second = self._losses()
        return first, first - second

    def renyi_divergence(self, order):
        return self.log_mgf(order - 1) / (order - 1)


@pytest.mark.parametrize("relation", ["remove", "add", "add_or_remove"])
def test_optional_formulas_of_an_asymmetric_record_are_not_used_for_the_swapped_pair(relation):
    for p, q in ((0.7, 0.4), (0.2, 0.4)):  # the second has a lattice of negative spacing
        own, listed = TwoOutcomes(p, q), jaxdp.DiscretePair([p, 1 - p], [q, 1 - q])
        lower, upper = jaxdp.delta_bounds(jaxdp.repeat(own, 30), 8.0 * p, relation=relation)
        exact_lower, exact_upper = jaxdp.delta_bounds(jaxdp.repeat(listed, 30), 8.0 * p, relation=relation)
        assert lower <= exact_upper and exact_lower <= upper <= exact_upper * (1 + 1e-6)
    own, listed = TwoOutcomes(0.05, 0.7), jaxdp.DiscretePair([0.05, 0.95], [0.7, 0.3])
    np.testing.assert_allclose(*(jaxdp.renyi(m, 10.0, relation=relation) for m in (own, listed)), rtol=1e-9)


@jaxdp.record
class WithoutItsTail(jaxdp.Mechanism):
    """P = (.6, .399, .001), Q = (.4, .5, .1), whose finite pair leaves out the last outcome."""

    unused: jaxdp.typing.RealField = 0.0

    def finite_pair(self):
        return jnp.log(jnp.array([0.6, 0.399, 0.001, 0.0])), jnp.log(jnp.array([0.4, 0.5, 0.0, 0.1]))

    def tail_moment(self, order):
        return order * np.log(0.001) + (1 - order) * np.log(0.1), np.log(0.01)


def test_the_moment_of_the_tail_of_an_asymmetric_record_is_not_used_for_the_swapped_pair():
    sampled = jaxdp.PoissonSampled(WithoutItsTail(), [1.0, 0.5])
    p, q = np.array([0.6, 0.399, 0.001]), np.array([0.4, 0.5, 0.1])
    exact = np.log(np.sum(q**8 * p**-7.0)) / 7
    assert jaxdp.renyi(sampled, 8.0, relation="add")[0] >= exact


@jaxdp.record
class TwoVariances(jaxdp.Mechanism):
    """N(0, s^2 I) against N(0, I) in d dimensions; E_P[exp(z L)] is infinite from z = 1/(s^2 - 1) on."""

    s: jaxdp.typing.RealField
    d: jaxdp.typing.RealField

    def log_mgf(self, z):
        return -self.d * (z * jnp.log(self.s) + 0.5 * jnp.log(1 - z * (self.s**2 - 1)))


@pytest.mark.parametrize("d", [1, 2, 4])
def test_a_moment_that_diverges_is_infinite_although_its_formula_is_finite(d):
    s, eps = 1.2, 1.0
    noise, rate = TwoVariances(s, d), (1 - s**-2) / 2
    far = (eps + d * np.log(s)) / rate  # the loss is above eps where the squared norm is above this number
    exact = stats.chi2.sf(far / s**2, d) - np.exp(eps) * stats.chi2.sf(far, d)
    lower, upper = jaxdp.delta_bounds(noise, eps, relation="remove")
    assert exact * (1 - 1e-6) < lower <= exact * (1 + 1e-12) and exact * (1 - 1e-12) <= upper < exact * (1 + 1e-6)
    near = (d * np.log(s) - 0.1) / rate
    exact = stats.chi2.cdf(near, d) - np.exp(0.1) * stats.chi2.cdf(near / s**2, d) if near > 0 else 0.0
    lower, upper = jaxdp.delta_bounds(noise, 0.1, relation="add")
    assert lower <= exact * (1 + 1e-12) and exact * (1 - 1e-12) <= upper
    np.testing.assert_allclose(jaxdp.renyi(noise, [3.0, 3.3, 9.0], relation="remove")[1:], np.inf)


@jaxdp.record
class KnownFromBothSides(jaxdp.Mechanism):
    """Losses on a lattice, but not exact; the records that enclose it do not state their lattice."""

    p: jaxdp.typing.RealField
    q: jaxdp.typing.RealField
    exact = False

    def log_mgf(self, z):
        return TwoOutcomes(self.p, self.q).log_mgf(z)

    def lattice(self):
        return TwoOutcomes(self.p, self.q).lattice()

    def enclosing_records(self, direction, fine):
        return (WithoutLattice(self.p, self.q),) * 2


@jaxdp.record
class WithoutLattice(jaxdp.Mechanism):
    p: jaxdp.typing.RealField
    q: jaxdp.typing.RealField

    def log_mgf(self, z):
        return TwoOutcomes(self.p, self.q).log_mgf(z)


def test_the_lattice_of_a_record_is_not_used_for_the_records_that_enclose_it():
    found = jaxdp.delta_bounds(jaxdp.repeat(KnownFromBothSides(0.7, 0.4), 20), 3.0, relation="remove")
    exact = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.DiscretePair([0.7, 0.3], [0.4, 0.6]), 20), 3.0, relation="remove")
    assert found.lower <= exact.upper and exact.lower <= found.upper < exact.upper * (1 + 1e-6)


@jaxdp.record
class UnknownLattice(WithoutLattice):
    """A record whose formula of the lattice has no value."""

    def log_mgf(self, z):
        return TwoOutcomes(self.p, self.q).log_mgf(z)

    def lattice(self):
        return 0.0, jnp.log(-self.p)


def test_a_lattice_that_is_not_a_number_proves_nothing():
    exact = jaxdp.delta(jaxdp.DiscretePair([0.7, 0.3], [0.4, 0.6]), 0.3)
    lower, upper = jaxdp.delta_bounds(UnknownLattice(0.7, 0.4), 0.3)
    assert lower <= exact <= upper


@jaxdp.record
class ComputedNoise(jaxdp.Mechanism):
    """Gaussian noise whose methods outside of kernels compute with jax.numpy."""

    sigma: jaxdp.typing.RealField
    symmetric = True

    def log_mgf(self, z):
        return z * (z + 1) / (2 * self.sigma**2)

    def at_distance(self, distance):
        return ComputedNoise(jnp.sqrt(jnp.asarray(self.sigma) ** 2 / (3 * distance) ** 2))


@jaxdp.record
class SimplifiedNoise(ComputedNoise):
    sigma: jaxdp.typing.RealField

    def simplified(self):
        return jaxdp.Gaussian(self.sigma / jnp.sqrt(3 + 0 * self.sigma))


@pytest.mark.parametrize("sigma", [0.7, 3.3, np.float32(1.1), np.float16(1.7)])
def test_methods_of_own_records_compute_in_double_precision(sigma):
    found = jaxdp.epsilon_bounds(ComputedNoise(sigma), 1e-5, relation="replace_one")
    exact = jaxdp.epsilon(jaxdp.Gaussian(float(sigma) / 6), 1e-5)
    assert found.lower <= exact * (1 + 1e-11) and exact * (1 - 1e-11) <= found.upper
    exact = jaxdp.epsilon(jaxdp.Gaussian(float(sigma) / 3**0.5), 1e-5)
    assert jaxdp.epsilon(SimplifiedNoise(sigma), 1e-5) == pytest.approx(exact, rel=1e-12)


@jaxdp.record
class Responses(jaxdp.Mechanism):
    """Two randomized responses with these local epsilons; at distance 2 they are twice as large."""

    local: jaxdp.typing.ArrayField
    event_ndim = {"local": 1}
    symmetric = True

    def finite_pair(self):
        true, other = -jnp.log1p(jnp.exp(-self.local)), -jnp.log1p(jnp.exp(self.local))
        first, second = jnp.stack([true, other], axis=1), jnp.stack([other, true], axis=1)
        return (first[0][:, None] + first[1][None]).ravel(), (second[0][:, None] + second[1][None]).ravel()

    def at_distance(self, distance):
        return Responses(self.local * distance)


@pytest.mark.slow
def test_the_distance_of_sampled_records_is_not_spread_over_their_event_axes():
    base, rates = Responses([1.0, 0.5]), np.array([0.5, 1.0, 0.3])
    found = [jaxdp.epsilon(jaxdp.FixedSizeSampled(base, r), 1e-3) for r in (rates[:2], rates[::-1][1:], rates)]
    np.testing.assert_allclose(found[0], found[1][::-1])
    np.testing.assert_allclose(found[0], found[2][:2])
    assert found[0][0] == pytest.approx(jaxdp.epsilon(jaxdp.FixedSizeSampled(base, 0.5), 1e-3))
    assert found[0][1] == pytest.approx(jaxdp.epsilon(jaxdp.PoissonSampled(base, rates[:2]), 1e-3)[1])
    with jax.enable_x64(True):
        traced = jax.jit(lambda local: jaxdp.epsilon(jaxdp.FixedSizeSampled(Responses(local), rates), 1e-3))
        np.testing.assert_allclose(traced(jnp.array([1.0, 0.5])), found[2], rtol=1e-5)


@jaxdp.record
class ThreeOutcomes(jaxdp.Mechanism):
    """A symmetric pair whose third outcome has loss 0, but for rounding."""

    a: jaxdp.typing.RealField
    b: jaxdp.typing.RealField
    symmetric = True

    def finite_pair(self):
        a, b = self.a, self.b
        return jnp.log(jnp.stack([a, b, 1 - a - b])), jnp.log(jnp.stack([b, a, 1 - b - a]))


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.1), (0.1, 0.3), (0.3, 0.699999), (0.699999, 0.3)])
@pytest.mark.parametrize("times", [1, 3])
def test_an_outcome_whose_loss_is_zero_but_for_rounding_keeps_its_mass(a, b, times):
    rate, eps = 0.3, np.array([-0.5, 0.05, 0.2])
    p, q = max(a, b), min(a, b)
    loss = np.log1p(rate * (p - q) / q)  # the symmetric pair of Proposition 29
    losses, masses = np.array([loss, 0.0, -loss]), np.array([q * np.exp(loss), 0.0, q])
    masses[1] = 1 - masses.sum()
    sums, weights = np.zeros(1), np.ones(1)
    for _ in range(times):
        sums, weights = np.add.outer(sums, losses).ravel(), np.multiply.outer(weights, masses).ravel()
    exact = [np.sum(weights * np.maximum(-np.expm1(e - sums), 0.0)) for e in eps]
    batches = jaxdp.repeat(jaxdp.FixedSizeSampled(ThreeOutcomes(a, b), rate), times)
    lower, upper = jaxdp.delta_bounds(batches, eps, relation="replace_one")
    assert np.all(lower <= np.multiply(exact, 1 + 1e-9))
    np.testing.assert_allclose(upper, exact, rtol=1e-8)


@jaxdp.record
class BoundedNoise(jaxdp.Mechanism):
    """P = (.3, .5, .2, 0), Q = (0, .2, .5, .3); the law halfway between, (.1, .4, .4, .1), has mass on all outcomes."""

    unused: jaxdp.typing.RealField = 0.0
    symmetric = True

    def finite_pair(self):
        return jnp.log(jnp.array([0.3, 0.5, 0.2, 0.0])), jnp.log(jnp.array([0.0, 0.2, 0.5, 0.3]))

    def log_middle(self, loss):
        return jnp.where(loss > 0, np.log(2.0), np.log(0.8))

    def at_distance(self, distance):
        return self


@pytest.mark.parametrize("times", [1, 2])
def test_noise_whose_middle_law_has_mass_where_a_law_of_the_pair_has_none(times):
    middle, rate = np.array([0.1, 0.4, 0.4, 0.1]), 0.3
    p, q = ((1 - rate) * middle + rate * np.array(x) for x in ([0.3, 0.5, 0.2, 0.0], [0.0, 0.2, 0.5, 0.3]))
    all_p, all_q = (np.ravel(x if times == 1 else np.multiply.outer(x, x)) for x in (p, q))
    for eps in (-0.5, 0.0, 0.3, 2.0):
        exact = np.sum(np.maximum(all_p - np.exp(eps) * all_q, 0.0))
        runs = jaxdp.repeat(jaxdp.PoissonSampled(BoundedNoise(), rate), times)
        lower, upper = jaxdp.delta_bounds(runs, eps, relation="replace_one")
        assert lower <= exact <= upper + 1e-15


@jaxdp.record
class PlainPairs(jaxdp.Mechanism):
    """Enclosed by pairs that are given as plain log masses."""

    local: jaxdp.typing.RealField
    symmetric = True

    def enclosing_pair(self, inner, fine):
        local = self.local * (0.9 if inner else 1.0)
        masses = jnp.stack([-jnp.log1p(jnp.exp(-local)), -jnp.log1p(jnp.exp(local))])
        return masses, masses[::-1]


def test_enclosing_pairs_may_be_plain_log_masses():
    likely, other = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.e)
    exact = 0.5 * (likely + other) - np.exp(0.1) * other
    assert jaxdp.delta(jaxdp.PoissonSampled(PlainPairs(1.0), 0.5), 0.1) == pytest.approx(exact, rel=1e-9)
    with jax.enable_x64(True):
        traced = jax.jit(lambda local, inner: EnclosingPair(PlainPairs(local), inner).finite_pair())
        for inner, exact in ((0.0, 1.0), (1.0, 0.9)):
            np.testing.assert_allclose(traced(1.0, inner).loss, [exact, -exact], rtol=1e-12)


@jaxdp.record
class SymmetricUntilReplaced(jaxdp.Mechanism):
    """A symmetric pair whose records under replace_one have another one."""

    local: jaxdp.typing.RealField
    symmetric = True

    def log_mgf(self, z):
        return jaxdp.RandomizedResponse(self.local).log_mgf(z)

    def under(self, relation):
        return jaxdp.DiscretePair([0.95, 0.05], [0.7, 0.3]) if relation == "replace_one" else self


@jaxdp.record
class OneDirection(WithoutLattice):
    """Accounts for the pair of "remove" under every relation."""

    p: jaxdp.typing.RealField
    q: jaxdp.typing.RealField

    def directions(self, relation):
        return ("forward",)


@pytest.mark.slow
def test_directions_that_the_composition_does_not_compute_are_refused():
    """The swapped pairs were left out, or taken in place of the pair that the record asks for."""
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="DiscretePair needs other pairs under 'replace_one'"):
        jaxdp.delta(SymmetricUntilReplaced(0.5), 0.2, relation="replace_one")
    one, sampled = OneDirection(0.7, 0.95), jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.001)
    assert jaxdp.delta(one, 1.0, relation="add") == jaxdp.delta(one, 1.0, relation="remove") > 0.1
    for relation in ("add", "add_or_remove"):
        with pytest.raises(jaxdp.UnsupportedMechanismError, match="OneDirection needs other pairs"):
            jaxdp.delta(jaxdp.compose(one, sampled), 1.0, relation=relation)
    assert jaxdp.delta(jaxdp.compose(one, sampled), 1.0, relation="remove") > 0.1


class NotDecorated(KnownByItsMoments):
    pass


@jaxdp.record
class WithoutNumbers(jaxdp.Mechanism):
    def log_mgf(self, z):
        return z * (z + 1) / 2


@jaxdp.record
class OneWord(KnownByItsMoments):
    relations = "remove"


@pytest.mark.parametrize("make", [lambda m: m, lambda m: jaxdp.repeat(m, 3), lambda m: jaxdp.compose(m, m)])
def test_records_without_decorator_or_numbers_are_refused(make):
    with pytest.raises(TypeError, match="NotDecorated must be decorated with @jaxdp.record"):
        jaxdp.epsilon(make(NotDecorated(1.0)), 1e-5)
    with pytest.raises(TypeError, match="WithoutNumbers must have a numeric field"):
        jaxdp.epsilon(make(WithoutNumbers()), 1e-5)
    with pytest.raises(TypeError, match="OneWord.relations must be a tuple"):
        jaxdp.epsilon(make(OneWord(1.0)), 1e-5)


@jaxdp.record
class Holder(jaxdp.Mechanism):
    """A record that has the losses of another one, and a constant bound of the modulus."""

    inner: jaxdp.Mechanism
    symmetric = True

    def log_mgf(self, z):
        return self.inner.log_mgf(z)

    def log_modulus(self, low, high):
        return 0.0


def test_a_record_that_holds_noise_must_say_what_it_is_at_distance_two():
    """It had the epsilon of distance 1 under replace_one."""
    assert jaxdp.epsilon(Holder(jaxdp.Gaussian(1.0)), 1e-5) == pytest.approx(jaxdp.epsilon(jaxdp.Gaussian(1.0), 1e-5))
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="Holder must define at_distance"):
        jaxdp.epsilon(Holder(jaxdp.Gaussian(1.0)), 1e-5, relation="replace_one")
    assert jaxdp.epsilon(Holder(jaxdp.PureDP(1.0)), 1e-5, relation="replace_one") > 0.9


def test_bounds_of_the_modulus_may_be_one_number():
    both = jaxdp.compose(*(Holder(jaxdp.RandomizedResponse(e)) for e in (0.1, 0.1, 0.2)))
    same = jaxdp.compose(*(jaxdp.RandomizedResponse(e) for e in (0.1, 0.1, 0.2)))
    np.testing.assert_allclose(jaxdp.delta(both, 0.15), jaxdp.delta(same, 0.15, relation="replace_one"), rtol=1e-6)


@jaxdp.record
class LouderLaplace(jaxdp.Laplace):
    noise_multiplier: jaxdp.typing.RealField

    def log_mgf(self, z):
        return 2 * z * (z + 1)


def test_a_record_of_the_library_with_another_formula_is_refused():
    with pytest.raises(TypeError, match="LouderLaplace changes log_mgf of Laplace"):
        jaxdp.epsilon(LouderLaplace(1.0), 1e-5)
