"""The report page: its numbers agree with the verbs, its words fit the relation, and a browser shows it."""

import contextlib
import functools
import html
import html.parser
import io
import math
import re
import shutil
import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import matplotlib.image
import mpmath
import numpy as np
import pytest
from refusal import refused_in_one_line

import jaxdp
from jaxdp.report.facts import Facts
from jaxdp.report.page import page_of
from jaxdp.report.text import factor, number, outward, percent

SGD = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), 1000)
DELTAS = [1e-5, 1e-6]
RATES = np.array([1e-3, 1e-2, 0.1])
CASES = [
    (jaxdp.Gaussian(2.0), "add_or_remove"),
    (jaxdp.Gaussian(2.0), "replace_one"),
    (SGD, "add_or_remove"),
    (jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.1), "remove"),
    (jaxdp.compose(jaxdp.Laplace(2.0), jaxdp.Gaussian(3.0)), "add_or_remove"),
    (jaxdp.Shuffled(jaxdp.LocalRandomizer(2.0), 10**4), "replace_one"),
    (jaxdp.ApproximateDP(1.0, 1e-6), "replace_one"),
]
IDS = [f"{type(mechanism).__name__}-{relation}" for mechanism, relation in CASES]


@functools.cache
def facts_of(mechanism, relation):
    return Facts.of(mechanism, relation, None, DELTAS)


@functools.cache
def missed_by_verb(mechanism, relation, rate):
    return jaxdp.tradeoff(mechanism, rate, relation=relation)


def tables(page):
    """For each table of the page its rows of cells, as text; a number is the text of its ``value`` attribute."""
    found = []
    for table in re.findall(r"<table>(.*?)</table>", page):
        rows = re.findall(r"<tr>(.*?)</tr>", table)
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
        found.append([[re.sub(r'<data value="(.*?)">.*?</data>', r"\1", cell) for cell in row] for row in cells])
    return found


def words(page):
    """The text that a reader of the page sees, without tags and styles."""
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", page))


def share(text):
    return float(text.removesuffix(" %")) / 100


@pytest.mark.parametrize(("mechanism", "relation"), CASES, ids=IDS)
def test_the_bounds_of_the_page_are_those_of_the_verbs_rounded_outward(mechanism, relation):
    rows = tables(page_of(facts_of(mechanism, relation)))[0][1:]
    bounds = jaxdp.epsilon_bounds(mechanism, DELTAS, relation=relation)
    for row, delta, lower, upper in zip(rows, DELTAS, *bounds, strict=True):
        assert float(row[0]) == delta
        assert lower * (1 - 2e-8) <= float(row[1]) <= lower
        assert upper <= float(row[2]) <= upper * (1 + 2e-8)


def test_delta_is_certified_at_the_epsilons_that_are_given():
    ((_, *rows), *_) = tables(jaxdp.report(jaxdp.Laplace(3.0), epsilon=[0.2, 0.1]))
    upper = jaxdp.delta(jaxdp.Laplace(3.0), [0.2, 0.1])
    assert [float(row[0]) for row in rows] == [0.2, 0.1]
    assert all(u <= float(row[2]) <= u * (1 + 1e-8) for row, u in zip(rows, upper, strict=True))


@pytest.mark.parametrize(("mechanism", "relation"), CASES, ids=IDS)
@pytest.mark.thorough
def test_no_attack_on_the_trade_off_curve_is_more_accurate_than_the_page_says(mechanism, relation):
    page = page_of(facts_of(mechanism, relation))
    right, advantage, *recognised = [[share(cell) for cell in row[1:]] for row in tables(page)[1][1:]]
    total = jaxdp.delta_bounds(mechanism, 0.0, relation=relation)
    assert (1 + total.upper) / 2 - 1e-12 <= right[0] <= (1 + total.upper) / 2 + 1.01e-4
    assert total.upper - 1e-12 <= advantage[0] <= total.upper + 1.01e-4
    missed = np.array([missed_by_verb(mechanism, relation, rate) for rate in RATES])
    assert (1 + (1 - missed) - RATES).max() / 2 <= right[0] + 1e-12
    # the largest advantage that any (epsilon, delta)-DP mechanism allows
    epsilon = jaxdp.epsilon(mechanism, DELTAS[0], relation=relation)
    assert total.upper <= math.tanh(epsilon / 2) + 2 * DELTAS[0] / (1 + math.exp(epsilon)) + 1e-12
    assert right[1] == pytest.approx(1 / (1 + math.exp(-epsilon)), abs=1e-4)
    for rate, most, row in zip(RATES, 1 - missed, recognised, strict=False):
        assert row[0] == pytest.approx(most, abs=0.01)
        response = min(math.exp(epsilon) * rate, 1 - math.exp(-epsilon) * (1 - rate))
        assert row[1:] == pytest.approx([response, rate], abs=1e-4)


