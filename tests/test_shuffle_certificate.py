"""Every error term of the shuffle kernels is needed: if a test removes a term, some bound becomes wrong.

With the production constants most terms are smaller than rounding. The tests use constants that make them visible.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats
from two_ways import row_by_row

import jaxdp
from jaxdp.interval import Bounds
from jaxdp.runtime import backend, precision
from jaxdp.runtime.arrays import on_host
from jaxdp.runtime.backend import compiler_options
from jaxdp.shuffle import bounds, contour, counts, law, rounds, tilted_sum

SIZE = 64


@pytest.fixture(autouse=True, scope="module")
def _canary_before_sabotage():
    backend.ensure_canary("jaxdp.shuffle.bounds", backend.platform())


def without(module, name, *changes):
    """The function ``name`` of a module, executed from its source with parts replaced. changes: pairs (old, new)."""
    source = inspect.getsource(getattr(module, name))
    for old, new in changes:
        assert source.count(old) == 1, f"{name} no longer has one {old!r}"
        source = source.replace(old, new)
    space = dict(vars(module))
    exec("from __future__ import annotations\n" + source, space)  # noqa: S102  # text of this package
    return space[name]


def evaluated(function, *arguments):
    """``function`` at every row of the arguments, by one compiled program."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        run = jax.jit(jax.vmap(function), compiler_options=compiler_options("cpu"))
        return jax.tree_util.tree_map(np.asarray, run(*jax.tree_util.tree_map(jnp.asarray, arguments)))


def all_points(*kinds):
    """`points` for several pairs (variance, deviations), joined so that one program computes them."""
    return np.concatenate([points(*kind) for kind in kinds], axis=1)


def points(variance, deviations):
    """eps0, users, epsilon. variance: of the number of clones, about. deviations: range of epsilon, in deviations."""
    rng = np.random.default_rng(0)
    eps0 = rng.uniform(0.3, 4, SIZE)
    rate = np.exp(-eps0)
    users = np.floor(variance * 10 ** rng.uniform(0, 0.5, SIZE) / (rate * (1 - rate)))
    z = rng.uniform(*deviations, SIZE)
    loss = 2 * np.arctanh(np.minimum(z * np.tanh(eps0 / 2) / np.sqrt(users * rate), 0.9))
    return eps0, users, np.minimum(loss, 0.9 * eps0)


def tilt_of(eps0, users, epsilon):
    return contour.saddle(contour.sum_at(law.clones(eps0, "clones"), users, epsilon))


def contour_of(eps0, users, epsilon):
    return contour.evaluate(law.clones(eps0, "clones"), users, epsilon)


def counts_of(eps0, users, epsilon):
    return counts.evaluate(law.clones(eps0, "clones"), users, epsilon)


@functools.cache
def sum_over_counts(where):
    """Bounds of log delta by the sum over counts. where: the bytes of eps0, users and epsilon, a key for the cache."""
    eps0, users, epsilon = np.frombuffer(where).reshape(3, -1)
    with precision.expecting(10**6):  # by a compiled program: NumPy would take longer for so many points
        return bounds._KERNELS["counts"]["log_delta"](bounds.clones_law(eps0, bound="clones"), users, epsilon)


def wrong(found, *where):
    """(number of upper bounds of log delta below the sum over counts, number of lower bounds above it)."""
    exact = sum_over_counts(np.stack(where).tobytes())
    return int(np.sum(found.upper < exact.lower)), int(np.sum(found.lower > exact.upper))


TAIL = "near + floor + peaks"
ALIAS = "right + xp.where(subtract, remainder, plain)"
# term: (constants that make it visible, function, text with the term, text without it, variance of the clone count)
TERMS = {
    "peaks of the tail": ({}, "peak_bounds", TAIL, "near + floor", 2000),
    "near part of the tail": ({"LAST_NODE": 3.0}, "peak_bounds", TAIL, "floor + peaks", 3000),
    "alias on the right": ({"LAST_NODE": 18.0}, "alias_bounds", ALIAS, "xp.where(subtract, remainder, plain)", 3000),
}


def outcomes(s):
    """All values of the sum of a law of two atoms, with their probabilities."""
    n = int(s.users)
    counts_of_both = np.array([(a, b) for a in range(n + 1) for b in range(n + 1 - a)])
    third = n - counts_of_both.sum(axis=1)
    mass = stats.multinomial(n, [*s.mass, 1 - s.mass.sum()]).pmf(np.column_stack([counts_of_both, third]))
    return counts_of_both @ s.x, mass


