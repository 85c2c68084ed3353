"""Rare large losses: the bands' certificate against mpmath, term by term, and all bands against exact compositions.

One labelled step is a one-dimensional integral, and so are two steps without labels; mpmath computes both. The contours
are chosen by hand, and badly, so that the error under test dominates.
"""

import functools

import jax
import mpmath as mp
import numpy as np
import pytest
from exact import encloses
from two_ways import compiled, plainly

import jaxdp
from jaxdp.contour import trapezoid
from jaxdp.contour.largest_loss import band as one_band
from jaxdp.contour.largest_loss import bands
from jaxdp.contour.largest_loss.band import Band
from jaxdp.contour.plan import Plan, Sides, bounds_of
from jaxdp.contour.spectrum import Sampled, Spectrum
from jaxdp.contour.trapezoid import Effort
from jaxdp.mechanisms.composition import normal_form
from jaxdp.numerics.exponential_sums import log_ratios
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import compiler_options
from jaxdp.sampled_gaussian.decay import log_decay
from jaxdp.sampled_gaussian.label import MODULUS, NEVER, STEEPEST, WIDTH, Label
from jaxdp.sampled_gaussian.likelihood_ratio import exact_nodes, integrand_and_mixture
from jaxdp.sampled_gaussian.moment import along_edges, height, interval, real_log_m, tilted_line
from jaxdp.sources import contour

SIGMA, RATE, CUT = 1.0, 0.01, 14.0
LOW, HIGH = 2.0, 3.0
ROUNDING = 1e-12


@pytest.fixture(autouse=True)
def exact_values_have_twenty_digits():
    with mp.workdps(20):
        yield


def spectrum_of(times, sigma=SIGMA, rate=RATE, direction="forward"):
    part = Sampled(xp.array([1 / sigma]), xp.array([rate]), xp.reshape(xp.asarray(times, xp.float64), 1))
    nothing = xp.zeros(())
    return Spectrum(
        lambda z: xp.zeros(xp.shape(z), xp.complex128), nothing, nothing, (part,), (), direction, nothing, nothing,
        xp.inf,
    )  # fmt: skip


def weight(u, edge):
    return 1 / (1 + mp.exp(2 * mp.sinh((u - mp.mpf(edge)) / mp.mpf(WIDTH))))


def label(u, low, high):
    """The band's label; low None: everything below high counts, high None: everything above low."""
    return (1 if high is None else weight(u, high)) - (0 if low is None else weight(u, low))


def mixture(u):
    return 1 - mp.mpf(RATE) + mp.mpf(RATE) * mp.exp(u / mp.mpf(SIGMA) - 1 / (2 * mp.mpf(SIGMA) ** 2))


def likelihoods(u, direction):
    """Densities of P and Q at u, each divided by the density of N(0, 1)."""
    return mixture(u), mixture(-u) if direction == "replace" else 1


def integral(function, start=-15):
    places = sorted({mp.mpf(k) / 2 for k in range(2 * start, 2 * int(CUT) + 1)} | {mp.mpf(k) / 8 for k in range(8, 49)})
    return mp.quad(function, [p for p in places if p >= start], method="gauss-legendre", maxdegree=5)


@functools.cache
def exact_moment(z, low, high, direction="forward"):
    def part(u):
        first, second = likelihoods(u, direction)
        return mp.npdf(u) * label(u, low, high) * first * (first / second) ** z

    return integral(part)


@functools.cache
def exact_delta(eps, low, high, direction="forward"):
    """The part of delta from one step's outcomes with this label."""
    e = mp.exp(mp.mpf(eps))

    def excess(u):
        first, second = likelihoods(u, direction)
        return first - e * second

    at = mp.mpf(SIGMA) * mp.log((e - 1 + mp.mpf(RATE)) / mp.mpf(RATE)) + 1 / (2 * mp.mpf(SIGMA))
    at = at if direction == "forward" else mp.findroot(excess, at)
    places = [at] + [p for p in (at + mp.mpf(k) / 8 for k in range(1, 80)) if p < CUT] + [mp.mpf(CUT)]
    return mp.quad(lambda u: mp.npdf(u) * label(u, low, high) * excess(u), places, method="gauss-legendre", maxdegree=5)


