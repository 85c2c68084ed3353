"""The rounding unit ULP: its value, and that the package defines it in one file only."""

import pathlib
import re

import jaxdp
from jaxdp.numerics.rounding import ULP

SOURCES = sorted(pathlib.Path(jaxdp.__file__).parent.rglob("*.py"))


def test_the_unit_is_the_largest_relative_error_of_one_rounding():
    assert 1.0 + ULP == 1.0 < 1.0 + 2 * ULP
    assert 1.0 - ULP < 1.0 == 1.0 - ULP / 2


def test_the_unit_is_defined_in_one_file_only():
    own = re.compile(r"^_?ULP\b.*=|2(\.0)?\*\*-5[23]\b|finfo\(.*\)\.eps", re.MULTILINE)
    found = {path.name: own.findall(path.read_text()) for path in SOURCES if own.search(path.read_text())}
    assert set(found) == {"rounding.py"}, found
