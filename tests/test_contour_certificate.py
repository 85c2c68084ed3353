"""The contour's certificate: coarse contours enclose the exact delta; leaving out an error term is noticed.

The contours are chosen by hand, and badly, so that the error under test dominates. Exact values are closed forms in
mpmath. The planning code does not run, except in one test: the bounds must hold for any plan.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import mpmath as mp
import numpy as np
import pytest
from exact import encloses, gaussian_delta_in_digits
from two_ways import compiled, plainly

import jaxdp
from jaxdp.contour import spectrum
from jaxdp.contour import trapezoid as contour
from jaxdp.contour.plan import Plan, Sides
from jaxdp.contour.spectrum import Discrete, Sampled, Spectrum, along_line
from jaxdp.contour.trapezoid import Effort
from jaxdp.contour.truncation import dense_modulus
from jaxdp.mechanisms.composition import normal_form
from jaxdp.mechanisms.spectrum import spectrum as record_spectrum
from jaxdp.numerics.exponential_sums import discrete_line, log_ratios, mean_loss, ratio_error, ratios_less_one
from jaxdp.runtime.arrays import xp
from jaxdp.runtime.backend import compiler_options
from jaxdp.sampled_gaussian import moment as sampled_gaussian
from jaxdp.sampled_gaussian.decay import log_decay

NO_CUT = 1e3  # beyond every line: nothing is cut
NEVER = -np.inf
ROUNDING = 1e-13  # 64 terms, exponents up to 50, float64


@pytest.fixture(autouse=True)
def exact_values_have_forty_digits():
    with mp.workdps(40):
        yield


def gaussian(mu):
    """The Gaussian's spectrum: only K(z), as if there were no closed form of delta."""
    return make_spectrum(lambda z: z * (z + 1) * mu**2 / 2, closed_units=64.0, mu2=mu**2)


def make_spectrum(closed, **fields):
    """A spectrum with K(z) = closed(z) and no other part; ``fields`` replace the empty parts."""
    plain = {
        "closed_units": xp.zeros(()), "mu2": xp.zeros(()), "sampled": (), "discrete": (), "direction": "forward",
        "infinity": xp.zeros(()), "reverse_infinity": xp.zeros(()), "top": xp.inf,
    }  # fmt: skip
    return Spectrum(closed, **{**plain, **fields})


def binary_response(loss, times, infinity=0.0):
    """times-fold randomized response with mass at infinity in every round: |M(c + it)| does not decay."""

    def closed(z):
        either = xp.log(xp.exp(loss * (z + 1)) + xp.exp(-loss * z))  # (NumPy has no complex logaddexp)
        return times * (either - xp.log1p(xp.exp(loss)) + xp.log1p(-infinity))

    total = -np.expm1(times * np.log1p(-infinity))
    return make_spectrum(closed, closed_units=64.0 * times, infinity=total, reverse_infinity=total, top=times * loss)


DENSE = np.linspace(-1.0, 1.0, 513)  # losses of equal mass: almost a density


def dense_law(times):
    """times-fold composition of the finite law of `DENSE`: |M(c + it)| is small up to t = 1600."""
    part = Discrete(
        DENSE[None], np.full((1, DENSE.size), -np.log(DENSE.size)), np.zeros((1, DENSE.size)), xp.array([times])
    )
    return make_spectrum(lambda z: xp.zeros(xp.shape(z), xp.complex128), discrete=(part,), top=1.0 * times)


def exact_dense_law(times, eps):
    """Exact delta of `dense_law`: integer counts of the ways in which ``times`` losses add up to a sum."""
    counts = functools.reduce(
        lambda a, _: np.convolve(a, np.ones(DENSE.size, object)), range(times), np.ones(1, object)
    )
    losses = [times * mp.mpf(-1) + mp.mpf(k) / 256 for k in range(counts.size)]
    terms = (int(n) * (1 - mp.exp(eps - x)) for n, x in zip(counts, losses, strict=True) if x > eps)
    return mp.fsum(terms) / mp.mpf(DENSE.size) ** times


