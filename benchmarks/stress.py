"""Random cases of every mechanism against routes that share no code with the bounds.

Run `make stress` (20,000 cases, about half an hour), or `python benchmarks/stress.py --cases 1e6 --seed 2 --hours 24`;
it writes benchmarks/results/stress.md and ends with status 1 where an interval misses the other route's value.
A case is one random parameter point. Its interval, widened by what the other route states as its own accuracy, must
hold that route's value. Routes: sums over all outcomes (SciPy), a plain contour integral in NumPy (no certificate,
nodes doubled until nothing changes), Monte Carlo (six standard errors), the ordering of Renyi and (epsilon, delta)
privacy, and for shuffling two kernels of the package that share only the law.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from scipy import special, stats

import jaxdp
from jaxdp.interval import Bounds
from jaxdp.shuffle import bounds as kernels

RESULTS = pathlib.Path(__file__).parent / "results" / "stress.md"
_CHUNK = 200
Moment = Callable[[np.ndarray], np.ndarray]


class Case(NamedTuple):
    """Certified bounds of some quantity, another route's value of it, and that route's own error, all of one shape."""

    bounds: Bounds
    value: np.ndarray
    error: np.ndarray


def _uniform(rng: np.random.Generator, low: float, high: float, count: int) -> np.ndarray:
    return rng.uniform(low, high, count)


def _log_uniform(rng: np.random.Generator, low: float, high: float, count: int) -> np.ndarray:
    return 10.0 ** rng.uniform(math.log10(low), math.log10(high), count)


# --- a plain contour integral ---------------------------------------------------------------------------------------


def _integral(
    log_moment: Moment,
    epsilon: float,
    rounding: float,
    least: float = 0.0,
    most: int = 2**16,
) -> tuple[float, float]:
    """(delta, error): (1/2 pi i) integral of e^{K(z) - z eps}/(z (z+1)) dz, nodes doubled until the sum is stable.

    log_moment: K at complex z with Re z > 0. rounding: its absolute error. least: the height that the sum must reach.
    The error adds the last change of the sum, the number of nodes times the largest term of their second half, and
    ``rounding`` times the sum of moduli. It is infinite where ``most`` nodes do not suffice.
    """
    grid = np.geomspace(1e-3, 1e4, 200)
    with np.errstate(invalid="ignore"):  # K is infinite at some orders
        height = np.real(log_moment(grid + 0j)) - grid * epsilon - np.log(grid * (grid + 1))
    c = grid[np.nanargmin(height)]
    h = 0.05 / np.sqrt(np.maximum(_curvature(log_moment, c), 1e-12) + 2 / c**2)

    def terms(first: int, last: int) -> np.ndarray:
        z = c + 1j * h * np.arange(first, last)
        return np.exp(log_moment(z) - z * epsilon) / (z * (z + 1))

    before = np.nan
    while True:
        nodes = max(64, int(least / h))
        if nodes > most:
            return 0.5, np.inf
        all_terms = terms(0, nodes)
        all_terms[0] *= 0.5
        while np.abs(all_terms[nodes // 2 :]).max() * nodes > 1e-11 * abs(all_terms[0]):
            if 2 * nodes > most:
                return 0.5, np.inf
            all_terms, nodes = np.concatenate([all_terms, terms(nodes, 2 * nodes)]), 2 * nodes
        value = h / np.pi * all_terms.sum().real
        size = np.abs(all_terms)
        error = abs(value - before) + h / np.pi * (size[nodes // 2 :].max() * nodes + rounding * size.sum())
        if abs(value - before) < 1e-8 * abs(value):
            return float(value), float(error)
        before, h = value, h / 2


def _answered(lower: np.ndarray, upper: np.ndarray, value: np.ndarray, error: np.ndarray) -> Case:
    """The cases in which the integral converged: those with a finite error."""
    keep = np.isfinite(error)
    return Case(Bounds(lower[keep], upper[keep]), value[keep], error[keep])


def _curvature(log_moment: Moment, c: float) -> float:
    step = 1e-3 * c
    values = np.real(log_moment(np.array([c - step, c, c + step]) + 0j))
    return float((values[0] - 2 * values[1] + values[2]) / step**2)


def _sampled_step(sigma: float, rate: float, direction: str) -> Moment:
    """K of one Poisson-sampled Gaussian step by the trapezoid rule in the outcome (an entire integrand)."""
    u = np.arange(-12.0, 12.0 + 40.0 / sigma, 0.02)  # in units of sigma; orders up to 40
    empty = math.log1p(-rate) if rate < 1 else -np.inf
    log_ratio = np.logaddexp(empty, math.log(rate) + u / sigma - 0.5 / sigma**2)
    log_null = -0.5 * u * u + math.log(0.02) - 0.5 * math.log(2 * math.pi)

    def log_moment(z: np.ndarray) -> np.ndarray:
        out = np.full(z.shape, np.inf + 0j)
        for block in np.array_split(np.flatnonzero(z.real < 38), max(1, z.size // 64)):
            power = (1 + z[block]) if direction == "remove" else -z[block]
            exponent = log_null + power[:, None] * log_ratio
            top = exponent.real.max(axis=1, initial=-np.inf)
            out[block] = top + np.log(np.exp(exponent - top[:, None]).sum(axis=1))
        return out

    return log_moment


def sampled_gaussian(rng: np.random.Generator, count: int) -> Case:
    """Poisson-sampled Gaussian steps, add and remove, against a plain contour integral."""
    few = max(1, count // 40)
    sigma, rate = _log_uniform(rng, 0.5, 10, few), _log_uniform(rng, 1e-3, 1, few)
    steps = np.floor(_log_uniform(rng, 2, 1e4, few))
    target = _log_uniform(rng, 1e-12, 1e-2, few)
    lower, upper, value, error = ([] for _ in range(4))
    for direction in ("add", "remove"):
        made = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), steps)
        epsilon = jaxdp.epsilon(made, target, relation=direction)
        keep = np.isfinite(epsilon) & (epsilon > 1e-6) & (epsilon < 50)
        found = jaxdp.delta_bounds(made, np.where(keep, epsilon, 1.0), relation=direction)
        for i in np.flatnonzero(keep):
            step = _sampled_step(sigma[i], rate[i], direction)
            delta, off = _integral(
                lambda z, step=step, i=i: steps[i] * step(z), float(epsilon[i]), 2e-14 * steps[i], most=2**12
            )
            lower.append(found.lower[i]), upper.append(found.upper[i]), value.append(delta), error.append(off)
    return _answered(*(np.array(v) for v in (lower, upper, value, error)))


# --- sums over all outcomes -----------------------------------------------------------------------------------------


def gaussian(rng: np.random.Generator, count: int) -> Case:
    """Composed Gaussians against Phi(b) - e^eps Phi(a) in SciPy."""
    sigma, steps = _log_uniform(rng, 0.3, 20, count), np.floor(_log_uniform(rng, 1, 1e4, count))
    mu = np.sqrt(steps) / sigma
    epsilon = mu * (0.5 * mu + _uniform(rng, -1, 5, count))
    epsilon = np.abs(epsilon)
    found = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.Gaussian(sigma), steps), epsilon)
    first = special.log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    with np.errstate(all="ignore"):
        value = np.exp(first) * -np.expm1(second - first)
        error = 1e-13 * (2 + epsilon + mu * mu) * np.exp(first)
    return Case(found, value, error)


def randomized_response(rng: np.random.Generator, count: int) -> Case:
    """Composed randomized response against the binomial sum."""
    local, steps = _log_uniform(rng, 0.01, 3, count), np.floor(_log_uniform(rng, 1, 300, count))
    epsilon = local * steps * _uniform(rng, 0.0, 0.9, count)
    found = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.RandomizedResponse(local), steps), epsilon)
    value = np.zeros(count)
    for i in range(count):
        heads = np.arange(steps[i] + 1)
        loss = (2 * heads - steps[i]) * local[i]
        mass = np.exp(stats.binom.logpmf(heads, steps[i], special.expit(local[i])))
        value[i] = np.sum(mass * np.maximum(-np.expm1(epsilon[i] - np.maximum(loss, epsilon[i])), 0.0))
    return Case(found, value, 1e-10 * value + 1e-300)


def discrete_laplace(rng: np.random.Generator, count: int) -> Case:
    """Composed discrete Laplace noise against repeated convolution of the law of the loss."""
    scale, steps = _log_uniform(rng, 0.3, 5, count), np.floor(_log_uniform(rng, 1, 60, count)).astype(int)
    epsilon = steps / scale * _uniform(rng, 0.0, 0.9, count)
    found = jaxdp.delta_bounds(jaxdp.repeat(jaxdp.DiscreteLaplace(scale), steps), epsilon)
    value = np.zeros(count)
    for i in range(count):
        fall = math.exp(-1 / scale[i])
        # noise N + 1 against N: loss +1/scale at outcomes >= 1 (N >= 0), -1/scale at others
        up = 1 / (1 + fall)
        heads = np.arange(steps[i] + 1)
        mass = np.exp(stats.binom.logpmf(heads, steps[i], up))
        loss = (2 * heads - steps[i]) / scale[i]
        value[i] = np.sum(mass * np.maximum(-np.expm1(epsilon[i] - np.maximum(loss, epsilon[i])), 0.0))
    return Case(found, value, 1e-10 * value + 1e-300)


def laplace(rng: np.random.Generator, count: int) -> Case:
    """Composed Laplace noise against a plain contour integral."""
    few = max(1, count // 4)
    scale, steps = _log_uniform(rng, 0.5, 10, few), np.floor(_log_uniform(rng, 20, 300, few))
    target = _log_uniform(rng, 1e-10, 1e-2, few)
    made = jaxdp.repeat(jaxdp.Laplace(scale), steps)
    epsilon = jaxdp.epsilon(made, target)
    found = jaxdp.delta_bounds(made, epsilon)
    value, error = np.zeros(few), np.zeros(few)
    for i in range(few):
        b = 1 / scale[i]

        def log_moment(z: np.ndarray, b: float = b, times: float = steps[i]) -> np.ndarray:
            # log of ((1+z) e^{zb} + z e^{-(1+z)b})/(1+2z)
            return times * (z * b + np.log(((1 + z) + z * np.exp(-(1 + 2 * z) * b)) / (1 + 2 * z)))

        value[i], error[i] = _integral(log_moment, float(epsilon[i]), 2e-14 * steps[i], least=40 / b)
    return _answered(found.lower, found.upper, value, error)


def shuffled_sum(rng: np.random.Generator, count: int) -> Case:
    """Upper bound of shuffled clones against SciPy's sum over clone counts."""
    eps0, users = _uniform(rng, 0.1, 5, count), np.floor(_log_uniform(rng, 1, 3e4, count))
    epsilon = eps0 * _uniform(rng, 0.02, 0.95, count)
    made = jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users, bound="clones")
    upper = jaxdp.delta(made, epsilon)
    value, lost = np.transpose([_clones_delta(*row) for row in zip(users, eps0, epsilon, strict=True)])
    # the lower end checks accuracy: the upper bound exceeds the sum by no more than the default accuracy
    return Case(Bounds(upper * (1 - 2e-4) - 1e-300, upper), value, 1e-9 * value + lost + 1e-300)


