"""Named randomizers: golden values, enumeration of the real randomizers, direct sums of their laws."""

import functools
import itertools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from refusal import refused_in_one_line

import jaxdp
from jaxdp.mechanisms.composition import flat_rows
from jaxdp.shuffle import bounds
from jaxdp.shuffle.law import distinct
from jaxdp.sources.shuffling import lower_laws, upper_laws, worst

GOLDEN = json.loads((Path(__file__).parent / "data" / "randomizers.json").read_text())
EXACT_SUM = 1e-12  # relative rounding of an enumeration in float64
FEW_GAP = 2e-3  # relative gap of bounds for few people and laws of more than two outcomes; the largest in this file
MAKE = {
    "krr": lambda c: jaxdp.RandomizedResponse(c["eps0"], c["k"]),
    "oue": lambda c: jaxdp.UnaryEncoding(c["eps0"], c["k"]),
    "sue": lambda c: jaxdp.UnaryEncoding(c["eps0"], c["k"], optimized=False),
    "subset": lambda c: jaxdp.SubsetSelection(c["eps0"], c["k"], c["w"]),
    "olh": lambda c: jaxdp.LocalHashing(c["eps0"], c["g"], 1 / c["g"]),
    "hadamard": lambda c: jaxdp.HadamardResponse(c["eps0"]),
}


def cases_of(kind, family):
    """The cases of one family: for each key an array of its values."""
    cases = [case for case in GOLDEN[kind] if case["family"] == family]
    return {key: np.array([float(case[key]) for case in cases]) for key in cases[0] if key != "family"}


def test_golden_file_has_every_family():
    assert {case["family"] for case in GOLDEN["law"]} == set(MAKE)
    assert {case["family"] for case in GOLDEN["enumerated"]} == {"krr", "oue", "sue", "subset"}


@pytest.mark.parametrize("family", MAKE)
def test_golden_laws_are_enclosed(family):
    case = cases_of("law", family)
    mechanism = jaxdp.Shuffled(MAKE[family](case), case["n"])
    made = jax.tree_util.tree_map(lambda a: a[:, 0], upper_laws(flat_rows(mechanism, case["eps0"].shape)))
    lower, upper = bounds.bounds("delta", made, case["n"], case["epsilon"], 1e-6)
    error = case["rel_err"] + 1e-8
    assert (lower <= case["delta"] * (1 + error)).all() and (case["delta"] * (1 - error) <= upper).all()
    assert np.median((upper - lower) / upper) <= 1e-6


@pytest.mark.parametrize("family", ["krr", "oue", "sue", "subset"])
def test_golden_enumerations_are_enclosed(family):
    case = cases_of("enumerated", family)
    lower, upper = jaxdp.delta_bounds(jaxdp.Shuffled(MAKE[family](case), case["n"]), case["epsilon"])
    assert (lower <= case["true_delta"] * (1 + EXACT_SUM)).all()
    assert (case["true_delta"] <= upper * (1 + EXACT_SUM)).all()
    assert (upper <= 1).all()


# ---- the real randomizers as tables of probabilities, (inputs, reports) ----


def krr_table(eps0, k):
    table = np.ones((k, k)) + np.expm1(eps0) * np.eye(k)
    return table / table.sum(1, keepdims=True)


def unary_table(eps0, k, optimized):
    q = 1 / (math.exp(eps0 if optimized else eps0 / 2) + 1)
    p = 0.5 if optimized else 1 - q
    reports = list(itertools.product((0, 1), repeat=k))
    one = np.where(np.eye(k) > 0, p, q)
    return np.array([[np.prod(np.where(np.array(y) > 0, row, 1 - row)) for y in reports] for row in one])


def subset_table(eps0, k, w):
    reports = list(itertools.combinations(range(k), w))
    table = np.array([[math.exp(eps0) if x in y else 1.0 for y in reports] for x in range(k)])
    return table / table.sum(1, keepdims=True)