def small_groups(seed=0, count=40):
    """Pairs (Sum, Tilt) of 5 to 29 reports at random eps0 and epsilon, computed by NumPy."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        eps0, users = rng.uniform(0.3, 3), float(rng.integers(5, 30))
        s = contour.sum_at(law.clones(np.float64(eps0), "clones"), users, np.float64(eps0 * rng.uniform(0.05, 0.8)))
        yield s, contour.saddle(s)


@pytest.mark.parametrize("left", [True, False])
def test_the_left_alias_by_enumeration_is_within_its_bound_which_is_needed(left, monkeypatch):
    """No sum exceeds the period, so the right alias is 0. Sums below minus one period add to the left alias."""
    if not left:
        monkeypatch.setattr(contour, "alias_bounds", without(contour, "alias_bounds", (ALIAS, "right")))
    failures = 0
    with on_host():
        for s, t in small_groups():
            period = s.users * s.x.max() * (1 + 1e-9)
            found = contour.alias_bounds(s, t, period, np.float64(0.0))
            values, mass = outcomes(s)
            turns = np.arange(1, 200)[:, None]
            terms = (
                mass * np.maximum(values + turns * period, 0) * np.exp(-t.c * turns * period - s.users * t.log_moment)
            )
            excess = terms.sum() - found.known
            assert excess >= -found.error
            failures += excess > found.bound + found.error
    assert (failures == 0) == left


@pytest.mark.parametrize("charged", [True, False])
def test_the_tail_of_the_smoothed_sum_is_needed(charged):
    failures = 0
    with on_host():
        for s, t in small_groups(seed=1):
            h = 2 * np.pi / (30 * t.deviation)
            nodes = 32
            variance = np.float64((0.8 / (nodes * h)) ** 2)
            (sums,) = zip(*contour.nodes_of(s, t, h, np.arange(float(nodes)), np.array([variance])), strict=True)
            tail = contour.smoothed_tail(t.c, variance, h, nodes * h) if charged else 0.0
            upper, lower, _ = contour.charged_for_rounding(s, t, h, contour.Nodes(*sums), tail, variance)
            values, mass = outcomes(s)
            deviation = np.sqrt(variance)
            smoothed = values * stats.norm.cdf(values / deviation) + deviation * stats.norm.pdf(values / deviation)
            exact = (mass * smoothed).sum() * np.exp(-s.users * t.log_moment - 0.5 * variance * t.c**2)
            failures += not lower <= exact <= upper
    assert (failures == 0) == charged


@pytest.mark.parametrize("term", TERMS)
def test_without_a_term_of_the_contour_a_bound_is_wrong(term, monkeypatch):
    constants, name, old, new, variance = TERMS[term]
    where = points(variance, (0.1, 5.0))
    for constant, value in constants.items():
        monkeypatch.setattr(contour, constant, value)
    honest = row_by_row(contour_of, *where)
    assert np.isfinite(honest.lower).sum() > 20 and wrong(honest, *where) == (0, 0)
    monkeypatch.setattr(contour, name, without(contour, name, (old, new)))
    assert sum(wrong(row_by_row(contour_of, *where), *where)) > 10


def three_atoms(seed=3, count=1500):
    """Tuples (Sum, Tilt, step, first node) of three atoms, one so light that pairs with it hardly reduce |phi|."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, heavy, pull = 10 ** rng.uniform(3, 4), rng.uniform(0.2, 0.5), 10 ** rng.uniform(0, 0.2)
        weights = np.array([heavy, pull / (2 * n * (1 - heavy))])[:: rng.choice([1, -1])]
        x, rest = rng.uniform(0.1, 1.0, 2) * [1, -1], 1 - weights.sum()
        mean = weights @ x
        deviation = np.sqrt(n * (weights @ (x - mean) ** 2 + rest * mean**2))
        s = contour.Sum(x, weights, 0 * x, rest, mean, 0.0, 0.0, 0.0, 1.0, n)
        t = contour.Tilt(10 ** rng.uniform(-1, 0.5) / deviation, 0.0, weights, rest, n * mean, deviation)
        first = 0.24 / np.abs(x).max()
        yield s, t, first / rng.integers(15, 30), first