def two_discrete_gaussians(sigma):
    """Two runs of the discrete Gaussian: |M(c + it)| is small up to about its period, t = 2 pi sigma^2."""
    stacks = normal_form(jaxdp.repeat(jaxdp.DiscreteGaussian(sigma), 2), (1,))
    return record_spectrum(jax.tree.map(lambda x: x[0], stacks), "forward")


def exact_two_discrete_gaussians(sigma, eps):
    """Exact delta: the sum over the outcomes of both runs under the first law."""
    variance = mp.mpf(sigma) ** 2
    mass = {x: mp.exp(-(mp.mpf(x - 1) ** 2) / (2 * variance)) for x in range(int(-14 * sigma), int(14 * sigma) + 2)}
    losses = {x: (2 * x - 1) / (2 * variance) for x in mass}
    terms = (
        mass[x] * mass[y] * (1 - mp.exp(eps - losses[x] - losses[y]))
        for x, y in itertools.product(mass, mass)
        if losses[x] + losses[y] > eps
    )
    return mp.fsum(terms) / mp.fsum(mass.values()) ** 2


def sampled(sigma, rate, direction):
    """One step of the Poisson-sampled Gaussian."""
    part = Sampled(xp.array([1 / sigma]), xp.array([rate]), xp.array([1.0]))
    return make_spectrum(lambda z: xp.zeros(xp.shape(z), xp.complex128), sampled=(part,), direction=direction)


def sampled_and_gaussian(sigma, rate, direction, mu=1.0):
    """`sampled` composed with a Gaussian, which ends the contour early: the error that is left is rounding."""
    one = sampled(sigma, rate, direction)
    return dataclasses.replace(one, closed=gaussian(mu).closed, closed_units=xp.asarray(64.0), mu2=xp.asarray(mu**2))


def exact_sampled_and_gaussian(sigma, rate, direction, eps, mu=1.0):
    """Exact delta: E over the step's outcome of the Gaussian's delta at (eps - the step's loss)."""
    step, rate = 1 / mp.mpf(sigma), mp.mpf(rate)

    def integrand(u):
        mixed = 1 - rate + rate * mp.exp(u * step - step * step / 2)
        loss, density = (mp.log(mixed), mixed) if direction == "forward" else (-mp.log(mixed), 1)
        return mp.npdf(u) * density * gaussian_delta_in_digits(eps - loss, mu)

    with mp.workdps(30):
        # the integrand is entire: Gauss-Legendre is the cheaper rule
        return mp.quad(integrand, mp.linspace(-14, 20, 35), method="gauss-legendre")


def exact_binary_response(loss, times, eps, infinity=0.0):
    loss, eps, infinity = mp.mpf(loss), mp.mpf(eps), mp.mpf(infinity)
    p = mp.exp(loss) / (1 + mp.exp(loss))
    kept = (1 - infinity) ** times
    terms = (
        mp.binomial(times, k) * p**k * (1 - p) ** (times - k) * max(1 - mp.exp(eps - (2 * k - times) * loss), 0)
        for k in range(times + 1)
    )
    return 1 - kept + kept * mp.fsum(terms)


def exact_sampled(sigma, rate, direction, eps):
    """Exact delta of (1-q) N(0) + q N(1) against N(0), or swapped (notebooks/proofs/profiles.md, section 1)."""
    sigma, rate, eps = mp.mpf(sigma), mp.mpf(rate), mp.mpf(eps)
    if direction == "forward":
        return rate * gaussian_delta_in_digits(mp.log(1 + mp.expm1(eps) / rate), 1 / sigma)
    ratio = mp.exp(-eps) - 1 + rate
    if ratio <= 0:
        return mp.mpf(0)
    x = sigma * mp.log(ratio / rate) + 1 / (2 * sigma)
    return mp.ncdf(x) - mp.exp(eps) * ((1 - rate) * mp.ncdf(x) + rate * mp.ncdf(x - 1 / sigma))


def bracket(by, make, eps, *, c, period, nodes, quadrature=256, smooth=False, cut=NO_CUT):
    """(lower, upper) of delta by the contour through c with the given alias period."""
    effort = Effort(nodes, quadrature, smooth)

    def run(eps, c, period, cut):
        subject = make()
        above, below = c * xp.array([1.05, 1.3, 2.0, 4.0]), c * xp.array([0.3, 1.0, 3.0])
        k_above = subject.real(above, cut, 1024)
        k_below = subject.real_swapped(below, cut, 1024)
        plan = Plan(c, period, np.zeros(()), cut, Sides(above, k_above, below, k_below))
        line = contour.build(subject, plan, effort)
        sums = contour.evaluate(line, contour.aliases(line, subject), subject, eps, xp.zeros(()))
        return sums.lower, sums.upper

    lower, upper = by(run, eps, c, period, cut)
    return float(lower), float(upper)


