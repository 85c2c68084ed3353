"""Finite pairs of the discrete Gaussian of any sigma: sums over integers, both sides, compositions."""

import math

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

import jaxdp
from jaxdp.mechanisms import discrete_gaussian
from jaxdp.mechanisms.composition import normal_form
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options
from jaxdp.sources import contour
from jaxdp.sources.simple import law_bounds

RATE = 0.1


def rule(count):
    """(nodes, weights) of the quadrature rule for sums over the integers 1 to count."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        nodes, log_weights = (np.asarray(side) for side in discrete_gaussian.sum_rule(np.array([count])))
    return nodes[0], np.exp(log_weights[0])


@pytest.mark.parametrize("count", [0, 1, 2, 5, 11, 12, 13, 14, 15, 17, 20, 33, 100, 1000, 10**6])
def test_the_rule_sums_over_integers(count):
    nodes, weights = rule(count)
    assert np.all((nodes > 0) & (nodes < count + 1) | (weights == 0))
    k = np.arange(1.0, count + 1)
    for degree in (0, 1, 2, 7, 15):
        exact = math.fsum((k / max(count, 1)) ** degree)
        assert np.sum(weights * (nodes / max(count, 1)) ** degree) == pytest.approx(exact, rel=2e-14)
    for fall in (0.3, 1.0, 2.5):
        exact = math.fsum(np.exp(-fall * k / max(count, 1)))
        assert np.sum(weights * np.exp(-fall * nodes / max(count, 1))) == pytest.approx(exact, rel=2e-14)


def exact_profile(eps, sigma, shift, rate):
    """delta of one sampled run under remove, summed integer by integer."""
    reach = int(42 * sigma) + shift + 3
    x = np.arange(-reach, reach + 1.0)
    p, q = (np.exp(-(((x - s) / sigma) ** 2) / 2) for s in (shift, 0))
    total = math.fsum(q)
    return np.array([math.fsum(np.maximum(rate * (p - q) - np.expm1(e) * q, 0.0)) / total for e in eps])


# (sigma, shift, largest relative gap of the coarse pairs, of the fine ones). Up to sigma 57 (coarse) and 455 (fine) the
# gap is rounding only.
CASES = [
    (0.1, 1, 1e-11, 1e-11),
    (0.7, 2, 1e-11, 1e-11),
    (20.0, 3, 1e-11, 1e-11),
    (20.0, 400, 1e-11, 1e-11),
    (300.0, 50, 1e-3, 1e-11),
    (1000.0, 37, 1e-3, 1e-4),
    (5000.0, 2000, 1e-3, 1e-4),
]


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.thorough
def test_both_sides_of_one_run_are_around_the_sum_over_all_integers(fine):
    for sigma, shift, *widths in CASES:
        top = np.log1p(RATE * np.expm1(min(shift * 4.0 / sigma, 600.0)))
        eps = top * np.array([-0.01, 0.0, 0.1, 0.4, 0.8])
        exact = exact_profile(eps, sigma, shift, RATE)
        mechanism = jaxdp.PoissonSampled(jaxdp.DiscreteGaussian(sigma, shift), RATE)
        ((record, _),) = normal_form(mechanism, eps.shape)
        above, below = (
            jax.tree_util.tree_map(lambda leaf: leaf[:, 0], side) for side in record.enclosing_records("forward", fine)
        )
        upper, lower = (
            law_bounds(above, eps, verb="delta", direction="forward")[1],
            law_bounds(below, eps, verb="delta", direction="forward")[0],
        )
        assert np.all(lower <= exact * (1 + 2e-13)), sigma
        assert np.all(upper >= exact * (1 - 2e-13)), sigma
        close = widths[fine]
        assert np.all(upper - lower <= close * exact + 1e-300), (sigma, upper / exact - 1, lower / exact - 1)


PAIRS = [discrete_gaussian.discrete_gaussian_pair, discrete_gaussian.discrete_gaussian_inner_pair]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_have_derivatives(pair):
    def log_moment(sigma):
        law = pair(sigma, 150)
        return jax.nn.logsumexp(jnp.where(law.log_p > -jnp.inf, law.log_p + law.loss, -jnp.inf))

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        value, slope = jax.jit(jax.value_and_grad(log_moment), compiler_options=compiler_options("cpu"))(300.0)
    assert float(value) == pytest.approx(2 * 0.5**2 / 2, rel=1e-4)  # K(1), which falls as 1/sigma^2
    assert float(slope) == pytest.approx(-2 * float(value) / 300.0, rel=1e-3)


def test_a_large_sigma_composes_to_what_the_gaussian_does():
    # a sum over integers of a smooth function is its integral up to e^{-2 pi^2 sigma^2}: both have the same K
    lattice = jaxdp.PoissonSampled(jaxdp.DiscreteGaussian(1e4, 2000), 0.2)
    smooth = jaxdp.PoissonSampled(jaxdp.Gaussian(5.0), 0.2)
    both = [jaxdp.repeat(mechanism, 200) for mechanism in (lattice, smooth)]
    one, other = (jaxdp.epsilon_bounds(m, 1e-9, relation="remove", gap=1e-4) for m in both)
    assert one.lower <= other.upper and other.lower <= one.upper
    assert one.upper - one.lower <= 1e-4 * one.upper


def test_where_the_shift_is_far_larger_than_sigma_the_bounds_hold_or_are_vacuous():
    sigma, eps = np.array([1e-300, 1e-160, 1e-8, 1e-3]), np.zeros(4)
    for shift in (1, 2, 10**9):
        ((record, _),) = normal_form(jaxdp.PoissonSampled(jaxdp.DiscreteGaussian(sigma, shift), RATE), eps.shape)
        above, below = (
            jax.tree_util.tree_map(lambda leaf: leaf[:, 0], side) for side in record.enclosing_records("forward", False)
        )
        for direction in ("forward", "reverse"):  # the two laws do not overlap: delta at 0 is the rate
            assert np.all(law_bounds(above, eps, verb="delta", direction=direction)[1] >= RATE * (1 - 1e-12)), shift
            assert np.all(law_bounds(below, eps, verb="delta", direction=direction)[0] <= RATE * (1 + 1e-12)), shift


# (sigma, sensitivity, c). theta is one sum below sigma 0.4 and the dual sum above: points for both, two next to 0.4.
@pytest.mark.parametrize(
    ("sigma", "s", "c"), [(0.2, 1, 2.0), (0.39, 3, 0.3), (0.41, 3, 0.3), (0.6, 2, 30.2), (3.0, 1, 0.01), (20.0, 7, 1.5)]
)
def test_k_at_complex_orders_is_the_sum_over_the_integers_and_its_modulus_below_its_bound(sigma, s, c):
    record, variance = jaxdp.DiscreteGaussian(sigma, s), mp.mpf(sigma) ** 2
    period = 2 * np.pi * sigma**2 / s
    places = period * np.array([0.0, 0.03, 0.2, 0.45, 0.97, 3.1, 100.02])
    with on_host():
        found, real = record.log_mgf(c + 1j * places), record.log_mgf(np.array(c))
        at, around = (record.log_modulus(places - w, places + w) for w in (0.0, 0.1 * period))

    def moment(z):
        middle, reach = round(s + c * s), int(30 * sigma) + 20
        mass = {x: mp.exp(-((x - s) ** 2) / (2 * variance)) for x in range(s - reach, s + reach)}
        terms = (
            mp.exp((z * (2 * x - s) * s - (x - s) ** 2) / (2 * variance)) for x in range(middle - reach, middle + reach)
        )
        return mp.fsum(terms) / mp.fsum(mass.values())

    with mp.workdps(200):
        exact = [moment(mp.mpc(c, t)) for t in places]
        for t, k, truth, bound, least in zip(places, found, exact, at, around, strict=True):
            size = float(mp.log(abs(truth / exact[0])))
            assert bound <= least <= 0
            if size > -300:  # smaller values are lost: `moment` cuts its sum off
                tight = max(size + 1.2, 0.9 * size) if sigma > 0.4 else 0.0
                assert size - 1e-13 * (1 + t / sigma) <= bound <= tight
            if size > -60:
                off = abs(mp.exp(mp.mpc(complex(k))) / truth - 1)
                assert off < (64 + 4 * abs(k) + 8 * t * s / sigma) * 2.0**-53
        assert abs(mp.exp(mp.mpf(float(real))) / exact[0] - 1) < (64 + 4 * abs(real)) * 2.0**-53


def test_compositions_of_many_sigmas_are_close_with_few_nodes(monkeypatch):
    mixed = jaxdp.compose(*(jaxdp.DiscreteGaussian(sigma) for sigma in (5.3, 8.0, 11.9, 20.0, 31.7, 44.4)))
    monkeypatch.setattr(contour, "PLAIN_LADDER", contour.PLAIN_LADDER[:1] * 2)
    lower, upper = jaxdp.epsilon_bounds(mixed, 1e-9)
    assert upper - lower < 1e-7 * upper
    monkeypatch.setattr(jaxdp.DiscreteGaussian, "log_modulus", jaxdp.mechanisms.base.Mechanism.log_modulus)
    wide_lower, wide_upper = jaxdp.epsilon_bounds(mixed, 1e-9)
    assert wide_lower < lower < upper < wide_upper


@pytest.mark.parametrize(
    ("sigma", "sensitivity", "times", "twin"),
    [(1000.0, 1, 10_000, 0.396857378), (1e4, 1, 100, 0.002718219), (1e6, 100, 10_000, 0.033673780)],
)
def test_a_lattice_too_fine_for_its_period_has_close_bounds(sigma, sensitivity, times, twin):
    """twin: epsilon of as many runs of continuous Gaussian noise, which is close where sigma is large."""
    lower, upper = jaxdp.epsilon_bounds(jaxdp.repeat(jaxdp.DiscreteGaussian(sigma, sensitivity), times), 1e-6)
    assert upper - lower <= 1e-6 * upper
    assert upper == pytest.approx(twin, rel=1e-5)