def crossed(facts, rates, missed):
    """Epsilons at which the curve allows less than the certified lower bound of delta, so the curve is too high."""
    gain = 1 - missed[:, None] - np.exp(facts.grid) * rates[:, None]
    return facts.grid[gain.max(axis=0) < facts.profile.lower - 1e-9]


@pytest.mark.parametrize(("mechanism", "relation"), CASES, ids=IDS)
def test_the_trade_off_curve_leaves_room_for_every_delta_that_is_lost(mechanism, relation):
    facts = facts_of(mechanism, relation)
    a, d = np.exp(facts.grid), facts.profile.upper
    corners = np.clip((d[:-1] - d[1:]) / (a[1:] - a[:-1]), 0, 1)  # rates at which two lines of the curve meet
    rates = np.unique(np.concatenate([[0.0, 1.0], corners, 1 - corners, np.linspace(0, 1, 101)]))
    curve = facts.missed(rates)
    assert crossed(facts, rates, curve).size == 0
    assert crossed(facts, rates, np.minimum(curve + 1e-3, 1)).size > 0
    # The verb uses another grid of epsilons, and for two pairs it takes the smaller of the two curves; hence 0.01. One
    # rate per case is enough here: the thorough test above checks all of them.
    rate = RATES[CASES.index((mechanism, relation)) % RATES.size]
    assert facts.missed(rate) == pytest.approx(missed_by_verb(mechanism, relation, rate), abs=0.01)
    assert (facts.profile.lower <= facts.profile.upper).all()
    assert (np.diff(facts.grid) > 0).all() and 0.0 in facts.grid


def test_the_curve_of_gaussian_noise_is_below_the_exact_one():
    for relation, sigma in (("remove", 2.0), ("replace_one", 1.0)):
        facts = facts_of(jaxdp.Gaussian(2.0), relation)
        for rate in np.linspace(0.01, 0.99, 33):
            quantile = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(rate))
            exact = float(mpmath.ncdf(quantile - 1 / mpmath.mpf(sigma)))
            assert exact - 2e-3 <= facts.missed(rate) <= exact


@pytest.mark.parametrize(
    ("relation", "said", "both"),
    [
        ("replace_one", "D′ is D with one person's record replaced by any other", True),
        ("add_or_remove", "D′ is D with one person's record added, or with one removed", True),
        ("add", "D′ is D with one more person's record", False),
        ("remove", "D′ is D without one person's record", False),
    ],
)
def test_the_guarantee_is_said_for_the_relation(relation, said, both):
    page = words(jaxdp.report(jaxdp.Gaussian(2.0), delta=1e-6, relation=relation))
    assert said in page
    assert ("the statement holds in both orders" in page) == both
    assert ("for this order of D and D′ only" in page) == (not both)


def test_the_formula_of_remove_is_that_of_a_pair_with_the_record_first():
    # p is the law with the record. Its second outcome is impossible without it: delta is 0.5 for remove, 0 for add.
    pair = jaxdp.DiscretePair([0.5, 0.5], [1.0, 0.0])
    rows = {r: tables(jaxdp.report(pair, epsilon=0.7, relation=r))[0][1] for r in ("add", "remove")}
    assert float(rows["remove"][2]) == pytest.approx(0.5, rel=1e-8)
    assert float(rows["add"][2]) <= 1e-12


@pytest.mark.parametrize(
    ("mechanism", "relation", "targets"),
    [
        (jaxdp.Gaussian(2.0), "replace_one", {"delta": 1e-5}),
        (jaxdp.Gaussian(2.0), "add", {"delta": DELTAS}),
        (jaxdp.Laplace(3.0), "replace_one", {"epsilon": [0.1]}),
        (jaxdp.diffusion.BrownianMotion(1.0), "add_or_remove", {"delta": 1e-5}),
    ],
)
def test_the_call_on_the_page_computes_its_numbers_again(mechanism, relation, targets):
    page = jaxdp.report(mechanism, relation=relation, **targets)
    code = html.unescape(re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)[1])
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    assert names["mechanism"] == mechanism
    digits = [eval(text) for text in re.findall(r"<li>(?:lower|upper): <code>(.*?)</code>", page)]
    again = eval(printed.getvalue(), {"Bounds": jaxdp.Bounds, "np": np, "array": np.array})
    for now, then in zip(again, digits, strict=True):
        np.testing.assert_allclose(now, then, rtol=1e-6)  # printed arrays have eight digits
    assert re.findall(r"<h2>.*?</h2>", names["page"]) == re.findall(r"<h2>.*?</h2>", page)


