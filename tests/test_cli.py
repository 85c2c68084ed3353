"""The command line prints what the verbs return; bad input is answered by one sentence and an exit status."""

import functools
import json
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import tqdm
import xarray

import jaxdp
from jaxdp import cli
from jaxdp.cli import main
from jaxdp.cli.mechanisms import MECHANISMS, RANDOMIZERS, axes_of, chosen
from jaxdp.cli.text import parse_range
from jaxdp.runtime import precision


def run(capsys, *arguments):
    status = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def records(capsys, *arguments):
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_epsilon_prints_the_verb_at_every_combination(capsys):
    rows = records(capsys, "epsilon", "gaussian", "--sigma", "1:3:3", "--delta", "1e-5,1e-6")
    assert len(rows) == 6
    for row in rows:
        bounds = jaxdp.epsilon_bounds(jaxdp.Gaussian(row["noise_multiplier"]), row["delta"])
        assert (row["lower"], row["epsilon"]) == pytest.approx(bounds, rel=1e-12)  # another batch may round differently


def test_delta_prints_the_verb_and_steps_compose(capsys):
    (row,) = records(capsys, "delta", "gaussian", "--sigma", 4, "--steps", 16, "--epsilon", 1)
    assert row["delta"] == pytest.approx(jaxdp.delta(jaxdp.Gaussian(1.0), 1.0), rel=1e-12)


@pytest.mark.parametrize(
    ("given", "mechanism"),
    [
        (
            "fixed-size --sigma 2 --q 0.1 --steps 3",
            jaxdp.repeat(jaxdp.FixedSizeSampled(jaxdp.Gaussian(2.0), 0.1), 3),
        ),
        ("allocation --sigma 2 --num-steps 5", jaxdp.RandomAllocation(jaxdp.Gaussian(2.0), 5)),
        (
            "allocation --sigma 9 --num-steps 5 --participations 5 --epochs 2",
            jaxdp.repeat(jaxdp.RandomAllocation(jaxdp.Gaussian(9.0), 5, 5), 2),
        ),
        ("discrete-gaussian --sigma 6 --sensitivity 2", jaxdp.DiscreteGaussian(6.0, 2)),
        ("discrete-laplace --scale 6 --sensitivity 2 --steps 2", jaxdp.repeat(jaxdp.DiscreteLaplace(6.0, 2), 2)),
    ],
)
def test_every_sampling_and_discrete_noise_has_a_name(capsys, given, mechanism):
    (row,) = records(capsys, "epsilon", *given.split(), "--delta", "1e-6")
    assert (row["lower"], row["epsilon"]) == pytest.approx(jaxdp.epsilon_bounds(mechanism, 1e-6), rel=1e-9)


def test_a_printed_bound_is_rounded_outward(capsys):
    for sigma in np.linspace(0.7, 3, 40):
        _, out, _ = run(capsys, "epsilon", "gaussian", "--sigma", repr(float(sigma)), "--delta", "1e-6")
        lower, upper = map(float, out.splitlines()[1].split()[-2:])
        assert lower <= jaxdp.epsilon_bounds(jaxdp.Gaussian(sigma), 1e-6).lower
        assert upper >= jaxdp.epsilon(jaxdp.Gaussian(sigma), 1e-6)


def test_a_printed_bound_holds_at_the_printed_parameters(capsys):
    for given in (("--sigma", "0.5:5:14", "--delta", "1e-5"), ("--sigma", "0.7", "--delta", "1e-9:1e-3:14:log")):
        _, out, _ = run(capsys, "epsilon", "gaussian", *given)
        for row in out.splitlines()[1:]:
            sigma, _, delta, lower, upper = row.split()
            found = jaxdp.epsilon_bounds(jaxdp.Gaussian(float(sigma)), float(delta))
            assert float(lower) <= found.lower and found.upper <= float(upper) * (1 + 1e-15)


def test_an_infinite_epsilon_is_valid_json(capsys):
    (row,) = records(capsys, "epsilon", "gaussian", "--sigma", 1, "--delta", 0)
    assert row["epsilon"] == "inf"


def test_calibrate_prints_a_value_that_meets_the_target_as_printed(capsys):
    arguments = ["calibrate", "gaussian", "--solve-for", "noise-multiplier", "--bracket", "0.1:100"]
    _, out, _ = run(capsys, *arguments, "--epsilon", "1,2", "--delta", 1e-6)
    for target, line in zip((1.0, 2.0), out.splitlines()[1:], strict=True):
        assert jaxdp.epsilon(jaxdp.Gaussian(float(line.split()[-1])), 1e-6) <= target