def hashing_table(eps0, k, g):
    """Local hashing: a report is one of all g^k hash functions, uniform, and a bucket."""
    functions = list(itertools.product(range(g), repeat=k))
    bucket = krr_table(eps0, g) / len(functions)
    return np.array([np.concatenate([bucket[h[x]] for h in functions]) for x in range(k)])


def hadamard_table(eps0, k):
    sign = np.array([[1]])
    while len(sign) <= k:
        sign = np.block([[sign, sign], [sign, -sign]])
    table = np.where(sign[1 : k + 1] > 0, math.exp(eps0), 1.0)
    return table / table.sum(1, keepdims=True)


def random_table(seed, inputs, outputs, zeros):
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.ones(outputs), inputs)
    if zeros:
        table[0, 0], table[1, 2] = 0.0, 0.0
    return table / table.sum(1, keepdims=True)


# The first two inputs mirror each other. Each of the other two has probability 0 for two reports.
MIRRORED = [
    [0.5, 0.14, 0.08, 0.04, 0.15, 0.09],
    [0.14, 0.5, 0.04, 0.08, 0.09, 0.15],
    [0.38, 0.38, 0, 0, 0.12, 0.12],
    [0.44, 0.44, 0.06, 0.06, 0, 0],
]
HARDLY_EVER = [[0.01, 0.63, 0.16, 0.2], [0.12, 0.38, 0, 0.5], [0.57, 0.43, 0, 1e-301], [0.06, 0.39, 0.54, 0.01]]

TABLES = {
    "k-RR of 2": (lambda e: krr_table(e, 2), lambda e: jaxdp.RandomizedResponse(e, 2)),
    "k-RR of 4": (lambda e: krr_table(e, 4), lambda e: jaxdp.RandomizedResponse(e, 4)),
    "OUE of 2": (lambda e: unary_table(e, 2, True), lambda e: jaxdp.UnaryEncoding(e, 2)),
    "OUE of 3": (lambda e: unary_table(e, 3, True), lambda e: jaxdp.UnaryEncoding(e, 3)),
    "SUE of 3": (lambda e: unary_table(e, 3, False), lambda e: jaxdp.UnaryEncoding(e, 3, optimized=False)),
    "subsets of 2 of 4": (lambda e: subset_table(e, 4, 2), lambda e: jaxdp.SubsetSelection(e, 4, 2)),
    "subsets of 2 of 3": (lambda e: subset_table(e, 3, 2), lambda e: jaxdp.SubsetSelection(e, 3, 2)),
    "hashing 2 to 2": (lambda e: hashing_table(e, 2, 2), lambda e: jaxdp.LocalHashing(e, 2, 0.5)),
    "hashing 2 to 3": (lambda e: hashing_table(e, 2, 3), lambda e: jaxdp.LocalHashing(e, 3, 1 / 3)),
    "Hadamard, 3 inputs": (lambda e: hadamard_table(e, 3), jaxdp.HadamardResponse),
    "Hadamard, 2 of 8": (lambda e: hadamard_table(e, 6)[[1, 4]], jaxdp.HadamardResponse),
    "a table": (lambda e: random_table(1, 3, 4, False), lambda e: random_table(1, 3, 4, False)),
    "a mirrored table": (lambda e: np.array(MIRRORED), lambda e: MIRRORED),
    "a table with a tiny entry": (lambda e: np.array(HARDLY_EVER), lambda e: HARDLY_EVER),
    "a table with zeros": (lambda e: random_table(2, 3, 4, True), lambda e: random_table(2, 3, 4, True)),
}
LEVELS = (0.3, 1.0, 2.5)


def count_law(rows, people):
    """Joint law of the numbers of each report, one axis a report. people: the row of ``rows`` that each person has."""
    law = np.ones((1,) * rows.shape[1])
    for person in people:
        bigger = np.zeros(tuple(s + 1 for s in law.shape))
        for report, chance in enumerate(rows[person]):
            place = tuple(slice(int(i == report), s + int(i == report)) for i, s in enumerate(law.shape))
            bigger[place] += chance * law
        law = bigger
    return law