def _clones_delta(n: float, eps0: float, epsilon: float) -> tuple[float, float]:
    """(delta, error bound); SciPy gives 0 for positive binomial tails of up to 1e-253, which the error bound covers."""
    clones = np.arange(n)
    mass = stats.binom.pmf(clones, n - 1, math.exp(-eps0))
    truth = special.expit(eps0)
    odds = math.exp(epsilon)
    keep = mass > 0
    clones, mass = clones[keep], mass[keep]
    # P: A + Bernoulli(truth), where A ~ Bin(clones, 1/2). Q: A + Bernoulli(1 - truth). P > odds Q from ``cut`` on.
    cut = np.ceil((clones + 1) * (odds * truth - (1 - truth)) / ((2 * truth - 1) * (1 + odds)))
    tail = stats.binom.sf(cut - 1, clones, 0.5)
    before = stats.binom.sf(cut - 2, clones, 0.5)
    p = truth * before + (1 - truth) * tail
    q = (1 - truth) * before + truth * tail
    lost = (tail == 0) & (cut <= clones)
    return float(np.sum(mass * np.maximum(p - odds * q, 0.0))), float(np.sum(mass * np.where(lost, before, 0.0)))


def shuffled_kernels(rng: np.random.Generator, count: int) -> Case:
    """13 nodes of the contour against the sum over counts, delta, wherever both answer."""
    count *= 10
    users = np.floor(_log_uniform(rng, 1, 1e9, count))
    eps0 = np.minimum(_log_uniform(rng, 0.01, 20, count), np.log(np.maximum(users, 20)))
    epsilon = eps0 * _log_uniform(rng, 1e-4, 0.95, count)
    few = users * np.exp(-eps0) < 1e6
    users, eps0, epsilon = users[few], eps0[few], epsilon[few]
    made = kernels.clones_law(eps0, bound=("clones", "stronger")[int(rng.integers(2))])
    contour = kernels._KERNELS["13 nodes"]["log_delta"](made, users, epsilon)
    counts = kernels._KERNELS["counts"]["log_delta"](made, users, epsilon)
    with np.errstate(invalid="ignore"):
        middle = np.where(np.isfinite(counts.lower), 0.5 * (counts.lower + counts.upper), counts.upper)
        half = np.where(np.isfinite(counts.lower), 0.5 * (counts.upper - counts.lower), 0.0)
    answered = np.isfinite(counts.lower) & np.isfinite(contour.upper)
    return Case(Bounds(contour.lower[answered], contour.upper[answered]), middle[answered], half[answered])