def test_calibrate_finds_a_whole_number_of_steps(capsys):
    (row,) = records(
        capsys,
        "calibrate",
        "gaussian",
        "--solve-for",
        "steps",
        "--sigma",
        50,
        "--bracket",
        "1:1e6",
        "--epsilon",
        1,
        "--delta",
        1e-6,
    )
    steps = row["steps"]
    at = [jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(50.0), n), 1e-6) for n in (steps, steps + 1)]
    assert at[0] <= 1 < at[1]


@pytest.mark.slow
def test_sweep_writes_the_data_set_the_picture_and_a_short_table(capsys, tmp_path, compiled):
    data, picture = tmp_path / "grid.nc", tmp_path / "grid.png"
    status, out, err = run(
        capsys, "sweep", "gaussian", "--sigma", "1:4:12", "--steps", "1e0:1e4:13:log", "--delta", "1e-6",
        "--out", data, "--plot", picture, "--quiet",
    )  # fmt: skip
    assert status == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "rows; --json or --out give all of them." in out
    assert len(out.splitlines()) < 30
    with xarray.open_dataset(data) as dataset:
        steps = dataset.steps.values
        expected = jaxdp.epsilon(jaxdp.repeat(jaxdp.Gaussian(dataset.noise_multiplier.values[:, None]), steps), 1e-6)
        np.testing.assert_array_equal(dataset.epsilon.squeeze("delta"), expected)
        assert dataset.epsilon.dims == ("noise_multiplier", "steps", "delta")


def test_plot_draws_a_written_data_set(capsys, tmp_path):
    data, picture = tmp_path / "grid.zarr", tmp_path / "again.png"
    run(capsys, "sweep", "gaussian", "--sigma", "1:4:5", "--delta", "1e-6,1e-9", "--out", data, "--quiet")
    status, _, err = run(capsys, "plot", data, "--out", picture)
    assert status == 0, err
    assert picture.stat().st_size > 5000


def test_the_shuffle_sweep_of_the_readme_gives_the_certified_bound_of_each_theorem(capsys, tmp_path):
    data = tmp_path / "sweep.nc"
    status, _, err = run(
        capsys, "sweep", "shuffle", "--eps0", "0.1:8:2", "--num-users", "1e3:1e9:3:log", "--delta", "1e-6",
        "--bound", "clones,stronger", "--out", data, "--plot", tmp_path / "sweep.png", "--quiet",
    )  # fmt: skip
    assert status == 0, err
    with xarray.open_dataset(data) as dataset:
        assert (dataset.attrs["randomizer"], dataset.attrs["bound"]) == ("LocalRandomizer", "clones, stronger")
        assert dataset.epsilon.sizes == {"eps0": 2, "num_users": 3, "delta": 1, "bound": 2}
        np.testing.assert_array_equal(dataset.num_users, [1e3, 1e6, 1e9])
        eps0, users = np.meshgrid(dataset.eps0, dataset.num_users, indexing="ij")
        for bound in ("clones", "stronger"):
            mechanism = jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users, bound)
            found = dataset.epsilon.sel(bound=bound, delta=1e-6)
            np.testing.assert_allclose(found, jaxdp.epsilon(mechanism, 1e-6), rtol=1e-12)
        assert (dataset.epsilon.sel(bound="stronger") <= dataset.epsilon.sel(bound="clones")).all()


NAMED = [
    ("krr --k 5", lambda e: jaxdp.RandomizedResponse(e, 5.0)),
    ("unary --k 5", lambda e: jaxdp.UnaryEncoding(e, 5.0)),
    ("symmetric-unary --k 5", lambda e: jaxdp.UnaryEncoding(e, 5.0, optimized=False)),
    ("subset --k 5", lambda e: jaxdp.SubsetSelection(e, 5.0)),
    ("subset --k 5 --subset-size 3", lambda e: jaxdp.SubsetSelection(e, 5.0, 3.0)),
    ("hashing", lambda e: jaxdp.LocalHashing(e)),
    ("hashing --g 7 --collision-probability 0.1", lambda e: jaxdp.LocalHashing(e, 7.0, 0.1)),
    ("binary-hashing", lambda e: jaxdp.LocalHashing(e, 2.0)),
    ("hadamard", jaxdp.HadamardResponse),
    ("laplace", jaxdp.LocalLaplace),
]


@pytest.mark.parametrize(("given", "randomizer"), NAMED, ids=[given for given, _ in NAMED])
def test_a_named_randomizer_is_accounted_by_its_blanket(capsys, given, randomizer):
    arguments = f"epsilon shuffle --eps0 1 --num-users 1e6 --delta 1e-6 --randomizer {given}".split()
    (row,) = records(capsys, *arguments)
    bounds = jaxdp.epsilon_bounds(jaxdp.Shuffled(randomizer(1.0), 10**6), 1e-6)
    assert (row["lower"], row["epsilon"]) == pytest.approx(bounds, rel=1e-9)
    assert (row["randomizer"], row["bound"]) == (given.split()[0], "blanket")