@functools.cache
def sums_beyond_the_first_node():
    """Arguments of `contour.peak_bounds`, and the sum of |phi|^n h/|z|^2 that it bounds."""
    found = []
    for s, t, h, first in three_atoms():
        at = first + h * np.arange(6000.0)  # nodes farther out could only increase the sum
        ahead, leaps = np.exp(1j * at[:75, None] * s.x), np.exp(1j * h * np.arange(0.0, 6000.0, 75.0)[:, None] * s.x)
        phi = t.rest + ((leaps * t.weights) @ ahead.T).ravel()  # at 6000 = 80 x 75 nodes, as products
        found.append(((s, t, h, first), (h * np.abs(phi) ** s.users / (t.c**2 + at**2)).sum()))
    return found


@pytest.mark.parametrize("charged", [True, False])
def test_nodes_far_from_every_recurrence_must_be_charged(charged):
    """The sum over the nodes from the first one on is compared with its bound, with and without the term ``floor``."""
    bound = contour.peak_bounds if charged else without(contour, "peak_bounds", (TAIL, "near + peaks"))
    with on_host():
        failures = sum(total > bound(*arguments) for arguments, total in sums_beyond_the_first_node())
    assert failures == 0 if charged else failures > 10


def test_without_the_window_s_remainder_the_sum_over_counts_is_too_small(monkeypatch):
    where = points(200, (0.1, 5.0))
    monkeypatch.setattr(counts, "_WIDTH", 1.0)
    monkeypatch.setattr(counts, "_MORE", 0.0)
    few = row_by_row(counts_of, *where)
    change = "xp.logaddexp(summed, log_missed)", "summed"
    monkeypatch.setattr(counts, "evaluate", without(counts, "evaluate", change))
    sabotaged = row_by_row(counts_of, *where)
    monkeypatch.undo()
    assert wrong(few, *where) == (0, 0)
    assert wrong(sabotaged, *where)[0] == SIZE


def test_a_rare_report_that_tells_much_leaves_close_bounds():
    """The sum of the reports is then far from normal: a period of a few standard deviations would cause aliasing."""
    table = np.array([[0.2, 0.3, 0.5], [1e-4, 0.4, 0.5999], [1e-4, 0.5, 0.4999]])
    users = 400
    with on_host():
        for person, other, epsilon in ((0, 1, 0.0), (0, 1, 2.0), (1, 0, 0.1)):
            made = law.finite_law(table, person, other, 2)
            s = contour.sum_at(made, np.float64(users), np.float64(epsilon))
            counts_of_all = np.array([(a, b, users - a - b) for a in range(users + 1) for b in range(users + 1 - a)])
            mass = stats.multinomial(users, made.base).pmf(counts_of_all)
            exact = np.log(mass @ np.maximum(counts_of_all @ s.x, 0)) + s.log_factor
            found = contour.evaluate_long(made, s.users, np.float64(epsilon), 2048.0)
            assert found.lower <= exact <= found.upper
            assert found.upper - found.lower < 0.01


# The inputs hardly differ: the rounding of the table's entries is larger than that of a sum over its outcomes.
ALIKE = np.array(
    [
        [4.704598495472298e-06, 0.5772183688410523, 0.24052882307562315, 0.1822481034848292],
        [4.36748981470381e-05, 0.5771958743624266, 0.24051944955121438, 0.182241001188212],
        [1.6358489851951216e-05, 0.5772116419692456, 0.24052601996566342, 0.1822459795752391],
    ]
)


@pytest.mark.parametrize("consistent", [True, False])
def test_the_mean_of_a_table_is_that_of_its_outcomes(consistent, monkeypatch):
    """The mean in closed form differs from that of the outcomes by 1e-16, enough for a (wrong) upper bound of 0."""
    monkeypatch.setattr(contour, "wider", lambda s, t: t)  # `wider` changes the tilt, and would hide the error
    if not consistent:
        monkeypatch.setattr(
            contour, "sum_at", without(tilted_sum, "sum_at", ("xp.where(apart, xp.sum(parts), mean)", "mean"))
        )
    with on_host():
        found = contour.evaluate_long(
            law.finite_law(ALIKE, 0, 1, 2), np.float64(20), np.float64(3.8971244066488e-11), 1024.0
        )
    assert (found.lower <= -10.1530226 <= found.upper) == consistent  # exact: the log of the multinomial sum


