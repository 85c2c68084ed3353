"""Mechanisms as JSON: records come back equal, a stored file of schema 1 loads, bad text is refused with the reason."""

import json
import pathlib
import subprocess
import sys
from fractions import Fraction

import jax
import numpy as np
import pytest
from test_domains import EXAMPLES, INTERNAL

import jaxdp
from jaxdp import serialization
from jaxdp.cli import main

SAVED = pathlib.Path(__file__).parent / "data" / "mechanisms_schema_1.json"
MORE = (
    jaxdp.FiniteRandomizer(np.array([[0.75, 0.25], [0.25, 0.75]])),
    jaxdp.Gaussian(np.array([[0.1, 1 / 3], [1e-300, np.inf]])),
    jaxdp.Gaussian(np.zeros((0, 3))),
    jaxdp.Gaussian(np.float32(0.1)),
    jaxdp.Gaussian(np.nan),
    jaxdp.compose(),
    jaxdp.compose(jaxdp.Gaussian(1.0)),
    jaxdp.SubsetSelection(1.0, 10),
    jaxdp.UnaryEncoding(1.0, 4, optimized=False),
    jaxdp.Shuffled(jaxdp.RandomizedResponse(np.array([1.0, 2.0]), 7), 10**9, bound="blanket"),
    jaxdp.compose(  # a plan of two training phases
        jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), 0.01), 1000),
        jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(2.0), 0.02), 500),
    ),
)
ALL = (*(example for example, _ in EXAMPLES.values()), *MORE)


def test_every_public_record_is_known_by_a_name_of_its_own():
    known = serialization.records_by_name()
    assert set(EXAMPLES) <= set(known.values()) and set(INTERNAL) <= set(known.values())
    classes = [jaxdp.Mechanism]
    for cls in classes:
        classes += cls.__subclasses__()
    records = {cls for cls in classes if "__dataclass_fields__" in vars(cls)}
    names = [cls.__name__ for cls in records if cls.__module__.startswith("jaxdp.")]
    assert sorted(names) == sorted(known)


@pytest.mark.parametrize("mechanism", ALL, ids=lambda m: type(m).__name__)
def test_a_mechanism_comes_back_equal_and_as_the_same_text(mechanism):
    text = jaxdp.to_json(mechanism)
    back = jaxdp.from_json(text)
    assert back == mechanism and hash(back) == hash(mechanism)
    assert jaxdp.to_json(back) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_files_of_this_release_load():
    saved = json.loads(SAVED.read_text())
    assert len(saved) >= 25
    for expression, text in saved.items():
        assert repr(jaxdp.from_json(text)) == expression


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-5], "not JSON"),
        (lambda text: "[]", "schema number"),
        (lambda text: text.replace('"jaxdp": 1', '"jaxdp": 2'), "schema number .* must be in 1..1, got 2"),
        (lambda text: text.replace('"jaxdp": 1', '"jaxdp": true'), "schema number"),
        (lambda text: text.replace("Gaussian", "Gausian"), "unknown class 'Gausian'; known: .*Gaussian"),
        (lambda text: text.replace("noise_multiplier", "sigma"), "unknown field 'sigma', missing field"),
        (
            lambda text: text.replace("2.0", '"two"'),
            "noise_multiplier must be a number, 'inf', '-inf', 'nan'; got 'two'",
        ),
        (lambda text: text.replace("2.0", "[[1.0], [1.0, 2.0]]"), "every row as long as the others"),
        (lambda text: '{"jaxdp": 1, "mechanism": 3}', "must be an object"),
        (lambda text: '{"jaxdp": 1, "mechanism": {"class": "Composed", "parts": [5]}}', "must be a list of objects"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: text.replace("2.0", '{"empty": [1000000000000]}'), 'noise_multiplier: "empty" must be a shape'),
        (lambda text: text.replace("2.0", '{"empty": "0"}'), 'noise_multiplier: "empty" must be a shape'),
        (lambda text: text.replace("2.0", "{}"), "unknown class None"),
    ],
)
def test_text_that_is_no_mechanism_is_refused_with_the_reason(change, said):
    with pytest.raises(ValueError, match=said):
        jaxdp.from_json(change(jaxdp.to_json(jaxdp.Gaussian(2.0))))


def test_what_cannot_be_written_is_refused():
    @jaxdp.record
    class Own(jaxdp.Mechanism):
        """A user's own."""

    with pytest.raises(TypeError, match="mechanism must be of a class of jaxdp, got Own"):
        jaxdp.to_json(Own())
    with pytest.raises(TypeError, match="must be a jaxdp mechanism"):
        jaxdp.to_json(2.0)
    with pytest.raises(TypeError, match="text must be a string, got int"):
        jaxdp.from_json(3)
    with pytest.raises(TypeError, match="traced"):
        jax.eval_shape(lambda s: jaxdp.to_json(jaxdp.Gaussian(s)), 1.0)


