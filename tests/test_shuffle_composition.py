"""Composed shuffled rounds: the finite laws around the clones pair, and what the contour makes of them."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import jaxdp
from jaxdp.fourier import derivative
from jaxdp.fourier.contour import Effort
from jaxdp.hockey_stick.clones import clones_delta_bounds
from jaxdp.hockey_stick.clones_law import FINE, FINEST, USUAL_REACH, clones_law, clones_laws
from jaxdp.mechanisms.composition import normal_form
from jaxdp.mechanisms.spectrum import spectrum
from jaxdp.precision import compiler_options

pytestmark = pytest.mark.as_users_compile  # its batches of laws take longer to compute than to compile

ROUNDING = 1e-10
# users and eps0: one user, two, few, a window of single counts, blocks; eps0 from nothing to all
USERS = np.array([1, 1, 2, 2, 10, 30, 100, 300, 3000, 1e4, 1e5, 1e9, 1e5, 30])
EPS0 = np.array([2, 20, 1e-6, 3, 0.5, 40, 3, 1e-3, 2, 1, 4, 1, 20, 5])
REACH = np.full(USERS.shape, USUAL_REACH)


def delta(losses, log_weights, epsilon):
    """delta(epsilon) of each row of a finite law."""
    share = -np.expm1(np.minimum(epsilon[:, None] - losses, 0.0))
    return np.sum(np.exp(log_weights) * share, axis=1)


@pytest.mark.parametrize(
    ("rate", "mesh", "reach"),
    [("clones", None, 12.0), ("clones", FINE, 12.0), ("stronger", FINE, 5.0), ("clones", FINEST, 40.0)],
)
def test_the_laws_lie_around_the_pair_in_one_round(rate, mesh, reach):
    make = functools.partial(clones_laws, mesh=mesh) if mesh else clones_law
    some = slice(1, None, 2) if mesh else slice(None)  # large meshes take seconds a law
    users, eps0 = USERS[some], EPS0[some]
    law = make(users, eps0, np.full(users.shape, reach), rate=rate)
    spread = np.sqrt(np.sum(np.exp(law.log_weights) * law.losses**2, axis=1))
    for deviations in (0.0, 0.3, 1.0, 3.0, 8.0, 30.0):
        epsilon = np.minimum(deviations * spread, 0.999 * eps0)
        lower, upper = clones_delta_bounds(users, eps0, epsilon, rate=rate)
        above = delta(law.losses, law.log_weights, epsilon)
        below = delta(law.inner_losses, law.inner_log_weights, epsilon)
        assert (above >= lower * (1 - 1e-14)).all() and (below <= upper * (1 + 1e-14)).all()
        if deviations <= 1.0:
            closeness = 1e-5 if mesh else 1e-3
            assert (above <= upper * (1 + closeness)).all() and (below >= lower * (1 - closeness)).all()


@pytest.mark.parametrize("side", ["", "inner_"])
def test_the_laws_are_symmetric_pairs_of_probability_laws(side):
    law = clones_law(USERS, EPS0, REACH, rate="clones")
    losses, log_weights = getattr(law, f"{side}losses"), getattr(law, f"{side}log_weights")
    weights = np.exp(log_weights)
    np.testing.assert_allclose(np.sum(weights, axis=1), 1.0, atol=ROUNDING)
    np.testing.assert_allclose(np.sum(weights * np.exp(-losses), axis=1), 1.0, atol=ROUNDING)
    assert (np.abs(losses).max(axis=1) <= EPS0).all()


@pytest.mark.parametrize(("users", "eps0"), [(103, 1e-6), (249, 1e-6), (3000, 4.0), (1e6, 10.0)])
def test_all_heads_keep_their_chance_of_the_largest_loss(users, eps0):
    """The widths of the last cell and of a rounding error once differed by 1e10 only."""
    with mpmath.workdps(40):
        clone = mpmath.exp(-mpmath.mpf(eps0))
        chance = (1 - clone / 2) ** (int(users) - 1) / (1 + clone)
    for make in (clones_law, clones_laws):
        law = make(*(np.array([x]) for x in (float(users), eps0, USUAL_REACH)), rate="clones")
        above, below = (
            mpmath.exp(mpmath.mpf(float(log_weights[0][np.argmax(losses[0])]))) / chance
            for losses, log_weights in (law[:2], law[2:])
        )
        assert 1 - 1e-9 < below <= 1 <= above < 1 + 1e-9


def test_next_to_the_supremum_of_a_finite_law_both_bounds_are_close():
    rounds = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(60.0), 50), np.array([2, 1000]))
    lower, upper = jaxdp.epsilon_bounds(rounds, delta=1e-6)
    assert (upper - lower <= 1e-6 * upper).all() and (upper <= np.array([120.0, 60000.0]) * (1 + 1e-12)).all()


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.5, 1.0), (10.0, -1.0), (math.nan, 1.0), (10.0, math.nan)])
def test_an_invalid_point_has_an_infinite_loss_and_no_lower_bound(bad):
    law = clones_law(*(np.array([x]) for x in (*bad, USUAL_REACH)))
    assert np.isinf(law.losses).all() and (law.inner_losses == 0).all()


def exact_pair(users, local):
    """The clones pair by its definition: one (P, Q) for each clone count and count of ones."""
    r, alpha = 1 / local, local / (local + 1)
    pairs = []
    for j in range(users):
        weight = math.comb(users - 1, j) * r**j * (1 - r) ** (users - 1 - j) / 2**j
        heads = [math.comb(j, i) if 0 <= i <= j else 0 for i in range(-1, j + 2)]
        for i in range(j + 2):
            p, q = (weight * (a * heads[i] + (1 - a) * heads[i + 1]) for a in (alpha, 1 - alpha))
            pairs.append((p, q))
    return pairs


@pytest.mark.parametrize("users", [1, 2, 4])
def test_two_and_three_rounds_of_few_users_enclose_the_exact_composition(users):
    local, central = Fraction(math.e), Fraction(13, 10)
    eps0 = math.log(local)
    one = [(p, q) for p, q in exact_pair(users, local) if p or q]
    composed = [(Fraction(1), Fraction(1))]
    for times in (1, 2, 3):
        composed = [(p * s, q * t) for p, q in composed for s, t in one]
        exact = sum(max(p - central * q, Fraction(0)) for p, q in composed)
        rounds = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users), times)
        lower, upper = jaxdp.delta_bounds(rounds, epsilon=math.log(central))
        # log(1.3) and log(local) are rounded: to 1e-15 of delta
        assert Fraction(float(lower)) <= exact * (1 + Fraction(1, 10**14)) <= Fraction(float(upper)) * (
            1 + Fraction(1, 10**13)
        )
        assert upper - lower <= 1e-6 * upper


def test_moments_of_every_order_lie_around_the_exact_ones():
    users, eps0 = 150, 1.0
    law = clones_laws(*(np.array([x]) for x in (users, eps0, USUAL_REACH)), rate="clones")
    with mpmath.workdps(30):
        pair = exact_pair(users, mpmath.e)
        for z in (0.5, 3.0, 40.0, 2000.0):
            exact = mpmath.log(mpmath.fsum(p * (p / q) ** z for p, q in pair if p > 0))
            above, below = (
                float(np.logaddexp.reduce(log_weights[0] + z * losses[0]))
                for losses, log_weights in (law[:2], law[2:])
            )
            assert below - ROUNDING <= exact <= above + ROUNDING
            assert above - below <= 1e-4 * above


def test_composed_rounds_have_close_bounds():
    rounds = jaxdp.Shuffled(jaxdp.LocalRandomizer(np.array([4.0, 1.0, 3.0])), np.array([1e5, 1e6, 200.0]))
    times = np.array([100, 1000, 5])
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(rounds, times), delta=1e-6)
    assert (lower <= upper).all() and (upper - lower <= 1e-6 * upper).all()
    # more rounds than one, fewer than all of their losses in the worst case
    assert (upper > jaxdp.epsilon(rounds, delta=1e-6)).all() and (upper < times * np.array([4.0, 1.0, 3.0])).all()


def test_few_rounds_have_close_bounds_at_tiny_deltas():
    """Cells of the usual law are too wide there: 1.4e-5; what underflows once had the largest loss: 0.7 of epsilon."""
    rounds = jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), np.array([4000, 1e5])), 2)
    lower, upper = jaxdp.epsilon_bounds(rounds, delta=np.array([1e-15, 1e-285]))
    assert (0 < lower).all() and (lower <= upper).all() and (upper - lower <= np.array([1e-6, 1e-5]) * upper).all()


def test_a_bound_without_a_pair_of_its_own_has_no_lower_bound_in_composition():
    blanket = jaxdp.Shuffled(jaxdp.RandomizedResponse(2.0, 4), 50)
    lower, upper = jaxdp.delta_bounds(jaxdp.repeat(blanket, 2), epsilon=0.5)
    assert lower == 0 and 0 < upper < 1
    leaky = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0, np.array([0.0, 1e-9])), 50)
    lower, upper = jaxdp.delta_bounds(jaxdp.repeat(leaky, 2), epsilon=0.5)
    assert lower[0] > 0.99 * upper[0] and lower[1] == 0 and upper[1] == 1


def sampled_response(x):
    return jaxdp.PoissonSampled(jaxdp.RandomizedResponse(x, 3.0), 0.1)


@pytest.mark.parametrize(
    ("make", "points"),
    [
        (lambda x: jaxdp.Shuffled(jaxdp.LocalRandomizer(x), 1e4), (2.0, 1.999, 2.001)),
        (sampled_response, (1.0, 0.999, 1.001)),
    ],
)
def test_the_derivative_of_log_delta_of_finite_laws_is_that_of_its_differences(make, points):
    effort = Effort(512, 1, 1, True)

    def value(x):
        stacks = tuple(
            (jax.tree_util.tree_map(lambda leaf: leaf[0], record), times[0])
            for record, times in normal_form(jaxdp.repeat(make(x), 30), ())
        )
        return derivative.log_delta(lambda p: spectrum(p, "forward"), stacks, jnp.asarray(1.0), effort)

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        both = jax.jit(jax.vmap(jax.value_and_grad(value)), compiler_options=compiler_options("cpu"))(jnp.array(points))
    values, slopes = (np.asarray(x) for x in both)
    difference = (values[2] - values[1]) / (points[2] - points[1])
    assert difference > 0.1
    assert slopes[0] == pytest.approx(difference, rel=2e-2)