@pytest.mark.parametrize(
    ("table", "users", "epsilon", "exact", "close"),  # exact: the multinomial sum over the law of the worst two inputs
    [
        ([[1e-5, 1e-5, 1], [1e-8, 3e-5, 1]], 3000, 0.1, 6.8345e-6, 0.02),  # the first guess of the tilt overflows
        ([[1e-7, 0.6, 0.4], [3e-7, 0.6, 0.4], [5e-7, 0.6, 0.4]], 1000, 1e-3, 2.99915e-7, 1e-5),
        ([[0.9, 0.1, 1e-3], [1e-5, 2e-5, 1]], 2000, 2.0, 0.93481, 1e-3),  # with the best tilt the deviation is almost 0
    ],
)
def test_tables_of_rare_reports_have_bounds(table, users, epsilon, exact, close):
    table = np.array(table) / np.sum(table, axis=1, keepdims=True)
    lower, upper = jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), users), epsilon)
    assert lower <= exact * (1 + 1e-5) and exact * (1 - 1e-5) <= upper <= exact * (1 + 1e-4)
    assert upper - lower <= close * upper


@pytest.mark.slow
@pytest.mark.parametrize("pairs_of_atoms", [True, False])
def test_without_recurrences_the_long_sum_is_wrong_for_few_users(pairs_of_atoms, monkeypatch):
    """For two users |phi| returns to 1. The bounds hold only because the recurrences are charged or smoothed."""
    rng = np.random.default_rng(1)
    eps0, users = rng.uniform(0.3, 4, SIZE), np.full(SIZE, 2.0)
    where = eps0, users, eps0 * rng.uniform(0.05, 0.9, SIZE)

    def long(a, n, e):
        return contour.evaluate_long(law.clones(a, "clones"), n, e, 512.0)

    if not pairs_of_atoms:
        windows = contour.windows_of
        nothing = {"beyond": jnp.zeros(()), "smooth": jnp.asarray(False)}
        monkeypatch.setattr(contour, "windows_of", lambda *given: windows(*given)._replace(**nothing))
    failures = sum(wrong(evaluated(long, *where), *where))
    assert failures == 0 if pairs_of_atoms else failures > 10


def long_sums(nodes):
    return lambda a, n, e: contour.evaluate_long(law.clones(a, "clones"), n, e, nodes)


@pytest.mark.parametrize("nodes", [64.0, 128.0, 1024.0])
@pytest.mark.thorough
def test_windows_round_recurrences_hold_the_sum_over_counts(nodes):
    where = all_points(*((variance, (0.05, 6.0)) for variance in (3, 30, 300, 3000)))
    assert wrong(evaluated(long_sums(nodes), *where), *where) == (0, 0)


# (text, text without a part): the charge for far recurrences; the node from which a Gaussian replaces recurrences.
@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [("between + recurring", "between"), ("(count + 0.5) * spacing", "(9 * count + 0.5) * spacing")]
)
def test_without_a_part_of_the_recurrences_beyond_the_windows_a_bound_is_wrong(part, monkeypatch):
    monkeypatch.setattr(contour, "windows_of", without(contour, "windows_of", part))
    where = all_points((100, (0.05, 6.0)), (1000, (0.05, 6.0)), (1000, (0.02, 0.2)), (3000, (0.02, 0.2)))
    assert sum(wrong(evaluated(long_sums(128.0), *where), *where)) > 0


def test_the_charge_for_rounding_is_above_the_rounding_of_the_sum_over_nodes():
    """Here the other errors are negligible: the interval is as wide as the charge, and holds the sum in 50 digits."""
    eps0, users, epsilon = points(1e9, (0.5, 8.0))
    found = evaluated(contour_of, eps0, users, epsilon)
    assert (found.upper - found.lower < 1e-8).all()
    tilt = evaluated(tilt_of, *(x[:6] for x in (eps0, users, epsilon)))
    for i in range(6):
        place = float(tilt.c[i]), float(tilt.deviation[i])
        exact = nodes_in_high_precision(eps0[i], users[i], epsilon[i], *place)
        assert found.lower[i] <= exact <= found.upper[i]
        rounding = abs(float(exact - mpmath.mpf(float(found.estimate[i]))))
        assert rounding < found.upper[i] - found.lower[i]


def nodes_in_high_precision(eps0, users, epsilon, c, deviation):
    """log delta from the same nodes (abscissa c, the same step) in 50 digits, less the known alias on the left."""
    with mpmath.workdps(50):
        a, e = mpmath.exp(mpmath.mpf(float(eps0))), mpmath.exp(mpmath.mpf(float(epsilon)))
        r, n = 1 / a, mpmath.mpf(float(users))
        x = [2 * (a - e) / (r * (a + 1)), -2 * (a * e - 1) / (r * (a + 1))]
        scale = max(map(abs, x))
        x = [one / scale for one in x]
        h = mpmath.mpf(contour.LAST_NODE / (contour.NODES * deviation))
        total = mpmath.mpf(0)
        for j in range(contour.NODES + 1):
            z = mpmath.mpc(c, h * j)
            moment = 1 - r + r / 2 * (mpmath.exp(z * x[0]) + mpmath.exp(z * x[1]))
            total += mpmath.re(mpmath.exp(n * mpmath.log(moment)) / z**2) * (mpmath.mpf(1) / 2 if j == 0 else 1)
        period = 2 * mpmath.pi / h
        q = mpmath.exp(-c * period)
        known = q / (1 - q) ** 2 * period - q / (1 - q) * n * (e - 1) / scale  # alias on the left
        return mpmath.log((h / mpmath.pi * total - known) * scale / n)