def merged(table):
    """Reports of proportional columns are one report: the likelihood ratios of multisets do not tell them apart."""
    groups: dict[tuple, np.ndarray] = {}
    for column in table.T:
        if column.sum() > 0:
            key = tuple(np.round(column / column.sum(), 12))
            groups[key] = groups.get(key, 0.0) + column
    return np.array(list(groups.values())).T


@functools.cache
def pairs_of_laws(name, level, n):
    """The laws of the counts for every pair of neighbouring data sets of n people, (pairs, 2, counts)."""
    table = merged(TABLES[name][0](level))
    inputs = range(len(table))
    found = []
    for others in itertools.combinations_with_replacement(inputs, n - 1):
        laws = [count_law(table, (*others, x)).ravel() for x in inputs]
        found += [(laws[i], laws[j]) for i, j in itertools.permutations(inputs, 2)]
    return np.array(found)


def true_delta(name, level, n, epsilon):
    laws = pairs_of_laws(name, level, n)
    return np.maximum(laws[:, 0] - math.exp(epsilon) * laws[:, 1], 0.0).sum(1).max()


@pytest.mark.parametrize("name", TABLES)
def test_the_enumerated_truth_lies_between_the_bounds(name):
    most = 3 if merged(TABLES[name][0](1.0)).shape[1] > 6 else 4
    points = [(a, n, s * a) for a in LEVELS for n in range(1, most + 1) for s in (0.0, 0.3, 0.8)]
    level, users, epsilon = np.array(points, float).T
    truth = np.array([true_delta(name, *point) for point in points])
    given = TABLES[name][1](level)
    randomizer = given if isinstance(given, jaxdp.Mechanism) else jaxdp.FiniteRandomizer(given)
    lower, upper = jaxdp.delta_bounds(jaxdp.Shuffled(randomizer, users), epsilon)
    assert (lower <= truth * (1 + EXACT_SUM)).all() and (truth <= upper * (1 + EXACT_SUM)).all()
    alone = users == 1
    np.testing.assert_allclose(upper[alone], truth[alone], rtol=1e-11)


def test_the_enumeration_notices_a_wrong_randomizer():
    """Bounds for a smaller eps0 lie below the enumerated truth, so the comparison above can fail."""
    truth = np.array([true_delta("k-RR of 4", 1.0, n, 0.3) for n in (1, 2, 3)])
    upper = jaxdp.delta(jaxdp.Shuffled(jaxdp.RandomizedResponse(0.8, 4), np.array([1.0, 2.0, 3.0])), 0.3)
    assert (upper < truth).all()


# ---- laws against a direct sum over how often each outcome occurs ----


def direct_delta(first, second, base, n, epsilon):
    """delta = (1/n) E[(X_1 + ... + X_n)_+], summed over the counts of outcomes; those of base 0 are added apart."""
    live = base > 0
    x = (first[live] - math.exp(epsilon) * second[live]) / base[live]
    certain = np.maximum(first[~live] - math.exp(epsilon) * second[~live], 0.0).sum()
    x, chance = np.append(x, 0.0), np.append(base[live], max(1 - base[live].sum(), 0.0))
    x, chance = x[chance > 0], chance[chance > 0]
    counts = np.array([c for c in itertools.product(range(n + 1), repeat=len(x) - 1) if sum(c) <= n])
    counts = np.column_stack([counts, n - counts.sum(1)])
    log_factorial = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    log_chance = log_factorial[n] - log_factorial[counts].sum(1) + counts @ np.log(chance)
    return certain + float(np.exp(log_chance) @ np.maximum(counts @ x, 0.0)) / n