def test_the_command_line_accounts_a_file_and_writes_a_table_with_all_digits(tmp_path, capsys):
    plan, table = tmp_path / "plan.json", tmp_path / "tables" / "epsilon.csv"
    plan.write_text(jaxdp.to_json(jaxdp.repeat(jaxdp.Gaussian(np.array([2.0, 4.0])), 10)))
    assert main(["epsilon", "--from", str(plan), "--delta", "1e-5,1e-6", "--out", str(table), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    expected = jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(np.array([2.0, 4.0])), 10), np.array([[1e-5], [1e-6]]))
    assert [row["epsilon"] for row in rows] == expected.ravel().tolist()
    lines = table.read_text().splitlines()
    assert (
        lines[0] == "index,relation,delta,lower,epsilon"
        and [float(line.split(",")[4]) for line in lines[1:]] == expected.ravel().tolist()
    )


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["epsilon"], "give a MECHANISM"),
        (["epsilon", "--delta", "1e-5"], "give a MECHANISM"),
        (["delta", "--from", "none.json"], "give --from FILE.json and --epsilon"),
    ],
)
def test_the_command_line_says_what_is_missing(given, missing, capsys):
    assert main(given) == 2
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize(
    "before",
    [["--relation", "replace_one"], ["--delta", "1e-6"], ["--json"], ["--out", "x.csv"]],
)
def test_an_option_before_the_mechanism_is_refused_and_not_forgotten(before, capsys):
    assert main(["epsilon", *before, "gaussian", "--sigma", "1", "--delta", "1e-5"]) == 2
    assert f"{before[0]} must come after gaussian" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--from plan.json gaussian --sigma 1", "gaussian --sigma 1 --from=plan.json"])
def test_a_mechanism_and_a_file_exclude_each_other(words, capsys):
    assert main(["epsilon", *words.split(), "--delta", "1e-5"]) == 2
    assert "give a MECHANISM or --from FILE.json, got both" in capsys.readouterr().err


def test_a_file_is_accounted_under_the_relation_that_was_asked_for(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(jaxdp.to_json(jaxdp.Gaussian(1.0)))
    assert main(["epsilon", "--from", str(plan), "--delta", "1e-5", "--relation", "replace_one", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["epsilon"] == jaxdp.epsilon(jaxdp.Gaussian(1.0), 1e-5, relation="replace_one")


def test_a_table_that_is_not_csv_is_refused_before_anything_is_computed(tmp_path, capsys):
    for arguments in (["gaussian", "--sigma", "1"], ["--from", "none.json"]):
        assert main(["epsilon", *arguments, "--delta", "1e-5", "--out", str(tmp_path / "x.txt")]) == 2
        assert "must be a file that ends in .csv" in capsys.readouterr().err


def test_a_file_that_is_not_there_or_no_mechanism_is_one_sentence(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.json", "none.json"):
        assert main(["epsilon", "--from", str(tmp_path / name), "--delta", "1e-5"]) == 2
        assert capsys.readouterr().err.startswith("jaxdp: error: ")


def test_a_name_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match="each name once in an object, got 'noise_multiplier' twice"):
        jaxdp.from_json(
            '{"jaxdp": 1, "mechanism": {"class": "Gaussian", "noise_multiplier": 2.0, "noise_multiplier": 200.0}}'
        )


def test_a_fraction_is_written_as_the_number_that_verbs_compute_with():
    kept = jaxdp.from_json(jaxdp.to_json(jaxdp.Gaussian(Fraction(1, 3))))
    assert kept == jaxdp.Gaussian(1 / 3)


def test_an_extended_float_is_written_as_the_number_that_verbs_compute_with():
    given = jaxdp.Gaussian(np.array([1, 2], np.longdouble) / 3)
    assert jaxdp.from_json(jaxdp.to_json(given)) == jaxdp.Gaussian(np.array([1 / 3, 2 / 3]))
    assert jaxdp.from_json(jaxdp.to_json(jaxdp.Gaussian(np.longdouble(1) / 3))) == jaxdp.Gaussian(1 / 3)


def test_text_of_a_mechanism_that_is_loaded_needs_no_other_module():
    code = (
        "import sys, jaxdp; m = jaxdp.repeat(jaxdp.Gaussian(2.0), 3);"
        "assert jaxdp.from_json(jaxdp.to_json(m)) == m; print('dp_accounting' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