def test_the_names_tested_are_all_randomizers():
    assert {given.split()[0] for given, _ in NAMED} == set(RANDOMIZERS) - {"local"}


def test_the_bound_and_the_randomizer_in_use_are_printed(capsys):
    status, out, err = run(capsys, *"epsilon shuffle --eps0 1 --n 1e5 --delta 1e-6 --bound clones,stronger".split())
    assert status == 0, err
    head, *rows = (line.split() for line in out.splitlines())
    places = head.index("randomizer"), head.index("bound")
    assert [[row[i] for i in places] for row in rows] == [["local", "clones"], ["local", "stronger"]]


@pytest.mark.parametrize(
    ("given", "randomizer", "bound"),
    [
        ("", ["local"], ["clones"]),
        ("--bound blanket", ["krr"], ["blanket"]),
        ("--bound clones,blanket", ["krr"], ["clones", "blanket"]),
        ("--randomizer krr", ["krr"], ["blanket"]),
        ("--randomizer krr,laplace", ["krr", "laplace"], ["blanket"]),
        ("--randomizer krr --bound clones", ["krr"], ["clones"]),
        ("--randomizer local,krr --bound clones", ["local", "krr"], ["clones"]),
    ],
)
def test_the_bound_follows_the_randomizer_and_the_blanket_alone_means_randomized_response(given, randomizer, bound):
    arguments = cli.make_parser().parse_args(f"epsilon shuffle --eps0 1 --n 100 --delta 1e-6 {given}".split())
    assert chosen(arguments) == {"randomizer": randomizer, "bound": bound}


@pytest.mark.parametrize("verb", ["epsilon", "sweep", "delta"])
@pytest.mark.parametrize(
    ("option", "randomizer", "users"),
    [
        ("--num-categories 4", "local", "krr or unary or symmetric-unary or subset"),
        ("--delta0 0", "krr", "local"),
        ("--num-categories 4", "hashing,laplace", "krr or unary or symmetric-unary or subset"),
        ("--subset-size 2", "unary", "subset"),
        ("--num-buckets 2", "binary-hashing", "hashing"),
        ("--collision-probability 0.5", "hadamard", "hashing or binary-hashing"),
    ],
)
def test_an_option_that_the_randomizer_does_not_use_is_refused_and_named(capsys, verb, option, randomizer, users):
    target = ["--epsilon", 1] if verb == "delta" else ["--delta", 1e-6]
    given = [verb, "shuffle", "--eps0", 1, "--n", 100, *target, "--randomizer", randomizer, *option.split()]
    status, out, err = run(capsys, *given)
    assert (status, out) == (2, "")
    name = option.split()[0]
    assert f"{name} is not used with --randomizer {randomizer}: leave it out, or ask for --randomizer {users}." in err


def test_an_option_that_one_of_several_randomizers_uses_is_accepted():
    given = "epsilon shuffle --eps0 1 --n 100 --delta 1e-6 --randomizer krr,laplace --k 4".split()
    axes = axes_of(cli.make_parser().parse_args(given))
    assert axes == {"eps0": [1.0], "num_users": [100.0], "num_categories": [4.0]}