@pytest.mark.parametrize("n", [2, 5, 9])
@pytest.mark.thorough
def test_laws_of_many_outcomes_agree_with_the_multinomial_sum(n):
    rng = np.random.default_rng(n)
    size = 20
    eps0, k = rng.uniform(0.05, 5, size), np.floor(rng.uniform(4, 30, size))
    epsilon = eps0 * rng.uniform(0, 1, size)
    epsilon[:4] = 0.0
    randomizer = jaxdp.SubsetSelection(eps0, k, np.floor(rng.uniform(2, k - 1)))
    flat = flat_rows(jaxdp.Shuffled(randomizer, n), (size,))
    for made in (upper_laws(flat), lower_laws(flat)):
        made = jax.tree_util.tree_map(lambda a: a[:, 0], made)
        joined = [_joined(made, i) for i in range(size)]
        exact = np.array([direct_delta(*outcomes, n, e) for outcomes, e in zip(joined, epsilon, strict=True)])
        lower, upper = bounds.bounds("delta", made, np.full(size, float(n)), epsilon, 1e-6)
        assert (lower <= exact * (1 + EXACT_SUM)).all() and (exact <= upper * (1 + EXACT_SUM)).all()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_reports_that_other_inputs_cannot_send_count_beside_two_mirrored_ones(n):
    """The inputs 2 and 3 cannot send one of the reports 2 and 3 each, which mirror each other as 0 and 1 do."""
    table = np.array([[0.5, 0.02, 0.4, 0.08], [0.02, 0.5, 0.08, 0.4], [0.49, 0.49, 0.0, 0.02], [0.49, 0.49, 0.02, 0.0]])
    found = jaxdp.delta(jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), n), [0.0, 0.5, 1.0])
    exact = [direct_delta(table[0], table[1], table[1], n, epsilon) for epsilon in (0.0, 0.5, 1.0)]
    assert (exact <= found * (1 + EXACT_SUM)).all()


@pytest.mark.parametrize("n", [2, 3, 7, 12])
def test_few_users_are_counted_in_full(n):
    tables = np.array([random_table(seed, 2, 4, seed % 2) for seed in range(6)])
    flat = flat_rows(jaxdp.Shuffled(jaxdp.FiniteRandomizer(tables), n), (6,))
    for law in (upper_laws(flat), lower_laws(flat)):
        law = jax.tree_util.tree_map(lambda a: a.reshape(-1, *a.shape[2:]), law)
        finite = np.where(np.isfinite(law.loss), law.loss, 0.0).max(axis=1)
        for share in (0.0, 0.4, 0.99, 1.0 - 1e-6):
            epsilon = share * finite
            exact = np.array(
                [direct_delta(*parts, n, e) for *parts, e in zip(law.first, law.second, law.base, epsilon, strict=True)]
            )
            lower, upper = bounds.bounds("delta", law, np.full(epsilon.shape, float(n)), epsilon, 1e-9)
            slack = 1e-12 * exact + 1e-15  # rounding of the direct sum, whose terms nearly cancel
            assert (lower <= exact + slack).all() and (exact <= upper + slack).all()
            assert (upper - lower <= 1e-8 * upper + 1e-15).all()


@pytest.mark.slow
@pytest.mark.parametrize(("eps0", "k", "n"), [(4.0, 10, 200), (1.0, 5, 1000), (2.0, 3, 30)])
def test_a_table_has_the_bounds_of_the_randomizer_that_it_is(eps0, k, n):
    """Also where each report is split into two equal ones, and in a batch whose rows need different numbers of laws."""
    halves = np.repeat(krr_table(eps0, k) / 2, 2, axis=1)
    laws = upper_laws(flat_rows(jaxdp.Shuffled(jaxdp.FiniteRandomizer(halves), n), (1,)))
    one = distinct(laws)
    assert laws.first.shape == (1, k * (k - 1), 2 * k) and one.first.shape[:2] == (1, 1)
    assert (one.first > 0).sum() == 3 and np.allclose([one.first.sum(), one.second.sum()], 1, atol=1e-14)
    tables = np.array([halves, 0.5 * krr_table(1.0, 2 * k)[:k] + 0.5 * halves])
    known = jaxdp.epsilon_bounds(jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, k), n), 1e-6)
    found = jaxdp.epsilon_bounds(jaxdp.Shuffled(jaxdp.FiniteRandomizer(tables), n), 1e-6)
    assert np.allclose([known.lower, known.upper], [found.lower[0], found.upper[0]], rtol=1e-9)
    alone = jaxdp.epsilon_bounds(jaxdp.Shuffled(jaxdp.FiniteRandomizer(tables[1]), n), 1e-6)
    assert np.allclose([alone.lower, alone.upper], [found.lower[1], found.upper[1]], rtol=1e-6)


