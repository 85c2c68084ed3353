"""The pages of docs/ print what they say: every Python block runs, and its output is the text block that follows."""

import contextlib
import io
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
PAGES = [page for page in (*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md") if BLOCK.search(page.read_text())]


def mismatches(text):
    """(expected, printed) of each block whose output is not that of the page."""
    names, found = {}, []
    for code, expected in BLOCK.findall(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page", "exec"), names)
        if printed.getvalue() != expected:
            found.append((expected, printed.getvalue()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page):
    assert mismatches(page.read_text()) == []


def test_a_page_that_says_something_else_is_noticed():
    assert mismatches("```python\nprint(0.5)\n```\n\n```text\n0.6\n```") == [("0.6\n", "0.5\n")]


def test_every_task_has_blocks_that_run():
    assert {page.stem for page in PAGES} >= {"quickstart", "shuffle_study", "dpsgd_budget", "training", "last_iterate"}


_TIME = r"([\d.e+-]+)"
_SETTING = rf"\|.*?\|.*?\| {_TIME} \|[^|]*, {_TIME} \|.*?\|[^|]*, {_TIME} \|"  # after the setting's name
# (file of benchmarks/results, pattern of the times in it, page, what the page says of them)
MEASURED = [
    (
        "accountant",
        r"\| 1, 0\.01, 1000, 1e-05 " + _SETTING,
        "README.md",
        "1.828237 (+3e-8), {} ms | 1.828244 (+4e-6), {} ms | 1.838 (+6e-3), {} ms",
    ),
    (
        "accountant",
        r"\| 4, 0\.00033, 10000, 1e-10 " + _SETTING,
        "README.md",
        "0.0445390 (+1e-7), {} ms | 0.0496 (+11%), {} ms | 0.0547 (+23%), {} ms",
    ),
    (
        "accountant",
        rf"jaxdp remove .* in {_TIME} s warm.*\n.* in {_TIME} s; ratio",
        "README.md",
        "19.95599 (+5e-10), {} s | 19.981 (+1e-3), {} s",
    ),
    (
        "accountant",
        rf"jaxdp {_TIME} s warm .*\n.*PLD {_TIME} ms a point",
        "docs/comparison.md",
        "takes jaxdp {} s on one core once compiled; the PLD takes {} ms a point",
    ),
    (
        "accountant",
        rf"Every 16th asked for by itself: {_TIME} ms, at most {_TIME}\.\n",
        "docs/comparison.md",
        "costs jaxdp {} ms once compiled (median of 63, drawn as people have them, on one core; at most {} ms",
    ),
    (
        "shuffle",
        rf"SciPy, all counts \| {_TIME} \|(?:.*\n)*?\| SciPy, .*deviations \| {_TIME} \|(?:.*\n)*?"
        rf"\| apple.*halvings \| {_TIME} \|(?:.*\n)*?\| `epsilon_bounds`, one point alone \| {_TIME} \|",
        "docs/comparison.md",
        "takes {} CPU seconds, a sum over the counts within ten standard deviations {} s, the code of the paper {} s "
        "(apple/ml-shuffling-amplification, steps of 100 counts, ten halvings), and `epsilon_bounds` {} s",
    ),
    (
        "shuffle",
        rf"SciPy, all counts \| {_TIME} \|(?:.*\n)*?\| apple.*halvings \| {_TIME} \|",
        "README.md",
        "0.00433452, {} s | 0.00460 (+6%), {} s |",
    ),
    (
        "allocation",
        rf"\| 1000, 2\.0 \|.*?\|.*?\|.*?\| {_TIME} \|.*?\|.*?\| {_TIME} \|",
        "README.md",
        "with a gap of 2e-10 in {} ms (remove, the larger direction), PLD_accounting 0.0582 to 0.0605 in {} s",
    ),
]


@pytest.mark.parametrize(("results", "pattern", "page", "said"), MEASURED)
def test_times_beside_other_accountants_are_those_of_the_last_benchmark(results, pattern, page, said):
    """To two digits. A benchmark that is run again changes the pages that quote it."""
    measured = re.search(pattern, (DOCS.parent / "benchmarks" / "results" / f"{results}.md").read_text())
    two_digits = [f"{float(f'{float(time):.1e}'):g}" for time in measured.groups()]
    assert said.format(*two_digits) in " ".join((DOCS.parent / page).read_text().split())