# error source: (spectrum, exact delta, contour on which this source dominates).
CASES = {
    "alias": (
        lambda: gaussian(1.0),
        lambda: gaussian_delta_in_digits(1.0, 1.0),
        {"eps": 1.0, "c": 1.5, "period": 4.0, "nodes": 64},
    ),
    "truncation": (
        lambda: gaussian(1.0),
        lambda: gaussian_delta_in_digits(1.0, 1.0),
        {"eps": 1.0, "c": 1.5, "period": 40.0, "nodes": 12},
    ),
    "truncation, raised line": (
        lambda: sampled(0.5, 0.3, "forward"),
        lambda: exact_sampled(0.5, 0.3, "forward", 2.0),
        {"eps": 2.0, "c": 1.0, "period": 40.0, "nodes": 12},
    ),
    "truncation, raised line, add": (
        lambda: sampled(0.5, 0.3, "reverse"),
        lambda: exact_sampled(0.5, 0.3, "reverse", 0.2),
        {"eps": 0.2, "c": 12.0, "period": 4.0, "nodes": 12},
    ),
    "cancellation": (
        lambda: gaussian(1.0),
        lambda: gaussian_delta_in_digits(4.0, 1.0),
        {"eps": 4.0, "c": 11.0, "period": 30.0, "nodes": 256},
    ),
    "cancellation, sampled": (
        lambda: sampled_and_gaussian(0.5, 0.3, "forward"),
        lambda: exact_sampled_and_gaussian(0.5, 0.3, "forward", 2.0),
        {"eps": 2.0, "c": 3.0, "period": 40.0, "nodes": 256},
    ),
    "cancellation, sampled, add": (
        lambda: sampled_and_gaussian(0.5, 0.3, "reverse"),
        lambda: exact_sampled_and_gaussian(0.5, 0.3, "reverse", 2.0),
        {"eps": 2.0, "c": 8.0, "period": 40.0, "nodes": 256},
    ),
    "smoothing": (
        lambda: binary_response(0.2, 100),
        lambda: exact_binary_response(0.2, 100, 7.0),
        {"eps": 7.0, "c": 1.5, "period": 60.0, "nodes": 1024, "smooth": True},
    ),
    "truncation, many atoms": (
        lambda: dense_law(4.0),
        lambda: exact_dense_law(4, 2.0),
        {"eps": 2.0, "c": 1.5, "period": 12.0, "nodes": 6, "smooth": True},
    ),
    "truncation, discrete Gaussian": (
        lambda: two_discrete_gaussians(3.0),
        lambda: exact_two_discrete_gaussians(3.0, 0.5),
        {"eps": 0.5, "c": 3.0, "period": 4.0, "nodes": 6, "smooth": True},
    ),
    "mass at infinity": (
        lambda: binary_response(0.2, 100, 1e-6),
        lambda: exact_binary_response(0.2, 100, 7.0, 1e-6),
        {"eps": 7.0, "c": 1.5, "period": 60.0, "nodes": 1024, "smooth": True},
    ),
    "quadrature": (
        lambda: sampled(0.5, 0.3, "forward"),
        lambda: exact_sampled(0.5, 0.3, "forward", 2.0),
        {"eps": 2.0, "c": 1.0, "period": 20.0, "nodes": 4096, "quadrature": 20},
    ),
    "tail cut": (
        lambda: sampled(0.5, 0.3, "forward"),
        lambda: exact_sampled(0.5, 0.3, "forward", 2.0),
        {"eps": 2.0, "c": 0.3, "period": 60.0, "nodes": 4096, "cut": 5.0},
    ),
}


def errorless_nodes(*arguments):
    """The contour's nodes as if M were computed exactly."""
    nodes = along_line(*arguments)
    return dataclasses.replace(nodes, excess=0 * nodes.excess)


