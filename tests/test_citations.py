"""Every proof that the sources cite is in the repository, with the section that they name."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROOFS = ROOT / "notebooks" / "proofs"
FOLDERS = ("jaxdp", "tests", "benchmarks")
OWN = pathlib.Path(__file__)  # cites what is not there, to test the search
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != OWN)
NUMBER = r"\d+(?:\.\d+)*"
CITATION = re.compile(rf"notebooks/proofs/(\w+\.md)(?:,? sections? ({NUMBER}(?:(?:,| and|, and) {NUMBER})*))?")


def citations(text):
    """(file, section or None) of every citation in a source text; one may be broken over lines of comment."""
    for name, sections in CITATION.findall(re.sub(r"\s*\n\s*#?\s*", " ", text)):
        yield from ((name, number) for number in re.findall(NUMBER, sections) or [None])


def sections_of(path):
    """Numbers of the headings (## 3. Title) and of the paragraphs that start with one (**3.1 Title** or **3.1**)."""
    return set(re.findall(rf"^(?:##+ |\*\*)({NUMBER})\.?[ *]", path.read_text(), re.MULTILINE))


def resolves(name, section):
    path = PROOFS / name
    return path.exists() and (not section or section in sections_of(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_proof_and_section_cited_is_there(path):
    text = path.read_text()
    assert [citation for citation in citations(text) if not resolves(*citation)] == []
    assert not re.search(r"\bMATH\b", text)


def test_a_citation_of_what_is_not_there_is_found():
    text = '''"""Proof: notebooks/proofs/shuffle.md, sections 1, 3 and
    # 99; notebooks/proofs/other.md, on 12 points. Then notebooks/proofs/contour_certificate.md, section 3.2."""'''
    found = list(citations(text))
    shuffle = [("shuffle.md", number) for number in ("1", "3", "99")]
    assert found == [*shuffle, ("other.md", None), ("contour_certificate.md", "3.2")]
    assert [citation for citation in found if not resolves(*citation)] == [shuffle[2], ("other.md", None)]


def test_every_proof_has_numbered_sections_or_none():
    for path in PROOFS.glob("*.md"):
        headings = re.findall(r"^## .*", path.read_text(), re.MULTILINE)
        numbers = [re.match(r"## (\d+)\. ", heading) for heading in headings]
        assert [int(n.group(1)) if n else heading for n, heading in zip(numbers, headings, strict=True)] == list(
            range(1, len(headings) + 1)
        )