def test_of_a_table_the_worst_pair_of_inputs_counts():
    """The bounds of a table are the largest over its pairs of inputs, although work is saved on the other pairs."""
    tables, n, gap = np.array([random_table(seed, 3, 4, False) for seed in range(4)]), np.repeat(3000.0, 4), 1e-4
    laws = upper_laws(flat_rows(jaxdp.Shuffled(jaxdp.FiniteRandomizer(tables), n), (4,)))
    each = jax.tree_util.tree_map(lambda a: a.reshape(-1, *a.shape[2:]), laws)
    alone = bounds.bounds("epsilon", each, np.repeat(n, 6), np.full(24, 1e-6), gap)
    together = worst("epsilon", laws, n, np.full(4, 1e-6), gap)
    for one, all_of_them in zip(alone, together, strict=True):
        assert np.allclose(one.reshape(4, 6).max(axis=1), all_of_them, rtol=2 * gap)


@pytest.mark.parametrize(
    ("randomizer", "n", "delta"),
    [
        (jaxdp.RandomizedResponse(4.0, 10), 200, 1e-6),
        (jaxdp.RandomizedResponse(8.0, 10), 2000, 1e-6),
        (jaxdp.SubsetSelection(8.0, 16), 20_000, 1e-6),
        (jaxdp.SubsetSelection(6.04, 5), 7616, 3.6e-9),
    ],
)
def test_lower_bounds_are_close_where_a_report_is_rare(randomizer, n, delta):
    lower, upper = jaxdp.epsilon_bounds(jaxdp.Shuffled(randomizer, n), delta)
    assert 0.96 * upper <= lower <= upper


def _joined(made, row):
    """first, second, base of one row, with outcomes of equal X joined into one."""
    parts = np.array([made.first[row], made.second[row], made.base[row]])
    ratio = np.round(parts[:2] / np.where(parts[2] > 0, parts[2], 1.0), 12)
    _, group = np.unique(ratio, axis=1, return_inverse=True)
    return np.array([[side[group.ravel() == g].sum() for g in range(group.max() + 1)] for side in parts])


def test_laplace_is_above_its_cells_and_not_far():
    """Rounding a report to its cell is post-processing, so the bounds of rounded reports are not above."""
    eps0, cells = 1.5, 8
    inputs, edges = np.linspace(0, 1, 3), np.linspace(0, 1, cells + 1)

    def below(y):
        return np.where(y < 0, 0.5 * np.exp(eps0 * np.minimum(y, 0)), 1 - 0.5 * np.exp(-eps0 * np.maximum(y, 0)))

    inner = below(edges[None, :] - inputs[:, None])
    table = np.diff(np.column_stack([np.zeros(3), inner, np.ones(3)]), axis=1)
    users, epsilon = np.array([1.0, 3.0, 30.0, 1e4]), np.array([0.7, 0.5, 0.2, 0.01])
    coarse = jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), users), epsilon)
    fine = jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.LocalLaplace(eps0), users), epsilon)
    assert (coarse.lower <= fine.upper).all() and (fine.lower <= fine.upper).all()
    assert (coarse.upper <= fine.upper * (1 + FEW_GAP)).all()  # the blanket of cells is no larger
    assert (fine.upper[0] - (1 - math.exp(-(eps0 - 0.7) / 2))) <= 1e-5  # alone: 1 - e^{(epsilon - eps0)/2}