def errorless_line(*arguments):
    """One step's quadrature sum as if its rule were exact."""
    line = sampled_gaussian.tilted_line(*arguments)
    return line._replace(**{name: 0 * getattr(line, name) for name in ("error", "rule", "mean_rule", "drift")})


def unsmoothed(end, _nats, *arguments):
    """The smoothing that damps the contour's end by 1e-9 nats."""
    return SMOOTHING(end, 1e-9, *arguments)


def endless(*arguments):
    """One step's line as if the strip around it had no ends."""
    return ALONG_EDGES(*arguments)[0], xp.full(2, -xp.inf)


ALONG_EDGES = sampled_gaussian.along_edges
SMOOTHING = contour._smoothing
# error source: the patches that leave it out, (owner, attribute, replacement).
SABOTAGE = {
    "alias": [(contour, "log_alias", lambda *a: (xp.asarray(NEVER), xp.asarray(NEVER)))],
    "truncation": [(contour, "log_tail", lambda *a: xp.asarray(NEVER))],
    "truncation, raised line": [(contour, "log_fallen", lambda *a: xp.asarray(NEVER))],
    "truncation, raised line, add": [(contour, "log_fallen", lambda *a: xp.asarray(NEVER))],
    "cancellation": [(contour, "_ULP", 0.0), (contour, "along_line", errorless_nodes)],
    "cancellation, sampled": [(contour, "_ULP", 0.0), (contour, "along_line", errorless_nodes)],
    "cancellation, sampled, add": [(contour, "_ULP", 0.0), (contour, "along_line", errorless_nodes)],
    "truncation, many atoms": [(contour, "log_held", lambda _spectrum, _lines, _end, until: 0 * until + NEVER)],
    "truncation, discrete Gaussian": [
        (jaxdp.DiscreteGaussian, "log_modulus", lambda _self, low, _high: 0 * low + NEVER)
    ],
    "smoothing": [(contour, "_smoothing", unsmoothed), (contour, "log_tail", lambda *a: xp.asarray(NEVER))],
    "quadrature": [(spectrum, "tilted_line", errorless_line)],
    # the charge for the ends of the line exceeds that for the mass beyond them: both charges must go
    "tail cut": [
        (Spectrum, "log_kept", lambda self, cut: xp.zeros(())),
        (sampled_gaussian, "along_edges", endless),
    ],
}


@functools.cache
def exact_of(name):
    return CASES[name][1]()


@pytest.mark.parametrize("name", CASES)
def test_a_coarse_contour_still_encloses_the_exact_delta(name):
    make, _, contour_choice = CASES[name]
    assert encloses(bracket(plainly, make, **contour_choice), exact_of(name))


# The program of a sampled step has every error term, whichever dominates: one case for each direction is enough.
ALIKE = {"truncation, raised line", "truncation, raised line, add", "cancellation, sampled", "tail cut"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in ALIKE else []) for name in CASES]
)
def test_it_encloses_the_exact_delta_also_when_compiled_as_for_users(name, compiled_as_for_users):
    make, _, contour_choice = CASES[name]
    assert compiler_options("cpu").get("xla_backend_optimization_level") != 0
    assert encloses(bracket(compiled, make, **contour_choice), exact_of(name))