def test_a_sweep_over_randomizers_says_which_ones_and_which_bound(capsys, tmp_path):
    data = tmp_path / "named.nc"
    given = "sweep shuffle --randomizer krr,hadamard --eps0 1,2 --n 1e6 --delta 1e-6 --k 16 --quiet --out".split()
    status, out, err = run(capsys, *given, data)
    assert status == 0, err
    assert "hadamard" in out and "blanket" in out
    with xarray.open_dataset(data) as dataset:
        assert dataset.attrs["bound"] == "blanket"
        assert dataset.attrs["randomizer"] == "RandomizedResponse, HadamardResponse"
        found = dataset.epsilon.sel(randomizer="krr").squeeze()
        expected = jaxdp.epsilon(jaxdp.Shuffled(jaxdp.RandomizedResponse(np.array([1.0, 2.0]), 16), 10**6), 1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_solving_for_what_is_given_or_not_used_is_refused(capsys):
    wanted = ["--epsilon", 0.5, "--delta", 1e-6]
    status, _, err = run(capsys, "calibrate", "gaussian", "--sigma", 2, "--solve-for", "sigma", *wanted)
    assert status == 2 and "--noise-multiplier must be left out, because --solve-for names it, got '2'" in err
    given = ["calibrate", "shuffle", "--eps0", 1, "--n", 100, "--bracket", "2:9"]
    status, _, err = run(capsys, *given, "--solve-for", "k", *wanted)
    assert status == 2 and "--num-categories is not used with --randomizer local" in err


@pytest.mark.parametrize("name", ["noise-multiplier", "noise_multiplier", "--noise-multiplier", "sigma", "--sigma"])
def test_solve_for_takes_every_name_of_an_option_and_needs_no_bracket(capsys, name):
    (row,) = records(capsys, "calibrate", "gaussian", f"--solve-for={name}", "--epsilon", 1, "--delta", 1e-6)
    assert row["noise_multiplier"] == pytest.approx(4.22467889, rel=1e-8)  # exact: see test_calibration.py


def test_every_alias_of_every_option_is_a_name_for_solve_for(capsys):
    for mechanism, entry in MECHANISMS.items():
        for option in entry.options:
            for alias in option.aliases:
                given = ["calibrate", mechanism, f"--solve-for={alias}", "--epsilon", 1, "--delta", 1e-6]
                others = [o for o in entry.options if o.default is None and o is not option]
                needed = [text for o in others for text in (o.flag, "1")]
                status, _, err = run(capsys, *given, *needed, alias, "1")
                assert status == 2 and f"{option.flag} must be left out" in err


def test_folders_of_the_output_are_made(capsys, tmp_path):
    data, picture, again = (tmp_path / name for name in ("a/b/grid.nc", "c/grid.png", "d/e/again.png"))
    status, _, err = run(
        capsys, "sweep", "gaussian", "--sigma", "1:4:4", "--delta", "1e-6", "--out", data, "--plot", picture, "--quiet"
    )
    assert status == 0, err
    status, _, err = run(capsys, "plot", data, "--out", again)
    assert status == 0, err
    assert data.stat().st_size > 0 and picture.stat().st_size > 0 and again.stat().st_size > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.5", [0.5]), ("1,3,2", [1, 3, 2]), ("0:1:3", [0, 0.5, 1]), ("1:100:3:log", [1, 10, 100]), ("5:9:1", [5]),
     ("1,2:4:3", [1, 2, 3, 4]), ("1e-300:1:2:log", [1e-300, 1]), ("inf", [np.inf])],
)  # fmt: skip
def test_ranges_are_linear_logarithmic_or_lists(text, expected):
    np.testing.assert_allclose(parse_range("x", text), expected, rtol=1e-15)


