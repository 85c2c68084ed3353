"""Types of the public signatures: `mypy --strict` accepts what users write and refuses wrong calls."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import jaxdp
from jaxdp import domains, plot

HERE = pathlib.Path(__file__).parent
RIGHT, WRONG = (f"tests/typing/{name}.py" for name in ("right", "wrong"))


@pytest.fixture(scope="module")
def refused(pytestconfig):
    """{file: {line: first error message}} of mypy, run as a user without settings of their own would run it."""
    cache = str(pytestconfig.cache.mkdir("mypy")) if hasattr(pytestconfig, "cache") else os.devnull
    options = ["--strict", "--config-file=tests/typing/mypy.ini", "--follow-imports=silent", f"--cache-dir={cache}"]
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", *options, RIGHT, WRONG],
        capture_output=True, text=True, cwd=HERE.parent, env={**os.environ, "MYPYPATH": "."},
    )  # fmt: skip
    assert answer.returncode in (0, 1), answer.stdout + answer.stderr
    found = {RIGHT: {}, WRONG: {}}
    for file, line, message in re.findall(r"^(.*?):(\d+): error: (.*)$", answer.stdout, re.MULTILINE):
        found[file].setdefault(int(line), message)
    return found


@pytest.mark.slow
def test_what_users_write_is_accepted(refused):
    assert refused[RIGHT] == {}


@pytest.mark.slow
def test_every_wrong_call_is_refused_and_nothing_else(refused):
    lines = (HERE.parent / WRONG).read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("  # error")}
    assert len(wrong) > 60
    assert {number: lines[number - 1] for number in wrong ^ set(refused[WRONG])} == {}


def annotations():
    """(name, annotated types) of every public function, every public record's fields, and their methods."""
    subjects = {**vars(domains), **vars(plot)}
    own = {n: v for n, v in subjects.items() if callable(v) and v.__module__ in (domains.__name__, plot.__name__)}
    for name, value in {**{n: getattr(jaxdp, n) for n in jaxdp.__all__}, **own}.items():
        inside = vars(value).items() if isinstance(value, type) else ()
        for path, each in ((name, value), *((f"{name}.{n}", getattr(v, "__func__", v)) for n, v in inside)):
            if not any(part.startswith("_") for part in path.split(".")):
                yield path, getattr(each, "__annotations__", {}).values()


def test_no_public_signature_says_any():
    found = {name for name, types in annotations() if any(re.search(r"\bAny\b", str(each)) for each in types)}
    # `field` returns Any, as in the standard library, so that it fits a field of any type
    assert found == {"field"}
