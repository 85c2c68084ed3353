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