def test_whole_ranges_are_rounded_and_distinct_but_lists_are_left_as_typed():
    np.testing.assert_array_equal(parse_range("n", "1:4:20:log", whole=True), [1, 2, 3, 4])
    np.testing.assert_array_equal(parse_range("n", "3,1.5", whole=True), [3, 1.5])
    np.testing.assert_array_equal(parse_range("n", "1:3:2,2.5", whole=True), [1, 2.5, 3])  # it is refused later


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'', which is not a number"),
        ("1%", "'1%', which is not a number"),
        ("1/0", "'1/0', which is not a number"),
        ("1:2", "x must be START:STOP:COUNT or START:STOP:COUNT:log where it is a range, got '1:2'"),
        ("1:2:3:lin", "x must be START:STOP:COUNT or START:STOP:COUNT:log"),
        ("1:2:3:log:4", "x must be START:STOP:COUNT or START:STOP:COUNT:log"),
        ("1:2:0", "x must have a COUNT of 1..10000000, a whole number, got '1:2:0'"),
        ("1:2:2.5", "x must have a COUNT"),
        ("1:2:99999999999", "x must have a COUNT"),
        ("1:inf:3", "x must have finite ends"),
        ("0:1:3:log", "x must have ends above 0 to be spaced by its logarithm"),
    ],
)
def test_a_malformed_range_is_a_sentence(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_range("x", text)


def test_a_quotient_is_a_number():
    np.testing.assert_array_equal(parse_range("q", "1/235,1/4:1/2:2"), [1 / 235, 0.25, 0.5])


def test_a_row_says_the_relation_and_the_number_of_categories_that_nobody_typed(capsys):
    (row,) = records(capsys, *"epsilon shuffle --randomizer krr --eps0 1 --n 1e5 --delta 1e-8".split())
    assert (row["relation"], row["num_categories"]) == ("replace_one", 2.0)
    (row,) = records(capsys, *"delta dpsgd --sigma 1 --q 1/100 --epsilon 2 --relation add".split())
    assert row["relation"] == "add"
    (row,) = records(capsys, *"calibrate gaussian --solve-for sigma --epsilon 1 --delta 1e-5".split())
    assert row["relation"] == "add_or_remove"


@pytest.mark.parametrize("name", ["OUE", "unary"])
def test_a_randomizer_may_have_the_name_that_the_field_gives_it(capsys, name):
    (row,) = records(capsys, *f"epsilon shuffle --randomizer {name} --eps0 1 --n 1e5 --delta 1e-8".split())
    assert row["randomizer"] == "unary"


def test_a_result_at_an_end_of_the_bracket_is_said_to_be_one(capsys):
    given = "calibrate gaussian --solve-for sigma --epsilon 1 --delta 1e-5 --bracket".split()
    status, out, err = run(capsys, *given, "50:100")
    assert status == 0 and out.split()[-1] == "50" and "every value between its ends meets the target" in err
    assert run(capsys, *given, "1:100")[2] == ""


def test_targets_out_of_reach_are_nan_where_that_is_asked_for(capsys):
    given = "calibrate gaussian --solve-for sigma --epsilon 0.1,1 --delta 1e-5 --bracket 1:4".split()
    status, _, err = run(capsys, *given)
    assert status == 2 and 'unreachable="nan"' in err
    far, near = records(capsys, *given, "--unreachable", "nan")
    assert far["noise_multiplier"] == "nan" and near["noise_multiplier"] == pytest.approx(3.73063, rel=1e-5)


def test_an_option_is_read_with_underscores_and_an_unknown_one_named(capsys):
    status, out, err = run(capsys, *"epsilon gaussian --noise_multiplier 1 --delta 1e-5".split())
    assert status == 0
    status, out, err = run(capsys, *"epsilon gaussian --sigma 1 --delta 1e-5 --typo 2".split())
    assert status == 2 and "jaxdp epsilon gaussian has no option --typo: see jaxdp epsilon gaussian --help." in err


def test_an_option_under_two_of_its_names_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(capsys, *"epsilon gaussian --sigma 1 --steps 100 --times 3 --delta 1e-5".split())
    assert "--steps/--times/--rounds: must be given once, got '100' and '3'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("epsilon gaussian --sigma -1 --delta 1e-6", "noise_multiplier must be finite and > 0, got -1"),
        ("epsilon gaussian --sigma 1 --delta 2", "delta must be in [0, 1], got 2"),
        ("epsilon gaussian --sigma nan --delta 1e-6", "noise_multiplier must be finite and > 0, got nan"),
        ("epsilon gaussian --sigma 1 --steps 1.5 --delta 1e-6", "times must be a whole number"),
        ("epsilon shuffle --eps0 1 --n 10 --delta 1e-6 --bound best", "bound must be one of 'clones'"),
        ("epsilon shuffle --eps0 1 --n 10 --delta 1e-6 --randomizer kr", "randomizer must be one of 'local', 'krr'"),
        ("epsilon shuffle --eps0 1 --n 10 --delta 1e-6 --randomizer local,krr", "--bound must be given if"),
        ("epsilon shuffle --eps0 1 --n 10 --delta 1e-6 --randomizer local --bound blanket", "needs a named"),
        ("epsilon shuffle --eps0 1 --n 10 --delta 1e-6 --randomizer krr --k 1", "num_categories must be"),
        ("epsilon shuffle --eps0 1 --n 9 --delta 1e-6 --randomizer subset --k 3 --w 3", "num_categories - subset_size"),
        ("calibrate gaussian --solve-for sigmas --bracket 1:2 --epsilon 1 --delta 1e-6", "solve-for must be one of"),
        (
            "calibrate gaussian --solve-for steps --bracket 1:2 --epsilon 1 --delta 1e-6",
            "--noise-multiplier must be given",
        ),
        ("calibrate gaussian --solve-for noise-multiplier --bracket 1 --epsilon 1 --delta 1e-6", "bracket must be"),
        ("calibrate gaussian --solve-for noise-multiplier --bracket .1:.2 --epsilon 1 --delta 1e-6", "reachable"),
        (
            "sweep gaussian --sigma 1 --delta 1e-6 --out x.csv",
            "out must be a file that ends in .nc or .zarr, got 'x.csv'",
        ),
        ("plot nowhere.nc --out x.png", "got 'nowhere.nc': there is no such file"),
        (
            "report gaussian --sigma 1,2 --delta 1e-6 --out x.html",
            "--noise-multiplier must be one value here, got '1,2'",
        ),
        ("report gaussian --sigma 1 --delta 1e-6 --out x.pdf", "out must be a file that ends in .html or .htm, got 'x"),
        ("report --out x.html", "give a MECHANISM (see --help), or --from FILE.json with --out FILE.html and --delta"),
        ("report --delta 1e-6 gaussian --sigma 1 --delta 1e-6 --out x.html", "--delta must come after gaussian"),
        ("epsilon --delta 1e-6 gaussian --sigma 1", "--delta must come after gaussian"),
        (
            "report shuffle --eps0 1 --n 9 --bound clones,stronger --delta 1e-6 --out x.html",
            "--bound must be one value",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments.split())
    assert status == 2
    assert out == ""
    assert message in err and err.startswith("jaxdp: error: ") and len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_python_dash_m_runs_it_and_a_missing_option_is_not_a_traceback():
    done = subprocess.run([sys.executable, "-m", "jaxdp", "epsilon", "gaussian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "required" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_every_mechanism_documents_its_options(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["epsilon", name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(option.flag in text for option in MECHANISMS[name].options)


def test_report_writes_the_page_of_the_python_call(capsys, tmp_path):
    page, plan, again = tmp_path / "pages" / "a.html", tmp_path / "plan.json", tmp_path / "b.html"
    given = f"report gaussian --sigma 2 --steps 3 --delta 1e-5,1e-6 --relation replace_one --out {page}".split()
    status, out, err = run(capsys, *given)
    assert (status, out, err) == (0, "", f"written: {page}\n")
    mechanism = jaxdp.repeat(jaxdp.Gaussian(2.0), 3)
    expected = jaxdp.report(mechanism, delta=[1e-5, 1e-6], relation="replace_one")
    assert page.read_text(encoding="utf-8") == expected
    plan.write_text(jaxdp.to_json(mechanism))
    given = f"report --from {plan} --delta 1e-5,1e-6 --relation replace_one --out {again}".split()
    assert run(capsys, *given)[0] == 0
    assert again.read_text(encoding="utf-8") == expected


def test_tradeoff_prints_the_verb_rounded_down(capsys):
    given = "tradeoff gaussian --sigma 2 --false-positive-rate 1e-3:0.1:3:log --relation replace_one".split()
    rows = records(capsys, *given)
    rates = [row["false_positive_rate"] for row in rows]
    expected = jaxdp.tradeoff(jaxdp.Gaussian(2.0), rates, relation="replace_one")
    assert [row["false_negative_rate"] for row in rows] == pytest.approx(expected, rel=1e-12)
    _, out, _ = run(capsys, *given)
    shown = [float(line.split()[-1]) for line in out.splitlines()[1:]]
    assert (np.array(shown) <= expected).all() and shown == pytest.approx(expected, rel=1e-8)


def test_tradeoff_of_a_file(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(jaxdp.to_json(jaxdp.Gaussian([1.0, 2.0])))
    rows = records(capsys, "tradeoff", "--from", plan, "--false-positive-rate", "0.1,0.2")
    expected = jaxdp.tradeoff(jaxdp.Gaussian([1.0, 2.0]), [[0.1], [0.2]])
    assert [row["false_negative_rate"] for row in rows] == pytest.approx(expected.ravel(), rel=1e-12)
    assert [row["index"] for row in rows] == ["0", "1", "0", "1"]
    plan.write_text(jaxdp.to_json(jaxdp.Gaussian(np.ones((0, 2)))))
    status, out, err = run(capsys, "epsilon", "--from", plan, "--delta", "0.1")
    assert (status, out) == (2, "") and "--from must be a file with at least one mechanism" in err
    assert "shape (0, 2)" in err


def test_a_wide_gap_is_passed_on(capsys, monkeypatch):
    asked = []
    verb = jaxdp.epsilon_bounds
    monkeypatch.setattr(jaxdp, "epsilon_bounds", lambda *a, **k: asked.append(k["gap"]) or verb(*a, **k))
    records(capsys, *"epsilon gaussian --sigma 1 --delta 1e-6 --gap 1e-2".split())
    assert asked == [1e-2]
    status, _, err = run(capsys, *"delta gaussian --sigma 1 --epsilon 1 --gap 2".split())
    assert status == 2 and "gap must be one number in (0, 1), got 2.0" in err


def test_the_command_line_and_python_print_the_same_digits(capsys):
    given = "epsilon dpsgd --sigma 0.8:1.2:3 --q 0.01 --steps 100 --delta 1e-5,1e-6"
    sigma, delta = map(np.ravel, np.meshgrid(np.linspace(0.8, 1.2, 3), [1e-5, 1e-6], indexing="ij"))
    steps = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(sigma), np.full(6, 0.01)), np.full(6, 100.0))
    with precision.expecting(1):  # both choose NumPy or a program as a new process would
        shell, python = records(capsys, *given.split()), jaxdp.epsilon_bounds(steps, delta)
    assert [(row["lower"], row["epsilon"]) for row in shell] == list(zip(*python, strict=True))


def test_progress_counts_rows_and_changes_no_answer(capsys, monkeypatch):
    # with the usual interval between updates a quick machine shows the end only
    monkeypatch.setattr(tqdm.tqdm, "__init__", functools.partialmethod(tqdm.tqdm.__init__, mininterval=0))
    given = ["epsilon", "gaussian", "--sigma", "1:3:65", "--delta", "1e-6"]  # more rows than one call computes
    status, out, err = run(capsys, *given, "--progress", "--json")
    assert status == 0 and "64/65" in err and "65/65" in err
    for row, quiet in zip(json.loads(out), records(capsys, *given), strict=True):
        assert row.pop("relation") == quiet.pop("relation") and row == pytest.approx(quiet, rel=1e-12)
    given = ["calibrate", "gaussian", "--solve-for", "sigma", "--epsilon", "1:3:3", "--delta", "1e-6"]
    status, out, err = run(capsys, *given, "--progress", "--json")
    assert status == 0 and "3/3" in err
    assert [row["epsilon"] for row in json.loads(out)] == [1.0, 2.0, 3.0]


def test_a_report_counts_the_points_of_the_profile(capsys, tmp_path):
    given = ["report", "gaussian", "--sigma", "2", "--delta", "1e-6", "--out"]
    status, _, err = run(capsys, *given, str(tmp_path / "bar.html"), "--progress")
    assert status == 0 and "34/34" in err
    assert run(capsys, *given, str(tmp_path / "none.html"))[0] == 0
    digits = re.compile(r"\d+\.\d+")  # the curves' digits too, which other batches may round differently
    bar, none = ((tmp_path / name).read_text() for name in ("bar.html", "none.html"))
    assert digits.sub("", bar) == digits.sub("", none)
    assert [float(x) for x in digits.findall(bar)] == pytest.approx([float(x) for x in digits.findall(none)], rel=1e-6)


def test_progress_without_tqdm_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    status, _, err = run(capsys, *"epsilon gaussian --sigma 1 --delta 1e-6 --progress".split())
    assert status == 2 and 'pip install "jaxdp-accounting[sweep]"' in err


def test_help_says_how_infinity_is_written(capsys):
    for command in (["epsilon"], ["tradeoff", "gaussian"], ["report"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert "infinity and NaN as inf, -inf and nan" in " ".join(capsys.readouterr().out.split())


def test_every_numeric_option_takes_a_logarithmic_range(capsys):
    given = "calibrate gaussian --solve-for sigma --steps 10:20:2:log --epsilon 1:2:2:log --delta 1e-6"
    rows = records(capsys, *given.split())
    assert len(rows) == 4 and {row["epsilon"] for row in rows} == {1.0, 2.0}
    rows = records(capsys, *"delta pure --eps0 1:2:2:log --steps 1:2:2:log --epsilon 0.5:1:2:log".split())
    assert len(rows) == 8


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.nc"
    axes = {"sigma": np.linspace(1, 4, 12), "delta": [1e-9, 1e-7, 1e-5], "steps": np.arange(1.0, 13.0)}
    jaxdp.sweep(lambda sigma, delta, steps: sigma + delta + steps, path=path, **axes)
    return path


@pytest.mark.parametrize(
    ("options", "x", "count"),
    [
        (["--x", "steps", "--lines", "delta"], "number of steps", 3),
        (["--x", "delta", "--lines", "steps"], "delta", 12),
        (["--x", "delta", "--lines", "sigma,steps"], "delta", 144),
        (["--x", "sigma"], "noise multiplier", 3),
        (["--lines", "sigma"], "number of steps", 12),
    ],
)
def test_plot_draws_along_the_axis_and_the_lines_that_are_chosen(
    capsys, tmp_path, monkeypatch, grid, options, x, count
):
    drawn = []
    monkeypatch.setattr(cli.grids, "_save", lambda figure, path, size: drawn.append((figure, size)))
    status, _, err = run(capsys, "plot", grid, "--out", tmp_path / "x.png", "--size", "6x4.5", *options)
    assert status == 0, err
    ((figure, size),) = drawn
    assert figure.axes[0].get_xlabel().startswith(x) and len(figure.axes[0].lines) == count
    assert size == (6.0, 4.5)


def test_plot_saves_in_the_size_that_is_asked_for(capsys, tmp_path, grid):
    picture = tmp_path / "x.png"
    status, _, err = run(capsys, "plot", grid, "--x", "sigma", "--size", "6x4", "--out", picture)
    assert status == 0, err
    assert matplotlib.image.imread(picture).shape[:2] == (600, 900)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--x", "time"], "x must be one of 'sigma', 'steps', 'delta', got 'time'"),
        (["--x", "sigma", "--lines", "sigma"], "x must be one of 'steps', 'delta', got 'sigma'"),
        (["--x", "sigma", "--lines", "q"], "got 'q'"),
        (["--size", "6"], "size must be WIDTHxHEIGHT in inches from 1 to 100, such as 6x4, got '6'"),
        (["--size", "0x4"], "size must be WIDTHxHEIGHT in inches from 1 to 100, such as 6x4, got '0x4'"),
    ],
)
def test_a_plot_of_what_is_not_there_is_one_sentence(capsys, tmp_path, grid, options, message):
    status, out, err = run(capsys, "plot", grid, "--out", tmp_path / "x.png", *options)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


BAD_FILES = {
    "corrupt": ('{"jaxdp": 1, "mechanism": ', "plan.json: text must be the JSON of a mechanism"),
    "schema": ('{"jaxdp": 99, "mechanism": {"class": "Gaussian"}}', "plan.json: schema number"),
    "class": ('{"jaxdp": 1, "mechanism": {"class": "Gauss"}}', "plan.json: mechanism: unknown class 'Gauss'"),
    "bytes": (b"\xff\xfe\x00", "plan.json', which is not a text file"),
    "none": (None, "plan.json' (no such file or directory)"),
}


@pytest.mark.parametrize("content, said", BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.parametrize(
    "command", ["epsilon --delta 1e-6", "tradeoff --false-positive-rate 0.1", "report --delta 1e-6"]
)
def test_a_file_that_is_no_mechanism_is_one_sentence_with_its_name(capsys, tmp_path, command, content, said):
    plan, page = tmp_path / "plan.json", tmp_path / "x.html"
    if content is not None:
        plan.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = ["--out", page] if command.startswith("report") else []
    status, out, err = run(capsys, *command.split(), "--from", plan, *out)
    assert (status, out) == (2, "")
    assert said in err and len(err.strip().splitlines()) == 1
    assert not page.exists()


NOTHING_TO_COMPUTE = {
    "epsilon": ("epsilon gaussian --sigma 1 --delta 1e-6 --out", ".csv"),
    "report": ("report gaussian --sigma 1 --delta 1e-6 --out", ".html"),
    "sweep": ("sweep gaussian --sigma 1 --delta 1e-6 --out", ".nc"),
    "sweep --plot": ("sweep gaussian --sigma 1 --delta 1e-6 --plot", ".png"),
    "plot": ("plot grid.nc --out", ".png"),
}


@pytest.mark.parametrize("command, ending", NOTHING_TO_COMPUTE.values(), ids=NOTHING_TO_COMPUTE)
def test_what_cannot_be_written_is_refused_before_anything_is_computed(capsys, tmp_path, monkeypatch, command, ending):
    for module, name in ((jaxdp, "epsilon_bounds"), (jaxdp, "report"), (cli.grids, "sweep")):
        monkeypatch.setattr(module, name, None)
    (tmp_path / "file").write_text("")
    for path, said in (
        (tmp_path / f"x.doc{ending}x", "must be a file that ends in"),
        (tmp_path / "file" / f"x{ending}", "must be in a folder that can be made"),
    ):
        status, out, err = run(capsys, *command.split(), path)
        assert (status, out) == (2, "")
        assert said in err and str(path) in err and len(err.strip().splitlines()) == 1
    if ending != ".nc":  # a folder of this name is in the way of the file
        (tmp_path / f"y{ending}").mkdir()
        status, _, err = run(capsys, *command.split(), tmp_path / f"y{ending}")
        assert status == 2 and "must be a file, got the folder" in err
    monkeypatch.setattr(cli.text.os, "access", lambda *_: False)  # patched, as a superuser may write everywhere
    status, _, err = run(capsys, *command.split(), tmp_path / f"z{ending}")
    assert status == 2 and "is write-protected" in err


@pytest.mark.parametrize("name", ["grid.nc", "grid.zarr", "grid.csv"])
def test_a_data_set_that_sweep_did_not_write_is_one_sentence(capsys, tmp_path, name):
    (tmp_path / name).write_text("nothing")
    status, out, err = run(capsys, "plot", tmp_path / name, "--out", tmp_path / "x.png")
    assert (status, out) == (2, "")
    assert "dataset must be " in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("typed", ["-1,0", "-1/2", "-inf,1", "-1:1:3"])
def test_a_value_may_begin_with_a_minus_sign(capsys, typed):
    rows = records(capsys, *"delta rr --eps0 1 --epsilon".split(), typed)
    assert float(rows[0]["epsilon"]) < 0 and 0 < rows[0]["lower"] <= 1


def test_the_ends_of_a_bracket_may_be_quotients(capsys):
    given = "calibrate dpsgd --solve-for q --sigma 1 --steps 100 --epsilon 1 --delta 1e-5 --bracket"
    (row,) = records(capsys, *given.split(), "0:1/2")
    assert 0.01 < row["sampling_probability"] < 0.1
    assert (
        run(capsys, *given.split(), "0:x")[2]
        == "jaxdp: error: --bracket must be LOW:HIGH, got 'x', which is not a number.\n"
    )