@pytest.fixture
def short_profile(monkeypatch):
    """Nine points of the privacy profile, which NumPy computes quickly: for tests that read only words of the page."""
    monkeypatch.setattr(sys.modules[Facts.__module__], "_POINTS", 9)


def test_versions_and_assumptions_are_there(short_profile):
    seen = words(jaxdp.report(jaxdp.Shuffled(jaxdp.RandomizedResponse(1.0, 4), 1000), delta=1e-6))
    for each in (f"jaxdp {jaxdp.__version__}", f"jax {jax.__version__}", f"numpy {np.__version__}", "backend cpu"):
        assert each in seen
    assert "Shuffled: one value is replaced; n is fixed and public" in seen
    assert "Theorem behind the upper bounds of shuffling: blanket." in seen
    assert "not peer reviewed" not in seen
    stronger = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 1000, "stronger")
    assert "not peer reviewed" in words(jaxdp.report(stronger, delta=1e-6))


@pytest.mark.parametrize(
    ("mechanism", "targets", "void"),
    [
        (jaxdp.Gaussian(1.0), {"delta": 0.0}, True),
        (jaxdp.ApproximateDP(1.0, 1.0), {"epsilon": 2.0}, True),
        (jaxdp.Gaussian(1e-3), {"delta": 1e-6}, False),
        (jaxdp.Gaussian(1.0), {"epsilon": 1000.0}, False),
        (jaxdp.Gaussian(1e6), {"epsilon": 0.0}, False),
        (jaxdp.compose(), {"delta": [0.0, 1e-6]}, False),
        (jaxdp.PureDP(0.5), {"delta": 0.0}, False),
    ],
)
def test_pages_at_the_edges_say_what_holds_and_hold_no_nan(mechanism, targets, void):
    page = jaxdp.report(mechanism, **targets)
    assert "nan" not in page.lower().replace("finance", "") and "inf)" not in page
    assert ("no guarantee: every program meets it" in page) == void
    assert ("In words: " in page) == (not void)


@jaxdp.record
class Angled(jaxdp.Mechanism):
    """<script>alert("a & b")</script>: noise of `x < y`.

    Assumes: <b>nothing</b>.
    """

    x: object = 1.0

    def log_mgf(self, z):
        """K(z) of Gaussian noise with noise multiplier ``x``."""
        return z * (z + 1) / (2 * self.x**2)

    def __repr__(self):
        return "Angled('</pre><script>')"


def test_all_text_from_outside_is_escaped(short_profile):
    page = jaxdp.report(Angled(), delta=1e-5)
    assert "<script" not in page and "<b>nothing" not in page and page.count("</pre>") == 1
    assert '<script>alert("a & b")</script>' in words(page)


def test_the_page_is_well_formed_loads_nothing_and_runs_nothing():
    page = page_of(facts_of(SGD, "add_or_remove"))
    assert not re.search(r"https?:|src=|href=|<script|<link|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    opened = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "br"):
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

        def handle_startendtag(self, tag, attributes):
            pass

    Reader().feed(page)
    assert opened == []


def test_two_runs_write_the_same_page():
    assert jaxdp.report(jaxdp.Gaussian(2.0), delta=1e-6) == jaxdp.report(jaxdp.Gaussian(2.0), delta=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "arguments", "error", "said"),
    [
        ("gaussian", {"delta": 1e-6}, TypeError, "mechanism must be a jaxdp mechanism"),
        (jaxdp.Gaussian([1.0, 2.0]), {"delta": 1e-6}, ValueError, r"mechanism must be one setting, .* shape \(2,\)"),
        (jaxdp.Gaussian(1.0), {}, ValueError, "give either epsilon or delta, got epsilon=None and delta=None"),
        (jaxdp.Gaussian(1.0), {"delta": 1e-6, "epsilon": 1.0}, ValueError, "give either epsilon or delta, got eps"),
        (jaxdp.Gaussian(1.0), {"delta": 2.0}, ValueError, r"delta must be in \[0, 1\], got 2.0"),
        (jaxdp.Gaussian(1.0), {"delta": []}, ValueError, r"delta must be one number or a list of them, got shape \(0,"),
        (jaxdp.Gaussian(1.0), {"delta": [[0.1]]}, ValueError, r"delta must be one number or a list of them, got shape"),
        (jaxdp.Gaussian(1.0), {"epsilon": -1.0}, ValueError, "epsilon must be finite and >= 0, got -1"),
        (jaxdp.Gaussian(1.0), {"epsilon": np.inf}, ValueError, "epsilon must be finite and >= 0, got inf"),
        (jaxdp.Gaussian(1.0), {"delta": "x"}, TypeError, "delta must be a real number"),
        (jaxdp.Gaussian(1.0), {"delta": 0.1, "relation": "swap"}, ValueError, "relation must be one of"),
        (jaxdp.LocalRandomizer(1.0), {"delta": 0.1, "relation": "add"}, ValueError, "no theorem is known"),
    ],
)
def test_bad_input_is_one_line(mechanism, arguments, error, said):
    with refused_in_one_line(error, said):
        jaxdp.report(mechanism, **arguments)