# ---- the finite pairs around a round ----


def profiles(seed=0, count=12):
    """Tuples (grid of epsilon, x = e^epsilon, delta there in 50 digits).

    delta is convex and piecewise linear in x: one straight line, or three corners.
    """
    rng = np.random.default_rng(seed)
    for trial in range(count):
        grid = np.sort(np.append(rng.uniform(0, 2, 63), 0.0)) if trial % 2 else np.linspace(0, 1.0, 64)
        corners = [grid[-1]] if trial % 4 < 2 else [grid[-1], *rng.uniform(0, grid[-1], 2)]
        masses = 10 ** rng.uniform(-20, 0, len(corners))
        x = [mpmath.exp(mpmath.mpf(float(e))) for e in grid]
        ends = [mpmath.exp(mpmath.mpf(float(e))) for e in corners]
        exact = [sum(mpmath.mpf(m) * max(end - a, 0) for m, end in zip(masses, ends, strict=True)) for a in x]
        yield grid, x, exact


def rounded_up(value):
    nearest = float(value)
    return nearest if value <= nearest else np.nextafter(nearest, np.inf)


def log_values(exact):
    return np.array([rounded_up(mpmath.log(value)) if value > 0 else -np.inf for value in exact])


def profile_of(masses, x):
    """delta at x[:-1] of a pair with these masses under Q at x[1:]; x = e^epsilon on the grid."""
    return [
        sum((m * (end - a) for m, end in zip(masses, x[1:], strict=True) if end > a), mpmath.mpf(0)) for a in x[:-1]
    ]


@pytest.mark.parametrize("charged", [True, False])
def test_a_chord_that_lowers_a_value_is_charged_for_its_rounding(charged, monkeypatch):
    """The given bounds are log delta, rounded up. Where delta is a straight line, no chord may go below it."""
    if not charged:
        monkeypatch.setattr(rounds, "lowered", without(rounds, "lowered", (" + _CHARGE * (8 + size_of)", "")))
    failures = 0
    with mpmath.workdps(50), on_host():
        for grid, _, exact in profiles():
            found = rounds.chorded(grid, log_values(exact))
            failures += any(f < mpmath.log(v) for f, v in zip(found, exact, strict=True) if v > 0)
    assert failures == 0 if charged else failures > 3


@pytest.mark.parametrize("charged", [True, False])
def test_upper_masses_are_charged_for_the_rounding_of_the_slopes(charged):
    masses = rounds.masses_of_falls
    if not charged:
        masses = without(rounds, "masses_of_falls", ("return xp.logaddexp(mass, charge)", "return mass"))
    failures = 0
    with mpmath.workdps(50), on_host():
        for grid, x, exact in profiles(seed=1, count=40):
            falls = np.maximum.accumulate(rounds.log_falls(grid, log_values(exact))[::-1])[::-1]
            found = profile_of([mpmath.exp(mpmath.mpf(float(m))) for m in masses(falls)], x)
            failures += any(f < v for f, v in zip(found, exact[:-1], strict=True))
    assert failures == 0 if charged else failures > 3


@pytest.mark.parametrize("charged", [True, False])
def test_lower_masses_are_charged_for_the_rounding_of_the_slopes(charged, monkeypatch):
    """ULP = 0 removes the margins of the values, which are larger. Then only the charge keeps the profile low."""
    monkeypatch.setattr(rounds, "ULP", 0.0)
    masses = (
        rounds.masses_below if charged else without(rounds, "masses_below", (" + _CHARGE * (slope + following)", ""))
    )
    failures = 0
    with mpmath.workdps(50), on_host():
        for grid, x, exact in profiles(seed=2, count=24):
            logs = log_values(exact)
            found = profile_of([mpmath.mpf(float(m)) for m in masses(grid, Bounds(logs, logs))], x)
            failures += any(f > mpmath.mpf(float(v)) for f, v in zip(found, np.exp(logs), strict=False))
    assert failures == 0 if charged else failures > 3