BANDS = {"lowest": (None, LOW), "middle": (LOW, HIGH), "highest": (HIGH, None)}


def ends_of(band):
    """(low, high) as numbers in place of None, so that all bands share a program."""
    low, high = BANDS[band]
    return low or -NEVER, high or NEVER


def band_of(spectrum, size, low, high):
    full = xp.ones(1)
    return Band(spectrum, spectrum.sampled[0], low * full, high * full, xp.asarray(CUT), size)


@functools.cache
def bracket_by(nodes, size, direction):
    """A function of numbers: (lower, upper) of the band's part of delta, by a contour with this many nodes."""

    def run(eps, c, period, *ends):
        spectrum, nothing = spectrum_of(1, direction=direction), xp.zeros(1)
        band = band_of(spectrum, size, *ends)
        above = c * xp.array([1.05, 1.3, 2.0, 4.0])
        k_above, masses = bounds_of(band, above)
        plan = Plan(c, period, np.zeros(()), nothing[0], Sides(above, k_above, nothing, nothing + xp.inf))
        one = jax.tree_util.tree_map(lambda x: x[None], bands.one_band(band, plan, masses, Effort(nodes, size, False)))
        sums = bands.band_sums(spectrum, one, xp.zeros(()), eps, xp.zeros(()))
        return sums.lower, sums.upper

    return run


def bracket(run, band, eps, direction="forward", *, c, period, nodes, size):
    """(lower, upper) of the band's part of delta, by the contour through c with the given alias period."""
    lower, upper = run(bracket_by(nodes, size, direction), eps, c, period, *ends_of(band))
    return float(lower), float(upper)


# error source: (band, eps, contour on which this source dominates). Few sizes, because each compiles a program.
CASES = {
    "alias on the right": ("middle", 0.02, {"c": 200.0, "period": 0.1, "nodes": 4096, "size": 1024}),
    "alias on the left": ("middle", 0.02, {"c": 20.0, "period": 0.3, "nodes": 4096, "size": 1024}),
    "alias on the left, of the swapped pair": ("middle", 0.02, {"c": 5.0, "period": 2.0, "nodes": 4096, "size": 1024}),
    "truncation": ("middle", 0.02, {"c": 100.0, "period": 160.0, "nodes": 4096, "size": 1024}),
    "truncation, lowest band": ("lowest", 0.005, {"c": 100.0, "period": 160.0, "nodes": 4096, "size": 1024}),
    "quadrature": ("middle", 0.02, {"c": 10.0, "period": 6.0, "nodes": 4096, "size": 28}),
    "cancellation": ("middle", 0.02, {"c": 220.0, "period": 2.0, "nodes": 4096, "size": 1024}),
    "nothing": ("highest", 0.3, {"c": 5.0, "period": 12.0, "nodes": 4096, "size": 1024}),
}


def without_strip(*arguments):
    line, nothing = TILTED_LINE(*arguments), xp.zeros(())
    return line._replace(error=nothing, rule=nothing, mean_rule=nothing, drift=0 * line.drift)


def errorless_weights(nodes, *rest):
    real, imag, errors = NODE_WEIGHTS(nodes, *rest)
    return real, imag, 0 * errors


def without(name):
    return lambda *arguments: ALIAS_TERMS(*arguments)._replace(**{name: xp.asarray(-xp.inf)})


TILTED_LINE, NODE_WEIGHTS, ALIAS_TERMS = one_band.tilted_line, trapezoid.node_weights, bands.alias_terms
TRUNCATION = (one_band, "log_decay", lambda *a: xp.asarray(-xp.inf))
SABOTAGE = {
    "alias on the right": [(trapezoid, "log_alias", lambda *a: (xp.asarray(xp.inf), xp.asarray(-xp.inf)))],
    "alias on the left": [(bands, "alias_terms", without("log_first"))],
    "alias on the left, of the swapped pair": [(bands, "alias_terms", without("log_second"))],
    "truncation": [TRUNCATION],
    "truncation, lowest band": [TRUNCATION],
    # in these two cases the truncation is negligible but its bound is not: both terms must go
    "quadrature": [(one_band, "tilted_line", without_strip), TRUNCATION],
    "cancellation": [(trapezoid, "node_weights", errorless_weights), TRUNCATION],
}