@pytest.mark.parametrize("name", SABOTAGE)
def test_leaving_an_error_term_out_is_noticed(name, monkeypatch):
    make, _, contour_choice = CASES[name]
    for owner, attribute, replacement in SABOTAGE[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert not encloses(bracket(plainly, make, **contour_choice), exact_of(name))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("sigma, rate", [(0.5, 0.3), (10.0, 0.5), (0.7, 1e-3), (0.5, 1 - 1e-6)])
def test_shifted_line_gives_m_at_complex_order_within_its_stated_error(sigma, rate, direction):
    order, frequency = 1.5, [0.7, 9.0]

    def run(c, mu, q, t):
        line = sampled_gaussian.tilted_line(c, mu, q, xp.asarray(NO_CUT), direction, 64)
        log_abs, angle, error, shift = xp.vmap(lambda x: log_ratios(line, x, 2))(t)
        return xp.exp(xp.complex(log_abs, angle)), error * xp.exp(log_abs), shift, line.log_m, line.error

    ratio, bound, shift, log_m, error = plainly(run, order, 1 / sigma, rate, np.array(frequency))
    base = exact_m(sigma, rate, direction, order)
    assert abs(mp.log(base) - log_m) <= error + ROUNDING
    assert (ratio[:, 0] == 1).all() and (bound[:, 0] == 0).all()
    for t, value, off in zip(frequency, ratio[:, 1], bound[:, 1] + shift * frequency, strict=True):
        exact = exact_m(sigma, rate, direction, mp.mpc(order, t)) / base
        assert abs(exact - mp.mpc(complex(value))) <= off


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("sigma, rate, order, step", [(1.0, 1e-5, 5.0, 0.5), (2.0, 1e-4, 30.0, 3.0)])
def test_logarithm_of_a_ratio_next_to_one_is_as_exact_as_it_is_small(sigma, rate, order, step, direction):
    """Of 1e6 steps the logarithm counts 1e6 times; the plain sum of weights times e^{itL} is rounded at size 1."""
    nodes = (1, 3, 10, 40)

    def run(c, mu, q, h):
        line = sampled_gaussian.tilted_line(c, mu, q, xp.asarray(NO_CUT), direction, 512)
        usual = xp.log(xp.abs(xp.sum(line.weight * xp.exp(1j * h * line.loss))))
        return *log_ratios(line, h, 41), mean_loss(line)[0], usual

    log_abs, angle, error, shift, mean, usual = plainly(run, order, 1 / sigma, rate, step)
    base = exact_m(sigma, rate, direction, order)
    exact = {n: mp.log(exact_m(sigma, rate, direction, mp.mpc(order, n * step)) / base) for n in nodes}
    moved = mean - exact_m(sigma, rate, direction, order, loss_power=1) / base
    assert abs(moved) <= shift < 2e-18
    for n in nodes:
        off = abs(mp.mpc(log_abs[n], angle[n]) - exact[n] - 1j * n * step * moved)
        assert off <= error[n] < 2.0**-53  # the plain sum is off by thousands of these units
    assert abs(usual - exact[1].real) > 1e-12 * abs(exact[1])


def test_a_charge_of_the_ratios_left_out_is_noticed():
    """Weights and losses are moved by half of their error bounds in `Line`: the ratio moves by less than its charge."""
    c, step, count = 5.0, 0.5, 65

    def run(c, mu, q, h):
        line = sampled_gaussian.tilted_line(c, mu, q, xp.asarray(NO_CUT), "forward", 512)
        far, size = xp.real(line.loss) > 0.1, xp.abs(line.weight)
        share = xp.where(far, 0.5 * line.drift[0] / (size * xp.abs(line.loss)), 0.0)
        moved = line._replace(weight=line.weight * (1 + share))
        later = line._replace(loss=line.loss + 0.5 * line.drift[1] / size)
        there = [xp.stack(ratios_less_one(one, h, count)) for one in (line, moved, later)]
        *_, (_, _, charged, shift), (_, _, bare, _) = (
            log_ratios(one, h, count) for one in (line, line._replace(drift=0 * line.drift))
        )
        means = xp.stack([mean_loss(one)[0] for one in (line, moved, later)])
        return xp.stack(there), means, charged * xp.hypot(1 + there[0][0], there[0][1]), bare, shift

    (plain, *others), (mean, *means), charged, bare, shift = plainly(run, c, 1.0, 0.01, step)
    for other, there in zip(others, means, strict=True):
        turned = step * np.arange(count) * (there - mean)
        off = np.hypot(*(other - plain - np.stack([0 * turned, turned])))[1:]
        assert (off <= charged[1:]).all() and abs(there - mean) <= shift
        assert (off[:8] > 0.002 * charged[1:9]).all() and abs(there - mean) > 0.02 * shift  # of the charge's size
    assert (bare[1:] < charged[1:]).all()


Law = collections.namedtuple("Law", "weight loss error rule mean_rule drift")


@functools.cache
def ratios_of(step, count):
    """A function whose program serves laws with accurate weights (error 0) and poor ones (error 1)."""

    def run(loss_re, loss_im, weight_re, weight_im, mean_rule, error):
        drift = xp.zeros((2, loss_re.shape[0]))
        line = Law(weight_re + 1j * weight_im, loss_re + 1j * loss_im, error, xp.zeros(()), mean_rule, drift)
        re, im = ratios_less_one(line, step, count)
        return re, im, *ratio_error(line, re, im, step), mean_loss(line)[0]

    return run


@pytest.mark.parametrize("poor", [False, True])
@pytest.mark.parametrize("scale, step, count", [(1e-9, 1.0, 4000), (1e-4, 0.3, 1025), (1.0, 0.05, 300), (0.1, 0.2, 65)])
def test_rounding_of_a_ratio_is_of_second_order_but_for_a_shift(scale, step, count, poor):
    """Against mpmath, at random laws with losses of 1e-9 to 1: the error is within its bound, and the bound small."""
    random = np.random.default_rng(3)
    loss = scale * (random.normal(size=700) + 1j * random.uniform(0, 0.2, 700))
    weight = random.uniform(size=700) * np.exp(1j * random.normal(size=700))
    if not poor:  # accurate weights: the tilted mean of the law is real
        weight[0] -= 1j * (weight @ loss).imag / loss[0]
    size = np.abs(weight).sum()

    mean = mp.fsum(mp.mpc(w) * mp.mpc(x) for w, x in zip(weight, loss, strict=True))
    given = loss.real, loss.imag, weight.real, weight.imag, abs(float(mean.imag)), float(poor)
    found = [by(ratios_of(step, count), *given) for by in (plainly, compiled)]
    for n in (0, 1, 17, count // 2, count - 1):
        t = mp.mpf(step) * n
        turned = (mp.mpc(w) * mp.expm1(1j * t * mp.mpc(x)) for w, x in zip(weight, loss, strict=True))
        exact = mp.fsum(turned)
        for re, im, bound, shift, computed_mean in found:
            moved = 0 if poor else computed_mean - mean.real
            off = abs(1 + mp.mpc(float(re[n]), float(im[n])) - (1 + exact) * mp.expj(t * moved))
            reach = float(t) * np.abs(loss)
            assert abs(moved) <= shift <= 1e-13 * np.abs(weight * loss).sum()
            assert off <= bound[n] + 1e-300
            own = np.sum(np.abs(weight) * reach * np.minimum(reach, 2))
            first = 2e-14 * np.sum(np.abs(weight) * reach) if poor else 0
            assert bound[n] <= 1e-12 * own + first + 48 * 2.0**-53 * np.hypot(re[n], im[n]) + 1e-15 * scale * size


@pytest.mark.parametrize("direction", ["forward", "reverse", "replace"])
@pytest.mark.parametrize("sigma, rate, order", [(0.5, 0.3, 1.5), (10.0, 0.5, 30.0), (0.7, 1e-3, 6.0), (0.25, 0.9, 0.1)])
def test_the_bound_of_the_modulus_by_a_raised_line_holds_falls_and_is_close(sigma, rate, order, direction):

    def run(c, mu, q, times):
        cut = xp.asarray(NO_CUT)
        line = sampled_gaussian.tilted_line(c, mu, q, cut, direction, 512)
        mean = xp.real(xp.sum(line.weight * line.loss))
        frequency = times / xp.sqrt(xp.real(xp.sum(line.weight * (line.loss - mean) ** 2)))
        return frequency, xp.vmap(lambda t: log_decay(c, mu, q, cut, direction, 512, line.log_m, t))(frequency)

    frequency, bounds = plainly(run, order, 1 / sigma, rate, np.array([0.3, 2.0, 10.0, 1000.0]))
    base = exact_m(sigma, rate, direction, order)

    def size(t):
        return float(mp.log(abs(exact_m(sigma, rate, direction, mp.mpc(order, float(t))) / base)))

    sizes = [size(t) for t in frequency[:2]]
    assert sizes[0] <= bounds[0] and sizes[1] <= bounds[1]
    assert size(1.3 * frequency[0]) <= bounds[0]  # it holds for all larger frequencies, too
    assert (np.diff(bounds) <= 0).all()
    if rate > 0.01:  # One hump. A composition multiplies the bound: near t = 0 it keeps at least 0.3 of the true decay.
        assert bounds[0] < 0.3 * sizes[0]


def exact_m(sigma, rate, direction, z, loss_power=0):
    """One step's E[L^loss_power e^{zL}] by adaptive quadrature on the real line."""
    mu, rate = 1 / mp.mpf(sigma), mp.mpf(rate)
    here, mirrored = {"forward": (z + 1, 0), "reverse": (-z, 0), "replace": (z + 1, -z)}[direction]

    def mixture(u):
        return 1 - rate + rate * mp.exp(u * mu - mu * mu / 2)

    def integrand(u):
        ahead, behind = mp.log(mixture(u)), mp.log(mixture(-u)) if direction == "replace" else 0
        moment = mp.exp(here * ahead + mirrored * behind - u * u / 2)
        return moment * ((-ahead if direction == "reverse" else ahead - behind) ** loss_power if loss_power else 1)

    with mp.workdps(24):
        return mp.quad(integrand, mp.linspace(-14, 20, 18), method="gauss-legendre") / mp.sqrt(2 * mp.pi)


def test_leaving_out_the_mass_at_infinity_is_noticed():
    make, _, contour_choice = CASES["mass at infinity"]
    without = bracket(plainly, lambda: binary_response(0.2, 100), **contour_choice)
    assert without[1] < exact_binary_response(0.2, 100, 7.0, 1e-6)


def test_a_contour_far_left_gets_the_period_that_a_large_epsilon_asks_for():
    """With a period of at most e^10/c the alias left of eps is many times delta, and the lower bound 0."""
    mu, eps = 2000.0, 2.06e6
    effort = Effort(8192, 1, False)
    bounds = plainly(lambda e: contour.delta_bounds(gaussian(mu), e, 1.0, effort), eps)
    exact = gaussian_delta_in_digits(eps, mu)
    assert encloses(bounds, exact) and float(bounds[0]) >= (1 - mp.mpf(1e-6)) * exact


def largest_modulus(losses, masses, end, until):
    """(bound, the largest modulus found) of a finite law for end <= t <= until."""

    def bound(end, until):
        line = discrete_line(xp.zeros(()), losses, xp.log(masses), xp.zeros(losses.size))
        return dense_modulus(line, end, until[None])[0]

    step = (until - end) / (64**2 - 1)  # e^{itL} at 64^2 places is a product: 64 coarse places, 64 fine ones
    coarse, fine = (
        np.exp(1j * t[:, None] * losses) for t in (end + step * np.arange(0, 64**2, 64), step * np.arange(64))
    )
    return float(plainly(bound, end, until)), np.abs(coarse * masses @ fine.T).max()


def test_the_bound_of_many_atoms_holds_for_random_laws():
    rng = np.random.default_rng(5)
    computed = []
    for _ in range(200):
        size = int(rng.integers(1, 400))
        losses = np.cumsum(rng.gamma(rng.choice([0.5, 5.0, 1e4]), size=size))
        losses = np.round(losses / losses[-1], 4) * rng.choice([0.1, 1.0, 10.0])  # some atoms coincide
        masses = rng.dirichlet(np.full(size, rng.choice([0.1, 10.0, 1e6])))
        end = 10 ** rng.uniform(0, 2) / losses[-1]
        bound, found = largest_modulus(losses, masses, end, end * 2 ** rng.uniform(0, 4))
        assert bound >= found
        computed.append(bound)
    assert np.mean(np.array(computed) < 0.9) > 0.05  # not always the trivial bound 1


@pytest.mark.parametrize(
    ("what", "share", "end", "until"),
    [
        ("an atom of its own", 0.6, 100.0, 200.0),
        ("the ends of the density", 0.0, 7.5, 8.0),
        ("the spacing", 0.0, 1500.0, 1650.0),
    ],
)
def test_each_term_of_the_bound_of_many_atoms_is_needed(what, share, end, until):
    masses = np.full(DENSE.size, (1 - share) / DENSE.size)
    masses[100] += share
    bound, found = largest_modulus(DENSE, masses, end, until)
    terms = {
        "an atom of its own": share,
        "the ends of the density": (1 - share) / end,
        "the spacing": (1 - share) * (until / 256) ** 2 / 24,
    }
    assert found <= bound
    assert bound - terms[what] * (1 - 1e-3) < found