def test_krr_bound_holds_where_the_variation_ratio_bound_is_too_small():
    # Five reports of equal data: delta is 0.0178031, rounded. The published table of that bound says 0.0000826.
    lower, upper = jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.RandomizedResponse(np.log(8.0), 4), 5), np.log(7.3))
    assert upper >= 0.017803 and 0 < lower <= 0.0178032


def test_named_randomizers_are_amplified_more_than_all_randomizers_together():
    named = [
        jaxdp.UnaryEncoding(2.0, 100),
        jaxdp.SubsetSelection(2.0, 100),
        jaxdp.LocalHashing(2.0, collision_probability=1 / 8),
        jaxdp.HadamardResponse(2.0),
    ]
    epsilon = [jaxdp.epsilon(jaxdp.Shuffled(one, 1e6), 1e-6) for one in named]
    clones = jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(2.0), 1e6), 1e-6)
    stronger = jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(2.0), 1e6, "stronger"), 1e-6)
    for one in epsilon:
        assert 1.3 < stronger / one < 1.5 and 1.6 < clones / one < 2.0


def test_bad_input_is_one_line():
    for make, message in (
        (lambda: jaxdp.RandomizedResponse(1.0, 1), "num_categories"),
        (lambda: jaxdp.SubsetSelection(1.0, 4, 4), "num_categories - subset_size"),
        (lambda: jaxdp.SubsetSelection(1.0, 4, 0), "subset_size"),
        (lambda: jaxdp.LocalHashing(1.0, 1), "num_buckets"),
        (lambda: jaxdp.LocalHashing(1.0, 2.5), "num_buckets"),
        (lambda: jaxdp.FiniteRandomizer([[0.5, 0.4], [0.5, 0.5]]), "sum of each row"),
        (lambda: jaxdp.FiniteRandomizer([0.5, 0.5]), "shape"),
    ):
        with refused_in_one_line(ValueError, message):
            jaxdp.epsilon(jaxdp.Shuffled(make(), 100), 1e-6)
    with pytest.raises(jaxdp.UnsupportedMechanismError, match="blanket"):
        jaxdp.epsilon(jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 100, "blanket"), 1e-6)


@pytest.mark.slow
def test_a_report_that_gives_a_person_away_has_an_infinite_epsilon_below_its_probability():
    table = [[0.9, 0.1, 0.0], [0.1, 0.9 - 1e-3, 1e-3]]
    mechanism = jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), 50)
    assert jaxdp.epsilon_bounds(mechanism, 5e-4) == (np.inf, np.inf)
    for epsilon in (40.0, 800.0, np.inf):
        lower, upper = jaxdp.delta_bounds(mechanism, epsilon)
        assert 1e-3 * (1 - 1e-9) <= lower <= 1e-3 <= upper
    with jax.enable_x64(True):
        traced = jax.jit(lambda p: jaxdp.delta_bounds(jaxdp.Shuffled(jaxdp.FiniteRandomizer(p), 50), 3.0))
        lower, upper = map(float, traced(np.array(table)))
    assert 1e-3 * (1 - 1e-9) <= lower <= 1e-3 <= upper


def test_a_table_bounded_by_its_epsilon_alone_is_not_rounded_to_single_precision():
    table = np.array([[0.7, 0.3], [0.2, 0.8]])
    local = jaxdp.FiniteRandomizer(table).max_loss()
    assert local.dtype == np.float64 and 0 <= local - np.log(3.5) < 1e-14


def test_the_local_epsilon_of_a_table_is_that_of_its_normalised_rows():
    table = np.array([[0.9 + 9e-13, 0.1], [0.2 - 9e-13, 0.8]])
    rows = table / table.sum(axis=1, keepdims=True)
    found = jaxdp.epsilon(jaxdp.Shuffled(jaxdp.FiniteRandomizer(table), 1, "clones"), 0.0)
    assert np.log(rows[1, 1] / rows[0, 1]) <= found