@pytest.mark.parametrize("direction", ["forward", "replace"])
@pytest.mark.parametrize("name", CASES)
def test_a_coarse_contour_still_encloses_what_a_band_contributes(name, direction):
    band, eps, choice = CASES[name]
    assert encloses(bracket(plainly, band, eps, direction, **choice), exact_delta(eps, *BANDS[band], direction))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough
def test_it_encloses_what_a_band_contributes_also_when_compiled_as_for_users(name, compiled_as_for_users):
    band, eps, choice = CASES[name]
    assert compiler_options("cpu").get("xla_backend_optimization_level") != 0
    assert encloses(bracket(compiled, band, eps, **choice), exact_delta(eps, *BANDS[band]))


@pytest.mark.parametrize("name", SABOTAGE)
def test_leaving_an_error_term_of_a_band_out_is_noticed(name, monkeypatch):
    band, eps, choice = CASES[name]
    for owner, attribute, replacement in SABOTAGE[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert not encloses(bracket(plainly, band, eps, **choice), exact_delta(eps, *BANDS[band]))


@pytest.mark.parametrize("direction", ["forward", "replace"])
def test_a_fine_contour_of_a_band_is_close(direction):
    band, eps, choice = CASES["nothing"]
    lower, upper = bracket(plainly, band, eps, direction, **choice)
    assert upper - lower < 2e-9 * upper


@pytest.mark.parametrize("direction", ["forward", "replace"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.thorough
def test_a_labelled_step_is_enclosed_at_real_and_complex_order(band, direction):
    order, frequency = 3.0, [0.0, 2.0, 40.0]

    def run(c, *ends):
        mu, q, cut, label = xp.asarray(1 / SIGMA), xp.asarray(RATE), xp.asarray(CUT), Label(*map(xp.asarray, ends))
        line = tilted_line(c, mu, q, cut, direction, 1024, label)
        t = xp.asarray(frequency)
        both = []
        for computed in (False, True):
            log_abs, angle, off, _ = xp.vmap(lambda t: log_ratios(line, t, 2, computed))(t)  # noqa: B023
            both.append((xp.exp(xp.complex(log_abs, angle))[:, 1], (off * xp.exp(log_abs))[:, 1]))
        decay = [log_decay(c, mu, q, cut, direction, 1024, line.log_m, xp.asarray(t), label) for t in frequency]
        return real_log_m(c, mu, q, cut, direction, 1024, False, label), line.log_m, line.error, both, xp.stack(decay)

    (value, off), log_m, error, both, decay = plainly(run, order, *ends_of(band))
    exact = exact_moment(mp.mpf(order), *BANDS[band], direction)
    assert abs(mp.log(exact) - value) <= off < 1e-8
    assert abs(mp.log(exact) - log_m) <= error + ROUNDING
    for i, t in enumerate(frequency):
        moment = exact_moment(mp.mpc(order, t), *BANDS[band], direction)
        for base, (ratio, charged) in zip((exact, mp.exp(log_m)), both, strict=True):
            assert abs(moment / base - mp.mpc(complex(ratio[i]))) <= charged[i] + (ROUNDING if base != exact else 0)
        assert abs(moment / exact) <= (1 + error) * mp.exp(decay[i])


@pytest.mark.parametrize("direction", ["forward", "replace"])
@pytest.mark.parametrize("times", [1, 500])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.thorough
def test_probabilities_of_a_band_are_enclosed(band, times, direction):
    def run(times, *ends):
        return band_of(spectrum_of(times, direction=direction), 1024, *ends).real(xp.array([0.0, -1.0]))

    low, high = BANDS[band]
    lower, upper = plainly(run, times, *ends_of(band))
    for z, least, most in zip((0, -1), lower, upper, strict=True):
        under = 0 if low is None else exact_moment(mp.mpf(z), None, low, direction)
        exact = mp.log((under + exact_moment(mp.mpf(z), low, high, direction)) ** times - under**times)
        assert least <= exact <= most
    assert (upper - lower < 1e-10 * times).all()


@pytest.mark.parametrize("direction", ["forward", "replace"])
def test_bound_along_an_edge_holds_for_labelled_steps(direction):
    random = np.random.default_rng(1)

    def run(c, mu, q, cut, *ends):
        c, mu, q, cut, *ends = (xp.reshape(x, (1,)) for x in (c, mu, q, cut, *ends))
        label = Label(*ends)
        start, cell, nodes = exact_nodes(*interval(c, mu, q, cut, direction, label), 300)
        at, y = xp.concatenate([nodes, start, start + 300 * cell]), height(start, start, c, mu, direction, label)
        on_axis, log_a = integrand_and_mixture(at, c, mu, q, direction)
        top = xp.max(on_axis)
        edge, _ = along_edges(at, on_axis - top, log_a, cell, y, 2 * y * y, c, mu, q, direction, label)
        return edge, top, start, cell, y

    for order in (-1.0, 0.0, 0.3, 5.0, 200.0, 2000.0):
        mu, q = random.uniform(0.05, 2.0), 10 ** random.uniform(-5, 0)
        low = random.uniform(2.0, 6.0)
        edge, top, start, cell, y = plainly(run, order, mu, q, CUT, low, low + 3 * WIDTH)
        fine = start + cell * np.linspace(0.0, 300.0, 30_001) + 2j * y
        one, other = (1 - q + q * np.exp(s * fine * mu - mu * mu / 2) for s in (1, -1))
        grown = (order + 1) * np.log(np.abs(one)) - (order * np.log(np.abs(other)) if direction == "replace" else 0.0)
        places = [np.clip((fine.real - e) / WIDTH, -6.0, 6.0) + 2j * y / WIDTH for e in (low, low + 3 * WIDTH)]
        weights = [1 / (1 + np.exp(2 * np.sinh(place))) for place in places]
        size = np.exp(grown - np.real(fine * fine) / 2 - top) * np.abs(weights[1] - weights[0])
        total = np.sum(size) * cell / 100 / np.sqrt(2 * np.pi)
        assert 0.001 * edge < total <= edge


def test_orders_that_rise_beyond_what_a_label_falls_by_get_no_bound():
    steep, label = STEEPEST * SIGMA, Label(np.asarray(LOW), np.asarray(HIGH))
    at = tuple(np.asarray(x) for x in (1 / SIGMA, RATE, CUT))
    for rate in (RATE, 1e-9):  # at 1e-9 all other terms are small
        beyond = np.asarray(1 / SIGMA), np.asarray(rate), np.asarray(CUT)
        assert np.isinf(plainly(lambda c: real_log_m(c, *beyond, "forward", 512, False, label), 1.01 * steep)[1])  # noqa: B023
    value, off = plainly(lambda c: real_log_m(c, *at, "forward", 4096, False, label), 0.01 * steep)
    assert abs(mp.log(exact_moment(mp.mpf(0.01 * steep), LOW, HIGH)) - value) <= off < 1e-5


def test_bound_of_the_label_holds_at_every_angle_used():
    random = np.random.default_rng(0)
    x, angle = random.uniform(-4.0, 4.0, 20_000), random.uniform(-0.7, 0.7, 20_000)
    modulus = np.exp(2 * np.sinh(x) * np.cos(angle))
    whole = np.abs(1 + np.exp(2 * np.sinh(x + 1j * angle)))
    assert (np.log(np.maximum(1, modulus) / whole) <= MODULUS).all()
    assert (whole < modulus).any()  # without the constant MODULUS the bound would fail


# Two steps, remove: (sigma, rate, eps, delta at eps), by a one-dimensional integral in mpmath (40 digits).
TWO_STEPS = [
    (5.92, 2.6e-4, 0.08716892012407178, "1.7999999514306574783e-268"),
    (1.22, 2.86e-5, 0.00019879543230243946, "2.4999999908323859358e-7"),
    (2.5, 0.00152, 3.6837924899464007, "2.0999999979178626411e-144"),
    (0.307, 0.0247, 31.959129669368917, "5.4999999994853232801e-14"),
    (20.4, 0.00257, 0.00834167515866624, "1.199999998587966551e-175"),
    (0.398, 9.75e-5, 6.484060034232824, "1.7999999741455028065e-11"),
]


@pytest.mark.thorough
def test_two_steps_with_a_rare_large_loss_are_enclosed_closely(monkeypatch):
    """One effort only: the cheaper ones, which a verb tries first and which suffice for larger deltas, do not run."""
    sigma, rate, eps, delta = (np.array([float(case[i]) for case in TWO_STEPS]) for i in range(4))
    exact = [mp.mpf(case[3]) for case in TWO_STEPS]
    two = normal_form(jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), 2), eps.shape)
    effort = next(effort for effort in contour.BANDED_LADDER if effort.bands >= 8)
    half = slice(None, None, 2)
    rows = jax.tree_util.tree_map(lambda x: x[half], two)
    lower, upper = contour.contour_bounds(
        rows, delta[half], 1.1 * eps[half], verb="epsilon", direction="forward", effort=effort
    )
    assert (lower <= eps[half]).all() and (eps[half] <= upper).all() and (upper - lower < 1e-6 * upper).all()
    monkeypatch.setattr(contour.contour_bounds, "by_numpy", len(TWO_STEPS))  # one program of this size is enough
    lower, upper = contour.contour_bounds(two, eps, 10 * delta, verb="delta", direction="forward", effort=effort)
    assert all(encloses(bounds, value) for bounds, value in zip(zip(lower, upper, strict=True), exact, strict=True))
    assert (upper - lower < 1e-6 * upper)[delta > 1e-200].all()  # (a verb asks no bands for a delta below 1e-60)


@pytest.mark.thorough
def test_bands_and_the_plain_contour_agree_on_steps_of_several_kinds():
    noise, rate, times = np.array([0.8, 1.1, 2.0]), np.array([0.004, 0.02, 0.01]), np.array([400, 30, 1000])
    part = Sampled(1 / noise, rate, times.astype(float))

    def run(delta):
        nothing = xp.zeros(())
        spectrum = Spectrum(
            lambda z: 0.02 * z * (z + 1), xp.asarray(64.0), xp.asarray(0.04), (part,), (), "forward", nothing,
            nothing, xp.inf,
        )  # fmt: skip
        return bands.epsilon_bounds(spectrum, delta, xp.asarray(8.0), Effort(2048, 1024, False, bands=8))

    lower, upper = plainly(run, 1e-9)
    mechanism = jaxdp.compose(
        jaxdp.Gaussian(5.0),
        *(jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(s), q), t)
          for s, q, t in zip(noise, rate, times, strict=True)),
    )  # fmt: skip
    plain = jaxdp.epsilon_bounds(mechanism, 1e-9, relation="remove")
    assert upper - lower < 1e-6 * upper
    assert max(lower, float(plain.lower)) <= min(upper, float(plain.upper))


def test_where_hardly_a_tilt_is_found_the_bounds_of_delta_are_valid_not_nan(monkeypatch):
    """A NaN would be a BackendError: the bounds of a program and of NumPy would not overlap."""
    monkeypatch.setattr(contour.contour_bounds, "by_numpy", 2)
    sigma, rate, steps, eps = np.array([[9.0839, 5.001e-5, 216, 1.15482], [8.1394, 0.149547, 8, 19.9274]]).T
    stacks = normal_form(jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), steps), eps.shape)
    effort = next(effort for effort in contour.BANDED_LADDER if effort.bands)
    lower, upper = contour.contour_bounds(stacks, eps, np.ones(2), verb="delta", direction="forward", effort=effort)
    assert (lower <= upper).all() and (0 < upper).all() and (upper < 1e-20).all()  # the exact ones are positive


def test_far_tails_of_rare_sampling_get_a_chernoff_bound_without_bands(monkeypatch):
    monkeypatch.setattr(bands, "delta_bounds", None)
    steps = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(2.0), 0.001), 100)
    assert 3.0215e-208 <= jaxdp.delta(steps, 8.5) <= 1e-180  # by bands 3.0215e-208