def shuffled_responses(rng: np.random.Generator, count: int) -> Case:
    """Shuffled k-ary randomized response: the exact law of n - 1 equal people, two values, summed over all counts."""
    few = max(1, count // 4)
    eps0, users = _uniform(rng, 0.1, 5, few), np.floor(_log_uniform(rng, 2, 120, few)).astype(int)
    kinds = rng.integers(2, 20, few)
    epsilon = eps0 * _uniform(rng, 0.02, 0.9, few)
    made = jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, kinds), users)
    found = jaxdp.delta_bounds(made, epsilon)
    value = np.array(
        [_responses_delta(*row) for row in zip(users, eps0, kinds, epsilon, strict=True)]
    )  # one data set: a lower bound of the truth, so the upper bound must exceed it
    return Case(Bounds(np.full(few, -np.inf), found.upper), value, 1e-11 * value + 1e-16)


def _responses_delta(users: int, eps0: float, kinds: int, epsilon: float) -> float:
    """delta summed over all counts: n - 1 people hold value 2 (0 if there are two values), one person holds 0 or 1."""
    truth = math.exp(eps0) / (math.exp(eps0) + kinds - 1)
    lie = 1 / (math.exp(eps0) + kinds - 1)
    others = users - 1
    if kinds == 2:
        zeros = np.arange(others + 1)
        mass = stats.binom.pmf(zeros, others, truth)
        p = np.append(mass, 0) * lie + np.append(0, mass) * truth
        q = np.append(mass, 0) * truth + np.append(0, mass) * lie
        return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
    a, b = np.meshgrid(np.arange(users + 1), np.arange(users + 1), indexing="ij")

    def law(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        left = others - i - j
        good = (i >= 0) & (j >= 0) & (left >= 0)
        i, j, left = (np.where(good, v, 0) for v in (i, j, left))
        rest = max(1 - 2 * lie, 1e-300)
        log_mass = special.gammaln(others + 1) - special.gammaln(i + 1) - special.gammaln(j + 1)
        log_mass = log_mass - special.gammaln(left + 1) + (i + j) * math.log(lie) + left * math.log(rest)
        return np.where(good, np.exp(log_mass), 0.0)

    none, first, second = law(a, b), law(a - 1, b), law(a, b - 1)
    other = 1 - truth - lie
    p = truth * first + lie * second + other * none
    q = lie * first + truth * second + other * none
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


# --- Monte Carlo and orderings --------------------------------------------------------------------------------------


def random_allocation(rng: np.random.Generator, count: int) -> Case:
    """One epoch of random allocation against Monte Carlo, six standard errors."""
    few = max(1, count // 20)
    steps, sigma = np.floor(_log_uniform(rng, 1, 60, few)).astype(int), _log_uniform(rng, 0.5, 5, few)
    value, error, lower, upper = (np.zeros(few) for _ in range(4))
    for i in range(few):
        direction = ("add", "remove")[int(rng.integers(2))]
        made = jaxdp.RandomAllocation(jaxdp.Gaussian(sigma[i]), int(steps[i]))
        epsilon = float(jaxdp.epsilon(made, 10 ** rng.uniform(-3, -1), relation=direction))
        noise = rng.standard_normal((30_000, steps[i]))
        if direction == "remove":
            noise[:, 0] += 1 / sigma[i]
        ratio = special.logsumexp(noise / sigma[i] - 0.5 / sigma[i] ** 2, axis=1) - math.log(steps[i])
        loss = ratio if direction == "remove" else -ratio
        drawn = np.maximum(-np.expm1(epsilon - np.maximum(loss, epsilon)), 0.0)
        value[i], error[i] = drawn.mean(), 6 * drawn.std() / math.sqrt(drawn.size) + 1e-4
        lower[i], upper[i] = jaxdp.delta_bounds(made, epsilon, relation=direction)
    return Case(Bounds(lower, upper), value, error)


def renyi_ordering(rng: np.random.Generator, count: int) -> Case:
    """The lower end of epsilon against the conversion of Canonne, Kamath and Steinke of the Renyi curve."""
    sigma, rate = _log_uniform(rng, 0.5, 10, count), _log_uniform(rng, 1e-4, 1, count)
    steps, delta = np.floor(_log_uniform(rng, 1, 1e5, count)), _log_uniform(rng, 1e-12, 1e-2, count)
    made = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), rate), steps)
    orders = np.array([1.25, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    relation = ("add", "remove")[int(rng.integers(2))]
    divergence = np.stack([jaxdp.renyi(made, order, relation=relation) for order in orders])
    a = orders[:, None]
    with np.errstate(invalid="ignore"):
        epsilon = divergence + np.log1p(-1 / a) - (np.log(delta) + np.log(a)) / (a - 1)
    value = np.maximum(np.nanmin(epsilon, axis=0), 0.0)
    lower = jaxdp.epsilon_bounds(made, delta, relation=relation).lower
    return Case(Bounds(lower, np.full(count, np.inf)), value, 1e-12 * (1 + value))


def noisy_iteration(rng: np.random.Generator, count: int) -> Case:
    """Noisy iteration against random feasible shift allocations: the optimal one is never worse."""
    few, length = max(1, count // 4), int(rng.integers(2, 12))
    contraction = _uniform(rng, 0.3, 1.0, few * length).reshape(few, length)
    noise = _uniform(rng, 0.2, 3.0, few * length).reshape(few, length)
    shift = _uniform(rng, 0.0, 2.0, few * length).reshape(few, length)
    mu = np.full(few, np.inf)
    for _ in range(200):
        distance, cost = np.zeros(few), np.zeros(few)
        for j in range(length):
            before = contraction[:, j] * distance + shift[:, j]
            share = rng.beta(0.5, 0.5, few) if j < length - 1 else np.ones(few)
            cost += (share * before / noise[:, j]) ** 2
            distance = before * (1 - share)
        mu = np.minimum(mu, np.sqrt(cost))
    found = jaxdp.epsilon_bounds(jaxdp.NoisyIteration(contraction, noise, shift), 1e-5)
    value = jaxdp.epsilon(jaxdp.Gaussian(1 / mu), 1e-5)
    return Case(Bounds(found.lower, np.full(few, np.inf)), value, 1e-9 * value)


# Each family's share of the cases: a sum takes microseconds, an integral or Monte Carlo up to a second.
FAMILIES: dict[Callable[[np.random.Generator, int], Case], float] = {
    gaussian: 0.165,
    laplace: 0.01,
    randomized_response: 0.15,
    discrete_laplace: 0.15,
    sampled_gaussian: 0.015,
    renyi_ordering: 0.04,
    shuffled_sum: 0.15,
    shuffled_kernels: 0.25,
    shuffled_responses: 0.05,
    random_allocation: 0.005,
    noisy_iteration: 0.015,
}


class Tally(NamedTuple):
    """Totals of one family: cases, violations, median relative width of the intervals, CPU seconds."""

    cases: int
    violations: int
    width: float
    seconds: float


def violations(case: Case) -> np.ndarray:
    """Which intervals miss the other route's value by more than that route's error; NaN counts."""
    held = (case.bounds.lower <= case.value + case.error) & (case.value - case.error <= case.bounds.upper)
    return ~held | np.isnan(case.bounds.lower) | np.isnan(case.bounds.upper)


def run(cases: int, seed: int, hours: float, only: str | None = None) -> dict[str, Tally]:
    """``cases`` cases, divided between the families by their shares; stops after ``hours``."""
    families = [family for family in FAMILIES if only is None or family.__name__ == only]
    end, out = time.monotonic() + 3600 * hours, {}
    for family in families:
        start, done, failed, widths = time.process_time(), 0, 0, []
        chunk = 0
        share = 1.0 if only else FAMILIES[family]
        while done < cases * share and time.monotonic() < end:
            case = family(np.random.default_rng([seed, chunk, list(FAMILIES).index(family)]), _CHUNK)
            bad = violations(case)
            for i in np.flatnonzero(bad):
                print(
                    f"{family.__name__} seed {seed} chunk {chunk} case {i}:",
                    *(np.ravel(v)[i] for v in case.bounds),
                    "misses",
                    case.value[i],
                    "+-",
                    case.error[i],
                )
            done, failed, chunk = done + bad.size, failed + int(bad.sum()), chunk + 1
            with np.errstate(all="ignore"):
                widths.append(np.median((case.bounds.upper - case.bounds.lower) / np.abs(case.value)))
        out[family.__name__] = Tally(done, failed, float(np.median(widths)), time.process_time() - start)
        print(family.__name__, out[family.__name__], flush=True)
    return out


def table(found: dict[str, Tally], seed: int) -> str:
    """The results in Markdown."""
    route = {family.__name__: (family.__doc__ or "").strip() for family in FAMILIES}
    lines = [
        "# Random cases against independent routes",
        "",
        f"`python benchmarks/stress.py`, seed {seed}; jaxdp {jaxdp.__version__}, jax {jax.__version__}, "
        f"numpy {np.__version__}. A violation is an interval that misses the other route's value by more than that "
        "route's own error.",
        "",
        "| family | cases | violations | median relative width | CPU s |",
        "|---|---|---|---|---|",
    ]
    for name, tally in found.items():
        width = f"{tally.width:.1e}" if np.isfinite(tally.width) else "one-sided"
        lines.append(f"| {route[name]} | {tally.cases:,} | {tally.violations} | {width} | {tally.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=float, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=24.0, help="stop after so long")
    parser.add_argument("--only", help="one family")
    given = parser.parse_args()
    found = run(int(given.cases), given.seed, given.hours, given.only)
    text = table(found, given.seed)
    print(text)
    if given.only is None:
        RESULTS.write_text(text)
    return int(any(tally.violations for tally in found.values()))


if __name__ == "__main__":
    sys.exit(main())