def test_traced_numbers_are_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match="report takes concrete numbers"):
        jax.eval_shape(lambda s: jnp.float64(len(jaxdp.report(jaxdp.Gaussian(s), delta=1e-6))), 1.0)


def test_numbers_as_text_are_never_on_the_wrong_side():
    rng = np.random.default_rng(0)
    for value in np.concatenate([rng.uniform(0, 20, 300), 10 ** rng.uniform(-300, 300, 300), [1e-5, 1.0, 0.0]]):
        low, high = outward(value, False, 6), outward(value, True, 6)
        assert Fraction(low) <= Fraction(value) <= Fraction(high)
        assert float(high) <= float(low) * (1 + 1.01e-5)
    with mpmath.workdps(60):
        for value in rng.uniform(0, 20, 300):
            text = outward(value, True, 6)
            exact = mpmath.exp(mpmath.mpf(text))
            assert exact <= mpmath.mpf(factor(text)) <= exact * (1 + mpmath.mpf("1.01e-3"))
        assert (factor("0"), factor("1")) == ("1.001", "2.719")
    for value in rng.uniform(0, 1, 300):
        low, high = (Fraction(percent(Fraction(value), up).removesuffix(" %")) / 100 for up in (False, True))
        assert low <= Fraction(value) <= high <= low + Fraction(1, 10**4)
    assert re.sub("<[^>]+>", "|", number("-1.5e-07")) == "|−1.5·10|−7||"
    assert re.sub("<[^>]+>", "", number("inf")) == "∞"


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def screenshot(page, width, folder):
    """Pixels of the page in a headless browser, and what its console said."""
    source, picture = folder / "page.html", folder / "page.png"
    source.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400", f"--screenshot={picture}",
            source.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert picture.exists(), done.stderr[-2000:]
    return matplotlib.image.imread(picture)[..., :3], [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine to look at the page with")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_without_complaint(width, tmp_path):
    pixels, complaints = screenshot(page_of(facts_of(SGD, "add_or_remove")), width, tmp_path)
    assert complaints == []
    assert pixels.shape[1] == width
    marked = (pixels < 0.9).any(axis=-1)
    assert 0.02 < marked.mean() < 0.5
    # something is drawn in every stretch of 240 pixels of height; the margins of 8 pixels at both sides are empty
    assert marked.reshape(10, -1).any(axis=1).all()
    assert not marked[:, :8].any() and not marked[:, -8:].any()
    # pixels in the blue of the mechanism's curve
    assert (np.abs(pixels - np.array([0x1F, 0x5F, 0xA8]) / 255).max(axis=-1) < 0.02).sum() > 500


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine to look at the page with")
def test_a_page_that_loads_something_is_noticed(tmp_path):
    page = jaxdp.report(jaxdp.Gaussian(1.0), delta=1e-6).replace(
        "<h1>", '<img src="https://example.invalid/a.png"><h1>'
    )
    _, complaints = screenshot(page, 390, tmp_path)
    assert any("Content Security Policy" in line for line in complaints)


@pytest.mark.slow
def test_the_profile_does_not_contradict_the_guarantee():
    """At the epsilon certified for delta 1e-8 the profile shows at most 1e-8, although two searches have gaps."""
    plan = jaxdp.compose(
        jaxdp.repeat(jaxdp.Shuffled(jaxdp.LocalRandomizer(0.5), 100_000), 3),
        jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(2.0), 0.01), 10),
    )
    facts = Facts.of(plan, "replace_one", None, 1e-8)
    ((epsilon, delta),) = facts.pairs
    place = np.flatnonzero(facts.grid >= epsilon)[0]
    assert facts.grid[place] <= epsilon * (1 + 1e-8) and facts.profile.upper[place] <= delta
